//! Routers choose the experts of each token, and their weights, from gate logits.
//!
//! Formulas, with `l` the logits of one token, `b` the correction bias, `s` the
//! `routed_scaling_factor`; all arithmetic is f32:
//!
//! | model | score | chosen by | weight |
//! |---|---|---|---|
//! | Qwen3-MoE, `norm_topk_prob` | `p = softmax(l)` | top-k of `p` | `p_i / sum_topk(p)` |
//! | Qwen3-MoE otherwise | `p = softmax(l)` | top-k of `p` | `p_i` |
//! | Mixtral | `p = softmax(l)` | top-k of `p` | `p_i / sum_topk(p)` |
//! | DeepSeek-V2 `greedy` | `p = softmax(l)` | top-k of `p` | `s * p_i` |
//! | DeepSeek-V2 `group_limited_greedy` | `p = softmax(l)` | top-k of `p` inside the `topk_group` groups with the highest maximum | `s * p_i` |
//! | DeepSeek-V3 | `p = sigmoid(l)` | top-k of `p + b` inside the `topk_group` groups with the highest sum of their two best `p + b` | `s * p_i / (sum_topk(p) + 1e-20)`, or `s * p_i` without `norm_topk_prob` |
//!
//! They are those of Hugging Face transformers 5: `Qwen2MoeTopKRouter` (which Qwen3-MoE
//! inherits), `MixtralTopKRouter`, `DeepseekV2Moe` and `DeepseekV3`'s top-k router in
//! `src/transformers/models/{qwen2_moe,mixtral,deepseek_v2,deepseek_v3}/modular_*.py`. Older
//! releases of transformers fill the scores of DeepSeek-V3's excluded groups with 0.0, which lets
//! an excluded expert win when every biased score is negative; DeepSeek's own code and newer
//! releases exclude them (transformers issue 45440), and so does this module.
//!
//! Equal scores are resolved in favour of the lowest expert index (and the lowest group index),
//! so that a result never depends on the machine. `torch.topk` does not define the order of equal
//! scores. Chosen experts are listed by descending score.

mod config;

#[cfg(feature = "checkpoint")]
use checkpoint::{Architecture, ModelConfig, TopkMethod};
use thiserror::Error;

pub use self::config::{
    GroupScore, Groups, Normalisation, RouterConfig, RouterConfigError, Scoring,
};

/// Chooses `top_k` experts for every token.
///
/// Immutable, so threads may share one. Scratch memory is in a [`RouterWorkspace`].
///
/// ```
/// use switchyard_attention_client::{Router, RouterWorkspace};
///
/// let router = Router::softmax(4, 2, true)?; // 4 experts, top-2, weights sum up to 1
/// let (mut topk_idx, mut topk_weights) = ([0; 2], [0.0; 2]);
/// let logits = [0.1, 2.0, -1.0, 2.0];
/// router.route(&logits, &mut RouterWorkspace::default(), &mut topk_idx, &mut topk_weights)?;
/// assert_eq!((topk_idx, topk_weights), ([1, 3], [0.5, 0.5]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Router {
    config: RouterConfig,
    /// `[num_experts]`, or empty when the router has no correction bias.
    bias: Vec<f32>,
}

/// Scratch memory of [`Router::route`]; sized on first use, then never reallocated.
#[derive(Debug, Default)]
pub struct RouterWorkspace {
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

impl Router {
    /// A router with the given configuration and, if not empty, a correction `bias`
    /// `[num_experts]` that is added to the scores for the choice but not for the weights.
    pub fn new(config: RouterConfig, bias: Vec<f32>) -> Result<Self, RouterConfigError> {
        config.validate()?;
        if !bias.is_empty() && bias.len() != config.num_experts {
            return Err(RouterConfigError::BiasLength {
                found: bias.len(),
                expected: config.num_experts,
            });
        }
        if let Some(&value) = bias.iter().find(|b| !b.is_finite()) {
            return Err(RouterConfigError::NotFinite { what: "the correction bias", value });
        }
        Ok(Self { config, bias })
    }

