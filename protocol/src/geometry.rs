//! Offsets of the sections of a frame, and the number of tokens that fit into one.

use thiserror::Error;

use crate::abi::{
    ENTRY_BYTES, ERROR_FRAME_BYTES, HEADER_BYTES, MAX_HIDDEN, PAYLOAD_ALIGN, ROW_ALIGN,
    TABLE_ALIGN, TOKEN_BYTES,
};
use crate::dtype::WireDtype;

/// A frame has no room for one token, or a size is out of range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name every field")]
pub enum GeometryError {
    /// A frame is too small for one token and its response.
    #[error(
        "a frame of {found} bytes cannot hold one token of hidden size {hidden} in {dtype} with {top_k} experts and its response in {response_dtype}: it needs {needed} bytes; enlarge the slot or lower the number of frames per slot"
    )]
    FrameTooSmall {
        found: usize,
        needed: usize,
        hidden: usize,
        top_k: usize,
        dtype: WireDtype,
        response_dtype: WireDtype,
    },
    /// A size that no frame can carry.
    #[error("{field} is {found}, expected 1 to {max}")]
    Range { field: &'static str, found: usize, max: usize },
}

/// Number of tokens that fit into a frame, counting both the request and its response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameGeometry {
    frame_bytes: usize,
    hidden: usize,
    dtype: WireDtype,
    response_dtype: WireDtype,
    top_k: usize,
    max_tokens: usize,
}

impl FrameGeometry {
    /// Geometry of frames of `frame_bytes` for tokens of `hidden` values with up to `top_k` entries.
    ///
    /// # Errors
    /// [`GeometryError`] when a size is out of range, or when a frame has no room for one token.
    ///
    /// # Examples
    /// ```
    /// use switchyard_protocol::{FrameGeometry, WireDtype};
    ///
    /// let geometry = FrameGeometry::new(2 << 20, 7168, WireDtype::F8E4m3, WireDtype::Bf16, 8)?;
    /// let tokens = geometry.max_tokens();
    /// assert!(geometry.request_bytes(tokens, tokens * 8) <= 2 << 20);
    /// assert!(geometry.response_bytes(tokens) <= 2 << 20);
    /// # Ok::<(), switchyard_protocol::GeometryError>(())
    /// ```
    pub fn new(
        frame_bytes: usize,
        hidden: usize,
        dtype: WireDtype,
        response_dtype: WireDtype,
        top_k: usize,
    ) -> Result<Self, GeometryError> {
        for (field, found, max) in
            [("hidden", hidden, MAX_HIDDEN as usize), ("top_k", top_k, MAX_TOP_K)]
        {
            if found == 0 || found > max {
                return Err(GeometryError::Range { field, found, max });
            }
        }
        // Offsets have 32 bits, so bytes beyond 4 GiB are never used.
        let usable_bytes = frame_bytes.min(u32::MAX as usize);
        let mut geometry =
            Self { frame_bytes, hidden, dtype, response_dtype, top_k, max_tokens: 0 };
        let needed = geometry.bytes_for(1);
        if needed > usable_bytes {
            return Err(GeometryError::FrameTooSmall {
                found: frame_bytes,
                needed,
                hidden,
                top_k,
                dtype,
                response_dtype,
            });
        }
        // Both sizes grow with the number of tokens, so bisection finds the largest number that fits.
        let (mut fits, mut too_many) = (1, usable_bytes / TOKEN_BYTES + 1);
        while too_many - fits > 1 {
            let middle = fits + (too_many - fits) / 2;
            if geometry.bytes_for(middle) <= usable_bytes {
                fits = middle;
            } else {
                too_many = middle;
            }
        }
        geometry.max_tokens = fits;
        Ok(geometry)
    }

    /// Most tokens of a frame, with `top_k` entries each.
    #[must_use]
    pub const fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// Most entries of a frame.
    #[must_use]
    pub const fn max_entries(&self) -> usize {
        self.max_tokens * self.top_k
    }

    /// Bytes of a frame.
    #[must_use]
    pub const fn frame_bytes(&self) -> usize {
        self.frame_bytes
    }

    /// Values per token.
    #[must_use]
    pub const fn hidden(&self) -> usize {
        self.hidden
    }

    /// Most entries of a token.
    #[must_use]
    pub const fn top_k(&self) -> usize {
        self.top_k
    }

    /// Element type of requests.
    #[must_use]
    pub const fn dtype(&self) -> WireDtype {
        self.dtype
    }

    /// Element type of responses.
    #[must_use]
    pub const fn response_dtype(&self) -> WireDtype {
        self.response_dtype
    }

    /// Bytes of a dispatch frame.
    #[must_use]
    pub fn request_bytes(&self, num_tokens: usize, num_entries: usize) -> usize {
        Sections::dispatch(self.hidden, self.dtype, num_tokens, num_entries).total_bytes
    }

