//! A fabric with hooks for tests.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::time::Duration;

use p2p_core::fabric::{
    Access, Completion, DmaBuf, Fabric, LocalSegment, PeerId, PostOutcome, RegionId, RemoteSegment,
    Token, WireRegion,
};
use p2p_core::network::{NetworkError, Route};
use p2p_core::{PostError, TransportKind};

pub struct HookedFabric {
    pub inner: Box<dyn Fabric>,
    /// False for a host that forbids copies between processes. The fabric is offered and tried, and fails to join.
    pub may_join: bool,
    /// Whether it claims to reach memory of other devices. Memory of this host stands in for it.
    pub reaches_devices: bool,
    /// False if no write is accepted, as if there were never room.
    pub may_write: bool,
    /// Changes the detail that peers get.
    pub change_detail: fn(Vec<u8>) -> Vec<u8>,
    /// Called before every poll.
    pub before_poll: Box<dyn FnMut() + Send>,
    /// Called before each registration.
    pub before_register: Box<dyn FnMut() + Send>,
    /// Called before each deregistration. An error refuses it.
    pub before_deregister: Box<dyn FnMut() -> Result<(), PostError> + Send>,
}

impl HookedFabric {
    pub fn new(inner: impl Fabric + 'static) -> Self {
        Self::of(Box::new(inner))
    }

    pub fn of(inner: Box<dyn Fabric>) -> Self {
        let (before_poll, before_register) = (Box::new(|| {}), Box::new(|| {}));
        Self {
            inner,
            may_join: true,
            may_write: true,
            change_detail: |detail| detail,
            reaches_devices: false,
            before_poll,
            before_register,
            before_deregister: Box::new(|| Ok(())),
        }
    }
}

impl fmt::Debug for HookedFabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl Fabric for HookedFabric {
    fn kind(&self) -> TransportKind {
        self.inner.kind()
    }

    fn flavour(&self) -> &str {
        self.inner.flavour()
    }

    unsafe fn register(
        &mut self,
        ptr: NonNull<u8>,
        bytes: usize,
        access: Access,
    ) -> Result<RegionId, PostError> {
        (self.before_register)();
        // SAFETY: the caller's promise.
        unsafe { self.inner.register(ptr, bytes, access) }
    }

    unsafe fn register_device(
        &mut self,
        ptr: NonNull<u8>,
        bytes: usize,
        access: Access,
        dma_buf: Option<DmaBuf<'_>>,
    ) -> Result<RegionId, PostError> {
        if !self.reaches_devices {
            // SAFETY: the caller's promise.
            return unsafe { self.inner.register_device(ptr, bytes, access, dma_buf) };
        }
        // With the caller's dma-buf, unchanged.
        if let Some(DmaBuf { fd, offset }) = dma_buf {
            let len = rustix::fs::fstat(fd).unwrap().st_size as u64;
            assert!(offset + bytes as u64 <= len, "{bytes} bytes at {offset} of {len}");
        }
        // SAFETY: the caller's promise.
        unsafe { self.inner.register(ptr, bytes, access) }
    }

    fn describe(&self, region: RegionId) -> Option<WireRegion> {
        self.inner.describe(region)
    }

    fn grant(&mut self, peer: PeerId, part: LocalSegment) -> Result<RemoteSegment, PostError> {
        self.inner.grant(peer, part)
    }

    fn end_grant(&mut self, peer: PeerId, part: LocalSegment) {
        self.inner.end_grant(peer, part);
    }

    fn deregister(&mut self, region: RegionId) -> Result<(), PostError> {
        (self.before_deregister)()?;
        self.inner.deregister(region)
    }

    fn open_peer(&mut self) -> Result<(PeerId, Vec<u8>), NetworkError> {
        self.inner.open_peer()
    }

    fn open_peer_on(&mut self, route: Route) -> Result<(PeerId, Vec<u8>), NetworkError> {
        let (id, detail) = self.inner.open_peer_on(route)?;
        Ok((id, (self.change_detail)(detail)))
    }

    fn lost(&mut self) -> Option<PeerId> {
        self.inner.lost()
    }

    fn join_peer(&mut self, peer: PeerId, detail: &[u8]) -> Result<(), NetworkError> {
        if self.may_join {
            return self.inner.join_peer(peer, detail);
        }
        Err(NetworkError {
            network: "cma".to_owned(),
            op: "read the peer's memory",
            code: Some(1),
            detail: "not permitted".to_owned(),
        })
    }

    fn close_peer(&mut self, peer: PeerId) {
        self.inner.close_peer(peer);
    }

    unsafe fn write(
        &mut self,
        peer: PeerId,
        dst: RemoteSegment,
        src: LocalSegment,
        token: Token,
    ) -> Result<PostOutcome, PostError> {
        assert!(self.may_join, "used although it was refused");
        if !self.may_write {
            return Ok(PostOutcome::Full);
        }
        // SAFETY: the caller's promise.
        unsafe { self.inner.write(peer, dst, src, token) }
    }

    unsafe fn read(
        &mut self,
        peer: PeerId,
        dst: LocalSegment,
        src: RemoteSegment,
        token: Token,
    ) -> Result<PostOutcome, PostError> {
        assert!(self.may_join, "used although it was refused");
        // SAFETY: the caller's promise.
        unsafe { self.inner.read(peer, dst, src, token) }
    }

    fn poll(&mut self, out: &mut Vec<Completion>) {
        (self.before_poll)();
        self.inner.poll(out);
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wait_fd()
    }

    fn max_sleep(&self) -> Duration {
        self.inner.max_sleep()
    }

    fn may_sleep(&mut self) -> bool {
        self.inner.may_sleep()
    }

    fn max_operation_bytes(&self) -> u64 {
        self.inner.max_operation_bytes()
    }
}
