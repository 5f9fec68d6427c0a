//! Threads that wait for something else take turns at polling for completions, however many they are.

use std::mem::offset_of;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::driver;
use switchyard_softnic::abi::{CQ_COLLAPSED, QueueHandle, QueueState};

/// Of `takes_poll_turn` in `comm/mlx5/memory.h`.
const TICK_NS: u128 = 2048;
const NUM_WAITING: usize = 4;
const NUM_POLLS: u64 = 2000;

#[test]
fn one_thread_polls_at_a_time_and_one_always_does() {
    let Some(driver) = driver("product") else { return };
    let (polled_at, num_polls) = (AtomicU64::new(0), AtomicU64::new(0));
    let start = Instant::now();
    let limit = start + Duration::from_secs(60);
    std::thread::scope(|scope| {
        for _ in 0..NUM_WAITING {
            scope.spawn(|| {
                while num_polls.load(Ordering::Relaxed) < NUM_POLLS {
                    // SAFETY: every access to the word is atomic.
                    if unsafe { (driver.poll_turn)(polled_at.as_ptr()) } != 0 {
                        num_polls.fetch_add(1, Ordering::Relaxed);
                    }
                    assert!(Instant::now() < limit, "{num_polls:?} polls in a minute");
                }
            });
        }
    });
    // No two in the same tick, and the first may come at the end of one.
    let most = start.elapsed().as_nanos() / TICK_NS + 2;
    let found = u128::from(num_polls.load(Ordering::Relaxed));
    assert!(found <= most, "{found} polls, at most {most} in that time");
}

/// The states after a day without a waiting thread, and after the clock's wrap.
#[test]
fn an_old_poll_or_one_of_another_clock_delays_no_thread() {
    let Some(driver) = driver("product") else { return };
    for before in [0, 1, u64::MAX >> 1, u64::MAX] {
        let mut polled_at = before;
        // SAFETY: the word is this test's.
        assert_eq!(unsafe { (driver.poll_turn)(&raw mut polled_at) }, 1, "{before:#x}");
        assert!(polled_at != before);
    }
}

/// An error completion takes the queue out of service in the words that posters read and in those that the host
/// reads.
#[test]
fn the_first_error_is_told_to_the_host() {
    let Some(driver) = driver("product") else { return };
    // Bytes 54, 55 and 63: vendor syndrome, syndrome and opcode of a request's error.
    let cqe = Line([const { AtomicU8::new(0) }; 64]);
    for (byte, value) in [(54, 0x77), (55, 0x13), (63, 0xd0)] {
        cqe.0[byte].store(value, Ordering::Relaxed);
    }
    let state: [AtomicU64; size_of::<QueueState>() / 8] = [const { AtomicU64::new(0) }; _];
    let host_error = AtomicU64::new(0);
    let handle = QueueHandle {
        cq: (&raw const cqe).expose_provenance() as u64,
        state: state.as_ptr().expose_provenance() as u64,
        host_error: host_error.as_ptr().expose_provenance() as u64,
        sq_depth: 128,
        cq_depth: 1,
        flags: CQ_COLLAPSED,
        ..QueueHandle::default()
    };
    let error = &state[offset_of!(QueueState, error) / 8];
    // SAFETY: handle, completion and state are this test's.
    let poll = |handle: &QueueHandle| unsafe { (driver.poll)((&raw const *handle).cast()) };
    poll(&handle);
    let first = error.load(Ordering::Relaxed);
    assert_eq!(first & 0xffff, 0x1303, "{first:#x}");
    assert_eq!(host_error.load(Ordering::Relaxed), first);
    // Later completions change neither word, and no thread needs a notice.
    cqe.0[55].store(5, Ordering::Relaxed);
    poll(&handle);
    assert_eq!([error.load(Ordering::Relaxed), host_error.load(Ordering::Relaxed)], [first; 2]);
    error.store(0, Ordering::Relaxed);
    poll(&QueueHandle { host_error: 0, ..handle });
    assert_eq!(error.load(Ordering::Relaxed) & 0xffff, 0x0503);
    assert_eq!(host_error.load(Ordering::Relaxed), first);
}

/// As completions lie.
#[repr(align(64))]
struct Line([AtomicU8; 64]);
