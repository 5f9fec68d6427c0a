//! One-sided operations for the message engine.
//!
//! Every peer has an endpoint of its own, so that closing it ends what is under way for certain: the
//! library cannot withdraw single operations. Where registrations belong to an endpoint (`cxi`), all
//! peers share one, and operations towards a closed peer end when the provider gives them up.

use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::time::Duration;

use rustix::event::{Timespec, epoll};

use super::link::Context;
use super::load::Library;
use super::owner::CallError;
use super::port::{
    self, Completes, Descriptor, Far, Lane, MAX_ADDRESS_BYTES, Polled, Port, Registered, Rights,
    Taken, network_error,
};
use super::queue::Queue;
use super::sys;
use crate::endpoint::{PostError, TransportKind};
use crate::fabric::{
    Access, Completion, Fabric, LocalSegment, PeerId, Posted, RegionId, RemoteSegment, Token,
    WireRegion,
};
use crate::network::NetworkError;

/// One provider of this process, for one thread.
#[derive(Debug)]
pub struct LibfabricFabric {
    // Endpoints before the port.
    peers: Vec<Option<Peer>>,
    regions: Vec<Option<Memory>>,
    port: Port,
    contexts: Box<[Context]>,
    flights: Vec<Option<Flight>>,
    free: Vec<u32>,
    /// Where the peers' queues can be slept on together, with the index of the peer as data. `None` where
    /// the provider has no descriptors.
    set: Option<OwnedFd>,
    num_polls: u32,
    /// Operations that ended outside of `poll`.
    ended: Vec<Completion>,
}

#[derive(Debug)]
struct Peer {
    /// `None` where all share the port's. Ends before its queue.
    own: Option<(Lane, Queue)>,
    /// Operations that have not ended.
    num_flights: u32,
    /// Whether its queue may be slept on, and nothing has come since.
    is_armed: bool,
    addr: Option<sys::FiAddr>,
}

#[derive(Debug)]
struct Memory {
    registered: Registered,
    ptr: NonNull<u8>,
    bytes: usize,
    access: Access,
}

// SAFETY: an address without thread affinity; whoever registered it keeps it mapped.
unsafe impl Send for Memory {}

/// An operation that the library has taken.
#[derive(Debug, Clone, Copy)]
struct Flight {
    token: Token,
    peer: PeerId,
    region: RegionId,
    op: &'static str,
    /// What it was about, at the peer.
    address: u64,
    bytes: u64,
    key: u64,
}

impl Flight {
    /// A failure of this operation, with what to look at.
    fn explain(&self, code: i64, text: &str) -> String {
        let Self { op, address, bytes, key, .. } = self;
        let what = format!("{text}; {op} of {bytes} bytes at {address:#x} with key {key:#x}");
        if ENDINGS.contains(&code) {
            return format!(
                "{what}: the peer denies access and ends the connection then, or is gone; check that it \
                 has not deregistered the memory, its rights, and that the range is inside"
            );
        }
        what
    }
}

impl LibfabricFabric {
    /// Opens `provider` (see [`FabricNetwork::open`](super::FabricNetwork::open)), reachable at `local`
    /// where the provider has IP addresses; `None` leaves the choice to the library.
    ///
    /// # Errors
    /// [`NetworkError`] when there is no library or no such provider; it names those found.
    pub fn open(provider: &str, local: Option<IpAddr>) -> Result<Self, NetworkError> {
        let library: &'static Library = super::library()?;
        let local = local.map(|local| local.to_canonical());
        let port = Port::open(library, port::find(library, provider, local)?)?;
        let set = port.wait_fd().map(|_| epoll::create(epoll::CreateFlags::CLOEXEC)).transpose();
        let set = set.map_err(|errno| NetworkError {
            network: format!("libfabric {provider}"),
            op: "make an epoll set",
            code: Some(errno.raw_os_error().into()),
            detail: errno.to_string(),
        })?;
        let fabric = Self {
            peers: Vec::new(),
            regions: Vec::new(),
            port,
            contexts: (0..NUM_CONTEXTS).map(|idx| Context::new(false, idx)).collect(),
            flights: vec![None; NUM_CONTEXTS as usize],
            free: (0..NUM_CONTEXTS).collect(),
            set,
            num_polls: 0,
            ended: Vec::new(),
        };
        if fabric.port.binds_memory() {
            fabric.watch(fabric.port.queue(), SHARED_QUEUE)?;
        }
        Ok(fabric)
    }

