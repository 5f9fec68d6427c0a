//! Writing frames into a peer's slot.
//!
//! Rows are converted in pieces through a small buffer on the stack. Every byte of the slot is written
//! once and none is read back. The header is written last. The peer sees a frame only after the channel
//! has published it.

use bytemuck::{Zeroable, bytes_of, cast_slice};
use p2p_core::{OutOfRange, WriteView};
use thiserror::Error;

use crate::abi::{
    ENTRY_BYTES, ERROR_FRAME_BYTES, Entry, ErrorBody, FLAG_PAYLOAD_CRC, FRAME_MAGIC, FRAME_VERSION,
    FrameHeader, HEADER_BYTES, KIND_COMBINE, KIND_DISPATCH, KIND_ERROR, MAX_ERROR_MESSAGE,
    MAX_HIDDEN, SCALE_BLOCK, TOKEN_BYTES, TokenRange,
};
use crate::convert;
use crate::dtype::WireDtype;
use crate::error::ErrorCode;
use crate::geometry::Sections;

/// Identity of a frame: client, channel, request, part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameId {
    /// Placement version that the sender uses.
    pub epoch: u64,
    /// Client that sends the request.
    pub client_id: u64,
    /// Incarnation of the channel.
    pub generation: u32,
    /// Number of the request. A request is one call of one layer.
    pub sequence: u64,
    /// MoE layer.
    pub layer: u32,
    /// Index of this frame among the request's frames to this server, from 0.
    pub frame_idx: u32,
    /// Number of frames of the request to this server.
    pub num_frames: u32,
}

/// Metadata of a dispatch frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DispatchMeta {
    /// Identity of the frame.
    pub id: FrameId,
    /// Values per token.
    pub hidden: usize,
    /// Element type of this frame.
    pub dtype: WireDtype,
    /// Element type wanted in the response.
    pub response_dtype: WireDtype,
    /// True to add a checksum of the rows.
    pub payload_checksum: bool,
}

/// Time that a frame spent at the server. The client subtracts it from the round trip to get the time
/// on the network.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ServerTimes {
    /// Time from the frame's arrival to the start of its batch, nanoseconds, saturating.
    pub queue_ns: u32,
    /// Compute time of the frame's batch, nanoseconds, saturating.
    pub compute_ns: u32,
}

/// Metadata of a combine frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CombineMeta {
    /// Identity of the dispatch frame that this frame answers.
    pub id: FrameId,
    /// Values per token.
    pub hidden: usize,
    /// Element type of this frame.
    pub dtype: WireDtype,
    /// True to add a checksum of the rows.
    pub payload_checksum: bool,
    /// Time at the server.
    pub times: ServerTimes,
}

/// A token to send: its row in the caller's hidden states and its range of the caller's entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenRef {
    /// Row in `x`.
    pub token: u32,
    /// First entry in the caller's `entries`.
    pub entry_begin: u32,
    /// Number of entries, at least one.
    pub entry_count: u32,
}

/// Reason why a frame could not be written. Every variant is a local bug or a wrong setting.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name every field")]
pub enum EncodeError {
    /// The frame needs more bytes than a frame of the slot has.
    #[error(
        "frame needs {needed} bytes for {num_rows} rows of {hidden} values, the slot has {found}"
    )]
    FrameTooSmall { found: usize, needed: usize, num_rows: usize, hidden: usize },
    /// Values per row are out of range.
    #[error("hidden size is {found}, expected 1 to {max}")]
    Hidden { found: usize, max: usize },
    /// A frame without tokens.
    #[error("a frame needs at least one token: do not send frames to servers without tokens")]
    NoTokens,
    /// The rows are not a whole number of tokens.
    #[error("{found} values are not rows of {hidden}")]
    PartialRow { found: usize, hidden: usize },
    /// A token names a row outside of `x`.
    #[error("token {position} refers to row {row}, but there are {num_rows}")]
    Row { position: usize, row: u32, num_rows: usize },
    /// A token names entries outside of `entries`, or no entry.
    #[error(
        "token {position} refers to {entry_count} entries from {entry_begin}, expected at least one of the {num_entries}"
    )]
    Entries { position: usize, entry_begin: u32, entry_count: u32, num_entries: usize },
    /// A weight that is NaN or infinite.
    #[error("weight of expert {expert} for row {row} is {found}, expected a finite number")]
    Weight { row: u32, expert: u32, found: f32 },
    /// An access outside of the frame. Only a wrong layout can cause it.
    #[error(transparent)]
    OutOfRange(#[from] OutOfRange),
}

