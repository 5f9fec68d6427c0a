//! The connections of a device client, and the tables that its kernels go by.
//!
//! A link takes a *seat*: an index below the number of servers, by which kernels know it. A seat is taken
//! again only when no call uses its last occupant any more.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytemuck::Zeroable;
use kernels::abi::{MAX_PEERS, MAX_REPLICAS, Placement, ServerPeer};
use kernels::slots::RemoteSlots;
use p2p_core::WaitSet;

use crate::client::connector::{Gate, LanePort};
use crate::client::control::Command;
use crate::client::link::{AbortBit, Down, LaneNews, Link, LinkState, PairCell};
use crate::client::shared::Shared;
use crate::metrics::FailReason;
use crate::placement::{Routing, Server};

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Lane {
    pub client_id: u64,
    pub wait: WaitSet,
    pub routing: Arc<Routing>,
    seats: Vec<Seat>,
    news: Arc<LaneNews>,
    seen_news: u64,
    /// Whether tables made before are out of date.
    is_changed: bool,
    /// Servers that were turned away because calls still use the seats that have no link, since that was asked
    /// last.
    turned_away: Vec<u64>,
}

#[derive(Debug)]
struct Seat {
    link: Option<Box<Link>>,
    /// Links so far, this one included.
    num_links: u64,
    /// As kernels see it, or its last occupant: calls sent before may still have to read that one's answers.
    peer: ServerPeer,
    /// Number of the last call that may use the last occupant.
    used_upto: u64,
    /// Whether the kernels' counts for this seat are somebody else's, and the slot is not ready for answers.
    is_fresh: bool,
    /// The server refused something: others are asked first until then.
    avoid_until: Option<Instant>,
    /// Whose link ended here last, and why.
    last: Option<(Arc<Server>, FailReason)>,
}

/// Tables as the kernels of a call see them.
#[derive(Debug)]
pub(super) struct Tables {
    /// By MoE layer.
    pub placements: Vec<Placement>,
    pub servers: [ServerPeer; MAX_PEERS],
    /// Which link of its seat each of them is.
    pub link_numbers: [u64; MAX_PEERS],
    /// Experts without a live replica, by MoE layer.
    pub num_orphans: Vec<u32>,
    pub epoch: u64,
}

impl Tables {
    pub fn empty(num_layers: usize) -> Self {
        Self {
            placements: vec![Placement::zeroed(); num_layers],
            servers: [ServerPeer::zeroed(); MAX_PEERS],
            link_numbers: [0; MAX_PEERS],
            num_orphans: vec![0; num_layers],
            epoch: 0,
        }
    }
}

impl Seat {
    fn empty() -> Self {
        Self {
            link: None,
            num_links: 0,
            peer: ServerPeer::zeroed(),
            used_upto: 0,
            is_fresh: false,
            avoid_until: None,
            last: None,
        }
    }

    /// Calls up to `finished` are over.
    const fn is_free(&self, finished: u64) -> bool {
        self.link.is_none() && self.used_upto <= finished
    }
}

impl Lane {
    /// A lane that the control task connects, after every server was tried once.
    pub fn connect(shared: &Shared, max_servers: usize) -> std::io::Result<Self> {
        let wait = WaitSet::new()?;
        let news = Arc::new(LaneNews::new(wait.kicker()));
        let gate = Arc::new(Gate::closed());
        let client_id = rand::random::<u64>() & !0xffff;
        let port = LanePort { id: 0, client_id, news: Arc::clone(&news), gate: Arc::clone(&gate) };
        // Fails only when the control task is gone; then no server is ever live.
        let _ = shared.commands.send(Command::AddLane(port));
        gate.wait_open(&wait, shared.settings.replica_wait)?;
        Ok(Self {
            client_id,
            wait,
            routing: shared.routing.load_full(),
            seats: (0..max_servers).map(|_| Seat::empty()).collect(),
            news,
            // Differs from the count, so that the first look takes in what is there.
            seen_news: u64::MAX,
            is_changed: true,
            turned_away: Vec::new(),
        })
    }

    /// How many announcements [`sync`](Self::sync) has taken in.
    pub const fn seen_news(&self) -> u64 {
        self.seen_news
    }

