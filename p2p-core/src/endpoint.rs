//! The transport trait: what one connected peer can be asked to do with its memory.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

use thiserror::Error;

use crate::region::{LocalRange, Region, RemoteRange};
use crate::wait::Driver;

/// Which transport joins two peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum TransportKind {
    /// Both ends in one process.
    Local,
    /// Shared memory of one host.
    Shm,
    /// Shared memory of one host, reached by put only. For tests of code that runs over networks.
    #[cfg(feature = "test-transports")]
    Staged,
    /// RDMA by reliable-connected queue pairs (InfiniBand, RoCE).
    Verbs,
    /// RDMA or messages by libfabric, over whichever provider it was opened with.
    Libfabric,
    /// Memory of GPUs of one host, mapped across processes.
    CudaIpc,
    /// The software model of an RDMA NIC, for tests.
    #[cfg(feature = "test-transports")]
    SoftNic,
    /// RDMA whose requests kernels post by themselves (mlx5). For slots of GPUs.
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

    /// Name as used in configuration, logs and metrics.
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

    /// Whether a [`Network`](crate::network::Network) has to bring the peers together.
    #[must_use]
    pub const fn is_network(self) -> bool {
        match self {
            Self::Local | Self::Shm => false,
            #[cfg(feature = "test-transports")]
            Self::Staged => false,
            _ => true,
        }
    }

    /// Whether it joins slots of GPUs only.
    #[must_use]
    pub const fn needs_device(self) -> bool {
        matches!(self, Self::Ibgda)
    }
}

/// An operation could not be posted.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PostError {
    /// The range is not inside the region that the key stands for. A local bug.
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
    /// A flag must lie on an 8-byte boundary. A local bug.
    #[error("{op}: flag offset {offset} is not a multiple of 8")]
    Misaligned {
        /// Operation.
        op: &'static str,
        /// Offset found.
        offset: usize,
    },
    /// Local memory that this transport does not know. A local bug.
    #[error("{op}: {len} bytes at {address:#x} are not registered; call `register` first")]
    Unregistered {
        /// Operation.
        op: &'static str,
        /// First byte.
        address: usize,
        /// Bytes.
        len: usize,
    },
    /// Memory could not be registered.
    #[error("cannot register {bytes} bytes of memory: {detail}")]
    Register {
        /// Bytes.
        bytes: usize,
        /// The transport's answer, and what to check.
        detail: String,
    },
    /// The peer is gone. Its slot must be retired.
    #[error("{op}: the connection to the peer is closed")]
    Disconnected {
        /// Operation.
        op: &'static str,
    },
    /// The transport failed; the peer must be treated as lost.
    #[error("{op}: transport error {code}: {detail}")]
    Transport {
        /// Operation.
        op: &'static str,
        /// Raw code of the transport.
        code: i64,
        /// What it means.
        detail: String,
    },
}

/// Outstanding operations could not be completed. Transports decide by the variant, so there will be no third one.
#[derive(Debug, Error)]
pub enum QuietError {
    /// The deadline passed with operations outstanding.
    #[error("quiet: {outstanding} operations still outstanding at the deadline")]
    Deadline {
        /// Operations outstanding.
        outstanding: usize,
    },
    /// An operation failed.
    #[error(transparent)]
    Post(#[from] PostError),
}

/// How far a transport has come. Both numbers only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Marks {
    /// Behind everything issued so far.
    pub issued: u64,
    /// Everything before it has arrived at the peer, and uses no local memory any more.
    pub arrived: u64,
}

/// One connected peer.
///
/// **Ordering contract.** An [`add_flag`](Self::add_flag) issued after puts to the same peer is seen
/// by that peer only after those puts. Puts are not ordered among each other unless a
/// [`fence`](Self::fence) stands between them. [`quiet`](Self::quiet) returns once everything issued
/// before is complete: sources may be reused and the data is visible to the peer.
///
/// Endpoints are chosen while connecting and are concrete types while polling.
pub trait Endpoint: Send {
    /// Wire form of the right to access one region. Never contains a local key.
    type RemoteKey: Copy + Send;

    /// Which transport this is.
    fn kind(&self) -> TransportKind;

    /// Makes `region` usable as source of puts and target of gets, until the endpoint is dropped, which
    /// keeps the region mapped as long. Nothing to do where puts are stores.
    ///
    /// # Errors
    /// [`PostError::Register`].
    fn register(&mut self, region: &Region) -> Result<(), PostError> {
        let _ = region;
        Ok(())
    }

    /// What has to be driven so that this endpoint's operations, and the peer's towards this side, go
    /// on. `None` where hardware or the operations themselves do that. Endpoints of one device share a
    /// driver.
    fn driver(&self) -> Option<Arc<dyn Driver>> {
        None
    }

