//! The configuration of a router, and its checks.

use thiserror::Error;

/// Configuration of a [`Router`](super::Router). See the table of the [module](super).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouterConfig {
    /// Number of routed experts: the length of one row of logits.
    pub num_experts: usize,
    /// Experts chosen per token.
    pub top_k: usize,
    /// How logits become scores.
    pub scoring: Scoring,
    /// Restriction of the choice to the best groups of experts.
    pub groups: Option<Groups>,
    /// How the scores of the chosen experts become weights.
    pub normalisation: Normalisation,
    /// Factor on every weight, after normalisation.
    pub scale: f32,
}

/// How logits become scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scoring {
    /// Softmax over all experts of a token.
    Softmax,
    /// Logistic function of each logit.
    Sigmoid,
}

/// Restriction of the choice to the best groups of neighbouring experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Groups {
    /// Number of groups; divides the number of experts.
    pub num_groups: usize,
    /// Groups that stay eligible for a token.
    pub topk_groups: usize,
    /// Score by which groups are compared.
    pub score: GroupScore,
}

/// Score by which groups are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
    /// The score divided by the sum of the chosen scores plus `epsilon`.
    Sum {
        /// Guards against division by zero; 0.0 for softmax scores.
        epsilon: f32,
    },
}

/// An invalid [`RouterConfig`].
#[derive(Debug, Error, Clone, PartialEq)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages explain the fields")]
pub enum RouterConfigError {
    /// More experts per token than there are experts, or none.
    #[error("top_k is {top_k}, expected 1 to num_experts = {num_experts}")]
    TopK { top_k: usize, num_experts: usize },
    /// The groups do not divide the experts, or too many are to be kept.
    #[error(
        "{topk_groups} of {num_groups} groups over {num_experts} experts: the number of groups must divide the number of experts, and between 1 and all groups must be kept"
    )]
    Groups { topk_groups: usize, num_groups: usize, num_experts: usize },
    /// The two best experts of a group are to be summed, but groups have one.
    #[error(
        "groups of {experts_per_group} expert(s), expected at least 2: groups are compared by their two best experts"
    )]
    GroupTooSmall { experts_per_group: usize },
    /// The kept groups hold fewer experts than a token needs.
    #[error("top_k is {top_k}, but the {topk_groups} kept group(s) hold {eligible} experts only")]
    TooFewEligible { top_k: usize, topk_groups: usize, eligible: usize },
    /// The correction bias does not fit.
    #[error("the correction bias has {found} values, expected num_experts = {expected}")]
    BiasLength { found: usize, expected: usize },
    /// `norm_topk_prob` with DeepSeek-V2. Implementations disagree on its meaning.
    #[error(
        "norm_topk_prob is true, expected false for {architecture}: transformers ignores it, and DeepSeek's own code then drops routed_scaling_factor, so its meaning is open"
    )]
    AmbiguousNormalisation { architecture: &'static str },
    /// A value of the configuration is NaN or infinite.
    #[error("{what} is {value}, expected a finite number")]
    NotFinite { what: &'static str, value: f32 },
}

impl RouterConfig {
    pub(super) fn validate(&self) -> Result<(), RouterConfigError> {
        let &Self { num_experts, top_k, .. } = self;
        // Expert indices travel as i32.
        if top_k == 0 || top_k > num_experts || i32::try_from(num_experts).is_err() {
            return Err(RouterConfigError::TopK { top_k, num_experts });
        }
        if let Some(Groups { num_groups, topk_groups, score }) = self.groups {
            if num_groups == 0
                || !num_experts.is_multiple_of(num_groups)
                || topk_groups == 0
                || topk_groups > num_groups
            {
                return Err(RouterConfigError::Groups { topk_groups, num_groups, num_experts });
            }
            let experts_per_group = num_experts / num_groups;
            if score == GroupScore::TopTwoSum && experts_per_group < 2 {
                return Err(RouterConfigError::GroupTooSmall { experts_per_group });
            }
            let eligible = topk_groups * experts_per_group;
            if top_k > eligible {
                return Err(RouterConfigError::TooFewEligible { top_k, topk_groups, eligible });
            }
        }
        if !self.scale.is_finite() {
            return Err(RouterConfigError::NotFinite {
                what: "routed_scaling_factor",
                value: self.scale,
            });
        }
        if let Normalisation::Sum { epsilon } = self.normalisation
            && !epsilon.is_finite()
        {
            return Err(RouterConfigError::NotFinite { what: "epsilon", value: epsilon });
        }
        Ok(())
    }
}
