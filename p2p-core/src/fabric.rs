//! One-sided operations on registered memory that end in completions. The message engine is built
//! on them.
//!
//! An [`Endpoint`](crate::Endpoint) is one slot of one peer; a [`Fabric`] is a whole device. Any
//! memory can be registered and any number of peers joined. Every operation carries a token, and
//! its completion returns the token. A fabric belongs to one thread.
//!
//! No call of a fabric blocks. An operation is accepted or refused at once. An accepted operation
//! completes exactly once, as done or as failed, also when the peer dies or is closed.
//!
//! | crate | fabric | between | by |
//! |---|---|---|---|
//! | message-engine | `cma` | processes of one user on one host, and within a process | `process_vm_readv`, `process_vm_writev`, plain copies |
//! | message-engine | `shm` | processes of one user on one host | rings in shared memory, served by the target's thread |
//! | message-engine | `tcp` | any two hosts | sockets, served by the target's thread |
//! | transports/libfabric | `LibfabricFabric` | any two hosts, by any provider that both have | libfabric's remote memory access |
//! | transports/verbs | `VerbsFabric` | hosts with InfiniBand or RoCE v2 | RDMA by reliable-connected queue pairs |

use std::fmt::Debug;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub mod post;
pub mod regions;

use crate::endpoint::{PostError, TransportKind};
use crate::network::{NetworkError, Route};

/// A registration of local memory. It stays on this side: a local key never travels.
///
/// After the memory is deregistered its id names nothing, even if another registration reuses the
/// table entry. An entry gets 4,096 ids before one of them comes again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RegionId(pub u32);

/// A joined peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PeerId(pub u32);

/// The caller's number of an operation. Its completion returns it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token(pub u64);

/// Memory of a peer, as the wire describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct WireRegion {
    /// First byte, as the transport wants it addressed.
    pub address: u64,
    /// Bytes.
    pub bytes: u64,
    /// Remote key.
    pub key: u64,
}

/// A part of a local registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalSegment {
    /// Registration.
    pub region: RegionId,
    /// First byte within it.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
}

/// A part of a peer's registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteSegment {
    /// Registration as the peer described it.
    pub region: WireRegion,
    /// First byte within it.
    pub offset: u64,
}

/// The access that peers have to a registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// None: the memory is a source or target of this side's own operations.
    Local,
    /// Peers may read it.
    RemoteRead,
    /// Peers may read and write it.
    RemoteReadWrite,
}

/// A dma-buf that stands for memory of another device.
#[derive(Debug, Clone, Copy)]
pub struct DmaBuf<'a> {
    /// Descriptor, as the device's driver exports it.
    pub fd: BorrowedFd<'a>,
    /// First byte of the memory within the dma-buf.
    pub offset: u64,
}

/// Tells whether a fabric took an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum PostOutcome {
    /// The operation will complete.
    Accepted,
    /// The queue is full: poll, then try again.
    Full,
}

/// The end of an operation.
#[derive(Debug)]
pub struct Completion {
    /// The token given with the operation.
    pub token: Token,
    /// Success, or the reason of a failure. A write that succeeded is visible to the peer.
    pub result: Result<(), PostError>,
}

/// Opens a fabric by its name. The crate of the transport offers it to programs that start engines.
#[derive(Debug, Clone, Copy)]
pub struct FabricOpener {
    /// Name in configuration, such as `libfabric`.
    pub name: &'static str,
    /// The part that may follow the name, such as `PROVIDER`.
    pub argument: &'static str,
    /// Opens the fabric, from the text behind the name's colon and the address of this side's
    /// interface.
    pub open: OpenFabric,
}

/// Opens a fabric. May block for seconds while a library looks for devices.
pub type OpenFabric = fn(Option<&str>, Option<IpAddr>) -> Result<Box<dyn Fabric>, NetworkError>;

/// One device of this process. See the [module](self).
pub trait Fabric: Send + Debug {
    /// Transport of this fabric.
    fn kind(&self) -> TransportKind;

    /// As [`Network::flavour`](crate::network::Network::flavour).
    fn flavour(&self) -> &str;

