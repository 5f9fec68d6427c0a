//! A lane under a model checker: every interleaving and every permitted reordering of a few commands.
//! Run by
//! `LOOM_MAX_PREEMPTIONS=3 RUSTFLAGS="--cfg loom" cargo test -p switchyard-proxy --release --test loom`.
//!
//! Each model also runs with one ordering taken away, and must then fail.
#![cfg(loom)]

use std::sync::atomic::Ordering;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::AtomicU64;
use loom::thread;
use switchyard_proxy::command::{Command, Opcode, lap_of};
use switchyard_proxy::lane::{Contract, Discipline, read_cell, recycle, reusable, write_cell};

/// Cells, and the data that their commands name: the mirror's bytes.
struct Shared {
    cells: [(AtomicU64, AtomicU64); 2],
    sources: [UnsafeCell<u64>; 2],
    completed: AtomicU64,
}

const SHIFT: u32 = 1;

fn run<D: Discipline + 'static>(num: u64) {
    let cell = || (AtomicU64::new(0), AtomicU64::new(0));
    let shared = Arc::new(Shared {
        cells: [cell(), cell()],
        sources: [UnsafeCell::new(0), UnsafeCell::new(0)],
        completed: AtomicU64::new(0),
    });
    let poster = {
        let shared = Arc::clone(&shared);
        thread::spawn(move || {
            for index in 0..num {
                while index >= reusable::<D>(&shared.completed) + 2 {
                    thread::yield_now();
                }
                let place = index as usize % 2;
                // SAFETY: the source is the poster's until it posts; the model checks exactly that.
                shared.sources[place].with_mut(|source| unsafe { *source = index + 100 });
                let command = Command::word(Opcode::Add, 8, index);
                let (first, second) = &shared.cells[place];
                write_cell::<D>((first, second), command.encode(lap_of(index, SHIFT)));
            }
        })
    };
    for index in 0..num {
        let place = index as usize % 2;
        let (first, second) = &shared.cells[place];
        let command = loop {
            match read_cell::<D>((first, second), lap_of(index, SHIFT)) {
                Ok(Some(command)) => break command,
                Ok(None) => thread::yield_now(),
                Err(bad) => panic!("{bad}"),
            }
        };
        assert_eq!(command, Command::word(Opcode::Add, 8, index));
        // SAFETY: as above, for the taker, until it recycles.
        let source = shared.sources[place].with(|source| unsafe { *source });
        assert_eq!(source, index + 100);
        recycle::<D>(&shared.completed, index + 1);
    }
    poster.join().unwrap();
}

fn fails<D: Discipline + 'static>() -> bool {
    std::panic::catch_unwind(|| loom::model(|| run::<D>(3))).is_err()
}

#[test]
fn commands_carry_their_sources_and_give_them_back() {
    loom::model(|| run::<Contract>(3));
}

macro_rules! mutant {
    ($name:ident, $post:ident, $take:ident, $recycle:ident, $reuse:ident) => {
        #[test]
        fn $name() {
            struct Mutant;
            impl Discipline for Mutant {
                const POST: Ordering = Ordering::$post;
                const TAKE: Ordering = Ordering::$take;
                const RECYCLE: Ordering = Ordering::$recycle;
                const REUSE: Ordering = Ordering::$reuse;
            }
            assert!(fails::<Mutant>());
        }
    };
}

mutant!(posting_without_release_is_found, Relaxed, Acquire, Release, Acquire);
mutant!(taking_without_acquire_is_found, Release, Relaxed, Release, Acquire);
mutant!(recycling_without_release_is_found, Release, Acquire, Relaxed, Acquire);
mutant!(reusing_without_acquire_is_found, Release, Acquire, Release, Relaxed);
