//! The rule that turns a router's logits into experts and factors.

use super::ConfigError;
use super::keys::{Keys, invalid};
use crate::family::{Family, GroupRule, Renormalise, RouterRule};

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
        }
    }
}

pub(super) fn parse(
    family: &'static Family,
    keys: &Keys,
    num_experts: usize,
    top_k: usize,
) -> Result<RouterConfig, ConfigError> {
    let Some(rule) = &family.router else { return Err(ConfigError::Router { family }) };
    let scoring = scoring(rule, keys)?;
    if matches!(scoring, Scoring::SparseMixer { .. }) && top_k != 2 {
        return Err(invalid("num_experts_per_tok", top_k, "2, as PhiMoE's router chooses"));
    }
    // Which groups are compared how, and whether the bias counts.
    let (score, is_biased) = match rule.method {
        None => (rule.groups.map(|groups| groups.score), true),
        Some(default) => match keys.text("topk_method")?.unwrap_or(default) {
            // Some configurations of the Hub have the typo.
            "greedy" | "gready" => (None, false),
            "group_limited_greedy" => (Some(GroupScore::Max), false),
            "noaux_tc" => (Some(GroupScore::TopTwoSum), true),
            other => {
                let expected = "'greedy', 'group_limited_greedy' or 'noaux_tc'";
                return Err(invalid("topk_method", other, expected));
            }
        },
    };
    let groups = match (rule.groups, score) {
        (Some(rule), Some(score)) => groups(rule, score, keys, num_experts, top_k)?,
        _ => None,
    };
    let is_biased = is_biased
        && !family.choice_bias.is_empty()
        && match rule.bias_flag {
            Some((key, default)) => keys.flag(key)?.unwrap_or(default),
            None => true,
        };
    let factor = match rule.scale {
        Some((key, default)) => finite(keys, key)?.unwrap_or(default),
        None => 1.0,
    };
    let softcap = match rule.softcap {
        Some(key) => finite(keys, key)?.filter(|cap| *cap > 0.0),
        None => None,
    };
    Ok(RouterConfig {
        num_experts,
        top_k,
        softcap,
        scoring,
        chosen_by: rule.chosen_by,
        has_bias: is_biased,
        groups,
        normalisation: normalisation(rule, keys)?,
        scale: factor,
    })
}

fn scoring(rule: &RouterRule, keys: &Keys) -> Result<Scoring, ConfigError> {
    if let Scoring::SparseMixer { jitter } = rule.scoring {
        let jitter = finite(keys, "router_jitter_noise")?.unwrap_or(jitter);
        return Ok(Scoring::SparseMixer { jitter });
    }
    // transformers 5 drops DeepSeek's `scoring_func`: the family implies it.
    let Some(key) = rule.scoring_key else { return Ok(rule.scoring) };
    match keys.text(key)? {
        None => Ok(rule.scoring),
        Some("softmax") => Ok(Scoring::Softmax),
        Some("sigmoid") => Ok(Scoring::Sigmoid),
        Some("sqrtsoftplus") => Ok(Scoring::SqrtSoftplus),
        Some(other) => Err(invalid(key, other, "'softmax', 'sigmoid' or 'sqrtsoftplus'")),
    }
}

fn normalisation(rule: &RouterRule, keys: &Keys) -> Result<Normalisation, ConfigError> {
    let is_normalised = match rule.renormalise {
        Renormalise::Always => true,
        Renormalise::Never => false,
        Renormalise::Key(default) => match keys.first(NORM_KEYS)? {
            None => default,
            Some((key, value)) => value
                .as_bool()
                .ok_or_else(|| invalid(key, super::keys::clip(value), "true or false"))?,
        },
        Renormalise::Refused => match keys.flag("norm_topk_prob")? {
            Some(true) => {
                let expected = "false: transformers ignores it, and DeepSeek's own code then drops \
                                routed_scaling_factor, so its meaning is open";
                return Err(invalid("norm_topk_prob", true, expected));
            }
            _ => false,
        },
    };
    if !is_normalised {
        return Ok(Normalisation::None);
    }
    let minimum = match rule.minimum {
        Some((key, default)) => finite(keys, key)?.unwrap_or(default),
        None => 0.0,
    };
    Ok(Normalisation::Sum { epsilon: rule.epsilon, minimum })
}

/// The groups; `None` if all of them stay eligible.
fn groups(
    rule: GroupRule,
    score: GroupScore,
    keys: &Keys,
    num_experts: usize,
    top_k: usize,
) -> Result<Option<Groups>, ConfigError> {
    let whole = |spellings: &[&'static str], default: usize| match keys.first(spellings)? {
        None => Ok(default),
        Some((key, value)) => super::keys::as_whole(value)
            .ok_or_else(|| invalid(key, super::keys::clip(value), "a whole number")),
    };
    let (count_key, keep_key) = ("n_group", "topk_group");
    let num_groups = whole(GROUP_KEYS, rule.count)?;
    let topk_groups = whole(&[keep_key], rule.keep)?;
    if num_groups == 0 || !num_experts.is_multiple_of(num_groups) {
        return Err(invalid(count_key, num_groups, format!("a divisor of {num_experts} experts")));
    }
    let group_size = num_experts / num_groups;
    if score == GroupScore::TopTwoSum && group_size < 2 {
        let expected = format!("at most {}, so that a group has two experts", num_experts / 2);
        return Err(invalid(count_key, num_groups, expected));
    }
    if topk_groups == 0 || topk_groups > num_groups || topk_groups * group_size < top_k {
        let expected = format!("1 to {num_groups} groups that hold at least {top_k} experts");
        return Err(invalid(keep_key, topk_groups, expected));
    }
    let limits = topk_groups < num_groups;
    Ok(limits.then_some(Groups { num_groups, topk_groups, score }))
}

fn finite(keys: &Keys, key: &'static str) -> Result<Option<f32>, ConfigError> {
    let Some(value) = keys.number(key)? else { return Ok(None) };
    let value = value as f32;
    if value.is_finite() { Ok(Some(value)) } else { Err(invalid(key, value, "a finite number")) }
}

/// Spellings of the flag that the chosen scores are divided by their sum.
const NORM_KEYS: &[&str] = &["norm_topk_prob", "moe_renormalize"];
/// Spellings of the number of groups.
const GROUP_KEYS: &[&str] = &["n_group", "num_expert_group"];
