//! The metrics of a client.
//!
//! A client runs inside an engine, so it binds no port: it registers its metrics in a registry, which the engine
//! exports. A call updates a metric by a few atomic additions, without a lock, a look-up or an allocation.

pub mod names;

use prometheus::{
    Histogram, IntCounter, IntGauge, IntGaugeVec, Opts, Registry,
    register_histogram_vec_with_registry, register_histogram_with_registry,
    register_int_counter_vec_with_registry, register_int_counter_with_registry,
    register_int_gauge_vec_with_registry, register_int_gauge_with_registry,
};
use protocol::ErrorCode;

use crate::timing::LayerTiming;

/// Reason for the failure of a link: the label `reason` of `switchyard_client_failovers_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FailReason {
    /// The connection closed: the server's process has ended.
    Closed,
    /// The server left the placement and its connection was closed with tokens unanswered.
    Left,
    /// The transport reported an error.
    Transport,
    /// The server's flags have impossible values.
    Desync,
    /// A response failed a check.
    Invalid,
    /// No sign of life within the deadline.
    Silent,
    /// Signs of life, but no answer within the work limit.
    Stuck,
}

impl FailReason {
    /// Every reason.
    pub const ALL: [Self; 7] = [
        Self::Closed,
        Self::Left,
        Self::Transport,
        Self::Desync,
        Self::Invalid,
        Self::Silent,
        Self::Stuck,
    ];

    /// The label's value.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Left => "left",
            Self::Transport => "transport",
            Self::Desync => "desync",
            Self::Invalid => "invalid",
            Self::Silent => "silent",
            Self::Stuck => "stuck",
        }
    }
}

/// Outcome of a hedge: the label `result` of `switchyard_client_hedges_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HedgeResult {
    /// Its answer came first, or the late frame failed: its answer counts.
    Won,
    /// The late answer came first.
    Lost,
    /// It failed or was refused; the late answer counts.
    Failed,
}

impl HedgeResult {
    /// Every result.
    pub const ALL: [Self; 3] = [Self::Won, Self::Lost, Self::Failed];

    /// The label's value.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Won => "won",
            Self::Lost => "lost",
            Self::Failed => "failed",
        }
    }
}

/// The metrics of one client. Cloning shares them.
#[derive(Clone, Debug)]
pub struct ClientMetrics {
    pub(crate) requests_ok: IntCounter,
    pub(crate) requests_failed: IntCounter,
    pub(crate) tokens: IntCounter,
    pub(crate) pairs: IntCounter,
    pub(crate) frames_out: IntCounter,
    pub(crate) frames_in: IntCounter,
    pub(crate) bytes_out: IntCounter,
    pub(crate) bytes_in: IntCounter,
    phase_dispatch: Histogram,
    phase_wait: Histogram,
    phase_combine: Histogram,
    phase_server_queue: Histogram,
    phase_server_compute: Histogram,
    stall: Histogram,
    failovers: [IntCounter; FailReason::ALL.len()],
    hedges: [IntCounter; HedgeResult::ALL.len()],
    #[cfg_attr(not(feature = "device"), allow(dead_code, reason = "counted on GPUs only"))]
    pub(crate) late_servers: IntCounter,
    pub(crate) resent_pairs: IntCounter,
    pub(crate) stale_responses: IntCounter,
    pub(crate) invalid_responses: IntCounter,
    error_frames: Vec<(ErrorCode, IntCounter)>,
    error_frames_other: IntCounter,
    pub(crate) lost: IntCounter,
    pub(crate) duplicated: IntCounter,
    pub(crate) missing_pairs: IntCounter,
    pub(crate) abandoned: IntCounter,
    pub(crate) links_up: IntGauge,
    pub(crate) links_connecting: IntGauge,
    pub(crate) links_leaving: IntGauge,
    pub(crate) connects_ok: IntCounter,
    pub(crate) connects_failed: IntCounter,
    pub(crate) lanes: IntGauge,
    pub(crate) lanes_busy: IntGauge,
    pub(crate) placement_epoch: IntGauge,
    pub(crate) suspects: IntCounter,
}

