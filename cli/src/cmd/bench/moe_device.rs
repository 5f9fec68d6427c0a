//! `switchyard bench moe --device`: one layer through servers on GPUs, every client and server a process
//! of its own, with random weights that each server makes in its GPU's memory.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result, bail};
use attention_client::{
    ClientModel, DeviceClient, DeviceInput, DeviceOptions, LayerTiming, MoeClient,
};
use checkpoint::{Checkpoint, MakeOptions, Preset, make_checkpoint};
use control_api::{LayerPlacement, MemberId, PlacementTable, ServerEntry};
use expert_server::device::DeviceOptions as ServerDevice;
use expert_server::{ExpertSelection, ExpertServer, Placement, ServerConfig};
use kernels::gpu::{DeviceName, Gpu, GpuBuffer};
use p2p_core::SlotConfig;
use protocol::WireDtype;
use rand::rngs::StdRng;
use rand::seq::index::sample;
use rand::{RngExt, SeedableRng};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{Global, ui};

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
    pub kill: bool,
}

/// A child's part, by environment.
#[derive(Debug, Serialize, Deserialize)]
enum Role {
    Server(Server),
    Client(Client),
}

#[derive(Debug, Serialize, Deserialize)]
struct Server {
    dir: PathBuf,
    device: String,
    dtype: String,
    slot_bytes: usize,
    experts: Vec<u32>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Client {
    dir: PathBuf,
    device: String,
    dtype: String,
    slot_bytes: usize,
    addrs: Vec<String>,
    /// Servers of each expert.
    replicas: Vec<Vec<u32>>,
    tokens: usize,
    seconds: f64,
    seed: u64,
    /// Whether every output is compared with the first.
    checks: bool,
}

/// What a client measured. Times are microseconds.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Measured {
    calls: usize,
    layer_us_p50: f64,
    layer_us_p99: f64,
    /// Longest call.
    layer_us_max: f64,
    calls_per_s: f64,
    /// Of the last third of the time.
    late_calls_per_s: f64,
    failovers: u32,
    resent_pairs: u64,
    stall_us_max: f64,
    /// Outputs that lack or double something, or calls that failed.
    wrong: usize,
}

#[derive(Debug, Serialize)]
struct Row {
    tokens: usize,
    clients: Vec<Measured>,
    /// Median over the clients.
    layer_us_p50: f64,
    /// Mean of a batch's time from its reception to its answer, of the slowest server.
    compute_us: f64,
    /// Layer time over that.
    ratio: f64,
    tokens_per_s: f64,
    /// Clients of a server's mean batch.
    clients_per_batch: f64,
    /// Tokens per second beside those of one client alone.
    gain: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Killed {
    tokens: usize,
    /// Calls per second with one server of the two, in a run of its own.
    one_server_calls_per_s: f64,
    /// After the other was killed.
    after_calls_per_s: f64,
    ratio: f64,
    /// Longest call beyond the median.
    stall_us: f64,
    failovers: u32,
    resent_pairs: u64,
    wrong: usize,
}

#[derive(Debug, Serialize)]
struct Report {
    preset: String,
    device: String,
    clients: usize,
    servers: usize,
    wire_dtype: String,
    hidden: usize,
    num_experts: u32,
    top_k: usize,
    rows: Vec<Row>,
    killed: Option<Killed>,
}

/// Runs this process's part where it is a child.
pub(super) fn child() -> Option<ExitCode> {
    let text = std::env::var(ROLE).ok()?;
    let done = serde_json::from_str(&text).map_err(Into::into).and_then(|role| match role {
        Role::Server(server) => server.run(),
        Role::Client(client) => client.run(),
    });
    Some(match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tell(&json!({ "error": format!("{error:#}") }));
            ExitCode::FAILURE
        }
    })
}

