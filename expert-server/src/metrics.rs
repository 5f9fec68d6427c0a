//! All metrics of an expert server.
//!
//! The handles for the data thread are resolved here once. Updating one takes a few atomic additions, without a
//! lock, a look-up or an allocation.

pub mod names;

use std::sync::atomic::Ordering;

use p2p_core::bootstrap::ListenerStats;
use prometheus::{
    Encoder, Gauge, Histogram, IntCounter, IntCounterVec, IntGauge, Registry, TextEncoder,
    register_gauge_with_registry, register_histogram_vec_with_registry,
    register_histogram_with_registry, register_int_counter_vec_with_registry,
    register_int_counter_with_registry, register_int_gauge_vec_with_registry,
    register_int_gauge_with_registry,
};
use protocol::ErrorCode;

/// Why a link closed: the label `reason` of `switchyard_server_links_dropped_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DropReason {
    /// The client closed its connection, or died.
    PeerClosed,
    /// The client's flags hold impossible values.
    Desync,
    /// The transport reported an error.
    Transport,
    /// The client gave no credit for answers for longer than the limit.
    NoCredit,
    /// The client sent more malformed frames than the limit.
    BadFrames,
    /// The server shut down.
    Shutdown,
}

impl DropReason {
    /// All reasons.
    pub const ALL: [Self; 6] = [
        Self::PeerClosed,
        Self::Desync,
        Self::Transport,
        Self::NoCredit,
        Self::BadFrames,
        Self::Shutdown,
    ];

    /// The value of the label.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::PeerClosed => "peer_closed",
            Self::Desync => "desync",
            Self::Transport => "transport",
            Self::NoCredit => "no_credit",
            Self::BadFrames => "bad_frames",
            Self::Shutdown => "shutdown",
        }
    }
}

/// The metrics of one server. Cloning shares them.
#[derive(Clone, Debug)]
pub struct ServerMetrics {
    pub(crate) http: httpd::Metrics,
    /// Requests that got 429.
    pub(crate) requests_limited: IntCounter,
    registry: Registry,
    pub(crate) links: IntGauge,
    pub(crate) links_opened: IntCounter,
    links_dropped: [IntCounter; DropReason::ALL.len()],
    handshakes_failed: [IntCounter; 4],
    pub(crate) frames_in: IntCounter,
    pub(crate) frames_out: IntCounter,
    bad_frames: Vec<(ErrorCode, IntCounter)>,
    bad_frames_other: IntCounter,
    pub(crate) bytes_in: IntCounter,
    pub(crate) bytes_out: IntCounter,
    pub(crate) tokens: IntCounter,
    pub(crate) entries: IntCounter,
    pub(crate) batches: IntCounter,
    pub(crate) batch_tokens: Histogram,
    pub(crate) batch_clients: Histogram,
    pub(crate) queue_seconds: Histogram,
    pub(crate) gather_seconds: Histogram,
    pub(crate) compute_seconds: Histogram,
    pub(crate) encode_seconds: Histogram,
    #[cfg_attr(not(feature = "device"), allow(dead_code, reason = "observed on GPUs only"))]
    pub(crate) graph_seconds: Histogram,
    pub(crate) backlog_frames: IntGauge,
    pub(crate) sleeps: IntCounter,
    expert_tokens: IntCounterVec,
    pub(crate) experts_loaded: IntGauge,
    pub(crate) experts_still_asked: IntGauge,
    pub(crate) expert_bytes: IntGauge,
    pub(crate) load_seconds: Gauge,
    weights_read: [(IntCounter, IntCounter); 2],
    pub(crate) weights_device_bytes: IntCounter,
    pub(crate) weights_damaged: IntCounter,
    pub(crate) weights_sent_bytes: IntCounter,
    pub(crate) weights_grants: IntGauge,
    pub(crate) weights_refused: IntCounter,
    pub(crate) ready: IntGauge,
    pub(crate) lease_held: IntGauge,
}

