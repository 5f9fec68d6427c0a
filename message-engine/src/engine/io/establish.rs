//! Beginning and end of established connections.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::connection::{ActiveConnection, Peer, Ports};
use super::handshake::Handshake;
use super::hello::PeerHello;
use super::{Io, Place, offer_of};
use crate::engine::connection::Connection;
use crate::engine::error::{CloseReason, ConnectError};
use crate::engine::link::Link;
use crate::engine::shared::{ConnKey, ConnShared, lock};
use crate::engine::wire::Frame;
use crate::fabric::PeerId;

impl Io {
    /// Makes a connection of a handshake that has succeeded.
    pub(super) fn establish(
        &mut self,
        idx: u32,
        mut handshake: Handshake,
        fabric: usize,
        id: PeerId,
        hello: &PeerHello,
    ) {
        let places = self.credit.join().and_then(|sender| Ok((sender, self.credit.join()?)));
        let (sender, reads) = match places {
            Ok(places) => places,
            Err(error) => {
                tracing::warn!(%error, "a connection is refused");
                self.fabrics[fabric].close_peer(id);
                let addr = handshake
                    .socket
                    .addrs()
                    .map_or_else(|_| String::new(), |(_, to)| to.to_string());
                let detail =
                    format!("this side cannot serve it: {error}; see `credit.max_senders`");
                self.close_handshake(&mut handshake, Some(ConnectError::Foreign { addr, detail }));
                return self.free_place(idx);
            }
        };
        self.by_sender[sender.index()] = idx;
        self.by_sender[reads.index()] = idx;
        let key = ConnKey { idx, serial: self.next_serial };
        self.next_serial += 1;
        let transport = offer_of(&*self.fabrics[fabric]);
        let peer = Self::peer_info(&handshake, hello);
        let by = (fabric, transport);
        let direct = self.fabrics[fabric].direct(id);
        let conn = ConnShared::new(&self.shared, key, by, peer, hello.limits, direct);
        let conn = Arc::new(conn);
        let weak = Arc::downgrade(&conn);
        lock(&self.shared.connections).push(weak.clone());
        let link = Link::new(self.config.limits(), hello.limits, self.config.chunk_bytes);
        let peer = Peer { key, conn: weak, engine_id: hello.engine_id, fabric, id, sender, reads };
        self.report_established(&mut handshake, Connection { shared: conn });
        let connection = ActiveConnection {
            socket: handshake.socket,
            peer,
            link,
            is_dirty: false,
            lost_ns: u64::MAX,
        };
        self.places[idx as usize] = Place::Active(Box::new(connection));
        self.by_peer.insert((fabric, id), idx);
        // Frames may have arrived together with the last message of the handshake.
        self.handle_event(idx, false);
    }

    /// Handles the loss of a peer by a fabric. The connection is closed after a delay, because a goodbye of the peer
    /// may still be under way.
    pub(super) fn on_peer_lost(&mut self, fabric: usize, peer: PeerId) {
        let known = self.by_peer.get(&(fabric, peer));
        if let Some(Place::Active(connection)) =
            known.and_then(|idx| self.places.get_mut(*idx as usize))
        {
            let lost_ns = self.shared.ns(Instant::now() + LOSS_DELAY);
            connection.lost_ns = connection.lost_ns.min(lost_ns);
            self.next_deadline_ns = self.next_deadline_ns.min(lost_ns);
            return;
        }
        // Otherwise the peer is in the middle of its handshake, which is rare.
        let is_theirs = |place: &Place| matches!(place, Place::Handshake(handshake) if handshake.has_joined(fabric, peer));
        if let Some(idx) = self.places.iter().position(is_theirs) {
            self.abort_handshake(idx as u32, None);
        }
    }

    /// Closes a connection. The peer's access ends first, then the transfers.
    pub(super) fn close(&mut self, idx: u32, reason: &CloseReason) {
        let place = std::mem::replace(&mut self.places[idx as usize], Place::Busy);
        let Place::Active(connection) = place else {
            self.places[idx as usize] = place;
            return;
        };
        let ActiveConnection { mut socket, peer, mut link, .. } = *connection;
        self.by_peer.remove(&(peer.fabric, peer.id));
        let conn = peer.conn.upgrade();
        self.shared.remove_connection(&peer.conn);
        if let Some(conn) = conn {
            let _ = conn.closed.set(reason.clone());
        }
        if self.ended.len() == MAX_ENDED {
            self.ended.pop_front();
        }
        self.ended.push_back((peer.key.serial, reason.clone()));
        if matches!(reason, CloseReason::Local | CloseReason::Stopped) {
            // Best effort: a peer that does not read sees the end of the stream.
            link.push_frame(Frame::Goodbye);
            let _ = socket.write(link.output());
            socket.finish();
        }
        self.fabrics[peer.fabric].close_peer(peer.id);
        let mut ports = Ports::new(&mut self.fabrics, &mut self.credit, &self.shared, &peer, 0);
        link.close(&mut ports, reason);
        let now_ns = self.shared.ns(Instant::now());
        // Both senders joined when the connection was made, so this cannot fail.
        let _ = self.credit.leave(now_ns, peer.sender);
        let _ = self.credit.leave(now_ns, peer.reads);
        if link.num_in_flight() > 0 {
            self.places[idx as usize] = Place::Closing(Box::new(link), peer);
        } else {
            self.free_place(idx);
        }
    }

    /// Closes all connections and handshakes.
    pub(super) fn stop(&mut self) {
        for idx in 0..self.places.len() as u32 {
            match &self.places[idx as usize] {
                Place::Active(_) => self.close(idx, &CloseReason::Stopped),
                Place::Handshake(_) => self.abort_handshake(idx, Some(ConnectError::Stopped)),
                _ => {}
            }
        }
        // Operations of closed peers complete at once or within the fabric's own time limit.
        let give_up = Instant::now() + STOP_TIMEOUT;
        while self.places.iter().any(|place| matches!(place, Place::Closing(..)))
            && Instant::now() < give_up
        {
            self.poll_fabrics();
        }
    }
}

const MAX_ENDED: usize = 64;
/// Time for frames that a peer has sent before its data connection ended.
const LOSS_DELAY: Duration = Duration::from_millis(200);
const STOP_TIMEOUT: Duration = Duration::from_secs(2);
