//! Updates of the model in virtual time. The tests call the steps that a term takes with its timers.

mod interrupted;
mod reversible;
mod world;

use std::sync::atomic::Ordering;

use EditionState::{Current, Draining, Next, Retiring};
use control_api::RegisterRequest;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use self::world::{Disk, World, model, refused, settings};
use super::*;
use crate::clock::Clock;

const TTL: Duration = Duration::from_secs(3);
const OLD: &str = "00aabbccddeeff11";
const NEW: &str = "11aabbccddeeff22";
/// Longer than any wait of a test.
const BOUND: Duration = Duration::from_secs(30);
/// Longer than a client may be between two watches.
const PAST_GRACE: Duration = Duration::from_secs(20);

#[tokio::test]
async fn an_update_runs_to_its_end() {
    let mut world = World::new();
    refused(world.add(NEW), &["no model yet"]).await;
    world.serve_all("old", OLD).await;
    refused(world.register("stranger", NEW), &["other weights", "switchyard model add"]).await;
    refused(world.add("XY"), &["hex digits"]).await;
    refused(world.add(OLD), &["is the current model"]).await;
    refused(world.switch(), &["no next model"]).await;
    refused(world.editions.abort(), &["no update"]).await;
    let client = world.follow(None);

    world.add(NEW).await.unwrap();
    world.add(NEW).await.unwrap();
    world.expect(&[(OLD, Current), (NEW, Next)]);
    refused(world.add("2222222222222222"), &["at most two models", NEW, "next"]).await;
    refused(world.register("stranger", "2222222222222222"), &["other weights"]).await;
    refused(world.switch(), &["no server of the next model"]).await;
    world.serve("new-0", NEW).await;
    refused(world.switch(), &["no live replica", "--when-complete"]).await;
    world.serve("new-1", NEW).await;
    let (old, new) = (world.boards.of(Some(OLD)).unwrap(), world.boards.of(Some(NEW)).unwrap());
    assert!(Arc::ptr_eq(&old, &world.boards.of(None).unwrap()));

    world.switch().await.unwrap();
    world.expect(&[(NEW, Current), (OLD, Retiring)]);
    assert!(Arc::ptr_eq(&new, &world.boards.of(None).unwrap()));
    assert!(Arc::ptr_eq(&old, &world.boards.of(Some(OLD)).unwrap()));
    refused(world.editions.abort(), &["the switch is done", OLD]).await;
    // A client between two watches is not gone.
    world.pass(PAST_GRACE).await;
    drop(client);
    world.pass(Duration::from_secs(5)).await;
    let client = world.follow(Some(OLD));
    world.pass(PAST_GRACE).await;
    world.expect(&[(NEW, Current), (OLD, Retiring)]);
    drop(client);
    world.pass(PAST_GRACE).await;
    world.expect(&[(NEW, Current), (OLD, Draining)]);
    let draining = world
        .editions
        .members()
        .into_iter()
        .filter(|member| member.state == control_api::MemberState::Draining);
    assert_eq!(draining.map(|member| member.name).collect::<Vec<_>>(), ["old-0", "old-1"]);
    // A supervisor starts a drained server again with its old model.
    refused(world.register("old-2", OLD), &["being drained", OLD]).await;
    let freshness = old.board.freshness();
    world.leave("old");
    world.pass(TTL).await;
    world.expect(&[(NEW, Current)]);
    assert!(!*freshness.borrow(), "streams of the old model go on");
    assert!(world.boards.of(Some(OLD)).is_none());
    assert_eq!(world.editions.status().experts_without_replica, 0);
    refused(world.register("old-0", OLD), &["other weights"]).await;
}

#[tokio::test]
async fn a_restart_finds_every_state() {
    let mut world = World::new();
    world.serve_all("old", OLD).await;
    world.add(NEW).await.unwrap();
    world = world.restart().await;
    world.expect(&[(OLD, Current), (NEW, Next)]);
    world.serve("new-0", NEW).await;
    let request = SwitchRequest { when_complete: true, ..SwitchRequest::default() };
    let list = world.editions.switch(&request).await.unwrap();
    assert!(list.editions[1].switches_when_complete);
    world = world.restart().await;
    assert!(world.editions.list().editions[1].switches_when_complete);
    let epochs = |world: &World| -> Vec<(String, u64)> {
        let list = world.editions.list().editions.into_iter();
        list.map(|info| (info.fingerprint.unwrap(), info.epoch)).collect()
    };
    let before = epochs(&world);
    world.serve("new-1", NEW).await;
    world.pass(TTL).await;
    world.expect(&[(NEW, Current), (OLD, Retiring)]);
    let after = epochs(&world);
    assert!(after[0].1 > before[1].1 && after[1].1 >= before[0].1, "{before:?} {after:?}");

    world = world.restart().await;
    world.expect(&[(NEW, Current), (OLD, Retiring)]);
    assert!(world.editions.list().editions[1].retires_within_ms.is_some());
    assert_eq!(world.names().len(), 4);
    assert_eq!(world.editions.list().editions[1].experts_without_replica, 0);
    // Every edition counts as followed at the start of a term.
    world.pass(Duration::from_secs(10)).await;
    world.expect(&[(NEW, Current), (OLD, Retiring)]);
    world.pass(PAST_GRACE).await;
    world.expect(&[(NEW, Current), (OLD, Draining)]);
    world = world.restart().await;
    world.expect(&[(NEW, Current), (OLD, Draining)]);
    world.leave("old");
    world.pass(TTL).await;
    world = world.restart().await;
    world.expect(&[(NEW, Current)]);

    // The first model comes back, with epochs above the ones that its clients may know.
    world.add(OLD).await.unwrap();
    let back = epochs(&world);
    assert!(back[1].1 > after[1].1, "{back:?} {after:?}");
}

