//! Many senders into few receivers over one switch, packet by packet, in discrete events.
//!
//! Every sender sends one message to every receiver, all at once; or every receiver reads one from every
//! sender. The model has what decides about incast and nothing else:
//!
//! - **Hosts** with one full-duplex link each. A host sends control packets first and its messages in
//!   turn, packet by packet. A start is delayed by a random part of [`Model::jitter_ns`].
//! - **One switch** that forwards to queues at its outputs. They share [`Model::buffer_bytes`]; a queue
//!   may take [`Model::alpha`] times what is left of it.
//! - **Loss** is repaired by going back: the receiver asks for the first byte that it misses, once, and
//!   drops everything else until that byte comes; if that is lost too, the sender goes back after
//!   [`Model::retry_ns`] of silence. Control packets are never lost.
//! - **Pause** instead of loss: when more than [`Model::pause_bytes`] that came from one host are in the
//!   switch, the host stops until half of them have left.
//! - **Credits** are [`message_engine::credit`], the code that a receiver runs. Demands and credits are
//!   packets on the same links, and take [`Model::control_ns`] to be looked at.
//! - **Reads** are asked for by the receiver, in control packets that the sender's card answers by itself.
//!   Their credits never leave the receiver: it asks itself, as the engine does, and posts what is granted
//!   after [`Model::control_ns`].
//!
//! Not modelled: several switches, rate control by marks (DCQCN), the hosts' memory, the software
//! around a transfer. The same seed gives the same result.

mod event;
mod host;
pub mod layer;
mod net;
mod switch;

use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use net::{run, run_messages};

/// How senders are held back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Control {
    /// Not at all: the switch drops what it cannot hold.
    Loss,
    /// By the switch, which stops whole links.
    Pause,
    /// By the receivers' credits, in turn.
    Credits,
    /// By the receivers' credits, the shortest demand first.
    CreditsShortest,
}

/// Who moves the bytes.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "snake_case")]
pub enum Verb {
    /// The sender writes them.
    #[default]
    Write,
    /// The receiver reads them.
    Read,
}

/// Sizes and times of links, switch and transport.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Model {
    /// Time of one byte on a link, in picoseconds. 20 is 400 Gb/s.
    pub ps_per_byte: u64,
    /// Payload of a full packet in bytes.
    pub packet_bytes: u32,
    /// What surrounds a payload on the wire, in bytes: for RoCE v2 preamble 8, Ethernet 14 and 4, IPv4 20,
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
    /// How senders are held back.
    pub control: Control,
    /// Whether senders write or receivers read.
    #[serde(default)]
    pub verb: Verb,
    /// Of the starts.
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
    /// When it is ready to be sent, in picoseconds.
    pub start_ps: u64,
}

/// Messages of any sizes. A host sends its own in turn, those that start together in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Traffic {
    /// Sending hosts.
    pub senders: usize,
    /// Receiving hosts.
    pub receivers: usize,
    /// What they send.
    pub messages: Vec<Message>,
    /// How senders are held back.
    pub control: Control,
    /// Whether senders write or receivers read.
    pub verb: Verb,
}

/// What came of messages.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Totals {
    /// Until the last sender knew that its last message is there, in milliseconds; with reads until the
    /// last receiver had its last one.
    pub ms: f64,
    /// Until the last message was there.
    pub landed_ms: f64,
    /// As `ms` for the median message.
    pub median_message_ms: f64,
    /// Packets that the switch dropped.
    pub dropped_packets: u64,
    /// Payload that was sent more than once, in bytes.
    pub resent_bytes: u64,
    /// Times that a sender went back by itself.
    pub timeouts: u64,
    /// Times that the switch stopped a link.
    pub pauses: u64,
    /// Longest queue at an output, in bytes.
    pub max_queue_bytes: u64,
    /// Demands, credits, acknowledgements.
    pub control_packets: u64,
}

/// What came of it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// What was run.
    pub scenario: Scenario,
    /// As [`Totals::ms`].
    pub ms: f64,
    /// The same for the median message.
    pub median_message_ms: f64,
    /// Payload into one receiver by the whole time, in 10^9 bytes per second.
    pub gb_per_s_per_receiver: f64,
    /// Packets that the switch dropped.
    pub dropped_packets: u64,
    /// Payload that was sent more than once, in bytes.
    pub resent_bytes: u64,
    /// Times that a sender went back by itself.
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
pub enum SimError {
    /// Counts or sizes out of range.
    #[error("{what} is {found}, expected {expected}")]
    Scenario {
        /// Which.
        what: &'static str,
        /// Value found.
        found: u64,
        /// What is allowed.
        expected: &'static str,
    },
    /// The credit code found an error, which a simulated peer never causes.
    #[error(transparent)]
    Credit(#[from] message_engine::credit::CreditError),
    /// Nothing moves any more.
    #[error("after {ns} ns nothing moves, with {left} messages incomplete")]
    Stuck {
        /// Simulated time.
        ns: u64,
        /// Messages incomplete.
        left: usize,
    },
}
