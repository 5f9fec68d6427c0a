//! What happens when.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use message_engine::credit::{Credit, Demand};

/// A packet on a link or in the switch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Packet {
    pub(crate) flow: u32,
    pub(crate) from: u16,
    pub(crate) to: u16,
    /// On the wire.
    pub(crate) bytes: u32,
    pub(crate) kind: Kind,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Kind {
    /// Payload from `offset` on.
    Data {
        offset: u64,
        len: u32,
    },
    /// Everything before the offset has arrived.
    Ack(u64),
    /// The byte at the offset is missing.
    Nak(u64),
    Demand(Demand),
    Credit(Credit),
    /// Everything before the offset may be sent: reads of the receiver.
    Request(u64),
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Event {
    /// A sender begins with a message.
    Start(u32),
    /// A host's link is free.
    HostLink(u16),
    /// A packet is in the switch.
    InSwitch(Packet),
    /// An output's link is free.
    Output(u16),
    /// A packet is at its host.
    AtHost(Packet),
    /// A demand or credit takes effect.
    Control(Packet),
    /// A receiver posts as much of a read as it has granted itself.
    Post(u32, Credit),
    /// A host stops or goes on.
    Pause(u16, bool),
    /// Time to see whether anything of a message has arrived beyond `seen`.
    Retry { flow: u32, seen: u64 },
}

/// Events by time, those of one time in the order in which they were added.
#[derive(Default)]
pub(crate) struct Events {
    heap: BinaryHeap<Reverse<Entry>>,
    num_added: u64,
    pub(crate) now_ps: u64,
}

struct Entry {
    key: (u64, u64),
    event: Event,
}

impl Events {
    pub(crate) fn after(&mut self, ps: u64, event: Event) {
        let key = (self.now_ps + ps, self.num_added);
        self.num_added += 1;
        self.heap.push(Reverse(Entry { key, event }));
    }

    pub(crate) fn next(&mut self) -> Option<Event> {
        let Reverse(entry) = self.heap.pop()?;
        self.now_ps = entry.key.0;
        Some(entry.event)
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key.cmp(&other.key)
    }
}
