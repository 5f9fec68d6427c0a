//! The numbers of `config.json` that define a model's arithmetic.

mod raw;

use std::fmt;

/// A model family: it decides tensor names and the router's arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Architecture {
    /// `Qwen3MoeForCausalLM`.
    Qwen3Moe,
    /// `MixtralForCausalLM`.
    Mixtral,
    /// `DeepseekV2ForCausalLM`.
    DeepseekV2,
    /// `DeepseekV3ForCausalLM` (DeepSeek-V3 and R1).
    DeepseekV3,
}

impl Architecture {
    /// Every supported architecture.
    pub const ALL: [Architecture; 4] = [
        Architecture::Qwen3Moe,
        Architecture::Mixtral,
        Architecture::DeepseekV2,
        Architecture::DeepseekV3,
    ];

    /// The class name in `config.json`'s `architectures`.
    pub fn class_name(self) -> &'static str {
        match self {
            Architecture::Qwen3Moe => "Qwen3MoeForCausalLM",
            Architecture::Mixtral => "MixtralForCausalLM",
            Architecture::DeepseekV2 => "DeepseekV2ForCausalLM",
            Architecture::DeepseekV3 => "DeepseekV3ForCausalLM",
        }
    }

    /// The value of `config.json`'s `model_type`.
    pub fn model_type(self) -> &'static str {
        match self {
            Architecture::Qwen3Moe => "qwen3_moe",
            Architecture::Mixtral => "mixtral",
            Architecture::DeepseekV2 => "deepseek_v2",
            Architecture::DeepseekV3 => "deepseek_v3",
        }
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.class_name())
    }
}

/// What a model computes, whatever its family spells it in `config.json`.
///
/// Every dimension is at least 1 and within sane limits, `top_k` ≤ `num_experts`, and the groups
/// of the router divide the experts: [`ModelConfig::from_json`] has checked that.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Model family.
    pub architecture: Architecture,
    /// Width of a hidden state.
    pub hidden: usize,
    /// Inner width of one routed expert.
    pub moe_intermediate: usize,
    /// Inner width of a dense MLP layer, where the model has such layers.
    pub dense_intermediate: Option<usize>,
    /// Decoder layers, dense ones included.
    pub num_layers: u32,
    /// Routed experts per MoE layer.
    pub num_experts: u32,
    /// Experts per token.
    pub top_k: usize,
    /// How experts are chosen and weighted.
    pub router: RouterConfig,
    /// Experts that every token visits. They are stored as one MLP of inner width
    /// `num_shared_experts × moe_intermediate`; 0 where the model has none.
    pub num_shared_experts: u32,
    /// Added to the variance in RMS norms.
    pub rms_norm_eps: f64,
    /// Vocabulary size, rows of the embedding.
    pub vocab: usize,
    /// Whether the output head is the embedding.
    pub tie_word_embeddings: bool,
    /// Longest context, in tokens.
    pub max_positions: usize,
    /// Token that starts a text, if the model has one.
    pub bos_id: Option<u32>,
    /// Tokens that end a text.
    pub eos_ids: Vec<u32>,
    /// Grouped-query attention; `None` for families with latent attention (DeepSeek).
    pub attention: Option<AttentionConfig>,
    /// Rows and columns of an fp8 scale block, if the linear layers are quantised to fp8.
    pub fp8_block: Option<[usize; 2]>,
    moe_layers: Vec<u32>,
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
    /// Whether queries and keys pass an RMS norm per head (Qwen3).
    pub qk_norm: bool,
    /// Whether the q, k and v projections have a bias.
    pub bias: bool,
    /// Positions that a token can look back, if limited.
    pub sliding_window: Option<usize>,
}

/// How a router turns logits (`x · weightᵀ`, in f32) into experts and weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouterConfig {
    /// Function from logits to scores, over all experts.
    pub scoring: Scoring,
    /// Whether the chosen experts' scores are divided by their sum.
    pub renormalise: bool,
    /// Groups of consecutive experts; 1 where routing is not limited by group.
    pub num_groups: usize,
    /// Groups that may be chosen per token; equal to `num_groups` where there is no limit.
    pub topk_groups: usize,
    /// Factor on the weights, after renormalisation.
    pub routed_scaling_factor: f32,
    /// Whether a per-expert bias (`e_score_correction_bias`) is added to the scores for choosing;
    /// weights are taken from the scores without it.
    pub has_bias: bool,
    /// How groups and experts are chosen.
    pub topk_method: TopkMethod,
}

/// From logits to scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scoring {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each logit.
    Sigmoid,
}

