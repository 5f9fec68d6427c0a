//! Plans the experts of a whole fleet from the load. Sans-I/O: a pure function of its input.
//!
//! Each layer is planned by itself, because a layer's calls wait for its busiest server. The load of an expert is
//! taken to split evenly over its replicas. First every expert gets its minimum of replicas. Then the
//! planner changes each layer whose busiest server is above the tolerance. A change is one more replica of an expert,
//! a move to another server, or a swap of two experts. The planner applies the one that lowers the sum of the squares
//! of the servers' loads most.
//! It starts from the present assignments, so a layer within the tolerance does not change.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use control_api::{Assignment, LayerAssignment, ModelDescriptor};

/// A member to plan for.
#[derive(Clone, Copy, Debug)]
pub struct PlanMember<'a> {
    /// Most (layer, expert) pairs that fit into its memory. `None` means no limit.
    pub capacity_experts: Option<u32>,
    /// Relative speed. A member of speed 2 gets twice the load of a member of speed 1. Must be positive.
    pub speed: f64,
    /// Failure domain. Replicas of an expert are spread over zones where there is a choice.
    pub zone: Option<&'a str>,
    /// Experts that the member has now. Experts that the model does not have are left out.
    pub current: &'a Assignment,
}

/// Goals and limits of a plan.
#[derive(Clone, Copy, Debug)]
pub struct PlanGoals {
    /// Fewest replicas per expert, as far as there are members.
    pub min_replicas: u32,
    /// Replicas of hot experts beyond the minimum, as a share of all replicas of a layer, 0 or more.
    pub spare: f64,
    /// A layer is planned again when its busiest server has more than so many times the mean load.
    pub start_above: f64,
    /// Planning of a layer ends when its busiest server is within so many times the mean load. At most
    /// `start_above`: the distance between both keeps a layer from changing with every report.
    pub stop_at: f64,
    /// Most experts that members have to load for balance. Missing replicas are not limited.
    pub max_moves: usize,
}

impl Default for PlanGoals {
    fn default() -> Self {
        Self { min_replicas: 1, spare: 0.25, start_above: 1.10, stop_at: 1.04, max_moves: 2048 }
    }
}

/// The experts of every member.
#[derive(Clone, Debug, PartialEq)]
pub struct FleetPlan {
    /// Assignments in the order of the members.
    pub assignments: Vec<Assignment>,
    /// Experts that members have to load.
    pub num_loads: usize,
    /// Load of the busiest server over the mean, averaged over the layers by load, before and after.
    pub imbalance: (f64, f64),
}

/// The members have too little memory for one replica of every expert.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{num_members} members have room for {room} experts, but the model has {needed}: add {} servers of this size, \
     or give the members more memory",
    (needed - room).div_ceil((room / (*num_members).max(1)).max(1))
)]
pub struct NoRoom {
    /// Members in the plan.
    pub num_members: usize,
    /// (layer, expert) pairs that fit into all members.
    pub room: usize,
    /// (layer, expert) pairs of the model.
    pub needed: usize,
}

