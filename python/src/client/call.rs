//! Calls without the interpreter: conversions, dispatch and combine.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError};

use attention_client::{ClientError, ModelShape, MoeClient};
use half::slice::HalfFloatSliceExt as _;
use half::{bf16, f16};
use pyo3::prelude::*;

use super::arguments::{RawRequest, RawTarget, Request, Target};
use super::report::{CallReport, Report};
use super::{Copies, Shared, release};
use crate::dlpack::{Array, ElementType, Matrix, Owner};
use crate::errors::{self, Kind, error};
use crate::interrupt::Interrupt;

/// Buffers of a thread for tensors that a call has to convert. They keep the size of the largest call.
#[derive(Debug, Default)]
pub struct Scratch {
    x: Vec<f32>,
    topk_idx: Vec<i32>,
    topk_weights: Vec<f32>,
    out: Vec<f32>,
}

impl Scratch {
    /// Runs `f` with the thread's buffers.
    pub fn with<T>(f: impl FnOnce(&mut Self) -> T) -> T {
        thread_local! {
            static SCRATCH: RefCell<Scratch> = RefCell::default();
        }
        // Taken out: a signal handler may make a call of its own while this one waits.
        let mut scratch = SCRATCH.take();
        let result = f(&mut scratch);
        SCRATCH.set(scratch);
        result
    }
}

impl Scratch {
    /// Grows the buffers for calls of `num_tokens` tokens, and touches their memory. The buffers of `x` and `out` only
    /// with `is_widened`.
    pub fn reserve(&mut self, num_tokens: usize, shape: &ModelShape, is_widened: bool) {
        let num_pairs = num_tokens * shape.top_k as usize;
        if is_widened {
            let num_values = num_tokens * shape.hidden as usize;
            for values in [&mut self.x, &mut self.out] {
                grow(values, num_values, 0.0);
            }
        }
        grow(&mut self.topk_idx, num_pairs, 0);
        grow(&mut self.topk_weights, num_pairs, 0.0);
    }
}

fn grow<T: Clone>(values: &mut Vec<T>, len: usize, value: T) {
    if values.len() < len {
        values.resize(len, value);
    }
}

/// The failure of a call.
#[derive(Debug)]
pub enum Failure {
    Client(ClientError),
    /// An index beyond 32 bits.
    Index {
        token: usize,
        found: i64,
    },
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        Self::Client(error)
    }
}

/// Dispatches and combines one layer.
///
/// # Safety
/// The matrices stay valid, and no other thread writes them meanwhile, nor reads the target.
pub unsafe fn forward(
    moe: &MoeClient,
    layer: u32,
    request: RawRequest,
    target: RawTarget,
    copies: &Copies,
    scratch: &mut Scratch,
    interrupt: &Interrupt,
) -> Result<CallReport, Failure> {
    let Scratch { x, topk_idx, topk_weights, out } = scratch;
    let cancelled = || interrupt.is_due();
    // SAFETY: The caller keeps the matrices valid and unwritten.
    let (x, topk_idx, topk_weights) = unsafe {
        (
            floats(request.x, x, &copies.x),
            indices(request.topk_idx, topk_idx, &copies.topk_idx)?,
            floats(request.topk_weights, topk_weights, &copies.topk_weights),
        )
    };
    let handle = moe.dispatch_unless(layer, x, topk_idx, topk_weights, &cancelled)?;
    // SAFETY: The caller keeps the target valid and to this call alone.
    unsafe { finish(moe, handle, target, copies, out, &cancelled) }
}

/// Combines into `target`.
///
/// # Safety
/// The target stays valid, and no other thread accesses it meanwhile.
unsafe fn finish(
    moe: &MoeClient,
    handle: attention_client::Handle<'_>,
    RawTarget { out }: RawTarget,
    copies: &Copies,
    scratch: &mut Vec<f32>,
    cancelled: &dyn Fn() -> bool,
) -> Result<CallReport, Failure> {
    if out.element == ElementType::F32 {
        // SAFETY: The caller gives this memory to the call alone. `Array::matrix` checked type and alignment.
        let out =
            unsafe { std::slice::from_raw_parts_mut(out.data.as_ptr().cast::<f32>(), out.len()) };
        return combine_reported(moe, handle, out, cancelled);
    }
    copies.out.inc();
    scratch.resize(out.len(), 0.0);
    let report = combine_reported(moe, handle, scratch, cancelled)?;
    // SAFETY: As above.
    unsafe {
        match out.element {
            ElementType::Bf16 => {
                std::slice::from_raw_parts_mut(out.data.as_ptr().cast::<bf16>(), out.len())
                    .convert_from_f32_slice(scratch);
            }
            _ => {
                std::slice::from_raw_parts_mut(out.data.as_ptr().cast::<f16>(), out.len())
                    .convert_from_f32_slice(scratch);
            }
        }
    }
    Ok(report)
}

fn combine_reported(
    moe: &MoeClient,
    handle: attention_client::Handle<'_>,
    out: &mut [f32],
    cancelled: &dyn Fn() -> bool,
) -> Result<CallReport, Failure> {
    let mut servers = Vec::new();
    let timing = moe.combine_reported(handle, out, Some(&mut servers), cancelled)?;
    Ok(CallReport { timing, servers })
}

