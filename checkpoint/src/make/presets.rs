//! Shapes, names and configurations of well-known models.

use std::fmt;
use std::str::FromStr;

use serde_json::{Value, json};

use super::TensorPlan;
use super::fill::Fill;
use crate::FP8_BLOCK;
use crate::config::{ConfigError, ModelConfig};
use crate::dtype::DType;

/// A model with a known layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Preset {
    /// Qwen3-30B-A3B: hidden 2048, 128 experts of 768, top-8, bf16.
    Qwen3_30bA3b,
    /// Mixtral-8x7B: hidden 4096, 8 experts of 14336, top-2, bf16.
    Mixtral8x7b,
    /// DeepSeek-V3: hidden 7168, 256 experts of 2048 and a shared one, top-8, fp8.
    DeepseekV3,
    /// The layout of Qwen3-MoE at a few hundred kilobytes.
    TinyQwen3Moe,
    /// The layout of Mixtral at a few hundred kilobytes.
    TinyMixtral,
    /// The layout of DeepSeek-V3 at a few hundred kilobytes, with ragged fp8 blocks.
    TinyDeepseekV3,
    /// The layout of DeepSeek-V3 at a few megabytes, in sizes that GPU kernels support: hidden 256, 16
    /// experts of 192, top-4.
    MiniDeepseekV3,
}

impl Preset {
    /// Every preset.
    pub const ALL: [Preset; 7] = [
        Preset::Qwen3_30bA3b,
        Preset::Mixtral8x7b,
        Preset::DeepseekV3,
        Preset::TinyQwen3Moe,
        Preset::TinyMixtral,
        Preset::TinyDeepseekV3,
        Preset::MiniDeepseekV3,
    ];

