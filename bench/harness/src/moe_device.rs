//! One layer through servers on GPUs, with random weights that each server makes in its GPU's memory.
//!
//! Each client and each server is a process of its own if there is a GPU for each of them. Otherwise they are
//! threads of one process: servers share the first GPUs, clients the last one.

mod killed;
mod roles;
mod tensors;
mod timeline;
mod wire;
mod worker;

use std::fmt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use checkpoint::{Checkpoint, Preset};
use kernels::gpu::{DeviceName, Gpu};
use p2p_core::Transports;
use protocol::WireDtype;
use serde::Serialize;
use serde_json::Value;

pub use killed::{Failover, KillFigures};
pub use roles::{ClientFigures, FailedCall};
pub use timeline::{Step, Timeline};

use crate::clock::monotonic_us;
use crate::stats::median;
use roles::{Client, Part, Role, Server, ServerCounts};
use tensors::Shapes;
use timeline::BatchTimes;
use wire::Pipes;
use worker::{PATIENCE, Worker};

/// Opens the transports of a client or a server, in its own process: from [`MoeDeviceConfig::transport`] and
/// [`MoeDeviceConfig::settings`].
pub type OpenTransports = fn(&str, &Value) -> Result<Transports>;

/// Settings of [`run`].
#[derive(Debug)]
pub struct MoeDeviceConfig {
    /// The first GPU to use.
    pub device: DeviceName,
    /// Model whose layer is measured.
    pub preset: Preset,
    /// Tokens of a call, a row of the report each. A run with kills takes the largest number.
    pub tokens: Vec<usize>,
    /// Clients, 1 to 8. A run with kills has one.
    pub clients: usize,
    /// Servers, 1 to 8, and at least 2 with kills.
    pub servers: usize,
    /// Time for each number of tokens.
    pub seconds: f64,
    /// Seed of tokens and routing.
    pub seed: u64,
    /// Element type of tokens on the wire: bf16 or fp8.
    pub dtype: WireDtype,
    /// Number of times that a server is killed; 0 measures layers.
    pub kills: usize,
    /// Transports by name.
    pub transport: String,
    /// Settings of the transports. Only `open` reads them.
    pub settings: Value,
    /// Opens the transports. [`child_main`] must get the same function.
    pub open: OpenTransports,
    /// Longest time that a batch waits for further clients, in microseconds; `None` takes the servers' default.
    pub gather_us: Option<u64>,
    /// Whether the steps of layers are noted, for [`MoeDeviceRow::timeline`].
    pub timeline: bool,
}

impl MoeDeviceConfig {
    const fn is_kill(&self) -> bool {
        self.kills > 0
    }
}

/// Figures of one number of tokens.
#[derive(Debug, Serialize)]
#[allow(missing_docs, reason = "the names say all")]
pub struct MoeDeviceRow {
    pub tokens: usize,
    pub clients: Vec<ClientFigures>,
    /// Median over the clients.
    pub layer_us_p50: f64,
    /// Median of the time that a batch's experts take alone, of the slowest server.
    pub compute_us: f64,
    /// Layer time over `compute_us`.
    pub ratio: f64,
    /// Median of a batch's time from its reception to its last answer, of the slowest server.
    pub server_us: f64,
    /// Layer time over `server_us`.
    pub server_ratio: f64,
    /// Mean wait of a batch since its first frame was seen, of the server that waits longest.
    pub gather_us: f64,
    pub tokens_per_s: f64,
    /// Clients of a server's mean batch.
    pub clients_per_batch: f64,
    /// Tokens per second over those of one client alone; `None` with one client.
    pub gain: Option<f64>,
    /// Steps of the first client's layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeline: Option<Timeline>,
}

