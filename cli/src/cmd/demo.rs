//! `switchyard demo`: generates text and kills a server meanwhile.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use attention_client::{ClientModel, LayerTiming, MoeClient};
use bench_harness::stats::of_sorted;
use checkpoint::Checkpoint;
use protocol::WireDtype;
use reference_model::{GenerateOptions, Generation, Generator, LocalExperts};
use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;

use super::Counters;
use crate::cluster::{ClusterOptions, LocalCluster};
use crate::{Global, ui};

/// Options of `demo`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Checkpoint folder. Default: the small model of this repository.
    #[arg(long, env = "SWITCHYARD_MODEL", value_name = "DIR")]
    model: Option<PathBuf>,
    /// Prompt: the text to continue.
    #[arg(long, env = "SWITCHYARD_PROMPT", default_value = "Ownership is a set of rules that")]
    prompt: String,
    /// Number of tokens to generate.
    #[arg(long, env = "SWITCHYARD_MAX_NEW_TOKENS", default_value_t = 64)]
    max_new_tokens: usize,
    /// On a terminal, show at most this many tokens per second, so that a person can read them. 0 means no
    /// limit. The reported times do not include the pauses.
    #[arg(long, env = "SWITCHYARD_SHOW_PER_S", default_value_t = 40)]
    show_per_s: u32,
    /// Do not kill a server.
    #[arg(long, env = "SWITCHYARD_NO_KILL", value_parser = clap::builder::FalseyValueParser::new())]
    no_kill: bool,
    #[command(flatten)]
    local: super::LocalArgs,
    #[command(flatten)]
    client: super::ClientArgs,
}

/// The report that `--json` prints.
#[derive(Debug, Serialize)]
struct Report {
    verified: bool,
    reference: &'static str,
    prompt: String,
    text: String,
    token_ids: Vec<u32>,
    tokens_per_s: f64,
    servers: usize,
    replicas: usize,
    wire_dtype: String,
    layers: usize,
    layer_us_p50: f64,
    layer_us_p99: f64,
    dispatch_us_p50: f64,
    dispatch_us_p99: f64,
    server_queue_us_p50: f64,
    server_queue_us_p99: f64,
    server_compute_us_p50: f64,
    server_compute_us_p99: f64,
    combine_us_p50: f64,
    combine_us_p99: f64,
    killed: Option<Kill>,
    /// Longest layer time after the kill, minus the median layer time. It is the total cost of the kill.
    failover_stall_ms: f64,
    failovers: u32,
    resent_pairs: u64,
    lost_requests: u64,
    duplicated_requests: u64,
}

#[derive(Debug, Serialize)]
struct Kill {
    server: String,
    at_token: usize,
    /// Servers that hold its experts in the placement after the kill.
    taken_over_by: Vec<String>,
}

/// One finished layer, with the time of its end.
type Sample = (Instant, LayerTiming);

pub fn run(global: &Global, args: Args) -> Result<ExitCode> {
    let dir = super::model_or_tiny(args.model.clone())?;
    let checkpoint = super::open_checkpoint(&dir)?;
    let kill = !args.no_kill;
    let fewest = if kill { 2 } else { 1 };
    if args.max_new_tokens < fewest {
        bail!(
            "--max-new-tokens {}: expected at least {fewest}{}",
            args.max_new_tokens,
            if kill { ", one before the kill and one after it" } else { "" }
        );
    }
    if kill && (args.local.replicas < 2 || args.local.servers < 2) {
        bail!(
            "with --servers {} and --replicas {} no server could take over: expected at least 2 of both, or --no-kill",
            args.local.servers,
            args.local.replicas
        );
    }
    let mut options = ClusterOptions::new(&dir)?;
    options.num_servers = args.local.servers;
    options.replicas = args.local.replicas;
    options.server_args = args.client.server_args();
    // The servers of the demo share this host. One thread each avoids contention for CPUs.
    options.threads = Some(1);
    options.tls = true;
    let is_terminal = std::io::stdout().is_terminal();
    let say = Narrator {
        on: !global.json,
        color: is_terminal,
        pause: match args.show_per_s {
            per_s if per_s > 0 && is_terminal && !global.json => Duration::from_secs(1) / per_s,
            _ => Duration::ZERO,
        },
    };
    say.line(&format!(
        "starting a control plane and {} expert servers over TLS, each expert on {} of them",
        args.local.servers, args.local.replicas
    ));
    let cluster = super::start_cluster(global, options)?;

    let samples = Arc::new(Mutex::new(Vec::<Sample>::with_capacity(1 << 16)));
    let sink = Arc::clone(&samples);
    let token = cluster.token().to_owned();
    let client = args
        .client
        .builder(ClientModel::of(&checkpoint))?
        .control_plane(cluster.control_url(), Some(token.clone()))
        .secret(Some(token))
        .security(cluster.security())
        .observer(move |report| {
            if let Ok(mut samples) = sink.lock() {
                samples.push((Instant::now(), report.timing));
            }
        })
        .build()?;
    client.wait_ready(super::READY_TIMEOUT)?;
    say.line(&format!("{} experts are up; generating\n", count_experts(&checkpoint)));

    let held = held_by(&checkpoint, &client, &LocalCluster::server_name(victim(&args)));
    let (generation, kill_at, killed_at_token) =
        generate(&args, &checkpoint, &client, &cluster, &say)?;
    let (expected_ids, reference) = reference_ids(&dir, &checkpoint, &args)?;
    let verified = expected_ids == generation.token_ids;

    let samples = samples.lock().map_err(|_| anyhow!("a layer report panicked"))?;
    let passes = 1 + generation.timings.decode.len();
    let expected_layers = passes * checkpoint.config().moe_layers().len();
    let report = summarise(Run {
        args: &args,
        samples: &samples,
        expected_layers,
        generation,
        verified,
        reference,
        kill_at,
        killed: killed_at_token.map(|at_token| {
            let server = LocalCluster::server_name(victim(&args));
            Kill { taken_over_by: successors(&client, &held, &server), server, at_token }
        }),
        counters: Counters::read(&client),
    });
    if global.json {
        ui::print_json(&report)?;
    } else {
        print_report(&report, &say);
    }
    drop(client);
    drop(cluster);
    match unsound(&report, &expected_ids, kill) {
        None => Ok(ExitCode::SUCCESS),
        Some(what) => bail!("{what}"),
    }
}