    /// The name on a command line.
    pub fn name(self) -> &'static str {
        match self {
            Preset::Qwen3_30bA3b => "qwen3-30b-a3b",
            Preset::Mixtral8x7b => "mixtral-8x7b",
            Preset::DeepseekV3 => "deepseek-v3",
            Preset::TinyQwen3Moe => "tiny-qwen3-moe",
            Preset::TinyMixtral => "tiny-mixtral",
            Preset::TinyDeepseekV3 => "tiny-deepseek-v3",
            Preset::MiniDeepseekV3 => "mini-deepseek-v3",
        }
    }

    /// Decoder layers of the whole model.
    pub fn max_layers(self) -> u32 {
        self.dims().num_layers
    }

    /// The configuration of the whole model.
    ///
    /// # Errors
    /// None for the presets of this version; a test checks that.
    pub fn config(self) -> Result<ModelConfig, ConfigError> {
        ModelConfig::from_json(&self.config_json(self.max_layers()).to_string())
    }

    /// The `config.json` of a model with that many layers.
    pub(super) fn config_json(self, num_layers: u32) -> Value {
        let d = self.dims();
        match self.family() {
            Family::Qwen3Moe => qwen3_config(&d, num_layers),
            Family::Mixtral => mixtral_config(&d, num_layers),
            Family::DeepseekV3 => deepseek_config(&d, num_layers),
        }
    }

    /// Every tensor of a model with that many layers, layer by layer.
    pub(super) fn tensors(self, num_layers: u32) -> Vec<TensorPlan> {
        let d = self.dims();
        let mut plan = Plan { tensors: Vec::new(), fp8: self.family() == Family::DeepseekV3 };
        plan.plain("model.embed_tokens.weight", &[d.vocab, d.hidden], d.hidden);
        for layer in 0..num_layers {
            let prefix = format!("model.layers.{layer}");
            plan.norm(format!("{prefix}.input_layernorm.weight"), d.hidden);
            plan.norm(format!("{prefix}.post_attention_layernorm.weight"), d.hidden);
            match self.family() {
                Family::DeepseekV3 => latent_attention(&mut plan, &prefix, &d),
                family => grouped_attention(&mut plan, &prefix, &d, family == Family::Qwen3Moe),
            }
            match self.family() {
                Family::Qwen3Moe => {
                    plan.plain(
                        format!("{prefix}.mlp.gate.weight"),
                        &[d.experts, d.hidden],
                        d.hidden,
                    );
                    plan.experts(&format!("{prefix}.mlp.experts"), &d, PROJ_NAMES);
                }
                Family::Mixtral => {
                    let moe = format!("{prefix}.block_sparse_moe");
                    plan.plain(format!("{moe}.gate.weight"), &[d.experts, d.hidden], d.hidden);
                    plan.experts(&format!("{moe}.experts"), &d, ["w1", "w3", "w2"]);
                }
                Family::DeepseekV3 if layer < num_dense_layers(num_layers) => {
                    plan.swiglu(&format!("{prefix}.mlp"), d.hidden, d.dense, PROJ_NAMES);
                }
                Family::DeepseekV3 => {
                    let mlp = format!("{prefix}.mlp");
                    plan.plain(format!("{mlp}.gate.weight"), &[d.experts, d.hidden], d.hidden);
                    let bias = format!("{mlp}.gate.e_score_correction_bias");
                    plan.push(bias, DType::F32, &[d.experts], Fill::Bias);
                    plan.experts(&format!("{mlp}.experts"), &d, PROJ_NAMES);
                    plan.swiglu(&format!("{mlp}.shared_experts"), d.hidden, d.expert, PROJ_NAMES);
                }
            }
        }
        plan.norm("model.norm.weight", d.hidden);
        plan.plain("lm_head.weight", &[d.vocab, d.hidden], d.hidden);
        plan.tensors
    }

    fn family(self) -> Family {
        match self {
            Preset::Qwen3_30bA3b | Preset::TinyQwen3Moe => Family::Qwen3Moe,
            Preset::Mixtral8x7b | Preset::TinyMixtral => Family::Mixtral,
            Preset::DeepseekV3 | Preset::TinyDeepseekV3 | Preset::MiniDeepseekV3 => {
                Family::DeepseekV3
            }
        }
    }

    fn dims(self) -> Dims {
        match self {
            Preset::Qwen3_30bA3b => Dims {
                vocab: 151_936,
                hidden: 2048,
                dense: 6144,
                expert: 768,
                num_layers: 48,
                experts: 128,
                top_k: 8,
                heads: 32,
                kv_heads: 4,
                head_dim: 128,
                max_positions: 40_960,
                ..NO_MLA
            },
            Preset::Mixtral8x7b => Dims {
                vocab: 32_000,
                hidden: 4096,
                expert: 14_336,
                num_layers: 32,
                experts: 8,
                top_k: 2,
                heads: 32,
                kv_heads: 8,
                head_dim: 128,
                max_positions: 32_768,
                ..NO_MLA
            },
            Preset::DeepseekV3 => Dims {
                vocab: 129_280,
                hidden: 7168,
                dense: 18_432,
                expert: 2048,
                num_layers: 61,
                experts: 256,
                top_k: 8,
                groups: 8,
                topk_groups: 4,
                heads: 128,
                kv_heads: 128,
                head_dim: 128,
                max_positions: 163_840,
                q_lora: 1536,
                kv_lora: 512,
                rope_dim: 64,
            },
            Preset::TinyQwen3Moe => Dims {
                vocab: 64,
                hidden: 128,
                dense: 256,
                expert: 48,
                num_layers: 4,
                experts: 8,
                top_k: 3,
                heads: 4,
                kv_heads: 2,
                head_dim: 32,
                max_positions: 128,
                ..NO_MLA
            },
            Preset::TinyMixtral => Dims {
                vocab: 64,
                hidden: 128,
                expert: 96,
                num_layers: 4,
                experts: 4,
                top_k: 2,
                heads: 4,
                kv_heads: 2,
                head_dim: 32,
                max_positions: 128,
                ..NO_MLA
            },
            Preset::TinyDeepseekV3 => Dims {
                vocab: 64,
                hidden: 160,
                dense: 192,
                expert: 136,
                num_layers: 4,
                experts: 8,
                top_k: 3,
                groups: 4,
                topk_groups: 2,
                heads: 4,
                kv_heads: 4,
                head_dim: 16,
                max_positions: 128,
                q_lora: 48,
                kv_lora: 32,
                rope_dim: 8,
            },
            Preset::MiniDeepseekV3 => Dims {
                hidden: 256,
                dense: 256,
                expert: 192,
                experts: 16,
                top_k: 4,
                ..Preset::TinyDeepseekV3.dims()
            },
        }
    }
}

