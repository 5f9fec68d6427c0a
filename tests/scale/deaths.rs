//! A peer dies at any point of any operation. The other side learns of it in time, keeps no resources, and
//! continues with the next peer. `SWITCHYARD_TEST_TRANSPORT` selects the transport, `SWITCHYARD_KILL_DEATHS` the
//! number of connections that die.
use std::os::fd::AsFd;
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use p2p_core::bootstrap::{CloseReason, ConnectConfig, Listener, ListenerConfig, connect};
use p2p_core::endpoint::Endpoint;
use p2p_core::transports::Transports;
use p2p_core::wait::wait_until;
use p2p_core::{
    ChannelError, Connection, PeerHello, ReadView, Region, RemoteRange, SlotConfig, SpinPolicy,
    WaitSet,
};
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use test_support::bounded;

use crate::support::{
    TRANSPORT, num_descriptors, num_mappings, num_shared_slots, resident_bytes, transports,
};

const SLOT: SlotConfig = SlotConfig { slot_bytes: 64 << 10, num_frames: 3 };
/// Time limit for noticing a death, and for anything else that must happen.
const LIMIT: Duration = Duration::from_secs(20);
const JOB: &str = "SWITCHYARD_KILL_JOB";
/// Number of steps tried one by one. After them, the victims are far into their operations.
const NUM_STEPS: u64 = 90;
const HEALTHY_MESSAGES: u64 = 50;
const MAX_MESSAGE_BYTES: usize = 4000;

/// The work of one side on one connection. The other side does the opposite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    /// Writes frames.
    Write,
    /// Reads frames.
    Read,
    /// Writes a frame and waits for the same one back.
    Ask,
    /// Sends every frame back.
    Answer,
    /// Puts, adds to a flag, gets back, waits for completion.
    Poke,
    /// Checks the put bytes.
    Look,
}

/// Roles of the dying side and of the surviving side, by connection.
const ROLES: [(Role, Role); 4] = [
    (Role::Write, Role::Read),
    (Role::Read, Role::Write),
    (Role::Answer, Role::Ask),
    (Role::Poke, Role::Look),
];

#[test]
fn whoever_dies_wherever_leaves_nothing_behind() {
    let Some(transports) = transports() else { return };
    let deaths: usize = std::env::var("SWITCHYARD_KILL_DEATHS")
        .map_or(1000, |text| text.parse().expect("a number of deaths"));
    let seed: u64 = std::env::var("SWITCHYARD_TEST_SEED")
        .map_or_else(|_| rand::random(), |text| text.parse().expect("a seed"));
    println!("seed {seed} (set SWITCHYARD_TEST_SEED to repeat)");
    let runtime = runtime();
    let host = Host::start(&runtime, transports);
    let mut rng = StdRng::seed_from_u64(seed);
    host.healthy(u32::MAX, seed);
    let (mut base, mut late, mut seen) = (None, Vec::new(), 0);
    for victim in 0.. {
        if seen >= deaths {
            break;
        }
        assert!(victim < 2 * deaths, "the victims die before they have connections");
        // Half of the victims die at every step in turn, the others at any time after their start.
        let at = if victim.is_multiple_of(2) {
            Death::AtStep(victim as u64 / 2 % NUM_STEPS)
        } else {
            Death::After(Duration::from_micros(rng.random_range(0..40_000)))
        };
        let (noticed, connections) = host.victim(victim as u32, seed, at);
        late.push(noticed);
        seen += connections;
        if base.is_none() && seen >= deaths / 4 {
            host.healthy(u32::MAX - 1, seed);
            base = Some(Resources::steady());
        }
    }
    host.healthy(u32::MAX - 2, seed);
    late.sort();
    println!(
        "{} victims with {seen} connections; noticed after {:?} (median), {:?} (worst)",
        late.len(),
        late[late.len() / 2],
        late[late.len() - 1]
    );
    base.expect("a baseline").compare(seen * 3 / 4);
}

