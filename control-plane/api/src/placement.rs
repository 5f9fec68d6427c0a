//! The placement table, which lists the servers of each expert, and its validation.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::text::is_disruptive;
use crate::types::{MemberId, ModelDescriptor};

/// The servers of each expert at one epoch.
///
/// A table from the network must pass [`validate`](Self::validate) before its indices are used.
/// [`crate::ControlClient`] and [`crate::PlacementWatch`] validate every table.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PlacementTable {
    /// Identity of the cluster. Epochs of different clusters do not compare.
    pub cluster_id: String,
    /// Version of the table. It rises with every change of the fields below, and only then.
    pub epoch: u64,
    /// The model of the fleet; `None` before the first member has registered.
    pub model: Option<ModelDescriptor>,
    /// Serving members only.
    pub servers: Vec<ServerEntry>,
    /// One entry per layer in [`ModelDescriptor::moe_layers`], in the same order.
    pub layers: Vec<LayerPlacement>,
}

/// A server in the table.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
pub struct ServerEntry {
    /// Identity.
    pub member_id: MemberId,
    /// Name.
    pub name: String,
    /// Random number of the process. A restarted server has another one.
    pub incarnation: u64,
    /// `host:port` of the bootstrap listener.
    pub data_addr: String,
    /// True if the server admits clients with a ticket only.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub needs_tickets: bool,
}

/// Replicas of the experts of one layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LayerPlacement {
    /// Layer index.
    pub layer: u32,
    /// For each expert, distinct indices into [`PlacementTable::servers`]. The list may be empty.
    pub replicas: Vec<Vec<u32>>,
}

impl PlacementTable {
    /// Most servers that a table may name.
    pub const MAX_SERVERS: usize = 1 << 16;
    /// Most (layer, expert) pairs that a table may place.
    pub const MAX_EXPERTS: usize = 1 << 20;

    /// Indices of the servers that hold an expert. Empty if no server holds it or the layer is unknown.
    pub fn replicas(&self, layer: u32, expert: u32) -> &[u32] {
        let Ok(layer_idx) = self.layers.binary_search_by_key(&layer, |entry| entry.layer) else {
            return &[];
        };
        self.layers[layer_idx].replicas.get(expert as usize).map_or(&[], Vec::as_slice)
    }

    /// Number of (layer, expert) pairs that no server holds.
    pub fn num_experts_without_replica(&self) -> usize {
        let experts = self.layers.iter().flat_map(|layer| &layer.replicas);
        experts.filter(|replicas| replicas.is_empty()).count()
    }

    /// Returns true if every expert of every layer has a replica. Returns false without a model.
    pub fn is_complete(&self) -> bool {
        self.model.is_some() && self.num_experts_without_replica() == 0
    }

    /// Checks the invariants of a table. Sizes are within bounds, and each MoE layer and expert has one entry.
    /// Indices are in range and distinct, identities are distinct, and addresses have the form `host:port`.
    ///
    /// # Errors
    /// [`PlacementError`], the first violation found.
    pub fn validate(&self) -> Result<(), PlacementError> {
        if self.cluster_id.is_empty() || self.cluster_id.len() > 128 {
            return Err(PlacementError::ClusterId { length: self.cluster_id.len() });
        }
        if self.servers.len() > Self::MAX_SERVERS {
            return Err(PlacementError::TooMany {
                what: "servers",
                found: self.servers.len(),
                limit: Self::MAX_SERVERS,
            });
        }
        let mut seen = HashSet::with_capacity(self.servers.len());
        for server in &self.servers {
            if !seen.insert(&server.member_id) {
                return Err(PlacementError::DuplicateServer { member: server.member_id.clone() });
            }
            if !is_host_port(&server.data_addr) {
                return Err(PlacementError::Address {
                    server: server.name.clone(),
                    found: clip(&server.data_addr),
                });
            }
        }
        let Some(model) = &self.model else {
            if self.layers.is_empty() {
                return Ok(());
            }
            return Err(PlacementError::LayersWithoutModel { found: self.layers.len() });
        };
        validate_model(model)?;
        self.validate_layers(model)
    }

