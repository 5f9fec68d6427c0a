mod follow;
mod probe;

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
fn a_silent_member_expires_and_may_come_back_as_the_same() {
    let mut world = World::new();
    let a = world.serve("a", 1);
    let epoch = world.epoch();
    world.advance(TTL - PERIOD);
    assert_eq!(world.state("a"), Some(MemberState::Serving));
    world.advance(PERIOD);
    assert_eq!(world.state("a"), Some(MemberState::Expired));
    assert_eq!(world.epoch(), epoch + 1);
    assert!(world.fleet.table().servers.is_empty());
    let err = world.renew(&a.member_id, 1).unwrap_err();
    assert!(matches!(err, Refusal::LeaseExpired { .. }), "{err}");

    // Another member gets the partition meanwhile. The returning one keeps its loaded experts.
    world.serve("b", 2);
    let again = world.register("a", 1);
    assert_eq!((&again.member_id, &again.assignment), (&a.member_id, &a.assignment));
    assert_eq!(world.state("a"), Some(MemberState::Loading));
    assert!(world.fleet.table().servers.iter().all(|server| server.name != "a"));
    world.ready(&again, 1);
    assert!(world.fleet.table().servers.iter().any(|server| server.name == "a"));
}

#[test]
fn an_expired_member_is_forgotten_after_the_retention() {
    let mut world = World::new();
    let a = world.serve("a", 1);
    world.advance(TTL + Duration::from_secs(61));
    assert_eq!(world.state("a"), None);
    let err = world.renew(&a.member_id, 1).unwrap_err();
    assert!(matches!(err, Refusal::UnknownMember { .. }), "{err}");
}

#[test]
fn a_suspected_member_must_renew_within_a_heartbeat() {
    let mut world = World::new();
    let dead = world.serve("dead", 1);
    let live = world.serve("live", 2);
    let wait = world.suspect(&dead.member_id, None);
    assert_eq!(wait, Duration::from_millis(1300));
    world.suspect(&live.member_id, Some(2));
    world.advance(Duration::from_millis(900));
    world.renew(&live.member_id, 2).unwrap();
    // A second report does not move the deadline.
    assert_eq!(world.suspect(&dead.member_id, None), Duration::from_millis(400));
    world.advance(Duration::from_millis(400));
    assert_eq!(world.state("dead"), Some(MemberState::Expired));
    assert_eq!(world.state("live"), Some(MemberState::Serving));
    let expired = FleetEvent::Expired { name: "dead".to_owned(), cause: ExpiryCause::Suspect };
    assert!(world.fleet.take_events().contains(&expired));
    world.advance(Duration::from_millis(500));
    assert_eq!(world.state("live"), Some(MemberState::Serving));
    // A report about an earlier process does not affect its successor.
    assert_eq!(world.suspect(&live.member_id, Some(77)), Duration::ZERO);
    assert_eq!(world.suspect(&dead.member_id, None), Duration::ZERO);
}

/// Names are free text. The observer is who sent the reports.
#[test]
fn a_client_with_many_names_is_one_observer_and_pushes_no_report_out() {
    let mut world = World::new();
    let member = world.serve("a", 1);
    world.report(&member.member_id, None, "honest");
    world.advance(Duration::from_millis(10));
    world.renew(&member.member_id, 1).unwrap();
    for idx in 0..100 {
        world.report_as(&member.member_id, None, &format!("name-{idx}"), "attacker");
    }
    assert_eq!(world.fleet.members["a"].renew_by, None);
    let info = world.fleet.members["a"].info(world.now);
    let reporters: Vec<_> = info.reports.iter().map(|report| report.reporter.as_str()).collect();
    assert_eq!(reporters, ["name-99", "honest"]);
}

