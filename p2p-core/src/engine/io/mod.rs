//! The engine's thread: it owns the fabrics, the connections and the registrations.

mod hello;
mod live;
mod meet;
mod socket;

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use self::live::{Live, Peer, Ports, parse_token};
use self::meet::{Caller, Meeting, Outcome};
use self::socket::Wire;
use super::config::{EngineConfig, default_fabrics};
use super::connection::Connection;
use super::error::{CloseReason, ConnectError, StartError, TransferError};
use super::link::{Link, Local};
use super::memory::{Handle, Registry};
use super::metadata::EndpointMetadata;
use super::shared::{Command, ConnKey, ConnShared, Move, Register, Shared, What, lock};
use super::wire::Frame;
use crate::credit::{Action, CreditConfig, CreditReceiver};
use crate::fabric::{Completion, Fabric, RegionId};
use crate::network::Offer;
use crate::wait::event_fd;

/// The thread's state. Fabrics come first: they go before the registrations and their memory.
#[derive(Debug)]
pub(super) struct Io {
    fabrics: Vec<Box<dyn Fabric>>,
    registry: Registry,
    shared: Arc<Shared>,
    config: EngineConfig,
    credit: CreditReceiver,
    /// Place of the connection by place of its sender in `credit`.
    by_sender: Vec<u32>,
    set: Arc<OwnedFd>,
    listener: TcpListener,
    /// When the listener may be asked again after it failed.
    listener_rests: Option<Instant>,
    places: Vec<Place>,
    free: Vec<u32>,
    next_serial: u64,
    /// Connections with something to do.
    dirty: VecDeque<u32>,
    /// Connections whose fabric had no room.
    stalled: Vec<u32>,
    completions: Vec<Completion>,
    /// No connection and no handshake has a deadline before this.
    next_deadline_ns: u64,
    /// Why the last few connections ended, for commands that come too late.
    ended: VecDeque<(u64, CloseReason)>,
    is_stopping: bool,
}

#[derive(Debug)]
enum Place {
    Free,
    /// Taken out while it is being looked at.
    Busy,
    Meeting(Box<Meeting>),
    Live(Box<Live>),
    /// Closed; the fabric still holds operations.
    Closing(Box<Link<Arc<Handle>>>, Peer),
}

