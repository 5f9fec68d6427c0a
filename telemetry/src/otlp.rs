//! The thread that drains the ring and exports spans over OTLP (HTTP with protobuf).

use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use opentelemetry::KeyValue;
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SpanData, SpanExporter as _};

use crate::ids::{SampleRatioError, Sampler};
use crate::recorder::{Exporter, Recorder};
use crate::spans::SpanMaker;

/// Settings of [`start_export`].
#[derive(Debug, Clone)]
pub struct TraceConfig {
    /// URL of the collector, such as `http://127.0.0.1:4318`. Spans go to its path `/v1/traces`.
    pub endpoint: String,
    /// Share of the calls to trace, 0 to 1. Give clients and servers the same.
    pub sample_ratio: f64,
    /// `service.name` of the spans.
    pub service: String,
    /// `service.instance.id` of the spans, such as the name of the server.
    pub instance: String,
}

/// Error of [`start_export`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// See [`TraceConfig::sample_ratio`].
    #[error(transparent)]
    Ratio(#[from] SampleRatioError),
    /// See [`TraceConfig::endpoint`].
    #[error("collector {endpoint:?}: {reason}; expected a URL such as http://127.0.0.1:4318")]
    Endpoint {
        /// The URL, without user name and password.
        endpoint: String,
        /// Why it cannot be used.
        reason: String,
    },
    /// The thread cannot be started.
    #[error("cannot start the thread that exports traces: {0}")]
    Thread(std::io::Error),
}

#[derive(Debug)]
struct ExportThread {
    /// Takes a channel for the answer to a flush. `None` once the thread shall end.
    flushes: Option<mpsc::Sender<mpsc::Sender<()>>>,
    /// In a lock, so that recorders may be shared between threads.
    ended: Mutex<mpsc::Receiver<()>>,
}

/// Starts a thread that exports the stamps of the returned recorder as spans. It connects to the collector when the first
/// ones are there. When the last clone of the recorder goes, it waits up to three seconds for the last spans to be
/// exported.
///
/// # Errors
/// [`TraceError`].
pub fn start_export(config: &TraceConfig) -> Result<Recorder, TraceError> {
    let sampler = Sampler::new(config.sample_ratio)?;
    let exporter = exporter(config)?;
    let recorder = Recorder::new(sampler, RING_STAMPS);
    let (flushes, requests) = mpsc::channel();
    let (end, ended) = mpsc::channel();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(TraceError::Thread)?;
    let export = Export { recorder: recorder.clone(), sampler, exporter, runtime };
    let body = move || {
        export.run(&requests);
        drop(end);
    };
    std::thread::Builder::new()
        .name("switchyard-trace".to_owned())
        .spawn(body)
        .map_err(TraceError::Thread)?;
    Ok(recorder.exported_by(ExportThread { flushes: Some(flushes), ended: Mutex::new(ended) }))
}

impl Exporter for ExportThread {
    fn flush(&self, timeout: Duration) -> bool {
        let (reply, done) = mpsc::channel();
        let is_sent = self.flushes.as_ref().is_some_and(|flushes| flushes.send(reply).is_ok());
        is_sent && done.recv_timeout(timeout).is_ok()
    }
}

impl Drop for ExportThread {
    fn drop(&mut self) {
        self.flushes = None;
        // The thread drops the sender at its end. It sends nothing.
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _ = ended.recv_timeout(FLUSH_TIMEOUT);
    }
}

struct Export {
    recorder: Recorder,
    sampler: Sampler,
    exporter: SpanExporter,
    runtime: tokio::runtime::Runtime,
}

impl Export {
    fn run(self, requests: &mpsc::Receiver<mpsc::Sender<()>>) {
        let mut maker = SpanMaker::new(self.sampler);
        let mut spans: Vec<SpanData> = Vec::new();
        let (mut warned_at, mut num_failed, mut num_dropped) = (None::<Instant>, 0, 0);
        loop {
            let request = requests.recv_timeout(PERIOD);
            let is_last = matches!(request, Err(RecvTimeoutError::Disconnected));
            // The time of day may be set meanwhile.
            if maker.age() > CLOCK_PERIOD {
                maker = SpanMaker::new(self.sampler);
            }
            loop {
                while spans.len() < MAX_BATCH
                    && let Some(stamp) = self.recorder.take()
                {
                    maker.add(&stamp, &mut spans);
                    maker.note_exemplars(&stamp, self.recorder.exemplars());
                }
                if spans.is_empty() {
                    break;
                }
                let num_spans = spans.len();
                let is_full = num_spans >= MAX_BATCH;
                let batch = std::mem::take(&mut spans);
                if let Err(error) = self.runtime.block_on(self.exporter.export(batch)) {
                    num_failed += num_spans;
                    if warned_at.is_none_or(|at| at.elapsed() > WARN_PERIOD) {
                        warned_at = Some(Instant::now());
                        tracing::warn!(%error, num_failed, "cannot export spans: they are lost");
                    }
                }
                // Later stamps wait for the next period.
                if !is_full {
                    break;
                }
            }
            let dropped = self.recorder.num_dropped();
            if dropped > num_dropped {
                tracing::debug!(dropped, "more calls are sampled than spans can be exported");
                num_dropped = dropped;
            }
            if let Ok(reply) = request {
                // An error means that the caller waits no longer.
                let _ = reply.send(());
            }
            if is_last {
                return;
            }
        }
    }
}

fn exporter(config: &TraceConfig) -> Result<SpanExporter, TraceError> {
    // A user name and a password stay out of the message.
    let shown = config.endpoint.rsplit('@').next().unwrap_or_default();
    let bad = |reason: String| TraceError::Endpoint { endpoint: shown.to_owned(), reason };
    if !["http://", "https://"].iter().any(|scheme| config.endpoint.starts_with(scheme)) {
        return Err(bad("it does not begin with http:// or https://".to_owned()));
    }
    // The HTTP client would log them, and not send them.
    if config.endpoint.contains('@') {
        let reason =
            "user name or password inside: pass them by the variable OTEL_EXPORTER_OTLP_HEADERS";
        return Err(bad(reason.to_owned()));
    }
    let url = match config.endpoint.trim_end_matches('/') {
        url if url.ends_with(TRACES_PATH) => url.to_owned(),
        url => format!("{url}{TRACES_PATH}"),
    };
    // The exporter's HTTP client takes the cryptography of the process, with the certificates of the system. An error
    // means that the process has one.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let exporter = SpanExporter::builder()
        .with_http()
        .with_protocol(Protocol::HttpBinary)
        .with_endpoint(url)
        .with_timeout(EXPORT_TIMEOUT)
        .build();
    let mut exporter = exporter.map_err(|error| bad(error.to_string()))?;
    let resource = Resource::builder()
        .with_service_name(config.service.clone())
        .with_attribute(KeyValue::new("service.instance.id", config.instance.clone()))
        .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
        .build();
    exporter.set_resource(&resource);
    Ok(exporter)
}

/// Path of the traces at a collector (OTLP specification, section OTLP/HTTP).
const TRACES_PATH: &str = "/v1/traces";
/// Stamps between two looks of the thread: 8,000 a second and more.
const RING_STAMPS: usize = 8192;
/// Spans of one request to the collector, at least while there are more.
const MAX_BATCH: usize = 4096;
const PERIOD: Duration = Duration::from_secs(1);
const CLOCK_PERIOD: Duration = Duration::from_secs(60);
const WARN_PERIOD: Duration = Duration::from_secs(60);
const EXPORT_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest wait for the last spans when the recorder is dropped.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(3);
