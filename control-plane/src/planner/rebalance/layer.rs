//! One layer while it is planned: its loads, the holders of its experts, and the changes that even it out.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use super::{MAX_SPARE, Memory, PlanGoals, PlanMember, descending};

/// One layer while it is planned.
pub(super) struct Layer<'a> {
    pub(super) number: u32,
    /// Load per expert, above 0, so that experts without load are spread, too.
    loads: Vec<f64>,
    /// Load of the whole layer as it was reported.
    pub(super) reported: f64,
    /// Members per expert.
    pub(super) holders: Vec<Vec<usize>>,
    /// Experts per member that are in its memory.
    held: Vec<&'a [u32]>,
    /// Experts per member that it cannot read.
    unreadable: Vec<&'a [u32]>,
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

impl<'a> Layer<'a> {
    pub(super) fn new(
        number: u32,
        num_experts: usize,
        members: &[PlanMember<'a>],
        reported: &[f64],
    ) -> Self {
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
            held: members.iter().map(|member| member.held.experts(number)).collect(),
            unreadable: members.iter().map(|member| member.unreadable.experts(number)).collect(),
            load_of: vec![0.0; members.len()],
            speeds: members.iter().map(|member| member.speed).collect(),
            zones: members.iter().map(zone).collect(),
        };
        for (idx, member) in members.iter().enumerate() {
            let unreadable = layer.unreadable[idx];
            let current = member.current.experts(number).iter();
            for &expert in current.filter(|expert| unreadable.binary_search(expert).is_err()) {
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

    /// True if an expert is in a member's memory, so that the member need not load it.
    pub(super) fn is_held(&self, expert: usize, member: usize) -> bool {
        self.held[member].binary_search(&(expert as u32)).is_ok()
    }

    /// True if a member can have an expert once it has room for it.
    pub(super) fn is_readable(&self, expert: usize, member: usize) -> bool {
        self.unreadable[member].binary_search(&(expert as u32)).is_err()
    }

    /// True if a member can load an expert now, or has it in memory. Its final number of experts is not looked at.
    fn can_load(&self, expert: usize, member: usize, fleet: &Memory) -> bool {
        self.is_readable(expert, member) && (self.is_held(expert, member) || fleet.free[member] > 0)
    }

    /// Load that one holder of an expert has from it.
    pub(super) fn share(&self, expert: usize) -> f64 {
        self.loads[expert] / self.holders[expert].len().max(1) as f64
    }

    /// Load of a member over its speed.
    pub(super) fn pressure(&self, member: usize) -> f64 {
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
    pub(super) fn ratio(&self) -> f64 {
        self.busiest().map_or(1.0, |member| self.pressure(member) / self.mean_pressure())
    }

    /// Load of the busiest member beyond the mean.
    pub(super) fn excess(&self) -> f64 {
        self.busiest().map_or(0.0, |member| self.pressure(member) - self.mean_pressure())
    }

    /// Removes experts from members that have more than their memory holds, replicated and cold ones first.
    pub(super) fn shed(&mut self, fleet: &mut Memory) {
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

    pub(super) fn remove(&mut self, expert: usize, member: usize, fleet: &mut Memory) {
        self.take_load(expert);
        self.holders[expert].retain(|&holder| holder != member);
        self.give_load(expert);
        fleet.remove(member, self.is_held(expert, member));
    }

    fn insert(&mut self, expert: usize, member: usize, fleet: &mut Memory) {
        self.take_load(expert);
        let at = self.holders[expert].partition_point(|&holder| holder < member);
        self.holders[expert].insert(at, member);
        self.give_load(expert);
        fleet.insert(member, self.is_held(expert, member));
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

    /// Adds a replica on the member that suits best. Returns false if no member can load it now.
    pub(super) fn add_replica(&mut self, expert: usize, fleet: &mut Memory) -> bool {
        let share = self.loads[expert] / (self.holders[expert].len() + 1) as f64;
        let free = (0..self.speeds.len())
            .filter(|&member| fleet.has_room(member) && self.can_load(expert, member, fleet))
            .filter(|member| !self.holders[expert].contains(member));
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

    pub(super) fn balance(
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
            let free = |e: usize| !self.holders[e].contains(&to) && self.can_load(e, to, fleet);
            for &expert in held.iter().filter(|&&e| free(e)) {
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
                    if self.shares_zone(back, busiest, Some(to))
                        || !self.can_load(back, busiest, fleet)
                    {
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

/// Least load of an expert, as a share of the mean.
const LOAD_FLOOR: f64 = 0.02;
/// Members that can take load from the busiest one, the least loaded first.
const MAX_TARGETS: usize = 8;
/// Least fall of the cost, as a share of it.
const MIN_GAIN: f64 = 1e-7;