    /// Whether the transport still works towards this peer, as far as is known: failures that no call
    /// of this side is there to report. One load.
    ///
    /// # Errors
    /// [`PostError::Transport`] or [`PostError::Disconnected`]; the peer must be treated as lost.
    fn health(&self) -> Result<(), PostError> {
        Ok(())
    }

    /// Address of the peer's region in this process, where loads and stores reach it.
    /// `None` means that only puts and gets do.
    fn direct(&self, key: Self::RemoteKey) -> Option<NonNull<u8>>;

    /// Starts a copy of `src` into the peer's memory.
    ///
    /// # Safety
    /// `src` stays registered (see [`register`](Self::register)) and unwritten until a `quiet` covers
    /// this call.
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
    /// `dst` stays registered, and nothing else reads or writes it, until a `quiet` covers this call.
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

    /// As [`add_flag`](Self::add_flag) for an addition that nobody waits for urgently: a transport may
    /// let it wait until the next operation towards this peer or a few turns of the
    /// [`driver`](Self::driver), but not while anybody sleeps. It is not ordered after puts.
    ///
    /// # Errors
    /// [`PostError`]; the flag is unchanged then.
    fn add_flag_lazily(
        &mut self,
        dst: RemoteRange<Self::RemoteKey>,
        value: u64,
    ) -> Result<(), PostError> {
        self.add_flag(dst, value)
    }

    /// From here on what is posted may be kept back until [`flush`](Self::flush), so that the device is told once of
    /// many operations. Calls that wait for operations, or look how far they are, first post what is kept back.
    /// Whoever begins a batch ends it, whatever comes in between; until then nobody sleeps or waits for the peer
    /// without such a call.
    fn begin_batch(&mut self) {}

    /// Ends a batch: posts what was kept back, in order.
    ///
    /// # Errors
    /// [`PostError`], after which the peer is lost, as any operation of the batch would have said.
    fn flush(&mut self) -> Result<(), PostError> {
        Ok(())
    }

    /// Whether a put or a flag can be posted now without a wait for the peer's *process*. Few transports ever
    /// wait for that, and a thread with several peers asks before it posts to one of them. A look, and true
    /// where the transport has failed: whoever posts is told why.
    fn has_room(&mut self) -> bool {
        true
    }

    /// As [`has_room`](Self::has_room), for what nobody misses: half of what fits has to be left for what
    /// somebody waits for.
    fn has_room_to_spare(&mut self) -> bool {
        true
    }

    /// Orders everything issued before ahead of everything issued after.
    ///
    /// # Errors
    /// [`PostError`] when the transport has failed.
    fn fence(&mut self) -> Result<(), PostError>;

    /// As [`fence`](Self::fence), but without a wait for the peer's process. `false`: not now, and nothing is
    /// ordered yet; ask again.
    ///
    /// # Errors
    /// As for `fence`.
    fn try_fence(&mut self) -> Result<bool, PostError> {
        self.fence().map(|()| true)
    }

    /// Waits until everything issued before is complete.
    ///
    /// # Errors
    /// [`QuietError`] at `deadline` or on failure.
    fn quiet(&mut self, deadline: Instant) -> Result<(), QuietError>;

    /// Whether nothing issued before uses local memory any more: sources may be written again, and what
    /// was got is there. Less than [`quiet`](Self::quiet), since puts need not have arrived. Looks, and
    /// does not wait.
    ///
    /// # Errors
    /// [`PostError`] when the transport has failed.
    fn is_settled(&mut self) -> Result<bool, PostError> {
        match self.quiet(Instant::now()) {
            Ok(()) => Ok(true),
            Err(QuietError::Deadline { .. }) => Ok(false),
            Err(QuietError::Post(error)) => Err(error),
        }
    }

    /// By which numbers operations are told apart while more are issued; `None` where the transport cannot
    /// tell, or not now. Looks, and does not wait.
    ///
    /// # Errors
    /// [`PostError`] when the transport has failed.
    fn marks(&mut self) -> Result<Option<Marks>, PostError> {
        Ok(None)
    }

    /// Wakes the peer if it sleeps on the region of `key`, whose `WAITING` word is at
    /// `waiting_offset`. Called after `add_flag`.
    ///
    /// # Errors
    /// [`PostError`] when the wake-up cannot be delivered.
    fn wake(&mut self, key: Self::RemoteKey, waiting_offset: usize) -> Result<(), PostError>;

    /// Descriptor that becomes readable when the peer wakes us, to be put into a
    /// [`WaitSet`](crate::wait::WaitSet) in edge-triggered mode.
    fn wait_fd(&self) -> Option<BorrowedFd<'_>>;
}
