//! Instructions that the machine code of each kernel must have, and instructions that it must not have.
//!
//! The check looks at every variant of a kernel by itself: a variant with an instruction does not make up for
//! another variant without it.

use std::collections::BTreeSet;

/// Kernels whose names, as the compiler mangles them, have all of `names` in them.
type Names = &'static [&'static str];

/// Instructions that kernels must have: of each entry one of the choices between `|`, by the start of its name.
struct Rule {
    names: Names,
    instructions: &'static [&'static str],
}

/// Kernels that may keep data in local memory.
struct Exception {
    names: Names,
    reason: &'static str,
}

const fn rule(names: Names, instructions: &'static [&'static str]) -> Rule {
    Rule { names, instructions }
}

/// Orders everything before for other GPUs and the host.
const SYSTEM_FENCE: &str = "MEMBAR.SC.SYS|MEMBAR.ALL.SYS";
const STORE_16: &str = "STG.E.128|ST.E.128";
const LOAD_16: &str = "LDG.E.128|LD.E.128";
/// A flag that another GPU writes, and one that it reads.
const FLAG_LOAD: &str = "LDG.E.64.STRONG.SYS|LD.E.64.STRONG.SYS";
const FLAG_STORE: &str = "STG.E.64.STRONG.SYS|ST.E.64.STRONG.SYS";
/// A part of a row that carries its own mark of arrival.
const ROW_LOAD: &str = "LDG.E.128.STRONG.SYS|LD.E.128.STRONG.SYS";
const ROW_STORE: &str = "STG.E.128.STRONG.SYS|ST.E.128.STRONG.SYS";
const FLAG_ADD: &str = "REDG.E.ADD.64.STRONG.SYS|RED.E.ADD.64.STRONG.SYS";
/// A command to a thread of the host, whole.
const COMMAND: &str = "STG.E.128.STRONG.SYS|ST.E.128.STRONG.SYS";
/// Drops the multiprocessor's cached data, in kernels that run beside the kernel before them.
const DROP_CACHE: &str = "CCTL.IVALL";
/// A counter of blocks that starts over.
const COUNT_ARRIVALS: &str = "ATOMG.E.INC|ATOM.E.INC";
/// A NIC's doorbell.
const DOORBELL: &str = "STG.E.64.MMIO.SYS|ST.E.64.MMIO.SYS";
const TO_FP8: &str = "F2FP.SATFINITE.E4M3";
const FROM_FP8: &str = "F2FP.F16.E4M3.UNPACK_B";
const TO_BF16: &str = "F2FP.BF16.F32.PACK_AB";

