//! One-sided operations for the message engine.
//!
//! Every peer has an endpoint of its own, because the library cannot cancel single operations.
//! Closing the endpoint ends all operations towards the peer. With a provider whose registrations
//! belong to an endpoint (`cxi`), all peers share one endpoint. Operations towards a closed peer
//! then end when the provider gives up on them.

use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::time::Duration;

use rustix::event::{Timespec, epoll};

use super::fi_endpoint::{
    CompletionPoint, Descriptor, FiEndpoint, MAX_ADDRESS_BYTES, PostStatus, RemoteMemory,
};
use super::link::Context;
use super::load::Library;
use super::owner::CallError;
use super::port::{self, MemoryRegistration, Port, Rights, network_error};
use super::queue::Queue;
use super::sys;
use completions::Operation;
use grants::Grants;
use p2p_core::endpoint::{PostError, TransportKind};
use p2p_core::fabric::post::{Registration, not_granted};
use p2p_core::fabric::regions::RegionTable;
use p2p_core::fabric::{
    Access, Completion, Fabric, LocalSegment, PeerId, PostOutcome, RegionId, RemoteSegment, Token,
    WireRegion,
};
use p2p_core::network::NetworkError;

mod completions;
mod grants;

/// One provider of this process, for use by one thread.
#[derive(Debug)]
pub struct LibfabricFabric {
    // Endpoints are dropped before the port.
    peers: Vec<Option<Peer>>,
    regions: RegionTable<Memory>,
    grants: Grants<MemoryRegistration>,
    port: Port,
    /// True if all peers share the port's endpoint, because registrations belong to it.
    is_shared: bool,
    contexts: Box<[Context]>,
    operations: Vec<Option<Operation>>,
    free: Vec<u32>,
    /// An epoll set of the peers' queues, with the index of the peer as data. `None` if the
    /// provider has no descriptors.
    set: Option<OwnedFd>,
    num_polls: u32,
    /// Completions of operations that ended outside of `poll`.
    ended: Vec<Completion>,
    /// Peers whose endpoint was closed here, to be reported by `lost`.
    lost: Vec<PeerId>,
}

#[derive(Debug)]
struct Peer {
    /// `None` if all peers share the port's endpoint. The endpoint is dropped before its queue.
    own: Option<(FiEndpoint, Queue)>,
    /// Operations that have not ended.
    num_operations: u32,
    /// True if a thread may sleep on the queue: it was empty when last asked, and no entry came
    /// since.
    is_armed: bool,
    addr: Option<sys::FiAddr>,
}

#[derive(Debug)]
struct Memory {
    registered: MemoryRegistration,
    ptr: NonNull<u8>,
    bytes: usize,
    access: Access,
}

impl Registration for Memory {
    fn first(&self) -> u64 {
        self.ptr.as_ptr() as u64
    }

    fn bytes(&self) -> u64 {
        self.bytes as u64
    }
}

// SAFETY: an address without thread affinity; the caller of `register` keeps it mapped.
unsafe impl Send for Memory {}

