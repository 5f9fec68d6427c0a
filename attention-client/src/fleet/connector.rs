//! One task for each lane and server: it connects, hands the link to the lane, watches the connection, and starts
//! over with a higher generation when the link ends.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use p2p_core::bootstrap::{
    BackgroundDrop, CloseReason, ConnectConfig, ConnectError, Fallback, Liveness, RejectCode,
    TicketSource, WorkingOffer, connect,
};
use p2p_core::device::DeviceSlots;
use p2p_core::network::Offer;
use p2p_core::{AnyEndpoint, Channel, Connection, PeerHello};
use protocol::{ClientHello, HelloReject, ServerHello};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::command::{Command, Directive};
use super::lane_port::LanePort;
use super::link::{Link, LinkEnd, LinkReturn, LinkState, Server};
use super::shared::Shared;
use super::tickets::ServerTickets;
use crate::metrics::FailReason;

pub(crate) struct Connector {
    pub shared: Arc<Shared>,
    pub server: Arc<Server>,
    pub lane: LanePort,
    pub directive: watch::Receiver<Directive>,
    /// Transports that do not work with the server, as this lane knows. Lanes share their findings.
    pub fallback: Fallback,
    /// True while the lane waits for the first attempt.
    pub initial: bool,
    /// Set after the server closed a link that had carried nothing.
    pub suspect_transport: Option<SuspectTransport>,
}

/// A transport that may be useless. It counts as useless only if the server turns out to be the same process as
/// before: a server that restarts closes its links too.
pub(crate) struct SuspectTransport {
    transport: Offer,
    incarnation: u64,
    reason: CloseReason,
}

/// A connection to a server that this client can use.
struct ServerConnection {
    slots: BackgroundDrop<(Channel<AnyEndpoint>, Option<DeviceSlots>)>,
    liveness: Liveness,
    transport: Offer,
    left_out: String,
    incarnation: u64,
    /// [`telemetry::ids::server_key`] of the name in the reply.
    server_key: u64,
}

/// Why there is no connection.
struct ConnectFailure {
    text: String,
    /// True if no server answered. False if one answered that this client cannot use, or that refuses it.
    is_unreachable: bool,
}

impl From<String> for ConnectFailure {
    fn from(text: String) -> Self {
        Self { text, is_unreachable: false }
    }
}

/// The next step of a connector after a link.
enum NextStep {
    /// Connect again, after a pause.
    Reconnect,
    /// Connect again once more than `places_freed` places for servers have become free.
    AwaitPlace { places_freed: u64 },
    /// The server left, or the client ends.
    End,
}

impl Connector {
    pub async fn run(mut self) {
        let mut pause = FIRST_PAUSE;
        let mut generation = 0u32;
        while *self.directive.borrow() == Directive::Serve {
            generation = generation.wrapping_add(1);
            let mut directive = self.directive.clone();
            let connected = {
                let _connecting = GaugeGuard::new(&self.shared.metrics.links_connecting);
                tokio::select! {
                    connected = self.connect(generation) => connected,
                    () = stopped(&mut directive) => break,
                }
            };
            let since = Instant::now();
            let next_step = match connected {
                Ok(connected) => {
                    self.judge_suspect_transport(connected.incarnation);
                    self.run_link(generation, connected).await
                }
                Err(ConnectFailure { text, is_unreachable }) => {
                    self.shared.metrics.connects_failed.inc();
                    tracing::debug!(server = self.server.name(), error = text, "cannot connect");
                    if is_unreachable {
                        self.suspect(&text);
                    }
                    self.server.note_error(text);
                    self.arrive();
                    NextStep::Reconnect
                }
            };
            match next_step {
                NextStep::Reconnect => {}
                // A server drains its batches when a client joins or leaves, for all its clients. So an attempt
                // that must fail costs others time.
                NextStep::AwaitPlace { places_freed } => tokio::select! {
                    () = self.place_after(places_freed) => {}
                    () = stopped(&mut directive) => break,
                },
                NextStep::End => break,
            }
            if since.elapsed() > STABLE {
                pause = FIRST_PAUSE;
            }
            let jitter = rand::random_range(0.5..=1.0);
            tokio::select! {
                () = sleep(pause.mul_f64(jitter)) => {}
                () = stopped(&mut directive) => {}
            }
            pause = (pause * 2).min(MAX_PAUSE);
        }
        self.arrive();
    }

    /// Reports to a new lane that this server was tried.
    fn arrive(&mut self) {
        if std::mem::take(&mut self.initial) {
            self.lane.gate.arrive();
            self.lane.events.notify();
        }
    }

