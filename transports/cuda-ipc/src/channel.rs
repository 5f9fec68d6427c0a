//! Two rings over device slots, driven by a host.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kernels::abi::DevicePtr;
use kernels::gpu::{Gpu, GpuBuffer, Stream};

use super::{DeviceEndpoint, DeviceError, DeviceSlot};
use p2p_core::channel::ChannelError;
use p2p_core::endpoint::Endpoint;
use p2p_core::region::{RemoteRange, SlotKey};
use p2p_core::ring::{RxCursor, TxCursor};
use p2p_core::slot::{CONSUMED, PROGRESS, PUBLISHED, SlotLayout, WAITING};

/// A pair of device slots: this process's, which the peer writes, and the peer's, mapped here.
///
/// Kernels take [`local`](Self::local) and [`window`](Self::window) and do everything themselves.
/// The rings are for hosts, with the rules of [`Channel`](p2p_core::Channel); a frame is named by
/// its number.
#[derive(Debug)]
pub struct DeviceChannel {
    // Dropped first, so that this side's copies end before its slot is freed.
    endpoint: DeviceEndpoint,
    gpu: Gpu,
    slot: DeviceSlot,
    layout: SlotLayout,
    /// Copy of the local control tail in host memory, and the stream that copies it.
    words: GpuBuffer,
    reader: Stream,
    tx: TxCursor,
    rx: RxCursor,
}

impl DeviceChannel {
    pub(super) fn new(
        gpu: &Gpu,
        layout: SlotLayout,
        slot: DeviceSlot,
        endpoint: DeviceEndpoint,
    ) -> Result<Self, DeviceError> {
        Ok(Self {
            endpoint,
            slot,
            layout,
            words: gpu.alloc_host(WORDS_BYTES)?,
            reader: gpu.stream()?,
            tx: TxCursor::new(layout.num_frames()),
            rx: RxCursor::new(layout.num_frames()),
            gpu: gpu.clone(),
        })
    }

    /// This process's slot, for its kernels.
    #[must_use]
    pub fn local(&self) -> DevicePtr {
        self.slot.ptr()
    }

    /// The peer's slot, for this process's kernels.
    #[must_use]
    pub fn window(&self) -> DevicePtr {
        self.endpoint.window()
    }

    /// Layout of both slots.
    #[must_use]
    pub const fn layout(&self) -> &SlotLayout {
        &self.layout
    }

    /// The endpoint, for one-sided operations beside the rings.
    pub const fn endpoint_mut(&mut self) -> &mut DeviceEndpoint {
        &mut self.endpoint
    }

