//! Device and host memory of a client, allocated once.

use std::mem::{offset_of, size_of};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytemuck::{Pod, Zeroable};
use kernels::abi::{
    ANSWER_HOLE, CALL_STAMPS, ClientState, DevicePtr, ErrorWord, FrameGeometry, Handle, MAX_FRAMES,
    MAX_PEERS, PATH_DIRECT, Placement, ServerPeer,
};
use kernels::gpu::{Event, Gpu, GpuBuffer, GpuError, Piece, Stream};

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Memory {
    pub gpu: Gpu,
    /// [`ClientState`].
    pub state: GpuBuffer,
    /// [`Placement`] of every MoE layer, then [`ServerPeer`] `[MAX_PEERS]`.
    pub tables: GpuBuffer,
    /// Page-locked copies of `tables`, for uploads.
    staging: Vec<Staging>,
    /// Word whose bits end the waits of kernels for servers.
    pub abort: Arc<GpuBuffer>,
    /// By call index. Recorded calls come after the others.
    pub calls: Vec<CallMemory>,
    /// Scratch for early sums, by call index without recorded calls: bf16 `[max_tokens, hidden]`.
    pub rows: Vec<GpuBuffer>,
    /// For a batch larger than a frame: tokens of a full part, and of the last part.
    pub counts: GpuBuffer,
    /// Page-locked: the number of tokens read from the device, and the source of `counts`.
    pub words: GpuBuffer,
    /// u64 `[calls][CALL_STAMPS]`: times of calls by sequence, if they are noted.
    pub trace: Option<GpuBuffer>,
    num_layers: usize,
}

/// A page-locked copy of the tables.
#[derive(Debug)]
struct Staging {
    buffer: GpuBuffer,
    /// Recorded behind the last copy of it to the device.
    copied: Event,
}

/// Memory of one outstanding call.
#[derive(Debug)]
pub(super) struct CallMemory {
    /// [`Handle`] with routes.
    pub handle: GpuBuffer,
    /// u32 `[max_tokens]`.
    pub token_missing: GpuBuffer,
    /// i32 `[max_tokens, top_k]`: experts of a retry, or the call's experts without those left out.
    pub topk_idx: GpuBuffer,
    /// f32 `[max_tokens, top_k]`.
    pub topk_weights: GpuBuffer,
    /// [`Status`], page-locked.
    pub status: GpuBuffer,
}

/// Report of a call, copied from the device behind its combine.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub(super) struct Status {
    pub handle: Handle,
    pub error: ErrorWord,
}

impl Memory {
    pub fn new(
        gpu: &Gpu,
        geometry: &FrameGeometry,
        num_layers: usize,
        num_calls: usize,
        num_traced: u32,
    ) -> Result<Self, GpuError> {
        let rows = u64::from(geometry.max_tokens);
        let choices = rows * u64::from(geometry.top_k) * 4;
        let table_bytes = Self::servers_offset(num_layers) + (MAX_PEERS * SERVER_BYTES) as u64;
        let call = || {
            Ok::<_, GpuError>(CallMemory {
                handle: gpu.alloc(geometry.handle_bytes())?,
                token_missing: gpu.alloc(rows * 4)?,
                topk_idx: gpu.alloc(choices)?,
                topk_weights: gpu.alloc(choices)?,
                status: gpu.alloc_host(size_of::<Status>() as u64)?,
            })
        };
        let staging = || {
            Ok::<_, GpuError>(Staging {
                buffer: gpu.alloc_host(table_bytes)?,
                copied: gpu.event()?,
            })
        };
        Ok(Self {
            gpu: gpu.clone(),
            state: gpu.alloc(size_of::<ClientState>() as u64)?,
            tables: gpu.alloc(table_bytes)?,
            // Every outstanding call may have an upload running, and so may the next one.
            staging: (0..=geometry.num_frames).map(|_| staging()).collect::<Result<_, _>>()?,
            abort: Arc::new(gpu.alloc_host(4096)?),
            calls: (0..num_calls).map(|_| call()).collect::<Result<_, _>>()?,
            rows: (0..geometry.num_frames)
                .map(|_| gpu.alloc(rows * u64::from(geometry.hidden) * 2))
                .collect::<Result<_, _>>()?,
            counts: gpu.alloc(8)?,
            words: gpu.alloc_host(WORDS_BYTES)?,
            trace: match u64::from(num_traced) {
                0 => None,
                num => Some(gpu.alloc(num * CALL_STAMPS as u64 * 8)?),
            },
            num_layers,
        })
    }

