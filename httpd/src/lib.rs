//! An HTTP/1 listener for ports that untrusted clients can reach, with limits on connections, head sizes
//! and waits. The control plane and the expert servers share it. It knows no routes.
//!
//! With certificates ([`trust::tls::Tls`]) the listener speaks HTTPS only. It puts the [`trust::Identity`] of a
//! client's certificate into the extensions of each request, and [`PeerAddr`] in any case.
//!
//! A peer cannot delay the accept loop or another connection. The listener closes connections whose
//! request head is not complete before a timeout, and connections whose peer does not read the response.
//! At the limit of connections, it evicts the connection that has been idle longest: no request is open on
//! it.

mod metrics;
mod stream;
mod tls_metrics;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

// Types of other crates in the signatures of this one.
pub use axum::Router;
pub use prometheus;
pub use tokio::net::TcpListener;
pub use tokio::sync::watch;
pub use trust;

pub use metrics::Metrics;
pub use tls_metrics::{
    TLS_CERTIFICATE_EXPIRY, TLS_FILES_UNUSABLE, TLS_RELOADS_TOTAL, register_tls_metrics,
};

use axum::body::{Body, HttpBody};
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::service::Service;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use prometheus::IntGauge;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;
use tracing::{debug, warn};
use trust::Identity;
use trust::log_limit::LogLimit;
use trust::tls::{Tls, peer_identity};

use stream::{Stream, WriteTimeout};

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
    /// Timeout of a write: the longest time in which a peer reads nothing of a response. Default: 8 s.
    pub write_timeout: Duration,
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
            shutdown_timeout: Duration::from_secs(2),
        }
    }
}

/// Address of the client, in the extensions of every request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerAddr(pub SocketAddr);

