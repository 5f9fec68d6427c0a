//! Servers that read their weights from another server's memory. Measures the time of a join beside a copy of the same
//! bytes, and layer times of a client while servers join, load and leave. Prints a line of JSON for each measurement.
//!
//! `peer_weights join|join-tcp|fleet SWITCHYARD MODEL FOLDER LIMIT ROUNDS`: the binary, a complete checkpoint, a folder with
//! its `config.json` alone, the sources' `--peer-read-limit`, and the number of rounds. With `join-tcp` the joining servers
//! belong to user 65534, so that they share no memory with the source; root only.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use attention_client::{ClientModel, MoeClient};
use checkpoint::Checkpoint;
use control_api::{ControlClient, FleetGoals};
use expert_server::compute::{ExpertStore, Residency};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

struct Setup {
    binary: PathBuf,
    full: PathBuf,
    bare: PathBuf,
    limit: String,
    url: String,
}

/// A process that is killed at the end of its test.
struct Process(Child, BufReader<std::process::ChildStdout>);

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Process {
    fn start(command: &mut Command) -> Result<Self> {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        let out = child.stdout.take().context("its output")?;
        Ok(Self(child, BufReader::new(out)))
    }

    fn wait_for(&mut self, event: &str) -> Result<()> {
        let mut line = String::new();
        let wanted = format!("\"event\":\"{event}\"");
        loop {
            line.clear();
            ensure!(self.1.read_line(&mut line)? > 0, "the process ended before {event}");
            if line.replace(' ', "").contains(&wanted) {
                return Ok(());
            }
        }
    }
}

impl Setup {
    fn control_plane(&self, args: &[&str]) -> Result<Process> {
        let listen = self.url.trim_start_matches("http://");
        let mut command = Command::new(&self.binary);
        command.args(["--json", "control-plane", "--listen", listen]).args(args);
        let mut process = Process::start(&mut command)?;
        process.wait_for("listening")?;
        Ok(process)
    }

    fn server(&self, name: &str, dir: &Path, from: &str) -> Result<Process> {
        Process::start(&mut self.server_command(name, dir, from))
    }

    fn server_command(&self, name: &str, dir: &Path, from: &str) -> Command {
        let mut command = Command::new(&self.binary);
        command
            .args(["--json", "expert-server", "--name", name, "--listen", "127.0.0.1:0"])
            .args(["--weights-from", from, "--peer-read-limit", &self.limit])
            .args(["--control-plane", &self.url, "--model"])
            .arg(dir);
        command
    }
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [mode, binary, full, bare, limit, rounds] = args.as_slice() else {
        bail!("expected: join|join-tcp|fleet SWITCHYARD MODEL FOLDER LIMIT ROUNDS");
    };
    let setup = Setup {
        binary: binary.into(),
        full: full.into(),
        bare: bare.into(),
        limit: limit.clone(),
        url: "http://127.0.0.1:17311".to_owned(),
    };
    let checkpoint = Arc::new(Checkpoint::open(&setup.full)?);
    for round in 0..rounds.parse()? {
        match mode.as_str() {
            "join" => join(&setup, &checkpoint, round, false)?,
            "join-tcp" => join(&setup, &checkpoint, round, true)?,
            "fleet" => fleet(&setup, &checkpoint, round)?,
            _ => bail!("mode {mode}: expected join, join-tcp or fleet"),
        }
    }
    Ok(())
}

