//! Percentiles, by one definition: nearest rank.
//!
//! The *p*-th percentile of *n* samples is the sample with rank ⌈*p*/100 · *n*⌉ in ascending order; ranks
//! count from 1. It is always one of the samples, and at least *p* percent of the samples do not exceed it. The
//! median of an even number of samples is therefore the lower of the middle two. The 0th percentile is the smallest
//! sample.

/// Returns the percentile `fraction` (0.0 to 1.0) of `samples` by nearest rank, or 0.0 without samples.
///
/// Sorts the samples.
pub fn percentile(samples: &mut [f64], fraction: f64) -> f64 {
    samples.sort_by(f64::total_cmp);
    of_sorted(samples, fraction).unwrap_or(0.0)
}

/// Returns the median of `samples` by nearest rank, or 0.0 without samples. Sorts the samples.
pub fn median(samples: &mut [f64]) -> f64 {
    percentile(samples, 0.5)
}

/// Returns the percentile `fraction` (0.0 to 1.0) of `sorted` by nearest rank, or `None` without samples.
///
/// The samples must be in ascending order.
#[must_use]
pub fn of_sorted<T: Copy>(sorted: &[T], fraction: f64) -> Option<T> {
    // A product such as 100 · 0.07 comes out a little above 7: without the subtraction its rank would be 8.
    let rank = (sorted.len() as f64 * fraction - ROUNDING).ceil().max(1.0);
    sorted.get((rank as usize - 1).min(sorted.len().saturating_sub(1))).copied()
}

/// Latencies in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize)]
#[allow(missing_docs, reason = "the names say all")]
pub struct Latency {
    pub mean_us: f64,
    pub p50_us: f64,
    pub p90_us: f64,
    pub p99_us: f64,
    pub max_us: f64,
}

impl Latency {
    /// Summarizes samples in nanoseconds, in any order. Returns `None` without samples.
    #[must_use]
    pub fn of(mut samples: Vec<u64>) -> Option<Self> {
        samples.sort_unstable();
        let at = |fraction| Some(of_sorted(&samples, fraction)? as f64 / 1e3);
        let sum: u64 = samples.iter().sum();
        Some(Self {
            p50_us: at(0.5)?,
            p90_us: at(0.9)?,
            p99_us: at(0.99)?,
            max_us: at(1.0)?,
            mean_us: sum as f64 / samples.len() as f64 / 1e3,
        })
    }
}

/// Far below the distance of any two ranks, and far above the rounding of a product of this size.
const ROUNDING: f64 = 1e-6;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples() {
        let mut samples: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(percentile(&mut samples, 0.5), 50.0);
        assert_eq!(percentile(&mut samples, 0.99), 99.0);
        assert_eq!(percentile(&mut [7.0], 0.99), 7.0);
        assert_eq!(percentile(&mut [], 0.5), 0.0);
    }

    /// The definition in the module's documentation, without floating point.
    #[test]
    fn percentiles_are_by_nearest_rank() {
        for num in 1..=250_u32 {
            let samples: Vec<u32> = (1..=num).collect();
            for percent in 0..=100 {
                let rank = (percent * num).div_ceil(100).max(1);
                let found = of_sorted(&samples, f64::from(percent) / 100.0);
                assert_eq!(found, Some(rank), "{percent} % of {num}");
            }
        }
        assert_eq!(of_sorted::<u32>(&[], 0.5), None);
        assert_eq!(median(&mut [4.0, 1.0, 3.0, 2.0]), 2.0);
    }

    #[test]
    fn latencies_are_summarized_in_microseconds() {
        let found = Latency::of((1..=1000).rev().map(|us| us * 1000).collect());
        let expected =
            Latency { mean_us: 500.5, p50_us: 500.0, p90_us: 900.0, p99_us: 990.0, max_us: 1000.0 };
        assert_eq!(found, Some(expected));
        assert_eq!(Latency::of(Vec::new()), None);
    }
}