impl ServerMetrics {
    /// Metrics in `registry`.
    ///
    /// # Errors
    /// [`prometheus::Error`] when the registry holds metrics of these names already.
    pub fn new(registry: Registry) -> Result<Self, prometheus::Error> {
        let r = &registry;
        let build = register_int_gauge_vec_with_registry!(
            names::BUILD_INFO,
            "Version of this process; the value is always 1.",
            &["component", "version"],
            r
        )?;
        build.with_label_values(&["server", env!("CARGO_PKG_VERSION")]).set(1);
        let dropped = register_int_counter_vec_with_registry!(
            names::LINKS_DROPPED_TOTAL,
            "Client links that ended, by reason.",
            &["reason"],
            r
        )?;
        let handshakes = register_int_counter_vec_with_registry!(
            names::HANDSHAKES_REJECTED_TOTAL,
            "Connections that did not become links: refused by their hello, too slow, evicted by newer ones, broken.",
            &["reason"],
            r
        )?;
        let frames = register_int_counter_vec_with_registry!(
            names::FRAMES_TOTAL,
            "Frames taken from clients (in) and published to them (out).",
            &["direction"],
            r
        )?;
        let bytes = register_int_counter_vec_with_registry!(
            names::BYTES_TOTAL,
            "Bytes of frames taken from clients (in) and published to them (out).",
            &["direction"],
            r
        )?;
        let bad = register_int_counter_vec_with_registry!(
            names::BAD_FRAMES_TOTAL,
            "Request frames answered with an error frame, by its code.",
            &["code"],
            r
        )?;
        let phases = register_histogram_vec_with_registry!(
            names::PHASE_SECONDS,
            "Time by phase: queue (per frame, from its arrival until its batch starts), gather, compute and encode (per batch). On a GPU a frame's arrival counts from the end of the previous batch on, and gather is the wait for further clients.",
            &["phase"],
            PHASE_BUCKETS.to_vec(),
            r
        )?;
        let expert_tokens = register_int_counter_vec_with_registry!(
            names::EXPERT_TOKENS_TOTAL,
            "Tokens computed per expert. The label layer is `all` unless counting by layer is on.",
            &["layer", "expert"],
            r
        )?;
        let weights_bytes = register_int_counter_vec_with_registry!(
            names::WEIGHTS_READ_BYTES_TOTAL,
            "Bytes of experts put into service, by source: peer for the memory of another server, disk for the checkpoint's files.",
            &["source"],
            r
        )?;
        let weights_experts = register_int_counter_vec_with_registry!(
            names::WEIGHTS_READ_EXPERTS_TOTAL,
            "(layer, expert) pairs put into service, by source: peer or disk.",
            &["source"],
            r
        )?;
        let http = httpd::Metrics::new("switchyard_server")?;
        r.register(Box::new(http.connections.clone()))?;
        r.register(Box::new(http.culled.clone()))?;
        r.register(Box::new(http.tls_failures.clone()))?;
        Ok(Self {
            http,
            requests_limited: register_int_counter_with_registry!(
                names::REQUESTS_LIMITED_TOTAL,
                "HTTP requests refused with 429, because one address or certificate sends too many.",
                r
            )?,
            links: register_int_gauge_with_registry!(
                names::LINKS,
                "Client links that are open.",
                r
            )?,
            links_opened: register_int_counter_with_registry!(
                names::LINKS_OPENED_TOTAL,
                "Client links opened.",
                r
            )?,
            links_dropped: DropReason::ALL
                .map(|reason| dropped.with_label_values(&[reason.name()])),
            handshakes_failed: HANDSHAKE_REASONS
                .map(|reason| handshakes.with_label_values(&[reason])),
            frames_in: frames.with_label_values(&["in"]),
            frames_out: frames.with_label_values(&["out"]),
            bad_frames: ErrorCode::KNOWN
                .iter()
                .map(|&code| (code, bad.with_label_values(&[code.name()])))
                .collect(),
            bad_frames_other: bad.with_label_values(&["other"]),
            bytes_in: bytes.with_label_values(&["in"]),
            bytes_out: bytes.with_label_values(&["out"]),
            tokens: register_int_counter_with_registry!(
                names::TOKENS_TOTAL,
                "Tokens computed.",
                r
            )?,
            entries: register_int_counter_with_registry!(
                names::ENTRIES_TOTAL,
                "(token, expert) pairs computed.",
                r
            )?,
            batches: register_int_counter_with_registry!(
                names::BATCHES_TOTAL,
                "Merged batches computed.",
                r
            )?,
            batch_tokens: register_histogram_with_registry!(
                names::BATCH_TOKENS,
                "Tokens per merged batch.",
                powers_of_two(15),
                r
            )?,
            batch_clients: register_histogram_with_registry!(
                names::BATCH_CLIENTS,
                "Clients whose frames were merged into one batch.",
                powers_of_two(9),
                r
            )?,
            queue_seconds: phases.with_label_values(&["queue"]),
            gather_seconds: phases.with_label_values(&["gather"]),
            compute_seconds: phases.with_label_values(&["compute"]),
            encode_seconds: phases.with_label_values(&["encode"]),
            graph_seconds: register_histogram_with_registry!(
                names::GRAPH_RECORD_SECONDS,
                "Time to record the graph of a batch, once per number of clients, number of experts and bucket of rows. Batches in flight go on; no batch is launched meanwhile. Servers on GPUs only.",
                PHASE_BUCKETS.to_vec(),
                r
            )?,
            backlog_frames: register_int_gauge_with_registry!(
                names::BACKLOG_FRAMES,
                "Finished answers that wait for a client's credit.",
                r
            )?,
            sleeps: register_int_counter_with_registry!(
                names::SLEEPS_TOTAL,
                "Times that the data thread had no work and blocked.",
                r
            )?,
            expert_tokens,
            experts_loaded: register_int_gauge_with_registry!(
                names::EXPERTS_LOADED,
                "(layer, expert) pairs loaded.",
                r
            )?,
            experts_still_asked: register_int_gauge_with_registry!(
                names::EXPERTS_STILL_ASKED,
                "(layer, expert) pairs that left this server's assignment 30 s ago or longer, and stay loaded because a client still asks for them.",
                r
            )?,
            expert_bytes: register_int_gauge_with_registry!(
                names::EXPERT_BYTES,
                "Bytes of the loaded experts' weights.",
                r
            )?,
            load_seconds: register_gauge_with_registry!(
                names::LOAD_SECONDS,
                "Time that loading the experts took.",
                r
            )?,
            weights_read: WEIGHTS_SOURCES.map(|source| {
                let [bytes, experts] = [&weights_bytes, &weights_experts]
                    .map(|counter| counter.with_label_values(&[source]));
                (bytes, experts)
            }),
            weights_device_bytes: register_int_counter_with_registry!(
                names::WEIGHTS_DEVICE_BYTES_TOTAL,
                "Bytes of experts that this server's GPU copied from another server's GPU. Counted as source peer, too.",
                r
            )?,
            weights_damaged: register_int_counter_with_registry!(
                names::WEIGHTS_DAMAGED_TOTAL,
                "Experts read from another server whose checksum or shape was wrong. They were taken from elsewhere.",
                r
            )?,
            weights_sent_bytes: register_int_counter_with_registry!(
                names::WEIGHTS_SENT_BYTES_TOTAL,
                "Bytes of experts that other servers were allowed to read of this server's memory.",
                r
            )?,
            weights_refused: register_int_counter_with_registry!(
                names::WEIGHTS_REFUSED_TOTAL,
                "Peers that the port for weights has refused: a failed TLS handshake, no ticket or a wrong one.",
                r
            )?,
            weights_grants: register_int_gauge_with_registry!(
                names::WEIGHTS_GRANTS,
                "Experts that other servers are reading of this server's memory.",
                r
            )?,
            ready: register_int_gauge_with_registry!(
                names::READY,
                "1 while /readyz answers 200.",
                r
            )?,
            lease_held: register_int_gauge_with_registry!(
                names::LEASE_HELD,
                "1 while the control plane's lease is held; 0 also without a control plane.",
                r
            )?,
            registry,
        })
    }

