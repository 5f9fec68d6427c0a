//! Stamps of clients and servers on GPUs: both sides name each frame alike.

use std::collections::BTreeMap;

use expert_server::ExpertServer;
use protocol::WireDtype;
use rand::RngExt;
use switchyard_attention_client::TraceContext;
use telemetry::ids::{SEQUENCES_PER_CALL, server_key};
use telemetry::{CallStamp, FrameKey, Recorder, Sampler, SentStamp, ServedStamp, Stamp};

use crate::client_common::{Request, seeded};
use crate::rig::{Fleet, Layout, Tensors, check, devices, server_config};

const NUM_SERVERS: usize = 3;

fn recorder(ratio: f64) -> Recorder {
    Recorder::new(Sampler::new(ratio).expect("a ratio"), 4096)
}

/// Servers with recorders of their own. Each expert is on one of them.
fn traced_fleet(ratio: f64) -> Option<(Fleet, Vec<Recorder>)> {
    let dtype = WireDtype::Bf16;
    let (device, _) = devices()?;
    let mut fleet = Fleet::start(0, 1, dtype)?;
    fleet.layout = Layout { num_servers: NUM_SERVERS, replicas: 1 };
    let recorders: Vec<Recorder> = (0..NUM_SERVERS).map(|_| recorder(ratio)).collect();
    for (server, recorder) in recorders.iter().enumerate() {
        let held = fleet.layout.held(server, fleet.model.shape.num_experts as usize);
        let mut config = server_config(&format!("server-{server}"), device, dtype, held);
        config.recorder = Some(recorder.clone());
        let started = fleet.runtime.block_on(ExpertServer::start(config, |_| {}));
        let started = started.expect("server");
        fleet.addrs.push(started.data_addr().to_string());
        fleet.servers.push(Some(started));
    }
    Some((fleet, recorders))
}

/// The call that the client has recorded since the last look, with its frames.
fn taken(recorder: &Recorder) -> Option<(CallStamp, Vec<SentStamp>)> {
    let Stamp::Call(call) = recorder.take()? else { panic!("the call comes first") };
    let frames = std::iter::from_fn(|| recorder.take()).map(|stamp| match stamp {
        Stamp::Sent(frame) => frame,
        other => panic!("{other:?}"),
    });
    Some((call, frames.collect()))
}

fn served(recorders: &[Recorder]) -> BTreeMap<(u64, u64), (usize, ServedStamp)> {
    let mut found = BTreeMap::new();
    for (server, recorder) in recorders.iter().enumerate() {
        while let Some(stamp) = recorder.take() {
            let Stamp::Served(frame) = stamp else { panic!("{stamp:?}") };
            let key = (frame.key.client_id, frame.key.sequence);
            assert!(found.insert(key, (server, frame)).is_none(), "recorded twice: {frame:?}");
        }
    }
    found
}

/// Makes `num_calls` calls, `is_sampled` of the caller's traces, and returns what each has recorded.
fn run(
    fleet: &Fleet,
    ratio: f64,
    contexts: &[Option<TraceContext>],
) -> Vec<Option<(CallStamp, Vec<SentStamp>)>> {
    let mut rng = seeded("traces of device clients");
    let recorder = recorder(ratio);
    let mut client = fleet.connect(fleet.builder().recorder(recorder.clone()));
    let tensors = Tensors::new(&client);
    let stream = client.gpu().stream().expect("stream");
    let mut local = fleet.local();
    let mut calls = Vec::new();
    for context in contexts {
        let mut request = Request::random(&mut rng, &fleet.model, 4, 4);
        // One expert of each server at least.
        request.idx[..3].copy_from_slice(&[0, 1, 2]);
        let input = tensors.load(&request);
        // SAFETY: the tensors have these sizes and outlive the call.
        let timing = unsafe {
            let handle = client.dispatch(&stream, request.layer, &input).expect("dispatch");
            if let Some(context) = context {
                client.set_trace_context(&handle, *context);
            }
            let pending = client.combine(&stream, handle, tensors.out()).expect("combine");
            client.finish(&stream, pending).expect("finish")
        };
        check(&request, &tensors.read(request.num_tokens), &mut local, fleet.dtype);
        let call = taken(&recorder);
        if let Some((call, frames)) = &call {
            assert_eq!(call.layer, request.layer);
            assert_eq!(call.num_tokens as usize, request.num_tokens);
            assert_eq!(call.context, *context);
            assert_eq!(frames.len(), timing.num_frames as usize);
            assert!(call.began <= call.dispatched && call.combining <= call.ended);
        }
        calls.push(call);
    }
    calls
}

