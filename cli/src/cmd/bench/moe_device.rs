//! `switchyard bench moe --device`: one layer through servers on GPUs, with random weights that each
//! server makes in its GPU's memory. Every client and server is a process of its own where there is a GPU
//! for each; otherwise they are threads: servers share the first GPUs, clients the last one.

mod killed;
mod roles;
mod tensors;
mod worker;

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use checkpoint::{Checkpoint, Preset};
use kernels::gpu::{DeviceName, Gpu};
use protocol::WireDtype;
use serde::Serialize;

use crate::cmd::TransportArgs;
use crate::{Global, ui};
use killed::Killed;
use roles::{Client, Counted, Measured, Part, Role, Server};
use tensors::Shapes;
use worker::{PATIENCE, Pipes, Worker};

/// What to measure.
#[derive(Debug)]
pub(super) struct Wish {
    pub device: DeviceName,
    pub preset: Preset,
    pub tokens: Vec<usize>,
    pub clients: usize,
    pub servers: usize,
    pub seconds: f64,
    pub seed: u64,
    pub dtype: WireDtype,
    /// Times that a server is killed; 0 measures layers.
    pub kills: usize,
    pub transport: TransportArgs,
    /// Longest wait of a batch for further clients; the servers' default without.
    pub gather_us: Option<u64>,
}

impl Wish {
    const fn is_kill(&self) -> bool {
        self.kills > 0
    }
}

