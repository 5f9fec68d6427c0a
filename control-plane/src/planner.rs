//! Which experts a joining member is to hold. Sans-I/O.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use control_api::{Assignment, LayerAssignment, ModelDescriptor};

/// A member that is to be given experts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Joiner<'a> {
    /// Most (layer, expert) pairs that fit into it; `None` = no limit.
    pub capacity_experts: Option<u32>,
    /// What the predecessor under the same name held: preferred among equals, because its
    /// weights may still be in the page cache.
    pub previous: Option<&'a Assignment>,
}

/// Decides what members hold.
pub trait Planner: fmt::Debug + Send + Sync + 'static {
    /// What a joining member is to hold, given what the other members are assigned that are
    /// leased and not draining.
    fn assign(
        &self,
        model: &ModelDescriptor,
        joiner: &Joiner<'_>,
        others: &[&Assignment],
    ) -> Result<Assignment, PlanError>;

    /// Planned size of the fleet.
    fn num_servers(&self) -> u32;

    /// Planned replicas per expert.
    fn replicas(&self) -> u32;
}

/// Why a joiner can be given nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// Every share of the model is larger than the joiner.
    #[error(
        "the member has room for {capacity} experts, the smallest share of this model over \
         {num_servers} servers with {replicas} replicas has {needed}: give it more memory, plan \
         more servers or fewer replicas"
    )]
    Capacity {
        /// Room of the joiner in (layer, expert) pairs.
        capacity: u32,
        /// Pairs of the smallest share.
        needed: usize,
        /// Planned size of the fleet.
        num_servers: u32,
        /// Planned replicas.
        replicas: u32,
    },
}

/// Settings with which no placement can exist.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlannerConfigError {
    /// No server, or more than supported.
    #[error("a planned fleet of {found} servers: expected 1 to {MAX_SEATS}")]
    NumServers {
        /// The setting.
        found: u32,
    },
    /// Replicas do not fit on distinct servers.
    #[error(
        "{replicas} replicas on {num_servers} servers: replicas sit on distinct servers, so \
         expected 1 to {num_servers}"
    )]
    Replicas {
        /// The setting.
        replicas: u32,
        /// Planned size of the fleet.
        num_servers: u32,
    },
}

/// Divides the model into as many seats as servers are planned; a joiner takes the seat that
/// needs it most.
///
/// Per layer every expert is on `replicas` distinct seats and seats differ by at most one expert.
/// Replicas of one seat's experts are spread over many other seats, so that a death loads all
/// survivors alike rather than one mirror. Members beyond the planned number double a seat.
#[derive(Debug)]
pub struct SeatPlanner {
    num_seats: u32,
    replicas: u32,
    /// The division of the last model seen; a fleet has one model.
    division: Mutex<Option<Arc<Division>>>,
}

impl SeatPlanner {
    /// A planner for `num_seats` servers and `replicas` replicas per expert.
    pub fn new(num_seats: u32, replicas: u32) -> Result<Self, PlannerConfigError> {
        if !(1..=MAX_SEATS).contains(&num_seats) {
            return Err(PlannerConfigError::NumServers { found: num_seats });
        }
        if !(1..=num_seats).contains(&replicas) {
            return Err(PlannerConfigError::Replicas { replicas, num_servers: num_seats });
        }
        Ok(Self { num_seats, replicas, division: Mutex::new(None) })
    }

    fn division(&self, model: &ModelDescriptor) -> Arc<Division> {
        let mut cached = self.division.lock().unwrap_or_else(PoisonError::into_inner);
        match &*cached {
            Some(division) if division.model == *model => Arc::clone(division),
            _ => {
                let division = Arc::new(divide(model, self.num_seats, self.replicas));
                *cached = Some(Arc::clone(&division));
                division
            }
        }
    }
}

