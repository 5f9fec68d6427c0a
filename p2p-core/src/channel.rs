//! A pair of slots as two frame rings, over any endpoint.
//!
//! Each side owns one slot, which the peer writes, and holds the key of the peer's slot, which it
//! writes itself. Frames go out through [`try_reserve`](Channel::try_reserve) and
//! [`publish`](Channel::publish), and come in through [`try_next`](Channel::try_next) and
//! [`release`](Channel::release). No call blocks or allocates; waiting is
//! [`wait::wait_until`](crate::wait::wait_until) with [`has_news`](Channel::has_news),
//! [`arm`](Channel::arm) and [`disarm`](Channel::disarm).

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

/// A channel cannot go on. Every variant means: retire the channel.
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

/// A frame that may be filled and published. Dropping it gives it back unused.
#[derive(Debug)]
#[must_use = "a reserved frame does nothing until it is published"]
pub struct TxFrame {
    seq: u64,
}

impl TxFrame {
    /// Sequence number of the frame: how many were published before it.
    #[must_use]
    pub const fn seq(&self) -> u64 {
        self.seq
    }
}

/// A frame that arrived and is held until [`Channel::release`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RxFrame {
    seq: u64,
}

impl RxFrame {
    /// Sequence number of the frame: how many were published before it.
    #[must_use]
    pub const fn seq(&self) -> u64 {
        self.seq
    }
}

/// Two rings to and from one peer.
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
    /// Whether the last look for credit found none.
    starved: bool,
}

// SAFETY: `remote` points into memory that `endpoint` keeps mapped and that has no thread affinity;
// everything else is Send by itself.
unsafe impl<E: Transport> Send for Channel<E> {}

impl<E: Transport> Channel<E> {
    /// Joins the local slot `local`, fresh and zeroed, with the peer's slot behind `remote_key`.
    ///
    /// # Errors
    /// [`ChannelError::SlotBytes`] when `local` does not fit `layout`; [`ChannelError::Map`] when the
    /// endpoint needs staging memory and there is none.
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

    /// Continues at frame `seq`, as if that many had gone both ways: for tests of large counters. Both
    /// sides call it before the first frame, and wait until their own counters say that the other has.
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

    /// Transport underneath.
    #[must_use]
    pub fn kind(&self) -> TransportKind {
        self.endpoint.kind()
    }

    /// Descriptor for a [`WaitSet`](crate::wait::WaitSet).
    #[must_use]
    pub fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.endpoint.wait_fd()
    }

    /// The next frame to fill, or `None` while the peer has not given credit. The peer's counter is
    /// only looked at when all credit seen so far is used up.
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

    /// Where to write a reserved frame: the peer's slot itself, or staging memory for a put.
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

    /// Gives `frame`, of which the first `used_bytes` are filled, to the peer.
    ///
    /// # Errors
    /// [`ChannelError`] when the transport fails; the frame was not published then.
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

    /// Frames published and, as far as was seen, not yet consumed by the peer.
    #[must_use]
    pub const fn in_flight(&self) -> u64 {
        self.tx.in_flight()
    }

    /// Frames taken and not yet released.
    #[must_use]
    pub const fn held(&self) -> u64 {
        self.rx.held()
    }

    /// The next frame that arrived, if any. It is held until [`release`](Self::release).
    ///
    /// # Errors
    /// [`ChannelError::Desync`] when the peer published what it had no credit for.
    pub fn try_next(&mut self) -> Result<Option<RxFrame>, ChannelError> {
        // SYNC POINT `published`: acquires the frame's bytes.
        let published = flags::observe::<Contract>(self.local_word(PUBLISHED));
        let taken = self.rx.take(published)?;
        if taken.is_none() {
            // Nothing came, and perhaps nothing can: the transport may know.
            self.endpoint.health()?;
        }
        Ok(taken.map(|seq| RxFrame { seq }))
    }

    /// The bytes of a held frame. The peer can still change them: copy, then check, then use.
    #[must_use]
    pub fn view(&self, frame: &RxFrame) -> ReadView<'_> {
        let offset = self.layout.frame_offset(frame.seq);
        // SAFETY: the frame lies within the local slot, which this channel keeps mapped.
        unsafe { ReadView::new(self.local.as_ptr().add(offset), self.layout.frame_bytes()) }
    }

    /// Gives the oldest held frame back to the peer as credit.
    ///
    /// # Errors
    /// [`ChannelError`] when no frame is held or the transport fails.
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

    /// As [`bump_progress`](Self::bump_progress), unless that might wait for the peer's process, or leave too
    /// little room for what matters more. Whether the peer was told. For threads that serve several peers.
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

    /// A number that changes whenever the peer shows life: it published, consumed or made progress.
    #[must_use]
    pub fn peer_activity(&self) -> u64 {
        // Relaxed: only the fact of a change is used, never data behind it.
        [PUBLISHED, CONSUMED, PROGRESS]
            .into_iter()
            .map(|word| self.local_word(word).load(Ordering::Relaxed))
            .fold(0, u64::wrapping_add)
    }

    /// Whether the transport still works towards the peer, as far as is known.
    ///
    /// # Errors
    /// [`ChannelError::Post`]; the channel must be retired.
    pub fn health(&self) -> Result<(), ChannelError> {
        Ok(self.endpoint.health()?)
    }

    /// How often the peer has said that it makes progress.
    #[must_use]
    pub fn peer_progress(&self) -> u64 {
        self.local_word(PROGRESS).load(Ordering::Acquire)
    }

    /// Whether a frame arrived that was not taken yet, or a credit after
    /// [`try_reserve`](Self::try_reserve) found none.
    #[must_use]
    pub fn has_news(&self) -> bool {
        // Relaxed: whoever acts on it observes the flag again.
        self.has_frame()
            || (self.starved
                && self.local_word(CONSUMED).load(Ordering::Relaxed) != self.tx.consumed_seen())
    }

    /// Whether a frame arrived that was not taken yet. The cheapest poll: one load.
    #[must_use]
    pub fn has_frame(&self) -> bool {
        self.local_word(PUBLISHED).load(Ordering::Relaxed) != self.rx.taken()
    }

    /// Asks the peer for a wake-up on its next publish or release. Look at
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
