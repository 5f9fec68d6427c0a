//! The JSON bodies of the control plane's HTTP interface.
//!
//! Unknown fields of members' requests and of responses are ignored and new fields have defaults, so that members and
//! control planes of different versions work together. Requests of operators are strict.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::tickets::TicketKeys;

/// Identity of a member. The control plane chooses it at registration.
///
/// At most 64 characters out of `0-9 a-z -`, so that a URL can contain it unescaped.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String", into = "String")]
#[schema(value_type = String, example = "5f0c2b7e91d44f3a8c550f6f2f6ed1a7")]
pub struct MemberId(String);

impl MemberId {
    /// Longest identity in bytes.
    pub const MAX_LEN: usize = 64;

    /// Checks the characters and the length.
    ///
    /// # Errors
    /// [`InvalidMemberId`].
    pub fn parse(text: &str) -> Result<Self, InvalidMemberId> {
        let allowed = |byte: u8| byte.is_ascii_digit() || byte.is_ascii_lowercase() || byte == b'-';
        if text.is_empty() || text.len() > Self::MAX_LEN || !text.bytes().all(allowed) {
            return Err(InvalidMemberId { length: text.len() });
        }
        Ok(Self(text.to_owned()))
    }

    /// A new identity of 128 random bits.
    pub fn random() -> Self {
        Self(format!("{:032x}", rand::random::<u128>()))
    }

    /// A new identity of 128 random bits with a tag behind it.
    ///
    /// # Errors
    /// [`InvalidMemberId`] when the tag is longer than 31 characters or has others than `0-9 a-z -`.
    pub fn random_with_tag(tag: &str) -> Result<Self, InvalidMemberId> {
        Self::parse(&format!("{:032x}-{tag}", rand::random::<u128>()))
    }

    /// The tag that the identity was made with, if it has one.
    pub fn tag(&self) -> Option<&str> {
        self.0.split_once('-').map(|(_, tag)| tag)
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

/// Error of parsing a [`MemberId`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a member id of {length} bytes is malformed: expected 1 to 64 characters out of 0-9, a-z and -"
)]
pub struct InvalidMemberId {
    /// Length of the rejected text in bytes.
    pub length: usize,
}

/// The model of a fleet, in enough detail to compare models and to plan a placement.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
pub struct ModelDescriptor {
    /// Digest of the experts' sizes, arithmetic and weights: 8 to 128 lowercase hex digits.
    pub fingerprint: String,
    /// Architecture name, such as `qwen3_moe`.
    pub architecture: String,
    /// Values per hidden state.
    pub hidden: u32,
    /// Indices of the layers that have experts, strictly ascending.
    pub moe_layers: Vec<u32>,
    /// Routed experts per layer.
    pub num_experts: u32,
    /// Experts chosen per token.
    pub top_k: u32,
}

/// Digests of the tensors of the fleet's model. A member that serves other weights compares its own with them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ModelDigests {
    /// [`ModelDescriptor::fingerprint`] that these digests make up.
    pub fingerprint: String,
    /// The tensors by name, ascending. The digests cover the sampled bytes that the fingerprint covers.
    pub tensors: Vec<TensorDigest>,
    /// The same tensors with digests of all bytes, from a member that has read them all. Otherwise empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub full: Vec<TensorDigest>,
}

/// Digests that the control plane lacks, for instance after a restart. A member that has them sends them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum WantedDigests {
    /// None.
    #[default]
    None,
    /// Digests of all bytes: it has those of sampled bytes.
    Full,
    /// Any.
    Any,
}

/// Digest of one tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TensorDigest {
    /// Name of the tensor.
    pub name: String,
    /// 16 bytes in lowercase hex digits.
    pub digest: String,
}

/// Experts of one layer that are assigned to a member.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
pub struct LayerAssignment {
    /// Layer index as in [`ModelDescriptor::moe_layers`].
    pub layer: u32,
    /// Expert indices, strictly ascending.
    pub experts: Vec<u32>,
}

/// All experts that are assigned to a member, with layers strictly ascending. The default is empty.
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

    /// Returns true if no expert is assigned.
    pub fn is_empty(&self) -> bool {
        self.layers.iter().all(|layer| layer.experts.is_empty())
    }

    /// Experts of one layer. Empty if the layer has none.
    pub fn experts(&self, layer: u32) -> &[u32] {
        match self.layers.binary_search_by_key(&layer, |entry| entry.layer) {
            Ok(idx) => &self.layers[idx].experts,
            Err(_) => &[],
        }
    }

    /// Returns true if the expert of the layer is assigned.
    pub fn contains(&self, layer: u32, expert: u32) -> bool {
        self.experts(layer).binary_search(&expert).is_ok()
    }
}

