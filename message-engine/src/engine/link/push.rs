//! Transfers of bytes through the fabric.

use std::collections::VecDeque;

use super::{Kind, Link, MAX_IN_FLIGHT, Memory, Port, Stage, Tag, TransferError};
use crate::credit::{Admission, Credit, Event};
use crate::engine::wire::{Frame, Outcome};
use crate::fabric::{LocalSegment, PostOutcome, RemoteSegment};
use p2p_core::endpoint::PostError;

/// Result of posting an operation.
enum PostProgress {
    /// The fabric has got all of it.
    Complete,
    /// The fabric has no room, or the operation has no credit.
    Blocked,
    /// The fabric refused it.
    Failed(TransferError),
}

impl<H: Memory> Link<H> {
    /// Handles the completion of a part.
    pub(in crate::engine) fn on_done(
        &mut self,
        port: &mut impl Port,
        tag: Tag,
        result: Result<(), PostError>,
    ) {
        let Some(Some(op)) = self.ops.get_mut(tag.op as usize) else { return };
        op.num_in_flight -= 1;
        self.num_in_flight -= 1;
        // These bytes are no longer under way, with or without success.
        let (bytes, kind) = (u64::from(tag.bytes), op.kind);
        if kind == Kind::Read {
            self.pulled += bytes;
        } else {
            let arrived = if op.is_scheduled { &mut self.arrived.0 } else { &mut self.arrived.1 };
            *arrived += bytes;
        }
        if let Err(error) = result {
            op.error.get_or_insert_with(|| TransferError::post(kind.name(), &error));
            if op.posted < op.end {
                self.withdraw_rest(tag.op);
                self.unqueue(tag.op);
            }
        }
        self.finish_if_complete(port, tag.op);
    }

    /// Requests credit for pushes, and posts them as far as room and credit allow.
    pub(super) fn push(&mut self, port: &mut impl Port) {
        while let Some(&idx) = self.to_admit.front() {
            let total = self.op(idx).total;
            match self.credit.submit(total) {
                Ok(Admission::Unscheduled) => self.unscheduled.push_back(idx),
                Ok(Admission::Scheduled(_)) => {
                    self.op(idx).is_scheduled = true;
                    self.scheduled.push_back(idx);
                }
                // Retried when more has been sent.
                Err(_) => break,
            }
            self.op(idx).stage = Stage::Moving;
            self.to_admit.pop_front();
        }
        self.post_queue(port, |link| &mut link.unscheduled);
        self.post_queue(port, |link| &mut link.scheduled);
    }

    /// Requests credit for reads, and posts them as far as room and credit allow.
    pub(super) fn pull(&mut self, port: &mut impl Port) {
        while let Some(&idx) = self.to_pull.front() {
            let total = self.op(idx).total;
            // Waits for earlier reads if all of them together exceed the most that can be announced.
            let Ok(Admission::Scheduled(_)) = self.pull_credit.submit(total) else { break };
            let op = self.op(idx);
            op.is_scheduled = true;
            op.stage = Stage::Moving;
            self.to_pull.pop_front();
            self.pulling.push_back(idx);
        }
        self.report_pulls(port);
        self.post_queue(port, |link| &mut link.pulling);
        // A failed read withdraws its announced bytes.
        self.report_pulls(port);
    }

    /// Handles new credit for reads.
    pub(in crate::engine) fn on_pull_credit(&mut self, credit: Credit) {
        let credit = Credit { unscheduled: 0, ..credit };
        if let Err(error) = self.pull_credit.on_credit(credit) {
            tracing::error!(%error, "reads are out of step with their credit");
        }
    }

    /// Reports changed counters of reads to this side's own receiver of credits.
    fn report_pulls(&mut self, port: &mut impl Port) {
        let demand = self.pull_credit.demand();
        if demand != self.pull_demand_reported {
            self.pull_demand_reported = demand;
            self.ask_pull(port, Event::Demand(demand));
        }
        if self.pulled != self.pulled_reported {
            self.pulled_reported = self.pulled;
            self.ask_pull(port, Event::Received(self.pulled));
        }
    }

    fn ask_pull(&mut self, port: &mut impl Port, event: Event) {
        match port.pull_credit(event) {
            Ok(credit) => self.on_pull_credit(credit),
            Err(error) => tracing::error!(%error, "reads are out of step with their credit"),
        }
    }

