//! Pairs on one device, and memory with known contents.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use p2p_core::endpoint::{Endpoint, PostError};
use p2p_core::fabric::{Access, Completion, Fabric, PeerId, RegionId};
use p2p_core::network::{JoinedSide, Network, Route};
use p2p_core::{AnyEndpoint, Region, RemoteRange, SlotConfig, SlotKey, SlotLayout};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use switchyard_verbs::{VerbsConfig, VerbsFabric, VerbsNetwork, device_names};

pub const LIMIT: Duration = Duration::from_secs(30);
pub const ROUTE: Route = Route { local: LOCALHOST, remote: LOCALHOST };
const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Sends random bytes each way and compares.
pub fn exchange(a: &mut JoinedSide, b: &mut JoinedSide) {
    let mut rng = seeded();
    let (slot_a, slot_b) = (a.slot.clone(), b.slot.clone());
    for (from, to) in [(a, &slot_b), (b, &slot_a)] {
        let mut expected = vec![0; 50_000];
        rng.fill_bytes(&mut expected);
        let source = Region::anonymous(expected.len()).unwrap();
        from.endpoint.register(&source).unwrap();
        store(&source, &expected);
        put(&mut from.endpoint, &source, 4096, expected.len()).unwrap();
        let flag = to.len() - 4096;
        let before = word(to, flag);
        from.endpoint.add_flag(RemoteRange { key: SlotKey, offset: flag, len: 8 }, 3).unwrap();
        let deadline = Instant::now() + LIMIT;
        while word(to, flag) != before + 3 {
            assert!(Instant::now() < deadline, "no flag");
            std::thread::yield_now();
        }
        assert_eq!(&bytes_of(to)[4096..4096 + expected.len()], &expected[..]);
        from.endpoint.quiet(Instant::now() + LIMIT).unwrap();
    }
}

pub fn network(queue_pairs_per_port: u32) -> VerbsNetwork {
    let config = VerbsConfig {
        queue_pairs_per_port,
        stripe_bytes: 16 << 10,
        // A death is noticed within a second, and emulation may be slow.
        ack_timeout: 16,
        retry_count: 3,
        stall_timeout_ms: 4_000,
        ..Default::default()
    };
    VerbsNetwork::open(config).unwrap()
}

pub fn fabric() -> VerbsFabric {
    VerbsFabric::open(VerbsConfig { ack_timeout: 16, retry_count: 3, ..Default::default() })
        .unwrap()
}

pub fn pair(network: &VerbsNetwork, layout: &SlotLayout) -> (JoinedSide, JoinedSide) {
    let (a, b) = (network.open(layout, ROUTE).unwrap(), network.open(layout, ROUTE).unwrap());
    let (at_a, at_b) = (a.description(), b.description());
    (a.join(&at_b).unwrap(), b.join(&at_a).unwrap())
}

pub fn join(a: &mut VerbsFabric, b: &mut VerbsFabric) -> (PeerId, PeerId) {
    let ((at_a, from_a), (at_b, from_b)) = (a.open_peer_on(ROUTE).unwrap(), b.open_peer().unwrap());
    assert!(a.join_peer(at_a, &from_b[..10]).is_err());
    a.join_peer(at_a, &from_b).unwrap();
    assert!(a.join_peer(at_a, &from_b).is_err());
    b.join_peer(at_b, &from_a).unwrap();
    (at_a, at_b)
}

pub fn register(fabric: &mut VerbsFabric, region: &Region, access: Access) -> RegionId {
    // SAFETY: the tests keep their regions longer than the registrations are in use.
    unsafe { fabric.register(region.as_ptr(), region.len(), access) }.unwrap()
}

pub fn wait_one(fabric: &mut VerbsFabric) -> Completion {
    // Returns one completion at a time and keeps the rest, so that none is lost between calls.
    thread_local!(static LEFT: std::cell::RefCell<Vec<Completion>> = const { std::cell::RefCell::new(Vec::new()) });
    LEFT.with_borrow_mut(|left| {
        let deadline = Instant::now() + LIMIT;
        while left.is_empty() {
            assert!(Instant::now() < deadline, "nothing completes");
            fabric.poll(left);
            std::thread::yield_now();
        }
        left.remove(0)
    })
}

pub fn put(
    endpoint: &mut AnyEndpoint,
    source: &Region,
    offset: usize,
    len: usize,
) -> Result<(), PostError> {
    let remote = RemoteRange { key: SlotKey, offset, len };
    // SAFETY: the tests write sources only after a quiet or a failure.
    unsafe { endpoint.put(remote, source.range(0, len).unwrap()) }
}

pub fn put_now(endpoint: &mut AnyEndpoint, source: &Region) -> Result<(), PostError> {
    put(endpoint, source, 0, 64)
}

pub fn layout(slot_bytes: usize) -> SlotLayout {
    SlotLayout::new(SlotConfig { slot_bytes, num_frames: 2 }).unwrap()
}

pub fn word(region: &Region, offset: usize) -> u64 {
    // SAFETY: aligned, in range, mapped, and only added to by the device.
    let word = unsafe { AtomicU64::from_ptr(region.as_ptr().add(offset).as_ptr().cast()) };
    word.load(Ordering::Acquire)
}

pub fn bytes_of(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    // SAFETY: in range, not overlapping; the device is not writing at this point of the tests.
    unsafe {
        std::ptr::copy_nonoverlapping(region.as_ptr().as_ptr(), bytes.as_mut_ptr(), bytes.len());
    }
    bytes
}

pub fn store(region: &Region, bytes: &[u8]) {
    assert!(bytes.len() <= region.len());
    // SAFETY: in range, not overlapping; the device is not reading at this point of the tests.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), region.as_ptr().as_ptr(), bytes.len());
    }
}

pub fn seeded() -> StdRng {
    let seed = std::env::var("SWITCHYARD_TEST_SEED")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or_else(rand::random);
    println!("seed {seed} (set SWITCHYARD_TEST_SEED to repeat)");
    StdRng::seed_from_u64(seed)
}

/// True if there is a device. Otherwise reports a skip.
pub fn is_possible() -> bool {
    if !device_names().is_empty() {
        return true;
    }
    let error = VerbsNetwork::open(VerbsConfig::default()).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("this host has no RDMA device") && text.lines().count() == 1, "{text}");
    test_support::skip("rdma", &text);
    false
}

/// A counter of the first device's first port.
pub fn counter(name: &str) -> Option<u64> {
    let ports = format!("/sys/class/infiniband/{}/ports/1", device_names().first()?);
    let found = ["hw_counters", "counters"]
        .map(|folder| std::fs::read_to_string(format!("{ports}/{folder}/{name}")).ok());
    found.into_iter().flatten().next()?.trim().parse().ok()
}

/// Returns the counter once it is at least `least`. The kernel reads a device's counters every ten milliseconds.
pub fn counter_from(name: &str, least: u64) -> u64 {
    let deadline = Instant::now() + LIMIT;
    loop {
        let found = counter(name).expect("a counter that was there before");
        if found >= least {
            return found;
        }
        assert!(Instant::now() < deadline, "{name} is {found}, expected {least} or more");
        std::thread::sleep(Duration::from_millis(5));
    }
}
