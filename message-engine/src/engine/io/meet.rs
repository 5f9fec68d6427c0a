//! Handshakes: how connections come to stand.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use super::hello::{HEADER_BYTES, Message, Side, Who};
use super::socket::{Read1, Wire};
use super::{Io, offer_of};
use crate::engine::PeerInfo;
use crate::engine::connection::Connection;
use crate::engine::error::ConnectError;
use crate::engine::mailbox::Mailbox;
use crate::engine::shared::ConnectReply;
use crate::fabric::PeerId;
use p2p_core::bootstrap::equal_in_constant_time;
use p2p_core::host::names;
use p2p_core::network::{Offer, Route};

/// A connection that does not stand yet.
#[derive(Debug)]
pub(super) struct Meeting {
    pub(super) wire: Wire,
    pub(super) deadline: Instant,
    out: Vec<u8>,
    step: Step,
    /// Sides opened for this peer.
    opened: Vec<Opened>,
    /// Who wants to know how it ends.
    caller: Option<Caller>,
    is_strangers: bool,
    peer: Option<Who>,
    /// What the connecting side offers and was not tried.
    offered: Vec<Side>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Connecting,
    AwaitHello,
    AwaitWelcome,
    AwaitReady,
    /// The last word is being sent; then the peer may close.
    Rejected,
}

#[derive(Debug)]
pub(super) struct Caller {
    pub(super) addr: SocketAddr,
    pub(super) reply: Arc<Mailbox<ConnectReply>>,
}

/// The first of several goes first: who has said the least for the longest time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    /// Whether the other side has said who it is, and was not refused.
    pub(super) has_introduced_itself: bool,
    deadline: Instant,
}

#[derive(Debug, Clone, Copy)]
struct Opened {
    fabric: usize,
    id: PeerId,
}

/// What became of a step.
pub(super) enum Outcome {
    Going,
    /// It is over; the caller was told.
    Over,
    /// It stands, by this transport.
    Stands {
        fabric: usize,
        id: PeerId,
        who: Who,
    },
}

/// Why a handshake failed.
enum Failure {
    Io(String),
    Foreign(String),
    /// The peer is told why.
    Refuse(String),
    /// The peer has told why.
    Rejected(String),
}

impl Meeting {
    pub(super) fn new(wire: Wire, deadline: Instant, caller: Option<Caller>) -> Self {
        let step = if caller.is_some() { Step::Connecting } else { Step::AwaitHello };
        Self {
            wire,
            deadline,
            out: Vec::new(),
            step,
            opened: Vec::new(),
            is_strangers: caller.is_none(),
            caller,
            peer: None,
            offered: Vec::new(),
        }
    }

    /// Whether somebody else began it.
    pub(super) const fn is_strangers(&self) -> bool {
        self.is_strangers
    }

    pub(super) const fn rank(&self) -> Rank {
        let has_introduced_itself = matches!(self.step, Step::AwaitReady);
        Rank { has_introduced_itself, deadline: self.deadline }
    }

    /// Whether it is about this peer of a fabric.
    pub(super) fn has_joined(&self, fabric: usize, id: PeerId) -> bool {
        self.opened.iter().any(|opened| opened.fabric == fabric && opened.id == id)
    }

    fn say(&mut self, message: &Message) {
        self.out.extend(message.encode());
    }

    fn route(&self) -> Result<(Route, SocketAddr), Failure> {
        let (local, remote) = self.wire.addrs().map_err(|error| Failure::Io(error.to_string()))?;
        Ok((Route { local: local.ip(), remote: remote.ip() }, remote))
    }
}

impl Io {
    /// Goes on with a handshake. Whatever is not handed over is closed.
    pub(super) fn advance_meeting(&mut self, meeting: &mut Meeting, writable: bool) -> Outcome {
        match self.try_advance(meeting, writable) {
            Ok(outcome) => outcome,
            Err(failure) => self.fail_meeting(meeting, failure),
        }
    }

    /// Ends a handshake at its deadline, or because the engine stops.
    pub(super) fn end_meeting(&mut self, meeting: &mut Meeting, error: Option<ConnectError>) {
        self.close_opened(meeting);
        if let Some(Caller { addr, reply }) = meeting.caller.take() {
            let late = ConnectError::Timeout { addr: addr.to_string() };
            // Who has given up waiting needs no answer.
            let _ = reply.push(Err(error.unwrap_or(late)));
        }
    }

    /// Tells whoever waits for it that the connection stands.
    pub(super) fn announce(&self, meeting: &mut Meeting, connection: Connection) {
        match meeting.caller.take() {
            // Whoever has given up waiting gets none: it closes when it is dropped here.
            Some(caller) => drop(caller.reply.push(Ok(connection))),
            // It waits there until it is accepted, or over.
            None => drop(self.shared.accepted.push(connection)),
        }
    }

