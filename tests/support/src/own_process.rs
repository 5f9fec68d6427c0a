//! Processes of their own for tests that change or measure state of the whole process: failpoints, allocations.
//!
//! Test binaries include this file by its path.

use std::process::Command;

/// Returns true if no other test runs in this process. Otherwise runs the test `name` alone in a child process,
/// asserts that it passes, and returns false.
///
/// cargo-nextest gives every test a process of its own; `cargo test` runs all of them in one.
pub fn is_alone(name: &str) -> bool {
    let by_nextest = std::env::var("NEXTEST_EXECUTION_MODE").is_ok_and(|v| v == "process-per-test");
    if by_nextest || std::env::var_os(ALONE).is_some() {
        return true;
    }
    let status = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", name, "--nocapture"])
        .env(ALONE, "1")
        .status()
        .expect("a child process");
    assert!(status.success(), "{name} failed in its own process: {status}");
    false
}

const ALONE: &str = "SWITCHYARD_TEST_ALONE";
