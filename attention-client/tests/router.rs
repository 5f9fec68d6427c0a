//! Routers against a naive implementation in f64 and on hand-made rows.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use seed::seeded;
#[path = "client_common/seed.rs"]
mod seed;

use switchyard_attention_client::router::{
    ChosenBy, GroupScore, Groups, Normalisation, RouteError, Router, RouterConfig,
    RouterConfigError, RouterWorkspace, Scoring,
};

fn softmax(experts: usize, top_k: usize, renormalise: bool) -> Result<Router, RouterConfigError> {
    Router::new(RouterConfig::softmax(experts, top_k, renormalise), Vec::new())
}

/// Softmax, the best `groups` (number, kept) by their best expert, scaled.
fn deepseek_v2(
    experts: usize,
    top_k: usize,
    groups: Option<(usize, usize)>,
    scale: f32,
) -> Result<Router, RouterConfigError> {
    let groups = groups.map(|(num_groups, topk_groups)| Groups {
        num_groups,
        topk_groups,
        score: GroupScore::Max,
    });
    let config = RouterConfig { groups, scale, ..RouterConfig::softmax(experts, top_k, false) };
    Router::new(config, Vec::new())
}

/// Sigmoid, bias, the best `groups` (number, kept) by their two best experts, scaled.
fn deepseek_v3(
    experts: usize,
    top_k: usize,
    groups: (usize, usize),
    renormalise: bool,
    scale: f32,
    bias: Vec<f32>,
) -> Result<Router, RouterConfigError> {
    let (num_groups, topk_groups) = groups;
    let config = RouterConfig {
        scoring: Scoring::Sigmoid,
        has_bias: !bias.is_empty(),
        groups: Some(Groups { num_groups, topk_groups, score: GroupScore::TopTwoSum }),
        normalisation: match renormalise {
            true => Normalisation::Sum { epsilon: 1e-20, minimum: 0.0 },
            false => Normalisation::None,
        },
        scale,
        ..RouterConfig::softmax(experts, top_k, false)
    };
    Router::new(config, bias)
}

/// Scores this close may be ordered either way by f32 and f64 arithmetic.
const TIE: f64 = 1e-6;

/// Expected scores of a token's row, computed by full sorts in f64.
struct Naive {
    /// Unbiased scores.
    scores: Vec<f64>,
    /// Biased scores, -inf where the group is excluded.
    choice: Vec<f64>,
    /// The gap between the worst kept and the best excluded group.
    group_gap: f64,
}

fn naive(config: &RouterConfig, bias: &[f32], logits: &[f32]) -> Naive {
    let scores: Vec<f64> = match config.scoring {
        Scoring::Softmax => {
            let max = logits.iter().copied().fold(f32::MIN, f32::max) as f64;
            let exp: Vec<f64> = logits.iter().map(|&l| (l as f64 - max).exp()).collect();
            let sum: f64 = exp.iter().sum();
            exp.iter().map(|e| e / sum).collect()
        }
        Scoring::Sigmoid => logits.iter().map(|&l| 1.0 / (1.0 + (-l as f64).exp())).collect(),
        Scoring::SqrtSoftplus => logits
            .iter()
            .map(|&l| (l as f64).max(0.0) + (-(l as f64).abs()).exp().ln_1p())
            .map(f64::sqrt)
            .collect(),
        other => panic!("{other:?}"),
    };
    let mut choice: Vec<f64> =
        (0..scores.len()).map(|e| scores[e] + bias.get(e).map_or(0.0, |&b| b as f64)).collect();
    let mut group_gap = f64::INFINITY;
    if let Some(Groups { num_groups, topk_groups, score }) = config.groups {
        let size = choice.len() / num_groups;
        let mut ranked: Vec<(f64, usize)> = (0..num_groups)
            .map(|g| {
                let mut group = choice[g * size..(g + 1) * size].to_vec();
                group.sort_by(|a, b| b.total_cmp(a));
                let take = if score == GroupScore::Max { 1 } else { 2 };
                (group[..take].iter().sum(), g)
            })
            .collect();
        ranked.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        if topk_groups < num_groups {
            group_gap = ranked[topk_groups - 1].0 - ranked[topk_groups].0;
        }
        for &(_, g) in &ranked[topk_groups..] {
            choice[g * size..(g + 1) * size].fill(f64::NEG_INFINITY);
        }
    }
    Naive { scores, choice, group_gap }
}

