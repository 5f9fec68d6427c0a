//! Endpoints in place of a transport: one that does nothing, and one that copies into memory of this host, with or
//! without a check.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use p2p_core::Region;
use p2p_core::backend::mapped::MappedEndpoint;
use p2p_core::endpoint::{Endpoint, PostError, QuietError, TransportKind};
use p2p_core::region::{LocalRange, RemoteRange, SlotKey};

use super::pattern;
use proxy::memory;

/// Counts of a checking endpoint.
#[derive(Debug, Default)]
pub struct Checks {
    /// Objects whose words were all compared.
    pub objects: AtomicU64,
    /// Objects with a wrong word.
    pub bad: AtomicU64,
}

/// Times of the posts of a peer's objects.
#[derive(Debug)]
pub struct Posts {
    origin: Instant,
    /// Bytes of a lane's objects in the slot.
    lane_bytes: usize,
    lanes: Vec<PostsOfLane>,
}

#[derive(Debug)]
struct PostsOfLane {
    num: AtomicUsize,
    /// Nanoseconds since the origin.
    times: Box<[AtomicU64]>,
}

/// An endpoint for the puts and adds of a producer's lanes.
#[derive(Debug)]
pub struct BenchEndpoint {
    /// Memory of this host, through the product's endpoint for mapped memory.
    target: Option<(Region, MappedEndpoint)>,
    check: Option<Check>,
    posts: Option<Arc<Posts>>,
}

#[derive(Debug)]
struct Check {
    checks: Arc<Checks>,
    object_bytes: usize,
    num_objects: usize,
    /// Number of puts of each object of each lane.
    seen: Vec<u64>,
    words: Vec<u8>,
}

impl BenchEndpoint {
    /// Returns an endpoint that does nothing.
    #[must_use]
    pub const fn null() -> Self {
        Self { target: None, check: None, posts: None }
    }

    /// Returns an endpoint that only notes the time of each put.
    #[must_use]
    pub const fn timed(posts: Arc<Posts>) -> Self {
        Self { target: None, check: None, posts: Some(posts) }
    }

    /// Returns an endpoint that copies into `target`.
    #[must_use]
    pub fn copy(target: Region, event: &Arc<OwnedFd>) -> Self {
        let (peer, own) = (Arc::clone(event), Arc::clone(event));
        let endpoint = MappedEndpoint::new(TransportKind::Local, target.clone(), peer, own);
        Self { target: Some((target, endpoint)), check: None, posts: None }
    }

    /// Returns an endpoint that copies into `target`, and then compares each word with the pattern of a producer with
    /// `num_objects` objects per lane.
    #[must_use]
    pub fn checked(
        target: Region,
        event: &Arc<OwnedFd>,
        checks: Arc<Checks>,
        object_bytes: usize,
        num_objects: usize,
        num_lanes: usize,
    ) -> Self {
        let seen = vec![0; num_lanes * num_objects];
        let words = vec![0; object_bytes];
        let check = Check { checks, object_bytes, num_objects, seen, words };
        Self { check: Some(check), ..Self::copy(target, event) }
    }
}

impl Posts {
    /// Returns room for the first `num_kept` posts of each lane. A lane's objects take `lane_bytes` of the slot.
    #[must_use]
    pub fn new(origin: Instant, num_lanes: usize, lane_bytes: usize, num_kept: usize) -> Self {
        let lane = |_| PostsOfLane {
            num: AtomicUsize::new(0),
            times: (0..num_kept).map(|_| AtomicU64::new(0)).collect(),
        };
        Self { origin, lane_bytes, lanes: (0..num_lanes).map(lane).collect() }
    }

    /// Returns the times of a lane's posts in order, in nanoseconds since the origin. It is complete once the puts have
    /// ended.
    #[must_use]
    pub fn of_lane(&self, lane: usize) -> Vec<u64> {
        let Some(PostsOfLane { num, times }) = self.lanes.get(lane) else { return Vec::new() };
        let num = num.load(Ordering::Relaxed).min(times.len());
        times[..num].iter().map(|time| time.load(Ordering::Relaxed)).collect()
    }

    /// Only the thread that posts calls this.
    fn note(&self, offset: usize) {
        let now = self.origin.elapsed().as_nanos() as u64;
        let Some(PostsOfLane { num, times }) = self.lanes.get(offset / self.lane_bytes) else {
            return;
        };
        let number = num.load(Ordering::Relaxed);
        if let Some(time) = times.get(number) {
            time.store(now, Ordering::Relaxed);
        }
        num.store(number + 1, Ordering::Relaxed);
    }
}

impl Check {
    fn look(&mut self, target: &Region, offset: usize) {
        let object = offset / self.object_bytes;
        let Some(seen) = self.seen.get_mut(object) else { return };
        let (lane, place) = (object / self.num_objects, object % self.num_objects);
        let number = *seen * self.num_objects as u64 + place as u64;
        *seen += 1;
        let is_good =
            offset.is_multiple_of(self.object_bytes)
                && memory::read(target, offset, &mut self.words).is_ok()
                && self.words.chunks_exact(8).enumerate().all(|(idx, word)| {
                    word == pattern(lane as u64, number, idx as u64).to_ne_bytes()
                });
        self.checks.objects.fetch_add(1, Ordering::Relaxed);
        self.checks.bad.fetch_add(u64::from(!is_good), Ordering::Relaxed);
    }
}

impl Endpoint for BenchEndpoint {
    type RemoteKey = SlotKey;

    fn kind(&self) -> TransportKind {
        TransportKind::Local
    }

    fn register(&mut self, _region: &Region) -> Result<(), PostError> {
        Ok(())
    }

    fn direct(&self, _key: SlotKey) -> Option<NonNull<u8>> {
        None
    }

    #[inline]
    unsafe fn put(&mut self, dst: RemoteRange<SlotKey>, src: LocalRange) -> Result<(), PostError> {
        if let Some(posts) = &self.posts {
            posts.note(dst.offset);
        }
        let Some((target, endpoint)) = &mut self.target else { return Ok(()) };
        let offset = dst.offset;
        // SAFETY: the caller's promise about `src`.
        unsafe { endpoint.put(dst, src)? };
        if let Some(check) = &mut self.check {
            check.look(target, offset);
        }
        Ok(())
    }

    unsafe fn get(&mut self, _: LocalRange, _: RemoteRange<SlotKey>) -> Result<(), PostError> {
        Err(PostError::Transport { op: "get", code: 0, detail: "producers only put".to_owned() })
    }

    fn add_flag(&mut self, dst: RemoteRange<SlotKey>, value: u64) -> Result<(), PostError> {
        match &mut self.target {
            Some((_, endpoint)) => endpoint.add_flag(dst, value),
            None => Ok(()),
        }
    }

    fn fence(&mut self) -> Result<(), PostError> {
        Ok(())
    }

    fn quiet(&mut self, _deadline: Instant) -> Result<(), QuietError> {
        Ok(())
    }

    fn wake(&mut self, _key: SlotKey, _waiting_offset: usize) -> Result<(), PostError> {
        Ok(())
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

p2p_core::unbatched!(BenchEndpoint);
p2p_core::immediate_progress!(BenchEndpoint);