pub(super) fn run(global: &Global, wish: &Wish) -> Result<ExitCode> {
    let most = wish.tokens.iter().copied().max().unwrap_or(1);
    let dir = std::env::temp_dir().join(format!("switchyard-bench-moe-{}", std::process::id()));
    let made = Shapes::make(&dir, wish.preset)?;
    let checkpoint = Checkpoint::open(&dir)?;
    let config = checkpoint.config();
    let bench = Bench {
        wish,
        dir: &dir,
        num_experts: config.num_experts,
        // Rows, scales, entries and flags of two frames; answers are bf16.
        slot_bytes: 2 * (most + 1) * (config.hidden * 2 + config.hidden / 32 + 256) + (64 << 10),
        num_gpus: match wish.device {
            DeviceName::Cuda(_) => Gpu::count()?.max(1) as usize,
            DeviceName::Emulated(_) => 8,
        },
    };
    let mut rows = Vec::new();
    let killed = if wish.kill {
        Some(bench.kill(most)?)
    } else {
        let mut servers = bench.start_servers(1)?;
        for &tokens in &wish.tokens {
            rows.push(bench.row(&mut servers, tokens)?);
        }
        None
    };
    let report = Report {
        preset: wish.preset.name().to_owned(),
        device: wish.device.to_string(),
        clients: wish.clients,
        servers: wish.servers,
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
}

impl Bench<'_> {
    /// Servers of each expert, with `copies` of each.
    fn replicas(&self, copies: usize) -> Vec<Vec<u32>> {
        let servers = self.wish.servers;
        (0..self.num_experts as usize)
            .map(|expert| (0..copies).map(|copy| ((expert + copy) % servers) as u32).collect())
            .collect()
    }

    fn device(&self, idx: usize) -> String {
        let idx = (idx % self.num_gpus) as u32;
        match self.wish.device {
            DeviceName::Cuda(_) => DeviceName::Cuda(idx),
            DeviceName::Emulated(_) => DeviceName::Emulated(idx),
        }
        .to_string()
    }

    fn start_servers(&self, copies: usize) -> Result<Vec<(Process, String)>> {
        let replicas = self.replicas(copies);
        let started: Vec<Process> = (0..self.wish.servers)
            .map(|server| {
                let holds = |expert: &u32| replicas[*expert as usize].contains(&(server as u32));
                Process::start(&Role::Server(Server {
                    dir: self.dir.to_owned(),
                    device: self.device(server),
                    dtype: self.wish.dtype.name().to_owned(),
                    slot_bytes: self.slot_bytes,
                    experts: (0..self.num_experts).filter(holds).collect(),
                }))
            })
            .collect::<Result<_>>()?;
        started
            .into_iter()
            .map(|mut process| {
                let addr = process.hear()?["addr"].as_str().context("no address")?.to_owned();
                Ok((process, addr))
            })
            .collect()
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
        let mut started: Vec<Process> = (0..clients)
            .map(|client| {
                Process::start(&Role::Client(Client {
                    dir: self.dir.to_owned(),
                    device: self.device(self.wish.servers + client),
                    dtype: self.wish.dtype.name().to_owned(),
                    slot_bytes: self.slot_bytes,
                    addrs: addrs.to_vec(),
                    replicas: replicas.to_vec(),
                    tokens,
                    seconds,
                    seed: self.wish.seed + client as u64,
                    checks: self.wish.kill,
                }))
            })
            .collect::<Result<_>>()?;
        for process in &mut started {
            process.hear()?;
        }
        for process in &mut started {
            process.say("go")?;
        }
        during()?;
        started.iter_mut().map(|process| Ok(serde_json::from_value(process.hear()?)?)).collect()
    }

    fn row(&self, servers: &mut [(Process, String)], tokens: usize) -> Result<Row> {
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
        for (process, _) in servers.iter_mut() {
            process.ask("stats")?;
        }
        let clients =
            self.measure(&addrs, &replicas, wish.clients, tokens, wish.seconds, || Ok(()))?;
        let (mut compute_us, mut batched) = (0.0f64, Vec::new());
        for (process, _) in servers.iter_mut() {
            let stats = process.ask("stats")?;
            let number = |name: &str| stats[name].as_f64().unwrap_or(0.0);
            compute_us =
                compute_us.max(number("compute_seconds") / number("batches").max(1.0) * 1e6);
            batched.push(number("batch_clients") / number("batches").max(1.0));
        }
        let mut medians: Vec<f64> = clients.iter().map(|client| client.layer_us_p50).collect();
        let layer_us_p50 = percentile(&mut medians, 0.5);
        let tokens_per_s = rate(&clients);
        Ok(Row {
            tokens,
            layer_us_p50,
            compute_us,
            ratio: layer_us_p50 / compute_us,
            tokens_per_s,
            clients_per_batch: batched.iter().sum::<f64>() / batched.len() as f64,
            gain: alone.map(|alone| tokens_per_s / rate(&alone)),
            clients,
        })
    }

    /// Two servers that replicate each other, one of which dies in the middle of the run.
    fn kill(&self, tokens: usize) -> Result<Killed> {
        let wish = self.wish;
        let copies = wish.servers;
        let mut servers = self.start_servers(copies)?;
        let addrs: Vec<String> = servers.iter().map(|(_, addr)| addr.clone()).collect();
        let only: Vec<Vec<u32>> = vec![vec![0]; self.num_experts as usize];
        let last = &addrs[addrs.len() - 1..];
        let alone = self.measure(last, &only, 1, tokens, wish.seconds, || Ok(()))?;
        let replicas = self.replicas(copies);
        let (mut victim, _) = servers.remove(0);
        let measured = self.measure(&addrs, &replicas, 1, tokens, wish.seconds * 3.0, || {
            std::thread::sleep(Duration::from_secs_f64(wish.seconds * 1.5));
            victim.child.kill().context("cannot kill a server")
        })?;
        let (alone, measured) = (&alone[0], &measured[0]);
        Ok(Killed {
            tokens,
            one_server_calls_per_s: alone.calls_per_s,
            after_calls_per_s: measured.late_calls_per_s,
            ratio: measured.late_calls_per_s / alone.calls_per_s,
            stall_us: measured.layer_us_max - measured.layer_us_p50,
            failovers: measured.failovers,
            resent_pairs: measured.resent_pairs,
            wrong: measured.wrong + alone.wrong,
        })
    }
}

