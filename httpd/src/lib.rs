//! An HTTP/1 listener for ports that untrusted clients can reach, with limits on connections, head sizes
//! and waits. The control plane and the expert servers share it. It knows no routes.
//!
//! With certificates ([`trust::tls::Tls`]) the listener speaks HTTPS only. It puts the [`trust::Identity`] of a
//! client's certificate into the extensions of each request, and [`PeerAddr`] in any case. A connection ends with its
//! client's certificate: when that expires, or when changed files no longer accept it. An open request is answered
//! before, and a stream of events ends.
//!
//! A peer cannot delay the accept loop or another connection. The listener closes connections whose
//! request head is not complete before a timeout, and connections whose peer reads the response too slowly.
//! At the limit of connections, a stranger of the address with the most strangers gives way to a newcomer. A
//! connection is a stranger's until its client shows a certificate or the application calls [`Standing::recognise`].
//! At their own limit, the known connection that has been idle longest gives way: no request is open on it. If one
//! identity has more than half of the known connections, one of its own gives way instead.

mod metrics;
mod places;
mod rates;
mod request;
mod site;
mod stream;
mod tls_metrics;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

// Types of other crates in the signatures of this one.
pub use axum::Router;
pub use prometheus;
pub use tokio::net::TcpListener;
pub use tokio::sync::watch;
pub use trust;

pub use metrics::Metrics;
pub use places::Standing;
pub use rates::{Rates, limit_rates};
pub use site::site;
pub use tls_metrics::{
    TLS_CERTIFICATE_EXPIRY, TLS_FILES_UNUSABLE, TLS_RELOADS_TOTAL, register_tls_metrics,
};

use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use prometheus::IntGauge;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::{debug, warn};
use trust::log_limit::LogLimit;
use trust::tls::{PeerCertificate, Tls};

use places::{EndOfConnection, Place, Places};
use request::TrackRequests;
use stream::{Stream, WritePace, WriteTimeout};

/// Limits of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most connections at a time. `file_share` can lower it. Default: 1024.
    pub max_connections: usize,
    /// Share of the process's limit on open files that connections may hold, in per cent. Default: 25.
    pub file_share: u8,
    /// Most bytes in a request's head. Default: 16 KiB.
    pub max_head_bytes: usize,
    /// Most headers in a request. Default: 64.
    pub max_headers: usize,
    /// Timeout for a complete head, from the start of the connection or the previous response. Default: 5 s.
    pub head_timeout: Duration,
    /// Longest time for which writes wait for a peer that reads nothing of a response. Default: 8 s.
    pub write_timeout: Duration,
    /// Bytes a second that a peer must read while writes wait for it: each byte gives back its part of
    /// `write_timeout`. Default: 32 KiB.
    pub min_write_rate: u32,
    /// Longest wait for open requests at shutdown. Default: 2 s.
    pub shutdown_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_connections: 1024,
            file_share: 25,
            max_head_bytes: 16 << 10,
            max_headers: 64,
            head_timeout: Duration::from_secs(5),
            write_timeout: Duration::from_secs(8),
            min_write_rate: 32 << 10,
            shutdown_timeout: Duration::from_secs(2),
        }
    }
}

impl Limits {
    /// Most connections under the process's limit on open files, at least 1.
    pub fn num_places(&self) -> usize {
        let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let free = files.unwrap_or(u64::MAX).saturating_sub(RESERVED_FILES);
        let share = u128::from(free) * u128::from(self.file_share.min(100)) / 100;
        self.max_connections.min(usize::try_from(share).unwrap_or(usize::MAX)).max(1)
    }
}

/// Address of the client, in the extensions of every request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerAddr(pub SocketAddr);

