//! Registrations that their transports did not let go of at once, and when that is tried again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::mailbox::Mailbox;

/// Where whoever gives a registration back is told whether its keys are revoked.
pub(super) type Reply = Arc<Mailbox<Result<bool, String>>>;

/// All of them, of one engine.
#[derive(Debug, Default)]
pub(super) struct Leaving {
    waiting: Vec<Waiting>,
    /// The first of their times.
    next_try: Option<Instant>,
}

#[derive(Debug)]
struct Waiting {
    idx: u32,
    num_tries: u32,
    /// When it is tried again.
    at: Instant,
    /// Whoever waits for it, and when he is told that it did not work. Nobody has a handle otherwise.
    asked: Option<(Reply, Instant)>,
}

impl Leaving {
    /// The registration in place `idx` was tried for the first time, and is still there. With `asked`
    /// somebody waits to hear of it.
    pub(super) fn add(&mut self, idx: u32, asked: Option<Reply>, now: Instant) {
        let asked = asked.map(|reply| (reply, now + PATIENCE));
        self.waiting.push(Waiting { idx, num_tries: 1, at: now + pause_after(1), asked });
        self.plan();
    }

    /// When something is tried again.
    pub(super) const fn next_try(&self) -> Option<Instant> {
        self.next_try
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.next_try.is_some_and(|at| at <= now)
    }

    /// Tries what is due, the longest overdue first, and not all of it where that takes its time.
    pub(super) fn try_again(
        &mut self,
        now: Instant,
        clock: impl Fn() -> Instant,
        mut release: impl FnMut(u32) -> Result<(), String>,
    ) {
        self.waiting.sort_by_key(|waiting| waiting.at);
        let mut begin = now;
        self.waiting.retain_mut(|waiting| {
            if waiting.at > now || begin.saturating_duration_since(now) >= MAX_ROUND {
                return true;
            }
            let result = release(waiting.idx);
            let end = clock().max(begin);
            let stays = waiting.tried(result, end, end - begin);
            begin = end;
            stays
        });
        self.plan();
    }

    /// The engine's thread ends: nothing is tried any more.
    pub(super) fn stop(&mut self) {
        for (reply, _) in self.waiting.drain(..).filter_map(|waiting| waiting.asked) {
            let _ = reply.push(Err("the engine has stopped".to_owned()));
        }
        self.plan();
    }

    fn plan(&mut self) {
        self.next_try = self.waiting.iter().map(|waiting| waiting.at).min();
    }
}

impl Waiting {
    /// One more try has ended, which took a while. Gives whether there is to be another.
    fn tried(&mut self, result: Result<(), String>, now: Instant, took: Duration) -> bool {
        self.num_tries = self.num_tries.saturating_add(1);
        let detail = match result {
            Err(detail) => detail,
            Ok(()) => {
                if let Some((reply, _)) = &self.asked {
                    let _ = reply.push(Ok(true));
                } else if self.num_tries > NUM_QUIET_TRIES {
                    tracing::info!("memory that had stayed registered is deregistered");
                }
                return false;
            }
        };
        match &self.asked {
            Some((reply, until)) if now >= *until => {
                if reply.push(Err(detail)).is_ok() {
                    // He has the handle back, and may try for himself.
                    return false;
                }
                self.asked = None;
            }
            Some(_) => {}
            None if self.num_tries == NUM_QUIET_TRIES => {
                tracing::error!(error = detail, "memory stays registered; it is tried again");
            }
            None => tracing::debug!(error = detail, "memory stays registered"),
        }
        // One that holds the thread up gets half of its time at most.
        self.at = now + pause_after(self.num_tries).max(took.min(MAX_PAUSE));
        if let Some((_, until)) = &self.asked {
            self.at = self.at.min(*until);
        }
        true
    }
}

/// Time until the next try, after so many.
fn pause_after(num_tries: u32) -> Duration {
    let doublings = num_tries.saturating_sub(1).min(31);
    FIRST_PAUSE.saturating_mul(1 << doublings).min(MAX_PAUSE)
}