impl Io {
    pub(super) fn new(mut config: EngineConfig) -> Result<(Arc<Shared>, Self), StartError> {
        config.check()?;
        let system = |what: &str| {
            let what = what.to_owned();
            move |source: io::Error| StartError::System { what, source }
        };
        // Twice: what peers push, and what is read from them.
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
        // The standard library's backlog is too short for a storm of peers.
        rustix::net::listen(&listener, BACKLOG).map_err(|e| system("listen")(e.into()))?;
        let port = listener.local_addr().map_err(system("listen"))?.port();
        let ip = config.advertise.unwrap_or_else(|| outward(bind.ip()));
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
        let shared = Arc::new(Shared::new(metadata, wake, config.max_transfers, config.queue_len));
        let io = Self {
            fabrics,
            registry: Registry::default(),
            shared: Arc::clone(&shared),
            credit,
            by_sender: vec![0; max_senders],
            config,
            set: Arc::new(set),
            listener,
            listener_rests: None,
            places: Vec::new(),
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

    /// Works until the engine is dropped.
    pub(super) fn run(mut self) {
        let mut idle_since: Option<Instant> = None;
        while !self.is_stopping {
            let now = Instant::now();
            let mut is_busy = self.take_commands();
            is_busy |= self.poll_sockets(Duration::ZERO);
            is_busy |= self.poll_fabrics();
            is_busy |= self.work(now);
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

    /// Carries out what users have asked for.
    fn take_commands(&mut self) -> bool {
        let mut is_busy = false;
        if let Some(later) = self.shared.take_later() {
            is_busy = true;
            for (idx, is_full) in later.released {
                let released = self.registry.release(&mut self.fabrics, idx, is_full, false);
                if let Err(error) = released {
                    tracing::error!(error, "memory stays registered");
                }
            }
            for key in later.closed {
                if self.live(key).is_some() {
                    self.close(key.idx, &CloseReason::Local);
                }
            }
        }
        if self.shared.has_taken.load(Ordering::SeqCst) {
            self.shared.has_taken.store(false, Ordering::SeqCst);
            is_busy = true;
            self.open_notify_windows();
        }
        for _ in 0..MAX_COMMANDS {
            let Some(command) = self.shared.queue.pop() else { break };
            is_busy = true;
            self.carry_out(command);
        }
        is_busy
    }

    fn carry_out(&mut self, command: Command) {
        match command {
            Command::Move(part) => self.begin_move(part),
            Command::Notify { conn, transfer, deadline_ns, notification } => {
                if !self.with_live(conn, |link, ports| {
                    link.notify(ports, transfer, deadline_ns, notification);
                }) {
                    self.too_late(conn, transfer, "notify");
                }
            }
            Command::Connect { addr, deadline, reply } => {
                self.begin_connect(deadline, Caller { addr, reply });
            }
            Command::Register(Register { ptr, bytes, access, memory, reply }) => {
                let fabrics = &mut self.fabrics;
                // SAFETY: the caller of `Engine::reg` has promised that the memory stays mapped, or
                // `memory` holds it.
                let keys = unsafe { self.registry.acquire(fabrics, ptr, bytes, access, memory) };
                reply.push(keys);
            }
            Command::Release { idx, is_full, reply } => {
                reply.push(self.registry.release(&mut self.fabrics, idx, is_full, true));
            }
            Command::Stop => self.is_stopping = true,
        }
    }

    fn begin_move(&mut self, part: Move) {
        let Move { conn, what, transfer, deadline_ns, handle, offset, bytes } = part;
        let Some(live) = self.live(conn) else {
            drop(handle);
            return self.too_late(conn, transfer, what.name());
        };
        let Some(region) = handle.keys.region(live.peer.fabric) else {
            drop(handle);
            let detail = "the memory is not registered with this transport any more".into();
            let error = TransferError::Fabric { op: what.name(), code: 0, detail };
            return self.shared.transfers.finish(transfer, Err(error));
        };
        let local = Local { hold: handle, region, offset, bytes };
        self.with_live(conn, |link, ports| match what {
            What::Send => link.send(ports, transfer, deadline_ns, local),
            What::Recv => link.recv(ports, transfer, deadline_ns, local),
            What::Write(remote) => link.write(ports, transfer, deadline_ns, local, remote),
            What::Read(remote) => link.read(ports, transfer, deadline_ns, local, remote),
        });
    }

    /// A transfer for a connection that has ended.
    fn too_late(&self, conn: ConnKey, transfer: u32, op: &'static str) {
        let known = self.ended.iter().find(|(serial, _)| *serial == conn.serial);
        let reason = known.map_or(CloseReason::Local, |(_, reason)| reason.clone());
        let error = TransferError::Disconnected { op, reason };
        self.shared.transfers.finish(transfer, Err(error));
    }

    fn begin_connect(&mut self, deadline: Instant, caller: Caller) {
        let stream = start_connecting(caller.addr);
        if let Err((error, Some(caller))) = self.place(deadline, Some(caller), stream) {
            let (addr, detail) = (caller.addr.to_string(), error.to_string());
            caller.reply.push(Err(ConnectError::Unreachable { addr, detail }));
        }
    }

    /// Looks at the sockets, waiting at most `timeout` for one.
    fn poll_sockets(&mut self, timeout: Duration) -> bool {
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 64];
        let timeout = Timespec {
            tv_sec: timeout.as_secs().min(3600).cast_signed(),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        // Interrupted: whatever is there is there the next time.
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
                    self.look_at(idx as u32, writable);
                }
            }
        }
        is_busy
    }

    fn look_at(&mut self, idx: u32, writable: bool) {
        match std::mem::replace(&mut self.places[idx as usize], Place::Busy) {
            Place::Meeting(mut meeting) => match self.advance_meeting(&mut meeting, writable) {
                Outcome::Going => self.places[idx as usize] = Place::Meeting(meeting),
                Outcome::Over => self.vacate(idx),
                Outcome::Stands { fabric, id, who } => {
                    self.establish(idx, *meeting, fabric, id, &who);
                }
            },
            Place::Live(mut live) => {
                let now_ns = self.shared.ns(Instant::now());
                let fabric = &mut *self.fabrics[live.peer.fabric];
                let received = live.receive(fabric, &mut self.credit, &self.shared, now_ns);
                self.places[idx as usize] = Place::Live(live);
                match received {
                    Ok(()) => self.touch(idx),
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
                Place::Live(live) => (&mut live.link, &live.peer),
                Place::Closing(link, peer) => (&mut **link, &*peer),
                _ => continue,
            };
            let mut ports = Ports {
                fabric: &mut *self.fabrics[peer.fabric],
                credit: &mut self.credit,
                shared: &self.shared,
                peer,
                now_ns: 0,
            };
            link.on_done(&mut ports, tag, result);
            match place {
                Place::Closing(link, _) if link.num_in_flight() == 0 => self.vacate(idx),
                Place::Live(_) => self.touch(idx),
                _ => {}
            }
        }
        self.completions = completions;
        is_busy
    }

    /// Lets connections go on, tells credits, ends what is late.
    fn work(&mut self, now: Instant) -> bool {
        let now_ns = self.shared.ns(now);
        if self.credit.next_expiry_ns().is_some_and(|at| at <= now_ns) {
            self.credit.expire(now_ns);
        }
        while let Some(action) = self.credit.next_action() {
            match action {
                Action::Credit { sender, credit } => {
                    let idx = self.by_sender[sender.slot()];
                    let Some(Place::Live(live)) = self.places.get_mut(idx as usize) else {
                        continue;
                    };
                    if live.peer.sender == sender {
                        live.link.say(Frame::Credit(credit));
                        self.touch(idx);
                    } else if live.peer.reads == sender {
                        live.link.on_pull_credit(credit);
                        self.touch(idx);
                    }
                }
                Action::Stalled { outstanding_bytes, .. } => {
                    tracing::debug!(outstanding_bytes, "a peer does not use its grant");
                }
            }
        }
        let is_busy = !self.dirty.is_empty();
        while let Some(idx) = self.stalled.pop() {
            self.touch(idx);
        }
        for _ in 0..self.dirty.len() {
            let Some(idx) = self.dirty.pop_front() else { break };
            let Some(Place::Live(live)) = self.places.get_mut(idx as usize) else { continue };
            live.is_dirty = false;
            let mut ports = Ports {
                fabric: &mut *self.fabrics[live.peer.fabric],
                credit: &mut self.credit,
                shared: &self.shared,
                peer: &live.peer,
                now_ns,
            };
            live.link.progress(&mut ports);
            if live.link.waits_for_fabric() {
                self.stalled.push(idx);
            }
            self.next_deadline_ns = self.next_deadline_ns.min(live.link.next_deadline_ns());
            match live.flush(self.set.as_fd()) {
                Ok(()) if live.link.has_room_again() => self.touch(idx),
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
                Place::Meeting(meeting) if meeting.deadline <= now => {
                    let late = std::mem::replace(&mut self.places[idx as usize], Place::Busy);
                    if let Place::Meeting(mut meeting) = late {
                        self.end_meeting(&mut meeting, None);
                    }
                    self.vacate(idx);
                }
                Place::Meeting(meeting) => {
                    let deadline_ns = self.shared.ns(meeting.deadline);
                    self.next_deadline_ns = self.next_deadline_ns.min(deadline_ns);
                }
                Place::Live(live) => {
                    let mut ports = Ports {
                        fabric: &mut *self.fabrics[live.peer.fabric],
                        credit: &mut self.credit,
                        shared: &self.shared,
                        peer: &live.peer,
                        now_ns,
                    };
                    let expired = live.link.expire(&mut ports, now_ns);
                    self.next_deadline_ns = self.next_deadline_ns.min(live.link.next_deadline_ns());
                    match expired {
                        Ok(()) => self.touch(idx),
                        Err(op) => self.close(idx, &CloseReason::Deadline(op)),
                    }
                }
                _ => {}
            }
        }
        if self.listener_rests.is_some_and(|until| until <= now) {
            self.listener_rests = None;
            let (data, flags) = (epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN);
            if let Err(error) = epoll::add(&*self.set, &self.listener, data, flags) {
                tracing::error!(%error, "cannot listen any more");
            }
        }
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
        for fabric in &mut self.fabrics {
            if !fabric.may_sleep() {
                return self.shared.woke();
            }
            timeout = timeout.min(fabric.max_sleep());
            if fabric.wait_fd().is_none() {
                timeout = timeout.min(Duration::from_millis(1));
            }
        }
        self.poll_sockets(timeout);
        self.shared.woke();
    }

    fn accept(&mut self) {
        for _ in 0..64 {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                Err(error) => {
                    // Out of descriptors, most likely: asking again at once would only burn time.
                    tracing::error!(%error, "cannot accept a connection");
                    let until = Instant::now() + LISTENER_REST;
                    self.listener_rests = Some(until);
                    self.next_deadline_ns = self.next_deadline_ns.min(self.shared.ns(until));
                    let _ = epoll::delete(&*self.set, &self.listener);
                    return;
                }
            };
            let deadline = Instant::now() + self.config.handshake_timeout;
            if let Err((error, _)) = self.place(deadline, None, Ok(stream)) {
                tracing::warn!(%error, "a connection is not served");
            }
        }
    }

    /// A free place, which is taken: whoever does not use it vacates it.
    fn take_place(&mut self) -> io::Result<u32> {
        if let Some(idx) = self.free.pop() {
            return Ok(idx);
        }
        if self.places.len() >= self.config.max_connections {
            let most = self.config.max_connections;
            return Err(io::Error::other(format!("{most} connections are there, the limit")));
        }
        self.places.push(Place::Free);
        Ok(self.places.len() as u32 - 1)
    }

    /// Puts a socket into a place of its own.
    fn place(
        &mut self,
        deadline: Instant,
        caller: Option<Caller>,
        stream: io::Result<TcpStream>,
    ) -> Result<(), (io::Error, Option<Caller>)> {
        let stream = match stream {
            Ok(stream) => stream,
            Err(error) => return Err((error, caller)),
        };
        let idx = match self.take_place() {
            Ok(idx) => idx,
            Err(error) => return Err((error, caller)),
        };
        let timeout = self.config.liveness_timeout;
        match Wire::new(stream, self.set.as_fd(), idx.into(), timeout, caller.is_some()) {
            Ok(wire) => {
                self.next_deadline_ns = self.next_deadline_ns.min(self.shared.ns(deadline));
                let meeting = Meeting::new(wire, deadline, caller);
                self.places[idx as usize] = Place::Meeting(Box::new(meeting));
                Ok(())
            }
            Err(error) => {
                self.vacate(idx);
                Err((error, caller))
            }
        }
    }

    fn vacate(&mut self, idx: u32) {
        self.places[idx as usize] = Place::Free;
        self.free.push(idx);
    }

    /// A handshake has succeeded.
    fn establish(
        &mut self,
        idx: u32,
        mut meeting: Meeting,
        fabric: usize,
        id: crate::fabric::PeerId,
        who: &hello::Who,
    ) {
        let places = self.credit.join().and_then(|sender| Ok((sender, self.credit.join()?)));
        let (sender, reads) = match places {
            Ok(places) => places,
            Err(error) => {
                tracing::warn!(%error, "a connection is not served");
                self.fabrics[fabric].close_peer(id);
                self.end_meeting(&mut meeting, None);
                return self.vacate(idx);
            }
        };
        self.by_sender[sender.slot()] = idx;
        self.by_sender[reads.slot()] = idx;
        let key = ConnKey { idx, serial: self.next_serial };
        self.next_serial += 1;
        let transport = offer_of(&*self.fabrics[fabric]);
        let conn = Arc::new(ConnShared {
            shared: Arc::clone(&self.shared),
            key,
            fabric,
            transport,
            peer: Self::peer_info(&meeting, who),
            theirs: who.limits,
            closed: OnceLock::new(),
            taken: AtomicU64::new(0),
        });
        let weak = Arc::downgrade(&conn);
        let mut live = lock(&self.shared.live);
        live.retain(|other: &Weak<ConnShared>| other.strong_count() > 0);
        live.push(weak.clone());
        drop(live);
        let link = Link::new(self.config.limits(), who.limits, self.config.chunk_bytes);
        let peer = Peer { key, conn: weak, engine_id: who.engine_id, fabric, id, sender, reads };
        self.announce(&mut meeting, Connection { shared: conn });
        let live = Live { wire: meeting.wire, peer, link, is_dirty: false };
        self.places[idx as usize] = Place::Live(Box::new(live));
        // Frames may have come along with the last word.
        self.look_at(idx, false);
    }

    /// Ends a connection: first the peer's access, then its transfers.
    fn close(&mut self, idx: u32, reason: &CloseReason) {
        let place = std::mem::replace(&mut self.places[idx as usize], Place::Busy);
        let Place::Live(live) = place else {
            self.places[idx as usize] = place;
            return;
        };
        let Live { mut wire, peer, mut link, .. } = *live;
        if let Some(conn) = peer.conn.upgrade() {
            let _ = conn.closed.set(reason.clone());
        }
        if self.ended.len() == MAX_ENDED {
            self.ended.pop_front();
        }
        self.ended.push_back((peer.key.serial, reason.clone()));
        if matches!(reason, CloseReason::Local | CloseReason::Stopped) {
            // Best effort: a peer that does not read learns it from the end of the stream.
            link.say(Frame::Goodbye);
            let _ = wire.write(link.output());
            wire.finish();
        }
        let fabric = &mut *self.fabrics[peer.fabric];
        fabric.close_peer(peer.id);
        if !fabric.close_revokes() {
            for region in link.granted_regions() {
                self.revoke(peer.fabric, region);
            }
        }
        let mut ports = Ports {
            fabric: &mut *self.fabrics[peer.fabric],
            credit: &mut self.credit,
            shared: &self.shared,
            peer: &peer,
            now_ns: 0,
        };
        link.close(&mut ports, reason);
        let now_ns = self.shared.ns(Instant::now());
        // It has joined when the connection was made.
        let _ = self.credit.leave(now_ns, peer.sender);
        let _ = self.credit.leave(now_ns, peer.reads);
        if link.num_in_flight() > 0 {
            self.places[idx as usize] = Place::Closing(Box::new(link), peer);
        } else {
            self.vacate(idx);
        }
    }

    fn revoke(&mut self, fabric: usize, region: RegionId) {
        if let Err(error) = self.registry.renew(&mut *self.fabrics[fabric], fabric, region) {
            tracing::error!(%error, "memory that a closed peer could write cannot be used any more");
        }
    }

    /// Ends everything, in order.
    fn stop(&mut self) {
        for idx in 0..self.places.len() as u32 {
            match &self.places[idx as usize] {
                Place::Live(_) => self.close(idx, &CloseReason::Stopped),
                Place::Meeting(_) => {
                    let place = std::mem::replace(&mut self.places[idx as usize], Place::Free);
                    if let Place::Meeting(mut meeting) = place {
                        self.end_meeting(&mut meeting, Some(ConnectError::Stopped));
                    }
                }
                _ => {}
            }
        }
        // Closed peers complete at once or within the fabric's own bound.
        let give_up = Instant::now() + STOP_TIMEOUT;
        while self.places.iter().any(|place| matches!(place, Place::Closing(..)))
            && Instant::now() < give_up
        {
            self.poll_fabrics();
        }
    }

    fn open_notify_windows(&mut self) {
        for idx in 0..self.places.len() as u32 {
            let Place::Live(live) = &mut self.places[idx as usize] else { continue };
            if let Some(conn) = live.peer.conn.upgrade() {
                live.link.taken(conn.taken.load(Ordering::Relaxed));
                self.touch(idx);
            }
        }
    }

    fn live(&self, key: ConnKey) -> Option<&Live> {
        match self.places.get(key.idx as usize) {
            Some(Place::Live(live)) if live.peer.key == key => Some(live),
            _ => None,
        }
    }

    /// Lets `act` work on a connection; false when it has ended.
    fn with_live(
        &mut self,
        key: ConnKey,
        act: impl FnOnce(&mut Link<Arc<Handle>>, &mut Ports<'_>),
    ) -> bool {
        let Some(Place::Live(live)) = self.places.get_mut(key.idx as usize) else { return false };
        if live.peer.key != key {
            return false;
        }
        let Live { peer, link, .. } = &mut **live;
        let mut ports = Ports {
            fabric: &mut *self.fabrics[peer.fabric],
            credit: &mut self.credit,
            shared: &self.shared,
            peer,
            now_ns: 0,
        };
        act(link, &mut ports);
        self.touch(key.idx);
        true
    }

    /// Remembers to let a connection go on.
    fn touch(&mut self, idx: u32) {
        if let Some(Place::Live(live)) = self.places.get_mut(idx as usize)
            && !std::mem::replace(&mut live.is_dirty, true)
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
        // Whatever is still there ends as a loss, also when the thread panics.
        for idx in 0..self.places.len() as u32 {
            self.close(idx, &CloseReason::Stopped);
        }
        self.shared.is_dead.store(true, Ordering::SeqCst);
        self.shared.fail_queued();
        self.shared.inbox.close();
        self.shared.accepted.close();
    }
}

/// A fabric as it is offered to peers.
fn offer_of(fabric: &dyn Fabric) -> Offer {
    Offer { kind: fabric.kind(), flavour: fabric.flavour().to_owned() }
}

/// A socket on its way to `addr`.
fn start_connecting(addr: SocketAddr) -> io::Result<TcpStream> {
    let family = if addr.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let fd = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&fd, &addr) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(TcpStream::from(fd)),
        Err(errno) => Err(errno.into()),
    }
}

/// The address under which others reach what listens on `bind`.
fn outward(bind: IpAddr) -> IpAddr {
    if !bind.is_unspecified() {
        return bind;
    }
    // No packet is sent: the system only says which address it would send from.
    let found = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).and_then(|socket| {
        socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9))?;
        socket.local_addr()
    });
    found.map_or(Ipv4Addr::LOCALHOST.into(), |addr| addr.ip())
}

const LISTENER: u64 = u64::MAX;
const WAKE: u64 = u64::MAX - 1;
const FABRIC: u64 = u64::MAX - 2;
const BACKLOG: i32 = 4096;
const MAX_COMMANDS: usize = 256;
const MAX_ENDED: usize = 64;
const MAX_SLEEP: Duration = Duration::from_secs(1);
const STALLED_SLEEP: Duration = Duration::from_micros(100);
const LISTENER_REST: Duration = Duration::from_millis(100);
const STOP_TIMEOUT: Duration = Duration::from_secs(2);
