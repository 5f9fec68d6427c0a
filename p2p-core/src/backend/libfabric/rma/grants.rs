//! Keys that one peer alone is told, for the buffers of its messages: when it goes, they go with it, and
//! nobody else notices.
//!
//! A key is kept for further messages into the same window. What all keys of a fabric open at a time has
//! a limit. Beyond it those are taken back that no message uses, the one that was used longest ago first;
//! where messages use them all, one more is not granted.

use std::collections::HashMap;

use crate::backend::libfabric::owner::CallError;
use crate::backend::libfabric::port::Registered;
use crate::endpoint::PostError;
use crate::fabric::{LocalSegment, PeerId, RegionId};

/// What can be taken back.
pub(super) trait Key {
    /// # Errors
    /// [`CallError`]; it stays in force then, and the memory must stay mapped.
    fn revoke(&mut self) -> Result<(), CallError>;
}

impl Key for Registered {
    fn revoke(&mut self) -> Result<(), CallError> {
        self.close()
    }
}

/// The keys of all peers, at most one for every window of each.
#[derive(Debug)]
pub(super) struct Grants<K> {
    held: HashMap<(PeerId, Window), Held<K>>,
    /// Keys of peers that are gone, which the library did not take back: their memory must stay mapped.
    unrevoked: Vec<(Window, K)>,
    /// What both of them open.
    bytes: u64,
    /// Counts uses, and so orders them.
    clock: u64,
    pub(super) limits: Limits,
}

#[derive(Debug)]
struct Held<K> {
    key: K,
    /// Messages under way.
    num_users: u32,
    last_used: u64,
}

/// How much may be open at a time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) bytes: u64,
    pub(super) num_keys: usize,
}

/// What a key opens: a registration, or, of a long one, a part with the buffer within. Some providers
/// take a second for every few GB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Window {
    pub(super) region: RegionId,
    /// First byte within the registration.
    pub(super) start: u64,
    pub(super) bytes: u64,
}

impl Window {
    /// The one around a part of a registration of `total` bytes. Buffers close to each other share it.
    pub(super) const fn around(part: LocalSegment, total: u64) -> Self {
        if total <= WINDOW_BYTES {
            return Self { region: part.region, start: 0, bytes: total };
        }
        let start = part.offset / WINDOW_BYTES * WINDOW_BYTES;
        let end = (part.offset + part.bytes).div_ceil(WINDOW_BYTES) * WINDOW_BYTES;
        let end = if end < total { end } else { total };
        Self { region: part.region, start, bytes: end - start }
    }

    /// No more than the part.
    const fn of(part: LocalSegment) -> Self {
        Self { region: part.region, start: part.offset, bytes: part.bytes }
    }
}

impl<K> Default for Grants<K> {
    fn default() -> Self {
        let limits = Limits { bytes: MAX_BYTES, num_keys: MAX_KEYS };
        Self { held: HashMap::new(), unrevoked: Vec::new(), bytes: 0, clock: 0, limits }
    }
}

impl<K: Key> Grants<K> {
    /// The peer's key for a part of a registration of `total` bytes, and the window that it opens, for one
    /// message. It is made where there is none.
    pub(super) fn open(
        &mut self,
        peer: PeerId,
        part: LocalSegment,
        total: u64,
        mut make: impl FnMut(Window) -> Result<K, PostError>,
    ) -> Result<(Window, &K), PostError> {
        let (around, exact) = (Window::around(part, total), Window::of(part));
        let known = [exact, around].into_iter().find(|w| self.held.contains_key(&(peer, *w)));
        let window = match known {
            Some(known) => known,
            None => {
                let (window, key) = self.make(around, exact, &mut make)?;
                self.bytes += window.bytes;
                self.held.insert((peer, window), Held { key, num_users: 0, last_used: 0 });
                window
            }
        };
        self.clock += 1;
        let last_used = self.clock;
        let Some(held) = self.held.get_mut(&(peer, window)) else {
            unreachable!("it was found, or made")
        };
        held.num_users += 1;
        held.last_used = last_used;
        Ok((window, &held.key))
    }

