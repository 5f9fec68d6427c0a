//! Follows the load: decayed loads, plans of the whole fleet, and the moves between two plans. Sans-I/O.

use std::sync::Arc;
use std::time::Duration;

use control_api::{Assignment, LayerAssignment, LoadReport, ModelDescriptor};

use crate::member::{Member, union};
use crate::metrics::LayerLoad;
use crate::planner::rebalance::{FleetPlan, NoRoom, PlanGoals, PlanMember, plan_fleet};

/// Settings of load-driven placement.
#[derive(Clone, Copy, Debug)]
pub struct BalanceSettings {
    /// Goals and limits of a plan.
    pub goals: PlanGoals,
    /// Time between two plans that only move load. A change of the members is planned after
    /// [`settle`](Self::settle).
    pub period: Duration,
    /// Time that a change of the members must be old before it is planned, so that servers that start together are
    /// planned together.
    pub settle: Duration,
    /// Time in which the weight of an observed load halves.
    pub half_life: Duration,
    /// Servers that are expected at the start. A joining server gets a share of a fleet of at least this size. No
    /// plan changes that until so many serve, every expert has had its replicas, or
    /// [`start_grace`](Self::start_grace) has passed since the first one joined.
    pub expected_servers: u32,
    /// See [`expected_servers`](Self::expected_servers).
    pub start_grace: Duration,
    /// A draining server stays in the placement until others have loaded its experts, but for so long at most.
    pub drain_grace: Duration,
}

impl Default for BalanceSettings {
    fn default() -> Self {
        Self {
            goals: PlanGoals::default(),
            period: Duration::from_secs(10),
            settle: Duration::from_millis(500),
            half_life: Duration::from_secs(30),
            expected_servers: 1,
            start_grace: Duration::from_secs(30),
            drain_grace: Duration::from_secs(25),
        }
    }
}

/// Load of every expert, in tokens, with old tokens decayed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Loads {
    /// `tokens[layer_idx][expert]`.
    tokens: Vec<Vec<f64>>,
    /// Time since the first decay in half-lives, decayed as the tokens are. Tokens over it are a rate.
    weight: f64,
}

impl Loads {
    /// Counts the tokens of a report. Entries that the model does not have are ignored.
    pub(crate) fn add(&mut self, model: &ModelDescriptor, report: &LoadReport) {
        self.tokens.resize_with(model.moe_layers.len(), Vec::new);
        for load in &report.experts {
            let Ok(layer_idx) = model.moe_layers.binary_search(&load.layer) else { continue };
            let layer = &mut self.tokens[layer_idx];
            layer.resize(model.num_experts as usize, 0.0);
            if let Some(tokens) = layer.get_mut(load.expert as usize) {
                *tokens += load.num_tokens as f64;
            }
        }
    }

    pub(crate) fn decay(&mut self, factor: f64) {
        let half_lives = -factor.max(f64::MIN_POSITIVE).log2();
        self.weight = (self.weight + half_lives) * factor;
        for tokens in self.tokens.iter_mut().flatten() {
            *tokens *= factor;
        }
    }

    pub(crate) fn clear(&mut self) {
        self.tokens.clear();
        self.weight = 0.0;
    }

