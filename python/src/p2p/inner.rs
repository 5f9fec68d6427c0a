//! The parts of an endpoint while it is open, and how transfers start and end.

use std::collections::HashMap;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use message_engine::{
    Connection, Descriptor, DirectWait, Engine, OpError, Span, SubmitError, Transfer,
};
use pyo3::prelude::*;

use super::error::Failure;
use super::memory::Regions;

/// Parts of an open endpoint.
#[derive(Debug)]
pub(super) struct Inner {
    /// Never dropped in a forked child, which has no thread of the engine.
    pub(super) engine: ManuallyDrop<Engine>,
    pub(super) pid: u32,
    pub(super) connections: Mutex<HashMap<u64, Connection>>,
    pub(super) regions: Mutex<Regions>,
    pub(super) transfers: Mutex<HashMap<u64, Transfer>>,
    pub(super) last_transfer: AtomicU64,
    /// Whether connections are taken without `accept`.
    pub(super) is_passive: AtomicBool,
    /// Whether `close` waits for the calls of other threads to return.
    pub(super) is_closing: AtomicBool,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if is_here(self.pid) {
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.engine) };
        }
    }
}

/// Direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Op {
    Send,
    Recv,
    Write,
    Read,
}

impl Op {
    pub(super) fn of(name: &str) -> Result<Self, Failure> {
        match name {
            "send" => Ok(Self::Send),
            "recv" => Ok(Self::Recv),
            "write" => Ok(Self::Write),
            "read" => Ok(Self::Read),
            _ => Err(Failure::argument(format!("there is no operation {name:?}"))),
        }
    }

    /// Whether it stores into local memory.
    pub(super) const fn stores(self) -> bool {
        matches!(self, Self::Recv | Self::Read)
    }
}

impl Inner {
    /// Adds a connection that the user has got. Returns its number.
    pub(super) fn add(&self, connection: Connection) -> u64 {
        let id = connection.id();
        let mut connections = lock(&self.connections);
        if connections.len() >= MAX_CLOSED {
            connections.retain(|_, known| known.closed().is_none());
        }
        connections.insert(id, connection);
        id
    }

    /// Takes the connections that peers have made, if the user does not call `accept`.
    pub(super) fn take_accepted(&self) {
        if self.is_passive.load(Ordering::Relaxed) {
            while let Ok(connection) = self.engine.accept(Instant::now()) {
                self.add(connection);
            }
        }
    }

    pub(super) fn connection(&self, conn_id: u64) -> Result<Connection, Failure> {
        if let Some(found) = lock(&self.connections).get(&conn_id) {
            return Ok(found.clone());
        }
        self.take_accepted();
        lock(&self.connections).get(&conn_id).cloned().ok_or_else(|| {
            Failure::argument(format!(
                "there is no connection {conn_id}: use the number that connect() or accept() returned"
            ))
        })
    }

    pub(super) fn keep(&self, transfer: Transfer) -> u64 {
        let id = self.last_transfer.fetch_add(1, Ordering::Relaxed) + 1;
        lock(&self.transfers).insert(id, transfer);
        id
    }

    pub(super) fn start(
        &self,
        py: Python<'_>,
        op: Op,
        conn_id: u64,
        ranges: &[(u64, u64, u64)],
        metas: &[&[u8]],
        until: Instant,
    ) -> PyResult<Transfer> {
        let regions = lock(&self.regions);
        let spans =
            ranges.iter().map(|(mr, ptr, size)| regions.span(*mr, *ptr, *size, op.stores()));
        let spans: Vec<Span> = spans.collect::<Result<_, _>>()?;
        drop(regions);
        self.start_spans(py, op, conn_id, &spans, metas, until)
    }

    pub(super) fn start_spans(
        &self,
        py: Python<'_>,
        op: Op,
        conn_id: u64,
        spans: &[Span],
        metas: &[&[u8]],
        until: Instant,
    ) -> PyResult<Transfer> {
        let connection = self.connection(conn_id)?;
        let remote = match op {
            Op::Send | Op::Recv => Vec::new(),
            Op::Write | Op::Read => descriptors(spans, metas)?,
        };
        self.retry(py, until, || match op {
            Op::Send => connection.start_sendv(spans, until),
            Op::Recv => connection.start_recvv(spans, until),
            Op::Write => connection.start_writev(spans, &remote, until),
            Op::Read => connection.start_readv(spans, &remote, until),
        })
    }

