//! After warm-up, slots over libfabric allocate nothing on either side. The counting allocator
//! covers the whole process, with both sides and the threads that drive them, so this test has a
//! binary of its own. Allocations of libfabric use the C library's allocator and are not counted.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use test_support::allocations::{CountingAllocator, PROCESS_ALLOCATIONS};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;
use p2p_core::endpoint::Progress;
use p2p_core::network::{JoinedSide, Network, Route};
use p2p_core::{AnyEndpoint, Channel, SlotConfig, SlotKey, SlotLayout};
use switchyard_libfabric::FabricNetwork;

/// In messages, and by a write with a message behind it.
const SIZES: [usize; 3] = [8, 3000, 200_000];
const WARM_UP: usize = 200;
const ROUNDS: usize = 200;
const MAX_BATCHES: usize = 20;
const LIMIT: Duration = Duration::from_secs(60);

/// One test, because allocations of a second one would be counted.
#[test]
fn slots_allocate_nothing_after_warm_up() {
    // Over `shm` all operations go through another thread. Over TCP only those do that the provider
    // refuses at first, and a side allocates room for them once. A message that arrives before its
    // writes is kept in memory of its own. That is rare, so some batches may be needed.
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

/// Two sides of a pair and the frames that they exchange, allocated before the count begins.
struct Rig {
    networks: [FabricNetwork; 2],
    local: Channel<AnyEndpoint>,
    remote: Channel<AnyEndpoint>,
    bytes: Vec<u8>,
    found: Vec<u8>,
}

impl Rig {
    /// `None`, with a skip message, if the provider is missing.
    fn open(provider: &str) -> Option<Self> {
        let open = || FabricNetwork::open(provider);
        let networks = match open().and_then(|a| Ok([a, open()?])) {
            Ok(networks) => networks,
            Err(error) => {
                test_support::skip("libfabric", &error.to_string());
                return None;
            }
        };
        let (local, remote) = pair(&networks[0], &networks[1]);
        let (bytes, found) = (vec![7; SIZES[2]], vec![0; SIZES[2]]);
        Some(Self { networks, local, remote, bytes, found })
    }

    /// Number of allocations in `num_rounds` rounds.
    fn rounds(&mut self, num_rounds: usize) -> u64 {
        let before = PROCESS_ALLOCATIONS.load(Ordering::Relaxed);
        for _ in 0..num_rounds {
            round(&mut self.local, &mut self.remote, &self.bytes, &mut self.found);
        }
        PROCESS_ALLOCATIONS.load(Ordering::Relaxed) - before
    }

    /// Within one process the library follows pointers into closed endpoints of `shm`. So they are
    /// never closed, but their memory is removed with the process.
    fn leave_open(self) {
        let own = format!("{}:", std::process::id());
        for entry in std::fs::read_dir("/dev/shm").unwrap() {
            let entry = entry.unwrap();
            if entry.file_name().to_string_lossy().starts_with(&own) {
                std::fs::remove_file(entry.path()).unwrap();
            }
        }
        std::mem::forget((self.local, self.remote, self.networks));
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

/// Drives until `find` returns a value.
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
    let channel =
        |side: JoinedSide| Channel::new(side.endpoint, layout, side.slot, SlotKey).unwrap();
    (channel(a), channel(b))
}
