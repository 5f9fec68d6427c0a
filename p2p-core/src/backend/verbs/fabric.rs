//! One port as a [`Fabric`]: any memory, any number of peers, operations by token.
//!
//! Every request is signalled, since any may be the last one that somebody waits for. When a peer
//! fails, its queue pair is destroyed first, so that the device touches no memory any more, and then all
//! that was under way is reported as failed. A peer towards which nothing completes for as long as
//! [`VerbsConfig::stall_timeout`] says fails, too.

use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll;

use super::config::VerbsConfig;
use super::detail::{self, LaneAddress};
use super::network::check;
use super::owner::{CallError, MemoryRegion, ProtectionDomain, Rights};
use super::peers::{FabricLane, LeavingPlace, Peer, Peers, Request};
use super::port::{Port, error, open_ports};
use super::progress::{LaneState, OpKind, PeerState, Progress, RequestId, Standing};
use super::qp::{Capacity, INLINE, QueuePair, SIGNALLED, Verb, Work};
use super::status::{Cause, Health};
use super::sys;
use crate::endpoint::{PostError, TransportKind};
use crate::fabric::{
    Access, Completion, Fabric, LocalSegment, PeerId, Posted, RegionId, RemoteSegment, Token,
    WireRegion,
};
use crate::network::{NetworkError, Route};
use crate::wait::{Driver, event_fd};

/// A port whose memory is reached by whole registrations. All peers of a fabric share a protection
/// domain: a key that one of them was told works for every one of them.
#[derive(Debug)]
pub struct VerbsFabric {
    /// First, so that queue pairs go before the keys.
    peers: Peers,
    regions: Vec<Option<Registered>>,
    free_regions: Vec<u32>,
    domain: Arc<ProtectionDomain>,
    progress: Arc<Progress>,
    port: Port,
    config: VerbsConfig,
    name: String,
    wake: OwnedFd,
    any_event: OwnedFd,
    /// Failures of peers that were closed.
    left_over: Vec<Completion>,
    num_polls: u32,
    /// Whether time may have passed since the last poll.
    has_slept: bool,
}

/// A dma-buf that stands for memory of another device.
#[derive(Debug, Clone, Copy)]
pub struct DmaBuf<'a> {
    /// Its descriptor, as the GPU's driver exports it.
    pub fd: BorrowedFd<'a>,
    /// Where the memory begins within it, in bytes.
    pub offset: u64,
}

/// How memory of another device was registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceAccess {
    /// By its dma-buf.
    DmaBuf,
    /// By its address, which needs a peer-memory module of the device's driver.
    PeerMemory,
}

#[derive(Debug)]
struct Registered {
    key: MemoryRegion,
    first: u64,
    bytes: u64,
    access: Access,
    /// Whether this processor can read it.
    is_host_memory: bool,
}

