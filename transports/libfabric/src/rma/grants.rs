//! Keys that are given to one peer alone, for the buffers of its messages. They are revoked with
//! the peer, and other peers are not affected.
//!
//! A key is cached for further messages into the same window. The keys of a fabric have limits on
//! their number and on the bytes that they open in total. Beyond a limit, the least recently used
//! of the idle keys is revoked. If messages use all keys, no further key is granted.

use std::collections::{HashMap, VecDeque};

use crate::owner::CallError;
use crate::port::MemoryRegistration;
use p2p_core::endpoint::PostError;
use p2p_core::fabric::{LocalSegment, PeerId, RegionId};

/// A key that can be revoked.
pub(super) trait Key {
    /// # Errors
    /// [`CallError`]; it stays in force then, and the memory must stay mapped.
    fn revoke(&mut self) -> Result<(), CallError>;
}

impl Key for MemoryRegistration {
    fn revoke(&mut self) -> Result<(), CallError> {
        self.close()
    }
}

/// The keys of all peers, at most one per peer and window.
#[derive(Debug)]
pub(super) struct Grants<K> {
    entries: HashMap<(PeerId, Window), Grant<K>>,
    idle: IdleQueue,
    /// Keys of closed peers that the library failed to revoke: their memory must stay mapped.
    unrevoked: Vec<(Window, K)>,
    /// Bytes that `entries` and `unrevoked` open.
    bytes: u64,
    /// Logical clock that orders the ends of use.
    clock: u64,
    pub(super) limits: Limits,
}

#[derive(Debug)]
struct Grant<K> {
    key: K,
    /// Messages that use the key.
    num_users: u32,
    /// Value of the clock when the last message ended; 0 while a message uses the key.
    idle_since: u64,
}

/// The idle keys in LRU order, so that eviction need not search.
#[derive(Debug, Default)]
struct IdleQueue {
    /// Value of the clock, and the key. An entry becomes stale when its key is used again.
    queue: VecDeque<(u64, (PeerId, Window))>,
    num_keys: usize,
    /// Bytes that they open.
    bytes: u64,
}

impl IdleQueue {
    /// Uncounts a key that is used again or revoked, unless it is in use already.
    fn remove<K>(&mut self, grant: &mut Grant<K>, window: Window) {
        if std::mem::take(&mut grant.idle_since) != 0 {
            self.num_keys -= 1;
            self.bytes -= window.bytes;
        }
    }
}

/// Limits of all keys of a fabric together.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) bytes: u64,
    pub(super) num_keys: usize,
}

/// The memory that a key opens: a registration or, if that is long, the part around the buffer.
/// Some providers take a second per few GB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Window {
    pub(super) region: RegionId,
    /// First byte within the registration.
    pub(super) start: u64,
    pub(super) bytes: u64,
}

impl Window {
    /// The window around a part of a registration of `total` bytes. Nearby buffers share a window.
    pub(super) const fn around(part: LocalSegment, total: u64) -> Self {
        if total <= WINDOW_BYTES {
            return Self { region: part.region, start: 0, bytes: total };
        }
        let start = part.offset / WINDOW_BYTES * WINDOW_BYTES;
        let end = (part.offset + part.bytes).div_ceil(WINDOW_BYTES) * WINDOW_BYTES;
        let end = if end < total { end } else { total };
        Self { region: part.region, start, bytes: end - start }
    }

    /// The window of exactly this part.
    const fn of(part: LocalSegment) -> Self {
        Self { region: part.region, start: part.offset, bytes: part.bytes }
    }
}

impl<K> Default for Grants<K> {
    fn default() -> Self {
        let limits = Limits { bytes: MAX_BYTES, num_keys: MAX_KEYS };
        let (entries, idle) = (HashMap::new(), IdleQueue::default());
        Self { entries, idle, unrevoked: Vec::new(), bytes: 0, clock: 0, limits }
    }
}

impl<K: Key> Grants<K> {
    /// Returns the peer's key for a part of a registration of `total` bytes and the window that it
    /// opens, for one message. Calls `make` if there is no such key.
    pub(super) fn open(
        &mut self,
        peer: PeerId,
        part: LocalSegment,
        total: u64,
        mut make: impl FnMut(Window) -> Result<K, PostError>,
    ) -> Result<(Window, &K), PostError> {
        let (around, exact) = (Window::around(part, total), Window::of(part));
        let known = [exact, around].into_iter().find(|w| self.entries.contains_key(&(peer, *w)));
        let window = match known {
            Some(known) => known,
            None => {
                let (window, key) = self.make(around, exact, &mut make)?;
                self.bytes += window.bytes;
                self.entries.insert((peer, window), Grant { key, num_users: 0, idle_since: 0 });
                window
            }
        };
        let Some(grant) = self.entries.get_mut(&(peer, window)) else {
            unreachable!("it was found, or made")
        };
        self.idle.remove(grant, window);
        grant.num_users += 1;
        Ok((window, &grant.key))
    }

    /// Ends the use of a key by one message into this part.
    pub(super) fn end(&mut self, peer: PeerId, part: LocalSegment, total: u64) {
        // An exact key is only made if there is no wide one, and `open` prefers it from then on. So
        // while messages use it, it is the key of this part.
        for window in [Window::of(part), Window::around(part, total)] {
            if let Some(grant) = self.entries.get_mut(&(peer, window))
                && grant.num_users > 0
            {
                grant.num_users -= 1;
                if grant.num_users == 0 {
                    self.mark_idle((peer, window));
                }
                return;
            }
        }
    }

