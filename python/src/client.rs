//! `switchyard_moe.Client`: the client of the expert service.

mod arguments;
mod call;
mod connect;
mod gpu;
mod handle;
mod on_gpu;
mod report;
mod traces;

use std::sync::{Arc, Mutex, PoisonError};

use attention_client::prometheus::{IntCounter, IntCounterVec, Opts, Registry, TextEncoder};
use attention_client::{ClientError, ClientModel, MoeClient};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::dlpack::{Place, current_stream};
use crate::errors::{Kind, error};
use crate::interrupt::Interrupt;
use crate::logs;
use arguments::{Request, Target};
use call::{Failure, Finished, LayerCall, Scratch};
use gpu::GpuClient;
use handle::Handle;
use report::{CallReport, Report, ServerReport};
use traces::Traces;

/// Adds the classes of this file to `module`.
///
/// # Errors
/// The exception of Python when it refuses a class.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Client>()?;
    module.add_class::<Handle>()?;
    module.add_class::<Report>()?;
    module.add_class::<ServerReport>()
}

/// The base of `switchyard_moe.Client`.
#[pyclass(module = "switchyard_moe._native", subclass, frozen)]
pub struct Client {
    /// `None` once the client is closed.
    backend: Mutex<Option<Backend>>,
    shared: Arc<Shared>,
}

/// The client in Rust, by the memory of its arrays.
#[derive(Debug, Clone)]
pub enum Backend {
    Host(MoeClient),
    Gpu(Arc<GpuClient>),
}

impl Backend {
    fn model(&self) -> &ClientModel {
        match self {
            Self::Host(moe) => moe.model(),
            Self::Gpu(gpu) => gpu.model(),
        }
    }

    fn registry(&self) -> &Registry {
        match self {
            Self::Host(moe) => moe.registry(),
            Self::Gpu(gpu) => gpu.registry(),
        }
    }

    /// Memory of the client's arrays. A GPU client works on the stream of the library of `x`, as it is on this thread.
    fn place(&self, x: &Bound<'_, PyAny>) -> Place {
        match self {
            Self::Host(_) => Place::Host,
            Self::Gpu(gpu) => {
                let ordinal = gpu.ordinal();
                let stream = current_stream(x, ordinal).unwrap_or_else(|| gpu.own_stream());
                Place::Gpu { ordinal, stream }
            }
        }
    }
}

/// State of a client that its handles share, and that outlives its end.
#[derive(Debug)]
pub struct Shared {
    model: ClientModel,
    control_plane: String,
    device: String,
    /// Process that the client belongs to.
    pid: u32,
    copies: Copies,
    traces: Traces,
    last: Mutex<Option<CallReport>>,
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
    fn new(registry: &Registry) -> Result<Self, attention_client::prometheus::Error> {
        let copies = IntCounterVec::new(
            Opts::new(
                "switchyard_client_tensor_copies_total",
                "Tensors of Python calls that were converted in a copy, by argument.",
            ),
            &["tensor"],
        )?;
        registry.register(Box::new(copies.clone()))?;
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
    fn note(&self, py: Python<'_>, report: Option<&Bound<'_, Report>>, call: CallReport) {
        if let Some(report) = report {
            report.get().set(&call);
        }
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(call);
        logs::flush(py);
    }
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (control_plane, *, token=None, token_file=None, model=None, device="cpu", wire_dtype=None,
        response_dtype=None, transports="auto", max_lanes=16, timeout=30.0, deadline=0.1, work_limit=60.0, on_missing="fail", name=None,
        slot_bytes=None, slot_frames=None, hedge_budget=0.05, tls=None, insecure=false,
        otlp_endpoint=None, trace_sample_ratio=0.001))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn new(
        py: Python<'_>,
        control_plane: String,
        token: Option<String>,
        token_file: Option<std::path::PathBuf>,
        model: Option<std::path::PathBuf>,
        device: &str,
        wire_dtype: Option<&str>,
        response_dtype: Option<&str>,
        transports: &str,
        max_lanes: i64,
        timeout: f64,
        deadline: f64,
        work_limit: f64,
        on_missing: &str,
        name: Option<String>,
        slot_bytes: Option<i64>,
        slot_frames: Option<i64>,
        hedge_budget: f64,
        tls: Option<std::path::PathBuf>,
        insecure: bool,
        otlp_endpoint: Option<String>,
        trace_sample_ratio: f64,
    ) -> PyResult<Self> {
        logs::start(py)?;
        let dtype = |setting: &str, name: Option<&str>| {
            name.map(|name| connect::dtype(py, setting, name)).transpose()
        };
        let device = connect::device(py, device)?;
        let name = name.unwrap_or_else(|| format!("client-{}", std::process::id()));
        let traces = Traces::start(py, otlp_endpoint, trace_sample_ratio, &name)?;
        let settings = connect::Settings {
            control_plane,
            token,
            token_file,
            model,
            device,
            wire_dtype: dtype("wire_dtype", wire_dtype)?,
            response_dtype: dtype("response_dtype", response_dtype)?,
            transports: connect::transports(py, transports)?,
            max_lanes: connect::lanes(py, max_lanes)?,
            timeout: connect::seconds(py, "timeout", timeout)?,
            deadline: connect::seconds(py, "deadline", deadline)?,
            work_limit: connect::seconds(py, "work_limit", work_limit)?,
            on_missing: connect::on_missing(py, on_missing)?,
            name,
            slot_bytes: connect::size(py, "slot_bytes", slot_bytes)?,
            slot_frames: connect::size(py, "slot_frames", slot_frames)?,
            hedge_budget: connect::share(py, "hedge_budget", hedge_budget)?,
            security: connect::security(py, tls.as_deref(), insecure)?,
            recorder: traces.recorder().cloned(),
        };
        let control_plane = settings.control_plane.clone();
        let connected = connect::connect(py, settings);
        logs::flush(py);
        let backend = connected?;
        let copies = Copies::new(backend.registry())
            .map_err(|failure| error(py, Kind::Error, failure.to_string()))?;
        let shared = Shared {
            model: backend.model().clone(),
            control_plane,
            device: device.map_or_else(|| "cpu".to_owned(), |device| device.to_string()),
            pid: std::process::id(),
            copies,
            traces,
            last: Mutex::new(None),
        };
        Ok(Self { backend: Mutex::new(Some(backend)), shared: Arc::new(shared) })
    }

