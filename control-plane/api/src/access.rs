//! The JSON bodies about identities and changes: `GET /v1/whoami` and `GET /v1/audit`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

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
    /// The change, such as `drain`, `resume`, `goals`, `register`, `leave` or `tokens`.
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
}

/// `GET /v1/audit`: the last changes, in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AuditList {
    /// Number of the last entry, also before the first one. A reader asks for the entries after it.
    pub last_seq: u64,
    /// The entries in question, oldest first.
    pub entries: Vec<AuditEntry>,
}
