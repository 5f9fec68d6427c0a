//! The table of families.

mod parts;

use super::{
    ActivationRule, Family, Fused, LayerRule, Renormalise, RouterRule, SharedRule, SharedWidth,
    Weighting,
};
use crate::router::{ChosenBy, Scoring};
use parts::*;

pub(in crate::family) static FAMILIES: &[Family] = &[
    Family {
        model_type: "qwen2_moe",
        classes: &["Qwen2MoeForCausalLM"],
        shared: Some(SharedRule {
            width: SharedWidth::Width("shared_expert_intermediate_size", 5632),
            ..QWEN_SHARED_RULE
        }),
        ..QWEN_SHARED
    },
    Family {
        model_type: "qwen3_moe",
        classes: &["Qwen3MoeForCausalLM"],
        experts: EXPERTS_OR_LOCAL,
        layers: sparse_step(0),
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
        experts: EXPERTS_OR_LOCAL,
        layers: sparse_step(0),
        fused: Fused { transposed: true, interleaved_in: None },
        ..BASE
    },
    Family {
        model_type: "qwen3_omni_moe",
        aliases: &["qwen3_omni_moe_thinker", "qwen3_omni_moe_text"],
        classes: &[
            "Qwen3OmniMoeForConditionalGeneration",
            "Qwen3OmniMoeThinkerForConditionalGeneration",
        ],
        layers: sparse_step(0),
        router: softmax(Renormalise::Key(true)),
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
        experts: &["num_experts", "n_routed_experts"],
        layers: after_dense(0),
        router: Some(DEEPSEEK_V2_ROUTER),
        choice_bias: &["mlp.gate.e_score_correction_bias"],
        shared: Some(SharedRule {
            width: SharedWidth::Times(&["n_shared_experts"], Some(2)),
            ..SHARED_EXPERTS
        }),
        ..BASE
    },
    Family {
        model_type: "unlimited_ocr",
        experts: &["num_experts", "n_routed_experts"],
        layers: after_dense(1),
        has_layer_types: true,
        router: Some(DEEPSEEK_V2_ROUTER),
        choice_bias: &["mlp.gate.e_score_correction_bias"],
        shared: Some(SharedRule {
            width: SharedWidth::Times(&["n_shared_experts"], Some(2)),
            ..SHARED_EXPERTS
        }),
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
    Family {
        model_type: "deepseek_v32",
        classes: &["DeepseekV32ForCausalLM"],
        experts: ROUTED_OR_ANY,
        has_layer_types: true,
        ..DEEPSEEK_V3
    },
    Family {
        model_type: "deepseek_v4",
        classes: &["DeepseekV4ForCausalLM"],
        experts: ROUTED,
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
            stacked: None,
            gate: None,
            width: SharedWidth::Times(&[], Some(1)),
            strategy: None,
        }),
        ..BASE
    },
    Family {
        model_type: "kimi_linear",
        classes: &["KimiLinearForCausalLM"],
        experts: EXPERTS_OR_LOCAL,
        top_k: PER_TOKEN,
        layers: after_dense(1),
        has_layer_types: true,
        router: Some(one_group(2.446)),
        gate: &["block_sparse_moe.gate.weight"],
        choice_bias: &["block_sparse_moe.gate.e_score_correction_bias"],
        shared: Some(SharedRule {
            path: "block_sparse_moe.shared_experts",
            stacked: None,
            gate: None,
            width: SharedWidth::Times(&["num_shared_experts", "n_shared_experts"], Some(1)),
            strategy: None,
        }),
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
        layers: from_layer(1),
        has_layer_types: true,
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
        experts: ROUTED_OR_ANY,
        has_layer_types: true,
        router: Some(one_group(2.5)),
        ..DEEPSEEK_V3
    },
    Family {
        model_type: "glm5_next",
        activation: ActivationRule::Clamped { default: f32::INFINITY },
        layers: from_layer(3),
        has_layer_types: true,
        ..DEEPSEEK_V3
    },
    Family {
        model_type: "axk1",
        layers: after_dense_every(1),
        has_layer_types: true,
        ..DEEPSEEK_V3
    },
    Family {
        model_type: "axk2",
        layers: after_dense_every(1),
        has_layer_types: true,
        ..DEEPSEEK_V3
    },
    Family {
        model_type: "dots3_note",
        aliases: &["dots3_note_text"],
        layers: after_dense_every(1),
        has_layer_types: true,
        ..DEEPSEEK_V3
    },
    Family {
        model_type: "dots1",
        classes: &["Dots1ForCausalLM"],
        layers: after_dense(0),
        router: Some(RouterRule { renormalise: Renormalise::Key(false), ..one_group(1.0) }),
        shared: Some(SharedRule {
            width: SharedWidth::Times(&["n_shared_experts"], None),
            ..SHARED_EXPERTS
        }),
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
        layers: from_layer(1),
        has_layer_types: true,
        router: Some(one_group(1.0)),
        shared: None,
        ..DEEPSEEK_V3
    },
    Family {
        model_type: "exaone_moe",
        classes: &["ExaoneMoeForCausalLM"],
        experts: EXPERTS,
        layers: after_dense(1),
        has_layer_types: true,
        router: Some(one_group(2.5)),
        choice_bias: &["mlp.e_score_correction_bias"],
        shared: Some(SharedRule {
            width: SharedWidth::Times(&["num_shared_experts"], Some(1)),
            ..SHARED_EXPERTS
        }),
        ..DEEPSEEK_V3
    },
    Family {
        model_type: "bailing_hybrid",
        classes: &["BailingHybridForCausalLM"],
        experts: EXPERTS_OR_LOCAL,
        top_k: PER_TOKEN,
        layers: after_dense(2),
        has_layer_types: true,
        choice_bias: &["mlp.gate.expert_bias"],
        shared: Some(SharedRule {
            width: SharedWidth::Times(&["num_shared_experts", "n_shared_experts"], Some(1)),
            ..SHARED_EXPERTS
        }),
        ..DEEPSEEK_V3
    },
    Family {
        model_type: "hy_v3",
        classes: &["HYV3ForCausalLM"],
        experts: EXPERTS_OR_LOCAL,
        layers: from_layer(1),
        has_layer_types: true,
        router: Some(RouterRule {
            renormalise: Renormalise::Always,
            scale: Some(("router_scaling_factor", 2.826)),
            ..SIGMOID
        }),
        gate: &["mlp.router.gate.weight"],
        choice_bias: &["mlp.expert_bias"],
        shared: Some(SharedRule {
            path: "mlp.shared_mlp",
            stacked: None,
            gate: None,
            width: SharedWidth::Times(&["num_shared_experts"], Some(1)),
            strategy: None,
        }),
        ..DEEPSEEK_V3
    },
    Family {
        model_type: "hy_v4",
        activation: ActivationRule::Clamped { default: f32::INFINITY },
        layers: from_layer(1),
        has_layer_types: true,
        ..DEEPSEEK_V3
    },
    Family {
        model_type: "afmoe",
        classes: &["AfmoeForCausalLM"],
        experts: EXPERTS,
        layers: LayerRule::AfterDense {
            key: Some("num_dense_layers"),
            default: 1,
            has_frequency: false,
        },
        router: Some(RouterRule {
            renormalise: Renormalise::Always,
            scale: Some(("route_scale", 1.0)),
            ..SIGMOID
        }),
        gate: &["mlp.router.gate.weight"],
        choice_bias: &["mlp.expert_bias"],
        shared: Some(SharedRule {
            path: "mlp.shared_experts",
            stacked: None,
            gate: None,
            width: SharedWidth::Times(&["num_shared_experts"], Some(2)),
            strategy: None,
        }),
        ..DEEPSEEK_V3
    },
    Family {
        model_type: "lfm2_moe",
        classes: &["Lfm2MoeForCausalLM"],
        activation: ActivationRule::Silu,
        layers: LayerRule::AfterDense {
            key: Some("num_dense_layers"),
            default: 2,
            has_frequency: false,
        },
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
        layers: from_layer(1),
        has_layer_types: true,
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
            stacked: None,
            gate: None,
            width: SharedWidth::Width("shared_expert_intermediate_size", 512),
            strategy: None,
        }),
        ..BASE
    },
    Family {
        model_type: "flint",
        classes: &["FlintForCausalLM"],
        layers: sparse_step(2),
        router: Some(RouterRule { epsilon: 0.0, ..SIGMOID }),
        shared: Some(SharedRule {
            path: "mlp.shared_expert",
            stacked: None,
            gate: None,
            width: SharedWidth::Width("shared_expert_intermediate_size", 1024),
            strategy: None,
        }),
        ..BASE
    },
    Family {
        model_type: "kolibri1",
        classes: &["Kolibri1ForCausalLM"],
        experts: EXPERTS_OR_LOCAL,
        router: None,
        shared: Some(SharedRule {
            path: "mlp.shared_experts",
            stacked: None,
            gate: None,
            width: SharedWidth::Width("shared_expert_intermediate_size", 512),
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
        layers: LayerRule::Marked,
        has_layer_types: true,
        router: Some(RouterRule {
            renormalise: Renormalise::Always,
            epsilon: 0.0,
            scale: Some(("routed_scaling_factor", 2.0)),
            ..SIGMOID
        }),
        choice_bias: &["block_sparse_moe.e_score_correction_bias"],
        shared: Some(SharedRule {
            path: "block_sparse_moe.shared_experts",
            stacked: None,
            gate: None,
            width: SharedWidth::Width("shared_intermediate_size", 3072),
            strategy: None,
        }),
        ..MIXTRAL
    },
    Family {
        model_type: "phimoe",
        classes: &["PhimoeForCausalLM", "PhiMoEForCausalLM"],
        experts: LOCAL_EXPERTS,
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
        experts: EXPERTS_OR_LOCAL,
        width: PLAIN_WIDTH,
        router: softmax(Renormalise::Key(false)),
        ..BASE
    },
    Family {
        model_type: "flex_olmo",
        classes: &["FlexOlmoForCausalLM"],
        experts: EXPERTS_OR_LOCAL,
        width: PLAIN_WIDTH,
        router: softmax(Renormalise::Key(false)),
        ..BASE
    },
    Family {
        model_type: "mellum",
        classes: &["MellumForCausalLM"],
        experts: EXPERTS_OR_LOCAL,
        has_layer_types: true,
        router: softmax(Renormalise::Key(true)),
        ..BASE
    },
    Family {
        model_type: "ernie4_5_moe",
        classes: &["Ernie4_5_MoeForCausalLM"],
        experts: &["num_experts", "moe_num_experts"],
        top_k: &["num_experts_per_tok", "moe_k"],
        layers: LayerRule::Range,
        router: Some(RouterRule { minimum: Some(("moe_norm_min", 1e-12)), ..PLAIN_SOFTMAX }),
        choice_bias: &["mlp.moe_statics.e_score_correction_bias"],
        shared: Some(SharedRule {
            path: "mlp.shared_experts",
            stacked: None,
            gate: None,
            width: SharedWidth::Times(&["moe_num_shared_experts"], Some(2)),
            strategy: None,
        }),
        ..BASE
    },
    Family {
        model_type: "hunyuan_v1_moe",
        classes: &["HunYuanMoEV1ForCausalLM"],
        experts: EXPERTS_OR_LOCAL,
        top_k: &["num_experts_per_tok", "moe_topk"],
        width: PLAIN_WIDTH,
        gate: &["mlp.gate.wg.weight"],
        shared: Some(SharedRule {
            path: "mlp.shared_mlp",
            stacked: None,
            gate: None,
            width: SharedWidth::Width("intermediate_size", 0),
            strategy: None,
        }),
        ..BASE
    },
    Family {
        model_type: "jamba",
        classes: &["JambaForCausalLM"],
        experts: EXPERTS_OR_LOCAL,
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
            stacked: None,
            gate: None,
            width: SharedWidth::Width("shared_intermediate_size", 0),
            strategy: None,
        }),
        ..GRANITE
    },
    Family {
        model_type: "granitemoehybrid",
        classes: &["GraniteMoeHybridForCausalLM"],
        shared: Some(SharedRule {
            path: "shared_mlp",
            stacked: None,
            gate: None,
            width: SharedWidth::Width("shared_intermediate_size", 1024),
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
            stacked: None,
            gate: None,
            width: SharedWidth::Width("shared_intermediate_size", 0),
            strategy: None,
        }),
        ..GRANITE
    },
    Family {
        model_type: "cohere2_moe",
        classes: &["Cohere2MoeForCausalLM"],
        width: PLAIN_WIDTH,
        layers: after_dense(0),
        has_layer_types: true,
        router: Some(RouterRule {
            scoring_key: Some("expert_selection_fn"),
            chosen_by: ChosenBy::Logits,
            renormalise: Renormalise::Key(true),
            ..PLAIN_SOFTMAX
        }),
        shared: Some(SharedRule {
            path: "mlp.shared_experts",
            stacked: None,
            gate: None,
            width: SharedWidth::Times(&["num_shared_experts"], Some(0)),
            strategy: Some("average"),
        }),
        ..BASE
    },
    Family {
        model_type: "gpt_oss",
        classes: &["GptOssForCausalLM"],
        experts: EXPERTS_OR_LOCAL,
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
        experts: EXPERTS_OR_LOCAL,
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
        experts: LOCAL_EXPERTS,
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
            stacked: None,
            gate: None,
            width: SharedWidth::Width("intermediate_size", 0),
            strategy: None,
        }),
        ..BASE
    },
    Family {
        model_type: "aria",
        aliases: &["aria_text"],
        classes: &["AriaForConditionalGeneration", "AriaTextForCausalLM"],
        experts: &["moe_num_experts"],
        top_k: &["moe_topk"],
        width: PLAIN_WIDTH,
        activation: ActivationRule::Silu,
        fused: Fused { transposed: true, interleaved_in: None },
        router: Some(SOFTMAX_OF_CHOSEN),
        gate: &["mlp.router.weight"],
        shared: Some(SharedRule {
            path: "mlp.shared_experts",
            stacked: None,
            gate: None,
            width: SharedWidth::Times(&["moe_num_shared_experts"], Some(2)),
            strategy: None,
        }),
        ..BASE
    },
    Family {
        model_type: "nemotron_h",
        classes: &["NemotronHForCausalLM"],
        experts: ROUTED,
        activation: ActivationRule::Relu2,
        layers: LayerRule::BlockTypes,
        router: Some(one_group(1.0)),
        gate: &["mixer.gate.weight"],
        choice_bias: &["mixer.gate.e_score_correction_bias"],
        shared: Some(SharedRule {
            path: "mixer.shared_experts",
            stacked: None,
            gate: None,
            width: SharedWidth::Width("moe_shared_expert_intermediate_size", 7688),
            strategy: None,
        }),
        latent: Some("moe_latent_size"),
        ..BASE
    },
    Family {
        model_type: "gemma4",
        aliases: &["gemma4_text"],
        classes: &["Gemma4ForConditionalGeneration", "Gemma4ForCausalLM"],
        top_k: &["top_k_experts"],
        activation: ActivationRule::Gated {
            key: "hidden_activation",
            default: "gelu_pytorch_tanh",
        },
        layers: LayerRule::AllIf("enable_moe_block"),
        router: Some(RouterRule {
            expert_scales: Some("router.per_expert_scale"),
            input_scale: Some("router.scale"),
            ..PLAIN_SOFTMAX
        }),
        gate: &["router.proj.weight"],
        ..BASE
    },
    Family {
        model_type: "mistral4",
        classes: &["Mistral4ForCausalLM"],
        experts: ROUTED,
        layers: after_dense(0),
        router: Some(RouterRule { scoring: Scoring::Softmax, ..one_group(1.0) }),
        shared: Some(SHARED_EXPERTS),
        ..BASE
    },
    Family {
        model_type: "mistral_large4",
        aliases: &["mistral_large4_text"],
        classes: &["MistralLarge4ForConditionalGeneration"],
        experts: ROUTED_OR_ANY,
        layers: after_dense(1),
        has_layer_types: true,
        router: Some(RouterRule {
            scoring: Scoring::Softmax,
            renormalise: Renormalise::Always,
            ..one_group(1.0)
        }),
        gate: &["gate.weight"],
        shared: Some(SharedRule { path: "shared_experts", ..SHARED_EXPERTS }),
        ..BASE
    },
    Family {
        model_type: "inkling",
        aliases: &["inkling_mm_model", "inkling_text"],
        classes: &["InklingForConditionalGeneration", "InklingForCausalLM"],
        experts: ROUTED,
        other_width: Some(("dense_intermediate_size", "intermediate_size")),
        layers: LayerRule::AfterDense {
            key: Some("dense_mlp_idx"),
            default: 0,
            has_frequency: false,
        },
        has_layer_types: true,
        fused: Fused { transposed: false, interleaved_in: Some("w13_weight") },
        router: Some(RouterRule {
            renormalise: Renormalise::Never,
            scale: Some(("route_scale", 8.0)),
            expert_scales: Some("mlp.gate.global_scale"),
            ..SIGMOID
        }),
        choice_bias: &["mlp.gate.bias"],
        shared: Some(SharedRule {
            path: "mlp.shared_experts",
            stacked: Some(("shared_w13_weight", "shared_w2_weight")),
            gate: None,
            width: SharedWidth::Times(&["n_shared_experts"], Some(2)),
            strategy: None,
        }),
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
