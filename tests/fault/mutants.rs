//! Deliberately broken builds: the rig must notice each of them.

use crate::support::rig;

/// Two servers that hold everything, killed and frozen often.
const ROUGH: &str = "--servers 2 --layers 600 --layers-per-event 20 --max-tokens 24 \
    --kill-weight 1 --restart-weight 0 --freeze-weight 1 --expire-weight 0 --drain-weight 0 \
    --control-kill-weight 0 --control-and-kill-weight 0 --stop-at-first --max-seconds 240";

/// Runs a mutant, which has to break one of these rules. A crash, or a run that could not be made, is not
/// enough.
fn assert_breaks(rules: &[&str], mutant: &str) {
    let run = rig(&format!("{ROUGH} {mutant}"));
    assert_eq!(run.code, Some(1), "the rig did not notice {mutant}, or could not tell");
    assert_eq!(run.report["sound"], false);
    let violations = run.report["violations"].as_array().expect("violations");
    let broken: Vec<_> = violations.iter().filter_map(|v| v["rule"].as_str()).collect();
    let is_named = broken.iter().any(|rule| rules.contains(rule));
    assert!(is_named, "{mutant} broke {broken:?}, expected one of {rules:?}");
}

#[test]
fn a_client_that_counts_a_resent_row_twice_is_noticed() {
    assert_breaks(
        &["right_output"],
        "--client-failpoints client|client::sabotage_double_count=return",
    );
}

#[test]
fn a_client_that_loses_a_pair_is_noticed() {
    assert_breaks(
        &["right_output"],
        "--client-failpoints client|client::sabotage_lose_pair=return",
    );
}

#[test]
fn a_client_that_reads_a_retired_slot_is_noticed() {
    assert_breaks(&["accounts"], "--client-failpoints client|client::sabotage_read_retired=return");
}

#[test]
fn a_client_that_takes_any_answer_is_noticed() {
    // Rows taken too early either get into an output, or later checks refuse them.
    assert_breaks(
        &["right_output", "accounts"],
        "--client-failpoints client|client::sabotage_skip_stale_check=return",
    );
}

#[test]
fn a_server_that_publishes_before_the_rows_are_complete_is_noticed() {
    assert_breaks(
        &["right_output"],
        "--server-failpoints *|server::sabotage_publish_early=5%return",
    );
}
