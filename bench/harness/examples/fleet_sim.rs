//! The control-plane binary under a large fleet. Servers and clients are simulated: servers register, renew their leases
//! with load reports and take assignments; clients watch the placement and read every table. Nothing computes.
//!
//! `fleet_sim SWITCHYARD [SERVERS] [CLIENTS] [SECONDS]`: the binary, the sizes (1,000 each) and the length of the steady
//! phase (20). Prints a line of JSON for each phase.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use control_api::{
    Assignment, ControlClient, DrainRequest, ExpertLoad, LeaseRequest, LoadReport, MemberId,
    ModelDescriptor, ReadyRequest, RegisterRequest, TransportLinks,
};
use rand::RngExt as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

const LAYERS: u32 = 61;
const EXPERTS: u32 = 256;
const LEASE_MS: u64 = 3000;
/// Experts in a load report.
const REPORTED: usize = 64;
/// Longest wait for a phase.
const PATIENCE: Duration = Duration::from_secs(120);

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let binary =
        args.next().context("usage: fleet_sim SWITCHYARD [SERVERS] [CLIENTS] [SECONDS]")?;
    let mut number = |default: u64| -> Result<u64> {
        args.next().map_or(Ok(default), |text| text.parse().with_context(|| format!("{text:?}")))
    };
    let (num_servers, num_clients, seconds) = (number(1000)?, number(1000)?, number(20)?);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let _ = p2p_core::bootstrap::raise_descriptor_limit();
    runtime.block_on(simulate(&binary, num_servers, num_clients, seconds))
}

async fn simulate(binary: &str, num_servers: u64, num_clients: u64, seconds: u64) -> Result<()> {
    let state = tempfile::tempdir()?;
    let mut plane = Plane::start(binary, state.path(), "127.0.0.1:0", num_servers)?;
    let client = ControlClient::new(&plane.url, None)?;

    let started = Instant::now();
    let servers: Arc<Vec<Server>> = Arc::new((0..num_servers).map(Server::new).collect());
    let mut tasks = JoinSet::new();
    for idx in 0..servers.len() {
        let (servers, client) = (Arc::clone(&servers), client.isolated()?);
        tasks.spawn(async move { servers[idx].run(&client).await });
    }
    settled(&client, num_servers).await?;
    report("join", num_servers, &[("settled_s", started.elapsed().as_secs_f64())]);

    let watchers: Arc<Vec<Watcher>> =
        Arc::new((0..num_clients).map(|_| Watcher::default()).collect());
    let connecting = Instant::now();
    for idx in 0..watchers.len() {
        let (watchers, addr) = (Arc::clone(&watchers), plane.addr.clone());
        tasks.spawn(async move { watchers[idx].run(&addr).await });
    }
    let epoch = client.status().await?.epoch;
    reached(&watchers, epoch).await?;
    report("connect", num_clients, &[("tables_s", connecting.elapsed().as_secs_f64())]);

    // Heartbeats and open watches, nothing else.
    quiet(&client).await?;
    let (cpu, since) = (plane.cpu_seconds()?, Instant::now());
    tokio::time::sleep(Duration::from_secs(seconds)).await;
    let cores = (plane.cpu_seconds()? - cpu) / since.elapsed().as_secs_f64();
    report("steady", num_servers, &[("cores", cores), ("rss_mb", plane.rss_mb()?)]);

    // An operator drains servers: time from the request to the table at the last client.
    let mut spreads = Vec::new();
    for nth in 0..5 {
        let Some(id) = servers[nth].id() else { bail!("server {nth} is not registered") };
        let (before, since) = (client.status().await?.epoch, Instant::now());
        client.resume(&id).await?;
        client.drain(&id, &DrainRequest::default()).await?;
        let after = changed(&client, before).await?;
        reached(&watchers, after).await?;
        spreads.push(since.elapsed().as_secs_f64());
        client.resume(&id).await?;
        quiet(&client).await?;
    }
    spreads.sort_by(f64::total_cmp);
    let worst = spreads.last().copied().unwrap_or(0.0);
    report("epoch", num_clients, &[("median_s", spreads[spreads.len() / 2]), ("worst_s", worst)]);

    // The control plane is killed and starts again with its state, on the same port.
    let addr = plane.addr.clone();
    drop(plane);
    let restarted = Instant::now();
    plane = Plane::start(binary, state.path(), &addr, num_servers)?;
    let serving = restarted.elapsed().as_secs_f64();
    settled(&client, num_servers).await?;
    let epoch = client.status().await?.epoch;
    reached(&watchers, epoch).await?;
    let after = [("listening_s", serving), ("settled_s", restarted.elapsed().as_secs_f64())];
    report("restart", num_servers, &after);
    report("end", num_servers, &[("rss_mb", plane.rss_mb()?)]);
    tasks.abort_all();
    Ok(())
}

