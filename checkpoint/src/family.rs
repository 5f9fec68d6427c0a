//! Descriptions of model families: tensor names, configuration keys and arithmetic as data.
//!
//! A family is a row of [`Family::ALL`]. Source of every row: the modelling and configuration code of
//! transformers 5.23 (`models/<model_type>/`) and the names in published checkpoints.

mod table;

use std::fmt;

use crate::router::{ChosenBy, GroupScore, Scoring};

/// A model family: the checkpoints of one `model_type`.
///
/// Two families are equal if their model types are.
#[derive(Debug)]
pub struct Family {
    /// `model_type` in `config.json`, of the text model where configurations are nested.
    pub model_type: &'static str,
    /// Other values of `model_type` that mean the same, such as that of a multi-modal wrapper.
    pub(crate) aliases: &'static [&'static str],
    /// Class names in `architectures`. The first one stands for the family in messages.
    pub(crate) classes: &'static [&'static str],
    /// Keys of the number of routed experts in a layer.
    pub(crate) experts: &'static [&'static str],
    /// Keys of the number of experts for each token.
    pub(crate) top_k: &'static [&'static str],
    /// Keys of the inner width of one routed expert, in order of preference.
    pub(crate) width: &'static [&'static str],
    /// If the first key is present, the second one has the width instead.
    pub(crate) other_width: Option<(&'static str, &'static str)>,
    /// The experts' activation.
    pub(crate) activation: ActivationRule,
    /// The place of the factor that the router gives a token's expert.
    pub(crate) weighting: Weighting,
    /// The layers that have experts.
    pub(crate) layers: LayerRule,
    /// A list `mlp_layer_types` of `"dense"` and `"sparse"` overrides that rule.
    pub(crate) has_layer_types: bool,
    /// The layout of a fused gate-and-up tensor whose shape does not tell it.
    pub(crate) fused: Fused,
    /// From logits to experts and factors; `None` for a rule that this library does not compute.
    pub(crate) router: Option<RouterRule>,
    /// Name of the router's weight behind the layer's prefix. The first one that exists counts.
    pub(crate) gate: &'static [&'static str],
    /// Name of the per-expert bias for the choice of experts.
    pub(crate) choice_bias: &'static [&'static str],
    /// Experts that every token passes.
    pub(crate) shared: Option<SharedRule>,
    /// Key of the width of the rows that experts take and return, if it is not that of hidden states.
    pub(crate) latent: Option<&'static str>,
}

impl PartialEq for Family {
    fn eq(&self, other: &Family) -> bool {
        self.model_type == other.model_type
    }
}

impl Eq for Family {}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.class_name())
    }
}

impl Family {
    /// Every family that can be served.
    pub const ALL: &'static [Family] = table::FAMILIES;

    /// The family's class name in `architectures`.
    #[must_use]
    pub fn class_name(&self) -> &'static str {
        self.classes.first().copied().unwrap_or(self.model_type)
    }

    /// The family with that class name in `architectures`.
    #[must_use]
    pub fn by_class(class: &str) -> Option<&'static Family> {
        Self::ALL.iter().find(|family| family.classes.contains(&class))
    }

    /// The family with that `model_type`.
    #[must_use]
    pub fn by_model_type(model_type: &str) -> Option<&'static Family> {
        let known = |family: &&Family| {
            family.model_type == model_type || family.aliases.contains(&model_type)
        };
        Self::ALL.iter().find(known)
    }
}

/// How a family's configuration gives the experts' activation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum ActivationRule {
    /// `act(gate) · up`; the key names the activation.
    Gated {
        /// Key of the activation's name.
        key: &'static str,
        /// Name without the key.
        default: &'static str,
    },
    /// `silu(gate) · up`, whatever the configuration says.
    Silu,
    /// `silu(min(gate, L)) · clamp(up, −L, L)`, L from `swiglu_limit`.
    Clamped {
        /// L without the key; infinite if nothing is clamped then.
        default: f32,
    },
    /// `gate · σ(α · gate) · (up + 1)` after the same clamping; α and L from the keys, else these values.
    ClampedOffset {
        /// Key of α, and its default.
        alpha: (&'static str, f32),
        /// Key of L, and its default.
        limit: (&'static str, f32),
    },
    /// No gate: `relu(up)²`.
    Relu2,
}

/// The place where a token's factor for an expert is applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Weighting {
    /// On the expert's output: `Σ w · expert(x)`.
    Output,
    /// On the expert's input: `Σ expert(w · x)` (Llama 4).
    Input,
}

