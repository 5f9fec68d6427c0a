//! Budgets of entries in the audit log, by caller. One caller can neither fill the disk nor hide what others do.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Budgets of all callers. Each has one for refused and failed attempts, one for changes and one for tickets.
#[derive(Debug)]
pub(super) struct Budgets {
    origin: Instant,
    callers: Mutex<Callers>,
}

#[derive(Debug, Default)]
struct Callers {
    budgets: HashMap<(String, Kind), Budget>,
    /// Time of the next look for budgets to drop.
    drop_at: Duration,
}

/// The subject of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// A change that was made.
    Change,
    /// A ticket that was issued.
    Ticket,
    /// An attempt that failed or was refused.
    Failure,
}

impl Kind {
    /// Time that an entry takes from the budget, and the entries of a full budget.
    fn rate(self) -> (Duration, u32) {
        match self {
            // All servers of a large fleet may register with one token at once.
            Self::Change => (Duration::from_millis(50), 4096),
            // The first ticket of each host with one token.
            Self::Ticket => (Duration::from_secs(1), 4096),
            Self::Failure => (Duration::from_secs(1), 10),
        }
    }
}

#[derive(Debug, Default)]
struct Budget {
    /// Time at which the budget is whole again.
    whole_at: Duration,
    num_skipped: u64,
}

impl Budgets {
    pub(super) fn new() -> Self {
        Self { origin: Instant::now(), callers: Mutex::default() }
    }

    /// Takes an entry out of a caller's budget. Returns the number of entries of this kind that were left out since the
    /// last one, or `None` if this one is left out, too.
    pub(super) fn take(&self, caller: &str, kind: Kind) -> Option<u64> {
        self.take_at(caller, kind, self.origin.elapsed())
    }

    fn take_at(&self, caller: &str, kind: Kind, now: Duration) -> Option<u64> {
        // No code that holds the lock can leave a budget half changed.
        let mut callers = self.callers.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (caller.to_owned(), kind);
        if callers.budgets.len() >= MAX_BUDGETS && !callers.budgets.contains_key(&key) {
            callers.make_room(now);
            // The rest share a budget.
            if callers.budgets.len() >= MAX_BUDGETS {
                let shared = callers.budgets.entry((String::new(), kind)).or_default();
                return Self::take_from(shared, kind, now);
            }
        }
        Self::take_from(callers.budgets.entry(key).or_default(), kind, now)
    }

    fn take_from(budget: &mut Budget, kind: Kind, now: Duration) -> Option<u64> {
        let (interval, burst) = kind.rate();
        let next = budget.whole_at.max(now) + interval;
        if next - now > interval * burst {
            budget.num_skipped += 1;
            return None;
        }
        budget.whole_at = next;
        Some(std::mem::take(&mut budget.num_skipped))
    }
}

impl Callers {
    /// Drops budgets that are whole, at most once per [`DROP_PERIOD`], because it looks at all of them. Counts of entries
    /// that were left out last as long as there is room for them.
    fn make_room(&mut self, now: Duration) {
        if now < self.drop_at {
            return;
        }
        self.drop_at = now + DROP_PERIOD;
        self.budgets.retain(|_, budget| budget.whole_at > now || budget.num_skipped > 0);
        if self.budgets.len() >= MAX_BUDGETS {
            self.budgets.retain(|_, budget| budget.whole_at > now);
        }
    }
}

const MAX_BUDGETS: usize = 8192;
const DROP_PERIOD: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_caller_has_a_budget_of_its_own_and_skipped_entries_are_counted() {
        let budgets = Budgets::new();
        let at = |caller: &str, kind, ms| budgets.take_at(caller, kind, Duration::from_millis(ms));
        let taken = (0..1000).filter(|_| at("viewer", Kind::Failure, 0).is_some()).count();
        assert_eq!(taken, 10);
        assert_eq!(at("other", Kind::Failure, 0), Some(0));
        assert_eq!(at("viewer", Kind::Change, 0), Some(0));
        assert_eq!(at("viewer", Kind::Failure, 1000), Some(990));
        assert_eq!(at("viewer", Kind::Failure, 1000), None);
        let taken = (0..10_000).filter(|_| at("server", Kind::Change, 2000).is_some()).count();
        assert_eq!(taken, 4096);
    }

    #[test]
    fn the_memory_for_budgets_is_bounded() {
        let budgets = Budgets::new();
        let mut taken = 0;
        for caller in 0..3 * MAX_BUDGETS {
            let outcome = budgets.take_at(&caller.to_string(), Kind::Failure, Duration::ZERO);
            taken += usize::from(outcome.is_some());
        }
        assert!(budgets.callers.lock().unwrap().budgets.len() <= MAX_BUDGETS + 1);
        assert_eq!(taken, MAX_BUDGETS + 10);
    }

    /// Callers whose entries were left out make room for others once their budgets are whole.
    #[test]
    fn full_budgets_of_the_past_take_no_budget_from_others() {
        let budgets = Budgets::new();
        let take = |caller: String, at| budgets.take_at(&caller, Kind::Failure, at);
        for caller in 0..MAX_BUDGETS {
            for _ in 0..11 {
                take(caller.to_string(), Duration::ZERO);
            }
        }
        let later = Duration::from_secs(60);
        for caller in 0..20 {
            let outcomes: Vec<_> = (0..10).map(|_| take(format!("late-{caller}"), later)).collect();
            assert_eq!(outcomes, [Some(0); 10], "{caller}");
        }
    }
}
