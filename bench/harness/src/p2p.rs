//! Latency and bandwidth of put + flag between processes, beside a raw flag in the same mapping.
//!
//! [`run`] starts each sender and each receiver as a process of its own. It executes the calling program again, so
//! that program must call [`child_main`] before anything else. The processes connect by the ordinary handshake.
//!
//! *One way* is half of a round trip. Each sender puts one message to each receiver. A receiver answers each message
//! with one of the same size as soon as it is complete. The sender's time runs from its first store until the last
//! answer is complete.
//!
//! *Bandwidth* is the payload of a window of messages over the time until all receivers report their arrival. It is
//! the median over many windows.
//!
//! Before each iteration the destination is poisoned, and after it every byte is compared. Both are outside of the
//! timed part, and so is the receiver's reading of the payload.

mod child;
mod device;
mod message;

use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use thiserror::Error;

pub use child::{child_main, child_main_with, networks};
pub use device::{DeviceBenchConfig, DeviceReport, DeviceRow, device_child_main, run_device};

use crate::stats::median;
use p2p_core::endpoint::TransportKind;
use p2p_core::slot::{SlotConfig, SlotConfigError, SlotLayout};

/// Settings of [`run`].
#[derive(Debug, Clone)]
pub struct BenchConfig {
    /// Sending processes.
    pub senders: usize,
    /// Receiving processes.
    pub receivers: usize,
    /// Smallest message in bytes. Sizes double from here.
    pub min_bytes: usize,
    /// Largest message in bytes.
    pub max_bytes: usize,
    /// Timed iterations per size; 0 chooses by size.
    pub iterations: usize,
    /// Slots to use.
    pub slot: SlotConfig,
    /// Transport to use.
    pub transport: TransportKind,
    /// Device or provider of a network; `None` lets the network choose.
    pub device: Option<String>,
    /// Whether each process is pinned to one processor.
    pub pin: bool,
    /// Seed of the payload.
    pub seed: u64,
}

impl Default for BenchConfig {
    fn default() -> Self {
        Self {
            senders: 1,
            receivers: 1,
            min_bytes: 4,
            max_bytes: 8 << 20,
            iterations: 0,
            slot: SlotConfig { num_frames: 16, ..SlotConfig::default() },
            transport: TransportKind::Shm,
            device: None,
            pin: true,
            seed: 1,
        }
    }
}

/// Result of [`run`].
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct BenchReport {
    /// One way of a bare flag between sender 0 and receiver 0, in microseconds: half of the median round trip of a
    /// 64-bit word in the same mapping. It is 0 if the transport maps no memory.
    pub raw_flag_us_p50: f64,
    /// Transport in use.
    pub transport: TransportKind,
    /// Requested device or provider.
    #[serde(default)]
    pub device: Option<String>,
    /// Kind of the slots' pages.
    pub pages: String,
    /// Bytes compared over all iterations and processes. All were right.
    pub verified_bytes: u64,
    /// One row per size.
    pub rows: Vec<BenchRow>,
}

/// Figures of one size.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct BenchRow {
    /// Bytes of a message.
    pub bytes: usize,
    /// Sending processes.
    pub senders: usize,
    /// Receiving processes.
    pub receivers: usize,
    /// Median of one way in microseconds. With several senders, the median of their medians.
    pub one_way_us_p50: f64,
    /// 99th percentile of one way in microseconds. With several senders, the largest.
    pub one_way_us_p99: f64,
    /// Payload put by all senders together, in 10^9 bytes per second.
    pub gb_per_s: f64,
}

/// How to start the calling program again.
#[derive(Debug, Clone)]
pub struct ChildProgram {
    /// The executable.
    pub path: std::path::PathBuf,
    /// Its arguments.
    pub args: Vec<String>,
    /// Variables of its environment, in addition to those of this process.
    pub env: Vec<(String, String)>,
}

