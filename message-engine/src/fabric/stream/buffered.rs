//! A connection with a small buffer for headers. Large payloads bypass the buffer.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::event::epoll;

use super::carrier::Carrier;
use crate::fabric::raw;

/// Result of sending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SendOutcome {
    /// This many bytes were sent.
    Bytes(usize),
    /// The connection takes nothing now.
    WouldBlock,
    /// The turn is over.
    TurnOver,
}

/// A connection in an epoll set.
#[derive(Debug)]
pub(super) struct Stream {
    carrier: Carrier,
    data: u64,
    interest: epoll::EventFlags,
    buf: Box<[u8]>,
    start: usize,
    end: usize,
    turn: Turn,
    /// Whether the last bytes were all that was there. An event reports later ones.
    is_drained: bool,
    #[cfg(test)]
    num_turns: usize,
}

/// Bytes that a connection may still move in its turn.
#[derive(Debug, Clone, Copy)]
struct Turn {
    receive: usize,
    send: usize,
}

/// Result of receiving.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReceiveOutcome {
    /// This many bytes went to the destination, and the others into the buffer.
    Bytes(usize),
    /// Nothing is there now.
    WouldBlock,
    /// The turn is over; there may be more bytes.
    TurnOver,
    /// The peer has closed, or the connection broke.
    Closed,
}

impl Stream {
    /// Puts the connection into `set`, whose events will carry `data`.
    pub(super) fn new(
        carrier: Carrier,
        set: BorrowedFd<'_>,
        data: u64,
        interest: epoll::EventFlags,
    ) -> io::Result<Self> {
        epoll::add(set, carrier.fd(), epoll::EventData::new_u64(data), interest)?;
        let buf = vec![0; BUFFER_BYTES].into_boxed_slice();
        Ok(Self {
            carrier,
            data,
            interest,
            buf,
            start: 0,
            end: 0,
            turn: Turn::WHOLE,
            is_drained: false,
            #[cfg(test)]
            num_turns: 0,
        })
    }

    /// Begins a turn, in which up to [`TURN_BYTES`] may be received and as many sent.
    pub(super) const fn begin_turn(&mut self) {
        self.turn = Turn::WHOLE;
        self.is_drained = false;
        #[cfg(test)]
        {
            self.num_turns += 1;
        }
    }

    /// Turns so far, and bytes received and sent in the last one.
    #[cfg(test)]
    pub(super) const fn turns(&self) -> (usize, usize, usize) {
        (self.num_turns, TURN_BYTES - self.turn.receive, TURN_BYTES - self.turn.send)
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.carrier.fd()
    }

    /// Sets the events that epoll reports. An unchanged set costs nothing.
    pub(super) fn set_interest(&mut self, set: BorrowedFd<'_>, reads: bool, writes: bool) {
        let interest = self.carrier.interest(reads, writes);
        if interest == self.interest {
            return;
        }
        match epoll::modify(set, self.carrier.fd(), epoll::EventData::new_u64(self.data), interest)
        {
            Ok(()) => self.interest = interest,
            Err(error) => tracing::error!(%error, "cannot change what a socket waits for"),
        }
    }

    /// Whether there may be more to do although the last calls have found nothing, without an event to come.
    pub(super) fn has_changed(&self) -> bool {
        self.carrier.has_changed()
    }

    /// Takes a header of `N` bytes out of the buffer, if it is whole.
    pub(super) fn header<const N: usize>(&mut self) -> Option<[u8; N]> {
        let bytes = self.buf[self.start..self.end].first_chunk::<N>().copied()?;
        self.start += N;
        Some(bytes)
    }

    /// Takes up to `most` bytes out of the buffer.
    pub(super) fn buffered(&mut self, most: u64) -> &[u8] {
        let len = most.min((self.end - self.start) as u64) as usize;
        self.start += len;
        &self.buf[self.start - len..self.start]
    }

    /// Receives into the buffer.
    pub(super) fn fill(&mut self) -> ReceiveOutcome {
        // SAFETY: no bytes are wanted elsewhere.
        unsafe { self.fill_past(std::ptr::null_mut(), 0) }
    }

    /// Receives up to `bytes` bytes at `dst`, and later ones into the buffer.
    ///
    /// # Safety
    /// `dst..dst+bytes` is writable memory that nothing in this process holds a reference to. The buffer
    /// is empty unless `bytes` is 0.
    pub(super) unsafe fn fill_past(&mut self, dst: *mut u8, bytes: usize) -> ReceiveOutcome {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.start > 0 {
            self.buf.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.is_drained {
            return ReceiveOutcome::WouldBlock;
        }
        let left = self.turn.receive;
        if left == 0 {
            return ReceiveOutcome::TurnOver;
        }
        let bytes = bytes.min(left);
        let room = &mut self.buf[self.end..];
        let room_bytes = room.len().min(left - bytes);
        let room = &mut room[..room_bytes];
        let parts = [raw::part(dst, bytes), raw::part(room.as_ptr(), room.len())];
        let parts = if bytes == 0 { &parts[1..] } else { &parts[..] };
        loop {
            // SAFETY: `dst` by the caller's promise; the rest of the buffer is ours alone.
            return match unsafe { self.carrier.receive(parts) } {
                Ok(0) => ReceiveOutcome::Closed,
                Ok(got) => {
                    let past = got.min(bytes);
                    // The rest of a payload is on its way, and worth another look at once.
                    self.is_drained =
                        past == bytes && got < bytes + room_bytes && self.carrier.repeats_events();
                    self.end += got - past;
                    self.turn.receive -= got;
                    ReceiveOutcome::Bytes(past)
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => ReceiveOutcome::WouldBlock,
                    io::ErrorKind::Interrupted => continue,
                    _ => ReceiveOutcome::Closed,
                },
            };
        }
    }

    /// Bytes that may still be sent in this turn.
    pub(super) const fn left_to_send(&self) -> usize {
        self.turn.send
    }

    /// Sends from `parts`, which hold no more than [`left_to_send`](Self::left_to_send).
    ///
    /// # Safety
    /// Every part is readable memory.
    pub(super) unsafe fn send(&mut self, parts: &[raw::iovec]) -> io::Result<SendOutcome> {
        if self.turn.send == 0 {
            return Ok(SendOutcome::TurnOver);
        }
        loop {
            // SAFETY: the caller's promise.
            return match unsafe { self.carrier.send(parts) } {
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => Ok(SendOutcome::WouldBlock),
                    io::ErrorKind::Interrupted => continue,
                    _ => Err(error),
                },
                Ok(sent) => {
                    self.turn.send = self.turn.send.saturating_sub(sent);
                    Ok(SendOutcome::Bytes(sent))
                }
            };
        }
    }
}

impl Turn {
    const WHOLE: Self = Self { receive: TURN_BYTES, send: TURN_BYTES };
}

const BUFFER_BYTES: usize = 16 << 10;
/// Most bytes that a connection receives, and sends, in one turn: some hundred microseconds of copying. The cost of a
/// turn is negligible beside that.
pub(super) const TURN_BYTES: usize = 1 << 20;