    /// Makes a one-sided transfer on this thread. Returns `None`, without effect, if that is not possible.
    pub(super) fn run_directly(
        &self,
        py: Python<'_>,
        op: Op,
        conn_id: u64,
        span: &Span,
        meta: Option<&[u8]>,
        until: Instant,
    ) -> PyResult<Option<u64>> {
        // Over `cma` a signal waits for the end of the copy, so only short ones go this way.
        if !matches!(op, Op::Write | Op::Read) || span.len() > MAX_DIRECT_BYTES {
            return Ok(None);
        }
        let connection = self.connection(conn_id)?;
        let remote = descriptor(span, meta.unwrap_or_default())?;
        let is_cancelled =
            || Python::attach(|py| self.check(py).map_err(|e| e.restore(py)).is_err());
        let outcome = py.detach(|| {
            let wait = DirectWait { deadline: until, is_cancelled: Some(&is_cancelled) };
            match op {
                Op::Write => connection.write_directly(span, &remote, wait),
                _ => connection.read_directly(span, &remote, wait),
            }
        });
        // The exception of the signal that has ended the wait, if one has.
        if let Some(error) = PyErr::take(py) {
            return Err(error);
        }
        match outcome.transpose() {
            Ok(moved) => Ok(moved),
            Err(OpError::Submit(error)) => Err(Failure::submit(&error).into()),
            Err(OpError::Transfer(error)) => Err(Failure::transfer(&error).into()),
            Err(error) => Err(Failure::argument(error.to_string()).into()),
        }
    }

    /// Starts a transfer. Waits while the engine has no room, until `until`.
    pub(super) fn retry(
        &self,
        py: Python<'_>,
        until: Instant,
        start: impl Fn() -> Result<Transfer, SubmitError>,
    ) -> PyResult<Transfer> {
        loop {
            match start() {
                Ok(transfer) => return Ok(transfer),
                Err(SubmitError::Busy) if Instant::now() < until => {
                    py.detach(|| std::thread::sleep(Duration::from_micros(100)));
                    self.check(py)?;
                }
                Err(error) => return Err(Failure::submit(&error).into()),
            }
        }
    }

    /// Waits for the end of a transfer, which its deadline `until` bounds. A signal of Python ends the wait.
    pub(super) fn wait(
        &self,
        py: Python<'_>,
        transfer: &Transfer,
        until: Instant,
    ) -> PyResult<u64> {
        loop {
            match py.detach(|| transfer.wait_until(Instant::now() + SLICE)) {
                Some(Ok(bytes)) => return Ok(bytes),
                Some(Err(error)) => return Err(Failure::transfer(&error).into()),
                None => self.check(py)?,
            }
            if Instant::now() > until + STUCK {
                return Err(Failure::stuck().into());
            }
        }
    }

    /// Ends a wait if Python has a signal to handle, or another thread closes the endpoint.
    pub(super) fn check(&self, py: Python<'_>) -> PyResult<()> {
        py.check_signals()?;
        if self.is_closing.load(Ordering::Relaxed) { Err(Failure::closed().into()) } else { Ok(()) }
    }
}

/// Decodes the peer's descriptions. A transfer may take the first part of a longer range.
fn descriptors(spans: &[Span], metas: &[&[u8]]) -> Result<Vec<Descriptor>, Failure> {
    if spans.len() != metas.len() {
        let (here, there) = (spans.len(), metas.len());
        return Err(Failure::argument(format!(
            "{here} ranges for {there} descriptions of the peer's memory"
        )));
    }
    spans.iter().zip(metas).map(|(span, meta)| descriptor(span, meta)).collect()
}

/// Decodes the peer's description of the range for `span`.
fn descriptor(span: &Span, meta: &[u8]) -> Result<Descriptor, Failure> {
    let whole = Descriptor::from_bytes(meta)
        .map_err(|error| Failure::argument(format!("the peer's description: {error}")))?;
    let (size, limit) = (span.len(), whole.bytes);
    whole.sub(0, size).map_err(|_| {
        Failure::argument(format!(
            "{size} bytes here, the peer advertised {limit}: transfer no more than that"
        ))
    })
}

/// Whether this process, and not a forked child of it, has the number `pid`.
pub(super) fn is_here(pid: u32) -> bool {
    std::process::id() == pid
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Time between two looks at Python's signals.
pub(super) const SLICE: Duration = Duration::from_millis(50);
/// The engine ends a transfer at its deadline. After this much more time its thread counts as stuck.
const STUCK: Duration = Duration::from_secs(10);
/// Longest transfer on the caller's thread.
const MAX_DIRECT_BYTES: u64 = 256 << 20;
/// Closed connections are forgotten when the table has so many entries.
const MAX_CLOSED: usize = 4096;
