//! Makes the counting allocator the one of a test binary that includes this file by its path.

#[path = "allocations.rs"]
mod allocations;

pub use self::allocations::*;

#[global_allocator]
static COUNTING: allocations::CountingAllocator = allocations::CountingAllocator;
