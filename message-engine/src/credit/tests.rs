//! Both halves over a network that delays, merges and repeats reports, on a virtual clock.

use std::collections::VecDeque;

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::*;

fn config(order: GrantOrder) -> CreditConfig {
    CreditConfig {
        window_bytes: 1000,
        sender_window_bytes: 700,
        grant_bytes: 100,
        unscheduled_bytes: 16,
        max_demand_bytes: 1 << 20,
        max_senders: 5,
        order,
        expiry_ns: 1_000,
    }
}

/// One sender, its bytes under way, and the test's own counts.
struct Wire {
    id: SenderId,
    sender: CreditSender,
    demands: VecDeque<Demand>,
    credits: VecDeque<Credit>,
    /// Scheduled bytes under way, in pieces, and arrived.
    data: VecDeque<u64>,
    arrived: u64,
    unscheduled: VecDeque<u64>,
    unscheduled_arrived: u64,
    /// Counts of the test.
    submitted: u64,
    withdrawn: u64,
    small: u64,
}

struct Net {
    config: CreditConfig,
    receiver: CreditReceiver,
    wires: Vec<Wire>,
    now_ns: u64,
    num_stalls: usize,
}

impl Net {
    fn new(config: CreditConfig, num_senders: usize) -> Self {
        let mut receiver = CreditReceiver::new(config).unwrap();
        let wires = (0..num_senders).map(|_| Wire::join(&mut receiver, &config)).collect();
        Self { config, receiver, wires, now_ns: 0, num_stalls: 0 }
    }