impl VerbsFabric {
    /// Opens the first of the ports that `config` asks for.
    ///
    /// # Errors
    /// [`NetworkError`], in one line: no device, no active port.
    pub fn open(config: VerbsConfig) -> Result<Self, NetworkError> {
        let port = open_ports(&config)?.swap_remove(0);
        let name = port.name();
        check(&config, &name, std::slice::from_ref(&port))?;
        let failed = |e: CallError| error(&name, e.call, Some(e.code), e.to_string());
        let system = |op, e: std::io::Error| error(&name, op, e.raw_os_error(), e.to_string());
        let progress =
            Progress::start(&name, std::slice::from_ref(&port.context), Standing::EventsOnly)
                .map_err(failed)?;
        let domain = ProtectionDomain::new(&port.context).map_err(failed)?;
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
            regions: Vec::new(),
            free_regions: Vec::new(),
            domain,
            progress,
            port,
            config,
            name,
            wake,
            any_event,
            left_over: Vec::new(),
            num_polls: 0,
            has_slept: false,
        })
    }

    /// Registers memory of another device, such as a GPU: by its dma-buf if there is one and this host
    /// can, else by address.
    ///
    /// # Safety
    /// As for [`Fabric::register`].
    ///
    /// # Errors
    /// [`PostError::Register`], which says why neither way works.
    pub unsafe fn register_device_memory(
        &mut self,
        ptr: NonNull<u8>,
        bytes: usize,
        access: Access,
        dma_buf: Option<DmaBuf<'_>>,
    ) -> Result<(RegionId, DeviceAccess), PostError> {
        let (rights, address) = (rights(access), ptr.as_ptr() as u64);
        let registered = |key| Registered {
            key,
            first: address,
            bytes: bytes as u64,
            access,
            is_host_memory: false,
        };
        let first = match dma_buf {
            // SAFETY: the caller keeps the memory allocated.
            Some(DmaBuf { fd, offset }) => unsafe {
                MemoryRegion::of_dmabuf(
                    &self.domain,
                    fd.as_raw_fd(),
                    offset,
                    address,
                    bytes,
                    rights,
                )
            },
            None => Err(CallError { call: "ibv_reg_dmabuf_mr", code: libc::ENOENT }),
        };
        let why_not = match first {
            Ok(key) => return Ok((self.keep(registered(key)), DeviceAccess::DmaBuf)),
            Err(why_not) => why_not,
        };
        // SAFETY: the caller keeps the memory allocated.
        match unsafe { MemoryRegion::of_pointer(&self.domain, ptr, bytes, rights) } {
            Ok(key) => {
                tracing::debug!(%why_not, "registered by address instead of dma-buf");
                Ok((self.keep(registered(key)), DeviceAccess::PeerMemory))
            }
            Err(error) => Err(PostError::Register {
                bytes,
                detail: format!(
                    "by dma-buf: {why_not}; by address: {error}; a GPU needs dma-buf support of kernel and driver, or a module such as nvidia_peermem"
                ),
            }),
        }
    }

    fn keep(&mut self, registered: Registered) -> RegionId {
        let idx = match self.free_regions.pop() {
            Some(idx) => {
                self.regions[idx as usize] = Some(registered);
                idx
            }
            None => {
                self.regions.push(Some(registered));
                self.regions.len() as u32 - 1
            }
        };
        RegionId(idx)
    }

    fn region(&self, id: RegionId) -> Option<&Registered> {
        self.regions.get(id.0 as usize)?.as_ref()
    }

    fn open_at(&mut self, local: IpAddr, name: String) -> Result<(PeerId, Vec<u8>), NetworkError> {
        let failed = |e: CallError| self.failed(&e);
        let (gid_index, gid) = self.port.address(&self.config, local)?;
        let wanted = Capacity {
            sends: self.config.send_queue_depth,
            receives: 1,
            inline_bytes: self.config.inline_bytes,
        };
        let max_entries = u32::try_from(self.port.context.attr().max_cqe).unwrap_or(u32::MAX);
        let room =
            self.progress.reserve(0, max_entries, wanted.num_completions()).map_err(failed)?;
        let queue_pair =
            QueuePair::new(&self.domain, &room.queue, &self.port, wanted).map_err(failed)?;
        queue_pair.initialise(&self.port, &self.config).map_err(failed)?;
        let own = LaneAddress {
            number: queue_pair.number(),
            first_packet: rand::random::<u32>() & 0xff_ffff,
            remote_key: 0,
            lid: self.port.lid,
            mtu: self.port.mtu,
            num_responses: self.port.num_responses,
            gid,
            gid_index,
        };
        let wake_self = self
            .wake
            .try_clone()
            .map_err(|e| error(&self.name, "dup", e.raw_os_error(), e.to_string()))?;
        let state = Arc::new(PeerState { health: Health::default(), wake_self, sleeper: None });
        let lane_state = Arc::new(LaneState::new(queue_pair, Arc::clone(&state)));
        let place = self.progress.enter(Arc::clone(&lane_state)).map_err(failed)?;
        let lane = FabricLane {
            place: LeavingPlace { place, progress: Arc::clone(&self.progress) },
            state: lane_state,
            _room: room,
        };
        let peer = Peer::new(lane, own, state, name, wanted.sends as usize);
        let full = CallError { call: "counting peers", code: libc::ENOSPC };
        let id = self.peers.insert(peer).ok_or_else(|| self.failed(&full))?;
        Ok((id, detail::encode(self.port.link, &[own])))
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
    ) -> Result<Posted, PostError> {
        let op = if kind == OpKind::Get { "read" } else { "write" };
        let remote_address = remote_address(op, &remote, local.bytes)?;
        let (local_address, region) = self.local(op, &local)?;
        let (local_key, is_host_memory) = (region.key.local_key(), region.is_host_memory);
        let remote_key = u32::try_from(remote.region.key).map_err(|_| PostError::Transport {
            op,
            code: 0,
            detail: format!("{:#x} is not a remote key of verbs", remote.region.key),
        })?;
        let entry = self.peers.get_mut(peer).ok_or(PostError::Disconnected { op })?;
        entry.check()?;
        let Some(lane) = entry.lane.as_ref().filter(|_| entry.is_joined) else {
            return Err(PostError::Disconnected { op });
        };
        if entry.num_under_way() >= self.config.send_queue_depth as usize {
            return Ok(Posted::Full);
        }
        let bytes = local.bytes as u32;
        // What goes inline is copied by this processor.
        let fits = bytes <= lane.state.queue_pair.capacity().inline_bytes;
        let inline = if kind == OpKind::Put && is_host_memory && fits { INLINE } else { 0 };
        let work = Work {
            id: RequestId::new(lane.place.place, kind, entry.next_sequence()).0,
            verb: if kind == OpKind::Get { Verb::Read } else { Verb::Write },
            flags: SIGNALLED | inline,
            local_address,
            local_key,
            bytes,
            remote_address,
            remote_key,
        };
        // SAFETY: the caller's promise; the range lies within a registration of this fabric.
        if let Err(error) = unsafe { lane.state.queue_pair.post(&work) } {
            entry.state.health.fail(kind.name(), Cause::Refused { code: error.code });
            entry.check()?;
        }
        self.peers.posted(peer, Request { token, kind, remote_address, remote_key, bytes });
        Ok(Posted::Accepted)
    }

    /// Address of a local range, and the registration that holds it.
    fn local(
        &self,
        op: &'static str,
        local: &LocalSegment,
    ) -> Result<(u64, &Registered), PostError> {
        let unregistered = PostError::Unregistered {
            op,
            address: local.offset as usize,
            len: local.bytes as usize,
        };
        let Some(region) = self.region(local.region) else { return Err(unregistered) };
        match local.offset.checked_add(local.bytes) {
            Some(end) if end <= region.bytes && local.bytes <= self.max_operation_bytes() => {
                Ok((region.first + local.offset, region))
            }
            _ => Err(unregistered),
        }
    }
}

