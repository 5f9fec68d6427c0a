//! The MoE block: gate, router and shared experts. A backend computes the routed experts.

use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};
use checkpoint::{Checkpoint, InputNorm, TensorError, TensorView};
use thiserror::Error;

use super::LoadError;
use super::layers::{Linear, Mlp, with_values};
use attention_client::router::{RouteError, Router, RouterWorkspace};
use attention_client::{BackendError, ExpertBackend};

/// The MoE block of one layer, of any family whose router the client computes
/// ([`ModelConfig::router`](checkpoint::ModelConfig::router)).
///
/// Holds the gate, its biases and the shared experts in f32. Clones share weights.
#[derive(Debug)]
pub struct MoeBlock {
    layer: u32,
    hidden: usize,
    gate: Linear,
    router: Router,
    shared: Option<Mlp>,
    /// Shared experts with weights from the router.
    weighted_shared: Vec<Mlp>,
    /// The vector of a gate that normalises its input, divided by the root of its length.
    input_scale: Option<(InputNorm, Vec<f32>)>,
    /// Its sigmoid scales the output of the shared experts.
    shared_gate: Option<Linear>,
    averages_shared: bool,
    workspace: Workspace,
}

/// Input, choices and output of one pass through an MoE block.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct MoeRecord<'a> {
    /// Decoder layer of the block.
    pub layer: u32,
    /// Experts per token.
    pub top_k: usize,
    /// Input, `[num_tokens, hidden]`.
    pub input: &'a [f32],
    /// Chosen experts, `[num_tokens, top_k]`.
    pub topk_idx: &'a [i32],
    /// Their weights, `[num_tokens, top_k]`.
    pub topk_weights: &'a [f32],
    /// Output, shared experts included, `[num_tokens, hidden]`.
    pub output: &'a [f32],
    /// Time that the backend took for the routed experts.
    pub backend_time: Duration,
}

/// Observes MoE blocks. Closures over a [`MoeRecord`] are observers.
pub trait MoeObserver {
    /// Called once for each block that succeeds, after its output is complete.
    fn moe_block(&mut self, record: &MoeRecord<'_>);
}

impl<F: FnMut(&MoeRecord<'_>)> MoeObserver for F {
    fn moe_block(&mut self, record: &MoeRecord<'_>) {
        self(record);
    }
}

/// Failure of an MoE block.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages explain the fields")]
pub enum MoeBlockError {
    /// The backend failed. Its error names the layer.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The router cannot use the gate's logits.
    #[error("layer {layer}: {source}")]
    Route { layer: u32, source: RouteError },
    /// A slice of the wrong length.
    #[error("layer {layer}: {what} has {found} values, expected {expected}")]
    Length { layer: u32, what: &'static str, found: usize, expected: usize },
    /// The tensor library failed.
    #[error("layer {layer}: {source}")]
    Tensor { layer: u32, source: Box<candle_core::Error> },
}

impl MoeBlockError {
    fn tensor(layer: u32, source: candle_core::Error) -> Self {
        Self::Tensor { layer, source: Box::new(source) }
    }
}

impl MoeBlock {
    /// Loads the block of `layer`: the gate, its bias and the shared experts.
    pub fn load(checkpoint: &Checkpoint, layer: u32) -> Result<Self, LoadError> {
        let config = checkpoint.config();
        let rule = *config.router()?;
        let tensors = checkpoint.router(layer)?;
        if let Some(table) = tensors.hash_table {
            return Err(LoadError::Tensor(TensorError::Format {
                name: table.name.to_owned(),
                found: "chooses experts by token id, which a block does not see".to_owned(),
                expected: "a router that chooses by logits; take the choice from the engine"
                    .to_owned(),
            }));
        }
        if config.hidden != config.model_hidden {
            return Err(LoadError::Tensor(TensorError::Format {
                name: tensors.weight.name.to_owned(),
                found: format!("routes rows of {}", config.model_hidden),
                expected: format!(
                    "rows of {}, which the experts take; project them in the engine",
                    config.hidden
                ),
            }));
        }
        let values = |tensor: Option<TensorView<'_>>| {
            tensor.map_or(Ok(Vec::new()), |tensor| tensor.to_f32())
        };
        let router =
            Router::with_scales(rule, values(tensors.bias)?, values(tensors.expert_scales)?)?;
        let root = (config.hidden as f32).sqrt();
        let input_scale = match (rule.input_norm, tensors.input_scale) {
            (Some(norm), Some(scale)) => {
                Some((norm, scale.to_f32()?.into_iter().map(|scale| scale / root).collect()))
            }
            _ => None,
        };
        let logit_bias = tensors.logit_bias.map_or(Ok(Vec::new()), |bias| bias.to_f32())?;
        let gate = (
            tensors.weight.to_f32()?,
            (config.num_experts as usize + config.num_weighted_shared, config.hidden),
        );
        let gate = Tensor::from_vec(gate.0, gate.1, &Device::Cpu)?;
        let activation = config.arithmetic.activation;
        let (shared, weighted_shared) = match config.num_weighted_shared {
            0 => (checkpoint.shared_expert(layer)?, Vec::new()),
            _ => (None, checkpoint.weighted_shared_experts(layer)?),
        };
        let shared_gate = match checkpoint.shared_expert_gate(layer)? {
            Some(gate) => {
                let gate = Tensor::from_vec(gate.to_f32()?, (1, config.hidden), &Device::Cpu)?;
                Some(Linear::from_matrix(&gate, &[])?)
            }
            None => None,
        };
        Ok(Self {
            layer,
            hidden: config.hidden,
            gate: Linear::from_matrix(&gate, &logit_bias)?,
            router,
            shared: shared.map(|shared| Mlp::from_tensors(&shared, activation)).transpose()?,
            weighted_shared: weighted_shared
                .iter()
                .map(|shared| Mlp::from_tensors(shared, activation))
                .collect::<Result<_, _>>()?,
            input_scale,
            shared_gate,
            averages_shared: config.averages_shared,
            workspace: Workspace::default(),
        })
    }