    fn submit(&mut self, at: usize, len: u64) {
        let wire = &mut self.wires[at];
        match wire.sender.submit(len) {
            Ok(Admission::Unscheduled) => {
                wire.small += len;
                wire.unscheduled.push_back(len);
            }
            Ok(Admission::Scheduled(demand)) => {
                wire.submitted += len;
                wire.demands.push_back(demand);
            }
            Err(CreditError::Excess { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }

    fn send(&mut self, at: usize, most: u64) {
        let wire = &mut self.wires[at];
        let bytes = wire.sender.allowance().min(most);
        wire.sender.sent(bytes).unwrap();
        if bytes > 0 {
            wire.data.push_back(bytes);
        }
    }

    fn withdraw(&mut self, at: usize, most: u64) {
        let wire = &mut self.wires[at];
        let bytes = wire.sender.backlog().min(most);
        wire.demands.push_back(wire.sender.withdraw(bytes).unwrap());
        wire.withdrawn += bytes;
    }

    /// Delivers something of sender `at` to the receiver: demands, data or unscheduled data.
    fn deliver(&mut self, at: usize, what: u8, merge: bool) {
        let wire = &mut self.wires[at];
        let event = match what % 3 {
            0 => {
                let Some(mut demand) = wire.demands.pop_front() else { return };
                while merge && let Some(later) = wire.demands.pop_front() {
                    demand = later;
                }
                Event::Demand(demand)
            }
            1 => {
                let Some(bytes) = wire.data.pop_front() else { return };
                wire.arrived += bytes;
                Event::Received(wire.arrived)
            }
            _ => {
                let Some(bytes) = wire.unscheduled.pop_front() else { return };
                wire.unscheduled_arrived += bytes;
                Event::UnscheduledReceived(wire.unscheduled_arrived)
            }
        };
        let id = wire.id;
        for _ in 0..if merge { 2 } else { 1 } {
            self.receiver.handle(self.now_ns, id, event).unwrap();
        }
        self.act();
    }

    fn act(&mut self) {
        while let Some(action) = self.receiver.next_action() {
            match action {
                Action::Credit { sender, credit } => {
                    let wire = self.wires.iter_mut().find(|wire| wire.id == sender).unwrap();
                    wire.credits.push_back(credit);
                }
                Action::Stalled { .. } => self.num_stalls += 1,
            }
        }
    }

    fn credit(&mut self, at: usize, merge: bool) {
        let wire = &mut self.wires[at];
        let Some(mut credit) = wire.credits.pop_front() else { return };
        while merge && let Some(later) = wire.credits.pop_front() {
            credit = later;
        }
        wire.sender.on_credit(credit).unwrap();
    }

    fn leave(&mut self, at: usize) {
        self.receiver.leave(self.now_ns, self.wires[at].id).unwrap();
        assert!(self.receiver.sender(self.wires[at].id).is_err());
        self.wires[at] = Wire::join(&mut self.receiver, &self.config);
        self.act();
    }

    fn pass_time(&mut self, ns: u64) {
        self.now_ns += ns;
        let due = self.receiver.next_expiry_ns().is_some_and(|at| at <= self.now_ns);
        assert_eq!(self.receiver.expire(self.now_ns) > 0, due);
        self.act();
    }

    /// Checks the invariants against the actual steps of the senders.
    fn check(&self) -> Result<(), TestCaseError> {
        let (mut window, mut under_way) = (0, 0);
        for wire in &self.wires {
            let state = self.receiver.sender(wire.id).unwrap();
            let in_flight: u64 = wire.data.iter().sum();
            prop_assert!(in_flight <= state.outstanding);
            prop_assert!(state.outstanding <= self.config.sender_window_bytes);
            let small: u64 = wire.unscheduled.iter().sum();
            prop_assert!(small <= self.config.unscheduled_bytes);
            prop_assert_eq!(
                wire.submitted,
                wire.sender.backlog() + in_flight + wire.arrived + wire.withdrawn
            );
            if !state.stalled {
                window += state.outstanding;
                under_way += in_flight;
            }
        }
        prop_assert_eq!(window, self.receiver.window_used());
        prop_assert!(under_way <= window && window <= self.config.window_bytes);
        Ok(())
    }

    /// Every sender sends as much as it may until nothing moves any more. Returns the number of rounds.
    fn drain(&mut self) -> usize {
        for round in 0.. {
            let before: Vec<_> = self.wires.iter().map(Wire::progress).collect();
            for at in 0..self.wires.len() {
                for what in [0, 0, 0, 1, 2] {
                    self.deliver(at, what, false);
                }
                self.credit(at, true);
                self.send(at, u64::MAX);
            }
            if before == self.wires.iter().map(Wire::progress).collect::<Vec<_>>() {
                return round;
            }
        }
        unreachable!()
    }
}

impl Wire {
    fn join(receiver: &mut CreditReceiver, config: &CreditConfig) -> Self {
        Self {
            id: receiver.join().unwrap(),
            sender: CreditSender::new(config),
            demands: VecDeque::new(),
            credits: VecDeque::new(),
            data: VecDeque::new(),
            arrived: 0,
            unscheduled: VecDeque::new(),
            unscheduled_arrived: 0,
            submitted: 0,
            withdrawn: 0,
            small: 0,
        }
    }

    fn progress(&self) -> (u64, u64, usize, usize, usize) {
        let queued = self.data.len() + self.unscheduled.len();
        let sent = self.sender.backlog();
        (self.arrived, sent, queued, self.demands.len(), self.credits.len())
    }
}

#[derive(Debug, Clone, Copy)]
enum Op {
    Submit(usize, u64),
    Send(usize, u64),
    Withdraw(usize, u64),
    Deliver(usize, u8, bool),
    Credit(usize, bool),
    Leave(usize),
    Time(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let at = || 0usize..4;
    prop_oneof![
        3 => (at(), prop_oneof![0u64..20, 0u64..3000]).prop_map(|(a, n)| Op::Submit(a, n)),
        4 => (at(), prop_oneof![1u64..50, Just(u64::MAX)]).prop_map(|(a, n)| Op::Send(a, n)),
        1 => (at(), 0u64..2000).prop_map(|(a, n)| Op::Withdraw(a, n)),
        8 => (at(), any::<u8>(), any::<bool>()).prop_map(|(a, w, m)| Op::Deliver(a, w, m)),
        4 => (at(), any::<bool>()).prop_map(|(a, m)| Op::Credit(a, m)),
        1 => at().prop_map(Op::Leave),
        1 => (0u64..700).prop_map(Op::Time),
    ]
}

fn order() -> impl Strategy<Value = GrantOrder> {
    prop_oneof![Just(GrantOrder::RoundRobin), Just(GrantOrder::ShortestFirst)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn whatever_happens_the_window_holds_and_everything_arrives(
        order in order(),
        ops in prop::collection::vec(op(), 0..300),
    ) {
        let mut net = Net::new(config(order), 4);
        for op in ops {
            match op {
                Op::Submit(at, len) => net.submit(at, len),
                Op::Send(at, most) => net.send(at, most),
                Op::Withdraw(at, most) => net.withdraw(at, most),
                Op::Deliver(at, what, merge) => net.deliver(at, what, merge),
                Op::Credit(at, merge) => net.credit(at, merge),
                Op::Leave(at) => net.leave(at),
                Op::Time(ns) => net.pass_time(ns),
            }
            net.check()?;
        }
        net.drain();
        net.check()?;
        prop_assert_eq!(net.receiver.window_used(), 0);
        for wire in &net.wires {
            prop_assert_eq!(wire.sender.backlog(), 0);
            prop_assert_eq!(wire.arrived + wire.withdrawn, wire.submitted);
            prop_assert_eq!(wire.unscheduled_arrived, wire.small);
            let state = net.receiver.sender(wire.id).unwrap();
            prop_assert_eq!((state.ungranted, state.outstanding, state.stalled), (0, 0, false));
        }
        prop_assert_eq!(net.receiver.next_expiry_ns(), None);
    }

    #[test]
    fn foreign_counters_are_errors_that_change_nothing_or_are_harmless(
        order in order(),
        events in prop::collection::vec(
            (0usize..3, 0u8..4, near_edges(), near_edges()), 0..100),
    ) {
        let mut receiver = CreditReceiver::new(CreditConfig {
            max_demand_bytes: u64::MAX, ..config(order)
        }).unwrap();
        let ids = [receiver.join().unwrap(), receiver.join().unwrap(), receiver.join().unwrap()];
        for (at, kind, a, b) in events {
            let event = match kind {
                0 | 1 => Event::Demand(Demand { announced: a, withdrawn: b }),
                2 => Event::Received(a),
                _ => Event::UnscheduledReceived(a),
            };
            let before = receiver.clone();
            match receiver.handle(1, ids[at], event) {
                Ok(()) => {}
                Err(CreditError::Impossible { found, low, high, .. }) => {
                    prop_assert!(found < low || found > high);
                    prop_assert_eq!(&receiver, &before);
                }
                Err(error) => return Err(TestCaseError::fail(error.to_string())),
            }
            while receiver.next_action().is_some() {}
            let outstanding: u64 =
                ids.iter().map(|id| receiver.sender(*id).unwrap().outstanding).sum();
            prop_assert_eq!(outstanding, receiver.window_used());
            prop_assert!(receiver.window_used() <= 1000);
        }
        for id in ids {
            receiver.leave(2, id).unwrap();
        }
        prop_assert_eq!((receiver.window_used(), receiver.num_senders()), (0, 0));
    }

    #[test]
    fn a_sender_believes_only_possible_credit(
        lens in prop::collection::vec(0u64..500, 0..20),
        credits in prop::collection::vec((near_edges(), near_edges()), 0..50),
    ) {
        let mut sender = CreditSender::new(&config(GrantOrder::RoundRobin));
        for len in lens {
            let _ = sender.submit(len).unwrap();
        }
        for (granted, unscheduled) in credits {
            let before = sender.clone();
            if sender.on_credit(Credit { granted, unscheduled }).is_err() {
                prop_assert_eq!(&sender, &before);
            }
            prop_assert!(sender.allowance() <= sender.backlog());
            prop_assert!(sender.unscheduled_allowance() <= 16);
            sender.sent(sender.allowance().min(7)).unwrap();
        }
    }
}

/// Values around everything that matters, and anything.
fn near_edges() -> impl Strategy<Value = u64> {
    prop_oneof![
        0u64..2500,
        (0u64..200).prop_map(|n| u64::MAX - n),
        (0u64..200).prop_map(|n| (1 << 63) - 100 + n),
        any::<u64>(),
    ]
}

#[test]
fn an_empty_demand_needs_no_credit_and_disturbs_no_sender() {
    let mut net = Net::new(config(GrantOrder::RoundRobin), 2);
    assert_eq!(net.wires[0].sender.submit(0), Ok(Admission::Unscheduled));
    let id = net.wires[0].id;
    net.receiver.handle(0, id, Event::Demand(Demand::default())).unwrap();
    net.receiver.handle(0, id, Event::Received(0)).unwrap();
    assert_eq!(net.receiver.next_action(), None);
    assert_eq!(net.receiver.next_expiry_ns(), None);
    // Also when the allowance for small messages is used up.
    net.submit(0, 16);
    assert_eq!(net.wires[0].sender.submit(0), Ok(Admission::Unscheduled));
    assert!(matches!(net.wires[0].sender.submit(1), Ok(Admission::Scheduled(_))));
}

#[test]
fn small_messages_go_at_once_while_they_are_few() {
    let mut net = Net::new(config(GrantOrder::RoundRobin), 1);
    net.submit(0, 10);
    net.submit(0, 6);
    assert_eq!((net.wires[0].small, net.wires[0].sender.unscheduled_allowance()), (16, 0));
    net.submit(0, 5);
    assert_eq!(net.wires[0].submitted, 5, "beyond the allowance a message waits for its grant");
    net.deliver(0, 2, false);
    net.credit(0, true);
    assert_eq!(net.wires[0].sender.unscheduled_allowance(), 10);
    net.drain();
    assert_eq!((net.wires[0].unscheduled_arrived, net.wires[0].arrived), (16, 5));
}

#[test]
fn a_sender_that_never_sends_loses_its_share_and_gets_it_back_by_sending() {
    for order in [GrantOrder::RoundRobin, GrantOrder::ShortestFirst] {
        let config = CreditConfig { sender_window_bytes: 1000, ..config(order) };
        let mut net = Net::new(config, 2);
        net.submit(0, 1000);
        net.deliver(0, 0, false);
        assert_eq!(net.receiver.window_used(), 1000);
        net.submit(1, 5000);
        net.deliver(1, 0, false);
        let state = |net: &Net, at: usize| net.receiver.sender(net.wires[at].id).unwrap();
        assert_eq!(state(&net, 1).outstanding, 0, "the silent sender holds the whole window");
        net.pass_time(1_000);
        assert_eq!(net.num_stalls, 1);
        assert!(state(&net, 0).stalled);
        assert_eq!((state(&net, 1).outstanding, net.receiver.window_used()), (1000, 1000));
        // The late bytes come after all: nothing is counted twice, and nothing is lost.
        net.submit(0, 300);
        net.credit(0, true);
        net.send(0, u64::MAX);
        net.deliver(0, 0, false);
        assert_eq!(state(&net, 0).ungranted, 300, "nothing new before the old grant is used");
        net.deliver(0, 1, false);
        assert!(!state(&net, 0).stalled);
        assert_eq!(net.receiver.window_used(), 1000);
        net.drain();
        assert_eq!((net.wires[0].arrived, net.wires[1].arrived), (1300, 5000));
    }
}

#[test]
fn a_sender_that_trickles_stalls_too() {
    let mut net = Net::new(config(GrantOrder::RoundRobin), 1);
    net.submit(0, 10_000);
    net.deliver(0, 0, false);
    net.credit(0, true);
    for _ in 0..9 {
        net.send(0, 1);
        net.deliver(0, 1, false);
        net.pass_time(100);
    }
    assert_eq!(net.num_stalls, 0);
    net.pass_time(100);
    assert_eq!(net.num_stalls, 1);
}

#[test]
fn backlogged_senders_share_alike() {
    let config = CreditConfig { sender_window_bytes: 1000, ..config(GrantOrder::RoundRobin) };
    let mut net = Net::new(config, 4);
    for at in 0..4 {
        net.submit(at, 1_000_000);
        net.deliver(at, 0, false);
    }
    let granted = |net: &Net| -> Vec<u64> {
        let ungranted = |wire: &Wire| net.receiver.sender(wire.id).unwrap().ungranted;
        net.wires.iter().map(|wire| 1_000_000 - ungranted(wire)).collect()
    };
    // The first sender had the window for itself. After that, turns rotate in any order of sends.
    assert_eq!(granted(&net), [1000, 0, 0, 0]);
    for round in 0..2_000 {
        let at = round * round % 4 + round % 3;
        net.credit(at % 4, true);
        net.send(at % 4, u64::MAX);
        while !net.wires[at % 4].data.is_empty() {
            net.deliver(at % 4, 1, false);
        }
        let granted = granted(&net);
        let since = [granted[0].saturating_sub(1000), granted[1], granted[2], granted[3]];
        let spread = since.iter().max().unwrap() - since.iter().min().unwrap();
        assert!(spread <= 100, "{since:?} in round {round}");
    }
    assert!(granted(&net)[3] > 100_000);
}

#[test]
fn shortest_first_serves_the_short_and_starves_no_sender() {
    let mut net = Net::new(
        CreditConfig {
            window_bytes: 100,
            sender_window_bytes: 100,
            ..config(GrantOrder::ShortestFirst)
        },
        3,
    );
    let pump = |net: &mut Net, at: usize| {
        net.credit(at, true);
        net.send(at, u64::MAX);
        net.deliver(at, 1, false);
    };
    net.submit(0, 100_000);
    net.deliver(0, 0, false);
    net.submit(1, 2_000);
    net.deliver(1, 0, false);
    let mut turns = 0;
    while net.wires[1].arrived < 2_000 {
        for at in 0..2 {
            pump(&mut net, at);
        }
        turns += 1;
    }
    let long = net.wires[0].arrived;
    assert!((100..=500).contains(&long), "the long one got {long} beside the short one's 2000");
    assert!(turns <= 40);
    // A stream of short ones never shuts the long one out.
    let before = net.wires[0].arrived;
    for _ in 0..800 {
        for at in [1, 2] {
            if net.wires[at].sender.backlog() == 0 {
                net.submit(at, 200);
                net.deliver(at, 0, false);
            }
        }
        for at in 0..3 {
            pump(&mut net, at);
        }
    }
    assert!(net.wires[0].arrived - before >= 2_000, "{}", net.wires[0].arrived - before);
}

#[test]
fn the_counters_end_with_an_error_and_not_with_an_overflow() {
    let config = CreditConfig {
        max_demand_bytes: u64::MAX,
        window_bytes: u64::MAX,
        sender_window_bytes: u64::MAX,
        grant_bytes: u64::MAX,
        ..config(GrantOrder::RoundRobin)
    };
    let mut net = Net::new(config, 2);
    net.submit(0, u64::MAX - 1);
    net.submit(1, u64::MAX);
    for at in 0..2 {
        net.deliver(at, 0, false);
    }
    net.drain();
    assert_eq!((net.wires[0].arrived, net.wires[1].arrived), (u64::MAX - 1, u64::MAX));
    let limit = |error| match error {
        Err(CreditError::Excess { limit, .. }) => limit,
        other => panic!("{other:?}"),
    };
    assert_eq!(limit(net.wires[0].sender.submit(100)), 1);
    assert_eq!(limit(net.wires[1].sender.submit(100)), 0);
    assert_eq!(net.wires[1].sender.submit(7), Ok(Admission::Unscheduled));
}

#[test]
fn more_demand_than_agreed_is_refused_on_both_sides() {
    let config = CreditConfig { max_demand_bytes: 1000, ..config(GrantOrder::RoundRobin) };
    let mut sender = CreditSender::new(&config);
    assert_eq!(
        sender.submit(1001),
        Err(CreditError::Excess { op: "announce", found: 1001, limit: 1000 })
    );
    let mut receiver = CreditReceiver::new(config).unwrap();
    let id = receiver.join().unwrap();
    let error = receiver
        .handle(0, id, Event::Demand(Demand { announced: 1001, withdrawn: 0 }))
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "credit counter `announced` reads 1001, expected 0 to 1000: the peer broke the credit protocol"
    );
}

#[test]
fn senders_above_the_limit_are_refused_and_departed_ones_are_unknown() {
    let mut receiver = CreditReceiver::new(config(GrantOrder::RoundRobin)).unwrap();
    let ids: Vec<_> = (0..5).map(|_| receiver.join().unwrap()).collect();
    assert_eq!(receiver.join(), Err(CreditError::Full { max: 5 }));
    receiver.leave(0, ids[2]).unwrap();
    assert!(matches!(receiver.leave(0, ids[2]), Err(CreditError::Unknown { index: 2, .. })));
    let again = receiver.join().unwrap();
    assert_eq!(again.index(), 2);
    let event = Event::Demand(Demand { announced: 50, withdrawn: 0 });
    assert!(receiver.handle(0, ids[2], event).is_err());
    receiver.handle(0, again, event).unwrap();
    assert_eq!(receiver.num_senders(), 5);
}

#[test]
fn limits_that_do_not_fit_together_are_named() {
    let good = config(GrantOrder::RoundRobin);
    let what = |config: CreditConfig| match CreditReceiver::new(config) {
        Err(CreditError::Config { what, .. }) => what,
        other => panic!("{other:?}"),
    };
    assert_eq!(what(CreditConfig { grant_bytes: 0, ..good }), "grant_bytes");
    assert_eq!(what(CreditConfig { grant_bytes: 701, ..good }), "grant_bytes");
    assert_eq!(what(CreditConfig { window_bytes: 699, ..good }), "sender_window_bytes");
    assert_eq!(what(CreditConfig { max_senders: 0, ..good }), "max_senders");
    assert!(CreditConfig::default().check().is_ok());
    assert!(CreditConfig::for_link(1, 1).check().is_ok());
    assert!(CreditConfig::for_link(u64::MAX, u64::MAX).check().is_ok());
}
