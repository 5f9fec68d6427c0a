//! A cluster of processes on this host: one control plane and some expert servers.
//!
//! Every process runs the `switchyard` binary. The kernel kills the children when their parent ends, so no
//! process is left behind. The parent must start them from a thread that lives as long as the cluster,
//! because the kernel ties a child to the thread that started it.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use control_api::Security;
use control_api::trust::Role;
use control_api::trust::certs::{Authority, CA_FILE, Request, validity_from_now};
use control_api::trust::tls::{ClientCertificates, Tls, TlsFiles};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// Options of a local cluster.
#[derive(Debug, Clone)]
pub struct ClusterOptions {
    /// The `switchyard` binary.
    pub binary: PathBuf,
    /// Checkpoint folder.
    pub model: PathBuf,
    /// Expert servers to start.
    pub num_servers: usize,
    /// Replicas of each expert, on distinct servers.
    pub replicas: usize,
    /// Compute threads per server; `None` leaves the choice to the server.
    pub threads: Option<usize>,
    /// Time to live of a member's lease.
    pub lease_ttl: Duration,
    /// More arguments for each expert server.
    pub server_args: Vec<String>,
    /// More environment variables for each expert server.
    pub server_env: Vec<(String, String)>,
    /// More arguments for the control plane.
    pub control_args: Vec<String>,
    /// Gives the cluster a certificate authority of its own, in memory, and runs everything over TLS.
    pub tls: bool,
    /// Folder of the control plane's durable state. `None` keeps the state in memory.
    pub data_dir: Option<PathBuf>,
    /// Timeout for the start of one process.
    pub start_timeout: Duration,
}

impl ClusterOptions {
    /// Options with the defaults of the demo: 4 servers, every expert on 2 of them.
    ///
    /// # Errors
    /// When the path of this binary is unknown.
    pub fn new(model: impl Into<PathBuf>) -> Result<Self> {
        Ok(Self {
            binary: std::env::current_exe().context("cannot find the path of this binary")?,
            model: model.into(),
            num_servers: 4,
            replicas: 2,
            threads: None,
            lease_ttl: Duration::from_secs(2),
            server_args: Vec::new(),
            server_env: Vec::new(),
            control_args: Vec::new(),
            tls: false,
            data_dir: None,
            start_timeout: Duration::from_secs(120),
        })
    }
}

/// A running child with the tail of what it wrote to standard error.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    lines: Receiver<String>,
    stderr_tail: Arc<Mutex<StderrTail>>,
}

/// The last lines that a child wrote to standard error.
#[derive(Debug, Default)]
struct StderrTail {
    lines: VecDeque<String>,
    /// True after the child has closed its standard error.
    is_complete: bool,
}

/// A running cluster. Dropping it kills every process.
#[derive(Debug)]
pub struct LocalCluster {
    options: ClusterOptions,
    token: String,
    control: Option<Process>,
    control_addr: String,
    servers: Vec<Option<Process>>,
    tls: Option<ClusterTls>,
}

/// Certificates of a local cluster.
#[derive(Debug)]
struct ClusterTls {
    /// The folder of all processes, removed with the cluster. Nothing but the certificate of the authority is kept of
    /// the authority.
    dir: TempDir,
    /// Trusts the authority.
    client: Tls,
}

impl ClusterTls {
    fn new() -> Result<Self> {
        let dir = TempDir::with_prefix("switchyard-").context("cannot make a folder for keys")?;
        let (not_before, not_after) = validity_from_now(CERTIFICATE_DAYS);
        let request = Request {
            name: "local-cluster".to_owned(),
            role: Role::Server,
            addresses: ["127.0.0.1", "::1", "localhost"].map(str::to_owned).to_vec(),
            not_before,
            not_after,
        };
        Authority::generate()?.issue_into(dir.path(), &request, false)?;
        let ca = Some(dir.path().join(CA_FILE));
        let files = TlsFiles { ca, ..TlsFiles::default() };
        Ok(Self { dir, client: Tls::open(files, ClientCertificates::Optional)? })
    }
}

