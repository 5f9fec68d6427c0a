//! Whole calls with arrays in GPU memory.

use std::sync::Arc;
use std::time::Instant;

use pyo3::prelude::*;

use super::Shared;
use super::arguments::{Request, Target};
use super::call::Finished;
use super::gpu::{GpuCall, GpuClient};
use super::report::{CallReport, Report};
use crate::interrupt::Interrupt;

/// Dispatches and combines one layer on a GPU.
pub fn forward<'py>(
    py: Python<'py>,
    gpu: Arc<GpuClient>,
    layer: u32,
    (request, stream): (&Request<'_, 'py>, u64),
    target: Target<'py>,
    report: Option<&Bound<'py, Report>>,
    shared: &Shared,
) -> PyResult<Bound<'py, PyAny>> {
    let tensors = (request.raw(), target.raw());
    let mut others: Vec<u64> = request.other_streams().collect();
    others.extend(target.other_stream());
    let (result, interrupt, gpu) = py.detach(move || {
        let interrupt = Interrupt::new();
        // SAFETY: The arrays live in `request` and `target` until after this call, which waits for the kernels. If it
        // fails before they have ended, `keep` takes the arrays below.
        let launched = unsafe {
            GpuCall::launch(&gpu, &interrupt, layer, tensors, stream, &others, &shared.copies)
        };
        let since = Instant::now();
        let result = launched.and_then(|call| call.finish(&interrupt, since)).map(CallReport::from);
        let failed = result.is_err().then_some(gpu);
        (result, interrupt, failed)
    });
    if let Some(gpu) = gpu {
        let arrays = request.objects().chain([target.object()]);
        let arrays = arrays.map(|object| object.clone().unbind()).collect();
        py.detach(move || gpu.keep(arrays));
    }
    Finished { shared, report, result, interrupt }.conclude(py)?;
    target.into_object(py)
}
