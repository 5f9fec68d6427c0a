//! Place of the kernels: this machine's processor, or its GPU.

use std::time::{Duration, Instant};

use kernels::gpu::Gpu;
use kernels::plan::KernelParams;

use crate::library::{Library, library};

pub enum Runner {
    Host(&'static Library),
    #[cfg_attr(
        not(any(feature = "cuda", feature = "emulated")),
        allow(dead_code, reason = "there is no GPU without")
    )]
    Gpu(Gpu),
}

impl Runner {
    pub fn host() -> Option<Self> {
        library().map(Self::Host)
    }

    #[cfg(feature = "emulated")]
    #[allow(clippy::unnecessary_wraps, reason = "as the others")]
    pub fn emulated() -> Option<Self> {
        Some(Self::Gpu(Gpu::open_emulated(0).expect("a GPU in software")))
    }

    /// The first GPU. Without one, says so.
    #[cfg(feature = "cuda")]
    pub fn gpu() -> Option<Self> {
        match Gpu::open(0) {
            Ok(gpu) => Some(Self::Gpu(gpu)),
            Err(error) => {
                test_support::skip("gpu", &error.to_string());
                None
            }
        }
    }

    /// Launches and waits. Returns the launcher's code.
    ///
    /// # Safety
    /// Pointers in `params` are to the runner's memory, as large as documented, or the check fails.
    pub unsafe fn launch<P: KernelParams>(&self, params: &P) -> i32 {
        match self {
            // SAFETY: the caller's promise.
            Self::Host(library) => unsafe { library.launch(params) },
            Self::Gpu(gpu) => {
                let stream = gpu.stream().expect("stream");
                // SAFETY: the caller's promise; the wait below ends the launch.
                let kernel = unsafe { gpu.prepare(*params).expect("good parameters") };
                stream.launch(&kernel).expect("launch");
                stream.wait(Instant::now() + Duration::from_secs(20)).expect("kernel");
                0
            }
        }
    }
}
