//! Plans the experts of a whole fleet from the load. Sans-I/O: a pure function of its input.
//!
//! Each layer is planned by itself, because a layer's calls wait for its busiest server. The load of an expert is
//! taken to split evenly over its replicas. First every expert gets its minimum of replicas. Then the
//! planner changes each layer whose busiest server is above the tolerance. A change is one more replica of an expert,
//! a move to another server, or a swap of two experts. The planner applies the one that lowers the sum of the squares
//! of the servers' loads most.
//! It starts from the present assignments, so a layer within the tolerance does not change.

mod layer;

use std::cmp::Ordering;

use control_api::{Assignment, LayerAssignment, ModelDescriptor};

use layer::Layer;

/// A member to plan for.
#[derive(Clone, Copy, Debug)]
pub struct PlanMember<'a> {
    /// Most (layer, expert) pairs that fit into its memory. `None` means no limit.
    pub capacity_experts: Option<u32>,
    /// Relative speed. A member of speed 2 gets twice the load of a member of speed 1. Must be positive.
    pub speed: f64,
    /// Failure domain. Replicas of an expert are spread over zones where there is a choice.
    pub zone: Option<&'a str>,
    /// Experts that the member shall have by the plan in force. Experts that the model does not have are left out.
    pub current: &'a Assignment,
    /// Experts in its memory or about to be: loaded ones, ones that it loads, and old ones that it has yet to free.
    pub held: &'a Assignment,
    /// Experts in its memory beyond [`held`](Self::held), for instance old ones that it no longer offers.
    pub hidden: u32,
    /// Experts that it has failed to read. The plan does not place them there.
    pub unreadable: &'a Assignment,
}

impl<'a> PlanMember<'a> {
    /// A member of speed 1 without limit of memory, zone and unreadable experts, whose experts are all loaded.
    pub fn new(current: &'a Assignment) -> Self {
        Self {
            capacity_experts: None,
            speed: 1.0,
            zone: None,
            current,
            held: current,
            hidden: 0,
            unreadable: NONE,
        }
    }
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
    /// Experts without a replica in this plan, because the members that have room for one must free old experts
    /// first. A later plan places them.
    pub num_waiting: usize,
    /// Experts as (layer, expert) that no member can read.
    pub unplaced: Vec<(u32, u32)>,
    /// Load of the busiest server over the mean, averaged over the layers by load, before and after.
    pub imbalance: (f64, f64),
}

