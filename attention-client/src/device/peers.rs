//! The connections of a GPU client, and the tables that its kernels read.
//!
//! Kernels know a server by its *place*: an index below `max_servers` in the peer table. A link takes a free place
//! when it connects. The place of a link that ended is free once no call uses that link any more.

mod tables;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytemuck::Zeroable;
use kernels::abi::{MAX_PEERS, ServerPeer};
use p2p_core::WaitSet;

use super::lateness::Lateness;
use super::link::{AbortBit, LinkSlots};
use crate::error::ClientError;
use crate::fleet::command::Command;
use crate::fleet::lane_port::{Gate, LaneEvents, LanePort};
use crate::fleet::link::{Link, LinkEnd, LinkState, Server};
use crate::fleet::placement::Routing;
use crate::fleet::shared::Shared;
use crate::metrics::FailReason;

pub(super) use self::tables::Tables;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Peers {
    pub client_id: u64,
    pub routing: Arc<Routing>,
    shared: Arc<Shared>,
    abort: AbortWord,
    wait: WaitSet,
    places: Vec<Place>,
    events: Arc<LaneEvents>,
    seen_events: u64,
    /// True if the tables have changed since the last [`take_tables`](Self::take_tables).
    is_changed: bool,
    /// Servers (by uid) that found no place because calls still use those without a link. Cleared by
    /// [`take_rejected`](Self::take_rejected).
    rejected: Vec<u64>,
}

/// A connected server.
#[derive(Debug)]
pub(super) struct Peer {
    pub link: Box<Link>,
    pub slots: Arc<LinkSlots>,
}

/// A place in the peer table.
#[derive(Debug)]
struct Place {
    peer: Option<Peer>,
    /// Links so far, the current one included.
    num_links: u64,
    /// The current link as kernels see it, or the one before: earlier calls may still read its answers.
    entry: ServerPeer,
    /// Number of the last call that may use the link that ended here last.
    used_upto: u64,
    /// True if the kernels' counts for this place belong to an earlier link, and the slot is not ready for answers.
    is_fresh: bool,
    /// The server refused a frame: until then, other replicas come first.
    avoid_until: Option<Instant>,
    lateness: Lateness,
    /// Server of the link that ended here last, and the reason.
    last: Option<(Arc<Server>, FailReason)>,
}

impl Place {
    fn empty() -> Self {
        Self {
            peer: None,
            num_links: 0,
            entry: ServerPeer::zeroed(),
            used_upto: 0,
            is_fresh: false,
            avoid_until: None,
            lateness: Lateness::default(),
            last: None,
        }
    }

    /// Returns true if a new link may take the place. Calls up to `finished` are over.
    const fn is_free(&self, finished: u64) -> bool {
        self.peer.is_none() && self.used_upto <= finished
    }
}

impl Peers {
    /// Has the control task connect all servers, and waits until each was tried once, for `replica_wait` at most.
    /// `abort` is the word whose bits end the waits of kernels.
    pub fn connect(
        shared: &Arc<Shared>,
        max_servers: usize,
        abort: AbortWord,
    ) -> std::io::Result<Self> {
        let wait = WaitSet::new()?;
        let events = Arc::new(LaneEvents::new(wait.kicker()));
        let gate = Arc::new(Gate::closed());
        let client_id = rand::random::<u64>() & !0xffff;
        let port =
            LanePort { id: 0, client_id, events: Arc::clone(&events), gate: Arc::clone(&gate) };
        // Fails only when the control task is gone. Then no server is ever live.
        let _ = shared.commands.send(Command::AddLane(port));
        gate.wait_open(&wait, shared.settings.replica_wait, &|| false)?;
        Ok(Self {
            client_id,
            routing: shared.routing.load_full(),
            shared: Arc::clone(shared),
            abort,
            wait,
            places: (0..max_servers).map(|_| Place::empty()).collect(),
            events,
            // Differs from any count, so that the first `sync` reads everything.
            seen_events: u64::MAX,
            is_changed: true,
            rejected: Vec::new(),
        })
    }

