//! A pair of slots as two frame rings, over any endpoint.
//!
//! Each side owns one slot, which the peer writes, and holds the key of the peer's slot, which it
//! writes. Frames go out through [`try_reserve`](Channel::try_reserve) and
//! [`publish`](Channel::publish). They come in through [`try_next`](Channel::try_next) and
//! [`release`](Channel::release).
//!
//! No call blocks or allocates. To wait, use [`wait::wait_until`](crate::wait::wait_until) with
//! [`has_news`](Channel::has_news), [`arm`](Channel::arm) and [`disarm`](Channel::disarm).

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use thiserror::Error;

use crate::endpoint::{PostError, Transport, TransportKind};
use crate::flags::{self, Contract};
use crate::region::{MapError, Region, RemoteRange};
use crate::ring::{Desync, RxCursor, TxCursor};
use crate::slot::{CONSUMED, PROGRESS, PUBLISHED, SlotLayout, WAITING};
use crate::view::{ReadView, WriteView};

/// A channel cannot go on. After any of these errors the caller must retire the channel.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ChannelError {
    /// The peer's counters are impossible.
    #[error(transparent)]
    Desync(#[from] Desync),
    /// The transport refused or failed.
    #[error(transparent)]
    Post(#[from] PostError),
    /// The local slot has another size than the layout. A local bug.
    #[error("slot of {found} bytes, expected {expected} bytes for the agreed layout")]
    SlotBytes {
        /// Bytes of the region.
        found: usize,
        /// Bytes the layout needs.
        expected: usize,
    },
    /// A frame was published with a length beyond its end, or out of turn. A local bug.
    #[error(
        "frame {seq} of {used_bytes} bytes cannot be published: expected frame {next_seq} of at most {frame_bytes} bytes"
    )]
    Publish {
        /// Frame given.
        seq: u64,
        /// Bytes given.
        used_bytes: usize,
        /// Frame expected.
        next_seq: u64,
        /// Bytes that fit.
        frame_bytes: usize,
    },
    /// `release` without a taken frame. A local bug.
    #[error("release without a taken frame")]
    ReleaseUnderflow,
    /// Staging memory could not be mapped.
    #[error(transparent)]
    Map(#[from] MapError),
}

/// A frame to fill and publish. Dropping it returns it unused.
#[derive(Debug)]
#[must_use = "a reserved frame does nothing until it is published"]
pub struct TxFrame {
    seq: u64,
}

impl TxFrame {
    /// Sequence number of the frame: the number of frames published before it.
    #[must_use]
    pub const fn seq(&self) -> u64 {
        self.seq
    }
}

/// A frame that arrived. It stays in the slot until [`Channel::release`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RxFrame {
    seq: u64,
}

impl RxFrame {
    /// Sequence number of the frame: the number of frames published before it.
    #[must_use]
    pub const fn seq(&self) -> u64 {
        self.seq
    }
}

/// Two rings, to one peer and from it.
///
/// # Examples
/// ```
/// use switchyard_p2p_core::{SlotConfig, backend::local};
///
/// let config = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
/// let (mut sender, mut receiver) = local::pair(config).unwrap();
///
/// let frame = sender.try_reserve().unwrap().expect("a free frame");
/// sender.write_view(&frame).put_bytes(0, b"hello").unwrap();
/// sender.publish(frame, 5).unwrap();
///
/// let frame = receiver.try_next().unwrap().expect("the frame");
/// let mut bytes = [0; 5];
/// receiver.view(&frame).copy_to(0, &mut bytes).unwrap();
/// receiver.release().unwrap();
/// assert_eq!(&bytes, b"hello");
/// ```
#[derive(Debug)]
pub struct Channel<E: Transport> {
    endpoint: E,
    layout: SlotLayout,
    local: Region,
    remote_key: E::RemoteKey,
    remote: Option<NonNull<u8>>,
    staging: Option<Region>,
    tx: TxCursor,
    rx: RxCursor,
    /// The last look for credit found none.
    starved: bool,
}

// SAFETY: `remote` points into memory that `endpoint` keeps mapped and that has no thread affinity;
// everything else is Send by itself.
unsafe impl<E: Transport> Send for Channel<E> {}

