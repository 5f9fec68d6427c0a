//! Weights of the attention side, and operations without state.

use candle_core::{Device, Storage, Tensor};
use checkpoint::{Activation, Checkpoint, ExpertTensors, WeightView};

use super::LoadError;

/// `x · weightᵀ + bias`.
#[derive(Debug, Clone)]
pub(super) struct Linear {
    /// `[in, out]`, a transposed view of the stored matrix.
    weight_t: Tensor,
    /// `[out]`
    bias: Option<Tensor>,
}

impl Linear {
    /// `{prefix}.weight` `[out, in]`, and `{prefix}.bias` `[out]` if `has_bias`.
    pub(super) fn load(
        checkpoint: &Checkpoint,
        prefix: &str,
        [out, inner]: [usize; 2],
        has_bias: bool,
    ) -> Result<Self, LoadError> {
        let weight = load_matrix(checkpoint, prefix, [out, inner])?;
        let bias = match has_bias {
            true => Some(load_vector(checkpoint, &format!("{prefix}.bias"), out)?),
            false => None,
        };
        Ok(Self { weight_t: weight.t()?, bias })
    }

    /// From a matrix in any format and its bias, which may be empty.
    fn from_weight(weight: &WeightView<'_>, bias: &[f32]) -> Result<Self, LoadError> {
        let shape = (weight.rows(), weight.cols());
        let weight = Tensor::from_vec(weight.to_f32(), shape, &Device::Cpu)?;
        Self::from_matrix(&weight, bias)
    }

    /// From a matrix `[out, in]` and its bias, which may be empty.
    pub(super) fn from_matrix(weight: &Tensor, bias: &[f32]) -> Result<Self, LoadError> {
        let bias = match bias {
            [] => None,
            bias => Some(Tensor::from_slice(bias, bias.len(), &Device::Cpu)?),
        };
        Ok(Self { weight_t: weight.t()?, bias })
    }

    /// `[rows, in]` to `[rows, out]`.
    pub(super) fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let y = x.matmul(&self.weight_t)?;
        match &self.bias {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }
}

/// `x / sqrt(mean(x²) + eps) * weight` over the last dimension.
#[derive(Debug, Clone)]
pub(super) struct RmsNorm {
    weight: Tensor,
    eps: f32,
}

impl RmsNorm {
    pub(super) fn load(
        checkpoint: &Checkpoint,
        name: &str,
        width: usize,
    ) -> Result<Self, LoadError> {
        let eps = checkpoint.config().language()?.rms_norm_eps as f32;
        Ok(Self { weight: load_vector(checkpoint, name, width)?, eps })
    }

    pub(super) fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        candle_nn::ops::rms_norm(&x.contiguous()?, &self.weight, self.eps)
    }
}

/// `down(activation(gate(x), up(x)))`: a dense MLP, or a shared expert.
#[derive(Debug, Clone)]
pub(super) struct Mlp {
    gate: Option<Linear>,
    up: Linear,
    down: Linear,
    activation: Activation,
}

impl Mlp {
    /// `{prefix}.{gate,up,down}_proj.weight`.
    pub(super) fn load(
        checkpoint: &Checkpoint,
        prefix: &str,
        width: usize,
    ) -> Result<Self, LoadError> {
        let hidden = checkpoint.config().hidden;
        let linear =
            |name: &str, shape| Linear::load(checkpoint, &format!("{prefix}.{name}"), shape, false);
        Ok(Self {
            gate: Some(linear("gate_proj", [width, hidden])?),
            up: linear("up_proj", [width, hidden])?,
            down: linear("down_proj", [hidden, width])?,
            activation: checkpoint.config().arithmetic.activation,
        })
    }

    pub(super) fn from_tensors(
        tensors: &ExpertTensors<'_>,
        activation: Activation,
    ) -> Result<Self, LoadError> {
        let biases = tensors.biases.as_ref();
        let [gate_bias, up_bias, down_bias] =
            biases.map_or([&[][..]; 3], |biases| [&biases.gate, &biases.up, &biases.down]);
        let gate = tensors.gate.as_ref().map(|gate| Linear::from_weight(gate, gate_bias));
        Ok(Self {
            gate: gate.transpose()?,
            up: Linear::from_weight(&tensors.up, up_bias)?,
            down: Linear::from_weight(&tensors.down, down_bias)?,
            activation,
        })
    }

    /// `[rows, hidden]` to `[rows, hidden]`.
    pub(super) fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let up = self.up.forward(x)?;
        let gate = self.gate.as_ref().map(|gate| gate.forward(x)).transpose()?;
        self.down.forward(&activate(self.activation, gate, up)?)
    }
}