    /// A message into this part has ended.
    pub(super) fn end(&mut self, peer: PeerId, part: LocalSegment, total: u64) {
        // The narrow one is only made where there is no other, and is preferred from then on: as long as
        // messages use it, it is the one of this part.
        for window in [Window::of(part), Window::around(part, total)] {
            if let Some(held) = self.held.get_mut(&(peer, window))
                && held.num_users > 0
            {
                held.num_users -= 1;
                return;
            }
        }
    }

    /// Revokes the keys of `region`. On an error that one is still there, and in force.
    pub(super) fn revoke(&mut self, region: RegionId) -> Result<(), CallError> {
        let mut result = Ok(());
        let bytes = &mut self.bytes;
        self.held.retain(|(_, window), held| {
            let is_due = window.region == region && result.is_ok();
            if is_due {
                result = held.key.revoke();
            }
            let is_gone = is_due && result.is_ok();
            *bytes -= if is_gone { window.bytes } else { 0 };
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

    /// Revokes all keys of a peer, and remembers those that stay in force.
    pub(super) fn close_peer(&mut self, peer: PeerId) {
        for ((_, window), mut held) in self.held.extract_if(|(of, _), _| *of == peer) {
            match held.key.revoke() {
                Ok(()) => self.bytes -= window.bytes,
                Err(error) => {
                    tracing::error!(%error, "a closed peer can still write memory that it was granted");
                    self.unrevoked.push((window, held.key));
                }
            }
        }
    }

    /// Makes the wide key where there is room, which serves more messages, or else the narrow one.
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
            // The system has less room than the limits: once more with all there is.
            Err(PostError::Transport { code: ENOMEM, .. }) if self.oldest().is_some() => {
                while let Some(oldest) = self.oldest() {
                    self.evict(oldest)?;
                }
                Ok((exact, make(exact)?))
            }
            made => Ok((window, made?)),
        }
    }

    /// Takes keys back that nobody uses until there is room for one more of `bytes`. False: there is none,
    /// and none is taken. What is wanted when no message is under way always fits, however long it is.
    fn make_room(&mut self, bytes: u64) -> Result<bool, PostError> {
        if self.has_room((self.bytes, self.num_keys()), bytes) {
            return Ok(true);
        }
        let idle = self.held.iter().filter(|(_, held)| held.num_users == 0);
        let (idle_bytes, num_idle) =
            idle.fold((0, 0), |(bytes, num), ((_, window), _)| (bytes + window.bytes, num + 1));
        let in_use = (self.bytes - idle_bytes, self.num_keys() - num_idle);
        if num_idle < self.held.len() && !self.has_room(in_use, bytes) {
            return Ok(false);
        }
        while !self.has_room((self.bytes, self.num_keys()), bytes)
            && let Some(oldest) = self.oldest()
        {
            self.evict(oldest)?;
        }
        Ok(true)
    }

    const fn has_room(&self, (taken, num_keys): (u64, usize), bytes: u64) -> bool {
        taken.saturating_add(bytes) <= self.limits.bytes && num_keys < self.limits.num_keys
    }

    fn num_keys(&self) -> usize {
        self.held.len() + self.unrevoked.len()
    }

    /// The key that was used longest ago, of those that no message uses.
    fn oldest(&self) -> Option<(PeerId, Window)> {
        let idle = self.held.iter().filter(|(_, held)| held.num_users == 0);
        idle.min_by_key(|(_, held)| held.last_used).map(|(at, _)| *at)
    }

    fn evict(&mut self, at: (PeerId, Window)) -> Result<(), PostError> {
        let Some(held) = self.held.get_mut(&at) else { return Ok(()) };
        if let Err(CallError { op, code, text }) = held.key.revoke() {
            // Another one is tried the next time.
            self.clock += 1;
            held.last_used = self.clock;
            return Err(PostError::Transport { op, code, detail: text });
        }
        self.held.remove(&at);
        self.bytes -= at.1.bytes;
        Ok(())
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

/// Parts of this size are opened together.
const WINDOW_BYTES: u64 = 64 << 20;
/// Most bytes that keys of a fabric open at a time: 64 MiB for each of 1,024 peers.
const MAX_BYTES: u64 = 64 << 30;
/// Most keys of a fabric at a time.
const MAX_KEYS: usize = 16 << 10;
const ENOMEM: i64 = 12;

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::rc::Rc;

    use super::*;

    const W: u64 = WINDOW_BYTES;

    #[test]
    fn windows_hold_their_buffers_and_end_with_the_registration() {
        let around = |offset, bytes, total| {
            let window = Window::around(part(3, offset, bytes), total);
            (window.start, window.bytes)
        };
        assert_eq!(around(100, 5, 4096), (0, 4096));
        assert_eq!(around(7, 1, W), (0, W));
        let total = 10 * W + 1000;
        assert_eq!(around(0, 1, total), (0, W));
        assert_eq!(around(W - 1, 1, total), (0, W));
        assert_eq!(around(W - 1, 2, total), (0, 2 * W));
        assert_eq!(around(3 * W, W, total), (3 * W, W));
        assert_eq!(around(10 * W + 999, 1, total), (10 * W, 1000));
        assert_eq!(around(0, total, total), (0, total));
    }

    fn part(region: u32, offset: u64, bytes: u64) -> LocalSegment {
        LocalSegment { region: RegionId(region), offset, bytes }
    }

    /// What the keys of a test open, and whether the library lets go of them.
    #[derive(Default)]
    struct World {
        open: RefCell<Vec<Window>>,
        refuses: Cell<bool>,
        /// Most keys that the system has room for; `None`: any number.
        room: Cell<Option<usize>>,
    }

    struct Fake(Window, Rc<World>);

    impl Key for Fake {
        fn revoke(&mut self) -> Result<(), CallError> {
            if self.1.refuses.get() {
                return Err(CallError { op: "fi_close", code: 16, text: "busy".to_owned() });
            }
            self.1.open.borrow_mut().retain(|window| *window != self.0);
            Ok(())
        }
    }

    struct Rig {
        world: Rc<World>,
        grants: Grants<Fake>,
    }

    impl Rig {
        fn new(bytes: u64, num_keys: usize) -> Self {
            let limits = Limits { bytes, num_keys };
            Self { world: Rc::default(), grants: Grants { limits, ..Grants::default() } }
        }

        /// Grants a part of a registration of `total` bytes, and gives where the window begins, and how
        /// long it is.
        fn open(
            &mut self,
            peer: u32,
            of: LocalSegment,
            total: u64,
        ) -> Result<(u64, u64), PostError> {
            let world = Rc::clone(&self.world);
            let opened = self.grants.open(PeerId(peer), of, total, |window| {
                if world.room.get().is_some_and(|room| world.open.borrow().len() >= room) {
                    let detail = "no room".to_owned();
                    return Err(PostError::Transport { op: "fi_mr_reg", code: ENOMEM, detail });
                }
                world.open.borrow_mut().push(window);
                Ok(Fake(window, Rc::clone(&world)))
            });
            opened.map(|(window, _)| (window.start, window.bytes))
        }

        fn regions(&self) -> Vec<u32> {
            let mut regions: Vec<_> =
                self.world.open.borrow().iter().map(|window| window.region.0).collect();
            regions.sort_unstable();
            let sum: u64 = self.world.open.borrow().iter().map(|window| window.bytes).sum();
            assert_eq!(sum, self.grants.bytes);
            regions
        }
    }

    #[test]
    fn the_keys_that_were_idle_longest_make_room() {
        let mut rig = Rig::new(1000, 16);
        for region in 0..4 {
            assert_eq!(rig.open(1, part(region, 0, 10), 250).unwrap(), (0, 250));
            rig.grants.end(PeerId(1), part(region, 0, 10), 250);
        }
        // Used again, and so not the next to go.
        rig.open(1, part(0, 0, 10), 250).unwrap();
        rig.grants.end(PeerId(1), part(0, 0, 10), 250);
        rig.open(2, part(4, 0, 10), 300).unwrap();
        assert_eq!(rig.regions(), [0, 3, 4]);
        rig.grants.close_peer(PeerId(2));
        assert_eq!(rig.regions(), [0, 3]);
        rig.grants.revoke(RegionId(0)).unwrap();
        assert_eq!(rig.regions(), [3]);
        // As many as there may be.
        let mut rig = Rig::new(u64::MAX, 2);
        for region in 0..5 {
            rig.open(1, part(region, 0, 10), 250).unwrap();
            rig.grants.end(PeerId(1), part(region, 0, 10), 250);
        }
        assert_eq!(rig.regions(), [3, 4]);
    }

    #[test]
    fn what_messages_use_stays_and_the_next_one_is_refused() {
        let mut rig = Rig::new(1000, 16);
        rig.open(1, part(0, 0, 10), 500).unwrap();
        rig.open(1, part(0, 0, 10), 500).unwrap();
        rig.open(1, part(1, 0, 10), 500).unwrap();
        rig.grants.end(PeerId(1), part(0, 0, 10), 500);
        let error = rig.open(2, part(2, 0, 10), 500).unwrap_err().to_string();
        assert!(error.contains("no room to open a buffer of 10 bytes"), "{error}");
        assert!(error.contains("2 buffers of 1000 bytes"), "{error}");
        assert_eq!(rig.regions(), [0, 1], "another message uses it");
        rig.grants.end(PeerId(1), part(0, 0, 10), 500);
        rig.open(2, part(2, 0, 10), 500).unwrap();
        assert_eq!(rig.regions(), [1, 2]);
        // An end too many counts for nobody.
        rig.grants.end(PeerId(1), part(0, 0, 10), 500);
    }

    #[test]
    fn where_there_is_no_room_for_a_window_the_buffer_alone_is_opened() {
        let mut rig = Rig::new(W + 1000, 16);
        let total = 10 * W;
        assert_eq!(rig.open(1, part(0, 0, 10), total).unwrap(), (0, W));
        for _ in 0..2 {
            assert_eq!(rig.open(2, part(0, 30, 900), total).unwrap(), (30, 900));
        }
        assert!(rig.open(3, part(0, 0, 200), total).is_err());
        // The first has ended, the window is free: who has the narrow key goes on with it.
        rig.grants.end(PeerId(1), part(0, 0, 10), total);
        assert_eq!(rig.open(2, part(0, 30, 900), total).unwrap(), (30, 900));
        for _ in 0..3 {
            rig.grants.end(PeerId(2), part(0, 30, 900), total);
        }
        assert_eq!(rig.open(2, part(0, 1000, 10), total).unwrap(), (0, W));
        assert_eq!(rig.regions(), [0, 0]);
    }

    #[test]
    fn a_message_that_is_alone_is_served_however_long_it_is() {
        let mut rig = Rig::new(1000, 16);
        rig.open(1, part(0, 0, 10), 600).unwrap();
        assert!(rig.open(1, part(1, 0, 5000), 5000).is_err());
        rig.grants.end(PeerId(1), part(0, 0, 10), 600);
        assert_eq!(rig.open(1, part(1, 0, 5000), 5000).unwrap(), (0, 5000));
        assert_eq!(rig.regions(), [1]);
        assert!(rig.open(1, part(0, 0, 10), 600).is_err());
    }

    #[test]
    fn a_system_with_less_room_than_the_limit_gets_idle_keys_back() {
        let mut rig = Rig::new(u64::MAX, 16);
        rig.world.room.set(Some(2));
        for region in 0..4 {
            rig.open(1, part(region, 20, 10), 250).unwrap();
            rig.grants.end(PeerId(1), part(region, 20, 10), 250);
        }
        rig.open(1, part(7, 20, 10), 250).unwrap();
        rig.open(1, part(8, 20, 10), 250).unwrap();
        let error = rig.open(1, part(9, 20, 10), 250).unwrap_err();
        assert!(matches!(error, PostError::Transport { op: "fi_mr_reg", .. }), "{error}");
        assert_eq!(rig.regions(), [7, 8]);
    }

    #[test]
    fn keys_that_the_library_keeps_count_until_it_lets_go() {
        let mut rig = Rig::new(1000, 16);
        rig.open(1, part(0, 0, 10), 600).unwrap();
        rig.grants.end(PeerId(1), part(0, 0, 10), 600);
        rig.world.refuses.set(true);
        let error = rig.open(1, part(1, 0, 10), 600).unwrap_err().to_string();
        assert!(error.contains("busy"), "{error}");
        assert!(rig.grants.revoke(RegionId(0)).is_err());
        rig.grants.close_peer(PeerId(1));
        assert_eq!(rig.regions(), [0]);
        assert!(rig.grants.revoke(RegionId(0)).is_err(), "its memory must stay mapped");
        rig.world.refuses.set(false);
        rig.grants.revoke(RegionId(0)).unwrap();
        assert_eq!(rig.regions(), []);
    }
}