    fn validate_layers(&self, model: &ModelDescriptor) -> Result<(), PlacementError> {
        if self.layers.len() != model.moe_layers.len() {
            return Err(PlacementError::LayerCount {
                found: self.layers.len(),
                expected: model.moe_layers.len(),
            });
        }
        let num_servers = self.servers.len() as u32;
        for (entry, &expected) in self.layers.iter().zip(&model.moe_layers) {
            let layer = entry.layer;
            if layer != expected {
                return Err(PlacementError::Layer { found: layer, expected });
            }
            if entry.replicas.len() != model.num_experts as usize {
                return Err(PlacementError::ExpertCount {
                    layer,
                    found: entry.replicas.len(),
                    expected: model.num_experts,
                });
            }
            for (expert, replicas) in entry.replicas.iter().enumerate() {
                let expert = expert as u32;
                for (i, &server_idx) in replicas.iter().enumerate() {
                    if server_idx >= num_servers {
                        return Err(PlacementError::ServerIndex {
                            layer,
                            expert,
                            found: server_idx,
                            num_servers,
                        });
                    }
                    // Lists are short, and the check of a list that repeats itself ends at the first
                    // repetition. So the time cannot become quadratic in the size of the input.
                    if replicas[..i].contains(&server_idx) {
                        return Err(PlacementError::DuplicateReplica { layer, expert, server_idx });
                    }
                }
            }
        }
        Ok(())
    }
}

/// Checks a model descriptor: fingerprint form, sizes within bounds, layers ascending.
pub fn validate_model(model: &ModelDescriptor) -> Result<(), PlacementError> {
    let fingerprint = model.fingerprint.as_bytes();
    let is_hex = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    if !(8..=128).contains(&fingerprint.len()) || !fingerprint.iter().all(is_hex) {
        return Err(PlacementError::Fingerprint { found: clip(&model.fingerprint) });
    }
    let architecture = &model.architecture;
    if !(1..=128).contains(&architecture.len()) || architecture.contains(is_disruptive) {
        return Err(PlacementError::Architecture { found: clip(architecture) });
    }
    let num_pairs = model.moe_layers.len().saturating_mul(model.num_experts as usize);
    if model.moe_layers.is_empty() || model.num_experts == 0 || model.hidden == 0 {
        return Err(PlacementError::EmptyModel {
            num_layers: model.moe_layers.len(),
            num_experts: model.num_experts,
            hidden: model.hidden,
        });
    }
    if num_pairs > PlacementTable::MAX_EXPERTS {
        return Err(PlacementError::TooMany {
            what: "experts",
            found: num_pairs,
            limit: PlacementTable::MAX_EXPERTS,
        });
    }
    if model.top_k == 0 || model.top_k > model.num_experts {
        return Err(PlacementError::TopK { found: model.top_k, num_experts: model.num_experts });
    }
    if !model.moe_layers.is_sorted_by(|a, b| a < b) {
        return Err(PlacementError::LayerOrder);
    }
    Ok(())
}

/// Returns true if a text has the form `host:port` with a port between 1 and 65535. IPv6 hosts are in
/// brackets.
pub fn is_host_port(text: &str) -> bool {
    if text.len() > 300 {
        return false;
    }
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    let host_ok = match host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        Some(inner) => inner.parse::<std::net::Ipv6Addr>().is_ok(),
        None => {
            let allowed =
                |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
            !host.is_empty() && !host.starts_with('-') && host.bytes().all(allowed)
        }
    };
    let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    host_ok && digits && port.parse::<u16>().is_ok_and(|port| port != 0)
}

