//! The changes that even a layer out.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use super::Layer;
use crate::planner::rebalance::{MAX_SPARE, Memory, PlanGoals};

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

/// Limits of the changes of a layer.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// Fewest replicas per expert.
    num_replicas: usize,
    /// Most replicas of all experts.
    budget: usize,
    /// Changes end when the ratio of the layer is this low.
    stop_at: f64,
    /// Most experts to load. A swap as the last change may exceed it by one.
    max_moves: usize,
}

impl Layer<'_> {
    /// Evens the layer out, if that lowers its ratio by the margin. So plans end while the load stays, and differences
    /// between reports that are smaller than the margin move nothing. A layer that needs more moves than are left gets
    /// a part of them. The next plans go on with it.
    pub(in crate::planner::rebalance) fn balance(
        &mut self,
        fleet: &mut Memory<'_>,
        goals: &PlanGoals,
        num_replicas: usize,
        num_moves: &mut usize,
    ) {
        let before = self.ratio();
        if self.load_of.len() < 2 || before <= goals.start_above {
            return;
        }
        let least = self.holders.len() * num_replicas;
        let spare = goals.spare.clamp(0.0, MAX_SPARE);
        let budget = ((least as f64 * (1.0 + spare)) as usize).max(least);
        let margin = MARGIN.min(1.0 - goals.stop_at / goals.start_above);
        let aim = before * (1.0 - margin);
        let left = goals.max_moves.saturating_sub(*num_moves);
        let was_over_budget = self.num_held() > budget;
        if !was_over_budget && (left == 0 || self.least_ratio(budget) > aim) {
            return;
        }
        let kept = (self.clone(), fleet.clone());
        let cost = self.total_cost;
        let mut limits =
            Limits { num_replicas, budget, stop_at: goals.stop_at, max_moves: usize::MAX };
        let mut num_made = self.even_out(fleet, limits);
        let mut is_kept = was_over_budget || self.ratio() <= aim;
        if is_kept && num_made > left {
            self.clone_from(&kept.0);
            fleet.clone_from(&kept.1);
            limits.max_moves = left;
            num_made = self.even_out(fleet, limits);
            is_kept = was_over_budget || self.total_cost < cost * (1.0 - MIN_GAIN);
        }
        if is_kept {
            *num_moves += num_made;
        } else {
            (*self, *fleet) = kept;
        }
    }

    fn num_held(&self) -> usize {
        self.holders.iter().map(Vec::len).sum()
    }

    /// The lowest ratio that any placement with `budget` replicas can have: no member is faster than the fastest one.
    fn least_ratio(&self, budget: usize) -> f64 {
        let replicas = self.best_division(1, budget);
        let shares = self.loads.iter().zip(replicas).map(|(load, num)| load / num as f64);
        let slowness = self.traits.slowness.iter().copied().fold(f64::INFINITY, f64::min);
        shares.fold(0.0, f64::max) * slowness / self.mean_pressure
    }

    /// Replicas per expert, at least `least`, with which the hottest replica of the layer is as cold as `budget` allows.
    fn best_division(&self, least: usize, budget: usize) -> Vec<usize> {
        let num_members = self.load_of.len();
        let mut replicas = vec![least; self.loads.len()];
        let share = |expert: usize, replicas: usize| self.loads[expert] / replicas as f64;
        let mut growing: BinaryHeap<Hot> = (0..replicas.len())
            .filter(|_| least < num_members)
            .map(|expert| Hot { share: share(expert, least), expert })
            .collect();
        for _ in replicas.len() * least..budget {
            let Some(Hot { expert, .. }) = growing.pop() else { break };
            replicas[expert] += 1;
            if replicas[expert] < num_members {
                growing.push(Hot { share: share(expert, replicas[expert]), expert });
            }
        }
        replicas
    }

    /// Changes the layer until it is even, or the limit of moves is reached. Returns the moves.
    fn even_out(&mut self, fleet: &mut Memory<'_>, limits: Limits) -> usize {
        self.trim(limits, fleet);
        let mut num_held = self.num_held();
        let mut num_moves = 0;
        while num_moves < limits.max_moves {
            let Some(busiest) = self.busiest() else { break };
            if self.pressure(busiest) <= limits.stop_at * self.mean_pressure {
                break;
            }
            let may_replicate = num_held < limits.budget;
            let Some(change) = self.best_change(busiest, fleet, may_replicate) else { break };
            num_moves += change.num_loads();
            num_held += usize::from(matches!(change, Change::Replicate { .. }));
            self.apply(change, busiest, fleet);
        }
        num_moves
    }

    /// Removes replicas beyond the budget's best division, so that hotter experts can have them. Without moves for those
    /// it removes only replicas beyond the budget.
    fn trim(&mut self, limits: Limits, fleet: &mut Memory<'_>) {
        let wanted = self.best_division(limits.num_replicas, limits.budget);
        let excess = self.num_held().saturating_sub(limits.budget);
        let mut left = excess.saturating_add(limits.max_moves);
        for (expert, &wanted) in wanted.iter().enumerate() {
            while left > 0 && self.holders[expert].len() > wanted {
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
                left -= 1;
            }
        }
    }

    /// The change that relieves the busiest member best, if any lowers the cost.
    fn best_change(
        &self,
        busiest: usize,
        fleet: &Memory<'_>,
        may_replicate: bool,
    ) -> Option<Change> {
        let held: Vec<Candidate> =
            self.experts.of(busiest).map(|expert| self.candidate(expert, busiest)).collect();
        let mut best: Option<(f64, Change)> = None;
        let mut consider = |gain: f64, change: Change| {
            // A swap loads two experts, so it must gain more.
            let gain = gain / change.num_loads() as f64;
            if gain > 0.0 && best.is_none_or(|(found, _)| gain > found) {
                best = Some((gain, change));
            }
        };
        let mut backs: Vec<(f64, usize)> = Vec::new();
        for to in self.least_loaded(busiest, fleet) {
            let has_room = fleet.has_room(to);
            // Experts of the target by share, for swaps.
            backs.clear();
            let of_target = self.experts.of(to).filter(|&e| !self.experts.contains(busiest, e));
            backs.extend(of_target.map(|e| (self.share(e), e)));
            backs.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
            let even = self.even_transfer(busiest, to);
            for &Candidate { expert, share, relief, shares_zone } in &held {
                if self.experts.contains(to, expert) || !self.can_load(expert, to, fleet) {
                    continue;
                }
                if has_room && may_replicate {
                    let share = self.loads[expert] / (self.holders[expert].len() + 1) as f64;
                    let gain = relief + self.cost(to, 0.0) - self.cost(to, share);
                    consider(gain, Change::Replicate { expert, to });
                }
                if !shares_zone && self.shares_zone(expert, to, Some(busiest)) {
                    continue;
                }
                if has_room {
                    consider(self.gain(busiest, to, share), Change::Move { expert, to });
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
        (gain > self.total_cost * MIN_GAIN).then_some(change)
    }

    fn candidate(&self, expert: usize, busiest: usize) -> Candidate {
        let holders = &self.holders[expert];
        let share = self.share(expert);
        let less = self.loads[expert] / (holders.len() + 1) as f64 - share;
        let relief =
            holders.iter().map(|&member| self.cost(member, 0.0) - self.cost(member, less)).sum();
        let shares_zone = self.shares_zone(expert, busiest, Some(busiest));
        Candidate { expert, share, relief, shares_zone }
    }

    /// The [`MAX_TARGETS`] members with the lowest pressure except `busiest`, the lowest first. Of equal ones, those with
    /// the least memory in use.
    fn least_loaded(&self, busiest: usize, fleet: &Memory<'_>) -> impl Iterator<Item = usize> {
        let order = |a: &(f64, f64), b: &(f64, f64)| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1));
        let mut found = [(f64::INFINITY, f64::INFINITY, usize::MAX); MAX_TARGETS];
        let mut num_found = 0;
        // Of a thousand members, few are better than the worst one found so far.
        let mut highest = f64::INFINITY;
        for (member, &pressure) in self.pressures.iter().enumerate() {
            if pressure > highest || member == busiest {
                continue;
            }
            let fill = fleet.fill[member];
            let before =
                |other: &(f64, f64, usize)| order(&(other.0, other.1), &(pressure, fill)).is_le();
            let at = found[..num_found].partition_point(before);
            if at == MAX_TARGETS {
                continue;
            }
            num_found = (num_found + 1).min(MAX_TARGETS);
            found[at..num_found].rotate_right(1);
            found[at] = (pressure, fill, member);
            if num_found == MAX_TARGETS {
                highest = found[MAX_TARGETS - 1].0;
            }
        }
        found.into_iter().take(num_found).map(|(.., member)| member)
    }

    /// Fall of the cost when `load` goes from one member to another.
    fn gain(&self, from: usize, to: usize, load: f64) -> f64 {
        self.cost(from, 0.0) + self.cost(to, 0.0) - self.cost(from, -load) - self.cost(to, load)
    }

    /// Load whose transfer makes the pressures of two members equal.
    fn even_transfer(&self, from: usize, to: usize) -> f64 {
        let (a, b) = (self.traits.slowness[from], self.traits.slowness[to]);
        (self.load_of[from] * a - self.load_of[to] * b) / (a + b)
    }

    fn apply(&mut self, change: Change, busiest: usize, fleet: &mut Memory<'_>) {
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

/// An expert of the busiest member.
struct Candidate {
    expert: usize,
    /// Load that the member has from it.
    share: f64,
    /// Fall of its holders' cost with one more replica.
    relief: f64,
    /// True if another replica is in the member's zone.
    shares_zone: bool,
}

/// Least fall of a layer's ratio for which experts move. Goals whose limits are closer to each other lower it.
pub(in crate::planner::rebalance) const MARGIN: f64 = 0.05;
/// Members that can take load from the busiest one, the least loaded first.
const MAX_TARGETS: usize = 8;
/// Least fall of the cost, as a share of it.
const MIN_GAIN: f64 = 1e-7;
