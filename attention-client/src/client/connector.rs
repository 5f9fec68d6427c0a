//! One task per lane and server: connects, hands the link over, watches the connection, and begins
//! again with a higher generation.

use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, Ordering};
use std::time::{Duration, Instant};

use cuda_ipc::GpuMemory;
use kernels::slots::DevicePair;
use p2p_core::bootstrap::{
    Aside, CloseReason, ConnectConfig, ConnectError, Fallback, Liveness, RejectCode, Working,
    connect,
};
use p2p_core::network::Offer;
use p2p_core::{AnyEndpoint, Channel, Connection, PeerHello, WaitSet};
use protocol::{ClientHello, HelloReject, ServerHello};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::control::{Command, Leave};
use super::link::{Down, LaneNews, Link, LinkState, PairCell, Retired};
use super::shared::Shared;
use crate::metrics::FailReason;
use crate::placement::Server;

/// What the control side knows of a lane.
#[derive(Debug, Clone)]
pub(crate) struct LanePort {
    pub id: usize,
    pub client_id: u64,
    pub news: Arc<LaneNews>,
    pub gate: Arc<Gate>,
}

/// Opens when every server that a new lane began with was tried once.
#[derive(Debug)]
pub(crate) struct Gate {
    missing: AtomicIsize,
}

impl Gate {
    pub fn closed() -> Self {
        Self { missing: AtomicIsize::new(isize::MAX / 2) }
    }

    pub fn expect(&self, num_servers: usize) {
        self.missing.fetch_add(num_servers as isize - isize::MAX / 2, Ordering::Release);
    }

    pub fn arrive(&self) {
        self.missing.fetch_sub(1, Ordering::Release);
    }

    /// Blocks at `wait` until it is open, for `limit` at most.
    pub fn wait_open(&self, wait: &WaitSet, limit: Duration) -> std::io::Result<()> {
        let until = Instant::now() + limit;
        while !self.is_open() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            wait.block(left.min(GATE_POLL))?;
        }
        Ok(())
    }

    fn is_open(&self) -> bool {
        self.missing.load(Ordering::Acquire) <= 0
    }
}

pub(crate) struct Connector {
    pub shared: Arc<Shared>,
    pub server: Arc<Server>,
    pub lane: LanePort,
    pub leave: watch::Receiver<Leave>,
    /// What this lane knows of the server's networks, and shares of it.
    pub fallback: Fallback,
    /// Whether the lane waits for the first attempt.
    pub initial: bool,
    /// A link that the server gave up before it carried anything.
    pub given_up: Option<GivenUp>,
}

/// Says something about the transport only if the server is found to be the same that it was.
pub(crate) struct GivenUp {
    transport: Offer,
    incarnation: u64,
    reason: CloseReason,
}

/// A server that this client can use.
struct Connected {
    slots: Aside<(Channel<AnyEndpoint>, Option<DevicePair>)>,
    liveness: Liveness,
    transport: Offer,
    left_out: String,
    incarnation: u64,
}

/// Why a link ended.
enum Ended {
    /// Connect again, after a pause.
    Again,
    /// Connect again when places for servers have become free more often than this.
    Full { freed: u64 },
    /// The server left, or the client goes.
    Over,
}

impl Connector {
    pub async fn run(mut self) {
        let mut pause = FIRST_PAUSE;
        let mut generation = 0u32;
        while *self.leave.borrow() == Leave::Stay {
            generation = generation.wrapping_add(1);
            let mut leave = self.leave.clone();
            let connected = {
                let _connecting = Counted::new(&self.shared.metrics.links_connecting);
                tokio::select! {
                    connected = self.connect(generation) => connected,
                    () = told(&mut leave) => break,
                }
            };
            let since = Instant::now();
            let ended = match connected {
                Ok(connected) => {
                    self.judge_given_up(connected.incarnation);
                    self.keep(generation, connected).await
                }
                Err(error) => {
                    self.shared.metrics.connects_failed.inc();
                    tracing::debug!(server = self.server.name(), error, "cannot connect");
                    self.server.note_error(error);
                    self.arrive();
                    Ended::Again
                }
            };
            match ended {
                Ended::Again => {}
                // An attempt in vain would have the server drain its batches twice, for all its clients.
                Ended::Full { freed } => tokio::select! {
                    () = self.place_after(freed) => {}
                    () = told(&mut leave) => break,
                },
                Ended::Over => break,
            }
            if since.elapsed() > STABLE {
                pause = FIRST_PAUSE;
            }
            let jitter = rand::random_range(0.5..=1.0);
            tokio::select! {
                () = sleep(pause.mul_f64(jitter)) => {}
                () = told(&mut leave) => {}
            }
            pause = (pause * 2).min(MAX_PAUSE);
        }
        self.arrive();
    }

