//! Frames with random damage. Decoders never panic, never read beyond the frame, and detect every change of
//! a byte that a checksum covers.

use crate::common::guarded::Guarded;
use crate::common::{Answer, MEMORY_BYTES, Request, covered};
use p2p_core::ReadView;
use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::StdRng;
use switchyard_protocol::{
    DispatchExpect, DispatchScratch, ErrorCode, FrameError, Response, ResponseScratch, WireDtype,
    decode_dispatch, decode_response, encode_error, peek_id, response_id,
};

/// One kind of damage. Positions are fractions of the frame's length, so that they fit any frame.
#[derive(Debug, Clone)]
enum Damage {
    /// Flips one bit.
    Bit(prop::sample::Index, u8),
    /// Replaces a naturally aligned word of the header or the tables.
    Word(prop::sample::Index, u32),
    /// Overwrites a run of bytes.
    Run(prop::sample::Index, Vec<u8>),
    /// Copies one part of the frame over another.
    Copy(prop::sample::Index, prop::sample::Index, usize),
    /// Truncates the frame.
    Truncate(prop::sample::Index),
}

fn damage() -> impl Strategy<Value = Damage> {
    let at = any::<prop::sample::Index>;
    let number = prop_oneof![
        any::<u32>(),
        0u32..64,
        Just(u32::MAX),
        Just(0x7fc0_0000),
        Just(0x8000_0000),
        (0u32..4096).prop_map(|n| n * 16),
    ];
    prop_oneof![
        3 => (at(), 0u8..8).prop_map(|(at, bit)| Damage::Bit(at, bit)),
        4 => (at(), number).prop_map(|(at, value)| Damage::Word(at, value)),
        2 => (at(), prop::collection::vec(any::<u8>(), 1..64))
            .prop_map(|(at, bytes)| Damage::Run(at, bytes)),
        1 => (at(), at(), 1usize..256).prop_map(|(from, to, len)| Damage::Copy(from, to, len)),
        1 => at().prop_map(Damage::Truncate),
    ]
}

impl Damage {
    fn apply(&self, frame: &mut Vec<u8>) {
        if frame.is_empty() {
            return;
        }
        match self {
            Self::Bit(at, bit) => {
                let at = at.index(frame.len());
                frame[at] ^= 1 << bit;
            }
            Self::Word(at, value) => {
                let at = at.index(frame.len().min(512)) / 4 * 4;
                for (byte, new) in frame[at..].iter_mut().zip(value.to_le_bytes()) {
                    *byte = new;
                }
            }
            Self::Run(at, bytes) => {
                let at = at.index(frame.len());
                for (byte, new) in frame[at..].iter_mut().zip(bytes) {
                    *byte = *new;
                }
            }
            Self::Copy(from, to, len) => {
                let (from, to) = (from.index(frame.len()), to.index(frame.len()));
                let len = (*len).min(frame.len() - from).min(frame.len() - to);
                frame.copy_within(from..from + len, to);
            }
            Self::Truncate(len) => {
                let len = len.index(frame.len() + 1);
                frame.truncate(len);
            }
        }
    }
}

/// Returns true if the damage changed or removed a byte that a checksum covers.
fn reaches_covered_bytes(sound: &[u8], damaged: &[u8]) -> bool {
    covered(sound)
        .iter()
        .enumerate()
        .any(|(at, covered)| *covered && damaged.get(at) != Some(&sound[at]))
        || damaged.len() < sound.len()
}

fn read_dispatch(view: ReadView<'_>, expect: &DispatchExpect) -> Result<Vec<f32>, FrameError> {
    let mut scratch = DispatchScratch::default();
    let mut dispatch = decode_dispatch(view, expect, &mut scratch)?;
    let num_tokens = dispatch.num_tokens();
    assert!((1..=expect.max_tokens).contains(&num_tokens));
    for token in 0..num_tokens {
        let entries = dispatch.entries_of(token);
        assert!((1..=expect.top_k).contains(&entries.len()));
        assert!(entries.iter().all(|e| e.expert < expect.num_experts && e.weight.is_finite()));
    }
    let mut out = vec![f32::NAN; num_tokens * expect.hidden];
    dispatch.read_rows_f32(0..num_tokens, &mut out)?;
    Ok(out)
}

fn read_response(view: ReadView<'_>, answer: &Answer) -> Result<Vec<f32>, FrameError> {
    let mut scratch = ResponseScratch::default();
    match decode_response(view, &answer.expect, &mut scratch)? {
        Response::Rows(mut rows) => {
            let mut out = vec![f32::NAN; answer.rows.len()];
            rows.read_rows_f32(0..rows.num_rows(), &mut out)?;
            Ok(out)
        }
        Response::Error(error) => Ok(vec![error.code.to_u32() as f32]),
    }
}

