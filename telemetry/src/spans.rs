//! Stamps as spans of OpenTelemetry.

use std::borrow::Cow;
use std::time::{Duration, Instant, SystemTime};

use opentelemetry::trace::{
    Link, SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState,
};
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};

use crate::TraceContext;
use crate::exemplars::Exemplars;
use crate::ids::{self, Sampler, call_of};
use crate::stamp::{CallStamp, FrameKey, SentStamp, ServedStamp, Stamp};

/// Turns stamps into spans. Converts the monotonic times of the hot path into times of day.
pub(crate) struct SpanMaker {
    sampler: Sampler,
    scope: InstrumentationScope,
    monotonic: Instant,
    time_of_day: SystemTime,
}

/// Position of a span: its trace, itself, its parent (0 for none).
#[derive(Clone, Copy)]
struct Place {
    trace_id: u128,
    span_id: u64,
    parent_id: u64,
    is_parent_remote: bool,
}

impl SpanMaker {
    /// A maker that takes the two clocks for equal at this moment.
    pub(crate) fn new(sampler: Sampler) -> Self {
        let scope = InstrumentationScope::builder("switchyard").with_version(VERSION).build();
        Self { sampler, scope, monotonic: Instant::now(), time_of_day: SystemTime::now() }
    }

    /// Appends the spans of a stamp.
    pub(crate) fn add(&self, stamp: &Stamp, spans: &mut Vec<SpanData>) {
        match stamp {
            Stamp::Call(call) => self.add_call(call, spans),
            Stamp::Sent(frame) => self.add_sent(frame, spans),
            Stamp::Served(frame) => self.add_served(frame, spans),
        }
    }

    /// Notes the durations of a stamp, by the phases of the metrics.
    pub(crate) fn note_exemplars(&self, stamp: &Stamp, exemplars: &Exemplars) {
        let trace_of = |client_id: u64, sequence: u64, context: Option<TraceContext>| {
            let call = call_of(sequence);
            let shared = ids::trace(client_id, call);
            match context {
                Some(context) if !self.sampler.samples(client_id, call) => context.trace_id,
                _ => shared,
            }
        };
        match stamp {
            Stamp::Call(call) => {
                let trace_id = trace_of(call.client_id, call.sequence, call.context);
                exemplars.note("dispatch", call.dispatched - call.began, trace_id);
                exemplars.note("wait", Duration::from_nanos(call.wait_ns), trace_id);
                exemplars.note("combine", Duration::from_nanos(call.combine_ns), trace_id);
            }
            Stamp::Sent(frame) => {
                let trace_id = trace_of(frame.key.client_id, frame.key.sequence, frame.context);
                let times =
                    [("server_queue", frame.queue_ns), ("server_compute", frame.compute_ns)];
                for (phase, ns) in times {
                    if let Some(ns) = ns {
                        exemplars.note(phase, Duration::from_nanos(ns.into()), trace_id);
                    }
                }
            }
            Stamp::Served(frame) => {
                let trace_id = trace_of(frame.key.client_id, frame.key.sequence, None);
                exemplars.note("queue", frame.began - frame.arrived, trace_id);
                exemplars.note("compute", frame.computed - frame.gathered, trace_id);
                if !frame.is_on_gpu {
                    exemplars.note("gather", frame.gathered - frame.began, trace_id);
                    exemplars.note("encode", frame.answered - frame.computed, trace_id);
                }
            }
        }
    }

    /// The layer in the trace that it shares with the servers, in the trace of the caller, or in both with links.
    fn add_call(&self, call: &CallStamp, spans: &mut Vec<SpanData>) {
        let shared = shared_place(call.client_id, call.sequence);
        let in_shared = self.sampler.samples(call.client_id, call_of(call.sequence));
        if in_shared {
            let link = call.context.map(|context| (context.trace_id, context.span_id));
            self.add_layer(shared, link, call, spans);
        }
        if let Some(context) = call.context.filter(|context| context.is_sampled) {
            let place = Place {
                trace_id: context.trace_id,
                span_id: own_span(context, shared.span_id),
                parent_id: context.span_id,
                is_parent_remote: false,
            };
            let link = in_shared.then_some((shared.trace_id, shared.span_id));
            self.add_layer(place, link, call, spans);
        }
    }

    fn add_layer(
        &self,
        place: Place,
        link: Option<(u128, u64)>,
        call: &CallStamp,
        spans: &mut Vec<SpanData>,
    ) {
        let mut layer = self.span("layer", place, SpanKind::Internal, call.began, call.ended);
        layer.attributes = vec![
            KeyValue::new("switchyard.layer", i64::from(call.layer)),
            KeyValue::new("switchyard.tokens", i64::from(call.num_tokens)),
            KeyValue::new("switchyard.frames", i64::from(call.num_frames)),
            KeyValue::new("switchyard.failovers", i64::from(call.failovers)),
            KeyValue::new("switchyard.hedges", i64::from(call.hedges)),
        ];
        if !call.is_ok {
            layer.status = Status::error("the call failed");
        }
        if let Some((trace_id, span_id)) = link {
            layer.links.links.push(Link::with_context(context_of(trace_id, span_id, true)));
        }
        spans.push(layer);
        let phases =
            [("dispatch", call.began, call.dispatched), ("combine", call.combining, call.ended)];
        self.add_phases(place, &phases, spans);
    }