/// Times of two joins, the second with checksums that the source knows. Beside them are copies of the same
/// bytes by one thread, two threads and as many as the server has. For TCP there is also a transfer of the same bytes
/// over as many connections.
fn join(setup: &Setup, checkpoint: &Arc<Checkpoint>, round: u32, is_tcp: bool) -> Result<()> {
    let _control = setup.control_plane(&["--servers", "2", "--replicas", "2"])?;
    let mut source = setup.server("a", &setup.full, "disk")?;
    source.wait_for("serving")?;
    let config = checkpoint.config();
    let all: BTreeMap<u32, Vec<u32>> = config
        .moe_layers()
        .into_iter()
        .map(|layer| (layer, (0..config.num_experts).collect()))
        .collect();
    let load = |residency, threads| {
        let begin = Instant::now();
        let store =
            ExpertStore::load(Arc::clone(checkpoint), &all, residency, threads, &mut |_| {})?;
        Ok::<_, anyhow::Error>((store.size_bytes(), begin.elapsed().as_secs_f64()))
    };
    let cpus = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_READS);
    // Maps the files, so that the copies find them.
    let (bytes, _) = load(Residency::Mapped, cpus)?;
    let (_, copy_1) = load(Residency::Copied, 1)?;
    let (_, copy_2) = load(Residency::Copied, 2)?;
    let (_, copy_all) = load(Residency::Copied, cpus)?;
    let tcp_s = if is_tcp { transfer(bytes as usize, cpus)? } else { 0.0 };
    let mut times = Vec::new();
    let loopback = loopback_bytes()?;
    for _ in 0..2 {
        let mut command = setup.server_command("b", &setup.bare, "peers");
        if is_tcp {
            command.uid(65534).gid(65534);
        }
        let begin = Instant::now();
        let mut server = Process::start(&mut command)?;
        server.wait_for("serving")?;
        times.push(begin.elapsed().as_secs_f64());
        drop(server);
        std::thread::sleep(Duration::from_secs(1));
    }
    println!(
        "{{\"round\":{round},\"tcp\":{is_tcp},\"bytes\":{bytes},\"copy_1_thread_s\":{copy_1:.3},\"copy_2_threads_s\":{copy_2:.3},\
         \"threads\":{cpus},\"copy_s\":{copy_all:.3},\"tcp_transfer_s\":{tcp_s:.3},\"first_join_s\":{:.3},\
         \"second_join_s\":{:.3},\"loopback_gb\":{:.2}}}",
        times[0],
        times[1],
        (loopback_bytes()? - loopback) as f64 / 1e9
    );
    Ok(())
}

/// Bytes that the loopback interface has carried.
fn loopback_bytes() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/net/dev")?;
    let line = text.lines().find_map(|line| line.trim().strip_prefix("lo:"));
    let received = line.and_then(|line| line.split_whitespace().next());
    Ok(received.context("no interface lo in /proc/net/dev")?.parse()?)
}

/// Seconds for `bytes` from one memory to another over `num_connections` TCP connections of this host.
fn transfer(bytes: usize, num_connections: usize) -> Result<f64> {
    let part = bytes / num_connections;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let addr = listener.local_addr()?;
    let source = vec![1u8; part];
    let source = &source;
    std::thread::scope(|scope| {
        let begin = Instant::now();
        let mut readers = Vec::new();
        for _ in 0..num_connections {
            let mut to = TcpStream::connect(addr)?;
            let (mut from, _) = listener.accept()?;
            scope.spawn(move || to.write_all(source));
            readers.push(scope.spawn(move || {
                let mut memory = vec![0u8; part];
                from.read_exact(&mut memory)
            }));
        }
        for reader in readers {
            reader.join().map_err(|_| anyhow::anyhow!("a reader panicked"))??;
        }
        Ok(begin.elapsed().as_secs_f64())
    })
}

