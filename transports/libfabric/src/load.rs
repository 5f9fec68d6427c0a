//! Loading of the library at run time.

use std::ffi::{CStr, CString, c_int, c_void};
use std::sync::OnceLock;

use thiserror::Error;

use super::sys;

/// Variable with the path of the library to use instead of the system's.
pub const LIBRARY_VARIABLE: &str = "SWITCHYARD_LIBFABRIC_SO";

/// libfabric cannot be used on this host.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The library is missing or cannot be loaded.
    #[error(
        "libfabric is not available: {detail}; install it (Debian: libfabric1) or name it in {LIBRARY_VARIABLE}"
    )]
    Absent {
        /// The loader's error text.
        detail: String,
    },
    /// The file is another library.
    #[error("`{library}` is not a usable libfabric: it has no symbol `{symbol}`")]
    Symbol {
        /// Path of the library.
        library: String,
        /// The missing symbol.
        symbol: &'static str,
    },
    /// The library is too old.
    #[error("`{library}` is libfabric {}.{}, expected {}.{} or later", found >> 16, found & 0xffff, oldest >> 16, oldest & 0xffff)]
    Version {
        /// Path of the library.
        library: String,
        /// Its version.
        found: u32,
        /// Oldest usable version.
        oldest: u32,
    },
}

/// The library's symbols. It is loaded once and never unloaded.
pub(super) struct Library {
    pub(super) getinfo: sys::GetInfo,
    pub(super) freeinfo: sys::FreeInfo,
    pub(super) dupinfo: sys::DupInfo,
    pub(super) fabric: sys::OpenFabric,
    strerror: sys::StrError,
    version: u32,
}

impl Library {
    /// The library of this process, loaded by the first call.
    pub(super) fn get() -> Result<&'static Self, LoadError> {
        static LIBRARY: OnceLock<Result<Library, LoadError>> = OnceLock::new();
        LIBRARY
            .get_or_init(|| Self::load(std::env::var(LIBRARY_VARIABLE).ok().as_deref()))
            .as_ref()
            .map_err(Clone::clone)
    }

    /// Loads the library `chosen`, or the system's.
    fn load(chosen: Option<&str>) -> Result<Self, LoadError> {
        let library = chosen.filter(|name| !name.is_empty()).unwrap_or(DEFAULT_LIBRARY);
        let name = CString::new(library)
            .map_err(|_| LoadError::Absent { detail: format!("`{library}` is not a path") })?;
        let handle = keeping_signal_handlers(|| {
            // SAFETY: a string that ends with a zero byte. Constructors of the library run, as the
            // user who names it intends.
            unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) }
        });
        if handle.is_null() {
            return Err(LoadError::Absent { detail: loader_error(library) });
        }
        let symbol = |symbol: &'static CStr| {
            // SAFETY: a handle from `dlopen` that is never closed, and a string.
            let address = unsafe { libc::dlsym(handle, symbol.as_ptr()) };
            if address.is_null() {
                let symbol = symbol.to_str().unwrap_or_default();
                return Err(LoadError::Symbol { library: library.to_owned(), symbol });
            }
            Ok(address)
        };
        // SAFETY: these are the types that the library's header declares for these symbols.
        let library_symbols = unsafe {
            Self {
                getinfo: std::mem::transmute::<*mut c_void, sys::GetInfo>(symbol(c"fi_getinfo")?),
                freeinfo: std::mem::transmute::<*mut c_void, sys::FreeInfo>(symbol(
                    c"fi_freeinfo",
                )?),
                dupinfo: std::mem::transmute::<*mut c_void, sys::DupInfo>(symbol(c"fi_dupinfo")?),
                fabric: std::mem::transmute::<*mut c_void, sys::OpenFabric>(symbol(c"fi_fabric")?),
                strerror: std::mem::transmute::<*mut c_void, sys::StrError>(symbol(
                    c"fi_strerror",
                )?),
                version: std::mem::transmute::<*mut c_void, sys::Version>(symbol(c"fi_version")?)(),
            }
        };
        let (found, oldest) = (library_symbols.version, sys::OLDEST_VERSION);
        if found < oldest {
            return Err(LoadError::Version { library: library.to_owned(), found, oldest });
        }
        Ok(library_symbols)
    }

    /// API version to request.
    pub(super) fn api_version(&self) -> u32 {
        self.version.min(sys::API_VERSION)
    }

    /// The library's description of an error code of either sign.
    pub(super) fn describe(&self, code: i64) -> String {
        let code = c_int::try_from(code.unsigned_abs()).unwrap_or(c_int::MAX);
        // SAFETY: the library returns a static string for every code.
        let text = unsafe { (self.strerror)(code) };
        if text.is_null() {
            return format!("error {code}");
        }
        // SAFETY: not null, ends with a zero byte, is never freed.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

/// Runs `work` and restores this process's signal handlers afterwards. Libraries below libfabric,
/// such as PSM, install handlers when they are loaded, for SIGTERM and SIGINT too. Those handlers
/// end the process at once, so that no server would drain.
fn keeping_signal_handlers<T>(work: impl FnOnce() -> T) -> T {
    let before = SIGNALS.map(|signal| {
        // SAFETY: all zero is a valid action, for the system to write over.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: asks for the action of a signal; both pointers are null or valid.
        let result = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) };
        (result == 0).then_some(action)
    });
    let done = work();
    for (signal, action) in SIGNALS.into_iter().zip(&before) {
        if let Some(action) = action {
            // SAFETY: an action that was in force a moment ago, whose handler is still there.
            unsafe { libc::sigaction(signal, action, std::ptr::null_mut()) };
        }
    }
    done
}

fn loader_error(library: &str) -> String {
    // SAFETY: the loader's own string, valid until its next call in this thread.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return format!("`{library}` cannot be opened");
    }
    // SAFETY: not null and ends with a zero byte.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

const DEFAULT_LIBRARY: &str = "libfabric.so.1";
/// Signals that end a process by default and can be caught.
const SIGNALS: [c_int; 10] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGILL,
    libc::SIGABRT,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGSEGV,
    libc::SIGPIPE,
    libc::SIGTERM,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_one_clear_line() {
        let error = Library::load(Some("/nonexistent/libfabric.so")).err().unwrap();
        let text = error.to_string();
        assert!(matches!(error, LoadError::Absent { .. }), "{text}");
        assert!(text.contains("/nonexistent/libfabric.so") && text.contains(LIBRARY_VARIABLE));
        assert!(!text.contains('\n'), "{text}");
    }

    #[test]
    fn loading_leaves_signal_handlers_alone() {
        let handlers = || {
            SIGNALS.map(|signal| {
                // SAFETY: all zero is a valid action, for the system to write over.
                let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
                // SAFETY: asks only; the pointer is valid.
                let result = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) };
                assert_eq!(result, 0, "signal {signal}");
                action.sa_sigaction
            })
        };
        let before = handlers();
        if let Err(error) = Library::get() {
            println!("nothing was loaded: {error}");
        }
        assert_eq!(handlers(), before);
    }

    #[test]
    fn another_library_is_named_with_what_it_lacks() {
        let error = Library::load(Some("libc.so.6")).err().unwrap();
        let expected = LoadError::Symbol { library: "libc.so.6".to_owned(), symbol: "fi_getinfo" };
        assert_eq!(error, expected);
    }
}
