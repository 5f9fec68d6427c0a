//! Tickets: short-lived, signed permissions to connect to the servers of a fleet.
//!
//! The control plane signs a *ticket* for the public key of one client process. For each handshake the client signs a
//! *proof* with the key of the ticket. The proof names the server, its incarnation, the TLS channel and the hello, and
//! has a nonce of its own. A server admits a ticket with a proof, and each proof once. A ticket without the client's
//! secret key admits no process, and a proof for one server is worth nothing at another.
//!
//! Both parts are PASETO tokens of version 4, purpose `public` (ed25519). Keys are written as PASERK.
//! `docs/explanation/tickets.md` gives the reasons. Nothing here reads a clock or does I/O: times are arguments.

mod gate;
mod key;
mod used;

#[cfg(test)]
mod tests;

use std::fmt;
use std::time::{Duration, SystemTime};

use pasetors::token::{Public, UntrustedToken};
use pasetors::version4::{PublicToken, V4};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::Role;

pub use gate::{Gate, TicketError, TrustedKey};
pub use key::{InvalidKey, KeyId, PublicKey, SecretKey};
pub use used::{UseError, UsedProofs};

/// Default life of a ticket.
pub const DEFAULT_LIFE: Duration = Duration::from_secs(600);
/// Clocks of the control plane and a server may differ by so much.
pub const CLOCK_SKEW: Duration = Duration::from_secs(60);
/// Longest ticket in bytes.
pub const MAX_TICKET_BYTES: usize = 1536;
/// Longest proof in bytes.
pub const MAX_PROOF_BYTES: usize = 256;
/// Longest name of a client in a ticket, in bytes.
pub const MAX_CLIENT_BYTES: usize = 128;
/// Longest identity of a fleet in a ticket, in bytes.
pub const MAX_FLEET_BYTES: usize = 128;
/// Longest identity of a holder in a ticket, in bytes.
pub const MAX_HOLDER_BYTES: usize = 256;

/// Wall-clock time in whole seconds since 1970, UTC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnixTime(pub u64);

impl UnixTime {
    /// This time plus `span`, in whole seconds.
    #[must_use]
    pub const fn plus(self, span: Duration) -> Self {
        Self(self.0.saturating_add(span.as_secs()))
    }

    /// This time less `span`, in whole seconds.
    #[must_use]
    pub const fn minus(self, span: Duration) -> Self {
        Self(self.0.saturating_sub(span.as_secs()))
    }
}

impl From<SystemTime> for UnixTime {
    /// A time before 1970 becomes 1970.
    fn from(time: SystemTime) -> Self {
        Self(time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs()))
    }
}

impl fmt::Display for UnixTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.to_rfc3339() {
            Some(text) => f.write_str(&text),
            None => write!(f, "second {} since 1970", self.0),
        }
    }
}

impl UnixTime {
    fn to_rfc3339(self) -> Option<String> {
        let time = OffsetDateTime::from_unix_timestamp(i64::try_from(self.0).ok()?).ok()?;
        time.format(&Rfc3339).ok()
    }

    fn from_rfc3339(text: &str) -> Option<Self> {
        let time = OffsetDateTime::parse(text, &Rfc3339).ok()?;
        time.unix_timestamp().try_into().ok().map(Self)
    }
}

/// Random number of a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TicketId(pub [u8; 16]);

impl TicketId {
    /// A new number.
    pub fn random() -> Self {
        Self(rand::random())
    }
}

/// The statements of a ticket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claims {
    /// Identity of the fleet whose servers admit the ticket.
    pub fleet: String,
    /// Name that the client has given itself, for logs.
    pub client: String,
    /// Identity that has asked for the ticket, as the control plane has verified it.
    pub holder: String,
    /// Use of the ticket: [`Role::Client`] sends tokens to servers, [`Role::Server`] reads weights of servers.
    pub role: Role,
    /// The client process proves that it has the secret part of this key.
    pub key: PublicKey,
    /// Number of the ticket.
    pub id: TicketId,
    /// Epoch of the issue. Servers refuse tickets below their least epoch.
    pub epoch: u64,
    /// Time of the issue.
    pub issued_at: UnixTime,
    /// The ticket counts from this time on.
    pub not_before: UnixTime,
    /// The ticket counts until this time.
    pub expires_at: UnixTime,
}

impl Claims {
    /// Claims of a new ticket of a client that counts from now on for `life`. The holder is the client.
    pub fn new(
        fleet: String,
        client: String,
        key: PublicKey,
        epoch: u64,
        now: UnixTime,
        life: Duration,
    ) -> Self {
        let id = TicketId::random();
        let expires_at = now.plus(life);
        let (holder, role) = (client.clone(), Role::Client);
        let (issued_at, not_before) = (now, now);
        Self { fleet, client, holder, role, key, id, epoch, issued_at, not_before, expires_at }
    }

