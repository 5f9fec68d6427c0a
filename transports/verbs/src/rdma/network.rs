//! The verbs transport as the handshake uses it: ports opened once, and per peer one or more pairs of queue pairs.

use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::config::{MAX_QUEUE_PAIRS, SIGNALS_VARIABLE, VerbsConfig};
use super::detail::{self, Link, MIN_RECEIVES, QueuePairAddress, Signals};
use super::endpoint::{RemoteSlot, VerbsEndpoint};
use super::messages::{self, Arrivals, Messages, RECEIVES_BESIDE_WINDOW, window_of};
use super::owner::{CallError, Context, ProtectionDomain};
use super::port::{Port, error, open_ports};
use super::progress::{Progress, Room, ThreadTask};
use super::qp::{Capacity, QueuePair};
use super::registration::{MemoryRegion, Rights};
use super::request::Place;
use super::send_queue::{SendQueue, SendQueueParts};
use super::state::{PeerState, QueuePairState, Sleeper};
use super::status::Health;
use super::sys;
use p2p_core::endpoint::TransportKind;
use p2p_core::network::{JoinedSide, Network, NetworkError, OpenSide, Route, SideDescription};
use p2p_core::region::Region;
use p2p_core::slot::{SlotLayout, WAITING};
use p2p_core::transport::AnyEndpoint;
use p2p_core::wait::event_fd;

/// The ports of this process that reach peers by RDMA.
#[derive(Debug)]
pub struct VerbsNetwork {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    name: String,
    config: VerbsConfig,
    ports: Vec<Port>,
    signals: Signals,
    /// For each port, the index of its context in the driver.
    context_idx: Vec<usize>,
    progress: Arc<Progress>,
}

impl VerbsNetwork {
    /// Opens the ports that `config` names.
    ///
    /// # Errors
    /// [`NetworkError`], in one line: no device, no active port, or no atomics although the settings require them.
    pub fn open(config: VerbsConfig) -> Result<Self, NetworkError> {
        let ports = open_ports(&config)?;
        let name = ports.iter().map(Port::name).collect::<Vec<_>>().join("+");
        check(&config, &name, &ports)?;
        let signals = choose_signals(&config, &name, &ports)?;
        let mut contexts: Vec<Arc<Context>> = Vec::new();
        let mut context_idx = Vec::new();
        for port in &ports {
            let known = contexts.iter().position(|known| known.name() == port.context.name());
            context_idx.push(known.unwrap_or_else(|| {
                contexts.push(Arc::clone(&port.context));
                contexts.len() - 1
            }));
        }
        let progress = Progress::start(&name, &contexts, ThreadTask::EventsAndDriving)
            .map_err(|e| error(&name, e.call, Some(e.code), e.to_string()))?;
        let flavour = ports[0].slot_flavour(signals);
        tracing::info!(ports = name, flavour, "RDMA ports opened");
        let shared = Shared { name, config, ports, signals, context_idx, progress };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Ports in use, in the form for people: `mlx5_0:1+mlx5_1:1`.
    #[must_use]
    pub fn ports(&self) -> &str {
        &self.shared.name
    }
}

impl Network for VerbsNetwork {
    fn kind(&self) -> TransportKind {
        TransportKind::Verbs
    }

    fn flavour(&self) -> &str {
        self.shared.ports[0].slot_flavour(self.shared.signals)
    }

    fn open(&self, layout: &SlotLayout, route: Route) -> Result<Box<dyn OpenSide>, NetworkError> {
        let shared = &self.shared;
        let (slot, own) = shared.own_slot(layout)?;
        let mut queue_pairs = Vec::new();
        for (port_idx, port) in shared.ports.iter().enumerate() {
            // Each peer has a domain of its own. Even with a guessed key, its queue pairs reach nothing but its slot.
            let domain = ProtectionDomain::new(&port.context).map_err(|e| shared.failed(&e))?;
            for _ in 0..shared.config.queue_pairs_per_port {
                if queue_pairs.len() < shared.num_queue_pairs() {
                    queue_pairs.push(shared.open_queue_pair(
                        port_idx,
                        &domain,
                        (&slot, &own),
                        layout,
                        route.local,
                    )?);
                }
            }
        }
        Ok(Box::new(VerbsSide { queue_pairs, slot, own, shared: Arc::clone(shared), route }))
    }

