//! What the benchmark programs print: a table, or with `--json` a line of JSON for each row of it, on standard
//! output; progress and errors on standard error.

use std::fmt::Display;
use std::io::{ErrorKind, IsTerminal as _, Write as _};
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use serde_json::Value;

/// A column of a table: where its figures are in a line of JSON, and how they look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Column {
    head: &'static str,
    /// Into the line: `/bench`, `/latency/p50_us`.
    pointer: &'static str,
    /// Characters at least; the head may need more.
    width: usize,
    is_text: bool,
}

/// Where figures go.
#[derive(Debug)]
pub struct Output {
    is_json: bool,
    shows_progress: bool,
    /// Of the table that the last line belongs to.
    columns: Option<&'static [Column]>,
    num_steps: usize,
    num_begun: usize,
}

impl Column {
    /// Words, on the left of the column.
    #[must_use]
    pub const fn text(head: &'static str, pointer: &'static str, width: usize) -> Self {
        Self { head, pointer, width, is_text: true }
    }

    /// Numbers, on the right; those that are not whole with three decimals.
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
    /// JSON or tables; of `num_steps` measurements the progress is shown, except with JSON and where standard
    /// error is no terminal.
    #[must_use]
    pub fn new(is_json: bool, num_steps: usize) -> Self {
        let shows_progress = !is_json && std::io::stderr().is_terminal();
        Self { is_json, shows_progress, columns: None, num_steps, num_begun: 0 }
    }

    /// The next measurement begins.
    pub fn step(&mut self, what: impl Display) {
        self.num_begun += 1;
        if self.shows_progress {
            // Without an end of line: the next text takes its place.
            say(&format!("\r\x1b[Kmeasuring {}/{}: {what}", self.num_begun, self.num_steps));
        }
    }

    /// A line on standard error, also with JSON.
    pub fn note(&self, text: impl Display) {
        self.clear();
        say(&format!("{text}\n"));
    }

    /// A line of text above a table; not with JSON.
    ///
    /// # Errors
    /// A standard output that cannot be written.
    pub fn title(&mut self, text: impl Display) -> Result<()> {
        self.columns = None;
        if self.is_json { Ok(()) } else { self.print(&text.to_string()) }
    }

    /// A row of figures, with the head above it where a table begins.
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

    /// Figures that people read as a sentence, and programs as a line of JSON.
    ///
    /// # Errors
    /// As for [`title`](Self::title).
    pub fn sentence(&mut self, text: impl Display, line: &Value) -> Result<()> {
        self.columns = None;
        let text = if self.is_json { line.to_string() } else { text.to_string() };
        self.print(&text)
    }

    /// A whole line, at once: others read along.
    fn print(&self, text: &str) -> Result<()> {
        self.clear();
        let mut out = std::io::stdout().lock();
        match writeln!(out, "{text}").and_then(|()| out.flush()) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(NobodyReads.into()),
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

/// The exit status of a program, after its error in one line. When nobody reads the figures any more, it ends
/// without a word, as a filter should.
#[must_use]
pub fn end(ended: Result<()>) -> ExitCode {
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<NobodyReads>() => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("error: {}\n", one_line(&error)));
            ExitCode::FAILURE
        }
    }
}

/// An error and its causes, each once: many messages quote their cause already.
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

/// To standard error, if it can be written: there is nowhere left to report that to.
fn say(text: &str) {
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}

/// Whoever read standard output has gone.
#[derive(Debug, thiserror::Error)]
#[error("nobody reads standard output any more")]
struct NobodyReads;

#[cfg(all(test, not(loom)))]
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
