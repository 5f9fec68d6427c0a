//! Receiver-driven credits: the receiver decides which sender may send how much.
//!
//! Many senders into one receiver overrun its network link, whatever each of them does alone. Here the receiver hands
//! out byte grants. The bytes under way to it then never exceed the capacity of its network link and one round trip
//! (the *window*). This module is arithmetic only: it has no sockets, no threads and no clock. Counters and times come
//! in as events, and reports to senders come out as actions.
//!
//! ```text
//! CreditSender                                   CreditReceiver
//!   submit(len)  ── Demand { announced, withdrawn } ──▶  Event::Demand
//!   on_credit    ◀── Credit { granted, unscheduled } ──  Action::Credit
//!   sent(bytes)  ─────────── payload ────────────────▶  Event::Received
//! ```
//!
//! - **Counters are cumulative and monotonic**: they count bytes since the two halves were made. A report that is
//!   merged with a later one, or arrives twice, changes nothing. A counter that a correct peer cannot produce is a
//!   [`CreditError::Impossible`], and the state does not change.
//! - **Small messages go unscheduled**: up to [`CreditConfig::unscheduled_bytes`] per sender may be under way without a
//!   grant. All others are announced, and sent within the grant. Within each of the two kinds, the caller keeps track
//!   of the message that a byte belongs to.
//! - **A grant that is not used expires.** Its share of the window goes to others. The sender gets nothing new until
//!   the old grant is used or withdrawn, so late bytes never count twice. At most
//!   [`CreditConfig::sender_window_bytes`] per stalled sender can still arrive.
//! - **Memory is bounded** by [`CreditConfig::max_senders`] and allocated once.

mod heap;
mod list;
mod receiver;
mod sender;
#[cfg(test)]
mod tests;

use thiserror::Error;

pub use receiver::{Action, CreditReceiver, Event, SenderId, SenderState};
pub use sender::{Admission, CreditSender};

/// Limits and policy. [`for_link`](Self::for_link) computes a starting point. Both sides must agree on
/// `unscheduled_bytes` and `max_demand_bytes`. The other fields matter to the receiver only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CreditConfig {
    /// Most granted bytes under way from all senders together: bandwidth × round trip of the receiver's network link.
    /// A larger window keeps senders busy that serve several receivers.
    pub window_bytes: u64,
    /// Most granted bytes under way from one sender.
    pub sender_window_bytes: u64,
    /// Bytes that a sender gets at its turn.
    pub grant_bytes: u64,
    /// Longest message that may be sent without a grant, and most such bytes under way from one sender.
    pub unscheduled_bytes: u64,
    /// Most bytes that one sender may have announced and not sent.
    pub max_demand_bytes: u64,
    /// Most senders at a time.
    pub max_senders: usize,
    /// Order of the senders' turns.
    pub order: GrantOrder,
    /// Time within which a granted byte must arrive, in nanoseconds. After it the sender counts as stalled.
    pub expiry_ns: u64,
}

/// Order in which senders get grants while there is room in the window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GrantOrder {
    /// All senders with demand in turn.
    #[default]
    RoundRobin,
    /// The sender with the least announced and ungranted bytes. Every eighth turn goes to the sender that has waited
    /// longest, so that no sender starves. See [`CreditConfig::overcommitted`].
    ShortestFirst,
}

impl CreditConfig {
    /// Limits for a network link of `bytes_per_s` with a round trip of `rtt_ns`, control messages included.
    ///
    /// One sender gets twice their product, which keeps the network link busy by itself. All senders together get twice
    /// as much again, because senders that serve several receivers do not answer each of them at once. Small turns
    /// spread the window over many senders.
    #[must_use]
    pub fn for_link(bytes_per_s: u64, rtt_ns: u64) -> Self {
        let product = u128::from(bytes_per_s) * u128::from(rtt_ns) / 1_000_000_000;
        let sender_window_bytes = (2 * product).clamp(64 << 10, 1 << 40) as u64;
        Self {
            window_bytes: 2 * sender_window_bytes,
            sender_window_bytes,
            grant_bytes: sender_window_bytes / 32,
            unscheduled_bytes: 8 << 10,
            max_demand_bytes: 1 << 40,
            max_senders: 4096,
            order: GrantOrder::RoundRobin,
            expiry_ns: 100_000_000,
        }
    }