    /// Number of events that [`sync`](Self::sync) has handled.
    pub const fn seen_events(&self) -> u64 {
        self.seen_events
    }

    /// Applies new placements, new links and closed connections, if there was an event. Calls up to `finished` are
    /// over; `last` is the newest call.
    pub fn sync(&mut self, finished: u64, last: u64) {
        self.end_avoidance();
        let count = self.events.count();
        let is_down = |peer: &Peer| peer.link.state.down().is_some();
        if count == self.seen_events && !self.peers().any(is_down) {
            return;
        }
        self.seen_events = count;
        let newest = self.shared.routing.load();
        if !Arc::ptr_eq(&newest, &self.routing) {
            self.routing = Arc::clone(&newest);
            self.is_changed = true;
        }
        drop(newest);
        for idx in 0..self.places.len() {
            let peer = self.places[idx].peer.as_ref();
            if let Some(down) = peer.and_then(|peer| peer.link.state.down()) {
                self.fail(idx, down.reason(), last);
            }
        }
        let routing = Arc::clone(&self.routing);
        for server in &routing.servers {
            if let Some(link) = server.mailboxes[0].pop() {
                self.install(link, finished, last);
            }
        }
    }

    fn install(&mut self, link: Box<Link>, finished: u64, last: u64) {
        let is_same = |place: &Place| {
            place.peer.as_ref().is_some_and(|peer| peer.link.server.idx == link.server.idx)
        };
        if let Some(idx) = self.places.iter().position(is_same) {
            self.fail(idx, FailReason::Closed, last);
        }
        self.rejected.retain(|uid| *uid != link.server.uid);
        let Some(slots) = LinkSlots::of(&link) else {
            link.server.note_error("connected without slots in GPU memory");
            return link.retire(FailReason::Left);
        };
        let Some(idx) = self.places.iter().position(|place| place.is_free(finished)) else {
            return self.reject(link);
        };
        let bit = AbortBit { word: Arc::clone(&self.abort), bit: idx as u32 };
        // No kernel waits for the link that ended here last.
        bit.clear();
        slots.abort_by(bit, &link.state);
        let place = &mut self.places[idx];
        place.peer = Some(Peer { link, slots });
        place.num_links += 1;
        place.is_fresh = true;
        place.avoid_until = None;
        place.lateness = Lateness::default();
        self.is_changed = true;
    }

    /// Returns a link that finds no place to its connector.
    fn reject(&mut self, link: Box<Link>) {
        let num_places = self.places.len();
        let is_full = self.places.iter().all(|place| place.peer.is_some());
        if !is_full {
            let routing = &self.routing;
            self.rejected.retain(|uid| routing.servers.iter().any(|s| s.uid == *uid));
            self.rejected.push(link.server.uid);
        }
        let detail = match is_full {
            true => format!("all {num_places} places for servers are taken: raise max_servers"),
            false => "outstanding calls still use the place of an earlier server".to_owned(),
        };
        tracing::warn!(server = link.server.name(), detail, "a server is not used");
        link.server.note_error(detail);
        match is_full {
            true => link.reject(*self.shared.places_freed.borrow()),
            // The connector connects again after a pause; the calls may be over by then.
            false => link.retire(FailReason::Left),
        }
    }

    /// Removes a server and ends its connection. Its slots are freed when no call uses them, on another thread.
    /// `last` is the newest call.
    pub fn fail(&mut self, idx: usize, reason: FailReason, last: u64) {
        let Some(place) = self.places.get_mut(idx) else { return };
        let Some(Peer { link, slots }) = place.peer.take() else { return };
        place.used_upto = last;
        place.last = Some((Arc::clone(&link.server), reason));
        self.is_changed = true;
        let num_calls = link.state.in_flight.load(Ordering::SeqCst);
        if num_calls > 0 {
            self.shared.metrics.count_failover(reason);
            tracing::warn!(
                server = link.server.name(),
                place = idx,
                generation = link.generation,
                calls = num_calls,
                reason = reason.name(),
                "a server failed with calls outstanding: resending its tokens to replicas"
            );
        }
        let detail = match reason {
            FailReason::Silent => Some("silent for the deadline"),
            FailReason::Stuck => Some("works but gave no answer within the work limit"),
            _ => None,
        };
        if let Some(detail) = detail {
            link.server.is_silent.store(true, Ordering::Relaxed);
            link.server.note_error(detail);
        }
        // Ends the waits of outstanding calls for this server.
        link.state.set_down(match reason {
            FailReason::Left => LinkEnd::Left,
            _ => LinkEnd::Closed,
        });
        slots.leave_place();
        link.retire(reason);
        self.shared.places_freed.send_modify(|freed| *freed += 1);
    }

