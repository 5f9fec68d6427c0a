//! Open connections whose client certificate ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use control_api::{ClientOptions, ControlClient, ControlError, Security};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use trust::Role;
use trust::tls::rustls::pki_types::UnixTime;
use trust::tls::{ClientCertificates, TimeProvider, Tls, TlsFiles, TlsStream};

use super::tls::{Fleet, security};
use super::{BOUND, Plane, config, serve};

/// A clock that a test puts forward, in seconds.
#[derive(Debug, Default)]
struct TestClock(AtomicU64);

impl TimeProvider for TestClock {
    fn current_time(&self) -> Option<UnixTime> {
        let now = UnixTime::now().as_secs() + self.0.load(Ordering::SeqCst);
        Some(UnixTime::since_unix_epoch(Duration::from_secs(now)))
    }
}

/// A client that has its certificate only.
fn client(plane: &Plane, security: Security) -> ControlClient {
    let mut options = ClientOptions::default();
    (options.security, options.timeout) = (security, BOUND);
    ControlClient::with_options(&format!("https://{}", plane.addr), None, options).unwrap()
}

async fn connect(plane: &Plane, security: &Security) -> TlsStream<TcpStream> {
    let stream = TcpStream::connect(plane.addr).await.unwrap();
    security.tls.as_ref().unwrap().connect("127.0.0.1", stream).await.unwrap()
}

/// Sends a request on an open connection. Returns the head and the body of the answer.
async fn whoami(stream: &mut TlsStream<TcpStream>) -> (String, String) {
    stream.write_all(b"GET /v1/whoami HTTP/1.1\r\nhost: plane\r\n\r\n").await.unwrap();
    let answer = async {
        let mut answer = String::new();
        loop {
            answer.push(char::from(stream.read_u8().await.expect("an answer")));
            if let Some((head, body)) = answer.split_once("\r\n\r\n") {
                let head = head.to_ascii_lowercase();
                let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
                if body.len() == length.expect("a length").parse::<usize>().unwrap() {
                    return (head, body.to_owned());
                }
            }
        }
    };
    tokio::time::timeout(BOUND, answer).await.expect("an answer in time")
}

/// Reads to the end of a connection without a request.
async fn ends(mut stream: TlsStream<TcpStream>) {
    let mut rest = Vec::new();
    let read = tokio::time::timeout(BOUND, stream.read_to_end(&mut rest)).await;
    read.expect("the connection ends").expect("in an orderly way");
    assert_eq!(rest, b"");
}

/// After the end of its certificate a connection has no identity. The answer says to connect again, which the
/// certificate does not allow.
#[tokio::test]
async fn a_request_after_the_end_of_the_certificate_is_refused() {
    let fleet = Fleet::new();
    let clock = Arc::new(TestClock::default());
    for clients in [ClientCertificates::Optional, ClientCertificates::Required] {
        clock.0.store(0, Ordering::SeqCst);
        let files = TlsFiles::in_folder(&fleet.folder(Role::Server)).unwrap();
        let mut config = config();
        let tls = Tls::with_clock(files, clients, Arc::clone(&clock) as Arc<dyn TimeProvider>);
        config.security = Security { tls: Some(tls.unwrap()), insecure: false };
        let plane = Plane::start(config).await;

        let operator = security(&fleet.folder(Role::Operator), ClientCertificates::Optional);
        let mut stream = connect(&plane, &operator).await;
        let (head, body) = whoami(&mut stream).await;
        assert!(head.starts_with("http/1.1 200") && body.contains("certificate"), "{head}\n{body}");
        let client = client(&plane, operator);
        assert_eq!(client.whoami().await.unwrap().credential, "certificate");

        clock.0.store(3 * 86_400, Ordering::SeqCst);
        let (head, body) = whoami(&mut stream).await;
        assert!(head.starts_with("http/1.1 421") && head.contains("connection: close"), "{head}");
        assert!(body.contains("no longer accepted"), "{body}");
        ends(stream).await;
        let err = client.whoami().await.unwrap_err();
        assert!(matches!(err, ControlError::Tls { .. }), "{err}");
        plane.stop().await;
    }
}

/// Connections of clients that the authority in force has not certified end: idle ones and streams of events.
#[tokio::test]
async fn a_change_of_the_authority_ends_the_connections_of_the_old_one() {
    let (fleet, other) = (Fleet::new(), Fleet::new());
    let plane = Plane::start(fleet.config(ClientCertificates::Optional)).await;
    let old = security(&fleet.folder(Role::Operator), ClientCertificates::Optional);
    let server = security(&fleet.folder(Role::Server), ClientCertificates::Optional);
    let server = client(&plane, server);
    for (name, incarnation) in [("a", 1), ("b", 2)] {
        serve(&server, name, incarnation).await;
    }
    let mut idle = connect(&plane, &old).await;
    assert!(whoami(&mut idle).await.0.starts_with("http/1.1 200"));
    let old = client(&plane, old);
    let mut watch = old.watch_placement().await.unwrap();
    watch.next().await.unwrap();

    let ca = |fleet: &Fleet| fleet.folder(Role::Server).join("ca.pem");
    let before = std::fs::read(ca(&fleet)).unwrap();
    std::fs::copy(ca(&other), ca(&fleet)).unwrap();
    ends(idle).await;
    let ended = tokio::time::timeout(BOUND, async { while watch.next().await.is_ok() {} }).await;
    ended.expect("the stream ends");
    let err = old.whoami().await.unwrap_err();
    assert!(matches!(err, ControlError::Tls { .. }), "{err}");

    // A client of the authority in force is let in, and so is the first one once both are in force.
    let new = TlsFiles { ca: Some(fleet.dir().join("first.pem")), ..other.files(Role::Operator) };
    std::fs::write(fleet.dir().join("first.pem"), &before).unwrap();
    let tls = Tls::open(new, ClientCertificates::Optional).unwrap();
    let new = client(&plane, Security { tls: Some(tls), insecure: false });
    assert_eq!(new.whoami().await.unwrap().credential, "certificate");
    let both = [before, std::fs::read(ca(&other)).unwrap()].concat();
    std::fs::write(ca(&fleet), both).unwrap();
    let admitted = async {
        while old.whoami().await.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(BOUND, admitted).await.expect("both authorities are in force");
    assert_eq!(new.whoami().await.unwrap().credential, "certificate");
    plane.stop().await;
}
