//! Sockets that others open and do nothing good with, while friends are served.

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

/// A whole hello, as long as what comes with it is kept: the engine that says it waits for an answer, so that
/// what it says of its transports is true.
fn whole_hello() -> (Vec<u8>, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let engine = Engine::start(config(TestTransport::Tcp)).unwrap();
        // Nobody answers, until the stream is closed.
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

fn stranger(addr: SocketAddr, says: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(addr).unwrap();
    stream.write_all(says).unwrap();
    stream
}

/// Whether the other side has closed, after what it has said.
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

/// A friend connects and is heard.
fn is_served(engine: &Engine) {
    let friend = Engine::start(config(TestTransport::Tcp)).unwrap();
    let connection = friend.connect(engine.endpoint().addr, soon()).unwrap();
    connection.notify(b"served", soon()).unwrap();
    assert_eq!(engine.next_notification(soon()).unwrap().bytes, b"served");
}

/// Limits that only numbers can reach: no handshake ends for the time that it takes.
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
    // At every place where one can stop: nothing, within the header, within the body, and with the last
    // word left to say.
    let mut sockets: Vec<TcpStream> = [&[][..], &half[..7], &half[..16], &half[..], &hello[..]]
        .into_iter()
        .map(|says| stranger(engine.endpoint().addr, says))
        .collect();
    connect_and_notify(&engine, TestTransport::Tcp);
    for (idx, stream) in sockets.iter_mut().enumerate() {
        until(&format!("the end of handshake {idx}"), || is_closed(stream));
    }
    connect_and_notify(&engine, TestTransport::Tcp);
    until("everybody to leave", || engine.stats().num_connections == 0);
}

#[test]
fn one_who_drips_bytes_gets_no_more_time() {
    // 50 bytes are still to come, for ten times as long as the limit.
    const NUM_DROPS: u32 = 49;
    let timeout = Duration::from_secs(2);
    let engine =
        Engine::start(EngineConfig { handshake_timeout: timeout, ..config(TestTransport::Tcp) })
            .unwrap();
    let mut stream = stranger(engine.endpoint().addr, &half_a_hello());
    let mut num_drops = 0;
    until("the end of the handshake", || {
        // Never whole, always something new.
        num_drops += 1;
        assert!(num_drops <= NUM_DROPS, "every byte gives it more time");
        let _ = stream.write_all(&[0]);
        std::thread::sleep(timeout / 5);
        is_closed(&mut stream)
    });
}

#[test]
fn silent_sockets_push_out_each_other_and_no_friend() {
    const MOST: usize = 8;
    let engine = Engine::start(EngineConfig { max_handshakes: MOST, ..patient() }).unwrap();
    let half = half_a_hello();
    let mut sockets: Vec<TcpStream> =
        (0..100).map(|idx| stranger(engine.endpoint().addr, &half[..idx % half.len()])).collect();
    // Behind all of them at the listener.
    is_served(&engine);
    let num_open = sockets.iter_mut().filter_map(|s| (!is_closed(s)).then_some(())).count();
    assert!(num_open <= MOST, "{num_open} sockets are kept");
    // The last ones, which had the least time.
    assert!(sockets[..100 - MOST].iter_mut().all(is_closed));
    assert!(!is_closed(&mut sockets[99]));
}

#[test]
fn who_has_introduced_itself_outlasts_those_who_have_not() {
    let engine = Engine::start(EngineConfig { max_handshakes: 4, ..patient() }).unwrap();
    let addr = engine.endpoint().addr;
    let (hello, _speaker) = whole_hello();
    let mut slow = stranger(addr, &hello);
    // It is answered, and now it is up to it.
    slow.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut welcome = [0; 16];
    slow.read_exact(&mut welcome).unwrap();
    assert_eq!(welcome[10..12], [2, 0], "a welcome");
    let mut silent: Vec<TcpStream> = (0..20).map(|_| stranger(addr, &[])).collect();
    is_served(&engine);
    assert!(!is_closed(&mut slow));
    assert!(silent[..16].iter_mut().all(is_closed));
}

#[test]
fn silent_sockets_hold_no_places_against_friends() {
    const PLACES: usize = 4;
    let engine = Engine::start(EngineConfig { max_connections: PLACES, ..patient() }).unwrap();
    let addr = engine.endpoint().addr;
    let silent: Vec<TcpStream> = (0..20).map(|_| stranger(addr, &[])).collect();
    let friends = Engine::start(config(TestTransport::Tcp)).unwrap();
    let kept: Vec<_> = (0..PLACES).map(|_| friends.connect(addr, soon()).unwrap()).collect();
    until("as many as fit", || engine.stats().num_connections == PLACES);
    // Full of friends now: nobody of them goes for one more.
    let error = friends.connect(addr, soon()).unwrap_err();
    assert!(matches!(error, ConnectError::Foreign { .. }), "{error}");
    for connection in &kept {
        connection.notify(b"still here", soon()).unwrap();
    }
    // And an engine that is full of silence can still call out.
    let caller = Engine::start(EngineConfig { max_connections: PLACES, ..patient() }).unwrap();
    let _silent: Vec<TcpStream> = (0..20).map(|_| stranger(caller.endpoint().addr, &[])).collect();
    is_served(&caller);
    caller.connect(friends.endpoint().addr, soon()).unwrap();
    drop(silent);
}

#[test]
fn what_peers_leave_untaken_is_bounded() {
    let config_of = |most| EngineConfig { max_untaken_bytes: most, ..config(TestTransport::Tcp) };
    let engine = Engine::start(config_of(10_000)).unwrap();
    let addr = engine.endpoint().addr;
    let friend = Engine::start(config(TestTransport::Tcp)).unwrap();
    let (mut num_told, mut refused) = (0, None);
    // Each time with a new window.
    for _ in 0..20 {
        match friend.connect(addr, soon()) {
            Ok(connection) => {
                connection.notify(&[7; 4000], soon()).unwrap();
                num_told += 1;
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
    assert_eq!(num_told, 3, "the third goes beyond the limit, which the fourth finds");
    // Nothing is lost, and with room there is a welcome again.
    for _ in 0..num_told {
        assert_eq!(engine.next_notification(soon()).unwrap().bytes, [7; 4000]);
    }
    friend.connect(addr, soon()).unwrap();
}

#[test]
fn connections_that_nobody_accepts_do_not_pile_up() {
    const PLACES: usize = 4;
    let engine =
        Engine::start(EngineConfig { max_connections: PLACES, ..config(TestTransport::Tcp) })
            .unwrap();
    let friend = Engine::start(config(TestTransport::Tcp)).unwrap();
    for _ in 0..10 * PLACES {
        let connection = friend.connect(engine.endpoint().addr, soon()).unwrap();
        until("the engine to see it", || engine.stats().num_connections == 1);
        drop(connection);
        until("the engine to see it go", || engine.stats().num_connections == 0);
    }
    // What is over is nobody's to accept, and what stands is.
    let connection = friend.connect(engine.endpoint().addr, soon()).unwrap();
    let back = engine.accept(soon()).unwrap();
    assert_eq!(back.peer().engine_id, friend.endpoint().engine_id);
    assert_eq!(engine.accept(Instant::now()).unwrap_err(), WaitError::Deadline);
    assert_eq!(connection.closed(), None);
}
