//! The libraries that arrays come from.

use std::ffi::CStr;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyType};

use super::abi::{self, ExchangeApi};

/// Functions of the library of a type.
pub struct Library {
    /// Its C functions, if it has them.
    pub api: Option<&'static ExchangeApi>,
    /// Its function that makes an array with unspecified values. `None` for a library whose arrays cannot be written.
    pub empty_like: Option<Py<PyAny>>,
}

impl Library {
    /// The library of `class`, from a table of the types that were seen.
    pub fn of(class: &Bound<'_, PyType>) -> Arc<Self> {
        /// Types seen, each kept alive so that its address stays its own.
        static KNOWN: Mutex<Vec<(Py<PyType>, Arc<Library>)>> = Mutex::new(Vec::new());
        let known = |address| {
            let known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
            let found = known.iter().find(|(class, _)| class.as_ptr() == address);
            found.map(|(_, library)| Arc::clone(library))
        };
        if let Some(library) = known(class.as_ptr()) {
            return library;
        }
        let library =
            Arc::new(Self { api: exchange_api(class), empty_like: find_empty_like(class) });
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() < MAX_KNOWN_TYPES {
            known.push((class.clone().unbind(), Arc::clone(&library)));
        }
        library
    }
}

fn exchange_api(class: &Bound<'_, PyType>) -> Option<&'static ExchangeApi> {
    let capsule = class.getattr(intern!(class.py(), "__dlpack_c_exchange_api__")).ok()?;
    let pointer = capsule.cast::<PyCapsule>().ok()?.pointer_checked(Some(EXCHANGE_API)).ok()?;
    let mut api = pointer.as_ptr().cast::<ExchangeApi>().cast_const();
    // SAFETY: The capsule's structure lives as long as the process, and its head is the same in every version.
    unsafe {
        while !api.is_null() && (*api).version.major != abi::MAJOR {
            api = (*api).previous;
        }
        api.as_ref()
    }
}

fn find_empty_like(class: &Bound<'_, PyType>) -> Option<Py<PyAny>> {
    let py = class.py();
    // A subclass may be of another package.
    class.mro().iter().find_map(|base| {
        let module = base.getattr(intern!(py, "__module__")).ok()?.extract::<String>().ok()?;
        let package = module.split('.').next().filter(|package| MUTABLE.contains(package))?;
        Some(py.import(package).ok()?.getattr("empty_like").ok()?.unbind())
    })
}

const EXCHANGE_API: &CStr = c"dlpack_exchange_api";
const MAX_KNOWN_TYPES: usize = 32;
/// Packages of arrays that can be written.
const MUTABLE: [&str; 3] = ["numpy", "torch", "cupy"];