    /// Registers memory.
    ///
    /// # Safety
    /// `ptr..ptr+bytes` is readable, and stays mapped until [`deregister`](Self::deregister) or the drop of
    /// the fabric. Where operations write into it, it is writable as well.
    ///
    /// # Errors
    /// [`PostError::Register`].
    unsafe fn register(
        &mut self,
        ptr: NonNull<u8>,
        bytes: usize,
        access: Access,
    ) -> Result<RegionId, PostError>;

    /// Registers memory of another device, such as a GPU. The transport uses the dma-buf if there
    /// is one and this host supports it, else the address. Operations never copy the memory by this
    /// processor.
    ///
    /// # Safety
    /// As for [`register`](Self::register), but the device instead of this processor reaches the
    /// memory. The dma-buf stands for that memory.
    ///
    /// # Errors
    /// [`PostError::Register`], also if the transport reaches only host memory.
    unsafe fn register_device(
        &mut self,
        ptr: NonNull<u8>,
        bytes: usize,
        access: Access,
        dma_buf: Option<DmaBuf<'_>>,
    ) -> Result<RegionId, PostError> {
        let _ = (ptr, access, dma_buf);
        let detail = "this transport reaches memory of this host only; verbs reaches a GPU's";
        Err(PostError::Register { bytes, detail: detail.to_owned() })
    }

    /// Describes a registration to peers. Returns `None` for one that does not exist or is
    /// [`Access::Local`].
    fn describe(&self, region: RegionId) -> Option<WireRegion>;

    /// Describes a part of a registration to one peer.
    ///
    /// Where keys belong to one peer (libfabric), the peer loses its access when it is closed. The
    /// access of others and their operations are not affected. Elsewhere the key belongs to the
    /// registration, and every connected peer that knows the key has access.
    ///
    /// # Errors
    /// [`PostError`] when the registration or the peer does not exist, when no peer may reach the
    /// memory, or when the transport allows no more grants at a time.
    fn grant(&mut self, peer: PeerId, part: LocalSegment) -> Result<RemoteSegment, PostError> {
        let _ = peer;
        let region = self.describe(part.region).ok_or_else(post::not_granted)?;
        Ok(RemoteSegment { region, offset: part.offset })
    }

    /// Ends the use of a part that was [granted](Self::grant). Call it once for each grant, unless
    /// the peer was closed. Unused keys are kept for later grants, and may be revoked when there is
    /// no room for others.
    fn end_grant(&mut self, peer: PeerId, part: LocalSegment) {
        let _ = (peer, part);
    }

    /// Revokes a registration. Operations under way that use it fail.
    ///
    /// # Errors
    /// [`PostError::Register`] when the registration does not exist, or when the transport cannot
    /// tell that no operation uses the memory any more. In the second case the memory must stay
    /// mapped and the registration remains. The caller can try again.
    fn deregister(&mut self, region: RegionId) -> Result<(), PostError>;

    /// Opens this side towards a new peer. Returns the bytes that the peer needs in order to join,
    /// at most [`MAX_DETAIL_BYTES`](crate::network::MAX_DETAIL_BYTES).
    ///
    /// # Errors
    /// [`NetworkError`].
    fn open_peer(&mut self) -> Result<(PeerId, Vec<u8>), NetworkError>;

    /// As [`open_peer`](Self::open_peer), for a peer that is reached on `route`. The route is a
    /// hint at the address under which the peer can reach this side.
    ///
    /// # Errors
    /// As for [`open_peer`](Self::open_peer).
    fn open_peer_on(&mut self, route: Route) -> Result<(PeerId, Vec<u8>), NetworkError> {
        let _ = route;
        self.open_peer()
    }

    /// Joins with the peer's side, as the peer described it.
    ///
    /// # Errors
    /// [`NetworkError`], also when the bytes make no sense.
    fn join_peer(&mut self, peer: PeerId, detail: &[u8]) -> Result<(), NetworkError>;

    /// Removes a peer. Operations under way towards it fail, and it loses the access that it was
    /// [granted](Self::grant).
    fn close_peer(&mut self, peer: PeerId);

    /// Returns a joined peer that failed although this side did not close it. Each is reported
    /// once. Operations towards it are refused.
    fn lost(&mut self) -> Option<PeerId> {
        None
    }

