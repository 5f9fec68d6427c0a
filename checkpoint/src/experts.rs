//! Experts and routers by layer, independent of the family's tensor names.

use crate::FP8_BLOCK;
use crate::config::Architecture;
use crate::convert;
use crate::dtype::DType;
use crate::open::Checkpoint;
use crate::tensor::{FLOATS, TensorError, TensorView};

/// The three matrices of a SwiGLU expert: `down(silu(gate(x)) * up(x))`.
#[derive(Debug, Clone, Copy)]
pub struct ExpertTensors<'a> {
    /// `[moe_intermediate, hidden]`.
    pub gate: WeightView<'a>,
    /// `[moe_intermediate, hidden]`.
    pub up: WeightView<'a>,
    /// `[hidden, moe_intermediate]`.
    pub down: WeightView<'a>,
}

/// The router of a layer.
#[derive(Debug, Clone, Copy)]
pub struct RouterTensors<'a> {
    /// `[num_experts, hidden]`, a float dtype.
    pub weight: TensorView<'a>,
    /// DeepSeek's `e_score_correction_bias`, `[num_experts]`, a float dtype.
    pub bias: Option<TensorView<'a>>,
}

/// A weight matrix `[rows, cols]` with its block scales, if it is quantised.
#[derive(Debug, Clone, Copy)]
pub struct WeightView<'a> {
    /// The stored matrix: two dimensions; bf16, f16, f32 or f8-e4m3.
    pub tensor: TensorView<'a>,
    /// Present if and only if the dtype is f8-e4m3.
    pub scales: Option<BlockScales<'a>>,
}

/// One factor per block of a quantised matrix: `value = stored × scale`.
#[derive(Debug, Clone, Copy)]
pub struct BlockScales<'a> {
    /// `[ceil(rows / block[0]), ceil(cols / block[1])]`; f32 or bf16.
    pub tensor: TensorView<'a>,
    /// Rows and columns that share a factor.
    pub block: [usize; 2],
}

impl WeightView<'_> {
    /// Output features.
    pub fn rows(&self) -> usize {
        self.tensor.shape[0]
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.tensor.shape[1]
    }

    /// The stored dtype.
    pub fn dtype(&self) -> DType {
        self.tensor.dtype
    }

    /// Bytes of the matrix and its scales as stored.
    pub fn len_bytes(&self) -> usize {
        self.tensor.data.len() + self.scales.map_or(0, |s| s.tensor.data.len())
    }

    /// The matrix as f32, row-major, scales applied.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows() * self.cols()];
        let scales = self.scales.map(|s| (s.to_f32(), s));
        convert::to_f32(self.tensor.dtype, self.tensor.data, &mut out);
        if let Some((factors, scales)) = &scales {
            for (row_idx, row) in out.chunks_exact_mut(self.cols()).enumerate() {
                scales.apply(factors, row_idx, row);
            }
        }
        out
    }
}

impl BlockScales<'_> {
    /// All factors, row-major over blocks.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.tensor.num_elements()];
        convert::to_f32(self.tensor.dtype, self.tensor.data, &mut out);
        out
    }

    /// Multiplies one row of the matrix by the factors of its blocks.
    fn apply(&self, factors: &[f32], row_idx: usize, row: &mut [f32]) {
        let blocks_per_row = self.tensor.shape[1];
        let first = row_idx / self.block[0] * blocks_per_row;
        let row_factors = &factors[first..first + blocks_per_row];
        for (values, factor) in row.chunks_mut(self.block[1]).zip(row_factors) {
            values.iter_mut().for_each(|v| *v *= factor);
        }
    }
}

