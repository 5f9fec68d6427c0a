//! Answers that come later than a device waits for them, so that it asks again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use p2p_core::backend::verbs::{VerbsConfig, VerbsNetwork};
use p2p_core::endpoint::Endpoint;
use p2p_core::{Region, RemoteRange, SlotKey};

use crate::common::{LIMIT, is_possible, layout, pair, word};

/// How often Soft-RoCE has asked again so far. `None`: another device.
fn num_asked_again(network: &VerbsNetwork) -> Option<u64> {
    let device = network.ports().split(':').next()?;
    let counters = format!("/sys/class/infiniband/{device}/ports/1/hw_counters");
    let text = std::fs::read_to_string(format!("{counters}/completer_retry_err")).ok()?;
    text.trim().parse().ok()
}

#[test]
fn flags_behind_gets_survive_late_answers() {
    if !is_possible() {
        return;
    }
    // 1 ms, which Soft-RoCE rounds up to a tick of the clock.
    let config = VerbsConfig { ack_timeout: 8, ..VerbsConfig::default() };
    let network = VerbsNetwork::open(config).unwrap();
    let layout = layout(64 << 10);
    let (mut a, b) = pair(&network, &layout);
    let into = Region::anonymous(4096).unwrap();
    a.endpoint.register(&into).unwrap();
    let flag = b.slot.len() - 4096;
    let begin = num_asked_again(&network);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Whoever answers has to wait for a processor now and then.
        for _ in 0..3 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let mut num_late = 0;
        for round in 1..=MOST_ROUNDS {
            let src = RemoteRange { key: SlotKey, offset: 0, len: 64 };
            let dst = RemoteRange { key: SlotKey, offset: flag, len: 8 };
            // SAFETY: nobody reads it.
            let result = unsafe { a.endpoint.get(into.range(0, 64).unwrap(), src) }
                .and_then(|()| a.endpoint.add_flag(dst, 1));
            let quiet = a.endpoint.quiet(Instant::now() + LIMIT);
            if result.is_err() || quiet.is_err() {
                is_over.store(true, Ordering::Relaxed);
            }
            result.unwrap();
            quiet.unwrap();
            num_late = num_asked_again(&network).zip(begin).map_or(0, |(now, begin)| now - begin);
            if num_late >= ENOUGH && round >= LEAST_ROUNDS {
                assert_eq!(word(&b.slot, flag), round);
                break;
            }
        }
        is_over.store(true, Ordering::Relaxed);
        assert!(begin.is_none() || num_late >= ENOUGH, "only {num_late} answers were late");
    });
}

const LEAST_ROUNDS: u64 = 200;
const MOST_ROUNDS: u64 = 20_000;
/// One in four of them falls on a flag.
const ENOUGH: u64 = 20;
