mod reference;

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::layer::{LOAD_FLOOR, MARGIN};
use super::*;

fn model(num_layers: u32, num_experts: u32) -> ModelDescriptor {
    ModelDescriptor {
        fingerprint: "0123456789abcdef".to_owned(),
        architecture: "test".to_owned(),
        hidden: 64,
        moe_layers: (0..num_layers).map(|layer| layer * 2 + 1).collect(),
        num_experts,
        top_k: 1,
    }
}

fn member(current: &Assignment) -> PlanMember<'_> {
    PlanMember::new(current)
}

/// Plans until nothing changes, as the control plane does. Returns the plans.
fn settle(
    model: &ModelDescriptor,
    mut fleet: Vec<Assignment>,
    loads: &[Vec<f64>],
    goals: &PlanGoals,
) -> Vec<FleetPlan> {
    let mut plans = Vec::new();
    while plans.len() < 20 {
        let members: Vec<PlanMember<'_>> = fleet.iter().map(member).collect();
        let plan = plan_fleet(model, &members, loads, goals).unwrap();
        if plan.assignments == fleet {
            return plans;
        }
        fleet.clone_from(&plan.assignments);
        plans.push(plan);
    }
    panic!("no plan is final after {} rounds", plans.len());
}

fn num_holders(fleet: &[Assignment], layer: u32, expert: u32) -> usize {
    fleet.iter().filter(|assignment| assignment.contains(layer, expert)).count()
}

/// Load of the busiest member over the mean, counted from the assignments.
fn busiest(model: &ModelDescriptor, fleet: &[Assignment], loads: &[Vec<f64>]) -> f64 {
    let mut total = vec![0.0; fleet.len()];
    for (&layer, loads) in model.moe_layers.iter().zip(loads) {
        for (expert, load) in loads.iter().enumerate() {
            let num = num_holders(fleet, layer, expert as u32) as f64;
            for (sum, assignment) in total.iter_mut().zip(fleet) {
                if assignment.contains(layer, expert as u32) {
                    *sum += load / num;
                }
            }
        }
    }
    let mean = total.iter().sum::<f64>() / total.len() as f64;
    total.iter().copied().fold(0.0, f64::max) / mean
}

/// Zipf loads whose ranks are shuffled anew in every layer.
fn zipf(num_layers: usize, num_experts: usize, exponent: f64, seed: u64) -> Vec<Vec<f64>> {
    use rand::seq::SliceRandom;
    use rand::{SeedableRng, rngs::StdRng};
    let mut rng = StdRng::seed_from_u64(seed);
    let layer = |_| {
        let mut loads: Vec<f64> =
            (1..=num_experts).map(|rank| 1e4 * (rank as f64).powf(-exponent)).collect();
        loads.shuffle(&mut rng);
        loads
    };
    (0..num_layers).map(layer).collect()
}

#[test]
fn without_load_members_get_equal_numbers_and_nothing_moves_afterwards() {
    let model = model(3, 32);
    let goals = PlanGoals { min_replicas: 2, ..PlanGoals::default() };
    let plans = settle(&model, vec![Assignment::default(); 4], &[], &goals);
    let fleet = &plans.last().unwrap().assignments;
    for assignment in fleet {
        assert_eq!(assignment.num_experts(), 3 * 32 * 2 / 4);
    }
    // A fifth member takes its share from the others.
    let mut grown = fleet.clone();
    grown.push(Assignment::default());
    let plans = settle(&model, grown, &[], &goals);
    let sizes: Vec<usize> =
        plans.last().unwrap().assignments.iter().map(Assignment::num_experts).collect();
    assert!(sizes.iter().all(|&size| (36..=42).contains(&size)), "{sizes:?}");
}

