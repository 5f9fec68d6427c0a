//! `benchmark_remote`: producers, lanes and threads on one host, slots on another, any network between.
//!
//! The two sides agree on everything over one TCP connection, line by line in JSON. Before anything is
//! timed, rounds of fresh objects are put and the receiver compares every word of them.

use std::net::{IpAddr, TcpListener, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use kernels::gpu::Gpu;
use p2p_core::endpoint::Endpoint;
use p2p_core::network::{Joined, Network, Route, SideDescription};
use p2p_core::{AnyEndpoint, Region, SlotConfig, SlotLayout};

use super::gpu::{self as producers, Order, PRODUCE_FILLS, PRODUCE_ROUND_TRIP, Producers};
use super::lines::{CONNECT_LIMIT, LIMIT, Lines, PAUSE, accept, connect};
use super::{Latency, pattern};
use crate::command::{Command, Opcode};
use crate::gpu::{self, GpuPoster};
use crate::lane::{LaneConfig, Lanes, Poster};
use crate::memory;
use crate::threads::{PeerConfig, Proxy, ProxyConfig, ProxyPeer};

/// What both sides do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Plan {
    /// Threads of the proxy, with a pair of slots and one lane each.
    pub threads: usize,
    /// Bytes of an object, a multiple of 8.
    pub object_bytes: u32,
    /// Objects of each thread in flight at most.
    pub budget: u32,
    /// Objects posted together.
    pub batch: u32,
    /// Objects of each thread that are timed.
    pub commands: u64,
    /// Rounds of `budget` objects whose every word is compared: those of a GPU without a pause between them,
    /// and the last round's only.
    pub checks: u32,
    /// Whether a GPU produces, and lanes are of one kind whatever the thread.
    #[serde(default)]
    pub is_gpu: bool,
}

/// What came of it.
#[derive(Debug, Clone, serde::Serialize)]
pub struct RemoteFigures {
    /// The network between.
    pub transport: String,
    /// What was done.
    #[serde(flatten)]
    pub plan: Plan,
    /// Objects in all.
    pub objects: u64,
    /// Until the last had arrived.
    pub wall_ms: f64,
    /// Millions of objects a second.
    pub mops: f64,
    /// Payload.
    pub gbps: f64,
    /// From posting a batch to its end.
    pub latency: Option<Latency>,
    /// Of one object after the other, until it has arrived (put and quiet); from a GPU until the object may be
    /// written again.
    pub one: Option<Latency>,
    /// Objects compared, all good.
    pub checked: u64,
}

/// What the sides say to each other.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub(super) enum Line {
    Plan(Plan),
    Side {
        address: u64,
        remote_key: u64,
        bytes: u64,
        detail: Vec<u8>,
    },
    Joined,
    /// Compare round so-and-so; the counters must have this value.
    Check {
        round: u64,
        counter: u64,
    },
    Checked {
        objects: u64,
        bad: u64,
        counters: Vec<u64>,
    },
    /// The sender is still at work.
    Busy,
    Done,
}

impl Plan {
    fn layout(&self) -> Result<SlotLayout> {
        let objects = u64::from(self.object_bytes) * u64::from(self.budget);
        let slot_bytes = (objects as usize).next_multiple_of(4096).max(4096) + 4096;
        Ok(SlotLayout::new(SlotConfig { slot_bytes, num_frames: 1 })?)
    }

    fn check(&self) -> Result<()> {
        ensure!((1..=64).contains(&self.threads), "threads: expected 1 to 64");
        ensure!(
            self.object_bytes.is_multiple_of(8) && self.object_bytes > 0,
            "object bytes: expected a multiple of 8"
        );
        ensure!((1..=self.budget).contains(&self.batch), "batch: expected 1 to the budget");
        ensure!((2..=16_384).contains(&self.budget), "budget: expected 2 to 16384");
        // What the other side says must not decide how much memory this one gives it.
        let slots = u64::from(self.object_bytes) * u64::from(self.budget) * self.threads as u64;
        ensure!(
            slots <= MAX_SLOTS_BYTES,
            "slots of {} x {} x {} bytes (threads, budget, object): expected at most {MAX_SLOTS_BYTES} in all",
            self.threads,
            self.budget,
            self.object_bytes
        );
        ensure!(
            !self.is_gpu
                || (self.object_bytes.is_multiple_of(16)
                    && self.batch <= 32
                    && self.budget.is_multiple_of(self.batch)
                    && self.commands.is_multiple_of(self.batch.into())),
            "from a GPU: expected objects of a multiple of 16 bytes, batches up to 32, and a budget and a number of objects that are multiples of the batch"
        );
        Ok(())
    }

