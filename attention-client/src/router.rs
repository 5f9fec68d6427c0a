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
//! | weighted shared experts | sigmoid | `s * p_i / sum(p)` over the chosen and the shared experts |
//!
//! A model may have further factors, one for each expert ([`Router::with_scales`]).
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

mod scores;

use checkpoint::ConfigError;
use thiserror::Error;

use scores::{group_score, log_sigmoid, score, sparse_mixer, top_k_of};

pub use checkpoint::{
    ChosenBy, GroupScore, Groups, InputNorm, Normalisation, RouterConfig, Scoring,
};

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
    /// Factors on the weights: `[num_experts]`, one for all, or empty.
    scales: Vec<f32>,
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
    /// Weights of the shared experts, `[num_tokens, weighted_shared]`.
    shared: Vec<f32>,
}

impl RouterWorkspace {
    /// The weights of the shared experts after a successful [`Router::route`], `[num_tokens, weighted_shared]`. Empty
    /// for models whose shared experts have no weights.
    pub fn shared_weights(&self) -> &[f32] {
        &self.shared
    }
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
    /// An expert that the caller chose is none of the model's.
    #[error("token {token} has expert {expert}, expected 0 to {}", num_experts - 1)]
    NoSuchExpert { token: usize, expert: i32, num_experts: usize },
    /// The sparse mixer's weights follow from its own choice.
    #[error("the sparse mixer chooses experts itself; call `route`")]
    OwnChoice,
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
    /// The factors of the experts do not fit.
    #[error("the experts' factors are {found} values, expected {expected}")]
    ScalesLength { found: usize, expected: &'static str },
    /// Weighted shared experts need sigmoids that nothing else normalises.
    #[error(
        "the router weighs shared experts, expected sigmoid scores, no other normalisation and no bound of the logits"
    )]
    WeightedShared,
    /// A value of the configuration is NaN or infinite.
    #[error("{what} is {value}, expected a finite number")]
    NotFinite { what: &'static str, value: f32 },
}

impl Router {
    /// A router with the given configuration and, if it has one, the `bias` `[num_experts]` for the choice
    /// (`e_score_correction_bias`), else an empty one.
    ///
    /// # Errors
    /// [`RouterConfigError`]. A configuration with factors for the experts needs [`with_scales`](Self::with_scales).
    pub fn new(config: RouterConfig, bias: Vec<f32>) -> Result<Self, RouterConfigError> {
        Self::with_scales(config, bias, Vec::new())
    }

    /// As [`new`](Self::new) for a model with further factors on the weights: one for each expert (Gemma 4's
    /// `per_expert_scale`) or one for all, shared ones included (Inkling's `global_scale`).
    ///
    /// # Errors
    /// [`RouterConfigError`].
    pub fn with_scales(
        config: RouterConfig,
        bias: Vec<f32>,
        scales: Vec<f32>,
    ) -> Result<Self, RouterConfigError> {
        validate(&config)?;
        let expected = match (config.has_expert_scales, config.weighted_shared) {
            (false, _) if !scales.is_empty() => Some("none"),
            (true, 0) if scales.len() != 1 && scales.len() != config.num_experts => {
                Some("one for each expert, or one for all")
            }
            (true, 1..) if scales.len() != 1 => Some("one for all"),
            _ => None,
        };
        if let Some(expected) = expected {
            return Err(RouterConfigError::ScalesLength { found: scales.len(), expected });
        }
        if let Some(&value) = scales.iter().find(|scale| !scale.is_finite()) {
            return Err(RouterConfigError::NotFinite { what: "a factor of the experts", value });
        }
        let expected = if config.has_bias { config.num_experts } else { 0 };
        if bias.len() != expected {
            return Err(RouterConfigError::BiasLength { found: bias.len(), expected });
        }
        if let Some(&value) = bias.iter().find(|b| !b.is_finite()) {
            return Err(RouterConfigError::NotFinite { what: "the bias for the choice", value });
        }
        Ok(Self { config, bias, scales })
    }

