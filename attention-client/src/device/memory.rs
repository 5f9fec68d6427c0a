//! Device and host memory of a client, allocated once, and the parameters that point into it.

use std::mem::{offset_of, size_of};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytemuck::{Pod, Zeroable};
use kernels::abi::{
    ANSWER_HOLE, ClientState, DevicePtr, ErrorWord, FrameGeometry, Handle, MAX_FRAMES, MAX_PEERS,
    PATH_DIRECT, Placement, ServerPeer,
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
    /// Of `tables` on their way.
    staging: Vec<Staging>,
    /// Word whose bits end the waits for servers.
    pub abort: Arc<GpuBuffer>,
    /// By slot; those of recorded calls come after those of others.
    pub slots: Vec<SlotMemory>,
    /// By slot but for those of recorded calls, bf16 `[max_tokens, hidden]`: where the rows of a call go that
    /// nobody has asked for.
    pub rows: Vec<GpuBuffer>,
    /// Tokens of a full part of a call that is larger than a frame, and of the last one.
    pub counts: GpuBuffer,
    /// Page-locked: a number of tokens that was read, and `counts` on their way.
    pub words: GpuBuffer,
    num_layers: usize,
}

/// A page-locked copy of the tables.
#[derive(Debug)]
struct Staging {
    buffer: GpuBuffer,
    /// Behind the last copy of it to the device.
    copied: Event,
}

/// What one outstanding call needs.
#[derive(Debug)]
pub(super) struct SlotMemory {
    /// [`Handle`] with routes.
    pub handle: GpuBuffer,
    /// u32 `[max_tokens]`.
    pub token_missing: GpuBuffer,
    /// i32 `[max_tokens, top_k]`: what a call sends again, or its experts without those left out.
    pub topk_idx: GpuBuffer,
    /// f32 `[max_tokens, top_k]`.
    pub topk_weights: GpuBuffer,
    /// [`Status`], page-locked.
    pub status: GpuBuffer,
}

