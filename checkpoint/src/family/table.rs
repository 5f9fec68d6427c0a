//! The table of families.

use super::{
    ActivationRule, Family, Fused, GroupRule, LayerRule, Renormalise, RouterRule, SharedRule,
    SharedWidth, Weighting,
};
use crate::router::{ChosenBy, GroupScore, Scoring};

/// The most common values. Rows say what differs.
const BASE: Family = Family {
    model_type: "",
    aliases: &[],
    classes: &[],
    width: MOE_WIDTH,
    activation: ActivationRule::Gated { key: "hidden_act", default: "silu" },
    weighting: Weighting::Output,
    layers: LayerRule::All,
    fused: Fused { transposed: false, interleaved_in: None },
    router: softmax(Renormalise::Always),
    gate: &["mlp.gate.weight"],
    choice_bias: &[],
    shared: None,
};

/// DeepSeek-V3 and the many families that took over its block.
const DEEPSEEK_V3: Family = Family {
    layers: LayerRule::AfterDense { key: &["first_k_dense_replace"], default: 3 },
    router: Some(DEEPSEEK_V3_ROUTER),
    choice_bias: &["mlp.gate.e_score_correction_bias"],
    shared: Some(SHARED_EXPERTS),
    ..BASE
};

const MIXTRAL: Family = Family {
    width: PLAIN_WIDTH,
    gate: &["block_sparse_moe.gate.weight", "mlp.gate.weight"],
    ..BASE
};

const fn softmax(renormalise: Renormalise) -> Option<RouterRule> {
    Some(RouterRule { renormalise, ..PLAIN_SOFTMAX })
}

const PLAIN_SOFTMAX: RouterRule = RouterRule {
    scoring: Scoring::Softmax,
    scoring_key: None,
    chosen_by: ChosenBy::Scores,
    method: None,
    groups: None,
    bias_flag: None,
    renormalise: Renormalise::Always,
    epsilon: 0.0,
    minimum: None,
    scale: None,
    softcap: None,
};

const SOFTMAX_OF_CHOSEN: RouterRule =
    RouterRule { chosen_by: ChosenBy::Logits, renormalise: Renormalise::Never, ..PLAIN_SOFTMAX };

const DEEPSEEK_V2_ROUTER: RouterRule = RouterRule {
    scoring_key: Some("scoring_func"),
    method: Some("greedy"),
    groups: Some(GroupRule { count: 1, keep: 1, score: GroupScore::Max }),
    renormalise: Renormalise::Refused,
    scale: Some(("routed_scaling_factor", 1.0)),
    ..PLAIN_SOFTMAX
};

const DEEPSEEK_V3_ROUTER: RouterRule = RouterRule {
    scoring_key: Some("scoring_func"),
    method: Some("noaux_tc"),
    groups: Some(GroupRule { count: 8, keep: 4, score: GroupScore::TopTwoSum }),
    scale: Some(("routed_scaling_factor", 2.5)),
    ..SIGMOID
};

/// Sigmoid scores, a bias for the choice if the family names one, normalised.
const SIGMOID: RouterRule = RouterRule {
    scoring: Scoring::Sigmoid,
    renormalise: Renormalise::Key(true),
    epsilon: 1e-20,
    ..PLAIN_SOFTMAX
};

/// DeepSeek-V3's rule in the families that took it over with one group and their own factor.
const fn one_group(scale: f32) -> RouterRule {
    RouterRule {
        groups: Some(GroupRule { count: 1, keep: 1, score: GroupScore::TopTwoSum }),
        scale: Some(("routed_scaling_factor", scale)),
        ..SIGMOID
    }
}

/// Qwen's blocks with one shared expert behind a sigmoid gate.
const QWEN_SHARED: Family = Family {
    layers: LayerRule::SparseStep,
    router: softmax(Renormalise::Key(false)),
    shared: Some(SharedRule {
        path: "mlp.shared_expert",
        gate: Some("mlp.shared_expert_gate.weight"),
        width: SharedWidth::Width("shared_expert_intermediate_size"),
        strategy: None,
    }),
    ..BASE
};

