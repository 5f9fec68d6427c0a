//! Calls that end with an error, or are given up: the next one works, and nothing of the client is used up.

use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use kernels::abi::{DevicePtr, WORD_STATUS_OFFSET, WORD_STRIDE};
use kernels::gpu::Stream;
use protocol::ErrorCode;
use rand::rngs::StdRng;
use rustix::process::Signal;
use switchyard_attention_client::{
    ClientError, DeviceClient, DeviceError, DeviceInput, DeviceTensor,
};
use tokio::sync::watch;

use crate::client_common::{Request, seeded};
use crate::faults::{metric, until};
use crate::graphs::{NUM_TOKENS, record};
use crate::order::{Call, DTYPE};
use crate::rig::{Fleet, Replicas, Tensors, builder, check, forward, soon};
use crate::stuck::{response_slots, within_reach};

/// An address without memory.
const NOWHERE: DevicePtr = DevicePtr(0x1000);

/// A client, and how its calls may end.
struct Exits<'a> {
    rng: &'a mut StdRng,
    client: &'a mut DeviceClient,
    /// Another one of the same servers.
    other: &'a mut DeviceClient,
    streams: [Stream; 2],
    /// Calls given up by either.
    num_abandoned: usize,
}

impl Exits<'_> {
    fn call(&mut self) -> Call {
        Call::new(self.rng, self.client)
    }

    fn refused_dispatches(&mut self) {
        let call = self.call();
        let good = call.tensors.load(&call.request);
        let layer = call.request.layer;
        for (layer, input) in [
            (
                layer,
                DeviceInput {
                    topk_weights: DeviceTensor { ptr: NOWHERE, ..good.topk_weights },
                    ..good
                },
            ),
            (layer, DeviceInput { capacity: self.client.max_tokens() + 1, ..good }),
            (
                layer,
                DeviceInput {
                    hidden_states: DeviceTensor { ptr: DevicePtr::NULL, ..good.hidden_states },
                    ..good
                },
            ),
            (4711, good),
        ] {
            // SAFETY: refused before anything is launched.
            unsafe { self.client.dispatch(&self.streams[0], layer, &input).unwrap_err() };
        }
    }

    /// As many as may be outstanding are, and go on.
    fn one_too_many(&mut self, replicas: &Replicas) {
        let [a, b, c] = [self.call(), self.call(), self.call()];
        let stream = &self.streams[0];
        let (first, second) = (a.dispatch(self.client, stream), b.dispatch(self.client, stream));
        let input = c.tensors.load(&c.request);
        // SAFETY: as above.
        let error = unsafe { self.client.dispatch(stream, c.request.layer, &input).unwrap_err() };
        assert!(matches!(error, DeviceError::Outstanding { num_frames: 2 }), "{error}");
        let (first, second) =
            (a.combine(self.client, stream, first), b.combine(self.client, stream, second));
        a.finish(self.client, stream, first, &mut replicas.local());
        b.finish(self.client, stream, second, &mut replicas.local());
    }

    /// The older call goes on.
    fn wrong_order(&mut self, replicas: &Replicas) {
        let [a, b] = [self.call(), self.call()];
        let stream = &self.streams[0];
        let (first, second) = (a.dispatch(self.client, stream), b.dispatch(self.client, stream));
        // SAFETY: the tensors have these sizes, and are kept until the call is settled.
        let error = unsafe { self.client.combine(stream, second, b.tensors.out()).unwrap_err() };
        assert!(matches!(error, DeviceError::Order { .. }), "{error}");
        self.num_abandoned += 1;
        let first = a.combine(self.client, stream, first);
        a.finish(self.client, stream, first, &mut replicas.local());
        self.settle(replicas);
    }

    /// The younger call need not wait for one that can no longer be combined.
    fn the_older_one_dropped(&mut self, replicas: &Replicas) {
        let [a, b] = [self.call(), self.call()];
        let stream = &self.streams[0];
        let (first, second) = (a.dispatch(self.client, stream), b.dispatch(self.client, stream));
        drop(first);
        self.num_abandoned += 1;
        let second = b.combine(self.client, stream, second);
        b.finish(self.client, stream, second, &mut replicas.local());
        self.settle(replicas);
    }

    fn wrong_output(&mut self, replicas: &Replicas) {
        let call = self.call();
        let stream = &self.streams[0];
        let handle = call.dispatch(self.client, stream);
        let nowhere = DeviceTensor { ptr: NOWHERE, ..call.tensors.out() };
        // SAFETY: refused.
        unsafe { self.client.combine(stream, handle, nowhere).unwrap_err() };
        self.num_abandoned += 1;
        self.settle(replicas);
    }

    /// Handles and pendings given to a client that is not theirs, or while a stream captures.
    fn wrong_client(&mut self, replicas: &Replicas) {
        let is_handle = |error: &DeviceError| matches!(error, DeviceError::Handle { .. });
        let [a, b, c] = [self.call(), self.call(), self.call()];
        let [stream, other] = &self.streams;
        // Both have calls in the same slots.
        let (own, foreign) = (a.dispatch(self.client, stream), b.dispatch(self.other, other));
        // SAFETY: refused.
        let error = unsafe { self.client.combine(stream, foreign, b.tensors.out()) };
        assert!(is_handle(&error.unwrap_err()));
        let own = a.combine(self.client, stream, own);
        let foreign = c.dispatch(self.other, other);
        let foreign = c.combine(self.other, other, foreign);
        let error = self.client.finish(stream, foreign).unwrap_err();
        assert!(is_handle(&error), "{error}");
        a.finish(self.client, stream, own, &mut replicas.local());
        let handle = c.dispatch(self.client, stream);
        let captured = stream.capture(|stream| {
            // SAFETY: refused.
            let error = unsafe { self.client.combine(stream, handle, c.tensors.out()) };
            assert!(is_handle(&error.unwrap_err()));
            Ok(())
        });
        drop(captured.expect("captured"));
        self.num_abandoned += 3;
        self.settle(replicas);
    }

    /// Errors that only kernels, or the host behind them, find.
    fn wrong_tensors(&mut self, replicas: &Replicas) {
        for is_count in [false, true] {
            let [mut a, b] = [self.call(), self.call()];
            let stream = &self.streams[0];
            if !is_count {
                a.request.idx[3] = self.client.model().shape.num_experts as i32;
            }
            let input = a.tensors.load(&a.request);
            if is_count {
                a.tensors.write(&a.tensors.num_tokens, &[input.capacity + 1]);
            }
            // SAFETY: the tensors have these sizes and outlive the call.
            let first = unsafe { self.client.dispatch(stream, a.request.layer, &input) };
            let first = a.combine(self.client, stream, first.expect("dispatch"));
            let second = b.dispatch(self.client, stream);
            let error = self.client.finish(stream, first).unwrap_err();
            match error {
                DeviceError::Tokens { .. } if is_count => {}
                DeviceError::Client(ClientError::ExpertIndex { .. }) if !is_count => {}
                other => panic!("{other}"),
            }
            let second = b.combine(self.client, stream, second);
            b.finish(self.client, stream, second, &mut replicas.local());
        }
    }

    /// The next calls of both clients give the right rows.
    fn settle(&mut self, replicas: &Replicas) {
        let clients: [&mut DeviceClient; 2] = [self.client, self.other];
        for (client, stream) in clients.into_iter().zip(&self.streams) {
            let call = Call::new(self.rng, client);
            let local = &mut replicas.local();
            let timing = forward(client, stream, &call.tensors, &call.request, local, DTYPE);
            assert_eq!((timing.failovers, timing.resent_pairs), (0, 0), "{timing:?}");
        }
    }
}

