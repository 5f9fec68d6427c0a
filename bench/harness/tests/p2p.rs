//! The benchmark of channels as a program. It compares every byte of every iteration.

use p2p_core::{SlotConfig, TransportKind};
use switchyard_bench_harness::p2p::{
    BenchConfig, ChildProgram, DeviceBenchConfig, child_main, device_child_main, run, run_device,
};
use test_support::child::variables;

test_support::child_processes! { "part" => part }

/// A process of the benchmark.
fn part() {
    let done = child_main().or_else(device_child_main).expect("a job");
    assert!(done, "see the parent's message");
}

fn program() -> ChildProgram {
    let mut program = ChildProgram::this(&[]).unwrap();
    program.env = variables("part").map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    program
}

#[test]
fn one_to_one_reports_every_size() {
    let config = BenchConfig { max_bytes: 1 << 20, iterations: 30, ..BenchConfig::default() };
    let mut num_rows = 0;
    let report = run(&config, &program(), |_| num_rows += 1).unwrap();
    assert_eq!(num_rows, report.rows.len());
    let sizes: Vec<usize> = report.rows.iter().map(|row| row.bytes).collect();
    assert_eq!(sizes, (2..=20).map(|power| 1 << power).collect::<Vec<_>>());
    assert!(report.raw_flag_us_p50 > 0.0);
    assert!(report.rows.iter().all(|row| row.one_way_us_p50 > 0.0 && row.gb_per_s > 0.0));
    assert!(report.rows.iter().all(|row| row.one_way_us_p99 >= row.one_way_us_p50));
    // 30 timed and 11 warm-up iterations both ways, at the least.
    assert!(report.verified_bytes >= 2 * 41 * sizes.iter().sum::<usize>() as u64);
}

#[test]
fn many_to_many_by_put_only_with_messages_beyond_the_ring() {
    let config = BenchConfig {
        senders: 3,
        receivers: 2,
        min_bytes: 1000,
        max_bytes: 128_000,
        iterations: 5,
        slot: SlotConfig { slot_bytes: 36 << 10, num_frames: 4 },
        transport: TransportKind::Staged,
        ..BenchConfig::default()
    };
    let report = run(&config, &program(), |_| {}).unwrap();
    assert_eq!(report.rows.len(), 8);
    assert!(report.rows.iter().all(|row| (row.senders, row.receivers) == (3, 2)));
}

#[test]
fn two_to_one_over_libfabric() {
    if let Err(error) = libfabric_transport::FabricNetwork::open("tcp;ofi_rxm") {
        test_support::skip("libfabric", &error.to_string());
        return;
    }
    let config = BenchConfig {
        senders: 2,
        max_bytes: 64 << 10,
        iterations: 5,
        transport: TransportKind::Libfabric,
        device: Some("tcp;ofi_rxm".to_owned()),
        ..BenchConfig::default()
    };
    let report = run(&config, &program(), |_| {}).unwrap();
    assert_eq!(report.rows.len(), 15);
    assert!(report.verified_bytes > 0);
    let config = BenchConfig { device: Some("nonesuch".to_owned()), ..config };
    let error = run(&config, &program(), |_| {}).unwrap_err().to_string();
    assert!(error.contains("no provider `nonesuch` here; found: "), "{error}");
}

#[test]
fn nonsense_is_refused() {
    let config = BenchConfig { senders: 0, ..BenchConfig::default() };
    assert!(run(&config, &program(), |_| {}).unwrap_err().to_string().contains("senders is 0"));
    let config = BenchConfig { min_bytes: 8, max_bytes: 4, ..BenchConfig::default() };
    assert!(run(&config, &program(), |_| {}).is_err());
}

#[test]
fn every_pair_of_gpus_in_software_exchanges_whole_messages() {
    for (senders, receivers) in [(1, 1), (2, 1), (1, 2)] {
        let config = DeviceBenchConfig {
            senders,
            receivers,
            min_bytes: 4,
            max_bytes: 4096,
            first: "emulated:0".parse().unwrap(),
            launches: 2,
            turns: 3,
        };
        let mut num_rows = 0;
        let report = run_device(&config, &program(), |_| num_rows += 1).unwrap();
        let sizes: Vec<usize> = report.rows.iter().map(|row| row.bytes).collect();
        assert_eq!(sizes, (2..=12).map(|power| 1 << power).collect::<Vec<_>>());
        assert_eq!(num_rows, sizes.len());
        assert!(report.rows.iter().all(|row| row.one_way_us_p50 > 0.0 && row.gb_per_s > 0.0));
        // There and back once per pair, and once in one direction; the largest alone before.
        let once = sizes.iter().sum::<usize>() * senders * receivers;
        assert_eq!(report.verified_bytes, 3 * once as u64 + 4096);
    }
}

#[test]
fn rates_of_large_messages_are_compared_with_that_of_stores() {
    let config = DeviceBenchConfig {
        senders: 1,
        receivers: 2,
        min_bytes: 512 << 10,
        max_bytes: 1 << 20,
        first: "emulated:0".parse().unwrap(),
        launches: 2,
        turns: 2,
    };
    let report = run_device(&config, &program(), |_| {}).unwrap();
    assert_eq!(report.launches, 2);
    let [small, large] = report.rows[..] else { panic!("{report:?}") };
    assert_eq!(small.of_store_rate, None);
    assert_eq!(large.of_store_rate, Some(large.gb_per_s_per_link / report.store_gb_per_s));
    assert!(large.of_store_rate.is_some_and(|share| share > 0.0 && share.is_finite()));
}

#[test]
fn sizes_that_kernels_cannot_put_are_refused() {
    let config = DeviceBenchConfig {
        senders: 1,
        receivers: 1,
        min_bytes: 20,
        max_bytes: 64,
        first: "emulated:0".parse().unwrap(),
        launches: 1,
        turns: 1,
    };
    let error = run_device(&config, &program(), |_| {}).unwrap_err().to_string();
    assert!(error.starts_with("min_bytes is 20"), "{error}");
}
