//! Layer time while one of three servers is slow, with hedges and without.
//!
//! ```text
//! slow_server BINARY none|freeze|share TOKENS SECONDS [MODEL]
//! ```
//!
//! `freeze` stops server 0 for 5 ms of every 50 ms. `share` stops it for 9.5 ms of every 10 ms, so that it is about
//! twenty times as slow. Two clients, one without hedges and one with the default budget, take turns of 0.25 s. Each
//! expert is on two of the three servers. Prints one JSON object per client.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use attention_client::{ClientModel, MoeClient};
use checkpoint::Checkpoint;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rustix::process::{Pid, Signal, kill_process};
use switchyard_cli::anyhow::{Context, Result, bail};
use switchyard_cli::cluster::{ClusterOptions, LocalCluster};

const TURN: Duration = Duration::from_millis(250);
const WARM_UP: usize = 2000;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let [_, binary, mode, tokens, seconds, rest @ ..] = &args[..] else {
        bail!("usage: slow_server BINARY none|freeze|share TOKENS SECONDS [MODEL]");
    };
    let (stop, run) = match mode.as_str() {
        "none" => (Duration::ZERO, Duration::ZERO),
        "freeze" => (Duration::from_millis(5), Duration::from_millis(45)),
        "share" => (Duration::from_micros(9500), Duration::from_micros(500)),
        other => bail!("{other}: expected none, freeze or share"),
    };
    let num_tokens: usize = tokens.parse().context("TOKENS")?;
    let span = Duration::from_secs(seconds.parse().context("SECONDS")?);
    let dir = rest.first().map_or("data/tiny-moe", String::as_str);
    let checkpoint = Checkpoint::open(dir)?;
    let mut options = ClusterOptions::new(dir)?;
    options.binary = binary.into();
    (options.num_servers, options.replicas, options.threads) = (3, 2, Some(1));
    let cluster = LocalCluster::start(options, &mut |_| {})?;
    let model = ClientModel::of(&checkpoint);
    let client = |budget: f64| -> Result<MoeClient> {
        let client = MoeClient::builder(model.clone())
            .control_plane(cluster.control_url(), Some(cluster.token().to_owned()))
            .secret(Some(cluster.token().to_owned()))
            .hedge_budget(budget)
            .build()?;
        client.wait_ready(Duration::from_secs(30))?;
        Ok(client)
    };
    let mut runs = [Run::new("off", client(0.0)?), Run::new("on", client(0.05)?)];
    let mut rng = StdRng::seed_from_u64(1);
    for _ in 0..WARM_UP {
        runs.iter_mut().try_for_each(|run| run.call(&mut rng, num_tokens).map(drop))?;
    }
    let is_over = Arc::new(AtomicBool::new(false));
    let pid = cluster.server_pid(0).and_then(|pid| Pid::from_raw(pid.cast_signed()));
    let pid = pid.context("server 0 does not run")?;
    let freezer = std::thread::spawn({
        let is_over = Arc::clone(&is_over);
        move || {
            while !stop.is_zero() && !is_over.load(Ordering::Relaxed) {
                let _ = kill_process(pid, Signal::STOP);
                std::thread::sleep(stop);
                let _ = kill_process(pid, Signal::CONT);
                std::thread::sleep(run);
            }
        }
    });
    let until = Instant::now() + span;
    while Instant::now() < until {
        for run in &mut runs {
            let turn = Instant::now() + TURN;
            while Instant::now() < turn {
                let ns = run.call(&mut rng, num_tokens)?;
                run.samples.push(ns);
            }
        }
    }
    is_over.store(true, Ordering::Relaxed);
    let _ = freezer.join();
    runs.iter_mut().for_each(|run| run.print(mode, num_tokens));
    Ok(())
}

struct Run {
    hedges: &'static str,
    client: MoeClient,
    samples: Vec<u64>,
    num_hedges: u64,
    num_won: u64,
    num_frames: u64,
    num_failovers: u64,
}

impl Run {
    fn new(hedges: &'static str, client: MoeClient) -> Self {
        let (num_hedges, num_won, num_frames, num_failovers) = (0, 0, 0, 0);
        Self { hedges, client, samples: Vec::new(), num_hedges, num_won, num_frames, num_failovers }
    }

    /// One layer. Returns its time.
    fn call(&mut self, rng: &mut StdRng, num_tokens: usize) -> Result<u64> {
        let model = self.client.model();
        let layer = model.moe_layers[rng.random_range(0..model.moe_layers.len())];
        let (k, num_experts) = (model.shape.top_k as usize, model.shape.num_experts as usize);
        let x: Vec<f32> =
            (0..num_tokens * self.client.hidden()).map(|_| rng.random_range(-1.0..1.0)).collect();
        let mut idx = Vec::with_capacity(num_tokens * k);
        for _ in 0..num_tokens {
            idx.extend(rand::seq::index::sample(rng, num_experts, k).iter().map(|e| e as i32));
        }
        let weights = vec![1.0 / k as f32; idx.len()];
        let mut out = vec![f32::NAN; x.len()];
        let start = Instant::now();
        let timing = self.client.forward(layer, &x, &idx, &weights, &mut out)?;
        let ns = start.elapsed().as_nanos() as u64;
        self.num_hedges += u64::from(timing.hedges);
        self.num_won += u64::from(timing.hedges_won);
        self.num_frames += u64::from(timing.num_frames);
        self.num_failovers += u64::from(timing.failovers);
        Ok(ns)
    }

    fn print(&mut self, mode: &str, num_tokens: usize) {
        self.samples.sort_unstable();
        let quantile = |q: f64| {
            let idx = (self.samples.len() as f64 * q) as usize;
            self.samples.get(idx).map_or(0.0, |ns| *ns as f64 / 1e3)
        };
        let mean = self.samples.iter().sum::<u64>() as f64 / 1e3 / self.samples.len().max(1) as f64;
        println!(
            "{{\"mode\": \"{mode}\", \"tokens\": {num_tokens}, \"hedges\": \"{}\", \"layers\": {}, \"p50_us\": {:.1}, \
             \"p90_us\": {:.1}, \"p99_us\": {:.1}, \"p999_us\": {:.1}, \"mean_us\": {mean:.1}, \"frames\": {}, \
             \"hedged_frames\": {}, \"won\": {}, \"failovers\": {}}}",
            self.hedges,
            self.samples.len(),
            quantile(0.5),
            quantile(0.9),
            quantile(0.99),
            quantile(0.999),
            self.num_frames,
            self.num_hedges,
            self.num_won,
            self.num_failovers
        );
    }
}
