//! Retries of deregistrations that a transport did not confirm at once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::mailbox::Mailbox;

/// Mailbox of a caller that deregisters memory: whether the keys are revoked, or the error.
pub(super) type DeregistrationReply = Arc<Mailbox<Result<bool, String>>>;

/// The pending deregistrations of one engine.
#[derive(Debug, Default)]
pub(super) struct DeregistrationQueue {
    entries: Vec<Entry>,
    /// The earliest of their times.
    next_attempt: Option<Instant>,
}

#[derive(Debug)]
struct Entry {
    idx: u32,
    num_attempts: u32,
    /// Time of the next attempt.
    at: Instant,
    /// The caller that waits, and the time at which it gets the error. `None` if no user has a handle.
    caller: Option<(DeregistrationReply, Instant)>,
}

impl DeregistrationQueue {
    /// Adds the registration with index `idx` after its first failed attempt. A `caller` waits for the result.
    pub(super) fn add(&mut self, idx: u32, caller: Option<DeregistrationReply>, now: Instant) {
        let caller = caller.map(|reply| (reply, now + CALLER_TIMEOUT));
        self.entries.push(Entry { idx, num_attempts: 1, at: now + backoff_after(1), caller });
        self.update_next_attempt();
    }

    /// Time of the next attempt.
    pub(super) const fn next_attempt(&self) -> Option<Instant> {
        self.next_attempt
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.next_attempt.is_some_and(|at| at <= now)
    }

    /// Retries due deregistrations, the longest overdue first. It stops early when the attempts take too long.
    pub(super) fn retry_due(
        &mut self,
        now: Instant,
        clock: impl Fn() -> Instant,
        mut release: impl FnMut(u32) -> Result<(), String>,
    ) {
        self.entries.sort_by_key(|entry| entry.at);
        let mut begin = now;
        self.entries.retain_mut(|entry| {
            if entry.at > now || begin.saturating_duration_since(now) >= MAX_ROUND {
                return true;
            }
            let result = release(entry.idx);
            let end = clock().max(begin);
            let stays = entry.record_attempt(result, end, end - begin);
            begin = end;
            stays
        });
        self.update_next_attempt();
    }

    /// Ends all retries, because the engine's thread ends. Callers that wait get an error.
    pub(super) fn stop(&mut self) {
        for (reply, _) in self.entries.drain(..).filter_map(|entry| entry.caller) {
            let _ = reply.push(Err("the engine has stopped".to_owned()));
        }
        self.update_next_attempt();
    }

    fn update_next_attempt(&mut self) {
        self.next_attempt = self.entries.iter().map(|entry| entry.at).min();
    }
}

impl Entry {
    /// Records one more attempt, which took `took`. Returns whether there is to be another.
    fn record_attempt(&mut self, result: Result<(), String>, now: Instant, took: Duration) -> bool {
        self.num_attempts = self.num_attempts.saturating_add(1);
        let detail = match result {
            Err(detail) => detail,
            Ok(()) => {
                if let Some((reply, _)) = &self.caller {
                    let _ = reply.push(Ok(true));
                } else if self.num_attempts > NUM_QUIET_ATTEMPTS {
                    tracing::info!("memory is deregistered after retries");
                }
                return false;
            }
        };
        match &self.caller {
            Some((reply, until)) if now >= *until => {
                if reply.push(Err(detail)).is_ok() {
                    // The caller has the handle back, and may retry itself.
                    return false;
                }
                self.caller = None;
            }
            Some(_) => {}
            None if self.num_attempts == NUM_QUIET_ATTEMPTS => {
                tracing::error!(error = detail, "memory stays registered; the engine retries");
            }
            None => tracing::debug!(error = detail, "memory stays registered"),
        }
        // An attempt that blocks the thread gets at most half of the thread's time.
        self.at = now + backoff_after(self.num_attempts).max(took.min(MAX_BACKOFF));
        if let Some((_, until)) = &self.caller {
            self.at = self.at.min(*until);
        }
        true
    }
}

/// Backoff after `num_attempts` attempts.
fn backoff_after(num_attempts: u32) -> Duration {
    let doublings = num_attempts.saturating_sub(1).min(31);
    FIRST_BACKOFF.saturating_mul(1 << doublings).min(MAX_BACKOFF)
}