    /// Signs the ticket.
    ///
    /// # Errors
    /// [`SignError`] if a text is too long, or a time is beyond year 9999.
    pub fn sign(&self, signer: &SecretKey) -> Result<String, SignError> {
        for (text, max) in [
            (&self.client, MAX_CLIENT_BYTES),
            (&self.fleet, MAX_FLEET_BYTES),
            (&self.holder, MAX_HOLDER_BYTES),
        ] {
            if text.len() > max {
                return Err(SignError::TooLong { found: text.len(), max });
            }
        }
        let time = |time: UnixTime| time.to_rfc3339().ok_or(SignError::Time { found: time.0 });
        let payload = Payload {
            iss: ISSUER.to_owned(),
            sub: self.client.clone(),
            aud: self.fleet.clone(),
            iat: time(self.issued_at)?,
            nbf: time(self.not_before)?,
            exp: time(self.expires_at)?,
            jti: format!("{:032x}", u128::from_be_bytes(self.id.0)),
            epoch: self.epoch,
            key: self.key.to_string(),
            holder: self.holder.clone(),
            role: self.role,
        };
        let payload = serde_json::to_vec(&payload).map_err(|_| SignError::Library)?;
        let footer = Footer { kid: signer.public().id().to_string() };
        let footer = serde_json::to_vec(&footer).map_err(|_| SignError::Library)?;
        signer.sign(&payload, Some(&footer), &[])
    }

    fn decode(payload: &[u8]) -> Option<Self> {
        let payload: Payload = serde_json::from_slice(payload).ok()?;
        if payload.iss != ISSUER {
            return None;
        }
        Some(Self {
            fleet: payload.aud,
            client: payload.sub,
            holder: payload.holder,
            role: payload.role,
            key: payload.key.parse().ok()?,
            id: TicketId(number(&payload.jti)?),
            epoch: payload.epoch,
            issued_at: UnixTime::from_rfc3339(&payload.iat)?,
            not_before: UnixTime::from_rfc3339(&payload.nbf)?,
            expires_at: UnixTime::from_rfc3339(&payload.exp)?,
        })
    }
}

/// A handshake that a proof belongs to.
#[derive(Clone, Copy, Debug)]
pub struct Handshake<'a> {
    /// Name of the server.
    pub server: &'a str,
    /// Incarnation of the server's process.
    pub incarnation: u64,
    /// Exporter value of the TLS connection; `None` without TLS.
    pub channel: Option<[u8; 32]>,
    /// The client's hello, as it travels.
    pub hello: &'a [u8],
}

impl Handshake<'_> {
    /// Bytes that the proof signs beside its nonce. No two handshakes have the same.
    fn assertion(&self, ticket: &str) -> Vec<u8> {
        let mut out = Vec::with_capacity(256 + ticket.len() + self.hello.len());
        for part in [PROOF_LABEL, ticket.as_bytes(), self.server.as_bytes(), self.hello] {
            out.extend((part.len() as u64).to_le_bytes());
            out.extend(part);
        }
        out.extend(self.incarnation.to_le_bytes());
        out.extend(self.channel.as_ref().map_or(&[][..], |binding| &binding[..]));
        out
    }
}

/// Signs a proof for one handshake with the key of `ticket`. Each call makes another nonce.
///
/// # Errors
/// [`SignError`].
pub fn prove(
    ticket: &str,
    handshake: &Handshake<'_>,
    key: &SecretKey,
) -> Result<String, SignError> {
    let nonce: [u8; 16] = rand::random();
    let payload = ProofPayload { jti: format!("{:032x}", u128::from_be_bytes(nonce)) };
    let payload = serde_json::to_vec(&payload).map_err(|_| SignError::Library)?;
    key.sign(&payload, None, &handshake.assertion(ticket))
}

/// A ticket or proof cannot be signed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages explain the fields")]
pub enum SignError {
    /// The name of the client or the identity of the fleet is too long.
    #[error("a text of a ticket has {found} bytes, at most {max} are allowed")]
    TooLong { found: usize, max: usize },
    /// A time has no date.
    #[error("second {found} since 1970 is beyond the year 9999: check the clock")]
    Time { found: u64 },
    /// The library refused the key or the text. A bug.
    #[error("the token cannot be signed")]
    Library,
}

/// JSON of a ticket, with the names of PASETO's registered claims.
#[derive(Debug, Serialize, Deserialize)]
struct Payload {
    iss: String,
    sub: String,
    aud: String,
    iat: String,
    nbf: String,
    exp: String,
    jti: String,
    epoch: u64,
    key: String,
    holder: String,
    role: Role,
}

/// JSON of a proof.
#[derive(Debug, Serialize, Deserialize)]
struct ProofPayload {
    jti: String,
}

/// Footer of a ticket: the key that signed it.
#[derive(Debug, Serialize, Deserialize)]
struct Footer {
    kid: String,
}

/// Reads a token without a check of its signature.
fn untrusted(token: &str) -> Option<UntrustedToken<Public, V4>> {
    UntrustedToken::try_from(token).ok()
}

/// Returns the payload if `key` signed the token together with `assertion`.
fn verified(
    token: &UntrustedToken<Public, V4>,
    key: &PublicKey,
    assertion: &[u8],
) -> Option<Vec<u8>> {
    let trusted = PublicToken::verify(key.inner(), token, None, Some(assertion)).ok()?;
    Some(trusted.payload().as_bytes().to_vec())
}

/// Reads a number of 128 bits in lowercase hex digits.
fn number(text: &str) -> Option<[u8; 16]> {
    let is_hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    if text.len() != 32 || !text.bytes().all(is_hex) {
        return None;
    }
    u128::from_str_radix(text, 16).ok().map(u128::to_be_bytes)
}

const ISSUER: &str = "switchyard";
/// Separates proofs from other uses of the same key.
const PROOF_LABEL: &[u8] = b"switchyard handshake 1";