/// `POST /v1/members`: registers a member, or registers it again after its lease was lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RegisterRequest {
    /// Name of the member: 1 to 128 letters, digits, `.`, `_` and `-`, the first a letter or digit. It must be unique
    /// in the fleet and stay the same over restarts.
    pub name: String,
    /// `host:port` of the bootstrap listener that clients connect to.
    pub data_addr: String,
    /// `host:port` of the metrics listener.
    #[serde(default)]
    pub metrics_addr: Option<String>,
    /// `host:port` on which other servers read weights of the member. Absent if they cannot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weights_addr: Option<String>,
    /// Random number of the process. The same name with another incarnation means a restarted process,
    /// which takes over the name.
    pub incarnation: u64,
    /// The model whose experts the member can load.
    pub model: ModelDescriptor,
    /// Most (layer, expert) pairs that fit into the member's memory. Absent means no limit.
    #[serde(default)]
    pub capacity_experts: Option<u32>,
    /// Failure domain, such as a rack or an availability zone: 1 to 128 visible ASCII characters. Replicas of an expert
    /// are spread over zones if the placement follows the load.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
    /// Experts that this process has already loaded. The planner assigns exactly these, so that a member
    /// that returns after an outage does not load again. Empty for a new process.
    #[serde(default)]
    pub holds: Assignment,
    /// True if the member admits clients with a ticket only.
    #[serde(default)]
    pub needs_tickets: bool,
    /// True if the member speaks to its clients in plain text when they connect, without TLS.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub plain_text: bool,
}

impl RegisterRequest {
    /// A request of a new process: random incarnation, no loaded experts, no capacity limit.
    pub fn new(
        name: impl Into<String>,
        data_addr: impl Into<String>,
        model: ModelDescriptor,
    ) -> Self {
        Self {
            name: name.into(),
            data_addr: data_addr.into(),
            metrics_addr: None,
            weights_addr: None,
            incarnation: rand::random(),
            model,
            capacity_experts: None,
            zone: None,
            holds: Assignment::default(),
            needs_tickets: false,
            plain_text: false,
        }
    }
}

/// Response to [`RegisterRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RegisterResponse {
    /// Identity for every further request of this member.
    pub member_id: MemberId,
    /// Time to live of the lease in milliseconds, from now.
    pub lease_ttl_ms: u64,
    /// Epoch of the placement table at this moment.
    pub epoch: u64,
    /// Experts to load before the member reports ready.
    pub assignment: Assignment,
    /// Version of the assignment. Renewals name it.
    pub assignment_version: u64,
    /// Keys to check tickets with. Absent from control planes that issue none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ticket_keys: Option<TicketKeys>,
}

/// `PUT /v1/members/{id}/lease`: the heartbeat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LeaseRequest {
    /// The incarnation that the member registered with.
    pub incarnation: u64,
    /// Version of the assignment that the member knows. With 0 the response always has the assignment.
    #[serde(default)]
    pub assignment_version: u64,
    /// Load since the last report.
    #[serde(default)]
    pub load: Option<LoadReport>,
}

/// Response to [`LeaseRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LeaseResponse {
    /// Time to live of the lease in milliseconds, from now.
    pub lease_ttl_ms: u64,
    /// Epoch of the placement table at this moment.
    pub epoch: u64,
    /// State of the member. If it is `loading` although the member has reported ready, the report was lost
    /// and the member must report again.
    pub state: MemberState,
    /// Version of the assignment in force.
    pub assignment_version: u64,
    /// The new assignment, if its version differs from the version in the request.
    #[serde(default)]
    pub assignment: Option<Assignment>,
    /// Digests of the model's tensors that the member shall send if it has them.
    #[serde(default)]
    pub wanted_digests: WantedDigests,
    /// True while a draining member is in the placement, because other members still load its experts. It
    /// shall serve until then.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keeps_serving: bool,
    /// Keys to check tickets with. Absent from control planes that issue none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ticket_keys: Option<TicketKeys>,
}

