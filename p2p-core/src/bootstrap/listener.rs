//! The listening side of the handshake.
//!
//! Accepting never waits for a peer. Every handshake runs in a task of its own, under a time limit,
//! and [`Admission`] limits the number of handshakes.

use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, ToSocketAddrs, UnixListener, UnixStream, lookup_host};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use trust::tls::HandshakeError;

use super::admission::{Admission, HandshakeEntry};
use super::background_drop::BackgroundDrop;
use super::liveness::Liveness;
use super::policy::{check_device, check_secret, check_slot, choose_transports, refusal_of};
use super::share::{PeerPlace, PeerPlaces};
use super::stream::Stream;
use super::wire::{self, Hello, KIND_HELLO, KIND_READY, KIND_TICKET, Welcome, WireError};
use super::{
    BindError, Connection, HandshakeBinding, ListenerConfig, MAX_PAYLOAD_BYTES, MemoryEndpoint,
    PeerHello, ReadError, Reject, RejectCode, ShownTicket, blocking, descriptor_limit, join_device,
    open_device, read_message, write_message,
};
use crate::backend::shm::pass::{self, Nonce, SlotDescriptors};
use crate::backend::shm::{PageKind, PeerSlot, SharedSlot, ShmError};
use crate::channel::Channel;
use crate::device::{DeviceMemory, DeviceSlots};
use crate::endpoint::TransportKind;
use crate::host::HostIdentity;
use crate::log_limit::LogLimit;
use crate::network::{
    HandshakeSide, JoinedSide, MAX_DETAIL_BYTES, Offer, Route, SideDescription, network_of,
};
use crate::region::SlotKey;
use crate::slot::SlotLayout;
use crate::transport::AnyEndpoint;

/// Counts of a listener. Every connection ends in exactly one of the last five counts.
#[derive(Debug, Default)]
pub struct ListenerStats {
    /// Connections taken from the accept queue.
    pub accepted: AtomicU64,
    /// Welcomes sent. Each gave a peer the key of a memory, a queue pair, or the way to a descriptor.
    pub welcomed: AtomicU64,
    /// Handshakes that became a [`Connection`].
    pub connected: AtomicU64,
    /// Handshakes answered with a [`Reject`] because of the peer's data.
    pub rejected: AtomicU64,
    /// Handshakes that took too long.
    pub timed_out: AtomicU64,
    /// Handshakes evicted for a newer one.
    pub evicted: AtomicU64,
    /// Handshakes whose connection broke.
    pub broken: AtomicU64,
}

/// Waits for peers.
#[derive(Debug)]
pub struct Listener {
    tcp: TcpListener,
    rendezvous: Option<UnixListener>,
    local_addr: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    config: ListenerConfig,
    layout: SlotLayout,
    host: HostIdentity,
    rendezvous_name: Nonce,
    /// Handshakes that wait for descriptors.
    waiting: Mutex<HashMap<Nonce, oneshot::Sender<RendezvousResult>>>,
    peers: PeerPlaces,
    stats: Arc<ListenerStats>,
}

/// Result of a rendezvous: descriptors, or the reason to refuse their sender.
type RendezvousResult = Result<(UnixStream, SlotDescriptors), ShmError>;

