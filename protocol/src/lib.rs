//! Dispatch and combine frames: layout, encoding, validation.
//!
//! A client sends the tokens of one MoE layer to a server as *dispatch frames*; the server answers
//! each with one *combine frame*, one row per token, or with an *error frame*. This crate turns
//! slices of `f32` into those frames and back. It does no I/O, waits for nothing, knows no transport
//! and allocates nothing once its scratch structures have grown.
//!
//! Frames lie in memory that the peer can still write while they are decoded. So every decoder
//! copies first, checks the copy, and uses only what it has checked; the worst a peer can do by
//! writing late is to make its own rows wrong.
//!
//! | module | what it holds |
//! |---|---|
//! | [`abi`] | the C layout, mirrored by `kernels/include/switchyard/abi.h` |
//! | [`dtype`] | element types on the wire |
//! | [`geometry`] | how many tokens fit a frame |
//! | [`convert`] | conversions between `f32` and the wire types |
//! | [`encode`] | writing frames |
//! | [`decode`] | reading dispatch frames (servers) |
//! | [`response`] | reading combine and error frames (clients) |
//! | [`rows`] | copying rows out of a checked frame |
//! | [`error`] | what can be wrong with a frame, and the codes that travel |
//! | [`hello`] | what both sides say while they connect |
//!
//! The format is described in `docs/wire-format.md`.
//!
//! Values that are not finite: NaN and infinity in activations are data, not errors. They travel,
//! and stay within their token's row. FP8 has no infinity, so there infinity arrives as NaN. Weights
//! and scales must be finite on both sides.

pub mod abi;
pub mod convert;
pub mod decode;
pub mod dtype;
pub mod encode;
pub mod error;
pub mod geometry;
pub mod hello;
pub mod response;
pub mod rows;

pub use abi::{Entry, FrameHeader, TokenRange};
pub use decode::{Dispatch, DispatchExpect, DispatchScratch, decode_dispatch, peek_id};
pub use dtype::WireDtype;
pub use encode::{
    CombineMeta, DispatchMeta, EncodeError, FrameId, ServerTimes, TokenRef, encode_combine,
    encode_dispatch, encode_error,
};
pub use error::{ErrorCode, FrameError};
pub use geometry::{FrameGeometry, GeometryError};
pub use hello::{ClientHello, HelloDecodeError, HelloReject, ModelShape, ServerHello};
pub use response::{
    CombineExpect, PeerError, Response, ResponseScratch, decode_response, response_id,
};
pub use rows::Rows;

#[cfg(not(target_endian = "little"))]
compile_error!("frames are little-endian and read in place: big-endian targets are not supported");
