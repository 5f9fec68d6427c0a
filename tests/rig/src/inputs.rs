//! Random requests with their expected outputs.

use std::sync::Arc;

use anyhow::{Context, Result};
use attention_client::{ClientModel, ExpertBackend};
use checkpoint::Checkpoint;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use reference_model::LocalExperts;

/// Largest difference from the oracle, relative to the oracle's largest magnitude.
pub const TOLERANCE: f32 = 1e-5;

/// One request.
#[derive(Debug, Clone)]
pub struct Input {
    /// MoE layer.
    pub layer: u32,
    /// Tokens, 0 included.
    pub num_tokens: usize,
    /// `[num_tokens, hidden]`.
    pub x: Vec<f32>,
    /// `[num_tokens, top_k]`, −1 masked; some experts occur twice in a row.
    pub idx: Vec<i32>,
    /// `[num_tokens, top_k]`.
    pub weights: Vec<f32>,
    /// `[num_tokens, hidden]`, computed in f64 straight from the checkpoint.
    pub expected: Vec<f32>,
}

/// Requests to choose from, with their outputs computed once.
#[derive(Debug)]
pub struct InputPool {
    /// The model that the requests are for.
    pub model: ClientModel,
    inputs: Vec<Input>,
}

impl InputPool {
    /// `num_inputs` requests of up to `max_tokens` tokens, all determined by `seed`.
    ///
    /// # Errors
    /// When the oracle cannot read the checkpoint.
    pub fn new(
        checkpoint: &Arc<Checkpoint>,
        seed: u64,
        num_inputs: usize,
        max_tokens: usize,
    ) -> Result<Self> {
        let model = ClientModel::of(checkpoint);
        let mut oracle = LocalExperts::new(Arc::clone(checkpoint));
        let mut rng = StdRng::seed_from_u64(seed);
        let inputs = (0..num_inputs)
            .map(|_| {
                let num_tokens = rng.random_range(0..=max_tokens);
                random_input(&mut rng, &model, num_tokens, &mut oracle)
            })
            .collect::<Result<Vec<_>>>()?;
        Ok(Self { model, inputs })
    }

    /// Adds a request of exactly `num_tokens` tokens.
    ///
    /// # Errors
    /// When the oracle cannot read the checkpoint.
    pub fn add(
        &mut self,
        checkpoint: &Arc<Checkpoint>,
        rng: &mut StdRng,
        num_tokens: usize,
    ) -> Result<()> {
        let mut oracle = LocalExperts::new(Arc::clone(checkpoint));
        self.inputs.push(random_input(rng, &self.model, num_tokens, &mut oracle)?);
        Ok(())
    }

    /// A random one of the requests.
    pub fn pick(&self, rng: &mut StdRng) -> &Input {
        &self.inputs[rng.random_range(0..self.inputs.len())]
    }
}

fn random_input(
    rng: &mut StdRng,
    model: &ClientModel,
    num_tokens: usize,
    oracle: &mut LocalExperts,
) -> Result<Input> {
    let (hidden, k) = (model.shape.hidden as usize, model.shape.top_k as usize);
    let experts = model.shape.num_experts.cast_signed();
    let layer = model.moe_layers[rng.random_range(0..model.moe_layers.len())];
    let x: Vec<f32> = (0..num_tokens * hidden).map(|_| rng.random_range(-2.0..2.0)).collect();
    let masked = rng.random_range(0.0..0.4);
    let mut idx: Vec<i32> = (0..num_tokens * k)
        .map(|_| if rng.random_bool(masked) { -1 } else { rng.random_range(0..experts) })
        .collect();
    for row in idx.chunks_mut(k) {
        if rng.random_bool(0.1) {
            row.fill(rng.random_range(0..experts));
        }
    }
    // Far enough from zero for a lost or doubled pair to show.
    let weights = (0..num_tokens * k)
        .map(|_| rng.random_range(0.2..1.5) * if rng.random_bool(0.3) { -1.0 } else { 1.0 });
    let weights: Vec<f32> = weights.collect();
    let mut expected = vec![f32::NAN; x.len()];
    oracle
        .forward(layer, &x, &idx, &weights, &mut expected)
        .context("the oracle cannot compute a request")?;
    Ok(Input { layer, num_tokens, x, idx, weights, expected })
}

/// Largest difference between `found` and `expected`, relative to the largest magnitude expected. Infinite if a value
/// is not a number or the lengths differ.
#[must_use]
pub fn difference(found: &[f32], expected: &[f32]) -> f32 {
    if found.len() != expected.len() {
        return f32::INFINITY;
    }
    let scale = expected.iter().fold(1e-3f32, |max, value| max.max(value.abs()));
    let worst = found.iter().zip(expected).map(|(f, e)| (f - e).abs());
    worst.fold(0.0f32, |max, d| if d.is_nan() { f32::INFINITY } else { max.max(d) }) / scale
}

#[cfg(test)]
mod tests {
    use test_support::model::tiny_moe;

    use super::*;

    #[test]
    fn a_poisoned_or_missing_value_is_infinitely_far_off() {
        assert_eq!(difference(&[1.0, f32::NAN], &[1.0, 2.0]), f32::INFINITY);
        assert_eq!(difference(&[1.0], &[1.0, 2.0]), f32::INFINITY);
        assert!(difference(&[1.0, 2.0], &[1.0, 2.0001]) > TOLERANCE);
        assert!(difference(&[1.0, 2.0], &[1.0, 2.000_001]) < TOLERANCE);
    }

    #[test]
    fn one_seed_makes_one_pool() {
        let checkpoint = Arc::new(Checkpoint::open(tiny_moe()).expect("the checkpoint opens"));
        let make = |seed| InputPool::new(&checkpoint, seed, 3, 5).expect("a pool").inputs;
        let (first, second, other) = (make(7), make(7), make(8));
        assert!(first.iter().zip(&second).all(|(a, b)| a.x == b.x && a.expected == b.expected));
        assert!(first.iter().zip(&other).any(|(a, b)| a.x != b.x));
    }
}
