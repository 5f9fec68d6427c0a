//! The metrics of the control plane.

use std::time::Duration;

use control_api::{MemberCounts, MemberState, ScalingAdvice};
use prometheus::{
    Gauge, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    IntGaugeVec, Opts, Registry,
};

use crate::table::Coverage;

/// Handles of the metrics, and the registry that holds them.
#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    pub(crate) registry: Registry,
    members: IntGaugeVec,
    pub(crate) epoch: IntGauge,
    pub(crate) placement_changes: IntCounter,
    pub(crate) registrations: IntCounterVec,
    pub(crate) expirations: IntCounterVec,
    pub(crate) suspects: IntCounter,
    pub(crate) name_conflicts: IntCounter,
    pub(crate) expert_moves: IntCounter,
    advised_servers: IntGauge,
    advice_confidence: Gauge,
    compute_share: Gauge,
    busiest_share: Gauge,
    queue_frames: Gauge,
    late_share: Gauge,
    experts_without_replica: IntGauge,
    experts_under_replicated: IntGauge,
    request_seconds: HistogramVec,
    pub(crate) watchers: IntGauge,
    pub(crate) http: httpd::Metrics,
    pub(crate) store_write_seconds: Histogram,
    pub(crate) store_write_errors: IntCounter,
    pub(crate) store_writable: IntGauge,
    pub(crate) leader: IntGauge,
    pub(crate) terms: IntCounter,
    pub(crate) forwarded: IntCounter,
    pub(crate) election_errors: IntCounter,
}

impl Metrics {
    /// Registers all metrics. An error means that two metrics have the same name, which is a bug.
    pub(crate) fn new() -> Result<Self, prometheus::Error> {
        let metrics = Self::registered()?;
        // Prometheus misses the first event of a series that did not exist before. Create all series now.
        for kind in ["new", "returned", "takeover"] {
            metrics.registrations.with_label_values(&[kind]);
        }
        for cause in ["lease", "suspect"] {
            metrics.expirations.with_label_values(&[cause]);
        }
        Ok(metrics)
    }

