//! The ring and its flags under a model checker: every interleaving and every permitted reordering of
//! a few frames. Run by
//! `LOOM_MAX_PREEMPTIONS=3 RUSTFLAGS="--cfg loom" cargo test -p switchyard-p2p-core --release --test loom`.
//!
//! Each model also runs with one ordering taken away, and must then fail.
#![cfg(loom)]

extern crate switchyard_p2p_core as p2p_core;

use std::sync::atomic::Ordering;

use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicU64;
use loom::sync::{Arc, Notify};
use loom::thread;
use p2p_core::flags::{self, Contract, Discipline};
use p2p_core::ring::{RxCursor, TxCursor};

/// Both slots of a channel, as far as one direction uses them.
struct Shared {
    frames: Vec<UnsafeCell<u64>>,
    published: AtomicU64,
    consumed: AtomicU64,
    reader_waits: AtomicU64,
    writer_waits: AtomicU64,
    wake_reader: Notify,
    wake_writer: Notify,
}

impl Shared {
    fn new(num_frames: usize) -> Arc<Self> {
        Arc::new(Self {
            frames: (0..num_frames).map(|_| UnsafeCell::new(0)).collect(),
            published: AtomicU64::new(0),
            consumed: AtomicU64::new(0),
            reader_waits: AtomicU64::new(0),
            writer_waits: AtomicU64::new(0),
            wake_reader: Notify::new(),
            wake_writer: Notify::new(),
        })
    }

    fn frame(&self, seq: u64) -> &UnsafeCell<u64> {
        &self.frames[seq as usize % self.frames.len()]
    }
}

/// Runs the steps of `Channel::try_reserve`, `publish` and `wait_until`.
fn write<D: Discipline>(shared: &Shared, num: u64, sleeps: bool) {
    let mut cursor = TxCursor::new(shared.frames.len());
    for value in 0..num {
        let mut poll = || {
            cursor.has_spare()
                || cursor.has_credit(flags::observe::<D>(&shared.consumed)).expect("sane counter")
        };
        let wake = sleeps.then_some(&shared.wake_writer);
        wait::<D>(&shared.writer_waits, wake, &mut poll);
        let seq = cursor.next_seq();
        // SAFETY: the frame is ours while there is credit; the model checks exactly that.
        shared.frame(seq).with_mut(|frame| unsafe { *frame = value + 100 });
        flags::add::<D>(&shared.published, 1);
        cursor.advance();
        if flags::must_wake::<D, _>(&shared.reader_waits) {
            shared.wake_reader.notify();
        }
    }
}

/// Runs the steps of `Channel::try_next`, `view`, `release` and `wait_until`.
fn read<D: Discipline>(shared: &Shared, num: u64, sleeps: bool) {
    let mut cursor = RxCursor::new(shared.frames.len());
    for value in 0..num {
        let mut taken = None;
        let mut poll = || {
            taken = cursor.take(flags::observe::<D>(&shared.published)).expect("sane counter");
            taken.is_some()
        };
        let wake = sleeps.then_some(&shared.wake_reader);
        wait::<D>(&shared.reader_waits, wake, &mut poll);
        let seq = taken.expect("poll said so");
        // SAFETY: the frame is ours until it is released; the model checks exactly that.
        let found = shared.frame(seq).with(|frame| unsafe { *frame });
        assert_eq!(found, value + 100);
        assert!(cursor.release());
        flags::add::<D>(&shared.consumed, 1);
        if flags::must_wake::<D, _>(&shared.writer_waits) {
            shared.wake_writer.notify();
        }
    }
}

/// Runs the steps of `wait::wait_until`: look, ask for a wake-up, look again, sleep.
fn wait<D: Discipline>(waiting: &AtomicU64, wake: Option<&Notify>, poll: &mut dyn FnMut() -> bool) {
    let Some(wake) = wake else {
        while !poll() {
            thread::yield_now();
        }
        return;
    };
    if poll() {
        return;
    }
    flags::arm::<D, _>(waiting);
    while !poll() {
        wake.wait();
    }
    flags::disarm(waiting);
}

fn ring<D: Discipline + 'static>(num_frames: usize, num: u64, sleeps: bool) {
    loom::model(move || {
        let shared = Shared::new(num_frames);
        let writer = Arc::clone(&shared);
        let writer = thread::spawn(move || write::<D>(&writer, num, sleeps));
        read::<D>(&shared, num, sleeps);
        writer.join().expect("writer");
    });
}

#[test]
fn frames_and_credits_carry_their_bytes_over() {
    ring::<Contract>(1, 2, false);
    ring::<Contract>(2, 3, false);
}

#[test]
fn no_wake_up_is_lost() {
    ring::<Contract>(1, 2, true);
    ring::<Contract>(2, 3, true);
}

macro_rules! mutants {
    ($($name:literal: $sleeps:expr, $add:ident, $observe:ident, $wake:expr, $arm:expr;)*) => {
        /// Each mutant runs in a process of its own: the checker may abort when it finds a deadlock.
        #[test]
        fn a_missing_ordering_is_caught() {
            for name in [$($name),*] {
                let output = test_support::child::command(name)
                    .env("RUST_BACKTRACE", "0")
                    .output()
                    .expect("to run this program");
                let said = String::from_utf8_lossy(&output.stdout);
                assert_eq!(said, format!("runs {name}\n"));
                assert!(!output.status.success(), "{name} was not noticed");
            }
        }

        test_support::child_processes! {
            $($name => || {
                struct Mutant;
                impl Discipline for Mutant {
                    const ADD: Ordering = Ordering::$add;
                    const OBSERVE: Ordering = Ordering::$observe;
                    const FENCE_BEFORE_WAKE: bool = $wake;
                    const FENCE_AFTER_ARM: bool = $arm;
                }
                println!("runs {}", $name);
                ring::<Mutant>(1, 2, $sleeps);
            }),*
        }
    };
}

mutants! {
    "flag without release": false, Relaxed, Acquire, false, false;
    "look without acquire": false, AcqRel, Relaxed, false, false;
    "wake-up without fence": true, AcqRel, Acquire, false, true;
    "sleeper without fence": true, AcqRel, Acquire, true, false;
}
