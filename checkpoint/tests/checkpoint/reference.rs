//! MoE blocks against the results of transformers for the same files.

use switchyard_checkpoint::{
    Checkpoint, GroupScore, Normalisation, RouterConfig, Scoring, TensorFile,
};

use crate::arithmetic::Expert;
use crate::support::data;

/// Largest difference, relative to the largest value.
const TOLERANCE: f64 = 1e-5;

#[test]
fn mixtral_block_equals_transformers() {
    check_block("mixtral");
}

#[test]
fn qwen3_moe_block_without_renormalisation_equals_transformers() {
    check_block("qwen3-moe-plain-topk");
}

#[test]
fn deepseek_v2_block_with_groups_equals_transformers() {
    check_block("deepseek-v2-grouped");
}

#[test]
fn deepseek_v3_block_equals_transformers() {
    check_block("deepseek-v3");
}

#[test]
fn deepseek_v3_fp8_block_equals_transformers() {
    check_block("deepseek-v3-fp8");
}

#[test]
fn every_layer_of_the_shipped_model_equals_transformers() {
    let checkpoint = Checkpoint::open(data("tiny-moe")).unwrap();
    let golden = TensorFile::open(data("tiny-moe/golden.safetensors")).unwrap();
    for layer in checkpoint.config().moe_layers() {
        for prompt in 0..2 {
            let read = |end: &str| {
                let name = format!("p{prompt}.l{layer}.{end}");
                golden.tensor(&name).unwrap().to_f32().unwrap()
            };
            let block = Block::read(&checkpoint, layer);
            let x = read("mlp_in");
            let out: Vec<f64> = x.chunks(256).flat_map(|row| block.forward(row)).collect();
            assert_close(&out, &read("mlp_out"), &format!("prompt {prompt}, layer {layer}"));
        }
    }
}

fn check_block(name: &str) {
    let dir = data("reference-blocks").join(name);
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let config = checkpoint.config();
    let reference = TensorFile::open(dir.join("reference.safetensors")).unwrap();
    let read = |name: &str| reference.tensor(name).unwrap().to_f32().unwrap();
    let (x, weights) = (read("x"), read("topk_weights"));
    let idx = reference.tensor("topk_idx").unwrap().to_i32().unwrap();
    let block = Block::read(&checkpoint, 0);

    let rows = || x.chunks(config.hidden);
    assert_eq!(rows().len(), 24);
    let logits: Vec<f64> = rows().flat_map(|row| block.logits(row)).collect();
    assert_close(&logits, &read("router_logits"), "router logits");
    for (token, row) in rows().enumerate() {
        let mut ours = block.route(row);
        let chosen = token * config.top_k..(token + 1) * config.top_k;
        let mut theirs: Vec<(usize, f64)> = idx[chosen.clone()]
            .iter()
            .zip(&weights[chosen])
            .map(|(e, w)| (*e as usize, f64::from(*w)))
            .collect();
        ours.sort_by_key(|c| c.0);
        theirs.sort_by_key(|c| c.0);
        assert_eq!(ours.len(), theirs.len());
        for (a, b) in ours.iter().zip(&theirs) {
            assert_eq!(a.0, b.0, "token {token}: expert");
            assert!((a.1 - b.1).abs() < 1e-5 * b.1.abs(), "token {token}: {a:?}, expected {b:?}");
        }
    }

    let given = |token: usize| {
        let chosen = token * config.top_k..(token + 1) * config.top_k;
        idx[chosen.clone()].iter().map(|e| *e as usize).zip(weights[chosen].iter().copied())
    };
    let routed: Vec<f64> = rows()
        .enumerate()
        .flat_map(|(t, row)| block.routed(row, given(t).map(|(e, w)| (e, f64::from(w)))))
        .collect();
    assert_close(&routed, &read("routed_out"), "routed experts");
    let whole: Vec<f64> = rows().flat_map(|row| block.forward(row)).collect();
    assert_close(&whole, &read("block_out"), "whole block");
}

fn assert_close(ours: &[f64], reference: &[f32], what: &str) {
    assert_eq!(ours.len(), reference.len(), "{what}: length");
    let largest = reference.iter().fold(0f32, |m, v| m.max(v.abs()));
    let error = ours.iter().zip(reference).map(|(a, b)| (a - f64::from(*b)).abs());
    let relative = error.fold(0.0, f64::max) / f64::from(largest);
    println!("{what}: differs by {relative:.1e} of the largest value");
    assert!(relative < TOLERANCE, "{what}: {relative}");
}

