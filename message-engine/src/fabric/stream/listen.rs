//! Accepts data connections, and limits the number without a hello.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll;

use super::buffered::Stream;
use super::carrier::Carrier;
use super::dial::{Dial, watch};
use super::rings::Rings;
use super::serve::Server;
use super::unix::{self, Name};
use super::wire::{Detail, Place};
use super::{LISTENER, SERVER, StreamFabric, TcpConfig};
use p2p_core::endpoint::TransportKind;
use p2p_core::host::HostIdentity;
use p2p_core::log_limit::LogLimit;
use p2p_core::network::Route;

/// The listener for data connections, and what peers need to reach it.
#[derive(Debug)]
pub(super) enum Listener {
    Tcp { listener: TcpListener, port: u16, config: TcpConfig },
    Shm { listener: UnixListener, name: Name, host: HostIdentity },
}

impl Listener {
    pub(super) fn tcp(config: TcpConfig) -> io::Result<Self> {
        let listener = TcpListener::bind(config.bind)?;
        listener.set_nonblocking(true)?;
        // The standard library's backlog is too short when many peers connect at once. A peer that finds it full
        // retries after a second.
        rustix::net::listen(&listener, BACKLOG)?;
        let port = listener.local_addr()?.port();
        Ok(Self::Tcp { listener, port, config })
    }

    pub(super) fn shm() -> io::Result<Self> {
        let name = rand::random();
        let listener = unix::listen(&name)?;
        // A peer that finds it full cannot join.
        rustix::net::listen(&listener, BACKLOG)?;
        Ok(Self::Shm { listener, name, host: HostIdentity::of_this_process() })
    }

    pub(super) const fn kind(&self) -> TransportKind {
        match self {
            Self::Tcp { .. } => TransportKind::Tcp,
            Self::Shm { .. } => TransportKind::Shm,
        }
    }

    /// The place that a peer connects to, which is reached on `route`.
    pub(super) fn place(&self, route: Route) -> Place {
        match self {
            Self::Shm { name, host, .. } => {
                let (boot_id, net_namespace) = (host.boot_id, host.net_namespace);
                Place::Host { name: *name, boot_id, net_namespace }
            }
            Self::Tcp { port, config, .. } => {
                let ip = match (config.advertise, config.bind.ip()) {
                    (Some(ip), _) => ip,
                    (None, ip) if !ip.is_unspecified() => ip,
                    _ => route.local.to_canonical(),
                };
                Place::Network(SocketAddr::new(ip, *port))
            }
        }
    }

    /// How to connect to a peer's place. The error is the reason why this side cannot.
    pub(super) fn dial(&self, detail: &Detail) -> Result<Dial, String> {
        match (self, detail.place) {
            (Self::Tcp { config, .. }, Place::Network(address)) => {
                Ok(Dial::Tcp { address, timeout: config.timeout })
            }
            (Self::Shm { host, .. }, Place::Host { name, boot_id, net_namespace }) => {
                let peer = HostIdentity { boot_id, net_namespace, process: [0; 2] };
                match host.obstacle_to_sharing(&peer) {
                    Some(obstacle) => Err(obstacle.to_owned()),
                    None => Ok(Dial::Shm(name)),
                }
            }
            _ => Err("the peer describes itself for another transport".to_owned()),
        }
    }

    fn accept(&self) -> io::Result<OwnedFd> {
        match self {
            Self::Tcp { listener, .. } => Ok(listener.accept()?.0.into()),
            Self::Shm { listener, .. } => Ok(listener.accept()?.0.into()),
        }
    }

    /// The end of an accepted connection.
    fn carrier(&self, fd: OwnedFd) -> io::Result<Carrier> {
        match self {
            Self::Tcp { config, .. } => {
                watch(&fd, config.timeout)?;
                Ok(Carrier::Socket(Arc::new(fd)))
            }
            Self::Shm { .. } => {
                unix::check_user(&fd)?;
                rustix::io::ioctl_fionbio(&fd, true)?;
                Ok(Carrier::Rings(Box::new(Rings::accept(Arc::new(fd)))))
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp { listener, .. } => listener.as_fd(),
            Self::Shm { listener, .. } => listener.as_fd(),
        }
    }
}

impl StreamFabric {
    /// Accepts connections that wait at the listener.
    pub(super) fn accept(&mut self) {
        for _ in 0..64 {
            let accepted = match self.listener.accept() {
                Ok(fd) => Some(fd),
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
            let Some(fd) = accepted else { return };
            // Every open peer may be about to connect, once for each kind of its requests.
            if self.num_unidentified >= MAX_UNIDENTIFIED + 2 * self.by_nonce.len() {
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
            let stream = self.listener.carrier(fd).and_then(|carrier| {
                Stream::new(carrier, self.set.as_fd(), data, epoll::EventFlags::IN)
            });
            match stream {
                Ok(stream) => {
                    self.servers[idx] = Some(Server::new(stream));
                    self.num_unidentified += 1;
                    self.advance_server(idx);
                }
                Err(error) => {
                    if let Some(num_suppressed) = SERVE_LOG.allow() {
                        tracing::error!(%error, num_suppressed, "cannot serve a data connection");
                    }
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

/// Strangers can cause this line as often as they like.
static SERVE_LOG: LogLimit = LogLimit::new();

const BACKLOG: i32 = 4096;
/// Most connections without a hello, in addition to two for each open peer.
pub(super) const MAX_UNIDENTIFIED: usize = 256;
/// Time limit for a connection's hello.
pub(super) const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause of a listener after a failure.
pub(super) const LISTENER_PAUSE: Duration = Duration::from_millis(100);
const HINT: &str = "the fabric retries every 100 ms; raise the limit on open files (`ulimit -n`) if that \
                    is what is missing";
