//! Violations by drivers: all NICs name them alike and answer with the same completions.

use softnic_driver::gpu_nic::Backend;
use switchyard_softnic::Violation;
use switchyard_softnic::format::{CE_ALWAYS, Operation, Syndrome, Wqe};

use super::world::{DEPTH, Gpu, Model};
use crate::common::raw::Raw;

/// A step between two moments at which the NICs have done all announced work.
type Step = fn(&mut Raw);

struct Case {
    what: &'static str,
    steps: &'static [Step],
    is_it: fn(&Violation) -> bool,
    /// `Violation.what` of `softnic/model.hpp`
    number: u32,
    /// Valid requests, and the results of those behind them.
    num_good: u64,
    bad: &'static [Syndrome],
}

fn nop(raw: &Raw) -> Wqe {
    let (qpn, index) = (raw.handle.qpn, raw.posted() as u16);
    Wqe { qpn, index, flags: CE_ALWAYS, operation: Operation::Nop }
}

fn write(raw: &mut Raw, wqe: &Wqe) {
    raw.write(&wqe.encode().try_into().unwrap());
}

fn write_nops(raw: &mut Raw, num: u32) {
    for _ in 0..num {
        let wqe = nop(raw);
        write(raw, &wqe);
    }
}

fn post_nops(raw: &mut Raw, num: u32) {
    write_nops(raw, num);
    raw.ring();
}

const CASES: [Case; 12] = [
    Case {
        what: "a request with the index of another place",
        steps: &[|raw| {
            let wqe = nop(raw);
            write(raw, &Wqe { index: 1, ..wqe });
            raw.ring();
        }],
        is_it: |violation| matches!(violation, Violation::Index { position: 0, found: 1, .. }),
        number: 1,
        num_good: 0,
        bad: &[Syndrome::LocalQpOp],
    },
    Case {
        what: "a request of another queue pair",
        steps: &[|raw| {
            let wqe = nop(raw);
            write(raw, &Wqe { qpn: wqe.qpn + 1, ..wqe });
            raw.ring();
        }],
        is_it: |violation| matches!(violation, Violation::QueuePair { what: "a request", .. }),
        number: 2,
        num_good: 0,
        bad: &[Syndrome::LocalQpOp],
    },
    Case {
        what: "a doorbell of another queue pair",
        steps: &[
            |raw| post_nops(raw, 3),
            |raw| {
                write_nops(raw, 2);
                raw.ring_as(raw.handle.qpn + 1, raw.posted(), raw.posted());
            },
        ],
        is_it: |violation| matches!(violation, Violation::QueuePair { what: "a doorbell", .. }),
        number: 2,
        num_good: 3,
        bad: &[Syndrome::Flushed; 2],
    },
    Case {
        what: "a doorbell of another queue pair, and no word in the record",
        steps: &[
            |raw| post_nops(raw, 3),
            |raw| {
                write_nops(raw, 2);
                raw.ring_as(raw.handle.qpn + 1, raw.posted(), 3);
            },
        ],
        is_it: |violation| matches!(violation, Violation::QueuePair { what: "a doorbell", .. }),
        number: 2,
        num_good: 3,
        bad: &[],
    },
    Case {
        what: "a doorbell of another queue pair, and nonsense in the record",
        steps: &[
            |raw| post_nops(raw, 3),
            |raw| {
                write_nops(raw, 2);
                raw.ring_as(raw.handle.qpn + 1, raw.posted(), 3 + u64::from(DEPTH) + 1);
            },
        ],
        is_it: |violation| matches!(violation, Violation::QueuePair { what: "a doorbell", .. }),
        number: 2,
        num_good: 3,
        bad: &[],
    },
    Case {
        what: "a doorbell that goes back",
        steps: &[
            |raw| post_nops(raw, 3),
            |raw| {
                write_nops(raw, 2);
                raw.ring_as(raw.handle.qpn, 1, raw.posted());
            },
        ],
        is_it: |violation| matches!(violation, Violation::Backwards { from: 3, to: 1, .. }),
        number: 5,
        num_good: 3,
        bad: &[Syndrome::Flushed; 2],
    },
    Case {
        what: "a doorbell that goes back, then posting as it should be",
        steps: &[
            |raw| post_nops(raw, 3),
            |raw| raw.ring_as(raw.handle.qpn, 1, 1),
            |raw| post_nops(raw, 2),
        ],
        is_it: |violation| matches!(violation, Violation::Backwards { from: 3, to: 1, .. }),
        number: 5,
        num_good: 3,
        bad: &[Syndrome::Flushed; 2],
    },
    Case {
        what: "a record that is behind",
        steps: &[
            |raw| post_nops(raw, 3),
            |raw| {
                write_nops(raw, 2);
                raw.ring_as(raw.handle.qpn, raw.posted(), 4);
            },
        ],
        is_it: |violation| {
            matches!(violation, Violation::StaleRecord { doorbell: 5, record: 4, .. })
        },
        number: 3,
        num_good: 3,
        bad: &[Syndrome::Flushed; 2],
    },
    Case {
        what: "more blocks than there are",
        steps: &[|raw| post_nops(raw, DEPTH + 1)],
        is_it: |violation| matches!(violation, Violation::Overrun { outstanding: 129, .. }),
        number: 4,
        num_good: 0,
        // No room for the last one's completion.
        bad: &[Syndrome::Flushed; DEPTH as usize],
    },
    Case {
        what: "a doorbell far beyond what was written",
        steps: &[
            |raw| post_nops(raw, 3),
            |raw| raw.ring_as(raw.handle.qpn, 3 + u64::from(DEPTH) + 1, 3 + u64::from(DEPTH) + 1),
        ],
        is_it: |violation| matches!(violation, Violation::Overrun { outstanding: 129, .. }),
        number: 4,
        num_good: 3,
        bad: &[Syndrome::Flushed; DEPTH as usize - 3],
    },
    Case {
        what: "an unknown opcode",
        steps: &[|raw| {
            let mut block: [u8; 64] = nop(raw).encode().try_into().unwrap();
            block[3] = 0x77;
            raw.write(&block);
            write_nops(raw, 1);
            raw.ring();
        }],
        is_it: |violation| matches!(violation, Violation::Malformed { position: 0, .. }),
        number: 6,
        num_good: 0,
        bad: &[Syndrome::LocalQpOp, Syndrome::Flushed],
    },
    Case {
        what: "a completion queue that nobody empties",
        steps: &[|raw| post_nops(raw, DEPTH), |raw| post_nops(raw, 1)],
        is_it: |violation| matches!(violation, Violation::CompletionOverrun { depth: DEPTH, .. }),
        number: 7,
        num_good: DEPTH as u64,
        bad: &[],
    },
];

