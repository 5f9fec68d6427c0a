//! One layer while it is planned: its loads and the holders of its experts.

mod even;

#[cfg(test)]
pub(super) use even::MARGIN;

use super::{Memory, PlanMember, Traits};

/// One layer while it is planned.
#[derive(Clone)]
pub(super) struct Layer<'a> {
    pub(super) number: u32,
    /// Load per expert, above 0, so that experts without load are spread, too.
    loads: Vec<f64>,
    /// Load of the whole layer as it was reported.
    pub(super) reported: f64,
    /// Members per expert, ascending.
    pub(super) holders: Vec<Vec<usize>>,
    /// Experts per member: the same as [`holders`](Self::holders), the other way round.
    experts: BitRows,
    /// Experts per member that are in its memory.
    held: Vec<&'a [u32]>,
    /// Experts per member that it cannot read.
    unreadable: Vec<&'a [u32]>,
    /// Load per member.
    load_of: Vec<f64>,
    /// Load over speed per member.
    pressures: Vec<f64>,
    /// Sum of the members' costs: see [`cost`](Self::cost).
    total_cost: f64,
    traits: &'a Traits,
    /// Load over speed of the layer as a whole.
    mean_pressure: f64,
}

impl<'a> Layer<'a> {
    pub(super) fn new(
        number: u32,
        num_experts: usize,
        members: &[PlanMember<'a>],
        traits: &'a Traits,
        reported: &[f64],
    ) -> Self {
        let valid = |expert: usize| {
            reported.get(expert).copied().filter(|load| load.is_finite() && *load > 0.0)
        };
        let sum: f64 = (0..num_experts).filter_map(valid).sum();
        let floor = if sum > 0.0 { sum / num_experts as f64 * LOAD_FLOOR } else { 1.0 };
        let loads: Vec<f64> =
            (0..num_experts).map(|expert| valid(expert).unwrap_or(0.0) + floor).collect();
        let speeds: f64 = members.iter().map(|member| member.speed).sum();
        let mean_pressure = loads.iter().sum::<f64>() / speeds;
        let mut layer = Self {
            number,
            loads,
            reported: sum,
            holders: vec![Vec::new(); num_experts],
            experts: BitRows::new(members.len(), num_experts),
            held: members.iter().map(|member| member.held.experts(number)).collect(),
            unreadable: members.iter().map(|member| member.unreadable.experts(number)).collect(),
            load_of: vec![0.0; members.len()],
            pressures: vec![0.0; members.len()],
            total_cost: 0.0,
            traits,
            mean_pressure,
        };
        for (idx, member) in members.iter().enumerate() {
            let unreadable = layer.unreadable[idx];
            let current = member.current.experts(number).iter();
            for &expert in current.filter(|expert| unreadable.binary_search(expert).is_err()) {
                let expert = expert as usize;
                if expert < num_experts && !layer.experts.contains(idx, expert) {
                    layer.holders[expert].push(idx);
                    layer.experts.insert(idx, expert);
                }
            }
        }
        for expert in 0..num_experts {
            layer.give_load(expert);
        }
        layer
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
    fn can_load(&self, expert: usize, member: usize, fleet: &Memory<'_>) -> bool {
        self.is_readable(expert, member) && (fleet.free[member] > 0 || self.is_held(expert, member))
    }

    /// Load that one holder of an expert has from it.
    pub(super) fn share(&self, expert: usize) -> f64 {
        self.loads[expert] / self.holders[expert].len().max(1) as f64
    }

    /// Load of a member over its speed.
    pub(super) fn pressure(&self, member: usize) -> f64 {
        self.pressures[member]
    }

    /// The member with the highest pressure, and the first of equal ones.
    fn busiest(&self) -> Option<usize> {
        let mut best = None;
        let mut highest = f64::NEG_INFINITY;
        for (member, &pressure) in self.pressures.iter().enumerate() {
            if pressure > highest {
                (best, highest) = (Some(member), pressure);
            }
        }
        best
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
    pub(super) fn shed(&mut self, fleet: &mut Memory<'_>) {
        for member in 0..self.load_of.len() {
            while fleet.used[member] > fleet.room[member] {
                let coldest = self.experts.of(member).min_by(|&a, &b| {
                    let single = |expert: usize| self.holders[expert].len() < 2;
                    single(a).cmp(&single(b)).then(self.share(a).total_cmp(&self.share(b)))
                });
                let Some(expert) = coldest else { break };
                self.remove(expert, member, fleet);
            }
        }
    }

    pub(super) fn remove(&mut self, expert: usize, member: usize, fleet: &mut Memory<'_>) {
        self.take_load(expert);
        self.holders[expert].retain(|&holder| holder != member);
        self.experts.remove(member, expert);
        self.give_load(expert);
        fleet.remove(member, self.is_held(expert, member));
    }

    fn insert(&mut self, expert: usize, member: usize, fleet: &mut Memory<'_>) {
        self.take_load(expert);
        let at = self.holders[expert].partition_point(|&holder| holder < member);
        self.holders[expert].insert(at, member);
        self.experts.insert(member, expert);
        self.give_load(expert);
        fleet.insert(member, self.is_held(expert, member));
    }

    fn take_load(&mut self, expert: usize) {
        let share = self.share(expert);
        for idx in 0..self.holders[expert].len() {
            self.add_load(self.holders[expert][idx], -share);
        }
    }

    fn give_load(&mut self, expert: usize) {
        let share = self.share(expert);
        for idx in 0..self.holders[expert].len() {
            self.add_load(self.holders[expert][idx], share);
        }
    }

    fn add_load(&mut self, member: usize, more: f64) {
        let before = self.cost(member, 0.0);
        self.load_of[member] += more;
        self.pressures[member] = self.load_of[member] * self.traits.slowness[member];
        self.total_cost += self.cost(member, 0.0) - before;
    }

    /// Square of a member's load over its speed, with `more` load.
    fn cost(&self, member: usize, more: f64) -> f64 {
        let load = self.load_of[member] + more;
        load * load * self.traits.slowness[member]
    }

    /// True if a replica on `member` would share the zone of another one than that on `instead_of`.
    fn shares_zone(&self, expert: usize, member: usize, instead_of: Option<usize>) -> bool {
        let zone = self.traits.zones[member];
        let mut others = self.holders[expert].iter().filter(|&&holder| Some(holder) != instead_of);
        zone.is_some() && others.any(|&holder| self.traits.zones[holder] == zone)
    }

    /// Adds a replica on the member that suits best: in another zone than the others, with the lowest pressure, with the
    /// least memory in use. Returns false if no member can load it now.
    pub(super) fn add_replica(&mut self, expert: usize, fleet: &mut Memory<'_>) -> bool {
        let share = self.loads[expert] / (self.holders[expert].len() + 1) as f64;
        let mut best: Option<(bool, f64, f64, usize)> = None;
        // Of a thousand members, few are better than the best one so far.
        let mut limit = (f64::INFINITY, f64::INFINITY);
        let members = self.load_of.iter().zip(&self.traits.slowness).zip(&fleet.fill);
        for (member, ((&load, &slowness), &fill)) in members.enumerate() {
            let pressure = (load + share) * slowness;
            if pressure > limit.0 || (pressure == limit.0 && fill >= limit.1) {
                continue;
            }
            let zone = self.shares_zone(expert, member, None);
            let is_better = best.is_none_or(|best| {
                let order = zone.cmp(&best.0).then(pressure.total_cmp(&best.1));
                order.then(fill.total_cmp(&best.2)).is_lt()
            });
            if is_better
                && fleet.has_room(member)
                && !self.experts.contains(member, expert)
                && self.can_load(expert, member, fleet)
            {
                best = Some((zone, pressure, fill, member));
                if !zone {
                    limit = (pressure, fill);
                }
            }
        }
        if let Some((.., member)) = best {
            self.insert(expert, member, fleet);
        }
        best.is_some()
    }
}

/// A set of small numbers per row, as bits.
#[derive(Clone, Debug)]
struct BitRows {
    words_per_row: usize,
    words: Vec<u64>,
}

impl BitRows {
    fn new(num_rows: usize, num_bits: usize) -> Self {
        let words_per_row = num_bits.div_ceil(64);
        Self { words_per_row, words: vec![0; num_rows * words_per_row] }
    }

    fn contains(&self, row: usize, bit: usize) -> bool {
        self.words[row * self.words_per_row + bit / 64] >> (bit % 64) & 1 == 1
    }

    fn insert(&mut self, row: usize, bit: usize) {
        self.words[row * self.words_per_row + bit / 64] |= 1 << (bit % 64);
    }

    fn remove(&mut self, row: usize, bit: usize) {
        self.words[row * self.words_per_row + bit / 64] &= !(1 << (bit % 64));
    }

    /// The numbers of a row, ascending.
    fn of(&self, row: usize) -> impl Iterator<Item = usize> {
        let words = &self.words[row * self.words_per_row..][..self.words_per_row];
        words.iter().enumerate().flat_map(|(idx, &word)| {
            let mut left = word;
            std::iter::from_fn(move || {
                let bit = (left != 0).then(|| left.trailing_zeros() as usize)?;
                left &= left - 1;
                Some(idx * 64 + bit)
            })
        })
    }
}

/// Least load of an expert, as a share of the mean.
pub(super) const LOAD_FLOOR: f64 = 0.02;
