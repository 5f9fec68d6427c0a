//! Bounded waits for other processes: a test that hangs gives no reason.

#![allow(dead_code, reason = "every test uses a part of it")]

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Output};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Limit for a process with little work, on any machine.
pub const LIMIT: Duration = Duration::from_secs(60);
/// Limit for a process that runs whole tests.
pub const LONG: Duration = Duration::from_secs(300);

/// The exit status of a child.
///
/// # Panics
/// When it does not end within `limit`; it is killed then.
pub fn status_of(child: &mut Child, what: &str, limit: Duration) -> ExitStatus {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait().expect("a child") {
            return status;
        }
        if Instant::now() >= deadline {
            // It may end by itself in this moment.
            let _ = child.kill();
            let _ = child.wait();
            panic!("{what} has not ended within {limit:?}");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// As [`status_of`], with the command's output.
///
/// # Panics
/// As [`status_of`], with the output until then.
pub fn output_of(command: &mut Command, what: &str, limit: Duration) -> Output {
    use std::process::Stdio;
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("a child");
    let outputs = [all_of(child.stdout.take()), all_of(child.stderr.take())];
    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        status_of(&mut child, what, limit)
    }));
    // A child of its own may still hold the other ends.
    let [stdout, stderr] = outputs.map(|output| output.recv_timeout(LIMIT).unwrap_or_default());
    match ended {
        Ok(status) => Output { status, stdout, stderr },
        Err(_) => {
            let outputs = [&stdout, &stderr].map(|bytes| String::from_utf8_lossy(bytes));
            panic!("{what} has not ended within {limit:?}: {}{}", outputs[0], outputs[1]);
        }
    }
}

/// The lines of a child's output, as they come, up to its end.
pub fn lines_of(stdout: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    lines
}

/// The text behind `mark` in the next line that contains it.
///
/// # Panics
/// When there is none within the limit, or before the end.
pub fn line_with(lines: &Receiver<String>, mark: &str) -> String {
    let deadline = Instant::now() + LIMIT;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match lines.recv_timeout(left) {
            Ok(line) => {
                if let Some((_, rest)) = line.split_once(mark) {
                    return rest.to_owned();
                }
            }
            Err(error) => panic!("the other process has not printed `{mark}`: {error}"),
        }
    }
}

fn all_of(pipe: Option<impl Read + Send + 'static>) -> Receiver<Vec<u8>> {
    let (sender, output) = channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            // Bytes before an error count.
            let _ = pipe.read_to_end(&mut bytes);
        }
        sender.send(bytes)
    });
    output
}
