//! Copies of weights from mapped files to the GPU, through page-locked memory.

use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use kernels::abi::DevicePtr;
use kernels::gpu::{Gpu, GpuBuffer, GpuError, Stream};

use crate::compute::map_pages;

/// Copies to the GPU through two buffers in turn: the host fills one while the GPU reads the other. The
/// copies are on streams of their own, so no batch waits for them.
#[derive(Debug)]
pub(super) struct Uploader {
    gpu: Gpu,
    buffers: ManuallyDrop<[StagingBuffer; 2]>,
    next: usize,
}

#[derive(Debug)]
struct StagingBuffer {
    stream: Stream,
    /// Allocated for the first copy that needs it: page-locked memory takes its time.
    memory: Option<GpuBuffer>,
}

impl Uploader {
    pub(super) fn new(gpu: &Gpu) -> Result<Self, GpuError> {
        let buffer = || Ok(StagingBuffer { stream: gpu.stream()?, memory: None });
        let buffers = ManuallyDrop::new([buffer()?, buffer()?]);
        Ok(Self { gpu: gpu.clone(), buffers, next: 0 })
    }

    /// Starts a copy of `data` to GPU memory at `to`, which is valid for as many bytes and not in use.
    pub(super) fn copy_bytes(&mut self, to: DevicePtr, data: &[u8]) -> Result<(), GpuError> {
        self.copy_seen(to, data, |_| {})
    }

    /// Like [`copy_bytes`](Self::copy_bytes). Calls `see` for each part, in order, while the part is in the processor's
    /// cache.
    pub(super) fn copy_seen(
        &mut self,
        to: DevicePtr,
        data: &[u8],
        mut see: impl FnMut(&[u8]),
    ) -> Result<(), GpuError> {
        let mut at = to;
        for chunk in data.chunks(STAGING_BYTES) {
            // One by one they take longer than the copy.
            map_pages(chunk);
            self.chunk(at, chunk.len(), |staging| {
                for (to, from) in staging.chunks_mut(SEEN_BYTES).zip(chunk.chunks(SEEN_BYTES)) {
                    to.copy_from_slice(from);
                    see(to);
                }
            })?;
            at = at.add(chunk.len() as u64);
        }
        Ok(())
    }

    /// Like [`copy_bytes`](Self::copy_bytes), with values that are rounded to bf16.
    pub(super) fn copy_as_bf16(&mut self, to: DevicePtr, values: &[f32]) -> Result<(), GpuError> {
        let mut at = to;
        for chunk in values.chunks(STAGING_BYTES / 2) {
            self.chunk(at, chunk.len() * 2, |staging| {
                let (words, _) = staging.as_chunks_mut::<2>();
                for (word, value) in words.iter_mut().zip(chunk) {
                    *word = half::bf16::from_f32(*value).to_le_bytes();
                }
            })?;
            at = at.add(chunk.len() as u64 * 2);
        }
        Ok(())
    }

    /// The two buffers, for a filler that takes them in turn, beginning with [`free_buffer`](Self::free_buffer).
    pub(super) fn buffers(&mut self) -> Result<[NonNull<[u8]>; 2], GpuError> {
        let Self { gpu, buffers, .. } = self;
        let [first, second] = &mut **buffers;
        Ok([first.host(gpu)?.0, second.host(gpu)?.0])
    }

    /// The index of the next buffer. Waits until the copy out of it has ended: it may be filled until
    /// [`copy_buffer`](Self::copy_buffer).
    pub(super) fn free_buffer(&self) -> Result<usize, GpuError> {
        self.buffers[self.next].wait()?;
        Ok(self.next)
    }

    /// Starts to copy the first `len` bytes of the next buffer to `to`, which is valid for as many bytes and not in
    /// use. The other buffer is the next one then.
    pub(super) fn copy_buffer(&mut self, to: DevicePtr, len: usize) -> Result<(), GpuError> {
        let Self { gpu, buffers, next } = self;
        let buffer = &mut buffers[*next];
        *next = (*next + 1) % 2;
        let (_, from) = buffer.host(gpu)?;
        // SAFETY: the caller's promise about the target. The buffer does not change until the next wait.
        unsafe { buffer.stream.copy(to, from, len.min(STAGING_BYTES) as u64) }
    }

