//! Passes on a command's output, and keeps the lines that explain a failure. The summary repeats them, because of a
//! long log often only the end is kept.
//!
//! A process that the command leaves behind may print for two more seconds; its output may be lost after that.
//! Lines of the two outputs may change places with each other.

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, Read, Write};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// Runs a command to its end. Returns its status and the last lines of its output that name a failure.
pub fn run(command: &mut Command) -> Result<(ExitStatus, Vec<String>)> {
    run_into(command, std::io::stdout(), std::io::stderr())
}

/// As [`run`], with `prefix` before each line.
pub fn run_with_prefix(
    command: &mut Command,
    prefix: &'static str,
) -> Result<(ExitStatus, Vec<String>)> {
    let (out, err) = (std::io::stdout(), std::io::stderr());
    run_into(command, Prefixed { prefix, to: out }, Prefixed { prefix, to: err })
}

/// Writes whole lines, each with a prefix.
struct Prefixed<W> {
    prefix: &'static str,
    to: W,
}

impl<W: Write> Write for Prefixed<W> {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        // One write, so that no other output comes in between.
        self.to.write_all(&[b"[", self.prefix.as_bytes(), b"] ", line].concat())?;
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.to.flush()
    }
}

fn run_into(
    command: &mut Command,
    out: impl Write + Send + 'static,
    err: impl Write + Send + 'static,
) -> Result<(ExitStatus, Vec<String>)> {
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {command:?}"))?;
    let failures = Arc::new(Mutex::new(Failures::default()));
    let (ended, ends) = mpsc::channel();
    if let Some(pipe) = child.stdout.take() {
        let (failures, ended) = (Arc::clone(&failures), ended.clone());
        thread::spawn(move || forward(pipe, out, &failures, &ended));
    }
    if let Some(pipe) = child.stderr.take() {
        let failures = Arc::clone(&failures);
        thread::spawn(move || forward(pipe, err, &failures, &ended));
    }
    let status = child.wait().with_context(|| format!("cannot wait for {command:?}"))?;
    let deadline = Instant::now() + Duration::from_secs(2);
    for _ in 0..2 {
        // A process that the command left behind may hold its output open.
        let _ = ends.recv_timeout(deadline.saturating_duration_since(Instant::now()));
    }
    let lines = failures.lock().unwrap_or_else(PoisonError::into_inner).lines.drain(..).collect();
    Ok((status, lines))
}

fn forward(pipe: impl Read, mut out: impl Write, failures: &Mutex<Failures>, ended: &Sender<()>) {
    let mut pipe = BufReader::new(pipe);
    let mut line = Vec::new();
    while pipe.read_until(b'\n', &mut line).is_ok_and(|len| len > 0) {
        // If our own output is closed, there is no place for an error either.
        let _ = out.write_all(&line).and_then(|()| out.flush());
        failures
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .look_at(&String::from_utf8_lossy(&line));
        line.clear();
    }
    // The receiver is gone after its two seconds.
    let _ = ended.send(());
}

/// The last lines that name a failure, each once.
#[derive(Default)]
struct Failures {
    lines: VecDeque<String>,
}

impl Failures {
    fn look_at(&mut self, line: &str) {
        let line = without_colours(line);
        let line = line.trim();
        if !SIGNS.iter().any(|sign| line.contains(sign)) {
            return;
        }
        let line: String = line.chars().filter(|c| !c.is_control()).take(MAX_CHARS).collect();
        // Runners name a failed test once more at their end.
        self.lines.retain(|earlier| *earlier != line);
        self.lines.push_back(line);
        if self.lines.len() > MAX_LINES {
            self.lines.pop_front();
        }
    }
}

/// A line without the sequences that set colours, `ESC [ … letter`.
fn without_colours(line: &str) -> String {
    let mut parts = line.split('\u{1b}');
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |plain, part| {
        let end = part.find(|c: char| c.is_ascii_alphabetic()).map_or(part.len(), |at| at + 1);
        plain + part.get(end..).unwrap_or_default()
    })
}

/// Signs of a failure: of nextest, of libtest, of panics, of compilers, of our scripts.
const SIGNS: [&str; 9] = [
    "FAIL ",
    "FAILED",
    "TIMEOUT ",
    "SIGABRT",
    "SIGSEGV",
    "SIGKILL",
    "panicked at",
    "error: ",
    "error[",
];
const MAX_LINES: usize = 6;
const MAX_CHARS: usize = 240;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_name_a_failure_are_kept() {
        let script = "echo 'test a ... FAILED'; echo fine; echo 'error: that is wrong' >&2; exit 3";
        let mut command = Command::new("sh");
        let (out, err) = (Sink::default(), Sink::default());
        let (status, mut lines) =
            run_into(command.args(["-c", script]), out.clone(), err.clone()).unwrap();
        lines.sort();
        assert_eq!(status.code(), Some(3));
        assert_eq!(lines, ["error: that is wrong", "test a ... FAILED"]);
        assert_eq!(out.text(), "test a ... FAILED\nfine\n");
        assert_eq!(err.text(), "error: that is wrong\n");
    }

    #[test]
    fn lines_of_commands_side_by_side_have_a_prefix() {
        let out = Sink::default();
        let prefixed = Prefixed { prefix: "a", to: out.clone() };
        let mut command = Command::new("sh");
        run_into(command.args(["-c", "echo one; echo two"]), prefixed, Sink::default()).unwrap();
        assert_eq!(out.text(), "[a] one\n[a] two\n");
    }

    #[test]
    fn the_last_lines_are_kept_each_once() {
        let mut failures = Failures::default();
        for i in [0, 1, 2, 3, 4, 5, 6, 7, 4] {
            failures.look_at(&format!("\u{1b}[31;1mFAIL\u{1b}[0m [ 0.{i}s] test {i}\n"));
        }
        let line = |i: u32| format!("FAIL [ 0.{i}s] test {i}");
        assert_eq!(failures.lines, [2, 3, 5, 6, 7, 4].map(line));
        failures.look_at(&format!("\u{1b}[91merror\u{1b}[0m\u{1b}[1m: {}", "x".repeat(1000)));
        assert_eq!(failures.lines.back().map(String::len), Some(MAX_CHARS));
    }

    #[test]
    fn a_command_whose_child_lives_on_ends_all_the_same() {
        let out = Sink::default();
        let script = "sleep 60 & echo $!";
        let (status, lines) =
            run_into(Command::new("sh").args(["-c", script]), out.clone(), Sink::default())
                .unwrap();
        assert!(status.success() && lines.is_empty());
        // If the run had waited for the end of the output, the child would be dead.
        let ended = Command::new("kill").arg(out.text().trim()).status().unwrap();
        assert!(ended.success(), "the child has died");
    }

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Sink {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
}
