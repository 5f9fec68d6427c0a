//! An established connection.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};

use super::socket::{ControlSocket, ReadOutcome};
use crate::credit::{Credit, CreditError, CreditReceiver, Event, SenderId};
use crate::engine::Notification;
use crate::engine::error::{CloseReason, TransferError};
use crate::engine::link::{Link, Port, Tag};
use crate::engine::memory::Handle;
use crate::engine::shared::{ConnKey, ConnShared, Shared};
use crate::engine::wire::{Frame, HEADER_BYTES, Header};
use crate::fabric::{Fabric, LocalSegment, PeerId, PostOutcome, RemoteSegment, Token};
use p2p_core::endpoint::PostError;

/// The thread's side of a connection.
#[derive(Debug)]
pub(super) struct ActiveConnection {
    pub(super) socket: ControlSocket,
    pub(super) peer: Peer,
    pub(super) link: Link<Arc<Handle>>,
    /// Whether it is in the list of connections to be advanced.
    pub(super) is_dirty: bool,
    /// Time at which it is closed because its fabric has lost the peer, unless the peer's goodbye arrives first.
    pub(super) lost_ns: u64,
}

/// The peer at the other end, and its transport.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) key: ConnKey,
    pub(super) conn: Weak<ConnShared>,
    pub(super) engine_id: u64,
    pub(super) fabric: usize,
    pub(super) id: PeerId,
    /// Credit senders: the peer's pushes, and this side's reads from it.
    pub(super) sender: SenderId,
    pub(super) reads: SenderId,
}

/// The [`Port`] of a link during one call.
pub(super) struct Ports<'a> {
    pub(super) fabric: &'a mut dyn Fabric,
    pub(super) credit: &'a mut CreditReceiver,
    pub(super) shared: &'a Shared,
    pub(super) peer: &'a Peer,
    pub(super) now_ns: u64,
}

impl<'a> Ports<'a> {
    /// A port for the link with `peer`.
    pub(super) fn new(
        fabrics: &'a mut [Box<dyn Fabric>],
        credit: &'a mut CreditReceiver,
        shared: &'a Shared,
        peer: &'a Peer,
        now_ns: u64,
    ) -> Self {
        Self { fabric: &mut *fabrics[peer.fabric], credit, shared, peer, now_ns }
    }
}

impl ActiveConnection {
    /// Reads and handles frames that have arrived. An error ends the connection.
    pub(super) fn receive(
        &mut self,
        fabric: &mut dyn Fabric,
        credit: &mut CreditReceiver,
        shared: &Shared,
        now_ns: u64,
    ) -> Result<(), CloseReason> {
        let mut budget: usize = MAX_READS;
        loop {
            let wanted = self.take_frames(fabric, credit, shared, now_ns)?;
            if budget == 0 {
                return Ok(());
            }
            budget -= 1;
            match self.socket.read(wanted) {
                ReadOutcome::Data => {}
                ReadOutcome::WouldBlock => return Ok(()),
                ReadOutcome::Closed(how)
                | ReadOutcome::TlsFailed(how)
                | ReadOutcome::NotTls(how) => return Err(CloseReason::Lost(how.into())),
            }
        }
    }

    /// Writes the link's output to the socket. An error ends the connection.
    pub(super) fn flush(&mut self, set: BorrowedFd<'_>) -> Result<(), CloseReason> {
        let lost = |error: io::Error| CloseReason::Lost(error.to_string().into());
        self.socket.push_records().map_err(lost)?;
        while !self.link.output().is_empty() {
            match self.socket.write(self.link.output()) {
                Ok(0) => break,
                Ok(written) => self.link.sent(written),
                Err(error) => return Err(lost(error)),
            }
        }
        self.socket.want_out(set, !self.link.output().is_empty());
        Ok(())
    }