    /// Prefers other replicas until `until`.
    pub fn avoid(&mut self, idx: usize, until: Instant) {
        self.places[idx].avoid_until = Some(until);
        self.is_changed = true;
    }

    /// Notes that the server in this place was late. Returns the time for which other replicas come first, if that
    /// begins now.
    pub fn note_late(&mut self, idx: usize) -> Option<Duration> {
        let pause = self.places.get_mut(idx)?.lateness.late()?;
        self.avoid(idx, Instant::now() + pause);
        Some(pause)
    }

    /// Returns true if a server was late, and has not recovered since.
    pub fn has_late(&self) -> bool {
        self.places.iter().any(|place| place.lateness.is_late())
    }

    /// Notes that the servers of mask `places` were not late.
    pub fn note_timely(&mut self, places: u32) {
        for idx in bits(places) {
            if let Some(place) = self.places.get_mut(idx) {
                place.lateness.timely();
            }
        }
    }

    fn end_avoidance(&mut self) {
        for place in &mut self.places {
            if place.avoid_until.is_some_and(|until| until <= Instant::now()) {
                place.avoid_until = None;
                self.is_changed = true;
            }
        }
    }

    /// Returns true if there is a live link to `server`.
    pub fn has(&self, server: &Server) -> bool {
        let mut links = self.peers().map(|peer| &peer.link);
        links.any(|link| link.server.uid == server.uid && link.state.down().is_none())
    }

    /// The first (MoE layer, expert) without a live replica.
    pub fn first_unreachable(&self) -> Option<(usize, u32)> {
        let (model, routing) = (&self.shared.model, &self.routing);
        let live = |&rank: &u32| self.has(&routing.servers[rank as usize]);
        (0..model.moe_layers.len())
            .flat_map(|layer_idx| (0..model.shape.num_experts).map(move |e| (layer_idx, e)))
            .find(|&(layer_idx, e)| !routing.replicas(layer_idx, e).iter().any(live))
    }

    /// The error of a call that waited for a replica of an expert.
    pub fn no_replica(&self, layer_idx: usize, expert: u32, waited: Duration) -> ClientError {
        ClientError::NoReplica {
            layer: self.shared.model.moe_layers[layer_idx],
            expert,
            waited,
            detail: self.routing.describe_replicas(layer_idx, expert),
        }
    }

    /// The first MoE layer in which `expert` has no live replica.
    pub fn first_orphan(&self, expert: u32) -> Option<usize> {
        let routing = &self.routing;
        let live = |&rank: &u32| self.has(&routing.servers[rank as usize]);
        (0..routing.num_layers()).find(|&idx| !routing.replicas(idx, expert).iter().any(live))
    }

    /// Counts a call at every live server and lists their links in `uses`. Returns false, and counts nothing, when a
    /// link has just ended: call [`sync`](Self::sync) first.
    pub fn enter(&self, uses: &mut Vec<LinkUse>) -> bool {
        uses.clear();
        for peer in self.peers() {
            if !peer.link.state.enter() {
                uses.drain(..).for_each(LinkUse::exit);
                return false;
            }
            let state = Arc::clone(&peer.link.state);
            uses.push(LinkUse { state, slots: Arc::clone(&peer.slots) });
        }
        true
    }

    fn peers(&self) -> impl Iterator<Item = &Peer> {
        self.places.iter().filter_map(|place| place.peer.as_ref())
    }

    pub fn peer(&self, idx: usize) -> Option<&Peer> {
        self.places.get(idx)?.peer.as_ref()
    }

