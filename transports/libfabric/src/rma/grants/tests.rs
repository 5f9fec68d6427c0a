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

/// Memory that the keys of a test open, and whether the library revokes them.
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

    /// Grants a part of a registration of `total` bytes. Returns the start and length of the
    /// window.
    fn open(&mut self, peer: u32, of: LocalSegment, total: u64) -> Result<(u64, u64), PostError> {
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
        // Idle keys are in the queue once, in order.
        let Grants { entries, idle, .. } = &self.grants;
        let queue = idle.queue.iter();
        let in_queue =
            queue.filter(|(since, at)| entries.get(at).is_some_and(|h| h.idle_since == *since));
        let mut unused: Vec<_> = entries.iter().filter(|(_, grant)| grant.num_users == 0).collect();
        unused.sort_by_key(|(_, grant)| grant.idle_since);
        assert!(in_queue.map(|(_, at)| at).eq(unused.iter().map(|(at, _)| *at)));
        let unused_bytes: u64 = unused.iter().map(|((_, window), _)| window.bytes).sum();
        assert_eq!((idle.num_keys, idle.bytes), (unused.len(), unused_bytes));
        assert!(idle.queue.len() <= 2 * entries.len() + MAX_STALE + 1);
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
    // Used again, so it is not the next to be evicted.
    rig.open(1, part(0, 0, 10), 250).unwrap();
    rig.grants.end(PeerId(1), part(0, 0, 10), 250);
    rig.open(2, part(4, 0, 10), 300).unwrap();
    assert_eq!(rig.regions(), [0, 3, 4]);
    rig.grants.close_peer(PeerId(2));
    assert_eq!(rig.regions(), [0, 3]);
    rig.grants.revoke(RegionId(0)).unwrap();
    assert_eq!(rig.regions(), [3]);
    // As many as the limit allows.
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
    // An extra end is ignored.
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
    // The first message has ended and the window is free: the narrow key stays in use.
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
    assert_eq!(rig.regions(), [0; 0]);
}

/// Keys that an application opened over hours are revoked while a message waits.
#[test]
fn many_idle_keys_are_taken_back_at_once() {
    struct Light;

    impl Key for Light {
        fn revoke(&mut self) -> Result<(), CallError> {
            Ok(())
        }
    }

    const NUM: u32 = 100_000;
    let limits = Limits { bytes: u64::from(NUM) * 10, num_keys: usize::MAX };
    let begin = std::time::Instant::now();
    for is_out_of_memory in [true, false] {
        let mut grants = Grants { limits, ..Grants::default() };
        for region in 0..NUM {
            grants.open(PeerId(1), part(region, 0, 10), 10, |_| Ok(Light)).unwrap();
            grants.end(PeerId(1), part(region, 0, 10), 10);
        }
        let (mut fails, bytes) = (is_out_of_memory, u64::from(NUM) * 10);
        let total = if is_out_of_memory { 10 } else { bytes };
        let of = part(NUM, 0, total);
        let opened = grants.open(PeerId(1), of, total, |_| match std::mem::take(&mut fails) {
            true => {
                let detail = "no room".to_owned();
                Err(PostError::Transport { op: "fi_mr_reg", code: ENOMEM, detail })
            }
            false => Ok(Light),
        });
        assert_eq!(opened.map(|(window, _)| window.bytes).unwrap(), total);
        assert_eq!((grants.entries.len(), grants.bytes), (1, total));
    }
    assert!(begin.elapsed() < std::time::Duration::from_secs(20), "{:?}", begin.elapsed());
}

/// Keys that are used again and again leave no entries behind.
#[test]
fn what_is_used_again_counts_once() {
    let mut rig = Rig::new(1000, 16);
    for round in 0..10 * MAX_STALE as u32 {
        let of = part(round % 4, 0, 10);
        assert_eq!(rig.open(1, of, 250).unwrap(), (0, 250));
        assert_eq!(rig.regions().len(), 4.min(round as usize + 1));
        rig.grants.end(PeerId(1), of, 250);
        rig.regions();
    }
    // The last round was of region 3, so that of region 0 is the oldest.
    rig.open(1, part(9, 0, 10), 250).unwrap();
    assert_eq!(rig.regions(), [1, 2, 3, 9]);
    rig.grants.close_peer(PeerId(1));
    assert_eq!(rig.regions(), [0; 0]);
}
