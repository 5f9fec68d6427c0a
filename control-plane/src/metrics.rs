//! Every metric of the control plane.

use std::time::Duration;

use control_api::{MemberCounts, MemberState};
use prometheus::{
    Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    Registry,
};

use crate::table::Coverage;

/// Handles on the metrics, registered in a registry of their own.
#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    pub(crate) registry: Registry,
    members: IntGaugeVec,
    pub(crate) epoch: IntGauge,
    pub(crate) placement_changes: IntCounter,
    pub(crate) registrations: IntCounterVec,
    pub(crate) expirations: IntCounterVec,
    pub(crate) suspects: IntCounter,
    experts_without_replica: IntGauge,
    experts_under_replicated: IntGauge,
    request_seconds: HistogramVec,
    pub(crate) watchers: IntGauge,
    pub(crate) http: httpd::Metrics,
    pub(crate) store_write_seconds: Histogram,
    pub(crate) store_write_errors: IntCounter,
    pub(crate) store_writable: IntGauge,
}

impl Metrics {
    /// Registers everything. Fails only on a defect: two metrics of one name.
    pub(crate) fn new() -> Result<Self, prometheus::Error> {
        let metrics = Self::registered()?;
        // A series that appears with its first event looks to Prometheus as if there had been none.
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
            "Time from a request's head to its answer's head, by route, method and status.",
        )
        .buckets(REQUEST_BUCKETS.to_vec());
        let request_seconds = HistogramVec::new(request_opts, &["route", "method", "status"])?;
        registry.register(Box::new(request_seconds.clone()))?;
        let store_opts = HistogramOpts::new(
            "switchyard_control_store_write_seconds",
            "Time to make a snapshot durable.",
        )
        .buckets(STORE_BUCKETS.to_vec());
        let store_write_seconds = Histogram::with_opts(store_opts)?;
        registry.register(Box::new(store_write_seconds.clone()))?;
        let info = make.gauges(
            "switchyard_build_info",
            "Always 1; the labels say which software runs.",
            &["component", "version"],
        )?;
        info.with_label_values(&["control-plane", env!("CARGO_PKG_VERSION")]).set(1);
        let http = httpd::Metrics::new("switchyard_control")?;
        registry.register(Box::new(http.connections.clone()))?;
        registry.register(Box::new(http.culled.clone()))?;
        #[cfg(target_os = "linux")]
        registry.register(Box::new(prometheus::process_collector::ProcessCollector::for_self()))?;
        Ok(Self {
            members: make.gauges("switchyard_control_members", "Members by state.", &["state"])?,
            epoch: make.gauge("switchyard_control_epoch", "Epoch of the placement table.")?,
            placement_changes: make.counter(
                "switchyard_control_placement_changes_total",
                "Placement tables published.",
            )?,
            registrations: make.counters(
                "switchyard_control_registrations_total",
                "Registrations accepted: of new members, of known processes and of restarted ones.",
                &["kind"],
            )?,
            expirations: make.counters(
                "switchyard_control_expirations_total",
                "Members expired, because the lease ran out or a suspected member stayed silent.",
                &["cause"],
            )?,
            suspects: make.counter(
                "switchyard_control_suspects_total",
                "Leased members that looked dead to a client, counted once until they renew or expire.",
            )?,
            experts_without_replica: make.gauge(
                "switchyard_control_experts_without_replica",
                "(layer, expert) pairs that no serving member holds.",
            )?,
            experts_under_replicated: make.gauge(
                "switchyard_control_experts_under_replicated",
                "(layer, expert) pairs with at least one replica but fewer than planned.",
            )?,
            watchers: make.gauge("switchyard_control_watchers", "Open placement watches.")?,
            http,
            store_write_errors: make.counter(
                "switchyard_control_store_write_errors_total",
                "Snapshots that could not be written.",
            )?,
            store_writable: make.gauge(
                "switchyard_control_store_writable",
                "1 if the last write of a snapshot succeeded, 0 while the store is read-only.",
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

    pub(crate) fn set_coverage(&self, coverage: Coverage) {
        self.experts_without_replica.set(coverage.without_replica as i64);
        self.experts_under_replicated.set(coverage.under_replicated as i64);
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

/// A peer may send any word as its method; the label may not grow with it.
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