    fn counter(layout: &SlotLayout) -> usize {
        layout.control_offset(2048)
    }

    /// Lane in the pattern of what thread `thread` produces.
    const fn pattern_lane(&self, thread: usize) -> u64 {
        if self.is_gpu { 0 } else { thread as u64 }
    }

    fn lanes(&self) -> LaneConfig {
        // A producer of this host posts its quiet beside a full budget.
        let budget = if self.is_gpu { self.budget } else { self.budget + 1 };
        LaneConfig { num_lanes: 1, depth: budget.next_power_of_two().max(16), budget }
    }
}

/// The side that receives: serves one sender, who has `patience` to come. The listener does not block
/// afterwards.
///
/// # Errors
/// Whatever the network or the sender refuses.
pub fn receive(network: &dyn Network, listener: &TcpListener, patience: Duration) -> Result<()> {
    let mut line = Lines::new(accept(listener, patience)?)?;
    let Line::Plan(plan) = line.read()? else { bail!("the sender begins with something else") };
    plan.check()?;
    let layout = plan.layout()?;
    let pairs = join(network, &mut line, &plan, &layout)?;
    let words = plan.object_bytes as usize / 8;
    let mut object = vec![0u8; plan.object_bytes as usize];
    loop {
        // Providers that make progress in calls alone are driven meanwhile.
        let message = line.read_while(|| {
            pairs
                .iter()
                .filter_map(|pair| pair.endpoint.driver())
                .for_each(|driver| driver.drive());
        })?;
        match message {
            Line::Check { round, counter } => {
                let mut bad = 0;
                for (thread, pair) in pairs.iter().enumerate() {
                    for idx in 0..plan.budget {
                        memory::read(&pair.slot, idx as usize * object.len(), &mut object)?;
                        // Any round: the sender names it.
                        let number =
                            round.wrapping_mul(plan.budget.into()).wrapping_add(idx.into());
                        let is_good = (0..words).all(|word| {
                            let expected = pattern(plan.pattern_lane(thread), number, word as u64);
                            object[8 * word..8 * word + 8] == expected.to_ne_bytes()
                        });
                        bad += u64::from(!is_good);
                    }
                }
                let counters: Vec<u64> = pairs
                    .iter()
                    .map(|pair| {
                        let word = memory::word(&pair.slot, Plan::counter(&layout));
                        word.map_or(u64::MAX, |word| word.load(Ordering::Acquire))
                    })
                    .collect();
                ensure!(
                    counters.iter().all(|found| *found == counter),
                    "counters {counters:?}, expected {counter}"
                );
                let objects = u64::from(plan.budget) * pairs.len() as u64;
                line.write(&Line::Checked { objects, bad, counters })?;
            }
            Line::Busy => {}
            Line::Done => return Ok(()),
            other => bail!("the sender says {other:?}"),
        }
    }
}