/// Runs a process that dies.
pub fn victim() {
    let job = std::env::var(JOB).expect("a job");
    let mut words = job.split(';');
    let mut next = || words.next().expect("a complete job");
    let addr = next().to_owned();
    let generation = next().parse().expect("a generation");
    let seed: u64 = next().parse().expect("a seed");
    let mut steps = Steps { left: next().parse().expect("a step") };
    let messages: u64 = next().parse().expect("a number of messages");
    let transports = transports().expect("the transport that the other side has");
    let runtime = runtime();
    steps.tick();
    let mut lanes = Vec::new();
    for (idx, (role, _)) in ROLES.into_iter().enumerate() {
        let hello = PeerHello { peer_id: idx as u64, generation, ..PeerHello::default() };
        let config = ConnectConfig {
            slot: SLOT,
            transports: transports.kinds.clone(),
            networks: transports.networks.clone(),
            ..ConnectConfig::default()
        };
        let connection = runtime.block_on(connect(&*addr, hello, config)).expect("a connection");
        lanes.push(Lane::new(connection, role, seed));
        steps.tick();
    }
    let set = WaitSet::new().unwrap();
    lanes.iter().for_each(|lane| set.attach(lane.connection.channel.endpoint()).unwrap());
    let deadline = Instant::now() + 3 * LIMIT;
    while lanes.iter().any(|lane| lane.num_done < messages) {
        assert!(Instant::now() < deadline, "the other side does nothing");
        set.drive();
        let mut moved = false;
        for lane in &mut lanes {
            moved |= lane.num_done < messages && lane.step(&mut steps).unwrap();
        }
        if !moved {
            lanes.iter().for_each(|lane| lane.connection.channel.arm());
            steps.tick();
            if !lanes.iter().any(Lane::has_news) {
                set.block(Duration::from_millis(1)).unwrap();
            }
            lanes.iter().for_each(|lane| lane.connection.channel.disarm());
        }
    }
    // The other side must see the last steps before it sees the end.
    for lane in &mut lanes {
        let end = Instant::now() + LIMIT;
        lane.connection.channel.endpoint_mut().quiet(end).unwrap();
        lane.connection.liveness.close();
    }
}

/// Manner of a victim's death.
#[derive(Debug, Clone, Copy)]
enum Death {
    AtStep(u64),
    After(Duration),
}

/// Counts a victim's steps, and kills it.
struct Steps {
    left: u64,
}

impl Steps {
    fn tick(&mut self) {
        if self.left == 0 {
            let _ = rustix::process::kill_process(
                rustix::process::getpid(),
                rustix::process::Signal::KILL,
            );
        }
        self.left = self.left.saturating_sub(1);
    }
}

/// The surviving side.
struct Host {
    addr: String,
    connections: Receiver<Connection>,
    set: WaitSet,
}

impl Host {
    fn start(runtime: &tokio::runtime::Runtime, transports: Transports) -> Self {
        // Few connection places, so that a leaked place is noticed soon.
        let config = ListenerConfig {
            slot: SLOT,
            max_peers: 2 * ROLES.len(),
            transports: transports.kinds,
            networks: transports.networks,
            ..ListenerConfig::default()
        };
        let listener = runtime.block_on(Listener::bind("127.0.0.1:0", config)).unwrap();
        let addr = listener.local_addr().to_string();
        let (sender, connections) = channel();
        let on_peer = move |connection| drop(sender.send(connection));
        runtime.spawn(listener.serve(|_| Ok(Vec::new()), on_peer, std::future::pending()));
        Self { addr, connections, set: WaitSet::new().unwrap() }
    }

    /// Serves a peer that survives: everything works, to the last byte.
    fn healthy(&self, generation: u32, seed: u64) {
        let child = self.spawn(generation, seed, u64::MAX, HEALTHY_MESSAGES);
        let (mut child, mut lanes) = (Reaped(child), Vec::new());
        let deadline = Instant::now() + 3 * LIMIT;
        while lanes.len() < ROLES.len() || lanes.iter().any(|lane: &Lane| lane.open) {
            assert!(Instant::now() < deadline, "{} connections, {lanes:?}", lanes.len());
            self.turn(&mut lanes, generation, seed, Instant::now() + Duration::from_millis(20));
        }
        let status = bounded::status_of(&mut child.0, "a peer that should live", bounded::LIMIT);
        assert!(status.success(), "a peer that should live has failed");
        for lane in lanes {
            assert_eq!(lane.connection.liveness.closed_now(), Some(CloseReason::Left), "{lane:?}");
            assert!(lane.error.is_none(), "{lane:?}");
            assert!(lane.num_done >= HEALTHY_MESSAGES, "{lane:?}");
        }
    }

