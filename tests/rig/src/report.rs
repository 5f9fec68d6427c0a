//! The report of a run of the rig.

use std::collections::BTreeMap;

use bench_harness::stats::of_sorted;
use serde::Serialize;

use crate::schedule::{Event, Kind};

/// A breach of a rule.
#[derive(Debug, Clone, Serialize)]
pub struct Violation {
    /// Stable name of the rule that was broken.
    pub rule: Rule,
    /// The observed value, with the expected one.
    pub detail: String,
}

/// The rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// Every output equals the oracle's.
    RightOutput,
    /// Every call succeeds while every expert has a live replica.
    NoError,
    /// A call fails only with the error that names a layer and an expert without replica.
    TypedError,
    /// The client does not panic.
    NoPanic,
    /// The client's own accounts of lost, doubled, stale and malformed answers stay at zero.
    Accounts,
    /// Layers continue to finish.
    Progress,
    /// The cluster becomes whole again.
    Recovery,
    /// An epoch stands for one table, and never goes backwards.
    Epochs,
    /// A drain moves no token by failover.
    QuietDrain,
    /// A process starts or leaves on request.
    Lifecycle,
}

/// A distribution of times.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Times {
    /// How many.
    pub count: usize,
    /// Median, milliseconds.
    pub p50_ms: f64,
    /// 99th percentile, milliseconds.
    pub p99_ms: f64,
    /// Largest, milliseconds.
    pub max_ms: f64,
}

impl Times {
    /// Of nanoseconds in any order.
    #[must_use]
    pub fn of(mut ns: Vec<u64>) -> Self {
        ns.sort_unstable();
        let at = |fraction| of_sorted(&ns, fraction).map_or(0.0, |ns| ns as f64 / 1e6);
        Self { count: ns.len(), p50_ms: at(0.5), p99_ms: at(0.99), max_ms: at(1.0) }
    }
}

/// One finished layer.
#[derive(Debug, Clone, Copy)]
pub struct LayerRecord {
    /// Since the start of the run, nanoseconds.
    pub begin_ns: u64,
    /// Since the start of the run, nanoseconds.
    pub end_ns: u64,
    /// The client's own figure: from the last sign of life of a failed server to the resend.
    pub stall_ns: u64,
    /// Links that failed with tokens of this layer unanswered.
    pub failovers: u32,
    /// Tokens.
    pub num_tokens: u32,
    /// Whether another layer of the same thread was outstanding, whose time is in this one's.
    pub overlapped: bool,
}

/// One event as it happened.
#[derive(Debug, Clone, Copy)]
pub struct EventRecord {
    /// The event of the schedule.
    pub event: Event,
    /// The moment of the signal, nanoseconds since the start of the run.
    pub at_ns: u64,
    /// When a server was killed, and when it was a zombie: the kernel closes its connections shortly
    /// before that.
    pub death_ns: Option<(u64, u64)>,
    /// When the cluster was whole again.
    pub whole_ns: u64,
}

/// All events of one kind.
#[derive(Debug, Clone, Serialize)]
pub struct KindReport {
    /// Kind.
    pub kind: Kind,
    /// Number of events.
    pub events: usize,
    /// Events that hit at least one layer in flight, so that tokens were resent.
    pub events_that_hit: usize,
    /// Layers hit.
    pub layers_hit: usize,
    /// Wall time of the layers hit, beyond the median of undisturbed layers. Overlapped layers are left
    /// out.
    pub stall: Times,
    /// The part of [`stall`](Self::stall) after the killed process was gone. The kernel decides how long a process takes
    /// to die, and no peer can notice before.
    pub stall_after_death: Times,
    /// From the signal until the killed process was gone.
    pub died_after: Times,
    /// The client's own figure for the layers hit.
    pub client_stall: Times,
    /// Limit of a stall, milliseconds, for kinds that have one.
    pub limit_ms: Option<f64>,
    /// Stalls within that limit.
    pub within_limit: Option<usize>,
    /// From the signal until the cluster was whole again.
    pub whole_after: Times,
}

