//! Placements of a model on servers, by the planner of the control plane, and what calls cost on them.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use control_api::{Assignment, ModelDescriptor};
use control_plane::planner::rebalance::{PlanGoals, PlanMember, plan_fleet};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use super::hardware::{Hardware, expected_maximum};

/// The model and its traffic, as far as a plan needs them.
#[derive(Debug, Clone)]
pub struct Workload {
    /// Layers of the model that have experts.
    pub num_layers: u32,
    pub num_experts: u32,
    pub top_k: u32,
    pub expert_bytes: u64,
    /// Exponent of the experts' popularity by rank; 0 is uniform.
    pub zipf: f64,
    /// Tokens of one call.
    pub batch: u32,
    pub seed: u64,
}

/// A placement of the planned layers on equal servers.
#[derive(Debug, Clone)]
pub struct Placement {
    pub assignments: Vec<Assignment>,
    /// Compute time of one call in the whole model, per server, in seconds.
    pub call_s: Vec<f64>,
    /// Busiest server over the mean, of compute time summed over the layers.
    pub imbalance: f64,
    /// Compute time of one call in the whole model on the busiest server, in seconds.
    pub busiest_call_s: f64,
    /// Time of a call of one layer without waiting, averaged over the layers, in microseconds.
    pub layer_us: f64,
}

/// Planned layers: all layers have the same distribution of popularity, so a few stand for the others.
const MAX_PLANNED: u32 = 8;
/// The control plane plans again until nothing changes.
const MAX_PLANS: usize = 6;

impl Workload {
    /// The planned layers as a model.
    pub fn model(&self) -> ModelDescriptor {
        ModelDescriptor {
            fingerprint: "00000000".to_owned(),
            architecture: "plan".to_owned(),
            hidden: 1,
            moe_layers: (0..self.num_layers.min(MAX_PLANNED)).collect(),
            num_experts: self.num_experts,
            top_k: self.top_k,
        }
    }

    /// Whole layers per planned layer.
    pub fn scale(&self) -> f64 {
        f64::from(self.num_layers) / f64::from(self.num_layers.min(MAX_PLANNED))
    }

    /// Probability that a token chooses each expert, per planned layer. The sum of a layer is `top_k`.
    pub fn popularity(&self) -> Vec<Vec<f64>> {
        let mut rng = StdRng::seed_from_u64(self.seed);
        let mut by_rank: Vec<f64> =
            (1..=self.num_experts).map(|rank| f64::from(rank).powf(-self.zipf)).collect();
        normalise(&mut by_rank, f64::from(self.top_k));
        let layer = |_| {
            let mut layer = by_rank.clone();
            layer.shuffle(&mut rng);
            layer
        };
        (0..self.num_layers.min(MAX_PLANNED)).map(layer).collect()
    }
}

/// Scales to the sum `top_k` with no probability above 1.
fn normalise(weights: &mut [f64], top_k: f64) {
    let mut num_full = 0;
    // The weights fall, so the full ones are the first. Each round fills one more, at least.
    loop {
        let sum: f64 = weights[num_full..].iter().sum();
        if sum <= 0.0 {
            return;
        }
        let factor = (top_k - num_full as f64).max(0.0) / sum;
        weights[num_full..].iter_mut().for_each(|weight| *weight *= factor);
        let over = weights[num_full..].iter().take_while(|weight| **weight > 1.0).count();
        if over == 0 {
            return;
        }
        weights[num_full..num_full + over].fill(1.0);
        num_full += over;
    }
}

/// Servers of one kind.
#[derive(Debug, Clone, Copy)]
pub struct Servers {
    pub hardware: Hardware,
    /// Experts of the whole model that fit into the memory of one.
    pub capacity_experts: Option<u64>,
    pub goals: PlanGoals,
}

impl Servers {
    /// Experts of the planned layers that fit into the memory of one.
    pub fn planned_capacity(&self, workload: &Workload) -> Option<u32> {
        self.capacity_experts.map(|most| (most as f64 / workload.scale()).floor() as u32)
    }

