//! Fabrics over connections that carry bytes: `tcp` by sockets between any two hosts, `shm` by rings in shared memory
//! between the processes of one host.
//!
//! Each side connects to the other and requests reads and writes on its own connection. The target's thread serves them
//! from and into the registered memory, without an intermediate copy. A write is done when the target has acknowledged
//! it: its bytes are in place then.
//!
//! Requests of users' threads have a connection of their own (`direct.rs`), which the first of them makes.
//!
//! The connecting side proves its identity with a nonce that it got over the peers' own connection. Every request is
//! checked against key, range and rights. A peer that sends invalid bytes loses its connection and nothing else.
//!
//! A poll gives one turn to every connection that has something to do. A turn moves at most a MiB in either direction,
//! so a busy connection does not delay the others.

mod buffered;
mod carrier;
mod dial;
mod direct;
mod issue;
mod listen;
mod rings;
mod serve;
mod unix;
mod wire;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};

use self::buffered::Stream;
use self::dial::Dial;
use self::direct::DirectRequests;
use self::issue::{Issuer, Op};
use self::listen::{HELLO_TIMEOUT, LISTENER_PAUSE, Listener};
use self::serve::{Server, Step};
use self::wire::{Detail, Request, encode_hello};
#[cfg(fuzzing)]
pub(in crate::fabric) use self::wire::{check, check_detail, detail_samples, samples};
use super::memory::Regions;
use super::post::{self, MAX_PLACES, PeerEntry, op_name};
use super::{
    Access, Completion, DirectCopy, Fabric, LocalSegment, PeerId, PostOutcome, RegionId,
    RemoteSegment, Token, WireRegion,
};
use p2p_core::endpoint::{PostError, TransportKind};
use p2p_core::log_limit::LogLimit;
use p2p_core::network::{NetworkError, Route};
use p2p_core::outage::Outage;

/// Addresses and time limit of data connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpConfig {
    /// Address to listen on. Port 0 selects a free port.
    pub bind: SocketAddr,
    /// Address for peers to connect to. `None` selects the address of the route to the peer, or of `bind`.
    pub advertise: Option<IpAddr>,
    /// Time without an answer of the peer's host after which a connection is closed.
    pub timeout: Duration,
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self {
            bind: SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0),
            advertise: None,
            timeout: Duration::from_secs(8),
        }
    }
}

/// The fabric `tcp` or `shm`. See the [module](self).
#[derive(Debug)]
pub struct StreamFabric {
    listener: Listener,
    /// Time at which the fabric accepts again after a failure.
    listener_paused_until: Option<Instant>,
    listening: Outage,
    /// Outage: too many data connections without a hello.
    overload: Outage,
    set: OwnedFd,
    regions: Regions,
    peers: Vec<Peer>,
    free_peers: Vec<u32>,
    by_nonce: HashMap<[u8; 16], u32>,
    servers: Vec<Option<Server>>,
    free_servers: Vec<usize>,
    num_unidentified: usize,
    last_hello_check: Instant,
    /// Peers with operations posted since the last poll, or with more to do.
    dirty: VecDeque<u32>,
    /// Connections of peers with more to do.
    busy_servers: VecDeque<usize>,
    done: Vec<Completion>,
    /// Peers whose connection has ended, to be reported.
    lost: Vec<PeerId>,
}

#[derive(Debug)]
struct Peer {
    entry: PeerEntry,
    nonce: [u8; 16],
    issuer: Option<Issuer>,
    /// Whether it is in `dirty`.
    is_dirty: bool,
    /// Connections for the peer's requests: of its engine, and of its users' threads.
    servers: [Option<usize>; 2],
    /// Requests of this side's users' threads.
    direct: Option<Arc<DirectRequests>>,
}

impl StreamFabric {
    /// The fabric `tcp`: listens for data connections of any host.
    ///
    /// # Errors
    /// [`NetworkError`] when the address cannot be bound.
    pub fn new(config: TcpConfig) -> Result<Self, NetworkError> {
        Self::over(Listener::tcp(config), "tcp", config.bind.to_string())
    }

    /// The fabric `shm`: listens for data connections of processes of the same user, host and network namespace.
    ///
    /// A peer's connection takes 520 KiB of address space at both ends, committed as it is used, and one with
    /// requests of users' threads as much again.
    ///
    /// # Errors
    /// [`NetworkError`] when the system gives no sockets.
    pub fn shm() -> Result<Self, NetworkError> {
        Self::over(Listener::shm(), "shm", "a Unix socket".to_owned())
    }

