//! One peer over a software NIC.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use p2p_core::endpoint::checks::{check_flag, check_range, find_registered};
use p2p_core::endpoint::{Endpoint, Marks, PostError, Progress, QuietError, TransportKind};
use p2p_core::region::SlotKey;
use p2p_core::wait::Driver;
use p2p_core::{LocalRange, Region, RemoteRange};

use super::{Device, wake};
use crate::format::{
    Atomic, FM_FENCE, Local, MAX_MESSAGE_BYTES, Operation, Remote, Source, Syndrome,
};
use crate::memory::Segment;
use crate::nic::{ControlError, Domain, Keys};
use crate::port::{Access, PortAddress};
use crate::queue::{Poster, QueueError};

/// This side's objects on the NIC. Dropping it frees them, the key of the slot first.
#[derive(Debug)]
pub(super) struct Side {
    device: Arc<Device>,
    domain: Domain,
    slot: Segment,
    slot_keys: Keys,
    poster: Option<Poster>,
    /// Registered memory, which stays mapped as long.
    sources: Vec<(Region, Keys)>,
}

impl Side {
    pub(super) fn new(
        device: Arc<Device>,
        domain: Domain,
        slot: Segment,
        slot_keys: Keys,
        poster: Poster,
    ) -> Self {
        let poster = Some(poster);
        Self { device, domain, slot, slot_keys, poster, sources: Vec::new() }
    }

    pub(super) const fn slot_keys(&self) -> &Keys {
        &self.slot_keys
    }

    pub(super) fn slot_region(&self) -> Region {
        self.slot.region().clone()
    }

    pub(super) fn connect(&self, peer: PortAddress, qpn: u32) -> Result<(), ControlError> {
        let mut nic = self.device.lock();
        match &self.poster {
            Some(poster) => poster.queue().connect(&mut nic, peer, qpn),
            None => Err(ControlError::Unknown { what: "queue pair", number: qpn }),
        }
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        let mut nic = self.device.lock();
        let warn = |what: &str, result: Result<(), ControlError>| {
            if let Err(error) = result {
                tracing::warn!(%error, "cannot give {what} back to the software NIC");
            }
        };
        // The peer's right to write goes first.
        warn("a slot", nic.deregister(self.slot_keys.lkey));
        if let Some(poster) = self.poster.take() {
            warn("a queue", poster.into_queue().destroy(&mut nic));
        }
        for (_, keys) in &self.sources {
            warn("memory", nic.deregister(keys.lkey));
        }
    }
}

/// One connected peer.
#[derive(Debug)]
pub(super) struct SoftEndpoint {
    side: Side,
    remote_address: u64,
    rkey: u32,
    remote_bytes: usize,
    wake_peer: OwnedFd,
    wake_self: OwnedFd,
    /// Whether the next request waits for earlier reads and atomics.
    is_fenced: bool,
    failure: Option<QueueError>,
}

impl SoftEndpoint {
    pub(super) const fn new(
        side: Side,
        remote_address: u64,
        rkey: u32,
        remote_bytes: usize,
        wake_peer: OwnedFd,
        wake_self: OwnedFd,
    ) -> Self {
        let (is_fenced, failure) = (false, None);
        Self { side, remote_address, rkey, remote_bytes, wake_peer, wake_self, is_fenced, failure }
    }

    /// The peer's memory at `offset`, checked.
    fn remote(&self, op: &'static str, offset: usize, len: usize) -> Result<Remote, PostError> {
        check_range(op, offset, len, self.remote_bytes)?;
        Ok(self.remote_at(offset))
    }

    fn remote_at(&self, offset: usize) -> Remote {
        Remote { address: self.remote_address.wrapping_add(offset as u64), rkey: self.rkey }
    }

    /// Local memory with its key.
    fn local(&self, op: &'static str, range: &LocalRange) -> Result<Local, PostError> {
        let sources = self.side.sources.iter().map(|(region, keys)| (region, keys));
        let (keys, _) = find_registered(op, range, sources)?;
        let address = range.as_ptr().as_ptr() as u64;
        Ok(Local { address, lkey: keys.lkey, num_bytes: range.len() as u32 })
    }

    fn post(&mut self, op: &'static str, operation: Operation) -> Result<(), PostError> {
        if let Some(failure) = self.failure {
            return Err(post_error(op, failure));
        }
        let flags = if self.is_fenced { FM_FENCE } else { 0 };
        let device = Arc::clone(&self.side.device);
        let Some(poster) = &mut self.side.poster else {
            return Err(PostError::Disconnected { op });
        };
        let deadline = Instant::now() + POST_LIMIT;
        let result = poster.post(operation, flags, deadline, || device.progress());
        self.is_fenced = false;
        device.progress();
        result.map_err(|error| {
            self.failure = Some(error);
            post_error(op, error)
        })
    }

    /// Moves a range in as few requests as their largest size allows.
    fn moved(
        &mut self,
        op: &'static str,
        remote: Remote,
        local: Local,
        num_bytes: usize,
        make: impl Fn(Remote, Local) -> Operation,
    ) -> Result<(), PostError> {
        let mut offset = 0;
        while offset < num_bytes {
            let len = (num_bytes - offset).min(MAX_MESSAGE_BYTES as usize);
            let part = Local {
                address: local.address + offset as u64,
                lkey: local.lkey,
                num_bytes: len as u32,
            };
            let address = remote.address.wrapping_add(offset as u64);
            self.post(op, make(Remote { address, rkey: remote.rkey }, part))?;
            offset += len;
        }
        Ok(())
    }
}

