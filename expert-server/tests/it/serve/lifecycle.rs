//! Whole servers: handshake, health, drain, and errors that say what to do.

use std::sync::Arc;
use std::time::{Duration, Instant};

use p2p_core::bootstrap::{ConnectConfig, ConnectError, Connection, PeerHello, connect};
use p2p_core::{AnyEndpoint, RejectCode, SlotConfig, TransportKind, Transports};
use protocol::{ClientHello, ModelShape, ServerHello, WireDtype};
use switchyard_expert_server::{
    ExpertSelection, ExpertServer, Placement, Secret, ServerConfig, StartError,
};
use test_support::descriptors::num_descriptors;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::common::{
    PATIENCE, Reference, Request, TestClient, metric, seeded, start_server, tiny_moe,
};
use crate::stand_in::StandIn;

fn hello(shape: ModelShape, client_id: u64) -> PeerHello {
    let (dtype, response_dtype) = (WireDtype::F32, WireDtype::F32);
    let hello = ClientHello { model: shape, client_id, dtype, response_dtype, name: "test".into() };
    PeerHello { peer_id: client_id, generation: 3, payload: hello.encode() }
}

async fn join(addr: std::net::SocketAddr, shape: ModelShape, id: u64) -> Connection {
    connect(addr, hello(shape, id), ConnectConfig::default()).await.expect("connected")
}

fn client_of(
    connection: Connection,
    shape: ModelShape,
    id: u64,
) -> (TestClient<AnyEndpoint>, p2p_core::bootstrap::Liveness) {
    let Connection { channel, liveness, reply, .. } = connection;
    let server = ServerHello::decode(&reply).expect("a server's hello");
    assert_eq!(server.generation, 3);
    assert_eq!(server.model, shape);
    (
        TestClient::new(channel, shape, id, server.generation, WireDtype::F32, WireDtype::F32),
        liveness,
    )
}

