mod durable;
mod elastic;
mod follow;
mod leases;
mod leaving;
mod probe;
mod registration;

use std::collections::HashMap;

use control_api::{
    Assignment, ExpertLoad, LayerAssignment, LeaseRequest, LeaseResponse, LoadReport, MemberState,
    ReadyRequest, RegisterRequest, RegisterResponse, ServerEntry, SuspectRequest, TransportLinks,
};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::*;
use crate::admission::Refusal;
use crate::member::Phase;
use crate::planner::BalancedPlanner;
use crate::planner::rebalance::PlanGoals;

const TTL: Duration = Duration::from_secs(3);
const PERIOD: Duration = Duration::from_millis(100);

fn settings() -> FleetSettings {
    FleetSettings {
        lease_ttl: TTL,
        suspect_grace: Duration::from_millis(300),
        expired_retention: Duration::from_secs(60),
        max_members: 16,
        pinned_fingerprint: None,
        balance: None,
        target_share: 0.6,
    }
}

fn model() -> ModelDescriptor {
    ModelDescriptor {
        fingerprint: "00aabbccddeeff11".to_owned(),
        architecture: "qwen3_moe".to_owned(),
        hidden: 256,
        moe_layers: vec![0, 1, 3],
        num_experts: 8,
        top_k: 2,
    }
}

fn refused() -> ProbeError {
    ProbeError { reason: "refused".to_owned(), is_refused: true }
}

/// A fleet with a virtual clock and a store that always succeeds at once.
struct World {
    fleet: Fleet,
    now: Duration,
}

impl World {
    fn new() -> Self {
        Self::with(settings(), None)
    }

    fn with(settings: FleetSettings, snapshot: Option<Snapshot>) -> Self {
        let planner = Box::new(BalancedPlanner::new(4, 2).unwrap());
        let now = Duration::from_secs(1000);
        let mut world = Self { fleet: Fleet::new(settings, planner, snapshot, now), now };
        world.save();
        world.fleet.refresh();
        world
    }

    fn save(&mut self) {
        while self.fleet.needs_save() {
            let (snapshot, revision) = self.fleet.snapshot();
            self.fleet.mark_saved(&snapshot, revision);
        }
    }

    /// Advances the clock tick by tick.
    fn advance(&mut self, by: Duration) {
        let end = self.now + by;
        while self.now < end {
            self.now += PERIOD.min(end - self.now);
            self.tick();
            self.fleet.refresh();
        }
    }

    /// Ticks, and computes the plan that is due.
    fn tick(&mut self) {
        self.fleet.tick(self.now, PERIOD);
        if let Some(job) = self.fleet.take_plan() {
            let outcome = job.run();
            self.fleet.finish_plan(Some((job, outcome)), self.now);
        }
    }

    fn request(name: &str, incarnation: u64) -> RegisterRequest {
        let mut request = RegisterRequest::new(name, "127.0.0.1:7000", model());
        request.incarnation = incarnation;
        request
    }

    fn register(&mut self, name: &str, incarnation: u64) -> RegisterResponse {
        let request = Self::request(name, incarnation);
        let response = self.fleet.register(request, self.now).unwrap();
        self.fleet.refresh();
        response
    }

    fn serve(&mut self, name: &str, incarnation: u64) -> RegisterResponse {
        let response = self.register(name, incarnation);
        self.ready(&response, incarnation);
        response
    }

    fn ready(&mut self, member: &RegisterResponse, incarnation: u64) {
        let request = ReadyRequest { incarnation, holds: member.assignment.clone() };
        self.fleet.ready(&member.member_id, request, self.now).unwrap();
        self.fleet.refresh();
    }

    fn renew(&mut self, member: &MemberId, incarnation: u64) -> Result<LeaseResponse, Refusal> {
        let request = LeaseRequest { incarnation, assignment_version: 0, load: None };
        self.fleet.renew(member, request, self.now)
    }

    /// Two clients report that they cannot reach a member.
    fn suspect(&mut self, member: &MemberId, incarnation: Option<u64>) -> Duration {
        self.report(member, incarnation, "client-1");
        self.report(member, incarnation, "client-2")
    }

    fn report(&mut self, member: &MemberId, incarnation: Option<u64>, reporter: &str) -> Duration {
        self.report_as(member, incarnation, reporter, reporter)
    }

    fn report_as(
        &mut self,
        member: &MemberId,
        incarnation: Option<u64>,
        reporter: &str,
        observer: &str,
    ) -> Duration {
        let request = SuspectRequest {
            reporter: reporter.to_owned(),
            reason: "silence".to_owned(),
            incarnation,
        };
        self.fleet.suspect(member, request, observer, self.now).unwrap()
    }

    fn epoch(&self) -> u64 {
        self.fleet.table().epoch
    }

    fn state(&self, name: &str) -> Option<MemberState> {
        self.fleet.members.get(name).map(Member::state)
    }
}

#[test]
fn only_ready_members_are_placed_and_only_changes_raise_the_epoch() {
    let mut world = World::new();
    let start = world.epoch();
    assert_eq!(start, 1);
    let a = world.register("a", 1);
    // The table now names the model.
    assert_eq!(world.epoch(), start + 1);
    assert_eq!(world.fleet.table().servers.len(), 0);
    world.ready(&a, 1);
    assert_eq!(world.epoch(), start + 2);
    let table = world.fleet.table().clone();
    table.validate().unwrap();
    assert_eq!(table.servers[0].name, "a");
    for layer in model().moe_layers {
        for expert in 0..8 {
            let held = a.assignment.contains(layer, expert);
            assert_eq!(table.replicas(layer, expert), if held { &[0][..] } else { &[] });
        }
    }
    for _ in 0..20 {
        world.advance(Duration::from_secs(1));
        world.renew(&a.member_id, 1).unwrap();
        world.ready(&a, 1);
        world.register("a", 1);
    }
    assert_eq!(world.epoch(), start + 2);
    assert_eq!(world.state("a"), Some(MemberState::Serving));
}

#[test]
fn four_members_cover_everything_twice() {
    let mut world = World::new();
    for (i, name) in ["a", "b", "c", "d"].into_iter().enumerate() {
        world.serve(name, i as u64);
    }
    let table = world.fleet.table();
    assert!(table.is_complete());
    let layers = table.layers.iter().flat_map(|layer| &layer.replicas);
    assert!(layers.clone().all(|replicas| replicas.len() == 2));
    let coverage = world.fleet.coverage();
    let expected = Coverage { experts_total: 24, without_replica: 0, under_replicated: 0 };
    assert_eq!(coverage, expected);
}

#[test]
fn only_what_is_held_and_assigned_is_placed() {
    let mut world = World::new();
    let a = world.register("a", 1);
    let mut holds = a.assignment.clone();
    holds.layers.remove(0);
    let request = ReadyRequest { incarnation: 1, holds };
    world.fleet.ready(&a.member_id, request, world.now).unwrap();
    world.fleet.refresh();
    let table = world.fleet.table();
    assert!((0..8).all(|expert| table.replicas(0, expert).is_empty()));
    assert!((0..8).any(|expert| !table.replicas(1, expert).is_empty()));
}