/// Serves connections until `shutdown` turns true, over HTTPS if `tls` has a certificate. Then waits up to
/// [`Limits::shutdown_timeout`] for open requests.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    tls: Option<Tls>,
    limits: Limits,
    metrics: Metrics,
    mut shutdown: watch::Receiver<bool>,
) {
    let places = Places::new(limits.num_places(), metrics.clone());
    let mut connections = JoinSet::new();
    let mut warned: Option<Instant> = None;
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next() => continue,
            () = stopped(&mut shutdown) => break,
        };
        let (stream, addr) = match accepted {
            Ok(accepted) => accepted,
            Err(err) if is_connection_error(&err) => continue,
            Err(err) => {
                // Out of file descriptors or memory. Close a connection and retry.
                if warned.is_none_or(|at| at.elapsed() >= WARNING_INTERVAL) {
                    warned = Some(Instant::now());
                    warn!(error = %err, "cannot accept connections");
                }
                places.evict();
                tokio::time::sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        let Some(permit) = places.acquire().await else {
            metrics.culled.with_label_values(&["refused"]).inc();
            continue;
        };
        places.insert(site(addr.ip()), |place| {
            let connection = Connection {
                place,
                router: router.clone(),
                tls: tls.clone(),
                addr,
                limits,
                open: OpenConnection::new(metrics.connections.clone(), permit),
                shutdown: shutdown.clone(),
                metrics: metrics.clone(),
            };
            connections.spawn(connection.run(stream))
        });
    }
    drop(listener);
    let finish = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(limits.shutdown_timeout, finish).await.is_err() {
        debug!("closing connections with open requests after the shutdown timeout");
    }
}

/// Completes when the server shuts down or was dropped.
pub async fn stopped(shutdown: &mut watch::Receiver<bool>) {
    let _ = shutdown.wait_for(|&down| down).await;
}

/// One connection and its state.
struct Connection {
    place: Arc<Place>,
    router: Router,
    tls: Option<Tls>,
    addr: SocketAddr,
    limits: Limits,
    open: OpenConnection,
    shutdown: watch::Receiver<bool>,
    metrics: Metrics,
}

