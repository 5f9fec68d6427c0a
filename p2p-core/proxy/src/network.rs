//! Any network of the handshake, with a proxy in between: what an endpoint is asked to do travels through
//! a lane to a thread, as a kernel's commands do.
//!
//! The peer notices nothing: kind and flavour are those of the network underneath, and the other side
//! may or may not have a proxy.

use std::fmt::Debug;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use p2p_core::endpoint::Endpoint;
use p2p_core::network::{Joined, Network, NetworkError, OpenSide, Route, SideDescription};
use p2p_core::region::{LocalRange, RemoteRange, SlotKey};
use p2p_core::wait::Driver;
use p2p_core::{AnyEndpoint, PostError, QuietError, Region, SlotLayout, TransportKind};

use crate::abi::MAX_BYTES;
use crate::command::{Command, Opcode};
use crate::failure::{Cause, describe_error};
use crate::lane::{LaneConfig, Lanes, Poster};
use crate::threads::{PeerConfig, Proxy, ProxyError, ProxyPeer};

/// A network whose endpoints post through a proxy.
#[derive(Debug)]
pub struct ProxyNetwork {
    inner: Arc<dyn Network>,
    proxy: Arc<Proxy>,
    lanes: LaneConfig,
    num_peers: AtomicU32,
}

impl ProxyNetwork {
    /// Puts `proxy` in front of `inner`. `lanes` is the size of a peer's lanes, of which endpoints use
    /// the first.
    #[must_use]
    pub fn new(inner: Arc<dyn Network>, proxy: Arc<Proxy>, lanes: LaneConfig) -> Self {
        Self { inner, proxy, lanes, num_peers: AtomicU32::new(0) }
    }

    /// The proxy.
    #[must_use]
    pub const fn proxy(&self) -> &Arc<Proxy> {
        &self.proxy
    }
}

impl Network for ProxyNetwork {
    fn kind(&self) -> TransportKind {
        self.inner.kind()
    }

    fn flavour(&self) -> &str {
        self.inner.flavour()
    }

    fn open(&self, layout: &SlotLayout, route: Route) -> Result<Box<dyn OpenSide>, NetworkError> {
        let inner = self.inner.open(layout, route)?;
        let peer = self.num_peers.fetch_add(1, Ordering::Relaxed);
        let proxy = Arc::clone(&self.proxy);
        let name = format!("proxy over {}", self.inner.kind().name());
        let slot_bytes = layout.slot_bytes();
        Ok(Box::new(Side { inner, proxy, lanes: self.lanes, peer, name, slot_bytes }))
    }
}

#[derive(Debug)]
struct Side {
    inner: Box<dyn OpenSide>,
    proxy: Arc<Proxy>,
    lanes: LaneConfig,
    peer: u32,
    name: String,
    slot_bytes: usize,
}

impl OpenSide for Side {
    fn description(&self) -> SideDescription {
        self.inner.description()
    }

    fn join(self: Box<Self>, peer: &SideDescription) -> Result<Joined, NetworkError> {
        let Self { inner, proxy, lanes, peer: number, name, slot_bytes } = *self;
        let Joined { endpoint, slot } = inner.join(peer)?;
        let failed =
            |op, detail: String| NetworkError { network: name.clone(), op, code: None, detail };
        let kind = endpoint.kind();
        let driver = endpoint.driver();
        let wait_fd = endpoint.wait_fd().map(|fd| fd.try_clone_to_owned()).transpose();
        let wait_fd = wait_fd.map_err(|error| failed("dup", error.to_string()))?;
        let lanes = Lanes::anonymous(lanes).map_err(|e| failed("make lanes", e.to_string()))?;
        let poster = lanes.poster(0);
        let config = PeerConfig {
            peer: number,
            lanes,
            window_bytes: slot_bytes as u64,
            sources: Vec::new(),
            relay: None,
            thread: None,
        };
        let served = proxy.add(endpoint, config).map_err(|e| failed("add", e.to_string()))?;
        let endpoint = ProxyEndpoint {
            peer: served,
            _proxy: proxy,
            poster,
            sources: Vec::new(),
            slot_bytes,
            kind,
            driver,
            wait_fd,
        };
        Ok(Joined { endpoint: AnyEndpoint::Other(Box::new(endpoint)), slot })
    }
}

/// One peer through a lane.
#[derive(Debug)]
struct ProxyEndpoint {
    /// First, so that the endpoint underneath ends before the rest.
    peer: ProxyPeer,
    _proxy: Arc<Proxy>,
    poster: Poster,
    sources: Vec<(Region, u16)>,
    slot_bytes: usize,
    kind: TransportKind,
    driver: Option<Arc<dyn Driver>>,
    wait_fd: Option<OwnedFd>,
}

impl ProxyEndpoint {
    fn check(&self, op: &'static str, offset: usize, len: usize) -> Result<(), PostError> {
        let region_bytes = self.slot_bytes;
        match offset.checked_add(len) {
            Some(end) if end <= region_bytes => Ok(()),
            _ => Err(PostError::RemoteRange { op, offset, len, region_bytes }),
        }
    }

    /// What took the lane out of service.
    #[cold]
    fn failure(&self, op: &'static str) -> PostError {
        let word = self.poster.error();
        let told = self.peer.take_failures().into_iter().next();
        match told.map(|failure| failure.cause) {
            Some(Cause::Post { source, .. } | Cause::Transport(source)) => source,
            Some(cause) => {
                PostError::Transport { op, code: cause.code().into(), detail: cause.to_string() }
            }
            None => {
                let code = i64::from(word as u8);
                PostError::Transport { op, code, detail: format!("lane {}", describe_error(word)) }
            }
        }
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
            // The thread makes room, whatever the peer does, or takes the lane out of service.
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
        self.check(op, offset, local.len())?;
        let address = local.as_ptr().as_ptr() as usize;
        let place = self.sources.iter().find_map(|(region, source)| {
            let first = region.as_ptr().as_ptr() as usize;
            let at = address.checked_sub(first)?;
            (at.checked_add(local.len())? <= region.len()).then_some((at, *source))
        });
        let unregistered = PostError::Unregistered { op, address, len: local.len() };
        let (at, source) = place.ok_or(unregistered)?;
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
        self.check(op, offset, 8)?;
        if !offset.is_multiple_of(8) {
            return Err(PostError::Misaligned { op, offset });
        }
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

    fn driver(&self) -> Option<Arc<dyn Driver>> {
        self.driver.clone()
    }

    fn health(&self) -> Result<(), PostError> {
        if self.poster.error() != 0 { Err(self.failure("health")) } else { Ok(()) }
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
        let number = self.post("quiet", &Command::new(Opcode::Quiet))?;
        let mut begun = None;
        let mut num_looks = 0u32;
        while self.poster.completed() < number {
            if self.poster.error() != 0 {
                return Err(self.failure("quiet").into());
            }
            num_looks += 1;
            pause(num_looks, &mut begun);
            if begun.is_some() && Instant::now() >= deadline {
                let outstanding = (self.poster.posted() - self.poster.completed()) as usize;
                return Err(QuietError::Deadline { outstanding });
            }
        }
        Ok(())
    }

    fn is_settled(&mut self) -> Result<bool, PostError> {
        self.health()?;
        Ok(self.poster.completed() == self.poster.posted())
    }

    fn wake(&mut self, _key: SlotKey, waiting_offset: usize) -> Result<(), PostError> {
        self.word("wake", Opcode::Wake, waiting_offset, 0)
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.wait_fd.as_ref().map(AsFd::as_fd)
    }
}

/// Between two looks at a lane: nothing, then the processor is given up, then a short sleep.
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
