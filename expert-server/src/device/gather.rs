//! The clients that a batch waits for.
//!
//! Clients in closed loops that once alternate would alternate for ever, because each finds the server busy
//! with the other. Clients of several servers that alternate in different orders keep the servers in
//! different orders. A merged batch takes about as long as a single one. So a wait for a client pays up to a
//! good part of a batch's duration, if the client returns in time. A client of the previous batch may return
//! before half a batch has passed. A client that was not in the previous batch is not waited for. The kernel
//! knows the clients of the previous batch; this policy says which of them it may wait for, and how long.
//!
//! The policy stops waiting for a client after too many waits in vain: the client may think for longer, work on
//! another layer or be gone. From time to time one batch tries again, more and more rarely.

use std::time::Duration;

use kernels::abi::{Gather, MAX_PEERS};

use super::DeviceOptions;

/// Learns from past batches which clients the next ones wait for.
#[derive(Debug)]
pub(super) struct GatherPolicy {
    most: Duration,
    last_compute: Duration,
    clients: [ReturnRate; MAX_PEERS],
}

/// How often the client at one index returned in time.
#[derive(Debug, Clone, Copy)]
struct ReturnRate {
    /// Share of the waits that succeeded. Later waits count more.
    rate: f32,
    /// Batches until the next wait for the client; 0 without a pause.
    paused: u32,
    /// Length of the next pause, in batches.
    next_pause: u32,
}

impl ReturnRate {
    /// A new client is waited for.
    const NEW: Self = Self { rate: 1.0, paused: 0, next_pause: FIRST_PAUSE };

    fn record(&mut self, has_returned: bool) {
        self.rate += (f32::from(u8::from(has_returned)) - self.rate) * LATEST_WEIGHT;
        if has_returned {
            self.next_pause = FIRST_PAUSE;
        } else if self.rate < MIN_RATE {
            self.paused = self.next_pause;
            self.next_pause = (self.next_pause * 2).min(LONGEST_PAUSE);
        }
    }
}

impl GatherPolicy {
    pub(super) const fn new(options: &DeviceOptions) -> Self {
        Self {
            most: options.gather,
            last_compute: Duration::ZERO,
            clients: [ReturnRate::NEW; MAX_PEERS],
        }
    }

    /// The clients of `occupied` that the next batch may wait for, and how long from its begin on.
    pub(super) fn next(&self, occupied: u32) -> Gather {
        if self.last_compute.is_zero() {
            return Gather::default();
        }
        let within = self.most.min(self.last_compute / SHARE + RETURN);
        let within_ns = u32::try_from(within.as_nanos()).unwrap_or(u32::MAX);
        if within_ns == 0 {
            return Gather::default();
        }
        let expected = self.clients.iter().enumerate().filter(|(_, client)| client.paused == 0);
        // Kernels may still see a client in the previous batch that has left the table since.
        let clients = occupied & expected.fold(0, |mask, (idx, _)| mask | 1 << idx);
        Gather { clients, within_ns }
    }

    /// Records a batch that had `clients` and waited for `expected`.
    pub(super) fn record(&mut self, clients: u32, expected: u32, compute: Duration) {
        self.last_compute = compute;
        for (idx, client) in self.clients.iter_mut().enumerate() {
            client.paused = client.paused.saturating_sub(1);
            if expected >> idx & 1 != 0 {
                client.record(clients >> idx & 1 != 0);
            }
        }
    }

    /// Starts over for a new client at this index.
    pub(super) fn reset(&mut self, idx: usize) {
        if let Some(client) = self.clients.get_mut(idx) {
            *client = ReturnRate::NEW;
        }
    }
}

/// A batch waits for at most the previous one's duration divided by this, and the time of a return.
const SHARE: u32 = 2;
/// A client's time from the last answer to its next frame at the server, if it has nothing else to do: the rest of
/// combine, dispatch and the link. A shorter wait would never meet a client whose batches are short.
const RETURN: Duration = Duration::from_micros(15);
/// Weight of the latest wait in the rate.
const LATEST_WEIGHT: f32 = 0.25;
/// A wait of half a batch that saves a whole one pays from this rate on.
const MIN_RATE: f32 = 1.0 / 3.0;
/// Length of the first pause, in batches.
const FIRST_PAUSE: u32 = 16;
/// Length of the longest pause, in batches.
const LONGEST_PAUSE: u32 = 256;

#[cfg(test)]
mod simulation;

#[cfg(test)]
mod tests {
    use kernels::gpu::DeviceName;

    use super::*;

    const COMPUTE: Duration = Duration::from_micros(400);

    fn policy(gather: Duration) -> GatherPolicy {
        GatherPolicy::new(&DeviceOptions { gather, ..DeviceOptions::new(DeviceName::Emulated(0)) })
    }

    fn waits_for(policy: &GatherPolicy, client: u32) -> bool {
        policy.next(u32::MAX).clients >> client & 1 != 0
    }

    #[test]
    fn a_wait_is_half_a_batch_at_most_and_no_longer_than_allowed() {
        let mut policy = policy(Duration::from_micros(150));
        assert_eq!(policy.next(u32::MAX), Gather::default());
        policy.record(1, 0, Duration::from_micros(100));
        assert_eq!(policy.next(u32::MAX), Gather { clients: u32::MAX, within_ns: 65_000 });
        policy.record(1, 0, COMPUTE);
        assert_eq!(policy.next(u32::MAX), Gather { clients: u32::MAX, within_ns: 150_000 });
    }

    #[test]
    fn waits_for_a_client_that_stays_away_become_rare_until_it_returns() {
        let mut policy = policy(Duration::from_millis(1));
        policy.record(0b11, 0, COMPUTE);
        let mut waits = Vec::new();
        for batch in 0..2000u32 {
            let expected = policy.next(u32::MAX).clients & 0b11;
            assert_eq!(expected & 1, 1, "the other client is still waited for");
            if expected & 0b10 != 0 {
                waits.push(batch);
            }
            policy.record(0b01, expected, COMPUTE);
        }
        let gaps: Vec<u32> = waits.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert_eq!(gaps[..3], [1, 1, 1], "several waits at first");
        assert_eq!(gaps[3..8], [17, 33, 65, 129, 257]);
        assert!(gaps[8..].iter().all(|gap| *gap == 257), "{gaps:?}");
        // It returns at the next tries, so it is waited for again.
        while !waits_for(&policy, 1) {
            policy.record(0b01, 0b01, COMPUTE);
        }
        for _ in 0..3 {
            policy.record(0b11, 0b11, COMPUTE);
            assert!(waits_for(&policy, 1));
        }
        policy.record(0b01, 0b11, COMPUTE);
        assert!(waits_for(&policy, 1), "one wait in vain changes nothing");
    }

    #[test]
    fn an_index_starts_over_with_its_next_client() {
        let mut policy = policy(Duration::from_millis(1));
        (0..10).for_each(|_| policy.record(0b01, 0b11, COMPUTE));
        assert!(!waits_for(&policy, 1));
        policy.reset(1);
        assert!(waits_for(&policy, 1));
    }

    #[test]
    fn a_free_entry_is_not_waited_for() {
        let mut policy = policy(Duration::from_millis(1));
        policy.record(0b111, 0, COMPUTE);
        assert_eq!(policy.next(0b101).clients, 0b101, "the client in the middle has left");
    }

    #[test]
    fn without_time_no_client_is_waited_for() {
        let mut policy = policy(Duration::ZERO);
        for mask in [1, 2, 3] {
            policy.record(mask, 0, COMPUTE);
            assert_eq!(policy.next(u32::MAX), Gather::default());
        }
    }
}
