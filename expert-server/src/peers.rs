//! Weights from peers: a server reads experts from the memory of servers that hold them, by one-sided reads of the
//! message engine. `docs/explanation/weights-from-peers.md` has the design.
//!
//! | module | contents |
//! |---|---|
//! | [`source`] | lets peers read this server's experts |
//! | [`reader`] | reads experts of peers |
//! | [`wire`] | their messages |
//! | [`manifest`] | layout and digest of an expert |
//! | [`limit`] | limit on the rate of peers |
//! | [`ticket`] | the ticket that a reader shows |
//! | [`certificate`] | the check of certificates without tickets |
//! | [`secret`] | the secret that they show each other without tickets |

mod certificate;
mod limit;
mod manifest;
mod reader;
mod secret;
mod source;
mod ticket;
mod wire;

use checkpoint::{Checkpoint, Fingerprint};

pub(crate) use self::certificate::ServersOnly;
pub(crate) use self::reader::{Fetch, Fetched, Peer};
pub(crate) use self::secret::WeightsSecret;
pub use self::source::SourceError;
pub(crate) use self::source::{ListeningSource, SourceConfig, WeightSource};
pub(crate) use self::ticket::ReaderTicket;
#[cfg(feature = "device")]
pub(crate) use self::wire::{hex, unhex};

/// The properties that two servers must share to exchange weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ModelIdentity {
    fingerprint: String,
    parameters: String,
}

impl ModelIdentity {
    pub(crate) fn new(checkpoint: &Checkpoint, fingerprint: Fingerprint) -> Self {
        let parameters = wire::hex(&checkpoint.config().parameters_digest());
        Self { fingerprint: fingerprint.to_string(), parameters }
    }

    /// Fingerprint of the weights.
    pub(crate) fn fingerprint(&self) -> &str {
        &self.fingerprint
    }
}