pub(super) async fn get(addr: std::net::SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(addr).await.expect("connected");
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("read");
    answer
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_over_shared_memory_serves_reports_and_drains() {
    let mut rng = seeded();
    let reference = Reference::open();
    let shape = reference.shape;
    let server = start_server("s0", ExpertSelection::All, |config| {
        config.metrics_addr = Some(([127, 0, 0, 1], 0).into());
        config.drain_idle = Duration::from_millis(100);
    })
    .await;
    assert_eq!(server.holds().num_experts(), 64);
    let connection = join(server.data_addr(), shape, 5).await;
    let (mut client, liveness) = client_of(connection, shape, 5);
    let requests: Vec<_> = (0..50).map(|n| Request::random(&mut rng, &shape, 1 + n % 9)).collect();
    let client = tokio::task::spawn_blocking(move || {
        for request in &requests {
            client.round_trip(request, &reference);
        }
        client
    })
    .await
    .expect("all answers are right");

    let metrics_addr = server.metrics_addr().expect("metrics are served");
    assert!(get(metrics_addr, "/healthz").await.starts_with("HTTP/1.1 200"));
    assert!(get(metrics_addr, "/readyz").await.starts_with("HTTP/1.1 200"));
    let text = get(metrics_addr, "/metrics").await;
    assert!(text.contains("switchyard_server_frames_total{direction=\"in\"} 50"), "{text}");
    assert!(text.contains("switchyard_server_ready 1"), "{text}");
    assert_eq!(metric(server.metrics(), "switchyard_server_experts_loaded"), 64.0);

    // A draining server refuses new clients and closes the old link once it is idle.
    let draining = server.drain();
    tokio::pin!(draining);
    let poll = tokio::time::timeout(Duration::from_millis(20), &mut draining).await;
    assert!(poll.is_err(), "a drain lets clients hear of it first");
    assert!(get(metrics_addr, "/readyz").await.contains("draining"));
    let refused = connect(server.data_addr(), hello(shape, 6), ConnectConfig::default()).await;
    let refused = refused.expect_err("no new clients while draining");
    assert!(refused.reject().is_some_and(|r| r.message.contains("drains")), "{refused}");
    draining.await;
    tokio::time::timeout(PATIENCE, liveness.closed()).await.expect("the connection closes");
    server.wait().await.expect("a drain is a good end");
    drop(client);
    let refused = connect(server.data_addr(), hello(shape, 6), ConnectConfig::default()).await;
    assert!(matches!(refused, Err(ConnectError::Unreachable { .. })));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_of_another_model_slot_or_secret_name_the_difference() {
    let reference = Reference::open();
    let shape = reference.shape;
    let server = start_server("s1", ExpertSelection::EveryLayer(vec![3]), |config| {
        config.secret = Some(Secret::new("open sesame"));
    })
    .await;
    let secret = |slot| ConnectConfig {
        secret: Some("open sesame".into()),
        slot,
        ..ConnectConfig::default()
    };
    let message = async |hello, config| {
        let error = connect(server.data_addr(), hello, config).await.expect_err("rejected");
        error.reject().expect("with a reason").message.clone()
    };
    let mut other = shape;
    other.fingerprint[0] ^= 1;
    let said = message(hello(other, 1), secret(SlotConfig::default())).await;
    let hex = |fingerprint: [u8; 32]| fingerprint.map(|byte| format!("{byte:02x}")).concat();
    assert!(
        said.contains(&hex(shape.fingerprint)) && said.contains(&hex(other.fingerprint)),
        "{said}"
    );
    let said =
        message(hello(ModelShape { hidden: 512, ..shape }, 1), secret(SlotConfig::default())).await;
    assert!(said.contains("512") && said.contains("256"), "{said}");
    let said =
        message(hello(shape, 1), secret(SlotConfig { slot_bytes: 1 << 20, num_frames: 2 })).await;
    assert!(said.contains("1048576") && said.contains("10485760"), "{said}");
    let said = message(hello(shape, 1), ConnectConfig::default()).await;
    assert!(said.contains("no secret"), "{said}");
    let garbage = PeerHello { payload: vec![0xff; 100], ..hello(shape, 1) };
    let said = message(garbage, secret(SlotConfig::default())).await;
    assert!(said.contains("cannot be read"), "{said}");
    // The server counts a rejection before the client reads it.
    let text = server.render_metrics().expect("metrics render");
    let refused = "switchyard_server_handshakes_rejected_total{reason=\"refused\"} 5";
    assert!(text.contains(refused), "{text}");
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_disconnect_leave_no_links_behind() {
    let reference = Reference::open();
    let shape = reference.shape;
    let server = start_server("s2", ExpertSelection::All, |config| {
        config.limits.max_links = 20;
    })
    .await;
    let descriptors = || num_descriptors("self").expect("descriptors");
    let mut baseline = 0;
    for round in 0..30 {
        let mut connections = Vec::new();
        for id in 0..5 {
            connections.push(join(server.data_addr(), shape, id).await);
        }
        drop(connections);
        let deadline = Instant::now() + PATIENCE;
        while server.num_links() > 0 {
            assert!(Instant::now() < deadline, "links stay after their clients have gone");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        // The first rounds fill the pools.
        if round == 5 {
            baseline = descriptors();
        }
    }
    // A client connects before the server counts its link, so the last counts may be late.
    let name = "switchyard_server_links_dropped_total{reason=\"peer_closed\"}";
    let dropped = || metric(server.metrics(), name);
    let deadline = Instant::now() + PATIENCE;
    while dropped() < 150.0 || server.num_links() > 0 || descriptors() > baseline + 12 {
        let (found, now) = (dropped(), descriptors());
        let links = server.num_links();
        assert!(
            Instant::now() < deadline,
            "{found} of 150 links dropped, {links} open; {now} descriptors, {baseline} before"
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(dropped(), 150.0);
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_server_says_so_and_has_room_again_when_a_client_leaves() {
    let reference = Reference::open();
    let shape = reference.shape;
    let server =
        start_server("s3", ExpertSelection::All, |config| config.limits.max_links = 1).await;
    let first = join(server.data_addr(), shape, 1).await;
    let second = connect(server.data_addr(), hello(shape, 2), ConnectConfig::default()).await;
    let second = second.expect_err("no room");
    assert!(second.reject().is_some_and(|r| r.message.contains("limit")), "{second}");
    drop(first);
    let deadline = Instant::now() + PATIENCE;
    loop {
        match connect(server.data_addr(), hello(shape, 2), ConnectConfig::default()).await {
            Ok(_) => break,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_that_cannot_work_give_errors_that_name_them() {
    let start = async |tweak: &dyn Fn(&mut ServerConfig)| {
        let mut config =
            ServerConfig::new(tiny_moe(), "bad", Placement::Static(ExpertSelection::All));
        config.num_threads = 1;
        tweak(&mut config);
        ExpertServer::start(config, |_| {}).await.expect_err("cannot start")
    };
    let taken = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let taken = taken.local_addr().expect("an address");
    let in_use = start(&|config| config.data_addr = taken).await.to_string();
    assert!(in_use.contains(&taken.to_string()) && in_use.contains("in use"), "{in_use}");
    let in_use = start(&|config| config.metrics_addr = Some(taken)).await.to_string();
    assert!(in_use.contains(&taken.to_string()) && in_use.contains("in use"), "{in_use}");
    let selection = |text: &str| Placement::Static(text.parse().expect("a selection"));
    let error = start(&|config| config.placement = selection("3,99")).await.to_string();
    assert!(error.contains("expert 99") && error.contains("16"), "{error}");
    let error = start(&|config| config.placement = selection("7:1")).await.to_string();
    assert!(error.contains("layer 7") && error.contains("0 to 3"), "{error}");
    let error = start(&|config| config.model_dir = "/nowhere".into()).await;
    assert!(matches!(error, StartError::Open(_)), "{error}");
    assert!(error.to_string().contains("/nowhere"), "{error}");
    let small = SlotConfig { slot_bytes: 5000, num_frames: 2 };
    let error = start(&|config| config.slot = small).await.to_string();
    assert!(error.contains("5000") && error.contains("4096"), "{error}");
    let error = start(&|config| {
        config.placement =
            Placement::ControlPlane { url: "http://127.0.0.1:9".into(), token: None };
        config.register_timeout = Duration::from_millis(200);
    })
    .await
    .to_string();
    assert!(error.contains("http://127.0.0.1:9"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn progress_of_loading_is_reported_to_the_last_expert() {
    let (sender, receiver) = std::sync::mpsc::channel();
    let placement = Placement::Static("0-3".parse().expect("a selection"));
    let mut config = ServerConfig::new(tiny_moe(), "p", placement);
    config.num_threads = 1;
    let server = ExpertServer::start(config, move |progress| {
        // The receiver outlives the load.
        let _ = sender.send(progress);
    })
    .await
    .expect("the server starts");
    let reports: Vec<_> = receiver.iter().collect();
    assert_eq!(reports.len(), 16);
    let last = reports.last().expect("a report");
    assert_eq!((last.num_loaded, last.num_experts), (16, 16));
    assert_eq!(last.loaded_bytes, server.expert_bytes());
    server.shutdown().await;
}

/// Reports the cost without a check, because the load of the machine changes it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_cost_of_an_idle_server_is_reported() {
    let reference = Reference::open();
    let shape = reference.shape;
    let server = start_server("idle", ExpertSelection::All, |_| {}).await;
    let mut links = Vec::new();
    for id in 0..8 {
        links.push(join(server.data_addr(), shape, id).await);
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    let sleeps = || metric(server.metrics(), "switchyard_server_sleeps_total");
    let (began, cpu, slept) = (Instant::now(), data_thread_ns(), sleeps());
    tokio::time::sleep(Duration::from_secs(2)).await;
    let share = (data_thread_ns() - cpu) as f64 / began.elapsed().as_nanos() as f64;
    println!(
        "idle data thread with 8 links: {:.4} % of a core, {} wake-ups in 2 s",
        share * 100.0,
        sleeps() - slept
    );
    server.shutdown().await;
}

/// CPU time of the data thread so far.
fn data_thread_ns() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").expect("proc");
    let cpu = tasks.filter_map(Result::ok).filter_map(|task| {
        let name = std::fs::read_to_string(task.path().join("comm")).ok()?;
        let stat = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        let is_data = name.starts_with("switchyard-data");
        is_data.then(|| stat.split(' ').next()?.parse::<u64>().ok()).flatten()
    });
    cpu.sum()
}

/// The next client is admitted once its memory is free.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_place_of_a_client_is_free_when_its_memory_is() {
    let kind = TransportKind::Verbs;
    let network = || {
        let network = StandIn::new(kind, "slow-to-end");
        network.filter_next(0);
        network
    };
    let (near, far) = (network(), network());
    let transports = |network: &Arc<StandIn>| Transports {
        kinds: vec![kind],
        networks: vec![Arc::clone(network) as _],
        ..Transports::default()
    };
    let server = start_server("alpha", ExpertSelection::All, |config| {
        config.transports = transports(&far);
        config.limits.max_links = 1;
    })
    .await;
    let shape = Reference::open().shape;
    let join = async |id| {
        let Transports { kinds: transports, networks, .. } = transports(&near);
        let config = ConnectConfig { transports, networks, ..ConnectConfig::default() };
        connect(server.data_addr(), hello(shape, id), config).await
    };
    let is_full = |error: &ConnectError| error.reject().map(|r| r.code) == Some(RejectCode::FULL);
    let first = join(1).await.expect("connected");
    far.hold_ends(true);
    drop(first);
    eventually_async("its memory goes", || far.ends() != (0, 0)).await;
    assert_eq!(server.num_links(), 0);
    assert!(is_full(&join(2).await.expect_err("its place is taken")));
    assert_eq!(far.ends(), (1, 0), "it was not waited for");
    far.hold_ends(false);
    let until = Instant::now() + PATIENCE;
    while let Err(error) = join(2).await {
        assert!(is_full(&error) && Instant::now() < until, "{error}");
    }
    server.shutdown().await;
}

async fn eventually_async(what: &str, is_so: impl Fn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < until, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Monitors ask a few times a second. A flood is refused, and another address is answered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_requests_is_refused() {
    let server = start_server("s0", ExpertSelection::EveryLayer(vec![3]), |config| {
        config.metrics_addr = Some(([127, 0, 0, 1], 0).into());
    })
    .await;
    let addr = server.metrics_addr().expect("metrics are served");
    let mut stream = TcpStream::connect(addr).await.expect("connected");
    let request = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n";
    let mut answer = [0; 4096];
    let mut refused = None;
    // The burst is 200 requests, and 100 more come each second.
    for _ in 0..100_000 {
        stream.write_all(request).await.expect("sent");
        let len = stream.read(&mut answer).await.expect("an answer");
        let text = String::from_utf8_lossy(&answer[..len]).into_owned();
        if text.starts_with("HTTP/1.1 429") {
            refused = Some(text);
            break;
        }
        assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    }
    let refused = refused.expect("a flood is refused");
    assert!(
        refused.contains("retry-after: ") && refused.contains("too many requests"),
        "{refused}"
    );
    let limited = metric(server.metrics(), "switchyard_server_requests_limited_total");
    assert_eq!(limited, 1.0);
    let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
    socket.bind(([127, 0, 0, 2], 0).into()).expect("another address");
    let mut other = socket.connect(addr).await.expect("connected");
    other.write_all(request).await.expect("sent");
    let len = other.read(&mut answer).await.expect("an answer");
    assert!(answer[..len].starts_with(b"HTTP/1.1 200"));
    server.shutdown().await;
}