fn activate(
    activation: Activation,
    gate: Option<Tensor>,
    up: Tensor,
) -> candle_core::Result<Tensor> {
    let Some(gate) = gate else {
        return up.relu()?.sqr();
    };
    match activation {
        Activation::SILU => gate.silu()? * up,
        Activation::Swiglu { alpha, limit, offset } => {
            let gate = gate.minimum(limit)?;
            let sigmoid = candle_nn::ops::sigmoid(&(&gate * f64::from(alpha))?)?;
            let up = up.clamp(-limit, limit)?;
            (gate * sigmoid)? * (up + f64::from(offset))?
        }
        Activation::Gelu => gate.gelu_erf()? * up,
        Activation::GeluTanh => gate.gelu()? * up,
        Activation::Relu => gate.relu()? * up,
        Activation::Relu2 => up.relu()?.sqr(),
    }
}

/// Cosines and sines of the rotary embedding, `[positions, head_dim / 2]` each.
#[derive(Debug)]
pub(super) struct Rotation {
    cos: Tensor,
    sin: Tensor,
}

/// Rotary position embedding of the plain kind: frequency `i` is `theta^(-2i / head_dim)`.
#[derive(Debug, Clone)]
pub(super) struct Rope {
    inverse_frequencies: Vec<f32>,
}

impl Rope {
    pub(super) fn new(theta: f64, head_dim: usize) -> Self {
        // In f32 step by step, as the models were trained.
        let inverse = |i: usize| 1.0 / (theta as f32).powf((2 * i) as f32 / head_dim as f32);
        Self { inverse_frequencies: (0..head_dim / 2).map(inverse).collect() }
    }

    /// The rotation of `num` positions from `first` on.
    pub(super) fn at(&self, first: usize, num: usize) -> candle_core::Result<Rotation> {
        let angles: Vec<f32> = (first..first + num)
            .flat_map(|p| self.inverse_frequencies.iter().map(move |f| p as f32 * f))
            .collect();
        let table = |f: fn(f32) -> f32| {
            let values = angles.iter().copied().map(f).collect::<Vec<_>>();
            Tensor::from_vec(values, (num, self.inverse_frequencies.len()), &Device::Cpu)
        };
        Ok(Rotation { cos: table(f32::cos)?, sin: table(f32::sin)? })
    }
}

impl Rotation {
    /// Rotates `[heads, positions, head_dim]`: value `i` pairs with value `i + head_dim / 2`.
    pub(super) fn apply(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let x = x.contiguous()?.unsqueeze(0)?;
        candle_nn::rotary_emb::rope(&x, &self.cos, &self.sin)?.squeeze(0)
    }
}

/// Softmax over the last dimension.
pub(super) fn softmax(x: &Tensor) -> candle_core::Result<Tensor> {
    candle_nn::ops::softmax_last_dim(x)
}

/// `-inf` where a token would look at a later one, else 0: `[num, first + num]` for `num` tokens
/// from position `first` on.
pub(super) fn causal_mask(first: usize, num: usize) -> candle_core::Result<Tensor> {
    let value =
        |token: usize, seen: usize| if seen > first + token { f32::NEG_INFINITY } else { 0.0 };
    let mask: Vec<f32> =
        (0..num).flat_map(|t| (0..first + num).map(move |s| value(t, s))).collect();
    Tensor::from_vec(mask, (num, first + num), &Device::Cpu)
}

/// The weight of the linear layer called `name` as f32.
pub(super) fn load_matrix(
    checkpoint: &Checkpoint,
    name: &str,
    [rows, cols]: [usize; 2],
) -> Result<Tensor, LoadError> {
    let weight = checkpoint.linear(name, rows, cols)?;
    Ok(Tensor::from_vec(weight.to_f32(), (rows, cols), &Device::Cpu)?)
}

fn load_vector(checkpoint: &Checkpoint, name: &str, width: usize) -> Result<Tensor, LoadError> {
    let values = checkpoint.tensor(name)?.expect_shape(&[width])?.to_f32()?;
    Ok(Tensor::from_vec(values, width, &Device::Cpu)?)
}

/// Calls `read` with the values of a contiguous f32 tensor in host memory, without a copy.
pub(super) fn with_values<R>(x: &Tensor, read: impl FnOnce(&[f32]) -> R) -> candle_core::Result<R> {
    let (storage, layout) = x.storage_and_layout();
    let (Storage::Cpu(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets())
    else {
        candle_core::bail!("expected a contiguous tensor in host memory, found {:?}", x.shape())
    };
    Ok(read(&storage.as_slice::<f32>()?[start..end]))
}