impl fmt::Display for Preset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Preset {
    type Err = ParsePresetError;

    fn from_str(text: &str) -> Result<Preset, ParsePresetError> {
        let found = || ParsePresetError { found: text.to_owned() };
        Preset::ALL.into_iter().find(|p| p.name() == text).ok_or_else(found)
    }
}

/// Error for an unknown preset name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no preset is called '{found}'; there are {}", Preset::ALL.map(Preset::name).join(", "))]
pub struct ParsePresetError {
    found: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Family {
    Qwen3Moe,
    Mixtral,
    DeepseekV3,
}

/// Dimensions. For latent attention, `head_dim` is the width of values and of the part without rotation.
struct Dims {
    vocab: usize,
    hidden: usize,
    dense: usize,
    expert: usize,
    num_layers: u32,
    experts: usize,
    top_k: usize,
    groups: usize,
    topk_groups: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    max_positions: usize,
    q_lora: usize,
    kv_lora: usize,
    rope_dim: usize,
}

struct Plan {
    tensors: Vec<TensorPlan>,
    fp8: bool,
}

impl Plan {
    fn push(&mut self, name: impl Into<String>, dtype: DType, shape: &[usize], fill: Fill) {
        self.tensors.push(TensorPlan { name: name.into(), dtype, shape: shape.to_vec(), fill });
    }

    fn plain(&mut self, name: impl Into<String>, shape: &[usize], fan_in: usize) {
        self.push(name, DType::Bf16, shape, Fill::Weight { fan_in });
    }

    fn norm(&mut self, name: impl Into<String>, width: usize) {
        self.push(name, DType::Bf16, &[width], Fill::Norm);
    }

    /// A linear layer: bf16, or fp8 with block scales.
    fn linear(&mut self, name: String, outputs: usize, inputs: usize) {
        if !self.fp8 {
            return self.plain(name, &[outputs, inputs], inputs);
        }
        let blocks = [outputs.div_ceil(FP8_BLOCK[0]), inputs.div_ceil(FP8_BLOCK[1])];
        let scale = Fill::Scale { fan_in: inputs };
        self.push(name.clone(), DType::F8E4m3, &[outputs, inputs], Fill::Quantised);
        self.push(format!("{name}_scale_inv"), DType::F32, &blocks, scale);
    }

    fn swiglu(&mut self, prefix: &str, hidden: usize, width: usize, names: [&str; 3]) {
        let [gate, up, down] = names;
        self.linear(format!("{prefix}.{gate}.weight"), width, hidden);
        self.linear(format!("{prefix}.{up}.weight"), width, hidden);
        self.linear(format!("{prefix}.{down}.weight"), hidden, width);
    }

