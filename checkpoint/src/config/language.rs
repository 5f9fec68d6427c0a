//! The parameters of a text model apart from its experts and routers.

use serde_json::Value;

use super::ConfigError;
use super::keys::{Keys, as_whole, clip, invalid};
use crate::family::Family;

/// Parameters of a text model apart from its experts and routers.
#[derive(Debug, Clone, PartialEq)]
pub struct LanguageConfig {
    /// Inner width of a dense MLP layer, if the model has dense layers.
    pub dense_intermediate: Option<usize>,
    /// Added to the variance in RMS norms.
    pub rms_norm_eps: f64,
    /// Vocabulary size, rows of the embedding.
    pub vocab: usize,
    /// True if the output head reuses the embedding.
    pub tie_word_embeddings: bool,
    /// Longest context, in tokens.
    pub max_positions: usize,
    /// Token that starts a text, if the model has one.
    pub bos_id: Option<u32>,
    /// Tokens that end a text.
    pub eos_ids: Vec<u32>,
    /// Grouped-query attention; `None` for families with latent attention (DeepSeek).
    pub attention: Option<AttentionConfig>,
}

/// Grouped-query attention with rotary embeddings.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionConfig {
    /// Query heads; a multiple of `num_kv_heads`.
    pub num_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Width of one head; even.
    pub head_dim: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Kind of rotary embedding: `"default"` is the plain one.
    pub rope_type: String,
    /// True if queries and keys pass an RMS norm per head (Qwen3).
    pub qk_norm: bool,
    /// True if the q, k and v projections have a bias.
    pub bias: bool,
    /// Positions that a token can look back, if limited.
    pub sliding_window: Option<usize>,
}

pub(super) fn parse(
    family: &Family,
    keys: &Keys,
    hidden: usize,
    has_dense_layers: bool,
) -> Result<LanguageConfig, ConfigError> {
    let default_eps = if is_qwen(family) { 1e-6 } else { 1e-5 };
    let rms_norm_eps = keys.number("rms_norm_eps")?.unwrap_or(match family.attention_is_latent() {
        true => 1e-6,
        false => default_eps,
    });
    if !(0.0..1.0).contains(&rms_norm_eps) {
        return Err(invalid("rms_norm_eps", rms_norm_eps, "a small number, not negative"));
    }
    let attention = match family.attention_is_latent() {
        true => None,
        false => Some(attention(family, keys, hidden)?),
    };
    Ok(LanguageConfig {
        dense_intermediate: has_dense_layers
            .then(|| keys.dim(&["intermediate_size"]))
            .transpose()?,
        rms_norm_eps,
        vocab: keys.dim(&["vocab_size"])?,
        tie_word_embeddings: match keys.get_shared("tie_word_embeddings") {
            None => false,
            Some(value) => value
                .as_bool()
                .ok_or_else(|| invalid("tie_word_embeddings", clip(value), "true or false"))?,
        },
        max_positions: keys.dim(&["max_position_embeddings"])?,
        bos_id: token_ids("bos_token_id", keys.get_shared("bos_token_id"))?.first().copied(),
        eos_ids: token_ids("eos_token_id", keys.get_shared("eos_token_id"))?,
        attention,
    })
}

/// A token id, or a list of such; empty without the key.
pub(crate) fn token_ids(key: &'static str, value: Option<&Value>) -> Result<Vec<u32>, ConfigError> {
    let id = |value: &Value| {
        as_whole(value)
            .and_then(|id| u32::try_from(id).ok())
            .ok_or_else(|| invalid(key, clip(value), "a token id, or a list of such"))
    };
    match value {
        None => Ok(Vec::new()),
        Some(Value::Array(ids)) => ids.iter().map(id).collect(),
        Some(value) => Ok(vec![id(value)?]),
    }
}

fn is_qwen(family: &Family) -> bool {
    family.model_type.starts_with("qwen")
}

impl Family {
    fn attention_is_latent(&self) -> bool {
        self.model_type.starts_with("deepseek")
    }
}

fn attention(family: &Family, keys: &Keys, hidden: usize) -> Result<AttentionConfig, ConfigError> {
    let num_heads = keys.dim(&["num_attention_heads"])?;
    let num_kv_heads = match keys.get("num_key_value_heads") {
        None => num_heads,
        Some(_) => keys.dim(&["num_key_value_heads"])?,
    };
    if !num_heads.is_multiple_of(num_kv_heads) {
        let expected = format!("a divisor of num_attention_heads, {num_heads}");
        return Err(invalid("num_key_value_heads", num_kv_heads, expected));
    }
    let head_dim = match keys.get("head_dim") {
        None => hidden / num_heads,
        Some(_) => keys.dim(&["head_dim"])?,
    };
    if head_dim == 0 || !head_dim.is_multiple_of(2) {
        return Err(invalid("head_dim", head_dim, "an even number"));
    }
    // transformers reads `rope_parameters` first, and in each `rope_type` before its older name `type`.
    let ropes = [keys.get("rope_parameters"), keys.get("rope_scaling")];
    let in_ropes = |key: &str| ropes.iter().find_map(|rope| rope.as_ref()?.get(key));
    let theta = in_ropes("rope_theta").or_else(|| keys.get("rope_theta"));
    let default_theta = if is_qwen(family) { 10_000.0 } else { 1_000_000.0 };
    let rope_theta = match theta {
        None => default_theta,
        Some(value) => value.as_f64().unwrap_or(f64::NAN),
    };
    if !(rope_theta.is_finite() && rope_theta > 0.0) {
        let found = theta.map_or_else(String::new, clip);
        return Err(invalid("rope_theta", found, "a positive number"));
    }
    let rope_type = in_ropes("rope_type").or_else(|| in_ropes("type")).and_then(Value::as_str);
    // Qwen writes a window size that only counts if `use_sliding_window` is set.
    let window_used = keys.flag("use_sliding_window")?.unwrap_or(!is_qwen(family));
    let window = if window_used { keys.whole("sliding_window")? } else { None };
    Ok(AttentionConfig {
        num_heads,
        num_kv_heads,
        head_dim,
        rope_theta,
        rope_type: rope_type.unwrap_or("default").to_owned(),
        qk_norm: matches!(family.model_type, "qwen3_moe"),
        bias: keys.flag("attention_bias")?.unwrap_or(false),
        sliding_window: window,
    })
}