impl Server {
    fn run(self) -> Result<()> {
        let device: DeviceName = self.device.parse()?;
        let selection = ExpertSelection::EveryLayer(self.experts);
        let name = format!("bench-{}", std::process::id());
        let mut config = ServerConfig::new(&self.dir, name, Placement::Static(selection));
        let dtype = dtype_of(&self.dtype);
        config.device =
            Some(ServerDevice { dtype, random_weights: true, ..ServerDevice::new(device) });
        config.slot = SlotConfig { slot_bytes: self.slot_bytes, num_frames: NUM_FRAMES };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .context("cannot start the runtime")?;
        let server = runtime.block_on(ExpertServer::start(config, |_| {}))?;
        tell(&json!({ "addr": server.data_addr().to_string() }));
        let mut before = [0.0; 3];
        for line in std::io::stdin().lines() {
            if line? != "stats" {
                break;
            }
            let text = server.render_metrics()?;
            let value = |name: &str| -> f64 {
                let lines = text.lines().filter(|line| line.starts_with(name));
                lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
            };
            let now = [
                value("switchyard_server_phase_seconds_sum{phase=\"compute\"}"),
                value("switchyard_server_phase_seconds_count{phase=\"compute\"}"),
                value("switchyard_server_batch_clients_sum"),
            ];
            tell(&json!({
                "compute_seconds": now[0] - before[0],
                "batches": now[1] - before[1],
                "batch_clients": now[2] - before[2],
            }));
            before = now;
        }
        runtime.block_on(server.shutdown());
        Ok(())
    }
}

