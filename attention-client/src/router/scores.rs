//! From logits to scores, and from scores to the best experts.

use checkpoint::{GroupScore, Scoring};

/// Scores of `logits` into `scores`; false when every score is undefined.
pub(super) fn score(scoring: Scoring, logits: &[f32], scores: &mut [f32]) -> bool {
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

/// `ln(1 / (1 + exp(-logit)))`, without overflow.
pub(super) fn log_sigmoid(logit: f32) -> f32 {
    logit.min(0.0) - (-logit.abs()).exp().ln_1p()
}

/// PhiMoE's choice of two experts (`sparsemixer` of transformers, without its noise of training); false when every
/// logit is -inf. `left` is scratch memory.
pub(super) fn sparse_mixer(
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
pub(super) fn top_k_of(scores: impl Iterator<Item = f32>, idx: &mut [i32], best: &mut [f32]) {
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

/// The score by which a group of experts' scores is compared.
pub(super) fn group_score(kind: GroupScore, group: &[f32]) -> f32 {
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
