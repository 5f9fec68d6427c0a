//! `switchyard_moe.p2p`: transfers between processes, over the message engine.

use pyo3::prelude::*;

/// Adds the classes of this file to `module`.
///
/// # Errors
/// Whatever Python reports when it takes a class in.
pub fn register(_module: &Bound<'_, PyModule>) -> PyResult<()> {
    Ok(())
}
