//! How long plans of a large fleet take: 61 layers of 256 experts, two replicas of each, several kinds of load and
//! states of the fleet. It calls the planner alone.
//!
//! `plan_times [SERVERS]` (1,000): prints a line of JSON for each plan, with the shortest of [`NUM_RUNS`] times. The
//! loads depend on a fixed seed, so two builds plan the same.

use std::time::{Duration, Instant};

use rand::seq::SliceRandom;
use rand::{RngExt as _, SeedableRng, rngs::StdRng};
use switchyard_control_plane::planner::rebalance::{PlanGoals, PlanMember, plan_fleet};
use switchyard_control_plane::{Assignment, ModelDescriptor};

fn main() {
    let num_servers = match std::env::args().nth(1).map(|text| text.parse()) {
        None => 1000,
        Some(Ok(number)) => number,
        Some(Err(err)) => return eprintln!("expected a number of servers: {err}"),
    };
    let mut rng = StdRng::seed_from_u64(7);
    let uniform = |_| (0..NUM_EXPERTS).map(|_| rng.random_range(50.0..100.0)).collect();
    let uniform: Vec<Vec<f64>> = (0..NUM_LAYERS).map(uniform).collect();
    let zipf: Vec<f64> = (1..=NUM_EXPERTS).map(|rank| f64::from(rank).powf(-1.2)).collect();
    let zipf = shuffled(&vec![zipf; NUM_LAYERS as usize], &mut rng);
    let equal = vec![vec![1.0; NUM_EXPERTS as usize]; NUM_LAYERS as usize];
    for (kind, loads) in [("equal", equal), ("uniform", uniform), ("zipf", zipf)] {
        let bench = Bench { kind, num_servers };
        let empty = vec![Assignment::default(); num_servers];
        let mut fleet = bench.time("empty", &empty, &empty, &loads);
        for nth in 2..MAX_PLANS {
            let next = bench.time(&format!("plan {nth}"), &fleet, &fleet, &loads);
            let is_final = next == fleet;
            fleet = next;
            if is_final {
                break;
            }
        }
        bench.time("restored, nothing in memory", &fleet, &empty, &loads);
        let half = &fleet[..num_servers / 2];
        bench.time("half of the servers", half, half, &loads);
        let mut grown = fleet.clone();
        grown[num_servers - num_servers / 10..].fill(Assignment::default());
        bench.time("a tenth is new", &grown, &grown, &loads);
        let mut at_rest = fleet.clone();
        for noise in [0.005, 0.01, 0.02, 0.03] {
            let by =
                |load: &f64, rng: &mut StdRng| load * rng.random_range(1.0 - noise..1.0 + noise);
            let noisy: Vec<Vec<f64>> = loads
                .iter()
                .map(|layer| layer.iter().map(|load| by(load, &mut rng)).collect())
                .collect();
            let name = format!("loads differ by {noise}");
            at_rest = bench.time(&name, &at_rest, &at_rest, &noisy);
        }
        let changed = shuffled(&loads, &mut rng);
        bench.time("all loads change", &fleet, &fleet, &changed);
    }
}

/// The loads of each layer in another order.
fn shuffled(loads: &[Vec<f64>], rng: &mut StdRng) -> Vec<Vec<f64>> {
    let mut loads = loads.to_vec();
    loads.iter_mut().for_each(|layer| layer.shuffle(rng));
    loads
}

struct Bench {
    kind: &'static str,
    num_servers: usize,
}

impl Bench {
    /// Plans for members that shall have `current` and have `held` in memory. They are in three zones.
    fn time(
        &self,
        state: &str,
        current: &[Assignment],
        held: &[Assignment],
        loads: &[Vec<f64>],
    ) -> Vec<Assignment> {
        let model = ModelDescriptor {
            fingerprint: "0123456789abcdef".to_owned(),
            architecture: "deepseek_v3".to_owned(),
            hidden: 7168,
            moe_layers: (0..NUM_LAYERS).collect(),
            num_experts: NUM_EXPERTS,
            top_k: 8,
        };
        let members: Vec<PlanMember<'_>> = current
            .iter()
            .zip(held)
            .zip(["a", "b", "c"].iter().cycle())
            .map(|((current, held), zone)| PlanMember {
                zone: Some(zone),
                held,
                capacity_experts: Some(ROOM * NUM_LAYERS * NUM_EXPERTS / self.num_servers as u32),
                ..PlanMember::new(current)
            })
            .collect();
        let goals = PlanGoals { min_replicas: 2, ..PlanGoals::default() };
        let mut shortest = Duration::MAX;
        let mut planned = None;
        for _ in 0..NUM_RUNS {
            let begin = Instant::now();
            planned = Some(plan_fleet(&model, &members, loads, &goals));
            shortest = shortest.min(begin.elapsed());
        }
        match planned {
            Some(Ok(plan)) => {
                let line = serde_json::json!({
                    "servers": members.len(),
                    "load": self.kind,
                    "state": state,
                    "ms": (shortest.as_secs_f64() * 1e5).round() / 100.0,
                    "experts_to_load": plan.num_loads,
                    "waiting": plan.num_waiting,
                    "busiest_over_mean": plan.imbalance.1,
                });
                println!("{line}");
                plan.assignments
            }
            Some(Err(err)) => {
                println!("{}", serde_json::json!({ "state": state, "error": err.to_string() }));
                current.to_vec()
            }
            None => current.to_vec(),
        }
    }
}

const NUM_LAYERS: u32 = 61;
const NUM_EXPERTS: u32 = 256;
const NUM_RUNS: usize = 3;
/// Most plans until a fleet is at rest.
const MAX_PLANS: usize = 12;
/// Memory of the fleet in replicas of every expert.
const ROOM: u32 = 8;
