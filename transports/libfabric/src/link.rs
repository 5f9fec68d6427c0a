//! State that a pair's endpoint shares with the driver of its device.

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::os::fd::{AsFd, OwnedFd};

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use super::fi_endpoint::{CompletionPoint, ContextRoom, PostStatus, RemoteMemory};
use super::mailbox::{self, MailboxAddress, NUM_CELLS};
use super::message::{self, Action, Credit, Header};
use super::outbox::{LocalMemory, Op, Outbox, PushStatus};
use super::owner::CallError;
use super::port::Port;
use super::sys;
use p2p_core::endpoint::PostError;
use p2p_core::flags::{self, Contract};
use p2p_core::region::{MapError, Region};
use p2p_core::wait::signal_event;

/// One pair.
#[derive(Debug)]
pub(super) struct Link {
    /// This side's slot, as the peer's messages must name it.
    pub(super) id: u32,
    /// Secret that the peer's messages must carry.
    pub(super) token: u64,
    pub(super) slot: Region,
    /// Address of this side's mailbox, if it has one.
    pub(super) mail: Option<MailboxAddress>,
    waiting_offset: usize,
    wake: OwnedFd,
    remote: OnceLock<RemoteEndpoint>,
    /// Operations that the library has refused so far, or that the library thread must post.
    outbox: Outbox,
    contexts: Box<[Context]>,
    /// Accepted writes and reads that are not complete.
    outstanding: AtomicUsize,
    /// Accepted writes.
    num_posted: AtomicU64,
    /// Completed writes.
    num_written: AtomicU64,
    /// Number of the last question that the peer answered.
    answered: AtomicU64,
    /// Lazy additions of this side: their sum, their flag, the part of the sum that was sent, and
    /// whether the pair is in the driver's queue.
    credit_total: AtomicU64,
    credit_offset: OnceLock<u32>,
    credit_sent: AtomicU64,
    is_credit_queued: AtomicBool,
    /// The part of the peer's sum that was added here. Only the driving thread uses it.
    credit_landed: AtomicU64,
    /// Mails of the peer that were read here, and mails of this side that the peer reports as read.
    mails_read: AtomicU32,
    mails_taken: AtomicU32,
    /// True once the peer has closed its side: it no longer sees later messages.
    is_peer_closed: AtomicBool,
    failed: AtomicBool,
    failure: Mutex<Option<(&'static str, i64, String)>>,
}

/// The peer's side of a joined pair.
#[derive(Debug, Clone)]
pub(super) struct RemoteEndpoint {
    pub(super) peer: sys::FiAddr,
    /// The peer's slot, as messages to it must name it.
    pub(super) id: u32,
    pub(super) token: u64,
    pub(super) address: u64,
    pub(super) key: u64,
    pub(super) slot_bytes: usize,
    /// Address of the peer's mailbox, if it has one.
    pub(super) mail: Option<MailboxAddress>,
    /// True if messages count the writes before them, and the peer restores the order of both.
    pub(super) counts_writes: bool,
}

/// Context of a posted operation. The library returns it with the completion.
#[repr(C)]
pub(super) struct Context {
    room: UnsafeCell<ContextRoom>,
    /// True for a receive buffer, false for another operation.
    pub(super) is_receive: bool,
    /// Index of the buffer, or of the pair in the device's table.
    pub(super) owner: u32,
    is_write: AtomicBool,
    is_busy: AtomicBool,
}

// SAFETY: plain values; only the library uses `room` while an operation runs.
unsafe impl Sync for Context {}
// SAFETY: as above.
unsafe impl Send for Context {}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context").field("owner", &self.owner).finish_non_exhaustive()
    }
}

impl Context {
    pub(super) fn new(is_receive: bool, owner: u32) -> Self {
        Self {
            room: UnsafeCell::new([0; 8]),
            is_receive,
            owner,
            is_write: AtomicBool::new(false),
            is_busy: AtomicBool::new(false),
        }
    }

