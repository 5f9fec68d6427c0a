//! Waits for a condition.

use std::thread::sleep;
use std::time::{Duration, Instant};

/// Returns once `condition` holds. Looks every millisecond, for at most `limit`.
///
/// # Panics
/// When the limit passes; the message names `what`.
pub fn eventually(what: &str, limit: Duration, mut condition: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < limit, "after {limit:?} there was no {what}");
        sleep(Duration::from_millis(1));
    }
}
