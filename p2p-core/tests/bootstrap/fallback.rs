//! Networks that both sides offer, but that do not work between them.

use p2p_core::SlotLayout;
use p2p_core::bootstrap::wire::{KIND_READY, Welcome};
use p2p_core::bootstrap::{Fallback, MAX_USELESS_LINKS};
use p2p_core::network::SideDescription;

use super::stand_in::StandIn;
use super::*;

const KINDS: [TransportKind; 2] = [TransportKind::Verbs, TransportKind::Libfabric];

struct Host {
    fast: Arc<StandIn>,
    slow: Arc<StandIn>,
}

impl Host {
    fn new() -> Self {
        let fast = StandIn::new(TransportKind::Verbs, "fast");
        Self { fast, slow: StandIn::new(TransportKind::Libfabric, "slow") }
    }

    fn networks(&self) -> Vec<Arc<dyn p2p_core::network::Network>> {
        vec![Arc::clone(&self.fast) as _, Arc::clone(&self.slow) as _]
    }

    async fn serve(&self) -> Server {
        let networks = self.networks();
        serve(ListenerConfig { transports: KINDS.to_vec(), networks, ..listener_config() }).await
    }

    fn config(&self, fallback: &Fallback) -> ConnectConfig {
        ConnectConfig {
            transports: KINDS.to_vec(),
            networks: self.networks(),
            fallback: fallback.clone(),
            ..connect_config()
        }
    }
}

