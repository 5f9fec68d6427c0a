//! What a NIC does when it makes progress.
//!
//! Order that is kept on one queue pair, whatever the adversary does: requests are executed one after
//! the other; a write's bytes are in place before its completion, before a later atomic, write with
//! immediate data or read, and before a later write unless the memory was registered with relaxed
//! ordering; the answers to reads and atomics are in place before their completion and before a later
//! fenced request. Nothing is ordered across queue pairs.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{Rng, RngExt};

use crate::format::{
    Atomic, BLOCK_BYTES, Cqe, CqeKind, Head, Local, MAX_MESSAGE_BYTES, Operation, Remote,
    SEGMENT_BYTES, Source, Syndrome, Wqe, decode_doorbell, doorbell_word,
};
use crate::memory::copy;
use crate::nic::{DoorbellMode, Executed, Memory, Nic, Qp, QpState, Violation};
use crate::port::{self, Access, NUM_INBOX, Peer, Pinned, state};

/// A completion that is not written yet.
#[derive(Debug)]
pub(crate) struct Held {
    cqe: Cqe,
    /// First block after its request.
    end: u64,
}

/// A part of an executed request that lands later.
#[derive(Debug)]
pub(crate) struct Later {
    position: u64,
    effect: Effect,
}

#[derive(Debug)]
enum Effect {
    Write { remote: Remote, local: Local },
    Read { remote: Remote, local: Local },
    Land { local: Local, bytes: [u8; 8] },
}

enum Step {
    Done,
    Blocked,
}

impl Nic {
    /// Does what is due: takes doorbells, executes requests, writes completions. Returns how much it
    /// did, 0 when there was nothing. One call does a bounded amount.
    pub fn progress(&mut self) -> usize {
        let mut work = 0;
        let num_qps = self.qps.len();
        // The adversary serves queue pairs in any order; a plain NIC in turn.
        let start = self.rng.as_mut().map_or(0, |rng| rng.random_range(0..num_qps.max(1)));
        for i in 0..num_qps {
            let index = (start + i) % num_qps;
            if self.rng.as_mut().is_some_and(|rng| rng.random_ratio(1, 4)) {
                work += 1;
                continue;
            }
            let Some(mut qp) = self.qps[index].take() else { continue };
            work += self.serve(&mut qp, index);
            self.qps[index] = Some(qp);
        }
        work
    }

    fn serve(&mut self, qp: &mut Qp, index: usize) -> usize {
        if qp.is_stalled || qp.state == QpState::Reset {
            return 0;
        }
        if self.port.tables().qps[index].state.load(Ordering::Acquire) == state::ERROR {
            qp.state = QpState::Error;
        }
        let mut work = usize::from(self.take_doorbell(qp));
        work += self.receive(qp, index);
        let budget = self.rng.as_mut().map_or(BUDGET, |rng| rng.random_range(1..=8));
        for _ in 0..budget {
            if qp.executed >= qp.produced {
                break;
            }
            match self.execute_next(qp) {
                Step::Done => work += 1,
                Step::Blocked => break,
            }
            if self.rng.is_none() {
                self.report(qp, usize::MAX);
            }
        }
        if let Some(rng) = &mut self.rng {
            let num_later = qp.later.len();
            let num_reports = rng.random_range(0..=qp.held.len());
            if num_later > 0 && rng.random_ratio(1, 2) {
                qp.later.shuffle(rng);
                let num_landing = rng.random_range(1..=num_later);
                let landing: Vec<Later> = qp.later.drain(..num_landing).collect();
                landing.iter().for_each(|later| self.land(qp, &later.effect));
            }
            work += num_later + qp.held.len();
            self.report(qp, num_reports);
        } else {
            self.report(qp, usize::MAX);
        }
        work
    }

