//! The interface between a model and its experts.

use thiserror::Error;

/// Computes the routed experts of a layer: a client of the expert service, or the experts of a checkpoint in this
/// process.
pub trait ExpertBackend {
    /// Computes for every token the sum over its chosen experts `e` of `weight_e * expert_e(x)`.
    ///
    /// `x` is `[num_tokens, hidden]`. `topk_idx` and `topk_weights` are `[num_tokens, top_k]`, and an index of -1 masks
    /// its entry. Every value of `out` `[num_tokens, hidden]` is overwritten. Zero tokens are no error.
    ///
    /// # Errors
    /// [`BackendError`]; the content of `out` is then unspecified.
    fn forward(
        &mut self,
        layer: u32,
        x: &[f32],
        topk_idx: &[i32],
        topk_weights: &[f32],
        out: &mut [f32],
    ) -> Result<(), BackendError>;
}

impl<B: ExpertBackend + ?Sized> ExpertBackend for &mut B {
    fn forward(
        &mut self,
        layer: u32,
        x: &[f32],
        topk_idx: &[i32],
        topk_weights: &[f32],
        out: &mut [f32],
    ) -> Result<(), BackendError> {
        (**self).forward(layer, x, topk_idx, topk_weights, out)
    }
}

impl<B: ExpertBackend + ?Sized> ExpertBackend for Box<B> {
    fn forward(
        &mut self,
        layer: u32,
        x: &[f32],
        topk_idx: &[i32],
        topk_weights: &[f32],
        out: &mut [f32],
    ) -> Result<(), BackendError> {
        (**self).forward(layer, x, topk_idx, topk_weights, out)
    }
}

/// Failure of an [`ExpertBackend`] at a layer.
#[derive(Debug, Error)]
#[error("the experts of layer {layer} could not be computed: {source}")]
pub struct BackendError {
    layer: u32,
    source: Box<dyn std::error::Error + Send + Sync>,
}

impl BackendError {
    /// An error of a backend at `layer`, caused by `source`.
    pub fn new(
        layer: u32,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> BackendError {
        Self { layer, source: source.into() }
    }

    /// The layer that failed.
    pub fn layer(&self) -> u32 {
        self.layer
    }
}