    /// Completes once more than `places_freed` places for servers have become free.
    async fn place_after(&self, places_freed: u64) {
        let mut places = self.shared.places_freed.subscribe();
        // Fails only when the client ends.
        let _ = places.wait_for(|now| *now != places_freed).await;
    }

    async fn connect(&self, generation: u32) -> Result<ServerConnection, ConnectFailure> {
        let settings = &self.shared.settings;
        let hello = ClientHello {
            model: self.shared.model.shape,
            client_id: self.lane.client_id,
            dtype: self.shared.geometry.dtype(),
            response_dtype: self.shared.geometry.response_dtype(),
            name: settings.name.clone(),
        };
        let peer = PeerHello { peer_id: self.lane.client_id, generation, payload: hello.encode() };
        let offered = settings.transports_for(self.server.name());
        let tickets = self.tickets().await?;
        let source = tickets.clone().map(|tickets| tickets as Arc<dyn TicketSource>);
        // Only servers without tickets get the secret.
        let secret = settings.secret.clone().filter(|_| source.is_none());
        let addr = self.server.entry.data_addr.as_str();
        if secret.is_some() {
            let host = addr.rsplit_once(':').map_or(addr, |(host, _)| host);
            settings.security.check_peer(host).map_err(|error| error.to_string())?;
        }
        let config = ConnectConfig {
            slot: settings.slot,
            tls: settings.security.for_client().cloned(),
            secret,
            tickets: source,
            transports: offered.kinds.clone(),
            networks: offered.networks.clone(),
            fallback: self.fallback.clone(),
            device: settings.device.as_ref().map(|device| Arc::clone(&device.memory)),
            timeout: settings.connect_timeout,
            ..ConnectConfig::default()
        };
        let connection = connect(addr, peer, config).await.map_err(|error| {
            let is_permanent = matches!(error, ConnectError::Device(_))
                || error.reject().is_some_and(|reject| is_permanent(reject.code));
            self.server.has_refused.store(is_permanent, Ordering::Relaxed);
            if let (Some(refused), Some(tickets)) = (&tickets, &self.shared.tickets)
                && error.reject().is_some_and(|reject| reject.code == RejectCode::TICKET)
            {
                tickets.refused(refused);
            }
            let is_refusal = is_permanent
                || error.reject().is_some()
                || matches!(error, ConnectError::Ticket(_) | ConnectError::Tls { .. });
            ConnectFailure { text: error.to_string(), is_unreachable: !is_refusal }
        })?;
        let Connection { channel, device, liveness, transport, left_out, reply, .. } = connection;
        // An unusable connection is freed in the background, like any other.
        let slots = BackgroundDrop::new((channel, device));
        let reply = ServerHello::decode(&reply)
            .map_err(|error| format!("its reply to the handshake cannot be read: {error}"))?;
        reply.model.check_against(&self.shared.model.shape).map_err(|error| error.to_string())?;
        if reply.generation != generation {
            return Err(format!(
                "it answered for generation {}, expected {generation}",
                reply.generation
            )
            .into());
        }
        let interval = Duration::from_micros(reply.progress_interval_us.into());
        if settings.deadline < interval * 2 {
            tracing::warn!(
                server = self.server.name(),
                ?interval,
                deadline = ?settings.deadline,
                "the server shows progress too rarely for this deadline: long work will look like silence"
            );
        }
        Ok(ServerConnection {
            slots,
            liveness,
            transport,
            left_out,
            incarnation: reply.incarnation,
            server_key: telemetry::ids::server_key(&reply.name),
        })
    }

    /// The source of tickets for the server, if it asks for some. Waits for one as long as for a handshake.
    async fn tickets(&self) -> Result<Option<Arc<ServerTickets>>, ConnectFailure> {
        let entry = &self.server.entry;
        if !entry.needs_tickets {
            return Ok(None);
        }
        let Some(tickets) = &self.shared.tickets else {
            let text = "it admits clients with a ticket only, and this client has no control plane \
                        to get one from";
            return Err(text.to_owned().into());
        };
        match tickets.for_server(entry, self.shared.settings.connect_timeout).await {
            Ok(source) => Ok(Some(source)),
            Err(error) => {
                self.server.has_refused.store(error.is_refused, Ordering::Relaxed);
                Err(error.to_string().into())
            }
        }
    }

