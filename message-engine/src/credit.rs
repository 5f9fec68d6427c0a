//! Receiver-driven credits: who may send how much, decided where the congestion would be.
//!
//! Many senders into one receiver overrun its link, whatever each of them does on its own. Here the
//! receiver hands out byte grants, so that what is under way to it never exceeds what its link and
//! one round trip hold (the *window*). This module is arithmetic only: it has no sockets, no threads
//! and no clock. Counters and times come in as events, and what is to be told to whom comes out as
//! actions.
//!
//! ```text
//! CreditSender                                   CreditReceiver
//!   submit(len)  ── Demand { announced, withdrawn } ──▶  Event::Demand
//!   on_credit    ◀── Credit { granted, unscheduled } ──  Action::Credit
//!   sent(bytes)  ─────────── payload ────────────────▶  Event::Received
//! ```
//!
//! - **Counters are cumulative and monotonic**: bytes since the two halves were made. A report that is
//!   merged with a later one, or seen twice, changes nothing. A counter that a correct peer cannot
//!   produce is a [`CreditError::Impossible`], and the state stays as it was.
//! - **Small messages go unscheduled**: up to [`CreditConfig::unscheduled_bytes`] per sender may be
//!   under way without a grant. All others are announced, and sent within the grant. Within each of
//!   the two kinds, which message a byte belongs to is the caller's business.
//! - **A grant that is not used expires.** Its share of the window goes to others, and is remembered:
//!   the sender gets nothing new before the old grant was used or withdrawn, so late bytes are never
//!   counted twice. At most [`CreditConfig::sender_window_bytes`] per stalled sender can still come.
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

/// Limits and policy. [`for_link`](Self::for_link) gives a start; both sides must agree on
/// `unscheduled_bytes` and `max_demand_bytes`, the rest is the receiver's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CreditConfig {
    /// Most granted bytes under way from all senders together: bandwidth × round trip of the
    /// receiver's link, or more to keep senders busy that serve several receivers.
    pub window_bytes: u64,
    /// Most granted bytes under way from one sender.
    pub sender_window_bytes: u64,
    /// Bytes that a sender gets at its turn.
    pub grant_bytes: u64,
    /// Longest message that goes without a grant, and most such bytes under way from one sender.
    pub unscheduled_bytes: u64,
    /// Most bytes that one sender may have announced and not sent.
    pub max_demand_bytes: u64,
    /// Most senders at a time.
    pub max_senders: usize,
    /// Whose turn it is.
    pub order: GrantOrder,
    /// Time in which a granted byte has to arrive before its sender counts as stalled, in nanoseconds.
    pub expiry_ns: u64,
}

/// Whose turn it is when there is room in the window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GrantOrder {
    /// All senders with demand in turn.
    #[default]
    RoundRobin,
    /// The sender with the least announced and ungranted bytes; every eighth turn goes to the one that
    /// has waited longest, so that nobody starves. See [`CreditConfig::overcommitted`].
    ShortestFirst,
}

impl CreditConfig {
    /// For a link of `bytes_per_s` with a round trip of `rtt_ns`, control messages included. One sender
    /// gets twice their product, which keeps the link busy by itself; all together get twice as much
    /// again, because senders that serve several receivers do not answer each of them at once. Small
    /// turns spread the window over many senders.
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

    /// A window `times` as large, while what one sender gets of it stays the same: for senders that
    /// serve several receivers. A receiver that counts on one sender alone idles while that sender
    /// serves another, which [`GrantOrder::ShortestFirst`] makes likely. Queues may grow by as much.
    #[must_use]
    pub const fn overcommitted(self, times: u64) -> Self {
        let times = if times == 0 { 1 } else { times };
        Self { window_bytes: self.window_bytes.saturating_mul(times), ..self }
    }

    /// Whether the limits fit together.
    ///
    /// # Errors
    /// [`CreditError::Config`] names the first that does not.
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
    /// 400 Gb/s and 10 µs.
    fn default() -> Self {
        Self::for_link(50_000_000_000, 10_000)
    }
}

/// What a sender tells its receiver. Both counters travel together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Demand {
    /// Bytes of all scheduled messages so far.
    pub announced: u64,
    /// Bytes of them that will not be sent after all.
    pub withdrawn: u64,
}

/// What a receiver tells a sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Credit {
    /// Scheduled bytes that may have been sent or withdrawn.
    pub granted: u64,
    /// Unscheduled bytes that may have been sent.
    pub unscheduled: u64,
}

/// A step of the credit protocol is not possible. The state is as it was before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CreditError {
    /// A counter of the peer holds what no correct peer can produce: drop the peer.
    #[error(
        "credit counter `{counter}` reads {found}, expected {low} to {high}: the peer broke the credit protocol"
    )]
    Impossible {
        /// Which counter.
        counter: &'static str,
        /// Value found.
        found: u64,
        /// Smallest value that was possible.
        low: u64,
        /// Largest value that was possible.
        high: u64,
    },
    /// More bytes than there is room for. A local bug, or a message to be submitted later.
    #[error("cannot {op} {found} bytes: {limit} are possible now")]
    Excess {
        /// What was asked for.
        op: &'static str,
        /// Bytes asked for.
        found: u64,
        /// Bytes possible.
        limit: u64,
    },
    /// As many senders as configured are there.
    #[error("{max} senders are there, which is the limit")]
    Full {
        /// The limit.
        max: usize,
    },
    /// The sender has left, or was never there. A local bug.
    #[error("no sender {index} of generation {generation} is there")]
    Unknown {
        /// Its place.
        index: u32,
        /// Which of those who had the place.
        generation: u32,
    },
    /// The limits do not fit together.
    #[error("{what} is {found}, expected {expected}")]
    Config {
        /// Which limit.
        what: &'static str,
        /// Value found.
        found: u64,
        /// What is allowed.
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