impl Listener {
    /// Listens on `addr`; port 0 takes any free one.
    ///
    /// # Errors
    /// [`BindError`].
    pub async fn bind(
        addr: impl ToSocketAddrs + std::fmt::Display,
        config: ListenerConfig,
    ) -> Result<Self, BindError> {
        let name = addr.to_string();
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::AddrInUse => BindError::InUse { addr: name.clone() },
            _ => BindError::Listen { addr: name.clone(), source },
        };
        let layout = SlotLayout::new(config.slot)?;
        let tcp = listen(addr).await.map_err(failed)?;
        let local_addr = tcp.local_addr().map_err(failed)?;
        let rendezvous_name: Nonce = rand::random();
        let by_memory = |kind: &TransportKind| !kind.is_network();
        let rendezvous = if config.transports.iter().any(by_memory) {
            Some(pass::listen(&rendezvous_name).map_err(BindError::Rendezvous)?)
        } else {
            None
        };
        let shared = Shared {
            layout,
            host: HostIdentity::of_this_process(),
            rendezvous_name,
            waiting: Mutex::default(),
            peers: PeerPlaces::new(config.max_peers, config.max_peers_of_holder),
            stats: Arc::default(),
            config,
        };
        Ok(Self { tcp, rendezvous, local_addr, shared: Arc::new(shared) })
    }

    /// Address of this listener, with the port in use.
    #[must_use]
    pub const fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Counters, for metrics.
    #[must_use]
    pub fn stats(&self) -> Arc<ListenerStats> {
        Arc::clone(&self.shared.stats)
    }

    /// Serves until `shutdown` completes, and then ends the handshakes under way.
    ///
    /// `accept` judges a peer whose slot, transport and ticket are in order. It returns the reply
    /// payload (at most [`MAX_PAYLOAD_BYTES`]) or the reason to refuse. `on_peer` gets every
    /// connection. Both run on the handshake's task and should be quick.
    pub async fn serve<A, P>(self, accept: A, on_peer: P, shutdown: impl Future<Output = ()> + Send)
    where
        A: Fn(&PeerHello) -> Result<Vec<u8>, Reject> + Send + Sync + 'static,
        P: Fn(Connection) + Send + Sync + 'static,
    {
        let Self { tcp, rendezvous, shared, .. } = self;
        let handlers = Arc::new((accept, on_peer));
        let max_handshakes = handshake_limit(shared.config.max_handshakes, descriptor_limit());
        let admission = Admission::new(max_handshakes);
        // A rendezvous belongs to a handshake with a valid hello.
        let rendezvous_admission = Admission::new(max_handshakes.div_ceil(2));
        let mut tasks = JoinSet::new();
        tokio::pin!(shutdown);
        loop {
            tokio::select! {
                () = &mut shutdown => break,
                accepted = after(admission.delay(), tcp.accept()) => match accepted {
                    Ok((stream, addr)) => {
                        shared.stats.accepted.fetch_add(1, Ordering::Relaxed);
                        let (entry, _) = admission.admit(addr.ip());
                        let (shared, handlers) = (Arc::clone(&shared), Arc::clone(&handlers));
                        tasks.spawn(async move {
                            if let Some(connection) =
                                run(&shared, stream, addr, entry, &handlers.0).await
                            {
                                handlers.1(connection);
                            }
                        });
                    }
                    Err(error) => pause_after(&error).await,
                },
                accepted = after(rendezvous_admission.delay(), accept_unix(rendezvous.as_ref())) => match accepted {
                    Ok(stream) => {
                        let (entry, _) = rendezvous_admission.admit(IpAddr::V4(Ipv4Addr::LOCALHOST));
                        // The peer got the name of the rendezvous in a handshake.
                        entry.mark_valid();
                        let shared = Arc::clone(&shared);
                        tasks.spawn(async move { receive_descriptors(&shared, stream, &entry).await });
                    }
                    Err(error) => pause_after(&error).await,
                },
                Some(ended) = tasks.join_next() => {
                    if let Err(error) = ended {
                        tracing::error!(%error, "a handshake task failed");
                    }
                }
            }
        }
    }
}

/// Most handshakes of a process that may open `descriptors` files.
fn handshake_limit(configured: usize, descriptors: u64) -> usize {
    let share = usize::try_from(descriptors / DESCRIPTOR_SHARE).unwrap_or(usize::MAX);
    configured.min(share).max(1)
}

