//! Servers that read their weights from the memory of other servers.

mod certificates;
mod faults;
mod gpu;
mod misdeeds;
mod raw;
mod tickets;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use checkpoint::{Checkpoint, MakeOptions, Preset, make_checkpoint};
use control_api::{ControlClient, DrainRequest, FleetGoals, MemberInfo};
use control_plane::{BalanceSettings, Server, ServerConfig as ControlConfig};
use message_engine::{Engine, EngineConfig};
use p2p_core::AnyEndpoint;
use p2p_core::bootstrap::{ConnectConfig, Connection, Liveness, PeerHello, connect};
use protocol::{ClientHello, ModelShape, ServerHello, WireDtype};
use rand::RngExt;
use rand::rngs::StdRng;
use serde_json::{Value, json};
use switchyard_expert_server::{
    ExpertServer, Placement, RunningServer, Secret, ServerConfig, StartError, TicketMode,
    WeightsFrom,
};
use tempfile::TempDir;

use self::raw::{Misdeed, RawPeer};
use crate::common::{
    PATIENCE, Reference, Request, TestClient, eventually, metric, recorded_folders, seeded,
};

pub use self::raw::{dying_peer, stopping_peer};

/// A control plane, and what servers need to join it.
struct Fleet {
    url: String,
    token: Option<String>,
    _stop: tokio::sync::oneshot::Sender<()>,
}

impl Fleet {
    async fn start(mut config: ControlConfig) -> Self {
        config.lease_ttl = Duration::from_secs(2);
        let token = config.token.clone();
        let server = Server::bind(config).await.expect("the control plane binds");
        let url = format!("http://{}", server.local_addr());
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        tokio::spawn(async move { server.run(async { drop(stopped.await) }).await });
        Self { url, token, _stop: stop }
    }

    /// Up to four servers, which all hold everything.
    async fn of_replicas() -> Self {
        Self::start(ControlConfig::new("127.0.0.1:0", 4, 4)).await
    }

    fn config(&self, name: &str, dir: &Path, from: WeightsFrom) -> ServerConfig {
        let placement =
            Placement::ControlPlane { url: self.url.clone(), token: self.token.clone() };
        let mut config = ServerConfig::new(dir, name, placement);
        config.num_threads = 1;
        config.secret = self.token.clone().map(Secret::new);
        // The raw clients of these tests have the secret.
        config.tickets = TicketMode::Off;
        config.drain_idle = Duration::from_millis(20);
        config.weights.from = from;
        config
    }

    async fn server(&self, name: &str, dir: &Path, from: WeightsFrom) -> RunningServer {
        start(self.config(name, dir, from)).await
    }

    fn client(&self) -> ControlClient {
        ControlClient::new(&self.url, self.token.clone()).expect("a client")
    }

    async fn members(&self) -> Vec<MemberInfo> {
        self.client().members().await.expect("members")
    }
}

/// Starts a server that finds no weights until an error names `reason`. An error of a slow host may name the end of its
/// patience alone.
async fn refused_start(config: ServerConfig, reason: &str) -> String {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let outcome = ExpertServer::start(config.clone(), |_| {}).await;
        let error = outcome.expect_err("no good weights").to_string();
        if error.contains(reason) {
            return error;
        }
        assert!(Instant::now() < deadline, "{error}");
    }
}

async fn start(config: ServerConfig) -> RunningServer {
    ExpertServer::start(config, |_| {}).await.expect("the server starts")
}

/// A checkpoint of random weights, and a folder with its configuration alone.
struct Folders {
    _root: TempDir,
    full: PathBuf,
    bare: PathBuf,
}

impl Folders {
    fn random(rng: &mut StdRng, preset: Preset) -> Self {
        let root = tempfile::tempdir().expect("a folder");
        let full = root.path().join("full");
        let options = MakeOptions { seed: rng.random(), ..MakeOptions::new(preset, 2) };
        make_checkpoint(&full, &options, &mut |_, _| {}).expect("written");
        let bare = bare_copy(&full, root.path());
        Self { _root: root, full, bare }
    }
}

fn bare_copy(full: &Path, root: &Path) -> PathBuf {
    let bare = root.join("bare");
    std::fs::create_dir_all(&bare).expect("a folder");
    std::fs::copy(full.join("config.json"), bare.join("config.json")).expect("copied");
    bare
}

