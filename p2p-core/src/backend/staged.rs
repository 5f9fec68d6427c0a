//! A put-only transport over a mapping: the way that network transports take, in software.
//!
//! The peer's slot cannot be addressed ([`direct`](Endpoint::direct) is `None`), so a channel fills
//! staging memory and puts it. With a seed, puts and gets are held back, cut into pieces and carried
//! out in a random order, as late as the ordering contract allows: what relies on more than the
//! contract promises then breaks in tests.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

use super::mapped::MappedEndpoint;
use crate::endpoint::{Endpoint, PostError, QuietError, TransportKind};
use crate::region::{LocalRange, RemoteRange, SlotKey};

/// How a [`StagedEndpoint`] delays and reorders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Disorder {
    /// Seed of the random order.
    pub seed: u64,
    /// Longest pause before a piece is carried out.
    pub max_delay: Duration,
}

/// An endpoint that only puts, gets and adds.
#[derive(Debug)]
pub struct StagedEndpoint {
    inner: MappedEndpoint,
    disorder: Option<(Disorder, SmallRng)>,
    held_back: Vec<Piece>,
}

/// A part of a put or get that has not been carried out.
#[derive(Debug)]
struct Piece {
    is_put: bool,
    local: LocalRange,
    remote: RemoteRange<SlotKey>,
}

impl StagedEndpoint {
    /// Endpoint over the peer's slot as `inner` maps it. Without `disorder` everything is carried out
    /// at once and in order.
    #[must_use]
    pub fn new(inner: MappedEndpoint, disorder: Option<Disorder>) -> Self {
        let disorder = disorder.map(|d| (d, SmallRng::seed_from_u64(d.seed)));
        Self { inner, disorder, held_back: Vec::with_capacity(MAX_HELD_BACK) }
    }

    /// Cuts an operation into pieces and holds them back; carries everything out when too many wait.
    fn hold_back(
        &mut self,
        is_put: bool,
        local: &LocalRange,
        remote: RemoteRange<SlotKey>,
    ) -> Result<(), PostError> {
        let op = if is_put { "put" } else { "get" };
        self.inner.check(op, remote.offset, local.len())?;
        let Some((_, rng)) = &mut self.disorder else { return Ok(()) };
        let mut start = 0;
        loop {
            let left = local.len() - start;
            let len = if self.held_back.len() + 1 >= MAX_HELD_BACK {
                left
            } else {
                rng.random_range(left.min(1)..=left)
            };
            let Some(part) = local.sub(start, len) else { break };
            let offset = remote.offset + start;
            let remote = RemoteRange { key: remote.key, offset, len };
            self.held_back.push(Piece { is_put, local: part, remote });
            start += len;
            if start == local.len() {
                break;
            }
        }
        if self.held_back.len() >= MAX_HELD_BACK {
            self.carry_out()?;
        }
        Ok(())
    }

    /// Carries everything out that was held back, in a random order.
    fn carry_out(&mut self) -> Result<(), PostError> {
        let Some((disorder, rng)) = &mut self.disorder else { return Ok(()) };
        self.held_back.shuffle(rng);
        for piece in self.held_back.drain(..) {
            if !disorder.max_delay.is_zero() {
                std::thread::sleep(rng.random_range(Duration::ZERO..=disorder.max_delay));
            }
            // SAFETY: the promises given to `put` and `get` last until a `quiet`, or until what the
            // caller knows to come after, and every such point comes through here first.
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

    fn direct(&self, _key: SlotKey) -> Option<NonNull<u8>> {
        None
    }

    unsafe fn put(&mut self, dst: RemoteRange<SlotKey>, src: LocalRange) -> Result<(), PostError> {
        if self.disorder.is_some() {
            return self.hold_back(true, &src, dst);
        }
        // SAFETY: the caller's promise about `src`.
        unsafe { self.inner.put(dst, src) }
    }

    unsafe fn get(&mut self, dst: LocalRange, src: RemoteRange<SlotKey>) -> Result<(), PostError> {
        if self.disorder.is_some() {
            return self.hold_back(false, &dst, src);
        }
        // SAFETY: the caller's promise about `dst`.
        unsafe { self.inner.get(dst, src) }
    }

    fn add_flag(&mut self, dst: RemoteRange<SlotKey>, value: u64) -> Result<(), PostError> {
        self.carry_out()?;
        self.inner.add_flag(dst, value)
    }

    fn fence(&mut self) -> Result<(), PostError> {
        self.carry_out()?;
        self.inner.fence()
    }

    fn quiet(&mut self, deadline: Instant) -> Result<(), QuietError> {
        self.carry_out()?;
        self.inner.quiet(deadline)
    }

    fn wake(&mut self, key: SlotKey, waiting_offset: usize) -> Result<(), PostError> {
        self.inner.wake(key, waiting_offset)
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wait_fd()
    }
}

const MAX_HELD_BACK: usize = 64;