/// Plans the experts of `members`. `loads[layer_idx][expert]` is the load of an expert in any unit. Missing layers
/// and experts have none. Without any load, members get equal numbers of experts.
///
/// # Errors
/// [`NoRoom`].
pub fn plan_fleet(
    model: &ModelDescriptor,
    members: &[PlanMember<'_>],
    loads: &[Vec<f64>],
    goals: &PlanGoals,
) -> Result<FleetPlan, NoRoom> {
    let num_experts = model.num_experts as usize;
    let needed = num_experts * model.moe_layers.len();
    let mut fleet = Memory {
        room: members
            .iter()
            .map(|member| member.capacity_experts.map_or(needed, |most| needed.min(most as usize)))
            .collect(),
        used: vec![0; members.len()],
    };
    let room = fleet.room.iter().sum();
    if needed > room {
        return Err(NoRoom { num_members: members.len(), room, needed });
    }
    let mut layers: Vec<Layer> = model
        .moe_layers
        .iter()
        .enumerate()
        .map(|(idx, &number)| {
            Layer::new(number, num_experts, members, loads.get(idx).map_or(&[], Vec::as_slice))
        })
        .collect();
    for layer in &layers {
        for holders in &layer.holders {
            holders.iter().for_each(|&member| fleet.used[member] += 1);
        }
    }
    // A member may have got less memory than its experts need.
    for layer in &mut layers {
        layer.shed(&mut fleet);
    }
    let before = imbalance(&layers);
    let num_replicas = (goals.min_replicas as usize).clamp(1, members.len().max(1));
    // All first replicas, then all second ones: if memory is short, every expert has some.
    for level in 1..=num_replicas {
        for idx in 0..layers.len() {
            for expert in 0..num_experts {
                if layers[idx].holders[expert].len() < level
                    && !layers[idx].add_replica(expert, &mut fleet)
                    && level == 1
                {
                    make_room(&mut layers, &mut fleet);
                    layers[idx].add_replica(expert, &mut fleet);
                }
            }
        }
    }
    // The worst layers first, because the number of moves is limited.
    let mut order: Vec<usize> = (0..layers.len()).collect();
    order.sort_by(|&a, &b| {
        descending(layers[a].excess(), layers[b].excess()).then_with(|| a.cmp(&b))
    });
    let mut num_moves = 0;
    for idx in order {
        layers[idx].balance(&mut fleet, goals, num_replicas, &mut num_moves);
    }
    let after = imbalance(&layers);
    let assignments = collect(&layers, members.len());
    let num_loads = assignments
        .iter()
        .zip(members)
        .flat_map(|(new, member)| new.layers.iter().map(move |entry| (entry, member.current)))
        .map(|(entry, current)| {
            entry.experts.iter().filter(|&&expert| !current.contains(entry.layer, expert)).count()
        })
        .sum();
    Ok(FleetPlan { assignments, num_loads, imbalance: (before, after) })
}

/// Memory of the members in experts.
struct Memory {
    room: Vec<usize>,
    used: Vec<usize>,
}

impl Memory {
    fn has_room(&self, member: usize) -> bool {
        self.used[member] < self.room[member]
    }
}

/// One layer while it is planned.
struct Layer {
    number: u32,
    /// Load per expert, above 0, so that experts without load are spread, too.
    loads: Vec<f64>,
    /// Load per expert as it was reported.
    reported: f64,
    /// Members per expert.
    holders: Vec<Vec<usize>>,
    /// Load per member.
    load_of: Vec<f64>,
    speeds: Vec<f64>,
    /// Zone per member as a number.
    zones: Vec<Option<usize>>,
}

/// An expert by the load of one of its replicas, the hottest one first in a heap.
#[derive(Clone, Copy, Debug)]
struct Hot {
    share: f64,
    expert: usize,
}

impl Ord for Hot {
    fn cmp(&self, other: &Self) -> Ordering {
        self.share.total_cmp(&other.share).then(other.expert.cmp(&self.expert))
    }
}

impl PartialOrd for Hot {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Hot {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Hot {}

/// A change of the placement that relieves the busiest member.
#[derive(Clone, Copy, Debug)]
enum Change {
    Replicate {
        expert: usize,
        to: usize,
    },
    Move {
        expert: usize,
        to: usize,
    },
    /// `expert` goes to `to`, and `back` comes from there.
    Swap {
        expert: usize,
        to: usize,
        back: usize,
    },
}

impl Change {
    fn num_loads(self) -> usize {
        match self {
            Self::Replicate { .. } | Self::Move { .. } => 1,
            Self::Swap { .. } => 2,
        }
    }
}

impl Layer {
    fn new(number: u32, num_experts: usize, members: &[PlanMember<'_>], reported: &[f64]) -> Self {
        let valid = |expert: usize| {
            reported.get(expert).copied().filter(|load| load.is_finite() && *load > 0.0)
        };
        let sum: f64 = (0..num_experts).filter_map(valid).sum();
        let floor = if sum > 0.0 { sum / num_experts as f64 * LOAD_FLOOR } else { 1.0 };
        let loads: Vec<f64> =
            (0..num_experts).map(|expert| valid(expert).unwrap_or(0.0) + floor).collect();
        let mut names: Vec<&str> = members.iter().filter_map(|member| member.zone).collect();
        names.sort_unstable();
        names.dedup();
        let zone =
            |member: &PlanMember<'_>| member.zone.and_then(|zone| names.binary_search(&zone).ok());
        let mut layer = Self {
            number,
            loads,
            reported: sum,
            holders: vec![Vec::new(); num_experts],
            load_of: vec![0.0; members.len()],
            speeds: members.iter().map(|member| member.speed).collect(),
            zones: members.iter().map(zone).collect(),
        };
        for (idx, member) in members.iter().enumerate() {
            for &expert in member.current.experts(number) {
                if let Some(holders) = layer.holders.get_mut(expert as usize)
                    && holders.last() != Some(&idx)
                {
                    holders.push(idx);
                }
            }
        }
        layer.count_loads();
        layer
    }

    fn count_loads(&mut self) {
        self.load_of.fill(0.0);
        for (holders, load) in self.holders.iter().zip(&self.loads) {
            for &member in holders {
                self.load_of[member] += load / holders.len() as f64;
            }
        }
    }

    /// Load that one holder of an expert has from it.
    fn share(&self, expert: usize) -> f64 {
        self.loads[expert] / self.holders[expert].len().max(1) as f64
    }

    /// Load of a member over its speed.
    fn pressure(&self, member: usize) -> f64 {
        self.load_of[member] / self.speeds[member]
    }

    fn mean_pressure(&self) -> f64 {
        self.loads.iter().sum::<f64>() / self.speeds.iter().sum::<f64>()
    }

    fn busiest(&self) -> Option<usize> {
        (0..self.speeds.len())
            .min_by(|&a, &b| descending(self.pressure(a), self.pressure(b)).then(a.cmp(&b)))
    }

    /// Load of the busiest member over the mean.
    fn ratio(&self) -> f64 {
        self.busiest().map_or(1.0, |member| self.pressure(member) / self.mean_pressure())
    }

    /// Load of the busiest member beyond the mean.
    fn excess(&self) -> f64 {
        self.busiest().map_or(0.0, |member| self.pressure(member) - self.mean_pressure())
    }

    /// Removes experts from members that have more than their memory holds, replicated and cold ones first.
    fn shed(&mut self, fleet: &mut Memory) {
        for member in 0..self.speeds.len() {
            while fleet.used[member] > fleet.room[member] {
                let held = (0..self.holders.len()).filter(|&e| self.holders[e].contains(&member));
                let coldest = held.min_by(|&a, &b| {
                    let single = |expert: usize| self.holders[expert].len() < 2;
                    single(a).cmp(&single(b)).then(self.share(a).total_cmp(&self.share(b)))
                });
                let Some(expert) = coldest else { break };
                self.remove(expert, member, fleet);
            }
        }
    }

    fn remove(&mut self, expert: usize, member: usize, fleet: &mut Memory) {
        self.take_load(expert);
        self.holders[expert].retain(|&holder| holder != member);
        self.give_load(expert);
        fleet.used[member] -= 1;
    }

    fn insert(&mut self, expert: usize, member: usize, fleet: &mut Memory) {
        self.take_load(expert);
        let at = self.holders[expert].partition_point(|&holder| holder < member);
        self.holders[expert].insert(at, member);
        self.give_load(expert);
        fleet.used[member] += 1;
    }

    fn take_load(&mut self, expert: usize) {
        let share = self.share(expert);
        for &member in &self.holders[expert] {
            self.load_of[member] -= share;
        }
    }

    fn give_load(&mut self, expert: usize) {
        let share = self.share(expert);
        for &member in &self.holders[expert] {
            self.load_of[member] += share;
        }
    }

    /// True if a replica on `member` would share the zone of another one than that on `instead_of`.
    fn shares_zone(&self, expert: usize, member: usize, instead_of: Option<usize>) -> bool {
        let zone = self.zones[member];
        let mut others = self.holders[expert].iter().filter(|&&holder| Some(holder) != instead_of);
        zone.is_some() && others.any(|&holder| self.zones[holder] == zone)
    }

    /// Adds a replica on the member that suits best. Returns false if no member has room for it.
    fn add_replica(&mut self, expert: usize, fleet: &mut Memory) -> bool {
        let share = self.loads[expert] / (self.holders[expert].len() + 1) as f64;
        let free = (0..self.speeds.len())
            .filter(|&member| fleet.has_room(member) && !self.holders[expert].contains(&member));
        let best = free.min_by(|&a, &b| {
            let pressure = |member: usize| (self.load_of[member] + share) / self.speeds[member];
            let zone = |member: usize| self.shares_zone(expert, member, None);
            let fill = |member: usize| fleet.used[member] as f64 / self.speeds[member];
            zone(a)
                .cmp(&zone(b))
                .then(pressure(a).total_cmp(&pressure(b)))
                .then(fill(a).total_cmp(&fill(b)))
                .then(a.cmp(&b))
        });
        if let Some(member) = best {
            self.insert(expert, member, fleet);
        }
        best.is_some()
    }

    fn balance(
        &mut self,
        fleet: &mut Memory,
        goals: &PlanGoals,
        num_replicas: usize,
        num_moves: &mut usize,
    ) {
        if self.speeds.len() < 2 || self.ratio() <= goals.start_above {
            return;
        }
        let spare = goals.spare.clamp(0.0, MAX_SPARE);
        let budget = (self.holders.len() * num_replicas) as f64 * (1.0 + spare);
        let budget = (budget as usize).max(self.holders.len() * num_replicas);
        self.trim(budget, num_replicas, fleet);
        let mut num_held: usize = self.holders.iter().map(Vec::len).sum();
        while self.ratio() > goals.stop_at && *num_moves < goals.max_moves {
            let Some(change) = self.best_change(fleet, num_held < budget) else { return };
            *num_moves += change.num_loads();
            num_held += usize::from(matches!(change, Change::Replicate { .. }));
            self.apply(change, fleet);
        }
    }

    /// Removes replicas beyond the budget's best division, so that hotter experts can have them.
    fn trim(&mut self, budget: usize, num_replicas: usize, fleet: &mut Memory) {
        let num_members = self.speeds.len();
        let mut wanted = vec![num_replicas; self.holders.len()];
        let share = |expert: usize, replicas: usize| self.loads[expert] / replicas as f64;
        let mut growing: BinaryHeap<Hot> = (0..wanted.len())
            .filter(|_| num_replicas < num_members)
            .map(|expert| Hot { share: share(expert, num_replicas), expert })
            .collect();
        for _ in self.holders.len() * num_replicas..budget {
            let Some(Hot { expert, .. }) = growing.pop() else { break };
            wanted[expert] += 1;
            if wanted[expert] < num_members {
                growing.push(Hot { share: share(expert, wanted[expert]), expert });
            }
        }
        for (expert, &wanted) in wanted.iter().enumerate() {
            while self.holders[expert].len() > wanted {
                let holders = self.holders[expert].iter().copied();
                let Some(member) = holders.max_by(|&a, &b| {
                    let zone = |member: usize| self.shares_zone(expert, member, Some(member));
                    zone(a)
                        .cmp(&zone(b))
                        .then(self.pressure(a).total_cmp(&self.pressure(b)))
                        .then(a.cmp(&b))
                }) else {
                    break;
                };
                self.remove(expert, member, fleet);
            }
        }
    }

    /// The change that relieves the busiest member best, if any lowers the cost.
    fn best_change(&self, fleet: &Memory, may_replicate: bool) -> Option<Change> {
        let busiest = self.busiest()?;
        let mut targets: Vec<usize> =
            (0..self.speeds.len()).filter(|&member| member != busiest).collect();
        targets.sort_by(|&a, &b| {
            let fill = |member: usize| fleet.used[member] as f64 / self.speeds[member];
            self.pressure(a)
                .total_cmp(&self.pressure(b))
                .then(fill(a).total_cmp(&fill(b)))
                .then(a.cmp(&b))
        });
        targets.truncate(MAX_TARGETS);
        let held: Vec<usize> =
            (0..self.holders.len()).filter(|&e| self.holders[e].contains(&busiest)).collect();
        let mut best: Option<(f64, Change)> = None;
        let mut consider = |gain: f64, change: Change| {
            // A swap loads two experts, so it must gain more.
            let gain = gain / change.num_loads() as f64;
            if gain > 0.0 && best.is_none_or(|(found, _)| gain > found) {
                best = Some((gain, change));
            }
        };
        for &to in &targets {
            let has_room = fleet.has_room(to);
            // Experts of the target by share, for swaps.
            let mut backs: Vec<(f64, usize)> = (0..self.holders.len())
                .filter(|&e| self.holders[e].contains(&to) && !self.holders[e].contains(&busiest))
                .map(|e| (self.share(e), e))
                .collect();
            backs.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
            let even = self.even_transfer(busiest, to);
            for &expert in held.iter().filter(|&&e| !self.holders[e].contains(&to)) {
                let share = self.share(expert);
                let keeps_zones = !self.shares_zone(expert, to, Some(busiest))
                    || self.shares_zone(expert, busiest, Some(busiest));
                if has_room && may_replicate {
                    consider(self.gain_of_replica(expert, to), Change::Replicate { expert, to });
                }
                if has_room && keeps_zones {
                    consider(self.gain(busiest, to, share), Change::Move { expert, to });
                }
                if !keeps_zones {
                    continue;
                }
                // The best partner is next to the share that makes both members even.
                let at = backs.partition_point(|&(back, _)| back < share - even);
                for &(back_share, back) in backs[at.saturating_sub(1)..].iter().take(2) {
                    if self.shares_zone(back, busiest, Some(to)) {
                        continue;
                    }
                    let gain = self.gain(busiest, to, share - back_share);
                    consider(gain, Change::Swap { expert, to, back });
                }
            }
        }
        let cost: f64 = (0..self.speeds.len()).map(|member| self.cost(member, 0.0)).sum();
        best.filter(|&(gain, _)| gain > cost * MIN_GAIN).map(|(_, change)| change)
    }

    /// Square of a member's load over its speed, with `more` load.
    fn cost(&self, member: usize, more: f64) -> f64 {
        let load = self.load_of[member] + more;
        load * load / self.speeds[member]
    }

    /// Fall of the cost when `load` goes from one member to another.
    fn gain(&self, from: usize, to: usize, load: f64) -> f64 {
        self.cost(from, 0.0) + self.cost(to, 0.0) - self.cost(from, -load) - self.cost(to, load)
    }

    fn gain_of_replica(&self, expert: usize, to: usize) -> f64 {
        let holders = &self.holders[expert];
        let share = self.loads[expert] / (holders.len() + 1) as f64;
        let less = share - self.share(expert);
        let relief: f64 =
            holders.iter().map(|&member| self.cost(member, 0.0) - self.cost(member, less)).sum();
        relief + self.cost(to, 0.0) - self.cost(to, share)
    }

    /// Load whose transfer makes the pressures of two members equal.
    fn even_transfer(&self, from: usize, to: usize) -> f64 {
        let (a, b) = (self.speeds[from], self.speeds[to]);
        (self.load_of[from] * b - self.load_of[to] * a) / (a + b)
    }

    fn apply(&mut self, change: Change, fleet: &mut Memory) {
        let Some(busiest) = self.busiest() else { return };
        match change {
            Change::Replicate { expert, to } => self.insert(expert, to, fleet),
            Change::Move { expert, to } => {
                self.remove(expert, busiest, fleet);
                self.insert(expert, to, fleet);
            }
            Change::Swap { expert, to, back } => {
                self.remove(expert, busiest, fleet);
                self.remove(back, to, fleet);
                self.insert(expert, to, fleet);
                self.insert(back, busiest, fleet);
            }
        }
    }
}

/// Removes the replica that costs least, of an expert with another one.
fn make_room(layers: &mut [Layer], fleet: &mut Memory) {
    let mut best: Option<(f64, usize, usize)> = None;
    for (idx, layer) in layers.iter().enumerate() {
        for (expert, holders) in layer.holders.iter().enumerate() {
            let share = layer.share(expert);
            if holders.len() > 1 && best.is_none_or(|(found, ..)| share < found) {
                best = Some((share, idx, expert));
            }
        }
    }
    if let Some((_, idx, expert)) = best {
        let layer = &mut layers[idx];
        let holders = layer.holders[expert].iter().copied();
        let busiest = holders.max_by(|&a, &b| layer.pressure(a).total_cmp(&layer.pressure(b)));
        if let Some(member) = busiest {
            layer.remove(expert, member, fleet);
        }
    }
}

/// The ratio of busiest to mean, averaged over the layers by their load.
fn imbalance(layers: &[Layer]) -> f64 {
    let weight = |layer: &Layer| if layer.reported > 0.0 { layer.reported } else { 1e-9 };
    let sum: f64 = layers.iter().map(weight).sum();
    let weighted: f64 = layers.iter().map(|layer| layer.ratio() * weight(layer)).sum();
    if sum > 0.0 { weighted / sum } else { 1.0 }
}

fn collect(layers: &[Layer], num_members: usize) -> Vec<Assignment> {
    let mut assignments = vec![Assignment::default(); num_members];
    for layer in layers {
        let mut experts = vec![Vec::new(); num_members];
        for (expert, holders) in layer.holders.iter().enumerate() {
            for &member in holders {
                experts[member].push(expert as u32);
            }
        }
        for (assignment, experts) in assignments.iter_mut().zip(experts) {
            if !experts.is_empty() {
                assignment.layers.push(LayerAssignment { layer: layer.number, experts });
            }
        }
    }
    assignments
}

fn descending(a: f64, b: f64) -> Ordering {
    b.total_cmp(&a)
}

/// Least load of an expert, as a share of the mean.
const LOAD_FLOOR: f64 = 0.02;
/// Members that can take load from the busiest one, the least loaded first.
const MAX_TARGETS: usize = 8;
/// Least fall of the cost, as a share of it.
const MIN_GAIN: f64 = 1e-7;
/// Most replicas beyond the minimum, as a share of it.
pub(crate) const MAX_SPARE: f64 = 16.0;

#[cfg(test)]
mod tests;
