//! Several calls are dispatched before the first is combined, while servers die and come back.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use kernels::gpu::{Event, Stream};
use protocol::WireDtype;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use reference_model::LocalExperts;
use rustix::process::Signal;
use switchyard_attention_client::device::{DeviceHandle, DevicePending};
use switchyard_attention_client::{DeviceClient, LayerTiming};
use tokio::sync::watch;

use crate::client_common::{Request, seeded};
use crate::faults::{MANY, metric, until};
use crate::rig::{Replicas, Tensors, builder, check, forward, soon};

pub const DTYPE: WireDtype = WireDtype::F8E4m3;
/// Waits end by the news of a death, or not in the time of a test.
pub const NEVER: Duration = Duration::from_secs(600);

/// A call's tensors and where it is.
pub struct Call {
    pub tensors: Tensors,
    pub request: Request,
}

impl Call {
    pub fn new(rng: &mut StdRng, client: &DeviceClient) -> Self {
        let request = Request::random(rng, client.model(), MANY, 4);
        Self { tensors: Tensors::new(client), request }
    }

    pub fn dispatch(&self, client: &mut DeviceClient, stream: &Stream) -> DeviceHandle {
        let input = self.tensors.load(&self.request);
        // SAFETY: the tensors have these sizes and outlive the call.
        unsafe { client.dispatch(stream, self.request.layer, &input).expect("dispatch") }
    }

    pub fn combine(
        &self,
        client: &mut DeviceClient,
        stream: &Stream,
        handle: DeviceHandle,
    ) -> DevicePending {
        // SAFETY: as above.
        unsafe { client.combine(stream, handle, self.tensors.out()).expect("combine") }
    }

    pub fn finish(
        &self,
        client: &mut DeviceClient,
        stream: &Stream,
        pending: DevicePending,
        local: &mut LocalExperts,
    ) -> LayerTiming {
        let timing = client.finish(stream, pending).expect("finish");
        let found = self.tensors.read(self.request.num_tokens);
        check(&self.request, &found, local, DTYPE);
        // Later rows are not touched.
        let all = self.tensors.read(client.max_tokens() as usize);
        assert!(all[found.len()..].iter().all(|value| value.is_nan()));
        timing
    }
}

/// Two replicas, one of them stopped, and calls.
pub fn beside_one_that_stands_still<const N: usize>(
    rng: &mut StdRng,
    replicas: &Replicas,
    client: &mut DeviceClient,
    stream: &Stream,
) -> [Call; N] {
    let calls = std::array::from_fn(|_| Call::new(rng, client));
    let first = Call::new(rng, client);
    forward(client, stream, &first.tensors, &first.request, &mut replicas.local(), DTYPE);
    replicas.server(0).freeze();
    calls
}

pub fn die(replicas: &Replicas, client: &DeviceClient) {
    replicas.server(0).signal(Signal::KILL);
    until("the death is known", || metric(client, "switchyard_client_links", Some("up")) == 1.0);
}

/// A retry takes the ring frame reserved for the next call. The next call then needs the frame of the second one,
/// whose rows still wait for their combine.
#[test]
fn a_repair_between_dispatches_costs_no_rows() {
    let mut rng = seeded("a_repair_between_dispatches_costs_no_rows");
    let Some(replicas) = Replicas::start(DTYPE) else { return };
    let mut client = replicas.connect(builder(&replicas.model).deadline(NEVER).work_limit(NEVER));
    let stream = client.gpu().stream().expect("stream");
    let (client, stream) = (&mut client, &stream);
    let [a, b, c] = beside_one_that_stands_still(&mut rng, &replicas, client, stream);
    let (first, second) = (a.dispatch(client, stream), b.dispatch(client, stream));
    die(&replicas, client);
    let first = a.combine(client, stream, first);
    a.finish(client, stream, first, &mut replicas.local());
    let third = c.dispatch(client, stream);
    let second = b.combine(client, stream, second);
    b.finish(client, stream, second, &mut replicas.local());
    let third = c.combine(client, stream, third);
    assert_eq!(c.finish(client, stream, third, &mut replicas.local()).failovers, 0);
}

