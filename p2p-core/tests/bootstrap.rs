//! The handshake: its agreements, its refusals with their reasons, and the peers that try to
//! disturb others.
#![cfg(not(loom))]

extern crate switchyard_p2p_core as p2p_core;

#[path = "bootstrap/fallback.rs"]
mod fallback;
#[path = "bootstrap/slow_ends.rs"]
mod slow_ends;
#[path = "bootstrap/stand_in.rs"]
mod stand_in;
#[path = "bootstrap/tls.rs"]
mod tls;

use std::future::Future;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use p2p_core::bootstrap::wire::{self, HEADER_BYTES, KIND_REJECT, PROTOCOL_VERSION};
use p2p_core::bootstrap::{
    BindError, CloseReason, ConnectConfig, ConnectError, HandshakeBinding, Listener,
    ListenerConfig, ListenerStats, ShownTicket, TicketCheck, TicketSource, connect,
};
use p2p_core::network::Offer;
use p2p_core::wait::{SpinPolicy, WaitSet, wait_until};
use p2p_core::{Connection, PeerHello, Reject, RejectCode, SlotConfig, TransportKind};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, timeout};

const SLOT: SlotConfig = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };

struct Server {
    addr: SocketAddr,
    peers: mpsc::UnboundedReceiver<Connection>,
    stats: Arc<ListenerStats>,
    _stop: oneshot::Sender<()>,
}

async fn serve(config: ListenerConfig) -> Server {
    let listener = Listener::bind("127.0.0.1:0", config).await.unwrap();
    let (addr, stats) = (listener.local_addr(), listener.stats());
    let (sender, peers) = mpsc::unbounded_channel();
    let (stop, stopped) = oneshot::channel::<()>();
    let accept = |hello: &PeerHello| {
        if hello.payload == b"unwelcome" {
            return Err(Reject::new(RejectCode(RejectCode::UPPER.0 + 7), "another model"));
        }
        Ok([b"re:", hello.payload.as_slice()].concat())
    };
    tokio::spawn(async move {
        let shutdown = async { drop(stopped.await) };
        listener.serve(accept, move |c| drop(sender.send(c)), shutdown).await;
    });
    Server { addr, peers, stats, _stop: stop }
}

fn listener_config() -> ListenerConfig {
    ListenerConfig { slot: SLOT, ..Default::default() }
}

fn connect_config() -> ConnectConfig {
    ConnectConfig { slot: SLOT, ..Default::default() }
}

fn hello(payload: &[u8]) -> PeerHello {
    PeerHello { peer_id: 42, generation: 7, payload: payload.to_vec() }
}

async fn rejected(addr: SocketAddr, hello: PeerHello, config: ConnectConfig) -> Reject {
    match connect(addr, hello, config).await {
        Err(ConnectError::Rejected { reject, .. }) => reject,
        other => panic!("expected a rejection, got {other:?}"),
    }
}

async fn within<T>(what: impl Future<Output = T>) -> T {
    timeout(Duration::from_secs(60), what).await.expect("in time")
}

