//! A link whose peer sends arbitrary frames at any moment, while users start transfers.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use proptest::prelude::*;

use super::*;
use crate::credit::{Credit, Demand};
use crate::engine::wire::{Outcome, Refusal};
use crate::fabric::WireRegion;

/// Memory without contents that counts its users.
#[derive(Debug)]
struct HoldCount(Rc<RefCell<usize>>);

impl HoldCount {
    fn new(count: &Rc<RefCell<usize>>) -> Self {
        *count.borrow_mut() += 1;
        Self(Rc::clone(count))
    }
}

impl Drop for HoldCount {
    fn drop(&mut self) {
        *self.0.borrow_mut() -= 1;
    }
}

impl Memory for HoldCount {
    fn is_host(&self) -> bool {
        true
    }

    fn load(&self, _: u64, bytes: u64, out: &mut Vec<u8>) {
        out.resize(out.len() + bytes as usize, 0);
    }

    fn store(&self, offset: u64, bytes: &[u8]) {
        assert!(offset + bytes.len() as u64 <= BUFFER_BYTES, "{} bytes at {offset}", bytes.len());
    }
}

#[derive(Default)]
struct RecordingPort {
    pending: Vec<Tag>,
    finished: HashMap<u32, Result<u64, TransferError>>,
    is_full: bool,
    num_granted: usize,
}

impl Port for RecordingPort {
    fn max_operation_bytes(&self) -> u64 {
        300
    }

    fn write(
        &mut self,
        _: RemoteSegment,
        _: LocalSegment,
        tag: Tag,
    ) -> Result<PostOutcome, PostError> {
        self.post(tag)
    }

    fn read(
        &mut self,
        _: LocalSegment,
        _: RemoteSegment,
        tag: Tag,
    ) -> Result<PostOutcome, PostError> {
        self.post(tag)
    }

    fn grant(&mut self, part: LocalSegment) -> Result<RemoteSegment, PostError> {
        let region = WireRegion { address: 0, bytes: BUFFER_BYTES, key: 1 };
        self.num_granted += 1;
        Ok(RemoteSegment { region, offset: part.offset })
    }

    fn end_grant(&mut self, _: LocalSegment) {
        self.num_granted = self.num_granted.checked_sub(1).expect("ended and not granted");
    }

    fn finish(&mut self, transfer: u32, result: Result<u64, TransferError>) {
        let before = self.finished.insert(transfer, result);
        assert!(before.is_none(), "transfer {transfer} has ended twice");
    }

    fn deliver(&mut self, _: Vec<u8>) {}

    fn credit(&mut self, _: Event) -> Result<(), CreditError> {
        Ok(())
    }

    fn pull_credit(&mut self, _: Event) -> Result<Credit, CreditError> {
        Ok(Credit { granted: 1 << 40, unscheduled: 0 })
    }
}

impl RecordingPort {
    fn post(&mut self, tag: Tag) -> Result<PostOutcome, PostError> {
        if self.is_full {
            return Ok(PostOutcome::Full);
        }
        self.pending.push(tag);
        Ok(PostOutcome::Accepted)
    }
}

#[derive(Debug, Clone)]
enum Step {
    Send(u64),
    Recv(u64),
    Write(u64),
    Read(u64),
    Notify(usize),
    /// The fabric ends an operation, with or without success.
    Done(prop::sample::Index, bool),
    Full(bool),
    /// Time passes.
    Expire(u64),
    /// The peer reads this many bytes.
    Sent(usize),
    /// Users have taken notifications.
    Taken(u64),
    /// The peer sends a frame: kind, two numbers, and a length.
    Says(u8, u64, u64, usize),
}

