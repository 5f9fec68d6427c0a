//! The command line.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use ibgda::{Doorbell, QueuePath};
use kernels::gpu::DeviceName;

use crate::stage::{Stage, parse_range};

/// Takes a pair of mlx5 NICs through the bring-up guide of docs/how-to/ibgda-bring-up.md, stage by stage.
///
/// One side listens, the other connects; both need the same options. Requests are posted by the device
/// functions of the kernels, compiled for the processor; in the last stage, `fused`, by a GPU. Not yet run
/// on a ConnectX. The connection between both sides is neither
/// encrypted nor authenticated: use it between hosts that trust each other.
#[derive(Debug, Clone, Parser)]
#[command(
    name = "ibgda-bring-up",
    after_help = "Exit status:\n  0 every stage that ran passed\n  1 a stage failed\n  2 wrong usage\n  3 this host lacks something"
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) role: Role,
}

#[derive(Debug, Clone, Subcommand)]
pub(crate) enum Role {
    /// Waits for the other side.
    Listen {
        /// Address to listen at, by default port 18515 of all; port 0 takes a free one.
        #[arg(default_value = "0.0.0.0", value_parser = parse_address)]
        address: SocketAddr,
        #[command(flatten)]
        options: Options,
    },
    /// Connects with the side that listens.
    Connect {
        /// Its address, such as 192.0.2.7 or node7:18515.
        #[arg(value_parser = parse_address)]
        address: SocketAddr,
        #[command(flatten)]
        options: Options,
    },
}

#[derive(Debug, Clone, Args)]
pub(crate) struct Options {
    /// One line of JSON for each stage.
    #[arg(long)]
    pub(crate) json: bool,
    /// Maker of the queue pairs: libibverbs in host memory, or commands to the firmware.
    #[arg(long, value_enum, default_value = "plain")]
    pub(crate) path: PathName,
    /// Method of announcing requests to the NIC: a register and a record in memory, or a register alone, which
    /// newer NICs have; that needs `--path devx`.
    #[arg(long, value_enum, default_value = "record")]
    pub(crate) doorbell: DoorbellName,
    /// Queue pairs.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) queues: u32,
    /// Basic blocks of a send queue, a power of two from 128 to 32768.
    #[arg(long, default_value_t = 128, value_parser = parse_depth)]
    pub(crate) depth: u32,
    /// Stages to run: NAME, FIRST..LAST, FIRST.. or ..LAST. The stages up to connected queues always run.
    #[arg(long, default_value = "..", value_parser = parse_range, value_name = "STAGES")]
    pub(crate) stage: RangeInclusive<Stage>,
    /// Seconds of any single wait, for the NIC or for the peer.
    #[arg(long, default_value = "10", value_parser = parse_seconds, value_name = "SECONDS")]
    pub(crate) timeout: Duration,
    /// Seconds to wait for the other side to connect or to listen.
    #[arg(long, default_value = "600", value_parser = parse_seconds, value_name = "SECONDS")]
    pub(crate) wait: Duration,
    /// How often the stage `wrap` takes the 16-bit counters around.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) wraps: u32,
    /// The NIC, such as mlx5_0; the first mlx5 device by default.
    #[arg(long)]
    pub(crate) device: Option<String>,
    /// Port of the NIC.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..))]
    pub(crate) port: u8,
    /// Index of the port's address, as `show_gids` lists them; RoCE v2 over IPv4 by default.
    #[arg(long)]
    pub(crate) gid_index: Option<u8>,
    /// GPU with the memory of the slots: a number, or `cuda:N`. The processor posts requests; in the stage `fused`
    /// the GPU does. Needs a build with `--features cuda`.
    #[arg(long, value_parser = parse_gpu, value_name = "N")]
    pub(crate) gpu: Option<DeviceName>,
    /// Place of the queues that the GPU posts on; `gpu` needs `--path devx`.
    #[arg(long, value_enum, default_value = "host")]
    pub(crate) queue_memory: QueueMemory,
    /// A NIC in software in place of hardware, for a rehearsal with both sides on one host.
    #[arg(long)]
    pub(crate) software_nic: bool,
    /// The NIC in software stops serving the first queue at the beginning of this stage: for tests of failures.
    #[arg(long, hide = true, requires = "software_nic")]
    pub(crate) stall_at: Option<Stage>,
    /// The NIC in software fails the first queue's next request with syndrome 0x14 from this stage on: also
    /// for tests.
    #[arg(long, hide = true, requires = "software_nic")]
    pub(crate) fail_at: Option<Stage>,
    /// Root below which /sys, /proc and /dev are read.
    #[arg(long, hide = true)]
    pub(crate) root: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PathName {
    Plain,
    Devx,
}

impl From<PathName> for QueuePath {
    fn from(name: PathName) -> Self {
        match name {
            PathName::Plain => Self::Plain,
            PathName::Devx => Self::Devx,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DoorbellName {
    Record,
    Register,
}

impl From<DoorbellName> for Doorbell {
    fn from(name: DoorbellName) -> Self {
        match name {
            DoorbellName::Record => Self::WithRecord,
            DoorbellName::Register => Self::RegisterAlone,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum QueueMemory {
    Host,
    Gpu,
}

impl Options {
    /// Checks of combinations of options.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.queue_memory == QueueMemory::Gpu && self.path == PathName::Plain {
            return Err("`--queue-memory gpu` needs `--path devx`: libibverbs makes queues in the host's memory".to_owned());
        }
        if self.doorbell == DoorbellName::Register && self.path == PathName::Plain {
            return Err("`--doorbell register` needs `--path devx`: libibverbs makes queues with a doorbell record".to_owned());
        }
        if self.software_nic && matches!(self.gpu, Some(DeviceName::Cuda(_))) {
            return Err("`--software-nic` reaches memory of the processor only: use it with `--gpu emulated:N` of a build with `--features emulated`, or without a GPU".to_owned());
        }
        Ok(())
    }
}

/// A host or its address, with a port or the usual one.
fn parse_address(text: &str) -> Result<SocketAddr, String> {
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    if let Ok(host) = text.parse::<IpAddr>() {
        return Ok(SocketAddr::new(host, PORT));
    }
    let name = if text.contains(':') { text.to_owned() } else { format!("{text}:{PORT}") };
    let found = name.to_socket_addrs().map_err(|error| error.to_string());
    let found = found.and_then(|mut found| found.next().ok_or_else(|| "no address".to_owned()));
    found.map_err(|error| format!("{error}; expected HOST or HOST:PORT"))
}

fn parse_depth(text: &str) -> Result<u32, String> {
    let depth = text.parse::<u32>().ok();
    depth
        .filter(|depth| depth.is_power_of_two() && (128..=32_768).contains(depth))
        .ok_or_else(|| "expected a power of two from 128 to 32768".to_owned())
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok();
    seconds
        .filter(|seconds| (0.01..=86_400.0).contains(seconds))
        .map(Duration::from_secs_f64)
        .ok_or_else(|| "expected seconds, from 0.01 to 86400".to_owned())
}

fn parse_gpu(text: &str) -> Result<DeviceName, String> {
    if let Ok(ordinal) = text.parse::<u32>() {
        return Ok(DeviceName::Cuda(ordinal));
    }
    text.parse::<DeviceName>().map_err(|error| error.to_string())
}

/// Of `listen`, unless another is given.
const PORT: u16 = 18_515;
