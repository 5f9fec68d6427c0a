//! A GPU's clock and the host's: their offset, and the uncertainty of the offset.
//!
//! The offset comes from exchanges. The host reads its clock and changes a word. The GPU sees the change, reads its own
//! clock and answers with its time. The host sees the answer and reads its clock again. The GPU's reading lies between
//! the host's two, so the assumption that it lies in the middle is wrong by half of the exchange at most.

/// One exchange, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exchange {
    /// The host's clock before it changed the word.
    pub before: u64,
    /// The GPU's clock after it saw the change.
    pub gpu: u64,
    /// The host's clock after it saw the answer.
    pub after: u64,
}

/// Offset of the GPU's clock from the host's, by a series of exchanges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offset {
    /// Time of the GPU in the shortest exchange.
    gpu: u64,
    /// Nanoseconds by which the GPU's clock is ahead of the host's.
    ahead: i64,
    /// Half of the shortest exchange.
    half: u64,
    /// Step of the GPU's clock in nanoseconds.
    step: u64,
}

/// Both clocks during a run, by exchanges before it and after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Clocks {
    before: Offset,
    after: Offset,
}

/// Uncertainty of a conversion of the GPU's times to the host's.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Certainty {
    /// Largest error of a converted time: half of the shortest exchange, before the run or after it, whichever is
    /// longer, plus a step of the GPU's clock.
    pub uncertainty_us: f64,
    /// Time that the GPU's clock gained on the host's during the run. Conversion assumes an even gain.
    pub drift_us: f64,
    /// Step of the GPU's clock.
    pub step_us: f64,
}

impl Offset {
    /// Returns the offset by the shortest exchange, whose error is the smallest. Returns `None` without a valid
    /// exchange. An exchange in which the host's clock ran backwards is not valid.
    #[must_use]
    pub fn of(exchanges: &[Exchange]) -> Option<Self> {
        let took = |exchange: &Exchange| exchange.after.checked_sub(exchange.before);
        let timed = exchanges.iter().filter_map(|exchange| Some((took(exchange)?, exchange)));
        let (took, shortest) = timed.min_by_key(|(took, _)| *took)?;
        let first = exchanges.first()?.gpu;
        let step =
            exchanges.iter().fold(0, |step, exchange| gcd(step, exchange.gpu.abs_diff(first)));
        Some(Self {
            gpu: shortest.gpu,
            ahead: shortest.gpu.wrapping_sub(shortest.before + took / 2).cast_signed(),
            half: took.div_ceil(2),
            step,
        })
    }
}

impl Clocks {
    /// Returns the clocks of a run between the two series of exchanges.
    #[must_use]
    pub const fn new(before: Offset, after: Offset) -> Self {
        Self { before, after }
    }

    /// Converts a time of the GPU to nanoseconds of the host, within the uncertainty.
    #[must_use]
    pub fn host(&self, gpu: u64) -> i64 {
        let (Offset { gpu: begin, ahead, .. }, Offset { gpu: end, .. }) = (self.before, self.after);
        let since = |time: u64| time.wrapping_sub(begin).cast_signed() as f64;
        let part = if end == begin { 0.0 } else { since(gpu) / since(end) };
        let gained = (self.drift() as f64 * part).round() as i64;
        gpu.cast_signed().wrapping_sub(ahead).wrapping_sub(gained)
    }

    /// Returns the largest error of a converted time in nanoseconds.
    #[must_use]
    pub fn uncertainty(&self) -> u64 {
        self.before.half.max(self.after.half) + self.step()
    }

    /// Returns the uncertainty in microseconds, for reports.
    #[must_use]
    pub fn certainty(&self) -> Certainty {
        Certainty {
            uncertainty_us: self.uncertainty() as f64 / 1e3,
            drift_us: self.drift() as f64 / 1e3,
            step_us: self.step() as f64 / 1e3,
        }
    }

    const fn drift(&self) -> i64 {
        self.after.ahead.wrapping_sub(self.before.ahead)
    }

    const fn step(&self) -> u64 {
        gcd(self.before.step, self.after.step)
    }
}

const fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A GPU's clock with an offset, a rate of its own, and steps.
    #[derive(Debug, Clone, Copy)]
    struct Gpu {
        ahead: u64,
        per_million: i64,
        step: u64,
    }

    impl Gpu {
        fn shows(&self, host: u64) -> u64 {
            let gained = host as i64 * self.per_million / 1_000_000;
            (host + self.ahead).wrapping_add_signed(gained) / self.step * self.step
        }

        fn exchanges(&self, mut host: u64, ways: &[(u64, u64)]) -> Vec<Exchange> {
            let exchange = |(there, back): &(u64, u64)| {
                let before = host;
                let gpu = self.shows(before + there);
                host += there + back + 100;
                Exchange { before, gpu, after: before + there + back }
            };
            ways.iter().map(exchange).collect()
        }
    }

    proptest! {
        /// Whatever the two directions of an exchange take, the error of a conversion stays within the uncertainty.
        #[test]
        fn the_error_of_a_conversion_stays_within_the_uncertainty(
            ahead in 0_u64..2_000_000_000_000_000_000,
            per_million in -50_i64..50,
            step in prop::sample::select(vec![1_u64, 32, 1024]),
            ways in prop::collection::vec((300_u64..5000, 300_u64..5000), 8..40),
            run in 1_000_000_u64..100_000_000,
            at in 0.0..1.0,
        ) {
            let gpu = Gpu { ahead, per_million, step };
            let begin = 5_000_000;
            let before = Offset::of(&gpu.exchanges(begin, &ways)).unwrap();
            let after = Offset::of(&gpu.exchanges(begin + run, &ways)).unwrap();
            let clocks = Clocks::new(before, after);
            let least = ways.iter().map(|(there, back)| there + back).min().unwrap();
            // Two more for rounding.
            let limit = clocks.uncertainty() as i64 + 2;
            prop_assert!(limit >= (least / 2 + step) as i64);
            let host = begin + (run as f64 * at) as u64;
            let found = clocks.host(gpu.shows(host));
            prop_assert!((found - host as i64).abs() <= limit, "{found} for {host}, at most {limit} off");
        }
    }

    #[test]
    fn the_shortest_exchange_counts() {
        let exchanges = [
            Exchange { before: 1000, gpu: 50_000, after: 9000 },
            Exchange { before: 10_000, gpu: 60_064, after: 10_200 },
            Exchange { before: 11_000, gpu: 64_000, after: 16_000 },
        ];
        let offset = Offset::of(&exchanges).unwrap();
        assert_eq!(offset, Offset { gpu: 60_064, ahead: 49_964, half: 100, step: 16 });
        let clocks = Clocks::new(offset, Offset { gpu: 70_064, ahead: 49_974, half: 70, step: 24 });
        let certainty = Certainty { uncertainty_us: 0.108, drift_us: 0.01, step_us: 0.008 };
        assert_eq!(clocks.certainty(), certainty);
        assert_eq!([60_064, 65_064, 70_064].map(|gpu| clocks.host(gpu)), [10_100, 15_095, 20_090]);
    }

    #[test]
    fn without_a_valid_exchange_there_is_no_offset() {
        assert_eq!(Offset::of(&[]), None);
        assert_eq!(Offset::of(&[Exchange { before: 2, gpu: 1, after: 1 }]), None);
    }
}
