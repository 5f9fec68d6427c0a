//! One peer over libfabric.

use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::device::Device;
use super::fi_endpoint::{Descriptor, PostStatus};
use super::library_thread::UserGuard;
use super::link::{Link, RemoteEndpoint};
use super::message::{self, Action, HEADER_BYTES, Header, part_bytes};
use super::outbox::{LocalMemory, Op};
use super::port::{MemoryRegistration, Rights};
use super::table::Source;
use p2p_core::endpoint::checks::{check_flag, check_range, find_registered};
use p2p_core::endpoint::{Endpoint, PostError, Progress, QuietError, TransportKind};
use p2p_core::region::{LocalRange, Region, RemoteRange, SlotKey};
use p2p_core::wait::Driver;

/// Small puts wait for the next flag and travel with it in one message. Large puts are writes,
/// which the message counts. See `docs/explanation/memory-model.md`.
#[derive(Debug)]
pub struct LibfabricEndpoint {
    lease: Lease,
    remote: RemoteEndpoint,
    /// The message under construction: room for the header, then parts.
    message: Vec<u8>,
    num_parts: u16,
    max_message_bytes: usize,
    next_seq: u32,
    /// Mails sent.
    num_mails: u64,
    /// Writes issued.
    num_writes: u64,
    /// Questions asked.
    num_asked: u64,
    /// True if an operation was issued that no answer covers.
    is_open: bool,
}

/// An entry of the device's table, freed when dropped.
#[derive(Debug)]
pub(super) struct Lease {
    pub(super) device: Arc<Device>,
    pub(super) link: Arc<Link>,
    /// This side's slot. Dropped first, which revokes the peer's key.
    pub(super) slot: Option<MemoryRegistration>,
    sources: Vec<Source>,
    // Dropped last, after the other fields.
    _user: UserGuard,
}

impl Lease {
    pub(super) fn new(device: Arc<Device>, link: Arc<Link>, slot: MemoryRegistration) -> Self {
        let _user = UserGuard::another(device.library_thread());
        Self { device, link, slot: Some(slot), sources: Vec::new(), _user }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.device.close(&self.link, self.slot.take(), std::mem::take(&mut self.sources));
    }
}

impl LibfabricEndpoint {
    pub(super) fn new(lease: Lease, remote: RemoteEndpoint, max_message_bytes: usize) -> Self {
        let mut message = Vec::with_capacity(max_message_bytes);
        message.resize(HEADER_BYTES, 0);
        Self {
            lease,
            remote,
            message,
            num_parts: 0,
            max_message_bytes,
            next_seq: 0,
            num_mails: 0,
            num_writes: 0,
            num_asked: 0,
            is_open: false,
        }
    }

    /// Name of the provider.
    #[must_use]
    pub fn provider(&self) -> &str {
        &self.lease.device.port().traits().provider
    }

    /// What the library wants to know of local memory.
    fn descriptor(&self, op: &'static str, range: &LocalRange) -> Result<Descriptor, PostError> {
        let sources = self.lease.sources.iter().map(|source| (&source.region, source));
        let (source, _) = find_registered(op, range, sources)?;
        Ok(source.registered.as_ref().map_or(Descriptor::NONE, MemoryRegistration::descriptor))
    }

    /// Sends the message under construction.
    fn send(&mut self, op: &'static str, action: Action) -> Result<(), PostError> {
        let counts = self.remote.counts_writes;
        let header = Header {
            slot: self.remote.id,
            seq: self.next_seq,
            token: self.remote.token,
            writes: if counts { self.num_writes } else { 0 },
            action,
            credit: self.lease.link.take_credit(),
            num_parts: self.num_parts,
            mails: self.lease.link.mails_read(),
        };
        if let Some(head) = self.message.first_chunk_mut::<HEADER_BYTES>() {
            header.encode(head);
        }
        // Without counting, a message is sent only after all writes before it are visible.
        let after_writes = if counts { 0 } else { self.num_writes };
        let is_numbered = self.post(op, after_writes)?;
        self.next_seq = self.next_seq.wrapping_add(u32::from(is_numbered));
        self.message.truncate(HEADER_BYTES);
        self.num_parts = 0;
        Ok(())
    }