impl ClientMetrics {
    /// Registers all metrics in registry `r`.
    ///
    /// # Errors
    /// [`prometheus::Error`] when the registry has metrics of these names already.
    pub fn new(r: &Registry) -> Result<Self, prometheus::Error> {
        build_info(r)?;
        let requests = register_int_counter_vec_with_registry!(
            names::REQUESTS_TOTAL,
            "Calls of one layer that ended, by outcome.",
            &["outcome"],
            r
        )?;
        let frames = register_int_counter_vec_with_registry!(
            names::FRAMES_TOTAL,
            "Frames published to servers (out) and taken from them (in).",
            &["direction"],
            r
        )?;
        let bytes = register_int_counter_vec_with_registry!(
            names::BYTES_TOTAL,
            "Bytes of frames published to servers (out) and taken from them (in).",
            &["direction"],
            r
        )?;
        let phases = register_histogram_vec_with_registry!(
            names::PHASE_SECONDS,
            "Time of a call by phase: dispatch, wait and combine here, server_queue and server_compute in its slowest server.",
            &["phase"],
            PHASE_BUCKETS.to_vec(),
            r
        )?;
        let failovers = register_int_counter_vec_with_registry!(
            names::FAILOVERS_TOTAL,
            "Links that failed with tokens unanswered, by reason.",
            &["reason"],
            r
        )?;
        let hedges = register_int_counter_vec_with_registry!(
            names::HEDGES_TOTAL,
            "Frames sent to another replica because an answer was late, by result: won (the answer counts), lost (the late answer came first), failed.",
            &["result"],
            r
        )?;
        let late_servers = register_int_counter_with_registry!(
            names::LATE_SERVERS_TOTAL,
            "Times at which a client on a GPU began to prefer other replicas because a server was late.",
            r
        )?;
        let error_frames = register_int_counter_vec_with_registry!(
            names::ERROR_FRAMES_TOTAL,
            "Error frames received, by code.",
            &["code"],
            r
        )?;
        let links = register_int_gauge_vec_with_registry!(
            names::LINKS,
            "Connections to servers, by state.",
            &["state"],
            r
        )?;
        let connects = register_int_counter_vec_with_registry!(
            names::CONNECTS_TOTAL,
            "Attempts to connect to a server, by outcome.",
            &["outcome"],
            r
        )?;
        Ok(Self {
            requests_ok: requests.with_label_values(&["ok"]),
            requests_failed: requests.with_label_values(&["error"]),
            tokens: register_int_counter_with_registry!(
                names::TOKENS_TOTAL,
                "Tokens of finished calls.",
                r
            )?,
            pairs: register_int_counter_with_registry!(
                names::PAIRS_TOTAL,
                "(token, expert) pairs of finished calls. A client on a GPU counts masked entries too: only its kernels know the pairs.",
                r
            )?,
            frames_out: frames.with_label_values(&["out"]),
            frames_in: frames.with_label_values(&["in"]),
            bytes_out: bytes.with_label_values(&["out"]),
            bytes_in: bytes.with_label_values(&["in"]),
            phase_dispatch: phases.with_label_values(&["dispatch"]),
            phase_wait: phases.with_label_values(&["wait"]),
            phase_combine: phases.with_label_values(&["combine"]),
            phase_server_queue: phases.with_label_values(&["server_queue"]),
            phase_server_compute: phases.with_label_values(&["server_compute"]),
            stall: register_histogram_with_registry!(
                names::STALL_SECONDS,
                "Time that failures cost a call with failures: from the failed server's last sign of life until its tokens were resent.",
                PHASE_BUCKETS.to_vec(),
                r
            )?,
            failovers: FailReason::ALL.map(|reason| failovers.with_label_values(&[reason.name()])),
            hedges: HedgeResult::ALL.map(|result| hedges.with_label_values(&[result.name()])),
            late_servers,
            resent_pairs: register_int_counter_with_registry!(
                names::RESENT_PAIRS_TOTAL,
                "(token, expert) pairs resent after a failure or a refusal.",
                r
            )?,
            stale_responses: register_int_counter_with_registry!(
                names::STALE_RESPONSES_TOTAL,
                "Responses that match no open frame; dropped.",
                r
            )?,
            invalid_responses: register_int_counter_with_registry!(
                names::INVALID_RESPONSES_TOTAL,
                "Responses that failed a check; their link was retired.",
                r
            )?,
            error_frames: ErrorCode::KNOWN
                .iter()
                .map(|&code| (code, error_frames.with_label_values(&[code.name()])))
                .collect(),
            error_frames_other: error_frames.with_label_values(&["other"]),
            lost: register_int_counter_with_registry!(
                names::LOST_REQUESTS_TOTAL,
                "Calls with unanswered pairs at their end; clients on GPUs do not count them. Above 0 is a defect.",
                r
            )?,
            duplicated: register_int_counter_with_registry!(
                names::DUPLICATED_REQUESTS_TOTAL,
                "Calls with pairs counted twice at their end; clients on GPUs do not count them. Above 0 is a defect.",
                r
            )?,
            missing_pairs: register_int_counter_with_registry!(
                names::MISSING_PAIRS_TOTAL,
                "(token, expert) pairs left out for want of a live replica.",
                r
            )?,
            abandoned: register_int_counter_with_registry!(
                names::ABANDONED_REQUESTS_TOTAL,
                "Calls abandoned by the caller, or by an error, with frames outstanding.",
                r
            )?,
            links_up: links.with_label_values(&["up"]),
            links_connecting: links.with_label_values(&["connecting"]),
            links_leaving: links.with_label_values(&["leaving"]),
            connects_ok: connects.with_label_values(&["ok"]),
            connects_failed: connects.with_label_values(&["error"]),
            lanes: register_int_gauge_with_registry!(names::LANES, "Lanes that exist.", r)?,
            lanes_busy: register_int_gauge_with_registry!(
                names::LANES_BUSY,
                "Lanes that a call uses.",
                r
            )?,
            placement_epoch: register_int_gauge_with_registry!(
                names::PLACEMENT_EPOCH,
                "Epoch of the placement in force.",
                r
            )?,
            suspects: register_int_counter_with_registry!(
                names::SUSPECTS_TOTAL,
                "Servers reported to the control plane as suspect.",
                r
            )?,
        })
    }

