//! The native half of the Python package `switchyard_moe`.
//!
//! Importing the module has no side effect: no thread starts, no file is opened, no signal handler is set.
#![allow(missing_docs, reason = "the stubs of the Python package document the classes")]

mod client;
mod dlpack;
mod errors;
mod interrupt;
mod logs;
mod p2p;

use pyo3::prelude::*;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    client::register(module)?;
    p2p::register(module)
}