/// A name stays bound to its identity while the member is kept, and one identity has a share of the members.
#[test]
fn an_identity_that_registers_without_end_evicts_its_own_members_only() {
    let mut world = World::new();
    let register = |world: &mut World, name: &str, owner: &str| {
        world.fleet.register_for(World::request(name, 1), Some(owner), world.now)
    };
    register(&mut world, "victim", "aaaaaaaaaaaaaaaa").unwrap();
    world.advance(TTL);
    for round in 0..5 {
        for idx in 0..8 {
            register(&mut world, &format!("f{round}-{idx}"), "bbbbbbbbbbbbbbbb").unwrap();
        }
        let ninth = register(&mut world, "ninth", "bbbbbbbbbbbbbbbb").unwrap_err();
        assert_eq!(ninth, Refusal::TooManyOfOwner { share: 8 });
        world.advance(TTL);
    }
    let stolen = register(&mut world, "victim", "bbbbbbbbbbbbbbbb").unwrap_err();
    assert_eq!(stolen, Refusal::NameBound { name: "victim".to_owned() });
    register(&mut world, "other", "cccccccccccccccc").unwrap();
    register(&mut world, "victim", "aaaaaaaaaaaaaaaa").unwrap();
}

#[test]
fn one_observer_alone_expires_no_member() {
    let mut world = World::new();
    let member = world.serve("a", 1);
    world.advance(Duration::from_millis(500));
    // The rest of the lease.
    assert_eq!(world.report(&member.member_id, None, "client-1"), TTL - Duration::from_millis(500));
    assert_eq!(world.report(&member.member_id, None, "client-1"), TTL - Duration::from_millis(500));
    let info = &world.fleet.infos(world.now)[0];
    assert!(info.suspected);
    assert_eq!((info.reports.len(), info.reports[0].reporter.as_str()), (1, "client-1"));
    // This process connects: no second observer.
    world.fleet.record_probe("a", 1, Ok(()), world.now);
    world.advance(TTL - Duration::from_millis(600));
    assert_eq!(world.state("a"), Some(MemberState::Serving));
    world.renew(&member.member_id, 1).unwrap();
    // The client still shows as one that cannot reach the member, which is not suspected any more.
    world.advance(Duration::from_millis(1));
    let info = &world.fleet.infos(world.now)[0];
    assert!(!info.suspected);
    assert!(info.reports[0].age_ms > 1000);
    // A report from before the last renewal is no observer.
    let left = world.report(&member.member_id, None, "client-2");
    assert_eq!(left, TTL - Duration::from_millis(1));
    // This process cannot connect either: the second observer.
    world.fleet.record_probe("a", 1, Err(refused()), world.now);
    world.advance(Duration::from_millis(1300));
    assert_eq!(world.state("a"), Some(MemberState::Expired));
}

#[test]
fn another_model_is_refused_with_both_fingerprints() {
    let mut world = World::new();
    let mut other = World::request("b", 2);
    other.model.fingerprint = "deadbeefdeadbeef".to_owned();
    // The first member determines the model.
    world.register("a", 1);
    let text = world.fleet.register(other.clone(), world.now).unwrap_err().to_string();
    assert!(text.contains("deadbeefdeadbeef") && text.contains("00aabbccddeeff11"), "{text}");
    assert!(text.contains("other weights"), "{text}");
    let mut bigger = other.clone();
    bigger.model.num_experts += 1;
    let text = world.fleet.register(bigger, world.now).unwrap_err().to_string();
    assert!(text.contains("another model"), "{text}");
    let mut same_print = World::request("b", 2);
    same_print.model.num_experts = 9;
    let err = world.fleet.register(same_print, world.now).unwrap_err();
    assert!(matches!(err, Refusal::DescriptorMismatch { .. }), "{err}");

    let pinned = Some(other.model.fingerprint.clone());
    let mut world = World::with(FleetSettings { pinned_fingerprint: pinned, ..settings() }, None);
    let text = world.fleet.register(World::request("a", 1), world.now).unwrap_err().to_string();
    assert!(text.contains("deadbeefdeadbeef") && text.contains("00aabbccddeeff11"), "{text}");
    world.fleet.register(other, world.now).unwrap();
}

#[test]
fn a_restarted_process_takes_its_name_and_partition_over() {
    let mut world = World::new();
    let old = world.serve("a", 1);
    world.serve("b", 5);
    let new = world.register("a", 2);
    assert_ne!(new.member_id, old.member_id);
    assert_eq!(new.assignment, old.assignment);
    assert_eq!(world.state("a"), Some(MemberState::Loading));
    assert!(world.fleet.table().servers.iter().all(|server| server.name != "a"));
    for outcome in [
        world.renew(&old.member_id, 1).map(drop),
        world.fleet.register(World::request("a", 1), world.now).map(drop),
        world.fleet.leave(&old.member_id),
    ] {
        assert_eq!(outcome, Err(Refusal::Superseded { name: "a".to_owned() }));
    }
    world.ready(&new, 2);
    assert_eq!(world.fleet.table().servers[0].incarnation, 2);
}