/// Writes a dispatch frame and returns the bytes used.
///
/// The frame holds the rows of `x: [n, hidden]` that `tokens` name, in the order of `tokens`. `entries`
/// may hold more entries than the tokens refer to, so one list can serve several frames.
///
/// # Errors
/// [`EncodeError`]. The caller must not publish the frame after an error.
///
/// # Examples
/// ```
/// use std::ptr::NonNull;
///
/// use switchyard_protocol::{
///     DispatchMeta, Entry, FrameId, TokenRef, WireDtype, WriteView, encode_dispatch,
/// };
///
/// let id = FrameId {
///     epoch: 1,
///     client_id: 7,
///     generation: 1,
///     sequence: 42,
///     layer: 0,
///     frame_idx: 0,
///     num_frames: 1,
/// };
/// let meta = DispatchMeta {
///     id,
///     hidden: 64,
///     dtype: WireDtype::Bf16,
///     response_dtype: WireDtype::Bf16,
///     payload_checksum: false,
/// };
/// // Two tokens; the first goes to experts 0 and 5, the second to expert 3.
/// let x = vec![0.5; 2 * 64];
/// let entries = [(0, 0.7), (5, 0.3), (3, 1.0)].map(|(expert, weight)| Entry { expert, weight });
/// let tokens = [
///     TokenRef { token: 0, entry_begin: 0, entry_count: 2 },
///     TokenRef { token: 1, entry_begin: 2, entry_count: 1 },
/// ];
/// // In a client the frame lies in a slot, and the channel gives the view.
/// let mut memory = vec![0u8; 4096];
/// // SAFETY: `memory` outlives the view, and only the view writes it.
/// let mut view = unsafe { WriteView::new(NonNull::from(&mut memory[..]).cast(), 4096) };
/// let frame_bytes = encode_dispatch(&mut view, &meta, &x, &tokens, &entries)?;
/// assert!(frame_bytes <= 4096);
/// # Ok::<(), switchyard_protocol::EncodeError>(())
/// ```
pub fn encode_dispatch(
    view: &mut WriteView<'_>,
    meta: &DispatchMeta,
    x: &[f32],
    tokens: &[TokenRef],
    entries: &[Entry],
) -> Result<usize, EncodeError> {
    let hidden = check_hidden(meta.hidden)?;
    if tokens.is_empty() {
        return Err(EncodeError::NoTokens);
    }
    if !x.len().is_multiple_of(hidden) {
        return Err(EncodeError::PartialRow { found: x.len(), hidden });
    }
    let num_rows = x.len() / hidden;
    let mut num_entries = 0usize;
    for (position, token) in tokens.iter().enumerate() {
        if token.token as usize >= num_rows {
            return Err(EncodeError::Row { position, row: token.token, num_rows });
        }
        num_entries += entries_of(position, token, entries)?.len();
    }
    let sections = Sections::dispatch(hidden, meta.dtype, tokens.len(), num_entries);
    check_fits(view, &sections, tokens.len(), hidden)?;

    let mut header_crc = 0;
    put_token_table(view, &sections, tokens, &mut header_crc)?;
    put_entry_table(view, &sections, tokens, entries, &mut header_crc)?;
    let rows = tokens.iter().map(|token| &x[token.token as usize * hidden..][..hidden]);
    let payload_crc =
        put_rows(view, &sections, meta.dtype, meta.payload_checksum, rows, &mut header_crc)?;
    let header = FrameHeader {
        kind: KIND_DISPATCH,
        dtype: meta.dtype.code(),
        response_dtype: meta.response_dtype.code(),
        flags: flags(meta.payload_checksum),
        num_tokens: tokens.len() as u32,
        num_entries: num_entries as u32,
        hidden: hidden as u32,
        payload_crc,
        ..header(&meta.id, &sections)
    };
    put_header(view, header, header_crc)
}

