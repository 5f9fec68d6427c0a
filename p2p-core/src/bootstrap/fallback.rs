//! Records the transports that failed with a peer, so that the next best one is used for a while.
//!
//! Both sides may have a device for a network that does not reach from one to the other: ports on
//! different fabrics, a filtered port. Sometimes the handshake shows that, because a side cannot
//! join. Sometimes it shows only later, because nothing ever comes over the link.
//!
//! In both cases the offer is left out of the next handshakes for a pause, and then tried again.
//! The pause doubles each time. A working link is not closed for the sake of a better network. The
//! better one is tried after the link ends.
//!
//! A peer that goes away ends its links too, and that says nothing about the network. So a link
//! counts only if it ends while the peer is there.
//!
//! A network may fail for one connection to a peer while it works for another one at the same time.
//! Such a failure counts for that connection alone. The others go on with the network until it
//! fails for them too.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::wire::MAX_LEFT_OUT_BYTES;
use crate::network::Offer;

/// Links in a row without any data before their offer is left out.
pub const MAX_USELESS_LINKS: u32 = 3;
/// Time that an offer is left out at first.
pub const FIRST_PAUSE: Duration = Duration::from_secs(10);
/// Longest time that an offer is left out.
pub const MAX_PAUSE: Duration = Duration::from_secs(600);

/// Offers that failed with one peer. Clones share the records, so all connections to a peer learn
/// from each other. [`of_one`](Self::of_one) is for connections that may also fail alone.
#[derive(Debug, Clone, Default)]
pub struct Fallback {
    history: Arc<Mutex<History>>,
    /// Links without data while another link by the same offer worked.
    own: Arc<Mutex<FailureList>>,
}

type FailureList = Vec<OfferFailures>;

#[derive(Debug, Default)]
struct History {
    failures: FailureList,
    /// Offers of links that carried data and are still up, once for each link.
    working: Vec<Offer>,
}

#[derive(Debug)]
struct OfferFailures {
    offer: Offer,
    /// Links in a row without any data.
    num_useless: u32,
    /// Pauses in a row.
    num_pauses: u32,
    until: Option<Instant>,
    reason: String,
}

/// An offer that is left out at the moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExcludedOffer {
    /// The offer itself.
    pub offer: Offer,
    /// Reason of the last failure.
    pub reason: String,
}

impl fmt::Display for ExcludedOffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.offer, self.reason)
    }
}

/// Stands for a link that carried data. As long as this value lives, failures to join by the same
/// offer are not blamed on the network.
#[derive(Debug)]
#[must_use = "the offer counts as working only as long as this is held"]
pub struct WorkingOffer {
    fallback: Fallback,
    offer: Offer,
}

impl Drop for WorkingOffer {
    fn drop(&mut self) {
        let mut history = self.fallback.lock();
        if let Some(at) = history.working.iter().position(|offer| *offer == self.offer) {
            history.working.swap_remove(at);
        }
    }
}

impl Fallback {
    /// Makes a handle for one of several connections to the peer. It shares the records. If its
    /// links carry no data while another link by the same offer works, that counts for this handle
    /// alone.
    #[must_use]
    pub fn of_one(&self) -> Self {
        Self { history: Arc::clone(&self.history), own: Arc::default() }
    }

    /// Records that the peers could not be joined by `offer`, and leaves it out. Returns the pause,
    /// unless the offer was already left out. Does nothing while a link by the offer works.
    pub fn note_failed(&self, offer: &Offer, reason: impl Into<String>) -> Option<Duration> {
        self.note_failed_at(offer, reason.into(), Instant::now())
    }

    /// Records that joining by `offer` took longer than allowed while the peer was there. Counts as
    /// a link without data. Does nothing while a link by the offer works.
    pub fn note_unfinished(&self, offer: &Offer, reason: impl Into<String>) -> Option<Duration> {
        self.note_unfinished_at(offer, reason.into(), Instant::now())
    }

    /// Records that a link by `offer` ended without any data while the peer was there. After
    /// [`MAX_USELESS_LINKS`] such links in a row the offer is left out, and this returns the pause.
    /// While another link by the offer works, the record counts for this handle and its clones
    /// alone.
    pub fn note_useless(&self, offer: &Offer, reason: impl Into<String>) -> Option<Duration> {
        self.note_useless_at(offer, reason.into(), Instant::now())
    }

    /// Records that data came over a link by `offer`, and clears its earlier failures. Keep the
    /// result as long as the link is up.
    pub fn note_works(&self, offer: &Offer) -> WorkingOffer {
        let mut history = self.lock();
        history.failures.retain(|entry| entry.offer != *offer);
        history.working.push(offer.clone());
        drop(history);
        self.lock_own().retain(|entry| entry.offer != *offer);
        WorkingOffer { fallback: self.clone(), offer: offer.clone() }
    }