impl Client {
    fn run(self) -> Result<()> {
        let checkpoint = Checkpoint::open(&self.dir)?;
        let model = ClientModel::of(&checkpoint);
        let gpu = Gpu::open_named(self.device.parse()?)?;
        let mut options = DeviceOptions::default();
        options.dtype = dtype_of(&self.dtype);
        let mut client = MoeClient::builder(model.clone())
            .placement(self.table(&model))
            .slot(SlotConfig { slot_bytes: self.slot_bytes, num_frames: NUM_FRAMES })
            .build_device(gpu.clone(), options)?;
        client.wait_ready(Duration::from_secs(60))?;
        let layer = *model.moe_layers.first().context("no layer with experts")?;
        let tensors = Tensors::random(&gpu, &model, self.tokens, self.seed)?;
        let stream = gpu.stream()?;
        // A death is looked for call by call; otherwise a graph has some layers, as an engine's has, so that
        // the host's part of a call is not a part of the layer.
        let graph = match self.checks {
            true => None,
            false => Some(stream.capture(|stream| {
                for _ in 0..GRAPH_LAYERS {
                    // SAFETY: the tensors have these sizes and outlive the graph.
                    let recorded = unsafe {
                        client
                            .dispatch(stream, layer, &tensors.input)
                            .and_then(|handle| client.combine(stream, handle, tensors.out.ptr()))
                    };
                    if let Err(error) = recorded {
                        tracing::error!(%error, "a layer is not recorded");
                    }
                }
                Ok(())
            })?),
        };
        let call = |client: &mut DeviceClient| {
            let start = Instant::now();
            if let Some(graph) = &graph {
                let report = client.replay(&stream, graph)?;
                let timing = LayerTiming {
                    failovers: report.attempts - 1,
                    stall_ns: report.stall_ns,
                    ..LayerTiming::default()
                };
                return Ok((start.elapsed().as_secs_f64() * 1e6 / f64::from(GRAPH_LAYERS), timing));
            }
            // SAFETY: the tensors have these sizes and outlive the call.
            let timing =
                unsafe { client.forward(&stream, layer, &tensors.input, tensors.out.ptr()) };
            timing.map(|timing| (start.elapsed().as_secs_f64() * 1e6, timing)).map_err(Error::from)
        };
        for _ in 0..WARM_UP {
            call(&mut client)?;
        }
        let expected = tensors.read(&gpu)?;
        tell(&json!({ "event": "ready" }));
        std::io::stdin().read_line(&mut String::new())?;
        let mut measured = Measured {
            calls: 0,
            layer_us_p50: 0.0,
            layer_us_p99: 0.0,
            layer_us_max: 0.0,
            calls_per_s: 0.0,
            late_calls_per_s: 0.0,
            failovers: 0,
            resent_pairs: 0,
            stall_us_max: 0.0,
            wrong: 0,
        };
        let mut times = Vec::new();
        let start = Instant::now();
        let late = self.seconds * 2.0 / 3.0;
        let (mut late_us, mut num_late) = (0.0, 0usize);
        while start.elapsed().as_secs_f64() < self.seconds || times.len() < MIN_CALLS {
            let (us, timing) = call(&mut client)?;
            times.push(us);
            // Looking at outputs costs time of its own, so rates are of the calls.
            if start.elapsed().as_secs_f64() > late {
                late_us += us;
                num_late += 1;
            }
            measured.failovers += timing.failovers;
            measured.resent_pairs += timing.resent_pairs;
            measured.stall_us_max = measured.stall_us_max.max(timing.stall_ns as f64 * 1e-3);
            if self.checks && !tensors.is_like(&gpu, &expected)? {
                measured.wrong += 1;
            }
        }
        measured.calls = times.len();
        measured.calls_per_s = times.len() as f64 / (times.iter().sum::<f64>() * 1e-6);
        measured.late_calls_per_s = num_late as f64 / (late_us * 1e-6).max(1e-9);
        measured.layer_us_max = times.iter().copied().fold(0.0, f64::max);
        measured.layer_us_p50 = percentile(&mut times, 0.5);
        measured.layer_us_p99 = percentile(&mut times, 0.99);
        tell(&serde_json::to_value(&measured)?);
        Ok(())
    }

