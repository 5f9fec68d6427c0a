//! One layer through the service beside the same experts in process.
//!
//! Both compute the same tokens in turns. Tokens and routing are random. *In process* is the time to sort the
//! (token, expert) pairs by expert and to compute them on a [`ComputePool`], as an engine would that has its own
//! experts. *Service* is the time of [`MoeClient::forward`] against a running cluster. Every output is compared with
//! one that was computed before the measurement.
//!
//! Both read the same pages of the checkpoint. So each takes a batch that the other computed several batches ago, and
//! neither finds its experts in the caches.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use attention_client::{LayerTiming, MoeClient};
use checkpoint::Checkpoint;
use expert_server::compute::{
    ComputePool, ExpertGroup, ExpertStore, LayerBatch, LayerExperts, Residency,
};
use protocol::WireDtype;
use rand::rngs::StdRng;
use rand::seq::index::sample;
use rand::{RngExt, SeedableRng};
use serde::Serialize;

use crate::clock::us;
use crate::stats::{median, percentile};

/// Settings of [`run`].
#[derive(Debug, Clone)]
pub struct MoeBenchConfig {
    /// Name of the model, for the report.
    pub model: String,
    /// Tokens of a batch, a row of the report each.
    pub tokens: Vec<usize>,
    /// Compute threads in process.
    pub threads: usize,
    /// Expert servers that the client calls, for the report.
    pub servers: usize,
    /// Element type of the client's tokens, for the report.
    pub wire_dtype: WireDtype,
    /// Time for each number of tokens, in process and through the service each. At least 21 iterations are timed.
    pub seconds: f64,
    /// Seed of tokens and routing.
    pub seed: u64,
}

/// Result of [`run`]. Its text is a table.
#[derive(Debug, Serialize)]
#[allow(missing_docs, reason = "the names say all")]
pub struct MoeReport {
    pub preset: String,
    pub layer: u32,
    pub hidden: usize,
    pub num_experts: u32,
    pub top_k: usize,
    pub threads: usize,
    pub servers: usize,
    pub wire_dtype: String,
    pub rows: Vec<MoeRow>,
}

/// Figures of one number of tokens.
#[derive(Debug, Serialize)]
#[allow(missing_docs, reason = "the names say all")]
pub struct MoeRow {
    pub tokens: usize,
    /// Distinct experts of a batch.
    pub experts_p50: f64,
    pub iterations: usize,
    pub in_process_us_p50: f64,
    pub service_us_p50: f64,
    pub service_us_p99: f64,
    /// Median of the ratios of neighbouring pairs, so that drift of the host cancels.
    pub ratio_p50: f64,
    pub dispatch_us_p50: f64,
    pub server_queue_us_p50: f64,
    pub server_compute_us_p50: f64,
    pub combine_us_p50: f64,
    /// Weight bytes of the experts touched, per second of in-process time.
    pub in_process_gb_per_s: f64,
    /// Largest difference between an output and the expected one, relative to the largest output. Infinite if an output has an
    /// element that is not finite.
    pub max_rel_diff: f64,
}

/// Returns the first layer with experts.
///
/// # Errors
/// The model has none.
pub fn first_layer(checkpoint: &Checkpoint) -> Result<u32> {
    let layers = checkpoint.config().moe_layers();
    layers.first().copied().context("this model has no layer with experts")
}

/// Loads all experts of a layer. Calls `progress` with the number of loaded experts.
///
/// # Errors
/// The checkpoint cannot be read, or does not have the layer.
pub fn load_layer(
    checkpoint: &Arc<Checkpoint>,
    layer: u32,
    mut progress: impl FnMut(usize),
) -> Result<Arc<LayerExperts>> {
    let all = BTreeMap::from([(layer, (0..checkpoint.config().num_experts).collect())]);
    let store =
        ExpertStore::load(Arc::clone(checkpoint), &all, Residency::default(), 0, &mut |p| {
            progress(p.num_loaded);
        })?;
    store.layer(layer).context("the layer was not loaded")
}

