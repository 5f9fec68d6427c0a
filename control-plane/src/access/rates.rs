//! Limits on the rate of requests, by address, identity and member.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use control_api::MemberId;

/// Most requests a second of one caller. Each limit allows a burst of twice as many. 0 means no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RateLimits {
    /// Requests without an identity, by address: probes, wrong tokens, and everything where no identity is asked for.
    /// An IPv6 address counts with its /64.
    pub per_address: u32,
    /// Requests of one identity from one address.
    pub per_identity: u32,
    /// Requests about one member, such as its renewals. They count against no other limit.
    pub per_member: u32,
}

impl Default for RateLimits {
    fn default() -> Self {
        Self { per_address: 2000, per_identity: 2000, per_member: 100 }
    }
}

/// Requests that share a limit.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Bucket {
    /// Probes of an address: they pass while its other requests are limited.
    Probes(IpAddr),
    Address(IpAddr),
    Identity(String, IpAddr),
    /// A member that exists.
    Member(MemberId),
    /// All that find the table full.
    Others,
}

impl Bucket {
    pub(crate) fn probes(address: Option<IpAddr>) -> Self {
        Self::Probes(site(address))
    }

    pub(crate) fn address(address: Option<IpAddr>) -> Self {
        Self::Address(site(address))
    }

    pub(crate) fn identity(name: &str, address: Option<IpAddr>) -> Self {
        Self::Identity(name.to_owned(), site(address))
    }
}

/// The part of an address that one host cannot change at will.
fn site(address: Option<IpAddr>) -> IpAddr {
    match address {
        None => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        Some(IpAddr::V6(address)) => match address.to_ipv4_mapped() {
            Some(address) => IpAddr::V4(address),
            None => {
                let [a, b, c, d, ..] = address.segments();
                IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
            }
        },
        Some(address) => address,
    }
}

/// The requests of the recent past, as one time per bucket: when the bucket will be empty again. This is the
/// "virtual scheduling" form of the generic cell rate algorithm (ITU-T I.371, annex A).
#[derive(Debug)]
pub(crate) struct Rates {
    limits: RateLimits,
    origin: Instant,
    strangers: Mutex<Table>,
    /// Identities and members: strangers cannot fill this table.
    known: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    empty_at: HashMap<Bucket, Duration>,
    /// A full table is searched for empty buckets at most so often.
    next_sweep: Duration,
}

impl Table {
    /// The bucket, or the common one if the table has no room.
    fn place(&mut self, bucket: Bucket, now: Duration) -> Bucket {
        if self.empty_at.contains_key(&bucket) || self.empty_at.len() < MAX_BUCKETS {
            return bucket;
        }
        if now >= self.next_sweep {
            self.next_sweep = now + SWEEP_PERIOD;
            // An empty bucket is as good as none.
            self.empty_at.retain(|_, empty_at| *empty_at > now);
        }
        if self.empty_at.len() < MAX_BUCKETS { bucket } else { Bucket::Others }
    }
}

impl Rates {
    pub(crate) fn new(limits: RateLimits) -> Self {
        let (strangers, known) = Default::default();
        Self { limits, origin: Instant::now(), strangers, known }
    }

    /// Counts a request. An error is the time after which the next one is accepted.
    pub(crate) fn take(&self, bucket: Bucket) -> Result<(), Duration> {
        self.take_at(bucket, self.origin.elapsed())
    }

    fn take_at(&self, bucket: Bucket, now: Duration) -> Result<(), Duration> {
        let (per_second, table) = match &bucket {
            Bucket::Probes(_) | Bucket::Address(_) | Bucket::Others => {
                (self.limits.per_address, &self.strangers)
            }
            Bucket::Identity(..) => (self.limits.per_identity, &self.known),
            Bucket::Member(_) => (self.limits.per_member, &self.known),
        };
        if per_second == 0 {
            return Ok(());
        }
        let interval = Duration::from_secs(1) / per_second;
        let mut table = table.lock().unwrap_or_else(PoisonError::into_inner);
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

/// A bucket holds the requests of this time.
const BURST: Duration = Duration::from_secs(2);
const SWEEP_PERIOD: Duration = Duration::from_millis(100);
/// Bounds the memory of a table: about 2 MB.
const MAX_BUCKETS: usize = 16_384;

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(per_address: u32) -> Rates {
        Rates::new(RateLimits { per_address, per_identity: 50, per_member: 5 })
    }

    fn address(host: u32) -> Bucket {
        Bucket::address(Some(IpAddr::from(host.to_be_bytes())))
    }

    #[test]
    fn a_burst_passes_and_then_the_rate_holds() {
        let rates = rates(10);
        let at = |ms| Duration::from_millis(ms);
        for _ in 0..20 {
            assert_eq!(rates.take_at(address(1), at(0)), Ok(()));
        }
        assert_eq!(rates.take_at(address(1), at(0)), Err(at(100)));
        // Others are not affected, nor are its probes.
        assert_eq!(rates.take_at(address(2), at(0)), Ok(()));
        let probes = Bucket::probes(Some(IpAddr::from(1_u32.to_be_bytes())));
        assert_eq!(rates.take_at(probes, at(0)), Ok(()));
        let mut passed = 0;
        for ms in 1..=10_000 {
            passed += u32::from(rates.take_at(address(1), at(ms)).is_ok());
        }
        assert_eq!(passed, 100);
    }

    #[test]
    fn a_thousand_members_renew_from_one_address() {
        let rates = Rates::new(RateLimits::default());
        let members: Vec<_> = (0..1000).map(|_| MemberId::random()).collect();
        for second in 0..10 {
            for member in &members {
                let now = Duration::from_secs(second);
                assert_eq!(rates.take_at(Bucket::Member(member.clone()), now), Ok(()));
            }
        }
        // All of them may register at once.
        for _ in 0..1000 {
            let bucket = Bucket::identity("servers", None);
            assert_eq!(rates.take_at(bucket, Duration::ZERO), Ok(()));
        }
    }

    #[test]
    fn the_table_stays_small_and_every_caller_limited() {
        let rates = rates(10);
        let mut refused = 0;
        for host in 0..100_000 {
            refused += u32::from(rates.take_at(address(host), Duration::ZERO).is_err());
        }
        assert!(rates.strangers.lock().unwrap().empty_at.len() <= MAX_BUCKETS + 1);
        assert!(refused > 80_000, "{refused}");
        // Later the table has room again.
        assert_eq!(rates.take_at(address(100_001), Duration::from_secs(3)), Ok(()));
        assert_eq!(rates.strangers.lock().unwrap().empty_at.len(), 1);
        // A host that changes the lower half of its IPv6 address stays the same.
        let at = |text: &str| Bucket::address(Some(text.parse().unwrap()));
        assert_eq!(at("2001:db8::1"), at("2001:db8::ffff:2"));
        assert_ne!(at("2001:db8::1"), at("2001:db8:0:1::1"));
        assert_eq!(at("::ffff:10.0.0.1"), at("10.0.0.1"));
    }

    #[test]
    fn zero_means_no_limit() {
        let rates = rates(0);
        for _ in 0..10_000 {
            assert_eq!(rates.take_at(address(1), Duration::ZERO), Ok(()));
        }
    }
}
