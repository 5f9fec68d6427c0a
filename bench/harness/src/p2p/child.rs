//! The sending and receiving processes.

use std::io::{BufRead, Write};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc;

use super::message::{Inbox, Pattern, Spin, messages_per_window, num_chunks, text, try_put};
use super::{BenchConfig, iterations, sizes};
use crate::clock::Clock;
use crate::stats::percentile;
use p2p_core::bootstrap::{
    ConnectConfig, Connection, Listener, ListenerConfig, PeerHello, connect,
};
use p2p_core::endpoint::{Progress, TransportKind};
use p2p_core::network::Network;
use p2p_core::slot::SlotConfig;
use p2p_core::transports::{OpenNetworks, TransportRequest, TransportSpec};
use verbs_transport::VerbsConfig;

/// Environment variable that makes a process a child of the benchmark.
pub(super) const JOB_VARIABLE: &str = "SWITCHYARD_P2P_BENCH_JOB";
/// Prefix of all lines for the parent. The program may print other lines.
pub(super) const LINE_PREFIX: &str = "p2p-bench: ";

/// The job of one process.
pub(super) struct Job {
    /// Index among the senders or among the receivers.
    pub(super) idx: usize,
    /// Addresses of the receivers. Empty for a receiver.
    pub(super) addrs: Vec<String>,
    pub(super) config: BenchConfig,
}

/// Runs this process's part if it is a child of [`run`](super::run), and returns whether it succeeded. The program
/// should then exit. Returns `None` in any other process. Call it before anything else.
#[must_use]
pub fn child_main() -> Option<bool> {
    child_main_with(networks)
}

/// The networks of this build, with their default settings.
#[must_use]
pub fn networks() -> OpenNetworks {
    OpenNetworks::default()
        .with(verbs_transport::opener(VerbsConfig::default()))
        .with(libfabric_transport::opener())
}

/// As [`child_main`], with settings for the networks. Calls `networks` in a child only.
#[must_use]
pub fn child_main_with(networks: impl FnOnce() -> OpenNetworks) -> Option<bool> {
    let job = std::env::var(JOB_VARIABLE).ok()?;
    let result =
        Job::decode(&job).ok_or_else(|| format!("cannot read the job `{job}`")).and_then(|job| {
            let mut networks = networks();
            match job.addrs.is_empty() {
                true => receive(&job, &mut networks),
                false => send(&job, &mut networks),
            }
        });
    if let Err(message) = &result {
        report(&format!("error {}", message.replace('\n', " ")));
    }
    Some(result.is_ok())
}

impl Job {
    pub(super) fn encode(&self) -> String {
        let c = &self.config;
        [
            self.idx.to_string(),
            self.addrs.join(","),
            c.senders.to_string(),
            c.receivers.to_string(),
            c.min_bytes.to_string(),
            c.max_bytes.to_string(),
            c.iterations.to_string(),
            c.slot.slot_bytes.to_string(),
            c.slot.num_frames.to_string(),
            c.transport.name().to_owned(),
            c.pin.to_string(),
            c.seed.to_string(),
            c.device.clone().unwrap_or_default(),
        ]
        .join("|")
    }

    fn decode(text: &str) -> Option<Self> {
        let mut words = text.split('|');
        let mut next = || words.next();
        let idx = next()?.parse().ok()?;
        let addrs = next()?.split(',').filter(|a| !a.is_empty()).map(str::to_owned).collect();
        let config = BenchConfig {
            senders: next()?.parse().ok()?,
            receivers: next()?.parse().ok()?,
            min_bytes: next()?.parse().ok()?,
            max_bytes: next()?.parse().ok()?,
            iterations: next()?.parse().ok()?,
            slot: SlotConfig {
                slot_bytes: next()?.parse().ok()?,
                num_frames: next()?.parse().ok()?,
            },
            transport: {
                let name = next()?;
                TransportKind::ALL.iter().copied().find(|kind| kind.name() == name)?
            },
            pin: next()?.parse().ok()?,
            seed: next()?.parse().ok()?,
            device: next().filter(|device| !device.is_empty()).map(str::to_owned),
        };
        Some(Self { idx, addrs, config })
    }
}

/// One channel of a measuring process, with the state of its messages.
struct Lane {
    connection: Connection,
    inbox: Inbox,
    /// Steps that the peer has announced: `ready` or `arrived`.
    peer_steps: u64,
    /// Frames received before the current iteration.
    next_seq: u64,
    /// Index of the process at the other end.
    peer_idx: u64,
    /// Offset in the pattern of the message to send.
    out: usize,
    /// Bytes of it that are sent.
    sent: usize,
    /// Whether the peer's message is complete.
    got: bool,
    spin: Spin,
}