/// The side that sends, through a proxy; `gpu` is who produces, if it is no thread of this host.
///
/// # Errors
/// Whatever the network refuses, a failure of the proxy, or a wrong word at the receiver.
pub fn send(
    network: &dyn Network,
    receiver: impl ToSocketAddrs,
    mut plan: Plan,
    config: &ProxyConfig,
    gpu: Option<&Gpu>,
) -> Result<RemoteFigures> {
    plan.is_gpu = gpu.is_some();
    plan.check()?;
    let layout = plan.layout()?;
    let mut line = Lines::new(connect(receiver, CONNECT_LIMIT)?)?;
    line.write(&Line::Plan(plan))?;
    let pairs = join(network, &mut line, &plan, &layout)?;
    let proxy: Proxy = Proxy::start(config)?;
    let beats = line.beats(PAUSE)?;
    let measured = match gpu {
        Some(gpu) => from_gpu(gpu, &proxy, pairs, &plan, &layout, &mut line)?,
        None => from_host(&proxy, pairs, &plan, &layout, &mut line)?,
    };
    drop(beats);
    line.write(&Line::Done)?;
    let objects = plan.commands * plan.threads as u64;
    let Measured { checked, wall, samples, one } = measured;
    let mops = objects as f64 / wall.as_secs_f64() / 1e6;
    Ok(RemoteFigures {
        transport: format!("{} {}", network.kind().name(), network.flavour()),
        plan,
        objects,
        wall_ms: wall.as_secs_f64() * 1e3,
        mops,
        gbps: mops * 1e6 * f64::from(plan.object_bytes) * 8.0 / 1e9,
        latency: Latency::of(samples),
        one: Latency::of(one),
        checked,
    })
}

/// What producers came to. Times in nanoseconds.
struct Measured {
    checked: u64,
    wall: Duration,
    samples: Vec<u64>,
    one: Vec<u64>,
}

/// Lets the receiver compare a round. Gives the number of objects.
fn check(line: &mut Lines, round: u64, counter: u64) -> Result<u64> {
    line.write(&Line::Check { round, counter })?;
    match line.read()? {
        Line::Checked { objects, bad: 0, .. } => Ok(objects),
        Line::Checked { objects, bad, .. } => bail!("{bad} of {objects} objects arrived wrong"),
        other => bail!("the receiver says {other:?}"),
    }
}

fn from_host(
    proxy: &Proxy,
    pairs: Vec<Joined>,
    plan: &Plan,
    layout: &SlotLayout,
    line: &mut Lines,
) -> Result<Measured> {
    let mut senders = Vec::new();
    for (idx, Joined { endpoint, slot }) in pairs.into_iter().enumerate() {
        senders.push(Sender::new(proxy, endpoint, slot, plan, layout, idx)?);
    }
    let mut checked = 0;
    for round in 0..u64::from(plan.checks) {
        each(&mut senders, |sender| sender.round(plan, round))?;
        checked += check(line, round, round + 1)?;
    }
    let start = Instant::now();
    let samples = each(&mut senders, |sender| sender.timed(plan))?;
    let wall = start.elapsed();
    let one = senders.first_mut().map(|sender| sender.one_by_one(plan)).transpose()?;
    let samples = samples.into_iter().flatten().collect();
    Ok(Measured { checked, wall, samples, one: one.unwrap_or_default() })
}

fn from_gpu(
    gpu: &Gpu,
    proxy: &Proxy,
    pairs: Vec<Joined>,
    plan: &Plan,
    layout: &SlotLayout,
    line: &mut Lines,
) -> Result<Measured> {
    let mut peers = Vec::new();
    let mut posters = Vec::new();
    let slot_bytes = layout.slot_bytes() as u64;
    for (idx, Joined { endpoint, slot }) in pairs.into_iter().enumerate() {
        let (mirror, address) = gpu::mirror(gpu, slot_bytes)?;
        let lanes = gpu::lanes(gpu, plan.lanes())?;
        let config = producers::poster_config(address.0, slot_bytes, idx);
        posters.push(GpuPoster::new(gpu, &lanes, config)?);
        let config = peer_config(lanes, mirror, layout, idx);
        peers.push((proxy.add(endpoint, config)?, slot));
    }
    let producers = Producers::new(gpu, posters)?;
    let run = |order: &Order| {
        proxy.expect_work();
        let produced = producers.run(order)?;
        if let Some(lane) = produced.status.iter().position(|code| *code != 0) {
            let failures: Vec<_> = peers.iter().flat_map(|(p, _)| p.take_failures()).collect();
            bail!("the producer of lane {lane} ended with {}: {failures:?}", produced.status[lane]);
        }
        Ok(produced)
    };
    let timed = Order {
        num_commands: plan.commands,
        batch: plan.batch,
        object_bytes: plan.object_bytes,
        num_objects: plan.budget,
        flags: 0,
        counter_offset: 0,
    };
    let num_checked = u64::from(plan.checks) * u64::from(plan.budget);
    let mut checked = 0;
    if num_checked > 0 {
        run(&Order {
            num_commands: num_checked,
            // A counter goes with every object.
            batch: if plan.batch.is_multiple_of(2) { plan.batch / 2 } else { 1 },
            flags: PRODUCE_FILLS,
            counter_offset: Plan::counter(layout) as u64,
            ..timed
        })?;
        checked = check(line, u64::from(plan.checks) - 1, num_checked)?;
    }
    let produced = run(&timed)?;
    let num_commands = plan.commands.min(2000);
    let one = run(&Order { num_commands, batch: 1, flags: PRODUCE_ROUND_TRIP, ..timed })?;
    Ok(Measured { checked, wall: produced.elapsed, samples: produced.samples, one: one.samples })
}