impl Fabric for VerbsFabric {
    fn kind(&self) -> TransportKind {
        TransportKind::Verbs
    }

    fn flavour(&self) -> &str {
        self.port.flavour()
    }

    unsafe fn register(
        &mut self,
        ptr: NonNull<u8>,
        bytes: usize,
        access: Access,
    ) -> Result<RegionId, PostError> {
        // SAFETY: the caller keeps the memory mapped.
        let key = unsafe { MemoryRegion::of_pointer(&self.domain, ptr, bytes, rights(access)) };
        let key = key.map_err(|error| PostError::Register {
            bytes,
            detail: format!("{error}; check the limit on locked memory (`ulimit -l`)"),
        })?;
        let (first, bytes) = (ptr.as_ptr() as u64, bytes as u64);
        Ok(self.keep(Registered { key, first, bytes, access, is_host_memory: true }))
    }

    fn describe(&self, region: RegionId) -> Option<WireRegion> {
        let Registered { key, first, bytes, access, .. } = self.region(region)?;
        let key = u64::from(key.remote_key());
        (*access != Access::Local).then_some(WireRegion { address: *first, bytes: *bytes, key })
    }

    fn deregister(&mut self, region: RegionId) -> Result<(), PostError> {
        let entry = self.regions.get_mut(region.0 as usize).and_then(Option::take);
        match entry {
            Some(_) => {
                self.free_regions.push(region.0);
                Ok(())
            }
            None => Err(PostError::Register {
                bytes: 0,
                detail: format!("there is no registration {}", region.0),
            }),
        }
    }

