//! Those who wait for something else look at completions in turn, however many they are.

mod common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::driver;

/// Of `takes_look` in `comm/mlx5/memory.h`.
const TICK_NS: u128 = 2048;
const NUM_WAITING: usize = 4;
const NUM_LOOKS: u64 = 2000;

#[test]
fn one_looks_at_a_time_and_somebody_always_does() {
    let Some(driver) = driver("product") else { return };
    let (looked, num_looks) = (AtomicU64::new(0), AtomicU64::new(0));
    let start = Instant::now();
    let limit = start + Duration::from_secs(60);
    std::thread::scope(|scope| {
        for _ in 0..NUM_WAITING {
            scope.spawn(|| {
                while num_looks.load(Ordering::Relaxed) < NUM_LOOKS {
                    // SAFETY: everybody accesses the word atomically.
                    if unsafe { (driver.look)(looked.as_ptr()) } != 0 {
                        num_looks.fetch_add(1, Ordering::Relaxed);
                    }
                    assert!(Instant::now() < limit, "{num_looks:?} looks in a minute");
                }
            });
        }
    });
    // No two in the same tick, and the first may come at the end of one.
    let most = start.elapsed().as_nanos() / TICK_NS + 2;
    let found = u128::from(num_looks.load(Ordering::Relaxed));
    assert!(found <= most, "{found} looks, at most {most} in that time");
}

/// As after a day of nobody waiting, and where the clock begins anew.
#[test]
fn an_old_look_or_one_of_another_clock_holds_nobody_up() {
    let Some(driver) = driver("product") else { return };
    for before in [0, 1, u64::MAX >> 1, u64::MAX] {
        let mut looked = before;
        // SAFETY: the word is this test's.
        assert_eq!(unsafe { (driver.look)(&raw mut looked) }, 1, "{before:#x}");
        assert!(looked != before);
    }
}
