//! The bytes that a reader sends before it trusts a peer.

use std::io::Read;
use std::net::{Ipv4Addr, TcpListener};

use control_api::LayerAssignment;
use httpd::trust::tls::Security;
use message_engine::ConnectOptions;
use rand::RngExt;

use super::super::{FetchShape, SetOnDrop};
use super::connecting::HELLO_TIMEOUT;
use super::*;
use crate::config::Secret;
use crate::peers::wire::VERSION;
use crate::peers::{ModelIdentity, WeightsSecret};

fn contains(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

/// All bytes that a connecting reader sends until it says nothing for a while. Ends the connection then.
fn hello_bytes(listener: &TcpListener, secret: &str) -> Vec<u8> {
    let (mut stream, _) = listener.accept().expect("a reader");
    let mut received = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let pause = match contains(&received, secret) {
            true => Duration::from_millis(100),
            false => HELLO_TIMEOUT,
        };
        stream.set_read_timeout(Some(pause)).expect("a timeout");
        match stream.read(&mut buffer) {
            Ok(0) | Err(_) => return received,
            Ok(len) => received.extend_from_slice(&buffer[..len]),
        }
    }
}

fn fetch_with(secret: Option<WeightsSecret>) -> Fetch {
    let (fingerprint, parameters) = ("f".to_owned(), "p".to_owned());
    Fetch {
        identity: ModelIdentity { fingerprint, parameters },
        local: Ipv4Addr::LOCALHOST.into(),
        secret,
        security: Security::default(),
        wants_ticket: false,
        patience: HELLO_TIMEOUT,
        chunk_timeout: HELLO_TIMEOUT,
        shape: FetchShape(ExpertShape { hidden: 8, inter: 8, is_gated: true }),
    }
}

/// Answers the hello of a reader, and returns the connection.
fn accept(source: &Engine) -> Connection {
    let limit = Instant::now() + LIMIT;
    source.next_notification(limit).expect("a hello");
    let connection = source.accept(limit).expect("a reader");
    let experts = vec![LayerAssignment { layer: 0, experts: vec![0] }];
    let index = Response::Index { version: VERSION, experts, device: None };
    connection.notify(&wire::encode(&index), limit).expect("sent");
    connection
}

fn peer_of(source: &Engine) -> Peer {
    let addr = source.endpoint().addr;
    Peer { name: "source".to_owned(), addr, options: ConnectOptions::default() }
}

fn engines<const N: usize>() -> [Engine; N] {
    [(); N].map(|()| Engine::start(EngineConfig::local()).expect("an engine"))
}

/// Opens a session with sources that all hold expert 0 of layer 0.
fn open(fetch: &Fetch, sources: &[Engine]) -> (Session, Vec<Connection>) {
    let peers: Vec<_> = sources.iter().map(peer_of).collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let opening = scope.spawn(|| Session::open(fetch, &peers, &[(0, 0)], 1, None, &stop));
        let connections = sources.iter().map(accept).collect();
        (opening.join().expect("it ends").expect("sources"), connections)
    })
}

fn refusal(id: u64, reason: &str) -> Vec<u8> {
    wire::encode(&Response::Refused { id: Some(id), reason: reason.to_owned() })
}

#[test]
fn a_source_answers_no_request_that_another_one_was_sent() {
    let sources = engines::<2>();
    let (session, connections) = open(&fetch_with(None), &sources);
    let [honest, other] = &*connections else { panic!("two sources") };
    let (session, is_over) = (&session, &AtomicBool::new(false));
    std::thread::scope(|scope| {
        let _end = SetOnDrop(is_over);
        scope.spawn(move || session.route_responses(is_over));
        for id in 1..20 {
            let asking = scope.spawn(move || {
                let connection = &session.sources[0].connections[0];
                session.ask(connection, &request(id, 0, 0, false), id, is_over)
            });
            let limit = Instant::now() + LIMIT;
            sources[0].next_notification(limit).expect("the request");
            other.notify(&refusal(id, "another source's"), limit).expect("sent");
            honest.notify(&refusal(id, "its own"), limit).expect("sent");
            let outcome = asking.join().expect("it ends").map(|_| ());
            assert!(
                matches!(&outcome, Err(ReadError::Refused(reason)) if reason == "its own"),
                "{outcome:?}"
            );
        }
    });
}

