//! Encodes the description of a side's queue pairs that it sends to the peer.
//!
//! ```text
//! 0 version  1 link  2 queue pairs  3 signals
//! then per queue pair, 40 bytes, little-endian:
//! 0 queue pair u32   4 first packet u32   8 remote key u32   12 lid u16   14 mtu u8   15 responses u8
//! 16 gid [16]   32 receives u32   36 zero [4]
//! ```

use thiserror::Error;

use super::config::MAX_QUEUE_PAIRS;
use p2p_core::network::MAX_DETAIL_BYTES;

/// The properties of one queue pair that its peer needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct QueuePairAddress {
    /// Queue pair number.
    pub(super) number: u32,
    /// Packet sequence number of its first request.
    pub(super) first_packet: u32,
    /// Remote key of the slot on this queue pair's device. Fabrics have no slots: the field is then the index of the
    /// side's device, first or second.
    pub(super) remote_key: u32,
    /// InfiniBand local identifier; 0 on Ethernet.
    pub(super) lid: u16,
    /// Path MTU in the encoding of verbs: 1 is 256 bytes, 5 is 4096.
    pub(super) mtu: u8,
    /// Number of reads and atomics that the queue pair answers at the same time.
    pub(super) num_responses: u8,
    /// Global identifier.
    pub(super) gid: [u8; 16],
    /// Number of posted receives. Used only if flags travel as messages.
    pub(super) receives: u32,
    /// Index in this side's address table. It is not sent.
    pub(super) gid_index: u8,
}

/// Link layer of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Link {
    InfiniBand,
    Ethernet,
}

/// Mechanism that carries flags between slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Signals {
    Atomics,
    Messages,
}

/// A peer's description is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub(super) enum DetailError {
    #[error("{found} bytes, expected {expected}")]
    Length { found: usize, expected: usize },
    #[error("version {found}, this side speaks {VERSION}; use the same release on both sides")]
    Version { found: u8 },
    #[error("{found} queue pairs, expected 1 to {MAX_QUEUE_PAIRS}")]
    QueuePairs { found: u8 },
    #[error("`{field}` is {found:#x}, expected {expected}")]
    Value { field: &'static str, found: u64, expected: &'static str },
    #[error(
        "the peer's port is {found:?}, this one {own:?}; choose ports of one fabric on both sides"
    )]
    Link { found: Link, own: Link },
    #[error(
        "the peer's flags travel as {found:?}, this side's as {own:?}; set `signals` of the verbs settings \
         alike on both sides"
    )]
    Signals { found: Signals, own: Signals },
}

pub(super) fn encode(
    (link, signals): (Link, Signals),
    queue_pairs: &[QueuePairAddress],
) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEAD_BYTES + queue_pairs.len() * QUEUE_PAIR_BYTES);
    out.extend([VERSION, link as u8, queue_pairs.len() as u8, signals as u8]);
    for queue_pair in queue_pairs {
        out.extend(queue_pair.number.to_le_bytes());
        out.extend(queue_pair.first_packet.to_le_bytes());
        out.extend(queue_pair.remote_key.to_le_bytes());
        out.extend(queue_pair.lid.to_le_bytes());
        out.extend([queue_pair.mtu, queue_pair.num_responses]);
        out.extend(queue_pair.gid);
        out.extend(queue_pair.receives.to_le_bytes());
        out.extend([0; 4]);
    }
    out
}

pub(super) fn decode(
    (own, own_signals): (Link, Signals),
    bytes: &[u8],
) -> Result<Vec<QueuePairAddress>, DetailError> {
    let Some((head, queue_pairs)) = bytes.split_first_chunk::<HEAD_BYTES>() else {
        return Err(DetailError::Length { found: bytes.len(), expected: HEAD_BYTES });
    };
    let [version, link, num_queue_pairs, signals] = *head;
    if version != VERSION {
        return Err(DetailError::Version { found: version });
    }
    let found = match link {
        0 => Link::InfiniBand,
        1 => Link::Ethernet,
        _ => return Err(value("link", link.into(), "0 or 1")),
    };
    if found != own {
        return Err(DetailError::Link { found, own });
    }
    if !(1..=MAX_QUEUE_PAIRS).contains(&usize::from(num_queue_pairs)) {
        return Err(DetailError::QueuePairs { found: num_queue_pairs });
    }
    let found = match signals {
        0 => Signals::Atomics,
        1 => Signals::Messages,
        _ => return Err(value("signals", signals.into(), "0 or 1")),
    };
    if found != own_signals {
        return Err(DetailError::Signals { found, own: own_signals });
    }
    let expected = usize::from(num_queue_pairs) * QUEUE_PAIR_BYTES;
    if queue_pairs.len() != expected {
        return Err(DetailError::Length { found: bytes.len(), expected: HEAD_BYTES + expected });
    }
    queue_pairs
        .chunks_exact(QUEUE_PAIR_BYTES)
        .map(|queue_pair| decode_queue_pair(own, found, queue_pair))
        .collect()
}