fn peer_config(lanes: Lanes, mirror: Region, layout: &SlotLayout, idx: usize) -> PeerConfig {
    PeerConfig {
        peer: idx as u32,
        lanes,
        window_bytes: layout.slot_bytes() as u64,
        sources: vec![mirror],
        relay: None,
        thread: Some(idx),
    }
}

/// One thread's pair and producer.
struct Sender {
    peer: ProxyPeer<AnyEndpoint>,
    poster: Poster,
    mirror: Region,
    _slot: Region,
    idx: usize,
    counter: u32,
}

impl Sender {
    fn new(
        proxy: &Proxy,
        endpoint: AnyEndpoint,
        slot: Region,
        plan: &Plan,
        layout: &SlotLayout,
        idx: usize,
    ) -> Result<Self> {
        let lanes = Lanes::anonymous(plan.lanes())?;
        let mirror = Region::anonymous(layout.slot_bytes())?;
        let poster = lanes.poster(0);
        let config = peer_config(lanes, mirror.clone(), layout, idx);
        let peer = proxy.add(endpoint, config)?;
        let counter = Plan::counter(layout) as u32;
        Ok(Self { peer, poster, mirror, _slot: slot, idx, counter })
    }

    fn post(&mut self, command: &Command) -> Result<u64> {
        let deadline = Instant::now() + LIMIT;
        loop {
            if let Some(number) = self.poster.try_post(command) {
                return Ok(number);
            }
            self.look(deadline)?;
        }
    }

    fn look(&mut self, deadline: Instant) -> Result<()> {
        self.peer.ring();
        if let Some(failure) = self.peer.take_failures().into_iter().next() {
            return Err(failure.into());
        }
        ensure!(Instant::now() < deadline, "the proxy makes no progress");
        std::thread::yield_now();
        Ok(())
    }

    fn wait(&mut self, number: u64) -> Result<()> {
        let deadline = Instant::now() + LIMIT;
        while self.poster.completed() < number {
            self.look(deadline)?;
        }
        Ok(())
    }

    fn put(&mut self, plan: &Plan, idx: u64) -> Result<u64> {
        let offset = (idx % u64::from(plan.budget)) as u32 * plan.object_bytes;
        self.post(&Command::transfer(Opcode::Put, offset, 0, offset, plan.object_bytes))
    }

    /// Fresh objects, a counter behind them, and until they are there.
    fn round(&mut self, plan: &Plan, round: u64) -> Result<()> {
        let mut object = vec![0u8; plan.object_bytes as usize];
        for idx in 0..u64::from(plan.budget) {
            let number = round * u64::from(plan.budget) + idx;
            for (word, bytes) in object.chunks_exact_mut(8).enumerate() {
                bytes.copy_from_slice(&pattern(self.idx as u64, number, word as u64).to_ne_bytes());
            }
            memory::write(&self.mirror, idx as usize * object.len(), &object)?;
            self.put(plan, idx)?;
        }
        let counter = self.counter;
        self.post(&Command::word(Opcode::Add, counter, 1))?;
        let end = self.post(&Command::new(Opcode::Quiet))?;
        self.wait(end)
    }

