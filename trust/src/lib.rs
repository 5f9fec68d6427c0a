//! Identities, roles, TLS and tickets of a fleet. Every side of the fleet uses this crate, so that each of them
//! means the same by a role, a certificate and a ticket. It knows no routes and no data plane.

#![forbid(unsafe_code)]

pub mod certs;
mod identity;
pub mod log_limit;
pub mod ticket;
pub mod tls;
pub mod tokens;

pub use identity::{Credential, Identity, Role, UnknownRole};