    pub(super) const fn as_ptr(&self) -> *mut c_void {
        std::ptr::from_ref(self).cast_mut().cast()
    }
}

impl Link {
    pub(super) fn new(
        id: u32,
        slot: Region,
        mail: Option<MailboxAddress>,
        waiting_offset: usize,
        wake: OwnedFd,
        outbox: Outbox,
    ) -> Self {
        let idx = id & IDX_MASK;
        Self {
            id,
            token: rand::random(),
            slot,
            mail,
            waiting_offset,
            wake,
            remote: OnceLock::new(),
            outbox,
            contexts: (0..NUM_CONTEXTS).map(|_| Context::new(false, idx)).collect(),
            outstanding: AtomicUsize::new(0),
            num_posted: AtomicU64::new(0),
            num_written: AtomicU64::new(0),
            answered: AtomicU64::new(0),
            credit_total: AtomicU64::new(0),
            credit_offset: OnceLock::new(),
            credit_sent: AtomicU64::new(0),
            is_credit_queued: AtomicBool::new(false),
            credit_landed: AtomicU64::new(0),
            mails_read: AtomicU32::new(0),
            mails_taken: AtomicU32::new(0),
            is_peer_closed: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            failure: Mutex::default(),
        }
    }

    pub(super) fn join(&self, remote: RemoteEndpoint) {
        let _ = self.remote.set(remote);
    }

    #[inline]
    pub(super) fn remote(&self) -> Option<&RemoteEndpoint> {
        self.remote.get()
    }

    pub(super) const fn wake_fd(&self) -> &OwnedFd {
        &self.wake
    }

    #[inline]
    pub(super) fn outstanding(&self) -> usize {
        self.outstanding.load(Ordering::Acquire)
    }

    #[inline]
    pub(super) fn backlog(&self) -> usize {
        self.outbox.num()
    }

    #[inline]
    pub(super) fn answered(&self) -> u64 {
        self.answered.load(Ordering::Acquire)
    }

    pub(super) fn num_posted(&self) -> u64 {
        self.num_posted.load(Ordering::Acquire)
    }

    #[inline]
    pub(super) fn is_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    #[inline]
    pub(super) fn is_peer_closed(&self) -> bool {
        self.is_peer_closed.load(Ordering::Acquire)
    }

    /// Records that the peer has closed its side.
    pub(super) fn mark_peer_closed(&self) {
        self.is_peer_closed.store(true, Ordering::Release);
        self.wake_owner();
    }

    /// # Errors
    /// The reason why the pair failed, if it has.
    pub(super) fn health(&self) -> Result<(), PostError> {
        if !self.is_failed() {
            return Ok(());
        }
        let failure = lock(&self.failure).clone();
        let (op, code, detail) = failure.unwrap_or(("libfabric", 0, "failed".to_owned()));
        Err(PostError::Transport { op, code, detail })
    }

    /// Fails the pair and wakes its owner. Only the first reason is kept.
    pub(super) fn fail(&self, op: &'static str, code: i64, detail: String) {
        {
            let mut failure = lock(&self.failure);
            if failure.is_some() {
                return;
            }
            tracing::debug!(op, code, detail, slot = self.id, "a libfabric pair failed");
            *failure = Some((op, code, detail));
        }
        self.failed.store(true, Ordering::Release);
        self.wake_owner();
    }

    pub(super) fn fail_call(&self, error: &CallError) -> PostError {
        self.fail(error.op, error.code, error.text.clone());
        PostError::Transport { op: error.op, code: error.code, detail: error.text.clone() }
    }

