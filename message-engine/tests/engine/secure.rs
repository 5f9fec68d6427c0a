//! TLS and tickets on the connection for control.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use p2p_core::bootstrap::{
    HandshakeBinding, Reject, RejectCode, ShownTicket, TicketCheck, TicketSource,
};
use rand::RngExt;
use switchyard_message_engine::engine::{
    ConnectError, ConnectOptions, Connection, Engine, EngineConfig,
};
use tempfile::TempDir;
use trust::Role;
use trust::certs::{Authority, Request, validity_from_now};
use trust::tls::{ClientCertificates, Tls, TlsFiles};

use crate::common::{
    TestTransport, config, contents, memory_of, poisoned, random_bytes, rng, soon, until,
};

/// Certificates of one authority.
struct Certificates {
    dir: TempDir,
    authority: Authority,
}

impl Certificates {
    fn new() -> Self {
        Self { dir: TempDir::new().unwrap(), authority: Authority::generate().unwrap() }
    }

    fn tls(&self, name: &str, address: &str, clients: ClientCertificates) -> Tls {
        let (not_before, not_after) = validity_from_now(30);
        let addresses = vec![address.to_owned()];
        let (name, role) = (name.to_owned(), Role::Server);
        let dir = self.dir.path().join(&name);
        let request = Request { name, role, addresses, not_before, not_after };
        self.authority.issue_into(&dir, &request, true).unwrap();
        Tls::open(TlsFiles::in_folder(&dir).unwrap(), clients).unwrap()
    }

    fn of_host(&self, name: &str) -> Tls {
        self.tls(name, "127.0.0.1", ClientCertificates::Optional)
    }
}

fn secured(by: TestTransport, tls: Tls) -> EngineConfig {
    EngineConfig { tls: Some(tls), ..config(by) }
}

fn connect(from: &Engine, to: &Engine) -> Result<Connection, ConnectError> {
    from.connect(to.endpoint().addr, soon())
}

/// Messages in both directions, longer than a record of TLS and than a socket's buffer, and one-sided reads.
#[test]
fn everything_travels_over_a_secured_connection() {
    let (mut rng, certificates) = (rng(), Certificates::new());
    for by in [TestTransport::Tcp, TestTransport::Cma, TestTransport::Shm] {
        let here = Engine::start(secured(by, certificates.of_host("here"))).unwrap();
        let there = Engine::start(secured(by, certificates.of_host("there"))).unwrap();
        let out = connect(&here, &there).unwrap();
        let back = there.accept(soon()).unwrap();
        let mut lens = vec![0, 1, 16 << 10, (16 << 10) + 1, 5 << 20];
        lens.extend((0..20).map(|_| rng.random_range(0..100_000)));
        for len in lens {
            let sent = random_bytes(&mut rng, len);
            out.notify(&sent, soon()).unwrap();
            assert!(there.next_notification(soon()).unwrap().bytes == sent, "{len} bytes");
            back.notify(&sent, soon()).unwrap();
            assert!(here.next_notification(soon()).unwrap().bytes == sent, "{len} bytes");
        }
        let bytes = random_bytes(&mut rng, 300_000);
        let (source, sink) = (memory_of(&there, &bytes), poisoned(&here, bytes.len()));
        let descriptor = back.advertise(&source.span(0, bytes.len() as u64).unwrap()).unwrap();
        let span = sink.span(0, bytes.len() as u64).unwrap();
        out.read(&span, &descriptor, soon()).unwrap();
        assert!(contents(&sink, 0, bytes.len()) == bytes);
        // The orderly end of one side reaches the other.
        out.close();
        until("the end of the connection", || back.closed().is_some());
        assert_eq!((here.stats().num_refused, there.stats().num_refused), (0, 0));
    }
}

/// Many notifications at once fill the socket while records wait.
#[test]
fn a_slow_reader_gets_every_byte() {
    let (mut rng, certificates) = (rng(), Certificates::new());
    let by = TestTransport::Tcp;
    let here = Engine::start(secured(by, certificates.of_host("here"))).unwrap();
    let there = Engine::start(secured(by, certificates.of_host("there"))).unwrap();
    let out = connect(&here, &there).unwrap();
    let all: Vec<_> = (0..200).map(|_| random_bytes(&mut rng, 70_000)).collect();
    let pending: Vec<_> =
        all.iter().map(|bytes| out.start_notify(bytes, soon()).unwrap()).collect();
    std::thread::sleep(Duration::from_millis(50));
    for bytes in &all {
        assert!(there.next_notification(soon()).unwrap().bytes == *bytes);
    }
    for transfer in pending {
        transfer.wait().unwrap();
    }
}

