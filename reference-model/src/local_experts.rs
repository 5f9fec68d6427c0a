//! The experts of a checkpoint, computed in this process.

use std::collections::HashMap;
use std::sync::Arc;

use attention_client::{BackendError, ExpertBackend};
use checkpoint::{Activation, Checkpoint, ExpertBiases, TensorError, Weighting};
use thiserror::Error;

/// Computes experts in this process, straight from a checkpoint. The reference for other backends.
///
/// Weights of any stored format are widened to f32, with their scales. Products are summed in f64, one token
/// at a time. An expert's f32 weights stay in memory after its first use.
///
/// ```no_run
/// use std::sync::Arc;
/// use switchyard_reference_model::{Checkpoint, ExpertBackend, LocalExperts};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let checkpoint = Arc::new(Checkpoint::open("data/tiny-moe")?);
/// let x = vec![0.5; checkpoint.config().hidden]; // one token
/// let mut out = vec![0.0; x.len()];
/// LocalExperts::new(checkpoint).forward(1, &x, &[0, 3], &[0.7, 0.3], &mut out)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct LocalExperts {
    checkpoint: Arc<Checkpoint>,
    loaded: HashMap<(u32, u32), Expert>,
}

/// Failure of [`LocalExperts`]. It is the source of its [`BackendError`].
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages explain the fields")]
pub enum LocalExpertsError {
    /// The weights cannot be read.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// Slices whose lengths do not match.
    #[error("{what} has {found} values, expected {expected}")]
    Length { what: &'static str, found: usize, expected: String },
    /// A top-k entry that is neither an expert nor the mask.
    #[error("topk_idx of token {token} is {found}, expected -1 or 0 to {}", num_experts - 1)]
    Expert { token: usize, found: i32, num_experts: u32 },
}

impl LocalExperts {
    /// The experts of `checkpoint`.
    pub fn new(checkpoint: Arc<Checkpoint>) -> Self {
        Self { checkpoint, loaded: HashMap::new() }
    }

    fn compute(
        &mut self,
        layer: u32,
        x: &[f32],
        topk_idx: &[i32],
        topk_weights: &[f32],
        out: &mut [f32],
    ) -> Result<(), LocalExpertsError> {
        let hidden = self.checkpoint.config().hidden;
        let num_experts = self.checkpoint.config().num_experts;
        let checkpoint::ExpertArithmetic { activation, weighting } =
            self.checkpoint.config().arithmetic;
        let num_tokens = x.len() / hidden;
        let top_k = topk_idx.len().checked_div(num_tokens).unwrap_or(0);
        check("x", x.len(), num_tokens * hidden, "a multiple of the hidden size")?;
        check("out", out.len(), x.len(), "as many as x")?;
        check("topk_idx", topk_idx.len(), num_tokens * top_k, "a multiple of the tokens")?;
        check("topk_weights", topk_weights.len(), topk_idx.len(), "as many as topk_idx")?;
        for token in 0..num_tokens {
            let row = token * hidden..(token + 1) * hidden;
            let mut sum = vec![0.0f64; hidden];
            for choice in token * top_k..(token + 1) * top_k {
                let expert = match topk_idx[choice] {
                    -1 => continue,
                    found => match u32::try_from(found) {
                        Ok(expert) if expert < num_experts => expert,
                        _ => return Err(LocalExpertsError::Expert { token, found, num_experts }),
                    },
                };
                let weight = f64::from(topk_weights[choice]);
                let (on_input, on_output) = match weighting {
                    Weighting::Input => (weight, 1.0),
                    Weighting::Output => (1.0, weight),
                };
                let input: Vec<f64> =
                    x[row.clone()].iter().map(|&x| on_input * f64::from(x)).collect();
                let output = self.expert(layer, expert)?.forward(&input, activation);
                sum.iter_mut().zip(output).for_each(|(s, y)| *s += on_output * y);
            }
            out[row].iter_mut().zip(sum).for_each(|(out, s)| *out = s as f32);
        }
        Ok(())
    }

