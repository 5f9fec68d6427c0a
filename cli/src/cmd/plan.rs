//! `switchyard plan`: the servers and clients that a model needs for its traffic, by the control plane's planner.

mod fleet;
mod hardware;
mod plot;
mod simulate;
mod traffic;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use checkpoint::{Checkpoint, ModelConfig, Preset, QuantMethod};
use control_plane::planner::rebalance::PlanGoals;
use serde::Serialize;

use crate::{Global, ui};
use fleet::{Servers, Sizes, Workload};
use hardware::{BenchReport, CostModel, Hardware};
use traffic::{Trace, TraceName};

/// Options of `plan`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Checkpoint folder, or a config.json.
    #[arg(long, env = "SWITCHYARD_MODEL", value_name = "PATH", conflicts_with = "preset")]
    model: Option<PathBuf>,
    /// Model whose shape to use, if there is no --model: qwen3-30b-a3b, mixtral-8x7b, deepseek-v3 or another one of
    /// `make-checkpoint`.
    #[arg(long, env = "SWITCHYARD_PRESET", value_name = "NAME", value_parser = super::make_checkpoint::parse_preset)]
    preset: Option<Preset>,
    /// Bytes of one expert in a server's memory. Default: from the weights of a folder, otherwise from the number
    /// format in the configuration.
    #[arg(long, env = "SWITCHYARD_EXPERT_BYTES", value_parser = clap::value_parser!(u64).range(1..))]
    expert_bytes: Option<u64>,
    /// Traffic: a CSV file with the columns time in seconds and tokens per second.
    #[arg(long, env = "SWITCHYARD_TRACE", value_name = "FILE", conflicts_with = "traffic")]
    trace: Option<PathBuf>,
    /// Generated traffic, if there is no --trace.
    #[arg(long, env = "SWITCHYARD_TRAFFIC", default_value = "diurnal")]
    traffic: TraceName,
    /// Peak of generated traffic in tokens per second.
    #[arg(long, env = "SWITCHYARD_PEAK", default_value_t = 10_000.0, value_parser = positive)]
    peak: f64,
    /// Days of generated traffic.
    #[arg(long, env = "SWITCHYARD_DAYS", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=366))]
    days: u32,
    /// Step of generated traffic in seconds.
    #[arg(long, env = "SWITCHYARD_STEP_S", default_value_t = 300.0, value_parser = positive)]
    step_s: f64,
    /// Hardware of a server: a report of `switchyard --json bench moe` on it. May be given several times.
    #[arg(long, env = "SWITCHYARD_BENCH", value_name = "FILE", value_delimiter = ':')]
    bench: Vec<PathBuf>,
    /// Hardware of a server without --bench: time of a call that does not grow with it, in microseconds.
    #[arg(long, env = "SWITCHYARD_BASE_US", value_parser = not_negative)]
    base_us: Option<f64>,
    /// The same: time for each distinct expert of a call, in microseconds.
    #[arg(long, env = "SWITCHYARD_EXPERT_US", value_parser = not_negative)]
    expert_us: Option<f64>,
    /// The same: time for each (token, expert) pair, in microseconds.
    #[arg(long, env = "SWITCHYARD_PAIR_US", value_parser = not_negative)]
    pair_us: Option<f64>,
    /// Compares predicted times of a layer with those of this report of `bench moe`.
    #[arg(long, env = "SWITCHYARD_CHECK", value_name = "FILE")]
    check: Option<PathBuf>,
    /// Memory of a server for experts, in GB (10⁹ bytes). Default: no limit.
    #[arg(long, env = "SWITCHYARD_SERVER_MEMORY_GB", value_parser = positive)]
    server_memory_gb: Option<f64>,
    /// Fewest replicas of each expert.
    #[arg(long, env = "SWITCHYARD_REPLICAS", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    replicas: u32,
    /// Replicas of hot experts beyond --replicas, as a share of all replicas, 0 to 16.
    #[arg(long, env = "SWITCHYARD_SPARE", default_value_t = 0.25, value_parser = super::control_plane::parse_spare)]
    spare: f64,
    /// Share of the time for which the busiest server may compute, 0.05 to 0.95.
    #[arg(long, env = "SWITCHYARD_TARGET_SHARE", default_value_t = 0.6, value_parser = share)]
    target_share: f64,
    /// Tokens of one call of a client.
    #[arg(long, env = "SWITCHYARD_BATCH", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    batch: u32,
    /// Popularity of experts: rank to the power of minus this. 0 is uniform.
    #[arg(long, env = "SWITCHYARD_ZIPF", default_value_t = 0.8, value_parser = not_negative)]
    zipf: f64,
    /// Time of a client between two layers (attention), in microseconds.
    #[arg(long, env = "SWITCHYARD_ATTENTION_US", default_value_t = 0.0, value_parser = not_negative)]
    attention_us: f64,
    /// Price of a server for an hour.
    #[arg(long, env = "SWITCHYARD_SERVER_PRICE", default_value_t = 1.0, value_parser = not_negative)]
    server_price: f64,
    /// Price of a client for an hour.
    #[arg(long, env = "SWITCHYARD_CLIENT_PRICE", default_value_t = 1.0, value_parser = not_negative)]
    client_price: f64,
    /// Also lets a simulated fleet follow the traffic, with the control plane's advice and plans.
    #[arg(long, env = "SWITCHYARD_SIMULATE", value_parser = clap::builder::FalseyValueParser::new())]
    simulate: bool,
    /// Servers in a unit of the monolith that the simulated fleet is compared with.
    #[arg(long, env = "SWITCHYARD_MONOLITH_UNIT", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    monolith_unit: u32,
    /// Experts of a simulation that change places in popularity, as a share of all in an hour, 0 to 1.
    #[arg(long, env = "SWITCHYARD_DRIFT", default_value_t = 0.02, value_parser = fraction)]
    drift: f64,
    /// Writes the plot to an SVG file.
    #[arg(long, env = "SWITCHYARD_PLOT", value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Seed of the experts' popularity, of generated traffic and of the simulation.
    #[arg(long, env = "SWITCHYARD_SEED", default_value_t = 1)]
    seed: u64,
}

