//! The JSON bodies of the control plane's HTTP interface.
//!
//! Bodies are read leniently (unknown fields are ignored, new fields have defaults), so that
//! members and control planes of neighbouring versions understand each other.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Identity of one member, given out by the control plane at registration.
///
/// At most 64 characters out of `0-9 a-z -`, so that it can stand in a URL as it is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String", into = "String")]
#[schema(value_type = String, example = "5f0c2b7e91d44f3a8c550f6f2f6ed1a7")]
pub struct MemberId(String);

impl MemberId {
    /// Longest identity in bytes.
    pub const MAX_LEN: usize = 64;

    /// Checks the alphabet and the length.
    pub fn parse(text: &str) -> Result<Self, InvalidMemberId> {
        let allowed = |byte: u8| byte.is_ascii_digit() || byte.is_ascii_lowercase() || byte == b'-';
        if text.is_empty() || text.len() > Self::MAX_LEN || !text.bytes().all(allowed) {
            return Err(InvalidMemberId { length: text.len() });
        }
        Ok(Self(text.to_owned()))
    }

    /// A fresh identity out of 128 random bits.
    pub fn random() -> Self {
        Self(format!("{:032x}", rand::random::<u128>()))
    }

    /// The identity as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<MemberId> for String {
    fn from(id: MemberId) -> Self {
        id.0
    }
}

impl TryFrom<String> for MemberId {
    type Error = InvalidMemberId;

    fn try_from(text: String) -> Result<Self, InvalidMemberId> {
        Self::parse(&text)
    }
}

/// A text that cannot be a [`MemberId`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a member id of {length} bytes is malformed: expected 1 to 64 characters out of 0-9, a-z and -"
)]
pub struct InvalidMemberId {
    /// Length of the rejected text in bytes.
    pub length: usize,
}

/// What the whole fleet serves: enough to tell two models apart and to plan a placement.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
pub struct ModelDescriptor {
    /// Digest over configuration and tensor index, as a lowercase hex string of 8 to 128 digits.
    pub fingerprint: String,
    /// Architecture name, such as `qwen3_moe`.
    pub architecture: String,
    /// Width of a hidden state in elements.
    pub hidden: u32,
    /// Indices of the layers that have experts, strictly ascending.
    pub moe_layers: Vec<u32>,
    /// Routed experts per layer.
    pub num_experts: u32,
    /// Experts chosen per token.
    pub top_k: u32,
}

/// The experts of one layer that a member is to hold.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
pub struct LayerAssignment {
    /// Layer index as in [`ModelDescriptor::moe_layers`].
    pub layer: u32,
    /// Expert indices, strictly ascending.
    pub experts: Vec<u32>,
}

/// Everything that a member is to hold, layers strictly ascending. The default holds nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
pub struct Assignment {
    /// One entry per layer with at least one expert.
    pub layers: Vec<LayerAssignment>,
}

impl Assignment {
    /// Number of (layer, expert) pairs.
    pub fn num_experts(&self) -> usize {
        self.layers.iter().map(|layer| layer.experts.len()).sum()
    }

    /// Whether nothing is assigned.
    pub fn is_empty(&self) -> bool {
        self.layers.iter().all(|layer| layer.experts.is_empty())
    }

    /// The experts of one layer, empty if the layer has none.
    pub fn experts(&self, layer: u32) -> &[u32] {
        match self.layers.binary_search_by_key(&layer, |entry| entry.layer) {
            Ok(idx) => &self.layers[idx].experts,
            Err(_) => &[],
        }
    }

    /// Whether one expert of one layer is assigned.
    pub fn contains(&self, layer: u32, expert: u32) -> bool {
        self.experts(layer).binary_search(&expert).is_ok()
    }
}

