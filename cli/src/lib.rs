//! The command line of Switchyard: it connects the other crates, and starts the local cluster of `demo`,
//! `generate`, `layer` and the tests.

#![deny(clippy::print_stdout, clippy::print_stderr)]

#[macro_use]
mod ui;
pub mod cluster;
mod cmd;
mod host;

// The error type of this crate's signatures.
pub use anyhow;

use std::process::ExitCode;

use clap::builder::FalseyValueParser;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

/// Experts as a service for Mixture-of-Experts models.
#[derive(Debug, Parser)]
#[command(name = "switchyard", version, propagate_version = true, max_term_width = 100)]
pub struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

/// Options of every command.
#[derive(Debug, Clone, clap::Args)]
pub struct Global {
    /// Print JSON instead of text.
    #[arg(long, global = true, env = "SWITCHYARD_JSON", value_parser = FalseyValueParser::new())]
    json: bool,
    /// Log filter for standard error: a level (error, warn, info, debug, trace), or a list such as
    /// `info,switchyard_control_plane=debug`. Default: `warn`, and `error` for `demo`.
    #[arg(long, global = true, env = "SWITCHYARD_LOG", value_name = "FILTER")]
    log: Option<String>,
    /// Format of log lines.
    #[arg(long, global = true, env = "SWITCHYARD_LOG_FORMAT", default_value = "text")]
    log_format: ui::LogFormat,
    /// End this process when its parent process ends.
    #[arg(long, global = true, env = "SWITCHYARD_EXIT_WITH_PARENT", hide = true, value_parser = FalseyValueParser::new())]
    exit_with_parent: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start a local cluster, generate text, kill a server half-way, and print a report.
    Demo(cmd::demo::Args),
    /// Run the control plane: membership of servers and placement of experts.
    ControlPlane(cmd::control_plane::Args),
    /// Run an expert server: it holds experts and computes them for clients.
    ExpertServer(cmd::expert_server::Args),
    /// Generate text with a model whose experts run on expert servers.
    Generate(cmd::generate::Args),
    /// Run the experts of one layer on tokens from a file, to compare with another framework.
    Layer(cmd::layer::Args),
    /// Show members, placement and health of a running cluster.
    Status(cmd::status::Args),
    /// Show the fleet live in the terminal: health, load and servers.
    Top(cmd::top::Args),
    /// Take an expert server out of the placement. It keeps running, and `resume` returns it.
    Drain(cmd::drain::DrainArgs),
    /// Return a drained expert server to the placement.
    Resume(cmd::drain::Args),
    /// Restart the servers of a fleet one after the other, without a failed call.
    Rollout(cmd::rollout::Args),
    /// Update the model of a fleet while clients call: serve the new one beside the old one, then switch.
    Model(cmd::model::Args),
    /// Show or change the goals of a fleet whose placement follows the load.
    Scale(cmd::scale::Args),
    /// Make, list and remove the tokens of a control plane's token file.
    Token(cmd::token::Args),
    /// Plan a fleet: the servers and clients that a model needs for its traffic, and their cost over the day.
    Plan(cmd::plan::Args),
    /// Make the certificates of a fleet: an authority, and certificates for servers and clients.
    Certs(cmd::certs::Args),
    /// Check this host: usable transports and devices, what is missing, and how to install it.
    Doctor(cmd::doctor::Args),
    /// Describe a checkpoint: family, experts, format, sizes, and whether it can be served.
    Inspect(cmd::inspect::Args),
    /// Run a benchmark.
    Bench(cmd::bench::Args),
    /// Write a checkpoint with random weights in the layout and size of a real model.
    MakeCheckpoint(cmd::make_checkpoint::Args),
}

