//! Figures of runs in which a server is killed under load.

use anyhow::{Context, Result};
use serde::Serialize;

use super::roles::{ClientFigures, FailedCall};
use crate::stats::median;

/// Figures of runs in which a server is killed under the load of one client.
#[derive(Debug, Serialize)]
#[allow(missing_docs, reason = "the names say all")]
pub struct KillFigures {
    pub tokens: usize,
    /// One server alone, in a run before the kills and a run after them.
    pub one_server: [ClientFigures; 2],
    /// The run with the longest stall, before and after its kill.
    pub with_kill: ClientFigures,
    /// For each run with a kill, the longest call less the median call.
    pub stalls_us: Vec<f64>,
    pub stall_us_p50: f64,
    /// For each run, the call that failed over; `None` if the client knew of the death before a call.
    pub deaths: Vec<Option<Failover>>,
    /// Mean calls per second with one server.
    pub one_server_calls_per_s: f64,
    /// After the kill, the median of the runs.
    pub after_calls_per_s: f64,
    /// `after_calls_per_s` over `one_server_calls_per_s`.
    pub ratio: f64,
    /// Rate of the second run with one server alone over that of the first: a measure of noise.
    pub one_server_ratio: f64,
    /// The longest of `stalls_us`.
    pub stall_us: f64,
    /// Sum over all runs with a kill, as `resent_pairs`.
    pub failovers: u32,
    pub resent_pairs: u64,
    /// Wrong outputs of all runs.
    pub wrong: usize,
}

/// Times of the call that failed over, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Failover {
    /// From the begin of the call to the kill; negative if the call began after the kill.
    pub into_call_us: f64,
    /// From the kill until the client had sent the unanswered pairs to other servers.
    pub sent_again_us: f64,
    /// From there until the call ended, with one server less.
    pub answered_us: f64,
}

impl Failover {
    /// Finds the first call that sent pairs again after the kill. Returns `None` unless the call began before the
    /// kill or soon after it.
    fn of(killed_at_us: f64, calls: &[FailedCall]) -> Option<Self> {
        let call = calls.iter().find(|call| call.sent_again_us > killed_at_us)?;
        if call.began_us > killed_at_us + SOON_US {
            return None;
        }
        Some(Self {
            into_call_us: killed_at_us - call.began_us,
            sent_again_us: call.sent_again_us - killed_at_us,
            answered_us: call.ended_us - call.sent_again_us,
        })
    }
}

/// Calls follow one another, so the next call after a kill begins earlier.
const SOON_US: f64 = 1e5;

impl KillFigures {
    /// Summarizes runs. Each has the time of its kill by [`monotonic_us`](crate::clock::monotonic_us).
    pub(super) fn of(
        tokens: usize,
        one_server: [ClientFigures; 2],
        runs: Vec<(f64, ClientFigures)>,
    ) -> Result<Self> {
        let deaths =
            runs.iter().map(|(killed_at_us, run)| Failover::of(*killed_at_us, &run.failed_calls));
        let deaths = deaths.collect();
        let runs: Vec<ClientFigures> = runs.into_iter().map(|(_, run)| run).collect();
        let rates = [one_server[0].calls_per_s, one_server[1].calls_per_s];
        let one_server_calls_per_s = (rates[0] + rates[1]) / 2.0;
        let mut late: Vec<f64> = runs.iter().map(|run| run.late_calls_per_s).collect();
        let after_calls_per_s = median(&mut late);
        let stalls_us: Vec<f64> = runs.iter().map(ClientFigures::stall_us).collect();
        let num_wrong = |runs: &[ClientFigures]| runs.iter().map(|run| run.wrong).sum::<usize>();
        Ok(Self {
            tokens,
            one_server_calls_per_s,
            after_calls_per_s,
            ratio: after_calls_per_s / one_server_calls_per_s,
            one_server_ratio: rates[1] / rates[0],
            stall_us: stalls_us.iter().copied().fold(0.0, f64::max),
            stall_us_p50: median(&mut stalls_us.clone()),
            stalls_us,
            deaths,
            failovers: runs.iter().map(|run| run.failovers).sum(),
            resent_pairs: runs.iter().map(|run| run.resent_pairs).sum(),
            wrong: num_wrong(&runs) + num_wrong(&one_server),
            one_server,
            with_kill: runs
                .into_iter()
                .max_by(|a, b| a.stall_us().total_cmp(&b.stall_us()))
                .context("no server was killed")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_kills_are_summarized_by_median_maximum_and_sum() {
        let run = |max: f64, wrong| ClientFigures {
            layer_us_p50: 100.0,
            layer_us_max: 100.0 + max,
            late_calls_per_s: max,
            calls_per_s: 10.0,
            failovers: 1,
            resent_pairs: 8,
            wrong,
            ..ClientFigures::default()
        };
        let alone = || [run(0.0, 0), run(0.0, 1)];
        let earlier = FailedCall { began_us: 100.0, sent_again_us: 900.0, ended_us: 950.0 };
        let hit = FailedCall { began_us: 1000.0, sent_again_us: 1800.0, ended_us: 2500.0 };
        let with = |failed_calls| ClientFigures { failed_calls, ..run(900.0, 2) };
        let both = with(vec![earlier, hit]);
        // Another failure, long after a death that the client knew of before a call.
        let late = FailedCall { began_us: 2e6, sent_again_us: 2.1e6, ended_us: 2.2e6 };
        let after = ClientFigures { failed_calls: vec![late], ..run(20.0, 0) };
        let runs = vec![(7.0, run(30.0, 0)), (1300.0, both), (9.0, after)];
        let killed = KillFigures::of(4, alone(), runs).expect("some");
        assert_eq!(killed.stalls_us, [30.0, 900.0, 20.0]);
        assert_eq!((killed.stall_us_p50, killed.stall_us), (30.0, 900.0));
        assert_eq!((killed.after_calls_per_s, killed.ratio), (30.0, 3.0));
        assert_eq!((killed.failovers, killed.resent_pairs, killed.wrong), (3, 24, 3));
        assert_eq!(killed.with_kill.layer_us_max, 1000.0);
        let death = Failover { into_call_us: 300.0, sent_again_us: 500.0, answered_us: 700.0 };
        assert_eq!(killed.deaths, [None, Some(death), None]);
        assert!(KillFigures::of(4, alone(), Vec::new()).is_err());
    }
}
