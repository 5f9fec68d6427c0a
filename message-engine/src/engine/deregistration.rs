//! Registrations that their transports did not let go of at once, and when that is tried again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::mailbox::Mailbox;

/// Where whoever gives a registration back is told whether its keys are revoked.
pub(super) type DeregistrationReply = Arc<Mailbox<Result<bool, String>>>;

/// All of them, of one engine.
#[derive(Debug, Default)]
pub(super) struct DeregistrationQueue {
    entries: Vec<Entry>,
    /// The first of their times.
    next_attempt: Option<Instant>,
}

#[derive(Debug)]
struct Entry {
    idx: u32,
    num_attempts: u32,
    /// When it is tried again.
    at: Instant,
    /// Whoever waits for it, and when he is told that it did not work. Nobody has a handle otherwise.
    caller: Option<(DeregistrationReply, Instant)>,
}

impl DeregistrationQueue {
    /// The registration in place `idx` was tried for the first time, and is still there. With `caller`
    /// somebody waits to hear of it.
    pub(super) fn add(&mut self, idx: u32, caller: Option<DeregistrationReply>, now: Instant) {
        let caller = caller.map(|reply| (reply, now + CALLER_TIMEOUT));
        self.entries.push(Entry { idx, num_attempts: 1, at: now + backoff_after(1), caller });
        self.update_next_attempt();
    }

    /// When something is tried again.
    pub(super) const fn next_attempt(&self) -> Option<Instant> {
        self.next_attempt
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.next_attempt.is_some_and(|at| at <= now)
    }

    /// Tries what is due, the longest overdue first, and not all of it where that takes its time.
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

    /// The engine's thread ends: nothing is tried any more.
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
    /// One more try has ended, which took a while. Gives whether there is to be another.
    fn record_attempt(&mut self, result: Result<(), String>, now: Instant, took: Duration) -> bool {
        self.num_attempts = self.num_attempts.saturating_add(1);
        let detail = match result {
            Err(detail) => detail,
            Ok(()) => {
                if let Some((reply, _)) = &self.caller {
                    let _ = reply.push(Ok(true));
                } else if self.num_attempts > NUM_QUIET_ATTEMPTS {
                    tracing::info!("memory that had stayed registered is deregistered");
                }
                return false;
            }
        };
        match &self.caller {
            Some((reply, until)) if now >= *until => {
                if reply.push(Err(detail)).is_ok() {
                    // He has the handle back, and may try for himself.
                    return false;
                }
                self.caller = None;
            }
            Some(_) => {}
            None if self.num_attempts == NUM_QUIET_ATTEMPTS => {
                tracing::error!(error = detail, "memory stays registered; it is tried again");
            }
            None => tracing::debug!(error = detail, "memory stays registered"),
        }
        // One that holds the thread up gets half of its time at most.
        self.at = now + backoff_after(self.num_attempts).max(took.min(MAX_BACKOFF));
        if let Some((_, until)) = &self.caller {
            self.at = self.at.min(*until);
        }
        true
    }
}

/// Time until the next try, after so many.
fn backoff_after(num_attempts: u32) -> Duration {
    let doublings = num_attempts.saturating_sub(1).min(31);
    FIRST_BACKOFF.saturating_mul(1 << doublings).min(MAX_BACKOFF)
}

/// About as long as a peer takes for a step of a copy that it is in the middle of.
const FIRST_BACKOFF: Duration = Duration::from_millis(2);
const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// So long whoever gives memory back waits for peers that are in the middle of something.
const CALLER_TIMEOUT: Duration = Duration::from_secs(1);
/// Tries before it is said that memory stays: about a second.
const NUM_QUIET_ATTEMPTS: u32 = 10;
/// Tries of one round may take as long, before others have their turn.
const MAX_ROUND: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::engine::error::WaitError;

    /// A clock that only goes on when it is told to.
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

        /// Goes to when something is tried, and tries it.
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
    fn what_nobody_has_any_more_is_tried_ever_more_rarely_until_it_goes() {
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
        // Another one does not wait as long for that.
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
        // Each of them rests at least as long as it took.
        let first = queue.entries.iter().map(|entry| entry.at).max().unwrap();
        assert_eq!(first, clock.now() + long);
        // Short ones go by one round.
        clock.pass(2 * long);
        let mut num_tried = 0;
        clock.run_next(&mut queue, |_| {
            num_tried += 1;
            Ok(())
        });
        assert_eq!((num_tried, queue.next_attempt()), (5, None));
    }

    #[test]
    fn whoever_waits_is_told_when_it_is_gone_and_after_a_second_that_it_is_not() {
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
            assert!(clock.now() < begin + CALLER_TIMEOUT, "nobody is told");
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
        // Whoever was told has the handle, and tries for himself; whoever has given up has not.
        let mut tried = Vec::new();
        clock.run_next(&mut queue, |idx| {
            tried.push(idx);
            Ok(())
        });
        assert_eq!((tried, queue.next_attempt()), (vec![2], None));
    }

    #[test]
    fn whoever_waits_when_the_thread_ends_is_told() {
        let mut queue = DeregistrationQueue::default();
        let reply = DeregistrationReply::default();
        queue.add(0, Some(Arc::clone(&reply)), Instant::now());
        queue.stop();
        assert!(reply.pop(Instant::now()).unwrap().unwrap_err().contains("stopped"));
        assert_eq!(queue.next_attempt(), None);
    }
}
