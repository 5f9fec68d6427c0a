//! `fault-rig`: layers under faults, clients that connect and leave, idle cost.
//!
//! Called as `fault-rig expert-server …` or `fault-rig control-plane …` it is the `switchyard` command
//! with failpoints armed by `SWITCHYARD_TEST_FAILPOINTS`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use switchyard_tests::rig::RigOptions;
use switchyard_tests::{churn, failpoints, idle, rig, victim};
use test_support::model::tiny_moe;

/// Runs layers through a cluster of processes while servers are killed, frozen, drained and restarted,
/// and compares every output with an independent oracle.
///
/// Exit codes: 0 no rule was broken, 1 a rule was broken, 2 wrong usage, 3 the run could not be made.
#[derive(Debug, Parser)]
#[command(name = "fault-rig", max_term_width = 100, args_override_self = true)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    run: RunArgs,
}

#[derive(Debug, clap::Args)]
struct Common {
    /// Prints one JSON object instead of text.
    #[arg(long, global = true)]
    json: bool,
    /// Seed of inputs and schedule; a fresh one by default, always printed.
    #[arg(long, global = true)]
    seed: Option<u64>,
    /// The binary of servers and control plane; this one by default.
    #[arg(long, global = true)]
    binary: Option<PathBuf>,
    /// Checkpoint folder; the small model of the repository by default.
    #[arg(long, global = true)]
    model: Option<PathBuf>,
    /// Failpoints of this process: `client|NAME=ACTION;…`.
    #[arg(long, global = true, default_value = "", hide_default_value = true)]
    client_failpoints: String,
    /// Ends this process when its parent ends.
    #[arg(long, global = true, hide = true)]
    exit_with_parent: bool,
}

#[derive(Debug, clap::Args)]
struct RunArgs {
    /// Layers to finish at least.
    #[arg(long, default_value_t = 1000)]
    layers: u64,
    /// Average number of layers between events; layers / this is the number of events.
    #[arg(long, default_value_t = 50)]
    layers_per_event: u64,
    /// Expert servers.
    #[arg(long, default_value_t = 4)]
    servers: usize,
    /// Servers that hold each expert.
    #[arg(long, default_value_t = 2)]
    replicas: usize,
    /// Client threads.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Most tokens of a layer.
    #[arg(long, default_value_t = 64)]
    max_tokens: usize,
    /// Silence after which a client gives up a server, milliseconds.
    #[arg(long, default_value_t = 100)]
    deadline_ms: u64,
    /// Lease of a member, milliseconds.
    #[arg(long, default_value_t = 1500)]
    lease_ttl_ms: u64,
    /// Longest absence of the control plane, milliseconds.
    #[arg(long, default_value_t = 2000)]
    control_hold_ms: u64,
    /// Weight of: a server is killed, and started again after a while.
    #[arg(long, default_value_t = 8)]
    kill_weight: u32,
    /// Weight of: a server is killed and started again at once.
    #[arg(long, default_value_t = 4)]
    restart_weight: u32,
    /// Weight of: a server is frozen for about the deadline.
    #[arg(long, default_value_t = 8)]
    freeze_weight: u32,
    /// Weight of: a server is frozen beyond its lease.
    #[arg(long, default_value_t = 1)]
    expire_weight: u32,
    /// Weight of: a server drains.
    #[arg(long, default_value_t = 2)]
    drain_weight: u32,
    /// Weight of: the control plane is killed and restarted.
    #[arg(long, default_value_t = 2)]
    control_kill_weight: u32,
    /// Weight of: a server is killed while the control plane is down.
    #[arg(long, default_value_t = 1)]
    control_and_kill_weight: u32,
    /// Weight of: experts lose all their replicas.
    #[arg(long, default_value_t = 0)]
    outage_weight: u32,
    /// Failpoints of servers: `SERVER|NAME=ACTION;…`, `*` for every server.
    #[arg(long, default_value = "", hide_default_value = true)]
    server_failpoints: String,
    /// Ends the run at the first violation.
    #[arg(long)]
    stop_at_first: bool,
    /// Ends the run after this time, seconds.
    #[arg(long, default_value_t = 3600)]
    max_seconds: u64,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Clients connect and leave; descriptors and memory must return to their level before.
    Churn {
        /// Clients that connect and leave.
        #[arg(long, default_value_t = 10_000)]
        connections: usize,
    },
    /// CPU time of idle servers and their control plane.
    Idle {
        /// Length of each measurement, seconds.
        #[arg(long, default_value_t = 10)]
        seconds: u64,
    },
    /// A client that computes until a failpoint kills it.
    Victim {
        /// The control plane. The token is in `SWITCHYARD_TOKEN`.
        #[arg(long)]
        control_plane: String,
    },
}

