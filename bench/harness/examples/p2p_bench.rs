//! Prints the benchmark's table: `p2p_bench [SENDERS [RECEIVERS [MAX_BYTES [TRANSPORT[:DEVICE]
//! [MIN_BYTES]]]]]`.

use std::process::ExitCode;

use p2p_core::TransportSpec;
use switchyard_bench_harness::p2p::{BenchConfig, ChildProgram, child_main, run};

fn main() -> ExitCode {
    if let Some(done) = child_main() {
        return if done { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let mut numbers = std::env::args().skip(1).map_while(|arg| arg.parse().ok());
    let mut config = BenchConfig::default();
    config.senders = numbers.next().unwrap_or(config.senders);
    config.receivers = numbers.next().unwrap_or(config.receivers);
    config.max_bytes = numbers.next().unwrap_or(config.max_bytes);
    if let Some(TransportSpec::List(wishes)) =
        std::env::args().nth(4).and_then(|text| text.parse().ok())
        && let [wish] = &wishes[..]
    {
        if let Some(min_bytes) = std::env::args().nth(5).and_then(|text| text.parse().ok()) {
            config.min_bytes = min_bytes;
        }
        config.transport = wish.kind;
        config.device.clone_from(&wish.device);
    }
    println!("{:>9} {:>12} {:>12} {:>9}", "bytes", "p50 µs", "p99 µs", "GB/s");
    let result = ChildProgram::this(&[]).map_err(|error| error.to_string()).and_then(|program| {
        run(&config, &program, |row| {
            println!(
                "{:>9} {:>12.3} {:>12.3} {:>9.2}",
                row.bytes, row.one_way_us_p50, row.one_way_us_p99, row.gb_per_s
            );
        })
        .map_err(|error| error.to_string())
    });
    match result {
        Ok(report) => {
            println!(
                "raw flag {:.3} µs; {} bytes verified",
                report.raw_flag_us_p50, report.verified_bytes
            );
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