    pub fn placement(&self, layer_idx: usize) -> DevicePtr {
        self.tables.ptr().add((layer_idx * size_of::<Placement>()) as u64)
    }

    pub fn trace_ptr(&self) -> DevicePtr {
        self.trace.as_ref().map_or(DevicePtr::NULL, GpuBuffer::ptr)
    }

    pub fn servers(&self) -> DevicePtr {
        self.tables.ptr().add(Self::servers_offset(self.num_layers))
    }

    /// A staging buffer that no copy uses, if any.
    pub fn free_staging(&self) -> Result<Option<usize>, GpuError> {
        for (idx, staging) in self.staging.iter().enumerate() {
            if staging.copied.is_done()? {
                return Ok(Some(idx));
            }
        }
        Ok(None)
    }

    /// Copies the tables to the device in the order of `stream`, and resets the counts and answer rows of new servers
    /// (mask `fresh`). No earlier copy may still use buffer `staging`.
    pub fn upload(
        &self,
        stream: &Stream,
        staging: usize,
        geometry: &FrameGeometry,
        placements: &[Placement],
        servers: &[ServerPeer; MAX_PEERS],
        fresh: u32,
    ) -> Result<(), GpuError> {
        let Staging { buffer: staging, copied } = &self.staging[staging];
        let parts: [(u64, &[u8]); 2] = [
            (0, bytemuck::cast_slice(placements)),
            (Self::servers_offset(self.num_layers), bytemuck::cast_slice(servers)),
        ];
        for (offset, bytes) in parts {
            staging.at(offset, bytes.len() as u64)?;
            if let Some(host) = staging.host() {
                // SAFETY: the range was checked, and no copy reads this buffer now.
                unsafe {
                    let to = host.add(offset as usize);
                    to.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
                }
            }
        }
        for idx in (0..MAX_PEERS).filter(|idx| fresh >> idx & 1 != 0) {
            let per_server = MAX_FRAMES as usize * 8;
            for (at, bytes) in [
                (offset_of!(ClientState, posted) + idx * 8, 8),
                (offset_of!(ClientState, posted) + (MAX_PEERS + idx) * 8, 8),
                (offset_of!(ClientState, lost) + idx * 8, 8),
                (offset_of!(ClientState, summed) + idx * per_server, per_server),
            ] {
                let (at, bytes) = (at as u64, bytes as u64);
                // SAFETY: words of the state. Kernels that use them come later in the stream.
                unsafe { stream.fill(self.state.at(at, bytes)?, 0, bytes)? };
            }
            if servers[idx].request.path == PATH_DIRECT {
                for (offset, bytes) in geometry.answer_rows() {
                    let rows = servers[idx].response.add(offset);
                    // SAFETY: the slot for the new server's answers stays mapped while its link has the place. The
                    // server stores nothing there before the first request.
                    unsafe { stream.fill(rows, ANSWER_HOLE as u8, bytes)? };
                }
            }
        }
        // SAFETY: both buffers have this size, and the staging one does not change before the event.
        unsafe {
            stream.copy(self.tables.ptr(), staging.ptr(), staging.len().min(self.tables.len()))?;
        }
        stream.record(copied)
    }

    /// Launches a kernel that stores the report of a call to the host, behind earlier work of `stream`. It stores the
    /// [number](Self::reported) last.
    pub fn report(&self, stream: &Stream, idx: usize) -> Result<(), GpuError> {
        let memory = &self.calls[idx];
        let head = size_of::<Handle>() as u64;
        let error = self.state.at(ERROR_OFFSET, ERROR_BYTES)?;
        // SAFETY: all ranges are within their buffers. The host reads the report only after a wait for the stream, or
        // after the number has arrived.
        unsafe {
            stream.tell(
                Piece { to: memory.status.at(head, ERROR_BYTES)?, from: error, bytes: ERROR_BYTES },
                Piece { to: memory.status.ptr(), from: memory.handle.ptr(), bytes: head },
            )
        }
    }

    /// The last report of a call. Its copy must be complete.
    pub fn status(&self, idx: usize) -> Status {
        let host = self.calls[idx].status.host();
        // SAFETY: page-locked memory of this size, and plain numbers.
        host.map_or_else(Status::zeroed, |host| unsafe { host.cast::<Status>().read_volatile() })
    }

