//! The arithmetic that the GPU kernels can compute. Without a GPU or its features, so that tools can ask beforehand.

use checkpoint::{Activation, ExpertArithmetic, ModelConfig, WeightFormat, Weighting};

/// `SY_MAX_EXPERTS` and the largest top-k of `kernels/include/switchyard/abi.h`.
const MAX_EXPERTS: u32 = 1024;
const MAX_TOP_K: usize = 16;

/// Side of the square scale blocks that the GPU kernels read.
const SCALE_BLOCK: usize = 128;

/// The part of the experts' arithmetic that the GPU kernels lack, if there is one. Ends a sentence that starts with
/// "the GPU kernels have no".
#[must_use]
pub fn gpu_lacks(arithmetic: ExpertArithmetic, has_biases: bool) -> Option<String> {
    match arithmetic.activation {
        Activation::SILU => {}
        activation if !activation.is_gated() => {
            return Some(format!("experts without a gate (activation {activation})"));
        }
        activation => return Some(format!("activation {activation}, only silu")),
    }
    if arithmetic.weighting == Weighting::Input {
        return Some("router factors on the experts' input".to_owned());
    }
    has_biases.then(|| "biases of experts".to_owned())
}

/// The size of a model that the GPU kernels cannot have, if there is one. Ends a sentence that starts with "the GPU
/// kernels need". A server's GPU, slot and wire format may set further limits.
#[must_use]
pub fn gpu_needs(model: &ModelConfig) -> Option<String> {
    let (hidden, width, num_experts) = (model.hidden, model.moe_intermediate, model.num_experts);
    let multiple = |what: &str, found: usize, of: usize| {
        (found == 0 || !found.is_multiple_of(of))
            .then(|| format!("a {what} that is a multiple of {of}, found {found}"))
    };
    multiple("hidden size", hidden, 128)
        .or_else(|| multiple("width of experts", width, 64))
        .or_else(|| {
            (num_experts > MAX_EXPERTS)
                .then(|| format!("at most {MAX_EXPERTS} experts in a layer, found {num_experts}"))
        })
        .or_else(|| {
            let top_k = model.top_k;
            (top_k > MAX_TOP_K)
                .then(|| format!("at most {MAX_TOP_K} experts for a token, found {top_k}"))
        })
}

/// Returns true if the GPU kernels read the format as it is. Others are widened to bf16 in GPU memory.
#[must_use]
pub fn gpu_reads(format: WeightFormat) -> bool {
    match format {
        WeightFormat::Bf16 => true,
        WeightFormat::F8E4m3 { block } => block == [SCALE_BLOCK; 2],
        _ => false,
    }
}