    /// Rates of the `num_top` busiest experts of each layer that has had tokens, and the sum of the others.
    pub(crate) fn busiest(
        &self,
        model: &ModelDescriptor,
        num_top: usize,
        half_life: Duration,
    ) -> Vec<LayerLoad> {
        let seconds = self.weight * half_life.as_secs_f64();
        let scale = if seconds > 0.0 { 1.0 / seconds } else { 0.0 };
        let layers = model.moe_layers.iter().zip(&self.tokens);
        let loads = layers.filter(|(_, tokens)| !tokens.is_empty()).map(|(&layer, tokens)| {
            let rates = tokens.iter().map(|tokens| tokens * scale);
            let mut experts: Vec<(u32, f64)> = (0..).zip(rates).collect();
            let by_rate = |a: &(u32, f64), b: &(u32, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
            let num_top = num_top.min(experts.len());
            if num_top < experts.len() {
                experts.select_nth_unstable_by(num_top, by_rate);
            }
            let others = experts.drain(num_top..).map(|(_, rate)| rate).sum();
            experts.sort_unstable_by(by_rate);
            LayerLoad { layer, busiest: experts, others }
        });
        loads.collect()
    }

    fn of_layers(&self) -> &[Vec<f64>] {
        &self.tokens
    }
}

/// Everything that a plan of the fleet needs. It is computed without the lock of the fleet.
#[derive(Debug)]
pub(crate) struct PlanJob {
    /// See [`Fleet::finish_plan`](crate::fleet::Fleet::finish_plan).
    pub(crate) basis: u64,
    model: ModelDescriptor,
    members: Vec<JobMember>,
    loads: Loads,
    goals: PlanGoals,
}

/// A plan, or the reason why there is none.
pub(crate) type PlanOutcome = Result<FleetPlan, NoRoom>;

/// A member as the plan sees it.
#[derive(Debug)]
struct JobMember {
    capacity_experts: Option<u32>,
    speed: f64,
    zone: Option<String>,
    current: Arc<Assignment>,
    holds: Arc<Assignment>,
    assignment: Arc<Assignment>,
    hidden: u32,
    unreadable: Assignment,
}

impl JobMember {
    fn of(member: &Member) -> Self {
        Self {
            capacity_experts: member.record.capacity_experts,
            speed: member.work.speed(),
            zone: member.record.zone.clone(),
            current: Arc::clone(member.target.as_ref().unwrap_or(&member.record.assignment)),
            holds: Arc::clone(&member.record.holds),
            assignment: Arc::clone(&member.record.assignment),
            hidden: member.hidden_experts(),
            unreadable: member.unreadable.clone(),
        }
    }

    /// Experts that are in its memory, or that it may have begun to load.
    fn experts_in_memory(&self) -> Arc<Assignment> {
        match Arc::ptr_eq(&self.holds, &self.assignment) || self.holds == self.assignment {
            true => Arc::clone(&self.holds),
            false => Arc::new(union(&self.holds, &self.assignment)),
        }
    }
}

impl PlanJob {
    /// A job for `members`, which take part in plans.
    pub(crate) fn new<'a>(
        basis: u64,
        model: &ModelDescriptor,
        members: impl Iterator<Item = &'a Member>,
        loads: &Loads,
        goals: PlanGoals,
    ) -> Self {
        let members = members.map(JobMember::of).collect();
        Self { basis, model: model.clone(), members, loads: loads.clone(), goals }
    }

    /// Computes the plan: up to a fifth of a second for a thousand members of a large model.
    pub(crate) fn run(&self) -> PlanOutcome {
        let in_memory: Vec<Arc<Assignment>> =
            self.members.iter().map(JobMember::experts_in_memory).collect();
        let inputs: Vec<PlanMember<'_>> = self
            .members
            .iter()
            .zip(&in_memory)
            .map(|(member, in_memory)| PlanMember {
                capacity_experts: member.capacity_experts,
                speed: member.speed,
                zone: member.zone.as_deref(),
                held: in_memory,
                hidden: member.hidden,
                unreadable: &member.unreadable,
                ..PlanMember::new(&member.current)
            })
            .collect();
        plan_fleet(&self.model, &inputs, self.loads.of_layers(), &self.goals)
    }
}