    fn expert(&mut self, layer: u32, expert: u32) -> Result<&Expert, TensorError> {
        use std::collections::hash_map::Entry;
        match self.loaded.entry((layer, expert)) {
            Entry::Occupied(entry) => Ok(entry.into_mut()),
            Entry::Vacant(entry) => {
                let tensors = self.checkpoint.expert(layer, expert)?;
                Ok(entry.insert(Expert {
                    gate: tensors.gate.as_ref().map(|gate| gate.to_f32()),
                    up: tensors.up.to_f32(),
                    down: tensors.down.to_f32(),
                    biases: tensors.biases,
                }))
            }
        }
    }
}

impl ExpertBackend for LocalExperts {
    fn forward(
        &mut self,
        layer: u32,
        x: &[f32],
        topk_idx: &[i32],
        topk_weights: &[f32],
        out: &mut [f32],
    ) -> Result<(), BackendError> {
        self.compute(layer, x, topk_idx, topk_weights, out)
            .map_err(|source| BackendError::new(layer, source))
    }
}

/// One expert: `down(activation(gate(x), up(x)))`.
#[derive(Debug)]
struct Expert {
    /// `[width, hidden]`
    gate: Option<Vec<f32>>,
    /// `[width, hidden]`
    up: Vec<f32>,
    /// `[hidden, width]`
    down: Vec<f32>,
    biases: Option<ExpertBiases>,
}

impl Expert {
    fn forward(&self, x: &[f64], activation: Activation) -> Vec<f64> {
        let [gate_bias, up_bias, down_bias] =
            self.biases.as_ref().map_or([&[][..]; 3], |b| [&b.gate, &b.up, &b.down]);
        let mut activated = matvec(&self.up, up_bias, x);
        match &self.gate {
            None => activated.iter_mut().for_each(|up| *up = activate(activation, 0.0, *up)),
            Some(gate) => {
                let gate = matvec(gate, gate_bias, x);
                for (up, gate) in activated.iter_mut().zip(gate) {
                    *up = activate(activation, gate, *up);
                }
            }
        }
        matvec(&self.down, down_bias, &activated)
    }
}

fn activate(activation: Activation, gate: f64, up: f64) -> f64 {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    match activation {
        Activation::Swiglu { alpha, limit, offset } => {
            let [alpha, limit, offset] = [alpha, limit, offset].map(f64::from);
            let gate = gate.min(limit);
            gate * sigmoid(alpha * gate) * (up.clamp(-limit, limit) + offset)
        }
        Activation::Gelu => {
            let erf = candle_core::cpu::erf::erf_f64(gate * std::f64::consts::FRAC_1_SQRT_2);
            0.5 * gate * (1.0 + erf) * up
        }
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044_715 * gate.powi(3));
            0.5 * gate * (1.0 + inner.tanh()) * up
        }
        Activation::Relu => gate.max(0.0) * up,
        Activation::Relu2 => up.max(0.0).powi(2),
    }
}

/// `weight` `[out, x.len()]` times `x`, plus `bias` `[out]` if it is not empty.
fn matvec(weight: &[f32], bias: &[f32], x: &[f64]) -> Vec<f64> {
    let mut y: Vec<f64> = weight.chunks_exact(x.len()).map(|row| dot(row, x)).collect();
    y.iter_mut().zip(bias).for_each(|(y, bias)| *y += f64::from(*bias));
    y
}

fn dot(row: &[f32], x: &[f64]) -> f64 {
    row.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum()
}

fn check(
    what: &'static str,
    found: usize,
    expected: usize,
    rule: &str,
) -> Result<(), LocalExpertsError> {
    if found == expected {
        return Ok(());
    }
    Err(LocalExpertsError::Length { what, found, expected: format!("{expected} ({rule})") })
}
