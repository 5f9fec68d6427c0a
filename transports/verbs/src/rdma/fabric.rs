//! One or more ports as a [`Fabric`]: any memory, any number of peers, operations identified by tokens.
//!
//! A peer has one or more queue pairs at every port. An operation is not split: it uses the queue pair with the
//! least work under way. If there are several queue pairs, each operation is kept short enough that a
//! large transfer consists of several operations. The transfer then uses all ports.
//!
//! Every request is signalled, since any may be the last one that a caller waits for. When a peer fails, its queue
//! pair is destroyed first, so that the device touches no memory any more. Then everything under way is reported as
//! failed. A peer also fails if it has requests under way and none
//! completes for [`VerbsConfig::stall_timeout`].

use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll;

use super::config::VerbsConfig;
use super::detail::{self, Link, QueuePairAddress, Signals};
use super::devices::{
    DeviceAccess, MAX_DEVICES, keep_two_devices, key_of, keys_together, register_device,
};
use super::messages::Arrivals;
use super::network::check;
use super::owner::{CallError, Context, ProtectionDomain};
use super::peers::{FabricQueuePair, Peer, Peers, PendingRequests, PlaceGuard, Request};
use super::port::{Port, error, open_ports};
use super::progress::{Progress, ThreadTask};
use super::qp::{Capacity, INLINE, QueuePair, SIGNALLED, Verb, Work};
use super::registration::{MemoryRegion, Rights};
use super::request::{OpKind, RequestId};
use super::state::{PeerState, QueuePairState};
use super::status::{Cause, Health};
use super::sys;
use p2p_core::endpoint::{PostError, TransportKind};
use p2p_core::fabric::post::Registration;
use p2p_core::fabric::regions::RegionTable;
use p2p_core::fabric::{
    Access, Completion, DmaBuf, Fabric, LocalSegment, PeerId, PostOutcome, RegionId, RemoteSegment,
    Token, WireRegion,
};
use p2p_core::network::{NetworkError, Route};
use p2p_core::wait::{Driver, event_fd};

/// Ports that expose memory by whole registrations. All peers of a fabric share a protection domain per device: a
/// key sent to one peer works for every peer.
#[derive(Debug)]
pub struct VerbsFabric {
    /// First, so that queue pairs are dropped before the keys.
    peers: Peers,
    regions: RegionTable<FabricRegion>,
    /// One per device.
    domains: Vec<Arc<ProtectionDomain>>,
    progress: Arc<Progress>,
    ports: Vec<Port>,
    /// For each port, the index of its device.
    device_idx: Vec<usize>,
    config: VerbsConfig,
    name: String,
    wake: OwnedFd,
    any_event: OwnedFd,
    /// Failures of peers that were closed.
    left_over: Vec<Completion>,
    num_polls: u32,
    /// True if time may have passed since the last poll.
    has_slept: bool,
}

#[derive(Debug)]
struct FabricRegion {
    /// One per device.
    keys: Vec<MemoryRegion>,
    first: u64,
    bytes: u64,
    access: Access,
    /// True if this processor can read the memory.
    is_host_memory: bool,
}