    /// Takes in new placements, new links and broken connections, if any were announced. Calls up to
    /// `finished` are over; `last` is the newest.
    pub fn sync(&mut self, shared: &Shared, finished: u64, last: u64, abort: &AbortWord) {
        self.end_avoidance();
        let count = self.news.count();
        let is_down = |link: &Link| link.state.down().is_some();
        if count == self.seen_news && !self.links().any(is_down) {
            return;
        }
        self.seen_news = count;
        let newest = shared.routing.load();
        if !Arc::ptr_eq(&newest, &self.routing) {
            self.routing = Arc::clone(&newest);
            self.is_changed = true;
        }
        drop(newest);
        for idx in 0..self.seats.len() {
            let down = self.seats[idx].link.as_ref().and_then(|link| link.state.down());
            if let Some(down) = down {
                self.fail(idx, down.reason(), last, shared);
            }
        }
        let routing = Arc::clone(&self.routing);
        for server in &routing.servers {
            if let Some(link) = server.mailboxes[0].pop() {
                self.install(link, finished, last, shared, abort);
            }
        }
    }

    fn install(
        &mut self,
        link: Box<Link>,
        finished: u64,
        last: u64,
        shared: &Shared,
        abort: &AbortWord,
    ) {
        let same =
            |seat: &Seat| seat.link.as_ref().is_some_and(|l| l.server.idx == link.server.idx);
        if let Some(idx) = self.seats.iter().position(same) {
            self.fail(idx, FailReason::Closed, last, shared);
        }
        self.turned_away.retain(|uid| *uid != link.server.uid);
        let Some(idx) = self.seats.iter().position(|seat| seat.is_free(finished)) else {
            let num_seats = self.seats.len();
            let is_full = self.seats.iter().all(|seat| seat.link.is_some());
            if !is_full {
                let routing = &self.routing;
                self.turned_away.retain(|uid| routing.servers.iter().any(|s| s.uid == *uid));
                self.turned_away.push(link.server.uid);
            }
            let detail = match is_full {
                true => format!("all {num_seats} places for servers are taken: raise max_servers"),
                // It is connected again, by when the calls are over.
                false => "calls under way still use the place of its predecessor".to_owned(),
            };
            tracing::warn!(server = link.server.name(), detail, "a server is not used");
            link.server.note_error(detail);
            match is_full {
                true => link.turn_away(*shared.places_freed.borrow()),
                false => link.retire(FailReason::Left),
            }
            return;
        };
        let bit = AbortBit { word: Arc::clone(abort), bit: idx as u32 };
        // Nobody waits for this seat's last occupant any more.
        bit.clear();
        link.state.abort_by(bit);
        self.seats[idx].link = Some(link);
        self.seats[idx].num_links += 1;
        self.seats[idx].is_fresh = true;
        self.seats[idx].avoid_until = None;
        self.is_changed = true;
    }

    /// Takes a server out. Its connection ends; its slots go when no call uses them, and not by this thread.
    pub fn fail(&mut self, idx: usize, reason: FailReason, last: u64, shared: &Shared) {
        let Some(seat) = self.seats.get_mut(idx) else { return };
        let Some(link) = seat.link.take() else { return };
        seat.used_upto = last;
        seat.last = Some((Arc::clone(&link.server), reason));
        self.is_changed = true;
        let num_calls = link.state.in_flight.load(Ordering::SeqCst);
        if num_calls > 0 {
            shared.metrics.count_failover(reason);
            tracing::warn!(
                server = link.server.name(),
                slot = idx,
                generation = link.generation,
                calls = num_calls,
                reason = reason.name(),
                "a server failed with calls outstanding; its tokens go to replicas"
            );
        }
        let told = match reason {
            FailReason::Silent => Some("silent for the deadline"),
            FailReason::Stuck => Some("works but gave no answer within the work limit"),
            _ => None,
        };
        if let Some(told) = told {
            link.server.silenced.store(true, Ordering::Relaxed);
            link.server.note_error(told);
        }
        // Waits for it end, in calls that are still under way, and in the connection's books.
        link.state.set_down(match reason {
            FailReason::Left => Down::Left,
            _ => Down::Closed,
        });
        link.state.leave_seat();
        link.retire(reason);
        shared.places_freed.send_modify(|freed| *freed += 1);
    }

    /// Lets other replicas be asked first until `until`.
    pub fn avoid(&mut self, idx: usize, until: Instant) {
        self.seats[idx].avoid_until = Some(until);
        self.is_changed = true;
    }