/// `POST /v1/members`: joins, or joins again after the lease was lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RegisterRequest {
    /// Name of the member, unique in the fleet and stable over its restarts: 1 to 128 printable
    /// ASCII characters without spaces.
    pub name: String,
    /// `host:port` of the bootstrap listener that clients connect to.
    pub data_addr: String,
    /// `host:port` of the metrics listener.
    #[serde(default)]
    pub metrics_addr: Option<String>,
    /// Random number drawn once per process start. The same name with another incarnation is a
    /// restarted process and takes the name over.
    pub incarnation: u64,
    /// The model whose experts the member can load.
    pub model: ModelDescriptor,
    /// Most (layer, expert) pairs that fit into the member's memory; absent = no limit.
    #[serde(default)]
    pub capacity_experts: Option<u32>,
    /// What this process has loaded already. The planner leaves it as it is, so that a member
    /// which comes back after an outage need not load again. Empty for a fresh process.
    #[serde(default)]
    pub holds: Assignment,
}

impl RegisterRequest {
    /// A request of a fresh process: random incarnation, nothing held, no capacity limit.
    pub fn new(
        name: impl Into<String>,
        data_addr: impl Into<String>,
        model: ModelDescriptor,
    ) -> Self {
        Self {
            name: name.into(),
            data_addr: data_addr.into(),
            metrics_addr: None,
            incarnation: rand::random(),
            model,
            capacity_experts: None,
            holds: Assignment::default(),
        }
    }
}

/// Answer to [`RegisterRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RegisterResponse {
    /// Identity for every further request of this member.
    pub member_id: MemberId,
    /// Time to live of the lease in milliseconds; it starts now.
    pub lease_ttl_ms: u64,
    /// Epoch of the placement table at this moment.
    pub epoch: u64,
    /// What the member is to load before it reports ready.
    pub assignment: Assignment,
    /// Version of the assignment, to be named in renewals.
    pub assignment_version: u64,
}

/// `PUT /v1/members/{id}/lease`: the heartbeat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LeaseRequest {
    /// The incarnation that the member registered with.
    pub incarnation: u64,
    /// Version of the assignment that the member knows; with 0 it is always sent.
    #[serde(default)]
    pub assignment_version: u64,
    /// Load since the last report.
    #[serde(default)]
    pub load: Option<LoadReport>,
}

/// Answer to [`LeaseRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LeaseResponse {
    /// Time to live of the lease in milliseconds; it starts anew now.
    pub lease_ttl_ms: u64,
    /// Epoch of the placement table at this moment.
    pub epoch: u64,
    /// What the control plane takes the member for. `loading` although the member has reported
    /// ready means that the report was lost: report again.
    pub state: MemberState,
    /// Version of the assignment in force.
    pub assignment_version: u64,
    /// What the member is to hold, if the version differs from the one that it knows.
    #[serde(default)]
    pub assignment: Option<Assignment>,
}

/// Work done by a member in one window of time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LoadReport {
    /// Length of the window in milliseconds.
    pub window_ms: u64,
    /// Time spent computing in the window in milliseconds.
    pub busy_ms: u64,
    /// Tokens received in the window.
    pub num_tokens: u64,
    /// Tokens per expert; experts without tokens may be left out.
    #[serde(default)]
    pub experts: Vec<ExpertLoad>,
    /// Open client links by transport; transports without any are left out.
    #[serde(default)]
    pub links: Vec<TransportLinks>,
    /// GPU that serves the experts, as in `cuda:0`; absent on processors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
}

/// Open client links of one transport.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TransportLinks {
    /// Name of the transport.
    pub transport: String,
    /// Links.
    pub num_links: u32,
    /// Which better transports the clients left out because they do not work between them and this server,
    /// and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<String>,
}

/// Tokens of one expert in one window.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExpertLoad {
    /// Layer index.
    pub layer: u32,
    /// Expert index.
    pub expert: u32,
    /// Tokens routed to it.
    pub num_tokens: u64,
}

/// `POST /v1/members/{id}/ready`: the experts named are loaded and answer from now on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReadyRequest {
    /// The incarnation that the member registered with.
    pub incarnation: u64,
    /// What is loaded. Only experts that are both held and assigned are placed.
    pub holds: Assignment,
}

/// `POST /v1/members/{id}/drain`: takes the member out of the placement, its lease lives on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DrainRequest {
    /// If given, the request is about this incarnation only.
    #[serde(default)]
    pub incarnation: Option<u64>,
}