impl Registration for FabricRegion {
    fn first(&self) -> u64 {
        self.first
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl VerbsFabric {
    /// Opens the ports that `config` requests, of at most two devices. The description of a registration has room
    /// for two keys.
    ///
    /// # Errors
    /// [`NetworkError`], in one line: no device, no active port, or more than two named devices.
    pub fn open(config: VerbsConfig) -> Result<Self, NetworkError> {
        let mut ports = open_ports(&config)?;
        let name = keep_two_devices(&mut ports, &config)?;
        check(&config, &name, &ports)?;
        let failed = |e: CallError| error(&name, e.call, Some(e.code), e.to_string());
        let system = |op, e: std::io::Error| error(&name, op, e.raw_os_error(), e.to_string());
        let mut contexts: Vec<Arc<Context>> = Vec::new();
        let mut device_idx = Vec::new();
        for port in &ports {
            let known = contexts.iter().position(|known| known.name() == port.context.name());
            device_idx.push(known.unwrap_or_else(|| {
                contexts.push(Arc::clone(&port.context));
                contexts.len() - 1
            }));
        }
        let progress = Progress::start(&name, &contexts, ThreadTask::EventsOnly).map_err(failed)?;
        let domains: Result<Vec<_>, _> = contexts.iter().map(ProtectionDomain::new).collect();
        let domains = domains.map_err(failed)?;
        let wake = event_fd().map_err(|e| system("eventfd", e))?;
        let any_event = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|e| system("epoll_create", e.into()))?;
        let sources = [Some(wake.as_fd()), progress.wait_fd()];
        for fd in sources.into_iter().flatten() {
            epoll::add(&any_event, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
                .map_err(|e| system("epoll_ctl", e.into()))?;
        }
        Ok(Self {
            peers: Peers::default(),
            regions: RegionTable::default(),
            domains,
            progress,
            ports,
            device_idx,
            config,
            name,
            wake,
            any_event,
            left_over: Vec::new(),
            num_polls: 0,
            has_slept: false,
        })
    }

    /// Ports in use, in the form for people: `mlx5_0:1+mlx5_1:1`.
    #[must_use]
    pub fn ports(&self) -> &str {
        &self.name
    }

    /// Registers memory of another device, such as a GPU. Uses its dma-buf if there is one and this host supports
    /// it, else its address.
    ///
    /// # Safety
    /// As for [`Fabric::register`].
    ///
    /// # Errors
    /// [`PostError::Register`], with the reasons why neither method works.
    pub unsafe fn register_device_memory(
        &mut self,
        ptr: NonNull<u8>,
        bytes: usize,
        access: Access,
        dma_buf: Option<DmaBuf<'_>>,
    ) -> Result<(RegionId, DeviceAccess), PostError> {
        let rights = rights(access);
        let (mut keys, mut how) = (Vec::with_capacity(self.domains.len()), DeviceAccess::DmaBuf);
        for domain in &self.domains {
            // SAFETY: the caller keeps the memory allocated.
            let (key, by) = unsafe { register_device(domain, ptr, bytes, rights, dma_buf)? };
            keys.push(key);
            if by == DeviceAccess::PeerMemory {
                how = by;
            }
        }
        let (first, bytes) = (ptr.as_ptr() as u64, bytes as u64);
        Ok((self.keep(FabricRegion { keys, first, bytes, access, is_host_memory: false })?, how))
    }

    fn keep(&mut self, registered: FabricRegion) -> Result<RegionId, PostError> {
        let bytes = registered.bytes as usize;
        self.regions.insert(registered).ok_or_else(|| {
            let detail = "as many registrations are there as this transport can tell apart";
            PostError::Register { bytes, detail: detail.to_owned() }
        })
    }

    fn open_at(&mut self, local: IpAddr, name: String) -> Result<(PeerId, Vec<u8>), NetworkError> {
        let wake_self = self
            .wake
            .try_clone()
            .map_err(|e| error(&self.name, "dup", e.raw_os_error(), e.to_string()))?;
        let state = Arc::new(PeerState {
            health: Health::default(),
            wake_self,
            sleeper: None,
            arrivals: Arrivals::new(0),
        });
        let mut queue_pairs = Vec::new();
        // Queue pairs alternate over the ports. They then pair correctly with a peer that has more or fewer queue
        // pairs per port.
        for _ in 0..self.config.queue_pairs_per_port {
            for port_idx in 0..self.ports.len() {
                queue_pairs.push(self.open_queue_pair(port_idx, local, &state)?);
            }
        }
        let addresses: Vec<QueuePairAddress> =
            queue_pairs.iter().map(|queue_pair| queue_pair.own).collect();
        let full = CallError { call: "counting peers", code: libc::ENOSPC };
        let peer = Peer::new(queue_pairs, state, name);
        let id = self.peers.insert(peer).ok_or_else(|| self.failed(&full))?;
        Ok((id, detail::encode(way(&self.ports[0]), &addresses)))
    }

    fn open_queue_pair(
        &self,
        port_idx: usize,
        local: IpAddr,
        peer: &Arc<PeerState>,
    ) -> Result<FabricQueuePair, NetworkError> {
        let failed = |e: CallError| self.failed(&e);
        let (port, device_idx) = (&self.ports[port_idx], self.device_idx[port_idx]);
        let (gid_index, gid) = port.address(&self.config, local)?;
        let wanted = Capacity {
            sends: self.config.send_queue_depth,
            receives: 1,
            inline_bytes: self.config.inline_bytes,
            signals: Signals::Atomics,
        };
        let max_entries = u32::try_from(port.context.attr().max_cqe).unwrap_or(u32::MAX);
        let room = self.progress.reserve(device_idx, max_entries, wanted.num_completions());
        let room = room.map_err(failed)?;
        let domain = &self.domains[device_idx];
        let queue_pair = QueuePair::new(domain, &room.queue, port, wanted).map_err(failed)?;
        queue_pair.initialise(port, &self.config).map_err(failed)?;
        let own = QueuePairAddress {
            number: queue_pair.number(),
            first_packet: rand::random::<u32>() & 0xff_ffff,
            // Keys travel with each registration. This field is the index of the key that fits this queue pair.
            remote_key: device_idx as u32,
            lid: port.lid,
            mtu: port.mtu,
            num_responses: port.num_responses,
            gid,
            receives: 0,
            gid_index,
        };
        let state = Arc::new(QueuePairState::new(queue_pair, None, Arc::clone(peer)));
        let place = self.progress.enter(Arc::clone(&state)).map_err(failed)?;
        Ok(FabricQueuePair {
            place: PlaceGuard { place, progress: Arc::clone(&self.progress) },
            state,
            _room: room,
            own,
            port_idx,
            device_idx,
            peer_device_idx: 0,
            pending: PendingRequests::new(wanted.sends as usize),
        })
    }

    fn failed(&self, e: &CallError) -> NetworkError {
        let what = sys::describe_errno(e.code);
        error(&self.name, e.call, Some(e.code), format!("{what}; see `rdma resource`"))
    }

    /// # Safety
    /// As for [`Fabric::write`] or [`Fabric::read`].
    unsafe fn start(
        &mut self,
        kind: OpKind,
        peer: PeerId,
        remote: RemoteSegment,
        local: LocalSegment,
        token: Token,
    ) -> Result<PostOutcome, PostError> {
        let op = if kind == OpKind::Get { "read" } else { "write" };
        let (remote_address, most) = (remote.checked(op, local.bytes)?, self.max_operation_bytes());
        let (local_address, region) = Self::local(&self.regions, most, op, &local)?;
        let depth = self.config.send_queue_depth as usize;
        let entry = self.peers.get_mut(peer).ok_or(PostError::Disconnected { op })?;
        if let Err(error) = entry.check() {
            self.peers.lose(peer);
            return Err(error);
        }
        if !entry.is_joined || entry.queue_pairs.is_empty() {
            return Err(PostError::Disconnected { op });
        }
        let Some(queue_pair_idx) = entry.pick(depth) else { return Ok(PostOutcome::Full) };
        let remote_key = remote.region.key;
        let queue_pair = &entry.queue_pairs[queue_pair_idx];
        let bytes = local.bytes as u32;
        // This processor copies inline data.
        let fits = bytes <= queue_pair.state.qp.capacity().inline_bytes;
        let inline = if kind == OpKind::Put && region.is_host_memory && fits { INLINE } else { 0 };
        let work = Work {
            id: RequestId::new(queue_pair.place.place, kind, queue_pair.pending.next_sequence()).0,
            verb: if kind == OpKind::Get { Verb::Read } else { Verb::Write },
            flags: SIGNALLED | inline,
            local_address,
            local_key: region.keys[queue_pair.device_idx].local_key(),
            bytes,
            remote_address,
            remote_key: key_of(remote_key, queue_pair.peer_device_idx),
        };
        // SAFETY: the caller's promise; the range lies within a registration of this fabric.
        if let Err(error) = unsafe { queue_pair.state.qp.post(&work) } {
            queue_pair.state.fail(kind.name(), Cause::Refused { code: error.code });
            entry.check()?;
        }
        let request = Request { token, kind, remote_address, remote_key, bytes };
        self.peers.posted(peer, queue_pair_idx, request);
        Ok(PostOutcome::Accepted)
    }

    /// Address of a local range of at most `most` bytes, and the registration that holds it.
    fn local<'r>(
        regions: &'r RegionTable<FabricRegion>,
        most: u64,
        op: &'static str,
        local: &LocalSegment,
    ) -> Result<(u64, &'r FabricRegion), PostError> {
        let region = regions.get(local.region);
        let region = local.checked(op, region.filter(|_| local.bytes <= most))?;
        Ok((region.first + local.offset, region))
    }
}

impl Fabric for VerbsFabric {
    fn kind(&self) -> TransportKind {
        TransportKind::Verbs
    }

