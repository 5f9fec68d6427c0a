//! A GPU posts: [`Access`] over CUDA. *Not yet run with a ConnectX.*
//!
//! NOTES: `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS` is not set on memory that a NIC reaches. It makes CUDA's
//! *synchronous* copies and fills, some of which return before they are done, wait for their end. There are
//! none here: memory is zeroed, written and read by asynchronous operations on a stream of their own, and
//! [`Access::alloc`], [`SharedMemory::write`] and [`SharedMemory::read`] return once that stream is
//! empty. So what the NIC is told of afterwards is in place. Whoever copies to or from a slot by
//! `cudaMemcpy` sets the attribute, or waits.

mod memory;

use std::ptr::NonNull;

use kernels::gpu::{DeviceName, Gpu, GpuBuffer, GpuError};

pub use self::memory::GpuMemory;
use crate::access::{Access, AccessError, Guard, HostRange, Mapped, SharedMemory, Space};

/// Where queues and slots lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The GPU's memory. Queues there need the DevX path.
    Gpu,
    /// Page-locked host memory that the GPU reaches.
    Host,
}

/// Kernels of this GPU post.
#[derive(Debug, Clone)]
pub struct GpuAccess {
    gpu: Gpu,
    place: Place,
    /// Where slots lie, if not with the queues.
    slots: Option<Box<Self>>,
    /// What a NIC's doorbell register is to the GPU.
    register: HostRange,
}

impl GpuAccess {
    /// For kernels of `gpu`, with memory at `place`.
    #[must_use]
    pub const fn new(gpu: Gpu, place: Place) -> Self {
        Self { gpu, place, slots: None, register: HostRange::Register }
    }

    /// The same with slots at `place`, wherever queues lie: those of libibverbs are in host memory, and
    /// frames are best in the GPU's.
    #[must_use]
    pub fn with_slots(self, place: Place) -> Self {
        let slots = (place != self.place).then(|| Box::new(Self::new(self.gpu.clone(), place)));
        Self { slots, ..self }
    }

    /// The same beside a NIC in software, whose registers are memory.
    #[must_use]
    pub fn with_software_nic(self) -> Self {
        Self { register: HostRange::Memory, ..self }
    }
}

impl Access for GpuAccess {
    /// Pages are registered for all GPUs of the process at once, which reach them at the same address.
    fn space(&self) -> Space {
        Space(match self.gpu.name() {
            DeviceName::Cuda(_) => "CUDA",
            DeviceName::Emulated(_) => "GPUs in software",
        })
    }

    fn slots(&self) -> Option<&dyn Access> {
        self.slots.as_deref().map(|slots| slots as &dyn Access)
    }

    fn alloc(&self, bytes: usize) -> Result<Box<dyn SharedMemory>, AccessError> {
        Ok(Box::new(GpuMemory::new(&self.gpu, self.place, bytes)?))
    }

    unsafe fn map(
        &self,
        pages: NonNull<u8>,
        bytes: usize,
        kind: HostRange,
    ) -> Result<Mapped, AccessError> {
        let is_register = (kind, self.register) == (HostRange::Register, HostRange::Register);
        // SAFETY: the caller keeps the pages mapped.
        let mapped = unsafe { self.gpu.register_host(pages, bytes as u64, is_register) };
        let buffer = mapped.map_err(|error| AccessError {
            what: if is_register {
                "the NIC's doorbell register for the GPU".to_owned()
            } else {
                "a queue's host memory for the GPU".to_owned()
            },
            bytes,
            detail: if matches!(error, GpuError::Driver { code: ALREADY_REGISTERED, .. }) {
                format!(
                    "{error}; something else in this process has registered the same pages with CUDA, \
                     which takes them once"
                )
            } else if is_register {
                format!(
                    "{error}; the options NVreg_EnableStreamMemOPs=1 and \
                     NVreg_RegistryDwords=\"PeerMappingOverride=1;\" of the module nvidia are needed, \
                     see `switchyard doctor`"
                )
            } else {
                error.to_string()
            },
        })?;
        Ok(Mapped { address: buffer.ptr().0, guard: Some(Box::new(RegisteredPages(buffer))) })
    }
}

#[derive(Debug)]
struct RegisteredPages(#[allow(dead_code, reason = "held until drop")] GpuBuffer);

impl Guard for RegisteredPages {}

/// `CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED`
const ALREADY_REGISTERED: u32 = 712;
