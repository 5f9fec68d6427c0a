//! The experts of a call's tokens, on the host.

use kernels::abi::Placement;

use crate::error::ClientError;

/// Experts and weights of a call's tokens. A pair is one entry with an expert, given by its index into `idx`.
#[derive(Debug, Default)]
pub(super) struct Choices {
    pub num_tokens: usize,
    pub top_k: usize,
    /// `[num_tokens, top_k]`
    pub idx: Vec<i32>,
    /// `[num_tokens, top_k]`
    pub weights: Vec<f32>,
    /// True once weights differ from the caller's.
    pub is_scaled: bool,
}

impl Choices {
    pub fn token(&self, at: usize) -> usize {
        at / self.top_k
    }

    /// All pairs.
    pub fn pairs(&self) -> impl Iterator<Item = usize> {
        (0..self.idx.len()).filter(|&at| self.idx[at] >= 0)
    }

    /// Place of the server to which the kernels send a pair.
    pub fn server(&self, placement: &Placement, at: usize, num_servers: u32) -> Option<u32> {
        placement.pick_server(self.token(at) as u32, self.idx[at], num_servers)
    }

    /// Checks that every entry is an expert or the mask.
    pub fn check(&self, num_experts: u32) -> Result<(), ClientError> {
        for (at, &found) in self.idx.iter().enumerate() {
            if found != -1 && u32::try_from(found).map_or(true, |expert| expert >= num_experts) {
                return Err(ClientError::ExpertIndex { token: self.token(at), found, num_experts });
            }
        }
        Ok(())
    }

    /// Entries with all pairs masked except `pairs`.
    pub fn masked(&self, pairs: &[usize]) -> Vec<i32> {
        let mut masked = vec![-1; self.idx.len()];
        pairs.iter().for_each(|&at| masked[at] = self.idx[at]);
        masked
    }

    /// Masks pairs, ascending, and scales the other weights of their tokens so that the sum stays the same.
    pub fn leave_out(&mut self, pairs: &[usize]) {
        self.is_scaled = true;
        for group in pairs.chunk_by(|a, b| a / self.top_k == b / self.top_k) {
            let row = self.token(group[0]) * self.top_k;
            let row = row..row + self.top_k;
            let sum = |choices: &Self| -> f64 {
                let of = row.clone().filter(|&at| choices.idx[at] >= 0);
                of.map(|at| f64::from(choices.weights[at])).sum()
            };
            let total = sum(self);
            group.iter().for_each(|&at| self.idx[at] = -1);
            let left = sum(self);
            let factor = total / left;
            // The rest may be empty, or too small to scale up: then the weights stay as they are.
            if factor.is_finite() && left.abs() > 1e-6 * total.abs() {
                for weight in &mut self.weights[row.clone()] {
                    *weight = (f64::from(*weight) * factor) as f32;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::*;

    #[test]
    fn leaving_experts_out_keeps_the_sum_of_the_weights() {
        let seed: u64 = rand::random();
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        for _ in 0..200 {
            let (num_tokens, top_k) = (rng.random_range(1..6), rng.random_range(1..6));
            let len = num_tokens * top_k;
            let mut choices = Choices {
                num_tokens,
                top_k,
                idx: (0..len).map(|_| rng.random_range(-1..9)).collect(),
                weights: (0..len).map(|_| rng.random_range(0.1..1.0)).collect(),
                is_scaled: false,
            };
            let before = (choices.idx.clone(), choices.weights.clone());
            let missing: Vec<usize> = choices.pairs().filter(|_| rng.random_bool(0.3)).collect();
            choices.leave_out(&missing);
            for token in 0..num_tokens {
                let row = token * top_k..(token + 1) * top_k;
                let sum = |idx: &[i32], weights: &[f32]| -> f32 {
                    row.clone().filter(|&at| idx[at] >= 0).map(|at| weights[at]).sum()
                };
                let (total, left) =
                    (sum(&before.0, &before.1), sum(&choices.idx, &choices.weights));
                let has_any = row.clone().any(|at| choices.idx[at] >= 0);
                assert!(!has_any || (total - left).abs() < 1e-4, "{total} became {left}");
            }
            for (at, &expert) in before.0.iter().enumerate() {
                let expected = if missing.contains(&at) { -1 } else { expert };
                assert_eq!(choices.idx[at], expected);
            }
        }
    }
}
