//! Handshakes that end early, over a network that takes long to free its sides.

use super::stand_in::StandIn;
use super::*;

const KIND: TransportKind = TransportKind::Verbs;

fn stand_in() -> Arc<StandIn> {
    let network = StandIn::new(KIND, "slow-to-end");
    network.filter_next(0);
    network
}

fn config(network: &Arc<StandIn>) -> ConnectConfig {
    ConnectConfig {
        transports: vec![KIND],
        networks: vec![Arc::clone(network) as _],
        ..connect_config()
    }
}

async fn serve_over(network: &Arc<StandIn>, max_peers: usize) -> Server {
    let networks = vec![Arc::clone(network) as _];
    let transports = vec![KIND];
    serve(ListenerConfig { transports, networks, max_peers, ..listener_config() }).await
}

async fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let since = Instant::now();
    while !is_so() {
        assert!(since.elapsed() < Duration::from_secs(60), "never: {what}");
        sleep(Duration::from_millis(5)).await;
    }
}

/// All tasks of the listener share one thread.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_listener_goes_on_while_sides_of_broken_handshakes_end() {
    let (near, far) = (stand_in(), stand_in());
    let mut server = serve_over(&far, 2).await;
    far.hold_ends(true);
    near.refuse(true);
    connect(server.addr, hello(b""), config(&near)).await.unwrap_err();
    eventually("its side ends", || far.ends() != (0, 0)).await;
    near.refuse(false);
    let here = within(connect(server.addr, hello(b""), config(&near))).await.unwrap();
    let there = within(server.peers.recv()).await.unwrap();
    assert_eq!(far.ends(), (1, 0), "no task waited for it");
    // The peer's permit is free only when its memory is.
    let reject = rejected(server.addr, hello(b""), config(&near)).await;
    assert_eq!(reject.code, RejectCode::FULL);
    far.hold_ends(false);
    eventually("it has ended", || far.ends() == (0, 0)).await;
    let another = timeout(Duration::from_secs(60), async {
        loop {
            match connect(server.addr, hello(b""), config(&near)).await {
                Ok(connection) => break connection,
                // The permit is freed right after the memory.
                Err(error) => assert_eq!(error.reject().map(|r| r.code), Some(RejectCode::FULL)),
            }
        }
    });
    another.await.expect("a free permit");
    drop((here, there));
}

/// The caller's tasks share the thread with the listener's.
#[tokio::test]
async fn a_peer_rejected_late_does_not_wait_for_the_end_of_the_slots() {
    let (near, far) = (stand_in(), stand_in());
    let server = serve_over(&far, 2).await;
    far.refuse(true);
    near.hold_ends(true);
    let reject = rejected(server.addr, hello(b""), config(&near)).await;
    assert_eq!(reject.code, RejectCode::TRANSPORT);
    eventually("the slots end", || near.ends() != (0, 0)).await;
    assert_eq!(near.ends(), (1, 0), "no task waited for them");
    near.hold_ends(false);
    eventually("they have ended", || near.ends() == (0, 0)).await;
}