/// gpt-oss's activation, which several families took over.
const SWIGLU_OAI: ActivationRule =
    ActivationRule::ClampedOffset { alpha: ("swiglu_alpha", 1.702), limit: ("swiglu_limit", 7.0) };

const GRANITE: Family = Family {
    width: PLAIN_WIDTH,
    router: Some(SOFTMAX_OF_CHOSEN),
    gate: &["block_sparse_moe.router.layer.weight"],
    ..BASE
};

const SHARED_EXPERTS: SharedRule = SharedRule {
    path: "mlp.shared_experts",
    gate: None,
    width: SharedWidth::Times(&["n_shared_experts", "num_shared_experts"], 1),
    strategy: None,
};
const fn after_dense(default: u32) -> LayerRule {
    LayerRule::AfterDense { key: &["first_k_dense_replace"], default }
}

const MOE_WIDTH: &[&str] = &["moe_intermediate_size"];
const PLAIN_WIDTH: &[&str] = &["intermediate_size"];

pub(super) static FAMILIES: &[Family] = &[
    Family { model_type: "qwen2_moe", classes: &["Qwen2MoeForCausalLM"], ..QWEN_SHARED },
    Family {
        model_type: "qwen3_moe",
        classes: &["Qwen3MoeForCausalLM"],
        layers: LayerRule::SparseStep,
        router: softmax(Renormalise::Key(false)),
        ..BASE
    },
    Family {
        model_type: "qwen3_next",
        classes: &["Qwen3NextForCausalLM"],
        router: softmax(Renormalise::Key(true)),
        ..QWEN_SHARED
    },
    Family {
        model_type: "qwen3_vl_moe",
        aliases: &["qwen3_vl_moe_text"],
        classes: &["Qwen3VLMoeForConditionalGeneration"],
        layers: LayerRule::SparseStep,
        fused: Fused { transposed: true, interleaved_in: None },
        ..BASE
    },
    Family {
        model_type: "qwen3_5_moe",
        aliases: &["qwen3_5_moe_text"],
        classes: &["Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"],
        layers: LayerRule::All,
        router: softmax(Renormalise::Always),
        ..QWEN_SHARED
    },
    Family { model_type: "mixtral", classes: &["MixtralForCausalLM"], ..MIXTRAL },
    Family {
        model_type: "deepseek_v2",
        classes: &["DeepseekV2ForCausalLM"],
        layers: after_dense(0),
        router: Some(DEEPSEEK_V2_ROUTER),
        choice_bias: &["mlp.gate.e_score_correction_bias"],
        shared: Some(SHARED_EXPERTS),
        ..BASE
    },
    Family {
        model_type: "unlimited_ocr",
        layers: after_dense(0),
        router: Some(DEEPSEEK_V2_ROUTER),
        choice_bias: &["mlp.gate.e_score_correction_bias"],
        shared: Some(SHARED_EXPERTS),
        ..BASE
    },
    Family {
        model_type: "deepseek_v3",
        aliases: &["kimi_k2"],
        classes: &["DeepseekV3ForCausalLM"],
        ..DEEPSEEK_V3
    },
    Family {
        model_type: "kimi_k25",
        classes: &["Kimi_K25ForConditionalGeneration", "KimiK25ForConditionalGeneration"],
        ..DEEPSEEK_V3
    },
    Family { model_type: "deepseek_v32", classes: &["DeepseekV32ForCausalLM"], ..DEEPSEEK_V3 },
    Family {
        model_type: "deepseek_v4",
        classes: &["DeepseekV4ForCausalLM"],
        width: &["intermediate_size", "moe_intermediate_size"],
        activation: ActivationRule::Clamped { default: 10.0 },
        router: Some(RouterRule {
            scoring: Scoring::SqrtSoftplus,
            scoring_key: Some("scoring_func"),
            renormalise: Renormalise::Always,
            scale: Some(("routed_scaling_factor", 1.5)),
            ..SIGMOID
        }),
        gate: &["ffn.gate.weight"],
        choice_bias: &["ffn.gate.bias"],
        shared: Some(SharedRule {
            path: "ffn.shared_experts",
            gate: None,
            width: SharedWidth::Times(&[], 1),
            strategy: None,
        }),
        ..BASE
    },
    Family {
        model_type: "kimi_linear",
        classes: &["KimiLinearForCausalLM"],
        layers: after_dense(1),
        gate: &["block_sparse_moe.gate.weight"],
        choice_bias: &["block_sparse_moe.gate.e_score_correction_bias"],
        shared: Some(SharedRule {
            path: "block_sparse_moe.shared_experts",
            gate: None,
            width: SharedWidth::Times(&["num_shared_experts", "n_shared_experts"], 1),
            strategy: None,
        }),
        router: Some(one_group(2.446)),
        ..DEEPSEEK_V3
    },
    Family {
        model_type: "glm4_moe",
        classes: &["Glm4MoeForCausalLM"],
        layers: after_dense(1),
        router: Some(one_group(1.0)),
        ..DEEPSEEK_V3
    },
    Family {
        model_type: "glm4_moe_lite",
        classes: &["Glm4MoeLiteForCausalLM"],
        layers: after_dense(1),
        router: Some(one_group(1.8)),
        ..DEEPSEEK_V3
    },
    Family {
        model_type: "glm4v_moe",
        aliases: &["glm4v_moe_text"],
        classes: &["Glm4vMoeForConditionalGeneration"],
        layers: after_dense(1),
        router: Some(one_group(1.0)),
        ..DEEPSEEK_V3
    },
    Family {
        model_type: "glm_moe_dsa",
        classes: &["GlmMoeDsaForCausalLM"],
        router: Some(one_group(2.5)),
        ..DEEPSEEK_V3
    },
    Family {
        model_type: "glm5_next",
        activation: ActivationRule::Clamped { default: f32::INFINITY },
        ..DEEPSEEK_V3
    },
    Family { model_type: "axk1", ..DEEPSEEK_V3 },
    Family { model_type: "axk2", ..DEEPSEEK_V3 },
    Family { model_type: "dots3_note", aliases: &["dots3_note_text"], ..DEEPSEEK_V3 },
    Family {
        model_type: "dots1",
        classes: &["Dots1ForCausalLM"],
        layers: after_dense(0),
        router: Some(RouterRule { renormalise: Renormalise::Key(false), ..one_group(1.0) }),
        ..DEEPSEEK_V3
    },
    Family {
        model_type: "solar_open",
        classes: &["SolarOpenForCausalLM"],
        layers: LayerRule::All,
        router: Some(one_group(1.0)),
        ..DEEPSEEK_V3
    },
    Family {
        model_type: "mimo_v2_flash",
        classes: &["MiMoV2FlashForCausalLM"],
        layers: after_dense(1),
        shared: None,
        router: Some(one_group(1.0)),
        ..DEEPSEEK_V3
    },
    Family {
        model_type: "exaone_moe",
        classes: &["ExaoneMoeForCausalLM"],
        layers: after_dense(1),
        choice_bias: &["mlp.e_score_correction_bias"],
        router: Some(one_group(2.5)),
        ..DEEPSEEK_V3
    },
    Family {
        model_type: "bailing_hybrid",
        classes: &["BailingHybridForCausalLM"],
        layers: after_dense(2),
        choice_bias: &["mlp.gate.expert_bias"],
        ..DEEPSEEK_V3
    },
    Family {
        model_type: "hy_v3",
        classes: &["HYV3ForCausalLM"],
        layers: after_dense(1),
        router: Some(RouterRule {
            renormalise: Renormalise::Always,
            scale: Some(("router_scaling_factor", 2.826)),
            ..SIGMOID
        }),
        gate: &["mlp.router.gate.weight"],
        choice_bias: &["mlp.expert_bias"],
        shared: Some(SharedRule {
            path: "mlp.shared_mlp",
            gate: None,
            width: SharedWidth::Times(&["num_shared_experts"], 1),
            strategy: None,
        }),
        ..DEEPSEEK_V3
    },
    Family {
        model_type: "hy_v4",
        activation: ActivationRule::Clamped { default: f32::INFINITY },
        ..DEEPSEEK_V3
    },
    Family {
        model_type: "afmoe",
        classes: &["AfmoeForCausalLM"],
        layers: LayerRule::AfterDense { key: &["num_dense_layers"], default: 1 },
        router: Some(RouterRule {
            renormalise: Renormalise::Always,
            scale: Some(("route_scale", 1.0)),
            ..SIGMOID
        }),
        gate: &["mlp.router.gate.weight"],
        choice_bias: &["mlp.expert_bias"],
        shared: Some(SharedRule {
            path: "mlp.shared_experts",
            gate: None,
            width: SharedWidth::Times(&["num_shared_experts"], 2),
            strategy: None,
        }),
        ..DEEPSEEK_V3
    },
    Family {
        model_type: "lfm2_moe",
        classes: &["Lfm2MoeForCausalLM"],
        activation: ActivationRule::Silu,
        layers: LayerRule::AfterDense { key: &["num_dense_layers"], default: 2 },
        router: Some(RouterRule {
            bias_flag: Some(("use_expert_bias", true)),
            epsilon: 1e-6,
            scale: Some(("routed_scaling_factor", 1.0)),
            ..SIGMOID
        }),
        gate: &["feed_forward.gate.weight"],
        choice_bias: &["feed_forward.expert_bias"],
        ..BASE
    },
    Family {
        model_type: "laguna",
        classes: &["LagunaForCausalLM"],
        layers: after_dense(1),
        router: Some(RouterRule {
            renormalise: Renormalise::Always,
            epsilon: 0.0,
            scale: Some(("moe_routed_scaling_factor", 1.0)),
            softcap: Some("moe_router_logit_softcapping"),
            ..SIGMOID
        }),
        choice_bias: &["mlp.experts.e_score_correction_bias"],
        shared: Some(SharedRule {
            path: "mlp.shared_expert",
            gate: None,
            width: SharedWidth::Width("shared_expert_intermediate_size"),
            strategy: None,
        }),
        ..BASE
    },
    Family { model_type: "minimax", classes: &["MiniMaxForCausalLM"], ..MIXTRAL },
    Family {
        model_type: "minimax_m2",
        classes: &["MiniMaxM2ForCausalLM"],
        router: Some(RouterRule { renormalise: Renormalise::Always, epsilon: 0.0, ..SIGMOID }),
        choice_bias: &["block_sparse_moe.e_score_correction_bias"],
        ..MIXTRAL
    },
    Family {
        model_type: "minimax_m3_vl",
        aliases: &["minimax_m3_vl_text"],
        classes: &["MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3VLForCausalLM"],
        activation: SWIGLU_OAI,
        layers: after_dense(0),
        router: Some(RouterRule {
            renormalise: Renormalise::Always,
            epsilon: 0.0,
            scale: Some(("routed_scaling_factor", 2.0)),
            ..SIGMOID
        }),
        choice_bias: &["block_sparse_moe.e_score_correction_bias"],
        shared: Some(SharedRule {
            path: "block_sparse_moe.shared_experts",
            gate: None,
            width: SharedWidth::Width("shared_intermediate_size"),
            strategy: None,
        }),
        ..MIXTRAL
    },
    Family {
        model_type: "phimoe",
        classes: &["PhimoeForCausalLM", "PhiMoEForCausalLM"],
        router: Some(RouterRule {
            scoring: Scoring::SparseMixer { jitter: 0.01 },
            renormalise: Renormalise::Never,
            ..PLAIN_SOFTMAX
        }),
        ..MIXTRAL
    },
    Family {
        model_type: "olmoe",
        classes: &["OlmoeForCausalLM"],
        width: PLAIN_WIDTH,
        router: softmax(Renormalise::Key(false)),
        ..BASE
    },
    Family {
        model_type: "flex_olmo",
        classes: &["FlexOlmoForCausalLM"],
        width: PLAIN_WIDTH,
        router: softmax(Renormalise::Key(false)),
        ..BASE
    },
    Family {
        model_type: "mellum",
        classes: &["MellumForCausalLM"],
        router: softmax(Renormalise::Key(true)),
        ..BASE
    },
    Family {
        model_type: "ernie4_5_moe",
        classes: &["Ernie4_5_MoeForCausalLM"],
        layers: LayerRule::Range,
        router: Some(RouterRule { minimum: Some(("moe_norm_min", 1e-12)), ..PLAIN_SOFTMAX }),
        choice_bias: &["mlp.moe_statics.e_score_correction_bias"],
        shared: Some(SharedRule {
            path: "mlp.shared_experts",
            gate: None,
            width: SharedWidth::Times(&["moe_num_shared_experts"], 2),
            strategy: None,
        }),
        ..BASE
    },
    Family {
        model_type: "hunyuan_v1_moe",
        classes: &["HunYuanMoEV1ForCausalLM"],
        width: PLAIN_WIDTH,
        gate: &["mlp.gate.wg.weight"],
        shared: Some(SharedRule {
            path: "mlp.shared_mlp",
            gate: None,
            width: SharedWidth::Width("intermediate_size"),
            strategy: None,
        }),
        ..BASE
    },
    Family {
        model_type: "jamba",
        classes: &["JambaForCausalLM"],
        width: PLAIN_WIDTH,
        layers: LayerRule::Period,
        router: softmax(Renormalise::Never),
        gate: &["feed_forward.router.weight"],
        ..BASE
    },
    Family { model_type: "granitemoe", classes: &["GraniteMoeForCausalLM"], ..GRANITE },
    Family {
        model_type: "granitemoeshared",
        classes: &["GraniteMoeSharedForCausalLM"],
        shared: Some(SharedRule {
            path: "shared_mlp",
            gate: None,
            width: SharedWidth::Width("shared_intermediate_size"),
            strategy: None,
        }),
        ..GRANITE
    },
    Family {
        model_type: "granitemoehybrid",
        classes: &["GraniteMoeHybridForCausalLM"],
        shared: Some(SharedRule {
            path: "shared_mlp",
            gate: None,
            width: SharedWidth::Width("shared_intermediate_size"),
            strategy: None,
        }),
        ..GRANITE
    },
    Family {
        model_type: "granitemoe_swa",
        classes: &["GraniteMoeSWAForCausalLM"],
        gate: &["block_sparse_moe.router.weight"],
        shared: Some(SharedRule {
            path: "shared_mlp",
            gate: None,
            width: SharedWidth::Width("shared_intermediate_size"),
            strategy: None,
        }),
        ..GRANITE
    },
    Family {
        model_type: "cohere2_moe",
        classes: &["Cohere2MoeForCausalLM"],
        width: PLAIN_WIDTH,
        layers: after_dense(0),
        router: Some(RouterRule {
            scoring_key: Some("expert_selection_fn"),
            chosen_by: ChosenBy::Logits,
            renormalise: Renormalise::Key(true),
            ..PLAIN_SOFTMAX
        }),
        shared: Some(SharedRule {
            path: "mlp.shared_experts",
            gate: None,
            width: SharedWidth::Times(&["num_shared_experts"], 0),
            strategy: Some("average"),
        }),
        ..BASE
    },
    Family {
        model_type: "gpt_oss",
        classes: &["GptOssForCausalLM"],
        width: PLAIN_WIDTH,
        activation: SWIGLU_OAI,
        fused: Fused { transposed: true, interleaved_in: Some("gate_up_proj") },
        router: Some(SOFTMAX_OF_CHOSEN),
        gate: &["mlp.router.weight"],
        ..BASE
    },
    Family {
        model_type: "openai_privacy_filter",
        classes: &["OpenAIPrivacyFilterForTokenClassification"],
        width: PLAIN_WIDTH,
        activation: SWIGLU_OAI,
        fused: Fused { transposed: true, interleaved_in: None },
        router: Some(SOFTMAX_OF_CHOSEN),
        gate: &["mlp.router.weight"],
        ..BASE
    },
    Family {
        model_type: "llama4",
        aliases: &["llama4_text"],
        classes: &["Llama4ForConditionalGeneration", "Llama4ForCausalLM"],
        width: PLAIN_WIDTH,
        weighting: Weighting::Input,
        layers: LayerRule::Interleaved,
        fused: Fused { transposed: true, interleaved_in: None },
        router: Some(RouterRule {
            scoring: Scoring::Sigmoid,
            chosen_by: ChosenBy::Logits,
            renormalise: Renormalise::Never,
            ..PLAIN_SOFTMAX
        }),
        gate: &["feed_forward.router.weight"],
        shared: Some(SharedRule {
            path: "feed_forward.shared_expert",
            gate: None,
            width: SharedWidth::Width("intermediate_size"),
            strategy: None,
        }),
        ..BASE
    },
    Family {
        model_type: "aria",
        aliases: &["aria_text"],
        classes: &["AriaForConditionalGeneration", "AriaTextForCausalLM"],
        width: PLAIN_WIDTH,
        activation: ActivationRule::Silu,
        fused: Fused { transposed: true, interleaved_in: None },
        router: Some(SOFTMAX_OF_CHOSEN),
        gate: &["mlp.router.weight"],
        shared: Some(SharedRule {
            path: "mlp.shared_experts",
            gate: None,
            width: SharedWidth::Times(&["moe_num_shared_experts"], 2),
            strategy: None,
        }),
        ..BASE
    },
    Family {
        model_type: "nemotron_h",
        classes: &["NemotronHForCausalLM"],
        activation: ActivationRule::Relu2,
        layers: LayerRule::BlockTypes,
        router: Some(one_group(1.0)),
        gate: &["mixer.gate.weight"],
        choice_bias: &["mixer.gate.e_score_correction_bias"],
        shared: Some(SharedRule {
            path: "mixer.shared_experts",
            gate: None,
            width: SharedWidth::Width("moe_shared_expert_intermediate_size"),
            strategy: None,
        }),
        ..BASE
    },
    Family {
        model_type: "gemma4",
        aliases: &["gemma4_text"],
        classes: &["Gemma4ForConditionalGeneration", "Gemma4ForCausalLM"],
        activation: ActivationRule::Gated {
            key: "hidden_activation",
            default: "gelu_pytorch_tanh",
        },
        layers: LayerRule::Stored,
        router: None,
        gate: &["router.proj.weight"],
        ..BASE
    },
    Family {
        model_type: "mistral4",
        classes: &["Mistral4ForCausalLM"],
        layers: after_dense(0),
        router: Some(RouterRule { scoring: Scoring::Softmax, ..one_group(1.0) }),
        shared: Some(SHARED_EXPERTS),
        ..BASE
    },
    Family {
        model_type: "inkling",
        aliases: &["inkling_mm_model", "inkling_text"],
        classes: &["InklingForConditionalGeneration", "InklingForCausalLM"],
        layers: LayerRule::Stored,
        fused: Fused { transposed: false, interleaved_in: Some("w13_weight") },
        router: None,
        ..BASE
    },
    Family {
        model_type: "zaya",
        classes: &["ZayaForCausalLM"],
        router: None,
        gate: &["mlp.gate.router_mlp.out_proj.weight"],
        ..BASE
    },
];