    #[inline]
    fn post(&mut self, op: &'static str, after_writes: u64) -> Result<bool, PostError> {
        let Lease { device, link, .. } = &self.lease;
        link.health()?;
        if link.is_peer_closed() {
            // As with memory that its owner has unmapped: no thread reads it any more.
            return Ok(true);
        }
        if device.posts_here() && link.backlog() == 0 && link.may_send(after_writes) {
            if self.remote.mail.is_some() {
                match link.post_mail(device.port(), self.num_mails + 1, &self.message) {
                    Ok(PostStatus::Accepted) => {
                        self.num_mails += 1;
                        return Ok(true);
                    }
                    Ok(PostStatus::Again) => {}
                    Err(error) => return Err(link.fail_call(&error)),
                }
            }
            match link.inject(device.port(), &self.message) {
                Ok(PostStatus::Accepted) => return Ok(true),
                Ok(PostStatus::Again) => {}
                Err(error) => return Err(link.fail_call(&error)),
            }
        }
        device.enqueue(link, op, Op::Message { bytes: &self.message, after_writes })
    }

    /// Starts a copy between local memory and the peer's slot, in as many pieces as needed.
    fn transfer(
        &mut self,
        op: &'static str,
        (ptr, len): (NonNull<u8>, usize),
        offset: usize,
        descriptor: Descriptor,
    ) -> Result<(), PostError> {
        let is_write = op == PUT;
        let Lease { device, link, .. } = &self.lease;
        let max_bytes = device.port().traits().max_message_bytes.clamp(1, MAX_PIECE_BYTES);
        let mut start = 0;
        while start < len {
            link.health()?;
            if link.is_peer_closed() {
                return if is_write { Ok(()) } else { Err(PostError::Disconnected { op }) };
            }
            let piece = (len - start).min(max_bytes);
            // SAFETY: within the caller's range.
            let ptr = unsafe { ptr.add(start) }.as_ptr();
            let (local, at) = (LocalMemory { ptr, len: piece, descriptor }, offset + start);
            let mut taken = PostStatus::Again;
            if device.posts_here() && link.backlog() == 0 {
                // SAFETY: the callers of `put` and `get` promise to keep the memory as it is until
                // a `quiet`; the lease keeps it registered and mapped, beyond its own end if need
                // be.
                let result = unsafe {
                    if is_write {
                        link.write(device.port(), local, at)
                    } else {
                        link.read(device.port(), local, at)
                    }
                };
                taken = result.map_err(|error| link.fail_call(&error))?;
            }
            if taken == PostStatus::Again {
                let waiting = if is_write {
                    Op::Write { src: local, offset: at }
                } else {
                    Op::Read { dst: local, offset: at }
                };
                device.enqueue(link, op, waiting)?;
            }
            self.num_writes += u64::from(is_write);
            start += piece;
        }
        Ok(())
    }

    /// True if all operations are complete and the peer has answered the last question.
    fn is_quiet(&self) -> bool {
        let link = &self.lease.link;
        link.backlog() == 0 && link.outstanding() == 0 && link.answered() >= self.num_asked
    }
}

impl Endpoint for LibfabricEndpoint {
    type RemoteKey = SlotKey;

    fn kind(&self) -> TransportKind {
        TransportKind::Libfabric
    }

    fn register(&mut self, region: &Region) -> Result<(), PostError> {
        let port = self.lease.device.port();
        let registered = if port.needs_local() {
            let registered = port.register_region(region, Rights::Local);
            Some(registered.map_err(|error| PostError::Register {
                bytes: region.len(),
                detail: error.to_string(),
            })?)
        } else {
            None
        };
        self.lease.sources.push(Source { registered, region: region.clone() });
        Ok(())
    }

    fn direct(&self, _key: SlotKey) -> Option<NonNull<u8>> {
        None
    }

    unsafe fn put(&mut self, dst: RemoteRange<SlotKey>, src: LocalRange) -> Result<(), PostError> {
        let len = src.len();
        check_range(PUT, dst.offset, len, self.remote.slot_bytes)?;
        if len == 0 {
            return Ok(());
        }
        let descriptor = self.descriptor(PUT, &src)?;
        self.is_open = true;
        let bytes = part_bytes(len);
        if HEADER_BYTES + bytes > self.max_message_bytes {
            return self.transfer(PUT, (src.as_ptr(), len), dst.offset, descriptor);
        }
        if self.message.len() + bytes > self.max_message_bytes {
            self.send(PUT, Action::Nothing)?;
        }
        // The slot has at most 4 GiB, and the range is within it and not empty.
        message::push_part_head(&mut self.message, dst.offset as u32, len as u32);
        let at = self.message.len();
        self.message.resize(at + len.next_multiple_of(8), 0);
        // SAFETY: `len` bytes from `at` on were just made; the caller keeps `src` unwritten.
        unsafe {
            let room = self.message.as_mut_ptr().add(at);
            std::ptr::copy_nonoverlapping(src.as_ptr().as_ptr(), room, len);
        }
        self.num_parts += 1;
        Ok(())
    }

