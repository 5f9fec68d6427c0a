//! Assigns experts to members. Sans-I/O.

pub mod rebalance;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use control_api::{Assignment, LayerAssignment, ModelDescriptor};

/// A joining member that needs experts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Joiner<'a> {
    /// Most (layer, expert) pairs that fit into its memory. `None` means no limit.
    pub capacity_experts: Option<u32>,
    /// Assignment of the predecessor of the same name. The planner prefers it among equal choices, because
    /// its weights may still be in the page cache.
    pub previous: Option<&'a Assignment>,
}

/// Assigns experts to members.
pub trait Planner: fmt::Debug + Send + Sync + 'static {
    /// The assignment of a joining member. `others` are the assignments of all other members that are
    /// leased and not draining.
    ///
    /// # Errors
    /// [`PlanError`] when no part of the model fits into the member.
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

impl<P: Planner> Planner for Arc<P> {
    fn assign(
        &self,
        model: &ModelDescriptor,
        joiner: &Joiner<'_>,
        others: &[&Assignment],
    ) -> Result<Assignment, PlanError> {
        P::assign(self, model, joiner, others)
    }

    fn num_servers(&self) -> u32 {
        P::num_servers(self)
    }

    fn replicas(&self) -> u32 {
        P::replicas(self)
    }
}

/// Reason why a joining member gets no assignment.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name every field")]
pub enum PlanError {
    /// Every partition of the model is larger than the member's capacity.
    #[error(
        "the member has room for {capacity} experts, but the smallest partition of this model over \
         {num_servers} servers with {replicas} replicas has {needed}: give the member more memory, \
         or plan more servers or fewer replicas"
    )]
    Capacity { capacity: u32, needed: usize, num_servers: u32, replicas: u32 },
}

/// Settings for which no placement exists.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name every field")]
pub enum PlannerConfigError {
    /// The number of servers is 0 or larger than supported.
    #[error("a planned fleet of {found} servers: expected 1 to {MAX_SERVERS}")]
    NumServers { found: u32 },
    /// There are more replicas than servers.
    #[error(
        "{replicas} replicas on {num_servers} servers: replicas are on distinct servers, so \
         expected 1 to {num_servers}"
    )]
    Replicas { replicas: u32, num_servers: u32 },
}

/// Divides the model into one partition per planned server. A joining member gets the partition that has
/// the fewest members.
///
/// In each layer every expert is in `replicas` distinct partitions, and the sizes of partitions differ by
/// at most one expert. The other replicas of a partition's experts are spread over many partitions, so
/// that all surviving servers share the load of a failed one. Members beyond the planned number get a
/// partition that another member already has.
#[derive(Debug)]
pub struct BalancedPlanner {
    num_partitions: u32,
    replicas: u32,
    /// The division of the last model. A fleet has one model.
    division: Mutex<Option<Arc<Division>>>,
}

impl BalancedPlanner {
    /// A planner for `num_partitions` servers and `replicas` replicas per expert.
    ///
    /// # Errors
    /// [`PlannerConfigError`] when a number is 0, there are more than [`MAX_SERVERS`] servers, or there are
    /// more replicas than servers.
    pub fn new(num_partitions: u32, replicas: u32) -> Result<Self, PlannerConfigError> {
        if !(1..=MAX_SERVERS).contains(&num_partitions) {
            return Err(PlannerConfigError::NumServers { found: num_partitions });
        }
        if !(1..=num_partitions).contains(&replicas) {
            return Err(PlannerConfigError::Replicas { replicas, num_servers: num_partitions });
        }
        Ok(Self { num_partitions, replicas, division: Mutex::new(None) })
    }

    fn division(&self, model: &ModelDescriptor) -> Arc<Division> {
        let mut cached = self.division.lock().unwrap_or_else(PoisonError::into_inner);
        match &*cached {
            Some(division) if division.model == *model => Arc::clone(division),
            _ => {
                let division = Arc::new(divide(model, self.num_partitions, self.replicas));
                *cached = Some(Arc::clone(&division));
                division
            }
        }
    }
}