fn route(router: &Router, logits: &[f32]) -> Result<(Vec<i32>, Vec<f32>), RouteError> {
    let tokens = logits.len() / router.config().num_experts;
    let mut idx = vec![i32::MIN; tokens * router.config().top_k];
    let mut weights = vec![f32::NAN; tokens * router.config().top_k];
    router.route(logits, &mut RouterWorkspace::default(), &mut idx, &mut weights)?;
    Ok((idx, weights))
}

fn check_against_naive(router: &Router, bias: &[f32], logits: &[f32], exact_ties: bool) {
    let config = router.config();
    let (idx, weights) = route(router, logits).unwrap();
    let rows = logits
        .chunks(config.num_experts)
        .zip(idx.chunks(config.top_k))
        .zip(weights.chunks(config.top_k));
    for (token, ((logits, idx), weights)) in rows.enumerate() {
        let naive = naive(config, bias, logits);
        if !exact_ties && naive.group_gap < TIE {
            continue;
        }
        let mut order: Vec<usize> = (0..config.num_experts).collect();
        order.sort_by(|&a, &b| naive.choice[b].total_cmp(&naive.choice[a]).then(a.cmp(&b)));
        let mut seen = std::collections::BTreeSet::new();
        for (rank, &expert) in idx.iter().enumerate() {
            let expert = usize::try_from(expert).unwrap();
            assert!(expert < config.num_experts && seen.insert(expert), "{token}: {idx:?}");
            if exact_ties {
                assert_eq!(expert, order[rank], "token {token}: {idx:?} of {logits:?}");
            } else {
                let (found, best) = (naive.choice[expert], naive.choice[order[rank]]);
                assert!((found - best).abs() < TIE, "token {token} rank {rank}: {found} {best}");
            }
        }
        let sum: f64 = idx.iter().map(|&e| naive.scores[e as usize]).sum();
        for (&expert, &weight) in idx.iter().zip(weights) {
            let score = naive.scores[expert as usize];
            let expected = f64::from(config.scale)
                * match config.normalisation {
                    Normalisation::None => score,
                    Normalisation::Sum { epsilon, minimum } => {
                        score / (sum + f64::from(epsilon)).max(f64::from(minimum))
                    }
                };
            let tolerance = 1e-5 * expected.abs().max(1e-3);
            assert!((f64::from(weight) - expected).abs() <= tolerance, "{weight} {expected}");
        }
    }
}

/// Every kind of router over `num_experts = 32`, with its bias.
fn routers(rng: &mut StdRng) -> Vec<(Router, Vec<f32>)> {
    let bias: Vec<f32> = (0..32).map(|_| rng.random_range(-0.5..0.5)).collect();
    // A bias that makes every biased score negative: excluded groups must stay excluded.
    let low: Vec<f32> = (0..32).map(|_| rng.random_range(-3.0..-2.0)).collect();
    let top_k = rng.random_range(1..=8);
    let plain = |r: Result<Router, RouterConfigError>| (r.unwrap(), Vec::new());
    let v3 = |norm, bias: &Vec<f32>| {
        (deepseek_v3(32, top_k, (8, 4), norm, 2.5, bias.clone()).unwrap(), bias.clone())
    };
    let normalised = RouterConfig { has_bias: true, ..RouterConfig::softmax(32, top_k, true) };
    let with_bias = |config| (Router::new(config, bias.clone()).unwrap(), bias.clone());
    vec![
        plain(softmax(32, top_k, true)),
        plain(softmax(32, top_k, false)),
        plain(deepseek_v2(32, top_k, None, 1.0)),
        plain(deepseek_v2(32, top_k, Some((8, 3)), 16.0)),
        v3(true, &bias),
        v3(false, &bias),
        v3(true, &low),
        plain(deepseek_v3(32, top_k, (1, 1), true, 1.0, Vec::new())),
        with_bias(RouterConfig { scoring: Scoring::SqrtSoftplus, scale: 1.5, ..normalised }),
        with_bias(RouterConfig {
            normalisation: Normalisation::Sum { epsilon: 0.0, minimum: 0.7 },
            ..normalised
        }),
    ]
}

#[test]
fn random_logits_agree_with_the_naive_router() {
    let mut rng = seeded("random_logits_agree_with_the_naive_router");
    for _ in 0..50 {
        for (router, bias) in routers(&mut rng) {
            let spread = [0.1, 1.0, 10.0, 80.0][rng.random_range(0..4)];
            let logits: Vec<f32> =
                (0..17 * 32).map(|_| rng.random_range(-spread..spread)).collect();
            check_against_naive(&router, &bias, &logits, false);
        }
    }
}