#[test]
fn plain_peers_and_wrong_certificates_are_refused_and_counted() {
    let (certificates, foreign) = (Certificates::new(), Certificates::new());
    let by = TestTransport::Tcp;
    let strict = certificates.tls("strict", "127.0.0.1", ClientCertificates::Required);
    let engine = Engine::start(secured(by, strict)).unwrap();
    let refused = |stranger: EngineConfig, words: &str| {
        let before = engine.stats().num_refused;
        let stranger = Engine::start(stranger).unwrap();
        let error = connect(&stranger, &engine).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
        until("the refusal to be counted", || engine.stats().num_refused == before + 1);
    };
    refused(config(by), "does not speak TLS, which this port requires");
    refused(secured(by, foreign.of_host("foreign")), "not signed by an authority");
    // It trusts the authority and has no certificate.
    let files = TlsFiles::in_folder(&certificates.dir.path().join("strict")).unwrap();
    let bare = TlsFiles { cert: None, key: None, ..files };
    let bare = Tls::open(bare, ClientCertificates::Optional).unwrap();
    refused(secured(by, bare), "requires a client certificate");

    // A listener with another host's certificate, and one without TLS: this side refuses.
    let friend = Engine::start(secured(by, certificates.of_host("friend"))).unwrap();
    connect(&friend, &engine).unwrap();
    let elsewhere = certificates.tls("elsewhere", "10.9.8.7", ClientCertificates::Optional);
    let elsewhere = Engine::start(secured(by, elsewhere)).unwrap();
    let error = connect(&friend, &elsewhere).unwrap_err();
    assert!(
        matches!(&error, ConnectError::Tls { reason, .. } if reason.contains("is for 10.9.8.7"))
    );
    let named = ConnectOptions { host: Some("10.9.8.7".to_owned()), ..ConnectOptions::default() };
    friend.connect_with(elsewhere.endpoint().addr, named, soon()).unwrap();
    let plain = Engine::start(config(by)).unwrap();
    let error = connect(&friend, &plain).unwrap_err().to_string();
    assert!(error.contains("the listener does not speak TLS"), "{error}");
}

/// The channel and the hello of each handshake.
type Handshakes = Mutex<Vec<(Option<[u8; 32]>, Vec<u8>)>>;

/// Remembers the handshakes that it has seen, and admits those with the right word.
#[derive(Debug, Default)]
struct Doorman {
    seen: Handshakes,
}

impl TicketCheck for Doorman {
    fn check(
        &self,
        shown: Option<&ShownTicket>,
        binding: &HandshakeBinding<'_>,
    ) -> Result<Option<Box<str>>, Reject> {
        self.seen.lock().unwrap().push((binding.channel, binding.hello.to_vec()));
        let refused = |why: &str| Err(Reject::new(RejectCode::TICKET, why.to_owned()));
        match shown {
            None => refused("no ticket was shown"),
            Some(shown) if shown.ticket == "v4.public.right" => Ok(None),
            Some(_) => refused("a wrong ticket was shown"),
        }
    }
}

/// Shows a ticket, and remembers its handshakes.
#[derive(Debug)]
struct Holder {
    ticket: &'static str,
    seen: Handshakes,
}

impl TicketSource for Holder {
    fn show(&self, binding: &HandshakeBinding<'_>) -> Result<ShownTicket, String> {
        self.seen.lock().unwrap().push((binding.channel, binding.hello.to_vec()));
        if self.ticket.is_empty() {
            return Err("the control plane is down".to_owned());
        }
        Ok(ShownTicket { ticket: self.ticket.to_owned(), proof: "v4.public.proof".to_owned() })
    }
}