/// Parses the command line and runs it. Exit codes: 0 done, 1 failed, 2 wrong usage. `status` returns 3 for a fleet that
/// is not as planned, and `rollout` if it ran out of time. An expert server ends with 74 if a file of its checkpoint has become shorter, and with 78 if another
/// live server has its name.
#[must_use]
pub fn run() -> ExitCode {
    if let Some(code) = cmd::bench::child() {
        return code;
    }
    let parsed = Cli::command().try_get_matches().and_then(|matches| {
        cmd::bench::check(&matches)?;
        Cli::from_arg_matches(&matches)
    });
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) => {
            // Printing fails only if the output is closed, so there is no way to report it.
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { 2 } else { 0 });
        }
    };
    match start(cli) {
        Ok(code) => code,
        Err(error) => {
            ui::write_err(format_args!(
                "error: {}{}\n",
                ui::one_line(&error),
                port_holders(&error)
            ));
            match cmd::expert_server::is_name_conflict(&error) {
                true => ExitCode::from(cmd::expert_server::NAME_CONFLICT_EXIT_CODE),
                false => ExitCode::FAILURE,
            }
        }
    }
}

/// Names the processes behind a port that is in use, if `error` is about one.
fn port_holders(error: &anyhow::Error) -> String {
    use control_plane::BindError;
    use expert_server::StartError;
    use p2p_core::bootstrap::BindError as DataBindError;
    let addr = if let Some(BindError::AddrInUse { addr }) = error.downcast_ref() {
        addr.clone()
    } else {
        match error.downcast_ref() {
            Some(StartError::Bind(DataBindError::InUse { addr })) => addr.clone(),
            Some(StartError::MetricsInUse { addr }) => addr.to_string(),
            _ => return String::new(),
        }
    };
    let port = addr.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
    let holders = port.map(host::listeners).unwrap_or_default();
    match holders.is_empty() {
        true => "; the process belongs to another user: ask for its name as root with `ss -ltnp`"
            .to_owned(),
        false => format!("; held by {}", holders.join(", ")),
    }
}

fn start(cli: Cli) -> anyhow::Result<ExitCode> {
    let default_log = if matches!(cli.command, Command::Demo(_)) { "error" } else { "warn" };
    let log = cli.global.log.as_deref().unwrap_or(default_log);
    ui::init_logging(log, cli.global.log_format)?;
    if cli.global.exit_with_parent {
        ui::exit_with_parent()?;
    }
    // Every peer needs file descriptors. The soft limit of most systems is low, for programs that use
    // select().
    let limit = p2p_core::bootstrap::raise_descriptor_limit();
    tracing::debug!(limit, "open files");
    let global = &cli.global;
    match cli.command {
        Command::Demo(args) => cmd::demo::run(global, args),
        Command::ControlPlane(args) => cmd::control_plane::run(global, args),
        Command::ExpertServer(args) => cmd::expert_server::run(global, args),
        Command::Generate(args) => cmd::generate::run(global, args),
        Command::Layer(args) => cmd::layer::run(global, args),
        Command::Status(args) => cmd::status::run(global, args),
        Command::Top(args) => cmd::top::run(global, args),
        Command::Drain(args) => cmd::drain::drain(global, args),
        Command::Resume(args) => cmd::drain::resume(global, args),
        Command::Rollout(args) => cmd::rollout::run(global, args),
        Command::Model(args) => cmd::model::run(global, args),
        Command::Scale(args) => cmd::scale::run(global, args),
        Command::Token(args) => cmd::token::run(global, args),
        Command::Plan(args) => cmd::plan::run(global, args),
        Command::Certs(args) => cmd::certs::run(global, args),
        Command::Doctor(args) => cmd::doctor::run(global, args),
        Command::Inspect(args) => cmd::inspect::run(global, args),
        Command::Bench(args) => cmd::bench::run(global, args),
        Command::MakeCheckpoint(args) => cmd::make_checkpoint::run(global, args),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_flag_is_also_an_environment_variable() {
        fn check(command: &clap::Command) {
            for arg in command.get_arguments() {
                let built_in = matches!(arg.get_id().as_str(), "help" | "version");
                if built_in || arg.is_positional() {
                    continue;
                }
                let env = arg.get_env().and_then(|env| env.to_str()).unwrap_or_default();
                assert!(
                    env.starts_with("SWITCHYARD_"),
                    "{} --{} has no environment variable",
                    command.get_name(),
                    arg.get_id()
                );
            }
            command.get_subcommands().for_each(check);
        }
        check(&Cli::command());
    }
}