    /// Hands the link to the lane and completes when the link is over.
    async fn run_link(&mut self, generation: u32, connection: ServerConnection) -> NextStep {
        let ServerConnection { slots, liveness, transport, left_out, incarnation, server_key } =
            connection;
        let (channel, device) = slots.into_inner();
        let channel = BackgroundDrop::new(channel);
        let support = self.shared.settings.device.as_ref();
        let device = device.zip(support).and_then(|(slots, support)| (support.link_of)(slots));
        let state = Arc::new(LinkState::new(device));
        let link_state = Arc::clone(&state);
        let since = Instant::now();
        let mut trial =
            TransportTrial { transport, incarnation, state: link_state, since, working: None };
        let (retire, mut returned) = oneshot::channel();
        let liveness = Arc::new(liveness);
        let link = Link::new(
            Arc::clone(&self.server),
            (generation, server_key),
            channel,
            Arc::clone(&state),
            Arc::clone(&liveness),
            retire,
        );
        self.server.is_silent.store(false, Ordering::Relaxed);
        self.server.has_refused.store(false, Ordering::Relaxed);
        // Drops a link that the lane has not taken yet: it is older, and its connection is over.
        drop(self.server.mailboxes[self.lane.id].force_push(Box::new(link)));
        self.lane.events.notify();
        // After the push and its event: a lane that reads this finds the link.
        self.server.note_error(match left_out.as_str() {
            "" => format!("connected over {}", trial.transport),
            why => format!("connected over {}, left out {why}", trial.transport),
        });
        // Counted once the lane can find it, not before.
        let _up = GaugeGuard::new(&self.shared.metrics.links_up);
        self.shared.metrics.connects_ok.inc();
        self.arrive();
        self.lane.events.notify();
        loop {
            tokio::select! {
                biased;
                link = &mut returned => {
                    let freed = free_device_slots(&state);
                    if let Ok(LinkReturn { reason, .. }) = &link {
                        self.judge(&trial, *reason, &liveness).await;
                    }
                    return self.close(&liveness, link.ok(), freed).await;
                }
                reason = liveness.closed() => {
                    state.set_down(LinkEnd::Closed);
                    self.lane.events.notify();
                    drop(free_device_slots(&state));
                    self.judge(&trial, FailReason::Closed, &liveness).await;
                    self.note_closed(reason);
                    return NextStep::Reconnect;
                }
                () = stopped(&mut self.directive) => {
                    let _leaving = GaugeGuard::new(&self.shared.metrics.links_leaving);
                    self.drain(&state, &liveness, &mut returned).await;
                    drop(free_device_slots(&state));
                    return NextStep::End;
                }
                () = state.carried(), if trial.working.is_none() => {
                    trial.working = Some(self.fallback.note_works(&trial.transport));
                }
            }
        }
    }

    /// Closes the connection of a link that its lane has returned, then frees the memory. Completes when the
    /// memory is free. `device_freed` is the task that frees the device slots.
    async fn close(
        &self,
        liveness: &Liveness,
        link: Option<LinkReturn>,
        device_freed: Option<JoinHandle<()>>,
    ) -> NextStep {
        let closed = liveness.closed_now();
        liveness.close();
        let Some(LinkReturn { channel, reason, places_freed }) = link else {
            // The lane itself is gone.
            return NextStep::End;
        };
        // Freeing may block: a proxy still posts for a moment, and a GPU may have to end a kernel. Connectors of
        // other links go on meanwhile. The next link starts only when the memory is free.
        let freed = tokio::task::spawn_blocking(move || drop(channel.into_inner()));
        for end in [Some(freed), device_freed].into_iter().flatten() {
            if let Err(error) = end.await {
                tracing::error!(%error, "a thread that frees a link's memory failed");
            }
        }
        match (reason, closed) {
            // The lane noticed the close first.
            (FailReason::Closed, Some(reason)) => self.note_closed(reason),
            (FailReason::Closed | FailReason::Left, _) => {}
            (fault, _) => self.suspect(fault.name()),
        }
        places_freed
            .map_or(NextStep::Reconnect, |places_freed| NextStep::AwaitPlace { places_freed })
    }

    /// Waits until a server that left the placement has answered its frames, then closes the connection.
    async fn drain(
        &self,
        state: &LinkState,
        liveness: &Liveness,
        returned: &mut oneshot::Receiver<LinkReturn>,
    ) {
        if *self.directive.borrow() == Directive::Drain {
            let idle = async {
                // Calls that started with the old placement may still be about to send.
                sleep(GRACE).await;
                while state.in_flight.load(Ordering::Relaxed) > 0 {
                    sleep(POLL).await;
                }
            };
            let mut directive = self.directive.clone();
            tokio::select! {
                _ = timeout(MAX_LEAVE, idle) => {}
                _ = liveness.closed() => {}
                link = returned => drop(link),
                () = stopped_now(&mut directive) => {}
            }
        }
        state.set_down(LinkEnd::Left);
        self.lane.events.notify();
        liveness.close();
    }

    /// Records that the server closed the connection or its process is gone, and reports it as suspect.
    fn note_closed(&self, reason: CloseReason) {
        self.server.note_error(reason);
        if !matches!(reason, CloseReason::Left | CloseReason::Local) {
            self.suspect(&reason.to_string());
        }
    }

