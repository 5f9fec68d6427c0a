//! Why a GPU could not be used.

use thiserror::Error;

use crate::check::CheckError;

/// A GPU refused, or could not be used.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names of the fields say enough")]
pub enum GpuError {
    /// This build has no GPU support.
    #[error("this build has no GPU support: build with `--features cuda`")]
    NotBuilt,
    /// This build has no GPU in software.
    #[error(
        "this build has no emulated GPU: it is for tests, and comes with the feature `emulated` of switchyard-kernels"
    )]
    NotEmulated,
    /// A recorded graph, an event or a buffer of another kind of GPU. A local bug.
    #[error("a graph, an event or a buffer of one kind of GPU was given to another kind")]
    Foreign,
    /// The driver library is missing.
    #[error("libcuda.so.1 is not on this host: it comes with the NVIDIA driver")]
    NoDriver,
    /// There is no such GPU.
    #[error("there is no GPU {ordinal}: this process may use {count}")]
    NoSuchGpu {
        /// Index asked for.
        ordinal: u32,
        /// GPUs that this process may use.
        count: u32,
    },
    /// The GPU cannot run the kernels.
    #[error("GPU {ordinal} ({name}) has compute capability {major}.{minor}, expected 9.0 or later")]
    TooOld { ordinal: u32, name: String, major: u32, minor: u32 },
    /// A call to the driver failed.
    #[error("{call} failed: {name} ({code})")]
    Driver {
        call: &'static str,
        code: u32,
        /// Name of the code.
        name: String,
    },
    /// Memory of another GPU cannot be mapped by this one.
    #[error(
        "GPU {ordinal} has no access to memory of GPU {peer}: they need NVLink or PCIe peer access between them"
    )]
    NoPeerAccess {
        ordinal: u32,
        /// The owner of the memory.
        peer: u32,
    },
    /// Parameters that cannot be used. Nothing was launched.
    #[error("{kernel}: {source}")]
    Check {
        /// Name of the kernel.
        kernel: &'static str,
        /// Description of the error.
        source: CheckError,
    },
    /// A pointer that the GPU does not know. Nothing was launched.
    #[error(
        "{kernel}: {pointer} is {address:#x}, which is no memory that the driver knows: expected device memory or registered host memory"
    )]
    Unregistered {
        /// Name of the kernel.
        kernel: &'static str,
        /// Name of the parameter.
        pointer: &'static str,
        address: u64,
    },
    /// A pointer to memory of another GPU. Nothing was launched.
    #[error(
        "{kernel}: {pointer} is {address:#x}, which is memory of GPU {owner}: expected memory of GPU {ordinal}: its kernels would fault"
    )]
    OtherGpu {
        /// Name of the kernel.
        kernel: &'static str,
        /// Name of the parameter.
        pointer: &'static str,
        address: u64,
        /// The owner of the memory.
        owner: u32,
        /// The GPU to run the kernel.
        ordinal: u32,
    },
    /// Memory that is shorter than the part a kernel uses. Nothing was launched.
    #[error(
        "{kernel}: the memory of {pointer} at {address:#x} ends before the {num_bytes} bytes that are used"
    )]
    Short {
        /// Name of the kernel.
        kernel: &'static str,
        /// Name of the parameter.
        pointer: &'static str,
        address: u64,
        /// Bytes that the kernel uses.
        num_bytes: u64,
    },
    /// The GPU had not finished in time.
    #[error("{what}: the GPU had not finished at the deadline")]
    Deadline {
        /// Object of the wait.
        what: &'static str,
    },
    /// A range beyond the end of a buffer. A local bug.
    #[error("{len} bytes at offset {offset} leave the buffer of {buffer_bytes} bytes")]
    Range {
        offset: u64,
        len: u64,
        /// Bytes of the buffer.
        buffer_bytes: u64,
    },
}