    /// Revokes the keys of `region`. After an error the failed key is still present and in force.
    pub(super) fn revoke(&mut self, region: RegionId) -> Result<(), CallError> {
        let mut result = Ok(());
        let (bytes, idle) = (&mut self.bytes, &mut self.idle);
        self.entries.retain(|(_, window), grant| {
            let is_due = window.region == region && result.is_ok();
            if is_due {
                result = grant.key.revoke();
            }
            let is_gone = is_due && result.is_ok();
            if is_gone {
                *bytes -= window.bytes;
                idle.remove(grant, *window);
            }
            !is_gone
        });
        result?;
        while let Some(nth) = self.unrevoked.iter().position(|(of, _)| of.region == region) {
            self.unrevoked[nth].1.revoke()?;
            let (window, _) = self.unrevoked.swap_remove(nth);
            self.bytes -= window.bytes;
        }
        Ok(())
    }

    /// Revokes all keys of a peer. Keys that stay in force go to `unrevoked`.
    pub(super) fn close_peer(&mut self, peer: PeerId) {
        for ((_, window), mut grant) in self.entries.extract_if(|(of, _), _| *of == peer) {
            self.idle.remove(&mut grant, window);
            match grant.key.revoke() {
                Ok(()) => self.bytes -= window.bytes,
                Err(error) => {
                    tracing::error!(%error, "a closed peer can still write memory that it was granted");
                    self.unrevoked.push((window, grant.key));
                }
            }
        }
    }

    /// Makes the wide key if there is room, because it serves more messages, or else the exact one.
    fn make(
        &mut self,
        around: Window,
        exact: Window,
        make: &mut impl FnMut(Window) -> Result<K, PostError>,
    ) -> Result<(Window, K), PostError> {
        let window = if self.make_room(around.bytes)? {
            around
        } else if self.make_room(exact.bytes)? {
            exact
        } else {
            return Err(self.full(exact.bytes));
        };
        match make(window) {
            // The system has less room than the limits: evict all idle keys and retry once.
            Err(PostError::Transport { code: ENOMEM, .. }) if self.idle.num_keys > 0 => {
                while self.evict_oldest()? {}
                Ok((exact, make(exact)?))
            }
            made => Ok((window, made?)),
        }
    }

    /// Evicts idle keys until one more of `bytes` fits. Returns false, without evicting, if keys in
    /// use leave too little room. A key of any size fits while no message uses a key.
    fn make_room(&mut self, bytes: u64) -> Result<bool, PostError> {
        if self.has_room((self.bytes, self.num_keys()), bytes) {
            return Ok(true);
        }
        let in_use = (self.bytes - self.idle.bytes, self.num_keys() - self.idle.num_keys);
        if self.idle.num_keys < self.entries.len() && !self.has_room(in_use, bytes) {
            return Ok(false);
        }
        while !self.has_room((self.bytes, self.num_keys()), bytes) && self.evict_oldest()? {}
        Ok(true)
    }

    const fn has_room(&self, (taken, num_keys): (u64, usize), bytes: u64) -> bool {
        taken.saturating_add(bytes) <= self.limits.bytes && num_keys < self.limits.num_keys
    }

    fn num_keys(&self) -> usize {
        self.entries.len() + self.unrevoked.len()
    }

    /// Marks a key as idle from now on.
    fn mark_idle(&mut self, at: (PeerId, Window)) {
        let Some(grant) = self.entries.get_mut(&at) else { return };
        self.clock += 1;
        grant.idle_since = self.clock;
        let IdleQueue { queue, num_keys, bytes } = &mut self.idle;
        (*num_keys, *bytes) = (*num_keys + 1, *bytes + at.1.bytes);
        if queue.len() >= 2 * *num_keys + MAX_STALE {
            queue
                .retain(|(since, at)| self.entries.get(at).is_some_and(|h| h.idle_since == *since));
        }
        queue.push_back((self.clock, at));
    }

    /// Revokes the least recently used idle key. Returns false if there is none.
    fn evict_oldest(&mut self) -> Result<bool, PostError> {
        while let Some((since, at)) = self.idle.queue.pop_front() {
            let Some(grant) = self.entries.get_mut(&at) else { continue };
            if grant.idle_since != since {
                continue;
            }
            self.idle.remove(grant, at.1);
            if let Err(CallError { op, code, text }) = grant.key.revoke() {
                // The next call tries another key.
                self.mark_idle(at);
                return Err(PostError::Transport { op, code, detail: text });
            }
            self.entries.remove(&at);
            self.bytes -= at.1.bytes;
            return Ok(true);
        }
        Ok(false)
    }

    fn full(&self, bytes: u64) -> PostError {
        let (taken, num_keys) = (self.bytes, self.num_keys());
        let Limits { bytes: most_bytes, num_keys: most_keys } = self.limits;
        let detail = format!(
            "no room to open a buffer of {bytes} bytes to a peer: {num_keys} buffers of {taken} bytes \
             with what is around them are open for messages under way, and at most {most_keys} of \
             {most_bytes} may be; receive again when some have ended"
        );
        PostError::Transport { op: super::GRANT, code: ENOMEM, detail }
    }
}

/// Size and alignment of a window.
const WINDOW_BYTES: u64 = 64 << 20;
/// Most bytes that the keys of a fabric open at a time: 64 MiB for each of 1,024 peers.
const MAX_BYTES: u64 = 64 << 30;
/// Most keys of a fabric at a time.
const MAX_KEYS: usize = 16 << 10;
/// Stale entries that the queue of idle keys may hold, beside as many as there are idle keys.
const MAX_STALE: usize = 64;
const ENOMEM: i64 = 12;

#[cfg(test)]
mod tests;
