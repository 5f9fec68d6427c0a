//! Two links joined by a wire and a fabric that deliver in any pieces and any order.

mod world;

use std::cell::RefCell;
use std::rc::Rc;

use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use self::world::{Bytes, Heap, PendingOp, Side, World};
use super::*;
use crate::credit::{Action, Credit, CreditReceiver, SenderId};
use crate::engine::wire::{Outcome, Refusal};
use crate::fabric::WireRegion;

/// A one-sided operation, and its expected result.
#[derive(Debug)]
struct Expectation {
    side: usize,
    transfer: u32,
    from: RegionId,
    to: RegionId,
    bytes: u64,
}

fn contents(heap: &Heap, region: RegionId, bytes: u64) -> Vec<u8> {
    let mut out = Vec::new();
    heap.borrow()[region.0 as usize].load(0, bytes, &mut out);
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn everything_arrives_once_and_in_order(seed: u64) {
        let mut world = World::new(seed);
        let mut next = 0;
        let (mut one_sided, mut sends, mut receives) = (Vec::new(), [Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
        let mut notes: [Vec<Vec<u8>>; 2] = Default::default();
        for _ in 0..world.rng.random_range(1..60) {
            let side = world.rng.random_range(0..2);
            let len = world.rng.random_range(0..400);
            let (what, local, other) = (world.rng.random_range(0..5), world.memory(len), world.memory(len));
            let (here, there) = (local.region, other.region);
            next += 1;
            let Side { link, port, .. } = &mut world.sides[side];
            let region = WireRegion { address: 0, bytes: len as u64, key: there.0.into() };
            let remote = RemoteSegment { region, offset: 0 };
            match what {
                0 => {
                    sends[side].push((next, here, len as u64));
                    link.send(port, next, u64::MAX, local);
                }
                1 => {
                    receives[side].push((next, here, len as u64));
                    link.recv(port, next, u64::MAX, local);
                }
                2 => {
                    one_sided.push(Expectation { side, transfer: next, from: here, to: there, bytes: len as u64 });
                    link.write(port, next, u64::MAX, local, remote);
                }
                3 => {
                    one_sided.push(Expectation { side, transfer: next, from: there, to: here, bytes: len as u64 });
                    link.read(port, next, u64::MAX, local, remote);
                }
                _ => {
                    let note = local.hold.borrow().clone();
                    notes[side].push(note.clone());
                    link.notify(port, next, u64::MAX, note);
                }
            }
            for _ in 0..world.rng.random_range(0..20) {
                world.step();
            }
        }
        world.run();
        for Expectation { side, transfer, from, to, bytes } in one_sided {
            prop_assert_eq!(world.sides[side].port.finished.get(&transfer), Some(&Ok(bytes)));
            prop_assert!(contents(&world.heap, from, bytes) == contents(&world.heap, to, bytes));
        }
        for side in 0..2 {
            prop_assert_eq!(&world.sides[1 - side].port.notifications, &notes[side]);
            prop_assert_eq!(&world.sides[side].port.granted, &[], "open for messages that have ended");
            for ((send, from, bytes), (recv, to, capacity)) in sends[side].iter().zip(&receives[1 - side]) {
                let sent = world.sides[side].port.finished.get(send);
                let got = world.sides[1 - side].port.finished.get(recv);
                if bytes <= capacity {
                    prop_assert_eq!((sent, got), (Some(&Ok(*bytes)), Some(&Ok(*bytes))));
                    prop_assert!(contents(&world.heap, *from, *bytes) == contents(&world.heap, *to, *bytes));
                } else {
                    let truncated = matches!(got, Some(Err(TransferError::Truncated { .. })));
                    prop_assert!(truncated && sent.is_some(), "{got:?} {sent:?}");
                }
            }
            // Receives without a message still wait, and no others.
            let num_pairs = sends[side].len().min(receives[1 - side].len());
            for (recv, ..) in &receives[1 - side][num_pairs..] {
                prop_assert_eq!(world.sides[1 - side].port.finished.get(recv), None);
            }
        }
    }

    #[test]
    fn after_the_end_everything_has_ended_once(seed: u64) {
        let mut world = World::new(seed);
        let mut num_begun = 0;
        for _ in 0..world.rng.random_range(1..40) {
            let len = world.rng.random_range(0..400);
            let (local, other) = (world.memory(len), world.memory(len));
            let deadline = world.rng.random_range(1..200);
            let region = WireRegion { address: 0, bytes: len as u64, key: other.region.0.into() };
            let remote = RemoteSegment { region, offset: 0 };
            let what = world.rng.random_range(0..5);
            let Side { link, port, .. } = &mut world.sides[0];
            num_begun += 1;
            match what {
                0 => link.send(port, num_begun, deadline, local),
                1 => link.recv(port, num_begun, deadline, local),
                2 => link.write(port, num_begun, deadline, local, remote),
                3 => link.read(port, num_begun, deadline, local, remote),
                _ => link.notify(port, num_begun, deadline, vec![7; len]),
            }
            for _ in 0..world.rng.random_range(0..20) {
                world.step();
            }
            let now = world.rng.random_range(0..250);
            let Side { link, port, .. } = &mut world.sides[0];
            if let Err(op) = link.expire(port, now) {
                link.close(port, &CloseReason::Deadline(op));
            }
        }
        let Side { link, port, .. } = &mut world.sides[0];
        link.close(port, &CloseReason::Local);
        // The fabric ends what it holds.
        for PendingOp { tag, .. } in std::mem::take(&mut port.pending) {
            link.on_done(port, tag, Err(PostError::Disconnected { op: "write" }));
        }
        prop_assert_eq!(link.num_in_flight(), 0);
        prop_assert_eq!(port.finished.len(), num_begun as usize);
        prop_assert!(link.ops.iter().all(Option::is_none));
        // The link has released all memory: the heap has the only reference.
        drop(world.sides);
        for bytes in world.heap.borrow().iter() {
            prop_assert_eq!(Rc::strong_count(bytes), 1);
        }
    }

    #[test]
    fn a_peer_may_say_anything(seed: u64, frames in prop::collection::vec((1u8..14, 0u64..6, 0u64..400, 0u64..8), 1..60)) {
        let mut world = World::new(seed);
        for transfer in 0..20 {
            let len = world.rng.random_range(0..400);
            let local = world.memory(len);
            let Side { link, port, .. } = &mut world.sides[0];
            match transfer % 3 {
                0 => link.send(port, transfer, u64::MAX, local),
                1 => link.recv(port, transfer, u64::MAX, local),
                _ => link.notify(port, transfer, u64::MAX, vec![1; len]),
            }
        }
        for (kind, number, second, len) in frames {
            let Side { link, port, .. } = &mut world.sides[0];
            link.progress(port);
            let region = WireRegion { address: 0, bytes: second, key: 0 };
            let payload = vec![0; len as usize * 20];
            let frame = match kind {
                1 => Frame::Notify { total: second, part: &payload },
                2 => Frame::NotifyCredit { granted: second, arrived: number },
                3 => Frame::Eager { seq: number, payload: &payload },
                4 => Frame::EagerCredit { freed: second, arrived: number },
                5 => Frame::Announce { seq: number, bytes: second },
                6 => Frame::Grant { seq: number, target: RemoteSegment { region, offset: len } },
                7 => {
                    let why = if len % 2 == 0 { Refusal::TooShort } else { Refusal::NotOpened };
                    Frame::Refuse { seq: number, capacity: second, why }
                }
                8 => Frame::Finish { seq: number, outcome: Outcome::Written },
                9 => Frame::Withdraw { seq: number },
                10 => Frame::Demand(Demand { announced: second, withdrawn: number }),
                11 => Frame::Credit(crate::credit::Credit { granted: second, unscheduled: second }),
                12 => Frame::Arrived { scheduled: number, unscheduled: second },
                _ => Frame::Goodbye,
            };
            if link.on_frame(port, frame).is_err() {
                break;
            }
        }
        let Side { link, port, .. } = &mut world.sides[0];
        link.close(port, &CloseReason::Left);
        for PendingOp { tag, .. } in std::mem::take(&mut port.pending) {
            link.on_done(port, tag, Err(PostError::Disconnected { op: "write" }));
        }
        prop_assert_eq!(port.finished.len(), 20);
    }
}

/// One of many connections of a process that reads.
struct Reader {
    credit: Rc<RefCell<CreditReceiver>>,
    reads: SenderId,
    in_flight: Rc<RefCell<u64>>,
    pending: Vec<Tag>,
    num_finished: usize,
}

impl Port for Reader {
    fn max_operation_bytes(&self) -> u64 {
        u64::MAX
    }

    fn write(
        &mut self,
        _: RemoteSegment,
        _: LocalSegment,
        _: Tag,
    ) -> Result<PostOutcome, PostError> {
        panic!("nobody writes")
    }

    fn read(
        &mut self,
        dst: LocalSegment,
        _: RemoteSegment,
        tag: Tag,
    ) -> Result<PostOutcome, PostError> {
        *self.in_flight.borrow_mut() += dst.bytes;
        self.pending.push(tag);
        Ok(PostOutcome::Accepted)
    }

    fn grant(&mut self, _: LocalSegment) -> Result<RemoteSegment, PostError> {
        panic!("nobody writes")
    }

    fn end_grant(&mut self, _: LocalSegment) {
        panic!("nobody writes")
    }

    fn finish(&mut self, _: u32, result: Result<u64, TransferError>) {
        assert_eq!(result, Ok(READ_BYTES));
        self.num_finished += 1;
    }

    fn deliver(&mut self, _: Vec<u8>) {}

    fn credit(&mut self, _: Event) -> Result<(), CreditError> {
        Ok(())
    }

    fn pull_credit(&mut self, event: Event) -> Result<Credit, CreditError> {
        let mut credit = self.credit.borrow_mut();
        credit.handle(0, self.reads, event)?;
        credit.credit_of(self.reads)
    }
}

const READ_BYTES: u64 = 1000;

/// The reads of many connections together stay within the window of their process, and all end.
#[test]
fn reads_of_many_connections_share_one_window() {
    let seed = rand::random();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let (num_links, reads_each, window_bytes) = (12, 3, 300);
    let config = CreditConfig {
        window_bytes,
        sender_window_bytes: 200,
        grant_bytes: 60,
        max_senders: num_links,
        ..CreditConfig::default()
    };
    let credit = Rc::new(RefCell::new(CreditReceiver::new(config).unwrap()));
    let in_flight = Rc::new(RefCell::new(0));
    let limits = Limits {
        eager_bytes: 0,
        eager_window: 1000,
        notify_window: 1000,
        max_notification: 1000,
        unscheduled_bytes: 1 << 20,
        max_demand_bytes: 1 << 20,
    };
    let mut links: Vec<_> = (0..num_links)
        .map(|_| {
            let mut port = Reader {
                credit: Rc::clone(&credit),
                reads: credit.borrow_mut().join().unwrap(),
                in_flight: Rc::clone(&in_flight),
                pending: Vec::new(),
                num_finished: 0,
            };
            let mut link: Link<Bytes> = Link::new(limits, limits, 50);
            for transfer in 0..reads_each {
                let hold = Rc::new(RefCell::new(vec![0; READ_BYTES as usize]));
                let local = LocalRange { hold, region: RegionId(0), offset: 0, bytes: READ_BYTES };
                let region = WireRegion { address: 0, bytes: READ_BYTES, key: 0 };
                let remote = RemoteSegment { region, offset: 0 };
                link.read(&mut port, transfer, u64::MAX, local, remote);
            }
            (link, port)
        })
        .collect();
    let mut peak = 0;
    for step in 0.. {
        assert!(step < 1_000_000, "seed {seed}: reads stand still");
        let (link, port) = &mut links[rng.random_range(0..num_links)];
        if rng.random() && !port.pending.is_empty() {
            let tag = port.pending.swap_remove(rng.random_range(0..port.pending.len()));
            *in_flight.borrow_mut() -= u64::from(tag.bytes);
            link.on_done(port, tag, Ok(()));
        }
        link.progress(port);
        let next = || credit.borrow_mut().next_action();
        while let Some(Action::Credit { sender, credit }) = next() {
            let (link, _) = links.iter_mut().find(|(_, port)| port.reads == sender).unwrap();
            link.on_pull_credit(credit);
        }
        peak = peak.max(*in_flight.borrow());
        assert!(peak <= window_bytes, "seed {seed}: {peak} bytes under way");
        if links.iter().all(|(_, port)| port.num_finished == reads_each as usize) {
            break;
        }
    }
    assert!(peak > window_bytes / 2, "the window is hardly used: {peak}");
}

/// A peer that calls a buffer too short must report a shorter one.
#[test]
fn a_refusal_names_its_cause_or_breaks_the_protocol() {
    let refused = |capacity, why| {
        let mut world = World::new(1);
        let local = world.memory(1000);
        let Side { link, port, .. } = &mut world.sides[0];
        link.send(port, 7, u64::MAX, local);
        link.progress(port);
        let outcome = link.on_frame(port, Frame::Refuse { seq: 0, capacity, why });
        (outcome.map_err(|error| error.to_string()), port.finished.remove(&7).unwrap().unwrap_err())
    };
    let (op, bytes) = ("send", 1000);
    let short = |capacity| TransferError::Truncated { op, bytes, capacity };
    assert_eq!(refused(999, Refusal::TooShort), (Ok(false), short(999)));
    let not_opened = TransferError::NotOpened { op, bytes };
    assert_eq!(refused(1000, Refusal::NotOpened), (Ok(false), not_opened));
    let (outcome, error) = refused(1000, Refusal::TooShort);
    assert_eq!(error, short(1000));
    assert!(outcome.unwrap_err().contains("a buffer that is too short: found 1000"));
}

/// Each single answer is one that a correct peer might get.
#[test]
fn a_peer_that_asks_and_never_reads_is_cut_off() {
    let mut world = World::new(1);
    let local = world.memory(1000);
    let Side { link, port, .. } = &mut world.sides[0];
    link.send(port, 1, 5, local);
    link.progress(port);
    // The message is withdrawn, so that every grant is answered.
    link.expire(port, 10).unwrap();
    let region = WireRegion { address: 0, bytes: 1000, key: 0 };
    let target = RemoteSegment { region, offset: 0 };
    let mut ask = || link.on_frame(port, Frame::Grant { seq: 0, target });
    let refused = (0..1_000_000).find_map(|_| ask().err());
    let refused = refused.expect("a limit").to_string();
    assert!(refused.contains("wait to be read"), "{refused}");
    assert!(link.output().len() < MAX_UNREAD + 1000);
}