    /// Tells a new lane that this server was tried.
    fn arrive(&mut self) {
        if std::mem::take(&mut self.initial) {
            self.lane.gate.arrive();
            self.lane.news.announce();
        }
    }

    /// Completes when places for servers have become free more often than `freed`.
    async fn place_after(&self, freed: u64) {
        let mut places = self.shared.places_freed.subscribe();
        // Fails only when the client goes.
        let _ = places.wait_for(|now| *now != freed).await;
    }

    async fn connect(&self, generation: u32) -> Result<Connected, String> {
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
        let config = ConnectConfig {
            slot: settings.slot,
            ticket: settings.ticket.clone(),
            transports: offered.kinds.clone(),
            networks: offered.networks.clone(),
            fallback: self.fallback.clone(),
            device: settings.device.clone().map(GpuMemory::offer),
            timeout: settings.connect_timeout,
            ..ConnectConfig::default()
        };
        let connection =
            connect(self.server.entry.data_addr.as_str(), peer, config).await.map_err(|error| {
                let is_permanent = matches!(error, ConnectError::Device(_))
                    || error.reject().is_some_and(|reject| is_permanent(reject.code));
                self.server.refused.store(is_permanent, Ordering::Relaxed);
                error.to_string()
            })?;
        let Connection { channel, device, liveness, transport, left_out, reply, .. } = connection;
        // Only pairs of the kind that this client offered can come.
        let device = device.and_then(|slots| slots.downcast().ok());
        // A server that is of no use is let go of like any other.
        let slots = Aside::new((channel, device));
        let reply = ServerHello::decode(&reply)
            .map_err(|error| format!("its reply to the handshake cannot be read: {error}"))?;
        reply.model.check_against(&self.shared.model.shape).map_err(|error| error.to_string())?;
        if reply.generation != generation {
            return Err(format!(
                "it answered for generation {}, expected {generation}",
                reply.generation
            ));
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
        Ok(Connected { slots, liveness, transport, left_out, incarnation: reply.incarnation })
    }

    /// Hands the link to the lane and stays until it is over.
    async fn keep(&mut self, generation: u32, connected: Connected) -> Ended {
        let Connected { slots, liveness, transport, left_out, incarnation } = connected;
        let (channel, device) = slots.into_inner();
        let channel = Aside::new(channel);
        let state = Arc::new(LinkState::new(device.as_ref()));
        let state_seen = Arc::clone(&state);
        let since = Instant::now();
        let mut used = Used { transport, incarnation, state: state_seen, since, working: None };
        let device = device.map(|pair| Arc::new(PairCell::new(pair)));
        let (retire, mut retired) = oneshot::channel();
        let liveness = Arc::new(liveness);
        let link = Link::new(
            Arc::clone(&self.server),
            generation,
            channel,
            Arc::clone(&state),
            Arc::clone(&liveness),
            device.clone(),
            retire,
        );
        self.server.silenced.store(false, Ordering::Relaxed);
        self.server.refused.store(false, Ordering::Relaxed);
        self.server.note_error(match left_out.as_str() {
            "" => format!("connected over {}", used.transport),
            why => format!("connected over {}, left out {why}", used.transport),
        });
        // A link that the lane has not taken yet is older, and its connection is over.
        drop(self.server.mailboxes[self.lane.id].force_push(Box::new(link)));
        // Counted when the lane can find it, not before.
        let _up = Counted::new(&self.shared.metrics.links_up);
        self.shared.metrics.connects_ok.inc();
        self.arrive();
        self.lane.news.announce();
        loop {
            tokio::select! {
                biased;
                given_back = &mut retired => {
                    let unmapped = release_pair(device.as_deref(), &state);
                    if let Ok(Retired { reason, .. }) = &given_back {
                        self.judge(&used, *reason, &liveness).await;
                    }
                    return self.put_away(&liveness, given_back.ok(), unmapped).await;
                }
                reason = liveness.closed() => {
                    state.set_down(Down::Closed);
                    self.lane.news.announce();
                    drop(release_pair(device.as_deref(), &state));
                    self.judge(&used, FailReason::Closed, &liveness).await;
                    self.note_closed(reason);
                    return Ended::Again;
                }
                () = told(&mut self.leave) => {
                    let _leaving = Counted::new(&self.shared.metrics.links_leaving);
                    self.leave(&state, &liveness, &mut retired).await;
                    drop(release_pair(device.as_deref(), &state));
                    return Ended::Over;
                }
                () = state.carried(), if used.working.is_none() => {
                    used.working = Some(self.fallback.note_works(&used.transport));
                }
            }
        }
    }

    /// The lane is through with the link. First the connection goes, then the memory. `unmapped` is the end of
    /// what goes already.
    async fn put_away(
        &self,
        liveness: &Liveness,
        retired: Option<Retired>,
        unmapped: Option<JoinHandle<()>>,
    ) -> Ended {
        let closed = liveness.closed_now();
        liveness.close();
        let Some(Retired { channel, reason, turned_away }) = retired else {
            // The lane itself is gone.
            return Ended::Over;
        };
        // A proxy posts on for a moment, and a GPU may have to end a kernel; other links are looked after
        // meanwhile. A successor finds the memory free.
        let freed = tokio::task::spawn_blocking(move || drop(channel.into_inner()));
        for end in [Some(freed), unmapped].into_iter().flatten() {
            if let Err(error) = end.await {
                tracing::error!(%error, "a link's memory was not given back in order");
            }
        }
        match (reason, closed) {
            // The lane saw it first.
            (FailReason::Closed, Some(reason)) => self.note_closed(reason),
            (FailReason::Closed | FailReason::Left, _) => {}
            (fault, _) => self.suspect(fault.name()),
        }
        turned_away.map_or(Ended::Again, |freed| Ended::Full { freed })
    }

    /// Lets a server that left answer what it has, then closes the connection.
    async fn leave(
        &self,
        state: &LinkState,
        liveness: &Liveness,
        retired: &mut oneshot::Receiver<Retired>,
    ) {
        if *self.leave.borrow() == Leave::Gracefully {
            let idle = async {
                // Calls that began by the old placement may still be about to send.
                sleep(GRACE).await;
                while state.in_flight.load(Ordering::Relaxed) > 0 {
                    sleep(POLL).await;
                }
            };
            let mut leave = self.leave.clone();
            tokio::select! {
                _ = timeout(MAX_LEAVE, idle) => {}
                _ = liveness.closed() => {}
                given_back = retired => drop(given_back),
                () = told_now(&mut leave) => {}
            }
        }
        state.set_down(Down::Left);
        self.lane.news.announce();
        liveness.close();
    }

    /// The server closed the connection, or is gone.
    fn note_closed(&self, reason: CloseReason) {
        self.server.note_error(reason);
        if !matches!(reason, CloseReason::Left | CloseReason::Local) {
            self.suspect(&reason.to_string());
        }
    }

    fn suspect(&self, reason: &str) {
        let (server, reason) = (Arc::clone(&self.server), reason.to_owned());
        // Fails only when the client goes.
        let _ = self.shared.commands.send(Command::Suspect { server, reason });
    }
}

/// A link's transport, which is judged when the link is over.
struct Used {
    transport: Offer,
    incarnation: u64,
    state: Arc<LinkState>,
    since: Instant,
    /// Held once something came over the link.
    working: Option<Working>,
}

impl Connector {
    /// Judges the transport of a link that is over. An idle link carries nothing either; one that ended
    /// with an error, or that the server soon gave up, was no use. A server that goes takes its links
    /// along, which says nothing about the transport.
    async fn judge(&mut self, used: &Used, reason: FailReason, liveness: &Liveness) {
        let transport = &used.transport;
        if used.state.has_carried() {
            if used.working.is_none() {
                drop(self.fallback.note_works(transport));
            }
            return;
        }
        if !transport.kind.is_network() {
            return;
        }
        let closed = match reason {
            FailReason::Closed => liveness.closed_now(),
            // The transport may tell the end of a process sooner than the connection does.
            FailReason::Silent | FailReason::Transport => {
                match timeout(NEWS_OF_AN_END, liveness.closed()).await {
                    Ok(reason) => Some(reason),
                    Err(_) => return self.note_useless(transport, reason.name()),
                }
            }
            // Nobody failed, or something came.
            _ => None,
        };
        if let Some(reason @ CloseReason::Left) = closed
            && used.since.elapsed() < SHORT_LIFE
        {
            let (transport, incarnation) = (transport.clone(), used.incarnation);
            self.given_up = Some(GivenUp { transport, incarnation, reason });
        }
    }

