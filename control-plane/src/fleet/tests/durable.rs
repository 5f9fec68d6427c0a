//! Restarts from the stored state, and epochs over them.

use super::*;

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
