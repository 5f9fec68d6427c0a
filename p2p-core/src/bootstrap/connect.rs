//! The connecting side of the handshake.

use std::fmt::Display;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpStream, ToSocketAddrs, lookup_host};
use tokio::time::{sleep, timeout};
use trust::tls::Side;

use super::attempt::Attempt;
use super::background_drop::BackgroundDrop;
use super::fallback;
use super::liveness::Liveness;
use super::stream::{Stream, explain};
use super::wire::{
    self, DeviceDescription, Hello, KIND_GO, KIND_REJECT, KIND_WELCOME, MAX_PROOF_BYTES,
    MAX_SECRET_BYTES, MAX_SHAPE_BYTES, MAX_TICKET_BYTES, WireError,
};
use super::{
    ConnectConfig, ConnectError, Connection, HandshakeBinding, MAX_PAYLOAD_BYTES, MemoryEndpoint,
    PeerHello, ReadError, Reject, RejectCode, TicketSource, blocking, join_device, open_device,
    read_message, write_message,
};
use crate::backend::shm::{PageKind, PeerSlot, SharedSlot, ShmError, pass};
#[cfg(feature = "test-transports")]
use crate::backend::staged::Disorder;
use crate::channel::Channel;
use crate::device::{DeviceMemory, DeviceSlots};
use crate::endpoint::TransportKind;
use crate::host::{HostIdentity, names};
use crate::network::{
    HandshakeSide, JoinedSide, MAX_DETAIL_BYTES, Route, SideDescription, network_of,
};
use crate::region::SlotKey;
use crate::slot::SlotLayout;
use crate::transport::AnyEndpoint;

/// Connects to a [`Listener`](super::Listener). Retries as long as the listener reports that it is
/// busy with others.
///
/// If the chosen transport cannot join the peers, this retries without that transport. The
/// transport is then left out of later calls for a while ([`ConnectConfig::fallback`]). If no other
/// transport remains, none is left out. A handshake that breaks together with the connection to the
/// listener says nothing about the transport.
///
/// Takes at most [`ConnectConfig::timeout`]. Dropping the future ends the handshake.
///
/// # Errors
/// [`ConnectError`].
///
/// # Examples
/// A listener and a peer in one process exchange a frame:
///
/// ```
/// use switchyard_p2p_core::bootstrap::{ConnectConfig, Listener, ListenerConfig, PeerHello, connect};
/// use switchyard_p2p_core::{Connection, SlotConfig};
/// use tokio::sync::mpsc;
///
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// let slot = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
/// let config = ListenerConfig { slot, ..Default::default() };
/// let listener = Listener::bind("127.0.0.1:0", config).await.unwrap();
/// let addr = listener.local_addr();
/// let (sender, mut peers) = mpsc::unbounded_channel();
/// let accept = |peer: &PeerHello| Ok(format!("hello {}", peer.peer_id).into_bytes());
/// let on_peer = move |connection: Connection| drop(sender.send(connection));
/// tokio::spawn(listener.serve(accept, on_peer, std::future::pending()));
///
/// let hello = PeerHello { peer_id: 7, ..Default::default() };
/// let config = ConnectConfig { slot, ..Default::default() };
/// let mut client = connect(addr, hello, config).await.unwrap();
/// assert_eq!(client.reply, b"hello 7");
/// let mut server = peers.recv().await.unwrap();
///
/// let frame = client.channel.try_reserve().unwrap().expect("a free frame");
/// client.channel.write_view(&frame).put_bytes(0, b"frame").unwrap();
/// client.channel.publish(frame, 5).unwrap();
/// // Both sides are in one process, so the frame is here at once.
/// let frame = server.channel.try_next().unwrap().expect("the frame");
/// let mut bytes = [0; 5];
/// server.channel.view(&frame).copy_to(0, &mut bytes).unwrap();
/// server.channel.release().unwrap();
/// assert_eq!(&bytes, b"frame");
/// # });
/// ```
pub async fn connect(
    addr: impl ToSocketAddrs + Display,
    hello: PeerHello,
    config: ConnectConfig,
) -> Result<Connection, ConnectError> {
    let name = addr.to_string();
    let limit = config.timeout;
    let mut busy = None;
    let mut attempt = Attempt::new(&name, &config);
    let result = timeout(limit, async {
        let unreachable = |source| ConnectError::Unreachable { addr: name.clone(), source };
        let addrs: Vec<SocketAddr> = lookup_host(addr).await.map_err(unreachable)?.collect();
        loop {
            attempt.begin();
            match connect_once(&addrs, &name, hello.clone(), config.clone(), &mut attempt).await {
                Err(error) if error.reject().is_some_and(|r| r.code == RejectCode::BUSY) => {
                    busy = Some(error);
                    // A random delay, so that peers that were refused together do not return
                    // together.
                    sleep(Duration::from_millis(rand::random_range(5..50))).await;
                }
                Err(error) => attempt.judge_failure(error)?,
                Ok(connection) => return Ok(connection),
            }
        }
    })
    .await;
    if result.is_err() {
        attempt.note_timeout(limit);
    }
    match (result, busy) {
        (Ok(result), _) => result,
        (Err(_), Some(busy)) => Err(busy),
        (Err(_), None) => Err(ConnectError::Timeout { addr: name, limit }),
    }
}