impl<E: Transport> Channel<E> {
    /// Joins the local slot `local`, fresh and zeroed, with the peer's slot behind `remote_key`.
    ///
    /// # Errors
    /// [`ChannelError::SlotBytes`] if `local` is shorter than `layout` says; [`ChannelError::Map`]
    /// if the endpoint needs staging memory and there is none.
    pub fn new(
        mut endpoint: E,
        layout: SlotLayout,
        local: Region,
        remote_key: E::RemoteKey,
    ) -> Result<Self, ChannelError> {
        if local.len() < layout.slot_bytes() {
            return Err(ChannelError::SlotBytes {
                found: local.len(),
                expected: layout.slot_bytes(),
            });
        }
        let remote = endpoint.direct(remote_key);
        let staging = match remote {
            Some(_) => None,
            None => {
                let staging = Region::anonymous(layout.frame_bytes() * layout.num_frames())?;
                endpoint.register(&staging)?;
                Some(staging)
            }
        };
        Ok(Self {
            endpoint,
            layout,
            local,
            remote_key,
            remote,
            staging,
            tx: TxCursor::new(layout.num_frames()),
            rx: RxCursor::new(layout.num_frames()),
            starved: false,
        })
    }

    /// Continues at frame `seq`, as if that many frames had gone both ways. For tests of large
    /// counters.
    ///
    /// Both sides call this before the first frame. Then each waits until its own counters show
    /// that the other side has called it too.
    ///
    /// # Errors
    /// [`ChannelError`] when the transport fails.
    pub fn start_at(&mut self, seq: u64) -> Result<(), ChannelError> {
        let num_frames = self.layout.num_frames();
        self.tx = TxCursor::starting_at(num_frames, seq);
        self.rx = RxCursor::starting_at(num_frames, seq);
        self.starved = false;
        self.add_remote(PUBLISHED, seq)?;
        self.add_remote(CONSUMED, seq)
    }

    /// The endpoint under the rings.
    #[must_use]
    pub const fn endpoint(&self) -> &E {
        &self.endpoint
    }

    /// The endpoint, for one-sided operations beside the rings.
    ///
    /// # Examples
    /// A put of 8 bytes into the first frame, then a flag behind it:
    ///
    /// ```
    /// use std::sync::atomic::AtomicU64;
    /// use std::time::{Duration, Instant};
    /// use switchyard_p2p_core::flags::{self, Contract};
    /// use switchyard_p2p_core::{Endpoint, Region, RemoteRange, SlotConfig, backend::local};
    ///
    /// let config = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
    /// let (mut writer, owner) = local::pair(config).unwrap();
    /// let key = writer.remote_key();
    /// let source = Region::anonymous(4096).unwrap();
    /// // SAFETY: no other thread uses the memory, which is longer than 8 bytes.
    /// unsafe { source.as_ptr().cast::<u64>().write(42) };
    ///
    /// let endpoint = writer.endpoint_mut();
    /// endpoint.register(&source).unwrap();
    /// let (bytes, flag) = (source.range(0, 8).unwrap(), 4088);
    /// // SAFETY: the source is not written again before `quiet` returns.
    /// unsafe { endpoint.put(RemoteRange { key, offset: 0, len: 8 }, bytes) }.unwrap();
    /// endpoint.add_flag(RemoteRange { key, offset: flag, len: 8 }, 1).unwrap();
    /// endpoint.quiet(Instant::now() + Duration::from_secs(1)).unwrap();
    ///
    /// let slot = owner.local_slot();
    /// let at = |offset| slot.range(offset, 8).unwrap().as_ptr().as_ptr().cast::<u64>();
    /// // SAFETY: an aligned word of a mapped slot, which both sides access atomically only.
    /// while flags::observe::<Contract>(unsafe { AtomicU64::from_ptr(at(flag)) }) == 0 {}
    /// // SAFETY: the flag is ordered behind the put, and the writer does not write again.
    /// assert_eq!(unsafe { at(0).read() }, 42);
    /// ```
    pub const fn endpoint_mut(&mut self) -> &mut E {
        &mut self.endpoint
    }

    /// Key of the peer's slot.
    #[must_use]
    pub const fn remote_key(&self) -> E::RemoteKey {
        self.remote_key
    }

    /// This side's slot. The peer writes it at any time.
    #[must_use]
    pub const fn local_slot(&self) -> &Region {
        &self.local
    }

    /// Layout of both slots.
    #[must_use]
    pub const fn layout(&self) -> &SlotLayout {
        &self.layout
    }

    /// Transport under the rings.
    #[must_use]
    pub fn kind(&self) -> TransportKind {
        self.endpoint.kind()
    }