/// Result of `plan`.
#[derive(Debug, Serialize)]
struct Report {
    model: String,
    moe_layers: u32,
    experts_per_layer: u32,
    experts_per_token: u32,
    expert_bytes: u64,
    traffic: String,
    peak_tokens_per_s: f64,
    mean_tokens_per_s: f64,
    hours: f64,
    hardware: Hardware,
    min_servers: u32,
    /// Servers and clients at the peak.
    servers: u32,
    clients: u64,
    /// Time of a call of one layer at the peak with waiting, in microseconds.
    layer_us: f64,
    layer_us_without_wait: f64,
    /// Busiest server over the mean.
    imbalance: f64,
    busiest_share: f64,
    server_hours: f64,
    client_hours: f64,
    cost: f64,
    cost_of_peak_fleet: f64,
    assumptions: Vec<String>,
    steps: Vec<Step>,
    #[serde(skip_serializing_if = "Option::is_none")]
    simulation: Option<simulate::Outcome>,
    #[serde(skip_serializing_if = "Option::is_none")]
    check: Option<Check>,
}

/// One step of the trace.
#[derive(Debug, Serialize)]
struct Step {
    hour: f64,
    tokens_per_s: f64,
    servers: u32,
    clients: u64,
    busiest_share: f64,
    layer_us: f64,
    cost: f64,
}

/// Predictions beside measurements.
#[derive(Debug, Serialize)]
struct Check {
    servers: usize,
    rows: Vec<CheckRow>,
    mean_error: f64,
    worst_error: f64,
}

#[derive(Debug, Serialize)]
struct CheckRow {
    tokens: usize,
    predicted_us: f64,
    measured_us: f64,
    error: f64,
}

