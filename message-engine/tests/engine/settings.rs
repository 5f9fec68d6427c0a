//! Settings and deadlines at their limits.

use std::time::{Duration, Instant};

use switchyard_message_engine::credit::CreditConfig;
use switchyard_message_engine::engine::{
    ConnectError, Engine, EngineConfig, StartError, WaitError,
};

use crate::common::{TestTransport, config, memory_of, poisoned, soon};

/// The last representable instant.
fn farthest() -> Instant {
    let (mut at, mut step) = (Instant::now(), Duration::from_secs(1 << 62));
    while !step.is_zero() {
        match at.checked_add(step) {
            Some(later) => at = later,
            None => step /= 2,
        }
    }
    at
}

#[tokio::test]
async fn deadlines_may_be_as_far_as_there_are_instants() {
    let by = TestTransport::Tcp;
    let (here, there) = (Engine::start(config(by)).unwrap(), Engine::start(config(by)).unwrap());
    let addr = there.endpoint().addr;
    let one = here.connect(addr, farthest()).unwrap();
    let other = here.connect_async(addr, farthest()).await.unwrap();
    let back = there.accept(farthest()).unwrap();
    let back_too = there.accept_async(farthest()).await.unwrap();
    let (source, target) = (memory_of(&here, &[7; 100]), poisoned(&there, 100));
    let (from, to) = (source.span(0, 100).unwrap(), target.span(0, 100).unwrap());
    for (out, back) in [(&one, &back), (&other, &back_too)] {
        let receive = back.start_recv(&to, farthest()).unwrap();
        assert_eq!(out.send(&from, farthest()), Ok(100));
        assert_eq!(receive.wait(), Ok(100));
        out.notify_async(b"far", farthest()).await.unwrap();
        assert_eq!(there.next_notification_async(farthest()).await.unwrap().bytes, b"far");
    }
}

#[test]
fn settings_that_no_peer_accepts_are_refused_at_the_start() {
    let start = |change: fn(&mut EngineConfig)| {
        let mut settings = config(TestTransport::Tcp);
        change(&mut settings);
        Engine::start(settings).map(drop).map_err(|error| error.to_string())
    };
    let long = start(|it| it.pci_bdf = Some("0".repeat(33))).unwrap_err();
    assert!(long.contains("pci_bdf") && long.contains("at most 32"), "{long}");
    let spaced = start(|it| it.pci_bdf = Some("0000:3b 00.0".to_owned())).unwrap_err();
    assert!(spaced.contains("0000:3b 00.0"), "{spaced}");
    start(|it| it.pci_bdf = Some("0".repeat(32))).unwrap();
    let ticket = start(|it| it.ticket = Some("s".repeat(513))).unwrap_err();
    assert!(ticket.contains("513") && ticket.contains("at most 512"), "{ticket}");
    assert!(!ticket.contains("ss"), "the secret is not for logs");
    let both = |ticket: &str| EngineConfig {
        ticket: Some(ticket.to_owned()),
        ..config(TestTransport::Tcp)
    };
    let longest = "s".repeat(512);
    let listener = Engine::start(both(&longest)).unwrap();
    Engine::start(both(&longest)).unwrap().connect(listener.endpoint().addr, soon()).unwrap();
    let none = EngineConfig { max_handshakes: 0, ..config(TestTransport::Tcp) };
    assert!(matches!(Engine::start(none), Err(StartError::Config { .. })));
}

/// Every connection needs credit senders, whose number is limited.
#[test]
fn a_peer_for_whom_there_is_no_place_never_has_a_connection() {
    let few = || {
        let all = config(TestTransport::Tcp);
        EngineConfig { credit: CreditConfig { max_senders: 2, ..all.credit }, ..all }
    };
    let full = Engine::start(few()).unwrap();
    let other = Engine::start(config(TestTransport::Tcp)).unwrap();
    let addr = full.endpoint().addr;
    let kept: Vec<_> = (0..2).map(|_| other.connect(addr, soon()).unwrap()).collect();
    let back: Vec<_> = (0..2).map(|_| full.accept(soon()).unwrap()).collect();
    for _ in 0..3 {
        let error = other.connect(addr, soon()).unwrap_err();
        assert!(!matches!(error, ConnectError::Timeout { .. }), "{error}");
        // It has no place left for a connection of its own either, and reports that.
        let error = full.connect(other.endpoint().addr, soon()).unwrap_err().to_string();
        assert!(error.contains("there are 2 connections, which is the limit"), "{error}");
    }
    assert_eq!(full.accept(Instant::now()).unwrap_err(), WaitError::Deadline);
    for (out, back) in kept.iter().zip(&back) {
        assert_eq!((out.closed(), back.closed()), (None, None));
        out.notify(b"served", soon()).unwrap();
        assert_eq!(full.next_notification(soon()).unwrap().bytes, b"served");
    }
}
