//! What the tests and figures of many peers share: the transport by name, and what a process holds.

#![allow(dead_code, reason = "every test uses a part of it")]

pub mod crowd;

use std::io::Write;

use p2p_core::transports::{OpenNetworks, TransportSpec, Transports};

/// The transport under test: `SWITCHYARD_TEST_TRANSPORT`, written as for `--transport`, or shared
/// memory. `None` says that this host or build has no such transport, and has been reported as a skip.
pub fn transports() -> Option<Transports> {
    let name = std::env::var(TRANSPORT).unwrap_or_else(|_| "shm".to_owned());
    let spec: TransportSpec = name.parse().expect("a transport");
    match OpenNetworks::default().open(&spec) {
        Ok(transports) => Some(transports),
        Err(error) => {
            let required = std::env::var("SWITCHYARD_REQUIRE").unwrap_or_default();
            let is_required =
                required.split(',').any(|word| word == "all" || name.starts_with(word));
            assert!(required.is_empty() || !is_required, "{error}");
            println!("SKIPPED: {error}");
            if let Ok(log) = std::env::var("SWITCHYARD_SKIP_LOG") {
                let file = std::fs::OpenOptions::new().create(true).append(true).open(log);
                writeln!(file.expect("a log of skips"), "{name}\t{error}").expect("a line in it");
            }
            None
        }
    }
}

/// How many peers to try: as many as usual, or as `SWITCHYARD_TEST_PEERS` says.
pub fn wanted_peers(usual: usize) -> usize {
    std::env::var("SWITCHYARD_TEST_PEERS").map_or(usual, |text| text.parse().expect("a number"))
}

/// Variable that names the transport under test.
pub const TRANSPORT: &str = "SWITCHYARD_TEST_TRANSPORT";

/// Open descriptors of this process.
pub fn num_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("descriptors").count()
}

/// Mappings of this process.
pub fn num_mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps").expect("mappings").lines().count()
}

/// Memory of this process in bytes. A page that it maps twice counts once.
pub fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").expect("memory");
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:")).expect("Pss");
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().expect("a number") << 10
}
