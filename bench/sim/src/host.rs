//! Messages in flight, and the hosts that send them.

use std::collections::VecDeque;

use message_engine::credit::{
    Action, Admission, Credit, CreditConfig, CreditError, CreditReceiver, CreditSender, SenderId,
};

use crate::event::{Event, Events, Kind, Packet};
use crate::{Model, Verb};

/// One message from one host to another.
pub(crate) struct Flow {
    pub(crate) from: u16,
    pub(crate) to: u16,
    pub(crate) bytes: u64,
    pub(crate) verb: Verb,
    /// With reads, the bytes that the receiver has requested.
    pub(crate) requested: u64,
    /// The sender's side.
    pub(crate) next: u64,
    pub(crate) furthest: u64,
    pub(crate) acked: u64,
    pub(crate) done_ps: Option<u64>,
    /// Time at which all of it had arrived.
    pub(crate) landed_ps: Option<u64>,
    queued: bool,
    /// The receiver's side.
    pub(crate) expected: u64,
    pub(crate) asked: bool,
    pub(crate) credit: Option<FlowCredit>,
}

pub(crate) struct FlowCredit {
    pub(crate) sender: CreditSender,
    pub(crate) id: SenderId,
    /// Whether it needs no grant, since it is within the unscheduled allowance.
    pub(crate) free: bool,
}

impl FlowCredit {
    /// Returns the state of a message with the receiver's index `id`. All bytes of a read need a grant, since a request
    /// takes no time.
    pub(crate) fn new(config: &CreditConfig, verb: Verb, id: SenderId) -> Self {
        let unscheduled_bytes = if verb == Verb::Read { 0 } else { config.unscheduled_bytes };
        let sender = CreditSender::new(&CreditConfig { unscheduled_bytes, ..*config });
        Self { sender, id, free: false }
    }
}

impl Flow {
    pub(crate) fn new(
        (from, to): (u16, u16),
        bytes: u64,
        verb: Verb,
        credit: Option<FlowCredit>,
    ) -> Self {
        Self {
            from,
            to,
            bytes,
            verb,
            requested: 0,
            next: 0,
            furthest: 0,
            acked: 0,
            done_ps: None,
            landed_ps: None,
            queued: false,
            expected: 0,
            asked: false,
            credit,
        }
    }

    /// Returns the payload of the next packet, or 0 if nothing may be sent. Lost bytes are resent within the credit that
    /// they had.
    fn sendable(&self, model: &Model) -> u64 {
        let len = u64::from(model.packet_bytes).min(self.bytes - self.next);
        match &self.credit {
            _ if self.next < self.furthest => len.min(self.furthest - self.next),
            _ if self.verb == Verb::Read => len.min(self.requested - self.next),
            Some(credit) if !credit.free => len.min(credit.sender.allowance()),
            _ => len,
        }
    }
}

/// One end of a link.
#[derive(Default)]
pub(crate) struct Host {
    control: VecDeque<Packet>,
    /// Messages with bytes to send, served round-robin.
    active: VecDeque<u32>,
    busy: bool,
    pub(crate) stopped: bool,
    pub(crate) receiver: Option<CreditReceiver>,
    /// Messages by the indices of their senders in `receiver`.
    pub(crate) flow_of: Vec<u32>,
    pub(crate) resent_bytes: u64,
    pub(crate) control_packets: u64,
}

impl Host {
    /// Queues a message that may have bytes to send.
    pub(crate) fn activate(
        &mut self,
        idx: u32,
        flows: &mut [Flow],
        model: &Model,
        events: &mut Events,
    ) -> Result<(), CreditError> {
        let flow = &mut flows[idx as usize];
        if !flow.queued && flow.sendable(model) > 0 {
            flow.queued = true;
            self.active.push_back(idx);
        }
        self.kick(flows, model, events)
    }

    /// Sends a control packet.
    pub(crate) fn send_control(
        &mut self,
        packet: Packet,
        flows: &mut [Flow],
        model: &Model,
        events: &mut Events,
    ) -> Result<(), CreditError> {
        self.control.push_back(packet);
        self.control_packets += 1;
        self.kick(flows, model, events)
    }

    pub(crate) fn kick(
        &mut self,
        flows: &mut [Flow],
        model: &Model,
        events: &mut Events,
    ) -> Result<(), CreditError> {
        if self.busy { Ok(()) } else { self.send(flows, model, events) }
    }

    /// Sends the next packet on the link, which is free.
    pub(crate) fn send(
        &mut self,
        flows: &mut [Flow],
        model: &Model,
        events: &mut Events,
    ) -> Result<(), CreditError> {
        self.busy = false;
        let Some(packet) = self.next_packet(flows, model, events)? else { return Ok(()) };
        self.busy = true;
        let on_wire_ps = u64::from(packet.bytes) * model.ps_per_byte;
        events.after(on_wire_ps, Event::HostLink(packet.from));
        events.after(on_wire_ps + model.hop_ns * 1_000, Event::InSwitch(packet));
        Ok(())
    }

    fn next_packet(
        &mut self,
        flows: &mut [Flow],
        model: &Model,
        events: &mut Events,
    ) -> Result<Option<Packet>, CreditError> {
        if let Some(packet) = self.control.pop_front() {
            return Ok(Some(packet));
        }
        if self.stopped {
            return Ok(None);
        }
        while let Some(idx) = self.active.pop_front() {
            let flow = &mut flows[idx as usize];
            let len = flow.sendable(model);
            if len == 0 {
                flow.queued = false;
                continue;
            }
            let is_new = flow.next == flow.furthest && flow.verb == Verb::Write;
            if let Some(credit) = flow.credit.as_mut().filter(|credit| is_new && !credit.free) {
                credit.sender.sent(len)?;
            }
            let offset = flow.next;
            flow.next += len;
            self.resent_bytes += flow.furthest.min(flow.next) - flow.furthest.min(offset);
            flow.furthest = flow.furthest.max(flow.next);
            if flow.next < flow.bytes {
                self.active.push_back(idx);
            } else {
                flow.queued = false;
            }
            if flow.next == flow.bytes || (flow.credit.is_some() && flow.sendable(model) == 0) {
                let retry = Event::Retry { flow: idx, seen: flow.expected };
                events.after(model.retry_ns * 1_000, retry);
            }
            return Ok(Some(Packet {
                flow: idx,
                from: flow.from,
                to: flow.to,
                bytes: len as u32 + model.header_bytes,
                kind: Kind::Data { offset, len: len as u32 },
            }));
        }
        Ok(None)
    }

    /// Takes the actions of this receiver's credit code, by message.
    pub(crate) fn credits(&mut self) -> Vec<(u32, Credit)> {
        let mut credits = Vec::new();
        while let Some(action) = self.receiver.as_mut().and_then(CreditReceiver::next_action) {
            if let Action::Credit { sender, credit } = action {
                credits.push((self.flow_of[sender.index()], credit));
            }
        }
        credits
    }
}

/// Submits a whole message. Returns the demand for the receiver, if there is one.
pub(crate) fn submit(flow: &mut Flow) -> Result<Option<Kind>, CreditError> {
    let Some(credit) = &mut flow.credit else { return Ok(None) };
    match credit.sender.submit(flow.bytes)? {
        Admission::Unscheduled => {
            credit.free = true;
            Ok(None)
        }
        Admission::Scheduled(demand) => Ok(Some(Kind::Demand(demand))),
    }
}