    /// The router of a model. `bias` is the layer's `e_score_correction_bias`, empty if it has none.
    #[cfg(feature = "checkpoint")]
    pub fn from_model(model: &ModelConfig, bias: Vec<f32>) -> Result<Self, RouterConfigError> {
        let router = &model.router;
        let scoring = match router.scoring {
            checkpoint::Scoring::Softmax => Scoring::Softmax,
            checkpoint::Scoring::Sigmoid => Scoring::Sigmoid,
        };
        if model.architecture == Architecture::DeepseekV2 && router.renormalise {
            let architecture = model.architecture.class_name();
            return Err(RouterConfigError::AmbiguousNormalisation { architecture });
        }
        let score = match router.topk_method {
            TopkMethod::Greedy => None,
            TopkMethod::GroupLimitedGreedy => Some(GroupScore::Max),
            TopkMethod::NoAuxTc => Some(GroupScore::TopTwoSum),
        };
        let groups = score.filter(|_| router.topk_groups < router.num_groups).map(|score| Groups {
            num_groups: router.num_groups,
            topk_groups: router.topk_groups,
            score,
        });
        let normalisation = match (router.renormalise, scoring) {
            (false, _) => Normalisation::None,
            (true, Scoring::Softmax) => Normalisation::Sum { epsilon: 0.0 },
            (true, Scoring::Sigmoid) => Normalisation::Sum { epsilon: DEEPSEEK_V3_EPSILON },
        };
        let config = RouterConfig {
            num_experts: model.num_experts as usize,
            top_k: model.top_k,
            scoring,
            groups,
            normalisation,
            scale: router.routed_scaling_factor,
        };
        Self::new(config, bias)
    }

    /// Softmax and top-k, as in Qwen3-MoE (`renormalise` = `norm_topk_prob`) and Mixtral
    /// (`renormalise` = true).
    pub fn softmax(
        num_experts: usize,
        top_k: usize,
        renormalise: bool,
    ) -> Result<Self, RouterConfigError> {
        let normalisation =
            if renormalise { Normalisation::Sum { epsilon: 0.0 } } else { Normalisation::None };
        let config = RouterConfig {
            num_experts,
            top_k,
            scoring: Scoring::Softmax,
            groups: None,
            normalisation,
            scale: 1.0,
        };
        Self::new(config, Vec::new())
    }

    /// DeepSeek-V2: softmax, `greedy` without `groups` (number, kept), `group_limited_greedy`
    /// with them.
    pub fn deepseek_v2(
        num_experts: usize,
        top_k: usize,
        groups: Option<(usize, usize)>,
        routed_scaling_factor: f32,
    ) -> Result<Self, RouterConfigError> {
        let config = RouterConfig {
            num_experts,
            top_k,
            scoring: Scoring::Softmax,
            groups: groups.map(|(num_groups, topk_groups)| Groups {
                num_groups,
                topk_groups,
                score: GroupScore::Max,
            }),
            normalisation: Normalisation::None,
            scale: routed_scaling_factor,
        };
        Self::new(config, Vec::new())
    }

    /// DeepSeek-V3: sigmoid scores, choice by biased scores within `groups` (number, kept).
    /// `bias` is the tensor `e_score_correction_bias`.
    pub fn deepseek_v3(
        num_experts: usize,
        top_k: usize,
        groups: (usize, usize),
        norm_topk_prob: bool,
        routed_scaling_factor: f32,
        bias: Vec<f32>,
    ) -> Result<Self, RouterConfigError> {
        let normalisation = if norm_topk_prob {
            Normalisation::Sum { epsilon: DEEPSEEK_V3_EPSILON }
        } else {
            Normalisation::None
        };
        let config = RouterConfig {
            num_experts,
            top_k,
            scoring: Scoring::Sigmoid,
            groups: Some(Groups {
                num_groups: groups.0,
                topk_groups: groups.1,
                score: GroupScore::TopTwoSum,
            }),
            normalisation,
            scale: routed_scaling_factor,
        };
        Self::new(config, bias)
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
        let RouterWorkspace { choice, scores, groups, group_scores, best } = workspace;
        if let Some(expert) = logits.iter().position(|l| l.is_nan() || *l == f32::INFINITY) {
            return Err(RouteError::BadLogit { token, expert, value: logits[expert] });
        }
        match self.config.scoring {
            Scoring::Softmax => softmax(logits, scores)
                .then_some(())
                .ok_or(RouteError::NoEligibleExpert { token })?,
            Scoring::Sigmoid => {
                for (score, logit) in scores.iter_mut().zip(logits) {
                    *score = 1.0 / (1.0 + (-logit).exp());
                }
            }
        }
        choice.copy_from_slice(scores);
        for (choice, bias) in choice.iter_mut().zip(&self.bias) {
            *choice += bias;
        }
        if let Some(config) = &self.config.groups {
            let size = choice.len() / config.num_groups;
            let score_of = |group: &[f32]| config.score.of(group);
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
        if let Normalisation::Sum { epsilon } = self.config.normalisation {
            let sum = weights.iter().sum::<f32>() + epsilon;
            weights.iter_mut().for_each(|w| *w /= sum);
        }
        if self.config.scale != 1.0 {
            weights.iter_mut().for_each(|w| *w *= self.config.scale);
        }
        Ok(())
    }
}

impl GroupScore {
    fn of(self, group: &[f32]) -> f32 {
        let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        for &score in group {
            if score > first {
                second = first;
                first = score;
            } else if score > second {
                second = score;
            }
        }
        match self {
            Self::Max => first,
            Self::TopTwoSum => first + second,
        }
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

const DEEPSEEK_V3_EPSILON: f32 = 1e-20;