/// The faults of a run, or `None`.
fn unsound(report: &Report, expected_ids: &[u32], asked_for_kill: bool) -> Option<String> {
    let mut faults = Vec::new();
    if asked_for_kill && report.killed.is_none() {
        let num_tokens = report.token_ids.len();
        faults
            .push(format!("the text ended after {num_tokens} tokens, before a server was killed"));
    }
    if !report.verified {
        let found = &report.token_ids;
        let common = found.iter().zip(expected_ids).take_while(|(a, b)| a == b).count();
        faults.push(format!(
            "token {} of {} is {}, expected {} ({})",
            common + 1,
            expected_ids.len(),
            found.get(common).map_or_else(|| "missing".to_owned(), u32::to_string),
            expected_ids.get(common).map_or_else(|| "none".to_owned(), u32::to_string),
            report.reference
        ));
    }
    if report.lost_requests > 0 {
        faults.push(format!("{} requests were lost", report.lost_requests));
    }
    if report.duplicated_requests > 0 {
        faults.push(format!("{} requests were counted twice", report.duplicated_requests));
    }
    if !report.verified && report.wire_dtype != WireDtype::F32.to_string() {
        faults.push(format!("{} on the wire is not exact: use f32", report.wire_dtype));
    }
    (!faults.is_empty()).then(|| format!("the run failed: {}", faults.join("; ")))
}

/// Generates text. Half-way, another thread kills a server at a random moment.
fn generate(
    args: &Args,
    checkpoint: &Arc<Checkpoint>,
    client: &MoeClient,
    cluster: &LocalCluster,
    say: &Narrator,
) -> Result<(Generation, Option<Instant>, Option<usize>)> {
    let victim = victim(args);
    let pid = cluster
        .server_pid(victim)
        .and_then(|pid| i32::try_from(pid).ok())
        .and_then(Pid::from_raw)
        .context("the server to kill is not running")?;
    let (fire, fired) = channel::<()>();
    let killer = std::thread::spawn(move || {
        fired.recv().ok()?;
        // A random moment within the next few layers, not between two tokens.
        std::thread::sleep(Duration::from_micros(rand::random_range(0..3000)));
        let at = Instant::now();
        kill_process(pid, Signal::KILL).ok().map(|()| at)
    });
    let mut generator = Generator::open(checkpoint, client.clone())?;
    let options = GenerateOptions { max_new_tokens: args.max_new_tokens, ..Default::default() };
    // Half-way through the tokens that fit into the context.
    let num_prompt_tokens = generator.tokenizer().encode(&args.prompt)?.len();
    let room = generator.model().language().max_positions.saturating_sub(num_prompt_tokens);
    let kill_token = (args.max_new_tokens.min(room) / 2).max(1);
    let mut killed = None;
    say.prompt(&args.prompt);
    let generation = generator.generate(&args.prompt, &options, &mut |event| {
        say.token(event.text, killed.is_some());
        // No pause around the kill, so that it hits a layer and not a pause.
        if args.no_kill || !(kill_token..kill_token + KILL_WINDOW).contains(&(event.idx + 1)) {
            std::thread::sleep(say.pause);
        }
        if !args.no_kill && event.idx + 1 == kill_token {
            killed = Some(kill_token);
            // The thread has dropped the channel only if it panicked. The report then shows no kill.
            let _ = fire.send(());
            say.kill(victim);
        }
    })?;
    drop(fire);
    let kill_at = killer.join().map_err(|_| anyhow!("the killing thread panicked"))?;
    say.line("\n");
    Ok((generation, kill_at, killed.filter(|_| kill_at.is_some())))
}