    /// Copies `out.len()` bytes of GPU memory at `from`, and waits for them.
    ///
    /// # Safety
    /// The range is valid, and no code writes it meanwhile.
    pub(super) unsafe fn read(&mut self, from: DevicePtr, out: &mut [u8]) -> Result<(), GpuError> {
        let mut at = from;
        for chunk in out.chunks_mut(STAGING_BYTES) {
            let idx = self.free_buffer()?;
            let Self { gpu, buffers, .. } = self;
            let (host, staging) = buffers[idx].host(gpu)?;
            // SAFETY: the caller's promise about the source. The buffer is free, and long enough.
            unsafe { buffers[idx].stream.copy(staging, at, chunk.len() as u64)? };
            buffers[idx].wait()?;
            // SAFETY: as many bytes, initialised by the allocation. The copy into them has ended.
            let bytes = unsafe {
                std::slice::from_raw_parts(host.cast::<u8>().as_ptr().cast_const(), chunk.len())
            };
            chunk.copy_from_slice(bytes);
            at = at.add(chunk.len() as u64);
        }
        Ok(())
    }

    /// Starts a copy within the GPU.
    ///
    /// # Safety
    /// Both ranges are valid. Until [`wait`](Self::wait) returns, the source is not written and the target
    /// not used.
    pub(super) unsafe fn copy_within_gpu(
        &mut self,
        to: DevicePtr,
        from: DevicePtr,
        bytes: u64,
    ) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        unsafe { self.buffers[self.next].stream.copy(to, from, bytes) }
    }

    /// Waits for all copies that were started.
    pub(super) fn wait(&self) -> Result<(), GpuError> {
        self.buffers.iter().try_for_each(StagingBuffer::wait)
    }

    fn chunk(
        &mut self,
        to: DevicePtr,
        len: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<(), GpuError> {
        let Self { gpu, buffers, next } = self;
        let buffer = &mut buffers[*next];
        *next = (*next + 1) % 2;
        let (host, from) = buffer.host(gpu)?;
        // The last copy out of this buffer must have ended before it is filled again.
        buffer.wait()?;
        // SAFETY: page-locked memory of this process, at least `len` bytes, initialised by its allocation. The wait
        // above has ended the copy that read it, and no other code uses it.
        fill(unsafe { std::slice::from_raw_parts_mut(host.cast().as_ptr(), len) });
        // SAFETY: the caller's promise about the target. The buffer does not change until the next wait.
        unsafe { buffer.stream.copy(to, from, len as u64) }
    }
}

impl StagingBuffer {
    /// Its memory, as the host and as the GPU reaches it.
    fn host(&mut self, gpu: &Gpu) -> Result<(NonNull<[u8]>, DevicePtr), GpuError> {
        let memory = match &mut self.memory {
            Some(memory) => memory,
            none => none.insert(gpu.alloc_host(STAGING_BYTES as u64)?),
        };
        let host = memory.host().ok_or(GpuError::Foreign)?;
        Ok((NonNull::slice_from_raw_parts(host, STAGING_BYTES), memory.ptr()))
    }

    fn wait(&self) -> Result<(), GpuError> {
        self.stream.wait(Instant::now() + COPY_LIMIT)
    }
}

impl Drop for Uploader {
    fn drop(&mut self) {
        // A copy may still read the buffers.
        if let Err(error) = self.wait() {
            tracing::error!(%error, "copies of weights did not end: their buffers are not freed");
            return;
        }
        // SAFETY: not used after this.
        unsafe { ManuallyDrop::drop(&mut self.buffers) };
    }
}

/// Parts that stay in a processor's cache between two passes.
const SEEN_BYTES: usize = 64 << 10;
/// Large enough to hide the start of a copy, small enough to be page-locked.
const STAGING_BYTES: usize = 8 << 20;
/// The copy of one buffer takes a millisecond. Only a lost GPU takes longer.
const COPY_LIMIT: Duration = Duration::from_secs(20);
