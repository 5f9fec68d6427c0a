//! Backoff of an idle thread: it polls without a pause for a while, then sleeps for longer and longer times. A GPU
//! has no doorbell to wake it, so even the longest sleep has to be short.

use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// Polling policy of an idle thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdlePolicy {
    /// Time of polling without a pause.
    pub spin: Duration,
    /// Longest pause, after a second of silence: the longest delay of the next command.
    pub max_sleep: Duration,
}

impl Default for IdlePolicy {
    fn default() -> Self {
        Self { spin: Duration::from_micros(100), max_sleep: Duration::from_millis(4) }
    }
}

/// Backoff state of one thread.
#[derive(Debug)]
pub(crate) struct Backoff {
    policy: IdlePolicy,
    idle_since: Option<Instant>,
    num_looks: u32,
}

/// Wakes a sleeping thread.
#[derive(Debug)]
pub(crate) struct Bell {
    sleeps: AtomicBool,
    rung: AtomicBool,
}

impl Backoff {
    pub(crate) const fn new(policy: IdlePolicy) -> Self {
        Self { policy, idle_since: None, num_looks: 0 }
    }

    /// Called when there was work.
    pub(crate) const fn reset(&mut self) {
        self.idle_since = None;
        self.num_looks = 0;
    }

    /// Whether work is expected soon, so that pauses are at most a millisecond.
    pub(crate) fn is_attentive(&self) -> bool {
        self.idle_since.is_none_or(|since| since.elapsed() < ATTENTIVE)
    }

    /// Pauses according to the policy. Calls `sleep` when the thread may sleep for that time; `sleep` polls once
    /// more first.
    pub(crate) fn pause(&mut self, longest: Duration, sleep: impl FnOnce(Duration)) {
        self.num_looks = self.num_looks.wrapping_add(1);
        // A read of the clock costs as much as polling a few lanes.
        if self.idle_since.is_some() && !self.num_looks.is_multiple_of(LOOKS_PER_CLOCK) {
            std::hint::spin_loop();
            return;
        }
        let now = Instant::now();
        let idle = now - *self.idle_since.get_or_insert(now);
        if idle < self.policy.spin {
            // On hosts with few cores another thread may have to run before there is work.
            std::thread::yield_now();
            return;
        }
        let step = STEPS.iter().find(|(until, _)| idle < *until);
        let step = step.map_or(self.policy.max_sleep, |(_, pause)| *pause);
        self.num_looks = LOOKS_PER_CLOCK - 1;
        sleep(step.min(self.policy.max_sleep).min(longest));
    }
}

impl Bell {
    pub(crate) const fn new() -> Self {
        Self { sleeps: AtomicBool::new(false), rung: AtomicBool::new(false) }
    }

    /// Wakes the thread if it sleeps. Called after the work for it is visible.
    #[inline]
    pub(crate) fn ring_with(&self, thread: impl FnOnce() -> Option<Thread>) {
        // The pattern of SYNC POINT `waiting`: either this sees the sleeper, or the sleeper's last poll sees the
        // work.
        fence(Ordering::SeqCst);
        if self.sleeps.load(Ordering::Relaxed) {
            self.rung.store(true, Ordering::Release);
            if let Some(thread) = thread() {
                thread.unpark();
            }
        }
    }

    /// Sleeps for `pause`, unless `has_work` returns true after the bell was armed.
    pub(crate) fn sleep(&self, pause: Duration, has_work: impl FnOnce() -> bool) {
        self.sleeps.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if !has_work() && !self.rung.swap(false, Ordering::Acquire) {
            std::thread::park_timeout(pause);
        }
        self.sleeps.store(false, Ordering::Relaxed);
        self.rung.store(false, Ordering::Relaxed);
    }
}

/// Time without a finished command, as this thread saw it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StallTimer {
    polled_at: Instant,
    waited: Duration,
}

impl StallTimer {
    pub(crate) fn new() -> Self {
        Self { polled_at: Instant::now(), waited: Duration::ZERO }
    }

    /// Counts the time since the last poll, at most `most` of it: a stopped host, or a thread without a processor,
    /// has seen nothing meanwhile.
    pub(crate) fn count(&mut self, most: Duration) -> Duration {
        let now = Instant::now();
        self.waited += (now - self.polled_at).min(most);
        self.polled_at = now;
        self.waited
    }
}

const LOOKS_PER_CLOCK: u32 = 16;
/// Idle for less than the first: pauses of the second.
const STEPS: [(Duration, Duration); 4] = [
    (Duration::from_micros(500), Duration::from_micros(10)),
    (Duration::from_millis(5), Duration::from_micros(50)),
    (Duration::from_millis(50), Duration::from_micros(250)),
    (ATTENTIVE, Duration::from_millis(1)),
];
const ATTENTIVE: Duration = Duration::from_secs(1);
