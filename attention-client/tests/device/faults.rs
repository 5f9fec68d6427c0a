//! Servers that are killed, stopped, replaced, or leave, with calls outstanding and without.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kernels::gpu::{GpuError, Stream};
use protocol::WireDtype;
use rand::rngs::StdRng;
use rustix::process::Signal;
use switchyard_attention_client::{DeviceClient, DeviceError};
use tokio::sync::watch;

use crate::client_common::{Request, seeded};
use crate::rig::{Fleet, Replicas, SLOT, Tensors, builder, check, forward, soon};

/// Enough tokens that both replicas of each expert get some.
pub const MANY: usize = 40;

pub fn metric(client: &DeviceClient, name: &str, label: Option<&str>) -> f64 {
    count(client.registry(), name, label)
}

/// The same, of a client that is at work.
pub fn count(registry: &prometheus::Registry, name: &str, label: Option<&str>) -> f64 {
    let families = registry.gather();
    let family = families.iter().find(|family| family.name() == name).expect("metric");
    let chosen = family.get_metric().iter().filter(|metric| {
        label.is_none_or(|label| metric.get_label().iter().any(|pair| pair.value() == label))
    });
    chosen.map(|m| m.get_counter().get_value() + m.get_gauge().get_value()).sum()
}

/// Every call came to its end. That none of its pairs is missing or counted twice is what outputs are
/// compared for.
fn nothing_lost(client: &DeviceClient) {
    let name = "switchyard_client_abandoned_requests_total";
    assert_eq!(metric(client, name, None), 0.0);
}

pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let limit = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < limit, "{what}: not within a minute");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A call during which the first of two replicas dies without having answered.
fn killed(rng: &mut StdRng, pair: &mut Replicas, client: &mut DeviceClient, stream: &Stream) {
    let tensors = Tensors::new(client);
    let mut local = pair.local();
    let request = Request::random(rng, &pair.model, MANY, 4);
    forward(client, stream, &tensors, &request, &mut local, pair.dtype);
    // A server that stands still has not answered when it dies.
    pair.server(0).freeze();
    let request = Request::random(rng, &pair.model, MANY, 4);
    let input = tensors.load(&request);
    // SAFETY: the tensors have these sizes and outlive the call.
    let pending = unsafe {
        let handle = client.dispatch(stream, request.layer, &input).expect("dispatch");
        client.combine(stream, handle, tensors.out()).expect("combine")
    };
    let waited = stream.wait(Instant::now() + Duration::from_secs(1));
    assert!(matches!(waited, Err(GpuError::Deadline { .. })), "the server answers: {waited:?}");
    pair.server(0).signal(Signal::KILL);
    let timing = client.finish(stream, pending).expect("finish");
    check(&request, &tensors.read(MANY), &mut local, pair.dtype);
    assert_eq!(timing.failovers, 1, "{timing:?}");
    assert!(timing.resent_pairs > 0 && timing.stall_ns > 0, "{timing:?}");
    // Not all of them: the other replica had answered.
    let num_pairs = request.idx.iter().filter(|&&expert| expert >= 0).count() as u64;
    assert!(timing.resent_pairs < num_pairs, "{timing:?} of {num_pairs}");
    assert_eq!(metric(client, "switchyard_client_failovers_total", Some("closed")), 1.0);
    for _ in 0..4 {
        let request = Request::random(rng, &pair.model, MANY, 4);
        let timing = forward(client, stream, &tensors, &request, &mut local, pair.dtype);
        assert_eq!((timing.failovers, timing.num_servers), (0, 1));
    }
    nothing_lost(client);
}

fn survives_a_death(test: &str, dtype: WireDtype) {
    let mut rng = seeded(test);
    let Some(mut pair) = Replicas::start(dtype) else { return };
    // Only the news of the death can end the wait in time.
    let mut client = pair.connect(
        builder(&pair.model)
            .deadline(Duration::from_secs(600))
            .work_limit(Duration::from_secs(600)),
    );
    let stream = client.gpu().stream().expect("stream");
    killed(&mut rng, &mut pair, &mut client, &stream);
}

