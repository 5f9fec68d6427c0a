//! Receives: turns arrived immediate data into completions.

use std::sync::atomic::Ordering;

use crate::format::{Cqe, CqeKind, RECEIVE_BYTES, Syndrome, empty_receive};
use crate::nic::{Nic, Qp, QpState, Violation};
use crate::port::NUM_INBOX;

impl Nic {
    /// Turns arrived immediate data into completions, and publishes the number of posted receives to the peer.
    /// Receives of a queue pair that is out of service return flushed.
    pub(super) fn receive(&mut self, qp: &mut Qp, index: usize) -> usize {
        if qp.recv_cq.is_none() {
            return 0;
        }
        let num_new = self.count_receives(qp, index);
        let entry = &self.port.tables().qps[index];
        let mut arrived = Vec::new();
        while entry.num_used.load(Ordering::Acquire) != qp.num_received as u32
            && arrived.len() < NUM_INBOX
        {
            let found = &entry.inbox[qp.num_received as usize % NUM_INBOX];
            let imm = found.imm.load(Ordering::Relaxed);
            let num_bytes = found.num_bytes.load(Ordering::Relaxed);
            arrived.push(receive_completion(qp, Ok(CqeKind::WriteImm(imm)), num_bytes));
            qp.num_received += 1;
            entry.inbox_head.store(qp.num_received, Ordering::Release);
        }
        // Data that arrives behind the flushes finds no receive.
        if qp.num_flushed != 0 {
            qp.num_flushed = qp.num_flushed.saturating_sub(arrived.len() as u32);
            arrived.clear();
        }
        if qp.state == QpState::Error {
            let first = (qp.num_received as u32).wrapping_add(qp.num_flushed);
            let posted = self.port.tables().qps[index].num_receives.load(Ordering::Relaxed);
            // A number beyond the queue's depth comes from the record, and was noted as a violation.
            let most = qp.recv_queue.as_ref().map_or(u32::from(u16::MAX), |queue| queue.depth);
            let num_left = posted.wrapping_sub(first).min(most.saturating_sub(qp.num_flushed));
            for nth in 0..num_left {
                let cqe = receive_completion(qp, Err(Syndrome::Flushed), 0);
                arrived.push(Cqe { counter: first.wrapping_add(nth) as u16, ..cqe });
            }
            qp.num_flushed += num_left;
        }
        let num_arrived = arrived.len();
        self.complete_receives(qp, &arrived);
        num_arrived + num_new
    }

    /// Whether the peer knows all receives, all arrived data was reported, and nothing is to be flushed.
    pub(super) fn has_received_all(&self, qp: &Qp, index: usize) -> bool {
        if qp.recv_cq.is_none() {
            return true;
        }
        let entry = &self.port.tables().qps[index];
        let num_posted = entry.num_receives.load(Ordering::Relaxed);
        let num_received = qp.num_received as u32;
        let is_flushed =
            qp.state != QpState::Error || num_posted == num_received.wrapping_add(qp.num_flushed);
        posted_receives(qp) as u16 == num_posted as u16
            && entry.num_used.load(Ordering::Acquire) == num_received
            && is_flushed
    }

    /// Publishes newly posted receives to the peer. Returns their number.
    ///
    /// SYNC POINT `receive`: pairs with `take_completion` of the device functions.
    fn count_receives(&mut self, qp: &mut Qp, index: usize) -> usize {
        let record = posted_receives(qp);
        let entry = &self.port.tables().qps[index];
        // The record has 16 bits.
        let known = entry.num_receives.load(Ordering::Relaxed);
        let num_new = (record as u16).wrapping_sub(known as u16);
        if num_new == 0 {
            return 0;
        }
        let violation = check_receives(qp, known, num_new);
        if violation.is_some_and(|violation| self.note(violation)) {
            self.fail(qp);
        }
        // Counts receives with a violation, too, so that it is noted only once.
        let entry = &self.port.tables().qps[index];
        entry.num_receives.store(known.wrapping_add(num_new.into()), Ordering::Release);
        num_new.into()
    }

    fn complete_receives(&mut self, qp: &mut Qp, arrived: &[Cqe]) {
        for cqe in arrived {
            let cq = qp.recv_cq.and_then(|cq| self.cqs.get_mut(cq)).and_then(Option::as_mut);
            let Some(cq) = cq else { return };
            if !cq.store(cqe) {
                let violation = Violation::CompletionOverrun { qpn: qp.qpn, depth: cq.depth() };
                self.note(violation);
                self.fail(qp);
                return;
            }
        }
    }
}

/// Receives that were posted since reset, as the record has them.
fn posted_receives(qp: &Qp) -> u32 {
    qp.dbrec.word32(0).map_or(0, |word| u32::from_be(word.load(Ordering::Acquire)))
}

fn receive_completion(qp: &Qp, status: Result<CqeKind, Syndrome>, num_bytes: u32) -> Cqe {
    let (qpn, counter) = (qp.qpn, qp.num_received as u16);
    Cqe { status, qpn, opcode: 0, counter, num_bytes, is_receive: true }
}

/// Finds a violation in `num_new` receives behind `known` ones.
fn check_receives(qp: &Qp, known: u32, num_new: u16) -> Option<Violation> {
    let queue = qp.recv_queue.as_ref()?;
    let (qpn, depth) = (qp.qpn, queue.depth);
    let used = known.wrapping_sub(qp.num_received as u32);
    let outstanding = u64::from(used) + u64::from(num_new);
    if outstanding > depth.into() {
        return Some(Violation::ReceiveOverrun { qpn, outstanding, depth });
    }
    let first = qp.num_received + u64::from(used);
    (first..first + u64::from(num_new)).find_map(|number| {
        let offset = (number % u64::from(depth)) as usize * queue.stride;
        let mut found = [0; RECEIVE_BYTES];
        for at in (0..RECEIVE_BYTES).step_by(8) {
            let word = queue.part.word64(offset + at)?.load(Ordering::Relaxed);
            found[at..at + 8].copy_from_slice(&word.to_ne_bytes());
        }
        (found != empty_receive()).then_some(Violation::Receive { qpn, number, found })
    })
}