impl Connection {
    async fn run(mut self, stream: TcpStream) {
        // Each way out takes the connection out of the table.
        let end = EndOfConnection(Arc::clone(&self.place));
        // TCP_USER_TIMEOUT detects a peer that is gone: it does not acknowledge data or keep-alives.
        let _ = stream.set_nodelay(true);
        let _ = rustix::net::sockopt::set_tcp_user_timeout(
            &stream,
            self.limits.write_timeout.as_millis() as u32,
        );
        // The time for the first head begins here, and the TLS handshake is part of it.
        let mut shutdown = self.shutdown.clone();
        let secured = tokio::time::timeout(self.limits.head_timeout, self.secure(stream));
        let secured = tokio::select! {
            secured = secured => secured,
            () = stopped(&mut shutdown) => return,
        };
        let (stream, certificate) = match secured {
            Ok(Some(secured)) => secured,
            Ok(None) => return,
            Err(_) => return self.metrics.culled.with_label_values(&["silent"]).inc(),
        };
        if let Some(identity) = certificate.as_ref().and_then(PeerCertificate::identity) {
            self.place.recognise(Some(&identity.name), false);
        }
        let _open = self.open;
        let service = TrackRequests {
            inner: TowerToHyperService::new(self.router),
            place: Arc::clone(&self.place),
            addr: PeerAddr(self.addr),
            certificate: certificate.clone(),
        };
        let is_blocked = Arc::clone(&self.place.is_blocked);
        let pace = WritePace::new(self.limits.write_timeout, self.limits.min_write_rate);
        let slow = self.metrics.culled.with_label_values(&["slow"]);
        let io = TokioIo::new(WriteTimeout::new(stream, pace, is_blocked, slow));
        let mut builder = hyper::server::conn::http1::Builder::new();
        builder
            .timer(TokioTimer::new())
            .header_read_timeout(self.limits.head_timeout)
            .max_headers(self.limits.max_headers)
            .max_buf_size(self.limits.max_head_bytes.max(MIN_HEAD_BYTES));
        let mut connection = std::pin::pin!(builder.serve_connection(io, service));
        // Dropped before the connection, whose last response must not make it idle again.
        let _end = end;
        let mut ended = std::pin::pin!(async {
            match &certificate {
                Some(certificate) => certificate.ended().await,
                None => std::future::pending().await,
            }
        });
        let result = tokio::select! {
            result = connection.as_mut() => result,
            () = stopped(&mut self.shutdown) => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
            () = &mut ended => {
                debug!(addr = %self.addr, "the client's certificate is no longer accepted");
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(err) = result {
            if err.is_timeout() {
                self.metrics.culled.with_label_values(&["silent"]).inc();
            }
            debug!(error = %err, "connection ended");
        }
    }
}

impl Connection {
    /// Carries out the TLS handshake if the listener has a certificate. `None` ends the connection: the peer speaks
    /// something else, or its certificate is refused.
    async fn secure(&self, mut stream: TcpStream) -> Option<(Stream, Option<PeerCertificate>)> {
        let mut first = [0];
        if !matches!(stream.peek(&mut first).await, Ok(1)) {
            return None;
        }
        let speaks_tls = first[0] == TLS_HANDSHAKE;
        match &self.tls {
            None if speaks_tls => {
                let reason = "the client speaks TLS, and this port has no certificate";
                self.refuse(
                    reason,
                    "start this process with --tls DIR, or use http:// in the client's URL",
                );
                say_goodbye(&mut stream, TLS_REFUSAL).await;
                None
            }
            None => Some((Stream::Plain(stream), None)),
            Some(_) if !speaks_tls => {
                self.refuse(
                    "the client speaks plain HTTP to a port for HTTPS",
                    "use https:// in its URL, and --tls DIR",
                );
                say_goodbye(&mut stream, PLAIN_REFUSAL).await;
                None
            }
            Some(tls) => match tls.accept(stream).await {
                Ok(stream) => {
                    let certificate = tls.peer_certificate(&stream);
                    Some((Stream::Tls(Box::new(stream)), certificate))
                }
                Err(error) => {
                    self.metrics.tls_failures.inc();
                    if error.is_broken {
                        debug!(addr = %self.addr, %error, "a TLS handshake broke");
                    } else if let Some(num_suppressed) = TLS_LOG.allow() {
                        warn!(addr = %self.addr, %error, num_suppressed, "a TLS handshake failed");
                    }
                    None
                }
            },
        }
    }

    fn refuse(&self, reason: &str, remedy: &str) {
        self.metrics.tls_failures.inc();
        if let Some(num_suppressed) = TLS_LOG.allow() {
            warn!(addr = %self.addr, remedy, num_suppressed, "{reason}");
        }
    }
}

/// Counts a connection while it is open.
struct OpenConnection {
    gauge: IntGauge,
    _permit: OwnedSemaphorePermit,
}

impl OpenConnection {
    fn new(gauge: IntGauge, permit: OwnedSemaphorePermit) -> Self {
        gauge.inc();
        Self { gauge, _permit: permit }
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.gauge.dec();
    }
}

/// Sends an answer before the end of a connection. A reset, which unread input causes, could overtake it, so the input
/// is read for a moment.
async fn say_goodbye(stream: &mut TcpStream, answer: &[u8]) {
    let farewell = async {
        stream.write_all(answer).await?;
        stream.shutdown().await?;
        let mut sink = [0; 1024];
        while stream.read(&mut sink).await? > 0 {}
        io::Result::Ok(())
    };
    let _ = tokio::time::timeout(FAREWELL, farewell).await;
}

/// Returns true for errors of the accepted connection only.
fn is_connection_error(err: &io::Error) -> bool {
    matches!(
        err.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::Interrupted
    )
}

const ACCEPT_RETRY: Duration = Duration::from_millis(20);
/// Shortest time between two warnings of one kind.
const WARNING_INTERVAL: Duration = Duration::from_secs(10);
/// First byte of a TLS handshake, see RFC 8446, section 5.1.
const TLS_HANDSHAKE: u8 = 22;
const PLAIN_REFUSAL: &[u8] = b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\n\
    content-length: 90\r\n\r\nThis port speaks HTTPS: use https:// in the URL and give the client --tls DIR, or ca.pem.\n";
/// A TLS client takes the text for what it is: no TLS.
const TLS_REFUSAL: &[u8] =
    b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
const FAREWELL: Duration = Duration::from_millis(300);
/// Peers can cause these lines as often as they like.
static TLS_LOG: LogLimit = LogLimit::new();
/// Descriptors kept for the store, the runtime and the standard streams.
const RESERVED_FILES: u64 = 64;
/// Smallest buffer that hyper accepts.
const MIN_HEAD_BYTES: usize = 8192;
