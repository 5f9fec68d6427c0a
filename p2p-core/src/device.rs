//! Device slots beside a connection: memory of another device, such as a GPU, that the sides share
//! with each other.
//!
//! The handshake compares both sides' sizes and shapes, and exchanges descriptors. It knows nothing
//! about the device. [`DeviceMemory`] makes this side's slot, and [`OpenDeviceSlot`] maps the
//! peer's. The joined pair passes through the handshake as an opaque [`DeviceSlots`]. The code that
//! supplied the memory takes its own type out of it.

use std::any::Any;
use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};

use thiserror::Error;

/// Device slots could not be made or mapped.
#[derive(Debug, Error)]
#[error("device slot: {0}")]
pub struct DeviceSlotError(Box<dyn std::error::Error + Send + Sync>);

impl DeviceSlotError {
    /// Wraps the device's own error.
    #[must_use]
    pub fn new(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self(source.into())
    }

    /// The device's own error, if it is an `E`.
    #[must_use]
    pub fn source_as<E: std::error::Error + 'static>(&self) -> Option<&E> {
        self.0.downcast_ref()
    }
}

/// Device memory that one side of a connection supplies for slots.
///
/// Both sides state both sizes, each from its own point of view, and the same shape. If they
/// differ, the handshake ends with a rejection that names the difference.
pub trait DeviceMemory: fmt::Debug + Send + Sync {
    /// Bytes of this side's slot, which the peer writes.
    fn own_slot_bytes(&self) -> u64;

    /// Bytes of the peer's slot, which this side writes.
    fn peer_slot_bytes(&self) -> u64;

    /// All other properties that must be equal on both sides, at most
    /// [`MAX_SHAPE_BYTES`](crate::bootstrap::wire::MAX_SHAPE_BYTES). Compared as bytes, shown as
    /// text.
    fn shape(&self) -> &[u8];

    /// The concrete description, for a [`Network`](crate::network::Network) that carries device slots and knows
    /// this kind of device.
    fn as_any(&self) -> &dyn Any;

    /// Makes this side's slot, zeroed, for a peer on this host. May block for milliseconds.
    ///
    /// # Errors
    /// [`DeviceSlotError`] when the device refuses.
    fn open(&self) -> Result<Box<dyn OpenDeviceSlot>, DeviceSlotError>;
}

/// This side's device slot before the peer's is known. Dropping it frees the slot.
pub trait OpenDeviceSlot: fmt::Debug + Send + Sync {
    /// The descriptor by which the peer maps this side's slot.
    fn descriptor(&self) -> BorrowedFd<'_>;

    /// Maps the peer's slot and closes this side's descriptor. May block for milliseconds, but
    /// never on the peer.
    ///
    /// # Errors
    /// [`DeviceSlotError`], also if the descriptor is not memory of the agreed size.
    fn join(self: Box<Self>, peer: OwnedFd) -> Result<DeviceSlots, DeviceSlotError>;
}

/// The device slots of a connection, one of each side, as an object that only the device's own code
/// understands.
pub struct DeviceSlots(Box<dyn Any + Send + Sync>);

impl DeviceSlots {
    /// Wraps a joined pair.
    #[must_use]
    pub fn new<T: Any + Send + Sync>(pair: T) -> Self {
        Self(Box::new(pair))
    }

    /// The pair, if it is a `T`.
    #[must_use]
    pub fn downcast_ref<T: Any>(&self) -> Option<&T> {
        self.0.downcast_ref()
    }

    /// Takes the pair out.
    ///
    /// # Errors
    /// Returns the object itself if it holds another type.
    pub fn downcast<T: Any>(self) -> Result<T, Self> {
        self.0.downcast().map(|pair| *pair).map_err(Self)
    }
}

impl fmt::Debug for DeviceSlots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceSlots").finish_non_exhaustive()
    }
}
