//! Traces of sampled layers across clients and servers.
//!
//! A frame carries no trace context. Both sides derive trace and span ids from the numbers that every frame has, and
//! decide by the same hash whether a call is sampled: see [`ids`]. The hot path writes fixed-size [`Stamp`]s into a
//! ring that is allocated once. A thread of its own turns them into spans and exports them (feature `otlp`).
//!
//! This crate knows neither frames nor transports, and it blocks no caller: a full ring drops stamps and counts them.
//!
//! ```
//! use switchyard_telemetry::{Recorder, Sampler};
//!
//! let recorder = Recorder::new(Sampler::new(0.25)?, 1024);
//! // The client with id 7 makes the call that the sequence number 5 << 10 belongs to.
//! let is_traced = recorder.samples(7, 5 << 10);
//! # let _ = is_traced;
//! # Ok::<(), switchyard_telemetry::SampleRatioError>(())
//! ```
#![forbid(unsafe_code)]

mod context;
mod exemplars;
pub mod ids;
pub mod openmetrics;
#[cfg(feature = "otlp")]
mod otlp;
mod recorder;
#[cfg(feature = "otlp")]
mod spans;
mod stamp;

pub use context::{TraceContext, TraceContextError};
pub use exemplars::{Exemplar, Exemplars};
pub use ids::{SampleRatioError, Sampler};
#[cfg(feature = "otlp")]
pub use otlp::{TraceConfig, TraceError, start_export};
pub use recorder::{Recorder, ServerRecorder};
pub use stamp::{CallStamp, FrameKey, SentStamp, ServedStamp, Stamp};
