//! Any network of the handshake, with a proxy in between: calls of an endpoint travel through a lane to a thread,
//! like a kernel's commands.
//!
//! The peer is not affected: kind and flavour are those of the network underneath, and the other side may or may
//! not have a proxy.

use std::fmt::Debug;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use p2p_core::endpoint::checks::{check_flag, check_range, find_registered};
use p2p_core::endpoint::{Endpoint, Progress};
use p2p_core::network::{JoinedSide, Network, NetworkError, OpenSide, Route, SideDescription};
use p2p_core::region::{LocalRange, RemoteRange, SlotKey};
use p2p_core::wait::Driver;
use p2p_core::{AnyEndpoint, PostError, QuietError, Region, SlotLayout, TransportKind};

use crate::abi::MAX_BYTES;
use crate::command::{Command, Opcode};
use crate::failure::describe_error;
use crate::lane::{LaneConfig, Lanes, Poster};
use crate::threads::{PeerConfig, Proxy, ProxyError, ProxyPeer};

/// A network whose endpoints post through a proxy.
#[derive(Debug)]
pub struct ProxyNetwork(ProxyBackend);

impl ProxyNetwork {
    /// Puts `proxy` in front of `inner`. `lanes` is the size of a peer's lanes; endpoints use the first one.
    #[must_use]
    pub fn new(inner: Arc<dyn Network>, proxy: Arc<Proxy>, lanes: LaneConfig) -> Self {
        Self(ProxyBackend::new(inner, proxy, lanes))
    }

    /// The proxy.
    #[must_use]
    pub const fn proxy(&self) -> &Arc<Proxy> {
        &self.0.proxy
    }
}

impl Network for ProxyNetwork {
    fn kind(&self) -> TransportKind {
        self.0.inner.kind()
    }

    fn flavour(&self) -> &str {
        self.0.inner.flavour()
    }

    fn open(&self, layout: &SlotLayout, route: Route) -> Result<Box<dyn OpenSide>, NetworkError> {
        Ok(Box::new(Side(self.0.open(layout, route, "proxy")?)))
    }
}

#[derive(Debug)]
struct Side(HalfOpen);

impl OpenSide for Side {
    fn description(&self) -> SideDescription {
        self.0.inner.description()
    }

    fn join(self: Box<Self>, peer: &SideDescription) -> Result<JoinedSide, NetworkError> {
        let Self(HalfOpen { inner, with }) = *self;
        let JoinedSide { endpoint, slot } = inner.join(peer)?;
        let lanes = Lanes::anonymous(with.lanes).map_err(|e| with.failed("make lanes", &e))?;
        let endpoint = with.serve(endpoint, lanes, slot.len(), Vec::new(), 0)?;
        Ok(JoinedSide { endpoint: AnyEndpoint::Other(Box::new(endpoint)), slot })
    }
}

/// A network and the proxy in front of it.
#[derive(Debug)]
pub(crate) struct ProxyBackend {
    pub(crate) inner: Arc<dyn Network>,
    pub(crate) proxy: Arc<Proxy>,
    lanes: LaneConfig,
    num_peers: AtomicU32,
}

/// This side of a pair before the peer's is known, and the objects that will serve it.
#[derive(Debug)]
pub(crate) struct HalfOpen {
    pub(crate) inner: Box<dyn OpenSide>,
    pub(crate) with: Server,
}

/// Objects that serve a peer once it is joined.
#[derive(Debug)]
pub(crate) struct Server {
    proxy: Arc<Proxy>,
    pub(crate) lanes: LaneConfig,
    peer: u32,
    name: String,
}

impl ProxyBackend {
    pub(crate) fn new(inner: Arc<dyn Network>, proxy: Arc<Proxy>, lanes: LaneConfig) -> Self {
        Self { inner, proxy, lanes, num_peers: AtomicU32::new(0) }
    }

    /// Opens a side of the network underneath. `what` is for messages.
    pub(crate) fn open(
        &self,
        layout: &SlotLayout,
        route: Route,
        what: &str,
    ) -> Result<HalfOpen, NetworkError> {
        let inner = self.inner.open(layout, route)?;
        let with = Server {
            proxy: Arc::clone(&self.proxy),
            lanes: self.lanes,
            peer: self.num_peers.fetch_add(1, Ordering::Relaxed),
            name: format!("{what} over {}", self.inner.kind().name()),
        };
        Ok(HalfOpen { inner, with })
    }
}