impl Lane {
    fn new(connection: Connection, config: &BenchConfig, peer_idx: u64) -> Self {
        let spin =
            Spin::among(config.senders + config.receivers, connection.channel.endpoint().driver());
        let inbox = Inbox::new(&connection.channel, config.max_bytes);
        Self {
            connection,
            inbox,
            peer_steps: 0,
            next_seq: 0,
            peer_idx,
            out: 0,
            sent: 0,
            got: false,
            spin,
        }
    }

    /// Announces one step to the peer. Both sides take the same steps in the same order.
    fn step(&mut self) -> Result<(), String> {
        self.connection.channel.bump_progress().map_err(text)
    }

    /// Waits until the peer has announced one step more.
    fn await_step(&mut self) -> Result<(), String> {
        self.peer_steps += 1;
        let wanted = self.peer_steps;
        let channel = &self.connection.channel;
        self.spin.until("the other process", || Ok(channel.peer_progress() >= wanted))
    }

    fn poison(&self, len: usize, num: usize) {
        self.inbox.poison(&self.connection.channel, len, num, self.next_seq);
    }

    /// Continues to put `message`. Returns true once all of it is sent.
    #[inline]
    fn send_on(&mut self, message: &[u8]) -> Result<bool, String> {
        try_put(&mut self.connection.channel, message, &mut self.sent)
    }

    #[inline]
    fn collect(&mut self, len: usize, num: usize) -> Result<bool, String> {
        self.inbox.collect(&mut self.connection.channel, len, num)
    }

    fn verify<'p>(
        &mut self,
        messages: impl Iterator<Item = &'p [u8]>,
        len: usize,
        num: usize,
    ) -> Result<u64, String> {
        let channel = &mut self.connection.channel;
        self.next_seq += (num * num_chunks(len, channel.layout().frame_bytes())) as u64;
        (self.sent, self.got) = (0, false);
        self.inbox.verify(channel, messages)
    }
}

fn send(job: &Job, networks: &mut OpenNetworks) -> Result<(), String> {
    let config = &job.config;
    pin(config, 2 * job.idx);
    let runtime = runtime()?;
    let networks = open(config, networks)?;
    let mut lanes = Vec::with_capacity(job.addrs.len());
    for (idx, addr) in job.addrs.iter().enumerate() {
        let hello = PeerHello { peer_id: job.idx as u64, ..PeerHello::default() };
        let connect_config = ConnectConfig {
            slot: config.slot,
            transports: vec![config.transport],
            networks: networks.clone(),
            ..ConnectConfig::default()
        };
        let connection =
            runtime.block_on(connect(addr.as_str(), hello, connect_config)).map_err(text)?;
        lanes.push(Lane::new(connection, config, idx as u64));
    }
    report(&format!("pages {}", lanes[0].connection.pages.name()));
    let clock = Clock::calibrated();
    let pattern = Pattern::new(config.seed, config.max_bytes);
    let mut verified = 0;
    wait_for_go()?;
    if job.idx == 0 {
        report(&format!("raw {}", raw_flag(&mut lanes[0], &clock)?));
    }
    for len in sizes(config) {
        wait_for_go()?;
        let mut samples = latency(job, &mut lanes, &pattern, &clock, len, &mut verified)?;
        report(&format!("p50 {}", percentile(&mut samples, 0.5)));
        report(&format!("p99 {}", percentile(&mut samples, 0.99)));
        report(&format!("gbps {}", bandwidth(job, &mut lanes, &pattern, &clock, len)?));
    }
    report(&format!("verified {verified}"));
    Ok(())
}

/// Measures half of the round trip of a message, in microseconds.
fn latency(
    job: &Job,
    lanes: &mut [Lane],
    pattern: &Pattern,
    clock: &Clock,
    len: usize,
    verified: &mut u64,
) -> Result<Vec<f64>, String> {
    let timed = iterations(&job.config, len);
    let warm_up = timed / 10 + 8;
    let us = job.idx as u64;
    let spin = lanes[0].spin.clone();
    let mut samples = Vec::with_capacity(timed);
    for iteration in 0..warm_up + timed {
        for lane in &mut *lanes {
            lane.sent = 0;
            lane.out = Pattern::start(numbered(iteration, us, lane.peer_idx));
            lane.poison(len, 1);
        }
        for lane in &mut *lanes {
            lane.await_step()?;
        }
        let start = clock.ticks();
        // Sending and receiving alternate: both sides need credit for messages larger than the ring.
        spin.until("answers", || {
            let mut done = true;
            for lane in &mut *lanes {
                let sent = lane.send_on(pattern.at(lane.out, len))?;
                lane.got = lane.got || lane.collect(len, 1)?;
                done &= sent && lane.got;
            }
            Ok(done)
        })?;
        let end = clock.ticks();
        for lane in &mut *lanes {
            let answer = pattern.message(numbered(iteration, us, lane.peer_idx) + ANSWER, len);
            *verified += lane.verify(std::iter::once(answer), len, 1)?;
        }
        if iteration >= warm_up {
            samples.push(clock.us_between(start, end) / 2.0);
        }
    }
    Ok(samples)
}

