//! Handshakes that establish connections.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use super::hello::{HEADER_BYTES, Message, PeerHello, Side};
use super::socket::{ControlSocket, ReadOutcome};
use super::{Io, offer_of};
use crate::engine::PeerInfo;
use crate::engine::config::ConnectOptions;
use crate::engine::connection::Connection;
use crate::engine::error::ConnectError;
use crate::engine::mailbox::Mailbox;
use crate::engine::shared::ConnectReply;
use crate::fabric::PeerId;
use p2p_core::bootstrap::{HandshakeBinding, ShownTicket, equal_in_constant_time};
use p2p_core::host::names;
use p2p_core::network::{Offer, Route};

/// A connection whose handshake is in progress.
#[derive(Debug)]
pub(super) struct Handshake {
    pub(super) socket: ControlSocket,
    pub(super) deadline: Instant,
    out: Vec<u8>,
    step: Step,
    /// Peers of fabrics that were opened for this handshake.
    opened: Vec<FabricPeer>,
    /// The user's call that waits for the connection.
    caller: Option<ConnectCaller>,
    is_incoming: bool,
    /// The ticket that the peer has shown.
    shown: Option<ShownTicket>,
    peer: Option<PeerHello>,
    /// Offers of the connecting side that were not tried yet.
    offered: Vec<Side>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Connecting,
    /// The TLS handshake is under way.
    Securing,
    AwaitHello,
    AwaitWelcome,
    AwaitReady,
    /// The rejection is being sent; then the peer may close.
    Rejected,
}

#[derive(Debug)]
pub(super) struct ConnectCaller {
    pub(super) addr: SocketAddr,
    pub(super) options: ConnectOptions,
    pub(super) reply: Arc<Mailbox<ConnectReply>>,
}

/// Order of eviction: the least is evicted first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct EvictionKey {
    /// Whether the other side has sent a hello that was accepted.
    pub(super) is_identified: bool,
    deadline: Instant,
}

#[derive(Debug, Clone, Copy)]
struct FabricPeer {
    fabric: usize,
    id: PeerId,
}

/// State after a step.
pub(super) enum Outcome {
    InProgress,
    /// The handshake has ended, and its caller has the error.
    Ended,
    /// The connection is established over this transport.
    Established {
        fabric: usize,
        id: PeerId,
        hello: PeerHello,
    },
}

/// Failure of a handshake.
enum Failure {
    Io(String),
    /// The TLS handshake failed.
    Tls(String),
    /// This side has no ticket to show.
    Ticket(String),
    Foreign(String),
    /// This side refuses, and sends the reason to the peer.
    Refuse(String),
    /// The peer has refused, with its reason.
    Rejected(String),
}

impl Handshake {
    pub(super) fn new(
        socket: ControlSocket,
        deadline: Instant,
        caller: Option<ConnectCaller>,
    ) -> Self {
        let step = match caller {
            Some(_) => Step::Connecting,
            None if !socket.is_secured() => Step::Securing,
            None => Step::AwaitHello,
        };
        Self {
            socket,
            deadline,
            out: Vec::new(),
            step,
            opened: Vec::new(),
            is_incoming: caller.is_none(),
            caller,
            shown: None,
            peer: None,
            offered: Vec::new(),
        }
    }

    /// Whether the peer has begun it.
    pub(super) const fn is_incoming(&self) -> bool {
        self.is_incoming
    }

    pub(super) const fn eviction_key(&self) -> EvictionKey {
        let is_identified = matches!(self.step, Step::AwaitReady);
        EvictionKey { is_identified, deadline: self.deadline }
    }

    /// Whether it has opened this peer of a fabric.
    pub(super) fn has_joined(&self, fabric: usize, id: PeerId) -> bool {
        self.opened.iter().any(|opened| opened.fabric == fabric && opened.id == id)
    }

    fn push_message(&mut self, message: &Message) {
        self.out.extend(message.encode());
    }

    fn route(&self) -> Result<(Route, SocketAddr), Failure> {
        let (local, remote) =
            self.socket.addrs().map_err(|error| Failure::Io(error.to_string()))?;
        Ok((Route { local: local.ip(), remote: remote.ip() }, remote))
    }
}

