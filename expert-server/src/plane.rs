//! The data thread of a server, on CPUs or on a GPU.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use p2p_core::bootstrap::DevicePair;
use p2p_core::{AnyEndpoint, Channel};
use protocol::DispatchExpect;

use crate::cpu::{DataPlane, LinkId};
use crate::device::{ClientSlots, DevicePlane};
use crate::metrics::DropReason;
use crate::status::{DataStatus, LoadCounters};

/// What control tasks need of a data thread.
#[derive(Debug)]
pub(crate) enum Plane {
    Host(DataPlane<AnyEndpoint>),
    Device(DevicePlane),
}

/// The end of a link. Dropping it frees the slots.
pub(crate) struct Ended {
    pub(crate) reason: DropReason,
    pub(crate) _slots: Box<dyn Send>,
}

/// Completes when a link has ended; without a value when the thread is gone.
pub(crate) type End = Pin<Box<dyn Future<Output = Option<Ended>> + Send>>;

impl Plane {
    /// Hands a connected client's slots to the data thread.
    pub(crate) fn attach(
        &self,
        channel: Channel<AnyEndpoint>,
        device: Option<DevicePair>,
        expect: DispatchExpect,
    ) -> Option<(LinkId, End)> {
        match (self, device) {
            (Self::Host(data), None) => {
                let (id, end) = data.attach(channel, expect);
                let end = async move {
                    let ended = end.await.ok()?;
                    Some(Ended { reason: ended.reason, _slots: Box::new(ended.channel) })
                };
                Some((id, Box::pin(end)))
            }
            (Self::Device(data), Some(pair)) => {
                let (id, end) = data.attach(ClientSlots { pair, channel }, expect);
                let end = async move {
                    let ended = end.await.ok()?;
                    Some(Ended { reason: ended.reason, _slots: Box::new(ended.slots) })
                };
                Some((id, Box::pin(end)))
            }
            // The handshake lets nobody through who is of the other kind.
            _ => None,
        }
    }

    /// Ends a link whose client is gone.
    pub(crate) fn detach(&self, id: LinkId) {
        match self {
            Self::Host(data) => data.detach(id),
            Self::Device(data) => data.detach(id),
        }
    }

    /// Ends every link and the thread.
    pub(crate) fn stop(&self) {
        match self {
            Self::Host(data) => data.stop(),
            Self::Device(data) => data.stop(),
        }
    }

    pub(crate) fn status(&self) -> &Arc<DataStatus> {
        match self {
            Self::Host(data) => data.status(),
            Self::Device(data) => data.status(),
        }
    }

    pub(crate) fn load(&self) -> &Arc<LoadCounters> {
        match self {
            Self::Host(data) => data.load(),
            Self::Device(data) => data.load(),
        }
    }
}
