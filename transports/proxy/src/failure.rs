//! Failures of a peer's commands, for the peer's manager.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use p2p_core::PostError;
use thiserror::Error;

use crate::command::{BadCommand, ERROR_CLOSED, ERROR_POST, ERROR_STALLED, Opcode};

/// A command was not executed. Its lane, or the whole peer, is out of service.
#[derive(Debug, Error)]
#[error("peer {peer}, lane {lane}, command {index}: {cause}")]
pub struct Failure {
    /// As given in [`PeerConfig`](crate::PeerConfig).
    pub peer: u32,
    /// Lane.
    pub lane: u32,
    /// Number of the command in its lane, from 0.
    pub index: u64,
    /// Why.
    pub cause: Cause,
}

/// Cause of a failed command.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names of the fields say enough")]
pub enum Cause {
    /// The command is invalid. Its lane is out of service.
    #[error(transparent)]
    Command(#[from] BadCommand),
    /// The transport refused it. All lanes of the peer are out of service.
    #[error("{opcode:?}: {source}")]
    Post {
        opcode: Opcode,
        /// The transport's answer.
        source: PostError,
    },
    /// The transport failed with commands under way. All lanes of the peer are out of service.
    #[error("with commands under way: {0}")]
    Transport(PostError),
    /// No command finished for too long. All lanes of the peer are out of service.
    #[error("not over {limit_ms} ms after it was taken, and nothing else was meanwhile")]
    Stalled { limit_ms: u64 },
    /// The relay at the peer counts tasks as done that it was never given. All lanes of the peer are out of service.
    #[cfg(feature = "relay")]
    #[error("the relay at the peer says that {done} tasks are done, {issued} were given to it")]
    Relay {
        /// Tasks said to be done.
        done: u64,
        /// Tasks given.
        issued: u64,
    },
}

impl Cause {
    /// `SY_PROXY_ERROR_*`
    #[must_use]
    pub const fn code(&self) -> u8 {
        match self {
            Self::Command(bad) => bad.code(),
            Self::Post { .. } | Self::Transport(_) => ERROR_POST,
            #[cfg(feature = "relay")]
            Self::Relay { .. } => ERROR_POST,
            Self::Stalled { .. } => ERROR_STALLED,
        }
    }

    /// Whether only the lane is affected.
    #[must_use]
    pub const fn is_of_lane(&self) -> bool {
        matches!(self, Self::Command(_))
    }
}

/// Decodes `sy_proxy_lane_words.error`. Where no command is to blame, it names the first that was not over.
#[must_use]
pub fn describe_error(word: u64) -> String {
    let (code, opcode, index) = (word as u8, (word >> 8) as u8, word >> 16);
    let what = match code {
        0 => return "in service".to_owned(),
        1 => "unknown opcode",
        2 => "unknown window",
        3 => "unknown source",
        4 => "beyond the peer's window",
        5 => "beyond the source",
        6 => "a word that is not aligned",
        7 => "a command of another lap",
        8 => "bits set that must be 0",
        9 => "not possible in this window",
        ERROR_POST => "the transport refused it or failed",
        ERROR_STALLED => "not over in time",
        ERROR_CLOSED => "the peer was closed",
        _ => "an unknown reason",
    };
    if opcode == 0 && code >= ERROR_POST {
        return format!("out of service from command {index} on: {what}");
    }
    format!("out of service at command {index} (opcode {opcode}): {what}")
}

/// Shared state of a peer's thread and its owner.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Identifies the peer in reports.
    pub(crate) peer: u32,
    failures: Mutex<Vec<Failure>>,
    /// Reason why each lane is out of service, by its number; the first reason stays. `None`: all of them are.
    reasons: Mutex<Vec<(Option<u32>, Reason)>>,
    has_failed: AtomicBool,
}

