//! Latency and bandwidth of one-sided transfers between two processes.
//!
//! [`run`] starts the target as a process of its own. It executes the calling program again, so that program must
//! call [`child_main`] before anything else.
//!
//! For each row the source gets new payload and the destination is poisoned. Transfers of `num_iovs` ranges each run
//! back to back. Then every byte of the destination is compared with the source. Only the transfers are timed.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use thiserror::Error;

use crate::p2p::ChildProgram;
use crate::stats::percentile;
use message_engine::engine::{
    Access, Connection, Descriptor, Engine, EngineConfig, MemoryRegion, OpError, Span, open_fabric,
};
#[cfg(feature = "verbs")]
use p2p_core::fabric::Fabric;
use p2p_core::fabric::FabricOpener;
#[cfg(feature = "verbs")]
use verbs_transport::{VerbsConfig, VerbsFabric};

/// Direction of the transfers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// From the initiator into the target's memory.
    Write,
    /// From the target's memory to the initiator.
    Read,
}

/// The fabrics of this build beside `tcp` and `cma`.
#[must_use]
pub fn fabrics() -> Vec<FabricOpener> {
    let libfabric = std::iter::once(libfabric_transport::fabric_opener());
    libfabric.chain(verbs_transport::fabric_opener()).collect()
}

/// Settings of [`run`].
#[derive(Debug, Clone)]
pub struct EngineBenchConfig {
    /// Transport, as [`open_fabric`] takes it.
    pub transport: String,
    /// How to use RDMA devices. The target process gets its own settings by [`child_main_with`].
    #[cfg(feature = "verbs")]
    pub verbs: VerbsConfig,
    /// Direction of the transfers.
    pub mode: Mode,
    /// Bytes of one range. There is a row for each size and each number of ranges.
    pub sizes: Vec<u64>,
    /// Ranges in one transfer.
    pub num_iovs: Vec<usize>,
    /// Timed transfers per row; 0 chooses by size.
    pub iterations: usize,
    /// Largest number of transfers in flight.
    pub depth: usize,
    /// Seed of the payload.
    pub seed: u64,
}

impl Default for EngineBenchConfig {
    fn default() -> Self {
        Self {
            transport: "tcp".to_owned(),
            #[cfg(feature = "verbs")]
            verbs: VerbsConfig::default(),
            mode: Mode::Write,
            sizes: (8..=20).step_by(2).map(|power| 1 << power).collect(),
            num_iovs: (0..=7).map(|power| 1 << power).collect(),
            iterations: 0,
            depth: 1,
            seed: 1,
        }
    }
}

/// Result of [`run`].
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct EngineBenchReport {
    /// Transport in use, with its flavour.
    pub transport: String,
    /// Direction of the transfers.
    pub mode: Mode,
    /// Largest number of transfers in flight.
    pub depth: usize,
    /// Bytes compared. All were right.
    pub verified_bytes: u64,
    /// One row per size and number of ranges.
    pub rows: Vec<EngineBenchRow>,
}

/// Figures of one size and number of ranges.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct EngineBenchRow {
    /// Bytes of one range.
    pub bytes: u64,
    /// Ranges of one transfer.
    pub num_iovs: usize,
    /// Timed transfers.
    pub iterations: usize,
    /// Median time of a transfer in microseconds, from its start until its end is known.
    pub us_p50: f64,
    /// 99th percentile of the same time.
    pub us_p99: f64,
    /// Time of all transfers divided by their number, in microseconds.
    pub us_mean: f64,
    /// Payload in 10^9 bytes per second over the whole time.
    pub gb_per_s: f64,
    /// The same in 10^9 bits per second.
    pub gbps: f64,
}

