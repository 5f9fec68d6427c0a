//! The metrics of the control plane.

mod expert_load;
pub mod names;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use control_api::{EditionInfo, EditionState, MemberCounts, MemberState, ScalingAdvice};
use prometheus::{
    Gauge, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    IntGaugeVec, Opts, Registry,
};

use telemetry::openmetrics;

use self::expert_load::ExpertLoad;
pub(crate) use self::expert_load::LayerLoad;
use crate::table::Coverage;

/// Handles of the metrics, and the registry that holds them.
#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    pub(crate) registry: Registry,
    /// True if the gauges show the fleet of this handle: that of the current edition.
    is_shown: Arc<AtomicBool>,
    members: IntGaugeVec,
    members_unreachable: IntGauge,
    members_insecure: IntGauge,
    plan_short: IntGauge,
    epoch: IntGauge,
    edition_serving: IntGaugeVec,
    edition_missing: IntGaugeVec,
    edition_clients: IntGaugeVec,
    pub(crate) placement_changes: IntCounter,
    pub(crate) registrations: IntCounterVec,
    pub(crate) expirations: IntCounterVec,
    pub(crate) suspects: IntCounter,
    pub(crate) name_conflicts: IntCounter,
    pub(crate) expert_moves: IntCounter,
    /// Experts of each layer that have a series of their own.
    pub(crate) top_experts: usize,
    expert_load: ExpertLoad,
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
    pub(crate) plan_seconds: Histogram,
    pub(crate) placement_seconds: Histogram,
    pub(crate) store_write_errors: IntCounter,
    pub(crate) store_writable: IntGauge,
    pub(crate) leader: IntGauge,
    pub(crate) terms: IntCounter,
    pub(crate) forwarded: IntCounter,
    pub(crate) election_errors: IntCounter,
}

