//! Errors about transports, and about options that do not fit together.

use super::{fails, run};

/// The usage error of `bench p2p`.
fn refusal(args: &[&str]) -> String {
    let output = run(&[&["bench", "p2p"], args].concat(), &[]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{args:?}: {text}");
    text
}

#[test]
fn flags_of_another_measurement_are_refused_by_name() {
    for (flag, value) in [
        ("--senders", "2"),
        ("--receivers", "2"),
        ("--min-bytes", "8"),
        ("--max-bytes", "64"),
        ("--slot-bytes", "65536"),
        ("--slot-frames", "2"),
    ] {
        for engine in [&["--transport", "tcp"][..], &["--transport", "libfabric", "--depth", "2"]] {
            let text = refusal(&[engine, &[flag, value]].concat());
            let expected = format!("{flag} would do nothing with the message engine");
            assert!(text.contains(&expected), "{text}");
        }
    }
    let text = refusal(&["--transport", "cma", "--no-pin"]);
    assert!(text.contains("--no-pin would do nothing"), "{text}");
    for (flag, value) in
        [("--slot-bytes", "65536"), ("--transport", "shm"), ("--seed", "3"), ("--sizes", "1M")]
    {
        let text = refusal(&["--device", "cuda", flag, value]);
        assert!(text.contains(&format!("{flag} would do nothing with --device")), "{text}");
    }
    // Environment variables may be meant for other commands.
    let args = ["bench", "p2p", "--transport", "cma", "--sizes", "4K", "--num-iovs", "1", "--json"];
    let output = run(&args, &[("SWITCHYARD_SLOT_FRAMES", "3"), ("SWITCHYARD_ITERATIONS", "5")]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
#[cfg(feature = "verbs")]
fn settings_of_verbs_are_taken_with_verbs_only() {
    let config = r#"{"gid_index": 3, "traffic_class": 106}"#;
    for args in [
        &["--transport", "shm"][..],
        &["--transport", "tcp"],
        &["--transport", "libfabric", "--sizes", "1K"],
    ] {
        let text = refusal(&[args, &["--verbs-config", config]].concat());
        assert!(text.contains("--verbs-config would do nothing"), "{text}");
    }
    refusal(&["--transport", "verbs", "--verbs-config", r#"{"gid": 3}"#]);
    // No host has this port. The error shows that slots and the message engine looked for it.
    for more in [&[][..], &["--sizes", "1K"]] {
        let args = ["bench", "p2p", "--transport", "verbs:nonesuch", "--verbs-config", config];
        let line = fails(&[&args, more].concat(), &[]);
        assert!(line.contains("RDMA") || line.contains("nonesuch"), "{line}");
    }
}

#[test]
#[cfg(feature = "ibgda")]
fn requests_posted_by_kernels_need_a_gpu_and_a_device_and_the_error_says_what_is_missing() {
    let tiny = super::tiny();
    let tiny = tiny.to_str().expect("path");
    let server = ["expert-server", "--model", tiny, "--name", "a", "--experts", "all"];
    let on_gpu = [&server[..], &["--device", "emulated:0", "--listen", "127.0.0.1:0"]].concat();
    // No host has this device.
    let named = ["--transport", "shm,ibgda:nonesuch"];
    let line = fails(&[&on_gpu[..], &named].concat(), &[]);
    assert!(line.contains("transport ibgda:nonesuch: ibgda nonesuch: open failed"), "{line}");
    for check in ibgda::probe::probe().checks {
        if check.state == ibgda::probe::State::Missing {
            assert!(line.contains(check.name) && line.contains(&check.found), "{line}");
        }
    }
    // For every place of the slots.
    for place in ["auto", "gpu", "host"] {
        let line = fails(&[&on_gpu[..], &named, &["--ibgda-slots", place]].concat(), &[]);
        assert!(line.contains("ibgda nonesuch: open failed"), "{line}");
    }
    let output = run(&[&on_gpu[..], &named].concat(), &[("SWITCHYARD_IBGDA_SLOTS", "bar1")]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("`bar1` is not a place of slots: expected auto, gpu or host"), "{text}");
    let line = fails(&on_gpu, &[("SWITCHYARD_TRANSPORT", "ibgda:mlx5_0+mlx5_1")]);
    assert!(line.contains("not one port of one device"), "{line}");
    // Slots in host memory.
    let line = fails(&server, &[("SWITCHYARD_TRANSPORT", "shm,ibgda")]);
    assert!(line.contains("ibgda is for slots of GPUs: give --device cuda:N"), "{line}");
    let line = fails(&["demo", "--transport", "ibgda"], &[]);
    assert!(line.contains("ibgda is for slots of GPUs"), "{line}");
    refusal(&["--transport", "ibgda"]);
}

#[test]
#[cfg(feature = "libfabric")]
fn doctor_looks_for_libfabric_as_the_transport_does() {
    let check = |env: &[(&str, &str)]| {
        let output = run(&["doctor", "--json"], env);
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let groups = report["groups"].as_array().expect("groups").iter();
        let mut checks = groups.flat_map(|group| group["checks"].as_array().expect("checks"));
        let check = checks.find(|check| check["name"] == "libfabric").expect("libfabric");
        (check["verdict"].as_str().expect("text").to_owned(), check["found"].to_string())
    };
    let (verdict, found) = check(&[("SWITCHYARD_LIBFABRIC_SO", "/nonexistent/libfabric.so")]);
    assert_eq!(verdict, "absent");
    assert!(found.contains("/nonexistent/libfabric.so"), "{found}");
    // The check needs no tool from PATH.
    assert_eq!(check(&[("PATH", "/nonexistent")]), check(&[]));
}