    fn registered() -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let make = Maker { registry: &registry };
        let request_opts = HistogramOpts::new(
            "switchyard_control_request_seconds",
            "Time from receiving a request's head to sending the response's head, by route, method and status, in seconds.",
        )
        .buckets(REQUEST_BUCKETS.to_vec());
        let request_seconds = HistogramVec::new(request_opts, &["route", "method", "status"])?;
        registry.register(Box::new(request_seconds.clone()))?;
        let store_opts = HistogramOpts::new(
            "switchyard_control_store_write_seconds",
            "Time to write a snapshot of the state and make it durable, in seconds.",
        )
        .buckets(STORE_BUCKETS.to_vec());
        let store_write_seconds = Histogram::with_opts(store_opts)?;
        registry.register(Box::new(store_write_seconds.clone()))?;
        let info = make.gauges(
            "switchyard_build_info",
            "Always 1. The labels name the component and its version.",
            &["component", "version"],
        )?;
        info.with_label_values(&["control-plane", env!("CARGO_PKG_VERSION")]).set(1);
        let http = httpd::Metrics::new("switchyard_control")?;
        registry.register(Box::new(http.connections.clone()))?;
        registry.register(Box::new(http.culled.clone()))?;
        registry.register(Box::new(http.tls_failures.clone()))?;
        #[cfg(target_os = "linux")]
        registry.register(Box::new(prometheus::process_collector::ProcessCollector::for_self()))?;
        Ok(Self {
            members: make.gauges("switchyard_control_members", "Members of the fleet by state (loading, serving, draining, expired).", &["state"])?,
            epoch: make.gauge("switchyard_control_epoch", "Epoch (version) of the placement table in force.")?,
            placement_changes: make.counter(
                "switchyard_control_placement_changes_total",
                "Placement tables published since the start.",
            )?,
            registrations: make.counters(
                "switchyard_control_registrations_total",
                "Accepted registrations by kind: new (new member), returned (known process), takeover (restarted process).",
                &["kind"],
            )?,
            expirations: make.counters(
                "switchyard_control_expirations_total",
                "Expired members by cause: lease (not renewed in time), suspect (suspected and silent).",
                &["cause"],
            )?,
            suspects: make.counter(
                "switchyard_control_suspects_total",
                "Suspicions of leased members reported by clients. Repeated reports count once until the member renews or expires.",
            )?,
            expert_moves: make.counter(
                "switchyard_control_expert_moves_total",
                "Experts that servers had to load for new plans, if the placement follows the load.",
            )?,
            name_conflicts: make.counter(
                "switchyard_control_name_conflicts_total",
                "Names that two live processes used at the same time.",
            )?,
            advised_servers: make.gauge(
                "switchyard_control_advised_servers",
                "Expert servers that the fleet should have for its load, as `GET /v1/advice` explains.",
            )?,
            advice_confidence: make.ratio(
                "switchyard_control_advice_confidence",
                "Share of the evidence for the advised number of servers that is there, 0 to 1.",
            )?,
            compute_share: make.ratio(
                "switchyard_control_compute_share",
                "Share of the time in which servers compute, averaged over the servers by speed.",
            )?,
            busiest_share: make.ratio(
                "switchyard_control_busiest_share",
                "Share of the time in which the busiest server computes.",
            )?,
            queue_frames: make.ratio(
                "switchyard_control_queue_frames",
                "Frames that wait in the queue of a server, averaged over time and servers.",
            )?,
            late_share: make.ratio(
                "switchyard_control_late_share",
                "Share of the frames that servers computed later than 100 ms after they came.",
            )?,
            experts_without_replica: make.gauge(
                "switchyard_control_experts_without_replica",
                "Experts, counted per layer, that no serving member holds.",
            )?,
            experts_under_replicated: make.gauge(
                "switchyard_control_experts_under_replicated",
                "Experts, counted per layer, with at least one replica but fewer than planned.",
            )?,
            watchers: make.gauge("switchyard_control_watchers", "Open placement watches of clients and servers.")?,
            http,
            store_write_errors: make.counter(
                "switchyard_control_store_write_errors_total",
                "Failed writes of a snapshot.",
            )?,
            store_writable: make.gauge(
                "switchyard_control_store_writable",
                "1 while the store can be written, 0 after a failed write or without a quorum of etcd: then members of new names are refused.",
            )?,
            leader: make.gauge(
                "switchyard_control_leader",
                "1 if this control plane leads, 0 if it follows another one.",
            )?,
            terms: make.counter(
                "switchyard_control_terms_total",
                "Times that this control plane became the leader.",
            )?,
            forwarded: make.counter(
                "switchyard_control_forwarded_requests_total",
                "Requests that this control plane passed on to the leader.",
            )?,
            election_errors: make.counter(
                "switchyard_control_election_errors_total",
                "Failed calls to etcd for elections and for the lease of the leader.",
            )?,
            store_write_seconds,
            request_seconds,
            registry,
        })
    }

    pub(crate) fn set_members(&self, counts: MemberCounts) {
        for state in MemberState::ALL {
            let count = match state {
                MemberState::Loading => counts.loading,
                MemberState::Serving => counts.serving,
                MemberState::Draining => counts.draining,
                MemberState::Expired => counts.expired,
            };
            self.members.with_label_values(&[state.as_str()]).set(i64::from(count));
        }
    }

    pub(crate) fn set_advice(&self, advice: &ScalingAdvice) {
        self.advised_servers.set(advice.desired_servers.into());
        self.advice_confidence.set(advice.confidence);
        self.compute_share.set(advice.compute_share);
        self.busiest_share.set(advice.busiest_share);
        self.queue_frames.set(advice.queue_frames);
        self.late_share.set(advice.late_share);
    }

    pub(crate) fn set_coverage(&self, coverage: Coverage) {
        self.experts_without_replica.set(coverage.without_replica as i64);
        self.experts_under_replicated.set(coverage.under_replicated as i64);
    }

    /// Sets the gauges of the fleet to zero: another control plane counts it.
    pub(crate) fn forget_fleet(&self) {
        self.set_members(MemberCounts::default());
        self.set_coverage(Coverage::default());
        self.store_writable.set(1);
        self.advised_servers.set(0);
        let shares = [&self.advice_confidence, &self.compute_share, &self.busiest_share];
        let waits = [&self.queue_frames, &self.late_share];
        shares.into_iter().chain(waits).for_each(|gauge| gauge.set(0.0));
    }

    pub(crate) fn observe_request(&self, route: &str, method: &str, status: u16, took: Duration) {
        let status = status.to_string();
        let labels = [route, bounded_method(method), status.as_str()];
        self.request_seconds.with_label_values(&labels).observe(took.as_secs_f64());
    }

    /// The exposition text.
    pub(crate) fn render(&self) -> Result<String, prometheus::Error> {
        prometheus::TextEncoder::new().encode_to_string(&self.registry.gather())
    }
}

struct Maker<'a> {
    registry: &'a Registry,
}

impl Maker<'_> {
    fn gauge(&self, name: &str, help: &str) -> Result<IntGauge, prometheus::Error> {
        let metric = IntGauge::new(name, help)?;
        self.registry.register(Box::new(metric.clone()))?;
        Ok(metric)
    }

    fn ratio(&self, name: &str, help: &str) -> Result<Gauge, prometheus::Error> {
        let metric = Gauge::new(name, help)?;
        self.registry.register(Box::new(metric.clone()))?;
        Ok(metric)
    }

    fn gauges(
        &self,
        name: &str,
        help: &str,
        labels: &[&str],
    ) -> Result<IntGaugeVec, prometheus::Error> {
        let metric = IntGaugeVec::new(Opts::new(name, help), labels)?;
        self.registry.register(Box::new(metric.clone()))?;
        Ok(metric)
    }

    fn counter(&self, name: &str, help: &str) -> Result<IntCounter, prometheus::Error> {
        let metric = IntCounter::new(name, help)?;
        self.registry.register(Box::new(metric.clone()))?;
        Ok(metric)
    }

    fn counters(
        &self,
        name: &str,
        help: &str,
        labels: &[&str],
    ) -> Result<IntCounterVec, prometheus::Error> {
        let metric = IntCounterVec::new(Opts::new(name, help), labels)?;
        self.registry.register(Box::new(metric.clone()))?;
        Ok(metric)
    }
}

/// Maps unknown methods to one label value: a client may send any word as its method.
fn bounded_method(method: &str) -> &str {
    match method {
        "GET" | "POST" | "PUT" | "DELETE" | "HEAD" | "OPTIONS" | "PATCH" => method,
        _ => "other",
    }
}

const REQUEST_BUCKETS: [f64; 14] =
    [50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.5, 1.0, 5.0];
const STORE_BUCKETS: [f64; 12] =
    [50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 50e-3, 0.2, 1.0, 5.0];
