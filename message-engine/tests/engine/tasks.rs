//! Awaited calls must leave their executor to other tasks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use switchyard_message_engine::engine::{Connection, Engine, EngineConfig};
use switchyard_message_engine::fabric::cma::CmaFabric;

use crate::common::{TestTransport, config, memory_of, pair_of, poisoned, soon};
use crate::hooked::HookedFabric;

const NUM_PARTS: u64 = 40;

/// A flag that blocks the engine's thread in its next round while it is set, and settings with a short queue.
fn brief_queue() -> (Arc<AtomicBool>, EngineConfig) {
    let is_held = Arc::new(AtomicBool::new(false));
    let theirs = Arc::clone(&is_held);
    let before_poll = Box::new(move || {
        while theirs.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_micros(100));
        }
    });
    let fabric = HookedFabric { before_poll, ..HookedFabric::new(CmaFabric::new().unwrap()) };
    let fabrics: Vec<Box<dyn p2p_core::fabric::Fabric>> = vec![Box::new(fabric)];
    (is_held, EngineConfig { fabrics, queue_len: 4, ..EngineConfig::local() })
}

/// Unblocks the engine's thread once this task has been polled often enough.
async fn release_after_some_turns(is_held: &AtomicBool) {
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    is_held.store(false, Ordering::SeqCst);
}

/// More commands than the queue has room for.
fn fill_the_queue(connection: &Connection) {
    while let Ok(transfer) = connection.start_notify(b"", soon()) {
        drop(transfer);
    }
}

#[tokio::test(flavor = "current_thread")]
async fn a_vector_that_waits_for_room_lets_other_tasks_go_on() {
    let (is_held, here) = brief_queue();
    let pair = pair_of(here, config(TestTransport::Cma));
    let source = memory_of(&pair.here, &[7; NUM_PARTS as usize]);
    let target = poisoned(&pair.there, NUM_PARTS as usize);
    let parts = |memory: &switchyard_message_engine::engine::MemoryRegion| -> Vec<_> {
        (0..NUM_PARTS).map(|at| memory.span(at, 1).unwrap()).collect()
    };
    let receive = pair.back.start_recvv(&parts(&target), soon()).unwrap();
    let spans = parts(&source);
    is_held.store(true, Ordering::SeqCst);
    let (sent, ()) =
        tokio::join!(pair.out.sendv_async(&spans, soon()), release_after_some_turns(&is_held));
    assert_eq!(sent, Ok(NUM_PARTS));
    assert_eq!(receive.await, Ok(NUM_PARTS));

    // If the future is dropped half-way, the other parts fail, and nothing stays behind.
    is_held.store(true, Ordering::SeqCst);
    let brief =
        tokio::time::timeout(Duration::from_millis(20), pair.out.sendv_async(&spans, soon()));
    assert!(brief.await.is_err(), "there was room");
    is_held.store(false, Ordering::SeqCst);
    crate::common::until("the end of its parts", || pair.here.stats().num_transfers == 0);
}

#[tokio::test(flavor = "current_thread")]
async fn connecting_while_there_is_no_room_lets_other_tasks_go_on() {
    let (is_held, here) = brief_queue();
    let pair = pair_of(here, config(TestTransport::Cma));
    let third = Engine::start(config(TestTransport::Cma)).unwrap();
    is_held.store(true, Ordering::SeqCst);
    fill_the_queue(&pair.out);
    let late = Instant::now() + Duration::from_secs(20);
    let (found, ()) = tokio::join!(
        pair.here.connect_async(third.endpoint().addr, late),
        release_after_some_turns(&is_held)
    );
    assert_eq!(found.unwrap().peer().engine_id, third.endpoint().engine_id);
}