    /// Copies the parts of a message into the slot and carries out its action. Returns the number
    /// of the question to answer, if it is one.
    #[inline]
    pub(super) fn deliver(
        &self,
        header: &Header,
        message: &[u8],
    ) -> Result<Option<u64>, message::MessageError> {
        header.for_each_part(message, self.slot.len(), |offset, payload| {
            // SAFETY: the range was checked against the slot's length, which stays mapped; the
            // source is the driver's own buffer.
            unsafe {
                let dst = self.slot.as_ptr().add(offset).as_ptr();
                p2p_core::copy::copy_out(payload.as_ptr(), dst, payload.len());
            }
        })?;
        if header.credit.total > 0 {
            // Relaxed: only the driving thread uses it, under the device's lock.
            let landed = self.credit_landed.load(Ordering::Relaxed);
            if header.credit.total > landed {
                self.credit_landed.store(header.credit.total, Ordering::Relaxed);
                self.add(header.credit.offset, header.credit.total - landed);
            }
        }
        match header.action {
            Action::Nothing | Action::Credit | Action::Farewell => Ok(None),
            Action::Answer { id } => Ok(Some(id)),
            Action::Answered { id } => {
                self.answered.fetch_max(id, Ordering::Release);
                Ok(None)
            }
            Action::Add { offset, value } => {
                self.add(offset, value);
                Ok(None)
            }
        }
    }

    /// Adds to a flag of the slot on the peer's behalf. `offset` was checked.
    #[inline]
    fn add(&self, offset: u32, value: u64) {
        // SYNC POINT `published`, SYNC POINT `consumed`: releases the bytes copied before.
        flags::add::<Contract>(self.word(offset as usize), value);
        // SYNC POINT `waiting`: either this sees the owner's request, or its second look sees the
        // sum.
        if flags::must_wake::<Contract, _>(self.word(self.waiting_offset)) {
            self.wake_owner();
        }
    }

    /// Records a lazy addition. Returns `None` if earlier ones are to another flag. Otherwise
    /// returns true if the caller must put the pair into the driver's queue.
    pub(super) fn add_credit(&self, offset: u32, value: u64) -> Option<bool> {
        if *self.credit_offset.get_or_init(|| offset) != offset {
            return None;
        }
        // Release: this thread's reads of the frames that it gives back come before the sum is
        // sent.
        self.credit_total.fetch_add(value, Ordering::Release);
        Some(!self.is_credit_queued.swap(true, Ordering::AcqRel))
    }

    /// The sum of all lazy additions so far, for a message that carries it.
    #[inline]
    pub(super) fn take_credit(&self) -> Credit {
        let total = self.credit_total.load(Ordering::Acquire);
        if total == 0 {
            return Credit::default();
        }
        self.credit_sent.fetch_max(total, Ordering::AcqRel);
        Credit { offset: self.credit_offset.get().copied().unwrap_or_default(), total }
    }

    /// Sends lazy additions that no message has carried. Returns false if it must be retried.
    pub(super) fn flush_credit(&self, port: &Port) -> bool {
        // Later additions queue the pair again; earlier ones are in the sum that is read below.
        self.is_credit_queued.swap(false, Ordering::AcqRel);
        let total = self.credit_total.load(Ordering::Acquire);
        let sent = self.credit_sent.load(Ordering::Acquire);
        if sent >= total || self.is_failed() || self.is_peer_closed() {
            return true;
        }
        let Some(message) = self.unnumbered(Action::Credit, 0) else { return true };
        match self.inject(port, &message) {
            Ok(PostStatus::Accepted) => true,
            Ok(PostStatus::Again) => {
                self.is_credit_queued.store(true, Ordering::Release);
                self.credit_sent.store(sent, Ordering::Release);
                false
            }
            Err(error) => {
                let _ = self.fail_call(&error);
                true
            }
        }
    }

    /// A message that the driver sends by itself. `None` before the peer is joined.
    pub(super) fn unnumbered(
        &self,
        action: Action,
        writes: u64,
    ) -> Option<[u8; message::HEADER_BYTES]> {
        let remote = self.remote.get()?;
        let credit = self.take_credit();
        let (slot, token) = (remote.id, remote.token);
        let mails = self.mails_read();
        let header = Header { slot, seq: 0, token, writes, action, credit, num_parts: 0, mails };
        let mut message = [0; message::HEADER_BYTES];
        header.encode(&mut message);
        Some(message)
    }

