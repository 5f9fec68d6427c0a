//! The memory of proofs that were used.

use std::collections::{HashMap, HashSet};

use super::{CLOCK_SKEW, TicketId, UnixTime};

/// Remembers the nonces of used proofs until their ticket has expired.
///
/// The memory is bounded, over all tickets and for each ticket. It never forgets a nonce whose ticket could still be
/// admitted, also if the clock is set back. When it is full, it evicts the *holder* with the most nonces: the identity
/// that the control plane has seen behind its tickets. All tickets that the holder has used so far are refused from then
/// on, and the holder needs new ones. So a holder that fills the memory displaces itself and no other one.
#[derive(Debug)]
pub struct UsedProofs {
    holders: HashMap<Box<str>, Holder>,
    num_used: usize,
    max_used: usize,
    max_per_ticket: usize,
    swept_at: UnixTime,
    /// Latest expiry of a forgotten ticket. Older tickets may have been used.
    forgotten_until: UnixTime,
}

#[derive(Debug, Default)]
struct Holder {
    tickets: HashMap<TicketId, Uses>,
    num_used: usize,
    /// Latest expiry of an evicted ticket. Older tickets of the holder may have been used.
    evicted_until: Option<UnixTime>,
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
    /// The holder has filled the memory.
    #[error(
        "the identity behind the ticket made the most of the {max} handshakes that this server can remember: get a new \
         ticket, and connect less often"
    )]
    Evicted { max: usize },
}

impl UsedProofs {
    /// A memory of at most `max_used` nonces, and `max_per_ticket` of one ticket.
    #[must_use]
    pub fn new(max_used: usize, max_per_ticket: usize) -> Self {
        Self {
            holders: HashMap::new(),
            num_used: 0,
            max_used,
            max_per_ticket,
            swept_at: UnixTime(0),
            forgotten_until: UnixTime(0),
        }
    }

    /// Uses the proof with `nonce` of a ticket that the control plane has issued to `holder`.
    ///
    /// # Errors
    /// [`UseError`]. Nothing is remembered then.
    pub fn spend(
        &mut self,
        holder: &str,
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
        let known = self.holders.get(holder);
        match known.and_then(|known| known.tickets.get(&ticket)) {
            Some(uses) if uses.nonces.contains(&nonce) => return Err(UseError::Replayed),
            Some(uses) if uses.nonces.len() >= self.max_per_ticket => {
                return Err(UseError::TooOften { max: self.max_per_ticket });
            }
            Some(_) => {}
            None if expires_at <= self.forgotten_until => return Err(UseError::Replayed),
            None if known.is_some_and(|known| known.evicted_until >= Some(expires_at)) => {
                return Err(UseError::Evicted { max: self.max_used });
            }
            None => {}
        }
        if self.num_used >= self.max_used && self.evict(holder) {
            return Err(UseError::Evicted { max: self.max_used });
        }
        let holder = match self.holders.get_mut(holder) {
            Some(holder) => holder,
            None => self.holders.entry(holder.into()).or_default(),
        };
        let uses = holder.tickets.entry(ticket);
        let uses = uses.or_insert_with(|| Uses { expires_at, nonces: HashSet::new() });
        uses.nonces.insert(nonce);
        holder.num_used += 1;
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

    /// Evicts the holder with the most nonces. Among equals it prefers `asking`. Returns true if it is `asking`.
    fn evict(&mut self, asking: &str) -> bool {
        let holders = self.holders.iter_mut().map(|(name, holder)| (&**name, holder));
        let largest = holders.max_by_key(|(name, holder)| (holder.num_used, *name == asking));
        let Some((name, holder)) = largest else { return false };
        let latest = holder.tickets.values().map(|uses| uses.expires_at).max();
        holder.evicted_until = holder.evicted_until.max(latest);
        self.num_used -= holder.num_used;
        (holder.tickets, holder.num_used) = (HashMap::new(), 0);
        name == asking
    }

    fn sweep(&mut self, now: UnixTime) {
        self.swept_at = now;
        let oldest = now.minus(CLOCK_SKEW);
        let (mut num_used, mut forgotten_until) = (0, self.forgotten_until);
        self.holders.retain(|_, holder| {
            holder.num_used = 0;
            holder.tickets.retain(|_, uses| {
                let is_needed = uses.expires_at >= oldest;
                match is_needed {
                    true => holder.num_used += uses.nonces.len(),
                    false => forgotten_until = forgotten_until.max(uses.expires_at),
                }
                is_needed
            });
            if let Some(until) = holder.evicted_until.take_if(|until| *until < oldest) {
                forgotten_until = forgotten_until.max(until);
            }
            num_used += holder.num_used;
            !holder.tickets.is_empty() || holder.evicted_until.is_some()
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
/// A ticket that was stolen together with its key serves only so often.
const MAX_PER_TICKET: usize = 1 << 13;
/// Seconds between two sweeps.
const SWEEP_PAUSE: u64 = 10;
