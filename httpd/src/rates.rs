//! Rates of requests, by address, identity or anything else that requests share.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::RETRY_AFTER;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use prometheus::IntCounter;
use trust::Identity;

use crate::{PeerAddr, site};

/// The requests of the recent past, as one time per bucket: when the bucket will be empty again. This is the
/// "virtual scheduling" form of the generic cell rate algorithm (ITU-T I.371, annex A). A bucket holds the requests of
/// two seconds. Beyond 16,384 buckets the others share one.
#[derive(Debug)]
pub struct Rates<B> {
    origin: Instant,
    table: Mutex<Table<B>>,
}

#[derive(Debug)]
struct Table<B> {
    /// `None` is the common bucket.
    empty_at: HashMap<Option<B>, Duration>,
    /// A full table is searched for empty buckets at most so often.
    next_sweep: Duration,
}

impl<B: Eq + Hash> Table<B> {
    /// The bucket, or the common one if the table has no room.
    fn place(&mut self, bucket: B, now: Duration) -> Option<B> {
        let bucket = Some(bucket);
        if self.empty_at.contains_key(&bucket) || self.empty_at.len() < MAX_BUCKETS {
            return bucket;
        }
        if now >= self.next_sweep {
            self.next_sweep = now + SWEEP_PERIOD;
            // An empty bucket is as good as none.
            self.empty_at.retain(|_, empty_at| *empty_at > now);
        }
        if self.empty_at.len() < MAX_BUCKETS { bucket } else { None }
    }
}

impl<B: Eq + Hash> Rates<B> {
    /// No requests yet.
    #[must_use]
    pub fn new() -> Self {
        let table = Table { empty_at: HashMap::new(), next_sweep: Duration::ZERO };
        Self { origin: Instant::now(), table: Mutex::new(table) }
    }

    /// Counts a request against its bucket of `per_second`; 0 means no limit.
    ///
    /// # Errors
    /// The time after which the next request of the bucket is accepted.
    pub fn take(&self, bucket: B, per_second: u32) -> Result<(), Duration> {
        self.take_at(bucket, per_second, self.origin.elapsed())
    }

    /// As [`take`](Self::take) at the time `now`, which never falls.
    ///
    /// # Errors
    /// As for [`take`](Self::take).
    pub fn take_at(&self, bucket: B, per_second: u32, now: Duration) -> Result<(), Duration> {
        if per_second == 0 {
            return Ok(());
        }
        let interval = Duration::from_secs(1) / per_second;
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let bucket = table.place(bucket, now);
        let empty_at = table.empty_at.entry(bucket).or_default();
        let next = (*empty_at).max(now) + interval;
        let ahead = next.saturating_sub(now);
        if ahead > BURST {
            return Err(ahead - BURST);
        }
        *empty_at = next;
        Ok(())
    }
}

impl<B: Eq + Hash> Default for Rates<B> {
    fn default() -> Self {
        Self::new()
    }
}

/// `router` with at most `per_second` requests of each address, and as many of each identity at each address. The
/// requests beyond get 429 with `Retry-After`, and `limited` counts them.
pub fn limit_rates(router: Router, per_second: u32, limited: IntCounter) -> Router {
    let limiter = Limiter { rates: Arc::new(Rates::new()), per_second, limited };
    router.layer(from_fn_with_state(limiter, limit))
}

#[derive(Clone, Debug)]
struct Limiter {
    /// By address and name of the certificate.
    rates: Arc<Rates<(IpAddr, Option<String>)>>,
    per_second: u32,
    limited: IntCounter,
}

async fn limit(State(limiter): State<Limiter>, request: Request, next: Next) -> Response {
    let extensions = request.extensions();
    let address = extensions.get::<PeerAddr>().map(|peer| site(peer.0.ip()));
    let address = address.unwrap_or(IpAddr::V6(Ipv6Addr::UNSPECIFIED));
    let name = extensions.get::<Identity>().map(|identity| identity.name.clone());
    match limiter.rates.take((address, name), limiter.per_second) {
        Ok(()) => next.run(request).await,
        Err(wait) => {
            limiter.limited.inc();
            let seconds = wait.as_secs() + 1;
            let text = format!("too many requests: send fewer, and wait {seconds} s\n");
            let headers = [(RETRY_AFTER, seconds.to_string())];
            (StatusCode::TOO_MANY_REQUESTS, headers, text).into_response()
        }
    }
}

/// A bucket holds the requests of this time.
const BURST: Duration = Duration::from_secs(2);
const SWEEP_PERIOD: Duration = Duration::from_millis(100);
/// Bounds the memory of a table: about 2 MB.
const MAX_BUCKETS: usize = 16_384;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_stays_small_and_every_bucket_limited() {
        let rates = Rates::new();
        let mut refused = 0;
        for host in 0..100_000 {
            refused += u32::from(rates.take_at(host, 10, Duration::ZERO).is_err());
        }
        let len = || rates.table.lock().unwrap().empty_at.len();
        assert!(len() <= MAX_BUCKETS + 1);
        assert!(refused > 80_000, "{refused}");
        // Later the table has room again.
        assert_eq!(rates.take_at(100_001, 10, Duration::from_secs(3)), Ok(()));
        assert_eq!(len(), 1);
    }
}
