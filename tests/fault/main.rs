//! Faults of real processes. Every test prints its seed; `SWITCHYARD_SEED` replays it.

mod crowd;
mod deaths;
mod hostile;
mod mutants;
mod rig;
mod support;
