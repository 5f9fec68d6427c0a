//! `switchyard rollout`: restarts the servers of a fleet one after the other.
//!
//! ```text
//!   for each server: wait until the fleet is complete
//!                    ─▶ drain it ─▶ --restart COMMAND, or its supervisor ─▶ wait for a new process of its name
//!   at the end:      wait until the fleet is complete
//! ```
//!
//! The plan and its progress lie in a file, if the caller names one, so that a rollout that was interrupted goes on
//! with the servers that are left.

mod state;

use std::fmt;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use control_api::trust::tls::is_valid_name;
use control_api::{
    ClusterStatus, ControlClient, ControlError, DrainRequest, MemberInfo, MemberState,
    PlacementTable,
};

use crate::{Global, ui};
use state::{Plan, Step};

/// Options of `rollout`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Servers to restart, in this order. Default: all, by name.
    servers: Vec<String>,
    /// Shell command that restarts a server after its drain, such as `kubectl delete pod -- "$SWITCHYARD_ROLLOUT_SERVER"`.
    /// It finds the server's name in SWITCHYARD_ROLLOUT_SERVER and its address in SWITCHYARD_ROLLOUT_ADDR. Without a
    /// command, servers must run with --exit-when-drained under a supervisor that starts them again.
    #[arg(long, env = "SWITCHYARD_ROLLOUT_RESTART", value_name = "COMMAND")]
    restart: Option<String>,
    /// Longest wait in seconds for each of: a complete fleet, the restart command, a server's new process.
    #[arg(long, env = "SWITCHYARD_ROLLOUT_WAIT_S", default_value_t = 300)]
    wait_s: u64,
    /// File for the plan and its progress. With the file of a rollout that was interrupted, servers that have been
    /// restarted are left out. It is removed at the end.
    #[arg(long, env = "SWITCHYARD_ROLLOUT_STATE", value_name = "FILE")]
    state: Option<std::path::PathBuf>,
    /// Drain servers even if experts have no other replica meanwhile.
    #[arg(
        long,
        env = "SWITCHYARD_ROLLOUT_FORCE",
        value_parser = clap::builder::FalseyValueParser::new()
    )]
    force: bool,
    #[command(flatten)]
    control: super::ControlArgs,
}

/// Exit code of a rollout that ran out of time. The same command goes on.
const TIMEOUT_EXIT_CODE: u8 = 3;

pub fn run(global: &Global, args: Args) -> Result<ExitCode> {
    let url = &args.control.required_url()?;
    let client = args.control.client(url)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let rollout = Rollout { json: global.json, client, wait: Duration::from_secs(args.wait_s) };
    match runtime.block_on(rollout.run(&args)) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) if error.is::<Timeout>() => {
            ui::write_err(format_args!("error: {}\n", ui::one_line(&error)));
            Ok(ExitCode::from(TIMEOUT_EXIT_CODE))
        }
        Err(error) => Err(error),
    }
}

/// A wait of a rollout has ended without success.
#[derive(Debug)]
struct Timeout {
    what: String,
    last: String,
    bound: Duration,
}

impl fmt::Display for Timeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, last, bound } = self;
        write!(
            f,
            "{what} within {} s ({last}): fix the cause and run the same command again",
            bound.as_secs()
        )
    }
}

impl std::error::Error for Timeout {}

struct Rollout {
    json: bool,
    client: ControlClient,
    /// Bound of each wait.
    wait: Duration,
}

impl Rollout {
    async fn run(&self, args: &Args) -> Result<()> {
        let members = self.client.members().await?;
        let mut plan = match &args.state {
            Some(file) => Plan::open(file, &members, &args.servers)?,
            None => Plan::new(&members, &args.servers)?,
        };
        if args.restart.is_some() {
            check_names(&plan)?;
        }
        let total = plan.steps.len();
        for idx in 0..total {
            let step = plan.steps[idx].clone();
            if !step.is_done {
                self.restart(&step, args).await?;
                plan.steps[idx].is_done = true;
                plan.save()?;
            }
            self.report("restarted", &step.name, Some((idx + 1, total)))?;
        }
        self.until_complete().await?;
        plan.remove();
        self.report("done", "the fleet is complete", None)
    }

    /// Restarts one server.
    async fn restart(&self, step: &Step, args: &Args) -> Result<()> {
        let member = self.find(&step.name).await?;
        // Of an interrupted rollout, the new process may be there already.
        if member.as_ref().is_some_and(|member| member.incarnation != step.incarnation) {
            return self.until_replaced(step).await;
        }
        let mut addr = String::new();
        if let Some(member) = member {
            addr.clone_from(&member.data_addr);
            if !matches!(member.state, MemberState::Draining | MemberState::Expired) {
                if !args.force {
                    self.report("waiting", "for a complete fleet", None)?;
                    self.until_complete().await?;
                    check_replicas(&step.name, &self.client.placement().await?)?;
                }
                self.report("draining", &step.name, None)?;
                let request = DrainRequest { incarnation: Some(step.incarnation) };
                let drained =
                    self.patient(async || self.client.drain(&member.member_id, &request).await);
                if let Err(error) = drained.await {
                    // The request may have been carried out all the same.
                    self.take_back(step).await;
                    return Err(error);
                }
            }
        }
        let restarted = match &args.restart {
            Some(command) => self.run_command(command, &step.name, &addr).await,
            None => Ok(()),
        };
        let restarted = match restarted {
            Ok(()) => self.until_replaced(step).await,
            failed => failed,
        };
        if restarted.is_err() {
            self.take_back(step).await;
        }
        restarted
    }

