//! A transport over a mapping without direct access: the data path of network transports, in software.
//!
//! The peer's slot has no address in this process ([`direct`](Endpoint::direct) is `None`), so a channel fills staging
//! memory and puts it. With a seed, the endpoint queues puts and gets, cuts them into pieces and executes the pieces in
//! a random order, as late as the ordering contract allows. Code that relies on more than the contract then fails in
//! tests.

use std::ptr::NonNull;
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

use super::mapped::MappedEndpoint;
use crate::endpoint::checks::check_range;
use crate::endpoint::{Endpoint, PostError, QuietError, TransportKind};
use crate::region::{LocalRange, RemoteRange, SlotKey};

/// How a [`StagedEndpoint`] delays and reorders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Disorder {
    /// Seed of the random order.
    pub seed: u64,
    /// Longest pause before a piece is executed.
    pub max_delay: Duration,
}

/// An endpoint without direct access to the peer's slot.
#[derive(Debug)]
pub struct StagedEndpoint {
    inner: MappedEndpoint,
    disorder: Option<(Disorder, SmallRng)>,
    queued: Vec<Piece>,
}

/// A part of a put or get in the queue.
#[derive(Debug)]
struct Piece {
    is_put: bool,
    local: LocalRange,
    remote: RemoteRange<SlotKey>,
}

impl StagedEndpoint {
    /// Endpoint over the peer's slot as `inner` maps it. Without `disorder` it executes every operation at once and in
    /// order.
    #[must_use]
    pub fn new(inner: MappedEndpoint, disorder: Option<Disorder>) -> Self {
        let disorder = disorder.map(|d| (d, SmallRng::seed_from_u64(d.seed)));
        Self { inner, disorder, queued: Vec::with_capacity(MAX_QUEUED) }
    }

    /// Cuts an operation into pieces and queues them. Executes the whole queue once it is full.
    fn enqueue(
        &mut self,
        is_put: bool,
        local: &LocalRange,
        remote: RemoteRange<SlotKey>,
    ) -> Result<(), PostError> {
        let op = if is_put { "put" } else { "get" };
        check_range(op, remote.offset, local.len(), self.inner.remote_bytes())?;
        let Some((_, rng)) = &mut self.disorder else { return Ok(()) };
        let mut start = 0;
        loop {
            let left = local.len() - start;
            let len = if self.queued.len() + 1 >= MAX_QUEUED {
                left
            } else {
                rng.random_range(left.min(1)..=left)
            };
            let Some(part) = local.sub(start, len) else { break };
            let offset = remote.offset + start;
            let remote = RemoteRange { key: remote.key, offset, len };
            self.queued.push(Piece { is_put, local: part, remote });
            start += len;
            if start == local.len() {
                break;
            }
        }
        if self.queued.len() >= MAX_QUEUED {
            self.execute_all()?;
        }
        Ok(())
    }

    /// Executes the queue in a random order.
    fn execute_all(&mut self) -> Result<(), PostError> {
        let Some((disorder, rng)) = &mut self.disorder else { return Ok(()) };
        self.queued.shuffle(rng);
        for piece in self.queued.drain(..) {
            if !disorder.max_delay.is_zero() {
                std::thread::sleep(rng.random_range(Duration::ZERO..=disorder.max_delay));
            }
            // SAFETY: the promises of `put` and `get` last until a `quiet`, or until a later operation that the caller
            // can observe. Each of these executes the queue first.
            unsafe {
                if piece.is_put {
                    self.inner.put(piece.remote, piece.local)?;
                } else {
                    self.inner.get(piece.local, piece.remote)?;
                }
            }
        }
        Ok(())
    }
}

impl Endpoint for StagedEndpoint {
    type RemoteKey = SlotKey;

    fn kind(&self) -> TransportKind {
        TransportKind::Staged
    }

    crate::forward_endpoint! { register, wake, wait_fd => self.inner }

    fn direct(&self, _key: SlotKey) -> Option<NonNull<u8>> {
        None
    }

    unsafe fn put(&mut self, dst: RemoteRange<SlotKey>, src: LocalRange) -> Result<(), PostError> {
        if self.disorder.is_some() {
            return self.enqueue(true, &src, dst);
        }
        // SAFETY: the caller's promise about `src`.
        unsafe { self.inner.put(dst, src) }
    }

    unsafe fn get(&mut self, dst: LocalRange, src: RemoteRange<SlotKey>) -> Result<(), PostError> {
        if self.disorder.is_some() {
            return self.enqueue(false, &dst, src);
        }
        // SAFETY: the caller's promise about `dst`.
        unsafe { self.inner.get(dst, src) }
    }

    fn add_flag(&mut self, dst: RemoteRange<SlotKey>, value: u64) -> Result<(), PostError> {
        self.execute_all()?;
        self.inner.add_flag(dst, value)
    }

    fn fence(&mut self) -> Result<(), PostError> {
        self.execute_all()?;
        self.inner.fence()
    }

    fn quiet(&mut self, deadline: Instant) -> Result<(), QuietError> {
        self.execute_all()?;
        self.inner.quiet(deadline)
    }
}

crate::unbatched!(StagedEndpoint);
crate::immediate_progress!(StagedEndpoint);

const MAX_QUEUED: usize = 64;
