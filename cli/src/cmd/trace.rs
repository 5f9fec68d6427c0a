//! Options of traces.

use anyhow::{Context, Result};
use telemetry::{Recorder, TraceConfig, TraceError};

/// Receiver of traces, and the share of calls that are traced.
#[derive(Debug, Clone, clap::Args)]
pub struct TraceArgs {
    /// URL of a collector of OpenTelemetry, such as http://127.0.0.1:4318. Traces of sampled layers go there (OTLP
    /// over HTTP). Default: the variable OTEL_EXPORTER_OTLP_ENDPOINT; without either there are no traces.
    #[arg(long, env = "SWITCHYARD_OTLP_ENDPOINT", value_name = "URL")]
    pub otlp_endpoint: Option<String>,
    /// Share of the layers to trace, 0 to 1. Clients and servers need the same value.
    #[arg(long, env = "SWITCHYARD_TRACE_SAMPLE_RATIO", default_value_t = 0.001, value_parser = parse_ratio)]
    pub trace_sample_ratio: f64,
}

impl TraceArgs {
    /// Starts to export traces of the process `instance`, if there is a collector to send them to. The standard
    /// variable may be meant for other programs, so a wrong value there is a warning and no error.
    pub fn start(&self, service: &str, instance: &str) -> Result<Option<Recorder>> {
        let standard = || std::env::var(STANDARD_VARIABLE).ok();
        let endpoint = self.otlp_endpoint.clone().or_else(standard);
        let Some(endpoint) = endpoint.filter(|endpoint| !endpoint.is_empty()) else {
            return Ok(None);
        };
        let config = TraceConfig {
            endpoint,
            sample_ratio: self.trace_sample_ratio,
            service: service.to_owned(),
            instance: instance.to_owned(),
        };
        match telemetry::start_export(&config) {
            Ok(recorder) => Ok(Some(recorder)),
            Err(error @ TraceError::Endpoint { .. }) if self.otlp_endpoint.is_none() => {
                tracing::warn!(%error, "{STANDARD_VARIABLE} is not used: there are no traces");
                Ok(None)
            }
            Err(error) => Err(error).context("--otlp-endpoint"),
        }
    }

    /// The same as arguments of a child process.
    pub fn to_args(&self) -> Vec<String> {
        let ratio = ["--trace-sample-ratio".to_owned(), self.trace_sample_ratio.to_string()];
        let endpoint = self.otlp_endpoint.iter();
        let endpoint = endpoint.flat_map(|url| ["--otlp-endpoint".to_owned(), url.clone()]);
        ratio.into_iter().chain(endpoint).collect()
    }
}

const STANDARD_VARIABLE: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";

fn parse_ratio(text: &str) -> Result<f64, String> {
    let ratio = text.parse::<f64>().map_err(|error| error.to_string())?;
    match (0.0..=1.0).contains(&ratio) {
        true => Ok(ratio),
        false => Err("expected 0 to 1".to_owned()),
    }
}
