//! The peers of a fabric: what is under way towards each, and what became of it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::detail::LaneAddress;
use super::progress::{LaneState, OpKind, PeerState, Place, Progress, Room};
use super::status::Cause;
use crate::endpoint::PostError;
use crate::fabric::{Completion, PeerId, Token};

/// Peers by number. A number of one that has gone is known as such: its place is used again under
/// another generation, and given up when those run out.
#[derive(Debug, Default)]
pub(super) struct Peers {
    places: Vec<PeerPlace>,
    free: VecDeque<u32>,
    /// Places of peers that may have something to report, each at most once.
    active: Vec<u32>,
}

#[derive(Debug, Default)]
struct PeerPlace {
    generation: u32,
    peer: Option<Peer>,
}

/// A peer, joined or about to be.
#[derive(Debug)]
pub(super) struct Peer {
    /// Gone once the peer has failed. Before the state below, which it uses.
    pub(super) lane: Option<FabricLane>,
    pub(super) own: LaneAddress,
    pub(super) state: Arc<PeerState>,
    pub(super) name: String,
    pub(super) is_joined: bool,
    posted: u64,
    under_way: VecDeque<Request>,
    is_active: bool,
    /// Requests completed when the clock was last looked at, and since when it has been that many.
    watched: Option<(u64, Instant)>,
    /// The request that failed.
    failed: Option<Request>,
}

/// Fields are dropped in this order: out of the driver's table, the queue pair, its room.
#[derive(Debug)]
pub(super) struct FabricLane {
    pub(super) place: LeavingPlace,
    pub(super) state: Arc<LaneState>,
    pub(super) _room: Room,
}

/// A place in the driver's table, given back when dropped.
#[derive(Debug)]
pub(super) struct LeavingPlace {
    pub(super) place: Place,
    pub(super) progress: Arc<Progress>,
}

impl Drop for LeavingPlace {
    fn drop(&mut self) {
        self.progress.leave(self.place);
    }
}

/// An operation under way.
#[derive(Debug, Clone, Copy)]
pub(super) struct Request {
    pub(super) token: Token,
    pub(super) kind: OpKind,
    pub(super) remote_address: u64,
    pub(super) remote_key: u32,
    pub(super) bytes: u32,
}

impl Peers {
    /// A number for `peer`. `None` when there are as many as can be told apart.
    pub(super) fn insert(&mut self, peer: Peer) -> Option<PeerId> {
        let idx = match self.free.pop_front() {
            Some(idx) => idx,
            None if self.places.len() < MAX_PEERS => {
                self.places.push(PeerPlace::default());
                self.places.len() as u32 - 1
            }
            None => return None,
        };
        let place = &mut self.places[idx as usize];
        place.peer = Some(peer);
        Some(PeerId(place.generation << IDX_BITS | idx))
    }

    pub(super) fn get_mut(&mut self, id: PeerId) -> Option<&mut Peer> {
        let place = self.places.get_mut((id.0 & IDX_MASK) as usize)?;
        if place.generation == id.0 >> IDX_BITS { place.peer.as_mut() } else { None }
    }

    /// Takes a peer out.
    pub(super) fn remove(&mut self, id: PeerId) -> Option<Peer> {
        let idx = id.0 & IDX_MASK;
        self.get_mut(id)?;
        let place = self.places.get_mut(idx as usize)?;
        let peer = place.peer.take()?;
        place.generation += 1;
        if place.generation <= MAX_GENERATION {
            self.free.push_back(idx);
        }
        if peer.is_active {
            self.active.retain(|active| *active != idx);
        }
        Some(peer)
    }

    /// Notes a request that was posted to a peer that there is.
    pub(super) fn posted(&mut self, id: PeerId, request: Request) {
        let Some(peer) = self.get_mut(id) else { return };
        peer.posted += 1;
        peer.under_way.push_back(request);
        if !peer.is_active {
            (peer.is_active, peer.watched) = (true, None);
            self.active.push(id.0 & IDX_MASK);
        }
    }

    pub(super) const fn has_active(&self) -> bool {
        !self.active.is_empty()
    }

    /// Whether any peer has something to report.
    pub(super) fn has_news(&self) -> bool {
        let news = |idx: &u32| self.places[*idx as usize].peer.as_ref().is_none_or(Peer::has_news);
        self.active.iter().any(news)
    }