    fn rdma_device(&self) -> Option<&str> {
        Some(self.shared.ports[0].context.name())
    }
}

impl Shared {
    fn failed(&self, e: &CallError) -> NetworkError {
        let hint = match e.call {
            "ibv_reg_mr" => "; check the limit on locked memory (`ulimit -l`)",
            "ibv_create_qp" | "ibv_create_cq" | "ibv_alloc_pd" => {
                "; the device may be out of resources, see `rdma resource`"
            }
            _ => "",
        };
        error(&self.name, e.call, Some(e.code), format!("{}{hint}", sys::describe_errno(e.code)))
    }

    /// This side's slot and its waiting state.
    fn own_slot(&self, layout: &SlotLayout) -> Result<(Region, Arc<PeerState>), NetworkError> {
        let slot = Region::anonymous(layout.slot_bytes())
            .map_err(|e| error(&self.name, "mapping a slot", None, e.to_string()))?;
        let wake_self: OwnedFd = event_fd()
            .map_err(|e| error(&self.name, "eventfd", e.raw_os_error(), e.to_string()))?;
        let waiting_offset = layout.control_offset(WAITING);
        let sleeper = Some(Sleeper { slot: slot.clone(), waiting_offset });
        let num_receives = match self.signals {
            Signals::Atomics => 0,
            Signals::Messages => self.num_receives(layout),
        };
        let (health, arrivals) = (Health::default(), Arrivals::new(num_receives));
        let state = Arc::new(PeerState { health, wake_self, sleeper, arrivals });
        Ok((slot, state))
    }

    /// Number of queue pairs per peer.
    fn num_queue_pairs(&self) -> usize {
        (self.ports.len() * self.config.queue_pairs_per_port as usize).clamp(1, MAX_QUEUE_PAIRS)
    }

    /// Number of receives of every queue pair.
    fn num_receives(&self, layout: &SlotLayout) -> u32 {
        // A wake-up follows a flag. Between two checks of this side, the peer publishes at most as many frames as
        // exist, and returns at most as many. Both counts double for checks that are under way.
        let wake_ups = 4 * layout.num_frames() as u32;
        match self.signals {
            Signals::Atomics => wake_ups,
            // Half of them form the peer's window, and half of the window is for traffic that no frame bounds. The
            // rest holds, for each frame, two flags and one counted write for each queue pair beyond the first.
            Signals::Messages => {
                let most = u32::try_from(max_requests(&self.ports)).unwrap_or(MIN_RECEIVES);
                let num_queue_pairs = self.num_queue_pairs() as u32;
                let wanted =
                    (wake_ups * (1 + num_queue_pairs)).saturating_add(RECEIVES_BESIDE_WINDOW);
                wanted.clamp(NUM_RECEIVES, MAX_RECEIVES).min(most)
            }
        }
    }