/// Result of [`run`]. Its text is a table.
#[derive(Debug, Serialize)]
#[allow(missing_docs, reason = "the names say all")]
pub struct MoeDeviceReport {
    pub preset: String,
    pub device: String,
    pub num_gpus: usize,
    /// Whether clients and servers are threads, some of which share GPUs.
    pub shares_gpus: bool,
    pub clients: usize,
    pub servers: usize,
    pub transport: String,
    pub wire_dtype: String,
    pub hidden: usize,
    pub num_experts: u32,
    pub top_k: usize,
    pub rows: Vec<MoeDeviceRow>,
    pub killed: Option<KillFigures>,
}

/// Runs this process's part if it is a child of [`run`], and returns whether it succeeded. The program should then
/// exit. Returns `None` in any other process. A program that calls [`run`] must call this first.
#[must_use]
pub fn child_main(open: OpenTransports) -> Option<bool> {
    Some(worker::run_role(worker::own_role()?, &mut Pipes, open).is_ok())
}

/// Runs the benchmark.
///
/// # Errors
/// There are too few GPUs, or a client or a server fails.
pub fn run(config: &MoeDeviceConfig) -> Result<MoeDeviceReport> {
    let most = config.tokens.iter().copied().max().unwrap_or(1);
    let dir = std::env::temp_dir().join(format!("switchyard-bench-moe-{}", std::process::id()));
    let made = Shapes::make(&dir, config.preset)?;
    let checkpoint = Checkpoint::open(&dir)?;
    let model = checkpoint.config();
    let (first, count) = match config.device {
        DeviceName::Cuda(first) => (first, Gpu::count()?),
        DeviceName::Emulated(first) => (first, EMULATED_GPUS),
    };
    let num_gpus = count.saturating_sub(first) as usize;
    if num_gpus == 0 {
        bail!("--device {}: expected one of the {count} GPUs here", config.device);
    }
    let bench = Bench {
        config,
        dir: &dir,
        num_experts: model.num_experts,
        // Rows, scales, entries and flags of two frames; answers are bf16.
        slot_bytes: 2 * (most + 1) * (model.hidden * 2 + model.hidden / 32 + 256) + (64 << 10),
        num_gpus,
        // A thread cannot be killed.
        has_threads: config.servers + config.clients > num_gpus && !config.is_kill(),
    };
    if num_gpus == 1 && !config.is_kill() {
        bail!(
            "one GPU: clients and servers need one each at least, or the ones' kernels keep the others waiting"
        );
    }
    let mut rows = Vec::new();
    let killed = if config.is_kill() {
        Some(bench.kill(most)?)
    } else {
        let mut servers = bench.start_servers(1)?;
        for &tokens in &config.tokens {
            rows.push(bench.row(&mut servers, tokens)?);
        }
        None
    };
    let num_clients = if config.is_kill() { 1 } else { config.clients };
    let report = MoeDeviceReport {
        preset: config.preset.name().to_owned(),
        device: config.device.to_string(),
        num_gpus,
        shares_gpus: config.servers + num_clients > num_gpus,
        clients: num_clients,
        servers: config.servers,
        transport: config.transport.clone(),
        wire_dtype: config.dtype.name().to_owned(),
        hidden: model.hidden,
        num_experts: model.num_experts,
        top_k: model.top_k,
        rows,
        killed,
    };
    drop(made);
    Ok(report)
}

struct Bench<'a> {
    config: &'a MoeDeviceConfig,
    dir: &'a Path,
    num_experts: u32,
    slot_bytes: usize,
    num_gpus: usize,
    has_threads: bool,
}

