//! Tasks of a leader: the clock of leases and plans, and the probes of members.

use std::collections::HashSet;
use std::time::Duration;

use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use tokio::task::{JoinError, JoinSet};
use tracing::error;

use super::{Coordinator, lock};
use crate::balance::{PlanJob, PlanOutcome};
use crate::fleet::{Fleet, ProbeError};

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

    /// Connects to every member as soon as it serves, again until that works, when a client suspects it, and when it
    /// renews late. So experts on a server that nothing can reach do not count, and a death has a second observer.
    /// Ends when the task is aborted.
    pub(crate) async fn run_probes(&self) {
        let mut under_way = FuturesUnordered::new();
        // Members with an attempt under way. One that takes long delays no others.
        let mut probed: HashSet<(String, u64)> = HashSet::new();
        loop {
            // A suspicion is looked into at once, but many of them cause few attempts.
            tokio::time::sleep(PROBE_PAUSE).await;
            tokio::select! {
                () = self.probes_due.notified() => {}
                () = tokio::time::sleep(PROBE_CHECK) => {}
                Some(attempt) = under_way.next() => self.record_attempt(&mut probed, attempt),
            }
            while let Some(Some(attempt)) = under_way.next().now_or_never() {
                self.record_attempt(&mut probed, attempt);
            }
            let due = lock(&self.fleet).due_probes(self.clock.now());
            for (name, incarnation, addr) in due {
                if probed.len() < MAX_PROBES && probed.insert((name.clone(), incarnation)) {
                    under_way.push(async move {
                        let outcome = connect(&addr).await;
                        Attempt { name, incarnation, outcome }
                    });
                }
            }
        }
    }

    fn record_attempt(&self, probed: &mut HashSet<(String, u64)>, attempt: Attempt) {
        let Attempt { name, incarnation, outcome } = attempt;
        self.with_fleet(|fleet, now| fleet.record_probe(&name, incarnation, outcome, now));
        probed.remove(&(name, incarnation));
    }
}

/// One attempt to connect to a member.
struct Attempt {
    name: String,
    incarnation: u64,
    outcome: Result<(), ProbeError>,
}

/// Connects to `addr` and closes the connection.
async fn connect(addr: &str) -> Result<(), ProbeError> {
    tokio::time::timeout(PROBE_TIMEOUT, connect_any(addr)).await.unwrap_or_else(|_| {
        let reason = format!("no answer within {} s", PROBE_TIMEOUT.as_secs());
        Err(ProbeError { reason, is_refused: false })
    })
}

/// Connects to the first address of `addr` that accepts.
async fn connect_any(addr: &str) -> Result<(), ProbeError> {
    let failed = |err: std::io::Error| ProbeError { reason: err.to_string(), is_refused: false };
    let addrs = tokio::net::lookup_host(addr).await.map_err(failed)?;
    let no_address = "the name has no address".to_owned();
    let mut error = ProbeError { reason: no_address, is_refused: false };
    let mut is_refused = true;
    for addr in addrs {
        match tokio::net::TcpStream::connect(addr).await {
            Ok(_) => return Ok(()),
            Err(err) => {
                is_refused &= err.kind() == std::io::ErrorKind::ConnectionRefused;
                error = ProbeError { reason: err.to_string(), is_refused };
            }
        }
    }
    Err(error)
}

/// The gauges of the advice change at this rate.
const ADVICE_PERIOD: Duration = Duration::from_secs(1);
/// Time between two looks for members to connect to, unless something wakes the task before.
const PROBE_CHECK: Duration = Duration::from_millis(100);
const PROBE_PAUSE: Duration = Duration::from_millis(20);
const PROBE_TIMEOUT: Duration = Duration::from_secs(3);
/// Connection attempts at a time.
const MAX_PROBES: usize = 32;
const MIN_TICK: Duration = Duration::from_millis(5);
const MAX_TICK: Duration = Duration::from_millis(100);
