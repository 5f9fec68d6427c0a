//! Calls recorded into a caller's graph.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use kernels::abi::DevicePtr;
use kernels::gpu::{Graph, Stream};
use protocol::WireDtype;
use rand::RngExt;
use reference_model::LocalExperts;
use rustix::process::Signal;
use switchyard_attention_client::{DeviceClient, DeviceError, DeviceTensor};
use tokio::sync::watch;

use crate::client_common::{Request, seeded};
use crate::faults::{count, metric, until};
use crate::order::Call;
use crate::rig::{Fleet, Replicas, SLOT, Tensors, builder, check, forward};

pub const DTYPE: WireDtype = WireDtype::F8E4m3;
pub const NUM_TOKENS: usize = 30;

/// Three layers of the same input, each with an output of its own.
pub struct Recorded {
    tensors: [Tensors; 3],
    layers: [u32; 3],
    pub graph: Graph,
}

pub fn record(client: &mut DeviceClient, stream: &Stream) -> Recorded {
    let tensors = [Tensors::new(client), Tensors::new(client), Tensors::new(client)];
    let layers =
        [client.model().moe_layers[0], client.model().moe_layers[2], client.model().moe_layers[1]];
    let mut failed = None;
    let graph = stream
        .capture(|stream| {
            for (tensors, layer) in tensors.iter().zip(layers) {
                // SAFETY: the tensors have these sizes and live as long as the graph.
                let recorded = unsafe {
                    client
                        .dispatch(stream, layer, &tensors.input())
                        .and_then(|handle| client.combine(stream, handle, tensors.out()))
                };
                match recorded {
                    Ok(pending) => assert!(pending.is_recorded() && pending.layer() == layer),
                    Err(error) => failed = Some(error),
                }
            }
            Ok(())
        })
        .expect("capture");
    assert!(failed.is_none(), "{failed:?}");
    Recorded { tensors, layers, graph }
}

impl Recorded {
    pub fn load(&self, request: &Request) {
        for tensors in &self.tensors {
            tensors.load(request);
        }
    }

    pub fn check(&self, request: &Request, local: &mut LocalExperts) {
        for (tensors, layer) in self.tensors.iter().zip(self.layers) {
            let request = Request { layer, ..request.clone() };
            check(&request, &tensors.read(NUM_TOKENS), local, DTYPE);
        }
    }
}

#[test]
fn a_graph_is_replayed_with_other_tokens_and_other_servers() {
    let mut rng = seeded("a_graph_is_replayed_with_other_tokens_and_other_servers");
    let Some(mut fleet) = Fleet::start(3, 2, DTYPE) else { return };
    let mut client = fleet.client();
    let mut local = fleet.local();
    let stream = client.gpu().stream().expect("stream");
    let recorded = record(&mut client, &stream);
    for round in 0..6 {
        if round == 3 {
            fleet.stop(2);
        }
        let request = Request::random(&mut rng, &fleet.model, NUM_TOKENS, 4);
        recorded.load(&request);
        let report = client.replay(&stream, &recorded.graph).expect("replay");
        assert!(report.attempts >= 1 && (report.attempts == 1) == (report.stall_ns == 0));
        recorded.check(&request, &mut local);
    }
    // Other calls go on beside.
    let request = Request::random(&mut rng, &fleet.model, NUM_TOKENS, 4);
    let tensors = Tensors::new(&client);
    forward(&mut client, &stream, &tensors, &request, &mut local, DTYPE);
    recorded.load(&request);
    client.replay(&stream, &recorded.graph).expect("replay");
    recorded.check(&request, &mut local);
}

#[test]
fn a_graph_survives_a_server_that_freezes_or_dies() {
    let mut rng = seeded("a_graph_survives_a_server_that_freezes_or_dies");
    for signal in [None, Some(Signal::KILL)] {
        let Some(pair) = Replicas::start(DTYPE) else { return };
        let deadline = Duration::from_millis(if signal.is_some() { 20_000 } else { 500 });
        let mut client = pair.connect(builder(&pair.model).deadline(deadline));
        let mut local = pair.local();
        let stream = client.gpu().stream().expect("stream");
        let recorded = record(&mut client, &stream);
        let request = Request::random(&mut rng, &pair.model, NUM_TOKENS, 4);
        recorded.load(&request);
        client.replay(&stream, &recorded.graph).expect("replay");
        recorded.check(&request, &mut local);
        pair.server(0).freeze();
        let request = Request::random(&mut rng, &pair.model, NUM_TOKENS, 4);
        recorded.load(&request);
        let report = std::thread::scope(|scope| {
            scope.spawn(|| {
                if let Some(signal) = signal {
                    std::thread::sleep(Duration::from_millis(300));
                    pair.server(0).signal(signal);
                }
            });
            client.replay(&stream, &recorded.graph).expect("replay")
        });
        // A death may have been known before the first replay; a silence not.
        assert!(signal.is_some() || report.attempts > 1, "{report:?}");
        recorded.check(&request, &mut local);
    }
}

