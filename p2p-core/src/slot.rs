//! Layout of a slot: a ring of frames and a control tail.
//!
//! ```text
//! 0                                                            slot_bytes
//! | frame 0 | frame 1 | … | frame D-1 | (rounding) | control tail 4 KiB |
//! ```
//!
//! The owner of a slot is the peer in whose memory it lies. Its *writer* is the one peer that holds
//! its key. Control words stand on lines of their own, [`CONTROL_STRIDE`] apart, so no word shares
//! a line (or an adjacent-line prefetch) with another.
//!
//! | word | written by | meaning |
//! |---|---|---|
//! | `PUBLISHED` | writer, add | frames that the writer has published into this slot |
//! | `CONSUMED` | writer, add | frames of the *owner's* outgoing ring that the writer has consumed: credits |
//! | `PROGRESS` | writer, add | the writer is alive and working on what it accepted |
//! | `WAITING` | owner, store | 1 while the owner sleeps on this slot and wants a wake-up |
//!
//! No word is ever reset while a channel lives.

use thiserror::Error;

/// Default size of a slot.
pub const DEFAULT_SLOT_BYTES: usize = 10 << 20;
/// Default number of frames in a slot: one is filled while the other is computed.
pub const DEFAULT_NUM_FRAMES: usize = 2;
/// Size of the control tail at the end of every slot.
pub const CONTROL_BYTES: usize = 4096;
/// Distance between control words.
pub const CONTROL_STRIDE: usize = 128;
/// Offset of the `PUBLISHED` word within the control tail.
pub const PUBLISHED: usize = 0;
/// Offset of the `CONSUMED` word within the control tail.
pub const CONSUMED: usize = CONTROL_STRIDE;
/// Offset of the `PROGRESS` word within the control tail.
pub const PROGRESS: usize = 2 * CONTROL_STRIDE;
/// Offset of the `WAITING` word within the control tail.
pub const WAITING: usize = 3 * CONTROL_STRIDE;

const FRAME_ALIGN: usize = 4096;
const MIN_FRAME_BYTES: usize = 4096;
const MAX_SLOT_BYTES: usize = 1 << 32;
const MAX_NUM_FRAMES: usize = 64;

/// Sizes of a slot. Two peers must agree on them before they exchange slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SlotConfig {
    /// Bytes of one slot, control tail included. A multiple of 4096.
    pub slot_bytes: usize,
    /// Frames in the ring.
    pub num_frames: usize,
}

impl Default for SlotConfig {
    fn default() -> Self {
        Self { slot_bytes: DEFAULT_SLOT_BYTES, num_frames: DEFAULT_NUM_FRAMES }
    }
}

/// Why a [`SlotConfig`] cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SlotConfigError {
    /// The size is not a multiple of the page size or out of range.
    #[error(
        "slot size {found} bytes is not usable: expected a multiple of 4096 from {min} to {max} for {num_frames} frames"
    )]
    SlotBytes {
        /// The size asked for.
        found: usize,
        /// Frames asked for.
        num_frames: usize,
        /// Smallest usable size.
        min: usize,
        /// Largest usable size.
        max: usize,
    },
    /// The number of frames is zero or too large.
    #[error("a slot of {found} frames is not usable: expected 1 to {max}")]
    NumFrames {
        /// Frames asked for.
        found: usize,
        /// Most frames a slot can have.
        max: usize,
    },
}

/// Offsets within a slot, computed once from a checked [`SlotConfig`].
///
/// # Examples
/// ```
/// use switchyard_p2p_core::{SlotConfig, SlotLayout, slot::CONTROL_BYTES};
///
/// let layout = SlotLayout::new(SlotConfig { slot_bytes: 10 << 20, num_frames: 2 }).unwrap();
/// // Frames are whole pages, and the control tail comes behind them.
/// assert_eq!(layout.frame_bytes() % 4096, 0);
/// assert!(2 * layout.frame_bytes() + CONTROL_BYTES <= layout.slot_bytes());
/// // The third frame reuses the memory of the first.
/// assert_eq!(layout.frame_offset(2), layout.frame_offset(0));
/// assert!(SlotLayout::new(SlotConfig { slot_bytes: 5000, num_frames: 1 }).is_err());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotLayout {
    slot_bytes: usize,
    num_frames: usize,
    frame_bytes: usize,
}

