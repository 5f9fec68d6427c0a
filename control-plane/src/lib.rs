//! Switchyard's control plane: the members of the fleet, and the placement of experts on them.
//!
//! Members hold leases and renew them over HTTP. The placement table lists the experts of the serving
//! members. It carries an epoch that rises with every change and is never issued twice. Clients follow
//! the table through a stream of server-sent events. While the control plane is down they keep using
//! the last table. The crate `switchyard_control_api` has the types and the client.
//!
//! * [`Server`], [`ServerConfig`]: a control plane bound to an address.
//! * [`planner`]: assigns experts to a joining member. Sans-I/O.
//! * [`planner::rebalance`]: plans the experts of a whole fleet from the load. Sans-I/O.
//! * [`advice`]: the number of servers that suits the load. Sans-I/O.
//! * [`store`]: durable state; one trait, one conformance suite.
//! * [`EtcdConfig`]: several control planes on one etcd. One leads, the others follow and take over.
//! * [`clock`]: monotonic time, virtual in tests.
//!
//! The control plane is not on the data path: it never sees a model's tokens.
#![forbid(unsafe_code)]

mod access;
mod admission;
pub mod advice;
mod balance;
mod board;
mod boards;
pub mod clock;
mod config;
mod coordinator;
mod editions;
mod election;
mod epoch;
mod events;
mod fleet;
mod http;
mod member;
mod metrics;
mod pace;
pub mod planner;
mod role;
mod server;
pub mod store;
mod table;
mod term;
mod tickets;
mod work;

pub use access::rates::RateLimits;
pub use balance::BalanceSettings;
pub use config::{ConfigError, EtcdConfig, Limits, ServerConfig};
pub use metrics::names as metric_names;
pub use planner::{BalancedPlanner, PlannerConfigError};
pub use server::{BindError, RunError, Server};

// Types of other crates in the signatures of this one.
pub use control_api::{Assignment, LayerAssignment, MemberId, ModelDescriptor};
pub use prometheus;