    unsafe fn get(&mut self, dst: LocalRange, src: RemoteRange<SlotKey>) -> Result<(), PostError> {
        check_range(GET, src.offset, dst.len(), self.remote.slot_bytes)?;
        if dst.is_empty() {
            return Ok(());
        }
        let descriptor = self.descriptor(GET, &dst)?;
        self.transfer(GET, (dst.as_ptr(), dst.len()), src.offset, descriptor)
    }

    #[inline]
    fn add_flag(&mut self, dst: RemoteRange<SlotKey>, value: u64) -> Result<(), PostError> {
        check_flag(ADD, dst.offset, self.remote.slot_bytes)?;
        self.is_open = true;
        self.send(ADD, Action::Add { offset: dst.offset as u32, value })
    }

    fn fence(&mut self) -> Result<(), PostError> {
        match self.quiet(Instant::now() + FENCE_TIMEOUT) {
            Ok(()) => Ok(()),
            Err(QuietError::Post(error)) => Err(error),
            Err(error @ QuietError::Deadline { .. }) => {
                Err(PostError::Transport { op: "fence", code: 110, detail: error.to_string() })
            }
        }
    }

    fn quiet(&mut self, deadline: Instant) -> Result<(), QuietError> {
        if self.is_open {
            let id = self.num_asked + 1;
            self.send("quiet", Action::Answer { id })?;
            self.num_asked = id;
            self.is_open = false;
        }
        let mut num_rounds = 0u32;
        while !self.is_quiet() {
            self.lease.link.health()?;
            if self.lease.link.is_peer_closed() {
                return Err(PostError::Disconnected { op: "quiet" }.into());
            }
            self.lease.device.drive();
            num_rounds += 1;
            let is_pause = num_rounds.is_multiple_of(64);
            // Also after the first round: a caller that only polls passes an expired deadline.
            if (num_rounds == 1 || is_pause) && Instant::now() >= deadline {
                let link = &self.lease.link;
                let unanswered = usize::from(link.answered() < self.num_asked);
                let outstanding = link.outstanding() + link.backlog() + unanswered;
                return Err(QuietError::Deadline { outstanding });
            }
            if is_pause {
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    fn wake(&mut self, _key: SlotKey, _waiting_offset: usize) -> Result<(), PostError> {
        // The peer's driver adds to the flag itself, and wakes a thread that sleeps on it.
        Ok(())
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.lease.link.wake_fd().as_fd())
    }
}

p2p_core::unbatched!(LibfabricEndpoint);

impl Progress for LibfabricEndpoint {
    p2p_core::default_progress! { has_room, has_room_to_spare, try_fence, marks }

    fn driver(&self) -> Option<Arc<dyn Driver>> {
        Some(Arc::clone(&self.lease.device) as _)
    }

    #[inline]
    fn health(&self) -> Result<(), PostError> {
        self.lease.link.health()
    }

    fn add_flag_lazily(&mut self, dst: RemoteRange<SlotKey>, value: u64) -> Result<(), PostError> {
        check_flag(ADD, dst.offset, self.remote.slot_bytes)?;
        let Lease { device, link, .. } = &self.lease;
        link.health()?;
        if self.num_parts == 0 && device.add_credit(link, dst.offset as u32, value) {
            self.is_open = true;
            return Ok(());
        }
        self.add_flag(dst, value)
    }

    fn is_settled(&mut self) -> Result<bool, PostError> {
        // Small puts were copied; questions to the peer would only tell of the rest.
        let Lease { device, link, .. } = &self.lease;
        link.health()?;
        if link.backlog() == 0 && link.outstanding() == 0 {
            return Ok(true);
        }
        device.drive();
        Ok(link.backlog() == 0 && link.outstanding() == 0)
    }
}

const PUT: &str = "put";
const GET: &str = "get";
const ADD: &str = "add_flag";
/// Largest single write or read.
const MAX_PIECE_BYTES: usize = 1 << 30;
/// Time limit of a fence, which completes all earlier operations.
const FENCE_TIMEOUT: Duration = Duration::from_secs(5);