impl FleetPlan {
    /// Names experts that the plan leaves without a replica, if there are any.
    pub fn shortage(&self) -> Option<String> {
        if let Some((layer, expert)) = self.unplaced.first() {
            let more = match self.unplaced.len() - 1 {
                0 => String::new(),
                num => format!(" nor {num} others"),
            };
            return Some(format!(
                "no server can read expert {expert} of layer {layer}{more}: check the files of their checkpoints, or \
                 start a server with good ones"
            ));
        }
        (self.num_waiting > 0).then(|| {
            format!(
                "{} experts wait until servers have freed old ones: give servers more memory, or add some",
                self.num_waiting
            )
        })
    }
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
    let traits = Traits::of(members);
    let mut fleet = Memory::of(members, &traits, needed);
    let room = fleet.room.iter().sum();
    if needed > room {
        return Err(NoRoom { num_members: members.len(), room, needed });
    }
    let mut layers: Vec<Layer<'_>> = model
        .moe_layers
        .iter()
        .enumerate()
        .map(|(idx, &number)| {
            let loads = loads.get(idx).map_or(&[][..], Vec::as_slice);
            Layer::new(number, num_experts, members, &traits, loads)
        })
        .collect();
    for layer in &layers {
        for (expert, holders) in layer.holders.iter().enumerate() {
            holders.iter().for_each(|&member| fleet.insert(member, layer.is_held(expert, member)));
        }
    }
    // A member may have got less memory than its experts need.
    for layer in &mut layers {
        layer.shed(&mut fleet);
    }
    let before = imbalance(&layers);
    let num_replicas = (goals.min_replicas as usize).clamp(1, members.len().max(1));
    // All first replicas, then all second ones: if memory is short, every expert has some.
    let mut num_waiting = 0;
    let mut unplaced = Vec::new();
    for level in 1..=num_replicas {
        for idx in 0..layers.len() {
            for expert in 0..num_experts {
                if layers[idx].holders[expert].len() >= level
                    || layers[idx].add_replica(expert, &mut fleet)
                    || level > 1
                {
                    continue;
                }
                match place_first(&mut layers, idx, expert, &mut fleet) {
                    First::Placed => {}
                    First::Waits => num_waiting += 1,
                    First::Unreadable => unplaced.push((layers[idx].number, expert as u32)),
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
    Ok(FleetPlan { assignments, num_loads, num_waiting, unplaced, imbalance: (before, after) })
}

/// Properties of the members that a plan does not change.
struct Traits {
    /// 1 over the speed.
    slowness: Vec<f64>,
    /// Zones as numbers.
    zones: Vec<Option<usize>>,
}

impl Traits {
    fn of(members: &[PlanMember<'_>]) -> Self {
        let mut names: Vec<&str> = members.iter().filter_map(|member| member.zone).collect();
        names.sort_unstable();
        names.dedup();
        let zone =
            |member: &PlanMember<'_>| member.zone.and_then(|zone| names.binary_search(&zone).ok());
        Self {
            slowness: members.iter().map(|member| 1.0 / member.speed).collect(),
            zones: members.iter().map(zone).collect(),
        }
    }
}

/// Memory of the members in experts.
#[derive(Clone)]
struct Memory<'a> {
    traits: &'a Traits,
    room: Vec<usize>,
    /// Experts of the plan, with room that is reserved.
    used: Vec<usize>,
    /// [`used`](Self::used) over the speed.
    fill: Vec<f64>,
    /// Experts that fit beside all that are in memory now. Below 0 if the plan already loads more.
    free: Vec<isize>,
}

impl<'a> Memory<'a> {
    fn of(members: &[PlanMember<'_>], traits: &'a Traits, needed: usize) -> Self {
        let room = |member: &PlanMember<'_>| {
            member.capacity_experts.map_or(needed, |most| needed.min(most as usize))
        };
        let free = |member: &PlanMember<'_>| match member.capacity_experts {
            None => isize::MAX / 2,
            Some(most) => {
                most as isize - member.held.num_experts() as isize - member.hidden as isize
            }
        };
        Self {
            traits,
            room: members.iter().map(room).collect(),
            used: vec![0; members.len()],
            fill: vec![0.0; members.len()],
            free: members.iter().map(free).collect(),
        }
    }

    fn has_room(&self, member: usize) -> bool {
        self.used[member] < self.room[member]
    }

    fn insert(&mut self, member: usize, is_held: bool) {
        self.set_used(member, self.used[member] + 1);
        self.free[member] -= isize::from(!is_held);
    }

    /// An expert that is in memory stays there until the member frees it, so only a load that is not made gives
    /// memory back.
    fn remove(&mut self, member: usize, is_held: bool) {
        self.set_used(member, self.used[member] - 1);
        self.free[member] += isize::from(!is_held);
    }

    /// Keeps room for an expert that no layer has placed yet.
    fn reserve(&mut self, member: usize) {
        self.set_used(member, self.used[member] + 1);
    }

    fn set_used(&mut self, member: usize, used: usize) {
        self.used[member] = used;
        self.fill[member] = used as f64 * self.traits.slowness[member];
    }
}

/// Outcome for an expert without any replica.
enum First {
    Placed,
    /// A member has room for it as soon as it has freed an old expert.
    Waits,
    /// No member can read it.
    Unreadable,
}

/// Places the only replica of an expert that no member can load as things are. If need be, it removes the replica
/// that costs least, of an expert with another one, from a member that can read this one.
fn place_first(
    layers: &mut [Layer<'_>],
    layer_idx: usize,
    expert: usize,
    fleet: &mut Memory<'_>,
) -> First {
    let num_members = fleet.room.len();
    let readable: Vec<usize> =
        (0..num_members).filter(|&member| layers[layer_idx].is_readable(expert, member)).collect();
    if readable.is_empty() {
        return First::Unreadable;
    }
    if !readable.iter().any(|&member| fleet.has_room(member)) {
        remove_cheapest(layers, &readable, fleet);
        if layers[layer_idx].add_replica(expert, fleet) {
            return First::Placed;
        }
    }
    // The room is reserved, so that this plan and the next ones do not give it to another expert.
    let reserved = readable.into_iter().filter(|&member| fleet.has_room(member));
    if let Some(member) = reserved.max_by_key(|&member| fleet.room[member] - fleet.used[member]) {
        fleet.reserve(member);
    }
    First::Waits
}

/// Removes a replica from one of `members`: the one of the least load, of an expert that has another one.
fn remove_cheapest(layers: &mut [Layer<'_>], members: &[usize], fleet: &mut Memory<'_>) {
    let mut best: Option<(f64, usize, usize)> = None;
    for (idx, layer) in layers.iter().enumerate() {
        for (expert, holders) in layer.holders.iter().enumerate() {
            let share = layer.share(expert);
            if holders.len() > 1
                && best.is_none_or(|(found, ..)| share < found)
                && holders.iter().any(|holder| members.binary_search(holder).is_ok())
            {
                best = Some((share, idx, expert));
            }
        }
    }
    if let Some((_, idx, expert)) = best {
        let layer = &mut layers[idx];
        let holders = layer.holders[expert].iter().copied();
        let able = holders.filter(|holder| members.binary_search(holder).is_ok());
        if let Some(member) = able.max_by(|&a, &b| layer.pressure(a).total_cmp(&layer.pressure(b)))
        {
            layer.remove(expert, member, fleet);
        }
    }
}

/// The ratio of busiest to mean, averaged over the layers by their load.
fn imbalance(layers: &[Layer<'_>]) -> f64 {
    let weight = |layer: &Layer| if layer.reported > 0.0 { layer.reported } else { 1e-9 };
    let sum: f64 = layers.iter().map(weight).sum();
    let weighted: f64 = layers.iter().map(|layer| layer.ratio() * weight(layer)).sum();
    if sum > 0.0 { weighted / sum } else { 1.0 }
}

fn collect(layers: &[Layer<'_>], num_members: usize) -> Vec<Assignment> {
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

/// Most replicas beyond the minimum, as a share of it.
pub(crate) const MAX_SPARE: f64 = 16.0;
const NONE: &Assignment = &Assignment { layers: Vec::new() };

#[cfg(test)]
mod tests;
