//! One endpoint: an engine, its connections, registrations and transfers by number.

use std::mem::ManuallyDrop;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, mpsc};
use std::time::{Duration, Instant};

use message_engine::{
    ConnectError, Connection, EndpointMetadata, Engine, EngineConfig, TransferStatus, WaitError,
    default_fabrics, open_fabric,
};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::error::Failure;
use super::inner::{Inner, Op, SLICE, is_here, lock};
use super::memory::{access_of, register};

/// The address, port, GPU, PCI address and engine of an endpoint.
type Identity = (String, u16, Option<u32>, Option<String>, u64);

#[pyclass(frozen, module = "switchyard_moe._native")]
#[derive(Debug)]
pub(super) struct P2pEndpoint {
    inner: RwLock<Option<Arc<Inner>>>,
}

#[pymethods]
impl P2pEndpoint {
    #[new]
    #[pyo3(signature = (*, gpu_index, pci_bdf, bind, port, advertise, transports, ticket, eager_bytes, max_transfers))]
    #[allow(clippy::too_many_arguments, reason = "keywords; Python names each of them")]
    fn new(
        py: Python<'_>,
        gpu_index: Option<u32>,
        pci_bdf: Option<String>,
        bind: &str,
        port: u16,
        advertise: Option<&str>,
        transports: Option<Vec<String>>,
        ticket: Option<String>,
        eager_bytes: u64,
        max_transfers: u32,
    ) -> PyResult<Self> {
        let bind_ip = parse_ip("bind", bind)?;
        let advertise = advertise.map(|text| parse_ip("advertise", text)).transpose()?;
        let fabrics = match transports {
            None => default_fabrics(bind_ip, advertise),
            Some(names) => names.iter().map(|name| open_fabric(name, Some(bind_ip), &[])).collect(),
        };
        let fabrics =
            fabrics.map_err(|error| Failure::from(message_engine::StartError::from(error)))?;
        let defaults = EngineConfig::default();
        let config = EngineConfig {
            bind: SocketAddr::new(bind_ip, port),
            advertise,
            fabrics,
            gpu_index,
            pci_bdf,
            ticket,
            eager_bytes,
            eager_window_bytes: defaults.eager_window_bytes.max(eager_bytes.saturating_add(64)),
            max_transfers,
            queue_len: defaults.queue_len.max(max_transfers as usize),
            ..defaults
        };
        let engine = py.detach(|| Engine::start(config)).map_err(Failure::from)?;
        let inner = Inner {
            engine: ManuallyDrop::new(engine),
            pid: std::process::id(),
            connections: Mutex::default(),
            regions: Mutex::default(),
            transfers: Mutex::default(),
            last_transfer: AtomicU64::new(0),
            is_passive: AtomicBool::new(false),
            is_closing: AtomicBool::new(false),
        };
        Ok(Self { inner: RwLock::new(Some(Arc::new(inner))) })
    }

    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &self.inner()?.engine.metadata()))
    }

    #[staticmethod]
    fn parse_metadata(metadata: &[u8]) -> PyResult<Identity> {
        let found = EndpointMetadata::decode(metadata)
            .map_err(|why| Failure::argument(format!("endpoint metadata: {why}")))?;
        let EndpointMetadata { engine_id, addr, gpu_index, pci_bdf, .. } = found;
        Ok((addr.ip().to_string(), addr.port(), gpu_index, pci_bdf, engine_id))
    }

    fn connect(&self, py: Python<'_>, ip: &str, port: u16, timeout: f64) -> PyResult<u64> {
        let addr = SocketAddr::new(parse_ip("remote_ip_addr", ip)?, port);
        let deadline = deadline(timeout)?;
        self.join(py, deadline, move |engine| engine.connect(addr, deadline))
    }

    fn add_remote_endpoint(&self, py: Python<'_>, metadata: &[u8], timeout: f64) -> PyResult<u64> {
        let (metadata, deadline) = (metadata.to_vec(), deadline(timeout)?);
        self.join(py, deadline, move |engine| engine.add_remote_endpoint(&metadata, deadline))
    }

    fn accept(&self, py: Python<'_>, timeout: f64) -> PyResult<u64> {
        let (inner, until) = (self.inner()?, deadline(timeout)?);
        if inner.is_passive.load(Ordering::Relaxed) {
            let why = "start_passive_accept() takes all connections: use add_remote_endpoint() or connections()";
            return Err(Failure::argument(why).into());
        }
        loop {
            let slice = until.min(Instant::now() + SLICE);
            match py.detach(|| inner.engine.accept(slice)) {
                Ok(connection) => return Ok(inner.add(connection)),
                Err(WaitError::Deadline) if slice < until => inner.check(py)?,
                Err(WaitError::Deadline) => {
                    let why = format!("no peer has connected within {timeout} s");
                    return Err(Failure::timeout(why).into());
                }
                Err(error) => return Err(Failure::from(error).into()),
            }
        }
    }

    fn start_passive_accept(&self) -> PyResult<()> {
        let inner = self.inner()?;
        inner.is_passive.store(true, Ordering::Relaxed);
        inner.take_accepted();
        Ok(())
    }

    fn connections(&self) -> PyResult<Vec<u64>> {
        let inner = self.inner()?;
        inner.take_accepted();
        let connections = lock(&inner.connections);
        let open = connections.iter().filter(|(_, connection)| connection.closed().is_none());
        let mut open: Vec<_> = open.map(|(id, _)| *id).collect();
        open.sort_unstable();
        Ok(open)
    }

    /// The peer of a connection, its transport, and the reason of its end.
    fn connection(&self, conn_id: u64) -> PyResult<(Identity, String, Option<String>)> {
        let connection = self.inner()?.connection(conn_id)?;
        let peer = connection.peer();
        let identity = (
            peer.addr.ip().to_string(),
            peer.addr.port(),
            peer.gpu_index,
            peer.pci_bdf.clone(),
            peer.engine_id,
        );
        let reason = connection.closed().map(|reason| reason.to_string());
        Ok((identity, connection.transport().to_string(), reason))
    }

    fn remove_connection(&self, conn_id: u64) -> PyResult<bool> {
        let inner = self.inner()?;
        inner.connection(conn_id)?.close();
        Ok(lock(&inner.connections).remove(&conn_id).is_some())
    }

    fn register(&self, py: Python<'_>, ptr: u64, size: u64, access: &str) -> PyResult<u64> {
        let (inner, access) = (self.inner()?, access_of(access)?);
        let registered = py.detach(|| register(&inner.engine, ptr, size, access))?;
        Ok(lock(&inner.regions).add(registered))
    }

    fn deregister(&self, py: Python<'_>, mr_id: u64) -> PyResult<bool> {
        let inner = self.inner()?;
        let registered = lock(&inner.regions).remove(mr_id)?;
        let access = registered.access;
        match py.detach(|| inner.engine.dereg(registered.region)) {
            Ok(is_revoked) => Ok(is_revoked),
            Err(mut error) => {
                if let Some(region) = error.region.take() {
                    let registered = super::memory::Registered { region, access };
                    lock(&inner.regions).put_back(mr_id, registered);
                }
                Err(Failure::from(&error).into())
            }
        }
    }

    /// The first byte and the length of a registration.
    fn region(&self, mr_id: u64) -> PyResult<(u64, u64)> {
        let inner = self.inner()?;
        let regions = lock(&inner.regions);
        let found = regions.get(mr_id)?;
        Ok((found.first(), found.region.len()))
    }

    fn find_region(&self, ptr: u64, size: u64, access: &str) -> PyResult<Option<u64>> {
        Ok(lock(&self.inner()?.regions).find(ptr, size, access_of(access)?))
    }

    fn advertise<'py>(
        &self,
        py: Python<'py>,
        conn_id: u64,
        mr_id: u64,
        ptr: u64,
        size: u64,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let inner = self.inner()?;
        let span = lock(&inner.regions).span(mr_id, ptr, size, false)?;
        let descriptor = inner.connection(conn_id)?.advertise(&span);
        let descriptor = descriptor.map_err(|error| Failure::submit(&error))?;
        Ok(PyBytes::new(py, &descriptor.to_bytes()))
    }

    /// Runs one transfer and waits for its end. Returns the bytes moved.
    #[allow(
        clippy::too_many_arguments,
        reason = "positional in Python's wrapper, to keep the call short"
    )]
    fn run(
        &self,
        py: Python<'_>,
        op: &str,
        conn_id: u64,
        mr_id: u64,
        ptr: u64,
        size: u64,
        meta: Option<&[u8]>,
        timeout: f64,
    ) -> PyResult<u64> {
        let (op, until) = (Op::of(op)?, deadline(timeout)?);
        let inner = self.inner()?;
        let span = lock(&inner.regions).span(mr_id, ptr, size, op.stores())?;
        if let Some(moved) = inner.run_directly(py, op, conn_id, &span, meta, until)? {
            return Ok(moved);
        }
        let transfer = inner.start_spans(
            py,
            op,
            conn_id,
            std::slice::from_ref(&span),
            meta.as_slice(),
            until,
        )?;
        inner.wait(py, &transfer, until)
    }

    /// Starts one transfer. Returns its number.
    #[allow(
        clippy::too_many_arguments,
        reason = "positional in Python's wrapper, to keep the call short"
    )]
    fn start(
        &self,
        py: Python<'_>,
        op: &str,
        conn_id: u64,
        mr_id: u64,
        ptr: u64,
        size: u64,
        meta: Option<&[u8]>,
        timeout: f64,
    ) -> PyResult<u64> {
        let (op, until) = (Op::of(op)?, deadline(timeout)?);
        let inner = self.inner()?;
        let transfer =
            inner.start(py, op, conn_id, &[(mr_id, ptr, size)], meta.as_slice(), until)?;
        Ok(inner.keep(transfer))
    }

    /// Starts a transfer of several ranges. Returns its number.
    fn startv(
        &self,
        py: Python<'_>,
        op: &str,
        conn_id: u64,
        ranges: Vec<(u64, u64, u64)>,
        metas: Vec<Vec<u8>>,
        timeout: f64,
    ) -> PyResult<u64> {
        let (op, until) = (Op::of(op)?, deadline(timeout)?);
        let inner = self.inner()?;
        let metas: Vec<_> = metas.iter().map(Vec::as_slice).collect();
        let transfer = inner.start(py, op, conn_id, &ranges, &metas, until)?;
        Ok(inner.keep(transfer))
    }

    /// Starts a transfer of memory that is registered for this transfer only.
    #[allow(
        clippy::too_many_arguments,
        reason = "positional in Python's wrapper, to keep the call short"
    )]
    fn start_unregistered(
        &self,
        py: Python<'_>,
        op: &str,
        conn_id: u64,
        ranges: Vec<(u64, u64)>,
        metas: Vec<Vec<u8>>,
        timeout: f64,
    ) -> PyResult<u64> {
        let (op, until) = (Op::of(op)?, deadline(timeout)?);
        let inner = self.inner()?;
        // The sender of a message writes into the buffer of its receive.
        let access = access_of(if op == Op::Recv { "rw" } else { "local" })?;
        let mut spans = Vec::with_capacity(ranges.len());
        for (ptr, size) in ranges {
            // The transfer holds the registration, which ends with it.
            let found = py.detach(|| register(&inner.engine, ptr, size, access))?;
            spans.push(found.region.whole());
        }
        let metas: Vec<_> = metas.iter().map(Vec::as_slice).collect();
        let transfer = inner.start_spans(py, op, conn_id, &spans, &metas, until)?;
        Ok(inner.keep(transfer))
    }

    /// Starts a notification. Returns its number.
    fn start_notify(
        &self,
        py: Python<'_>,
        conn_id: u64,
        content: &[u8],
        timeout: f64,
    ) -> PyResult<u64> {
        let (inner, until) = (self.inner()?, deadline(timeout)?);
        let connection = inner.connection(conn_id)?;
        let transfer = inner.retry(py, until, || connection.start_notify(content, until))?;
        Ok(inner.keep(transfer))
    }

    fn take_notifications<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<Vec<(u64, Bound<'py, PyBytes>)>> {
        let inner = self.inner()?;
        inner.take_accepted();
        let taken = inner.engine.take_notifications();
        Ok(taken.iter().map(|one| (one.connection, PyBytes::new(py, &one.bytes))).collect())
    }

    /// The bytes that a transfer has moved, or `None` while it is under way. A transfer that has ended is forgotten.
    fn poll(&self, transfer_id: u64) -> PyResult<Option<u64>> {
        let inner = self.inner()?;
        let mut transfers = lock(&inner.transfers);
        let found = transfers.get(&transfer_id).ok_or_else(|| unknown(transfer_id))?;
        let outcome = match found.poll() {
            TransferStatus::Pending => return Ok(None),
            TransferStatus::Done { bytes } => Ok(Some(bytes)),
            TransferStatus::Failed(error) => Err(Failure::transfer(&error).into()),
        };
        transfers.remove(&transfer_id);
        outcome
    }

    /// Waits until a transfer ends, for at most `timeout` seconds. Returns the bytes moved, or `None` if it goes on.
    fn wait(&self, py: Python<'_>, transfer_id: u64, timeout: f64) -> PyResult<Option<u64>> {
        let (inner, until) = (self.inner()?, deadline(timeout)?);
        let found = lock(&inner.transfers).remove(&transfer_id);
        let transfer = found.ok_or_else(|| unknown(transfer_id))?;
        loop {
            let slice = until.min(Instant::now() + SLICE);
            match py.detach(|| transfer.wait_until(slice)) {
                Some(Ok(bytes)) => return Ok(Some(bytes)),
                Some(Err(error)) => return Err(Failure::transfer(&error).into()),
                None => {}
            }
            let signal = inner.check(py);
            if signal.is_err() || Instant::now() >= until {
                lock(&inner.transfers).insert(transfer_id, transfer);
                return signal.map(|()| None);
            }
        }
    }

    /// Open connections, registrations, and transfers whose outcome was not taken.
    fn counts(&self) -> PyResult<(usize, usize, usize)> {
        let inner = self.inner()?;
        let num_regions = lock(&inner.regions).len();
        let num_transfers = lock(&inner.transfers).len();
        Ok((inner.engine.stats().num_connections, num_regions, num_transfers))
    }

    fn is_open(&self) -> bool {
        self.inner().is_ok()
    }

    /// Ends everything. Returns false if a call of another thread does not return, so that memory may be in use still.
    fn close(&self, py: Python<'_>) -> bool {
        let taken = self.inner.write().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut inner) = taken else { return true };
        if is_here(inner.pid) {
            inner.is_closing.store(true, Ordering::Relaxed);
            lock(&inner.connections).drain().for_each(|(_, connection)| connection.close());
        }
        let until = Instant::now() + CLOSE_TIMEOUT;
        py.detach(|| {
            while Arc::get_mut(&mut inner).is_none() {
                if Instant::now() >= until {
                    return false;
                }
                std::thread::sleep(Duration::from_micros(200));
            }
            drop(inner);
            true
        })
    }
}

