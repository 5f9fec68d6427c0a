//! The peer's operations on this side's memory.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use super::buffered::{ReceiveOutcome, SendOutcome, Stream};
use super::wire::{RESPONSE_BYTES, Request, Response, decode_hello};
use crate::fabric::RegionId;
use crate::fabric::memory::{Refusal, Regions};
use crate::fabric::raw;

/// A connection for a peer's requests.
#[derive(Debug)]
pub(super) struct Server {
    stream: Stream,
    /// Index of its peer, once its hello has arrived.
    pub(super) peer: Option<u32>,
    pub(super) since: Instant,
    /// Whether it is in `busy_servers`.
    pub(super) is_busy: bool,
    payload: Option<Payload>,
    replies: VecDeque<Reply>,
}

/// Result of a server's turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Nothing more to do now.
    Idle,
    /// There is more to do at once, without an event to wait for.
    More,
    /// The hello has arrived. The caller sets `peer` and continues.
    Hello { nonce: [u8; 16], is_direct: bool },
}

/// Result of sending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    /// Everything is sent.
    Done,
    /// The socket takes no more now.
    Blocked,
    /// The turn is over.
    TurnOver,
}

/// A write that is being received.
#[derive(Debug)]
struct Payload {
    /// Address of the next byte. Null if the write is refused.
    dst: *mut u8,
    left: u64,
    region: RegionId,
    refusal: Option<Refusal>,
}

/// An answer that is being sent: frames of memory, one at a time, then the verdict. If the memory is revoked within a
/// frame, zeros fill it up, and the verdict reports the revocation.
#[derive(Debug)]
struct Reply {
    header: [u8; RESPONSE_BYTES],
    verdict: [u8; RESPONSE_BYTES],
    /// Bytes sent of header, frame, and verdict.
    sent: usize,
    /// Bytes of the frame at `ptr`; 0 if only the verdict is left.
    frame: usize,
    ptr: *const u8,
    /// Bytes of later frames.
    later: u64,
    region: Option<RegionId>,
    is_revoked: bool,
}

// SAFETY: both hold pointers into registered memory, plain memory for every thread; `revoke` takes them
// away before it may be unmapped.
unsafe impl Send for Payload {}
// SAFETY: as above.
unsafe impl Send for Reply {}

impl Server {
    pub(super) fn new(stream: Stream) -> Self {
        // Grows with use: every connection would touch all pages of a ring of full size over time.
        let replies = VecDeque::new();
        Self { stream, peer: None, since: Instant::now(), is_busy: false, payload: None, replies }
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

    /// Its socket.
    #[cfg(test)]
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.stream.fd()
    }

    /// Receives and sends until the turn is over. After an error the connection is unusable.
    pub(super) fn advance(&mut self, set: BorrowedFd<'_>, regions: &Regions) -> io::Result<Step> {
        let mut sent = self.send()?;
        let mut is_drained = false;
        while self.replies.len() < MAX_REPLIES {
            if self.peer.is_none() {
                if let Some(hello) = self.stream.header() {
                    let (nonce, is_direct) = decode_hello(&hello).ok_or_else(protocol_error)?;
                    return Ok(Step::Hello { nonce, is_direct });
                }
            } else if self.payload.is_none()
                && let Some(header) = self.stream.header()
            {
                let request = Request::decode(&header).ok_or_else(protocol_error)?;
                self.begin(request, regions);
                continue;
            }
            match self.receive() {
                ReceiveOutcome::Bytes(_) => {}
                ReceiveOutcome::WouldBlock => {
                    is_drained = true;
                    break;
                }
                ReceiveOutcome::TurnOver => break,
                ReceiveOutcome::Closed => return Err(io::ErrorKind::ConnectionReset.into()),
            }
        }
        if sent == Progress::Done {
            sent = self.send()?;
        }
        let has_room = self.replies.len() < MAX_REPLIES;
        self.stream.set_interest(set, has_room, sent == Progress::Blocked);
        // epoll reports when a blocked socket takes bytes again. Nothing reports the end of a turn.
        let is_waiting = is_drained || !has_room;
        let is_idle = is_waiting && sent != Progress::TurnOver && !self.stream.has_changed();
        Ok(if is_idle { Step::Idle } else { Step::More })
    }

