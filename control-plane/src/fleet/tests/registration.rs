//! Names and models of members that register.

use control_api::text::is_disruptive;

use super::*;

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

/// Operators pass names and addresses to commands.
#[test]
fn texts_that_could_be_options_or_control_a_terminal_are_refused() {
    let mut world = World::new();
    for name in
        ["--all", "-oProxyCommand=x", "", "a b", "a/b", "a;b", "a\u{202e}b", &"x".repeat(129)]
    {
        let request = RegisterRequest { name: name.to_owned(), ..World::request("a", 1) };
        let text = world.fleet.register(request, world.now).unwrap_err().to_string();
        assert!(text.contains("member name"), "{name:?}: {text}");
    }
    let mut request = World::request("a", 1);
    request.data_addr = "-oProxyCommand:1".to_owned();
    let text = world.fleet.register(request, world.now).unwrap_err().to_string();
    assert!(text.contains("data_addr"), "{text}");
    for architecture in ["", "a\u{1b}[2J", "a\u{202e}b", &"x".repeat(129)] {
        let mut request = World::request("a", 1);
        request.model.architecture = architecture.to_owned();
        let text = world.fleet.register(request, world.now).unwrap_err().to_string();
        assert!(text.contains("architecture name"), "{text}");
        assert!(!text.contains(is_disruptive), "{text:?}");
    }
    for name in ["gpu-1.rack_2", "0", &"x".repeat(128)] {
        world.fleet.register(World::request(name, 1), world.now).unwrap();
    }
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

/// The name of a server stays its own for as long as expired members are kept, also if another model comes meanwhile.
#[test]
fn a_name_stays_bound_when_another_model_comes() {
    let (own, other) = ("aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb");
    let mut world = World::new();
    for (name, incarnation) in [("a", 1), ("b", 2), ("c", 3), ("d", 4)] {
        let request = World::request(name, incarnation);
        let joined = world.fleet.register_for(request, Some(own), world.now).unwrap();
        world.ready(&joined, incarnation);
    }
    assert!(world.fleet.coverage().is_complete());
    world.fleet.note_clients(false);
    world.advance(TTL * 2);
    let request = |name, incarnation| {
        let mut request = World::request(name, incarnation);
        request.model = ModelDescriptor {
            fingerprint: "deadbeefdeadbeef".to_owned(),
            moe_layers: vec![7],
            ..request.model
        };
        request
    };
    let register = |world: &mut World, name, incarnation, owner| {
        world.fleet.register_for(request(name, incarnation), Some(owner), world.now)
    };
    register(&mut world, "stranger", 9, other).unwrap();
    world.fleet.refresh();
    assert_eq!(world.fleet.model(), Some(&request("a", 1).model));
    let err = register(&mut world, "a", 10, other).unwrap_err();
    assert!(matches!(err, Refusal::NameBound { .. }), "{err}");
    // Its owner gets experts of the new model.
    let joined = register(&mut world, "a", 11, own).unwrap();
    assert!(joined.assignment.layers.iter().all(|entry| entry.layer == 7));
    world.save();
    world.advance(settings().expired_retention);
    register(&mut world, "b", 12, other).unwrap();
}