#[tokio::test]
async fn a_server_takes_its_name_to_the_other_model() {
    let mut world = World::new();
    world.serve_all("server", OLD).await;
    world.add(NEW).await.unwrap();
    let first = std::mem::take(&mut world.servers);
    world.serve("server-0", NEW).await;
    let expected = [("server-0", NEW), ("server-1", OLD)];
    let expected = expected.map(|(name, model)| (name.to_owned(), model.to_owned()));
    assert_eq!(world.names(), expected);
    // The old process has lost its name in both models, also over a restart.
    world = world.restart().await;
    assert_eq!(world.names(), expected);
    let old = &first[0];
    let renewed = world.renew(old).unwrap_err().to_string();
    assert!(renewed.contains("another process"), "{renewed}");
    let mut again = RegisterRequest::new("server-0", "127.0.0.1:1", model(OLD));
    again.incarnation = old.incarnation;
    refused(world.register_as(again), &["another process"]).await;
    assert_eq!(world.names(), expected);
    // Both were heard, so no third process takes the name over while the second one lives.
    refused(world.register("server-0", OLD), &["in use"]).await;

    // The second server follows, and the fleet is one of the new model.
    world.renew(&first[1]).unwrap();
    world.serve("server-1", NEW).await;
    world.switch().await.unwrap();
    world.pass(PAST_GRACE + TTL).await;
    world.expect(&[(NEW, Current)]);
    assert_eq!(world.editions.members().len(), 2);
}

#[tokio::test]
async fn an_aborted_update_leaves_the_old_model() {
    let mut world = World::new();
    world.serve_all("server", OLD).await;
    world.add(NEW).await.unwrap();
    world.serve("server-0", NEW).await;
    world.editions.abort().await.unwrap();
    world.expect(&[(OLD, Current), (NEW, Draining)]);
    refused(world.add(NEW), &["draining", "wait until its servers have left"]).await;
    refused(world.switch(), &["no next model"]).await;
    // The server comes back with the old model.
    world.serve("server-0", OLD).await;
    world.pass(TTL).await;
    world.expect(&[(OLD, Current)]);
    assert_eq!(world.editions.status().experts_without_replica, 0);
    world.add(NEW).await.unwrap();
}

#[tokio::test]
async fn a_client_that_never_leaves_delays_the_end_for_a_bounded_time() {
    let mut world = World::new();
    world.serve_all("old", OLD).await;
    world.add(NEW).await.unwrap();
    world.serve_all("new", NEW).await;
    let _client = world.follow(Some(OLD));
    let request = SwitchRequest { retire_after_ms: Some(60_000), ..SwitchRequest::default() };
    world.editions.switch(&request).await.unwrap();
    world.pass(Duration::from_secs(50)).await;
    world.expect(&[(NEW, Current), (OLD, Retiring)]);
    let events = world.editions.events_after(0).events;
    assert!(events.iter().any(|event| event.text.contains("retires")), "{events:?}");
    world.pass(Duration::from_secs(15)).await;
    world.expect(&[(NEW, Current), (OLD, Draining)]);
}

#[tokio::test]
async fn a_retiring_model_can_become_the_current_one_again() {
    let mut world = World::new();
    world.serve_all("old", OLD).await;
    world.add(NEW).await.unwrap();
    world.serve_all("new", NEW).await;
    world.switch().await.unwrap();
    world.add(OLD).await.unwrap();
    world.expect(&[(NEW, Current), (OLD, Next)]);
    world.pass(PAST_GRACE).await;
    world.switch().await.unwrap();
    world.expect(&[(OLD, Current), (NEW, Retiring)]);
    world.pass(PAST_GRACE).await;
    world.leave("new");
    world.pass(TTL).await;
    world.expect(&[(OLD, Current)]);
}

