//! An HTTP/1 listener for ports that untrusted clients can reach, with limits on connections, head sizes
//! and waits. The control plane and the expert servers share it. It knows no routes.
//!
//! A peer cannot delay the accept loop or another connection. The listener closes connections whose
//! request head is not complete before a timeout, and connections whose peer does not read the response.
//! At the limit of connections, it evicts the oldest connection that has not sent a request yet.

use std::collections::BTreeMap;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

// Types of other crates in the signatures of this one.
pub use axum::Router;
pub use prometheus;
pub use tokio::net::TcpListener;
pub use tokio::sync::watch;

use hyper::body::Incoming;
use hyper::service::Service;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use prometheus::{IntCounterVec, IntGauge, Opts};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, Sleep};
use tracing::{debug, warn};

/// Limits of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most connections at a time. The process's limit on open files can lower it. Default: 1024.
    pub max_connections: usize,
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
            max_head_bytes: 16 << 10,
            max_headers: 64,
            head_timeout: Duration::from_secs(5),
            write_timeout: Duration::from_secs(8),
            shutdown_timeout: Duration::from_secs(2),
        }
    }
}

/// Metrics of a listener. The caller registers them.
#[derive(Clone, Debug)]
pub struct Metrics {
    /// Open connections.
    pub connections: IntGauge,
    /// Connections closed by the listener, by `reason`: `refused`, `silent` or `crowded`.
    pub culled: IntCounterVec,
}

impl Metrics {
    /// Metrics named `{prefix}_connections` and `{prefix}_connections_culled_total`, with every reason
    /// present from the start.
    ///
    /// # Errors
    /// [`prometheus::Error`] when `prefix` is not a valid metric name.
    pub fn new(prefix: &str) -> Result<Self, prometheus::Error> {
        let connections = IntGauge::new(format!("{prefix}_connections"), "Open HTTP connections.")?;
        let culled = IntCounterVec::new(
            Opts::new(
                format!("{prefix}_connections_culled_total"),
                "HTTP connections closed by the server, by reason: refused (limit reached), silent (no complete request in time), crowded (replaced by a new connection).",
            ),
            &["reason"],
        )?;
        for reason in ["refused", "silent", "crowded"] {
            culled.with_label_values(&[reason]);
        }
        Ok(Self { connections, culled })
    }
}

