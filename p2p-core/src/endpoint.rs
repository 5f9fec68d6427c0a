//! The traits of a transport: one-sided operations on the memory of one connected peer.
//!
//! | trait | methods |
//! |---|---|
//! | [`Endpoint`] | operations that every transport performs: put, get, add-flag, fence, quiet, wake |
//! | [`Batch`] | posting many operations together |
//! | [`Progress`] | driving the transport, and asking about it without a wait |
//! | [`Transport`] | all three, implemented for every type that has them |
//!
//! No method has a default, so a wrapper that forgets one does not compile. A transport that posts every operation at
//! once says so with [`unbatched!`](crate::unbatched). A transport that needs no driver and never waits for the peer's
//! process says so with [`immediate_progress!`](crate::immediate_progress). A transport with a few trivial answers
//! names them with [`default_progress!`](crate::default_progress). A wrapper names the methods that it passes on with
//! [`forward_endpoint!`](crate::forward_endpoint).

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

use thiserror::Error;

use crate::region::{LocalRange, Region, RemoteRange};
use crate::wait::Driver;

pub mod checks;
mod forward;

/// The transport between two peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum TransportKind {
    /// Both peers in one process.
    Local,
    /// Shared memory of one host.
    Shm,
    /// Shared memory of one host, accessed by put and get only. For tests of code that runs over networks.
    #[cfg(feature = "test-transports")]
    Staged,
    /// RDMA by reliable-connected queue pairs (InfiniBand, RoCE).
    Verbs,
    /// RDMA or messages by libfabric, over the provider that it was opened with.
    Libfabric,
    /// Memory of GPUs of one host, mapped across processes.
    CudaIpc,
    /// The software model of an RDMA NIC, for tests.
    #[cfg(feature = "test-transports")]
    SoftNic,
    /// RDMA whose requests GPU kernels post (mlx5). For slots in GPU memory.
    Ibgda,
    /// Plain sockets. For the message engine.
    Tcp,
    /// Copies between the processes of one host. For the message engine.
    Cma,
}

impl TransportKind {
    /// Every kind.
    pub const ALL: &[Self] = &[
        Self::Local,
        Self::Shm,
        #[cfg(feature = "test-transports")]
        Self::Staged,
        Self::Verbs,
        Self::Libfabric,
        Self::CudaIpc,
        #[cfg(feature = "test-transports")]
        Self::SoftNic,
        Self::Ibgda,
        Self::Tcp,
        Self::Cma,
    ];

    /// The name in configuration, logs and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Shm => "shm",
            #[cfg(feature = "test-transports")]
            Self::Staged => "staged",
            Self::Verbs => "verbs",
            Self::Libfabric => "libfabric",
            Self::CudaIpc => "cuda_ipc",
            #[cfg(feature = "test-transports")]
            Self::SoftNic => "softnic",
            Self::Ibgda => "ibgda",
            Self::Tcp => "tcp",
            Self::Cma => "cma",
        }
    }

    /// True if a [`Network`](crate::network::Network) connects the peers.
    #[must_use]
    pub const fn is_network(self) -> bool {
        match self {
            Self::Local | Self::Shm => false,
            #[cfg(feature = "test-transports")]
            Self::Staged => false,
            _ => true,
        }
    }

    /// True if the transport only connects slots in GPU memory.
    #[must_use]
    pub const fn needs_device(self) -> bool {
        matches!(self, Self::Ibgda)
    }
}

/// The transport could not post an operation.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PostError {
    /// The range leaves the peer's region. A local bug.
    #[error("{op}: {len} bytes at offset {offset} leave the peer's region of {region_bytes} bytes")]
    RemoteRange {
        /// Operation.
        op: &'static str,
        /// First byte.
        offset: usize,
        /// Bytes.
        len: usize,
        /// Bytes of the region.
        region_bytes: usize,
    },
    /// The flag is not on an 8-byte boundary. A local bug.
    #[error("{op}: flag offset {offset} is not a multiple of 8")]
    Misaligned {
        /// Operation.
        op: &'static str,
        /// Offset found.
        offset: usize,
    },
    /// The local memory is not registered. A local bug.
    #[error("{op}: {len} bytes at {address:#x} are not registered; call `register` first")]
    Unregistered {
        /// Operation.
        op: &'static str,
        /// First byte.
        address: usize,
        /// Bytes.
        len: usize,
    },
    /// The transport could not register memory.
    #[error("cannot register {bytes} bytes of memory: {detail}")]
    Register {
        /// Bytes.
        bytes: usize,
        /// The transport's answer, and a setting to check.
        detail: String,
    },
    /// The connection to the peer is closed. The caller retires the slot.
    #[error("{op}: the connection to the peer is closed")]
    Disconnected {
        /// Operation.
        op: &'static str,
    },
    /// The transport failed. The caller treats the peer as lost.
    #[error("{op}: transport error {code}: {detail}")]
    Transport {
        /// Operation.
        op: &'static str,
        /// The transport's raw code.
        code: i64,
        /// Meaning of the code.
        detail: String,
    },
}

