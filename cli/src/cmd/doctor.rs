//! `switchyard doctor`: checks of this host, each with its result and a remedy.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Result;
use checkpoint::{Checkpoint, ConfigError, OpenError};
use control_api::Security;
use control_api::trust::tls::Tls;
use serde::Serialize;

use crate::{Global, host, ui};

mod devices;

/// Options of `doctor`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Checkpoint folder to check as well.
    #[arg(long, env = "SWITCHYARD_MODEL", value_name = "DIR")]
    model: Option<PathBuf>,
    #[command(flatten)]
    control: super::ControlArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Verdict {
    /// Present and usable.
    Ok,
    /// Not present, and optional.
    Absent,
    /// Usable, but slower or less safe than possible.
    Warn,
    /// Every command needs it, and it does not work.
    Fail,
}

#[derive(Debug, Serialize)]
struct Check {
    name: &'static str,
    verdict: Verdict,
    found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
}

#[derive(Debug, Serialize)]
struct Group {
    name: Cow<'static, str>,
    checks: Vec<Check>,
}

pub fn run(global: &Global, args: Args) -> Result<ExitCode> {
    let mut groups = vec![
        Group { name: "host".into(), checks: host_checks() },
        Group { name: "transports".into(), checks: transports() },
        Group { name: "gpu".into(), checks: gpu() },
    ];
    groups.extend(ibgda());
    let missing = devices::checks();
    if !missing.is_empty() {
        groups.push(Group { name: "device files".into(), checks: missing });
    }
    let mut given = Vec::new();
    if let Some(model) = &args.model {
        given.extend(check_model(model));
    }
    given.extend(check_tls(&args.control.tls));
    // Each by itself: a client would only see the first one that answers.
    for url in &args.control.control_plane {
        given.extend(check_control(url, &args.control));
    }
    if !given.is_empty() {
        groups.push(Group { name: "given".into(), checks: given });
    }
    let healthy =
        groups.iter().flat_map(|group| &group.checks).all(|check| check.verdict != Verdict::Fail);
    if global.json {
        ui::print_json(&serde_json::json!({
            "healthy": healthy,
            "version": env!("CARGO_PKG_VERSION"),
            "groups": groups,
        }))?;
    } else {
        out!("{}", tree(&groups));
        outln!(
            "\n{}",
            if healthy {
                "this host can run Switchyard"
            } else {
                "this host cannot run Switchyard yet"
            }
        );
    }
    Ok(if healthy { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn tree(groups: &[Group]) -> String {
    let mut text = format!("switchyard {}\n", env!("CARGO_PKG_VERSION"));
    // Writing to a string does not fail.
    let _ = write_tree(&mut text, groups);
    text
}

fn write_tree(text: &mut String, groups: &[Group]) -> std::fmt::Result {
    let names = groups.iter().flat_map(|group| &group.checks).map(|check| check.name.len());
    let width = names.max().map_or(0, |longest| longest + 1);
    for (group_idx, group) in groups.iter().enumerate() {
        let last_group = group_idx + 1 == groups.len();
        writeln!(text, "{} {}", if last_group { "└─" } else { "├─" }, group.name)?;
        let indent = if last_group { "   " } else { "│  " };
        for (check_idx, check) in group.checks.iter().enumerate() {
            let last = check_idx + 1 == group.checks.len();
            let mark = match check.verdict {
                Verdict::Ok => "✔",
                Verdict::Absent => "·",
                Verdict::Warn => "!",
                Verdict::Fail => "✘",
            };
            let branch = if last { "└─" } else { "├─" };
            writeln!(text, "{indent}{branch} {mark} {:<width$} {}", check.name, check.found)?;
            if let Some(remedy) = &check.remedy {
                let below = if last { "   " } else { "│  " };
                writeln!(text, "{indent}{below}   {:<width$} → {remedy}", "")?;
            }
        }
    }
    Ok(())
}

fn ok(name: &'static str, found: impl Into<String>) -> Check {
    Check { name, verdict: Verdict::Ok, found: found.into(), remedy: None }
}

fn problem(
    name: &'static str,
    verdict: Verdict,
    found: impl Into<String>,
    remedy: impl Into<String>,
) -> Check {
    Check { name, verdict, found: found.into(), remedy: Some(remedy.into()) }
}

fn host_checks() -> Vec<Check> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut checks = vec![ok("kernel", read("/proc/sys/kernel/osrelease"))];
    checks.push(if cores > 1 {
        ok("cpu", format!("{} · {cores} cores{}", cpu_model(), vector_units()))
    } else {
        problem(
            "cpu",
            Verdict::Warn,
            format!("{} · 1 core{}", cpu_model(), vector_units()),
            "client and servers share one core: use a host with two or more",
        )
    });
    checks.push(memory());
    checks.push(shared_memory());
    checks.push(locked_memory());
    checks.push(huge_pages());
    checks.push(descriptors());
    checks.push(match read("/sys/devices/system/clocksource/clocksource0/current_clocksource") {
        source
            if ["tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page"]
                .contains(&source.as_str()) =>
        {
            ok("clock", source)
        }
        source => problem(
            "clock",
            Verdict::Warn,
            format!("clock source {source:?}"),
            "reading the time needs a system call with this clock source: boot with clocksource=tsc",
        ),
    });
    checks
}

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

fn memory() -> Check {
    let Some(memory) = host::memory(Path::new("/")) else {
        return problem("memory", Verdict::Warn, "unknown", "mount /proc");
    };
    let mut found = format!("{} MiB available of {}", memory.available >> 20, gib(memory.total));
    if let Some(limit) = &memory.limit {
        let _ = write!(found, ", the limit of {}", limit.display());
    }
    if memory.available < 512 << 20 {
        let remedy = "the demo needs 512 MiB, and every connection needs two slots";
        problem("memory", Verdict::Warn, found, remedy)
    } else {
        ok("memory", found)
    }
}

/// Size of `/dev/shm`, which caches of libraries and other processes of the host share. Slots do not need it.
fn shared_memory() -> Check {
    match rustix::fs::statvfs("/dev/shm") {
        Ok(stat) => {
            let free = stat.f_bavail * stat.f_frsize;
            let found = format!("{} MiB free in /dev/shm", free >> 20);
            // NCCL of an inference engine on this host asks for this much.
            if free < 64 << 20 {
                problem(
                    "shared memory",
                    Verdict::Warn,
                    found,
                    "engines beside the servers need more: start the container with --shm-size=1g",
                )
            } else {
                ok("shared memory", found)
            }
        }
        Err(error) => problem(
            "shared memory",
            Verdict::Absent,
            format!("no /dev/shm: {error}"),
            "engines beside the servers need it: mount a tmpfs there",
        ),
    }
}

/// Limit on locked memory. RDMA and page-locked memory for GPUs count.
fn locked_memory() -> Check {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    match limit {
        None => ok("locked memory", "no limit"),
        Some(bytes) if bytes >= 1 << 30 => ok("locked memory", format!("at most {}", gib(bytes))),
        Some(bytes) => problem(
            "locked memory",
            Verdict::Absent,
            format!("at most {} KiB", bytes >> 10),
            "RDMA needs more: ulimit -l unlimited, LimitMEMLOCK=infinity or --ulimit memlock=-1",
        ),
    }
}

fn huge_pages() -> Check {
    let free: u64 =
        read("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").parse().unwrap_or(0);
    let shmem = read("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
    let transparent = ["[always]", "[within_size]", "[advise]"].iter().any(|s| shmem.contains(s));
    if free > 0 {
        ok("huge pages", format!("{free} free of 2 MiB"))
    } else if transparent {
        ok("huge pages", format!("transparent for shared memory: {shmem}"))
    } else {
        problem(
            "huge pages",
            Verdict::Absent,
            "none for shared memory; slots use 4 KiB pages",
            "sysctl vm.nr_hugepages=64, or echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        )
    }
}

fn descriptors() -> Check {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    // A connection uses a socket, two event descriptors and, during the handshake, two memory descriptors.
    match limit {
        Some(limit) if limit < 4096 => problem(
            "descriptors",
            Verdict::Warn,
            format!("at most {limit} open files"),
            "enough for a few hundred peers: raise the limit with ulimit -n 65536 or LimitNOFILE=",
        ),
        Some(limit) => ok("descriptors", format!("at most {limit} open files")),
        None => ok("descriptors", "no limit"),
    }
}

fn transports() -> Vec<Check> {
    let slot = p2p_core::SlotLayout::new(p2p_core::SlotConfig::default())
        .map_err(anyhow::Error::from)
        .and_then(|layout| Ok(p2p_core::backend::shm::SharedSlot::create(&layout)?));
    let mut checks = vec![match slot {
        Ok(slot) => ok("shm", format!("sealed memory, {} pages", slot.pages().name())),
        Err(error) => problem(
            "shm",
            Verdict::Fail,
            error.to_string(),
            "needs sealed memfd and event descriptors: Linux 4.14 or newer, and no seccomp filter on memfd_create",
        ),
    }];
    let devices: Vec<String> = std::fs::read_dir("/sys/class/infiniband")
        .map(|entries| {
            entries
                .flatten()
                .map(|entry| entry.file_name().to_string_lossy().into_owned())
                .collect()
        })
        .unwrap_or_default();
    checks.push(rdma(&devices));
    checks.push(libfabric());
    #[cfg(feature = "libfabric")]
    if let Some(reason) = libfabric_transport::refusal("verbs;ofi_rxm")
        && !devices.is_empty()
    {
        let remedy = "optional: the transport `verbs` does not need it";
        checks.push(problem("libfabric over verbs", Verdict::Absent, reason, remedy));
    }
    checks
}

/// RDMA devices that the transport `verbs` can open. `known` are the devices of the kernel.
fn rdma(known: &[String]) -> Check {
    const NONE: &str = "no RDMA device";
    #[cfg(feature = "verbs")]
    {
        let usable = verbs_transport::device_names();
        match (usable.is_empty(), known.is_empty()) {
            (false, _) => ok("rdma", usable.join(", ")),
            (true, false) => problem(
                "rdma",
                Verdict::Warn,
                format!(
                    "the kernel has {}, but libibverbs cannot open any of them",
                    known.join(", ")
                ),
                "apt-get install ibverbs-providers, and give this user access to /dev/infiniband",
            ),
            (true, true) => problem(
                "rdma",
                Verdict::Absent,
                NONE,
                "optional: without it, shared memory and TCP are used. An RDMA card needs its driver and rdma-core",
            ),
        }
    }
    #[cfg(not(feature = "verbs"))]
    match known {
        [] => problem(
            "rdma",
            Verdict::Absent,
            format!("{NONE}, and this build has no transport `verbs`"),
            "optional: without it, shared memory and TCP are used",
        ),
        known => problem(
            "rdma",
            Verdict::Warn,
            format!("{}, but this build has no transport `verbs`", known.join(", ")),
            "build with `--features verbs`",
        ),
    }
}

/// The libfabric library that this program loads.
#[cfg(feature = "libfabric")]
fn libfabric() -> Check {
    use libfabric_transport::{LIBRARY_VARIABLE, providers};
    match providers() {
        Ok(providers) if providers.is_empty() => problem(
            "libfabric",
            Verdict::Absent,
            "it has no provider that supports slots",
            format!(
                "install a libfabric with more providers, or set {LIBRARY_VARIABLE} to its path"
            ),
        ),
        Ok(providers) => ok("libfabric", providers.join(", ")),
        Err(error) => {
            let remedy = format!(
                "apt-get install libfabric1, or set {LIBRARY_VARIABLE} to the path of the library"
            );
            problem("libfabric", Verdict::Absent, error.to_string(), remedy)
        }
    }
}

#[cfg(not(feature = "libfabric"))]
fn libfabric() -> Check {
    problem(
        "libfabric",
        Verdict::Absent,
        "this build has no transport `libfabric`",
        "build with the feature `libfabric`, which is on by default",
    )
}

fn gpu() -> Vec<Check> {
    kernels::probe()
        .lines()
        .into_iter()
        .map(|line| Check {
            name: line.name,
            verdict: if line.usable { Verdict::Ok } else { Verdict::Absent },
            found: line.found,
            remedy: line.remedy,
        })
        .collect()
}

const GPU_INITIATED: &str = "gpu-initiated rdma";

#[cfg(not(feature = "ibgda"))]
fn ibgda() -> Vec<Group> {
    let check = problem(
        "control path",
        Verdict::Absent,
        "this build has no control path for GPU-initiated RDMA",
        "build with the feature `ibgda`, which is on by default",
    );
    vec![Group { name: GPU_INITIATED.into(), checks: vec![check] }]
}

/// GPU-initiated RDMA. It is optional, so missing parts are no failure.
#[cfg(feature = "ibgda")]
fn ibgda() -> Vec<Group> {
    ibgda_groups(ibgda::probe())
}

/// A group for the host, then one for each mlx5 device.
#[cfg(feature = "ibgda")]
fn ibgda_groups(report: ibgda::Report) -> Vec<Group> {
    let check = |check: ibgda::Check| Check {
        name: check.name,
        verdict: match check.state {
            ibgda::State::Present => Verdict::Ok,
            ibgda::State::Partial => Verdict::Warn,
            ibgda::State::Missing => Verdict::Absent,
        },
        found: check.found,
        remedy: check.remedy,
    };
    let group = |name: Cow<'static, str>, checks: Vec<ibgda::Check>| Group {
        name,
        checks: checks.into_iter().map(check).collect(),
    };
    let mut groups = vec![group(GPU_INITIATED.into(), report.checks)];
    groups.extend(report.devices.into_iter().map(|device| {
        let mut of_device =
            group(format!("{GPU_INITIATED}: {}", device.name).into(), device.checks);
        // The checks may all pass, but this path was never run on the hardware.
        of_device.checks.push(problem(
            "run on a ConnectX",
            Verdict::Absent,
            "not yet: tested against software only",
            "ibgda-bring-up tests a pair of hosts as docs/how-to/ibgda-bring-up.md describes",
        ));
        of_device
    }));
    groups
}

/// Checks a checkpoint with the loader of the expert server.
fn check_model(dir: &Path) -> Vec<Check> {
    let checkpoint = match Checkpoint::open(dir) {
        Ok(checkpoint) => checkpoint,
        Err(error) => return vec![unusable(error)],
    };
    if let Err(error) = checkpoint.check_experts() {
        let remedy =
            "the folder must hold every routed expert; `switchyard inspect` lists what it holds";
        return vec![problem("model", Verdict::Fail, error.to_string(), remedy)];
    }
    let config = checkpoint.config();
    let mut found = format!(
        "{} · {} layers · {} experts, top-{} · {:.2} GB in {} shards",
        config.family,
        config.num_layers,
        config.num_experts,
        config.top_k,
        checkpoint.len_bytes() as f64 / 1e9,
        checkpoint.num_shards()
    );
    if let Some(Ok(expert)) = config.moe_layers().first().map(|layer| checkpoint.expert(*layer, 0))
    {
        let _ = write!(found, " · {}", expert.up.format());
    }
    if let Some(quantization) = &config.quantization {
        let _ = write!(found, " ({quantization})");
    }
    let mut checks = vec![ok("model", found)];
    checks.extend(checkpoint.warnings().iter().map(|warning| Check {
        name: "model",
        verdict: Verdict::Warn,
        found: warning.clone(),
        remedy: None,
    }));
    checks
}

/// A folder that cannot be opened, with the next step.
fn unusable(error: OpenError) -> Check {
    let fail = |found: String, remedy: &str| problem("model", Verdict::Fail, found, remedy);
    match error {
        OpenError::NotACheckpoint { path, found, remedy } => {
            fail(format!("{} {found}", path.display()), &remedy)
        }
        OpenError::Config { source: ConfigError::UnknownArchitecture { .. }, .. } => {
            fail(error.to_string(), "give a checkpoint of one of these families")
        }
        OpenError::Config { .. } => {
            fail(error.to_string(), "correct this key, or take the file of the model's publisher")
        }
        OpenError::Read { .. } => fail(error.to_string(), "check the path and its permissions"),
        _ => fail(error.to_string(), "download this file again, it is damaged or not complete"),
    }
}

/// The TLS files that this process would use, and the end of its certificate.
fn check_tls(args: &super::tls::TlsArgs) -> Vec<Check> {
    let mut checks = Vec::new();
    if args.insecure {
        let found = "INSECURE: --insecure (SWITCHYARD_INSECURE) allows plain text to other hosts";
        let remedy = "make certificates with `switchyard certs`, and give --tls DIR instead";
        checks.push(problem("tls", Verdict::Warn, found.to_owned(), remedy));
    }
    match args.security() {
        Ok(Security { tls: Some(tls), .. }) => {
            checks.push(certificate(&tls));
        }
        Ok(Security { tls: None, .. }) => {}
        Err(error) => {
            let remedy = "issue the certificate again with `switchyard certs issue`";
            checks.push(problem("tls", Verdict::Fail, format!("{error:#}"), remedy));
        }
    }
    checks
}

fn certificate(tls: &Tls) -> Check {
    let Some(expires_at) = tls.status().expires_at else {
        return ok("tls", format!("{} · no certificate of its own", tls.files()));
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let days = expires_at.saturating_sub(now) / 86_400;
    let found = format!("{} · {days} days left", tls.files());
    if days >= FEW_DAYS {
        return ok("tls", found);
    }
    let remedy =
        "issue a new certificate with `switchyard certs issue --force`: no restart is needed";
    problem("tls", Verdict::Warn, found, remedy)
}

fn check_control(url: &str, control: &super::ControlArgs) -> Vec<Check> {
    let asked = || -> Result<control_api::ClusterStatus> {
        let client = control.client(url)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(runtime.block_on(client.status())?)
    };
    match asked() {
        Ok(status) => {
            let found =
                format!("{url} · epoch {} · {} serving", status.epoch, status.members.serving);
            let remedy = "give the control plane a certificate: `switchyard certs` makes one";
            let mut checks = vec![ok("control plane", found)];
            checks.extend(insecure_members(&status));
            let insecure = status.insecure;
            checks
                .extend(insecure.map(|text| problem("control plane", Verdict::Warn, text, remedy)));
            checks
        }
        Err(error) => vec![problem(
            "control plane",
            Verdict::Fail,
            format!("{error:#}"),
            "check the address, the token and --tls, and that `switchyard control-plane` runs there; of k8s:// the \
             namespace, the Service and the role of the ServiceAccount",
        )],
    }
}

/// The servers that other hosts reach in plain text or without a ticket, as the control plane names them.
fn insecure_members(status: &control_api::ClusterStatus) -> Vec<Check> {
    let is_of_members = |text: &&String| {
        text.starts_with("INSECURE") && status.insecure.as_deref() != Some(text.as_str())
    };
    let texts = status.problems.iter().filter(is_of_members);
    let remedy =
        "start each of these servers with certificates and tickets: docs/how-to/secure-a-fleet.md";
    texts.map(|text| problem("expert servers", Verdict::Warn, text, remedy)).collect()
}

/// Below this, a certificate should be renewed.
const FEW_DAYS: u64 = 14;

/// First line of a small file, or "unknown".
fn read(path: &str) -> String {
    std::fs::read_to_string(path)
        .map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned())
}

fn cpu_model() -> String {
    read("/proc/cpuinfo")
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
        .map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}

fn vector_units() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    {
        if std::is_x86_feature_detected!("avx512f") {
            return " · AVX-512";
        }
        if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma") {
            return " · AVX2";
        }
    }
    ""
}

#[cfg(all(test, feature = "ibgda"))]
mod tests;
