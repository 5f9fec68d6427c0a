//! One peer that floods a hub, and one with little traffic.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use switchyard_message_engine::engine::{Engine, EngineConfig};

use crate::common::{TestTransport, config, memory_of, poisoned, soon};

const FLOOD_BYTES: usize = 32 << 20;
/// Bytes that one connection of the `tcp` fabric moves before the others get their turn.
const TURN_BYTES: usize = 1 << 20;

/// However fast the flood is, the hub serves all other peers after each of its turns. The test counts rounds of the
/// thread: a connection moves one turn's worth in each.
#[test]
fn a_flood_leaves_rounds_to_others() {
    // The thread spins, because rounds of a thread that sleeps in between prove nothing.
    let spins = EngineConfig { spin: Duration::from_secs(3600), ..config(TestTransport::Tcp) };
    let hub = Engine::start(spins).unwrap();
    let (much, little) = (
        Engine::start(config(TestTransport::Tcp)).unwrap(),
        Engine::start(config(TestTransport::Tcp)).unwrap(),
    );
    let flood = much.connect(hub.endpoint().addr, soon()).unwrap();
    let flooded = hub.accept(soon()).unwrap();
    let small = little.connect(hub.endpoint().addr, soon()).unwrap();
    let back = hub.accept(soon()).unwrap();
    let source = memory_of(&much, &vec![1; FLOOD_BYTES]);
    let target = poisoned(&hub, FLOOD_BYTES);
    let remote = flooded.advertise(&target.span(0, FLOOD_BYTES as u64).unwrap()).unwrap();
    let whole = source.span(0, FLOOD_BYTES as u64).unwrap();
    let (word, answer) = (memory_of(&little, &[2; 64]), poisoned(&hub, 64));
    let cell = back.advertise(&answer.span(0, 64).unwrap()).unwrap();
    let is_over = AtomicBool::new(false);
    let rounds_before = hub.stats().num_rounds;
    let num_floods = std::thread::scope(|scope| {
        let flooding = scope.spawn(|| {
            let mut num_floods = 0;
            // Two transfers at a time keep the connection busy.
            let mut next = flood.start_write(&whole, &remote, soon()).unwrap();
            loop {
                let after = flood.start_write(&whole, &remote, soon()).unwrap();
                next.wait().unwrap();
                num_floods += 1;
                next = after;
                if is_over.load(Ordering::Relaxed) && num_floods >= 4 {
                    next.wait().unwrap();
                    return num_floods + 1;
                }
            }
        });
        // Small transfers of every kind get through during the flood.
        for nth in 0..200u8 {
            word.copy_in(0, &[nth; 64]).unwrap();
            small.write(&word.span(0, 64).unwrap(), &cell, soon()).unwrap();
            let mut found = [0; 64];
            answer.copy_out(0, &mut found).unwrap();
            assert_eq!(found, [nth; 64]);
            small.notify(&[nth], soon()).unwrap();
            assert_eq!(hub.next_notification(soon()).unwrap().bytes, [nth]);
            back.send(&answer.span(0, 64).unwrap(), soon()).unwrap();
            small.recv(&word.span(0, 64).unwrap(), soon()).unwrap();
        }
        is_over.store(true, Ordering::Relaxed);
        flooding.join().unwrap()
    });
    let rounds = hub.stats().num_rounds - rounds_before;
    let turns = (num_floods * FLOOD_BYTES / TURN_BYTES) as u64;
    println!("{num_floods} floods in {rounds} rounds, {turns} at the least");
    assert!(rounds >= turns, "{rounds} rounds for {turns} turns");
}
