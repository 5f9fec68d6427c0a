//! The handshake over TLS: agreement, refusals on both sides, and the end of a connection.

use std::path::Path;

use tempfile::TempDir;
use trust::Role;
use trust::certs::{Authority, Request, validity_from_now};
use trust::tls::{ClientCertificates, Tls, TlsFiles};

use super::*;

/// The folders of a server and a client of a fresh authority.
struct Fleet(TempDir);

impl Fleet {
    fn new() -> Self {
        let (dir, authority) = (TempDir::new().unwrap(), Authority::generate().unwrap());
        for (role, addresses) in
            [(Role::Server, vec!["127.0.0.1".to_owned()]), (Role::Client, Vec::new())]
        {
            let (not_before, not_after) = validity_from_now(2);
            let request = Request { name: "n".to_owned(), role, addresses, not_before, not_after };
            authority.issue_into(&dir.path().join(role.name()), &request, false).unwrap();
        }
        Self(dir)
    }

    fn listener(&self, clients: ClientCertificates) -> ListenerConfig {
        let tls = open(&self.0.path().join("server"), clients);
        ListenerConfig { tls: Some(tls), ..listener_config() }
    }

    fn client(&self) -> ConnectConfig {
        let tls = open(&self.0.path().join("client"), ClientCertificates::Optional);
        ConnectConfig { tls: Some(tls), ..connect_config() }
    }
}

fn open(dir: &Path, clients: ClientCertificates) -> Tls {
    Tls::open(TlsFiles::in_folder(dir).unwrap(), clients).unwrap()
}

