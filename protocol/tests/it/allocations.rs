//! Once scratch memory has grown, encoding and decoding allocate nothing.

use crate::common::guarded::GuardedMemory;
use crate::common::{Answer, MEMORY_BYTES, Request, fresh_rng};
use switchyard_protocol::{
    DispatchScratch, ErrorCode, Response, ResponseScratch, WireDtype, decode_dispatch,
    decode_response, encode_combine, encode_dispatch, encode_error,
};
use test_support::allocations::{CountingAllocator, THREAD_ALLOCATIONS};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn frames_are_written_and_read_without_allocating() {
    let mut rng = fresh_rng();
    for dtype in WireDtype::ALL {
        let request = Request::random(&mut rng, 300, dtype, true, 8);
        let answer = Answer::random(&mut rng, 300, dtype, true, 8);
        let mut memory = GuardedMemory::new(MEMORY_BYTES);
        let mut dispatch_scratch = DispatchScratch::for_frames(&request.expect);
        let mut response_scratch = ResponseScratch::default();
        let mut out = vec![0f32; 300 * 8];
        let mut round = || {
            let Request { meta, x, tokens, entries, expect } = &request;
            encode_dispatch(&mut memory.write(MEMORY_BYTES), meta, x, tokens, entries)
                .expect("fits");
            let view = memory.read(MEMORY_BYTES);
            let mut dispatch = decode_dispatch(view, expect, &mut dispatch_scratch).expect("sound");
            let num_tokens = dispatch.num_tokens();
            dispatch.read_rows_f32(0..num_tokens, &mut out[..num_tokens * 300]).expect("sound");

            encode_combine(&mut memory.write(MEMORY_BYTES), &answer.meta, &answer.rows)
                .expect("fits");
            let view = memory.read(MEMORY_BYTES);
            let response = decode_response(view, &answer.expect, &mut response_scratch);
            if let Response::Rows(mut rows) = response.expect("sound") {
                rows.read_rows_f32(0..8, &mut out).expect("sound");
            }

            let view = &mut memory.write(MEMORY_BYTES);
            encode_error(view, &answer.meta.id, ErrorCode::Overloaded, [1, 2], "full")
                .expect("fits");
            let view = memory.read(MEMORY_BYTES);
            let response = decode_response(view, &answer.expect, &mut response_scratch);
            assert!(matches!(response, Ok(Response::Error(_))));
        };
        round();
        let before = THREAD_ALLOCATIONS.get();
        for _ in 0..100 {
            round();
        }
        assert_eq!(THREAD_ALLOCATIONS.get() - before, 0, "{dtype}");
    }
    assert!(THREAD_ALLOCATIONS.get() > 0, "the counter counts");
}
