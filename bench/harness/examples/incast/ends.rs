//! The two processes: threads that send, threads that receive.

use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Barrier};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use message_engine::credit::{
    Action, Admission, Credit, CreditReceiver, CreditSender, Demand, Event, SenderId,
};
use p2p_core::bootstrap::{ConnectConfig, Listener, ListenerConfig, connect};
use p2p_core::wait::wait_until;
use p2p_core::{Connection, PeerHello, SlotConfig, SpinPolicy, WaitSet};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::runtime::Runtime;

use crate::wire::{HEAD_BYTES, Head, put, take};
use crate::{Plan, say, text};

/// The receiving threads of this process.
pub(crate) struct Receivers {
    threads: Vec<JoinHandle<Result<(), String>>>,
    addrs: Vec<String>,
    _runtime: Runtime,
}

impl Receivers {
    pub(crate) fn start(plan: &Plan) -> Result<Self, String> {
        let runtime = runtime()?;
        let (mut threads, mut addrs) = (Vec::new(), Vec::new());
        let (transports, patterns) = (plan.transports()?, patterns(plan));
        for idx in 0..plan.receivers {
            let config = ListenerConfig {
                slot: slot(plan),
                transports: transports.kinds.clone(),
                networks: transports.networks.clone(),
                handshake_timeout: TIMEOUT,
                ..ListenerConfig::default()
            };
            let listener = runtime.block_on(Listener::bind("127.0.0.1:0", config)).map_err(text)?;
            addrs.push(listener.local_addr().to_string());
            let (sender, connections) = channel();
            let on_peer = move |connection| drop(sender.send(connection));
            runtime.spawn(listener.serve(|_| Ok(Vec::new()), on_peer, std::future::pending()));
            let (plan, patterns) = (plan.clone(), Arc::clone(&patterns));
            threads.push(std::thread::spawn(move || receive(&plan, idx, &connections, &patterns)));
        }
        Ok(Self { threads, addrs, _runtime: runtime })
    }

    pub(crate) fn addrs(&self) -> &[String] {
        &self.addrs
    }

    /// Waits for the threads. They end when their senders have closed.
    pub(crate) fn join(self) -> Result<(), String> {
        for thread in self.threads {
            thread.join().map_err(|_| "a receiving thread panicked".to_owned())??;
        }
        Ok(())
    }
}

/// A receiver's side of one connection.
struct In {
    connection: Connection,
    id: Option<SenderId>,
    /// Scheduled bytes so far, and those of the current message.
    scheduled: u64,
    of_message: u64,
    unscheduled: u64,
    credit: Option<Credit>,
    done: Option<u64>,
    patterns: Arc<Vec<u8>>,
    part: usize,
    open: bool,
}

fn receive(
    plan: &Plan,
    idx: usize,
    connections: &Receiver<Connection>,
    patterns: &Arc<Vec<u8>>,
) -> Result<(), String> {
    let mut credits = plan.credit_config()?.map(CreditReceiver::new).transpose().map_err(text)?;
    let set = WaitSet::new().map_err(text)?;
    let mut lanes = Vec::with_capacity(plan.senders);
    for _ in 0..plan.senders {
        let connection = connections.recv_timeout(TIMEOUT).map_err(text)?;
        set.attach(connection.channel.endpoint()).map_err(text)?;
        let id = credits.as_mut().map(CreditReceiver::join).transpose().map_err(text)?;
        let part = part(connection.peer.peer_id, idx as u64);
        lanes.push(In {
            connection,
            id,
            scheduled: 0,
            of_message: 0,
            unscheduled: 0,
            credit: None,
            done: None,
            patterns: Arc::clone(patterns),
            part,
            open: true,
        });
    }
    // Grants name a lane by its index at the credit receiver.
    lanes.sort_by_key(|lane| lane.id.map_or(0, SenderId::index));
    let start = Instant::now();
    let mut payload = Vec::new();
    while lanes.iter().any(|lane| lane.open) {
        set.drive();
        let mut moved = false;
        for lane in &mut lanes {
            moved |= lane.turn(plan, credits.as_mut(), start, &mut payload)?;
        }
        while let Some(action) = credits.as_mut().and_then(CreditReceiver::next_action) {
            if let Action::Credit { sender, credit } = action {
                lanes[sender.index()].credit = Some(credit);
                moved = true;
            }
        }
        if !moved {
            sleep(&set, lanes.iter().filter(|lane| lane.open).map(|lane| &lane.connection))?;
            for lane in lanes.iter_mut().filter(|lane| lane.open) {
                lane.open = lane.connection.liveness.closed_now().is_none();
            }
        }
    }
    Ok(())
}

