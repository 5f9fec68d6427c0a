//! The C layout of frames. `kernels/include/switchyard/abi.h` mirrors this file field by field; a
//! test compiles the header and compares every size and offset.

use std::mem::{offset_of, size_of};

use bytemuck::{Pod, Zeroable};

/// `"SYFR"` read as a little-endian word. Every frame carries it.
pub const FRAME_MAGIC: u32 = u32::from_le_bytes(*b"SYFR");
/// Version of the frame layout.
pub const FRAME_VERSION: u16 = 1;
/// Frame kind: tokens for experts, client to server.
pub const KIND_DISPATCH: u16 = 1;
/// Frame kind: weighted sums, server to client.
pub const KIND_COMBINE: u16 = 2;
/// Frame kind: the request failed, server to client.
pub const KIND_ERROR: u16 = 3;
/// Flag: `payload_crc` holds the checksum of the rows.
pub const FLAG_PAYLOAD_CRC: u32 = 1;
/// Values that share one FP8 scale.
pub const SCALE_BLOCK: usize = 128;
/// Alignment of the payload within the frame, bytes.
pub const PAYLOAD_ALIGN: usize = 128;
/// Alignment of the tables within the frame, bytes.
pub const TABLE_ALIGN: usize = 16;
/// Alignment of each row within the payload, bytes.
pub const ROW_ALIGN: usize = 16;
/// Longest message of an error frame, bytes of UTF-8.
pub const MAX_ERROR_MESSAGE: usize = 240;
/// Largest `hidden` a frame can carry.
pub const MAX_HIDDEN: u32 = 1 << 20;

/// Head of every frame. Offsets count from the start of the frame.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct FrameHeader {
    /// Placement version that the sender used.
    pub epoch: u64,
    /// Client that sent the request.
    pub client_id: u64,
    /// Number of the request. A request is one call of one layer.
    pub sequence: u64,
    /// Incarnation of the channel. The number of a closed channel is never reused.
    pub generation: u32,
    /// MoE layer.
    pub layer: u32,
    /// [`FRAME_MAGIC`].
    pub magic: u32,
    /// [`FRAME_VERSION`].
    pub version: u16,
    /// One of the `KIND_` constants.
    pub kind: u16,
    /// Element type of the payload, 0 in error frames.
    pub dtype: u16,
    /// Element type that the sender of a dispatch wants in the response. Equals `dtype` in combine frames.
    pub response_dtype: u16,
    /// `FLAG_` bits; the others are zero.
    pub flags: u32,
    /// Rows in the payload.
    pub num_tokens: u32,
    /// Rows of the entry table; 0 unless the frame is a dispatch.
    pub num_entries: u32,
    /// Values per row; 0 in error frames.
    pub hidden: u32,
    /// Index of this frame among the request's frames to this server, from 0.
    pub frame_idx: u32,
    /// Number of frames of the request to this server.
    pub num_frames: u32,
    /// Distance between rows, bytes.
    pub row_stride_bytes: u32,
    /// Offset of the token table.
    pub tokens_offset: u32,
    /// Offset of the entry table.
    pub entries_offset: u32,
    /// Offset of the scales, `num_tokens` times `ceil(hidden / 128)` f32; FP8 only.
    pub scales_offset: u32,
    /// Offset of the rows, or of the error body.
    pub payload_offset: u32,
    /// Bytes of the frame, from its start to the end of the last row and its padding.
    pub total_bytes: u64,
    /// CRC-32C of token table, entry table, scales, and this header with `header_crc` zero.
    pub header_crc: u32,
    /// CRC-32C of the rows in order, padding left out, or of the error body.
    pub payload_crc: u32,
    /// Combine frames: time from the frame's arrival at the server to the start of its batch, in
    /// nanoseconds, saturating. Zero in all others.
    pub server_queue_ns: u32,
    /// Combine frames: compute time of the frame's batch, in nanoseconds, saturating. Zero in all
    /// others.
    pub server_compute_ns: u32,
    /// Zero.
    pub reserved: [u32; 4],
}

/// One row of the token table: the entries that apply to one token.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct TokenRange {
    /// First entry of the token.
    pub entry_begin: u32,
    /// Entries of the token, at least one.
    pub entry_count: u32,
}

/// One row of the entry table: an expert and the weight of its output.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct Entry {
    /// Expert, numbered within the layer over the whole model.
    pub expert: u32,
    /// Router weight.
    pub weight: f32,
}

