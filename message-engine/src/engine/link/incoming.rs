//! Frames of the peer.

use super::{
    EAGER_OVERHEAD, EarlyMessage, Kind, Link, LocalRange, MAX_ANNOUNCED, MAX_UNREAD, Memory, Port,
    Stage, TransferError, invalid_value,
};
use crate::credit::Event;
use crate::engine::wire::{Frame, FrameError, Outcome, Refusal};
use crate::fabric::{LocalSegment, RemoteSegment};

impl<H: Memory> Link<H> {
    /// Handles a frame. Returns true if the peer has closed the connection.
    ///
    /// # Errors
    /// [`FrameError`] if no correct peer could have sent it. The caller must close the connection.
    pub(in crate::engine) fn on_frame(
        &mut self,
        port: &mut impl Port,
        frame: Frame<'_>,
    ) -> Result<bool, FrameError> {
        if self.closed.is_some() {
            return Ok(false);
        }
        match frame {
            Frame::Notify { total, part } => self.on_notify(port, total, part)?,
            Frame::NotifyCredit { granted, arrived } => {
                self.on_notify_credit(port, granted, arrived)?;
            }
            Frame::Eager { seq, payload } => self.on_eager(port, seq, payload)?,
            Frame::EagerCredit { freed, arrived } => self.on_eager_credit(port, freed, arrived)?,
            Frame::Announce { seq, bytes } => self.on_announce(port, seq, bytes)?,
            Frame::Grant { seq, target } => self.on_grant(port, seq, target)?,
            Frame::Refuse { seq, capacity, why } => self.on_refuse(port, seq, capacity, why)?,
            Frame::Finish { seq, outcome } => self.on_finish(port, seq, outcome)?,
            Frame::Withdraw { seq } => self.on_withdraw(seq)?,
            Frame::Demand(demand) => port.credit(Event::Demand(demand))?,
            Frame::Credit(credit) => self.credit.on_credit(credit)?,
            Frame::Arrived { scheduled, unscheduled } => {
                port.credit(Event::Received(scheduled))?;
                port.credit(Event::UnscheduledReceived(unscheduled))?;
            }
            Frame::Goodbye => return Ok(true),
        }
        // Answers are never delayed, so a peer that asks and never reads would fill this side's memory.
        let waiting = self.output().len();
        if waiting > MAX_UNREAD {
            return Err(invalid_value(
                "bytes that wait to be read",
                waiting as u64,
                MAX_UNREAD as u64,
            ));
        }
        Ok(false)
    }

    /// Copies a short message into the buffer of a receive.
    pub(super) fn take_eager(&mut self, port: &mut impl Port, idx: u32, payload: &[u8]) {
        let op = self.op(idx);
        let (bytes, capacity) = (payload.len() as u64, op.total);
        let is_host = op.local.as_ref().is_none_or(|local| local.hold.is_host());
        let result = if bytes > capacity {
            Err(TransferError::Truncated { op: Kind::Recv.name(), bytes, capacity })
        } else if bytes > 0 && !is_host {
            let detail = "a short message came ahead, and this processor does not copy into another \
                          device's memory; start this engine with `eager_bytes` 0, or receive into \
                          memory of the host";
            Err(TransferError::Fabric { op: Kind::Recv.name(), code: 0, detail: detail.into() })
        } else {
            if let Some(local) = &op.local {
                local.hold.store(local.offset, payload);
            }
            Ok(bytes)
        };
        self.end(port, idx, result);
    }

    /// Lets the peer write the announced message into the buffer of a receive.
    pub(super) fn grant(&mut self, port: &mut impl Port, idx: u32, seq: u64, bytes: u64) {
        let op = self.op(idx);
        let capacity = op.total;
        let op_name = Kind::Recv.name();
        let granted = match &op.local {
            Some(local) if bytes <= capacity => {
                let part = LocalSegment { region: local.region, offset: local.offset, bytes };
                let failed = |error| (Refusal::NotOpened, TransferError::post(op_name, &error));
                port.grant(part).map_err(failed)
            }
            _ => {
                let error = TransferError::Truncated { op: op_name, bytes, capacity };
                Err((Refusal::TooShort, error))
            }
        };
        let (why, error) = match granted {
            Ok(target) => {
                (op.stage, op.seq, op.posted) = (Stage::Granted, seq, bytes);
                self.granted.insert(seq, idx);
                return Frame::Grant { seq, target }.encode(&mut self.out);
            }
            Err(error) => error,
        };
        Frame::Refuse { seq, capacity, why }.encode(&mut self.out);
        self.end(port, idx, Err(error));
    }

    fn on_eager(
        &mut self,
        port: &mut impl Port,
        seq: u64,
        payload: &[u8],
    ) -> Result<(), FrameError> {
        self.next_in(seq)?;
        let bytes = payload.len() as u64;
        if bytes > self.ours.eager_bytes {
            return Err(invalid_value("bytes of a short message", bytes, self.ours.eager_bytes));
        }
        self.eager_cost_in += bytes + EAGER_OVERHEAD;
        let waiting = self.eager_cost_in - self.eager_freed_in;
        if waiting > self.ours.eager_window {
            return Err(invalid_value("short messages ahead", waiting, self.ours.eager_window));
        }
        self.eager_arrived_in += 1;
        if let Some(idx) = self.posted.pop_front() {
            self.eager_freed_in += bytes + EAGER_OVERHEAD;
            self.take_eager(port, idx, payload);
        } else {
            let mut kept = self.reuse_buffer();
            kept.extend_from_slice(payload);
            self.unexpected.push_back(EarlyMessage::Eager { payload: kept });
        }
        Ok(())
    }

