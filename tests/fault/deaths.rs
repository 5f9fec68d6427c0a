//! Processes that die, or stop, at the worst moments.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rand::RngExt;
use switchyard_tests::failpoints;
use switchyard_tests::worker::{is_whole, metric_by_label};
use test_support::procfs;

use crate::support::{PATIENCE, Setup, binary, runtime, steady};

#[test]
fn a_server_killed_at_any_failpoint_costs_no_token() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("failpoints");
    std::fs::write(&file, "").expect("written");
    let mut setup = Setup::start(2, 2, 60, |options| {
        options.server_env.push((failpoints::ENV.to_owned(), format!("@{}", file.display())));
    });
    // Only long work has ticks.
    setup.pool.add(&setup.checkpoint, &mut setup.rng, 1000).expect("a long request");
    for point in failpoints::OF_SERVERS {
        let count = if point == "server::in_tick" { 1 } else { setup.rng.random_range(1..20) };
        std::fs::write(&file, format!("server-0|{point}=kill({count})")).expect("written");
        setup.cluster.kill_server(0).expect("killed");
        setup.cluster.start_server(0).expect("started");
        setup.cluster.wait_serving(0).expect("serving");
        let pid = setup.cluster.server_pid(0).expect("a process");
        let num_layers = setup.compute_until(point, |_, _| procfs::has_ended(pid));
        println!("{point}: dead after {num_layers} layers");
        setup.compute(10);
    }
    setup.assert_accounts();
}

#[test]
fn the_late_answer_of_a_server_that_stood_still_lands_nowhere() {
    let list = "server-0|server::between_payload_and_publish=3*sleep(400)";
    let mut setup = Setup::start(2, 2, 40, |options| {
        options.server_env.push((failpoints::ENV.to_owned(), list.to_owned()));
    });
    let silent = |setup: &Setup| {
        let all = metric_by_label(&setup.client, "switchyard_client_failovers_total");
        all.get("silent").copied().unwrap_or_default()
    };
    setup.compute_until("a failover", |setup, _| silent(setup) > 0.0);
    // The server wakes up, publishes into the slot that was retired, and is used again.
    let begin = Instant::now();
    setup.compute_until("the late answers", |_, _| begin.elapsed() > Duration::from_secs(2));
    setup.assert_accounts();
}

#[test]
fn a_client_killed_between_any_two_steps_harms_no_other_and_leaves_nothing_behind() {
    let mut setup = Setup::start(2, 2, 32, |_| {});
    let runtime = runtime();
    // One server is enough to be ready; both must have their link before links are counted.
    setup.compute_until("links to both servers", |setup, _| is_whole(&setup.client, 2, 2));
    setup.compute(20);
    let members = setup.members(&runtime);
    let metrics: Vec<String> = members.iter().filter_map(|m| m.metrics_addr.clone()).collect();
    assert_eq!(metrics.len(), 2);
    let links_before = steady("links", || num_links(&runtime, &metrics));
    let pids = [0, 1].map(|idx| setup.cluster.server_pid(idx).expect("a process"));
    let descriptors = || pids.map(|pid| procfs::usage(pid).expect("usage").descriptors);
    // A scrape, for example, holds a descriptor of the server for a moment longer.
    let before = steady("descriptors", descriptors);
    for round in 0..6 {
        // A client passes the third only after a server has failed. Here none does.
        let point = failpoints::OF_CLIENTS[round % 2];
        let count = setup.rng.random_range(1..30);
        let mut victim = spawn_victim(&mut setup, point, count);
        setup.compute_until("the victim's death", |_, _| procfs::has_ended(victim.id()));
        let status = victim.wait().expect("reaped");
        let signal = std::os::unix::process::ExitStatusExt::signal(&status);
        assert_eq!(signal, Some(9), "{point} after {count} passes: {status}");
        setup.compute(5);
    }
    let begin = Instant::now();
    let is_back = || descriptors().iter().zip(&before).all(|(now, before)| now <= before);
    while !is_back() || num_links(&runtime, &metrics) != links_before {
        let links = num_links(&runtime, &metrics);
        assert!(
            begin.elapsed() < PATIENCE,
            "links {links:?}, before {links_before:?}; descriptors {:?}, before {before:?}",
            descriptors()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(setup.failovers().is_empty(), "{:?}", setup.failovers());
    setup.assert_accounts();
}

#[test]
fn a_client_killed_before_it_sends_again_harms_no_other() {
    let mut setup = Setup::start(2, 2, 32, |_| {});
    let mut victim = spawn_victim(&mut setup, "client::before_resend", 1);
    let begin = Instant::now();
    while !procfs::has_ended(victim.id()) {
        assert!(begin.elapsed() < PATIENCE, "no death of a server hit a call of the victim");
        setup.compute(20);
        setup.cluster.kill_server(0).expect("killed");
        setup.compute(20);
        setup.cluster.start_server(0).expect("started");
        setup.cluster.wait_serving(0).expect("serving");
    }
    let status = victim.wait().expect("reaped");
    let signal = std::os::unix::process::ExitStatusExt::signal(&status);
    assert_eq!(signal, Some(9), "{status}");
    setup.compute(20);
    setup.assert_accounts();
}

#[test]
fn a_call_outlasts_the_only_replica_that_stands_still_for_many_deadlines() {
    let list = "server-0|server::before_compute=20*off->1*sleep(1500)->off";
    let mut setup = Setup::start(1, 1, 40, |options| {
        options.server_env.push((failpoints::ENV.to_owned(), list.to_owned()));
    });
    let silent = |setup: &Setup| {
        let all = metric_by_label(&setup.client, "switchyard_client_failovers_total");
        all.get("silent").copied().unwrap_or_default()
    };
    setup.compute_until("several failures", |setup, _| silent(setup) > 3.0);
    setup.compute(20);
    setup.assert_accounts();
}

/// A client that computes until it passes `point` for the `count`-th time, and dies there.
fn spawn_victim(setup: &mut Setup, point: &str, count: u32) -> Child {
    let seed: u64 = setup.rng.random();
    Command::new(binary())
        .args(["victim", "--exit-with-parent", "--seed", &seed.to_string()])
        .args(["--control-plane", &setup.cluster.control_url()])
        .args(["--client-failpoints", &format!("client|{point}=kill({count})")])
        .env("SWITCHYARD_TOKEN", setup.cluster.token())
        .stderr(Stdio::null())
        .spawn()
        .expect("the victim starts")
}

/// Links of each server, from its metrics.
fn num_links(runtime: &tokio::runtime::Runtime, addrs: &[String]) -> Vec<String> {
    let scrape = |addr: &String| {
        let text = runtime.block_on(crate::support::get(addr, "/metrics"));
        let line = text.lines().find(|line| line.starts_with("switchyard_server_links "));
        line.unwrap_or_else(|| panic!("no links in the metrics of {addr}: {text}")).to_owned()
    };
    addrs.iter().map(scrape).collect()
}
