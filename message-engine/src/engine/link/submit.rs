//! Submission of operations.

use super::{
    EAGER_OVERHEAD, EarlyMessage, Kind, Link, LocalRange, Memory, Op, Port, Stage, TransferError,
};
use crate::fabric::RemoteSegment;

impl<H: Memory> Link<H> {
    /// Queues a message to be sent.
    pub(in crate::engine) fn send(
        &mut self,
        port: &mut impl Port,
        transfer: u32,
        deadline_ns: u64,
        local: LocalRange<H>,
    ) {
        if let Some(idx) = self.admit(port, Kind::Send, transfer, deadline_ns, Some(local)) {
            self.to_send.push_back(idx);
        }
    }

    /// Posts a buffer for the next message.
    pub(in crate::engine) fn recv(
        &mut self,
        port: &mut impl Port,
        transfer: u32,
        deadline_ns: u64,
        local: LocalRange<H>,
    ) {
        let Some(idx) = self.admit(port, Kind::Recv, transfer, deadline_ns, Some(local)) else {
            return;
        };
        match self.unexpected.pop_front() {
            None => self.posted.push_back(idx),
            Some(EarlyMessage::Eager { payload }) => {
                self.take_eager(port, idx, &payload);
                self.eager_freed_in += payload.len() as u64 + EAGER_OVERHEAD;
                self.recycle_buffer(payload);
            }
            Some(EarlyMessage::Announced { seq, bytes }) => {
                self.num_announced_in -= 1;
                self.grant(port, idx, seq, bytes);
            }
        }
    }

    /// Queues a one-sided write.
    pub(in crate::engine) fn write(
        &mut self,
        port: &mut impl Port,
        transfer: u32,
        deadline_ns: u64,
        local: LocalRange<H>,
        remote: RemoteSegment,
    ) {
        let idx = self.admit_one_sided(port, Kind::Write, transfer, deadline_ns, local, remote);
        self.to_admit.extend(idx);
    }

    /// Queues a one-sided read.
    pub(in crate::engine) fn read(
        &mut self,
        port: &mut impl Port,
        transfer: u32,
        deadline_ns: u64,
        local: LocalRange<H>,
        remote: RemoteSegment,
    ) {
        let idx = self.admit_one_sided(port, Kind::Read, transfer, deadline_ns, local, remote);
        self.to_pull.extend(idx);
    }

    /// Admits a one-sided operation. Returns `None` if it has ended already, also because it has no bytes.
    fn admit_one_sided(
        &mut self,
        port: &mut impl Port,
        kind: Kind,
        transfer: u32,
        deadline_ns: u64,
        local: LocalRange<H>,
        remote: RemoteSegment,
    ) -> Option<u32> {
        let idx = self.admit(port, kind, transfer, deadline_ns, Some(local))?;
        let op = self.op(idx);
        op.remote = Some(remote);
        if op.total == 0 {
            self.end(port, idx, Ok(0));
            return None;
        }
        Some(idx)
    }

    pub(super) fn admit(
        &mut self,
        port: &mut impl Port,
        kind: Kind,
        transfer: u32,
        deadline_ns: u64,
        local: Option<LocalRange<H>>,
    ) -> Option<u32> {
        if let Some(reason) = &self.closed {
            let error = TransferError::Disconnected { op: kind.name(), reason: reason.clone() };
            drop(local);
            port.finish(transfer, Err(error));
            return None;
        }
        if self.free.is_empty() && self.ops.len() >= MAX_OPS {
            let detail = "too many transfers of one connection are under way".into();
            drop(local);
            let error = TransferError::Fabric { op: kind.name(), code: 0, detail };
            port.finish(transfer, Err(error));
            return None;
        }
        let total = local.as_ref().map_or(0, |local| local.bytes);
        let op = Op {
            kind,
            stage: Stage::Queued,
            transfer: Some(transfer),
            deadline_ns,
            local,
            remote: None,
            total,
            posted: 0,
            end: total,
            num_in_flight: 0,
            is_scheduled: false,
            seq: 0,
            notification: Vec::new(),
            error: None,
        };
        self.next_deadline_ns = self.next_deadline_ns.min(deadline_ns);
        Some(match self.free.pop() {
            Some(idx) => {
                self.ops[idx as usize] = Some(op);
                idx
            }
            None => {
                self.ops.push(Some(op));
                self.ops.len() as u32 - 1
            }
        })
    }
}

/// Most operations at a time: a completion can name no more.
const MAX_OPS: usize = 1 << 20;
