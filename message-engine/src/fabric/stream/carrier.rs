//! A connection that carries bytes both ways: a socket, or two rings in shared memory.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};

use super::rings::Rings;
use crate::fabric::raw;

/// One end of a connection. No call of it blocks, except [`wait`](Self::wait).
#[derive(Debug)]
pub(super) enum Carrier {
    /// The bytes go through the socket.
    Socket(Arc<OwnedFd>),
    /// The bytes go through shared memory.
    Rings(Box<Rings>),
}

impl Carrier {
    /// The descriptor whose events tell of bytes, of room and of the end.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.socket().as_fd()
    }

    /// The socket, to be shut down by another thread.
    pub(super) fn socket(&self) -> &Arc<OwnedFd> {
        match self {
            Self::Socket(fd) => fd,
            Self::Rings(rings) => rings.socket(),
        }
    }

    /// Whether the descriptor reports bytes as long as there are any. Otherwise it reports them once, after a call has
    /// found none.
    pub(super) const fn repeats_events(&self) -> bool {
        matches!(self, Self::Socket(_))
    }

    /// Whether there may be room or bytes after a call has found none, without an event to come.
    pub(super) fn has_changed(&self) -> bool {
        match self {
            Self::Socket(_) => false,
            Self::Rings(rings) => rings.has_changed(),
        }
    }

    /// The events to wait for, where there are bytes and room to be waited for.
    pub(super) fn interest(&self, reads: bool, writes: bool) -> epoll::EventFlags {
        let mut interest = epoll::EventFlags::empty();
        // The peer announces bytes and room in shared memory by bytes in the socket.
        let is_socket = self.repeats_events();
        interest.set(epoll::EventFlags::IN, reads || !is_socket);
        interest.set(epoll::EventFlags::OUT, writes && is_socket);
        interest
    }

    /// Sends as many bytes of `parts` as there is room for.
    ///
    /// # Safety
    /// Every part is readable memory of this process.
    pub(super) unsafe fn send(&mut self, parts: &[raw::iovec]) -> io::Result<usize> {
        match self {
            // SAFETY: the caller's promise.
            Self::Socket(fd) => unsafe { raw::send(fd.as_fd(), parts) },
            // SAFETY: the caller's promise.
            Self::Rings(rings) => unsafe { rings.send(parts) },
        }
    }

    /// Receives available bytes into `parts`. Returns 0 if the peer has closed.
    ///
    /// # Safety
    /// Every part is writable memory of this process that nothing else in it holds a reference to.
    pub(super) unsafe fn receive(&mut self, parts: &[raw::iovec]) -> io::Result<usize> {
        match self {
            // SAFETY: the caller's promise.
            Self::Socket(fd) => unsafe { raw::receive(fd.as_fd(), parts) },
            // SAFETY: the caller's promise.
            Self::Rings(rings) => unsafe { rings.receive(parts) },
        }
    }

    /// Blocks until there may be bytes, or room if `for_room`, at the latest at `until`. Returns false if there are
    /// none, also after a signal. The caller has just found none.
    pub(super) fn wait(&self, for_room: bool, until: Instant) -> io::Result<bool> {
        let is_socket = self.repeats_events();
        let wanted = if for_room && is_socket { PollFlags::OUT } else { PollFlags::IN };
        let left = until.saturating_duration_since(Instant::now());
        let timeout = Timespec {
            tv_sec: left.as_secs().min(3600).cast_signed(),
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::new(&self.fd(), wanted)], Some(&timeout)) {
            Ok(num) => Ok(num > 0),
            Err(rustix::io::Errno::INTR) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }
}
