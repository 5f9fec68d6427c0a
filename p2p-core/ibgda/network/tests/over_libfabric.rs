//! Pairs whose hosts are joined by libfabric, with queues on a NIC in software: both sides come together, signs
//! of life arrive, and whatever a pair had is given back when it goes, although nobody drives its endpoints.

#[path = "../../../../tests/src/skip.rs"]
mod skip;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ibgda::{Nic, NicConfig, QueueConfig};
use ibgda_network::{DeviceConfig, DeviceNetwork};
use kernels::gpu::Gpu;
use p2p_core::TransportKind;
use p2p_core::backend::libfabric::FabricNetwork;
use p2p_core::bootstrap::{DevicePair, DeviceSide};
use p2p_core::endpoint::Endpoint;
use p2p_core::network::{Joined, Network, OpenSide, Route};

const REQUEST_BYTES: u64 = 8 << 20;
const RESPONSE_BYTES: u64 = 4 << 20;
const ROUTE: Route =
    Route { local: IpAddr::V4(Ipv4Addr::LOCALHOST), remote: IpAddr::V4(Ipv4Addr::LOCALHOST) };
const PATIENCE: Duration = Duration::from_secs(60);
/// In which nothing but the library's own threads work for a pair that is gone: above the 5 s for which a pair is
/// remembered whose peer says no farewell.
const AT_ONCE: Duration = Duration::from_secs(20);
const NUM_QUEUES: usize = 2;

/// What a process holds is counted.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn network() -> Option<DeviceNetwork> {
    let inner = match FabricNetwork::open("tcp;ofi_rxm") {
        Ok(inner) => inner,
        Err(error) => {
            skip::skip("libfabric", &error.to_string());
            return None;
        }
    };
    let libraries = softnic_verbs::libraries().expect("functions");
    // A NIC in software is in no list of addresses.
    let config = NicConfig { gid_idx: Some(0), ..NicConfig::default() };
    let nic = Nic::open(&libraries, &config).expect("a NIC");
    let queue = QueueConfig { depth: 128, ..QueueConfig::default() };
    let config = DeviceConfig {
        num_queues: NUM_QUEUES,
        queue,
        wait_limit: PATIENCE,
        ..DeviceConfig::default()
    };
    Some(DeviceNetwork::new(Arc::new(inner), nic, config))
}

fn sides() -> [DeviceSide; 2] {
    let gpu = Gpu::open_emulated(0).expect("a GPU in software");
    let side = |own_slot_bytes, peer_slot_bytes| {
        let (gpu, shape) = (gpu.clone(), b"alike".to_vec());
        DeviceSide { gpu, own_slot_bytes, peer_slot_bytes, shape }
    };
    [side(RESPONSE_BYTES, REQUEST_BYTES), side(REQUEST_BYTES, RESPONSE_BYTES)]
}

fn open(networks: [&DeviceNetwork; 2]) -> [Box<dyn OpenSide>; 2] {
    let [client, server] = sides();
    let layout = networks[0].device_layout(&client, 2).expect("a layout");
    [(networks[0], &client), (networks[1], &server)]
        .map(|(network, side)| network.open_device(&layout, ROUTE, side).expect("a side"))
}

fn join(networks: [&DeviceNetwork; 2]) -> [(Joined, DevicePair); 2] {
    let [client, server] = open(networks);
    let (of_client, of_server) = (client.description(), server.description());
    [
        client.join_device(&of_server).expect("the server's description"),
        server.join_device(&of_client).expect("the client's description"),
    ]
}

/// What this process holds.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Holdings {
    queue_pairs: Vec<u32>,
    num_registrations: usize,
    num_descriptors: usize,
    /// KiB of memory that can be written, touched or not.
    mapped_kib: u64,
}

impl Holdings {
    /// Allocators keep some memory, less than the smallest slot.
    fn is(&self, other: &Self) -> bool {
        let alike = Self { mapped_kib: other.mapped_kib, ..self.clone() };
        alike == *other && self.mapped_kib.abs_diff(other.mapped_kib) < RESPONSE_BYTES / 1024 / 2
    }
}

fn holdings() -> Holdings {
    let nic = softnic_verbs::nic().expect("a NIC").lock();
    let (queue_pairs, num_registrations) = (nic.queue_pairs(), nic.num_registrations());
    drop(nic);
    let num_descriptors = std::fs::read_dir("/proc/self/fd").expect("/proc").count();
    let maps = std::fs::read_to_string("/proc/self/maps").expect("/proc");
    let mapped_bytes: u64 = maps.lines().filter_map(writable_bytes).sum();
    Holdings { queue_pairs, num_registrations, num_descriptors, mapped_kib: mapped_bytes / 1024 }
}