/// A client of one server.
async fn client_of(
    server: &RunningServer,
    shape: ModelShape,
) -> (TestClient<AnyEndpoint>, Liveness) {
    let (dtype, response_dtype) = (WireDtype::F32, WireDtype::F32);
    let hello =
        ClientHello { model: shape, client_id: 5, dtype, response_dtype, name: "test".into() };
    let hello = PeerHello { peer_id: 5, generation: 3, payload: hello.encode() };
    // Servers without a secret ignore it.
    let config = ConnectConfig { secret: Some("sesame".to_owned()), ..ConnectConfig::default() };
    let connected = connect(server.data_addr(), hello, config).await;
    let Connection { channel, liveness, reply, .. } = connected.expect("connected");
    let generation = ServerHello::decode(&reply).expect("a hello").generation;
    (TestClient::new(channel, shape, 5, generation, dtype, response_dtype), liveness)
}

/// Asserts that the server answers random requests to all layers right.
async fn check_answers(server: &RunningServer, reference: &Reference, rng: &mut StdRng) {
    let (mut client, _liveness) = client_of(server, reference.shape).await;
    for _ in 0..20 {
        let mut request = Request::random(rng, &reference.shape, 7);
        let layers = reference.checkpoint.config().moe_layers();
        request.layer = layers[rng.random_range(0..layers.len())];
        tokio::task::block_in_place(|| client.round_trip(&request, reference));
    }
}

fn rows_of(client: &mut TestClient<AnyEndpoint>, request: &Request) -> Vec<f32> {
    let sequence = client.send(request);
    client.receive(sequence, request).rows.expect("rows")
}

fn num_experts(dir: &Path) -> usize {
    let checkpoint = Checkpoint::open(dir).expect("it opens");
    checkpoint.config().moe_layers().len() * checkpoint.config().num_experts as usize
}

fn read_bytes(server: &RunningServer, source: &str) -> f64 {
    let name = format!("switchyard_server_weights_read_bytes_total{{source=\"{source}\"}}");
    metric(server.metrics(), &name)
}

