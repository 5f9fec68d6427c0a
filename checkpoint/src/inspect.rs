//! A description of a checkpoint, from headers alone.

use std::collections::BTreeMap;

use crate::open::Checkpoint;
use crate::tensor::TensorError;

/// The experts of a checkpoint, by format and size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertSummary {
    /// Routed experts in all layers.
    pub num_experts: u64,
    /// Matrices by the name of their format, such as `int4/32`, with their number.
    pub formats: BTreeMap<String, u64>,
    /// Bytes of all experts in the form for computing.
    pub computing_bytes: u64,
    /// Bytes of the largest expert in the form for computing.
    pub largest_expert_bytes: u64,
    /// Bytes of all experts widened to bf16.
    pub bf16_bytes: u64,
    /// Experts have biases.
    pub has_biases: bool,
    /// Matrices whose columns are reordered by activation, see
    /// [`WeightView::is_reordered`](crate::WeightView::is_reordered).
    pub reordered: ReorderedSummary,
}

/// Matrices that are dequantised because their columns are reordered by activation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReorderedSummary {
    /// Their number.
    pub matrices: u64,
    /// Bytes of their codes and scales in the files.
    pub stored_bytes: u64,
    /// Bytes in the form for computing.
    pub computing_bytes: u64,
}

impl Checkpoint {
    /// Describes the routed experts and checks each of them, as loading does. Reads headers, and the zero points of
    /// integer formats, but no weights.
    ///
    /// # Errors
    /// The first [`TensorError`] that loading would meet.
    pub fn summarise_experts(&self) -> Result<ExpertSummary, TensorError> {
        let mut summary = ExpertSummary {
            num_experts: 0,
            formats: BTreeMap::new(),
            computing_bytes: 0,
            largest_expert_bytes: 0,
            bf16_bytes: 0,
            has_biases: false,
            reordered: ReorderedSummary::default(),
        };
        for layer in self.config().moe_layers() {
            for expert in 0..self.config().num_experts {
                let tensors = self.expert(layer, expert)?;
                let bytes = tensors.computing_bytes() as u64;
                summary.num_experts += 1;
                summary.computing_bytes += bytes;
                summary.largest_expert_bytes = summary.largest_expert_bytes.max(bytes);
                summary.has_biases |= tensors.biases.is_some();
                for matrix in tensors.matrices() {
                    let values = (matrix.rows() * matrix.cols()) as u64;
                    summary.bf16_bytes += 2 * values;
                    if matrix.is_reordered() {
                        summary.reordered.matrices += 1;
                        summary.reordered.stored_bytes += matrix.stored_bytes() as u64;
                        summary.reordered.computing_bytes += matrix.computing_bytes() as u64;
                    }
                    *summary.formats.entry(matrix.format().to_string()).or_insert(0) += 1;
                }
            }
        }
        Ok(summary)
    }
}