    /// Fewest servers that hold every expert.
    pub fn fewest(&self, workload: &Workload) -> Result<u32> {
        let replicas = u64::from(self.goals.min_replicas);
        let by_memory = match self.planned_capacity(workload) {
            None => 1,
            Some(0) => bail!(
                "a server has no memory for one expert of {} bytes in each of the planned layers: give it more",
                workload.expert_bytes
            ),
            Some(most) => {
                let planned =
                    workload.model().moe_layers.len() as u64 * u64::from(workload.num_experts);
                (planned * replicas).div_ceil(u64::from(most))
            }
        };
        Ok(u32::try_from(by_memory.max(replicas))?)
    }
}

/// Plans `num_servers` equal servers from nothing, as the control plane does while load comes.
pub fn place(workload: &Workload, servers: &Servers, num_servers: u32) -> Result<Placement> {
    let model = workload.model();
    let loads = workload.popularity();
    let mut fleet = vec![Assignment::default(); num_servers as usize];
    for round in 0..MAX_PLANS {
        // Without load first: that is how a fleet begins.
        let known: &[Vec<f64>] = if round == 0 { &[] } else { &loads };
        let members: Vec<PlanMember<'_>> = fleet
            .iter()
            .map(|current| PlanMember {
                capacity_experts: servers.planned_capacity(workload),
                ..PlanMember::new(current)
            })
            .collect();
        let next = plan_fleet(&model, &members, known, &servers.goals)?.assignments;
        if next == fleet {
            break;
        }
        fleet = next;
    }
    Ok(evaluate(workload, servers, &loads, fleet))
}

/// Computes the cost of calls on a placement.
pub fn evaluate(
    workload: &Workload,
    servers: &Servers,
    loads: &[Vec<f64>],
    assignments: Vec<Assignment>,
) -> Placement {
    let Hardware { call, compute } = &servers.hardware;
    let batch = f64::from(workload.batch);
    let mut busy_us = vec![0.0; assignments.len()];
    let mut layer_us = 0.0;
    for (layer, loads) in loads.iter().enumerate() {
        let layer = layer as u32;
        let mut holders: BTreeMap<u32, f64> = BTreeMap::new();
        for assignment in &assignments {
            assignment.experts(layer).iter().for_each(|&e| *holders.entry(e).or_default() += 1.0);
        }
        let (mut slowest, mut variances) = (0.0f64, 0.0f64);
        for (assignment, busy_us) in assignments.iter().zip(&mut busy_us) {
            let (mut experts, mut pairs, mut variance) = (0.0, 0.0, 0.0);
            for &expert in assignment.experts(layer) {
                // A client sends an expert's tokens of one call to one replica, each in turn.
                let share = 1.0 / holders[&expert];
                let probability = loads[expert as usize];
                let is_chosen = 1.0 - (1.0 - probability).powf(batch);
                let on_this = share * is_chosen;
                experts += on_this;
                pairs += share * probability * batch;
                // A chosen expert brings all its pairs of the call to one replica.
                let cost =
                    call.expert_us + call.pair_us * probability * batch / is_chosen.max(1e-9);
                variance += on_this * (1.0 - on_this) * cost * cost;
            }
            if pairs > 0.0 {
                // A server that gets no pair of a call is not asked.
                let asked = (1.0 - (-pairs).exp()).min(1.0);
                *busy_us +=
                    compute.base_us * asked + compute.time_us(experts, pairs) - compute.base_us;
                slowest = slowest.max(call.time_us(experts, pairs));
                variances += variance;
            }
        }
        // A call's experts do not fall evenly on the servers.
        let deviation = (variances / assignments.len().max(1) as f64).sqrt();
        layer_us += slowest + expected_maximum(assignments.len()) * deviation;
    }
    let scale = workload.scale() * 1e-6;
    let call_s: Vec<f64> = busy_us.iter().map(|busy_us| busy_us * scale).collect();
    let busiest_call_s = call_s.iter().copied().fold(0.0, f64::max);
    let mean_call_s = call_s.iter().sum::<f64>() / call_s.len().max(1) as f64;
    Placement {
        assignments,
        call_s,
        imbalance: if mean_call_s > 0.0 { busiest_call_s / mean_call_s } else { 1.0 },
        busiest_call_s,
        layer_us: layer_us / loads.len().max(1) as f64,
    }
}

