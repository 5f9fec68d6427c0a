//! Tells a thread that works or sleeps from one that does not come back from where it went.
//!
//! Threads call into transports' libraries, and a library may never return: libfabric's provider `shm`
//! waits for locks in memory that a killed peer can leave locked for ever. The thread cannot be freed
//! then, but whoever waits for it need not wait with it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The rounds of a thread that makes one every second at least.
#[derive(Debug)]
pub struct Pulse {
    num_rounds: AtomicU64,
    patience: Duration,
}

/// One waiter's observation of it.
#[derive(Debug)]
pub struct Watch {
    num_rounds: u64,
    num_looks: u32,
}

impl Pulse {
    /// Without a round for `patience` the thread counts as stuck.
    pub const fn new(patience: Duration) -> Self {
        Self { num_rounds: AtomicU64::new(0), patience }
    }

    /// One more round, of the thread itself.
    pub fn beat(&self) {
        let num_rounds = self.num_rounds.load(Ordering::Relaxed);
        self.num_rounds.store(num_rounds + 1, Ordering::Relaxed);
    }

    /// Rounds so far.
    pub fn num_rounds(&self) -> u64 {
        self.num_rounds.load(Ordering::Relaxed)
    }

    /// How long to wait between two looks.
    pub fn interval(&self) -> Duration {
        self.patience / NUM_LOOKS
    }

    /// Starts an observation.
    pub fn watch(&self) -> Watch {
        Watch { num_rounds: self.num_rounds(), num_looks: 0 }
    }
}

impl Watch {
    /// To be called after every [`interval`](Pulse::interval). True: the thread is stuck.
    ///
    /// Looks are counted instead of time, so that a process that was stopped as a whole does not blame
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
