//! Puts between GPUs: put + flag there and back, and puts in one direction, by kernels.
//!
//! Each sender and each receiver is a process with a GPU of its own. Their device slots come from the ordinary
//! handshake.
//!
//! *One way* is half of the mean turn of a launch with many turns, by the GPU's clock. Percentiles are over launches.
//! With several peers all pairs run independently at the same time.
//!
//! *Bandwidth* is payload over the time from the common start of all senders until the last receiver reports that
//! all has arrived.
//!
//! Slots are poisoned before each launch. After the last launch of a size every byte is compared.

use std::time::{Duration, Instant};

use bytemuck::Zeroable;
use kernels::abi::{DEVICE_ABI_VERSION, ErrorWord, Link, PATH_DIRECT, TAG_NONE};
use kernels::gpu::{DeviceName, Gpu, GpuBuffer, Stream};
use kernels::p2p::{P2pParams, PingPongParams, StreamParams};
use tokio::sync::mpsc;

use super::child::{report, runtime, wait_for_go};
use super::{BenchError, ChildProgram, Process};
use crate::stats::percentile;
use cuda_ipc::{DevicePair, DeviceSide, GpuMemory};
use p2p_core::bootstrap::{
    ConnectConfig, Connection, Listener, ListenerConfig, PeerHello, connect,
};
use p2p_core::endpoint::TransportKind;
use p2p_core::slot::SlotConfig;

/// Settings of [`run_device`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceBenchConfig {
    /// Sending processes.
    pub senders: usize,
    /// Receiving processes.
    pub receivers: usize,
    /// Smallest message in bytes: 4, 8, or a multiple of 16. Sizes double from here.
    pub min_bytes: usize,
    /// Largest message in bytes.
    pub max_bytes: usize,
    /// GPU of the first process. The other processes take the GPUs after it.
    pub first: DeviceName,
    /// Launches per size and pattern.
    pub launches: usize,
    /// Turns of a launch; 0 chooses by size.
    pub turns: usize,
}

/// Result of [`run_device`].
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct DeviceReport {
    /// GPU of the first process.
    pub first: String,
    /// Rate of stores from one sender to one receiver, in 10^9 bytes per second.
    pub store_gb_per_s: f64,
    /// Bytes of a message in the measurement of `store_gb_per_s`.
    pub store_bytes: usize,
    /// Launches per size and pattern. Percentiles are over them.
    pub launches: usize,
    /// Bytes compared. All were right.
    pub verified_bytes: u64,
    /// One row per size.
    pub rows: Vec<DeviceRow>,
}

/// Figures of one size.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct DeviceRow {
    /// Bytes of a message.
    pub bytes: usize,
    /// Sending processes.
    pub senders: usize,
    /// Receiving processes.
    pub receivers: usize,
    /// Median of one way in microseconds. With several pairs, that of the slowest.
    pub one_way_us_p50: f64,
    /// 99th percentile of one way in microseconds. With several pairs, that of the slowest.
    pub one_way_us_p99: f64,
    /// Payload of all pairs together, in 10^9 bytes per second.
    pub gb_per_s: f64,
    /// Payload over the busiest process's link, in 10^9 bytes per second.
    pub gb_per_s_per_link: f64,
    /// `gb_per_s_per_link` over the rate of stores from one sender to one receiver, measured in the same run. `None`
    /// for messages below 1 MiB, whose flags take a part of the time that counts.
    pub of_store_rate: Option<f64>,
}

