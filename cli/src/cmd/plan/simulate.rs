//! A fleet that follows a trace for days: the planner and the scaling advice of the control plane, on a clock of its
//! own. Seeded.

use std::time::{Duration, Instant};

use anyhow::Result;
use control_api::Assignment;
use control_plane::advice::{FleetWork, ServerWork, advise};
use control_plane::planner::rebalance::{PlanMember, plan_fleet};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde::Serialize;

use super::fleet::{Servers, Sizes, Workload, evaluate};
use super::traffic::Trace;

/// Settings of a simulation.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    pub target_share: f64,
    /// A monolith has a multiple of so many servers.
    pub unit: u32,
    /// Share of the experts that change places in popularity with another one per hour.
    pub drift_per_hour: f64,
    pub seed: u64,
}

/// Result of [`run`].
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs, reason = "the names say all")]
pub struct Outcome {
    pub steps: usize,
    pub server_hours: f64,
    pub mean_servers: f64,
    pub most_servers: u32,
    pub monolith_servers: u32,
    pub monolith_server_hours: f64,
    pub saved: f64,
    pub joins: u64,
    pub drains: u64,
    /// Experts that servers loaded for new plans, in the whole model.
    pub expert_loads: u64,
    /// Busiest server over the mean after the plans of a step, averaged over the time.
    pub mean_imbalance: f64,
    /// Largest share of the time for which a server had to compute, before the plan of a step.
    pub worst_busiest_share: f64,
    /// Steps in which the busiest server would have had to compute for more than all of the time.
    pub overloaded_steps: usize,
    pub longest_plan_ms: f64,
    #[serde(skip)]
    pub servers_at: Vec<u32>,
}

pub fn run(
    workload: &Workload,
    servers: &Servers,
    sizes: &mut Sizes<'_>,
    trace: &Trace,
    settings: &Settings,
) -> Result<Outcome> {
    let mut rng = StdRng::seed_from_u64(settings.seed);
    let model = workload.model();
    let capacity_experts = servers.planned_capacity(workload);
    let needed = sizes.needed(trace.peak(), settings.target_share)?;
    let monolith = needed.div_ceil(settings.unit) * settings.unit;
    let mut loads = workload.popularity();
    let first = trace.points.first().map_or(0.0, |point| point.tokens_per_s);
    let begin = sizes.needed(first, settings.target_share)?;
    // The servers of the last step, and the servers of the next plan. A leaving server stays until others have its
    // experts, and a joining one has loaded none yet.
    let mut fleet: Vec<Assignment> = sizes.placement(begin)?.assignments.clone();
    let mut planned = fleet.clone();
    let mut outcome = Outcome {
        steps: 0,
        server_hours: 0.0,
        mean_servers: 0.0,
        most_servers: 0,
        monolith_servers: monolith,
        monolith_server_hours: f64::from(monolith) * trace.length_s() / 3600.0,
        saved: 0.0,
        joins: 0,
        drains: 0,
        expert_loads: 0,
        mean_imbalance: 0.0,
        worst_busiest_share: 0.0,
        overloaded_steps: 0,
        longest_plan_ms: 0.0,
        servers_at: Vec::new(),
    };
    let mut num_surplus_steps = 0;
    for (point, length_s) in trace.steps() {
        drift(&mut loads, settings.drift_per_hour * length_s / 3600.0, &mut rng);
        let calls_per_s = point.tokens_per_s / f64::from(workload.batch);
        // The load of this step meets the placement of the last one, until the next plan.
        let num_before = fleet.len() as u32;
        let before = evaluate(workload, servers, &loads, fleet);
        let busiest = before.busiest_call_s * calls_per_s;
        outcome.worst_busiest_share = outcome.worst_busiest_share.max(busiest);
        outcome.overloaded_steps += usize::from(busiest > 1.0);
        // The control plane plans every 10 s, so several times within a step.
        for _ in 0..((length_s / 10.0) as usize).clamp(1, 4) {
            let members: Vec<PlanMember<'_>> = planned
                .iter()
                .map(|current| PlanMember { capacity_experts, ..PlanMember::new(current) })
                .collect();
            let start = Instant::now();
            let plan = plan_fleet(&model, &members, &loads, &servers.goals)?;
            outcome.longest_plan_ms =
                outcome.longest_plan_ms.max(start.elapsed().as_secs_f64() * 1e3 * workload.scale());
            outcome.expert_loads += (plan.num_loads as f64 * workload.scale()) as u64;
            let is_final = plan.assignments == planned;
            planned = plan.assignments;
            if is_final {
                break;
            }
        }
        let placement = evaluate(workload, servers, &loads, planned);
        outcome.steps += 1;
        outcome.mean_imbalance += placement.imbalance * length_s;
        let work = |call_s: &f64| ServerWork {
            window_ms: length_s * 1e3,
            busy_ms: (call_s * calls_per_s).min(1.0) * length_s * 1e3,
            frames: calls_per_s * length_s,
            speed: 1.0,
            capacity_experts,
            ..ServerWork::default()
        };
        let advice = advise(
            &FleetWork {
                servers: placement.call_s.iter().map(work).collect(),
                half_life: Duration::from_secs(30),
                num_experts: model.moe_layers.len() as u64 * u64::from(model.num_experts),
                replicas: servers.goals.min_replicas,
                is_short: false,
            },
            settings.target_share,
        );
        fleet = placement.assignments;
        planned = fleet.clone();
        let current = planned.len() as u32;
        if advice.desired_servers > current {
            num_surplus_steps = 0;
            outcome.joins += u64::from(advice.desired_servers - current);
            planned.resize(advice.desired_servers as usize, Assignment::default());
        } else if advice.desired_servers < current {
            num_surplus_steps += 1;
            // As deploy/kubernetes has it: after 300 s, one server a minute.
            if f64::from(num_surplus_steps) * length_s >= 300.0 {
                let most = ((length_s / 60.0) as u32).max(1);
                let num = (current - advice.desired_servers).min(most);
                outcome.drains += u64::from(num);
                // The last ones joined last, and an autoscaler takes those.
                planned.truncate((current - num) as usize);
            }
        } else {
            num_surplus_steps = 0;
        }
        // A leaving server is paid until others have its experts, and a joining one while it loads: a step each.
        let paid = current.max(planned.len() as u32).max(num_before);
        outcome.servers_at.push(paid);
        outcome.most_servers = outcome.most_servers.max(paid);
        outcome.server_hours += f64::from(paid) * length_s / 3600.0;
    }
    outcome.mean_imbalance /= trace.length_s();
    outcome.mean_servers = outcome.server_hours * 3600.0 / trace.length_s();
    outcome.saved = 1.0 - outcome.server_hours / outcome.monolith_server_hours;
    Ok(outcome)
}

