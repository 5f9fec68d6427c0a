//! Errors that kernels report.

use kernels::abi::{ErrorWord, REASON_ABORT, TAG_NONE};
use protocol::ErrorCode;

/// An error of a kernel. `client` is the index in the client table, `frame` the number of the frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum KernelFault {
    /// A client's frame did not pass its checks. The client has the error code.
    #[error("frame {frame} of client {client} was refused: {code}")]
    Refused { client: u32, frame: u64, code: ErrorCode },
    /// Rows of a frame did not arrive in time after the client had announced them. The client has an error code.
    /// `tag` is `SY_TAG_*` of the kernels' header, `observed` the value that the kernel read instead of `frame`.
    #[error("rows of frame {frame} of client {client} did not arrive (tag {tag}, peer {client}, observed {observed}, expected {frame}){}", if *.is_gone { ": the client is gone" } else { "" })]
    Late { client: u32, frame: u64, tag: u32, observed: u64, is_gone: bool },
    /// Another error: a local bug, or a GPU out of order. `tag` is `SY_TAG_*` and `reason` is `SY_REASON_*`
    /// of the kernels' header.
    #[error(
        "a kernel reported tag {tag}, peer {client}, reason {reason}, observed {observed}, expected {expected}"
    )]
    Other { tag: u32, client: u32, reason: u32, observed: u64, expected: u64 },
}

impl KernelFault {
    /// Decodes an error word; `None` without an error.
    pub(super) fn of(word: &ErrorWord) -> Option<Self> {
        match word.tag {
            TAG_NONE => None,
            TAG_BAD_FRAME => Some(Self::Refused {
                client: word.peer,
                frame: word.expected,
                // The upper half names a field in some builds.
                code: ErrorCode::from_u32(word.observed as u32 & 0xffff),
            }),
            TAG_RECV_FRAME => Some(Self::Late {
                client: word.peer,
                frame: word.expected,
                tag: word.tag,
                observed: word.observed,
                is_gone: word.reason == REASON_ABORT,
            }),
            tag => Some(Self::Other {
                tag,
                client: word.peer,
                reason: word.reason,
                observed: word.observed,
                expected: word.expected,
            }),
        }
    }
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
        let refused = KernelFault::Refused { client: 3, frame: 17, code: ErrorCode::NotMyExpert };
        assert_eq!(KernelFault::of(&word(TAG_BAD_FRAME)), Some(refused));
        let observed = 9 << 16 | 4;
        let late = KernelFault::Late { client: 3, frame: 17, tag: 1, observed, is_gone: false };
        assert_eq!(KernelFault::of(&word(TAG_RECV_FRAME)), Some(late));
        let text = late.to_string();
        assert!(text.contains("tag 1, peer 3, observed 589828, expected 17"), "{text}");
        let gone = KernelFault::of(&ErrorWord { reason: REASON_ABORT, ..word(TAG_RECV_FRAME) });
        assert!(gone.is_some_and(|fault| fault.to_string().ends_with("the client is gone")));
        let text = KernelFault::of(&word(10)).map(|fault| fault.to_string()).unwrap_or_default();
        assert!(text.contains("tag 10, peer 3, reason 3, observed 589828, expected 17"), "{text}");
    }
}
