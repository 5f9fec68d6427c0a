//! The codec of floats as functions of Python. The form of its frames: `floats`.

use pyo3::prelude::*;

use super::error::Failure;
use super::floats::{Dtype, FloatError, Input, Output, bound, compress, decompress, size_of};

/// Most bytes of the frame of an array of `size` bytes.
#[pyfunction]
pub(super) fn p2p_compress_bound(dtype: &str, size: u64) -> PyResult<u64> {
    Ok(bound(dtype_of(dtype)?, size).map_err(Failure::from)?)
}

/// Compresses `size` bytes at `src` into at most `capacity` bytes at `dst`. Returns the length of the frame.
///
/// The caller vouches for both ranges. `capacity` is at least [`p2p_compress_bound`].
#[pyfunction]
pub(super) fn p2p_compress(
    py: Python<'_>,
    dtype: &str,
    src: u64,
    size: u64,
    dst: u64,
    capacity: u64,
) -> PyResult<u64> {
    let dtype = dtype_of(dtype)?;
    let written = py.detach(|| {
        // SAFETY: Python's caller vouches for both ranges.
        let (input, mut out) = unsafe { (Input::new(src, size), Output::new(dst, capacity)) };
        compress(dtype, input, size, &mut out).map(|()| out.written())
    });
    Ok(written.map_err(Failure::from)?)
}

/// The length of the array whose frame is `size` bytes at `src`.
#[pyfunction]
pub(super) fn p2p_decompressed_size(dtype: &str, src: u64, size: u64) -> PyResult<u64> {
    // SAFETY: Python's caller vouches for the range.
    let input = unsafe { Input::new(src, size) };
    Ok(size_of(dtype_of(dtype)?, input).map_err(Failure::from)?)
}

/// Decompresses the frame of `size` bytes at `src` into at most `capacity` bytes at `dst`. Returns the array's length.
///
/// The caller vouches for both ranges. After an error the destination's content is undefined.
#[pyfunction]
pub(super) fn p2p_decompress(
    py: Python<'_>,
    dtype: &str,
    src: u64,
    size: u64,
    dst: u64,
    capacity: u64,
) -> PyResult<u64> {
    let dtype = dtype_of(dtype)?;
    let written = py.detach(|| {
        // SAFETY: Python's caller vouches for both ranges.
        let (input, mut out) = unsafe { (Input::new(src, size), Output::new(dst, capacity)) };
        decompress(dtype, input, &mut out).map(|()| out.written())
    });
    Ok(written.map_err(Failure::from)?)
}

fn dtype_of(name: &str) -> Result<Dtype, Failure> {
    Dtype::of(name).ok_or_else(|| {
        Failure::argument(format!("dtype is {name:?}, expected \"bf16\", \"f16\" or \"f32\""))
    })
}

impl From<FloatError> for Failure {
    fn from(error: FloatError) -> Self {
        match error {
            FloatError::Argument(message) => Self::argument(message),
            FloatError::Frame(message) => Self::codec(message),
        }
    }
}
