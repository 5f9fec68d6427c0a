//! Switchyard's control plane: who is in the fleet, and which server holds which expert.
//!
//! Members hold leases and renew them over HTTP; the placement table follows from the members
//! that serve and carries an epoch that rises with every change and is never issued twice.
//! Clients follow the table by a stream of server-sent events and go on with the last one while
//! the control plane is down. `control_api` has the types and the client.
//!
//! * [`Server`], [`ServerConfig`]: the whole, bound to an address.
//! * [`planner`]: what a joining member is to hold. Sans-I/O.
//! * [`store`]: where the state survives a restart; one trait, one conformance suite.
//! * [`clock`]: monotonic time, virtual in tests.
//!
//! The data path is none of its business: no token of any model passes through here.
#![forbid(unsafe_code)]

mod admission;
pub mod clock;
mod config;
mod coordinator;
mod epoch;
mod fleet;
mod http;
mod member;
mod metrics;
pub mod planner;
mod server;
pub mod store;
mod table;

pub use config::{ConfigError, Limits, ServerConfig};
pub use planner::{PlannerConfigError, SeatPlanner};
pub use server::{BindError, RunError, Server};

// Types of other crates in the signatures of this one.
pub use control_api::{Assignment, LayerAssignment, MemberId, ModelDescriptor};
pub use prometheus;