/// Token ids of the reference: recorded ones if the prompt has them, otherwise computed in this process.
fn reference_ids(
    dir: &Path,
    checkpoint: &Arc<Checkpoint>,
    args: &Args,
) -> Result<(Vec<u32>, &'static str)> {
    if let Some(ids) = golden_ids(dir, &args.prompt, args.max_new_tokens)? {
        return Ok((ids, "golden.json: Hugging Face transformers in float32"));
    }
    let mut generator = Generator::open(checkpoint, LocalExperts::new(Arc::clone(checkpoint)))?;
    let options = GenerateOptions { max_new_tokens: args.max_new_tokens, ..Default::default() };
    let generation = generator.generate(&args.prompt, &options, &mut |_| {})?;
    Ok((generation.token_ids, "the same model with its experts in this process"))
}

fn golden_ids(dir: &Path, prompt: &str, max_new_tokens: usize) -> Result<Option<Vec<u32>>> {
    let path = dir.join("golden.json");
    if !path.is_file() {
        return Ok(None);
    }
    let text = std::fs::read_to_string(&path)
        .with_context(|| format!("cannot read {}", path.display()))?;
    let golden: serde_json::Value =
        serde_json::from_str(&text).with_context(|| format!("{} is not JSON", path.display()))?;
    let Some(entry) = golden["prompts"]
        .as_array()
        .and_then(|prompts| prompts.iter().find(|entry| entry["text"] == prompt))
    else {
        return Ok(None);
    };
    let ids = |name: &str| -> Vec<u32> {
        let values = entry[name].as_array().map(Vec::as_slice).unwrap_or_default();
        values.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok()).collect()
    };
    let (prompt_ids, all) = (ids("ids"), ids("greedy_f32"));
    let new = all.get(prompt_ids.len()..).unwrap_or_default();
    Ok((new.len() >= max_new_tokens).then(|| new[..max_new_tokens].to_vec()))
}

struct Run<'a> {
    args: &'a Args,
    samples: &'a [Sample],
    expected_layers: usize,
    generation: Generation,
    verified: bool,
    reference: &'static str,
    kill_at: Option<Instant>,
    killed: Option<Kill>,
    counters: Counters,
}

fn summarise(run: Run<'_>) -> Report {
    let us = |pick: fn(&LayerTiming) -> u64| {
        let mut values: Vec<u64> = run.samples.iter().map(|(_, timing)| pick(timing)).collect();
        values.sort_unstable();
        move |percent: u32| {
            let ns = of_sorted(&values, f64::from(percent) / 100.0);
            ns.map_or(0.0, |ns| ns as f64 / 1e3)
        }
    };
    let layer = us(LayerTiming::total_ns);
    let dispatch = us(|timing| timing.dispatch_ns);
    let queue = us(|timing| timing.server_queue_ns);
    let compute = us(|timing| timing.server_compute_ns);
    let combine = us(|timing| timing.combine_ns);
    let after_kill = |(end, _): &&Sample| run.kill_at.is_some_and(|at| *end >= at);
    let longest_after_kill_ns =
        run.samples.iter().filter(after_kill).map(|(_, timing)| timing.total_ns()).max();
    let failover_stall_ms =
        longest_after_kill_ns.map_or(0.0, |ns| ((ns as f64 / 1e3 - layer(50)) / 1e3).max(0.0));
    let finished = run.samples.len();
    Report {
        verified: run.verified,
        reference: run.reference,
        prompt: run.args.prompt.clone(),
        tokens_per_s: run.generation.timings.tokens_per_s().unwrap_or(0.0),
        text: run.generation.text,
        token_ids: run.generation.token_ids,
        servers: run.args.local.servers,
        replicas: run.args.local.replicas,
        wire_dtype: run.args.client.wire_dtype.to_string(),
        layers: finished,
        layer_us_p50: layer(50),
        layer_us_p99: layer(99),
        dispatch_us_p50: dispatch(50),
        dispatch_us_p99: dispatch(99),
        server_queue_us_p50: queue(50),
        server_queue_us_p99: queue(99),
        server_compute_us_p50: compute(50),
        server_compute_us_p99: compute(99),
        combine_us_p50: combine(50),
        combine_us_p99: combine(99),
        killed: run.killed,
        failover_stall_ms,
        failovers: run.samples.iter().map(|(_, timing)| timing.failovers).sum(),
        resent_pairs: run.samples.iter().map(|(_, timing)| timing.resent_pairs).sum(),
        // Two independent counts: requested against finished layers, and the client's counter.
        lost_requests: run.expected_layers.saturating_sub(finished) as u64 + run.counters.lost,
        duplicated_requests: finished.saturating_sub(run.expected_layers) as u64
            + run.counters.duplicated,
    }
}