pub fn run(global: &Global, args: Args) -> Result<ExitCode> {
    let (name, hidden, workload) = workload(&args)?;
    let hardware = hardware_of(&args)?;
    let differences = other_shapes(&args, hidden, &workload)?;
    for difference in &differences {
        ui::write_err(format_args!("warning: {difference}\n"));
    }
    let trace = match &args.trace {
        Some(path) => Trace::read(path)?,
        None => {
            let num_steps = f64::from(args.days) * 86_400.0 / args.step_s;
            if !(2.0..=MAX_STEPS).contains(&num_steps) {
                bail!(
                    "--days {} --step-s {}: expected 2 to {MAX_STEPS} steps",
                    args.days,
                    args.step_s
                );
            }
            args.traffic.generate(args.peak, args.days, args.step_s, args.seed)
        }
    };
    let servers = Servers {
        hardware,
        capacity_experts: args
            .server_memory_gb
            .map(|gb| (gb * 1e9 / workload.expert_bytes as f64) as u64),
        goals: PlanGoals { min_replicas: args.replicas, spare: args.spare, ..PlanGoals::default() },
    };
    let mut sizes = Sizes::new(&workload, &servers)?;
    let mut report = plan(&args, name, &workload, &servers, &mut sizes, &trace)?;
    report.assumptions.extend(differences);
    if args.simulate {
        let settings = simulate::Settings {
            target_share: args.target_share,
            unit: args.monolith_unit,
            drift_per_hour: args.drift,
            seed: args.seed,
        };
        let outcome = simulate::run(&workload, &servers, &mut sizes, &trace, &settings)?;
        report.assumptions.extend(assumptions_of_simulation(&args));
        report.simulation = Some(outcome);
    }
    if let Some(path) = &args.check {
        report.check = Some(check(&hardware.call, path)?);
    }
    if let Some(path) = &args.plot {
        let hours: Vec<f64> = report.steps.iter().map(|step| step.hour).collect();
        let rates: Vec<f64> = report.steps.iter().map(|step| step.tokens_per_s).collect();
        let title = format!("{}: servers over {:.0} h", report.model, report.hours);
        let text =
            plot::svg(&title, &hours, &rates, &report.servers_over_time(), report.monolith());
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    if global.json {
        ui::print_json(&report)?;
    } else {
        print(&report);
    }
    Ok(ExitCode::SUCCESS)
}

/// The model's name, the width of its hidden states, and what it asks of servers.
fn workload(args: &Args) -> Result<(String, usize, Workload)> {
    let (name, config, expert_bytes) = match (&args.model, args.preset) {
        (Some(path), _) if path.is_dir() => {
            let checkpoint = Checkpoint::open(path)
                .with_context(|| format!("cannot open {}", path.display()))?;
            let summary = checkpoint.summarise_experts()?;
            let bytes = summary.computing_bytes.div_ceil(summary.num_experts.max(1));
            (path.display().to_string(), checkpoint.config().clone(), Some(bytes))
        }
        (Some(path), _) => {
            let text = std::fs::read_to_string(path)
                .with_context(|| format!("cannot read {}", path.display()))?;
            let config = ModelConfig::from_json(&text)
                .with_context(|| format!("{} cannot be planned", path.display()))?;
            (path.display().to_string(), config, None)
        }
        (None, Some(preset)) => (preset.name().to_owned(), preset.config()?, None),
        (None, None) => bail!("no model given: use --model PATH or --preset NAME"),
    };
    let num_layers = config.moe_layers().len() as u32;
    if num_layers == 0 {
        bail!("{name} has no layer with experts");
    }
    let bytes = args.expert_bytes.or(expert_bytes).unwrap_or_else(|| declared_bytes(&config));
    let workload = Workload {
        num_layers,
        num_experts: config.num_experts,
        top_k: config.top_k as u32,
        expert_bytes: bytes.max(1),
        zipf: args.zipf,
        batch: args.batch,
        seed: args.seed,
    };
    Ok((name, config.hidden, workload))
}

/// Bytes of three matrices in the declared format, with scales left out.
fn declared_bytes(config: &ModelConfig) -> u64 {
    let values = 3 * config.hidden as u64 * config.moe_intermediate as u64;
    match config.quantization.as_ref().map(|quantization| quantization.method) {
        None => values * 2,
        Some(QuantMethod::Fp8) => values,
        Some(QuantMethod::Gptq | QuantMethod::Awq | QuantMethod::Mxfp4) => values / 2,
        // Several formats share the name: the larger one.
        Some(_) => values,
    }
}

fn hardware_of(args: &Args) -> Result<Hardware> {
    let given = [args.base_us, args.expert_us, args.pair_us];
    if !args.bench.is_empty() {
        if given.iter().any(Option::is_some) {
            bail!(
                "--bench gives the times of a server: leave --base-us, --expert-us and --pair-us out"
            );
        }
        let reports: Result<Vec<BenchReport>> =
            args.bench.iter().map(|path| read_bench(path)).collect();
        return hardware::fit(&reports?);
    }
    let [Some(base_us), Some(expert_us), Some(pair_us)] = given else {
        bail!(
            "no hardware given: use --bench FILE with a report of `switchyard --json bench moe`, or --base-us, \
             --expert-us and --pair-us"
        );
    };
    let model = CostModel { base_us, expert_us, pair_us };
    if model.time_us(1.0, 1.0) <= 0.0 {
        bail!("--base-us, --expert-us and --pair-us are all 0: give at least one");
    }
    // The base is the network's and the client's.
    Ok(Hardware { call: model, compute: CostModel { base_us: 0.0, ..model } })
}

fn read_bench(path: &Path) -> Result<BenchReport> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    BenchReport::parse(&text).with_context(|| path.display().to_string())
}

