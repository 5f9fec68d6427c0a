//! Both sides read each other's messages while they connect: those of the slots' handshake and of the engine's, and the
//! first frame after it. A decoded message must encode to bytes that decode to the same message.

#![no_main]

use libfuzzer_sys::fuzz_target;
use message_engine::engine::fuzzing::{check_frame, check_handshake};
use p2p_core::bootstrap::wire::{
    HEADER_BYTES, KIND_HELLO, KIND_READY, KIND_REJECT, KIND_TICKET, KIND_WELCOME, MAX_BODY_BYTES,
    WireError, decode_header, decode_hello, decode_ready, decode_reject, decode_ticket,
    decode_welcome, encode_hello, encode_ready, encode_ticket, encode_welcome,
};

fuzz_target!(|input: &[u8]| {
    check_handshake(input);
    check_frame(input);
    let Some((header, body)) = input.split_first_chunk::<HEADER_BYTES>() else { return };
    let _ = decode_header(header);
    // The length in the header is not believed here, so that inputs get past it.
    if body.len() > MAX_BODY_BYTES {
        return;
    }
    match u16::from_le_bytes([header[10], header[11]]) {
        KIND_HELLO => check(body, decode_hello, encode_hello),
        KIND_WELCOME => check(body, decode_welcome, encode_welcome),
        KIND_READY => check(body, decode_ready, encode_ready),
        KIND_TICKET => check(body, decode_ticket, encode_ticket),
        KIND_REJECT => {
            if let Ok(reject) = decode_reject(body) {
                assert!(!reject.message.contains(|c: char| c.is_control()), "{reject:?}");
            }
        }
        _ => {}
    }
});

fn check<T: PartialEq + std::fmt::Debug>(
    body: &[u8],
    decode: fn(&[u8]) -> Result<T, WireError>,
    encode: fn(&T) -> Vec<u8>,
) {
    let Ok(message) = decode(body) else { return };
    let bytes = encode(&message);
    let (header, body) = bytes.split_first_chunk().expect("a header");
    assert_eq!(decode_header(header).map(|header| header.body_bytes), Ok(body.len()));
    assert_eq!(decode(body), Ok(message));
}