async fn listen(addr: impl ToSocketAddrs) -> io::Result<TcpListener> {
    let mut last = io::Error::new(io::ErrorKind::InvalidInput, "the name has no address");
    for addr in lookup_host(addr).await? {
        let socket = match addr {
            SocketAddr::V4(_) => tokio::net::TcpSocket::new_v4()?,
            SocketAddr::V6(_) => tokio::net::TcpSocket::new_v6()?,
        };
        socket.set_reuseaddr(true)?;
        match socket.bind(addr).and_then(|()| socket.listen(ACCEPT_BACKLOG)) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Accepts after `delay`, so that no handshake is evicted too early. The caller starts this anew
/// whenever a handshake ends.
async fn after<T>(delay: Duration, accept: impl Future<Output = T>) -> T {
    if !delay.is_zero() {
        sleep(delay).await;
    }
    accept.await
}

async fn accept_unix(listener: Option<&UnixListener>) -> io::Result<UnixStream> {
    match listener {
        Some(listener) => Ok(listener.accept().await?.0),
        None => std::future::pending().await,
    }
}

/// Accepting fails when descriptors run out. An immediate retry would only burn time.
async fn pause_after(error: &io::Error) {
    if let Some(num_suppressed) = ACCEPT_LOG.allow() {
        tracing::warn!(%error, num_suppressed, "cannot accept a connection");
    }
    sleep(Duration::from_millis(20)).await;
}

/// Takes descriptors from a Unix connection and hands them to the handshake that waits for them.
async fn receive_descriptors(shared: &Shared, stream: UnixStream, entry: &HandshakeEntry) {
    let received = tokio::select! {
        received = timeout(shared.config.handshake_timeout, pass::receive(&stream)) => received,
        () = entry.evicted() => return,
    };
    match received {
        Ok(Ok(passed)) => {
            let waiting = lock(&shared.waiting).remove(&passed.nonce);
            let result = pass::check_user(&stream).map(|()| (stream, passed));
            match waiting {
                // The handshake may have ended meanwhile. Everything is closed then.
                Some(handshake) => drop(handshake.send(result)),
                None => tracing::debug!("descriptors arrived for a handshake that has ended"),
            }
        }
        Ok(Err(error)) => {
            if let Some(num_suppressed) = RENDEZVOUS_LOG.allow() {
                tracing::warn!(%error, num_suppressed, "shared memory rendezvous failed");
            }
        }
        Err(_) => tracing::debug!("a rendezvous took too long"),
    }
}

/// How a handshake ended without a connection.
#[derive(Debug)]
enum HandshakeEnd {
    Rejected(Reject),
    TimedOut,
    Evicted,
    Broken(String),
}

impl From<Reject> for HandshakeEnd {
    fn from(reject: Reject) -> Self {
        Self::Rejected(reject)
    }
}

impl From<ReadError> for HandshakeEnd {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Wire(error) => Self::Rejected(refusal_of(&error)),
            error => Self::Broken(error.to_string()),
        }
    }
}

/// Runs one handshake from its first byte to a connection or an end.
async fn run<A>(
    shared: &Arc<Shared>,
    tcp: TcpStream,
    addr: SocketAddr,
    entry: HandshakeEntry,
    accept: &A,
) -> Option<Connection>
where
    A: Fn(&PeerHello) -> Result<Vec<u8>, Reject>,
{
    let limit = shared.config.handshake_timeout;
    let until = Instant::now() + limit;
    // TLS is a part of the handshake, with the same time limit and the same place in the table.
    let secured = tokio::select! {
        biased;
        secured = timeout_at(until, secure(shared, tcp)) => secured,
        () = entry.evicted() => {
            // Nothing can be said to the peer in the middle of a TLS handshake.
            shared.stats.evicted.fetch_add(1, Ordering::Relaxed);
            return None;
        }
    };
    let mut stream = match secured {
        Ok(Ok(stream)) => stream,
        Ok(Err(refused)) => {
            refused.conclude(shared, addr).await;
            return None;
        }
        Err(_) => {
            shared.stats.timed_out.fetch_add(1, Ordering::Relaxed);
            return None;
        }
    };
    let ended = tokio::select! {
        biased;
        result = timeout_at(until, handshake(shared, &mut stream, &entry, accept)) => match result {
            Ok(Ok(agreement)) => match agreement.into_connection(shared, stream, addr) {
                Ok(connection) => {
                    shared.stats.connected.fetch_add(1, Ordering::Relaxed);
                    return Some(connection);
                }
                Err(error) => {
                    if let Some(num_suppressed) = LIVENESS_LOG.allow() {
                        tracing::warn!(%addr, %error, num_suppressed, "cannot set up the liveness connection");
                    }
                    shared.stats.broken.fetch_add(1, Ordering::Relaxed);
                    return None;
                }
            },
            Ok(Err(ended)) => ended,
            Err(_) => HandshakeEnd::TimedOut,
        },
        () = entry.evicted() => HandshakeEnd::Evicted,
    };
    let stats = &shared.stats;
    let (count, reject) = match ended {
        HandshakeEnd::Broken(error) => {
            tracing::debug!(%addr, %error, "a handshake broke");
            (&stats.broken, None)
        }
        HandshakeEnd::Rejected(reject) => {
            if let Some(num_suppressed) = REJECT_LOG.allow() {
                tracing::warn!(%addr, %reject, num_suppressed, "a peer was rejected");
            }
            (&stats.rejected, Some(reject))
        }
        HandshakeEnd::TimedOut => {
            let message = format!("the handshake was not complete after {} ms", limit.as_millis());
            (&stats.timed_out, Some(Reject::new(RejectCode::TIMEOUT, message)))
        }
        HandshakeEnd::Evicted => {
            let message = "too many handshakes under way, and this was the oldest; try again";
            (&stats.evicted, Some(Reject::new(RejectCode::BUSY, message)))
        }
    };
    count.fetch_add(1, Ordering::Relaxed);
    if let Some(reject) = reject {
        // An evicted or late handshake no longer counts, so the farewell must be short.
        drop(entry);
        let _ = timeout(FAREWELL, farewell(&mut stream, &reject)).await;
    }
    None
}