#[test]
fn equal_scores_go_to_the_lowest_index() {
    let mut rng = seeded("equal_scores_go_to_the_lowest_index");
    for _ in 0..200 {
        // Three distinct logits over 32 experts: every row is full of exact ties.
        let logits: Vec<f32> = (0..5 * 32).map(|_| rng.random_range(0..3) as f32).collect();
        for (router, _) in routers(&mut rng) {
            let config = RouterConfig { has_bias: false, ..*router.config() };
            let router = Router::new(config, Vec::new()).unwrap();
            check_against_naive(&router, &[], &logits, true);
        }
    }
}

#[test]
fn an_all_equal_row_takes_the_first_experts_evenly() {
    let router = softmax(16, 4, true).unwrap();
    let (idx, weights) = route(&router, &[0.25; 32]).unwrap();
    assert_eq!(idx, [0, 1, 2, 3, 0, 1, 2, 3]);
    assert_eq!(weights, [0.25; 8]);
    let router = deepseek_v3(16, 4, (4, 2), true, 2.0, vec![0.5; 16]).unwrap();
    let (idx, weights) = route(&router, &[-1.0; 16]).unwrap();
    assert_eq!(idx, [0, 1, 2, 3]);
    assert!(weights.iter().all(|w| (w - 0.5).abs() < 1e-6), "{weights:?}");
}

#[test]
fn minus_infinity_is_chosen_last_with_weight_zero() {
    let inf = f32::NEG_INFINITY;
    let router = softmax(6, 3, true).unwrap();
    let (idx, weights) = route(&router, &[inf, 1.0, inf, inf, 1.0, inf]).unwrap();
    assert_eq!(idx, [1, 4, 0]);
    assert_eq!(weights, [0.5, 0.5, 0.0]);
    assert_eq!(
        route(&router, &[[0.0; 6], [inf; 6]].concat()),
        Err(RouteError::NoEligibleExpert { token: 1 })
    );
    // A sigmoid of -inf is an honest zero, and the epsilon keeps the weights finite.
    let router = deepseek_v3(6, 3, (3, 2), true, 2.5, Vec::new()).unwrap();
    assert_eq!(route(&router, &[inf; 6]).unwrap(), (vec![0, 1, 2], vec![0.0; 3]));
}