#[derive(Debug, Serialize)]
struct Row {
    tokens: usize,
    clients: Vec<Measured>,
    /// Median over the clients.
    layer_us_p50: f64,
    /// Median of the time that a batch's experts take alone, of the slowest server.
    compute_us: f64,
    /// Layer time over that.
    ratio: f64,
    /// Median of a batch's time from its reception to its last answer, of the slowest server.
    server_us: f64,
    /// Layer time over that.
    server_ratio: f64,
    /// Mean wait of a batch since its first frame was seen, of the server that waits longest.
    gather_us: f64,
    tokens_per_s: f64,
    /// Clients of a server's mean batch.
    clients_per_batch: f64,
    /// Tokens per second beside those of one client alone.
    gain: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Report {
    preset: String,
    device: String,
    num_gpus: usize,
    /// Whether clients and servers are threads, some of which share GPUs.
    shares_gpus: bool,
    clients: usize,
    servers: usize,
    transport: String,
    wire_dtype: String,
    hidden: usize,
    num_experts: u32,
    top_k: usize,
    rows: Vec<Row>,
    killed: Option<Killed>,
}

/// Runs this process's part where it is a child.
pub(super) fn child() -> Option<ExitCode> {
    let done = worker::play(worker::own_role()?, &mut Pipes);
    Some(if done.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

pub(super) fn run(global: &Global, wish: &Wish) -> Result<ExitCode> {
    let most = wish.tokens.iter().copied().max().unwrap_or(1);
    let dir = std::env::temp_dir().join(format!("switchyard-bench-moe-{}", std::process::id()));
    let made = Shapes::make(&dir, wish.preset)?;
    let checkpoint = Checkpoint::open(&dir)?;
    let config = checkpoint.config();
    let (first, count) = match wish.device {
        DeviceName::Cuda(first) => (first, Gpu::count()?),
        DeviceName::Emulated(first) => (first, EMULATED_GPUS),
    };
    let num_gpus = count.saturating_sub(first) as usize;
    if num_gpus == 0 {
        bail!("--device {}: expected one of the {count} GPUs here", wish.device);
    }
    let bench = Bench {
        wish,
        dir: &dir,
        num_experts: config.num_experts,
        // Rows, scales, entries and flags of two frames; answers are bf16.
        slot_bytes: 2 * (most + 1) * (config.hidden * 2 + config.hidden / 32 + 256) + (64 << 10),
        num_gpus,
        // A thread cannot be killed.
        has_threads: wish.servers + wish.clients > num_gpus && !wish.is_kill(),
    };
    if num_gpus == 1 && !wish.is_kill() {
        bail!(
            "one GPU: clients and servers need one each at least, or the ones' kernels keep the others waiting"
        );
    }
    let mut rows = Vec::new();
    let killed = if wish.is_kill() {
        Some(bench.kill(most)?)
    } else {
        let mut servers = bench.start_servers(1)?;
        for &tokens in &wish.tokens {
            rows.push(bench.row(&mut servers, tokens)?);
        }
        None
    };
    let num_clients = if wish.is_kill() { 1 } else { wish.clients };
    let report = Report {
        preset: wish.preset.name().to_owned(),
        device: wish.device.to_string(),
        num_gpus,
        shares_gpus: wish.servers + num_clients > num_gpus,
        clients: num_clients,
        servers: wish.servers,
        transport: wish.transport.transport.to_string(),
        wire_dtype: wish.dtype.name().to_owned(),
        hidden: config.hidden,
        num_experts: config.num_experts,
        top_k: config.top_k,
        rows,
        killed,
    };
    drop(made);
    if global.json {
        ui::print_json(&report)?;
    } else {
        print_report(&report);
    }
    Ok(ExitCode::SUCCESS)
}

struct Bench<'a> {
    wish: &'a Wish,
    dir: &'a Path,
    num_experts: u32,
    slot_bytes: usize,
    num_gpus: usize,
    has_threads: bool,
}

impl Bench<'_> {
    /// Servers of each expert, with `copies` of each.
    fn replicas(&self, copies: usize) -> Vec<Vec<u32>> {
        let servers = self.wish.servers;
        (0..self.num_experts as usize)
            .map(|expert| (0..copies).map(|copy| ((expert + copy) % servers) as u32).collect())
            .collect()
    }

    /// GPUs of the servers; those behind are the clients'. Processes that are to die have no GPU in common
    /// with their replicas; a client may have the first one's, which is the one that dies.
    fn server_gpus(&self) -> usize {
        let kept = usize::from(!self.wish.is_kill());
        self.wish.servers.min(self.num_gpus.saturating_sub(kept)).max(1)
    }

    fn server_gpu(&self, server: usize) -> usize {
        server % self.server_gpus()
    }

    /// Clients go where no server is, as long as there is such a GPU: their kernels wait, on multiprocessors
    /// that the servers' kernels, for which they wait, would find taken.
    fn client_gpu(&self, client: usize) -> usize {
        match self.num_gpus - self.server_gpus() {
            0 => client % self.num_gpus,
            free => self.server_gpus() + client % free,
        }
    }

    fn part(&self, gpu: usize, num_blocks: u32) -> Part {
        let device = match self.wish.device {
            DeviceName::Cuda(first) => DeviceName::Cuda(first + gpu as u32),
            DeviceName::Emulated(first) => DeviceName::Emulated(first + gpu as u32),
        };
        Part {
            dir: self.dir.to_owned(),
            device: device.to_string(),
            dtype: self.wish.dtype.name().to_owned(),
            slot_bytes: self.slot_bytes,
            transport: self.wish.transport.transport.to_string(),
            #[cfg(feature = "verbs")]
            verbs_config: self.wish.transport.verbs_config.clone(),
            #[cfg(feature = "ibgda")]
            ibgda: self.wish.transport.ibgda,
            num_blocks,
        }
    }

    fn start(&self, role: Role) -> Result<Worker> {
        if self.has_threads { Worker::thread(role) } else { Worker::process(&role) }
    }

    fn server_part(&self, server: usize) -> Part {
        let gpu = self.server_gpu(server);
        let here = (0..self.wish.servers).filter(|other| self.server_gpu(*other) == gpu).count();
        // Receptions wait on multiprocessors of their own.
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
            gather_us: self.wish.gather_us,
        }))
    }

    fn start_servers(&self, copies: usize) -> Result<Vec<(Worker, String)>> {
        let replicas = self.replicas(copies);
        let servers = 0..self.wish.servers;
        let started = servers.map(|server| self.start_server(server, &replicas));
        let started: Vec<Worker> = started.collect::<Result<_>>()?;
        started.into_iter().map(with_addr).collect()
    }

    /// Clients of `servers`, which all begin together. `during` runs meanwhile.
    fn measure(
        &self,
        addrs: &[String],
        replicas: &[Vec<u32>],
        clients: usize,
        tokens: usize,
        seconds: f64,
        during: impl FnOnce() -> Result<()>,
    ) -> Result<Vec<Measured>> {
        let mut started: Vec<Worker> = (0..clients)
            .map(|client| {
                self.start(Role::Client(Client {
                    part: self.client_part(client),
                    addrs: addrs.to_vec(),
                    replicas: replicas.to_vec(),
                    tokens,
                    seconds,
                    seed: self.wish.seed + client as u64,
                    checks: self.wish.is_kill(),
                }))
            })
            .collect::<Result<_>>()?;
        for worker in &mut started {
            worker.hear(PATIENCE)?;
        }
        for worker in &mut started {
            worker.say("go")?;
        }
        during()?;
        let limit = PATIENCE + Duration::from_secs_f64(seconds);
        started.iter_mut().map(|worker| Ok(serde_json::from_value(worker.hear(limit)?)?)).collect()
    }

    fn row(&self, servers: &mut [(Worker, String)], tokens: usize) -> Result<Row> {
        let wish = self.wish;
        let addrs: Vec<String> = servers.iter().map(|(_, addr)| addr.clone()).collect();
        let replicas = self.replicas(1);
        let rate = |measured: &[Measured]| -> f64 {
            measured.iter().map(|client| client.calls_per_s * tokens as f64).sum()
        };
        let alone = match wish.clients {
            1 => None,
            _ => Some(self.measure(&addrs, &replicas, 1, tokens, wish.seconds, || Ok(()))?),
        };
        // What the servers count begins here.
        for (worker, _) in servers.iter_mut() {
            worker.ask("stats")?;
        }
        let clients =
            self.measure(&addrs, &replicas, wish.clients, tokens, wish.seconds, || Ok(()))?;
        let (mut compute_us, mut server_us, mut gather_us) = (0.0f64, 0.0f64, 0.0f64);
        let mut batched = Vec::new();
        for (worker, _) in servers.iter_mut() {
            let stats: Counted = serde_json::from_value(worker.ask("stats")?)?;
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
        let layer_us_p50 = percentile(&mut medians, 0.5);
        let tokens_per_s = rate(&clients);
        Ok(Row {
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
            clients,
        })
    }

    /// Servers that replicate each other, one of which dies in the middle of each run.
    fn kill(&self, tokens: usize) -> Result<Killed> {
        let wish = self.wish;
        let mut servers = self.start_servers(wish.servers)?;
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
            || measure_one(std::slice::from_ref(&last), &only, wish.seconds, &mut || Ok(()));
        let before = alone()?;
        let replicas = self.replicas(wish.servers);
        let mut runs = Vec::with_capacity(wish.kills);
        for run in 0..wish.kills {
            if run > 0 {
                servers[0] = with_addr(self.start_server(0, &replicas)?)?;
            }
            let addrs: Vec<String> = servers.iter().map(|(_, addr)| addr.clone()).collect();
            let victim = &mut servers[0].0;
            let mut killed_at_us = 0.0;
            let measured = measure_one(&addrs, &replicas, wish.seconds * 3.0, &mut || {
                std::thread::sleep(Duration::from_secs_f64(wish.seconds * 1.5));
                killed_at_us = roles::monotonic_us();
                victim.kill()
            })?;
            runs.push((killed_at_us, measured));
        }
        Killed::of(tokens, [before, alone()?], runs)
    }
}

