//! The device functions compiled for the host and compared with Rust on random input: no GPU needed.
//!
//! The library under test is made of the kernels' own headers; only single instructions and CUDA's
//! intrinsics are replaced (`host/shim`), and every CUDA thread runs as a fibre. Rust fills the
//! parameters, so its side of the layout is tested along.

mod checks;
mod layer;
mod library;
mod refusals;
mod world;

use rand::SeedableRng;
use rand::rngs::StdRng;

/// Random numbers of this run.
fn fresh() -> StdRng {
    let seed = std::env::var("SWITCHYARD_TEST_SEED")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or_else(rand::random);
    println!("seed {seed} (set SWITCHYARD_TEST_SEED to repeat)");
    StdRng::seed_from_u64(seed)
}
