//! The rule that turns a router's logits into experts and factors.

/// Rule of a router that turns logits (`x · weightᵀ`, in f32) into experts and weights.
///
/// The steps are: logits, capped; scores; the choice of `top_k` experts; the chosen experts' scores, normalised and
/// scaled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouterConfig {
    /// Number of routed experts: the length of one row of logits.
    pub num_experts: usize,
    /// Experts chosen per token.
    pub top_k: usize,
    /// Bound `c` of the logits, which become `c · tanh(logit / c)`.
    pub softcap: Option<f32>,
    /// How logits become scores.
    pub scoring: Scoring,
    /// By which values experts are chosen.
    pub chosen_by: ChosenBy,
    /// True if a per-expert bias (`e_score_correction_bias`) is added to the scores for the choice of
    /// experts. Weights use the scores without the bias.
    pub has_bias: bool,
    /// Restriction of the choice to the best groups of experts.
    pub groups: Option<Groups>,
    /// How the scores of the chosen experts become weights.
    pub normalisation: Normalisation,
    /// Factor on every weight, after normalisation.
    pub scale: f32,
    /// True if the checkpoint has further factors on the weights, one for each expert or one for all.
    pub has_expert_scales: bool,
    /// Shared experts that the router weighs, too: their logits follow those of the routed experts in each row. The
    /// weights of the chosen and of the shared experts are their sigmoids, divided by the sum of all of these.
    /// 0 for most models.
    pub weighted_shared: usize,
    /// The gate takes the hidden state normalised instead of as it is.
    pub input_norm: Option<InputNorm>,
}

/// The input of a gate that normalises it (Gemma 4): `x / sqrt(mean(x²) + epsilon) · s / sqrt(hidden)`. The vector `s`
/// is [`RouterTensors::input_scale`](crate::RouterTensors::input_scale).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct InputNorm {
    /// Added to the mean of the squares.
    pub epsilon: f32,
}

/// How logits become scores.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Scoring {
    /// Softmax over the token's logits: all of them, or the chosen ones for [`ChosenBy::Logits`].
    Softmax,
    /// Logistic function of each logit.
    Sigmoid,
    /// `sqrt(ln(1 + exp(logit)))`.
    SqrtSoftplus,
    /// PhiMoE's choice of two experts, one after the other: a softmax over the logits that are near the best one, `(best − logit) / max(|logit|, best) ≤ 2 · jitter`.
    SparseMixer {
        /// Half of the relative distance up to which a logit counts as near.
        jitter: f32,
    },
}

/// By which values experts are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ChosenBy {
    /// The scores, with the bias if there is one.
    Scores,
    /// The logits; only the chosen ones get a score.
    Logits,
}

/// Restriction of the choice to the best groups of neighbouring experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Groups {
    /// Number of groups; divides the number of experts.
    pub num_groups: usize,
    /// Groups that stay eligible for a token.
    pub topk_groups: usize,
    /// Score by which groups are compared.
    pub score: GroupScore,
}

/// Score by which groups are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GroupScore {
    /// The highest score of the group.
    Max,
    /// The sum of the two highest scores of the group.
    TopTwoSum,
}

/// How the scores of the chosen experts become weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Normalisation {
    /// The score itself.
    None,
    /// The score divided by `max(sum of the chosen scores + epsilon, minimum)`.
    Sum {
        /// Guards against division by zero; 0.0 for most softmax scores.
        epsilon: f32,
        /// The least divisor.
        minimum: f32,
    },
}

impl Normalisation {
    /// Division by the plain sum.
    pub const SUM: Normalisation = Normalisation::Sum { epsilon: 0.0, minimum: 0.0 };
}

impl RouterConfig {
    /// Softmax over all experts, then the best `top_k`: Qwen3-MoE (`renormalise` = `norm_topk_prob`) and Mixtral
    /// (`renormalise` = true).
    #[must_use]
    pub const fn softmax(num_experts: usize, top_k: usize, renormalise: bool) -> RouterConfig {
        RouterConfig {
            num_experts,
            top_k,
            softcap: None,
            scoring: Scoring::Softmax,
            chosen_by: ChosenBy::Scores,
            has_bias: false,
            groups: None,
            normalisation: if renormalise { Normalisation::SUM } else { Normalisation::None },
            scale: 1.0,
            has_expert_scales: false,
            weighted_shared: 0,
            input_norm: None,
        }
    }
}
