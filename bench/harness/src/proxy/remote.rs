//! `benchmark_remote`: producers, lanes and a proxy's threads on one host, slots on another, with any network.
//!
//! The two sides coordinate over one TCP connection, by lines of JSON. Before the timed part the sender puts rounds of
//! fresh objects, and the receiver compares every word of a round before the next. Of the timed objects it compares
//! those that are left in the slots at the end.

mod host;
mod lines;
mod plan;

pub use self::plan::Plan;

use std::net::{IpAddr, TcpListener, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use kernels::gpu::Gpu;
use p2p_core::endpoint::Progress;
use p2p_core::network::{JoinedSide, Network, Route, SideDescription};
use p2p_core::{Region, SlotLayout};

use self::host::from_host;
use self::lines::{CONNECT_LIMIT, Lines, PAUSE, accept, connect};
use super::gpu::{self as producers, Order, PRODUCE_FILLS, PRODUCE_ROUND_TRIP, Producers};
use super::pattern;
use crate::stats::Latency;
use proxy::gpu::{self, GpuPoster};
use proxy::lane::Lanes;
use proxy::memory;
use proxy::threads::{PeerConfig, Proxy, ProxyConfig};

/// Figures of the sender.
#[derive(Debug, Clone, serde::Serialize)]
pub struct RemoteFigures {
    /// Transport and flavour of the network.
    pub transport: String,
    /// Settings of the measurement.
    #[serde(flatten)]
    pub plan: Plan,
    /// Objects of all threads.
    pub objects: u64,
    /// Time in milliseconds until the last object had arrived.
    pub wall_ms: f64,
    /// Millions of objects per second.
    pub mops: f64,
    /// Payload in 10^9 bits per second.
    pub gbps: f64,
    /// From posting a batch to its end.
    pub latency: Option<Latency>,
    /// Latency of single objects, one after the other. From the host, until the object has arrived (put and quiet).
    /// From a GPU, until the object may be written again.
    pub one: Option<Latency>,
    /// Objects of rounds that were compared. All were right.
    pub checked: u64,
    /// Timed objects that were compared. All were right.
    pub checked_timed: u64,
}

/// Result of the receiver.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Received {
    /// Transport and flavour of the network.
    pub transport: String,
    /// The sender's settings.
    #[serde(flatten)]
    pub plan: Plan,
    /// Objects of rounds that were compared. All were right.
    pub checked: u64,
    /// Timed objects that were compared. All were right.
    pub checked_timed: u64,
}

/// A line on the control connection.
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
    Check(Check),
    Checked {
        objects: u64,
        bad: u64,
        counters: Vec<u64>,
    },
    /// The sender is still at work.
    Busy,
    Done,
}

/// A request to compare objects.
#[derive(Debug, Clone, Copy, serde::Serialize, serde::Deserialize)]
pub(super) struct Check {
    /// Round of the pattern.
    round: u64,
    /// Number of threads whose slots are compared, from the first.
    threads: usize,
    /// Number of objects compared per thread, from the first.
    objects: u32,
    /// Expected value of all counters.
    counter: u64,
    /// Whether these are timed objects.
    is_timed: bool,
}

/// Runs the receiving side for one sender. Waits up to `patience` for the sender. Leaves the listener in non-blocking
/// mode.
///
/// # Errors
/// An error of the network or of the sender, or a wrong object.
pub fn receive(
    network: &dyn Network,
    listener: &TcpListener,
    patience: Duration,
) -> Result<Received> {
    let mut line = Lines::new(accept(listener, patience)?)?;
    let Line::Plan(plan) = line.read()? else { bail!("the sender begins with something else") };
    plan.check()?;
    let layout = plan.layout()?;
    let pairs = join(network, &mut line, &plan, &layout)?;
    let (mut checked, mut checked_timed, mut wrong) = (0, 0, 0);
    loop {
        // Some providers make progress only in calls.
        let message = line.read_while(|| {
            pairs
                .iter()
                .filter_map(|pair| pair.endpoint.driver())
                .for_each(|driver| driver.drive());
        })?;
        match message {
            Line::Check(check) => {
                let (objects, bad) = compare(&pairs, &plan, &check)?;
                let counters: Vec<u64> = pairs
                    .iter()
                    .map(|pair| {
                        let word = memory::word(&pair.slot, Plan::counter(&layout));
                        word.map_or(u64::MAX, |word| word.load(Ordering::Acquire))
                    })
                    .collect();
                ensure!(
                    counters.iter().all(|found| *found == check.counter),
                    "counters {counters:?}, expected {}",
                    check.counter
                );
                line.write(&Line::Checked { objects, bad, counters })?;
                *if check.is_timed { &mut checked_timed } else { &mut checked } += objects;
                wrong += bad;
            }
            Line::Busy => {}
            Line::Done => {
                let all = checked + checked_timed;
                ensure!(wrong == 0, "{wrong} of {all} objects arrived wrong");
                let transport = transport(network);
                return Ok(Received { transport, plan, checked, checked_timed });
            }
            other => bail!("the sender says {other:?}"),
        }
    }
}