    /// The server in this place, if it has been there since `tables` were made.
    pub fn peer_of(&self, idx: usize, tables: &Tables) -> Option<&Peer> {
        let place = self.places.get(idx)?;
        (place.num_links == tables.link_numbers[idx]).then_some(place.peer.as_ref()).flatten()
    }

    /// Returns true if, since the last call of this function, a server found no place because calls still use
    /// those without a link.
    pub fn take_rejected(&mut self) -> bool {
        !std::mem::take(&mut self.rejected).is_empty()
    }

    /// Returns true if a replica of `expert` was rejected in that way, and still finds no place. Calls up to
    /// `finished` are over.
    pub fn is_rejected(&self, layer_idx: usize, expert: u32, finished: u64) -> bool {
        let routing = &self.routing;
        let was_rejected =
            |&rank: &u32| self.rejected.contains(&routing.servers[rank as usize].uid);
        self.places.iter().any(|place| place.peer.is_none())
            && !self.places.iter().any(|place| place.is_free(finished))
            && routing.replicas(layer_idx, expert).iter().any(was_rejected)
    }

    /// Name of the server in this place or, if its link ended, of the last one there.
    pub fn server_name(&self, idx: usize) -> Option<&str> {
        let last = || Some(self.places.get(idx)?.last.as_ref()?.0.name());
        self.peer(idx).map(|peer| peer.link.server.name()).or_else(last)
    }

    /// Notes that the servers of mask `places` answered a call that used `tables`.
    pub fn note_carried(&self, places: u32, tables: &Tables) {
        let answered = |idx: &usize| places >> idx & 1 != 0;
        let places = (0..self.places.len()).filter(answered);
        for peer in places.filter_map(|idx| self.peer_of(idx, tables)) {
            peer.link.state.note_carried();
        }
    }

    /// Why the server in this place did not answer, as far as its link shows; otherwise `otherwise`.
    pub fn why_unanswered(&self, idx: usize, otherwise: FailReason) -> FailReason {
        let Some(peer) = self.peer(idx) else {
            let last = self.places.get(idx).and_then(|place| place.last.as_ref());
            return last.map_or(FailReason::Closed, |(_, reason)| *reason);
        };
        if let Some(down) = peer.link.state.down() {
            return down.reason();
        }
        if peer.slots.has_failed() { FailReason::Transport } else { otherwise }
    }

    /// Blocks until there is an event, for `limit` or 20 ms at most.
    pub fn wait_for_events(&self, limit: Duration) -> Result<(), ClientError> {
        if self.events.count() != self.seen_events {
            return Ok(());
        }
        let waited = self.wait.block(limit.min(POLL));
        waited.map_err(|source| ClientError::System { op: "wait for servers", source })
    }

    /// Closes every connection.
    pub fn close(&mut self) {
        // All waits end first: the memory of one server can be freed only when kernels wait for no other.
        for peer in self.peers() {
            peer.link.state.set_down(LinkEnd::Left);
        }
        for Peer { link, slots } in self.places.iter_mut().filter_map(|place| place.peer.take()) {
            slots.leave_place();
            link.retire(FailReason::Left);
        }
    }
}

/// A call's use of a link. Slots of a link that is down live until their last use ends.
#[derive(Debug)]
pub(super) struct LinkUse {
    state: Arc<LinkState>,
    slots: Arc<LinkSlots>,
}

impl LinkUse {
    /// Ends the use: the call's kernels have ended.
    pub fn exit(self) {
        self.state.exit();
        drop(self.slots.take_if_unused(&self.state));
    }
}

/// Indices of the set bits of a mask of places.
pub(super) fn bits(mask: u32) -> impl Iterator<Item = usize> {
    (0..MAX_PEERS).filter(move |idx| mask >> idx & 1 != 0)
}

/// The word of host memory whose bits end the waits of kernels.
pub(super) type AbortWord = Arc<kernels::gpu::GpuBuffer>;

/// How often a waiter checks on its own, in case a wake-up is lost.
const POLL: Duration = Duration::from_millis(20);