#[test]
fn calls_that_end_with_errors_use_nothing_up() {
    let mut rng = seeded("calls_that_end_with_errors_use_nothing_up");
    let Some(mut replicas) = Replicas::of(DTYPE, 1, 2) else { return };
    replicas.max_servers = 1;
    let (tables, watched) = watch::channel(Arc::new(replicas.table()));
    let connect = || replicas.connect_by(builder(&replicas.model).placement_watch(watched.clone()));
    let (mut client, mut other) = (connect(), connect());
    let streams = [client.gpu().stream().expect("stream"), other.gpu().stream().expect("stream")];
    let mut exits =
        Exits { rng: &mut rng, client: &mut client, other: &mut other, streams, num_abandoned: 0 };
    for _ in 0..2 {
        exits.refused_dispatches();
        exits.one_too_many(&replicas);
        exits.wrong_order(&replicas);
        exits.the_older_one_dropped(&replicas);
        exits.wrong_output(&replicas);
        exits.wrong_client(&replicas);
        exits.wrong_tensors(&replicas);
        exits.settle(&replicas);
        // The only place is free again, too, when its server goes.
        replicas.kill(0);
        tables.send(Arc::new(replicas.restart(0))).expect("watched");
        let seen = replicas.table().epoch;
        until("the successor has the place", || {
            let is_ready = |client: &mut DeviceClient| {
                client.wait_ready(Duration::from_secs(30)).expect("a server");
                client.epoch() == seen && metric(client, UP, Some("up")) == 1.0
            };
            is_ready(exits.client) && is_ready(exits.other)
        });
    }
    let num_abandoned = exits.num_abandoned;
    let name = "switchyard_client_abandoned_requests_total";
    assert_eq!(metric(&client, name, None) + metric(&other, name, None), num_abandoned as f64);
    // The servers died without calls.
    for client in [&client, &other] {
        assert_eq!(metric(client, "switchyard_client_failovers_total", None), 0.0);
    }
}

