//! The peers of a fabric: operations under way on each queue pair, and their outcomes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::detail::QueuePairAddress;
use super::progress::{Progress, Room};
use super::request::{OpKind, Place};
use super::state::{PeerState, QueuePairState};
use super::status::Cause;
use p2p_core::endpoint::PostError;
use p2p_core::fabric::{Completion, PeerId, Token};

/// Peers by number. The numbers of removed peers remain recognisable: a place is reused under another generation,
/// and retired when generations run out.
#[derive(Debug, Default)]
pub(super) struct Peers {
    places: Vec<PeerPlace>,
    free: VecDeque<u32>,
    /// Places of peers that may have something to report, each at most once.
    active: Vec<u32>,
    /// Failed peers that are not yet reported.
    lost: Vec<PeerId>,
}

#[derive(Debug, Default)]
struct PeerPlace {
    generation: u32,
    peer: Option<Peer>,
}

/// A peer, joined or about to be joined.
#[derive(Debug)]
pub(super) struct Peer {
    /// Empty once the peer has failed. Declared before the state below, which the queue pairs use.
    pub(super) queue_pairs: Vec<FabricQueuePair>,
    pub(super) state: Arc<PeerState>,
    pub(super) name: String,
    pub(super) is_joined: bool,
    is_active: bool,
    /// True once the failure was reported.
    is_reported: bool,
    /// The request that failed.
    failed: Option<Request>,
}

/// A queue pair of a peer. Fields are dropped in this order: the entry in the driver's table, the queue pair, its
/// room in the completion queue.
#[derive(Debug)]
pub(super) struct FabricQueuePair {
    pub(super) place: PlaceGuard,
    pub(super) state: Arc<QueuePairState>,
    pub(super) _room: Room,
    pub(super) own: QueuePairAddress,
    /// Index among the fabric's ports. The next field is the index among its devices.
    pub(super) port_idx: usize,
    pub(super) device_idx: usize,
    /// Index of the peer's device that it leads to.
    pub(super) peer_device_idx: usize,
    pub(super) pending: PendingRequests,
}

/// Operations under way on a queue pair, oldest first.
#[derive(Debug)]
pub(super) struct PendingRequests {
    posted: u64,
    requests: VecDeque<Request>,
    bytes: u64,
    /// Number of completed requests at the last reading of the clock, and the time since which it is unchanged.
    watched: Option<(u64, Instant)>,
}

/// A place in the driver's table, returned on drop.
#[derive(Debug)]
pub(super) struct PlaceGuard {
    pub(super) place: Place,
    pub(super) progress: Arc<Progress>,
}

impl Drop for PlaceGuard {
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
    /// The key as the peer described it.
    pub(super) remote_key: u64,
    pub(super) bytes: u32,
}

impl Peers {
    /// Assigns a number to `peer`. `None` if no distinguishable number is left.
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