async fn connect_once(
    addrs: &[SocketAddr],
    name: &str,
    peer: PeerHello,
    config: ConnectConfig,
    attempt: &mut Attempt<'_>,
) -> Result<Connection, ConnectError> {
    let layout = SlotLayout::new(config.slot)?;
    let secret = config.secret.unwrap_or_default().into_bytes();
    limit("secret", secret.len(), MAX_SECRET_BYTES)?;
    limit("payload", peer.payload.len(), MAX_PAYLOAD_BYTES)?;
    if let Some(side) = &config.device {
        limit("shape", side.shape().len(), MAX_SHAPE_BYTES)?;
    }

    let tcp = TcpStream::connect(addrs)
        .await
        .map_err(|source| ConnectError::Unreachable { addr: name.to_owned(), source })?;
    let broken = |detail: String| ConnectError::Broken { addr: name.to_owned(), detail };
    tcp.set_nodelay(true).map_err(|e| broken(e.to_string()))?;
    let remote_addr = tcp.peer_addr().map_err(|e| broken(e.to_string()))?;
    let host = name.rsplit_once(':').map_or(name, |(host, _)| host);
    let secured = Stream::connect(tcp, host, config.tls.as_ref()).await;
    let mut stream = secured.map_err(|error| match error.is_broken {
        true => broken(error.to_string()),
        false => ConnectError::Tls { addr: name.to_owned(), reason: error.to_string() },
    })?;
    let hello = Hello {
        slot_bytes: config.slot.slot_bytes as u64,
        num_frames: config.slot.num_frames as u32,
        host: HostIdentity::of_this_process(),
        offers: attempt.offers(),
        secret,
        peer,
        left_out: fallback::text_of(&attempt.left_out),
        device: config.device.as_ref().map(|side| DeviceDescription {
            own_bytes: side.own_slot_bytes(),
            peer_bytes: side.peer_slot_bytes(),
            shape: side.shape().to_vec(),
        }),
    };
    // A listener that refuses early may have closed its reading side. Its answer must still be
    // read.
    let tickets = config.tickets.as_deref();
    let opening = opening(&wire::encode_hello(&hello), tickets, stream.channel_binding())?;
    let written = write_message(&mut stream, &opening).await;
    let (header, body) = match (read_message(&mut stream).await, written) {
        (Ok(message), _) => message,
        (Err(ReadError::Wire(source)), _) => {
            return Err(ConnectError::Foreign { addr: name.to_owned(), source });
        }
        // A listener that refuses the certificate of this side does so after the TLS handshake.
        (Err(ReadError::Io(error)), _) => {
            return Err(match explain(Side::Client, &error) {
                Some(reason) => ConnectError::Tls { addr: name.to_owned(), reason },
                None => broken(error.to_string()),
            });
        }
        (Err(error), Ok(())) => return Err(broken(error.to_string())),
        (Err(_), Err(error)) => return Err(broken(error.to_string())),
    };
    let foreign = |source| ConnectError::Foreign { addr: name.to_owned(), source };
    let welcome = match header.kind {
        KIND_WELCOME => wire::decode_welcome(&body).map_err(foreign)?,
        KIND_REJECT => {
            let reject = wire::decode_reject(&body).map_err(foreign)?;
            return Err(ConnectError::Rejected { addr: name.to_owned(), reject });
        }
        found => {
            let expected = "a welcome or a rejection";
            return Err(foreign(WireError::Kind { found, expected }));
        }
    };
    if !hello.offers.contains(&welcome.offer) {
        let reject = Reject::new(
            RejectCode::NO_TRANSPORT,
            format!(
                "the listener chose {}, this side offered {}",
                welcome.offer,
                names(&hello.offers)
            ),
        );
        return Err(ConnectError::Rejected { addr: name.to_owned(), reject });
    }
    let network = network_of(&welcome.offer, &config.networks);
    attempt.choose(&welcome.offer, network.is_some().then_some(stream.tcp()));
    let layout = match (network, &config.device) {
        (Some(network), Some(side)) => network.device_layout(side.as_ref(), layout.num_frames())?,
        _ => layout,
    };
    if welcome.side.bytes != layout.slot_bytes() as u64 {
        return Err(foreign(WireError::Value {
            field: "side.bytes",
            found: welcome.side.bytes,
            expected: "the slot size that this side offered",
        }));
    }

    // From here on, a failed handshake drops the slots on a background thread.
    let (slots, pages) = if let Some(network) = network {
        let local = stream.tcp().local_addr().map_err(|e| broken(e.to_string()))?.ip();
        let route = Route { local, remote: remote_addr.ip() };
        let (network, theirs) = (Arc::clone(network), welcome.side.clone());
        let device = config.device;
        let (slots, ours) = blocking(move || {
            let side = HandshakeSide::open(network.as_ref(), &layout, route, device.as_deref())?;
            let ours = side.description();
            let (JoinedSide { endpoint, slot }, pair) = side.join(&theirs)?;
            let channel = Channel::new(endpoint, layout, slot, SlotKey)?;
            Ok::<_, ConnectError>((BackgroundDrop::new((channel, pair)), ours))
        })
        .await
        .map_err(broken)??;
        limit("detail of a network", ours.detail.len(), MAX_DETAIL_BYTES)?;
        write_message(&mut stream, &wire::encode_ready(&ours))
            .await
            .map_err(|e| broken(e.to_string()))?;
        match read_message(&mut stream).await {
            Ok((header, _)) if header.kind == KIND_GO => {}
            Ok((header, body)) if header.kind == KIND_REJECT => {
                let reject = wire::decode_reject(&body).map_err(foreign)?;
                return Err(ConnectError::Rejected { addr: name.to_owned(), reject });
            }
            Ok((header, _)) => {
                let expected = "a go or a rejection";
                return Err(foreign(WireError::Kind { found: header.kind, expected }));
            }
            Err(ReadError::Wire(source)) => return Err(foreign(source)),
            Err(error) => return Err(broken(error.to_string())),
        }
        (slots, PageKind::Plain)
    } else {
        let kind = welcome.offer.kind;
        let request = SlotRequest {
            layout,
            #[cfg(feature = "test-transports")]
            disorder: config.disorder,
            device: config.device,
        };
        let shared = share(&mut stream, name, kind, &welcome, request).await?;
        let ready = SideDescription { bytes: layout.slot_bytes() as u64, ..Default::default() };
        write_message(&mut stream, &wire::encode_ready(&ready))
            .await
            .map_err(|e| broken(e.to_string()))?;
        shared
    };
    let liveness =
        Liveness::new(stream, config.liveness_timeout).map_err(ConnectError::Liveness)?;
    let (channel, device) = slots.into_inner();
    Ok(Connection {
        channel,
        liveness,
        peer: hello.peer,
        reply: welcome.payload,
        transport: welcome.offer,
        left_out: hello.left_out,
        pages,
        device,
        remote_addr,
    })
}

