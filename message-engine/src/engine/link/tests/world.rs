//! Two links, a wire and a fabric, in one process and in an order that a seed determines.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};

use super::super::*;
use crate::credit::{Action, Credit, CreditReceiver, SenderId};
use crate::engine::wire::{HEADER_BYTES, Header};
use crate::fabric::WireRegion;

pub(super) type Bytes = Rc<RefCell<Vec<u8>>>;

impl Memory for Bytes {
    fn is_host(&self) -> bool {
        true
    }

    fn load(&self, offset: u64, bytes: u64, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.borrow()[offset as usize..][..bytes as usize]);
    }

    fn store(&self, offset: u64, bytes: &[u8]) {
        self.borrow_mut()[offset as usize..][..bytes.len()].copy_from_slice(bytes);
    }
}

/// All memory of both sides; region and key are indices into it.
pub(super) type Heap = Rc<RefCell<Vec<Bytes>>>;

pub(super) struct World {
    pub(super) heap: Heap,
    pub(super) sides: [Side; 2],
    pub(super) rng: StdRng,
}

pub(super) struct Side {
    pub(super) link: Link<Bytes>,
    pub(super) port: Sim,
    /// Bytes from the peer that are no whole frame yet.
    inbox: Vec<u8>,
}

pub(super) struct Sim {
    heap: Heap,
    pub(super) pending: Vec<PendingOp>,
    pub(super) finished: HashMap<u32, Result<u64, TransferError>>,
    pub(super) notifications: Vec<Vec<u8>>,
    credit: CreditReceiver,
    sender: SenderId,
    reads: SenderId,
    most_pending: usize,
    /// Parts that are granted to messages under way.
    pub(super) granted: Vec<LocalSegment>,
}

pub(super) struct PendingOp {
    pub(super) tag: Tag,
    from: (u32, u64),
    to: (u32, u64),
    bytes: u64,
}

impl Port for Sim {
    fn max_operation_bytes(&self) -> u64 {
        70
    }

    fn write(
        &mut self,
        dst: RemoteSegment,
        src: LocalSegment,
        tag: Tag,
    ) -> Result<PostOutcome, PostError> {
        let to = (dst.region.key as u32, dst.offset);
        self.post(tag, (src.region.0, src.offset), to, src.bytes)
    }

    fn read(
        &mut self,
        dst: LocalSegment,
        src: RemoteSegment,
        tag: Tag,
    ) -> Result<PostOutcome, PostError> {
        let from = (src.region.key as u32, src.offset);
        self.post(tag, from, (dst.region.0, dst.offset), dst.bytes)
    }

    fn grant(&mut self, part: LocalSegment) -> Result<RemoteSegment, PostError> {
        let key = part.region.0;
        let bytes = self.heap.borrow()[key as usize].borrow().len() as u64;
        let region = WireRegion { address: 0, bytes, key: key.into() };
        self.granted.push(part);
        Ok(RemoteSegment { region, offset: part.offset })
    }

    fn end_grant(&mut self, part: LocalSegment) {
        let granted = self.granted.iter().position(|granted| *granted == part);
        self.granted.swap_remove(granted.expect("ended and not granted"));
    }

    fn finish(&mut self, transfer: u32, result: Result<u64, TransferError>) {
        let before = self.finished.insert(transfer, result);
        assert!(before.is_none(), "transfer {transfer} has ended twice");
    }

    fn deliver(&mut self, notification: Vec<u8>) {
        self.notifications.push(notification);
    }

    fn credit(&mut self, event: Event) -> Result<(), CreditError> {
        self.credit.handle(0, self.sender, event)
    }

    fn pull_credit(&mut self, event: Event) -> Result<Credit, CreditError> {
        self.credit.handle(0, self.reads, event)?;
        self.credit.credit_of(self.reads)
    }
}

impl Sim {
    fn post(
        &mut self,
        tag: Tag,
        from: (u32, u64),
        to: (u32, u64),
        bytes: u64,
    ) -> Result<PostOutcome, PostError> {
        assert_eq!(u64::from(tag.bytes), bytes);
        if self.pending.len() >= self.most_pending {
            return Ok(PostOutcome::Full);
        }
        self.pending.push(PendingOp { tag, from, to, bytes });
        Ok(PostOutcome::Accepted)
    }
}