    /// Sends changed counters to the peer.
    pub(super) fn report_counters(&mut self) {
        let demand = self.credit.demand();
        if demand != self.demand_reported {
            self.demand_reported = demand;
            Frame::Demand(demand).encode(&mut self.out);
        }
        // Unscheduled bytes are reported late: the peer's allowance lasts for twice as many.
        let (scheduled, unscheduled) = self.arrived;
        let is_due =
            unscheduled - self.arrived_reported.1 >= self.theirs.unscheduled_bytes.div_ceil(2);
        if scheduled != self.arrived_reported.0 || is_due && unscheduled != self.arrived_reported.1
        {
            self.arrived_reported = self.arrived;
            Frame::Arrived { scheduled, unscheduled }.encode(&mut self.out);
        }
        let eager = (self.eager_freed_in, self.eager_arrived_in);
        if eager != self.eager_reported {
            self.eager_reported = eager;
            Frame::EagerCredit { freed: eager.0, arrived: eager.1 }.encode(&mut self.out);
        }
        self.report_notify_credit();
    }

    /// Cancels the bytes of an operation that were not posted, and withdraws their credit.
    pub(super) fn withdraw_rest(&mut self, idx: u32) {
        let was_admitted = !self.to_admit.contains(&idx) && !self.to_pull.contains(&idx);
        let Some(Some(op)) = self.ops.get_mut(idx as usize) else { return };
        let rest = op.end - op.posted;
        op.end = op.posted;
        if op.stage != Stage::Moving || !was_admitted {
            return;
        }
        if op.is_scheduled {
            let is_read = op.kind == Kind::Read;
            let credit = if is_read { &mut self.pull_credit } else { &mut self.credit };
            // The bytes are part of the backlog, so this cannot fail.
            let _ = credit.withdraw(rest);
        } else {
            self.arrived.1 += rest;
        }
    }

    /// Posts the operations of a queue, until one has to wait.
    fn post_queue(
        &mut self,
        port: &mut impl Port,
        queue: impl Fn(&mut Self) -> &mut VecDeque<u32>,
    ) {
        while let Some(&idx) = queue(self).front() {
            if !self.post(port, idx) {
                break;
            }
            queue(self).pop_front();
            self.finish_if_complete(port, idx);
        }
    }

    /// Posts an operation. Returns false if it has to wait.
    fn post(&mut self, port: &mut impl Port, idx: u32) -> bool {
        match self.try_post(port, idx) {
            PostProgress::Complete => true,
            PostProgress::Blocked => false,
            PostProgress::Failed(error) => {
                self.withdraw_rest(idx);
                self.op(idx).error.get_or_insert(error);
                true
            }
        }
    }

    fn try_post(&mut self, port: &mut impl Port, idx: u32) -> PostProgress {
        let most = self.chunk_bytes.min(port.max_operation_bytes());
        loop {
            let Some(Some(op)) = self.ops.get_mut(idx as usize) else {
                return PostProgress::Complete;
            };
            let (Some(local), Some(remote)) = (&op.local, op.remote) else {
                return PostProgress::Complete;
            };
            let mut bytes = (op.end - op.posted).min(most);
            if bytes == 0 {
                return PostProgress::Complete;
            }
            let is_read = op.kind == Kind::Read;
            let credit = if is_read { &mut self.pull_credit } else { &mut self.credit };
            if op.is_scheduled {
                bytes = bytes.min(credit.allowance());
            }
            if bytes == 0 || self.num_in_flight >= MAX_IN_FLIGHT {
                return PostProgress::Blocked;
            }
            let here =
                LocalSegment { region: local.region, offset: local.offset + op.posted, bytes };
            let there = RemoteSegment { offset: remote.offset + op.posted, ..remote };
            let tag = Tag { op: idx, bytes: bytes as u32 };
            let posted = if op.kind == Kind::Read {
                port.read(here, there, tag)
            } else {
                port.write(there, here, tag)
            };
            match posted {
                Ok(PostOutcome::Accepted) => {}
                Ok(PostOutcome::Full) => {
                    self.waits_for_fabric = true;
                    return PostProgress::Blocked;
                }
                Err(error) => {
                    return PostProgress::Failed(TransferError::post(op.kind.name(), &error));
                }
            }
            op.stage = Stage::Moving;
            op.posted += bytes;
            op.num_in_flight += 1;
            self.num_in_flight += 1;
            if op.is_scheduled {
                // The bytes are within the allowance, so this cannot fail.
                let _ = credit.sent(bytes);
            }
        }
    }

    /// Ends an operation that has nothing under way and nothing to be posted.
    fn finish_if_complete(&mut self, port: &mut impl Port, idx: u32) {
        let Some(Some(op)) = self.ops.get_mut(idx as usize) else { return };
        if op.num_in_flight > 0 || op.posted < op.end {
            return;
        }
        let result = op.error.take().map_or(Ok(op.total), Err);
        if op.kind == Kind::Send && self.closed.is_none() {
            let outcome = if result.is_ok() { Outcome::Written } else { Outcome::Failed };
            Frame::Finish { seq: op.seq, outcome }.encode(&mut self.out);
        }
        self.end(port, idx, result);
    }
}
