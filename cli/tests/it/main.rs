//! The `switchyard` binary as a user runs it.

mod commands;
mod follow;
mod observability;
mod reference;
mod service;