/// Reports of `--bench` whose model is not of the planned shape: their times say little about it.
fn other_shapes(args: &Args, hidden: usize, workload: &Workload) -> Result<Vec<String>> {
    let mut differences = Vec::new();
    for path in &args.bench {
        let report = read_bench(path)?;
        let found = (report.hidden, report.num_experts, report.top_k as u32);
        if found != (hidden, workload.num_experts, workload.top_k) {
            differences.push(format!(
                "{} measured top-{} of {} experts, hidden {}; the planned model has top-{} of {}, hidden {hidden}: \
                 its servers take other times",
                path.display(),
                found.2,
                found.1,
                found.0,
                workload.top_k,
                workload.num_experts
            ));
        }
    }
    Ok(differences)
}

fn plan(
    args: &Args,
    model: String,
    workload: &Workload,
    servers: &Servers,
    sizes: &mut Sizes<'_>,
    trace: &Trace,
) -> Result<Report> {
    let mut steps = Vec::new();
    let (mut server_hours, mut client_hours) = (0.0, 0.0);
    let begin_s = trace.points.first().map_or(0.0, |point| point.at_s);
    for (point, length_s) in trace.steps() {
        let num_servers = sizes.needed(point.tokens_per_s, args.target_share)?;
        let busiest_share = sizes.busiest_share(num_servers, point.tokens_per_s)?;
        let layer_us = layer_time(workload, sizes, num_servers, busiest_share)?;
        let clients = clients(args, workload, layer_us, point.tokens_per_s);
        let hours = length_s / 3600.0;
        server_hours += f64::from(num_servers) * hours;
        client_hours += clients as f64 * hours;
        steps.push(Step {
            hour: (point.at_s - begin_s) / 3600.0,
            tokens_per_s: point.tokens_per_s,
            servers: num_servers,
            clients,
            busiest_share,
            layer_us,
            cost: (f64::from(num_servers) * args.server_price + clients as f64 * args.client_price)
                * hours,
        });
    }
    let peak = trace.peak();
    let most = sizes.needed(peak, args.target_share)?;
    let busiest_share = sizes.busiest_share(most, peak)?;
    let layer_us = layer_time(workload, sizes, most, busiest_share)?;
    let most_clients = clients(args, workload, layer_us, peak);
    let min_servers = sizes.fewest();
    let placement = sizes.placement(most)?;
    let peak_price = f64::from(most) * args.server_price + most_clients as f64 * args.client_price;
    Ok(Report {
        model,
        moe_layers: workload.num_layers,
        experts_per_layer: workload.num_experts,
        experts_per_token: workload.top_k,
        expert_bytes: workload.expert_bytes,
        traffic: trace.source.clone(),
        peak_tokens_per_s: peak,
        mean_tokens_per_s: trace.mean(),
        hours: trace.length_s() / 3600.0,
        hardware: servers.hardware,
        min_servers,
        servers: most,
        clients: most_clients,
        layer_us,
        layer_us_without_wait: placement.layer_us,
        imbalance: placement.imbalance,
        busiest_share,
        server_hours,
        client_hours,
        cost: server_hours * args.server_price + client_hours * args.client_price,
        cost_of_peak_fleet: peak_price * trace.length_s() / 3600.0,
        assumptions: assumptions(args, workload),
        steps,
        simulation: None,
        check: None,
    })
}