    /// Starts a copy of `src` into the peer's memory.
    ///
    /// # Safety
    /// The bytes of `src` are not written until the completion.
    ///
    /// # Errors
    /// [`PostError`]; nothing will complete then.
    unsafe fn write(
        &mut self,
        peer: PeerId,
        dst: RemoteSegment,
        src: LocalSegment,
        token: Token,
    ) -> Result<PostOutcome, PostError>;

    /// Starts a copy from the peer's memory into `dst`.
    ///
    /// # Safety
    /// The bytes of `dst` are neither read nor written until the completion.
    ///
    /// # Errors
    /// [`PostError`]; nothing will complete then.
    unsafe fn read(
        &mut self,
        peer: PeerId,
        dst: LocalSegment,
        src: RemoteSegment,
        token: Token,
    ) -> Result<PostOutcome, PostError>;

    /// Advances all operations without waiting, and appends the completions to `out`.
    fn poll(&mut self, out: &mut Vec<Completion>);

    /// Descriptor that becomes readable when [`poll`](Self::poll) has something to do, after
    /// [`may_sleep`](Self::may_sleep) returned true. If it is `None`, poll at least once a
    /// millisecond.
    fn wait_fd(&self) -> Option<BorrowedFd<'_>>;

    /// Longest time without a call of [`poll`](Self::poll), for transports that have work which
    /// their descriptor does not announce.
    fn max_sleep(&self) -> Duration {
        Duration::MAX
    }

    /// Prepares for sleep. Returns `false` when there is already something to poll.
    fn may_sleep(&mut self) -> bool;

    /// Largest single operation in bytes. The caller splits larger ones.
    fn max_operation_bytes(&self) -> u64;

    /// Copies towards a joined peer that any thread may make, beside the fabric's own thread. `None`
    /// if the transport needs its thread.
    fn direct(&self, peer: PeerId) -> Option<Arc<dyn DirectCopy>> {
        let _ = peer;
        None
    }
}

/// Copies between this side and one peer on the caller's thread. It may outlive the peer, and refuses
/// every copy then.
pub trait DirectCopy: Send + Sync + Debug {
    /// Copies `bytes` between `here` and the peer's memory, to the peer if `is_write`. Returns when
    /// they are there. The caller splits what is longer than [`MAX_DIRECT_BYTES`].
    ///
    /// Returns `None`, without a copy, if another thread copies towards this peer, or if there is no
    /// way for copies of a caller's thread. The caller gives the operation to the fabric instead.
    /// Never waits for another thread of this process. Where the peer has to answer, it waits until
    /// `wait.deadline` and looks at `wait.is_cancelled` every 50 ms.
    ///
    /// # Safety
    /// `here..here+bytes` is registered memory of this process, and stays so until the return. If
    /// the copy stores into it, it is writable.
    unsafe fn copy(
        &self,
        is_write: bool,
        remote: RemoteSegment,
        here: NonNull<u8>,
        bytes: u64,
        wait: &DirectWait<'_>,
    ) -> Option<Result<(), DirectError>>;

    /// Longest transfer that this way suits. The fabric is faster for longer ones.
    fn max_bytes(&self) -> u64 {
        u64::MAX
    }
}

/// Bounds of the wait for a peer's answer.
#[derive(Clone, Copy)]
pub struct DirectWait<'a> {
    /// Latest end.
    pub deadline: Instant,
    /// Tells whether the caller gives up before. `None` never does.
    pub is_cancelled: Option<&'a dyn Fn() -> bool>,
}

impl From<Instant> for DirectWait<'_> {
    fn from(deadline: Instant) -> Self {
        Self { deadline, is_cancelled: None }
    }
}

impl Debug for DirectWait<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DirectWait").field("deadline", &self.deadline).finish_non_exhaustive()
    }
}

/// The end of a direct copy without success.
#[derive(Debug)]
#[non_exhaustive]
pub enum DirectError {
    /// Refused or failed. Other copies towards the peer can go on.
    Post(PostError),
    /// The way to the peer has failed. Bytes of a write may still arrive there: close the peer.
    Lost(PostError),
    /// The deadline has passed, or the caller has given up. Bytes of a write may still arrive there:
    /// close the peer.
    Expired,
}

impl From<PostError> for DirectError {
    fn from(error: PostError) -> Self {
        Self::Post(error)
    }
}

/// Most bytes of one direct copy. They bound the time for which a peer's revocation is retried.
pub const MAX_DIRECT_BYTES: u64 = 1 << 20;
