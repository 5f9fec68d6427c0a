//! Stands in for the relay in a build without the feature `relay`: a sender that cannot exist.

use std::convert::Infallible;

use p2p_core::endpoint::Transport;
use p2p_core::region::{LocalRange, SlotKey};
use p2p_core::{PostError, Region};

use crate::failure::Cause;

/// Whether the relay took something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RelayStatus {
    Accepted,
    #[expect(dead_code, reason = "only a relay runs out of room")]
    Full,
}

/// Has no value, so that the compiler removes all code that needs one.
#[derive(Debug)]
pub(crate) struct RelaySender(Infallible);

impl RelaySender {
    pub(crate) const fn tasks(&self) -> &Region {
        match self.0 {}
    }

    pub(crate) const fn num_targets(&self) -> usize {
        match self.0 {}
    }

    pub(crate) const fn target_bytes(&self, _window: u8) -> u64 {
        match self.0 {}
    }

    pub(crate) const fn issued(&self) -> u64 {
        match self.0 {}
    }

    pub(crate) const fn done(&self) -> u64 {
        match self.0 {}
    }

    pub(crate) fn put<E: Transport<RemoteKey = SlotKey>>(
        &mut self,
        _endpoint: &mut E,
        _window: u8,
        _offset: u32,
        _src: &LocalRange,
        _begun: &mut u32,
    ) -> Result<RelayStatus, Cause> {
        match self.0 {}
    }

    pub(crate) fn word<E: Transport<RemoteKey = SlotKey>>(
        &mut self,
        _endpoint: &mut E,
        _window: u8,
        _offset: u32,
        _is_add: bool,
        _value: u64,
    ) -> Result<RelayStatus, Cause> {
        match self.0 {}
    }

    pub(crate) fn fence<E: Transport<RemoteKey = SlotKey>>(
        &mut self,
        _endpoint: &mut E,
        _window: u8,
    ) -> Result<RelayStatus, Cause> {
        match self.0 {}
    }

    pub(crate) const fn has_unpublished(&self) -> bool {
        match self.0 {}
    }

    pub(crate) fn publish<E: Transport<RemoteKey = SlotKey>>(
        &mut self,
        _endpoint: &mut E,
    ) -> Result<(), PostError> {
        match self.0 {}
    }

    pub(crate) fn poll_done(&mut self) -> Result<u64, Cause> {
        match self.0 {}
    }
}