impl In {
    fn turn(
        &mut self,
        plan: &Plan,
        mut credits: Option<&mut CreditReceiver>,
        start: Instant,
        payload: &mut Vec<u8>,
    ) -> Result<bool, String> {
        let channel = &mut self.connection.channel;
        let mut moved = false;
        // At most a full ring, then the other lanes have their turn.
        for _ in 0..channel.layout().num_frames() {
            let Some(head) = take(channel, payload)? else { break };
            moved = true;
            let event = match head {
                Head::Data { round, len } => {
                    let from = self.part + self.of_message as usize;
                    let expected = self.patterns.get(from..from + len as usize);
                    let step = round as u8;
                    if !expected.is_some_and(|expected| same(expected, payload, step)) {
                        let peer = self.connection.peer.peer_id;
                        return Err(format!(
                            "wrong data of sender {peer} in round {round} from byte {from} on"
                        ));
                    }
                    self.of_message += len;
                    if self.of_message == plan.bytes {
                        self.of_message = 0;
                        self.done = Some(round);
                    }
                    // The sender schedules a message as a whole or not at all.
                    if plan.bytes <= UNSCHEDULED_BYTES {
                        self.unscheduled += len;
                        Event::UnscheduledReceived(self.unscheduled)
                    } else {
                        self.scheduled += len;
                        Event::Received(self.scheduled)
                    }
                }
                Head::Demand(demand) => Event::Demand(demand),
                other => return Err(format!("a sender sent {other:?}")),
            };
            if let (Some(credits), Some(id)) = (credits.as_mut(), self.id) {
                let now_ns = start.elapsed().as_nanos() as u64;
                credits.handle(now_ns, id, event).map_err(text)?;
            }
        }
        if let Some(credit) = self.credit
            && put(channel, Head::Credit(credit), &[])?
        {
            self.credit = None;
            moved = true;
        }
        if let Some(round) = self.done
            && put(channel, Head::Done { round }, &[])?
        {
            self.done = None;
            moved = true;
        }
        Ok(moved)
    }
}

/// A sender's side of one connection.
struct Out {
    connection: Connection,
    credit: Option<CreditSender>,
    demand: Option<Demand>,
    is_free: bool,
    sent: u64,
    done: bool,
    patterns: Arc<Vec<u8>>,
    part: usize,
}

/// Runs the sending process.
pub(crate) fn send(plan: &Plan, addrs: &[String]) -> Result<(), String> {
    let runtime = runtime()?;
    let barrier = Arc::new(Barrier::new(plan.senders + 1));
    let (transports, patterns) = (plan.transports()?, patterns(plan));
    let mut threads = Vec::new();
    for idx in 0..plan.senders as u64 {
        let mut lanes = Vec::new();
        // Each sender begins with another receiver.
        for nth in 0..plan.receivers {
            let receiver = (idx as usize + nth) % plan.receivers;
            let config = ConnectConfig {
                slot: slot(plan),
                transports: transports.kinds.clone(),
                networks: transports.networks.clone(),
                timeout: TIMEOUT,
                ..ConnectConfig::default()
            };
            let hello = PeerHello { peer_id: idx, ..PeerHello::default() };
            let connecting = connect(addrs[receiver].as_str(), hello, config);
            let connection = runtime.block_on(connecting).map_err(text)?;
            if idx == 0 && nth == 0 {
                say(&format!("transport {}", connection.transport))?;
            }
            lanes.push(Out {
                credit: plan.credit_config()?.as_ref().map(CreditSender::new),
                demand: None,
                is_free: true,
                sent: 0,
                done: false,
                patterns: Arc::clone(&patterns),
                part: part(idx, receiver as u64),
                connection,
            });
        }
        let (plan, barrier) = (plan.clone(), Arc::clone(&barrier));
        threads.push(std::thread::spawn(move || {
            let result = send_all(&plan, &mut lanes, &barrier);
            if let Err(error) = &result {
                // The other threads would wait at the barrier for ever.
                eprintln!("incast: a sender failed: {error}");
                std::process::exit(1);
            }
            result
        }));
    }
    // One round to warm up.
    for round in 0..=plan.rounds {
        barrier.wait();
        let start = Instant::now();
        barrier.wait();
        if round > 0 {
            say(&format!("ms {}", start.elapsed().as_secs_f64() * 1e3))?;
        }
    }
    for thread in threads {
        thread.join().map_err(|_| "a sending thread panicked".to_owned())??;
    }
    Ok(())
}