    fn wake_owner(&self) {
        if let Err(error) = signal_event(self.wake.as_fd()) {
            tracing::error!(%error, "cannot wake the owner of a slot");
        }
    }

    /// A 64-bit word of the slot. `offset` was checked to be aligned and within it.
    fn word(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: aligned and within the slot, which stays mapped; flags are only accessed
        // atomically.
        unsafe { AtomicU64::from_ptr(self.slot.as_ptr().add(offset).as_ptr().cast()) }
    }

    /// True if `after_writes` writes are complete, so that a message behind them may be sent.
    #[inline]
    pub(super) fn may_send(&self, after_writes: u64) -> bool {
        self.num_written.load(Ordering::Acquire) >= after_writes
    }

    /// Queues `op`. Also returns true if it is the only queued operation.
    #[inline]
    pub(super) fn enqueue(&self, op: Op<'_>) -> Result<(PushStatus, bool), MapError> {
        self.outbox.push(op)
    }

    /// Passes queued operations to the library until it refuses one. Returns true if the last one
    /// left.
    pub(super) fn flush(&self, port: &Port) -> bool {
        self.outbox.flush(|op| {
            if self.is_failed() || self.is_peer_closed() {
                return None;
            }
            let taken = match op {
                Op::Message { after_writes, .. } if !self.may_send(after_writes) => {
                    Ok(PostStatus::Again)
                }
                Op::Message { bytes, .. } => self.inject(port, bytes),
                // SAFETY: the creator of the operation keeps its memory until it is complete.
                Op::Write { src, offset } => unsafe { self.write(port, src, offset) },
                // SAFETY: as above.
                Op::Read { dst, offset } => unsafe { self.read(port, dst, offset) },
            };
            taken.map_err(|error| self.fail_call(&error)).ok()
        })
    }

    /// Drops queued operations for good. Returns true if there were any.
    pub(super) fn discard(&self) -> bool {
        self.outbox.close()
    }

    #[inline]
    pub(super) fn inject(&self, port: &Port, bytes: &[u8]) -> Result<PostStatus, CallError> {
        let Some(remote) = self.remote.get() else { return Ok(PostStatus::Again) };
        port.endpoint().inject(remote.peer, bytes)
    }

    /// Mails of the peer that were read, modulo 2³².
    #[inline]
    pub(super) fn mails_read(&self) -> u32 {
        self.mails_read.load(Ordering::Acquire)
    }

    /// Records that a mail was read. The peer may reuse its cell once it learns that.
    #[inline]
    pub(super) fn set_mails_read(&self, num_read: u32) {
        // SYNC POINT `mail`: releases the cell after it was copied.
        self.mails_read.store(num_read, Ordering::Release);
    }

    /// Records how many mails the peer reports as read.
    #[inline]
    pub(super) fn note_mails_taken(&self, num_taken: u32) {
        // Only the driving thread stores. A delayed message may carry an older number.
        let known = self.mails_taken.load(Ordering::Relaxed);
        if num_taken.wrapping_sub(known).cast_signed() > 0 {
            self.mails_taken.store(num_taken, Ordering::Release);
        }
    }

    /// Writes `message` as mail `number` to the peer. Returns [`PostStatus::Again`] if it does not
    /// fit or no cell is free.
    #[inline]
    pub(super) fn post_mail(
        &self,
        port: &Port,
        number: u64,
        message: &[u8],
    ) -> Result<PostStatus, CallError> {
        let Some((remote, offer)) =
            self.remote.get().and_then(|remote| Some((remote, remote.mail?)))
        else {
            return Ok(PostStatus::Again);
        };
        let taken = self.mails_taken.load(Ordering::Acquire);
        if (number as u32).wrapping_sub(1).wrapping_sub(taken) >= NUM_CELLS {
            return Ok(PostStatus::Again);
        }
        let Some((cell, len)) = mailbox::encode_cell(number, remote.token, message) else {
            return Ok(PostStatus::Again);
        };
        let address = offer.address + mailbox::offset_of(number);
        let to = RemoteMemory { peer: remote.peer, address, key: offer.key };
        port.endpoint().inject_write(to, &bytemuck::cast_slice(&cell)[..len])
    }