    fn over(
        listener: io::Result<Listener>,
        network: &str,
        place: String,
    ) -> Result<Self, NetworkError> {
        let failed = |op: &'static str| {
            let (network, place) = (network.to_owned(), place.clone());
            move |error: io::Error| NetworkError {
                network,
                op,
                code: error.raw_os_error().map(i64::from),
                detail: format!("{place}: {error}"),
            }
        };
        let listener = listener.map_err(failed("listen"))?;
        let flags = epoll::CreateFlags::CLOEXEC;
        let set = epoll::create(flags).map_err(io::Error::from).map_err(failed("epoll"))?;
        let (data, interest) = (epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN);
        epoll::add(&set, &listener, data, interest)
            .map_err(io::Error::from)
            .map_err(failed("epoll"))?;
        Ok(Self {
            listener,
            listener_paused_until: None,
            listening: Outage::default(),
            overload: Outage::default(),
            set,
            regions: Regions::default(),
            peers: Vec::new(),
            free_peers: Vec::new(),
            by_nonce: HashMap::new(),
            servers: Vec::new(),
            free_servers: Vec::new(),
            num_unidentified: 0,
            last_hello_check: Instant::now(),
            dirty: VecDeque::new(),
            busy_servers: VecDeque::new(),
            done: Vec::new(),
            lost: Vec::new(),
        })
    }

    fn find(&self, op: &'static str, peer: PeerId) -> Result<usize, PostError> {
        post::find(op, peer, |idx| self.peers.get(idx).map(|peer| &peer.entry))
    }

    fn post(
        &mut self,
        is_write: bool,
        peer: PeerId,
        remote: RemoteSegment,
        local: LocalSegment,
        token: Token,
    ) -> Result<PostOutcome, PostError> {
        let name = op_name(is_write);
        let idx = self.find(name, peer)?;
        let offset = remote.checked(name, local.bytes)?;
        let ptr = self.regions.local(name, local)?;
        if local.bytes > MAX_OPERATION_BYTES {
            return Err(PostError::RemoteRange {
                op: name,
                offset: remote.offset as usize,
                len: local.bytes as usize,
                region_bytes: MAX_OPERATION_BYTES as usize,
            });
        }
        let peer = &mut self.peers[idx];
        let Some(issuer) = &mut peer.issuer else {
            return Err(PostError::Disconnected { op: name });
        };
        if issuer.is_full() {
            return Ok(PostOutcome::Full);
        }
        let request = Request { is_write, key: remote.region.key, offset, bytes: local.bytes };
        let (region, bytes) = (local.region, local.bytes as usize);
        issuer.push(Op { token, is_write, request: request.encode(), region, ptr, bytes });
        if !std::mem::replace(&mut peer.is_dirty, true) {
            self.dirty.push_back(idx as u32);
        }
        Ok(PostOutcome::Accepted)
    }

    fn advance_issuer(&mut self, idx: usize, writable: bool) {
        let Some(peer) = self.peers.get_mut(idx) else { return };
        let Some(issuer) = &mut peer.issuer else { return };
        issuer.begin_turn();
        match issuer.advance(self.set.as_fd(), writable, &mut self.done) {
            Ok(false) => {}
            Ok(true) => {
                if !std::mem::replace(&mut peer.is_dirty, true) {
                    self.dirty.push_back(idx as u32);
                }
            }
            Err(error) => {
                tracing::debug!(%error, peer = idx, "data connection ended");
                issuer.fail(&mut self.done);
                peer.issuer = None;
                self.lost.push(peer.entry.id(idx));
            }
        }
    }

    fn advance_server(&mut self, idx: usize) {
        let Some(Some(server)) = self.servers.get_mut(idx) else { return };
        server.begin_turn();
        loop {
            let Some(Some(server)) = self.servers.get_mut(idx) else { return };
            match server.advance(self.set.as_fd(), &self.regions) {
                Ok(Step::Idle) => return,
                Ok(Step::More) => {
                    if !std::mem::replace(&mut server.is_busy, true) {
                        self.busy_servers.push_back(idx);
                    }
                    return;
                }
                Ok(Step::Hello { nonce, is_direct }) => {
                    let known = self.by_nonce.get(&nonce).copied();
                    let kind = usize::from(is_direct);
                    let is_free = |peer: &u32| self.peers[*peer as usize].servers[kind].is_none();
                    let Some(peer) = known.filter(is_free) else {
                        if let Some(num_suppressed) = NONCE_LOG.allow() {
                            tracing::warn!(
                                num_suppressed,
                                "a data connection with a nonce that no open peer has"
                            );
                        }
                        return self.drop_server(idx);
                    };
                    server.peer = Some(peer);
                    self.peers[peer as usize].servers[kind] = Some(idx);
                    self.num_unidentified -= 1;
                }
                Err(error) => {
                    if error.kind() == io::ErrorKind::InvalidData
                        && let Some(num_suppressed) = NONCE_LOG.allow()
                    {
                        tracing::warn!(%error, num_suppressed, "data connection closed");
                    }
                    return self.drop_server(idx);
                }
            }
        }
    }

    fn drop_server(&mut self, idx: usize) {
        let Some(server) = self.servers.get_mut(idx).and_then(Option::take) else { return };
        self.free_servers.push(idx);
        match server.peer {
            Some(peer) => {
                for place in &mut self.peers[peer as usize].servers {
                    place.take_if(|server| *server == idx);
                }
            }
            None => self.num_unidentified -= 1,
        }
    }

    fn connect(&self, idx: usize, dial: &Dial, nonce: [u8; 16]) -> io::Result<Issuer> {
        let (carrier, is_connecting) = dial.begin()?;
        let interest = carrier.interest(true, true);
        let stream = Stream::new(carrier, self.set.as_fd(), (idx as u64) << 1, interest)?;
        Ok(Issuer::new(stream, encode_hello(nonce, false), is_connecting))
    }

    fn failed(&self, op: &'static str, detail: &str, code: Option<i64>) -> NetworkError {
        let (network, detail) = (self.listener.kind().name().to_owned(), detail.to_owned());
        NetworkError { network, op, code, detail }
    }
}

