//! Attacks on a real listener behind the gate, while a client that has tickets comes and goes.

#[path = "../../tests/it/attackers.rs"]
mod attackers;
#[allow(dead_code, reason = "other tests use more of it")]
#[path = "../../../p2p-core/tests/bootstrap/stand_in.rs"]
mod stand_in;

use std::net::SocketAddr;
use std::sync::Mutex as StdMutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use control_api::TicketKey;
use p2p_core::bootstrap::wire::{
    HEADER_BYTES, KIND_REJECT, decode_header, decode_reject, encode_ticket,
};
use p2p_core::bootstrap::{
    ConnectConfig, ConnectError, Connection, Listener, ListenerConfig, ListenerStats, PeerHello,
    TicketSource, connect,
};
use p2p_core::network::Network;
use p2p_core::{SlotConfig, TransportKind};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use trust::certs::Authority;
use trust::ticket::{CLOCK_SKEW, Claims, DEFAULT_LIFE, SecretKey, prove};
use trust::tls::Tls;

use self::attackers::{Shows, issue, proves, tls_relay};
use self::stand_in::StandIn;
use super::*;

const SLOT: SlotConfig = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
const SERVER: &str = "server-0";
const INCARNATION: u64 = 7;
const FLEET: &str = "fleet-a";
const LEAST_EPOCH: u64 = 3;
const PATIENCE: Duration = Duration::from_secs(60);

/// A control plane's key, and the ways to sign with it.
struct Signer(SecretKey);

impl Signer {
    fn new() -> Self {
        Self(SecretKey::generate().unwrap())
    }

    fn claims(client: &SecretKey) -> Claims {
        let key = client.public().clone();
        let now = SystemTime::now().into();
        Claims::new(FLEET.to_owned(), "client".to_owned(), key, LEAST_EPOCH, now, DEFAULT_LIFE)
    }

    fn ticket(&self, client: &SecretKey, change: impl FnOnce(&mut Claims)) -> String {
        let mut claims = Self::claims(client);
        change(&mut claims);
        claims.sign(&self.0).unwrap()
    }
}

/// A listener behind a gate. It answers each frame of its peers by reading it.
struct Site {
    addr: SocketAddr,
    stats: Arc<ListenerStats>,
    network: Arc<StandIn>,
    lease: watch::Sender<LeaseState>,
}

impl Site {
    async fn start(signer: &Signer) -> Self {
        Self::start_secured(signer, None).await
    }

    async fn start_secured(signer: &Signer, tls: Option<Tls>) -> Self {
        let network = StandIn::new(TransportKind::Verbs, "stand-in");
        let gate = Arc::new(TicketGate::new(SERVER.to_owned(), Role::Client));
        let config = ListenerConfig {
            slot: SLOT,
            transports: vec![TransportKind::Verbs, TransportKind::Local, TransportKind::Shm],
            networks: vec![Arc::clone(&network) as Arc<dyn Network>],
            tickets: Some(Arc::clone(&gate) as Arc<dyn TicketCheck>),
            tls,
            ..ListenerConfig::default()
        };
        let mut state = LeaseState::default();
        state.ticket_keys = Some(Arc::new(keys(signer, DEFAULT_LIFE)));
        let lease = watch::Sender::new(state);
        gate.follow(INCARNATION, lease.subscribe());
        let listener = Listener::bind("127.0.0.1:0", config).await.unwrap();
        let (addr, stats) = (listener.local_addr(), listener.stats());
        let (peers, mut arrived) = mpsc::unbounded_channel::<Connection>();
        tokio::spawn(listener.serve(
            |_| Ok(Vec::new()),
            move |peer| drop(peers.send(peer)),
            std::future::pending(),
        ));
        tokio::spawn(async move {
            while let Some(mut peer) = arrived.recv().await {
                tokio::spawn(async move {
                    while peer.liveness.closed_now().is_none() {
                        if let Ok(Some(_)) = peer.channel.try_next() {
                            peer.channel.release().unwrap();
                            break;
                        }
                        tokio::time::sleep(Duration::from_micros(200)).await;
                    }
                    peer.liveness.closed().await;
                });
            }
        });
        Self { addr, stats, network, lease }
    }

    fn welcomed(&self) -> u64 {
        self.stats.welcomed.load(Ordering::Relaxed)
    }
}