/// The second dispatch goes by tables in which the first one's server is no more.
#[test]
fn a_server_may_be_gone_from_the_tables_before_its_rows_are_asked_for() {
    let mut rng = seeded("a_server_may_be_gone_from_the_tables_before_its_rows_are_asked_for");
    let Some(replicas) = Replicas::start(DTYPE) else { return };
    let mut client = replicas.connect(builder(&replicas.model).deadline(NEVER).work_limit(NEVER));
    let stream = client.gpu().stream().expect("stream");
    let (client, stream) = (&mut client, &stream);
    let [a, b] = beside_one_that_stands_still(&mut rng, &replicas, client, stream);
    let first = a.dispatch(client, stream);
    die(&replicas, client);
    let second = b.dispatch(client, stream);
    let (first, second) = (a.combine(client, stream, first), b.combine(client, stream, second));
    a.finish(client, stream, first, &mut replicas.local());
    assert_eq!(b.finish(client, stream, second, &mut replicas.local()).failovers, 0);
}

/// The only server dies with two calls outstanding, one of them not combined yet. The only place for the new server
/// is that of the dead one.
#[test]
fn a_new_server_takes_the_only_place_while_calls_wait_for_it() {
    let mut rng = seeded("a_new_server_takes_the_only_place_while_calls_wait_for_it");
    let Some(mut replicas) = Replicas::of(DTYPE, 1, 2) else { return };
    replicas.max_servers = 1;
    let (tables, watched) = watch::channel(Arc::new(replicas.table()));
    let settings = builder(&replicas.model).deadline(NEVER).work_limit(NEVER);
    let mut client = replicas.connect_by(settings.placement_watch(watched));
    let stream = client.gpu().stream().expect("stream");
    let (client, stream) = (&mut client, &stream);
    let [a, b] = beside_one_that_stands_still(&mut rng, &replicas, client, stream);
    let (first, second) = (a.dispatch(client, stream), b.dispatch(client, stream));
    replicas.kill(0);
    tables.send(Arc::new(replicas.restart(0))).expect("watched");
    let first = a.combine(client, stream, first);
    a.finish(client, stream, first, &mut replicas.local());
    let second = b.combine(client, stream, second);
    b.finish(client, stream, second, &mut replicas.local());
}

/// The second call is summed on the first one's stream, which its caller may drop then.
#[test]
fn a_call_needs_no_stream_but_its_own() {
    let mut rng = seeded("a_call_needs_no_stream_but_its_own");
    let Some(mut replicas) = Replicas::of(DTYPE, 1, 2) else { return };
    replicas.max_servers = 1;
    let (tables, watched) = watch::channel(Arc::new(replicas.table()));
    let settings = builder(&replicas.model).deadline(NEVER).work_limit(NEVER);
    let mut client = replicas.connect_by(settings.placement_watch(watched));
    let client = &mut client;
    let (one, other) =
        (client.gpu().stream().expect("stream"), client.gpu().stream().expect("stream"));
    let event = client.gpu().event().expect("event");
    let local = &mut replicas.local();
    let [a, b] = beside_one_that_stands_still(&mut rng, &replicas, client, &one);
    let first = a.dispatch(client, &one);
    one.record(&event).expect("recorded");
    other.wait_for(&event).expect("ordered");
    let second = b.dispatch(client, &other);
    other.record(&event).expect("recorded");
    one.wait_for(&event).expect("ordered");
    replicas.kill(0);
    tables.send(Arc::new(replicas.restart(0))).expect("watched");
    let first = a.combine(client, &one, first);
    a.finish(client, &one, first, local);
    drop(one);
    let second = b.combine(client, &other, second);
    b.finish(client, &other, second, local);
}