#[test]
fn recorded_calls_that_are_given_up_leave_room_for_others() {
    let mut rng = seeded("recorded_calls_that_are_given_up_leave_room_for_others");
    let Some(fleet) = Fleet::start(1, 1, DTYPE) else { return };
    let (mut client, mut local) = (fleet.client(), fleet.local());
    let stream = client.gpu().stream().expect("stream");
    let tensors = Tensors::new(&client);
    let input = tensors.input();
    let layer = client.model().moe_layers[0];
    let unknown = vec![0u128; 64];
    for _ in 0..3 {
        let abandoned = stream.capture(|stream| {
            for _ in 0..SLOT.num_frames {
                // SAFETY: nothing of this is run.
                let handle = unsafe { client.dispatch(stream, layer, &input) };
                drop(handle.expect("dispatch"));
            }
            // SAFETY: as above; the output is refused.
            unsafe {
                let handle = client.dispatch(stream, layer, &input).expect("dispatch");
                let unknown = DevicePtr(unknown.as_ptr() as u64);
                let out = DeviceTensor { ptr: unknown, ..tensors.out() };
                client.combine(stream, handle, out).unwrap_err();
            }
            Ok(())
        });
        drop(abandoned.expect("capture"));
    }
    let recorded = record(&mut client, &stream);
    let request = Request::random(&mut rng, &fleet.model, NUM_TOKENS, 4);
    recorded.load(&request);
    client.replay(&stream, &recorded.graph).expect("replay");
    recorded.check(&request, &mut local);
}

#[test]
fn recorded_and_other_calls_are_not_mixed_up() {
    let Some(fleet) = Fleet::start(1, 1, DTYPE) else { return };
    let mut client = fleet.client();
    let mut rng = seeded("recorded_and_other_calls_are_not_mixed_up");
    let stream = client.gpu().stream().expect("stream");
    let tensors = Tensors::new(&client);
    let request = Request::random(&mut rng, &fleet.model, 3, 4);
    let input = tensors.load(&request);
    let mut pending = None;
    stream
        .capture(|stream| {
            // SAFETY: the tensors have these sizes; nothing of this is run.
            unsafe {
                let handle = client.dispatch(stream, request.layer, &input).expect("dispatch");
                pending = client.combine(stream, handle, tensors.out()).ok();
            }
            Ok(())
        })
        .expect("capture");
    let error = client.finish(&stream, pending.expect("recorded")).unwrap_err();
    assert!(matches!(error, DeviceError::Handle { .. }), "{error}");
    // A call that waits for its combine would be overtaken by a graph.
    // SAFETY: as above, and the call is finished.
    unsafe {
        let handle = client.dispatch(&stream, request.layer, &input).expect("dispatch");
        let error = client.begin_replay(&stream).unwrap_err();
        assert!(matches!(error, DeviceError::Outstanding { .. }), "{error}");
        let pending = client.combine(&stream, handle, tensors.out()).expect("combine");
        client.finish(&stream, pending).expect("finish");
    }
    check(&request, &tensors.read(3), &mut fleet.local(), DTYPE);
}

/// Two silent servers fail together, and are used again when they go on. Their late answers are for frames that no
/// call waits for.
#[test]
fn a_graph_survives_two_servers_that_freeze_and_go_on() {
    let mut rng = seeded("a_graph_survives_two_servers_that_freeze_and_go_on");
    let Some(replicas) = Replicas::of(DTYPE, 3, SLOT.num_frames) else { return };
    let mut client =
        replicas.connect(builder(&replicas.model).deadline(Duration::from_millis(500)));
    let mut local = replicas.local();
    let stream = client.gpu().stream().expect("stream");
    let recorded = record(&mut client, &stream);
    let mut replay = |client: &mut DeviceClient| {
        let request = Request::random(&mut rng, &replicas.model, NUM_TOKENS, 4);
        recorded.load(&request);
        let report = client.replay(&stream, &recorded.graph).expect("replay");
        recorded.check(&request, &mut local);
        report
    };
    assert_eq!(replay(&mut client).attempts, 1);
    for round in 0..2 {
        for server in [round, 2] {
            replicas.server(server).freeze();
        }
        let report = replay(&mut client);
        let num_silent = metric(&client, "switchyard_client_failovers_total", Some("silent"));
        assert_eq!((report.attempts, num_silent), (2, 2.0 * (round + 1) as f64), "{report:?}");
        for server in [round, 2] {
            replicas.server(server).signal(Signal::CONT);
        }
        until("the servers are back", || {
            replay(&mut client);
            metric(&client, "switchyard_client_links", Some("up")) == 3.0
        });
        for _ in 0..3 {
            replay(&mut client);
        }
    }
}