/// The values of `matrix`: its own memory for f32, else a copy in `scratch`.
///
/// # Safety
/// The memory stays valid and unwritten as long as the result is in use.
unsafe fn floats<'s>(
    matrix: Matrix,
    scratch: &'s mut Vec<f32>,
    copies: &attention_client::prometheus::IntCounter,
) -> &'s [f32] {
    let (data, len) = (matrix.data.as_ptr(), matrix.len());
    if matrix.element == ElementType::F32 {
        // SAFETY: The caller says so. `Array::matrix` checked type and alignment.
        return unsafe { std::slice::from_raw_parts(data.cast(), len) };
    }
    copies.inc();
    scratch.resize(len, 0.0);
    // SAFETY: As above.
    unsafe {
        match matrix.element {
            ElementType::Bf16 => {
                std::slice::from_raw_parts(data.cast::<bf16>(), len).convert_to_f32_slice(scratch)
            }
            _ => std::slice::from_raw_parts(data.cast::<f16>(), len).convert_to_f32_slice(scratch),
        }
    }
    scratch
}

/// The indices of `matrix`: its own memory for 32 bits, else a copy in `scratch`.
///
/// # Safety
/// As for [`floats`].
unsafe fn indices<'s>(
    matrix: Matrix,
    scratch: &'s mut Vec<i32>,
    copies: &attention_client::prometheus::IntCounter,
) -> Result<&'s [i32], Failure> {
    let (data, len) = (matrix.data.as_ptr(), matrix.len());
    if matrix.element == ElementType::I32 {
        // SAFETY: The caller says so. `Array::matrix` checked type and alignment.
        return Ok(unsafe { std::slice::from_raw_parts(data.cast(), len) });
    }
    copies.inc();
    scratch.clear();
    // SAFETY: As above.
    let wide = unsafe { std::slice::from_raw_parts(data.cast::<i64>(), len) };
    for (position, &found) in wide.iter().enumerate() {
        let Ok(index) = i32::try_from(found) else {
            return Err(Failure::Index { token: position / matrix.cols, found });
        };
        scratch.push(index);
    }
    Ok(scratch)
}

/// A call that has ended.
pub struct Finished<'a, 'py> {
    pub shared: &'a Shared,
    pub report: Option<&'a Bound<'py, Report>>,
    pub result: Result<CallReport, Failure>,
    pub interrupt: Interrupt,
}

impl Finished<'_, '_> {
    /// Fills in the report, or raises the call's failure or that of a signal's handler.
    pub fn conclude(self, py: Python<'_>) -> PyResult<()> {
        match self.result {
            Ok(call) => {
                self.shared.note(py, self.report, call);
                Ok(())
            }
            Err(failure) => {
                crate::logs::flush(py);
                self.interrupt.check()?;
                Err(raise(py, self.shared, &failure))
            }
        }
    }
}

fn raise(py: Python<'_>, shared: &Shared, failure: &Failure) -> PyErr {
    match failure {
        Failure::Client(failure) => errors::of_call(py, failure),
        Failure::Index { token, found } => {
            let last = shared.model.shape.num_experts.saturating_sub(1);
            let text = format!("topk_idx of token {token} is {found}, expected -1 or 0 to {last}");
            error(py, Kind::Argument, text)
        }
    }
}

/// A dispatched layer. It keeps `x` alive and its tokens to itself until it is combined.
#[pyclass(module = "switchyard_moe._native", frozen, generic)]
pub struct Handle {
    pending: Mutex<Option<Pending>>,
    shared: Arc<Shared>,
    x: Py<PyAny>,
    matrix: RawRequest,
    layer: u32,
}

/// The call of a handle, and the memory that it reads.
struct Pending {
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
    layer: u32,
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
            let handle =
                moe.dispatch_unless(layer, x, topk_idx, topk_weights, &|| interrupt.is_due())?;
            Ok(Pending { handle, moe, _widened: widened, owner })
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
            layer,
        }),
        Err(failure) => {
            interrupt.check()?;
            Err(raise(py, shared, &failure))
        }
    }
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
    if !Arc::ptr_eq(&this.shared, shared) {
        return Err(error(
            py,
            Kind::Argument,
            "handle is of another client: combine it with its own",
        ));
    }
    let x = this.matrix.x;
    let target = match out {
        Some(out) => Target::of(x, out)?,
        None => Target::like(x, &Array::of("x", this.x.bind(py), false)?)?,
    };
    if target.raw().out.overlaps(&x) {
        return Err(error(
            py,
            Kind::Argument,
            "out shares memory with x, expected an array of its own",
        ));
    }
    let Some(pending) = this.lock().take() else {
        return Err(error(
            py,
            Kind::Argument,
            "handle was combined before: a handle stands for one call",
        ));
    };
    let raw = target.raw();
    // The owner of x goes with the interpreter: it may be an object of Python.
    let (result, interrupt, _owner) = py.detach(|| {
        let interrupt = Interrupt::new();
        let Pending { handle, moe, _widened, owner } = pending;
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
