//! The peers that are connected to a listener, in total and by holder of their tickets.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{Reject, RejectCode};

/// Places for peers. Peers of one holder get a part of them at most, so that no holder keeps all others out.
#[derive(Debug)]
pub(super) struct PeerPlaces {
    places: Arc<Semaphore>,
    num_places: usize,
    most_of_holder: usize,
    holders: Arc<Mutex<HashMap<Box<str>, usize>>>,
}

/// The place of one peer. It is free again when this is dropped.
#[derive(Debug)]
pub(super) struct PeerPlace {
    _place: OwnedSemaphorePermit,
    _share: Option<Share>,
}

/// One place of a holder.
#[derive(Debug)]
struct Share {
    holders: Arc<Mutex<HashMap<Box<str>, usize>>>,
    holder: Box<str>,
}

impl PeerPlaces {
    /// A holder gets half of `num_places` unless `most_of_holder` says otherwise.
    pub(super) fn new(num_places: usize, most_of_holder: Option<usize>) -> Self {
        let num_places = num_places.min(Semaphore::MAX_PERMITS);
        Self {
            places: Arc::new(Semaphore::new(num_places)),
            num_places,
            most_of_holder: most_of_holder.unwrap_or(num_places / HOLDER_SHARE).max(1),
            holders: Arc::default(),
        }
    }

    /// Takes a place for a peer of `holder`, if the peer has one.
    ///
    /// # Errors
    /// [`Reject`] when all places are taken, or those of the holder.
    pub(super) fn take(&self, holder: Option<Box<str>>) -> Result<PeerPlace, Reject> {
        let share = holder.map(|holder| self.share(holder)).transpose()?;
        let place = Arc::clone(&self.places).try_acquire_owned().map_err(|_| {
            let max = self.num_places;
            Reject::new(RejectCode::FULL, format!("{max} peers are connected, which is the limit"))
        })?;
        Ok(PeerPlace { _place: place, _share: share })
    }

    fn share(&self, holder: Box<str>) -> Result<Share, Reject> {
        let max = self.most_of_holder;
        let mut holders = lock(&self.holders);
        let count = holders.entry(holder.clone()).or_default();
        if *count >= max {
            // A holder without a place has no entry: the limit is 1 at least.
            let text = format!(
                "{max} peers with tickets of one identity are connected, which is the limit for each: give clients \
                 identities of their own, or raise the limit on connected clients"
            );
            return Err(Reject::new(RejectCode::FULL, text));
        }
        *count += 1;
        Ok(Share { holders: Arc::clone(&self.holders), holder })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut holders = lock(&self.holders);
        let Some(count) = holders.get_mut(&self.holder) else { return };
        *count -= 1;
        if *count == 0 {
            holders.remove(&self.holder);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code that holds the lock can leave the table half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One holder may have one of this many parts of the places.
const HOLDER_SHARE: usize = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_holder_leaves_half_of_the_places_to_others() {
        let num_places = rand::random_range(2..100);
        let places = PeerPlaces::new(num_places, None);
        let take = |holder: &str| places.take(Some(holder.into()));
        let mut greedy: Vec<_> = std::iter::from_fn(|| take("greedy").ok()).collect();
        assert_eq!(greedy.len(), num_places / 2, "of {num_places}");
        let refused = take("greedy").unwrap_err();
        assert_eq!(refused.code, RejectCode::FULL);
        assert!(refused.message.contains("of one identity"), "{refused}");
        let modest = take("modest").expect("a place for another holder");
        let rest: Vec<_> = std::iter::from_fn(|| places.take(None).ok()).collect();
        assert_eq!(
            greedy.len() + 1 + rest.len(),
            num_places,
            "peers without a holder have no share"
        );
        assert!(take("third").unwrap_err().message.contains("peers are connected"));
        drop(rest);
        // A refusal for want of places takes none of the holder's share, and each end gives its place back.
        greedy.pop();
        greedy.push(take("greedy").expect("the place that came free"));
        drop((greedy, modest));
        assert!(lock(&places.holders).is_empty());
        assert_eq!(places.places.available_permits(), num_places);
    }

    #[test]
    fn one_holder_gets_as_many_places_as_the_listener_allows() {
        let places = PeerPlaces::new(32, Some(32));
        let all: Vec<_> = std::iter::from_fn(|| places.take(Some("engine".into())).ok()).collect();
        assert_eq!(all.len(), 32);
    }

    #[test]
    fn a_single_place_is_for_any_holder() {
        let places = PeerPlaces::new(1, None);
        let place = places.take(Some("a".into())).unwrap();
        assert!(places.take(Some("b".into())).is_err());
        drop(place);
        places.take(Some("b".into())).unwrap();
    }
}