/// Writes a combine frame with `rows: [num_tokens, hidden]` and returns the bytes used. The rows are in
/// the order of the tokens in the dispatch frame.
///
/// # Errors
/// [`EncodeError`]. The caller must not publish the frame after an error.
///
/// # Examples
/// A server writes the response; the client reads it with [`decode_response`](crate::decode_response).
/// ```
/// use std::ptr::NonNull;
///
/// use switchyard_protocol::{
///     CombineExpect, CombineMeta, FrameId, ReadView, Response, ResponseScratch, ServerTimes,
///     WireDtype, WriteView, decode_response, encode_combine,
/// };
///
/// let id = FrameId {
///     epoch: 1,
///     client_id: 7,
///     generation: 1,
///     sequence: 42,
///     layer: 0,
///     frame_idx: 0,
///     num_frames: 1,
/// };
/// let meta = CombineMeta {
///     id,
///     hidden: 64,
///     dtype: WireDtype::F32,
///     payload_checksum: true,
///     times: ServerTimes { queue_ns: 900, compute_ns: 80_000 },
/// };
/// let mut memory = vec![0u8; 4096];
/// let slot = NonNull::from(&mut memory[..]).cast();
/// // SAFETY: `memory` outlives the view, and only the view writes it.
/// let mut view = unsafe { WriteView::new(slot, 4096) };
/// encode_combine(&mut view, &meta, &[0.25; 2 * 64])?;
///
/// // The client.
/// let expect = CombineExpect {
///     client_id: id.client_id,
///     generation: id.generation,
///     sequence: id.sequence,
///     layer: id.layer,
///     frame_idx: id.frame_idx,
///     num_tokens: 2,
///     hidden: 64,
///     dtype: WireDtype::F32,
/// };
/// let mut scratch = ResponseScratch::default();
/// // SAFETY: `memory` outlives the view.
/// let view = unsafe { ReadView::new(slot, 4096) };
/// match decode_response(view, &expect, &mut scratch)? {
///     Response::Rows(mut rows) => {
///         let mut out = vec![0.0; 2 * 64];
///         rows.read_rows_f32(0..2, &mut out)?;
///         assert_eq!(out, [0.25; 2 * 64]);
///     }
///     Response::Error(error) => println!("{error}"),
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn encode_combine(
    view: &mut WriteView<'_>,
    meta: &CombineMeta,
    rows: &[f32],
) -> Result<usize, EncodeError> {
    let hidden = check_hidden(meta.hidden)?;
    if rows.is_empty() {
        return Err(EncodeError::NoTokens);
    }
    if !rows.len().is_multiple_of(hidden) {
        return Err(EncodeError::PartialRow { found: rows.len(), hidden });
    }
    let num_tokens = rows.len() / hidden;
    let sections = Sections::combine(hidden, meta.dtype, num_tokens);
    check_fits(view, &sections, num_tokens, hidden)?;

    let mut header_crc = 0;
    let payload_crc = put_rows(
        view,
        &sections,
        meta.dtype,
        meta.payload_checksum,
        rows.chunks_exact(hidden),
        &mut header_crc,
    )?;
    let header = FrameHeader {
        kind: KIND_COMBINE,
        dtype: meta.dtype.code(),
        response_dtype: meta.dtype.code(),
        flags: flags(meta.payload_checksum),
        num_tokens: num_tokens as u32,
        hidden: hidden as u32,
        payload_crc,
        server_queue_ns: meta.times.queue_ns,
        server_compute_ns: meta.times.compute_ns,
        ..header(&meta.id, &sections)
    };
    put_header(view, header, header_crc)
}