    fn flavour(&self) -> &str {
        self.ports[0].flavour()
    }

    unsafe fn register(
        &mut self,
        ptr: NonNull<u8>,
        bytes: usize,
        access: Access,
    ) -> Result<RegionId, PostError> {
        // SAFETY: the caller keeps the memory mapped.
        let register =
            |domain| unsafe { MemoryRegion::of_pointer(domain, ptr, bytes, rights(access)) };
        let keys: Result<Vec<_>, _> = self.domains.iter().map(register).collect();
        let keys = keys.map_err(|error| PostError::Register {
            bytes,
            detail: format!(
                "{error}; check the limit on locked memory (`ulimit -l`), and that the memory is writable"
            ),
        })?;
        let (first, bytes) = (ptr.as_ptr() as u64, bytes as u64);
        self.keep(FabricRegion { keys, first, bytes, access, is_host_memory: true })
    }

    unsafe fn register_device(
        &mut self,
        ptr: NonNull<u8>,
        bytes: usize,
        access: Access,
        dma_buf: Option<DmaBuf<'_>>,
    ) -> Result<RegionId, PostError> {
        // SAFETY: the caller's promise.
        let (id, how) = unsafe { self.register_device_memory(ptr, bytes, access, dma_buf)? };
        tracing::debug!(bytes, ?how, "memory of another device registered");
        Ok(id)
    }