/// By file. Template arguments:
///
/// - `DispatchConfig`: hidden size, top-k, whether to fp8, threads, ways
/// - `CombineConfig`: hidden size, threads, ways
/// - `AnswerConfig`: hidden size, whether from fp8, threads, ways
/// - `expert_recv_kernel`: ways
/// - `expert_gemm_kernel`: whether fp8, whether the first product, whether it gathers rows
/// - `expert_gather_kernel`: whether from fp8
///
/// `Lj14E` is any way.
const FILES: [(&str, &[Rule]); 7] = [
    (
        "dispatch",
        &[
            rule(&["15dispatch_kernel"], &[STORE_16, SYSTEM_FENCE, FLAG_STORE]),
            rule(&["15dispatch_kernel"], &["LDG.E.NA.128.CONSTANT|LDG.E.128.CONSTANT"]),
            rule(&["DispatchConfigILj7168E"], &["LDG.E.128.CONSTANT", "STS.128"]),
            rule(&["DispatchConfigIL", "ELb1ELj"], &[TO_FP8]),
            rule(&["DispatchConfigIL", "ELj14EEEEE"], &[COMMAND, DOORBELL]),
        ],
    ),
    (
        "combine",
        &[
            rule(&["14combine_kernel"], &[ROW_LOAD, STORE_16, FLAG_LOAD, TO_BF16, DROP_CACHE]),
            rule(&["CombineConfigIL", "ELj14EEEEE"], &[COMMAND]),
        ],
    ),
    (
        "expert",
        &[
            // Cluster barriers.
            rule(&["18expert_recv_kernel"], &["UCGABAR_ARV", "UCGABAR_WAIT"]),
            rule(&["18expert_recv_kernel"], &[LOAD_16, FLAG_LOAD, SYSTEM_FENCE, DROP_CACHE]),
            rule(&["18expert_recv_kernelILj14EEE"], &[COMMAND, DOORBELL]),
            rule(&["11echo_kernel"], &[FLAG_LOAD, SYSTEM_FENCE, FLAG_STORE, DROP_CACHE]),
            rule(&["AnswerConfigIL"], &[LOAD_16, ROW_STORE, TO_BF16]),
            rule(&["AnswerConfigIL", "ELb1ELj"], &[FROM_FP8]),
            rule(&["AnswerConfigIL", "ELj14EEEEE"], &[COMMAND, DOORBELL, SYSTEM_FENCE]),
        ],
    ),
    (
        "compute",
        &[
            rule(&["20expert_gather_kernel"], &[STORE_16]),
            rule(&["20expert_gather_kernelILb0EEE"], &[LOAD_16, TO_FP8]),
            rule(&["20expert_gather_kernelILb1EEE"], &[FROM_FP8, TO_BF16]),
            // Fed by the copy engine; registers handed over between warpgroups; results through shared
            // memory.
            rule(
                &["18expert_gemm_kernel"],
                &[
                    "UTMALDG.5D",
                    "SYNCS.PHASECHK.TRANS64.TRYWAIT",
                    "USETMAXREG.DEALLOC",
                    "USETMAXREG.TRY_ALLOC",
                    "STSM.16.MT88.2",
                    "STG.E.128",
                ],
            ),
            // Matrix units of a warpgroup, in every size of a tile.
            rule(
                &["18expert_gemm_kernelILb0E"],
                &[
                    "HGMMA.64x256x16.F32.BF16",
                    "HGMMA.64x64x16.F32.BF16",
                    "HGMMA.64x32x16.F32.BF16",
                    "HGMMA.64x16x16.F32.BF16",
                    "HGMMA.64x8x16.F32.BF16",
                ],
            ),
            rule(
                &["18expert_gemm_kernelILb1E"],
                &[
                    "QGMMA.64x128x32.F32.E4M3.E4M3",
                    "QGMMA.64x64x32.F32.E4M3.E4M3",
                    "QGMMA.64x32x32.F32.E4M3.E4M3",
                    "QGMMA.64x16x32.F32.E4M3.E4M3",
                    "QGMMA.64x8x32.F32.E4M3.E4M3",
                ],
            ),
            rule(&["18expert_gemm_kernelILb1ELb1E"], &[TO_FP8]),
            // Blocks with results in common count their arrivals, and the last one drops cached data.
            rule(&["18expert_gemm_kernelILb1ELb1E"], &[COUNT_ARRIVALS, DROP_CACHE]),
            rule(&["18expert_gemm_kernel", "ELb0EEEv"], &["UBLKCP"]),
            rule(&["18expert_gemm_kernel", "ELb1EEEv"], &["LDGSTS.E.BYPASS"]),
        ],
    ),
    (
        "p2p",
        &[
            rule(&["13stream_kernel"], &[STORE_16, SYSTEM_FENCE, FLAG_ADD, FLAG_LOAD]),
            rule(&["15pingpong_kernel"], &[STORE_16, SYSTEM_FENCE, FLAG_ADD, FLAG_LOAD]),
            rule(&["13stream_kernel"], &["UBLKCP.G.S", "UTMACMDFLUSH"]),
            rule(&["15pingpong_kernel"], &["UBLKCP.G.S", "UTMACMDFLUSH"]),
        ],
    ),
    (
        "flag",
        &[
            rule(&["sy_flag_add"], &[SYSTEM_FENCE, FLAG_ADD]),
            rule(&["sy_tell_host"], &[SYSTEM_FENCE, FLAG_STORE]),
            rule(&["sy_convert"], &[TO_BF16]),
        ],
    ),
    (
        "proxy",
        &[
            rule(&["sy_proxy_produce"], &[COMMAND, SYSTEM_FENCE]),
            rule(&["sy_proxy_all_operations"], &[COMMAND, SYSTEM_FENCE]),
            rule(&["sy_peer_copy"], &[LOAD_16, STORE_16]),
            rule(&["sy_link_calls"], &[COMMAND, SYSTEM_FENCE]),
        ],
    ),
];