/// Writes an error frame and returns the bytes used. A message longer than 240 bytes is truncated at a
/// character boundary. The body always has a checksum.
///
/// # Errors
/// [`EncodeError`] when the frame memory is too small.
pub fn encode_error(
    view: &mut WriteView<'_>,
    id: &FrameId,
    code: ErrorCode,
    detail: [u64; 2],
    message: &str,
) -> Result<usize, EncodeError> {
    let sections = Sections {
        tokens_offset: HEADER_BYTES,
        entries_offset: HEADER_BYTES,
        scales_offset: HEADER_BYTES,
        payload_offset: HEADER_BYTES,
        row_stride_bytes: 0,
        total_bytes: ERROR_FRAME_BYTES,
    };
    check_fits(view, &sections, 0, 0)?;
    let message_len = message.floor_char_boundary(MAX_ERROR_MESSAGE);
    let mut body = ErrorBody {
        code: code.to_u32(),
        message_len: message_len as u32,
        detail,
        message: [0; MAX_ERROR_MESSAGE],
    };
    body.message[..message_len].copy_from_slice(&message.as_bytes()[..message_len]);
    view.put_bytes(sections.payload_offset, bytes_of(&body))?;
    let header = FrameHeader {
        kind: KIND_ERROR,
        flags: FLAG_PAYLOAD_CRC,
        payload_crc: crc32c::crc32c(bytes_of(&body)),
        ..header(id, &sections)
    };
    put_header(view, header, 0)
}

fn check_hidden(hidden: usize) -> Result<usize, EncodeError> {
    if hidden == 0 || hidden > MAX_HIDDEN as usize {
        return Err(EncodeError::Hidden { found: hidden, max: MAX_HIDDEN as usize });
    }
    Ok(hidden)
}

fn check_fits(
    view: &WriteView<'_>,
    sections: &Sections,
    num_rows: usize,
    hidden: usize,
) -> Result<(), EncodeError> {
    let found = view.len().min(u32::MAX as usize);
    if sections.total_bytes > found {
        return Err(EncodeError::FrameTooSmall {
            found,
            needed: sections.total_bytes,
            num_rows,
            hidden,
        });
    }
    Ok(())
}

fn entries_of<'e>(
    position: usize,
    token: &TokenRef,
    entries: &'e [Entry],
) -> Result<&'e [Entry], EncodeError> {
    let begin = token.entry_begin as usize;
    let of_token = begin
        .checked_add(token.entry_count as usize)
        .and_then(|end| entries.get(begin..end))
        .filter(|of_token| !of_token.is_empty());
    of_token.ok_or(EncodeError::Entries {
        position,
        entry_begin: token.entry_begin,
        entry_count: token.entry_count,
        num_entries: entries.len(),
    })
}

fn put_token_table(
    view: &mut WriteView<'_>,
    sections: &Sections,
    tokens: &[TokenRef],
    header_crc: &mut u32,
) -> Result<(), EncodeError> {
    let mut buffer = [TokenRange::zeroed(); TABLE_BUFFER];
    let mut offset = sections.tokens_offset;
    let mut entry_begin = 0;
    for tokens in tokens.chunks(TABLE_BUFFER) {
        for (range, token) in buffer.iter_mut().zip(tokens) {
            *range = TokenRange { entry_begin, entry_count: token.entry_count };
            entry_begin += token.entry_count;
        }
        let bytes = cast_slice(&buffer[..tokens.len()]);
        *header_crc = crc32c::crc32c_append(*header_crc, bytes);
        view.put_bytes(offset, bytes)?;
        offset += tokens.len() * TOKEN_BYTES;
    }
    Ok(())
}

fn put_entry_table(
    view: &mut WriteView<'_>,
    sections: &Sections,
    tokens: &[TokenRef],
    entries: &[Entry],
    header_crc: &mut u32,
) -> Result<(), EncodeError> {
    let mut offset = sections.entries_offset;
    let mut rest = tokens;
    let mut position = 0;
    while let Some(first) = rest.first() {
        // Entries of consecutive tokens are usually contiguous. Copy each contiguous run in one piece.
        let begin = first.entry_begin as usize;
        let mut end = begin;
        let mut num_tokens = 0;
        for token in rest {
            if token.entry_begin as usize != end {
                break;
            }
            let of_token = entries_of(position + num_tokens, token, entries)?;
            for entry in of_token {
                if !entry.weight.is_finite() {
                    return Err(EncodeError::Weight {
                        row: token.token,
                        expert: entry.expert,
                        found: entry.weight,
                    });
                }
            }
            end += of_token.len();
            num_tokens += 1;
        }
        let bytes = cast_slice(&entries[begin..end]);
        *header_crc = crc32c::crc32c_append(*header_crc, bytes);
        view.put_bytes(offset, bytes)?;
        offset += (end - begin) * ENTRY_BYTES;
        position += num_tokens;
        rest = &rest[num_tokens..];
    }
    Ok(())
}