/// `POST /v1/members/{id}/suspect`: a client has seen the member fail.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SuspectRequest {
    /// Who reports, for the log: at most 128 characters.
    pub reporter: String,
    /// What was seen, for the log: at most 512 characters.
    pub reason: String,
    /// If given, the report is about this incarnation only and is void for a later one.
    #[serde(default)]
    pub incarnation: Option<u64>,
}

/// Answer to [`SuspectRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SuspectResponse {
    /// Time within which the member must renew or be expired, in milliseconds; 0 if it is not
    /// leased any more.
    pub must_renew_within_ms: u64,
}

/// Where a member stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MemberState {
    /// Leased, loading its experts; not in the placement.
    Loading,
    /// Leased and in the placement.
    Serving,
    /// Leased, out of the placement, about to leave.
    Draining,
    /// The lease ran out; remembered for a while so that the member may come back.
    Expired,
}

impl MemberState {
    /// Every state, in order of life.
    pub const ALL: [Self; 4] = [Self::Loading, Self::Serving, Self::Draining, Self::Expired];

    /// The name used in JSON and metric labels.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Loading => "loading",
            Self::Serving => "serving",
            Self::Draining => "draining",
            Self::Expired => "expired",
        }
    }
}

impl fmt::Display for MemberState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// One member as `GET /v1/members` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MemberInfo {
    /// Identity.
    pub member_id: MemberId,
    /// Name.
    pub name: String,
    /// Incarnation of the process.
    pub incarnation: u64,
    /// `host:port` of the bootstrap listener.
    pub data_addr: String,
    /// `host:port` of the metrics listener.
    #[serde(default)]
    pub metrics_addr: Option<String>,
    /// Where it stands.
    pub state: MemberState,
    /// Whether a suspect report is open.
    #[serde(default)]
    pub suspected: bool,
    /// What is left of the lease in milliseconds, 0 if expired.
    pub lease_remaining_ms: u64,
    /// (layer, expert) pairs that it has reported to hold.
    pub experts_held: u64,
    /// (layer, expert) pairs that it is assigned.
    pub experts_assigned: u64,
    /// The last load report.
    #[serde(default)]
    pub load: Option<LoadReport>,
}

/// `GET /v1/members`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MemberList {
    /// Members sorted by name.
    pub members: Vec<MemberInfo>,
}

/// Number of members by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MemberCounts {
    /// See [`MemberState::Loading`].
    pub loading: u32,
    /// See [`MemberState::Serving`].
    pub serving: u32,
    /// See [`MemberState::Draining`].
    pub draining: u32,
    /// See [`MemberState::Expired`].
    pub expired: u32,
}

/// Condition of the control plane's store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StoreStatus {
    /// Name of the implementation, such as `memory` or `snapshot`.
    pub kind: String,
    /// False while writes fail: the placement is served on, new members are refused.
    pub writable: bool,
    /// Why the last write failed.
    #[serde(default)]
    pub error: Option<String>,
}

/// `GET /v1/status`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClusterStatus {
    /// Identity of the cluster, constant over restarts of a control plane with a durable store.
    pub cluster_id: String,
    /// Version of the control plane's software.
    pub version: String,
    /// Time since the control plane started in milliseconds.
    pub uptime_ms: u64,
    /// Epoch of the placement table.
    pub epoch: u64,
    /// The model, once a member has registered.
    pub model: Option<ModelDescriptor>,
    /// Planned size of the fleet.
    pub num_servers: u32,
    /// Planned replicas per expert.
    pub replicas: u32,
    /// Time to live of a lease in milliseconds.
    pub lease_ttl_ms: u64,
    /// Members by state.
    pub members: MemberCounts,
    /// (layer, expert) pairs of the model.
    pub experts_total: u64,
    /// Pairs that no serving member holds.
    pub experts_without_replica: u64,
    /// Pairs that at least one but fewer than the planned number of serving members hold.
    pub experts_under_replicated: u64,
    /// Open placement watches.
    pub num_watchers: u64,
    /// The store.
    pub store: StoreStatus,
}
