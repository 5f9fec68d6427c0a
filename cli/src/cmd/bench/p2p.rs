//! `switchyard bench p2p`: latency and bandwidth of puts and flags between processes, or of the message
//! engine's transfers.

use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use bench_harness::engine::EngineBenchConfig;
use bench_harness::p2p::{
    BenchConfig, BenchRow, ChildProgram, DeviceBenchConfig, DeviceReport, DeviceRow, run_device,
};
use clap::parser::ValueSource;
use kernels::gpu::{DeviceName, Gpu};
use p2p_core::transports::TransportRequest;
use p2p_core::{OpenNetworks, SlotConfig, TransportKind, TransportSpec};

use super::engine;
use crate::{Global, ui};

/// Flags of `bench p2p`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Sending processes. Not of the message engine.
    #[arg(long, env = "SWITCHYARD_SENDERS", default_value_t = 1)]
    senders: usize,
    /// Receiving processes. Not of the message engine.
    #[arg(long, env = "SWITCHYARD_RECEIVERS", default_value_t = 1)]
    receivers: usize,
    /// Smallest message; sizes double from here. The message engine has --sizes.
    #[arg(long, env = "SWITCHYARD_MIN_BYTES", default_value_t = 4)]
    min_bytes: usize,
    /// Largest message. The message engine has --sizes.
    #[arg(long, env = "SWITCHYARD_MAX_BYTES", default_value_t = 8 << 20)]
    max_bytes: usize,
    /// Timed iterations per size; 0 chooses by size.
    #[arg(long, env = "SWITCHYARD_ITERATIONS", default_value_t = 0)]
    iterations: usize,
    /// Bytes of a slot. Only between processors, by slots.
    #[arg(long, env = "SWITCHYARD_SLOT_BYTES", default_value_t = p2p_core::slot::DEFAULT_SLOT_BYTES)]
    slot_bytes: usize,
    /// Frames in a slot. Only between processors, by slots.
    #[arg(long, env = "SWITCHYARD_SLOT_FRAMES", default_value_t = 16)]
    slot_frames: usize,
    /// Transport between the processes: shm, staged, verbs or libfabric; `:` and a device or provider
    /// may follow, as in `libfabric:tcp;ofi_rxm`. With tcp or cma, or with --num-iovs, --mode, --sizes or
    /// --depth, the message engine is measured instead of slots.
    #[arg(long, env = "SWITCHYARD_TRANSPORT", default_value = "shm", value_parser = transport)]
    transport: Transport,
    /// How to use RDMA devices, as JSON, as in {"gid_index": 3, "traffic_class": 106}. With --transport
    /// verbs.
    #[cfg(feature = "verbs")]
    #[arg(long, env = VERBS_CONFIG_VARIABLE, value_parser = crate::cmd::verbs_config)]
    verbs_config: Option<verbs_transport::VerbsConfig>,
    #[command(flatten)]
    engine: engine::EngineArgs,
    /// Lets the system move the processes between CPUs, as it always does with the message engine.
    #[arg(long, env = "SWITCHYARD_NO_PIN", value_parser = clap::builder::FalseyValueParser::new())]
    no_pin: bool,
    /// Seed of the payload. Not of GPUs.
    #[arg(long, env = "SWITCHYARD_SEED", default_value_t = 1)]
    seed: u64,
    /// Measures GPUs instead, by kernels: the first process takes this one, the others the following ones.
    #[arg(long, env = "SWITCHYARD_DEVICE", value_name = "cuda|cuda:N")]
    device: Option<DeviceName>,
    /// With --device: every split of the GPUs from that one on into senders and receivers.
    #[arg(long, env = "SWITCHYARD_ALL_SPLITS", requires = "device", conflicts_with_all = ["senders", "receivers"], value_parser = clap::builder::FalseyValueParser::new())]
    all_splits: bool,
}

#[derive(Debug, Clone)]
enum Transport {
    /// A transport with slots, and its text on the command line.
    Slots(TransportRequest, String),
    /// A transport of the message engine only.
    Engine(String),
}

impl Args {
    /// Returns an error text if a flag on the command line would have no effect. Environment variables are not
    /// checked, since they may be meant for other commands.
    pub fn useless(matches: &clap::ArgMatches) -> Option<String> {
        // Some flags exist in some builds only.
        let source = |flag: &str| {
            let is_known = matches.ids().any(|id| id.as_str() == flag);
            is_known.then(|| matches.value_source(flag)).flatten()
        };
        let is_written = |flag: &str| source(flag) == Some(ValueSource::CommandLine);
        let named =
            |flags: &'static [&'static str]| flags.iter().copied().find(|flag| is_written(flag));
        let (is_slots, is_verbs) = match matches.get_one::<Transport>("transport") {
            Some(Transport::Slots(wish, _)) => {
                let by_engine = OF_THE_ENGINE.iter().any(|flag| source(flag).is_some());
                (!by_engine, wish.kind == TransportKind::Verbs)
            }
            _ => (false, false),
        };
        let (flag, how) = if source("device").is_some() {
            (named(OF_THE_ENGINE).or_else(|| named(NOT_OF_GPUS))?, "--device")
        } else if !is_slots && let Some(flag) = named(NOT_OF_THE_ENGINE) {
            (flag, "the message engine")
        } else if !is_verbs && is_written("verbs_config") {
            ("verbs_config", "any --transport but verbs")
        } else {
            return None;
        };
        Some(format!("--{} would do nothing with {how}: leave it out", flag.replace('_', "-")))
    }

    /// Returns how to start this program as a child, with the settings that the child needs.
    fn program(&self) -> Result<ChildProgram> {
        #[allow(unused_mut, reason = "depends on the features")]
        let mut program = ChildProgram::this(&[]).context("cannot tell the path of this binary")?;
        #[cfg(feature = "verbs")]
        if let Some(config) = &self.verbs_config {
            let text = serde_json::to_string(config).context("--verbs-config")?;
            program.env.push((VERBS_CONFIG_VARIABLE.to_owned(), text));
        }
        Ok(program)
    }
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
        // `local` works within a process only, `ibgda` with slots of GPUs only.
        (Some(wish), true) if !matches!(wish.kind, TransportKind::Local | TransportKind::Ibgda) => {
            Ok(Transport::Slots(wish, text.to_owned()))
        }
        _ => Err(expected()),
    }
}

