//! Entry points for fuzz targets of the decoder that reads peers' bytes. Under fuzzing this module replaces the
//! whole backend, which needs a library.

#[allow(dead_code, reason = "only the number of lanes is asked for")]
#[path = "config.rs"]
mod config;
#[path = "detail.rs"]
mod detail;

use config::MAX_LANES;
use detail::{LaneAddress, Link, Signals, decode, encode};

const WAYS: [(Link, Signals); 3] = [
    (Link::InfiniBand, Signals::Atomics),
    (Link::Ethernet, Signals::Atomics),
    (Link::Ethernet, Signals::Messages),
];

/// Sample descriptions: of one queue pair, and of the maximum number.
#[must_use]
pub fn detail_samples() -> Vec<Vec<u8>> {
    let lane = LaneAddress {
        number: 17,
        first_packet: 18,
        remote_key: 19,
        lid: 20,
        mtu: 5,
        num_responses: 16,
        gid: [21; 16],
        receives: 22,
        gid_index: 0,
    };
    WAYS.iter().flat_map(|way| [1, MAX_LANES].map(|num| encode(*way, &vec![lane; num]))).collect()
}

/// Decodes bytes as a peer's description of its queue pairs. A valid description must survive encoding and decoding
/// unchanged.
pub fn check_detail(bytes: &[u8]) {
    for way in WAYS {
        if let Ok(lanes) = decode(way, bytes) {
            assert!((1..=MAX_LANES).contains(&lanes.len()));
            assert_eq!(decode(way, &encode(way, &lanes)), Ok(lanes));
        }
    }
}
