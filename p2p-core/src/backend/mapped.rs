//! The endpoint of every transport whose peer memory is mapped here: puts are stores.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Instant;

use crate::copy::copy_out;
use crate::endpoint::{Endpoint, PostError, QuietError, TransportKind};
use crate::flags::{self, Contract};
use crate::region::{LocalRange, Region, RemoteRange, SlotKey};
use crate::wait::signal_peer;

/// An endpoint over a mapping of the peer's slot.
#[derive(Debug)]
pub struct MappedEndpoint {
    kind: TransportKind,
    remote: Region,
    wake_peer: Arc<OwnedFd>,
    wake_self: Arc<OwnedFd>,
}

impl MappedEndpoint {
    /// Endpoint over `remote`, the mapping of the peer's slot. `wake_peer` is the event descriptor that
    /// the peer waits on, `wake_self` the one that this side waits on.
    #[must_use]
    pub const fn new(
        kind: TransportKind,
        remote: Region,
        wake_peer: Arc<OwnedFd>,
        wake_self: Arc<OwnedFd>,
    ) -> Self {
        Self { kind, remote, wake_peer, wake_self }
    }

    /// Checks that an access stays inside the peer's slot.
    pub fn check(&self, op: &'static str, offset: usize, len: usize) -> Result<(), PostError> {
        self.target(op, offset, len).map(|_| ())
    }

    fn target(
        &self,
        op: &'static str,
        offset: usize,
        len: usize,
    ) -> Result<NonNull<u8>, PostError> {
        let region_bytes = self.remote.len();
        match offset.checked_add(len) {
            // SAFETY: offset + len <= the mapping's length.
            Some(end) if end <= region_bytes => Ok(unsafe { self.remote.as_ptr().add(offset) }),
            _ => Err(PostError::RemoteRange { op, offset, len, region_bytes }),
        }
    }

    fn word(&self, op: &'static str, offset: usize) -> Result<&AtomicU64, PostError> {
        let target = self.target(op, offset, 8)?;
        if !offset.is_multiple_of(8) {
            return Err(PostError::Misaligned { op, offset });
        }
        // SAFETY: in range and 8-byte aligned (mappings are page-aligned); mapped as long as `self`;
        // flags are accessed atomically on both sides.
        Ok(unsafe { AtomicU64::from_ptr(target.as_ptr().cast()) })
    }
}

impl Endpoint for MappedEndpoint {
    type RemoteKey = SlotKey;

    fn kind(&self) -> TransportKind {
        self.kind
    }

    fn direct(&self, _key: SlotKey) -> Option<NonNull<u8>> {
        Some(self.remote.as_ptr())
    }

    unsafe fn put(&mut self, dst: RemoteRange<SlotKey>, src: LocalRange) -> Result<(), PostError> {
        let target = self.target("put", dst.offset, dst.len.max(src.len()))?;
        // SAFETY: both ranges were checked; the caller keeps `src` unwritten; a slot of a peer never
        // overlaps local memory that is registered as a source.
        unsafe { copy_out(src.as_ptr().as_ptr(), target.as_ptr(), src.len()) };
        Ok(())
    }

    unsafe fn get(&mut self, dst: LocalRange, src: RemoteRange<SlotKey>) -> Result<(), PostError> {
        let target = self.target("get", src.offset, src.len.max(dst.len()))?;
        // SAFETY: as for `put`, with the roles exchanged.
        unsafe {
            std::ptr::copy_nonoverlapping(target.as_ptr(), dst.as_ptr().as_ptr(), dst.len());
        }
        Ok(())
    }

    fn add_flag(&mut self, dst: RemoteRange<SlotKey>, value: u64) -> Result<(), PostError> {
        // Puts are stores of this thread, so releasing them orders them ahead of the sum.
        flags::add::<Contract>(self.word("add_flag", dst.offset)?, value);
        Ok(())
    }

    fn fence(&mut self) -> Result<(), PostError> {
        fence(Ordering::SeqCst);
        Ok(())
    }

    fn quiet(&mut self, _deadline: Instant) -> Result<(), QuietError> {
        fence(Ordering::SeqCst);
        Ok(())
    }

    fn wake(&mut self, _key: SlotKey, waiting_offset: usize) -> Result<(), PostError> {
        // SYNC POINT `waiting`: pairs with `Channel::arm`.
        if !flags::must_wake::<Contract, _>(self.word("wake", waiting_offset)?) {
            return Ok(());
        }
        signal_peer(self.wake_peer.as_fd()).map_err(|e| PostError::Transport {
            op: "wake",
            code: e.raw_os_error().unwrap_or(0).into(),
            detail: e.to_string(),
        })
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.wake_self.as_fd())
    }
}