    /// Returns the offers that are left out at the moment.
    #[must_use]
    pub fn left_out(&self) -> Vec<ExcludedOffer> {
        self.left_out_at(Instant::now())
    }

    fn note_failed_at(&self, offer: &Offer, reason: String, now: Instant) -> Option<Duration> {
        let mut history = self.lock();
        if history.working.contains(offer) {
            return None;
        }
        entry_of(&mut history.failures, offer).leave_out(reason, now)
    }

    fn note_unfinished_at(&self, offer: &Offer, reason: String, now: Instant) -> Option<Duration> {
        let mut history = self.lock();
        if history.working.contains(offer) {
            return None;
        }
        entry_of(&mut history.failures, offer).note_useless(&reason, now)
    }

    fn note_useless_at(&self, offer: &Offer, reason: String, now: Instant) -> Option<Duration> {
        let mut history = self.lock();
        if history.working.contains(offer) {
            drop(history);
            return entry_of(&mut self.lock_own(), offer).note_useless(&reason, now);
        }
        entry_of(&mut history.failures, offer).note_useless(&reason, now)
    }

    fn left_out_at(&self, now: Instant) -> Vec<ExcludedOffer> {
        let mut left_out = Vec::new();
        let mut add = |failures: &FailureList| {
            for entry in failures.iter().filter(|entry| entry.is_left_out(now)) {
                if !left_out.iter().any(|left: &ExcludedOffer| left.offer == entry.offer) {
                    let (offer, reason) = (entry.offer.clone(), entry.reason.clone());
                    left_out.push(ExcludedOffer { offer, reason });
                }
            }
        };
        add(&self.lock().failures);
        add(&self.lock_own());
        left_out
    }

    fn lock(&self) -> MutexGuard<'_, History> {
        // No code that holds the lock can leave the lists half changed.
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_own(&self) -> MutexGuard<'_, FailureList> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the record of the offer's failures.
fn entry_of<'a>(failures: &'a mut FailureList, offer: &Offer) -> &'a mut OfferFailures {
    let idx = failures.iter().position(|known| known.offer == *offer).unwrap_or_else(|| {
        failures.push(OfferFailures {
            offer: offer.clone(),
            num_useless: 0,
            num_pauses: 0,
            until: None,
            reason: String::new(),
        });
        failures.len() - 1
    });
    &mut failures[idx]
}

impl OfferFailures {
    fn is_left_out(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now < until)
    }

    fn note_useless(&mut self, reason: &str, now: Instant) -> Option<Duration> {
        self.num_useless = self.num_useless.saturating_add(1);
        // After a pause the offer is on probation: one useless link is enough.
        let is_known = self.num_pauses > 0;
        if self.num_useless < MAX_USELESS_LINKS && !is_known {
            return None;
        }
        let reason = match self.num_useless {
            1 => format!("a link carried nothing: {reason}"),
            links => format!("{links} links in a row carried nothing, the last one: {reason}"),
        };
        self.leave_out(reason, now)
    }

    /// Starts a pause. Connections made before a pause may fail during it, and do not prolong it.
    fn leave_out(&mut self, reason: String, now: Instant) -> Option<Duration> {
        if self.is_left_out(now) {
            return None;
        }
        let pause = FIRST_PAUSE.saturating_mul(1 << self.num_pauses.min(16)).min(MAX_PAUSE);
        self.num_pauses = self.num_pauses.saturating_add(1);
        self.until = now.checked_add(pause);
        self.reason = reason;
        Some(pause)
    }
}