/// Work of a member in one window of time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LoadReport {
    /// Length of the window in milliseconds.
    pub window_ms: u64,
    /// Compute time in the window in milliseconds.
    pub busy_ms: u64,
    /// Tokens received in the window.
    pub num_tokens: u64,
    /// Frames of clients computed in the window.
    #[serde(default)]
    pub num_frames: u64,
    /// Sum of the times that these frames waited for the compute threads, in milliseconds. Over `window_ms` it is
    /// the mean length of the queue.
    #[serde(default)]
    pub queued_ms: u64,
    /// Frames among them that were computed later than 100 ms after they came.
    #[serde(default)]
    pub num_late: u64,
    /// Times by phase. Absent if the member does not report them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phases: Option<PhaseTimes>,
    /// Experts in memory, counted per layer, with old ones that are yet to be freed. Absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_experts: Option<u32>,
    /// Experts that the member has failed to read. Plans place them on other members.
    #[serde(default, skip_serializing_if = "Assignment::is_empty")]
    pub unreadable: Assignment,
    /// Tokens per expert. Experts without tokens may be absent.
    #[serde(default)]
    pub experts: Vec<ExpertLoad>,
    /// Open client links by transport. Transports without links are absent.
    #[serde(default)]
    pub links: Vec<TransportLinks>,
    /// GPU that serves the experts, such as `cuda:0`. Absent for a server on CPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Load of experts under way. Absent if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loading: Option<LoadingReport>,
}

/// Sums of the times of a member's frames and batches in one window, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PhaseTimes {
    /// Batches computed.
    pub num_batches: u64,
    /// Over all frames: from their arrival until their batch began.
    pub queue_us: u64,
    /// Over all batches: copying, sorting and computing.
    pub compute_us: u64,
    /// Over all batches: writing the sums for the clients. 0 on a GPU, where it is a part of the compute.
    pub combine_us: u64,
}

/// Progress of a load of experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LoadingReport {
    /// Experts to load, counted per layer.
    pub num_experts: u64,
    /// Experts loaded so far.
    pub num_loaded: u64,
    /// Experts among them that were read from other servers' memory.
    pub num_from_peers: u64,
    /// Bytes loaded so far.
    pub bytes: u64,
}

/// Open client links of one transport.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TransportLinks {
    /// Name of the transport.
    pub transport: String,
    /// Open links.
    pub num_links: u32,
    /// Better transports that clients excluded because they do not work between client and server, with
    /// the reason.
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

/// `POST /v1/members/{id}/ready`: reports the loaded experts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReadyRequest {
    /// The incarnation that the member registered with.
    pub incarnation: u64,
    /// Loaded experts. The placement contains experts that are both loaded and assigned.
    pub holds: Assignment,
}

/// `POST /v1/members/{id}/drain`: removes the member from the placement. Its lease continues.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
// A misspelt field must not drain another incarnation than meant.
#[serde(deny_unknown_fields)]
pub struct DrainRequest {
    /// If present, the request applies to this incarnation only.
    #[serde(default)]
    pub incarnation: Option<u64>,
}

/// `POST /v1/members/{id}/suspect`: reports that the reporter cannot reach the member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SuspectRequest {
    /// Name of the reporting client: at most 128 characters. Two names count as two observers.
    pub reporter: String,
    /// Observed failure: at most 512 characters.
    pub reason: String,
    /// If present, the report applies to this incarnation only.
    #[serde(default)]
    pub incarnation: Option<u64>,
}

/// Response to [`SuspectRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SuspectResponse {
    /// Time left for the member to renew before it expires, in milliseconds. 0 if it has no lease. It is the rest of
    /// the lease, or less once a second observer has confirmed the failure.
    pub must_renew_within_ms: u64,
}

/// State of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MemberState {
    /// Leased, loading its experts, not in the placement.
    Loading,
    /// Leased and in the placement.
    Serving,
    /// Leased and about to leave. It is out of the placement, or leaves it as soon as other members have loaded its
    /// experts.
    Draining,
    /// The lease has expired. The member is kept for a while so that it may return.
    Expired,
}

impl MemberState {
    /// Every state, in the order of a member's life.
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
    /// `host:port` on which other servers read weights of the member. Absent if they cannot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weights_addr: Option<String>,
    /// State.
    pub state: MemberState,
    /// True while a report of a client is newer than the member's last renewal.
    #[serde(default)]
    pub suspected: bool,
    /// True while the member drains and is in the placement all the same, until others have loaded its experts.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keeps_serving: bool,
    /// Time left of the lease in milliseconds, 0 if it has expired.
    pub lease_remaining_ms: u64,
    /// Number of (layer, expert) pairs reported as loaded.
    pub experts_held: u64,
    /// Number of (layer, expert) pairs assigned.
    pub experts_assigned: u64,
    /// The last load report.
    #[serde(default)]
    pub load: Option<LoadReport>,
    /// Reason why the control plane cannot connect to `data_addr`. Absent if it can, and before the first attempt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unreachable: Option<String>,
    /// In the answer to a drain: reason why it is not stored. A restarted control plane does not know of the drain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_stored: Option<String>,
    /// The danger of its address, if other hosts reach it in plain text or clients without a ticket are admitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub insecure: Option<String>,
    /// Fingerprint of its model. Absent while the fleet serves one model only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<String>,
    /// Clients that reported in the last minute that they cannot reach the member, the newest first, 8 at most.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reports: Vec<LinkReport>,
}