impl Io {
    /// Advances a handshake. On failure it closes the peers of fabrics that it has opened.
    pub(super) fn advance_handshake(
        &mut self,
        handshake: &mut Handshake,
        writable: bool,
    ) -> Outcome {
        let outcome = match self.try_advance(handshake, writable) {
            Ok(outcome) => outcome,
            Err(failure) => self.fail_handshake(handshake, failure),
        };
        // The last read may have made TLS records that the socket had no room for.
        if matches!(outcome, Outcome::InProgress) && handshake.step != Step::Connecting {
            handshake.socket.want_out(self.set(), !handshake.out.is_empty());
        }
        outcome
    }

    /// Closes a handshake. Its caller, if any, gets `error`, or else a timeout.
    pub(super) fn close_handshake(
        &mut self,
        handshake: &mut Handshake,
        error: Option<ConnectError>,
    ) {
        self.close_opened(handshake);
        if let Some(ConnectCaller { addr, reply, .. }) = handshake.caller.take() {
            let late = ConnectError::Timeout { addr: addr.to_string() };
            // A caller that has timed out needs no answer.
            let _ = reply.push(Err(error.unwrap_or(late)));
        }
    }

    /// Hands the connection to the caller that waits for it, or to the queue of accepted ones.
    pub(super) fn report_established(&self, handshake: &mut Handshake, connection: Connection) {
        match handshake.caller.take() {
            // If the caller has timed out, the connection is dropped here, which closes it.
            Some(caller) => drop(caller.reply.push(Ok(connection))),
            // It waits there until it is accepted or closed.
            None => drop(self.shared.accepted.push(connection)),
        }
    }

    pub(super) fn peer_info(handshake: &Handshake, hello: &PeerHello) -> PeerInfo {
        let ip =
            handshake.socket.addrs().map_or(SocketAddr::from(([0; 4], 0)), |(_, remote)| remote);
        PeerInfo {
            engine_id: hello.engine_id,
            addr: SocketAddr::new(ip.ip(), hello.port),
            gpu_index: hello.gpu_index,
            pci_bdf: hello.pci_bdf.clone(),
        }
    }

    fn try_advance(
        &mut self,
        handshake: &mut Handshake,
        writable: bool,
    ) -> Result<Outcome, Failure> {
        if handshake.step == Step::Connecting {
            if !writable {
                return Ok(Outcome::InProgress);
            }
            handshake.socket.connect_result().map_err(|error| Failure::Io(error.to_string()))?;
            self.begin_securing(handshake)?;
        }
        loop {
            if handshake.step == Step::Securing && handshake.socket.is_secured() {
                match handshake.caller {
                    Some(_) => self.say_hello(handshake)?,
                    None => handshake.step = Step::AwaitHello,
                }
            }
            self.flush_handshake(handshake)?;
            if let Some((message, bytes)) = next_message(handshake)? {
                if let Some(established) = self.on_message(handshake, message, &bytes)? {
                    self.flush_handshake(handshake)?;
                    return Ok(established);
                }
                continue;
            }
            let head = handshake.socket.received().first_chunk();
            let body_bytes = head.and_then(|head| Message::body_bytes(head).ok()).unwrap_or(0);
            match handshake.socket.read(HEADER_BYTES + body_bytes) {
                ReadOutcome::Data if handshake.step == Step::Rejected => {
                    let received = handshake.socket.received().len();
                    handshake.socket.consume(received);
                    // One read per turn: the peer may send faster than this side reads, and others must get their
                    // turn.
                    return Ok(Outcome::InProgress);
                }
                ReadOutcome::Data => {}
                ReadOutcome::WouldBlock => return Ok(Outcome::InProgress),
                ReadOutcome::Closed(_) | ReadOutcome::TlsFailed(_) | ReadOutcome::NotTls(_)
                    if handshake.step == Step::Rejected =>
                {
                    return Ok(Outcome::Ended);
                }
                ReadOutcome::Closed(how) => return Err(Failure::Io(how)),
                ReadOutcome::TlsFailed(how) => return Err(Failure::Tls(how)),
                ReadOutcome::NotTls(how) => return Err(Failure::Refuse(how)),
            }
        }
    }