/// The connection as both sides see it.
async fn meet(server: &mut Server, config: ConnectConfig) -> (Connection, Connection) {
    let here = within(connect(server.addr, hello(b""), config)).await.unwrap();
    let there = within(server.peers.recv()).await.unwrap();
    assert_eq!(here.transport, there.transport);
    assert_eq!(here.left_out, there.left_out);
    (here, there)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_network_by_which_the_peers_cannot_join_gives_way_to_the_next() {
    for at_listener in [true, false] {
        let (near, far) = (Host::new(), Host::new());
        let mut server = far.serve().await;
        let fallback = Fallback::default();
        let (here, _) = meet(&mut server, near.config(&fallback)).await;
        assert_eq!(here.transport.to_string(), "verbs:fast");
        assert_eq!(here.left_out, "");
        let broken = if at_listener { &far } else { &near };
        broken.fast.refuse(true);
        let (here, _) = meet(&mut server, near.config(&fallback)).await;
        assert_eq!(here.transport.to_string(), "libfabric:slow");
        let why = here.left_out;
        assert!(why.contains("verbs:fast") && why.contains("no path to the peer"), "{why}");
        assert_eq!((near.fast.opened(), far.fast.opened()), (2, 2));
        // The transport is not tried again at once, even if it works again.
        broken.fast.refuse(false);
        let (here, _) = meet(&mut server, near.config(&fallback)).await;
        assert_eq!(here.transport.to_string(), "libfabric:slow");
        assert_eq!((near.fast.opened(), far.fast.opened()), (2, 2));
        // Failures with one peer do not affect another peer.
        let (here, _) = meet(&mut server, near.config(&Fallback::default())).await;
        assert_eq!(here.transport.to_string(), "verbs:fast");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_network_that_the_listener_cannot_open_gives_way_in_the_same_handshake() {
    let (near, far) = (Host::new(), Host::new());
    let mut server = far.serve().await;
    far.fast.is_absent.store(true, Ordering::SeqCst);
    let (here, _) = meet(&mut server, near.config(&Fallback::default())).await;
    assert_eq!(here.transport.to_string(), "libfabric:slow");
    assert_eq!(server.stats.accepted.load(Ordering::SeqCst), 1);
    far.slow.is_absent.store(true, Ordering::SeqCst);
    let reject = rejected(server.addr, hello(b""), near.config(&Fallback::default())).await;
    assert_eq!(reject.code, RejectCode::TRANSPORT);
    assert_eq!(reject.message.matches("no path to the peer").count(), 2, "{reject}");
}

#[tokio::test(flavor = "multi_thread")]
async fn links_that_carried_nothing_lead_to_the_next_network() {
    let (near, far) = (Host::new(), Host::new());
    let mut server = far.serve().await;
    let fallback = Fallback::default();
    for round in 0..MAX_USELESS_LINKS {
        let (here, _) = meet(&mut server, near.config(&fallback)).await;
        assert_eq!(here.transport.to_string(), "verbs:fast", "round {round}");
        fallback.note_useless(&here.transport, "silent");
    }
    let (here, _) = meet(&mut server, near.config(&fallback)).await;
    assert_eq!(here.transport.to_string(), "libfabric:slow");
    assert!(here.left_out.contains("silent"), "{}", here.left_out);
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_left_out_where_nothing_else_is_common() {
    let (near, far) = (Host::new(), Host::new());
    let mut server = far.serve().await;
    let fallback = Fallback::default();
    let only_fast =
        || ConnectConfig { transports: vec![TransportKind::Verbs], ..near.config(&fallback) };
    far.fast.refuse(true);
    for round in 1..4 {
        // Each rejection names the real obstacle, not the lack of a common transport.
        let reject = rejected(server.addr, hello(b""), only_fast()).await;
        assert_eq!(reject.code, RejectCode::TRANSPORT, "{reject}");
        assert_eq!(far.fast.opened(), round);
        assert_eq!(
            server.stats.accepted.load(Ordering::SeqCst),
            round as u64,
            "one handshake each"
        );
    }
    far.fast.refuse(false);
    let (here, _) = meet(&mut server, only_fast()).await;
    assert_eq!(here.transport.to_string(), "verbs:fast");
    assert_eq!(here.left_out, "");
}

/// Behaviour of a listener once the other side has joined by the chosen network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ListenerBehaviour {
    /// Its process exits before the other side has joined.
    ExitsBeforeJoin,
    /// Its process exits.
    Exits,
    /// It resets the connection.
    Resets,
    /// It stays, and is still joining.
    Joins,
    /// It reports that the time is over.
    ReportsTimeout,
}

/// A listener that chooses the fast network each time and never completes a handshake.
async fn serve_half(behaviour: ListenerBehaviour) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let mut kept = Vec::new();
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            // A side that gave up meanwhile does not matter here.
            if half_a_handshake(&mut stream, behaviour).await.is_ok() {
                kept.push(stream);
            }
        }
    });
    addr
}

async fn half_a_handshake(
    stream: &mut TcpStream,
    behaviour: ListenerBehaviour,
) -> std::io::Result<()> {
    read_raw(stream).await?;
    let bytes = SlotLayout::new(SLOT).unwrap().slot_bytes() as u64;
    let welcome = Welcome {
        offer: Offer { kind: TransportKind::Verbs, flavour: "fast".to_owned() },
        side: SideDescription { bytes, ..SideDescription::default() },
        nonce: [0; 16],
        rendezvous: [0; 16],
        payload: Vec::new(),
    };
    stream.write_all(&wire::encode_welcome(&welcome)).await?;
    if behaviour == ListenerBehaviour::ExitsBeforeJoin {
        return Err(std::io::ErrorKind::BrokenPipe.into());
    }
    assert_eq!(read_raw(stream).await?, KIND_READY);
    match behaviour {
        ListenerBehaviour::ExitsBeforeJoin | ListenerBehaviour::Exits => {
            Err(std::io::ErrorKind::BrokenPipe.into())
        }
        ListenerBehaviour::Resets => {
            stream.set_zero_linger()?;
            Err(std::io::ErrorKind::ConnectionReset.into())
        }
        ListenerBehaviour::Joins => Ok(()),
        ListenerBehaviour::ReportsTimeout => {
            let reject = Reject::new(RejectCode::TIMEOUT, "not complete after 5000 ms");
            stream.write_all(&wire::encode_reject(&reject)).await
        }
    }
}

