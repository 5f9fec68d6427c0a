//! One-sided operations on registered memory, by completion: what the message engine stands on.
//!
//! Where an [`Endpoint`](crate::Endpoint) is one slot of one peer, a [`Fabric`] is a whole device: any
//! memory can be registered, any number of peers joined, and every operation carries a token that its
//! completion brings back. A fabric belongs to one thread.
//!
//! Nothing here blocks. An operation is accepted or refused at once; what was accepted completes exactly
//! once, as done or as failed, also when the peer dies or is closed.
//!
//! | crate | fabric | between | by |
//! |---|---|---|---|
//! | message-engine | `cma` | processes of one user on one host, and within a process | `process_vm_readv`, `process_vm_writev`, plain copies |
//! | message-engine | `tcp` | any two hosts | sockets, served by the target's thread |
//! | transports/libfabric | `LibfabricFabric` | any two hosts, by any provider that both have | libfabric's remote memory access |
//! | transports/verbs | `VerbsFabric` | hosts with InfiniBand or RoCE v2 | RDMA by reliable-connected queue pairs |

use std::fmt::Debug;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::time::Duration;

pub mod post;
pub mod regions;

use crate::endpoint::{PostError, TransportKind};
use crate::network::{NetworkError, Route};

/// A registration of local memory. Stays on this side: a local key never travels. That of memory that was
/// deregistered names nothing, also where another registration has its place: 4,096 of these follow one
/// another before an id comes again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RegionId(pub u32);

/// A joined peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PeerId(pub u32);

/// What a completion brings back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token(pub u64);

/// Memory of a peer as it is described on the wire.
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

/// What a peer may do with a registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Nothing: a source or target of this side's own operations.
    Local,
    /// Read it.
    RemoteRead,
    /// Read and write it.
    RemoteReadWrite,
}

/// A dma-buf that stands for memory of another device.
#[derive(Debug, Clone, Copy)]
pub struct DmaBuf<'a> {
    /// Its descriptor, as the device's driver exports it.
    pub fd: BorrowedFd<'a>,
    /// Where the memory begins within it, in bytes.
    pub offset: u64,
}

/// Whether an operation was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum PostOutcome {
    /// It will complete.
    Accepted,
    /// The queue is full: poll, then try again.
    Full,
}

/// The end of an operation.
#[derive(Debug)]
pub struct Completion {
    /// As given.
    pub token: Token,
    /// Done, or why not. A write that is done is visible to the peer.
    pub result: Result<(), PostError>,
}

/// How to open a fabric by its name. The crate of the transport gives it to programs that start engines.
#[derive(Debug, Clone, Copy)]
pub struct FabricOpener {
    /// Name in configuration, such as `libfabric`.
    pub name: &'static str,
    /// The part that may follow the name, such as `PROVIDER`.
    pub argument: &'static str,
    /// Opens it, from the text behind the name's colon and the address of this side's interface.
    pub open: OpenFabric,
}

/// Opens a fabric. May block for seconds while a library looks for devices.
pub type OpenFabric = fn(Option<&str>, Option<IpAddr>) -> Result<Box<dyn Fabric>, NetworkError>;

/// One device of this process. See the [module](self).
pub trait Fabric: Send + Debug {
    /// Which transport this is.
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

    /// Registers memory of another device, such as a GPU: by its dma-buf if there is one and this host
    /// can, else by address. Operations never copy it by this processor.
    ///
    /// # Safety
    /// As for [`register`](Self::register), by the device instead of this processor, and the dma-buf stands
    /// for that memory.
    ///
    /// # Errors
    /// [`PostError::Register`], also where the transport reaches host memory only.
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

    /// How a registration is described to peers. `None` for one that does not exist or is
    /// [`Access::Local`].
    fn describe(&self, region: RegionId) -> Option<WireRegion>;

    /// How a part of a registration is described to one peer. Where keys are a peer's own (libfabric), it
    /// loses its access when it is closed, and nobody else's access, and no operation of others, suffers
    /// from that. Elsewhere this is the key of the registration, by which whoever knows it has access as
    /// long as he is connected.
    ///
    /// # Errors
    /// [`PostError`] when there is no such registration or peer, no peer may reach it, or as much is granted
    /// as the transport allows at a time.
    fn grant(&mut self, peer: PeerId, part: LocalSegment) -> Result<RemoteSegment, PostError> {
        let _ = peer;
        let region = self.describe(part.region).ok_or_else(post::not_granted)?;
        Ok(RemoteSegment { region, offset: part.offset })
    }

    /// What a part was [granted](Self::grant) for has ended: to be called once for each grant, unless the
    /// peer was closed. Keys that nobody needs are kept for what comes next, and may be taken back when
    /// there is no room for others.
    fn end_grant(&mut self, peer: PeerId, part: LocalSegment) {
        let _ = (peer, part);
    }

    /// Revokes a registration. Operations under way that use it fail.
    ///
    /// # Errors
    /// [`PostError::Register`] when there is none such, or when nobody can say that all have let go of the
    /// memory: it must stay mapped then, the registration is still there, and this can be tried again.
    fn deregister(&mut self, region: RegionId) -> Result<(), PostError>;

    /// Opens this side towards a new peer, and what that peer must be told, at most
    /// [`MAX_DETAIL_BYTES`](crate::network::MAX_DETAIL_BYTES).
    ///
    /// # Errors
    /// [`NetworkError`].
    fn open_peer(&mut self) -> Result<(PeerId, Vec<u8>), NetworkError>;

    /// As [`open_peer`](Self::open_peer), for a peer that is met on `route`: a hint at the address under
    /// which this side can be reached.
    ///
    /// # Errors
    /// As for [`open_peer`](Self::open_peer).
    fn open_peer_on(&mut self, route: Route) -> Result<(PeerId, Vec<u8>), NetworkError> {
        let _ = route;
        self.open_peer()
    }

    /// Joins with what the peer said of its side.
    ///
    /// # Errors
    /// [`NetworkError`], also when the bytes make no sense.
    fn join_peer(&mut self, peer: PeerId, detail: &[u8]) -> Result<(), NetworkError>;

    /// Forgets a peer. Operations under way towards it fail, and what it was [granted](Self::grant) is
    /// closed to it.
    fn close_peer(&mut self, peer: PeerId);

    /// A joined peer towards which nothing works any more, although it was not closed; each is told once.
    /// Operations towards it are refused.
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

    /// Moves everything forward, without waiting, and appends what completed to `out`.
    fn poll(&mut self, out: &mut Vec<Completion>);

    /// Descriptor that becomes readable when [`poll`](Self::poll) has something to do, after
    /// [`may_sleep`](Self::may_sleep) has said yes. `None`: poll every millisecond or more often.
    fn wait_fd(&self) -> Option<BorrowedFd<'_>>;

    /// Longest time without a call of [`poll`](Self::poll), for transports that have more to do than their
    /// descriptor tells.
    fn max_sleep(&self) -> Duration {
        Duration::MAX
    }

    /// Prepares for sleep; `false` when there is something to poll already.
    fn may_sleep(&mut self) -> bool;

    /// Largest single operation in bytes. Larger ones are split by the caller.
    fn max_operation_bytes(&self) -> u64;
}