    fn end_avoidance(&mut self) {
        for seat in &mut self.seats {
            if seat.avoid_until.is_some_and(|until| until <= Instant::now()) {
                seat.avoid_until = None;
                self.is_changed = true;
            }
        }
    }

    /// Whether there is a live link to `server`.
    pub fn has(&self, server: &Server) -> bool {
        self.links().any(|link| link.server.uid == server.uid && link.state.down().is_none())
    }

    /// The first MoE layer in which no live server has `expert`.
    pub fn first_orphan(&self, expert: u32) -> Option<usize> {
        let routing = &self.routing;
        let live = |&rank: &u32| self.has(&routing.servers[rank as usize]);
        (0..routing.num_layers()).find(|&idx| !routing.replicas(idx, expert).iter().any(live))
    }

    /// Counts a call in at every live server. `false` when one has just ended: look at the news first.
    pub fn enter(&self, used: &mut Vec<Used>) -> bool {
        used.clear();
        for link in self.links() {
            let Some(device) = &link.device else { continue };
            if !link.state.enter() {
                used.drain(..).for_each(Used::exit);
                return false;
            }
            used.push(Used { state: Arc::clone(&link.state), device: Arc::clone(device) });
        }
        true
    }

    pub fn links(&self) -> impl Iterator<Item = &Link> {
        self.seats.iter().filter_map(|seat| seat.link.as_deref())
    }

    pub fn link(&self, idx: usize) -> Option<&Link> {
        self.seats.get(idx)?.link.as_deref()
    }

    /// The link in this seat, if it is the one that was there when `tables` were made.
    pub fn link_of(&self, idx: usize, tables: &Tables) -> Option<&Link> {
        let seat = self.seats.get(idx)?;
        (seat.num_links == tables.link_numbers[idx]).then_some(seat.link.as_deref()).flatten()
    }

    /// Whether a server was turned away since this was asked last because calls still use the seats that have no
    /// link.
    pub fn take_cramped(&mut self) -> bool {
        !std::mem::take(&mut self.turned_away).is_empty()
    }

    /// Whether that happened to a replica of `expert`, and there is no seat for it yet. Calls up to `finished`
    /// are over.
    pub fn is_cramped(&self, layer_idx: usize, expert: u32, finished: u64) -> bool {
        let routing = &self.routing;
        let was_turned_away =
            |&rank: &u32| self.turned_away.contains(&routing.servers[rank as usize].uid);
        self.seats.iter().any(|seat| seat.link.is_none())
            && !self.seats.iter().any(|seat| seat.is_free(finished))
            && routing.replicas(layer_idx, expert).iter().any(was_turned_away)
    }

    /// Name of the server in this seat or, when it was taken out, of the last that was there.
    pub fn server_name(&self, idx: usize) -> Option<&str> {
        let last = || Some(self.seats.get(idx)?.last.as_ref()?.0.name());
        self.link(idx).map(|link| link.server.name()).or_else(last)
    }

    /// Servers in these seats answered a call that went by `tables`.
    pub fn note_carried(&self, seats: u32, tables: &Tables) {
        let answered = |idx: &usize| seats >> idx & 1 != 0;
        let seats = (0..self.seats.len()).filter(answered);
        for link in seats.filter_map(|idx| self.link_of(idx, tables)) {
            link.state.note_carried();
        }
    }

    /// Why the server in this seat did not answer, as far as its link tells, else `otherwise`.
    pub fn why_unanswered(&self, idx: usize, otherwise: FailReason) -> FailReason {
        let Some(link) = self.link(idx) else {
            let last = self.seats.get(idx).and_then(|seat| seat.last.as_ref());
            return last.map_or(FailReason::Closed, |(_, reason)| *reason);
        };
        if let Some(down) = link.state.down() {
            return down.reason();
        }
        let pair = link.device.as_ref().map(|cell| cell.lock());
        let remote = pair.as_ref().and_then(|pair| pair.as_ref()?.as_remote());
        match remote.map(RemoteSlots::health) {
            Some(Err(_)) => FailReason::Transport,
            _ => otherwise,
        }
    }

    /// Whether there are tables to take.
    pub const fn has_changed(&self) -> bool {
        self.is_changed
    }

    /// The tables that were taken did not get to the device: these seats' counts have yet to begin.
    pub fn put_back(&mut self, fresh: u32) {
        self.is_changed = true;
        for (idx, seat) in self.seats.iter_mut().enumerate() {
            seat.is_fresh |= fresh >> idx & 1 != 0;
        }
    }

