//! Experts on CPUs: batches against an f64 reference, stores against transformers, allocations.

mod alloc;
#[path = "../../../../tests/support/src/counting.rs"]
mod counting;
#[path = "../../../../tests/support/src/own_process.rs"]
mod own_process;
mod pool;
#[path = "../../../../tests/support/src/skip.rs"]
mod skip;
mod store;
