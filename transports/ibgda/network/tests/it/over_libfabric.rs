//! Pairs whose hosts are joined by libfabric, with queues on a NIC in software. Both sides join, and signs of life
//! arrive. A dropped pair frees everything, although no thread drives its endpoints.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::rig::{
    PATIENCE, check_drivers, host_layout, join_sides, nic, open_sides, own_word, sides_of, turn,
    until,
};
use ibgda::QueueConfig;
use kernels::slots::DeviceSide;
use libfabric_transport::FabricNetwork;
use p2p_core::TransportKind;
use p2p_core::endpoint::Endpoint;
use switchyard_ibgda_network::{DeviceConfig, DeviceNetwork};

const REQUEST_BYTES: u64 = 8 << 20;
const RESPONSE_BYTES: u64 = 4 << 20;
/// A quarter of the memory of ten pairs of these slots.
const KEPT_KIB: u64 = 10 * (REQUEST_BYTES + RESPONSE_BYTES) / 1024 / 4;
/// Time in which only the library's own threads work for a dropped pair. It exceeds the 5 s for which a pair is
/// remembered whose peer sends no farewell.
const AT_ONCE: Duration = Duration::from_secs(20);
const NUM_QUEUES: usize = 2;

fn network() -> Option<DeviceNetwork> {
    let inner = match FabricNetwork::open("tcp;ofi_rxm") {
        Ok(inner) => inner,
        Err(error) => {
            test_support::skip("libfabric", &error.to_string());
            return None;
        }
    };
    let queue = QueueConfig { depth: 128, ..QueueConfig::default() };
    let config = DeviceConfig {
        num_queues: NUM_QUEUES,
        queue,
        wait_limit: PATIENCE,
        ..DeviceConfig::default()
    };
    Some(DeviceNetwork::new(Arc::new(inner), nic(), config))
}

fn sides() -> [DeviceSide; 2] {
    sides_of(REQUEST_BYTES, RESPONSE_BYTES)
}

/// Resources of this process.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Holdings {
    queue_pairs: Vec<u32>,
    num_registrations: usize,
    num_descriptors: usize,
    /// KiB of memory that can be written, touched or not.
    mapped_kib: u64,
}

impl Holdings {
    /// Allocators keep some memory, and libc keeps the stacks of threads that ended (2 MiB each), several at a
    /// time on a busy host. A leak in repeated steps would exceed that in the end.
    fn is(&self, other: &Self) -> bool {
        let alike = Self { mapped_kib: other.mapped_kib, ..self.clone() };
        alike == *other && self.mapped_kib <= other.mapped_kib + KEPT_KIB
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

/// Bytes of a line such as `7f0000000000-7f0000001000 rw-p …`.
fn writable_bytes(line: &str) -> Option<u64> {
    let (range, rest) = line.split_once(' ')?;
    let (begin, end) = range.split_once('-')?;
    let address = |text| u64::from_str_radix(text, 16).ok();
    rest.starts_with("rw").then_some(address(end)? - address(begin)?)
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
    let [(client, client_pair), (server, server_pair)] = join_sides(open_sides(networks, &sides()));
    assert_eq!(holdings().queue_pairs.len(), num_others + 2 * (NUM_QUEUES + 1));
    for joined in [&client, &server] {
        assert_eq!(joined.endpoint.kind(), TransportKind::Ibgda);
    }
    let remote = [&client_pair, &server_pair].map(|pair| pair.as_remote().expect("a remote path"));
    for (from, to) in [(remote[0], &server_pair), (remote[1], &client_pair)] {
        from.show_life(64).expect("in service");
        until("a sign of life", || own_word(to, 64) != 0);
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

/// Resources held once the library has made its threads and tables, and allocators have their caches.
fn warm_up(networks: [&DeviceNetwork; 2]) -> Holdings {
    for turn in 0..4 {
        join_and_leave(networks, turn);
    }
    std::thread::sleep(Duration::from_millis(200));
    holdings()
}

#[test]
fn pairs_that_nobody_drives_give_back_at_once_what_they_had() {
    let _turn = turn();
    let (Some(near), Some(far)) = (network(), network()) else { return };
    let networks = [&near, &far];
    let before = warm_up(networks);
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
    let before = warm_up(networks);
    for _ in 0..10 {
        drop(open_sides(networks, &sides()));
        given_back(&before, "two sides");
        let [client, server] = open_sides(networks, &sides());
        let mut theirs = server.description();
        theirs.detail[0] ^= 1;
        client.join_device(&theirs).map(drop).expect_err("no detail");
        drop(server);
        given_back(&before, "a side that could not join");
    }
    // A side that joins one which is gone by then. No message says that the other will never write. So libfabric's
    // transport reserves the addresses of the host's slot for good, without pages behind them.
    for _ in 0..3 {
        let [client, server] = open_sides(networks, &sides());
        let theirs = server.description();
        drop(server);
        drop(client.join_device(&theirs));
    }
    let host_slot = host_layout(networks[0], &sides()[0]).slot_bytes() as u64;
    let with_addresses =
        Holdings { mapped_kib: before.mapped_kib + 3 * host_slot / 1024, ..before };
    given_back(&with_addresses, "a side whose peer is gone");
    check_drivers();
}
