//! Peers that misbehave or die.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use switchyard_message_engine::engine::{
    CloseReason, ConnectError, Descriptor, Engine, EngineConfig, TransferError,
};

use crate::common::{
    TestTransport, config, connect_and_notify, contents, memory_of, pair, poisoned, soon, until,
};

#[test]
fn descriptors_that_do_not_fit_are_refused() {
    for by in TestTransport::robust() {
        let (pair, third) = (pair(by), Engine::start(config(by)).unwrap());
        let target = poisoned(&pair.there, 1000);
        let source = memory_of(&pair.here, &[1; 2000]);
        let good = pair.back.advertise(&target.span(0, 1000).unwrap()).unwrap();
        let span = source.span(0, 1000).unwrap();
        let short = source.span(0, 999).unwrap();
        assert!(pair.out.write(&short, &good, soon()).unwrap_err().to_string().contains("999"));
        let other = Descriptor { engine_id: third.endpoint().engine_id, ..good };
        assert!(pair.out.write(&span, &other, soon()).unwrap_err().to_string().contains("engine"));
        // A key that was never given out, and ranges that leave their registration. If the target's device checks, the
        // first refusal ends the connection, so each case has a connection of its own.
        let mut forged = good;
        forged.region.key ^= if by.ends_with_a_refusal() { 0xff00 } else { 1 << 45 };
        let mut far = good;
        (far.region.bytes, far.offset) = (1 << 40, 500);
        for (bad, is_read, expected) in
            [(forged, false, "key"), (far, false, "leaves"), (far, true, "leaves")]
        {
            let out = pair.here.connect(pair.there.endpoint().addr, soon()).unwrap();
            let _back = pair.there.accept(soon()).unwrap();
            let refused = match is_read {
                true => out.read(&span, &bad, soon()),
                false => out.write(&span, &bad, soon()),
            };
            let error = refused.unwrap_err().to_string();
            if by.ends_with_a_refusal() {
                let key = format!("with key {:#x}", bad.region.key);
                assert!(error.contains("denies access") && error.contains(&key), "{by:?}: {error}");
                assert_eq!(contents(&target, 0, 1000), [0xa5; 1000]);
                // A device cannot use its queue pair any more; `ofi_rxm` may connect again.
                let again = out.write(&span, &good, soon());
                assert!(again.is_err() || by.is_over_rxm(), "{by:?}");
                target.copy_in(0, &[0xa5; 1000]).unwrap();
            } else {
                assert!(error.contains(expected), "{by:?}: {error}");
                out.write(&short, &good, soon()).unwrap_err();
                out.read(&span, &good, soon()).unwrap();
            }
            assert_eq!(contents(&target, 0, 1000), [0xa5; 1000]);
        }
        // Other connections stay usable.
        source.copy_in(0, &[1; 1000]).unwrap();
        pair.out.write(&span, &good, soon()).unwrap();
        assert_eq!(contents(&target, 0, 1000), [1; 1000]);
        let foreign = memory_of(&third, &[0; 1000]).span(0, 1000).unwrap();
        assert!(pair.out.write(&foreign, &good, soon()).is_err());
    }
}

#[test]
fn pending_transfers_fail_when_the_peer_leaves() {
    for by in TestTransport::all() {
        let pair = pair(by);
        let target = poisoned(&pair.here, 100_000);
        let receives: Vec<_> = (0..10)
            .map(|_| pair.out.start_recv(&target.span(0, 100_000).unwrap(), soon()).unwrap())
            .collect();
        let source = memory_of(&pair.here, &[1; 100_000]);
        let send = pair.out.start_send(&source.span(0, 100_000).unwrap(), soon()).unwrap();
        drop(pair.there);
        let reason = CloseReason::Left;
        for receive in receives {
            let op = "recv";
            let expected = TransferError::Disconnected { op, reason: reason.clone() };
            assert_eq!(receive.wait(), Err(expected), "{by:?}");
        }
        assert!(send.wait().is_err());
        assert_eq!(pair.out.closed(), Some(reason));
        assert!(pair.out.start_recv(&target.span(0, 1).unwrap(), soon()).is_err());
        // The engine holds no buffers any more.
        assert!(pair.here.dereg(target).unwrap() && pair.here.dereg(source).unwrap());
        assert_eq!(pair.here.stats().num_connections, 0);
    }
}