impl LocalCluster {
    /// Starts a control plane and all servers, and waits until every expert has its replicas. Calls
    /// `progress` with the number of serving servers.
    ///
    /// # Errors
    /// When a process ends or does not start before [`ClusterOptions::start_timeout`]. The error quotes its
    /// standard error.
    pub fn start(options: ClusterOptions, progress: &mut dyn FnMut(usize)) -> Result<Self> {
        if options.num_servers == 0 || options.replicas == 0 {
            bail!("a cluster needs at least one server and one replica");
        }
        if options.replicas > options.num_servers {
            bail!(
                "{} replicas of each expert need at least as many servers, but there are {}",
                options.replicas,
                options.num_servers
            );
        }
        let mut cluster = Self {
            token: format!("{:032x}", rand::random::<u128>()),
            control: None,
            control_addr: String::new(),
            servers: (0..options.num_servers).map(|_| None).collect(),
            tls: options.tls.then(ClusterTls::new).transpose()?,
            options,
        };
        cluster.start_control("127.0.0.1:0")?;
        for server_idx in 0..cluster.options.num_servers {
            cluster.start_server(server_idx)?;
        }
        for server_idx in 0..cluster.options.num_servers {
            cluster.wait_serving_among_all(server_idx)?;
            progress(server_idx + 1);
        }
        Ok(cluster)
    }

