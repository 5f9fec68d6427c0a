//! The vendor's libraries, opened at run time.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use thiserror::Error;

/// A library or one of its functions is missing.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LibraryError {
    /// It cannot be opened.
    #[error("{name} cannot be opened: {detail}; install {package}")]
    Open {
        /// File.
        name: &'static str,
        /// The loader's answer.
        detail: String,
        /// Debian package that has it.
        package: &'static str,
    },
    /// It is older than what is needed.
    #[error("{name} has no {symbol}: it is older than rdma-core 44; install a newer {package}")]
    Symbol {
        /// File.
        name: &'static str,
        /// Function.
        symbol: &'static str,
        /// Debian package that has it.
        package: &'static str,
    },
}

/// libibverbs and libmlx5, with everything that the control path calls.
#[derive(Debug, Clone)]
pub struct Libraries {
    verbs: Arc<Library>,
    mlx5: Arc<Library>,
}

/// What the control path needs of libibverbs.
pub const VERBS_SYMBOLS: [&str; 16] = [
    "ibv_get_device_list",
    "ibv_free_device_list",
    "ibv_get_device_name",
    "ibv_open_device",
    "ibv_close_device",
    "ibv_alloc_pd",
    "ibv_dealloc_pd",
    "ibv_create_cq",
    "ibv_destroy_cq",
    "ibv_create_qp",
    "ibv_modify_qp",
    "ibv_destroy_qp",
    "ibv_reg_mr",
    "ibv_reg_dmabuf_mr",
    "ibv_dereg_mr",
    "ibv_query_gid",
];

/// What the control path needs of libmlx5: the plain path, then DevX.
pub const MLX5_SYMBOLS: [&str; 14] = [
    "mlx5dv_is_supported",
    "mlx5dv_open_device",
    "mlx5dv_init_obj",
    "mlx5dv_query_device",
    "mlx5dv_devx_general_cmd",
    "mlx5dv_devx_obj_create",
    "mlx5dv_devx_obj_modify",
    "mlx5dv_devx_obj_destroy",
    "mlx5dv_devx_umem_reg",
    "mlx5dv_devx_umem_reg_ex",
    "mlx5dv_devx_umem_dereg",
    "mlx5dv_devx_alloc_uar",
    "mlx5dv_devx_free_uar",
    "mlx5dv_devx_query_eqn",
];

impl Libraries {
    /// Opens both and looks up every function.
    ///
    /// # Errors
    /// [`LibraryError`], naming the first that is missing.
    pub fn open() -> Result<Self, LibraryError> {
        let verbs = Library::open("libibverbs.so.1", "libibverbs1")?;
        let mlx5 = Library::open("libmlx5.so.1", "ibverbs-providers")?;
        for symbol in VERBS_SYMBOLS {
            verbs.symbol(symbol)?;
        }
        for symbol in MLX5_SYMBOLS {
            mlx5.symbol(symbol)?;
        }
        Ok(Self { verbs: Arc::new(verbs), mlx5: Arc::new(mlx5) })
    }

    pub(crate) fn verbs(&self) -> &Library {
        &self.verbs
    }

    pub(crate) fn mlx5(&self) -> &Library {
        &self.mlx5
    }
}

/// A library that stays open as long as this value.
#[derive(Debug)]
pub(crate) struct Library {
    handle: NonNull<c_void>,
    name: &'static str,
    package: &'static str,
}

// SAFETY: the loader's functions may be called from any thread, and the handle is only a reference count.
unsafe impl Send for Library {}
// SAFETY: `symbol` only reads; the loader synchronises by itself.
unsafe impl Sync for Library {}

impl Library {
    pub(crate) fn open(name: &'static str, package: &'static str) -> Result<Self, LibraryError> {
        let file = CString::new(name).unwrap_or_default();
        // SAFETY: a string that ends with 0. Constructors of the library run: it is the system's own.
        let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        match NonNull::new(handle) {
            Some(handle) => Ok(Self { handle, name, package }),
            None => Err(LibraryError::Open { name, detail: last_error(), package }),
        }
    }

    /// Address of a function.
    pub(crate) fn symbol(&self, symbol: &'static str) -> Result<NonNull<c_void>, LibraryError> {
        let text = CString::new(symbol).unwrap_or_default();
        // SAFETY: the handle is open; a string that ends with 0.
        let found = unsafe { libc::dlsym(self.handle.as_ptr(), text.as_ptr()) };
        NonNull::new(found).ok_or(LibraryError::Symbol {
            name: self.name,
            symbol,
            package: self.package,
        })
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: opened once, closed once.
        let code: c_int = unsafe { libc::dlclose(self.handle.as_ptr()) };
        debug_assert_eq!(code, 0);
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