impl World {
    pub(super) fn new(seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let heap = Heap::default();
        let limits = Limits {
            eager_bytes: rng.random_range(0..100),
            eager_window: rng.random_range(200..600),
            notify_window: rng.random_range(70..300),
            max_notification: 1000,
            unscheduled_bytes: rng.random_range(0..200),
            max_demand_bytes: 1 << 20,
        };
        let side = |rng: &mut StdRng| {
            let config = CreditConfig {
                window_bytes: 300,
                sender_window_bytes: 200,
                grant_bytes: 60,
                unscheduled_bytes: limits.unscheduled_bytes,
                max_demand_bytes: limits.max_demand_bytes,
                max_senders: 4,
                ..CreditConfig::default()
            };
            let mut credit = CreditReceiver::new(config).unwrap();
            let (sender, reads) = (credit.join().unwrap(), credit.join().unwrap());
            let port = Sim {
                heap: Rc::clone(&heap),
                pending: Vec::new(),
                finished: HashMap::new(),
                notifications: Vec::new(),
                credit,
                sender,
                reads,
                most_pending: rng.random_range(1..6),
                granted: Vec::new(),
            };
            Side { link: Link::new(limits, limits, 50), port, inbox: Vec::new() }
        };
        let sides = [side(&mut rng), side(&mut rng)];
        Self { heap, sides, rng }
    }

    /// Fresh memory with random contents.
    pub(super) fn memory(&mut self, len: usize) -> LocalRange<Bytes> {
        let mut bytes = vec![0; len];
        self.rng.fill_bytes(&mut bytes);
        let hold = Rc::new(RefCell::new(bytes));
        self.heap.borrow_mut().push(Rc::clone(&hold));
        let region = RegionId(self.heap.borrow().len() as u32 - 1);
        LocalRange { hold, region, offset: 0, bytes: len as u64 }
    }

    /// Runs a random step of one side. Returns false if there was nothing to do.
    pub(super) fn step(&mut self) -> bool {
        let from = self.rng.random_range(0..2);
        match self.rng.random_range(0..3) {
            0 => self.carry(from),
            1 => self.complete(from),
            _ => {
                self.go_on(from);
                true
            }
        }
    }

    fn go_on(&mut self, idx: usize) {
        let Side { link, port, .. } = &mut self.sides[idx];
        link.progress(port);
        while let Some(action) = port.credit.next_action() {
            match action {
                Action::Credit { sender, credit } if sender == port.sender => {
                    link.push_frame(Frame::Credit(credit));
                }
                Action::Credit { credit, .. } => link.on_pull_credit(credit),
                Action::Stalled { .. } => {}
            }
        }
        link.taken(u64::MAX);
        link.progress(port);
    }

    /// Moves some bytes across the wire.
    fn carry(&mut self, from: usize) -> bool {
        let output = self.sides[from].link.output();
        if output.is_empty() {
            return false;
        }
        let len = self.rng.random_range(1..=output.len());
        let bytes = output[..len].to_vec();
        self.sides[from].link.sent(len);
        let to = &mut self.sides[1 - from];
        to.inbox.extend(bytes);
        while let Some((head, rest)) = to.inbox.split_first_chunk::<HEADER_BYTES>() {
            let header = Header::decode(head).unwrap();
            let Some(body) = rest.get(..header.body_bytes) else { break };
            let frame = Frame::decode(header, body).unwrap();
            to.link.on_frame(&mut to.port, frame).unwrap();
            to.inbox.drain(..HEADER_BYTES + header.body_bytes);
        }
        true
    }

    /// Completes a random operation of the fabric.
    fn complete(&mut self, idx: usize) -> bool {
        let num = self.sides[idx].port.pending.len();
        if num == 0 {
            return false;
        }
        let which = self.rng.random_range(0..num);
        let PendingOp { tag, from, to, bytes } = self.sides[idx].port.pending.swap_remove(which);
        let heap = self.heap.borrow();
        let mut moved = Vec::new();
        heap[from.0 as usize].load(from.1, bytes, &mut moved);
        heap[to.0 as usize].store(to.1, &moved);
        drop(heap);
        let Side { link, port, .. } = &mut self.sides[idx];
        link.on_done(port, tag, Ok(()));
        true
    }

    pub(super) fn run(&mut self) {
        let mut idle = 0;
        while idle < 300 {
            let is_quiet = self
                .sides
                .iter()
                .all(|side| side.link.output().is_empty() && side.port.pending.is_empty());
            idle = if self.step() && !is_quiet { 0 } else { idle + 1 };
        }
    }
}
