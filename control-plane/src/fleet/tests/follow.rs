//! A placement that follows the load.

use super::*;
use crate::member::union;

/// A fleet whose placement follows the load, with members that load the experts of their assignment.
pub(super) struct Elastic {
    pub(super) world: World,
    /// Identity, incarnation, loaded experts and their assignment's version, by name.
    processes: HashMap<String, (MemberId, u64, Assignment, u64)>,
    /// Tokens per second of each expert of each layer.
    rates: HashMap<(u32, u32), u64>,
    /// Experts that no process of this name can read, by name.
    unreadable: HashMap<String, Assignment>,
    /// True once every expert has had its replicas.
    was_complete: bool,
    /// True if the test takes away more than the replicas cover.
    pub(super) may_lose: bool,
}

impl Elastic {
    pub(super) fn new(expected_servers: u32, min_replicas: u32) -> Self {
        let goals = PlanGoals { min_replicas, ..PlanGoals::default() };
        let balance = BalanceSettings { goals, expected_servers, ..BalanceSettings::default() };
        let world = World::with(FleetSettings { balance: Some(balance), ..settings() }, None);
        Self {
            world,
            processes: HashMap::new(),
            rates: HashMap::new(),
            unreadable: HashMap::new(),
            was_complete: false,
            may_lose: false,
        }
    }

    pub(super) fn join(&mut self, name: &str, incarnation: u64) {
        self.join_unprobed(name, incarnation);
        self.world.fleet.record_probe(name, incarnation, Ok(()), self.world.now);
    }

    /// A member that the control plane has not tried to connect to.
    pub(super) fn join_unprobed(&mut self, name: &str, incarnation: u64) {
        let response = self.world.register(name, incarnation);
        self.world.ready(&response, incarnation);
        let RegisterResponse { member_id, assignment, assignment_version, .. } = response;
        let process = (member_id, incarnation, assignment, assignment_version);
        self.processes.insert(name.to_owned(), process);
    }

    /// One second: every process renews, reports its tokens, and loads newly assigned experts.
    pub(super) fn second(&mut self) {
        self.world.advance(Duration::from_secs(1));
        let mut names: Vec<String> = self.processes.keys().cloned().collect();
        names.sort();
        for name in names {
            let (id, incarnation, holds, version) = self.processes[&name].clone();
            let request = LeaseRequest {
                incarnation,
                assignment_version: version,
                load: Some(LoadReport {
                    experts: self.tokens_of(&name),
                    unreadable: self.unreadable.get(&name).cloned().unwrap_or_default(),
                    ..LoadReport::default()
                }),
            };
            let response = self.world.fleet.renew(&id, request, self.world.now).unwrap();
            if let Some(assignment) = response.assignment {
                // Old experts stay loaded.
                let mut holds = union(&holds, &assignment);
                if let Some(unreadable) = self.unreadable.get(&name) {
                    for entry in &mut holds.layers {
                        let layer = entry.layer;
                        entry.experts.retain(|&expert| !unreadable.contains(layer, expert));
                    }
                    holds.layers.retain(|entry| !entry.experts.is_empty());
                }
                let ready = ReadyRequest { incarnation, holds: holds.clone() };
                self.world.fleet.ready(&id, ready, self.world.now).unwrap();
                let process = (id, incarnation, holds, response.assignment_version);
                self.processes.insert(name, process);
            }
            self.refresh();
            self.check();
        }
    }

    /// Refreshes the fleet, and compares the steps to the targets with a plain computation of all of them.
    fn refresh(&mut self) {
        let fleet = &mut self.world.fleet;
        let expected = match fleet.needs_refresh() {
            true => steps(fleet),
            false => HashMap::new(),
        };
        fleet.refresh();
        for (name, (assignment, placed)) in expected {
            let member = &fleet.members[&name];
            assert_eq!(*member.record.assignment, assignment, "{name}");
            assert_eq!(*member.placed, placed, "{name}");
        }
    }

    /// Tokens that clients send to a server in a second.
    fn tokens_of(&self, name: &str) -> Vec<ExpertLoad> {
        let table = self.world.fleet.table();
        let Some(server) = table.servers.iter().position(|server| server.name == name) else {
            return Vec::new();
        };
        let mut loads = Vec::new();
        for entry in &table.layers {
            for (expert, replicas) in entry.replicas.iter().enumerate() {
                if replicas.contains(&(server as u32)) {
                    let rate = self.rates.get(&(entry.layer, expert as u32)).copied().unwrap_or(0);
                    let num_tokens = rate / replicas.len() as u64;
                    loads.push(ExpertLoad {
                        layer: entry.layer,
                        expert: expert as u32,
                        num_tokens,
                    });
                }
            }
        }
        loads
    }