/// Operations did not complete. Transports match on both variants, so the enum stays exhaustive.
#[derive(Debug, Error)]
pub enum QuietError {
    /// The deadline passed while operations were outstanding.
    #[error("quiet: {outstanding} operations still outstanding at the deadline")]
    Deadline {
        /// Number of outstanding operations.
        outstanding: usize,
    },
    /// An operation failed.
    #[error(transparent)]
    Post(#[from] PostError),
}

/// Progress of a transport as two positions in the sequence of its operations. Both only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Marks {
    /// Position after the last issued operation.
    pub issued: u64,
    /// Every operation before this position has arrived at the peer and no longer uses local memory.
    pub arrived: u64,
}

/// One connected peer.
///
/// **Ordering contract.** An [`add_flag`](Self::add_flag) becomes visible to the peer only after all puts that were
/// issued to this peer before it. Puts have no order among each other, unless a [`fence`](Self::fence) stands between
/// them. When [`quiet`](Self::quiet) returns, everything issued before it is complete: sources may be reused, and the
/// data is visible to the peer.
///
/// The handshake chooses the endpoint; the data path calls a concrete type.
///
/// Implement [`Batch`] and [`Progress`] as well: channels and proxies require all of [`Transport`].
pub trait Endpoint: Send {
    /// Wire form of the right to access one region. Never contains a local key.
    type RemoteKey: Copy + Send;

    /// The transport of this endpoint.
    fn kind(&self) -> TransportKind;

    /// Makes `region` usable as source of puts and target of gets until the endpoint is dropped. The endpoint keeps the
    /// region mapped for that time. Does nothing on transports whose puts are stores.
    ///
    /// # Errors
    /// [`PostError::Register`].
    fn register(&mut self, region: &Region) -> Result<(), PostError>;

    /// Address of the peer's region in this process, if this process can load and store there. `None` if it is
    /// accessible by put and get only.
    fn direct(&self, key: Self::RemoteKey) -> Option<NonNull<u8>>;

    /// Starts a copy of `src` into the peer's memory.
    ///
    /// # Safety
    /// `src` stays registered (see [`register`](Self::register)) and unwritten until a `quiet` covers this call.
    ///
    /// # Errors
    /// [`PostError`]; nothing was written then.
    unsafe fn put(
        &mut self,
        dst: RemoteRange<Self::RemoteKey>,
        src: LocalRange,
    ) -> Result<(), PostError>;

    /// Starts a copy from the peer's memory into `dst`.
    ///
    /// # Safety
    /// `dst` stays registered, and no other code reads or writes it, until a `quiet` covers this call.
    ///
    /// # Errors
    /// [`PostError`]; nothing is read then.
    unsafe fn get(
        &mut self,
        dst: LocalRange,
        src: RemoteRange<Self::RemoteKey>,
    ) -> Result<(), PostError>;

    /// Atomically adds `value` to the 64-bit flag at `dst.offset`, after all earlier puts.
    ///
    /// # Errors
    /// [`PostError`]; the flag is unchanged then.
    fn add_flag(&mut self, dst: RemoteRange<Self::RemoteKey>, value: u64) -> Result<(), PostError>;

    /// Orders everything issued before ahead of everything issued after.
    ///
    /// # Errors
    /// [`PostError`] if the transport has failed.
    fn fence(&mut self) -> Result<(), PostError>;

    /// Blocks until everything issued before is complete, or until `deadline`.
    ///
    /// # Errors
    /// [`QuietError`] at `deadline` or on failure.
    fn quiet(&mut self, deadline: Instant) -> Result<(), QuietError>;

