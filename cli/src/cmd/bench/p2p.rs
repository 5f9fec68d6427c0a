//! `switchyard bench p2p`: latency and bandwidth of puts and flags between processes, or of the message
//! engine's transfers.

use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use kernels::gpu::{DeviceName, Gpu};
use p2p_core::bench::{
    BenchConfig, BenchRow, ChildProgram, DeviceBenchConfig, DeviceReport, DeviceRow, run_device,
};
use p2p_core::transports::Wish;
use p2p_core::{SlotConfig, TransportKind, TransportSpec};

use super::engine;
use crate::{Global, ui};

/// Flags of `bench p2p`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Sending processes.
    #[arg(long, env = "SWITCHYARD_SENDERS", default_value_t = 1)]
    senders: usize,
    /// Receiving processes.
    #[arg(long, env = "SWITCHYARD_RECEIVERS", default_value_t = 1)]
    receivers: usize,
    /// Smallest message; sizes double from here.
    #[arg(long, env = "SWITCHYARD_MIN_BYTES", default_value_t = 4)]
    min_bytes: usize,
    /// Largest message.
    #[arg(long, env = "SWITCHYARD_MAX_BYTES", default_value_t = 8 << 20)]
    max_bytes: usize,
    /// Timed iterations per size; 0 chooses by size.
    #[arg(long, env = "SWITCHYARD_ITERATIONS", default_value_t = 0)]
    iterations: usize,
    /// Bytes of a slot.
    #[arg(long, env = "SWITCHYARD_SLOT_BYTES", default_value_t = p2p_core::slot::DEFAULT_SLOT_BYTES)]
    slot_bytes: usize,
    /// Frames in a slot.
    #[arg(long, env = "SWITCHYARD_SLOT_FRAMES", default_value_t = 16)]
    slot_frames: usize,
    /// Transport between the processes: shm, staged, verbs or libfabric; `:` and a device or provider
    /// may follow, as in `libfabric:tcp;ofi_rxm`. With tcp or cma, or with --num-iovs, --mode, --sizes or
    /// --depth, the message engine is measured instead of slots.
    #[arg(long, env = "SWITCHYARD_TRANSPORT", default_value = "shm", value_parser = transport)]
    transport: Transport,
    #[command(flatten)]
    engine: engine::EngineArgs,
    /// Lets the system move the processes between CPUs.
    #[arg(long, env = "SWITCHYARD_NO_PIN", value_parser = clap::builder::FalseyValueParser::new())]
    no_pin: bool,
    /// Seed of the payload.
    #[arg(long, env = "SWITCHYARD_SEED", default_value_t = 1)]
    seed: u64,
    /// Measures GPUs instead, by kernels: the first process takes this one, the others those that follow.
    #[arg(long, env = "SWITCHYARD_DEVICE", value_name = "cuda|cuda:N")]
    device: Option<DeviceName>,
    /// With --device: every split of the GPUs from that one on into senders and receivers.
    #[arg(long, env = "SWITCHYARD_ALL_SPLITS", requires = "device", conflicts_with_all = ["senders", "receivers"], value_parser = clap::builder::FalseyValueParser::new())]
    all_splits: bool,
}

#[derive(Debug, Clone)]
enum Transport {
    /// One that has slots, as it was written.
    Slots(Wish, String),
    /// One of the message engine only.
    Engine(String),
}

fn transport(text: &str) -> Result<Transport, String> {
    let expected = || format!("{text:?}: expected one of shm, staged, verbs, libfabric, tcp, cma");
    if matches!(text, "tcp" | "cma") {
        return Ok(Transport::Engine(text.to_owned()));
    }
    let TransportSpec::List(mut wishes) = text.parse().map_err(|_| expected())? else {
        return Err(expected());
    };
    match (wishes.pop(), wishes.is_empty()) {
        (Some(wish), true) if wish.kind != TransportKind::Local => {
            Ok(Transport::Slots(wish, text.to_owned()))
        }
        _ => Err(expected()),
    }
}

