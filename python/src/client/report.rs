//! The report of a call.

use std::sync::{Mutex, MutexGuard, PoisonError};

use attention_client::{LayerTiming, ServerTiming};
use pyo3::prelude::*;

/// Times and counts of one call, and those of its servers.
#[derive(Debug, Clone, Default)]
pub struct CallReport {
    pub timing: LayerTiming,
    pub servers: Vec<ServerTiming>,
}

impl From<LayerTiming> for CallReport {
    /// A report without parts of servers, as of a call on a GPU.
    fn from(timing: LayerTiming) -> Self {
        Self { timing, servers: Vec::new() }
    }
}

/// Times and counts of one call. A call fills in the report that it is given.
#[pyclass(module = "switchyard_moe._native", frozen)]
#[derive(Debug, Default)]
pub struct Report {
    call: Mutex<CallReport>,
}

impl Report {
    pub fn of(call: CallReport) -> Self {
        Self { call: Mutex::new(call) }
    }

    pub fn set(&self, call: &CallReport) {
        self.lock().clone_from(call);
    }

    fn lock(&self) -> MutexGuard<'_, CallReport> {
        self.call.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn timing(&self) -> LayerTiming {
        self.lock().timing
    }
}

#[pymethods]
impl Report {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Choosing replicas, and writing and publishing frames, in microseconds.
    #[getter]
    fn dispatch_us(&self) -> f64 {
        us(self.timing().dispatch_ns)
    }

    /// Waiting for answers, resends included, in microseconds.
    #[getter]
    fn wait_us(&self) -> f64 {
        us(self.timing().wait_ns)
    }

    /// Reading answers and summing them, in microseconds.
    #[getter]
    fn combine_us(&self) -> f64 {
        us(self.timing().combine_ns)
    }

    /// Sum of dispatch, wait and combine, in microseconds.
    #[getter]
    fn total_us(&self) -> f64 {
        us(self.timing().total_ns())
    }

    /// Longest time that an answered frame waited in its server's queue, in microseconds.
    #[getter]
    fn server_queue_us(&self) -> f64 {
        us(self.timing().server_queue_ns)
    }

    /// Longest time that a server computed an answered frame, in microseconds.
    #[getter]
    fn server_compute_us(&self) -> f64 {
        us(self.timing().server_compute_ns)
    }

    /// Time lost to failures, from a failed server's last sign of life until its tokens were resent, in microseconds.
    #[getter]
    fn stall_us(&self) -> f64 {
        us(self.timing().stall_ns)
    }

    /// Frames published.
    #[getter]
    fn frames(&self) -> u32 {
        self.timing().num_frames
    }

    /// Servers contacted, in the order of their first frames.
    #[getter]
    fn servers(&self) -> Vec<ServerReport> {
        self.lock().servers.iter().cloned().map(|timing| ServerReport { timing }).collect()
    }

    /// Connections that failed with tokens unanswered.
    #[getter]
    fn failovers(&self) -> u32 {
        self.timing().failovers
    }

    /// Frames sent to another replica because an answer was late.
    #[getter]
    fn hedges(&self) -> u32 {
        self.timing().hedges
    }

    /// (token, expert) pairs resent.
    #[getter]
    fn resends(&self) -> u64 {
        self.timing().resent_pairs
    }

    /// (token, expert) pairs left out for want of a live replica.
    #[getter]
    fn missing(&self) -> u64 {
        self.timing().missing_pairs
    }

    fn __repr__(&self) -> String {
        let CallReport { timing, servers } = &*self.lock();
        let names: Vec<_> = servers.iter().map(|server| &*server.name).collect();
        format!(
            "Report(total_us={:.1}, dispatch_us={:.1}, wait_us={:.1}, combine_us={:.1}, servers=[{}], resends={}, \
             failovers={}, stall_us={:.1})",
            us(timing.total_ns()),
            us(timing.dispatch_ns),
            us(timing.wait_ns),
            us(timing.combine_ns),
            names.join(", "),
            timing.resent_pairs,
            timing.failovers,
            us(timing.stall_ns)
        )
    }
}

/// The part of one server in a call.
#[pyclass(module = "switchyard_moe._native", frozen)]
#[derive(Debug)]
pub struct ServerReport {
    timing: ServerTiming,
}

#[pymethods]
impl ServerReport {
    /// Name of the server. A server that restarted during the call has two parts.
    #[getter]
    fn name(&self) -> &str {
        &self.timing.name
    }

    /// Frames published to it.
    #[getter]
    fn frames(&self) -> u32 {
        self.timing.num_frames
    }

    /// (token, expert) pairs that it answered.
    #[getter]
    fn pairs(&self) -> u64 {
        self.timing.answered_pairs
    }

    /// (token, expert) pairs that were resent, because it failed or refused.
    #[getter]
    fn resends(&self) -> u64 {
        self.timing.resent_pairs
    }

    /// Connections to it that failed with tokens unanswered.
    #[getter]
    fn failovers(&self) -> u32 {
        self.timing.failovers
    }

    /// Longest time from publishing a frame until its answer was read, in microseconds.
    #[getter]
    fn wait_us(&self) -> f64 {
        us(self.timing.wait_ns)
    }

    /// Longest time that an answered frame waited in the server's queue, in microseconds.
    #[getter]
    fn queue_us(&self) -> f64 {
        us(self.timing.queue_ns)
    }

    /// Longest time that the server computed an answered frame, in microseconds.
    #[getter]
    fn compute_us(&self) -> f64 {
        us(self.timing.compute_ns)
    }

    fn __repr__(&self) -> String {
        let timing = &self.timing;
        format!(
            "ServerReport(name={:?}, frames={}, pairs={}, resends={}, failovers={}, wait_us={:.1}, queue_us={:.1}, \
             compute_us={:.1})",
            timing.name,
            timing.num_frames,
            timing.answered_pairs,
            timing.resent_pairs,
            timing.failovers,
            us(timing.wait_ns),
            us(timing.queue_ns),
            us(timing.compute_ns)
        )
    }
}

fn us(ns: u64) -> f64 {
    ns as f64 / 1e3
}