/// A plain implementation in f64, one token at a time.
struct Block {
    router: RouterConfig,
    top_k: usize,
    gate: Matrix,
    bias: Vec<f32>,
    experts: Vec<Expert>,
    shared: Option<Expert>,
}

struct Matrix {
    cols: usize,
    values: Vec<f32>,
}

impl Block {
    fn read(checkpoint: &Checkpoint, layer: u32) -> Block {
        let config = checkpoint.config();
        let router = checkpoint.router(layer).unwrap();
        let num_experts = config.num_experts;
        Block {
            router: *config.router().unwrap(),
            top_k: config.top_k,
            gate: Matrix { cols: config.hidden, values: router.weight.to_f32().unwrap() },
            bias: router.bias.map_or(vec![0.0; num_experts as usize], |b| b.to_f32().unwrap()),
            experts: (0..num_experts)
                .map(|e| Expert::read(config.arithmetic, &checkpoint.expert(layer, e).unwrap()))
                .collect(),
            shared: checkpoint
                .shared_expert(layer)
                .unwrap()
                .map(|shared| Expert::read(config.arithmetic, &shared)),
        }
    }

    fn logits(&self, x: &[f32]) -> Vec<f64> {
        self.gate.times(&widen(x))
    }

    /// Experts and weights of a token, by what `RouterConfig` says.
    fn route(&self, x: &[f32]) -> Vec<(usize, f64)> {
        let logits = self.logits(x);
        let scores: Vec<f64> = match self.router.scoring {
            Scoring::Sigmoid => logits.iter().map(|l| 1.0 / (1.0 + (-l).exp())).collect(),
            _ => {
                let sum: f64 = logits.iter().map(|l| l.exp()).sum();
                logits.iter().map(|l| l.exp() / sum).collect()
            }
        };
        let mut choice: Vec<f64> =
            scores.iter().zip(&self.bias).map(|(s, b)| s + f64::from(*b)).collect();
        if let Some(groups) = self.router.groups {
            let group_size = scores.len() / groups.num_groups;
            let group_score = |group: &[f64]| {
                let mut best = group.to_vec();
                best.sort_by(|a, b| b.total_cmp(a));
                match groups.score {
                    GroupScore::TopTwoSum => best[0] + best[1],
                    GroupScore::Max => best[0],
                }
            };
            let scores: Vec<f64> = choice.chunks(group_size).map(group_score).collect();
            let kept = best(&scores, groups.topk_groups);
            for (expert, value) in choice.iter_mut().enumerate() {
                if !kept.contains(&(expert / group_size)) {
                    *value = f64::NEG_INFINITY;
                }
            }
        }
        let chosen = best(&choice, self.top_k);
        let sum: f64 = chosen.iter().map(|e| scores[*e]).sum();
        let divisor = if self.router.normalisation == Normalisation::None { 1.0 } else { sum };
        let factor = f64::from(self.router.scale) / divisor;
        chosen.into_iter().map(|e| (e, scores[e] * factor)).collect()
    }

    fn routed(&self, x: &[f32], chosen: impl Iterator<Item = (usize, f64)>) -> Vec<f64> {
        let mut out = vec![0.0; x.len()];
        for (expert, weight) in chosen {
            let y = self.experts[expert].forward(x, weight);
            out.iter_mut().zip(y).for_each(|(o, y)| *o += y);
        }
        out
    }

    fn forward(&self, x: &[f32]) -> Vec<f64> {
        let mut out = self.routed(x, self.route(x).into_iter());
        if let Some(shared) = &self.shared {
            let y = shared.forward(x, 1.0);
            out.iter_mut().zip(y).for_each(|(o, y)| *o += y);
        }
        out
    }
}

impl Matrix {
    fn times(&self, x: &[f64]) -> Vec<f64> {
        assert_eq!(self.cols, x.len());
        let dot = |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum();
        self.values.chunks(self.cols).map(dot).collect()
    }
}

fn widen(x: &[f32]) -> Vec<f64> {
    x.iter().map(|v| f64::from(*v)).collect()
}

/// Indices of the `count` largest values.
fn best(values: &[f64], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*b].total_cmp(&values[*a]));
    order.truncate(count);
    order
}
