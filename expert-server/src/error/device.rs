//! Why a GPU cannot serve.

use kernels::check::CheckError;
use kernels::gpu::{DeviceName, GpuError};
use protocol::WireDtype;

use crate::compute::LoadError;

/// Why experts cannot be served from a GPU.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The GPU cannot be opened.
    #[error("cannot use {device}: {source}")]
    Open { device: DeviceName, source: GpuError },
    /// The kernels do not support this model.
    #[error(
        "the GPU kernels cannot serve this model (hidden {hidden}, intermediate {inter}, top-{top_k} of {num_experts} experts): {source}; serve it with `--device cpu`"
    )]
    Model { hidden: usize, inter: usize, top_k: usize, num_experts: u32, source: CheckError },
    /// The kernels do not compute experts of this kind.
    #[error("the GPU kernels have no {what}; serve this model on the CPU (`--device cpu`)")]
    Arithmetic { what: String },
    /// The kernels do not read requests of this type.
    #[error("requests to a GPU cannot be {found}: expected bf16 or fp8")]
    Dtype { found: WireDtype },
    /// The kernels cannot use slots of this size or number of frames.
    #[error(
        "no frame for this model fits a slot of {slot_bytes} bytes with {num_frames} frames: a GPU needs a power of two up to 8 frames, and room for a token in each; raise the slot's size"
    )]
    Slot { slot_bytes: usize, num_frames: usize },
    /// The GPU has too little free memory.
    #[error(
        "{what} need {:.2} GiB, {device} has {:.2} GiB free: hold fewer experts, allow smaller batches, or take another GPU",
        gib(*.needed_bytes),
        gib(*.free_bytes)
    )]
    Memory { what: &'static str, needed_bytes: u64, device: DeviceName, free_bytes: u64 },
    /// The threads that post for kernels cannot be started.
    #[error(transparent)]
    Proxy(#[from] proxy::ProxyError),
    /// The GPU refused weights.
    #[error("cannot put {what} onto the GPU: {source}")]
    Weights { what: String, source: GpuError },
    /// Another call to the GPU failed.
    #[error(transparent)]
    Gpu(#[from] GpuError),
}

impl From<DeviceError> for LoadError {
    fn from(error: DeviceError) -> Self {
        Self::Device(Box::new(error))
    }
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lack_of_memory_is_reported_in_gib() {
        let error = DeviceError::Memory {
            what: "the experts",
            needed_bytes: 3 << 30,
            device: DeviceName::Cuda(1),
            free_bytes: 1 << 29,
        };
        let text = error.to_string();
        assert!(text.starts_with("the experts need 3.00 GiB, cuda:1 has 0.50 GiB free"), "{text}");
    }
}
