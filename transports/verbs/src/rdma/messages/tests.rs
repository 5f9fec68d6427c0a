use rand::rngs::StdRng;
use rand::seq::IteratorRandom;
use rand::{RngExt, SeedableRng};

use super::*;
use crate::config::MAX_QUEUE_PAIRS;
use crate::detail::MIN_RECEIVES;

const SLOT_BYTES: usize = 4096;

fn bytes(header: &Header) -> [u8; HEADER_BYTES] {
    let mut message = [0; HEADER_BYTES];
    header.encode(&mut message);
    message
}

fn arrivals() -> Arrivals {
    Arrivals::new(20)
}

fn header(seq: u32, writes: u64, action: Action) -> Header {
    super::header(seq, writes, action, 0)
}

fn add(seq: u32, writes: u64, value: u64) -> [u8; HEADER_BYTES] {
    bytes(&header(seq, writes, Action::Add { offset: 64, value }))
}

/// The values that one arrival adds to the flag, in order.
fn added(arrivals: &Arrivals, arrival: Arrival<'_>) -> Result<Vec<u64>, ReceiveError> {
    let mut values = Vec::new();
    arrivals.take(arrival, SLOT_BYTES, |offset, value| {
        assert_eq!(offset, 64);
        values.push(value);
    })?;
    Ok(values)
}

#[test]
fn the_setting_comes_before_the_environment_and_that_before_the_device() {
    use SignalChoice::{Atomics, Auto, Messages};
    let port = Some("mana_0:1");
    for (choice, environment, without_atomics, expected) in [
        (Auto, None, None, Signals::Atomics),
        (Auto, Some("auto"), None, Signals::Atomics),
        (Auto, Some(""), port, Signals::Messages),
        (Auto, None, port, Signals::Messages),
        (Auto, Some("messages"), None, Signals::Messages),
        (Auto, Some("atomics"), None, Signals::Atomics),
        (Atomics, Some("messages"), None, Signals::Atomics),
        (Messages, Some("atomics"), None, Signals::Messages),
        (Messages, Some("nonsense"), port, Signals::Messages),
    ] {
        let found = choose(choice, environment, without_atomics);
        assert_eq!(found, Ok(expected), "{choice:?} {environment:?} {without_atomics:?}");
    }
    for (choice, environment) in [(Atomics, None), (Auto, Some("atomics"))] {
        let error = choose(choice, environment, port).unwrap_err();
        assert!(error.contains("mana_0:1") && error.contains("`messages`"), "{error}");
    }
    let error = choose(Auto, Some("imm"), None).unwrap_err();
    assert!(error.contains(SIGNALS_VARIABLE) && error.contains("`imm`"), "{error}");
}

#[test]
fn a_flag_waits_for_the_writes_of_other_queue_pairs() {
    let arrivals = arrivals();
    assert_eq!(added(&arrivals, Arrival::Message(&add(0, 0, 1))), Ok(vec![1]));
    assert_eq!(added(&arrivals, Arrival::Message(&add(1, 2, 2))), Ok(vec![]));
    assert_eq!(added(&arrivals, Arrival::Message(&add(2, 2, 3))), Ok(vec![]));
    assert_eq!(added(&arrivals, Arrival::Write(1)), Ok(vec![]));
    // A later one does not stand in for the missing earlier one.
    assert_eq!(added(&arrivals, Arrival::Write(3)), Ok(vec![]));
    assert_eq!(added(&arrivals, Arrival::Write(1)), Ok(vec![2, 3]));
    assert_eq!(added(&arrivals, Arrival::Message(&add(3, 3, 4))), Ok(vec![4]));
}

#[test]
fn questions_are_answered_behind_what_they_ask_about() {
    let arrivals = arrivals();
    let take = |arrival: Arrival<'_>| arrivals.take(arrival, SLOT_BYTES, |_, _| panic!("no flag"));
    let ask = |seq, writes, id| bytes(&header(seq, writes, Action::Answer { id }));
    assert_eq!(take(Arrival::Message(&ask(0, 1, 7))), Ok(None));
    assert_eq!(take(Arrival::Message(&ask(1, 1, 8))), Ok(None));
    // One answer is enough for both.
    assert_eq!(take(Arrival::Write(0)), Ok(Some(8)));
    assert_eq!(arrivals.answered(), 0);
    for (id, expected) in [(5, 5), (3, 5), (9, 9)] {
        let answer = bytes(&header(0, 0, Action::Answered { id }));
        assert_eq!(take(Arrival::Message(&answer)), Ok(None));
        assert_eq!(arrivals.answered(), expected);
    }
}