    fn suspect(&self, reason: &str) {
        let (server, reason) = (Arc::clone(&self.server), reason.to_owned());
        // Fails only when the client ends.
        let _ = self.shared.commands.send(Command::Suspect { server, reason });
    }
}

/// The transport of a link. It is judged when the link is over.
struct TransportTrial {
    transport: Offer,
    incarnation: u64,
    state: Arc<LinkState>,
    since: Instant,
    /// Set once something came over the link.
    working: Option<WorkingOffer>,
}

impl Connector {
    /// Judges the transport of a link that is over. A link that carried something worked. A link that carried
    /// nothing was useless if it ended with an error, or if the server soon closed it. Otherwise it may have been
    /// idle, or its server ended, and nothing follows about the transport.
    async fn judge(&mut self, trial: &TransportTrial, reason: FailReason, liveness: &Liveness) {
        let transport = &trial.transport;
        if trial.state.has_carried() {
            if trial.working.is_none() {
                drop(self.fallback.note_works(transport));
            }
            return;
        }
        if !transport.kind.is_network() {
            return;
        }
        let closed = match reason {
            FailReason::Closed => liveness.closed_now(),
            // The transport may report the end of a process before the connection does.
            FailReason::Silent | FailReason::Transport => {
                match timeout(CLOSE_DELAY, liveness.closed()).await {
                    Ok(reason) => Some(reason),
                    Err(_) => return self.note_useless(transport, reason.name()),
                }
            }
            // Not a failure of the transport.
            _ => None,
        };
        if let Some(reason @ CloseReason::Left) = closed
            && trial.since.elapsed() < SHORT_LIFE
        {
            let (transport, incarnation) = (transport.clone(), trial.incarnation);
            self.suspect_transport = Some(SuspectTransport { transport, incarnation, reason });
        }
    }

    /// The server answered again, as `incarnation`: decides about a suspect transport.
    fn judge_suspect_transport(&mut self, incarnation: u64) {
        if let Some(suspect) = self.suspect_transport.take()
            && suspect.incarnation == incarnation
        {
            self.note_useless(&suspect.transport, &suspect.reason.to_string());
        }
    }

    fn note_useless(&self, transport: &Offer, end: &str) {
        if let Some(pause) = self.fallback.note_useless(transport, end) {
            tracing::warn!(
                server = self.server.name(),
                %transport,
                reason = end,
                ?pause,
                "this transport carries nothing and is not offered for a while"
            );
        }
    }
}

/// Frees the GPU memory of a link that is down, on a thread that may block: unmapping may take milliseconds, and
/// no other connection should wait for it. While a call may use the memory this does nothing; the end of the call
/// frees it then.
fn free_device_slots(state: &LinkState) -> Option<JoinHandle<()>> {
    let slots = state.device()?.take_if_unused(state)?;
    Some(tokio::task::spawn_blocking(move || drop(slots)))
}

/// Completes when the connector must drain or stop.
async fn stopped(directive: &mut watch::Receiver<Directive>) {
    let _ = directive.wait_for(|directive| *directive != Directive::Serve).await;
}

/// Completes when the connector must stop at once.
async fn stopped_now(directive: &mut watch::Receiver<Directive>) {
    let _ = directive.wait_for(|directive| *directive == Directive::Stop).await;
}

/// Counts in a gauge as long as it lives.
struct GaugeGuard(prometheus::IntGauge);

impl GaugeGuard {
    fn new(gauge: &prometheus::IntGauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Returns true if a server that refused with `code` will refuse again until a setting changes.
fn is_permanent(code: RejectCode) -> bool {
    HelloReject::is_permanent(code.0).unwrap_or(matches!(
        code,
        RejectCode::VERSION
            | RejectCode::SECRET
            | RejectCode::SLOT_MISMATCH
            | RejectCode::NO_TRANSPORT
            | RejectCode::DEVICE
    ))
}

const FIRST_PAUSE: Duration = Duration::from_millis(5);
const MAX_PAUSE: Duration = Duration::from_secs(1);
/// After a link that lived this long the pauses start over.
const STABLE: Duration = Duration::from_secs(1);
/// A server that closes a link sooner than this gave it up.
const SHORT_LIFE: Duration = Duration::from_secs(10);
/// The connection to a server shows the end of its process at most this long after the transport does.
const CLOSE_DELAY: Duration = Duration::from_millis(100);
const GRACE: Duration = Duration::from_millis(100);
const POLL: Duration = Duration::from_millis(5);
const MAX_LEAVE: Duration = Duration::from_secs(30);