/// Measures windows of messages. Returns 10^9 bytes per second of the median window.
fn bandwidth(
    job: &Job,
    lanes: &mut [Lane],
    pattern: &Pattern,
    clock: &Clock,
    len: usize,
) -> Result<f64, String> {
    let window = messages_per_window(&lanes[0].connection.channel, len);
    let rounds = num_rounds(&job.config, len, window);
    let warm_up = rounds / 10 + 2;
    let spin = lanes[0].spin.clone();
    let mut samples = Vec::with_capacity(rounds);
    for round in 0..warm_up + rounds {
        for lane in &mut *lanes {
            lane.await_step()?;
        }
        let start = clock.ticks();
        for nth in 0..window {
            for lane in &mut *lanes {
                let number = numbered(round + nth, job.idx as u64, lane.peer_idx);
                let message = pattern.message(number, len);
                lane.sent = 0;
                spin.until("credit", || lane.send_on(message))?;
            }
        }
        for lane in &mut *lanes {
            lane.await_step()?;
        }
        if round >= warm_up {
            samples.push(clock.us_between(start, clock.ticks()));
        }
    }
    let window_bytes = (window * lanes.len() * len) as f64;
    Ok(window_bytes / percentile(&mut samples, 0.5).max(f64::MIN_POSITIVE) / 1e3)
}

fn receive(job: &Job, networks: &mut OpenNetworks) -> Result<(), String> {
    let config = &job.config;
    pin(config, 2 * job.idx + 1);
    let runtime = runtime()?;
    let mut lanes = accept_senders(config, networks, &runtime)?;
    let pattern = Pattern::new(config.seed, config.max_bytes);
    let mut verified = 0;
    let us = job.idx as u64;
    let spin = lanes[0].spin.clone();
    if us == 0 {
        raw_echo(&mut lanes[0])?;
    }
    for len in sizes(config) {
        let timed = iterations(config, len);
        for iteration in 0..timed / 10 + 8 + timed {
            for lane in &mut lanes {
                lane.out = Pattern::start(numbered(iteration, lane.peer_idx, us) + ANSWER);
                lane.poison(len, 1);
                lane.step()?;
            }
            // Answers each message as soon as it is complete.
            spin.until("messages", || {
                let mut done = true;
                for lane in &mut lanes {
                    lane.got = lane.got || lane.collect(len, 1)?;
                    done &= lane.got && lane.send_on(pattern.at(lane.out, len))?;
                }
                Ok(done)
            })?;
            for lane in &mut lanes {
                let message = pattern.message(numbered(iteration, lane.peer_idx, us), len);
                verified += lane.verify(std::iter::once(message), len, 1)?;
            }
        }
        let window = messages_per_window(&lanes[0].connection.channel, len);
        let rounds = num_rounds(config, len, window);
        for round in 0..rounds / 10 + 2 + rounds {
            for lane in &mut lanes {
                lane.poison(len, window);
                lane.step()?;
            }
            spin.until("messages", || {
                let mut done = true;
                for lane in &mut lanes {
                    if !lane.got && lane.collect(len, window)? {
                        lane.got = true;
                        lane.step()?;
                    }
                    done &= lane.got;
                }
                Ok(done)
            })?;
            for lane in &mut lanes {
                let peer = lane.peer_idx;
                let messages =
                    (0..window).map(|nth| pattern.message(numbered(round + nth, peer, us), len));
                verified += lane.verify(messages, len, window)?;
            }
        }
    }
    report(&format!("verified {verified}"));
    // Waits until the senders have read their last answers and closed.
    for lane in &lanes {
        let _ = runtime.block_on(async {
            tokio::time::timeout(CLOSE_TIMEOUT, lane.connection.liveness.closed()).await
        });
    }
    Ok(())
}

