//! Dispatch and combine frames: layout, encoding, validation.
//!
//! A client sends the tokens of one MoE layer to a server as *dispatch frames*; the server answers
//! each with one *combine frame*, one row per token, or with an *error frame*. This crate turns
//! slices of `f32` into those frames and back. It does no I/O, never blocks, knows no transport, and
//! allocates nothing once its scratch structures have grown.
//!
//! Frames lie in memory that the peer can still write while they are decoded. Every decoder therefore
//! copies first, checks the copy, and uses only the checked copy. A peer that writes late can only
//! make its own rows wrong.
//!
//! | module | contents |
//! |---|---|
//! | [`abi`] | the C layout, mirrored by `kernels/include/switchyard/abi.h` |
//! | [`dtype`] | element types on the wire |
//! | [`geometry`] | how many tokens fit a frame |
//! | [`convert`] | conversions between `f32` and the wire types |
//! | [`encode`] | writing frames |
//! | [`decode`] | reading dispatch frames (servers) |
//! | [`response`] | reading combine and error frames (clients) |
//! | [`rows`] | copying rows out of a checked frame |
//! | [`error`] | errors of a frame, and the codes sent in error frames |
//! | [`hello`] | the messages that both sides exchange while they connect |
//!
//! The format is described in `docs/reference/wire-format.md`.
//!
//! NaN and infinity in activations are data, not errors. They are sent unchanged and stay within their
//! token's row. FP8 has no infinity, so in FP8 infinity arrives as NaN. Weights and scales must be
//! finite on both sides.

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

// Types of other crates in the signatures of this one.
pub use p2p_core::{OutOfRange, ReadView, WriteView};

#[cfg(not(target_endian = "little"))]
compile_error!("frames are little-endian and read in place: big-endian targets are not supported");