/// The layers that have experts. Keys that a family's rule does not name are ignored, as in transformers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LayerRule {
    /// Every layer.
    All,
    /// Every layer if this flag is set, else none.
    AllIf(&'static str),
    /// Every layer, or the layers that the list `moe_layer_freq` marks.
    Marked,
    /// Layer `l` if `(l + 1) % decoder_sparse_step == 0` and `mlp_only_layers` does not list it.
    SparseStep {
        /// Without that list, this number of leading layers is dense.
        dense: u32,
    },
    /// From a number of leading dense layers on.
    AfterDense {
        /// Key of that number; `None` if the family fixes it.
        key: Option<&'static str>,
        /// Value without the key.
        default: u32,
        /// Only every `moe_layer_freq`-th layer, or the layers that a list there marks.
        has_frequency: bool,
    },
    /// `l % expert_layer_period == expert_layer_offset`, with Jamba's defaults 2 and 1. A model with one expert is dense.
    Period,
    /// `moe_layers`, else every `interleave_moe_layer_step`-th (`(l + 1) % step == 0`).
    Interleaved,
    /// From `moe_layer_start_index` to `moe_layer_end_index` every `moe_layer_interval`-th.
    Range,
    /// The blocks of a hybrid model that `layers_block_type`, `layer_types` or `hybrid_override_pattern` marks; their
    /// number is the number of layers.
    BlockTypes,
}

/// How rows of gate and up lie in a fused tensor, where its shape does not tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fused {
    /// The tensor is `[E, H, 2I]` instead of `[E, 2I, H]`.
    pub transposed: bool,
    /// A part of the name of the tensors in which gate and up alternate (g0, u0, g1, …); in others they lie one after
    /// the other.
    pub interleaved_in: Option<&'static str>,
}

/// How a family gets experts and factors from router logits, see [`RouterConfig`](crate::RouterConfig).
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct RouterRule {
    /// The scores, without a key.
    pub scoring: Scoring,
    /// Key of the name of the scores.
    pub scoring_key: Option<&'static str>,
    /// By which values experts are chosen.
    pub chosen_by: ChosenBy,
    /// For families that read `topk_method`, its default. It says which groups are compared, and by what.
    pub method: Option<&'static str>,
    /// Restriction to the best groups.
    pub groups: Option<GroupRule>,
    /// Key and default of the flag that the choice bias is used.
    pub bias_flag: Option<(&'static str, bool)>,
    /// Whether factors are divided by their sum.
    pub renormalise: Renormalise,
    /// Added to the sum.
    pub epsilon: f32,
    /// Key and default of the least divisor.
    pub minimum: Option<(&'static str, f32)>,
    /// Key and default of the factor on all weights.
    pub scale: Option<(&'static str, f32)>,
    /// Key of the bound of the logits.
    pub softcap: Option<&'static str>,
    /// Name, behind the layer's prefix, of the factors on the weights: one for each expert, or one for all.
    pub expert_scales: Option<&'static str>,
    /// Name of the vector by which a normalised input of the gate is multiplied.
    pub input_scale: Option<&'static str>,
}

/// Groups of experts, `n_group` and `topk_group`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GroupRule {
    /// Groups without the key.
    pub count: usize,
    /// Eligible groups without the key.
    pub keep: usize,
    /// Score by which groups are compared.
    pub score: GroupScore,
}

/// Whether the chosen experts' scores are divided by their sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Renormalise {
    /// Always.
    Always,
    /// Never.
    Never,
    /// As `norm_topk_prob` says; this without the key.
    Key(bool),
    /// Never, and `norm_topk_prob` must not ask for it.
    Refused,
}

/// Experts that every token passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SharedRule {
    /// Name of the MLP of all of them behind the layer's prefix.
    pub path: &'static str,
    /// For experts that the router weighs one by one: the names, behind the path, of the tensor with gate and up of
    /// all of them, and of that with down.
    pub stacked: Option<(&'static str, &'static str)>,
    /// Name of the weight whose sigmoid scales the MLP's output, behind the layer's prefix.
    pub gate: Option<&'static str>,
    /// How the configuration gives the MLP's width.
    pub width: SharedWidth,
    /// For families that read `shared_expert_combination_strategy`, its default.
    pub strategy: Option<&'static str>,
}

/// How a configuration gives the width of the shared experts' MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SharedWidth {
    /// The number under these keys times the width of a routed expert. The second field is the number without the
    /// keys; `None` if it is required.
    Times(&'static [&'static str], Option<u32>),
    /// The width itself under this key, and its value without the key. 0: no shared experts.
    Width(&'static str, u32),
}