/// A server that was started, with where clients connect.
fn with_addr(mut worker: Worker) -> Result<(Worker, String)> {
    let addr = worker.hear(PATIENCE)?["addr"].as_str().context("no address")?.to_owned();
    Ok((worker, addr))
}

fn percentile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let at = ((values.len() as f64 * share) as usize).min(values.len().saturating_sub(1));
    values.get(at).copied().unwrap_or(0.0)
}

fn print_report(report: &Report) {
    outln!(
        "{}: hidden {}, top-{} of {} experts, {} client(s) and {} server(s) on {}, {} on the wire{}",
        report.preset,
        report.hidden,
        report.top_k,
        report.num_experts,
        report.clients,
        report.servers,
        report.device,
        report.wire_dtype,
        if report.shares_gpus { ", sharing GPUs" } else { "" }
    );
    if !report.rows.is_empty() {
        outln!(
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
        );
    }
    for row in &report.rows {
        outln!(
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
        );
    }
    if let Some(killed) = &report.killed {
        outln!(
            "killed one of {} replicas at {} tokens, {} time(s): stall {:.2} ms, {:.2} ms at most, {} failover(s), {} pairs sent again, {} wrong; afterwards {:.1} calls/s, {:.1} % of one server alone (whose two runs differ by {:.1} %)",
            report.servers,
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
        );
        for death in killed.deaths.iter().flatten() {
            let is_before = death.into_call_us < 0.0;
            outln!(
                "  {:.2} ms {} a call; sent again {:.2} ms after the kill, answered {:.2} ms later",
                death.into_call_us.abs() * 1e-3,
                if is_before { "before" } else { "into" },
                death.sent_again_us * 1e-3,
                death.answered_us * 1e-3
            );
        }
    }
}

/// GPUs in software that reach one another.
const EMULATED_GPUS: u32 = 8;
/// Of a GPU that roles share.
const MULTIPROCESSORS: u32 = 132;
/// Thread blocks of a client that shares a GPU.
const CLIENT_BLOCKS: u32 = 16;
/// Multiprocessors that a waiting reception holds.
const RECEPTION_SHARE: u32 = 10;
