//! Progress of a NIC: executes announced requests and reports them.
//!
//! The NIC keeps this order on one queue pair, whatever the adversary does. Requests are executed one after the
//! other. A write's bytes are in place before its completion, and before a later atomic, read or write with
//! immediate data. They are also in place before a later write, unless the memory was registered with relaxed
//! ordering. The answers to reads and atomics are in place before their completion and before a later fenced
//! request. Nothing is ordered across queue pairs.

mod deferred;
mod execute;
mod reach;
mod receive;

use std::sync::atomic::Ordering;

use rand::RngExt;
use rand::seq::SliceRandom;

use crate::format::{
    BLOCK_BYTES, Cqe, CqeKind, Head, Operation, SEGMENT_BYTES, Syndrome, Wqe, decode_doorbell,
    doorbell_word,
};
use crate::nic::{DoorbellMode, Nic, Qp, QpState, TraceEntry, UnreportedRequest, Violation};
use crate::port::{self, state};

enum Step {
    Done,
    Blocked,
}

impl Nic {
    /// Makes a bounded amount of progress: takes doorbells, executes requests, writes completions. Returns the
    /// number of steps done, 0 when there was nothing to do. Does not block.
    pub fn progress(&mut self) -> usize {
        let mut work = 0;
        let num_qps = self.qps.len();
        // The adversary serves queue pairs in any order; a plain NIC serves them in turn.
        let start = self.rng.as_mut().map_or(0, |rng| rng.random_range(0..num_qps.max(1)));
        for i in 0..num_qps {
            let index = (start + i) % num_qps;
            let Some(mut qp) = self.qps[index].take() else { continue };
            if self.rng.as_mut().is_some_and(|rng| rng.random_ratio(1, 4)) {
                // A queue pair that is passed over counts as work only if it has something to do.
                work += usize::from(!self.is_at_rest(&qp, index));
            } else {
                work += self.serve(&mut qp, index);
            }
            self.qps[index] = Some(qp);
        }
        work
    }

    /// Whether serving it would do nothing.
    fn is_at_rest(&self, qp: &Qp, index: usize) -> bool {
        if qp.is_stalled || qp.state == QpState::Reset {
            return true;
        }
        // The peer may have refused a request, and this side has not seen that yet.
        let is_refused = qp.state != QpState::Error && self.is_refused(index);
        let word = self.doorbell_of(qp);
        let is_rung = word != 0 && decode_doorbell(word) != (qp.qpn, qp.produced as u16);
        let is_done =
            qp.unreported.is_empty() && qp.deferred.is_empty() && qp.executed >= qp.produced;
        !is_refused && !is_rung && is_done && self.has_received_all(qp, index)
    }

    /// Whether a peer has taken a queue pair out of service.
    fn is_refused(&self, index: usize) -> bool {
        self.port.tables().qps[index].state.load(Ordering::Acquire) == state::ERROR
    }

    fn serve(&mut self, qp: &mut Qp, index: usize) -> usize {
        if qp.is_stalled || qp.state == QpState::Reset {
            return 0;
        }
        if self.is_refused(index) {
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
            let num_deferred = qp.deferred.len();
            let num_reports = rng.random_range(0..=qp.unreported.len());
            work += num_deferred + qp.unreported.len();
            if num_deferred > 0 && rng.random_ratio(1, 2) {
                qp.deferred.shuffle(rng);
                let num_left = rng.random_range(0..num_deferred);
                // Fewer are left if one fails.
                while qp.deferred.len() > num_left {
                    self.land_last(qp);
                }
            }
            self.report(qp, num_reports);
        } else {
            self.report(qp, usize::MAX);
        }
        work
    }

    /// The announcement of requests, in the format of the doorbell register. 0: none yet.
    fn doorbell_of(&self, qp: &Qp) -> u64 {
        match self.config.doorbell {
            DoorbellMode::Record if qp.has_record => {
                doorbell_word(qp.qpn, u64::from(record_of(qp)))
            }
            _ => qp.doorbell.word64(0).map_or(0, |word| word.load(Ordering::Acquire)),
        }
    }

