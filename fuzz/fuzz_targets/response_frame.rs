//! A client decodes the bytes that a server left in its slot.

#![no_main]

use std::cell::RefCell;

use libfuzzer_sys::fuzz_target;
use protocol::{Response, ResponseScratch, decode_response, response_id};
use switchyard_fuzz::{
    GuardedMemory, HIDDEN, MAX_INPUT, RESPONSE_TOKENS, combine_expect, dtype_of,
};

thread_local! {
    static MEMORY: RefCell<(GuardedMemory, ResponseScratch, Vec<f32>)> =
        RefCell::new((GuardedMemory::new(MAX_INPUT), ResponseScratch::default(), Vec::new()));
}

fuzz_target!(|input: &[u8]| {
    let mut frame = input[..input.len().min(MAX_INPUT)].to_vec();
    try_frame(&frame);
    switchyard_fuzz::repair_checksums(&mut frame);
    try_frame(&frame);
});

fn try_frame(frame: &[u8]) {
    MEMORY.with_borrow_mut(|(memory, scratch, out)| {
        let expect = combine_expect(dtype_of(frame));
        let view = memory.hold(frame);
        let id = response_id(view, scratch);
        let Ok(response) = decode_response(view, &expect, scratch) else { return };
        let id = id.expect("what decodes has an identity");
        assert_eq!((id.client_id, id.sequence), (expect.client_id, expect.sequence));
        match response {
            Response::Rows(mut rows) => {
                assert_eq!((rows.num_rows(), rows.hidden()), (RESPONSE_TOKENS, HIDDEN));
                out.resize(RESPONSE_TOKENS * HIDDEN, 0.0);
                let _ = rows.read_rows_f32(0..RESPONSE_TOKENS, out);
                let _ = rows.add_row_f32(0, &mut out[..HIDDEN]);
            }
            Response::Error(error) => {
                assert!(error.message.len() <= protocol::abi::MAX_ERROR_MESSAGE);
            }
        }
    });
}