impl Bench<'_> {
    /// Returns the indices of each expert's servers, `copies` of them.
    fn replicas(&self, copies: usize) -> Vec<Vec<u32>> {
        let servers = self.config.servers;
        (0..self.num_experts as usize)
            .map(|expert| (0..copies).map(|copy| ((expert + copy) % servers) as u32).collect())
            .collect()
    }

    /// Returns the number of GPUs that servers use. The GPUs after them are the clients'. In a run with kills no two
    /// servers share a GPU. A client may share the GPU of server 0, which is the one that is killed.
    fn server_gpus(&self) -> usize {
        let reserved = usize::from(!self.config.is_kill());
        self.config.servers.min(self.num_gpus.saturating_sub(reserved)).max(1)
    }

    fn server_gpu(&self, server: usize) -> usize {
        server % self.server_gpus()
    }

    /// Returns the GPU of a client: one without a server, if there is one. A client's kernels occupy
    /// multiprocessors while they wait for the servers' kernels, which would have to wait for those.
    fn client_gpu(&self, client: usize) -> usize {
        match self.num_gpus - self.server_gpus() {
            0 => client % self.num_gpus,
            free => self.server_gpus() + client % free,
        }
    }

    fn part(&self, gpu: usize, num_blocks: u32) -> Part {
        let device = match self.config.device {
            DeviceName::Cuda(first) => DeviceName::Cuda(first + gpu as u32),
            DeviceName::Emulated(first) => DeviceName::Emulated(first + gpu as u32),
        };
        Part {
            dir: self.dir.to_owned(),
            device: device.to_string(),
            dtype: self.config.dtype.name().to_owned(),
            slot_bytes: self.slot_bytes,
            transport: self.config.transport.clone(),
            settings: self.config.settings.clone(),
            num_blocks,
            timeline: self.config.timeline,
        }
    }

    fn start(&self, role: Role) -> Result<Worker> {
        if self.has_threads {
            Worker::thread(role, self.config.open)
        } else {
            Worker::process(&role)
        }
    }

    fn server_part(&self, server: usize) -> Part {
        let gpu = self.server_gpu(server);
        let here = (0..self.config.servers).filter(|other| self.server_gpu(*other) == gpu).count();
        // A reception waits on multiprocessors of its own.
        let num_blocks = match (self.has_threads, here as u32) {
            (false, _) | (_, 1) => 0,
            (true, here) => (MULTIPROCESSORS / here).saturating_sub(RECEPTION_SHARE).max(1),
        };
        self.part(gpu, num_blocks)
    }

    fn client_part(&self, client: usize) -> Part {
        self.part(self.client_gpu(client), if self.has_threads { CLIENT_BLOCKS } else { 0 })
    }

    fn start_server(&self, server: usize, replicas: &[Vec<u32>]) -> Result<Worker> {
        let holds = |expert: &u32| replicas[*expert as usize].contains(&(server as u32));
        self.start(Role::Server(Server {
            part: self.server_part(server),
            experts: (0..self.num_experts).filter(holds).collect(),
            gather_us: self.config.gather_us,
        }))
    }

    fn start_servers(&self, copies: usize) -> Result<Vec<(Worker, String)>> {
        let replicas = self.replicas(copies);
        let servers = 0..self.config.servers;
        let started = servers.map(|server| self.start_server(server, &replicas));
        let started: Vec<Worker> = started.collect::<Result<_>>()?;
        started.into_iter().map(with_addr).collect()
    }

    /// Runs clients of the servers at `addrs`. All begin together. `during` runs on this thread meanwhile.
    fn measure(
        &self,
        addrs: &[String],
        replicas: &[Vec<u32>],
        clients: usize,
        tokens: usize,
        seconds: f64,
        during: impl FnOnce() -> Result<()>,
    ) -> Result<Vec<ClientFigures>> {
        let mut started: Vec<Worker> = (0..clients)
            .map(|client| {
                self.start(Role::Client(Client {
                    part: self.client_part(client),
                    addrs: addrs.to_vec(),
                    replicas: replicas.to_vec(),
                    tokens,
                    seconds,
                    seed: self.config.seed + client as u64,
                    checks: self.config.is_kill(),
                }))
            })
            .collect::<Result<_>>()?;
        for worker in &mut started {
            worker.receive(PATIENCE)?;
        }
        for worker in &mut started {
            worker.send("go")?;
        }
        during()?;
        let limit = PATIENCE + Duration::from_secs_f64(seconds);
        started
            .iter_mut()
            .map(|worker| Ok(serde_json::from_value(worker.receive(limit)?)?))
            .collect()
    }

    fn row(&self, servers: &mut [(Worker, String)], tokens: usize) -> Result<MoeDeviceRow> {
        let config = self.config;
        let addrs: Vec<String> = servers.iter().map(|(_, addr)| addr.clone()).collect();
        let replicas = self.replicas(1);
        let rate = |measured: &[ClientFigures]| -> f64 {
            measured.iter().map(|client| client.calls_per_s * tokens as f64).sum()
        };
        let alone = match config.clients {
            1 => None,
            _ => Some(self.measure(&addrs, &replicas, 1, tokens, config.seconds, || Ok(()))?),
        };
        // Resets the servers' counts.
        for (worker, _) in servers.iter_mut() {
            worker.ask("stats")?;
        }
        let mut clients =
            self.measure(&addrs, &replicas, config.clients, tokens, config.seconds, || Ok(()))?;
        let timeline = match clients.first_mut().and_then(|client| client.calls_traced.take()) {
            Some((calls, of_client_us)) => {
                let (mut batches, mut uncertainty_us) = (Vec::new(), of_client_us);
                for (worker, _) in servers.iter_mut() {
                    let (of_server, of_server_us): (Vec<BatchTimes>, f64) =
                        serde_json::from_value(worker.ask("steps")?)?;
                    batches.push(of_server);
                    uncertainty_us = uncertainty_us.max(of_client_us + of_server_us);
                }
                Some(Timeline::of(tokens, &calls, &batches, uncertainty_us))
            }
            None => None,
        };
        clients.iter_mut().for_each(|client| client.calls_traced = None);
        let (mut compute_us, mut server_us, mut gather_us) = (0.0f64, 0.0f64, 0.0f64);
        let mut batched = Vec::new();
        for (worker, _) in servers.iter_mut() {
            let stats: ServerCounts = serde_json::from_value(worker.ask("stats")?)?;
            let batches = stats.batches.max(1.0);
            compute_us = compute_us.max(stats.compute_us);
            server_us = server_us.max(stats.server_us);
            gather_us = gather_us.max(stats.gather_seconds / batches * 1e6);
            batched.push(stats.batch_clients / batches);
        }
        if compute_us == 0.0 {
            bail!("no batch was timed as far as its experts: expected some in more --seconds");
        }
        let mut medians: Vec<f64> = clients.iter().map(|client| client.layer_us_p50).collect();
        let layer_us_p50 = median(&mut medians);
        let tokens_per_s = rate(&clients);
        Ok(MoeDeviceRow {
            tokens,
            layer_us_p50,
            compute_us,
            ratio: layer_us_p50 / compute_us,
            server_us,
            server_ratio: layer_us_p50 / server_us.max(f64::MIN_POSITIVE),
            gather_us,
            tokens_per_s,
            clients_per_batch: batched.iter().sum::<f64>() / batched.len() as f64,
            gain: alone.map(|alone| tokens_per_s / rate(&alone)),
            timeline,
            clients,
        })
    }

    /// Measures servers that all hold every expert, and kills server 0 in the middle of each run.
    fn kill(&self, tokens: usize) -> Result<KillFigures> {
        let config = self.config;
        let mut servers = self.start_servers(config.servers)?;
        let only: Vec<Vec<u32>> = vec![vec![0]; self.num_experts as usize];
        let last = servers[servers.len() - 1].1.clone();
        let measure_one = |addrs: &[String],
                           replicas: &[Vec<u32>],
                           seconds,
                           during: &mut dyn FnMut() -> Result<()>| {
            let measured = self.measure(addrs, replicas, 1, tokens, seconds, during)?;
            measured.into_iter().next().context("no client")
        };
        let alone =
            || measure_one(std::slice::from_ref(&last), &only, config.seconds, &mut || Ok(()));
        let before = alone()?;
        let replicas = self.replicas(config.servers);
        let mut runs = Vec::with_capacity(config.kills);
        for run in 0..config.kills {
            if run > 0 {
                servers[0] = with_addr(self.start_server(0, &replicas)?)?;
            }
            let addrs: Vec<String> = servers.iter().map(|(_, addr)| addr.clone()).collect();
            let victim = &mut servers[0].0;
            let mut killed_at_us = 0.0;
            let measured = measure_one(&addrs, &replicas, config.seconds * 3.0, &mut || {
                std::thread::sleep(Duration::from_secs_f64(config.seconds * 1.5));
                killed_at_us = monotonic_us();
                victim.kill()
            })?;
            runs.push((killed_at_us, measured));
        }
        KillFigures::of(tokens, [before, alone()?], runs)
    }
}

