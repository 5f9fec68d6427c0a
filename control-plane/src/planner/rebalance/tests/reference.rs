//! Independent references for plans: DeepSeek's EPLB, and the optimum of small fleets.

use std::collections::HashMap;

use microlp::{ComparisonOp, OptimizationDirection, Problem};

use super::*;

/// The placement of one layer by the global policy of DeepSeek's Expert Parallelism Load Balancer, written from the
/// description in its README (<https://github.com/deepseek-ai/EPLB>). Copies go one by one to the expert with the
/// largest load per copy. Then the copies, heaviest first, go to the least loaded server with a free place. All servers
/// have equally many. `num_copies` is a multiple of `num_servers`. Returns the load of each server.
fn eplb(loads: &[f64], num_copies: usize, num_servers: usize) -> (Vec<f64>, Vec<Vec<usize>>) {
    let mut copies = vec![1usize; loads.len()];
    for _ in loads.len()..num_copies {
        let per_copy = |expert: &usize| loads[*expert] / copies[*expert] as f64;
        let hottest =
            (0..loads.len()).max_by(|a, b| per_copy(a).total_cmp(&per_copy(b)).then(b.cmp(a)));
        copies[hottest.unwrap()] += 1;
    }
    let mut items: Vec<usize> =
        (0..loads.len()).flat_map(|expert| vec![expert; copies[expert]]).collect();
    let weight = |expert: usize| loads[expert] / copies[expert] as f64;
    items.sort_by(|&a, &b| weight(b).total_cmp(&weight(a)));
    let mut servers: Vec<(f64, Vec<usize>)> = vec![(0.0, Vec::new()); num_servers];
    for expert in items {
        let free = servers.iter_mut().filter(|(_, held)| held.len() < num_copies / num_servers);
        let (load, held) = free.min_by(|a, b| a.0.total_cmp(&b.0)).unwrap();
        *load += weight(expert);
        held.push(expert);
    }
    servers.into_iter().unzip()
}

/// Experts that a fleet has to load to get from one placement of a layer to another. EPLB numbers its servers anew, so
/// each new server takes the old one that shares most experts with it, greedily.
fn loads_between(old: &[Vec<usize>], new: &[Vec<usize>]) -> usize {
    let mut left: Vec<&Vec<usize>> = old.iter().collect();
    let missing = |new: &Vec<usize>, old: &Vec<usize>| {
        let mut new = new.clone();
        new.sort_unstable();
        new.dedup();
        new.iter().filter(|expert| !old.contains(expert)).count()
    };
    let mut sum = 0;
    for new in new {
        let best = (0..left.len()).min_by_key(|&idx| missing(new, left[idx])).unwrap();
        sum += missing(new, left.swap_remove(best));
    }
    sum
}

fn ratio(servers: &[f64]) -> f64 {
    servers.iter().copied().fold(0.0, f64::max) * servers.len() as f64 / servers.iter().sum::<f64>()
}