/// Describes left-out offers for a hello, cut to the longest text that may travel.
pub(super) fn text_of(left_out: &[ExcludedOffer]) -> String {
    let mut text = left_out.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
    text.truncate(text.floor_char_boundary(MAX_LEFT_OUT_BYTES));
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::TransportKind;

    fn offer() -> Offer {
        Offer { kind: TransportKind::Verbs, flavour: "roce2".to_owned() }
    }

    #[test]
    fn a_failing_offer_is_left_out_for_ever_longer_and_retried_between() {
        let fallback = Fallback::default();
        let other = fallback.clone();
        let mut now = Instant::now();
        let mut last = Duration::ZERO;
        for round in 0..12 {
            assert!(fallback.left_out_at(now).is_empty(), "round {round}");
            let pause = fallback.note_failed_at(&offer(), format!("no {round}"), now).unwrap();
            assert!(pause >= FIRST_PAUSE && pause <= MAX_PAUSE);
            assert!(pause == (last * 2).clamp(FIRST_PAUSE, MAX_PAUSE), "{last:?} {pause:?}");
            last = pause;
            // A failure at the same time does not prolong the pause.
            let late = now + pause / 2;
            assert_eq!(other.note_failed_at(&offer(), "late".to_owned(), late), None);
            let left_out = other.left_out_at(now + pause - Duration::from_nanos(1));
            assert_eq!(left_out.len(), 1);
            assert_eq!(left_out[0].to_string(), format!("verbs:roce2: no {round}"));
            now += pause;
        }
        assert_eq!(last, MAX_PAUSE);
        drop(fallback.note_works(&offer()));
        let pause = fallback.note_failed_at(&offer(), String::new(), now);
        assert_eq!(pause, Some(FIRST_PAUSE), "it worked meanwhile");
    }

    #[test]
    fn links_that_carry_nothing_count_in_a_row() {
        let fallback = Fallback::default();
        let now = Instant::now();
        let useless = |now| fallback.note_useless_at(&offer(), "silent".to_owned(), now);
        for _ in 1..MAX_USELESS_LINKS {
            assert_eq!(useless(now), None);
        }
        drop(fallback.note_works(&offer()));
        for _ in 1..MAX_USELESS_LINKS {
            assert_eq!(useless(now), None);
        }
        assert_eq!(useless(now), Some(FIRST_PAUSE));
        let why = fallback.left_out_at(now)[0].reason.clone();
        assert!(why.contains("3 links in a row") && why.contains("silent"), "{why}");
        // After a pause, one such link is enough.
        let now = now + FIRST_PAUSE;
        assert!(fallback.left_out_at(now).is_empty());
        assert_eq!(useless(now), Some(2 * FIRST_PAUSE));
    }

    #[test]
    fn failures_to_join_beside_a_working_link_do_not_count() {
        let fallback = Fallback::default();
        let now = Instant::now();
        let unfinished = || fallback.note_unfinished_at(&offer(), "late".to_owned(), now);
        let failed = || fallback.note_failed_at(&offer(), "no".to_owned(), now);
        let (first, second) = (fallback.note_works(&offer()), fallback.note_works(&offer()));
        drop(first);
        for _ in 0..2 * MAX_USELESS_LINKS {
            assert_eq!((unfinished(), failed()), (None, None));
        }
        let other = Offer { flavour: "ib".to_owned(), ..offer() };
        let pause = fallback.note_failed_at(&other, String::new(), now);
        assert_eq!(pause, Some(FIRST_PAUSE), "another offer is another's");
        // Links that joined and carried no data count with their full number.
        for _ in 1..MAX_USELESS_LINKS {
            assert_eq!(fallback.note_useless_at(&offer(), String::new(), now), None);
        }
        assert_eq!(fallback.note_useless_at(&offer(), String::new(), now), Some(FIRST_PAUSE));
        drop(fallback.note_works(&offer()));
        drop(second);
        for _ in 1..MAX_USELESS_LINKS {
            assert_eq!(unfinished(), None);
        }
        assert_eq!(unfinished(), Some(FIRST_PAUSE));
    }

    #[test]
    fn useless_links_beside_a_working_one_count_for_their_own_connection() {
        let peer = Fallback::default();
        let lanes = [(); 4].map(|()| peer.of_one());
        let now = Instant::now();
        let useless =
            |lane: usize, now| lanes[lane].note_useless_at(&offer(), "silent".to_owned(), now);
        let is_left_out = |now| lanes.each_ref().map(|lane| lane.left_out_at(now).len() == 1);
        let working = lanes[0].note_works(&offer());
        // The three others have one useless link each, so none of them has three.
        for lane in 1..4 {
            assert_eq!(useless(lane, now), None);
        }
        assert_eq!(is_left_out(now), [false; 4]);
        // One connection fails three times, and alone leaves the offer out.
        assert_eq!(useless(3, now), None);
        assert_eq!(useless(3, now), Some(FIRST_PAUSE));
        assert_eq!(is_left_out(now), [false, false, false, true]);
        assert_eq!(lanes[3].clone().left_out_at(now).len(), 1, "clones share it");
        assert!(peer.left_out_at(now).is_empty() && peer.of_one().left_out_at(now).is_empty());
        let later = now + FIRST_PAUSE;
        assert_eq!(is_left_out(later), [false; 4]);
        assert_eq!(useless(3, later), Some(2 * FIRST_PAUSE));
        // After the pause one link works, and the state is as in the beginning.
        drop(lanes[3].note_works(&offer()));
        assert_eq!(is_left_out(later), [false; 4]);
        // No link works any more, so all connections learn from each other.
        drop(working);
        for lane in 1..MAX_USELESS_LINKS as usize {
            assert_eq!(useless(lane, later), None);
        }
        assert_eq!(useless(0, later), Some(FIRST_PAUSE));
        assert_eq!(is_left_out(later), [true; 4]);
        // One link that works clears the failures of all.
        let _working = lanes[2].note_works(&offer());
        assert_eq!(is_left_out(later), [false; 4]);
    }
}