/// The error of a call whose repair ended with one would be the next replay's, too.
#[test]
fn a_refusal_is_no_later_calls() {
    let mut rng = seeded("a_refusal_is_no_later_calls");
    let Some((mut replicas, device)) = within_reach(1, 6) else { return };
    let (tables, watched) = watch::channel(Arc::new(replicas.table()));
    let mut client = replicas.connect_by(builder(&replicas.model).placement_watch(watched));
    let client = &mut client;
    let stream = client.gpu().stream().expect("stream");
    let recorded = record(client, &stream);
    let request = Request::random(&mut rng, &replicas.model, NUM_TOKENS, 4);
    recorded.load(&request);
    client.replay(&stream, &recorded.graph).expect("replay");
    recorded.check(&request, &mut replicas.local());
    // Three frames of the graph's layers, and this one.
    let number = 4u64;
    replicas.server(0).signal(Signal::STOP);
    let call = Call::new(&mut rng, client);
    let handle = call.dispatch(client, &stream);
    let pending = call.combine(client, &stream, handle);
    let (slots, geometry) = response_slots(device, &replicas);
    let word = number << 16 | u64::from(ErrorCode::WrongLayer.to_u32());
    let place = number % u64::from(geometry.num_frames);
    let at = geometry.response_control_offset + WORD_STATUS_OFFSET + place * WORD_STRIDE;
    for slot in &slots {
        slot.write_all_at(&word.to_ne_bytes(), at).expect("a slot");
    }
    stream.wait(soon()).expect("its kernels end");
    let error = client.finish(&stream, pending).unwrap_err();
    assert!(
        matches!(
            error,
            DeviceError::Client(ClientError::Refused { code: ErrorCode::WrongLayer, .. })
        ),
        "{error}"
    );
    // One that refused does not answer later, as this one would.
    replicas.kill(0);
    until("the death is known", || metric(client, UP, Some("up")) == 0.0);
    tables.send(Arc::new(replicas.restart(0))).expect("watched");
    client.wait_ready(Duration::from_secs(60)).expect("a server");
    recorded.load(&request);
    let report = client.replay(&stream, &recorded.graph).expect("replay");
    assert_eq!(report.attempts, 1);
    recorded.check(&request, &mut replicas.local());
}

/// All of a client's kernels have one word for errors.
#[test]
fn a_replay_is_not_told_of_the_calls_beside_it() {
    let mut rng = seeded("a_replay_is_not_told_of_the_calls_beside_it");
    let Some(fleet) = Fleet::start(1, 1, DTYPE) else { return };
    let (mut client, mut local) = (fleet.client(), fleet.local());
    let client = &mut client;
    let stream = client.gpu().stream().expect("stream");
    let recorded = record(client, &stream);
    let request = Request::random(&mut rng, &fleet.model, NUM_TOKENS, 4);
    let mut call = Call::new(&mut rng, client);
    call.request.idx[7] = client.model().shape.num_experts as i32;
    let handle = call.dispatch(client, &stream);
    let pending = call.combine(client, &stream, handle);
    for _ in 0..2 {
        recorded.load(&request);
        let report = client.replay(&stream, &recorded.graph).expect("replay");
        assert_eq!(report.attempts, 1);
        recorded.check(&request, &mut local);
    }
    let error = client.finish(&stream, pending).unwrap_err();
    assert!(error.to_string().contains(&call.request.idx[7].to_string()), "{error}");
    recorded.load(&request);
    assert_eq!(client.replay(&stream, &recorded.graph).expect("replay").attempts, 1);
    recorded.check(&request, &mut local);
}

/// Recorded calls have their slots by turns.
#[test]
fn a_refused_call_takes_no_turn_of_recorded_ones() {
    let mut rng = seeded("a_refused_call_takes_no_turn_of_recorded_ones");
    let Some(fleet) = Fleet::start(1, 1, DTYPE) else { return };
    let (mut client, mut local) = (fleet.client(), fleet.local());
    let client = &mut client;
    let stream = client.gpu().stream().expect("stream");
    let tensors = [(); 2].map(|()| Tensors::new(client));
    let layer = client.model().moe_layers[0];
    let good = tensors[0].input();
    let refused = DeviceInput { topk_idx: DeviceTensor { ptr: NOWHERE, ..good.topk_idx }, ..good };
    let graph = stream.capture(|stream| {
        // SAFETY: the tensors have these sizes and live as long as the graph; the others are refused.
        unsafe {
            let first = client.dispatch(stream, layer, &tensors[0].input()).expect("dispatch");
            client.dispatch(stream, layer, &refused).unwrap_err();
            let second = client.dispatch(stream, layer, &tensors[1].input()).expect("dispatch");
            let first = client.combine(stream, first, tensors[0].out()).expect("combine");
            let second = client.combine(stream, second, tensors[1].out()).expect("combine");
            assert!(first.is_recorded() && second.is_recorded());
        }
        Ok(())
    });
    let graph = graph.expect("capture");
    let mut request = Request::random(&mut rng, &fleet.model, NUM_TOKENS, 4);
    request.layer = layer;
    tensors.iter().for_each(|tensors| _ = tensors.load(&request));
    client.replay(&stream, &graph).expect("replay");
    for tensors in &tensors {
        check(&request, &tensors.read(NUM_TOKENS), &mut local, DTYPE);
    }
}

const UP: &str = "switchyard_client_links";
