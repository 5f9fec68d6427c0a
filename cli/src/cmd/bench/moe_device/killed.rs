//! What is left when servers die under load.

use anyhow::{Context, Result};
use serde::Serialize;

use super::percentile;
use super::roles::{Measured, Met};

#[derive(Debug, Serialize)]
pub(super) struct Killed {
    pub tokens: usize,
    /// One server of the two alone, in runs of their own before and after the other.
    pub one_server: [Measured; 2],
    /// With both, until one was killed, and after: the run with the longest stall.
    pub with_kill: Measured,
    /// Longest call beyond the median, of each run with both.
    pub stalls_us: Vec<f64>,
    pub stall_us_p50: f64,
    /// What became of the call that met the death, by run; `None` where the death was known before a call.
    pub deaths: Vec<Option<Death>>,
    /// Mean calls per second with one server.
    pub one_server_calls_per_s: f64,
    /// After the other was killed, the median of the runs.
    pub after_calls_per_s: f64,
    pub ratio: f64,
    /// Of the second run with one server alone to the first: what is noise.
    pub one_server_ratio: f64,
    /// The longest of `stalls_us`.
    pub stall_us: f64,
    /// Of all runs, as what follows.
    pub failovers: u32,
    pub resent_pairs: u64,
    pub wrong: usize,
}

/// From a kill until the call that met it was answered, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Death {
    /// What of the call was over by the kill; below 0 where the kill came before it.
    pub into_call_us: f64,
    /// From the kill until the client had sent again what the dead server owed.
    pub sent_again_us: f64,
    /// From there until everything was answered: by one server less.
    pub answered_us: f64,
}

impl Death {
    /// Of the first call that sent something again after the kill, if it was under way by then or began soon.
    fn of(killed_at_us: f64, met: &[Met]) -> Option<Self> {
        let met = met.iter().find(|met| met.sent_again_us > killed_at_us)?;
        if met.began_us > killed_at_us + SOON_US {
            return None;
        }
        Some(Self {
            into_call_us: killed_at_us - met.began_us,
            sent_again_us: met.sent_again_us - killed_at_us,
            answered_us: met.ended_us - met.sent_again_us,
        })
    }
}

/// Calls follow one another, so the next one after a kill begins earlier.
const SOON_US: f64 = 1e5;

impl Killed {
    /// `runs` are with when the server was killed, in microseconds of
    /// [`monotonic_us`](super::roles::monotonic_us).
    pub(super) fn of(
        tokens: usize,
        one_server: [Measured; 2],
        runs: Vec<(f64, Measured)>,
    ) -> Result<Self> {
        let deaths = runs.iter().map(|(killed_at_us, run)| Death::of(*killed_at_us, &run.met));
        let deaths = deaths.collect();
        let runs: Vec<Measured> = runs.into_iter().map(|(_, run)| run).collect();
        let rates = [one_server[0].calls_per_s, one_server[1].calls_per_s];
        let one_server_calls_per_s = (rates[0] + rates[1]) / 2.0;
        let mut late: Vec<f64> = runs.iter().map(|run| run.late_calls_per_s).collect();
        let after_calls_per_s = percentile(&mut late, 0.5);
        let stalls_us: Vec<f64> = runs.iter().map(Measured::stall_us).collect();
        let num_wrong = |runs: &[Measured]| runs.iter().map(|run| run.wrong).sum::<usize>();
        Ok(Self {
            tokens,
            one_server_calls_per_s,
            after_calls_per_s,
            ratio: after_calls_per_s / one_server_calls_per_s,
            one_server_ratio: rates[1] / rates[0],
            stall_us: stalls_us.iter().copied().fold(0.0, f64::max),
            stall_us_p50: percentile(&mut stalls_us.clone(), 0.5),
            stalls_us,
            deaths,
            failovers: runs.iter().map(|run| run.failovers).sum(),
            resent_pairs: runs.iter().map(|run| run.resent_pairs).sum(),
            wrong: num_wrong(&runs) + num_wrong(&one_server),
            one_server,
            with_kill: runs
                .into_iter()
                .max_by(|a, b| a.stall_us().total_cmp(&b.stall_us()))
                .context("nobody was killed")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_kills_are_a_median_and_the_longest_and_nothing_is_lost_sight_of() {
        let run = |max: f64, wrong| Measured {
            layer_us_p50: 100.0,
            layer_us_max: 100.0 + max,
            late_calls_per_s: max,
            calls_per_s: 10.0,
            failovers: 1,
            resent_pairs: 8,
            wrong,
            ..Measured::default()
        };
        let alone = || [run(0.0, 0), run(0.0, 1)];
        let silence = Met { began_us: 100.0, sent_again_us: 900.0, ended_us: 950.0 };
        let met = Met { began_us: 1000.0, sent_again_us: 1800.0, ended_us: 2500.0 };
        let with = |met| Measured { met, ..run(900.0, 2) };
        let both = with(vec![silence, met]);
        // Some other failure, long after a death that was known before a call.
        let late = Met { began_us: 2e6, sent_again_us: 2.1e6, ended_us: 2.2e6 };
        let after = Measured { met: vec![late], ..run(20.0, 0) };
        let runs = vec![(7.0, run(30.0, 0)), (1300.0, both), (9.0, after)];
        let killed = Killed::of(4, alone(), runs).expect("some");
        assert_eq!(killed.stalls_us, [30.0, 900.0, 20.0]);
        assert_eq!((killed.stall_us_p50, killed.stall_us), (30.0, 900.0));
        assert_eq!((killed.after_calls_per_s, killed.ratio), (30.0, 3.0));
        assert_eq!((killed.failovers, killed.resent_pairs, killed.wrong), (3, 24, 3));
        assert_eq!(killed.with_kill.layer_us_max, 1000.0);
        let death = Death { into_call_us: 300.0, sent_again_us: 500.0, answered_us: 700.0 };
        assert_eq!(killed.deaths, [None, Some(death), None]);
        assert!(Killed::of(4, alone(), Vec::new()).is_err());
    }
}