/// An instruction that kernels must not have.
struct Ban {
    file: &'static str,
    names: Names,
    instruction: &'static str,
    reason: &'static str,
}

const BANS: [Ban; 1] = [Ban {
    file: "combine",
    names: &["CombineConfigIL", "ELj2EEEEE"],
    instruction: "MEMBAR",
    reason: "it waits for what the kernels beside this one store to peers",
}];

/// Only for requests to a NIC or commands to a thread, which cost far more.
const LISTS: &str = "lists of what to send, handed by address to the calls that post it";
const EXCEPTIONS: [Exception; 4] = [
    Exception { names: &["DispatchConfigIL", "ELj14EEEEE"], reason: LISTS },
    Exception { names: &["18expert_send_kernel", "ELj14EEEEE"], reason: LISTS },
    Exception {
        names: &["11echo_kernel"],
        reason: "since when it waits, handed by address to the call that looks at the clock; and lists of \
                 what to send",
    },
    Exception { names: &["sy_proxy_all_operations"], reason: LISTS },
];

/// Kernels that must leave room on a multiprocessor, and how many registers a thread of them may have.
struct Limit {
    file: &'static str,
    names: Names,
    registers: u32,
    reason: &'static str,
}

/// 448 threads of 104 registers leave 18,944 of 65,536.
const LIMITS: [Limit; 2] = [
    Limit {
        file: "expert",
        names: &["11echo_kernel", "Lj448ELj14EEEEE"],
        registers: 104,
        reason: ROOM_FOR_COPIES,
    },
    Limit {
        file: "expert",
        names: &["18expert_send_kernel", "Lj448ELj14EEEEE"],
        registers: 104,
        reason: ROOM_FOR_COPIES,
    },
];
const ROOM_FOR_COPIES: &str = "it waits for what a NIC made of the GPU's own copies brings, whose kernels need room beside it";

/// Compares the report of ptxas about a file of kernels with [`LIMITS`]. Returns a line for each excess.
pub fn check_registers(file: &str, report: &str) -> Vec<String> {
    let mut used_by = Vec::new();
    let mut kernel = "";
    for line in report.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            kernel = rest.split('\'').next().unwrap_or_default();
        } else if let Some((_, rest)) = line.split_once("Used ")
            && let Some((number, _)) = rest.split_once(" registers")
            && let Ok(used) = number.parse::<u32>()
        {
            used_by.push((kernel, used));
        }
    }
    let mut wrong = Vec::new();
    for Limit { names, registers, reason, .. } in LIMITS.iter().filter(|limit| limit.file == file) {
        let mut fitting = used_by.iter().filter(|(kernel, _)| fits(names, kernel)).peekable();
        if fitting.peek().is_none() {
            wrong.push(format!("no kernel has {} in its name", names.join(" and ")));
        }
        for (kernel, used) in fitting.filter(|(_, used)| used > registers) {
            wrong.push(format!("{kernel}: {used} registers, {registers} at most: {reason}"));
        }
    }
    wrong
}