/// Measures `layer` in process with `experts`, and through `client`, whose cluster must be ready. Calls `progress`
/// after each number of tokens.
///
/// # Errors
/// A call of the client fails, or the compute pool cannot be started.
pub fn run(
    config: &MoeBenchConfig,
    checkpoint: &Checkpoint,
    layer: u32,
    experts: &LayerExperts,
    client: &MoeClient,
    mut progress: impl FnMut(),
) -> Result<MoeReport> {
    let model = checkpoint.config();
    let mut pool = ComputePool::new(config.threads, None)?;
    let mut rows = Vec::new();
    let mut rng = StdRng::seed_from_u64(config.seed);
    for &tokens in &config.tokens {
        let mut inputs: Vec<Input> = (0..NUM_INPUTS)
            .map(|_| Input::random(&mut rng, tokens, model.hidden, model.num_experts, model.top_k))
            .collect();
        for input in &mut inputs {
            let mut expected = vec![f32::NAN; tokens * model.hidden];
            input.in_process(&mut pool, experts, &mut expected)?;
            input.expected = expected;
        }
        let mut experts_per_batch: Vec<f64> =
            inputs.iter().map(|input| input.groups.len() as f64).collect();
        let mut local = vec![f32::NAN; tokens * model.hidden];
        let mut remote = local.clone();
        let mut samples = Samples::default();
        let budget = Duration::from_secs_f64(config.seconds * 2.0);
        let (start, mut iteration) = (Instant::now(), 0usize);
        while iteration < MIN_ITERATIONS || start.elapsed() < budget {
            let (ours, theirs) =
                (iteration % NUM_INPUTS, (iteration + NUM_INPUTS / 2) % NUM_INPUTS);
            local.fill(f32::NAN);
            remote.fill(f32::NAN);
            // The order alternates, so that neither always finds the other's caches.
            let (in_process, service, timing);
            if iteration % 2 == 0 {
                in_process = inputs[ours].in_process(&mut pool, experts, &mut local)?;
                (service, timing) = inputs[theirs].through(client, layer, &mut remote)?;
            } else {
                (service, timing) = inputs[theirs].through(client, layer, &mut remote)?;
                in_process = inputs[ours].in_process(&mut pool, experts, &mut local)?;
            }
            for (input, found) in [(ours, &local), (theirs, &remote)] {
                let diff = max_rel_diff(&inputs[input].expected, found);
                samples.max_rel_diff = samples.max_rel_diff.max(diff);
            }
            if iteration >= WARM_UP {
                samples.push(in_process, service, timing, inputs[ours].weight_bytes(experts));
            }
            iteration += 1;
        }
        rows.push(samples.row(tokens, median(&mut experts_per_batch)));
        progress();
    }
    Ok(MoeReport {
        preset: config.model.clone(),
        layer,
        hidden: model.hidden,
        num_experts: model.num_experts,
        top_k: model.top_k,
        threads: config.threads,
        servers: config.servers,
        wire_dtype: config.wire_dtype.to_string(),
        rows,
    })
}

impl fmt::Display for MoeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}: hidden {}, top-{} of {} experts, {} threads, {} server(s), {} on the wire; µs, medians",
            self.preset,
            self.hidden,
            self.top_k,
            self.num_experts,
            self.threads,
            self.servers,
            self.wire_dtype
        )?;
        writeln!(
            f,
            "{:>6} {:>11} {:>11} {:>7} {:>9} {:>8} {:>11} {:>9} {:>7} {:>9}",
            "tokens",
            "in process",
            "service",
            "ratio",
            "dispatch",
            "queue",
            "compute",
            "combine",
            "GB/s",
            "max diff"
        )?;
        for row in &self.rows {
            writeln!(
                f,
                "{:>6} {:>11.1} {:>11.1} {:>7.4} {:>9.1} {:>8.1} {:>11.1} {:>9.1} {:>7.2} {:>9.1e}",
                row.tokens,
                row.in_process_us_p50,
                row.service_us_p50,
                row.ratio_p50,
                row.dispatch_us_p50,
                row.server_queue_us_p50,
                row.server_compute_us_p50,
                row.combine_us_p50,
                row.in_process_gb_per_s,
                row.max_rel_diff
            )?;
        }
        Ok(())
    }
}

/// A batch with its routing, and scratch memory for grouping it by expert.
struct Input {
    x: Vec<f32>,
    topk_idx: Vec<i32>,
    topk_weights: Vec<f32>,
    top_k: usize,
    order: Vec<u32>,
    groups: Vec<ExpertGroup>,
    entry_token: Vec<u32>,
    entry_weight: Vec<f32>,
    /// The output, computed in process before the measurement.
    expected: Vec<f32>,
}

impl Input {
    fn random(
        rng: &mut StdRng,
        tokens: usize,
        hidden: usize,
        num_experts: u32,
        top_k: usize,
    ) -> Self {
        let x = (0..tokens * hidden).map(|_| rng.random_range(-1.0f32..1.0)).collect();
        let (mut topk_idx, mut topk_weights) = (Vec::new(), Vec::new());
        for _ in 0..tokens {
            let weights: Vec<f32> = (0..top_k).map(|_| rng.random_range(0.1f32..1.0)).collect();
            let sum: f32 = weights.iter().sum();
            topk_weights.extend(weights.iter().map(|weight| weight / sum));
            topk_idx.extend(sample(rng, num_experts as usize, top_k).iter().map(|idx| idx as i32));
        }
        Self {
            x,
            topk_idx,
            topk_weights,
            top_k,
            order: Vec::new(),
            groups: Vec::new(),
            entry_token: Vec::new(),
            entry_weight: Vec::new(),
            expected: Vec::new(),
        }
    }

