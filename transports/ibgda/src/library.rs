//! The vendor's libraries, opened at run time.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use thiserror::Error;

use crate::ffi::{Mlx5, Verbs};

/// A library or one of its functions is missing.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names of the fields say enough")]
pub enum LibraryError {
    /// It cannot be opened.
    #[error("{name} cannot be opened: {detail}; install {package}")]
    Open {
        name: String,
        /// The loader's answer.
        detail: String,
        /// Debian package that has it.
        package: &'static str,
    },
    /// The library is too old.
    #[error("{name} has no {symbol}: it is older than rdma-core 44; install a newer {package}")]
    Symbol {
        name: String,
        symbol: &'static str,
        /// Debian package that has it.
        package: &'static str,
    },
}

/// libibverbs and libmlx5, with everything that the control path calls.
#[derive(Debug, Clone)]
pub struct Libraries {
    /// Functions stay valid as long as this value.
    pub(crate) verbs: Verbs,
    pub(crate) mlx5: Mlx5,
    _open: Option<Arc<[Library; 2]>>,
}

impl Libraries {
    /// Opens both libraries and looks up every function.
    ///
    /// # Errors
    /// [`LibraryError`], naming the first that is missing.
    pub fn open() -> Result<Self, LibraryError> {
        Self::open_files("libibverbs.so.1", "libmlx5.so.1")
    }

    /// The same with files of other names or places, as a vendor's own installation has them.
    ///
    /// # Errors
    /// [`LibraryError`], naming the first that is missing.
    pub fn open_files(verbs: &str, mlx5: &str) -> Result<Self, LibraryError> {
        let libraries =
            [Library::open(verbs, "libibverbs1")?, Library::open(mlx5, "ibverbs-providers")?];
        // SAFETY: the functions of these names in these libraries; no release has changed them.
        let (verbs, mlx5) = unsafe {
            (
                Verbs::load(|symbol| libraries[0].symbol(symbol))?,
                Mlx5::load(|symbol| libraries[1].symbol(symbol))?,
            )
        };
        Ok(Self { verbs, mlx5, _open: Some(Arc::new(libraries)) })
    }

    /// The same functions from elsewhere: a stand-in within this process, called `name` in errors.
    ///
    /// # Safety
    /// `find` gives the addresses of functions with the signatures of [`crate::ffi`], which stay.
    ///
    /// # Errors
    /// [`LibraryError::Symbol`] for the first that `find` does not know.
    pub unsafe fn of_functions(
        name: &str,
        find: impl Fn(&'static str) -> Option<NonNull<c_void>>,
    ) -> Result<Self, LibraryError> {
        let look_up = |symbol| {
            let missing =
                LibraryError::Symbol { name: name.to_owned(), symbol, package: "stand-in" };
            find(symbol).ok_or(missing)
        };
        // SAFETY: the caller's promise.
        let (verbs, mlx5) = unsafe { (Verbs::load(look_up)?, Mlx5::load(look_up)?) };
        Ok(Self { verbs, mlx5, _open: None })
    }
}

/// A library that stays open as long as this value.
#[derive(Debug)]
struct Library {
    handle: NonNull<c_void>,
    name: String,
    package: &'static str,
}

// SAFETY: the loader's functions may be called from any thread, and the handle is only a reference count.
unsafe impl Send for Library {}
// SAFETY: `symbol` only reads; the loader synchronises by itself.
unsafe impl Sync for Library {}

impl Library {
    fn open(name: &str, package: &'static str) -> Result<Self, LibraryError> {
        // The loader takes an empty name for this program.
        let file = CString::new(name).ok().filter(|file| !file.is_empty());
        let Some(file) = file else {
            let detail = "this is no name of a file".to_owned();
            return Err(LibraryError::Open { name: name.to_owned(), detail, package });
        };
        // SAFETY: a string that ends with 0. Constructors of the library run: it is the system's own.
        let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        match NonNull::new(handle) {
            Some(handle) => Ok(Self { handle, name: name.to_owned(), package }),
            None => {
                Err(LibraryError::Open { name: name.to_owned(), detail: last_error(), package })
            }
        }
    }

    /// Address of a function.
    fn symbol(&self, symbol: &'static str) -> Result<NonNull<c_void>, LibraryError> {
        let text = CString::new(symbol).unwrap_or_default();
        // SAFETY: the handle is open; a string that ends with 0.
        let found = unsafe { libc::dlsym(self.handle.as_ptr(), text.as_ptr()) };
        NonNull::new(found).ok_or(LibraryError::Symbol {
            name: self.name.clone(),
            symbol,
            package: self.package,
        })
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: opened once, closed once.
        let code: c_int = unsafe { libc::dlclose(self.handle.as_ptr()) };
        if code != 0 {
            tracing::error!(library = self.name, code, "a library cannot be closed");
        }
    }
}

fn last_error() -> String {
    // SAFETY: the text belongs to the loader and lives until this thread's next call of it.
    let text: *const c_char = unsafe { libc::dlerror() };
    if text.is_null() {
        return "no reason given".to_owned();
    }
    // SAFETY: not null, ends with 0.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