impl Checkpoint {
    /// The matrices of one routed expert, with checked shapes and scales.
    pub fn expert(&self, layer: u32, expert: u32) -> Result<ExpertTensors<'_>, TensorError> {
        self.check_moe_layer(layer)?;
        let config = self.config();
        if expert >= config.num_experts {
            return Err(TensorError::NoSuchExpert { expert, num_experts: config.num_experts });
        }
        let prefix = match config.architecture {
            Architecture::Mixtral => {
                format!("model.layers.{layer}.block_sparse_moe.experts.{expert}")
            }
            _ => format!("model.layers.{layer}.mlp.experts.{expert}"),
        };
        self.swiglu(&prefix, config.moe_intermediate)
    }

    /// The shared expert, which processes every token; `None` if the model has none. Its inner width is
    /// `num_shared_experts × moe_intermediate`.
    pub fn shared_expert(&self, layer: u32) -> Result<Option<ExpertTensors<'_>>, TensorError> {
        self.check_moe_layer(layer)?;
        let config = self.config();
        if config.num_shared_experts == 0 {
            return Ok(None);
        }
        let width = config.moe_intermediate * config.num_shared_experts as usize;
        self.swiglu(&format!("model.layers.{layer}.mlp.shared_experts"), width).map(Some)
    }

    /// The router of an MoE layer.
    pub fn router(&self, layer: u32) -> Result<RouterTensors<'_>, TensorError> {
        self.check_moe_layer(layer)?;
        let config = self.config();
        let num_experts = config.num_experts as usize;
        let gate = match config.architecture {
            Architecture::Mixtral => format!("model.layers.{layer}.block_sparse_moe.gate"),
            _ => format!("model.layers.{layer}.mlp.gate"),
        };
        let weight = self
            .tensor(&format!("{gate}.weight"))?
            .expect_shape(&[num_experts, config.hidden])?
            .expect_dtype(PLAIN_FLOATS)?;
        let bias = if config.router.has_bias {
            let name = format!("{gate}.e_score_correction_bias");
            let bias = self.tensor(&name)?.expect_shape(&[num_experts])?;
            Some(bias.expect_dtype(PLAIN_FLOATS)?)
        } else {
            None
        };
        Ok(RouterTensors { weight, bias })
    }

    /// Checks that every router, shared expert and routed expert is present with the shapes and dtypes of the
    /// configuration. Reads no weights.
    pub fn check_moe(&self) -> Result<(), TensorError> {
        for layer in self.config().moe_layers() {
            self.router(layer)?;
            self.shared_expert(layer)?;
            for expert in 0..self.config().num_experts {
                self.expert(layer, expert)?;
            }
        }
        Ok(())
    }

    /// A weight matrix of the given shape, with its block scales if its dtype is fp8.
    pub fn weight(&self, name: &str, shape: [usize; 2]) -> Result<WeightView<'_>, TensorError> {
        let tensor = self.tensor(name)?.expect_shape(&shape)?.expect_dtype(FLOATS)?;
        if tensor.dtype != DType::F8E4m3 {
            return Ok(WeightView { tensor, scales: None });
        }
        let block = FP8_BLOCK;
        let blocks = [shape[0].div_ceil(block[0]), shape[1].div_ceil(block[1])];
        let scales = self
            .tensor(&format!("{name}_scale_inv"))?
            .expect_shape(&blocks)?
            .expect_dtype(SCALE_DTYPES)?;
        Ok(WeightView { tensor, scales: Some(BlockScales { tensor: scales, block }) })
    }

    fn swiglu(&self, prefix: &str, width: usize) -> Result<ExpertTensors<'_>, TensorError> {
        let [gate, up, down] = match self.config().architecture {
            Architecture::Mixtral => ["w1", "w3", "w2"],
            _ => ["gate_proj", "up_proj", "down_proj"],
        };
        let hidden = self.config().hidden;
        Ok(ExpertTensors {
            gate: self.weight(&format!("{prefix}.{gate}.weight"), [width, hidden])?,
            up: self.weight(&format!("{prefix}.{up}.weight"), [width, hidden])?,
            down: self.weight(&format!("{prefix}.{down}.weight"), [hidden, width])?,
        })
    }

    fn check_moe_layer(&self, layer: u32) -> Result<(), TensorError> {
        if self.config().is_moe_layer(layer) {
            return Ok(());
        }
        Err(TensorError::NotMoeLayer { layer, moe_layers: self.config().moe_layers_text() })
    }
}

const PLAIN_FLOATS: &[DType] = &[DType::Bf16, DType::F16, DType::F32];
const SCALE_DTYPES: &[DType] = &[DType::F32, DType::Bf16];
