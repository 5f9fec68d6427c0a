//! A server's check of tickets.

use std::sync::{Mutex, PoisonError};

use super::used::{UseError, UsedProofs};
use super::{
    CLOCK_SKEW, Claims, Footer, Handshake, KeyId, MAX_PROOF_BYTES, MAX_TICKET_BYTES, ProofPayload,
    PublicKey, UnixTime, number, untrusted, verified,
};
use crate::Role;

/// A key of the control plane that a server trusts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrustedKey {
    /// The key.
    pub key: PublicKey,
    /// Fleet whose tickets it signs.
    pub fleet: String,
    /// The server uses the key until this time.
    pub expires_at: UnixTime,
}

/// Checks tickets and proofs, and remembers the proofs.
#[derive(Debug, Default)]
pub struct Gate {
    used: Mutex<UsedProofs>,
}

/// A ticket or proof is not admitted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages explain the fields")]
pub enum TicketError {
    /// No ticket, or bytes that are none.
    #[error("the ticket cannot be read: expected a PASETO v4.public token of the control plane")]
    Malformed,
    /// The key is not known, or not any more.
    #[error(
        "the ticket is signed by a key that this server does not know: get a new ticket and try again"
    )]
    UnknownKey,
    /// The key of the control plane has ended.
    #[error(
        "the ticket's key ended at {ended}, and this server has no newer one: is the control plane running?"
    )]
    KeyEnded { ended: UnixTime },
    /// The signature is wrong.
    #[error("the ticket's signature is wrong")]
    Forged,
    /// The ticket belongs to another fleet.
    #[error("the ticket is for another fleet")]
    OtherFleet,
    /// The ticket is for another use.
    #[error("the ticket is for the role {found}, and this port admits the role {expected}")]
    OtherRole { found: Role, expected: Role },
    /// The ticket does not count yet.
    #[error("the ticket counts from {not_before} on, and it is {now} here: compare the clocks")]
    NotYet { not_before: UnixTime, now: UnixTime },
    /// The ticket has expired.
    #[error(
        "the ticket expired at {expired}, and it is {now} here: get a new one, or compare the clocks"
    )]
    Expired { expired: UnixTime, now: UnixTime },
    /// The ticket was revoked.
    #[error("the ticket of epoch {found} was revoked, the least epoch is {least}: get a new one")]
    Revoked { found: u64, least: u64 },
    /// The proof does not fit ticket, server, channel and hello.
    #[error(
        "the proof does not fit: it is signed by another key, or for another server, connection or hello"
    )]
    WrongProof,
    /// The proof cannot be used.
    #[error(transparent)]
    Use(#[from] UseError),
}

impl Gate {
    /// A gate with a memory of its own size.
    #[must_use]
    pub const fn new(used: UsedProofs) -> Self {
        Self { used: Mutex::new(used) }
    }

    /// Checks a ticket for `role` with its proof. On success the proof is used up. Cheap checks come first; a peer without a
    /// ticket of a known key costs no signature.
    ///
    /// # Errors
    /// [`TicketError`], the first reason found.
    #[allow(clippy::too_many_arguments, reason = "all of different types")]
    pub fn check(
        &self,
        ticket: &str,
        proof: &str,
        handshake: &Handshake<'_>,
        role: Role,
        keys: &[TrustedKey],
        least_epoch: u64,
        now: UnixTime,
    ) -> Result<Claims, TicketError> {
        if ticket.len() > MAX_TICKET_BYTES || proof.len() > MAX_PROOF_BYTES {
            return Err(TicketError::Malformed);
        }
        let token = untrusted(ticket).ok_or(TicketError::Malformed)?;
        let footer: Footer =
            serde_json::from_slice(token.untrusted_footer()).map_err(|_| TicketError::Malformed)?;
        let is_signer = |trusted: &&TrustedKey| names(&trusted.key.id(), &footer);
        let signer = keys.iter().find(is_signer).ok_or(TicketError::UnknownKey)?;
        if now > signer.expires_at {
            return Err(TicketError::KeyEnded { ended: signer.expires_at });
        }
        let payload = verified(&token, &signer.key, &[]).ok_or(TicketError::Forged)?;
        let claims = Claims::decode(&payload).ok_or(TicketError::Malformed)?;
        check_claims(&claims, signer, least_epoch, now)?;
        if claims.role != role {
            return Err(TicketError::OtherRole { found: claims.role, expected: role });
        }
        let token = untrusted(proof).ok_or(TicketError::WrongProof)?;
        let payload = verified(&token, &claims.key, &handshake.assertion(ticket));
        let payload = payload.ok_or(TicketError::WrongProof)?;
        let payload: ProofPayload =
            serde_json::from_slice(&payload).map_err(|_| TicketError::WrongProof)?;
        let nonce = number(&payload.jti).ok_or(TicketError::WrongProof)?;
        // A panic cannot leave the memory without a nonce that it should have.
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        used.spend(&claims.holder, claims.id, claims.expires_at, nonce, now)?;
        Ok(claims)
    }

    /// Number of proofs in memory.
    pub fn num_used(&self) -> usize {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

fn names(id: &KeyId, footer: &Footer) -> bool {
    // Not secret: the key id is public.
    id.as_str() == footer.kid
}

fn check_claims(
    claims: &Claims,
    signer: &TrustedKey,
    least_epoch: u64,
    now: UnixTime,
) -> Result<(), TicketError> {
    if claims.fleet != signer.fleet {
        return Err(TicketError::OtherFleet);
    }
    if claims.not_before > now.plus(CLOCK_SKEW) {
        return Err(TicketError::NotYet { not_before: claims.not_before, now });
    }
    if claims.expires_at < now.minus(CLOCK_SKEW) {
        return Err(TicketError::Expired { expired: claims.expires_at, now });
    }
    if claims.epoch < least_epoch {
        return Err(TicketError::Revoked { found: claims.epoch, least: least_epoch });
    }
    Ok(())
}