/// A benchmark failed.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are part of the messages")]
pub enum EngineBenchError {
    /// A setting is out of range.
    #[error("{what} is {found}, expected {expected}")]
    Config { what: &'static str, found: u64, expected: &'static str },
    /// A process could not be started, or failed.
    #[error("{what}: {detail}")]
    Peer { what: &'static str, detail: String },
    /// A transfer failed.
    #[error(transparent)]
    Transfer(#[from] OpError),
    /// The destination has wrong bytes.
    #[error("{num_wrong} of {bytes} bytes are wrong after transfers of {num_iovs} ranges")]
    Wrong { num_wrong: u64, bytes: u64, num_iovs: usize },
}

/// Runs this process's part if it is a child of [`run`], and returns whether it succeeded. The program should then
/// exit. Returns `None` in any other process. Call it before anything else.
#[must_use]
pub fn child_main() -> Option<bool> {
    child_main_with(EngineBenchConfig::default)
}

/// As [`child_main`], with settings for transports. Calls `settings` in a child only, and ignores the settings of the
/// measurement itself.
#[must_use]
pub fn child_main_with(settings: impl FnOnce() -> EngineBenchConfig) -> Option<bool> {
    let transport = std::env::var(TARGET_VARIABLE).ok()?;
    let served = serve(&EngineBenchConfig { transport, ..settings() });
    if let Err(error) = &served {
        eprintln!("benchmark target: {error}");
    }
    Some(served.is_ok())
}

/// Runs the benchmark. Calls `progress` with each row as soon as it is complete.
///
/// # Errors
/// [`EngineBenchError`]. The other process has ended when it returns.
pub fn run(
    config: &EngineBenchConfig,
    program: &ChildProgram,
    mut progress: impl FnMut(&EngineBenchRow),
) -> Result<EngineBenchReport, EngineBenchError> {
    check(config)?;
    let engine = start(config)?;
    let target = Target::start(program, &config.transport)?;
    let connection = engine
        .add_remote_endpoint(&target.metadata, soon())
        .map_err(|error| peer("connect", error))?;
    let most = largest(config);
    let memory = engine
        .alloc(most as usize, Access::RemoteReadWrite)
        .map_err(|error| peer("register memory", error))?;
    let mut report = EngineBenchReport {
        transport: connection.transport().to_string(),
        mode: config.mode,
        depth: config.depth,
        verified_bytes: 0,
        rows: Vec::new(),
    };
    send_order(&connection, &Order { what: ALLOCATE, bytes: most, seed: 0 })?;
    let descriptor = Descriptor::from_bytes(&receive(&engine)?)
        .map_err(|error| peer("read the target's descriptor", error))?;
    for (row_idx, (bytes, num_iovs)) in rows(config).enumerate() {
        let total = bytes * num_iovs as u64;
        let seed = config.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(row_idx as u64);
        let (here, there) = match config.mode {
            Mode::Write => (FILL, POISON),
            Mode::Read => (POISON, FILL),
        };
        prepare(&memory, here, total, seed)?;
        send_order(&connection, &Order { what: there, bytes: total, seed })?;
        receive(&engine)?;
        let span = |idx: usize| memory.span(idx as u64 * bytes, bytes).map_err(OpError::from);
        let local = (0..num_iovs).map(span).collect::<Result<Vec<_>, _>>()?;
        let part = |idx: usize| descriptor.sub(idx as u64 * bytes, bytes);
        let remote = (0..num_iovs).map(part).collect::<Result<Vec<_>, _>>();
        let remote = remote.map_err(|error| peer("divide the target's memory", error))?;
        let row = measure(config, &connection, &local, &remote)?;
        let num_wrong = match config.mode {
            Mode::Write => {
                send_order(&connection, &Order { what: COMPARE, bytes: total, seed })?;
                count_of(&receive(&engine)?)
            }
            Mode::Read => compare(&memory, total, seed)?,
        };
        if num_wrong != 0 {
            return Err(EngineBenchError::Wrong { num_wrong, bytes: total, num_iovs });
        }
        report.verified_bytes += total;
        progress(&row);
        report.rows.push(row);
    }
    Ok(report)
}

fn measure(
    config: &EngineBenchConfig,
    connection: &Connection,
    local: &[Span],
    remote: &[Descriptor],
) -> Result<EngineBenchRow, EngineBenchError> {
    let (num_iovs, bytes) = (local.len(), local.first().map_or(0, Span::len));
    let total = bytes * num_iovs as u64;
    let timed = match config.iterations {
        0 => ((256 << 20) / total.max(1)).clamp(20, 2000) as usize,
        chosen => chosen,
    };
    let begin = || match config.mode {
        Mode::Write => connection.start_writev(local, remote, soon()),
        Mode::Read => connection.start_readv(local, remote, soon()),
    };
    for _ in 0..timed / 10 + 3 {
        begin().map_err(OpError::from)?.wait().map_err(OpError::from)?;
    }
    let mut samples = Vec::with_capacity(timed);
    let mut under_way = std::collections::VecDeque::with_capacity(config.depth);
    let start = Instant::now();
    for _ in 0..timed {
        if under_way.len() >= config.depth {
            finish(&mut under_way, &mut samples)?;
        }
        let began = Instant::now();
        under_way.push_back((began, begin().map_err(OpError::from)?));
    }
    while !under_way.is_empty() {
        finish(&mut under_way, &mut samples)?;
    }
    let elapsed = start.elapsed().as_secs_f64();
    let gb_per_s = (total * timed as u64) as f64 / elapsed / 1e9;
    Ok(EngineBenchRow {
        bytes,
        num_iovs,
        iterations: timed,
        us_p50: percentile(&mut samples, 0.5),
        us_p99: percentile(&mut samples, 0.99),
        us_mean: elapsed * 1e6 / timed as f64,
        gb_per_s,
        gbps: gb_per_s * 8.0,
    })
}

fn finish(
    under_way: &mut std::collections::VecDeque<(Instant, message_engine::engine::Transfer)>,
    samples: &mut Vec<f64>,
) -> Result<(), EngineBenchError> {
    if let Some((began, transfer)) = under_way.pop_front() {
        transfer.wait().map_err(OpError::from)?;
        samples.push(began.elapsed().as_secs_f64() * 1e6);
    }
    Ok(())
}

fn check(config: &EngineBenchConfig) -> Result<(), EngineBenchError> {
    let most_iovs = config.num_iovs.iter().max().copied().unwrap_or(0) as u64;
    let fewest = config.num_iovs.iter().min().copied().unwrap_or(0) as u64;
    let smallest = config.sizes.iter().min().copied().unwrap_or(0);
    let limits = [
        ("num_iovs", most_iovs.min(fewest), 1, 4096, "1 to 4096"),
        ("num_iovs", most_iovs, 1, 4096, "1 to 4096"),
        ("sizes", smallest, 1, u64::MAX, "1 byte or more"),
        ("depth", config.depth as u64, 1, 256, "1 to 256"),
        ("size × num_iovs", largest(config), 1, MAX_BYTES, "at most 4 GiB"),
    ];
    for (what, found, low, high, expected) in limits {
        if !(low..=high).contains(&found) {
            return Err(EngineBenchError::Config { what, found, expected });
        }
    }
    Ok(())
}

fn largest(config: &EngineBenchConfig) -> u64 {
    rows(config).map(|(bytes, num)| bytes.saturating_mul(num as u64)).max().unwrap_or(0)
}

fn rows(config: &EngineBenchConfig) -> impl Iterator<Item = (u64, usize)> {
    config.sizes.iter().flat_map(|bytes| config.num_iovs.iter().map(move |num| (*bytes, *num)))
}

#[allow(clippy::match_single_binding, reason = "depends on the features")]
fn start(config: &EngineBenchConfig) -> Result<Engine, EngineBenchError> {
    let local = EngineConfig::local();
    let fabric = match config.transport.split_once(':').unwrap_or((&config.transport, "")) {
        #[cfg(feature = "verbs")]
        ("verbs", ports) => {
            let config = match ports {
                "" => config.verbs.clone(),
                ports => config.verbs.clone().on_ports(ports),
            };
            VerbsFabric::open(config).map(|fabric| Box::new(fabric) as Box<dyn Fabric>)
        }
        _ => open_fabric(&config.transport, Some(local.bind.ip()), &fabrics()),
    };
    let fabric = fabric.map_err(|error| peer("open the transport", error))?;
    Engine::start(EngineConfig { fabrics: vec![fabric], ..local })
        .map_err(|error| peer("start an engine", error))
}

/// Runs the target: carries out the orders that arrive as notifications, until standard input ends.
fn serve(config: &EngineBenchConfig) -> Result<(), EngineBenchError> {
    let engine = start(config)?;
    let hex: String = engine.metadata().iter().map(|byte| format!("{byte:02x}")).collect();
    println!("\n{LINE_PREFIX}{hex}");
    // The pipe ends with the parent, even if the parent is killed.
    std::thread::spawn(|| {
        let _ = std::io::stdin().lines().count();
        std::process::exit(0);
    });
    let connection =
        engine.accept(soon()).map_err(|error| peer("wait for the initiator", error))?;
    let mut memory = None;
    loop {
        let order = Order::decode(&receive(&engine)?);
        let Order { what, bytes, seed } = order;
        let region: &MemoryRegion = match (&memory, what) {
            (_, ALLOCATE) => {
                let region = engine.alloc(bytes as usize, Access::RemoteReadWrite);
                memory.insert(region.map_err(|error| peer("register memory", error))?)
            }
            (Some(region), _) => region,
            (None, _) => return Err(peer("serve", "an order before there is memory")),
        };
        let answer = match what {
            ALLOCATE => {
                let descriptor = connection.advertise(&region.whole()).map_err(OpError::from)?;
                descriptor.to_bytes().to_vec()
            }
            COMPARE => compare(region, bytes, seed)?.to_le_bytes().to_vec(),
            _ => {
                prepare(region, what, bytes, seed)?;
                Vec::new()
            }
        };
        connection.notify(&answer, soon())?;
    }
}

/// Fills memory with the payload of `seed` for the order `FILL`, and with another payload otherwise.
fn prepare(
    memory: &MemoryRegion,
    what: u64,
    bytes: u64,
    seed: u64,
) -> Result<(), EngineBenchError> {
    let seed = if what == FILL { seed } else { !seed };
    each_block(bytes, seed, |at, block| Ok(memory.copy_in(at, block).map_err(OpError::from)?))
}

fn compare(memory: &MemoryRegion, bytes: u64, seed: u64) -> Result<u64, EngineBenchError> {
    let mut found = vec![0; BLOCK_BYTES];
    let mut num_wrong = 0;
    each_block(bytes, seed, |at, block| {
        let found = &mut found[..block.len()];
        memory.copy_out(at, found).map_err(OpError::from)?;
        if found != block {
            num_wrong += found.iter().zip(block.iter()).filter(|(a, b)| a != b).count() as u64;
        }
        Ok(())
    })?;
    Ok(num_wrong)
}

fn each_block(
    bytes: u64,
    seed: u64,
    mut act: impl FnMut(u64, &[u8]) -> Result<(), EngineBenchError>,
) -> Result<(), EngineBenchError> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut block = vec![0; BLOCK_BYTES];
    let mut at = 0;
    while at < bytes {
        let len = (bytes - at).min(BLOCK_BYTES as u64) as usize;
        rng.fill_bytes(&mut block[..len]);
        act(at, &block[..len])?;
        at += len as u64;
    }
    Ok(())
}

/// An order for the target.
struct Order {
    what: u64,
    bytes: u64,
    seed: u64,
}

impl Order {
    fn decode(bytes: &[u8]) -> Self {
        let word = |at: usize| bytes.get(at..).map_or(0, count_of);
        Self { what: word(0), bytes: word(8), seed: word(16) }
    }
}

fn send_order(connection: &Connection, order: &Order) -> Result<(), EngineBenchError> {
    let words = [order.what, order.bytes, order.seed].map(u64::to_le_bytes);
    connection.notify(words.as_flattened(), soon())?;
    Ok(())
}

fn receive(engine: &Engine) -> Result<Vec<u8>, EngineBenchError> {
    let received = engine.next_notification(soon());
    Ok(received.map_err(|error| peer("wait for the other process", error))?.bytes)
}

fn count_of(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(u64::MAX, |word| u64::from_le_bytes(*word))
}

/// The target's process. Dropping it kills the process.
struct Target {
    child: Child,
    metadata: Vec<u8>,
}

impl Target {
    fn start(program: &ChildProgram, transport: &str) -> Result<Self, EngineBenchError> {
        let mut child = Command::new(&program.path)
            .args(&program.args)
            .envs(program.env.iter().map(|(name, value)| (name, value)))
            .env(TARGET_VARIABLE, transport)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| peer("start the target", error))?;
        let stdout = child.stdout.take();
        let mut target = Self { child, metadata: Vec::new() };
        for line in stdout.map(BufReader::new).into_iter().flat_map(BufRead::lines) {
            let line = line.map_err(|error| peer("read from the target", error))?;
            if let Some(hex) = line.strip_prefix(LINE_PREFIX) {
                let digits = |at: usize| u8::from_str_radix(hex.get(at..at + 2)?, 16).ok();
                let metadata = (0..hex.len()).step_by(2).map(digits).collect::<Option<_>>();
                target.metadata =
                    metadata.ok_or_else(|| peer("read from the target", "not a number"))?;
                return Ok(target);
            }
        }
        Err(peer("start the target", "it ended; its message says why"))
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if let Some(mut stdin) = self.child.stdin.take() {
            let _ = stdin.flush();
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn peer(what: &'static str, error: impl ToString) -> EngineBenchError {
    EngineBenchError::Peer { what, detail: error.to_string() }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

const TARGET_VARIABLE: &str = "SWITCHYARD_ENGINE_BENCH_TARGET";
const LINE_PREFIX: &str = "engine-bench: ";
const ALLOCATE: u64 = 1;
const FILL: u64 = 2;
const POISON: u64 = 3;
const COMPARE: u64 = 4;
const BLOCK_BYTES: usize = 1 << 20;
const MAX_BYTES: u64 = 4 << 30;