impl LibfabricFabric {
    /// Opens `provider` (see [`FabricNetwork::open`](super::FabricNetwork::open)) at the local
    /// address `local`, if the provider has IP addresses. With `None` the library chooses the
    /// address.
    ///
    /// # Errors
    /// [`NetworkError`] if there is no library or no such provider; it names the providers that it
    /// found.
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
        let is_shared = port.binds_memory();
        let fabric = Self {
            peers: Vec::new(),
            regions: RegionTable::default(),
            grants: Grants::default(),
            is_shared,
            port,
            contexts: (0..NUM_CONTEXTS).map(|idx| Context::new(false, idx)).collect(),
            operations: vec![None; NUM_CONTEXTS as usize],
            free: (0..NUM_CONTEXTS).collect(),
            set,
            num_polls: 0,
            ended: Vec::new(),
            lost: Vec::new(),
        };
        if fabric.is_shared {
            fabric.watch(fabric.port.queue(), SHARED_QUEUE)?;
        }
        Ok(fabric)
    }

    /// Adds `queue` to the epoll set.
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

    /// Endpoint and address of a joined peer.
    fn peer(&self, op: &'static str, id: PeerId) -> Result<(&FiEndpoint, sys::FiAddr), PostError> {
        let peer = self.peers.get(id.0 as usize).and_then(Option::as_ref);
        let joined = peer.and_then(|peer| Some((peer, peer.addr?)));
        let (peer, addr) = joined.ok_or(PostError::Disconnected { op })?;
        Ok((peer.own.as_ref().map_or(self.port.endpoint(), |(endpoint, _)| endpoint), addr))
    }

    /// Checks the local memory of an operation.
    fn local(
        &self,
        op: &'static str,
        segment: LocalSegment,
    ) -> Result<(*mut u8, usize, Descriptor), PostError> {
        let memory = segment.checked(op, self.regions.get(segment.region))?;
        // SAFETY: within the registration.
        let ptr = unsafe { memory.ptr.add(segment.offset as usize) };
        Ok((ptr.as_ptr(), segment.bytes as usize, memory.registered.descriptor()))
    }

    /// Starts an operation.
    fn post(
        &mut self,
        op: &'static str,
        peer: PeerId,
        local: LocalSegment,
        remote: RemoteSegment,
        token: Token,
    ) -> Result<PostOutcome, PostError> {
        let (ptr, len, descriptor) = self.local(op, local)?;
        let (address, region) = (remote.checked(op, local.bytes)?, remote.region);
        let (endpoint, addr) = self.peer(op, peer)?;
        if len == 0 {
            self.ended.push(Completion { token, result: Ok(()) });
            return Ok(PostOutcome::Accepted);
        }
        let Some(idx) = self.free.last().copied() else { return Ok(PostOutcome::Full) };
        let context = self.contexts[idx as usize].as_ptr();
        let to = RemoteMemory { peer: addr, address, key: region.key };
        // SAFETY: the caller of `write` or `read` keeps the memory as it must be until the
        // completion; the context is free, and stays until the port is closed.
        let taken = unsafe {
            if op == WRITE {
                endpoint.write(to, (ptr, len), descriptor, CompletionPoint::Delivered, context)
            } else {
                endpoint.read(to, (ptr, len), descriptor, context)
            }
        };
        match taken {
            Ok(PostStatus::Accepted) => {
                self.free.pop();
                self.operations[idx as usize] = Some(Operation {
                    token,
                    peer: Some(peer),
                    region: local.region,
                    op,
                    address,
                    bytes: local.bytes,
                    key: region.key,
                    is_reported: false,
                });
                if let Some(Some(peer)) = self.peers.get_mut(peer.0 as usize) {
                    peer.num_operations += 1;
                    peer.is_armed = false;
                }
                Ok(PostOutcome::Accepted)
            }
            Ok(PostStatus::Again) => Ok(PostOutcome::Full),
            Err(CallError { op, code, text }) => {
                Err(PostError::Transport { op, code, detail: text })
            }
        }
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
        // SAFETY: the caller's promise.
        let registered = unsafe { self.port.register(ptr, bytes, rights(access)) }
            .map_err(|error| PostError::Register { bytes, detail: error.to_string() })?;
        self.regions.insert(Memory { registered, ptr, bytes, access }).ok_or_else(|| {
            let detail = "as many registrations are there as this transport can tell apart";
            PostError::Register { bytes, detail: detail.to_owned() }
        })
    }

    fn describe(&self, region: RegionId) -> Option<WireRegion> {
        let memory = self.regions.get(region)?;
        (memory.access != Access::Local).then(|| WireRegion {
            address: memory.registered.base,
            bytes: memory.bytes as u64,
            key: memory.registered.key(),
        })
    }

    /// Makes a key for this peer alone. The key of the whole registration could only be revoked for
    /// all peers at once.
    fn grant(&mut self, peer: PeerId, part: LocalSegment) -> Result<RemoteSegment, PostError> {
        let found = self.peers.get(peer.0 as usize).and_then(Option::as_ref);
        found.ok_or(PostError::Disconnected { op: GRANT })?;
        let memory = part.checked(GRANT, self.regions.get(part.region))?;
        if memory.access == Access::Local {
            return Err(not_granted());
        }
        let (window, key) = self.grants.open(peer, part, memory.bytes as u64, |window| {
            // SAFETY: within the memory, which the caller of `register` keeps mapped until it is
            // deregistered; that revokes this key before.
            let registered = unsafe {
                let ptr = memory.ptr.add(window.start as usize);
                self.port.register(ptr, window.bytes as usize, rights(memory.access))
            };
            let failed =
                |CallError { op, code, text }| PostError::Transport { op, code, detail: text };
            registered.map_err(failed)
        })?;
        let region = WireRegion { address: key.base, bytes: window.bytes, key: key.key() };
        Ok(RemoteSegment { region, offset: part.offset - window.start })
    }

    fn end_grant(&mut self, peer: PeerId, part: LocalSegment) {
        // Keys end with their registration.
        let Some(memory) = self.regions.get(part.region) else { return };
        self.grants.end(peer, part, memory.bytes as u64);
    }

    /// Closes the endpoints of peers with running operations on `region`: the library cannot be
    /// stopped from using the memory in another way. These peers are lost.
    ///
    /// With a shared endpoint no operation can be stopped. Then it is an error while such
    /// operations run.
    fn deregister(&mut self, region: RegionId) -> Result<(), PostError> {
        let failed = |bytes, detail| Err(PostError::Register { bytes, detail });
        while let Some(operation) = self.operations.iter().flatten().find(|f| f.region == region) {
            match operation.peer {
                Some(peer) if !self.is_shared => {
                    let mut ended = std::mem::take(&mut self.ended);
                    self.close_endpoint(peer, &mut ended, Operation::disconnected);
                    self.ended = ended;
                    self.lost.push(peer);
                }
                _ => {
                    let Operation { op, bytes, .. } = *operation;
                    let detail = format!(
                        "a {op} of {bytes} bytes is under way, which the provider cannot take back; \
                         deregister it again when that has ended"
                    );
                    return failed(bytes as usize, detail);
                }
            }
        }
        let Some(memory) = self.regions.get_mut(region) else {
            return failed(0, self.regions.missing(region));
        };
        let revoked = self.grants.revoke(region).and_then(|()| memory.registered.close());
        if let Err(error) = revoked {
            return failed(
                memory.bytes,
                format!("the key stays in force, and the memory must stay mapped: {error}"),
            );
        }
        self.regions.remove(region);
        Ok(())
    }

    fn open_peer(&mut self) -> Result<(PeerId, Vec<u8>), NetworkError> {
        let own = if self.is_shared {
            None
        } else {
            let provider = &self.port.traits().provider;
            Some(self.port.open_endpoint().map_err(|e| network_error(provider, e.op, &e))?)
        };
        let name = own.as_ref().map_or(self.port.endpoint(), |(endpoint, _)| endpoint).name();
        let mut detail = DETAIL_MAGIC.to_vec();
        detail.extend(name);
        let peer = Peer { own, num_operations: 0, is_armed: false, addr: None };
        let peer = place(&mut self.peers, Some(peer));
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
        let mut ended = std::mem::take(&mut self.ended);
        self.close_endpoint(peer, &mut ended, Operation::disconnected);
        self.ended = ended;
        if self.peers.get_mut(peer.0 as usize).and_then(Option::take).is_none() {
            return;
        }
        self.grants.close_peer(peer);
        self.lost.retain(|lost| *lost != peer);
        // On a shared endpoint the library continues these operations and reports their end. They
        // must not change the count of another peer that reuses the number.
        for operation in self.operations.iter_mut().flatten().filter(|f| f.peer == Some(peer)) {
            operation.peer = None;
        }
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
        self.post(WRITE, peer, src, dst, token)
    }

    unsafe fn read(
        &mut self,
        peer: PeerId,
        dst: LocalSegment,
        src: RemoteSegment,
        token: Token,
    ) -> Result<PostOutcome, PostError> {
        self.post(READ, peer, dst, src, token)
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        out.append(&mut self.ended);
        if self.is_shared {
            return self.poll_queue(None, out);
        }
        // An idle peer costs one check of a number. Every [`FULL_ROUND`] polls all peers are
        // polled, because providers also have work that no descriptor shows.
        self.num_polls = self.num_polls.wrapping_add(1);
        let is_full_round = self.set.is_none() || self.num_polls.is_multiple_of(FULL_ROUND);
        for idx in 0..self.peers.len() {
            if self.peers[idx].as_ref().is_some_and(|peer| is_full_round || peer.num_operations > 0)
            {
                self.poll_queue(Some(idx), out);
            }
        }
        let Some(set) = self.set.as_ref().filter(|_| !is_full_round) else { return };
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 16];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        // An interrupted wait loses nothing: the next poll sees the same events.
        let num_ready = epoll::wait(set, &mut events[..], Some(&now)).unwrap_or(0);
        for event in &events[..num_ready] {
            let idx = event.data.u64() as usize;
            self.disarm(Some(idx));
            let is_idle =
                |peer: &Option<Peer>| peer.as_ref().is_some_and(|p| p.num_operations == 0);
            if self.peers.get(idx).is_some_and(is_idle) {
                self.poll_queue(Some(idx), out);
            }
        }
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.set.as_ref().map(AsFd::as_fd)
    }

    fn max_sleep(&self) -> Duration {
        // Providers without threads of their own answer peers only while they are polled, and not
        // all of their pending work shows at the descriptor.
        Duration::from_millis(1)
    }

    fn may_sleep(&mut self) -> bool {
        if !self.ended.is_empty() {
            return false;
        }
        if self.set.is_none() {
            return true;
        }
        if self.is_shared {
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
        // Endpoints close before the memory of their operations is released.
        self.peers.clear();
    }
}

const fn rights(access: Access) -> Rights {
    match access {
        Access::Local => Rights::Local,
        Access::RemoteRead => Rights::Read,
        Access::RemoteReadWrite => Rights::ReadWrite,
    }
}

/// Stores `item` at the first free index and returns the index.
fn place<T>(items: &mut Vec<Option<T>>, item: Option<T>) -> u32 {
    let idx = items.iter().position(Option::is_none).unwrap_or_else(|| {
        items.push(None);
        items.len() - 1
    });
    items[idx] = item;
    idx as u32
}

const GRANT: &str = "grant";
const WRITE: &str = "write";
const READ: &str = "read";
const DETAIL_MAGIC: [u8; 4] = *b"SYL1";
/// Limit of running operations. The provider's queue holds more completions.
const NUM_CONTEXTS: u32 = 512;
/// One of this many polls polls every peer.
const FULL_ROUND: u32 = 64;
const SHARED_QUEUE: u64 = u64::MAX;
const MAX_OPERATION_BYTES: u64 = 1 << 30;

#[cfg(test)]
mod tests;