impl Server {
    pub(crate) fn failed(&self, op: &'static str, error: &dyn std::fmt::Display) -> NetworkError {
        NetworkError { network: self.name.clone(), op, code: None, detail: error.to_string() }
    }

    /// Hands an endpoint to the proxy. Calls of the result go through lane `lane`.
    pub(crate) fn serve(
        self,
        endpoint: AnyEndpoint,
        lanes: Lanes,
        slot_bytes: usize,
        sources: Vec<Region>,
        lane: u32,
    ) -> Result<ProxyEndpoint, NetworkError> {
        let kind = endpoint.kind();
        let driver = endpoint.driver();
        let wait_fd = endpoint.wait_fd().map(|fd| fd.try_clone_to_owned()).transpose();
        let wait_fd = wait_fd.map_err(|e| self.failed("dup", &e))?;
        let poster = lanes.poster(lane);
        let config = PeerConfig {
            peer: self.peer,
            lanes,
            window_bytes: slot_bytes as u64,
            sources,
            thread: None,
        };
        let served = self.proxy.add(endpoint, config).map_err(|e| self.failed("add", &e))?;
        Ok(ProxyEndpoint {
            peer: Arc::new(served),
            _proxy: self.proxy,
            lane,
            poster,
            quiet: 0,
            sources: Vec::new(),
            slot_bytes,
            kind,
            driver,
            wait_fd,
        })
    }
}

/// One peer through a lane.
#[derive(Debug)]
pub(crate) struct ProxyEndpoint {
    /// Dropped first, so that the endpoint underneath ends before the rest.
    peer: Arc<ProxyPeer>,
    _proxy: Arc<Proxy>,
    lane: u32,
    poster: Poster,
    /// Number of the last quiet; at most one is under way.
    quiet: u64,
    sources: Vec<(Region, u16)>,
    slot_bytes: usize,
    kind: TransportKind,
    driver: Option<Arc<dyn Driver>>,
    wait_fd: Option<OwnedFd>,
}

impl ProxyEndpoint {
    /// The peer as the proxy serves it.
    pub(crate) const fn peer(&self) -> &Arc<ProxyPeer> {
        &self.peer
    }

    /// The error that took the lane out of service.
    #[cold]
    fn failure(&self, op: &'static str) -> PostError {
        self.peer.reason(self.lane, op).unwrap_or_else(|| {
            // A peer that was closed, or whose thread ended.
            let word = self.poster.error();
            let code = i64::from(word as u8);
            PostError::Transport { op, code, detail: format!("lane {}", describe_error(word)) }
        })
    }

    fn post(&mut self, op: &'static str, command: &Command) -> Result<u64, PostError> {
        let mut begun = None;
        let mut num_looks = 0u32;
        loop {
            if self.poster.error() != 0 {
                return Err(self.failure(op));
            }
            if let Some(number) = self.poster.try_post(command) {
                self.peer.ring();
                return Ok(number);
            }
            // The thread makes room, independent of the peer, or takes the lane out of service.
            num_looks += 1;
            pause(num_looks, &mut begun);
            if begun.is_some_and(|begun: Instant| begun.elapsed() > POST_LIMIT) {
                let detail = "the proxy's thread makes no room in the lane".to_owned();
                return Err(PostError::Transport { op, code: 0, detail });
            }
        }
    }

    fn transfer(
        &mut self,
        op: &'static str,
        opcode: Opcode,
        local: &LocalRange,
        offset: usize,
    ) -> Result<(), PostError> {
        check_range(op, offset, local.len(), self.slot_bytes)?;
        let sources = self.sources.iter().map(|(region, source)| (region, *source));
        let (source, at) = find_registered(op, local, sources)?;
        let mut done = 0;
        while done < local.len() {
            let len = (local.len() - done).min(MAX_PIECE_BYTES);
            // Slots and sources have at most 4 GiB.
            let (to, from) = ((offset + done) as u32, (at + done) as u32);
            self.post(op, &Command::transfer(opcode, to, source, from, len as u32))?;
            done += len;
        }
        Ok(())
    }

    fn word(
        &mut self,
        op: &'static str,
        opcode: Opcode,
        offset: usize,
        value: u64,
    ) -> Result<(), PostError> {
        check_flag(op, offset, self.slot_bytes)?;
        self.post(op, &Command::word(opcode, offset as u32, value)).map(drop)
    }
}

