//! A server decodes the bytes that a client left in its slot.

#![no_main]

use std::cell::RefCell;

use libfuzzer_sys::fuzz_target;
use protocol::{DispatchScratch, decode_dispatch, peek_id};
use switchyard_fuzz::{Guarded, HIDDEN, MAX_INPUT, MAX_TOKENS, dispatch_expect, dtype_of};

thread_local! {
    static MEMORY: RefCell<(Guarded, DispatchScratch, Vec<f32>)> =
        RefCell::new((Guarded::new(MAX_INPUT), DispatchScratch::default(), Vec::new()));
}

fuzz_target!(|input: &[u8]| {
    let mut frame = input[..input.len().min(MAX_INPUT)].to_vec();
    try_frame(&frame);
    switchyard_fuzz::repair_checksums(&mut frame);
    try_frame(&frame);
});

fn try_frame(frame: &[u8]) {
    MEMORY.with_borrow_mut(|(memory, scratch, out)| {
        let expect = dispatch_expect(dtype_of(frame));
        let view = memory.hold(frame);
        let _ = peek_id(view);
        let Ok(mut dispatch) = decode_dispatch(view, &expect, scratch) else { return };
        let num_tokens = dispatch.num_tokens();
        assert!((1..=MAX_TOKENS).contains(&num_tokens));
        let mut num_entries = 0;
        for token in 0..num_tokens {
            let entries = dispatch.entries_of(token);
            assert!((1..=expect.top_k).contains(&entries.len()));
            assert!(entries.iter().all(|entry| entry.expert < expect.num_experts));
            assert!(entries.iter().all(|entry| entry.weight.is_finite()));
            num_entries += entries.len();
        }
        assert_eq!(num_entries, dispatch.entries().len());
        assert!(dispatch.id().layer < expect.num_layers);
        out.resize(num_tokens * HIDDEN, 0.0);
        let _ = dispatch.read_rows_f32(0..num_tokens, out);
    });
}
