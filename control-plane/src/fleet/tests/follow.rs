//! A placement that follows the load.

use super::elastic::Elastic;
use super::*;

/// A plan of other members than those of the fleet counts for nothing, and after two of them one is computed at once.
#[test]
fn plans_of_members_that_have_changed_are_discarded() {
    let mut fleet = Elastic::new(1, 1);
    fleet.join("m0", 1);
    let has_targets =
        |fleet: &Elastic| fleet.world.fleet.members.values().any(|m| m.target.is_some());
    let (mut num_discarded, mut nth) = (0, 1);
    while !has_targets(&fleet) {
        assert!(nth < 10, "no plan is ever in force");
        for _ in 0..6 {
            fleet.world.now += PERIOD;
            fleet.world.fleet.tick(fleet.world.now, PERIOD);
            let Some(job) = fleet.world.fleet.take_plan() else { continue };
            // Another one is due only after this one.
            fleet.world.fleet.tick(fleet.world.now, PERIOD);
            assert!(fleet.world.fleet.take_plan().is_none());
            let outcome = job.run();
            fleet.join(&format!("m{nth}"), nth);
            nth += 1;
            fleet.world.fleet.finish_plan(Some((job, outcome)), fleet.world.now);
            assert!(!has_targets(&fleet));
            num_discarded += 1;
        }
    }
    assert_eq!(num_discarded, 2);
    // After a computation that failed, the next period has another one.
    let mut num_plans = 0;
    for _ in 0..25 {
        fleet.world.now += Duration::from_secs(1);
        for (id, incarnation, ..) in fleet.processes.values() {
            let request =
                LeaseRequest { incarnation: *incarnation, assignment_version: 0, load: None };
            fleet.world.fleet.renew(id, request, fleet.world.now).unwrap();
        }
        fleet.world.fleet.tick(fleet.world.now, Duration::from_secs(1));
        if fleet.world.fleet.take_plan().is_some() {
            num_plans += 1;
            fleet.world.fleet.finish_plan(None, fleet.world.now);
        }
    }
    assert!(num_plans >= 2, "{num_plans}");
}

#[test]
fn a_fleet_follows_its_load_and_never_leaves_an_expert_alone() {
    let mut fleet = Elastic::new(3, 1);
    for (name, incarnation) in [("a", 1), ("b", 2), ("c", 3)] {
        fleet.join(name, incarnation);
        fleet.check();
    }
    assert!(fleet.was_complete);
    for name in ["a", "b", "c"] {
        assert!(fleet.processes[name].2.num_experts() <= 9, "a third each");
    }
    // One expert of each layer is hot.
    for layer in model().moe_layers {
        for expert in 0..8 {
            let rate = if expert == layer % 8 { 70_000 } else { 10_000 };
            fleet.rates.insert((layer, expert), rate);
        }
    }
    for _ in 0..60 {
        fleet.second();
    }
    assert!(fleet.busiest() < 1.15, "{}", fleet.busiest());
    let epoch = fleet.world.epoch();
    for _ in 0..60 {
        fleet.second();
    }
    assert_eq!(fleet.world.epoch(), epoch, "nothing moves while the load stays");

    // A fourth server takes its share.
    fleet.join("d", 4);
    for _ in 0..30 {
        fleet.second();
    }
    assert!(fleet.busiest() < 1.2, "{}", fleet.busiest());
}

#[test]
fn replicas_of_a_dead_server_come_back_without_a_person() {
    let mut fleet = Elastic::new(4, 2);
    for (name, incarnation) in [("a", 1), ("b", 2), ("c", 3), ("d", 4)] {
        fleet.join(name, incarnation);
    }
    fleet.second();
    assert_eq!(fleet.world.fleet.coverage().under_replicated, 0);
    fleet.processes.remove("b");
    let mut seconds = 0;
    while fleet.world.state("b") != Some(MemberState::Expired) {
        fleet.second();
    }
    while fleet.world.fleet.coverage().under_replicated > 0 {
        fleet.second();
        seconds += 1;
        assert!(seconds <= 4, "{:?}", fleet.world.fleet.coverage());
    }
    // A drain moves the experts, too.
    let id = fleet.processes["c"].0.clone();
    fleet.world.fleet.drain(&id, None, fleet.world.now).unwrap();
    fleet.world.fleet.refresh();
    for _ in 0..4 {
        fleet.second();
    }
    assert_eq!(fleet.world.fleet.coverage().under_replicated, 0);
}

