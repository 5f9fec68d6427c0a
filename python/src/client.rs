//! `switchyard_moe.Client`: the client of the expert service.

mod arguments;
mod call;
mod connect;
mod report;

use std::sync::{Arc, Mutex, PoisonError};

use attention_client::prometheus::{IntCounter, IntCounterVec, Opts, TextEncoder};
use attention_client::{ClientModel, LayerTiming, MoeClient};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{self, Kind, error};
use crate::interrupt::Interrupt;
use crate::logs;
use arguments::{Request, Target};
use call::{Finished, Handle, Scratch};
use report::Report;

/// Adds the classes of this file to `module`.
///
/// # Errors
/// The exception of Python when it refuses a class.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Client>()?;
    module.add_class::<Handle>()?;
    module.add_class::<Report>()
}

/// The base of `switchyard_moe.Client`.
#[pyclass(module = "switchyard_moe._native", subclass, frozen)]
pub struct Client {
    /// `None` once the client is closed.
    moe: Mutex<Option<MoeClient>>,
    shared: Arc<Shared>,
}

/// State of a client that its handles share, and that outlives its end.
#[derive(Debug)]
pub struct Shared {
    model: ClientModel,
    control_plane: String,
    /// Process that the client belongs to.
    pid: u32,
    copies: Copies,
    last: Mutex<Option<LayerTiming>>,
}

/// Counters of tensors that were copied, because the client cannot take their type as it is.
#[derive(Debug)]
struct Copies {
    x: IntCounter,
    topk_idx: IntCounter,
    topk_weights: IntCounter,
    out: IntCounter,
}

impl Copies {
    fn new(client: &MoeClient) -> Result<Self, attention_client::prometheus::Error> {
        let copies = IntCounterVec::new(
            Opts::new(
                "switchyard_client_tensor_copies_total",
                "Tensors of Python calls that were converted in a copy, by argument.",
            ),
            &["tensor"],
        )?;
        client.registry().register(Box::new(copies.clone()))?;
        let of = |name| copies.with_label_values(&[name]);
        Ok(Self {
            x: of("x"),
            topk_idx: of("topk_idx"),
            topk_weights: of("topk_weights"),
            out: of("out"),
        })
    }
}

impl Shared {
    /// Fails in a process that was forked off the one that connected.
    fn check_process(&self, py: Python<'_>) -> PyResult<()> {
        let pid = std::process::id();
        if pid == self.pid {
            return Ok(());
        }
        let text = format!(
            "this client was connected by process {}, and process {pid} was forked off it: make a new client here, or \
             start processes by spawn",
            self.pid
        );
        Err(error(py, Kind::Forked, text))
    }

    fn is_forked(&self) -> bool {
        std::process::id() != self.pid
    }

