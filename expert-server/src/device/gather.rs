//! For whom a batch waits.
//!
//! Clients in closed loops that once alternate would alternate for ever, each finding the server busy with
//! the other; and clients of several servers that alternate in different turns keep these in different
//! turns. A merged batch takes about as long as a single one, so waiting for somebody is worth it up to a
//! good part of a batch's length, if he comes. Who comes is told by his own rhythm: whoever was answered
//! just now may be back before half a batch has passed, and whoever was not is not waited for. (The kernel
//! sees who was in the batch before; this side says whom it may wait for, and how long.)
//!
//! A client that was waited for in vain too often, because it thinks for longer, works on another layer or
//! is gone, is not waited for any more; now and then one batch tries again, ever more rarely.

use std::time::Duration;

use kernels::abi::{Gather, MAX_PEERS};

use crate::device::DeviceOptions;

/// Learns from the last batches whom the next ones wait for.
#[derive(Debug)]
pub(super) struct Gathering {
    most: Duration,
    last_compute: Duration,
    seats: [Rhythm; MAX_PEERS],
}

/// What is known of the client in a seat.
#[derive(Debug, Clone, Copy)]
struct Rhythm {
    /// Part of the waits for it that were not in vain, the latest counting most.
    trust: f32,
    /// Batches until it is waited for again; 0 while it is.
    paused: u32,
    /// The next such pause.
    next_pause: u32,
}

impl Rhythm {
    /// Somebody new is waited for.
    const NEW: Self = Self { trust: 1.0, paused: 0, next_pause: FIRST_PAUSE };

    fn note(&mut self, has_come: bool) {
        self.trust += (f32::from(u8::from(has_come)) - self.trust) * LATEST;
        if has_come {
            self.next_pause = FIRST_PAUSE;
        } else if self.trust < LEAST_TRUST {
            self.paused = self.next_pause;
            self.next_pause = (self.next_pause * 2).min(LONGEST_PAUSE);
        }
    }
}

impl Gathering {
    pub(super) const fn new(options: &DeviceOptions) -> Self {
        Self { most: options.gather, last_compute: Duration::ZERO, seats: [Rhythm::NEW; MAX_PEERS] }
    }

    /// Whom of those in seats the next batch may wait for, and how long from its begin on.
    pub(super) fn wish(&self, taken: u32) -> Gather {
        let within = self.most.min(self.last_compute / SHARE);
        let within_ns = u32::try_from(within.as_nanos()).unwrap_or(u32::MAX);
        if within_ns == 0 {
            return Gather::default();
        }
        let welcome = self.seats.iter().enumerate().filter(|(_, seat)| seat.paused == 0);
        // Who has just left was in the last batch, as kernels see it.
        let clients = taken & welcome.fold(0, |mask, (idx, _)| mask | 1 << idx);
        Gather { clients, within_ns }
    }

    /// Takes note of a batch that had these clients and waited for those that were expected.
    pub(super) fn note(&mut self, clients: u32, expected: u32, compute: Duration) {
        self.last_compute = compute;
        for (idx, seat) in self.seats.iter_mut().enumerate() {
            seat.paused = seat.paused.saturating_sub(1);
            if expected >> idx & 1 != 0 {
                seat.note(clients >> idx & 1 != 0);
            }
        }
    }

    /// Somebody else has this seat now.
    pub(super) fn forget(&mut self, seat: usize) {
        if let Some(seat) = self.seats.get_mut(seat) {
            *seat = Rhythm::NEW;
        }
    }
}

/// A batch waits for this part of the last one's length at most.
const SHARE: u32 = 2;
/// Weight of the latest wait in the trust.
const LATEST: f32 = 0.25;
/// A wait of half a batch that saves a whole one pays from a third on.
const LEAST_TRUST: f32 = 1.0 / 3.0;
/// Batches between two trials.
const FIRST_PAUSE: u32 = 16;
const LONGEST_PAUSE: u32 = 256;

#[cfg(test)]
mod simulation;

#[cfg(test)]
mod tests {
    use kernels::gpu::DeviceName;

    use super::*;

    const COMPUTE: Duration = Duration::from_micros(400);

    fn gathering(gather: Duration) -> Gathering {
        Gathering::new(&DeviceOptions { gather, ..DeviceOptions::new(DeviceName::Emulated(0)) })
    }

    fn waits_for(gathering: &Gathering, seat: u32) -> bool {
        gathering.wish(u32::MAX).clients >> seat & 1 != 0
    }

    #[test]
    fn a_wait_is_half_a_batch_at_most_and_no_longer_than_allowed() {
        let mut gathering = gathering(Duration::from_micros(150));
        assert_eq!(gathering.wish(u32::MAX), Gather::default());
        gathering.note(1, 0, Duration::from_micros(100));
        assert_eq!(gathering.wish(u32::MAX), Gather { clients: u32::MAX, within_ns: 50_000 });
        gathering.note(1, 0, COMPUTE);
        assert_eq!(gathering.wish(u32::MAX), Gather { clients: u32::MAX, within_ns: 150_000 });
    }

    #[test]
    fn who_stays_away_is_waited_for_ever_more_rarely_until_it_comes() {
        let mut gathering = gathering(Duration::from_millis(1));
        gathering.note(0b11, 0, COMPUTE);
        let mut waits = Vec::new();
        for batch in 0..2000u32 {
            let expected = gathering.wish(u32::MAX).clients & 0b11;
            assert_eq!(expected & 1, 1, "nobody else suffers");
            if expected & 0b10 != 0 {
                waits.push(batch);
            }
            gathering.note(0b01, expected, COMPUTE);
        }
        let gaps: Vec<u32> = waits.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert_eq!(gaps[..3], [1, 1, 1], "patience at first");
        assert_eq!(gaps[3..8], [17, 33, 65, 129, 257]);
        assert!(gaps[8..].iter().all(|gap| *gap == 257), "{gaps:?}");
        // It comes when it is tried again, and again: it is believed.
        while !waits_for(&gathering, 1) {
            gathering.note(0b01, 0b01, COMPUTE);
        }
        for _ in 0..3 {
            gathering.note(0b11, 0b11, COMPUTE);
            assert!(waits_for(&gathering, 1));
        }
        gathering.note(0b01, 0b11, COMPUTE);
        assert!(waits_for(&gathering, 1), "one miss is forgiven");
    }

    #[test]
    fn a_seat_begins_anew_with_its_next_client() {
        let mut gathering = gathering(Duration::from_millis(1));
        (0..10).for_each(|_| gathering.note(0b01, 0b11, COMPUTE));
        assert!(!waits_for(&gathering, 1));
        gathering.forget(1);
        assert!(waits_for(&gathering, 1));
    }

    #[test]
    fn nobody_is_waited_for_in_an_empty_seat() {
        let mut gathering = gathering(Duration::from_millis(1));
        gathering.note(0b111, 0, COMPUTE);
        assert_eq!(gathering.wish(0b101).clients, 0b101, "the client in the middle has left");
    }

    #[test]
    fn without_time_nobody_is_waited_for() {
        let mut gathering = gathering(Duration::ZERO);
        for mask in [1, 2, 3] {
            gathering.note(mask, 0, COMPUTE);
            assert_eq!(gathering.wish(u32::MAX), Gather::default());
        }
    }
}
