//! A fleet whose placement follows the load, for tests.

use super::*;
use crate::member::union;

/// A fleet whose placement follows the load, with members that load the experts of their assignment.
pub(super) struct Elastic {
    pub(super) world: World,
    /// Identity, incarnation, loaded experts and their assignment's version, by name.
    pub(super) processes: HashMap<String, (MemberId, u64, Assignment, u64)>,
    /// Tokens per second of each expert of each layer.
    pub(super) rates: HashMap<(u32, u32), u64>,
    /// Experts that no process of this name can read, by name.
    pub(super) unreadable: HashMap<String, Assignment>,
    /// True once every expert has had its replicas.
    pub(super) was_complete: bool,
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
    pub(super) fn refresh(&mut self) {
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
    pub(super) fn tokens_of(&self, name: &str) -> Vec<ExpertLoad> {
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
    pub(super) fn check(&mut self) {
        let coverage = self.world.fleet.coverage();
        self.was_complete |= coverage.without_replica == 0 && coverage.experts_total > 0;
        assert!(
            self.may_lose || !self.was_complete || coverage.without_replica == 0,
            "{coverage:?}"
        );
        assert_eq!(self.world.fleet.table().validate(), Ok(()));
    }

    /// Tokens per second of the busiest server over the mean.
    pub(super) fn busiest(&self) -> f64 {
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
