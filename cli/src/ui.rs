//! Output: logs, progress bars, JSON.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use anyhow::{Context, Result};
use control_api::text::escaped;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use tracing_subscriber::EnvFilter;

/// Format of log lines.
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
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // A report about an unwritable standard error would go to standard error and panic.
        .log_internal_errors(false);
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
    // The parent may have ended before the request took effect.
    if rustix::process::getppid() != parent {
        std::process::exit(1);
    }
    Ok(())
}

/// An error and its causes as one line. Leaves out causes that a message already quotes.
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
    escaped(&line.replace('\n', " "), &[]).into_owned()
}

/// Prints a value as one JSON document on standard output.
pub fn print_json(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value).context("cannot write JSON")?;
    write_out(format_args!("{text}\n"));
    Ok(())
}

/// Prints a value as one line of JSON on standard output.
pub fn print_json_line(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string(value).context("cannot write JSON")?;
    write_out(format_args!("{text}\n"));
    Ok(())
}

/// Writes to standard output and flushes it, with control characters of foreign text escaped. If the reader has closed
/// the pipe, ends the process with exit code 0 and without a message, as filters do. Its child processes end with it.
pub fn write_out(text: std::fmt::Arguments<'_>) {
    write_raw(&escaped(&text.to_string(), LAYOUT));
}

/// As [`write_out`], with the text in the style of an ANSI code, such as `1;31`.
pub fn write_styled(code: &str, text: &str) {
    write_raw(&format!("\x1b[{code}m{}\x1b[0m", escaped(text, LAYOUT)));
}

fn write_raw(text: &str) {
    let mut out = std::io::stdout().lock();
    if let Err(error) = out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            std::process::exit(0);
        }
        write_err(format_args!("error: cannot write to standard output: {error}\n"));
        std::process::exit(1);
    }
}

/// Writes to standard error, if it can be written, with control characters of foreign text escaped.
pub fn write_err(text: std::fmt::Arguments<'_>) {
    // An error here cannot be reported.
    let text = text.to_string();
    let _ = std::io::stderr().lock().write_all(escaped(&text, LAYOUT).as_bytes());
}

/// Characters that lay out lines.
const LAYOUT: &[char] = &['\n', '\t'];

/// `print!` through [`write_out`].
macro_rules! out {
    ($($arg:tt)*) => { $crate::ui::write_out(format_args!($($arg)*)) };
}

/// `println!` through [`write_out`].
macro_rules! outln {
    () => { $crate::ui::write_out(format_args!("\n")) };
    ($format:literal $($arg:tt)*) => {
        $crate::ui::write_out(format_args!("{}\n", format_args!($format $($arg)*)))
    };
}

/// A bar that counts bytes. Hidden with `--json` or if standard error is not a terminal.
pub fn bytes_bar(json: bool, total: u64, what: &str) -> ProgressBar {
    bar(json, total, what, "{msg} [{bar:32}] {bytes}/{total_bytes} {bytes_per_sec} eta {eta}")
}

/// A bar that counts steps. Hidden with `--json` or if standard error is not a terminal.
pub fn steps_bar(json: bool, total: u64, what: &str) -> ProgressBar {
    bar(json, total, what, "{msg} [{bar:32}] {pos}/{len} {elapsed}")
}

/// A spinner. Hidden with `--json` or if standard error is not a terminal.
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
    // The template is a constant. An invalid one would fall back to indicatif's default.
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_message(what.to_owned());
    bar
}