impl Planner for BalancedPlanner {
    fn assign(
        &self,
        model: &ModelDescriptor,
        joiner: &Joiner<'_>,
        others: &[&Assignment],
    ) -> Result<Assignment, PlanError> {
        let division = self.division(model);
        let partitions = &division.partitions;
        let mut num_holders = vec![0u32; partitions.len()];
        for other in others {
            // Small models have equal partitions. Count each member for one of them.
            let alike = division.partitions_of.get(*other).into_iter().flatten().copied();
            if let Some(partition) = alike.min_by_key(|&partition| num_holders[partition]) {
                num_holders[partition] += 1;
            }
        }
        let shortage = Shortage::count(model, self.replicas, others);
        let fits = |partition: &Assignment| {
            joiner
                .capacity_experts
                .is_none_or(|capacity| partition.num_experts() <= capacity as usize)
        };
        let best = (0..partitions.len()).filter(|&idx| fits(&partitions[idx])).min_by_key(|&idx| {
            let is_previous = joiner.previous == Some(&partitions[idx]);
            (num_holders[idx], !is_previous, std::cmp::Reverse(shortage.of(&partitions[idx])), idx)
        });
        match best {
            Some(idx) => Ok(partitions[idx].clone()),
            None => Err(PlanError::Capacity {
                capacity: joiner.capacity_experts.unwrap_or(u32::MAX),
                needed: partitions.iter().map(Assignment::num_experts).min().unwrap_or(0),
                num_servers: self.num_partitions,
                replicas: self.replicas,
            }),
        }
    }

    fn num_servers(&self) -> u32 {
        self.num_partitions
    }

    fn replicas(&self) -> u32 {
        self.replicas
    }
}

/// A model divided into partitions.
#[derive(Debug)]
struct Division {
    model: ModelDescriptor,
    partitions: Vec<Assignment>,
    partitions_of: HashMap<Assignment, Vec<usize>>,
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

    fn of(&self, partition: &Assignment) -> u64 {
        let missing = |layer: u32, expert: u32| {
            self.layers.get(&layer).and_then(|layer| layer.get(expert as usize)).copied()
        };
        let pairs = partition
            .layers
            .iter()
            .flat_map(|l| l.experts.iter().map(move |&expert| (l.layer, expert)));
        pairs.map(|(layer, expert)| u64::from(missing(layer, expert).unwrap_or(0))).sum()
    }
}

fn divide(model: &ModelDescriptor, num_partitions: u32, replicas: u32) -> Division {
    let num = num_partitions as usize;
    let mut total = vec![0u32; num];
    // Number of experts that two partitions share. Kept even, so that all survivors share the load of a
    // failed server.
    let mut shared = vec![0u32; num * num];
    let mut partitions = vec![Assignment::default(); num];
    for &layer in &model.moe_layers {
        let mut load = vec![0u32; num];
        let mut experts = vec![Vec::new(); num];
        for expert in 0..model.num_experts {
            let mut chosen: Vec<usize> = Vec::with_capacity(replicas as usize);
            for _ in 0..replicas {
                let overlap = |partition: usize| {
                    chosen.iter().map(|&c| shared[partition * num + c]).sum::<u32>()
                };
                let free = (0..num).filter(|partition| !chosen.contains(partition));
                // Fewest experts in this layer first: this keeps the sizes within one of each other.
                let partition = free.min_by_key(|&partition| {
                    (load[partition], total[partition], overlap(partition), partition)
                });
                chosen.extend(partition);
            }
            for &partition in &chosen {
                load[partition] += 1;
                total[partition] += 1;
                experts[partition].push(expert);
                for &other in chosen.iter().filter(|&&other| other != partition) {
                    shared[partition * num + other] += 1;
                }
            }
        }
        for (partition, experts) in partitions.iter_mut().zip(experts) {
            if !experts.is_empty() {
                partition.layers.push(LayerAssignment { layer, experts });
            }
        }
    }
    // With more servers than experts some partitions are empty. Members beyond them share a partition.
    partitions.retain(|partition| !partition.is_empty());
    let mut partitions_of: HashMap<Assignment, Vec<usize>> = HashMap::new();
    for (idx, partition) in partitions.iter().enumerate() {
        partitions_of.entry(partition.clone()).or_default().push(idx);
    }
    Division { model: model.clone(), partitions, partitions_of }
}