    /// Lets sleepers on the set see `queue`.
    fn watch(&self, queue: &Queue, data: u64) -> Result<(), NetworkError> {
        let (Some(set), Some(fd)) = (&self.set, queue.wait_fd()) else { return Ok(()) };
        epoll::add(set, fd, epoll::EventData::new_u64(data), epoll::EventFlags::IN).map_err(
            |errno| NetworkError {
                network: format!("libfabric {}", self.port.traits().provider),
                op: "watch a queue",
                code: Some(errno.raw_os_error().into()),
                detail: errno.to_string(),
            },
        )
    }

    /// The peer's endpoint and its address, if it is joined.
    fn peer(&self, op: &'static str, id: PeerId) -> Result<(&Lane, sys::FiAddr), PostError> {
        let peer = self.peers.get(id.0 as usize).and_then(Option::as_ref);
        let joined = peer.and_then(|peer| Some((peer, peer.addr?)));
        let (peer, addr) = joined.ok_or(PostError::Disconnected { op })?;
        Ok((peer.own.as_ref().map_or(self.port.lane(), |(lane, _)| lane), addr))
    }

    /// Local memory of an operation, checked.
    fn local(
        &self,
        op: &'static str,
        segment: LocalSegment,
    ) -> Result<(*mut u8, usize, Descriptor), PostError> {
        let unknown = PostError::Unregistered {
            op,
            address: segment.offset as usize,
            len: segment.bytes as usize,
        };
        let Some(memory) = self.regions.get(segment.region.0 as usize).and_then(Option::as_ref)
        else {
            return Err(unknown);
        };
        match segment.offset.checked_add(segment.bytes) {
            Some(end) if end <= memory.bytes as u64 => {
                // SAFETY: within the registration.
                let ptr = unsafe { memory.ptr.add(segment.offset as usize) };
                Ok((ptr.as_ptr(), segment.bytes as usize, memory.registered.descriptor()))
            }
            _ => Err(unknown),
        }
    }

    /// Starts an operation.
    fn post(
        &mut self,
        op: &'static str,
        peer: PeerId,
        near: LocalSegment,
        distant: RemoteSegment,
        token: Token,
    ) -> Result<Posted, PostError> {
        let (ptr, len, descriptor) = self.local(op, near)?;
        let region = distant.region;
        let is_inside =
            distant.offset.checked_add(near.bytes).is_some_and(|end| end <= region.bytes);
        let address = region.address.checked_add(distant.offset);
        let (true, Some(address)) = (is_inside, address) else {
            return Err(PostError::RemoteRange {
                op,
                offset: distant.offset as usize,
                len,
                region_bytes: region.bytes as usize,
            });
        };
        let (lane, addr) = self.peer(op, peer)?;
        if len == 0 {
            self.ended.push(Completion { token, result: Ok(()) });
            return Ok(Posted::Accepted);
        }
        let Some(idx) = self.free.last().copied() else { return Ok(Posted::Full) };
        let context = self.contexts[idx as usize].as_ptr();
        let far = Far { peer: addr, address, key: region.key };
        // SAFETY: the caller of `write` or `read` keeps the memory as it must be until the completion;
        // the context is free, and stays until the port is closed.
        let taken = unsafe {
            if op == WRITE {
                lane.write(far, (ptr, len), descriptor, Completes::Delivered, context)
            } else {
                lane.read(far, (ptr, len), descriptor, context)
            }
        };
        match taken {
            Ok(Taken::Yes) => {
                self.free.pop();
                self.flights[idx as usize] = Some(Flight {
                    token,
                    peer,
                    region: near.region,
                    op,
                    address,
                    bytes: near.bytes,
                    key: region.key,
                });
                if let Some(Some(peer)) = self.peers.get_mut(peer.0 as usize) {
                    peer.num_flights += 1;
                    peer.is_armed = false;
                }
                Ok(Posted::Accepted)
            }
            Ok(Taken::Again) => Ok(Posted::Full),
            Err(CallError { op, code, text }) => {
                Err(PostError::Transport { op, code, detail: text })
            }
        }
    }

