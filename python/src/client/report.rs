//! The report of a call.

use std::sync::{Mutex, PoisonError};

use attention_client::LayerTiming;
use pyo3::prelude::*;

/// Times and counts of one call. A call fills in the report that it is given.
#[pyclass(module = "switchyard_moe._native", frozen)]
#[derive(Debug, Default)]
pub struct Report {
    timing: Mutex<LayerTiming>,
}

impl Report {
    pub fn of(timing: LayerTiming) -> Self {
        Self { timing: Mutex::new(timing) }
    }

    pub fn set(&self, timing: LayerTiming) {
        *self.timing.lock().unwrap_or_else(PoisonError::into_inner) = timing;
    }

    fn timing(&self) -> LayerTiming {
        *self.timing.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Servers contacted.
    #[getter]
    fn servers(&self) -> u32 {
        self.timing().num_servers
    }

    /// Connections that failed with tokens unanswered.
    #[getter]
    fn failovers(&self) -> u32 {
        self.timing().failovers
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
        let timing = self.timing();
        format!(
            "Report(total_us={:.1}, dispatch_us={:.1}, wait_us={:.1}, combine_us={:.1}, servers={}, resends={}, \
             failovers={}, stall_us={:.1})",
            us(timing.total_ns()),
            us(timing.dispatch_ns),
            us(timing.wait_ns),
            us(timing.combine_ns),
            timing.num_servers,
            timing.resent_pairs,
            timing.failovers,
            us(timing.stall_ns)
        )
    }
}

fn us(ns: u64) -> f64 {
    ns as f64 / 1e3
}