/// How experts are chosen from scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TopkMethod {
    /// The `top_k` highest scores.
    Greedy,
    /// DeepSeek-V2: a group scores as its best expert; the best `topk_groups` groups stay, the
    /// others' scores count as 0.
    GroupLimitedGreedy,
    /// DeepSeek-V3: a group scores as the sum of its two best biased scores; the best
    /// `topk_groups` groups stay, the others' biased scores count as −∞.
    NoAuxTc,
}

impl ModelConfig {
    /// Reads the text of a `config.json`, in the spelling of old or new transformers versions.
    pub fn from_json(json: &str) -> Result<ModelConfig, ConfigError> {
        raw::parse(json)
    }

    /// The layers that have routed experts, ascending. Never empty.
    pub fn moe_layers(&self) -> Vec<u32> {
        self.moe_layers.clone()
    }

    /// Whether the layer has routed experts.
    pub fn is_moe_layer(&self, layer: u32) -> bool {
        self.moe_layers.binary_search(&layer).is_ok()
    }

    /// A short form for messages: `0-3`, or `3-60`, or `1, 3, 5, …`.
    pub(crate) fn moe_layers_text(&self) -> String {
        match self.moe_layers.as_slice() {
            [first, .., last] if (last - first) as usize + 1 == self.moe_layers.len() => {
                format!("{first}-{last}")
            }
            layers => {
                let shown: Vec<String> = layers.iter().take(8).map(u32::to_string).collect();
                let more = if layers.len() > 8 { ", …" } else { "" };
                format!("{}{more}", shown.join(", "))
            }
        }
    }

    /// One line per number that defines the arithmetic, in a fixed order and spelling. Floats
    /// stand as their bits, so that no formatting rule can change the text.
    pub(crate) fn canonical(&self) -> String {
        use std::fmt::Write;
        let mut s = String::new();
        let mut line = |key: &str, value: &dyn fmt::Display| {
            // Writing to a String cannot fail.
            let _ = writeln!(s, "{key}={value}");
        };
        line("architecture", &self.architecture);
        line("hidden", &self.hidden);
        line("moe_intermediate", &self.moe_intermediate);
        line("dense_intermediate", &self.dense_intermediate.unwrap_or(0));
        line("num_layers", &self.num_layers);
        line("num_experts", &self.num_experts);
        line("top_k", &self.top_k);
        line("num_shared_experts", &self.num_shared_experts);
        line("moe_layers", &format_args!("{:?}", self.moe_layers));
        let r = &self.router;
        line("scoring", &format_args!("{:?}", r.scoring));
        line("renormalise", &r.renormalise);
        line("num_groups", &r.num_groups);
        line("topk_groups", &r.topk_groups);
        line("routed_scaling_factor", &r.routed_scaling_factor.to_bits());
        line("has_bias", &r.has_bias);
        line("topk_method", &format_args!("{:?}", r.topk_method));
        line("rms_norm_eps", &self.rms_norm_eps.to_bits());
        line("vocab", &self.vocab);
        line("tie_word_embeddings", &self.tie_word_embeddings);
        let [block_rows, block_cols] = self.fp8_block.unwrap_or([0, 0]);
        line("fp8_block", &format_args!("{block_rows}x{block_cols}"));
        if let Some(a) = &self.attention {
            line("num_heads", &a.num_heads);
            line("num_kv_heads", &a.num_kv_heads);
            line("head_dim", &a.head_dim);
            line("rope_theta", &a.rope_theta.to_bits());
            line("rope_type", &a.rope_type);
            line("qk_norm", &a.qk_norm);
            line("attention_bias", &a.bias);
            line("sliding_window", &a.sliding_window.unwrap_or(0));
        }
        s
    }
}

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// Not JSON, or a field of the wrong type.
    #[error("not a model configuration: {0}")]
    Json(#[from] serde_json::Error),
    /// The architecture is not one of ours.
    #[error("architecture '{found}' is not supported; supported are {}", supported())]
    UnknownArchitecture {
        /// What the file says.
        found: String,
    },
    /// A field that is needed is absent.
    #[error("'{field}' is missing")]
    Missing {
        /// The field, with its alternative spellings.
        field: &'static str,
    },
    /// A field has a value that cannot be used.
    #[error("'{field}' is {found}, expected {expected}")]
    Invalid {
        /// The field.
        field: &'static str,
        /// Its value.
        found: String,
        /// What it has to be.
        expected: String,
    },
}

fn supported() -> String {
    Architecture::ALL.map(|a| a.class_name()).join(", ")
}
