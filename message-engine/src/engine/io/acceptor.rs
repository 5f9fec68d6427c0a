//! Accepts sockets of peers, and limits handshakes that are in progress.
//!
//! A handshake ends at its deadline, whatever the peer sends. There are at most [`EngineConfig::max_handshakes`] of
//! them. At the limit, the engine evicts the oldest one without a valid hello; if all have sent one, the oldest of all.
//!
//! [`EngineConfig::max_handshakes`]: crate::engine::EngineConfig::max_handshakes

use std::io;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::epoll;

use super::handshake::{ConnectCaller, Handshake};
use super::socket::ControlSocket;
use super::{Io, LISTENER, Place};
use crate::engine::error::ConnectError;

impl Io {
    /// Accepts connections that wait at the listener.
    pub(super) fn accept(&mut self) {
        for _ in 0..MAX_ACCEPTS {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => Some(stream),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                Err(error) => {
                    // Most likely the process has no descriptors left. A retry at once would fail again.
                    if let Some(num_failures) = self.listening.failed(Instant::now()) {
                        tracing::error!(%error, num_failures, "cannot accept connections; {HINT}");
                    }
                    return self.pause_listener();
                }
            };
            if let Some(num_failures) = self.listening.worked() {
                tracing::info!(num_failures, "connections are accepted again");
            }
            let Some(stream) = stream else { return };
            if self.pending_handshakes.len() >= self.config.max_handshakes {
                self.evict_handshake(false);
            }
            let deadline = Instant::now() + self.config.handshake_timeout;
            if let Err((error, _)) = self.place(deadline, None, Ok(stream)) {
                self.warn_rate_limited(|| format!("a connection is refused: {error}"));
            }
        }
    }

    /// Listens again after a pause.
    pub(super) fn resume_listener(&mut self, now: Instant) {
        let Some(until) = self.listener_paused_until else { return };
        if until > now {
            self.next_deadline_ns = self.next_deadline_ns.min(self.shared.ns(until));
            return;
        }
        let (data, flags) = (epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN);
        match epoll::add(&*self.set, &self.listener, data, flags) {
            // The listener may still be in the set.
            Ok(()) | Err(rustix::io::Errno::EXIST) => self.listener_paused_until = None,
            Err(error) => {
                if let Some(num_failures) = self.listening.failed(now) {
                    tracing::error!(%error, num_failures, "cannot listen; {HINT}");
                }
                self.pause_listener();
            }
        }
    }

    fn pause_listener(&mut self) {
        let until = Instant::now() + LISTENER_PAUSE;
        self.listener_paused_until = Some(until);
        self.next_deadline_ns = self.next_deadline_ns.min(self.shared.ns(until));
        // An error means that it is not in the set, which is the aim.
        let _ = epoll::delete(&*self.set, &self.listener);
    }

    /// Takes a free place. The caller frees it if it does not use it.
    fn take_place(&mut self) -> io::Result<u32> {
        let is_full = self.free.is_empty() && self.places.len() >= self.config.max_connections;
        if is_full {
            // A new connection has priority over a handshake without a valid hello.
            self.evict_handshake(true);
        }
        if let Some(idx) = self.free.pop() {
            return Ok(idx);
        }
        if is_full {
            let most = self.config.max_connections;
            return Err(io::Error::other(format!(
                "there are {most} connections, which is the limit"
            )));
        }
        self.places.push(Place::Free);
        Ok(self.places.len() as u32 - 1)
    }

    /// Begins a handshake on a socket, in a place of its own.
    pub(super) fn place(
        &mut self,
        deadline: Instant,
        caller: Option<ConnectCaller>,
        stream: io::Result<TcpStream>,
    ) -> Result<(), (io::Error, Option<ConnectCaller>)> {
        let stream = match stream {
            Ok(stream) => stream,
            Err(error) => return Err((error, caller)),
        };
        let idx = match self.take_place() {
            Ok(idx) => idx,
            Err(error) => return Err((error, caller)),
        };
        let timeout = self.config.liveness_timeout;
        match ControlSocket::new(stream, self.set.as_fd(), idx.into(), timeout, caller.is_some()) {
            Ok(mut socket) => {
                if let (None, Some(tls)) = (&caller, &self.config.tls) {
                    match tls.begin_accept() {
                        Ok(begun) => socket.secure(begun),
                        Err(error) => {
                            self.free_place(idx);
                            return Err((io::Error::other(error), caller));
                        }
                    }
                }
                self.next_deadline_ns = self.next_deadline_ns.min(self.shared.ns(deadline));
                let handshake = Handshake::new(socket, deadline, caller);
                self.add_pending(idx, &handshake);
                self.places[idx as usize] = Place::Handshake(Box::new(handshake));
                Ok(())
            }
            Err(error) => {
                self.free_place(idx);
                Err((error, caller))
            }
        }
    }

    /// Ends a handshake. Its caller, if any, gets `error`, or else a timeout.
    pub(super) fn abort_handshake(&mut self, idx: u32, error: Option<ConnectError>) {
        let place = std::mem::replace(&mut self.places[idx as usize], Place::Busy);
        if let Place::Handshake(mut handshake) = place {
            self.remove_pending(idx, &handshake);
            self.close_handshake(&mut handshake, error);
            self.free_place(idx);
        } else {
            self.places[idx as usize] = place;
        }
    }

    /// Adds a handshake that a peer has begun to the pending ones.
    pub(super) fn add_pending(&mut self, idx: u32, handshake: &Handshake) {
        if handshake.is_incoming() {
            self.pending_handshakes.insert((handshake.eviction_key(), idx));
        }
    }

    /// Removes a handshake that has ended, or whose state is about to change.
    pub(super) fn remove_pending(&mut self, idx: u32, handshake: &Handshake) {
        self.pending_handshakes.remove(&(handshake.eviction_key(), idx));
    }

    /// Ends the first pending handshake in the order of eviction. With `only_silent` it ends only one without a valid
    /// hello.
    fn evict_handshake(&mut self, only_silent: bool) {
        if let Some((eviction_key, idx)) = self.pending_handshakes.first().copied()
            && !(eviction_key.is_identified && only_silent)
        {
            self.warn_rate_limited(|| {
                "too many handshakes at once: the oldest is closed".to_owned()
            });
            self.abort_handshake(idx, None);
        }
    }

    /// Logs a warning, at most once a second: peers can cause it as often as they like.
    fn warn_rate_limited(&mut self, what: impl FnOnce() -> String) {
        let now = Instant::now();
        if self.last_warning.is_none_or(|last| now - last >= WARNING_INTERVAL) {
            self.last_warning = Some(now);
            tracing::warn!("{}", what());
        }
    }

    /// Counts a refused handshake, and warns of it.
    pub(super) fn warn_refused(&mut self, why: &str) {
        self.shared.num_refused.fetch_add(1, Ordering::Relaxed);
        self.warn_rate_limited(|| format!("handshake refused: {why}"));
    }
}