impl SlotLayout {
    /// Checks `config` and computes the offsets.
    ///
    /// # Errors
    /// [`SlotConfigError`] when the sizes cannot be used.
    pub fn new(config: SlotConfig) -> Result<Self, SlotConfigError> {
        let SlotConfig { slot_bytes, num_frames } = config;
        if num_frames == 0 || num_frames > MAX_NUM_FRAMES {
            return Err(SlotConfigError::NumFrames { found: num_frames, max: MAX_NUM_FRAMES });
        }
        let min = smallest_bytes(num_frames);
        if slot_bytes < min
            || slot_bytes > MAX_SLOT_BYTES
            || !slot_bytes.is_multiple_of(FRAME_ALIGN)
        {
            return Err(SlotConfigError::SlotBytes {
                found: slot_bytes,
                num_frames,
                min,
                max: MAX_SLOT_BYTES,
            });
        }
        let frame_bytes = (slot_bytes - CONTROL_BYTES) / num_frames / FRAME_ALIGN * FRAME_ALIGN;
        Ok(Self { slot_bytes, num_frames, frame_bytes })
    }

    /// Returns the smallest slot with so many frames, for pairs that use little more than the
    /// control tail.
    ///
    /// # Errors
    /// [`SlotConfigError::NumFrames`].
    pub fn smallest(num_frames: usize) -> Result<Self, SlotConfigError> {
        Self::new(SlotConfig { slot_bytes: smallest_bytes(num_frames), num_frames })
    }

    /// The configuration this layout was made from.
    #[must_use]
    pub const fn config(&self) -> SlotConfig {
        SlotConfig { slot_bytes: self.slot_bytes, num_frames: self.num_frames }
    }

    /// Bytes of a slot.
    #[must_use]
    pub const fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Frames in the ring.
    #[must_use]
    pub const fn num_frames(&self) -> usize {
        self.num_frames
    }

    /// Bytes that one frame can hold.
    #[must_use]
    pub const fn frame_bytes(&self) -> usize {
        self.frame_bytes
    }

    /// Offset of the frame with sequence number `seq`.
    #[must_use]
    pub const fn frame_offset(&self, seq: u64) -> usize {
        (seq % self.num_frames as u64) as usize * self.frame_bytes
    }

    /// Offset of a control word, one of [`PUBLISHED`], [`CONSUMED`], [`PROGRESS`], [`WAITING`].
    #[must_use]
    pub const fn control_offset(&self, word: usize) -> usize {
        self.slot_bytes - CONTROL_BYTES + word
    }
}

const fn smallest_bytes(num_frames: usize) -> usize {
    CONTROL_BYTES.saturating_add(num_frames.saturating_mul(MIN_FRAME_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_slot_of_as_many_frames_is_smaller_than_the_smallest() {
        for num_frames in 1..=MAX_NUM_FRAMES {
            let SlotConfig { slot_bytes, .. } = SlotLayout::smallest(num_frames).unwrap().config();
            let smaller = SlotConfig { slot_bytes: slot_bytes - FRAME_ALIGN, num_frames };
            assert!(SlotLayout::new(smaller).is_err(), "{num_frames} frames");
        }
        for num_frames in [0, MAX_NUM_FRAMES + 1, usize::MAX] {
            let error = SlotLayout::smallest(num_frames).unwrap_err();
            assert!(matches!(error, SlotConfigError::NumFrames { .. }), "{error}");
        }
    }

    #[test]
    fn frames_and_control_words_do_not_overlap() {
        for num_frames in 1..=8 {
            let layout =
                SlotLayout::new(SlotConfig { slot_bytes: DEFAULT_SLOT_BYTES, num_frames }).unwrap();
            let last = layout.frame_offset(num_frames as u64 - 1) + layout.frame_bytes();
            assert!(last <= layout.control_offset(PUBLISHED));
            assert_eq!(layout.frame_offset(num_frames as u64), 0);
            assert!(layout.control_offset(WAITING) + 8 <= layout.slot_bytes());
        }
    }

    #[test]
    fn unusable_sizes_are_refused() {
        for (slot_bytes, num_frames) in [
            (0, 1),
            (8192, 2),
            (DEFAULT_SLOT_BYTES + 1, 2),
            (DEFAULT_SLOT_BYTES, 0),
            (usize::MAX, 1),
        ] {
            assert!(SlotLayout::new(SlotConfig { slot_bytes, num_frames }).is_err());
        }
    }
}
