//! Handshakes over a pipe, with certificates of fresh authorities.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use rustls::pki_types::UnixTime;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

use super::*;
use crate::Role;
use crate::certs::{Authority, Request, validity_from_now};

/// A clock that is wrong by a number of seconds.
#[derive(Debug)]
struct WrongClock(i64);

impl TimeProvider for WrongClock {
    fn current_time(&self) -> Option<UnixTime> {
        let now = UnixTime::now().as_secs().saturating_add_signed(self.0);
        Some(UnixTime::since_unix_epoch(Duration::from_secs(now)))
    }
}

fn request(role: Role, name: &str, addresses: &[&str]) -> Request {
    let (not_before, not_after) = validity_from_now(30);
    let addresses = addresses.iter().map(|&address| address.to_owned()).collect();
    Request { name: name.to_owned(), role, addresses, not_before, not_after }
}

fn issue(authority: &Authority, dir: &Path, request: &Request) {
    authority.issue_into(dir, request, true).expect("a certificate");
}

fn open(dir: &Path, clients: ClientCertificates) -> Tls {
    Tls::open(TlsFiles::in_folder(dir).expect("a folder"), clients).expect("TLS")
}

/// The folders of a server and a client of one authority.
struct Fleet {
    dir: TempDir,
    authority: Authority,
}

impl Fleet {
    fn new() -> Self {
        let (dir, authority) = (TempDir::new().unwrap(), Authority::generate().unwrap());
        let fleet = Self { dir, authority };
        issue(
            &fleet.authority,
            &fleet.server(),
            &request(Role::Server, "s", &["10.0.0.5", "host.example"]),
        );
        issue(&fleet.authority, &fleet.client(), &request(Role::Client, "app", &[]));
        fleet
    }

    fn server(&self) -> std::path::PathBuf {
        self.dir.path().join("server")
    }

    fn client(&self) -> std::path::PathBuf {
        self.dir.path().join("client")
    }
}

type Ended<T> = Result<T, HandshakeError>;

/// A handshake of both sides, and a byte each way. A client learns only then that its certificate is refused.
async fn shake(
    server: &Tls,
    client: &Tls,
    host: &str,
) -> (Ended<TlsStream<DuplexStream>>, Ended<TlsStream<DuplexStream>>) {
    let (near, far) = duplex(1 << 16);
    let accept = async {
        let mut stream = server.accept(far).await?;
        let explained = |error: io::Error| HandshakeError::new(Side::Listener, &error);
        stream.write_all(b"s").await.map_err(explained)?;
        stream.read_u8().await.map_err(explained)?;
        Ok(stream)
    };
    let connect = async {
        let mut stream = client.connect(host, near).await?;
        let explained = |error: io::Error| HandshakeError::new(Side::Client, &error);
        stream.write_all(b"c").await.map_err(explained)?;
        stream.read_u8().await.map_err(explained)?;
        Ok(stream)
    };
    tokio::join!(accept, connect)
}

fn text<T>(ended: Ended<T>) -> String {
    ended.map(drop).unwrap_err().to_string()
}

#[tokio::test]
async fn both_sides_prove_who_they_are_and_share_the_binding_of_the_channel() {
    let fleet = Fleet::new();
    let server = open(&fleet.server(), ClientCertificates::Required);
    let client = open(&fleet.client(), ClientCertificates::Optional);
    for host in ["10.0.0.5", "host.example"] {
        let (accepted, connected) = shake(&server, &client, host).await;
        let (accepted, connected) = (accepted.unwrap(), connected.unwrap());
        let identity = peer_identity(&accepted).expect("the client has a certificate");
        assert_eq!((identity.name.as_str(), identity.role), ("app", Role::Client));
        assert_eq!(peer_identity(&connected).expect("a server").role, Role::Server);
        let binding = channel_binding(&accepted).expect("TLS 1.3 exports keys");
        assert_eq!(Some(binding), channel_binding(&connected));
        assert_ne!(Some(binding), exported(&connected, b"EXPORTER-other"));
        let version = connected.get_ref().1.protocol_version();
        assert_eq!(version, Some(rustls::ProtocolVersion::TLSv1_3));
    }
}

