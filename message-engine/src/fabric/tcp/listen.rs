//! Accepts data connections, and limits the number without a hello.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::net::sockopt;

use super::serve::Server;
use super::stream::Stream;
use super::{LISTENER, SERVER, TcpFabric};

impl TcpFabric {
    /// Accepts connections that wait at the listener.
    pub(super) fn accept(&mut self) {
        for _ in 0..64 {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => Some(stream),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                Err(error) => {
                    // Most likely the process has no descriptors left. A retry at once would fail again.
                    let now = Instant::now();
                    self.listener_paused_until = Some(now + LISTENER_PAUSE);
                    let removed = epoll::delete(&self.set, &self.listener);
                    if let Some(num_failures) = self.listening.failed(now) {
                        tracing::error!(
                            %error, num_failures, ?removed, "cannot accept data connections; {HINT}"
                        );
                    }
                    return;
                }
            };
            if let Some(num_failures) = self.listening.worked() {
                tracing::info!(num_failures, "data connections are accepted again");
            }
            let Some(stream) = stream else { return };
            // Every open peer may be about to connect.
            if self.num_unidentified >= MAX_UNIDENTIFIED + self.by_nonce.len() {
                if let Some(num_dropped) = self.overload.failed(Instant::now()) {
                    let what = "too many data connections without a hello";
                    tracing::warn!(num_dropped, "{what}: the oldest are closed");
                }
                self.drop_oldest_unidentified();
            }
            let idx = self.free_servers.pop().unwrap_or_else(|| {
                self.servers.push(None);
                self.servers.len() - 1
            });
            let data = (idx as u64) << 1 | SERVER;
            let fd = OwnedFd::from(stream);
            let stream = self
                .watch(&fd)
                .and_then(|()| Stream::new(fd, self.set.as_fd(), data, epoll::EventFlags::IN));
            match stream {
                Ok(stream) => {
                    self.servers[idx] = Some(Server::new(stream));
                    self.num_unidentified += 1;
                    self.advance_server(idx);
                }
                Err(error) => {
                    tracing::error!(%error, "cannot serve a data connection");
                    self.free_servers.push(idx);
                }
            }
        }
    }

    /// Listens again after a pause.
    pub(super) fn resume_listener(&mut self) {
        if self.listener_paused_until.is_none_or(|until| Instant::now() < until) {
            return;
        }
        let (data, interest) = (epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN);
        match epoll::add(&self.set, &self.listener, data, interest) {
            // The listener may still be in the set.
            Ok(()) | Err(rustix::io::Errno::EXIST) => self.listener_paused_until = None,
            Err(error) => {
                let now = Instant::now();
                if let Some(num_failures) = self.listening.failed(now) {
                    tracing::error!(%error, num_failures, "cannot listen for data connections; {HINT}");
                }
                self.listener_paused_until = Some(now + LISTENER_PAUSE);
            }
        }
    }

    /// Sets the options by which the system detects that the other host is gone.
    pub(super) fn watch(&self, fd: &OwnedFd) -> io::Result<()> {
        let timeout = self.config.timeout.clamp(Duration::from_secs(1), Duration::from_secs(3600));
        let probe = Duration::from_secs((timeout.as_secs() / 4).max(1));
        rustix::io::ioctl_fionbio(fd, true)?;
        sockopt::set_socket_keepalive(fd, true)?;
        sockopt::set_tcp_keepidle(fd, probe)?;
        sockopt::set_tcp_keepintvl(fd, probe)?;
        sockopt::set_tcp_keepcnt(fd, 3)?;
        sockopt::set_tcp_user_timeout(fd, timeout.as_millis() as u32)?;
        Ok(())
    }

    /// Closes connections that have not sent a hello within `timeout`.
    pub(super) fn drop_unidentified(&mut self, timeout: Duration) {
        self.last_hello_check = Instant::now();
        for idx in 0..self.servers.len() {
            let is_late = self.servers[idx]
                .as_ref()
                .is_some_and(|server| server.peer.is_none() && server.since.elapsed() >= timeout);
            if is_late {
                self.drop_server(idx);
            }
        }
    }

    /// Closes the oldest connection that has not sent a hello.
    fn drop_oldest_unidentified(&mut self) {
        let unidentified = |(idx, server): (usize, &Option<Server>)| match server {
            Some(server) if server.peer.is_none() => Some((server.since, idx)),
            _ => None,
        };
        if let Some((_, idx)) = self.servers.iter().enumerate().filter_map(unidentified).min() {
            self.drop_server(idx);
        }
    }
}

/// Most connections without a hello, in addition to one for each open peer.
pub(super) const MAX_UNIDENTIFIED: usize = 256;
/// Time limit for a connection's hello.
pub(super) const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause of a listener after a failure.
pub(super) const LISTENER_PAUSE: Duration = Duration::from_millis(100);
const HINT: &str = "the fabric retries every 100 ms; raise the limit on open files (`ulimit -n`) if that \
                    is what is missing";