/// Per layer: busiest server over the mean.
fn ratios(model: &ModelDescriptor, fleet: &[Assignment], loads: &[Vec<f64>]) -> Vec<f64> {
    let of_layer = |(layer_idx, &layer): (usize, &u32)| {
        let mut total = vec![0.0; fleet.len()];
        for (expert, load) in loads[layer_idx].iter().enumerate() {
            let num = num_holders(fleet, layer, expert as u32) as f64;
            for (sum, assignment) in total.iter_mut().zip(fleet) {
                *sum += if assignment.contains(layer, expert as u32) { load / num } else { 0.0 };
            }
        }
        ratio(&total)
    };
    model.moe_layers.iter().enumerate().map(of_layer).collect()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Zipf(1.2), 256 experts, 61 layers, 32 servers. EPLB plans from nothing, with as many copies. The figures of
/// `bench/runs/2026-11-27-planner` are this test's output.
#[test]
fn plans_are_as_even_as_eplb_and_move_less() {
    let seed: u64 = std::env::var("SWITCHYARD_TEST_SEED")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or_else(rand::random);
    println!("seed {seed}");
    let model = model(61, 256);
    let loads = zipf(61, 256, 1.2, seed);
    // A hard change: all experts change places in pairs, whatever their loads.
    let changed: Vec<Vec<f64>> = loads
        .iter()
        .map(|layer| {
            let mut layer = layer.clone();
            layer.chunks_mut(2).for_each(<[f64]>::reverse);
            layer
        })
        .collect();
    for (min_replicas, num_copies) in [(1u32, 288usize), (2, 640)] {
        let spare = num_copies as f64 / (256.0 * f64::from(min_replicas)) - 1.0;
        let goals =
            PlanGoals { min_replicas, spare, max_moves: usize::MAX, ..PlanGoals::default() };
        let start = settle(&model, vec![Assignment::default(); 32], &[], &goals);
        let start = start.last().unwrap().assignments.clone();
        let begin = std::time::Instant::now();
        let plans = settle(&model, start, &loads, &goals);
        let took = begin.elapsed() / (plans.len() as u32 + 1);
        let fleet = plans.last().unwrap().assignments.clone();
        let ours = ratios(&model, &fleet, &loads);
        let theirs: Vec<(Vec<f64>, Vec<Vec<usize>>)> =
            loads.iter().map(|layer| eplb(layer, num_copies, 32)).collect();
        let eplb_ratios: Vec<f64> = theirs.iter().map(|(servers, _)| ratio(servers)).collect();
        let before = ratios(&model, &fleet, &changed);
        let next = settle(&model, fleet, &changed, &goals);
        let (moved, after) = match next.last() {
            Some(last) => (
                next.iter().map(|plan| plan.num_loads).sum::<usize>(),
                ratios(&model, &last.assignments, &changed),
            ),
            None => (0, before.clone()),
        };
        let redone: Vec<(Vec<f64>, Vec<Vec<usize>>)> =
            changed.iter().map(|layer| eplb(layer, num_copies, 32)).collect();
        let eplb_moved: usize =
            theirs.iter().zip(&redone).map(|(old, new)| loads_between(&old.1, &new.1)).sum();
        println!(
            "{num_copies} copies a layer: busiest over mean {:.3} (worst layer {:.3}) in {} plans of {took:?}, EPLB \
             {:.3} ({:.3}); after a change of all loads {:.3} -> {:.3} with {moved} loads, EPLB {:.3} with {eplb_moved}",
            mean(&ours),
            ours.iter().copied().fold(0.0, f64::max),
            plans.len(),
            mean(&eplb_ratios),
            eplb_ratios.iter().copied().fold(0.0, f64::max),
            mean(&before),
            mean(&after),
            mean(&redone.iter().map(|(servers, _)| ratio(servers)).collect::<Vec<_>>()),
        );
        assert!(plans.len() <= 3, "{} plans", plans.len());
        assert!(mean(&ours) <= mean(&eplb_ratios).max(goals.stop_at) * 1.02, "{num_copies}");
        assert!(moved < eplb_moved, "{moved} of {eplb_moved}");
    }
}

/// Least possible load of the busiest server over the mean, by a mixed-integer program: `y[e][r]` says that expert `e`
/// has `r` replicas, `x[e][r][s]` that server `s` has one of them.
fn optimum(loads: &[f64], num_servers: usize, num_copies: usize) -> f64 {
    let mut problem = Problem::new(OptimizationDirection::Minimize);
    let busiest = problem.add_var(1.0, (0.0, f64::INFINITY));
    let mut copies = Vec::new();
    let mut of_server: HashMap<usize, Vec<_>> = HashMap::new();
    for &load in loads {
        let mut one = Vec::new();
        for replicas in 1..=num_servers {
            let y = problem.add_integer_var(0.0, (0, 1));
            one.push((y, 1.0));
            copies.push((y, replicas as f64));
            let mut held = vec![(y, -(replicas as f64))];
            for server in 0..num_servers {
                let x = problem.add_integer_var(0.0, (0, 1));
                held.push((x, 1.0));
                of_server.entry(server).or_default().push((x, load / replicas as f64));
            }
            problem.add_constraint(&held, ComparisonOp::Eq, 0.0);
        }
        problem.add_constraint(&one, ComparisonOp::Eq, 1.0);
    }
    problem.add_constraint(&copies, ComparisonOp::Le, num_copies as f64);
    for server in 0..num_servers {
        let mut terms = of_server[&server].clone();
        terms.push((busiest, -1.0));
        problem.add_constraint(&terms, ComparisonOp::Le, 0.0);
    }
    let solution = problem.solve().unwrap().into_solution().unwrap();
    solution.objective() * num_servers as f64 / loads.iter().sum::<f64>()
}

#[test]
fn plans_of_small_fleets_are_near_the_optimum() {
    use rand::{RngExt, SeedableRng, rngs::StdRng};
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let goals = PlanGoals {
        spare: 0.5,
        start_above: 1.0001,
        stop_at: 1.0,
        max_moves: usize::MAX,
        ..PlanGoals::default()
    };
    let (mut gaps, mut eplb_gaps) = (Vec::new(), Vec::new());
    for _ in 0..NUM_SMALL {
        let (num_experts, num_servers) = (6, rng.random_range(2..4usize));
        let loads: Vec<f64> = (0..num_experts).map(|_| rng.random_range(1.0f64..20.0)).collect();
        let model = model(1, num_experts);
        let plans = settle(
            &model,
            vec![Assignment::default(); num_servers],
            std::slice::from_ref(&loads),
            &goals,
        );
        let fleet = &plans.last().unwrap().assignments;
        let ours = ratios(&model, fleet, std::slice::from_ref(&loads))[0];
        let best = optimum(&loads, num_servers, num_experts as usize * 3 / 2);
        let (theirs, _) =
            eplb(&loads, num_experts as usize * 3 / 2 / num_servers * num_servers, num_servers);
        println!("{num_servers} servers: {ours:.4}, optimum {best:.4}, EPLB {:.4}", ratio(&theirs));
        assert!(ours >= best - 1e-6, "better than the optimum: one of the two is wrong");
        gaps.push(ours / best);
        eplb_gaps.push(ratio(&theirs) / best);
    }
    let worst = |gaps: &[f64]| gaps.iter().copied().fold(0.0, f64::max);
    println!(
        "over the optimum: mean {:.4}, worst {:.4}; EPLB {:.4}, {:.4}",
        mean(&gaps),
        worst(&gaps),
        mean(&eplb_gaps),
        worst(&eplb_gaps)
    );
    assert!(mean(&gaps) < 1.10, "{gaps:?}");
}

const NUM_SMALL: usize = 8;
