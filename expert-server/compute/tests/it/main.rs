//! Experts on CPUs: batches against an f64 reference, stores against transformers, allocations.

mod alloc;
mod formats;
mod pool;
mod store;

use test_support::allocations::CountingAllocator;

test_support::child_processes! { "loader" => store::loader }

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;