/// Waits until a server listens, and returns it with its address.
fn with_addr(mut worker: Worker) -> Result<(Worker, String)> {
    let addr = worker.receive(PATIENCE)?["addr"].as_str().context("no address")?.to_owned();
    Ok((worker, addr))
}

impl fmt::Display for MoeDeviceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}: hidden {}, top-{} of {} experts, {} client(s) and {} server(s) on {}, {} on the wire{}",
            self.preset,
            self.hidden,
            self.top_k,
            self.num_experts,
            self.clients,
            self.servers,
            self.device,
            self.wire_dtype,
            if self.shares_gpus { ", sharing GPUs" } else { "" }
        )?;
        if !self.rows.is_empty() {
            writeln!(
                f,
                "{:>6} {:>10} {:>10} {:>7} {:>10} {:>7} {:>12} {:>14} {:>10} {:>6}",
                "tokens",
                "layer µs",
                "experts µs",
                "ratio",
                "server µs",
                "ratio",
                "tokens/s",
                "clients/batch",
                "gather µs",
                "gain"
            )?;
        }
        for row in &self.rows {
            writeln!(
                f,
                "{:>6} {:>10.1} {:>10.1} {:>7.3} {:>10.1} {:>7.3} {:>12.0} {:>14.2} {:>10.1} {:>6}",
                row.tokens,
                row.layer_us_p50,
                row.compute_us,
                row.ratio,
                row.server_us,
                row.server_ratio,
                row.tokens_per_s,
                row.clients_per_batch,
                row.gather_us,
                row.gain.map_or_else(|| "–".to_owned(), |gain| format!("{gain:.2}"))
            )?;
        }
        for timeline in self.rows.iter().filter_map(|row| row.timeline.as_ref()) {
            write!(f, "{timeline}")?;
        }
        if let Some(killed) = &self.killed {
            writeln!(
                f,
                "killed one of {} replicas at {} tokens, {} time(s): stall {:.2} ms, {:.2} ms at most, {} failover(s), {} pairs sent again, {} wrong; afterwards {:.1} calls/s, {:.1} % of one server alone (whose two runs differ by {:.1} %)",
                self.servers,
                killed.tokens,
                killed.stalls_us.len(),
                killed.stall_us_p50 * 1e-3,
                killed.stall_us * 1e-3,
                killed.failovers,
                killed.resent_pairs,
                killed.wrong,
                killed.after_calls_per_s,
                killed.ratio * 100.0,
                (killed.one_server_ratio - 1.0) * 100.0
            )?;
            for death in killed.deaths.iter().flatten() {
                let is_before = death.into_call_us < 0.0;
                writeln!(
                    f,
                    "  {:.2} ms {} a call; sent again {:.2} ms after the kill, answered {:.2} ms later",
                    death.into_call_us.abs() * 1e-3,
                    if is_before { "before" } else { "into" },
                    death.sent_again_us * 1e-3,
                    death.answered_us * 1e-3
                )?;
            }
        }
        Ok(())
    }
}

/// Number of GPUs in software that can map each other's memory.
const EMULATED_GPUS: u32 = 8;
/// Multiprocessors of a GPU that roles share.
const MULTIPROCESSORS: u32 = 132;
/// Thread blocks of a client that shares a GPU.
const CLIENT_BLOCKS: u32 = 16;
/// Multiprocessors that a waiting reception occupies.
const RECEPTION_SHARE: u32 = 10;