    fn add_sent(&self, frame: &SentStamp, spans: &mut Vec<SpanData>) {
        let FrameKey { client_id, sequence, .. } = frame.key;
        let layer = shared_place(client_id, sequence);
        let span_id = span_of(frame.key);
        if self.sampler.samples(client_id, call_of(sequence)) {
            let place = Place { span_id, parent_id: layer.span_id, ..layer };
            spans.push(self.sent_span(frame, place));
        }
        if let Some(context) = frame.context.filter(|context| context.is_sampled) {
            let place = Place {
                trace_id: context.trace_id,
                span_id: own_span(context, span_id),
                parent_id: own_span(context, layer.span_id),
                is_parent_remote: false,
            };
            spans.push(self.sent_span(frame, place));
        }
    }

    fn sent_span(&self, frame: &SentStamp, place: Place) -> SpanData {
        let mut span = self.span("frame", place, SpanKind::Client, frame.published, frame.answered);
        span.attributes = vec![
            KeyValue::new("switchyard.server", frame.server.to_string()),
            KeyValue::new("switchyard.tokens", i64::from(frame.num_tokens)),
        ];
        let times = [
            ("switchyard.server_queue_ns", frame.queue_ns),
            ("switchyard.server_compute_ns", frame.compute_ns),
        ];
        let known = times.into_iter().filter_map(|(name, ns)| Some((name, ns?)));
        span.attributes.extend(known.map(|(name, ns)| KeyValue::new(name, i64::from(ns))));
        if let Some(key) = frame.served_as
            && self.sampler.samples(key.client_id, call_of(key.sequence))
        {
            let trace_id = ids::trace(key.client_id, call_of(key.sequence));
            let served = context_of(trace_id, ids::child_span(span_of(key), SERVED), true);
            span.links.links.push(Link::with_context(served));
        }
        span
    }

    fn add_served(&self, frame: &ServedStamp, spans: &mut Vec<SpanData>) {
        let call = call_of(frame.key.sequence);
        let parent_id = span_of(frame.key);
        let place = Place {
            trace_id: ids::trace(frame.key.client_id, call),
            span_id: ids::child_span(parent_id, SERVED),
            parent_id,
            is_parent_remote: true,
        };
        let mut span = self.span("serve", place, SpanKind::Server, frame.arrived, frame.answered);
        span.attributes = vec![
            KeyValue::new("switchyard.layer", i64::from(frame.layer)),
            KeyValue::new("switchyard.tokens", i64::from(frame.num_tokens)),
            KeyValue::new("switchyard.batch_tokens", i64::from(frame.batch_tokens)),
        ];
        spans.push(span);
        let phases = [
            ("queue", frame.arrived, frame.began),
            ("gather", frame.began, frame.gathered),
            ("compute", frame.gathered, frame.computed),
            ("combine", frame.computed, frame.answered),
        ];
        if frame.is_on_gpu {
            let [queue, _, compute, _] = phases;
            self.add_phases(place, &[queue, compute], spans);
        } else {
            self.add_phases(place, &phases, spans);
        }
    }

    fn add_phases(
        &self,
        parent: Place,
        phases: &[(&'static str, Instant, Instant)],
        spans: &mut Vec<SpanData>,
    ) {
        for (part, &(name, from, to)) in (1..).zip(phases) {
            let place = Place {
                span_id: ids::child_span(parent.span_id, part),
                parent_id: parent.span_id,
                is_parent_remote: false,
                ..parent
            };
            spans.push(self.span(name, place, SpanKind::Internal, from, to));
        }
    }

    fn span(
        &self,
        name: &'static str,
        place: Place,
        span_kind: SpanKind,
        from: Instant,
        to: Instant,
    ) -> SpanData {
        SpanData {
            span_context: context_of(place.trace_id, place.span_id, false),
            parent_span_id: SpanId::from(place.parent_id),
            parent_span_is_remote: place.is_parent_remote,
            span_kind,
            name: Cow::Borrowed(name),
            start_time: self.time_of_day(from),
            end_time: self.time_of_day(to),
            attributes: Vec::new(),
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: Status::Unset,
            instrumentation_scope: self.scope.clone(),
        }
    }

    fn time_of_day(&self, at: Instant) -> SystemTime {
        match at.checked_duration_since(self.monotonic) {
            Some(later) => self.time_of_day.checked_add(later),
            None => self.time_of_day.checked_sub(self.monotonic.duration_since(at)),
        }
        .unwrap_or(SystemTime::UNIX_EPOCH)
    }

    /// How long the maker has taken the clocks for equal.
    pub(crate) fn age(&self) -> Duration {
        self.monotonic.elapsed()
    }
}

/// The layer's span in the trace that client and servers share.
fn shared_place(client_id: u64, sequence: u64) -> Place {
    let call = call_of(sequence);
    Place {
        trace_id: ids::trace(client_id, call),
        span_id: ids::layer_span(client_id, call),
        parent_id: 0,
        is_parent_remote: false,
    }
}

fn span_of(key: FrameKey) -> u64 {
    let FrameKey { server_key, client_id, generation, sequence, frame_idx } = key;
    ids::frame_span(server_key, client_id, generation, sequence, frame_idx)
}

/// The span that stands for `span_id` in the caller's trace. Span ids must not occur in two traces.
fn own_span(context: TraceContext, span_id: u64) -> u64 {
    ids::child_span(span_id, context.span_id)
}

fn context_of(trace_id: u128, span_id: u64, is_remote: bool) -> SpanContext {
    let (trace_id, span_id) = (TraceId::from(trace_id), SpanId::from(span_id));
    SpanContext::new(trace_id, span_id, TraceFlags::SAMPLED, is_remote, TraceState::default())
}

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The server's span among the children of a frame's span.
const SERVED: u64 = 1;
