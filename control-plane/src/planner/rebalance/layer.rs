//! One layer while it is planned: its loads, the holders of its experts, and the changes that even it out.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use super::{MAX_SPARE, Memory, PlanGoals, PlanMember};

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
    /// Load over speed of the layer as a whole.
    mean_pressure: f64,
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
        let speeds: Vec<f64> = members.iter().map(|member| member.speed).collect();
        let mean_pressure = loads.iter().sum::<f64>() / speeds.iter().sum::<f64>();
        let mut layer = Self {
            number,
            loads,
            reported: sum,
            holders: vec![Vec::new(); num_experts],
            held: members.iter().map(|member| member.held.experts(number)).collect(),
            unreadable: members.iter().map(|member| member.unreadable.experts(number)).collect(),
            load_of: vec![0.0; members.len()],
            speeds,
            mean_pressure,
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

    /// The member with the highest pressure, and the first of equal ones.
    fn busiest(&self) -> Option<usize> {
        let pressures = (0..self.speeds.len()).map(|member| (member, self.pressure(member)));
        let higher = |a: (usize, f64), b: (usize, f64)| {
            if b.1.total_cmp(&a.1).is_gt() { b } else { a }
        };
        pressures.reduce(higher).map(|(member, _)| member)
    }

    /// Load of the busiest member over the mean.
    pub(super) fn ratio(&self) -> f64 {
        self.busiest().map_or(1.0, |member| self.pressure(member) / self.mean_pressure)
    }

    /// Load of the busiest member beyond the mean.
    pub(super) fn excess(&self) -> f64 {
        self.busiest().map_or(0.0, |member| self.pressure(member) - self.mean_pressure)
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
        let holders = &self.holders[expert];
        let share = self.loads[expert] / (holders.len() + 1) as f64;
        let mut best: Option<(bool, f64, f64, usize)> = None;
        for member in 0..self.speeds.len() {
            if !fleet.has_room(member) {
                continue;
            }
            let pressure = (self.load_of[member] + share) / self.speeds[member];
            // Of a thousand members, few are better than the best one so far.
            if best.is_some_and(|best| !best.0 && pressure > best.1) {
                continue;
            }
            let zone = self.shares_zone(expert, member, None);
            let fill = fleet.used[member] as f64 / self.speeds[member];
            let is_better = best.is_none_or(|best| {
                let order = zone.cmp(&best.0).then(pressure.total_cmp(&best.1));
                order.then(fill.total_cmp(&best.2)).is_lt()
            });
            if is_better
                && holders.binary_search(&member).is_err()
                && self.can_load(expert, member, fleet)
            {
                best = Some((zone, pressure, fill, member));
            }
        }
        if let Some((.., member)) = best {
            self.insert(expert, member, fleet);
        }
        best.is_some()
    }

    /// Evens the layer out, if that makes it better by the margin or brings it within the tolerance. So plans end while
    /// the load stays: each one that changes the layer lowers its ratio.
    pub(super) fn balance(
        &mut self,
        fleet: &mut Memory,
        goals: &PlanGoals,
        num_replicas: usize,
        num_moves: &mut usize,
    ) {
        let before = self.ratio();
        if self.speeds.len() < 2 || before <= goals.start_above {
            return;
        }
        let spare = goals.spare.clamp(0.0, MAX_SPARE);
        let budget = (self.holders.len() * num_replicas) as f64 * (1.0 + spare);
        let budget = (budget as usize).max(self.holders.len() * num_replicas);
        let was_over_budget = self.num_held() > budget;
        let kept = (self.holders.clone(), self.load_of.clone(), fleet.clone(), *num_moves);
        let cost = self.total_cost();
        let is_complete = self.even_out(fleet, goals, num_replicas, budget, num_moves);
        let after = self.ratio();
        let is_better = after <= goals.start_above || after <= before * (1.0 - MARGIN);
        // The next plans go on with a layer that needs more moves than one plan has.
        let is_nearer = !is_complete && self.total_cost() < cost * (1.0 - MIN_GAIN);
        if !is_better && !is_nearer && !was_over_budget {
            (self.holders, self.load_of, *fleet, *num_moves) = kept;
        }
    }

    fn num_held(&self) -> usize {
        self.holders.iter().map(Vec::len).sum()
    }

    /// Changes the layer until it is even. Returns false if the limit of moves has ended that.
    fn even_out(
        &mut self,
        fleet: &mut Memory,
        goals: &PlanGoals,
        num_replicas: usize,
        budget: usize,
        num_moves: &mut usize,
    ) -> bool {
        self.trim(budget, num_replicas, fleet);
        let mut num_held = self.num_held();
        while self.ratio() > goals.stop_at {
            if *num_moves >= goals.max_moves {
                return false;
            }
            let Some(change) = self.best_change(fleet, num_held < budget) else { break };
            *num_moves += change.num_loads();
            num_held += usize::from(matches!(change, Change::Replicate { .. }));
            self.apply(change, fleet);
        }
        true
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
        let targets = self.least_loaded(busiest, fleet);
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
        let (gain, change) = best?;
        (gain > self.total_cost() * MIN_GAIN).then_some(change)
    }

    fn total_cost(&self) -> f64 {
        (0..self.speeds.len()).map(|member| self.cost(member, 0.0)).sum()
    }

    /// The [`MAX_TARGETS`] members with the lowest pressure except `busiest`, the lowest first.
    fn least_loaded(&self, busiest: usize, fleet: &Memory) -> Vec<usize> {
        let key = |member: usize| {
            let fill = fleet.used[member] as f64 / self.speeds[member];
            (self.pressure(member), fill, member)
        };
        let order = |a: &(f64, f64, usize), b: &(f64, f64, usize)| {
            a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)).then(a.2.cmp(&b.2))
        };
        let members = (0..self.speeds.len()).filter(|&member| member != busiest);
        let mut keys: Vec<(f64, f64, usize)> = members.map(key).collect();
        if keys.len() > MAX_TARGETS {
            keys.select_nth_unstable_by(MAX_TARGETS, order);
            keys.truncate(MAX_TARGETS);
        }
        keys.sort_unstable_by(order);
        keys.into_iter().map(|(.., member)| member).collect()
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

/// Least fall of a layer's ratio for which experts move, unless it comes within the tolerance.
const MARGIN: f64 = 0.05;
/// Least load of an expert, as a share of the mean.
const LOAD_FLOOR: f64 = 0.02;
/// Members that can take load from the busiest one, the least loaded first.
const MAX_TARGETS: usize = 8;
/// Least fall of the cost, as a share of it.
const MIN_GAIN: f64 = 1e-7;
