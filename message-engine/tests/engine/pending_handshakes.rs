//! Sockets whose handshakes never end, while other peers are served.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use switchyard_message_engine::engine::{ConnectError, Engine, EngineConfig, WaitError};

use crate::common::{TestTransport, config, connect_and_notify, soon, until};

/// The header of a hello whose body has 100 bytes, and half of the body.
fn half_a_hello() -> Vec<u8> {
    let mut bytes = b"SYENGINE".to_vec();
    bytes.extend([2, 0, 1, 0]);
    bytes.extend(100u32.to_le_bytes());
    bytes.extend([0; 50]);
    bytes
}

/// A whole hello, valid while the returned stream is open. Its engine waits for an answer meanwhile, so the details of
/// its transports are valid.
fn whole_hello() -> (Vec<u8>, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let engine = Engine::start(config(TestTransport::Tcp)).unwrap();
        // There is no answer until the stream is closed.
        engine.connect(addr, soon()).unwrap_err();
    });
    let (mut stream, _) = listener.accept().unwrap();
    let mut hello = vec![0; 16];
    stream.read_exact(&mut hello).unwrap();
    let body_bytes = u32::from_le_bytes(hello[12..16].try_into().unwrap()) as usize;
    hello.resize(16 + body_bytes, 0);
    stream.read_exact(&mut hello[16..]).unwrap();
    (hello, stream)
}

fn raw_socket(addr: SocketAddr, says: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(addr).unwrap();
    stream.write_all(says).unwrap();
    stream
}

/// Whether the other side has closed the stream. Discards its bytes.
fn is_closed(stream: &mut TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    loop {
        match stream.read(&mut [0; 1024]) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() != ErrorKind::WouldBlock,
        }
    }
}

/// Checks that another engine can connect and is served.
fn is_served(engine: &Engine) {
    let other = Engine::start(config(TestTransport::Tcp)).unwrap();
    let connection = other.connect(engine.endpoint().addr, soon()).unwrap();
    connection.notify(b"served", soon()).unwrap();
    assert_eq!(engine.next_notification(soon()).unwrap().bytes, b"served");
}

/// Limits on numbers only: no handshake times out.
fn patient() -> EngineConfig {
    EngineConfig { handshake_timeout: Duration::from_secs(3600), ..config(TestTransport::Tcp) }
}

#[test]
fn handshakes_that_stall_anywhere_end_in_time() {
    let timeout = Duration::from_secs(3);
    let engine =
        Engine::start(EngineConfig { handshake_timeout: timeout, ..config(TestTransport::Tcp) })
            .unwrap();
    let (hello, _speaker) = whole_hello();
    let half = half_a_hello();
    // Handshakes that stop at every point: before the first byte, within the header, within the body, and before the
    // last message.
    let mut sockets: Vec<TcpStream> = [&[][..], &half[..7], &half[..16], &half[..], &hello[..]]
        .into_iter()
        .map(|says| raw_socket(engine.endpoint().addr, says))
        .collect();
    connect_and_notify(&engine, TestTransport::Tcp);
    for (idx, stream) in sockets.iter_mut().enumerate() {
        until(&format!("the end of handshake {idx}"), || is_closed(stream));
    }
    connect_and_notify(&engine, TestTransport::Tcp);
    until("all connections to end", || engine.stats().num_connections == 0);
}

#[test]
fn a_slow_sender_gets_no_more_time() {
    // The missing 50 bytes take ten times as long as the limit.
    const NUM_DROPS: u32 = 49;
    let timeout = Duration::from_secs(2);
    let engine =
        Engine::start(EngineConfig { handshake_timeout: timeout, ..config(TestTransport::Tcp) })
            .unwrap();
    let mut stream = raw_socket(engine.endpoint().addr, &half_a_hello());
    let mut num_drops = 0;
    until("the end of the handshake", || {
        // A message that is never whole, with new bytes all the time.
        num_drops += 1;
        assert!(num_drops <= NUM_DROPS, "every byte gives it more time");
        let _ = stream.write_all(&[0]);
        std::thread::sleep(timeout / 5);
        is_closed(&mut stream)
    });
}

#[test]
fn silent_sockets_evict_each_other_and_no_served_peer() {
    const MOST: usize = 8;
    let engine = Engine::start(EngineConfig { max_handshakes: MOST, ..patient() }).unwrap();
    let half = half_a_hello();
    let mut sockets: Vec<TcpStream> =
        (0..100).map(|idx| raw_socket(engine.endpoint().addr, &half[..idx % half.len()])).collect();
    // Queued behind all of them at the listener.
    is_served(&engine);
    let num_open = sockets.iter_mut().filter_map(|s| (!is_closed(s)).then_some(())).count();
    assert!(num_open <= MOST, "{num_open} sockets are kept");
    // The latest sockets, whose deadlines are the furthest.
    assert!(sockets[..100 - MOST].iter_mut().all(is_closed));
    assert!(!is_closed(&mut sockets[99]));
}

