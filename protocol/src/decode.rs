//! Reading dispatch frames, for servers.
//!
//! The decoder copies the header and checks its ranges. It then copies the tables, checks the checksum
//! over the copies, the identity, and last the meaning of the values. After the copy, only the rows are
//! read from the slot again; their values need no check.

use bytemuck::{Zeroable, bytes_of, bytes_of_mut, cast_slice, cast_slice_mut};
use p2p_core::ReadView;

use crate::abi::{
    ENTRY_BYTES, Entry, FLAG_PAYLOAD_CRC, FRAME_MAGIC, FRAME_VERSION, FrameHeader, HEADER_BYTES,
    KIND_DISPATCH, MAX_HIDDEN, PAYLOAD_ALIGN, ROW_ALIGN, TABLE_ALIGN, TOKEN_BYTES, TokenRange,
};
use crate::convert::MAX_SCALE;
use crate::dtype::WireDtype;
use crate::encode::{CombineMeta, FrameId, ServerTimes};
use crate::error::FrameError;
use crate::rows::{Rows, copy_section};

/// Values that a server requires of every frame on one channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DispatchExpect {
    /// Client on this channel.
    pub client_id: u64,
    /// Incarnation of the channel.
    pub generation: u32,
    /// Values per token.
    pub hidden: usize,
    /// Layers of the model. The layer of a frame must be below.
    pub num_layers: u32,
    /// Experts of a layer, over the whole model.
    pub num_experts: u32,
    /// Most tokens of a frame, see [`FrameGeometry::max_tokens`](crate::FrameGeometry::max_tokens).
    pub max_tokens: usize,
    /// Most entries of a token.
    pub top_k: usize,
    /// Element type agreed for requests.
    pub dtype: WireDtype,
    /// Element type agreed for responses.
    pub response_dtype: WireDtype,
}

/// Copies of the tables of the current frame. Grows to the largest frame seen, then allocates no more.
#[derive(Debug, Default)]
pub struct DispatchScratch {
    tokens: Vec<TokenRange>,
    entries: Vec<Entry>,
    scales: Vec<f32>,
}

impl DispatchScratch {
    /// Scratch with the capacity for the largest frame that `expect` allows.
    #[must_use]
    pub fn for_frames(expect: &DispatchExpect) -> Self {
        let max_entries = expect.max_tokens.saturating_mul(expect.top_k);
        let max_scales =
            expect.max_tokens.saturating_mul(expect.dtype.scales_per_row(expect.hidden));
        Self {
            tokens: Vec::with_capacity(expect.max_tokens),
            entries: Vec::with_capacity(max_entries),
            scales: Vec::with_capacity(max_scales),
        }
    }
}

/// A dispatch frame that passed every check. The tables are copies; the rows are still in the slot.
#[derive(Debug)]
pub struct Dispatch<'a> {
    header: FrameHeader,
    tokens: &'a [TokenRange],
    entries: &'a [Entry],
    rows: Rows<'a>,
    response_dtype: WireDtype,
}

impl<'a> Dispatch<'a> {
    /// Identity of the frame.
    #[must_use]
    pub const fn id(&self) -> FrameId {
        id_of(&self.header)
    }

    /// Tokens of the frame, at least one.
    #[must_use]
    pub const fn num_tokens(&self) -> usize {
        self.tokens.len()
    }

    /// The range of entries of each token. The ranges are consecutive, in order, and cover all entries.
    #[must_use]
    pub const fn tokens(&self) -> &'a [TokenRange] {
        self.tokens
    }

    /// Experts and weights. Each expert is below `num_experts`, each weight is finite.
    #[must_use]
    pub const fn entries(&self) -> &'a [Entry] {
        self.entries
    }

    /// Entries of one token.
    ///
    /// # Panics
    /// When `token` is not below [`num_tokens`](Self::num_tokens).
    #[must_use]
    pub fn entries_of(&self, token: usize) -> &'a [Entry] {
        let range = self.tokens[token];
        &self.entries[range.entry_begin as usize..][..range.entry_count as usize]
    }

    /// The tokens' hidden states.
    pub const fn rows(&mut self) -> &mut Rows<'a> {
        &mut self.rows
    }

    /// Copies the hidden states `rows` into `out: [rows.len(), hidden]`.
    ///
    /// # Errors
    /// As for [`Rows::read_rows_f32`].
    pub fn read_rows_f32(
        &mut self,
        rows: std::ops::Range<usize>,
        out: &mut [f32],
    ) -> Result<(), FrameError> {
        self.rows.read_rows_f32(rows, out)
    }

    /// Bytes of the frame.
    #[must_use]
    pub const fn total_bytes(&self) -> u64 {
        self.header.total_bytes
    }

    /// Metadata for the combine frame that answers this one. The server fills in its times.
    #[must_use]
    pub const fn response_meta(&self) -> CombineMeta {
        CombineMeta {
            id: self.id(),
            hidden: self.rows.hidden,
            dtype: self.response_dtype,
            payload_checksum: self.rows.has_checksum(),
            times: ServerTimes { queue_ns: 0, compute_ns: 0 },
        }
    }
}