    fn table(&self, model: &ClientModel) -> PlacementTable {
        let servers = self.addrs.iter().enumerate().filter_map(|(idx, addr)| {
            Some(ServerEntry {
                member_id: MemberId::parse(&format!("m-{idx}")).ok()?,
                name: format!("server-{idx}"),
                incarnation: 1,
                data_addr: addr.clone(),
            })
        });
        let layers = model
            .moe_layers
            .iter()
            .map(|&layer| LayerPlacement { layer, replicas: self.replicas.clone() });
        PlacementTable {
            cluster_id: "bench".to_owned(),
            epoch: 1,
            model: Some(model.descriptor()),
            servers: servers.collect(),
            layers: layers.collect(),
        }
    }
}

/// Random tokens and routing in GPU memory.
struct Tensors {
    _memory: Vec<GpuBuffer>,
    input: DeviceInput,
    out: GpuBuffer,
    hidden: usize,
}

impl Tensors {
    fn random(gpu: &Gpu, model: &ClientModel, tokens: usize, seed: u64) -> Result<Self> {
        let mut rng = StdRng::seed_from_u64(seed);
        let (hidden, top_k) = (model.shape.hidden as usize, model.shape.top_k as usize);
        let deadline = Instant::now() + Duration::from_secs(60);
        let upload = |bytes: &[u8]| -> Result<GpuBuffer> {
            let memory = gpu.alloc(bytes.len() as u64)?;
            gpu.write(&memory, 0, bytes, deadline)?;
            Ok(memory)
        };
        // The upper half of an f32 is a bf16.
        let x: Vec<u8> = (0..tokens * hidden)
            .flat_map(|_| {
                let bits = rng.random_range(-1.0f32..1.0).to_bits();
                ((bits >> 16) as u16).to_le_bytes()
            })
            .collect();
        let (mut idx, mut weights) = (Vec::new(), Vec::new());
        for _ in 0..tokens {
            for expert in sample(&mut rng, model.shape.num_experts as usize, top_k).iter() {
                idx.extend_from_slice(&(expert as i32).to_le_bytes());
                weights.extend_from_slice(&(1.0 / top_k as f32).to_le_bytes());
            }
        }
        let memory = vec![
            upload(&x)?,
            upload(&idx)?,
            upload(&weights)?,
            upload(&(tokens as u32).to_le_bytes())?,
        ];
        let input = DeviceInput {
            hidden_states: memory[0].ptr(),
            topk_idx: memory[1].ptr(),
            topk_weights: memory[2].ptr(),
            num_tokens: memory[3].ptr(),
            capacity: u32::try_from(tokens)?,
        };
        let out = gpu.alloc((tokens * hidden * 2) as u64)?;
        Ok(Self { _memory: memory, input, out, hidden })
    }

    fn read(&self, gpu: &Gpu) -> Result<Vec<f32>> {
        let mut bytes = vec![0u8; self.out.len() as usize];
        gpu.read(&self.out, 0, &mut bytes, Instant::now() + Duration::from_secs(60))?;
        let (words, _) = bytes.as_chunks::<2>();
        Ok(words.iter().map(|w| f32::from_bits(u32::from(u16::from_le_bytes(*w)) << 16)).collect())
    }

    /// Whether the output is the same but for the order of its sums: an expert more or less shows as an
    /// eighth of a token.
    fn is_like(&self, gpu: &Gpu, expected: &[f32]) -> Result<bool> {
        let found = self.read(gpu)?;
        Ok(found.chunks_exact(self.hidden).zip(expected.chunks_exact(self.hidden)).all(
            |(found, expected)| {
                let norm: f64 = expected.iter().map(|v| f64::from(*v).powi(2)).sum();
                let pairs = found.iter().zip(expected);
                let off: f64 = pairs.map(|(f, e)| f64::from(f - e).powi(2)).sum();
                off.is_finite() && norm > 0.0 && off <= norm * 4e-4
            },
        ))
    }
}

/// A child that speaks JSON lines.
struct Process {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
    input: ChildStdin,
}

