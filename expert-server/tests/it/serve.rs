//! Servers on CPUs.

pub mod fleet;
mod hostile;
mod lifecycle;
mod merge;
