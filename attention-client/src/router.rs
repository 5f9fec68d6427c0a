//! Routers choose the experts of each token, and their weights, from gate logits.
//!
//! [`RouterConfig`] describes the rule; [`ModelConfig::router`](checkpoint::ModelConfig::router) gives that of a
//! model. In formulas, with `l` the logits of one token (capped, if the rule caps them), `b` the bias for the choice,
//! `s` the scale; all arithmetic is f32:
//!
//! | scoring | score `p` | weight |
//! |---|---|---|
//! | softmax | `softmax(l)` | `s * p_i` |
//! | sigmoid | `1 / (1 + exp(-l))` | `s * p_i` |
//! | sqrt-softplus | `sqrt(ln(1 + exp(l)))` | `s * p_i` |
//! | normalised | one of these | `s * p_i / max(sum_topk(p) + epsilon, minimum)` |
//! | chosen by logits | softmax over the chosen logits, or their sigmoid | as above |
//! | sparse mixer | two softmaxes, each over the logits near the best one that is left | `p_i` |
//!
//! The best `top_k` of `p + b` are chosen, inside the best groups if there are groups. A group counts as much as its
//! best expert, or as the sum of its two best.
//!
//! The rules are those of Hugging Face transformers 5 (`src/transformers/models/*/modular_*.py`). Older
//! releases of transformers fill the scores of DeepSeek-V3's excluded groups with 0.0. An excluded
//! expert then wins when every biased score is negative. DeepSeek's own code and newer releases
//! exclude them (transformers issue 45440), and so does this module.
//!
//! Equal scores are resolved in favour of the lowest expert index (and the lowest group index),
//! so that a result never depends on the machine. `torch.topk` does not define the order of equal
//! scores. Chosen experts are listed by descending score, the sparse mixer's two in the order of choice. No token is
//! dropped.

use checkpoint::ConfigError;
use thiserror::Error;

pub use checkpoint::{ChosenBy, GroupScore, Groups, Normalisation, RouterConfig, Scoring};

/// Chooses `top_k` experts for every token.
///
/// Immutable, so threads may share one. Scratch memory is in a [`RouterWorkspace`].
///
/// ```
/// use switchyard_attention_client::{Router, RouterConfig, RouterWorkspace};
///
/// // 4 experts, top-2, weights sum up to 1
/// let router = Router::new(RouterConfig::softmax(4, 2, true), Vec::new())?;
/// let (mut topk_idx, mut topk_weights) = ([0; 2], [0.0; 2]);
/// let logits = [0.1, 2.0, -1.0, 2.0];
/// router.route(&logits, &mut RouterWorkspace::default(), &mut topk_idx, &mut topk_weights)?;
/// assert_eq!((topk_idx, topk_weights), ([1, 3], [0.5, 0.5]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Router {
    config: RouterConfig,
    /// `[num_experts]`, or empty without a bias.
    bias: Vec<f32>,
}

/// Scratch memory of [`Router::route`]; sized on first use, then never reallocated.
#[derive(Debug, Default)]
pub struct RouterWorkspace {
    /// Capped logits, `[num_experts]`; empty if nothing is capped.
    capped: Vec<f32>,
    /// Scores for the choice, `[num_experts]`.
    choice: Vec<f32>,
    /// Scores for the weights, `[num_experts]`.
    scores: Vec<f32>,
    /// Best eligible groups, best first, `[topk_groups]`.
    groups: Vec<i32>,
    /// Their scores, `[topk_groups]`.
    group_scores: Vec<f32>,
    /// Scores of the chosen experts, `[top_k]`.
    best: Vec<f32>,
}

/// Failure of [`Router::route`].
#[derive(Debug, Error, Clone, PartialEq)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages explain the fields")]
pub enum RouteError {
    /// A slice of the wrong length.
    #[error("{what} has {found} values, expected {expected}")]
    Length { what: &'static str, found: usize, expected: usize },
    /// A logit that is NaN or +inf.
    #[error(
        "the gate logit of token {token}, expert {expert} is {value}: the hidden state or the gate weight is broken"
    )]
    BadLogit { token: usize, expert: usize, value: f32 },
    /// Every logit of a token is -inf, so that its softmax is undefined.
    #[error("all gate logits of token {token} are -inf: no expert is eligible")]
    NoEligibleExpert { token: usize },
}

