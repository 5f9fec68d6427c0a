//! The connection between two engines: a non-blocking stream and a receive buffer.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::event::epoll;
use rustix::net::sockopt;

/// A stream in an epoll set, with a receive buffer.
#[derive(Debug)]
pub(super) struct ControlSocket {
    stream: TcpStream,
    data: u64,
    wants_out: bool,
    rx: Vec<u8>,
    start: usize,
    end: usize,
}

/// Result of a read.
#[derive(Debug)]
pub(super) enum ReadOutcome {
    Data,
    WouldBlock,
    Closed(String),
}

impl ControlSocket {
    /// Adds a stream that connects or is connected to the set.
    pub(super) fn new(
        stream: TcpStream,
        set: BorrowedFd<'_>,
        data: u64,
        timeout: Duration,
        wants_out: bool,
    ) -> io::Result<Self> {
        let timeout = timeout.clamp(Duration::from_secs(1), Duration::from_secs(3600));
        let probe = Duration::from_secs((timeout.as_secs() / 4).max(1));
        stream.set_nonblocking(true)?;
        sockopt::set_tcp_nodelay(&stream, true)?;
        sockopt::set_socket_keepalive(&stream, true)?;
        sockopt::set_tcp_keepidle(&stream, probe)?;
        sockopt::set_tcp_keepintvl(&stream, probe)?;
        sockopt::set_tcp_keepcnt(&stream, 3)?;
        sockopt::set_tcp_user_timeout(&stream, timeout.as_millis() as u32)?;
        epoll::add(set, &stream, epoll::EventData::new_u64(data), interest(wants_out))?;
        Ok(Self { stream, data, wants_out, rx: vec![0; FIRST_BUFFER_BYTES], start: 0, end: 0 })
    }

    pub(super) fn addrs(&self) -> io::Result<(SocketAddr, SocketAddr)> {
        Ok((self.stream.local_addr()?, self.stream.peer_addr()?))
    }

    /// Result of connecting.
    pub(super) fn connect_result(&self) -> io::Result<()> {
        self.stream.take_error()?.map_or(Ok(()), Err)
    }

    /// Bytes that were received and not consumed.
    pub(super) fn received(&self) -> &[u8] {
        &self.rx[self.start..self.end]
    }

    pub(super) fn consume(&mut self, bytes: usize) {
        self.start += bytes;
    }

    /// Reads once, without blocking, with room for a message of `wanted` bytes.
    pub(super) fn read(&mut self, wanted: usize) -> ReadOutcome {
        if self.start > 0 {
            self.rx.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.rx.len() < wanted {
            self.rx.resize(wanted.max(GROWN_BUFFER_BYTES), 0);
        }
        loop {
            return match self.stream.read(&mut self.rx[self.end..]) {
                Ok(0) => ReadOutcome::Closed("it closed the connection".to_owned()),
                Ok(got) => {
                    self.end += got;
                    ReadOutcome::Data
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted => continue,
                    io::ErrorKind::WouldBlock => ReadOutcome::WouldBlock,
                    _ => ReadOutcome::Closed(error.to_string()),
                },
            };
        }
    }

    /// Writes as many bytes as the socket takes without blocking.
    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            return match self.stream.write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
                written => written,
            };
        }
    }

    /// Sets whether epoll reports room to write.
    pub(super) fn want_out(&mut self, set: BorrowedFd<'_>, wants_out: bool) {
        if wants_out == self.wants_out {
            return;
        }
        let data = epoll::EventData::new_u64(self.data);
        match epoll::modify(set, self.stream.as_fd(), data, interest(wants_out)) {
            Ok(()) => self.wants_out = wants_out,
            Err(error) => tracing::error!(%error, "cannot change what a socket waits for"),
        }
    }

    /// Shuts down the sending direction.
    pub(super) fn finish(&self) {
        // An error means that the peer has gone.
        let _ = self.stream.shutdown(std::net::Shutdown::Write);
    }
}

fn interest(wants_out: bool) -> epoll::EventFlags {
    let mut flags = epoll::EventFlags::IN;
    flags.set(epoll::EventFlags::OUT, wants_out);
    flags
}

const FIRST_BUFFER_BYTES: usize = 16 << 10;
const GROWN_BUFFER_BYTES: usize = 128 << 10;
