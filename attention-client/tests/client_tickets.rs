//! A client and servers that ask for tickets, with a real control plane: attacks while the client computes, an outage,
//! a restart, and a revocation.

mod client_common;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use checkpoint::Checkpoint;
use client_common::{
    Request, difference, local_reference, metric, not_ready_because, poisoned, seeded, tiny_dir,
};
use control_api::{ControlClient, PlacementTable, TicketRequest};
use control_plane::Server as ControlPlane;
use expert_server::{ExpertServer, Placement, RunningServer, ServerConfig};
use p2p_core::bootstrap::{
    ConnectConfig, ConnectError, HandshakeBinding, RejectCode, ShownTicket, TicketSource, connect,
};
use p2p_core::{PeerHello, SlotConfig};
use protocol::{ClientHello, WireDtype};
use rand::rngs::StdRng;
use reference_model::LocalExperts;
use switchyard_attention_client::{ClientError, ClientModel, MoeClient};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use trust::Role;
use trust::ticket::{Handshake, SecretKey, prove};
use trust::tokens::{self, TokenEntry};

const SLOT: SlotConfig = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
const TOKEN: &str = "open-sesame";
const PATIENCE: Duration = Duration::from_secs(60);

/// A control plane that can be stopped and started again at the same address.
struct Plane {
    addr: SocketAddr,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Plane {
    async fn start(listen: &str, dir: &Path) -> Self {
        let mut config = control_plane::ServerConfig::new(listen, 2, 2);
        config.token = Some(TOKEN.to_owned());
        config.data_dir = Some(dir.to_owned());
        config.tokens = Some(dir.join("tokens"));
        let server = ControlPlane::bind(config).await.expect("the control plane binds");
        let addr = server.local_addr();
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn(async move {
            server.run(async { drop(stopped.await) }).await.expect("the control plane runs");
        });
        Self { addr, stop, task }
    }

    async fn stop(self) {
        self.stop.send(()).expect("it runs");
        self.task.await.expect("it ends well");
    }

    fn client(&self) -> ControlClient {
        ControlClient::new(&self.url(), Some(TOKEN.to_owned())).expect("a client")
    }

    fn url(&self) -> String {
        format!("http://{}", self.addr)
    }
}

/// Two servers that ask for tickets, each with every expert.
struct Fleet {
    runtime: tokio::runtime::Runtime,
    plane: Option<Plane>,
    dir: tempfile::TempDir,
    /// Token of a viewer, who gets no tickets.
    viewer: String,
    servers: Vec<RunningServer>,
    model: ClientModel,
    local: LocalExperts,
}

impl Fleet {
    fn start() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("a runtime");
        let dir = tempfile::tempdir().expect("a directory");
        let viewer = tokens::generate();
        let entry = TokenEntry::new("wall", Role::Viewer, &viewer, None).expect("an entry");
        tokens::add(&dir.path().join("tokens"), &entry).expect("added");
        let plane = runtime.block_on(Plane::start("127.0.0.1:0", dir.path()));
        let servers = (0..2).map(|idx| {
            let placement =
                Placement::ControlPlane { url: plane.url(), token: Some(TOKEN.to_owned()) };
            let mut config = ServerConfig::new(tiny_dir(), format!("server-{idx}"), placement);
            config.slot = SLOT;
            config.num_threads = 1;
            runtime.block_on(ExpertServer::start(config, |_| {})).expect("a server")
        });
        let servers: Vec<RunningServer> = servers.collect();
        let checkpoint = Arc::new(Checkpoint::open(tiny_dir()).expect("a checkpoint"));
        let model = ClientModel::with_weights_of(&checkpoint).expect("a fingerprint");
        let local = LocalExperts::new(checkpoint);
        Self { runtime, plane: Some(plane), dir, viewer, servers, model, local }
    }

    fn plane(&self) -> &Plane {
        self.plane.as_ref().expect("a control plane")
    }