/// A run.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Replays the schedule and the inputs.
    pub seed: u64,
    /// Whether no rule was broken.
    pub sound: bool,
    /// Breaches, the first few of each rule.
    pub violations: Vec<Violation>,
    /// Number of all breaches.
    pub num_violations: usize,
    /// Layers finished and checked.
    pub layers: u64,
    /// Tokens of these layers.
    pub tokens: u64,
    /// Calls that failed, as expected, while an expert had no replica.
    pub expected_errors: u64,
    /// Calls that were given up on purpose.
    pub abandoned: u64,
    /// Length of the run, seconds.
    pub wall_s: f64,
    /// Servers, replicas, client threads.
    pub servers: usize,
    /// Servers that hold each expert.
    pub replicas: usize,
    /// Client threads.
    pub threads: usize,
    /// The clients' deadline, milliseconds.
    pub deadline_ms: u64,
    /// Wall time of undisturbed layers.
    pub steady: Times,
    /// Undisturbed layers that took 10 ms more than the median: delays of the machine, without any fault.
    pub steady_beyond_10_ms: usize,
    /// By kind of event.
    pub kinds: Vec<KindReport>,
    /// Failovers that no event explains: a machine too busy for the deadline.
    pub unexplained_failovers: usize,
    /// Counters of the client that must be zero.
    pub accounts: BTreeMap<String, f64>,
    /// Failovers by reason.
    pub failovers: BTreeMap<String, f64>,
    /// Placement epochs seen.
    pub epochs: u64,
    /// The events, in order.
    pub schedule: Vec<Event>,
}

/// Limits of stalls.
#[must_use]
pub fn limit_ms(kind: Kind, deadline_ms: u64) -> Option<f64> {
    match kind {
        Kind::Kill | Kind::Restart | Kind::ControlAndKill => Some(10.0),
        Kind::Freeze | Kind::Expire => Some(deadline_ms as f64 + 10.0),
        Kind::Drain | Kind::Control | Kind::Outage => None,
    }
}

/// Sums up events and layers. The second result counts failovers that no event explains.
#[must_use]
pub fn by_kind(
    events: &[EventRecord],
    layers: &[LayerRecord],
    steady_ns: u64,
    deadline_ms: u64,
) -> (Vec<KindReport>, usize) {
    let mut hits: Vec<Vec<&LayerRecord>> = vec![Vec::new(); events.len()];
    let mut num_unexplained = 0;
    for layer in layers.iter().filter(|layer| layer.failovers > 0) {
        let event = events
            .iter()
            .position(|event| layer.end_ns >= event.at_ns && layer.begin_ns <= event.whole_ns);
        match event {
            Some(idx) => hits[idx].push(layer),
            None => num_unexplained += 1,
        }
    }
    let report = |kind: Kind| {
        let of_kind: Vec<usize> =
            (0..events.len()).filter(|&idx| events[idx].event.kind == kind).collect();
        let layers_hit: Vec<&LayerRecord> =
            of_kind.iter().flat_map(|&idx| hits[idx].iter().copied()).collect();
        let alone = layers_hit.iter().filter(|layer| !layer.overlapped);
        let stalls: Vec<u64> =
            alone.map(|layer| (layer.end_ns - layer.begin_ns).saturating_sub(steady_ns)).collect();
        let after_death =
            of_kind.iter().filter_map(|&idx| Some((events[idx].death_ns?.1, &hits[idx])));
        let after_death = after_death.flat_map(|(died_ns, layers)| {
            layers.iter().filter(|layer| !layer.overlapped).map(move |layer| {
                let stall_ns = (layer.end_ns - layer.begin_ns).saturating_sub(steady_ns);
                stall_ns.min(layer.end_ns.saturating_sub(died_ns))
            })
        });
        let limit_ms = limit_ms(kind, deadline_ms);
        KindReport {
            kind,
            events: of_kind.len(),
            events_that_hit: of_kind.iter().filter(|&&idx| !hits[idx].is_empty()).count(),
            layers_hit: layers_hit.len(),
            within_limit: limit_ms
                .map(|limit| stalls.iter().filter(|&&ns| ns as f64 / 1e6 <= limit).count()),
            stall: Times::of(stalls),
            stall_after_death: Times::of(after_death.collect()),
            died_after: Times::of(
                of_kind
                    .iter()
                    .filter_map(|&idx| events[idx].death_ns)
                    .map(|(killed_ns, died_ns)| died_ns - killed_ns)
                    .collect(),
            ),
            client_stall: Times::of(layers_hit.iter().map(|layer| layer.stall_ns).collect()),
            limit_ms,
            whole_after: Times::of(
                of_kind.iter().map(|&idx| events[idx].whole_ns - events[idx].at_ns).collect(),
            ),
        }
    };
    let kinds = Kind::ALL.into_iter().map(report).filter(|kind| kind.events > 0).collect();
    (kinds, num_unexplained)
}