    /// Takes the completions of a peer's queue, or of the one that all share.
    fn poll_queue(&mut self, peer: Option<usize>, out: &mut Vec<Completion>) {
        let mut entries = [sys::CqDataEntry {
            op_context: std::ptr::null_mut(),
            flags: 0,
            len: 0,
            buf: std::ptr::null_mut(),
            data: 0,
        }; 16];
        let mut sources = [sys::FI_ADDR_UNSPEC; 16];
        for _ in 0..MAX_ROUNDS {
            let own = peer.and_then(|idx| self.peers.get(idx)?.as_ref()?.own.as_ref());
            let queue = own.map_or(self.port.queue(), |(_, queue)| queue);
            let polled = queue.poll(&mut entries, &mut sources);
            if !matches!(polled, Ok(Polled::Nothing)) {
                self.disarm(peer);
            }
            match polled {
                Ok(Polled::Nothing) => return,
                Ok(Polled::Entries(num)) => {
                    let num = num.min(entries.len());
                    for entry in &entries[..num] {
                        self.land(entry.op_context, None, out);
                    }
                    if num < entries.len() {
                        return;
                    }
                }
                Ok(Polled::Failed(failure)) => {
                    self.land(failure.context, Some((failure.code, failure.text)), out);
                }
                Err(CallError { op, code, text }) => {
                    // The queue is gone, and with it every completion still to come.
                    let is_its =
                        |flight: &mut Flight| peer.is_none_or(|idx| flight.peer.0 as usize == idx);
                    for flight in self.flights.iter_mut().filter_map(|f| f.take_if(is_its)) {
                        let detail = format!("{}: {text}", flight.op);
                        let result = Err(PostError::Transport { op, code, detail });
                        out.push(Completion { token: flight.token, result });
                        if let Some(Some(peer)) = self.peers.get_mut(flight.peer.0 as usize) {
                            peer.num_flights -= 1;
                        }
                    }
                    return;
                }
            }
        }
    }

    /// Before the next sleep the queue must be asked again.
    fn disarm(&mut self, peer: Option<usize>) {
        if let Some(Some(peer)) = peer.and_then(|idx| self.peers.get_mut(idx)) {
            peer.is_armed = false;
        }
    }

    /// The library is done with an operation.
    fn land(
        &mut self,
        context: *mut std::ffi::c_void,
        failure: Option<(i64, String)>,
        out: &mut Vec<Completion>,
    ) {
        // SAFETY: null, or the context of an operation of ours.
        let Some(context) = (unsafe { context.cast::<Context>().as_ref() }) else { return };
        let Some(flight) = self.flights.get_mut(context.owner as usize) else { return };
        // Without a flight its endpoint has ended, and the operation was reported then.
        let Some(flight) = flight.take() else { return };
        let Flight { token, op, peer, .. } = flight;
        self.free.push(context.owner);
        if let Some(Some(peer)) = self.peers.get_mut(peer.0 as usize) {
            peer.num_flights -= 1;
        }
        let result = match failure {
            None => Ok(()),
            Some((code, text)) => {
                let detail = flight.explain(code, &text);
                Err(PostError::Transport { op, code, detail })
            }
        };
        out.push(Completion { token, result });
    }
}

impl Fabric for LibfabricFabric {
    fn kind(&self) -> TransportKind {
        TransportKind::Libfabric
    }

    fn flavour(&self) -> &str {
        &self.port.traits().provider
    }

    unsafe fn register(
        &mut self,
        ptr: NonNull<u8>,
        bytes: usize,
        access: Access,
    ) -> Result<RegionId, PostError> {
        let rights = match access {
            Access::Local => Rights::Local,
            Access::RemoteRead => Rights::Read,
            Access::RemoteReadWrite => Rights::ReadWrite,
        };
        // SAFETY: the caller's promise.
        let registered = unsafe { self.port.register(ptr, bytes, rights) }
            .map_err(|error| PostError::Register { bytes, detail: error.to_string() })?;
        let memory = Some(Memory { registered, ptr, bytes, access });
        Ok(RegionId(place(&mut self.regions, memory)))
    }