    pub(crate) fn count_failover(&self, reason: FailReason) {
        if let Some(idx) = FailReason::ALL.iter().position(|&known| known == reason) {
            self.failovers[idx].inc();
        }
    }

    pub(crate) fn count_hedges(&self, result: HedgeResult, num_frames: u32) {
        if let Some(idx) = HedgeResult::ALL.iter().position(|&known| known == result) {
            self.hedges[idx].inc_by(num_frames.into());
        }
    }

    pub(crate) fn count_error_frame(&self, code: ErrorCode) {
        let known = self.error_frames.iter().find(|(known, _)| *known == code);
        known.map_or(&self.error_frames_other, |(_, counter)| counter).inc();
    }

    /// Counts a call that succeeded.
    pub(crate) fn observe(&self, num_tokens: usize, num_pairs: u64, timing: &LayerTiming) {
        self.requests_ok.inc();
        self.tokens.inc_by(num_tokens as u64);
        self.pairs.inc_by(num_pairs);
        self.phase_dispatch.observe(seconds(timing.dispatch_ns));
        self.phase_wait.observe(seconds(timing.wait_ns));
        self.phase_combine.observe(seconds(timing.combine_ns));
        self.phase_server_queue.observe(seconds(timing.server_queue_ns));
        self.phase_server_compute.observe(seconds(timing.server_compute_ns));
        if timing.failovers > 0 {
            self.stall.observe(seconds(timing.stall_ns));
        }
    }
}

fn seconds(ns: u64) -> f64 {
    ns as f64 * 1e-9
}

/// Registers the version of this process. Another component of the process may have done so already.
fn build_info(r: &Registry) -> Result<(), prometheus::Error> {
    let build = IntGaugeVec::new(
        Opts::new(names::BUILD_INFO, "Version of this process; the value is always 1."),
        &["component", "version"],
    )?;
    build.with_label_values(&["client", env!("CARGO_PKG_VERSION")]).set(1);
    match r.register(Box::new(build)) {
        Ok(()) | Err(prometheus::Error::AlreadyReg) => Ok(()),
        Err(error) => Err(error),
    }
}

/// From the latency of one flag to a hang, in seconds.
const PHASE_BUCKETS: [f64; 20] = [
    1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1,
    0.2, 0.5, 1.0, 5.0,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_rule_and_a_second_client_needs_its_own_registry() {
        let registry = Registry::new();
        let metrics = ClientMetrics::new(&registry).unwrap();
        for code in ErrorCode::KNOWN {
            metrics.count_error_frame(code);
        }
        metrics.count_error_frame(ErrorCode::Other(4711));
        FailReason::ALL.into_iter().for_each(|reason| metrics.count_failover(reason));
        for family in registry.gather() {
            let name = family.name();
            let known = name.starts_with("switchyard_client_") || name == "switchyard_build_info";
            assert!(known, "{name}");
            if family.get_field_type() == prometheus::proto::MetricType::HISTOGRAM {
                assert!(name.ends_with("_seconds"), "{name}");
            }
            if family.get_field_type() == prometheus::proto::MetricType::COUNTER {
                assert!(name.ends_with("_total"), "{name}");
            }
        }
        assert!(ClientMetrics::new(&registry).is_err());
    }
}
