//! The tensors of a layer's router.

use crate::dtype::DType;
use crate::open::Checkpoint;
use crate::tensor::{PLAIN_FLOATS, TensorError, TensorView};

/// The router of a layer.
#[derive(Debug, Clone, Copy)]
pub struct RouterTensors<'a> {
    /// `[num_experts + weighted_shared, model_hidden]`, a float dtype.
    pub weight: TensorView<'a>,
    /// Added to the logits (gpt-oss), `[num_experts]`, a float dtype.
    pub logit_bias: Option<TensorView<'a>>,
    /// Added to the scores for the choice of experts (`e_score_correction_bias`), `num_experts` values of a float
    /// dtype.
    pub bias: Option<TensorView<'a>>,
    /// Factors on the weights (`per_expert_scale`, `global_scale`): `[num_experts]`, or `[1]` for all experts; a float
    /// dtype.
    pub expert_scales: Option<TensorView<'a>>,
    /// The vector `[model_hidden]` of [`InputNorm`](crate::InputNorm), a float dtype.
    pub input_scale: Option<TensorView<'a>>,
    /// Experts of each token id, `[vocab, top_k]` of I32 or I64. A layer with this table (DeepSeek-V4's first ones)
    /// chooses experts by the token alone, so that only the inference engine, which knows the token ids, can choose.
    /// Their weights follow from the logits as in other layers. Such a layer has no `bias`.
    pub hash_table: Option<TensorView<'a>>,
}

impl Checkpoint {
    /// The router of an MoE layer.
    ///
    /// # Errors
    /// [`TensorError`] that names the layer or the tensor at fault.
    pub fn router(&self, layer: u32) -> Result<RouterTensors<'_>, TensorError> {
        self.check_moe_layer(layer)?;
        let config = self.config();
        let num_experts = config.num_experts as usize;
        let prefix = self.layer_prefix(layer);
        let hash_table = match self.contains(&format!("{prefix}{HASH_TABLE}")) {
            true => {
                let table = self.tensor(&format!("{prefix}{HASH_TABLE}"))?;
                let rows = table.shape.first().copied().unwrap_or_default();
                let table = table.expect_shape(&[rows, config.top_k])?;
                Some(table.expect_dtype(&[DType::I32, DType::I64])?)
            }
            false => None,
        };
        let first = |names: &[&str]| {
            let mut full = names.iter().map(|name| format!("{prefix}{name}"));
            let first = full.clone().next().unwrap_or_default();
            full.find(|name| self.contains(name)).unwrap_or(first)
        };
        let gate = first(config.family.gate);
        let weight = self
            .tensor(&gate)?
            .expect_shape(&[num_experts + config.num_weighted_shared, config.model_hidden])?
            .expect_dtype(PLAIN_FLOATS)?;
        let logit_bias = format!("{}.bias", gate.trim_end_matches(".weight"));
        // DeepSeek-V4 calls the bias for the choice so.
        let is_choice_bias = config.family.choice_bias.iter().any(|b| logit_bias.ends_with(b));
        let logit_bias = match self.contains(&logit_bias) && !is_choice_bias {
            true => {
                let bias = self.tensor(&logit_bias)?.expect_shape(&[num_experts])?;
                Some(bias.expect_dtype(PLAIN_FLOATS)?)
            }
            false => None,
        };
        let has_bias = hash_table.is_none() && config.router().is_ok_and(|router| router.has_bias);
        let bias = match has_bias && !config.family.choice_bias.is_empty() {
            true => {
                let bias = self.tensor(&first(config.family.choice_bias))?;
                // Ernie stores [1, num_experts].
                let bias = match bias.shape.len() {
                    2 => bias.expect_shape(&[1, num_experts])?,
                    _ => bias.expect_shape(&[num_experts])?,
                };
                Some(bias.expect_dtype(PLAIN_FLOATS)?)
            }
            false => None,
        };
        let rule = config.family.router.as_ref();
        let vector = |name: Option<&str>, len, or_one| {
            let Some(name) = name else { return Ok(None) };
            let tensor = self.tensor(&format!("{prefix}{name}"))?;
            let len = if or_one && tensor.shape == [1] { 1 } else { len };
            tensor.expect_shape(&[len])?.expect_dtype(PLAIN_FLOATS).map(Some)
        };
        Ok(RouterTensors {
            weight,
            logit_bias,
            bias,
            expert_scales: vector(rule.and_then(|rule| rule.expert_scales), num_experts, true)?,
            input_scale: vector(
                rule.and_then(|rule| rule.input_scale),
                config.model_hidden,
                false,
            )?,
            hash_table,
        })
    }
}

/// Name of a table from token ids to experts, behind the layer's prefix.
const HASH_TABLE: &str = "ffn.gate.tid2eid";
