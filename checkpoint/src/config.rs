//! The parameters of `config.json` that define a model's arithmetic.

mod raw;

use std::fmt;

/// A model family. It determines tensor names and the router's arithmetic.
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

/// Parameters of a model, independent of how its family names them in `config.json`.
///
/// [`ModelConfig::from_json`] checks that every dimension is at least 1 and within limits, that `top_k` ≤
/// `num_experts`, and that the router's groups divide the experts evenly.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Model family.
    pub architecture: Architecture,
    /// Width of a hidden state.
    pub hidden: usize,
    /// Inner width of one routed expert.
    pub moe_intermediate: usize,
    /// Inner width of a dense MLP layer, if the model has dense layers.
    pub dense_intermediate: Option<usize>,
    /// Decoder layers, including dense ones.
    pub num_layers: u32,
    /// Routed experts per MoE layer.
    pub num_experts: u32,
    /// Experts per token.
    pub top_k: usize,
    /// Choice and weights of experts.
    pub router: RouterConfig,
    /// Shared experts, which process every token. They are stored as one MLP of inner width
    /// `num_shared_experts × moe_intermediate`. 0 if the model has none.
    pub num_shared_experts: u32,
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
    /// True if queries and keys pass an RMS norm per head (Qwen3).
    pub qk_norm: bool,
    /// True if the q, k and v projections have a bias.
    pub bias: bool,
    /// Positions that a token can look back, if limited.
    pub sliding_window: Option<usize>,
}

/// Rule of a router that turns logits (`x · weightᵀ`, in f32) into experts and weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouterConfig {
    /// Function from logits to scores, over all experts.
    pub scoring: Scoring,
    /// True if the chosen experts' scores are divided by their sum.
    pub renormalise: bool,
    /// Groups of consecutive experts. 1 if routing is not limited by group.
    pub num_groups: usize,
    /// Groups that may be chosen per token. Equal to `num_groups` if there is no limit.
    pub topk_groups: usize,
    /// Factor on the weights, after renormalisation.
    pub routed_scaling_factor: f32,
    /// True if a per-expert bias (`e_score_correction_bias`) is added to the scores for the choice of
    /// experts. Weights use the scores without the bias.
    pub has_bias: bool,
    /// Method of choosing groups and experts.
    pub topk_method: TopkMethod,
}

/// Function from logits to scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scoring {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each logit.
    Sigmoid,
}

/// Method of choosing experts from scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TopkMethod {
    /// The `top_k` highest scores.
    Greedy,
    /// DeepSeek-V2: the score of a group is its best expert's score. Scores outside of the best
    /// `topk_groups` groups count as 0.
    GroupLimitedGreedy,
    /// DeepSeek-V3: the score of a group is the sum of its two best biased scores. Biased scores outside of
    /// the best `topk_groups` groups count as −∞.
    NoAuxTc,
}

impl ModelConfig {
    /// Parses the text of a `config.json` of an old or new transformers version.
    pub fn from_json(json: &str) -> Result<ModelConfig, ConfigError> {
        raw::parse(json)
    }

    /// The layers that have routed experts, ascending. Never empty.
    pub fn moe_layers(&self) -> Vec<u32> {
        self.moe_layers.clone()
    }

    /// Returns true if the layer has routed experts.
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

    /// One line per parameter that defines the arithmetic, in a fixed order and spelling. Floats are written
    /// as their bits, so that the text does not depend on float formatting.
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

/// Error in a configuration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name every field")]
pub enum ConfigError {
    /// Not JSON, or a field of the wrong type.
    #[error("not a model configuration: {0}")]
    Json(#[from] serde_json::Error),
    /// The architecture is not supported.
    #[error("architecture '{found}' is not supported; supported are {}", supported())]
    UnknownArchitecture { found: String },
    /// A required field is missing.
    #[error("'{field}' is missing")]
    Missing { field: &'static str },
    /// A field has an invalid value.
    #[error("'{field}' is {found}, expected {expected}")]
    Invalid { field: &'static str, found: String, expected: String },
}

fn supported() -> String {
    Architecture::ALL.map(|a| a.class_name()).join(", ")
}