    fn client(&self) -> MoeClient {
        MoeClient::builder(self.model.clone())
            .control_plane(self.plane().url(), Some(TOKEN.to_owned()))
            .slot(SLOT)
            .deadline(Duration::from_secs(10))
            .replica_wait(Duration::from_secs(10))
            .build()
            .expect("a client")
    }

    fn placement(&self) -> PlacementTable {
        self.runtime.block_on(self.plane().client().placement()).expect("a table")
    }

    /// Computes a random layer and compares it with the reference.
    fn compute(&mut self, client: &MoeClient, rng: &mut StdRng) {
        let request = Request::random(rng, &self.model, 20, 4);
        let mut out = poisoned(request.x.len());
        let layer = request.layer;
        let outcome = client.forward(layer, &request.x, &request.idx, &request.weights, &mut out);
        outcome.expect("a call of the legitimate client");
        assert!(difference(&out, &local_reference(&request, &mut self.local)) < 1e-5);
    }

    /// Welcomes that all servers have sent.
    fn welcomed(&self) -> u64 {
        let count = |server: &RunningServer| server.handshakes().welcomed.load(Ordering::Relaxed);
        self.servers.iter().map(count).sum()
    }

    fn stop_plane(&mut self) -> String {
        let plane = self.plane.take().expect("a control plane");
        let listen = plane.addr.to_string();
        self.runtime.block_on(plane.stop());
        listen
    }

    fn start_plane(&mut self, listen: &str) {
        self.plane = Some(self.runtime.block_on(Plane::start(listen, self.dir.path())));
    }
}

/// A peer that was given, or has stolen, a ticket.
#[derive(Debug)]
struct Thief {
    ticket: String,
    key: Arc<SecretKey>,
    server: String,
    incarnation: u64,
}

impl TicketSource for Thief {
    fn show(&self, binding: &HandshakeBinding<'_>) -> Result<ShownTicket, String> {
        let handshake = Handshake {
            server: &self.server,
            incarnation: self.incarnation,
            channel: binding.channel,
            hello: binding.hello,
        };
        let proof = prove(&self.ticket, &handshake, &self.key).map_err(|err| err.to_string())?;
        Ok(ShownTicket { ticket: self.ticket.clone(), proof })
    }
}