/// What a call reports: copied from the device behind its combine.
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
        num_slots: usize,
    ) -> Result<Self, GpuError> {
        let rows = u64::from(geometry.max_tokens);
        let choices = rows * u64::from(geometry.top_k) * 4;
        let table_bytes = Self::servers_offset(num_layers) + (MAX_PEERS * SERVER_BYTES) as u64;
        let slot = || {
            Ok::<_, GpuError>(SlotMemory {
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
            // Every outstanding call may have tables on their way, and so may the next one.
            staging: (0..=geometry.num_frames).map(|_| staging()).collect::<Result<_, _>>()?,
            abort: Arc::new(gpu.alloc_host(4096)?),
            slots: (0..num_slots).map(|_| slot()).collect::<Result<_, _>>()?,
            rows: (0..geometry.num_frames)
                .map(|_| gpu.alloc(rows * u64::from(geometry.hidden) * 2))
                .collect::<Result<_, _>>()?,
            counts: gpu.alloc(8)?,
            words: gpu.alloc_host(WORDS_BYTES)?,
            num_layers,
        })
    }

    pub fn placement(&self, layer_idx: usize) -> DevicePtr {
        self.tables.ptr().add((layer_idx * size_of::<Placement>()) as u64)
    }

    pub fn servers(&self) -> DevicePtr {
        self.tables.ptr().add(Self::servers_offset(self.num_layers))
    }

    /// Which staging buffer no copy uses, if any.
    pub fn free_staging(&self) -> Result<Option<usize>, GpuError> {
        for (idx, staging) in self.staging.iter().enumerate() {
            if staging.copied.is_done()? {
                return Ok(Some(idx));
            }
        }
        Ok(None)
    }

    /// Copies the tables to the device in the order of `stream`, and lets new servers' counts and answers
    /// begin. `staging` is that of a buffer that no earlier copy uses any more.
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
                // SAFETY: words of the state; kernels that use them come later in the stream.
                unsafe { stream.fill(self.state.at(at, bytes)?, 0, bytes)? };
            }
            if servers[idx].request.path == PATH_DIRECT {
                for (offset, bytes) in geometry.answer_rows() {
                    let rows = servers[idx].response.add(offset);
                    // SAFETY: the new server's slot, which is mapped as long as the seat is taken; it stores
                    // nothing there before the first request.
                    unsafe { stream.fill(rows, ANSWER_HOLE as u8, bytes)? };
                }
            }
        }
        // SAFETY: both buffers have this size; the staging one stays as it is until the event.
        unsafe {
            stream.copy(self.tables.ptr(), staging.ptr(), staging.len().min(self.tables.len()))?;
        }
        stream.record(copied)
    }

    /// Has a kernel tell the host what a call reports, behind what `stream` has. Its [number](Self::reported) comes last.
    pub fn report(&self, stream: &Stream, slot: usize) -> Result<(), GpuError> {
        let memory = &self.slots[slot];
        let head = size_of::<Handle>() as u64;
        let error = self.state.at(ERROR_OFFSET, ERROR_BYTES)?;
        // SAFETY: all ranges are within their buffers, and nobody looks at what is told before the stream was
        // waited for, or the number has come.
        unsafe {
            stream.tell(
                Piece { to: memory.status.at(head, ERROR_BYTES)?, from: error, bytes: ERROR_BYTES },
                Piece { to: memory.status.ptr(), from: memory.handle.ptr(), bytes: head },
            )
        }
    }

    /// What the last report of a slot says; to be asked when its copy is known to be done.
    pub fn status(&self, slot: usize) -> Status {
        let host = self.slots[slot].status.host();
        // SAFETY: page-locked memory of this size, and plain numbers.
        host.map_or_else(Status::zeroed, |host| unsafe { host.cast::<Status>().read_volatile() })
    }

    /// Forgets which servers the last report of a slot names; to be called when no copy of one is under way.
    pub fn forget_missing(&self, slot: usize) {
        let Some(host) = self.slots[slot].status.host() else { return };
        for field in [offset_of!(Handle, missing), offset_of!(Handle, refused)] {
            // SAFETY: a word of page-locked memory that holds a `Status`.
            unsafe {
                host.byte_add(offset_of!(Status, handle) + field).cast::<u32>().write_volatile(0)
            };
        }
    }

    /// Number of the last dispatch of a slot whose report is there, which may be asked at any time.
    pub fn reported(&self, slot: usize) -> u64 {
        let host = self.slots[slot].status.host();
        // SYNC POINT told: what the kernel stored before this word is seen behind it.
        // SAFETY: aligned, page-locked memory that begins with this word, which a kernel stores as a whole.
        host.map_or(0, |host| unsafe {
            let word = host.byte_add(offset_of!(Status, handle) + offset_of!(Handle, sequence));
            AtomicU64::from_ptr(word.as_ptr().cast()).load(Ordering::Acquire)
        })
    }

    /// Forgets the first error, in the order of `stream`.
    pub fn clear_error(&self, stream: &Stream) -> Result<(), GpuError> {
        // SAFETY: a part of the state; kernels that use it come later in the stream.
        unsafe { stream.fill(self.state.at(ERROR_OFFSET, ERROR_BYTES)?, 0, ERROR_BYTES) }
    }

    /// Values of somebody's device memory, by way of `stream`, which is waited for.
    ///
    /// # Safety
    /// `from` is as long as `out`.
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
        // SAFETY: the caller's promise; the staging buffer is kept when the copy was not seen to end.
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

    /// Values into the client's own device memory, by way of `stream`, which is waited for.
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
        // SAFETY: both ranges are valid; the staging buffer is kept when the copy was not seen to end.
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
// Kernels want both tables at multiples of 16.
const _: () = assert!(size_of::<Placement>().is_multiple_of(16));
const _: () = assert!(size_of::<Status>() == size_of::<Handle>() + size_of::<ErrorWord>());