fn keys(signer: &Signer, life: Duration) -> TicketKeys {
    let expires_at = UnixTime::from(SystemTime::now()).plus(life).0;
    let key = TicketKey { key: signer.0.public().to_string(), expires_at };
    TicketKeys { fleet: FLEET.to_owned(), keys: vec![key], least_epoch: LEAST_EPOCH, refresh_ms: 0 }
}

fn config(source: Option<Shows>, kinds: &[TransportKind], site: &Site) -> ConnectConfig {
    ConnectConfig {
        slot: SLOT,
        transports: kinds.to_vec(),
        networks: vec![Arc::clone(&site.network) as Arc<dyn Network>],
        tickets: source.map(|source| Arc::new(source) as Arc<dyn TicketSource>),
        timeout: PATIENCE,
        ..ConnectConfig::default()
    }
}

fn hello() -> PeerHello {
    PeerHello { peer_id: rand::random(), generation: 1, payload: b"payload".to_vec() }
}

async fn refusal(addr: SocketAddr, config: ConnectConfig) -> Reject {
    match connect(addr, hello(), config).await {
        Err(ConnectError::Rejected { reject, .. }) => reject,
        other => panic!("a refusal was expected, not {other:?}"),
    }
}

/// The legitimate client: connects over shared memory, writes a frame, sees it read, and leaves.
async fn visit(site: &Site, signer: &Signer, client: &Arc<SecretKey>) {
    let ticket = signer.ticket(client, |_| {});
    let source = proves(ticket, client, SERVER, INCARNATION);
    let connected = connect(site.addr, hello(), config(Some(source), &[TransportKind::Shm], site));
    let mut connection = connected.await.expect("a legitimate client is admitted");
    let frame = connection.channel.try_reserve().unwrap().expect("a free frame");
    connection.channel.write_view(&frame).put_bytes(0, b"frame").unwrap();
    connection.channel.publish(frame, 5).unwrap();
    connection.liveness.close();
}