/// Checks the dispatch frame in `view` and returns it.
///
/// The tables are copied into `scratch`; the rows stay in `view` and are converted when they are read.
///
/// # Errors
/// [`FrameError`]. The server answers with [`FrameError::code`] and the identity from [`peek_id`].
///
/// # Examples
/// ```
/// use std::ptr::NonNull;
///
/// use switchyard_protocol::{
///     DispatchExpect, DispatchScratch, FrameError, ReadView, WireDtype, decode_dispatch,
/// };
///
/// let expect = DispatchExpect {
///     client_id: 7,
///     generation: 1,
///     hidden: 64,
///     num_layers: 4,
///     num_experts: 8,
///     max_tokens: 16,
///     top_k: 2,
///     dtype: WireDtype::Bf16,
///     response_dtype: WireDtype::Bf16,
/// };
/// let mut scratch = DispatchScratch::for_frames(&expect);
/// // In a server the frame lies in a slot, and the channel gives the view. These bytes are all zero.
/// let mut memory = vec![0u8; 4096];
/// // SAFETY: `memory` outlives the view.
/// let view = unsafe { ReadView::new(NonNull::from(&mut memory[..]).cast(), 4096) };
/// match decode_dispatch(view, &expect, &mut scratch) {
///     Ok(mut dispatch) => {
///         let mut x = vec![0.0; dispatch.num_tokens() * expect.hidden];
///         dispatch.read_rows_f32(0..dispatch.num_tokens(), &mut x).expect("rows are intact");
///     }
///     Err(error) => assert!(matches!(error, FrameError::Magic { .. }), "{error}"),
/// }
/// ```
pub fn decode_dispatch<'a>(
    view: ReadView<'a>,
    expect: &DispatchExpect,
    scratch: &'a mut DispatchScratch,
) -> Result<Dispatch<'a>, FrameError> {
    let header = copy_header(view)?;
    if header.kind != KIND_DISPATCH {
        return Err(FrameError::Kind { found: header.kind, expected: "dispatch (1)" });
    }
    check_exact("server_queue_ns", header.server_queue_ns.into(), 0)?;
    check_exact("server_compute_ns", header.server_compute_ns.into(), 0)?;
    let max_tokens = expect.max_tokens as u64;
    check_field("num_tokens", header.num_tokens.into(), 1, max_tokens)?;
    let max_entries = u64::from(header.num_tokens).saturating_mul(expect.top_k as u64);
    check_field("num_entries", header.num_entries.into(), header.num_tokens.into(), max_entries)?;
    let frame = check_sections(view, &header, header.num_tokens)?;

    scratch.tokens.resize(header.num_tokens as usize, TokenRange::zeroed());
    scratch.entries.resize(header.num_entries as usize, Entry::zeroed());
    scratch.scales.resize(frame.num_scales, 0.0);
    let DispatchScratch { tokens, entries, scales } = scratch;
    copy_section(view, "tokens", header.tokens_offset as usize, cast_slice_mut(tokens))?;
    copy_section(view, "entries", header.entries_offset as usize, cast_slice_mut(entries))?;
    copy_section(view, "scales", header.scales_offset as usize, cast_slice_mut(scales))?;
    check_header_crc(&header, [cast_slice(tokens), cast_slice(entries), cast_slice(scales)])?;

    check_identity("client_id", header.client_id, expect.client_id)?;
    check_identity("generation", header.generation.into(), expect.generation.into())?;
    if header.layer >= expect.num_layers {
        return Err(FrameError::Layer { found: header.layer, num_layers: expect.num_layers });
    }
    check_exact("hidden", header.hidden.into(), expect.hidden as u64)?;
    check_exact("dtype", header.dtype.into(), expect.dtype.code().into())?;
    let response_dtype = expect.response_dtype;
    check_exact("response_dtype", header.response_dtype.into(), response_dtype.code().into())?;
    check_tokens(tokens, header.num_entries, expect.top_k)?;
    check_entries(entries, expect.num_experts)?;
    check_scales(scales, frame.dtype.scales_per_row(header.hidden as usize))?;

    Ok(Dispatch {
        header,
        tokens,
        entries,
        rows: rows_of(view, &header, frame.dtype, scales),
        response_dtype,
    })
}