    /// SYNC POINT `doorbell`: pairs with `ring_doorbell` of the device functions.
    fn take_doorbell(&mut self, qp: &mut Qp) -> bool {
        let record = || qp.dbrec.word32(4).map_or(0, |w| u32::from_be(w.load(Ordering::Acquire)));
        let word = match self.config.doorbell {
            DoorbellMode::Record => doorbell_word(qp.qpn, u64::from(record())),
            _ => qp.doorbell.word64(0).map_or(0, |word| word.load(Ordering::Acquire)),
        };
        if word == 0 {
            return false;
        }
        let (qpn, end) = decode_doorbell(word);
        let known = qp.produced as u16;
        let advance = end.wrapping_sub(known);
        if qpn == qp.qpn && advance == 0 {
            return false;
        }
        if qp.num_dropped > 0 {
            qp.num_dropped -= 1;
            // Forgotten, unless a newer one has come meanwhile.
            if let Some(register) = qp.doorbell.word64(0) {
                let _ = register.compare_exchange(word, 0, Ordering::AcqRel, Ordering::Relaxed);
            }
            return false;
        }
        let record = record() as u16;
        let mut violation = None;
        let mut advance = advance;
        if qpn != qp.qpn {
            violation = Some(Violation::QueuePair { qpn: qp.qpn, what: "a doorbell", found: qpn });
            advance = 0;
        } else if advance > 1 << 15 {
            violation = Some(Violation::Backwards { qpn, from: known, to: end });
            advance = 0;
        } else if self.config.doorbell == DoorbellMode::Checked
            && record.wrapping_sub(end) > 1 << 15
        {
            violation = Some(Violation::StaleRecord { qpn, doorbell: end, record });
        }
        let outstanding = qp.produced + u64::from(advance) - qp.reported;
        if outstanding > u64::from(qp.depth) {
            violation = Some(Violation::Overrun { qpn, outstanding, depth: qp.depth });
        }
        qp.produced += u64::from(advance);
        if let Some(violation) = violation {
            // A doorbell that stays wrong is noted once.
            if let (0, Some(register)) = (advance, qp.doorbell.word64(0)) {
                let _ = register.compare_exchange(word, 0, Ordering::AcqRel, Ordering::Relaxed);
            }
            if self.note(violation) {
                self.fail(qp);
            }
        }
        true
    }

    /// Turns arrived immediate data into completions, and tells the peer of posted receives.
    fn receive(&mut self, qp: &mut Qp, index: usize) -> usize {
        let Some(cq) = qp.recv_cq else { return 0 };
        let entry = &self.port.tables().qps[index];
        let posted = qp.dbrec.word32(0).map_or(0, |w| u32::from_be(w.load(Ordering::Acquire)));
        // The record has 16 bits.
        let known = entry.num_receives.load(Ordering::Relaxed);
        let num_new = (posted as u16).wrapping_sub(known as u16);
        if num_new != 0 {
            entry.num_receives.store(known.wrapping_add(num_new.into()), Ordering::Release);
        }
        let mut num_arrived = 0;
        while entry.num_used.load(Ordering::Acquire) != qp.num_received as u32
            && num_arrived < NUM_INBOX
        {
            let arrived = &entry.inbox[qp.num_received as usize % NUM_INBOX];
            let cqe = Cqe {
                status: Ok(CqeKind::WriteImm(arrived.imm.load(Ordering::Relaxed))),
                qpn: qp.qpn,
                opcode: 0,
                counter: qp.num_received as u16,
                num_bytes: arrived.num_bytes.load(Ordering::Relaxed),
            };
            qp.num_received += 1;
            entry.inbox_head.store(qp.num_received, Ordering::Release);
            num_arrived += 1;
            let Some(cq) = self.cqs.get_mut(cq).and_then(Option::as_mut) else { break };
            if !cq.store(&cqe) {
                let violation = Violation::CompletionOverrun { qpn: qp.qpn, depth: cq.depth() };
                self.note(violation);
                self.fail(qp);
                break;
            }
        }
        num_arrived + usize::from(num_new != 0)
    }