/// Runs this process's part if it is a child of the benchmark.
pub fn child() -> Option<ExitCode> {
    bench_harness::p2p::child_main_with(|| {
        let networks = OpenNetworks::default();
        #[cfg(feature = "verbs")]
        let networks = networks.with(verbs_transport::opener(verbs_of_parent()));
        #[cfg(feature = "libfabric")]
        let networks = networks.with(libfabric_transport::opener());
        networks
    })
    .or_else(bench_harness::p2p::device_child_main)
    .or_else(|| {
        bench_harness::engine::child_main_with(|| EngineBenchConfig {
            #[cfg(feature = "verbs")]
            verbs: verbs_of_parent(),
            ..EngineBenchConfig::default()
        })
    })
    .map(|done| if done { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Returns the parent's RDMA settings. Missing or invalid settings become the default: the parent has checked
/// them already.
#[cfg(feature = "verbs")]
fn verbs_of_parent() -> verbs_transport::VerbsConfig {
    let text = std::env::var(VERBS_CONFIG_VARIABLE).ok();
    text.and_then(|text| super::super::verbs_config(&text).ok()).unwrap_or_default()
}

pub fn run(global: &Global, args: Args) -> Result<ExitCode> {
    if let Some(device) = args.device {
        return run_on_gpus(global, &args, device);
    }
    let transport = match args.transport.clone() {
        Transport::Engine(text) => return run_engine(global, &args, text),
        Transport::Slots(wish, text) if !args.engine.given().is_empty() => {
            if !wish.kind.is_network() {
                bail!(
                    "--num-iovs, --mode, --sizes and --depth are of the message engine: expected \
                     --transport tcp, cma, libfabric or verbs with them, found {text}"
                );
            }
            return run_engine(global, &args, text);
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
    let program = args.program()?;
    if !global.json {
        outln!(
            "{} senders → {} receivers over {}, one process each",
            config.senders,
            config.receivers,
            transport
        );
        outln!("{:>9} {:>14} {:>14} {:>10}", "bytes", "one way µs p50", "p99", "GB/s");
    }
    let spinner = ui::spinner(global.json, "measuring");
    let report = bench_harness::p2p::run(&config, &program, |row: &BenchRow| {
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

/// Measures the message engine.
fn run_engine(global: &Global, args: &Args, transport: String) -> Result<ExitCode> {
    let settings = EngineBenchConfig {
        transport,
        iterations: args.iterations,
        seed: args.seed,
        #[cfg(feature = "verbs")]
        verbs: args.verbs_config.clone().unwrap_or_default(),
        ..EngineBenchConfig::default()
    };
    engine::run(global, &args.engine, settings, &args.program()?)
}

/// Measures all requested splits of the GPUs, one after the other.
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
            launches: LAUNCHES,
            turns: args.iterations,
        };
        if !global.json {
            outln!("{senders} senders → {receivers} receivers, a GPU each, from {first} on");
            outln!(
                "{:>9} {:>14} {:>14} {:>10} {:>10} {:>10}",
                "bytes",
                "one way µs p50",
                "p99",
                "GB/s",
                "per link",
                "of stores"
            );
        }
        let report = run_device(&config, &program, |row: &DeviceRow| {
            if !global.json {
                outln!(
                    "{:>9} {:>14.3} {:>14.3} {:>10.2} {:>10.2} {:>10}",
                    row.bytes,
                    row.one_way_us_p50,
                    row.one_way_us_p99,
                    row.gb_per_s,
                    row.gb_per_s_per_link,
                    row.of_store_rate.map_or_else(String::new, |share| format!("{share:.3}"))
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

#[cfg(feature = "verbs")]
const VERBS_CONFIG_VARIABLE: &str = "SWITCHYARD_VERBS_CONFIG";
/// Launches per size and pattern on GPUs. Figures are medians of them.
const LAUNCHES: usize = 21;
/// Identifiers of flags that have no effect in some measurements.
const NOT_OF_GPUS: &[&str] =
    &["slot_bytes", "slot_frames", "transport", "verbs_config", "no_pin", "seed"];
const OF_THE_ENGINE: &[&str] = &["num_iovs", "mode", "sizes", "depth"];
const NOT_OF_THE_ENGINE: &[&str] =
    &["senders", "receivers", "min_bytes", "max_bytes", "slot_bytes", "slot_frames", "no_pin"];