/// A connection that ends before its hello.
enum Refused {
    /// The peer speaks no TLS. The answer to it is plain text.
    Plain(TcpStream, Reject),
    /// The TLS handshake failed.
    Failed(HandshakeError),
    Broken(io::Error),
}

impl Refused {
    async fn conclude(self, shared: &Shared, addr: SocketAddr) {
        let (count, reject) = match self {
            Self::Broken(error) => {
                tracing::debug!(%addr, %error, "a handshake broke");
                (&shared.stats.broken, None)
            }
            Self::Failed(error) if error.is_broken => {
                tracing::debug!(%addr, %error, "a TLS handshake broke");
                (&shared.stats.broken, None)
            }
            Self::Failed(error) => {
                if let Some(num_suppressed) = REJECT_LOG.allow() {
                    tracing::warn!(%addr, %error, num_suppressed, "a peer was rejected");
                }
                (&shared.stats.rejected, None)
            }
            Self::Plain(tcp, reject) => {
                if let Some(num_suppressed) = REJECT_LOG.allow() {
                    tracing::warn!(%addr, %reject, num_suppressed, "a peer was rejected");
                }
                (&shared.stats.rejected, Some((tcp, reject)))
            }
        };
        count.fetch_add(1, Ordering::Relaxed);
        if let Some((tcp, reject)) = reject {
            let _ = timeout(FAREWELL, farewell(&mut Stream::Plain(tcp), &reject)).await;
        }
    }
}

/// Carries out the TLS handshake if this side has certificates.
async fn secure(shared: &Shared, tcp: TcpStream) -> Result<Stream, Refused> {
    tcp.set_nodelay(true).map_err(Refused::Broken)?;
    let Some(tls) = &shared.config.tls else { return Ok(Stream::Plain(tcp)) };
    let mut first = [0; 1];
    let num_bytes = tcp.peek(&mut first).await.map_err(Refused::Broken)?;
    if num_bytes == 0 {
        return Err(Refused::Broken(io::ErrorKind::UnexpectedEof.into()));
    }
    // A peer without TLS begins with the magic number. Every other byte is left to TLS, which answers
    // with an alert.
    if first[0] == wire::MAGIC[0] {
        let message = "the connecting side speaks no TLS, which the listener requires; give the connecting side --tls DIR";
        return Err(Refused::Plain(tcp, Reject::new(RejectCode::TLS, message)));
    }
    Stream::accept(tcp, tls).await.map_err(Refused::Failed)
}

/// Sends the reason, then waits until the peer has read it. Closing a socket with unread input
/// would reset the connection, and the reason could be lost.
async fn farewell(stream: &mut Stream, reject: &Reject) -> io::Result<()> {
    write_message(stream, &wire::encode_reject(reject)).await?;
    stream.shutdown().await?;
    let mut sink = [0u8; 4096];
    for _ in 0..16 {
        if stream.read(&mut sink).await? == 0 {
            break;
        }
    }
    Ok(())
}

/// The results of a handshake.
struct Agreement {
    slots: BackgroundDrop<Slots>,
    peer: PeerHello,
    left_out: String,
    reply: Vec<u8>,
    transport: Offer,
    pages: PageKind,
}

/// The slots of a connection. The permit is dropped last, so a peer that is admitted instead finds
/// the memory free.
type Slots = (Channel<AnyEndpoint>, Option<DeviceSlots>, PeerPlace);

