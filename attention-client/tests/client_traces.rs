//! A sampled layer is one trace across the client and its servers, as a collector of OpenTelemetry receives it.

mod client_common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use client_common::{Fleet, Request, difference, local_reference, poisoned, seeded, tiny_dir};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use p2p_core::SlotConfig;
use prost::Message;
use rand::RngExt;
use std::time::Duration;
use switchyard_attention_client::TraceContext;
use telemetry::{Recorder, Sampler, TraceConfig, start_export};

/// A collector in this process.
struct Collector {
    endpoint: String,
    received: Arc<Received>,
    _runtime: tokio::runtime::Runtime,
}

/// Spans, each with the `service.instance.id` of its process.
type Received = Mutex<Vec<(String, Span)>>;

impl Collector {
    fn start() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("runtime");
        let received = Arc::new(Received::default());
        let router =
            Router::new().route("/v1/traces", post(receive)).with_state(Arc::clone(&received));
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0"));
        let listener = listener.expect("a port");
        let endpoint = format!("http://{}", listener.local_addr().expect("address"));
        runtime.spawn(async move { axum::serve(listener, router).await });
        Self { endpoint, received, _runtime: runtime }
    }

    fn recorder(&self, instance: &str, sample_ratio: f64) -> Recorder {
        let config = TraceConfig {
            endpoint: self.endpoint.clone(),
            sample_ratio,
            service: "switchyard-test".to_owned(),
            instance: instance.to_owned(),
        };
        start_export(&config).expect("a collector")
    }

    /// Spans by trace, after the client is dropped and the servers have ended.
    fn traces(
        &self,
        mut fleet: Fleet,
        recorders: &[Recorder],
    ) -> BTreeMap<Vec<u8>, Vec<(String, Span)>> {
        // A server records a batch after it has answered it.
        (0..fleet.servers.len()).for_each(|server| fleet.stop(server));
        for recorder in recorders {
            assert!(recorder.flush(Duration::from_secs(60)), "the spans are not exported");
            assert_eq!(recorder.num_dropped(), 0);
        }
        let mut traces = BTreeMap::<_, Vec<_>>::new();
        for (instance, span) in self.received.lock().expect("spans").drain(..) {
            traces.entry(span.trace_id.clone()).or_default().push((instance, span));
        }
        traces
    }
}

async fn receive(State(received): State<Arc<Received>>, body: Bytes) -> StatusCode {
    let request = ExportTraceServiceRequest::decode(body).expect("a request of OTLP");
    let mut received = received.lock().expect("spans");
    for resource_spans in request.resource_spans {
        let attributes = resource_spans.resource.expect("a resource").attributes;
        let instance = text(&attributes, "service.instance.id");
        assert_eq!(text(&attributes, "service.name"), "switchyard-test");
        for span in resource_spans.scope_spans.into_iter().flat_map(|scope| scope.spans) {
            received.push((instance.clone(), span));
        }
    }
    StatusCode::OK
}

fn value<'a>(attributes: &'a [KeyValue], key: &str) -> &'a Value {
    let found = attributes.iter().find(|pair| pair.key == key);
    let found = found.unwrap_or_else(|| panic!("no attribute {key}: {attributes:?}"));
    found.value.as_ref().and_then(|value| value.value.as_ref()).expect("a value")
}

fn text(attributes: &[KeyValue], key: &str) -> String {
    let Value::StringValue(text) = value(attributes, key) else { panic!("{key} is no text") };
    text.clone()
}

fn number(span: &Span, key: &str) -> u64 {
    let Value::IntValue(number) = value(&span.attributes, key) else {
        panic!("{key} is no number")
    };
    u64::try_from(*number).expect("not negative")
}

fn nanos(span: &Span) -> u64 {
    span.end_time_unix_nano - span.start_time_unix_nano
}

/// Spans of a name with a parent.
fn children<'a>(spans: &'a [(String, Span)], parent: &Span, name: &str) -> Vec<&'a (String, Span)> {
    let of_parent =
        |(_, span): &&(String, Span)| span.parent_span_id == parent.span_id && span.name == name;
    spans.iter().filter(of_parent).collect()
}