    /// Descriptor for a [`WaitSet`](crate::wait::WaitSet).
    #[must_use]
    pub fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.endpoint.wait_fd()
    }

    /// Reserves the next frame to fill. Returns `None` while the peer has given no credit.
    ///
    /// The peer's counter is read only when all known credit is used up.
    ///
    /// # Errors
    /// [`ChannelError::Desync`] when the peer's credits are impossible.
    pub fn try_reserve(&mut self) -> Result<Option<TxFrame>, ChannelError> {
        self.starved = false;
        if !self.tx.has_spare() {
            // SYNC POINT `consumed`: acquires what the peer did before it gave the frame back.
            let consumed = flags::observe::<Contract>(self.local_word(CONSUMED));
            self.starved = !self.tx.has_credit(consumed)?;
        }
        Ok((!self.starved).then(|| TxFrame { seq: self.tx.next_seq() }))
    }

    /// Returns the memory to fill for a reserved frame: the peer's slot itself, or staging memory
    /// for a put.
    pub fn write_view(&mut self, frame: &TxFrame) -> WriteView<'_> {
        let offset = self.layout.frame_offset(frame.seq);
        let base = match (self.remote, &self.staging) {
            (Some(remote), _) => remote,
            (None, Some(staging)) => staging.as_ptr(),
            (None, None) => unreachable!("`new` makes staging memory where there is no mapping"),
        };
        // SAFETY: frame_offset + frame_bytes lies within the slot (SlotLayout) and within the staging
        // memory of the same layout; `&mut self` makes this the only writer in the process.
        unsafe { WriteView::new(base.add(offset), self.layout.frame_bytes()) }
    }

    /// Sends `frame` to the peer, with the first `used_bytes` filled, and wakes the peer if it
    /// sleeps.
    ///
    /// # Errors
    /// [`ChannelError`] when the transport fails. The frame was not published then.
    pub fn publish(&mut self, frame: TxFrame, used_bytes: usize) -> Result<(), ChannelError> {
        if frame.seq != self.tx.next_seq() || used_bytes > self.layout.frame_bytes() {
            return Err(ChannelError::Publish {
                seq: frame.seq,
                used_bytes,
                next_seq: self.tx.next_seq(),
                frame_bytes: self.layout.frame_bytes(),
            });
        }
        if let Some(staging) = &self.staging {
            let offset = self.layout.frame_offset(frame.seq);
            let src = staging.range(offset, used_bytes).ok_or(ChannelError::SlotBytes {
                found: staging.len(),
                expected: offset + used_bytes,
            })?;
            let dst = RemoteRange { key: self.remote_key, offset, len: used_bytes };
            // SAFETY: the staging frame is not written again before the peer has consumed it, which it
            // can only do after the put is complete.
            unsafe { self.endpoint.put(dst, src)? };
        }
        // SYNC POINT `published`: the add releases the frame's bytes to the peer's acquiring load.
        self.add_remote(PUBLISHED, 1)?;
        self.tx.advance();
        self.wake_peer()
    }

    /// Frames published and not yet consumed by the peer, by the last known counter.
    #[must_use]
    pub const fn in_flight(&self) -> u64 {
        self.tx.in_flight()
    }

    /// Frames taken and not yet released.
    #[must_use]
    pub const fn held(&self) -> u64 {
        self.rx.held()
    }

    /// Takes the next frame that arrived, if any. It stays in the slot until
    /// [`release`](Self::release).
    ///
    /// # Errors
    /// [`ChannelError::Desync`] when the peer published a frame without credit.
    pub fn try_next(&mut self) -> Result<Option<RxFrame>, ChannelError> {
        // SYNC POINT `published`: acquires the frame's bytes.
        let published = flags::observe::<Contract>(self.local_word(PUBLISHED));
        let taken = self.rx.take(published)?;
        if taken.is_none() {
            // No frame came, and perhaps none can come: the transport may know.
            self.endpoint.health()?;
        }
        Ok(taken.map(|seq| RxFrame { seq }))
    }

    /// The bytes of a taken frame. The peer can still change them: copy first, then check the copy,
    /// then use it.
    #[must_use]
    pub fn view(&self, frame: &RxFrame) -> ReadView<'_> {
        let offset = self.layout.frame_offset(frame.seq);
        // SAFETY: the frame lies within the local slot, which this channel keeps mapped.
        unsafe { ReadView::new(self.local.as_ptr().add(offset), self.layout.frame_bytes()) }
    }

    /// Returns the oldest taken frame to the peer as credit.
    ///
    /// # Errors
    /// [`ChannelError`] when no frame is taken or the transport fails.
    pub fn release(&mut self) -> Result<(), ChannelError> {
        if !self.rx.release() {
            return Err(ChannelError::ReleaseUnderflow);
        }
        // SYNC POINT `consumed`: the add releases our reads of the frame to the peer's next writes.
        let offset = self.layout.control_offset(CONSUMED);
        let dst = RemoteRange { key: self.remote_key, offset, len: 8 };
        self.endpoint.add_flag_lazily(dst, 1)?;
        self.wake_peer()
    }

    /// Tells the peer that this side is alive and working on what it accepted.
    ///
    /// # Errors
    /// [`ChannelError`] when the transport fails.
    pub fn bump_progress(&mut self) -> Result<(), ChannelError> {
        self.add_remote(PROGRESS, 1)
    }

    /// As [`bump_progress`](Self::bump_progress), but only if the endpoint has room to spare.
    /// Otherwise the addition might wait for the peer's process, or use room that frames need.
    /// Returns true if the progress was sent. For threads that serve several peers.
    ///
    /// # Errors
    /// As for `bump_progress`.
    pub fn try_bump_progress(&mut self) -> Result<bool, ChannelError> {
        let has_room = self.endpoint.has_room_to_spare();
        if has_room {
            self.bump_progress()?;
        }
        Ok(has_room)
    }

    /// A number that changes whenever the peer publishes, consumes or makes progress.
    #[must_use]
    pub fn peer_activity(&self) -> u64 {
        // Relaxed: callers use only the change itself, and read no memory because of it.
        [PUBLISHED, CONSUMED, PROGRESS]
            .into_iter()
            .map(|word| self.local_word(word).load(Ordering::Relaxed))
            .fold(0, u64::wrapping_add)
    }

    /// Checks that the transport still works towards the peer, as far as is known.
    ///
    /// # Errors
    /// [`ChannelError::Post`]; the channel must be retired.
    pub fn health(&self) -> Result<(), ChannelError> {
        Ok(self.endpoint.health()?)
    }

    /// Number of times that the peer has reported progress.
    #[must_use]
    pub fn peer_progress(&self) -> u64 {
        self.local_word(PROGRESS).load(Ordering::Acquire)
    }

    /// Tells whether a frame arrived that was not taken yet, or a credit after
    /// [`try_reserve`](Self::try_reserve) found none.
    #[must_use]
    pub fn has_news(&self) -> bool {
        // Relaxed: the caller observes the flag again before it acts.
        self.has_frame()
            || (self.starved
                && self.local_word(CONSUMED).load(Ordering::Relaxed) != self.tx.consumed_seen())
    }

    /// Tells whether a frame arrived that was not taken yet. The cheapest poll: one load.
    #[must_use]
    pub fn has_frame(&self) -> bool {
        self.local_word(PUBLISHED).load(Ordering::Relaxed) != self.rx.taken()
    }

    /// Asks the peer for a wake-up on its next publish or release. Check
    /// [`has_news`](Self::has_news) once more before sleeping.
    pub fn arm(&self) {
        // SYNC POINT `waiting`: either we see the peer's flag or it sees our request.
        flags::arm::<Contract, _>(self.local_word(WAITING));
    }

    /// Takes the request of [`arm`](Self::arm) back.
    pub fn disarm(&self) {
        flags::disarm(self.local_word(WAITING));
    }

    /// Returns the first word of the peer's slot and of the local slot, or `None` if the peer's slot is
    /// not mapped. A benchmark measures a bare flag with them, before the first frame is reserved.
    #[cfg(not(loom))]
    #[must_use]
    pub fn raw_words(&self) -> Option<(&AtomicU64, &AtomicU64)> {
        let theirs = self.remote?;
        // SAFETY: both slots are page-aligned, longer than a word, and mapped as long as `self`; the
        // benchmark only accesses these words atomically.
        unsafe {
            Some((
                AtomicU64::from_ptr(theirs.as_ptr().cast()),
                AtomicU64::from_ptr(self.local.as_ptr().as_ptr().cast()),
            ))
        }
    }

    fn wake_peer(&mut self) -> Result<(), ChannelError> {
        Ok(self.endpoint.wake(self.remote_key, self.layout.control_offset(WAITING))?)
    }

    fn add_remote(&mut self, word: usize, value: u64) -> Result<(), ChannelError> {
        let offset = self.layout.control_offset(word);
        let dst = RemoteRange { key: self.remote_key, offset, len: 8 };
        Ok(self.endpoint.add_flag(dst, value)?)
    }

    fn local_word(&self, word: usize) -> &AtomicU64 {
        let offset = self.layout.control_offset(word);
        // SAFETY: control words are 8-byte aligned within the page-aligned local slot, stay mapped as
        // long as `self`, and are only ever accessed atomically.
        unsafe { AtomicU64::from_ptr(self.local.as_ptr().add(offset).as_ptr().cast()) }
    }
}