impl Planner for SeatPlanner {
    fn assign(
        &self,
        model: &ModelDescriptor,
        joiner: &Joiner<'_>,
        others: &[&Assignment],
    ) -> Result<Assignment, PlanError> {
        let division = self.division(model);
        let seats = &division.seats;
        let mut num_holders = vec![0u32; seats.len()];
        for other in others {
            // Small models have seats that are alike: their holders sit on one each.
            let alike = division.seats_of.get(*other).into_iter().flatten().copied();
            if let Some(seat) = alike.min_by_key(|&seat| num_holders[seat]) {
                num_holders[seat] += 1;
            }
        }
        let shortage = Shortage::count(model, self.replicas, others);
        let fits = |seat: &Assignment| {
            joiner.capacity_experts.is_none_or(|capacity| seat.num_experts() <= capacity as usize)
        };
        let best = (0..seats.len()).filter(|&idx| fits(&seats[idx])).min_by_key(|&idx| {
            let is_previous = joiner.previous == Some(&seats[idx]);
            (num_holders[idx], !is_previous, std::cmp::Reverse(shortage.of(&seats[idx])), idx)
        });
        match best {
            Some(idx) => Ok(seats[idx].clone()),
            None => Err(PlanError::Capacity {
                capacity: joiner.capacity_experts.unwrap_or(u32::MAX),
                needed: seats.iter().map(Assignment::num_experts).min().unwrap_or(0),
                num_servers: self.num_seats,
                replicas: self.replicas,
            }),
        }
    }

    fn num_servers(&self) -> u32 {
        self.num_seats
    }

    fn replicas(&self) -> u32 {
        self.replicas
    }
}

/// A model divided into seats.
#[derive(Debug)]
struct Division {
    model: ModelDescriptor,
    seats: Vec<Assignment>,
    seats_of: HashMap<Assignment, Vec<usize>>,
}

/// Replicas missing per (layer, expert).
struct Shortage {
    layers: HashMap<u32, Vec<u32>>,
}

impl Shortage {
    fn count(model: &ModelDescriptor, replicas: u32, others: &[&Assignment]) -> Self {
        let full = vec![replicas; model.num_experts as usize];
        let mut layers: HashMap<u32, Vec<u32>> =
            model.moe_layers.iter().map(|&layer| (layer, full.clone())).collect();
        for entry in others.iter().flat_map(|other| &other.layers) {
            let Some(missing) = layers.get_mut(&entry.layer) else { continue };
            for &expert in &entry.experts {
                if let Some(count) = missing.get_mut(expert as usize) {
                    *count = count.saturating_sub(1);
                }
            }
        }
        Self { layers }
    }

    fn of(&self, seat: &Assignment) -> u64 {
        let missing = |layer: u32, expert: u32| {
            self.layers.get(&layer).and_then(|layer| layer.get(expert as usize)).copied()
        };
        let pairs =
            seat.layers.iter().flat_map(|l| l.experts.iter().map(move |&expert| (l.layer, expert)));
        pairs.map(|(layer, expert)| u64::from(missing(layer, expert).unwrap_or(0))).sum()
    }
}

fn divide(model: &ModelDescriptor, num_seats: u32, replicas: u32) -> Division {
    let num = num_seats as usize;
    let mut total = vec![0u32; num];
    // How often two seats share an expert: kept even, so that a death is borne by all.
    let mut shared = vec![0u32; num * num];
    let mut seats = vec![Assignment::default(); num];
    for &layer in &model.moe_layers {
        let mut load = vec![0u32; num];
        let mut experts = vec![Vec::new(); num];
        for expert in 0..model.num_experts {
            let mut chosen: Vec<usize> = Vec::with_capacity(replicas as usize);
            for _ in 0..replicas {
                let overlap =
                    |seat: usize| chosen.iter().map(|&c| shared[seat * num + c]).sum::<u32>();
                let free = (0..num).filter(|seat| !chosen.contains(seat));
                // The emptiest seat of the layer first: this alone keeps seats within one.
                let seat = free.min_by_key(|&seat| (load[seat], total[seat], overlap(seat), seat));
                chosen.extend(seat);
            }
            for &seat in &chosen {
                load[seat] += 1;
                total[seat] += 1;
                experts[seat].push(expert);
                for &other in chosen.iter().filter(|&&other| other != seat) {
                    shared[seat * num + other] += 1;
                }
            }
        }
        for (seat, experts) in seats.iter_mut().zip(experts) {
            if !experts.is_empty() {
                seat.layers.push(LayerAssignment { layer, experts });
            }
        }
    }
    // With more servers than experts to share out, members beyond the experts double a seat.
    seats.retain(|seat| !seat.is_empty());
    let mut seats_of: HashMap<Assignment, Vec<usize>> = HashMap::new();
    for (idx, seat) in seats.iter().enumerate() {
        seats_of.entry(seat.clone()).or_default().push(idx);
    }
    Division { model: model.clone(), seats, seats_of }
}

