//! The engine's thread: it owns the fabrics, the connections and the registrations.

mod acceptor;
mod address;
mod commands;
mod connection;
mod establish;
mod handshake;
pub(super) mod hello;
mod socket;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};

use self::address::reachable_ip;
use self::connection::{ActiveConnection, Peer, Ports, parse_token};
use self::handshake::{EvictionKey, Handshake, Outcome};
use super::config::{EngineConfig, default_fabrics};
use super::error::{CloseReason, ConnectError, StartError};
use super::link::Link;
use super::memory::{Handle, Registry};
use super::metadata::EndpointMetadata;
use super::shared::{ConnKey, Shared};
use super::wire::Frame;
use crate::credit::{Action, CreditConfig, CreditReceiver};
use crate::fabric::{Completion, Fabric, PeerId};
use p2p_core::network::Offer;
use p2p_core::outage::Outage;
use p2p_core::wait::event_fd;

/// The thread's state. The fabrics are dropped first, before the registrations and their memory.
#[derive(Debug)]
pub(super) struct Io {
    fabrics: Vec<Box<dyn Fabric>>,
    registry: Registry,
    shared: Arc<Shared>,
    config: EngineConfig,
    credit: CreditReceiver,
    /// Index of the connection by the index of its sender in `credit`.
    by_sender: Vec<u32>,
    set: Arc<OwnedFd>,
    listener: TcpListener,
    /// Time at which the engine accepts again after a failure.
    listener_paused_until: Option<Instant>,
    listening: Outage,
    /// Handshakes that peers have begun, in the order of their eviction: by what the handshake has shown, then index.
    pending_handshakes: BTreeSet<(EvictionKey, u32)>,
    /// Time of the last warning about a refused connection.
    last_warning: Option<Instant>,
    places: Vec<Place>,
    /// Indices of the established connections, by fabric and peer.
    by_peer: HashMap<(usize, PeerId), u32>,
    free: Vec<u32>,
    next_serial: u64,
    /// Connections to be advanced.
    dirty: VecDeque<u32>,
    /// Connections whose fabric had no room.
    stalled: Vec<u32>,
    completions: Vec<Completion>,
    /// Lower bound on the deadlines of connections and handshakes.
    next_deadline_ns: u64,
    /// Reasons of the last few connections' ends, for commands that arrive afterwards.
    ended: VecDeque<(u64, CloseReason)>,
    is_stopping: bool,
}

#[derive(Debug)]
enum Place {
    Free,
    /// Its content is taken out during a call.
    Busy,
    Handshake(Box<Handshake>),
    Active(Box<ActiveConnection>),
    /// Closed, while the fabric still has operations of it.
    Closing(Box<Link<Arc<Handle>>>, Peer),
}

