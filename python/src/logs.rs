//! Log events of the Rust code, for Python's `logging`.
//!
//! Threads of the client log without the interpreter, and an interpreter that waits for them must not be what they wait
//! for. So events go into a queue, and calls of the package pass them on while they have the interpreter. A record keeps
//! the time of its event. A full queue drops events and counts them.

use std::fmt::{self, Write as _};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use crossbeam_queue::ArrayQueue;
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record as SpanRecord};
use tracing::{Event, Level, Metadata, Subscriber};

/// Collects events from the first call on, at the level that the logger `switchyard_moe` has.
pub fn start(py: Python<'_>) -> PyResult<()> {
    let level: i32 = logger(py)?.call_method0(intern!(py, "getEffectiveLevel"))?.extract()?;
    let queue = QUEUE.get_or_init(|| Queue {
        events: ArrayQueue::new(MAX_EVENTS),
        num_dropped: AtomicU64::new(0),
        level: AtomicI32::new(level),
    });
    // Fails if it is set already, by an earlier call.
    let is_first = tracing::subscriber::set_global_default(Collector).is_ok();
    if queue.level.swap(level, Ordering::Relaxed) != level || is_first {
        tracing::callsite::rebuild_interest_cache();
    }
    Ok(())
}

/// Passes collected events on to Python. A handler that raises is reported as unraisable.
pub fn flush(py: Python<'_>) {
    let Some(queue) = QUEUE.get() else { return };
    while let Some(event) = queue.events.pop() {
        if let Err(failure) = event.hand_over(py) {
            report(py, failure);
        }
    }
    let num_dropped = queue.num_dropped.load(Ordering::Relaxed);
    if num_dropped > 0 {
        queue.num_dropped.fetch_sub(num_dropped, Ordering::Relaxed);
        let event = LogEvent {
            level: WARNING,
            target: module_path!(),
            text: format!(
                "{num_dropped} log events were dropped: the queue of {MAX_EVENTS} was full"
            ),
            at: SystemTime::now(),
        };
        if let Err(failure) = event.hand_over(py) {
            report(py, failure);
        }
    }
}

/// Reports the exception of a handler. An interrupt by the user may arrive while a handler runs. It belongs to the call
/// that passes the events on, so it is raised again at that call's next look for signals.
fn report(py: Python<'_>, failure: PyErr) {
    if failure.is_instance_of::<PyKeyboardInterrupt>(py) {
        // SAFETY: it takes no arguments and only notes a signal.
        unsafe { pyo3::ffi::PyErr_SetInterrupt() };
    } else {
        failure.write_unraisable(py, None);
    }
}

struct Queue {
    events: ArrayQueue<LogEvent>,
    num_dropped: AtomicU64,
    /// In Python's numbers.
    level: AtomicI32,
}

struct LogEvent {
    level: i32,
    target: &'static str,
    text: String,
    at: SystemTime,
}

impl LogEvent {
    fn hand_over(&self, py: Python<'_>) -> PyResult<()> {
        let logger = logger(py)?;
        if !logger.call_method1(intern!(py, "isEnabledFor"), (self.level,))?.is_truthy()? {
            return Ok(());
        }
        let seconds = self.at.duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
        let fields = PyDict::new(py);
        fields.set_item(intern!(py, "name"), LOGGER)?;
        fields.set_item(intern!(py, "msg"), &self.text)?;
        fields.set_item(intern!(py, "levelno"), self.level)?;
        let logging = py.import(intern!(py, "logging"))?;
        let level = logging.call_method1(intern!(py, "getLevelName"), (self.level,))?;
        fields.set_item(intern!(py, "levelname"), level)?;
        fields.set_item(intern!(py, "created"), seconds)?;
        fields.set_item(intern!(py, "msecs"), (seconds.fract() * 1e3).trunc())?;
        fields.set_item(intern!(py, "target"), self.target)?;
        let record = logging.call_method1(intern!(py, "makeLogRecord"), (fields,))?;
        logger.call_method1(intern!(py, "handle"), (record,))?;
        Ok(())
    }
}

fn logger(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    py.import(intern!(py, "logging"))?.call_method1(intern!(py, "getLogger"), (LOGGER,))
}

/// Takes events of this workspace's crates. Spans are not used.
struct Collector;

impl Subscriber for Collector {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with(TARGETS)
            && QUEUE.get().is_some_and(|queue| {
                python_level(*metadata.level()) >= queue.level.load(Ordering::Relaxed)
            })
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        let level = QUEUE.get()?.level.load(Ordering::Relaxed);
        let levels = [Level::TRACE, Level::DEBUG, Level::INFO, Level::WARN, Level::ERROR];
        let lowest = levels.into_iter().find(|&known| python_level(known) >= level);
        Some(lowest.map_or(LevelFilter::OFF, LevelFilter::from_level))
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &SpanRecord<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let Some(queue) = QUEUE.get() else { return };
        let metadata = event.metadata();
        let mut text = Text::default();
        event.record(&mut text);
        let event = LogEvent {
            level: python_level(*metadata.level()),
            target: metadata.target(),
            text: text.message + &text.fields,
            at: SystemTime::now(),
        };
        if queue.events.push(event).is_err() {
            queue.num_dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// The message of an event, and its other fields as ` name=value`.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string cannot fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}

/// The level of `logging`.
fn python_level(level: Level) -> i32 {
    match level {
        Level::ERROR => 40,
        Level::WARN => WARNING,
        Level::INFO => 20,
        Level::DEBUG => 10,
        _ => 5,
    }
}

static QUEUE: OnceLock<Queue> = OnceLock::new();
const LOGGER: &str = "switchyard_moe";
const TARGETS: &str = "switchyard_";
const WARNING: i32 = 30;
const MAX_EVENTS: usize = 1024;