    /// Tables anew, if something has changed since the last time, and the seats whose counts must begin
    /// at zero.
    pub fn take_tables(&mut self, num_experts: u32) -> Option<(Tables, u32)> {
        if !std::mem::take(&mut self.is_changed) {
            return None;
        }
        let mut servers = [ServerPeer::zeroed(); MAX_PEERS];
        let mut link_numbers = [0; MAX_PEERS];
        let mut seat_of: Vec<Option<(u8, u64)>> = Vec::new();
        let (mut fresh, mut avoided) = (0, 0u32);
        for (idx, seat) in self.seats.iter_mut().enumerate() {
            (servers[idx], link_numbers[idx]) = (seat.peer, seat.num_links);
            let Some(link) = seat.link.as_deref() else { continue };
            let pair = link.device.as_ref().map(|cell| cell.lock());
            let Some(pair) = pair.as_ref().and_then(|pair| pair.as_ref()) else { continue };
            seat.peer = ServerPeer {
                request: pair.link(),
                response: pair.own(),
                generation: link.generation,
                reserved: 0,
            };
            servers[idx] = seat.peer;
            if std::mem::take(&mut seat.is_fresh) {
                fresh |= 1 << idx;
            }
            avoided |= u32::from(seat.avoid_until.is_some()) << idx;
            if seat_of.len() <= link.server.idx {
                seat_of.resize(link.server.idx + 1, None);
            }
            seat_of[link.server.idx] = Some((idx as u8, link.server.uid));
        }
        let routing = &self.routing;
        let num_layers = routing.num_layers();
        let mut tables = Tables {
            placements: vec![Placement::zeroed(); num_layers],
            servers,
            link_numbers,
            num_orphans: vec![0; num_layers],
            epoch: routing.epoch,
        };
        for (layer_idx, placement) in tables.placements.iter_mut().enumerate() {
            placement.epoch = routing.epoch;
            placement.num_experts = num_experts;
            for (expert, set) in (0..num_experts).zip(&mut placement.experts) {
                let seats = routing.replicas(layer_idx, expert).iter().filter_map(|&rank| {
                    let server = &routing.servers[rank as usize];
                    let (idx, uid) = (*seat_of.get(server.idx)?)?;
                    (uid == server.uid).then_some(idx)
                });
                for seat in seats.take(MAX_REPLICAS) {
                    set.server[usize::from(set.num_replicas)] = seat;
                    set.num_replicas += 1;
                }
                let found = usize::from(set.num_replicas);
                let is_avoided = |seat: &u8| avoided >> seat & 1 != 0;
                if avoided != 0 && !set.server[..found].iter().all(is_avoided) {
                    let mut kept = 0;
                    for at in 0..found {
                        let seat = set.server[at];
                        if !is_avoided(&seat) {
                            set.server[kept] = seat;
                            kept += 1;
                        }
                    }
                    set.num_replicas = kept as u8;
                }
                tables.num_orphans[layer_idx] += u32::from(set.num_replicas == 0);
            }
        }
        Some((tables, fresh))
    }

    /// Sleeps until something is announced, `limit` at most.
    pub fn wait_for_news(&self, limit: Duration) -> std::io::Result<()> {
        if self.news.count() != self.seen_news {
            return Ok(());
        }
        self.wait.block(limit.min(POLL))
    }

    /// Lets every connection go.
    pub fn close(&mut self) {
        // First the waits for all of them end: the memory of one may go only when kernels wait for no other.
        for link in self.links() {
            link.state.set_down(Down::Left);
        }
        for link in self.seats.iter_mut().filter_map(|seat| seat.link.take()) {
            link.state.leave_seat();
            link.retire(FailReason::Left);
        }
    }
}

/// A link that a call uses.
#[derive(Debug)]
pub(super) struct Used {
    state: Arc<LinkState>,
    device: Arc<PairCell>,
}

impl Used {
    /// The call's kernels have ended: slots that only waited for that go now.
    pub fn exit(self) {
        self.state.exit();
        drop(self.device.take_if_unused(&self.state));
    }
}

/// The word of host memory whose bits end waits.
pub(super) type AbortWord = Arc<kernels::gpu::GpuBuffer>;

/// How often a waiter looks by itself, should an announcement be lost.
const POLL: Duration = Duration::from_millis(20);
