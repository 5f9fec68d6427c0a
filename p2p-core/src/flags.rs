//! The steps at a flag, each with the ordering that the memory model needs.
//!
//! All of the crate's synchronisation with peers goes through these five functions, so the model
//! checker runs the code that ships. `docs/explanation/memory-model.md` describes the counterpart
//! of each step. The names of its SYNC POINTs are used here.

use std::sync::atomic::{AtomicU64, Ordering, fence};

/// A 64-bit word that two sides share.
pub trait Word {
    /// Atomic load.
    fn load(&self, order: Ordering) -> u64;
    /// Atomic store.
    fn store(&self, value: u64, order: Ordering);
    /// Atomic addition.
    fn add(&self, value: u64, order: Ordering);
    /// Sequentially consistent fence.
    fn fence();
}

/// The orderings in use. Only tests implement this beside [`Contract`], to show that the model
/// checker notices a missing one.
pub trait Discipline {
    /// Ordering of the addition to a flag.
    const ADD: Ordering;
    /// Ordering of the load that looks at a flag.
    const OBSERVE: Ordering;
    /// The adder fences before it checks for a sleeper.
    const FENCE_BEFORE_WAKE: bool;
    /// The sleeper fences before it looks at the flags once more.
    const FENCE_AFTER_ARM: bool;
}

/// The orderings that the memory model demands.
#[derive(Debug, Clone, Copy)]
pub struct Contract;

impl Discipline for Contract {
    const ADD: Ordering = Ordering::AcqRel;
    const OBSERVE: Ordering = Ordering::Acquire;
    const FENCE_BEFORE_WAKE: bool = true;
    const FENCE_AFTER_ARM: bool = true;
}

/// SYNC POINT `published`, SYNC POINT `consumed`, writing end: everything that this side did before
/// is released to a thread that observes the sum.
#[inline]
pub fn add<D: Discipline>(flag: &impl Word, value: u64) {
    flag.add(value, D::ADD);
}

/// SYNC POINT `published`, SYNC POINT `consumed`, reading end: acquires everything before the
/// addition.
#[inline]
pub fn observe<D: Discipline>(flag: &impl Word) -> u64 {
    flag.load(D::OBSERVE)
}

/// SYNC POINT `waiting`, sleeping end: asks for a wake-up. Look at the flags once more before
/// sleeping.
#[inline]
pub fn arm<D: Discipline, W: Word>(waiting: &W) {
    waiting.store(1, Ordering::Relaxed);
    if D::FENCE_AFTER_ARM {
        W::fence();
    }
}

/// Takes the request of [`arm`] back. A wake-up that is under way may still come.
#[inline]
pub fn disarm(waiting: &impl Word) {
    waiting.store(0, Ordering::Relaxed);
}

/// SYNC POINT `waiting`, adding end, after [`add`]: returns true if the peer may be asleep. Either
/// this sees the request of [`arm`], or the sleeper's second look sees the addition.
#[inline]
pub fn must_wake<D: Discipline, W: Word>(waiting: &W) -> bool {
    if D::FENCE_BEFORE_WAKE {
        W::fence();
    }
    waiting.load(Ordering::Relaxed) != 0
}

impl Word for AtomicU64 {
    #[inline]
    fn load(&self, order: Ordering) -> u64 {
        Self::load(self, order)
    }

    #[inline]
    fn store(&self, value: u64, order: Ordering) {
        Self::store(self, value, order);
    }

    #[inline]
    fn add(&self, value: u64, order: Ordering) {
        self.fetch_add(value, order);
    }

    #[inline]
    fn fence() {
        fence(Ordering::SeqCst);
    }
}

#[cfg(loom)]
impl Word for loom::sync::atomic::AtomicU64 {
    fn load(&self, order: Ordering) -> u64 {
        Self::load(self, order)
    }

    fn store(&self, value: u64, order: Ordering) {
        Self::store(self, value, order);
    }

    fn add(&self, value: u64, order: Ordering) {
        self.fetch_add(value, order);
    }

    fn fence() {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }
}