    /// URL of the control plane.
    #[must_use]
    pub fn control_url(&self) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.control_addr)
    }

    /// Security of a client of this cluster.
    #[must_use]
    pub fn security(&self) -> Security {
        Security { tls: self.tls.as_ref().map(|tls| tls.client.clone()), insecure: false }
    }

    /// The bearer token of this cluster.
    #[must_use]
    pub fn token(&self) -> &str {
        &self.token
    }

    /// Name of a server, as the control plane shows it.
    #[must_use]
    pub fn server_name(server_idx: usize) -> String {
        format!("server-{server_idx}")
    }

    /// Process id of a running server.
    #[must_use]
    pub fn server_pid(&self, server_idx: usize) -> Option<u32> {
        Some(self.servers.get(server_idx)?.as_ref()?.child.id())
    }

    /// Indices of the started servers that were not killed.
    #[must_use]
    pub fn running(&self) -> Vec<usize> {
        (0..self.servers.len()).filter(|&idx| self.servers[idx].is_some()).collect()
    }

    /// Starts server `server_idx`. Does not wait until it is serving.
    ///
    /// # Errors
    /// When the process cannot be started.
    pub fn start_server(&mut self, server_idx: usize) -> Result<()> {
        let model = self.options.model.clone();
        self.start_server_with(server_idx, &model)
    }

    /// As [`start_server`](Self::start_server), with another checkpoint folder. The index behind the last server adds a
    /// server.
    ///
    /// # Errors
    /// When the process cannot be started.
    pub fn start_server_with(&mut self, server_idx: usize, model: &Path) -> Result<()> {
        let name = Self::server_name(server_idx);
        let mut command = self.command("expert-server");
        command
            .arg("--model")
            .arg(model)
            .args(["--name", &name, "--control-plane", &self.control_url()])
            .args(["--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"])
            .args(&self.options.server_args)
            .envs(self.options.server_env.iter().map(|(key, value)| (key, value)));
        if let Some(threads) = self.options.threads {
            command.args(["--threads", &threads.to_string()]);
        }
        let process = Process::spawn(name, &mut command)?;
        if server_idx == self.servers.len() {
            self.servers.push(None);
        }
        let num_servers = self.servers.len();
        let place = self.servers.get_mut(server_idx);
        *place.with_context(|| format!("server {server_idx} of {num_servers}"))? = Some(process);
        Ok(())
    }

    /// Waits until a started server reports that it is serving.
    ///
    /// # Errors
    /// When it ends, or does not report before [`ClusterOptions::start_timeout`].
    pub fn wait_serving(&mut self, server_idx: usize) -> Result<()> {
        let timeout = self.options.start_timeout;
        let process = self.servers[server_idx]
            .as_mut()
            .ok_or_else(|| anyhow!("{} is not running", Self::server_name(server_idx)))?;
        process.wait_event("serving", timeout).map(drop)
    }

    /// As [`wait_serving`](Self::wait_serving), but fails as soon as any process ends. No server is serving
    /// before all have registered, so one failed process stops the others, and its error is the cause.
    fn wait_serving_among_all(&mut self, server_idx: usize) -> Result<()> {
        let deadline = Instant::now() + self.options.start_timeout;
        loop {
            if let Some(process) = &mut self.servers[server_idx]
                && process.next_event("serving", Duration::from_millis(50))?.is_some()
            {
                return Ok(());
            }
            for process in self.servers.iter_mut().flatten().chain(&mut self.control) {
                process.check_running()?;
            }
            if Instant::now() >= deadline {
                return Err(match &self.servers[server_idx] {
                    Some(process) => process.is_late("serving", self.options.start_timeout),
                    None => anyhow!("{} is not running", Self::server_name(server_idx)),
                });
            }
        }
    }

    /// Kills a server with SIGKILL and returns the time of the kill.
    ///
    /// # Errors
    /// When it is not running.
    pub fn kill_server(&mut self, server_idx: usize) -> Result<Instant> {
        let mut process = self.take(server_idx)?;
        let at = Instant::now();
        process.child.kill().with_context(|| format!("cannot kill {}", process.name))?;
        // Reap the process on another thread, because the caller may be measuring time.
        std::thread::spawn(move || process.child.wait());
        Ok(at)
    }

    /// Stops a server's threads (SIGSTOP) or continues them (SIGCONT).
    ///
    /// # Errors
    /// When it is not running.
    pub fn freeze_server(&self, server_idx: usize, frozen: bool) -> Result<()> {
        self.signal(server_idx, if frozen { Signal::STOP } else { Signal::CONT })
    }

    /// Asks a server to drain and leave (SIGTERM), and waits up to `timeout` for its end.
    ///
    /// # Errors
    /// When it is not running, does not end before the timeout, or ends with an error.
    pub fn drain_server(&mut self, server_idx: usize, timeout: Duration) -> Result<()> {
        self.signal(server_idx, Signal::TERM)?;
        let mut process = self.take(server_idx)?;
        match process.wait_exit(timeout)? {
            status if status.success() => Ok(()),
            status => {
                bail!("{} ended with {status}{}", process.name, stderr_suffix(&process.tail()))
            }
        }
    }

    /// Kills the control plane with SIGKILL.
    ///
    /// # Errors
    /// When it is not running.
    pub fn kill_control(&mut self) -> Result<()> {
        let mut process =
            self.control.take().ok_or_else(|| anyhow!("the control plane is not running"))?;
        process.child.kill().context("cannot kill the control plane")?;
        process.child.wait().context("cannot reap the control plane")?;
        Ok(())
    }

    /// Restarts the control plane on its old address.
    ///
    /// # Errors
    /// When it does not start.
    pub fn restart_control(&mut self) -> Result<()> {
        let addr = self.control_addr.clone();
        self.start_control(&addr)
    }

    fn start_control(&mut self, listen: &str) -> Result<()> {
        let mut command = self.command("control-plane");
        command
            .args(["--listen", listen])
            .args(["--servers", &self.options.num_servers.to_string()])
            .args(["--replicas", &self.options.replicas.to_string()])
            .args(["--lease-ttl-ms", &self.options.lease_ttl.as_millis().to_string()]);
        command.args(&self.options.control_args);
        if let Some(dir) = &self.options.data_dir {
            command.arg("--data-dir").arg(dir);
        }
        let mut process = Process::spawn("control-plane".to_owned(), &mut command)?;
        let event = process.wait_event("listening", self.options.start_timeout)?;
        let addr = event["addr"].as_str().context("the control plane reported no address")?;
        addr.clone_into(&mut self.control_addr);
        self.control = Some(process);
        Ok(())
    }

    fn command(&self, subcommand: &str) -> Command {
        let mut command = Command::new(&self.options.binary);
        command
            .args([subcommand, "--json", "--exit-with-parent"])
            // The token is in the environment, because other users of the host can see arguments.
            .env("SWITCHYARD_TOKEN", &self.token)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        // The cluster is secured as its options say, whatever the user has set for other fleets.
        for name in TLS_VARIABLES {
            command.env_remove(name);
        }
        if let Some(tls) = &self.tls {
            command.env("SWITCHYARD_TLS", tls.dir.path());
        }
        command
    }

    fn signal(&self, server_idx: usize, signal: Signal) -> Result<()> {
        let name = Self::server_name(server_idx);
        let pid = self.server_pid(server_idx).ok_or_else(|| anyhow!("{name} is not running"))?;
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).context("impossible pid")?;
        kill_process(pid, signal).with_context(|| format!("cannot signal {name}"))
    }

    fn take(&mut self, server_idx: usize) -> Result<Process> {
        self.servers
            .get_mut(server_idx)
            .and_then(Option::take)
            .ok_or_else(|| anyhow!("{} is not running", Self::server_name(server_idx)))
    }
}

impl Drop for LocalCluster {
    fn drop(&mut self) {
        for process in self.servers.iter_mut().flatten().chain(&mut self.control) {
            // An error means that the child has already ended.
            let _ = process.child.kill();
            let _ = process.child.wait();
        }
    }
}

