//! Copying rows out of a frame with checked header and tables.

use std::ops::Range;

use bytemuck::cast_slice_mut;
use p2p_core::ReadView;

use crate::abi::SCALE_BLOCK;
use crate::convert;
use crate::dtype::WireDtype;
use crate::encode::ServerTimes;
use crate::error::FrameError;

/// The rows of a checked frame. Each read copies from the slot and converts the copy.
///
/// With a payload checksum, rows must be read in order, each once. The read of the last row checks the
/// checksum, so earlier rows are valid only after it has succeeded. Reading row 0 again starts over.
/// Without a checksum, rows can be read in any order.
#[derive(Debug)]
pub struct Rows<'a> {
    pub(crate) view: ReadView<'a>,
    pub(crate) payload_offset: usize,
    pub(crate) row_stride_bytes: usize,
    pub(crate) num_rows: usize,
    pub(crate) hidden: usize,
    pub(crate) dtype: WireDtype,
    pub(crate) scales: &'a [f32],
    pub(crate) expected_crc: Option<u32>,
    pub(crate) found_crc: u32,
    pub(crate) next_row: usize,
    pub(crate) server_times: ServerTimes,
}

impl Rows<'_> {
    /// Rows of the frame.
    #[must_use]
    pub const fn num_rows(&self) -> usize {
        self.num_rows
    }

    /// Values per row.
    #[must_use]
    pub const fn hidden(&self) -> usize {
        self.hidden
    }

    /// Element type on the wire.
    #[must_use]
    pub const fn dtype(&self) -> WireDtype {
        self.dtype
    }

    /// Time at the server; zero in a dispatch frame.
    #[must_use]
    pub const fn server_times(&self) -> ServerTimes {
        self.server_times
    }

    /// Returns true if the frame has a checksum of its rows.
    #[must_use]
    pub const fn has_checksum(&self) -> bool {
        self.expected_crc.is_some()
    }

    /// Copies `rows` into `out: [rows.len(), hidden]`.
    ///
    /// # Errors
    /// [`FrameError::PayloadChecksum`] when the rows do not match their checksum.
    /// [`FrameError::RowOrder`] and [`FrameError::RowBuffer`] for wrong use.
    pub fn read_rows_f32(&mut self, rows: Range<usize>, out: &mut [f32]) -> Result<(), FrameError> {
        self.begin(&rows)?;
        let expected = rows.len() * self.hidden;
        if out.len() != expected {
            return Err(FrameError::RowBuffer { found: out.len(), expected });
        }
        for (row, out) in rows.clone().zip(out.chunks_exact_mut(self.hidden)) {
            for (piece_idx, piece) in out.chunks_mut(PIECE).enumerate() {
                self.read_piece(row, piece_idx * PIECE, piece)?;
            }
        }
        self.finish(rows.end)
    }

    /// Adds row `row` to `sum: [hidden]`. After an error, `sum` may include a part of the row.
    ///
    /// # Errors
    /// As for [`read_rows_f32`](Self::read_rows_f32).
    pub fn add_row_f32(&mut self, row: usize, sum: &mut [f32]) -> Result<(), FrameError> {
        self.begin(&(row..row.saturating_add(1)))?;
        if sum.len() != self.hidden {
            return Err(FrameError::RowBuffer { found: sum.len(), expected: self.hidden });
        }
        let mut buffer = [0f32; PIECE];
        for (piece_idx, piece) in sum.chunks_mut(PIECE).enumerate() {
            let values = &mut buffer[..piece.len()];
            self.read_piece(row, piece_idx * PIECE, values)?;
            for (sum, value) in piece.iter_mut().zip(values) {
                *sum += *value;
            }
        }
        self.finish(row + 1)
    }

    fn begin(&mut self, rows: &Range<usize>) -> Result<(), FrameError> {
        let in_range = rows.start <= rows.end && rows.end <= self.num_rows;
        if rows.start == 0 {
            self.next_row = 0;
            self.found_crc = 0;
        }
        let in_turn = self.expected_crc.is_none() || rows.start == self.next_row;
        if in_range && in_turn {
            return Ok(());
        }
        Err(FrameError::RowOrder {
            start: rows.start,
            end: rows.end,
            num_rows: self.num_rows,
            next: self.next_row,
        })
    }

    fn finish(&mut self, end: usize) -> Result<(), FrameError> {
        self.next_row = end;
        match self.expected_crc {
            Some(expected) if end == self.num_rows && expected != self.found_crc => {
                Err(FrameError::PayloadChecksum { found: self.found_crc, expected })
            }
            _ => Ok(()),
        }
    }

    /// Copies values `begin..begin + out.len()` of a row, `begin` a multiple of [`PIECE`].
    fn read_piece(&mut self, row: usize, begin: usize, out: &mut [f32]) -> Result<(), FrameError> {
        let offset =
            self.payload_offset + row * self.row_stride_bytes + begin * self.dtype.element_bytes();
        match self.dtype {
            WireDtype::F32 => self.copy(offset, cast_slice_mut(out))?,
            WireDtype::F16 | WireDtype::Bf16 => {
                let convert = if self.dtype == WireDtype::F16 {
                    convert::f16_to_f32
                } else {
                    convert::bf16_to_f32
                };
                let mut buffer = [0u16; PIECE];
                let codes = &mut buffer[..out.len()];
                self.copy(offset, cast_slice_mut(codes))?;
                convert(codes, out);
            }
            WireDtype::F8E4m3 => {
                let mut buffer = [0u8; PIECE];
                let codes = &mut buffer[..out.len()];
                self.copy(offset, codes)?;
                let scales_per_row = self.dtype.scales_per_row(self.hidden);
                let first_scale = row * scales_per_row + begin / SCALE_BLOCK;
                let num_scales = out.len().div_ceil(SCALE_BLOCK);
                convert::f8_to_f32(codes, &self.scales[first_scale..][..num_scales], out);
            }
        }
        Ok(())
    }

    fn copy(&mut self, offset: usize, out: &mut [u8]) -> Result<(), FrameError> {
        copy_section(self.view, "payload", offset, out)?;
        if self.expected_crc.is_some() {
            self.found_crc = crc32c::crc32c_append(self.found_crc, out);
        }
        Ok(())
    }
}

/// Copies a part of the frame. Its bounds were checked before, so an error here means that the check is
/// wrong.
pub(crate) fn copy_section(
    view: ReadView<'_>,
    section: &'static str,
    offset: usize,
    out: &mut [u8],
) -> Result<(), FrameError> {
    view.copy_to(offset, out).map_err(|range| FrameError::Section {
        section,
        begin: range.offset as u64,
        end: range.offset.saturating_add(range.len) as u64,
        min: 0,
        max: range.view_bytes as u64,
    })
}

/// Values converted at a time.
const PIECE: usize = 2048;

const _: () = assert!(PIECE.is_multiple_of(SCALE_BLOCK));