/// Most servers of a [`BalancedPlanner`].
pub const MAX_SERVERS: u32 = 1024;

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
    fn fill(
        planner: &BalancedPlanner,
        model: &ModelDescriptor,
        num_members: u32,
    ) -> Vec<Assignment> {
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
            num_layers in 1u32..5, num_experts in 1u32..80, num_partitions in 1u32..20, r in 1u32..6,
        ) {
            let replicas = r.min(num_partitions);
            let model = model(num_layers, num_experts);
            let planner = BalancedPlanner::new(num_partitions, replicas).unwrap();
            // With more servers than experts there are fewer partitions than servers.
            let num_partitions = planner.division(&model).partitions.len() as u32;
            let fleet = fill(&planner, &model, num_partitions);
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
            num_experts in 1u32..64, num_partitions in 1u32..12, r in 1u32..4,
            deaths in prop::collection::vec(any::<prop::sample::Index>(), 1..8),
        ) {
            let replicas = r.min(num_partitions);
            let model = model(2, num_experts);
            let planner = BalancedPlanner::new(num_partitions, replicas).unwrap();
            let num_partitions = planner.division(&model).partitions.len() as u32;
            let mut fleet = fill(&planner, &model, num_partitions);
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
            num_experts in 1u32..40, num_partitions in 1u32..8, extra in 1u32..12,
        ) {
            let model = model(1, num_experts);
            let planner = BalancedPlanner::new(num_partitions, 1).unwrap();
            let num_partitions = planner.division(&model).partitions.len() as u32;
            let fleet = fill(&planner, &model, num_partitions + extra);
            prop_assert!(fleet.iter().all(|member| !member.is_empty()));
            let fewest = ((num_partitions + extra) / num_partitions) as usize;
            for expert in 0..num_experts {
                let found = num_holders(&fleet, 1, expert);
                prop_assert!(found == fewest || found == fewest + 1, "{} holders", found);
            }
        }
    }

    #[test]
    fn early_joiners_cover_as_much_as_they_can() {
        let model = model(4, 16);
        let planner = BalancedPlanner::new(4, 2).unwrap();
        for num_members in 1..=4 {
            let fleet = fill(&planner, &model, num_members);
            let covered = (0..16).filter(|&expert| num_holders(&fleet, 1, expert) > 0).count();
            assert!(covered >= (8 * num_members.min(2)) as usize - 3, "{num_members}: {covered}");
        }
    }

    #[test]
    fn a_death_is_shared_by_all_survivors() {
        let model = model(8, 128);
        let fleet = fill(&BalancedPlanner::new(8, 2).unwrap(), &model, 8);
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
    fn the_predecessors_partition_is_preferred_among_equals() {
        let model = model(2, 16);
        let planner = BalancedPlanner::new(4, 2).unwrap();
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
        let planner = BalancedPlanner::new(4, 1).unwrap();
        // Shares of 3, 3, 2, 2 experts per layer, or a mixture: 4 to 6 in all.
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
            BalancedPlanner::new(0, 1).unwrap_err(),
            PlannerConfigError::NumServers { found: 0 }
        );
        let err = BalancedPlanner::new(2, 3).unwrap_err().to_string();
        assert!(err.contains("3 replicas on 2 servers"), "{err}");
    }
}