/// Replicas that memory or the number of servers does not allow are named as long as they are missing.
#[test]
fn replicas_that_do_not_fit_are_named() {
    let mut fleet = Elastic::new(2, 1);
    let join = |fleet: &mut Elastic, name: &str, incarnation| {
        fleet.join(name, incarnation);
        let member = fleet.world.fleet.members.get_mut(name).unwrap();
        member.record.capacity_experts = Some(20);
    };
    join(&mut fleet, "a", 1);
    join(&mut fleet, "b", 2);
    let shortage = |fleet: &mut Elastic, replicas| {
        let goals = FleetGoals { replicas, spare: 0.0 };
        fleet.world.fleet.set_goals(goals, fleet.world.now).unwrap();
        (0..5).for_each(|_| fleet.second());
        fleet.world.fleet.shortage().unwrap_or_default()
    };
    assert_eq!(shortage(&mut fleet, 1), "");
    let text = shortage(&mut fleet, 2);
    assert!(text.contains("48 copies") && text.contains("room for 40"), "{text}");
    let text = shortage(&mut fleet, 3);
    assert!(text.contains("need 3 servers") && text.contains("has 2"), "{text}");
    let is_event = |event: &FleetEvent| matches!(event, FleetEvent::Short { .. });
    assert_eq!(fleet.world.fleet.take_events().iter().filter(|event| is_event(event)).count(), 2);
    join(&mut fleet, "c", 3);
    assert_eq!(shortage(&mut fleet, 2), "");
    assert!(fleet.world.fleet.coverage().is_complete());
}

/// A control plane that starts with other goals than the stored ones says which ones hold.
#[test]
fn stored_goals_that_win_over_those_of_the_start_are_an_event() {
    for (stored, is_event) in [(1, false), (2, true)] {
        let mut fleet = Elastic::new(1, 1);
        let asked = fleet.world.fleet.goals().unwrap();
        let goals = FleetGoals { replicas: stored, ..asked };
        fleet.world.fleet.set_goals(goals, fleet.world.now).unwrap();
        let (snapshot, _) = fleet.world.fleet.snapshot();
        let balance = Some(BalanceSettings::default());
        let mut next = World::with(FleetSettings { balance, ..settings() }, Some(snapshot));
        assert_eq!(next.fleet.goals().unwrap(), goals);
        let event = FleetEvent::GoalsKept { asked, goals };
        assert_eq!(next.fleet.take_events().contains(&event), is_event);
    }
}

#[test]
fn experts_that_a_server_cannot_read_go_to_others() {
    let mut fleet = Elastic::new(3, 2);
    for (name, incarnation) in [("a", 1), ("b", 2)] {
        fleet.join(name, incarnation);
    }
    let bad = Assignment { layers: vec![LayerAssignment { layer: 1, experts: vec![2, 5] }] };
    fleet.unreadable.insert("c".to_owned(), bad.clone());
    fleet.join("c", 3);
    for _ in 0..4 {
        fleet.second();
    }
    let c = &fleet.world.fleet.members["c"];
    let target = c.target.clone().unwrap();
    assert!(!target.contains(1, 2) && !target.contains(1, 5) && !target.is_empty());
    assert!(fleet.world.fleet.coverage().is_complete(), "{:?}", fleet.world.fleet.coverage());
    assert_eq!(fleet.world.fleet.shortage(), None);
    // If no server can read one, the others are placed all the same.
    for name in ["a", "b"] {
        fleet.unreadable.insert(name.to_owned(), bad.clone());
        fleet.processes.remove(name);
    }
    fleet.may_lose = true;
    for (name, incarnation) in [("a", 4), ("b", 5)] {
        fleet.join(name, incarnation);
        let process = fleet.processes.get_mut(name).unwrap();
        for entry in process.2.layers.iter_mut().filter(|entry| entry.layer == 1) {
            entry.experts.retain(|expert| ![2, 5].contains(expert));
        }
        let (id, incarnation, holds, _) = process.clone();
        let ready = ReadyRequest { incarnation, holds };
        fleet.world.fleet.ready(&id, ready, fleet.world.now).unwrap();
    }
    for _ in 0..4 {
        fleet.second();
    }
    let shortage = fleet.world.fleet.shortage().unwrap_or_default();
    assert!(shortage.contains("expert 2 of layer 1 nor 1 others"), "{shortage}");
    assert_eq!(fleet.world.fleet.coverage().without_replica, 2);
}