    /// Decoder layer of the block.
    pub fn layer(&self) -> u32 {
        self.layer
    }

    /// The router of the block.
    pub fn router(&self) -> &Router {
        &self.router
    }

    /// Chooses experts for `x` `[num_tokens, hidden]`. Returns the indices and the weights, both
    /// `[num_tokens, top_k]`.
    pub fn route(&mut self, x: &[f32]) -> Result<(&[i32], &[f32]), MoeBlockError> {
        let x = self.tensor(x)?;
        self.route_tensor(&x)?;
        Ok((&self.workspace.topk_idx, &self.workspace.topk_weights))
    }

    /// Runs the block for `x` `[num_tokens, hidden]` and overwrites `out`, of the same shape. The caller adds the
    /// residual. An `observer` sees input and output.
    ///
    /// # Errors
    /// [`MoeBlockError`]; the content of `out` is then unspecified.
    pub fn forward(
        &mut self,
        x: &[f32],
        out: &mut [f32],
        backend: &mut dyn ExpertBackend,
        observer: Option<&mut dyn MoeObserver>,
    ) -> Result<(), MoeBlockError> {
        let tensor = self.tensor(x)?;
        self.forward_tensor(&tensor, x, out, backend, observer)
    }

    /// As [`forward`](Self::forward), with `x` both as a tensor and as its values.
    pub(super) fn forward_tensor(
        &mut self,
        tensor: &Tensor,
        x: &[f32],
        out: &mut [f32],
        backend: &mut dyn ExpertBackend,
        observer: Option<&mut dyn MoeObserver>,
    ) -> Result<(), MoeBlockError> {
        let layer = self.layer;
        if out.len() != x.len() {
            let (found, expected) = (out.len(), x.len());
            return Err(MoeBlockError::Length { layer, what: "out", found, expected });
        }
        self.route_tensor(tensor)?;
        let Workspace { topk_idx, topk_weights, .. } = &self.workspace;
        let started = observer.is_some().then(Instant::now);
        backend.forward(layer, x, topk_idx, topk_weights, out)?;
        let backend_time = started.map_or(Duration::ZERO, |s| s.elapsed());
        if let Some(shared) = &self.shared {
            shared
                .forward(tensor)
                .and_then(|y| match &self.shared_gate {
                    Some(gate) => {
                        y.broadcast_mul(&candle_nn::ops::sigmoid(&gate.forward(tensor)?)?)
                    }
                    None => Ok(y),
                })
                .and_then(|y| with_values(&y, |y| out.iter_mut().zip(y).for_each(|(o, y)| *o += y)))
                .map_err(|e| MoeBlockError::tensor(layer, e))?;
        }
        let weights = self.workspace.router.shared_weights();
        for (idx, shared) in self.weighted_shared.iter().enumerate() {
            let weights = weights.iter().skip(idx).step_by(self.weighted_shared.len());
            shared
                .forward(tensor)
                .and_then(|y| {
                    with_values(&y, |y| {
                        let rows = out.chunks_mut(self.hidden).zip(y.chunks(self.hidden));
                        for ((out, y), weight) in rows.zip(weights) {
                            out.iter_mut().zip(y).for_each(|(o, y)| *o += weight * y);
                        }
                    })
                })
                .map_err(|e| MoeBlockError::tensor(layer, e))?;
        }
        if self.averages_shared {
            out.iter_mut().for_each(|out| *out *= 0.5);
        }
        if let Some(observer) = observer {
            observer.moe_block(&MoeRecord {
                layer,
                top_k: self.router.config().top_k,
                input: x,
                topk_idx,
                topk_weights,
                output: out,
                backend_time,
            });
        }
        Ok(())
    }