    fn open_peer(&mut self) -> Result<(PeerId, Vec<u8>), NetworkError> {
        self.open_at(IpAddr::V4(Ipv4Addr::UNSPECIFIED), "a peer".to_owned())
    }

    fn open_peer_on(&mut self, route: Route) -> Result<(PeerId, Vec<u8>), NetworkError> {
        self.open_at(route.local, route.remote.to_string())
    }

    fn join_peer(&mut self, peer: PeerId, bytes: &[u8]) -> Result<(), NetworkError> {
        let Self { peers, port, config, name, .. } = self;
        let refuse = |detail: String| error(name, "joining a peer", None, detail);
        let entry = peers.get_mut(peer);
        let entry = entry.ok_or_else(|| refuse(format!("there is no peer {}", peer.0)))?;
        let theirs = detail::decode(port.link, bytes).map_err(|e| refuse(e.to_string()))?;
        let Some(lane) = entry.lane.as_ref().filter(|_| !entry.is_joined) else {
            return Err(refuse(format!("peer {} is joined already, or lost", peer.0)));
        };
        lane.state.queue_pair.join(port, config, &entry.own, &theirs[0]).map_err(|e| {
            let what = sys::describe_errno(e.code);
            error(name, e.call, Some(e.code), format!("towards {}: {what}", entry.name))
        })?;
        entry.is_joined = true;
        Ok(())
    }

    fn close_peer(&mut self, peer: PeerId) {
        if let Some(entry) = self.peers.remove(peer) {
            entry.close(&mut self.left_over);
        }
    }

    unsafe fn write(
        &mut self,
        peer: PeerId,
        dst: RemoteSegment,
        src: LocalSegment,
        token: Token,
    ) -> Result<Posted, PostError> {
        // SAFETY: the caller's promise.
        unsafe { self.start(OpKind::Put, peer, dst, src, token) }
    }

    unsafe fn read(
        &mut self,
        peer: PeerId,
        dst: LocalSegment,
        src: RemoteSegment,
        token: Token,
    ) -> Result<Posted, PostError> {
        // SAFETY: the caller's promise.
        unsafe { self.start(OpKind::Get, peer, src, dst, token) }
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        self.progress.drive();
        self.num_polls = self.num_polls.wrapping_add(1);
        // A clock costs as much as a look.
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
        // Nothing to read is the usual answer.
        let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
        self.has_slept = true;
        self.progress.may_sleep() && self.left_over.is_empty() && !self.peers.has_news()
    }

    fn max_sleep(&self) -> Duration {
        // Often enough that a stall is noticed a quarter late at the most.
        if self.peers.has_active() { self.config.stall_timeout() / 4 } else { Duration::MAX }
    }

    fn max_operation_bytes(&self) -> u64 {
        self.port.max_message_bytes.min(self.config.max_message_bytes).into()
    }
}

const fn rights(access: Access) -> Rights {
    match access {
        Access::Local => Rights::Local,
        Access::RemoteRead => Rights::Read,
        Access::RemoteReadWrite => Rights::All,
    }
}

fn remote_address(op: &'static str, remote: &RemoteSegment, bytes: u64) -> Result<u64, PostError> {
    let WireRegion { address, bytes: region_bytes, .. } = remote.region;
    let inside = remote.offset.checked_add(bytes).is_some_and(|end| end <= region_bytes);
    match address.checked_add(remote.offset) {
        Some(found) if inside && found.checked_add(bytes).is_some() => Ok(found),
        _ => Err(PostError::RemoteRange {
            op,
            offset: remote.offset as usize,
            len: bytes as usize,
            region_bytes: region_bytes as usize,
        }),
    }
}

/// Polls without a look at the clock.
const POLLS_PER_CLOCK: u32 = 64;