#[test]
fn what_a_peer_may_not_send_is_named() {
    let good = header(0, 0, Action::Add { offset: 64, value: 1 });
    let refused =
        |header: Header| added(&arrivals(), Arrival::Message(&bytes(&header))).unwrap_err();
    let at = |offset| Header { action: Action::Add { offset, value: 1 }, ..good };
    let beyond = MessageError::Range { offset: 4096, len: 8, slot_bytes: SLOT_BYTES };
    assert_eq!(refused(at(4096)), ReceiveError::Message(beyond));
    assert_eq!(refused(at(68)), ReceiveError::Message(MessageError::Misaligned { offset: 68 }));
    assert!(matches!(refused(at(u32::MAX - 7)), ReceiveError::Message(MessageError::Range { .. })));
    let lost = OrderError::Sequence { found: 3, expected: 0 };
    assert_eq!(refused(Header { seq: 3, ..good }), ReceiveError::Order(lost));
    let parts = MessageError::Parts { idx: 0, num_parts: 1 };
    assert_eq!(refused(Header { num_parts: 1, ..good }), ReceiveError::Message(parts));
    for header in [
        Header { slot: 1, ..good },
        Header { token: 1, ..good },
        Header { credit: Credit { offset: 64, total: 1 }, ..good },
        Header { action: Action::Farewell, ..good },
    ] {
        assert!(matches!(refused(header), ReceiveError::Unexpected { .. }), "{header:?}");
    }
    let message = bytes(&good);
    for len in 0..HEADER_BYTES {
        let short = added(&arrivals(), Arrival::Message(&message[..len])).unwrap_err();
        assert_eq!(short, ReceiveError::Message(MessageError::Short { found: len }));
    }
}

#[test]
fn messages_for_writes_that_never_come_are_bounded() {
    let arrivals = arrivals();
    let most = (2 << 20) / HEADER_BYTES as u32;
    let refused =
        (0..most).find_map(|seq| added(&arrivals, Arrival::Message(&add(seq, u64::MAX, 1))).err());
    let too_much = matches!(refused, Some(ReceiveError::Order(OrderError::TooMuchHeld { .. })));
    assert!(too_much, "{refused:?}");
}

#[test]
fn any_bytes_end_the_pair_or_stay_within_the_slot() {
    let seed = rand::random();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    for _ in 0..2_000 {
        let arrivals = arrivals();
        for seq in 0..20 {
            let action = match rng.random_range(0..6) {
                0 => Action::Answer { id: rng.random() },
                1 => Action::Answered { id: rng.random() },
                _ => Action::Add { offset: rng.random_range(0..512) * 8, value: rng.random() },
            };
            let mut message = bytes(&header(seq, rng.random_range(0..3), action));
            if rng.random_range(0..4) == 0 {
                message[rng.random_range(0..HEADER_BYTES)] = rng.random();
            }
            let len = if rng.random_range(0..20) == 0 { rng.random_range(0..56) } else { 56 };
            let arrival = match rng.random_range(0..3) {
                0 => Arrival::Write(rng.random_range(0..30)),
                _ => Arrival::Message(&message[..len]),
            };
            let taken = arrivals.take(arrival, SLOT_BYTES, |offset, _| {
                assert!(offset + 8 <= SLOT_BYTES && offset % 8 == 0, "seed {seed}");
            });
            if taken.is_err() {
                break;
            }
        }
    }
}

