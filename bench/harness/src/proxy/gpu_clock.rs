//! A GPU's clock against this host's: how far apart they are, and how surely that is known.
//!
//! The two are shown to each other in exchanges: the host looks at its clock, moves a word, the GPU sees that, looks
//! at its own and says what it shows, and the host, once it has seen the answer, looks again. The GPU's look lay
//! between the host's, so whoever takes it for the middle is wrong by half of the exchange at most.

/// One exchange, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exchange {
    /// The host's clock before it moved the word.
    pub before: u64,
    /// The GPU's clock when it had seen that.
    pub gpu: u64,
    /// The host's clock when it had the answer.
    pub after: u64,
}

/// How far the GPU's clock is ahead, from exchanges one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offset {
    /// What the GPU's clock showed in the shortest exchange.
    gpu: u64,
    /// By how much the host's showed less.
    ahead: i64,
    /// Half of that exchange.
    half: u64,
    /// In what steps the GPU's clock goes.
    step: u64,
}

/// Both clocks over a run, from exchanges before it and behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Clocks {
    before: Offset,
    after: Offset,
}

/// How surely times of the GPU were taken for times of the host.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Certainty {
    /// By so much at most is each of them wrong: half of the shortest exchange, before the run or behind it,
    /// whichever was longer, and a step of the GPU's clock.
    pub uncertainty_us: f64,
    /// By so much the GPU's clock gained on the host's in between, which is taken off as if it had come evenly.
    pub drift_us: f64,
    /// In what steps the GPU's clock goes.
    pub step_us: f64,
}

impl Offset {
    /// The shortest exchange says most. `None` without any, and where the host's clock ran backwards.
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
    /// Of a run between the two.
    #[must_use]
    pub const fn new(before: Offset, after: Offset) -> Self {
        Self { before, after }
    }

    /// What the host's clock showed when the GPU's showed `gpu`, by up to the uncertainty.
    #[must_use]
    pub fn host(&self, gpu: u64) -> i64 {
        let (Offset { gpu: begin, ahead, .. }, Offset { gpu: end, .. }) = (self.before, self.after);
        let since = |time: u64| time.wrapping_sub(begin).cast_signed() as f64;
        let part = if end == begin { 0.0 } else { since(gpu) / since(end) };
        let gained = (self.drift() as f64 * part).round() as i64;
        gpu.cast_signed().wrapping_sub(ahead).wrapping_sub(gained)
    }

    /// How wrong times of the host can be at most, nanoseconds.
    #[must_use]
    pub fn uncertainty(&self) -> u64 {
        self.before.half.max(self.after.half) + self.step()
    }

    /// For records.
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

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A GPU's clock that is ahead and runs at its own pace, in steps.
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
        /// However long either way takes, no time of the GPU is taken for one that is further from the host's
        /// than was said.
        #[test]
        fn no_time_is_further_off_than_was_said(
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
            // A rounding beside it.
            let said = clocks.uncertainty() as i64 + 2;
            prop_assert!(said >= (least / 2 + step) as i64);
            let host = begin + (run as f64 * at) as u64;
            let found = clocks.host(gpu.shows(host));
            prop_assert!((found - host as i64).abs() <= said, "{found} for {host}, {said} were said");
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
    fn without_an_exchange_nothing_is_known() {
        assert_eq!(Offset::of(&[]), None);
        assert_eq!(Offset::of(&[Exchange { before: 2, gpu: 1, after: 1 }]), None);
    }
}
