//! The fields of `config.json` under their names in files, and their checks.

use serde::Deserialize;

use super::{
    Architecture, AttentionConfig, ConfigError, ModelConfig, RouterConfig, Scoring, TopkMethod,
};
use crate::FP8_BLOCK;

pub(super) fn parse(json: &str) -> Result<ModelConfig, ConfigError> {
    let raw: Raw = serde_json::from_str(json)?;
    let architecture = architecture(&raw)?;
    check_activation(&raw)?;

    let hidden = dim("hidden_size", raw.hidden_size)?;
    let num_layers = count("num_hidden_layers", raw.num_hidden_layers)?;
    let num_experts = count(
        "num_experts (or num_local_experts, n_routed_experts)",
        raw.num_experts.or(raw.num_local_experts).or(raw.n_routed_experts),
    )?;
    let top_k = dim("num_experts_per_tok", raw.num_experts_per_tok)?;
    if top_k > num_experts as usize {
        return Err(invalid(
            "num_experts_per_tok",
            top_k,
            format!("at most the number of experts, {num_experts}"),
        ));
    }
    // Mixtral has no dense layers and calls the width of an expert `intermediate_size`.
    let moe_intermediate = match architecture {
        Architecture::Mixtral => dim("intermediate_size", raw.intermediate_size)?,
        _ => dim("moe_intermediate_size", raw.moe_intermediate_size)?,
    };
    let moe_layers = moe_layers(architecture, &raw, num_layers)?;
    let has_dense_layers = moe_layers.len() < num_layers as usize;
    let dense_intermediate =
        has_dense_layers.then(|| dim("intermediate_size", raw.intermediate_size)).transpose()?;
    let is_deepseek = matches!(architecture, Architecture::DeepseekV2 | Architecture::DeepseekV3);
    let num_shared_experts = if is_deepseek {
        match raw.n_shared_experts {
            None | Some(0) => 0,
            shared => count("n_shared_experts", shared)?,
        }
    } else {
        0
    };

    let default_eps = if architecture == Architecture::Mixtral { 1e-5 } else { 1e-6 };
    let rms_norm_eps = raw.rms_norm_eps.unwrap_or(default_eps);
    if !(0.0..1.0).contains(&rms_norm_eps) {
        return Err(invalid("rms_norm_eps", rms_norm_eps, "a small number, not negative"));
    }

    Ok(ModelConfig {
        architecture,
        hidden,
        moe_intermediate,
        dense_intermediate,
        num_layers,
        num_experts,
        top_k,
        router: router(architecture, &raw, num_experts as usize, top_k)?,
        num_shared_experts,
        rms_norm_eps,
        vocab: dim("vocab_size", raw.vocab_size)?,
        tie_word_embeddings: raw.tie_word_embeddings.unwrap_or(false),
        max_positions: dim("max_position_embeddings", raw.max_position_embeddings)?,
        bos_id: raw.bos_token_id.as_ref().and_then(|ids| ids.to_vec().first().copied()),
        eos_ids: raw.eos_token_id.as_ref().map(Ids::to_vec).unwrap_or_default(),
        attention: if is_deepseek { None } else { Some(attention(architecture, &raw, hidden)?) },
        fp8_block: fp8_block(&raw)?,
        moe_layers,
    })
}

#[derive(Deserialize)]
struct Raw {
    architectures: Option<Vec<String>>,
    model_type: Option<String>,
    hidden_act: Option<String>,
    hidden_size: Option<usize>,
    intermediate_size: Option<usize>,
    moe_intermediate_size: Option<usize>,
    num_hidden_layers: Option<usize>,
    num_experts: Option<usize>,
    num_local_experts: Option<usize>,
    n_routed_experts: Option<usize>,
    n_shared_experts: Option<usize>,
    num_experts_per_tok: Option<usize>,
    norm_topk_prob: Option<bool>,
    scoring_func: Option<String>,
    topk_method: Option<String>,
    n_group: Option<usize>,
    topk_group: Option<usize>,
    routed_scaling_factor: Option<f64>,
    first_k_dense_replace: Option<u32>,
    moe_layer_freq: Option<u32>,
    decoder_sparse_step: Option<u32>,
    mlp_only_layers: Option<Vec<u32>>,
    num_attention_heads: Option<usize>,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    attention_bias: Option<bool>,
    sliding_window: Option<usize>,
    use_sliding_window: Option<bool>,
    rms_norm_eps: Option<f64>,
    rope_theta: Option<f64>,
    rope_parameters: Option<Rope>,
    rope_scaling: Option<Rope>,
    vocab_size: Option<usize>,
    tie_word_embeddings: Option<bool>,
    max_position_embeddings: Option<usize>,
    bos_token_id: Option<Ids>,
    eos_token_id: Option<Ids>,
    quantization_config: Option<Quantization>,
}

#[derive(Deserialize)]
struct Rope {
    rope_theta: Option<f64>,
    #[serde(alias = "type")]
    rope_type: Option<String>,
}