/// The unchecked identity in a frame, for error frames and log lines only. `None` when `view` cannot
/// hold a header.
#[must_use]
pub fn peek_id(view: ReadView<'_>) -> Option<FrameId> {
    let mut header = FrameHeader::zeroed();
    view.copy_to(0, bytes_of_mut(&mut header)).ok()?;
    Some(id_of(&header))
}

/// Sizes of a frame whose sections are in range.
pub(crate) struct CheckedFrame {
    pub dtype: WireDtype,
    pub num_scales: usize,
}

pub(crate) fn copy_header(view: ReadView<'_>) -> Result<FrameHeader, FrameError> {
    let mut header = FrameHeader::zeroed();
    view.copy_to(0, bytes_of_mut(&mut header))
        .map_err(|_| FrameError::TooSmall { found: view.len(), expected: HEADER_BYTES })?;
    if header.magic != FRAME_MAGIC {
        return Err(FrameError::Magic { found: header.magic, expected: FRAME_MAGIC });
    }
    if header.version != FRAME_VERSION {
        return Err(FrameError::Version { found: header.version, expected: FRAME_VERSION });
    }
    check_field("flags", header.flags.into(), 0, FLAG_PAYLOAD_CRC.into())?;
    check_field("num_frames", header.num_frames.into(), 1, u32::MAX.into())?;
    check_field("frame_idx", header.frame_idx.into(), 0, u64::from(header.num_frames) - 1)?;
    for word in header.reserved {
        check_exact("reserved", word.into(), 0)?;
    }
    if header.flags & FLAG_PAYLOAD_CRC == 0 {
        check_exact("payload_crc", header.payload_crc.into(), 0)?;
    }
    Ok(header)
}

/// Checks that the sections of a frame with rows follow one another within the frame.
/// `num_ranges` is the length of the token table.
pub(crate) fn check_sections(
    view: ReadView<'_>,
    header: &FrameHeader,
    num_ranges: u32,
) -> Result<CheckedFrame, FrameError> {
    check_field("hidden", header.hidden.into(), 1, MAX_HIDDEN.into())?;
    let dtype = WireDtype::from_code(header.dtype).ok_or(FrameError::Field {
        field: "dtype",
        found: header.dtype.into(),
        min: 1,
        max: 4,
    })?;
    let hidden = header.hidden as usize;
    let num_scales = u64::from(header.num_tokens) * dtype.scales_per_row(hidden) as u64;
    let row_bytes = dtype.row_bytes(hidden) as u64;
    let stride = u64::from(header.row_stride_bytes);
    check_field("row_stride_bytes", stride, row_bytes, view.len() as u64)?;
    check_align("row stride", stride, ROW_ALIGN)?;

    // u32 counts times small element sizes cannot overflow 64 bits.
    let end = HEADER_BYTES as u64;
    let max = check_field("total_bytes", header.total_bytes, end, view.len() as u64)?;
    let ranges_bytes = u64::from(num_ranges) * TOKEN_BYTES as u64;
    let entries_bytes = u64::from(header.num_entries) * ENTRY_BYTES as u64;
    let payload_bytes = u64::from(header.num_tokens) * stride;
    let end = check_section("tokens", header.tokens_offset, ranges_bytes, TABLE_ALIGN, end, max)?;
    let end =
        check_section("entries", header.entries_offset, entries_bytes, TABLE_ALIGN, end, max)?;
    let end = check_section("scales", header.scales_offset, num_scales * 4, TABLE_ALIGN, end, max)?;
    let end =
        check_section("payload", header.payload_offset, payload_bytes, PAYLOAD_ALIGN, end, max)?;
    check_exact("total_bytes", header.total_bytes, end)?;
    Ok(CheckedFrame { dtype, num_scales: num_scales as usize })
}

/// Checks a section and returns where it ends.
pub(crate) fn check_section(
    section: &'static str,
    offset: u32,
    bytes: u64,
    align: usize,
    min: u64,
    max: u64,
) -> Result<u64, FrameError> {
    let begin = u64::from(offset);
    check_align(section, begin, align)?;
    let end = begin + bytes;
    if begin < min || end > max {
        return Err(FrameError::Section { section, begin, end, min, max });
    }
    Ok(end)
}