impl ChildProgram {
    /// Returns the running executable with `args`.
    ///
    /// # Errors
    /// The system cannot name the executable.
    pub fn this(args: &[&str]) -> io::Result<Self> {
        let path = std::env::current_exe()?;
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        Ok(Self { path, args, env: Vec::new() })
    }
}

/// A benchmark failed.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are part of the messages")]
pub enum BenchError {
    /// A size or a count is out of range.
    #[error("{what} is {found}, expected {expected}")]
    Config { what: &'static str, found: usize, expected: &'static str },
    /// The slot configuration is not usable.
    #[error(transparent)]
    Slot(#[from] SlotConfigError),
    /// A process could not be started or addressed.
    #[error("cannot {what} a benchmark process: {source}")]
    Process { what: &'static str, source: io::Error },
    /// A process sent an unexpected line, or none for 120 s.
    #[error("{process} {found}; expected {expected}")]
    Protocol { process: String, found: String, expected: &'static str },
    /// A process reported an error.
    #[error("{process}: {message}")]
    Child { process: String, message: String },
}

/// Runs the benchmark. Calls `progress` with each row as soon as it is complete.
///
/// # Errors
/// [`BenchError`]. All processes have ended when it returns.
pub fn run(
    config: &BenchConfig,
    program: &ChildProgram,
    mut progress: impl FnMut(&BenchRow),
) -> Result<BenchReport, BenchError> {
    check(config)?;
    let mut receivers = Vec::with_capacity(config.receivers);
    for idx in 0..config.receivers {
        let job = child::Job { idx, addrs: Vec::new(), config: config.clone() };
        receivers.push(Process::start(program, &job, format!("receiver {idx}"))?);
    }
    let mut addrs = Vec::with_capacity(config.receivers);
    for receiver in &mut receivers {
        addrs.push(receiver.expect("addr", "its address")?.concat());
    }
    let mut senders = Vec::with_capacity(config.senders);
    for idx in 0..config.senders {
        let job = child::Job { idx, addrs: addrs.clone(), config: config.clone() };
        senders.push(Process::start(program, &job, format!("sender {idx}"))?);
    }
    let mut pages = String::new();
    for sender in &mut senders {
        pages = sender.expect("pages", "the pages in use")?.concat();
    }
    for sender in &mut senders {
        sender.go()?;
    }
    let raw_flag_us_p50 = senders[0].number("raw", "the raw flag's time")?;

    let mut rows = Vec::new();
    for bytes in sizes(config) {
        for sender in &mut senders {
            sender.go()?;
        }
        let mut p50 = Vec::with_capacity(config.senders);
        let mut row = BenchRow {
            bytes,
            senders: config.senders,
            receivers: config.receivers,
            one_way_us_p50: 0.0,
            one_way_us_p99: 0.0,
            gb_per_s: 0.0,
        };
        for sender in &mut senders {
            p50.push(sender.number("p50", "a median")?);
            row.one_way_us_p99 = row.one_way_us_p99.max(sender.number("p99", "a percentile")?);
            row.gb_per_s += sender.number("gbps", "a bandwidth")?;
        }
        row.one_way_us_p50 = median(&mut p50);
        progress(&row);
        rows.push(row);
    }
    let mut verified_bytes = 0.0;
    for process in senders.iter_mut().chain(&mut receivers) {
        verified_bytes += process.number("verified", "the bytes it verified")?;
    }
    let verified_bytes = verified_bytes as u64;
    Ok(BenchReport {
        raw_flag_us_p50,
        transport: config.transport,
        device: config.device.clone(),
        pages,
        verified_bytes,
        rows,
    })
}

fn check(config: &BenchConfig) -> Result<(), BenchError> {
    SlotLayout::new(config.slot)?;
    let ok = |good: bool, what, found, expected| {
        if good { Ok(()) } else { Err(BenchError::Config { what, found, expected }) }
    };
    ok((1..=256).contains(&config.senders), "senders", config.senders, "1 to 256")?;
    ok((1..=256).contains(&config.receivers), "receivers", config.receivers, "1 to 256")?;
    ok(config.min_bytes > 0, "min_bytes", config.min_bytes, "1 or more")?;
    let most = MAX_BYTES;
    let fits = (config.min_bytes..=most).contains(&config.max_bytes);
    ok(fits, "max_bytes", config.max_bytes, "min_bytes to 1 GiB")?;
    let few = config.iterations <= MAX_ITERATIONS;
    ok(few, "iterations", config.iterations, "at most 10000000")
}

/// Returns the sizes of a run. Each is twice the one before.
fn sizes(config: &BenchConfig) -> impl Iterator<Item = usize> + use<> {
    let max_bytes = config.max_bytes;
    std::iter::successors(Some(config.min_bytes), |bytes| bytes.checked_mul(2))
        .take_while(move |bytes| *bytes <= max_bytes)
}

/// Returns the number of timed iterations for messages of `bytes`.
fn iterations(config: &BenchConfig, bytes: usize) -> usize {
    match config.iterations {
        0 => (BYTES_PER_SIZE / bytes).clamp(100, 4000),
        chosen => chosen,
    }
}

/// A child process and the lines that it prints. Dropping it kills the child.
struct Process {
    process: String,
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl Process {
    fn start(
        program: &ChildProgram,
        job: &child::Job,
        process: String,
    ) -> Result<Self, BenchError> {
        Self::spawn(program, child::JOB_VARIABLE, &job.encode(), process)
    }

    fn spawn(
        program: &ChildProgram,
        variable: &str,
        job: &str,
        process: String,
    ) -> Result<Self, BenchError> {
        let failed = |what| move |source| BenchError::Process { what, source };
        let mut child = Command::new(&program.path)
            .args(&program.args)
            .envs(program.env.iter().map(|(name, value)| (name, value)))
            .env(variable, job)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(failed("start"))?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take();
        let (sender, lines) = channel();
        // This thread ends with the child's output.
        std::thread::spawn(move || {
            for line in stdout.map(BufReader::new).into_iter().flat_map(BufRead::lines) {
                let Ok(line) = line else { break };
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Self { process, child, stdin, lines })
    }

    /// Tells the child to begin the next part.
    fn go(&mut self) -> Result<(), BenchError> {
        let Some(stdin) = &mut self.stdin else { return Ok(()) };
        stdin.write_all(b"go\n").map_err(|source| BenchError::Process { what: "direct", source })
    }

    /// Waits up to 120 s for the next line with the benchmark's prefix, and returns the words after `key`. Skips
    /// other lines, which a test harness may print.
    fn expect(&mut self, key: &str, expected: &'static str) -> Result<Vec<String>, BenchError> {
        let protocol = |found: &str| BenchError::Protocol {
            process: self.process.clone(),
            found: found.to_owned(),
            expected,
        };
        loop {
            let line = self.lines.recv_timeout(ANSWER_TIMEOUT).map_err(|e| match e {
                RecvTimeoutError::Timeout => protocol("said nothing for too long"),
                RecvTimeoutError::Disconnected => protocol("ended"),
            })?;
            let Some(rest) = line.strip_prefix(child::LINE_PREFIX) else { continue };
            let mut words = rest.split(' ').map(str::to_owned);
            return match words.next().as_deref() {
                Some(found) if found == key => Ok(words.collect()),
                Some("error") => Err(BenchError::Child {
                    process: self.process.clone(),
                    message: words.collect::<Vec<_>>().join(" "),
                }),
                _ => Err(protocol(&format!("said `{rest}`"))),
            };
        }
    }

    fn number(&mut self, key: &str, expected: &'static str) -> Result<f64, BenchError> {
        let words = self.expect(key, expected)?;
        words.first().and_then(|word| word.parse().ok()).ok_or_else(|| BenchError::Protocol {
            process: self.process.clone(),
            found: format!("said {words:?} for `{key}`"),
            expected,
        })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Without an error it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const MAX_BYTES: usize = 1 << 30;
const MAX_ITERATIONS: usize = 10_000_000;
const BYTES_PER_SIZE: usize = 512 << 20;
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);