#[tokio::test]
async fn a_client_without_a_certificate_is_admitted_only_where_none_is_required() {
    let fleet = Fleet::new();
    for file in ["cert.pem", "key.pem"] {
        fs::remove_file(fleet.client().join(file)).unwrap();
    }
    let client = open(&fleet.client(), ClientCertificates::Optional);
    assert!(client.can_connect() && !client.can_listen());
    let server = open(&fleet.server(), ClientCertificates::Optional);
    let (accepted, connected) = shake(&server, &client, "10.0.0.5").await;
    assert_eq!(peer_identity(&accepted.unwrap()), None);
    connected.unwrap();

    let strict = open(&fleet.server(), ClientCertificates::Required);
    let (accepted, connected) = shake(&strict, &client, "10.0.0.5").await;
    let (accepted, connected) = (text(accepted), text(connected));
    assert!(accepted.contains("shows no certificate"), "{accepted}");
    assert!(connected.contains("requires a client certificate: give --tls DIR"), "{connected}");
}

#[tokio::test]
async fn wrong_certificates_are_refused_with_the_reason_and_the_remedy() {
    let fleet = Fleet::new();
    let server = open(&fleet.server(), ClientCertificates::Optional);
    let client = open(&fleet.client(), ClientCertificates::Optional);

    let (_, connected) = shake(&server, &client, "10.0.0.6").await;
    let error = text(connected);
    assert!(error.contains("is for 10.0.0.5, host.example, not for 10.0.0.6"), "{error}");
    assert!(error.contains("--address 10.0.0.6"), "{error}");

    let stranger = Fleet::new();
    let foreign = open(&stranger.client(), ClientCertificates::Optional);
    let (accepted, connected) = shake(&server, &foreign, "10.0.0.5").await;
    let (accepted, connected) = (text(accepted), text(connected));
    assert!(connected.contains("not signed by an authority that this side trusts"), "{connected}");
    assert!(accepted.contains("refuses the certificate of this side"), "{accepted}");

    // It trusts the fleet's authority and shows a certificate of another one.
    fs::copy(fleet.client().join("ca.pem"), stranger.client().join("ca.pem")).unwrap();
    let foreign = open(&stranger.client(), ClientCertificates::Optional);
    let (accepted, connected) = shake(&server, &foreign, "10.0.0.5").await;
    let (accepted, connected) = (text(accepted), text(connected));
    assert!(accepted.contains("the certificate of the client is not signed"), "{accepted}");
    assert!(connected.contains("because it does not trust the authority"), "{connected}");

    // A client's certificate makes no server.
    let posing =
        Request { addresses: vec!["10.0.0.5".to_owned()], ..request(Role::Client, "app", &[]) };
    issue(&fleet.authority, &fleet.server(), &posing);
    let poser = open(&fleet.server(), ClientCertificates::Optional);
    let (_, connected) = shake(&poser, &client, "10.0.0.5").await;
    let error = text(connected);
    assert!(error.contains("issued for another use: issue one with --role server"), "{error}");
}

/// The certificate may end during the handshake on a slow host, so the handshake is repeated.
#[tokio::test]
async fn a_certificate_ends_with_its_validity() {
    let fleet = Fleet::new();
    let server = open(&fleet.server(), ClientCertificates::Required);
    for seconds in [2, 4, 8, 16, 32] {
        let not_after = SystemTime::now() + Duration::from_secs(seconds);
        let short = Request { not_after, ..request(Role::Client, "app", &[]) };
        issue(&fleet.authority, &fleet.client(), &short);
        let client = open(&fleet.client(), ClientCertificates::Optional);
        let (Ok(accepted), _) = shake(&server, &client, "10.0.0.5").await else { continue };
        let certificate = server.peer_certificate(&accepted).expect("a certificate");
        if let Some(identity) = certificate.identity() {
            assert_eq!((identity.name.as_str(), identity.role), ("app", Role::Client));
            certificate.ended().await;
            assert!(SystemTime::now() >= not_after - Duration::from_secs(1));
            assert!(!certificate.is_accepted() && certificate.identity().is_none());
            return;
        }
    }
    panic!("every handshake took longer than its certificate was valid");
}

