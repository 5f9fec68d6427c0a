//! The bootstrap connection after the handshake: as long as it stands, the peer lives.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, sockopt};
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;

use super::wire::{HEADER_BYTES, KIND_GOODBYE, decode_header, encode_goodbye};

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

/// Watches over one peer. Dropping it tells the peer that this side is gone.
#[derive(Debug)]
pub struct Liveness {
    stream: TcpStream,
    closed_here: AtomicBool,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Liveness {
    /// Takes over the connection after the handshake.
    pub(super) fn new(stream: TcpStream, timeout: Duration) -> io::Result<Self> {
        let low = OwnedFd::from(stream.into_std()?);
        watch_half_open(&low, timeout)?;
        let stream = std::net::TcpStream::from(move_high(low));
        Ok(Self {
            stream: TcpStream::from_std(stream)?,
            closed_here: AtomicBool::new(false),
            _permit: None,
        })
    }

    /// The peer's place is taken as long as this lives.
    pub(super) fn holding(self, permit: OwnedSemaphorePermit) -> Self {
        Self { _permit: Some(permit), ..self }
    }

    /// Waits until the connection is over. Any number of tasks may wait.
    pub async fn closed(&self) -> CloseReason {
        let waited = self
            .stream
            .async_io(Interest::READABLE, || {
                self.closed_now().ok_or_else(|| io::ErrorKind::WouldBlock.into())
            })
            .await;
        // The runtime gives an error only when it shuts down itself.
        waited.unwrap_or(CloseReason::Local)
    }

    /// Why the connection is over, or `None` while it stands. One system call, never blocks; also for
    /// threads without a runtime, which put [`as_fd`](AsFd::as_fd) into their
    /// [`WaitSet`](crate::wait::WaitSet) and ask here when it fires.
    #[must_use]
    pub fn closed_now(&self) -> Option<CloseReason> {
        // Peeking leaves the end of the connection to be seen by everybody.
        let mut head = [0u8; HEADER_BYTES];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let reason = match rustix::net::recv(&self.stream, &mut head[..], flags) {
            Ok((_, HEADER_BYTES)) => match decode_header(&head) {
                Ok(header) if header.kind == KIND_GOODBYE => CloseReason::Left,
                _ => CloseReason::Protocol,
            },
            Ok((_, 0)) => CloseReason::Lost,
            // A goodbye is 16 bytes in one segment; a part of it says that the end is near, and the
            // rest or the end of the connection wakes again.
            Ok(_) => {
                return self.hung_up().then_some(CloseReason::Protocol);
            }
            Err(Errno::AGAIN | Errno::INTR) => return None,
            Err(Errno::TIMEDOUT | Errno::HOSTUNREACH | Errno::NETUNREACH) => {
                CloseReason::Unreachable
            }
            Err(_) => CloseReason::Reset,
        };
        // Acquire pairs with `close`: a shutdown of our own must not look like the peer's end.
        if self.closed_here.load(Ordering::Acquire) {
            Some(CloseReason::Local)
        } else {
            Some(reason)
        }
    }

    /// Says goodbye and closes the connection. The peer sees [`CloseReason::Left`].
    pub fn close(&self) {
        if self.closed_here.swap(true, Ordering::AcqRel) {
            return;
        }
        // Best effort: a peer that is gone or does not read learns it from the shutdown.
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = rustix::net::send(&self.stream, &encode_goodbye(), flags);
        let _ = rustix::net::shutdown(&self.stream, Shutdown::Both);
    }

    fn hung_up(&self) -> bool {
        let mut fds = [rustix::event::PollFd::new(&self.stream, rustix::event::PollFlags::RDHUP)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(rustix::event::poll(&mut fds, Some(&now)), Ok(1..))
    }
}

impl AsFd for Liveness {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
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

/// Moves a descriptor to a high number: the kernel closes a dying process's files last to first, and a
/// GPU driver's take tens of milliseconds, which the peer would wait for.
fn move_high(low: OwnedFd) -> OwnedFd {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let limit = limit.unwrap_or(u64::MAX).min(1 << 20) as i32;
    for start in [HIGH_FD, limit / 4 * 3, limit / 2] {
        if start < limit
            && let Ok(high) = rustix::io::fcntl_dupfd_cloexec(&low, start)
        {
            return high;
        }
    }
    low
}

const HIGH_FD: i32 = 700;
