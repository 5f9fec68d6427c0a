//! The endpoint of every transport that maps the peer's memory into this process: puts are stores.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Instant;

use crate::copy::copy_out;
use crate::endpoint::checks::{check_flag, check_range};
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
    /// Endpoint over `remote`, the mapping of the peer's slot. The peer waits on the event descriptor `wake_peer`, this
    /// side on `wake_self`.
    #[must_use]
    pub const fn new(
        kind: TransportKind,
        remote: Region,
        wake_peer: Arc<OwnedFd>,
        wake_self: Arc<OwnedFd>,
    ) -> Self {
        Self { kind, remote, wake_peer, wake_self }
    }

    /// Bytes of the peer's slot.
    #[cfg(feature = "test-transports")]
    pub(super) fn remote_bytes(&self) -> usize {
        self.remote.len()
    }

    fn target(
        &self,
        op: &'static str,
        offset: usize,
        len: usize,
    ) -> Result<NonNull<u8>, PostError> {
        check_range(op, offset, len, self.remote.len())?;
        // SAFETY: offset + len <= the mapping's length.
        Ok(unsafe { self.remote.as_ptr().add(offset) })
    }

    fn word(&self, op: &'static str, offset: usize) -> Result<&AtomicU64, PostError> {
        check_flag(op, offset, self.remote.len())?;
        // SAFETY: in range and 8-byte aligned (mappings are page-aligned); mapped as long as `self`; both sides access
        // flags atomically.
        Ok(unsafe { AtomicU64::from_ptr(self.remote.as_ptr().add(offset).as_ptr().cast()) })
    }
}

impl Endpoint for MappedEndpoint {
    type RemoteKey = SlotKey;

    fn kind(&self) -> TransportKind {
        self.kind
    }

    fn register(&mut self, _region: &Region) -> Result<(), PostError> {
        Ok(())
    }

    fn direct(&self, _key: SlotKey) -> Option<NonNull<u8>> {
        Some(self.remote.as_ptr())
    }

    unsafe fn put(&mut self, dst: RemoteRange<SlotKey>, src: LocalRange) -> Result<(), PostError> {
        let target = self.target("put", dst.offset, dst.len.max(src.len()))?;
        // SAFETY: both ranges are checked; the caller keeps `src` unwritten; a peer's slot never overlaps local memory
        // that is registered as a source.
        unsafe { copy_out(src.as_ptr().as_ptr(), target.as_ptr(), src.len()) };
        Ok(())
    }

    unsafe fn get(&mut self, dst: LocalRange, src: RemoteRange<SlotKey>) -> Result<(), PostError> {
        let target = self.target("get", src.offset, src.len.max(dst.len()))?;
        // SAFETY: as in `put`, with source and target exchanged.
        unsafe {
            std::ptr::copy_nonoverlapping(target.as_ptr(), dst.as_ptr().as_ptr(), dst.len());
        }
        Ok(())
    }

    fn add_flag(&mut self, dst: RemoteRange<SlotKey>, value: u64) -> Result<(), PostError> {
        // Puts are stores of this thread, so the release of the sum orders them before it.
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

crate::unbatched!(MappedEndpoint);
crate::immediate_progress!(MappedEndpoint);
