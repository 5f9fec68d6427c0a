//! Random requests, and their correct answers.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use checkpoint::{Checkpoint, WeightFormat, f32_from_e4m3};
use protocol::{ModelShape, WireDtype};
use rand::RngExt;
use rand::rngs::StdRng;

use super::tiny_moe;

/// Sizes and identity of a model.
pub fn shape_of(checkpoint: &Checkpoint) -> ModelShape {
    let model = checkpoint.config();
    ModelShape {
        fingerprint: checkpoint.fingerprint().expect("it has experts").0,
        hidden: model.hidden as u32,
        num_layers: model.num_layers,
        num_experts: model.num_experts,
        top_k: model.top_k as u32,
    }
}

/// Routed tokens of one layer.
#[derive(Debug, Clone)]
pub struct Request {
    pub layer: u32,
    /// `[num_tokens, hidden]`.
    pub x: Vec<f32>,
    /// Experts and weights of each token.
    pub routes: Vec<Vec<(u32, f32)>>,
}

impl Request {
    /// Tokens with 1 to `top_k` distinct experts each, in random order.
    pub fn random(rng: &mut StdRng, shape: &ModelShape, num_tokens: usize) -> Self {
        let x = (0..num_tokens * shape.hidden as usize).map(|_| rng.random_range(-2.0..2.0));
        let x = x.collect();
        let routes = (0..num_tokens).map(|_| {
            let mut experts: Vec<u32> = (0..shape.num_experts).collect();
            (0..rng.random_range(1..=shape.top_k))
                .map(|_| {
                    let expert = experts.swap_remove(rng.random_range(0..experts.len()));
                    (expert, rng.random_range(-1.0..1.0))
                })
                .collect()
        });
        let routes = routes.collect();
        Self { layer: rng.random_range(0..shape.num_layers), x, routes }
    }
}

/// The correct answers, computed one token at a time in f64 from the checkpoint.
pub struct Reference {
    pub checkpoint: Arc<Checkpoint>,
    pub shape: ModelShape,
    /// True if all experts are fp8.
    pub is_fp8: bool,
    pub experts: HashMap<(u32, u32), [Vec<f32>; 3]>,
}

impl Reference {
    pub fn open() -> Self {
        Self::of(&tiny_moe())
    }

    /// The reference of another checkpoint.
    pub fn of(dir: &Path) -> Self {
        let checkpoint = Arc::new(Checkpoint::open(dir).expect("the checkpoint opens"));
        let shape = shape_of(&checkpoint);
        let mut is_fp8 = true;
        let mut experts = HashMap::new();
        for layer in checkpoint.config().moe_layers() {
            for expert in 0..shape.num_experts {
                let tensors = checkpoint.expert(layer, expert).expect("the expert is there");
                let gate = tensors.gate.expect("the expert has a gate");
                let views = [gate, tensors.up, tensors.down];
                let has_fp8 = |format| matches!(format, WeightFormat::F8E4m3 { .. });
                is_fp8 &= views.iter().all(|view| has_fp8(view.format()));
                experts.insert((layer, expert), views.map(|view| view.to_f32()));
            }
        }
        Self { checkpoint, shape, is_fp8, experts }
    }

    /// Rows `[num_tokens, hidden]` for `request` after its conversion to `dtype`.
    pub fn forward(&self, request: &Request, dtype: WireDtype) -> Vec<f64> {
        let hidden = self.shape.hidden as usize;
        let mut out = Vec::with_capacity(request.x.len());
        for (x, routes) in request.x.chunks_exact(hidden).zip(&request.routes) {
            let x = after_trip(x, dtype);
            let mut row = vec![0f64; hidden];
            for &(expert, weight) in routes {
                let [gate, up, down] = &self.experts[&(request.layer, expert)];
                let inner: Vec<f64> = gate
                    .chunks_exact(hidden)
                    .zip(up.chunks_exact(hidden))
                    .map(|(gate, up)| {
                        let (g, u) = (dot(gate, &x), dot(up, &x));
                        g / (1.0 + (-g).exp()) * u
                    })
                    .collect();
                for (out, down) in row.iter_mut().zip(down.chunks_exact(inner.len())) {
                    *out += f64::from(weight) * dot(down, &inner);
                }
            }
            out.extend(row);
        }
        out
    }

    /// Asserts that `rows` are the answer to `request` within the precision of the wire types.
    pub fn check(
        &self,
        request: &Request,
        dtype: WireDtype,
        response_dtype: WireDtype,
        rows: &[f32],
    ) {
        let expected = self.forward(request, dtype);
        assert_eq!(rows.len(), expected.len(), "rows of another size");
        let tolerance = match response_dtype {
            WireDtype::F32 => 2e-5,
            WireDtype::F16 => 1e-3,
            WireDtype::Bf16 => 5e-3,
            WireDtype::F8E4m3 => 0.04,
        };
        // Rounding may choose the code next to the exact one.
        let tolerance = tolerance + if dtype == WireDtype::F8E4m3 { 0.01 } else { 0.0 };
        let hidden = self.shape.hidden as usize;
        for (token, (row, expected)) in
            rows.chunks_exact(hidden).zip(expected.chunks_exact(hidden)).enumerate()
        {
            let largest = expected.iter().fold(1e-30f64, |max, v| max.max(v.abs()));
            for (at, (found, expected)) in row.iter().zip(expected).enumerate() {
                let error = (f64::from(*found) - expected).abs() / largest;
                assert!(
                    error <= tolerance,
                    "layer {} token {token} value {at}: found {found}, expected {expected}, {dtype} to {response_dtype}",
                    request.layer
                );
            }
        }
    }
}

pub fn dot<V: Copy + Into<f64>>(a: &[f32], b: &[V]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * (*b).into()).sum()
}

/// A row after its conversion to `dtype`, by independent arithmetic.
fn after_trip(row: &[f32], dtype: WireDtype) -> Vec<f64> {
    match dtype {
        WireDtype::F32 => row.iter().map(|&v| f64::from(v)).collect(),
        WireDtype::F16 => row.iter().map(|&v| half::f16::from_f32(v).to_f64()).collect(),
        WireDtype::Bf16 => row.iter().map(|&v| half::bf16::from_f32(v).to_f64()).collect(),
        WireDtype::F8E4m3 => row
            .chunks(128)
            .flat_map(|block| {
                let largest = block.iter().fold(0f32, |max, v| max.max(v.abs()));
                let scale = f64::from(largest / 448.0);
                block.iter().map(move |&v| nearest_e4m3(f64::from(v) / scale) * scale)
            })
            .collect(),
    }
}

fn nearest_e4m3(value: f64) -> f64 {
    let codes = (0..=255u8).map(|code| f64::from(f32_from_e4m3(code))).filter(|v| !v.is_nan());
    codes.min_by(|a, b| (a - value).abs().total_cmp(&(b - value).abs())).unwrap_or(0.0)
}
