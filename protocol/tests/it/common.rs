//! Shared by the tests: guarded memory, random frames, and FP8 as the standard defines it.
#![allow(dead_code, reason = "every test uses a part of it")]

pub mod guarded;

use bytemuck::{bytes_of, pod_read_unaligned};
use guarded::Guarded;
use half::{bf16, f16};
use p2p_core::WriteView;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use switchyard_protocol::abi::{
    ENTRY_BYTES, ERROR_BODY_BYTES, FLAG_PAYLOAD_CRC, FrameHeader, HEADER_BYTES, KIND_DISPATCH,
    KIND_ERROR, TOKEN_BYTES,
};
use switchyard_protocol::{
    CombineExpect, CombineMeta, DispatchExpect, DispatchMeta, EncodeError, Entry, FrameGeometry,
    FrameId, ServerTimes, TokenRef, WireDtype, encode_combine, encode_dispatch,
};

/// Value of an E4M3 code: sign, four exponent bits with bias 7, three mantissa bits; all ones is NaN.
pub fn e4m3_value(code: u8) -> f64 {
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    let exponent = i32::from(code >> 3 & 0xf);
    let mantissa = f64::from(code & 7);
    match (exponent, code & 7) {
        (15, 7) => f64::NAN,
        (0, _) => sign * mantissa / 8.0 * 2f64.powi(-6),
        _ => sign * (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
    }
}

/// The nearest E4M3 code by comparing distances. Of two equally near codes, the even one.
/// Saturates; NaN and infinity become NaN.
pub fn e4m3_nearest(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    if !value.is_finite() {
        return sign | 0x7f;
    }
    let magnitude = f64::from(value.abs());
    // Codes 0 to 0x7e are in the order of their values.
    let (mut below, mut above) = (0u8, 0x7eu8);
    while above - below > 1 {
        let middle = below + (above - below) / 2;
        if e4m3_value(middle) <= magnitude {
            below = middle;
        } else {
            above = middle;
        }
    }
    let (to_below, to_above) = (magnitude - e4m3_value(below), e4m3_value(above) - magnitude);
    let nearest = if to_below < to_above {
        below
    } else if to_above < to_below {
        above
    } else if below % 2 == 0 {
        below
    } else {
        above
    };
    sign | nearest
}

/// The expected `row` after encoding and decoding with `dtype`, by independent scalar conversions.
pub fn through_wire(dtype: WireDtype, row: &[f32]) -> Vec<f32> {
    match dtype {
        WireDtype::F32 => row.to_vec(),
        WireDtype::F16 => row.iter().map(|x| f16::from_f32_const(*x).to_f32_const()).collect(),
        WireDtype::Bf16 => row.iter().map(|x| bf16::from_f32_const(*x).to_f32_const()).collect(),
        WireDtype::F8E4m3 => row
            .chunks(128)
            .flat_map(|block| {
                let largest = block.iter().fold(0f32, |m, x| m.max(x.abs()));
                let scale = if largest == 0.0 { 1.0 } else { largest / 448.0 };
                block
                    .iter()
                    .map(move |x| e4m3_value(e4m3_nearest(x * (1.0 / scale))) as f32 * scale)
            })
            .collect(),
    }
}

/// A random request with its tables and expectations.
#[derive(Debug, Clone)]
pub struct Request {
    pub meta: DispatchMeta,
    pub x: Vec<f32>,
    pub tokens: Vec<TokenRef>,
    pub entries: Vec<Entry>,
    pub expect: DispatchExpect,
}

impl Request {
    /// Draws a request of up to `max_tokens` tokens of `hidden` values.
    pub fn random(
        rng: &mut StdRng,
        hidden: usize,
        dtype: WireDtype,
        payload_checksum: bool,
        max_tokens: usize,
    ) -> Self {
        let id = FrameId {
            epoch: rng.random(),
            client_id: rng.random(),
            generation: rng.random(),
            sequence: rng.random(),
            layer: rng.random_range(0..8),
            frame_idx: 2,
            num_frames: rng.random_range(3..9),
        };
        let (num_experts, top_k) = (64, 4);
        let num_rows = rng.random_range(1..=max_tokens);
        let x = random_values(rng, num_rows * hidden);
        let mut entries = random_entries(rng, 3, num_experts);
        let mut tokens = Vec::new();
        for token in 0..num_rows as u32 {
            if rng.random_bool(0.3) {
                continue;
            }
            // Sometimes leave a gap, as when entries of another server are in the same list.
            let hole = if rng.random_bool(0.2) { 2 } else { 0 };
            entries.extend(random_entries(rng, hole, num_experts));
            let entry_begin = entries.len() as u32;
            let entry_count = rng.random_range(1..=top_k as u32);
            entries.extend(random_entries(rng, entry_count as usize, num_experts));
            tokens.push(TokenRef { token, entry_begin, entry_count });
        }
        if tokens.is_empty() {
            tokens.push(TokenRef { token: 0, entry_begin: 0, entry_count: 3 });
        }
        let response_dtype = WireDtype::ALL[rng.random_range(0..4)];
        let meta = DispatchMeta { id, hidden, dtype, response_dtype, payload_checksum };
        let expect = DispatchExpect {
            client_id: id.client_id,
            generation: id.generation,
            hidden,
            num_layers: 8,
            num_experts,
            max_tokens,
            top_k,
            dtype,
            response_dtype,
        };
        Self { meta, x, tokens, entries, expect }
    }

    /// The request as a frame.
    pub fn frame(&self) -> Vec<u8> {
        frame(|view| encode_dispatch(view, &self.meta, &self.x, &self.tokens, &self.entries))
    }

    /// The rows that a server should read.
    pub fn expected_rows(&self) -> Vec<f32> {
        let hidden = self.meta.hidden;
        let rows =
            self.tokens.iter().map(|token| &self.x[token.token as usize * hidden..][..hidden]);
        rows.flat_map(|row| through_wire(self.meta.dtype, row)).collect()
    }
}

/// A random response with its expectations.
#[derive(Debug, Clone)]
pub struct Answer {
    pub meta: CombineMeta,
    pub rows: Vec<f32>,
    pub expect: CombineExpect,
}

impl Answer {
    /// Draws a response of `num_tokens` rows of `hidden` values.
    pub fn random(
        rng: &mut StdRng,
        hidden: usize,
        dtype: WireDtype,
        payload_checksum: bool,
        num_tokens: usize,
    ) -> Self {
        let id = FrameId {
            epoch: rng.random(),
            client_id: rng.random(),
            generation: rng.random(),
            sequence: rng.random(),
            layer: rng.random(),
            frame_idx: 0,
            num_frames: 1,
        };
        let times = ServerTimes { queue_ns: rng.random(), compute_ns: rng.random() };
        let expect = CombineExpect {
            client_id: id.client_id,
            generation: id.generation,
            sequence: id.sequence,
            layer: id.layer,
            frame_idx: id.frame_idx,
            num_tokens,
            hidden,
            dtype,
        };
        let meta = CombineMeta { id, hidden, dtype, payload_checksum, times };
        Self { meta, rows: random_values(rng, num_tokens * hidden), expect }
    }

    /// The response as a frame.
    pub fn frame(&self) -> Vec<u8> {
        frame(|view| encode_combine(view, &self.meta, &self.rows))
    }
}

/// Runs an encoder on poisoned memory and returns the bytes that it reports as used.
pub fn frame(encode: impl FnOnce(&mut WriteView<'_>) -> Result<usize, EncodeError>) -> Vec<u8> {
    let mut memory = Guarded::new(MEMORY_BYTES);
    memory.write(MEMORY_BYTES).put_bytes(0, &[POISON; MEMORY_BYTES]).expect("in range");
    let used = encode(&mut memory.write(MEMORY_BYTES)).expect("encodes");
    let mut bytes = vec![0; MEMORY_BYTES];
    memory.read(MEMORY_BYTES).copy_to(0, &mut bytes).expect("in range");
    assert!(bytes[used..].iter().all(|byte| *byte == POISON), "wrote behind the frame");
    bytes.truncate(used);
    bytes
}

/// Header of a frame, unchecked.
pub fn header_of(frame: &[u8]) -> FrameHeader {
    pod_read_unaligned(&frame[..HEADER_BYTES])
}

/// Changes the header and updates its checksum, so that a decoder can refuse the changed field only.
pub fn reseal(frame: &mut [u8], change: impl FnOnce(&mut FrameHeader)) {
    let mut header = header_of(frame);
    change(&mut header);
    header.header_crc = 0;
    let crc = covered_tables(&header)
        .into_iter()
        .filter_map(|range| frame.get(range))
        .fold(0, crc32c::crc32c_append);
    header.header_crc = crc32c::crc32c_append(crc, bytes_of(&header));
    frame[..HEADER_BYTES].copy_from_slice(bytes_of(&header));
}

/// Positions of the tables that `header_crc` covers.
pub fn covered_tables(header: &FrameHeader) -> Vec<std::ops::Range<usize>> {
    if header.kind == KIND_ERROR {
        return Vec::new();
    }
    let num_tokens = header.num_tokens as usize;
    let num_ranges = if header.kind == KIND_DISPATCH { num_tokens } else { 0 };
    let scales = WireDtype::from_code(header.dtype)
        .map_or(0, |dtype| dtype.scales_per_row(header.hidden as usize));
    [
        (header.tokens_offset, num_ranges.saturating_mul(TOKEN_BYTES)),
        (header.entries_offset, (header.num_entries as usize).saturating_mul(ENTRY_BYTES)),
        (header.scales_offset, num_tokens.saturating_mul(scales * 4)),
    ]
    .map(|(begin, bytes)| begin as usize..(begin as usize).saturating_add(bytes))
    .into()
}

/// For every byte of a valid frame, whether a checksum covers it.
pub fn covered(frame: &[u8]) -> Vec<bool> {
    let header = header_of(frame);
    let mut covered = vec![false; frame.len()];
    covered[..HEADER_BYTES].fill(true);
    for range in covered_tables(&header) {
        covered[range].fill(true);
    }
    let payload = header.payload_offset as usize;
    if header.kind == KIND_ERROR {
        covered[payload..payload + ERROR_BODY_BYTES].fill(true);
    } else if header.flags & FLAG_PAYLOAD_CRC != 0 {
        let dtype = WireDtype::from_code(header.dtype).expect("sound frame");
        for row in 0..header.num_tokens as usize {
            let begin = payload + row * header.row_stride_bytes as usize;
            covered[begin..begin + dtype.row_bytes(header.hidden as usize)].fill(true);
        }
    }
    covered
}

/// Realistic activations: mostly moderate, some tiny, some large, some zero.
pub fn random_values(rng: &mut StdRng, len: usize) -> Vec<f32> {
    (0..len)
        .map(|_| {
            let unit = rng.random_range(-1f32..1.0);
            match rng.random_range(0..10) {
                0 => 0.0,
                1 => unit * 1e-6,
                2 => unit * 3e4,
                _ => unit * 4.0,
            }
        })
        .collect()
}

fn random_entries(rng: &mut StdRng, len: usize, num_experts: u32) -> Vec<Entry> {
    (0..len)
        .map(|_| Entry {
            expert: rng.random_range(0..num_experts),
            weight: rng.random_range(-1f32..1.0),
        })
        .collect()
}

/// A generator with a fresh seed, or the one in `SWITCHYARD_SEED`; prints it.
pub fn fresh_rng() -> StdRng {
    let seed = std::env::var("SWITCHYARD_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(rand::random::<u64>);
    println!("SWITCHYARD_SEED={seed}");
    StdRng::seed_from_u64(seed)
}

/// Geometry of the test memory.
pub fn geometry(request: &Request) -> FrameGeometry {
    let meta = &request.meta;
    FrameGeometry::new(MEMORY_BYTES, meta.hidden, meta.dtype, meta.response_dtype, 4).expect("fits")
}

/// Bytes of the memory that frames are written to.
pub const MEMORY_BYTES: usize = 256 << 10;
/// Initial value of each byte of that memory.
pub const POISON: u8 = 0xa5;