impl Io {
    pub(super) fn new(mut config: EngineConfig) -> Result<(Arc<Shared>, Self), StartError> {
        config.check()?;
        // Every connection needs its credits as well.
        config.max_connections = config.max_connections.min(config.credit.max_senders);
        let system = |what: &str| {
            let what = what.to_owned();
            move |source: io::Error| StartError::System { what, source }
        };
        // Each connection has two credit senders: the peer's pushes, and this side's reads from it.
        let max_senders = config.credit.max_senders.saturating_mul(2);
        let credit_config = CreditConfig { max_senders, ..config.credit };
        let credit = CreditReceiver::new(credit_config).map_err(|_| StartError::Config {
            what: "credit",
            found: config.credit.window_bytes,
            expected: "limits that fit together; see CreditConfig",
        })?;
        let bind = config.bind;
        let listener = TcpListener::bind(bind).map_err(system(&format!("listen on {bind}")))?;
        listener.set_nonblocking(true).map_err(system("listen"))?;
        // The standard library's backlog is too short when many peers connect at once.
        rustix::net::listen(&listener, BACKLOG).map_err(|e| system("listen")(e.into()))?;
        let port = listener.local_addr().map_err(system("listen"))?.port();
        let ip = config.advertise.unwrap_or_else(|| reachable_ip(bind.ip()));
        let mut fabrics = std::mem::take(&mut config.fabrics);
        if fabrics.is_empty() {
            fabrics = default_fabrics(bind.ip(), config.advertise)?;
        }
        let wake = event_fd().map_err(system("make an event descriptor"))?;
        let flags = epoll::CreateFlags::CLOEXEC;
        let set = epoll::create(flags).map_err(|e| system("make an epoll set")(e.into()))?;
        let watch = |fd: BorrowedFd<'_>, data: u64, flags: epoll::EventFlags| {
            epoll::add(&set, fd, epoll::EventData::new_u64(data), flags)
                .map_err(|error| system("watch a descriptor")(error.into()))
        };
        watch(listener.as_fd(), LISTENER, epoll::EventFlags::IN)?;
        watch(wake.as_fd(), WAKE, epoll::EventFlags::IN | epoll::EventFlags::ET)?;
        for fabric in &fabrics {
            if let Some(fd) = fabric.wait_fd() {
                watch(fd, FABRIC, epoll::EventFlags::IN)?;
            }
        }
        let metadata = EndpointMetadata {
            engine_id: rand::random(),
            addr: SocketAddr::new(ip, port),
            gpu_index: config.gpu_index,
            pci_bdf: config.pci_bdf.clone(),
            transports: fabrics.iter().map(|fabric| offer_of(&**fabric)).collect(),
        };
        let shared = Arc::new(Shared::new(metadata, wake, &config));
        let io = Self {
            fabrics,
            registry: Registry::default(),
            shared: Arc::clone(&shared),
            credit,
            by_sender: vec![0; max_senders],
            config,
            set: Arc::new(set),
            listener,
            listener_paused_until: None,
            listening: Outage::default(),
            pending_handshakes: BTreeSet::new(),
            last_warning: None,
            places: Vec::new(),
            by_peer: HashMap::new(),
            free: Vec::new(),
            next_serial: 1,
            dirty: VecDeque::new(),
            stalled: Vec::new(),
            completions: Vec::new(),
            next_deadline_ns: u64::MAX,
            ended: VecDeque::new(),
            is_stopping: false,
        };
        Ok((shared, io))
    }

    /// Runs until a stop command.
    pub(super) fn run(mut self) {
        let mut idle_since: Option<Instant> = None;
        while !self.is_stopping {
            let now = Instant::now();
            self.shared.transfers.pulse.beat();
            let mut is_busy = self.execute_commands();
            is_busy |= self.poll_sockets(Duration::ZERO);
            is_busy |= self.poll_fabrics();
            is_busy |= self.advance_connections(now);
            self.registry.retry_deregistrations(&mut self.fabrics, now);
            if is_busy {
                idle_since = None;
                continue;
            }
            let since = *idle_since.get_or_insert(now);
            if now - since < self.config.spin {
                std::hint::spin_loop();
                continue;
            }
            self.sleep(now);
        }
        self.stop();
    }

    /// Handles socket events. Blocks for at most `timeout` until there is one.
    fn poll_sockets(&mut self, timeout: Duration) -> bool {
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 64];
        let timeout = Timespec {
            tv_sec: timeout.as_secs().min(3600).cast_signed(),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        // After a signal, the next call finds the same events.
        let num_ready = epoll::wait(&*self.set, &mut events[..], Some(&timeout)).unwrap_or(0);
        let mut is_busy = false;
        for event in &events[..num_ready] {
            let (data, flags) = (event.data, event.flags);
            match data.u64() {
                FABRIC => {}
                WAKE => is_busy = true,
                LISTENER => {
                    is_busy = true;
                    self.accept();
                }
                idx => {
                    is_busy = true;
                    let broken = epoll::EventFlags::ERR | epoll::EventFlags::HUP;
                    let writable = flags.intersects(epoll::EventFlags::OUT | broken);
                    self.handle_event(idx as u32, writable);
                }
            }
        }
        is_busy
    }

    fn handle_event(&mut self, idx: u32, writable: bool) {
        match std::mem::replace(&mut self.places[idx as usize], Place::Busy) {
            Place::Handshake(mut handshake) => {
                self.remove_pending(idx, &handshake);
                match self.advance_handshake(&mut handshake, writable) {
                    Outcome::InProgress => {
                        self.add_pending(idx, &handshake);
                        self.places[idx as usize] = Place::Handshake(handshake);
                    }
                    Outcome::Ended => self.free_place(idx),
                    Outcome::Established { fabric, id, hello } => {
                        self.establish(idx, *handshake, fabric, id, &hello);
                    }
                }
            }
            Place::Active(mut connection) => {
                let now_ns = self.shared.ns(Instant::now());
                let fabric = &mut *self.fabrics[connection.peer.fabric];
                let received = connection.receive(fabric, &mut self.credit, &self.shared, now_ns);
                self.places[idx as usize] = Place::Active(connection);
                match received {
                    Ok(()) => self.mark_dirty(idx),
                    Err(reason) => self.close(idx, &reason),
                }
            }
            other => self.places[idx as usize] = other,
        }
    }

    fn poll_fabrics(&mut self) -> bool {
        let mut completions = std::mem::take(&mut self.completions);
        for fabric in &mut self.fabrics {
            fabric.poll(&mut completions);
        }
        let is_busy = !completions.is_empty();
        for Completion { token, result } in completions.drain(..) {
            let (idx, tag) = parse_token(token);
            let Some(place) = self.places.get_mut(idx as usize) else { continue };
            let (link, peer) = match place {
                Place::Active(connection) => (&mut connection.link, &connection.peer),
                Place::Closing(link, peer) => (&mut **link, &*peer),
                _ => continue,
            };
            let mut ports = Ports::new(&mut self.fabrics, &mut self.credit, &self.shared, peer, 0);
            link.on_done(&mut ports, tag, result);
            match place {
                Place::Closing(link, _) if link.num_in_flight() == 0 => self.free_place(idx),
                Place::Active(_) => self.mark_dirty(idx),
                _ => {}
            }
        }
        self.completions = completions;
        for fabric in 0..self.fabrics.len() {
            while let Some(peer) = self.fabrics[fabric].lost() {
                self.on_peer_lost(fabric, peer);
            }
        }
        is_busy
    }

    /// Advances connections, hands out credits, and ends operations at their deadlines.
    fn advance_connections(&mut self, now: Instant) -> bool {
        let now_ns = self.shared.ns(now);
        if self.credit.next_expiry_ns().is_some_and(|at| at <= now_ns) {
            self.credit.expire(now_ns);
        }
        while let Some(action) = self.credit.next_action() {
            match action {
                Action::Credit { sender, credit } => {
                    let idx = self.by_sender[sender.index()];
                    let Some(Place::Active(connection)) = self.places.get_mut(idx as usize) else {
                        continue;
                    };
                    if connection.peer.sender == sender {
                        connection.link.push_frame(Frame::Credit(credit));
                        self.mark_dirty(idx);
                    } else if connection.peer.reads == sender {
                        connection.link.on_pull_credit(credit);
                        self.mark_dirty(idx);
                    }
                }
                Action::Stalled { outstanding_bytes, .. } => {
                    tracing::debug!(outstanding_bytes, "a peer does not use its grant");
                }
            }
        }
        let is_busy = !self.dirty.is_empty();
        while let Some(idx) = self.stalled.pop() {
            self.mark_dirty(idx);
        }
        for _ in 0..self.dirty.len() {
            let Some(idx) = self.dirty.pop_front() else { break };
            let Some(Place::Active(connection)) = self.places.get_mut(idx as usize) else {
                continue;
            };
            connection.is_dirty = false;
            let mut ports = Ports::new(
                &mut self.fabrics,
                &mut self.credit,
                &self.shared,
                &connection.peer,
                now_ns,
            );
            connection.link.progress(&mut ports);
            if connection.link.waits_for_fabric() {
                self.stalled.push(idx);
            }
            self.next_deadline_ns = self.next_deadline_ns.min(connection.link.next_deadline_ns());
            match connection.flush(self.set.as_fd()) {
                Ok(()) if connection.link.has_room_again() => self.mark_dirty(idx),
                Ok(()) => {}
                Err(reason) => self.close(idx, &reason),
            }
        }
        if now_ns >= self.next_deadline_ns {
            self.expire(now, now_ns);
        }
        is_busy
    }

    fn expire(&mut self, now: Instant, now_ns: u64) {
        self.next_deadline_ns = u64::MAX;
        for idx in 0..self.places.len() as u32 {
            match &mut self.places[idx as usize] {
                Place::Handshake(handshake) if handshake.deadline <= now => {
                    self.abort_handshake(idx, None)
                }
                Place::Handshake(handshake) => {
                    let deadline_ns = self.shared.ns(handshake.deadline);
                    self.next_deadline_ns = self.next_deadline_ns.min(deadline_ns);
                }
                Place::Active(connection) => {
                    let mut ports = Ports::new(
                        &mut self.fabrics,
                        &mut self.credit,
                        &self.shared,
                        &connection.peer,
                        now_ns,
                    );
                    let expired = connection.link.expire(&mut ports, now_ns);
                    let next_ns = connection.link.next_deadline_ns().min(connection.lost_ns);
                    self.next_deadline_ns = self.next_deadline_ns.min(next_ns);
                    match expired {
                        Ok(()) if connection.lost_ns <= now_ns => {
                            let how = "the connection for its data has ended".into();
                            self.close(idx, &CloseReason::Lost(how));
                        }
                        Ok(()) => self.mark_dirty(idx),
                        Err(op) => self.close(idx, &CloseReason::Deadline(op)),
                    }
                }
                _ => {}
            }
        }
        self.resume_listener(now);
    }

    fn sleep(&mut self, now: Instant) {
        if !self.shared.may_sleep() {
            return;
        }
        let now_ns = self.shared.ns(now);
        let next_ns = self.next_deadline_ns.min(self.credit.next_expiry_ns().unwrap_or(u64::MAX));
        let mut timeout = Duration::from_nanos(next_ns.saturating_sub(now_ns)).min(MAX_SLEEP);
        if !self.stalled.is_empty() {
            timeout = timeout.min(STALLED_SLEEP);
        }
        if let Some(at) = self.registry.next_attempt() {
            timeout = timeout.min(at.saturating_duration_since(now));
        }
        for fabric in &mut self.fabrics {
            if !fabric.may_sleep() {
                return self.shared.end_sleep();
            }
            timeout = timeout.min(fabric.max_sleep());
            if fabric.wait_fd().is_none() {
                timeout = timeout.min(Duration::from_millis(1));
            }
        }
        self.poll_sockets(timeout);
        self.shared.end_sleep();
    }

    fn free_place(&mut self, idx: u32) {
        self.places[idx as usize] = Place::Free;
        self.free.push(idx);
    }

    fn connection(&self, key: ConnKey) -> Option<&ActiveConnection> {
        match self.places.get(key.idx as usize) {
            Some(Place::Active(connection)) if connection.peer.key == key => Some(connection),
            _ => None,
        }
    }

    /// Calls `act` with a connection's link. Returns false if the connection has ended.
    fn with_connection(
        &mut self,
        key: ConnKey,
        act: impl FnOnce(&mut Link<Arc<Handle>>, &mut Ports<'_>),
    ) -> bool {
        let Some(Place::Active(connection)) = self.places.get_mut(key.idx as usize) else {
            return false;
        };
        if connection.peer.key != key {
            return false;
        }
        let ActiveConnection { peer, link, .. } = &mut **connection;
        let mut ports = Ports::new(&mut self.fabrics, &mut self.credit, &self.shared, peer, 0);
        act(link, &mut ports);
        self.mark_dirty(key.idx);
        true
    }

    /// Adds a connection to the list of those to be advanced.
    fn mark_dirty(&mut self, idx: u32) {
        if let Some(Place::Active(connection)) = self.places.get_mut(idx as usize)
            && !std::mem::replace(&mut connection.is_dirty, true)
        {
            self.dirty.push_back(idx);
        }
    }

    fn set(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        // Everything that is left fails, also when the thread panics.
        for idx in 0..self.places.len() as u32 {
            self.abort_handshake(idx, Some(ConnectError::Stopped));
            self.close(idx, &CloseReason::Stopped);
        }
        self.registry.stop();
        self.shared.is_dead.store(true, Ordering::SeqCst);
        self.shared.fail_queued();
        self.shared.inbox.close();
        self.shared.accepted.close();
    }
}

/// The offer of a fabric to peers.
fn offer_of(fabric: &dyn Fabric) -> Offer {
    Offer { kind: fabric.kind(), flavour: fabric.flavour().to_owned() }
}

const LISTENER: u64 = u64::MAX;
const WAKE: u64 = u64::MAX - 1;
const FABRIC: u64 = u64::MAX - 2;
const BACKLOG: i32 = 4096;
const MAX_SLEEP: Duration = Duration::from_secs(1);
const STALLED_SLEEP: Duration = Duration::from_micros(100);