impl Agreement {
    fn into_connection(
        self,
        shared: &Shared,
        stream: Stream,
        remote_addr: SocketAddr,
    ) -> io::Result<Connection> {
        let timeout = shared.config.liveness_timeout;
        let liveness = Liveness::new(stream, timeout)?;
        let (channel, device, permit) = self.slots.into_inner();
        Ok(Connection {
            liveness: liveness.holding(permit),
            channel,
            peer: self.peer,
            reply: self.reply,
            transport: self.transport,
            left_out: self.left_out,
            pages: self.pages,
            device,
            remote_addr,
        })
    }
}

async fn handshake<A>(
    shared: &Shared,
    stream: &mut Stream,
    entry: &HandshakeEntry,
    accept: &A,
) -> Result<Agreement, HandshakeEnd>
where
    A: Fn(&PeerHello) -> Result<Vec<u8>, Reject>,
{
    let broken = |e: io::Error| HandshakeEnd::Broken(e.to_string());
    let (shown, hello, bytes) = read_opening(stream).await?;
    // First of all checks, so that a peer without a ticket learns nothing and costs nothing.
    let holder = match &shared.config.tickets {
        Some(tickets) => {
            let (channel, peer) = (stream.channel_binding(), stream.peer_identity());
            let binding = HandshakeBinding { channel, hello: &bytes, peer: peer.as_ref() };
            tickets.check(shown.as_ref(), &binding)?
        }
        None => None,
    };
    check_secret(&shared.config, &hello)?;
    entry.mark_valid();
    check_slot(&shared.config, &hello)?;
    check_device(&shared.config, &hello)?;
    let choices = choose_transports(&shared.config, &shared.host, &hello)?;
    let permit = shared.peers.take(holder)?;
    let reply = accept(&hello.peer)?;
    if reply.len() > MAX_PAYLOAD_BYTES {
        tracing::error!(found = reply.len(), max = MAX_PAYLOAD_BYTES, "reply payload too long");
        let message = "the listener's reply payload is too long; this is a bug there";
        return Err(Reject::new(RejectCode::TRANSPORT, message).into());
    }

    let no_transport = |e: &dyn std::fmt::Display| {
        HandshakeEnd::Rejected(Reject::new(RejectCode::TRANSPORT, e.to_string()))
    };
    let layout = shared.layout;
    let route = Route {
        local: stream.tcp().local_addr().map_err(broken)?.ip(),
        remote: stream.tcp().peer_addr().map_err(broken)?.ip(),
    };
    let (offer, opened) = open_first(shared, choices, route).await?;
    if let Some((side, layout)) = opened {
        let side = side.map(|side| (side, permit));
        let description = side.0.description();
        if description.detail.len() > MAX_DETAIL_BYTES {
            return Err(no_transport(
                &"the network's description is too long; this is a bug there",
            ));
        }
        let welcome = Welcome {
            offer,
            side: description,
            nonce: Nonce::default(),
            rendezvous: Nonce::default(),
            payload: reply,
        };
        shared.stats.welcomed.fetch_add(1, Ordering::Relaxed);
        write_message(stream, &wire::encode_welcome(&welcome)).await.map_err(broken)?;
        let theirs = read_ready(stream, &layout).await?;
        let slots = blocking(move || {
            let (side, permit) = side.into_inner();
            let (joined, device) = side.join(&theirs).map_err(|e| e.to_string())?;
            let JoinedSide { endpoint, slot } = joined;
            let channel = Channel::new(endpoint, layout, slot, SlotKey);
            channel
                .map(|channel| BackgroundDrop::new((channel, device, permit)))
                .map_err(|e| e.to_string())
        })
        .await
        .and_then(|result| result)
        .map_err(|e| no_transport(&e))?;
        write_message(stream, &wire::encode_go()).await.map_err(broken)?;
        let (reply, transport, pages) = (welcome.payload, welcome.offer, PageKind::Plain);
        let Hello { peer, left_out, .. } = hello;
        return Ok(Agreement { slots, peer, left_out, reply, transport, pages });
    }

    let own = SharedSlot::create(&layout).map_err(|e| no_transport(&e))?;
    let pages = own.pages();
    let rendezvous = RendezvousEntry::new(shared);
    let kind = offer.kind;
    let welcome = Welcome {
        offer,
        side: SideDescription { bytes: layout.slot_bytes() as u64, ..Default::default() },
        nonce: rendezvous.nonce,
        rendezvous: shared.rendezvous_name,
        payload: reply,
    };
    shared.stats.welcomed.fetch_add(1, Ordering::Relaxed);
    write_message(stream, &wire::encode_welcome(&welcome)).await.map_err(broken)?;
    let (socket, passed) = rendezvous.wait(stream.tcp()).await?;
    let theirs = PeerSlot::open(&passed.memory, passed.wake, &shared.layout)
        .map_err(|e| no_transport(&e))?;
    drop(passed.memory);
    pass::send(&socket, &welcome.nonce, own.descriptors()).await.map_err(|e| no_transport(&e))?;
    let endpoint = MemoryEndpoint {
        kind,
        #[cfg(feature = "test-transports")]
        disorder: shared.config.disorder,
    };
    let channel = endpoint.join(layout, own, theirs).map_err(|e| no_transport(&e))?;
    let slots = match shared.config.device.clone() {
        Some(side) => {
            let pair = exchange(side, &socket, &welcome.nonce).await?;
            pair.map(|pair| (channel, Some(pair), permit))
        }
        None => BackgroundDrop::new((channel, None, permit)),
    };
    read_ready(stream, &layout).await?;
    let (reply, transport) = (welcome.payload, welcome.offer);
    let Hello { peer, left_out, .. } = hello;
    Ok(Agreement { slots, peer, left_out, reply, transport, pages })
}

