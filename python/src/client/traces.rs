//! Traces of sampled calls, and the caller's trace that a call belongs to.

use std::time::Duration;

use attention_client::{Recorder, TraceContext};
use pyo3::intern;
use pyo3::prelude::*;
use telemetry::{TraceConfig, start_export};

use crate::errors::{Kind, error};

/// The recorder of a client, if it has a collector.
#[derive(Debug, Default)]
pub struct Traces {
    recorder: Option<Recorder>,
    /// `get_current_span` of the package `opentelemetry`, if that can be imported and there is a recorder.
    current_span: Option<Py<PyAny>>,
}

impl Traces {
    /// Starts to export spans to the collector at `endpoint`. Without one, nothing is recorded.
    ///
    /// # Errors
    /// ConfigError for an URL or a ratio that cannot be used.
    pub fn start(
        py: Python<'_>,
        endpoint: Option<String>,
        sample_ratio: f64,
        instance: &str,
    ) -> PyResult<Self> {
        let Some(endpoint) = endpoint else { return Ok(Self::default()) };
        let config = TraceConfig {
            endpoint,
            sample_ratio,
            service: SERVICE.to_owned(),
            instance: instance.to_owned(),
        };
        let recorder = start_export(&config)
            .map_err(|failure| error(py, Kind::Config, format!("traces: {failure}")))?;
        let current_span = py
            .import("opentelemetry.trace")
            .and_then(|module| module.getattr("get_current_span"))
            .map(Bound::unbind);
        Ok(Self { recorder: Some(recorder), current_span: current_span.ok() })
    }

    pub fn recorder(&self) -> Option<&Recorder> {
        self.recorder.as_ref()
    }

    /// Waits until the collector has the spans of all calls that have ended.
    pub fn flush(&self) {
        if let Some(recorder) = &self.recorder
            && !recorder.flush(FLUSH_TIMEOUT)
        {
            tracing::warn!("the collector has not taken the last spans in time");
        }
    }

    /// The trace that a call belongs to: `traceparent`, else that of the current span of `opentelemetry`.
    ///
    /// # Errors
    /// ArgumentError for a malformed `traceparent`.
    pub fn context(
        &self,
        py: Python<'_>,
        traceparent: Option<&str>,
    ) -> PyResult<Option<TraceContext>> {
        match (traceparent, &self.current_span) {
            (Some(text), _) => {
                let parsed = text.parse::<TraceContext>();
                parsed.map(Some).map_err(|failure| error(py, Kind::Argument, failure.to_string()))
            }
            // A failure of the package must not fail the call.
            (None, Some(current_span)) => Ok(of_span(py, current_span).ok().flatten()),
            (None, None) => Ok(None),
        }
    }
}

/// The context of the span that `current_span` returns. `None` without a valid one.
fn of_span(py: Python<'_>, current_span: &Py<PyAny>) -> PyResult<Option<TraceContext>> {
    let span = current_span.call0(py)?.into_bound(py);
    let context = span.call_method0(intern!(py, "get_span_context"))?;
    if !context.getattr(intern!(py, "is_valid"))?.is_truthy()? {
        return Ok(None);
    }
    let flags: u8 = context.getattr(intern!(py, "trace_flags"))?.extract()?;
    Ok(Some(TraceContext {
        trace_id: context.getattr(intern!(py, "trace_id"))?.extract()?,
        span_id: context.getattr(intern!(py, "span_id"))?.extract()?,
        is_sampled: flags & 1 == 1,
    }))
}

/// Longest wait for the last spans.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(3);
/// `service.name` of the spans.
const SERVICE: &str = "switchyard-client";
