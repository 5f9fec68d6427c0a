//! An HTTP/1 listener for ports that strangers reach: accepted without delay, bounded in number and in
//! patience. Shared by the control plane and the expert servers; knows no routes.
//!
//! Nothing that a peer does or leaves undone holds up the accept loop or another connection.
//! Whoever has not sent a complete head in time, or leaves an answer unread, is closed. When all
//! places are taken the oldest connection that has not sent a request yet gives way.

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

/// How much and how long a listener puts up with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most connections at a time. The process's limit on open files can make it fewer.
    pub max_connections: usize,
    /// Most bytes in a request's head.
    pub max_head_bytes: usize,
    /// Most headers in a request.
    pub max_headers: usize,
    /// Longest wait for a complete head, from the moment of connecting or of the previous answer.
    pub head_timeout: Duration,
    /// Longest time for which a peer may take nothing of an answer.
    pub write_timeout: Duration,
    /// Longest time for open requests to finish at the end.
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

/// What a listener counts. The owner registers them under names of its own.
#[derive(Clone, Debug)]
pub struct Metrics {
    /// Open connections.
    pub connections: IntGauge,
    /// Connections closed by us, by `reason`: `refused`, `silent` or `crowded`.
    pub culled: IntCounterVec,
}

impl Metrics {
    /// Metrics named `{prefix}_connections` and `{prefix}_connections_culled_total`, with every reason
    /// present from the start.
    ///
    /// # Errors
    /// [`prometheus::Error`] when `prefix` is no metric name.
    pub fn new(prefix: &str) -> Result<Self, prometheus::Error> {
        let connections = IntGauge::new(format!("{prefix}_connections"), "Open connections.")?;
        let culled = IntCounterVec::new(
            Opts::new(
                format!("{prefix}_connections_culled_total"),
                "Connections closed because they were silent, stalled or too many.",
            ),
            &["reason"],
        )?;
        for reason in ["refused", "silent", "crowded"] {
            culled.with_label_values(&[reason]);
        }
        Ok(Self { connections, culled })
    }
}

/// Serves connections until `shutdown` turns true, then lets open requests finish for a while.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    limits: Limits,
    metrics: Metrics,
    mut shutdown: watch::Receiver<bool>,
) {
    let places = Arc::new(Semaphore::new(places(limits.max_connections)));
    let newcomers = Arc::new(Newcomers::default());
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
            Err(err) if is_peers_fault(&err) => continue,
            Err(err) => {
                // Out of file descriptors or memory: others must close before it gets better.
                warn!(error = %err, "cannot accept connections");
                newcomers.evict_oldest(&metrics);
                tokio::time::sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        let Some(permit) = take_place(&places, &newcomers, &metrics).await else {
            metrics.culled.with_label_values(&["refused"]).inc();
            continue;
        };
        serial += 1;
        let connection = Connection {
            serial,
            router: router.clone(),
            limits,
            newcomers: Arc::clone(&newcomers),
            open: OpenConnection::new(metrics.connections.clone(), permit),
            shutdown: shutdown.clone(),
            metrics: metrics.clone(),
        };
        // Noted under the lock before the task can run, so that a request takes it out again.
        let mut waiting = newcomers.lock();
        let task = connections.spawn(connection.run(stream));
        waiting.insert(serial, task);
    }
    drop(listener);
    let finish = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(limits.shutdown_timeout, finish).await.is_err() {
        debug!("requests still open at the end of the shutdown are cut off");
    }
}

/// Completes when the server shuts down or is gone.
pub async fn stopped(shutdown: &mut watch::Receiver<bool>) {
    let _ = shutdown.wait_for(|&down| down).await;
}

/// One connection and what it holds.
struct Connection {
    serial: u64,
    router: Router,
    limits: Limits,
    newcomers: Arc<Newcomers>,
    open: OpenConnection,
    shutdown: watch::Receiver<bool>,
    metrics: Metrics,
}