    /// Wakes the peer if it sleeps on the region of `key`. The region's `WAITING` word is at `waiting_offset`. Call it
    /// after `add_flag`.
    ///
    /// # Errors
    /// [`PostError`] if the wake-up cannot be delivered.
    fn wake(&mut self, key: Self::RemoteKey, waiting_offset: usize) -> Result<(), PostError>;

    /// Descriptor that becomes readable when the peer wakes this side. Add it to a
    /// [`WaitSet`](crate::wait::WaitSet) in edge-triggered mode.
    fn wait_fd(&self) -> Option<BorrowedFd<'_>>;
}

/// Batches: the device is notified once for many operations.
///
/// A transport that posts every operation at once says so with [`unbatched!`](crate::unbatched).
pub trait Batch: Endpoint {
    /// Begins a batch: until [`flush`](Self::flush), the transport may queue operations instead of posting them.
    ///
    /// Calls that wait for operations, or ask about their progress, post the queue first. The caller ends every batch
    /// that it begins, also after an error. Until then it neither sleeps nor waits for the peer without such a call.
    fn begin_batch(&mut self);

    /// Ends a batch: posts the queued operations in order.
    ///
    /// # Errors
    /// [`PostError`], the same as from any operation of the batch. The peer is lost then.
    fn flush(&mut self) -> Result<(), PostError>;
}

/// Progress of operations, health of the transport, and forms of operations that never wait for the peer's process.
///
/// A transport that needs no driver and never waits for the peer's process says so with
/// [`immediate_progress!`](crate::immediate_progress).
pub trait Progress: Endpoint {
    /// The driver that moves this endpoint's operations on, and those of the peer towards this side. `None` if the
    /// hardware or the operations themselves do that. Endpoints of one device share a driver.
    fn driver(&self) -> Option<Arc<dyn Driver>>;

    /// Reports a failure of the transport that the endpoint knows of, also one that no call has returned. Costs one
    /// load.
    ///
    /// # Errors
    /// [`PostError::Transport`] or [`PostError::Disconnected`]. The caller treats the peer as lost.
    fn health(&self) -> Result<(), PostError>;

    /// [`add_flag`](Endpoint::add_flag) for an addition that is not urgent. It has no order after puts.
    ///
    /// A transport may delay it until the next operation towards this peer, or for a few turns of the
    /// [`driver`](Self::driver). It does not delay it while a thread sleeps.
    ///
    /// # Errors
    /// [`PostError`]; the flag is unchanged then.
    fn add_flag_lazily(
        &mut self,
        dst: RemoteRange<Self::RemoteKey>,
        value: u64,
    ) -> Result<(), PostError>;

    /// True if the endpoint can post a put or a flag without a wait for the peer's *process*. Does not wait.
    ///
    /// Few transports ever wait for that. A thread that serves several peers asks before it posts to one of them. The
    /// answer is also true after a failure, so that the next operation reports it.
    fn has_room(&mut self) -> bool;

    /// [`has_room`](Self::has_room) for optional operations: leaves half of the room for operations that the peer waits
    /// for.
    fn has_room_to_spare(&mut self) -> bool;

    /// [`fence`](Endpoint::fence) without a wait for the peer's process. Returns `false` if it would have to wait; then
    /// nothing is ordered, and the caller tries again.
    ///
    /// # Errors
    /// The same as of `fence`.
    fn try_fence(&mut self) -> Result<bool, PostError>;

    /// True if all earlier operations are done with local memory: sources may be overwritten, and data of gets is
    /// there. Does not wait.
    ///
    /// This is less than [`quiet`](Endpoint::quiet): puts need not have arrived at the peer.
    ///
    /// # Errors
    /// [`PostError`] if the transport has failed.
    fn is_settled(&mut self) -> Result<bool, PostError>;

    /// Positions that tell operations apart while the caller issues more. `None` if the transport has none, or has none
    /// at this time. Does not wait.
    ///
    /// # Errors
    /// [`PostError`] if the transport has failed.
    fn marks(&mut self) -> Result<Option<Marks>, PostError>;
}

/// A complete transport: the bound of channels, proxies and all other code over any transport.
///
/// Every type with [`Batch`] and [`Progress`] implements it.
pub trait Transport: Batch + Progress {}

impl<E: Batch + Progress + ?Sized> Transport for E {}