/// An invalid [`RouterConfig`], or a model whose router is not computed here.
#[derive(Debug, Error, Clone, PartialEq)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages explain the fields")]
pub enum RouterConfigError {
    /// The model's configuration has no rule that this library computes.
    #[error(transparent)]
    Model(#[from] ConfigError),
    /// More experts per token than there are experts, or none.
    #[error("top_k is {top_k}, expected 1 to num_experts = {num_experts}")]
    TopK { top_k: usize, num_experts: usize },
    /// The sparse mixer chooses two experts without bias and groups.
    #[error(
        "the sparse mixer chooses 2 experts by their logits, expected no bias, groups or other top_k"
    )]
    SparseMixer,
    /// A bias or groups need scores of all experts.
    #[error("experts are chosen by logits, expected no bias and no groups, which need scores")]
    ChosenByLogits,
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
    /// The bias does not fit.
    #[error("the bias for the choice has {found} values, expected {expected}")]
    BiasLength { found: usize, expected: usize },
    /// A value of the configuration is NaN or infinite.
    #[error("{what} is {value}, expected a finite number")]
    NotFinite { what: &'static str, value: f32 },
}

impl Router {
    /// A router with the given configuration and, if it has one, the `bias` `[num_experts]` for the choice
    /// (`e_score_correction_bias`), else an empty one.
    pub fn new(config: RouterConfig, bias: Vec<f32>) -> Result<Self, RouterConfigError> {
        validate(&config)?;
        let expected = if config.has_bias { config.num_experts } else { 0 };
        if bias.len() != expected {
            return Err(RouterConfigError::BiasLength { found: bias.len(), expected });
        }
        if let Some(&value) = bias.iter().find(|b| !b.is_finite()) {
            return Err(RouterConfigError::NotFinite { what: "the bias for the choice", value });
        }
        Ok(Self { config, bias })
    }

    /// The router's configuration.
    pub fn config(&self) -> &RouterConfig {
        &self.config
    }

    /// Routes every row of `logits` `[num_tokens, num_experts]`: fills `topk_idx` and
    /// `topk_weights`, both `[num_tokens, top_k]`.
    ///
    /// A logit of -inf gives a softmax score of 0: such an expert is chosen, with weight 0, only
    /// when fewer than `top_k` others are left.
    pub fn route(
        &self,
        logits: &[f32],
        workspace: &mut RouterWorkspace,
        topk_idx: &mut [i32],
        topk_weights: &mut [f32],
    ) -> Result<(), RouteError> {
        let RouterConfig { num_experts, top_k, .. } = self.config;
        let num_tokens = logits.len() / num_experts;
        check_length("logits", logits.len(), num_tokens * num_experts)?;
        check_length("topk_idx", topk_idx.len(), num_tokens * top_k)?;
        check_length("topk_weights", topk_weights.len(), num_tokens * top_k)?;
        workspace.resize(&self.config);
        let rows = logits
            .chunks_exact(num_experts)
            .zip(topk_idx.chunks_exact_mut(top_k))
            .zip(topk_weights.chunks_exact_mut(top_k));
        for (token, ((logits, idx), weights)) in rows.enumerate() {
            self.route_token(token, logits, workspace, idx, weights)?;
        }
        Ok(())
    }

