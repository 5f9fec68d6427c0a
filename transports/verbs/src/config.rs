//! Settings of the verbs transport.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Which ports of which devices to use.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PortChoice {
    /// The first active port, in the order in which the devices are named.
    #[default]
    First,
    /// All active ports that are as near as possible to a PCI device, such as a GPU, by address
    /// (`0000:3b:00.0`).
    Near(String),
    /// All active ports that are as near as possible to a NUMA node.
    NearNode(i32),
    /// These: `mlx5_0` or `mlx5_0:1`. Peers pair them in this order.
    Named(Vec<String>),
}

/// How flags and signals travel. Both sides of a pair need the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SignalChoice {
    /// As [`SIGNALS_VARIABLE`] says; without it by atomics where all ports have them, else by messages.
    #[default]
    Auto,
    /// As atomics of the device, without this processor or the peer's.
    Atomics,
    /// As messages, which the peer's driver carries out: for devices without 64-bit atomics.
    Messages,
}

/// Variable that says how flags travel where the settings leave it open: `auto`, `atomics` or `messages`.
pub const SIGNALS_VARIABLE: &str = "SWITCHYARD_VERBS_SIGNALS";

/// How to use RDMA devices. Both sides of a pair may differ in all of this but `signals`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct VerbsConfig {
    /// Ports. At most [`MAX_LANES`] queue pairs per peer come of them.
    pub ports: PortChoice,
    /// Queue pairs per port and peer.
    pub queue_pairs_per_port: u32,
    /// Puts and gets of at least this many bytes are spread over all queue pairs of a peer.
    pub stripe_bytes: usize,
    /// Entry of the port's address table. By default the RoCE v2 address of the route to the peer.
    pub gid_index: Option<u8>,
    /// Traffic class of packets with a global header: DSCP in the upper six bits.
    pub traffic_class: u8,
    /// InfiniBand service level, or RoCE priority.
    pub service_level: u8,
    /// Entry of the port's partition table.
    pub pkey_index: u16,
    /// Operations that one queue pair holds.
    pub send_queue_depth: u32,
    /// Longest single message in bytes; the device's own limit holds as well.
    pub max_message_bytes: u32,
    /// Puts of at most this many bytes travel inside the work request, as far as the device can.
    pub inline_bytes: u32,
    /// Time without acknowledgement before a packet is sent again: 4.096 µs × 2^this, 1 to 31.
    pub ack_timeout: u8,
    /// How often a packet is sent again before the peer counts as lost, 0 to 7.
    pub retry_count: u8,
    /// Longest time in milliseconds without any completion while somebody waits for one; then the peer
    /// counts as lost. Longer than the device's own retries, which say more.
    pub stall_timeout_ms: u64,
    /// How flags and signals travel between slots.
    pub signals: SignalChoice,
}

impl VerbsConfig {
    /// The defaults with the ports `text` names, as in `mlx5_0:1+mlx5_1`: one or more joined by `+`, or
    /// all that are near a device or node, as in `near=0000:3b:00.0` and `node=1`.
    #[must_use]
    pub fn on(text: &str) -> Self {
        Self::default().on_ports(text)
    }

    /// These settings with other ports, as [`on`](Self::on) reads them.
    #[must_use]
    pub fn on_ports(self, text: &str) -> Self {
        let ports = if let Some(device) = text.strip_prefix("near=") {
            PortChoice::Near(device.to_owned())
        } else if let Some(node) = text.strip_prefix("node=").and_then(|node| node.parse().ok()) {
            PortChoice::NearNode(node)
        } else {
            PortChoice::Named(text.split('+').map(str::to_owned).collect())
        };
        Self { ports, ..self }
    }

    /// Longest time without any completion while somebody waits for one.
    #[must_use]
    pub const fn stall_timeout(&self) -> Duration {
        Duration::from_millis(self.stall_timeout_ms)
    }
}

impl Default for VerbsConfig {
    fn default() -> Self {
        Self {
            ports: PortChoice::First,
            queue_pairs_per_port: 1,
            stripe_bytes: 256 << 10,
            gid_index: None,
            traffic_class: 0,
            service_level: 0,
            pkey_index: 0,
            send_queue_depth: 128,
            max_message_bytes: 1 << 20,
            inline_bytes: 220,
            // 67 ms, seven times: a peer that does not answer is lost after half a second.
            ack_timeout: 14,
            retry_count: 7,
            stall_timeout_ms: 3000,
            signals: SignalChoice::Auto,
        }
    }
}

/// Most queue pairs of one peer.
pub const MAX_LANES: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_chosen_by_text() {
        let named = |names: &[&str]| {
            PortChoice::Named(names.iter().map(|name| (*name).to_owned()).collect())
        };
        for (text, expected) in [
            ("mlx5_0", named(&["mlx5_0"])),
            ("mlx5_0:2+mlx5_1", named(&["mlx5_0:2", "mlx5_1"])),
            ("near=0000:3b:00.0", PortChoice::Near("0000:3b:00.0".to_owned())),
            ("node=1", PortChoice::NearNode(1)),
            ("node=x", named(&["node=x"])),
        ] {
            assert_eq!(VerbsConfig::on(text).ports, expected, "{text}");
        }
    }
}
