//! Records of the hot path: times and numbers only, of fixed size.

use std::sync::Arc;
use std::time::Instant;

use crate::{TraceContext, ids};

/// One record.
#[derive(Debug, Clone)]
pub enum Stamp {
    /// A client's call of a layer has ended.
    Call(CallStamp),
    /// A client has read the answer to a frame.
    Sent(SentStamp),
    /// A server has answered a frame.
    Served(ServedStamp),
}

/// Numbers that identify a frame on both sides of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameKey {
    /// [`ids::server_key`](crate::ids::server_key) of the server.
    pub server_key: u64,
    /// Client that sent the request.
    pub client_id: u64,
    /// Number of the connection.
    pub generation: u32,
    /// Number of the request.
    pub sequence: u64,
    /// Index among the request's frames to this server.
    pub frame_idx: u32,
}

impl FrameKey {
    /// The key of a frame to a server on a GPU, which knows its number on the connection only. The frame counts as a
    /// call of its own: see [`ids::connection`].
    #[must_use]
    pub const fn on_gpu(server_key: u64, client_id: u64, generation: u32, number: u64) -> Self {
        let client_id = ids::connection(server_key, client_id, generation);
        let sequence = number.wrapping_mul(ids::SEQUENCES_PER_CALL);
        Self { server_key, client_id, generation, sequence, frame_idx: 0 }
    }
}

/// A call of a client.
#[derive(Debug, Clone, Copy)]
pub struct CallStamp {
    /// Client.
    pub client_id: u64,
    /// Any sequence number of the call.
    pub sequence: u64,
    /// MoE layer.
    pub layer: u32,
    /// Tokens of the call.
    pub num_tokens: u32,
    /// Frames published.
    pub num_frames: u32,
    /// Links that failed with tokens unanswered.
    pub failovers: u32,
    /// Frames sent because an answer was late.
    pub hedges: u32,
    /// Begin of the dispatch.
    pub began: Instant,
    /// End of the dispatch.
    pub dispatched: Instant,
    /// Begin of the combine.
    pub combining: Instant,
    /// End of the call.
    pub ended: Instant,
    /// In the combine: time that the call waited for answers, in nanoseconds.
    pub wait_ns: u64,
    /// In the combine: time for reading and summing answers, in nanoseconds.
    pub combine_ns: u64,
    /// True if the call succeeded.
    pub is_ok: bool,
    /// Trace of the caller.
    pub context: Option<TraceContext>,
}

/// A frame from the client's side.
#[derive(Debug, Clone)]
pub struct SentStamp {
    /// The frame.
    pub key: FrameKey,
    /// Name of the server.
    pub server: Arc<str>,
    /// Tokens of the frame.
    pub num_tokens: u32,
    /// Publication.
    pub published: Instant,
    /// Time at which the answer was read.
    pub answered: Instant,
    /// Time in the server's queue in nanoseconds, if the answer says it.
    pub queue_ns: Option<u32>,
    /// Time of the server's compute in nanoseconds, if the answer says it.
    pub compute_ns: Option<u32>,
    /// Key by which the server records the frame, if it is another one.
    pub served_as: Option<FrameKey>,
    /// Trace of the caller.
    pub context: Option<TraceContext>,
}

/// A frame from the server's side.
#[derive(Debug, Clone, Copy)]
pub struct ServedStamp {
    /// The frame.
    pub key: FrameKey,
    /// MoE layer.
    pub layer: u32,
    /// Tokens of the frame.
    pub num_tokens: u32,
    /// Tokens of the whole batch.
    pub batch_tokens: u32,
    /// Arrival of the frame.
    pub arrived: Instant,
    /// Begin of its batch.
    pub began: Instant,
    /// End of copying and sorting.
    pub gathered: Instant,
    /// End of the compute.
    pub computed: Instant,
    /// All answers of the batch are written.
    pub answered: Instant,
    /// True for a GPU: gathering, compute and combine are one time, from `began` until `answered`.
    pub is_on_gpu: bool,
}
