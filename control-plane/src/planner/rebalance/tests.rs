use proptest::prelude::*;

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
    PlanMember { capacity_experts: None, speed: 1.0, zone: None, current }
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

proptest! {
    #[test]
    fn every_plan_keeps_its_promises(
        num_layers in 1u32..4,
        num_experts in 1u32..40,
        capacities in prop::collection::vec(prop::option::of(0u32..120), 1..9),
        min_replicas in 1u32..4,
        spare in 0.0f64..1.0,
        max_moves in 0usize..200,
        loads in prop::collection::vec(prop::collection::vec(0.0f64..100.0, 0..40), 0..4),
        held in prop::collection::vec(prop::collection::vec(0u32..45, 0..60), 9),
    ) {
        let model = model(num_layers, num_experts);
        let fleet: Vec<Assignment> = held.iter().map(|experts| {
            let mut experts: Vec<u32> = experts.clone();
            experts.sort_unstable();
            experts.dedup();
            // Layer 2 does not exist in the model.
            let entry = |layer| LayerAssignment { layer, experts: experts.clone() };
            Assignment { layers: vec![entry(1), entry(2)] }
        }).collect();
        let members: Vec<PlanMember<'_>> = capacities.iter().zip(&fleet).map(|(&capacity, current)| {
            PlanMember { capacity_experts: capacity, ..member(current) }
        }).collect();
        let goals = PlanGoals { min_replicas, spare, max_moves, ..PlanGoals::default() };
        let needed = (num_layers * num_experts) as usize;
        let room: usize = capacities.iter().map(|most| most.map_or(needed, |most| needed.min(most as usize))).sum();
        let plan = match plan_fleet(&model, &members, &loads, &goals) {
            Ok(plan) => plan,
            Err(err) => {
                prop_assert_eq!(err, NoRoom { num_members: members.len(), room, needed });
                prop_assert!(room < needed);
                return Ok(());
            }
        };
        prop_assert_eq!(&plan, &plan_fleet(&model, &members, &loads, &goals).unwrap());
        for (assignment, capacity) in plan.assignments.iter().zip(&capacities) {
            prop_assert!(capacity.is_none_or(|most| assignment.num_experts() <= most as usize));
            prop_assert!(crate::admission::check_assignment(assignment, &model).is_ok());
        }
        let is_limited = capacities.iter().any(Option::is_some);
        for &layer in &model.moe_layers {
            for expert in 0..num_experts {
                let found = num_holders(&plan.assignments, layer, expert);
                let wanted = (min_replicas as usize).min(members.len());
                prop_assert!(found >= if is_limited { 1 } else { wanted }, "layer {} expert {}", layer, expert);
            }
        }
    }
}