#[tokio::test]
async fn validity_is_judged_by_the_clock_of_each_side() {
    let fleet = Fleet::new();
    let server = open(&fleet.server(), ClientCertificates::Optional);
    let files = TlsFiles::in_folder(&fleet.client()).unwrap();
    let ca_only = TlsFiles { ca: files.ca.clone(), ..TlsFiles::default() };
    let with = |files: &TlsFiles, seconds: i64| {
        Tls::with_clock(files.clone(), ClientCertificates::Optional, Arc::new(WrongClock(seconds)))
    };
    // A new certificate works on hosts whose clocks are off by an hour.
    for seconds in [-3600, 3600] {
        let client = with(&files, seconds).unwrap();
        let (accepted, connected) = shake(&server, &client, "10.0.0.5").await;
        accepted.unwrap();
        connected.unwrap();
    }
    let days = |days: i64| days * 86_400;
    for (seconds, refusal, load) in [
        (days(31), "of the listener has expired on", "has expired on"),
        (-days(1), "of the listener is valid from", "is valid from"),
    ] {
        let (_, connected) = shake(&server, &with(&ca_only, seconds).unwrap(), "10.0.0.5").await;
        let error = text(connected);
        assert!(
            error.contains(refusal) && error.contains("the clock of this host says"),
            "{error}"
        );
        // A process finds that out about its own certificate when it starts.
        let error = with(&files, seconds).unwrap_err().to_string();
        assert!(error.contains(load) && error.contains("cert.pem"), "{error}");
    }
    // An expired certificate of a client, whose own clock is late.
    let mut old = request(Role::Client, "app", &[]);
    (old.not_before, old.not_after) = (
        SystemTime::now() - Duration::from_secs(7200),
        SystemTime::now() - Duration::from_secs(1800),
    );
    issue(&fleet.authority, &fleet.client(), &old);
    let client = with(&files, -3600).unwrap();
    let (accepted, connected) = shake(&server, &client, "10.0.0.5").await;
    let (accepted, connected) = (text(accepted), text(connected));
    assert!(accepted.contains("the certificate of the client has expired on"), "{accepted}");
    assert!(connected.contains("refuses the certificate of this side as expired"), "{connected}");
}

#[test]
fn files_that_cannot_be_used_are_named() {
    let fleet = Fleet::new();
    let dir = fleet.server();
    let open = || Tls::open(TlsFiles::in_folder(&dir)?, ClientCertificates::Optional);
    let check = |expected: &[&str]| {
        let error = open().unwrap_err().to_string();
        assert!(expected.iter().all(|part| error.contains(part)), "{error}");
    };
    let key = fs::read(dir.join("key.pem")).unwrap();
    fs::copy(fleet.client().join("key.pem"), dir.join("key.pem")).unwrap();
    check(&["key.pem is not the key of the certificate", "switchyard certs issue"]);
    fs::write(dir.join("key.pem"), "no key").unwrap();
    check(&["key.pem has no private key in PEM format"]);
    fs::remove_file(dir.join("key.pem")).unwrap();
    check(&["has no key.pem"]);
    fs::write(dir.join("key.pem"), key).unwrap();
    open().unwrap();
    fs::write(
        dir.join("cert.pem"),
        b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    )
    .unwrap();
    check(&["cert.pem has a damaged certificate"]);
    fs::write(dir.join("cert.pem"), vec![b'x'; (1 << 20) + 1]).unwrap();
    check(&["cannot read", "larger than 1 MiB"]);
    fs::remove_file(dir.join("ca.pem")).unwrap();
    check(&["has no ca.pem"]);
    let half = TlsFiles { cert: Some(dir.join("cert.pem")), ..TlsFiles::default() };
    let error = Tls::open(half, ClientCertificates::Optional).unwrap_err();
    assert!(matches!(error, TlsError::Half), "{error}");
    let error = Tls::open(TlsFiles::default(), ClientCertificates::Optional).unwrap_err();
    assert!(matches!(error, TlsError::Nothing), "{error}");
}

