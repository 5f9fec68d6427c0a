//! The control plane as its users see it: the JSON types of its HTTP interface, a typed client,
//! a watch on the placement table and the keeper of a member's lease.
//!
//! * [`types`]: what travels. Every type carries its OpenAPI schema.
//! * [`placement`]: the placement table and the check that makes its indices trustworthy.
//! * [`ControlClient`]: one request, one bounded wait, one typed error.
//! * [`PlacementWatch`]: the newest placement table, kept through outages of the control plane.
//! * [`LeaseKeeper`]: heartbeats on a thread of their own, for members.
//!
//! Nothing here serves HTTP, decides a placement, or touches the data path.
#![forbid(unsafe_code)]

mod backoff;
mod client;
mod error;
mod lease;
pub mod placement;
mod sse;
pub mod types;
mod watch;

pub use client::{ClientOptions, ControlClient, WatchStream};
pub use error::{ApiError, ConfigError, ControlError, code};
pub use lease::{LeaseError, LeaseKeeper, LeaseOptions, LeaseState, LeaseStatus};
pub use placement::{LayerPlacement, PlacementError, PlacementTable, ServerEntry};
pub use types::{
    Assignment, ClusterStatus, DrainRequest, ExpertLoad, InvalidMemberId, LayerAssignment, LeaseRequest,
    LeaseResponse, LoadReport, MemberCounts, MemberId, MemberInfo, MemberList, MemberState,
    ModelDescriptor, ReadyRequest, RegisterRequest, RegisterResponse, StoreStatus, SuspectRequest,
    SuspectResponse, TransportLinks,
};
pub use watch::{PlacementWatch, WatchOptions, WatchState, WatchStatus};

// `tokio::runtime::Handle` and `tokio::sync::watch::Receiver` are in the signatures of this crate.
pub use tokio;