    /// The router's configuration.
    pub fn config(&self) -> &RouterConfig {
        &self.config
    }

    /// Routes every row of `logits` `[num_tokens, num_experts + weighted_shared]`: fills `topk_idx` and
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
        let top_k = self.config.top_k;
        self.check_lengths(logits, workspace, topk_idx.len(), topk_weights.len())?;
        let rows = logits
            .chunks_exact(self.row_len())
            .zip(topk_idx.chunks_exact_mut(top_k))
            .zip(topk_weights.chunks_exact_mut(top_k));
        for (token, ((logits, idx), weights)) in rows.enumerate() {
            self.route_token(token, logits, workspace, idx, weights)?;
            self.finish(token, logits, workspace, idx, weights);
        }
        Ok(())
    }

    /// Weighs experts that the caller has chosen, for a layer that chooses them by the token
    /// ([`RouterTensors::hash_table`](checkpoint::RouterTensors::hash_table)): fills `topk_weights` from `logits` as
    /// [`route`](Self::route) does after its own choice.
    ///
    /// # Errors
    /// [`RouteError`].
    pub fn weigh(
        &self,
        logits: &[f32],
        workspace: &mut RouterWorkspace,
        topk_idx: &[i32],
        topk_weights: &mut [f32],
    ) -> Result<(), RouteError> {
        let RouterConfig { num_experts, top_k, scoring, .. } = self.config;
        if matches!(scoring, Scoring::SparseMixer { .. }) {
            return Err(RouteError::OwnChoice);
        }
        self.check_lengths(logits, workspace, topk_idx.len(), topk_weights.len())?;
        let rows = logits
            .chunks_exact(self.row_len())
            .zip(topk_idx.chunks_exact(top_k))
            .zip(topk_weights.chunks_exact_mut(top_k));
        for (token, ((logits, idx), weights)) in rows.enumerate() {
            let is_expert = |expert: i32| usize::try_from(expert).is_ok_and(|e| e < num_experts);
            if let Some(&expert) = idx.iter().find(|expert| !is_expert(**expert)) {
                return Err(RouteError::NoSuchExpert { token, expert, num_experts });
            }
            let RouterWorkspace { capped, scores, best, .. } = workspace;
            let logits_of_experts = self.checked_logits(token, logits, capped)?;
            let is_defined = match self.config.chosen_by {
                ChosenBy::Logits => {
                    for (best, expert) in best.iter_mut().zip(idx) {
                        *best = logits_of_experts[*expert as usize];
                    }
                    score(scoring, best, weights)
                }
                ChosenBy::Scores => {
                    let is_defined = score(scoring, logits_of_experts, scores);
                    for (weight, expert) in weights.iter_mut().zip(idx) {
                        *weight = scores[*expert as usize];
                    }
                    is_defined
                }
            };
            if !is_defined {
                return Err(RouteError::NoEligibleExpert { token });
            }
            self.finish(token, logits, workspace, idx, weights);
        }
        Ok(())
    }

    /// Logits of one token.
    fn row_len(&self) -> usize {
        self.config.num_experts + self.config.weighted_shared
    }

    /// Checks the lengths and sizes the workspace.
    fn check_lengths(
        &self,
        logits: &[f32],
        workspace: &mut RouterWorkspace,
        num_idx: usize,
        num_weights: usize,
    ) -> Result<(), RouteError> {
        let (row, top_k) = (self.row_len(), self.config.top_k);
        let num_tokens = logits.len() / row;
        check_length("logits", logits.len(), num_tokens * row)?;
        check_length("topk_idx", num_idx, num_tokens * top_k)?;
        check_length("topk_weights", num_weights, num_tokens * top_k)?;
        workspace.resize(&self.config, num_tokens);
        Ok(())
    }

    /// The logits of the routed experts, capped if the rule caps them.
    fn checked_logits<'a>(
        &self,
        token: usize,
        logits: &'a [f32],
        capped: &'a mut Vec<f32>,
    ) -> Result<&'a [f32], RouteError> {
        if let Some(expert) = logits.iter().position(|l| l.is_nan() || *l == f32::INFINITY) {
            return Err(RouteError::BadLogit { token, expert, value: logits[expert] });
        }
        let logits = &logits[..self.config.num_experts];
        Ok(match self.config.softcap {
            Some(cap) => {
                capped.clear();
                capped.extend(logits.iter().map(|logit| cap * (logit / cap).tanh()));
                capped
            }
            None => logits,
        })
    }

    /// Normalises and scales the weights of a token's chosen experts.
    fn finish(
        &self,
        token: usize,
        logits: &[f32],
        workspace: &mut RouterWorkspace,
        idx: &[i32],
        weights: &mut [f32],
    ) {
        let RouterConfig { num_experts, weighted_shared, scale, .. } = self.config;
        let shared = &mut workspace.shared[token * weighted_shared..][..weighted_shared];
        if weighted_shared > 0 {
            for (weight, expert) in weights.iter_mut().zip(idx) {
                *weight = log_sigmoid(logits[*expert as usize]);
            }
            for (weight, logit) in shared.iter_mut().zip(&logits[num_experts..]) {
                *weight = log_sigmoid(*logit);
            }
            let all = || weights.iter().chain(shared.iter());
            let max = all().copied().fold(f32::MIN, f32::max);
            let sum = all().map(|log| (log - max).exp()).sum::<f32>().max(f32::MIN_POSITIVE);
            let share = |log: &mut f32| *log = (*log - max).exp() / sum;
            weights.iter_mut().chain(shared.iter_mut()).for_each(share);
        }
        if let Normalisation::Sum { epsilon, minimum } = self.config.normalisation {
            // All scores of a token may be 0, by underflow. Its weights are 0 then, too.
            let sum = (weights.iter().sum::<f32>() + epsilon).max(minimum).max(f32::MIN_POSITIVE);
            weights.iter_mut().for_each(|w| *w /= sum);
        }
        if scale != 1.0 {
            weights.iter_mut().chain(shared.iter_mut()).for_each(|w| *w *= scale);
        }
        match self.scales.as_slice() {
            [] => {}
            [scale] => weights.iter_mut().chain(shared.iter_mut()).for_each(|w| *w *= scale),
            scales => {
                let pairs = weights.iter_mut().zip(idx);
                pairs.for_each(|(weight, expert)| *weight *= scales[*expert as usize]);
            }
        }
    }

    fn route_token(
        &self,
        token: usize,
        logits: &[f32],
        workspace: &mut RouterWorkspace,
        idx: &mut [i32],
        weights: &mut [f32],
    ) -> Result<(), RouteError> {
        let RouterWorkspace { capped, choice, scores, groups, group_scores, best, .. } = workspace;
        let logits = self.checked_logits(token, logits, capped)?;
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
        Ok(())
    }
}

impl RouterWorkspace {
    fn resize(&mut self, config: &RouterConfig, num_tokens: usize) {
        self.choice.resize(config.num_experts, 0.0);
        self.scores.resize(config.num_experts, 0.0);
        let topk_groups = config.groups.map_or(0, |g| g.topk_groups);
        self.groups.resize(topk_groups, 0);
        self.group_scores.resize(topk_groups, 0.0);
        self.best.resize(config.top_k, 0.0);
        self.shared.resize(num_tokens * config.weighted_shared, 0.0);
    }
}

fn check_length(what: &'static str, found: usize, expected: usize) -> Result<(), RouteError> {
    if found == expected { Ok(()) } else { Err(RouteError::Length { what, found, expected }) }
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
    let is_plain_sigmoid = config.scoring == Scoring::Sigmoid
        && config.normalisation == Normalisation::None
        && config.softcap.is_none();
    if config.weighted_shared > 0 && !is_plain_sigmoid {
        return Err(RouterConfigError::WeightedShared);
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