    /// Removes a registration from all requests and answers. Nothing touches its memory afterwards.
    pub(super) fn revoke(&mut self, region: RegionId) {
        if let Some(payload) = &mut self.payload
            && payload.region == region
        {
            payload.dst = std::ptr::null_mut();
            payload.refusal = payload.refusal.or(Some(Refusal::Revoked));
        }
        for reply in &mut self.replies {
            if reply.region == Some(region) {
                reply.revoke();
            }
        }
    }

    fn begin(&mut self, request: Request, regions: &Regions) {
        let Request { is_write, key, offset, bytes } = request;
        match (regions.remote(key, offset, bytes, is_write), is_write) {
            (Ok((region, dst)), true) => {
                self.payload = Some(Payload { dst, left: bytes, region, refusal: None });
            }
            (Err(refusal), true) => {
                let (dst, region) = (std::ptr::null_mut(), RegionId(0));
                self.payload = Some(Payload { dst, left: bytes, region, refusal: Some(refusal) });
            }
            (Ok((region, ptr)), false) => {
                let mut reply = Reply::verdict(true, None);
                (reply.ptr, reply.later, reply.region) = (ptr, bytes, Some(region));
                reply.next_frame();
                self.replies.push_back(reply);
            }
            (Err(refusal), false) => self.replies.push_back(Reply::verdict(true, Some(refusal))),
        }
        self.end_payload();
    }

    fn end_payload(&mut self) {
        if let Some(Payload { left: 0, refusal, .. }) = self.payload {
            self.payload = None;
            self.replies.push_back(Reply::verdict(false, refusal));
        }
    }

    fn receive(&mut self) -> ReceiveOutcome {
        let Some(payload) = &mut self.payload else { return self.stream.fill() };
        let bytes = self.stream.buffered(payload.left);
        let mut got = bytes.len();
        if got > 0 {
            if !payload.dst.is_null() {
                // SAFETY: the whole range was checked, and `revoke` has not taken it back. The memory is
                // the registration's; a thread that reads it meanwhile sees any mixture.
                unsafe { std::ptr::copy(bytes.as_ptr(), payload.dst, got) };
            }
        } else if payload.dst.is_null() {
            return self.stream.fill();
        } else {
            // SAFETY: as above; the buffer is empty.
            match unsafe { self.stream.fill_past(payload.dst, payload.left as usize) } {
                ReceiveOutcome::Bytes(past) => got = past,
                other => return other,
            }
        }
        payload.left -= got as u64;
        if !payload.dst.is_null() {
            // SAFETY: still within, or one past, the checked range.
            payload.dst = unsafe { payload.dst.add(got) };
        }
        self.end_payload();
        ReceiveOutcome::Bytes(got)
    }

    /// Sends until the turn is over or the socket takes no more.
    fn send(&mut self) -> io::Result<Progress> {
        while !self.replies.is_empty() {
            let most = self.stream.left_to_send();
            let mut parts = [raw::part(std::ptr::null(), 0); MAX_PARTS];
            let (mut num_parts, mut wanted) = (0, 0);
            for reply in &self.replies {
                if num_parts + 3 > MAX_PARTS || wanted >= most {
                    break;
                }
                for (ptr, len) in reply.parts() {
                    let len = len.min(most - wanted);
                    if len > 0 {
                        parts[num_parts] = raw::part(ptr, len);
                        num_parts += 1;
                        wanted += len;
                    }
                }
                // The bytes behind this reply depend on the progress of the reply.
                if reply.later > 0 || reply.is_revoked {
                    break;
                }
            }
            // SAFETY: headers and zeros are ours; frames are registered memory that `revoke` has not
            // taken back.
            let sent = match unsafe { self.stream.send(&parts[..num_parts])? } {
                SendOutcome::Bytes(sent) => sent,
                SendOutcome::WouldBlock => return Ok(Progress::Blocked),
                SendOutcome::TurnOver => return Ok(Progress::TurnOver),
            };
            let mut left = sent;
            while let Some(reply) = self.replies.front_mut() {
                let rest = reply.wire_bytes() - reply.sent;
                if left < rest {
                    reply.sent += left;
                    break;
                }
                left -= rest;
                if reply.later == 0 {
                    self.replies.pop_front();
                } else {
                    // SAFETY: the frame was inside the checked range.
                    reply.ptr = unsafe { reply.ptr.add(reply.frame) };
                    reply.next_frame();
                    break;
                }
            }
            if sent < wanted {
                return Ok(Progress::Blocked);
            }
        }
        Ok(Progress::Done)
    }
}

