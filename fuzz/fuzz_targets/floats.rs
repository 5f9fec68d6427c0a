//! The codec of floats reads a peer's frames without a panic, an access out of range, or memory out of proportion. Every
//! array comes back as it was.

#![no_main]

use libfuzzer_sys::fuzz_target;
use switchyard_fuzz::codec::{NUM_DTYPES, compressed, decompressed};

// The first byte names the element type, and whether the rest is an array or a frame.
fuzz_target!(|input: &[u8]| {
    let Some((&kind, rest)) = input.split_first() else { return };
    let dtype = usize::from(kind & 0x7f) % NUM_DTYPES;
    if kind & 0x80 == 0 {
        let frame = compressed(dtype, rest);
        assert_eq!(decompressed(dtype, &frame).expect("a frame of the codec's own"), rest);
    } else if let Some(array) = decompressed(dtype, rest) {
        assert_eq!(decompressed(dtype, &compressed(dtype, &array)).expect("a frame"), array);
    }
});
