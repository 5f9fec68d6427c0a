//! The codec of the Python package for arrays of floats, between guard pages.

#[allow(dead_code, reason = "the Python module uses all of it")]
#[path = "../../python/src/p2p/floats.rs"]
mod floats;
#[path = "../../python/src/p2p/rans.rs"]
mod rans;

use floats::{Dtype, FloatError, Input, Output, bound, compress, decompress, size_of};

use crate::GuardedMemory;

/// Number of element types.
pub const NUM_DTYPES: usize = 3;

const DTYPES: [Dtype; NUM_DTYPES] = [Dtype::Bf16, Dtype::F16, Dtype::F32];

/// The frame of `array`.
pub fn compressed(dtype: usize, array: &[u8]) -> Vec<u8> {
    let dtype = DTYPES[dtype];
    let capacity = bound(dtype, array.len() as u64).expect("a short array") as usize;
    let mut source = GuardedMemory::new(array.len());
    source.hold(array);
    let target = GuardedMemory::new(capacity);
    // SAFETY: both ranges end at guard pages, and live until after the call.
    let (input, mut out) = unsafe {
        (
            Input::new(source.tail(array.len()).as_ptr() as u64, array.len() as u64),
            Output::new(target.tail(capacity).as_ptr() as u64, capacity as u64),
        )
    };
    compress(dtype, input, array.len() as u64, &mut out).expect("room for any frame");
    let written = out.written() as usize;
    // SAFETY: the frame begins the last `capacity` bytes, and the codec has written it.
    unsafe { std::slice::from_raw_parts(target.tail(capacity).as_ptr(), written) }.to_vec()
}

/// The array of `frame`, or `None` if that is no frame of this type.
pub fn decompressed(dtype: usize, frame: &[u8]) -> Option<Vec<u8>> {
    read(DTYPES[dtype], frame).ok()
}

fn read(dtype: Dtype, frame: &[u8]) -> Result<Vec<u8>, FloatError> {
    let mut source = GuardedMemory::new(frame.len());
    source.hold(frame);
    // SAFETY: the range ends at a guard page, and lives until after the calls.
    let input =
        || unsafe { Input::new(source.tail(frame.len()).as_ptr() as u64, frame.len() as u64) };
    let size = size_of(dtype, input())? as usize;
    // At least half of an array of 16 bits is in its frame.
    assert!(size <= 2 * frame.len() + 4, "{size} bytes of a frame of {}", frame.len());
    let target = GuardedMemory::new(size);
    // SAFETY: as above.
    let mut out = unsafe { Output::new(target.tail(size).as_ptr() as u64, size as u64) };
    decompress(dtype, input(), &mut out)?;
    assert_eq!(out.written(), size as u64);
    // SAFETY: the codec has written all of it.
    Ok(unsafe { std::slice::from_raw_parts(target.tail(size).as_ptr(), size) }.to_vec())
}
