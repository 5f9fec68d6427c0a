//! Checks that every transport makes before it posts an operation.

use super::PostError;
use crate::region::{LocalRange, Region};

/// Checks that `len` bytes at `offset` lie within a peer's region of `region_bytes` bytes.
///
/// # Errors
/// [`PostError::RemoteRange`].
#[inline]
pub fn check_range(
    op: &'static str,
    offset: usize,
    len: usize,
    region_bytes: usize,
) -> Result<(), PostError> {
    match offset.checked_add(len) {
        Some(end) if end <= region_bytes => Ok(()),
        _ => Err(out_of_range(op, offset, len, region_bytes)),
    }
}

/// The error of [`check_range`], for code that detects the range in another way.
#[must_use]
#[cold]
pub const fn out_of_range(
    op: &'static str,
    offset: usize,
    len: usize,
    region_bytes: usize,
) -> PostError {
    PostError::RemoteRange { op, offset, len, region_bytes }
}

/// Checks that the 64-bit flag at `offset` lies within a peer's region of `region_bytes` bytes, on an 8-byte boundary.
///
/// # Errors
/// [`PostError::RemoteRange`], or else [`PostError::Misaligned`].
#[inline]
pub fn check_flag(op: &'static str, offset: usize, region_bytes: usize) -> Result<(), PostError> {
    check_range(op, offset, 8, region_bytes)?;
    if offset.is_multiple_of(8) { Ok(()) } else { Err(PostError::Misaligned { op, offset }) }
}

/// Finds the first registered region that holds `range`. Returns the region's entry and the offset of the range in it.
///
/// `registered` yields each region with an entry of the caller's, for instance its local key.
///
/// # Errors
/// [`PostError::Unregistered`].
#[inline]
pub fn find_registered<'r, T>(
    op: &'static str,
    range: &LocalRange,
    registered: impl IntoIterator<Item = (&'r Region, T)>,
) -> Result<(T, usize), PostError> {
    registered
        .into_iter()
        .find_map(|(region, entry)| Some((entry, region.offset_of(range)?)))
        .ok_or_else(|| PostError::Unregistered {
            op,
            address: range.as_ptr().addr().get(),
            len: range.len(),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_and_flags_are_checked_to_the_byte() {
        for (offset, len) in [(0, 0), (0, 64), (64, 0), (63, 1)] {
            check_range("put", offset, len, 64).unwrap();
        }
        for (offset, len) in [(0, 65), (64, 1), (usize::MAX, 2), (65, 0)] {
            let error = check_range("put", offset, len, 64).unwrap_err();
            assert!(matches!(error, PostError::RemoteRange { region_bytes: 64, .. }), "{error}");
        }
        check_flag("wake", 56, 64).unwrap();
        let misaligned = check_flag("wake", 52, 64).unwrap_err();
        assert!(matches!(misaligned, PostError::Misaligned { op: "wake", offset: 52 }));
        // The range comes first.
        let outside = check_flag("wake", 60, 64).unwrap_err();
        assert!(matches!(outside, PostError::RemoteRange { offset: 60, len: 8, .. }));
    }

    #[test]
    fn the_first_region_that_holds_a_range_is_found() {
        let [a, b] = [4096, 8192].map(|len| Region::anonymous(len).unwrap());
        let registered = || [(&a, 'a'), (&b, 'b'), (&b, 'c')];
        let find = |range: &LocalRange| find_registered("get", range, registered());
        assert_eq!(find(&b.range(100, 200).unwrap()).unwrap(), ('b', 100));
        assert_eq!(find(&a.range(0, 4096).unwrap()).unwrap(), ('a', 0));
        // The part of another range counts by its address.
        let part = b.range(64, 64).unwrap().sub(8, 8).unwrap();
        assert_eq!(find(&part).unwrap(), ('b', 72));
        let other = Region::anonymous(4096).unwrap();
        let error = find(&other.range(1, 2).unwrap()).unwrap_err();
        let first = other.as_ptr().addr().get() + 1;
        assert!(
            matches!(error, PostError::Unregistered { op: "get", address, len: 2 } if address == first)
        );
    }
}
