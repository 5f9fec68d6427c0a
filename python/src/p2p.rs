//! The native half of `switchyard_moe.p2p`: an endpoint over the message engine, and the codec of floats.
//!
//! Python owns the names and shapes of UCCL P2P. This side takes addresses and sizes, checks them against the
//! registrations, and waits without the interpreter's lock.

mod codec;
mod endpoint;
mod error;
mod floats;
mod inner;
mod memory;
mod rans;

use pyo3::prelude::*;

/// Adds the classes and functions of this file to `module`.
///
/// # Errors
/// The exception of a failed addition.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<endpoint::P2pEndpoint>()?;
    module.add_function(wrap_pyfunction!(codec::p2p_compress_bound, module)?)?;
    module.add_function(wrap_pyfunction!(codec::p2p_compress, module)?)?;
    module.add_function(wrap_pyfunction!(codec::p2p_decompressed_size, module)?)?;
    module.add_function(wrap_pyfunction!(codec::p2p_decompress, module)?)
}
