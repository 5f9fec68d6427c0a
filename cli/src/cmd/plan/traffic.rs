//! Traffic over time: a CSV file, or a generated trace.

use std::path::Path;

use anyhow::{Context, Result, bail};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Tokens per second from a time on, until the next point.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point {
    pub at_s: f64,
    pub tokens_per_s: f64,
}

/// Traffic, ascending by time.
#[derive(Debug, Clone)]
pub struct Trace {
    /// Name and origin, for the report.
    pub source: String,
    pub points: Vec<Point>,
    pub end_s: f64,
}

/// Generated traces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum TraceName {
    /// A daily cycle between --peak and a quarter of it, with weaker weekends.
    Diurnal,
    /// A daily cycle whose mean is 0.816 times its peak, as DeepSeek has published for its service.
    DeepseekDay,
    /// The same rate all the time.
    Flat,
}

impl TraceName {
    /// The source of the shape, and the assumptions.
    pub fn source(self) -> &'static str {
        match self {
            Self::Diurnal => {
                "generated: one daily peak, a night at 0.25 of it, weekends at 0.7 of a weekday, 3 % noise. The shape \
                 (days, nights, weekends) is that of BurstGPT's trace of Azure OpenAI services (arXiv 2401.17644); \
                 its depth is an assumption"
            }
            Self::DeepseekDay => {
                "generated: one daily peak with a mean of 0.816 of it and 3 % noise. The ratio is that of nodes in \
                 use, 226.75 on average and 278 at the peak, of DeepSeek's day from 2025-02-27 (DeepSeek-V3/R1 \
                 Inference System Overview)"
            }
            Self::Flat => "generated: a constant rate",
        }
    }

    pub fn generate(self, peak: f64, days: u32, step_s: f64, seed: u64) -> Trace {
        let mut rng = StdRng::seed_from_u64(seed);
        let end_s = f64::from(days) * DAY_S;
        let num_points = (end_s / step_s).ceil() as usize;
        let point = |idx: usize| {
            let at_s = idx as f64 * step_s;
            let shape = self.shape(at_s);
            let noise = if self == Self::Flat { 0.0 } else { rng.random_range(-0.03..0.0) };
            Point { at_s, tokens_per_s: peak * shape * (1.0 + noise) }
        };
        let points = (0..num_points).map(point).collect();
        Trace { source: self.source().to_owned(), points, end_s }
    }

    /// Share of the peak at a time. Day 0 is a Monday, and its peak is at 15:00.
    fn shape(self, at_s: f64) -> f64 {
        let hour = at_s.rem_euclid(DAY_S) / 3600.0;
        // From 0 at night to 1 at the peak.
        let wave = 0.5 + 0.5 * ((hour - 15.0) / 24.0 * std::f64::consts::TAU).cos();
        match self {
            Self::Diurnal => {
                let is_weekend = (at_s / DAY_S) as u64 % 7 >= 5;
                (0.25 + 0.75 * wave) * if is_weekend { 0.7 } else { 1.0 }
            }
            // The mean of the wave is 0.5.
            Self::DeepseekDay => 1.0 - 2.0 * (1.0 - 226.75 / 278.0) * (1.0 - wave),
            Self::Flat => 1.0,
        }
    }
}