#[test]
fn a_plan_that_cannot_be_keeps_the_placement() {
    let mut fleet = Elastic::new(2, 1);
    for (name, incarnation) in [("a", 1), ("b", 2)] {
        let mut request = World::request(name, incarnation);
        request.capacity_experts = Some(14);
        let response = fleet.world.fleet.register(request, fleet.world.now).unwrap();
        fleet.world.ready(&response, incarnation);
        let RegisterResponse { member_id, assignment, assignment_version, .. } = response;
        let process = (member_id, incarnation, assignment, assignment_version);
        fleet.processes.insert(name.to_owned(), process);
    }
    fleet.second();
    assert!(fleet.world.fleet.coverage().is_complete());
    fleet.may_lose = true;
    fleet.processes.remove("b");
    for _ in 0..8 {
        fleet.second();
    }
    let epoch = fleet.world.epoch();
    let held = fleet.world.fleet.members["a"].record.assignment.num_experts();
    let shortage = fleet.world.fleet.shortage().unwrap_or_default();
    assert!(shortage.contains("room for 14 experts, but the model has 24"), "{shortage}");
    for _ in 0..20 {
        fleet.second();
    }
    assert_eq!(fleet.world.epoch(), epoch);
    assert_eq!(fleet.world.fleet.members["a"].record.assignment.num_experts(), held);
}

#[test]
fn goals_change_while_the_fleet_runs_and_survive_a_restart() {
    let mut fleet = Elastic::new(3, 1);
    for (name, incarnation) in [("a", 1), ("b", 2), ("c", 3)] {
        fleet.join(name, incarnation);
    }
    fleet.second();
    let goals = FleetGoals { replicas: 2, spare: 0.0 };
    fleet.world.fleet.set_goals(goals, fleet.world.now).unwrap();
    fleet.world.fleet.refresh();
    assert!(fleet.world.fleet.coverage().under_replicated > 0);
    for _ in 0..4 {
        fleet.second();
    }
    assert!(fleet.world.fleet.coverage().is_complete());
    let (snapshot, _) = fleet.world.fleet.snapshot();
    let balance = Some(BalanceSettings::default());
    let restored = World::with(FleetSettings { balance, ..settings() }, Some(snapshot));
    assert_eq!(restored.fleet.goals(), Ok(goals));
    // More replicas than servers are met as far as there are servers.
    let many = FleetGoals { replicas: 64, spare: 16.0 };
    fleet.world.fleet.set_goals(many, fleet.world.now).unwrap();
    for wrong in [0, 65] {
        let goals = FleetGoals { replicas: wrong, spare: 0.0 };
        assert!(fleet.world.fleet.set_goals(goals, fleet.world.now).is_err());
    }
    assert_eq!(World::new().fleet.set_goals(goals, TTL), Err(Refusal::FixedPlacement));
}

/// Servers join, leave, die, restart and drain at random while the load changes. Whenever every expert has its two
/// replicas, one of them may fail: no table may then leave an expert without a replica.
#[test]
fn no_history_of_single_faults_leaves_an_expert_alone() {
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let mut fleet = Elastic::new(3, 2);
    let mut next_incarnation = 1;
    let mut num_faults = 0;
    for name in ["m0", "m1", "m2"] {
        fleet.join(name, next_incarnation);
        next_incarnation += 1;
    }
    for second in 0..3000 {
        if rng.random_ratio(1, 20) {
            for layer in model().moe_layers {
                let hot = rng.random_range(0..8);
                for expert in 0..8 {
                    let rate =
                        if expert == hot { rng.random_range(10_000..200_000) } else { 10_000 };
                    fleet.rates.insert((layer, expert), rate);
                }
            }
        }
        // The control plane learns of a death when the lease ends.
        let is_alive = |server: &ServerEntry| {
            let process = fleet.processes.get(&server.name);
            process.is_some_and(|process| process.1 == server.incarnation)
        };
        let is_whole = fleet.world.fleet.coverage().is_complete()
            && fleet.world.fleet.table().servers.iter().all(is_alive);
        let mut names: Vec<String> = fleet.processes.keys().cloned().collect();
        names.sort();
        if is_whole && rng.random_ratio(1, 4) {
            let victim = names[rng.random_range(0..names.len())].clone();
            match rng.random_range(0..5u32) {
                0 if names.len() < 8 => {
                    fleet.join(&format!("m{second}"), next_incarnation);
                }
                1 if names.len() > 2 => {
                    fleet.processes.remove(&victim);
                    num_faults += 1;
                }
                2 => {
                    fleet.processes.remove(&victim);
                    fleet.join(&victim, next_incarnation);
                    num_faults += 1;
                }
                3 if names.len() > 2 => {
                    let (id, ..) = fleet.processes.remove(&victim).unwrap();
                    fleet.world.fleet.drain(&id, None, fleet.world.now).unwrap();
                    fleet.world.fleet.refresh();
                    fleet.check();
                    fleet.world.fleet.leave(&id).unwrap();
                    fleet.world.fleet.refresh();
                    num_faults += 1;
                }
                _ => {}
            }
            next_incarnation += 1;
        }
        fleet.second();
    }
    assert!(num_faults > 50, "{num_faults}");
}
