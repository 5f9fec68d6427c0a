//! Reads the rule of the router.

use super::ConfigError;
use super::keys::{Keys, invalid};
use crate::family::{Family, GroupRule, Renormalise, RouterRule};
use crate::router::{GroupScore, Groups, InputNorm, Normalisation, RouterConfig, Scoring};

pub(super) fn parse(
    family: &'static Family,
    keys: &Keys,
    num_experts: usize,
    top_k: usize,
    weighted_shared: usize,
) -> Result<RouterConfig, ConfigError> {
    let Some(rule) = &family.router else { return Err(ConfigError::Router { family }) };
    let scoring = scoring(rule, keys)?;
    if matches!(scoring, Scoring::SparseMixer { .. }) && top_k != 2 {
        return Err(invalid("num_experts_per_tok", top_k, "2, as PhiMoE's router chooses"));
    }
    // The score of groups, and whether the bias counts.
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
        has_expert_scales: rule.expert_scales.is_some(),
        weighted_shared,
        input_norm: match rule.input_scale {
            Some(_) => Some(InputNorm { epsilon: finite(keys, "rms_norm_eps")?.unwrap_or(1e-6) }),
            None => None,
        },
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
