//! Connecting to addresses, and the address to publish.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};

use rustix::net::{AddressFamily, SocketFlags, SocketType};

/// Starts to connect to `addr`, without blocking.
pub(super) fn start_connecting(addr: SocketAddr) -> io::Result<TcpStream> {
    let family = if addr.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let fd = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&fd, &addr) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(TcpStream::from(fd)),
        Err(errno) => Err(errno.into()),
    }
}

/// The address at which peers reach a listener on `bind`.
pub(super) fn reachable_ip(bind: IpAddr) -> IpAddr {
    if !bind.is_unspecified() {
        return bind;
    }
    let mut routes: Vec<(IpAddr, IpAddr)> =
        vec![(Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::new(192, 0, 2, 1).into())];
    if bind.is_ipv6() {
        let outside = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
        routes.push((Ipv6Addr::UNSPECIFIED.into(), outside.into()));
    }
    // This sends no packet: the system only selects the source address.
    let source = |(any, outside): (IpAddr, IpAddr)| {
        let socket = UdpSocket::bind((any, 0)).ok()?;
        socket.connect((outside, 9)).ok()?;
        socket.local_addr().ok().map(|addr| addr.ip())
    };
    routes.into_iter().find_map(source).unwrap_or_else(|| {
        let ip = Ipv4Addr::LOCALHOST;
        tracing::warn!(%ip, "no route leads outside, so only this host can connect; set `advertise`");
        ip.into()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_address_can_be_connected_to() {
        for bind in ["10.1.2.3", "::1"] {
            let bind: IpAddr = bind.parse().unwrap();
            assert_eq!(reachable_ip(bind), bind);
        }
        for bind in ["0.0.0.0", "::"] {
            // This holds with and without a route.
            let ip = reachable_ip(bind.parse().unwrap());
            assert!(!ip.is_unspecified(), "{bind}: {ip}");
        }
    }
}