/// A [`Cause`] that remains after its report was taken.
#[derive(Debug)]
enum Reason {
    Disconnected(&'static str),
    Transport(&'static str, i64, String),
    /// A failure without an operation: code and text.
    Other(u8, String),
}

impl Reason {
    fn of(cause: &Cause) -> Self {
        let (Cause::Post { source, .. } | Cause::Transport(source)) = cause else {
            return Self::Other(cause.code(), cause.to_string());
        };
        match *source {
            PostError::Disconnected { op } => Self::Disconnected(op),
            PostError::Transport { op, code, ref detail } => {
                Self::Transport(op, code, detail.clone())
            }
            _ => Self::Other(cause.code(), cause.to_string()),
        }
    }

    fn error(&self, asked: &'static str) -> PostError {
        match *self {
            Self::Disconnected(op) => PostError::Disconnected { op },
            Self::Transport(op, code, ref detail) => {
                PostError::Transport { op, code, detail: detail.clone() }
            }
            Self::Other(code, ref text) => {
                PostError::Transport { op: asked, code: code.into(), detail: text.clone() }
            }
        }
    }
}

impl Shared {
    pub(crate) const fn new(peer: u32) -> Self {
        Self {
            peer,
            failures: Mutex::new(Vec::new()),
            reasons: Mutex::new(Vec::new()),
            has_failed: AtomicBool::new(false),
        }
    }

    /// Reason why lane `lane` is out of service, as the error of `op`. Repeated calls return it again.
    pub(crate) fn reason(&self, lane: u32, op: &'static str) -> Option<PostError> {
        let reasons = self.reasons.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |(whose, _): &&(Option<u32>, Reason)| whose.is_none_or(|idx| idx == lane);
        reasons.iter().find(is_it).map(|(_, reason)| reason.error(op))
    }

    /// Whether anything was reported.
    pub(crate) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Acquire)
    }

    pub(crate) fn take(&self) -> Vec<Failure> {
        std::mem::take(&mut self.failures.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn report(&self, failure: Failure) {
        tracing::warn!(%failure, "commands are refused");
        let whose = failure.cause.is_of_lane().then_some(failure.lane);
        let mut reasons = self.reasons.lock().unwrap_or_else(PoisonError::into_inner);
        // One for each lane and one for the peer at most.
        if reasons.iter().all(|(of, _)| of.is_some() && *of != whose) {
            reasons.push((whose, Reason::of(&failure.cause)));
        }
        drop(reasons);
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        if failures.len() < MAX_FAILURES {
            failures.push(failure);
        }
        self.has_failed.store(true, Ordering::Release);
    }
}

/// Limit of kept reports.
const MAX_FAILURES: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_for_a_reason_takes_no_report_away() {
        let shared = Shared::new(3);
        let bad = |opcode| Cause::Command(BadCommand::Opcode { opcode });
        shared.report(Failure { peer: 3, lane: 0, index: 5, cause: bad(9) });
        shared.report(Failure { peer: 3, lane: 1, index: 7, cause: bad(10) });
        let reason = |lane| shared.reason(lane, "put").map(|error| error.to_string());
        assert_eq!(reason(2), None);
        let detail = "injected".to_owned();
        let broken = PostError::Transport { op: "quiet", code: -5, detail };
        shared.report(Failure { peer: 3, lane: 2, index: 0, cause: Cause::Transport(broken) });
        for _ in 0..2 {
            // Its own first, then the peer's, in their order.
            assert!(reason(0).is_some_and(|text| text.contains("opcode 9 is unknown")));
            assert!(reason(1).is_some_and(|text| text.contains("opcode 10 is unknown")));
            for lane in [2, 77] {
                let text = reason(lane).unwrap();
                assert!(text.contains("quiet") && text.contains("injected"), "{text}");
            }
        }
        let lanes: Vec<_> = shared.take().iter().map(|failure| failure.lane).collect();
        assert_eq!(lanes, [0, 1, 2]);
        assert!(shared.take().is_empty() && reason(0).is_some() && shared.has_failed());
    }

    #[test]
    fn an_error_word_without_a_culprit_names_no_opcode() {
        use crate::command::error_word;
        let text = describe_error(error_word(ERROR_STALLED, 0, 5));
        assert_eq!(text, "out of service from command 5 on: not over in time");
        let text = describe_error(error_word(1, 0, 5));
        assert_eq!(text, "out of service at command 5 (opcode 0): unknown opcode");
    }
}
