//! Handles: calls that are dispatched by one call of Python and combined by another.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use attention_client::MoeClient;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use super::arguments::{RawRequest, Request, Target};
use super::call::{Finished, LayerCall, Scratch, finish, floats, indices, raise};
use super::gpu::{GpuCall, GpuClient};
use super::report::{CallReport, Report};
use super::{Shared, release};
use crate::dlpack::{Array, Owner, Place};
use crate::errors::{Kind, error};
use crate::interrupt::Interrupt;

/// A dispatched layer. It keeps `x` alive and its tokens to itself until it is combined.
#[pyclass(module = "switchyard_moe._native", frozen, generic)]
pub struct Handle {
    pending: Mutex<Option<Pending>>,
    shared: Arc<Shared>,
    x: Py<PyAny>,
    matrix: RawRequest,
    layer: u32,
    /// Result of a call on a GPU whose combine was launched.
    result: PyOnceLock<Py<PyAny>>,
}

/// The call of a handle.
#[allow(clippy::large_enum_variant, reason = "there is one for each handle")]
enum Pending {
    Host(HostCall),
    Gpu(GpuCall),
}

/// A call of host memory, and the memory that it reads.
struct HostCall {
    // Dropped in this order: the call first, then what it reads.
    handle: attention_client::Handle<'static>,
    moe: MoeClient,
    _widened: Vec<f32>,
    owner: Owner,
}

#[pymethods]
impl Handle {
    /// Number of the layer.
    #[getter]
    fn layer(&self) -> u32 {
        self.layer
    }

    /// Tokens of the call.
    #[getter]
    fn num_tokens(&self) -> usize {
        self.matrix.x.rows
    }

    /// Whether the handle was combined.
    #[getter]
    fn done(&self) -> bool {
        self.lock().is_none()
    }

    fn __repr__(&self) -> String {
        format!(
            "Handle(layer={}, num_tokens={}, done={})",
            self.layer,
            self.matrix.x.rows,
            self.done()
        )
    }
}

impl Handle {
    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Pending>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let pending = self.lock().take();
        release(pending, &self.shared);
    }
}

/// Sends the tokens of one layer. `x` stays alive, and must not be written, until the handle is combined or dropped.
pub fn dispatch(
    py: Python<'_>,
    moe: MoeClient,
    layer: LayerCall,
    request: Request<'_, '_>,
    x: &Bound<'_, PyAny>,
    shared: &Arc<Shared>,
) -> PyResult<Handle> {
    let raw = request.raw();
    let (owner, others) = request.into_owners();
    let copies = &shared.copies;
    let (result, interrupt) = py.detach(move || {
        let interrupt = Interrupt::new();
        let result = Scratch::with(|scratch| {
            let mut widened = Vec::new();
            // SAFETY: `owner` and the handle's Python object keep the memory of x valid as long as the handle lives.
            // `others` and the caller's objects keep indices and weights valid until this call returns.
            let (x, topk_idx, topk_weights) = unsafe {
                let x = floats(raw.x, &mut widened, &copies.x);
                (
                    std::slice::from_raw_parts(x.as_ptr(), x.len()),
                    indices(raw.topk_idx, &mut scratch.topk_idx, &copies.topk_idx)?,
                    floats(raw.topk_weights, &mut scratch.topk_weights, &copies.topk_weights),
                )
            };
            let mut handle =
                moe.dispatch_unless(layer.number, x, topk_idx, topk_weights, &|| {
                    interrupt.is_due()
                })?;
            if let Some(context) = layer.context {
                handle.set_trace_context(context);
            }
            Ok(Pending::Host(HostCall { handle, moe, _widened: widened, owner }))
        });
        (result, interrupt)
    });
    drop(others);
    crate::logs::flush(py);
    match result {
        Ok(pending) => Ok(Handle {
            pending: Mutex::new(Some(pending)),
            shared: Arc::clone(shared),
            x: x.clone().unbind(),
            matrix: raw,
            layer: layer.number,
            result: PyOnceLock::new(),
        }),
        Err(failure) => {
            interrupt.check()?;
            Err(raise(py, shared, &failure))
        }
    }
}

