//! Servers with tokens of their own read weights of each other over TLS and with tickets, and attackers read nothing.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use control_api::{TicketRequest, TicketRole};
use message_engine::{ConnectError, ConnectOptions};
use p2p_core::bootstrap::TicketSource;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use trust::Role;
use trust::certs::Authority;
use trust::ticket::{Claims, SecretKey, UnixTime};
use trust::tls::Tls;
use trust::tokens::{self, TokenEntry};

use super::*;
use crate::attackers::{Shows, issue, proves, tls_relay};

/// A fleet with a token file instead of a shared token, and certificates.
struct Secured {
    fleet: Fleet,
    dir: TempDir,
    tls: Tls,
}

impl Secured {
    async fn start() -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        // The file must be there before the control plane starts.
        token(&dir, "first", Role::Server);
        let mut config = ControlConfig::new("127.0.0.1:0", 3, 3);
        config.tokens = Some(dir.path().join("tokens"));
        let fleet = Fleet::start(config).await;
        let authority = Authority::generate().expect("an authority");
        let tls = issue(&authority, dir.path(), "host", "127.0.0.1");
        Self { fleet, dir, tls }
    }

    /// A server with a token and a secret of its own.
    async fn server(&self, name: &str, model: &Path, from: WeightsFrom) -> RunningServer {
        let own = token(&self.dir, name, Role::Server);
        let mut config = self.fleet.config(name, model, from);
        config.placement =
            Placement::ControlPlane { url: self.fleet.url.clone(), token: Some(own.clone()) };
        config.secret = Some(Secret::new(own));
        config.tickets = TicketMode::Required;
        config.security.tls = Some(self.tls.clone());
        start_known(&self.client("first"), config).await
    }

    fn client(&self, name: &str) -> ControlClient {
        let token = std::fs::read_to_string(self.dir.path().join(name)).expect("a token");
        ControlClient::new(&self.fleet.url, Some(token)).expect("a client")
    }

    fn engine(&self, is_secured: bool) -> Engine {
        let tls = is_secured.then(|| self.tls.clone());
        Engine::start(EngineConfig { tls, ..EngineConfig::local() }).expect("an engine")
    }
}

/// Adds a token to the file of the control plane, and keeps it in a file of its own.
fn token(dir: &TempDir, name: &str, role: Role) -> String {
    let token = tokens::generate();
    let entry = TokenEntry::new(name, role, &token, None).expect("an entry");
    tokens::add(&dir.path().join("tokens"), &entry).expect("added");
    std::fs::write(dir.path().join(name), &token).expect("written");
    token
}

/// Starts a server once the control plane has read its token.
async fn start_known(control: &ControlClient, config: ServerConfig) -> RunningServer {
    let Placement::ControlPlane { token, .. } = &config.placement else { panic!("a member") };
    let own = ControlClient::new(&control.base_url(), token.clone()).expect("a client");
    until("the control plane knows the token", async || own.whoami().await.is_ok()).await;
    start(config).await
}