/// Lets experts of each layer change places in popularity. `share` of them do, on average.
fn drift(loads: &mut [Vec<f64>], share: f64, rng: &mut StdRng) {
    for layer in loads {
        let mut left = share * layer.len() as f64 / 2.0;
        while left > rng.random_range(0.0..1.0) {
            let (a, b) = (rng.random_range(0..layer.len()), rng.random_range(0..layer.len()));
            layer.swap(a, b);
            left -= 1.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use control_plane::planner::rebalance::PlanGoals;

    use super::super::hardware::{CostModel, Hardware};
    use super::super::traffic::TraceName;
    use super::*;

    #[test]
    fn a_simulation_repeats_by_its_seed_and_follows_the_load() {
        let workload = Workload {
            num_layers: 4,
            num_experts: 32,
            top_k: 4,
            expert_bytes: 1,
            zipf: 1.0,
            batch: 16,
            seed: 3,
        };
        let cost = CostModel { base_us: 10.0, expert_us: 20.0, pair_us: 10.0 };
        let servers = Servers {
            hardware: Hardware { call: cost, compute: cost },
            capacity_experts: Some(40),
            goals: PlanGoals::default(),
        };
        let trace = TraceName::Diurnal.generate(25_000.0, 2, 600.0, 5);
        let settings = Settings { target_share: 0.6, unit: 4, drift_per_hour: 0.02, seed: 9 };
        let outcome = || {
            let mut sizes = Sizes::new(&workload, &servers).unwrap();
            run(&workload, &servers, &mut sizes, &trace, &settings).unwrap()
        };
        let (a, b) = (outcome(), outcome());
        assert_eq!(a.servers_at, b.servers_at);
        assert_eq!((a.joins, a.drains, a.expert_loads), (b.joins, b.drains, b.expert_loads));
        assert_eq!(a.steps, 288);
        assert!(a.joins > 0 && a.drains > 0 && a.saved > 0.0, "{a:?}");
        assert_eq!(a.overloaded_steps, 0, "{a:?}");
        assert!(a.servers_at.iter().all(|&num| num >= 4));
    }
}
