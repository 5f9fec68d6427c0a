//! The memory of proofs that were used.

use std::collections::{HashMap, HashSet};

use super::{CLOCK_SKEW, TicketId, UnixTime};

/// Remembers the nonces of used proofs until their ticket has expired.
///
/// The memory is bounded, over all tickets and for each ticket. At a bound it refuses new proofs. It never forgets a
/// nonce whose ticket could still be admitted, also if the clock is set back.
#[derive(Debug)]
pub struct UsedProofs {
    tickets: HashMap<TicketId, Uses>,
    num_used: usize,
    max_used: usize,
    max_per_ticket: usize,
    swept_at: UnixTime,
    /// Latest expiry of a forgotten ticket. Older tickets may have been used.
    forgotten_until: UnixTime,
}

#[derive(Debug)]
struct Uses {
    expires_at: UnixTime,
    nonces: HashSet<[u8; 16]>,
}

/// A proof cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages explain the fields")]
pub enum UseError {
    /// The proof was used before.
    #[error("the proof was used before: each handshake needs a new one")]
    Replayed,
    /// The ticket was used too often.
    #[error("the ticket was used {max} times, which is the limit: get a new one")]
    TooOften { max: usize },
    /// The memory is full.
    #[error(
        "{max} proofs of the last minutes are remembered, which is the limit: try again when older ones have expired"
    )]
    Full { max: usize },
}

impl UsedProofs {
    /// A memory of at most `max_used` nonces, and `max_per_ticket` of one ticket.
    #[must_use]
    pub fn new(max_used: usize, max_per_ticket: usize) -> Self {
        Self {
            tickets: HashMap::new(),
            num_used: 0,
            max_used,
            max_per_ticket,
            swept_at: UnixTime(0),
            forgotten_until: UnixTime(0),
        }
    }

    /// Uses the proof with `nonce` of a ticket.
    ///
    /// # Errors
    /// [`UseError`]. Nothing is remembered then.
    pub fn spend(
        &mut self,
        ticket: TicketId,
        expires_at: UnixTime,
        nonce: [u8; 16],
        now: UnixTime,
    ) -> Result<(), UseError> {
        // A full memory is swept at most once a second, so that refusals stay cheap.
        let pause = if self.num_used < self.max_used { SWEEP_PAUSE } else { 1 };
        if now.0.abs_diff(self.swept_at.0) >= pause {
            self.sweep(now);
        }
        let known = self.tickets.get(&ticket);
        if known.is_some_and(|uses| uses.nonces.contains(&nonce)) {
            return Err(UseError::Replayed);
        }
        if known.is_none() && expires_at <= self.forgotten_until {
            return Err(UseError::Replayed);
        }
        if known.is_some_and(|uses| uses.nonces.len() >= self.max_per_ticket) {
            return Err(UseError::TooOften { max: self.max_per_ticket });
        }
        if self.num_used >= self.max_used {
            return Err(UseError::Full { max: self.max_used });
        }
        let uses = self.tickets.entry(ticket);
        let uses = uses.or_insert_with(|| Uses { expires_at, nonces: HashSet::new() });
        uses.nonces.insert(nonce);
        self.num_used += 1;
        Ok(())
    }

    /// Number of nonces in memory.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.num_used
    }

    /// Returns true if no nonce is in memory.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.num_used == 0
    }

    fn sweep(&mut self, now: UnixTime) {
        self.swept_at = now;
        let oldest = now.minus(CLOCK_SKEW);
        let (mut num_used, mut forgotten_until) = (0, self.forgotten_until);
        self.tickets.retain(|_, uses| {
            let is_needed = uses.expires_at >= oldest;
            match is_needed {
                true => num_used += uses.nonces.len(),
                false => forgotten_until = forgotten_until.max(uses.expires_at),
            }
            is_needed
        });
        self.num_used = num_used;
        self.forgotten_until = forgotten_until;
    }
}

impl Default for UsedProofs {
    fn default() -> Self {
        Self::new(MAX_USED, MAX_PER_TICKET)
    }
}

/// At 32 bytes each: 8 MiB. It is enough for 390 handshakes a second for the life of a ticket and the skew.
const MAX_USED: usize = 1 << 18;
/// One client cannot fill the memory of all.
const MAX_PER_TICKET: usize = 1 << 13;
/// Seconds between two sweeps.
const SWEEP_PAUSE: u64 = 10;
