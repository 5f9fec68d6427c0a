//! The step `mlx5`: the bytes of work requests against the vendor's header, and the order of fences,
//! doorbell record and doorbell in what a GPU runs.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::cuda::Toolkit;
use crate::parallel;
use crate::process::{Outcome, cargo, run};

const HEADER: &str = "infiniband/mlx5dv.h";
/// Every store to a doorbell register is preceded by these, in this order.
const ORDER: [&str; 4] = ["fence.acq_rel", "st.relaxed", "fence.acq_rel", "st.mmio.relaxed.sys"];
/// The same where a NIC outside of the GPU reads queues of the host.
const ORDER_OUTSIDE: [&str; 4] =
    ["fence.acq_rel.sys", "st.relaxed.sys", "fence.acq_rel.sys", "st.mmio.relaxed.sys"];
const DEVICE: Source = Source { path: "softnic/driver/device.cu", order: ORDER };
const LINK: Source = Source { path: "softnic/driver/link.cu", order: ORDER_OUTSIDE };
/// Protocols between posters that use memory alone, one kernel each.
const KERNELS: Source = Source { path: "softnic/driver/order.cu", order: ORDER };
/// The fences, acquires, releases, relaxed accesses and barriers of each of these kernels, by the start of their names
/// and in the order of its text. The compiler, which is pinned, lays out branches: another compiler may need other
/// lists. `NIC` stands for the scope that the NIC looks from, which is the second field.
const ORDERINGS: [(&str, &str, &[&str]); 13] = [
    ("poll_one_entry", "sys", POLL_ONE_ENTRY),
    ("poll_one_entry_of_this_gpu", "gpu", POLL_ONE_ENTRY),
    ("poll_a_ring", "sys", POLL_A_RING),
    ("poll_a_ring_of_this_gpu", "gpu", POLL_A_RING),
    ("take_immediate_data", "sys", TAKE_IMMEDIATE),
    ("take_immediate_data_of_this_gpu", "gpu", TAKE_IMMEDIATE),
    ("take_the_turn", "sys", &["ld.acquire.gpu", "ld.acquire.cta"]),
    ("pass_the_turn", "sys", &["st.release.gpu", "st.release.cta"]),
    ("announce_as_the_owner", "sys", ANNOUNCE),
    ("wait_for_commands", "sys", WAIT_FOR_COMMANDS),
    ("post_a_command", "sys", POST_A_COMMAND),
    ("put_by_stores", "sys", &["bar.warp.sync"]),
    ("wait_for_stores", "sys", &["fence.acq_rel.sys"]),
];
const POLL_ONE_ENTRY: &[&str] = &[
    "ld.acquire.gpu",
    // The entry's last word; an error's fields are read behind a fence.
    "ld.relaxed.NIC",
    "fence.acq_rel.NIC",
    "ld.relaxed.NIC",
    "ld.relaxed.NIC",
    // Takes the queue out of service, and notifies the host where counts are apart from it.
    "atom.relaxed.gpu",
    "st.relaxed.sys",
    // Of other opcodes.
    "atom.relaxed.gpu",
    "st.relaxed.sys",
    // Everything that a completion covers comes behind this fence, also for a thread that learns of it from the
    // release at the end.
    "fence.acq_rel.NIC",
    "ld.relaxed.gpu",
    "atom.relaxed.gpu",
    "st.relaxed.sys",
    "red.release.gpu",
];
const POLL_A_RING: &[&str] = &[
    // One thread at a time; the others use its result.
    "atom.acquire.gpu",
    "ld.acquire.gpu",
    "ld.relaxed.gpu",
    "ld.relaxed.gpu",
    "ld.relaxed.NIC",
    "fence.acq_rel.NIC",
    "ld.relaxed.NIC",
    "ld.relaxed.NIC",
    "atom.relaxed.gpu",
    "st.relaxed.sys",
    "atom.relaxed.gpu",
    "st.relaxed.sys",
    // Entries are given back only when they were read.
    "fence.acq_rel.NIC",
    "ld.relaxed.gpu",
    "atom.relaxed.gpu",
    "st.relaxed.sys",
    "st.relaxed.NIC",
    "st.relaxed.gpu",
    "st.release.gpu",
    "st.release.gpu",
];
const TAKE_IMMEDIATE: &[&str] = &[
    // One thread at a time.
    "atom.acquire.gpu",
    "ld.relaxed.gpu",
    "ld.relaxed.gpu",
    "ld.relaxed.gpu",
    // The entry's last word; its other words, and what the peer put, are read behind a fence.
    "ld.relaxed.NIC",
    "fence.acq_rel.NIC",
    // Of an error.
    "ld.relaxed.NIC",
    "ld.relaxed.NIC",
    "st.relaxed.gpu",
    "ld.relaxed.NIC",
    "ld.relaxed.NIC",
    "ld.relaxed.NIC",
    // The entry is given back when it was read, and its receive posted again behind that.
    "fence.acq_rel.NIC",
    "st.relaxed.NIC",
    "fence.acq_rel.NIC",
    "st.relaxed.NIC",
    "st.relaxed.gpu",
    "st.relaxed.gpu",
    // Of another completion than the next one.
    "st.relaxed.gpu",
    "st.release.gpu",
];
const ANNOUNCE: &[&str] = &[
    // Counters that other threads read: before the NIC can complete anything of the group.
    "st.relaxed.gpu",
    "st.relaxed.gpu",
    "st.relaxed.gpu",
    "fence.acq_rel.NIC",
    // If there is a record.
    "st.relaxed.NIC",
    "fence.acq_rel.NIC",
    "st.mmio.relaxed.sys",
];
const WAIT_FOR_COMMANDS: &[&str] = &[
    "ld.acquire.gpu",
    "ld.relaxed.sys",
    "ld.acquire.gpu",
    "ld.relaxed.gpu",
    "ld.relaxed.sys",
    "ld.relaxed.sys",
    // Everything that the proxy's thread did and saw before it reported the end of commands.
    "fence.acq_rel.sys",
    "ld.relaxed.gpu",
    "atom.acquire.gpu",
    "atom.relaxed.gpu",
    "red.release.gpu",
    "atom.acquire.gpu",
    "atom.relaxed.gpu",
    "atom.acquire.gpu",
    "atom.relaxed.gpu",
];
const POST_A_COMMAND: &[&str] = &[
    // Stores of all lanes, and known ends: before anything that relies on them.
    "bar.warp.sync",
    "ld.relaxed.gpu",
    "atom.relaxed.gpu",
    "ld.relaxed.gpu",
    "fence.acq_rel.sys",
    "bar.warp.sync",
    // While there is no room, as above.
    "ld.acquire.gpu",
    "ld.relaxed.sys",
    "ld.acquire.gpu",
    "ld.relaxed.gpu",
    "ld.relaxed.sys",
    "ld.relaxed.sys",
    "fence.acq_rel.sys",
    "ld.relaxed.gpu",
    "atom.acquire.gpu",
    "atom.relaxed.gpu",
    "red.release.gpu",
    "atom.acquire.gpu",
    "atom.relaxed.gpu",
    "atom.acquire.gpu",
    "atom.relaxed.gpu",
    // Then a barrier for each thing that lane 0 hands on.
    "bar.warp.sync",
    "bar.warp.sync",
    "st.relaxed.sys",
    "bar.warp.sync",
];
const CQE: &str = "switchyard/comm/mlx5/cqe.h";
const SEND_QUEUE: &str = "switchyard/comm/mlx5/send_queue.h";
const OWNED_QUEUE: &str = "switchyard/comm/mlx5/owned_queue.h";
const PROXY: &str = "switchyard/comm/proxy.h";
const PUT_GET: &str = "switchyard/comm/put_get.cuh";
const RECEIVE: &str = "switchyard/comm/mlx5/receive.h";
/// Headers with one error each, which no test on a processor can find.
const MUTANTS: [Mutant; 35] = [
    of_kernels("error-read-early", CQE, "fence_acq_rel<kScope>();", 0, ";"),
    of_kernels("completion-without-fence", CQE, "fence_acq_rel<kScope>();", 1, ";"),
    of_kernels("error-of-ring-read-early", CQE, "fence_acq_rel<kScope>();", 2, ";"),
    of_kernels("entries-given-back-early", CQE, "fence_acq_rel<kScope>();", 3, ";"),
    of_kernels("completed-without-release", CQE, "red_max_release(", 0, "red_max_relaxed("),
    of_kernels(
        "ring-without-lock",
        CQE,
        "st_release<Scope::kGpu>(&state.poll_lock",
        0,
        "st_relaxed<Scope::kGpu>(&state.poll_lock",
    ),
    of_kernels(
        "turn-without-acquire",
        SEND_QUEUE,
        "ld_acquire<Scope::kGpu>(turn)",
        0,
        "ld_relaxed<Scope::kGpu>(turn)",
    ),
    of_kernels(
        "turn-without-release",
        SEND_QUEUE,
        "st_release<Scope::kGpu>(turn",
        0,
        "st_relaxed<Scope::kGpu>(turn",
    ),
    of_kernels(
        "owner-announces-before-it-counts",
        OWNED_QUEUE,
        "    st_relaxed<Scope::kGpu>(&state.published, end);
    ring_doorbell<kScope>(qp, end);",
        0,
        "    ring_doorbell<kScope>(qp, end);
    st_relaxed<Scope::kGpu>(&state.published, end);",
    ),
    of_kernels(
        "owner-rings-with-narrow-scope",
        OWNED_QUEUE,
        "ring_doorbell<kScope>(qp, end);",
        0,
        "ring_doorbell<Scope::kGpu>(qp, end);",
    ),
    of_kernels("recycled-without-fence", PROXY, "fence_acq_rel<Scope::kSys>();", 0, ";"),
    of_kernels("command-without-fence", PROXY, "fence_acq_rel<Scope::kSys>();", 1, ";"),
    // An instruction that is there, in the wrong place.
    of_kernels(
        "error-read-before-its-fence",
        CQE,
        "fence_acq_rel<kScope>();
        fail_queue(qp, error_of<kScope>(cqe, tail));",
        0,
        "fail_queue(qp, error_of<kScope>(cqe, tail));
        fence_acq_rel<kScope>();",
    ),
    of_kernels(
        "completion-released-before-its-fence",
        CQE,
        "fence_acq_rel<kScope>();
    if (!is_plausible(qp, completed))
        return known;
    red_max_release(&state.completed, completed);",
        0,
        "if (!is_plausible(qp, completed))
        return known;
    red_max_release(&state.completed, completed);
    fence_acq_rel<kScope>();",
    ),
    of_kernels(
        "entries-given-back-before-their-fence",
        CQE,
        "fence_acq_rel<kScope>();
        if (is_plausible(qp, completed)) {
            st_relaxed<kScope>(at_address<uint32_t>(qp.cq_dbrec) + SY_MLX5_CQ_DBREC_CONSUMER,
                               be32(static_cast<uint32_t>(index & 0xffffff)));",
        0,
        "if (is_plausible(qp, completed)) {
            st_relaxed<kScope>(at_address<uint32_t>(qp.cq_dbrec) + SY_MLX5_CQ_DBREC_CONSUMER,
                               be32(static_cast<uint32_t>(index & 0xffffff)));
            fence_acq_rel<kScope>();",
    ),
    of_kernels(
        "place-in-the-ring-behind-its-release",
        CQE,
        "            st_relaxed<Scope::kGpu>(&state.cq_index, index);
            st_release<Scope::kGpu>(&state.completed, completed);",
        0,
        "            st_release<Scope::kGpu>(&state.completed, completed);
            st_relaxed<Scope::kGpu>(&state.cq_index, index);",
    ),
    of_kernels(
        "room-given-back-before-its-fence",
        PROXY,
        "fence_acq_rel<Scope::kSys>();
            const uint64_t reserved = ld_relaxed<Scope::kGpu>(&state.reserved);",
        0,
        "red_max_release(&state.seen, completed);
            fence_acq_rel<Scope::kSys>();
            const uint64_t reserved = ld_relaxed<Scope::kGpu>(&state.reserved);",
    ),
    of_kernels(
        "reservation-looked-at-before-the-fence",
        PROXY,
        "fence_acq_rel<Scope::kSys>();
            const uint64_t reserved = ld_relaxed<Scope::kGpu>(&state.reserved);",
        0,
        "const uint64_t reserved = ld_relaxed<Scope::kGpu>(&state.reserved);
            fence_acq_rel<Scope::kSys>();",
    ),
    of_kernels(
        "room-looked-at-behind-its-fence",
        PROXY,
        "Group::lead([&] { detail::reserve(lane, num_commands, &reserved); });
    // SYNC POINT command: a command becomes visible after everything that the poster stored, or
    // knew of, before.
    // NOTES: by every lane that stores a command; together they cost as much as one. A wait for room has a fence of
    // its own.
    Group::each_lane(num_commands, [](uint32_t) { fence_acq_rel<Scope::kSys>(); });",
        0,
        "Group::each_lane(num_commands, [](uint32_t) { fence_acq_rel<Scope::kSys>(); });
    Group::lead([&] { detail::reserve(lane, num_commands, &reserved); });",
    ),
    of_kernels(
        "command-before-its-fence",
        PROXY,
        "fence_acq_rel<Scope::kSys>(); });
    const Status status = static_cast<Status>(Group::leader(
        [&] { return uint64_t{detail::wait_room(peer, lane, num_commands, reserved)}; }));
    if (status != SY_PROXY_OK)
        return status;
    const uint64_t base = Group::leader([&] { return reserved.base; });
    Group::each_lane(num_commands, [&](uint32_t lane_idx) {
        detail::store(lane, base + lane_idx, build(lane_idx));",
        0,
        "});
    const Status status = static_cast<Status>(Group::leader(
        [&] { return uint64_t{detail::wait_room(peer, lane, num_commands, reserved)}; }));
    if (status != SY_PROXY_OK)
        return status;
    const uint64_t base = Group::leader([&] { return reserved.base; });
    Group::each_lane(num_commands, [&](uint32_t lane_idx) {
        detail::store(lane, base + lane_idx, build(lane_idx));
        fence_acq_rel<Scope::kSys>();",
    ),
    // The caller names the scope that a NIC looks from.
    of_kernels(
        "fence-of-narrow-scope",
        CQE,
        "fence_acq_rel<kScope>();",
        1,
        "fence_acq_rel<Scope::kGpu>();",
    ),
    of_kernels(
        "fence-of-wide-scope",
        CQE,
        "fence_acq_rel<kScope>();",
        1,
        "fence_acq_rel<Scope::kSys>();",
    ),
    of_kernels(
        "consumer-record-of-wide-scope",
        CQE,
        "st_relaxed<kScope>(at_address<uint32_t>(qp.cq_dbrec)",
        0,
        "st_relaxed<Scope::kSys>(at_address<uint32_t>(qp.cq_dbrec)",
    ),
    of_kernels("immediate-without-fence", RECEIVE, "fence_acq_rel<kScope>();", 0, ";"),
    of_kernels("receive-given-back-early", RECEIVE, "fence_acq_rel<kScope>();", 1, ";"),
    of_kernels("receive-before-room", RECEIVE, "fence_acq_rel<kScope>();", 2, ";"),
    of_kernels(
        "receives-without-release",
        RECEIVE,
        "st_release<Scope::kGpu>(&state.lock",
        0,
        "st_relaxed<Scope::kGpu>(&state.lock",
    ),
    of_kernels(
        "receive-of-wide-scope",
        RECEIVE,
        "st_relaxed<kScope>(at_address<uint32_t>(rq.dbrec)",
        0,
        "st_relaxed<Scope::kSys>(at_address<uint32_t>(rq.dbrec)",
    ),
    of_kernels("lead-without-barrier", "switchyard/comm/mlx5/memory.h", "__syncwarp();", 1, ";"),
    of_kernels("lanes-without-barrier", "switchyard/comm/mlx5/memory.h", "__syncwarp();", 2, ";"),
    of_kernels("stores-without-barrier", PUT_GET, "__syncwarp();", 1, ";"),
    of_kernels("stores-without-fence", PUT_GET, "ptx::fence_acq_rel_sys();", 0, ";"),
    Mutant {
        name: "without-first-fence",
        source: DEVICE,
        header: "switchyard/comm/mlx5/doorbell.h",
        find: "fence_acq_rel<kScope>();",
        nth: 0,
        replace: ";",
    },
    Mutant {
        name: "without-second-fence",
        source: DEVICE,
        header: "switchyard/comm/mlx5/doorbell.h",
        find: "fence_acq_rel<kScope>();",
        nth: 1,
        replace: ";",
    },
    Mutant {
        name: "link-of-narrow-scope",
        source: LINK,
        header: "switchyard/comm/ibgda_link.h",
        find: "kScope = Scope::kSys;",
        nth: 0,
        replace: "kScope = Scope::kGpu;",
    },
];

const fn of_kernels(
    name: &'static str,
    header: &'static str,
    find: &'static str,
    nth: usize,
    replace: &'static str,
) -> Mutant {
    Mutant { name, source: KERNELS, header, find, nth, replace }
}

/// A source file, and the instructions that must precede each of its doorbells.
#[derive(Clone, Copy)]
struct Source {
    path: &'static str,
    order: [&'static str; 4],
}

/// A header in which the `nth` place of a text is replaced.
struct Mutant {
    name: &'static str,
    source: Source,
    header: &'static str,
    find: &'static str,
    nth: usize,
    replace: &'static str,
}

pub(super) fn check() -> Result<Outcome> {
    let order = check_order()?;
    if let Outcome::Failed(_) = order {
        return Ok(order);
    }
    let header = Command::new("cc")
        .args(["-E", "-include", HEADER, "-x", "c", "/dev/null"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    if !header.is_ok_and(|status| status.success()) {
        return Ok(Outcome::Skipped(format!(
            "{HEADER} is missing: install Debian's package `libibverbs-dev`"
        )));
    }
    let features = crate::features::all();
    // Binaries of this name in other crates have no such tests.
    let test = ["test", "-q", "--workspace", "--features", &features, "--test", "it"];
    let mut oracle = cargo(&test);
    oracle.args(["--", "oracle::"]).env("SWITCHYARD_ORACLE_CASES", "50000");
    match run(&mut oracle)? {
        Outcome::Passed => Ok(order),
        other => Ok(other),
    }
}

/// Compiles every device function, and checks in each scope the instructions that a doorbell needs. Headers without a
/// fence must fail here; no test on a processor can find them.
fn check_order() -> Result<Outcome> {
    let toolkit = match Toolkit::find()? {
        Ok(toolkit) => toolkit,
        Err(reason) => return Ok(Outcome::Skipped(reason)),
    };
    let include = Path::new("kernels/include");
    for source in [DEVICE, LINK] {
        let num_doorbells = match doorbells(&ptx(&toolkit, &[include], source)?, source) {
            Ok(num) => num,
            Err(reason) => return Ok(Outcome::Failed(format!("{}: {reason}", source.path))),
        };
        println!(
            "{}: {num_doorbells} doorbells, each behind its record, where there is one, and two fences",
            source.path
        );
    }
    match orderings(&ptx(&toolkit, &[include], KERNELS)?) {
        Ok(num) => println!(
            "{}: {num} instructions order memory, in the order that is meant",
            KERNELS.path
        ),
        Err(reason) => return Ok(Outcome::Failed(format!("{}: {reason}", KERNELS.path))),
    }
    let found = parallel::map(&MUTANTS, |mutant| {
        let overlay = mutant.write(include)?;
        let ptx = ptx(&toolkit, &[&overlay, include], mutant.source)?;
        Ok(if mutant.source.path == KERNELS.path {
            orderings(&ptx)
        } else {
            doorbells(&ptx, mutant.source)
        })
    })?;
    for (mutant, found) in MUTANTS.iter().zip(found) {
        match found {
            Err(reason) => println!("{}: found out: {reason}", mutant.name),
            Ok(_) => return Ok(Outcome::Failed(format!("{} is not noticed", mutant.name))),
        }
    }
    Ok(Outcome::Passed)
}

impl Mutant {
    /// A folder of headers that is searched before the real ones.
    fn write(&self, include: &Path) -> Result<PathBuf> {
        let path = include.join(self.header);
        let text = std::fs::read_to_string(&path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        let Some((at, _)) = text.match_indices(self.find).nth(self.nth) else {
            bail!("{} has no `{}` number {}", path.display(), self.find, self.nth);
        };
        let text = format!("{}{}{}", &text[..at], self.replace, &text[at + self.find.len()..]);
        let overlay = super::target_dir().join("cuda").join(self.name);
        let mutant = overlay.join(self.header);
        if let Some(dir) = mutant.parent() {
            std::fs::create_dir_all(dir)
                .with_context(|| format!("cannot create {}", dir.display()))?;
        }
        std::fs::write(&mutant, text)
            .with_context(|| format!("cannot write {}", mutant.display()))?;
        Ok(overlay)
    }
}

fn ptx(toolkit: &Toolkit, includes: &[&Path], source: Source) -> Result<String> {
    let output = toolkit
        .tool("nvcc")
        .args(["-std=c++17", "-O3", "-arch=compute_90", "-ptx", "-o", "-"])
        .args(includes.iter().map(|include| format!("-I{}", include.display())))
        .arg(source.path)
        .output()
        .context("cannot start nvcc")?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        bail!("nvcc refused {}:\n{errors}", source.path);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Instructions of some PTX, without their predicates.
fn instructions(ptx: &str) -> impl Iterator<Item = &str> {
    ptx.lines().map(str::trim).map(|line| match line.split_once(char::is_whitespace) {
        Some((predicate, rest)) if predicate.starts_with('@') => rest.trim_start(),
        _ => line,
    })
}

/// The number of instructions that order memory in all kernels of [`ORDERINGS`]. The error names a kernel with other
/// instructions, or in another order.
fn orderings(ptx: &str) -> Result<usize, String> {
    let classes = ["fence.", "membar.", "ld.acquire.", "ld.relaxed.", "ld.volatile."]
        .into_iter()
        .chain(["st.release.", "st.relaxed.", "st.volatile.", "st.mmio.", "red.", "atom."])
        .chain(["bar.", "barrier."])
        .collect::<Vec<_>>();
    let mut num_all = 0;
    for (kernel, scope, expected) in ORDERINGS {
        let (_, body) = ptx
            .split_once(&format!(".entry {kernel}("))
            .ok_or_else(|| format!("there is no kernel {kernel}"))?;
        let body = body.split(".entry ").next().unwrap_or_default();
        let is_ordering = |line: &&str| classes.iter().any(|class| line.starts_with(class));
        let found: Vec<&str> = instructions(body).filter(is_ordering).collect();
        let expected: Vec<String> =
            expected.iter().map(|name| name.replace("NIC", scope)).collect();
        let fits = |(found, expected): (&&str, &String)| found.starts_with(expected.as_str());
        if let Some(at) = found.iter().zip(&expected).position(|pair| !fits(pair)) {
            let (found, expected) = (found[at], &expected[at]);
            return Err(format!("{kernel} has `{found}` at place {at}, expected {expected}"));
        }
        if found.len() != expected.len() {
            let (found, expected) = (found.len(), expected.len());
            return Err(format!("{kernel} has {found} that order memory, expected {expected}"));
        }
        num_all += found.len();
    }
    Ok(num_all)
}

/// The number of doorbells. The error names one, and the instruction that it lacks.
fn doorbells(ptx: &str, source: Source) -> Result<usize, String> {
    let is_ordering = |line: &&str| {
        ["fence.", "st.relaxed.", "st.release.", "st.mmio."].iter().any(|op| line.starts_with(op))
    };
    let steps: Vec<&str> = instructions(ptx).filter(is_ordering).collect();
    let mut num_doorbells = 0;
    for (idx, _) in steps.iter().enumerate().filter(|(_, step)| step.starts_with("st.mmio.")) {
        let found = &steps[idx.saturating_sub(3)..=idx];
        let fits = found.len() == source.order.len()
            && found.iter().zip(source.order).all(|(found, expected)| found.starts_with(expected));
        if !fits {
            return Err(format!("a doorbell is reached by {}", found.join(" ")));
        }
        num_doorbells += 1;
    }
    if num_doorbells == 0 { Err("there is no doorbell".to_owned()) } else { Ok(num_doorbells) }
}
