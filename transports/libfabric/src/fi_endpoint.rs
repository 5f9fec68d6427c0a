//! One libfabric endpoint of a port, and the operations that it posts.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

use super::load::Library;
use super::owner::{self, CallError, Info, Object, check};
use super::sys;

/// Largest address of an endpoint in bytes.
pub(super) const MAX_ADDRESS_BYTES: usize = 512;
/// Words at the start of every context that some providers use for themselves.
pub(super) type ContextRoom = [u64; 8];

/// Outcome of a post.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PostStatus {
    /// The library will carry the operation out.
    Accepted,
    /// The library has no room. Retry later.
    Again,
}

/// The library's descriptor of registered local memory. Null if the provider needs none.
#[derive(Debug, Clone, Copy)]
pub(super) struct Descriptor(pub(super) *mut c_void);

// SAFETY: an opaque value that only the library dereferences, from any thread.
unsafe impl Send for Descriptor {}
// SAFETY: as above.
unsafe impl Sync for Descriptor {}

impl Descriptor {
    pub(super) const NONE: Self = Self(null_mut());
}

/// Memory of a peer.
#[derive(Debug, Clone, Copy)]
pub(super) struct RemoteMemory {
    pub(super) peer: sys::FiAddr,
    pub(super) address: u64,
    pub(super) key: u64,
}

/// The point at which a write completes.
#[derive(Debug, Clone, Copy)]
pub(super) enum CompletionPoint {
    /// The source may be reused. The target is notified.
    Sent {
        /// Data of the notification.
        note: u64,
    },
    /// The bytes are visible at the target.
    Delivered,
}

/// One endpoint. Endpoints of a port share its address vector.
pub(super) struct FiEndpoint {
    ep: Arc<Object<sys::FidEp>>,
    library: &'static Library,
    name: Vec<u8>,
}

impl std::fmt::Debug for FiEndpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FiEndpoint").field("name", &self.name).finish_non_exhaustive()
    }
}

impl FiEndpoint {
    pub(super) fn open(
        library: &'static Library,
        domain: &Arc<Object<sys::FidDomain>>,
        info: &Info,
        av: &Arc<Object<sys::FidAv>>,
        cq: &Arc<Object<sys::FidCq>>,
    ) -> Result<Self, CallError> {
        let ep = owner::open_ep(library, domain, info, av, cq)?;
        let mut name = vec![0u8; MAX_ADDRESS_BYTES];
        let mut len = name.len();
        // SAFETY: room for `len` bytes.
        let result = unsafe {
            ((*(*ep.as_ptr()).cm).getname)(ep.fid(), name.as_mut_ptr().cast(), &raw mut len)
        };
        check(library, "fi_getname", result.into())?;
        name.truncate(len);
        Ok(Self { ep, library, name })
    }

    /// For registrations that belong to the endpoint and keep it alive.
    pub(super) const fn owner(&self) -> &Arc<Object<sys::FidEp>> {
        &self.ep
    }

    /// The endpoint's address, for peers.
    pub(super) fn name(&self) -> &[u8] {
        &self.name
    }

    /// Sends a small message. The bytes may be reused at once.
    #[inline]
    pub(super) fn inject(&self, peer: sys::FiAddr, bytes: &[u8]) -> Result<PostStatus, CallError> {
        // SAFETY: a live endpoint and valid bytes, which the call copies.
        let result = unsafe {
            let inject = (*(*self.ep.as_ptr()).msg).inject;
            inject(self.ep.as_ptr(), bytes.as_ptr().cast(), bytes.len(), peer)
        };
        self.status_of("fi_inject", result)
    }

    /// Posts a receive buffer.
    ///
    /// # Safety
    /// The buffer is neither read nor written, and it and the context stay, until the completion or
    /// the end of the port.
    pub(super) unsafe fn receive(
        &self,
        (ptr, len): (*mut u8, usize),
        descriptor: Descriptor,
        context: *mut c_void,
    ) -> Result<PostStatus, CallError> {
        // SAFETY: a live endpoint; the caller's promise.
        let result = unsafe {
            let recv = (*(*self.ep.as_ptr()).msg).recv;
            let any = sys::FI_ADDR_UNSPEC;
            recv(self.ep.as_ptr(), ptr.cast(), len, descriptor.0, any, context)
        };
        self.status_of("fi_recv", result)
    }