#[tokio::test(flavor = "multi_thread")]
async fn peers_meet_exchange_frames_and_leave_in_order() {
    let mut server = serve(listener_config()).await;
    let mut here = connect(server.addr, hello(b"tiny"), connect_config()).await.unwrap();
    let mut there = within(server.peers.recv()).await.unwrap();
    assert_eq!((here.reply.as_slice(), there.reply.as_slice()), (&b"re:tiny"[..], &b"re:tiny"[..]));
    assert_eq!(there.peer, hello(b"tiny"));
    assert_eq!(
        (here.transport.kind, there.transport.kind),
        (TransportKind::Local, TransportKind::Local)
    );
    for (from, to) in [(0u8, 1u8), (1, 0)] {
        let (tx, rx) = if from == 0 {
            (&mut here.channel, &mut there.channel)
        } else {
            (&mut there.channel, &mut here.channel)
        };
        let frame = tx.try_reserve().unwrap().unwrap();
        tx.write_view(&frame).put_bytes(100, &[from, to, 77]).unwrap();
        tx.publish(frame, 103).unwrap();
        let frame = rx.try_next().unwrap().unwrap();
        let mut found = [0; 3];
        rx.view(&frame).copy_to(100, &mut found).unwrap();
        assert_eq!(found, [from, to, 77]);
    }
    assert_eq!(here.liveness.closed_now(), None);
    there.liveness.close();
    assert_eq!(within(here.liveness.closed()).await, CloseReason::Left);
    assert_eq!(within(there.liveness.closed()).await, CloseReason::Local);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_connection_is_noticed_on_the_other_side() {
    let mut server = serve(listener_config()).await;
    let here = connect(server.addr, hello(b""), connect_config()).await.unwrap();
    let there = within(server.peers.recv()).await.unwrap();
    drop(there);
    assert_eq!(within(here.liveness.closed()).await, CloseReason::Lost);
    assert_eq!(here.liveness.closed_now(), Some(CloseReason::Lost));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thread_without_a_runtime_is_woken_by_the_end_of_a_peer() {
    let mut server = serve(listener_config()).await;
    let here = connect(server.addr, hello(b""), connect_config()).await.unwrap();
    let there = within(server.peers.recv()).await.unwrap();
    let thread = std::thread::spawn(move || {
        let set = WaitSet::new().unwrap();
        set.add(here.liveness.as_fd()).unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        let policy = SpinPolicy { spin: Duration::ZERO };
        wait_until(&set, policy, deadline, || here.liveness.closed_now(), |_| {}).unwrap()
    });
    sleep(Duration::from_millis(50)).await;
    there.liveness.close();
    assert_eq!(thread.join().unwrap(), Some(CloseReason::Left));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_different_slot_is_refused_with_both_numbers() {
    let server = serve(listener_config()).await;
    let slot = SlotConfig { slot_bytes: 128 << 10, num_frames: 4 };
    let reject =
        rejected(server.addr, hello(b""), ConnectConfig { slot, ..connect_config() }).await;
    assert_eq!(reject.code, RejectCode::SLOT_MISMATCH);
    for number in ["65536", "131072", "2 frames", "4 frames"] {
        assert!(reject.message.contains(number), "{reject}");
    }
    let unusable = SlotConfig { slot_bytes: 1000, num_frames: 2 };
    let config = ConnectConfig { slot: unusable, ..connect_config() };
    assert!(matches!(connect(server.addr, hello(b""), config).await, Err(ConnectError::Slot(_))));
}

/// Admits the tickets `good` and `good2`, whose proofs repeat the length of the hello. Each is its own holder.
#[derive(Debug)]
struct LengthCheck;

impl TicketCheck for LengthCheck {
    fn check(
        &self,
        shown: Option<&ShownTicket>,
        binding: &HandshakeBinding<'_>,
    ) -> Result<Option<Box<str>>, Reject> {
        match shown {
            Some(shown) if ["good", "good2"].map(|text| ticket(text, binding)).contains(shown) => {
                Ok(Some(shown.ticket.clone().into()))
            }
            found => Err(Reject::new(RejectCode::TICKET, format!("found {found:?}"))),
        }
    }
}

#[derive(Debug)]
struct Tickets(&'static str);

impl TicketSource for Tickets {
    fn show(&self, binding: &HandshakeBinding<'_>) -> Result<ShownTicket, String> {
        match self.0 {
            "" => Err("none here".to_owned()),
            text => Ok(ticket(text, binding)),
        }
    }
}

fn ticket(text: &str, binding: &HandshakeBinding<'_>) -> ShownTicket {
    ShownTicket { ticket: text.to_owned(), proof: binding.hello.len().to_string() }
}

#[tokio::test(flavor = "multi_thread")]
async fn tickets_are_checked_before_the_listener_gives_anything_away() {
    let tickets: Option<Arc<dyn TicketCheck>> = Some(Arc::new(LengthCheck));
    let mut server = serve(ListenerConfig { tickets, ..listener_config() }).await;
    let shows = |text| -> ConnectConfig {
        let source: Arc<dyn TicketSource> = Arc::new(Tickets(text));
        ConnectConfig { tickets: Some(source), ..connect_config() }
    };
    for (config, found) in [(connect_config(), "None"), (shows("bad"), "bad")] {
        let reject = rejected(server.addr, hello(b""), config).await;
        assert_eq!(reject.code, RejectCode::TICKET);
        assert!(reject.message.contains(found), "{reject}");
    }
    let none = connect(server.addr, hello(b""), shows("")).await.unwrap_err();
    assert!(none.to_string().contains("none here"), "{none}");
    // A slot that does not fit is not named to a peer without a ticket.
    let slot = SlotConfig { slot_bytes: 128 << 10, num_frames: 4 };
    let reject = rejected(server.addr, hello(b""), ConnectConfig { slot, ..shows("bad") }).await;
    assert_eq!(reject.code, RejectCode::TICKET);
    assert_eq!(server.stats.welcomed.load(Ordering::Relaxed), 0);
    let _here = connect(server.addr, hello(b"x"), shows("good")).await.unwrap();
    within(server.peers.recv()).await.unwrap();
    assert_eq!(server.stats.welcomed.load(Ordering::Relaxed), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listener_without_a_check_ignores_tickets() {
    let mut server = serve(listener_config()).await;
    let tickets: Option<Arc<dyn TicketSource>> = Some(Arc::new(Tickets("any")));
    let config = ConnectConfig { tickets, ..connect_config() };
    let _here = connect(server.addr, hello(b""), config).await.unwrap();
    within(server.peers.recv()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn secrets_are_asked_for() {
    let secret = Some("open sesame".to_owned());
    let mut server = serve(ListenerConfig { secret: secret.clone(), ..listener_config() }).await;
    for wrong in [None, Some("open sesamE".to_owned()), Some("open sesame ".to_owned())] {
        let config = ConnectConfig { secret: wrong, ..connect_config() };
        let reject = rejected(server.addr, hello(b""), config).await;
        assert_eq!(reject.code, RejectCode::SECRET);
        assert!(!reject.message.contains("sesame"), "{reject}");
    }
    let config = ConnectConfig { secret, ..connect_config() };
    connect(server.addr, hello(b""), config).await.unwrap();
    within(server.peers.recv()).await.unwrap();
    assert_eq!(server.stats.rejected.load(Ordering::Relaxed), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn transports_are_chosen_by_preference_or_named_when_none_fits() {
    let transports = vec![TransportKind::Shm, TransportKind::Staged];
    let server = serve(ListenerConfig { transports, ..listener_config() }).await;
    let transports = vec![TransportKind::Staged, TransportKind::Shm];
    let config = ConnectConfig { transports, ..connect_config() };
    let connection = connect(server.addr, hello(b""), config).await.unwrap();
    assert_eq!(connection.transport.kind, TransportKind::Staged);

    let only_shm = serve(listener_config()).await;
    let transports = vec![TransportKind::Staged];
    let config = ConnectConfig { transports, ..connect_config() };
    let reject = rejected(only_shm.addr, hello(b""), config).await;
    assert_eq!(reject.code, RejectCode::NO_TRANSPORT);
    assert!(
        reject.message.contains("offers local, shm") && reject.message.contains("offers staged")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn another_host_is_not_offered_shared_memory() {
    let server = serve(listener_config()).await;
    let mut host = p2p_core::host::HostIdentity::of_this_process();
    host.boot_id[0] ^= 1;
    let reject = raw_exchange(server.addr, &wire::encode_hello(&raw_hello(host))).await;
    assert_eq!(reject.code, RejectCode::NO_TRANSPORT);
    assert!(reject.message.contains("different hosts"), "{reject}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_with_a_gpu_is_refused_where_there_is_none() {
    let server = serve(listener_config()).await;
    let host = p2p_core::host::HostIdentity::of_this_process();
    let shape = b"\x1b[31mred".to_vec();
    let device = Some(wire::DeviceDescription { own_bytes: 4096, peer_bytes: 8192, shape });
    let hello = wire::Hello { device, ..raw_hello(host) };
    let reject = raw_exchange(server.addr, &wire::encode_hello(&hello)).await;
    assert_eq!(reject.code, RejectCode::DEVICE);
    assert!(reject.message.contains("the listener has no device slots"), "{reject}");
    let mut long = wire::encode_hello(&hello);
    let shape_at = long.len() - 8;
    long[shape_at - 2..shape_at].copy_from_slice(&257u16.to_le_bytes());
    let reject = raw_exchange(server.addr, &long).await;
    assert_eq!(reject.code, RejectCode::MALFORMED);
    assert!(reject.message.contains("device.shape"), "{reject}");
}

#[tokio::test(flavor = "multi_thread")]
async fn upper_layers_and_limits_refuse_peers() {
    let mut server = serve(ListenerConfig { max_peers: 1, ..listener_config() }).await;
    let reject = rejected(server.addr, hello(b"unwelcome"), connect_config()).await;
    assert_eq!((reject.code.0, reject.message.as_str()), (0x107, "another model"));
    let first = connect(server.addr, hello(b""), connect_config()).await.unwrap();
    let there = within(server.peers.recv()).await.unwrap();
    let reject = rejected(server.addr, hello(b""), connect_config()).await;
    assert_eq!(reject.code, RejectCode::FULL);
    drop((first, there));
    connect(server.addr, hello(b""), connect_config()).await.unwrap();
    let too_long = hello(&[0; 4097]);
    let error = connect(server.addr, too_long, connect_config()).await.unwrap_err();
    assert!(error.to_string().contains("4097"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_holder_of_tickets_keeps_no_other_one_out() {
    let tickets: Option<Arc<dyn TicketCheck>> = Some(Arc::new(LengthCheck));
    let mut server = serve(ListenerConfig { tickets, max_peers: 4, ..listener_config() }).await;
    let shows = |text| -> ConnectConfig {
        let source: Arc<dyn TicketSource> = Arc::new(Tickets(text));
        ConnectConfig { tickets: Some(source), ..connect_config() }
    };
    let mut held = Vec::new();
    for text in ["good", "good", "good2", "good2"] {
        let here = connect(server.addr, hello(b""), shows(text)).await.expect("a place");
        held.push((here, within(server.peers.recv()).await.unwrap()));
        if held.len() == 2 {
            let reject = rejected(server.addr, hello(b""), shows("good")).await;
            assert_eq!(reject.code, RejectCode::FULL);
            assert!(reject.message.contains("2 peers with tickets of one identity"), "{reject}");
        }
    }
    // The end of a connection gives the holder its place back.
    drop(held.remove(0));
    connect(server.addr, hello(b""), shows("good")).await.expect("a place");
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_get_a_reason_and_the_listener_goes_on() {
    let mut server = serve(listener_config()).await;
    let reject = raw_exchange(server.addr, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert_eq!(reject.code, RejectCode::MALFORMED);
    let host = p2p_core::host::HostIdentity::of_this_process();
    let good = wire::encode_hello(&raw_hello(host));
    let mut foreign = good.clone();
    foreign[8..10].copy_from_slice(&(PROTOCOL_VERSION + 1).to_le_bytes());
    let reject = raw_exchange(server.addr, &foreign).await;
    assert_eq!(reject.code, RejectCode::VERSION);
    assert!(reject.message.contains("version 2") && reject.message.contains("version 1"));
    let mut oversized = good.clone();
    oversized[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
    let reject = raw_exchange(server.addr, &oversized).await;
    assert!(reject.message.contains("4294967295"), "{reject}");
    let mut trailing = good.clone();
    let longer = (good.len() - HEADER_BYTES + 3) as u32;
    trailing[12..16].copy_from_slice(&longer.to_le_bytes());
    trailing.extend([1, 2, 3]);
    assert_eq!(raw_exchange(server.addr, &trailing).await.code, RejectCode::MALFORMED);
    connect(server.addr, hello(b""), connect_config()).await.unwrap();
    within(server.peers.recv()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_stops_half_way_frees_what_it_was_given() {
    let limit = Duration::from_secs(3);
    let mut server =
        serve(ListenerConfig { handshake_timeout: limit, max_peers: 1, ..listener_config() }).await;
    let host = p2p_core::host::HostIdentity::of_this_process();
    let mut silent = TcpStream::connect(server.addr).await.unwrap();
    silent.write_all(&wire::encode_hello(&raw_hello(host))).await.unwrap();
    let mut header = [0; HEADER_BYTES];
    silent.read_exact(&mut header).await.unwrap();
    assert_eq!(wire::decode_header(&header).unwrap().kind, wire::KIND_WELCOME);
    let mut rest = Vec::new();
    within(silent.read_to_end(&mut rest)).await.unwrap();
    // A busy machine may delay a healthy peer past its limit, too.
    let friend = async {
        while let Err(error) = connect(server.addr, hello(b""), connect_config()).await {
            println!("{error}");
        }
        server.peers.recv().await.unwrap()
    };
    within(friend).await;
    assert!(server.stats.timed_out.load(Ordering::Relaxed) >= 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_slow_connections_delay_no_other_and_are_culled() {
    let _ = p2p_core::bootstrap::raise_descriptor_limit();
    // The number of handshakes evicts most of them. The last ones are not evicted, and have this
    // long.
    let limit = Duration::from_secs(10);
    let config =
        ListenerConfig { handshake_timeout: limit, max_handshakes: 128, ..listener_config() };
    let mut server = serve(config).await;
    let host = p2p_core::host::HostIdentity::of_this_process();
    let bytes = wire::encode_hello(&raw_hello(host));
    let patient = || ConnectConfig { timeout: Duration::from_secs(60), ..connect_config() };
    let mut slow = Vec::new();
    for idx in 0..1000usize {
        let mut stream = TcpStream::connect(server.addr).await.unwrap();
        let bytes = bytes.clone();
        slow.push(tokio::spawn(async move {
            // Half of them are silent, and half send a byte now and then.
            for byte in bytes.chunks(1) {
                if idx % 2 == 0 {
                    let mut sink = [0; 64];
                    while !matches!(stream.read(&mut sink).await, Ok(0) | Err(_)) {}
                    return;
                }
                if stream.write_all(byte).await.is_err() {
                    return;
                }
                sleep(Duration::from_millis(400)).await;
            }
        }));
        if idx % 100 == 50 {
            within(connect(server.addr, hello(b""), patient())).await.unwrap();
        }
    }
    for _ in 0..20 {
        let start = Instant::now();
        let connection = within(connect(server.addr, hello(b"healthy"), patient())).await.unwrap();
        println!("healthy connect in {:?}", start.elapsed());
        drop(connection);
    }
    for _ in 0..30 {
        within(server.peers.recv()).await.unwrap();
    }
    for task in slow {
        within(task).await.unwrap();
    }
    let stats = &server.stats;
    let culled = stats.evicted.load(Ordering::Relaxed)
        + stats.timed_out.load(Ordering::Relaxed)
        + stats.broken.load(Ordering::Relaxed);
    // The counts also include healthy peers that had to try again.
    assert!(culled >= 1000, "{stats:?}");
    assert_eq!(stats.connected.load(Ordering::Relaxed), 30);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_in_use_and_a_missing_listener_are_named() {
    let server = serve(listener_config()).await;
    let error = Listener::bind(server.addr, listener_config()).await.unwrap_err();
    assert!(matches!(error, BindError::InUse { .. }), "{error}");
    assert!(error.to_string().contains(&server.addr.to_string()), "{error}");
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = connect(free, hello(b""), connect_config()).await.unwrap_err();
    assert!(error.to_string().contains(&free.to_string()), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listener_that_never_answers_costs_no_more_than_the_limit() {
    let mute = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = mute.local_addr().unwrap();
    let config = ConnectConfig { timeout: Duration::from_millis(100), ..connect_config() };
    let error = connect(addr, hello(b""), config).await.unwrap_err();
    assert!(matches!(error, ConnectError::Timeout { .. }), "{error}");

    let web = tokio::spawn(async move {
        let (mut stream, _) = mute.accept().await.unwrap();
        let (mut second, _) = mute.accept().await.unwrap();
        let _ = stream.write_all(b"x").await;
        second.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap();
        sleep(Duration::from_millis(200)).await;
    });
    let error = connect(addr, hello(b""), connect_config()).await.unwrap_err();
    assert!(matches!(error, ConnectError::Foreign { .. }), "{error}");
    web.await.unwrap();
}

fn raw_hello(host: p2p_core::host::HostIdentity) -> wire::Hello {
    wire::Hello {
        slot_bytes: SLOT.slot_bytes as u64,
        num_frames: SLOT.num_frames as u32,
        host,
        offers: vec![Offer::plain(TransportKind::Shm)],
        secret: Vec::new(),
        peer: hello(b"raw"),
        left_out: String::new(),
        device: None,
    }
}

/// Sends `bytes` and expects a rejection.
async fn raw_exchange(addr: SocketAddr, bytes: &[u8]) -> Reject {
    let mut stream = TcpStream::connect(addr).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    let mut answer = Vec::new();
    within(stream.read_to_end(&mut answer)).await.unwrap();
    let header = wire::decode_header(answer[..HEADER_BYTES].try_into().unwrap()).unwrap();
    assert_eq!(header.kind, KIND_REJECT);
    wire::decode_reject(&answer[HEADER_BYTES..]).unwrap()
}