/// An attack with a ticket, and a word of the refusal that is expected.
type Attack = (&'static str, Box<dyn Fn() -> Option<Shows> + Send + Sync>);

/// Every ticket that must not be admitted.
fn attacks(signer: &Arc<Signer>, victim: &Arc<SecretKey>) -> Vec<Attack> {
    let thief = Arc::new(SecretKey::generate().unwrap());
    let foreign = Arc::new(Signer::new());
    let now = UnixTime::from(SystemTime::now());
    let skew = CLOCK_SKEW + Duration::from_secs(30);
    let signed = |expected: &'static str, change: fn(&mut Claims, UnixTime, Duration)| -> Attack {
        let (signer, victim) = (Arc::clone(signer), Arc::clone(victim));
        let attack = move || {
            let ticket = signer.ticket(&victim, |claims| change(claims, now, skew));
            Some(proves(ticket, &victim, SERVER, INCARNATION))
        };
        (expected, Box::new(attack))
    };
    let meant_for = |server: &'static str, incarnation: u64| -> Attack {
        let (signer, victim) = (Arc::clone(signer), Arc::clone(victim));
        let attack = move || {
            let ticket = signer.ticket(&victim, |_| {});
            Some(proves(ticket, &victim, server, incarnation))
        };
        ("does not fit", Box::new(attack))
    };
    let text = |expected, ticket: &'static str| -> Attack {
        let shown = ShownTicket { ticket: ticket.to_owned(), proof: ticket.to_owned() };
        (
            expected,
            Box::new(move || {
                let shown = shown.clone();
                Some(Shows(Box::new(move |_| shown.clone())))
            }),
        )
    };
    let mut all = vec![
        text("cannot be read", ""),
        text("cannot be read", "v4.public.AAAA"),
        text("cannot be read", "sesame"),
        signed("expired", |claims, now, skew| {
            claims.not_before = now.minus(DEFAULT_LIFE + skew);
            claims.expires_at = now.minus(skew);
        }),
        signed("counts from", |claims, now, skew| claims.not_before = now.plus(skew)),
        signed("revoked", |claims, _, _| claims.epoch = LEAST_EPOCH - 1),
        signed("another fleet", |claims, _, _| claims.fleet = "fleet-b".to_owned()),
        // Tickets of the victim for other servers, which those pass on.
        meant_for("server-1", INCARNATION),
        meant_for(SERVER, INCARNATION + 1),
    ];
    all.push(("no ticket", Box::new(|| None)));
    {
        let (foreign, thief) = (Arc::clone(&foreign), Arc::clone(&thief));
        all.push((
            "does not know",
            Box::new(move || {
                let ticket = foreign.ticket(&thief, |_| {});
                Some(proves(ticket, &thief, SERVER, INCARNATION))
            }),
        ));
    }
    {
        let (signer, foreign, thief) = (Arc::clone(signer), foreign, Arc::clone(&thief));
        all.push((
            "signature is wrong",
            Box::new(move || {
                let (ours, theirs) =
                    (foreign.ticket(&thief, |_| {}), signer.ticket(&thief, |_| {}));
                let (body, _) = ours.rsplit_once('.').unwrap();
                let (_, footer) = theirs.rsplit_once('.').unwrap();
                let forged = format!("{body}.{footer}");
                Some(proves(forged, &thief, SERVER, INCARNATION))
            }),
        ));
    }
    {
        // The stolen ticket, with the thief's own key.
        let (signer, victim) = (Arc::clone(signer), Arc::clone(victim));
        all.push((
            "does not fit",
            Box::new(move || {
                let ticket = signer.ticket(&victim, |_| {});
                Some(proves(ticket, &thief, SERVER, INCARNATION))
            }),
        ));
    }
    {
        // A proof for another TLS connection: a relay at the server's own address.
        let (signer, victim) = (Arc::clone(signer), Arc::clone(victim));
        all.push((
            "does not fit",
            Box::new(move || {
                let (ticket, victim) = (signer.ticket(&victim, |_| {}), Arc::clone(&victim));
                Some(Shows(Box::new(move |binding| {
                    let channel = Some([1; 32]);
                    let hello = binding.hello;
                    let handshake =
                        Handshake { server: SERVER, incarnation: INCARNATION, channel, hello };
                    let proof = prove(&ticket, &handshake, &victim).unwrap();
                    ShownTicket { ticket: ticket.clone(), proof }
                })))
            }),
        ));
    }
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_attack_gets_a_key_and_the_legitimate_client_goes_on() {
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let (signer, victim) = (Arc::new(Signer::new()), Arc::new(SecretKey::generate().unwrap()));
    let site = Arc::new(Site::start(&signer).await);
    let alone = visits(&site, &signer, &victim, |num| num < 50).await;
    let is_over = Arc::new(AtomicBool::new(false));
    let legitimate = tokio::spawn({
        let (site, signer, victim) = (Arc::clone(&site), Arc::clone(&signer), Arc::clone(&victim));
        let is_over = Arc::clone(&is_over);
        async move { visits(&site, &signer, &victim, |_| !is_over.load(Ordering::Relaxed)).await }
    });
    let kinds = [[TransportKind::Verbs], [TransportKind::Local], [TransportKind::Shm]];
    let mut num_attacks = 0;
    for _ in 0..5 {
        let mut all = attacks(&signer, &victim);
        all.shuffle(&mut rng);
        for (expected, attack) in &all {
            for kind in &kinds {
                let reject = refusal(site.addr, config(attack(), kind, &site)).await;
                assert_eq!(reject.code, RejectCode::TICKET, "{expected}: {reject}");
                assert!(reject.message.contains(expected), "{expected}: {reject}");
                num_attacks += 1;
            }
        }
    }
    is_over.store(true, Ordering::Relaxed);
    let attacked = legitimate.await.expect("no visit fails");
    let num_visits = (alone.len() + attacked.len()) as u64;
    assert_eq!(site.welcomed(), num_visits, "only the legitimate client got keys");
    assert_eq!(site.network.opened(), 0, "no network was opened for an attack");
    println!(
        "{num_attacks} attacks got 0 keys; visits: {} alone with p99 {:?}, {} under attack with p99 {:?}",
        alone.len(),
        p99(&alone),
        attacked.len(),
        p99(&attacked)
    );
}

async fn visits(
    site: &Site,
    signer: &Signer,
    client: &Arc<SecretKey>,
    goes_on: impl Fn(usize) -> bool,
) -> Vec<Duration> {
    let mut times = Vec::new();
    while goes_on(times.len()) {
        let begin = Instant::now();
        visit(site, signer, client).await;
        times.push(begin.elapsed());
    }
    times
}

fn p99(times: &[Duration]) -> Duration {
    let mut times = times.to_vec();
    times.sort_unstable();
    times.get(times.len() * 99 / 100).copied().unwrap_or_default()
}