/// All calls have one word for errors, which is cleared with the first.
#[test]
fn an_error_belongs_to_its_call_in_any_report() {
    let mut rng = seeded("an_error_belongs_to_its_call_in_any_report");
    let Some(replicas) = Replicas::start(DTYPE) else { return };
    let mut client = replicas.connect(builder(&replicas.model));
    let (client, local) = (&mut client, &mut replicas.local());
    let stream = client.gpu().stream().expect("stream");
    let a = Call::new(&mut rng, client);
    let mut b = Call::new(&mut rng, client);
    b.request.idx[7] = client.model().shape.num_experts as i32;
    let (first, second) = (a.dispatch(client, &stream), b.dispatch(client, &stream));
    let first = a.combine(client, &stream, first);
    a.finish(client, &stream, first, local);
    let second = b.combine(client, &stream, second);
    let error = client.finish(&stream, second).unwrap_err();
    assert!(error.to_string().contains(&b.request.idx[7].to_string()), "{error}");
    let c = Call::new(&mut rng, client);
    let third = c.dispatch(client, &stream);
    let third = c.combine(client, &stream, third);
    c.finish(client, &stream, third, local);
}

/// Nothing of a call that is refused is on its way, not even the first tables.
#[test]
fn a_dispatch_that_is_refused_leaves_nothing_behind() {
    let mut rng = seeded("a_dispatch_that_is_refused_leaves_nothing_behind");
    let Some(replicas) = Replicas::start(DTYPE) else { return };
    let mut client = replicas.connect(builder(&replicas.model));
    let (client, local) = (&mut client, &mut replicas.local());
    let streams = [(); 2].map(|()| client.gpu().stream().expect("stream"));
    let (holding, hold) = std::sync::mpsc::channel::<()>();
    streams[0].then(move || _ = hold.recv()).expect("held");
    let call = Call::new(&mut rng, client);
    let mut input = call.tensors.load(&call.request);
    input.topk_idx.ptr = kernels::abi::DevicePtr(0x1000);
    // SAFETY: refused, since nothing lies there.
    unsafe { client.dispatch(&streams[0], call.request.layer, &input).unwrap_err() };
    let handle = call.dispatch(client, &streams[1]);
    let pending = call.combine(client, &streams[1], handle);
    call.finish(client, &streams[1], pending, local);
    drop(holding);
}

/// Calls on two streams. Each stream waits for the earlier work of the other.
pub struct Play {
    rng: StdRng,
    pub client: DeviceClient,
    local: LocalExperts,
    streams: [Stream; 2],
    event: Event,
    last: usize,
    num_frames: usize,
    dispatched: VecDeque<(Call, DeviceHandle)>,
    combined: VecDeque<(Call, usize, DevicePending)>,
    /// Their kernels may still run.
    abandoned: Vec<Call>,
    num_failovers: u32,
}

impl Play {
    pub fn new(rng: StdRng, client: DeviceClient, local: LocalExperts, num_frames: usize) -> Self {
        let streams = [(); 2].map(|()| client.gpu().stream().expect("stream"));
        let event = client.gpu().event().expect("event");
        Self {
            rng,
            client,
            local,
            streams,
            event,
            last: 0,
            num_frames,
            dispatched: VecDeque::new(),
            combined: VecDeque::new(),
            abandoned: Vec::new(),
            num_failovers: 0,
        }
    }

    fn choose_stream(&mut self) -> usize {
        let next = self.rng.random_range(0..2);
        self.streams[self.last].record(&self.event).expect("recorded");
        self.streams[next].wait_for(&self.event).expect("ordered");
        self.last = next;
        next
    }

    /// Unless as many calls are outstanding as may be.
    fn dispatch(&mut self) {
        if self.dispatched.len() + self.combined.len() >= self.num_frames {
            return;
        }
        let call = Call::new(&mut self.rng, &self.client);
        let on = self.choose_stream();
        let handle = call.dispatch(&mut self.client, &self.streams[on]);
        self.dispatched.push_back((call, handle));
    }

    fn combine(&mut self) {
        let Some((call, handle)) = self.dispatched.pop_front() else { return };
        let on = self.choose_stream();
        let pending = call.combine(&mut self.client, &self.streams[on], handle);
        self.combined.push_back((call, on, pending));
    }