async fn insecure(addr: impl std::fmt::Display, config: ConnectConfig) -> String {
    match connect(addr.to_string(), hello(b""), config).await {
        Err(error @ ConnectError::Tls { .. }) => error.to_string(),
        other => panic!("expected an error of TLS, got {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn peers_meet_over_tls_and_leave_in_order() {
    let fleet = Fleet::new();
    let transports = vec![TransportKind::Shm];
    let config = fleet.listener(ClientCertificates::Required);
    let mut server = serve(ListenerConfig { transports: transports.clone(), ..config }).await;
    for closed_by_client in [true, false] {
        let config = ConnectConfig { transports: transports.clone(), ..fleet.client() };
        let mut here = connect(server.addr, hello(b"x"), config).await.unwrap();
        let mut there = within(server.peers.recv()).await.unwrap();
        assert_eq!(here.reply, b"re:x");
        let frame = here.channel.try_reserve().unwrap().unwrap();
        here.channel.write_view(&frame).put_bytes(100, &[77]).unwrap();
        here.channel.publish(frame, 101).unwrap();
        let frame = there.channel.try_next().unwrap().unwrap();
        let mut found = [0; 1];
        there.channel.view(&frame).copy_to(100, &mut found).unwrap();
        assert_eq!(found, [77]);
        let (leaver, other) = if closed_by_client { (&here, &there) } else { (&there, &here) };
        assert_eq!(other.liveness.closed_now(), None);
        // The goodbye may come at once behind the last message of the handshake.
        leaver.liveness.close();
        assert_eq!(within(other.liveness.closed()).await, CloseReason::Left);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_goodbye_at_once_and_a_death_are_told_apart_over_tls() {
    let fleet = Fleet::new();
    let mut server = serve(fleet.listener(ClientCertificates::Optional)).await;
    for in_order in [true, false] {
        let here = connect(server.addr, hello(b""), fleet.client()).await.unwrap();
        if in_order {
            here.liveness.close();
        }
        drop(here);
        let there = within(server.peers.recv()).await.unwrap();
        let expected = if in_order { CloseReason::Left } else { CloseReason::Lost };
        assert_eq!(within(there.liveness.closed()).await, expected);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stranger_between_the_peers_cannot_send_a_goodbye() {
    let fleet = Fleet::new();
    let mut server = serve(fleet.listener(ClientCertificates::Optional)).await;
    // A relay that can add bytes of its own.
    let relay = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (addr, target) = (relay.local_addr().unwrap(), server.addr);
    let (forge, forged) = oneshot::channel::<()>();
    let relaying = tokio::spawn(async move {
        let (mut near, _) = relay.accept().await.unwrap();
        let mut far = TcpStream::connect(target).await.unwrap();
        tokio::select! {
            _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
            _ = forged => far.write_all(&wire::encode_goodbye()).await.unwrap(),
        }
        (near, far)
    });
    let here = connect(addr, hello(b""), fleet.client()).await.unwrap();
    let there = within(server.peers.recv()).await.unwrap();
    forge.send(()).unwrap();
    let _open = within(relaying).await.unwrap();
    assert_eq!(there.liveness.closed_now(), None, "a part of a goodbye is none");
    drop(_open);
    let end = within(there.liveness.closed()).await;
    assert!(matches!(end, CloseReason::Protocol | CloseReason::Reset), "{end:?}");
    drop(here);
}

#[tokio::test(flavor = "multi_thread")]
async fn sides_that_differ_in_tls_both_say_so() {
    let fleet = Fleet::new();
    let secure = serve(fleet.listener(ClientCertificates::Optional)).await;
    let reject = rejected(secure.addr, hello(b""), connect_config()).await;
    assert_eq!(reject.code, RejectCode::TLS);
    assert!(reject.message.contains("give the connecting side --tls DIR"), "{reject}");
    let plain = serve(listener_config()).await;
    let error = insecure(plain.addr, fleet.client()).await;
    assert!(error.contains("does not speak TLS: start it with --tls DIR"), "{error}");
    for server in [&secure, &plain] {
        within(async {
            while server.stats.rejected.load(Ordering::Relaxed) == 0 {
                sleep(Duration::from_millis(1)).await;
            }
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_that_do_not_fit_are_named() {
    let (fleet, stranger) = (Fleet::new(), Fleet::new());
    let server = serve(fleet.listener(ClientCertificates::Required)).await;
    let error = insecure(format!("localhost:{}", server.addr.port()), fleet.client()).await;
    assert!(error.contains("is for 127.0.0.1, not for localhost"), "{error}");
    let error = insecure(server.addr, stranger.client()).await;
    assert!(error.contains("not signed by an authority that this side trusts"), "{error}");
    let ca = fleet.0.path().join("client/ca.pem");
    let anonymous = TlsFiles { ca: Some(ca.clone()), ..TlsFiles::default() };
    let tls = Tls::open(anonymous, ClientCertificates::Optional).unwrap();
    let config = ConnectConfig { tls: Some(tls), ..connect_config() };
    let error = insecure(server.addr, config).await;
    assert!(error.contains("requires a client certificate"), "{error}");
    let files = TlsFiles {
        ca: Some(ca),
        ..TlsFiles::in_folder(&stranger.0.path().join("client")).unwrap()
    };
    let tls = Tls::open(files, ClientCertificates::Optional).unwrap();
    let config = ConnectConfig { tls: Some(tls), ..connect_config() };
    let error = insecure(server.addr, config).await;
    assert!(error.contains("does not trust the authority"), "{error}");
    assert_eq!(server.stats.connected.load(Ordering::Relaxed), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_silent_tls_handshakes_keep_no_client_out() {
    let _ = p2p_core::bootstrap::raise_descriptor_limit();
    let fleet = Fleet::new();
    let limit = Duration::from_secs(10);
    let config = fleet.listener(ClientCertificates::Optional);
    let config = ListenerConfig { handshake_timeout: limit, max_handshakes: 128, ..config };
    let server = serve(config).await;
    let mut crowd = Vec::new();
    for idx in 0..1000 {
        let mut stream = TcpStream::connect(server.addr).await.unwrap();
        if idx % 2 == 0 {
            // The beginning of a TLS handshake.
            stream.write_all(&[22, 3, 1, 2, 0, 1]).await.unwrap();
        }
        crowd.push(stream);
    }
    let mut config = fleet.client();
    config.timeout = Duration::from_secs(60);
    let connection = connect(server.addr, hello(b""), config).await.unwrap();
    assert_eq!(connection.reply, b"re:");
    for mut stream in crowd {
        let mut rest = Vec::new();
        let _ = within(stream.read_to_end(&mut rest)).await;
    }
    assert_eq!(server.stats.connected.load(Ordering::Relaxed), 1);
    assert_eq!(connection.liveness.closed_now(), None);
}

/// Prints the time of a handshake with and without TLS. Run it by name, with `--no-capture`.
#[tokio::test(flavor = "multi_thread")]
async fn the_cost_of_tls_in_a_handshake_is_printed() {
    let fleet = Fleet::new();
    let plain = (serve(listener_config()).await, connect_config());
    let secure = (serve(fleet.listener(ClientCertificates::Required)).await, fleet.client());
    let mut medians = Vec::new();
    for (mut server, config) in [plain, secure] {
        let mut times = Vec::new();
        for _ in 0..200 {
            let start = Instant::now();
            let here = connect(server.addr, hello(b""), config.clone()).await.unwrap();
            times.push(start.elapsed());
            drop((here, within(server.peers.recv()).await.unwrap()));
        }
        times.sort();
        medians.push((times[100], times[198]));
    }
    println!("handshake without TLS: p50 {:?}, p99 {:?}", medians[0].0, medians[0].1);
    println!(
        "handshake with TLS, both certificates checked: p50 {:?}, p99 {:?}",
        medians[1].0, medians[1].1
    );
}
