//! `switchyard bench p2p` with the message engine: one-sided transfers between two processes.

use std::process::ExitCode;

use anyhow::Result;
use bench_harness::engine::{EngineBenchConfig, EngineBenchRow, Mode};
use bench_harness::p2p::ChildProgram;

use crate::{Global, ui};

/// Flags of `bench p2p` that choose the message engine.
#[derive(Debug, clap::Args)]
pub struct EngineArgs {
    /// Message engine: ranges in one transfer, a row each.
    #[arg(long, env = "SWITCHYARD_NUM_IOVS", value_delimiter = ',')]
    num_iovs: Vec<usize>,
    /// Message engine: which way the bytes go.
    #[arg(long, env = "SWITCHYARD_MODE")]
    mode: Option<ModeName>,
    /// Message engine: bytes of one range, as 65536, 64K or 1M, a row each.
    #[arg(long, env = "SWITCHYARD_SIZES", value_delimiter = ',', value_parser = size)]
    sizes: Vec<u64>,
    /// Message engine: transfers under way at a time.
    #[arg(long, env = "SWITCHYARD_DEPTH")]
    depth: Option<usize>,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum ModeName {
    Write,
    Read,
}

impl EngineArgs {
    /// Returns the names of the given flags.
    pub fn given(&self) -> Vec<&'static str> {
        let flags = [
            ("--num-iovs", !self.num_iovs.is_empty()),
            ("--mode", self.mode.is_some()),
            ("--sizes", !self.sizes.is_empty()),
            ("--depth", self.depth.is_some()),
        ];
        flags.into_iter().filter_map(|(flag, is_given)| is_given.then_some(flag)).collect()
    }
}

pub fn run(
    global: &Global,
    args: &EngineArgs,
    settings: EngineBenchConfig,
    program: &ChildProgram,
) -> Result<ExitCode> {
    let config = EngineBenchConfig {
        mode: match args.mode {
            Some(ModeName::Read) => Mode::Read,
            _ => Mode::Write,
        },
        sizes: if args.sizes.is_empty() { settings.sizes } else { args.sizes.clone() },
        num_iovs: if args.num_iovs.is_empty() { settings.num_iovs } else { args.num_iovs.clone() },
        depth: args.depth.unwrap_or(settings.depth),
        ..settings
    };
    let way = match config.mode {
        Mode::Write => "writes into",
        Mode::Read => "reads from",
    };
    if !global.json {
        outln!("one process {way} another over {}", config.transport);
        outln!(
            "{:>9} {:>5} {:>11} {:>11} {:>9} {:>9}",
            "bytes",
            "iovs",
            "µs p50",
            "µs p99",
            "GB/s",
            "Gbps"
        );
    }
    let spinner = ui::spinner(global.json, "measuring");
    let report = bench_harness::engine::run(&config, program, |row: &EngineBenchRow| {
        if !global.json {
            spinner.suspend(|| {
                outln!(
                    "{:>9} {:>5} {:>11.1} {:>11.1} {:>9.3} {:>9.2}",
                    row.bytes,
                    row.num_iovs,
                    row.us_p50,
                    row.us_p99,
                    row.gb_per_s,
                    row.gbps
                );
            });
        }
    })?;
    spinner.finish_and_clear();
    if global.json {
        ui::print_json(&report)?;
    } else {
        outln!("{} bytes compared, all as expected", report.verified_bytes);
    }
    Ok(ExitCode::SUCCESS)
}

fn size(text: &str) -> Result<u64, String> {
    let units = [("K", 10), ("M", 20), ("G", 30)];
    let scaled = units.iter().find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, *shift)));
    let (digits, shift) = scaled.unwrap_or((text, 0));
    let number: Option<u64> = digits.parse().ok();
    number
        .and_then(|number| number.checked_mul(1 << shift))
        .ok_or_else(|| format!("{text:?} is not a size: expected 65536, 64K, 1M or the like"))
}