#[test]
fn handshakes_with_a_hello_outlast_silent_ones() {
    let engine = Engine::start(EngineConfig { max_handshakes: 4, ..patient() }).unwrap();
    let addr = engine.endpoint().addr;
    let (hello, _speaker) = whole_hello();
    let mut slow = raw_socket(addr, &hello);
    // The engine has answered it, and waits for the next message.
    slow.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut welcome = [0; 16];
    slow.read_exact(&mut welcome).unwrap();
    assert_eq!(welcome[10..12], [2, 0], "a welcome");
    let mut silent: Vec<TcpStream> = (0..20).map(|_| raw_socket(addr, &[])).collect();
    is_served(&engine);
    assert!(!is_closed(&mut slow));
    assert!(silent[..16].iter_mut().all(is_closed));
}

#[test]
fn silent_sockets_take_no_places_from_served_peers() {
    const PLACES: usize = 4;
    let engine = Engine::start(EngineConfig { max_connections: PLACES, ..patient() }).unwrap();
    let addr = engine.endpoint().addr;
    let silent: Vec<TcpStream> = (0..20).map(|_| raw_socket(addr, &[])).collect();
    let others = Engine::start(config(TestTransport::Tcp)).unwrap();
    let kept: Vec<_> = (0..PLACES).map(|_| others.connect(addr, soon()).unwrap()).collect();
    until("as many as fit", || engine.stats().num_connections == PLACES);
    // All places are connections now. None of them is evicted for one more.
    let error = others.connect(addr, soon()).unwrap_err();
    assert!(matches!(error, ConnectError::Foreign { .. }), "{error}");
    for connection in &kept {
        connection.notify(b"still here", soon()).unwrap();
    }
    // An engine whose places are all silent sockets can still connect to others.
    let caller = Engine::start(EngineConfig { max_connections: PLACES, ..patient() }).unwrap();
    let _silent: Vec<TcpStream> =
        (0..20).map(|_| raw_socket(caller.endpoint().addr, &[])).collect();
    is_served(&caller);
    caller.connect(others.endpoint().addr, soon()).unwrap();
    drop(silent);
}

#[test]
fn untaken_notifications_are_bounded() {
    let config_of = |most| EngineConfig { max_untaken_bytes: most, ..config(TestTransport::Tcp) };
    let engine = Engine::start(config_of(10_000)).unwrap();
    let addr = engine.endpoint().addr;
    let other = Engine::start(config(TestTransport::Tcp)).unwrap();
    let (mut num_sent, mut refused) = (0, None);
    // Each connection has a new window.
    for _ in 0..20 {
        match other.connect(addr, soon()) {
            Ok(connection) => {
                connection.notify(&[7; 4000], soon()).unwrap();
                num_sent += 1;
            }
            Err(error) => {
                refused = Some(error);
                break;
            }
        }
    }
    let refused = refused.expect("an end");
    assert!(
        matches!(&refused, ConnectError::Rejected { message, .. } if message.contains("notifications")),
        "{refused}"
    );
    assert_eq!(num_sent, 3, "the third goes beyond the limit, which the fourth finds");
    // No notification is lost. Once they are taken, a connection is accepted again.
    for _ in 0..num_sent {
        assert_eq!(engine.next_notification(soon()).unwrap().bytes, [7; 4000]);
    }
    other.connect(addr, soon()).unwrap();
}

#[test]
fn connections_that_are_not_accepted_do_not_pile_up() {
    const PLACES: usize = 4;
    let engine =
        Engine::start(EngineConfig { max_connections: PLACES, ..config(TestTransport::Tcp) })
            .unwrap();
    let other = Engine::start(config(TestTransport::Tcp)).unwrap();
    for _ in 0..10 * PLACES {
        let connection = other.connect(engine.endpoint().addr, soon()).unwrap();
        until("the engine to see it", || engine.stats().num_connections == 1);
        drop(connection);
        until("the engine to see it go", || engine.stats().num_connections == 0);
    }
    // Only the established connection can be accepted, not the closed ones.
    let connection = other.connect(engine.endpoint().addr, soon()).unwrap();
    let back = engine.accept(soon()).unwrap();
    assert_eq!(back.peer().engine_id, other.endpoint().engine_id);
    assert_eq!(engine.accept(Instant::now()).unwrap_err(), WaitError::Deadline);
    assert_eq!(connection.closed(), None);
}
