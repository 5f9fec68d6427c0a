//! The bootstrap connection after the handshake: as long as it stands, the peer lives.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{RecvFlags, sockopt};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;

use super::sentry::SentrySocket;
use super::wire::{HEADER_BYTES, KIND_GOODBYE, decode_header};

/// Why a connection is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum CloseReason {
    /// The peer left in good order.
    #[error("the peer left")]
    Left,
    /// The peer's process ended, or it dropped the connection without a word.
    #[error("the peer is gone without leaving in order")]
    Lost,
    /// The peer, or something in between, reset the connection.
    #[error("the connection was reset")]
    Reset,
    /// The peer's host answers no more.
    #[error("the peer's host does not answer")]
    Unreachable,
    /// This side closed the connection.
    #[error("closed by this side")]
    Local,
    /// The peer sent something that has no place here.
    #[error("the peer broke the protocol of the liveness connection")]
    Protocol,
}

/// Watches over one peer. Dropping it tells the peer, soon, that this side is gone.
#[derive(Debug)]
pub struct Liveness {
    /// Its event wakes tasks of the runtime.
    socket: AsyncFd<SentrySocket>,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Liveness {
    /// Takes over the connection after the handshake. Waits for another thread to take it, which is microseconds
    /// where a processor is free, and tens of seconds at the most.
    pub(super) fn new(stream: TcpStream, timeout: Duration) -> io::Result<Self> {
        let socket = OwnedFd::from(stream.into_std()?);
        watch_half_open(&socket, timeout)?;
        let socket = SentrySocket::new(socket)?;
        // SAFETY: it owns the event that it names, and names no other as long as it lives.
        let socket = unsafe { AsyncFd::register_with_interest(socket, Interest::READABLE)? };
        Ok(Self { socket, _permit: None })
    }

    /// The peer's place is taken as long as this lives.
    pub(super) fn holding(self, permit: OwnedSemaphorePermit) -> Self {
        Self { _permit: Some(permit), ..self }
    }

    /// Waits until the connection is over. Any number of tasks may wait.
    pub async fn closed(&self) -> CloseReason {
        let waited = self
            .socket
            .async_io(Interest::READABLE, |socket| {
                socket.reason().ok_or_else(|| io::ErrorKind::WouldBlock.into())
            })
            .await;
        // The runtime gives an error only when it shuts down itself.
        waited.unwrap_or(CloseReason::Local)
    }

    /// Why the connection is over, or `None` while it stands. Reads a word; also for threads without a
    /// runtime, which put [`as_fd`](AsFd::as_fd) into their [`WaitSet`](crate::wait::WaitSet) and ask here
    /// when it fires.
    #[must_use]
    pub fn closed_now(&self) -> Option<CloseReason> {
        self.socket.get_ref().reason()
    }

    /// Says goodbye and closes the connection, both before this returns, unless no processor is free for that
    /// within a second. The peer sees [`CloseReason::Left`].
    pub fn close(&self) {
        self.socket.get_ref().close();
    }
}

impl AsFd for Liveness {
    /// Readable anew, for waiters that are edge-triggered, when the connection is over. Whoever adds it to a
    /// [`WaitSet`](crate::wait::WaitSet) removes it: this is not its only copy.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.get_ref().as_fd()
    }
}

/// Why a connection is over, or `None` while it stands. Never blocks.
pub(super) fn why_over(socket: impl AsFd) -> Option<CloseReason> {
    // Peeking leaves the end of the connection to be seen again.
    let mut head = [0u8; HEADER_BYTES];
    match rustix::net::recv(&socket, &mut head[..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((_, HEADER_BYTES)) => match decode_header(&head) {
            Ok(header) if header.kind == KIND_GOODBYE => Some(CloseReason::Left),
            _ => Some(CloseReason::Protocol),
        },
        Ok((_, 0)) => Some(CloseReason::Lost),
        // A goodbye is 16 bytes in one segment; a part of it says that the end is near, and the
        // rest or the end of the connection wakes again.
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

/// Whether the peer's end of a connection is gone. What it said before and nobody has read is no end.
pub(super) fn is_over(stream: impl AsFd) -> bool {
    let mut byte = [0u8; 1];
    match rustix::net::recv(&stream, &mut byte[..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((_, num_bytes)) => num_bytes == 0,
        Err(error) => !matches!(error, Errno::AGAIN | Errno::INTR),
    }
}

/// Lets the kernel notice a host that vanished, whether data is under way or not.
fn watch_half_open(socket: &OwnedFd, timeout: Duration) -> io::Result<()> {
    let timeout = timeout.clamp(Duration::from_secs(1), Duration::from_secs(3600));
    let probe = Duration::from_secs((timeout.as_secs() / 4).max(1));
    sockopt::set_tcp_nodelay(socket, true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, probe)?;
    sockopt::set_tcp_keepintvl(socket, probe)?;
    sockopt::set_tcp_keepcnt(socket, 3)?;
    sockopt::set_tcp_user_timeout(socket, timeout.as_millis() as u32)?;
    Ok(())
}
