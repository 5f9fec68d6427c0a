//! The end of a bootstrap connection, as its socket shows it.

use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::net::RecvFlags;

use super::wire::{HEADER_BYTES, KIND_GOODBYE, decode_header};

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
pub(super) fn why_over(socket: impl AsFd) -> Option<CloseReason> {
    // Peeking leaves the end of the connection in the socket for later calls.
    let mut head = [0u8; HEADER_BYTES];
    match rustix::net::recv(&socket, &mut head[..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((_, HEADER_BYTES)) => match decode_header(&head) {
            Ok(header) if header.kind == KIND_GOODBYE => Some(CloseReason::Left),
            _ => Some(CloseReason::Protocol),
        },
        Ok((_, 0)) => Some(CloseReason::Lost),
        // A goodbye is 16 bytes in one segment. A part of it announces the end, and the rest or the
        // end of the connection wakes again.
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
