//! The command line of Switchyard: thin wiring of the other crates, and the local cluster that
//! `demo`, `generate`, `layer` and the tests start.

#![deny(clippy::print_stdout, clippy::print_stderr)]

#[macro_use]
mod ui;
pub mod cluster;
mod cmd;

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

/// Flags of every command.
#[derive(Debug, Clone, clap::Args)]
pub struct Global {
    /// Prints machine-readable JSON instead of text.
    #[arg(long, global = true, env = "SWITCHYARD_JSON", value_parser = FalseyValueParser::new())]
    json: bool,
    /// What to log to standard error: a level, or tracing's filter syntax. `warn` by default, and
    /// `error` for the demo, whose story a warning would interrupt.
    #[arg(long, global = true, env = "SWITCHYARD_LOG", value_name = "FILTER")]
    log: Option<String>,
    /// How log lines look.
    #[arg(long, global = true, env = "SWITCHYARD_LOG_FORMAT", default_value = "text")]
    log_format: ui::LogFormat,
    /// Ends this process when the one that started it ends.
    #[arg(long, global = true, env = "SWITCHYARD_EXIT_WITH_PARENT", hide = true, value_parser = FalseyValueParser::new())]
    exit_with_parent: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Starts a cluster, generates text, kills a server half-way, and reports what happened.
    Demo(cmd::demo::Args),
    /// Runs the control plane: membership, placement, metrics.
    ControlPlane(cmd::control_plane::Args),
    /// Runs an expert server: holds experts, computes what clients push.
    ExpertServer(cmd::expert_server::Args),
    /// Generates text with a model whose experts are served.
    Generate(cmd::generate::Args),
    /// Sends one layer's tokens through servers, to compare with another framework.
    Layer(cmd::layer::Args),
    /// Shows members, placement and health of a running cluster.
    Status(cmd::status::Args),
    /// Shows what this host offers, what is missing, and how to get it.
    Doctor(cmd::doctor::Args),
    /// Measures.
    Bench(cmd::bench::Args),
    /// Writes a checkpoint with seeded random weights in the real layout and size.
    MakeCheckpoint(cmd::make_checkpoint::Args),
}

/// Parses the command line and runs it. Exit codes: 0 done, 1 failed, 2 wrong usage.
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
            // Printing the usage can only fail when the terminal is gone; there is nobody to tell.
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { 2 } else { 0 });
        }
    };
    match start(cli) {
        Ok(code) => code,
        Err(error) => {
            ui::write_err(format_args!("error: {}\n", ui::one_line(&error)));
            ExitCode::FAILURE
        }
    }
}

fn start(cli: Cli) -> anyhow::Result<ExitCode> {
    let default_log = if matches!(cli.command, Command::Demo(_)) { "error" } else { "warn" };
    let log = cli.global.log.as_deref().unwrap_or(default_log);
    ui::init_logging(log, cli.global.log_format)?;
    if cli.global.exit_with_parent {
        ui::exit_with_parent()?;
    }
    // Every peer costs descriptors; the soft limit of most systems is meant for select().
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
        Command::Doctor(args) => cmd::doctor::run(global, args),
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
