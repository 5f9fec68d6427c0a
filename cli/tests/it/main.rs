//! The `switchyard` binary as a user runs it.

mod commands;
mod observability;
mod reference;
mod service;
mod shared;