    /// No table may leave an expert without a replica once all had one.
    fn check(&mut self) {
        let coverage = self.world.fleet.coverage();
        self.was_complete |= coverage.without_replica == 0 && coverage.experts_total > 0;
        assert!(
            self.may_lose || !self.was_complete || coverage.without_replica == 0,
            "{coverage:?}"
        );
        assert_eq!(self.world.fleet.table().validate(), Ok(()));
    }

    /// Tokens per second of the busiest server over the mean.
    fn busiest(&self) -> f64 {
        let of =
            |name: &String| self.tokens_of(name).iter().map(|load| load.num_tokens).sum::<u64>();
        let tokens: Vec<u64> = self.processes.keys().map(of).collect();
        let mean = tokens.iter().sum::<u64>() as f64 / tokens.len() as f64;
        tokens.iter().copied().max().unwrap_or(0) as f64 / mean
    }
}

/// The next assignment of every member with a target, and its placed experts then. Computed expert by expert.
fn steps(fleet: &Fleet) -> HashMap<String, (Assignment, Assignment)> {
    let Some(model) = &fleet.model else { return HashMap::new() };
    let planned: Vec<&Member> = fleet.members.values().filter(|m| m.is_planned()).collect();
    if !fleet.members.values().any(|m| m.target.is_some() || m.keeps_serving()) {
        return HashMap::new();
    }
    let takers = |layer, expert| {
        let has = move |m: &&&Member| m.target.as_ref().is_some_and(|t| t.contains(layer, expert));
        planned.iter().filter(has)
    };
    let has_loaded =
        |m: &&Member, layer, expert| m.can_take_over() && m.placed.contains(layer, expert);
    let is_pending = |layer, expert| takers(layer, expert).any(|m| !has_loaded(m, layer, expert));
    let select = |wanted: &dyn Fn(u32, u32) -> bool| {
        let entry = |&layer: &u32| {
            let experts = (0..model.num_experts).filter(|&e| wanted(layer, e)).collect();
            LayerAssignment { layer, experts }
        };
        let layers = model.moe_layers.iter().map(entry).filter(|l| !l.experts.is_empty());
        Assignment { layers: layers.collect() }
    };
    let mut steps = HashMap::new();
    for (name, member) in &fleet.members {
        if let Some(target) = member.target.as_ref().filter(|_| member.is_planned()) {
            let next = select(&|layer, expert| {
                let is_kept = member.placed.contains(layer, expert) && is_pending(layer, expert);
                target.contains(layer, expert) || is_kept
            });
            let placed = select(&|l, e| next.contains(l, e) && member.record.holds.contains(l, e));
            steps.insert(name.clone(), (next, placed));
        } else if member.keeps_serving() && member.is_drain_planned {
            let placed = select(&|layer, expert| {
                let is_taken = takers(layer, expert).next().is_some() && !is_pending(layer, expert);
                member.placed.contains(layer, expert) && !planned.is_empty() && !is_taken
            });
            let assignment = Assignment::clone(&member.record.assignment);
            steps.insert(name.clone(), (assignment, placed));
        }
    }
    steps
}

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

#[test]
fn a_drained_server_stays_until_others_have_its_experts() {
    let mut fleet = Elastic::new(3, 1);
    for (name, incarnation) in [("a", 1), ("b", 2), ("c", 3)] {
        fleet.join(name, incarnation);
    }
    fleet.second();
    let id = fleet.processes["b"].0.clone();
    let is_placed =
        |fleet: &Elastic| fleet.world.fleet.table().servers.iter().any(|server| server.name == "b");
    // A drain that is taken back changes nothing.
    let epoch = fleet.world.epoch();
    assert!(fleet.world.fleet.drain(&id, None, fleet.world.now).unwrap().keeps_serving);
    fleet.world.fleet.refresh();
    fleet.world.fleet.resume(&id, fleet.world.now).unwrap();
    fleet.world.fleet.refresh();
    assert_eq!(fleet.world.epoch(), epoch);
    // The check of every second wants a replica of each expert.
    fleet.world.fleet.drain(&id, None, fleet.world.now).unwrap();
    fleet.world.fleet.refresh();
    assert!(is_placed(&fleet));
    assert_eq!(fleet.world.state("b"), Some(MemberState::Draining));
    let mut seconds = 0;
    while is_placed(&fleet) {
        fleet.second();
        seconds += 1;
        assert!(seconds <= 5);
    }
    assert!(!fleet.world.fleet.infos(fleet.world.now)[1].keeps_serving);
    assert!(fleet.world.fleet.coverage().is_complete());
}

