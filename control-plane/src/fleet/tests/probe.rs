//! Attempts of the control plane to connect to members.

use super::elastic::Elastic;
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
    println!("found out after {num_seconds} s");
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
    for num_failures in 0..3 {
        fleet.world.fleet.refresh();
        let (good, bad) = (placed_on(&fleet.world, "good"), placed_on(&fleet.world, "bad"));
        assert_eq!((good, bad), (12, 12), "{num_failures}");
        // One failed attempt condemns no member.
        let without = if num_failures < 2 { 0 } else { 12 };
        assert_eq!(fleet.world.fleet.coverage().without_replica, without, "{num_failures}");
        fleet.world.fleet.record_probe("bad", 2, Err(refused()), fleet.world.now);
    }
    fleet.may_lose = true;
    (0..10).for_each(|_| fleet.second());
    assert_eq!(fleet.world.fleet.coverage().without_replica, 0);
    assert_eq!((placed_on(&fleet.world, "good"), placed_on(&fleet.world, "bad")), (24, 0));
}

/// A new leader reaches nothing until its network is up. Its first success condemns none of the members that it could not
/// reach before: each has two more attempts, and one that succeeds clears the member.
#[test]
fn attempts_before_the_first_success_do_not_count() {
    let mut world = World::new();
    let names = ["a", "b", "c", "d"];
    names.iter().for_each(|name| drop(world.serve(name, 1)));
    world.save();
    let (snapshot, _) = world.fleet.snapshot();
    let mut world = World::with(settings(), Some(snapshot));
    let coverage = world.fleet.coverage();
    assert_eq!((coverage.without_replica, coverage.under_replicated), (0, 0));
    let mut probe = |name, outcome: Result<(), ProbeError>| {
        world.fleet.record_probe(name, 1, outcome, world.now);
        world.fleet.refresh();
        (world.fleet.coverage(), world.fleet.members[name].can_take_over())
    };
    for name in names.iter().cycle().take(12) {
        assert_eq!(probe(name, Err(refused())), (coverage, true), "{name}");
    }
    assert_eq!(probe("a", Ok(())), (coverage, true));
    // Others free nothing for a member that may yet be left out.
    assert_eq!(probe("b", Err(refused())), (coverage, false));
    assert_eq!(probe("b", Ok(())), (coverage, true));
    assert_eq!(probe("c", Err(refused())), (coverage, false));
    let (less, _) = probe("c", Err(refused()));
    assert!(less.under_replicated > 0, "{less:?}");
    assert_eq!(probe("c", Ok(())), (coverage, true));
}

/// Members that answer nothing take every slot for seconds, and are due again soon. Each member has its turn all the same.
#[test]
fn members_that_answer_nothing_keep_no_other_one_waiting() {
    const NUM_MEMBERS: usize = 100;
    const SLOTS: usize = 32;
    let silence = Duration::from_secs(3);
    let mut world = World::with(FleetSettings { max_members: 1000, ..settings() }, None);
    let names: Vec<String> = (0..NUM_MEMBERS).map(|nth| format!("m{nth:03}")).collect();
    let members: Vec<_> = names.iter().map(|name| world.serve(name, 1).member_id).collect();
    let mut under_way: HashMap<String, Duration> = HashMap::new();
    let mut num_attempts: HashMap<String, u32> = HashMap::new();
    // Two rounds of all members.
    let rounds = 2 * silence * NUM_MEMBERS.div_ceil(SLOTS) as u32;
    let end = world.now + rounds + Duration::from_secs(2);
    while world.now < end {
        for (name, incarnation, _) in world.fleet.due_probes(world.now) {
            if under_way.len() < SLOTS && !under_way.contains_key(&name) {
                assert_eq!(incarnation, 1);
                under_way.insert(name, world.now + silence);
            }
        }
        world.advance(PERIOD);
        members.iter().for_each(|id| drop(world.renew(id, 1).unwrap()));
        let now = world.now;
        for (name, _) in under_way.extract_if(|_, until| *until <= now) {
            world.fleet.record_probe(&name, 1, Err(refused()), now);
            *num_attempts.entry(name).or_default() += 1;
        }
    }
    let least = names.iter().map(|name| num_attempts.get(name).copied().unwrap_or(0)).min();
    assert!(least >= Some(2), "{num_attempts:?}");
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

/// The outcome of an attempt that began before the member had another address.
#[test]
fn an_attempt_at_an_old_address_says_nothing_about_the_new_one() {
    for outcome in [Ok(()), Err(refused())] {
        let mut world = World::new();
        let member = world.serve("a", 1);
        let due = world.fleet.due_probes(world.now);
        let [(_, _, old)] = &*due else { panic!("{due:?}") };
        let mut request = World::request("a", 1);
        request.data_addr = "127.0.0.1:7001".to_owned();
        world.fleet.register(request, world.now).unwrap();
        world.ready(&member, 1);
        let expected = [("a".to_owned(), 1, "127.0.0.1:7001".to_owned())];
        assert_eq!(world.fleet.due_probes(world.now), expected);
        world.fleet.record_attempt(("a", 1), old, outcome, world.now);
        assert_eq!(world.fleet.due_probes(world.now), expected, "still due");
        world.fleet.record_attempt(("a", 1), "127.0.0.1:7001", Ok(()), world.now);
        assert_eq!(world.fleet.due_probes(world.now), []);
    }
}
