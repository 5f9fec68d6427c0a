//! This side's operations towards one peer.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;

use super::buffered::{ReceiveOutcome, SendOutcome, Stream};
use super::wire::{HELLO_BYTES, REQUEST_BYTES, Response};
use crate::fabric::memory::Refusal;
use crate::fabric::post::op_name;
use crate::fabric::raw;
use crate::fabric::{Completion, RegionId, Token};
use p2p_core::endpoint::PostError;

/// The connection for this side's requests.
#[derive(Debug)]
pub(super) struct Issuer {
    stream: Stream,
    hello: [u8; HELLO_BYTES],
    hello_sent: usize,
    is_connecting: bool,
    /// Operations, the oldest first. The first `num_sent` await their answers.
    ops: VecDeque<Op>,
    num_sent: usize,
    /// Bytes sent of the operation behind those.
    part_sent: usize,
    /// Bytes left of the frame that is being received. It answers the first operation.
    frame_left: usize,
}

/// One operation.
#[derive(Debug)]
pub(super) struct Op {
    pub(super) token: Token,
    pub(super) is_write: bool,
    pub(super) request: [u8; REQUEST_BYTES],
    pub(super) region: RegionId,
    /// Source of a write, or address of the next byte of a read.
    pub(super) ptr: *mut u8,
    /// Bytes of a write, or bytes left of a read.
    pub(super) bytes: usize,
}

// SAFETY: the pointer is into registered memory, which stays mapped while the operation is under way and
// is plain memory for every thread.
unsafe impl Send for Op {}

impl Issuer {
    /// `is_connecting`: an event will tell that the connection is made.
    pub(super) fn new(stream: Stream, hello: [u8; HELLO_BYTES], is_connecting: bool) -> Self {
        Self {
            stream,
            hello,
            hello_sent: 0,
            is_connecting,
            // Grows with use: every connection would touch all pages of a ring of full size over time.
            ops: VecDeque::new(),
            num_sent: 0,
            part_sent: 0,
            frame_left: 0,
        }
    }

    pub(super) fn is_full(&self) -> bool {
        self.ops.len() >= MAX_OPS
    }

    pub(super) fn push(&mut self, op: Op) {
        self.ops.push_back(op);
    }

    pub(super) fn uses(&self, region: RegionId) -> bool {
        self.ops.iter().any(|op| op.region == region)
    }

    /// Fails all operations.
    pub(super) fn fail(&mut self, done: &mut Vec<Completion>) {
        for op in self.ops.drain(..) {
            let result = Err(PostError::Disconnected { op: op_name(op.is_write) });
            done.push(Completion { token: op.token, result });
        }
    }

    /// Begins a turn, for all calls of [`advance`](Self::advance) until the next one.
    pub(super) const fn begin_turn(&mut self) {
        self.stream.begin_turn();
    }

    /// Turns so far, and bytes received and sent in the last one.
    #[cfg(test)]
    pub(super) const fn turns(&self) -> (usize, usize, usize) {
        self.stream.turns()
    }

    /// Sends and receives until the turn is over. Returns true if there is more to do at once, without an event to wait
    /// for. After an error the connection is unusable.
    pub(super) fn advance(
        &mut self,
        set: BorrowedFd<'_>,
        writable: bool,
        done: &mut Vec<Completion>,
    ) -> io::Result<bool> {
        if self.is_connecting {
            if !writable {
                return Ok(false);
            }
            rustix::net::sockopt::socket_error(self.stream.fd())??;
            self.is_connecting = false;
        }
        let is_blocked = self.send()?;
        let has_more = self.receive(done)?;
        self.stream.set_interest(set, true, is_blocked);
        let is_spent = !is_blocked && self.num_sent < self.ops.len();
        Ok(has_more || is_spent || self.stream.has_changed())
    }

    /// Sends until the turn is over. Returns true if the socket takes no more.
    fn send(&mut self) -> io::Result<bool> {
        while self.hello_sent < HELLO_BYTES {
            let rest = &self.hello[self.hello_sent..];
            // SAFETY: the hello is ours.
            match unsafe { self.stream.send(&[raw::part(rest.as_ptr(), rest.len())])? } {
                SendOutcome::Bytes(sent) => self.hello_sent += sent,
                SendOutcome::WouldBlock | SendOutcome::TurnOver => return Ok(true),
            }
        }
        while self.num_sent < self.ops.len() {
            let most = self.stream.left_to_send();
            let mut parts = [raw::part(std::ptr::null(), 0); MAX_PARTS];
            let (mut num_parts, mut skip, mut wanted) = (0, self.part_sent, 0);
            for op in self.ops.range(self.num_sent..) {
                if num_parts + 2 > MAX_PARTS || wanted >= most {
                    break;
                }
                for (ptr, len) in op.parts() {
                    let rest = len.saturating_sub(skip).min(most - wanted);
                    if rest > 0 {
                        // SAFETY: `skip` bytes are inside the part.
                        parts[num_parts] = raw::part(unsafe { ptr.add(skip) }, rest);
                        wanted += rest;
                        num_parts += 1;
                    }
                    skip = skip.saturating_sub(len);
                }
            }
            // SAFETY: requests are ours, sources are registered memory.
            match unsafe { self.stream.send(&parts[..num_parts])? } {
                SendOutcome::Bytes(sent) => {
                    self.count_sent(sent);
                    if sent < wanted {
                        return Ok(true);
                    }
                }
                SendOutcome::WouldBlock => return Ok(true),
                SendOutcome::TurnOver => return Ok(false),
            }
        }
        Ok(false)
    }

