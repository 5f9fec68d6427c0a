//! Skips of tests that cannot run here. A skip is printed at once and at the end of `cargo xtask test`. It is a failure
//! where `SWITCHYARD_REQUIRE` names its resource.

use std::io::Write;

/// Notes that a test, or a part of one, does not run because `resource` is missing.
///
/// # Panics
/// When `SWITCHYARD_REQUIRE` names `resource`, or all.
pub fn skip(resource: &str, reason: &str) {
    println!("SKIPPED: {resource}: {reason}");
    let required = std::env::var("SWITCHYARD_REQUIRE").unwrap_or_default();
    let is_required = required.split(',').any(|item| item == resource || item == "all");
    assert!(!is_required, "{resource} is required by SWITCHYARD_REQUIRE: {reason}");
    if let Some(log) = std::env::var_os("SWITCHYARD_SKIP_LOG") {
        // One write a line: other tests append at the same time.
        let line = format!("{resource}\t{reason}\n");
        let file = std::fs::OpenOptions::new().create(true).append(true).open(log);
        file.and_then(|mut file| file.write_all(line.as_bytes())).expect("the skip log");
    }
}