    /// Notes the end of a call.
    fn note(&self, py: Python<'_>, report: Option<&Bound<'_, Report>>, timing: LayerTiming) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(timing);
        if let Some(report) = report {
            report.get().set(timing);
        }
        logs::flush(py);
    }
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (control_plane, *, token=None, model=None, wire_dtype="f32", response_dtype=None,
        transports="auto", max_lanes=16, timeout=30.0, deadline=0.1, work_limit=60.0, on_missing="fail", name=None,
        slot_bytes=None, slot_frames=None))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn new(
        py: Python<'_>,
        control_plane: String,
        token: Option<String>,
        model: Option<std::path::PathBuf>,
        wire_dtype: &str,
        response_dtype: Option<&str>,
        transports: &str,
        max_lanes: usize,
        timeout: f64,
        deadline: f64,
        work_limit: f64,
        on_missing: &str,
        name: Option<String>,
        slot_bytes: Option<usize>,
        slot_frames: Option<usize>,
    ) -> PyResult<Self> {
        logs::start(py)?;
        let settings = connect::Settings {
            control_plane,
            token,
            model,
            wire_dtype: connect::dtype(py, "wire_dtype", wire_dtype)?,
            response_dtype: match response_dtype {
                Some(name) => Some(connect::dtype(py, "response_dtype", name)?),
                None => None,
            },
            transports: connect::transports(py, transports)?,
            max_lanes: connect::lanes(py, max_lanes)?,
            timeout: connect::seconds(py, "timeout", timeout)?,
            deadline: connect::seconds(py, "deadline", deadline)?,
            work_limit: connect::seconds(py, "work_limit", work_limit)?,
            on_missing: connect::on_missing(py, on_missing)?,
            name,
            slot_bytes,
            slot_frames,
        };
        let control_plane = settings.control_plane.clone();
        let connected = connect::connect(py, settings);
        logs::flush(py);
        let moe = connected?;
        let copies =
            Copies::new(&moe).map_err(|failure| error(py, Kind::Error, failure.to_string()))?;
        let shared = Shared {
            model: moe.model().clone(),
            control_plane,
            pid: std::process::id(),
            copies,
            last: Mutex::new(None),
        };
        Ok(Self { moe: Mutex::new(Some(moe)), shared: Arc::new(shared) })
    }

    #[getter]
    fn hidden(&self) -> u32 {
        self.shared.model.shape.hidden
    }

    #[getter]
    fn num_experts(&self) -> u32 {
        self.shared.model.shape.num_experts
    }

    #[getter]
    fn top_k(&self) -> u32 {
        self.shared.model.shape.top_k
    }

    #[getter]
    fn layers(&self) -> Vec<u32> {
        self.shared.model.moe_layers.clone()
    }

    #[getter]
    fn architecture(&self) -> &str {
        &self.shared.model.architecture
    }

    #[getter]
    fn control_plane(&self) -> &str {
        &self.shared.control_plane
    }

    #[getter]
    fn epoch(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.open(py)?.epoch())
    }

    #[getter]
    fn closed(&self) -> bool {
        self.lock().is_none()
    }

    #[getter]
    fn last_report(&self) -> Option<Report> {
        let last = *self.shared.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.map(Report::of)
    }

    #[pyo3(signature = (timeout=30.0))]
    fn wait_ready(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let timeout = connect::seconds(py, "timeout", timeout)?;
        let moe = self.open(py)?;
        let (result, interrupt) = py.detach(move || {
            let interrupt = Interrupt::new();
            let result = moe.wait_ready_unless(timeout, &|| interrupt.is_due());
            (result, interrupt)
        });
        logs::flush(py);
        interrupt.check()?;
        result.map_err(|failure| match failure {
            attention_client::ClientError::NoReplica { .. } => {
                let text = format!("the expert service is not ready: {failure}");
                error(py, Kind::NotReady, text)
            }
            other => errors::of_call(py, &other),
        })
    }

    #[pyo3(signature = (layer, expert))]
    fn replicas(&self, py: Python<'_>, layer: u32, expert: u32) -> PyResult<Vec<String>> {
        Ok(self.open(py)?.replicas(layer, expert))
    }

    #[pyo3(signature = (layer, x, topk_idx, topk_weights, *, out=None, report=None))]
    #[allow(clippy::too_many_arguments, reason = "the call's tensors")]
    fn forward<'py>(
        &self,
        py: Python<'py>,
        layer: &Bound<'py, PyAny>,
        x: &Bound<'py, PyAny>,
        topk_idx: &Bound<'py, PyAny>,
        topk_weights: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
        report: Option<&Bound<'py, Report>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let moe = self.open(py)?;
        let layer = arguments::layer(layer)?;
        let request = Request::new(&self.shared.model, x, topk_idx, topk_weights, false)?;
        let target = Target::new(&request, x, out)?;
        let (request_raw, target_raw) = (request.raw(), target.raw());
        let copies = &self.shared.copies;
        let (result, interrupt) = py.detach(move || {
            let interrupt = Interrupt::new();
            let result = Scratch::with(|scratch| {
                // SAFETY: The arrays live in `request` and `target` until after this call.
                unsafe {
                    call::forward(&moe, layer, request_raw, target_raw, copies, scratch, &interrupt)
                }
            });
            drop(moe);
            (result, interrupt)
        });
        Finished { shared: &self.shared, report, result, interrupt }.conclude(py)?;
        target.into_object(py)
    }

    fn dispatch<'py>(
        &self,
        py: Python<'py>,
        layer: &Bound<'py, PyAny>,
        x: &Bound<'py, PyAny>,
        topk_idx: &Bound<'py, PyAny>,
        topk_weights: &Bound<'py, PyAny>,
    ) -> PyResult<Handle> {
        let moe = self.open(py)?;
        let layer = arguments::layer(layer)?;
        let request = Request::new(&self.shared.model, x, topk_idx, topk_weights, true)?;
        call::dispatch(py, moe, layer, request, x, &self.shared)
    }

    #[pyo3(signature = (handle, *, out=None, report=None))]
    fn combine<'py>(
        &self,
        py: Python<'py>,
        handle: &Bound<'py, Handle>,
        out: Option<&Bound<'py, PyAny>>,
        report: Option<&Bound<'py, Report>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        // A closed client still ends the calls that it began.
        self.shared.check_process(py)?;
        call::combine(py, handle, out, report, &self.shared)
    }

    fn metrics_text(&self, py: Python<'_>) -> PyResult<String> {
        let families = self.open(py)?.registry().gather();
        logs::flush(py);
        TextEncoder::new()
            .encode_to_string(&families)
            .map_err(|failure| error(py, Kind::Error, failure.to_string()))
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let Copies { x, topk_idx, topk_weights, out } = &self.shared.copies;
        let stats = PyDict::new(py);
        let counters =
            [("x", x), ("topk_idx", topk_idx), ("topk_weights", topk_weights), ("out", out)];
        for (name, counter) in counters {
            stats.set_item(format!("{name}_copies"), counter.get())?;
        }
        Ok(stats)
    }

    fn close(&self, py: Python<'_>) {
        let moe = self.lock().take();
        if self.shared.is_forked() {
            // Its threads are in the parent only: waiting for them would never end.
            std::mem::forget(moe);
        } else {
            py.detach(|| drop(moe));
            logs::flush(py);
        }
    }
}

impl Client {
    fn lock(&self) -> std::sync::MutexGuard<'_, Option<MoeClient>> {
        self.moe.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The client, unless it is closed or belongs to another process.
    fn open(&self, py: Python<'_>) -> PyResult<MoeClient> {
        self.shared.check_process(py)?;
        self.lock().clone().ok_or_else(|| {
            error(
                py,
                Kind::Closed,
                "this client is closed: make a new one to call the expert service again",
            )
        })
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let moe = self.lock().take();
        release(moe, &self.shared);
    }
}

/// Drops what may wait for the client's threads, without keeping other Python threads from running.
fn release<T: Send>(value: Option<T>, shared: &Shared) {
    let Some(value) = value else { return };
    if shared.is_forked() {
        std::mem::forget(value);
        return;
    }
    // Without an interpreter to attach to, the value is dropped by the closure that does not run.
    Python::try_attach(|py| py.detach(|| drop(value)));
}
