//! The byte stream of a connection: plain or TLS, with a least rate of reading.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use prometheus::IntCounter;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};
use trust::tls::TlsStream;

/// A connection's stream.
#[derive(Debug)]
pub(crate) enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

macro_rules! each {
    ($self:ident, $stream:ident => $call:expr) => {
        match $self.get_mut() {
            Self::Plain($stream) => $call,
            Self::Tls($stream) => $call,
        }
    };
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        each!(self, stream => Pin::new(stream).poll_read(cx, buf))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        each!(self, stream => Pin::new(stream).poll_write(cx, buf))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        each!(self, stream => Pin::new(stream).poll_write_vectored(cx, bufs))
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        each!(self, stream => Pin::new(stream).poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        each!(self, stream => Pin::new(stream).poll_shutdown(cx))
    }
}

/// The time that a peer has left for reading. It runs while a write waits, and each byte gives some of it back.
#[derive(Debug)]
pub(crate) struct WritePace {
    most: Duration,
    per_byte: Duration,
    left: Duration,
    /// Begin of the present wait.
    waits_since: Option<Instant>,
}

impl WritePace {
    /// A peer may read nothing for `timeout`, and at least `min_rate` bytes a second on average.
    pub(crate) fn new(timeout: Duration, min_rate: u32) -> Self {
        let per_byte = Duration::from_secs(1) / min_rate.max(1);
        Self { most: timeout, per_byte, left: timeout, waits_since: None }
    }

    /// Notes that a write waits. Returns the deadline if it did not wait before.
    fn wait(&mut self, now: Instant) -> Option<Instant> {
        if self.waits_since.is_some() {
            return None;
        }
        self.waits_since = Some(now);
        Some(now + self.left)
    }

    /// Notes that the peer took `num_bytes`.
    fn progress(&mut self, now: Instant, num_bytes: usize) {
        if let Some(since) = self.waits_since.take() {
            self.left = self.left.saturating_sub(now - since);
        }
        let given = self.per_byte.saturating_mul(u32::try_from(num_bytes).unwrap_or(u32::MAX));
        self.left = self.left.saturating_add(given).min(self.most);
    }
}

/// A stream whose writes fail if the peer reads too slowly: see [`WritePace`].
pub(crate) struct WriteTimeout<IO> {
    io: IO,
    pace: WritePace,
    /// Runs while a write waits.
    timer: Pin<Box<Sleep>>,
    is_blocked: Arc<AtomicBool>,
    /// Counts the failure.
    slow: IntCounter,
}

impl<IO> WriteTimeout<IO> {
    pub(crate) fn new(
        io: IO,
        pace: WritePace,
        is_blocked: Arc<AtomicBool>,
        slow: IntCounter,
    ) -> Self {
        let timer = Box::pin(tokio::time::sleep(pace.most));
        Self { io, pace, timer, is_blocked, slow }
    }

    /// Passes on the outcome of a write, unless the peer has no time left. `num_bytes` is what the peer took.
    fn watch<T>(
        &mut self,
        cx: &mut Context<'_>,
        outcome: Poll<io::Result<T>>,
        num_bytes: impl FnOnce(&T) -> usize,
    ) -> Poll<io::Result<T>> {
        if let Poll::Ready(outcome) = outcome {
            self.is_blocked.store(false, Ordering::Relaxed);
            self.pace.progress(Instant::now(), outcome.as_ref().map_or(0, num_bytes));
            return Poll::Ready(outcome);
        }
        self.is_blocked.store(true, Ordering::Relaxed);
        if let Some(deadline) = self.pace.wait(Instant::now()) {
            self.timer.as_mut().reset(deadline);
        }
        match self.timer.as_mut().poll(cx) {
            Poll::Ready(()) => {
                self.slow.inc();
                let reason = "the peer reads too slowly";
                Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, reason)))
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
        self.watch(cx, outcome, |written| *written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.io).poll_write_vectored(cx, bufs);
        self.watch(cx, outcome, |written| *written)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.io).poll_flush(cx);
        self.watch(cx, outcome, |()| 0)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // The end of TLS is a message, too.
        let outcome = Pin::new(&mut self.io).poll_shutdown(cx);
        self.watch(cx, outcome, |()| 0)
    }
}
