//! Loaded experts that are no longer assigned.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Decides when a loaded expert that is not assigned is left out of reports, and when it may be freed.
///
/// Clients with a newer placement do not ask for such an expert. A client that the control plane does not reach keeps its
/// placement and goes on asking, so an expert stays until no token has come for it for [`UNLOAD_AFTER`].
#[derive(Debug, Default)]
pub(super) struct Surplus {
    entries: HashMap<(u32, u32), Entry>,
}

#[derive(Debug)]
struct Entry {
    /// When the expert was first seen without an assignment.
    since: Instant,
    /// Tokens of the expert at the last look.
    num_tokens: u64,
    /// When a look last found more tokens than the one before.
    last_use: Instant,
    is_noted: bool,
}

/// The decision about one expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Keep {
    /// Reported: a plan may count on it.
    Reported,
    /// Still served, but no plan should count on it.
    Unreported,
    /// Served and unreported for longer than usual, because a client still asks for it. Returned once for each expert.
    StillAsked,
    /// May be freed.
    Free,
}

impl Surplus {
    /// Forgets the experts that are assigned again.
    pub(super) fn retain(&mut self, is_assigned: impl Fn(u32, u32) -> bool) {
        self.entries.retain(|&(layer, expert), _| !is_assigned(layer, expert));
    }

    pub(super) fn remove(&mut self, layer: u32, expert: u32) {
        self.entries.remove(&(layer, expert));
    }

    /// Number of experts that stay for longer than usual, because a client still asks for them.
    pub(super) fn num_still_asked(&self) -> usize {
        self.entries.values().filter(|entry| entry.is_noted).count()
    }

    /// Looks at an expert that is loaded and not assigned. `num_tokens` is the number of tokens computed with it so far.
    pub(super) fn look(&mut self, layer: u32, expert: u32, num_tokens: u64, now: Instant) -> Keep {
        let entry = self.entries.entry((layer, expert)).or_insert(Entry {
            since: now,
            num_tokens,
            last_use: now,
            is_noted: false,
        });
        if num_tokens != entry.num_tokens {
            entry.num_tokens = num_tokens;
            entry.last_use = now;
        }
        if now.duration_since(entry.last_use) >= UNLOAD_AFTER {
            return Keep::Free;
        }
        let age = now.duration_since(entry.since);
        if age >= UNLOAD_AFTER && !std::mem::replace(&mut entry.is_noted, true) {
            return Keep::StillAsked;
        }
        match age < REPORT_AFTER {
            true => Keep::Reported,
            false => Keep::Unreported,
        }
    }
}

/// An expert that is not assigned is reported as loaded for so long.
const REPORT_AFTER: Duration = Duration::from_secs(15);
/// Time without an assignment and without a token after which an expert may be freed. Clients that the control plane
/// reaches have moved long before, and the control plane knows by then that the expert will go.
const UNLOAD_AFTER: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks once a second from `from` to `to`, with one more token at each second that `is_asked` names.
    fn looks(
        surplus: &mut Surplus,
        start: Instant,
        (from, to): (u64, u64),
        is_asked: impl Fn(u64) -> bool,
    ) -> Vec<Keep> {
        let mut num_tokens = (0..from).filter(|&second| is_asked(second)).count() as u64;
        let look = |second: u64| {
            num_tokens += u64::from(is_asked(second));
            surplus.look(3, 7, num_tokens, start + Duration::from_secs(second))
        };
        (from..to).map(look).collect()
    }

    #[test]
    fn an_expert_without_tokens_goes_after_the_usual_time() {
        let mut surplus = Surplus::default();
        let found = looks(&mut surplus, Instant::now(), (0, 32), |_| false);
        let expected = |second| match second {
            0..15 => Keep::Reported,
            15..30 => Keep::Unreported,
            _ => Keep::Free,
        };
        assert_eq!(found, (0..32).map(expected).collect::<Vec<_>>());
    }

    #[test]
    fn an_expert_stays_until_no_client_has_asked_for_it_for_the_usual_time() {
        let mut surplus = Surplus::default();
        // A client asks every 29 seconds, the last time after 145.
        let found = looks(&mut surplus, Instant::now(), (0, 180), |second| {
            second > 0 && second % 29 == 0 && second <= 145
        });
        assert_eq!(found.iter().position(|keep| *keep == Keep::Free), Some(175));
        let noted = found.iter().filter(|keep| **keep == Keep::StillAsked).count();
        assert_eq!(noted, 1, "{found:?}");
        assert!(found[15..175].iter().all(|keep| *keep != Keep::Reported));
        assert_eq!(surplus.num_still_asked(), 1);
        surplus.remove(3, 7);
        assert_eq!(surplus.num_still_asked(), 0);
    }

    #[test]
    fn an_expert_that_is_assigned_again_starts_anew() {
        let (mut surplus, start) = (Surplus::default(), Instant::now());
        looks(&mut surplus, start, (0, 29), |_| false);
        surplus.retain(|layer, expert| (layer, expert) == (3, 7));
        let found = looks(&mut surplus, start, (40, 71), |_| false);
        assert_eq!(found.first(), Some(&Keep::Reported));
        assert_eq!(found.last(), Some(&Keep::Free));
    }
}