impl Process {
    /// Starts a child whose standard output carries one JSON event per line.
    fn spawn(name: String, command: &mut Command) -> Result<Self> {
        let mut child = command.spawn().with_context(|| {
            format!("cannot start {name} from {}", Path::new(command.get_program()).display())
        })?;
        let (sender, lines) = channel();
        if let Some(stdout) = child.stdout.take() {
            for_each_line(stdout, move |line| {
                if let Some(line) = line {
                    drop(sender.send(line));
                }
            });
        }
        let stderr_tail = Arc::new(Mutex::new(StderrTail::default()));
        if let Some(stderr) = child.stderr.take() {
            let tail = Arc::clone(&stderr_tail);
            for_each_line(stderr, move |line| {
                let Ok(mut tail) = tail.lock() else { return };
                let Some(line) = line else {
                    tail.is_complete = true;
                    return;
                };
                tracing::debug!(target: "switchyard_cli::child", "{line}");
                if tail.lines.len() == 20 {
                    tail.lines.pop_front();
                }
                tail.lines.push_back(line);
            });
        }
        Ok(Self { name, child, lines, stderr_tail })
    }

    /// Waits for the event `event` and returns its JSON object.
    fn wait_event(&mut self, event: &str, timeout: Duration) -> Result<serde_json::Value> {
        self.next_event(event, timeout)?.ok_or_else(|| self.is_late(event, timeout))
    }

    /// The event `event`, or `None` after `timeout`.
    fn next_event(&mut self, event: &str, timeout: Duration) -> Result<Option<serde_json::Value>> {
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => {
                    let value: serde_json::Value = serde_json::from_str(&line)
                        .with_context(|| format!("{} wrote {line:?}, not an event", self.name))?;
                    if value["event"] == event {
                        return Ok(Some(value));
                    }
                }
                Err(std::sync::mpsc::RecvTimeoutError::Timeout) => return Ok(None),
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => {
                    let status = self.wait_exit(Duration::from_secs(5))?;
                    return Err(self.early_end(status));
                }
            }
        }
    }

    fn check_running(&mut self) -> Result<()> {
        match self.child.try_wait().context("cannot wait for a child")? {
            Some(status) => Err(self.early_end(status)),
            None => Ok(()),
        }
    }

    /// Error for a process that ended too early. Quotes its `error:` line if there is one.
    fn early_end(&self, status: ExitStatus) -> anyhow::Error {
        let tail = self.tail();
        match tail.iter().rev().find_map(|line| line.strip_prefix("error: ")) {
            Some(reason) => anyhow!("{}: {reason}", self.name),
            None => anyhow!(
                "{} ended with {status} before it was ready{}",
                self.name,
                stderr_suffix(&tail)
            ),
        }
    }

    fn is_late(&self, event: &str, timeout: Duration) -> anyhow::Error {
        let suffix = stderr_suffix(&self.tail());
        anyhow!("{} did not report `{event}` within {timeout:?}{suffix}", self.name)
    }

    fn wait_exit(&mut self, timeout: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(status) = self.child.try_wait().context("cannot wait for a child")? {
                return Ok(status);
            }
            if Instant::now() >= deadline {
                bail!(
                    "{} is still running after {timeout:?}{}",
                    self.name,
                    stderr_suffix(&self.tail())
                );
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The last lines of standard error.
    fn tail(&self) -> Vec<String> {
        // The reader thread may still read the pipe of a process that has just ended. Wait up to 200 ms.
        let begin = Instant::now();
        while self.stderr_tail.lock().is_ok_and(|tail| !tail.is_complete)
            && begin.elapsed() < Duration::from_millis(200)
        {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.stderr_tail.lock().map_or_else(|_| Vec::new(), |tail| tail.lines.clone().into())
    }
}

/// Standard error of a process, as the end of an error message.
/// Variables of [`TlsArgs`](crate::cmd::tls::TlsArgs) and of listeners.
const TLS_VARIABLES: [&str; 6] = [
    "SWITCHYARD_TLS",
    "SWITCHYARD_TLS_CERT",
    "SWITCHYARD_TLS_KEY",
    "SWITCHYARD_TLS_CA",
    "SWITCHYARD_TLS_CLIENTS",
    "SWITCHYARD_INSECURE",
];
/// Longer than a cluster of one command runs.
const CERTIFICATE_DAYS: u32 = 30;

fn stderr_suffix(tail: &[String]) -> String {
    if tail.is_empty() { String::new() } else { format!("; standard error: {}", tail.join(" | ")) }
}

/// Calls `each` with every line, and with `None` at the end of the stream.
fn for_each_line(
    stream: impl Read + Send + 'static,
    mut each: impl FnMut(Option<String>) + Send + 'static,
) {
    std::thread::spawn(move || {
        for line in BufReader::new(stream).lines() {
            match line {
                Ok(line) => each(Some(line)),
                Err(_) => break,
            }
        }
        each(None);
    });
}
