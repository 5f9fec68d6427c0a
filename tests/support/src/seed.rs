//! Seeds of random input.

/// A seed from `SWITCHYARD_SEED`, or a fresh one. It is printed, so that a failure can be replayed.
#[must_use]
pub fn printed_seed() -> u64 {
    let given = std::env::var("SWITCHYARD_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = given.unwrap_or_else(rand::random::<u64>);
    println!("SWITCHYARD_SEED={seed}");
    seed
}