/// Placements by number of servers, planned once each.
#[derive(Debug)]
pub struct Sizes<'a> {
    workload: &'a Workload,
    servers: &'a Servers,
    fewest: u32,
    known: BTreeMap<u32, Placement>,
}

impl<'a> Sizes<'a> {
    pub fn new(workload: &'a Workload, servers: &'a Servers) -> Result<Self> {
        let fewest = servers.fewest(workload)?;
        if fewest > MAX_SERVERS {
            bail!("the memory of {fewest} servers is needed: expected at most {MAX_SERVERS}");
        }
        Ok(Self { workload, servers, fewest, known: BTreeMap::new() })
    }

    pub fn fewest(&self) -> u32 {
        self.fewest
    }

    pub fn placement(&mut self, num_servers: u32) -> Result<&Placement> {
        if !self.known.contains_key(&num_servers) {
            let placement = place(self.workload, self.servers, num_servers)?;
            self.known.insert(num_servers, placement);
        }
        Ok(&self.known[&num_servers])
    }

    /// Share of the time in which the busiest of `num_servers` computes.
    pub fn busiest_share(&mut self, num_servers: u32, tokens_per_s: f64) -> Result<f64> {
        let calls_per_s = tokens_per_s / f64::from(self.workload.batch);
        Ok(self.placement(num_servers)?.busiest_call_s * calls_per_s)
    }

    /// Fewest servers so that the busiest one computes for at most `target` of the time.
    pub fn needed(&mut self, tokens_per_s: f64, target: f64) -> Result<u32> {
        let (mut low, mut high) = (self.fewest, self.fewest);
        while self.busiest_share(high, tokens_per_s)? > target {
            low = high + 1;
            if high >= MAX_SERVERS {
                bail!(
                    "{tokens_per_s:.0} tokens/s need more than {MAX_SERVERS} servers: the busiest one would compute \
                     for {:.0} % of the time; give a faster server or a larger --batch",
                    self.busiest_share(high, tokens_per_s)? * 1e2
                );
            }
            high = (high * 2).min(MAX_SERVERS);
        }
        // The share falls with the number of servers, but for small steps of the placement.
        while low < high {
            let middle = low + (high - low) / 2;
            match self.busiest_share(middle, tokens_per_s)? > target {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        Ok(high)
    }
}

const MAX_SERVERS: u32 = 1024;

#[cfg(test)]
mod tests {
    use super::super::hardware::CostModel;
    use super::*;

    fn workload(zipf: f64) -> Workload {
        Workload {
            num_layers: 20,
            num_experts: 64,
            top_k: 4,
            expert_bytes: 1 << 20,
            zipf,
            batch: 32,
            seed: 1,
        }
    }

    fn servers(capacity_experts: Option<u64>) -> Servers {
        let cost = CostModel { base_us: 20.0, expert_us: 5.0, pair_us: 3.0 };
        Servers {
            hardware: Hardware { call: cost, compute: cost },
            capacity_experts,
            goals: PlanGoals::default(),
        }
    }

    #[test]
    fn popularity_is_a_probability() {
        for zipf in [0.0, 0.7, 1.2, 3.0] {
            for layer in workload(zipf).popularity() {
                assert!((layer.iter().sum::<f64>() - 4.0).abs() < 1e-6, "{zipf}");
                assert!(layer.iter().all(|p| (0.0..=1.0).contains(p)));
            }
        }
    }

    #[test]
    fn more_traffic_needs_more_servers_and_memory_sets_the_least() {
        let (workload, unlimited) = (workload(1.0), servers(None));
        let mut sizes = Sizes::new(&workload, &unlimited).unwrap();
        let mut last = 0;
        for rate in [100.0, 1e3, 5e3, 2e4] {
            let needed = sizes.needed(rate, 0.6).unwrap();
            assert!(needed >= last, "{rate}: {needed} after {last}");
            assert!(sizes.busiest_share(needed, rate).unwrap() <= 0.6);
            last = needed;
        }
        assert!(last > 2);
        let small = servers(Some(400));
        // 20 · 64 experts in parts of 400.
        assert_eq!(Sizes::new(&workload, &small).unwrap().fewest(), 4);
        assert!(Sizes::new(&workload, &servers(Some(1))).is_err());
    }
}