    /// As many objects as fast as the budget allows; latencies of batches.
    fn timed(&mut self, plan: &Plan) -> Result<Vec<u64>> {
        let mut under_way = std::collections::VecDeque::new();
        let mut samples = Vec::with_capacity((plan.commands / u64::from(plan.batch)) as usize + 1);
        let mut begin = 0;
        while begin < plan.commands {
            let posted = Instant::now();
            let num = u64::from(plan.batch).min(plan.commands - begin);
            let mut end = 0;
            for idx in begin..begin + num {
                end = self.put(plan, idx)?;
            }
            self.peer.ring();
            under_way.push_back((posted, end));
            begin += num;
            let completed = self.poster.completed();
            while let Some((posted, _)) = under_way.pop_front_if(|(_, end)| *end <= completed) {
                samples.push(posted.elapsed().as_nanos() as u64);
            }
        }
        let end = self.post(&Command::new(Opcode::Quiet))?;
        self.wait(end)?;
        Ok(samples)
    }

    /// Objects one after the other, each until it has arrived.
    fn one_by_one(&mut self, plan: &Plan) -> Result<Vec<u64>> {
        let mut samples = Vec::new();
        for idx in 0..plan.commands.min(2000) {
            let posted = Instant::now();
            self.put(plan, idx)?;
            let end = self.post(&Command::new(Opcode::Quiet))?;
            self.peer.ring();
            self.wait(end)?;
            samples.push(posted.elapsed().as_nanos() as u64);
        }
        Ok(samples)
    }
}

fn each<T: Send>(
    senders: &mut [Sender],
    work: impl Fn(&mut Sender) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            senders.iter_mut().map(|sender| scope.spawn(|| work(sender))).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Result<T>>| match thread.join() {
            Ok(result) => result,
            Err(_) => bail!("a producer panicked"),
        };
        threads.into_iter().map(join).collect()
    })
}

/// Opens as many sides as there are threads, and joins each with the other end's.
fn join(
    network: &dyn Network,
    line: &mut Lines,
    plan: &Plan,
    layout: &SlotLayout,
) -> Result<Vec<Joined>> {
    let address = |addr: std::net::SocketAddr| -> IpAddr { addr.ip() };
    let (local, remote) = (line.writer.local_addr()?, line.writer.peer_addr()?);
    let route = Route { local: address(local), remote: address(remote) };
    let mut joined = Vec::new();
    for _ in 0..plan.threads {
        let side = network.open(layout, route)?;
        let SideDescription { address, remote_key, bytes, detail } = side.description();
        line.write(&Line::Side { address, remote_key, bytes, detail })?;
        let Line::Side { address, remote_key, bytes, detail } = line.read()? else {
            bail!("the other side describes no slot")
        };
        joined.push(side.join(&SideDescription { address, remote_key, bytes, detail })?);
        // Nobody puts before both have joined.
        line.write(&Line::Joined)?;
        ensure!(matches!(line.read()?, Line::Joined), "the other side did not join");
    }
    Ok(joined)
}

/// A network by the name that people give it: `libfabric:PROVIDER`, `libfabric`, `verbs`.
///
/// # Errors
/// A name that this build does not know, or a network that this host does not have.
pub fn open(name: &str) -> Result<Arc<dyn Network>> {
    let (kind, detail) = name.split_once(':').unwrap_or((name, ""));
    match kind {
        #[cfg(feature = "libfabric")]
        "libfabric" => {
            use p2p_core::backend::libfabric::{DEFAULT_PROVIDER, FabricNetwork};
            let provider = if detail.is_empty() { DEFAULT_PROVIDER } else { detail };
            Ok(Arc::new(FabricNetwork::open(provider)?))
        }
        #[cfg(feature = "verbs")]
        "verbs" => {
            use p2p_core::backend::verbs::{VerbsConfig, VerbsNetwork};
            ensure!(detail.is_empty(), "verbs takes no detail, found `{detail}`");
            Ok(Arc::new(VerbsNetwork::open(VerbsConfig::default())?))
        }
        _ => bail!(
            "transport `{kind}` ({detail}) is not in this build: expected libfabric or verbs, features of this crate"
        ),
    }
}

/// Of the slots of all threads.
const MAX_SLOTS_BYTES: u64 = 4 << 30;