#[test]
fn reads_that_begin_together_go_to_different_sources() {
    let (sources, now) = (engines::<3>(), Instant::now());
    let (session, _connections) = open(&fetch_with(None), &sources);
    let choose = || match session.choose((0, 0), &[], now) {
        Choice::Peer(peer) => peer,
        _ => panic!("all hold it"),
    };
    let mut chosen = Vec::from([(); 6].map(|()| choose()));
    let mut indices: Vec<_> = chosen.iter().map(|peer| peer.idx).collect();
    indices.sort_unstable();
    assert_eq!(indices, [0, 0, 1, 1, 2, 2]);
    // The end of a read makes its source the first choice again.
    let ended = chosen.swap_remove(rand::rng().random_range(0..6)).idx;
    assert_eq!(choose().idx, ended);
}

#[test]
fn a_stop_ends_the_wait_for_an_answer() {
    let sources = engines::<1>();
    let (session, _connections) = open(&fetch_with(None), &sources);
    let (session, stop) = (&session, &AtomicBool::new(false));
    std::thread::scope(|scope| {
        let asking = scope.spawn(move || {
            session.ask(&session.sources[0].connections[0], &request(1, 0, 0, false), 1, stop)
        });
        // The source takes the request, and does not answer.
        let limit = Instant::now() + LIMIT;
        sources[0].next_notification(limit).expect("the request");
        stop.store(true, Ordering::Relaxed);
        let outcome = asking.join().expect("it ends").map(|_| ());
        assert!(matches!(outcome, Err(ReadError::Stopped)), "{outcome:?}");
        let given_back = sources[0].next_notification(limit).expect("the end of the request");
        let given_back = wire::decode(&given_back.bytes).expect("a message");
        assert!(matches!(given_back, Request::Done { id: 1 }), "{given_back:?}");
    });
}

/// The first two of four sources get more connections than one, as many as they accept.
#[test]
fn a_source_that_accepts_few_connections_is_read_over_these() {
    let mut sources = engines::<4>();
    sources[1] = Engine::start(EngineConfig { max_connections: 3, ..EngineConfig::local() })
        .expect("an engine");
    let peers = sources.each_ref().map(peer_of);
    let (fetch, stop) = (fetch_with(None), AtomicBool::new(false));
    let session = std::thread::scope(|scope| {
        let opening = scope.spawn(|| Session::open(&fetch, &peers, &[(0, 0)], 8, None, &stop));
        let _connections = sources.each_ref().map(accept);
        opening.join().expect("it ends").expect("sources")
    });
    let found: Vec<_> = session.sources.iter().map(|source| source.connections.len()).collect();
    assert_eq!(found, [8, 3, 1, 1]);
}

#[test]
fn only_bad_weights_count_as_damage_by_the_peer() {
    use crate::compute::{LoadError, WeightError};
    let late = LoadError::Device("an expert is loaded, but not yet in service".into());
    assert!(matches!(transfer::not_loaded(late), ReadError::Memory(_)));
    let source = WeightError::NotFinite { rows: 8, cols: 8, offset: 3 };
    let bad = LoadError::Weight { layer: 0, expert: 1, source };
    assert!(matches!(transfer::not_loaded(bad), ReadError::Damaged(_)));
}

#[test]
fn peers_of_this_host_are_connected_first() {
    let local = Ipv4Addr::new(192, 0, 2, 7);
    let peer = |last: u8| Peer {
        name: last.to_string(),
        addr: (Ipv4Addr::new(192, 0, 2, last), 1).into(),
        options: ConnectOptions::default(),
    };
    let sorted = nearest_first(&[9, 7, 8, 7].map(peer), local.into());
    let names: Vec<_> = sorted.iter().map(|peer| &*peer.name).collect();
    assert_eq!(names, ["7", "7", "9", "8"]);
}

#[test]
fn a_reader_shows_its_peers_the_derived_secret_and_never_the_token() {
    let token: String =
        std::iter::repeat_with(|| rand::rng().random_range('a'..='z')).take(40).collect();
    let secret = WeightsSecret::of(&Secret::new(&*token));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let addr = listener.local_addr().expect("an address");
    let shown = secret.reveal().to_owned();
    let recording = std::thread::spawn(move || hello_bytes(&listener, &shown));
    let fetch = fetch_with(Some(secret.clone()));
    let peer = Peer { name: "recorder".to_owned(), addr, options: ConnectOptions::default() };
    let opened = Session::open(&fetch, &[peer], &[(0, 0)], 1, None, &AtomicBool::new(false));
    assert!(opened.is_err(), "the peer answers nothing");
    let bytes = recording.join().expect("the recorder ends");
    assert!(contains(&bytes, secret.reveal()), "token {token}: {bytes:?}");
    assert!(!contains(&bytes, &token), "token {token}: {bytes:?}");
}

const LIMIT: Duration = Duration::from_secs(60);
