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