/// Servers of `num_servers` names, each with a recorder of its own.
fn traced_fleet(
    collector: &Collector,
    num_servers: usize,
    sample_ratio: f64,
) -> (Fleet, Vec<Recorder>) {
    let recorders: Vec<Recorder> = (0..num_servers)
        .map(|server| collector.recorder(&format!("server-{server}"), sample_ratio))
        .collect();
    // Many frames for each call.
    let slot = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
    let fleet = Fleet::with(&tiny_dir(), num_servers, 1, slot, |config| {
        let recorder =
            recorders.iter().zip(0..).find(|(_, idx)| config.name == format!("server-{idx}"));
        config.recorder = recorder.map(|(recorder, _)| recorder.clone());
    });
    (fleet, recorders)
}

#[test]
fn a_sampled_layer_is_one_trace_across_client_and_servers() {
    const CALLS: usize = 12;
    let mut rng = seeded("a_sampled_layer_is_one_trace_across_client_and_servers");
    let collector = Collector::start();
    let (fleet, mut recorders) = traced_fleet(&collector, 3, 1.0);
    let recorder = collector.recorder("client", 1.0);
    recorders.push(recorder.clone());
    let client = fleet.builder().hedge_budget(0.0).recorder(recorder.clone());
    let client = client.build().unwrap();
    client.wait_ready(Duration::from_secs(20)).unwrap();
    let mut local = fleet.local();
    for _ in 0..CALLS {
        let num_tokens = rng.random_range(1..200);
        let request = Request::random(&mut rng, &fleet.model, num_tokens, 4);
        let mut out = poisoned(request.x.len());
        let Request { layer, x, idx, weights, .. } = &request;
        client.forward(*layer, x, idx, weights, &mut out).unwrap();
        assert!(difference(&out, &local_reference(&request, &mut local)) < 1e-5);
    }
    assert!(recorder.flush(Duration::from_secs(60)));
    let metrics = client.openmetrics();
    drop(client);

    let traces = collector.traces(fleet, &recorders);
    let exemplars = metrics.split("# {trace_id=\"").skip(1).map(|rest| &rest[..32]);
    let exemplars: BTreeSet<&str> = exemplars.collect();
    assert!(!exemplars.is_empty(), "{metrics}");
    let hex = |id: &Vec<u8>| id.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let ids: BTreeSet<String> = traces.keys().map(hex).collect();
    for exemplar in exemplars {
        assert!(ids.contains(exemplar), "{exemplar} is no trace: {ids:?}");
    }
    // A call with all entries masked has no frames, and no trace.
    assert!(traces.len() <= CALLS && traces.len() > CALLS / 2, "{} traces", traces.len());
    for spans in traces.values() {
        check_trace(spans);
    }
    let with_two_servers = traces.values().filter(|spans| {
        let servers = spans.iter().filter(|(_, span)| span.name == "serve");
        servers.map(|(instance, _)| instance).collect::<BTreeSet<_>>().len() > 1
    });
    assert!(with_two_servers.count() > 0);
}