    /// The server answered again, as `incarnation`.
    fn judge_given_up(&mut self, incarnation: u64) {
        if let Some(given_up) = self.given_up.take()
            && given_up.incarnation == incarnation
        {
            self.note_useless(&given_up.transport, &given_up.reason.to_string());
        }
    }

    fn note_useless(&self, transport: &Offer, end: &str) {
        if let Some(pause) = self.fallback.note_useless(transport, end) {
            tracing::warn!(
                server = self.server.name(),
                %transport,
                reason = end,
                ?pause,
                "nothing comes over this transport, which is left out for a while"
            );
        }
    }
}

/// Gives the GPU memory of a connection that is down back at once, unless a call may still use it: then
/// the end of that call does. Unmapping may take milliseconds, which no other connection should wait for.
fn release_pair(device: Option<&PairCell>, state: &LinkState) -> Option<JoinHandle<()>> {
    let pair = device?.take_if_unused(state)?;
    Some(tokio::task::spawn_blocking(move || drop(pair.into_inner())))
}

/// Completes when the connector is to leave.
async fn told(leave: &mut watch::Receiver<Leave>) {
    let _ = leave.wait_for(|leave| *leave != Leave::Stay).await;
}

/// Completes when the connector is to leave without grace.
async fn told_now(leave: &mut watch::Receiver<Leave>) {
    let _ = leave.wait_for(|leave| *leave == Leave::Now).await;
}

/// Counts in a gauge as long as it lives.
struct Counted(prometheus::IntGauge);

impl Counted {
    fn new(gauge: &prometheus::IntGauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Whether a server that refused with `code` will do so again until somebody changes a setting.
fn is_permanent(code: RejectCode) -> bool {
    HelloReject::is_permanent(code.0).unwrap_or(matches!(
        code,
        RejectCode::VERSION
            | RejectCode::TICKET
            | RejectCode::SLOT_MISMATCH
            | RejectCode::NO_TRANSPORT
            | RejectCode::DEVICE
    ))
}

const FIRST_PAUSE: Duration = Duration::from_millis(5);
const MAX_PAUSE: Duration = Duration::from_secs(1);
/// A link that lived this long starts the pauses over.
const STABLE: Duration = Duration::from_secs(1);
/// A link that the server closed before was cut short.
const SHORT_LIFE: Duration = Duration::from_secs(10);
/// By when the end of a server's process, seen by the transport, shows on the connection to it as well.
const NEWS_OF_AN_END: Duration = Duration::from_millis(100);
const GRACE: Duration = Duration::from_millis(100);
const POLL: Duration = Duration::from_millis(5);
/// How often who waits at a gate looks by itself, should an announcement be lost.
const GATE_POLL: Duration = Duration::from_millis(20);
const MAX_LEAVE: Duration = Duration::from_secs(30);