    fn describe(&self, region: RegionId) -> Option<WireRegion> {
        let FabricRegion { keys, first, bytes, access, .. } = self.regions.get(region)?;
        let key = keys_together(keys.iter().map(MemoryRegion::remote_key));
        (*access != Access::Local).then_some(WireRegion { address: *first, bytes: *bytes, key })
    }

    fn deregister(&mut self, region: RegionId) -> Result<(), PostError> {
        let failed = |bytes, detail| Err(PostError::Register { bytes, detail });
        let Some(registered) = self.regions.get_mut(region) else {
            return failed(0, self.regions.missing(region));
        };
        if let Err(error) = registered.keys.iter_mut().try_for_each(MemoryRegion::close) {
            return failed(
                registered.bytes as usize,
                format!("the key stays in force, and the memory must stay mapped: {error}"),
            );
        }
        self.regions.remove(region);
        Ok(())
    }

    fn open_peer(&mut self) -> Result<(PeerId, Vec<u8>), NetworkError> {
        self.open_at(IpAddr::V4(Ipv4Addr::UNSPECIFIED), "a peer".to_owned())
    }

    fn open_peer_on(&mut self, route: Route) -> Result<(PeerId, Vec<u8>), NetworkError> {
        self.open_at(route.local, route.remote.to_string())
    }