    /// Writes at least 9 bytes into a peer's memory, without a notification. The bytes may be
    /// reused at once.
    #[inline]
    pub(super) fn inject_write(
        &self,
        to: RemoteMemory,
        bytes: &[u8],
    ) -> Result<PostStatus, CallError> {
        // In two pieces: with one, `ofi_rxm` 1.17 passes the operation on without a context of its
        // own, and dereferences a null pointer if the peer has died.
        let (first, second) = bytes.split_at(8.min(bytes.len()));
        let piece =
            |bytes: &[u8]| sys::Iovec { base: bytes.as_ptr().cast_mut().cast(), len: bytes.len() };
        let iov = [piece(first), piece(second)];
        let rma = sys::RmaIov { addr: to.address, len: bytes.len(), key: to.key };
        let mut desc = [null_mut(); 2];
        let message = sys::MsgRma {
            iov: iov.as_ptr(),
            desc: desc.as_mut_ptr(),
            iov_count: iov.len(),
            addr: to.peer,
            rma_iov: &raw const rma,
            rma_iov_count: 1,
            context: null_mut(),
            data: 0,
        };
        // SAFETY: a live endpoint; the vectors are read, and the bytes copied, by the call.
        let result = unsafe {
            let write = (*(*self.ep.as_ptr()).rma).writemsg;
            write(self.ep.as_ptr(), &raw const message, sys::FI_INJECT)
        };
        self.status_of("fi_writemsg", result)
    }

    /// Starts a copy into a peer's memory.
    ///
    /// # Safety
    /// `ptr..ptr+len` is mapped and not written, and the context stays, until the completion.
    pub(super) unsafe fn write(
        &self,
        to: RemoteMemory,
        (ptr, len): (*const u8, usize),
        descriptor: Descriptor,
        completion: CompletionPoint,
        context: *mut c_void,
    ) -> Result<PostStatus, CallError> {
        let iov = sys::Iovec { base: ptr.cast_mut().cast(), len };
        let rma = sys::RmaIov { addr: to.address, len, key: to.key };
        let mut desc = descriptor.0;
        let (flags, data) = match completion {
            CompletionPoint::Sent { note } => (sys::FI_REMOTE_CQ_DATA, note),
            CompletionPoint::Delivered => (sys::FI_DELIVERY_COMPLETE, 0),
        };
        let message = sys::MsgRma {
            iov: &raw const iov,
            desc: &raw mut desc,
            iov_count: 1,
            addr: to.peer,
            rma_iov: &raw const rma,
            rma_iov_count: 1,
            context,
            data,
        };
        // SAFETY: a live endpoint; the vectors are read by the call; the caller's promise.
        let result = unsafe {
            let write = (*(*self.ep.as_ptr()).rma).writemsg;
            write(self.ep.as_ptr(), &raw const message, sys::FI_COMPLETION | flags)
        };
        self.status_of("fi_writemsg", result)
    }

    /// Starts a copy from a peer's memory.
    ///
    /// # Safety
    /// `ptr..ptr+len` is mapped and neither read nor written, and the context stays, until the
    /// completion.
    pub(super) unsafe fn read(
        &self,
        from: RemoteMemory,
        (ptr, len): (*mut u8, usize),
        descriptor: Descriptor,
        context: *mut c_void,
    ) -> Result<PostStatus, CallError> {
        let iov = sys::Iovec { base: ptr.cast(), len };
        let rma = sys::RmaIov { addr: from.address, len, key: from.key };
        let mut desc = descriptor.0;
        let message = sys::MsgRma {
            iov: &raw const iov,
            desc: &raw mut desc,
            iov_count: 1,
            addr: from.peer,
            rma_iov: &raw const rma,
            rma_iov_count: 1,
            context,
            data: 0,
        };
        // SAFETY: a live endpoint; the vectors are read by the call; the caller's promise.
        let result = unsafe {
            let read = (*(*self.ep.as_ptr()).rma).readmsg;
            read(self.ep.as_ptr(), &raw const message, sys::FI_COMPLETION)
        };
        self.status_of("fi_readmsg", result)
    }

    #[inline]
    fn status_of(&self, op: &'static str, result: isize) -> Result<PostStatus, CallError> {
        match result as i64 {
            0 => Ok(PostStatus::Accepted),
            code if code == -sys::FI_EAGAIN => Ok(PostStatus::Again),
            code => Err(CallError { op, code: -code, text: self.library.describe(code) }),
        }
    }
}