fn step() -> impl Strategy<Value = Step> {
    // Small numbers are often valid. Now and then the largest number comes.
    let number =
        || prop_oneof![8 => 0u64..8, 4 => 0u64..3000, 1 => Just(u64::MAX), 1 => any::<u64>()];
    prop_oneof![
        2 => (0..=BUFFER_BYTES).prop_map(Step::Send),
        2 => (0..=BUFFER_BYTES).prop_map(Step::Recv),
        1 => (0..=BUFFER_BYTES).prop_map(Step::Write),
        1 => (0..=BUFFER_BYTES).prop_map(Step::Read),
        1 => (0..400usize).prop_map(Step::Notify),
        3 => (any::<prop::sample::Index>(), prop::bool::weighted(0.8))
            .prop_map(|(which, is_good)| Step::Done(which, is_good)),
        1 => any::<bool>().prop_map(Step::Full),
        1 => (0..60u64).prop_map(Step::Expire),
        1 => (0..4000usize).prop_map(Step::Sent),
        1 => (0..4000u64).prop_map(Step::Taken),
        8 => (1..14u8, number(), number(), 0..300usize).prop_map(|(kind, a, b, len)| Step::Says(kind, a, b, len)),
    ]
}

const BUFFER_BYTES: u64 = 1000;

fn limits() -> Limits {
    Limits {
        eager_bytes: 200,
        eager_window: 2000,
        notify_window: 2000,
        max_notification: 1000,
        unscheduled_bytes: 500,
        max_demand_bytes: 1 << 20,
    }
}

fn frame(kind: u8, number: u64, second: u64, payload: &[u8]) -> Frame<'_> {
    match kind {
        1 => Frame::Notify { total: number, part: payload },
        2 => Frame::NotifyCredit { granted: number, arrived: second },
        3 => Frame::Eager { seq: number, payload },
        4 => Frame::EagerCredit { freed: number, arrived: second },
        5 => Frame::Announce { seq: number, bytes: second },
        6 => {
            let region = WireRegion { address: number, bytes: second, key: number };
            Frame::Grant { seq: number, target: RemoteSegment { region, offset: second / 2 } }
        }
        7 => {
            let why = if number.is_multiple_of(2) { Refusal::TooShort } else { Refusal::NotOpened };
            Frame::Refuse { seq: number, capacity: second, why }
        }
        8 => {
            let outcomes = [Outcome::Written, Outcome::Withdrawn, Outcome::Failed];
            Frame::Finish { seq: number, outcome: outcomes[(second % 3) as usize] }
        }
        9 => Frame::Withdraw { seq: number },
        10 => Frame::Demand(Demand { announced: number, withdrawn: second }),
        11 => Frame::Credit(Credit { granted: number, unscheduled: second }),
        12 => Frame::Arrived { scheduled: number, unscheduled: second },
        _ => Frame::Goodbye,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    /// Nothing panics on any frames. Every transfer ends exactly once, and all memory is released.
    #[test]
    fn a_peer_can_say_anything(steps in prop::collection::vec(step(), 1..200)) {
        let count = Rc::new(RefCell::new(0));
        let mut link: Link<HoldCount> = Link::new(limits(), limits(), 300);
        let mut port = RecordingPort::default();
        let (mut next, mut now) = (0u32, 0);
        // The next sequence number of the peer, so that many frames have the expected one.
        let mut due = 0;
        let mut reason = CloseReason::Left;
        for step in steps {
            let transfer = next;
            let local = |bytes| LocalRange { hold: HoldCount::new(&count), region: RegionId(1), offset: 0, bytes };
            let region = WireRegion { address: 0, bytes: BUFFER_BYTES, key: 1 };
            let remote = RemoteSegment { region, offset: 0 };
            let deadline = now + u64::from(next % 97) + 1;
            let mut outcome = Ok(());
            let is_transfer = matches!(
                step,
                Step::Send(_) | Step::Recv(_) | Step::Write(_) | Step::Read(_) | Step::Notify(_)
            );
            match step {
                Step::Send(bytes) => link.send(&mut port, transfer, deadline, local(bytes)),
                Step::Recv(bytes) => link.recv(&mut port, transfer, deadline, local(bytes)),
                Step::Write(bytes) => link.write(&mut port, transfer, deadline, local(bytes), remote),
                Step::Read(bytes) => link.read(&mut port, transfer, deadline, local(bytes), remote),
                Step::Notify(bytes) => link.notify(&mut port, transfer, deadline, vec![0; bytes]),
                Step::Done(which, is_good) => {
                    if !port.pending.is_empty() {
                        let tag = port.pending.swap_remove(which.index(port.pending.len()));
                        let result = if is_good { Ok(()) } else { Err(PostError::Disconnected { op: "write" }) };
                        link.on_done(&mut port, tag, result);
                    }
                }
                Step::Full(is_full) => port.is_full = is_full,
                Step::Expire(passed) => {
                    now += passed;
                    outcome = link.expire(&mut port, now).map_err(CloseReason::Deadline);
                }
                Step::Sent(bytes) => {
                    let bytes = bytes.min(link.output().len());
                    link.sent(bytes);
                }
                Step::Taken(cost) => link.taken(cost),
                Step::Says(kind, number, second, len) => {
                    let is_message = matches!(kind, 3 | 5);
                    let number = if is_message && number < 8 { due } else { number };
                    let payload = vec![0; len];
                    match link.on_frame(&mut port, frame(kind, number, second, &payload)) {
                        Ok(false) => due += u64::from(is_message),
                        Ok(true) => outcome = Err(CloseReason::Left),
                        Err(error) => outcome = Err(CloseReason::Protocol(error.to_string().into())),
                    }
                }
            }
            next += u32::from(is_transfer);
            if let Err(why) = outcome {
                reason = why;
                break;
            }
            link.progress(&mut port);
            prop_assert!(link.output().len() <= MAX_UNREAD + (1 << 20));
        }
        link.close(&mut port, &reason);
        for tag in std::mem::take(&mut port.pending) {
            link.on_done(&mut port, tag, Err(PostError::Disconnected { op: "write" }));
        }
        prop_assert_eq!(port.finished.len(), next as usize);
        prop_assert_eq!(link.num_in_flight(), 0);
        prop_assert_eq!(*count.borrow(), 0);
    }
}