/// The slots of a connection.
type Slots = (Channel<AnyEndpoint>, Option<DeviceSlots>);

/// Settings for the exchange over the Unix socket.
struct SlotRequest {
    layout: SlotLayout,
    #[cfg(feature = "test-transports")]
    disorder: Option<Disorder>,
    device: Option<Arc<dyn DeviceMemory>>,
}

/// Makes a channel over shared memory, and device slots if wanted. Descriptors go over a Unix
/// socket.
async fn share(
    stream: &mut Stream,
    name: &str,
    kind: TransportKind,
    welcome: &wire::Welcome,
    request: SlotRequest,
) -> Result<(BackgroundDrop<Slots>, PageKind), ConnectError> {
    let layout = request.layout;
    let own = SharedSlot::create(&layout)?;
    let pages = own.pages();
    let socket = pass::reach(&welcome.rendezvous).await?;
    pass::send(&socket, &welcome.nonce, own.descriptors()).await?;
    let passed = match pass::receive(&socket).await {
        Ok(passed) => passed,
        // If the listener refused, its reason comes over TCP. It says more than a closed socket.
        Err(error) => return Err(rejection(stream, name).await.unwrap_or(error.into())),
    };
    check_nonce(&passed.nonce, welcome)?;
    let theirs = PeerSlot::open(&passed.memory, passed.wake, &layout)?;
    drop(passed.memory);
    let endpoint = MemoryEndpoint {
        kind,
        #[cfg(feature = "test-transports")]
        disorder: request.disorder,
    };
    let channel = endpoint.join(layout, own, theirs)?;
    let Some(side) = request.device else {
        return Ok((BackgroundDrop::new((channel, None)), pages));
    };
    let own = open_device(side).await.map_err(ConnectError::Device)?;
    let descriptor = own.descriptor();
    pass::send(&socket, &welcome.nonce, [descriptor]).await?;
    let (nonce, [memory]) = match pass::receive_exactly(&socket).await {
        Ok(received) => received,
        Err(error) => return Err(rejection(stream, name).await.unwrap_or(error.into())),
    };
    check_nonce(&nonce, welcome)?;
    let pair = join_device(own, memory).await.map_err(ConnectError::Device)?;
    Ok((pair.map(|pair| (channel, Some(pair))), pages))
}