/// Runs the benchmark. Calls `progress` with each row as soon as it is complete.
///
/// # Errors
/// [`BenchError`]. All processes have ended when it returns.
pub fn run_device(
    config: &DeviceBenchConfig,
    program: &ChildProgram,
    mut progress: impl FnMut(&DeviceRow),
) -> Result<DeviceReport, BenchError> {
    config.check()?;
    let start =
        |job: &Job, process: String| Process::spawn(program, JOB_VARIABLE, &job.encode(), process);
    let mut receivers = Vec::with_capacity(config.receivers);
    for idx in 0..config.receivers {
        let job = Job { idx, addrs: Vec::new(), config: config.clone() };
        receivers.push(start(&job, format!("receiver {idx}"))?);
    }
    let mut addrs = Vec::with_capacity(config.receivers);
    for receiver in &mut receivers {
        addrs.push(receiver.expect("addr", "its address")?.concat());
    }
    let mut senders = Vec::with_capacity(config.senders);
    for idx in 0..config.senders {
        let job = Job { idx, addrs: addrs.clone(), config: config.clone() };
        senders.push(start(&job, format!("sender {idx}"))?);
    }
    // All processes prepare, then all launch. Senders report their times.
    let mut launch = || -> Result<f64, BenchError> {
        for process in senders.iter_mut().chain(&mut receivers) {
            process.expect("set", "that it is set")?;
        }
        for process in receivers.iter_mut().chain(&mut senders) {
            process.go()?;
        }
        let mut most = 0f64;
        for sender in &mut senders {
            most = most.max(sender.number("us", "a time")?);
        }
        Ok(most)
    };
    let mut store_gb_per_s = 0f64;
    let mut rows = Vec::new();
    for phase in config.phases() {
        let mut times = Vec::with_capacity(phase.launches);
        for _ in 0..phase.launches {
            times.push(launch()?);
        }
        let turns = phase.turns as f64;
        let p50 = percentile(&mut times, 0.5).max(f64::MIN_POSITIVE);
        let payload = phase.bytes as f64 * turns;
        match phase.pattern {
            Pattern::Store => store_gb_per_s = payload / p50 / 1e3,
            Pattern::PingPong => rows.push(DeviceRow {
                bytes: phase.bytes,
                senders: config.senders,
                receivers: config.receivers,
                one_way_us_p50: p50 / turns / 2.0,
                one_way_us_p99: percentile(&mut times, 0.99) / turns / 2.0,
                gb_per_s: 0.0,
                gb_per_s_per_link: 0.0,
                of_store_rate: None,
            }),
            Pattern::Stream => {
                let pairs = config.senders * config.receivers;
                if let Some(row) = rows.last_mut() {
                    row.gb_per_s = payload * pairs as f64 / p50 / 1e3;
                    row.gb_per_s_per_link =
                        row.gb_per_s / config.senders.min(config.receivers) as f64;
                    // The first phase has measured the stores.
                    row.of_store_rate = (row.bytes >= BANDWIDTH_BYTES)
                        .then_some(row.gb_per_s_per_link / store_gb_per_s);
                    progress(row);
                }
            }
        }
    }
    let mut verified = 0.0;
    for process in senders.iter_mut().chain(&mut receivers) {
        verified += process.number("verified", "the bytes it verified")?;
    }
    Ok(DeviceReport {
        first: config.first.to_string(),
        store_gb_per_s,
        store_bytes: config.store_bytes(),
        launches: config.launches,
        verified_bytes: verified as u64,
        rows,
    })
}

/// Runs this process's part if it is a child of [`run_device`], and returns whether it succeeded. The program should
/// then exit. Returns `None` in any other process. Call it before anything else.
#[must_use]
pub fn device_child_main() -> Option<bool> {
    let job = std::env::var(JOB_VARIABLE).ok()?;
    let result = Job::decode(&job)
        .ok_or_else(|| format!("cannot read the job `{job}`"))
        .and_then(|job| take_part(&job));
    if let Err(message) = &result {
        report(&format!("error {}", message.replace('\n', " ")));
    }
    Some(result.is_ok())
}

impl DeviceBenchConfig {
    fn check(&self) -> Result<(), BenchError> {
        let ok = |good: bool, what, found, expected| {
            if good { Ok(()) } else { Err(BenchError::Config { what, found, expected }) }
        };
        ok((1..=32).contains(&self.senders), "senders", self.senders, "1 to 32")?;
        ok((1..=32).contains(&self.receivers), "receivers", self.receivers, "1 to 32")?;
        // If this holds for a size, it holds for its double.
        let is_size =
            |bytes: usize| bytes > 0 && (bytes == 4 || bytes == 8 || bytes.is_multiple_of(16));
        ok(is_size(self.min_bytes), "min_bytes", self.min_bytes, "4, 8, or a multiple of 16")?;
        let fits = (self.min_bytes..=1 << 28).contains(&self.max_bytes);
        ok(fits, "max_bytes", self.max_bytes, "min_bytes to 256 MiB")?;
        ok(self.turns <= 100_000, "turns", self.turns, "at most 100000")?;
        ok((1..=10_000).contains(&self.launches), "launches", self.launches, "1 to 10000")
    }

    fn is_emulated(&self) -> bool {
        matches!(self.first, DeviceName::Emulated(_))
    }