    fn experts(&mut self, prefix: &str, d: &Dims, names: [&str; 3]) {
        for expert in 0..d.experts {
            self.swiglu(&format!("{prefix}.{expert}"), d.hidden, d.expert, names);
        }
    }
}

fn grouped_attention(plan: &mut Plan, layer: &str, d: &Dims, qk_norm: bool) {
    let prefix = format!("{layer}.self_attn");
    plan.linear(format!("{prefix}.q_proj.weight"), d.heads * d.head_dim, d.hidden);
    plan.linear(format!("{prefix}.k_proj.weight"), d.kv_heads * d.head_dim, d.hidden);
    plan.linear(format!("{prefix}.v_proj.weight"), d.kv_heads * d.head_dim, d.hidden);
    plan.linear(format!("{prefix}.o_proj.weight"), d.hidden, d.heads * d.head_dim);
    if qk_norm {
        plan.norm(format!("{prefix}.q_norm.weight"), d.head_dim);
        plan.norm(format!("{prefix}.k_norm.weight"), d.head_dim);
    }
}

fn latent_attention(plan: &mut Plan, layer: &str, d: &Dims) {
    let prefix = format!("{layer}.self_attn");
    let q_width = d.heads * (d.head_dim + d.rope_dim);
    plan.linear(format!("{prefix}.q_a_proj.weight"), d.q_lora, d.hidden);
    plan.norm(format!("{prefix}.q_a_layernorm.weight"), d.q_lora);
    plan.linear(format!("{prefix}.q_b_proj.weight"), q_width, d.q_lora);
    plan.linear(format!("{prefix}.kv_a_proj_with_mqa.weight"), d.kv_lora + d.rope_dim, d.hidden);
    plan.norm(format!("{prefix}.kv_a_layernorm.weight"), d.kv_lora);
    plan.linear(format!("{prefix}.kv_b_proj.weight"), d.heads * 2 * d.head_dim, d.kv_lora);
    plan.linear(format!("{prefix}.o_proj.weight"), d.hidden, d.heads * d.head_dim);
}

/// Three as in the real model, fewer where that would leave no layer with experts.
fn num_dense_layers(num_layers: u32) -> u32 {
    3.min(num_layers - 1)
}

fn qwen3_config(d: &Dims, num_layers: u32) -> Value {
    json!({
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.0,
        "bos_token_id": d.vocab.min(151_644) - 1,
        "decoder_sparse_step": 1,
        "eos_token_id": d.vocab.min(151_646) - 1,
        "head_dim": d.head_dim,
        "hidden_act": "silu",
        "hidden_size": d.hidden,
        "initializer_range": 0.02,
        "intermediate_size": d.dense,
        "max_position_embeddings": d.max_positions,
        "max_window_layers": num_layers,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": d.expert,
        "norm_topk_prob": true,
        "num_attention_heads": d.heads,
        "num_experts": d.experts,
        "num_experts_per_tok": d.top_k,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": d.kv_heads,
        "output_router_logits": false,
        "rms_norm_eps": 1e-6,
        "rope_scaling": null,
        "rope_theta": 1_000_000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": null,
        "tie_word_embeddings": false,
        "torch_dtype": "bfloat16",
        "use_cache": true,
        "use_sliding_window": false,
        "vocab_size": d.vocab,
    })
}

fn mixtral_config(d: &Dims, num_layers: u32) -> Value {
    json!({
        "architectures": ["MixtralForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": d.hidden,
        "initializer_range": 0.02,
        "intermediate_size": d.expert,
        "max_position_embeddings": d.max_positions,
        "model_type": "mixtral",
        "num_attention_heads": d.heads,
        "num_experts_per_tok": d.top_k,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": d.kv_heads,
        "num_local_experts": d.experts,
        "output_router_logits": false,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": null,
        "tie_word_embeddings": false,
        "torch_dtype": "bfloat16",
        "use_cache": true,
        "vocab_size": d.vocab,
    })
}

fn deepseek_config(d: &Dims, num_layers: u32) -> Value {
    json!({
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": num_dense_layers(num_layers),
        "hidden_act": "silu",
        "hidden_size": d.hidden,
        "initializer_range": 0.02,
        "intermediate_size": d.dense,
        "kv_lora_rank": d.kv_lora,
        "max_position_embeddings": d.max_positions,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": d.expert,
        "moe_layer_freq": 1,
        "n_group": d.groups,
        "n_routed_experts": d.experts,
        "n_shared_experts": 1,
        "norm_topk_prob": true,
        "num_attention_heads": d.heads,
        "num_experts_per_tok": d.top_k,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": d.kv_heads,
        // The extra prediction layer of the real model is not written.
        "num_nextn_predict_layers": 0,
        "q_lora_rank": d.q_lora,
        "qk_nope_head_dim": d.head_dim,
        "qk_rope_head_dim": d.rope_dim,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": FP8_BLOCK,
        },
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": false,
        "topk_group": d.topk_groups,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": true,
        "v_head_dim": d.head_dim,
        "vocab_size": d.vocab,
    })
}

const PROJ_NAMES: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
const NO_MLA: Dims = Dims {
    vocab: 0,
    hidden: 0,
    dense: 0,
    expert: 0,
    num_layers: 0,
    experts: 0,
    top_k: 0,
    groups: 1,
    topk_groups: 1,
    heads: 0,
    kv_heads: 0,
    head_dim: 0,
    max_positions: 0,
    q_lora: 0,
    kv_lora: 0,
    rope_dim: 0,
};