    fn open_queue_pair(
        &self,
        port_idx: usize,
        domain: &Arc<ProtectionDomain>,
        (slot, own): (&Region, &Arc<PeerState>),
        layout: &SlotLayout,
        local: IpAddr,
    ) -> Result<OpenQueuePair, NetworkError> {
        let failed = |e: CallError| self.failed(&e);
        let (port, config) = (&self.ports[port_idx], &self.config);
        let (gid_index, gid) = port.address(config, local)?;
        let wanted = Capacity {
            sends: config.send_queue_depth,
            receives: self.num_receives(layout),
            inline_bytes: config.inline_bytes,
            signals: self.signals,
        };
        let max_entries = u32::try_from(port.context.attr().max_cqe).unwrap_or(u32::MAX);
        let room = self
            .progress
            .reserve(self.context_idx[port_idx], max_entries, wanted.num_completions())
            .map_err(failed)?;
        let rights = match self.signals {
            Signals::Atomics => Rights::All,
            Signals::Messages => Rights::Write,
        };
        let slot_key = MemoryRegion::of_region(domain, slot, rights).map_err(failed)?;
        let map = |bytes| {
            Region::anonymous(bytes)
                .map_err(|e| error(&self.name, "mapping memory", None, e.to_string()))
        };
        let scratch = map(SCRATCH_BYTES)?;
        let scratch_key =
            MemoryRegion::of_region(domain, &scratch, Rights::Local).map_err(failed)?;
        let queue_pair = QueuePair::new(domain, &room.queue, port, wanted).map_err(failed)?;
        queue_pair.initialise(port, config).map_err(failed)?;
        let messages = match self.signals {
            Signals::Atomics => None,
            Signals::Messages => {
                let memory = map(Messages::memory_bytes(wanted))?;
                Some(Messages::new(domain, memory, wanted).map_err(failed)?)
            }
        };
        let address = QueuePairAddress {
            number: queue_pair.number(),
            first_packet: rand::random::<u32>() & 0xff_ffff,
            remote_key: slot_key.remote_key(),
            lid: port.lid,
            mtu: port.mtu,
            num_responses: port.num_responses,
            gid,
            receives: wanted.receives,
            gid_index,
        };
        let state = Arc::new(QueuePairState::new(queue_pair, messages, Arc::clone(own)));
        let place = self.progress.enter(Arc::clone(&state)).map_err(failed)?;
        let queue_pair = OpenQueuePair {
            address,
            port_idx,
            reservation: PlaceReservation { place, progress: Some(Arc::clone(&self.progress)) },
            state,
            room,
            slot_key,
            scratch_key,
            scratch,
        };
        for idx in 0..wanted.receives {
            queue_pair.state.post_receive(place, idx).map_err(failed)?;
        }
        Ok(queue_pair)
    }
}

/// A queue pair before the peer's is known. Fields are dropped in declaration order.
#[derive(Debug)]
struct OpenQueuePair {
    address: QueuePairAddress,
    port_idx: usize,
    reservation: PlaceReservation,
    state: Arc<QueuePairState>,
    room: Room,
    slot_key: MemoryRegion,
    scratch_key: MemoryRegion,
    scratch: Region,
}

/// A place in the driver's table. Dropping it returns the place unless it was kept.
#[derive(Debug)]
struct PlaceReservation {
    place: Place,
    progress: Option<Arc<Progress>>,
}

impl PlaceReservation {
    fn keep(mut self) -> Place {
        self.progress = None;
        self.place
    }
}

impl Drop for PlaceReservation {
    fn drop(&mut self) {
        if let Some(progress) = &self.progress {
            progress.leave(self.place);
        }
    }
}

#[derive(Debug)]
struct VerbsSide {
    queue_pairs: Vec<OpenQueuePair>,
    slot: Region,
    own: Arc<PeerState>,
    shared: Arc<Shared>,
    route: Route,
}

impl OpenSide for VerbsSide {
    fn description(&self) -> SideDescription {
        let addresses: Vec<_> =
            self.queue_pairs.iter().map(|queue_pair| queue_pair.address).collect();
        SideDescription {
            address: self.slot.as_ptr().as_ptr() as u64,
            remote_key: addresses[0].remote_key.into(),
            bytes: self.slot.len() as u64,
            detail: detail::encode(self.shared.way(), &addresses),
        }
    }

    fn join(self: Box<Self>, peer: &SideDescription) -> Result<JoinedSide, NetworkError> {
        let Self { mut queue_pairs, slot, own, shared, route } = *self;
        let refuse = |detail: String| {
            error(&shared.name, "reading what the peer says of its side", None, detail)
        };
        let theirs =
            detail::decode(shared.way(), &peer.detail).map_err(|e| refuse(e.to_string()))?;
        let remote = remote_slot(peer, slot.len(), theirs[0].remote_key, route).map_err(&refuse)?;
        let receives = theirs.iter().map(|queue_pair| queue_pair.receives).min().unwrap_or(0);
        // Both sides compute the same number. The remaining queue pairs are dropped.
        queue_pairs.truncate(theirs.len());
        let mut joined = Vec::with_capacity(queue_pairs.len());
        for (queue_pair, theirs) in queue_pairs.into_iter().zip(&theirs) {
            let port = &shared.ports[queue_pair.port_idx];
            queue_pair
                .state
                .qp
                .join(port, &shared.config, &queue_pair.address, theirs)
                .map_err(|e| shared.join_failed(&e, &route))?;
            joined.push(SendQueue::new(SendQueueParts {
                state: queue_pair.state,
                place: queue_pair.reservation.keep(),
                progress: Arc::clone(&shared.progress),
                room: queue_pair.room,
                slot_key: queue_pair.slot_key,
                scratch_key: queue_pair.scratch_key,
                scratch: queue_pair.scratch,
                remote_key: theirs.remote_key,
                max_message_bytes: port.max_message_bytes.min(shared.config.max_message_bytes),
                limit: shared.config.stall_timeout(),
                keeps_fences: port.context.keeps_fences(),
            }));
        }
        let endpoint = VerbsEndpoint::new(
            joined,
            own,
            Arc::clone(&shared.progress),
            remote,
            shared.config.stripe_bytes.max(1),
            (shared.signals == Signals::Messages).then(|| window_of(receives)),
        );
        Ok(JoinedSide { endpoint: AnyEndpoint::Other(Box::new(endpoint)), slot })
    }
}

impl Shared {
    /// The properties that both sides must share.
    fn way(&self) -> (Link, Signals) {
        (self.ports[0].link, self.signals)
    }