/// About the time that a peer needs for one step of a copy.
const FIRST_BACKOFF: Duration = Duration::from_millis(2);
const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// Time for which a caller waits for peers in the middle of an operation.
const CALLER_TIMEOUT: Duration = Duration::from_secs(1);
/// Attempts before an error is logged: about a second.
const NUM_QUIET_ATTEMPTS: u32 = 10;
/// Time that the attempts of one round may take before connections get their turn.
const MAX_ROUND: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::engine::error::WaitError;

    /// A clock that the test advances.
    struct Clock(Cell<Instant>);

    impl Clock {
        fn new() -> Self {
            Self(Cell::new(Instant::now()))
        }

        fn now(&self) -> Instant {
            self.0.get()
        }

        fn pass(&self, time: Duration) {
            self.0.set(self.now() + time);
        }

        /// Advances to the next attempt and makes it.
        fn run_next(
            &self,
            queue: &mut DeregistrationQueue,
            release: impl FnMut(u32) -> Result<(), String>,
        ) -> Duration {
            let (before, at) = (self.now(), queue.next_attempt().unwrap());
            self.0.set(at.max(before));
            assert!(queue.is_due(self.now()));
            let begin = self.now();
            queue.retry_due(begin, || self.now(), release);
            begin - before
        }
    }

    fn refuse() -> Result<(), String> {
        Err("busy".to_owned())
    }

    #[test]
    fn the_pauses_begin_short_and_double_up_to_a_minute() {
        assert_eq!(backoff_after(0), FIRST_BACKOFF);
        assert_eq!(backoff_after(1), FIRST_BACKOFF);
        for num_attempts in 1..40 {
            let next = (backoff_after(num_attempts) * 2).min(MAX_BACKOFF);
            assert_eq!(backoff_after(num_attempts + 1), next, "after {num_attempts}");
        }
        assert_eq!(backoff_after(u32::MAX), MAX_BACKOFF);
        let quiet: Duration = (1..NUM_QUIET_ATTEMPTS).map(backoff_after).sum();
        assert!(quiet >= Duration::from_secs(1) && quiet < Duration::from_secs(2), "{quiet:?}");
    }

    #[test]
    fn abandoned_registrations_are_retried_with_backoff() {
        let (clock, mut queue) = (Clock::new(), DeregistrationQueue::default());
        assert_eq!(queue.next_attempt(), None);
        queue.add(7, None, clock.now());
        for num_attempts in 1..30 {
            let paused = clock.run_next(&mut queue, |idx| {
                assert_eq!(idx, 7);
                refuse()
            });
            assert_eq!(paused, backoff_after(num_attempts));
        }
        // Another entry does not wait for the first one's backoff.
        queue.add(8, None, clock.now());
        let paused = clock.run_next(&mut queue, |idx| {
            assert_eq!(idx, 8);
            Ok(())
        });
        assert_eq!(paused, FIRST_BACKOFF);
        assert_eq!(clock.run_next(&mut queue, |_| Ok(())), MAX_BACKOFF - FIRST_BACKOFF);
        assert_eq!(queue.next_attempt(), None);
    }

    #[test]
    fn tries_that_hold_the_thread_up_leave_others_their_turn() {
        let (clock, mut queue) = (Clock::new(), DeregistrationQueue::default());
        for idx in 0..5 {
            queue.add(idx, None, clock.now());
        }
        let (mut tried, long) = (Vec::new(), Duration::from_secs(3));
        for _ in 0..5 {
            clock.run_next(&mut queue, |idx| {
                tried.push(idx);
                clock.pass(long);
                refuse()
            });
        }
        tried.sort_unstable();
        assert_eq!(tried, [0, 1, 2, 3, 4], "one in a round, and each of them once");
        // Each backoff is at least as long as the attempt took.
        let first = queue.entries.iter().map(|entry| entry.at).max().unwrap();
        assert_eq!(first, clock.now() + long);
        // Short attempts fit into one round.
        clock.pass(2 * long);
        let mut num_tried = 0;
        clock.run_next(&mut queue, |_| {
            num_tried += 1;
            Ok(())
        });
        assert_eq!((num_tried, queue.next_attempt()), (5, None));
    }

    #[test]
    fn callers_get_the_result_or_an_error_after_a_second() {
        let (clock, mut queue) = (Clock::new(), DeregistrationQueue::default());
        let (good, bad, gone) = (
            DeregistrationReply::default(),
            DeregistrationReply::default(),
            DeregistrationReply::default(),
        );
        for (idx, reply) in [&good, &bad, &gone].into_iter().enumerate() {
            queue.add(idx as u32, Some(Arc::clone(reply)), clock.now());
        }
        let (begin, mut num_good) = (clock.now(), 0);
        gone.close_and_pop();
        let answer = |reply: &DeregistrationReply| reply.pop(begin);
        while answer(&bad) == Err(WaitError::Deadline) {
            assert!(clock.now() < begin + CALLER_TIMEOUT, "no caller gets an answer");
            clock.run_next(&mut queue, |idx| {
                num_good += u32::from(idx == 0);
                if idx == 0 && num_good == 3 { Ok(()) } else { refuse() }
            });
            if let Ok(answer) = answer(&bad) {
                assert_eq!(answer, Err("busy".to_owned()));
                break;
            }
        }
        assert_eq!((clock.now(), num_good), (begin + CALLER_TIMEOUT, 3));
        assert_eq!(answer(&good), Ok(Ok(true)));
        // A caller that got the error has the handle and retries itself. One that timed out has no handle.
        let mut tried = Vec::new();
        clock.run_next(&mut queue, |idx| {
            tried.push(idx);
            Ok(())
        });
        assert_eq!((tried, queue.next_attempt()), (vec![2], None));
    }

    #[test]
    fn callers_get_an_error_when_the_thread_ends() {
        let mut queue = DeregistrationQueue::default();
        let reply = DeregistrationReply::default();
        queue.add(0, Some(Arc::clone(&reply)), Instant::now());
        queue.stop();
        assert!(reply.pop(Instant::now()).unwrap().unwrap_err().contains("stopped"));
        assert_eq!(queue.next_attempt(), None);
    }
}