#[test]
fn deadlines_without_data_under_way_cost_only_the_transfer() {
    for by in TestTransport::all() {
        let pair = pair(by);
        let source = memory_of(&pair.here, &[1; 100_000]);
        let target = poisoned(&pair.there, 100_000);
        let brief = || Instant::now() + Duration::from_millis(30);
        let long = source.span(0, 100_000).unwrap();
        // Without a receive, the announced message is withdrawn.
        let error = pair.out.send(&long, brief()).unwrap_err().to_string();
        assert!(error.contains("deadline"), "{error}");
        // The withdrawal arrives before or after the message is matched. The deadline leaves time for a round trip: a
        // shorter one would expire with data under way.
        let whole = target.span(0, 100_000).unwrap();
        let matched = Instant::now() + Duration::from_secs(2);
        let error = pair.back.recv(&whole, matched).unwrap_err().to_string();
        assert!(error.contains("deadline") || error.contains("withdrew the message"), "{error}");
        let error = pair.back.recv(&whole, brief()).unwrap_err().to_string();
        assert!(error.contains("deadline"), "{error}");
        // The receive gets the next message.
        let second = memory_of(&pair.here, &[2; 100_000]);
        let got = pair.back.start_recv(&target.span(0, 100_000).unwrap(), soon()).unwrap();
        pair.out.send(&second.span(0, 100_000).unwrap(), soon()).unwrap();
        assert_eq!(got.wait(), Ok(100_000));
        assert_eq!(contents(&target, 0, 100_000), [2; 100_000]);
        assert_eq!(pair.out.closed(), None);
    }
}

#[test]
fn invalid_handshakes_are_refused_and_other_peers_are_served() {
    let by = TestTransport::Tcp;
    let brief = EngineConfig { handshake_timeout: Duration::from_secs(5), ..config(by) };
    let engine = Engine::start(brief).unwrap();
    let addr = engine.endpoint().addr;
    let mut header = b"SYENGINE".to_vec();
    header.extend([2, 0, 1, 0]);
    let with_len = |len: u32| [&header[..], &len.to_le_bytes()].concat();
    let mut version = with_len(0);
    version[8] = 77;
    let nonsense = [
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), "no engine"),
        (with_len(u32::MAX), "at most"),
        ([with_len(10), vec![0xff; 10]].concat(), "ends within"),
        (version, "version 77"),
    ];
    for (bytes, expected) in nonsense {
        let mut stream = TcpStream::connect(addr).unwrap();
        stream.write_all(&bytes).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer).into_owned();
        assert!(answer.contains(expected), "{expected}: {answer}");
    }
    // A silent socket, and one that stalls within the handshake, are closed at the time limit.
    let mut silent = TcpStream::connect(addr).unwrap();
    let mut stalling = TcpStream::connect(addr).unwrap();
    stalling.write_all(&with_len(100)).unwrap();
    let (_peer, connection) = connect_and_notify(&engine, by);
    for stream in [&mut silent, &mut stalling] {
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let ended = stream.read(&mut [0; 1]);
        assert!(!matches!(ended, Ok(1..)), "{ended:?}");
    }
    assert_eq!(connection.closed(), None);
}

