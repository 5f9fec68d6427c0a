//! Bounded exponential backoff with jitter, so that a fleet does not reconnect all at once to a restarted
//! control plane.

use std::time::Duration;

/// Delays `first, 2·first, 4·first, …` up to `max`, each with a random factor between 0.5 and 1.
#[derive(Clone, Debug)]
pub(crate) struct Backoff {
    first: Duration,
    max: Duration,
    next: Duration,
}

impl Backoff {
    pub(crate) fn new(first: Duration, max: Duration) -> Self {
        let first = first.max(Duration::from_millis(1));
        Self { first, max: max.max(first), next: first }
    }

    /// Starts again with the first delay, after a success.
    pub(crate) fn reset(&mut self) {
        self.next = self.first;
    }

    /// The next delay, between half of the nominal delay and all of it.
    pub(crate) fn next_delay(&mut self) -> Duration {
        let nominal = self.next;
        self.next = nominal.saturating_mul(2).min(self.max);
        nominal.mul_f64(rand::random_range(0.5..=1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_to_the_bound_and_start_over() {
        let (first, max) = (Duration::from_millis(50), Duration::from_millis(900));
        let mut backoff = Backoff::new(first, max);
        let mut nominal = first;
        for _ in 0..20 {
            let delay = backoff.next_delay();
            assert!(delay >= nominal / 2 && delay <= nominal, "{delay:?} of {nominal:?}");
            nominal = (nominal * 2).min(max);
        }
        backoff.reset();
        assert!(backoff.next_delay() <= first);
    }
}