    /// Sorts the pairs by expert and computes them, as an engine would that has its own experts.
    fn in_process(
        &mut self,
        pool: &mut ComputePool,
        experts: &LayerExperts,
        out: &mut [f32],
    ) -> Result<Duration> {
        let start = Instant::now();
        self.order.clear();
        self.order.extend(0..self.topk_idx.len() as u32);
        self.order.sort_by_key(|&pair| self.topk_idx[pair as usize]);
        self.groups.clear();
        self.entry_token.clear();
        self.entry_weight.clear();
        for (position, &pair) in self.order.iter().enumerate() {
            let expert = self.topk_idx[pair as usize] as u32;
            match self.groups.last_mut() {
                Some(group) if group.expert == expert => group.end += 1,
                _ => self.groups.push(ExpertGroup {
                    expert,
                    begin: position as u32,
                    end: position as u32 + 1,
                }),
            }
            self.entry_token.push(pair / self.top_k as u32);
            self.entry_weight.push(self.topk_weights[pair as usize]);
        }
        let batch = LayerBatch {
            x: &self.x,
            groups: &self.groups,
            entry_token: &self.entry_token,
            entry_weight: &self.entry_weight,
        };
        pool.run(experts, &batch, out, &mut || {})?;
        Ok(start.elapsed())
    }

    fn through(
        &self,
        client: &MoeClient,
        layer: u32,
        out: &mut [f32],
    ) -> Result<(Duration, LayerTiming)> {
        let start = Instant::now();
        let timing = client.forward(layer, &self.x, &self.topk_idx, &self.topk_weights, out)?;
        Ok((start.elapsed(), timing))
    }

    fn weight_bytes(&self, experts: &LayerExperts) -> usize {
        let weights = self.groups.iter().filter_map(|group| experts.get(group.expert));
        weights.map(|weights| weights.size_bytes()).sum()
    }
}

#[derive(Default)]
struct Samples {
    in_process_us: Vec<f64>,
    service_us: Vec<f64>,
    ratios: Vec<f64>,
    gb_per_s: Vec<f64>,
    timings: Vec<LayerTiming>,
    max_rel_diff: f64,
}

impl Samples {
    fn push(&mut self, in_process: Duration, service: Duration, timing: LayerTiming, bytes: usize) {
        self.in_process_us.push(us(in_process));
        self.service_us.push(us(service));
        self.ratios.push(service.as_secs_f64() / in_process.as_secs_f64());
        self.gb_per_s.push(bytes as f64 / in_process.as_secs_f64() / 1e9);
        self.timings.push(timing);
    }

    fn row(mut self, tokens: usize, experts_p50: f64) -> MoeRow {
        let timings = self.timings;
        let of = |pick: fn(&LayerTiming) -> u64| {
            let mut values: Vec<f64> = timings.iter().map(|t| pick(t) as f64 / 1e3).collect();
            median(&mut values)
        };
        MoeRow {
            tokens,
            experts_p50,
            iterations: self.ratios.len(),
            in_process_us_p50: median(&mut self.in_process_us),
            service_us_p50: median(&mut self.service_us),
            service_us_p99: percentile(&mut self.service_us, 0.99),
            ratio_p50: median(&mut self.ratios),
            dispatch_us_p50: of(|t| t.dispatch_ns),
            server_queue_us_p50: of(|t| t.server_queue_ns),
            server_compute_us_p50: of(|t| t.server_compute_ns),
            combine_us_p50: of(|t| t.combine_ns),
            in_process_gb_per_s: median(&mut self.gb_per_s),
            max_rel_diff: self.max_rel_diff,
        }
    }
}

/// Infinite if either output has an element that is not finite: no element may keep its poison.
fn max_rel_diff(a: &[f32], b: &[f32]) -> f64 {
    if a.iter().chain(b).any(|value| !value.is_finite()) {
        return f64::INFINITY;
    }
    let scale = a.iter().fold(f32::MIN_POSITIVE, |max, value| max.max(value.abs()));
    let diff = a.iter().zip(b).fold(0f32, |max, (a, b)| max.max((a - b).abs()));
    f64::from(diff / scale)
}

/// Batches that are computed in turn. Between the two uses of one, others read eight times its weights, more than caches
/// hold.
const NUM_INPUTS: usize = 8;
const WARM_UP: usize = 4;
const MIN_ITERATIONS: usize = WARM_UP + 21;