#[test]
fn a_peer_that_breaks_the_protocol_costs_its_own_connection() {
    let by = TestTransport::Tcp;
    let engine = Engine::start(config(by)).unwrap();
    let good = Engine::start(config(by)).unwrap();
    let kept = good.connect(engine.endpoint().addr, soon()).unwrap();
    let kept_back = engine.accept(soon()).unwrap();
    // A relay that lets the handshake pass and then adds bytes of its own.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let through = listener.local_addr().unwrap();
    let target = engine.endpoint().addr;
    let relay = std::thread::spawn(move || {
        let (client, _) = listener.accept().unwrap();
        let server = TcpStream::connect(target).unwrap();
        let (mut from, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
        let up = std::thread::spawn(move || std::io::copy(&mut from, &mut to));
        let (mut from, mut to) = (server.try_clone().unwrap(), client.try_clone().unwrap());
        let down = std::thread::spawn(move || {
            let _ = std::io::copy(&mut from, &mut to);
            to.shutdown(std::net::Shutdown::Both)
        });
        (server, up, down)
    });
    let bad = Engine::start(config(by)).unwrap();
    let broken = bad.connect(through, soon()).unwrap();
    let victim = engine.accept(soon()).unwrap();
    let (mut server, _up, _down) = relay.join().unwrap();
    server.write_all(&[0xee; 64]).unwrap();
    until("the connection to end", || victim.closed().is_some());
    assert!(matches!(victim.closed(), Some(CloseReason::Protocol(_))), "{:?}", victim.closed());
    until("its peer to notice", || broken.closed().is_some());
    kept.notify(b"still here", soon()).unwrap();
    assert_eq!(engine.next_notification(soon()).unwrap().connection, kept_back.id());
}

#[test]
fn a_rejected_peer_that_keeps_sending_blocks_no_other() {
    // Without a limit the engine would read it forever.
    const MOST: Duration = Duration::from_secs(40);
    let limits =
        EngineConfig { handshake_timeout: Duration::from_secs(5), ..config(TestTransport::Tcp) };
    let engine = Engine::start(limits).unwrap();
    let addr = engine.endpoint().addr;
    // Endless bytes of no protocol.
    let floods: Vec<_> = (0..2)
        .map(|_| {
            let mut stream = TcpStream::connect(addr).unwrap();
            std::thread::spawn(move || {
                stream.set_write_timeout(Some(2 * MOST)).unwrap();
                let begin = Instant::now();
                // An engine that reads all of them fails the assertion below.
                while begin.elapsed() < MOST && stream.write_all(&[0xee; 64 << 10]).is_ok() {}
                begin.elapsed()
            })
        })
        .collect();
    std::thread::sleep(Duration::from_millis(100));
    connect_and_notify(&engine, TestTransport::Tcp);
    for flood in floods {
        let lasted = flood.join().unwrap();
        assert!(lasted < MOST, "it was read for {lasted:?}");
    }
}

#[test]
fn peers_without_the_ticket_are_refused() {
    let by = TestTransport::Tcp;
    let secret =
        |ticket: Option<&str>| EngineConfig { ticket: ticket.map(str::to_owned), ..config(by) };
    let engine = Engine::start(secret(Some("sesame"))).unwrap();
    let addr = engine.endpoint().addr;
    for (ticket, expected) in [(None, "no ticket"), (Some("samese"), "a wrong ticket")] {
        let stranger = Engine::start(secret(ticket)).unwrap();
        let error = stranger.connect(addr, soon()).unwrap_err();
        assert!(
            matches!(&error, ConnectError::Rejected { message, .. } if message.contains(expected)),
            "{error}"
        );
    }
    let friend = Engine::start(secret(Some("sesame"))).unwrap();
    friend.connect(addr, soon()).unwrap();
}

#[test]
fn an_absent_peer_is_an_error_in_time() {
    let engine = Engine::start(config(TestTransport::Tcp)).unwrap();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = free.local_addr().unwrap();
    // A listener that accepts into its backlog and never answers.
    let error = engine.connect(addr, Instant::now() + Duration::from_millis(50)).unwrap_err();
    assert!(matches!(error, ConnectError::Timeout { .. }), "{error}");
    drop(free);
    let error = engine.connect(addr, soon()).unwrap_err();
    assert!(matches!(error, ConnectError::Unreachable { .. }), "{error}");
}