/// Queue pairs progress independently: messages keep their order; writes come before, after and between them.
#[test]
fn flags_of_several_queue_pairs_come_in_order_and_behind_their_writes() {
    let seed = rand::random();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    for _ in 0..200 {
        // Queue 0 carries the messages, the others carry writes. Each write has its place in the total order and
        // its next message.
        let num_queues = rng.random_range(2..6);
        let mut queues = vec![std::collections::VecDeque::new(); num_queues];
        let (mut messages, mut num_writes) = (Vec::new(), 0);
        for _ in 0..60 {
            let next = messages.len() as u32;
            if rng.random() {
                queues[rng.random_range(1..num_queues)].push_back((num_writes, next));
                num_writes += 1;
            } else {
                queues[0].push_back((0, next));
                messages.push((num_writes, add(next, num_writes as u64, u64::from(next))));
            }
        }
        let arrivals = Arrivals::new(2 * 60 + 4);
        let (mut landed, mut next) = (vec![false; num_writes], 0);
        while let Some(queue) =
            (0..num_queues).filter(|idx| !queues[*idx].is_empty()).choose(&mut rng)
        {
            let (write, message) = queues[queue].pop_front().unwrap();
            let arrival = if queue == 0 {
                Arrival::Message(&messages[message as usize].1)
            } else {
                landed[write] = true;
                Arrival::Write(message)
            };
            for value in added(&arrivals, arrival).unwrap() {
                assert_eq!(value, next, "seed {seed}");
                let before = messages[next as usize].0;
                assert!(landed[..before].iter().all(|landed| *landed), "seed {seed}");
                next += 1;
            }
        }
        assert_eq!(next as usize, messages.len(), "seed {seed}");
        // Waiting arrivals have not used up the window in the end.
        assert_eq!(arrivals.tell(), 60);
    }
}

/// Two sides send, read and pause at random. A message always finds a receive. A sender that waits for room gets
/// some once the other side continues.
#[test]
fn receives_are_enough_and_room_comes_back() {
    let seed = rand::random();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    for _ in 0..100 {
        let num_receives = rng.random_range(MIN_RECEIVES..60);
        let window = window_of(num_receives);
        let sides = [(); 2].map(|()| Arrivals::new(num_receives));
        // Per side: messages received but not read, number of messages sent, and the unanswered question.
        let mut unread = [(); 2].map(|()| std::collections::VecDeque::<[u8; HEADER_BYTES]>::new());
        let (mut sent, mut owed, mut num_sent) = ([0u32; 2], [None; 2], 0);
        for step in 0..3_000 {
            let own = rng.random_range(0..2);
            let peer = 1 - own;
            let is_still = step % 1_000 < 500 && own == (step / 1_000) % 2;
            if rng.random() && !is_still {
                if let Some(message) = unread[own].pop_front() {
                    let arrival = Arrival::Message(&message);
                    let asked = sides[own].take(arrival, SLOT_BYTES, |_, _| {}).unwrap();
                    owed[own] = owed[own].max(asked);
                }
                let action = match owed[own].take() {
                    Some(id) => Action::Answered { id },
                    None if sides[own].has_news() => Action::Credit,
                    None => continue,
                };
                unread[peer].push_back(bytes(&super::header(0, 0, action, sides[own].tell())));
            } else if sent[own].wrapping_sub(sides[own].peer_taken()) < window {
                let action = match rng.random() {
                    true => Action::Answer { id: u64::from(sent[own]) },
                    false => Action::Nothing,
                };
                let taken = sides[own].tell();
                unread[peer].push_back(bytes(&super::header(sent[own], 0, action, taken)));
                sent[own] += 1;
                num_sent += 1;
            }
            for unread in &unread {
                assert!(unread.len() <= num_receives as usize, "seed {seed}");
            }
        }
        assert!(num_sent > 100, "{num_sent} in all, seed {seed}");
        // Once both have read everything, both have room.
        for own in [0, 1, 0, 1] {
            while let Some(message) = unread[own].pop_front() {
                sides[own].take(Arrival::Message(&message), SLOT_BYTES, |_, _| {}).unwrap();
                if sides[own].has_news() {
                    let news = super::header(0, 0, Action::Credit, sides[own].tell());
                    unread[1 - own].push_back(bytes(&news));
                }
            }
        }
        for own in [0, 1] {
            let under_way = sent[own].wrapping_sub(sides[own].peer_taken());
            let room = window - under_way;
            assert!(room > window / 2, "{under_way} of {window}, seed {seed}");
            assert!(room >= MAX_QUEUE_PAIRS as u32, "{under_way} of {window}, seed {seed}");
        }
    }
}
