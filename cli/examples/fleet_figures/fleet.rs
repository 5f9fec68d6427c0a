//! A fleet of processes with a client in this one.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use attention_client::{ClientModel, MoeClient, ServerTiming};
use checkpoint::Checkpoint;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use switchyard_cli::anyhow::{Context, Result, anyhow, ensure};
use switchyard_cli::cluster::{ClusterOptions, LocalCluster};

/// The binary and the model of all fleets.
#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) binary: PathBuf,
    pub(crate) model: PathBuf,
}

/// How processes of a fleet trust each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trust {
    /// Plain text and a token.
    Plain,
    /// TLS on every connection, and tickets.
    Secure,
}

impl Trust {
    pub(crate) const BOTH: [Self; 2] = [Self::Plain, Self::Secure];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Secure => "tls+tickets",
        }
    }
}

impl Setup {
    /// Starts a fleet whose servers have one compute thread each, with `replicas` of every expert.
    pub(crate) fn start(
        &self,
        trust: Trust,
        num_servers: usize,
        replicas: usize,
        control_args: &[&str],
    ) -> Result<LocalCluster> {
        let mut options = ClusterOptions::new(&self.model)?;
        options.binary.clone_from(&self.binary);
        (options.num_servers, options.replicas, options.threads) = (num_servers, replicas, Some(1));
        options.control_args = control_args.iter().map(|&arg| arg.to_owned()).collect();
        match trust {
            Trust::Plain => options.server_args = vec!["--tickets".to_owned(), "off".to_owned()],
            Trust::Secure => options.tls = true,
        }
        LocalCluster::start(options, &mut |_| {})
    }

    /// A client of `cluster` that is connected to all servers. At most the share `hedges` of its frames are hedges.
    pub(crate) fn client(&self, cluster: &LocalCluster, seed: u64, hedges: f64) -> Result<Caller> {
        let checkpoint = Checkpoint::open(&self.model)?;
        let client = MoeClient::builder(ClientModel::of(&checkpoint))
            .control_plane(cluster.control_url(), Some(cluster.token().to_owned()))
            .secret(Some(cluster.token().to_owned()))
            .security(cluster.security())
            .hedge_budget(hedges)
            .build()?;
        client.wait_ready(Duration::from_secs(30))?;
        Ok(Caller { client, rng: StdRng::seed_from_u64(seed), servers: Vec::new() })
    }
}

/// The client's default.
pub(crate) const HEDGE_BUDGET: f64 = 0.05;

/// A finished call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sample {
    pub(crate) begin: Instant,
    pub(crate) us: f64,
    pub(crate) failovers: u32,
}

/// A client that computes random layers.
#[derive(Debug)]
pub(crate) struct Caller {
    client: MoeClient,
    rng: StdRng,
    /// Servers of the last call.
    servers: Vec<ServerTiming>,
}

impl Caller {
    /// Computes a layer of `num_tokens` random tokens. Input and output are prepared before the time begins.
    pub(crate) fn call(&mut self, num_tokens: usize) -> Result<Sample> {
        let model = self.client.model();
        let layer = model.moe_layers[self.rng.random_range(0..model.moe_layers.len())];
        let (k, num_experts) = (model.shape.top_k as usize, model.shape.num_experts as usize);
        let num_values = num_tokens * self.client.hidden();
        let x: Vec<f32> = (0..num_values).map(|_| self.rng.random_range(-1.0..1.0)).collect();
        let mut idx = Vec::with_capacity(num_tokens * k);
        for _ in 0..num_tokens {
            let experts = rand::seq::index::sample(&mut self.rng, num_experts, k);
            idx.extend(experts.iter().map(|expert| expert as i32));
        }
        let weights = vec![1.0 / k as f32; idx.len()];
        let mut out = vec![f32::NAN; num_values];
        let begin = Instant::now();
        let handle = self.client.dispatch(layer, &x, &idx, &weights)?;
        let servers = Some(&mut self.servers);
        let timing = self.client.combine_reported(handle, &mut out, servers, &|| false)?;
        let us = begin.elapsed().as_secs_f64() * 1e6;
        ensure!(out.iter().all(|value| value.is_finite()), "an output is not finite");
        Ok(Sample { begin, us, failovers: timing.failovers })
    }

    /// Whether `server` answered in the last call.
    pub(crate) fn was_answered_by(&self, server: &str) -> bool {
        self.servers.iter().any(|part| &*part.name == server && part.answered_pairs > 0)
    }
}

/// Calls one after the other on a thread of their own.
#[derive(Debug)]
pub(crate) struct Background {
    is_over: Arc<AtomicBool>,
    thread: JoinHandle<Result<Vec<Sample>>>,
}

impl Background {
    pub(crate) fn start(mut caller: Caller, num_tokens: usize) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let thread = std::thread::spawn({
            let is_over = Arc::clone(&is_over);
            move || {
                let mut samples = Vec::new();
                while !is_over.load(Ordering::Relaxed) {
                    samples.push(caller.call(num_tokens)?);
                }
                Ok(samples)
            }
        });
        Self { is_over, thread }
    }

    /// Ends the calls.
    ///
    /// # Errors
    /// A call failed.
    pub(crate) fn finish(self) -> Result<Vec<Sample>> {
        self.is_over.store(true, Ordering::Relaxed);
        let samples = self.thread.join().map_err(|_| anyhow!("the client panicked"))?;
        samples.context("a call failed")
    }
}

/// The value below which `part` of the sorted `values` are. 0 without values.
pub(crate) fn quantile(values: &[f64], part: f64) -> f64 {
    let last = values.len().saturating_sub(1);
    values.get((last as f64 * part).round() as usize).copied().unwrap_or(0.0)
}

pub(crate) fn sorted(values: impl IntoIterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values
}