/// Sends `bytes` as a whole handshake so far, and returns the refusal.
async fn refusal_of_bytes(addr: SocketAddr, bytes: &[u8]) -> Reject {
    let mut stream = TcpStream::connect(addr).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    let mut head = [0; HEADER_BYTES];
    stream.read_exact(&mut head).await.unwrap();
    let header = decode_header(&head).unwrap();
    assert_eq!(header.kind, KIND_REJECT, "the listener answered with another message");
    let mut body = vec![0; header.body_bytes];
    stream.read_exact(&mut body).await.unwrap();
    decode_reject(&body).unwrap()
}

/// Everything that an eavesdropper has seen of a handshake is worth nothing afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recorded_handshake_is_refused() {
    let (signer, client) = (Signer::new(), Arc::new(SecretKey::generate().unwrap()));
    let site = Site::start(&signer).await;
    let recorded = Arc::new(StdMutex::new(None));
    let inner = proves(signer.ticket(&client, |_| {}), &client, SERVER, INCARNATION);
    let sink = Arc::clone(&recorded);
    let source = Shows(Box::new(move |binding| {
        let shown = (inner.0)(binding);
        *sink.lock().unwrap() = Some((shown.clone(), binding.hello.to_vec()));
        shown
    }));
    let shm = &[TransportKind::Shm];
    let here = connect(site.addr, hello(), config(Some(source), shm, &site)).await.unwrap();
    let (shown, bytes) = recorded.lock().unwrap().take().expect("a handshake");
    for _ in 0..3 {
        let recording = [encode_ticket(&shown), bytes.clone()].concat();
        let reject = refusal_of_bytes(site.addr, &recording).await;
        assert!(reject.message.contains("used before"), "{reject}");
        // The same ticket and proof before the thief's own hello.
        let again = shown.clone();
        let stolen = Shows(Box::new(move |_| again.clone()));
        let reject = refusal(site.addr, config(Some(stolen), shm, &site)).await;
        assert!(reject.message.contains("does not fit"), "{reject}");
    }
    assert_eq!(site.welcomed(), 1);
    assert_eq!(here.liveness.closed_now(), None, "the recorded connection goes on");
}

/// A server of the fleet that passes its clients' bytes on to another server gets nothing from it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_relays_its_clients_is_refused() {
    let (signer, client) = (Signer::new(), Arc::new(SecretKey::generate().unwrap()));
    let site = Site::start(&signer).await;
    let relay = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (relay_addr, true_addr) = (relay.local_addr().unwrap(), site.addr);
    tokio::spawn(async move {
        while let Ok((mut from, _)) = relay.accept().await {
            let mut to = TcpStream::connect(true_addr).await.unwrap();
            tokio::spawn(async move {
                drop(tokio::io::copy_bidirectional(&mut from, &mut to).await);
            });
        }
    });
    // The client believes to be at the server "mallory", as its placement table says.
    let ticket = signer.ticket(&client, |_| {});
    let source = proves(ticket, &client, "mallory", 99);
    let reject = refusal(relay_addr, config(Some(source), &[TransportKind::Shm], &site)).await;
    assert!(reject.message.contains("does not fit"), "{reject}");
    assert_eq!(site.welcomed(), 0);
}

