//! One-sided operations on a peer's slot in GPU memory. A host posts them, in the order of one
//! stream.

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kernels::abi::DevicePtr;
use kernels::gpu::{GpuBuffer, GpuError, Stream};

use p2p_core::endpoint::checks::{check_flag, check_range};
use p2p_core::endpoint::{Endpoint, PostError, QuietError, TransportKind};
use p2p_core::region::{LocalRange, Region, RemoteRange, SlotKey};
use p2p_core::wait::signal_peer;

/// Endpoint over a mapping of the peer's slot in GPU memory. Kernels store through
/// [`window`](Self::window). The host's operations are copies and small kernels on a stream of its
/// own.
#[derive(Debug)]
pub struct DeviceEndpoint {
    stream: Stream,
    peer: ManuallyDrop<GpuBuffer>,
    slot_bytes: usize,
    wake_peer: Arc<OwnedFd>,
    wake_self: Arc<OwnedFd>,
    /// Operations since the last `quiet`.
    outstanding: usize,
}

impl DeviceEndpoint {
    pub(super) const fn new(
        stream: Stream,
        peer: GpuBuffer,
        slot_bytes: usize,
        wake_peer: Arc<OwnedFd>,
        wake_self: Arc<OwnedFd>,
    ) -> Self {
        let peer = ManuallyDrop::new(peer);
        Self { stream, peer, slot_bytes, wake_peer, wake_self, outstanding: 0 }
    }

    /// The peer's slot, for kernels of this process. Valid as long as the endpoint.
    #[must_use]
    pub fn window(&self) -> DevicePtr {
        self.peer.ptr()
    }

    /// Starts a copy of `len` bytes of GPU memory to `offset` of the peer's slot.
    ///
    /// # Safety
    /// `src` is valid for `len` bytes and stays unwritten until a `quiet` covers this call.
    ///
    /// # Errors
    /// [`PostError`]; nothing was written then.
    pub unsafe fn put_device(
        &mut self,
        offset: usize,
        src: DevicePtr,
        len: usize,
    ) -> Result<(), PostError> {
        let target = self.target("put", offset, len)?;
        // SAFETY: the target was checked; the caller's promise about the source.
        self.posted("put", unsafe { self.stream.copy(target, src, len as u64) })
    }

    /// Starts a copy of `len` bytes from `offset` of the peer's slot to GPU memory.
    ///
    /// # Safety
    /// `dst` is valid for `len` bytes, and nothing else touches it until a `quiet` covers this call.
    ///
    /// # Errors
    /// [`PostError`]; nothing is read then.
    pub unsafe fn get_device(
        &mut self,
        dst: DevicePtr,
        offset: usize,
        len: usize,
    ) -> Result<(), PostError> {
        let source = self.target("get", offset, len)?;
        // SAFETY: the source was checked; the caller's promise about the target.
        self.posted("get", unsafe { self.stream.copy(dst, source, len as u64) })
    }

    fn target(&self, op: &'static str, offset: usize, len: usize) -> Result<DevicePtr, PostError> {
        check_range(op, offset, len, self.slot_bytes)?;
        Ok(self.peer.ptr().add(offset as u64))
    }

    fn posted(&mut self, op: &'static str, posted: Result<(), GpuError>) -> Result<(), PostError> {
        self.outstanding += 1;
        posted.map_err(|error| failed(op, &error))
    }
}

impl Endpoint for DeviceEndpoint {
    type RemoteKey = SlotKey;

    fn kind(&self) -> TransportKind {
        TransportKind::CudaIpc
    }

    fn register(&mut self, _region: &Region) -> Result<(), PostError> {
        Ok(())
    }

    fn direct(&self, _key: SlotKey) -> Option<NonNull<u8>> {
        None
    }

    unsafe fn put(&mut self, dst: RemoteRange<SlotKey>, src: LocalRange) -> Result<(), PostError> {
        let source = DevicePtr(src.as_ptr().as_ptr() as u64);
        let len = dst.len.max(src.len());
        self.target("put", dst.offset, len)?;
        // SAFETY: a local range is mapped memory; the caller keeps it unwritten.
        unsafe { self.put_device(dst.offset, source, src.len()) }
    }

    unsafe fn get(&mut self, dst: LocalRange, src: RemoteRange<SlotKey>) -> Result<(), PostError> {
        let target = DevicePtr(dst.as_ptr().as_ptr() as u64);
        let len = src.len.max(dst.len());
        self.target("get", src.offset, len)?;
        // SAFETY: a local range is mapped memory; the caller keeps others away from it.
        unsafe { self.get_device(target, src.offset, dst.len()) }
    }

    fn add_flag(&mut self, dst: RemoteRange<SlotKey>, value: u64) -> Result<(), PostError> {
        check_flag("add_flag", dst.offset, self.slot_bytes)?;
        let flag = self.peer.ptr().add(dst.offset as u64);
        // SYNC POINT publish: the kernel runs after the stream's copies, and releases them.
        // SAFETY: in range and aligned, in memory that this GPU reaches.
        self.posted("add_flag", unsafe { self.stream.add_flag(flag, value) })
    }

    fn fence(&mut self) -> Result<(), PostError> {
        // A stream keeps its order.
        Ok(())
    }

    fn quiet(&mut self, deadline: Instant) -> Result<(), QuietError> {
        match self.stream.wait(deadline) {
            Ok(()) => {
                self.outstanding = 0;
                Ok(())
            }
            Err(GpuError::Deadline { .. }) => {
                Err(QuietError::Deadline { outstanding: self.outstanding })
            }
            Err(error) => Err(failed("quiet", &error).into()),
        }
    }

    fn wake(&mut self, _key: SlotKey, _waiting_offset: usize) -> Result<(), PostError> {
        let event = Arc::clone(&self.wake_peer);
        // In the stream's order: a wake-up ahead of the flag would be lost.
        let posted = self.stream.then(move || {
            if let Err(error) = signal_peer(event.as_fd()) {
                tracing::error!(%error, "cannot wake a peer");
            }
        });
        self.posted("wake", posted)
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.wake_self.as_fd())
    }
}

p2p_core::unbatched!(DeviceEndpoint);
p2p_core::immediate_progress!(DeviceEndpoint);

impl Drop for DeviceEndpoint {
    fn drop(&mut self) {
        // The mapping must not go from under a copy.
        match self.stream.wait(Instant::now() + DROP_LIMIT) {
            // SAFETY: dropped once, here, and used no more.
            Ok(()) => unsafe { ManuallyDrop::drop(&mut self.peer) },
            Err(error) => tracing::error!(%error, "a peer's GPU memory stays mapped"),
        }
    }
}

fn failed(op: &'static str, error: &GpuError) -> PostError {
    let code = match error {
        GpuError::Driver { code, .. } => i64::from(*code),
        _ => -1,
    };
    PostError::Transport { op, code, detail: error.to_string() }
}

/// Copies towards a peer end within microseconds, even if the peer is dead.
const DROP_LIMIT: Duration = Duration::from_secs(2);