    pub(super) fn peer_info(meeting: &Meeting, who: &Who) -> PeerInfo {
        let ip = meeting.wire.addrs().map_or(SocketAddr::from(([0; 4], 0)), |(_, remote)| remote);
        PeerInfo {
            engine_id: who.engine_id,
            addr: SocketAddr::new(ip.ip(), who.port),
            gpu_index: who.gpu_index,
            pci_bdf: who.pci_bdf.clone(),
        }
    }

    fn try_advance(&mut self, meeting: &mut Meeting, writable: bool) -> Result<Outcome, Failure> {
        if meeting.step == Step::Connecting {
            if !writable {
                return Ok(Outcome::Going);
            }
            meeting.wire.connect_result().map_err(|error| Failure::Io(error.to_string()))?;
            self.say_hello(meeting)?;
        }
        loop {
            self.flush_meeting(meeting)?;
            if let Some(message) = next_message(meeting)? {
                if let Some(stands) = self.on_message(meeting, message)? {
                    self.flush_meeting(meeting)?;
                    return Ok(stands);
                }
                continue;
            }
            let head = meeting.wire.received().first_chunk();
            let body_bytes = head.and_then(|head| Message::body_bytes(head).ok()).unwrap_or(0);
            match meeting.wire.read(HEADER_BYTES + body_bytes) {
                Read1::Some if meeting.step == Step::Rejected => {
                    let received = meeting.wire.received().len();
                    meeting.wire.consume(received);
                    // Once a turn: it may send faster than this reads, and there are others, and a
                    // deadline to look at.
                    return Ok(Outcome::Going);
                }
                Read1::Some => {}
                Read1::Nothing => return Ok(Outcome::Going),
                Read1::Closed(_) if meeting.step == Step::Rejected => return Ok(Outcome::Over),
                Read1::Closed(how) => return Err(Failure::Io(how)),
            }
        }
    }

    fn on_message(
        &mut self,
        meeting: &mut Meeting,
        message: Message,
    ) -> Result<Option<Outcome>, Failure> {
        match (meeting.step, message) {
            (Step::AwaitHello, Message::Hello { who, ticket, sides }) => {
                if let Some(expected) = &self.config.ticket
                    && !equal_in_constant_time(expected.as_bytes(), &ticket)
                {
                    let found = if ticket.is_empty() { "no ticket" } else { "a wrong ticket" };
                    return Err(Failure::Refuse(format!("the peer has {found}")));
                }
                let (untaken, most) = (self.shared.untaken(), self.config.max_untaken_bytes);
                if untaken > most {
                    return Err(Failure::Refuse(format!(
                        "{untaken} bytes of notifications wait here to be taken, at most {most} may"
                    )));
                }
                meeting.peer = Some(who);
                meeting.offered = sides;
                self.choose(meeting)?;
            }
            (Step::AwaitReady, Message::Next) => {
                self.close_opened(meeting);
                self.choose(meeting)?;
            }
            (Step::AwaitReady, Message::Ready) => {
                if let (Some(Opened { fabric, id }), Some(who)) =
                    (meeting.opened.pop(), meeting.peer.take())
                {
                    return Ok(Some(Outcome::Stands { fabric, id, who }));
                }
            }
            (Step::AwaitWelcome, Message::Welcome { who, side }) => {
                let position = meeting
                    .opened
                    .iter()
                    .position(|opened| self.offer(opened.fabric) == side.offer);
                let position = position.ok_or_else(|| {
                    Failure::Foreign(format!("it chose {}, which was not offered", side.offer))
                })?;
                let opened = meeting.opened.swap_remove(position);
                match self.fabrics[opened.fabric].join_peer(opened.id, &side.detail) {
                    Ok(()) => {
                        self.close_opened(meeting);
                        meeting.say(&Message::Ready);
                        let Opened { fabric, id } = opened;
                        return Ok(Some(Outcome::Stands { fabric, id, who }));
                    }
                    Err(error) => {
                        tracing::debug!(%error, "cannot join by {}", side.offer);
                        self.fabrics[opened.fabric].close_peer(opened.id);
                        meeting.say(&Message::Next);
                    }
                }
            }
            (_, Message::Reject { message }) if meeting.caller.is_some() => {
                return Err(Failure::Rejected(message));
            }
            (step, message) => {
                tracing::debug!(?step, ?message, "out of turn");
                return Err(Failure::Foreign("it said something out of turn".to_owned()));
            }
        }
        Ok(None)
    }

    fn say_hello(&mut self, meeting: &mut Meeting) -> Result<(), Failure> {
        let (route, _) = meeting.route()?;
        let mut sides = Vec::new();
        for fabric in 0..self.fabrics.len() {
            match self.fabrics[fabric].open_peer_on(route) {
                Ok((id, detail)) => {
                    meeting.opened.push(Opened { fabric, id });
                    sides.push(Side { offer: self.offer(fabric), detail });
                }
                Err(error) => tracing::warn!(%error, "not offered"),
            }
        }
        let ticket = self.config.ticket.clone().unwrap_or_default().into_bytes();
        meeting.say(&Message::Hello { who: self.who(), ticket, sides });
        meeting.step = Step::AwaitWelcome;
        Ok(())
    }