/// A client's report about a member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LinkReport {
    /// Name of the client.
    pub reporter: String,
    /// The failure that it observed.
    pub reason: String,
    /// Age of the report in milliseconds.
    pub age_ms: u64,
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

/// State of the control plane's store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StoreStatus {
    /// Name of the implementation, such as `memory` or `snapshot`.
    pub kind: String,
    /// False while writes fail. The fleet keeps serving, and members of new names are refused.
    pub writable: bool,
    /// Error of the last write.
    #[serde(default)]
    pub error: Option<String>,
}

/// `GET` and `PUT /v1/goals`: the goals of a fleet whose placement follows the load.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FleetGoals {
    /// Fewest replicas per expert, 1 to 64, as far as there are servers.
    pub replicas: u32,
    /// Replicas of hot experts beyond the minimum, as a share of all replicas of a layer, 0 to 16.
    pub spare: f64,
}

/// Reason of a [`ScalingAdvice`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum AdviceReason {
    /// The number of servers suits the load.
    Steady,
    /// The servers compute for a larger share of the time than the target.
    Compute,
    /// The busiest server has hardly any time left.
    BusiestServer,
    /// Frames wait in queues.
    Queue,
    /// Frames are computed too late.
    LateFrames,
    /// The memory does not hold every expert and its replicas.
    Memory,
    /// Each replica of an expert needs a server of its own.
    Replicas,
    /// Fewer servers can carry the load.
    Surplus,
    /// Members have not reported for long enough: the advice is the present number.
    TooLittleData,
}

impl AdviceReason {
    /// The name in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Steady => "steady",
            Self::Compute => "compute",
            Self::BusiestServer => "busiest_server",
            Self::Queue => "queue",
            Self::LateFrames => "late_frames",
            Self::Memory => "memory",
            Self::Replicas => "replicas",
            Self::Surplus => "surplus",
            Self::TooLittleData => "too_little_data",
        }
    }
}

/// `GET /v1/advice`: the number of servers that suits the load. All means are over the last half minute, and older
/// reports count less.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ScalingAdvice {
    /// Servers that the fleet should have.
    pub desired_servers: u32,
    /// Servers that are serving or loading now.
    pub current_servers: u32,
    /// Fewest servers that hold every expert and its replicas.
    pub min_servers: u32,
    /// Why the number differs from the present one, or does not.
    pub reason: AdviceReason,
    /// The reason in figures, for people.
    pub text: String,
    /// Share of the evidence that is there, from 0 to 1: it rises with the time for which servers have reported.
    pub confidence: f64,
    /// Share of the time in which servers compute, averaged over all of them by speed.
    pub compute_share: f64,
    /// The same of the busiest server.
    pub busiest_share: f64,
    /// The share that the advice aims at.
    pub target_share: f64,
    /// Frames that wait in the queue of a server, averaged over time and servers.
    pub queue_frames: f64,
    /// Share of the frames that were computed later than 100 ms after they came.
    pub late_share: f64,
}

/// `GET /v1/leader`: the leading control plane.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LeaderInfo {
    /// True if the control plane that answers leads.
    pub leads: bool,
    /// URL of the leader. `None` if none is known, and for a control plane with a store of its own.
    #[serde(default)]
    pub url: Option<String>,
    /// Number of the term. A later leader has a greater one. 0 if none is known.
    pub term: u64,
}

/// Weight of an [`Event`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Part of normal work.
    Info,
    /// Something is not as planned, and the fleet goes on.
    Warn,
    /// A person must act.
    Error,
}

/// One event of the fleet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Number of the event. Numbers rise, also over restarts and changes of the leader as long as clocks do.
    pub seq: u64,
    /// Time in milliseconds since 1970, by the control plane's clock.
    pub unix_ms: u64,
    /// Weight.
    pub severity: Severity,
    /// Text for people. It can contain text of members and clients: escape it where it is shown.
    pub text: String,
}

/// `GET /v1/events`: events that the control plane keeps in memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventList {
    /// Number of the last event, also before the first one. A reader asks for the events after it.
    pub last_seq: u64,
    /// The events in question, oldest first.
    pub events: Vec<Event>,
}
