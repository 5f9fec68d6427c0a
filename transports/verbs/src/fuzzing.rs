//! Entry points for fuzz targets of the decoder that reads peers' bytes. Under fuzzing this module replaces the
//! whole backend, which needs a library.

#[allow(dead_code, reason = "only the number of queue pairs is asked for")]
#[path = "config.rs"]
mod config;
#[path = "detail.rs"]
mod detail;

use config::MAX_QUEUE_PAIRS;
use detail::{Link, QueuePairAddress, Signals, decode, encode};

const WAYS: [(Link, Signals); 3] = [
    (Link::InfiniBand, Signals::Atomics),
    (Link::Ethernet, Signals::Atomics),
    (Link::Ethernet, Signals::Messages),
];

/// Sample descriptions: of one queue pair, and of the maximum number.
#[must_use]
pub fn detail_samples() -> Vec<Vec<u8>> {
    let queue_pair = QueuePairAddress {
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
    WAYS.iter()
        .flat_map(|way| [1, MAX_QUEUE_PAIRS].map(|num| encode(*way, &vec![queue_pair; num])))
        .collect()
}

/// Decodes bytes as a peer's description of its queue pairs. A valid description must survive encoding and decoding
/// unchanged.
pub fn check_detail(bytes: &[u8]) {
    for way in WAYS {
        if let Ok(queue_pairs) = decode(way, bytes) {
            assert!((1..=MAX_QUEUE_PAIRS).contains(&queue_pairs.len()));
            assert_eq!(decode(way, &encode(way, &queue_pairs)), Ok(queue_pairs));
        }
    }
}