/// Writes rows and scales. Returns the checksum of the rows, or 0 without a checksum.
fn put_rows<'x>(
    view: &mut WriteView<'_>,
    sections: &Sections,
    dtype: WireDtype,
    checksum: bool,
    rows: impl Iterator<Item = &'x [f32]>,
    header_crc: &mut u32,
) -> Result<u32, EncodeError> {
    let mut payload_crc = 0;
    let mut scales_offset = sections.scales_offset;
    let mut row_offset = sections.payload_offset;
    let mut put = |view: &mut WriteView<'_>, offset: &mut usize, bytes: &[u8]| {
        if checksum {
            payload_crc = crc32c::crc32c_append(payload_crc, bytes);
        }
        view.put_bytes(*offset, bytes)?;
        *offset += bytes.len();
        Ok::<(), EncodeError>(())
    };
    for row in rows {
        let mut offset = row_offset;
        match dtype {
            WireDtype::F32 => put(view, &mut offset, cast_slice(row))?,
            WireDtype::F16 | WireDtype::Bf16 => {
                let convert = if dtype == WireDtype::F16 {
                    convert::f32_to_f16
                } else {
                    convert::f32_to_bf16
                };
                let mut buffer = [0u16; ROW_BUFFER];
                for piece in row.chunks(ROW_BUFFER) {
                    convert(piece, &mut buffer[..piece.len()]);
                    put(view, &mut offset, cast_slice(&buffer[..piece.len()]))?;
                }
            }
            WireDtype::F8E4m3 => {
                let mut buffer = [0u8; ROW_BUFFER];
                let mut scales = [0f32; ROW_BUFFER / SCALE_BLOCK];
                for piece in row.chunks(ROW_BUFFER) {
                    let scales = &mut scales[..piece.len().div_ceil(SCALE_BLOCK)];
                    convert::f32_to_f8(piece, &mut buffer[..piece.len()], scales);
                    put(view, &mut offset, &buffer[..piece.len()])?;
                    let bytes = cast_slice(scales);
                    *header_crc = crc32c::crc32c_append(*header_crc, bytes);
                    view.put_bytes(scales_offset, bytes)?;
                    scales_offset += bytes.len();
                }
            }
        }
        row_offset += sections.row_stride_bytes;
    }
    Ok(payload_crc)
}

fn header(id: &FrameId, sections: &Sections) -> FrameHeader {
    FrameHeader {
        epoch: id.epoch,
        client_id: id.client_id,
        sequence: id.sequence,
        generation: id.generation,
        layer: id.layer,
        magic: FRAME_MAGIC,
        version: FRAME_VERSION,
        frame_idx: id.frame_idx,
        num_frames: id.num_frames,
        row_stride_bytes: sections.row_stride_bytes as u32,
        tokens_offset: sections.tokens_offset as u32,
        entries_offset: sections.entries_offset as u32,
        scales_offset: sections.scales_offset as u32,
        payload_offset: sections.payload_offset as u32,
        total_bytes: sections.total_bytes as u64,
        ..FrameHeader::zeroed()
    }
}

/// `header_crc` is the checksum of the tables and scales.
fn put_header(
    view: &mut WriteView<'_>,
    mut header: FrameHeader,
    header_crc: u32,
) -> Result<usize, EncodeError> {
    header.header_crc = 0;
    header.header_crc = crc32c::crc32c_append(header_crc, bytes_of(&header));
    view.put_bytes(0, bytes_of(&header))?;
    Ok(header.total_bytes as usize)
}

const fn flags(payload_checksum: bool) -> u32 {
    if payload_checksum { FLAG_PAYLOAD_CRC } else { 0 }
}

/// Values converted at a time. Source and buffer fit into the first-level cache together.
const ROW_BUFFER: usize = 2048;
/// Rows of the token table written at a time.
const TABLE_BUFFER: usize = 128;

const _: () = assert!(ROW_BUFFER.is_multiple_of(SCALE_BLOCK));