/// Compares objects, and returns the number of objects and of bad ones. Overwrites them, so that an object that does
/// not arrive in a later round is noticed.
fn compare(pairs: &[JoinedSide], plan: &Plan, check: &Check) -> Result<(u64, u64)> {
    ensure!(
        check.threads <= pairs.len(),
        "{} threads to compare, there are {}",
        check.threads,
        pairs.len()
    );
    ensure!(
        check.objects <= plan.budget,
        "{} objects to compare, there are {}",
        check.objects,
        plan.budget
    );
    let mut object = vec![0u8; plan.object_bytes as usize];
    let nothing = vec![POISON; object.len()];
    let mut bad = 0;
    for (thread, pair) in pairs[..check.threads].iter().enumerate() {
        for idx in 0..check.objects {
            let place = idx as usize * object.len();
            memory::read(&pair.slot, place, &mut object)?;
            memory::write(&pair.slot, place, &nothing)?;
            let number = plan.number(check.round, idx);
            let is_good = object.chunks_exact(8).enumerate().all(|(word, bytes)| {
                bytes == pattern(plan.pattern_lane(thread), number, word as u64).to_ne_bytes()
            });
            bad += u64::from(!is_good);
        }
    }
    Ok((check.threads as u64 * u64::from(check.objects), bad))
}

/// Runs the sending side, through a proxy. The producers run on `gpu`, or are threads of this host without it.
///
/// # Errors
/// An error of the network, a failure of the proxy, or a wrong word at the receiver.
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
    let heartbeat = line.heartbeat(PAUSE)?;
    let measured = match gpu {
        Some(gpu) => from_gpu(gpu, &proxy, pairs, &plan, &layout, &mut line)?,
        None => from_host(&proxy, pairs, &plan, &layout, &mut line)?,
    };
    drop(heartbeat);
    line.write(&Line::Done)?;
    let objects = plan.commands * plan.threads as u64;
    let Samples { checked, checked_timed, wall, samples, one } = measured;
    let mops = objects as f64 / wall.as_secs_f64() / 1e6;
    Ok(RemoteFigures {
        transport: transport(network),
        plan,
        objects,
        wall_ms: wall.as_secs_f64() * 1e3,
        mops,
        gbps: mops * 1e6 * f64::from(plan.object_bytes) * 8.0 / 1e9,
        latency: Latency::of(samples),
        one: Latency::of(one),
        checked,
        checked_timed,
    })
}

fn transport(network: &dyn Network) -> String {
    format!("{} {}", network.kind().name(), network.flavour())
}

/// Result of the producers. Samples are in nanoseconds.
struct Samples {
    checked: u64,
    checked_timed: u64,
    wall: Duration,
    samples: Vec<u64>,
    one: Vec<u64>,
}

/// Fills the objects of a mirror with the pattern of a round. None of them may be in flight.
fn fill(mirror: &Region, plan: &Plan, thread: usize, round: u64) -> Result<()> {
    let mut object = vec![0u8; plan.object_bytes as usize];
    for idx in 0..plan.budget {
        let number = plan.number(round, idx);
        for (word, bytes) in object.chunks_exact_mut(8).enumerate() {
            let value = pattern(plan.pattern_lane(thread), number, word as u64);
            bytes.copy_from_slice(&value.to_ne_bytes());
        }
        memory::write(mirror, idx as usize * object.len(), &object)?;
    }
    Ok(())
}

/// Asks the receiver to compare. Returns the number of objects.
fn check(line: &mut Lines, check: Check) -> Result<u64> {
    line.write(&Line::Check(check))?;
    let all = check.threads as u64 * u64::from(check.objects);
    match line.read()? {
        Line::Checked { objects, bad: 0, .. } if objects == all => Ok(objects),
        Line::Checked { objects, bad: 0, .. } => bail!("{objects} of {all} objects were compared"),
        Line::Checked { objects, bad, .. } => bail!("{bad} of {objects} objects arrived wrong"),
        other => bail!("the receiver says {other:?}"),
    }
}