impl Report {
    /// The report as text.
    #[must_use]
    pub fn as_text(&self) -> String {
        let mut text = format!(
            "seed {}: {} layers, {} tokens, {} threads, {} servers, {} replicas, {:.1} s\n",
            self.seed,
            self.layers,
            self.tokens,
            self.threads,
            self.servers,
            self.replicas,
            self.wall_s
        );
        text += &format!(
            "undisturbed layers: p50 {:.2} ms, p99 {:.2} ms, max {:.2} ms, {} of {} beyond p50 + 10 ms\n",
            self.steady.p50_ms,
            self.steady.p99_ms,
            self.steady.max_ms,
            self.steady_beyond_10_ms,
            self.steady.count
        );
        text += &format!(
            "{:<17}{:>7}{:>10}{:>8}{:>10}{:>10}{:>10}{:>10}{:>12}\n",
            "event", "count", "that hit", "layers", "stall p50", "p99", "max", "limit", "within"
        );
        for kind in &self.kinds {
            let name = serde_json::to_value(kind.kind).unwrap_or_default();
            let limit = kind.limit_ms.map_or_else(|| "-".to_owned(), |ms| format!("{ms:.0}"));
            let within = kind
                .within_limit
                .map_or_else(|| "-".to_owned(), |num| format!("{num}/{}", kind.stall.count));
            text += &format!(
                "{:<17}{:>7}{:>10}{:>8}{:>10.2}{:>10.2}{:>10.2}{:>10}{:>12}\n",
                name.as_str().unwrap_or_default(),
                kind.events,
                kind.events_that_hit,
                kind.layers_hit,
                kind.stall.p50_ms,
                kind.stall.p99_ms,
                kind.stall.max_ms,
                limit,
                within
            );
        }
        text += &format!(
            "{} failovers by no event, {} expected errors, {} abandoned calls, {} epochs\n",
            self.unexplained_failovers, self.expected_errors, self.abandoned, self.epochs
        );
        for violation in &self.violations {
            text += &format!("VIOLATION {:?}: {}\n", violation.rule, violation.detail);
        }
        let verdict = if self.sound { "sound" } else { "NOT SOUND" };
        text + &format!("{verdict}; replay with --seed {}\n", self.seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_counted_under_the_event_that_they_overlap() {
        let event = |kind, at_ns, whole_ns| EventRecord {
            event: Event { kind, server_idx: 0, gap_layers: 1, delay_us: 0, hold_ms: 0 },
            at_ns,
            death_ns: None,
            whole_ns,
        };
        let layer = |begin_ns, end_ns, failovers| LayerRecord {
            begin_ns,
            end_ns,
            stall_ns: 0,
            failovers,
            num_tokens: 1,
            overlapped: false,
        };
        let events = [
            event(Kind::Kill, 10_000_000, 20_000_000),
            event(Kind::Freeze, 50_000_000, 60_000_000),
        ];
        let layers = [
            layer(9_000_000, 12_000_000, 1),
            layer(12_000_000, 13_000_000, 0),
            layer(55_000_000, 175_000_000, 2),
            layer(30_000_000, 31_000_000, 1),
        ];
        let (kinds, unexplained) = by_kind(&events, &layers, 1_000_000, 100);
        assert_eq!(unexplained, 1);
        assert_eq!(
            (kinds[0].kind, kinds[0].layers_hit, kinds[0].within_limit),
            (Kind::Kill, 1, Some(1))
        );
        assert!((kinds[0].stall.max_ms - 2.0).abs() < 1e-9);
        assert_eq!(
            (kinds[1].kind, kinds[1].events_that_hit, kinds[1].within_limit),
            (Kind::Freeze, 1, Some(0))
        );
    }
}