/// Layer times of a client, in windows.
fn fleet(setup: &Setup, checkpoint: &Arc<Checkpoint>, round: u32) -> Result<()> {
    let _control = setup.control_plane(&[
        "--placement",
        "load",
        "--servers",
        "1",
        "--replicas",
        "1",
        "--spare",
        "0",
    ])?;
    let mut a = setup.server("a", &setup.full, "disk")?;
    a.wait_for("serving")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let control = ControlClient::new(&setup.url, None)?;
    let samples: Arc<Mutex<Vec<(Instant, f64)>>> = Arc::default();
    let is_over = Arc::new(AtomicBool::new(false));
    let loading = {
        let (samples, is_over) = (Arc::clone(&samples), Arc::clone(&is_over));
        let client = MoeClient::builder(ClientModel::of(checkpoint))
            .control_plane(&setup.url, None)
            .build()?;
        client.wait_ready(Duration::from_secs(60))?;
        let model = checkpoint.config();
        let (hidden, experts, top_k) = (model.hidden, model.num_experts as i32, model.top_k);
        let layers = model.moe_layers();
        std::thread::spawn(move || -> Result<()> {
            let mut rng = StdRng::seed_from_u64(u64::from(round) + 1);
            let mut out = vec![0f32; TOKENS * hidden];
            while !is_over.load(Ordering::Relaxed) {
                let x: Vec<f32> =
                    (0..TOKENS * hidden).map(|_| rng.random_range(-1.0..1.0)).collect();
                let idx: Vec<i32> = (0..TOKENS)
                    .flat_map(|_| {
                        let first = rng.random_range(0..experts);
                        (0..top_k as i32).map(move |k| (first + k * 7) % experts)
                    })
                    .collect();
                let weights = vec![1.0 / top_k as f32; TOKENS * top_k];
                let layer = layers[rng.random_range(0..layers.len())];
                let begin = Instant::now();
                client.forward(layer, &x, &idx, &weights, &mut out)?;
                let taken = begin.elapsed().as_secs_f64();
                ensure!(out.iter().all(|value| value.is_finite()), "a wrong output");
                samples.lock().expect("samples").push((begin, taken));
            }
            Ok(())
        })
    };
    let report = |window: &str, begin: Instant| {
        let samples = samples.lock().expect("samples");
        let mut times: Vec<f64> =
            samples.iter().filter(|(at, _)| *at >= begin).map(|(_, taken)| taken * 1e6).collect();
        times.sort_by(f64::total_cmp);
        let quantile = |q: f64| times[((times.len() - 1) as f64 * q) as usize];
        println!(
            "{{\"round\":{round},\"window\":\"{window}\",\"seconds\":{:.2},\"layers\":{},\"p50_us\":{:.0},\"p99_us\":{:.0},\
             \"max_us\":{:.0}}}",
            begin.elapsed().as_secs_f64(),
            times.len(),
            quantile(0.5),
            quantile(0.99),
            quantile(1.0)
        );
    };
    let quiet = |window: &str| {
        let begin = Instant::now();
        std::thread::sleep(WINDOW);
        report(window, begin);
    };
    let held = |name: &str| -> Result<u64> {
        let members = runtime.block_on(control.members())?;
        Ok(members.iter().find(|m| m.name == name).map_or(0, |m| m.experts_held))
    };
    let total =
        (checkpoint.config().moe_layers().len() * checkpoint.config().num_experts as usize) as u64;
    std::thread::sleep(Duration::from_secs(2));
    quiet("before");
    let begin = Instant::now();
    let mut b = setup.server("b", &setup.bare, "peers")?;
    b.wait_for("serving")?;
    report("join", begin);
    std::thread::sleep(Duration::from_secs(2));
    quiet("with two servers");
    let begin = Instant::now();
    runtime.block_on(control.set_goals(&FleetGoals { replicas: 2, spare: 0.0 }))?;
    while held("b")? < total {
        ensure!(begin.elapsed() < Duration::from_secs(120), "the rebalance does not end");
        std::thread::sleep(Duration::from_millis(100));
    }
    report("rebalance", begin);
    quiet("with two replicas");
    let begin = Instant::now();
    let pid = rustix::process::Pid::from_child(&b.0);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
    b.0.wait()?;
    std::thread::sleep(Duration::from_secs(1));
    report("leave", begin);
    quiet("after");
    is_over.store(true, Ordering::Relaxed);
    match loading.join() {
        Ok(outcome) => outcome.context("a call failed"),
        Err(_) => bail!("the client panicked"),
    }
}

/// Tokens of a call.
const TOKENS: usize = 4;
/// Length of a window without a change.
const WINDOW: Duration = Duration::from_secs(8);
/// Threads with which a server reads weights of others, at most.
const MAX_READS: usize = 16;