/// The server to kill.
fn victim(args: &Args) -> usize {
    args.local.servers / 2
}

/// (layer, expert) pairs that a server holds.
fn held_by(checkpoint: &Checkpoint, client: &MoeClient, server: &str) -> Vec<(u32, u32)> {
    let config = checkpoint.config();
    let layers = config.moe_layers().into_iter();
    layers
        .flat_map(|layer| (0..config.num_experts).map(move |expert| (layer, expert)))
        .filter(|&(layer, expert)| client.replicas(layer, expert).iter().any(|name| name == server))
        .collect()
}

/// Servers that now hold the experts of the killed server.
fn successors(client: &MoeClient, held: &[(u32, u32)], killed: &str) -> Vec<String> {
    let mut names: Vec<String> = held
        .iter()
        .flat_map(|&(layer, expert)| client.replicas(layer, expert))
        .filter(|name| name != killed)
        .collect();
    names.sort();
    names.dedup();
    names
}

fn count_experts(checkpoint: &Checkpoint) -> usize {
    checkpoint.config().moe_layers().len() * checkpoint.config().num_experts as usize
}

fn print_report(report: &Report, say: &Narrator) {
    let row = |name: &str, p50: f64, p99: f64| {
        outln!("  {name:<16} {p50:>9.0} {p99:>9.0}");
    };
    outln!(
        "{} tokens at {:.1} tokens/s, {} layers through {} servers, {} on the wire",
        report.token_ids.len(),
        report.tokens_per_s,
        report.layers,
        report.servers,
        report.wire_dtype
    );
    outln!("\n  {:<16} {:>9} {:>9}", "µs per layer", "p50", "p99");
    row("whole layer", report.layer_us_p50, report.layer_us_p99);
    row("dispatch", report.dispatch_us_p50, report.dispatch_us_p99);
    row("server queue", report.server_queue_us_p50, report.server_queue_us_p99);
    row("server compute", report.server_compute_us_p50, report.server_compute_us_p99);
    row("combine", report.combine_us_p50, report.combine_us_p99);
    outln!();
    match &report.killed {
        Some(killed) => outln!(
            "killed {} after token {}: stalled {:.2} ms, {} (token, expert) pairs resent, taken over by {}",
            killed.server,
            killed.at_token,
            report.failover_stall_ms,
            report.resent_pairs,
            killed.taken_over_by.join(", ")
        ),
        None => outln!("no server was killed"),
    }
    outln!(
        "lost requests {}, duplicated requests {}",
        report.lost_requests,
        report.duplicated_requests
    );
    if report.verified {
        say.styled("32", "every token equals the reference");
    } else {
        say.styled("31", "the tokens DIFFER from the reference");
    }
    outln!(" ({})", report.reference);
}

/// Prints progress and text. Silent with `--json`.
struct Narrator {
    on: bool,
    color: bool,
    /// Pause after each token.
    pause: Duration,
}

impl Narrator {
    fn line(&self, text: &str) {
        if self.on {
            outln!("{text}");
        }
    }

    fn prompt(&self, text: &str) {
        self.styled("1", text);
    }

    fn token(&self, text: &str, after_kill: bool) {
        match after_kill {
            true => self.styled("36", text),
            false => self.raw(text),
        }
    }

    fn kill(&self, server_idx: usize) {
        let name = LocalCluster::server_name(server_idx);
        self.styled("1;31", &format!("⟦{name} killed⟧"));
    }

    fn raw(&self, text: &str) {
        if self.on {
            out!("{text}");
        }
    }

    fn styled(&self, code: &str, text: &str) {
        match self.on && self.color {
            true => ui::write_styled(code, text),
            false => self.raw(text),
        }
    }
}

/// Number of tokens around the kill that are shown without a pause.
const KILL_WINDOW: usize = 6;
