//! Answers that arrive after the device's timeout, so that it resends the request.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use p2p_core::endpoint::Endpoint;
use p2p_core::{Region, RemoteRange, SlotKey};
use switchyard_verbs::{VerbsConfig, VerbsNetwork};

use crate::common::{LIMIT, is_possible, layout, pair, word};

/// Number of resends by Soft-RoCE so far. `None` on another device.
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
        // The answering side must wait for a processor now and then.
        for _ in 0..3 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let (mut num_late, mut round) = (0, 0);
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end && round < MOST_ROUNDS {
            round += 1;
            let src = RemoteRange { key: SlotKey, offset: 0, len: 64 };
            let dst = RemoteRange { key: SlotKey, offset: flag, len: 8 };
            // SAFETY: no code reads it.
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
                break;
            }
        }
        is_over.store(true, Ordering::Relaxed);
        println!("{num_late} late answers in {round} rounds");
        // Each flag is applied once, regardless of the number of resends.
        assert_eq!(word(&b.slot, flag), round);
        if begin.is_some() && num_late < ENOUGH {
            let reason = format!("only {num_late} answers were late in {PATIENCE:?}");
            test_support::skip("late-answers", &reason);
        }
    });
}

const LEAST_ROUNDS: u64 = 200;
const MOST_ROUNDS: u64 = 20_000;
/// The scheduler determines how long it takes until answers come late.
const PATIENCE: Duration = Duration::from_secs(60);
/// One in four of them falls on a flag.
const ENOUGH: u64 = 20;