    fn describe(&self, region: RegionId) -> Option<WireRegion> {
        let memory = self.regions.get(region.0 as usize)?.as_ref()?;
        (memory.access != Access::Local).then(|| WireRegion {
            address: memory.registered.base,
            bytes: memory.bytes as u64,
            key: memory.registered.key(),
        })
    }

    /// Where the library may still use the memory, the only way to stop it is to end the endpoint of
    /// the peer concerned: a peer with operations under way that use `region` is closed.
    fn deregister(&mut self, region: RegionId) -> Result<(), PostError> {
        while let Some(peer) =
            self.flights.iter().flatten().find(|flight| flight.region == region).map(|f| f.peer)
            && !self.port.binds_memory()
        {
            self.close_peer(peer);
        }
        match self.regions.get_mut(region.0 as usize).and_then(Option::take) {
            Some(_) => Ok(()),
            None => Err(PostError::Register {
                bytes: 0,
                detail: format!("there is no registration {}", region.0),
            }),
        }
    }

    fn open_peer(&mut self) -> Result<(PeerId, Vec<u8>), NetworkError> {
        let own = if self.port.binds_memory() {
            None
        } else {
            let provider = &self.port.traits().provider;
            Some(self.port.open_lane().map_err(|e| network_error(provider, e.op, &e))?)
        };
        let name = own.as_ref().map_or(self.port.lane(), |(lane, _)| lane).name();
        let mut detail = DETAIL_MAGIC.to_vec();
        detail.extend(name);
        let peer =
            place(&mut self.peers, Some(Peer { own, num_flights: 0, is_armed: false, addr: None }));
        if let Some(Some(Peer { own: Some((_, queue)), .. })) = self.peers.get(peer as usize)
            && let Err(error) = self.watch(queue, peer.into())
        {
            self.peers[peer as usize] = None;
            return Err(error);
        }
        Ok((PeerId(peer), detail))
    }

    fn join_peer(&mut self, peer: PeerId, detail: &[u8]) -> Result<(), NetworkError> {
        let provider = &self.port.traits().provider;
        let failed = |detail: String| NetworkError {
            network: format!("libfabric {provider}"),
            op: "join",
            code: None,
            detail,
        };
        let found = self.peers.get_mut(peer.0 as usize).and_then(Option::as_mut);
        let Some(found) = found.filter(|peer| peer.addr.is_none()) else {
            return Err(failed(format!("there is no open peer {}", peer.0)));
        };
        let name = detail
            .strip_prefix(&DETAIL_MAGIC)
            .filter(|name| !name.is_empty() && name.len() <= MAX_ADDRESS_BYTES)
            .ok_or_else(|| {
                failed(format!(
                    "the peer's description has {} bytes and is not an address",
                    detail.len()
                ))
            })?;
        let addr = self.port.insert(name).map_err(|e| network_error(provider, e.op, &e))?;
        found.addr = Some(addr);
        Ok(())
    }

    fn close_peer(&mut self, peer: PeerId) {
        let Some(Peer { own, addr, .. }) =
            self.peers.get_mut(peer.0 as usize).and_then(Option::take)
        else {
            return;
        };
        let has_own_lane = own.is_some();
        if let (Some(set), Some(fd)) =
            (&self.set, own.as_ref().and_then(|(_, queue)| queue.wait_fd()))
            && let Err(error) = epoll::delete(set, fd)
        {
            tracing::debug!(%error, "a queue was not watched");
        }
        // Ends everything under way on it: the library uses no memory and no context of these
        // operations any more.
        drop(own);
        if let Some(addr) = addr {
            self.port.remove(addr);
        }
        if !has_own_lane {
            return;
        }
        for (idx, flight) in self.flights.iter_mut().enumerate() {
            if let Some(Flight { token, op, .. }) = flight.take_if(|flight| flight.peer == peer) {
                let result = Err(PostError::Disconnected { op });
                self.ended.push(Completion { token, result });
                self.free.push(idx as u32);
            }
        }
    }

