//! Builds the placement table from the members. Sans-I/O.

use control_api::{LayerPlacement, ModelDescriptor, PlacementTable};

use crate::member::Member;

/// Number of (layer, expert) pairs by number of replicas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Coverage {
    pub(crate) experts_total: u64,
    pub(crate) without_replica: u64,
    /// At least one replica, but fewer than planned.
    pub(crate) under_replicated: u64,
}

impl Coverage {
    /// True if every expert of a model has its planned replicas.
    pub(crate) fn is_complete(&self) -> bool {
        self.experts_total > 0 && self.without_replica == 0 && self.under_replicated == 0
    }

    pub(crate) fn of(table: &PlacementTable, replicas: u32) -> Self {
        let mut coverage = Self::default();
        for expert in table.layers.iter().flat_map(|layer| &layer.replicas) {
            coverage.experts_total += 1;
            match expert.len() {
                0 => coverage.without_replica += 1,
                found if found < replicas as usize => coverage.under_replicated += 1,
                _ => {}
            }
        }
        coverage
    }
}

/// The table of all serving members, in the order given. The order must be stable.
pub(crate) fn build<'a>(
    cluster_id: &str,
    epoch: u64,
    model: Option<&ModelDescriptor>,
    members: impl Iterator<Item = &'a Member>,
) -> PlacementTable {
    let num_experts = model.map_or(0, |model| model.num_experts as usize);
    let moe_layers = model.map_or(&[][..], |model| &model.moe_layers);
    let empty = |&layer: &u32| LayerPlacement { layer, replicas: vec![Vec::new(); num_experts] };
    let mut layers: Vec<LayerPlacement> = moe_layers.iter().map(empty).collect();
    let mut servers = Vec::new();
    for member in members {
        if !member.is_in_placement() {
            continue;
        }
        let server_idx = servers.len() as u32;
        servers.push(member.entry());
        for entry in &member.placed.layers {
            let Ok(idx) = layers.binary_search_by_key(&entry.layer, |layer| layer.layer) else {
                continue;
            };
            for &expert in &entry.experts {
                if let Some(replicas) = layers[idx].replicas.get_mut(expert as usize) {
                    replicas.push(server_idx);
                }
            }
        }
    }
    PlacementTable {
        cluster_id: cluster_id.to_owned(),
        epoch,
        model: model.cloned(),
        servers,
        layers,
    }
}

/// Returns true if two tables differ in anything but the epoch.
pub(crate) fn differs(a: &PlacementTable, b: &PlacementTable) -> bool {
    a.cluster_id != b.cluster_id
        || a.model != b.model
        || a.servers != b.servers
        || a.layers != b.layers
}
