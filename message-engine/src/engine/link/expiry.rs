//! Ends of operations at their deadlines and with the connection.

use std::collections::VecDeque;

use super::{CloseReason, Kind, Link, Memory, Port, Stage, TransferError};
use crate::engine::wire::{Frame, Outcome};

impl<H: Memory> Link<H> {
    /// Ends operations whose deadline has passed at `now_ns`. An error names an operation whose memory is in use, so
    /// that the connection must be closed.
    pub(in crate::engine) fn expire(
        &mut self,
        port: &mut impl Port,
        now_ns: u64,
    ) -> Result<(), &'static str> {
        if now_ns < self.next_deadline_ns {
            return Ok(());
        }
        self.next_deadline_ns = u64::MAX;
        for idx in 0..self.ops.len() as u32 {
            let Some(op) = &self.ops[idx as usize] else { continue };
            if op.transfer.is_none() {
                continue;
            }
            if op.deadline_ns > now_ns {
                self.next_deadline_ns = self.next_deadline_ns.min(op.deadline_ns);
                continue;
            }
            let (kind, stage) = (op.kind, op.stage);
            let late = TransferError::Deadline { op: kind.name() };
            if stage == Stage::Granted || op.num_in_flight > 0 {
                self.op(idx).error.get_or_insert(late);
                return Err(kind.name());
            }
            let (seq, late) = (op.seq, Err(late));
            match stage {
                // The peer gets it all the same, but the user's buffer is free.
                Stage::Sent => {
                    let op = self.op(idx);
                    op.local = None;
                    if let Some(transfer) = op.transfer.take() {
                        port.finish(transfer, late);
                    }
                }
                Stage::Announced => {
                    self.announced.remove(&seq);
                    Frame::Withdraw { seq }.encode(&mut self.out);
                    self.end(port, idx, late);
                }
                Stage::Queued | Stage::Moving | Stage::Granted => {
                    let was_granted = kind == Kind::Send && stage == Stage::Moving;
                    self.withdraw_rest(idx);
                    self.unqueue(idx);
                    if was_granted {
                        let outcome = Outcome::Withdrawn;
                        Frame::Finish { seq, outcome }.encode(&mut self.out);
                    }
                    self.end(port, idx, late);
                }
            }
        }
        Ok(())
    }

    /// Ends every operation that the fabric does not hold. The others end with their completions. The fabric must have
    /// closed the peer before.
    pub(in crate::engine) fn close(&mut self, port: &mut impl Port, reason: &CloseReason) {
        if self.closed.is_some() {
            return;
        }
        self.closed = Some(reason.clone());
        for queue in self.queues() {
            queue.clear();
        }
        self.eager_sent.clear();
        self.announced.clear();
        self.granted.clear();
        for idx in 0..self.ops.len() as u32 {
            let Some(op) = &mut self.ops[idx as usize] else { continue };
            let error = TransferError::Disconnected { op: op.kind.name(), reason: reason.clone() };
            if op.num_in_flight > 0 {
                op.end = op.posted;
                op.error.get_or_insert(error);
            } else {
                let error = op.error.take().unwrap_or(error);
                self.end(port, idx, Err(error));
            }
        }
    }

    /// Takes an operation out of every queue.
    pub(super) fn unqueue(&mut self, idx: u32) {
        for queue in self.queues() {
            queue.retain(|other| *other != idx);
        }
        self.notices.unqueue(idx);
    }

    /// All queues of operations, except those of notifications.
    fn queues(&mut self) -> [&mut VecDeque<u32>; 7] {
        [
            &mut self.to_send,
            &mut self.posted,
            &mut self.to_admit,
            &mut self.unscheduled,
            &mut self.scheduled,
            &mut self.to_pull,
            &mut self.pulling,
        ]
    }
}
