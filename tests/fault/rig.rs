//! Short runs of the rig. The long one is `cargo xtask fault`.

use test_support::long::repetitions;

use crate::support::{RigRun, rig};

/// Weights of all events that the rig knows, but none drawn.
const NOTHING: &str = "--kill-weight 0 --restart-weight 0 --freeze-weight 0 --expire-weight 0 \
    --drain-weight 0 --control-kill-weight 0 --control-and-kill-weight 0";

fn assert_sound(run: &RigRun) {
    assert_eq!(run.code, Some(0), "{}", run.report["violations"]);
    assert_eq!(run.report["sound"], true);
    assert_eq!(run.report["num_violations"], 0);
}

/// Failovers for any reason but silence, which a busy machine can fake.
fn failovers(run: &RigRun) -> f64 {
    let by_reason = run.report["failovers"].as_object().expect("failovers");
    let but_silent = by_reason.iter().filter(|(reason, _)| *reason != "silent");
    but_silent.filter_map(|(_, count)| count.as_f64()).sum()
}

#[test]
fn random_faults_lose_double_and_falsify_nothing() {
    let run = rig("--layers 600 --layers-per-event 50 --lease-ttl-ms 1000 --control-hold-ms 1200");
    assert_sound(&run);
    assert!(run.report["layers"].as_u64() >= Some(600));
    let kinds = run.report["kinds"].as_array().expect("kinds");
    assert_eq!(kinds.len(), 7, "every kind of event happened: {kinds:?}");
    let hits = |kind: &str| {
        let found = kinds.iter().find(|found| found["kind"] == kind).expect("the kind");
        found["layers_hit"].as_u64().expect("a number")
    };
    assert!(hits("kill") + hits("restart") + hits("freeze") > 0, "no event hit a layer");
}

#[test]
fn without_a_replica_the_error_names_layer_and_expert() {
    let run =
        rig(&format!("{NOTHING} --outage-weight 1 --servers 3 --layers 80 --layers-per-event 40"));
    assert_sound(&run);
    assert!(run.report["expected_errors"].as_u64() > Some(0));
}

#[test]
fn a_drain_moves_no_token_by_failover() {
    let run =
        rig(&format!("{NOTHING} --drain-weight 1 --servers 3 --layers 80 --layers-per-event 40"));
    assert_sound(&run);
    assert_eq!(failovers(&run), 0.0);
}

#[test]
fn a_control_plane_killed_for_ten_leases_stops_nothing_and_issues_no_epoch_twice() {
    // One kill takes ten seconds. The long form has two.
    let layers = 40 * repetitions(1, 2);
    let run = rig(&format!(
        "{NOTHING} --control-kill-weight 1 --servers 2 --lease-ttl-ms 1000 --control-hold-ms 10000 \
         --layers {layers} --layers-per-event 40"
    ));
    assert_sound(&run);
    assert_eq!(failovers(&run), 0.0);
}

#[test]
fn a_server_frozen_beyond_its_lease_comes_back_as_a_new_member() {
    let run = rig(&format!(
        "{NOTHING} --expire-weight 1 --servers 2 --lease-ttl-ms 1000 --layers 80 --layers-per-event 40"
    ));
    assert_sound(&run);
    // Out of the placement and in again, twice.
    assert!(run.report["epochs"].as_u64() >= Some(5), "{}", run.report["epochs"]);
}
