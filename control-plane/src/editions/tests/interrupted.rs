//! Changes that a full or slow disk, a caller that leaves or the end of the process interrupts.

use std::sync::atomic::AtomicBool;

use super::*;
use crate::boards::Boards;
use crate::clock::ManualClock;

#[tokio::test]
async fn a_full_disk_changes_no_state() {
    let mut world = World::new();
    world.serve_all("old", OLD).await;
    world.add(NEW).await.unwrap();
    world.serve_all("new", NEW).await;
    world.disk.is_full.store(true, Ordering::Relaxed);
    refused(world.switch(), &["cannot be written"]).await;
    refused(world.editions.abort(), &["cannot be written"]).await;
    world.expect(&[(OLD, Current), (NEW, Next)]);
    world.disk.is_full.store(false, Ordering::Relaxed);
    world.switch().await.unwrap();
    world.disk.is_full.store(true, Ordering::Relaxed);
    world.pass(PAST_GRACE).await;
    world.expect(&[(NEW, Current), (OLD, Retiring)]);
    // The update goes on by itself.
    world.disk.is_full.store(false, Ordering::Relaxed);
    world.pass(TTL).await;
    world.expect(&[(NEW, Current), (OLD, Draining)]);
    world.leave("old");
    world.pass(TTL).await;
    world.disk.is_full.store(true, Ordering::Relaxed);
    refused(world.add(OLD), &["no space left"]).await;
    world.expect(&[(NEW, Current)]);
}

#[tokio::test]
async fn a_change_ends_without_its_caller() {
    let mut world = World::new();
    world.serve_all("old", OLD).await;
    world.interrupt(world.add(NEW)).await;
    world.expect(&[(OLD, Current), (NEW, Next)]);
    world.interrupt(world.editions.abort()).await;
    world.expect(&[(OLD, Current), (NEW, Draining)]);
    world = world.restart().await;
    world.expect(&[(OLD, Current), (NEW, Draining)]);
    world.pass(TTL).await;
    world.expect(&[(OLD, Current)]);

    world.add(NEW).await.unwrap();
    world.serve_all("new", NEW).await;
    world.interrupt(world.switch()).await;
    world.expect(&[(NEW, Current), (OLD, Retiring)]);
    world = world.restart().await;
    world.expect(&[(NEW, Current), (OLD, Retiring)]);
}

/// The end of a process cuts each step of an update off while the store writes. The next process goes on.
#[tokio::test]
async fn a_step_that_is_cut_off_goes_on_after_a_restart() {
    let mut world = World::new();
    world.serve_all("old", OLD).await;
    world.add(NEW).await.unwrap();
    let request = SwitchRequest { when_complete: true, ..SwitchRequest::default() };
    world.editions.switch(&request).await.unwrap();
    world.serve_all("new", NEW).await;
    world = world.cut_off().await;
    world.pass(TTL).await;
    world.expect(&[(NEW, Current), (OLD, Retiring)]);

    world.wait(PAST_GRACE);
    world = world.cut_off().await;
    world.pass(PAST_GRACE + TTL).await;
    world.expect(&[(NEW, Current), (OLD, Draining)]);

    world.leave("old");
    world = world.cut_off().await;
    world.pass(TTL).await;
    world.expect(&[(NEW, Current)]);
    assert!(world.names().iter().all(|(name, _)| name.starts_with("new")), "{:?}", world.names());
}

/// During an update a write of the store delays the registrations that wait for it, and nothing else.
#[tokio::test]
async fn a_registration_that_waits_for_the_store_delays_no_other_member() {
    let mut world = World::new();
    world.serve_all("old", OLD).await;
    world.add(NEW).await.unwrap();
    world.disk.gate.shut();
    let is_blocked = async {
        while !world.disk.gate.has_waiter.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let registering = world.register("new-0", NEW);
    tokio::pin!(registering);
    tokio::select! {
        ended = &mut registering => panic!("the store does not block: {:?}", ended.map(|new| new.id)),
        blocked = tokio::time::timeout(BOUND, is_blocked) => blocked.unwrap(),
    }
    // Members renew, a known process registers again, and the update takes its steps.
    let server = &world.servers[0];
    world.renew(server).unwrap();
    let mut request = RegisterRequest::new(&server.name, "127.0.0.1:1", model(OLD));
    (request.incarnation, request.holds) = (server.incarnation, server.holds.clone());
    let again = tokio::time::timeout(BOUND, world.editions.register(request, None)).await;
    assert_eq!(again.expect("no wait for the store").unwrap().member_id, server.id);
    tokio::time::timeout(BOUND, world.editions.step()).await.expect("no wait").unwrap();
    world.disk.gate.open();
    registering.await.unwrap();
}

/// A store that hangs holds one task for each name, for a bounded time, however often a server tries again.
#[tokio::test]
async fn a_store_that_hangs_piles_up_no_registrations() {
    let world = World::new();
    world.disk.gate.shut();
    let num_users = Arc::strong_count(&world.editions);
    for _ in 0..20 {
        let registering = world.register("a", OLD);
        tokio::time::timeout(Duration::from_millis(5), registering).await.err().expect("a wait");
    }
    assert!(Arc::strong_count(&world.editions) <= num_users + 1);
    // The first task gives up and makes way for the next one.
    let registering = tokio::time::timeout(BOUND, world.register("a", OLD)).await;
    world.disk.gate.open();
    match registering.expect("a bounded wait") {
        Err(OperationError::ReadOnly { reason }) => {
            assert!(reason.contains("no write"), "{reason}")
        }
        other => panic!("{:?}", other.map(|server| server.id)),
    }
}

/// A clock that breaks.
#[derive(Debug)]
struct BrokenClock(AtomicBool);

impl Clock for BrokenClock {
    fn now(&self) -> Duration {
        assert!(!self.0.load(Ordering::Relaxed), "the clock is broken");
        Duration::ZERO
    }
}

/// A leader whose members would never expire must not go on.
#[tokio::test]
async fn a_panic_of_the_clock_ends_the_term() {
    let (clock, boards) = (Arc::new(ManualClock::new()), Arc::new(Boards::new()));
    let broken = Arc::new(BrokenClock(AtomicBool::new(false)));
    let settings =
        TermSettings { clock: Arc::clone(&broken) as _, ..settings(TTL, &clock, &boards) };
    let term = Editions::restore(settings, Box::new(Disk::default())).unwrap();
    let (_running, stopping) = watch::channel(false);
    let running = tokio::spawn(term.run(stopping.clone(), stopping));
    broken.0.store(true, Ordering::Relaxed);
    let ended = tokio::time::timeout(BOUND, running).await.expect("the term ends");
    assert!(ended.unwrap_err().is_panic());
}