    fn on_message(
        &mut self,
        handshake: &mut Handshake,
        message: Message,
        bytes: &[u8],
    ) -> Result<Option<Outcome>, Failure> {
        match (handshake.step, message) {
            (Step::AwaitHello, Message::Ticket(shown)) if handshake.shown.is_none() => {
                handshake.shown = Some(shown);
            }
            (Step::AwaitHello, Message::Hello { hello, ticket, sides }) => {
                if let Some(check) = &self.config.check {
                    let channel = handshake.socket.channel_binding();
                    let peer = handshake.socket.peer_identity();
                    let binding = HandshakeBinding { channel, hello: bytes, peer: peer.as_ref() };
                    check
                        .check(handshake.shown.as_ref(), &binding)
                        .map_err(|reject| Failure::Refuse(reject.message))?;
                }
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
                handshake.peer = Some(hello);
                handshake.offered = sides;
                self.choose(handshake)?;
            }
            (Step::AwaitReady, Message::Next) => {
                self.close_opened(handshake);
                self.choose(handshake)?;
            }
            (Step::AwaitReady, Message::Ready) => {
                if let (Some(FabricPeer { fabric, id }), Some(hello)) =
                    (handshake.opened.pop(), handshake.peer.take())
                {
                    return Ok(Some(Outcome::Established { fabric, id, hello }));
                }
            }
            (Step::AwaitWelcome, Message::Welcome { hello, side }) => {
                let position = handshake
                    .opened
                    .iter()
                    .position(|opened| self.offer(opened.fabric) == side.offer);
                let position = position.ok_or_else(|| {
                    Failure::Foreign(format!("it chose {}, which was not offered", side.offer))
                })?;
                let opened = handshake.opened.swap_remove(position);
                match self.fabrics[opened.fabric].join_peer(opened.id, &side.detail) {
                    Ok(()) => {
                        self.close_opened(handshake);
                        handshake.push_message(&Message::Ready);
                        let FabricPeer { fabric, id } = opened;
                        return Ok(Some(Outcome::Established { fabric, id, hello }));
                    }
                    Err(error) => {
                        tracing::debug!(%error, "cannot join by {}", side.offer);
                        self.fabrics[opened.fabric].close_peer(opened.id);
                        handshake.push_message(&Message::Next);
                    }
                }
            }
            (_, Message::Reject { message }) if handshake.caller.is_some() => {
                return Err(Failure::Rejected(message));
            }
            (step, message) => {
                tracing::debug!(?step, ?message, "message out of turn");
                return Err(Failure::Foreign("it sent a message out of turn".to_owned()));
            }
        }
        Ok(None)
    }

    /// Begins TLS at the connecting side, or says the hello if there is none.
    fn begin_securing(&mut self, handshake: &mut Handshake) -> Result<(), Failure> {
        let (Some(tls), Some(caller)) = (&self.config.tls, &handshake.caller) else {
            return self.say_hello(handshake);
        };
        let host = caller.options.host.clone().unwrap_or_else(|| caller.addr.ip().to_string());
        let begun = tls.begin_connect(&host).map_err(|error| Failure::Tls(error.to_string()))?;
        handshake.socket.secure(begun);
        handshake.step = Step::Securing;
        Ok(())
    }

    fn say_hello(&mut self, handshake: &mut Handshake) -> Result<(), Failure> {
        let (route, _) = handshake.route()?;
        let mut sides = Vec::new();
        for fabric in 0..self.fabrics.len() {
            match self.fabrics[fabric].open_peer_on(route) {
                Ok((id, detail)) => {
                    handshake.opened.push(FabricPeer { fabric, id });
                    sides.push(Side { offer: self.offer(fabric), detail });
                }
                Err(error) => tracing::warn!(%error, "a transport is not offered"),
            }
        }
        let ticket = self.config.ticket.clone().unwrap_or_default().into_bytes();
        let hello = Message::Hello { hello: self.own_hello(), ticket, sides }.encode();
        let tickets = handshake.caller.as_ref().and_then(|caller| caller.options.tickets.as_ref());
        if let Some(tickets) = tickets {
            let channel = handshake.socket.channel_binding();
            let shown = tickets.show(&HandshakeBinding { channel, hello: &hello, peer: None });
            handshake.push_message(&Message::Ticket(shown.map_err(Failure::Ticket)?));
        }
        handshake.out.extend(hello);
        handshake.step = Step::AwaitWelcome;
        Ok(())
    }