impl Endpoint for ProxyEndpoint {
    type RemoteKey = SlotKey;

    fn kind(&self) -> TransportKind {
        self.kind
    }

    fn register(&mut self, region: &Region) -> Result<(), PostError> {
        let bytes = region.len();
        if bytes as u64 > 1 << 32 {
            let detail = "offsets of commands reach 4 GiB: register smaller regions".to_owned();
            return Err(PostError::Register { bytes, detail });
        }
        let source = self.peer.register(region).map_err(|error| match error {
            ProxyError::Register(error) => error,
            error => PostError::Register { bytes, detail: error.to_string() },
        })?;
        self.sources.push((region.clone(), source));
        Ok(())
    }

    fn direct(&self, _key: SlotKey) -> Option<NonNull<u8>> {
        None
    }

    unsafe fn put(&mut self, dst: RemoteRange<SlotKey>, src: LocalRange) -> Result<(), PostError> {
        self.transfer("put", Opcode::Put, &src, dst.offset)
    }

    unsafe fn get(&mut self, dst: LocalRange, src: RemoteRange<SlotKey>) -> Result<(), PostError> {
        self.transfer("get", Opcode::Get, &dst, src.offset)
    }

    fn add_flag(&mut self, dst: RemoteRange<SlotKey>, value: u64) -> Result<(), PostError> {
        self.word("add_flag", Opcode::Add, dst.offset, value)
    }

    fn fence(&mut self) -> Result<(), PostError> {
        self.post("fence", &Command::new(Opcode::Fence)).map(drop)
    }

    fn quiet(&mut self, deadline: Instant) -> Result<(), QuietError> {
        let mut begun = None;
        let mut num_looks = 0u32;
        loop {
            if self.poster.error() != 0 {
                return Err(self.failure("quiet").into());
            }
            if self.poster.completed() >= self.quiet {
                if self.quiet == self.poster.posted() {
                    return Ok(());
                }
                // A caller that polls repeatedly without waiting does not fill the lane with quiets.
                if let Some(number) = self.poster.try_post(&Command::new(Opcode::Quiet)) {
                    self.quiet = number;
                    self.peer.ring();
                }
            }
            num_looks += 1;
            pause(num_looks, &mut begun);
            if begun.is_some() && Instant::now() >= deadline {
                let outstanding = (self.poster.posted() - self.poster.completed()) as usize;
                return Err(QuietError::Deadline { outstanding });
            }
        }
    }

    fn wake(&mut self, _key: SlotKey, waiting_offset: usize) -> Result<(), PostError> {
        self.word("wake", Opcode::Wake, waiting_offset, 0)
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.wait_fd.as_ref().map(AsFd::as_fd)
    }
}

p2p_core::unbatched!(ProxyEndpoint);

impl Progress for ProxyEndpoint {
    p2p_core::default_progress! { add_flag_lazily, try_fence, marks }

    fn driver(&self) -> Option<Arc<dyn Driver>> {
        self.driver.clone()
    }

    fn health(&self) -> Result<(), PostError> {
        if self.poster.error() != 0 { Err(self.failure("health")) } else { Ok(()) }
    }

    fn has_room(&mut self) -> bool {
        self.poster.num_free() > 0 || self.poster.error() != 0
    }

    fn has_room_to_spare(&mut self) -> bool {
        self.poster.num_free() > self.poster.budget() / 2 || self.poster.error() != 0
    }

    fn is_settled(&mut self) -> Result<bool, PostError> {
        self.health()?;
        Ok(self.poster.completed() == self.poster.posted())
    }
}

/// Pause between two polls of a lane: none, then yielding the processor, then a short sleep.
fn pause(num_looks: u32, begun: &mut Option<Instant>) {
    if num_looks < SPINS {
        std::hint::spin_loop();
        return;
    }
    let begun = *begun.get_or_insert_with(Instant::now);
    if num_looks < YIELDS || begun.elapsed() < Duration::from_micros(200) {
        std::thread::yield_now();
    } else {
        std::thread::sleep(Duration::from_micros(20));
    }
}

const SPINS: u32 = 100;
const YIELDS: u32 = 400;
/// Longer than the thread lets a peer stall.
const POST_LIMIT: Duration = Duration::from_secs(30);
const MAX_PIECE_BYTES: usize = (MAX_BYTES as usize) & !4095;
