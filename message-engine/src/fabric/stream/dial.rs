//! Connects to a peer's listener.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use super::carrier::Carrier;
use super::rings::Rings;
use super::unix::{self, Name};

/// The peer's listener.
#[derive(Debug)]
pub(super) enum Dial {
    Tcp { address: SocketAddr, timeout: Duration },
    Shm(Name),
}

impl Dial {
    /// Begins to connect. Returns whether an event will tell that the connection is made. Does not block.
    pub(super) fn begin(&self) -> io::Result<(Carrier, bool)> {
        match self {
            Self::Tcp { address, timeout } => {
                let fd = begin_connecting(*address, *timeout)?;
                Ok((Carrier::Socket(Arc::new(fd)), true))
            }
            Self::Shm(name) => {
                let rings = Rings::make(Arc::new(unix::connect(name)?))?;
                Ok((Carrier::Rings(Box::new(rings)), false))
            }
        }
    }

    /// Connects. Blocks until the connection is made, at the latest at `until`.
    pub(super) fn connect(&self, until: Instant) -> io::Result<Carrier> {
        let (carrier, is_connecting) = self.begin()?;
        while is_connecting && !carrier.wait(true, until)? {
            if Instant::now() >= until {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
        sockopt::socket_error(carrier.fd())??;
        Ok(carrier)
    }
}

impl fmt::Display for Dial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { address, .. } => address.fmt(f),
            Self::Shm(_) => f.write_str("the peer's Unix socket"),
        }
    }
}

fn begin_connecting(address: SocketAddr, timeout: Duration) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let fd = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    watch(&fd, timeout)?;
    match rustix::net::connect(&fd, &address) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(fd),
        Err(errno) => Err(errno.into()),
    }
}

/// Sets the options by which the system detects within `timeout` that the other host is gone.
pub(super) fn watch(fd: &OwnedFd, timeout: Duration) -> io::Result<()> {
    let timeout = timeout.clamp(Duration::from_secs(1), Duration::from_secs(3600));
    let probe = Duration::from_secs((timeout.as_secs() / 4).max(1));
    rustix::io::ioctl_fionbio(fd, true)?;
    sockopt::set_tcp_nodelay(fd, true)?;
    sockopt::set_socket_keepalive(fd, true)?;
    sockopt::set_tcp_keepidle(fd, probe)?;
    sockopt::set_tcp_keepintvl(fd, probe)?;
    sockopt::set_tcp_keepcnt(fd, 3)?;
    sockopt::set_tcp_user_timeout(fd, timeout.as_millis() as u32)?;
    Ok(())
}