    /// Joins over the best transport of this side that the peer offers, and sends the welcome.
    fn choose(&mut self, handshake: &mut Handshake) -> Result<(), Failure> {
        let (route, _) = handshake.route()?;
        for fabric in 0..self.fabrics.len() {
            let offer = self.offer(fabric);
            let found = handshake.offered.iter().position(|side| side.offer == offer);
            let Some(found) = found else { continue };
            let theirs = handshake.offered.swap_remove(found);
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
                    handshake.opened.push(FabricPeer { fabric, id });
                    let side = Side { offer, detail };
                    handshake.push_message(&Message::Welcome { hello: self.own_hello(), side });
                    handshake.step = Step::AwaitReady;
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

    fn fail_handshake(&mut self, handshake: &mut Handshake, failure: Failure) -> Outcome {
        let is_rejected = handshake.step == Step::Rejected;
        if let Some(ConnectCaller { addr, .. }) = &handshake.caller {
            let addr = addr.to_string();
            let error = match failure {
                Failure::Io(detail) if handshake.step == Step::Connecting => {
                    ConnectError::Unreachable { addr, detail }
                }
                Failure::Tls(reason) => ConnectError::Tls { addr, reason },
                Failure::Ticket(reason) => ConnectError::Ticket { addr, reason },
                Failure::Io(detail) | Failure::Foreign(detail) | Failure::Refuse(detail) => {
                    ConnectError::Foreign { addr, detail }
                }
                Failure::Rejected(message) => ConnectError::Rejected { addr, message },
            };
            self.close_handshake(handshake, Some(error));
            return Outcome::Ended;
        }
        self.close_opened(handshake);
        let message = match failure {
            Failure::Io(_) | Failure::Ticket(_) | Failure::Rejected(_) => return Outcome::Ended,
            Failure::Tls(_) if is_rejected => return Outcome::Ended,
            Failure::Tls(reason) => {
                self.warn_refused(&reason);
                // The socket stays until the peer has read the alert: a socket with unread bytes would reset it away.
                handshake.step = Step::Rejected;
                handshake.out.clear();
                handshake.socket.finish();
                let received = handshake.socket.received().len();
                handshake.socket.consume(received);
                return Outcome::InProgress;
            }
            Failure::Foreign(message) | Failure::Refuse(message) => message,
        };
        if is_rejected {
            return Outcome::Ended;
        }
        self.warn_refused(&message);
        handshake.push_message(&Message::Reject { message });
        handshake.step = Step::Rejected;
        let is_flushed = self.flush_handshake(handshake).is_ok();
        let received = handshake.socket.received().len();
        handshake.socket.consume(received);
        if is_flushed { Outcome::InProgress } else { Outcome::Ended }
    }

    fn flush_handshake(&mut self, handshake: &mut Handshake) -> Result<(), Failure> {
        let failed = |error: io::Error| Failure::Io(error.to_string());
        handshake.socket.push_records().map_err(failed)?;
        while !handshake.out.is_empty() {
            match handshake.socket.write(&handshake.out) {
                Ok(0) => break,
                Ok(written) => drop(handshake.out.drain(..written)),
                Err(error) => return Err(failed(error)),
            }
        }
        handshake.socket.want_out(self.set(), !handshake.out.is_empty());
        let is_sent = handshake.out.is_empty() && !handshake.socket.has_records();
        if is_sent && handshake.step == Step::Rejected {
            handshake.socket.finish();
        }
        Ok(())
    }

    fn close_opened(&mut self, handshake: &mut Handshake) {
        for opened in handshake.opened.drain(..) {
            self.fabrics[opened.fabric].close_peer(opened.id);
        }
    }

    fn offer(&self, fabric: usize) -> Offer {
        offer_of(&*self.fabrics[fabric])
    }

    fn own_hello(&self) -> PeerHello {
        let metadata = &self.shared.metadata;
        PeerHello {
            engine_id: metadata.engine_id,
            port: metadata.addr.port(),
            gpu_index: metadata.gpu_index,
            pci_bdf: metadata.pci_bdf.clone(),
            limits: self.config.limits(),
        }
    }
}

/// Takes a whole message out of the received bytes. Frames that follow the handshake stay. The bytes of a message that
/// may be a hello come with it, for the proof that covers them.
fn next_message(handshake: &mut Handshake) -> Result<Option<(Message, Vec<u8>)>, Failure> {
    if matches!(handshake.step, Step::Connecting | Step::Securing | Step::Rejected) {
        return Ok(None);
    }
    let received = handshake.socket.received();
    let Some((header, rest)) = received.split_first_chunk::<HEADER_BYTES>() else {
        return Ok(None);
    };
    let body_bytes = Message::body_bytes(header).map_err(Failure::Foreign)?;
    let Some(body) = rest.get(..body_bytes) else { return Ok(None) };
    let message = Message::decode(header, body).map_err(Failure::Foreign)?;
    let bytes = match handshake.step {
        Step::AwaitHello => received[..HEADER_BYTES + body_bytes].to_vec(),
        _ => Vec::new(),
    };
    handshake.socket.consume(HEADER_BYTES + body_bytes);
    Ok(Some((message, bytes)))
}
