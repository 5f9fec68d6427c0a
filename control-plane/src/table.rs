//! Builds the placement table from the members. Sans-I/O.

use control_api::{LayerPlacement, ModelDescriptor, PlacementTable, ServerEntry};

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

    /// Counts the replicas on servers that `counts` accepts.
    pub(crate) fn of(
        table: &PlacementTable,
        replicas: u32,
        counts: impl Fn(&ServerEntry) -> bool,
    ) -> Self {
        let is_counted: Vec<bool> = table.servers.iter().map(counts).collect();
        let mut coverage = Self::default();
        for expert in table.layers.iter().flat_map(|layer| &layer.replicas) {
            coverage.experts_total += 1;
            match expert.iter().filter(|&&server| is_counted[server as usize]).count() {
                0 => coverage.without_replica += 1,
                found if found < replicas as usize => coverage.under_replicated += 1,
                _ => {}
            }
        }
        coverage
    }
}

/// The table of all serving members, in the order given. The order must be stable. Members that are left out come last,
/// with the experts that no other member serves.
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
    let (left_out, regular): (Vec<&Member>, Vec<&Member>) =
        members.filter(|member| member.is_in_placement()).partition(|member| member.is_left_out);
    let mut servers = Vec::new();
    for member in regular {
        let server_idx = servers.len() as u32;
        servers.push(member.entry());
        for_each_placed(&mut layers, member, |replicas| replicas.push(server_idx));
    }
    let num_regular = servers.len() as u32;
    for member in left_out {
        let server_idx = servers.len() as u32;
        let mut is_needed = false;
        for_each_placed(&mut layers, member, |replicas| {
            if replicas.iter().all(|&server| server >= num_regular) {
                replicas.push(server_idx);
                is_needed = true;
            }
        });
        if is_needed {
            servers.push(member.entry());
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

/// Calls `visit` with the replicas of each placed expert of the member that the layers have.
fn for_each_placed(
    layers: &mut [LayerPlacement],
    member: &Member,
    mut visit: impl FnMut(&mut Vec<u32>),
) {
    for entry in &member.placed.layers {
        let Ok(idx) = layers.binary_search_by_key(&entry.layer, |layer| layer.layer) else {
            continue;
        };
        for &expert in &entry.experts {
            if let Some(replicas) = layers[idx].replicas.get_mut(expert as usize) {
                visit(replicas);
            }
        }
    }
}

/// Returns true if two tables differ in anything but the epoch.
pub(crate) fn differs(a: &PlacementTable, b: &PlacementTable) -> bool {
    a.cluster_id != b.cluster_id
        || a.model != b.model
        || a.servers != b.servers
        || a.layers != b.layers
}