    fn route_tensor(&mut self, x: &Tensor) -> Result<(), MoeBlockError> {
        let layer = self.layer;
        let Workspace { router: workspace, topk_idx, topk_weights } = &mut self.workspace;
        let route = |logits: &[f32]| {
            let config = self.router.config();
            let row = config.num_experts + config.weighted_shared;
            let entries = logits.len() / row * config.top_k;
            topk_idx.resize(entries, -1);
            topk_weights.resize(entries, 0.0);
            self.router.route(logits, workspace, topk_idx, topk_weights)
        };
        let tensor_error = |e| MoeBlockError::tensor(layer, e);
        let normalised = match &self.input_scale {
            None => None,
            Some((norm, scale)) => {
                let values =
                    with_values(x, |x| normalise(x, *norm, scale)).map_err(tensor_error)?;
                Some(Tensor::from_vec(values, x.shape(), &Device::Cpu).map_err(tensor_error)?)
            }
        };
        let logits = self.gate.forward(normalised.as_ref().unwrap_or(x)).map_err(tensor_error)?;
        with_values(&logits, route)
            .map_err(tensor_error)?
            .map_err(|source| MoeBlockError::Route { layer, source })
    }

    /// `[num_tokens, hidden]` from its values.
    fn tensor(&self, x: &[f32]) -> Result<Tensor, MoeBlockError> {
        let layer = self.layer;
        let num_tokens = x.len() / self.hidden;
        if num_tokens * self.hidden != x.len() {
            let (found, expected) = (x.len(), num_tokens * self.hidden);
            return Err(MoeBlockError::Length { layer, what: "x", found, expected });
        }
        Tensor::from_slice(x, (num_tokens, self.hidden), &Device::Cpu)
            .map_err(|e| MoeBlockError::tensor(layer, e))
    }
}

impl Clone for MoeBlock {
    fn clone(&self) -> Self {
        Self {
            layer: self.layer,
            hidden: self.hidden,
            gate: self.gate.clone(),
            router: self.router.clone(),
            shared: self.shared.clone(),
            weighted_shared: self.weighted_shared.clone(),
            input_scale: self.input_scale.clone(),
            shared_gate: self.shared_gate.clone(),
            averages_shared: self.averages_shared,
            workspace: Workspace::default(),
        }
    }
}

#[derive(Debug, Default)]
struct Workspace {
    router: RouterWorkspace,
    topk_idx: Vec<i32>,
    topk_weights: Vec<f32>,
}

/// Rows of `x`, each divided by its root mean square and multiplied by `scale`.
fn normalise(x: &[f32], norm: InputNorm, scale: &[f32]) -> Vec<f32> {
    let mut out = Vec::with_capacity(x.len());
    for row in x.chunks(scale.len()) {
        let mean = row.iter().map(|x| x * x).sum::<f32>() / scale.len() as f32;
        let factor = 1.0 / (mean + norm.epsilon).sqrt();
        out.extend(row.iter().zip(scale).map(|(x, scale)| x * factor * scale));
    }
    out
}
