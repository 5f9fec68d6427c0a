//! The part of an address that stands for one host.

use std::net::{IpAddr, Ipv6Addr};

/// The part of an address that one host cannot change at will: an IPv4 address, or the /64 of an IPv6 address.
pub fn site(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V6(address) => match address.to_ipv4_mapped() {
            Some(address) => IpAddr::V4(address),
            None => {
                let [a, b, c, d, ..] = address.segments();
                IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
            }
        },
        IpAddr::V4(_) => address,
    }
}
