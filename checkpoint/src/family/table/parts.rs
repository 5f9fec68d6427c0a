//! Parts that rows of the table share.

use crate::family::{
    ActivationRule, Family, Fused, GroupRule, LayerRule, Renormalise, RouterRule, SharedRule,
    SharedWidth, Weighting,
};
use crate::router::{ChosenBy, GroupScore, Scoring};

/// The most common values. Rows say what differs.
pub(super) const BASE: Family = Family {
    model_type: "",
    aliases: &[],
    classes: &[],
    experts: EXPERTS,
    top_k: &["num_experts_per_tok"],
    width: MOE_WIDTH,
    other_width: None,
    activation: ActivationRule::Gated { key: "hidden_act", default: "silu" },
    weighting: Weighting::Output,
    layers: LayerRule::All,
    has_layer_types: false,
    fused: Fused { transposed: false, interleaved_in: None },
    router: softmax(Renormalise::Always),
    gate: &["mlp.gate.weight"],
    choice_bias: &[],
    shared: None,
    latent: None,
};

/// DeepSeek-V3 and the many families that took over its block.
pub(super) const DEEPSEEK_V3: Family = Family {
    experts: ROUTED,
    layers: after_dense(3),
    router: Some(DEEPSEEK_V3_ROUTER),
    choice_bias: &["mlp.gate.e_score_correction_bias"],
    shared: Some(SHARED_EXPERTS),
    ..BASE
};

pub(super) const MIXTRAL: Family = Family {
    experts: EXPERTS_OR_LOCAL,
    width: PLAIN_WIDTH,
    gate: &["block_sparse_moe.gate.weight", "mlp.gate.weight"],
    ..BASE
};

pub(super) const fn softmax(renormalise: Renormalise) -> Option<RouterRule> {
    Some(RouterRule { renormalise, ..PLAIN_SOFTMAX })
}

pub(super) const PLAIN_SOFTMAX: RouterRule = RouterRule {
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
    expert_scales: None,
    input_scale: None,
};

pub(super) const SOFTMAX_OF_CHOSEN: RouterRule =
    RouterRule { chosen_by: ChosenBy::Logits, renormalise: Renormalise::Never, ..PLAIN_SOFTMAX };

pub(super) const DEEPSEEK_V2_ROUTER: RouterRule = RouterRule {
    scoring_key: Some("scoring_func"),
    method: Some("greedy"),
    groups: Some(GroupRule { count: 1, keep: 1, score: GroupScore::Max }),
    renormalise: Renormalise::Refused,
    scale: Some(("routed_scaling_factor", 1.0)),
    ..PLAIN_SOFTMAX
};

pub(super) const DEEPSEEK_V3_ROUTER: RouterRule = RouterRule {
    scoring_key: Some("scoring_func"),
    method: Some("noaux_tc"),
    groups: Some(GroupRule { count: 8, keep: 4, score: GroupScore::TopTwoSum }),
    scale: Some(("routed_scaling_factor", 2.5)),
    ..SIGMOID
};

/// Sigmoid scores, a bias for the choice if the family names one, normalised.
pub(super) const SIGMOID: RouterRule = RouterRule {
    scoring: Scoring::Sigmoid,
    renormalise: Renormalise::Key(true),
    epsilon: 1e-20,
    ..PLAIN_SOFTMAX
};

/// DeepSeek-V3's rule in the families that took it over with one group and their own factor.
pub(super) const fn one_group(scale: f32) -> RouterRule {
    RouterRule {
        groups: Some(GroupRule { count: 1, keep: 1, score: GroupScore::TopTwoSum }),
        scale: Some(("routed_scaling_factor", scale)),
        ..SIGMOID
    }
}

/// Qwen's blocks with one shared expert behind a sigmoid gate.
pub(super) const QWEN_SHARED: Family = Family {
    layers: sparse_step(0),
    router: softmax(Renormalise::Key(false)),
    shared: Some(QWEN_SHARED_RULE),
    ..BASE
};

pub(super) const QWEN_SHARED_RULE: SharedRule = SharedRule {
    path: "mlp.shared_expert",
    stacked: None,
    gate: Some("mlp.shared_expert_gate.weight"),
    width: SharedWidth::Width("shared_expert_intermediate_size", 512),
    strategy: None,
};

/// gpt-oss's activation, which several families took over.
pub(super) const SWIGLU_OAI: ActivationRule =
    ActivationRule::ClampedOffset { alpha: ("swiglu_alpha", 1.702), limit: ("swiglu_limit", 7.0) };

pub(super) const GRANITE: Family = Family {
    experts: LOCAL_EXPERTS,
    width: PLAIN_WIDTH,
    router: Some(SOFTMAX_OF_CHOSEN),
    gate: &["block_sparse_moe.router.layer.weight"],
    ..BASE
};

pub(super) const SHARED_EXPERTS: SharedRule = SharedRule {
    path: "mlp.shared_experts",
    stacked: None,
    gate: None,
    width: SharedWidth::Times(&["n_shared_experts"], Some(1)),
    strategy: None,
};

pub(super) const fn after_dense(default: u32) -> LayerRule {
    LayerRule::AfterDense { key: Some("first_k_dense_replace"), default, has_frequency: false }
}

/// As [`after_dense`], with `moe_layer_freq`.
pub(super) const fn after_dense_every(default: u32) -> LayerRule {
    LayerRule::AfterDense { key: Some("first_k_dense_replace"), default, has_frequency: true }
}

/// Every `decoder_sparse_step`-th layer. Without the list `mlp_only_layers`, the first `dense` ones have no experts.
pub(super) const fn sparse_step(dense: u32) -> LayerRule {
    LayerRule::SparseStep { dense }
}

/// From this layer on, whatever the configuration says.
pub(super) const fn from_layer(first: u32) -> LayerRule {
    LayerRule::AfterDense { key: None, default: first, has_frequency: false }
}

pub(super) const EXPERTS: &[&str] = &["num_experts"];
pub(super) const LOCAL_EXPERTS: &[&str] = &["num_local_experts"];
pub(super) const EXPERTS_OR_LOCAL: &[&str] = &["num_experts", "num_local_experts"];
pub(super) const ROUTED: &[&str] = &["n_routed_experts", "num_local_experts"];
pub(super) const ROUTED_OR_ANY: &[&str] = &["n_routed_experts", "num_local_experts", "num_experts"];
pub(super) const PER_TOKEN: &[&str] = &["num_experts_per_tok", "num_experts_per_token"];

pub(super) const MOE_WIDTH: &[&str] = &["moe_intermediate_size"];
pub(super) const PLAIN_WIDTH: &[&str] = &["intermediate_size"];