/// Serves connections until `shutdown` turns true, over HTTPS if `tls` has a certificate. Then waits up to [`Limits::shutdown_timeout`] for open
/// requests.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    tls: Option<Tls>,
    limits: Limits,
    metrics: Metrics,
    mut shutdown: watch::Receiver<bool>,
) {
    let permits = Arc::new(Semaphore::new(connection_limit(&limits)));
    let idle = Arc::new(IdleConnections::default());
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
                idle.evict_oldest(&metrics);
                tokio::time::sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        let Some(permit) = acquire_permit(&permits, &idle, &metrics).await else {
            metrics.culled.with_label_values(&["refused"]).inc();
            continue;
        };
        let state = Arc::new(ConnectionState::new(&idle));
        let connection = Connection {
            state: Arc::clone(&state),
            router: router.clone(),
            tls: tls.clone(),
            addr,
            limits,
            open: OpenConnection::new(metrics.connections.clone(), permit),
            shutdown: shutdown.clone(),
            metrics: metrics.clone(),
        };
        // Under the lock, so that the task's first request finds the entry and removes it.
        let mut table = idle.lock();
        let task = connections.spawn(connection.run(stream));
        table.insert(&state, task);
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
    state: Arc<ConnectionState>,
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
        let end = EndOfConnection(Arc::clone(&self.state));
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
        let (stream, identity) = match secured {
            Ok(Some(secured)) => secured,
            Ok(None) => return,
            Err(_) => return self.metrics.culled.with_label_values(&["silent"]).inc(),
        };
        let _open = self.open;
        let service = TrackRequests {
            inner: TowerToHyperService::new(self.router),
            state: Arc::clone(&self.state),
            addr: PeerAddr(self.addr),
            identity,
        };
        let is_blocked = Arc::clone(&self.state.is_blocked);
        let io = TokioIo::new(WriteTimeout::new(stream, self.limits.write_timeout, is_blocked));
        let mut builder = hyper::server::conn::http1::Builder::new();
        builder
            .timer(TokioTimer::new())
            .header_read_timeout(self.limits.head_timeout)
            .max_headers(self.limits.max_headers)
            .max_buf_size(self.limits.max_head_bytes.max(MIN_HEAD_BYTES));
        let mut connection = std::pin::pin!(builder.serve_connection(io, service));
        // Dropped before the connection, whose last response must not make it idle again.
        let _end = end;
        let result = tokio::select! {
            result = connection.as_mut() => result,
            () = stopped(&mut self.shutdown) => {
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
    async fn secure(&self, mut stream: TcpStream) -> Option<(Stream, Option<Identity>)> {
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
                    let identity = peer_identity(&stream);
                    Some((Stream::Tls(Box::new(stream)), identity))
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

/// Connections on which no request is open, idle longest first.
#[derive(Debug, Default)]
struct IdleConnections {
    table: Mutex<IdleTable>,
}

#[derive(Debug, Default)]
struct IdleTable {
    next_rank: u64,
    by_rank: BTreeMap<u64, IdleConnection>,
}

#[derive(Debug)]
struct IdleConnection {
    task: AbortHandle,
    is_blocked: Arc<AtomicBool>,
}

impl IdleTable {
    fn insert(&mut self, state: &ConnectionState, task: AbortHandle) {
        self.next_rank += 1;
        let is_blocked = Arc::clone(&state.is_blocked);
        self.by_rank.insert(self.next_rank, IdleConnection { task, is_blocked });
        state.rank.store(self.next_rank, Ordering::Relaxed);
    }
}

impl IdleConnections {
    fn lock(&self) -> MutexGuard<'_, IdleTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes the connection that has been idle longest. Returns false if there is none.
    fn evict_oldest(&self, metrics: &Metrics) -> bool {
        let mut table = self.lock();
        let idle = table.by_rank.iter().find(|(_, idle)| !idle.is_blocked.load(Ordering::Relaxed));
        let Some(rank) = idle.map(|(rank, _)| *rank) else { return false };
        let idle = table.by_rank.remove(&rank);
        drop(table);
        idle.inspect(|idle| idle.task.abort());
        metrics.culled.with_label_values(&["crowded"]).inc();
        true
    }
}

/// A connection's place among the idle ones. HTTP/1 has at most one open request at a time.
#[derive(Debug)]
struct ConnectionState {
    idle: Arc<IdleConnections>,
    /// Key in the table while the connection is idle. Changes under the table's lock only, as the next does.
    rank: AtomicU64,
    has_ended: AtomicBool,
    /// The peer has yet to read a part of the last response.
    is_blocked: Arc<AtomicBool>,
}

/// Takes its connection out of the table for good when dropped.
struct EndOfConnection(Arc<ConnectionState>);

impl Drop for EndOfConnection {
    fn drop(&mut self) {
        let mut table = self.0.idle.lock();
        self.0.has_ended.store(true, Ordering::Relaxed);
        table.by_rank.remove(&self.0.rank.load(Ordering::Relaxed));
    }
}

impl ConnectionState {
    fn new(idle: &Arc<IdleConnections>) -> Self {
        Self {
            idle: Arc::clone(idle),
            rank: AtomicU64::new(0),
            has_ended: AtomicBool::new(false),
            is_blocked: Arc::default(),
        }
    }

    /// Notes that a request is open. Returns the task if the connection was idle until then.
    fn begin(&self) -> Option<AbortHandle> {
        let mut table = self.idle.lock();
        table.by_rank.remove(&self.rank.load(Ordering::Relaxed)).map(|idle| idle.task)
    }

    /// Notes that the response of the open request is complete.
    fn end(&self, task: Option<AbortHandle>) {
        let Some(task) = task else { return };
        let mut table = self.idle.lock();
        if !self.has_ended.load(Ordering::Relaxed) {
            table.insert(self, task);
        }
    }
}

/// Gets a permit for one more connection. At the limit, evicts the connection that has been idle longest;
/// returns `None` if there is none.
async fn acquire_permit(
    permits: &Arc<Semaphore>,
    idle: &IdleConnections,
    metrics: &Metrics,
) -> Option<OwnedSemaphorePermit> {
    if let Ok(permit) = Arc::clone(permits).try_acquire_owned() {
        return Some(permit);
    }
    if !idle.evict_oldest(metrics) {
        return None;
    }
    let permit = Arc::clone(permits).acquire_owned();
    tokio::time::timeout(EVICTION_TIMEOUT, permit).await.ok()?.ok()
}

/// A service that keeps its connection out of the idle ones while a request is open: from its head to the end
/// of the response's body.
struct TrackRequests<S> {
    inner: S,
    state: Arc<ConnectionState>,
    addr: PeerAddr,
    /// From the client's certificate.
    identity: Option<Identity>,
}

impl<S> Service<hyper::Request<Incoming>> for TrackRequests<S>
where
    S: Service<hyper::Request<Incoming>, Response = hyper::Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn call(&self, mut request: hyper::Request<Incoming>) -> Self::Future {
        request.extensions_mut().insert(self.addr);
        if let Some(identity) = &self.identity {
            request.extensions_mut().insert(identity.clone());
        }
        let open = OpenRequest { task: self.state.begin(), state: Arc::clone(&self.state) };
        let response = self.inner.call(request);
        Box::pin(async move {
            let response = response.await?;
            Ok(response.map(|inner| Body::new(TrackedBody { inner, _open: open })))
        })
    }
}

/// A request until its response is complete.
struct OpenRequest {
    task: Option<AbortHandle>,
    state: Arc<ConnectionState>,
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.state.end(self.task.take());
    }
}

/// The body of a response. hyper drops it when all of it is in its buffer or written.
struct TrackedBody {
    inner: Body,
    _open: OpenRequest,
}

impl HttpBody for TrackedBody {
    type Data = <Body as HttpBody>::Data;
    type Error = <Body as HttpBody>::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        Pin::new(&mut self.inner).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
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

/// Most connections under the process's limit on open files.
fn connection_limit(limits: &Limits) -> usize {
    let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let free = files.unwrap_or(u64::MAX).saturating_sub(RESERVED_FILES);
    let share = u128::from(free) * u128::from(limits.file_share.min(100)) / 100;
    limits.max_connections.min(usize::try_from(share).unwrap_or(usize::MAX)).max(1)
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
const EVICTION_TIMEOUT: Duration = Duration::from_secs(1);
/// Descriptors kept for the store, the runtime and the standard streams.
const RESERVED_FILES: u64 = 64;
/// Smallest buffer that hyper accepts.
const MIN_HEAD_BYTES: usize = 8192;
