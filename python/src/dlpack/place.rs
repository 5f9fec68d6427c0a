//! The memory that a call's arrays must be in.

use std::fmt;
use std::ptr::null_mut;

use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::abi::{self, ExchangeApi};
use super::library::Library;

/// The memory of a client's arrays, and the order in which a GPU client works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    Host,
    /// Memory of one GPU. All work goes to `stream`, a `CUstream`.
    Gpu {
        ordinal: u32,
        stream: u64,
    },
}

impl Place {
    pub fn holds(self, device: abi::Device) -> bool {
        match self {
            Self::Host => device.kind == abi::CPU || device.kind == abi::CUDA_HOST,
            Self::Gpu { ordinal, .. } => {
                device.kind == abi::CUDA && u32::try_from(device.id) == Ok(ordinal)
            }
        }
    }

    /// The stream of a call; 0 for one of host memory, which has none.
    pub fn stream(self) -> u64 {
        match self {
            Self::Host => 0,
            Self::Gpu { stream, .. } => stream,
        }
    }

    /// Advice to a caller whose array is on `device`.
    pub fn advice(self, device: abi::Device) -> String {
        let is_gpu = matches!(device.kind, abi::CUDA | abi::CUDA_MANAGED);
        match self {
            Self::Host if is_gpu => format!(
                ": this client takes host memory; copy the tensor there, or make a client with device=\"cuda:{}\", \
                 which needs servers on GPUs",
                device.id
            ),
            Self::Host => String::new(),
            Self::Gpu { .. } => format!(": this client takes memory of {self}"),
        }
    }

    /// The argument `stream` of `__dlpack__` for an array of this kind of device: the producer orders this stream
    /// behind the array's work.
    pub fn stream_argument(self, object: &Bound<'_, PyAny>) -> Option<u64> {
        let Self::Gpu { stream, .. } = self else { return None };
        let device = object.call_method0("__dlpack_device__").ok()?;
        let kind = device.get_item(0).ok()?.extract::<i32>().ok()?;
        // 0 is ambiguous in DLPack, where the default stream is 1.
        (kind == abi::CUDA).then_some(if stream == 0 { 1 } else { stream })
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("cpu"),
            Self::Gpu { ordinal, .. } => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// The stream to which the library of `object` gives its work on GPU `ordinal` at present, on this thread. `None` if
/// the library does not say.
pub fn current_stream(object: &Bound<'_, PyAny>, ordinal: u32) -> Option<u64> {
    stream_of(Library::of(&object.get_type()).api?, object.py(), ordinal)
}

/// As [`current_stream`], for the functions of a library.
pub fn stream_of(api: &ExchangeApi, py: Python<'_>, ordinal: u32) -> Option<u64> {
    let current = api.current_stream?;
    let mut stream = null_mut();
    // SAFETY: The library offers this function for any device. The interpreter is attached.
    let code = unsafe { current(abi::CUDA, i32::try_from(ordinal).ok()?, &raw mut stream) };
    if code != 0 {
        // A build of the library without CUDA. Its arrays are refused for their device.
        drop(PyErr::take(py));
        return None;
    }
    Some(stream as u64)
}

/// Adds `stream` to a copy of the arguments of `__dlpack__`.
pub fn with_stream<'py>(
    arguments: &Bound<'py, PyDict>,
    stream: u64,
) -> PyResult<Bound<'py, PyDict>> {
    let arguments = arguments.copy()?;
    arguments.set_item("stream", stream)?;
    Ok(arguments)
}