    /// Starts a copy of `src` to `offset` of the peer's slot.
    ///
    /// # Safety
    /// The memory of `src` stays registered, mapped and unwritten until the operation is complete.
    pub(super) unsafe fn write(
        &self,
        port: &Port,
        src: LocalMemory,
        offset: usize,
    ) -> Result<PostStatus, CallError> {
        let Some(remote) = self.remote.get() else { return Ok(PostStatus::Again) };
        let completion = if remote.counts_writes {
            CompletionPoint::Sent {
                note: note_of(remote.id, remote.token, port.traits().has_wide_notes),
            }
        } else {
            CompletionPoint::Delivered
        };
        let to = RemoteMemory {
            peer: remote.peer,
            address: remote.address + offset as u64,
            key: remote.key,
        };
        let taken = self.with_context(true, |context| {
            // SAFETY: the caller's promise; the context belongs to this pair, which outlives its
            // operations.
            unsafe {
                port.endpoint().write(to, (src.ptr, src.len), src.descriptor, completion, context)
            }
        })?;
        if taken == PostStatus::Accepted {
            self.num_posted.fetch_add(1, Ordering::Release);
        }
        Ok(taken)
    }

    /// Starts a copy from `offset` of the peer's slot into `dst`.
    ///
    /// # Safety
    /// The memory of `dst` stays registered, mapped and untouched until the operation is complete.
    pub(super) unsafe fn read(
        &self,
        port: &Port,
        dst: LocalMemory,
        offset: usize,
    ) -> Result<PostStatus, CallError> {
        let Some(remote) = self.remote.get() else { return Ok(PostStatus::Again) };
        let from = RemoteMemory {
            peer: remote.peer,
            address: remote.address + offset as u64,
            key: remote.key,
        };
        self.with_context(false, |context| {
            // SAFETY: as for a write.
            unsafe { port.endpoint().read(from, (dst.ptr, dst.len), dst.descriptor, context) }
        })
    }

    fn with_context(
        &self,
        is_write: bool,
        post: impl FnOnce(*mut c_void) -> Result<PostStatus, CallError>,
    ) -> Result<PostStatus, CallError> {
        let Some(context) =
            self.contexts.iter().find(|context| !context.is_busy.swap(true, Ordering::AcqRel))
        else {
            return Ok(PostStatus::Again);
        };
        context.is_write.store(is_write, Ordering::Relaxed);
        self.outstanding.fetch_add(1, Ordering::AcqRel);
        let taken = post(context.as_ptr());
        if !matches!(taken, Ok(PostStatus::Accepted)) {
            self.outstanding.fetch_sub(1, Ordering::AcqRel);
            context.is_busy.store(false, Ordering::Release);
        }
        taken
    }

    /// Records the completion of one of this pair's operations.
    pub(super) fn complete(&self, context: &Context) {
        if context.is_write.load(Ordering::Relaxed) {
            self.num_written.fetch_add(1, Ordering::Release);
        }
        context.is_busy.store(false, Ordering::Release);
        self.outstanding.fetch_sub(1, Ordering::AcqRel);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code that holds these locks can leave the contents half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The bits of a slot's name that are its index in the device's table.
pub(super) const IDX_MASK: u32 = 0xffff;
/// Most running writes and reads of one pair.
const NUM_CONTEXTS: usize = 64;
/// Notification of a counted write: the slot and, if there is room, half of the pair's secret, so
/// that no peer can count for another.
pub(super) fn note_of(slot: u32, token: u64, has_secret: bool) -> u64 {
    u64::from(slot) | if has_secret { token << 32 } else { 0 }
}