    fn execute_next(&mut self, qp: &mut Qp) -> Step {
        let position = qp.executed;
        let block = read_block(qp, position);
        let Some(head) = Head::decode(&block) else { return Step::Blocked };
        let num_blocks = u64::from(head.num_blocks().max(1)).min(qp.produced - position);
        let mut cqe = Cqe {
            status: Ok(CqeKind::Request),
            qpn: qp.qpn,
            opcode: head.opcode,
            counter: position as u16,
            num_bytes: 0,
        };
        let mut is_signalled = true;
        let mut address = 0;
        if qp.state == QpState::Error {
            cqe.status = Err(Syndrome::Flushed);
        } else {
            let nth = qp.num_requests;
            let injected = qp.failures.iter().find(|(at, _)| *at == nth).map(|(_, how)| *how);
            let result = match (injected, self.decode(qp, position, &block, head)) {
                (Some(syndrome), _) => Err(syndrome),
                (None, Err(syndrome)) => Err(syndrome),
                (None, Ok(wqe)) => {
                    is_signalled = wqe.is_signalled();
                    address = remote_address(&wqe.operation);
                    if wqe.is_fenced() {
                        self.land_before(qp, position);
                    }
                    self.execute(qp, position, &wqe)
                }
            };
            match result {
                Ok(Some(num_bytes)) => {
                    cqe.num_bytes = num_bytes;
                    if self.config.keeps_trace {
                        let opcode = head.opcode;
                        self.executed.push(Executed { qpn: qp.qpn, position, opcode, address });
                    }
                }
                Ok(None) => return Step::Blocked,
                Err(syndrome) => {
                    is_signalled = true;
                    cqe.status = Err(syndrome);
                    self.fail(qp);
                }
            }
        }
        qp.num_requests += 1;
        qp.executed = position + num_blocks;
        if is_signalled {
            qp.held.push_back(Held { cqe, end: qp.executed });
        }
        Step::Done
    }

    /// The request at `position`, checked.
    fn decode(
        &mut self,
        qp: &Qp,
        position: u64,
        block: &[u8; BLOCK_BYTES],
        head: Head,
    ) -> Result<Wqe, Syndrome> {
        let qpn = qp.qpn;
        if head.index != position as u16 {
            let violation = Violation::Index { qpn, position, found: head.index };
            if self.note(violation) {
                return Err(Syndrome::LocalQpOp);
            }
        }
        if head.qpn != qpn {
            self.note(Violation::QueuePair { qpn, what: "a request", found: head.qpn });
            return Err(Syndrome::LocalQpOp);
        }
        let num_bytes = head.num_segments as usize * SEGMENT_BYTES;
        let decoded = if u64::from(head.num_blocks()) > qp.produced - position {
            Err("it is longer than what was posted".to_owned())
        } else if num_bytes <= BLOCK_BYTES {
            Wqe::decode(&block[..num_bytes]).map_err(|error| error.to_string())
        } else {
            let blocks = 0..u64::from(head.num_blocks());
            let bytes: Vec<u8> = blocks.flat_map(|i| read_block(qp, position + i)).collect();
            Wqe::decode(&bytes[..num_bytes]).map_err(|error| error.to_string())
        };
        decoded.map_err(|detail| {
            self.note(Violation::Malformed { qpn, position, detail });
            Syndrome::LocalQpOp
        })
    }

