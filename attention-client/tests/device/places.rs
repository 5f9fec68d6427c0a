//! Places for servers, fewer than one would like.

use std::sync::Arc;
use std::time::{Duration, Instant};

use control_api::PlacementTable;
use expert_server::RunningServer;
use switchyard_attention_client::{DeviceClient, DeviceError};
use tokio::sync::watch;

use crate::client_common::{Request, seeded};
use crate::faults::{count, metric, until};
use crate::graphs::{NUM_TOKENS, record};
use crate::order::{Call, DTYPE, NEVER, beside_one_that_stands_still};
use crate::rig::{Fleet, Replicas, Tensors, builder, forward, options, soon};

/// A client of one server that has no place for a second one.
fn one_place() -> Option<(Replicas, watch::Sender<Arc<PlacementTable>>, DeviceClient)> {
    let mut replicas = Replicas::of(DTYPE, 1, 4)?;
    replicas.max_servers = 1;
    let (tables, watched) = watch::channel(Arc::new(replicas.table()));
    let settings = builder(&replicas.model).deadline(NEVER).work_limit(NEVER);
    let client = replicas.connect_by(settings.placement_watch(watched));
    Some((replicas, tables, client))
}

/// The kernels of both calls have ended when the first is repaired, so the place is free. Then the missing answers of
/// the second call are the dead server's, not those of the new server in its place.
#[test]
fn a_new_server_takes_the_only_place_while_combined_calls_refer_to_it() {
    let mut rng = seeded("a_new_server_takes_the_only_place_while_combined_calls_refer_to_it");
    let Some((mut replicas, tables, mut client)) = one_place() else { return };
    let client = &mut client;
    let local = &mut replicas.local();
    let streams = [(); 2].map(|()| client.gpu().stream().expect("stream"));
    let event = client.gpu().event().expect("event");
    let [a, b] = beside_one_that_stands_still(&mut rng, &replicas, client, &streams[0]);
    let first = a.dispatch(client, &streams[0]);
    let second = b.dispatch(client, &streams[0]);
    let first = a.combine(client, &streams[0], first);
    streams[0].record(&event).expect("recorded");
    streams[1].wait_for(&event).expect("ordered");
    let second = b.combine(client, &streams[1], second);
    replicas.kill(0);
    tables.send(Arc::new(replicas.restart(0))).expect("watched");
    assert_eq!(a.finish(client, &streams[0], first, local).failovers, 1);
    streams[1].record(&event).expect("recorded");
    streams[0].wait_for(&event).expect("ordered");
    // The successor is at work when it might be blamed.
    let c = Call::new(&mut rng, client);
    let third = c.dispatch(client, &streams[0]);
    assert_eq!(b.finish(client, &streams[1], second, local).failovers, 1);
    assert_eq!(metric(client, "switchyard_client_failovers_total", None), 1.0);
    let third = c.combine(client, &streams[0], third);
    assert_eq!(c.finish(client, &streams[0], third, local).failovers, 0);
}

/// So does one that a graph waits for.
#[test]
fn a_graph_gets_a_successor_while_a_combined_call_refers_to_its_predecessor() {
    let test = "a_graph_gets_a_successor_while_a_combined_call_refers_to_its_predecessor";
    let mut rng = seeded(test);
    let Some((mut replicas, tables, mut client)) = one_place() else { return };
    let client = &mut client;
    let local = &mut replicas.local();
    let stream = client.gpu().stream().expect("stream");
    let recorded = record(client, &stream);
    let request = Request::random(&mut rng, &replicas.model, NUM_TOKENS, 4);
    let [a] = beside_one_that_stands_still(&mut rng, &replicas, client, &stream);
    let first = a.dispatch(client, &stream);
    let first = a.combine(client, &stream, first);
    replicas.kill(0);
    recorded.load(&request);
    let registry = client.registry().clone();
    let report = std::thread::scope(|scope| {
        scope.spawn(|| {
            // The replay notes it.
            until("the failure is noted", || {
                count(&registry, "switchyard_client_failovers_total", None) == 1.0
            });
            tables.send(Arc::new(replicas.restart(0))).expect("watched");
        });
        client.replay(&stream, &recorded.graph).expect("replay")
    });
    assert!(report.attempts > 1, "{report:?}");
    recorded.check(&request, local);
    assert_eq!(a.finish(client, &stream, first, local).failovers, 1);
    assert_eq!(metric(client, "switchyard_client_failovers_total", None), 1.0);
    recorded.load(&request);
    assert_eq!(client.replay(&stream, &recorded.graph).expect("replay").attempts, 1);
    recorded.check(&request, local);
}

