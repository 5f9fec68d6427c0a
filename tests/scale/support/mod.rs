//! Shared parts of the tests and figures of many peers: transport selection, and the resources of a process.

#![allow(dead_code, reason = "examples of bench/harness use a part of it")]

pub mod crowd;
pub mod engines;

use p2p_core::transports::{OpenNetworks, TransportSpec, Transports};
use verbs_transport::VerbsConfig;

/// The transport under test: `SWITCHYARD_TEST_TRANSPORT`, written as for `--transport`, or shared
/// memory. `None`, with a skip, if this host or build has no such transport.
pub fn transports() -> Option<Transports> {
    let name = std::env::var(TRANSPORT).unwrap_or_else(|_| "shm".to_owned());
    let spec: TransportSpec = name.parse().expect("a transport");
    let networks = OpenNetworks::default()
        .with(verbs_transport::opener(VerbsConfig::default()))
        .with(libfabric_transport::opener());
    match { networks }.open(&spec) {
        Ok(transports) => Some(transports),
        Err(error) => {
            // A name such as `libfabric:tcp;ofi_rxm` needs libfabric.
            let resource = name.split(':').next().unwrap_or_default();
            test_support::skip(resource, &error.to_string());
            None
        }
    }
}

/// Number of peers to try: `SWITCHYARD_TEST_PEERS` if it is set, else `usual`.
pub fn wanted_peers(usual: usize) -> usize {
    std::env::var("SWITCHYARD_TEST_PEERS").map_or(usual, |text| text.parse().expect("a number"))
}

/// Variable that names the transport under test.
pub const TRANSPORT: &str = "SWITCHYARD_TEST_TRANSPORT";

/// Open descriptors of this process, in all its tables.
pub fn num_descriptors() -> usize {
    test_support::descriptors::num_descriptors("self").expect("descriptors")
}

/// Threads of this process.
pub fn num_threads() -> usize {
    std::fs::read_dir("/proc/self/task").expect("threads").count()
}

/// Processor time of this process so far, in seconds: in user mode, and in the kernel on its behalf.
pub fn cpu_seconds() -> (f64, f64) {
    let text = std::fs::read_to_string("/proc/self/stat").expect("times");
    // The process name comes before and may hold any character, so the last parenthesis ends it.
    let (_, rest) = text.rsplit_once(')').expect("a name");
    let mut ticks = rest.split_whitespace().skip(11).map(|word| word.parse::<f64>());
    let mut next = || ticks.next().expect("a time").expect("a number") / TICKS_PER_SECOND;
    (next(), next())
}

/// `USER_HZ`, the same on every system that Linux runs on today.
const TICKS_PER_SECOND: f64 = 100.0;

/// Mappings of this process.
pub fn num_mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps").expect("mappings").lines().count()
}

/// Mappings of slots in shared memory.
pub fn num_shared_slots() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("mappings");
    maps.lines().filter(|line| line.contains("memfd:switchyard-slot")).count()
}

/// Resident memory of this process in bytes. A page mapped twice counts once. The allocator first returns its free
/// memory, because its amount depends on the threads that ran concurrently.
pub fn resident_bytes() -> u64 {
    // SAFETY: the call returns free heap memory to the system.
    unsafe { libc::malloc_trim(0) };
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").expect("memory");
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:")).expect("Pss");
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().expect("a number") << 10
}