/// A clock that the test moves on.
#[derive(Debug, Default)]
struct MovedClock(AtomicU64);

impl TimeProvider for MovedClock {
    fn current_time(&self) -> Option<UnixTime> {
        let now = UnixTime::now().as_secs() + self.0.load(Ordering::Relaxed);
        Some(UnixTime::since_unix_epoch(Duration::from_secs(now)))
    }
}

#[test]
fn a_certificate_that_expires_in_force_is_a_problem_until_there_is_a_new_one() {
    let fleet = Fleet::new();
    let clock = Arc::new(MovedClock::default());
    let files = TlsFiles::in_folder(&fleet.server()).unwrap();
    let provider: Arc<dyn TimeProvider> = Arc::<MovedClock>::clone(&clock);
    let tls = Tls::with_clock(files, ClientCertificates::Optional, provider).unwrap();
    tls.poll_files();
    assert_eq!(tls.status().problem, None);
    clock.0.store(31 * 86_400, Ordering::Relaxed);
    for _ in 0..3 {
        tls.poll_files();
        let problem = tls.status().problem;
        assert!(problem.as_ref().is_some_and(|why| why.contains("has expired on")), "{problem:?}");
    }
    let longer = Request {
        not_after: SystemTime::now() + Duration::from_secs(60 * 86_400),
        ..request(Role::Server, "s", &["10.0.0.5"])
    };
    issue(&fleet.authority, &fleet.server(), &longer);
    (0..3).for_each(|_| tls.poll_files());
    assert_eq!(tls.status().problem, None);
}

#[tokio::test]
async fn new_files_come_into_force_and_unusable_ones_do_not() {
    let fleet = Fleet::new();
    let (server, client) = (
        open(&fleet.server(), ClientCertificates::Optional),
        open(&fleet.client(), ClientCertificates::Optional),
    );
    let first = server.status();
    assert!(first.expires_at.is_some() && first.problem.is_none(), "{first:?}");
    // The thread that follows the files may poll, too, so only the outcome of several polls is certain.
    let poll = |tls: &Tls| (0..3).for_each(|_| tls.poll_files());

    let longer = Request {
        not_after: SystemTime::now() + Duration::from_secs(60 * 86_400),
        ..request(Role::Server, "s", &["10.0.0.5"])
    };
    issue(&fleet.authority, &fleet.server(), &longer);
    poll(&server);
    let second = server.status();
    assert!(second.expires_at > first.expires_at && second.num_reloads == 1, "{second:?}");

    let (key_file, good) =
        (fleet.server().join("key.pem"), fs::read(fleet.server().join("key.pem")).unwrap());
    let foreign = fs::read(fleet.client().join("key.pem")).unwrap();
    for (bad, expected) in [(foreign, "is not the key of"), (b"?".to_vec(), "no private key")] {
        fs::write(&key_file, bad).unwrap();
        poll(&server);
        let status = server.status();
        assert!(status.problem.as_ref().is_some_and(|why| why.contains(expected)), "{status:?}");
        assert_eq!(status.expires_at, second.expires_at);
        let (accepted, connected) = shake(&server, &client, "10.0.0.5").await;
        accepted.unwrap();
        connected.unwrap();
    }
    fs::remove_file(&key_file).unwrap();
    poll(&server);
    assert!(server.status().problem.is_some_and(|why| why.contains("cannot read")));
    assert_eq!(server.status().num_failures, 3);
    fs::write(&key_file, good).unwrap();
    poll(&server);
    assert_eq!(server.status().problem, None);

    // A change of the authority: both sides trust both, then the certificates change, then the old one goes.
    let next = Authority::generate().unwrap();
    let both = format!("{}{}", fleet.authority.cert_pem(), next.cert_pem());
    for dir in [fleet.server(), fleet.client()] {
        fs::write(dir.join("ca.pem"), &both).unwrap();
    }
    poll(&server);
    poll(&client);
    issue(&next, &fleet.server(), &longer);
    poll(&server);
    let (accepted, connected) = shake(&server, &client, "10.0.0.5").await;
    let error = text(accepted);
    assert!(error.contains("the certificate of the client is not signed"), "{error}");
    drop(connected);
    issue(&next, &fleet.client(), &request(Role::Client, "app", &[]));
    poll(&client);
    let (accepted, connected) = shake(&server, &client, "10.0.0.5").await;
    accepted.unwrap();
    connected.unwrap();
}

