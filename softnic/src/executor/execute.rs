//! Execution of one request.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, RngExt};

use super::reach::{local, pin, remote_domain, remote_entry};
use crate::format::{Atomic, Local, MAX_MESSAGE_BYTES, Operation, Remote, Source, Syndrome, Wqe};
use crate::memory::copy;
use crate::nic::{DeferredEffect, Effect, Nic, Qp};
use crate::port::{Access, NUM_INBOX};

impl Nic {
    /// Bytes moved; `None` when the request has to wait.
    pub(super) fn execute(
        &mut self,
        qp: &mut Qp,
        position: u64,
        wqe: &Wqe,
    ) -> Result<Option<u32>, Syndrome> {
        // All earlier effects must be visible before this one, except where memory with relaxed ordering permits
        // otherwise.
        if !matches!(wqe.operation, Operation::Nop | Operation::Dump(_)) {
            self.land_ordered_writes(qp, position)?;
        }
        fence(Ordering::Release);
        match &wqe.operation {
            Operation::Nop => Ok(Some(0)),
            Operation::Dump(local) => {
                self.local(qp, local, Access::default())?;
                Ok(Some(local.num_bytes))
            }
            Operation::Write(remote, source) => {
                self.write(qp, position, remote, source, true)?;
                Ok(Some(source.num_bytes() as u32))
            }
            Operation::WriteImm(remote, source, imm) => {
                self.write_imm(qp, position, remote, source, *imm)
            }
            Operation::Read(remote, pieces) => {
                self.land_writes(qp, position)?;
                self.read(qp, position, remote, pieces).map(Some)
            }
            Operation::Atomic(remote, atomic, local) => {
                self.land_writes(qp, position)?;
                self.atomic(qp, position, remote, *atomic, local)?;
                Ok(Some(atomic.num_bytes()))
            }
        }
    }

    fn write(
        &mut self,
        qp: &mut Qp,
        position: u64,
        remote: &Remote,
        source: &Source,
        may_be_late: bool,
    ) -> Result<(), Syndrome> {
        let num_bytes = source.num_bytes();
        check_length(num_bytes)?;
        if let Source::Gather(pieces) = source {
            for piece in pieces {
                self.local(qp, piece, Access::default())?;
            }
        }
        let peer = self.peer(qp, remote, num_bytes)?;
        if num_bytes == 0 {
            return Ok(());
        }
        let domain = remote_domain(&self.peers, peer);
        let pinned = pin(&self.peers, peer, domain, remote, num_bytes, Access::REMOTE_WRITE)?;
        let mut offset = 0;
        match source {
            Source::Inline(bytes) => {
                // SAFETY: the range was pinned with this length.
                unsafe { copy(pinned.ptr, bytes.as_ptr(), bytes.len()) };
            }
            Source::Gather(pieces) => {
                for piece in pieces {
                    let len = piece.num_bytes as usize;
                    let from = local(&self.memory, qp.domain, piece, Access::default())?;
                    // SAFETY: offset + len is at most the pinned length.
                    let to = unsafe { pinned.ptr.add(offset) };
                    match &mut self.rng {
                        // SAFETY: both ranges were checked.
                        None => unsafe { copy(to, from, len) },
                        Some(rng) => {
                            for (at, len) in cut(rng, to as usize, len) {
                                if may_be_late && rng.random_ratio(1, 2) {
                                    let part = Local {
                                        address: piece.address + at as u64,
                                        lkey: piece.lkey,
                                        num_bytes: len as u32,
                                    };
                                    let address = remote.address + (offset + at) as u64;
                                    let remote = Remote { address, rkey: remote.rkey };
                                    let is_relaxed = pinned.is_relaxed;
                                    let effect = Effect::Write { remote, local: part, is_relaxed };
                                    qp.deferred.push(DeferredEffect { position, effect });
                                } else {
                                    // SAFETY: `cut` stays inside of the checked ranges.
                                    unsafe { copy(to.add(at), from.add(at), len) };
                                }
                            }
                        }
                    }
                    offset += len;
                }
            }
        }
        Ok(())
    }

    fn write_imm(
        &mut self,
        qp: &mut Qp,
        position: u64,
        remote: &Remote,
        source: &Source,
        imm: u32,
    ) -> Result<Option<u32>, Syndrome> {
        let num_bytes = source.num_bytes();
        let peer = self.peer(qp, remote, num_bytes)?;
        let entry = remote_entry(&self.peers, peer).ok_or(Syndrome::RetryExceeded)?;
        let num_used = entry.num_used.load(Ordering::Relaxed);
        if entry.num_receives.load(Ordering::Acquire) == num_used {
            let since = *qp.rnr_since.get_or_insert_with(Instant::now);
            if since.elapsed() >= self.config.rnr_timeout {
                return Err(Syndrome::RnrExceeded);
            }
            return Ok(None);
        }
        let num_waiting = num_used.wrapping_sub(entry.inbox_head.load(Ordering::Acquire) as u32);
        if num_waiting as usize >= NUM_INBOX {
            // The peer's NIC takes nothing from its inbox: its process is stopped.
            let since = *qp.rnr_since.get_or_insert_with(Instant::now);
            if since.elapsed() >= INBOX_LIMIT {
                return Err(Syndrome::RetryExceeded);
            }
            return Ok(None);
        }
        qp.rnr_since = None;
        // All bytes are in place before the immediate data is.
        self.write(qp, position, remote, source, false)?;
        self.land_writes(qp, position)?;
        let entry = remote_entry(&self.peers, peer).ok_or(Syndrome::RetryExceeded)?;
        let arrived = &entry.inbox[num_used as usize % NUM_INBOX];
        arrived.imm.store(imm, Ordering::Relaxed);
        arrived.num_bytes.store(num_bytes as u32, Ordering::Relaxed);
        entry.num_used.store(num_used.wrapping_add(1), Ordering::Release);
        Ok(Some(num_bytes as u32))
    }