/// Payload of an error frame.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct ErrorBody {
    /// Stable code, see [`ErrorCode`](crate::ErrorCode).
    pub code: u32,
    /// Used bytes of `message`.
    pub message_len: u32,
    /// Numbers that belong to the code.
    pub detail: [u64; 2],
    /// UTF-8. Bytes from `message_len` on are zero.
    pub message: [u8; MAX_ERROR_MESSAGE],
}

/// Bytes of [`FrameHeader`].
pub const HEADER_BYTES: usize = size_of::<FrameHeader>();
/// Bytes of a [`TokenRange`].
pub const TOKEN_BYTES: usize = size_of::<TokenRange>();
/// Bytes of an [`Entry`].
pub const ENTRY_BYTES: usize = size_of::<Entry>();
/// Bytes of an [`ErrorBody`].
pub const ERROR_BODY_BYTES: usize = size_of::<ErrorBody>();
/// Bytes of an error frame.
pub const ERROR_FRAME_BYTES: usize = HEADER_BYTES + ERROR_BODY_BYTES;

// Free constants: the compiler evaluates an associated constant only where code uses it.
const _: () = assert!(size_of::<FrameHeader>() == 128 && align_of::<FrameHeader>() == 8);
const _: () =
    assert!(HEADER_BYTES.is_multiple_of(64) && HEADER_BYTES.is_multiple_of(PAYLOAD_ALIGN));
const _: () = assert!(offset_of!(FrameHeader, epoch) == 0);
const _: () = assert!(offset_of!(FrameHeader, client_id) == 8);
const _: () = assert!(offset_of!(FrameHeader, sequence) == 16);
const _: () = assert!(offset_of!(FrameHeader, generation) == 24);
const _: () = assert!(offset_of!(FrameHeader, layer) == 28);
const _: () = assert!(offset_of!(FrameHeader, magic) == 32);
const _: () = assert!(offset_of!(FrameHeader, version) == 36);
const _: () = assert!(offset_of!(FrameHeader, kind) == 38);
const _: () = assert!(offset_of!(FrameHeader, dtype) == 40);
const _: () = assert!(offset_of!(FrameHeader, response_dtype) == 42);
const _: () = assert!(offset_of!(FrameHeader, flags) == 44);
const _: () = assert!(offset_of!(FrameHeader, num_tokens) == 48);
const _: () = assert!(offset_of!(FrameHeader, num_entries) == 52);
const _: () = assert!(offset_of!(FrameHeader, hidden) == 56);
const _: () = assert!(offset_of!(FrameHeader, frame_idx) == 60);
const _: () = assert!(offset_of!(FrameHeader, num_frames) == 64);
const _: () = assert!(offset_of!(FrameHeader, row_stride_bytes) == 68);
const _: () = assert!(offset_of!(FrameHeader, tokens_offset) == 72);
const _: () = assert!(offset_of!(FrameHeader, entries_offset) == 76);
const _: () = assert!(offset_of!(FrameHeader, scales_offset) == 80);
const _: () = assert!(offset_of!(FrameHeader, payload_offset) == 84);
const _: () = assert!(offset_of!(FrameHeader, total_bytes) == 88);
const _: () = assert!(offset_of!(FrameHeader, header_crc) == 96);
const _: () = assert!(offset_of!(FrameHeader, payload_crc) == 100);
const _: () = assert!(offset_of!(FrameHeader, server_queue_ns) == 104);
const _: () = assert!(offset_of!(FrameHeader, server_compute_ns) == 108);
const _: () = assert!(offset_of!(FrameHeader, reserved) == 112);
const _: () = assert!(size_of::<TokenRange>() == 8 && offset_of!(TokenRange, entry_count) == 4);
const _: () = assert!(size_of::<Entry>() == 8 && offset_of!(Entry, weight) == 4);
const _: () = assert!(size_of::<ErrorBody>() == 264 && offset_of!(ErrorBody, detail) == 8);
const _: () = assert!(offset_of!(ErrorBody, message_len) == 4);
const _: () = assert!(offset_of!(ErrorBody, message) == 24);

// p2p-core defines the control tail; abi.h repeats its numbers for device code.
const _: () = assert!(p2p_core::slot::CONTROL_BYTES == 4096);
const _: () = assert!(p2p_core::slot::CONTROL_STRIDE == 128);
const _: () = assert!(p2p_core::slot::PUBLISHED == 0);
const _: () = assert!(p2p_core::slot::CONSUMED == 128);
const _: () = assert!(p2p_core::slot::PROGRESS == 256);
const _: () = assert!(p2p_core::slot::WAITING == 384);