pub(crate) fn check_header_crc(header: &FrameHeader, tables: [&[u8]; 3]) -> Result<(), FrameError> {
    let crc = tables.iter().fold(0, |crc, table| crc32c::crc32c_append(crc, table));
    let found = crc32c::crc32c_append(crc, bytes_of(&FrameHeader { header_crc: 0, ..*header }));
    if found != header.header_crc {
        return Err(FrameError::HeaderChecksum { found, expected: header.header_crc });
    }
    Ok(())
}

pub(crate) fn check_identity(
    field: &'static str,
    found: u64,
    expected: u64,
) -> Result<(), FrameError> {
    if found == expected { Ok(()) } else { Err(FrameError::Stale { field, found, expected }) }
}

pub(crate) fn check_exact(
    field: &'static str,
    found: u64,
    expected: u64,
) -> Result<u64, FrameError> {
    check_field(field, found, expected, expected)
}

pub(crate) fn check_scales(scales: &[f32], scales_per_row: usize) -> Result<(), FrameError> {
    // NaN compares false and is refused as well.
    let bad = scales.iter().position(|scale| !(*scale > 0.0 && *scale <= MAX_SCALE));
    match bad {
        None => Ok(()),
        Some(at) => Err(FrameError::Scale {
            row: (at / scales_per_row) as u32,
            block: (at % scales_per_row) as u32,
            found: scales[at],
            max: MAX_SCALE,
        }),
    }
}

pub(crate) fn rows_of<'a>(
    view: ReadView<'a>,
    header: &FrameHeader,
    dtype: WireDtype,
    scales: &'a [f32],
) -> Rows<'a> {
    Rows {
        view,
        payload_offset: header.payload_offset as usize,
        row_stride_bytes: header.row_stride_bytes as usize,
        num_rows: header.num_tokens as usize,
        hidden: header.hidden as usize,
        dtype,
        scales,
        expected_crc: (header.flags & FLAG_PAYLOAD_CRC != 0).then_some(header.payload_crc),
        found_crc: 0,
        next_row: 0,
        server_times: ServerTimes {
            queue_ns: header.server_queue_ns,
            compute_ns: header.server_compute_ns,
        },
    }
}

pub(crate) const fn id_of(header: &FrameHeader) -> FrameId {
    FrameId {
        epoch: header.epoch,
        client_id: header.client_id,
        generation: header.generation,
        sequence: header.sequence,
        layer: header.layer,
        frame_idx: header.frame_idx,
        num_frames: header.num_frames,
    }
}

fn check_field(field: &'static str, found: u64, min: u64, max: u64) -> Result<u64, FrameError> {
    if (min..=max).contains(&found) {
        Ok(found)
    } else {
        Err(FrameError::Field { field, found, min, max })
    }
}

fn check_align(section: &'static str, offset: u64, align: usize) -> Result<(), FrameError> {
    let align = align as u64;
    if offset.is_multiple_of(align) {
        Ok(())
    } else {
        Err(FrameError::Alignment { section, offset, align })
    }
}

fn check_tokens(tokens: &[TokenRange], num_entries: u32, top_k: usize) -> Result<(), FrameError> {
    let mut next = 0u32;
    for (token, range) in tokens.iter().enumerate() {
        // `next` never exceeds num_entries, so it cannot wrap.
        let fits = range.entry_count >= 1
            && range.entry_count as usize <= top_k
            && range.entry_count <= num_entries - next;
        if range.entry_begin != next || !fits {
            return Err(FrameError::TokenEntries {
                token: token as u32,
                entry_begin: range.entry_begin,
                entry_count: range.entry_count,
                expected_begin: next,
                max_count: (top_k as u32).min(num_entries - next),
            });
        }
        next += range.entry_count;
    }
    if next != num_entries {
        return Err(FrameError::UnusedEntries { found: next, expected: num_entries });
    }
    Ok(())
}

fn check_entries(entries: &[Entry], num_experts: u32) -> Result<(), FrameError> {
    for (entry_idx, entry) in entries.iter().enumerate() {
        if entry.expert >= num_experts {
            return Err(FrameError::Expert {
                entry: entry_idx as u32,
                found: entry.expert,
                num_experts,
            });
        }
        if !entry.weight.is_finite() {
            return Err(FrameError::Weight { entry: entry_idx as u32, found: entry.weight });
        }
    }
    Ok(())
}