/// Reports of control planes that follow keep an old model as their clients do.
#[tokio::test]
async fn clients_of_a_follower_count() {
    let mut world = World::new();
    world.serve_all("old", OLD).await;
    world.add(NEW).await.unwrap();
    world.serve_all("new", NEW).await;
    world.switch().await.unwrap();
    let report = |num_clients| {
        let clients = vec![ModelClients { fingerprint: OLD.to_owned(), num_clients }];
        ClientsReport { reporter: "http://follower:1".to_owned(), clients }
    };
    for _ in 0..30 {
        let list = world.editions.note_clients(report(3));
        assert_eq!((list.editions[0].num_clients, list.editions[1].num_clients), (0, 3));
        world.pass(Duration::from_secs(1)).await;
    }
    world.expect(&[(NEW, Current), (OLD, Retiring)]);
    world.editions.note_clients(report(0));
    world.pass(PAST_GRACE).await;
    world.expect(&[(NEW, Current), (OLD, Draining)]);
}

/// All servers are dead and the only client reconnects: a server of another model does not take its fleet away.
#[tokio::test]
async fn a_client_between_two_watches_keeps_the_model() {
    let mut world = World::new();
    world.serve_all("old", OLD).await;
    let client = world.follow(None);
    world.pass(PAST_GRACE).await;
    world.servers.clear();
    world.pass(TTL * 2).await;
    refused(world.register("new", NEW), &["other weights"]).await;
    drop(client);
    world.pass(TTL).await;
    refused(world.register("new", NEW), &["other weights"]).await;
    // A short watch counts, too.
    world.pass(PAST_GRACE - TTL * 2).await;
    drop(world.follow(None));
    refused(world.register("new", NEW), &["other weights"]).await;
    world.pass(PAST_GRACE).await;
    world.register("new", NEW).await.unwrap();
    world.expect(&[(NEW, Current)]);
}

/// Random servers, clients, operators and restarts. A name has one member, the first edition is the current one, and a
/// client of a model never sees its epoch go back.
#[tokio::test]
async fn random_updates_keep_their_promises() {
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let mut world = World::new();
    world.serve_all("server", OLD).await;
    let models = [OLD, NEW, "2222222222222222"];
    let mut epochs: HashMap<String, u64> = HashMap::new();
    let (mut clients, mut num_switches) = (Vec::new(), 0);
    for _ in 0..600 {
        let model = models[rng.random_range(0..models.len())];
        match rng.random_range(0..12u32) {
            // A server of the fleet restarts, perhaps with another model.
            0..4 => {
                let name = format!("server-{}", rng.random_range(0..4u32));
                if let Ok(server) = world.register(&name, model).await {
                    world.servers.retain(|old| old.name != name);
                    world.servers.push(server);
                }
            }
            4 => drop(world.add(model).await),
            5 => num_switches += usize::from(world.switch().await.is_ok()),
            6 => {
                let request = SwitchRequest { when_complete: true, ..SwitchRequest::default() };
                drop(world.editions.switch(&request).await);
            }
            7 if rng.random_bool(0.3) => drop(world.editions.abort().await),
            8 => clients.extend(world.follow(Some(model))),
            9 => clients.clear(),
            10 => {
                clients.clear();
                world = world.restart().await;
            }
            _ => {
                // Servers that drain leave.
                let members = world.editions.members();
                for member in members {
                    if member.state == control_api::MemberState::Draining {
                        world.servers.retain(|server| server.id != member.member_id);
                        world.editions.leave(&member.member_id).unwrap();
                    }
                }
                world.pass(Duration::from_secs(rng.random_range(1..30))).await;
            }
        }
        let list = world.editions.list().editions;
        assert!(list.len() <= 2 && list[0].state == Current, "{list:?}");
        assert!(list.iter().filter(|info| info.state == Current).count() == 1, "{list:?}");
        for info in list {
            let Some(fingerprint) = info.fingerprint else { continue };
            let last = epochs.entry(fingerprint).or_default();
            assert!(info.epoch >= *last, "epoch {} after {last}", info.epoch);
            *last = info.epoch;
        }
        let mut names: Vec<_> = world.names().into_iter().map(|(name, _)| name).collect();
        let num_names = names.len();
        names.dedup();
        assert_eq!(names.len(), num_names, "{names:?}");
        for server in &world.servers {
            world.renew(server).unwrap();
        }
    }
    println!("{num_switches} switches");
}

/// Servers renew after a third of a lease, or sooner if tickets end sooner. A key must not sign before each of them has
/// done so.
#[tokio::test]
async fn a_new_leader_signs_no_ticket_before_all_servers_have_renewed_their_leases() {
    let mut world = World::new();
    world.serve_all("server", OLD).await;
    let World { disk, mut tasks, clock, boards, .. } = world;
    tasks.shutdown().await;
    for lease_ttl in [TTL, Duration::from_secs(30), Duration::from_secs(3600)] {
        let settings = settings(lease_ttl, &clock, &boards);
        let term = Editions::restore(settings.clone(), Box::new(disk.clone())).unwrap();
        let tickets = &term.editions.tickets;
        let (wait, life) = (tickets.wait(clock.now()), settings.ticket_life);
        let renewal = (lease_ttl / 3).min(Duration::from_millis(tickets.keys().refresh_ms));
        assert!(wait > renewal, "{wait:?} of {lease_ttl:?}");
        assert!(wait < lease_ttl && wait <= life / 4, "{wait:?} of {lease_ttl:?} and {life:?}");
    }
}