#[test]
fn zipf_loads_of_a_large_model_are_balanced_within_three_plans() {
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let model = model(61, 256);
    let loads = zipf(61, 256, 1.2, seed);
    let goals = PlanGoals { min_replicas: 2, ..PlanGoals::default() };
    let start = settle(&model, vec![Assignment::default(); 32], &[], &goals);
    let start = start.last().unwrap().assignments.clone();
    let before = busiest(&model, &start, &loads);
    let plans = settle(&model, start, &loads, &goals);
    assert!(plans.len() <= 3, "{} plans", plans.len());
    let fleet = &plans.last().unwrap().assignments;
    let after = busiest(&model, fleet, &loads);
    let moved: usize = plans.iter().map(|plan| plan.num_loads).sum();
    println!("busiest {before:.3} -> {after:.3}, {moved} experts loaded in {} plans", plans.len());
    assert!(before > 1.1 && after <= 1.05, "{before} -> {after}");
    // A call waits for the busiest server of its layer, which the sum over all layers does not show.
    for (layer, loads) in model.moe_layers.iter().zip(&loads) {
        let model = ModelDescriptor { moe_layers: vec![*layer], ..model.clone() };
        let of_layer = busiest(&model, fleet, std::slice::from_ref(loads));
        assert!(of_layer <= goals.start_above + 1e-9, "layer {layer}: {of_layer}");
    }
    for &layer in &model.moe_layers {
        for expert in 0..256 {
            assert!(num_holders(fleet, layer, expert) >= 2);
        }
    }
}

#[test]
fn a_member_that_is_gone_is_replaced_beyond_the_limit_of_moves() {
    let model = model(2, 24);
    let goals = PlanGoals { min_replicas: 2, max_moves: 0, ..PlanGoals::default() };
    let start = settle(&model, vec![Assignment::default(); 4], &[], &goals);
    let mut fleet = start.last().unwrap().assignments.clone();
    fleet.pop();
    let members: Vec<PlanMember<'_>> = fleet.iter().map(member).collect();
    let plan = plan_fleet(&model, &members, &[], &goals).unwrap();
    for (new, old) in plan.assignments.iter().zip(&fleet) {
        for entry in &old.layers {
            assert!(entry.experts.iter().all(|&expert| new.contains(entry.layer, expert)));
        }
    }
    for &layer in &model.moe_layers {
        for expert in 0..24 {
            assert_eq!(num_holders(&plan.assignments, layer, expert), 2);
        }
    }
}

#[test]
fn replicas_are_spread_over_zones_and_load_follows_speed() {
    let model = model(4, 64);
    let none = Assignment::default();
    let zones = ["a", "a", "a", "b", "b", "b"];
    let mut members: Vec<PlanMember<'_>> =
        zones.iter().map(|zone| PlanMember { zone: Some(zone), ..member(&none) }).collect();
    let goals = PlanGoals { min_replicas: 2, spare: 0.0, ..PlanGoals::default() };
    let plan = plan_fleet(&model, &members, &[], &goals).unwrap();
    for &layer in &model.moe_layers {
        for expert in 0..64 {
            let in_zone = |range: std::ops::Range<usize>| {
                num_holders(&plan.assignments[range], layer, expert)
            };
            assert_eq!((in_zone(0..3), in_zone(3..6)), (1, 1), "layer {layer}, expert {expert}");
        }
    }
    members.iter_mut().for_each(|member| member.zone = None);
    members[0].speed = 4.0;
    let plan = plan_fleet(&model, &members, &[], &goals).unwrap();
    let sizes: Vec<usize> = plan.assignments.iter().map(Assignment::num_experts).collect();
    // Each expert is at most once on a member, so the fast one holds all of them at most.
    assert!(sizes[0] > 3 * sizes[1], "{sizes:?}");
}

#[test]
fn too_little_memory_is_named_in_numbers() {
    let (model, none) = (model(2, 16), Assignment::default());
    let members = [PlanMember { capacity_experts: Some(10), ..member(&none) }; 3];
    let err = plan_fleet(&model, &members, &[], &PlanGoals::default()).unwrap_err();
    assert_eq!(err, NoRoom { num_members: 3, room: 30, needed: 32 });
    assert!(err.to_string().contains("add 1 servers"), "{err}");
}

fn assignment(pairs: impl IntoIterator<Item = (u32, u32)>) -> Assignment {
    let mut layers: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    for (layer, expert) in pairs {
        layers.entry(layer).or_default().insert(expert);
    }
    let entry = |(layer, experts): (u32, BTreeSet<u32>)| LayerAssignment {
        layer,
        experts: experts.into_iter().collect(),
    };
    Assignment { layers: layers.into_iter().map(entry).collect() }
}