#[test]
fn client_and_servers_name_each_frame_alike() {
    let Some((mut fleet, recorders)) = traced_fleet(1.0) else { return };
    let calls = run(&fleet, 1.0, &[None; 9]);
    (0..NUM_SERVERS).for_each(|server| fleet.stop(server));
    let mut served = served(&recorders);
    for call in calls {
        let (call, frames) = call.expect("all calls are sampled");
        assert_eq!(frames.len(), NUM_SERVERS);
        let first: Vec<&SentStamp> = frames.iter().filter(|f| f.served_as.is_none()).collect();
        assert_eq!(first.len(), 1, "one frame gives the trace: {frames:?}");
        let of_call = (call.client_id, call.sequence);
        assert_eq!((first[0].key.client_id, first[0].key.sequence), of_call);
        for frame in &frames {
            assert_eq!((frame.key.client_id, frame.key.sequence), of_call, "one trace");
            let FrameKey { client_id, sequence, .. } = frame.served_as.unwrap_or(frame.key);
            let (server, found) = served.remove(&(client_id, sequence)).expect("a server's stamp");
            assert_eq!(found.key, frame.served_as.unwrap_or(frame.key));
            assert_eq!(&*frame.server, format!("server-{server}"));
            assert_eq!(found.key.server_key, server_key(&frame.server));
            assert_eq!((found.layer, found.num_tokens), (call.layer, frame.num_tokens));
            assert!(found.is_on_gpu && found.batch_tokens >= found.num_tokens);
            assert!(found.arrived <= found.began && found.began <= found.answered);
        }
    }
    assert!(served.is_empty(), "frames that no call has sent: {served:?}");
}

#[test]
fn a_call_is_recorded_if_a_frame_or_the_callers_trace_is_sampled() {
    let mut rng = seeded("a_call_is_recorded_if_a_frame_or_the_callers_trace_is_sampled");
    let mut context = |is_sampled| {
        let (trace_id, span_id) = (rng.random::<u128>() | 1, rng.random::<u64>() | 1);
        Some(TraceContext { trace_id, span_id, is_sampled })
    };
    let contexts = [None, context(true), context(false), None, context(true)];
    let Some((mut fleet, recorders)) = traced_fleet(0.0) else { return };
    for (call, context) in run(&fleet, 0.0, &contexts).iter().zip(contexts) {
        let is_expected = context.is_some_and(|context| context.is_sampled);
        assert_eq!(call.is_some(), is_expected, "{context:?}: {call:?}");
    }
    (0..NUM_SERVERS).for_each(|server| fleet.stop(server));
    assert!(served(&recorders).is_empty());

    // Servers record exactly the frames that the client's hash selects.
    const RATIO: f64 = 0.3;
    let Some((mut fleet, recorders)) = traced_fleet(RATIO) else { return };
    let calls = run(&fleet, RATIO, &[None; 40]);
    (0..NUM_SERVERS).for_each(|server| fleet.stop(server));
    let served = served(&recorders);
    let sampler = Sampler::new(RATIO).expect("a ratio");
    let is_sampled =
        |key: FrameKey| sampler.samples(key.client_id, key.sequence / SEQUENCES_PER_CALL);
    let mut num_sampled = 0;
    for (_, frames) in calls.iter().flatten() {
        for frame in frames {
            let key = frame.served_as.unwrap_or(frame.key);
            let is_served = served.contains_key(&(key.client_id, key.sequence));
            assert_eq!(is_served, is_sampled(key), "{frame:?}");
            assert!(frame.served_as.is_some() || is_served, "the first frame gives the trace");
            num_sampled += usize::from(is_served);
        }
    }
    assert_eq!(num_sampled, served.len(), "calls with a sampled frame are recorded");
    let num_recorded = calls.iter().flatten().count();
    assert!((1..40).contains(&num_recorded), "{num_recorded} of 40 calls");
}
