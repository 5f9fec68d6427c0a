//! Qwen3-MoE by the book: f64, one token at a time, no cache, no tensor library.

use checkpoint::{Checkpoint, Normalisation};

pub struct Naive<'a> {
    pub checkpoint: &'a Checkpoint,
    /// Layers with a dense MLP.
    pub dense_layers: Vec<u32>,
    pub has_bias: bool,
}

type Rows = Vec<Vec<f64>>;

impl Naive<'_> {
    /// Logits of every token, `[num_tokens, vocab]`.
    pub fn logits(&self, tokens: &[u32]) -> Vec<f32> {
        let config = self.checkpoint.config();
        let embedding = self.matrix("model.embed_tokens.weight", config.hidden);
        let mut x: Rows = tokens.iter().map(|&t| embedding[t as usize].clone()).collect();
        for layer in 0..config.num_layers {
            let prefix = format!("model.layers.{layer}");
            let normed = self.norm_all(&x, &format!("{prefix}.input_layernorm.weight"));
            add(&mut x, &self.attention(&format!("{prefix}.self_attn"), &normed));
            let normed = self.norm_all(&x, &format!("{prefix}.post_attention_layernorm.weight"));
            let mlp = format!("{prefix}.mlp");
            let y: Rows = match self.dense_layers.contains(&layer) {
                true => normed.iter().map(|x| self.mlp(&mlp, x)).collect(),
                false => normed.iter().map(|x| self.moe(&mlp, x)).collect(),
            };
            add(&mut x, &y);
        }
        let head = match config.language().unwrap().tie_word_embeddings {
            true => embedding,
            false => self.matrix("lm_head.weight", config.hidden),
        };
        let x = self.norm_all(&x, "model.norm.weight");
        x.iter().flat_map(|x| head.iter().map(move |row| dot(row, x) as f32)).collect()
    }

    fn attention(&self, prefix: &str, x: &Rows) -> Rows {
        let config = self.checkpoint.config();
        let attention = config.language().unwrap().attention.as_ref().unwrap();
        let dim = attention.head_dim;
        let project = |name: &str, heads: usize, normed: bool| -> Vec<Rows> {
            let rows = x.iter().map(|x| self.linear(&format!("{prefix}.{name}_proj"), x));
            rows.map(|row| {
                assert_eq!(row.len(), heads * dim);
                row.chunks(dim)
                    .map(|head| match normed {
                        true => self.norm(head, &format!("{prefix}.{name}_norm.weight")),
                        false => head.to_vec(),
                    })
                    .collect()
            })
            .collect()
        };
        let mut q = project("q", attention.num_heads, true);
        let mut k = project("k", attention.num_kv_heads, true);
        let v = project("v", attention.num_kv_heads, false);
        for rows in [&mut q, &mut k] {
            for (position, heads) in rows.iter_mut().enumerate() {
                heads.iter_mut().for_each(|h| rotate(h, position, attention.rope_theta));
            }
        }
        let group = attention.num_heads / attention.num_kv_heads;
        let mixed = (0..x.len()).map(|token| {
            let heads = (0..attention.num_heads).flat_map(|head| {
                let scale = (dim as f64).sqrt();
                let scores: Vec<f64> = (0..=token)
                    .map(|seen| dot(&q[token][head], &k[seen][head / group]) / scale)
                    .collect();
                let weights = softmax(&scores);
                (0..dim)
                    .map(|i| (0..=token).map(|s| weights[s] * v[s][head / group][i]).sum())
                    .collect::<Vec<f64>>()
            });
            self.linear(&format!("{prefix}.o_proj"), &heads.collect::<Vec<f64>>())
        });
        mixed.collect()
    }

    fn moe(&self, prefix: &str, x: &[f64]) -> Vec<f64> {
        let config = self.checkpoint.config();
        let probabilities = softmax(&self.linear(&format!("{prefix}.gate"), x));
        let mut order: Vec<usize> = (0..probabilities.len()).collect();
        order.sort_by(|&a, &b| probabilities[b].total_cmp(&probabilities[a]));
        let chosen = &order[..config.top_k];
        let sum: f64 = match config.router().unwrap().normalisation {
            Normalisation::None => 1.0,
            Normalisation::Sum { .. } => chosen.iter().map(|&e| probabilities[e]).sum(),
        };
        let mut out = vec![0.0; x.len()];
        for &expert in chosen {
            let y = self.mlp(&format!("{prefix}.experts.{expert}"), x);
            out.iter_mut().zip(y).for_each(|(o, y)| *o += probabilities[expert] / sum * y);
        }
        out
    }

    fn mlp(&self, prefix: &str, x: &[f64]) -> Vec<f64> {
        let gate = self.linear(&format!("{prefix}.gate_proj"), x);
        let up = self.linear(&format!("{prefix}.up_proj"), x);
        let inner: Vec<f64> =
            gate.iter().zip(up).map(|(g, u)| g * (1.0 / (1.0 + (-g).exp())) * u).collect();
        self.linear(&format!("{prefix}.down_proj"), &inner)
    }

    fn linear(&self, prefix: &str, x: &[f64]) -> Vec<f64> {
        let weight = self.matrix(&format!("{prefix}.weight"), x.len());
        let mut y: Vec<f64> = weight.iter().map(|row| dot(row, x)).collect();
        if self.has_bias && prefix.contains("self_attn") {
            let bias = self.vector(&format!("{prefix}.bias"));
            y.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
        }
        y
    }

    fn norm_all(&self, x: &Rows, name: &str) -> Rows {
        x.iter().map(|x| self.norm(x, name)).collect()
    }

    fn norm(&self, x: &[f64], name: &str) -> Vec<f64> {
        let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
        let factor =
            1.0 / (mean + self.checkpoint.config().language().unwrap().rms_norm_eps).sqrt();
        x.iter().zip(self.vector(name)).map(|(x, w)| x * factor * w).collect()
    }

    fn matrix(&self, name: &str, cols: usize) -> Rows {
        self.vector(name).chunks(cols).map(<[f64]>::to_vec).collect()
    }

    fn vector(&self, name: &str) -> Vec<f64> {
        let values = self.checkpoint.tensor(name).unwrap().to_f32().unwrap();
        values.into_iter().map(f64::from).collect()
    }
}

fn rotate(head: &mut [f64], position: usize, theta: f64) {
    let half = head.len() / 2;
    for i in 0..half {
        let angle = position as f64 / theta.powf(2.0 * i as f64 / head.len() as f64);
        let (sin, cos) = angle.sin_cos();
        let (a, b) = (head[i], head[i + half]);
        head[i] = a * cos - b * sin;
        head[i + half] = b * cos + a * sin;
    }
}

fn softmax(x: &[f64]) -> Vec<f64> {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exp: Vec<f64> = x.iter().map(|v| (v - max).exp()).collect();
    let sum: f64 = exp.iter().sum();
    exp.into_iter().map(|v| v / sum).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(x: &mut Rows, y: &Rows) {
    for (x, y) in x.iter_mut().zip(y) {
        x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
    }
}