impl P2pEndpoint {
    fn inner(&self) -> Result<Arc<Inner>, Failure> {
        let inner = self.inner.read().unwrap_or_else(PoisonError::into_inner);
        let inner = inner.as_ref().ok_or_else(Failure::closed)?;
        if is_here(inner.pid) { Ok(Arc::clone(inner)) } else { Err(Failure::forked()) }
    }

    /// Makes a connection on a thread of its own, so that a signal ends the wait.
    fn join(
        &self,
        py: Python<'_>,
        deadline: Instant,
        connect: impl FnOnce(&Engine) -> Result<Connection, ConnectError> + Send + 'static,
    ) -> PyResult<u64> {
        let inner = self.inner()?;
        let (sender, receiver) = mpsc::sync_channel(1);
        let there = Arc::clone(&inner);
        let spawned =
            std::thread::Builder::new().name("switchyard-connect".to_owned()).spawn(move || {
                // A caller that was interrupted does not take it: the connection is closed, then.
                let _ = sender.send(connect(&there.engine));
            });
        spawned.map_err(|error| Failure::timeout(format!("cannot start a thread: {error}")))?;
        // The engine answers within two seconds of the deadline.
        let until = deadline + Duration::from_secs(5);
        // A receiver is not shared between threads, which a call without the interpreter's lock needs.
        let receiver = Mutex::new(receiver);
        loop {
            match py.detach(|| lock(&receiver).recv_timeout(SLICE)) {
                Ok(Ok(connection)) => return Ok(inner.add(connection)),
                Ok(Err(error)) => return Err(Failure::from(error).into()),
                Err(mpsc::RecvTimeoutError::Timeout) if Instant::now() < until => {
                    inner.check(py)?;
                }
                Err(_) => return Err(Failure::stuck().into()),
            }
        }
    }
}

/// The time in `timeout` seconds.
fn deadline(timeout: f64) -> Result<Instant, Failure> {
    let found = Duration::try_from_secs_f64(timeout).ok().filter(|found| *found <= MAX_TIMEOUT);
    let found = found.ok_or_else(|| {
        Failure::argument(format!(
            "timeout is {timeout}, expected seconds from 0 to {}",
            MAX_TIMEOUT.as_secs()
        ))
    })?;
    Ok(Instant::now() + found)
}

fn parse_ip(what: &str, text: &str) -> Result<IpAddr, Failure> {
    text.parse()
        .map_err(|_| Failure::argument(format!("{what} is {text:?}, expected an IP address")))
}

fn unknown(transfer_id: u64) -> Failure {
    Failure::argument(format!("there is no transfer {transfer_id}: its outcome was taken already"))
}

/// Time for which `close` waits for the calls of other threads.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest timeout: a week.
const MAX_TIMEOUT: Duration = Duration::from_secs(7 * 24 * 3600);
