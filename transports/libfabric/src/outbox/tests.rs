use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::super::message::{Credit, HEADER_BYTES};
use super::*;

const MAX_BYTES: usize = 256;

fn outbox() -> Outbox {
    Outbox::new(MAX_BYTES)
}

fn op(offset: usize) -> Op<'static> {
    let src = LocalMemory { ptr: std::ptr::null_mut(), len: 8, descriptor: Descriptor::NONE };
    Op::Write { src, offset }
}

fn push(outbox: &Outbox, op: Op<'_>) -> (PushStatus, bool) {
    outbox.push(op).unwrap()
}

fn offset_of(op: Op<'_>) -> usize {
    match op {
        Op::Write { offset, .. } => offset,
        other => panic!("{other:?}"),
    }
}

/// A message of `len` bytes, with zeros for parts.
fn message(seq: u32, action: Action, len: usize) -> Vec<u8> {
    let credit = Credit::default();
    let num_parts = u16::from(len > HEADER_BYTES);
    let header = Header { slot: 1, seq, token: 2, writes: 0, action, credit, num_parts, mails: 0 };
    let mut head = [0; HEADER_BYTES];
    header.encode(&mut head);
    let mut out = head.to_vec();
    out.resize(len.max(HEADER_BYTES), seq as u8);
    out
}

