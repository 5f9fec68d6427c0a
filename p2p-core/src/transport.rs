//! The endpoint of a connection, over any transport.

use crate::backend::mapped::MappedEndpoint;
use crate::endpoint::{Batch, Endpoint, Progress, Transport};
use crate::region::SlotKey;

/// An endpoint of the transport that the handshake chose. Every call matches the variant once.
#[derive(Debug)]
#[non_exhaustive]
pub enum AnyEndpoint {
    /// The peer's slot is mapped in this process.
    Mapped(MappedEndpoint),
    /// Any other transport. Its calls are indirect.
    Other(Box<dyn OtherEndpoint>),
}

/// A transport that [`AnyEndpoint`] holds without its type. Implemented for every transport over slots.
pub trait OtherEndpoint: Transport<RemoteKey = SlotKey> + std::fmt::Debug {}

impl<E: Transport<RemoteKey = SlotKey> + std::fmt::Debug> OtherEndpoint for E {}

/// Calls a method of the active variant.
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

    crate::forward_endpoint! {
        kind, register, direct, put, get, add_flag, fence, quiet, wake, wait_fd => on!(self)
    }
}

impl Batch for AnyEndpoint {
    crate::forward_endpoint! { begin_batch, flush => on!(self) }
}

impl Progress for AnyEndpoint {
    crate::forward_endpoint! {
        driver, health, add_flag_lazily, has_room, has_room_to_spare, try_fence, is_settled, marks
        => on!(self)
    }
}
