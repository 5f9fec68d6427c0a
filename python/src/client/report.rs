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

    #[getter]
    fn dispatch_us(&self) -> f64 {
        us(self.timing().dispatch_ns)
    }

    #[getter]
    fn wait_us(&self) -> f64 {
        us(self.timing().wait_ns)
    }

    #[getter]
    fn combine_us(&self) -> f64 {
        us(self.timing().combine_ns)
    }

    #[getter]
    fn total_us(&self) -> f64 {
        us(self.timing().total_ns())
    }

    #[getter]
    fn server_queue_us(&self) -> f64 {
        us(self.timing().server_queue_ns)
    }

    #[getter]
    fn server_compute_us(&self) -> f64 {
        us(self.timing().server_compute_ns)
    }

    #[getter]
    fn stall_us(&self) -> f64 {
        us(self.timing().stall_ns)
    }

    #[getter]
    fn frames(&self) -> u32 {
        self.timing().num_frames
    }

    #[getter]
    fn servers(&self) -> u32 {
        self.timing().num_servers
    }

    #[getter]
    fn failovers(&self) -> u32 {
        self.timing().failovers
    }

    #[getter]
    fn resends(&self) -> u64 {
        self.timing().resent_pairs
    }

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