/// Two processes that are restarted under one name replaced each other for ever, each time with a new epoch.
#[test]
fn of_two_live_processes_with_one_name_the_later_one_stays() {
    let mut world = World::new();
    let first = world.serve("a", 1);
    let second = world.serve("a", 2);
    // A restart alone is no conflict: the name changes hands again.
    let third = world.serve("a", 3);
    assert_eq!(world.fleet.take_events().iter().filter(|event| is_contest(event)).count(), 0);
    // The second process still lives.
    assert!(matches!(world.renew(&second.member_id, 2), Err(Refusal::Superseded { .. })));
    assert!(matches!(world.renew(&first.member_id, 1), Err(Refusal::Superseded { .. })));
    assert_eq!(world.fleet.take_events().iter().filter(|event| is_contest(event)).count(), 1);
    let epoch = world.epoch();
    for incarnation in 4..40 {
        world.advance(TTL / 3);
        world.renew(&third.member_id, 3).unwrap();
        let request = World::request("a", incarnation);
        let err = world.fleet.register(request, world.now).unwrap_err();
        assert!(matches!(err, Refusal::NameInUse { .. }), "{err}");
        assert!(err.to_string().contains("127.0.0.1:7000"), "{err}");
    }
    assert_eq!(world.epoch(), epoch);
    // The name is free once its holder is gone.
    world.advance(TTL + PERIOD);
    world.serve("a", 50);
    assert_eq!(world.state("a"), Some(MemberState::Serving));
}

fn is_contest(event: &FleetEvent) -> bool {
    matches!(event, FleetEvent::NameContested { .. })
}

#[test]
fn a_model_without_live_members_gives_way_to_another() {
    let mut world = World::new();
    let mut right = World::request("right", 2);
    right.model.fingerprint = "deadbeefdeadbeef".to_owned();
    right.model.num_experts = 16;
    let wrong = world.serve("wrong", 1);
    let epoch = world.epoch();
    assert!(world.fleet.register(right.clone(), world.now).is_err());
    world.advance(TTL - PERIOD);
    world.renew(&wrong.member_id, 1).unwrap();
    assert!(world.fleet.register(right.clone(), world.now).is_err());
    world.advance(TTL + PERIOD);
    let response = world.fleet.register(right.clone(), world.now).unwrap();
    world.ready(&response, 2);
    assert_eq!(world.fleet.model(), Some(&right.model));
    assert_eq!(world.state("wrong"), None);
    let table = world.fleet.table();
    assert!(table.epoch > epoch);
    assert_eq!(table.validate(), Ok(()));
    let err = world.fleet.register(World::request("wrong", 1), world.now).unwrap_err();
    assert!(matches!(err, Refusal::ModelMismatch { .. }), "{err}");
}

#[test]
fn an_outage_of_all_members_lets_no_other_model_in() {
    let mut world = World::new();
    for (name, incarnation) in [("a", 1), ("b", 2), ("c", 3), ("d", 4)] {
        world.serve(name, incarnation);
    }
    let mut wrong = World::request("wrong", 9);
    wrong.model.fingerprint = "deadbeefdeadbeef".to_owned();
    world.advance(TTL * 2);
    let err = world.fleet.register(wrong.clone(), world.now).unwrap_err();
    assert!(matches!(err, Refusal::DeadModel { .. }), "{err}");
    let text = err.to_string();
    assert!(text.contains("all servers") && text.contains("deadbeefdeadbeef"), "{text}");
    // Also after a restart of the control plane.
    let (snapshot, _) = world.fleet.snapshot();
    let mut restored = World::with(settings(), Some(snapshot));
    restored.advance(TTL * 2);
    let err = restored.fleet.register(wrong.clone(), restored.now).unwrap_err();
    assert!(matches!(err, Refusal::DeadModel { .. }), "{err}");
    // The members are forgotten after the retention, and the model with them.
    world.advance(Duration::from_secs(60));
    world.fleet.register(wrong, world.now).unwrap();
}