/// Checks parents, processes and times of the spans of one layer.
fn check_trace(spans: &[(String, Span)]) {
    let ids: BTreeSet<&Vec<u8>> = spans.iter().map(|(_, span)| &span.span_id).collect();
    assert_eq!(ids.len(), spans.len(), "span ids occur once: {spans:#?}");
    let roots: Vec<_> = spans.iter().filter(|(_, span)| span.parent_span_id.is_empty()).collect();
    let [(instance, layer)] = roots[..] else { panic!("expected one root: {roots:?}") };
    assert_eq!((instance.as_str(), layer.name.as_str()), ("client", "layer"));
    for phase in ["dispatch", "combine"] {
        assert_eq!(children(spans, layer, phase).len(), 1, "{phase}");
    }
    let frames = children(spans, layer, "frame");
    assert_eq!(frames.len() as u64, number(layer, "switchyard.frames"));
    for (_, frame) in &frames {
        within(frame, layer);
        let served = children(spans, frame, "serve");
        let [(instance, serve)] = served[..] else { panic!("one server's span: {served:?}") };
        assert_eq!(*instance, text(&frame.attributes, "switchyard.server"));
        assert_eq!(number(serve, "switchyard.layer"), number(layer, "switchyard.layer"));
        assert_eq!(number(serve, "switchyard.tokens"), number(frame, "switchyard.tokens"));
        // The answer carries the same times that the server records.
        let phases = ["queue", "gather", "compute", "combine"].map(|phase| {
            let found = children(spans, serve, phase);
            let [(instance, span)] = found[..] else { panic!("one {phase}: {found:?}") };
            assert_eq!(instance, &served[0].0);
            span
        });
        assert_eq!(nanos(phases[0]), number(frame, "switchyard.server_queue_ns"));
        assert_eq!(nanos(phases[2]), number(frame, "switchyard.server_compute_ns"));
        for pair in phases.windows(2) {
            assert_eq!(pair[0].end_time_unix_nano, pair[1].start_time_unix_nano);
        }
        assert_eq!(phases[0].start_time_unix_nano, serve.start_time_unix_nano);
        assert_eq!(phases[3].end_time_unix_nano, serve.end_time_unix_nano);
        // A server's last answers may be written after the client has read the first ones of a batch.
        assert!(serve.start_time_unix_nano + CLOCK_ERROR >= frame.start_time_unix_nano);
        assert!(phases[2].end_time_unix_nano <= frame.end_time_unix_nano + CLOCK_ERROR);
    }
    let num_spans = 3 + frames.len() * 6;
    assert_eq!(spans.len(), num_spans, "every span was looked at: {spans:#?}");
}

fn within(inner: &Span, outer: &Span) {
    let (from, to) = (outer.start_time_unix_nano, outer.end_time_unix_nano);
    assert!(inner.start_time_unix_nano + CLOCK_ERROR >= from, "{inner:?} {outer:?}");
    assert!(inner.end_time_unix_nano <= to + CLOCK_ERROR, "{inner:?} {outer:?}");
}

#[test]
fn both_sides_sample_the_same_calls() {
    let mut rng = seeded("both_sides_sample_the_same_calls");
    let collector = Collector::start();
    let (fleet, mut recorders) = traced_fleet(&collector, 2, 0.25);
    let recorder = collector.recorder("client", 0.25);
    recorders.push(recorder.clone());
    let client = fleet.builder().hedge_budget(0.0).recorder(recorder.clone());
    let client = client.build().unwrap();
    client.wait_ready(Duration::from_secs(20)).unwrap();
    for _ in 0..400 {
        let mut request = Request::random(&mut rng, &fleet.model, 2, 2);
        request.idx = vec![0, 1, 2, 3];
        let mut out = poisoned(request.x.len());
        client
            .forward(request.layer, &request.x, &request.idx, &request.weights, &mut out)
            .unwrap();
    }
    drop(client);
    let traces = collector.traces(fleet, &recorders);
    // 100 of 400 are expected; 40 and 160 are seven standard deviations away.
    assert!((40..160).contains(&traces.len()), "{} traces", traces.len());
    traces.values().for_each(|spans| check_trace(spans));
}

