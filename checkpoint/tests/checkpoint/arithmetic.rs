//! The experts' arithmetic in f64, one token at a time.

use switchyard_checkpoint::{
    Activation, Checkpoint, ExpertArithmetic, ExpertTensors, TensorFile, WeightView, Weighting,
};

/// One expert with its weights as f32.
pub struct Expert {
    arithmetic: ExpertArithmetic,
    gate: Option<Matrix>,
    up: Matrix,
    down: Matrix,
    biases: [Vec<f32>; 3],
}

struct Matrix {
    cols: usize,
    values: Vec<f32>,
}

impl Expert {
    pub fn read(arithmetic: ExpertArithmetic, tensors: &ExpertTensors<'_>) -> Expert {
        Self::read_rounded(arithmetic, tensors, &|value| value)
    }

    /// An expert whose weights are rounded once more.
    fn read_rounded(
        arithmetic: ExpertArithmetic,
        tensors: &ExpertTensors<'_>,
        round: &dyn Fn(f32) -> f32,
    ) -> Expert {
        let matrix = |w: &WeightView<'_>| Matrix {
            cols: w.cols(),
            values: w.to_f32().into_iter().map(round).collect(),
        };
        let biases = tensors.biases.clone();
        Expert {
            arithmetic,
            gate: tensors.gate.as_ref().map(matrix),
            up: matrix(&tensors.up),
            down: matrix(&tensors.down),
            biases: biases.map_or_else(Default::default, |b| [b.gate, b.up, b.down]),
        }
    }

    /// The expert's share of a token's output.
    pub fn forward(&self, x: &[f32], weight: f64) -> Vec<f64> {
        let (inside, outside) = match self.arithmetic.weighting {
            Weighting::Output => (1.0, weight),
            Weighting::Input => (weight, 1.0),
        };
        let x: Vec<f64> = x.iter().map(|x| f64::from(*x) * inside).collect();
        let up = self.up.times(&x, &self.biases[1]);
        let gate = self.gate.as_ref().map(|gate| gate.times(&x, &self.biases[0]));
        let inner: Vec<f64> = match gate {
            None => up.iter().map(|u| activate(self.arithmetic.activation, 0.0, *u)).collect(),
            Some(gate) => {
                let pairs = gate.iter().zip(&up);
                pairs.map(|(g, u)| activate(self.arithmetic.activation, *g, *u)).collect()
            }
        };
        let out = self.down.times(&inner, &self.biases[2]);
        out.into_iter().map(|y| y * outside).collect()
    }
}

fn activate(activation: Activation, gate: f64, up: f64) -> f64 {
    match activation {
        Activation::Swiglu { alpha, limit, offset } => {
            let [alpha, limit, offset] = [alpha, limit, offset].map(f64::from);
            let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
            gate / (1.0 + (-alpha * gate).exp()) * (up + offset)
        }
        Activation::Gelu => 0.5 * gate * (1.0 + erf(gate / 2f64.sqrt())) * up,
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044_715 * gate.powi(3));
            0.5 * gate * (1.0 + inner.tanh()) * up
        }
        Activation::Relu => gate.max(0.0) * up,
        Activation::Relu2 => up.max(0.0).powi(2),
    }
}

/// The error function by its Taylor series, for |x| < 6.
fn erf(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        let n = f64::from(n);
        term *= -x * x / n;
        sum += term / (2.0 * n + 1.0);
    }
    (2.0 / std::f64::consts::PI.sqrt() * sum).clamp(-1.0, 1.0)
}

impl Matrix {
    fn times(&self, x: &[f64], bias: &[f32]) -> Vec<f64> {
        assert_eq!(self.cols, x.len());
        let dot = |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum::<f64>();
        let bias = bias.iter().map(|b| f64::from(*b)).chain(std::iter::repeat(0.0));
        self.values.chunks(self.cols).zip(bias).map(|(row, bias)| dot(row) + bias).collect()
    }
}

/// The routed experts' output for the tokens, experts and weights of a reference file, and what that file says.
pub fn routed(checkpoint: &Checkpoint, layer: u32, reference: &TensorFile) -> (Vec<f64>, Vec<f32>) {
    routed_rounded(checkpoint, layer, reference, &|value| value)
}

/// As [`routed`], with weights that are rounded once more.
pub fn routed_rounded(
    checkpoint: &Checkpoint,
    layer: u32,
    reference: &TensorFile,
    round: &dyn Fn(f32) -> f32,
) -> (Vec<f64>, Vec<f32>) {
    let floats = |name: &str| reference.tensor(name).unwrap().to_f32().unwrap();
    // Some families give the experts another input than the router.
    let x = if reference.contains("experts_x") { floats("experts_x") } else { floats("x") };
    let weights = floats("topk_weights");
    let chosen = reference.tensor("topk_idx").unwrap().to_i32().unwrap();
    let config = checkpoint.config();
    let experts: Vec<Expert> = (0..config.num_experts)
        .map(|e| {
            let tensors = checkpoint.expert(layer, e).unwrap();
            Expert::read_rounded(config.arithmetic, &tensors, round)
        })
        .collect();
    let tokens = x.len() / config.hidden;
    let top_k = chosen.len() / tokens;
    let mut out = Vec::new();
    for (token, x) in x.chunks(config.hidden).enumerate() {
        let mut sum = vec![0.0; config.hidden];
        for k in token * top_k..(token + 1) * top_k {
            let share = experts[chosen[k] as usize].forward(x, f64::from(weights[k]));
            sum.iter_mut().zip(share).for_each(|(sum, share)| *sum += share);
        }
        out.extend(sum);
    }
    (out, floats("routed_out"))
}

/// The largest difference, relative to the largest value.
pub fn difference(ours: &[f64], reference: &[f32]) -> f64 {
    assert_eq!(ours.len(), reference.len());
    let largest = reference.iter().fold(0f32, |m, v| m.max(v.abs()));
    let error = ours.iter().zip(reference).map(|(a, b)| (a - f64::from(*b)).abs());
    error.fold(0.0, f64::max) / f64::from(largest)
}