/// Connects as a raw peer. Returns the code of the refusal, or `None` if it was admitted.
async fn knock(
    addr: &str,
    model: &ClientModel,
    secret: Option<&str>,
    thief: Option<Thief>,
) -> Option<RejectCode> {
    let hello = ClientHello {
        model: model.shape,
        client_id: rand::random(),
        dtype: WireDtype::F32,
        response_dtype: WireDtype::F32,
        name: "raw".to_owned(),
    };
    let hello = PeerHello { peer_id: hello.client_id, generation: 1, payload: hello.encode() };
    let config = ConnectConfig {
        slot: SLOT,
        secret: secret.map(str::to_owned),
        tickets: thief.map(|thief| Arc::new(thief) as Arc<dyn TicketSource>),
        timeout: PATIENCE,
        ..ConnectConfig::default()
    };
    match connect(addr, hello, config).await {
        Ok(_) => None,
        Err(ConnectError::Rejected { reject, .. }) => Some(reject.code),
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn attacks_get_no_key_while_the_legitimate_client_computes() {
    let mut rng = seeded("attacks_get_no_key_while_the_legitimate_client_computes");
    let mut fleet = Fleet::start();
    let client = fleet.client();
    client.wait_ready(PATIENCE).expect("ready");
    let mut alone = Vec::new();
    for _ in 0..100 {
        let begin = Instant::now();
        fleet.compute(&client, &mut rng);
        alone.push(begin.elapsed());
    }

    let table = fleet.placement();
    assert!(table.servers.iter().all(|server| server.needs_tickets), "{table:?}");
    let servers = table.servers;
    let (victim, thief) =
        (Arc::new(SecretKey::generate().unwrap()), Arc::new(SecretKey::generate().unwrap()));
    let control = fleet.plane().client();
    let request = TicketRequest::new("victim".to_owned(), victim.public().to_string());
    let stolen = fleet.runtime.block_on(control.ticket(&request)).expect("a ticket").ticket;
    let is_over = Arc::new(AtomicBool::new(false));
    let attackers = fleet.runtime.spawn({
        let (is_over, model) = (Arc::clone(&is_over), fleet.model.clone());
        async move {
            let mut num_attacks = 0u64;
            while !is_over.load(Ordering::Relaxed) {
                for (idx, target) in servers.iter().enumerate() {
                    let other = &servers[1 - idx];
                    let with = |key: &Arc<SecretKey>, server: &str, incarnation| Thief {
                        ticket: stolen.clone(),
                        key: Arc::clone(key),
                        server: server.to_owned(),
                        incarnation,
                    };
                    let (name, incarnation) = (&target.name, target.incarnation);
                    let attacks = [
                        (None, None),
                        // The bearer token opens no server.
                        (Some(TOKEN), None),
                        (None, Some(with(&thief, name, incarnation))),
                        // The victim's own proofs for another server, and for an earlier process.
                        (None, Some(with(&victim, &other.name, other.incarnation))),
                        (None, Some(with(&victim, name, incarnation ^ 1))),
                        (
                            None,
                            Some(Thief { ticket: "v4.public.AA".into(), ..with(&victim, name, 1) }),
                        ),
                    ];
                    for (secret, thief) in attacks {
                        let refused = knock(&target.data_addr, &model, secret, thief).await;
                        assert_eq!(refused, Some(RejectCode::TICKET));
                        num_attacks += 1;
                    }
                }
            }
            num_attacks
        }
    });
    let mut attacked = Vec::new();
    let until = Instant::now() + Duration::from_secs(2);
    while attacked.len() < 100 || Instant::now() < until {
        let begin = Instant::now();
        fleet.compute(&client, &mut rng);
        attacked.push(begin.elapsed());
    }
    is_over.store(true, Ordering::Relaxed);
    let num_attacks = fleet.runtime.block_on(attackers).expect("every attack is refused");
    assert!(num_attacks > 0);
    let links = metric(&client, "switchyard_client_connects_total", Some("ok"));
    assert_eq!(fleet.welcomed() as f64, links, "a key was given to somebody else");
    assert_eq!(metric(&client, "switchyard_client_lost_requests_total", None), 0.0);
    println!(
        "{num_attacks} attacks got 0 keys; {} calls alone with p99 {:?}, {} under attack with p99 {:?}",
        alone.len(),
        p99(&mut alone),
        attacked.len(),
        p99(&mut attacked)
    );
}

fn p99(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[times.len() * 99 / 100]
}

#[test]
fn a_client_without_a_ticket_is_told_so() {
    let fleet = Fleet::start();
    // A table of the control plane, but no control plane to get a ticket from; the secret opens nothing.
    let client = MoeClient::builder(fleet.model.clone())
        .placement(fleet.placement())
        .secret(Some(TOKEN.to_owned()))
        .slot(SLOT)
        .build()
        .expect("a client");
    not_ready_because(&client, &["ticket", "no control plane"]);
    assert_eq!(fleet.welcomed(), 0);
}

/// The refusal of the control plane ends the wait, because each server asks for a ticket.
#[test]
fn a_client_whose_ticket_is_refused_learns_it_at_once() {
    let fleet = Fleet::start();
    let client = MoeClient::builder(fleet.model.clone())
        .control_plane(fleet.plane().url(), Some(fleet.viewer.clone()))
        .slot(SLOT)
        .build()
        .expect("a client");
    let long = Duration::from_secs(3600);
    let error = client.wait_ready(long).expect_err("refused");
    let ClientError::NoReplica { waited, detail, .. } = &error else { panic!("{error}") };
    assert!(*waited < long, "{error}");
    for word in ["no ticket from the control plane", "wall", "role viewer"] {
        assert!(detail.contains(word), "{word}: {detail}");
    }
    assert_eq!(fleet.welcomed(), 0);
}

/// A control plane that does not answer may come back, so the client waits for its ticket.
#[test]
fn a_client_waits_for_a_control_plane_that_does_not_answer() {
    let mut rng = seeded("a_client_waits_for_a_control_plane_that_does_not_answer");
    let mut fleet = Fleet::start();
    let (table, url) = (fleet.placement(), fleet.plane().url());
    let listen = fleet.stop_plane();
    let client = MoeClient::builder(fleet.model.clone())
        .control_plane(url, Some(TOKEN.to_owned()))
        .placement(table)
        .slot(SLOT)
        .connect_timeout(Duration::from_millis(50))
        .build()
        .expect("a client");
    not_ready_because(&client, &["no ticket from the control plane"]);
    // It stays so after many attempts.
    std::thread::sleep(Duration::from_millis(300));
    let error = client.wait_ready(Duration::from_millis(200)).expect_err("no ticket yet");
    let ClientError::NoReplica { waited, .. } = &error else { panic!("{error}") };
    assert!(*waited >= Duration::from_millis(200), "{error}");
    fleet.start_plane(&listen);
    client.wait_ready(PATIENCE).expect("ready");
    fleet.compute(&client, &mut rng);
}

#[test]
fn connections_survive_an_outage_a_restart_and_a_revocation_of_the_control_plane() {
    let mut rng = seeded("connections_survive_an_outage_a_restart_and_a_revocation");
    let mut fleet = Fleet::start();
    let client = fleet.client();
    client.wait_ready(PATIENCE).expect("ready");
    fleet.compute(&client, &mut rng);
    // A second ticket of the first leader, for a client that keeps it.
    let key = Arc::new(SecretKey::generate().unwrap());
    let request = TicketRequest::new("keeper".to_owned(), key.public().to_string());
    let control = fleet.plane().client();
    let old = fleet.runtime.block_on(control.ticket(&request)).expect("a ticket").ticket;
    let target = fleet.placement().servers[0].clone();
    let knocks = |fleet: &Fleet, ticket: &str| {
        let (server, incarnation) = (target.name.clone(), target.incarnation);
        let thief = Thief { ticket: ticket.to_owned(), key: Arc::clone(&key), server, incarnation };
        fleet.runtime.block_on(knock(&target.data_addr, &fleet.model, None, Some(thief)))
    };

    // Without the control plane, new connections are made with the tickets that are there.
    let listen = fleet.stop_plane();
    let links = metric(&client, "switchyard_client_connects_total", Some("ok"));
    client.warm_up(4, 3, PATIENCE).expect("lanes with new connections");
    assert!(metric(&client, "switchyard_client_connects_total", Some("ok")) > links);
    assert_eq!(knocks(&fleet, &old), None);

    // The next leader has another key. Tickets of both count.
    fleet.start_plane(&listen);
    let control = fleet.plane().client();
    let new = fleet.runtime.block_on(control.ticket(&request)).expect("a ticket").ticket;
    eventually("the servers know the new key", || knocks(&fleet, &new).is_none());
    assert_eq!(knocks(&fleet, &old), None, "a ticket of the first leader is still good");
    client.warm_up(4, 6, PATIENCE).expect("lanes with new connections");
    fleet.compute(&client, &mut rng);

    // A revocation ends all tickets. The client gets another one by itself, and open connections stay.
    fleet.runtime.block_on(control.revoke_tickets()).expect("revoked");
    for ticket in [&old, &new] {
        eventually("the servers know of the revocation", || {
            knocks(&fleet, ticket) == Some(RejectCode::TICKET)
        });
    }
    client.warm_up(4, 9, PATIENCE).expect("lanes with new connections");
    fleet.compute(&client, &mut rng);
    let lost = metric(&client, "switchyard_client_lost_requests_total", None);
    assert_eq!(lost, 0.0);
    let fresh = fleet.runtime.block_on(control.ticket(&request)).expect("a ticket").ticket;
    assert_eq!(knocks(&fleet, &fresh), None);
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < until, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