impl Process {
    fn start(role: &Role) -> Result<Self> {
        let binary = std::env::current_exe().context("cannot tell the path of this binary")?;
        let mut child = Command::new(binary)
            .env(ROLE, serde_json::to_string(role)?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start a process of the benchmark")?;
        let lines = child.stdout.take().context("no pipe")?;
        let input = child.stdin.take().context("no pipe")?;
        Ok(Self { child, lines: BufReader::new(lines).lines(), input })
    }

    fn say(&mut self, line: &str) -> Result<()> {
        writeln!(self.input, "{line}").context("a process of the benchmark is gone")
    }

    /// The next thing that the child tells.
    fn hear(&mut self) -> Result<Value> {
        let line = self.lines.next().context("a process of the benchmark ended early")??;
        let value: Value = serde_json::from_str(&line)
            .with_context(|| format!("a process of the benchmark wrote {line:?}"))?;
        match value["error"].as_str() {
            Some(error) => bail!("a process of the benchmark: {error}"),
            None => Ok(value),
        }
    }

    fn ask(&mut self, line: &str) -> Result<Value> {
        self.say(line)?;
        self.hear()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A checkpoint of holes, removed when dropped.
struct Shapes<'a> {
    dir: &'a Path,
}

impl<'a> Shapes<'a> {
    fn make(dir: &'a Path, preset: Preset) -> Result<Self> {
        let made = Self { dir };
        let mut options = MakeOptions::new(preset, 1);
        options.shapes_only = true;
        make_checkpoint(dir, &options, &mut |_, _| {})
            .with_context(|| format!("cannot make a checkpoint in {}", dir.display()))?;
        Ok(made)
    }
}

impl Drop for Shapes<'_> {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(self.dir);
    }
}

fn tell(value: &Value) {
    // The parent may be gone; then nobody listens.
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{value}");
    let _ = out.flush();
}

fn dtype_of(name: &str) -> WireDtype {
    if name == WireDtype::F8E4m3.name() { WireDtype::F8E4m3 } else { WireDtype::Bf16 }
}

fn percentile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let at = ((values.len() as f64 * share) as usize).min(values.len().saturating_sub(1));
    values.get(at).copied().unwrap_or(0.0)
}

fn print_report(report: &Report) {
    outln!(
        "{}: hidden {}, top-{} of {} experts, {} client(s) and {} server(s) on {}, {} on the wire",
        report.preset,
        report.hidden,
        report.top_k,
        report.num_experts,
        report.clients,
        report.servers,
        report.device,
        report.wire_dtype
    );
    if !report.rows.is_empty() {
        outln!(
            "{:>6} {:>10} {:>10} {:>7} {:>12} {:>14} {:>6}",
            "tokens",
            "layer µs",
            "compute µs",
            "ratio",
            "tokens/s",
            "clients/batch",
            "gain"
        );
    }
    for row in &report.rows {
        outln!(
            "{:>6} {:>10.1} {:>10.1} {:>7.3} {:>12.0} {:>14.2} {:>6}",
            row.tokens,
            row.layer_us_p50,
            row.compute_us,
            row.ratio,
            row.tokens_per_s,
            row.clients_per_batch,
            row.gain.map_or_else(|| "–".to_owned(), |gain| format!("{gain:.2}"))
        );
    }
    if let Some(killed) = &report.killed {
        outln!(
            "killed one of {} replicas at {} tokens: stall {:.2} ms, {} failover(s), {} pairs sent again, {} wrong; afterwards {:.1} calls/s, {:.1} % of one server alone",
            report.servers,
            killed.tokens,
            killed.stall_us * 1e-3,
            killed.failovers,
            killed.resent_pairs,
            killed.wrong,
            killed.after_calls_per_s,
            killed.ratio * 100.0
        );
    }
}

const ROLE: &str = "SWITCHYARD_BENCH_MOE_ROLE";
const NUM_FRAMES: usize = 2;
/// Layers of a recorded graph.
const GRAPH_LAYERS: u32 = 8;
const WARM_UP: usize = 10;
const MIN_CALLS: usize = 21;
