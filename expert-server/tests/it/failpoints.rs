//! Faults that only failpoints can provoke. Failpoints hold for the whole process, so each test runs alone.

use std::time::Duration;

use p2p_core::bootstrap::{ConnectConfig, PeerHello, connect};
use protocol::{ClientHello, WireDtype};
use switchyard_expert_server::{DataError, ExpertSelection, ServerError};
use test_support::own_process::is_alone;

use crate::common::{PATIENCE, Reference, Request, Rig, TestClient, seeded, start_server};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_of_the_data_thread_closes_every_connection_and_ends_the_server() {
    const NAME: &str =
        "failpoints::a_panic_of_the_data_thread_closes_every_connection_and_ends_the_server";
    if !is_alone(NAME) {
        return;
    }
    let scenario = fail::FailScenario::setup();
    let mut rng = seeded();
    let reference = Reference::open();
    let shape = reference.shape;
    let server = start_server("panics", ExpertSelection::All, |_| {}).await;
    let hello = ClientHello {
        model: shape,
        client_id: 1,
        dtype: WireDtype::F32,
        response_dtype: WireDtype::F32,
        name: "test".into(),
    };
    let hello = PeerHello { peer_id: 1, generation: 1, payload: hello.encode() };
    let connection = connect(server.data_addr(), hello, ConnectConfig::default()).await;
    let connection = connection.expect("connected");
    let (dtype, response_dtype) = (WireDtype::F32, WireDtype::F32);
    let mut client = TestClient::new(connection.channel, shape, 1, 1, dtype, response_dtype);
    let request = Request::random(&mut rng, &shape, 3);
    let mut client = tokio::task::spawn_blocking(move || {
        client.round_trip(&request, &reference);
        client
    })
    .await
    .expect("a right answer before the fault");

    for point in ["server::after_accept", "server::in_tick"] {
        fail::cfg(point, "off").expect("a failpoint");
    }
    fail::cfg("server::before_compute", "panic").expect("a failpoint");
    let request = Request::random(&mut rng, &shape, 1);
    client.try_send(&request).expect("credit");
    // The client must see a closed connection.
    tokio::time::timeout(PATIENCE, connection.liveness.closed()).await.expect("closed");
    let end = tokio::time::timeout(PATIENCE, server.wait()).await.expect("an end");
    let Err(ServerError::Data(DataError::Panicked { message })) = end else {
        panic!("another end: {end:?}");
    };
    assert!(message.contains("server::before_compute"), "{message}");
    assert!(server.ready().is_err());
    scenario.teardown();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frame_counts_only_once_it_is_published() {
    if !is_alone("failpoints::a_frame_counts_only_once_it_is_published") {
        return;
    }
    let scenario = fail::FailScenario::setup();
    let mut rng = seeded();
    let reference = Reference::open();
    let rig = Rig::start(
        &reference,
        p2p_core::SlotConfig { slot_bytes: 64 << 10, num_frames: 2 },
        switchyard_expert_server::Limits::default(),
        |_, _| true,
    );
    let (mut client, _, _end) = rig.client(1, WireDtype::F32, WireDtype::F32);
    fail::cfg("server::between_payload_and_publish", "pause").expect("a failpoint");
    let request = Request::random(&mut rng, &reference.shape, 2);
    let sequence = client.send(&request);
    // The payload is written, but the flag is not set.
    let early = client.receive_within(sequence, &request, Duration::from_millis(100));
    assert!(early.is_none(), "an answer before it was published");
    fail::remove("server::between_payload_and_publish");
    let rows = client.receive(sequence, &request).rows.expect("rows");
    reference.check(&request, WireDtype::F32, WireDtype::F32, &rows);
    rig.stop();
    scenario.teardown();
}