/// Connections accepted in one call, before other events get their turn.
const MAX_ACCEPTS: usize = 64;
const LISTENER_PAUSE: Duration = Duration::from_millis(100);
const HINT: &str = "the engine retries every 100 ms; raise the limit on open files (`ulimit -n`) if that \
                    is what is missing";
const WARNING_INTERVAL: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::EngineConfig;

    /// Other deadlines expire while the listener is paused. The listener must resume all the same.
    #[test]
    fn a_paused_listener_resumes_whatever_expires_before() {
        let (_shared, mut io) = Io::new(EngineConfig::local()).unwrap();
        io.pause_listener();
        let until = io.listener_paused_until.unwrap();
        let early = until - LISTENER_PAUSE / 2;
        io.expire(early, io.shared.ns(early));
        assert_eq!(io.next_deadline_ns, io.shared.ns(until));
        assert_eq!(io.listener_paused_until, Some(until));
        io.expire(until, io.shared.ns(until));
        assert_eq!((io.listener_paused_until, io.next_deadline_ns), (None, u64::MAX));
        let stream = TcpStream::connect(io.listener.local_addr().unwrap()).unwrap();
        io.poll_sockets(Duration::from_secs(30));
        assert_eq!(io.pending_handshakes.len(), 1, "{stream:?} was not heard");
    }

    /// The list of pending handshakes agrees with the places, in the order of eviction.
    #[test]
    fn handshakes_are_evicted_in_the_order_of_their_arrival() {
        let (_shared, mut io) = Io::new(EngineConfig::local()).unwrap();
        let addr = io.listener.local_addr().unwrap();
        let mut streams = Vec::new();
        let limit = Instant::now() + Duration::from_secs(30);
        for num in 1..=5 {
            streams.push(TcpStream::connect(addr).unwrap());
            while io.pending_handshakes.len() < num {
                assert!(Instant::now() < limit, "{num} strangers were not heard");
                io.poll_sockets(Duration::from_millis(10));
            }
        }
        let listed =
            |io: &Io| io.pending_handshakes.iter().map(|(_, idx)| *idx).collect::<Vec<_>>();
        assert_eq!(listed(&io), [0, 1, 2, 3, 4]);
        io.evict_handshake(false);
        assert_eq!(listed(&io), [1, 2, 3, 4]);
        // A peer that closes its socket is removed.
        drop(streams.remove(3));
        while io.pending_handshakes.len() == 4 {
            assert!(Instant::now() < limit, "the end was not heard");
            io.poll_sockets(Duration::from_millis(10));
        }
        assert_eq!(listed(&io), [1, 2, 4]);
        // Its place is reused by a newer handshake, which comes last in the order.
        streams.push(TcpStream::connect(addr).unwrap());
        while io.pending_handshakes.len() < 4 {
            assert!(Instant::now() < limit, "the last one was not heard");
            io.poll_sockets(Duration::from_millis(10));
        }
        assert_eq!(listed(&io), [1, 2, 4, 3]);
        for (eviction_key, idx) in &io.pending_handshakes {
            let Place::Handshake(handshake) = &io.places[*idx as usize] else { panic!("{idx}") };
            assert_eq!(handshake.eviction_key(), *eviction_key);
        }
        for num_left in (0..4).rev() {
            io.evict_handshake(true);
            assert_eq!(io.pending_handshakes.len(), num_left);
        }
    }
}