impl Fabric for StreamFabric {
    fn kind(&self) -> TransportKind {
        self.listener.kind()
    }

    fn flavour(&self) -> &str {
        ""
    }

    unsafe fn register(
        &mut self,
        ptr: NonNull<u8>,
        bytes: usize,
        access: Access,
    ) -> Result<RegionId, PostError> {
        self.regions.insert(ptr, bytes, access)
    }

    fn describe(&self, region: RegionId) -> Option<WireRegion> {
        // Peers need no addresses of this process.
        self.regions.describe(region, |_| 0)
    }

    fn deregister(&mut self, region: RegionId) -> Result<(), PostError> {
        self.regions.remove(region)?;
        for server in self.servers.iter_mut().flatten() {
            server.revoke(region);
        }
        for (idx, peer) in self.peers.iter_mut().enumerate() {
            // The stream cannot take back half of a write, so the connection ends.
            if let Some(mut issuer) = peer.issuer.take_if(|issuer| issuer.uses(region)) {
                issuer.fail(&mut self.done);
                self.lost.push(peer.entry.id(idx));
            }
        }
        Ok(())
    }

    fn open_peer(&mut self) -> Result<(PeerId, Vec<u8>), NetworkError> {
        let ip = match &self.listener {
            Listener::Tcp { config, .. } if !config.bind.ip().is_unspecified() => config.bind.ip(),
            Listener::Tcp { config, .. } if config.bind.is_ipv6() => Ipv6Addr::LOCALHOST.into(),
            _ => Ipv4Addr::LOCALHOST.into(),
        };
        self.open_peer_on(Route { local: ip, remote: ip })
    }

    fn open_peer_on(&mut self, route: Route) -> Result<(PeerId, Vec<u8>), NetworkError> {
        let idx = match self.free_peers.pop() {
            Some(idx) => idx as usize,
            None if self.peers.len() < MAX_PLACES => {
                self.peers.push(Peer {
                    entry: PeerEntry::default(),
                    nonce: [0; 16],
                    issuer: None,
                    is_dirty: false,
                    servers: [None; 2],
                    direct: None,
                });
                self.peers.len() - 1
            }
            None => return Err(self.failed("open", "there are too many peers", None)),
        };
        let place = self.listener.place(route);
        let peer = &mut self.peers[idx];
        let id = peer.entry.open(idx);
        peer.nonce = rand::random();
        self.by_nonce.insert(peer.nonce, idx as u32);
        let detail = Detail { place, nonce: peer.nonce };
        Ok((id, detail.encode()))
    }

    fn join_peer(&mut self, peer: PeerId, detail: &[u8]) -> Result<(), NetworkError> {
        let detail = Detail::decode(detail).map_err(|error| self.failed("join", &error, None))?;
        let idx = self.find("join", peer);
        let idx = idx.map_err(|error| self.failed("join", &error.to_string(), None))?;
        let dial = self.listener.dial(&detail);
        let dial = dial.map_err(|why| self.failed("join", &why, None))?;
        let issuer = self.connect(idx, &dial, detail.nonce).map_err(|error| {
            let code = error.raw_os_error().map(i64::from);
            self.failed("connect", &format!("{dial}: {error}"), code)
        })?;
        let direct = DirectRequests::new(dial, encode_hello(detail.nonce, true));
        let peer = &mut self.peers[idx];
        peer.issuer = Some(issuer);
        peer.direct = Some(Arc::new(direct));
        // The next poll sends the hello, for which the peer waits a few seconds at most. An event for that comes from
        // sockets only.
        if !std::mem::replace(&mut peer.is_dirty, true) {
            self.dirty.push_back(idx as u32);
        }
        Ok(())
    }

