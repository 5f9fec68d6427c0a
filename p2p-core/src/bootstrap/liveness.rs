//! The bootstrap connection after the handshake. The peer counts as alive as long as the connection
//! stands.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::net::sockopt;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::close::CloseReason;
use super::sentry::SentrySocket;
use super::share::PeerPlace;
use super::stream::Stream;

/// Watches one peer. Dropping it closes the connection soon afterwards, on another thread, and the
/// peer sees that this side is gone.
#[derive(Debug)]
pub struct Liveness {
    /// Its event wakes tasks of the runtime.
    socket: AsyncFd<SentrySocket>,
    _permit: Option<PeerPlace>,
}

impl Liveness {
    /// Takes over the connection after the handshake. Waits until another thread has taken it:
    /// microseconds if a processor is free, tens of seconds at most.
    pub(super) fn new(stream: Stream, timeout: Duration) -> io::Result<Self> {
        let (tcp, goodbyes) = stream.into_parts()?;
        let socket = OwnedFd::from(tcp.into_std()?);
        watch_half_open(&socket, timeout)?;
        let socket = SentrySocket::new(socket, goodbyes)?;
        // SAFETY: the socket owns the event that it names, and names no other as long as it lives.
        let socket = unsafe { AsyncFd::register_with_interest(socket, Interest::READABLE)? };
        Ok(Self { socket, _permit: None })
    }

    /// Counts the peer as connected as long as this lives.
    pub(super) fn holding(self, permit: PeerPlace) -> Self {
        Self { _permit: Some(permit), ..self }
    }

    /// Waits until the connection ends, and returns the reason. Any number of tasks may wait.
    /// Dropping the future has no effect.
    pub async fn closed(&self) -> CloseReason {
        let waited = self
            .socket
            .async_io(Interest::READABLE, |socket| {
                socket.reason().ok_or_else(|| io::ErrorKind::WouldBlock.into())
            })
            .await;
        // The runtime returns an error only when it shuts down itself.
        waited.unwrap_or(CloseReason::Local)
    }

    /// Returns why the connection ended, or `None` while it stands. Reads one word.
    ///
    /// Threads without a runtime can use it too: they put [`as_fd`](AsFd::as_fd) into their
    /// [`WaitSet`](crate::wait::WaitSet) and call this when it fires.
    #[must_use]
    pub fn closed_now(&self) -> Option<CloseReason> {
        self.socket.get_ref().reason()
    }

    /// As [`closed_now`](Self::closed_now), but an end that this host's kernel knows of before the
    /// call is not missed. Blocks until a thread has looked at the connection: microseconds if a
    /// processor is free, `limit` at most.
    #[must_use]
    pub fn look(&self, limit: Duration) -> Option<CloseReason> {
        self.socket.get_ref().look(limit)
    }

    /// Sends a goodbye and closes the connection. Both are done before this returns, unless no
    /// processor is free for that within a second. The peer sees [`CloseReason::Left`].
    pub fn close(&self) {
        self.socket.get_ref().close();
    }
}

impl AsFd for Liveness {
    /// Becomes readable when the connection ends, also for edge-triggered waiters. A caller that
    /// adds it to a [`WaitSet`](crate::wait::WaitSet) must remove it: this is not the only copy of
    /// the descriptor.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.get_ref().as_fd()
    }
}

/// Lets the kernel notice a host that vanished, whether or not data is under way.
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
