//! Tasks of a leader: the clock of leases and plans, and the probes of members.

use std::time::Duration;

use futures_util::StreamExt;
use tokio::task::{JoinError, JoinSet};
use tracing::error;

use super::{Coordinator, lock};
use crate::balance::{PlanJob, PlanOutcome};
use crate::fleet::Fleet;

impl Coordinator {
    /// Expires members, and plans the fleet on a thread for blocking work, until the task is aborted.
    pub(crate) async fn run_clock(&self) {
        let period = (self.lease_ttl / 30).clamp(MIN_TICK, MAX_TICK);
        let mut advise_at = Duration::ZERO;
        // At most one plan at a time.
        let mut planning = JoinSet::new();
        loop {
            let due = tokio::select! {
                () = tokio::time::sleep(period) => self.tick(period, &mut advise_at),
                Some(planned) = planning.join_next() => {
                    self.finish_plan(planned);
                    None
                }
            };
            if let Some(job) = due {
                let timer = self.metrics.plan_seconds.start_timer();
                planning.spawn_blocking(move || {
                    let outcome = job.run();
                    timer.observe_duration();
                    (job, outcome)
                });
            }
        }
    }

    /// Expires members. Returns the plan to compute, if one is due.
    pub(super) fn tick(&self, period: Duration, advise_at: &mut Duration) -> Option<PlanJob> {
        self.renew_ticket_key();
        let (advice, due) = self.with_fleet(|fleet, now| {
            fleet.tick(now, period);
            let loads = |fleet: &Fleet| fleet.expert_loads(self.metrics.top_experts);
            let advice = (now >= *advise_at).then(|| {
                (fleet.advice(), fleet.num_unreachable(), fleet.num_insecure(), loads(fleet))
            });
            (advice, fleet.take_plan())
        });
        if let Some((advice, num_unreachable, num_insecure, loads)) = advice {
            self.metrics.set_insecure(num_insecure);
            self.metrics.set_unreachable(num_unreachable);
            self.metrics.set_expert_load(&loads);
            *advise_at = self.clock.now() + ADVICE_PERIOD;
            self.metrics.set_advice(&advice);
        }
        due
    }

    fn finish_plan(&self, planned: Result<(PlanJob, PlanOutcome), JoinError>) {
        if let Err(err) = &planned {
            error!(error = %err, "the fleet could not be planned: the next plan tries again");
        }
        self.with_fleet(|fleet, now| fleet.finish_plan(planned.ok(), now));
    }

    /// Connects to every serving member once, again until that works, and when a client suspects it. So an address that
    /// nothing can reach shows in the status, and a death has a second observer. Ends when the task is aborted.
    pub(crate) async fn run_probes(&self) {
        loop {
            // A suspicion is looked into at once, but many of them cause few attempts.
            tokio::time::sleep(PROBE_PAUSE).await;
            let _ = tokio::time::timeout(PROBE_PERIOD, self.suspected.notified()).await;
            let unprobed = lock(&self.fleet).unprobed();
            let probes = unprobed.into_iter().map(|(name, incarnation, addr)| async move {
                (name, incarnation, connect(&addr).await)
            });
            let mut probes = futures_util::stream::iter(probes).buffer_unordered(MAX_PROBES);
            while let Some((name, incarnation, outcome)) = probes.next().await {
                self.with_fleet(|fleet, now| {
                    fleet.record_probe(&name, incarnation, outcome, now);
                });
            }
        }
    }
}

/// Connects to `addr` and closes the connection.
async fn connect(addr: &str) -> Result<(), String> {
    match tokio::time::timeout(PROBE_TIMEOUT, tokio::net::TcpStream::connect(addr)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(err)) => Err(err.to_string()),
        Err(_) => Err(format!("no answer within {} s", PROBE_TIMEOUT.as_secs())),
    }
}

/// The gauges of the advice change at this rate.
const ADVICE_PERIOD: Duration = Duration::from_secs(1);
const PROBE_PERIOD: Duration = Duration::from_secs(2);
const PROBE_PAUSE: Duration = Duration::from_millis(20);
const PROBE_TIMEOUT: Duration = Duration::from_secs(3);
/// Connection attempts at a time.
const MAX_PROBES: usize = 32;
const MIN_TICK: Duration = Duration::from_millis(5);
const MAX_TICK: Duration = Duration::from_millis(100);
