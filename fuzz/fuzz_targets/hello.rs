//! Both sides read each other's hello. A decoded hello must encode to the same bytes.

#![no_main]

use libfuzzer_sys::fuzz_target;
use protocol::{ClientHello, ServerHello};

fuzz_target!(|input: &[u8]| {
    if let Ok(hello) = ClientHello::decode(input) {
        assert_eq!(hello.encode(), input);
    }
    if let Ok(hello) = ServerHello::decode(input) {
        assert_eq!(hello.encode(), input);
    }
});