fn pairs(assignment: &Assignment) -> impl Iterator<Item = (u32, u32)> {
    let of_layer = |entry: &LayerAssignment| {
        let layer = entry.layer;
        entry.experts.clone().into_iter().map(move |expert| (layer, expert))
    };
    assignment.layers.iter().flat_map(of_layer)
}

/// Experts of layers 1 and 2 and of ids that a model may lack.
fn any_assignment() -> impl Strategy<Value = Assignment> {
    prop::collection::vec((1u32..4, 0u32..45), 0..60).prop_map(assignment)
}

prop_compose! {
    /// A member as a fleet may have it: its plan, its memory and the plan's reasons need not fit together.
    fn any_member()(
        capacity in prop::option::of(0u32..120),
        speed in prop_oneof![Just(1.0), 0.01f64..100.0],
        zone in prop::option::of(prop::sample::select(vec!["a", "b", "c"])),
        current in any_assignment(),
        held in any_assignment(),
        hidden in prop_oneof![Just(0), 0u32..50],
        unreadable in prop_oneof![Just(Assignment::default()), any_assignment()],
    ) -> (Option<u32>, f64, Option<&'static str>, [Assignment; 3], u32) {
        (capacity, speed, zone, [current, held, unreadable], hidden)
    }
}

proptest! {
    #[test]
    fn every_plan_keeps_its_promises(
        num_layers in 1u32..4,
        num_experts in 1u32..40,
        members in prop::collection::vec(any_member(), 1..9),
        min_replicas in 1u32..4,
        spare in 0.0f64..1.0,
        max_moves in 0usize..200,
        loads in prop::collection::vec(prop::collection::vec(0.0f64..100.0, 0..40), 0..4),
    ) {
        let model = model(num_layers, num_experts);
        let members: Vec<PlanMember<'_>> = members.iter().map(|(capacity, speed, zone, [current, held, unreadable], hidden)| {
            PlanMember {
                capacity_experts: *capacity, speed: *speed, zone: *zone, current, held, hidden: *hidden, unreadable,
            }
        }).collect();
        let goals = PlanGoals { min_replicas, spare, max_moves, ..PlanGoals::default() };
        let needed = (num_layers * num_experts) as usize;
        let room: usize = members.iter()
            .map(|member| member.capacity_experts.map_or(needed, |most| needed.min(most as usize)))
            .sum();
        let plan = match plan_fleet(&model, &members, &loads, &goals) {
            Ok(plan) => plan,
            Err(err) => {
                prop_assert_eq!(err, NoRoom { num_members: members.len(), room, needed });
                prop_assert!(room < needed);
                return Ok(());
            }
        };
        prop_assert_eq!(&plan, &plan_fleet(&model, &members, &loads, &goals).unwrap());
        for (assignment, member) in plan.assignments.iter().zip(&members) {
            let most = member.capacity_experts.map_or(usize::MAX, |most| most as usize);
            prop_assert!(assignment.num_experts() <= most);
            prop_assert!(crate::admission::check_assignment(assignment, &model).is_ok());
            prop_assert!(pairs(assignment).all(|(layer, expert)| !member.unreadable.contains(layer, expert)));
            // A load that the member does not know of yet must fit beside all that its memory holds.
            let loads: Vec<(u32, u32)> = pairs(assignment).filter(|&(layer, expert)| !member.held.contains(layer, expert)).collect();
            let is_new = |&(layer, expert): &(u32, u32)| !member.current.contains(layer, expert);
            if loads.iter().any(is_new) {
                let in_memory = member.held.num_experts() + member.hidden as usize + loads.len();
                prop_assert!(in_memory <= most, "{} of {}", in_memory, most);
            }
        }
        let is_limited = members.iter().any(|member| {
            member.capacity_experts.is_some() || !member.unreadable.is_empty()
        });
        let mut num_missing = 0;
        for &layer in &model.moe_layers {
            for expert in 0..num_experts {
                let found = num_holders(&plan.assignments, layer, expert);
                let wanted = (min_replicas as usize).min(members.len());
                prop_assert!(is_limited || found >= wanted, "layer {} expert {}", layer, expert);
                num_missing += usize::from(found == 0);
                let can_none = members.iter().all(|member| member.unreadable.contains(layer, expert));
                prop_assert_eq!(can_none, plan.unplaced.contains(&(layer, expert)));
            }
        }
        prop_assert_eq!(num_missing, plan.num_waiting + plan.unplaced.len());
        prop_assert_eq!(plan.shortage().is_some(), num_missing > 0);
    }

    /// Servers load what a plan gives them and then free their old experts. No memory is ever exceeded, and the fleet
    /// comes to rest with every expert placed while the load stays.
    #[test]
    fn a_fleet_in_little_memory_comes_to_rest_and_never_exceeds_it(
        num_experts in 4u32..24,
        capacities in prop::collection::vec(1u32..30, 2..6),
        held in prop::collection::vec(any_assignment(), 6),
        loads in prop::collection::vec(prop::collection::vec(0.0f64..100.0, 24), 2),
        frees_after in 1usize..4,
        max_moves in prop_oneof![Just(2048), 1usize..40],
    ) {
        let model = model(2, num_experts);
        let needed = 2 * num_experts;
        prop_assume!(capacities.iter().map(|&most| most.min(needed)).sum::<u32>() >= needed);
        let goals = PlanGoals { min_replicas: 2, max_moves, ..PlanGoals::default() };
        // Experts in memory, with the number of plans for which they have not been wanted.
        let mut memories: Vec<BTreeMap<(u32, u32), usize>> = held.iter().zip(&capacities)
            .map(|(held, &most)| {
                let known = pairs(held).filter(|&(layer, expert)| layer != 2 && expert < num_experts);
                known.take(most as usize).map(|pair| (pair, 0)).collect()
            })
            .collect();
        let mut targets: Vec<Assignment> =
            memories.iter().map(|memory| assignment(memory.keys().copied())).collect();
        let mut num_still = 0;
        for round in 0.. {
            prop_assert!(round < 200, "the plans do not end");
            let held: Vec<Assignment> =
                memories.iter().map(|memory| assignment(memory.keys().copied())).collect();
            let members: Vec<PlanMember<'_>> = targets.iter().zip(&held).zip(&capacities)
                .map(|((target, held), &most)| {
                    PlanMember { capacity_experts: Some(most), held, ..PlanMember::new(target) }
                })
                .collect();
            let plan = plan_fleet(&model, &members, &loads, &goals).unwrap();
            for ((memory, target), &most) in memories.iter_mut().zip(&plan.assignments).zip(&capacities) {
                memory.extend(pairs(target).map(|pair| (pair, 0)));
                prop_assert!(memory.len() <= most as usize, "{} of {}", memory.len(), most);
                memory.retain(|&(layer, expert), unwanted| {
                    *unwanted = if target.contains(layer, expert) { 0 } else { *unwanted + 1 };
                    *unwanted < frees_after
                });
            }
            let is_still = plan.assignments == targets;
            targets = plan.assignments;
            num_still = if is_still { num_still + 1 } else { 0 };
            if num_still > frees_after {
                prop_assert_eq!(plan.num_waiting, 0);
                for &layer in &model.moe_layers {
                    for expert in 0..num_experts {
                        prop_assert!(num_holders(&targets, layer, expert) > 0);
                    }
                }
                return Ok(());
            }
        }
    }

    /// With more servers than a layer has experts, no layer comes within the tolerance. Moves end all the same while the
    /// load stays.
    #[test]
    fn more_servers_than_experts_come_to_rest(
        num_experts in 8u32..24,
        num_members in 24usize..80,
        loads in prop::collection::vec(prop::collection::vec(50.0f64..100.0, 24), 2),
        max_moves in prop_oneof![Just(2048), 8usize..40],
    ) {
        let model = model(2, num_experts);
        let goals = PlanGoals { min_replicas: 2, max_moves, ..PlanGoals::default() };
        let mut fleet = vec![Assignment::default(); num_members];
        let plan = |fleet: &[Assignment], loads: &[Vec<f64>]| {
            let members: Vec<PlanMember<'_>> = fleet.iter().map(member).collect();
            plan_fleet(&model, &members, loads, &goals).unwrap()
        };
        let mut num_plans = 0;
        loop {
            let next = plan(&fleet, &loads);
            if next.assignments == fleet {
                break;
            }
            fleet = next.assignments;
            num_plans += 1;
            prop_assert!(num_plans < 100, "the plans do not end");
        }
    }

    /// Reports differ a little from each other. A layer changes only if that evens the true load out, too. As the report
    /// has it, its ratio falls by the margin, so in truth by the margin less the noise. Such changes end.
    #[test]
    fn noise_of_reports_changes_a_layer_only_for_the_better(
        num_experts in 8u32..24,
        num_members in 24usize..80,
        loads in prop::collection::vec(prop::collection::vec(50.0f64..100.0, 24), 2),
        factors in prop::collection::vec(
            prop::collection::vec(1.0 - NOISE..1.0 + NOISE, 2 * 24), 24
        ),
    ) {
        let model = model(2, num_experts);
        let goals = PlanGoals { min_replicas: 2, ..PlanGoals::default() };
        let loads: Vec<Vec<f64>> =
            loads.into_iter().map(|layer| layer[..num_experts as usize].to_vec()).collect();
        let start = settle(&model, vec![Assignment::default(); num_members], &loads, &goals);
        let mut fleet = start.last().unwrap().assignments.clone();
        for factors in factors {
            let noisy: Vec<Vec<f64>> = loads.iter().zip(factors.chunks(24))
                .map(|(layer, factors)| layer.iter().zip(factors).map(|(load, by)| load * by).collect())
                .collect();
            let members: Vec<PlanMember<'_>> = fleet.iter().map(member).collect();
            let next = plan_fleet(&model, &members, &noisy, &goals).unwrap().assignments;
            for (&layer, loads) in model.moe_layers.iter().zip(&loads) {
                let is_changed =
                    fleet.iter().zip(&next).any(|(old, new)| old.experts(layer) != new.experts(layer));
                let most = (1.0 - MARGIN) * (1.0 + NOISE) / (1.0 - NOISE);
                let [before, after] = [&fleet, &next].map(|fleet| hottest_member(fleet, layer, loads));
                prop_assert!(!is_changed || after <= most * before, "{} -> {}", before, after);
            }
            fleet = next;
        }
    }

    /// The bound of list scheduling: the busiest server is at most one expert above the mean.
    #[test]
    fn load_follows_speed(
        speeds in prop::collection::vec(1u32..20, 2..7),
        loads in prop::collection::vec(1.0f64..4.0, 64..128),
    ) {
        let model = model(1, loads.len() as u32);
        let goals = PlanGoals::default();
        let all = assignment((0..loads.len() as u32).map(|expert| (1, expert)));
        let mut fleet = vec![Assignment::default(); speeds.len()];
        fleet[0] = all;
        for _ in 0..20 {
            let members: Vec<PlanMember<'_>> = fleet.iter().zip(&speeds)
                .map(|(current, &speed)| PlanMember { speed: speed.into(), ..PlanMember::new(current) })
                .collect();
            fleet = plan_fleet(&model, &members, std::slice::from_ref(&loads), &goals).unwrap().assignments;
        }
        let total: f64 = loads.iter().sum();
        let mean = total / speeds.iter().map(|&speed| f64::from(speed)).sum::<f64>();
        let hottest = loads.iter().copied().fold(0.0, f64::max);
        for (member, &speed) in fleet.iter().zip(&speeds) {
            let load: f64 = member.experts(1).iter()
                .map(|&expert| loads[expert as usize] / num_holders(&fleet, 1, expert) as f64)
                .sum();
            // A fleet that could be better by less than the margin stays as it is.
            let reachable = mean + hottest / f64::from(speed);
            let most = (mean * goals.start_above).max(reachable / (1.0 - MARGIN));
            prop_assert!(load / f64::from(speed) <= most * 1.02, "{} of {}", load / f64::from(speed), most);
        }
    }
}

/// Highest load of a member in one layer, with the load that the planner adds to every expert.
fn hottest_member(fleet: &[Assignment], layer: u32, loads: &[f64]) -> f64 {
    let floor = LOAD_FLOOR * loads.iter().sum::<f64>() / loads.len() as f64;
    let share =
        |expert: u32| (loads[expert as usize] + floor) / num_holders(fleet, layer, expert) as f64;
    let of_member =
        |member: &Assignment| member.experts(layer).iter().map(|&expert| share(expert)).sum();
    fleet.iter().map(of_member).fold(0.0, f64::max)
}

/// Difference of reports from the true load, as a share of it.
const NOISE: f64 = 0.005;
