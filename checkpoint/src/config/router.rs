//! The rule that turns a router's logits into experts and factors.

use super::ConfigError;
use super::keys::{Keys, invalid};
use crate::family::{Family, Renormalise, RouterRule};

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
#[non_exhaustive]
pub enum Scoring {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each logit.
    Sigmoid,
    /// Softmax over the logits of the chosen experts only.
    SoftmaxOfChosen,
}

/// Method of choosing experts from scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TopkMethod {
    /// The best `top_k` experts of all.
    Greedy,
    /// DeepSeek-V2: a group's score is its best expert's score. Experts outside of the best
    /// `topk_groups` groups count as 0.
    GroupLimitedGreedy,
    /// DeepSeek-V3: a group's score is the sum of its two best biased scores. Experts outside of
    /// the best `topk_groups` groups count as −∞.
    NoAuxTc,
}

pub(super) fn parse(
    family: &'static Family,
    keys: &Keys,
    num_experts: usize,
    top_k: usize,
) -> Result<RouterConfig, ConfigError> {
    let softmax = |scoring, renormalise| RouterConfig {
        scoring,
        renormalise,
        num_groups: 1,
        topk_groups: 1,
        routed_scaling_factor: 1.0,
        has_bias: false,
        topk_method: TopkMethod::Greedy,
    };
    let is_v3 = match family.router {
        RouterRule::Softmax(rule) => {
            let renormalise = match rule {
                Renormalise::Always => true,
                Renormalise::Never => false,
                Renormalise::Key(default) => keys.flag("norm_topk_prob")?.unwrap_or(default),
            };
            return Ok(softmax(Scoring::Softmax, renormalise));
        }
        RouterRule::SoftmaxOfChosen => return Ok(softmax(Scoring::SoftmaxOfChosen, false)),
        RouterRule::Own => return Err(ConfigError::Router { family }),
        RouterRule::DeepseekV2 => false,
        RouterRule::DeepseekV3 => true,
    };

    // transformers 5 drops `scoring_func` and, for V3, `topk_method`: the family implies them.
    let scoring = match (keys.text("scoring_func")?, is_v3) {
        (Some("sigmoid"), _) | (None, true) => Scoring::Sigmoid,
        (Some("softmax"), _) | (None, false) => Scoring::Softmax,
        (Some(other), _) => return Err(invalid("scoring_func", other, "'softmax' or 'sigmoid'")),
    };
    let topk_method = match (keys.text("topk_method")?, is_v3) {
        (Some("noaux_tc"), _) | (None, true) => TopkMethod::NoAuxTc,
        (Some("group_limited_greedy"), _) => TopkMethod::GroupLimitedGreedy,
        (Some("greedy" | "gready"), _) | (None, false) => TopkMethod::Greedy,
        (Some(other), _) => {
            let expected = "'greedy', 'group_limited_greedy' or 'noaux_tc'";
            return Err(invalid("topk_method", other, expected));
        }
    };
    let (num_groups, topk_groups) = match topk_method {
        TopkMethod::Greedy => (1, 1),
        _ => (keys.whole("n_group")?.unwrap_or(1), keys.whole("topk_group")?.unwrap_or(1)),
    };
    if num_groups == 0 || !num_experts.is_multiple_of(num_groups) {
        return Err(invalid("n_group", num_groups, format!("a divisor of {num_experts} experts")));
    }
    let group_size = num_experts / num_groups;
    if topk_method == TopkMethod::NoAuxTc && group_size < 2 {
        let expected = format!("at most {}, so that a group has two experts", num_experts / 2);
        return Err(invalid("n_group", num_groups, expected));
    }
    if topk_groups == 0 || topk_groups > num_groups || topk_groups * group_size < top_k {
        let expected = format!("1 to {num_groups} groups that hold at least {top_k} experts");
        return Err(invalid("topk_group", topk_groups, expected));
    }
    let factor = keys.number("routed_scaling_factor")?.unwrap_or(1.0) as f32;
    if !factor.is_finite() {
        return Err(invalid("routed_scaling_factor", factor, "a finite number"));
    }
    Ok(RouterConfig {
        scoring,
        renormalise: keys.flag("norm_topk_prob")?.unwrap_or(is_v3),
        num_groups,
        topk_groups,
        routed_scaling_factor: factor,
        has_bias: topk_method == TopkMethod::NoAuxTc,
        topk_method,
    })
}