    /// Joins by the best transport of this side that the peer offers, and says so.
    fn choose(&mut self, meeting: &mut Meeting) -> Result<(), Failure> {
        let (route, _) = meeting.route()?;
        for fabric in 0..self.fabrics.len() {
            let offer = self.offer(fabric);
            let found = meeting.offered.iter().position(|side| side.offer == offer);
            let Some(found) = found else { continue };
            let theirs = meeting.offered.swap_remove(found);
            let opened =
                self.fabrics[fabric].open_peer_on(route).and_then(|(id, detail)| {
                    match self.fabrics[fabric].join_peer(id, &theirs.detail) {
                        Ok(()) => Ok((id, detail)),
                        Err(error) => {
                            self.fabrics[fabric].close_peer(id);
                            Err(error)
                        }
                    }
                });
            match opened {
                Ok((id, detail)) => {
                    meeting.opened.push(Opened { fabric, id });
                    let side = Side { offer, detail };
                    meeting.say(&Message::Welcome { who: self.who(), side });
                    meeting.step = Step::AwaitReady;
                    return Ok(());
                }
                Err(error) => tracing::debug!(%error, "cannot join by {offer}"),
            }
        }
        let here: Vec<Offer> = (0..self.fabrics.len()).map(|fabric| self.offer(fabric)).collect();
        Err(Failure::Refuse(format!(
            "no transport works between the peers; this side has {}",
            names(&here)
        )))
    }

    fn fail_meeting(&mut self, meeting: &mut Meeting, failure: Failure) -> Outcome {
        let is_rejected = meeting.step == Step::Rejected;
        if let Some(Caller { addr, .. }) = &meeting.caller {
            let addr = addr.to_string();
            let error = match failure {
                Failure::Io(detail) if meeting.step == Step::Connecting => {
                    ConnectError::Unreachable { addr, detail }
                }
                Failure::Io(detail) | Failure::Foreign(detail) | Failure::Refuse(detail) => {
                    ConnectError::Foreign { addr, detail }
                }
                Failure::Rejected(message) => ConnectError::Rejected { addr, message },
            };
            self.end_meeting(meeting, Some(error));
            return Outcome::Over;
        }
        self.close_opened(meeting);
        let message = match failure {
            Failure::Io(_) | Failure::Rejected(_) => return Outcome::Over,
            Failure::Foreign(message) | Failure::Refuse(message) => message,
        };
        if is_rejected {
            return Outcome::Over;
        }
        self.warn_refused(&message);
        meeting.say(&Message::Reject { message });
        meeting.step = Step::Rejected;
        let is_told = self.flush_meeting(meeting).is_ok();
        let received = meeting.wire.received().len();
        meeting.wire.consume(received);
        if is_told { Outcome::Going } else { Outcome::Over }
    }

    fn flush_meeting(&mut self, meeting: &mut Meeting) -> Result<(), Failure> {
        while !meeting.out.is_empty() {
            match meeting.wire.write(&meeting.out) {
                Ok(0) => break,
                Ok(written) => drop(meeting.out.drain(..written)),
                Err(error) => return Err(Failure::Io(error.to_string())),
            }
        }
        meeting.wire.want_out(self.set(), !meeting.out.is_empty());
        if meeting.out.is_empty() && meeting.step == Step::Rejected {
            meeting.wire.finish();
        }
        Ok(())
    }

    fn close_opened(&mut self, meeting: &mut Meeting) {
        for opened in meeting.opened.drain(..) {
            self.fabrics[opened.fabric].close_peer(opened.id);
        }
    }

    fn offer(&self, fabric: usize) -> Offer {
        offer_of(&*self.fabrics[fabric])
    }

    fn who(&self) -> Who {
        let metadata = &self.shared.metadata;
        Who {
            engine_id: metadata.engine_id,
            port: metadata.addr.port(),
            gpu_index: metadata.gpu_index,
            pci_bdf: metadata.pci_bdf.clone(),
            limits: self.config.limits(),
        }
    }
}

/// Takes a whole message out of what was received. Frames that follow a handshake stay.
fn next_message(meeting: &mut Meeting) -> Result<Option<Message>, Failure> {
    if matches!(meeting.step, Step::Connecting | Step::Rejected) {
        return Ok(None);
    }
    let received = meeting.wire.received();
    let Some((header, rest)) = received.split_first_chunk::<HEADER_BYTES>() else {
        return Ok(None);
    };
    let body_bytes = Message::body_bytes(header).map_err(Failure::Foreign)?;
    let Some(body) = rest.get(..body_bytes) else { return Ok(None) };
    let message = Message::decode(header, body).map_err(Failure::Foreign)?;
    meeting.wire.consume(HEADER_BYTES + body_bytes);
    Ok(Some(message))
}