    fn on_eager_credit(
        &mut self,
        port: &mut impl Port,
        freed: u64,
        arrived: u64,
    ) -> Result<(), FrameError> {
        if freed < self.eager_freed_out || freed > self.eager_cost_out {
            return Err(invalid_value("freed by short messages", freed, self.eager_cost_out));
        }
        let most = self.eager_arrived_out + self.eager_sent.len() as u64;
        if arrived < self.eager_arrived_out || arrived > most {
            return Err(invalid_value("short messages arrived", arrived, most));
        }
        self.eager_freed_out = freed;
        while self.eager_arrived_out < arrived {
            self.eager_arrived_out += 1;
            if let Some(idx) = self.eager_sent.pop_front() {
                let bytes = self.op(idx).total;
                self.end(port, idx, Ok(bytes));
            }
        }
        Ok(())
    }

    fn on_announce(
        &mut self,
        port: &mut impl Port,
        seq: u64,
        bytes: u64,
    ) -> Result<(), FrameError> {
        self.next_in(seq)?;
        if bytes == 0 {
            return Err(invalid_value("bytes of an announced message", 0, 1));
        }
        if let Some(idx) = self.posted.pop_front() {
            self.grant(port, idx, seq, bytes);
            return Ok(());
        }
        if self.num_announced_in >= MAX_ANNOUNCED {
            let found = self.num_announced_in as u64 + 1;
            return Err(invalid_value("announced messages", found, MAX_ANNOUNCED as u64));
        }
        self.num_announced_in += 1;
        self.unexpected.push_back(EarlyMessage::Announced { seq, bytes });
        Ok(())
    }

    fn on_grant(
        &mut self,
        port: &mut impl Port,
        seq: u64,
        target: RemoteSegment,
    ) -> Result<(), FrameError> {
        self.check_out(seq)?;
        let Some(idx) = self.announced.remove(&seq) else {
            // The message was withdrawn meanwhile. The receiver waits for the answer to its grant.
            let outcome = Outcome::Withdrawn;
            Frame::Finish { seq, outcome }.encode(&mut self.out);
            return Ok(());
        };
        let op = self.op(idx);
        let total = op.total;
        let room = target.region.bytes.saturating_sub(target.offset);
        if total > room {
            let outcome = Outcome::Failed;
            Frame::Finish { seq, outcome }.encode(&mut self.out);
            let error = TransferError::Truncated { op: "send", bytes: total, capacity: room };
            self.end(port, idx, Err(error));
            return Err(invalid_value("room of a granted buffer", room, total));
        }
        (op.stage, op.remote) = (Stage::Moving, Some(target));
        self.to_admit.push_back(idx);
        Ok(())
    }

    fn on_refuse(
        &mut self,
        port: &mut impl Port,
        seq: u64,
        capacity: u64,
        why: Refusal,
    ) -> Result<(), FrameError> {
        self.check_out(seq)?;
        // Otherwise the message was withdrawn meanwhile.
        let Some(idx) = self.announced.remove(&seq) else { return Ok(()) };
        let (op, bytes) = (Kind::Send.name(), self.op(idx).total);
        let error = match why {
            Refusal::TooShort => TransferError::Truncated { op, bytes, capacity },
            Refusal::NotOpened => TransferError::NotOpened { op, bytes },
        };
        self.end(port, idx, Err(error));
        if why == Refusal::TooShort && capacity >= bytes {
            return Err(invalid_value("bytes of a buffer that is too short", capacity, bytes));
        }
        Ok(())
    }

    fn on_finish(
        &mut self,
        port: &mut impl Port,
        seq: u64,
        outcome: Outcome,
    ) -> Result<(), FrameError> {
        let idx = self
            .granted
            .remove(&seq)
            .ok_or_else(|| invalid_value("finish of a message that was not granted", seq, 0))?;
        let bytes = self.op(idx).posted;
        if let Some(LocalRange { region, offset, .. }) = self.op(idx).local {
            port.end_grant(LocalSegment { region, offset, bytes });
        }
        let op = Kind::Recv.name();
        let result = match outcome {
            Outcome::Written => Ok(bytes),
            Outcome::Withdrawn => Err(TransferError::Withdrawn { op }),
            Outcome::Failed => Err(TransferError::Fabric {
                op,
                code: 0,
                detail: "the peer could not write the message; its error has the reason".into(),
            }),
        };
        self.end(port, idx, result);
        Ok(())
    }

    fn on_withdraw(&mut self, seq: u64) -> Result<(), FrameError> {
        if seq >= self.next_in_seq {
            return Err(invalid_value("withdrawn message", seq, self.next_in_seq));
        }
        let found = self.unexpected.iter().position(
            |message| matches!(message, EarlyMessage::Announced { seq: other, .. } if *other == seq),
        );
        // Otherwise the message was granted or refused meanwhile.
        if let Some(at) = found {
            self.unexpected.remove(at);
            self.num_announced_in -= 1;
        }
        Ok(())
    }

    /// Checks that a message has the next sequence number.
    fn next_in(&mut self, seq: u64) -> Result<(), FrameError> {
        if seq != self.next_in_seq {
            return Err(invalid_value("sequence number of a message", seq, self.next_in_seq));
        }
        self.next_in_seq += 1;
        Ok(())
    }

    fn check_out(&self, seq: u64) -> Result<(), FrameError> {
        if seq >= self.next_out_seq {
            return Err(invalid_value("answer to a message", seq, self.next_out_seq));
        }
        Ok(())
    }
}