#[test]
fn broken_logits_are_an_error_that_names_them() {
    for (router, _) in routers(&mut StdRng::seed_from_u64(1)) {
        for value in [f32::NAN, f32::INFINITY] {
            let mut logits = vec![0.0; 3 * 32];
            logits[2 * 32 + 7] = value;
            match route(&router, &logits) {
                Err(RouteError::BadLogit { token: 2, expert: 7, value: found }) => {
                    assert_eq!(found.to_bits(), value.to_bits());
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn extreme_finite_logits_stay_finite() {
    for (router, _) in routers(&mut StdRng::seed_from_u64(2)) {
        let logits: Vec<f32> =
            (0..32).map(|i| if i % 2 == 0 { f32::MAX } else { f32::MIN }).collect();
        let (_, weights) = route(&router, &logits).unwrap();
        assert!(weights.iter().all(|w| w.is_finite()), "{weights:?}");
    }
}

#[test]
fn only_the_chosen_logits_get_scores_if_logits_choose() {
    let by_logits =
        RouterConfig { chosen_by: ChosenBy::Logits, ..RouterConfig::softmax(4, 2, false) };
    let router = Router::new(by_logits, Vec::new()).unwrap();
    let inf = f32::NEG_INFINITY;
    assert_eq!(
        route(&router, &[1.0, 5.0, 3.0, 5.0, inf, inf, 2.0, inf]).unwrap(),
        (vec![1, 3, 2, 0], vec![0.5, 0.5, 1.0, 0.0])
    );
    let sigmoid = RouterConfig { scoring: Scoring::Sigmoid, ..by_logits };
    let router = Router::new(sigmoid, Vec::new()).unwrap();
    // Sigmoids of 30 and 40 are equal in f32, logits are not.
    assert_eq!(route(&router, &[30.0, 0.0, 40.0, -1.0]).unwrap().0, [2, 0]);
    for wrong in [
        RouterConfig { has_bias: true, ..by_logits },
        RouterConfig {
            groups: Some(Groups { num_groups: 2, topk_groups: 1, score: GroupScore::Max }),
            ..by_logits
        },
    ] {
        let error = Router::new(wrong, Vec::new()).unwrap_err();
        assert_eq!(error, RouterConfigError::ChosenByLogits);
    }
}

#[test]
fn the_sparse_mixer_takes_two_experts_one_after_the_other() {
    let sparse = RouterConfig {
        scoring: Scoring::SparseMixer { jitter: 0.01 },
        ..RouterConfig::softmax(4, 2, false)
    };
    let router = Router::new(sparse, Vec::new()).unwrap();
    // Expert 3 is within 2 % of expert 0, and shares its softmax; expert 2 is alone after them.
    let (idx, weights) = route(&router, &[2.0, -5.0, 1.0, 1.99]).unwrap();
    assert_eq!(idx, [0, 3]);
    let first = 1.0 / (1.0 + (-0.01f32).exp());
    assert!((weights[0] - first).abs() < 1e-6 && weights[1] == 1.0, "{weights:?}");
    let inf = f32::NEG_INFINITY;
    assert_eq!(route(&router, &[0.0; 4]).unwrap(), (vec![0, 1], vec![0.25, 1.0 / 3.0]));
    assert_eq!(route(&router, &[inf, 1.0, inf, inf]).unwrap(), (vec![1, 0], vec![1.0, 0.0]));
    assert_eq!(route(&router, &[1.0, inf, inf, inf]).unwrap(), (vec![0, 1], vec![1.0, 0.0]));
    assert_eq!(route(&router, &[inf; 4]), Err(RouteError::NoEligibleExpert { token: 0 }));
    let error = Router::new(RouterConfig { top_k: 3, ..sparse }, Vec::new()).unwrap_err();
    assert_eq!(error, RouterConfigError::SparseMixer);
}

#[test]
fn capped_logits_never_exceed_the_bound() {
    let capped = RouterConfig {
        softcap: Some(2.0),
        scoring: Scoring::Sigmoid,
        ..RouterConfig::softmax(2, 2, false)
    };
    let router = Router::new(capped, Vec::new()).unwrap();
    let (idx, weights) = route(&router, &[1e9, 0.0]).unwrap();
    assert_eq!(idx, [0, 1]);
    assert!((weights[0] - 1.0 / (1.0 + (-2.0f32).exp())).abs() < 1e-6, "{weights:?}");
    assert_eq!(weights[1], 0.5);
}

#[test]
fn slices_of_the_wrong_length_are_errors() {
    let router = softmax(4, 2, true).unwrap();
    let mut workspace = RouterWorkspace::default();
    let mut call = |logits: usize, idx: usize, weights: usize| {
        router.route(&vec![0.0; logits], &mut workspace, &mut vec![0; idx], &mut vec![0.0; weights])
    };
    assert_eq!(call(0, 0, 0), Ok(()));
    assert_eq!(call(8, 4, 4), Ok(()));
    let error = |what, found, expected| Err(RouteError::Length { what, found, expected });
    assert_eq!(call(9, 4, 4), error("logits", 9, 8));
    assert_eq!(call(8, 3, 4), error("topk_idx", 3, 4));
    assert_eq!(call(8, 4, 5), error("topk_weights", 5, 4));
}

#[test]
fn impossible_configurations_are_refused() {
    use RouterConfigError as E;
    let v3 = |experts, top_k, groups, bias| {
        deepseek_v3(experts, top_k, groups, true, 1.0, bias).unwrap_err()
    };
    assert!(matches!(softmax(4, 5, true).unwrap_err(), E::TopK { .. }));
    assert!(matches!(softmax(4, 0, true).unwrap_err(), E::TopK { .. }));
    assert!(matches!(v3(8, 2, (3, 1), vec![]), E::Groups { .. }));
    assert!(matches!(v3(8, 2, (0, 0), vec![]), E::Groups { .. }));
    assert!(matches!(v3(8, 2, (4, 5), vec![]), E::Groups { .. }));
    assert!(matches!(v3(8, 2, (8, 4), vec![]), E::GroupTooSmall { .. }));
    assert!(matches!(v3(8, 4, (4, 1), vec![]), E::TooFewEligible { .. }));
    assert!(matches!(v3(8, 2, (4, 2), vec![0.0; 7]), E::BiasLength { .. }));
    assert!(matches!(v3(8, 2, (4, 2), vec![f32::NAN; 8]), E::NotFinite { .. }));
    let scale = deepseek_v2(8, 2, None, f32::INFINITY).unwrap_err();
    assert!(matches!(scale, E::NotFinite { .. }));
}

#[test]
fn factors_of_experts_multiply_their_weights_alone() {
    let config = RouterConfig { has_expert_scales: true, ..RouterConfig::softmax(4, 2, true) };
    let logits = [0.0, 1.0, 5.0, 5.0];
    let router = Router::with_scales(config, Vec::new(), vec![9.0, 9.0, 0.5, 3.0]).unwrap();
    assert_eq!(route(&router, &logits).unwrap(), (vec![2, 3], vec![0.25, 1.5]));
    let router = Router::with_scales(config, Vec::new(), vec![4.0]).unwrap();
    assert_eq!(route(&router, &logits).unwrap().1, [2.0, 2.0]);
    for scales in [Vec::new(), vec![1.0; 3]] {
        let found = scales.len();
        let error = Router::with_scales(config, Vec::new(), scales).unwrap_err();
        assert!(
            matches!(error, RouterConfigError::ScalesLength { found: len, .. } if len == found),
            "{error}"
        );
    }
    let plain = RouterConfig::softmax(4, 2, true);
    assert!(Router::with_scales(plain, Vec::new(), vec![1.0]).is_err());
}

#[test]
fn weighted_shared_experts_have_their_part_of_the_sum() {
    let mut rng = seeded("weighted_shared_experts_have_their_part_of_the_sum");
    let config = RouterConfig {
        scoring: Scoring::Sigmoid,
        has_expert_scales: true,
        weighted_shared: 2,
        scale: 8.0,
        ..RouterConfig::softmax(6, 3, false)
    };
    let router = Router::with_scales(config, Vec::new(), vec![0.5]).unwrap();
    let logits: Vec<f32> = (0..5 * 8).map(|_| rng.random_range(-9.0..9.0)).collect();
    let (mut idx, mut weights) = (vec![-1; 5 * 3], vec![f32::NAN; 5 * 3]);
    let mut workspace = RouterWorkspace::default();
    router.route(&logits, &mut workspace, &mut idx, &mut weights).unwrap();
    assert_eq!(workspace.shared_weights().len(), 5 * 2);
    let sigmoid = |logit: f32| 1.0 / (1.0 + f64::from(-logit).exp());
    for (token, logits) in logits.chunks(8).enumerate() {
        let chosen = idx[token * 3..][..3].iter().map(|expert| logits[*expert as usize]);
        let all: Vec<f64> = chosen.chain([logits[6], logits[7]]).map(sigmoid).collect();
        let sum: f64 = all.iter().sum();
        let found =
            weights[token * 3..][..3].iter().chain(&workspace.shared_weights()[token * 2..]);
        for (found, score) in found.zip(&all) {
            let expected = 8.0 * 0.5 * score / sum;
            assert!((f64::from(*found) - expected).abs() < 1e-5, "{token}: {found} {expected}");
        }
    }
    // Every logit is -inf: no weight is undefined.
    let inf = [f32::NEG_INFINITY; 8];
    router.route(&inf, &mut workspace, &mut idx[..3], &mut weights[..3]).unwrap();
    assert_eq!((&weights[..3], workspace.shared_weights()), (&[0.0; 3][..], &[0.0; 2][..]));
    let softmax = RouterConfig { weighted_shared: 2, ..RouterConfig::softmax(6, 3, false) };
    assert_eq!(Router::new(softmax, Vec::new()).unwrap_err(), RouterConfigError::WeightedShared);
}

#[test]
fn experts_that_the_caller_chose_get_the_weights_of_the_own_choice() {
    let mut rng = seeded("experts_that_the_caller_chose_get_the_weights_of_the_own_choice");
    for (router, _) in routers(&mut rng) {
        let logits: Vec<f32> = (0..7 * 32).map(|_| rng.random_range(-4.0..4.0)).collect();
        let (mut idx, expected) = route(&router, &logits).unwrap();
        let mut workspace = RouterWorkspace::default();
        let mut weights = vec![f32::NAN; expected.len()];
        router.weigh(&logits, &mut workspace, &idx, &mut weights).unwrap();
        assert_eq!(weights, expected);
        for wrong in [-1, 32] {
            idx[0] = wrong;
            assert_eq!(
                router.weigh(&logits, &mut workspace, &idx, &mut weights),
                Err(RouteError::NoSuchExpert { token: 0, expert: wrong, num_experts: 32 })
            );
        }
    }
}