/// Time of a call of one layer: that of its slowest server, and the wait in the queue of the busiest one. The queue has
/// calls of equal length that come at random (M/D/1).
fn layer_time(
    workload: &Workload,
    sizes: &mut Sizes<'_>,
    num_servers: u32,
    busiest_share: f64,
) -> Result<f64> {
    let placement = sizes.placement(num_servers)?;
    let service_us = placement.busiest_call_s * 1e6 / f64::from(workload.num_layers);
    let share = busiest_share.clamp(0.0, 0.99);
    Ok(placement.layer_us + service_us * share / (2.0 * (1.0 - share)))
}

/// Clients that make a call after the other, layer by layer.
fn clients(args: &Args, workload: &Workload, layer_us: f64, tokens_per_s: f64) -> u64 {
    let step_s = f64::from(workload.num_layers) * (layer_us + args.attention_us) * 1e-6;
    (tokens_per_s * step_s / f64::from(workload.batch)).ceil().max(1.0) as u64
}

fn check(model: &CostModel, path: &Path) -> Result<Check> {
    let report = read_bench(path)?;
    let row = |(tokens, predicted_us, measured_us): (usize, f64, f64)| CheckRow {
        tokens,
        predicted_us,
        measured_us,
        error: (predicted_us / measured_us - 1.0).abs(),
    };
    let rows: Vec<CheckRow> = hardware::check(model, &report).into_iter().map(row).collect();
    if rows.is_empty() {
        bail!("{} has no rows to compare with", path.display());
    }
    let errors = rows.iter().map(|row| row.error);
    let mean_error = errors.clone().sum::<f64>() / rows.len() as f64;
    let worst_error = errors.fold(0.0, f64::max);
    Ok(Check { servers: report.servers, rows, mean_error, worst_error })
}

fn assumptions(args: &Args, workload: &Workload) -> Vec<String> {
    let planned = workload.model().moe_layers.len();
    vec![
        format!(
            "experts are chosen by rank to the power of -{}, shuffled anew in each layer, seed {}",
            args.zipf, args.seed
        ),
        format!("{planned} of {} layers are planned and stand for the others", workload.num_layers),
        format!("a call has {} tokens, and servers compute each call by itself", args.batch),
        format!(
            "the busiest server computes for at most {:.0} % of the time",
            args.target_share * 1e2
        ),
        "calls come at random, and a server takes them in their order (M/D/1)".to_owned(),
        format!(
            "a client computes {} µs between two layers, and layers follow each other",
            args.attention_us
        ),
    ]
}

fn assumptions_of_simulation(args: &Args) -> Vec<String> {
    vec![
        format!(
            "the monolith has the servers of its peak at the same target, rounded up to units of {}, all the time",
            args.monolith_unit
        ),
        "attention clients are left out on both sides".to_owned(),
        format!("{:.1} % of the experts change places in popularity in an hour", args.drift * 1e2),
        "a joining server serves, and a leaving one is gone, one step after the advice; both are paid for that step"
            .to_owned(),
    ]
}

impl Report {
    fn servers_over_time(&self) -> Vec<f64> {
        match &self.simulation {
            Some(outcome) => outcome.servers_at.iter().map(|num| f64::from(*num)).collect(),
            None => self.steps.iter().map(|step| f64::from(step.servers)).collect(),
        }
    }

    fn monolith(&self) -> Option<f64> {
        self.simulation.as_ref().map(|outcome| f64::from(outcome.monolith_servers))
    }
}