fn main() -> ExitCode {
    let first = std::env::args().nth(1).unwrap_or_default();
    if matches!(first.as_str(), "expert-server" | "control-plane") {
        return node();
    }
    // Usage errors end here, with 2.
    let args = Args::parse();
    match start(args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(3)
        }
    }
}

/// The `switchyard` command, with failpoints.
fn node() -> ExitCode {
    let mut args = std::env::args();
    let name = args.by_ref().find(|arg| arg == "--name").and_then(|_| args.next());
    if let Ok(list) = std::env::var(failpoints::ENV)
        && let Err(error) = failpoints::arm(&list, &name.unwrap_or_default())
    {
        eprintln!("error: {error:#}");
        return ExitCode::FAILURE;
    }
    switchyard_cli::run()
}

/// Whether no rule was broken.
fn start(args: Args) -> Result<bool> {
    let Args { command, common, run } = args;
    if common.exit_with_parent {
        let signal = rustix::process::Signal::KILL;
        rustix::process::set_parent_process_death_signal(Some(signal))
            .context("cannot tie this process to its parent")?;
    }
    tracing_subscriber::fmt()
        .with_env_filter(std::env::var("SWITCHYARD_LOG").unwrap_or_else(|_| "error".to_owned()))
        .with_writer(std::io::stderr)
        .init();
    failpoints::arm(&common.client_failpoints, "client")?;
    let binary = match common.binary {
        Some(binary) => binary,
        None => std::env::current_exe().context("cannot tell the path of this binary")?,
    };
    let model = common.model.unwrap_or_else(tiny_moe);
    let seed = common.seed.unwrap_or_else(rand::random::<u64>);
    eprintln!("seed {seed}");
    match command {
        None => {
            let options = rig_options(run, binary, model, seed);
            let report = rig::run(&options)?;
            if common.json {
                println!("{}", serde_json::to_string_pretty(&report)?);
            } else {
                print!("{}", report.as_text());
            }
            Ok(report.sound)
        }
        Some(Command::Churn { connections }) => {
            let options = churn::ChurnOptions::new(binary, model, connections, seed);
            let report = churn::run(&options)?;
            if common.json {
                println!("{}", serde_json::to_string_pretty(&report)?);
            } else {
                print!("{}", report.as_text());
            }
            Ok(report.sound)
        }
        Some(Command::Idle { seconds }) => {
            let reports = idle::run(&binary, &model, Duration::from_secs(seconds))?;
            if common.json {
                println!("{}", serde_json::to_string_pretty(&reports)?);
            } else {
                for report in &reports {
                    let with = if report.with_client { "with a client" } else { "alone" };
                    println!(
                        "{:<14} {with:<14} {:>6.2} % of a core",
                        report.name, report.core_percent
                    );
                }
            }
            Ok(reports.iter().all(|report| report.core_percent < idle::LIMIT_PERCENT))
        }
        Some(Command::Victim { control_plane }) => {
            victim::run(&control_plane, &model, seed)?;
            Ok(true)
        }
    }
}

fn rig_options(args: RunArgs, binary: PathBuf, model: PathBuf, seed: u64) -> RigOptions {
    RigOptions {
        layers: args.layers,
        layers_per_event: args.layers_per_event.max(1),
        servers: args.servers,
        replicas: args.replicas,
        threads: args.threads,
        max_tokens: args.max_tokens,
        deadline: Duration::from_millis(args.deadline_ms),
        lease_ttl: Duration::from_millis(args.lease_ttl_ms),
        control_hold: Duration::from_millis(args.control_hold_ms),
        weights: [
            args.kill_weight,
            args.restart_weight,
            args.freeze_weight,
            args.expire_weight,
            args.drain_weight,
            args.control_kill_weight,
            args.control_and_kill_weight,
            args.outage_weight,
        ],
        server_failpoints: args.server_failpoints,
        stop_at_first: args.stop_at_first,
        max_time: Duration::from_secs(args.max_seconds),
        ..RigOptions::new(binary, model, seed)
    }
}