    /// Returns the message size that measures the rate of stores. On a GPU it is 64 MiB or more, so that begin and
    /// end of a launch do not count.
    fn store_bytes(&self) -> usize {
        if self.is_emulated() { self.max_bytes } else { self.max_bytes.max(64 << 20) }
    }

    /// Returns all launches of a run, in order. Each process computes the same.
    fn phases(&self) -> Vec<Phase> {
        let phase = |pattern, bytes: usize| {
            let few = (1 << 28) / bytes;
            let turns = match self.turns {
                0 => few.clamp(20, if pattern == Pattern::PingPong { 400 } else { 200 }),
                turns => turns,
            };
            Phase { pattern, bytes, turns, launches: self.launches }
        };
        let sizes = std::iter::successors(Some(self.min_bytes), |bytes| bytes.checked_mul(2))
            .take_while(|bytes| *bytes <= self.max_bytes);
        std::iter::once(phase(Pattern::Store, self.store_bytes()))
            .chain(
                sizes.flat_map(|bytes| {
                    [Pattern::PingPong, Pattern::Stream].map(|p| phase(p, bytes))
                }),
            )
            .collect()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pattern {
    /// As `Stream`, but from the first sender to the first receiver only.
    Store,
    PingPong,
    Stream,
}

#[derive(Debug, Clone, Copy)]
struct Phase {
    pattern: Pattern,
    bytes: usize,
    turns: usize,
    launches: usize,
}

struct Job {
    idx: usize,
    /// Addresses of the receivers. Empty for a receiver.
    addrs: Vec<String>,
    config: DeviceBenchConfig,
}

impl Job {
    fn encode(&self) -> String {
        let c = &self.config;
        let numbers =
            [self.idx, c.senders, c.receivers, c.min_bytes, c.max_bytes, c.launches, c.turns];
        let numbers = numbers.map(|number| number.to_string()).join("|");
        format!("{}|{}|{numbers}", c.first, self.addrs.join(","))
    }

    fn decode(text: &str) -> Option<Self> {
        let mut words = text.split('|');
        let first = words.next()?.parse().ok()?;
        let addrs = words.next()?.split(',').filter(|a| !a.is_empty()).map(str::to_owned).collect();
        let mut number = || words.next()?.parse().ok();
        let idx = number()?;
        let config = DeviceBenchConfig {
            senders: number()?,
            receivers: number()?,
            min_bytes: number()?,
            max_bytes: number()?,
            launches: number()?,
            turns: number()?,
            first,
        };
        Some(Self { idx, addrs, config })
    }
}

/// A process with its GPU and its peers.
struct Party {
    gpu: Gpu,
    stream: Stream,
    connections: Vec<Connection>,
    /// The nanoseconds of each peer, then the error word.
    results: GpuBuffer,
    is_sender: bool,
    idx: usize,
    counter_at: u64,
    verified: u64,
}

fn take_part(job: &Job) -> Result<(), String> {
    let config = &job.config;
    let is_sender = !job.addrs.is_empty();
    let place = if is_sender { job.idx } else { config.senders + job.idx };
    let gpu = open(config, place)?;
    let counter_at = (config.store_bytes() as u64).next_multiple_of(4096);
    let side = DeviceSide {
        gpu: gpu.clone(),
        own_slot_bytes: counter_at + 4096,
        peer_slot_bytes: counter_at + 4096,
        shape: b"bench p2p".to_vec(),
    };
    let runtime = runtime()?;
    let connections = if is_sender {
        let mut connections = Vec::with_capacity(job.addrs.len());
        for addr in &job.addrs {
            let hello = PeerHello { peer_id: job.idx as u64, ..PeerHello::default() };
            let connect_config = ConnectConfig {
                slot: HOST_SLOT,
                transports: vec![TransportKind::Shm],
                device: Some(GpuMemory::offer(side.clone())),
                timeout: TIMEOUT,
                ..ConnectConfig::default()
            };
            let connected = runtime.block_on(connect(addr.as_str(), hello, connect_config));
            connections.push(connected.map_err(|error| error.to_string())?);
        }
        connections
    } else {
        runtime.block_on(accept_senders(config.senders, side))?
    };
    let stream = gpu.stream().map_err(text)?;
    let results = gpu.alloc(RESULT_BYTES).map_err(text)?;
    let mut party = Party {
        gpu,
        stream,
        connections,
        results,
        is_sender,
        idx: job.idx,
        counter_at,
        verified: 0,
    };
    for phase in config.phases() {
        for launch in 1..=phase.launches {
            party.reset(&phase)?;
            report("set");
            wait_for_go()?;
            let us = party.launch(config, &phase)?;
            if is_sender {
                report(&format!("us {us}"));
            }
            if launch == phase.launches {
                party.verify(&phase)?;
            }
        }
    }
    report(&format!("verified {}", party.verified));
    // Keeps the slots mapped until the peers have read their last results.
    for connection in &party.connections {
        let _ = runtime.block_on(async {
            connection.liveness.close();
            tokio::time::timeout(TIMEOUT, connection.liveness.closed()).await
        });
    }
    Ok(())
}

fn open(config: &DeviceBenchConfig, place: usize) -> Result<Gpu, String> {
    let place = u32::try_from(place).map_err(text)?;
    let name = match config.first {
        DeviceName::Cuda(first) => {
            let count = Gpu::count().map_err(text)?;
            let needed = first as usize + config.senders + config.receivers;
            if needed > count as usize {
                return Err(format!(
                    "every process needs a GPU of its own: {} senders and {} receivers from {} on make {needed}, this host has {count}",
                    config.senders, config.receivers, config.first
                ));
            }
            // Checked to be below the count.
            DeviceName::Cuda(first + place)
        }
        DeviceName::Emulated(first) => {
            let ordinal = first.checked_add(place);
            DeviceName::Emulated(
                ordinal.ok_or_else(|| {
                    format!("there are no GPUs in software from {} on", config.first)
                })?,
            )
        }
    };
    Gpu::open_named(name).map_err(text)
}

/// Listens until all senders are connected. Returns them in the order of their indices.
async fn accept_senders(count: usize, side: DeviceSide) -> Result<Vec<Connection>, String> {
    let config = ListenerConfig {
        slot: HOST_SLOT,
        transports: vec![TransportKind::Shm],
        device: Some(GpuMemory::offer(side)),
        handshake_timeout: TIMEOUT,
        ..ListenerConfig::default()
    };
    let listener = Listener::bind("127.0.0.1:0", config).await.map_err(text)?;
    report(&format!("addr {}", listener.local_addr()));
    let (sender, mut peers) = mpsc::unbounded_channel();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let on_peer = move |connection| drop(sender.send(connection));
    let serving = tokio::spawn(listener.serve(|_| Ok(Vec::new()), on_peer, async {
        let _ = stopped.await;
    }));
    let mut connections: Vec<Connection> = Vec::with_capacity(count);
    while connections.len() < count {
        let connection = tokio::time::timeout(TIMEOUT, peers.recv())
            .await
            .map_err(|_| "not all senders came".to_owned())?
            .ok_or("the listener ended")?;
        connections.push(connection);
    }
    drop(stop);
    serving.await.map_err(text)?;
    connections.sort_by_key(|connection| connection.peer.peer_id);
    Ok(connections)
}

/// The device slots of a connection.
fn pair_of(connection: &Connection) -> Option<&DevicePair> {
    connection.device.as_ref()?.downcast_ref()
}

impl Party {
    fn pairs(&self, phase: &Phase) -> Result<Vec<&DevicePair>, String> {
        let count = match phase.pattern {
            Pattern::Store if self.idx != 0 => 0,
            Pattern::Store => 1,
            _ => self.connections.len(),
        };
        if self.connections.iter().any(|connection| pair_of(connection).is_none()) {
            return Err("a connection came without device slots".to_owned());
        }
        Ok(self.connections.iter().take(count).filter_map(pair_of).collect())
    }

    /// Poisons the part of the slots that the next launch writes, and clears counters and results.
    fn reset(&self, phase: &Phase) -> Result<(), String> {
        for connection in &self.connections {
            let Some(pair) = pair_of(connection) else { continue };
            // SAFETY: both ranges are in this side's slot; peers store again only when all processes are prepared.
            unsafe {
                self.stream.fill(pair.own(), POISON, phase.bytes as u64).map_err(text)?;
                self.stream.fill(pair.own().add(self.counter_at), 0, 128).map_err(text)?;
            }
        }
        // SAFETY: the whole buffer, which no kernel uses now.
        unsafe { self.stream.fill(self.results.ptr(), 0, RESULT_BYTES).map_err(text)? };
        self.stream.wait(soon()).map_err(text)
    }

    /// Runs the kernel. Returns the time of the slowest peer in microseconds.
    fn launch(&self, config: &DeviceBenchConfig, phase: &Phase) -> Result<f64, String> {
        let pairs = self.pairs(phase)?;
        if pairs.is_empty() {
            return Ok(0.0);
        }
        let mut params = P2pParams::zeroed();
        params.version = DEVICE_ABI_VERSION;
        params.num_peers = pairs.len() as u32;
        // Both sides of a pair need the same number, whatever the number of their peers.
        let most = if phase.pattern == Pattern::Store {
            MOST_BLOCKS
        } else {
            MOST_BLOCKS / config.senders.max(config.receivers)
        };
        params.blocks_per_peer = (phase.bytes / BYTES_PER_BLOCK).clamp(1, most.max(1)) as u32;
        params.num_turns = phase.turns as u32;
        params.begins = u32::from(self.is_sender);
        params.num_bytes = phase.bytes as u64;
        params.timeout_ns = 5_000_000_000;
        params.elapsed_ns = self.results.ptr();
        params.error = self.results.ptr().add(ERROR_AT);
        for (at, pair) in pairs.iter().enumerate() {
            params.counters[at] = pair.own().add(self.counter_at);
            params.counter_offset[at] = self.counter_at;
            params.links[at] =
                Link { window: pair.peer(), context: 0, path: PATH_DIRECT, reserved: 0 };
        }
        // SAFETY: slots and results are as large as the kernels take them for, and stay until the launch has
        // been waited for.
        unsafe {
            if phase.pattern == Pattern::PingPong {
                let kernel = self.gpu.prepare(PingPongParams(params)).map_err(text)?;
                self.stream.launch(&kernel).map_err(text)?;
            } else {
                let kernel = self.gpu.prepare(StreamParams(params)).map_err(text)?;
                self.stream.launch(&kernel).map_err(text)?;
            }
        }
        self.stream.wait(soon()).map_err(text)?;
        let mut results = [0u8; RESULT_BYTES as usize];
        self.gpu.read(&self.results, 0, &mut results, soon()).map_err(text)?;
        let word = |at: usize| {
            let bytes: [u8; 8] = results[at..at + 8].try_into().unwrap_or_default();
            u64::from_ne_bytes(bytes)
        };
        let error: ErrorWord =
            bytemuck::pod_read_unaligned(&results[ERROR_AT as usize..][..size_of::<ErrorWord>()]);
        if error.tag != TAG_NONE {
            return Err(error.to_string());
        }
        Ok((0..pairs.len()).map(|at| word(8 * at)).max().unwrap_or(0) as f64 / 1e3)
    }

    /// Compares what the last turn of a launch left in this side's slots.
    fn verify(&mut self, phase: &Phase) -> Result<(), String> {
        // Patterns in one direction write to receivers only.
        if self.is_sender && phase.pattern != Pattern::PingPong {
            return Ok(());
        }
        let expected = match phase.pattern {
            Pattern::PingPong => phase.turns + 1,
            _ => phase.turns,
        };
        let expected = (expected as u32).to_ne_bytes();
        let mut found = vec![0; phase.bytes];
        let mut verified = 0;
        for pair in self.pairs(phase)? {
            self.gpu.read(pair.own_memory(), 0, &mut found, soon()).map_err(text)?;
            if let Some(at) = found.chunks(4).position(|word| word != expected) {
                return Err(format!(
                    "word {at} of {} bytes is {:?}, expected {expected:?}",
                    phase.bytes,
                    &found[4 * at..4 * at + 4]
                ));
            }
            verified += phase.bytes as u64;
        }
        self.verified += verified;
        Ok(())
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn soon() -> Instant {
    Instant::now() + TIMEOUT
}

/// Environment variable that makes a process a child of this benchmark.
const JOB_VARIABLE: &str = "SWITCHYARD_P2P_DEVICE_BENCH_JOB";
const HOST_SLOT: SlotConfig = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
const TIMEOUT: Duration = Duration::from_secs(60);
const POISON: u8 = 0xff;
/// Smallest messages whose time is that of their bytes and not of a flag.
const BANDWIDTH_BYTES: usize = 1 << 20;
/// Offset of the error word, after the times of 32 peers.
const ERROR_AT: u64 = 256;
const RESULT_BYTES: u64 = 512;
/// A block stores 46 GB/s. Eight blocks fill a link; more blocks hide the latency.
const BYTES_PER_BLOCK: usize = 4096;
const MOST_BLOCKS: usize = 64;
