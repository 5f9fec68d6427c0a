//! The tables by which kernels choose among servers.

use bytemuck::Zeroable;
use kernels::abi::{MAX_PEERS, MAX_REPLICAS, Placement, ServerPeer};

use super::{Peer, Peers};

/// Tables as the kernels of a call read them.
#[derive(Debug)]
pub(in crate::device) struct Tables {
    /// By MoE layer.
    pub placements: Vec<Placement>,
    pub servers: [ServerPeer; MAX_PEERS],
    /// Number of each server's link among the links of its place.
    pub link_numbers: [u64; MAX_PEERS],
    /// Experts without a live replica, by MoE layer.
    pub num_orphans: Vec<u32>,
    pub epoch: u64,
}

impl Tables {
    pub fn empty(num_layers: usize) -> Self {
        Self {
            placements: vec![Placement::zeroed(); num_layers],
            servers: [ServerPeer::zeroed(); MAX_PEERS],
            link_numbers: [0; MAX_PEERS],
            num_orphans: vec![0; num_layers],
            epoch: 0,
        }
    }
}

impl Peers {
    /// Returns true if [`take_tables`](Self::take_tables) has new tables.
    pub const fn has_changed(&self) -> bool {
        self.is_changed
    }

    /// Undoes [`take_tables`](Self::take_tables), whose tables did not reach the device.
    pub fn restore_tables(&mut self, fresh: u32) {
        self.is_changed = true;
        for (idx, place) in self.places.iter_mut().enumerate() {
            place.is_fresh |= fresh >> idx & 1 != 0;
        }
    }

    /// New tables, if anything has changed since the last time, and the mask of places whose counts must start at
    /// zero.
    pub fn take_tables(&mut self, num_experts: u32) -> Option<(Tables, u32)> {
        if !std::mem::take(&mut self.is_changed) {
            return None;
        }
        let mut servers = [ServerPeer::zeroed(); MAX_PEERS];
        let mut link_numbers = [0; MAX_PEERS];
        let mut place_of: Vec<Option<(u8, u64)>> = Vec::new();
        let (mut fresh, mut avoided) = (0, 0u32);
        for (idx, place) in self.places.iter_mut().enumerate() {
            (servers[idx], link_numbers[idx]) = (place.entry, place.num_links);
            let Some(Peer { link, slots }) = &place.peer else { continue };
            let Some((request, response)) = slots.addresses() else { continue };
            let generation = link.generation;
            place.entry = ServerPeer { request, response, generation, reserved: 0 };
            servers[idx] = place.entry;
            if std::mem::take(&mut place.is_fresh) {
                fresh |= 1 << idx;
            }
            avoided |= u32::from(place.avoid_until.is_some()) << idx;
            if place_of.len() <= link.server.idx {
                place_of.resize(link.server.idx + 1, None);
            }
            place_of[link.server.idx] = Some((idx as u8, link.server.uid));
        }
        let routing = &self.routing;
        let num_layers = routing.num_layers();
        let mut tables = Tables {
            placements: vec![Placement::zeroed(); num_layers],
            servers,
            link_numbers,
            num_orphans: vec![0; num_layers],
            epoch: routing.epoch,
        };
        for (layer_idx, placement) in tables.placements.iter_mut().enumerate() {
            placement.epoch = routing.epoch;
            placement.num_experts = num_experts;
            for (expert, set) in (0..num_experts).zip(&mut placement.experts) {
                let places = routing.replicas(layer_idx, expert).iter().filter_map(|&rank| {
                    let server = &routing.servers[rank as usize];
                    let (idx, uid) = (*place_of.get(server.idx)?)?;
                    (uid == server.uid).then_some(idx)
                });
                for place in places.take(MAX_REPLICAS) {
                    set.server[usize::from(set.num_replicas)] = place;
                    set.num_replicas += 1;
                }
                let found = usize::from(set.num_replicas);
                let is_avoided = |place: &u8| avoided >> place & 1 != 0;
                if avoided != 0 && !set.server[..found].iter().all(is_avoided) {
                    let mut kept = 0;
                    for at in 0..found {
                        let place = set.server[at];
                        if !is_avoided(&place) {
                            set.server[kept] = place;
                            kept += 1;
                        }
                    }
                    set.num_replicas = kept as u8;
                }
                tables.num_orphans[layer_idx] += u32::from(set.num_replicas == 0);
            }
        }
        Some((tables, fresh))
    }
}