    fn finish(&mut self) {
        let any = self.any_of(self.combined.len());
        let Some((call, on, pending)) = self.combined.remove(any) else { return };
        let stream = &self.streams[on];
        let timing = call.finish(&mut self.client, stream, pending, &mut self.local);
        self.num_failovers += timing.failovers;
    }

    fn abandon(&mut self) {
        let (dispatched, combined) =
            (self.any_of(self.dispatched.len()), self.any_of(self.combined.len()));
        let call = match self.rng.random() {
            true => self.dispatched.remove(dispatched).map(|(call, _)| call),
            false => self.combined.remove(combined).map(|(call, ..)| call),
        };
        self.abandoned.extend(call);
    }

    /// Any place among so many.
    fn any_of(&mut self, num_calls: usize) -> usize {
        self.rng.random_range(0..num_calls.max(1))
    }

    /// One step; `false` leaves it to the servers.
    pub fn step(&mut self) -> bool {
        match self.rng.random_range(0..21) {
            0..=7 => self.dispatch(),
            8..=13 => self.combine(),
            14..=16 => self.finish(),
            17 => self.abandon(),
            // The client notices servers that join or leave between calls, too.
            18 => drop(self.client.wait_ready(Duration::ZERO)),
            _ => return false,
        }
        true
    }

    /// The client goes with calls outstanding. Their kernels end, but what they use is used until then.
    pub fn leave(self) {
        drop(self.client);
        for stream in &self.streams {
            stream.wait(soon()).expect("kernels");
        }
    }

    pub fn end(mut self) {
        while !self.dispatched.is_empty() {
            self.combine();
        }
        while !self.combined.is_empty() {
            self.finish();
        }
        println!("{} frames: {} failovers", self.num_frames, self.num_failovers);
        // Abandoned calls may still run.
        self.leave();
    }
}

#[test]
fn random_orders_of_calls_and_deaths_give_the_right_rows() {
    let mut rng = seeded("random_orders_of_calls_and_deaths_give_the_right_rows");
    for num_frames in [2, 4] {
        let Some(mut replicas) = Replicas::of(DTYPE, 2, num_frames) else { return };
        // A new server must wait until no call uses its place any more.
        replicas.max_servers = 2;
        let (tables, watched) = watch::channel(Arc::new(replicas.table()));
        let settings = builder(&replicas.model).deadline(NEVER).work_limit(NEVER);
        let client = replicas.connect_by(settings.placement_watch(watched));
        let mut play = Play::new(StdRng::from_rng(&mut rng), client, replicas.local(), num_frames);
        for _ in 0..200 {
            if play.step() {
                continue;
            }
            let server = rng.random_range(0..2);
            if !replicas.lives(server) {
                tables.send(Arc::new(replicas.restart(server))).expect("watched");
            } else if replicas.lives(1 - server) {
                replicas.server(server).signal(Signal::STOP);
                std::thread::scope(|scope| {
                    // A dispatch may have to wait for kernels that wait for this server.
                    scope.spawn(|| {
                        std::thread::sleep(Duration::from_millis(20));
                        replicas.server(server).signal(Signal::KILL);
                    });
                    play.dispatch();
                });
                replicas.kill(server);
            }
        }
        play.end();
    }
}

#[test]
fn random_orders_of_calls_and_freezes_give_the_right_rows() {
    let mut rng = seeded("random_orders_of_calls_and_freezes_give_the_right_rows");
    for num_frames in [2, 4] {
        let Some(replicas) = Replicas::of(DTYPE, 2, num_frames) else { return };
        let client =
            replicas.connect(builder(&replicas.model).deadline(Duration::from_millis(300)));
        let mut play = Play::new(StdRng::from_rng(&mut rng), client, replicas.local(), num_frames);
        let mut frozen = None;
        for _ in 0..150 {
            if play.step() {
                continue;
            }
            if let Some(server) = frozen.take() {
                replicas.server(server).signal(Signal::CONT);
            } else {
                let server = rng.random_range(0..2);
                replicas.server(server).signal(Signal::STOP);
                frozen = Some(server);
            }
        }
        play.end();
    }
}
