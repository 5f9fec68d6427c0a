//! TLS handshakes whose records do not fit into the socket.

use std::io::Read;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketType, connect, socket, sockopt};
use trust::Role;
use trust::certs::{Authority, Request, validity_from_now};
use trust::tls::{ClientCertificates, Tls, TlsFiles};

use crate::engine::EngineConfig;
use crate::engine::io::{Io, Place};

/// TLS with a certificate of at least 30,000 bytes.
fn long_certificate(dir: &std::path::Path) -> Tls {
    let (not_before, not_after) = validity_from_now(30);
    let names = (0..1000).map(|idx| format!("host-{idx}.a-long-name.example"));
    let addresses = names.chain(["127.0.0.1".to_owned()]).collect();
    let (name, role) = ("here".to_owned(), Role::Server);
    let request = Request { name, role, addresses, not_before, not_after };
    Authority::generate().unwrap().issue_into(dir, &request, false).unwrap();
    Tls::open(TlsFiles::in_folder(dir).unwrap(), ClientCertificates::Optional).unwrap()
}

/// A socket with the smallest receive buffer, connected to the listener of `io`.
fn narrow_stream(io: &Io) -> TcpStream {
    let stream = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    sockopt::set_socket_recv_buffer_size(&stream, 1).unwrap();
    connect(&stream, &io.listener.local_addr().unwrap()).unwrap();
    let stream = TcpStream::from(stream);
    stream.set_nonblocking(true).unwrap();
    stream
}

/// Whether records of a handshake wait for room in its socket.
fn has_records(io: &Io) -> bool {
    io.places
        .iter()
        .any(|place| matches!(place, Place::Handshake(handshake) if handshake.socket.has_records()))
}

/// Appends the bytes that have arrived.
fn receive(stream: &mut TcpStream, received: &mut Vec<u8>) {
    let mut bytes = [0; 4096];
    while let Ok(got @ 1..) = stream.read(&mut bytes) {
        received.extend_from_slice(&bytes[..got]);
    }
}

/// The peer reads nothing until the socket is full, and sends nothing before it has the whole certificate. So the engine
/// goes on only if it waits for room to write.
#[test]
fn a_handshake_goes_on_after_the_sockets_buffer_was_full() {
    let dir = tempfile::tempdir().unwrap();
    let tls = long_certificate(dir.path());
    let config = EngineConfig { tls: Some(tls.clone()), ..EngineConfig::local() };
    let (_shared, mut io) = Io::new(config).unwrap();
    // Accepted sockets take over the size.
    sockopt::set_socket_send_buffer_size(&io.listener, 1).unwrap();
    let mut stream = narrow_stream(&io);
    let mut client = tls.begin_connect("127.0.0.1").unwrap();
    let limit = Instant::now() + Duration::from_secs(20);
    while client.wants_write() {
        // An error means that the small socket is full for a moment.
        let _ = client.write_tls(&mut stream);
        io.poll_sockets(Duration::from_millis(1));
        assert!(Instant::now() < limit, "the hello was not sent");
    }
    while !has_records(&io) {
        io.poll_sockets(Duration::from_millis(1));
        assert!(Instant::now() < limit, "the certificate fits into the socket's buffer");
    }
    let mut received = Vec::new();
    while has_records(&io) {
        receive(&mut stream, &mut received);
        io.poll_sockets(Duration::from_millis(1));
        assert!(Instant::now() < limit, "stands still after {} bytes", received.len());
    }
    while client.is_handshaking() || client.wants_write() {
        receive(&mut stream, &mut received);
        let mut rest = &received[..];
        while let Ok(1..) = client.read_tls(&mut rest) {
            client.process_new_packets().expect("the engine's records");
        }
        received = rest.to_vec();
        while client.wants_write() && client.write_tls(&mut stream).is_ok() {}
        io.poll_sockets(Duration::from_millis(1));
        assert!(Instant::now() < limit, "the handshake does not end");
    }
}
