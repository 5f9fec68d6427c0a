//! The last traced duration of each magnitude, for the histograms of durations.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

/// A duration and the trace that it was observed in.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Exemplar {
    /// The trace.
    pub trace_id: u128,
    /// The duration in seconds.
    pub seconds: f64,
    /// Time of day at which it was noted.
    pub at: SystemTime,
}

/// By phase, then by the power of two of the nanoseconds: the newest one.
type ByPhase = BTreeMap<&'static str, [Option<Exemplar>; 64]>;

/// Exemplars by phase. Clones share them. The thread that exports traces writes them, and a scrape reads them, so the
/// hot path never waits for the lock.
#[derive(Debug, Clone, Default)]
pub struct Exemplars {
    phases: Arc<Mutex<ByPhase>>,
}

impl Exemplars {
    /// Replaces the exemplar of this magnitude.
    pub fn note(&self, phase: &'static str, took: Duration, trace_id: u128) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let magnitude = nanos.max(1).ilog2() as usize;
        let exemplar = Exemplar { trace_id, seconds: took.as_secs_f64(), at: SystemTime::now() };
        self.lock().entry(phase).or_insert([None; 64])[magnitude] = Some(exemplar);
    }

    /// The newest exemplar of the phase above `above` seconds, and `upto` seconds at most.
    #[must_use]
    pub fn between(&self, phase: &str, above: f64, upto: f64) -> Option<Exemplar> {
        let phases = self.lock();
        let found = phases.get(phase)?.iter().flatten();
        let found = found.filter(|exemplar| exemplar.seconds > above && exemplar.seconds <= upto);
        found.max_by_key(|exemplar| exemplar.at).copied()
    }

    fn lock(&self) -> MutexGuard<'_, ByPhase> {
        self.phases.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