fn decoded(op: Op<'_>) -> (Header, Vec<u8>) {
    match op {
        Op::Message { bytes, .. } => (Header::decode(bytes).unwrap(), bytes.to_vec()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn operations_keep_their_order_when_the_library_takes_some_only() {
    let outbox = outbox();
    assert!(!outbox.flush(|_| panic!("nothing waits")));
    for offset in 0..5 {
        assert_eq!(push(&outbox, op(offset)), (PushStatus::Queued, offset == 0));
    }
    let mut seen = Vec::new();
    let mut room = 2;
    let mut take = |op: Op<'_>| {
        if room == 0 {
            return Some(PostStatus::Again);
        }
        room -= 1;
        seen.push(offset_of(op));
        Some(PostStatus::Accepted)
    };
    assert!(!outbox.flush(&mut take));
    assert_eq!(outbox.num(), 3);
    room = 9;
    let mut take = |op: Op<'_>| {
        room -= 1;
        seen.push(offset_of(op));
        Some(PostStatus::Accepted)
    };
    assert!(outbox.flush(&mut take));
    assert_eq!((outbox.num(), seen), (0, vec![0, 1, 2, 3, 4]));
}

/// Covers a library call that may never return.
#[test]
fn others_add_and_close_while_the_library_stands_still() {
    let outbox = outbox();
    push(&outbox, op(0));
    let mut num_posted = 0;
    let is_empty = outbox.flush(|op| {
        num_posted += 1;
        if num_posted == 1 {
            assert_eq!(push(&outbox, self::op(1)), (PushStatus::Queued, false), "not the only one");
            assert_eq!(outbox.num(), 2);
            assert!(!outbox.flush(|_| panic!("another thread drives")));
        }
        assert_eq!(offset_of(op), num_posted - 1);
        Some(PostStatus::Accepted)
    });
    assert!(is_empty && num_posted == 2 && outbox.num() == 0);

    push(&outbox, op(2));
    let mut was_something = false;
    let is_empty = outbox.flush(|_| {
        was_something = outbox.close();
        Some(PostStatus::Again)
    });
    assert!(was_something && !is_empty, "counted once");
    assert_eq!(outbox.num(), 0);
    assert!(!outbox.close(), "nothing came back");
    assert_eq!(push(&outbox, op(3)), (PushStatus::Merged, false));
    assert_eq!(outbox.num(), 0, "nor was anything added");
    assert!(!outbox.flush(|_| panic!("nothing waits")));
}

#[test]
fn a_failed_pair_throws_away_what_waits() {
    let outbox = outbox();
    (0..3).for_each(|offset| assert_eq!(push(&outbox, op(offset)).0, PushStatus::Queued));
    let mut num_asked = 0;
    assert!(outbox.flush(|_| {
        num_asked += 1;
        None
    }));
    assert_eq!((outbox.num(), num_asked), (0, 1));
    assert_eq!(push(&outbox, op(9)), (PushStatus::Queued, true));
    for offset in 1..MAX_WAITING {
        assert_eq!(push(&outbox, op(offset)).0, PushStatus::Queued);
    }
    assert_eq!(push(&outbox, op(0)), (PushStatus::Full, false));
}

/// Queues as many messages of full length as operations, and as many again after some have left.
#[test]
fn every_operation_may_be_a_message_of_full_length() {
    let outbox = outbox();
    let (mut next, mut expected) = (0, 0);
    for num_taken in [1, 700, MAX_WAITING, 3] {
        while push(
            &outbox,
            Op::Message { bytes: &message(next, Action::Nothing, MAX_BYTES), after_writes: 0 },
        )
        .0 == PushStatus::Queued
        {
            next += 1;
        }
        assert_eq!(outbox.num(), MAX_WAITING);
        let mut room = num_taken;
        outbox.flush(|op| {
            if room == 0 {
                return Some(PostStatus::Again);
            }
            room -= 1;
            let (header, bytes) = decoded(op);
            assert_eq!(header.seq, expected);
            assert!(bytes == message(expected, Action::Nothing, MAX_BYTES));
            expected += 1;
            Some(PostStatus::Accepted)
        });
        assert_eq!(outbox.num(), MAX_WAITING - num_taken);
    }
}

/// Messages in an otherwise empty queue reuse the pages of the first one.
#[test]
fn room_is_used_again_from_its_begin() {
    let outbox = outbox();
    let bytes = message(0, Action::Nothing, MAX_BYTES);
    let mut first = None;
    for _ in 0..3 * MAX_WAITING {
        push(&outbox, Op::Message { bytes: &bytes, after_writes: 0 });
        outbox.flush(|op| {
            let Op::Message { bytes, .. } = op else { panic!("{op:?}") };
            assert_eq!(*first.get_or_insert(bytes.as_ptr().addr()), bytes.as_ptr().addr());
            Some(PostStatus::Accepted)
        });
    }
}

#[test]
fn an_addition_joins_the_one_before_it_unless_the_library_has_that() {
    let outbox = outbox();
    let add = |seq, value| message(seq, Action::Add { offset: 64, value }, 0);
    let send = |seq, value| push(&outbox, Op::Message { bytes: &add(seq, value), after_writes: 0 });
    assert_eq!(send(0, 5), (PushStatus::Queued, true));
    assert_eq!(send(1, 3), (PushStatus::Merged, false));
    let mut sums = Vec::new();
    assert!(outbox.flush(|op| {
        if sums.is_empty() {
            assert_eq!(send(1, 7), (PushStatus::Queued, false));
        }
        let (header, _) = decoded(op);
        let Action::Add { value, .. } = header.action else { panic!("{header:?}") };
        sums.push((header.seq, value));
        Some(PostStatus::Accepted)
    }));
    assert_eq!(sums, [(0, 8), (1, 7)]);
    // Nor does it join a message that has left.
    assert_eq!(send(2, 1), (PushStatus::Queued, true));
}

/// With one poster, one driver and a library that refuses at random, all operations arrive once, in
/// order.
#[test]
fn two_threads_lose_nothing() {
    let seed = rand::random();
    println!("seed {seed}");
    let num_posts = 200_000u32;
    let outbox = outbox();
    std::thread::scope(|scope| {
        let poster = scope.spawn(|| {
            let mut rng = StdRng::seed_from_u64(seed);
            let (mut seq, mut sum) = (0, 0);
            for _ in 0..num_posts {
                let value = rng.random_range(1..100u64);
                let len = if rng.random() { 0 } else { rng.random_range(HEADER_BYTES..MAX_BYTES) };
                sum += value;
                loop {
                    let bytes = message(seq, Action::Add { offset: 8, value }, len);
                    match push(&outbox, Op::Message { bytes: &bytes, after_writes: 0 }).0 {
                        PushStatus::Queued => break seq += 1,
                        PushStatus::Merged => break,
                        PushStatus::Full => std::thread::yield_now(),
                    }
                }
            }
            (seq, sum)
        });
        let mut rng = StdRng::seed_from_u64(seed ^ 1);
        let (mut seq, mut sum) = (0, 0);
        loop {
            let is_over = poster.is_finished();
            outbox.flush(|op| {
                if rng.random_range(0..8) == 0 {
                    return Some(PostStatus::Again);
                }
                let (header, bytes) = decoded(op);
                assert_eq!(header.seq, seq, "seed {seed}");
                assert!(bytes[HEADER_BYTES..].iter().all(|byte| *byte == seq as u8), "seed {seed}");
                let Action::Add { value, .. } = header.action else { panic!("{header:?}") };
                sum += value;
                seq += 1;
                Some(PostStatus::Accepted)
            });
            if is_over && outbox.num() == 0 {
                break;
            }
            std::thread::yield_now();
        }
        assert_eq!(poster.join().unwrap(), (seq, sum), "seed {seed}");
        println!("{num_posts} posts in {seq} operations");
    });
}