fn decode_queue_pair(
    link: Link,
    signals: Signals,
    bytes: &[u8],
) -> Result<QueuePairAddress, DetailError> {
    let word =
        |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let mut gid = [0; 16];
    gid.copy_from_slice(&bytes[16..32]);
    let queue_pair = QueuePairAddress {
        number: word(0),
        first_packet: word(4),
        remote_key: word(8),
        lid: u16::from_le_bytes([bytes[12], bytes[13]]),
        mtu: bytes[14],
        num_responses: bytes[15],
        gid,
        receives: word(32),
        gid_index: 0,
    };
    // The fabric reserves two queue pair numbers.
    if !(2..1 << 24).contains(&queue_pair.number) {
        return Err(value("queue pair", queue_pair.number.into(), "2 to 0xffffff"));
    }
    if queue_pair.first_packet >= 1 << 24 {
        return Err(value("first packet", queue_pair.first_packet.into(), "at most 0xffffff"));
    }
    if !(1..=5).contains(&queue_pair.mtu) {
        return Err(value("mtu", queue_pair.mtu.into(), "1 to 5"));
    }
    if queue_pair.num_responses == 0 {
        return Err(value("responses", 0, "at least 1"));
    }
    if signals == Signals::Messages && !(MIN_RECEIVES..1 << 31).contains(&queue_pair.receives) {
        return Err(value("receives", queue_pair.receives.into(), "22 to 0x7fffffff"));
    }
    match link {
        Link::InfiniBand if queue_pair.lid == 0 && gid == [0; 16] => {
            Err(value("lid", 0, "an address; is a subnet manager running?"))
        }
        Link::Ethernet if gid == [0; 16] => Err(value("gid", 0, "an address")),
        _ => Ok(queue_pair),
    }
}

const fn value(field: &'static str, found: u64, expected: &'static str) -> DetailError {
    DetailError::Value { field, found, expected }
}

/// Minimum number of receives with which messages make progress, even for a put that is spread over all queue
/// pairs.
pub(super) const MIN_RECEIVES: u32 = 22;
const _: () = assert!((MIN_RECEIVES as usize - 4) / 2 > MAX_QUEUE_PAIRS);
const VERSION: u8 = 2;
const HEAD_BYTES: usize = 4;
const QUEUE_PAIR_BYTES: usize = 40;
const _: () = assert!(HEAD_BYTES + MAX_QUEUE_PAIRS * QUEUE_PAIR_BYTES <= MAX_DETAIL_BYTES);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn queue_pair() -> QueuePairAddress {
        QueuePairAddress {
            number: 17,
            first_packet: 0xab_cdef,
            remote_key: 0x1234_5678,
            lid: 9,
            mtu: 3,
            num_responses: 16,
            gid: std::array::from_fn(|idx| idx as u8 + 1),
            receives: 22,
            gid_index: 0,
        }
    }

    #[test]
    fn what_is_written_is_read() {
        for link in [Link::InfiniBand, Link::Ethernet] {
            for num_queue_pairs in 1..=MAX_QUEUE_PAIRS {
                for signals in [Signals::Atomics, Signals::Messages] {
                    let way = (link, signals);
                    let queue_pairs: Vec<_> = (0..num_queue_pairs)
                        .map(|idx| QueuePairAddress { number: 17 + idx as u32, ..queue_pair() })
                        .collect();
                    assert_eq!(decode(way, &encode(way, &queue_pairs)), Ok(queue_pairs));
                }
            }
        }
    }

    #[test]
    fn bytes_that_make_no_sense_are_named() {
        let way = (Link::Ethernet, Signals::Atomics);
        let good = encode(way, &[queue_pair()]);
        let with = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            decode(way, &bytes).unwrap_err().to_string()
        };
        assert!(with(0, 9).contains("version 9"));
        assert!(with(1, 0).contains("InfiniBand"));
        assert!(with(1, 7).contains("`link` is 0x7"));
        assert!(with(2, 0).contains("0 queue pairs"));
        assert!(with(2, 9).contains("9 queue pairs"));
        assert!(with(2, 2).contains("expected 84"));
        assert!(with(3, 2).contains("`signals` is 0x2"));
        let other = with(3, 1);
        assert!(other.contains("as Messages, this side's as Atomics"), "{other}");
        let own = (Link::Ethernet, Signals::Messages);
        let (found, own_signals) = (Signals::Atomics, Signals::Messages);
        let expected = DetailError::Signals { found, own: own_signals };
        assert_eq!(decode(own, &good), Err(expected));
        let few = encode(own, &[QueuePairAddress { receives: 21, ..queue_pair() }]);
        assert!(decode(own, &few).unwrap_err().to_string().contains("receives"));
        assert!(with(7, 1).contains("queue pair"));
        assert!(with(11, 1).contains("first packet"));
        assert!(with(18, 0).contains("mtu") && with(18, 6).contains("mtu"));
        assert!(with(19, 0).contains("responses"));
        let nowhere = encode(way, &[QueuePairAddress { gid: [0; 16], ..queue_pair() }]);
        assert!(decode(way, &nowhere).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = decode((Link::Ethernet, Signals::Messages), &bytes);
            if let Ok(queue_pairs) = decode((Link::InfiniBand, Signals::Atomics), &bytes) {
                prop_assert!(!queue_pairs.is_empty() && queue_pairs.len() <= MAX_QUEUE_PAIRS);
            }
        }
    }
}
