//! The `switchyard` binary as a user runs it.

mod commands;
mod dashboards;
mod documents;
mod follow;
mod observability;
mod plan;
mod reference;
mod scale;
mod secrets;
mod secure;
mod service;
mod shared;
mod terminal;
mod trace;
mod update;