    fn read(
        &mut self,
        qp: &mut Qp,
        position: u64,
        remote: &Remote,
        pieces: &[Local],
    ) -> Result<u32, Syndrome> {
        let num_bytes: u64 = pieces.iter().map(|piece| u64::from(piece.num_bytes)).sum();
        check_length(num_bytes)?;
        for piece in pieces {
            self.local(qp, piece, Access::LOCAL_WRITE)?;
        }
        let peer = self.peer(qp, remote, num_bytes)?;
        if num_bytes == 0 {
            return Ok(0);
        }
        let domain = remote_domain(&self.peers, peer);
        let pinned = pin(&self.peers, peer, domain, remote, num_bytes, Access::REMOTE_READ)?;
        let mut offset = 0;
        for piece in pieces {
            let len = piece.num_bytes as usize;
            if self.rng.as_mut().is_some_and(|rng| rng.random_ratio(2, 3)) {
                let address = remote.address + offset as u64;
                let remote = Remote { address, rkey: remote.rkey };
                let effect = Effect::Read { remote, local: *piece };
                qp.deferred.push(DeferredEffect { position, effect });
            } else {
                let to = local(&self.memory, qp.domain, piece, Access::LOCAL_WRITE)?;
                // SAFETY: both ranges were checked with these lengths.
                unsafe { copy(to, pinned.ptr.add(offset), len) };
            }
            offset += len;
        }
        Ok(num_bytes as u32)
    }

    fn atomic(
        &mut self,
        qp: &mut Qp,
        position: u64,
        remote: &Remote,
        atomic: Atomic,
        answer: &Local,
    ) -> Result<(), Syndrome> {
        let num_bytes = atomic.num_bytes();
        if answer.num_bytes != num_bytes {
            return Err(Syndrome::LocalLength);
        }
        let to = self.local(qp, answer, Access::LOCAL_WRITE)?;
        let peer = self.peer(qp, remote, num_bytes.into())?;
        if !remote.address.is_multiple_of(num_bytes.into()) {
            return Err(Syndrome::RemoteInvalid);
        }
        let domain = remote_domain(&self.peers, peer);
        let access = Access::REMOTE_ATOMIC;
        let pinned = pin(&self.peers, peer, domain, remote, num_bytes.into(), access)?;
        let bytes = if num_bytes == 4 {
            if !pinned.ptr.cast::<AtomicU32>().is_aligned() {
                return Err(Syndrome::RemoteOp);
            }
            // SAFETY: pinned, aligned; both sides use atomics on words that are counters.
            let word = unsafe { AtomicU32::from_ptr(pinned.ptr.cast()) };
            let before = word.update(Ordering::AcqRel, Ordering::Acquire, |word| {
                atomic.apply(word.into()) as u32
            });
            // The one result that arrives as it travelled.
            let mut bytes = [0; 8];
            bytes[..4].copy_from_slice(&before.to_be_bytes());
            bytes
        } else {
            if !pinned.ptr.cast::<AtomicU64>().is_aligned() {
                return Err(Syndrome::RemoteOp);
            }
            // SAFETY: as above.
            let word = unsafe { AtomicU64::from_ptr(pinned.ptr.cast()) };
            word.update(Ordering::AcqRel, Ordering::Acquire, |word| atomic.apply(word))
                .to_ne_bytes()
        };
        drop(pinned);
        if self.rng.as_mut().is_some_and(|rng| rng.random_ratio(2, 3)) {
            qp.deferred
                .push(DeferredEffect { position, effect: Effect::Land { local: *answer, bytes } });
        } else {
            // SAFETY: `local` checked the range.
            unsafe { copy(to, bytes.as_ptr(), num_bytes as usize) };
        }
        Ok(())
    }
}

const fn check_length(num_bytes: u64) -> Result<(), Syndrome> {
    if num_bytes > MAX_MESSAGE_BYTES as u64 { Err(Syndrome::LocalLength) } else { Ok(()) }
}

/// Cuts a range into pieces in a random order. Aligned 8-byte words stay whole.
fn cut(rng: &mut SmallRng, address: usize, len: usize) -> Vec<(usize, usize)> {
    let mut pieces = Vec::new();
    let mut at = 0;
    while at < len {
        let step = 1 + (rng.next_u32() as usize % len.max(64)) / 2;
        let end = (address + at + step).next_multiple_of(8) - address;
        let end = end.min(len);
        pieces.push((at, end - at));
        at = end;
    }
    pieces.shuffle(rng);
    pieces
}

/// Time limit of a write with immediate data for a peer whose NIC takes nothing from its inbox.
const INBOX_LIMIT: Duration = Duration::from_secs(3);