    /// Descriptor that becomes readable after each frame and credit of the peer.
    #[must_use]
    pub fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.endpoint.wait_fd()
    }

    /// As [`Channel::start_at`](p2p_core::Channel::start_at).
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn start_at(&mut self, seq: u64) -> Result<(), DeviceError> {
        self.tx = TxCursor::starting_at(self.layout.num_frames(), seq);
        self.rx = RxCursor::starting_at(self.layout.num_frames(), seq);
        self.add(PUBLISHED, seq)?;
        self.add(CONSUMED, seq)
    }

    /// Number of the next frame to fill, or `None` while the peer has not given credit.
    ///
    /// # Errors
    /// [`DeviceError`], also if the peer's credits are impossible.
    pub fn try_reserve(&mut self) -> Result<Option<u64>, DeviceError> {
        if !self.tx.has_spare() {
            let consumed = self.word(CONSUMED)?;
            if !self.tx.has_credit(consumed).map_err(ChannelError::from)? {
                return Ok(None);
            }
        }
        Ok(Some(self.tx.next_seq()))
    }

    /// Starts a copy of `len` bytes at `src`, host or GPU memory, into the frame that
    /// [`try_reserve`](Self::try_reserve) returned, `offset` bytes from its start.
    ///
    /// # Safety
    /// As for [`DeviceEndpoint::put_device`].
    ///
    /// # Errors
    /// [`DeviceError`].
    pub unsafe fn fill(
        &mut self,
        offset: usize,
        src: DevicePtr,
        len: usize,
    ) -> Result<(), DeviceError> {
        let used_bytes = offset.saturating_add(len);
        if used_bytes > self.layout.frame_bytes() {
            return Err(self.misuse(used_bytes).into());
        }
        let at = self.layout.frame_offset(self.tx.next_seq()) + offset;
        // SAFETY: the caller's promise.
        unsafe { self.endpoint.put_device(at, src, len) }.map_err(ChannelError::from)?;
        Ok(())
    }

    /// Publishes the frame that [`try_reserve`](Self::try_reserve) returned.
    ///
    /// # Errors
    /// [`DeviceError`]; without credit nothing is published.
    pub fn publish(&mut self) -> Result<(), DeviceError> {
        if !self.tx.has_spare() {
            return Err(self.misuse(0).into());
        }
        // SYNC POINT `published`: in the stream's order after the frame's copies.
        self.add(PUBLISHED, 1)?;
        self.tx.advance();
        self.wake()
    }

    /// Number of the next frame that arrived, if any. The frame stays unchanged until
    /// [`release`](Self::release).
    ///
    /// # Errors
    /// [`DeviceError`], also if the peer's counter is impossible.
    pub fn try_next(&mut self) -> Result<Option<u64>, DeviceError> {
        let published = self.word(PUBLISHED)?;
        Ok(self.rx.take(published).map_err(ChannelError::from)?)
    }

    /// Address of a received frame in this GPU's memory. A faulty peer can still change it.
    #[must_use]
    pub fn frame(&self, seq: u64) -> DevicePtr {
        self.local().add(self.layout.frame_offset(seq) as u64)
    }

    /// Copies bytes of the local slot to the host. Blocks until the copy is done, for at most 5 s.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn read_local(&self, offset: usize, out: &mut [u8]) -> Result<(), DeviceError> {
        let deadline = Instant::now() + READ_LIMIT;
        Ok(self.gpu.read(&self.slot.memory, offset as u64, out, deadline)?)
    }

    /// Returns the oldest received frame to the peer as credit.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn release(&mut self) -> Result<(), DeviceError> {
        if !self.rx.release() {
            return Err(ChannelError::ReleaseUnderflow.into());
        }
        // SYNC POINT `consumed`: reads of the frame were waited for before this call.
        self.add(CONSUMED, 1)?;
        self.wake()
    }

    /// Tells the peer that this side is alive and working.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn bump_progress(&mut self) -> Result<(), DeviceError> {
        self.add(PROGRESS, 1)
    }

    /// A word of the local control tail: [`PUBLISHED`], [`CONSUMED`] or [`PROGRESS`].
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn word(&self, word: usize) -> Result<u64, DeviceError> {
        let tail = self.layout.control_offset(PUBLISHED) as u64;
        let from = self.slot.memory.at(tail, WORDS_BYTES)?;
        // SAFETY: both ranges have these bytes, and only this call touches the copy. After an error
        // of `wait` the copy may still run, into memory that stays allocated.
        unsafe { self.reader.copy(self.words.ptr(), from, WORDS_BYTES)? };
        self.reader.wait(Instant::now() + READ_LIMIT)?;
        let host = self
            .words
            .host()
            .ok_or(ChannelError::SlotBytes { found: 0, expected: WORDS_BYTES as usize })?;
        // SAFETY: control words are aligned, within the copy, and accessed atomically only.
        let value = unsafe { AtomicU64::from_ptr(host.as_ptr().add(word.min(WAITING)).cast()) };
        Ok(value.load(Ordering::Acquire))
    }

    fn add(&mut self, word: usize, value: u64) -> Result<(), DeviceError> {
        let offset = self.layout.control_offset(word);
        let dst = RemoteRange { key: SlotKey, offset, len: 8 };
        Ok(self.endpoint.add_flag(dst, value).map_err(ChannelError::from)?)
    }

    fn wake(&mut self) -> Result<(), DeviceError> {
        let offset = self.layout.control_offset(WAITING);
        Ok(self.endpoint.wake(SlotKey, offset).map_err(ChannelError::from)?)
    }

    fn misuse(&self, used_bytes: usize) -> ChannelError {
        let (next_seq, frame_bytes) = (self.tx.next_seq(), self.layout.frame_bytes());
        ChannelError::Publish { seq: next_seq, used_bytes, next_seq, frame_bytes }
    }
}

const WORDS_BYTES: u64 = WAITING as u64 + 8;
/// Copies to the host end within microseconds unless the GPU is lost.
const READ_LIMIT: Duration = Duration::from_secs(5);
