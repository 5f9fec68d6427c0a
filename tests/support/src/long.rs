//! Short and long forms of tests. `cargo xtask test --all` sets `SWITCHYARD_LONG=1`.

/// Whether the long forms run.
#[must_use]
pub fn is_long() -> bool {
    std::env::var("SWITCHYARD_LONG").is_ok_and(|value| !matches!(value.as_str(), "" | "0"))
}

/// The number of repetitions for the form that runs.
#[must_use]
pub fn repetitions(short: usize, long: usize) -> usize {
    if is_long() { long } else { short }
}
