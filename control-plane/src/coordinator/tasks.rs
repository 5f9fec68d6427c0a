//! The task of a leader that moves leases and plans.

use std::time::Duration;

use tokio::task::{JoinError, JoinSet};
use tracing::error;

use super::Coordinator;
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
        let (advice, is_short, due) = self.with_fleet(|fleet, now| {
            fleet.tick(now, period);
            let loads = |fleet: &Fleet| fleet.expert_loads(self.metrics.top_experts);
            let advice = (now >= *advise_at).then(|| {
                (fleet.advice(), fleet.num_unreachable(), fleet.num_insecure(), loads(fleet))
            });
            (advice, fleet.shortage().is_some(), fleet.take_plan())
        });
        if let Some((advice, num_unreachable, num_insecure, loads)) = advice {
            self.metrics.set_insecure(num_insecure);
            self.metrics.set_unreachable(num_unreachable);
            self.metrics.set_plan_short(is_short);
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
}

/// The gauges of the advice change at this rate.
const ADVICE_PERIOD: Duration = Duration::from_secs(1);
const MIN_TICK: Duration = Duration::from_millis(5);
const MAX_TICK: Duration = Duration::from_millis(100);