/// Without members and clients nothing needs the model. After a restart, both first have the time to return.
#[test]
fn a_model_without_members_and_clients_gives_way_at_once() {
    let mut world = World::new();
    for (name, incarnation) in [("a", 1), ("b", 2), ("c", 3), ("d", 4)] {
        world.serve(name, incarnation);
    }
    assert!(world.fleet.coverage().is_complete());
    let mut other = World::request("other", 9);
    other.model.fingerprint = "deadbeefdeadbeef".to_owned();
    world.fleet.note_clients(false);
    let err = world.fleet.register(other.clone(), world.now).unwrap_err();
    assert!(matches!(err, Refusal::ModelMismatch { .. }), "{err}");
    world.advance(TTL * 2);
    let (snapshot, _) = world.fleet.snapshot();
    let mut restored = World::with(settings(), Some(snapshot));
    for has_clients in [true, false] {
        restored.fleet.note_clients(has_clients);
        restored.fleet.register(other.clone(), restored.now).unwrap_err();
    }
    restored.advance(TTL);
    for world in [&mut world, &mut restored] {
        world.fleet.note_clients(true);
        world.fleet.register(other.clone(), world.now).unwrap_err();
        world.fleet.note_clients(false);
        world.fleet.register(other.clone(), world.now).unwrap();
        assert_eq!(world.fleet.model(), Some(&other.model));
    }
}

#[test]
fn draining_leaves_the_placement_and_keeps_the_lease() {
    let mut world = World::new();
    let a = world.serve("a", 1);
    let b = world.serve("b", 2);
    let epoch = world.epoch();
    world.fleet.drain(&a.member_id, Some(1), world.now).unwrap();
    world.fleet.refresh();
    assert_eq!(world.epoch(), epoch + 1);
    assert!(world.fleet.table().servers.iter().all(|server| server.name != "a"));
    // A late `ready` does not return it to the placement.
    world.ready(&a, 1);
    assert_eq!(world.renew(&a.member_id, 1).unwrap().state, MemberState::Draining);
    assert_eq!(world.epoch(), epoch + 1);
    // The next member gets its partition.
    let c = world.register("c", 3);
    assert_ne!(c.assignment, b.assignment);
    world.fleet.leave(&a.member_id).unwrap();
    world.fleet.refresh();
    assert_eq!((world.state("a"), world.epoch()), (None, epoch + 1));
}

#[test]
fn a_pause_of_the_control_plane_expires_no_member() {
    let mut world = World::new();
    let a = world.serve("a", 1);
    world.advance(Duration::from_secs(1));
    // Stopped for ten leases: no member could renew.
    world.now += TTL * 10;
    world.tick();
    assert_eq!(world.state("a"), Some(MemberState::Serving));
    world.advance(Duration::from_secs(1));
    world.renew(&a.member_id, 1).unwrap();
    world.advance(TTL);
    assert_eq!(world.state("a"), Some(MemberState::Expired));
}

