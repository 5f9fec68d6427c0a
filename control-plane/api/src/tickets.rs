//! The JSON bodies about tickets: permissions to connect to the servers of a fleet.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A public key with which servers check tickets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TicketKey {
    /// PASERK of an ed25519 key: `k4.public.` and 43 characters.
    pub key: String,
    /// Seconds since 1970. Servers use the key until then, also while the control plane is down.
    pub expires_at: u64,
}

/// Everything that a server needs to check tickets without the control plane. It replaces the keys from before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TicketKeys {
    /// Identity of the cluster, which tickets name.
    pub fleet: String,
    /// Keys in use, at most 8: that of the leader, the next one before its first use, and those of the past day.
    pub keys: Vec<TicketKey>,
    /// Servers refuse tickets of lower epochs.
    pub least_epoch: u64,
    /// Longest time in milliseconds between two heartbeats of a server, so that it learns new keys in time. 0 sets no
    /// limit beside that of the lease.
    #[serde(default)]
    pub refresh_ms: u64,
}

/// Use of a ticket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum TicketRole {
    /// Sends tokens to servers.
    #[default]
    Client,
    /// Reads weights of servers. Only callers with the role server get such a ticket.
    Server,
}

impl TicketRole {
    /// The name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Server => "server",
        }
    }
}

/// `POST /v1/tickets`: asks for a ticket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TicketRequest {
    /// Name of the client for logs: 1 to 128 printable ASCII characters.
    pub client: String,
    /// PASERK of the client's public key. Servers admit the ticket only with a proof by its secret part.
    pub key: String,
    /// Use of the ticket.
    #[serde(default)]
    pub role: TicketRole,
}

impl TicketRequest {
    /// A request of a client.
    pub fn new(client: String, key: String) -> Self {
        Self { client, key, role: TicketRole::Client }
    }
}

/// Response to [`TicketRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TicketResponse {
    /// PASETO v4.public token, for every server of the fleet.
    pub ticket: String,
    /// Epoch of the issue.
    pub epoch: u64,
    /// Life of the ticket in milliseconds, from now.
    pub expires_in_ms: u64,
}

/// Response to `POST /v1/tickets/revoke`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RevokeResponse {
    /// Servers refuse tickets of lower epochs as soon as they have renewed their lease. All tickets that were issued
    /// before have a lower one.
    pub least_epoch: u64,
}
