//! Why a GPU cannot serve, and what its kernels report.

use kernels::abi::{ErrorWord, REASON_ABORT, TAG_NONE};
use kernels::check::CheckError;
use kernels::gpu::{DeviceName, GpuError};
use protocol::{ErrorCode, WireDtype};

use crate::compute::LoadError;

/// Why experts cannot be served from a GPU. No batch was launched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The GPU cannot be used at all.
    #[error("cannot use {device}: {source}")]
    Open {
        /// Which.
        device: DeviceName,
        /// Why.
        source: GpuError,
    },
    /// The kernels do not do this model.
    #[error(
        "the GPU kernels cannot serve this model (hidden {hidden}, intermediate {inter}, top-{top_k} of {num_experts} experts): {source}; serve it with `--device cpu`"
    )]
    Model {
        /// Hidden size.
        hidden: usize,
        /// Intermediate size of the experts.
        inter: usize,
        /// Experts per token.
        top_k: usize,
        /// Experts per layer.
        num_experts: u32,
        /// What is out of range.
        source: CheckError,
    },
    /// Requests in a type that the kernels do not read.
    #[error("requests to a GPU cannot be {found}: expected bf16 or fp8")]
    Dtype {
        /// The type.
        found: WireDtype,
    },
    /// Slots that the kernels cannot use.
    #[error(
        "no frame for this model fits a slot of {slot_bytes} bytes with {num_frames} frames: a GPU needs a power of two up to 8 frames, and room for a token in each; raise the slot's size"
    )]
    Slot {
        /// Bytes of the slot.
        slot_bytes: usize,
        /// Frames of the slot.
        num_frames: usize,
    },
    /// Not enough memory.
    #[error(
        "{what} need {:.2} GiB, {device} has {:.2} GiB free: hold fewer experts, allow smaller batches, or take another GPU",
        gib(*.needed_bytes),
        gib(*.free_bytes)
    )]
    Memory {
        /// What needs it.
        what: &'static str,
        /// Bytes needed.
        needed_bytes: u64,
        /// Which GPU.
        device: DeviceName,
        /// Bytes free there.
        free_bytes: u64,
    },
    /// The threads that post for kernels could not be started.
    #[error(transparent)]
    Proxy(#[from] proxy::ProxyError),
    /// The GPU refused weights.
    #[error("cannot put {what} onto the GPU: {source}")]
    Weights {
        /// Which.
        what: String,
        /// The cause.
        source: GpuError,
    },
    /// The GPU refused something else.
    #[error(transparent)]
    Gpu(#[from] GpuError),
}

impl From<DeviceError> for LoadError {
    fn from(error: DeviceError) -> Self {
        Self::Device(Box::new(error))
    }
}

/// What a kernel found wrong, in words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelFault {
    /// A client's frame did not pass its checks; the client was told.
    #[error("frame {frame} of the client in seat {seat} was refused: {code}")]
    Refused {
        /// The client's place in the table.
        seat: u32,
        /// Number of the frame.
        frame: u64,
        /// Why.
        code: ErrorCode,
    },
    /// A client announced a frame whose rows did not come in time; it was told.
    #[error("rows of frame {frame} of the client in seat {seat} did not come (tag {tag}, peer {seat}, observed {observed}, expected {frame}){}", if *.is_gone { ": it is gone" } else { "" })]
    Withheld {
        /// The client's place in the table.
        seat: u32,
        /// Number of the frame.
        frame: u64,
        /// `SY_TAG_*` of the kernels' header.
        tag: u32,
        /// What the kernel says that it saw instead of the frame's number.
        observed: u64,
        /// The client had gone.
        is_gone: bool,
    },
    /// Something else. A local bug, or a GPU out of order.
    #[error(
        "a kernel reported tag {tag}, peer {seat}, reason {reason}, observed {observed}, expected {expected}"
    )]
    Other {
        /// `SY_TAG_*` of the kernels' header.
        tag: u32,
        /// The client's place in the table.
        seat: u32,
        /// `SY_REASON_*` of the kernels' header.
        reason: u32,
        /// What was found.
        observed: u64,
        /// What was expected.
        expected: u64,
    },
}

impl KernelFault {
    /// What `word` says; `None` when nothing is wrong.
    #[must_use]
    pub fn of(word: &ErrorWord) -> Option<Self> {
        match word.tag {
            TAG_NONE => None,
            TAG_BAD_FRAME => Some(Self::Refused {
                seat: word.peer,
                frame: word.expected,
                // The upper half names a field in some builds.
                code: ErrorCode::from_u32(word.observed as u32 & 0xffff),
            }),
            TAG_RECV_FRAME => Some(Self::Withheld {
                seat: word.peer,
                frame: word.expected,
                tag: word.tag,
                observed: word.observed,
                is_gone: word.reason == REASON_ABORT,
            }),
            tag => Some(Self::Other {
                tag,
                seat: word.peer,
                reason: word.reason,
                observed: word.observed,
                expected: word.expected,
            }),
        }
    }
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

/// `SY_TAG_RECV_FRAME` of the kernels' header.
const TAG_RECV_FRAME: u32 = 1;
/// `SY_TAG_BAD_FRAME` of the kernels' header.
const TAG_BAD_FRAME: u32 = 7;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_words_become_faults() {
        let word = |tag| ErrorWord {
            tag,
            peer: 3,
            reason: 3,
            reserved: 0,
            observed: 9 << 16 | 4,
            expected: 17,
        };
        assert_eq!(KernelFault::of(&word(TAG_NONE)), None);
        let refused = KernelFault::Refused { seat: 3, frame: 17, code: ErrorCode::NotMyExpert };
        assert_eq!(KernelFault::of(&word(TAG_BAD_FRAME)), Some(refused));
        let observed = 9 << 16 | 4;
        let withheld =
            KernelFault::Withheld { seat: 3, frame: 17, tag: 1, observed, is_gone: false };
        assert_eq!(KernelFault::of(&word(TAG_RECV_FRAME)), Some(withheld));
        let text = withheld.to_string();
        assert!(text.contains("tag 1, peer 3, observed 589828, expected 17"), "{text}");
        let gone = KernelFault::of(&ErrorWord { reason: REASON_ABORT, ..word(TAG_RECV_FRAME) });
        assert!(gone.is_some_and(|fault| fault.to_string().ends_with("it is gone")));
        let text = KernelFault::of(&word(10)).map(|fault| fault.to_string()).unwrap_or_default();
        assert!(text.contains("tag 10, peer 3, reason 3, observed 589828, expected 17"), "{text}");
    }

    #[test]
    fn a_lack_of_memory_is_told_in_gib() {
        let error = DeviceError::Memory {
            what: "the experts",
            needed_bytes: 3 << 30,
            device: DeviceName::Cuda(1),
            free_bytes: 1 << 29,
        };
        let text = error.to_string();
        assert!(text.starts_with("the experts need 3.00 GiB, cuda:1 has 0.50 GiB free"), "{text}");
    }
}
