//! The benchmark of the message engine as a program. It compares every byte of every row.

use switchyard_bench_harness::engine::{EngineBenchConfig, Mode, child_main, run};
use switchyard_bench_harness::p2p::ChildProgram;
use test_support::child::variables;

test_support::child_processes! { "target" => target }

/// The target's process.
fn target() {
    assert!(child_main().expect("a transport"), "see the message");
}

#[test]
fn every_size_and_number_of_ranges_is_reported() {
    let mut program = ChildProgram::this(&[]).unwrap();
    program.env =
        variables("target").map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    // The requested transport, or those that need no installed software.
    let named = std::env::var("SWITCHYARD_TEST_TRANSPORT");
    let transports = named.as_ref().map_or(vec!["tcp", "cma"], |name| vec![name]);
    let modes = [Mode::Write, Mode::Read];
    for (transport, mode) in transports.iter().flat_map(|name| modes.map(|mode| (*name, mode))) {
        let config = EngineBenchConfig {
            transport: transport.to_owned(),
            mode,
            sizes: vec![1, 1000, 300_000],
            num_iovs: vec![1, 7, 128],
            iterations: 5,
            depth: 3,
            seed: rand::random(),
            ..EngineBenchConfig::default()
        };
        let mut num_rows = 0;
        let report = run(&config, &program, |_| num_rows += 1).unwrap();
        assert_eq!((num_rows, report.rows.len()), (9, 9));
        let device = transport.split(':').next().unwrap();
        assert!(report.transport.starts_with(device), "{}", report.transport);
        assert_eq!(report.verified_bytes, 301_001 * 136);
        let is_sound = |row: &switchyard_bench_harness::engine::EngineBenchRow| {
            row.gb_per_s > 0.0 && row.us_p99 >= row.us_p50 && row.iterations == 5
        };
        assert!(report.rows.iter().all(is_sound));
    }
    let nonsense = EngineBenchConfig { num_iovs: vec![0], ..EngineBenchConfig::default() };
    assert!(run(&nonsense, &program, |_| {}).is_err());
    let unknown =
        EngineBenchConfig { transport: "pigeon".to_owned(), ..EngineBenchConfig::default() };
    assert!(run(&unknown, &program, |_| {}).unwrap_err().to_string().contains("no such transport"));
}
