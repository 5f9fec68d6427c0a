//! Notifications: bytes of any length, in order, none dropped.
//!
//! The receiver reports how many bytes may have been sent in all. Notifications beyond that stay at the sender. A
//! notification that is longer than the window is granted whole once it is being received.

use std::collections::VecDeque;

use super::{Kind, Limits, Link, Memory, Port, Stage, invalid_value};
use crate::engine::wire::{Frame, FrameError, MAX_BODY_BYTES};

/// The notifications of a connection.
#[derive(Debug)]
pub(super) struct Notices {
    to_send: VecDeque<u32>,
    /// Bytes sent of the first one in `to_send`; `None` if it has not begun.
    part_sent: Option<usize>,
    /// Sent whole and not acknowledged.
    sent: VecDeque<u32>,
    cost_out: u64,
    granted_out: u64,
    arrived_out: u64,

    /// Length and received bytes of the notification that is being received.
    incoming: Option<(u64, Vec<u8>)>,
    /// Value of `cost_in` when it began.
    incoming_began: u64,
    cost_in: u64,
    taken: u64,
    arrived_in: u64,
    /// Counters as last reported to the peer: granted, arrived.
    reported: (u64, u64),
    window: u64,
    longest: u64,
}

impl Notices {
    pub(super) fn new(ours: &Limits, theirs: &Limits) -> Self {
        Self {
            to_send: VecDeque::new(),
            part_sent: None,
            sent: VecDeque::new(),
            cost_out: 0,
            granted_out: theirs.notify_window,
            arrived_out: 0,
            incoming: None,
            incoming_began: 0,
            cost_in: 0,
            taken: 0,
            arrived_in: 0,
            reported: (ours.notify_window, 0),
            window: ours.notify_window,
            longest: ours.max_notification,
        }
    }

    /// Removes a notification that has not begun.
    pub(super) fn unqueue(&mut self, idx: u32) {
        self.to_send.retain(|other| *other != idx);
    }
}

impl<H: Memory> Link<H> {
    /// A notification to be sent, of at most the peer's `max_notification` bytes.
    pub(in crate::engine) fn notify(
        &mut self,
        port: &mut impl Port,
        transfer: u32,
        deadline_ns: u64,
        notification: Vec<u8>,
    ) {
        if let Some(idx) = self.admit(port, Kind::Notify, transfer, deadline_ns, None) {
            let op = self.op(idx);
            op.total = notification.len() as u64;
            op.notification = notification;
            self.notices.to_send.push_back(idx);
        }
    }

    /// Records the cost of all notifications that users have taken so far.
    pub(in crate::engine) fn taken(&mut self, cost: u64) {
        self.notices.taken = cost.min(self.notices.cost_in).max(self.notices.taken);
    }

    pub(super) fn start_notifications(&mut self) {
        while let Some(&idx) = self.notices.to_send.front() {
            if self.is_congested() {
                return;
            }
            let Some(Some(op)) = self.ops.get_mut(idx as usize) else { return };
            let notices = &mut self.notices;
            let overhead = if notices.part_sent.is_some() { 0 } else { NOTIFY_OVERHEAD };
            let granted = notices.granted_out - notices.cost_out;
            let begin = notices.part_sent.unwrap_or(0);
            let rest = op.notification.len() - begin;
            let Some(room) = granted.checked_sub(overhead) else { return };
            let len = rest.min(MAX_BODY_BYTES).min(usize::try_from(room).unwrap_or(usize::MAX));
            if len == 0 && rest > 0 {
                return;
            }
            let part = &op.notification[begin..begin + len];
            Frame::Notify { total: op.total, part }.encode(&mut self.out);
            op.stage = Stage::Sent;
            notices.cost_out += overhead + len as u64;
            notices.part_sent = Some(begin + len);
            if len == rest {
                notices.part_sent = None;
                notices.to_send.pop_front();
                notices.sent.push_back(idx);
                op.notification = Vec::new();
            }
        }
    }

    pub(super) fn on_notify(
        &mut self,
        port: &mut impl Port,
        total: u64,
        part: &[u8],
    ) -> Result<(), FrameError> {
        let notices = &mut self.notices;
        let is_new = notices.incoming.is_none();
        if total > notices.longest {
            return Err(invalid_value("bytes of a notification", total, notices.longest));
        }
        if is_new {
            notices.incoming_began = notices.cost_in;
            notices.cost_in += NOTIFY_OVERHEAD;
        }
        let (announced, bytes) = notices.incoming.get_or_insert_with(|| (total, Vec::new()));
        if *announced != total {
            return Err(invalid_value("bytes of a notification", total, *announced));
        }
        notices.cost_in += part.len() as u64;
        if notices.cost_in > notices.reported.0 {
            return Err(invalid_value("notifications ahead", notices.cost_in, notices.reported.0));
        }
        let room = total - bytes.len() as u64;
        if part.len() as u64 > room || part.is_empty() && total > 0 {
            return Err(invalid_value("part of a notification", part.len() as u64, room));
        }
        bytes.extend_from_slice(part);
        if bytes.len() as u64 == total
            && let Some((_, whole)) = notices.incoming.take()
        {
            notices.arrived_in += 1;
            port.deliver(whole);
        }
        Ok(())
    }

    pub(super) fn on_notify_credit(
        &mut self,
        port: &mut impl Port,
        granted: u64,
        arrived: u64,
    ) -> Result<(), FrameError> {
        let notices = &mut self.notices;
        if granted < notices.granted_out {
            return Err(invalid_value("granted to notifications", granted, notices.granted_out));
        }
        let most = notices.arrived_out + notices.sent.len() as u64;
        if arrived < notices.arrived_out || arrived > most {
            return Err(invalid_value("notifications arrived", arrived, most));
        }
        notices.granted_out = granted;
        while self.notices.arrived_out < arrived {
            self.notices.arrived_out += 1;
            if let Some(idx) = self.notices.sent.pop_front() {
                let bytes = self.op(idx).total;
                self.end(port, idx, Ok(bytes));
            }
        }
        Ok(())
    }

    pub(super) fn report_notify_credit(&mut self) {
        let notices = &mut self.notices;
        let mut granted = notices.taken.saturating_add(notices.window);
        if let Some((total, _)) = notices.incoming {
            granted = granted.max(notices.incoming_began + NOTIFY_OVERHEAD + total);
        }
        let (reported, reported_arrived) = notices.reported;
        let granted = granted.max(reported);
        // Not for every byte, but always if the peer could not begin another notification otherwise.
        let is_stuck = notices.incoming.is_some()
            || reported.saturating_sub(notices.cost_in) <= NOTIFY_OVERHEAD;
        let is_worth_it =
            granted - reported >= notices.window.div_ceil(4) || granted > reported && is_stuck;
        if is_worth_it || notices.arrived_in != reported_arrived {
            notices.reported = (granted, notices.arrived_in);
            Frame::NotifyCredit { granted, arrived: notices.arrived_in }.encode(&mut self.out);
        }
    }
}

/// Cost of a notification in addition to its bytes.
pub(in crate::engine) const NOTIFY_OVERHEAD: u64 = 64;