#[derive(Deserialize)]
struct Quantization {
    quant_method: Option<String>,
    fmt: Option<String>,
    weight_block_size: Option<Vec<usize>>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "a token id is neither a whole number nor a list of such")]
enum Ids {
    One(u32),
    Many(Vec<u32>),
}

impl Ids {
    fn to_vec(&self) -> Vec<u32> {
        match self {
            Ids::One(id) => vec![*id],
            Ids::Many(ids) => ids.clone(),
        }
    }
}

fn architecture(raw: &Raw) -> Result<Architecture, ConfigError> {
    let class = raw.architectures.as_deref().and_then(<[String]>::first);
    let known = Architecture::ALL.into_iter().find(|a| match (class, &raw.model_type) {
        (Some(class), _) => a.class_name() == class,
        (None, Some(model_type)) => a.model_type() == model_type,
        (None, None) => false,
    });
    known.ok_or_else(|| match class.or(raw.model_type.as_ref()) {
        Some(found) => ConfigError::UnknownArchitecture { found: found.clone() },
        None => ConfigError::Missing { field: "architectures" },
    })
}

fn check_activation(raw: &Raw) -> Result<(), ConfigError> {
    match raw.hidden_act.as_deref() {
        None | Some("silu" | "swish") => Ok(()),
        Some(other) => Err(invalid("hidden_act", other, "'silu'")),
    }
}

fn moe_layers(
    architecture: Architecture,
    raw: &Raw,
    num_layers: u32,
) -> Result<Vec<u32>, ConfigError> {
    let all = 0..num_layers;
    let layers: Vec<u32> = match architecture {
        Architecture::Mixtral => all.collect(),
        Architecture::Qwen3Moe => {
            let step = raw.decoder_sparse_step.unwrap_or(1);
            if step == 0 {
                return Err(invalid("decoder_sparse_step", step, "at least 1"));
            }
            let dense = raw.mlp_only_layers.as_deref().unwrap_or_default();
            all.filter(|l| (l + 1) % step == 0 && !dense.contains(l)).collect()
        }
        Architecture::DeepseekV2 | Architecture::DeepseekV3 => {
            let default = if architecture == Architecture::DeepseekV3 { 3 } else { 0 };
            let first = raw.first_k_dense_replace.unwrap_or(default);
            let freq = raw.moe_layer_freq.unwrap_or(1);
            if freq == 0 {
                return Err(invalid("moe_layer_freq", freq, "at least 1"));
            }
            all.filter(|l| *l >= first && l % freq == 0).collect()
        }
    };
    if layers.is_empty() {
        return Err(invalid(
            "num_hidden_layers",
            num_layers,
            "enough layers that at least one has experts (see first_k_dense_replace, \
             moe_layer_freq, decoder_sparse_step and mlp_only_layers)",
        ));
    }
    Ok(layers)
}

fn router(
    architecture: Architecture,
    raw: &Raw,
    num_experts: usize,
    top_k: usize,
) -> Result<RouterConfig, ConfigError> {
    let softmax = |renormalise| RouterConfig {
        scoring: Scoring::Softmax,
        renormalise,
        num_groups: 1,
        topk_groups: 1,
        routed_scaling_factor: 1.0,
        has_bias: false,
        topk_method: TopkMethod::Greedy,
    };
    let is_v3 = match architecture {
        Architecture::Mixtral => return Ok(softmax(true)),
        Architecture::Qwen3Moe => return Ok(softmax(raw.norm_topk_prob.unwrap_or(false))),
        Architecture::DeepseekV2 => false,
        Architecture::DeepseekV3 => true,
    };

    // transformers 5 drops `scoring_func` and, for V3, `topk_method`: the family implies them.
    let scoring = match (raw.scoring_func.as_deref(), is_v3) {
        (Some("sigmoid"), _) | (None, true) => Scoring::Sigmoid,
        (Some("softmax"), _) | (None, false) => Scoring::Softmax,
        (Some(other), _) => return Err(invalid("scoring_func", other, "'softmax' or 'sigmoid'")),
    };
    let topk_method = match (raw.topk_method.as_deref(), is_v3) {
        (Some("noaux_tc"), _) | (None, true) => TopkMethod::NoAuxTc,
        (Some("group_limited_greedy"), _) => TopkMethod::GroupLimitedGreedy,
        (Some("greedy" | "gready"), _) | (None, false) => TopkMethod::Greedy,
        (Some(other), _) => {
            let expected = "'greedy', 'group_limited_greedy' or 'noaux_tc'";
            return Err(invalid("topk_method", other, expected));
        }
    };
    let (num_groups, topk_groups) = match topk_method {
        TopkMethod::Greedy => (1, 1),
        _ => (raw.n_group.unwrap_or(1), raw.topk_group.unwrap_or(1)),
    };
    if num_groups == 0 || !num_experts.is_multiple_of(num_groups) {
        return Err(invalid("n_group", num_groups, format!("a divisor of {num_experts} experts")));
    }
    let group_size = num_experts / num_groups;
    if topk_method == TopkMethod::NoAuxTc && group_size < 2 {
        let expected = format!("at most {}, so that a group has two experts", num_experts / 2);
        return Err(invalid("n_group", num_groups, expected));
    }
    if topk_groups == 0 || topk_groups > num_groups || topk_groups * group_size < top_k {
        let expected = format!("1 to {num_groups} groups that hold at least {top_k} experts");
        return Err(invalid("topk_group", topk_groups, expected));
    }
    let factor = raw.routed_scaling_factor.unwrap_or(1.0) as f32;
    if !factor.is_finite() {
        return Err(invalid("routed_scaling_factor", factor, "a finite number"));
    }
    Ok(RouterConfig {
        scoring,
        renormalise: raw.norm_topk_prob.unwrap_or(is_v3),
        num_groups,
        topk_groups,
        routed_scaling_factor: factor,
        has_bias: topk_method == TopkMethod::NoAuxTc,
        topk_method,
    })
}