/// Launches the dispatch of one layer on a GPU. All arrays stay alive, and must not be written, until the handle is
/// combined or dropped.
pub fn dispatch_on_gpu(
    py: Python<'_>,
    gpu: Arc<GpuClient>,
    layer: LayerCall,
    (request, stream): (Request<'_, '_>, u64),
    [x, topk_idx, topk_weights]: [&Bound<'_, PyAny>; 3],
    shared: &Arc<Shared>,
) -> PyResult<Handle> {
    let raw = request.raw();
    let others: Vec<u64> = request.other_streams().collect();
    let (owner, [idx_owner, weights_owner]) = request.into_owners();
    let owners = vec![owner, idx_owner, weights_owner];
    let objects = [x, topk_idx, topk_weights].map(|object| object.clone().unbind()).into();
    let (result, interrupt) = py.detach(move || {
        let interrupt = Interrupt::new();
        // SAFETY: Owners and objects keep the memory valid. The streams are the libraries' current ones; the
        // documentation of `dispatch` asks for the stream and the content of the arrays.
        let result = unsafe {
            let copies = &shared.copies;
            GpuCall::dispatch(
                &gpu, &interrupt, layer, raw, stream, &others, copies, owners, objects,
            )
        };
        (result, interrupt)
    });
    crate::logs::flush(py);
    interrupt.check()?;
    let call = result.map_err(|failure| raise(py, shared, &failure))?;
    Ok(Handle {
        pending: Mutex::new(Some(Pending::Gpu(call))),
        shared: Arc::clone(shared),
        x: x.clone().unbind(),
        matrix: raw,
        layer: layer.number,
        result: PyOnceLock::new(),
    })
}

/// Waits for the answers to `handle`.
pub fn combine<'py>(
    py: Python<'py>,
    handle: &Bound<'py, Handle>,
    out: Option<&Bound<'py, PyAny>>,
    report: Option<&Bound<'py, Report>>,
    shared: &Arc<Shared>,
) -> PyResult<Bound<'py, PyAny>> {
    let this = handle.get();
    let is_on_gpu = match &*this.lock() {
        Some(pending) => matches!(pending, Pending::Gpu(_)),
        None => return Err(combined_before(py)),
    };
    if is_on_gpu {
        begin_combine(py, handle, out, shared)?;
        return end_combine(py, handle, report, shared);
    }
    let target = target_of(py, handle, out, Place::Host, shared)?;
    let Some(Pending::Host(call)) = this.lock().take() else { return Err(combined_before(py)) };
    let raw = target.raw();
    // The owner of x goes with the interpreter: it may be an object of Python.
    let (result, interrupt, _owner) = py.detach(|| {
        let interrupt = Interrupt::new();
        let HostCall { handle, moe, _widened, owner } = call;
        let result = Scratch::with(|scratch| {
            // SAFETY: `target` keeps the memory valid until after this call.
            unsafe {
                finish(&moe, handle, raw, &shared.copies, &mut scratch.out, &|| interrupt.is_due())
            }
        });
        drop(moe);
        (result, interrupt, owner)
    });
    Finished { shared, report, result, interrupt }.conclude(py)?;
    target.into_object(py)
}

/// Launches the combine of a call on a GPU, on the stream of its dispatch.
pub fn begin_combine<'py>(
    py: Python<'py>,
    handle: &Bound<'py, Handle>,
    out: Option<&Bound<'py, PyAny>>,
    shared: &Arc<Shared>,
) -> PyResult<()> {
    let this = handle.get();
    let place = match &*this.lock() {
        Some(Pending::Gpu(call)) if !call.is_combined() => call.place(),
        _ => return Err(combined_before(py)),
    };
    let target = target_of(py, handle, out, place, shared)?;
    let Some(Pending::Gpu(mut call)) = this.lock().take() else { return Err(combined_before(py)) };
    let (raw, other) = (target.raw(), target.other_stream());
    let (object, owner) = target.into_parts();
    let kept = (object.clone_ref(py), owner);
    // A failed call goes without the interpreter: dropping it locks the client.
    let result = py.detach(move || {
        // SAFETY: The call keeps the array until it has finished. The streams are those of libraries.
        unsafe { call.combine(raw, other, &shared.copies, kept) }.map(|()| call)
    });
    let call = result.map_err(|failure| raise(py, shared, &failure))?;
    // Set once: only a call that was not combined comes here.
    let _ = this.result.set(py, object);
    *this.lock() = Some(Pending::Gpu(call));
    Ok(())
}

/// Waits for a call whose combine was launched.
pub fn end_combine<'py>(
    py: Python<'py>,
    handle: &Bound<'py, Handle>,
    report: Option<&Bound<'py, Report>>,
    shared: &Arc<Shared>,
) -> PyResult<Bound<'py, PyAny>> {
    let this = handle.get();
    let Some(Pending::Gpu(call)) = this.lock().take() else { return Err(combined_before(py)) };
    let (result, interrupt) = py.detach(|| {
        let interrupt = Interrupt::new();
        (call.finish(&interrupt, Instant::now()).map(CallReport::from), interrupt)
    });
    Finished { shared, report, result, interrupt }.conclude(py)?;
    match this.result.get(py) {
        Some(object) => Ok(object.bind(py).clone()),
        None => Err(combined_before(py)),
    }
}

/// Checks `out`, or makes an array like the tokens of `handle`.
fn target_of<'py>(
    py: Python<'py>,
    handle: &Bound<'py, Handle>,
    out: Option<&Bound<'py, PyAny>>,
    place: Place,
    shared: &Arc<Shared>,
) -> PyResult<Target<'py>> {
    let this = handle.get();
    if !Arc::ptr_eq(&this.shared, shared) {
        let text = "handle is of another client: combine it with its own";
        return Err(error(py, Kind::Argument, text));
    }
    let x = this.matrix.x;
    // A call on a GPU may end on another thread, and is abandoned with its arrays.
    let is_kept = place != Place::Host;
    let target = match out {
        Some(out) => Target::of(x, place, out, is_kept)?,
        None => Target::like(x, place, &Array::of("x", this.x.bind(py), false, place)?, is_kept)?,
    };
    // On the host a dispatch has read the other arrays.
    let RawRequest { topk_idx, topk_weights, .. } = this.matrix;
    let read = [("x", x), ("topk_idx", topk_idx), ("topk_weights", topk_weights)];
    let num_read = if place == Place::Host { 1 } else { read.len() };
    for (name, input) in &read[..num_read] {
        if target.raw().out.overlaps(input) {
            let text = format!("out shares memory with {name}, expected an array of its own");
            return Err(error(py, Kind::Argument, text));
        }
    }
    Ok(target)
}

fn combined_before(py: Python<'_>) -> PyErr {
    error(py, Kind::Argument, "handle was combined before: a handle stands for one call")
}
