//! What people see: logs, progress, JSON.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use tracing_subscriber::EnvFilter;

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// One readable line per event.
    Text,
    /// One JSON object per event.
    Json,
}

/// Sends logs to standard error.
pub fn init_logging(filter: &str, format: LogFormat) -> Result<()> {
    let filter = EnvFilter::try_new(filter)
        .with_context(|| format!("--log {filter:?} is not a level or a filter"))?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        LogFormat::Text => builder.with_ansi(std::io::stderr().is_terminal()).init(),
        LogFormat::Json => builder.json().init(),
    }
    Ok(())
}

/// Asks the kernel to kill this process when its parent dies.
pub fn exit_with_parent() -> Result<()> {
    let parent = rustix::process::getppid();
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .context("cannot tie this process to its parent")?;
    // The parent may have died before the request took hold.
    if rustix::process::getppid() != parent {
        std::process::exit(1);
    }
    Ok(())
}

/// An error and its causes as one line, each cause once: many messages quote their cause already.
pub fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let text = cause.to_string();
        if line.is_empty() {
            line = text;
        } else if !line.contains(&text) {
            line = format!("{line}: {text}");
        }
    }
    line.replace('\n', " ")
}

/// Prints a value as one JSON document on standard output.
pub fn print_json(value: &impl Serialize) -> Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer_pretty(&mut out, value).context("cannot write JSON")?;
    writeln!(out).context("cannot write JSON")
}

/// Prints a value as one line of JSON on standard output and flushes it.
pub fn print_json_line(value: &impl Serialize) -> Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, value).context("cannot write JSON")?;
    writeln!(out).and_then(|()| out.flush()).context("cannot write JSON")
}

/// A bar that counts bytes; hidden with `--json` and where standard error is no terminal.
pub fn bytes_bar(json: bool, total: u64, what: &str) -> ProgressBar {
    bar(json, total, what, "{msg} [{bar:32}] {bytes}/{total_bytes} {bytes_per_sec} eta {eta}")
}

/// A bar that counts steps; hidden with `--json` and where standard error is no terminal.
pub fn steps_bar(json: bool, total: u64, what: &str) -> ProgressBar {
    bar(json, total, what, "{msg} [{bar:32}] {pos}/{len} {elapsed}")
}

/// A spinner; hidden with `--json` and where standard error is no terminal.
pub fn spinner(json: bool, what: &str) -> ProgressBar {
    let bar = bar(json, 0, what, "{spinner} {msg} {elapsed}");
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

fn bar(json: bool, total: u64, what: &str, template: &str) -> ProgressBar {
    let bar = ProgressBar::new(total);
    if json || !std::io::stderr().is_terminal() {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    // The template is a constant of this file; an invalid one falls back to indicatif's default.
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_message(what.to_owned());
    bar
}