    /// Values per token.
    #[getter]
    fn hidden(&self) -> u32 {
        self.shared.model.shape.hidden
    }

    /// Routed experts of a layer.
    #[getter]
    fn num_experts(&self) -> u32 {
        self.shared.model.shape.num_experts
    }

    /// Most experts of a token.
    #[getter]
    fn top_k(&self) -> u32 {
        self.shared.model.shape.top_k
    }

    /// Numbers of the layers with experts, ascending, as in the checkpoint.
    #[getter]
    fn layers(&self) -> Vec<u32> {
        self.shared.model.moe_layers.clone()
    }

    /// Architecture of the model, such as ``qwen3_moe``.
    #[getter]
    fn architecture(&self) -> &str {
        &self.shared.model.architecture
    }

    /// URL of the control plane.
    #[getter]
    fn control_plane(&self) -> &str {
        &self.shared.control_plane
    }

    /// Memory of the arrays that calls take: ``cpu``, or ``cuda:N``.
    #[getter]
    fn device(&self) -> &str {
        &self.shared.device
    }

    /// Version of the placement in force; 0 before the first.
    #[getter]
    fn epoch(&self, py: Python<'_>) -> PyResult<u64> {
        let backend = self.open(py)?;
        Ok(py.detach(|| match &backend {
            Backend::Host(moe) => moe.epoch(),
            Backend::Gpu(gpu) => gpu.epoch(),
        }))
    }

