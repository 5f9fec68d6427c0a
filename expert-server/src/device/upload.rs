//! Weights from mapped files to the GPU, through page-locked memory.

use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

use kernels::abi::DevicePtr;
use kernels::gpu::{Gpu, GpuBuffer, GpuError, Stream};

/// Copies to the GPU by turns through two buffers: one is filled while the other is under way. It has
/// streams of its own, so nobody who computes waits for it.
#[derive(Debug)]
pub(super) struct Uploader {
    lanes: ManuallyDrop<[Lane; 2]>,
    next: usize,
}

#[derive(Debug)]
struct Lane {
    stream: Stream,
    staging: GpuBuffer,
}

impl Uploader {
    pub(super) fn new(gpu: &Gpu) -> Result<Self, GpuError> {
        let lane =
            || Ok(Lane { stream: gpu.stream()?, staging: gpu.alloc_host(STAGING_BYTES as u64)? });
        Ok(Self { lanes: ManuallyDrop::new([lane()?, lane()?]), next: 0 })
    }

    /// Starts copying `data` to GPU memory at `to`, which is valid for as many bytes and which nobody
    /// else uses yet.
    pub(super) fn bytes(&mut self, to: DevicePtr, data: &[u8]) -> Result<(), GpuError> {
        let mut at = to;
        for chunk in data.chunks(STAGING_BYTES) {
            self.chunk(at, chunk.len(), |staging| staging.copy_from_slice(chunk))?;
            at = at.add(chunk.len() as u64);
        }
        Ok(())
    }

    /// As [`bytes`](Self::bytes), of values that are rounded to bf16.
    pub(super) fn as_bf16(&mut self, to: DevicePtr, values: &[f32]) -> Result<(), GpuError> {
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

    /// Starts a copy within the GPU.
    ///
    /// # Safety
    /// Both ranges are valid; nobody writes the source or uses the target before `settle`.
    pub(super) unsafe fn within(
        &mut self,
        to: DevicePtr,
        from: DevicePtr,
        bytes: u64,
    ) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        unsafe { self.lanes[self.next].stream.copy(to, from, bytes) }
    }

    /// Waits for everything that was started.
    pub(super) fn settle(&self) -> Result<(), GpuError> {
        self.lanes.iter().try_for_each(Lane::wait)
    }

    fn chunk(
        &mut self,
        to: DevicePtr,
        len: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<(), GpuError> {
        let lane = &self.lanes[self.next];
        self.next = (self.next + 1) % self.lanes.len();
        // What this lane had before must have left its buffer.
        lane.wait()?;
        if let Some(host) = lane.staging.host() {
            // SAFETY: this process's own page-locked memory, at least `len` bytes, initialised when it
            // was made; no copy reads it, as was waited for, and nobody else knows it.
            fill(unsafe { std::slice::from_raw_parts_mut(host.as_ptr(), len) });
        }
        // SAFETY: the caller's promise about the target; the buffer stays as it is until the next wait.
        unsafe { lane.stream.copy(to, lane.staging.ptr(), len as u64) }
    }
}

impl Lane {
    fn wait(&self) -> Result<(), GpuError> {
        self.stream.wait(Instant::now() + COPY_LIMIT)
    }
}

impl Drop for Uploader {
    fn drop(&mut self) {
        // The buffers must not go from under a copy.
        if let Err(error) = self.settle() {
            tracing::error!(%error, "copies of weights did not end: their buffers are kept");
            return;
        }
        // SAFETY: not used after this.
        unsafe { ManuallyDrop::drop(&mut self.lanes) };
    }
}

/// Large enough that a copy's start does not show, small enough to be had.
const STAGING_BYTES: usize = 8 << 20;
/// One buffer takes a millisecond; more only happens on a GPU that is lost.
const COPY_LIMIT: Duration = Duration::from_secs(20);