/// Measures half of the median round trip of one bare 64-bit word, in microseconds.
fn raw_flag(lane: &mut Lane, clock: &Clock) -> Result<f64, String> {
    lane.await_step()?;
    let spin = lane.spin.clone();
    let Some((theirs, ours)) = lane.connection.channel.raw_words() else { return Ok(0.0) };
    let mut samples = Vec::with_capacity(RAW_ROUNDS as usize);
    for round in 1..=RAW_ROUNDS {
        let start = clock.ticks();
        theirs.store(round, Ordering::Release);
        spin.until("the raw flag", || Ok(ours.load(Ordering::Acquire) >= round))?;
        samples.push(clock.us_between(start, clock.ticks()) / 2.0);
    }
    samples.drain(..samples.len() / 10);
    Ok(percentile(&mut samples, 0.5))
}

fn raw_echo(lane: &mut Lane) -> Result<(), String> {
    lane.step()?;
    let spin = lane.spin.clone();
    let Some((theirs, ours)) = lane.connection.channel.raw_words() else { return Ok(()) };
    for round in 1..=RAW_ROUNDS {
        spin.until("the raw flag", || Ok(ours.load(Ordering::Acquire) >= round))?;
        theirs.store(round, Ordering::Release);
    }
    Ok(())
}

/// Opens the networks of the measured transport.
fn open(
    config: &BenchConfig,
    networks: &mut OpenNetworks,
) -> Result<Vec<Arc<dyn Network>>, String> {
    let request = TransportRequest { kind: config.transport, device: config.device.clone() };
    let spec = TransportSpec::List(vec![request]);
    Ok(networks.open(&spec).map_err(text)?.networks)
}

/// Listens until all senders are connected. Returns them in the order of their indices.
fn accept_senders(
    config: &BenchConfig,
    networks: &mut OpenNetworks,
    runtime: &Runtime,
) -> Result<Vec<Lane>, String> {
    let listener_config = ListenerConfig {
        slot: config.slot,
        transports: vec![config.transport],
        networks: open(config, networks)?,
        ..ListenerConfig::default()
    };
    let (sender, mut peers) = mpsc::unbounded_channel();
    let mut lanes: Vec<Lane> = runtime.block_on(async {
        let listener = Listener::bind("127.0.0.1:0", listener_config).await.map_err(text)?;
        report(&format!("addr {}", listener.local_addr()));
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let on_peer = move |connection| drop(sender.send(connection));
        let serving = tokio::spawn(listener.serve(|_| Ok(Vec::new()), on_peer, async {
            let _ = stopped.await;
        }));
        let mut lanes = Vec::with_capacity(config.senders);
        while lanes.len() < config.senders {
            let connection = tokio::time::timeout(CLOSE_TIMEOUT * 6, peers.recv())
                .await
                .map_err(|_| "not all senders came".to_owned())?
                .ok_or("the listener ended")?;
            let peer_idx = connection.peer.peer_id;
            lanes.push(Lane::new(connection, config, peer_idx));
        }
        drop(stop);
        serving.await.map_err(text)?;
        Ok::<_, String>(lanes)
    })?;
    lanes.sort_by_key(|lane| lane.peer_idx);
    Ok(lanes)
}

/// Returns the number of a message. Both sides compute it, so each knows the payload that it expects.
fn numbered(iteration: usize, sender: u64, receiver: u64) -> u64 {
    iteration as u64 * 3 + sender * 11 + receiver * 29
}

fn num_rounds(config: &BenchConfig, len: usize, window: usize) -> usize {
    (iterations(config, len) / window).clamp(20, 400)
}

pub(super) fn runtime() -> Result<Runtime, String> {
    Builder::new_current_thread().enable_all().build().map_err(text)
}

/// Pins this process to the `nth` of its allowed processors, modulo their number.
fn pin(config: &BenchConfig, nth: usize) {
    if !config.pin {
        return;
    }
    let Ok(allowed) = sched_getaffinity(None) else { return };
    let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect();
    if cpus.is_empty() {
        return;
    }
    let mut one = CpuSet::new();
    one.set(cpus[nth % cpus.len()]);
    // On a refusal the scheduler goes on to place the process.
    let _ = sched_setaffinity(None, &one);
}

pub(super) fn wait_for_go() -> Result<(), String> {
    let mut line = String::new();
    match std::io::stdin().lock().read_line(&mut line) {
        Ok(0) => Err("the parent is gone".to_owned()),
        Ok(_) => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}

pub(super) fn report(line: &str) {
    let mut out = std::io::stdout().lock();
    // A parent that has closed the pipe ends this process soon.
    let _ = writeln!(out, "{LINE_PREFIX}{line}").and_then(|()| out.flush());
}

const ANSWER: u64 = 61;
const RAW_ROUNDS: u64 = 50_000;
const CLOSE_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(10);