    /// SYNC POINT `doorbell`: pairs with `ring_doorbell` of the device functions.
    fn take_doorbell(&mut self, qp: &mut Qp) -> bool {
        let word = self.doorbell_of(qp);
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
            // Dropped, unless a newer one has come meanwhile.
            if let Some(register) = qp.doorbell.word64(0) {
                let _ = register.compare_exchange(word, 0, Ordering::AcqRel, Ordering::Relaxed);
            }
            return false;
        }
        let record = record_of(qp) as u16;
        let mut violation = None;
        let mut advance = advance;
        if qpn != qp.qpn {
            violation = Some(Violation::QueuePair { qpn: qp.qpn, what: "a doorbell", found: qpn });
            advance = 0;
        } else if advance > 1 << 15 {
            violation = Some(Violation::Backwards { qpn, from: known, to: end });
            advance = 0;
        } else if (self.config.is_strict || self.config.doorbell == DoorbellMode::Checked)
            && qp.has_record
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
            // A doorbell that stays wrong is recorded once.
            if let (0, Some(register)) = (advance, qp.doorbell.word64(0)) {
                let _ = register.compare_exchange(word, 0, Ordering::AcqRel, Ordering::Relaxed);
            }
            if self.note(violation) {
                // Requests that such a doorbell should have announced are in the record, if anywhere. Taking them
                // from there returns them flushed.
                if advance == 0 && qp.has_record {
                    qp.produced += announced(qp, record);
                }
                self.fail(qp);
            }
        }
        true
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
            is_receive: false,
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
                    match qp.state {
                        // An earlier effect could not land, which failed the queue pair.
                        QpState::Error => Err(Syndrome::Flushed),
                        _ => self.execute(qp, position, &wqe),
                    }
                }
            };
            match result {
                Ok(Some(num_bytes)) => {
                    cqe.num_bytes = num_bytes;
                    self.num_requests += 1;
                    if self.config.keeps_trace {
                        let opcode = head.opcode;
                        self.executed.push(TraceEntry { qpn: qp.qpn, position, opcode, address });
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
        qp.unreported.push_back(UnreportedRequest {
            cqe,
            position,
            end: qp.executed,
            is_reported: is_signalled,
        });
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

    /// Writes up to `max` completions.
    fn report(&mut self, qp: &mut Qp, max: usize) {
        for _ in 0..max {
            let Some(end) = qp.unreported.front().map(|request| request.end) else { return };
            // An effect that cannot land changes the completion.
            self.land_before(qp, end);
            let Some(UnreportedRequest { cqe, is_reported, .. }) = qp.unreported.pop_front() else {
                return;
            };
            if !is_reported {
                continue;
            }
            let Some(cq) = self.cqs.get_mut(qp.send_cq).and_then(Option::as_mut) else { return };
            if cq.store(&cqe) {
                qp.reported = end;
            } else {
                let violation = Violation::CompletionOverrun { qpn: qp.qpn, depth: cq.depth() };
                self.note(violation);
                self.fail(qp);
                qp.unreported.clear();
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

    /// Records a violation, up to a limit. Returns `true` when the queue pair must fail for it.
    fn note(&mut self, violation: Violation) -> bool {
        if self.violations.len() < MAX_VIOLATIONS {
            self.violations.push(violation);
        }
        self.config.is_strict
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

/// The send word of the doorbell record.
fn record_of(qp: &Qp) -> u32 {
    qp.dbrec.word32(4).map_or(0, |word| u32::from_be(word.load(Ordering::Acquire)))
}

/// Blocks that the record announces beyond those known, where that number is possible.
fn announced(qp: &Qp, record: u16) -> u64 {
    let advance = u64::from(record.wrapping_sub(qp.produced as u16));
    let fits = qp.produced + advance - qp.reported <= u64::from(qp.depth);
    if fits { advance } else { 0 }
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

const BUDGET: usize = 256;
const MAX_VIOLATIONS: usize = 1000;