#[test]
fn a_call_in_a_sampled_trace_of_its_caller_is_recorded_there() {
    let mut rng = seeded("a_call_in_a_sampled_trace_of_its_caller_is_recorded_there");
    let collector = Collector::start();
    for (ratio, is_sampled) in [(0.0, true), (1.0, true), (1.0, false), (0.0, false)] {
        let (fleet, mut recorders) = traced_fleet(&collector, 2, ratio);
        let recorder = collector.recorder("client", ratio);
        recorders.push(recorder.clone());
        let client = fleet.builder().hedge_budget(0.0).recorder(recorder.clone());
        let client = client.build().unwrap();
        client.wait_ready(Duration::from_secs(20)).unwrap();
        let mut request = Request::random(&mut rng, &fleet.model, 3, 2);
        request.idx = vec![0, 1, 2, 3, 4, 5];
        let (trace_id, span_id) = (rng.random::<u128>() | 1, rng.random::<u64>() | 1);
        let flags = u8::from(is_sampled);
        let header = format!("00-{trace_id:032x}-{span_id:016x}-{flags:02x}");
        let context: TraceContext = header.parse().unwrap();
        let mut out = poisoned(request.x.len());
        let Request { layer, x, idx, weights, .. } = &request;
        let mut handle = client.dispatch(*layer, x, idx, weights).unwrap();
        handle.set_trace_context(context);
        client.combine(handle, &mut out).unwrap();
        drop(client);

        let mut traces = collector.traces(fleet, &recorders);
        let caller_id = trace_id.to_be_bytes().to_vec();
        let in_callers = traces.remove(&caller_id).unwrap_or_default();
        assert_eq!(in_callers.is_empty(), !is_sampled, "{header}: {in_callers:?}");
        assert_eq!(traces.len(), usize::from(ratio > 0.0), "{header}: {traces:?}");
        let layer_of = |spans: &[(String, Span)]| {
            let layers: Vec<_> = spans.iter().filter(|(_, span)| span.name == "layer").collect();
            let [(_, layer)] = layers[..] else { panic!("{header}: {layers:?}") };
            layer.clone()
        };
        let shared = traces.pop_first().map(|(_, spans)| {
            check_trace(&spans);
            layer_of(&spans)
        });
        if is_sampled {
            let layer = layer_of(&in_callers);
            assert_eq!(layer.parent_span_id, span_id.to_be_bytes());
            let frames = children(&in_callers, &layer, "frame");
            assert_eq!(frames.len() as u64, number(&layer, "switchyard.frames"));
            assert_eq!(in_callers.len(), 3 + frames.len());
            match &shared {
                Some(shared) => assert_eq!(layer.links[0].span_id, shared.span_id),
                None => assert!(layer.links.is_empty()),
            }
        }
        if let Some(shared) = shared {
            assert_eq!(shared.links.len(), 1);
            assert_eq!(shared.links[0].trace_id, caller_id);
            assert_eq!(shared.links[0].span_id, span_id.to_be_bytes());
        }
    }
}

/// A collector that is not there, or that refuses, costs spans and nothing else.
#[test]
fn without_a_collector_calls_go_on() {
    let mut rng = seeded("without_a_collector_calls_go_on");
    let config = TraceConfig {
        endpoint: "http://127.0.0.1:1".to_owned(),
        sample_ratio: 1.0,
        service: "switchyard-test".to_owned(),
        instance: "client".to_owned(),
    };
    let recorder = start_export(&config).unwrap();
    let fleet = Fleet::start(1, 1, SlotConfig { slot_bytes: 64 << 10, num_frames: 2 });
    let client = fleet.builder().recorder(recorder.clone()).build().unwrap();
    client.wait_ready(Duration::from_secs(20)).unwrap();
    let mut local = fleet.local();
    for _ in 0..20 {
        let request = Request::random(&mut rng, &fleet.model, 5, 4);
        let mut out = poisoned(request.x.len());
        let Request { layer, x, idx, weights, .. } = &request;
        client.forward(*layer, x, idx, weights, &mut out).unwrap();
        assert!(difference(&out, &local_reference(&request, &mut local)) < 1e-5);
    }
    drop((client, recorder));
    for bad in ["", "127.0.0.1:4318", "ftp://host", "http://a b"] {
        let error = start_export(&TraceConfig { endpoint: bad.to_owned(), ..config.clone() });
        let error = error.unwrap_err().to_string();
        assert!(error.contains("expected a URL"), "{error}");
    }
    let error = start_export(&TraceConfig { sample_ratio: 1.5, ..config }).unwrap_err();
    assert!(error.to_string().contains("0 to 1"), "{error}");
    // A recorder of another process's making works, too.
    let _ = Recorder::new(Sampler::new(0.5).unwrap(), 0);
}

/// Difference between two readings of both clocks by two exporters, in nanoseconds.
const CLOCK_ERROR: u64 = 50_000_000;
