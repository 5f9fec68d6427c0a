//! Limits on the rate of requests, by address, identity and member.

use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

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

/// The host behind an address.
pub(super) fn site(address: Option<IpAddr>) -> IpAddr {
    address.map_or(IpAddr::V6(Ipv6Addr::UNSPECIFIED), httpd::site)
}

/// The requests of the recent past.
#[derive(Debug)]
pub(crate) struct Rates {
    limits: RateLimits,
    strangers: httpd::Rates<Bucket>,
    /// Identities and members: strangers cannot fill this table.
    known: httpd::Rates<Bucket>,
}

impl Rates {
    pub(crate) fn new(limits: RateLimits) -> Self {
        let (strangers, known) = Default::default();
        Self { limits, strangers, known }
    }

    /// Counts a request. An error is the time after which the next one is accepted.
    pub(crate) fn take(&self, bucket: Bucket) -> Result<(), Duration> {
        let (rates, per_second) = self.of(&bucket);
        rates.take(bucket, per_second)
    }

    fn of(&self, bucket: &Bucket) -> (&httpd::Rates<Bucket>, u32) {
        match bucket {
            Bucket::Probes(_) | Bucket::Address(_) => (&self.strangers, self.limits.per_address),
            Bucket::Identity(..) => (&self.known, self.limits.per_identity),
            Bucket::Member(_) => (&self.known, self.limits.per_member),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(per_address: u32) -> Rates {
        Rates::new(RateLimits { per_address, per_identity: 50, per_member: 5 })
    }

    impl Rates {
        fn take_at(&self, bucket: Bucket, now: Duration) -> Result<(), Duration> {
            let (rates, per_second) = self.of(&bucket);
            rates.take_at(bucket, per_second, now)
        }
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
    fn a_host_that_changes_the_lower_half_of_its_address_stays_the_same() {
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