    /// Bytes moved; `None` when the request has to wait.
    fn execute(&mut self, qp: &mut Qp, position: u64, wqe: &Wqe) -> Result<Option<u32>, Syndrome> {
        // Everything before is to be seen before anything of this.
        fence(Ordering::Release);
        match &wqe.operation {
            Operation::Nop => Ok(Some(0)),
            Operation::Dump(local) => {
                self.local(qp, local, Access::default())?;
                Ok(Some(local.num_bytes))
            }
            Operation::Write(remote, source) => {
                self.write(qp, position, remote, source)?;
                Ok(Some(source.num_bytes() as u32))
            }
            Operation::WriteImm(remote, source, imm) => {
                self.write_imm(qp, position, remote, source, *imm)
            }
            Operation::Read(remote, pieces) => {
                self.land_writes(qp, position);
                self.read(qp, position, remote, pieces).map(Some)
            }
            Operation::Atomic(remote, atomic, local) => {
                self.land_writes(qp, position);
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
                                if pinned.is_relaxed && rng.random_ratio(1, 2) {
                                    let part = Local {
                                        address: piece.address + at as u64,
                                        lkey: piece.lkey,
                                        num_bytes: len as u32,
                                    };
                                    let address = remote.address + (offset + at) as u64;
                                    let remote = Remote { address, rkey: remote.rkey };
                                    let effect = Effect::Write { remote, local: part };
                                    qp.later.push(Later { position, effect });
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
            // The peer's NIC takes nothing in: its process stands still.
            let since = *qp.rnr_since.get_or_insert_with(Instant::now);
            if since.elapsed() >= INBOX_LIMIT {
                return Err(Syndrome::RetryExceeded);
            }
            return Ok(None);
        }
        qp.rnr_since = None;
        self.write(qp, position, remote, source)?;
        self.land_writes(qp, position + 1);
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
                qp.later.push(Later { position, effect });
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
            qp.later.push(Later { position, effect: Effect::Land { local: *answer, bytes } });
        } else {
            // SAFETY: `local` checked the range.
            unsafe { copy(to, bytes.as_ptr(), num_bytes as usize) };
        }
        Ok(())
    }

    /// Everything of requests before `end` lands.
    fn land_before(&mut self, qp: &mut Qp, end: u64) {
        self.land_if(qp, |later| later.position < end);
    }

    fn land_writes(&mut self, qp: &mut Qp, end: u64) {
        self.land_if(qp, |later| {
            later.position < end && matches!(later.effect, Effect::Write { .. })
        });
    }

    fn land_if(&mut self, qp: &mut Qp, is_due: impl Fn(&Later) -> bool) {
        let mut index = 0;
        while index < qp.later.len() {
            if is_due(&qp.later[index]) {
                let later = qp.later.swap_remove(index);
                self.land(qp, &later.effect);
            } else {
                index += 1;
            }
        }
    }

    /// Carries out what was put off. Keys may have been revoked since; then it is lost, as are packets
    /// under way.
    fn land(&mut self, qp: &Qp, effect: &Effect) {
        let result = match effect {
            Effect::Land { local: to, bytes } => {
                local(&self.memory, qp.domain, to, Access::LOCAL_WRITE)
                    // SAFETY: the range was checked.
                    .map(|ptr| unsafe { copy(ptr, bytes.as_ptr(), to.num_bytes as usize) })
            }
            Effect::Write { remote, local: from } => {
                self.move_late(qp, remote, from, Access::REMOTE_WRITE, |ours, theirs, len| {
                    // SAFETY: `move_late` checked both ranges.
                    unsafe { copy(theirs, ours, len) }
                })
            }
            Effect::Read { remote, local: to } => {
                self.move_late(qp, remote, to, Access::REMOTE_READ, |ours, theirs, len| {
                    // SAFETY: as above.
                    unsafe { copy(ours, theirs, len) }
                })
            }
        };
        if let Err(syndrome) = result {
            tracing::debug!(?syndrome, qpn = qp.qpn, "a late part of a request is lost");
        }
    }

    fn move_late(
        &self,
        qp: &Qp,
        remote: &Remote,
        ours: &Local,
        access: Access,
        copy: impl Fn(*mut u8, *mut u8, usize),
    ) -> Result<(), Syndrome> {
        let peer = qp.remote.ok_or(Syndrome::RetryExceeded)?;
        let domain = remote_domain(&self.peers, peer);
        let needed =
            if access == Access::REMOTE_READ { Access::LOCAL_WRITE } else { Access::default() };
        let near = local(&self.memory, qp.domain, ours, needed)?;
        let far = pin(&self.peers, peer, domain, remote, ours.num_bytes.into(), access)?;
        copy(near, far.ptr, ours.num_bytes as usize);
        Ok(())
    }

    /// Writes up to `max` completions.
    fn report(&mut self, qp: &mut Qp, max: usize) {
        for _ in 0..max {
            let Some(Held { cqe, end }) = qp.held.pop_front() else { return };
            self.land_before(qp, end);
            let Some(cq) = self.cqs.get_mut(qp.send_cq).and_then(Option::as_mut) else { return };
            if cq.store(&cqe) {
                qp.reported = end;
            } else {
                let violation = Violation::CompletionOverrun { qpn: qp.qpn, depth: cq.depth() };
                self.note(violation);
                self.fail(qp);
                qp.held.clear();
            }
        }
    }

    /// Takes a queue pair out of service.
    fn fail(&mut self, qp: &mut Qp) {
        self.num_failures += u64::from(qp.state != QpState::Error);
        qp.state = QpState::Error;
        if let Some(index) = port::qp_index(qp.qpn) {
            self.port.tables().qps[index].state.store(state::ERROR, Ordering::Release);
        }
    }

    /// Notes a violation, unless there are enough. `true` when it is to be punished.
    fn note(&mut self, violation: Violation) -> bool {
        if self.violations.len() < MAX_VIOLATIONS {
            self.violations.push(violation);
        }
        self.config.is_strict
    }

    fn local(&self, qp: &Qp, wanted: &Local, access: Access) -> Result<*mut u8, Syndrome> {
        local(&self.memory, qp.domain, wanted, access)
    }

    /// The peer that `qp` talks to, if it answers and lets `remote` be reached.
    fn peer(&mut self, qp: &Qp, remote: &Remote, num_bytes: u64) -> Result<(usize, u32), Syndrome> {
        let (index, qpn) = qp.remote.ok_or(Syndrome::RetryExceeded)?;
        let peer = self.peers.get_mut(index).and_then(Option::as_mut);
        let peer = peer.ok_or(Syndrome::RetryExceeded)?;
        if !peer.is_alive() {
            return Err(Syndrome::RetryExceeded);
        }
        let range = remote.address..remote.address.saturating_add(num_bytes.max(1));
        let is_failing =
            |failing: &std::ops::Range<u64>| failing.start < range.end && range.start < failing.end;
        if let Some((_, how)) = qp.failing_ranges.iter().find(|(failing, _)| is_failing(failing)) {
            return Err(*how);
        }
        if num_bytes != 0 {
            peer.prepare(remote.rkey);
        }
        let entry = remote_entry(&self.peers, (index, qpn)).ok_or(Syndrome::RetryExceeded)?;
        let is_ready = entry.state.load(Ordering::Acquire) == state::READY
            && entry.peer_qpn.load(Ordering::Relaxed) == qp.qpn;
        if is_ready { Ok((index, qpn)) } else { Err(Syndrome::RetryExceeded) }
    }
}

const fn remote_address(operation: &Operation) -> u64 {
    match operation {
        Operation::Nop | Operation::Dump(_) => 0,
        Operation::Write(remote, _)
        | Operation::WriteImm(remote, ..)
        | Operation::Read(remote, _)
        | Operation::Atomic(remote, ..) => remote.address,
    }
}

fn read_block(qp: &Qp, position: u64) -> [u8; BLOCK_BYTES] {
    let offset = (position & u64::from(qp.depth - 1)) as usize * BLOCK_BYTES;
    let mut block = [0; BLOCK_BYTES];
    for at in (0..BLOCK_BYTES).step_by(8) {
        let value = qp.sq.word64(offset + at).map_or(0, |word| word.load(Ordering::Relaxed));
        block[at..at + 8].copy_from_slice(&value.to_ne_bytes());
    }
    block
}

/// Address of local memory, checked.
fn local(
    memory: &[Option<Memory>],
    domain: u32,
    wanted: &Local,
    access: Access,
) -> Result<*mut u8, Syndrome> {
    let found = memory.get(port::key_index(wanted.lkey)).and_then(Option::as_ref);
    let found = found
        .filter(|m| m.lkey == wanted.lkey && m.domain == domain && m.access.contains(access))
        .ok_or(Syndrome::LocalProtection)?;
    wanted
        .address
        .checked_sub(found.address)
        .and_then(|offset| usize::try_from(offset).ok())
        .and_then(|offset| found.part.at(offset, wanted.num_bytes as usize))
        .ok_or(Syndrome::LocalProtection)
}

fn remote_entry(peers: &[Option<Peer>], peer: (usize, u32)) -> Option<&port::QpEntry> {
    peers.get(peer.0)?.as_ref()?.tables().qps.get(port::qp_index(peer.1)?)
}

/// Domain of the peer's queue pair: what it may be made to reach.
fn remote_domain(peers: &[Option<Peer>], peer: (usize, u32)) -> u32 {
    remote_entry(peers, peer).map_or(0, |entry| entry.domain.load(Ordering::Relaxed))
}

/// The peer's memory behind `remote`. A refusal takes the peer's queue pair out of service as well.
fn pin<'a>(
    peers: &'a [Option<Peer>],
    peer: (usize, u32),
    domain: u32,
    remote: &Remote,
    num_bytes: u64,
    access: Access,
) -> Result<Pinned<'a>, Syndrome> {
    let found = peers.get(peer.0).and_then(Option::as_ref).ok_or(Syndrome::RetryExceeded)?;
    found.pin(domain, remote.rkey, remote.address, num_bytes, access).inspect_err(|_| {
        if let Some(entry) = remote_entry(peers, peer) {
            entry.state.store(state::ERROR, Ordering::Release);
        }
    })
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

const BUDGET: usize = 256;
/// How long a write with immediate data waits for a peer whose NIC takes nothing in.
const INBOX_LIMIT: Duration = Duration::from_secs(3);
const MAX_VIOLATIONS: usize = 1000;