/// Returns true if no process can connect to the host of `text` (`host:port`): it is the unspecified address (`0.0.0.0`
/// or `[::]`), a multicast address, or the broadcast address. A process can listen on the unspecified address.
pub fn cannot_be_reached(text: &str) -> bool {
    let host = text.rsplit_once(':').map_or(text, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    match host.parse::<std::net::IpAddr>() {
        Ok(addr) => {
            let addr = addr.to_canonical();
            let is_broadcast = matches!(addr, std::net::IpAddr::V4(addr) if addr.is_broadcast());
            addr.is_unspecified() || addr.is_multicast() || is_broadcast
        }
        // The forms `0` and `0.0`, which resolvers take for 0.0.0.0.
        Err(_) => !host.is_empty() && host.bytes().all(|byte| matches!(byte, b'0' | b'.')),
    }
}

fn clip(text: &str) -> String {
    text.chars().take(80).collect()
}

/// Reason why a table or a model descriptor is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name every field")]
pub enum PlacementError {
    #[error("cluster id of {length} bytes, expected 1 to 128")]
    ClusterId { length: usize },
    #[error("{found} {what}, at most {limit} are supported")]
    TooMany { what: &'static str, found: usize, limit: usize },
    #[error("member {member} appears twice among the servers")]
    DuplicateServer { member: MemberId },
    #[error("server {server} has the address {found:?}, expected host:port with a port above 0")]
    Address { server: String, found: String },
    #[error("{found} layers placed although no model is known")]
    LayersWithoutModel { found: usize },
    #[error("{found} layers placed, the model has {expected} MoE layers")]
    LayerCount { found: usize, expected: usize },
    #[error("layer {found} placed where the model has MoE layer {expected}")]
    Layer { found: u32, expected: u32 },
    #[error("layer {layer} places {found} experts, the model has {expected}")]
    ExpertCount { layer: u32, found: usize, expected: u32 },
    #[error(
        "layer {layer} expert {expert} points to server {found}, the table has {num_servers} servers"
    )]
    ServerIndex { layer: u32, expert: u32, found: u32, num_servers: u32 },
    #[error("layer {layer} expert {expert} names server {server_idx} twice")]
    DuplicateReplica { layer: u32, expert: u32, server_idx: u32 },
    #[error("model fingerprint {found:?}, expected 8 to 128 lowercase hex digits")]
    Fingerprint { found: String },
    #[error(
        "architecture name {found:?}: expected 1 to 128 bytes without characters that control a terminal or the direction \
         of text"
    )]
    Architecture { found: String },
    #[error(
        "a model of {num_layers} MoE layers, {num_experts} experts and hidden size {hidden}: all \
         must be above 0"
    )]
    EmptyModel { num_layers: usize, num_experts: u32, hidden: u32 },
    #[error("top-k of {found}, expected 1 to the number of experts ({num_experts})")]
    TopK { found: u32, num_experts: u32 },
    #[error("MoE layers of the model are not strictly ascending")]
    LayerOrder,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn table() -> PlacementTable {
        let server = |idx: u32| ServerEntry {
            member_id: MemberId::random(),
            name: format!("server-{idx}"),
            incarnation: u64::from(idx),
            data_addr: format!("10.0.0.{idx}:7000"),
            needs_tickets: false,
        };
        let layer = |layer| LayerPlacement {
            layer,
            replicas: vec![vec![0, 1], vec![2], vec![], vec![2, 0]],
        };
        PlacementTable {
            cluster_id: "c1".to_owned(),
            epoch: 7,
            model: Some(ModelDescriptor {
                fingerprint: "0123456789abcdef".to_owned(),
                architecture: "mixtral".to_owned(),
                hidden: 64,
                moe_layers: vec![1, 4],
                num_experts: 4,
                top_k: 2,
            }),
            servers: (0..3).map(server).collect(),
            layers: vec![layer(1), layer(4)],
        }
    }

    #[test]
    fn a_sound_table_passes_and_is_looked_up() {
        let table = table();
        table.validate().unwrap();
        assert_eq!(table.replicas(4, 3), [2, 0]);
        assert_eq!(table.replicas(1, 2), [0u32; 0]);
        assert_eq!(table.replicas(2, 0), [0u32; 0]);
        assert_eq!(table.replicas(4, 4), [0u32; 0]);
        assert_eq!(table.num_experts_without_replica(), 2);
        assert!(!table.is_complete());
        let empty = PlacementTable { cluster_id: "c".to_owned(), ..PlacementTable::default() };
        empty.validate().unwrap();
        assert!(!empty.is_complete());
    }

    #[test]
    fn every_contradiction_is_named() {
        type Change = fn(&mut PlacementTable);
        let cases: [(Change, &str); 14] = [
            (|t| t.cluster_id.clear(), "cluster id of 0 bytes"),
            (|t| t.servers[1].member_id = t.servers[0].member_id.clone(), "appears twice"),
            (|t| t.servers[2].data_addr = "nowhere".to_owned(), "\"nowhere\", expected host:port"),
            (|t| t.model = None, "2 layers placed although no model"),
            (|t| drop(t.layers.pop()), "1 layers placed, the model has 2"),
            (|t| t.layers[0].layer = 2, "layer 2 placed where the model has MoE layer 1"),
            (|t| drop(t.layers[1].replicas.pop()), "layer 4 places 3 experts, the model has 4"),
            (|t| t.layers[1].replicas[0][1] = 3, "layer 4 expert 0 points to server 3"),
            (|t| t.layers[1].replicas[3] = vec![1, 2, 1], "layer 4 expert 3 names server 1 twice"),
            (|t| t.model.as_mut().unwrap().fingerprint = "XY".to_owned(), "fingerprint \"XY\""),
            (|t| t.model.as_mut().unwrap().num_experts = 0, "0 experts"),
            (|t| t.model.as_mut().unwrap().num_experts = u32::MAX, "at most"),
            (|t| t.model.as_mut().unwrap().top_k = 5, "top-k of 5"),
            (|t| t.model.as_mut().unwrap().moe_layers = vec![4, 1], "ascending"),
        ];
        for (change, wanted) in cases {
            let mut table = table();
            change(&mut table);
            let text = table.validate().unwrap_err().to_string();
            assert!(text.contains(wanted), "{text:?} should say {wanted:?}");
        }
    }

    #[test]
    fn addresses_are_told_from_other_texts() {
        for good in ["h:1", "10.0.0.1:65535", "[::1]:80", "a-b.c_d:9"] {
            assert!(is_host_port(good), "{good}");
            assert!(!cannot_be_reached(good), "{good}");
        }
        for none in [
            "0.0.0.0:7171",
            "[::]:7171",
            "0:7171",
            "[::ffff:0.0.0.0]:1",
            "255.255.255.255:7171",
            "224.0.0.1:7171",
            "[ff02::1]:7171",
        ] {
            assert!(cannot_be_reached(none), "{none}");
        }
        for bad in [
            "", "h", "h:", ":1", "h:0", "h:65536", "h:-1", "h:+1", "::1:80", "[h]:1", "a b:1",
            "h:1 ",
        ] {
            assert!(!is_host_port(bad), "{bad}");
        }
    }

    proptest! {
        /// A valid table has no index out of range.
        #[test]
        fn what_passes_can_be_trusted(
            cuts in prop::collection::vec((any::<prop::sample::Index>(), "[0-9\\[\\],\"a-z]"), 1..4),
        ) {
            let mut text = serde_json::to_string(&table()).unwrap().into_bytes();
            for (at, with) in cuts {
                let at = at.index(text.len());
                text[at] = with.as_bytes()[0];
            }
            let Ok(table) = serde_json::from_slice::<PlacementTable>(&text) else { return Ok(()) };
            if table.validate().is_err() {
                return Ok(());
            }
            for layer in &table.layers {
                for replicas in &layer.replicas {
                    for &server_idx in replicas {
                        prop_assert!((server_idx as usize) < table.servers.len());
                    }
                }
            }
        }
    }
}