    fn route_token(
        &self,
        token: usize,
        logits: &[f32],
        workspace: &mut RouterWorkspace,
        idx: &mut [i32],
        weights: &mut [f32],
    ) -> Result<(), RouteError> {
        let RouterWorkspace { capped, choice, scores, groups, group_scores, best } = workspace;
        if let Some(expert) = logits.iter().position(|l| l.is_nan() || *l == f32::INFINITY) {
            return Err(RouteError::BadLogit { token, expert, value: logits[expert] });
        }
        if let Some(cap) = self.config.softcap {
            capped.clear();
            capped.extend(logits.iter().map(|logit| cap * (logit / cap).tanh()));
        }
        let logits = if self.config.softcap.is_some() { &capped[..] } else { logits };
        if let Scoring::SparseMixer { jitter } = self.config.scoring {
            return sparse_mixer(logits, jitter, choice, idx, weights)
                .then_some(())
                .ok_or(RouteError::NoEligibleExpert { token });
        }
        let ineligible = || RouteError::NoEligibleExpert { token };
        match self.config.chosen_by {
            ChosenBy::Logits => {
                top_k_of(logits.iter().copied(), idx, best);
                score(self.config.scoring, best, weights).then_some(()).ok_or_else(ineligible)?;
            }
            ChosenBy::Scores => {
                score(self.config.scoring, logits, scores).then_some(()).ok_or_else(ineligible)?;
                choice.copy_from_slice(scores);
                for (choice, bias) in choice.iter_mut().zip(&self.bias) {
                    *choice += bias;
                }
                if let Some(config) = &self.config.groups {
                    let size = choice.len() / config.num_groups;
                    let score_of = |group: &[f32]| group_score(config.score, group);
                    top_k_of(choice.chunks_exact(size).map(score_of), groups, group_scores);
                    for (group, choice) in choice.chunks_exact_mut(size).enumerate() {
                        if !groups.contains(&(group as i32)) {
                            choice.fill(f32::NEG_INFINITY);
                        }
                    }
                }
                top_k_of(choice.iter().copied(), idx, best);
                for (weight, &expert) in weights.iter_mut().zip(idx.iter()) {
                    *weight = scores[expert as usize];
                }
            }
        }
        if let Normalisation::Sum { epsilon, minimum } = self.config.normalisation {
            let sum = (weights.iter().sum::<f32>() + epsilon).max(minimum);
            weights.iter_mut().for_each(|w| *w /= sum);
        }
        if self.config.scale != 1.0 {
            weights.iter_mut().for_each(|w| *w *= self.config.scale);
        }
        Ok(())
    }
}

fn group_score(kind: GroupScore, group: &[f32]) -> f32 {
    let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for &score in group {
        if score > first {
            second = first;
            first = score;
        } else if score > second {
            second = score;
        }
    }
    match kind {
        GroupScore::Max => first,
        GroupScore::TopTwoSum => first + second,
    }
}

impl RouterWorkspace {
    fn resize(&mut self, config: &RouterConfig) {
        self.choice.resize(config.num_experts, 0.0);
        self.scores.resize(config.num_experts, 0.0);
        let topk_groups = config.groups.map_or(0, |g| g.topk_groups);
        self.groups.resize(topk_groups, 0);
        self.group_scores.resize(topk_groups, 0.0);
        self.best.resize(config.top_k, 0.0);
    }
}

fn check_length(what: &'static str, found: usize, expected: usize) -> Result<(), RouteError> {
    if found == expected { Ok(()) } else { Err(RouteError::Length { what, found, expected }) }
}

/// Scores of `logits` into `scores`; false when every score is undefined.
fn score(scoring: Scoring, logits: &[f32], scores: &mut [f32]) -> bool {
    let each = |scores: &mut [f32], function: fn(f32) -> f32| {
        scores.iter_mut().zip(logits).for_each(|(score, logit)| *score = function(*logit));
        true
    };
    match scoring {
        Scoring::Sigmoid => each(scores, |logit| 1.0 / (1.0 + (-logit).exp())),
        // As in torch, which takes softplus for the identity above 20.
        Scoring::SqrtSoftplus => {
            each(
                scores,
                |logit| {
                    if logit > 20.0 { logit.sqrt() } else { logit.exp().ln_1p().sqrt() }
                },
            )
        }
        _ => softmax(logits, scores),
    }
}