/// About as long as a peer takes for a step of a copy that it is in the middle of.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// So long whoever gives memory back waits for peers that are in the middle of something.
const PATIENCE: Duration = Duration::from_secs(1);
/// Tries before it is said that memory stays: about a second.
const NUM_QUIET_TRIES: u32 = 10;
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
        fn try_next(
            &self,
            leaving: &mut Leaving,
            release: impl FnMut(u32) -> Result<(), String>,
        ) -> Duration {
            let (before, at) = (self.now(), leaving.next_try().unwrap());
            self.0.set(at.max(before));
            assert!(leaving.is_due(self.now()));
            let begin = self.now();
            leaving.try_again(begin, || self.now(), release);
            begin - before
        }
    }

    fn refuse() -> Result<(), String> {
        Err("busy".to_owned())
    }

    #[test]
    fn the_pauses_begin_short_and_double_up_to_a_minute() {
        assert_eq!(pause_after(0), FIRST_PAUSE);
        assert_eq!(pause_after(1), FIRST_PAUSE);
        for num_tries in 1..40 {
            let next = (pause_after(num_tries) * 2).min(MAX_PAUSE);
            assert_eq!(pause_after(num_tries + 1), next, "after {num_tries}");
        }
        assert_eq!(pause_after(u32::MAX), MAX_PAUSE);
        let quiet: Duration = (1..NUM_QUIET_TRIES).map(pause_after).sum();
        assert!(quiet >= Duration::from_secs(1) && quiet < Duration::from_secs(2), "{quiet:?}");
    }

    #[test]
    fn what_nobody_has_any_more_is_tried_ever_more_rarely_until_it_goes() {
        let (clock, mut leaving) = (Clock::new(), Leaving::default());
        assert_eq!(leaving.next_try(), None);
        leaving.add(7, None, clock.now());
        for num_tries in 1..30 {
            let paused = clock.try_next(&mut leaving, |idx| {
                assert_eq!(idx, 7);
                refuse()
            });
            assert_eq!(paused, pause_after(num_tries));
        }
        // Another one does not wait as long for that.
        leaving.add(8, None, clock.now());
        let paused = clock.try_next(&mut leaving, |idx| {
            assert_eq!(idx, 8);
            Ok(())
        });
        assert_eq!(paused, FIRST_PAUSE);
        assert_eq!(clock.try_next(&mut leaving, |_| Ok(())), MAX_PAUSE - FIRST_PAUSE);
        assert_eq!(leaving.next_try(), None);
    }

    #[test]
    fn tries_that_hold_the_thread_up_leave_others_their_turn() {
        let (clock, mut leaving) = (Clock::new(), Leaving::default());
        for idx in 0..5 {
            leaving.add(idx, None, clock.now());
        }
        let (mut tried, long) = (Vec::new(), Duration::from_secs(3));
        for _ in 0..5 {
            clock.try_next(&mut leaving, |idx| {
                tried.push(idx);
                clock.pass(long);
                refuse()
            });
        }
        tried.sort_unstable();
        assert_eq!(tried, [0, 1, 2, 3, 4], "one in a round, and each of them once");
        // Each of them rests at least as long as it took.
        let first = leaving.waiting.iter().map(|waiting| waiting.at).max().unwrap();
        assert_eq!(first, clock.now() + long);
        // Short ones go by one round.
        clock.pass(2 * long);
        let mut num_tried = 0;
        clock.try_next(&mut leaving, |_| {
            num_tried += 1;
            Ok(())
        });
        assert_eq!((num_tried, leaving.next_try()), (5, None));
    }

    #[test]
    fn whoever_waits_is_told_when_it_is_gone_and_after_a_second_that_it_is_not() {
        let (clock, mut leaving) = (Clock::new(), Leaving::default());
        let (good, bad, gone) = (Reply::default(), Reply::default(), Reply::default());
        for (idx, reply) in [&good, &bad, &gone].into_iter().enumerate() {
            leaving.add(idx as u32, Some(Arc::clone(reply)), clock.now());
        }
        let (begin, mut num_good) = (clock.now(), 0);
        gone.give_up();
        let answer = |reply: &Reply| reply.pop(begin);
        while answer(&bad) == Err(WaitError::Deadline) {
            assert!(clock.now() < begin + PATIENCE, "nobody is told");
            clock.try_next(&mut leaving, |idx| {
                num_good += u32::from(idx == 0);
                if idx == 0 && num_good == 3 { Ok(()) } else { refuse() }
            });
            if let Ok(answer) = answer(&bad) {
                assert_eq!(answer, Err("busy".to_owned()));
                break;
            }
        }
        assert_eq!((clock.now(), num_good), (begin + PATIENCE, 3));
        assert_eq!(answer(&good), Ok(Ok(true)));
        // Whoever was told has the handle, and tries for himself; whoever has given up has not.
        let mut tried = Vec::new();
        clock.try_next(&mut leaving, |idx| {
            tried.push(idx);
            Ok(())
        });
        assert_eq!((tried, leaving.next_try()), (vec![2], None));
    }

    #[test]
    fn whoever_waits_when_the_thread_ends_is_told() {
        let mut leaving = Leaving::default();
        let reply = Reply::default();
        leaving.add(0, Some(Arc::clone(&reply)), Instant::now());
        leaving.stop();
        assert!(reply.pop(Instant::now()).unwrap().unwrap_err().contains("stopped"));
        assert_eq!(leaving.next_try(), None);
    }
}
