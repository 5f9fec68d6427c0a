//! Ids that client and server derive alike, and the decision which calls are sampled.
//!
//! Every frame has the number of its client and a sequence number. A client begins each call at a multiple of
//! [`SEQUENCES_PER_CALL`], so the sequence numbers of a call, its resends and its hedges share all but the low bits.
//! Client number and call number determine trace id, span ids and the sampling. With unequal ratios, the side with
//! the lower ratio samples a subset of the calls that the other side samples.

/// Sequence numbers that belong to one call. A call that needs more continues with those of the next one.
pub const SEQUENCES_PER_CALL: u64 = 1 << 10;

/// The number before the first sequence number of the call after the one with `sequence`.
#[must_use]
pub const fn next_call(sequence: u64) -> u64 {
    sequence | (SEQUENCES_PER_CALL - 1)
}

/// Number of the call that a sequence number belongs to.
#[must_use]
pub const fn call_of(sequence: u64) -> u64 {
    sequence / SEQUENCES_PER_CALL
}

/// Number of a server for [`frame_span`], from its name.
#[must_use]
pub fn server_key(name: &str) -> u64 {
    let words = name.as_bytes().chunks(8).map(|chunk| {
        let mut bytes = [0; 8];
        bytes[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(bytes)
    });
    words.fold(name.len() as u64, mix)
}

/// Number in place of the client's, for frames to a server on a GPU. Such a server knows the numbers of the frames of
/// each connection, and not the calls that they belong to.
#[must_use]
pub const fn connection(server_key: u64, client_id: u64, generation: u32) -> u64 {
    not_zero(mix(mix(mix(CONNECTION, server_key), client_id), generation as u64))
}

/// Trace id of a call.
#[must_use]
pub const fn trace(client_id: u64, call: u64) -> u128 {
    let (high, low) = (of_call(client_id, call, 1), of_call(client_id, call, 2));
    (high as u128) << 64 | low as u128
}

/// Id of the client's span of a call.
#[must_use]
pub const fn layer_span(client_id: u64, call: u64) -> u64 {
    of_call(client_id, call, 3)
}

/// Id of the client's span of a frame, the parent of the server's span.
#[must_use]
pub const fn frame_span(
    server_key: u64,
    client_id: u64,
    generation: u32,
    sequence: u64,
    frame_idx: u32,
) -> u64 {
    let numbers = (generation as u64) << 32 | frame_idx as u64;
    not_zero(mix(mix(mix(mix(0, server_key), client_id), sequence), numbers))
}

/// Id of the `part`th child of a span.
#[must_use]
pub const fn child_span(span: u64, part: u64) -> u64 {
    not_zero(mix(span, part))
}

/// Decides which calls are sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sampler {
    /// Calls with a smaller hash are sampled.
    threshold: u128,
}

/// A ratio out of range.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("a sample ratio of {found}: expected 0 to 1")]
pub struct SampleRatioError {
    /// The ratio.
    pub found: f64,
}

impl Sampler {
    /// Samples this share of all calls, 0 to 1.
    ///
    /// # Errors
    /// [`SampleRatioError`].
    pub fn new(ratio: f64) -> Result<Self, SampleRatioError> {
        if !(0.0..=1.0).contains(&ratio) {
            return Err(SampleRatioError { found: ratio });
        }
        Ok(Self { threshold: (ratio * 2f64.powi(64)) as u128 })
    }

    /// Returns true if the call is sampled.
    #[must_use]
    pub const fn samples(self, client_id: u64, call: u64) -> bool {
        (of_call(client_id, call, 0) as u128) < self.threshold
    }
}

const fn of_call(client_id: u64, call: u64, purpose: u64) -> u64 {
    let hash = mix(mix(mix(0, client_id), call), purpose);
    // Zero is no valid id. For the sampling one value more or less makes no difference.
    not_zero(hash)
}

/// One step of SplitMix64 (Steele, Lea and Flood, 2014) over the hash so far and a word.
const fn mix(hash: u64, word: u64) -> u64 {
    let mut z = (hash ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

const fn not_zero(id: u64) -> u64 {
    if id == 0 { 1 } else { id }
}

/// Start of the hash in [`connection`]. No purpose of [`of_call`].
const CONNECTION: u64 = 0x636f_6e6e;

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Peers of other versions derive the same ids: these values never change.
    #[test]
    fn the_ids_of_a_call_are_fixed() {
        assert_eq!(mix(0, 0), 0xe220_a839_7b1d_cdaf, "the first number of SplitMix64 with seed 0");
        let found = [
            format!("{:032x}", trace(7, 5)),
            format!("{:016x}", layer_span(7, 5)),
            format!("{:016x}", frame_span(server_key("server-0"), 7, 1, 5 << 10 | 1, 2)),
            format!("{:016x}", connection(server_key("server-0"), 7, 1)),
        ];
        assert_eq!(found, FIXED);
    }

    #[test]
    fn a_call_begins_at_its_own_sequence_numbers() {
        assert_eq!([next_call(0), next_call(1023), next_call(1024)], [1023, 1023, 2047]);
        assert_eq!([call_of(1023), call_of(1024), call_of(2047), call_of(2048)], [0, 1, 1, 2]);
    }

    #[test]
    fn ratios_hold_and_a_lower_ratio_samples_a_subset() {
        let client_id = rand::random::<u64>();
        let sampled = |ratio: f64| {
            let sampler = Sampler::new(ratio).unwrap();
            let calls = (0..200_000).filter(|&call| sampler.samples(client_id, call));
            calls.collect::<HashSet<u64>>()
        };
        assert!(sampled(0.0).is_empty());
        assert_eq!(sampled(1.0).len(), 200_000);
        let (few, many) = (sampled(0.01), sampled(0.1));
        assert!((1_700..2_300).contains(&few.len()), "client {client_id}: {}", few.len());
        assert!((19_000..21_000).contains(&many.len()), "client {client_id}: {}", many.len());
        assert!(few.is_subset(&many));
        for bad in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
            assert!(Sampler::new(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn ids_of_calls_frames_and_servers_differ() {
        let client_id = rand::random::<u64>();
        let traces: HashSet<u128> = (0..10_000).map(|call| trace(client_id, call)).collect();
        assert_eq!(traces.len(), 10_000);
        let mut spans = HashSet::new();
        for server in ["a", "b", "ab", "a long name of a server", "a long name of a servers"] {
            for sequence in 0..100 {
                for (generation, frame_idx) in [(1, 0), (1, 1), (2, 0), (2, 1)] {
                    let key = server_key(server);
                    spans.insert(frame_span(key, client_id, generation, sequence, frame_idx));
                }
            }
        }
        assert_eq!(spans.len(), 2000, "client {client_id}");
    }

    const FIXED: [&str; 4] = [
        "15a0d428ff02d32834ae76bf21690681",
        "ec4fee088277bccc",
        "99a021ad2d60407d",
        "5fe5af0be22275d5",
    ];
}