    /// Whether ``close`` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.lock().is_none()
    }

    /// Report of the call that ended last, on any thread. ``None`` before the first.
    #[getter]
    fn last_report(&self) -> Option<Report> {
        let last = self.shared.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.clone().map(Report::of)
    }

    /// Wait until the client is connected with a live replica of every expert, for ``timeout`` seconds at most.
    ///
    /// Raises NotReady at the timeout, or at once if all replicas of an expert refuse this client.
    #[pyo3(signature = (timeout=30.0))]
    fn wait_ready(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let timeout = connect::seconds(py, "timeout", timeout)?;
        let backend = self.open(py)?;
        let (result, interrupt) = py.detach(move || {
            let interrupt = Interrupt::new();
            let result: Result<(), Failure> = match backend {
                Backend::Host(moe) => {
                    moe.wait_ready_unless(timeout, &|| interrupt.is_due()).map_err(Into::into)
                }
                Backend::Gpu(gpu) => gpu.wait_ready(timeout, &interrupt).map_err(Into::into),
            };
            (result, interrupt)
        });
        logs::flush(py);
        interrupt.check()?;
        result.map_err(|failure| not_ready(py, &self.shared, &failure))
    }

    /// Prepare for ``calls`` calls at a time with up to ``tokens`` tokens each. The first real calls then find their
    /// connections, and allocate no memory in the client as long as no server fails.
    ///
    /// Waits as wait_ready, connects ``calls`` lanes with all servers, and grows their buffers. Each lane then carries
    /// calls with all experts of the first layer, as many as a slot has frames, with tokens of zeros. The metrics count
    /// these calls. ``dtype`` is the type of later ``x``: ``f32``, ``bf16`` or ``f16``. Call it on the thread that makes
    /// the calls, because the buffers for conversions belong to a thread. On a GPU it waits only: staging memory for
    /// conversions grows in the first calls.
    ///
    /// Raises ArgumentError, NotReady, ClosedError, ForkedError, or as forward.
    #[pyo3(signature = (tokens, *, calls=1, dtype="f32", timeout=30.0))]
    fn warm_up(
        &self,
        py: Python<'_>,
        tokens: i64,
        calls: i64,
        dtype: &str,
        timeout: f64,
    ) -> PyResult<()> {
        let is_widened = match dtype {
            "f32" => false,
            "bf16" | "f16" => true,
            other => {
                let text = format!("dtype is {other:?}, expected \"f32\", \"bf16\" or \"f16\"");
                return Err(error(py, Kind::Argument, text));
            }
        };
        let shape = self.shared.model.shape;
        let most = u32::MAX / shape.hidden.max(shape.top_k).max(1);
        let num_tokens = u32::try_from(tokens).ok().filter(|&tokens| tokens <= most);
        let Some(num_tokens) = num_tokens else {
            let text = format!("tokens is {tokens}, expected 0 to {most}");
            return Err(error(py, Kind::Argument, text));
        };
        let Ok(num_calls) = usize::try_from(calls) else {
            let text = format!("calls is {calls}, expected at least 1");
            return Err(error(py, Kind::Argument, text));
        };
        let timeout = connect::seconds(py, "timeout", timeout)?;
        let backend = self.open(py)?;
        let (result, interrupt) = py.detach(move || {
            let interrupt = Interrupt::new();
            let num_tokens = num_tokens as usize;
            let cancelled = || interrupt.is_due();
            let result: Result<(), Failure> = match backend {
                Backend::Host(moe) => {
                    let result = moe.warm_up_unless(num_tokens, num_calls, timeout, &cancelled);
                    if result.is_ok() {
                        Scratch::with(|scratch| scratch.reserve(num_tokens, &shape, is_widened));
                    }
                    result.map_err(Into::into)
                }
                Backend::Gpu(gpu) => gpu.wait_ready(timeout, &interrupt).map_err(Into::into),
            };
            (result, interrupt)
        });
        logs::flush(py);
        interrupt.check()?;
        result.map_err(|failure| not_ready(py, &self.shared, &failure))
    }

    /// Return the names of the servers that hold an expert. Empty if there is no such layer or expert.
    #[pyo3(signature = (layer, expert))]
    fn replicas(&self, py: Python<'_>, layer: i64, expert: i64) -> PyResult<Vec<String>> {
        let backend = self.open(py)?;
        let (Ok(layer), Ok(expert)) = (u32::try_from(layer), u32::try_from(expert)) else {
            return Ok(Vec::new());
        };
        Ok(py.detach(|| match &backend {
            Backend::Host(moe) => moe.replicas(layer, expert),
            Backend::Gpu(gpu) => gpu.replicas(layer, expert),
        }))
    }

    /// Return the weighted sums of the experts' answers, ``[tokens, hidden]``, of the type of ``x``.
    ///
    /// ``x`` is ``[tokens, hidden]`` of float32, bfloat16 or float16, in C order in host memory; it must not be written
    /// during the call. ``topk_idx`` is ``[tokens, k]`` of int32 or int64; -1 masks an entry. ``topk_weights`` is
    /// ``[tokens, k]`` of float32, bfloat16 or float16. ``out`` takes the result; it has shape and type of ``x``.
    /// ``report`` is filled in. ``traceparent`` is the caller's trace, as W3C Trace Context writes it.
    ///
    /// Blocks until every answer is there, and meanwhile lets other Python threads run. Resends tokens of failed servers
    /// to replicas. Raises ArgumentError, NoReplicaError, BusyError, RefusedError, PeerError, ClosedError or ForkedError.
    #[pyo3(signature = (layer, x, topk_idx, topk_weights, *, out=None, report=None, traceparent=None))]
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
        traceparent: Option<&str>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let backend = self.open(py)?;
        let context = self.shared.traces.context(py, traceparent)?;
        let layer = LayerCall { number: arguments::layer(layer)?, context };
        let place = backend.place(x);
        let request = Request::new(&self.shared.model, place, x, topk_idx, topk_weights, false)?;
        let target = Target::new(&request, x, out)?;
        let moe = match (backend, place) {
            (Backend::Host(moe), _) => moe,
            (Backend::Gpu(gpu), place) => {
                let work = (&request, place.stream());
                return on_gpu::forward(py, gpu, layer, work, target, report, &self.shared);
            }
        };
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

    /// Send the tokens of a layer and return a Handle without waiting for answers. Arguments as for ``forward``.
    ///
    /// ``x`` stays alive, and must not be written, until the handle is combined or deleted. Each outstanding handle
    /// takes a lane. Deleting a handle abandons its call.
    #[pyo3(signature = (layer, x, topk_idx, topk_weights, *, traceparent=None))]
    #[allow(clippy::too_many_arguments, reason = "the call's tensors")]
    fn dispatch<'py>(
        &self,
        py: Python<'py>,
        layer: &Bound<'py, PyAny>,
        x: &Bound<'py, PyAny>,
        topk_idx: &Bound<'py, PyAny>,
        topk_weights: &Bound<'py, PyAny>,
        traceparent: Option<&str>,
    ) -> PyResult<Handle> {
        let backend = self.open(py)?;
        let context = self.shared.traces.context(py, traceparent)?;
        let layer = LayerCall { number: arguments::layer(layer)?, context };
        let place = backend.place(x);
        let request = Request::new(&self.shared.model, place, x, topk_idx, topk_weights, true)?;
        match backend {
            Backend::Host(moe) => handle::dispatch(py, moe, layer, request, x, &self.shared),
            Backend::Gpu(gpu) => {
                let work = (request, place.stream());
                let arrays = [x, topk_idx, topk_weights];
                handle::dispatch_on_gpu(py, gpu, layer, work, arrays, &self.shared)
            }
        }
    }

    /// Wait for the answers to ``handle`` and return their weighted sums. Blocks and raises as ``forward``.
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
        handle::combine(py, handle, out, report, &self.shared)
    }

    /// Launch the combine of a call on a GPU, for ``acombine``.
    #[pyo3(signature = (handle, *, out=None))]
    fn _begin_combine<'py>(
        &self,
        py: Python<'py>,
        handle: &Bound<'py, Handle>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<()> {
        self.shared.check_process(py)?;
        handle::begin_combine(py, handle, out, &self.shared)
    }

    /// Wait for a call on a GPU whose combine was launched.
    #[pyo3(signature = (handle, *, report=None))]
    fn _end_combine<'py>(
        &self,
        py: Python<'py>,
        handle: &Bound<'py, Handle>,
        report: Option<&Bound<'py, Report>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.shared.check_process(py)?;
        handle::end_combine(py, handle, report, &self.shared)
    }

    /// Return the client's metrics in the text format of Prometheus.
    fn metrics_text(&self, py: Python<'_>) -> PyResult<String> {
        let families = self.open(py)?.registry().gather();
        logs::flush(py);
        TextEncoder::new()
            .encode_to_string(&families)
            .map_err(|failure| error(py, Kind::Error, failure.to_string()))
    }

    /// Return counters of arrays that calls had to convert in a copy: ``x_copies``, ``topk_idx_copies``,
    /// ``topk_weights_copies`` and ``out_copies``.
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

    /// End the connections. Calls in progress go on. Blocks for 2 s at most, and with traces for 3 s more, until the
    /// collector has the last spans.
    fn close(&self, py: Python<'_>) {
        let backend = self.lock().take();
        if self.shared.is_forked() {
            // Its threads are in the parent only: waiting for them would never end.
            std::mem::forget(backend);
        } else {
            py.detach(|| {
                drop(backend);
                self.shared.traces.flush();
            });
            logs::flush(py);
        }
    }
}

impl Client {
    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Backend>> {
        self.backend.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The client, unless it is closed or belongs to another process.
    fn open(&self, py: Python<'_>) -> PyResult<Backend> {
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
        let backend = self.lock().take();
        release(backend, &self.shared);
    }
}

/// The exception for a client that does not get ready.
fn not_ready(py: Python<'_>, shared: &Shared, failure: &Failure) -> PyErr {
    match failure {
        Failure::Client(failure @ ClientError::NoReplica { .. }) => {
            error(py, Kind::NotReady, format!("the expert service is not ready: {failure}"))
        }
        other => call::raise(py, shared, other),
    }
}

/// Drops a value whose drop may wait for the client's threads, without keeping other Python threads from running.
fn release<T: Send>(value: Option<T>, shared: &Shared) {
    let Some(value) = value else { return };
    if shared.is_forked() {
        std::mem::forget(value);
        return;
    }
    // Without an interpreter to attach to, the value is dropped by the closure that does not run.
    Python::try_attach(|py| py.detach(|| drop(value)));
}