fn report(phase: &str, size: u64, values: &[(&str, f64)]) {
    let mut line = serde_json::json!({ "phase": phase, "size": size });
    for (name, value) in values {
        line[*name] = serde_json::json!((value * 1000.0).round() / 1000.0);
    }
    println!("{line}");
}

/// Waits until all servers serve and every expert has its replicas.
async fn settled(client: &ControlClient, num_servers: u64) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let status = client.status().await;
        if let Ok(status) = &status {
            let is_whole = status.experts_total > 0
                && status.experts_without_replica == 0
                && status.experts_under_replicated == 0;
            if is_whole && u64::from(status.members.serving) == num_servers {
                return Ok(());
            }
        }
        if Instant::now() > deadline {
            bail!("the fleet has not settled after {PATIENCE:?}: {status:?}");
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Waits until the epoch has not changed for two seconds.
async fn quiet(client: &ControlClient) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    let mut last = (client.status().await?.epoch, Instant::now());
    while last.1.elapsed() < Duration::from_secs(2) {
        if Instant::now() > deadline {
            bail!("the epoch still changes after {PATIENCE:?}");
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        let epoch = client.status().await?.epoch;
        if epoch != last.0 {
            last = (epoch, Instant::now());
        }
    }
    Ok(())
}

/// Waits for another epoch than `before`, and returns it.
async fn changed(client: &ControlClient, before: u64) -> Result<u64> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let epoch = client.status().await?.epoch;
        if epoch != before {
            return Ok(epoch);
        }
        if Instant::now() > deadline {
            bail!("epoch {before} has not changed after {PATIENCE:?}");
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until every client has read a table of `epoch` or later.
async fn reached(watchers: &[Watcher], epoch: u64) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let num_behind =
            watchers.iter().filter(|watcher| watcher.epoch.load(Ordering::Relaxed) < epoch).count();
        if num_behind == 0 {
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!("{num_behind} clients have no table of epoch {epoch} after {PATIENCE:?}");
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// The control plane's process, killed when dropped.
struct Plane {
    child: Child,
    addr: String,
    url: String,
}

impl Plane {
    fn start(binary: &str, state: &Path, listen: &str, num_servers: u64) -> Result<Self> {
        let mut child = Command::new(binary)
            .args(["--json", "control-plane", "--placement", "load", "--replicas", "2"])
            .args(["--servers", &num_servers.to_string(), "--listen", listen, "--data-dir"])
            .arg(state)
            .args(["--lease-ttl-ms", &LEASE_MS.to_string()])
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {binary}"))?;
        let stdout = child.stdout.take().context("no standard output")?;
        // Owned from here on, so that an error kills the process.
        let mut plane = Self { child, addr: String::new(), url: String::new() };
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        let event: serde_json::Value =
            serde_json::from_str(&line).with_context(|| format!("unexpected output {line:?}"))?;
        plane.addr = event["addr"].as_str().context("no address")?.to_owned();
        plane.url = format!("http://{}", plane.addr);
        Ok(plane)
    }

    /// Processor time so far, of user and system.
    fn cpu_seconds(&self) -> Result<f64> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        let fields: Vec<&str> =
            stat.rsplit_once(')').context("a malformed stat")?.1.split_whitespace().collect();
        let ticks = fields[11].parse::<f64>()? + fields[12].parse::<f64>()?;
        Ok(ticks / rustix::param::clock_ticks_per_second() as f64)
    }

    fn rss_mb(&self) -> Result<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line =
            status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
        Ok(line.trim().trim_end_matches(" kB").trim().parse::<f64>()? / 1024.0)
    }
}

impl Drop for Plane {
    fn drop(&mut self) {
        // An error means that it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A simulated expert server.
struct Server {
    request: RegisterRequest,
    id: std::sync::Mutex<Option<MemberId>>,
    is_first: AtomicBool,
}

impl Server {
    fn new(nth: u64) -> Self {
        let model = ModelDescriptor {
            fingerprint: "0123456789abcdef".to_owned(),
            architecture: "deepseek_v3".to_owned(),
            hidden: 7168,
            moe_layers: (0..LAYERS).collect(),
            num_experts: EXPERTS,
            top_k: 8,
        };
        // The control plane's probe finds this port closed, which changes nothing but a note.
        let request = RegisterRequest::new(format!("server-{nth}"), "127.0.0.1:9", model);
        Self { request, id: std::sync::Mutex::default(), is_first: AtomicBool::new(true) }
    }

    fn id(&self) -> Option<MemberId> {
        self.id.lock().ok()?.clone()
    }

    /// Registers, and renews three times per lease, until the task is aborted. Registers again after an error.
    async fn run(&self, client: &ControlClient) {
        let mut holds = Assignment::default();
        loop {
            if self.is_first.swap(false, Ordering::Relaxed) {
                let spread = rand::rng().random_range(0..LEASE_MS / 3);
                tokio::time::sleep(Duration::from_millis(spread)).await;
            }
            let request = RegisterRequest { holds: holds.clone(), ..self.request.clone() };
            if let Ok(answer) = client.register(&request).await {
                if let Ok(mut id) = self.id.lock() {
                    *id = Some(answer.member_id.clone());
                }
                holds = answer.assignment;
                let _ = self
                    .stay(client, &answer.member_id, answer.assignment_version, &mut holds)
                    .await;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    async fn stay(
        &self,
        client: &ControlClient,
        id: &MemberId,
        mut version: u64,
        holds: &mut Assignment,
    ) -> Result<(), control_api::ControlError> {
        let incarnation = self.request.incarnation;
        client.ready(id, &ReadyRequest { incarnation, holds: holds.clone() }).await?;
        loop {
            tokio::time::sleep(Duration::from_millis(LEASE_MS / 3)).await;
            let request =
                LeaseRequest { incarnation, assignment_version: version, load: Some(load(holds)) };
            let answer = client.renew(id, &request).await?;
            if let Some(assignment) = answer.assignment {
                (*holds, version) = (assignment, answer.assignment_version);
                client.ready(id, &ReadyRequest { incarnation, holds: holds.clone() }).await?;
            }
        }
    }
}

/// A report in which every expert has about the same load, so that the placement stays.
fn load(holds: &Assignment) -> LoadReport {
    let pairs = holds.layers.iter().flat_map(|entry| {
        entry.experts.iter().map(|&expert| ExpertLoad {
            layer: entry.layer,
            expert,
            num_tokens: 100,
        })
    });
    let experts: Vec<ExpertLoad> = pairs.take(REPORTED).collect();
    LoadReport {
        window_ms: LEASE_MS / 3,
        busy_ms: LEASE_MS / 9,
        num_tokens: 100 * experts.len() as u64,
        experts,
        links: vec![TransportLinks {
            transport: "verbs".to_owned(),
            num_links: 1000,
            left_out: Vec::new(),
        }],
        ..LoadReport::default()
    }
}

/// A simulated client. It reads every table whole and looks at its epoch only.
#[derive(Default)]
struct Watcher {
    epoch: AtomicU64,
}

impl Watcher {
    /// Watches until the task is aborted, and connects again after an error.
    async fn run(&self, addr: &str) {
        loop {
            let _ = self.follow(addr).await;
            let pause = rand::rng().random_range(50..500);
            tokio::time::sleep(Duration::from_millis(pause)).await;
        }
    }

    async fn follow(&self, addr: &str) -> Result<()> {
        let mut stream = TcpStream::connect(addr).await?;
        let request = format!("GET /v1/placement/watch HTTP/1.1\r\nhost: {addr}\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut buffer = vec![0; 256 << 10];
        // The number of the event under way, and the end of what came before.
        let (mut number, mut tail): (Option<u64>, Vec<u8>) = (None, Vec::new());
        loop {
            let read = stream.read(&mut buffer).await?;
            if read == 0 {
                bail!("the watch ended");
            }
            let mut text = std::mem::take(&mut tail);
            text.extend_from_slice(&buffer[..read]);
            if let Some(at) = find_last(&text, b"\nid: ") {
                let digits: Vec<u8> =
                    text[at + 5..].iter().copied().take_while(u8::is_ascii_digit).collect();
                if at + 5 + digits.len() < text.len() {
                    number = String::from_utf8_lossy(&digits).parse().ok();
                }
            }
            // The end of an event.
            if text.windows(3).any(|bytes| bytes == b"}\n\n")
                && let Some(number) = number
            {
                self.epoch.fetch_max(number, Ordering::Relaxed);
            }
            tail = text.split_off(text.len().saturating_sub(32));
        }
    }
}

fn find_last(text: &[u8], needle: &[u8]) -> Option<usize> {
    text.windows(needle.len()).rposition(|bytes| bytes == needle)
}
