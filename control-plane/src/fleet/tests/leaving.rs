//! Servers that leave a placement that follows the load.

use super::elastic::Elastic;
use super::*;

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
