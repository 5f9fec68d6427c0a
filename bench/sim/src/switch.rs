//! A switch with queues at its outputs and one packet memory for all of them.

use std::collections::VecDeque;

use crate::event::{Event, Events, Kind, Packet};
use crate::{Control, Model};

pub(crate) struct Switch {
    outputs: Vec<Output>,
    /// For each host, its bytes in the switch and whether the switch has stopped it.
    inputs: Vec<(u64, bool)>,
    used_bytes: u64,
    pub(crate) dropped_packets: u64,
    pub(crate) pauses: u64,
    pub(crate) max_queue_bytes: u64,
}

#[derive(Default)]
struct Output {
    queue: VecDeque<Packet>,
    bytes: u64,
    busy: bool,
}

impl Switch {
    pub(crate) fn new(num_hosts: usize) -> Self {
        Self {
            outputs: (0..num_hosts).map(|_| Output::default()).collect(),
            inputs: vec![(0, false); num_hosts],
            used_bytes: 0,
            dropped_packets: 0,
            pauses: 0,
            max_queue_bytes: 0,
        }
    }

    /// Handles the arrival of a packet.
    pub(crate) fn take(
        &mut self,
        packet: Packet,
        control: Control,
        model: &Model,
        events: &mut Events,
    ) {
        let bytes = u64::from(packet.bytes);
        let output = &mut self.outputs[packet.to as usize];
        if control != Control::Pause && matches!(packet.kind, Kind::Data { .. }) {
            let free = model.buffer_bytes.saturating_sub(self.used_bytes);
            let limit = (model.alpha * free as f64) as u64;
            if bytes > free || output.bytes + bytes > limit {
                self.dropped_packets += 1;
                return;
            }
        }
        output.queue.push_back(packet);
        output.bytes += bytes;
        self.used_bytes += bytes;
        self.max_queue_bytes = self.max_queue_bytes.max(output.bytes);
        let (from, stopped) = &mut self.inputs[packet.from as usize];
        *from += bytes;
        if control == Control::Pause && !*stopped && *from > model.pause_bytes {
            *stopped = true;
            self.pauses += 1;
            events.after(model.hop_ns * 1_000, Event::Pause(packet.from, true));
        }
        if !output.busy {
            self.forward(packet.to, model, events);
        }
    }

    /// Sends the next packet on the link of `port`, which is free.
    pub(crate) fn forward(&mut self, port: u16, model: &Model, events: &mut Events) {
        let output = &mut self.outputs[port as usize];
        let Some(packet) = output.queue.pop_front() else {
            output.busy = false;
            return;
        };
        output.busy = true;
        let bytes = u64::from(packet.bytes);
        output.bytes -= bytes;
        self.used_bytes -= bytes;
        let (from, stopped) = &mut self.inputs[packet.from as usize];
        *from -= bytes;
        if *stopped && *from <= model.pause_bytes / 2 {
            *stopped = false;
            events.after(model.hop_ns * 1_000, Event::Pause(packet.from, false));
        }
        let on_wire_ps = bytes * model.ps_per_byte;
        events.after(on_wire_ps, Event::Output(port));
        events.after(on_wire_ps + model.hop_ns * 1_000, Event::AtHost(packet));
    }
}