impl Connection {
    async fn run(mut self, stream: TcpStream) {
        let _open = self.open;
        // A peer that vanished without a word is noticed by unacknowledged keep-alives.
        let _ = stream.set_nodelay(true);
        let _ = rustix::net::sockopt::set_tcp_user_timeout(
            &stream,
            self.limits.write_timeout.as_millis() as u32,
        );
        let service = Proving {
            inner: TowerToHyperService::new(self.router),
            serial: self.serial,
            newcomers: Arc::clone(&self.newcomers),
        };
        let io = TokioIo::new(Impatient::new(stream, self.limits.write_timeout));
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
        self.newcomers.prove(self.serial);
        if let Err(err) = result {
            if err.is_timeout() {
                self.metrics.culled.with_label_values(&["silent"]).inc();
            }
            debug!(error = %err, "connection ended");
        }
    }
}

/// Connections that have not sent a complete request yet, oldest first.
#[derive(Debug, Default)]
struct Newcomers {
    waiting: Mutex<BTreeMap<u64, AbortHandle>>,
}

impl Newcomers {
    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<u64, AbortHandle>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn prove(&self, serial: u64) {
        self.lock().remove(&serial);
    }

    /// Closes the connection that has been silent for longest. Gives whether there was one.
    fn evict_oldest(&self, metrics: &Metrics) -> bool {
        let Some((_, task)) = self.lock().pop_first() else { return false };
        task.abort();
        metrics.culled.with_label_values(&["crowded"]).inc();
        true
    }
}

/// A place for one more connection, if need be by closing a silent one.
async fn take_place(
    places: &Arc<Semaphore>,
    newcomers: &Newcomers,
    metrics: &Metrics,
) -> Option<OwnedSemaphorePermit> {
    if let Ok(permit) = Arc::clone(places).try_acquire_owned() {
        return Some(permit);
    }
    if !newcomers.evict_oldest(metrics) {
        return None;
    }
    let place = Arc::clone(places).acquire_owned();
    tokio::time::timeout(EVICTION_TIMEOUT, place).await.ok()?.ok()
}

/// Takes its connection out of the newcomers at the first request.
struct Proving<S> {
    inner: S,
    serial: u64,
    newcomers: Arc<Newcomers>,
}

impl<S: Service<hyper::Request<Incoming>>> Service<hyper::Request<Incoming>> for Proving<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn call(&self, request: hyper::Request<Incoming>) -> S::Future {
        self.newcomers.prove(self.serial);
        self.inner.call(request)
    }
}

/// Counts a connection for as long as it is open.
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

/// A stream that fails when the peer takes nothing for too long.
struct Impatient<IO> {
    io: IO,
    timeout: Duration,
    /// Runs while a write is stuck.
    stuck: Pin<Box<Sleep>>,
    is_stuck: bool,
}

impl<IO> Impatient<IO> {
    fn new(io: IO, timeout: Duration) -> Self {
        Self { io, timeout, stuck: Box::pin(tokio::time::sleep(timeout)), is_stuck: false }
    }

    fn watch<T>(
        &mut self,
        cx: &mut Context<'_>,
        outcome: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if outcome.is_ready() {
            self.is_stuck = false;
            return outcome;
        }
        if !self.is_stuck {
            self.is_stuck = true;
            self.stuck.as_mut().reset(Instant::now() + self.timeout);
        }
        match self.stuck.as_mut().poll(cx) {
            Poll::Ready(()) => {
                Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the peer reads nothing")))
            }
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<IO: AsyncRead + Unpin> AsyncRead for Impatient<IO> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for Impatient<IO> {
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

/// Places that the process's limit on open files leaves.
fn places(wanted: usize) -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let free = limit.map_or(usize::MAX, |limit| limit as usize).saturating_sub(RESERVED_FILES);
    wanted.min(free).max(1)
}

/// Errors that concern the one connection that was being accepted.
fn is_peers_fault(err: &io::Error) -> bool {
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
/// Smallest buffer that hyper takes.
const MIN_HEAD_BYTES: usize = 8192;