    /// Appends what completed, and after a failure everything.
    pub(super) fn report(&mut self, out: &mut Vec<Completion>) {
        let Self { places, active, .. } = self;
        active.retain(|idx| {
            let Some(peer) = places[*idx as usize].peer.as_mut() else { return false };
            peer.report(out);
            peer.is_active = !peer.under_way.is_empty();
            peer.is_active
        });
    }

    /// Fails the peers towards which nothing has completed for `limit` although something is under way: not
    /// every device notices by itself, or soon, that another one is gone.
    pub(super) fn fail_stalled(&mut self, now: Instant, limit: Duration) {
        let Self { places, active, .. } = self;
        for idx in active.iter() {
            let Some(peer) = places[*idx as usize].peer.as_mut() else { continue };
            let completed = peer.completed();
            match peer.watched {
                Some((seen, since)) if seen == completed => {
                    let Some(oldest) = peer.under_way.front().filter(|_| now - since >= limit)
                    else {
                        continue;
                    };
                    let cause = Cause::Late { limit_ms: limit.as_millis() as u64 };
                    peer.state.health.fail(oldest.kind.name(), cause);
                }
                _ => peer.watched = Some((completed, now)),
            }
        }
    }
}

impl Peer {
    pub(super) fn new(
        lane: FabricLane,
        own: LaneAddress,
        state: Arc<PeerState>,
        name: String,
        depth: usize,
    ) -> Self {
        Self {
            lane: Some(lane),
            own,
            state,
            name,
            is_joined: false,
            posted: 0,
            under_way: VecDeque::with_capacity(depth),
            is_active: false,
            watched: None,
            failed: None,
        }
    }

    /// Number of the next request.
    pub(super) const fn next_sequence(&self) -> u64 {
        self.posted + 1
    }

    /// Requests under way.
    pub(super) fn num_under_way(&self) -> usize {
        self.under_way.len()
    }

    /// The peer's failure, if there was one.
    pub(super) fn check(&self) -> Result<(), PostError> {
        self.state.health.check(|| match self.failed {
            None => self.name.clone(),
            Some(Request { remote_address, remote_key, bytes, .. }) => format!(
                "{}, {bytes} bytes at {remote_address:#x} with key {remote_key:#x}",
                self.name
            ),
        })
    }

    /// Ends everything. The device lets go of the memory before anybody is told.
    pub(super) fn close(mut self, out: &mut Vec<Completion>) {
        self.report_completed(out);
        self.lane = None;
        out.extend(self.under_way.drain(..).map(|request| Completion {
            token: request.token,
            result: Err(PostError::Disconnected { op: request.kind.name() }),
        }));
    }

    fn completed(&self) -> u64 {
        self.lane.as_ref().map_or(0, |lane| lane.state.completed())
    }

    /// Number of the oldest request under way.
    fn oldest(&self) -> u64 {
        self.posted + 1 - self.under_way.len() as u64
    }

    fn has_news(&self) -> bool {
        let is_done = !self.under_way.is_empty() && self.completed() >= self.oldest();
        is_done || self.state.health.has_failed()
    }

    fn report(&mut self, out: &mut Vec<Completion>) {
        // In this order: what completed before the failure was seen is done.
        let has_failed = self.state.health.has_failed();
        self.report_completed(out);
        if !has_failed {
            return;
        }
        // Destroying the queue pair keeps the device off the memory of what is reported now.
        self.lane = None;
        // Requests of one queue pair are carried out in order: the oldest is the one that failed.
        self.failed = self.failed.or_else(|| self.under_way.front().copied());
        for request in std::mem::take(&mut self.under_way) {
            out.push(Completion { token: request.token, result: self.check() });
        }
    }

    fn report_completed(&mut self, out: &mut Vec<Completion>) {
        let num_done = (self.completed() + 1).saturating_sub(self.oldest()) as usize;
        let done = self.under_way.drain(..num_done.min(self.under_way.len()));
        out.extend(done.map(|request| Completion { token: request.token, result: Ok(()) }));
    }
}

const IDX_BITS: u32 = 20;
const IDX_MASK: u32 = (1 << IDX_BITS) - 1;
const MAX_PEERS: usize = 1 << IDX_BITS;
const MAX_GENERATION: u32 = u32::MAX >> IDX_BITS;