    fn count_sent(&mut self, mut sent: usize) {
        while let Some(op) = self.ops.get(self.num_sent) {
            let rest = op.wire_bytes() - self.part_sent;
            if sent < rest {
                self.part_sent += sent;
                return;
            }
            sent -= rest;
            self.part_sent = 0;
            self.num_sent += 1;
        }
    }

    /// Handles answers. Returns true if the turn ended before the last one.
    fn receive(&mut self, done: &mut Vec<Completion>) -> io::Result<bool> {
        loop {
            let received = if self.frame_left > 0 {
                self.receive_frame()?
            } else if let Some(header) = self.stream.header() {
                let response = Response::decode(&header).ok_or_else(protocol_error)?;
                self.begin(response, done)?;
                continue;
            } else {
                self.stream.fill()
            };
            match received {
                ReceiveOutcome::Bytes(_) => {}
                ReceiveOutcome::WouldBlock => return Ok(false),
                ReceiveOutcome::TurnOver => return Ok(true),
                ReceiveOutcome::Closed => return Err(io::ErrorKind::ConnectionReset.into()),
            }
        }
    }

    fn receive_frame(&mut self) -> io::Result<ReceiveOutcome> {
        let Some(op) = self.ops.front_mut() else { return Err(protocol_error()) };
        let bytes = self.stream.buffered(self.frame_left as u64);
        let received = if bytes.is_empty() {
            // SAFETY: the frame fits into the rest of the operation, which is registered memory that no other thread
            // uses until the completion. The buffer is empty.
            unsafe { self.stream.fill_past(op.ptr, self.frame_left) }
        } else {
            // SAFETY: as above.
            unsafe { std::ptr::copy(bytes.as_ptr(), op.ptr, bytes.len()) };
            ReceiveOutcome::Bytes(bytes.len())
        };
        if let ReceiveOutcome::Bytes(got) = received {
            // SAFETY: still within the range of the operation, or one past.
            op.ptr = unsafe { op.ptr.add(got) };
            op.bytes -= got;
            self.frame_left -= got;
        }
        Ok(received)
    }

    fn begin(&mut self, response: Response, done: &mut Vec<Completion>) -> io::Result<()> {
        // A refusal may arrive before the write is sent whole. The rest of the write is still sent. An answer without
        // a request breaks the protocol.
        let Some(op) = self.ops.front() else { return Err(protocol_error()) };
        if self.num_sent == 0 || response.is_data == op.is_write {
            return Err(protocol_error());
        }
        if response.status != 0 {
            let refusal = Refusal::of(response.status).ok_or_else(protocol_error)?;
            return self.finish(Err(Some(refusal)), done);
        }
        if response.is_last {
            let is_whole = op.is_write || op.bytes == 0;
            return self.finish(is_whole.then_some(()).ok_or(None), done);
        }
        if response.bytes > op.bytes as u64 {
            return Err(protocol_error());
        }
        self.frame_left = response.bytes as usize;
        Ok(())
    }

    fn finish(
        &mut self,
        result: Result<(), Option<Refusal>>,
        done: &mut Vec<Completion>,
    ) -> io::Result<()> {
        let Some(op) = self.ops.pop_front() else { return Err(protocol_error()) };
        self.num_sent -= 1;
        let name = op_name(op.is_write);
        let result = match result {
            Ok(()) => Ok(()),
            Err(Some(refusal)) => Err(refusal.error(name)),
            Err(None) => Err(PostError::Transport {
                op: name,
                code: 0,
                detail: "the peer sent less than was asked for".to_owned(),
            }),
        };
        done.push(Completion { token: op.token, result });
        Ok(())
    }
}

impl Op {
    /// Bytes on the wire: the request, and the payload of a write.
    fn parts(&self) -> [(*const u8, usize); 2] {
        let payload = if self.is_write { self.bytes } else { 0 };
        [(self.request.as_ptr(), REQUEST_BYTES), (self.ptr, payload)]
    }

    fn wire_bytes(&self) -> usize {
        REQUEST_BYTES + if self.is_write { self.bytes } else { 0 }
    }
}

fn protocol_error() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the peer's answer makes no sense")
}

/// Most operations under way towards one peer.
const MAX_OPS: usize = 1024;
const MAX_PARTS: usize = 64;
