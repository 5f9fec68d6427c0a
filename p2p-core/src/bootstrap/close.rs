//! The end of a bootstrap connection, as its socket shows it.

use std::fmt;
use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::net::RecvFlags;

use super::wire::{HEADER_BYTES, encode_goodbye};

/// The last messages of both sides of a connection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Goodbyes {
    ours: Goodbye,
    theirs: Goodbye,
}

/// One side's last message.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Goodbye {
    /// Of a connection without TLS.
    Plain([u8; HEADER_BYTES]),
    /// Known to both peers only.
    Secret([u8; SECRET_BYTES]),
}

impl Goodbye {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Plain(bytes) => bytes,
            Self::Secret(bytes) => bytes,
        }
    }
}

impl Goodbyes {
    /// The two of a connection without TLS. They are the same for all.
    pub(super) fn plain() -> Self {
        let mut bytes = [0; HEADER_BYTES];
        bytes.copy_from_slice(&encode_goodbye());
        Self { ours: Goodbye::Plain(bytes), theirs: Goodbye::Plain(bytes) }
    }

    /// The two that both sides compute from the keys of their TLS connection.
    pub(super) const fn secret(ours: [u8; SECRET_BYTES], theirs: [u8; SECRET_BYTES]) -> Self {
        Self { ours: Goodbye::Secret(ours), theirs: Goodbye::Secret(theirs) }
    }

    /// This side's last message.
    pub(super) fn ours(&self) -> &[u8] {
        self.ours.bytes()
    }
}

impl fmt::Debug for Goodbyes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Goodbyes").finish_non_exhaustive()
    }
}

/// Why a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum CloseReason {
    /// The peer left in good order.
    #[error("the peer left")]
    Left,
    /// The peer's process ended, or it dropped the connection without a goodbye.
    #[error("the peer is gone without leaving in order")]
    Lost,
    /// The peer, or a device between the peers, reset the connection.
    #[error("the connection was reset")]
    Reset,
    /// The peer's host answers no more.
    #[error("the peer's host does not answer")]
    Unreachable,
    /// This side closed the connection.
    #[error("closed by this side")]
    Local,
    /// The peer sent bytes that are not allowed here.
    #[error("the peer broke the protocol of the liveness connection")]
    Protocol,
}

/// Returns why a connection ended, or `None` while it stands. Never blocks.
pub(super) fn why_over(socket: impl AsFd, goodbyes: &Goodbyes) -> Option<CloseReason> {
    // Peeking leaves the end of the connection in the socket for later calls.
    let expected = goodbyes.theirs.bytes();
    let mut space = [0u8; SECRET_BYTES];
    let found = &mut space[..expected.len()];
    match rustix::net::recv(&socket, &mut *found, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((_, num_bytes)) if num_bytes == expected.len() => {
            // The bytes are sent once, and a wrong guess ends the connection.
            Some(if found == expected { CloseReason::Left } else { CloseReason::Protocol })
        }
        Ok((_, 0)) => Some(CloseReason::Lost),
        // A goodbye comes in one segment. A part of it announces the end, and the rest or the end of
        // the connection wakes again.
        Ok(_) => has_hung_up(&socket).then_some(CloseReason::Protocol),
        Err(Errno::AGAIN | Errno::INTR) => None,
        Err(Errno::TIMEDOUT | Errno::HOSTUNREACH | Errno::NETUNREACH) => {
            Some(CloseReason::Unreachable)
        }
        Err(_) => Some(CloseReason::Reset),
    }
}

fn has_hung_up(socket: impl AsFd) -> bool {
    let mut fds = [rustix::event::PollFd::new(&socket, rustix::event::PollFlags::RDHUP)];
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(rustix::event::poll(&mut fds, Some(&now)), Ok(1..))
}

/// Tells whether the peer's end of a connection is gone. Unread bytes are not an end.
pub(super) fn is_over(stream: impl AsFd) -> bool {
    let mut byte = [0u8; 1];
    match rustix::net::recv(&stream, &mut byte[..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((_, num_bytes)) => num_bytes == 0,
        Err(error) => !matches!(error, Errno::AGAIN | Errno::INTR),
    }
}

/// Bytes of a goodbye that TLS keys give.
pub(super) const SECRET_BYTES: usize = 32;
const _: () = assert!(SECRET_BYTES >= HEADER_BYTES);
