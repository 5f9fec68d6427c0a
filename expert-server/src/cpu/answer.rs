//! Answers to frames: rows, or an error.

use p2p_core::WriteView;
use protocol::{CombineMeta, ErrorCode, FrameError, FrameId, encode_combine, encode_error};

/// The reason why a frame gets no rows.
#[derive(Debug, Clone)]
pub(crate) struct Fault {
    pub(crate) code: ErrorCode,
    /// Details of the code, as the protocol defines them.
    pub(crate) detail: [u64; 2],
    pub(crate) message: String,
}

impl Fault {
    /// A frame needs an expert that is not loaded here.
    pub(crate) fn not_my_expert(layer: u32, expert: u32) -> Self {
        Self {
            code: ErrorCode::NotMyExpert,
            detail: [layer.into(), expert.into()],
            message: format!("not my expert: layer {layer} expert {expert} is not loaded here"),
        }
    }

    /// The model has no routed experts in that layer.
    pub(crate) fn no_moe_layer(layer: u32) -> Self {
        Self {
            code: ErrorCode::WrongLayer,
            detail: [layer.into(), 0],
            message: format!("layer {layer} of the model has no routed experts"),
        }
    }

    /// The client wrote into a frame after it had published it.
    pub(crate) fn changed_layer(published: u32, found: u32) -> Self {
        Self {
            code: ErrorCode::BadFrame,
            detail: [published.into(), found.into()],
            message: format!(
                "the frame was published for layer {published} and changed to {found}"
            ),
        }
    }

    /// The server failed on a valid frame.
    pub(crate) fn internal(message: String) -> Self {
        Self { code: ErrorCode::Internal, detail: [0; 2], message }
    }

    /// Returns true if only a broken or hostile client sends such a frame.
    pub(crate) const fn is_malformed(&self) -> bool {
        matches!(
            self.code,
            ErrorCode::BadFrame
                | ErrorCode::UnknownExpert
                | ErrorCode::WrongLayer
                | ErrorCode::StaleChannel
                | ErrorCode::Version
        )
    }
}

impl From<FrameError> for Fault {
    fn from(error: FrameError) -> Self {
        Self { code: error.code(), detail: [0; 2], message: error.to_string() }
    }
}

/// The answer to one frame. Borrows its rows.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Answer<'a> {
    Rows { meta: &'a CombineMeta, rows: &'a [f32] },
    Fault { id: &'a FrameId, fault: &'a Fault },
}

impl Answer<'_> {
    /// Writes the answer's frame and returns the bytes used. Rows that do not fit become an error frame.
    /// Returns 0 if the error frame does not fit either.
    pub(crate) fn encode(&self, view: &mut WriteView<'_>) -> usize {
        let (id, failed) = match self {
            Self::Rows { meta, rows } => match encode_combine(view, meta, rows) {
                Ok(used_bytes) => return used_bytes,
                Err(error) => {
                    (&meta.id, Fault::internal(format!("cannot encode the answer: {error}")))
                }
            },
            Self::Fault { id, fault } => match encode_fault(view, id, fault) {
                Ok(used_bytes) => return used_bytes,
                Err(_) => return 0,
            },
        };
        encode_fault(view, id, &failed).unwrap_or(0)
    }
}

fn encode_fault(
    view: &mut WriteView<'_>,
    id: &FrameId,
    fault: &Fault,
) -> Result<usize, protocol::EncodeError> {
    encode_error(view, id, fault.code, fault.detail, &fault.message)
}

/// An answer that waits for the client's credit. Owns its rows.
#[derive(Debug)]
pub(crate) struct QueuedAnswer {
    body: QueuedBody,
}

#[derive(Debug)]
enum QueuedBody {
    Rows { meta: CombineMeta, rows: Vec<f32> },
    Fault { id: FrameId, fault: Fault },
}

impl QueuedAnswer {
    /// Copies the answer into `buffer`.
    pub(crate) fn new(answer: Answer<'_>, mut buffer: Vec<f32>) -> Self {
        let body = match answer {
            Answer::Rows { meta, rows } => {
                buffer.clear();
                buffer.extend_from_slice(rows);
                QueuedBody::Rows { meta: *meta, rows: buffer }
            }
            Answer::Fault { id, fault } => QueuedBody::Fault { id: *id, fault: fault.clone() },
        };
        Self { body }
    }

    pub(crate) fn as_answer(&self) -> Answer<'_> {
        match &self.body {
            QueuedBody::Rows { meta, rows } => Answer::Rows { meta, rows },
            QueuedBody::Fault { id, fault } => Answer::Fault { id, fault },
        }
    }

    /// The buffer, for the next queued answer.
    pub(crate) fn into_buffer(self) -> Option<Vec<f32>> {
        match self.body {
            QueuedBody::Rows { rows, .. } => Some(rows),
            QueuedBody::Fault { .. } => None,
        }
    }
}

/// Buffers for the rows of queued answers, reused.
#[derive(Debug, Default)]
pub(crate) struct BufferPool {
    buffers: Vec<Vec<f32>>,
}

impl BufferPool {
    pub(crate) fn take(&mut self) -> Vec<f32> {
        self.buffers.pop().unwrap_or_default()
    }

    pub(crate) fn put(&mut self, buffer: Option<Vec<f32>>) {
        if let Some(buffer) = buffer
            && self.buffers.len() < MAX_BUFFERS
        {
            self.buffers.push(buffer);
        }
    }
}

const MAX_BUFFERS: usize = 16;