/// A relay with a valid certificate of the fleet reads everything in the middle, and gets nothing for its clients.
/// The proof covers the TLS channel that the client sees, and the server sees another one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_of_tls_is_refused_by_the_channel() {
    let (dir, authority) = (tempfile::tempdir().unwrap(), Authority::generate().unwrap());
    let (signer, client) = (Signer::new(), Arc::new(SecretKey::generate().unwrap()));
    let of_server = issue(&authority, dir.path(), "server", "127.0.0.1");
    let site = Site::start_secured(&signer, Some(of_server)).await;
    let of_client = issue(&authority, dir.path(), "client", "192.0.2.1");
    let secured = |transport| {
        let source = proves(signer.ticket(&client, |_| {}), &client, SERVER, INCARNATION);
        ConnectConfig { tls: Some(of_client.clone()), ..config(Some(source), &[transport], &site) }
    };

    // Its certificate is for another address: the client goes no further than TLS.
    let elsewhere = issue(&authority, dir.path(), "elsewhere", "192.0.2.7");
    let (addr, passed) = tls_relay(elsewhere, site.addr).await;
    match connect(addr, hello(), secured(TransportKind::Shm)).await {
        Err(ConnectError::Tls { reason, .. }) => assert!(reason.contains("192.0.2.7"), "{reason}"),
        other => panic!("an error of TLS was expected, not {other:?}"),
    }
    assert_eq!(passed.load(Ordering::Relaxed), 0);

    // It has taken over the address of the server, and has a certificate for it.
    let mallory = issue(&authority, dir.path(), "mallory", "127.0.0.1");
    let (addr, passed) = tls_relay(mallory, site.addr).await;
    for kind in [TransportKind::Shm, TransportKind::Local, TransportKind::Verbs] {
        let before = passed.load(Ordering::Relaxed);
        let reject = refusal(addr, secured(kind)).await;
        assert_eq!(reject.code, RejectCode::TICKET, "{reject}");
        assert!(reject.message.contains("does not fit"), "{reject}");
        assert!(passed.load(Ordering::Relaxed) > before + 500, "ticket and proof went through");
    }
    // A client that speaks plainly to the relay, or to the server, is refused, too.
    for addr in [addr, site.addr] {
        let plain = ConnectConfig { tls: None, ..secured(TransportKind::Shm) };
        let error = connect(addr, hello(), plain).await.expect_err("refused").to_string();
        assert!(!error.is_empty() && site.welcomed() == 0, "{error}");
    }
    assert_eq!((site.welcomed(), site.network.opened()), (0, 0));
    let connection = connect(site.addr, hello(), secured(TransportKind::Shm)).await;
    connection.expect("the client itself is admitted").liveness.close();
    assert_eq!(site.welcomed(), 1);
}

/// The keys decide, not the control plane's presence: new keys and revocations count at once, ended keys do not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_keys_count_until_they_end() {
    let (signer, client) = (Arc::new(Signer::new()), Arc::new(SecretKey::generate().unwrap()));
    let site = Site::start(&signer).await;
    visit(&site, &signer, &client).await;
    let next = Signer::new();
    let set = |keys| site.lease.send_modify(|state| state.ticket_keys = Some(Arc::new(keys)));
    let mut both = keys(&signer, DEFAULT_LIFE);
    both.keys.extend(keys(&next, DEFAULT_LIFE).keys);
    set(both.clone());
    visit(&site, &signer, &client).await;
    visit(&site, &next, &client).await;

    let show = |signer: &Signer| {
        let ticket = signer.ticket(&client, |_| {});
        let source = proves(ticket, &client, SERVER, INCARNATION);
        refusal(site.addr, config(Some(source), &[TransportKind::Shm], &site))
    };
    set(TicketKeys { least_epoch: LEAST_EPOCH + 1, ..both });
    assert!(show(&signer).await.message.contains("revoked"));
    set(keys(&next, DEFAULT_LIFE));
    assert!(show(&signer).await.message.contains("does not know"));
    let mut ended = keys(&signer, DEFAULT_LIFE);
    ended.keys[0].expires_at = UnixTime::from(SystemTime::now()).0 - 1;
    set(ended);
    assert!(show(&signer).await.message.contains("ended"));
    site.lease.send_modify(|state| state.ticket_keys = None);
    assert!(show(&signer).await.message.contains("no keys"));
    assert_eq!(site.welcomed(), 3);
}

/// A listener counts connections by the holder that the control plane has verified, not by the name that a client
/// chooses. A holder with an address stands for a whole fleet, and has no share.
#[test]
fn the_gate_names_the_holder_of_a_ticket() {
    let signer = Signer::new();
    let gate = TicketGate::new(SERVER.to_owned(), Role::Client);
    let mut state = LeaseState::default();
    state.ticket_keys = Some(Arc::new(keys(&signer, DEFAULT_LIFE)));
    let lease = watch::Sender::new(state);
    gate.follow(INCARNATION, lease.subscribe());
    let client = Arc::new(SecretKey::generate().unwrap());
    let binding = HandshakeBinding { channel: None, hello: b"hello", peer: None };
    for (holder, counted) in [
        ("engine-1", Some("engine-1")),
        ("cluster-token at 10.0.0.9", None),
        ("anonymous at 2001:db8::/64", None),
    ] {
        let ticket = signer.ticket(&client, |claims| claims.holder = holder.to_owned());
        let shown = proves(ticket, &client, SERVER, INCARNATION).show(&binding).unwrap();
        let found = gate.check(Some(&shown), &binding).expect("a good ticket");
        assert_eq!(found.as_deref(), counted);
    }
}
