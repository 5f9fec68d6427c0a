//! Predicts the time of a layer over a network when kernels post to the NIC by themselves.
//!
//! One model has two uses. The first is a published measurement: a put to each of eight peers with a flag behind it. It
//! shows whether the model is right if links dominate. The second is dispatch and combine of a layer between clients
//! and servers, with one GPU and one 400 Gb/s link each.
//!
//! A time is the sum of
//!
//! - **posting**: the time until a kernel's requests are with the NIC, *measured* on a GPU against the software NIC
//!   ([`LayerModel::post_ns`], [`LayerModel::requests_per_us`]);
//! - **links**: the packets of all messages over one switch, *simulated* ([`run_messages`]);
//! - **the NIC and the bus**: half of a published round trip ([`LayerModel::nic_ns`]);
//! - **kernels**: everything else of dispatch, echo and combine, *measured* over NVLink with one token
//!   ([`LayerModel::kernels_ns`]). Experts are not counted.
//!
//! The model has no limit of request slots, and no NICs that cannot keep up with small requests.

use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use serde::{Deserialize, Serialize};

use crate::{Control, Message, Model, SimError, Traffic, Verb, run_messages};

/// Parameters of the model beside the links.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LayerModel {
    /// From a kernel's call until the doorbell of its group of requests, in nanoseconds.
    pub post_ns: u64,
    /// Requests that all queues of a GPU take in a microsecond.
    pub requests_per_us: u64,
    /// One way through both NICs and buses without the time on the wire, in nanoseconds.
    pub nic_ns: u64,
    /// Kernels of a layer without experts, without links, in nanoseconds.
    pub kernels_ns: u64,
    /// Tokens of every client.
    pub tokens: usize,
    /// Experts of the layer.
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Bytes of a token in a request, with scales, entries and flag.
    pub request_row_bytes: u64,
    /// Bytes of a token in an answer, with flag.
    pub response_row_bytes: u64,
    /// Requests to the NIC for one row. The head of a frame takes as many.
    pub requests_per_row: u64,
}

impl Default for LayerModel {
    fn default() -> Self {
        Self {
            // One warp posts 16 rows with their flags, a kernel completes 8 queues, queues are in the GPU's
            // memory, scope sys: bench/runs/2026-11-22-h200-posting, near host.
            post_ns: 1_980,
            requests_per_us: 206,
            // 16.7 µs round trip of small messages, kernel to kernel (arXiv 2511.15076).
            nic_ns: 8_350 - 2_000,
            // Four ranks, one token: bench/runs/2026-11-20-h200x4.
            kernels_ns: 10_700,
            tokens: 128,
            experts: 256,
            top_k: 8,
            // fp8, a scale per 128, entries of 8 bytes, a flag.
            request_row_bytes: 7168 + 56 * 4 + 8 * 8 + 8,
            response_row_bytes: 7168 * 2 + 8,
            requests_per_row: 3,
        }
    }
}

/// Clients, servers and flow control of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerScenario {
    /// Attention clients.
    pub clients: usize,
    /// Expert servers.
    pub servers: usize,
    /// Flow control.
    pub control: Control,
    /// Seed of the routing.
    pub seed: u64,
}

/// A layer's parts, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LayerOutcome {
    /// The scenario.
    pub scenario: LayerScenario,
    /// Dispatch and combine together.
    pub layer_us: f64,
    /// Links of the dispatch.
    pub dispatch_us: f64,
    /// Links of the answers.
    pub combine_us: f64,
    /// Posting of both.
    pub posting_us: f64,
    /// Least time of the busiest link's bytes, both ways.
    pub limit_us: f64,
    /// Servers that a token goes to, on average.
    pub servers_per_token: f64,
    /// Bytes that a client sends and gets.
    pub bytes_per_client: f64,
}

/// Simulates a put with a flag from each host to each host. Returns the microseconds until the last has arrived.
///
/// # Errors
/// [`SimError`].
pub fn put_and_flag(
    peers: usize,
    bytes: u64,
    layer: &LayerModel,
    model: &Model,
) -> Result<f64, SimError> {
    let messages = (0..peers).flat_map(|from| {
        (0..peers).map(move |nth| Message {
            from,
            to: (from + nth) % peers,
            bytes,
            // Each block posts to a peer of its own, so no block waits for another.
            start_ps: layer.post_ns * 1_000,
        })
    });
    let traffic = Traffic {
        senders: peers,
        receivers: peers,
        messages: messages.collect(),
        control: Control::Pause,
        verb: Verb::Write,
    };
    Ok(run_messages(&traffic, model)?.landed_ms * 1e3)
}