impl Endpoint for SoftEndpoint {
    type RemoteKey = SlotKey;

    fn kind(&self) -> TransportKind {
        TransportKind::SoftNic
    }

    fn register(&mut self, region: &Region) -> Result<(), PostError> {
        let side = &mut self.side;
        let bytes = region.len();
        let keys = side
            .device
            .lock()
            .register_local(side.domain, region, Access::LOCAL_WRITE)
            .map_err(|error| PostError::Register { bytes, detail: error.to_string() })?;
        side.sources.push((region.clone(), keys));
        Ok(())
    }

    fn direct(&self, _key: SlotKey) -> Option<NonNull<u8>> {
        None
    }

    unsafe fn put(&mut self, dst: RemoteRange<SlotKey>, src: LocalRange) -> Result<(), PostError> {
        let remote = self.remote("put", dst.offset, dst.len.max(src.len()))?;
        let local = self.local("put", &src)?;
        self.moved("put", remote, local, src.len(), |remote, local| {
            Operation::Write(remote, Source::Gather(vec![local]))
        })
    }

    unsafe fn get(&mut self, dst: LocalRange, src: RemoteRange<SlotKey>) -> Result<(), PostError> {
        let remote = self.remote("get", src.offset, src.len.max(dst.len()))?;
        let local = self.local("get", &dst)?;
        self.moved("get", remote, local, dst.len(), |remote, local| {
            Operation::Read(remote, vec![local])
        })
    }

    fn add_flag(&mut self, dst: RemoteRange<SlotKey>, value: u64) -> Result<(), PostError> {
        check_flag("add_flag", dst.offset, self.remote_bytes)?;
        let remote = self.remote_at(dst.offset);
        let Some(poster) = &self.side.poster else {
            return Err(PostError::Disconnected { op: "add_flag" });
        };
        let handle = poster.queue().handle();
        let answer = Local { address: handle.scratch, lkey: handle.scratch_lkey, num_bytes: 8 };
        self.post("add_flag", Operation::Atomic(remote, Atomic::Add8(value), answer))
    }

    fn fence(&mut self) -> Result<(), PostError> {
        // One queue pair keeps everything but reads and atomics in order by itself.
        self.is_fenced = true;
        self.health()
    }

    fn quiet(&mut self, deadline: Instant) -> Result<(), QuietError> {
        self.health()?;
        let device = Arc::clone(&self.side.device);
        let Some(poster) = &mut self.side.poster else {
            return Err(PostError::Disconnected { op: "quiet" }.into());
        };
        poster.quiet(deadline, || device.progress()).map_err(|error| match error {
            QueueError::Deadline { outstanding, .. } => {
                QuietError::Deadline { outstanding: usize::try_from(outstanding).unwrap_or(0) }
            }
            error => {
                self.failure = Some(error);
                post_error("quiet", error).into()
            }
        })
    }

    fn wake(&mut self, _key: SlotKey, _waiting_offset: usize) -> Result<(), PostError> {
        // Whether the peer sleeps stands in its memory, and asking would cost as much as waking it. The
        // flag must have come before, which takes longer only with an adversary.
        self.quiet(Instant::now() + POST_LIMIT).map_err(|error| match error {
            QuietError::Post(error) => error,
            error => PostError::Transport { op: "wake", code: 0, detail: error.to_string() },
        })?;
        wake::wake(&self.wake_peer).map_err(|error| PostError::Transport {
            op: "wake",
            code: error.raw_os_error().unwrap_or(0).into(),
            detail: error.to_string(),
        })
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.wake_self.as_fd())
    }
}

p2p_core::unbatched!(SoftEndpoint);

impl Progress for SoftEndpoint {
    p2p_core::default_progress! {
        add_flag_lazily, has_room, has_room_to_spare, try_fence, is_settled
    }

    fn driver(&self) -> Option<Arc<dyn Driver>> {
        Some(Arc::clone(&self.side.device) as Arc<dyn Driver>)
    }

    fn health(&self) -> Result<(), PostError> {
        self.failure.map_or(Ok(()), |failure| Err(post_error("health", failure)))
    }

    fn marks(&mut self) -> Result<Option<Marks>, PostError> {
        self.health()?;
        self.side.device.progress();
        let Some(poster) = &mut self.side.poster else {
            return Err(PostError::Disconnected { op: "marks" });
        };
        match poster.poll() {
            Ok(arrived) => Ok(Some(Marks { issued: poster.posted(), arrived })),
            Err(error) => {
                self.failure = Some(error);
                Err(post_error("marks", error))
            }
        }
    }
}

fn post_error(op: &'static str, error: QueueError) -> PostError {
    match error {
        QueueError::Completion { syndrome: Syndrome::RetryExceeded, .. } => {
            PostError::Disconnected { op }
        }
        QueueError::Completion { syndrome, .. } => {
            PostError::Transport { op, code: syndrome as i64, detail: error.to_string() }
        }
        error => PostError::Transport { op, code: 0, detail: error.to_string() },
    }
}

/// This side's own NIC makes room, independent of the peer.
const POST_LIMIT: Duration = Duration::from_secs(1);
