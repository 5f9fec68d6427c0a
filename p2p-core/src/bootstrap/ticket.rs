//! Tickets in the handshake: permissions that a third party signs. This crate carries them, and decides when they are
//! checked. The layers above make and check them.

use std::fmt;

use trust::Identity;

use super::Reject;

/// A ticket with the proof that this handshake may use it. Both are texts without a meaning here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShownTicket {
    /// At most [`MAX_TICKET_BYTES`](super::wire::MAX_TICKET_BYTES).
    pub ticket: String,
    /// At most [`MAX_PROOF_BYTES`](super::wire::MAX_PROOF_BYTES).
    pub proof: String,
}

/// The parts of a handshake that a proof covers, and the identity of the peer.
#[derive(Debug, Clone, Copy)]
pub struct HandshakeBinding<'a> {
    /// Value that only the two ends of a TLS connection can derive from it; `None` without TLS.
    pub channel: Option<[u8; 32]>,
    /// The connecting side's hello with its header.
    pub hello: &'a [u8],
    /// At the listening side, the holder of the certificate that the peer has shown. `None` without one.
    pub peer: Option<&'a Identity>,
}

/// Gives the connecting side's tickets.
pub trait TicketSource: fmt::Debug + Send + Sync {
    /// Makes the ticket and proof for one handshake. Does not block. Each call makes another proof, because a handshake
    /// may be repeated.
    ///
    /// # Errors
    /// The reason, for people, why there is none.
    fn show(&self, binding: &HandshakeBinding<'_>) -> Result<ShownTicket, String>;
}

/// Checks tickets at the listening side.
///
/// The listener calls it before it makes a slot, registers memory, opens a queue pair, or names its rendezvous. A
/// refused peer learns the reason and nothing else.
pub trait TicketCheck: fmt::Debug + Send + Sync {
    /// Admits the handshake, or gives the reason to refuse it. `shown` is `None` if the peer shows no ticket. Does not
    /// block. Returns the holder of the ticket: a listener lets one holder have half of its peers. Peers without one
    /// count in total only.
    ///
    /// # Errors
    /// The reason to refuse, with code [`RejectCode::TICKET`](super::RejectCode::TICKET).
    fn check(
        &self,
        shown: Option<&ShownTicket>,
        binding: &HandshakeBinding<'_>,
    ) -> Result<Option<Box<str>>, Reject>;
}
