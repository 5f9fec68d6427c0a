//! Settings of the verbs transport.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Selects the ports to use.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PortChoice {
    /// The first active port, in the order of the device names.
    #[default]
    First,
    /// All active ports that are as near as possible to a PCI device, such as a GPU, given by its address
    /// (`0000:3b:00.0`).
    Near(String),
    /// All active ports that are as near as possible to a NUMA node.
    NearNode(i32),
    /// The named ports, written as `mlx5_0` or `mlx5_0:1`. The two sides pair their ports in this order.
    Named(Vec<String>),
}

/// Selects how flags and signals travel. Both sides of a pair need the same choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SignalChoice {
    /// Follows [`SIGNALS_VARIABLE`]. If that is unset, flags travel as atomics if all ports support them, else as
    /// messages.
    #[default]
    Auto,
    /// The device carries flags as atomics. Neither this side's processor nor the peer's takes part.
    Atomics,
    /// Flags travel as messages, and the peer's driver applies them. Works on devices without 64-bit atomics.
    Messages,
}

/// Environment variable that selects how flags travel if the settings leave it open: `auto`, `atomics` or
/// `messages`.
pub const SIGNALS_VARIABLE: &str = "SWITCHYARD_VERBS_SIGNALS";

/// Settings of RDMA devices. The two sides of a pair may differ in every setting except `signals`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct VerbsConfig {
    /// Ports to use. They yield at most [`MAX_QUEUE_PAIRS`] queue pairs per peer.
    pub ports: PortChoice,
    /// Queue pairs per port and peer.
    pub queue_pairs_per_port: u32,
    /// Shortest put or get, in bytes, that is spread over all queue pairs of a peer.
    pub stripe_bytes: usize,
    /// Entry of the port's address table. The default is the RoCE v2 address of the route to the peer.
    pub gid_index: Option<u8>,
    /// Traffic class of packets with a global header. Its upper six bits are the DSCP.
    pub traffic_class: u8,
    /// InfiniBand service level, or RoCE priority.
    pub service_level: u8,
    /// Entry of the port's partition table.
    pub pkey_index: u16,
    /// Capacity of one queue pair, in operations.
    pub send_queue_depth: u32,
    /// Longest single message in bytes. The device's own limit also applies.
    pub max_message_bytes: u32,
    /// Longest put, in bytes, that travels inside the work request, as far as the device supports it.
    pub inline_bytes: u32,
    /// Exponent of the acknowledgement timeout, 1 to 31. A packet is resent after 4.096 µs × 2^`ack_timeout`.
    pub ack_timeout: u8,
    /// Number of resends of a packet before the peer counts as lost, 0 to 7.
    pub retry_count: u8,
    /// Longest wait in milliseconds during which nothing completes. After it the peer counts as lost. Choose it
    /// longer than the device's own retries, because their errors are more specific.
    pub stall_timeout_ms: u64,
    /// How flags and signals travel between slots.
    pub signals: SignalChoice,
}

impl VerbsConfig {
    /// The defaults with the ports that `text` names. `text` holds one or more ports joined by `+`, as in
    /// `mlx5_0:1+mlx5_1`. The forms `near=0000:3b:00.0` and `node=1` name all ports near a device or node.
    #[must_use]
    pub fn on(text: &str) -> Self {
        Self::default().on_ports(text)
    }

    /// These settings with other ports, in the form that [`on`](Self::on) reads.
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

    /// Longest wait during which nothing completes.
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

/// Maximum number of queue pairs per peer.
pub const MAX_QUEUE_PAIRS: usize = 8;

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