/// No plan has a place for the experts of the drained server. They stay as long as the drain may last.
#[test]
fn a_drained_server_keeps_experts_that_no_other_can_take() {
    let mut fleet = Elastic::new(3, 1);
    for (name, incarnation) in [("a", 1), ("b", 2), ("c", 3)] {
        fleet.join(name, incarnation);
    }
    let own = fleet.processes["b"].2.clone();
    for name in ["a", "c"] {
        fleet.unreadable.insert(name.to_owned(), own.clone());
    }
    fleet.second();
    let id = fleet.processes["b"].0.clone();
    fleet.world.fleet.drain(&id, None, fleet.world.now).unwrap();
    fleet.world.fleet.refresh();
    for _ in 0..20 {
        // It wants a replica of each expert.
        fleet.second();
        assert!(fleet.world.fleet.infos(fleet.world.now)[1].keeps_serving);
    }
    fleet.may_lose = true;
    for _ in 0..10 {
        fleet.second();
    }
    assert!(!fleet.world.fleet.infos(fleet.world.now)[1].keeps_serving);
}

/// A restarted control plane, or another leader, goes on with a drain.
#[test]
fn a_drain_goes_on_after_a_restart() {
    let mut fleet = Elastic::new(3, 1);
    for (name, incarnation) in [("a", 1), ("b", 2), ("c", 3)] {
        fleet.join(name, incarnation);
    }
    fleet.second();
    let id = fleet.processes["b"].0.clone();
    fleet.world.fleet.drain(&id, None, fleet.world.now).unwrap();
    fleet.world.fleet.refresh();
    let (snapshot, _) = fleet.world.fleet.snapshot();
    let balance = BalanceSettings { expected_servers: 3, ..BalanceSettings::default() };
    let settings = FleetSettings { balance: Some(balance), ..settings() };
    fleet.world = World::with(settings, Some(snapshot));
    for (name, incarnation) in [("a", 1), ("c", 3)] {
        fleet.world.fleet.record_probe(name, incarnation, Ok(()), fleet.world.now);
    }
    fleet.world.fleet.refresh();
    assert!(fleet.world.fleet.coverage().is_complete());
    let mut seconds = 0;
    while fleet.world.fleet.infos(fleet.world.now)[1].keeps_serving {
        fleet.second();
        seconds += 1;
        assert!(seconds <= 10);
    }
    assert!(fleet.world.fleet.coverage().is_complete());
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

/// No server will take over the experts of the last ones, or those of a server without any: they leave at once.
#[test]
fn servers_that_nothing_can_replace_leave_at_once() {
    for names in [&["a"][..], &["a", "b"], &["a", "b", "c"]] {
        let mut fleet = Elastic::new(1, 1);
        let incarnation = |at: usize| at as u64 + 1;
        for (at, name) in names.iter().enumerate() {
            fleet.join(name, incarnation(at));
        }
        (0..4).for_each(|_| fleet.second());
        fleet.may_lose = true;
        for name in names {
            let id = fleet.processes[*name].0.clone();
            fleet.world.fleet.drain(&id, None, fleet.world.now).unwrap();
            fleet.world.fleet.refresh();
        }
        (0..2).for_each(|_| fleet.second());
        for (at, name) in names.iter().enumerate() {
            let (id, _, _, assignment_version) = fleet.processes[*name].clone();
            let request =
                LeaseRequest { incarnation: incarnation(at), assignment_version, load: None };
            let response = fleet.world.fleet.renew(&id, request, fleet.world.now).unwrap();
            assert!(!response.keeps_serving, "{name} of {names:?}");
        }
        assert!(fleet.world.fleet.table().servers.is_empty());
    }
}

/// A server without experts has nothing to hand over, although another one serves them.
#[test]
fn a_server_without_experts_leaves_at_once() {
    let mut fleet = Elastic::new(1, 1);
    fleet.join("a", 1);
    let mut request = World::request("empty", 2);
    request.capacity_experts = Some(0);
    let response = fleet.world.fleet.register(request, fleet.world.now).unwrap();
    assert!(response.assignment.is_empty());
    fleet.world.ready(&response, 2);
    let info = fleet.world.fleet.drain(&response.member_id, None, fleet.world.now).unwrap();
    assert_eq!((info.state, info.keeps_serving), (MemberState::Draining, false));
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
