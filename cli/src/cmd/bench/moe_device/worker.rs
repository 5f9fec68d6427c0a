//! Who plays a role: a process of its own, or a thread of this one. They speak JSON lines, or as much
//! through channels.
//!
//! A GPU serves processes by turns, and a client's kernels wait for answers: a server and a client that
//! share a GPU as processes would wait out each other's turns. So roles that share one are threads.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};

use super::roles::Role;

/// The way from a role to whoever started it.
pub(super) trait Wire {
    /// Says something. Whoever started the role may be gone; then nobody listens.
    fn tell(&mut self, value: &Value);

    /// The next thing that is asked; `None` when there will be nothing more.
    fn next_line(&mut self) -> Result<Option<String>>;
}

/// A role that is being played, until this is dropped.
pub(super) enum Worker {
    Process { child: Child, lines: Receiver<std::io::Result<String>>, input: ChildStdin },
    Thread { input: Option<Sender<String>>, told: Receiver<Value>, thread: Option<JoinHandle<()>> },
}

/// Standard input and output of a child.
pub(super) struct Pipes;

struct Channels {
    input: Receiver<String>,
    out: Sender<Value>,
}

impl Worker {
    /// Starts a process for a role.
    pub(super) fn process(role: &Role) -> Result<Self> {
        let binary = std::env::current_exe().context("cannot tell the path of this binary")?;
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
    pub(super) fn thread(role: Role) -> Result<Self> {
        let (input, lines) = channel();
        let (out, told) = channel();
        let body = move || play(Ok(role), &mut Channels { input: lines, out });
        let thread = std::thread::Builder::new()
            .name("sy-bench-role".to_owned())
            .spawn(move || drop(body()))
            .context("cannot start a thread of the benchmark")?;
        Ok(Self::Thread { input: Some(input), told, thread: Some(thread) })
    }

    pub(super) fn say(&mut self, line: &str) -> Result<()> {
        match self {
            Self::Process { input, .. } => writeln!(input, "{line}").context(GONE),
            Self::Thread { input, .. } => {
                let input = input.as_ref().context(GONE)?;
                input.send(line.to_owned()).ok().context(GONE)
            }
        }
    }

    /// The next thing that the role tells, within `limit`.
    pub(super) fn hear(&mut self, limit: Duration) -> Result<Value> {
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
            Self::Thread { told, .. } => told.recv_timeout(limit).map_err(late)?,
        };
        match value["error"].as_str() {
            Some(error) => bail!("a part of the benchmark: {error}"),
            None => Ok(value),
        }
    }

    pub(super) fn ask(&mut self, line: &str) -> Result<Value> {
        self.say(line)?;
        self.hear(PATIENCE)
    }

    /// Ends a process as a crash would.
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
                    // What went wrong in it was told.
                    let _ = thread.join();
                }
            }
        }
    }
}

impl Wire for Pipes {
    fn tell(&mut self, value: &Value) {
        let mut out = std::io::stdout().lock();
        let _ = writeln!(out, "{value}");
        let _ = out.flush();
    }

    fn next_line(&mut self) -> Result<Option<String>> {
        Ok(std::io::stdin().lines().next().transpose()?)
    }
}

impl Wire for Channels {
    fn tell(&mut self, value: &Value) {
        let _ = self.out.send(value.clone());
    }

    fn next_line(&mut self) -> Result<Option<String>> {
        Ok(self.input.recv().ok())
    }
}

/// This process's role, where it is a child.
pub(super) fn own_role() -> Option<Result<Role>> {
    let text = std::env::var(ROLE).ok()?;
    Some(serde_json::from_str(&text).map_err(Into::into))
}

/// Plays a role, and tells how it failed if it did.
pub(super) fn play(role: Result<Role>, wire: &mut dyn Wire) -> Result<()> {
    let done = role.and_then(|role| role.play(wire));
    if let Err(error) = &done {
        wire.tell(&json!({ "error": format!("{error:#}") }));
    }
    done
}

const ROLE: &str = "SWITCHYARD_BENCH_MOE_ROLE";
const GONE: &str = "a part of the benchmark is gone";
/// For what takes no time by itself: begin, loading, counts, end.
pub(super) const PATIENCE: Duration = Duration::from_secs(300);
