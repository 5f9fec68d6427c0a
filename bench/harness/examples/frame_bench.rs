//! Speed of encoding and decoding frames on one thread.
//!
//! `cargo run --release -p switchyard-bench-harness --example frame_bench [-- --json]`
//!
//! Rows of 7168 values, 64 per frame, top-8. GB/s count the caller's f32 values, 4 bytes each, so that element
//! types can be compared. `wire_gb_per_s` counts the bytes of the frame. Each figure is the median of many
//! frames. The frames cycle through 8 frames of memory, so that neither side stays in the innermost cache.

use std::ptr::NonNull;
use std::time::Instant;

use p2p_core::{ReadView, WriteView};
use protocol::{
    DispatchExpect, DispatchMeta, DispatchScratch, Entry, FrameGeometry, FrameId, TokenRef,
    WireDtype, decode_dispatch, encode_dispatch,
};
use switchyard_bench_harness::clock::us;
use switchyard_bench_harness::stats::median;

const HIDDEN: usize = 7168;
const NUM_TOKENS: usize = 64;
const TOP_K: usize = 8;
const NUM_FRAMES: usize = 8;
const FRAME_BYTES: usize = 2 << 20;
const ROUNDS: usize = 400;

struct Row {
    dtype: WireDtype,
    checksum: bool,
    encode_us: f64,
    decode_us: f64,
    frame_bytes: usize,
}

fn main() {
    let json = std::env::args().any(|arg| arg == "--json");
    let mut rows = Vec::new();
    for dtype in WireDtype::ALL {
        for checksum in [false, true] {
            rows.push(measure(dtype, checksum));
        }
    }
    let gb = |bytes: usize, us: f64| bytes as f64 / us / 1e3;
    let values = NUM_TOKENS * HIDDEN * 4;
    if json {
        let rows: Vec<String> = rows
            .iter()
            .map(|row| {
                format!(
                    "{{\"dtype\":\"{}\",\"checksum\":{},\"encode_us_p50\":{:.1},\"decode_us_p50\":{:.1},\"encode_gb_per_s\":{:.2},\"decode_gb_per_s\":{:.2},\"encode_wire_gb_per_s\":{:.2},\"decode_wire_gb_per_s\":{:.2}}}",
                    row.dtype,
                    row.checksum,
                    row.encode_us,
                    row.decode_us,
                    gb(values, row.encode_us),
                    gb(values, row.decode_us),
                    gb(row.frame_bytes, row.encode_us),
                    gb(row.frame_bytes, row.decode_us),
                )
            })
            .collect();
        println!(
            "{{\"hidden\":{HIDDEN},\"num_tokens\":{NUM_TOKENS},\"rows\":[{}]}}",
            rows.join(",")
        );
        return;
    }
    println!("dtype  checksum   encode GB/s (wire)   decode GB/s (wire)");
    for row in &rows {
        println!(
            "{:<6} {:<8}   {:>6.2} ({:>5.2})       {:>6.2} ({:>5.2})",
            row.dtype,
            if row.checksum { "yes" } else { "no" },
            gb(values, row.encode_us),
            gb(row.frame_bytes, row.encode_us),
            gb(values, row.decode_us),
            gb(row.frame_bytes, row.decode_us),
        );
    }
}

fn measure(dtype: WireDtype, checksum: bool) -> Row {
    let id = FrameId {
        epoch: 1,
        client_id: 2,
        generation: 3,
        sequence: 4,
        layer: 5,
        frame_idx: 0,
        num_frames: 1,
    };
    let meta = DispatchMeta {
        id,
        hidden: HIDDEN,
        dtype,
        response_dtype: WireDtype::Bf16,
        payload_checksum: checksum,
    };
    let geometry = FrameGeometry::new(FRAME_BYTES, HIDDEN, dtype, WireDtype::Bf16, TOP_K)
        .expect("2 MiB hold 64 rows");
    assert!(geometry.max_tokens() >= NUM_TOKENS, "2 MiB hold 64 rows");
    let expect = DispatchExpect {
        client_id: id.client_id,
        generation: id.generation,
        hidden: HIDDEN,
        num_layers: 61,
        num_experts: 256,
        max_tokens: geometry.max_tokens(),
        top_k: TOP_K,
        dtype,
        response_dtype: WireDtype::Bf16,
    };
    let num_values = NUM_TOKENS * HIDDEN;
    let xs: Vec<Vec<f32>> = (0..NUM_FRAMES)
        .map(|seed| (0..num_values).map(|i| ((i * 7 + seed) as f32).sin() * 3.0).collect())
        .collect();
    let tokens: Vec<TokenRef> = (0..NUM_TOKENS as u32)
        .map(|token| TokenRef { token, entry_begin: token * 8, entry_count: 8 })
        .collect();
    let entries: Vec<Entry> = (0..(NUM_TOKENS * TOP_K) as u32)
        .map(|i| Entry { expert: i * 37 % 256, weight: 0.125 })
        .collect();
    let mut memory = vec![0u64; NUM_FRAMES * FRAME_BYTES / 8];
    let base = NonNull::new(memory.as_mut_ptr().cast::<u8>()).expect("vector");
    let mut scratch = DispatchScratch::for_frames(&expect);
    let mut out = vec![0f32; num_values];
    let (mut encode_us, mut decode_us, mut frame_bytes) = (Vec::new(), Vec::new(), 0);
    for round in 0..ROUNDS {
        // SAFETY: NUM_FRAMES frames lie behind `base`; each view is used before the next is made.
        let frame = unsafe { base.add(round % NUM_FRAMES * FRAME_BYTES) };
        // SAFETY: as above.
        let mut view = unsafe { WriteView::new(frame, FRAME_BYTES) };
        let begin = Instant::now();
        frame_bytes = encode_dispatch(&mut view, &meta, &xs[round % NUM_FRAMES], &tokens, &entries)
            .expect("fits");
        encode_us.push(us(begin.elapsed()));
        // Another frame than the one just written, so that the rows come from further away.
        if round < NUM_FRAMES {
            continue;
        }
        // SAFETY: as above.
        let frame = unsafe { base.add((round + 1) % NUM_FRAMES * FRAME_BYTES) };
        // SAFETY: as above.
        let view = unsafe { ReadView::new(frame, FRAME_BYTES) };
        let begin = Instant::now();
        let mut dispatch = decode_dispatch(view, &expect, &mut scratch).expect("sound");
        dispatch.read_rows_f32(0..NUM_TOKENS, &mut out).expect("sound");
        decode_us.push(us(begin.elapsed()));
        assert!(std::hint::black_box(&out).iter().all(|value| value.abs() < 4.0));
    }
    Row {
        dtype,
        checksum,
        encode_us: median(&mut encode_us),
        decode_us: median(&mut decode_us),
        frame_bytes,
    }
}