    /// Removes a peer.
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
        self.lost.retain(|lost| *lost != id);
        Some(peer)
    }

    /// Records the failure of a peer that may not have been noticed yet.
    pub(super) fn lose(&mut self, id: PeerId) {
        if let Some(peer) = self.get_mut(id)
            && !std::mem::replace(&mut peer.is_reported, true)
        {
            self.lost.push(id);
        }
    }

    /// The next failed peer. Each is returned once.
    pub(super) fn next_lost(&mut self) -> Option<PeerId> {
        self.lost.pop()
    }

    /// Records a request that was posted on a queue pair of an existing peer.
    pub(super) fn posted(&mut self, id: PeerId, queue_pair_idx: usize, request: Request) {
        let Some(peer) = self.get_mut(id) else { return };
        let Some(queue_pair) = peer.queue_pairs.get_mut(queue_pair_idx) else { return };
        queue_pair.pending.push(request);
        if !peer.is_active {
            peer.is_active = true;
            self.active.push(id.0 & IDX_MASK);
        }
    }

    pub(super) const fn has_active(&self) -> bool {
        !self.active.is_empty()
    }

    /// True if any peer has something to report.
    pub(super) fn has_news(&self) -> bool {
        let news = |idx: &u32| self.places[*idx as usize].peer.as_ref().is_none_or(Peer::has_news);
        self.active.iter().any(news)
    }

    /// Appends completed operations. After a failure, appends all operations.
    pub(super) fn report(&mut self, out: &mut Vec<Completion>) {
        let Self { places, active, lost, .. } = self;
        active.retain(|idx| {
            let PeerPlace { generation, peer } = &mut places[*idx as usize];
            let Some(peer) = peer else { return false };
            peer.report(out);
            if peer.queue_pairs.is_empty() && !std::mem::replace(&mut peer.is_reported, true) {
                lost.push(PeerId(*generation << IDX_BITS | *idx));
            }
            peer.is_active =
                peer.queue_pairs.iter().any(|queue_pair| !queue_pair.pending.requests.is_empty());
            peer.is_active
        });
    }

    /// Fails peers with a queue pair that has work under way and completes nothing for `limit`. Not every device
    /// notices the loss of another one by itself, or soon.
    pub(super) fn fail_stalled(&mut self, now: Instant, limit: Duration) {
        let Self { places, active, .. } = self;
        for idx in active.iter() {
            let Some(peer) = places[*idx as usize].peer.as_mut() else { continue };
            for queue_pair in &mut peer.queue_pairs {
                let completed = queue_pair.state.completed();
                if let Some(oldest) = queue_pair.pending.find_stalled(completed, now, limit) {
                    let cause = Cause::Late { limit_ms: limit.as_millis() as u64 };
                    queue_pair.state.fail(oldest.kind.name(), cause);
                }
            }
        }
    }
}

impl Peer {
    pub(super) const fn new(
        queue_pairs: Vec<FabricQueuePair>,
        state: Arc<PeerState>,
        name: String,
    ) -> Self {
        Self {
            queue_pairs,
            state,
            name,
            is_joined: false,
            is_active: false,
            is_reported: false,
            failed: None,
        }
    }

    /// The queue pair with the least under way, among the queue pairs that hold fewer than `depth` requests.
    pub(super) fn pick(&self, depth: usize) -> Option<usize> {
        let has_room =
            |(_, queue_pair): &(usize, &FabricQueuePair)| queue_pair.pending.requests.len() < depth;
        let queue_pairs = self.queue_pairs.iter().enumerate().filter(has_room);
        queue_pairs.min_by_key(|(_, queue_pair)| queue_pair.pending.bytes).map(|(idx, _)| idx)
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

    /// Ends all operations. The device stops using the memory before any completion is reported.
    pub(super) fn close(mut self, out: &mut Vec<Completion>) {
        self.report_completed(out);
        for request in self.take_queue_pairs() {
            out.push(Completion {
                token: request.token,
                result: Err(PostError::Disconnected { op: request.kind.name() }),
            });
        }
    }

    fn has_news(&self) -> bool {
        self.state.health.has_failed()
            || self
                .queue_pairs
                .iter()
                .any(|queue_pair| queue_pair.pending.num_done(queue_pair.state.completed()) > 0)
    }

    fn report(&mut self, out: &mut Vec<Completion>) {
        // The failure is read first: operations completed before it was observed count as done.
        let has_failed = self.state.health.has_failed();
        self.report_completed(out);
        if !has_failed {
            return;
        }
        // A queue pair executes its requests in order, so its oldest request is the failed one.
        let culprit = match &self.queue_pairs[..] {
            [only] => Some(only),
            several => several.iter().find(|queue_pair| queue_pair.state.has_failed()),
        };
        let oldest = culprit.and_then(|queue_pair| queue_pair.pending.requests.front().copied());
        self.failed = self.failed.or(oldest);
        for request in self.take_queue_pairs() {
            out.push(Completion { token: request.token, result: self.check() });
        }
    }

    /// Destroys the queue pairs, so that devices no longer touch memory of operations under way. Returns those
    /// operations.
    fn take_queue_pairs(&mut self) -> Vec<Request> {
        let queue_pairs = std::mem::take(&mut self.queue_pairs);
        queue_pairs.into_iter().flat_map(|queue_pair| queue_pair.pending.requests).collect()
    }

    fn report_completed(&mut self, out: &mut Vec<Completion>) {
        for queue_pair in &mut self.queue_pairs {
            let completed = queue_pair.state.completed();
            queue_pair.pending.land(completed, |request| {
                out.push(Completion { token: request.token, result: Ok(()) });
            });
        }
    }
}

impl PendingRequests {
    /// Reserves room for `depth` requests.
    pub(super) fn new(depth: usize) -> Self {
        Self { posted: 0, requests: VecDeque::with_capacity(depth), bytes: 0, watched: None }
    }

