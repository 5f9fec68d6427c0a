//! The arithmetic that the GPU kernels can compute. Without a GPU or its features, so that tools can ask beforehand.

use checkpoint::{Activation, ExpertArithmetic, WeightFormat, Weighting};

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

/// Returns true if the GPU kernels read the format as it is. Others are widened to bf16 in GPU memory.
#[must_use]
pub fn gpu_reads(format: WeightFormat) -> bool {
    match format {
        WeightFormat::Bf16 => true,
        WeightFormat::F8E4m3 { block } => block == [SCALE_BLOCK; 2],
        _ => false,
    }
}