    /// Clears the servers that the last report of a call names. No copy of a report may be running.
    pub fn clear_missing(&self, idx: usize) {
        let Some(host) = self.calls[idx].status.host() else { return };
        for field in [offset_of!(Handle, missing), offset_of!(Handle, refused)] {
            // SAFETY: a word of page-locked memory that holds a `Status`.
            unsafe {
                host.byte_add(offset_of!(Status, handle) + field).cast::<u32>().write_volatile(0)
            };
        }
    }

    /// Number of the last dispatch whose report has arrived for a call. May be read at any time.
    pub fn reported(&self, idx: usize) -> u64 {
        let host = self.calls[idx].status.host();
        // SYNC POINT told: everything that the kernel stored before this word is visible after this load.
        // SAFETY: aligned, page-locked memory that begins with this word, which a kernel stores as a whole.
        host.map_or(0, |host| unsafe {
            let word = host.byte_add(offset_of!(Status, handle) + offset_of!(Handle, sequence));
            AtomicU64::from_ptr(word.as_ptr().cast()).load(Ordering::Acquire)
        })
    }

    /// Clears the error word, in the order of `stream`.
    pub fn clear_error(&self, stream: &Stream) -> Result<(), GpuError> {
        // SAFETY: a part of the state. Kernels that use it come later in the stream.
        unsafe { stream.fill(self.state.at(ERROR_OFFSET, ERROR_BYTES)?, 0, ERROR_BYTES) }
    }

    /// Reads `count` values of device memory into `out`, in the order of `stream`. Blocks until the copy is done, for
    /// `bound` at most.
    ///
    /// # Safety
    /// `from` holds `count` values.
    pub unsafe fn fetch<T: Pod>(
        &self,
        stream: &Stream,
        from: DevicePtr,
        out: &mut Vec<T>,
        count: usize,
        bound: Duration,
    ) -> Result<(), GpuError> {
        out.clear();
        out.resize(count, T::zeroed());
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(out);
        if bytes.is_empty() {
            return Ok(());
        }
        let staging = self.gpu.alloc_host(bytes.len() as u64)?;
        // SAFETY: the caller's promise. The staging buffer is leaked if the copy may still run.
        let copied = unsafe { stream.copy(staging.ptr(), from, bytes.len() as u64) };
        if let Err(error) = copied.and_then(|()| stream.wait(Instant::now() + bound)) {
            std::mem::forget(staging);
            return Err(error);
        }
        if let Some(host) = staging.host() {
            // SAFETY: of this length, and complete.
            unsafe { host.as_ptr().copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        }
        Ok(())
    }

    /// Writes values to the client's own device memory, in the order of `stream`. Blocks until the copy is done, for
    /// `bound` at most.
    pub fn send<T: Pod>(
        &self,
        stream: &Stream,
        to: &GpuBuffer,
        values: &[T],
        bound: Duration,
    ) -> Result<(), GpuError> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        if bytes.is_empty() {
            return Ok(());
        }
        let target = to.at(0, bytes.len() as u64)?;
        let staging = self.gpu.alloc_host(bytes.len() as u64)?;
        if let Some(host) = staging.host() {
            // SAFETY: fresh memory of this length.
            unsafe { host.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        }
        // SAFETY: both ranges are valid. The staging buffer is leaked if the copy may still run.
        let copied = unsafe { stream.copy(target, staging.ptr(), bytes.len() as u64) };
        if let Err(error) = copied.and_then(|()| stream.wait(Instant::now() + bound)) {
            std::mem::forget(staging);
            return Err(error);
        }
        Ok(())
    }

    const fn servers_offset(num_layers: usize) -> u64 {
        (num_layers * size_of::<Placement>()) as u64
    }
}

pub(super) const WORDS_BYTES: u64 = 16;
const SERVER_BYTES: usize = size_of::<ServerPeer>();
pub(super) const ERROR_OFFSET: u64 = offset_of!(ClientState, error) as u64;
pub(super) const ERROR_BYTES: u64 = size_of::<ErrorWord>() as u64;
// Kernels need both tables at multiples of 16.
const _: () = assert!(size_of::<Placement>().is_multiple_of(16));
const _: () = assert!(size_of::<Status>() == size_of::<Handle>() + size_of::<ErrorWord>());