#[test]
fn a_replica_that_is_killed_with_fp8_requests() {
    survives_a_death("a_replica_that_is_killed_with_fp8_requests", WireDtype::F8E4m3);
}

#[test]
fn a_replica_that_is_killed_with_bf16_requests() {
    survives_a_death("a_replica_that_is_killed_with_bf16_requests", WireDtype::Bf16);
}

#[test]
fn a_replica_that_freezes_and_comes_back() {
    let mut rng = seeded("a_replica_that_freezes_and_comes_back");
    let Some(pair) = Replicas::start(WireDtype::F8E4m3) else { return };
    let mut client = pair.connect(builder(&pair.model).deadline(Duration::from_millis(500)));
    let (tensors, mut local) = (Tensors::new(&client), pair.local());
    let stream = client.gpu().stream().expect("stream");
    let mut call = |client: &mut DeviceClient| {
        let request = Request::random(&mut rng, &pair.model, MANY, 4);
        forward(client, &stream, &tensors, &request, &mut local, pair.dtype)
    };
    call(&mut client);
    pair.server(0).freeze();
    let timing = call(&mut client);
    assert!(timing.failovers >= 1 && timing.resent_pairs > 0, "{timing:?}");
    assert!(metric(&client, "switchyard_client_failovers_total", Some("silent")) >= 1.0);
    call(&mut client);
    // Its late writes land in memory that is not read any more.
    pair.server(0).signal(Signal::CONT);
    until("the server is back", || {
        call(&mut client);
        metric(&client, "switchyard_client_links", Some("up")) == 2.0
    });
    until("both are used", || call(&mut client).num_servers == 2);
    nothing_lost(&client);
}

#[test]
fn memory_of_a_dead_server_is_freed_between_calls() {
    let mut rng = seeded("memory_of_a_dead_server_is_freed_between_calls");
    let Some(mut pair) = Replicas::start(WireDtype::F8E4m3) else { return };
    let mut client = pair.connect(builder(&pair.model));
    let (tensors, mut local) = (Tensors::new(&client), pair.local());
    let stream = client.gpu().stream().expect("stream");
    let request = Request::random(&mut rng, &pair.model, MANY, 4);
    forward(&mut client, &stream, &tensors, &request, &mut local, pair.dtype);
    let gpu = client.gpu().clone();
    let before = gpu.free_bytes().expect("memory");
    pair.kill(0);
    until("its slots are free", || gpu.free_bytes().expect("memory") > before);
    forward(&mut client, &stream, &tensors, &request, &mut local, pair.dtype);
}

#[test]
fn a_successor_is_taken_in_at_run_time() {
    let mut rng = seeded("a_successor_is_taken_in_at_run_time");
    let dtype = WireDtype::Bf16;
    let Some(mut fleet) = Fleet::start(1, 1, dtype) else { return };
    let (tables, watched) = watch::channel(Arc::new(fleet.table(1)));
    let mut client = fleet.connect(builder(&fleet.model).placement_watch(watched));
    let (tensors, mut local) = (Tensors::new(&client), fleet.local());
    let stream = client.gpu().stream().expect("stream");
    for epoch in 2..5 {
        let request = Request::random(&mut rng, &fleet.model, 10, 4);
        forward(&mut client, &stream, &tensors, &request, &mut local, dtype);
        fleet.stop(0);
        let successor = fleet.start_server(0);
        fleet.addrs[0] = successor.data_addr().to_string();
        fleet.servers[0] = Some(successor);
        tables.send(Arc::new(fleet.table(epoch))).expect("watched");
    }
    let request = Request::random(&mut rng, &fleet.model, 10, 4);
    forward(&mut client, &stream, &tensors, &request, &mut local, dtype);
    assert_eq!(client.epoch(), 4);
    nothing_lost(&client);
}