/// The caller cannot finish calls while the client waits for servers.
#[test]
fn waiting_for_a_server_that_waits_for_a_call_ends_at_once() {
    let mut rng = seeded("waiting_for_a_server_that_waits_for_a_call_ends_at_once");
    let Some((mut replicas, tables, mut client)) = one_place() else { return };
    let client = &mut client;
    let stream = client.gpu().stream().expect("stream");
    let [a] = beside_one_that_stands_still(&mut rng, &replicas, client, &stream);
    let handle = a.dispatch(client, &stream);
    replicas.kill(0);
    until("the death is known", || metric(client, "switchyard_client_links", Some("up")) == 0.0);
    tables.send(Arc::new(replicas.restart(0))).expect("watched");
    let error = client.wait_ready(Duration::from_secs(30)).unwrap_err();
    assert!(
        matches!(error, DeviceError::NoPlace { max_servers: 1, num_calls: 1, .. }),
        "{error} ({error:?})"
    );
    let pending = a.combine(client, &stream, handle);
    a.finish(client, &stream, pending, &mut replicas.local());
    client.wait_ready(Duration::from_secs(30)).expect("a server");
}

/// Each dispatch goes by other tables than the one before it, and none is on the device yet.
#[test]
fn dispatches_do_not_wait_for_tables_on_their_way() {
    const NUM_FRAMES: usize = 4;
    let mut rng = seeded("dispatches_do_not_wait_for_tables_on_their_way");
    let Some(mut replicas) = Replicas::of(DTYPE, NUM_FRAMES + 1, NUM_FRAMES) else { return };
    let limit = Duration::from_secs(2);
    let settings = builder(&replicas.model).deadline(limit).work_limit(limit);
    let mut client = replicas.connect(settings);
    let client = &mut client;
    let stream = client.gpu().stream().expect("stream");
    let calls: [Call; NUM_FRAMES] = std::array::from_fn(|_| Call::new(&mut rng, client));
    let (holding, hold) = std::sync::mpsc::channel::<()>();
    stream.then(move || _ = hold.recv()).expect("held");
    let handles: Vec<_> = calls
        .iter()
        .enumerate()
        .map(|(server, call)| {
            let handle = call.dispatch(client, &stream);
            replicas.kill(server);
            let num_left = (NUM_FRAMES - server) as f64;
            until("the death is known", || {
                metric(client, "switchyard_client_links", Some("up")) == num_left
            });
            handle
        })
        .collect();
    drop(holding);
    stream.wait(soon()).expect("dispatched");
    for (call, handle) in calls.iter().zip(handles) {
        let pending = call.combine(client, &stream, handle);
        call.finish(client, &stream, pending, &mut replicas.local());
    }
}

/// Each attempt costs the server's other clients two pauses between their batches.
#[test]
fn a_server_for_which_there_is_no_place_is_left_alone_until_there_is_one() {
    let mut rng = seeded("a_server_for_which_there_is_no_place_is_left_alone_until_there_is_one");
    let Some(mut fleet) = Fleet::start(2, 2, DTYPE) else { return };
    let mut settings = options(DTYPE);
    settings.max_servers = 1;
    let mut client = fleet.builder().build(fleet.gpu(), settings).expect("client");
    client.wait_ready(Duration::from_secs(60)).expect("a server");
    let num_opened = |fleet: &Fleet| -> Vec<u64> {
        let servers = fleet.servers.iter().flatten();
        servers
            .map(|server| {
                let text = server.render_metrics().expect("metrics");
                let opened = "switchyard_server_links_opened_total ";
                let line = text.lines().find_map(|line| line.strip_prefix(opened));
                line.expect("the metric").parse().expect("a number")
            })
            .collect()
    };
    let (stream, tensors) = (client.gpu().stream().expect("stream"), Tensors::new(&client));
    let mut call = |client: &mut DeviceClient, fleet: &Fleet| {
        let request = Request::random(&mut rng, &fleet.model, NUM_TOKENS, 4);
        forward(client, &stream, &tensors, &request, &mut fleet.local(), DTYPE)
    };
    // The one that came second is turned away when the client looks.
    until("both were tried", || {
        call(&mut client, &fleet);
        num_opened(&fleet).iter().sum::<u64>() >= 2
    });
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(4) {
        call(&mut client, &fleet);
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(num_opened(&fleet), [1, 1]);
    let is_used = |server: &RunningServer| server.num_links() == 1;
    let used = fleet.servers.iter().flatten().position(is_used).expect("one is used");
    fleet.stop(used);
    until("the other one has the place", || {
        client.wait_ready(Duration::from_secs(60)).expect("a server");
        num_opened(&fleet) == [2]
    });
    call(&mut client, &fleet);
}
