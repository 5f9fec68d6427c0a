//! Simulates many senders into few receivers over one switch, packet by packet, in discrete events.
//!
//! Each sender sends one message to each receiver, all at once; or each receiver reads one message from each sender. The
//! model has only the parts that matter for incast:
//!
//! - **Hosts** have one full-duplex link each. A host sends control packets first. It sends its messages round-robin,
//!   packet by packet. A random part of [`Model::jitter_ns`] delays each start.
//! - **One switch** forwards to queues at its outputs. The queues share [`Model::buffer_bytes`]. A queue may take
//!   [`Model::alpha`] times the free part.
//! - **Loss** is repaired by go-back-N. The receiver requests the first missing byte once, and drops all other bytes
//!   until it arrives. If it is lost again, the sender goes back after [`Model::retry_ns`] of silence. Control packets
//!   are never lost.
//! - **Pause** replaces loss: if the switch has more than [`Model::pause_bytes`] from one host, the host stops until half
//!   of them have left.
//! - **Credits** are [`message_engine::credit`], the code that a receiver runs. Demands and credits are packets on the same
//!   links, and take effect after [`Model::control_ns`].
//! - **Reads** are requested by the receiver, in control packets that the sender's NIC answers by itself. Their credits
//!   never leave the receiver. It grants to itself, as the engine does, and posts the granted part after
//!   [`Model::control_ns`].
//!
//! Not modelled: several switches, rate control by marks (DCQCN), the hosts' memory, the software around a transfer. The
//! same seed gives the same result.

mod event;
mod host;
pub mod layer;
mod net;
mod switch;

use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use net::{run, run_messages};

/// Flow control of the senders.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Control {
    /// None. The switch drops packets without room.
    Loss,
    /// The switch stops whole links.
    Pause,
    /// The receivers grant credits round-robin.
    Credits,
    /// The receivers grant credits, the shortest demand first.
    CreditsShortest,
}

/// The operation that moves the bytes.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "snake_case")]
pub enum Verb {
    /// The sender writes.
    #[default]
    Write,
    /// The receiver reads.
    Read,
}

/// Sizes and times of links, switch and transport.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Model {
    /// Time of one byte on a link, in picoseconds. 20 is 400 Gb/s.
    pub ps_per_byte: u64,
    /// Payload of a full packet in bytes.
    pub packet_bytes: u32,
    /// Bytes around a payload on the wire. For RoCE v2: preamble 8, Ethernet 14 and 4, IPv4 20,
    /// UDP 8, transport 12 and 4, gap 12.
    pub header_bytes: u32,
    /// A control packet on the wire, in bytes: a header and 16 bytes.
    pub control_bytes: u32,
    /// From a host into the switch, or out of it to a host, without the time on the wire.
    pub hop_ns: u64,
    /// From the arrival of a demand or credit until it takes effect.
    pub control_ns: u64,
    /// Packet memory of the switch.
    pub buffer_bytes: u64,
    /// A queue may hold this many times the free part of the packet memory.
    pub alpha: f64,
    /// With [`Control::Credits`]: [`overcommitted`](message_engine::credit::CreditConfig::overcommitted).
    pub overcommit: u64,
    /// The same with [`Control::CreditsShortest`].
    pub overcommit_shortest: u64,
    /// With [`Control::Pause`]: bytes from one host in the switch that stop its link.
    pub pause_bytes: u64,
    /// Silence after which a sender goes back by itself.
    pub retry_ns: u64,
    /// Longest delay of a start.
    pub jitter_ns: u64,
}

impl Default for Model {
    fn default() -> Self {
        Self {
            ps_per_byte: 20,
            packet_bytes: 4096,
            header_bytes: 82,
            control_bytes: 98,
            hop_ns: 1_000,
            control_ns: 1_000,
            buffer_bytes: 64 << 20,
            alpha: 1.0,
            overcommit: 1,
            overcommit_shortest: 4,
            pause_bytes: 1 << 20,
            retry_ns: 1_000_000,
            jitter_ns: 2_000,
        }
    }
}

impl Model {
    /// From a grant until the granted bytes begin to arrive, with the control packets on the way.
    #[must_use]
    pub const fn round_trip_ns(&self) -> u64 {
        4 * self.hop_ns + self.control_ns + 4 * self.packet_bytes as u64 * self.ps_per_byte / 1_000
    }
}

/// One experiment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scenario {
    /// Sending hosts.
    pub senders: usize,
    /// Receiving hosts.
    pub receivers: usize,
    /// Bytes from every sender to every receiver.
    pub bytes: u64,
    /// Flow control of the senders.
    pub control: Control,
    /// Whether senders write or receivers read.
    #[serde(default)]
    pub verb: Verb,
    /// Seed of the starts.
    pub seed: u64,
}

/// One message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// Sending host.
    pub from: usize,
    /// Receiving host, counted apart from the sending ones.
    pub to: usize,
    /// Payload.
    pub bytes: u64,
    /// Time at which it may be sent, in picoseconds.
    pub start_ps: u64,
}

/// Messages of any sizes. A host sends its messages round-robin. Messages with the same start keep this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Traffic {
    /// Sending hosts.
    pub senders: usize,
    /// Receiving hosts.
    pub receivers: usize,
    /// The messages.
    pub messages: Vec<Message>,
    /// Flow control of the senders.
    pub control: Control,
    /// Whether senders write or receivers read.
    pub verb: Verb,
}

/// Figures of a set of messages.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Totals {
    /// Milliseconds until the last sender knew that its last message had arrived. With reads, until the last message
    /// had arrived.
    pub ms: f64,
    /// Milliseconds until the last message had arrived.
    pub landed_ms: f64,
    /// As `ms`, for the median message.
    pub median_message_ms: f64,
    /// Packets that the switch dropped.
    pub dropped_packets: u64,
    /// Resent payload in bytes.
    pub resent_bytes: u64,
    /// Retries after silence.
    pub timeouts: u64,
    /// Times that the switch stopped a link.
    pub pauses: u64,
    /// Longest queue at an output, in bytes.
    pub max_queue_bytes: u64,
    /// Demands, credits, acknowledgements.
    pub control_packets: u64,
}

/// Figures of an experiment.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// The experiment.
    pub scenario: Scenario,
    /// As [`Totals::ms`].
    pub ms: f64,
    /// As [`Totals::median_message_ms`].
    pub median_message_ms: f64,
    /// Payload into one receiver over the whole time, in 10^9 bytes per second.
    pub gb_per_s_per_receiver: f64,
    /// Packets that the switch dropped.
    pub dropped_packets: u64,
    /// Resent payload in bytes.
    pub resent_bytes: u64,
    /// Retries after silence.
    pub timeouts: u64,
    /// Times that the switch stopped a link.
    pub pauses: u64,
    /// Longest queue at an output, in bytes.
    pub max_queue_bytes: u64,
    /// Demands, credits, acknowledgements.
    pub control_packets: u64,
}

/// An experiment is not possible.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are part of the messages")]
pub enum SimError {
    /// Counts or sizes out of range.
    #[error("{what} is {found}, expected {expected}")]
    Scenario { what: &'static str, found: u64, expected: &'static str },
    /// The credit code reported an error. A simulated peer never causes one.
    #[error(transparent)]
    Credit(#[from] message_engine::credit::CreditError),
    /// Messages are incomplete, and no event is left.
    #[error("after {ns} ns nothing moves, with {left} messages incomplete")]
    Stuck { ns: u64, left: usize },
}