/// The result for a file.
pub struct Findings {
    /// Its kernels.
    pub num_kernels: usize,
    /// Reasons for data in local memory, and the number of kernels with each.
    pub exceptions: Vec<(&'static str, usize)>,
    /// Errors, a line each.
    pub wrong: Vec<String>,
}

/// Compares the disassembly of a file of kernels with their rules.
pub fn check(file: &str, listing: &str) -> Findings {
    let rules = FILES.iter().find(|(name, _)| *name == file).map_or(&[][..], |(_, rules)| *rules);
    let kernels = kernels(listing);
    let mut wrong = Vec::new();
    let mut exceptions: Vec<(&str, usize)> = Vec::new();
    for (kernel, found) in &kernels {
        let fitting: Vec<&Rule> = rules.iter().filter(|rule| fits(rule.names, kernel)).collect();
        if fitting.is_empty() {
            wrong.push(format!("{kernel}: no rule says what it must have: add one to FILES"));
        }
        for choice in fitting.iter().flat_map(|rule| rule.instructions) {
            let has = |one: &str| found.iter().any(|instruction| instruction.starts_with(one));
            if !choice.split('|').any(has) {
                wrong.push(format!("{kernel}: no {choice}"));
            }
        }
        for Ban { instruction, reason, .. } in
            BANS.iter().filter(|ban| ban.file == file && fits(ban.names, kernel))
        {
            if let Some(name) = found.iter().find(|name| name.starts_with(instruction)) {
                wrong.push(format!("{kernel}: {name}: {reason}"));
            }
        }
        let is_local = |name: &&String| name.starts_with("LDL") || name.starts_with("STL");
        let local: Vec<&str> = found.iter().filter(is_local).map(String::as_str).collect();
        let exception = EXCEPTIONS.iter().find(|exception| fits(exception.names, kernel));
        match (local.is_empty(), exception) {
            (true, None) => {}
            (true, Some(_)) => wrong.push(format!(
                "{kernel}: has nothing in local memory, so it needs no place in EXCEPTIONS"
            )),
            (false, None) => wrong.push(format!("{kernel}: local memory, by {}", local.join(", "))),
            (false, Some(Exception { reason, .. })) => {
                match exceptions.iter_mut().find(|(other, _)| other == reason) {
                    Some((_, num)) => *num += 1,
                    None => exceptions.push((reason, 1)),
                }
            }
        }
    }
    // A rule for a name that no kernel has any more checks nothing.
    let banned = BANS.iter().filter(|ban| ban.file == file).map(|ban| ban.names);
    for names in rules.iter().map(|rule| rule.names).chain(banned) {
        if !kernels.iter().any(|(kernel, _)| fits(names, kernel)) {
            wrong.push(format!("no kernel has {} in its name", names.join(" and ")));
        }
    }
    Findings { num_kernels: kernels.len(), exceptions, wrong }
}

fn fits(names: Names, kernel: &str) -> bool {
    names.iter().all(|name| kernel.contains(name))
}

/// Kernels in a listing of `cuobjdump --dump-sass`, with the names of their instructions.
fn kernels(listing: &str) -> Vec<(String, BTreeSet<String>)> {
    let mut kernels: Vec<(String, BTreeSet<String>)> = Vec::new();
    for line in listing.lines() {
        if let Some((_, kernel)) = line.split_once("Function : ") {
            kernels.push((kernel.trim().to_owned(), BTreeSet::new()));
        } else if let (Some((_, found)), Some(name)) = (kernels.last_mut(), instruction(line)) {
            found.insert(name.to_owned());
        }
    }
    kernels
}

/// The name in a line such as `/*0090*/ @!P0 STG.E.128 desc[UR4][R2.64], R4 ; /* 0x… */`.
fn instruction(line: &str) -> Option<&str> {
    let (_, text) = line.trim_start().strip_prefix("/*")?.split_once("*/")?;
    let mut words = text.split([' ', '\t', ';']).filter(|word| !word.is_empty());
    let first = words.next()?;
    let name = if first.starts_with('@') { words.next()? } else { first };
    name.starts_with(|letter: char| letter.is_ascii_uppercase()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing(kernels: &[(&str, &[&str])]) -> String {
        let mut text = "\tcode for sm_90a\n".to_owned();
        for (kernel, instructions) in kernels {
            text += &format!("\t\tFunction : {kernel}\n\t.headerflags @\"EF_CUDA_SM90\"\n");
            for instruction in *instructions {
                text += &format!(
                    "        /*0090*/  {instruction} R4, [R2] ;  /* 0x0000000402047381 */\n"
                );
                text += "                                        /* 0x000fe200000e0000 */\n";
            }
        }
        text
    }

    const ADD: &str = "@!P0 REDG.E.ADD.64.STRONG.SYS";
    /// The other kernel of the same file, without an error.
    const TELL: (&str, &[&str]) = ("sy_tell_host", &["MEMBAR.ALL.SYS", "STG.E.64.STRONG.SYS"]);
    const CONVERT: (&str, &[&str]) = ("sy_convert", &[TO_BF16]);

    #[test]
    fn a_kernel_with_an_instruction_does_not_make_up_for_one_without() {
        let good: &[&str] = &["MEMBAR.ALL.SYS", ADD];
        assert!(check("flag", &listing(&[("sy_flag_add", good), TELL, CONVERT])).wrong.is_empty());
        let both = listing(&[("sy_flag_add", good), TELL, CONVERT, ("sy_flag_add_2", &good[1..])]);
        let Findings { num_kernels, wrong, .. } = check("flag", &both);
        assert_eq!(num_kernels, 4);
        assert_eq!(wrong, ["sy_flag_add_2: no MEMBAR.SC.SYS|MEMBAR.ALL.SYS"]);
    }

    #[test]
    fn what_is_banned_is_refused_where_it_is_banned_only() {
        let plain: &[&str] =
            &["LDG.E.128.STRONG.SYS", "STG.E.128", "LDG.E.64.STRONG.SYS", TO_BF16, DROP_CACHE];
        let (direct, any) = (
            "14combine_kernelI13CombineConfigILj0ELj256ELj2EEEEE",
            "14combine_kernelI13CombineConfigILj0ELj256ELj14EEEEE",
        );
        let fenced: Vec<&str> = plain.iter().copied().chain(["@P4 MEMBAR.ALL.SYS"]).collect();
        let others: Vec<&str> = fenced.iter().copied().chain(["STG.E.128.STRONG.SYS"]).collect();
        let good = check("combine", &listing(&[(direct, plain), (any, &others)]));
        assert_eq!(good.wrong, Vec::<String>::new());
        let wrong = check("combine", &listing(&[(direct, &fenced), (any, &others)])).wrong;
        assert_eq!(wrong.len(), 1, "{wrong:?}");
        assert!(wrong[0].starts_with(&format!("{direct}: MEMBAR.ALL.SYS: ")), "{wrong:?}");
    }

    #[test]
    fn local_memory_is_refused_but_where_it_is_listed() {
        let local: &[&str] = &["MEMBAR.ALL.SYS", ADD, "@P1 STL.64", "LDLX"];
        let local = listing(&[("sy_flag_add", local), TELL, CONVERT]);
        let wrong = check("flag", &local).wrong;
        assert_eq!(wrong, ["sy_flag_add: local memory, by LDLX, STL.64"]);
        let command = "STG.E.128.STRONG.SYS";
        let proxy = |local: &'static str| {
            let all: &[&str] = &[command, "MEMBAR.ALL.SYS", local];
            let (plain, copy): (&[&str], &[&str]) = (&all[..2], &["LD.E.128", "ST.E.128"]);
            let kernels = [
                ("sy_proxy_all_operations", all),
                ("sy_proxy_produce", plain),
                ("sy_link_calls", plain),
                ("sy_peer_copy", copy),
            ];
            check("proxy", &listing(&kernels))
        };
        let Findings { exceptions, wrong, .. } = proxy("LDL");
        assert!(exceptions == [(LISTS, 1)] && wrong.is_empty(), "{wrong:?}");
        assert!(proxy("NOP").wrong[0].contains("no place in EXCEPTIONS"));
    }

    #[test]
    fn kernels_that_leave_no_room_are_named() {
        let line = |kernel: &str, ways: u32, used: u32| {
            format!(
                "ptxas info    : Compiling entry function '{kernel}INS0_12AnswerConfigILj7168ELb0ELj448E\
                 Lj{ways}EEEEEv' for 'sm_90a'\n    160 bytes stack frame, 0 bytes spill stores\n\
                 ptxas info    : Used {used} registers, used 1 barriers, 3592 bytes smem\n"
            )
        };
        let report = |used: u32| {
            line("11echo_kernel", 2, 128)
                + &line("11echo_kernel", 14, used)
                + &line("18expert_send_kernel", 14, 88)
        };
        assert_eq!(check_registers("expert", &report(104)), Vec::<String>::new());
        assert_eq!(check_registers("combine", &report(112)), Vec::<String>::new());
        let wrong = check_registers("expert", &report(112));
        assert!(wrong.len() == 1 && wrong[0].contains("112 registers, 104 at most"), "{wrong:?}");
        let wrong = check_registers("expert", &line("11echo_kernel", 14, 96));
        assert!(wrong.len() == 1 && wrong[0].contains("no kernel has 18expert_send"), "{wrong:?}");
    }

    #[test]
    fn kernels_and_rules_that_do_not_meet_are_named() {
        let wrong =
            check("flag", &listing(&[("sy_flag_take", &["MEMBAR.ALL.SYS", ADD]), TELL, CONVERT]))
                .wrong;
        assert_eq!(wrong.len(), 2);
        assert!(wrong[0].contains("no rule says") && wrong[1].contains("sy_flag_add"), "{wrong:?}");
    }
}
