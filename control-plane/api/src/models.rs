//! Bodies of requests and responses about editions: the models that a fleet serves side by side during an update.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::types::{MemberCounts, ModelDescriptor};

/// State of an edition of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EditionState {
    /// Clients that start get this model.
    Current,
    /// Servers of this model may join. Only clients that ask for its fingerprint use it.
    Next,
    /// Clients that started with this model still use it. A client that starts does not get it.
    Retiring,
    /// Its servers are drained. The edition is forgotten once the last one has left.
    Draining,
}

impl EditionState {
    /// Every state, in the order of an edition's life.
    pub const ALL: [Self; 4] = [Self::Next, Self::Current, Self::Retiring, Self::Draining];

    /// The name used in JSON and metric labels.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Current => "current",
            Self::Next => "next",
            Self::Retiring => "retiring",
            Self::Draining => "draining",
        }
    }
}

impl fmt::Display for EditionState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// One edition of the model, as `GET /v1/models` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EditionInfo {
    /// Fingerprint of the model. Absent before the first member of a new fleet has registered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<String>,
    /// State.
    pub state: EditionState,
    /// The model, once a member has registered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelDescriptor>,
    /// Epoch of its placement table.
    pub epoch: u64,
    /// Its members by state.
    pub members: MemberCounts,
    /// (layer, expert) pairs of the model.
    pub experts_total: u64,
    /// Pairs that no serving member holds.
    pub experts_without_replica: u64,
    /// Pairs that at least one but fewer than the planned number of serving members hold.
    pub experts_under_replicated: u64,
    /// Clients that follow its placement.
    pub num_clients: u64,
    /// Reason why its last plan failed, if the placement follows the load.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan_error: Option<String>,
    /// True if it becomes the current edition as soon as its experts have their replicas.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub switches_when_complete: bool,
    /// Time in milliseconds after which its servers are drained although clients follow it. Absent if it does not retire.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retires_within_ms: Option<u64>,
}

impl EditionInfo {
    /// Returns true if every expert has the planned number of replicas.
    pub fn is_complete(&self) -> bool {
        self.experts_total > 0
            && self.experts_without_replica == 0
            && self.experts_under_replicated == 0
    }
}

/// `GET /v1/models`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EditionList {
    /// The editions, the current one first. At most two.
    pub editions: Vec<EditionInfo>,
}

/// `POST /v1/models`: accepts servers of another model, beside the current one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AddModelRequest {
    /// Fingerprint of the model: 8 to 128 lowercase hex digits.
    pub fingerprint: String,
}

/// `POST /v1/models/switch`: makes the next edition the current one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SwitchRequest {
    /// Switches later if the next edition is not complete yet. Otherwise the request is then refused.
    #[serde(default)]
    pub when_complete: bool,
    /// Live replicas that each expert of the next edition must have. Absent means as many as planned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u32>,
    /// Longest time from the switch to the drain of the old servers, in milliseconds. Absent means one day.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retire_after_ms: Option<u64>,
}

/// `POST /v1/models/clients`: a control plane that follows reports its clients to the leader. The answer is the list of
/// editions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClientsReport {
    /// Name of the reporter: 1 to 256 characters.
    pub reporter: String,
    /// Clients by the fingerprint that they follow.
    pub clients: Vec<ModelClients>,
}

/// Clients of one model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ModelClients {
    /// Fingerprint of the model.
    pub fingerprint: String,
    /// Number of clients.
    pub num_clients: u64,
}

/// Returns true if `text` has the form of a fingerprint: 8 to 128 lowercase hex digits.
pub fn is_fingerprint(text: &str) -> bool {
    let is_hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    (8..=128).contains(&text.len()) && text.bytes().all(is_hex)
}