#[tokio::test]
async fn bytes_behind_the_last_record_stay_in_the_stream() {
    let fleet = Fleet::new();
    let (server, client) = (
        open(&fleet.server(), ClientCertificates::Optional),
        open(&fleet.client(), ClientCertificates::Optional),
    );
    let (near, far) = duplex(1 << 16);
    let message = vec![7; 40_000];
    let sent = message.clone();
    let sender = async move {
        let mut stream = client.connect("10.0.0.5", Records::new(near)).await.unwrap();
        stream.write_all(&sent).await.unwrap();
        stream.flush().await.unwrap();
        let TlsStream::Client(stream) = stream else { unreachable!("a client") };
        let mut plain = stream.into_inner().0.into_inner();
        plain.write_all(b"goodbye").await.unwrap();
        plain
    };
    let receiver = async move {
        let mut stream = server.accept(Records::new(far)).await.unwrap();
        // Lets the sender put everything into the pipe.
        tokio::task::yield_now().await;
        let mut got = vec![0; 40_000];
        stream.read_exact(&mut got).await.unwrap();
        let TlsStream::Server(stream) = stream else { unreachable!("a server") };
        (got, stream.into_inner().0.into_inner())
    };
    let (near, (got, mut far)) = tokio::join!(sender, receiver);
    drop(near);
    assert_eq!(got, message);
    let mut rest = Vec::new();
    far.read_to_end(&mut rest).await.unwrap();
    assert_eq!(rest, b"goodbye");
}

#[tokio::test]
async fn a_peer_without_tls_is_recognised_on_both_sides() {
    let fleet = Fleet::new();
    let (server, client) = (
        open(&fleet.server(), ClientCertificates::Optional),
        open(&fleet.client(), ClientCertificates::Optional),
    );
    let (mut near, far) = duplex(1 << 10);
    near.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let error = server.accept(Records::new(far)).await.unwrap_err();
    assert!(error.is_plain && error.to_string().contains("does not speak TLS"), "{error}");
    let (near, mut far) = duplex(1 << 10);
    far.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap();
    let error = client.connect("10.0.0.5", Records::new(near)).await.unwrap_err();
    assert!(error.is_plain && error.to_string().contains("start it with --tls DIR"), "{error}");
    let (near, far) = duplex(1 << 10);
    drop(near);
    let error = server.accept(Records::new(far)).await.unwrap_err();
    assert!(error.is_broken && !error.is_plain, "{error}");
}

#[test]
fn dates_are_those_of_the_calendar() {
    for (seconds, expected) in [
        (0, "1970-01-01 00:00:00 UTC"),
        (951_782_399, "2000-02-28 23:59:59 UTC"),
        (951_782_400, "2000-02-29 00:00:00 UTC"),
        (1_709_251_200, "2024-03-01 00:00:00 UTC"),
        (4_107_542_399, "2100-02-28 23:59:59 UTC"),
        (4_107_542_400, "2100-03-01 00:00:00 UTC"),
    ] {
        assert_eq!(date(seconds), expected);
    }
}

#[test]
fn only_addresses_of_this_host_are_loopback() {
    for host in
        ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "::ffff:127.0.0.1", "localhost", "LOCALHOST"]
    {
        assert!(is_loopback_host(host), "{host}");
    }
    for host in ["10.0.0.1", "0.0.0.0", "::", "localhost.example", "127.0.0.1.example", ""] {
        assert!(!is_loopback_host(host), "{host}");
    }
}