    /// The registry that holds the metrics.
    #[must_use]
    pub const fn registry(&self) -> &Registry {
        &self.registry
    }

    /// All metrics in the text format of Prometheus.
    ///
    /// # Errors
    /// [`prometheus::Error`] when a metric cannot be encoded.
    pub fn render(&self) -> Result<String, prometheus::Error> {
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        String::from_utf8(text).map_err(|e| prometheus::Error::Msg(e.to_string()))
    }

    /// Updates the counters of the listener's handshakes. Two threads must not call it at the same time.
    pub(crate) fn set_handshakes(&self, stats: &ListenerStats) {
        let counts = [&stats.rejected, &stats.timed_out, &stats.evicted, &stats.broken];
        for (counter, count) in self.handshakes_failed.iter().zip(counts) {
            counter.inc_by(count.load(Ordering::Relaxed).saturating_sub(counter.get()));
        }
    }

    /// Counts an expert that was put into service.
    pub(crate) fn count_weights_read(&self, bytes: u64, is_from_peer: bool) {
        self.count_weights(1, bytes, is_from_peer);
    }

    pub(crate) fn count_weights(&self, num_experts: u64, bytes: u64, is_from_peer: bool) {
        let (counted_bytes, counted_experts) = &self.weights_read[usize::from(!is_from_peer)];
        counted_bytes.inc_by(bytes);
        counted_experts.inc_by(num_experts);
    }

