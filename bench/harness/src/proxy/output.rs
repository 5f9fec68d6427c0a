//! Output of the benchmark programs. Standard output gets a table, or with `--json` a line of JSON for each row.
//! Standard error gets progress and errors.

use std::fmt::Display;
use std::io::{ErrorKind, IsTerminal as _, Write as _};
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use serde_json::Value;

/// A column of a table: the place of its values in a line of JSON, and their format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Column {
    head: &'static str,
    /// JSON pointer into the line: `/bench`, `/latency/p50_us`.
    pointer: &'static str,
    /// Least number of characters. A longer head widens the column.
    width: usize,
    is_text: bool,
}

/// The output of a program.
#[derive(Debug)]
pub struct Output {
    is_json: bool,
    shows_progress: bool,
    /// Columns of the current table.
    columns: Option<&'static [Column]>,
    num_steps: usize,
    num_begun: usize,
}

impl Column {
    /// A column of left-aligned text.
    #[must_use]
    pub const fn text(head: &'static str, pointer: &'static str, width: usize) -> Self {
        Self { head, pointer, width, is_text: true }
    }

    /// A column of right-aligned numbers. Floating-point numbers have three decimals.
    #[must_use]
    pub const fn number(head: &'static str, pointer: &'static str, width: usize) -> Self {
        Self { head, pointer, width, is_text: false }
    }

    fn cell(&self, line: &Value) -> String {
        match line.pointer(self.pointer) {
            None | Some(Value::Null) => self.pad("-"),
            Some(Value::String(text)) => self.pad(text),
            Some(value) => match value.as_f64().filter(|_| value.is_f64()) {
                Some(number) => self.pad(&format!("{number:.3}")),
                None => self.pad(&value.to_string()),
            },
        }
    }

    fn pad(&self, text: &str) -> String {
        let width = self.width.max(self.head.chars().count());
        if self.is_text { format!("{text:<width$}") } else { format!("{text:>width$}") }
    }
}

impl Output {
    /// Returns an output of JSON or of tables. It shows the progress of `num_steps` measurements, unless it prints JSON
    /// or standard error is no terminal.
    #[must_use]
    pub fn new(is_json: bool, num_steps: usize) -> Self {
        let shows_progress = !is_json && std::io::stderr().is_terminal();
        Self { is_json, shows_progress, columns: None, num_steps, num_begun: 0 }
    }

    /// Shows that the next measurement begins.
    pub fn step(&mut self, what: impl Display) {
        self.num_begun += 1;
        if self.shows_progress {
            // Without a line end, so that the next text replaces it.
            say(&format!("\r\x1b[Kmeasuring {}/{}: {what}", self.num_begun, self.num_steps));
        }
    }

    /// Prints a line on standard error, also with JSON.
    pub fn note(&self, text: impl Display) {
        self.clear();
        say(&format!("{text}\n"));
    }

    /// Prints a line of text above a table. Does nothing with JSON.
    ///
    /// # Errors
    /// Standard output cannot be written.
    pub fn title(&mut self, text: impl Display) -> Result<()> {
        self.columns = None;
        if self.is_json { Ok(()) } else { self.print(&text.to_string()) }
    }

    /// Prints a row. The first row of a table gets the head above it.
    ///
    /// # Errors
    /// As for [`title`](Self::title).
    pub fn row(&mut self, columns: &'static [Column], line: &Value) -> Result<()> {
        if self.is_json {
            return self.print(&line.to_string());
        }
        if self.columns != Some(columns) {
            let gap = if self.columns.is_some() { "\n" } else { "" };
            self.columns = Some(columns);
            let head = columns.iter().map(|column| column.pad(column.head));
            self.print(&format!("{gap}{}", join(head)))?;
        }
        self.print(&join(columns.iter().map(|column| column.cell(line))))
    }

    /// Prints `text`, or `line` with JSON.
    ///
    /// # Errors
    /// As for [`title`](Self::title).
    pub fn sentence(&mut self, text: impl Display, line: &Value) -> Result<()> {
        self.columns = None;
        let text = if self.is_json { line.to_string() } else { text.to_string() };
        self.print(&text)
    }

    /// Prints a line and flushes it.
    fn print(&self, text: &str) -> Result<()> {
        self.clear();
        let mut out = std::io::stdout().lock();
        match writeln!(out, "{text}").and_then(|()| out.flush()) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(ClosedOutput.into()),
            written => written.context("cannot write to standard output"),
        }
    }

    fn clear(&self) {
        if self.shows_progress {
            say("\r\x1b[K");
        }
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Prints an error in one line and returns the exit status of the program. A closed standard output is no error, as
/// for any filter.
#[must_use]
pub fn end(ended: Result<()>) -> ExitCode {
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<ClosedOutput>() => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("error: {}\n", one_line(&error)));
            ExitCode::FAILURE
        }
    }
}

/// Returns an error and its causes in one line. Many messages quote their cause already, so each text occurs once.
fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if line.is_empty() {
            line = cause;
        } else if !line.contains(&cause) {
            line = format!("{line}: {cause}");
        }
    }
    line.replace('\n', " ")
}

fn join(cells: impl Iterator<Item = String>) -> String {
    cells.collect::<Vec<_>>().join(" ").trim_end().to_owned()
}

/// Prints to standard error. A failure cannot be reported anywhere.
fn say(text: &str) {
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}

/// The reader of standard output has closed it.
#[derive(Debug, thiserror::Error)]
#[error("the reader of standard output has closed it")]
struct ClosedOutput;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn cells_stand_below_their_heads() {
        let columns =
            [Column::text("bench", "/bench", 10), Column::number("µs p50", "/latency/p50_us", 9)];
        let head = join(columns.iter().map(|column| column.pad(column.head)));
        assert_eq!(head, "bench         µs p50");
        let row = |line: &Value| join(columns.iter().map(|column| column.cell(line)));
        assert_eq!(
            row(&json!({"bench": "rate", "latency": {"p50_us": 4.35}})),
            "rate           4.350"
        );
        assert_eq!(row(&json!({"bench": "rate", "latency": null})), "rate               -");
        let count = Column::number("objects", "/objects", 3);
        assert_eq!(count.cell(&json!({"objects": 12})), "     12");
    }

    #[test]
    fn an_error_is_one_line_with_each_cause_once() {
        let error = anyhow::anyhow!("refused\nby the host").context("cannot listen");
        assert_eq!(one_line(&error), "cannot listen: refused by the host");
        let error = anyhow::anyhow!("refused").context("cannot listen: refused");
        assert_eq!(one_line(&error), "cannot listen: refused");
    }
}
