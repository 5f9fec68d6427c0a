//! Whole calls with arrays in GPU memory.

use std::sync::Arc;
use std::time::Instant;

use attention_client::LayerTiming;
use pyo3::prelude::*;

use super::Shared;
use super::arguments::{RawRequest, RawTarget, Request, Target};
use super::call::{Finished, LayerCall};
use super::gpu::{GpuCall, GpuClient};
use super::report::{CallReport, Report};
use crate::interrupt::Interrupt;

/// Dispatches and combines one layer on a GPU. A batch that is larger than a frame goes in parts, one after the other.
pub fn forward<'py>(
    py: Python<'py>,
    gpu: Arc<GpuClient>,
    layer: LayerCall,
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
        let call = |part: (RawRequest, RawTarget)| {
            // SAFETY: The arrays live in `request` and `target` until after this call, which waits for the kernels. If
            // it fails before they have ended, `keep` takes the arrays below.
            let launched = unsafe {
                GpuCall::launch(&gpu, &interrupt, layer, part, stream, &others, &shared.copies)
            };
            let since = Instant::now();
            launched.and_then(|call| call.finish(&interrupt, since))
        };
        let part_tokens = gpu.part_tokens();
        let result = if tensors.0.x.rows <= gpu.max_tokens() {
            call(tensors)
        } else {
            let firsts = (0..tensors.0.x.rows).step_by(part_tokens);
            firsts.map(|first| part(tensors, first, part_tokens)).map(call).try_fold(
                LayerTiming::default(),
                |mut total, timing| {
                    total.add_part(&timing?);
                    Ok(total)
                },
            )
        };
        let result = result.map(CallReport::from);
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

/// The rows of all arrays from `first` on, `rows` at most.
fn part(
    (request, target): (RawRequest, RawTarget),
    first: usize,
    rows: usize,
) -> (RawRequest, RawTarget) {
    let request = RawRequest {
        x: request.x.part(first, rows),
        topk_idx: request.topk_idx.part(first, rows),
        topk_weights: request.topk_weights.part(first, rows),
    };
    (request, RawTarget { out: target.out.part(first, rows) })
}