/// Rounds of many short and few long messages: the buffers that are kept for reuse stay within the bound of the window.
#[test]
fn buffers_of_messages_that_came_early_do_not_pile_up() {
    let count = Rc::new(RefCell::new(0));
    let mut link: Link<HoldCount> = Link::new(limits(), limits(), 300);
    let mut port = RecordingPort::default();
    let (mut seq, mut transfer) = (0, 0);
    for round in 0..100 {
        // As many messages as fit, of different lengths, so that long ones get buffers of short ones.
        let mut waiting = Vec::new();
        for nth in 0.. {
            let bytes = if (nth + round) % 7 == 0 { 200 } else { nth % 3 };
            let cost: u64 = waiting.iter().map(|len| len + EAGER_OVERHEAD).sum();
            if cost + bytes + EAGER_OVERHEAD > limits().eager_window {
                break;
            }
            let payload = vec![0; bytes as usize];
            let is_over = link.on_frame(&mut port, Frame::Eager { seq, payload: &payload });
            assert_eq!(is_over, Ok(false));
            (seq, waiting) = (seq + 1, [waiting, vec![bytes]].concat());
        }
        for _ in waiting {
            let local = LocalRange {
                hold: HoldCount::new(&count),
                region: RegionId(1),
                offset: 0,
                bytes: 200,
            };
            link.recv(&mut port, transfer, u64::MAX, local);
            transfer += 1;
        }
        link.progress(&mut port);
        let bytes = link.output().len();
        link.sent(bytes);
        let kept: u64 =
            link.spare.iter().map(|buffer| buffer.capacity() as u64 + EAGER_OVERHEAD).sum();
        assert_eq!(kept, link.spare_bytes);
        assert!(kept <= 2 * limits().eager_window, "{kept} bytes are kept in round {round}");
    }
    assert_eq!(port.finished.len(), transfer as usize);
}
