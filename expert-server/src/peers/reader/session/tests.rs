//! The bytes that a reader sends before it trusts a peer.

use std::io::Read;
use std::net::{Ipv4Addr, TcpListener};

use httpd::trust::tls::Security;
use message_engine::ConnectOptions;
use rand::RngExt;

use super::super::FetchShape;
use super::*;
use crate::config::Secret;
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
    let (fingerprint, parameters) = ("f".to_owned(), "p".to_owned());
    let fetch = Fetch {
        identity: ModelIdentity { fingerprint, parameters },
        local: Ipv4Addr::LOCALHOST.into(),
        secret: Some(secret.clone()),
        security: Security::default(),
        wants_ticket: false,
        patience: HELLO_TIMEOUT,
        chunk_timeout: HELLO_TIMEOUT,
        shape: FetchShape(ExpertShape { hidden: 8, inter: 8, is_gated: true }),
    };
    let peer = Peer { name: "recorder".to_owned(), addr, options: ConnectOptions::default() };
    let opened = Session::open(&fetch, &[peer], &[(0, 0)], 1, None);
    assert!(opened.is_err(), "the peer answers nothing");
    let bytes = recording.join().expect("the recorder ends");
    assert!(contains(&bytes, secret.reveal()), "token {token}: {bytes:?}");
    assert!(!contains(&bytes, &token), "token {token}: {bytes:?}");
}
