//! Servers on CPUs.

mod fleet;
mod hostile;
mod lifecycle;
mod merge;