#[test]
fn tickets_are_checked_with_the_bytes_and_the_channel_that_both_sides_see() {
    let certificates = Certificates::new();
    let by = TestTransport::Tcp;
    for is_secured in [false, true] {
        let start = |name: &str, check: Option<Arc<dyn TicketCheck>>| {
            let tls = is_secured.then(|| certificates.of_host(name));
            Engine::start(EngineConfig { tls, check, ..config(by) }).unwrap()
        };
        let doorman = Arc::new(Doorman::default());
        let there = start("there", Some(Arc::clone(&doorman) as Arc<dyn TicketCheck>));
        let here = start("here", None);
        let with = |ticket| {
            let holder = Arc::new(Holder { ticket, seen: Mutex::default() });
            let tickets = Some(Arc::clone(&holder) as Arc<dyn TicketSource>);
            let options = ConnectOptions { tickets, ..ConnectOptions::default() };
            (here.connect_with(there.endpoint().addr, options, soon()), holder)
        };
        let error = connect(&here, &there).unwrap_err().to_string();
        assert!(error.contains("no ticket was shown"), "{error}");
        let error = with("v4.public.left").0.unwrap_err().to_string();
        assert!(error.contains("a wrong ticket"), "{error}");
        let error = with("").0.unwrap_err();
        assert!(
            matches!(&error, ConnectError::Ticket { reason, .. } if reason.contains("is down"))
        );
        assert_eq!(there.stats().num_refused, 2);
        assert_eq!(there.stats().num_connections, 0);

        doorman.seen.lock().unwrap().clear();
        let (connected, holder) = with("v4.public.right");
        let out = connected.unwrap();
        out.notify(b"through", soon()).unwrap();
        assert_eq!(there.next_notification(soon()).unwrap().bytes, b"through");
        let seen = doorman.seen.lock().unwrap();
        assert_eq!(*seen, *holder.seen.lock().unwrap());
        assert_eq!((seen.len(), seen[0].0.is_some()), (1, is_secured));
        // A peer without a check ignores the ticket.
        let free = start("free", None);
        let tickets = Some(holder as Arc<dyn TicketSource>);
        let options = ConnectOptions { tickets, ..ConnectOptions::default() };
        here.connect_with(free.endpoint().addr, options, soon()).unwrap();
    }
}

/// Bytes of no protocol, and silence, keep no engine from its peers.
#[test]
fn strangers_in_the_tls_handshake_are_ended() {
    let (mut rng, certificates) = (rng(), Certificates::new());
    let by = TestTransport::Tcp;
    let config = EngineConfig {
        max_handshakes: 64,
        // A handshake of a friend takes far less, also on a busy host.
        handshake_timeout: Duration::from_secs(5),
        ..secured(by, certificates.of_host("there"))
    };
    let there = Engine::start(config).unwrap();
    let here = Engine::start(secured(by, certificates.of_host("here"))).unwrap();
    let addr = there.endpoint().addr;
    let mut strangers: Vec<_> = (0..200).map(|_| TcpStream::connect(addr).unwrap()).collect();
    for idx in 0..50 {
        let mut stream = TcpStream::connect(addr).unwrap();
        let len = rng.random_range(1..2000);
        let mut bytes = random_bytes(&mut rng, len);
        if idx % 2 == 0 {
            // The header of a TLS record in front.
            let len = (bytes.len() as u16).to_be_bytes();
            bytes.splice(0..0, [22, 3, 1, len[0], len[1]]);
        }
        let _ = stream.write_all(&bytes);
        stream.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
        let _ = stream.read(&mut [0; 4096]);
        strangers.push(stream);
    }
    // Its place may go to a stranger that is newer.
    let mut out = None;
    until("the friend gets in", || {
        out = connect(&here, &there).ok();
        out.is_some()
    });
    let out = out.unwrap();
    out.notify(b"served", soon()).unwrap();
    assert_eq!(there.next_notification(soon()).unwrap().bytes, b"served");
    until("refused strangers are counted", || there.stats().num_refused > 0);
    // So few that no newer connection takes their place: these end at the deadline.
    strangers.extend((0..3).map(|_| TcpStream::connect(addr).unwrap()));
    for (idx, mut stream) in strangers.into_iter().enumerate() {
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        // An alert may come first.
        let error = std::io::copy(&mut stream, &mut std::io::sink()).err();
        let is_ended =
            error.as_ref().is_none_or(|error| error.kind() == ErrorKind::ConnectionReset);
        assert!(is_ended, "stranger {idx}: {error:?}");
    }
    out.notify(b"still served", soon()).unwrap();
    assert_eq!(there.next_notification(soon()).unwrap().bytes, b"still served");
}