fn same_bits(left: &[f32], right: &[f32]) -> bool {
    left.iter().map(|x| x.to_bits()).eq(right.iter().map(|x| x.to_bits()))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn damaged_dispatch_frames_never_harm(
        seed in any::<u64>(),
        hidden in prop_oneof![1usize..40, 120usize..300],
        dtype in prop::sample::select(&WireDtype::ALL[..]),
        checksum in any::<bool>(),
        damages in prop::collection::vec(damage(), 1..6),
    ) {
        let mut rng = StdRng::seed_from_u64(seed);
        let request = Request::random(&mut rng, hidden, dtype, checksum, 6);
        let sound = request.frame();
        let mut damaged = sound.clone();
        for damage in &damages {
            damage.apply(&mut damaged);
        }
        let mut memory = Guarded::new(MEMORY_BYTES);
        let view = memory.hold(&damaged);
        let _ = peek_id(view);
        let result = read_dispatch(view, &request.expect);
        if reaches_covered_bytes(&sound, &damaged) {
            prop_assert!(result.is_err(), "{damages:?} went unnoticed");
        } else {
            let found = result.expect("only padding or rows without a checksum were changed");
            if checksum {
                prop_assert!(same_bits(&found, &request.expected_rows()));
            }
        }
    }

    #[test]
    fn damaged_response_frames_never_harm(
        seed in any::<u64>(),
        hidden in prop_oneof![1usize..40, 120usize..300],
        dtype in prop::sample::select(&WireDtype::ALL[..]),
        checksum in any::<bool>(),
        is_error in any::<bool>(),
        damages in prop::collection::vec(damage(), 1..6),
    ) {
        let mut rng = StdRng::seed_from_u64(seed);
        let answer = Answer::random(&mut rng, hidden, dtype, checksum, 3);
        let sound = if is_error {
            let id = answer.meta.id;
            crate::common::frame(|view| encode_error(view, &id, ErrorCode::Internal, [seed, 1], "näh"))
        } else {
            answer.frame()
        };
        let mut damaged = sound.clone();
        for damage in &damages {
            damage.apply(&mut damaged);
        }
        let mut memory = Guarded::new(MEMORY_BYTES);
        let view = memory.hold(&damaged);
        let _ = response_id(view, &mut ResponseScratch::default());
        let result = read_response(view, &answer);
        if reaches_covered_bytes(&sound, &damaged) {
            prop_assert!(result.is_err(), "{damages:?} went unnoticed");
        } else {
            prop_assert!(result.is_ok());
        }
    }

    #[test]
    fn damage_under_a_right_checksum_never_harms(
        seed in any::<u64>(),
        dtype in prop::sample::select(&WireDtype::ALL[..]),
        damages in prop::collection::vec(damage(), 1..4),
    ) {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut memory = Guarded::new(MEMORY_BYTES);
        let request = Request::random(&mut rng, 130, dtype, false, 6);
        let mut damaged = request.frame();
        damages.iter().for_each(|damage| damage.apply(&mut damaged));
        if damaged.len() >= switchyard_protocol::abi::HEADER_BYTES {
            crate::common::reseal(&mut damaged, |header| {
                header.magic = switchyard_protocol::abi::FRAME_MAGIC;
                header.version = switchyard_protocol::abi::FRAME_VERSION;
                header.kind = switchyard_protocol::abi::KIND_DISPATCH;
                header.reserved = [0; 4];
            });
        }
        // `read_dispatch` asserts every guarantee of a decoded frame.
        let _ = read_dispatch(memory.hold(&damaged), &request.expect);

        let answer = Answer::random(&mut rng, 130, dtype, false, 3);
        let mut damaged = answer.frame();
        damages.iter().for_each(|damage| damage.apply(&mut damaged));
        if damaged.len() >= switchyard_protocol::abi::HEADER_BYTES {
            crate::common::reseal(&mut damaged, |header| header.reserved = [0; 4]);
        }
        let _ = read_response(memory.hold(&damaged), &answer);
    }
}

#[test]
fn every_single_bit_of_a_covered_byte_matters() {
    let mut rng = crate::common::fresh_rng();
    let mut memory = Guarded::new(MEMORY_BYTES);
    for dtype in WireDtype::ALL {
        let request = Request::random(&mut rng, 130, dtype, true, 3);
        let sound = request.frame();
        let covered = covered(&sound);
        for bit in 0..sound.len() * 8 {
            let mut damaged = sound.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            let result = read_dispatch(memory.hold(&damaged), &request.expect);
            assert_eq!(result.is_err(), covered[bit / 8], "{dtype} bit {bit}");
        }
    }
}