/// Most seats of a [`SeatPlanner`].
pub const MAX_SEATS: u32 = 1024;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn model(num_layers: u32, num_experts: u32) -> ModelDescriptor {
        ModelDescriptor {
            fingerprint: "0123456789abcdef".to_owned(),
            architecture: "test".to_owned(),
            hidden: 64,
            moe_layers: (0..num_layers).map(|layer| layer * 2 + 1).collect(),
            num_experts,
            top_k: 1,
        }
    }

    /// Lets members join one after another.
    fn fill(planner: &SeatPlanner, model: &ModelDescriptor, num_members: u32) -> Vec<Assignment> {
        let mut fleet: Vec<Assignment> = Vec::new();
        for _ in 0..num_members {
            let others: Vec<&Assignment> = fleet.iter().collect();
            fleet.push(planner.assign(model, &Joiner::default(), &others).unwrap());
        }
        fleet
    }

    fn num_holders(fleet: &[Assignment], layer: u32, expert: u32) -> usize {
        fleet.iter().filter(|member| member.contains(layer, expert)).count()
    }

    proptest! {
        #[test]
        fn a_full_fleet_holds_every_expert_r_times_in_balance(
            num_layers in 1u32..5, num_experts in 1u32..80, num_seats in 1u32..20, r in 1u32..6,
        ) {
            let replicas = r.min(num_seats);
            let model = model(num_layers, num_experts);
            let planner = SeatPlanner::new(num_seats, replicas).unwrap();
            // More servers than experts: as many seats as there is something to share out.
            let num_seats = planner.division(&model).seats.len() as u32;
            let fleet = fill(&planner, &model, num_seats);
            for &layer in &model.moe_layers {
                for expert in 0..num_experts {
                    prop_assert_eq!(num_holders(&fleet, layer, expert), replicas as usize);
                }
                let sizes = fleet.iter().map(|member| member.experts(layer).len());
                let (min, max) = (sizes.clone().min().unwrap(), sizes.max().unwrap());
                prop_assert!(max - min <= 1, "layer {}: {} to {}", layer, min, max);
            }
            let totals = fleet.iter().map(Assignment::num_experts);
            let (min, max) = (totals.clone().min().unwrap(), totals.max().unwrap());
            prop_assert!(max - min <= 2, "whole model: {} to {}", min, max);
            for member in &fleet {
                prop_assert!(member.layers.is_sorted_by(|a, b| a.layer < b.layer));
                for entry in &member.layers {
                    prop_assert!(entry.experts.is_sorted_by(|a, b| a < b));
                    prop_assert!(entry.experts.iter().all(|&expert| expert < num_experts));
                }
            }
        }

        #[test]
        fn a_joiner_after_deaths_restores_what_is_missing(
            num_experts in 1u32..64, num_seats in 1u32..12, r in 1u32..4,
            deaths in prop::collection::vec(any::<prop::sample::Index>(), 1..8),
        ) {
            let replicas = r.min(num_seats);
            let model = model(2, num_experts);
            let planner = SeatPlanner::new(num_seats, replicas).unwrap();
            let num_seats = planner.division(&model).seats.len() as u32;
            let mut fleet = fill(&planner, &model, num_seats);
            let mut num_dead = 0;
            for death in deaths {
                if !fleet.is_empty() {
                    fleet.remove(death.index(fleet.len()));
                    num_dead += 1;
                }
            }
            for _ in 0..num_dead {
                let others: Vec<&Assignment> = fleet.iter().collect();
                let joined = planner.assign(&model, &Joiner::default(), &others).unwrap();
                fleet.push(joined);
            }
            for &layer in &model.moe_layers {
                for expert in 0..num_experts {
                    prop_assert_eq!(num_holders(&fleet, layer, expert), replicas as usize);
                }
            }
        }

        #[test]
        fn members_beyond_the_plan_add_replicas(
            num_experts in 1u32..40, num_seats in 1u32..8, extra in 1u32..12,
        ) {
            let model = model(1, num_experts);
            let planner = SeatPlanner::new(num_seats, 1).unwrap();
            let num_seats = planner.division(&model).seats.len() as u32;
            let fleet = fill(&planner, &model, num_seats + extra);
            prop_assert!(fleet.iter().all(|member| !member.is_empty()));
            let fewest = ((num_seats + extra) / num_seats) as usize;
            for expert in 0..num_experts {
                let found = num_holders(&fleet, 1, expert);
                prop_assert!(found == fewest || found == fewest + 1, "{} holders", found);
            }
        }
    }

    #[test]
    fn early_joiners_cover_as_much_as_they_can() {
        let model = model(4, 16);
        let planner = SeatPlanner::new(4, 2).unwrap();
        for num_members in 1..=4 {
            let fleet = fill(&planner, &model, num_members);
            let covered = (0..16).filter(|&expert| num_holders(&fleet, 1, expert) > 0).count();
            assert!(covered >= (8 * num_members.min(2)) as usize - 3, "{num_members}: {covered}");
        }
    }

    #[test]
    fn a_death_is_shared_by_all_survivors() {
        let model = model(8, 128);
        let fleet = fill(&SeatPlanner::new(8, 2).unwrap(), &model, 8);
        for dead in &fleet {
            let mut inherited = Vec::new();
            for other in fleet.iter().filter(|other| *other != dead) {
                let shared = dead.layers.iter().flat_map(|entry| {
                    entry.experts.iter().filter(|&&expert| other.contains(entry.layer, expert))
                });
                inherited.push(shared.count());
            }
            let fair = dead.num_experts() / 7;
            assert!(inherited.iter().all(|&count| count <= fair + fair / 2), "{inherited:?}");
        }
    }

    #[test]
    fn the_predecessors_seat_is_preferred_among_equals() {
        let model = model(2, 16);
        let planner = SeatPlanner::new(4, 2).unwrap();
        let fleet = fill(&planner, &model, 4);
        let others = [&fleet[0], &fleet[2]];
        for previous in [&fleet[1], &fleet[3]] {
            let joiner = Joiner { previous: Some(previous), ..Joiner::default() };
            assert_eq!(&planner.assign(&model, &joiner, &others).unwrap(), previous);
        }
        let joiner = Joiner { previous: Some(&fleet[0]), ..Joiner::default() };
        assert_ne!(planner.assign(&model, &joiner, &others).unwrap(), fleet[0]);
    }

    #[test]
    fn capacity_is_respected_or_named() {
        let model = model(2, 10);
        let planner = SeatPlanner::new(4, 1).unwrap();
        // Seats of 3, 3, 2, 2 experts per layer or a mixture: 4 to 6 in all.
        let joiner = Joiner { capacity_experts: Some(5), ..Joiner::default() };
        assert!(planner.assign(&model, &joiner, &[]).unwrap().num_experts() <= 5);
        let joiner = Joiner { capacity_experts: Some(3), ..Joiner::default() };
        let err = planner.assign(&model, &joiner, &[]).unwrap_err();
        let text = err.to_string();
        assert!(text.contains("room for 3 experts") && text.contains("over 4 servers"), "{text}");
    }

    #[test]
    fn impossible_settings_are_named() {
        assert_eq!(
            SeatPlanner::new(0, 1).unwrap_err(),
            PlannerConfigError::NumServers { found: 0 }
        );
        let err = SeatPlanner::new(2, 3).unwrap_err().to_string();
        assert!(err.contains("3 replicas on 2 servers"), "{err}");
    }
}