fn print(report: &Report) {
    let Report { hardware: Hardware { call, .. }, .. } = report;
    outln!(
        "{}: {} layers of {} experts, top-{}, {:.1} MB an expert",
        report.model,
        report.moe_layers,
        report.experts_per_layer,
        report.experts_per_token,
        report.expert_bytes as f64 / 1e6
    );
    outln!(
        "traffic: peak {:.0}, mean {:.0} tokens/s over {:.1} h ({})",
        report.peak_tokens_per_s,
        report.mean_tokens_per_s,
        report.hours,
        report.traffic
    );
    outln!(
        "hardware: {:.1} µs + {:.2} µs an expert + {:.3} µs a (token, expert) pair",
        call.base_us,
        call.expert_us,
        call.pair_us
    );
    outln!();
    outln!(
        "at the peak: {} servers (memory needs {}), {} clients",
        report.servers,
        report.min_servers,
        report.clients
    );
    outln!(
        "layer: {:.0} µs, {:.0} without waiting; busiest server {:.3} times the mean, {:.0} % of the time",
        report.layer_us,
        report.layer_us_without_wait,
        report.imbalance,
        report.busiest_share * 1e2
    );
    outln!(
        "over the time: {:.1} server hours, {:.1} client hours, cost {:.2} ({:.2} with the peak's fleet all the time)",
        report.server_hours,
        report.client_hours,
        report.cost,
        report.cost_of_peak_fleet
    );
    outln!();
    let rates: Vec<f64> = report.steps.iter().map(|step| step.tokens_per_s).collect();
    let servers = report.servers_over_time();
    let most = servers.iter().copied().fold(0.0, f64::max);
    outln!(
        "tokens/s {:>8.0} |{}",
        report.peak_tokens_per_s,
        plot::bars(&rates, report.peak_tokens_per_s, 72)
    );
    outln!("servers  {most:>8.0} |{}", plot::bars(&servers, most, 72));
    if let Some(outcome) = &report.simulation {
        outln!();
        outln!(
            "simulation: {:.1} server hours in {} steps, {:.1} servers on average and {} at most; a monolith of {} takes \
             {:.1}: {:.1} % saved",
            outcome.server_hours,
            outcome.steps,
            outcome.mean_servers,
            outcome.most_servers,
            outcome.monolith_servers,
            outcome.monolith_server_hours,
            outcome.saved * 1e2
        );
        outln!(
            "{} joins, {} drains, {} experts loaded; busiest server {:.3} times the mean, at most {:.0} % of the time, \
             {} steps overloaded; longest plan {:.0} ms",
            outcome.joins,
            outcome.drains,
            outcome.expert_loads,
            outcome.mean_imbalance,
            outcome.worst_busiest_share * 1e2,
            outcome.overloaded_steps,
            outcome.longest_plan_ms
        );
    }
    if let Some(check) = &report.check {
        outln!();
        outln!(
            "{:>8} {:>12} {:>12} {:>7}  ({} servers)",
            "tokens",
            "predicted",
            "measured",
            "error",
            check.servers
        );
        for row in &check.rows {
            outln!(
                "{:>8} {:>12.1} {:>12.1} {:>6.1}%",
                row.tokens,
                row.predicted_us,
                row.measured_us,
                row.error * 1e2
            );
        }
        outln!(
            "error: mean {:.1} %, worst {:.1} %",
            check.mean_error * 1e2,
            check.worst_error * 1e2
        );
    }
    outln!();
    outln!("assumptions:");
    for assumption in &report.assumptions {
        outln!("- {assumption}");
    }
}

fn number(text: &str, is_valid: impl Fn(f64) -> bool, expected: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().map_err(|error| error.to_string())?;
    match value.is_finite() && is_valid(value) {
        true => Ok(value),
        false => Err(format!("expected {expected}")),
    }
}

fn positive(text: &str) -> Result<f64, String> {
    number(text, |value| value > 0.0, "a number above 0")
}

fn not_negative(text: &str) -> Result<f64, String> {
    number(text, |value| value >= 0.0, "0 or more")
}

fn share(text: &str) -> Result<f64, String> {
    number(text, |value| (0.05..=0.95).contains(&value), "0.05 to 0.95")
}

fn fraction(text: &str) -> Result<f64, String> {
    number(text, |value| (0.0..=1.0).contains(&value), "0 to 1")
}

/// Steps of generated traffic.
const MAX_STEPS: f64 = 100_000.0;
