//! Runs kernels, here on this machine's processor only.

use kernels::gpu::Gpu;
use kernels::plan::KernelParams;

use crate::library::{Library, library};

pub enum Runner {
    Host(&'static Library),
    #[allow(dead_code, reason = "the world of the kernels' own tests knows it, too")]
    Gpu(Gpu),
}

impl Runner {
    /// `None` without a C++ compiler, which counts as a skip.
    pub fn host() -> Option<Self> {
        library().map(Self::Host)
    }

    /// Launches and waits. Returns the launcher's code.
    ///
    /// # Safety
    /// Pointers in `params` are to memory as large as documented, or the check fails.
    pub unsafe fn launch<P: KernelParams>(&self, params: &P) -> i32 {
        match self {
            // SAFETY: the caller's promise.
            Self::Host(library) => unsafe { library.launch(params) },
            Self::Gpu(_) => unreachable!("nothing makes one"),
        }
    }
}