/// There is no place for the successor of the only server but its own.
#[test]
fn a_graph_waits_for_the_successor_of_the_only_server() {
    let mut rng = seeded("a_graph_waits_for_the_successor_of_the_only_server");
    let Some(mut replicas) = Replicas::of(DTYPE, 1, SLOT.num_frames) else { return };
    replicas.max_servers = 1;
    let (tables, watched) = watch::channel(Arc::new(replicas.table()));
    let settings = builder(&replicas.model).deadline(Duration::from_millis(500));
    let mut client = replicas.connect_by(settings.placement_watch(watched));
    let mut local = replicas.local();
    let stream = client.gpu().stream().expect("stream");
    let recorded = record(&mut client, &stream);
    let registry = client.registry().clone();
    for round in 0..3 {
        let request = Request::random(&mut rng, &replicas.model, NUM_TOKENS, 4);
        recorded.load(&request);
        let report = std::thread::scope(|scope| {
            if round > 0 {
                // It does not answer the first replay, so that one fails.
                replicas.server(0).freeze();
                scope.spawn(|| {
                    until("the failure is noted", || {
                        count(&registry, "switchyard_client_failovers_total", None) >= round.into()
                    });
                    replicas.kill(0);
                    tables.send(Arc::new(replicas.restart(0))).expect("watched");
                });
            }
            client.replay(&stream, &recorded.graph).expect("replay")
        });
        assert_eq!(report.attempts > 1, round > 0, "{report:?}");
        recorded.check(&request, &mut local);
    }
}

/// Replays and other calls by turns, some of these unfinished, while servers die, freeze, go on and are replaced.
#[test]
fn random_replays_among_other_calls_give_the_right_rows() {
    let mut rng = seeded("random_replays_among_other_calls_give_the_right_rows");
    let Some(mut replicas) = Replicas::of(DTYPE, 3, SLOT.num_frames) else { return };
    replicas.max_servers = 3;
    let (tables, watched) = watch::channel(Arc::new(replicas.table()));
    let settings = builder(&replicas.model).deadline(Duration::from_millis(300));
    let mut client = replicas.connect_by(settings.placement_watch(watched));
    let mut local = replicas.local();
    let stream = client.gpu().stream().expect("stream");
    let recorded = record(&mut client, &stream);
    let mut combined = VecDeque::new();
    let mut frozen = None;
    let mut num_repeated = 0;
    for _ in 0..80 {
        let request = Request::random(&mut rng, &replicas.model, NUM_TOKENS, 4);
        match rng.random_range(0..8) {
            0..=3 => {
                recorded.load(&request);
                let report = client.replay(&stream, &recorded.graph).expect("replay");
                recorded.check(&request, &mut local);
                num_repeated += report.attempts - 1;
            }
            4 if combined.len() < SLOT.num_frames => {
                let call = Call::new(&mut rng, &client);
                let handle = call.dispatch(&mut client, &stream);
                let pending = call.combine(&mut client, &stream, handle);
                combined.push_back((call, pending));
            }
            4..=5 => {
                let Some((call, pending)) = combined.pop_front() else { continue };
                call.finish(&mut client, &stream, pending, &mut local);
            }
            6 => {
                let server = rng.random_range(0..3);
                if !replicas.lives(server) {
                    tables.send(Arc::new(replicas.restart(server))).expect("watched");
                } else if frozen != Some(server)
                    && (0..3).any(|s| s != server && frozen != Some(s) && replicas.lives(s))
                {
                    replicas.kill(server);
                }
            }
            _ => {
                if let Some(server) = frozen.take() {
                    replicas.server(server).signal(Signal::CONT);
                    continue;
                }
                let server = rng.random_range(0..3);
                if (0..3).filter(|s| replicas.lives(*s)).count() > 1 && replicas.lives(server) {
                    replicas.server(server).signal(Signal::STOP);
                    frozen = Some(server);
                }
            }
        }
    }
    for (call, pending) in combined {
        call.finish(&mut client, &stream, pending, &mut local);
    }
    println!("{num_repeated} replays again");
}
