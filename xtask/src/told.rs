//! Passes on what a command prints, and keeps the lines that tell why it failed, for the summary: of a long
//! log often only the end is at hand.

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, Read, Write};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// Runs a command to its end. Its output goes to ours; with it come the last lines of it that tell of a
/// failure.
pub fn run(command: &mut Command) -> Result<(ExitStatus, Vec<String>)> {
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {command:?}"))?;
    let kept = Arc::new(Mutex::new(Kept::default()));
    let (ended, ends) = mpsc::channel();
    if let Some(pipe) = child.stdout.take() {
        let (kept, ended) = (Arc::clone(&kept), ended.clone());
        thread::spawn(move || pass_on(pipe, std::io::stdout(), &kept, &ended));
    }
    if let Some(pipe) = child.stderr.take() {
        let kept = Arc::clone(&kept);
        thread::spawn(move || pass_on(pipe, std::io::stderr(), &kept, &ended));
    }
    let status = child.wait().with_context(|| format!("cannot wait for {command:?}"))?;
    let deadline = Instant::now() + Duration::from_secs(2);
    for _ in 0..2 {
        // Whoever it left behind may hold its output open.
        let _ = ends.recv_timeout(deadline.saturating_duration_since(Instant::now()));
    }
    let lines = kept.lock().unwrap_or_else(PoisonError::into_inner).lines.drain(..).collect();
    Ok((status, lines))
}

fn pass_on(pipe: impl Read, mut out: impl Write, kept: &Mutex<Kept>, ended: &Sender<()>) {
    let mut pipe = BufReader::new(pipe);
    let mut line = Vec::new();
    while pipe.read_until(b'\n', &mut line).is_ok_and(|len| len > 0) {
        // There is nobody to tell if our own output is closed.
        let _ = out.write_all(&line).and_then(|()| out.flush());
        kept.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .look_at(&String::from_utf8_lossy(&line));
        line.clear();
    }
    // Who waited for it may have gone on.
    let _ = ended.send(());
}

#[derive(Default)]
struct Kept {
    lines: VecDeque<String>,
}

impl Kept {
    fn look_at(&mut self, line: &str) {
        let line = line.trim();
        if !SIGNS.iter().any(|sign| line.contains(sign)) {
            return;
        }
        let line: String = line.chars().filter(|c| !c.is_control()).take(MAX_CHARS).collect();
        // Runners name a failed test once more at their end.
        self.lines.retain(|kept| *kept != line);
        self.lines.push_back(line);
        if self.lines.len() > MAX_LINES {
            self.lines.pop_front();
        }
    }
}

/// What tells of a failure: of nextest, of libtest, of panics, of compilers, of our scripts.
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
    fn lines_that_tell_of_a_failure_are_kept() {
        let script = "echo 'test a ... FAILED'; echo fine; echo 'error: that is wrong' >&2; exit 3";
        let (status, mut lines) = run(Command::new("sh").args(["-c", script])).unwrap();
        lines.sort();
        assert_eq!(status.code(), Some(3));
        assert_eq!(lines, ["error: that is wrong", "test a ... FAILED"]);
    }

    #[test]
    fn the_last_lines_are_kept_each_once() {
        let mut kept = Kept::default();
        for i in [0, 1, 2, 3, 4, 5, 6, 7, 4] {
            kept.look_at(&format!("\x1b[31mtest {i} FAILED\x1b[0m\n"));
        }
        let numbers: Vec<_> = kept.lines.iter().filter_map(|line| line.split(' ').nth(1)).collect();
        assert_eq!(numbers, ["2", "3", "5", "6", "7", "4"]);
        kept.look_at(&format!("error: {}", "x".repeat(1000)));
        assert_eq!(kept.lines.back().map(|line| line.len()), Some(MAX_CHARS));
    }

    #[test]
    fn a_command_whose_child_lives_on_ends_all_the_same() {
        let (status, lines) = run(Command::new("sh").args(["-c", "sleep 20 & exit 0"])).unwrap();
        assert!(status.success() && lines.is_empty());
    }
}