    /// Serves a peer that dies. Returns the time from its death until all its connections were known to be closed,
    /// and their number.
    fn victim(&self, generation: u32, seed: u64, death: Death) -> (Duration, usize) {
        let at_step = if let Death::AtStep(step) = death { step } else { u64::MAX };
        let mut child = Reaped(self.spawn(generation, seed, at_step, u64::MAX));
        let (start, mut lanes, mut dead) = (Instant::now(), Vec::<Lane>::new(), None::<Instant>);
        loop {
            let now = Instant::now();
            let next = match (death, dead) {
                (_, Some(since)) => {
                    if lanes.iter().all(|lane| !lane.open) {
                        return (since.elapsed(), lanes.len());
                    }
                    assert!(since.elapsed() < LIMIT, "no side noticed the death: {lanes:?}");
                    since + LIMIT
                }
                (Death::After(delay), None) if start + delay <= now => {
                    child.0.kill().unwrap();
                    now
                }
                (Death::After(delay), None) => start + delay,
                (Death::AtStep(_), None) => now + Duration::from_millis(5),
            };
            assert!(now - start < 3 * LIMIT, "the victim does not die: {death:?}, {lanes:?}");
            if dead.is_none() && child.0.try_wait().unwrap().is_some() {
                dead = Some(Instant::now());
            }
            self.turn(&mut lanes, generation, seed, next.min(now + Duration::from_millis(20)));
        }
    }

    /// Processes all available work, then sleeps until more arrives, or until `until`.
    fn turn(&self, lanes: &mut Vec<Lane>, generation: u32, seed: u64, until: Instant) {
        for connection in self.connections.try_iter() {
            // A connection of an earlier victim that completed after its death. No test waits for it.
            if connection.peer.generation != generation {
                continue;
            }
            let role = ROLES[connection.peer.peer_id as usize].1;
            let lane = Lane::new(connection, role, seed);
            self.set.attach(lane.connection.channel.endpoint()).unwrap();
            self.set.add(lane.connection.liveness.as_fd()).unwrap();
            lanes.push(lane);
        }
        self.set.drive();
        let mut moved = false;
        for lane in lanes.iter_mut().filter(|lane| lane.open) {
            let over = lane.connection.liveness.closed_now();
            // Operations that the peer completed before its end are still taken.
            loop {
                match lane.step(&mut Steps { left: u64::MAX }) {
                    Ok(true) => moved = true,
                    Ok(false) => break,
                    Err(error) => {
                        lane.error = Some(error);
                        break;
                    }
                }
            }
            if over.is_some() {
                lane.open = false;
                moved = true;
                self.set.detach(lane.connection.channel.endpoint()).unwrap();
                self.set.remove(lane.connection.liveness.as_fd()).unwrap();
            }
        }
        if moved || lanes.iter().any(|lane| lane.open && lane.error.is_some()) {
            return;
        }
        let open = || lanes.iter().filter(|lane| lane.open);
        let news = || {
            let gone = |lane: &Lane| lane.connection.liveness.closed_now().is_some();
            open().any(|lane| lane.has_news() || gone(lane)).then_some(())
        };
        let arm = |on: bool| {
            open().for_each(|lane| {
                let channel = &lane.connection.channel;
                if on { channel.arm() } else { channel.disarm() }
            });
        };
        let until = until.min(Instant::now() + Duration::from_millis(20));
        wait_until(&self.set, SpinPolicy { spin: Duration::ZERO }, until, news, arm).unwrap();
    }

    fn spawn(&self, generation: u32, seed: u64, at_step: u64, messages: u64) -> Child {
        let job = format!("{};{generation};{seed};{at_step};{messages}", self.addr);
        test_support::child::command("victim").env(JOB, job).stdout(Stdio::null()).spawn().unwrap()
    }
}