#[test]
fn a_member_that_holds_experts_keeps_them_in_a_fresh_cluster() {
    let mut world = World::new();
    let mut request = World::request("a", 1);
    let experts = LayerAssignment { layer: 3, experts: vec![1, 5] };
    request.holds = Assignment { layers: vec![experts] };
    let response = world.fleet.register(request.clone(), world.now).unwrap();
    assert_eq!(response.assignment, request.holds);
    for (layer, experts) in [(2, vec![1]), (3, vec![8]), (3, vec![5, 1]), (3, vec![1, 1])] {
        let mut request = World::request("b", 2);
        request.holds = Assignment { layers: vec![LayerAssignment { layer, experts }] };
        let err = world.fleet.register(request, world.now).unwrap_err();
        assert!(matches!(err, Refusal::BadRequest(_)), "{err}");
    }
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

#[test]
fn a_full_fleet_makes_room_at_the_cost_of_the_expired() {
    let mut world = World::new();
    for i in 0..16 {
        world.register(&format!("m{i}"), i);
    }
    let err = world.fleet.register(World::request("late", 99), world.now).unwrap_err();
    assert_eq!(err, Refusal::TooManyMembers { limit: 16 });
    world.advance(TTL);
    world.register("late", 99);
    assert_eq!(world.fleet.members.len(), 16);
}

#[test]
fn malformed_registrations_are_named() {
    let mut world = World::new();
    let mut cases = Vec::new();
    for name in ["", "a b", "\n", "ä", &"x".repeat(129)] {
        cases.push((World::request(name, 1), "name"));
    }
    for addr in ["", "localhost", "localhost:0", ":7", "a b:7", "h:70000", "[::1:7", "h:+7"] {
        let mut request = World::request("a", 1);
        request.data_addr = addr.to_owned();
        cases.push((request.clone(), "data_addr"));
        request.data_addr = "h:7".to_owned();
        request.metrics_addr = Some(addr.to_owned());
        cases.push((request, "metrics_addr"));
    }
    let with_model = |change: fn(&mut ModelDescriptor)| {
        let mut request = World::request("a", 1);
        change(&mut request.model);
        request
    };
    cases.push((with_model(|model| model.fingerprint = "XYZ".to_owned()), "fingerprint"));
    cases.push((with_model(|model| model.num_experts = 0), "experts"));
    cases.push((with_model(|model| model.num_experts = u32::MAX), "experts"));
    cases.push((with_model(|model| model.top_k = 9), "top-k"));
    cases.push((with_model(|model| model.moe_layers = vec![1, 1]), "ascending"));
    cases.push((with_model(|model| model.moe_layers.clear()), "layers"));
    for (request, word) in cases {
        let err = world.fleet.register(request, world.now).unwrap_err();
        assert!(matches!(err, Refusal::BadRequest(_)), "{err}");
        assert!(err.to_string().contains(word), "{err} should name {word}");
    }
    assert!(world.fleet.members.is_empty() && world.fleet.model.is_none());
}

#[test]
fn a_restart_restores_members_with_one_fresh_lease() {
    let mut world = World::new();
    let a = world.serve("a", 1);
    let b = world.register("b", 2);
    world.serve("gone", 3);
    for _ in 0..4 {
        world.advance(Duration::from_secs(1));
        world.renew(&a.member_id, 1).unwrap();
        world.renew(&b.member_id, 2).unwrap();
    }
    assert_eq!(world.state("gone"), Some(MemberState::Expired));
    let (snapshot, _) = world.fleet.snapshot();
    let mut next = World::with(settings(), Some(snapshot));
    assert_eq!(next.fleet.cluster_id, world.fleet.cluster_id);
    assert!(next.epoch() > world.epoch());
    assert!(!table::differs(next.fleet.table(), world.fleet.table()));
    assert_eq!(next.state("b"), Some(MemberState::Loading));
    assert_eq!(next.state("gone"), Some(MemberState::Expired));
    assert_eq!(next.renew(&a.member_id, 1).unwrap().state, MemberState::Serving);
    next.advance(TTL - PERIOD);
    assert_eq!(next.state("b"), Some(MemberState::Loading));
    next.advance(PERIOD);
    assert_eq!(next.state("b"), Some(MemberState::Expired));
}

#[test]
fn without_promised_epochs_the_table_waits() {
    let mut world = World::new();
    let a = world.serve("a", 1);
    // The store fails from here on. Changes continue until no reserved epoch is left.
    let mut epoch = world.epoch();
    for i in 0..5000u64 {
        if i % 2 == 0 {
            world.fleet.drain(&a.member_id, None, world.now).unwrap();
            world.fleet.refresh();
        } else {
            world.fleet.members.get_mut("a").unwrap().record.phase = Phase::Loading;
            world.ready(&a, 1);
        }
        assert!(world.epoch() == epoch || world.epoch() == epoch + 1);
        epoch = world.epoch();
    }
    assert!(world.fleet.is_blocked);
    assert!(world.fleet.take_events().contains(&FleetEvent::PlacementBlocked));
    // The store recovers, and the waiting change is published.
    let was_empty = world.fleet.table().servers.is_empty();
    world.fleet.members.get_mut("a").unwrap().record.phase =
        if was_empty { Phase::Serving } else { Phase::Draining };
    world.fleet.mark_changed();
    assert!(world.fleet.refresh().is_none());
    world.save();
    world.fleet.refresh();
    assert!(world.epoch() > epoch && world.fleet.table().servers.is_empty() != was_empty);
}

/// Random operations, crashes of the control plane and lost writes. In one cluster no epoch may have two
/// tables, and every table must be valid.
#[test]
fn no_history_issues_an_epoch_twice() {
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    for _ in 0..20 {
        let mut disk: Vec<Snapshot> = Vec::new();
        let mut issued: HashMap<u64, Arc<PlacementTable>> = HashMap::new();
        let mut newest = 0;
        let planner = || Box::new(BalancedPlanner::new(4, 2).unwrap());
        let now = Duration::ZERO;
        let mut world = World { fleet: Fleet::new(settings(), planner(), None, now), now };
        let founding = world.fleet.snapshot();
        disk.push(founding.0.clone());
        world.fleet.mark_saved(&founding.0, founding.1);
        for _ in 0..600 {
            let name = format!("m{}", rng.random_range(0..6u32));
            let known = world.fleet.members.get(&name);
            let known = known.map(|m| (m.record.member_id.clone(), m.record.incarnation));
            match (rng.random_range(0..12u32), known) {
                (0..=2, _) => {
                    let request = World::request(&name, rng.random_range(0..20));
                    // Refusals are expected.
                    let _ = world.fleet.register(request, world.now);
                }
                (3..=5, Some((id, incarnation))) => {
                    let holds = Assignment::clone(&world.fleet.members[&name].record.assignment);
                    let request = ReadyRequest { incarnation, holds };
                    let _ = world.fleet.ready(&id, request, world.now);
                }
                (6, Some((id, _))) => drop(world.fleet.drain(&id, None, world.now)),
                (7, Some((id, _))) => drop(world.fleet.leave(&id)),
                (8, Some((id, _))) => drop(world.suspect(&id, None)),
                (9, Some((id, incarnation))) => drop(world.renew(&id, incarnation)),
                (10, _) => {
                    let (snapshot, revision) = world.fleet.snapshot();
                    disk.push(snapshot.clone());
                    world.fleet.mark_saved(&snapshot, revision);
                }
                (11, _) if rng.random_bool(0.2) => {
                    // Killed before a write or before its confirmation, or the write is lost.
                    match rng.random_range(0..3u32) {
                        0 => disk.push(world.fleet.snapshot().0),
                        1 if disk.len() > 1 => drop(disk.pop()),
                        _ => {}
                    }
                    let last = disk[disk.len() - 1].clone();
                    world.fleet = Fleet::new(settings(), planner(), Some(last), world.now);
                    let (snapshot, revision) = world.fleet.snapshot();
                    disk.push(snapshot.clone());
                    world.fleet.mark_saved(&snapshot, revision);
                }
                _ => {
                    world.now += PERIOD;
                    world.tick();
                }
            }
            let before = Arc::clone(world.fleet.table());
            if let Some(table) = world.fleet.refresh() {
                table.validate().unwrap();
                assert!(table::differs(&before, &table) || before.epoch == 0);
                assert!(table.epoch > newest, "epoch {} after {newest}", table.epoch);
                newest = table.epoch;
                assert!(issued.insert(table.epoch, table).is_none());
            }
        }
        assert!(issued.len() > 10, "{} epochs", issued.len());
    }
}

#[test]
fn oversized_and_dirty_load_reports_are_refused() {
    let mut world = World::new();
    let member = world.serve("a", 1);
    let links = |transport: &str, num: usize| {
        let link =
            TransportLinks { transport: transport.to_owned(), num_links: 1, left_out: Vec::new() };
        LoadReport { links: vec![link; num], ..LoadReport::default() }
    };
    let expert = ExpertLoad { layer: 0, expert: 0, num_tokens: 1 };
    let many = LoadReport { experts: vec![expert; 25], ..LoadReport::default() };
    let device = LoadReport { device: Some("\u{1b}[2J".to_owned()), ..LoadReport::default() };
    for load in [many, links("shm", 33), links("a\nb", 1), links(&"x".repeat(600), 1), device] {
        let request = LeaseRequest { incarnation: 1, assignment_version: 0, load: Some(load) };
        let err = world.fleet.renew(&member.member_id, request, world.now).unwrap_err();
        assert!(
            matches!(err, Refusal::BadRequest(_)) && !err.to_string().contains('\u{1b}'),
            "{err}"
        );
    }
    let load = Some(links("shm", 2));
    let request = LeaseRequest { incarnation: 1, assignment_version: 0, load };
    world.fleet.renew(&member.member_id, request, world.now).unwrap();
}
