//! Calls without the interpreter: conversions, dispatch and combine.

use std::cell::RefCell;

use attention_client::device::GpuError;
use attention_client::{ClientError, DeviceError, ModelShape, MoeClient, TraceContext};
use half::slice::HalfFloatSliceExt as _;
use half::{bf16, f16};
use pyo3::prelude::*;

use super::arguments::{RawRequest, RawTarget};
use super::report::{CallReport, Report};
use super::{Copies, Shared};
use crate::dlpack::{ElementType, Matrix};
use crate::errors::{self, Kind, error};
use crate::interrupt::Interrupt;

/// Buffers of a thread for tensors that a call has to convert. They keep the size of the largest call.
#[derive(Debug, Default)]
pub struct Scratch {
    x: Vec<f32>,
    pub topk_idx: Vec<i32>,
    pub topk_weights: Vec<f32>,
    pub out: Vec<f32>,
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
    Device(DeviceError),
    /// The stream of a call on a GPU records instead of running.
    Capturing,
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

impl From<DeviceError> for Failure {
    fn from(error: DeviceError) -> Self {
        match error {
            DeviceError::Client(error) => Self::Client(error),
            error => Self::Device(error),
        }
    }
}

impl From<GpuError> for Failure {
    fn from(error: GpuError) -> Self {
        Self::Device(error.into())
    }
}

/// The layer of a call, and the trace of its caller.
#[derive(Debug, Clone, Copy)]
pub struct LayerCall {
    pub number: u32,
    pub context: Option<TraceContext>,
}

/// Dispatches and combines one layer.
///
/// # Safety
/// The matrices stay valid, and no other thread writes them meanwhile, nor reads the target.
pub unsafe fn forward(
    moe: &MoeClient,
    layer: LayerCall,
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
    let mut handle = moe.dispatch_unless(layer.number, x, topk_idx, topk_weights, &cancelled)?;
    if let Some(context) = layer.context {
        handle.set_trace_context(context);
    }
    // SAFETY: The caller keeps the target valid and to this call alone.
    unsafe { finish(moe, handle, target, copies, out, &cancelled) }
}

/// Combines into `target`.
///
/// # Safety
/// The target stays valid, and no other thread accesses it meanwhile.
pub unsafe fn finish(
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
pub unsafe fn floats<'s>(
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
pub unsafe fn indices<'s>(
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

/// The exception for a failed call.
pub fn raise(py: Python<'_>, shared: &Shared, failure: &Failure) -> PyErr {
    match failure {
        Failure::Client(failure) => errors::of_call(py, failure),
        Failure::Device(failure) => errors::of_device(py, failure),
        Failure::Capturing => {
            let text = "the current stream is being captured into a CUDA graph, which cannot hold a call of the \
                        expert service: end the capture before the call, and begin another behind it";
            error(py, Kind::Argument, text)
        }
        Failure::Index { token, found } => {
            let last = shared.model.shape.num_experts.saturating_sub(1);
            let text = format!("topk_idx of token {token} is {found}, expected -1 or 0 to {last}");
            error(py, Kind::Argument, text)
        }
    }
}
