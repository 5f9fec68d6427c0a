//! Leases, suspicions, drains, and the reports that come with renewals.

use super::*;

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
    let turned = links("\u{202e}mhs", 1);
    let others = [links("shm", 33), links("a\nb", 1), links(&"x".repeat(600), 1)];
    for load in [many, device, turned].into_iter().chain(others) {
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