impl Metrics {
    /// Registers all metrics, with series for `top_experts` experts of each layer. An error means that two metrics have
    /// the same name, which is a bug.
    pub(crate) fn new(top_experts: usize) -> Result<Self, prometheus::Error> {
        let metrics = Self { top_experts, ..Self::registered()? };
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
            names::REQUEST_SECONDS,
            "Time from receiving a request's head to sending the response's head, by route, method and status, in seconds.",
        )
        .buckets(REQUEST_BUCKETS.to_vec());
        let request_seconds = HistogramVec::new(request_opts, &["route", "method", "status"])?;
        registry.register(Box::new(request_seconds.clone()))?;
        let store_write_seconds = make.histogram(
            names::STORE_WRITE_SECONDS,
            "Time to write a snapshot of the state and make it durable, in seconds.",
        )?;
        let plan_seconds = make.histogram(
            names::PLAN_SECONDS,
            "Time to plan the fleet, if the placement follows the load, in seconds.",
        )?;
        let placement_seconds = make.histogram(
            names::PLACEMENT_SECONDS,
            "Processor time to compute and encode a new placement table, in seconds.",
        )?;
        let info = make.gauges(
            names::BUILD_INFO,
            "Always 1. The labels name the component and its version.",
            &["component", "version"],
        )?;
        info.with_label_values(&["control-plane", env!("CARGO_PKG_VERSION")]).set(1);
        let http = httpd::Metrics::new("switchyard_control")?;
        registry.register(Box::new(http.connections.clone()))?;
        registry.register(Box::new(http.culled.clone()))?;
        let expert_load = ExpertLoad::new()?;
        registry.register(Box::new(expert_load.clone()))?;
        registry.register(Box::new(http.tls_failures.clone()))?;
        #[cfg(target_os = "linux")]
        registry.register(Box::new(prometheus::process_collector::ProcessCollector::for_self()))?;
        Ok(Self {
            members: make.gauges(names::MEMBERS, "Members of the fleet by state (loading, serving, draining, expired).", &["state"])?,
            members_unreachable: make.gauge(
                names::MEMBERS_UNREACHABLE,
                "Serving members that the control plane cannot connect to.",
            )?,
            members_insecure: make.gauge(
                names::MEMBERS_INSECURE,
                "Members that speak plain text to clients of other hosts, or admit them without a ticket.",
            )?,
            plan_short: make.gauge(
                names::PLAN_SHORT,
                "1 while the servers allow no plan, or none with all replicas, 0 otherwise.",
            )?,
            epoch: make.gauge(names::EPOCH, "Epoch (version) of the placement table in force.")?,
            is_shown: Arc::new(AtomicBool::new(true)),
            edition_serving: make.gauges(
                names::MODEL_SERVING_MEMBERS,
                "Serving members by model, if the fleet serves more than one: the start of its fingerprint, and its state (current, next, retiring, draining).",
                &["model", "state"],
            )?,
            edition_missing: make.gauges(
                names::MODEL_EXPERTS_WITHOUT_REPLICA,
                "Experts that no serving member holds by model, if the fleet serves more than one, counted per layer.",
                &["model", "state"],
            )?,
            edition_clients: make.gauges(
                names::MODEL_CLIENTS,
                "Clients that follow the placement of a model, if the fleet serves more than one.",
                &["model", "state"],
            )?,
            placement_changes: make.counter(
                names::PLACEMENT_CHANGES_TOTAL,
                "Placement tables published since the start.",
            )?,
            registrations: make.counters(
                names::REGISTRATIONS_TOTAL,
                "Accepted registrations by kind: new (new member), returned (known process), takeover (restarted process).",
                &["kind"],
            )?,
            expirations: make.counters(
                names::EXPIRATIONS_TOTAL,
                "Expired members by cause: lease (not renewed in time), suspect (suspected and silent).",
                &["cause"],
            )?,
            suspects: make.counter(
                names::SUSPECTS_TOTAL,
                "Suspicions of leased members reported by clients. A report counts if none came in the minute before.",
            )?,
            expert_moves: make.counter(
                names::EXPERT_MOVES_TOTAL,
                "Experts that servers had to load for new plans, if the placement follows the load.",
            )?,
            name_conflicts: make.counter(
                names::NAME_CONFLICTS_TOTAL,
                "Names that two live processes used at the same time.",
            )?,
            advised_servers: make.gauge(
                names::ADVISED_SERVERS,
                "Expert servers that the fleet should have for its load, as `GET /v1/advice` explains.",
            )?,
            advice_confidence: make.ratio(
                names::ADVICE_CONFIDENCE,
                "Share of the evidence for the advised number of servers that is there, 0 to 1.",
            )?,
            compute_share: make.ratio(
                names::COMPUTE_SHARE,
                "Share of the time in which servers compute, averaged over the servers by speed.",
            )?,
            busiest_share: make.ratio(
                names::BUSIEST_SHARE,
                "Share of the time in which the busiest server computes.",
            )?,
            queue_frames: make.ratio(
                names::QUEUE_FRAMES,
                "Frames that wait in the queue of a server, averaged over time and servers.",
            )?,
            late_share: make.ratio(
                names::LATE_SHARE,
                "Share of the frames that servers computed later than 100 ms after they came.",
            )?,
            experts_without_replica: make.gauge(
                names::EXPERTS_WITHOUT_REPLICA,
                "Experts, counted per layer, that no serving member holds.",
            )?,
            experts_under_replicated: make.gauge(
                names::EXPERTS_UNDER_REPLICATED,
                "Experts, counted per layer, with at least one replica but fewer than planned.",
            )?,
            watchers: make.gauge(names::WATCHERS, "Open placement watches of clients and servers.")?,
            http,
            top_experts: 0,
            expert_load,
            store_write_errors: make.counter(
                names::STORE_WRITE_ERRORS_TOTAL,
                "Failed writes of a snapshot.",
            )?,
            store_writable: make.gauge(
                names::STORE_WRITABLE,
                "1 while the store can be written, 0 after a failed write or without a quorum of etcd: then members of new names are refused.",
            )?,
            leader: make.gauge(
                names::LEADER,
                "1 if this control plane leads, 0 if it follows another one.",
            )?,
            terms: make.counter(
                names::TERMS_TOTAL,
                "Times that this control plane became the leader.",
            )?,
            forwarded: make.counter(
                names::FORWARDED_REQUESTS_TOTAL,
                "Requests that this control plane passed on to the leader.",
            )?,
            election_errors: make.counter(
                names::ELECTION_ERRORS_TOTAL,
                "Failed calls to etcd for elections and for the lease of the leader.",
            )?,
            store_write_seconds,
            plan_seconds,
            placement_seconds,
            request_seconds,
            registry,
        })
    }

    pub(crate) fn set_members(&self, counts: MemberCounts) {
        if !self.is_shown() {
            return;
        }
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

    pub(crate) fn set_unreachable(&self, num_members: usize) {
        if self.is_shown() {
            self.members_unreachable.set(num_members as i64);
        }
    }

    pub(crate) fn set_insecure(&self, num_members: usize) {
        if self.is_shown() {
            self.members_insecure.set(num_members as i64);
        }
    }

    pub(crate) fn set_plan_short(&self, is_short: bool) {
        if self.is_shown() {
            self.plan_short.set(i64::from(is_short));
        }
    }

    pub(crate) fn set_expert_load(&self, loads: &[LayerLoad]) {
        if self.is_shown() {
            self.expert_load.set(loads);
        }
    }

    /// Handles for another edition. Counters are common; gauges of the fleet are set once that edition is
    /// [shown](Self::show_fleet).
    pub(crate) fn of_edition(&self, is_shown: bool) -> Self {
        Self { is_shown: Arc::new(AtomicBool::new(is_shown)), ..self.clone() }
    }

    /// Makes the gauges show the fleet of this handle, or no longer.
    pub(crate) fn show_fleet(&self, is_shown: bool) {
        self.is_shown.store(is_shown, Ordering::Relaxed);
    }

    fn is_shown(&self) -> bool {
        self.is_shown.load(Ordering::Relaxed)
    }

    /// Sets the gauges by model. Without editions, they have no series.
    pub(crate) fn set_editions(&self, editions: &[EditionInfo]) {
        let gauges = [&self.edition_serving, &self.edition_missing, &self.edition_clients];
        let labels = |info: &EditionInfo, state: EditionState| {
            let model: String =
                info.fingerprint.iter().flat_map(|text| text.chars()).take(12).collect();
            [model, state.as_str().to_owned()]
        };
        if editions.is_empty() {
            gauges.iter().for_each(|gauge| gauge.reset());
        }
        for info in editions {
            for state in EditionState::ALL {
                let labels = labels(info, state);
                let labels: Vec<&str> = labels.iter().map(String::as_str).collect();
                if state != info.state {
                    // An error means that there is no such series.
                    gauges.iter().for_each(|gauge| drop(gauge.remove_label_values(&labels)));
                    continue;
                }
                let values = [
                    i64::from(info.members.serving),
                    info.experts_without_replica as i64,
                    info.num_clients as i64,
                ];
                for (gauge, value) in gauges.iter().zip(values) {
                    gauge.with_label_values(&labels).set(value);
                }
            }
        }
    }

    pub(crate) fn set_epoch(&self, epoch: u64) {
        if self.is_shown() {
            self.epoch.set(epoch as i64);
        }
    }

    pub(crate) fn set_advice(&self, advice: &ScalingAdvice) {
        if !self.is_shown() {
            return;
        }
        self.advised_servers.set(advice.desired_servers.into());
        self.advice_confidence.set(advice.confidence);
        self.compute_share.set(advice.compute_share);
        self.busiest_share.set(advice.busiest_share);
        self.queue_frames.set(advice.queue_frames);
        self.late_share.set(advice.late_share);
    }

    pub(crate) fn set_coverage(&self, coverage: Coverage) {
        if !self.is_shown() {
            return;
        }
        self.experts_without_replica.set(coverage.without_replica as i64);
        self.experts_under_replicated.set(coverage.under_replicated as i64);
    }

    /// Sets the gauges of the fleet to zero: another control plane counts it.
    pub(crate) fn forget_fleet(&self) {
        self.set_members(MemberCounts::default());
        self.set_unreachable(0);
        self.set_insecure(0);
        self.set_plan_short(false);
        self.set_expert_load(&[]);
        self.set_coverage(Coverage::default());
        self.set_editions(&[]);
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

    /// The content type that an `Accept` header prefers, and the exposition text.
    pub(crate) fn render_as(
        &self,
        accept: Option<&str>,
    ) -> Result<(&'static str, String), prometheus::Error> {
        let families = self.registry.gather();
        if accept.is_some_and(openmetrics::is_preferred) {
            return Ok((openmetrics::CONTENT_TYPE, openmetrics::encode(&families, None)));
        }
        let text = prometheus::TextEncoder::new().encode_to_string(&families)?;
        Ok(("text/plain; version=0.0.4", text))
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

    /// A histogram of the length of some work.
    fn histogram(&self, name: &str, help: &str) -> Result<Histogram, prometheus::Error> {
        let opts = HistogramOpts::new(name, help).buckets(WORK_BUCKETS.to_vec());
        let metric = Histogram::with_opts(opts)?;
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
const WORK_BUCKETS: [f64; 12] =
    [50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 50e-3, 0.2, 1.0, 5.0];
