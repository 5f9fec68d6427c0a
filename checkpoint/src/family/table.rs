//! The table of families.

use super::{
    ActivationRule, Family, Fused, LayerRule, Renormalise, RouterRule, SharedRule, SharedWidth,
    Weighting,
};

/// The most common values. Rows say what differs.
const BASE: Family = Family {
    model_type: "",
    aliases: &[],
    classes: &[],
    width: MOE_WIDTH,
    activation: ActivationRule::Gated { key: "hidden_act" },
    weighting: Weighting::Output,
    layers: LayerRule::All,
    fused: Fused { transposed: false, interleaved: false },
    router: RouterRule::Softmax(Renormalise::Always),
    gate: &["mlp.gate.weight"],
    choice_bias: &[],
    shared: None,
};

/// DeepSeek-V3 and the many families that took over its block.
const DEEPSEEK_V3: Family = Family {
    layers: LayerRule::AfterDense { key: &["first_k_dense_replace"], default: 3 },
    router: RouterRule::DeepseekV3,
    choice_bias: &["mlp.gate.e_score_correction_bias"],
    shared: Some(SHARED_EXPERTS),
    ..BASE
};

const MIXTRAL: Family = Family {
    width: PLAIN_WIDTH,
    gate: &["block_sparse_moe.gate.weight", "mlp.gate.weight"],
    ..BASE
};

/// Qwen's blocks with one shared expert behind a sigmoid gate.
const QWEN_SHARED: Family = Family {
    layers: LayerRule::SparseStep,
    router: RouterRule::Softmax(Renormalise::Key(false)),
    shared: Some(SharedRule {
        path: "mlp.shared_expert",
        gate: Some("mlp.shared_expert_gate.weight"),
        width: SharedWidth::Width("shared_expert_intermediate_size"),
    }),
    ..BASE
};

const GRANITE: Family = Family {
    width: PLAIN_WIDTH,
    router: RouterRule::SoftmaxOfChosen,
    gate: &["block_sparse_moe.router.layer.weight"],
    ..BASE
};

const SHARED_EXPERTS: SharedRule = SharedRule {
    path: "mlp.shared_experts",
    gate: None,
    width: SharedWidth::Times(&["n_shared_experts", "num_shared_experts"], 0),
};
const MOE_WIDTH: &[&str] = &["moe_intermediate_size"];
const PLAIN_WIDTH: &[&str] = &["intermediate_size"];

pub(super) static FAMILIES: &[Family] = &[
    Family {
        model_type: "qwen3_moe",
        classes: &["Qwen3MoeForCausalLM"],
        layers: LayerRule::SparseStep,
        router: RouterRule::Softmax(Renormalise::Key(false)),
        ..BASE
    },
    Family { model_type: "mixtral", classes: &["MixtralForCausalLM"], ..MIXTRAL },
    Family {
        model_type: "deepseek_v2",
        classes: &["DeepseekV2ForCausalLM"],
        layers: LayerRule::AfterDense { key: &["first_k_dense_replace"], default: 0 },
        router: RouterRule::DeepseekV2,
        shared: Some(SHARED_EXPERTS),
        ..BASE
    },
    Family {
        model_type: "deepseek_v3",
        aliases: &["kimi_k2", "kimi_k25"],
        classes: &["DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"],
        ..DEEPSEEK_V3
    },
    Family { model_type: "deepseek_v32", classes: &["DeepseekV32ForCausalLM"], ..DEEPSEEK_V3 },
    Family { model_type: "qwen2_moe", classes: &["Qwen2MoeForCausalLM"], ..QWEN_SHARED },
    Family { model_type: "qwen3_next", classes: &["Qwen3NextForCausalLM"], ..QWEN_SHARED },
    Family {
        model_type: "gpt_oss",
        classes: &["GptOssForCausalLM"],
        width: PLAIN_WIDTH,
        activation: ActivationRule::ClampedOffset {
            alpha: ("swiglu_alpha", 1.702),
            limit: ("swiglu_limit", 7.0),
        },
        fused: Fused { transposed: true, interleaved: true },
        router: RouterRule::SoftmaxOfChosen,
        gate: &["mlp.router.weight"],
        ..BASE
    },
    Family { model_type: "granitemoe", classes: &["GraniteMoeForCausalLM"], ..GRANITE },
];
