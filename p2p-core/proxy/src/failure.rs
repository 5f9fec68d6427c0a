//! What went wrong with a peer's commands, for whoever manages the peer.

use p2p_core::PostError;
use thiserror::Error;

use crate::command::{BadCommand, ERROR_CLOSED, ERROR_POST, ERROR_STALLED, Opcode};
use crate::relay::RelayError;

/// A command was not carried out. Its lane, or the whole peer, is out of service.
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

/// Why a command was not carried out.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Cause {
    /// The command makes no sense. Its lane is out of service.
    #[error(transparent)]
    Command(#[from] BadCommand),
    /// The transport refused it. All lanes of the peer are out of service.
    #[error("{opcode:?}: {source}")]
    Post {
        /// What was asked for.
        opcode: Opcode,
        /// The transport's answer.
        source: PostError,
    },
    /// The transport failed with commands under way. All lanes of the peer are out of service.
    #[error("with commands under way: {0}")]
    Transport(PostError),
    /// Nothing was over for too long. All lanes of the peer are out of service.
    #[error("not over {limit_ms} ms after it was taken, and nothing else was meanwhile")]
    Stalled {
        /// The limit.
        limit_ms: u64,
    },
    /// The relay at the peer answers nonsense. All lanes of the peer are out of service.
    #[error(transparent)]
    Relay(#[from] RelayError),
}

impl Cause {
    /// `SY_PROXY_ERROR_*`
    #[must_use]
    pub const fn code(&self) -> u8 {
        match self {
            Self::Command(bad) => bad.code(),
            Self::Post { .. } | Self::Transport(_) | Self::Relay(_) => ERROR_POST,
            Self::Stalled { .. } => ERROR_STALLED,
        }
    }

    /// Whether only the lane is concerned.
    #[must_use]
    pub const fn is_of_lane(&self) -> bool {
        matches!(self, Self::Command(_))
    }
}

/// What `sy_proxy_lane_words.error` says in words.
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
    format!("out of service at command {index} (opcode {opcode}): {what}")
}
