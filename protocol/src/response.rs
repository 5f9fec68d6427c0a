//! Reading combine and error frames, for clients.

use bytemuck::{Zeroable, bytes_of, bytes_of_mut, cast_slice, cast_slice_mut};
use p2p_core::ReadView;

use crate::abi::{
    ERROR_BODY_BYTES, ErrorBody, FLAG_PAYLOAD_CRC, FrameHeader, HEADER_BYTES, KIND_COMBINE,
    KIND_ERROR, MAX_ERROR_MESSAGE, PAYLOAD_ALIGN,
};
use crate::decode::{
    check_exact, check_header_crc, check_identity, check_scales, check_section, check_sections,
    copy_header, id_of, rows_of,
};
use crate::dtype::WireDtype;
use crate::encode::FrameId;
use crate::error::{ErrorCode, FrameError};
use crate::rows::{Rows, copy_section};

/// Identity and sizes of the response that a client waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CombineExpect {
    /// Identity of the client itself.
    pub client_id: u64,
    /// Incarnation of the channel.
    pub generation: u32,
    /// Number of the request.
    pub sequence: u64,
    /// MoE layer.
    pub layer: u32,
    /// Index of the frame within the request.
    pub frame_idx: u32,
    /// Tokens of that frame.
    pub num_tokens: usize,
    /// Values per token.
    pub hidden: usize,
    /// Element type agreed for responses.
    pub dtype: WireDtype,
}

/// Copies of the tables of the current frame. Grows to the largest frame seen, then allocates no more.
#[derive(Debug, Default)]
pub struct ResponseScratch {
    scales: Vec<f32>,
    message: String,
}

/// A response that passed every check.
#[derive(Debug)]
pub enum Response<'a> {
    /// One row per token, in the order of the request.
    Rows(Rows<'a>),
    /// The server could not serve the frame.
    Error(PeerError<'a>),
}

/// Reason that a server gives for a frame that it could not serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("server answered {code}: {message}")]
pub struct PeerError<'a> {
    /// Kind of failure.
    pub code: ErrorCode,
    /// Numbers that belong to the code.
    pub detail: [u64; 2],
    /// Explanation for people.
    pub message: &'a str,
}

/// Checks the response frame in `view` and returns it.
///
/// A frame of another client, channel, request or part returns [`FrameError::Stale`]. The client drops
/// it, counts it, and continues to wait. [`encode_combine`](crate::encode_combine) has an example of
/// both sides.
///
/// # Errors
/// [`FrameError`].
pub fn decode_response<'a>(
    view: ReadView<'a>,
    expect: &CombineExpect,
    scratch: &'a mut ResponseScratch,
) -> Result<Response<'a>, FrameError> {
    let header = copy_header(view)?;
    match header.kind {
        KIND_COMBINE => decode_rows(view, &header, expect, scratch).map(Response::Rows),
        KIND_ERROR => decode_error(view, &header, expect, scratch).map(Response::Error),
        found => Err(FrameError::Kind { found, expected: "combine (2) or error (3)" }),
    }
}

/// The identity of a response frame, after checking the checksum of header and tables. A client that
/// waits for several responses on one channel uses it to find the matching request.
///
/// # Errors
/// [`FrameError`] when header or tables fail a check that is independent of the request.
pub fn response_id(
    view: ReadView<'_>,
    scratch: &mut ResponseScratch,
) -> Result<FrameId, FrameError> {
    let header = copy_header(view)?;
    match header.kind {
        KIND_COMBINE => check_combine(view, &header, scratch).map(|_| ())?,
        KIND_ERROR => check_error(view, &header)?,
        found => return Err(FrameError::Kind { found, expected: "combine (2) or error (3)" }),
    }
    Ok(id_of(&header))
}