fn sent_bytes(server: &RunningServer) -> f64 {
    metric(server.metrics(), "switchyard_server_weights_sent_bytes_total")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_weight_files_reads_all_experts_from_peers_and_answers_right() {
    let mut rng = seeded();
    for preset in [Preset::TinyQwen3Moe, Preset::MiniDeepseekV3] {
        let folders = Folders::random(&mut rng, preset);
        let reference = Reference::of(&folders.full);
        let mut control = ControlConfig::new("127.0.0.1:0", 3, 3);
        control.token = Some("sesame".to_owned());
        let fleet = Fleet::start(control).await;
        let a = fleet.server("a", &folders.full, WeightsFrom::Disk).await;
        let b = fleet.server("b", &folders.full, WeightsFrom::Disk).await;
        let c = fleet.server("c", &folders.bare, WeightsFrom::Peers).await;
        c.serving(PATIENCE).await.expect("it serves");
        assert_eq!(c.holds(), a.holds());
        assert_eq!(c.holds().num_experts(), num_experts(&folders.full));
        assert_eq!(read_bytes(&c, "peer"), c.expert_bytes() as f64);
        assert_eq!(c.expert_bytes(), a.expert_bytes());
        assert_eq!((read_bytes(&c, "disk"), read_bytes(&a, "peer")), (0.0, 0.0));
        assert_eq!(sent_bytes(&a) + sent_bytes(&b), c.expert_bytes() as f64);
        assert!(sent_bytes(&a) > 0.0 && sent_bytes(&b) > 0.0, "both sources take part");
        // The weights are c's own: the sources may go.
        for server in [a, b] {
            server.shutdown().await;
        }
        check_answers(&c, &reference, &mut rng).await;
        // A chain: its weights came from peers, too.
        let d = fleet.server("d", &folders.bare, WeightsFrom::Peers).await;
        assert_eq!(read_bytes(&d, "peer"), c.expert_bytes() as f64);
        c.shutdown().await;
        check_answers(&d, &reference, &mut rng).await;
        d.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_format_travels_bit_by_bit() {
    let mut rng = seeded();
    let mut num_formats = 0;
    for full in recorded_folders("reference-formats") {
        let root = tempfile::tempdir().expect("a folder");
        let bare = bare_copy(&full, root.path());
        let fleet = Fleet::of_replicas().await;
        let a = fleet.server("a", &full, WeightsFrom::Disk).await;
        let b = fleet.server("b", &bare, WeightsFrom::Peers).await;
        assert_eq!((b.expert_bytes(), b.holds()), (a.expert_bytes(), a.holds()), "{full:?}");
        let checkpoint = Checkpoint::open(&full).expect("it opens");
        let shape = crate::common::shape_of(&checkpoint);
        let mut request = Request::random(&mut rng, &shape, 9);
        request.layer = checkpoint.config().moe_layers()[0];
        let mut answers = Vec::new();
        for server in [&a, &b] {
            let (mut client, _liveness) = client_of(server, shape).await;
            let rows = tokio::task::block_in_place(|| rows_of(&mut client, &request));
            answers.push(rows.iter().map(|value| value.to_bits()).collect::<Vec<_>>());
        }
        assert_eq!(answers[0], answers[1], "{full:?}");
        a.shutdown().await;
        b.shutdown().await;
        num_formats += 1;
    }
    assert!(num_formats >= 30, "{num_formats} formats only");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn peers_read_no_faster_than_the_limit_of_the_source() {
    let mut rng = seeded();
    let folders = Folders::random(&mut rng, Preset::TinyQwen3Moe);
    let fleet = Fleet::of_replicas().await;
    let mut config = fleet.config("a", &folders.full, WeightsFrom::Disk);
    // Everything takes about two seconds.
    config.weights.read_limit = 1;
    let probe = start(config.clone()).await;
    let bytes = probe.expert_bytes();
    probe.shutdown().await;
    config.weights.read_limit = bytes / 2;
    let a = start(config).await;
    let begin = Instant::now();
    let joining = tokio::spawn(start(fleet.config("c", &folders.bare, WeightsFrom::Peers)));
    let largest = (bytes as usize / num_experts(&folders.full)) as f64;
    while !joining.is_finished() {
        // The counter is read before the clock, so a slow machine cannot fail this.
        let sent = sent_bytes(&a);
        let allowed = bytes as f64 / 2.0 * begin.elapsed().as_secs_f64() + largest;
        assert!(sent <= allowed, "{sent} bytes, {allowed} allowed");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let c = joining.await.expect("it joins");
    assert_eq!(sent_bytes(&a), c.expert_bytes() as f64);
    a.shutdown().await;
    c.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_peers_the_start_fails_within_its_bound_and_says_what_to_do() {
    let mut rng = seeded();
    let folders = Folders::random(&mut rng, Preset::TinyQwen3Moe);
    let fleet = Fleet::of_replicas().await;
    let mut config = fleet.config("c", &folders.bare, WeightsFrom::Peers);
    config.weights.peer_timeout = Duration::from_millis(300);
    let start = async |config: &ServerConfig| {
        let starting = ExpertServer::start(config.clone(), |_| {});
        tokio::time::timeout(PATIENCE, starting).await.expect("a bounded wait")
    };
    let error = start(&config).await.expect_err("there is no model");
    assert!(matches!(error, StartError::NoModel { .. }), "{error}");
    assert!(error.to_string().contains("--weights-from auto"), "{error}");

    // A server that lets others read nothing.
    let mut closed = fleet.config("closed", &folders.full, WeightsFrom::Disk);
    closed.weights.read_limit = 0;
    let closed = self::start(closed).await;
    assert_eq!(fleet.members().await[0].weights_addr, None);
    let error = start(&config).await.expect_err("there is no source");
    assert!(matches!(error, StartError::Missing { .. }), "{error}");
    assert!(error.to_string().contains("no server of the fleet lets others read"), "{error}");

    // The checkpoint serves where it can.
    let auto = fleet.server("auto", &folders.full, WeightsFrom::Auto).await;
    assert_eq!(read_bytes(&auto, "disk"), auto.expert_bytes() as f64);
    let from_static = ServerConfig::new(
        &folders.full,
        "static",
        Placement::Static(switchyard_expert_server::ExpertSelection::All),
    );
    let mut from_static = from_static;
    from_static.weights.from = WeightsFrom::Peers;
    let error = start(&from_static).await.expect_err("no control plane");
    assert!(matches!(error, StartError::NoPeers { .. }), "{error}");
    for server in [closed, auto] {
        server.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_incomplete_checkpoint_with_auto_takes_everything_from_peers() {
    let mut rng = seeded();
    let folders = Folders::random(&mut rng, Preset::TinyQwen3Moe);
    let reference = Reference::of(&folders.full);
    let fleet = Fleet::of_replicas().await;
    let config = fleet.config("c", &folders.bare, WeightsFrom::Auto);
    let error = ExpertServer::start(config, |_| {}).await.expect_err("an empty fleet");
    assert!(matches!(error, StartError::Open(_)), "{error}");
    let a = fleet.server("a", &folders.full, WeightsFrom::Auto).await;
    let c = fleet.server("c", &folders.bare, WeightsFrom::Auto).await;
    assert_eq!(read_bytes(&c, "peer"), c.expert_bytes() as f64);
    check_answers(&c, &reference, &mut rng).await;
    for server in [a, c] {
        server.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rebalance_loads_from_peers_in_the_background_and_a_drain_stops_it() {
    let mut rng = seeded();
    let folders = Folders::random(&mut rng, Preset::TinyQwen3Moe);
    let reference = Reference::of(&folders.full);
    let num_experts = num_experts(&folders.full);
    let mut control = ControlConfig::new("127.0.0.1:0", 1, 1);
    let mut balance = BalanceSettings::default();
    balance.goals.min_replicas = 1;
    balance.settle = Duration::from_millis(50);
    control.balance = Some(balance);
    let fleet = Fleet::start(control).await;
    let mut config = fleet.config("a", &folders.full, WeightsFrom::Disk);
    let model_bytes: usize = reference.experts.values().flatten().map(|m| m.len() * 2).sum();
    // All experts take six seconds, so a drain comes in the middle.
    config.weights.read_limit = model_bytes as u64 / 6;
    let a = start(config).await;
    a.serving(PATIENCE).await.expect("a serves");
    assert_eq!(a.holds().num_experts(), num_experts);
    let b = fleet.server("b", &folders.bare, WeightsFrom::Peers).await;
    b.serving(PATIENCE).await.expect("b serves");
    let share = b.holds().num_experts();
    assert!(share < num_experts, "{share} experts");

    let client = fleet.client();
    client.set_goals(&FleetGoals { replicas: 2, spare: 0.0 }).await.expect("new goals");
    eventually("the first expert arrives", || b.holds().num_experts() > share);
    let member = async || {
        let members = fleet.members().await;
        members.into_iter().find(|member| member.name == "b").expect("it is a member")
    };
    let id = member().await.member_id;
    client.drain(&id, &DrainRequest::default()).await.expect("drained");
    let deadline = Instant::now() + PATIENCE;
    while b.ready().is_ok() || member().await.load.is_none_or(|load| load.loading.is_some()) {
        assert!(Instant::now() < deadline, "the load goes on");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let stopped_at = b.holds().num_experts();
    assert!(stopped_at < num_experts, "a drain stops the load");
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(b.holds().num_experts(), stopped_at, "a drained server loads nothing");

    client.resume(&id).await.expect("resumed");
    eventually("b holds everything", || b.holds().num_experts() == num_experts);
    // An expert is counted just after it is in service.
    eventually("all bytes are counted", || read_bytes(&b, "peer") == b.expert_bytes() as f64);
    a.shutdown().await;
    check_answers(&b, &reference, &mut rng).await;
    b.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_refuses_by_name_and_outlives_hostile_readers() {
    let mut rng = seeded();
    let folders = Folders::random(&mut rng, Preset::TinyQwen3Moe);
    let fleet = Fleet::of_replicas().await;
    let a = fleet.server("a", &folders.full, WeightsFrom::Disk).await;
    let addr = fleet.members().await[0].weights_addr.clone().expect("a source");
    let addr: std::net::SocketAddr = addr.parse().expect("an address");
    let checkpoint = Checkpoint::open(&folders.full).expect("it opens");
    let config = checkpoint.config();
    let layer = config.moe_layers()[0];
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let hello = json!({
        "type": "hello",
        "version": 1,
        "fingerprint": checkpoint.fingerprint().expect("experts").to_string(),
        "parameters": hex(&config.parameters_digest()),
    });
    tokio::task::block_in_place(|| {
        let soon = || Instant::now() + PATIENCE;
        let engine = Engine::start(EngineConfig::local()).expect("an engine");
        let read = |id: u32, expert: u32| json!({ "type": "read", "id": id, "layer": layer, "expert": expert });
        let refusal = |message: &Value, what: &str| {
            let connection = engine.connect(addr, soon()).expect("connected");
            raw::send(&connection, message);
            let answer = raw::receive(&engine);
            assert_eq!(answer["type"], "refused", "{answer}");
            assert!(answer["reason"].as_str().expect("a reason").contains(what), "{answer}");
        };
        refusal(&read(1, 0), "before the hello");
        for (field, value) in
            [("version", json!(2)), ("fingerprint", json!("00")), ("parameters", json!("00"))]
        {
            let mut other = hello.clone();
            other[field] = value;
            refusal(&other, "the server has");
        }
        // Bytes that are no messages, of any length that the engine takes.
        for len in [0, 1, 7, 4096] {
            let connection = engine.connect(addr, soon()).expect("connected");
            let bytes: Vec<u8> = (0..len).map(|_| rng.random()).collect();
            // The source may disconnect before it confirms.
            drop(connection.notify(&bytes, soon()));
            eventually("the source disconnects", || connection.closed().is_some());
        }

        let connection = engine.connect(addr, soon()).expect("connected");
        raw::send(&connection, &hello);
        assert_eq!(raw::receive(&engine)["type"], "index");
        for (id, message) in [(1, read(1, u32::MAX)), (2, read(2, config.num_experts))] {
            raw::send(&connection, &message);
            let answer = raw::receive(&engine);
            assert_eq!((&answer["type"], &answer["id"]), (&json!("refused"), &json!(id)));
            assert!(
                answer["reason"].as_str().expect("a reason").contains("not loaded"),
                "{answer}"
            );
        }
        // Requests of one number count as often as they come.
        for _ in 0..2 {
            raw::send(&connection, &read(5, 0));
        }
        let answers = [(); 2].map(|()| raw::receive(&engine));
        let refused = answers.iter().find(|answer| answer["type"] == "refused");
        let reason = refused.and_then(|answer| answer["reason"].as_str()).expect("a refusal");
        assert!(reason.contains("the number 5 is in use"), "{answers:?}");
        assert!(answers.iter().any(|answer| answer["type"] == "grant"), "{answers:?}");
        raw::send(&connection, &json!({ "type": "done", "id": 5 }));
        // A reader that gives nothing back gets a few grants, and no more until it does.
        let mut num_granted = 0;
        for id in 10..30 {
            raw::send(&connection, &read(id, 0));
            match raw::receive(&engine)["type"].as_str() {
                Some("grant") => num_granted += 1,
                Some("later") => {}
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(num_granted, 8);
        raw::send(&connection, &json!({ "type": "done", "id": 10 }));
        raw::send(&connection, &read(40, 0));
        assert_eq!(raw::receive(&engine)["type"], "grant");
        connection.close();
    });
    eventually("the grants of a closed connection end", || {
        metric(a.metrics(), "switchyard_server_weights_grants") == 0.0
    });
    let c = fleet.server("c", &folders.bare, WeightsFrom::Peers).await;
    assert_eq!(c.holds(), a.holds());
    for server in [a, c] {
        server.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_of_a_source_that_has_ended_fails_and_returns_nothing_as_good() {
    let mut rng = seeded();
    let folders = Folders::random(&mut rng, Preset::TinyQwen3Moe);
    let fleet = Fleet::of_replicas().await;
    let a = fleet.server("a", &folders.full, WeightsFrom::Disk).await;
    let raw = RawPeer::join(&fleet.url, "raw", &folders.full, Misdeed::FlipBit).await;
    let grant = tokio::task::block_in_place(|| raw.hold_grant());
    a.shutdown().await;
    tokio::task::block_in_place(|| {
        eventually("reads of its memory fail", || raw.read_held(&grant).is_err());
    });
}