/// Serves connections until `shutdown` turns true. Then waits up to [`Limits::shutdown_timeout`] for open
/// requests.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    limits: Limits,
    metrics: Metrics,
    mut shutdown: watch::Receiver<bool>,
) {
    let permits = Arc::new(Semaphore::new(connection_limit(limits.max_connections)));
    let pending = Arc::new(PendingConnections::default());
    let mut connections = JoinSet::new();
    let mut serial = 0u64;
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next() => continue,
            () = stopped(&mut shutdown) => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(err) if is_connection_error(&err) => continue,
            Err(err) => {
                // Out of file descriptors or memory. Close a connection and retry.
                warn!(error = %err, "cannot accept connections");
                pending.evict_oldest(&metrics);
                tokio::time::sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        let Some(permit) = acquire_permit(&permits, &pending, &metrics).await else {
            metrics.culled.with_label_values(&["refused"]).inc();
            continue;
        };
        serial += 1;
        let connection = Connection {
            serial,
            router: router.clone(),
            limits,
            pending: Arc::clone(&pending),
            open: OpenConnection::new(metrics.connections.clone(), permit),
            shutdown: shutdown.clone(),
            metrics: metrics.clone(),
        };
        // Inserted under the lock, so that the task's first request finds the entry and removes it.
        let mut waiting = pending.lock();
        let task = connections.spawn(connection.run(stream));
        waiting.insert(serial, task);
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
    serial: u64,
    router: Router,
    limits: Limits,
    pending: Arc<PendingConnections>,
    open: OpenConnection,
    shutdown: watch::Receiver<bool>,
    metrics: Metrics,
}

impl Connection {
    async fn run(mut self, stream: TcpStream) {
        let _open = self.open;
        // TCP_USER_TIMEOUT detects a peer that is gone: it does not acknowledge data or keep-alives.
        let _ = stream.set_nodelay(true);
        let _ = rustix::net::sockopt::set_tcp_user_timeout(
            &stream,
            self.limits.write_timeout.as_millis() as u32,
        );
        let service = TrackFirstRequest {
            inner: TowerToHyperService::new(self.router),
            serial: self.serial,
            pending: Arc::clone(&self.pending),
        };
        let io = TokioIo::new(WriteTimeout::new(stream, self.limits.write_timeout));
        let mut builder = hyper::server::conn::http1::Builder::new();
        builder
            .timer(TokioTimer::new())
            .header_read_timeout(self.limits.head_timeout)
            .max_headers(self.limits.max_headers)
            .max_buf_size(self.limits.max_head_bytes.max(MIN_HEAD_BYTES));
        let mut connection = std::pin::pin!(builder.serve_connection(io, service));
        let result = tokio::select! {
            result = connection.as_mut() => result,
            () = stopped(&mut self.shutdown) => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        self.pending.mark_active(self.serial);
        if let Err(err) = result {
            if err.is_timeout() {
                self.metrics.culled.with_label_values(&["silent"]).inc();
            }
            debug!(error = %err, "connection ended");
        }
    }
}

/// Connections without a complete request so far, oldest first.
#[derive(Debug, Default)]
struct PendingConnections {
    waiting: Mutex<BTreeMap<u64, AbortHandle>>,
}

impl PendingConnections {
    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<u64, AbortHandle>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mark_active(&self, serial: u64) {
        self.lock().remove(&serial);
    }

    /// Closes the oldest pending connection. Returns false if there is none.
    fn evict_oldest(&self, metrics: &Metrics) -> bool {
        let Some((_, task)) = self.lock().pop_first() else { return false };
        task.abort();
        metrics.culled.with_label_values(&["crowded"]).inc();
        true
    }
}

/// Gets a permit for one more connection. At the limit, evicts the oldest pending connection; returns
/// `None` if there is none.
async fn acquire_permit(
    permits: &Arc<Semaphore>,
    pending: &PendingConnections,
    metrics: &Metrics,
) -> Option<OwnedSemaphorePermit> {
    if let Ok(permit) = Arc::clone(permits).try_acquire_owned() {
        return Some(permit);
    }
    if !pending.evict_oldest(metrics) {
        return None;
    }
    let permit = Arc::clone(permits).acquire_owned();
    tokio::time::timeout(EVICTION_TIMEOUT, permit).await.ok()?.ok()
}

/// A service that marks its connection as active at the first request.
struct TrackFirstRequest<S> {
    inner: S,
    serial: u64,
    pending: Arc<PendingConnections>,
}

impl<S: Service<hyper::Request<Incoming>>> Service<hyper::Request<Incoming>>
    for TrackFirstRequest<S>
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn call(&self, request: hyper::Request<Incoming>) -> S::Future {
        self.pending.mark_active(self.serial);
        self.inner.call(request)
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

/// A stream whose writes fail after `timeout` without progress.
struct WriteTimeout<IO> {
    io: IO,
    timeout: Duration,
    /// Runs while a write is blocked.
    timer: Pin<Box<Sleep>>,
    is_blocked: bool,
}

impl<IO> WriteTimeout<IO> {
    fn new(io: IO, timeout: Duration) -> Self {
        Self { io, timeout, timer: Box::pin(tokio::time::sleep(timeout)), is_blocked: false }
    }

    fn watch<T>(
        &mut self,
        cx: &mut Context<'_>,
        outcome: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if outcome.is_ready() {
            self.is_blocked = false;
            return outcome;
        }
        if !self.is_blocked {
            self.is_blocked = true;
            self.timer.as_mut().reset(Instant::now() + self.timeout);
        }
        match self.timer.as_mut().poll(cx) {
            Poll::Ready(()) => {
                Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the peer does not read")))
            }
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for WriteTimeout<IO> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for WriteTimeout<IO> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.io).poll_write(cx, buf);
        self.watch(cx, outcome)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.io).poll_write_vectored(cx, bufs);
        self.watch(cx, outcome)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.io).poll_flush(cx);
        self.watch(cx, outcome)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

/// Most connections under the process's limit on open files.
fn connection_limit(wanted: usize) -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let free = limit.map_or(usize::MAX, |limit| limit as usize).saturating_sub(RESERVED_FILES);
    wanted.min(free).max(1)
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
const EVICTION_TIMEOUT: Duration = Duration::from_secs(1);
/// Descriptors kept for the store, the runtime and the standard streams.
const RESERVED_FILES: usize = 64;
/// Smallest buffer that hyper accepts.
const MIN_HEAD_BYTES: usize = 8192;
