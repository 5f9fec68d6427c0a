//! The endpoint of a connection, whichever transport the handshake chose.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::time::Instant;

use crate::backend::mapped::{MappedEndpoint, MappedKey};
use crate::backend::staged::StagedEndpoint;
use crate::endpoint::{Endpoint, PostError, QuietError, TransportKind};
use crate::region::{LocalRange, RemoteRange};

/// One of the transports, matched once per call.
#[derive(Debug)]
#[non_exhaustive]
pub enum AnyEndpoint {
    /// The peer's slot is mapped here.
    Mapped(MappedEndpoint),
    /// The peer's slot is reached by put and get only.
    Staged(StagedEndpoint),
}

/// Remote key of an [`AnyEndpoint`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AnyKey {
    /// The slot that the mapping holds.
    Mapped(MappedKey),
}

impl AnyKey {
    const fn mapped(self) -> MappedKey {
        match self {
            Self::Mapped(key) => key,
        }
    }
}

/// The same call on whichever endpoint it is.
macro_rules! on {
    ($any:expr, $end:ident => $call:expr) => {
        match $any {
            Self::Mapped($end) => $call,
            Self::Staged($end) => $call,
        }
    };
}

impl Endpoint for AnyEndpoint {
    type RemoteKey = AnyKey;

    fn kind(&self) -> TransportKind {
        on!(self, end => end.kind())
    }

    fn direct(&self, key: AnyKey) -> Option<NonNull<u8>> {
        on!(self, end => end.direct(key.mapped()))
    }

    unsafe fn put(&mut self, dst: RemoteRange<AnyKey>, src: LocalRange) -> Result<(), PostError> {
        // SAFETY: the caller's promise about `src` is the callee's.
        on!(self, end => unsafe { end.put(mapped(dst), src) })
    }

    unsafe fn get(&mut self, dst: LocalRange, src: RemoteRange<AnyKey>) -> Result<(), PostError> {
        // SAFETY: the caller's promise about `dst` is the callee's.
        on!(self, end => unsafe { end.get(dst, mapped(src)) })
    }

    fn add_flag(&mut self, dst: RemoteRange<AnyKey>, value: u64) -> Result<(), PostError> {
        on!(self, end => end.add_flag(mapped(dst), value))
    }

    fn fence(&mut self) -> Result<(), PostError> {
        on!(self, end => end.fence())
    }

    fn quiet(&mut self, deadline: Instant) -> Result<(), QuietError> {
        on!(self, end => end.quiet(deadline))
    }

    fn wake(&mut self, key: AnyKey, waiting_offset: usize) -> Result<(), PostError> {
        on!(self, end => end.wake(key.mapped(), waiting_offset))
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        on!(self, end => end.wait_fd())
    }
}

fn mapped(range: RemoteRange<AnyKey>) -> RemoteRange<MappedKey> {
    RemoteRange { key: range.key.mapped(), offset: range.offset, len: range.len }
}