fn from_gpu(
    gpu: &Gpu,
    proxy: &Proxy,
    pairs: Vec<JoinedSide>,
    plan: &Plan,
    layout: &SlotLayout,
    line: &mut Lines,
) -> Result<Samples> {
    let mut peers = Vec::new();
    let mut posters = Vec::new();
    let mut mirrors = Vec::new();
    let slot_bytes = layout.slot_bytes() as u64;
    for (idx, JoinedSide { endpoint, slot }) in pairs.into_iter().enumerate() {
        let (mirror, address) = gpu::mirror(gpu, slot_bytes)?;
        let lanes = gpu::lanes(gpu, plan.lanes())?;
        let config = producers::poster_config(address.0, slot_bytes, idx);
        posters.push(GpuPoster::new(gpu, &lanes, config)?);
        let config = peer_config(lanes, mirror.clone(), layout, idx);
        mirrors.push(mirror);
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
    let mut checked = 0;
    let mut counter = 0;
    for _ in 0..plan.checks {
        run(&Order {
            num_commands: plan.budget.into(),
            // Each object is followed by an add, so half of the commands are objects.
            batch: if plan.batch.is_multiple_of(2) { plan.batch / 2 } else { 1 },
            flags: PRODUCE_FILLS,
            counter_offset: Plan::counter(layout) as u64,
            ..timed
        })?;
        counter += u64::from(plan.budget);
        // Each launch begins with the same object number.
        checked += check(line, plan.whole_round(0, counter))?;
    }
    // Timed objects are filled before, with rounds that no launch has used.
    let fresh = |round| {
        let mut mirrors = mirrors.iter().enumerate();
        mirrors.try_for_each(|(thread, mirror)| fill(mirror, plan, thread, round))
    };
    fresh(1)?;
    let produced = run(&timed)?;
    let mut checked_timed = check(line, plan.left_of(plan.commands, plan.threads, 1, counter))?;
    fresh(2)?;
    let num_commands = plan.num_one_by_one();
    let one = run(&Order { num_commands, batch: 1, flags: PRODUCE_ROUND_TRIP, ..timed })?;
    checked_timed += check(line, plan.left_of(num_commands, plan.threads, 2, counter))?;
    let (samples, one) = (produced.samples.concat(), one.samples.concat());
    Ok(Samples { checked, checked_timed, wall: produced.elapsed, samples, one })
}

fn peer_config(lanes: Lanes, mirror: Region, layout: &SlotLayout, idx: usize) -> PeerConfig {
    PeerConfig {
        peer: idx as u32,
        lanes,
        window_bytes: layout.slot_bytes() as u64,
        sources: vec![mirror],
        thread: Some(idx),
    }
}

/// Opens one side for each thread, and joins each with a side of the other host.
fn join(
    network: &dyn Network,
    line: &mut Lines,
    plan: &Plan,
    layout: &SlotLayout,
) -> Result<Vec<JoinedSide>> {
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
        // Puts may begin only when both sides have joined.
        line.write(&Line::Joined)?;
        ensure!(matches!(line.read()?, Line::Joined), "the other side did not join");
    }
    Ok(joined)
}

/// Opens a network by its name on the command line: `libfabric:PROVIDER`, `libfabric`, `verbs`.
///
/// # Errors
/// This build does not know the name, or this host does not have the network.
pub fn open(name: &str) -> Result<Arc<dyn Network>> {
    let (kind, detail) = name.split_once(':').unwrap_or((name, ""));
    match kind {
        "libfabric" => {
            use libfabric_transport::{DEFAULT_PROVIDER, FabricNetwork};
            let provider = if detail.is_empty() { DEFAULT_PROVIDER } else { detail };
            Ok(Arc::new(FabricNetwork::open(provider)?))
        }
        #[cfg(feature = "verbs")]
        "verbs" => {
            use verbs_transport::{VerbsConfig, VerbsNetwork};
            ensure!(detail.is_empty(), "verbs takes no detail, found `{detail}`");
            Ok(Arc::new(VerbsNetwork::open(VerbsConfig::default())?))
        }
        _ => bail!(
            "transport `{kind}` ({detail}) is not in this build: expected libfabric or verbs, a feature of this crate"
        ),
    }
}

/// Overwrites compared objects. It is practically never put, since the pattern looks random.
const POISON: u8 = 0xa5;