    pub(crate) fn count_bad_frame(&self, code: ErrorCode) {
        let known = self.bad_frames.iter().find(|(known, _)| *known == code);
        known.map_or(&self.bad_frames_other, |(_, counter)| counter).inc();
    }

    pub(crate) fn count_dropped(&self, reason: DropReason) {
        let known = DropReason::ALL.iter().position(|&known| known == reason);
        if let Some(idx) = known {
            self.links_dropped[idx].inc();
        }
    }

    /// The counter of one expert. Keep it: looking it up takes a lock.
    fn expert_tokens(&self, layer: Option<u32>, expert: u32) -> IntCounter {
        let layer = layer.map_or_else(|| "all".to_owned(), |layer| layer.to_string());
        self.expert_tokens.with_label_values(&[layer.as_str(), expert.to_string().as_str()])
    }
}

/// Counters of tokens per expert, resolved once.
#[derive(Debug)]
pub(crate) struct ExpertTokenCounters {
    num_experts: usize,
    by_layer: bool,
    /// `[layer, expert]` or, without layers, `[expert]`.
    counters: Vec<IntCounter>,
}

impl ExpertTokenCounters {
    /// Counters for `num_layers` layers, or one set of counters for all layers.
    pub(crate) fn new(metrics: &ServerMetrics, num_layers: Option<u32>, num_experts: u32) -> Self {
        let layers: Vec<Option<u32>> = match num_layers {
            Some(num_layers) => (0..num_layers).map(Some).collect(),
            None => vec![None],
        };
        let counters = layers.into_iter().flat_map(|layer| {
            (0..num_experts).map(move |expert| metrics.expert_tokens(layer, expert))
        });
        Self {
            num_experts: num_experts as usize,
            by_layer: num_layers.is_some(),
            counters: counters.collect(),
        }
    }

    pub(crate) fn add(&self, layer: u32, expert: u32, num_tokens: u64) {
        let layer_idx = if self.by_layer { layer as usize } else { 0 };
        if let Some(counter) = self.counters.get(layer_idx * self.num_experts + expert as usize) {
            counter.inc_by(num_tokens);
        }
    }
}

fn powers_of_two(num: i32) -> Vec<f64> {
    (0..num).map(|exponent| 2f64.powi(exponent)).collect()
}

/// In seconds, from the time of a flag's transfer up to a hang.
const PHASE_BUCKETS: [f64; 20] = [
    1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1,
    0.2, 0.5, 1.0, 5.0,
];

/// Labels of experts' sources.
const WEIGHTS_SOURCES: [&str; 2] = ["peer", "disk"];

/// Labels in the order of the counts in [`ListenerStats`].
const HANDSHAKE_REASONS: [&str; 4] = ["refused", "timed_out", "evicted", "broken"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_rule_and_every_code_and_reason_has_its_own_series() {
        let metrics = ServerMetrics::new(Registry::new()).unwrap();
        for code in ErrorCode::KNOWN {
            metrics.count_bad_frame(code);
        }
        metrics.count_bad_frame(ErrorCode::Other(4711));
        for reason in DropReason::ALL {
            metrics.count_dropped(reason);
        }
        metrics.expert_tokens(None, 3).inc();
        let text = metrics.render().unwrap();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            assert!(
                line.starts_with("switchyard_server_") || line.starts_with("switchyard_build_info"),
                "{line}"
            );
        }
        assert!(text.contains("switchyard_server_bad_frames_total{code=\"other\"} 1"), "{text}");
        assert!(text.contains("links_dropped_total{reason=\"no_credit\"} 1"), "{text}");
        assert!(text.contains("expert_tokens_total{expert=\"3\",layer=\"all\"} 1"), "{text}");
        let with_one =
            text.lines().filter(|l| l.contains("bad_frames_total{") && l.ends_with(" 1"));
        assert_eq!(with_one.count(), ErrorCode::KNOWN.len() + 1);
    }
}