    fn close_peer(&mut self, peer: PeerId) {
        let Ok(idx) = self.find("close", peer) else { return };
        let found = &mut self.peers[idx];
        found.entry.close();
        self.by_nonce.remove(&found.nonce);
        if let Some(mut issuer) = found.issuer.take() {
            issuer.fail(&mut self.done);
        }
        if let Some(direct) = found.direct.take() {
            direct.close();
        }
        for server in found.servers.into_iter().flatten() {
            self.drop_server(server);
        }
        self.lost.retain(|lost| *lost != peer);
        self.free_peers.push(idx as u32);
    }

    fn lost(&mut self) -> Option<PeerId> {
        self.lost.pop()
    }

    unsafe fn write(
        &mut self,
        peer: PeerId,
        dst: RemoteSegment,
        src: LocalSegment,
        token: Token,
    ) -> Result<PostOutcome, PostError> {
        self.post(true, peer, dst, src, token)
    }

    unsafe fn read(
        &mut self,
        peer: PeerId,
        dst: LocalSegment,
        src: RemoteSegment,
        token: Token,
    ) -> Result<PostOutcome, PostError> {
        self.post(false, peer, src, dst, token)
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        if self.listener_paused_until.is_some() {
            self.resume_listener();
        }
        // Peers that are appended meanwhile get their next turn in the next poll.
        for _ in 0..self.dirty.len() {
            let Some(idx) = self.dirty.pop_front() else { break };
            self.peers[idx as usize].is_dirty = false;
            self.advance_issuer(idx as usize, false);
        }
        for _ in 0..self.busy_servers.len() {
            let Some(idx) = self.busy_servers.pop_front() else { break };
            if let Some(Some(server)) = self.servers.get_mut(idx) {
                server.is_busy = false;
                self.advance_server(idx);
            }
        }
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 64];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        // After a signal, the next poll finds the same events.
        let num_ready = epoll::wait(&self.set, &mut events[..], Some(&now)).unwrap_or(0);
        for event in &events[..num_ready] {
            let (data, flags) = (event.data.u64(), event.flags);
            if data == LISTENER {
                self.accept();
            } else if data & SERVER != 0 {
                let idx = (data >> 1) as usize;
                // A server in `busy_servers` has had its turn in this poll.
                let is_due = |server: &Server| !server.is_busy;
                if self.servers.get(idx).and_then(Option::as_ref).is_some_and(is_due) {
                    self.advance_server(idx);
                }
            } else if self.peers.get((data >> 1) as usize).is_some_and(|peer| !peer.is_dirty) {
                let broken = epoll::EventFlags::ERR | epoll::EventFlags::HUP;
                let writable = flags.intersects(epoll::EventFlags::OUT | broken);
                self.advance_issuer((data >> 1) as usize, writable);
            }
        }
        if self.num_unidentified > 0 && self.last_hello_check.elapsed() > HELLO_TIMEOUT / 4 {
            self.drop_unidentified(HELLO_TIMEOUT);
        }
        out.append(&mut self.done);
    }

    fn direct(&self, peer: PeerId) -> Option<Arc<dyn DirectCopy>> {
        let idx = self.find("copy", peer).ok()?;
        let direct = Arc::clone(self.peers[idx].direct.as_ref()?);
        Some(direct)
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.set.as_fd())
    }

    fn max_sleep(&self) -> Duration {
        if self.listener_paused_until.is_some() { LISTENER_PAUSE } else { Duration::MAX }
    }

    fn may_sleep(&mut self) -> bool {
        self.done.is_empty() && self.dirty.is_empty() && self.busy_servers.is_empty()
    }

    fn max_operation_bytes(&self) -> u64 {
        MAX_OPERATION_BYTES
    }
}

/// Strangers can cause these lines as often as they like.
static NONCE_LOG: LogLimit = LogLimit::new();

/// Largest single operation in bytes.
const MAX_OPERATION_BYTES: u64 = 1 << 30;
const LISTENER: u64 = u64::MAX;
const SERVER: u64 = 1;

#[cfg(test)]
mod tests;
