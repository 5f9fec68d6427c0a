//! The endpoint of a connection, whichever transport the handshake chose.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

use crate::backend::mapped::MappedEndpoint;
use crate::endpoint::{Endpoint, Marks, PostError, QuietError, TransportKind};
use crate::region::{LocalRange, Region, RemoteRange, SlotKey};
use crate::wait::Driver;

/// One of the transports, matched once per call.
#[derive(Debug)]
#[non_exhaustive]
pub enum AnyEndpoint {
    /// The peer's slot is mapped here.
    Mapped(MappedEndpoint),
    /// A transport over a network, at the price of an indirect call.
    Other(Box<dyn OtherEndpoint>),
}

/// An endpoint that [`AnyEndpoint`] can hold without knowing its type.
pub trait OtherEndpoint: Endpoint<RemoteKey = SlotKey> + std::fmt::Debug {}

impl<E: Endpoint<RemoteKey = SlotKey> + std::fmt::Debug> OtherEndpoint for E {}

/// The same call on whichever endpoint it is.
macro_rules! on {
    ($any:expr, $end:ident => $call:expr) => {
        match $any {
            Self::Mapped($end) => $call,
            Self::Other($end) => $call,
        }
    };
}

impl Endpoint for AnyEndpoint {
    type RemoteKey = SlotKey;

    fn kind(&self) -> TransportKind {
        on!(self, end => end.kind())
    }

    fn register(&mut self, region: &Region) -> Result<(), PostError> {
        on!(self, end => end.register(region))
    }

    fn driver(&self) -> Option<Arc<dyn Driver>> {
        on!(self, end => end.driver())
    }

    fn health(&self) -> Result<(), PostError> {
        on!(self, end => end.health())
    }

    fn direct(&self, key: SlotKey) -> Option<NonNull<u8>> {
        on!(self, end => end.direct(key))
    }

    unsafe fn put(&mut self, dst: RemoteRange<SlotKey>, src: LocalRange) -> Result<(), PostError> {
        // SAFETY: the caller's promise about `src` is the callee's.
        on!(self, end => unsafe { end.put(dst, src) })
    }

    unsafe fn get(&mut self, dst: LocalRange, src: RemoteRange<SlotKey>) -> Result<(), PostError> {
        // SAFETY: the caller's promise about `dst` is the callee's.
        on!(self, end => unsafe { end.get(dst, src) })
    }

    fn add_flag(&mut self, dst: RemoteRange<SlotKey>, value: u64) -> Result<(), PostError> {
        on!(self, end => end.add_flag(dst, value))
    }

    fn add_flag_lazily(&mut self, dst: RemoteRange<SlotKey>, value: u64) -> Result<(), PostError> {
        on!(self, end => end.add_flag_lazily(dst, value))
    }

    fn begin_batch(&mut self) {
        on!(self, end => end.begin_batch());
    }

    fn flush(&mut self) -> Result<(), PostError> {
        on!(self, end => end.flush())
    }

    fn has_room(&mut self) -> bool {
        on!(self, end => end.has_room())
    }

    fn has_room_to_spare(&mut self) -> bool {
        on!(self, end => end.has_room_to_spare())
    }

    fn fence(&mut self) -> Result<(), PostError> {
        on!(self, end => end.fence())
    }

    fn try_fence(&mut self) -> Result<bool, PostError> {
        on!(self, end => end.try_fence())
    }

    fn quiet(&mut self, deadline: Instant) -> Result<(), QuietError> {
        on!(self, end => end.quiet(deadline))
    }

    fn is_settled(&mut self) -> Result<bool, PostError> {
        on!(self, end => end.is_settled())
    }

    fn marks(&mut self) -> Result<Option<Marks>, PostError> {
        on!(self, end => end.marks())
    }

    fn wake(&mut self, key: SlotKey, waiting_offset: usize) -> Result<(), PostError> {
        on!(self, end => end.wake(key, waiting_offset))
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        on!(self, end => end.wait_fd())
    }
}