    /// Number of the next request.
    pub(super) const fn next_sequence(&self) -> u64 {
        self.posted + 1
    }

    fn push(&mut self, request: Request) {
        if self.requests.is_empty() {
            self.watched = None;
        }
        self.posted += 1;
        self.bytes += u64::from(request.bytes);
        self.requests.push_back(request);
    }

    /// Number of finished operations, given the total number `completed` since the first.
    fn num_done(&self, completed: u64) -> usize {
        let oldest = self.posted + 1 - self.requests.len() as u64;
        ((completed + 1).saturating_sub(oldest) as usize).min(self.requests.len())
    }

    /// Removes the finished operations.
    fn land(&mut self, completed: u64, mut each: impl FnMut(Request)) {
        for request in self.requests.drain(..self.num_done(completed)) {
            self.bytes -= u64::from(request.bytes);
            each(request);
        }
    }

    /// The oldest operation, if nothing has completed for `limit`.
    fn find_stalled(&mut self, completed: u64, now: Instant, limit: Duration) -> Option<Request> {
        let oldest = *self.requests.front()?;
        match self.watched {
            Some((seen, since)) if seen == completed => (now - since >= limit).then_some(oldest),
            _ => {
                self.watched = Some((completed, now));
                None
            }
        }
    }
}

const IDX_BITS: u32 = 20;
const IDX_MASK: u32 = (1 << IDX_BITS) - 1;
const MAX_PEERS: usize = 1 << IDX_BITS;
const MAX_GENERATION: u32 = u32::MAX >> IDX_BITS;

#[cfg(test)]
mod tests {
    use super::*;

    fn request(token: u64, bytes: u32) -> Request {
        let (kind, token) = (OpKind::Put, Token(token));
        Request { token, kind, remote_address: 0, remote_key: 0, bytes }
    }

    #[test]
    fn a_queue_pair_knows_what_is_under_way_on_it() {
        let mut pending = PendingRequests::new(4);
        for token in 0..3 {
            assert_eq!(pending.next_sequence(), token + 1);
            pending.push(request(token, 100));
        }
        assert_eq!((pending.bytes, pending.num_done(0), pending.num_done(2)), (300, 0, 2));
        let mut landed = Vec::new();
        pending.land(2, |request| landed.push(request.token.0));
        assert_eq!((landed.as_slice(), pending.bytes), ([0, 1].as_slice(), 100));
        // A count above the number ever posted is an error of a driver, and must not cause a crash.
        pending.land(99, |request| landed.push(request.token.0));
        assert_eq!((landed.as_slice(), pending.bytes), ([0, 1, 2].as_slice(), 0));
    }

    #[test]
    fn a_stall_is_counted_from_what_began_after_the_last_pause() {
        let (mut pending, begin, limit) =
            (PendingRequests::new(4), Instant::now(), Duration::from_secs(3));
        let late = begin + 2 * limit;
        assert!(pending.find_stalled(0, late, limit).is_none());
        pending.push(request(1, 10));
        assert!(pending.find_stalled(0, begin, limit).is_none());
        assert_eq!(pending.find_stalled(0, begin + limit, limit).unwrap().token, Token(1));
        pending.land(1, |_| {});
        pending.push(request(2, 10));
        assert!(pending.find_stalled(1, late, limit).is_none(), "it began just now");
        assert_eq!(pending.find_stalled(1, late + limit, limit).unwrap().token, Token(2));
    }
}