/// PhiMoE's choice of two experts (`sparsemixer` of transformers, without its noise of training); false when every
/// logit is -inf. `left` is scratch memory.
fn sparse_mixer(
    logits: &[f32],
    jitter: f32,
    left: &mut [f32],
    idx: &mut [i32],
    weights: &mut [f32],
) -> bool {
    left.copy_from_slice(logits);
    for rank in 0..2 {
        let (mut best, mut max) = (0, f32::NEG_INFINITY);
        for (expert, &logit) in left.iter().enumerate() {
            if logit > max {
                (best, max) = (expert, logit);
            }
        }
        if max == f32::NEG_INFINITY {
            if rank == 1 {
                // Only one expert is eligible: the lowest other one, without weight.
                (idx[1], weights[1]) = (i32::from(idx[0] == 0), 0.0);
            }
            return rank == 1;
        }
        let is_near = |logit: f32| {
            let distance = (max - logit) / logit.abs().max(max);
            // A distance that is no number counts as near, as in torch.
            distance <= 2.0 * jitter || distance.is_nan()
        };
        let near = left.iter().zip(logits).filter(|(_, logit)| is_near(**logit));
        let sum: f32 = near.map(|(left, _)| (left - max).exp()).sum();
        (idx[rank], weights[rank]) = (best as i32, 1.0 / sum);
        left[best] = f32::NEG_INFINITY;
    }
    true
}

/// Softmax of `logits` into `scores`; false when every logit is -inf.
fn softmax(logits: &[f32], scores: &mut [f32]) -> bool {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if max == f32::NEG_INFINITY {
        return false;
    }
    let mut sum = 0.0;
    for (score, logit) in scores.iter_mut().zip(logits) {
        *score = (logit - max).exp();
        sum += *score;
    }
    scores.iter_mut().for_each(|s| *s /= sum);
    true
}

/// The indices of the `idx.len()` highest scores, best first, into `idx`, and the scores into
/// `best`; the lowest index wins among equals. There are at least `idx.len()` scores, none NaN.
fn top_k_of(scores: impl Iterator<Item = f32>, idx: &mut [i32], best: &mut [f32]) {
    let mut len = 0;
    for (candidate, score) in scores.enumerate() {
        if len == idx.len() {
            if score <= best[len - 1] {
                continue;
            }
        } else {
            len += 1;
        }
        // Insertion behind all that are at least as good: k is small.
        let mut at = len - 1;
        while at > 0 && best[at - 1] < score {
            best[at] = best[at - 1];
            idx[at] = idx[at - 1];
            at -= 1;
        }
        best[at] = score;
        idx[at] = candidate as i32;
    }
}

fn validate(config: &RouterConfig) -> Result<(), RouterConfigError> {
    let &RouterConfig { num_experts, top_k, .. } = config;
    // Expert indices travel as i32.
    if top_k == 0 || top_k > num_experts || i32::try_from(num_experts).is_err() {
        return Err(RouterConfigError::TopK { top_k, num_experts });
    }
    let needs_scores = config.has_bias || config.groups.is_some();
    if matches!(config.scoring, Scoring::SparseMixer { .. }) && (top_k != 2 || needs_scores) {
        return Err(RouterConfigError::SparseMixer);
    }
    if config.chosen_by == ChosenBy::Logits && needs_scores {
        return Err(RouterConfigError::ChosenByLogits);
    }
    if let Some(Groups { num_groups, topk_groups, score }) = config.groups {
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
    let (epsilon, minimum) = match config.normalisation {
        Normalisation::None => (0.0, 0.0),
        Normalisation::Sum { epsilon, minimum } => (epsilon, minimum),
    };
    let values = [
        ("the scale", config.scale),
        ("the epsilon", epsilon),
        ("the least divisor", minimum),
        ("the bound of the logits", config.softcap.unwrap_or(0.0)),
    ];
    match values.into_iter().find(|(_, value)| !value.is_finite()) {
        Some((what, value)) => Err(RouterConfigError::NotFinite { what, value }),
        None => Ok(()),
    }
}
