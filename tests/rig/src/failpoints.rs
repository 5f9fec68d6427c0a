//! Arming failpoints in this process.
//!
//! A list of entries `TARGET|NAME=ACTION`, separated by semicolons or lines. The target is the name of an
//! expert server, `client`, or `*`. The action is one of the crate `fail` (`return`, `sleep(20)`,
//! `5%pause`, …), or `kill(N)`: the process kills itself with SIGKILL when it passes the point the N-th time.

use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, bail};
use rustix::process::{Signal, getpid, kill_process};

/// Environment variable that carries the list to servers; `@PATH` names a file that holds it.
pub const ENV: &str = "SWITCHYARD_TEST_FAILPOINTS";

/// Every failpoint of an expert server at which a process may die.
pub const OF_SERVERS: [&str; 8] = [
    "server::after_accept",
    "server::after_copy_before_release",
    "server::after_release",
    "server::before_compute",
    "server::in_tick",
    "server::after_compute",
    "server::between_payload_and_publish",
    "server::after_publish",
];

/// Every failpoint of a client at which a process may die.
pub const OF_CLIENTS: [&str; 3] = [
    "client::between_payload_and_publish",
    "client::after_response_before_credit",
    "client::before_resend",
];

/// Arms the entries of `list` that are for `target`. They stay armed as long as the process lives.
///
/// # Errors
/// When the list cannot be read, or this build has no failpoints.
pub fn arm(list: &str, target: &str) -> Result<()> {
    let list = match list.strip_prefix('@') {
        Some(path) => std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the failpoints in {path}"))?,
        None => list.to_owned(),
    };
    for entry in list.split([';', '\n']).map(str::trim).filter(|entry| !entry.is_empty()) {
        let (wanted, (name, action)) = entry
            .split_once('|')
            .and_then(|(wanted, rest)| Some((wanted, rest.split_once('=')?)))
            .with_context(|| format!("failpoint `{entry}` is not TARGET|NAME=ACTION"))?;
        if wanted != "*" && wanted != target {
            continue;
        }
        if !fail::has_failpoints() {
            bail!("this build has no failpoints: build switchyard-tests with its default features");
        }
        match action.strip_prefix("kill(").and_then(|rest| rest.strip_suffix(')')) {
            Some(count) => {
                let count: u64 = count.parse().with_context(|| format!("no count in `{entry}`"))?;
                kill_at(name, count)?;
            }
            None => fail::cfg(name, action)
                .map_err(|error| anyhow::anyhow!("failpoint `{entry}`: {error}"))?,
        }
    }
    Ok(())
}

fn kill_at(name: &str, count: u64) -> Result<()> {
    let passed = AtomicU64::new(0);
    let pass = move || {
        if passed.fetch_add(1, Ordering::Relaxed) + 1 == count {
            // Not an exit: the process must not clean up. No code is left to handle a failure.
            let _ = kill_process(getpid(), Signal::KILL);
        }
    };
    fail::cfg_callback(name, pass).map_err(|error| anyhow::anyhow!("failpoint `{name}`: {error}"))
}