    fn join_peer(&mut self, peer: PeerId, bytes: &[u8]) -> Result<(), NetworkError> {
        let Self { peers, ports, config, name, .. } = self;
        let refuse = |detail: String| error(name, "joining a peer", None, detail);
        let entry = peers.get_mut(peer);
        let entry = entry.ok_or_else(|| refuse(format!("there is no peer {}", peer.0)))?;
        let theirs = detail::decode(way(&ports[0]), bytes).map_err(|e| refuse(e.to_string()))?;
        if entry.is_joined || entry.queue_pairs.is_empty() {
            return Err(refuse(format!("peer {} is joined already, or lost", peer.0)));
        }
        // Both sides compute the same number. The remaining queue pairs are dropped.
        entry.queue_pairs.truncate(theirs.len());
        for (queue_pair, theirs) in entry.queue_pairs.iter_mut().zip(&theirs) {
            queue_pair.peer_device_idx = theirs.remote_key as usize;
            if queue_pair.peer_device_idx >= MAX_DEVICES {
                let found = theirs.remote_key;
                return Err(refuse(format!("the peer's device {found}, expected 0 or 1")));
            }
            let port = &ports[queue_pair.port_idx];
            queue_pair.state.qp.join(port, config, &queue_pair.own, theirs).map_err(|e| {
                let what = sys::describe_errno(e.code);
                error(name, e.call, Some(e.code), format!("towards {}: {what}", entry.name))
            })?;
        }
        entry.is_joined = true;
        Ok(())
    }

    fn close_peer(&mut self, peer: PeerId) {
        if let Some(entry) = self.peers.remove(peer) {
            entry.close(&mut self.left_over);
        }
    }

    fn lost(&mut self) -> Option<PeerId> {
        self.peers.next_lost()
    }

    unsafe fn write(
        &mut self,
        peer: PeerId,
        dst: RemoteSegment,
        src: LocalSegment,
        token: Token,
    ) -> Result<PostOutcome, PostError> {
        // SAFETY: the caller's promise.
        unsafe { self.start(OpKind::Put, peer, dst, src, token) }
    }

    unsafe fn read(
        &mut self,
        peer: PeerId,
        dst: LocalSegment,
        src: RemoteSegment,
        token: Token,
    ) -> Result<PostOutcome, PostError> {
        // SAFETY: the caller's promise.
        unsafe { self.start(OpKind::Get, peer, src, dst, token) }
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        self.progress.drive();
        self.num_polls = self.num_polls.wrapping_add(1);
        // Reading the clock costs as much as one check.
        let is_time = self.has_slept || self.num_polls.is_multiple_of(POLLS_PER_CLOCK);
        if is_time && self.peers.has_active() {
            self.has_slept = false;
            self.peers.fail_stalled(Instant::now(), self.config.stall_timeout());
        }
        out.append(&mut self.left_over);
        self.peers.report(out);
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.any_event.as_fd())
    }

    fn may_sleep(&mut self) -> bool {
        // Usually there is nothing to read.
        let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
        self.has_slept = true;
        self.progress.may_sleep() && self.left_over.is_empty() && !self.peers.has_news()
    }

    fn max_sleep(&self) -> Duration {
        // Often enough to notice a stall at most a quarter of the limit late.
        if self.peers.has_active() { self.config.stall_timeout() / 4 } else { Duration::MAX }
    }

    fn max_operation_bytes(&self) -> u64 {
        let longest = self.ports.iter().map(|port| port.max_message_bytes).min().unwrap_or(0);
        let most = u64::from(longest.min(self.config.max_message_bytes));
        let num_queue_pairs = self.ports.len() * self.config.queue_pairs_per_port as usize;
        // Several operations of this length keep several queue pairs busy.
        let part = (self.config.stripe_bytes as u64).max(MIN_PART_BYTES);
        if num_queue_pairs > 1 { most.min(part) } else { most }
    }
}

/// A fabric has no flags, so the value is constant.
const fn way(port: &Port) -> (Link, Signals) {
    (port.link, Signals::Atomics)
}

const fn rights(access: Access) -> Rights {
    match access {
        Access::Local => Rights::Local,
        Access::RemoteRead => Rights::Read,
        Access::RemoteReadWrite => Rights::All,
    }
}

/// Number of polls per reading of the clock.
const POLLS_PER_CLOCK: u32 = 64;
/// Shortest part of a transfer that is spread.
const MIN_PART_BYTES: u64 = 4096;
