//! Tells a thread that works or sleeps from a thread that is stuck in a call.
//!
//! Threads call into transports' libraries, and a library may never return. For example,
//! libfabric's provider `shm` waits for locks in memory, and a killed peer can leave these locked
//! for ever. The stuck thread cannot be freed, but other threads need not wait for it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Counts the rounds of a thread that makes at least one every second.
#[derive(Debug)]
pub struct Pulse {
    num_rounds: AtomicU64,
    patience: Duration,
}

/// One waiter's observation of a [`Pulse`].
#[derive(Debug)]
pub struct Watch {
    num_rounds: u64,
    num_looks: u32,
}

impl Pulse {
    /// Makes a counter. A thread without a round for `patience` counts as stuck.
    pub const fn new(patience: Duration) -> Self {
        Self { num_rounds: AtomicU64::new(0), patience }
    }

    /// Counts one more round. For the thread itself.
    pub fn beat(&self) {
        let num_rounds = self.num_rounds.load(Ordering::Relaxed);
        self.num_rounds.store(num_rounds + 1, Ordering::Relaxed);
    }

    /// Rounds so far.
    pub fn num_rounds(&self) -> u64 {
        self.num_rounds.load(Ordering::Relaxed)
    }

    /// Time to wait between two calls of [`Watch::finds_stuck`].
    pub fn interval(&self) -> Duration {
        self.patience / NUM_LOOKS
    }

    /// Starts an observation.
    pub fn watch(&self) -> Watch {
        Watch { num_rounds: self.num_rounds(), num_looks: 0 }
    }
}

impl Watch {
    /// Returns true if the thread is stuck. Call this after every [`interval`](Pulse::interval).
    ///
    /// This counts calls instead of time. So a process that was stopped as a whole does not blame
    /// its thread.
    pub fn finds_stuck(&mut self, pulse: &Pulse) -> bool {
        let num_rounds = pulse.num_rounds();
        let is_still = num_rounds == self.num_rounds;
        self.num_looks = if is_still { self.num_looks + 1 } else { 0 };
        self.num_rounds = num_rounds;
        self.num_looks >= NUM_LOOKS
    }
}

const NUM_LOOKS: u32 = 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_stillness_for_the_whole_time_is_stuck() {
        let pulse = Pulse::new(Duration::from_secs(1));
        let mut watch = pulse.watch();
        for _ in 0..3 {
            assert!((1..NUM_LOOKS).all(|_| !watch.finds_stuck(&pulse)));
            pulse.beat();
            assert!(!watch.finds_stuck(&pulse));
        }
        assert!((1..NUM_LOOKS).all(|_| !watch.finds_stuck(&pulse)));
        assert!(watch.finds_stuck(&pulse));
        assert_eq!(pulse.num_rounds(), 3);
    }
}
