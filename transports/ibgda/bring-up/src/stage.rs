//! The stages, in the order of the guide, and advice for each that fails.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// One thing that must work before the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Stage {
    Probe = 1,
    Device,
    Domain,
    Queues,
    Connect,
    Nop,
    Put,
    Flag,
    Get,
    Add,
    Masked,
    Wrap,
    Many,
    Immediate,
    Error,
    Reset,
    Fused,
}

impl Stage {
    pub(crate) const ALL: [Self; 17] = [
        Self::Probe,
        Self::Device,
        Self::Domain,
        Self::Queues,
        Self::Connect,
        Self::Nop,
        Self::Put,
        Self::Flag,
        Self::Get,
        Self::Add,
        Self::Masked,
        Self::Wrap,
        Self::Many,
        Self::Immediate,
        Self::Error,
        Self::Reset,
        Self::Fused,
    ];

    /// Whether every run goes through it, independent of the start of `--stage`.
    pub(crate) fn is_needed(self) -> bool {
        self <= Self::Connect
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Probe => "probe",
            Self::Device => "device",
            Self::Domain => "domain",
            Self::Queues => "queues",
            Self::Connect => "connect",
            Self::Nop => "nop",
            Self::Put => "put",
            Self::Flag => "flag",
            Self::Get => "get",
            Self::Add => "add",
            Self::Masked => "masked",
            Self::Wrap => "wrap",
            Self::Many => "many",
            Self::Immediate => "immediate",
            Self::Error => "error",
            Self::Reset => "reset",
            Self::Fused => "fused",
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|stage| *stage as u8 == code)
    }

    /// Step of the guide in docs/how-to/ibgda-bring-up.md.
    pub(crate) const fn step(self) -> u8 {
        match self {
            Self::Probe => 1,
            Self::Device | Self::Domain => 3,
            Self::Queues => 4,
            Self::Connect => 5,
            Self::Nop => 6,
            Self::Put | Self::Flag | Self::Get | Self::Add | Self::Masked => 7,
            Self::Wrap | Self::Many | Self::Immediate | Self::Error | Self::Reset => 7,
            Self::Fused => 9,
        }
    }

    /// Advice for its failure.
    pub(crate) const fn advice(self) -> &'static str {
        match self {
            Self::Probe => "mend what is named, top down; `switchyard doctor` shows the same lines",
            Self::Device => {
                "libibverbs1 and ibverbs-providers 44 or later; `ibv_devinfo` lists device and port; `show_gids` the addresses for `--gid-index`"
            }
            Self::Domain => {
                "`ulimit -l` (locked memory); for a GPU's memory dma-buf or nvidia_peermem"
            }
            Self::Queues => {
                "a refused command names its status: 0x02 is a firmware that is too old, 0x03 a field it does not take; with `--path devx` also CAP_NET_RAW and UCTX_EN=1"
            }
            Self::Connect => {
                "start both sides with the same options; a refusal at INIT → RTR is a matter of routes, of `--gid-index` or of the MTU of both ports"
            }
            Self::Nop => {
                "a time-out: the doorbell does not arrive (wrong register, or no I/O mapping); syndrome 0x02: a malformed request, compare the block with `cargo xtask test --only mlx5`"
            }
            Self::Put => {
                "syndrome 0x15: no answer (routes, lossless fabric, the other side's port); 0x13: key or range of the peer; 0x04: the local key; good completion and other bytes: what the NIC wrote where"
            }
            Self::Flag => {
                "the flag came before its payload: memory registered with relaxed ordering, or a PCIe switch that reorders; the flag never came: see `put` and `add`"
            }
            Self::Get => {
                "syndrome 0x02 behind a get: DUMP is not taken (`quiet_gets`); other bytes: the NIC's writes were still under way"
            }
            Self::Add => {
                "syndrome 0x12 or 0x02: atomics are off (`ibv_devinfo -v`: atomic_cap), or the word is not aligned"
            }
            Self::Masked => {
                "syndrome 0x02 or 0x12: extended atomics are off; a wrong sum: operands of masked adds in another order than in docs/reference/mlx5.md"
            }
            Self::Wrap => {
                "a completion of a request that was never posted, or a time-out near a multiple of 65,536: `wqe_counter` follows the place, not the index"
            }
            Self::Many => {
                "as for the stage that works with one queue; then the number of queue pairs the NIC allows"
            }
            Self::Immediate => {
                "syndrome 0x16 at once: the receives are not where the NIC reads them (their doorbell record, or receives and send queue in another order); nothing comes: the completion queue of receives; bytes that differ: as for `flag`"
            }
            Self::Error => {
                "another syndrome than 0x13 (report it), or a request with a wrong key that passes: stop, this is a matter of safety"
            }
            Self::Reset => {
                "a refusal of RESET or of the transitions after it; completions of before that come late"
            }
            Self::Fused => {
                "a doorbell that cannot be mapped: the driver options of step 2; tags 32 to 36 of an error word: as for `nop` and `put`, now posted by the GPU; a frame that does not come, with good completions: where slots and queues lie (`--queue-memory`, `--path`); another value: report it with both sides' output"
            }
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Stage {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|stage| stage.name() == text).ok_or_else(|| {
            let names: Vec<&str> = Self::ALL.into_iter().map(Self::name).collect();
            format!("there is no stage `{text}`: {}", names.join(", "))
        })
    }
}

/// The stages of `A`, `A..B`, `A..` or `..B`, both ends included.
pub(crate) fn parse_range(text: &str) -> Result<RangeInclusive<Stage>, String> {
    let (first, last) = text.split_once("..").unwrap_or((text, text));
    let first = if first.is_empty() { Stage::Probe } else { first.parse()? };
    let last = if last.is_empty() { Stage::Fused } else { last.parse()? };
    if first > last {
        return Err(format!("`{first}` comes after `{last}`"));
    }
    Ok(first..=last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_include_both_ends() {
        let all = [("..", "probe", "fused"), ("nop..get", "nop", "get"), ("add", "add", "add")];
        for (text, first, last) in all {
            let range = parse_range(text).unwrap();
            assert_eq!((range.start().name(), range.end().name()), (first, last), "{text}");
        }
        assert!(parse_range("get..nop").unwrap_err().contains("comes after"));
        assert!(parse_range("pull").unwrap_err().contains("no stage `pull`"));
    }

    #[test]
    fn codes_and_names_lead_back() {
        for stage in Stage::ALL {
            assert_eq!(Stage::from_code(stage as u8), Some(stage));
            assert_eq!(stage.name().parse(), Ok(stage));
            assert!(stage.advice().len() > 20 && (1..=9).contains(&stage.step()));
        }
        assert_eq!(Stage::from_code(0), None);
        assert_eq!(Stage::from_code(18), None);
    }
}