    fn close_revokes(&self) -> bool {
        // Keys belong to the memory and not to a peer.
        false
    }

    unsafe fn write(
        &mut self,
        peer: PeerId,
        dst: RemoteSegment,
        src: LocalSegment,
        token: Token,
    ) -> Result<Posted, PostError> {
        self.post(WRITE, peer, src, dst, token)
    }

    unsafe fn read(
        &mut self,
        peer: PeerId,
        dst: LocalSegment,
        src: RemoteSegment,
        token: Token,
    ) -> Result<Posted, PostError> {
        self.post(READ, peer, dst, src, token)
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        out.append(&mut self.ended);
        if self.port.binds_memory() {
            return self.poll_queue(None, out);
        }
        // Idle peers cost a look at a number. Now and then all are polled: providers also have things to
        // do that no descriptor shows.
        self.num_polls = self.num_polls.wrapping_add(1);
        let is_full_round = self.set.is_none() || self.num_polls.is_multiple_of(FULL_ROUND);
        for idx in 0..self.peers.len() {
            if self.peers[idx].as_ref().is_some_and(|peer| is_full_round || peer.num_flights > 0) {
                self.poll_queue(Some(idx), out);
            }
        }
        let Some(set) = self.set.as_ref().filter(|_| !is_full_round) else { return };
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 16];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        // Interrupted: whatever is there is there the next time.
        let num_ready = epoll::wait(set, &mut events[..], Some(&now)).unwrap_or(0);
        for event in &events[..num_ready] {
            let idx = event.data.u64() as usize;
            self.disarm(Some(idx));
            let is_idle = |peer: &Option<Peer>| peer.as_ref().is_some_and(|p| p.num_flights == 0);
            if self.peers.get(idx).is_some_and(is_idle) {
                self.poll_queue(Some(idx), out);
            }
        }
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.set.as_ref().map(AsFd::as_fd)
    }

    fn max_sleep(&self) -> Duration {
        // Providers without threads of their own answer peers only while they are polled, and not all
        // that they wait for shows at the descriptor.
        Duration::from_millis(1)
    }

    fn may_sleep(&mut self) -> bool {
        if !self.ended.is_empty() {
            return false;
        }
        if self.set.is_none() {
            return true;
        }
        if self.port.binds_memory() {
            return self.port.queue().may_sleep();
        }
        self.peers.iter_mut().flatten().filter(|peer| !peer.is_armed).all(|peer| {
            peer.is_armed = peer.own.as_ref().is_none_or(|(_, queue)| queue.may_sleep());
            peer.is_armed
        })
    }

    fn max_operation_bytes(&self) -> u64 {
        (self.port.traits().max_message_bytes as u64).min(MAX_OPERATION_BYTES)
    }
}

impl Drop for LibfabricFabric {
    fn drop(&mut self) {
        // Endpoints end before the memory that their operations use is given up.
        self.peers.clear();
    }
}

/// Puts `item` where there is room, and gives its index.
fn place<T>(items: &mut Vec<Option<T>>, item: Option<T>) -> u32 {
    let idx = items.iter().position(Option::is_none).unwrap_or_else(|| {
        items.push(None);
        items.len() - 1
    });
    items[idx] = item;
    idx as u32
}

const WRITE: &str = "write";
const READ: &str = "read";
const DETAIL_MAGIC: [u8; 4] = *b"SYL1";
/// Operations under way. The queue of the provider holds more completions.
const NUM_CONTEXTS: u32 = 512;
const MAX_ROUNDS: usize = 8;
/// Codes with which operations end when their connection does: `EIO`, `EACCES`, `ENOTCONN`,
/// `ECONNABORTED`, `ECONNRESET`, `ESHUTDOWN`, `ECANCELED`, and the library's own for a bad key.
const ENDINGS: [i64; 8] = [5, 13, 107, 103, 104, 108, 125, sys::FI_ENOKEY];
/// Polls of which one looks at every peer.
const FULL_ROUND: u32 = 64;
const SHARED_QUEUE: u64 = u64::MAX;
const MAX_OPERATION_BYTES: u64 = 1 << 30;

#[cfg(test)]
mod tests;
