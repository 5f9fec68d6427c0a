//! The JSON bodies about identities and changes: `GET /v1/whoami` and `GET /v1/audit`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::TicketRole;

/// `GET /v1/whoami`: the identity that the control plane sees in a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WhoAmI {
    /// Name in the certificate or in the token file. `cluster-token` for the cluster's own token, `anonymous` where
    /// the control plane asks for no identity.
    pub name: String,
    /// The rights: `server`, `client`, `operator`, `viewer`. The cluster's own token has all of them.
    pub roles: Vec<String>,
    /// The proof of the identity: `certificate`, `token`, `cluster_token` or `none`.
    pub credential: String,
}

/// One change of the fleet, or an attempt.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AuditEntry {
    /// Number of the entry. Numbers rise, also over restarts as long as clocks do.
    pub seq: u64,
    /// Time in milliseconds since 1970, by the control plane's clock.
    pub unix_ms: u64,
    /// Name of the caller, see [`WhoAmI::name`]. `control-plane` for a change without a request.
    pub name: String,
    /// See [`WhoAmI::roles`].
    pub roles: Vec<String>,
    /// See [`WhoAmI::credential`].
    pub credential: String,
    /// IP address of the caller. Absent for a change without a request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The change, such as `drain`, `resume`, `goals`, `register`, `leave`, `ticket` or `tokens`.
    pub action: String,
    /// The member or other thing that changed, as far as it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// `ok`, or the code of the error.
    pub outcome: String,
    /// Details for people. Text of callers in it is escaped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// Identity of the request, which the response has in its header `x-request-id`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// The tickets of an entry with the action `ticket`, which stands for several requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tickets: Option<AuditTickets>,
}

/// The requests for tickets that one entry stands for. All have the same caller, role and outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AuditTickets {
    /// Number of requests: tickets that were issued, or refusals.
    pub count: u64,
    /// Role of the tickets. Absent for refusals.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<TicketRole>,
    /// Lowest epoch of the tickets. Absent for refusals.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_epoch: Option<u64>,
    /// Highest epoch of the tickets. Absent for refusals.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_epoch: Option<u64>,
}

/// `GET /v1/audit`: the last changes and requests for tickets, in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AuditList {
    /// Number of the last entry, also before the first one. A reader asks for the entries after it.
    pub last_seq: u64,
    /// The entries in question, oldest first.
    pub entries: Vec<AuditEntry>,
}
