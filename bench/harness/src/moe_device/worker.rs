//! Workers: processes of their own or threads of this process, each with one role. Processes exchange lines of
//! JSON through pipes, threads the same values through channels.
//!
//! A GPU serves processes in turns, and a client's kernels wait for answers. A server and a client that share a GPU
//! as processes would each wait for the end of the other's turn. So roles that share a GPU are threads.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};

use super::OpenTransports;
use super::roles::Role;
use super::wire::{Channels, Wire};

/// A running role. Dropping it ends the process, or waits up to [`PATIENCE`] for the thread.
pub(super) enum Worker {
    Process {
        child: Child,
        lines: Receiver<std::io::Result<String>>,
        input: ChildStdin,
    },
    Thread {
        input: Option<Sender<String>>,
        output: Receiver<Value>,
        thread: Option<JoinHandle<()>>,
    },
}

impl Worker {
    /// Starts a process for a role.
    pub(super) fn process(role: &Role) -> Result<Self> {
        let binary = std::env::current_exe().context("cannot find the path of this binary")?;
        let mut child = Command::new(binary)
            .env(ROLE, serde_json::to_string(role)?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start a process of the benchmark")?;
        let pipe = child.stdout.take().context("no pipe")?;
        let input = child.stdin.take().context("no pipe")?;
        let (read, lines) = channel();
        // Ends with the process.
        std::thread::Builder::new()
            .name("sy-bench-pipe".to_owned())
            .spawn(move || BufReader::new(pipe).lines().try_for_each(|line| read.send(line)))
            .context("cannot start a thread of the benchmark")?;
        Ok(Self::Process { child, lines, input })
    }

    /// Starts a thread for a role.
    pub(super) fn thread(role: Role, open: OpenTransports) -> Result<Self> {
        let (input, lines) = channel();
        let (out, output) = channel();
        let body = move || run_role(Ok(role), &mut Channels { input: lines, out }, open);
        let thread = std::thread::Builder::new()
            .name("sy-bench-role".to_owned())
            .spawn(move || drop(body()))
            .context("cannot start a thread of the benchmark")?;
        Ok(Self::Thread { input: Some(input), output, thread: Some(thread) })
    }

    /// Sends a request.
    pub(super) fn send(&mut self, line: &str) -> Result<()> {
        match self {
            Self::Process { input, .. } => writeln!(input, "{line}").context(GONE),
            Self::Thread { input, .. } => {
                let input = input.as_ref().context(GONE)?;
                input.send(line.to_owned()).ok().context(GONE)
            }
        }
    }

    /// Waits up to `limit` for the role's next value.
    pub(super) fn receive(&mut self, limit: Duration) -> Result<Value> {
        let late = |error| match error {
            RecvTimeoutError::Timeout => {
                anyhow!("a part of the benchmark was silent for {limit:?}")
            }
            RecvTimeoutError::Disconnected => anyhow!(GONE),
        };
        let value = match self {
            Self::Process { lines, .. } => {
                let line = lines.recv_timeout(limit).map_err(late)??;
                serde_json::from_str(&line)
                    .with_context(|| format!("a process of the benchmark wrote {line:?}"))?
            }
            Self::Thread { output, .. } => output.recv_timeout(limit).map_err(late)?,
        };
        match value["error"].as_str() {
            Some(error) => bail!("a part of the benchmark: {error}"),
            None => Ok(value),
        }
    }

    /// Sends a request and waits up to [`PATIENCE`] for the answer.
    pub(super) fn ask(&mut self, line: &str) -> Result<Value> {
        self.send(line)?;
        self.receive(PATIENCE)
    }

    /// Ends a process by SIGKILL.
    pub(super) fn kill(&mut self) -> Result<()> {
        match self {
            Self::Process { child, .. } => child.kill().context("cannot kill a server"),
            Self::Thread { .. } => bail!("a server that is a thread cannot be killed"),
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        match self {
            Self::Process { child, .. } => {
                let _ = child.kill();
                let _ = child.wait();
            }
            Self::Thread { input, thread, .. } => {
                *input = None;
                let limit = Instant::now() + PATIENCE;
                while thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
                    if Instant::now() >= limit {
                        tracing::error!("a part of the benchmark does not end");
                        return;
                    }
                    std::thread::sleep(Duration::from_millis(5));
                }
                if let Some(thread) = thread.take() {
                    // It has sent its error, if any.
                    let _ = thread.join();
                }
            }
        }
    }
}

/// Returns this process's role if it is a child.
pub(super) fn own_role() -> Option<Result<Role>> {
    let text = std::env::var(ROLE).ok()?;
    Some(serde_json::from_str(&text).map_err(Into::into))
}

/// Runs a role, and sends its error if it fails.
pub(super) fn run_role(
    role: Result<Role>,
    wire: &mut dyn Wire,
    open: OpenTransports,
) -> Result<()> {
    let done = role.and_then(|role| role.run(wire, open));
    if let Err(error) = &done {
        wire.send(&json!({ "error": format!("{error:#}") }));
    }
    done
}

const ROLE: &str = "SWITCHYARD_BENCH_MOE_ROLE";
const GONE: &str = "a part of the benchmark is gone";
/// Longest wait for a step that is not timed: start, loading, counts, end.
pub(super) const PATIENCE: Duration = Duration::from_secs(300);