async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let limit = deadline();
    while !holds().await {
        assert!(Instant::now() < limit, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn deadline() -> Instant {
    Instant::now() + PATIENCE
}

/// Connects to a source, and returns its refusal.
fn refusal(engine: &Engine, addr: SocketAddr, shows: Option<Shows>) -> String {
    let tickets = shows.map(|shows| Arc::new(shows) as Arc<dyn TicketSource>);
    let options = ConnectOptions { tickets, ..ConnectOptions::default() };
    match engine.connect_with(addr, options, deadline()) {
        Err(error @ (ConnectError::Rejected { .. } | ConnectError::Tls { .. })) => {
            error.to_string()
        }
        other => panic!("a refusal was expected, not {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_with_tokens_of_their_own_read_weights_and_attackers_do_not() {
    let mut rng = seeded();
    let folders = Folders::random(&mut rng, Preset::TinyQwen3Moe);
    let secured = Secured::start().await;
    let a = secured.server("a", &folders.full, WeightsFrom::Disk).await;
    // The longest name that a server can have.
    let long = "b".repeat(128);
    let b = secured.server(&long, &folders.bare, WeightsFrom::Peers).await;
    assert_eq!(b.holds(), a.holds());
    assert_eq!(read_bytes(&b, "peer"), b.expert_bytes() as f64);
    assert_eq!(sent_bytes(&a), b.expert_bytes() as f64);

    let members = secured.client("first").members().await.expect("members");
    let (target, other) = (&members[0], &members[1]);
    let (name, incarnation) = (&*target.name, target.incarnation);
    let addr: SocketAddr = target.weights_addr.as_ref().expect("a source").parse().expect("one");
    let ask = async |holder: &str, role, key: &SecretKey| {
        let request = TicketRequest::new(holder.to_owned(), key.public().to_string());
        let request = TicketRequest { role, ..request };
        secured.client(holder).ticket(&request).await.expect("a ticket").ticket
    };
    let [reader, thief] = [(); 2].map(|()| Arc::new(SecretKey::generate().expect("a key")));
    token(&secured.dir, "engine", Role::Client);
    let engine_client = secured.client("engine");
    until("the client's token is known", async || engine_client.whoami().await.is_ok()).await;
    let good = ask(&long, TicketRole::Server, &reader).await;
    let of_client = ask("engine", TicketRole::Client, &reader).await;
    let foreign = SecretKey::generate().expect("a key");
    let fleet_id = secured.client("first").placement().await.expect("a table").cluster_id;
    let now = UnixTime::from(SystemTime::now());
    let life = Duration::from_secs(600);
    let forged = Claims {
        role: Role::Server,
        ..Claims::new(fleet_id, "b".to_owned(), thief.public().clone(), 9, now, life)
    };
    let forged = forged.sign(&foreign).expect("signed");

    let (engine, plain) = (secured.engine(true), secured.engine(false));
    let refused = || metric(a.metrics(), "switchyard_server_weights_refused_total");
    let before = refused();
    let mut num_attacks = 0.0;
    for _ in 0..5 {
        let with =
            |ticket: &str, key, server, incarnation| Some(proves(ticket, key, server, incarnation));
        let attacks = [
            (None, "no ticket was shown"),
            (with("v4.public.AA", &reader, name, incarnation), "cannot be read"),
            (with(&forged, &thief, name, incarnation), "does not know"),
            (with(&of_client, &reader, name, incarnation), "for the role client"),
            // Stolen, and swapped: meant for another server, or for an earlier process.
            (with(&good, &thief, name, incarnation), "does not fit"),
            (with(&good, &reader, &other.name, other.incarnation), "does not fit"),
            (with(&good, &reader, name, incarnation ^ 1), "does not fit"),
        ];
        for (shows, words) in attacks {
            let error = refusal(&engine, addr, shows);
            assert!(error.contains(words), "{words}: {error}");
            num_attacks += 1.0;
        }
        // A downgrade to plain text, with and without a good ticket.
        for shows in [None, with(&good, &reader, name, incarnation)] {
            let error = refusal(&plain, addr, shows);
            assert!(error.contains("does not speak TLS"), "{error}");
            num_attacks += 1.0;
        }
    }
    until("all refusals are counted", async || refused() == before + num_attacks).await;

    // Only a server gets a ticket that opens the port.
    let request = TicketRequest::new("engine".to_owned(), reader.public().to_string());
    let request = TicketRequest { role: TicketRole::Server, ..request };
    let error = engine_client.ticket(&request).await.expect_err("a client's token");
    assert_eq!(error.code(), Some(control_api::code::FORBIDDEN), "{error}");

    // The good ticket opens the port once for each proof. A recorded proof fits no other handshake.
    let recorded = Arc::new(Mutex::new(None));
    let (inner, sink) = (proves(&good, &reader, name, incarnation), Arc::clone(&recorded));
    let source = Shows(Box::new(move |binding| {
        let shown = (inner.0)(binding);
        *sink.lock().expect("the lock") = Some(shown.clone());
        shown
    }));
    let tickets = Some(Arc::new(source) as Arc<dyn TicketSource>);
    let options = ConnectOptions { tickets, ..ConnectOptions::default() };
    engine.connect_with(addr, options, deadline()).expect("the port admits a server");
    let shown = recorded.lock().expect("the lock").take().expect("a handshake");
    let again = Shows(Box::new(move |_| shown.clone()));
    assert!(refusal(&engine, addr, Some(again)).contains("does not fit"));

    // A relay with a valid certificate for the source's address, which ends TLS on both sides.
    let (relay, _) = tls_relay(secured.tls.clone(), addr).await;
    let error = refusal(&engine, relay, Some(proves(&good, &reader, name, incarnation)));
    assert!(error.contains("does not fit"), "{error}");

    // Revoked tickets, and none but new ones serve from then on.
    let operator = token(&secured.dir, "ops", Role::Operator);
    let operator = ControlClient::new(&secured.fleet.url, Some(operator)).expect("a client");
    until("revoked", async || operator.revoke_tickets().await.is_ok()).await;
    until("the server knows of the revocation", async || {
        let shows = proves(&good, &reader, name, incarnation);
        let tickets = Some(Arc::new(shows) as Arc<dyn TicketSource>);
        let options = ConnectOptions { tickets, ..ConnectOptions::default() };
        let outcome = engine.connect_with(addr, options, deadline());
        outcome.is_err_and(|error| error.to_string().contains("was revoked"))
    })
    .await;
    let c = secured.server("c", &folders.bare, WeightsFrom::Peers).await;
    assert_eq!(c.holds(), a.holds());
    for server in [a, b, c] {
        server.shutdown().await;
    }
}

/// Passes bytes on between peers and `target`, and records the bytes of the peers.
async fn recording_relay(target: SocketAddr) -> (SocketAddr, Arc<Mutex<Vec<u8>>>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let addr = listener.local_addr().expect("an address");
    let record = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&record);
    tokio::spawn(async move {
        while let Ok((near, _)) = listener.accept().await {
            let far = tokio::net::TcpStream::connect(target).await.expect("the target");
            let ((mut near_in, mut near_out), (mut far_in, mut far_out)) =
                (near.into_split(), far.into_split());
            tokio::spawn(async move { tokio::io::copy(&mut far_in, &mut near_out).await });
            let sink = Arc::clone(&sink);
            tokio::spawn(async move {
                let mut bytes = vec![0; 4096];
                while let Ok(got @ 1..) = near_in.read(&mut bytes).await {
                    sink.lock().expect("the lock").extend_from_slice(&bytes[..got]);
                    far_out.write_all(&bytes[..got]).await.ok();
                }
            });
        }
    });
    (addr, record)
}

/// Whether `bytes` contain `text`.
fn has(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

/// A fleet without TLS reads with tickets, too. A member that records the bytes of readers learns no secret. Recorded
/// bytes open nothing when they are sent again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plain_fleet_on_loopback_reads_with_tickets_and_shows_no_secret() {
    // Derived from the token below.
    const SECRET: &str = "2e52a438bf02c78a2f6e4427b23d570ca266846af6a9b2cc87641ad15b8a84ba";
    const TOKEN: &str = "sesame";
    let mut rng = seeded();
    let folders = Folders::random(&mut rng, Preset::TinyQwen3Moe);
    let mut control = ControlConfig::new("127.0.0.1:0", 4, 4);
    control.token = Some(TOKEN.to_owned());
    let fleet = Fleet::start(control).await;
    let with_tickets = |name, dir: &Path, from| {
        let config = fleet.config(name, dir, from);
        start(ServerConfig { tickets: TicketMode::Required, ..config })
    };
    let a = with_tickets("a", &folders.full, WeightsFrom::Disk).await;
    let source = fleet.members().await.remove(0);
    let addr: SocketAddr = source.weights_addr.expect("a source").parse().expect("an address");
    let (spy_addr, record) = recording_relay(addr).await;
    let checkpoint = checkpoint::Checkpoint::open(&folders.full).expect("it opens");
    let _spy = raw::register(&fleet.client(), &checkpoint, "spy", spy_addr).await;

    let b = with_tickets("b", &folders.bare, WeightsFrom::Peers).await;
    assert_eq!(b.holds(), a.holds());
    let bytes = std::mem::take(&mut *record.lock().expect("the lock"));
    assert!(has(&bytes, "v4.public."), "the spy has seen no ticket");
    assert!(!has(&bytes, SECRET) && !has(&bytes, TOKEN), "a server has shown a secret");
    // A server that shows the secret of the shared token is refused.
    let mut config = fleet.config("c", &folders.bare, WeightsFrom::Peers);
    config.weights.peer_timeout = Duration::from_millis(500);
    let error = ExpertServer::start(config, |_| {}).await.expect_err("refused").to_string();
    assert!(error.contains("no ticket was shown"), "{error}");
    let bytes = std::mem::take(&mut *record.lock().expect("the lock"));
    assert!(has(&bytes, SECRET) && !has(&bytes, TOKEN), "the spy has not seen the secret");

    // Through the relay, with a proof for the source itself.
    let key = Arc::new(SecretKey::generate().expect("a key"));
    let request = TicketRequest::new("reader".to_owned(), key.public().to_string());
    let request = TicketRequest { role: TicketRole::Server, ..request };
    let ticket = fleet.client().ticket(&request).await.expect("a ticket").ticket;
    let engine = Engine::start(EngineConfig::local()).expect("an engine");
    let shows = proves(&ticket, &key, &source.name, source.incarnation);
    let tickets = Some(Arc::new(shows) as Arc<dyn TicketSource>);
    let options = ConnectOptions { tickets, ..ConnectOptions::default() };
    let connection = engine.connect_with(spy_addr, options, deadline()).expect("admitted");
    let bytes = record.lock().expect("the lock").clone();
    let mut again = tokio::net::TcpStream::connect(addr).await.expect("the source");
    again.write_all(&bytes).await.expect("sent");
    let mut answer = Vec::new();
    let reading = async {
        // A reset may follow the refusal.
        while let Ok(1..) = again.read_buf(&mut answer).await {}
    };
    tokio::time::timeout(PATIENCE, reading).await.expect("the source ends the connection");
    assert!(has(&answer, "used before"), "{}", String::from_utf8_lossy(&answer));
    assert!(connection.closed().is_none(), "the recorded connection goes on");
    for server in [a, b] {
        server.shutdown().await;
    }
}