    /// Multiplies the window by `times` and leaves the share of one sender unchanged: for senders that serve several
    /// receivers. A receiver that relies on one sender idles while that sender serves another, which
    /// [`GrantOrder::ShortestFirst`] makes likely. Queues may grow by the same factor.
    #[must_use]
    pub const fn overcommitted(self, times: u64) -> Self {
        let times = if times == 0 { 1 } else { times };
        Self { window_bytes: self.window_bytes.saturating_mul(times), ..self }
    }

    /// Checks whether the limits fit together.
    ///
    /// # Errors
    /// [`CreditError::Config`] names the first limit that does not fit.
    pub const fn check(&self) -> Result<(), CreditError> {
        if self.grant_bytes == 0 || self.grant_bytes > self.sender_window_bytes {
            let expected = "1 to sender_window_bytes";
            return Err(CreditError::Config {
                what: "grant_bytes",
                found: self.grant_bytes,
                expected,
            });
        }
        if self.sender_window_bytes > self.window_bytes {
            let (what, expected) = ("sender_window_bytes", "at most window_bytes");
            return Err(CreditError::Config { what, found: self.sender_window_bytes, expected });
        }
        if self.max_senders == 0 || self.max_senders >= list::NONE as usize {
            let (what, expected) = ("max_senders", "1 to 4294967294");
            return Err(CreditError::Config { what, found: self.max_senders as u64, expected });
        }
        Ok(())
    }
}

impl Default for CreditConfig {
    /// Limits for 400 Gb/s and 10 µs.
    fn default() -> Self {
        Self::for_link(50_000_000_000, 10_000)
    }
}

/// A sender's report to its receiver. Both counters travel together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Demand {
    /// Bytes of all scheduled messages so far.
    pub announced: u64,
    /// Announced bytes that will not be sent after all.
    pub withdrawn: u64,
}

/// A receiver's report to a sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Credit {
    /// Scheduled bytes that may have been sent or withdrawn.
    pub granted: u64,
    /// Unscheduled bytes that may have been sent.
    pub unscheduled: u64,
}

/// An impossible step of the credit protocol. The state is unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CreditError {
    /// A counter of the peer has a value that no correct peer can produce. The caller drops the peer.
    #[error(
        "credit counter `{counter}` reads {found}, expected {low} to {high}: the peer broke the credit protocol"
    )]
    Impossible {
        /// Name of the counter.
        counter: &'static str,
        /// Value found.
        found: u64,
        /// Smallest possible value.
        low: u64,
        /// Largest possible value.
        high: u64,
    },
    /// The bytes exceed the room. A local bug, or a message to be submitted later.
    #[error("cannot {op} {found} bytes: {limit} are possible now")]
    Excess {
        /// Requested step.
        op: &'static str,
        /// Requested bytes.
        found: u64,
        /// Possible bytes.
        limit: u64,
    },
    /// The configured number of senders is reached.
    #[error("there are {max} senders, which is the limit")]
    Full {
        /// The limit.
        max: usize,
    },
    /// The sender has left or has never joined. A local bug.
    #[error("there is no sender {index} of generation {generation}")]
    Unknown {
        /// Index of the sender.
        index: u32,
        /// Generation of the index.
        generation: u32,
    },
    /// The limits do not fit together.
    #[error("{what} is {found}, expected {expected}")]
    Config {
        /// Name of the limit.
        what: &'static str,
        /// Value found.
        found: u64,
        /// Allowed values.
        expected: &'static str,
    },
}

/// A peer's cumulative counter that must lie between `low` and `high`.
const fn within(counter: &'static str, found: u64, low: u64, high: u64) -> Result<(), CreditError> {
    if found < low || found > high {
        return Err(CreditError::Impossible { counter, found, low, high });
    }
    Ok(())
}
