//! The connection between two engines: a non-blocking stream, TLS if there is any, and a receive buffer.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::event::epoll;
use rustix::net::sockopt;
use trust::Identity;
use trust::tls::rustls::{Connection as TlsConnection, Error as TlsError, InvalidMessage};
use trust::tls::{Side, binding_of, explain, identity_in};

/// A stream in an epoll set, with a receive buffer.
///
/// With TLS, received bytes and bytes to write are plain text. Records that the system does not take at once stay here:
/// [`want_out`](Self::want_out) and [`push_records`](Self::push_records) see to them.
#[derive(Debug)]
pub(super) struct ControlSocket {
    stream: TcpStream,
    tls: Option<Box<TlsConnection>>,
    /// TLS has failed. Nothing is written any more, so that no message leaves without encryption, and received bytes are
    /// for the caller to discard.
    has_failed: bool,
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
    /// TLS failed, with the reason and the remedy. The peer has got an alert; its further bytes mean nothing.
    TlsFailed(String),
    /// A listener with TLS got other bytes. The socket goes on without TLS, so that the peer gets the reason.
    NotTls(String),
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
        let rx = vec![0; FIRST_BUFFER_BYTES];
        Ok(Self { stream, tls: None, has_failed: false, data, wants_out, rx, start: 0, end: 0 })
    }

    /// Speaks TLS from here on.
    pub(super) fn secure(&mut self, tls: TlsConnection) {
        self.tls = Some(Box::new(tls));
    }

    /// Returns true if no TLS handshake is under way.
    pub(super) fn is_secured(&self) -> bool {
        self.tls.as_ref().is_none_or(|tls| !tls.is_handshaking())
    }

    /// The value that binds a proof to this TLS connection; `None` without TLS.
    pub(super) fn channel_binding(&self) -> Option<[u8; 32]> {
        self.tls.as_deref().and_then(binding_of)
    }

    /// The holder of the certificate that the peer has shown; `None` without one.
    pub(super) fn peer_identity(&self) -> Option<Identity> {
        self.tls.as_deref().and_then(identity_in)
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
        if self.tls.is_some() && !self.has_failed {
            return self.read_records();
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

    /// Reads records until one has data, or the TLS handshake has ended. All data goes to the receive buffer: the epoll
    /// set would not tell of data inside TLS.
    fn read_records(&mut self) -> ReadOutcome {
        for _ in 0..MAX_RECORD_READS {
            let Some(tls) = &mut self.tls else { break };
            let was_handshaking = tls.is_handshaking();
            match tls.read_tls(&mut self.stream) {
                Ok(0) => return ReadOutcome::Closed("it closed the connection".to_owned()),
                Ok(_) => {}
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted => continue,
                    io::ErrorKind::WouldBlock => return ReadOutcome::WouldBlock,
                    _ => return ReadOutcome::Closed(error.to_string()),
                },
            }
            let state = match tls.process_new_packets() {
                Ok(state) => state,
                Err(error) => return self.fail_tls(&error, was_handshaking),
            };
            let num_bytes = state.plaintext_bytes_to_read();
            if self.rx.len() - self.end < num_bytes {
                self.rx.resize(self.end + num_bytes, 0);
            }
            let room = &mut self.rx[self.end..self.end + num_bytes];
            if let Err(error) = tls.reader().read_exact(room) {
                return ReadOutcome::Closed(error.to_string());
            }
            self.end += num_bytes;
            let has_ended = was_handshaking && !tls.is_handshaking();
            if let Err(error) = self.push_records() {
                return ReadOutcome::Closed(error.to_string());
            }
            if num_bytes > 0 || has_ended {
                return ReadOutcome::Data;
            }
            if state.peer_has_closed() {
                return ReadOutcome::Closed("it closed the connection".to_owned());
            }
        }
        // The set reports the rest again, after others have had their turn.
        ReadOutcome::WouldBlock
    }

    fn fail_tls(&mut self, error: &TlsError, was_handshaking: bool) -> ReadOutcome {
        let side = match self.tls.as_deref() {
            Some(TlsConnection::Client(_)) => Side::Client,
            _ => Side::Listener,
        };
        let reason = explain(side, error).unwrap_or_else(|| error.to_string());
        let is_foreign =
            matches!(error, TlsError::InvalidMessage(InvalidMessage::InvalidContentType));
        if was_handshaking && is_foreign && side == Side::Listener {
            self.tls = None;
            return ReadOutcome::NotTls(reason);
        }
        // The alert tells the peer. It may be gone.
        let _ = self.push_records();
        self.has_failed = true;
        ReadOutcome::TlsFailed(reason)
    }

    /// Writes TLS records that wait, as far as the socket takes them.
    pub(super) fn push_records(&mut self) -> io::Result<()> {
        let Some(tls) = self.tls.as_mut().filter(|_| !self.has_failed) else { return Ok(()) };
        while tls.wants_write() {
            match tls.write_tls(&mut self.stream) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Returns true if TLS records wait to be written.
    pub(super) fn has_records(&self) -> bool {
        !self.has_failed && self.tls.as_ref().is_some_and(|tls| tls.wants_write())
    }

    /// Writes as many bytes as the socket takes without blocking.
    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.has_failed {
            return Err(io::Error::new(io::ErrorKind::BrokenPipe, "TLS has failed"));
        }
        if self.tls.is_some() {
            self.push_records()?;
            let has_room = !self.has_records();
            let Some(tls) = self.tls.as_mut().filter(|_| has_room) else { return Ok(0) };
            let taken = tls.writer().write(&bytes[..bytes.len().min(MAX_RECORD_BYTES)])?;
            self.push_records()?;
            return Ok(taken);
        }
        loop {
            return match self.stream.write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
                written => written,
            };
        }
    }

    /// Sets whether epoll reports room to write. It does so in any case while records wait.
    pub(super) fn want_out(&mut self, set: BorrowedFd<'_>, wants_out: bool) {
        let wants_out = wants_out || self.has_records();
        if wants_out == self.wants_out {
            return;
        }
        let data = epoll::EventData::new_u64(self.data);
        match epoll::modify(set, self.stream.as_fd(), data, interest(wants_out)) {
            Ok(()) => self.wants_out = wants_out,
            Err(error) => tracing::error!(%error, "cannot change what a socket waits for"),
        }
    }

    /// Shuts down the sending direction. Records that the system has not taken are lost.
    pub(super) fn finish(&mut self) {
        if let Some(tls) = self.tls.as_mut().filter(|_| !self.has_failed) {
            tls.send_close_notify();
            let _ = self.push_records();
        }
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
/// Reads from the system for one read of data.
const MAX_RECORD_READS: usize = 16;
/// Bytes of one TLS record, see RFC 8446, section 5.1.
const MAX_RECORD_BYTES: usize = 16 << 10;

#[cfg(test)]
mod tests;