/// A process that does not outlive the test.
struct Reaped(Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// One side of one connection.
#[derive(Debug)]
struct Lane {
    connection: Connection,
    role: Role,
    seed: u64,
    /// Number of messages that this side has finished.
    num_done: u64,
    /// True if an answer or acknowledgement is pending.
    is_waiting: bool,
    regions: Option<[Region; 2]>,
    open: bool,
    error: Option<ChannelError>,
}

impl Lane {
    fn new(mut connection: Connection, role: Role, seed: u64) -> Self {
        let seed = seed ^ connection.peer.peer_id << 32 ^ u64::from(connection.peer.generation);
        let regions = (role == Role::Poke).then(|| {
            [(); 2].map(|()| {
                let region = Region::anonymous(MAX_MESSAGE_BYTES).unwrap();
                connection.channel.endpoint_mut().register(&region).unwrap();
                region
            })
        });
        let (num_done, is_waiting, open) = (0, false, true);
        Self { connection, role, seed, num_done, is_waiting, regions, open, error: None }
    }

    fn has_news(&self) -> bool {
        let channel = &self.connection.channel;
        match self.role {
            Role::Poke | Role::Look => {
                channel.peer_progress() > self.num_done - u64::from(self.is_waiting)
                    || (self.role == Role::Poke && !self.is_waiting)
            }
            _ => channel.has_news(),
        }
    }

    /// Performs one step. Returns false if there was nothing to do.
    fn step(&mut self, steps: &mut Steps) -> Result<bool, ChannelError> {
        match self.role {
            Role::Write => self.write(steps),
            Role::Read => self.read(steps),
            Role::Ask if self.is_waiting => {
                let moved = self.read(steps)?;
                self.is_waiting = !moved;
                Ok(moved)
            }
            Role::Ask => {
                let moved = self.write(steps)?;
                self.num_done -= u64::from(moved);
                self.is_waiting = moved;
                Ok(moved)
            }
            Role::Answer if self.is_waiting => {
                let moved = self.write(steps)?;
                self.is_waiting = !moved;
                Ok(moved)
            }
            Role::Answer => {
                let moved = self.read(steps)?;
                self.num_done -= u64::from(moved);
                self.is_waiting = moved;
                Ok(moved)
            }
            Role::Poke => self.poke(steps),
            Role::Look => self.look(),
        }
    }

    fn message(&self) -> Vec<u8> {
        let mut rng = StdRng::seed_from_u64(self.seed ^ self.num_done << 8);
        let mut bytes = vec![0; rng.random_range(1..=MAX_MESSAGE_BYTES)];
        rng.fill_bytes(&mut bytes);
        bytes
    }

    fn write(&mut self, steps: &mut Steps) -> Result<bool, ChannelError> {
        let message = self.message();
        let channel = &mut self.connection.channel;
        let Some(frame) = channel.try_reserve()? else { return Ok(false) };
        steps.tick();
        let half = message.len() / 2;
        channel.write_view(&frame).put_bytes(0, &message[..half]).unwrap();
        steps.tick();
        channel.write_view(&frame).put_bytes(half, &message[half..]).unwrap();
        steps.tick();
        channel.publish(frame, message.len())?;
        steps.tick();
        self.num_done += 1;
        Ok(true)
    }

    fn read(&mut self, steps: &mut Steps) -> Result<bool, ChannelError> {
        let expected = self.message();
        let channel = &mut self.connection.channel;
        let Some(frame) = channel.try_next()? else { return Ok(false) };
        steps.tick();
        let mut found = vec![0xa5; expected.len()];
        channel.view(&frame).copy_to(0, &mut found).unwrap();
        assert_eq!(found, expected, "message {} of seed {}", self.num_done, self.seed);
        steps.tick();
        channel.release()?;
        steps.tick();
        self.num_done += 1;
        Ok(true)
    }

    fn poke(&mut self, steps: &mut Steps) -> Result<bool, ChannelError> {
        if self.is_waiting {
            self.is_waiting = self.connection.channel.peer_progress() < self.num_done;
            return Ok(!self.is_waiting);
        }
        let message = self.message();
        let [source, back] = self.regions.clone().expect("regions of this role");
        let channel = &mut self.connection.channel;
        let key = channel.remote_key();
        let dst = RemoteRange { key, offset: 0, len: message.len() };
        let range = |region: &Region| region.range(0, message.len()).unwrap();
        // SAFETY: the memory is private to this thread and as long as the message; no operation is under way.
        unsafe {
            range(&source)
                .as_ptr()
                .as_ptr()
                .copy_from_nonoverlapping(message.as_ptr(), message.len());
            range(&back).as_ptr().as_ptr().write_bytes(0xa5, message.len());
        }
        // SAFETY: `source` is registered, and written again only after the quiet below.
        unsafe { channel.endpoint_mut().put(dst, range(&source))? };
        steps.tick();
        channel.endpoint_mut().fence()?;
        steps.tick();
        channel.bump_progress()?;
        steps.tick();
        // SAFETY: `back` is registered, and read only after the quiet below.
        unsafe { channel.endpoint_mut().get(range(&back), dst)? };
        steps.tick();
        channel.endpoint_mut().quiet(Instant::now() + LIMIT).unwrap();
        steps.tick();
        let mut found = vec![0; message.len()];
        // SAFETY: the get is complete, and nothing else writes `back`.
        unsafe {
            range(&back).as_ptr().as_ptr().copy_to_nonoverlapping(found.as_mut_ptr(), found.len())
        };
        assert_eq!(found, message, "got back message {} of seed {}", self.num_done, self.seed);
        self.num_done += 1;
        self.is_waiting = true;
        Ok(true)
    }

    fn look(&mut self) -> Result<bool, ChannelError> {
        if self.connection.channel.peer_progress() <= self.num_done {
            return Ok(false);
        }
        let expected = self.message();
        let mut found = vec![0; expected.len()];
        let slot = self.connection.channel.local_slot();
        // SAFETY: the slot is mapped and longer than any message; the view only copies.
        let view = unsafe { ReadView::new(slot.as_ptr(), expected.len()) };
        view.copy_to(0, &mut found).unwrap();
        assert_eq!(found, expected, "put message {} of seed {}", self.num_done, self.seed);
        self.num_done += 1;
        self.connection.channel.bump_progress()?;
        Ok(true)
    }
}

/// Resources that this process holds.
#[derive(Debug, Clone, Copy)]
struct Resources {
    descriptors: usize,
    /// Slots in shared memory: those of this process and of its peers.
    slots: usize,
    mappings: usize,
    bytes: u64,
}

impl Resources {
    fn now() -> Self {
        let (descriptors, mappings) = (num_descriptors(), num_mappings());
        Self { descriptors, slots: num_shared_slots(), mappings, bytes: resident_bytes() }
    }

    /// Counts once the runtime has closed the objects that it closes later.
    fn steady() -> Self {
        let deadline = Instant::now() + LIMIT;
        let mut before = Self::now();
        loop {
            std::thread::sleep(Duration::from_millis(50));
            let now = Self::now();
            let same = now.descriptors == before.descriptors && now.mappings == before.mappings;
            if same || Instant::now() > deadline {
                return now;
            }
            before = now;
        }
    }

    /// Asserts that `num_connections` past connections left nothing behind.
    fn compare(self, num_connections: usize) {
        // A leaked slot of a connection would be a mapping of 64 KiB, with at least two touched pages.
        let allowed_bytes = (num_connections as u64 / 2 * 8192).max(4 << 20);
        // A network may still write into released slots and mailboxes, so their addresses stay reserved.
        let is_network = std::env::var(TRANSPORT).is_ok_and(|name| name != "shm");
        let allowed_mappings = 32 + if is_network { 2 * num_connections } else { 0 };
        let ok = |now: &Self| {
            now.descriptors <= self.descriptors + 2
                && now.slots <= self.slots
                && now.mappings <= self.mappings + allowed_mappings
                && now.bytes <= self.bytes + allowed_bytes
        };
        let deadline = Instant::now() + LIMIT;
        let mut now = Self::now();
        while !ok(&now) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(50));
            now = Self::now();
        }
        println!("held {self:?} after a quarter, {now:?} at the end");
        assert!(ok(&now), "{now:?} from {self:?}");
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}
