//! After warm-up, slots over libfabric allocate nothing, on neither side. The counting allocator counts for the
//! whole process, in which both sides live with the threads that drive them, so this test has a binary of
//! its own. What libfabric allocates is the C library's and is not counted.

#[path = "../../../tests/support/src/counting.rs"]
mod counting;
#[path = "../../../tests/support/src/skip.rs"]
mod skip;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use counting::PROCESS_ALLOCATIONS;
use p2p_core::endpoint::Progress;
use p2p_core::network::{Joined, Network, Route};
use p2p_core::{AnyEndpoint, Channel, SlotConfig, SlotKey, SlotLayout};
use switchyard_libfabric::FabricNetwork;

/// In messages, and by a write with a message behind it.
const SIZES: [usize; 3] = [8, 3000, 200_000];
const WARM_UP: usize = 200;
const ROUNDS: usize = 200;
const MAX_BATCHES: usize = 20;
const LIMIT: Duration = Duration::from_secs(60);

/// One test: what another one allocates would be counted.
#[test]
fn slots_allocate_nothing_after_warm_up() {
    // Over `shm` everything goes through another thread; over TCP only what the provider does not take at
    // once, for which a side gets room when that happens first. A message that comes before its writes is
    // kept in memory of its own, which is rare: some batches may be needed.
    for provider in ["shm", "tcp;ofi_rxm"] {
        let Some(mut rig) = Rig::open(provider) else { continue };
        rig.rounds(WARM_UP);
        let mut per_batch = Vec::with_capacity(MAX_BATCHES);
        while per_batch.last() != Some(&0) && per_batch.len() < MAX_BATCHES {
            per_batch.push(rig.rounds(ROUNDS));
        }
        rig.leave_open();
        assert_eq!(per_batch.last(), Some(&0), "{provider}: allocations {per_batch:?}");
        println!("{provider}: allocations per batch {per_batch:?}");
    }
}

/// Two sides of a pair, and what they exchange, made before anything is counted.
struct Rig {
    networks: [FabricNetwork; 2],
    near: Channel<AnyEndpoint>,
    far: Channel<AnyEndpoint>,
    bytes: Vec<u8>,
    found: Vec<u8>,
}

impl Rig {
    /// `None`, which is told, where the provider is not.
    fn open(provider: &str) -> Option<Self> {
        let open = || FabricNetwork::open(provider);
        let networks = match open().and_then(|a| Ok([a, open()?])) {
            Ok(networks) => networks,
            Err(error) => {
                skip::skip("libfabric", &error.to_string());
                return None;
            }
        };
        let (near, far) = pair(&networks[0], &networks[1]);
        let (bytes, found) = (vec![7; SIZES[2]], vec![0; SIZES[2]]);
        Some(Self { networks, near, far, bytes, found })
    }

    /// How often memory was allocated meanwhile.
    fn rounds(&mut self, num_rounds: usize) -> u64 {
        let before = PROCESS_ALLOCATIONS.load(Ordering::Relaxed);
        for _ in 0..num_rounds {
            round(&mut self.near, &mut self.far, &self.bytes, &mut self.found);
        }
        PROCESS_ALLOCATIONS.load(Ordering::Relaxed) - before
    }

    /// Within one process the library follows pointers into endpoints of `shm` that were closed: they stay,
    /// but their memory goes with the process.
    fn leave_open(self) {
        let own = format!("{}:", std::process::id());
        for entry in std::fs::read_dir("/dev/shm").unwrap() {
            let entry = entry.unwrap();
            if entry.file_name().to_string_lossy().starts_with(&own) {
                std::fs::remove_file(entry.path()).unwrap();
            }
        }
        std::mem::forget((self.near, self.far, self.networks));
    }
}

/// Frames of all sizes there and back.
fn round(
    a: &mut Channel<AnyEndpoint>,
    b: &mut Channel<AnyEndpoint>,
    bytes: &[u8],
    found: &mut [u8],
) {
    for len in SIZES {
        send(a, b, &bytes[..len], &mut found[..len]);
        send(b, a, &bytes[..len], &mut found[..len]);
    }
}

fn send(
    from: &mut Channel<AnyEndpoint>,
    to: &mut Channel<AnyEndpoint>,
    bytes: &[u8],
    found: &mut [u8],
) {
    let frame = eventually(from, to, |from, _| from.try_reserve().unwrap());
    from.write_view(&frame).put_bytes(0, bytes).unwrap();
    from.publish(frame, bytes.len()).unwrap();
    let frame = eventually(from, to, |_, to| to.try_next().unwrap());
    to.view(&frame).copy_to(0, found).unwrap();
    to.release().unwrap();
    assert!(found == bytes);
    found.fill(0);
}

/// Waits for `find` to find something, and drives.
fn eventually<T>(
    a: &mut Channel<AnyEndpoint>,
    b: &mut Channel<AnyEndpoint>,
    mut find: impl FnMut(&mut Channel<AnyEndpoint>, &mut Channel<AnyEndpoint>) -> Option<T>,
) -> T {
    let deadline = Instant::now() + LIMIT;
    loop {
        for side in [&*a, &*b] {
            side.endpoint().driver().unwrap().drive();
        }
        if let Some(found) = find(a, b) {
            return found;
        }
        assert!(Instant::now() < deadline, "nothing came");
        std::thread::yield_now();
    }
}

fn pair(a: &FabricNetwork, b: &FabricNetwork) -> (Channel<AnyEndpoint>, Channel<AnyEndpoint>) {
    let layout = SlotLayout::new(SlotConfig { slot_bytes: 1 << 20, num_frames: 2 }).unwrap();
    let route = Route { local: [127, 0, 0, 1].into(), remote: [127, 0, 0, 1].into() };
    let (a, b) = (a.open(&layout, route).unwrap(), b.open(&layout, route).unwrap());
    let (of_a, of_b) = (a.description(), b.description());
    let (a, b) = (a.join(&of_b).unwrap(), b.join(&of_a).unwrap());
    let channel = |side: Joined| Channel::new(side.endpoint, layout, side.slot, SlotKey).unwrap();
    (channel(a), channel(b))
}
