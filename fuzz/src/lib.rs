//! Shared parts of the fuzz targets: guarded memory, the channel that they pretend to serve, and valid checksums for
//! mutated frames.

use bytemuck::{bytes_of, pod_read_unaligned};
use protocol::abi::{
    ENTRY_BYTES, FLAG_PAYLOAD_CRC, FrameHeader, HEADER_BYTES, KIND_DISPATCH, KIND_ERROR,
    TOKEN_BYTES,
};
use protocol::{CombineExpect, DispatchExpect, FrameId, WireDtype};

pub mod codec;
#[path = "../../protocol/tests/it/common/guarded.rs"]
mod guarded;
pub use guarded::GuardedMemory;

/// Largest input, bytes.
pub const MAX_INPUT: usize = 16 << 10;
/// Most tokens of a frame.
pub const MAX_TOKENS: usize = 32;
/// Values per token: two FP8 blocks, the second partial.
pub const HIDDEN: usize = 136;
/// Tokens of the request that `response_frame` answers.
pub const RESPONSE_TOKENS: usize = 3;

/// Identity of every seed.
pub fn id() -> FrameId {
    FrameId {
        epoch: 9,
        client_id: 0x1122_3344_5566_7788,
        generation: 3,
        sequence: 77,
        layer: 2,
        frame_idx: 1,
        num_frames: 4,
    }
}

/// The server's requirements for requests in `dtype`.
pub fn dispatch_expect(dtype: WireDtype) -> DispatchExpect {
    DispatchExpect {
        client_id: id().client_id,
        generation: id().generation,
        hidden: HIDDEN,
        num_layers: 4,
        num_experts: 16,
        max_tokens: MAX_TOKENS,
        top_k: 4,
        dtype,
        response_dtype: WireDtype::Bf16,
    }
}

/// The client's expectations of answers in `dtype`.
pub fn combine_expect(dtype: WireDtype) -> CombineExpect {
    CombineExpect {
        client_id: id().client_id,
        generation: id().generation,
        sequence: id().sequence,
        layer: id().layer,
        frame_idx: id().frame_idx,
        num_tokens: RESPONSE_TOKENS,
        hidden: HIDDEN,
        dtype,
    }
}

/// The element type for an input: its own if it names one.
pub fn dtype_of(frame: &[u8]) -> WireDtype {
    header_of(frame)
        .and_then(|header| WireDtype::from_code(header.dtype))
        .unwrap_or(WireDtype::F8E4m3)
}

/// Writes the checksums that match the header's own numbers, so that inputs reach the checks after them. A frame whose
/// numbers are out of range is left as it is.
pub fn repair_checksums(frame: &mut [u8]) {
    let Some(mut header) = header_of(frame) else { return };
    let hidden = header.hidden as usize;
    let num_tokens = header.num_tokens as usize;
    let dtype = dtype_of(frame);
    if header.kind == KIND_ERROR {
        let body = part(frame, header.payload_offset, protocol::abi::ERROR_BODY_BYTES);
        let Some(body) = body else { return };
        header.payload_crc = crc32c::crc32c(body);
    } else if header.flags & FLAG_PAYLOAD_CRC != 0 {
        header.payload_crc = 0;
        for row in 0..num_tokens.min(MAX_INPUT) {
            let offset = header.payload_offset as usize + row * header.row_stride_bytes as usize;
            let row = part(frame, offset as u32, dtype.row_bytes(hidden.min(MAX_INPUT)));
            let Some(row) = row else { return };
            header.payload_crc = crc32c::crc32c_append(header.payload_crc, row);
        }
    }
    let mut crc = 0;
    if header.kind != KIND_ERROR {
        let num_ranges = if header.kind == KIND_DISPATCH { num_tokens } else { 0 };
        let num_scales = num_tokens.saturating_mul(dtype.scales_per_row(hidden));
        for (offset, bytes) in [
            (header.tokens_offset, num_ranges.saturating_mul(TOKEN_BYTES)),
            (header.entries_offset, (header.num_entries as usize).saturating_mul(ENTRY_BYTES)),
            (header.scales_offset, num_scales.saturating_mul(4)),
        ] {
            let Some(table) = part(frame, offset, bytes) else { return };
            crc = crc32c::crc32c_append(crc, table);
        }
    }
    header.header_crc = 0;
    header.header_crc = crc32c::crc32c_append(crc, bytes_of(&header));
    frame[..HEADER_BYTES].copy_from_slice(bytes_of(&header));
}

fn header_of(frame: &[u8]) -> Option<FrameHeader> {
    Some(pod_read_unaligned(frame.get(..HEADER_BYTES)?))
}

fn part(frame: &[u8], offset: u32, bytes: usize) -> Option<&[u8]> {
    frame.get(offset as usize..)?.get(..bytes)
}