impl Trace {
    /// Reads a file with the columns time (seconds, ascending) and tokens per second. A first line of names is skipped.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the trace {}", path.display()))?;
        Self::parse(&text, path.display().to_string())
    }

    fn parse(text: &str, source: String) -> Result<Self> {
        let mut points: Vec<Point> = Vec::new();
        for (idx, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let mut fields = line.split(',').map(str::trim);
            let (Some(time), Some(rate), None) = (fields.next(), fields.next(), fields.next())
            else {
                bail!(
                    "{source}:{}: expected 2 columns, time in seconds and tokens per second",
                    idx + 1
                );
            };
            let (Ok(at_s), Ok(tokens_per_s)) = (time.parse::<f64>(), rate.parse::<f64>()) else {
                if points.is_empty() && idx == 0 {
                    continue;
                }
                bail!("{source}:{}: {line:?} is not two numbers", idx + 1);
            };
            if at_s.abs() > MAX_TIME_S || tokens_per_s > MAX_RATE {
                bail!(
                    "{source}:{}: expected a time of at most {MAX_TIME_S:e} s and a rate of at most {MAX_RATE:e}",
                    idx + 1
                );
            }
            if !at_s.is_finite() || !tokens_per_s.is_finite() || tokens_per_s < 0.0 {
                bail!(
                    "{source}:{}: {line:?}: expected finite numbers and a rate of 0 or more",
                    idx + 1
                );
            }
            if points.last().is_some_and(|last| last.at_s >= at_s) {
                bail!("{source}:{}: time {at_s} is not after the line before it", idx + 1);
            }
            points.push(Point { at_s, tokens_per_s });
            if points.len() > MAX_POINTS {
                bail!("{source}: more than {MAX_POINTS} lines: use longer steps");
            }
        }
        let [.., before, last] = points[..] else {
            bail!("{source}: {} points: expected 2 or more", points.len());
        };
        if points.iter().all(|point| point.tokens_per_s == 0.0) {
            bail!("{source}: every rate is 0");
        }
        // The last point lasts as long as the one before it.
        Ok(Self { source, points, end_s: 2.0 * last.at_s - before.at_s })
    }

    pub fn peak(&self) -> f64 {
        self.points.iter().map(|point| point.tokens_per_s).fold(0.0, f64::max)
    }

    /// Points with their lengths in seconds.
    pub fn steps(&self) -> impl Iterator<Item = (Point, f64)> + '_ {
        let ends = self.points[1..].iter().map(|point| point.at_s).chain([self.end_s]);
        self.points.iter().zip(ends).map(|(point, end)| (*point, end - point.at_s))
    }

    pub fn length_s(&self) -> f64 {
        self.points.first().map_or(0.0, |first| self.end_s - first.at_s)
    }

    /// Mean rate over time.
    pub fn mean(&self) -> f64 {
        self.steps().map(|(point, length)| point.tokens_per_s * length).sum::<f64>()
            / self.length_s()
    }
}

const DAY_S: f64 = 86_400.0;
/// A month of seconds would be more.
const MAX_POINTS: usize = 1_000_000;
/// Beyond 30,000 years.
const MAX_TIME_S: f64 = 1e12;
/// More tokens a second than any fleet computes. Products with a time stay finite.
const MAX_RATE: f64 = 1e15;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_and_faults_are_named_by_line() {
        let trace = Trace::parse("time,rate\n0, 10\n60,30\n", "t.csv".to_owned()).unwrap();
        assert_eq!(
            (trace.points.len(), trace.end_s, trace.peak(), trace.mean()),
            (2, 120.0, 30.0, 20.0)
        );
        for (text, wanted) in [
            ("", "0 points"),
            ("0,1\n", "1 points"),
            ("0,1\n5\n", "t.csv:2: expected 2 columns"),
            ("0,1\n5,x\n", "t.csv:2: \"5,x\" is not two numbers"),
            ("0,1\n0,2\n", "t.csv:2: time 0 is not after"),
            ("0,1\n5,-2\n", "a rate of 0 or more"),
            ("0,1\nnan,1\n", "finite"),
            ("0,1\n5,inf\n", "t.csv:2: expected a time of at most 1e12 s"),
            ("0,1\n1e308,1\n", "t.csv:2: expected a time of at most 1e12 s"),
            ("-1e308,1\n0,1\n", "t.csv:1: expected a time of at most 1e12 s"),
            ("0,0\n5,0\n", "every rate is 0"),
        ] {
            let error = Trace::parse(text, "t.csv".to_owned()).unwrap_err().to_string();
            assert!(error.contains(wanted), "{text:?}: {error}");
        }
    }

    #[test]
    fn generated_traces_have_their_peak_and_mean() {
        let day = TraceName::DeepseekDay.generate(1000.0, 1, 60.0, 1);
        assert!((day.mean() / day.peak() - 0.816).abs() < 0.02, "{}", day.mean() / day.peak());
        let week = TraceName::Diurnal.generate(1000.0, 7, 300.0, 2);
        assert!(week.peak() <= 1000.0 && week.peak() > 970.0);
        assert!((0.5..0.65).contains(&(week.mean() / week.peak())));
        assert_eq!(TraceName::Flat.generate(5.0, 1, 3600.0, 3).mean(), 5.0);
    }
}