/// Names what `members`, which take part in plans, lack for `replicas` replicas of each expert. No member holds an
/// expert twice. With room for all copies there is a plan with all replicas.
pub(crate) fn replica_shortage<'a>(
    model: &ModelDescriptor,
    members: impl Iterator<Item = &'a Member>,
    replicas: u32,
) -> Option<String> {
    let num_experts = model.num_experts as usize * model.moe_layers.len();
    let (mut num_members, mut room) = (0, 0);
    for member in members {
        num_members += 1;
        let capacity = member.record.capacity_experts.map_or(num_experts, |most| most as usize);
        room += capacity.min(num_experts);
    }
    if num_members < replicas as usize {
        return Some(format!(
            "{replicas} replicas of each expert need {replicas} servers, and the fleet has {num_members}: add servers, \
             or ask for fewer replicas"
        ));
    }
    let needed = num_experts * replicas as usize;
    (room < needed).then(|| {
        format!(
            "{replicas} replicas of each expert are {needed} copies, and the {num_members} servers have room for \
             {room}: give servers more memory, add some, or ask for fewer replicas"
        )
    })
}

/// The `num_pairs` (layer, expert) pairs with the fewest holders among `others`. They are spread over the layers,
/// because each layer's calls wait for its busiest server.
pub(crate) fn fill(model: &ModelDescriptor, num_pairs: u32, others: &[&Assignment]) -> Assignment {
    let num_experts = model.num_experts as usize;
    let mut holders = vec![0u32; num_experts * model.moe_layers.len()];
    for entry in others.iter().flat_map(|other| &other.layers) {
        let Ok(layer_idx) = model.moe_layers.binary_search(&entry.layer) else { continue };
        let layer = &mut holders[layer_idx * num_experts..][..num_experts];
        for &expert in &entry.experts {
            if let Some(count) = layer.get_mut(expert as usize) {
                *count += 1;
            }
        }
    }
    let num_pairs = (num_pairs as usize).min(holders.len());
    if num_pairs == 0 {
        return Assignment::default();
    }
    let mut pairs: Vec<(u32, usize, usize)> = holders
        .into_iter()
        .enumerate()
        .map(|(idx, num)| (num, idx % num_experts, idx / num_experts))
        .collect();
    pairs.select_nth_unstable(num_pairs - 1);
    pairs.truncate(num_pairs);
    pairs.sort_unstable_by_key(|&(_, expert, layer_idx)| (layer_idx, expert));
    let mut assignment = Assignment::default();
    for (_, expert, layer_idx) in pairs {
        let layer = model.moe_layers[layer_idx];
        match assignment.layers.last_mut() {
            Some(entry) if entry.layer == layer => entry.experts.push(expert as u32),
            _ => {
                assignment.layers.push(LayerAssignment { layer, experts: vec![expert as u32] });
            }
        }
    }
    assignment
}

/// Experts that a member of their target has yet to load, row-major by layer.
pub(crate) struct Pending {
    moe_layers: Vec<u32>,
    num_experts: usize,
    is_pending: Vec<bool>,
    /// Experts of any target.
    has_target: Vec<bool>,
}

impl Pending {
    /// `members` are all that take part in plans.
    pub(crate) fn of<'a>(
        model: &ModelDescriptor,
        members: impl Iterator<Item = &'a Member>,
    ) -> Self {
        let num_experts = model.num_experts as usize;
        let mut is_pending = vec![false; model.moe_layers.len() * num_experts];
        let mut has_target = is_pending.clone();
        for member in members {
            let Some(target) = &member.target else { continue };
            let can_take_over = member.can_take_over();
            let is_loaded = can_take_over && Arc::ptr_eq(target, &member.placed);
            for entry in &target.layers {
                let Ok(layer_idx) = model.moe_layers.binary_search(&entry.layer) else { continue };
                let first = layer_idx * num_experts;
                for &expert in &entry.experts {
                    has_target[first + expert as usize] = true;
                }
                if is_loaded {
                    continue;
                }
                let placed = member.placed.experts(entry.layer);
                for &expert in &entry.experts {
                    is_pending[first + expert as usize] |=
                        !can_take_over || placed.binary_search(&expert).is_err();
                }
            }
        }
        Self { moe_layers: model.moe_layers.clone(), num_experts, is_pending, has_target }
    }

    pub(crate) fn contains(&self, layer: u32, expert: u32) -> bool {
        self.index(layer, expert).is_some_and(|idx| self.is_pending[idx])
    }

    /// Returns true if all members whose target has the expert have loaded it, and there is one.
    pub(crate) fn is_handed_over(&self, layer: u32, expert: u32) -> bool {
        self.index(layer, expert).is_none_or(|idx| self.has_target[idx] && !self.is_pending[idx])
    }

    /// Place of an expert that the model has.
    fn index(&self, layer: u32, expert: u32) -> Option<usize> {
        let layer_idx = self.moe_layers.binary_search(&layer).ok()?;
        let expert = expert as usize;
        (expert < self.num_experts).then_some(layer_idx * self.num_experts + expert)
    }
}

