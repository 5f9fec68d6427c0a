//! Client threads of the rig, and their state shared with its driver.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use attention_client::{ClientError, LayerTiming, MoeClient};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::inputs::{Input, InputPool, TOLERANCE, difference};
use crate::report::{LayerRecord, Rule, Violation};

/// State that driver and workers share.
#[derive(Debug)]
pub struct Shared {
    /// The requests.
    pub pool: InputPool,
    /// The client under test.
    pub client: MoeClient,
    /// Zero of all times.
    pub started: Instant,
    /// Layers finished and checked.
    pub layers: AtomicU64,
    /// Whether some experts may have no replica at the moment.
    pub outage: AtomicBool,
    /// Tells workers to end.
    pub stop: AtomicBool,
    /// Calls that failed as expected.
    pub expected_errors: AtomicU64,
    /// Calls given up on purpose.
    pub abandoned: AtomicU64,
    violations: Mutex<Violations>,
}

#[derive(Debug, Default)]
struct Violations {
    first: Vec<Violation>,
    num: usize,
}

impl Shared {
    /// The state at the start of a run.
    #[must_use]
    pub fn new(pool: InputPool, client: MoeClient) -> Self {
        Self {
            pool,
            client,
            started: Instant::now(),
            layers: AtomicU64::new(0),
            outage: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            expected_errors: AtomicU64::new(0),
            abandoned: AtomicU64::new(0),
            violations: Mutex::default(),
        }
    }

    /// Nanoseconds since the start.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Notes that a rule was broken.
    pub fn violated(&self, rule: Rule, detail: String) {
        let mut violations = self.violations.lock().unwrap_or_else(PoisonError::into_inner);
        violations.num += 1;
        if violations.first.iter().filter(|first| first.rule == rule).count() < MAX_OF_RULE {
            violations.first.push(Violation { rule, detail });
        }
    }

    /// The first violations of each rule, and the number of all.
    #[must_use]
    pub fn violations(&self) -> (Vec<Violation>, usize) {
        let violations = self.violations.lock().unwrap_or_else(PoisonError::into_inner);
        (violations.first.clone(), violations.num)
    }
}

/// Runs layers until [`Shared::stop`] is set. `seed` determines the requests.
#[must_use]
pub fn work(shared: &Shared, seed: u64) -> Vec<LayerRecord> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut records = Vec::new();
    let mut outs = [Vec::new(), Vec::new()];
    while !shared.stop.load(Ordering::Relaxed) {
        let step = AssertUnwindSafe(|| step(shared, &mut rng, &mut outs, &mut records));
        if let Err(panic) = catch_unwind(step) {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("?");
            shared.violated(Rule::NoPanic, format!("a call panicked: {text}"));
            break;
        }
    }
    records
}

fn step(
    shared: &Shared,
    rng: &mut StdRng,
    outs: &mut [Vec<f32>; 2],
    records: &mut Vec<LayerRecord>,
) {
    let [first_out, second_out] = outs;
    let first = shared.pool.pick(rng);
    let roll: f64 = rng.random();
    let begin_ns = shared.now_ns();
    if roll < ABANDONED_SHARE {
        match dispatch(shared, first) {
            Ok(handle) => drop(handle),
            Err(error) => judge_error(shared, first, &error),
        }
        shared.abandoned.fetch_add(1, Ordering::Relaxed);
        return;
    }
    let overlapped = roll > 1.0 - OVERLAPPED_SHARE;
    let second = overlapped.then(|| shared.pool.pick(rng));
    let handle = dispatch(shared, first);
    let second_handle = second.map(|input| dispatch(shared, input));
    let mut finish = |input: &Input, handle: Result<_, ClientError>, out: &mut Vec<f32>| {
        // Poisoned, so that values that are not written cannot look right.
        out.clear();
        out.resize(input.x.len(), f32::NAN);
        match handle.and_then(|handle| shared.client.combine(handle, out)) {
            Ok(timing) => {
                judge_output(shared, input, out, &timing);
                records.push(LayerRecord {
                    begin_ns,
                    end_ns: shared.now_ns(),
                    stall_ns: timing.stall_ns,
                    failovers: timing.failovers,
                    num_tokens: input.num_tokens as u32,
                    overlapped,
                });
                shared.layers.fetch_add(1, Ordering::Relaxed);
            }
            Err(error) => judge_error(shared, input, &error),
        }
    };
    finish(first, handle, first_out);
    if let Some((input, handle)) = second.zip(second_handle) {
        finish(input, handle, second_out);
    }
}