/// Reads the ticket, if there is one, and the hello, also as it travels.
async fn read_opening(
    stream: &mut Stream,
) -> Result<(Option<ShownTicket>, Hello, Vec<u8>), HandshakeEnd> {
    let refused = |error: WireError| HandshakeEnd::Rejected(refusal_of(&error));
    let (mut header, mut body) = read_message(stream).await?;
    let mut shown = None;
    if header.kind == KIND_TICKET {
        shown = Some(wire::decode_ticket(&body).map_err(refused)?);
        (header, body) = read_message(stream).await?;
    }
    if header.kind != KIND_HELLO {
        return Err(refused(WireError::Kind { found: header.kind, expected: "a hello" }));
    }
    let hello = wire::decode_hello(&body).map_err(refused)?;
    let bytes = [&wire::encode_header(&header)[..], &body].concat();
    Ok((shown, hello, bytes))
}

/// Opens a side of the first of `choices` that works here. Returns `None` beside a transport that
/// is no network.
async fn open_first(
    shared: &Shared,
    choices: Vec<Offer>,
    route: Route,
) -> Result<(Offer, Option<(BackgroundDrop<HandshakeSide>, SlotLayout)>), Reject> {
    let mut errors = Vec::new();
    for offer in choices {
        let Some(network) = network_of(&offer, &shared.config.networks) else {
            return Ok((offer, None));
        };
        let (network, device) = (Arc::clone(network), shared.config.device.clone());
        let layout = match &device {
            Some(side) => network.device_layout(side.as_ref(), shared.layout.num_frames()),
            None => Ok(shared.layout),
        };
        let open = |layout| {
            blocking(move || {
                HandshakeSide::open(network.as_ref(), &layout, route, device.as_deref())
                    .map(BackgroundDrop::new)
            })
        };
        let opened = match layout {
            Ok(layout) => open(layout).await.map(|side| side.map(|side| (side, layout))),
            Err(error) => Err(error.to_string()),
        };
        let error = match opened {
            Ok(Ok(opened)) => return Ok((offer, Some(opened))),
            Ok(Err(error)) => error.to_string(),
            Err(error) => error,
        };
        if let Some(num_suppressed) = NETWORK_LOG.allow() {
            tracing::warn!(%offer, error, num_suppressed, "a network cannot be used for a peer; the next best is tried");
        }
        errors.push(error);
    }
    Err(Reject::new(RejectCode::TRANSPORT, errors.join("; ")))
}

