//! When a batch waits for further clients.
//!
//! Clients in closed loops that once alternate would alternate for ever: each finds the server busy with
//! the other. A batch that waits a small share of its own length for everybody who was active lately
//! brings them together, and what is answered together comes back together. Where that does not help,
//! because clients think for longer than that, it is given up for a while.

use std::time::Duration;

use super::options::DeviceOptions;

/// Decides from the last batches whether the next one waits.
#[derive(Debug)]
pub(super) struct Gathering {
    most: Duration,
    masks: [u32; LOOK_BACK],
    num_batches: usize,
    last_compute: Duration,
    num_misses: u32,
    num_paused: u32,
}

/// What the next batch waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Wish {
    /// Clients.
    pub(super) min_ready: u32,
    /// Longest time from the first one's frame, one of a few values.
    pub(super) gather_ns: u32,
}

impl Gathering {
    pub(super) fn new(options: &DeviceOptions) -> Self {
        Self {
            most: options.gather,
            masks: [0; LOOK_BACK],
            num_batches: 0,
            last_compute: Duration::ZERO,
            num_misses: 0,
            num_paused: 0,
        }
    }

    /// What the next batch should wait for.
    pub(super) fn wish(&self) -> Wish {
        let alone = Wish { min_ready: 1, gather_ns: 0 };
        let num_active = self.masks.iter().fold(0, |all, mask| all | mask).count_ones();
        if num_active < 2 || self.num_paused > 0 {
            return alone;
        }
        let bound = self.most.min(self.last_compute / SHARE);
        let bound_ns = u32::try_from(bound.as_nanos()).unwrap_or(u32::MAX);
        // Few values, because each is a recorded graph of its own.
        match STEPS_NS.into_iter().rev().find(|step| *step <= bound_ns) {
            Some(gather_ns) => Wish { min_ready: num_active, gather_ns },
            None => alone,
        }
    }

    /// Takes note of a batch that began with `wish` and had the clients of `mask`.
    pub(super) fn note(&mut self, wish: Wish, mask: u32, compute: Duration) {
        self.masks[self.num_batches % LOOK_BACK] = mask;
        self.num_batches += 1;
        self.last_compute = compute;
        self.num_paused = self.num_paused.saturating_sub(1);
        if wish.gather_ns == 0 {
            return;
        }
        if mask.count_ones() > 1 {
            self.num_misses = 0;
        } else {
            self.num_misses += 1;
            if self.num_misses >= MOST_MISSES {
                (self.num_misses, self.num_paused) = (0, PAUSE_BATCHES);
            }
        }
    }
}

/// Batches whose clients count as active.
const LOOK_BACK: usize = 8;
/// A batch waits for this part of the last one's length at most.
const SHARE: u32 = 5;
const STEPS_NS: [u32; 6] = [2_000, 5_000, 10_000, 25_000, 50_000, 100_000];
/// So many batches in a row that waited in vain end the waiting for a while.
const MOST_MISSES: u32 = 8;
const PAUSE_BATCHES: u32 = 128;

#[cfg(test)]
mod tests {
    use kernels::gpu::DeviceName;

    use super::*;

    fn gathering(gather: Duration) -> Gathering {
        Gathering::new(&DeviceOptions { gather, ..DeviceOptions::new(DeviceName::Emulated(0)) })
    }

    #[test]
    fn alternating_clients_are_waited_for_within_a_share_of_a_batch() {
        let mut gathering = gathering(Duration::from_micros(60));
        let compute = Duration::from_micros(400);
        for mask in [0b01, 0b01] {
            let wish = gathering.wish();
            assert_eq!(wish, Wish { min_ready: 1, gather_ns: 0 });
            gathering.note(wish, mask, compute);
        }
        gathering.note(gathering.wish(), 0b10, compute);
        // A fifth is 80 us, of which 60 are allowed, of which 50 is a step.
        assert_eq!(gathering.wish(), Wish { min_ready: 2, gather_ns: 50_000 });
        gathering.note(gathering.wish(), 0b11, Duration::from_micros(30));
        assert_eq!(gathering.wish(), Wish { min_ready: 2, gather_ns: 5_000 });
        gathering.note(gathering.wish(), 0b11, Duration::from_micros(5));
        assert_eq!(gathering.wish(), Wish { min_ready: 1, gather_ns: 0 });
    }

    #[test]
    fn waiting_in_vain_ends_for_a_while_and_is_tried_again() {
        let mut gathering = gathering(Duration::from_micros(100));
        let compute = Duration::from_micros(400);
        let mut num_waits = 0;
        for batch in 0..2 * PAUSE_BATCHES {
            let wish = gathering.wish();
            num_waits += u32::from(wish.gather_ns > 0);
            gathering.note(wish, 1 << (batch % 2), compute);
        }
        assert!((MOST_MISSES..=2 * MOST_MISSES).contains(&num_waits), "{num_waits}");
    }

    #[test]
    fn without_time_nobody_is_waited_for() {
        let mut gathering = gathering(Duration::ZERO);
        for mask in [1, 2, 3] {
            let wish = gathering.wish();
            assert_eq!(wish.gather_ns, 0);
            gathering.note(wish, mask, Duration::from_millis(1));
        }
    }
}