/// Runs this process's part where it is a child of the benchmark.
pub fn child() -> Option<ExitCode> {
    p2p_core::bench::child_main()
        .or_else(p2p_core::bench::device_child_main)
        .or_else(p2p_core::engine::bench::child_main)
        .map(|done| if done { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

pub fn run(global: &Global, args: Args) -> Result<ExitCode> {
    if let Some(device) = args.device {
        return run_on_gpus(global, &args, device);
    }
    let (iterations, seed) = (args.iterations, args.seed);
    let transport = match args.transport {
        Transport::Engine(text) => {
            return engine::run(global, &args.engine, text, iterations, seed);
        }
        Transport::Slots(wish, text) if args.engine.is_given() => {
            if !wish.kind.is_network() {
                bail!(
                    "--num-iovs, --mode, --sizes and --depth measure the message engine, which \
                     expected --transport tcp, cma, libfabric or verbs and found {text}"
                );
            }
            return engine::run(global, &args.engine, text, iterations, seed);
        }
        Transport::Slots(wish, _) => wish,
    };
    let config = BenchConfig {
        senders: args.senders,
        receivers: args.receivers,
        min_bytes: args.min_bytes,
        max_bytes: args.max_bytes,
        iterations: args.iterations,
        slot: SlotConfig { slot_bytes: args.slot_bytes, num_frames: args.slot_frames },
        transport: transport.kind,
        device: transport.device.clone(),
        pin: !args.no_pin,
        seed: args.seed,
    };
    let program = ChildProgram::this(&[]).context("cannot tell the path of this binary")?;
    if !global.json {
        outln!(
            "{} senders → {} receivers over {}, one process each",
            args.senders,
            args.receivers,
            transport
        );
        outln!("{:>9} {:>14} {:>14} {:>10}", "bytes", "one way µs p50", "p99", "GB/s");
    }
    let spinner = ui::spinner(global.json, "measuring");
    let report = p2p_core::bench::run(&config, &program, |row: &BenchRow| {
        if !global.json {
            spinner.suspend(|| {
                outln!(
                    "{:>9} {:>14.3} {:>14.3} {:>10.2}",
                    row.bytes,
                    row.one_way_us_p50,
                    row.one_way_us_p99,
                    row.gb_per_s
                );
            });
        }
    })?;
    spinner.finish_and_clear();
    if global.json {
        ui::print_json(&report)?;
    } else {
        outln!(
            "raw flag {:.3} µs one way; {} bytes compared, all as expected; {} pages",
            report.raw_flag_us_p50,
            report.verified_bytes,
            report.pages
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Every split that was asked for, one after the other.
fn run_on_gpus(global: &Global, args: &Args, first: DeviceName) -> Result<ExitCode> {
    let splits = if args.all_splits {
        let DeviceName::Cuda(ordinal) = first else {
            bail!(
                "--all-splits needs GPUs to split: expected --device cuda or cuda:N, found {first}"
            );
        };
        let count = Gpu::count()?.saturating_sub(ordinal) as usize;
        if count < 2 {
            bail!("--all-splits needs two GPUs from {first} on, this host has {count}");
        }
        (1..count).flat_map(|m| (1..=count - m).map(move |n| (m, n))).collect()
    } else {
        vec![(args.senders, args.receivers)]
    };
    let program = ChildProgram::this(&[]).context("cannot tell the path of this binary")?;
    let mut reports: Vec<DeviceReport> = Vec::new();
    for (senders, receivers) in splits {
        let config = DeviceBenchConfig {
            senders,
            receivers,
            min_bytes: args.min_bytes,
            max_bytes: args.max_bytes,
            first,
            launches: 11,
            turns: args.iterations,
        };
        if !global.json {
            outln!("{senders} senders → {receivers} receivers, a GPU each, from {first} on");
            outln!(
                "{:>9} {:>14} {:>14} {:>10} {:>10}",
                "bytes",
                "one way µs p50",
                "p99",
                "GB/s",
                "per link"
            );
        }
        let report = run_device(&config, &program, |row: &DeviceRow| {
            if !global.json {
                outln!(
                    "{:>9} {:>14.3} {:>14.3} {:>10.2} {:>10.2}",
                    row.bytes,
                    row.one_way_us_p50,
                    row.one_way_us_p99,
                    row.gb_per_s,
                    row.gb_per_s_per_link
                );
            }
        })?;
        if !global.json {
            outln!(
                "stores of {} bytes: {:.1} GB/s; {} bytes compared, all as expected",
                report.store_bytes,
                report.store_gb_per_s,
                report.verified_bytes
            );
        }
        reports.push(report);
    }
    if global.json {
        ui::print_json(&reports)?;
    }
    Ok(ExitCode::SUCCESS)
}
