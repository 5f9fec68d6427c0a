//! Copies and words of regions that a peer may write at any time.

use std::sync::atomic::AtomicU64;

use p2p_core::{OutOfRange, ReadView, Region, WriteView};

/// The 64-bit word at `offset`. `None` when it leaves the region or is not aligned.
pub fn word(region: &Region, offset: usize) -> Option<&AtomicU64> {
    let end = offset.checked_add(8)?;
    if end > region.len() || !(region.as_ptr().as_ptr() as usize + offset).is_multiple_of(8) {
        return None;
    }
    // SAFETY: in range and aligned; mapped as long as the region; words are reached atomically.
    Some(unsafe { AtomicU64::from_ptr(region.as_ptr().as_ptr().add(offset).cast()) })
}

/// Copies out of a region.
pub fn read(region: &Region, offset: usize, out: &mut [u8]) -> Result<(), OutOfRange> {
    // SAFETY: the region stays mapped during the call.
    unsafe { ReadView::new(region.as_ptr(), region.len()) }.copy_to(offset, out)
}

/// Copies into a region.
pub fn write(region: &Region, offset: usize, bytes: &[u8]) -> Result<(), OutOfRange> {
    // SAFETY: the region stays mapped during the call; callers own the bytes they write.
    unsafe { WriteView::new(region.as_ptr(), region.len()) }.put_bytes(offset, bytes)
}