    /// Bytes of a combine frame.
    #[must_use]
    pub fn response_bytes(&self, num_tokens: usize) -> usize {
        Sections::combine(self.hidden, self.response_dtype, num_tokens).total_bytes
    }

    fn bytes_for(&self, num_tokens: usize) -> usize {
        self.request_bytes(num_tokens, num_tokens.saturating_mul(self.top_k))
            .max(self.response_bytes(num_tokens))
            .max(ERROR_FRAME_BYTES)
    }
}

/// Offsets of the sections in a frame that an encoder writes. Decoders read the offsets from the header
/// and check them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sections {
    pub tokens_offset: usize,
    pub entries_offset: usize,
    pub scales_offset: usize,
    pub payload_offset: usize,
    pub row_stride_bytes: usize,
    pub total_bytes: usize,
}

impl Sections {
    /// Saturates instead of overflowing: a saturated total fits no frame.
    pub(crate) fn dispatch(
        hidden: usize,
        dtype: WireDtype,
        num_tokens: usize,
        num_entries: usize,
    ) -> Self {
        Self::new(hidden, dtype, num_tokens, num_tokens, num_entries)
    }

    pub(crate) fn combine(hidden: usize, dtype: WireDtype, num_tokens: usize) -> Self {
        Self::new(hidden, dtype, num_tokens, 0, 0)
    }

    fn new(
        hidden: usize,
        dtype: WireDtype,
        num_rows: usize,
        num_ranges: usize,
        num_entries: usize,
    ) -> Self {
        let tokens_offset = HEADER_BYTES;
        let entries_offset =
            section_end(tokens_offset, num_ranges, TOKEN_BYTES).next_multiple(TABLE_ALIGN);
        let scales_offset =
            section_end(entries_offset, num_entries, ENTRY_BYTES).next_multiple(TABLE_ALIGN);
        let payload_offset =
            section_end(scales_offset, num_rows, dtype.scales_per_row(hidden) * size_of::<f32>())
                .next_multiple(PAYLOAD_ALIGN);
        let row_stride_bytes = dtype.row_bytes(hidden).next_multiple(ROW_ALIGN);
        let total_bytes = section_end(payload_offset, num_rows, row_stride_bytes);
        Self {
            tokens_offset,
            entries_offset,
            scales_offset,
            payload_offset,
            row_stride_bytes,
            total_bytes,
        }
    }
}

trait NextMultiple {
    fn next_multiple(self, align: usize) -> usize;
}

impl NextMultiple for usize {
    fn next_multiple(self, align: usize) -> usize {
        self.checked_next_multiple_of(align).unwrap_or(usize::MAX)
    }
}

fn section_end(begin: usize, count: usize, item_bytes: usize) -> usize {
    begin.saturating_add(count.saturating_mul(item_bytes))
}

/// Most experts of one token that a frame can carry.
pub const MAX_TOP_K: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_fits_and_one_more_does_not() {
        for hidden in [1, 7, 128, 129, 256, 2048, 7168] {
            for dtype in WireDtype::ALL {
                for response_dtype in WireDtype::ALL {
                    for (frame_bytes, top_k) in [(4096, 1), (65536, 8), (5 << 20, 8)] {
                        let Ok(geometry) =
                            FrameGeometry::new(frame_bytes, hidden, dtype, response_dtype, top_k)
                        else {
                            continue;
                        };
                        let max = geometry.max_tokens();
                        assert!(geometry.request_bytes(max, geometry.max_entries()) <= frame_bytes);
                        assert!(geometry.response_bytes(max) <= frame_bytes);
                        let one_more = geometry.request_bytes(max + 1, (max + 1) * top_k)
                            > frame_bytes
                            || geometry.response_bytes(max + 1) > frame_bytes;
                        assert!(one_more, "{geometry:?} could hold more");
                    }
                }
            }
        }
    }

    #[test]
    fn a_frame_that_is_too_small_names_sizes() {
        let error = FrameGeometry::new(4096, 7168, WireDtype::F8E4m3, WireDtype::Bf16, 8)
            .expect_err("7168 bf16 values do not fit 4096 bytes");
        let text = error.to_string();
        // Header 128 plus 7168 values of 2 bytes.
        assert!(text.contains("14464") && text.contains("7168") && text.contains("4096"), "{text}");
        assert!(FrameGeometry::new(4096, 0, WireDtype::F32, WireDtype::F32, 8).is_err());
        assert!(FrameGeometry::new(4096, 8, WireDtype::F32, WireDtype::F32, 0).is_err());
        assert!(
            FrameGeometry::new(usize::MAX, usize::MAX, WireDtype::F32, WireDtype::F32, 1).is_err()
        );
    }
}
