//! Latency of servers as calls see it: the usual latency of a frame by its size, and the pace of each server.
//!
//! A frame's *latency* runs from the last step of its link (the frame was published, or the answer before it was
//! read) until its answer is read. Sizes differ, so frames are compared within a *class*: a power of two of pairs.
//!
//! Lanes update everything here by plain loads and stores of atomics. An update that another lane overwrites is
//! lost, which makes an estimate a little older and nothing worse.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Usual latencies of frames over all servers of a client, and the budget of hedges.
#[derive(Debug)]
pub(crate) struct Pacing {
    start: Instant,
    classes: [Class; NUM_CLASSES],
    /// Millionths of a hedge that a published frame earns. 0 turns hedges off, and the notes about latency.
    earned_per_frame: i64,
    /// Millionths of a hedge that are earned and not spent, up to [`MAX_EARNED`].
    earned: AtomicI64,
}

impl Pacing {
    /// `hedge_budget` is the number of hedges per published frame.
    pub fn new(hedge_budget: f64) -> Self {
        Self {
            start: Instant::now(),
            classes: Default::default(),
            earned_per_frame: (hedge_budget * HEDGE as f64) as i64,
            earned: AtomicI64::new(0),
        }
    }

    /// Nanoseconds since the client started.
    pub fn elapsed_ns(&self, now: Instant) -> u64 {
        now.duration_since(self.start).as_nanos().try_into().unwrap_or(u64::MAX)
    }

    /// Notes a frame's latency. Returns its binary logarithm relative to the usual latency of the frame's class, once
    /// that is known.
    pub fn observe(&self, num_entries: u32, latency: Duration) -> Option<f32> {
        if self.earned_per_frame == 0 {
            return None;
        }
        let latency = (latency.as_nanos() as f32).max(1.0);
        let class = class_of(num_entries);
        self.classes[class].observe(latency);
        Some((latency / self.usual(class)?).log2())
    }

    /// Usual latency of a class. A small frame takes no longer than a larger one. So classes with larger frames count
    /// too: a small class may consist of probes of a slow server only.
    fn usual(&self, class: usize) -> Option<f32> {
        let larger = &self.classes[class..(class + 4).min(NUM_CLASSES)];
        let known =
            larger.iter().filter(|class| class.num_samples.load(Ordering::Relaxed) >= SOME_SAMPLES);
        known.map(|class| class.low.load()).reduce(f32::min)
    }

    /// A frame without an answer after this long is late. `None` while too little is known.
    pub fn late_after(&self, num_entries: u32) -> Option<Duration> {
        let class = class_of(num_entries);
        self.classes[class].late_after(self.usual(class)?)
    }

    /// Returns true if hedges are on and at least one is earned.
    pub fn may_hedge(&self) -> bool {
        self.earned_per_frame > 0 && self.earned.load(Ordering::Relaxed) >= HEDGE
    }

    /// A frame of a dispatch or a resend was published.
    pub fn earn(&self) {
        if self.earned_per_frame > 0 && self.earned.load(Ordering::Relaxed) < MAX_EARNED {
            self.earned.fetch_add(self.earned_per_frame, Ordering::Relaxed);
        }
    }

    /// Takes `num_frames` hedges out of the budget. Returns false, and takes none, if it holds fewer.
    pub fn spend(&self, num_frames: usize) -> bool {
        let price = HEDGE.saturating_mul(num_frames as i64);
        let take = |earned: i64| (earned >= price).then(|| earned - price);
        self.earned.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
    }
}

/// Two quantiles of the latency of one class, in nanoseconds.
#[derive(Debug, Default)]
struct Class {
    /// The lower quartile: the usual latency even while half of the frames go to a slow server.
    low: AtomicF32,
    /// The 95th percentile.
    high: AtomicF32,
    num_samples: AtomicU32,
}

impl Class {
    fn observe(&self, latency: f32) {
        let num_samples = self.num_samples.load(Ordering::Relaxed);
        if num_samples == 0 {
            self.low.store(latency);
            self.high.store(latency);
        }
        let step = if num_samples < FEW_SAMPLES {
            self.num_samples.store(num_samples + 1, Ordering::Relaxed);
            FIRST_STEP
        } else {
            STEP
        };
        // Each quantile moves up and down in steps whose ratio balances there.
        let low = self.low.load();
        let up = latency > low;
        self.low.store(low * if up { 1.0 + step * 0.25 } else { 1.0 - step * 0.75 });
        let high = self.high.load();
        let up = latency > high;
        self.high.store(high * if up { 1.0 + step * 0.95 } else { 1.0 - step * 0.05 });
    }

    fn late_after(&self, usual: f32) -> Option<Duration> {
        if self.num_samples.load(Ordering::Relaxed) < FEW_SAMPLES {
            return None;
        }
        let late = (self.high.load() * LATE_OF_HIGH).min(usual * LATE_OF_USUAL);
        Some(Duration::from_nanos(late as u64).max(LEAST_LATE))
    }
}

