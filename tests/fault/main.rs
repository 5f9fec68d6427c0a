//! Faults of real processes. Every test prints its seed; `SWITCHYARD_SEED` replays it.

mod crowd;
mod deaths;
mod half_open;
mod hostile;
mod mutants;
mod namespaces;
mod rig;
#[path = "../support/src/skip.rs"]
mod skip;
mod support;