impl Reply {
    fn verdict(is_data: bool, refusal: Option<Refusal>) -> Self {
        let status = refusal.map_or(0, Refusal::code);
        Self {
            header: [0; RESPONSE_BYTES],
            verdict: Response { is_data, status, is_last: true, bytes: 0 }.encode(),
            sent: 0,
            frame: 0,
            ptr: std::ptr::null(),
            later: 0,
            region: None,
            is_revoked: false,
        }
    }

    /// Header and memory of the next frame.
    fn next_frame(&mut self) {
        self.frame = self.later.min(MAX_FRAME_BYTES) as usize;
        self.later -= self.frame as u64;
        self.sent = 0;
        let bytes = self.frame as u64;
        self.header = Response { is_data: true, status: 0, is_last: false, bytes }.encode();
    }

    /// Ends the use of memory that was not sent yet.
    fn revoke(&mut self) {
        if self.later == 0 && self.sent >= self.frame_bytes() {
            return;
        }
        let sent = self.sent;
        let verdict = Self::verdict(true, Some(Refusal::Revoked)).verdict;
        (self.verdict, self.later, self.is_revoked) = (verdict, 0, true);
        if sent == 0 {
            self.frame = 0;
        }
    }

    /// Bytes of the frame and its header.
    const fn frame_bytes(&self) -> usize {
        if self.frame == 0 { 0 } else { RESPONSE_BYTES + self.frame }
    }

    const fn wire_bytes(&self) -> usize {
        self.frame_bytes() + if self.later == 0 { RESPONSE_BYTES } else { 0 }
    }

    /// Bytes left to be sent before the next frame.
    fn parts(&self) -> [(*const u8, usize); 3] {
        let nothing = (std::ptr::null(), 0);
        let mut parts = [nothing; 3];
        let verdict = self.verdict.get(self.sent.saturating_sub(self.frame_bytes())..);
        let verdict = verdict.unwrap_or_default();
        if self.later == 0 {
            parts[2] = (verdict.as_ptr(), verdict.len());
        }
        if self.sent < self.frame_bytes() {
            let header = self.header.get(self.sent..).unwrap_or_default();
            parts[0] = (header.as_ptr(), header.len());
            let skip = self.sent.saturating_sub(RESPONSE_BYTES);
            let rest = self.frame - skip;
            if !self.is_revoked {
                // SAFETY: `skip` bytes are inside the frame.
                parts[1] = (unsafe { self.ptr.add(skip) }, rest);
            } else {
                parts[1] = (ZEROS.as_ptr(), rest.min(ZEROS.len()));
                if rest > ZEROS.len() {
                    parts[2] = nothing;
                }
            }
        }
        parts
    }
}

fn protocol_error() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the peer's request makes no sense")
}

/// Fills up a frame whose memory was revoked.
static ZEROS: [u8; 16 << 10] = [0; 16 << 10];
/// Most answers waiting to be sent, before requests wait too.
const MAX_REPLIES: usize = 1024;
const MAX_PARTS: usize = 64;
const MAX_FRAME_BYTES: u64 = 1 << 20;
