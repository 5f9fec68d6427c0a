//! Random numbers that a failed test can be replayed with.

use rand::SeedableRng;
use rand::rngs::StdRng;

/// A generator whose seed is printed; `SWITCHYARD_SEED` replays one.
pub fn seeded(test: &str) -> StdRng {
    let seed = std::env::var("SWITCHYARD_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed: u64 = seed.unwrap_or_else(rand::random);
    println!("{test}: SWITCHYARD_SEED={seed}");
    StdRng::seed_from_u64(seed)
}
