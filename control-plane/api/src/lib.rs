//! Client side of the control plane. It has the JSON types of the HTTP interface, a typed client, a watch
//! of the placement table, and the keeper of a member's lease.
//!
//! * [`types`]: bodies of requests and responses, each with its OpenAPI schema.
//! * [`models`]: bodies about the models that a fleet serves side by side during an update.
//! * [`tickets`]: bodies about tickets.
//! * [`placement`]: the placement table and its validation.
//! * [`text`]: checks and escapes of text that people read in a terminal.
//! * [`ControlClient`]: one call per request, with a timeout and a typed error.
//! * [`PlacementWatch`]: the newest placement table, kept through outages of the control plane.
//! * [`LeaseKeeper`]: heartbeats of a member, on their own thread.
//!
//! Control planes are given by URLs, by a DNS name or, with the feature `kubernetes`, by a Service of Kubernetes.
//!
//! This crate serves no HTTP, decides no placement, and is not on the data path.
#![forbid(unsafe_code)]

mod access;
mod backoff;
mod client;
mod discovery;
mod error;
mod lease;
pub mod models;
pub mod placement;
mod sse;
pub mod status;
pub mod text;
pub mod tickets;
mod token;
pub mod types;
mod watch;

pub use access::{AuditEntry, AuditList, AuditTickets, WhoAmI};
pub use client::{ClientOptions, ControlClient, PlacementQuery, WatchStream};
pub use error::{ApiError, ConfigError, ControlError, code};
pub use lease::{LeaseError, LeaseKeeper, LeaseOptions, LeaseState, LeaseStatus};
pub use models::{
    AddModelRequest, ClientsReport, EditionInfo, EditionList, EditionState, ModelClients,
    SwitchRequest,
};
pub use placement::{LayerPlacement, PlacementError, PlacementTable, ServerEntry};
pub use status::{ClusterStatus, Health};
pub use tickets::{
    RevokeResponse, TicketKey, TicketKeys, TicketRequest, TicketResponse, TicketRole,
};
pub use types::{
    AdviceReason, Assignment, DrainRequest, Event, EventList, ExpertLoad, FleetGoals,
    InvalidMemberId, LayerAssignment, LeaderInfo, LeaseRequest, LeaseResponse, LinkReport,
    LoadReport, LoadingReport, MemberCounts, MemberId, MemberInfo, MemberList, MemberState,
    ModelDescriptor, ModelDigests, PhaseTimes, ReadyRequest, RegisterRequest, RegisterResponse,
    ScalingAdvice, Severity, StoreStatus, SuspectRequest, SuspectResponse, TensorDigest,
    TransportLinks, WantedDigests,
};
pub use watch::{PlacementWatch, WatchOptions, WatchState, WatchStatus};

// `tokio::runtime::Handle` and `tokio::sync::watch::Receiver` are in the signatures of this crate.
pub use tokio;
pub use trust;
pub use trust::tls::Security;