/// Simulates dispatch and combine of one layer.
///
/// # Errors
/// [`SimError`].
pub fn run_layer(
    scenario: LayerScenario,
    layer: &LayerModel,
    model: &Model,
) -> Result<LayerOutcome, SimError> {
    let rows = route(&scenario, layer);
    let (clients, servers, control) = (scenario.clients, scenario.servers, scenario.control);
    let dispatch = traffic(clients, servers, control, layer, |from, to| {
        (rows[from][to], layer.request_row_bytes)
    });
    let combine = traffic(servers, clients, control, layer, |from, to| {
        (rows[to][from], layer.response_row_bytes)
    });
    let dispatch_us = run_messages(&dispatch.0, model)?.landed_ms * 1e3;
    let combine_us = run_messages(&combine.0, model)?.landed_ms * 1e3;
    let fixed_ns = layer.kernels_ns + 2 * layer.nic_ns;
    let total_rows: u64 = rows.iter().flatten().sum();
    let per_client = total_rows as f64 / clients as f64;
    let limit = |traffic: &Traffic| {
        let mut sent = vec![0; traffic.senders];
        let mut taken = vec![0; traffic.receivers];
        for message in &traffic.messages {
            let packets = message.bytes.div_ceil(u64::from(model.packet_bytes));
            let on_wire = message.bytes + packets * u64::from(model.header_bytes);
            sent[message.from] += on_wire;
            taken[message.to] += on_wire;
        }
        let busiest: u64 = sent.into_iter().chain(taken).max().unwrap_or(0);
        (busiest * model.ps_per_byte) as f64 / 1e6
    };
    Ok(LayerOutcome {
        scenario,
        layer_us: dispatch_us + combine_us + fixed_ns as f64 / 1e3,
        dispatch_us,
        combine_us,
        posting_us: (dispatch.1 + combine.1) as f64 / 1e3,
        limit_us: limit(&dispatch.0) + limit(&combine.0),
        servers_per_token: per_client / layer.tokens as f64,
        bytes_per_client: per_client * (layer.request_row_bytes + layer.response_row_bytes) as f64,
    })
}

/// Returns the rows from each client to each server. Tokens choose experts uniformly. Experts are on the servers
/// round-robin. With more servers than experts, the replicas of an expert are used round-robin.
fn route(scenario: &LayerScenario, layer: &LayerModel) -> Vec<Vec<u64>> {
    let mut rng = StdRng::seed_from_u64(scenario.seed);
    let servers = scenario.servers;
    let mut experts: Vec<usize> = (0..layer.experts).collect();
    let mut rows = vec![vec![0; servers]; scenario.clients];
    for of_client in &mut rows {
        for _ in 0..layer.tokens {
            let (chosen, _) = experts.partial_shuffle(&mut rng, layer.top_k);
            let mut to: Vec<usize> = chosen
                .iter()
                .map(|expert| {
                    let num_replicas = servers.saturating_sub(*expert).div_ceil(layer.experts);
                    let replica = rng.random_range(0..num_replicas.max(1));
                    (expert + replica * layer.experts) % servers
                })
                .collect();
            to.sort_unstable();
            to.dedup();
            for server in to {
                of_client[server] += 1;
            }
        }
    }
    rows
}

/// Returns messages with the times of their posts, and the longest posting in nanoseconds.
fn traffic(
    senders: usize,
    receivers: usize,
    control: Control,
    layer: &LayerModel,
    rows_and_bytes: impl Fn(usize, usize) -> (u64, u64),
) -> (Traffic, u64) {
    let mut messages = Vec::with_capacity(senders * receivers);
    let mut longest = 0;
    for from in 0..senders {
        let mut num_requests = 0;
        for nth in 0..receivers {
            let to = (from + nth) % receivers;
            let (rows, row_bytes) = rows_and_bytes(from, to);
            if rows == 0 {
                continue;
            }
            num_requests += (rows + 1) * layer.requests_per_row;
            let start_ns = layer.post_ns + num_requests * 1_000 / layer.requests_per_us.max(1);
            messages.push(Message {
                from,
                to,
                bytes: rows * row_bytes,
                start_ps: start_ns * 1_000,
            });
            longest = longest.max(start_ns);
        }
    }
    (Traffic { senders, receivers, messages, control, verb: Verb::Write }, longest)
}