/// Joins device slots over the Unix connection on which the host slots were exchanged.
async fn exchange(
    side: Arc<dyn DeviceMemory>,
    socket: &UnixStream,
    nonce: &Nonce,
) -> Result<BackgroundDrop<DeviceSlots>, Reject> {
    let refused = |e: &dyn std::fmt::Display| Reject::new(RejectCode::DEVICE, e.to_string());
    let (found, [memory]) = pass::receive_exactly(socket).await.map_err(|e| refused(&e))?;
    if found != *nonce {
        return Err(refused(&"the descriptor of the device slot belongs to another handshake"));
    }
    let open = open_device(side).await.map_err(|e| refused(&e))?;
    let own = open.descriptor().try_clone_to_owned().map_err(|e| refused(&e))?;
    let pair = join_device(open, memory).await.map_err(|e| refused(&e))?;
    pass::send(socket, nonce, [own.as_fd()]).await.map_err(|e| refused(&e))?;
    Ok(pair)
}

/// Reads the connecting side's last message.
async fn read_ready(
    stream: &mut Stream,
    layout: &SlotLayout,
) -> Result<SideDescription, HandshakeEnd> {
    let (header, body) = read_message(stream).await?;
    if header.kind != KIND_READY {
        let error = WireError::Kind { found: header.kind, expected: "a ready" };
        return Err(refusal_of(&error).into());
    }
    let side = wire::decode_ready(&body).map_err(|e| HandshakeEnd::Rejected(refusal_of(&e)))?;
    if side.bytes != layout.slot_bytes() as u64 {
        let error = WireError::Value {
            field: "side.bytes",
            found: side.bytes,
            expected: "the slot size agreed on",
        };
        return Err(refusal_of(&error).into());
    }
    Ok(side)
}

/// A handshake's entry in the table of handshakes that wait for descriptors. Removed when dropped.
struct RendezvousEntry<'a> {
    shared: &'a Shared,
    nonce: Nonce,
    arrived: oneshot::Receiver<RendezvousResult>,
}

impl<'a> RendezvousEntry<'a> {
    fn new(shared: &'a Shared) -> Self {
        let nonce: Nonce = rand::random();
        let (sender, arrived) = oneshot::channel();
        lock(&shared.waiting).insert(nonce, sender);
        Self { shared, nonce, arrived }
    }

    /// Waits for the descriptors, or for the end of the bootstrap connection.
    async fn wait(
        mut self,
        stream: &TcpStream,
    ) -> Result<(UnixStream, SlotDescriptors), HandshakeEnd> {
        let mut byte = [0u8; 1];
        tokio::select! {
            arrived = &mut self.arrived => match arrived {
                Ok(Ok(received)) => Ok(received),
                Ok(Err(error)) => Err(Reject::new(RejectCode::TRANSPORT, error.to_string()).into()),
                Err(_) => Err(HandshakeEnd::Broken("the rendezvous ended".to_owned())),
            },
            peeked = stream.peek(&mut byte) => match peeked {
                Ok(0) => Err(HandshakeEnd::Broken("the peer closed the connection".to_owned())),
                Ok(_) => Err(Reject::new(
                    RejectCode::MALFORMED,
                    "a message before the descriptors of the slot",
                )
                .into()),
                Err(error) => Err(HandshakeEnd::Broken(error.to_string())),
            },
        }
    }
}

impl Drop for RendezvousEntry<'_> {
    fn drop(&mut self) {
        lock(&self.shared.waiting).remove(&self.nonce);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code that holds the lock can leave the table half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// Peers can cause these lines as often as they like; [`ListenerStats`] counts every case.
static ACCEPT_LOG: LogLimit = LogLimit::new();
static RENDEZVOUS_LOG: LogLimit = LogLimit::new();
static LIVENESS_LOG: LogLimit = LogLimit::new();
static REJECT_LOG: LogLimit = LogLimit::new();
static NETWORK_LOG: LogLimit = LogLimit::new();

/// Handshakes may hold one of this many descriptors.
const DESCRIPTOR_SHARE: u64 = 4;
const ACCEPT_BACKLOG: u32 = 4096;
const FAREWELL: Duration = Duration::from_millis(300);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handshakes_leave_three_quarters_of_the_descriptors() {
        assert_eq!(handshake_limit(1024, 1024), 256);
        assert_eq!(handshake_limit(1024, 1 << 20), 1024);
        assert_eq!(handshake_limit(1024, u64::MAX), 1024);
        assert_eq!(handshake_limit(1024, 3), 1, "one handshake at a time goes on");
    }
}
