//! Attempts of the control plane to connect to members.

use super::follow::Elastic;
use super::*;

/// Experts that have a replica on a server of this name.
fn placed_on(world: &World, name: &str) -> usize {
    let table = world.fleet.table();
    let Some(server) = table.servers.iter().position(|server| server.name == name) else {
        return 0;
    };
    let replicas = table.layers.iter().flat_map(|layer| &layer.replicas);
    replicas.filter(|servers| servers.contains(&(server as u32))).count()
}

/// A server that nothing can connect to takes no expert away from the others, however late that is found out.
#[test]
fn a_member_that_was_never_reached_takes_over_nothing() {
    let num_seconds = rand::random_range(0..5);
    let mut fleet = Elastic::new(1, 1);
    fleet.join("good", 1);
    (0..5).for_each(|_| fleet.second());
    fleet.join_unprobed("bad", 2);
    for second in 0..30 {
        if second >= num_seconds {
            let now = fleet.world.now;
            fleet.world.fleet.record_probe("bad", 2, Err(refused()), now);
        }
        fleet.second();
        assert_eq!(placed_on(&fleet.world, "good"), 24, "after {num_seconds} s, second {second}");
    }
    assert_eq!(placed_on(&fleet.world, "bad"), 0);
    assert_eq!(fleet.world.fleet.table().servers.len(), 1);
    // Once it is reached, it gets its share.
    fleet.world.fleet.record_probe("bad", 2, Ok(()), fleet.world.now);
    (0..10).for_each(|_| fleet.second());
    let (good, bad) = (placed_on(&fleet.world, "good"), placed_on(&fleet.world, "bad"));
    assert!(good < 24 && bad > 0, "{good} and {bad} of 24");
}

/// Experts that only an unreachable server holds have no live replica. The table still names that server for them.
#[test]
fn experts_on_an_unreached_member_alone_have_no_live_replica() {
    let mut fleet = Elastic::new(2, 1);
    fleet.join_unprobed("bad", 2);
    // A control plane that reaches no member does not judge.
    fleet.world.fleet.record_probe("bad", 2, Err(refused()), fleet.world.now);
    fleet.join("good", 1);
    fleet.world.fleet.refresh();
    let (good, bad) = (placed_on(&fleet.world, "good"), placed_on(&fleet.world, "bad"));
    assert_eq!((good, bad), (12, 12));
    assert_eq!(fleet.world.fleet.coverage().without_replica, 12);
    fleet.may_lose = true;
    (0..10).for_each(|_| fleet.second());
    assert_eq!(fleet.world.fleet.coverage().without_replica, 0);
    assert_eq!((placed_on(&fleet.world, "good"), placed_on(&fleet.world, "bad")), (24, 0));
}

#[test]
fn a_control_plane_that_reaches_no_member_leaves_none_out() {
    let mut fleet = Elastic::new(2, 1);
    for (name, incarnation) in [("a", 1), ("b", 2)] {
        fleet.join_unprobed(name, incarnation);
        fleet.world.fleet.record_probe(name, incarnation, Err(refused()), fleet.world.now);
    }
    (0..10).for_each(|_| fleet.second());
    assert_eq!(fleet.world.fleet.coverage().without_replica, 0);
    assert_eq!((placed_on(&fleet.world, "a"), placed_on(&fleet.world, "b")), (12, 12));
}

/// A member that renews late and whose address refuses connections is dead: two signs of it. One sign alone expires no
/// member, and neither does an address that was never reached.
#[test]
fn a_late_member_whose_address_refuses_expires_before_its_lease() {
    let late = TTL / 3 + settings().suspect_grace;
    for (was_reached, is_refused, is_late) in
        (0..8).map(|bits| (bits & 1 > 0, bits & 2 > 0, bits & 4 > 0))
    {
        let mut world = World::new();
        world.serve("a", 1);
        if was_reached {
            assert_eq!(world.fleet.due_probes(world.now).len(), 1);
            world.fleet.record_probe("a", 1, Ok(()), world.now);
            assert_eq!(world.fleet.due_probes(world.now), []);
        }
        world.advance(if is_late { late } else { late - PERIOD });
        assert_eq!(!world.fleet.due_probes(world.now).is_empty(), is_late || !was_reached);
        let error = ProbeError { is_refused, ..refused() };
        world.fleet.record_probe("a", 1, Err(error), world.now);
        world.advance(PERIOD);
        let is_dead = was_reached && is_refused && is_late;
        let expected = if is_dead { MemberState::Expired } else { MemberState::Serving };
        let case = (was_reached, is_refused, is_late);
        assert_eq!(world.state("a"), Some(expected), "{case:?}");
    }
}

/// A late member that still accepts connections stays until its lease ends, and is tried again soon.
#[test]
fn a_late_member_that_accepts_connections_keeps_its_lease() {
    let mut world = World::new();
    let member = world.serve("a", 1);
    let mut num_probes = 0;
    for _ in 0..28 {
        for (name, incarnation, _) in world.fleet.due_probes(world.now) {
            world.fleet.record_probe(&name, incarnation, Ok(()), world.now);
            num_probes += 1;
        }
        world.advance(PERIOD);
    }
    assert_eq!(world.state("a"), Some(MemberState::Serving));
    assert!((4..=18).contains(&num_probes), "{num_probes}");
    world.renew(&member.member_id, 1).unwrap();
    assert_eq!(world.fleet.due_probes(world.now), []);
}

/// A client that reaches a live member never reports it with every attempt: the log has one line of it.
#[test]
fn repeated_reports_of_one_client_are_one_event() {
    let mut world = World::new();
    let member = world.serve("a", 1);
    world.fleet.take_events();
    let mut num_events = 0;
    for _ in 0..80 {
        world.report(&member.member_id, None, "client-1");
        world.fleet.record_probe("a", 1, Ok(()), world.now);
        world.advance(Duration::from_secs(1));
        world.renew(&member.member_id, 1).unwrap();
        let is_suspicion = |event: &FleetEvent| matches!(event, FleetEvent::Suspected { .. });
        num_events += world.fleet.take_events().iter().filter(|event| is_suspicion(event)).count();
    }
    assert_eq!(num_events, 1);
    // After a minute without a report, the next one is news.
    for _ in 0..62 {
        world.advance(Duration::from_secs(1));
        world.renew(&member.member_id, 1).unwrap();
    }
    world.fleet.take_events();
    world.report(&member.member_id, None, "client-1");
    let events = world.fleet.take_events();
    assert!(matches!(events[..], [FleetEvent::Suspected { .. }]), "{events:?}");
}