fn attention(
    architecture: Architecture,
    raw: &Raw,
    hidden: usize,
) -> Result<AttentionConfig, ConfigError> {
    let num_heads = dim("num_attention_heads", raw.num_attention_heads)?;
    let num_kv_heads =
        dim("num_key_value_heads", Some(raw.num_key_value_heads.unwrap_or(num_heads)))?;
    if !num_heads.is_multiple_of(num_kv_heads) {
        let expected = format!("a divisor of num_attention_heads, {num_heads}");
        return Err(invalid("num_key_value_heads", num_kv_heads, expected));
    }
    let head_dim = dim("head_dim", Some(raw.head_dim.unwrap_or(hidden / num_heads)))?;
    if !head_dim.is_multiple_of(2) {
        return Err(invalid("head_dim", head_dim, "an even number"));
    }
    let ropes = [&raw.rope_parameters, &raw.rope_scaling];
    let rope_theta = ropes.iter().find_map(|r| r.as_ref()?.rope_theta).or(raw.rope_theta);
    let rope_type = ropes.iter().find_map(|r| r.as_ref()?.rope_type.clone());
    let is_qwen = architecture == Architecture::Qwen3Moe;
    let default_theta = if is_qwen { 10_000.0 } else { 1_000_000.0 };
    let rope_theta = rope_theta.unwrap_or(default_theta);
    if !(rope_theta.is_finite() && rope_theta > 0.0) {
        return Err(invalid("rope_theta", rope_theta, "a positive number"));
    }
    // Qwen writes a window size that only counts if `use_sliding_window` is set.
    let window_used = raw.use_sliding_window.unwrap_or(!is_qwen);
    Ok(AttentionConfig {
        num_heads,
        num_kv_heads,
        head_dim,
        rope_theta,
        rope_type: rope_type.unwrap_or_else(|| "default".to_owned()),
        qk_norm: is_qwen,
        bias: raw.attention_bias.unwrap_or(false),
        sliding_window: raw.sliding_window.filter(|_| window_used),
    })
}

fn fp8_block(raw: &Raw) -> Result<Option<[usize; 2]>, ConfigError> {
    let Some(quantization) = &raw.quantization_config else { return Ok(None) };
    let method = quantization.quant_method.as_deref().unwrap_or("none");
    if method != "fp8" {
        let expected = "'fp8', or no quantization_config; use an unquantised or an fp8 checkpoint";
        return Err(invalid("quantization_config.quant_method", method, expected));
    }
    if let Some(fmt) = quantization.fmt.as_deref()
        && fmt != "e4m3"
    {
        return Err(invalid("quantization_config.fmt", fmt, "'e4m3'"));
    }
    match quantization.weight_block_size.as_deref() {
        Some(block) if block == FP8_BLOCK => Ok(Some(FP8_BLOCK)),
        Some(block) => {
            let field = "quantization_config.weight_block_size";
            Err(invalid(field, format!("{block:?}"), format!("{FP8_BLOCK:?}")))
        }
        None => Err(ConfigError::Missing { field: "quantization_config.weight_block_size" }),
    }
}

/// A dimension: present, at least 1, and small enough that a product of two fits into 64 bits.
fn dim(field: &'static str, value: Option<usize>) -> Result<usize, ConfigError> {
    bounded(field, value, MAX_DIM)
}

/// A number of layers or experts: present, at least 1, and small enough to list.
fn count(field: &'static str, value: Option<usize>) -> Result<u32, ConfigError> {
    bounded(field, value, MAX_COUNT).map(|v| v as u32)
}

fn bounded(field: &'static str, value: Option<usize>, max: usize) -> Result<usize, ConfigError> {
    match value {
        None => Err(ConfigError::Missing { field }),
        Some(v) if (1..=max).contains(&v) => Ok(v),
        Some(v) => Err(invalid(field, v, format!("a number from 1 to {max}"))),
    }
}

fn invalid(
    field: &'static str,
    found: impl std::fmt::Display,
    expected: impl Into<String>,
) -> ConfigError {
    ConfigError::Invalid { field, found: found.to_string(), expected: expected.into() }
}

/// Above any model's vocabulary, context or width.
const MAX_DIM: usize = 1 << 24;
/// Above any model's number of layers or experts.
const MAX_COUNT: usize = 1 << 16;