fn decode_rows<'a>(
    view: ReadView<'a>,
    header: &FrameHeader,
    expect: &CombineExpect,
    scratch: &'a mut ResponseScratch,
) -> Result<Rows<'a>, FrameError> {
    let dtype = check_combine(view, header, scratch)?;
    check_identities(header, expect)?;
    check_exact("num_tokens", header.num_tokens.into(), expect.num_tokens as u64)?;
    check_exact("hidden", header.hidden.into(), expect.hidden as u64)?;
    check_exact("dtype", header.dtype.into(), expect.dtype.code().into())?;
    check_exact("response_dtype", header.response_dtype.into(), expect.dtype.code().into())?;
    check_scales(&scratch.scales, dtype.scales_per_row(header.hidden as usize))?;
    Ok(rows_of(view, header, dtype, &scratch.scales))
}

/// Does the checks of a combine frame that are independent of the request.
fn check_combine(
    view: ReadView<'_>,
    header: &FrameHeader,
    scratch: &mut ResponseScratch,
) -> Result<WireDtype, FrameError> {
    check_exact("num_entries", header.num_entries.into(), 0)?;
    let frame = check_sections(view, header, 0)?;
    scratch.scales.resize(frame.num_scales, 0.0);
    let scales = cast_slice_mut(&mut scratch.scales);
    copy_section(view, "scales", header.scales_offset as usize, scales)?;
    check_header_crc(header, [&[], &[], cast_slice(&scratch.scales)])?;
    Ok(frame.dtype)
}

fn decode_error<'a>(
    view: ReadView<'a>,
    header: &FrameHeader,
    expect: &CombineExpect,
    scratch: &'a mut ResponseScratch,
) -> Result<PeerError<'a>, FrameError> {
    check_error(view, header)?;
    check_identities(header, expect)?;
    let mut body = ErrorBody::zeroed();
    copy_section(view, "error body", header.payload_offset as usize, bytes_of_mut(&mut body))?;
    let found = crc32c::crc32c(bytes_of(&body));
    if found != header.payload_crc {
        return Err(FrameError::PayloadChecksum { found, expected: header.payload_crc });
    }
    let message_len = body.message_len as usize;
    let message = body.message.get(..message_len).ok_or(FrameError::Field {
        field: "message_len",
        found: body.message_len.into(),
        min: 0,
        max: MAX_ERROR_MESSAGE as u64,
    })?;
    let message = std::str::from_utf8(message)
        .map_err(|error| FrameError::ErrorMessage { at: error.valid_up_to() })?;
    scratch.message.clear();
    scratch.message.push_str(message);
    Ok(PeerError {
        code: ErrorCode::from_u32(body.code),
        detail: body.detail,
        message: &scratch.message,
    })
}

/// Does the checks of an error frame's header that are independent of the request.
fn check_error(view: ReadView<'_>, header: &FrameHeader) -> Result<(), FrameError> {
    for (field, found) in [
        ("num_tokens", header.num_tokens),
        ("num_entries", header.num_entries),
        ("hidden", header.hidden),
        ("row_stride_bytes", header.row_stride_bytes),
        ("dtype", header.dtype.into()),
        ("response_dtype", header.response_dtype.into()),
        ("server_queue_ns", header.server_queue_ns),
        ("server_compute_ns", header.server_compute_ns),
    ] {
        check_exact(field, found.into(), 0)?;
    }
    check_exact("flags", header.flags.into(), FLAG_PAYLOAD_CRC.into())?;
    let end = check_section(
        "error body",
        header.payload_offset,
        ERROR_BODY_BYTES as u64,
        PAYLOAD_ALIGN,
        HEADER_BYTES as u64,
        view.len() as u64,
    )?;
    check_exact("total_bytes", header.total_bytes, end)?;
    check_header_crc(header, [&[], &[], &[]])
}

fn check_identities(header: &FrameHeader, expect: &CombineExpect) -> Result<(), FrameError> {
    check_identity("client_id", header.client_id, expect.client_id)?;
    check_identity("generation", header.generation.into(), expect.generation.into())?;
    check_identity("sequence", header.sequence, expect.sequence)?;
    check_identity("layer", header.layer.into(), expect.layer.into())?;
    check_identity("frame_idx", header.frame_idx.into(), expect.frame_idx.into())
}