fn dispatch<'x>(
    shared: &Shared,
    input: &'x Input,
) -> Result<attention_client::Handle<'x>, ClientError> {
    shared.client.dispatch(input.layer, &input.x, &input.idx, &input.weights)
}

fn judge_output(shared: &Shared, input: &Input, out: &[f32], timing: &LayerTiming) {
    let worst = difference(out, &input.expected);
    if worst > TOLERANCE {
        shared.violated(
            Rule::RightOutput,
            format!(
                "layer {} with {} tokens is off by {worst:e}, expected at most {TOLERANCE:e}; {} failovers, {} pairs sent again",
                input.layer, input.num_tokens, timing.failovers, timing.resent_pairs
            ),
        );
    }
}

fn judge_error(shared: &Shared, input: &Input, error: &ClientError) {
    if !shared.outage.load(Ordering::Acquire) {
        shared.violated(Rule::NoError, format!("layer {}: {error}", input.layer));
        return;
    }
    match error {
        ClientError::NoReplica { layer, expert, .. }
            if *layer == input.layer && input.idx.contains(&expert.cast_signed()) =>
        {
            shared.expected_errors.fetch_add(1, Ordering::Relaxed);
        }
        other => shared.violated(
            Rule::TypedError,
            format!(
                "layer {}: {other}, expected the name of an expert without replica",
                input.layer
            ),
        ),
    }
}

/// Sums of a counter or gauge of the client by the value of its first label.
#[must_use]
pub fn metric_by_label(client: &MoeClient, name: &str) -> BTreeMap<String, f64> {
    let mut sums = BTreeMap::new();
    let families = client.registry().gather();
    for family in families.iter().filter(|family| family.name() == name) {
        for metric in family.get_metric() {
            let label = metric.get_label().first().map_or("", |pair| pair.value());
            let value = metric.get_counter().get_value() + metric.get_gauge().get_value();
            *sums.entry(label.to_owned()).or_insert(0.0) += value;
        }
    }
    sums
}

/// Sum of a counter or gauge of the client over all labels.
#[must_use]
pub fn metric(client: &MoeClient, name: &str) -> f64 {
    metric_by_label(client, name).values().sum()
}

/// Whether a client has a live link to each of `num_servers` servers in every lane, and every expert has all its
/// `replicas`. A placement that follows the load may give it more.
#[must_use]
pub fn is_whole(client: &MoeClient, num_servers: usize, replicas: usize) -> bool {
    let model = client.model();
    let has_all = |layer: u32, expert: u32| {
        let names: BTreeSet<String> = client.replicas(layer, expert).into_iter().collect();
        names.len() >= replicas
    };
    let lanes = metric(client, "switchyard_client_lanes");
    let links = metric_by_label(client, "switchyard_client_links");
    links.get("up").copied() == Some(lanes * num_servers as f64)
        && links.get("leaving").is_none_or(|&leaving| leaving == 0.0)
        && model
            .moe_layers
            .iter()
            .all(|&layer| (0..model.shape.num_experts).all(|expert| has_all(layer, expert)))
}

const ABANDONED_SHARE: f64 = 0.03;
const OVERLAPPED_SHARE: f64 = 0.1;
/// Violations of one rule in a report: a broken build breaks the same rule thousands of times.
const MAX_OF_RULE: usize = 5;