/// Reads a message and returns its kind.
async fn read_raw(stream: &mut TcpStream) -> std::io::Result<u16> {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header).await?;
    let header = wire::decode_header(&header).unwrap();
    stream.read_exact(&mut vec![0; header.body_bytes]).await?;
    Ok(header.kind)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listener_that_goes_in_mid_handshake_says_nothing_about_the_network() {
    for behaviour in
        [ListenerBehaviour::Exits, ListenerBehaviour::Resets, ListenerBehaviour::ExitsBeforeJoin]
    {
        let addr = serve_half(behaviour).await;
        let (near, fallback) = (Host::new(), Fallback::default());
        let mut config = near.config(&fallback);
        if behaviour == ListenerBehaviour::ExitsBeforeJoin {
            // This side is still joining when its time is over.
            config.timeout = Duration::from_millis(300);
            near.fast.join_within(Duration::from_millis(600));
        }
        for round in 0..2 * MAX_USELESS_LINKS {
            let error = within(connect(addr, hello(b""), config.clone())).await.unwrap_err();
            match (behaviour, &error) {
                (ListenerBehaviour::ExitsBeforeJoin, ConnectError::Timeout { .. }) => {}
                (
                    ListenerBehaviour::Exits | ListenerBehaviour::Resets,
                    ConnectError::Broken { .. },
                ) => {}
                _ => panic!("{behaviour:?} {round}: {error}"),
            }
            assert_eq!(fallback.left_out(), [], "{behaviour:?} {round}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn joining_that_never_ends_with_a_listener_that_is_there_counts() {
    for behaviour in [ListenerBehaviour::Joins, ListenerBehaviour::ReportsTimeout] {
        let addr = serve_half(behaviour).await;
        let (near, fallback) = (Host::new(), Fallback::default());
        let timeout = Duration::from_millis(400);
        let config = ConnectConfig { timeout, ..near.config(&fallback) };
        let mut num_rounds = 0;
        while fallback.left_out().is_empty() {
            within(connect(addr, hello(b""), config.clone())).await.unwrap_err();
            num_rounds += 1;
            // A busy machine may need more rounds, if the time runs out before joining begins.
            assert!(num_rounds < 30, "{behaviour:?}");
        }
        assert!(num_rounds >= MAX_USELESS_LINKS, "{behaviour:?}: {num_rounds}");
        let why = fallback.left_out()[0].to_string();
        assert!(why.contains("verbs:fast") && why.contains("not complete"), "{why}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_offer_that_works_is_not_left_out_for_a_handshake_beside_it() {
    let (near, far) = (Host::new(), Host::new());
    let mut server = far.serve().await;
    let fallback = Fallback::default();
    let (first, _) = meet(&mut server, near.config(&fallback)).await;
    let working = fallback.note_works(&first.transport);
    let addr = serve_half(ListenerBehaviour::ReportsTimeout).await;
    for _ in 0..2 * MAX_USELESS_LINKS {
        within(connect(addr, hello(b""), near.config(&fallback))).await.unwrap_err();
        assert_eq!(fallback.left_out(), []);
    }
    // A side that fails to join takes the next best transport for that connection.
    far.fast.refuse(true);
    let (here, _) = meet(&mut server, near.config(&fallback)).await;
    assert_eq!(here.transport.to_string(), "libfabric:slow");
    assert!(here.left_out.contains("no path to the peer"), "{}", here.left_out);
    far.fast.refuse(false);
    let (here, _) = meet(&mut server, near.config(&fallback)).await;
    assert_eq!(here.transport.to_string(), "verbs:fast");
    drop(working);
    far.fast.refuse(true);
    meet(&mut server, near.config(&fallback)).await;
    assert_eq!(fallback.left_out().len(), 1);
}
