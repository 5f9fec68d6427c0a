//! Experts on CPUs: batches against an f64 reference, stores against transformers, allocations.

mod alloc;
mod formats;
mod pool;
mod store;

use test_support::allocations::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;