    /// Hands whole frames to the link. Returns the buffer bytes that the next frame needs.
    fn take_frames(
        &mut self,
        fabric: &mut dyn Fabric,
        credit: &mut CreditReceiver,
        shared: &Shared,
        now_ns: u64,
    ) -> Result<usize, CloseReason> {
        let broke = |what: String| {
            tracing::warn!(peer = self.peer.engine_id, "connection closed: {what}");
            CloseReason::Protocol(what.into())
        };
        let mut port = Ports { fabric, credit, shared, peer: &self.peer, now_ns };
        loop {
            let received = self.socket.received();
            let Some((head, rest)) = received.split_first_chunk::<HEADER_BYTES>() else {
                return Ok(HEADER_BYTES);
            };
            let header = Header::decode(head).map_err(|error| broke(error.to_string()))?;
            let Some(body) = rest.get(..header.body_bytes) else {
                return Ok(HEADER_BYTES + header.body_bytes);
            };
            let frame = Frame::decode(header, body).map_err(|error| broke(error.to_string()))?;
            let has_left =
                self.link.on_frame(&mut port, frame).map_err(|error| broke(error.to_string()))?;
            if has_left {
                return Err(CloseReason::Left);
            }
            self.socket.consume(HEADER_BYTES + header.body_bytes);
        }
    }
}

impl Port for Ports<'_> {
    fn max_operation_bytes(&self) -> u64 {
        self.fabric.max_operation_bytes()
    }

    fn write(
        &mut self,
        dst: RemoteSegment,
        src: LocalSegment,
        tag: Tag,
    ) -> Result<PostOutcome, PostError> {
        let token = token(self.peer.key.idx, tag);
        // SAFETY: the link holds the memory until the completion; the user has promised not to write
        // what is being sent.
        unsafe { self.fabric.write(self.peer.id, dst, src, token) }
    }

    fn read(
        &mut self,
        dst: LocalSegment,
        src: RemoteSegment,
        tag: Tag,
    ) -> Result<PostOutcome, PostError> {
        let token = token(self.peer.key.idx, tag);
        // SAFETY: the link holds the memory until the completion; it is reached by raw copies only.
        unsafe { self.fabric.read(self.peer.id, dst, src, token) }
    }

    fn grant(&mut self, part: LocalSegment) -> Result<RemoteSegment, PostError> {
        self.fabric.grant(self.peer.id, part)
    }

    fn end_grant(&mut self, part: LocalSegment) {
        self.fabric.end_grant(self.peer.id, part);
    }

    fn finish(&mut self, transfer: u32, result: Result<u64, TransferError>) {
        self.shared.transfers.finish(transfer, result);
    }

    fn deliver(&mut self, bytes: Vec<u8>) {
        let notification = Notification {
            connection: self.peer.key.serial,
            engine_id: self.peer.engine_id,
            bytes,
        };
        self.shared.deliver(self.peer.conn.clone(), notification);
    }

    fn credit(&mut self, event: Event) -> Result<(), CreditError> {
        self.credit.handle(self.now_ns, self.peer.sender, event)
    }

    fn pull_credit(&mut self, event: Event) -> Result<Credit, CreditError> {
        self.credit.handle(self.now_ns, self.peer.reads, event)?;
        self.credit.credit_of(self.peer.reads)
    }
}

/// Token of a completion: index of the connection, operation, bytes.
fn token(conn: u32, tag: Tag) -> Token {
    Token(u64::from(conn) << 48 | u64::from(tag.op) << 28 | u64::from(tag.bytes))
}

/// Splits a token into the index of the connection and the tag.
pub(super) const fn parse_token(token: Token) -> (u32, Tag) {
    let op = (token.0 >> 28) as u32 & 0xf_ffff;
    ((token.0 >> 48) as u32, Tag { op, bytes: token.0 as u32 & 0xfff_ffff })
}

/// Reads of one connection in a row, before others get their turn.
const MAX_READS: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_carry_everything() {
        for (conn, op, bytes) in [(0, 0, 0), (65534, (1 << 20) - 1, 128 << 20), (7, 9, 1)] {
            let tag = Tag { op, bytes };
            assert_eq!(parse_token(token(conn, tag)), (conn, tag));
        }
    }
}