/// Nor is who sits where the dead server sat blamed for what the call lacks of that one.
#[test]
fn a_call_whose_repair_the_gpu_does_not_end_stays_outstanding() {
    let mut rng = seeded("a_call_whose_repair_the_gpu_does_not_end_stays_outstanding");
    let dtype = WireDtype::Bf16;
    let Some(mut replicas) = Replicas::of(dtype, 1, SLOT.num_frames) else { return };
    replicas.max_servers = 1;
    let (tables, watched) = watch::channel(Arc::new(replicas.table()));
    let limit = Duration::from_secs(2);
    let settings = builder(&replicas.model).deadline(limit).work_limit(limit);
    let mut client = replicas.connect_by(settings.placement_watch(watched));
    let (tensors, mut local) = (Tensors::new(&client), replicas.local());
    let stream = client.gpu().stream().expect("stream");
    let request = Request::random(&mut rng, &replicas.model, 10, 4);
    forward(&mut client, &stream, &tensors, &request, &mut local, dtype);
    replicas.server(0).freeze();
    let input = tensors.load(&request);
    // SAFETY: the tensors have these sizes and outlive the call.
    let pending = unsafe {
        let handle = client.dispatch(&stream, request.layer, &input).expect("dispatch");
        client.combine(&stream, handle, tensors.out()).expect("combine")
    };
    replicas.kill(0);
    stream.wait(soon()).expect("its kernels end");
    let registry = client.registry().clone();
    let failovers = || count(&registry, "switchyard_client_failovers_total", None);
    // While the call waits for a replica, the stream gets something that does not end; then there is one.
    let (holding, hold) = std::sync::mpsc::channel::<()>();
    let error = std::thread::scope(|scope| {
        scope.spawn(|| {
            until("the failure is noted", || failovers() == 1.0);
            std::thread::sleep(Duration::from_millis(500));
            stream.then(move || _ = hold.recv()).expect("held");
            tables.send(Arc::new(replicas.restart(0))).expect("watched");
        });
        client.finish(&stream, pending).unwrap_err()
    });
    assert!(matches!(error, DeviceError::Gpu(GpuError::Deadline { .. })), "{error}");
    drop(holding);
    // Its kernels were waited for before anything else began, and only then was it over.
    forward(&mut client, &stream, &tensors, &request, &mut local, dtype);
    assert_eq!(metric(&client, "switchyard_client_abandoned_requests_total", None), 1.0);
    assert_eq!(failovers(), 1.0);
}

#[test]
fn a_server_that_leaves_stalls_no_call() {
    let mut rng = seeded("a_server_that_leaves_stalls_no_call");
    let dtype = WireDtype::F8E4m3;
    let Some(mut fleet) = Fleet::start(3, 2, dtype) else { return };
    let (tables, watched) = watch::channel(Arc::new(fleet.table(1)));
    let mut client = fleet.connect(builder(&fleet.model).placement_watch(watched));
    let (tensors, mut local) = (Tensors::new(&client), fleet.local());
    let stream = client.gpu().stream().expect("stream");
    let mut call = |client: &mut DeviceClient| {
        let request = Request::random(&mut rng, &fleet.model, MANY, 4);
        let timing = forward(client, &stream, &tensors, &request, &mut local, dtype);
        assert_eq!((timing.failovers, timing.resent_pairs, timing.stall_ns), (0, 0, 0));
        timing
    };
    for _ in 0..3 {
        call(&mut client);
    }
    // First the placement, then the server.
    let mut table = fleet.table(2);
    table.servers.remove(1);
    for replicas in table.layers.iter_mut().flat_map(|layer| &mut layer.replicas) {
        replicas.retain(|server| *server != 1);
        // The last one is the second now.
        replicas.iter_mut().for_each(|server| *server = (*server).min(1));
    }
    tables.send(Arc::new(table)).expect("watched");
    until("the client lets the server go", || {
        call(&mut client);
        metric(&client, "switchyard_client_links", Some("up")) == 2.0
    });
    if let Some(server) = fleet.servers[1].take() {
        fleet.runtime.block_on(server.shutdown());
    }
    for _ in 0..3 {
        assert_eq!(call(&mut client).num_servers, 2);
    }
    nothing_lost(&client);
}