fn check_nonce(found: &pass::Nonce, welcome: &wire::Welcome) -> Result<(), ShmError> {
    if *found == welcome.nonce {
        return Ok(());
    }
    Err(ShmError::Rendezvous("the answer belongs to another handshake".into()))
}

/// Returns the rejection that waits on the bootstrap connection, if there is one.
async fn rejection(stream: &mut Stream, name: &str) -> Option<ConnectError> {
    match timeout(Duration::from_millis(200), read_message(stream)).await {
        Ok(Ok((header, body))) if header.kind == KIND_REJECT => wire::decode_reject(&body)
            .ok()
            .map(|reject| ConnectError::Rejected { addr: name.to_owned(), reject }),
        _ => None,
    }
}

/// The first bytes that travel: the hello, and a ticket for it in front if there is one.
fn opening(
    hello: &[u8],
    tickets: Option<&dyn TicketSource>,
    channel: Option<[u8; 32]>,
) -> Result<Vec<u8>, ConnectError> {
    let Some(tickets) = tickets else { return Ok(hello.to_vec()) };
    let shown = tickets
        .show(&HandshakeBinding { channel, hello, peer: None })
        .map_err(ConnectError::Ticket)?;
    limit("ticket", shown.ticket.len(), MAX_TICKET_BYTES)?;
    limit("proof", shown.proof.len(), MAX_PROOF_BYTES)?;
    let mut out = wire::encode_ticket(&shown);
    out.extend(hello);
    Ok(out)
}

const fn limit(field: &'static str, found: usize, max: usize) -> Result<(), ConnectError> {
    if found > max { Err(ConnectError::TooLong { field, found, max }) } else { Ok(()) }
}