    /// Returns a server that was drained and still runs to the placement.
    async fn take_back(&self, step: &Step) {
        let member = self.find(&step.name).await.ok().flatten();
        let still = |member: &MemberInfo| {
            member.incarnation == step.incarnation && member.state == MemberState::Draining
        };
        if let Some(member) = member.filter(still)
            && let Err(error) = self.client.resume(&member.member_id).await
        {
            let name = &step.name;
            ui::write_err(format_args!("warning: {name} is still drained: {error}\n"));
        }
    }

    /// Waits until another process serves under the server's name.
    async fn until_replaced(&self, step: &Step) -> Result<()> {
        let mut has_left = false;
        let until = Instant::now() + self.wait;
        loop {
            let (is_new, state) = match self.find(&step.name).await? {
                Some(member) => (member.incarnation != step.incarnation, member.state.to_string()),
                None => (false, "gone".to_owned()),
            };
            if is_new && state == MemberState::Serving.as_str() {
                return Ok(());
            }
            if !has_left && (is_new || state != MemberState::Draining.as_str()) {
                has_left = true;
                self.report("left", &step.name, None)?;
            }
            self.pause(until, || {
                let name = &step.name;
                (format!("no new process serves as {name}"), format!("{name} is {state}"))
            })
            .await?;
        }
    }

    /// Waits until every expert has as many replicas as planned.
    async fn until_complete(&self) -> Result<()> {
        let until = Instant::now() + self.wait;
        loop {
            let status = self.patient(async || self.client.status().await).await?;
            if is_complete(&status) {
                return Ok(());
            }
            self.pause(until, || {
                let (without, few) =
                    (status.experts_without_replica, status.experts_under_replicated);
                let last = format!("{without} experts without a replica, {few} with too few");
                ("the fleet was not complete".to_owned(), last)
            })
            .await?;
        }
    }

    /// Runs the operator's command and waits for its end.
    async fn run_command(&self, command: &str, server: &str, addr: &str) -> Result<()> {
        self.report("restarting", server, None)?;
        let mut shell = Command::new("sh");
        shell.args(["-c", command]).stdin(Stdio::null()).stdout(Stdio::null());
        shell.env("SWITCHYARD_ROLLOUT_SERVER", server).env("SWITCHYARD_ROLLOUT_ADDR", addr);
        let mut child = Reaped(shell.spawn().context("cannot run sh for --restart")?);
        let until = Instant::now() + self.wait;
        loop {
            if let Some(status) = child.0.try_wait().context("cannot wait for --restart")? {
                match status.success() {
                    true => return Ok(()),
                    false => bail!("the command of --restart for {server} failed: {status}"),
                }
            }
            self.pause(until, || {
                (format!("the command of --restart for {server} did not end"), "it runs".to_owned())
            })
            .await?;
        }
    }

    async fn find(&self, name: &str) -> Result<Option<MemberInfo>> {
        let members = self.patient(async || self.client.members().await).await?;
        Ok(members.into_iter().find(|member| member.name == name))
    }

    /// Repeats a request while the control plane restarts or is busy, for the bound of a wait at most.
    async fn patient<T>(&self, request: impl AsyncFn() -> Result<T, ControlError>) -> Result<T> {
        let until = Instant::now() + self.wait;
        loop {
            match request().await {
                Err(error) if error.is_transient() && Instant::now() < until => {
                    tokio::time::sleep(POLL).await;
                }
                answer => return Ok(answer?),
            }
        }
    }

    /// Sleeps for a moment, or fails if `until` has passed.
    async fn pause(
        &self,
        until: Instant,
        describe: impl FnOnce() -> (String, String),
    ) -> Result<()> {
        if Instant::now() >= until {
            let (what, last) = describe();
            return Err(Timeout { what, last, bound: self.wait }.into());
        }
        tokio::time::sleep(POLL).await;
        Ok(())
    }

    fn report(&self, event: &str, subject: &str, count: Option<(usize, usize)>) -> Result<()> {
        if self.json {
            let (number, total) = count.unzip();
            let line = serde_json::json!({
                "event": event, "subject": subject, "number": number, "total": total,
            });
            ui::print_json_line(&line)?;
        } else {
            match count {
                Some((number, total)) => outln!("{event} {subject} ({number} of {total})"),
                None => outln!("{event} {subject}"),
            }
        }
        Ok(())
    }
}

/// A child process that ends with its owner.
struct Reaped(Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        // Errors mean that it has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn is_complete(status: &ClusterStatus) -> bool {
    let is_served = status.model.is_some() && status.members.serving > 0;
    is_served && status.experts_without_replica == 0 && status.experts_under_replicated == 0
}

/// Refuses names that the operator's command could take for options. Control planes of this version admit none.
fn check_names(plan: &Plan) -> Result<()> {
    match plan.steps.iter().find(|step| !is_valid_name(&step.name)) {
        Some(step) => bail!(
            "a server has the name {:?}, which a command could take for something else: remove it, or name the servers \
             to restart",
            step.name
        ),
        None => Ok(()),
    }
}

/// Checks that every expert of the server is on another server too.
fn check_replicas(name: &str, table: &PlacementTable) -> Result<()> {
    let Some((layer, expert)) = super::drain::sole_expert(name, table) else { return Ok(()) };
    bail!(
        "expert {expert} of layer {layer} is on {name} alone, so calls would fail while it restarts: use 2 or more \
         replicas, or --force"
    )
}

const POLL: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests;