/// Pace of one server, for all lanes of a client.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// Decayed mean of what [`Pacing::observe`] returned: 0 is usual, 1 twice as slow.
    level: AtomicF32,
    is_straggler: AtomicBool,
    /// Plans since the last probe that gave a straggler nothing.
    num_passed: AtomicU32,
    probed_at_ns: AtomicU64,
    /// Links with a late frame that was sent to another replica too, and without an answer since.
    num_overdue: AtomicU32,
}

impl Pace {
    /// Notes the latency of a frame relative to the usual one, as [`Pacing::observe`] returns it.
    pub fn observe(&self, deviation: Option<f32>) {
        let Some(deviation) = deviation else { return };
        let was_straggler = self.is_straggler.load(Ordering::Relaxed);
        // A straggler gets few frames, so each one counts more. Of another server, single late frames mean little.
        let (weight, limit) = if was_straggler { (1.0 / 2.0, 6.0) } else { (1.0 / 16.0, 3.0) };
        let level = self.level.load();
        let level = level + (deviation.clamp(-limit, limit) - level) * weight;
        self.level.store(level);
        let is_straggler = level > if was_straggler { RECOVERED } else { STRAGGLER };
        if is_straggler != was_straggler {
            self.is_straggler.store(is_straggler, Ordering::Relaxed);
        }
    }

    /// Factor on the server's load for the choice among replicas, in [`USUAL_PACE`] parts: more for a straggler.
    pub fn slowness(&self) -> u64 {
        if !self.is_straggler.load(Ordering::Relaxed) {
            return USUAL_PACE;
        }
        (self.level.load().max(0.0).exp2() * USUAL_PACE as f32) as u64
    }

    /// A plan gives this server nothing. Returns true if the server is a straggler that should get one expert, so
    /// that the client sees whether it has recovered.
    pub fn is_probe_due(&self, now_ns: u64) -> bool {
        if !self.is_straggler.load(Ordering::Relaxed) {
            return false;
        }
        let num_passed = self.num_passed.load(Ordering::Relaxed).saturating_add(1);
        self.num_passed.store(num_passed, Ordering::Relaxed);
        let since = now_ns.saturating_sub(self.probed_at_ns.load(Ordering::Relaxed));
        num_passed >= PROBE_PLANS && since >= PROBE_INTERVAL.as_nanos() as u64
    }

    /// A plan gives this straggler a probe.
    pub fn note_probe(&self, now_ns: u64) {
        self.num_passed.store(0, Ordering::Relaxed);
        self.probed_at_ns.store(now_ns, Ordering::Relaxed);
    }

    /// Returns true while a late frame is without an answer.
    pub fn is_overdue(&self) -> bool {
        self.num_overdue.load(Ordering::Relaxed) > 0
    }

    pub fn link_overdue(&self) {
        self.num_overdue.fetch_add(1, Ordering::Relaxed);
    }

    pub fn link_answered(&self) {
        self.num_overdue.fetch_sub(1, Ordering::Relaxed);
    }
}

/// An `f32` that threads share without order.
#[derive(Debug, Default)]
struct AtomicF32(AtomicU32);

impl AtomicF32 {
    fn load(&self) -> f32 {
        f32::from_bits(self.0.load(Ordering::Relaxed))
    }

    fn store(&self, value: f32) {
        self.0.store(value.to_bits(), Ordering::Relaxed);
    }
}

fn class_of(num_entries: u32) -> usize {
    (num_entries.max(1).ilog2() as usize).min(NUM_CLASSES - 1)
}

/// [`Pace::slowness`] of a server that is no straggler.
pub(crate) const USUAL_PACE: u64 = 16;
/// Plans that pass over a straggler between two probes, at least.
pub(crate) const PROBE_PLANS: u32 = 32;
/// Time between two probes of a straggler, at least.
pub(crate) const PROBE_INTERVAL: Duration = Duration::from_millis(100);
const NUM_CLASSES: usize = 20;
/// One hedge, in the budget's units.
const HEDGE: i64 = 1_000_000;
/// Largest burst of hedges after a quiet time.
const MAX_EARNED: i64 = 32 * HEDGE;
/// A class with fewer samples says nothing about a server.
const SOME_SAMPLES: u32 = 16;
/// A class with fewer samples is not known well enough to call a frame late.
const FEW_SAMPLES: u32 = 64;
/// Relative step of the quantiles' estimates, at first and later.
const FIRST_STEP: f32 = 0.4;
const STEP: f32 = 0.05;
/// A frame is late after this many times the 95th percentile, and at most this many times the usual latency.
const LATE_OF_HIGH: f32 = 2.0;
const LATE_OF_USUAL: f32 = 16.0;
/// No frame is late before this: a thread that sleeps is woken no faster.
const LEAST_LATE: Duration = Duration::from_micros(50);
/// Levels at which a server becomes a straggler (2.8 times as slow as usual) and ceases to be one (1.7 times).
const STRAGGLER: f32 = 1.5;
const RECOVERED: f32 = 0.75;