/// Of a line as in `7f0000000000-7f0000001000 rw-p …`.
fn writable_bytes(line: &str) -> Option<u64> {
    let (range, rest) = line.split_once(' ')?;
    let (begin, end) = range.split_once('-')?;
    let address = |text| u64::from_str_radix(text, 16).ok();
    rest.starts_with("rw").then_some(address(end)? - address(begin)?)
}

fn own_word(pair: &DevicePair, offset: u64) -> u64 {
    let mut word = [0; 8];
    let gpu = Gpu::open_emulated(0).expect("a GPU in software");
    gpu.read(pair.own_memory(), offset, &mut word, Instant::now() + PATIENCE).expect("a word");
    u64::from_le_bytes(word)
}

/// Waits until as much is held as `expected`, and fails where more still is.
fn given_back(expected: &Holdings, what: &str) {
    let limit = Instant::now() + AT_ONCE;
    loop {
        let found = holdings();
        if found.is(expected) {
            return;
        }
        assert!(Instant::now() < limit, "{what}: {found:?}, expected {expected:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Joins a pair, has signs of life cross, and ends it in one of several orders.
fn join_and_leave(networks: [&DeviceNetwork; 2], turn: usize) {
    let num_others = holdings().queue_pairs.len();
    let [(client, client_pair), (server, server_pair)] = join(networks);
    assert_eq!(holdings().queue_pairs.len(), num_others + 2 * (NUM_QUEUES + 1));
    for joined in [&client, &server] {
        assert_eq!(joined.endpoint.kind(), TransportKind::Ibgda);
    }
    let remote = [&client_pair, &server_pair].map(|pair| pair.as_remote().expect("a way"));
    for (from, to) in [(remote[0], &server_pair), (remote[1], &client_pair)] {
        from.show_life(64).expect("in service");
        let limit = Instant::now() + PATIENCE;
        while own_word(to, 64) == 0 {
            assert!(Instant::now() < limit, "no sign of life");
            std::thread::sleep(Duration::from_millis(1));
        }
        from.health().expect("in service");
    }
    match turn % 4 {
        0 => drop((client, client_pair, server, server_pair)),
        1 => drop((server_pair, server, client_pair, client)),
        2 => {
            drop((client, client_pair));
            std::thread::sleep(Duration::from_millis(30));
            drop((server, server_pair));
        }
        _ => {
            drop((server, client));
            drop((client_pair, server_pair));
        }
    }
}

#[test]
fn pairs_that_nobody_drives_give_back_at_once_what_they_had() {
    let _turn = turn();
    let (Some(near), Some(far)) = (network(), network()) else { return };
    let networks = [&near, &far];
    // The library makes threads and tables, allocators keep what they were given once.
    for turn in 0..4 {
        join_and_leave(networks, turn);
    }
    std::thread::sleep(Duration::from_millis(200));
    let before = holdings();
    for turn in 0..40 {
        join_and_leave(networks, turn);
        given_back(&before, "a pair");
    }
    check_drivers();
}

#[test]
fn sides_that_never_become_pairs_leave_addresses_at_most() {
    let _turn = turn();
    let (Some(near), Some(far)) = (network(), network()) else { return };
    let networks = [&near, &far];
    for turn in 0..4 {
        join_and_leave(networks, turn);
    }
    std::thread::sleep(Duration::from_millis(200));
    let before = holdings();
    for _ in 0..10 {
        drop(open(networks));
        given_back(&before, "two sides");
        let [client, server] = open(networks);
        let mut theirs = server.description();
        theirs.detail[0] ^= 1;
        client.join_device(&theirs).map(drop).expect_err("no detail");
        drop(server);
        given_back(&before, "a side that could not join");
    }
    // One that joins a side which is gone by then: nobody says that the other will never write, so libfabric's
    // transport keeps the addresses of the host's slot to itself for good, without pages behind them.
    for _ in 0..3 {
        let [client, server] = open(networks);
        let theirs = server.description();
        drop(server);
        drop(client.join_device(&theirs));
    }
    let host_slot =
        networks[0].device_layout(&sides()[0], 2).expect("a layout").slot_bytes() as u64;
    let with_addresses =
        Holdings { mapped_kib: before.mapped_kib + 3 * host_slot / 1024, ..before };
    given_back(&with_addresses, "a side whose peer is gone");
    check_drivers();
}

fn check_drivers() {
    let violations = softnic_verbs::violations();
    assert!(violations.is_empty(), "{}", violations.join("; "));
}