    fn join_failed(&self, e: &CallError, route: &Route) -> NetworkError {
        let hint = match e.code {
            libc::ENETUNREACH | libc::EHOSTUNREACH | libc::ETIMEDOUT => {
                "; the peer's RDMA address has no route from this port"
            }
            libc::EINVAL => "; check pkey_index, gid_index and that both ports are of one fabric",
            _ => "",
        };
        let what = sys::describe_errno(e.code);
        let detail = format!("towards {}: {what}{hint}", route.remote);
        error(&self.name, e.call, Some(e.code), detail)
    }
}

/// The peer's slot, if its description is valid.
fn remote_slot(
    peer: &SideDescription,
    expected_bytes: usize,
    first_key: u32,
    route: Route,
) -> Result<RemoteSlot, String> {
    let SideDescription { address, remote_key, bytes, .. } = *peer;
    if bytes != expected_bytes as u64 {
        return Err(format!("a slot of {bytes} bytes, expected {expected_bytes}"));
    }
    if address == 0 || !address.is_multiple_of(8) || address.checked_add(bytes).is_none() {
        return Err(format!("a slot at {address:#x}, which cannot be"));
    }
    if remote_key != u64::from(first_key) {
        return Err(format!("two remote keys, {remote_key:#x} and {first_key:#x}, for one slot"));
    }
    Ok(RemoteSlot { address, bytes: expected_bytes, peer: route.remote.to_string() })
}

/// Checks that devices and settings support the endpoints.
pub(super) fn check(config: &VerbsConfig, name: &str, ports: &[Port]) -> Result<(), NetworkError> {
    let bad = |detail: String| Err(error(name, "checking the settings", None, detail));
    let most = max_requests(ports);
    let depth = config.send_queue_depth;
    if depth < MIN_QUEUE_DEPTH || i64::from(depth) > i64::from(most) {
        return bad(format!("send_queue_depth is {depth}, expected {MIN_QUEUE_DEPTH} to {most}"));
    }
    if config.queue_pairs_per_port == 0
        || ports.len() * config.queue_pairs_per_port as usize > MAX_QUEUE_PAIRS
    {
        return bad(format!(
            "{} ports with {} queue pairs each, expected 1 to {MAX_QUEUE_PAIRS} queue pairs in all",
            ports.len(),
            config.queue_pairs_per_port
        ));
    }
    if config.max_message_bytes < 4096 {
        return bad(format!(
            "max_message_bytes is {}, expected 4096 or more",
            config.max_message_bytes
        ));
    }
    for (setting, found, most) in [
        ("ack_timeout", config.ack_timeout, 31),
        ("retry_count", config.retry_count, 7),
        ("service_level", config.service_level, 15),
    ] {
        if found > most {
            return bad(format!("{setting} is {found}, expected at most {most}"));
        }
    }
    if config.ack_timeout == 0 {
        return bad("ack_timeout is 0, which would wait for ever; expected 1 to 31".to_owned());
    }
    if config.stall_timeout_ms == 0 {
        return bad(
            "stall_timeout_ms is 0, which no operation meets; expected 1 or more".to_owned()
        );
    }
    Ok(())
}

/// Selects how flags travel between slots of these ports.
fn choose_signals(
    config: &VerbsConfig,
    name: &str,
    ports: &[Port],
) -> Result<Signals, NetworkError> {
    let without = ports.iter().find(|port| !port.context.has_atomics()).map(Port::name);
    let environment = std::env::var(SIGNALS_VARIABLE).ok();
    let bad = |detail: String| error(name, "checking the settings", None, detail);
    let signals = messages::choose(config.signals, environment.as_deref(), without.as_deref());
    let signals = signals.map_err(bad)?;
    let (depth, most) = (config.send_queue_depth, max_requests(ports));
    if signals == Signals::Messages && i64::from(depth) >= i64::from(most) {
        // The driver needs one request for itself. That many receives also suffice, because the depth has a
        // minimum.
        return Err(bad(format!("send_queue_depth is {depth}, expected less than {most}")));
    }
    Ok(signals)
}

/// Number of requests that a queue pair may hold at every port.
fn max_requests(ports: &[Port]) -> i32 {
    ports.iter().map(|port| port.context.attr().max_qp_wr).min().unwrap_or(0)
}

/// Minimum and maximum number of receives if flags travel as messages, within the device's limits.
const NUM_RECEIVES: u32 = 128;
const MAX_RECEIVES: u32 = 4096;
/// Size of the memory that receives the old values of flags.
const SCRATCH_BYTES: usize = 4096;
const MIN_QUEUE_DEPTH: u32 = 16;