/// The assignment of a member on the way to its target: the target, and each placed expert that a member of the
/// target has yet to load. So an expert is never without the replicas that it had. `None` if the member has that
/// assignment already, or has no target and keeps what it has. The member takes part in plans.
pub(crate) fn next_assignment(member: &Member, pending: &Pending) -> Option<Arc<Assignment>> {
    let target = member.target.as_ref()?;
    let assignment = &member.record.assignment;
    if Arc::ptr_eq(target, assignment) {
        // All placed experts are assigned, so none is beyond the target.
        return None;
    }
    let mut kept = Assignment::default();
    for entry in &member.placed.layers {
        let in_target = target.experts(entry.layer);
        let is_kept = |expert: &u32| {
            in_target.binary_search(expert).is_err() && pending.contains(entry.layer, *expert)
        };
        let experts: Vec<u32> = entry.experts.iter().copied().filter(is_kept).collect();
        if !experts.is_empty() {
            kept.layers.push(LayerAssignment { layer: entry.layer, experts });
        }
    }
    let next = match kept.layers.is_empty() {
        true => Arc::clone(target),
        false => Arc::new(union(target, &kept)),
    };
    (next != *assignment).then_some(next)
}

#[cfg(test)]
mod tests {
    use control_api::ExpertLoad;

    use super::*;

    /// A steady load shows its rate from the first seconds on, whatever the half-life.
    #[test]
    fn the_rates_of_a_steady_load_are_right_from_the_start() {
        let model = ModelDescriptor {
            fingerprint: "00ff00ff".to_owned(),
            architecture: "test".to_owned(),
            hidden: 8,
            moe_layers: vec![1, 4],
            num_experts: 6,
            top_k: 2,
        };
        let rates: Vec<u64> = (0..6).map(|_| rand::random_range(1..1000)).collect();
        let report = LoadReport {
            experts: (0..6)
                .map(|expert| ExpertLoad { layer: 4, expert, num_tokens: rates[expert as usize] })
                .collect(),
            ..LoadReport::default()
        };
        let half_life = Duration::from_secs(30);
        let mut loads = Loads::default();
        assert!(loads.busiest(&model, 2, half_life).is_empty());
        for second in 1..200 {
            loads.add(&model, &report);
            loads.decay(0.5f64.powf(1.0 / 30.0));
            let found = loads.busiest(&model, 2, half_life);
            let mut expected: Vec<(u64, u32)> = rates.iter().copied().zip(0..).collect();
            expected.sort_by_key(|&(rate, expert)| (std::cmp::Reverse(rate), expert));
            let [LayerLoad { layer: 4, busiest, others }] = &found[..] else {
                panic!("{rates:?}, second {second}: {found:?}")
            };
            let close = |found: f64, expected: u64| (found / expected as f64 - 1.0).abs() < 1e-9;
            for ((found, rate), (expected, expert)) in busiest.iter().zip(&expected) {
                assert!(found == expert && close(*rate, *expected), "{rates:?}: {busiest:?}");
            }
            let rest: u64 = expected[2..].iter().map(|(rate, _)| rate).sum();
            assert!(busiest.len() == 2 && close(*others, rest), "{rates:?}: {others}");
        }
        let all = loads.busiest(&model, 100, half_life);
        assert_eq!((all[0].busiest.len(), all[0].others), (6, 0.0));
        loads.clear();
        assert!(loads.busiest(&model, 2, half_life).is_empty());
    }
}