fn send_all(plan: &Plan, lanes: &mut [Out], barrier: &Barrier) -> Result<(), String> {
    let set = WaitSet::new().map_err(text)?;
    for lane in &mut *lanes {
        set.attach(lane.connection.channel.endpoint()).map_err(text)?;
    }
    let mut scratch = Vec::new();
    for round in 0..=plan.rounds as u64 {
        barrier.wait();
        for lane in &mut *lanes {
            lane.begin(plan)?;
        }
        while !lanes.iter().all(|lane| lane.done) {
            set.drive();
            let mut moved = false;
            for lane in lanes.iter_mut().filter(|lane| !lane.done) {
                moved |= lane.turn(plan, round, &mut scratch)?;
            }
            if !moved {
                sleep(&set, lanes.iter().filter(|lane| !lane.done).map(|lane| &lane.connection))?;
            }
        }
        barrier.wait();
    }
    Ok(())
}

impl Out {
    fn begin(&mut self, plan: &Plan) -> Result<(), String> {
        (self.sent, self.done) = (0, false);
        if let Some(credit) = &mut self.credit {
            match credit.submit(plan.bytes).map_err(text)? {
                Admission::Unscheduled => self.is_free = true,
                Admission::Scheduled(demand) => {
                    (self.is_free, self.demand) = (false, Some(demand));
                }
            }
        }
        Ok(())
    }

    /// Sends one frame if credit allows, and handles the receiver's frames.
    fn turn(&mut self, plan: &Plan, round: u64, scratch: &mut Vec<u8>) -> Result<bool, String> {
        let channel = &mut self.connection.channel;
        let mut moved = false;
        while let Some(head) = take(channel, scratch)? {
            moved = true;
            match (head, &mut self.credit) {
                (Head::Credit(grant), Some(credit)) => credit.on_credit(grant).map_err(text)?,
                (Head::Done { round: done }, _) if done == round => self.done = true,
                (other, _) => return Err(format!("a receiver sent {other:?} in round {round}")),
            }
        }
        if let Some(demand) = self.demand {
            if !put(channel, Head::Demand(demand), &[])? {
                return Ok(moved);
            }
            self.demand = None;
            moved = true;
        }
        let most = (channel.layout().frame_bytes() - HEAD_BYTES) as u64;
        let mut len = most.min(plan.bytes - self.sent);
        if let Some(credit) = self.credit.as_ref().filter(|_| !self.is_free) {
            len = len.min(credit.allowance());
        }
        if len == 0 {
            return Ok(moved);
        }
        let from = self.part + self.sent as usize;
        stamp(&self.patterns[from..from + len as usize], round as u8, scratch);
        if put(channel, Head::Data { round, len }, scratch)? {
            self.sent += len;
            moved = true;
            if let Some(credit) = self.credit.as_mut().filter(|_| !self.is_free) {
                credit.sent(len).map_err(text)?;
            }
        }
        Ok(moved)
    }
}

/// Returns random bytes that both sides know. Each pair of peers uses a part of its own.
pub(crate) fn patterns(plan: &Plan) -> Arc<Vec<u8>> {
    let mut bytes = vec![0; plan.bytes as usize + NUM_PARTS * PART_STEP];
    StdRng::seed_from_u64(plan.bytes).fill_bytes(&mut bytes);
    Arc::new(bytes)
}

/// Returns the offset of a pair's part.
pub(crate) fn part(sender: u64, receiver: u64) -> usize {
    (sender * 1009 + receiver * 97) as usize % NUM_PARTS * PART_STEP
}

/// Copies a part of the pattern for round `step`. The first byte of each piece depends on the round.
fn stamp(pattern: &[u8], step: u8, out: &mut Vec<u8>) {
    out.clear();
    out.extend_from_slice(pattern);
    if let Some(first) = out.first_mut() {
        *first = first.wrapping_add(step);
    }
}

fn same(pattern: &[u8], found: &[u8], step: u8) -> bool {
    match (pattern, found) {
        ([first, pattern @ ..], [found_first, found @ ..]) => {
            *found_first == first.wrapping_add(step) && pattern == found
        }
        (pattern, found) => pattern == found,
    }
}

fn sleep<'a>(
    set: &WaitSet,
    connections: impl Iterator<Item = &'a Connection> + Clone,
) -> Result<(), String> {
    let news = || connections.clone().any(|c| c.channel.has_news()).then_some(());
    let arm = |on: bool| {
        connections.clone().for_each(|c| if on { c.channel.arm() } else { c.channel.disarm() });
    };
    let until = Instant::now() + Duration::from_millis(20);
    wait_until(set, SpinPolicy { spin: Duration::ZERO }, until, news, arm).map_err(text)?;
    Ok(())
}

fn slot(plan: &Plan) -> SlotConfig {
    SlotConfig { slot_bytes: plan.slot, num_frames: 8 }
}

fn runtime() -> Result<Runtime, String> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(2).enable_all().build().map_err(text)
}

/// As in the credit settings.
const UNSCHEDULED_BYTES: u64 = 4096;
const NUM_PARTS: usize = 1024;
const PART_STEP: usize = 64;
const TIMEOUT: Duration = Duration::from_secs(60);