#[test]
fn violations_are_named_and_answered_as_in_rust() {
    let mut model = Model::new(false, None);
    for case in &CASES {
        let what = case.what;
        let num_known = model.client.violations().len();
        model.begin(0);
        for step in case.steps {
            step(&mut model.raw);
            model.run();
        }
        let expected: Vec<_> = std::iter::from_fn(|| model.raw.take()).collect();
        let found: Vec<_> = expected.iter().map(|cqe| cqe.status.err()).collect();
        let good = std::iter::repeat_n(None, case.num_good as usize);
        let all: Vec<_> = good.chain(case.bad.iter().copied().map(Some)).collect();
        assert_eq!(found, all, "{what}");
        let counters: Vec<u16> = expected.iter().map(|cqe| cqe.counter).collect();
        assert!(counters.iter().copied().eq(0..all.len() as u16), "{what}: {counters:?}");
        let violation = &model.client.violations()[num_known..];
        let first = violation.first();
        assert!(first.is_some_and(|first| (case.is_it)(first)), "{what}: {violation:?}");

        for backend in Backend::ALL {
            let Some(mut gpu) = Gpu::new(backend, false, 0, &model.names) else { return };
            gpu.clear(0);
            let mut first = 0;
            for (nth, step) in case.steps.iter().enumerate() {
                step(&mut gpu.raw);
                gpu.nic.start(nth == 0);
                let counts = gpu.run();
                first = if first == 0 { counts.what } else { first };
            }
            assert_eq!(first, case.number, "{what}, {backend:?}");
            let found: Vec<_> = std::iter::from_fn(|| gpu.raw.take()).collect();
            assert_eq!(found, expected, "{what}, {backend:?}");
            // A doorbell that stays wrong is noted once.
            gpu.nic.start(false);
            assert_eq!(gpu.run().num_violations, 0, "{what}, {backend:?}: again");
        }
    }
}
