//! A GPU as the data path needs it: memory that other processes can map, copies, flags and kernels in
//! stream order, and waits with a bound.
//!
//! Without the feature `cuda` everything compiles and [`Gpu::open`] says that this build has no GPU
//! support. With it the CUDA driver is opened at run time; a host without one gets an error.
//!
//! With the feature `emulated` there are GPUs in software besides, for tests on hosts without one. They are never
//! opened by accident: only [`Gpu::open_emulated`] and the name `emulated:N` open one, and
//! [`probe`](crate::probe()) does not list them.

#[macro_use]
mod kind;
mod checksum;
mod convert;
#[cfg(feature = "cuda")]
mod driver;
#[cfg(feature = "emulated")]
mod emulated;
mod error;
mod layer;
mod memory;
mod name;
mod stream;
#[cfg(not(all(feature = "cuda", feature = "emulated")))]
mod stub;
#[cfg(not(feature = "cuda"))]
use stub as driver;
#[cfg(not(feature = "emulated"))]
use stub as emulated;

use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use crate::abi::{DevicePtr, LayerWeights};
use crate::plan::{KernelParams, LaunchPlan};

use kind::Kind;

pub use self::checksum::{Checksum, ChecksumRange, MAX_CHECKSUM_RANGES};
pub use self::convert::{Conversion, ConvertType, MAX_CONVERSIONS};
pub use self::error::GpuError;
pub use self::layer::{LayerMatrices, LayerShape, MapShape};
pub use self::stream::Piece;
pub use name::{DeviceName, DeviceNameError};

/// A GPU with the kernels loaded. Clones share it.
#[derive(Debug, Clone)]
pub struct Gpu(Kind<driver::Gpu, emulated::Gpu>);

/// Memory that the GPU reaches. Freed, or unmapped when it is another process's, by drop.
#[derive(Debug)]
pub struct GpuBuffer(Kind<driver::Memory, emulated::Memory>);

/// Work in order. Two streams have no order between them.
#[derive(Debug)]
pub struct Stream(Kind<driver::Stream, emulated::Stream>);

/// A place in a stream's work that other streams can wait for.
#[derive(Debug)]
pub struct Event(Kind<driver::Event, emulated::Event>);

/// Launches recorded from a stream, to be repeated as one.
#[derive(Debug)]
pub struct Graph(Kind<driver::Graph, emulated::Graph>);

/// Result of a check whether a GPU reaches a range of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(
    not(any(feature = "cuda", feature = "emulated")),
    allow(dead_code, reason = "without a GPU of either kind nothing is reached")
)]
enum Reach {
    Whole,
    /// The range begins in memory that the GPU reaches, and leaves it.
    Short,
    /// Another GPU owns it, and it is not mapped for this one.
    Foreign {
        owner: u32,
    },
    Unknown,
}

/// A kernel with parameters that were checked.
#[derive(Debug, Clone)]
pub struct PreparedKernel<P> {
    params: P,
    plans: Vec<LaunchPlan>,
}

impl Gpu {
    /// Opens GPU `ordinal` and loads every kernel. The context is the process's primary one, shared with all other
    /// users of CUDA in it.
    ///
    /// # Errors
    /// [`GpuError`] when this build, host or GPU does not support it.
    pub fn open(ordinal: u32) -> Result<Self, GpuError> {
        driver::Gpu::open(ordinal).map(Kind::Driver).map(Self)
    }

    /// Opens GPU `ordinal` of those in software, see the module. Those of one group of eight reach one another's
    /// memory, and others do not.
    ///
    /// # Errors
    /// [`GpuError::NotEmulated`] without the feature, [`GpuError::NoSuchGpu`].
    pub fn open_emulated(ordinal: u32) -> Result<Self, GpuError> {
        if !cfg!(feature = "emulated") {
            return Err(GpuError::NotEmulated);
        }
        emulated::Gpu::open(ordinal).map(Kind::Emulated).map(Self)
    }

    /// Opens the GPU of this name.
    ///
    /// # Errors
    /// As for [`open`](Self::open) and [`open_emulated`](Self::open_emulated).
    pub fn open_named(name: DeviceName) -> Result<Self, GpuError> {
        match name {
            DeviceName::Cuda(ordinal) => Self::open(ordinal),
            DeviceName::Emulated(ordinal) => Self::open_emulated(ordinal),
        }
    }

    /// Name by which [`open_named`](Self::open_named) opens it again.
    #[must_use]
    pub fn name(&self) -> DeviceName {
        match &self.0 {
            Kind::Driver(gpu) => DeviceName::Cuda(gpu.ordinal()),
            Kind::Emulated(gpu) => DeviceName::Emulated(gpu.ordinal()),
        }
    }

    /// GPUs that this process may use; 0 without a driver.
    ///
    /// # Errors
    /// [`GpuError`] when this build or host cannot query it.
    pub fn count() -> Result<u32, GpuError> {
        driver::Gpu::count()
    }

    /// Index of this GPU among those of this process.
    #[must_use]
    pub fn ordinal(&self) -> u32 {
        either!(&self.0, gpu => gpu.ordinal())
    }

    /// Address on the PCI bus, as `0000:3b:00.0`; `None` for GPUs in software, and where the driver does not
    /// report it.
    #[must_use]
    pub fn pci_address(&self) -> Option<String> {
        either!(&self.0, gpu => gpu.pci_address())
    }

    /// Whether kernels of this GPU see a NIC's writes into the GPU's memory in the order of the writes. If not, a
    /// flag there may become visible before the data that it announces.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn orders_writes_of_nics(&self) -> Result<bool, GpuError> {
        either!(&self.0, gpu => gpu.orders_writes_of_nics())
    }

    /// Free memory of this GPU, bytes.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn free_bytes(&self) -> Result<u64, GpuError> {
        either!(&self.0, gpu => gpu.free_bytes())
    }

    /// Zeroed memory of this GPU.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn alloc(&self, bytes: u64) -> Result<GpuBuffer, GpuError> {
        wrapped!(&self.0, gpu => gpu.alloc(bytes), GpuBuffer)
    }

    /// Zeroed memory of this GPU that other processes can map by the descriptor of [`GpuBuffer::export`]. Rounded
    /// up to the GPU's granularity, usually 2 MiB.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn alloc_shared(&self, bytes: u64) -> Result<GpuBuffer, GpuError> {
        wrapped!(&self.0, gpu => gpu.alloc_shared(bytes), GpuBuffer)
    }

    /// Maps memory that another process exported by [`GpuBuffer::export`].
    ///
    /// # Errors
    /// [`GpuError`] when the descriptor is of another kind, the memory is smaller than `bytes`, or this GPU cannot
    /// reach it.
    pub fn import_shared(&self, memory: OwnedFd, bytes: u64) -> Result<GpuBuffer, GpuError> {
        wrapped!(&self.0, gpu => gpu.import_shared(memory, bytes), GpuBuffer)
    }

    /// Zeroed page-locked host memory that kernels reach, too, at the same address. Dropped memory is kept for the
    /// next request of about its size until all objects of this GPU are gone: a driver waits for all kernels to
    /// free it.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn alloc_host(&self, bytes: u64) -> Result<GpuBuffer, GpuError> {
        wrapped!(&self.0, gpu => gpu.alloc_host(bytes), GpuBuffer)
    }

    /// Lets the GPU reach whole pages of this process at the result's address: a NIC's queues, and with
    /// `is_register` its doorbell registers. The latter needs the driver option
    /// `PeerMappingOverride=1`; without it the driver answers 800.
    ///
    /// # Safety
    /// The pages stay mapped as long as the result lives.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub unsafe fn register_host(
        &self,
        pages: NonNull<u8>,
        bytes: u64,
        is_register: bool,
    ) -> Result<GpuBuffer, GpuError> {
        // SAFETY: the caller's promise.
        wrapped!(&self.0, gpu => unsafe { gpu.register_host(pages, bytes, is_register) }, GpuBuffer)
    }

    /// A new stream, which does not wait for the default one.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn stream(&self) -> Result<Stream, GpuError> {
        wrapped!(&self.0, gpu => gpu.stream(), Stream)
    }

    /// A stream with another owner, which will destroy it, by its handle: a `CUstream`, or the value of
    /// [`Stream::raw`]. 0 is CUDA's default stream.
    ///
    /// # Safety
    /// `raw` is a live stream of this GPU's primary context, and stays so as long as the result.
    ///
    /// # Errors
    /// [`GpuError::Driver`] where an emulated GPU has no such stream.
    pub unsafe fn wrap_stream(&self, raw: u64) -> Result<Stream, GpuError> {
        wrapped!(&self.0, gpu => gpu.wrap_stream(raw), Stream)
    }

    /// Describes a layer's matrices for the expert stage; the result goes into the table of layers in
    /// device memory. The matrices may be filled later.
    ///
    /// # Errors
    /// [`GpuError::Check`] for sizes or a type that the kernels do not have, [`GpuError::Driver`].
    pub fn layer_weights(
        &self,
        shape: &LayerShape,
        at: &LayerMatrices,
    ) -> Result<LayerWeights, GpuError> {
        shape.check(at).map_err(|source| GpuError::Check { kernel: "expert_compute", source })?;
        let map =
            |base, map: MapShape| either!(&self.0, gpu => gpu.tensor_map(base, shape.dtype, &map));
        Ok(LayerWeights {
            gate_up: at.gate_up,
            down: at.down,
            gate_up_scale: at.gate_up_scale,
            down_scale: at.down_scale,
            dtype: shape.dtype,
            reserved: [0; 7],
            gate_up_map: map(at.gate_up, shape.gate_up_map())?,
            down_map: map(at.down, shape.down_map())?,
        })
    }

    /// Whether the GPU reaches memory at this address: its own, a peer's that is mapped for it, or registered
    /// host memory.
    #[must_use]
    pub fn is_registered(&self, address: DevicePtr) -> bool {
        self.reach(address, 1) == Reach::Whole
    }

    fn reach(&self, address: DevicePtr, num_bytes: u64) -> Reach {
        either!(&self.0, gpu => gpu.reach(address, num_bytes))
    }

    /// Checks that kernels of this GPU reach `num_bytes` from `address` on: parameter `pointer` of `kernel`. A
    /// driver cannot tell whether they lie in one tensor.
    ///
    /// # Errors
    /// [`GpuError::Unregistered`], [`GpuError::OtherGpu`], [`GpuError::Short`].
    pub fn check_range(
        &self,
        kernel: &'static str,
        pointer: &'static str,
        address: DevicePtr,
        num_bytes: u64,
    ) -> Result<(), GpuError> {
        match self.reach(address, num_bytes) {
            Reach::Whole => Ok(()),
            Reach::Short => Err(GpuError::Short { kernel, pointer, address: address.0, num_bytes }),
            Reach::Foreign { owner } => {
                let ordinal = either!(&self.0, gpu => gpu.ordinal());
                Err(GpuError::OtherGpu { kernel, pointer, address: address.0, owner, ordinal })
            }
            Reach::Unknown => Err(GpuError::Unregistered { kernel, pointer, address: address.0 }),
        }
    }

    /// A new event, which counts as done until it is recorded.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn event(&self) -> Result<Event, GpuError> {
        wrapped!(&self.0, gpu => gpu.event(), Event)
    }

    /// Checks `params`, pointers included, so that a launch cannot fail because of them.
    ///
    /// # Safety
    /// Every pointer is to memory as large as the parameter's documentation says. That memory stays allocated and
    /// has no other use as long as the result may be launched or such a launch may run.
    ///
    /// # Errors
    /// [`GpuError::Check`], [`GpuError::Unregistered`], [`GpuError::OtherGpu`].
    pub unsafe fn prepare<P: KernelParams>(
        &self,
        params: P,
    ) -> Result<PreparedKernel<P>, GpuError> {
        params.check().map_err(|source| GpuError::Check { kernel: P::NAME, source })?;
        for (pointer, address) in params.pointers() {
            if !address.is_null() {
                self.check_range(P::NAME, pointer, address, 1)?;
            }
        }
        let mut plans = vec![params.plan()];
        plans.extend(params.rest());
        Ok(PreparedKernel { params, plans })
    }
}

#[cfg(all(test, not(feature = "cuda")))]
mod tests {
    use super::*;

    #[test]
    fn a_build_without_cuda_says_so_in_one_line() {
        for error in [Gpu::open(0).unwrap_err(), Gpu::count().unwrap_err()] {
            assert!(matches!(error, GpuError::NotBuilt));
            let text = error.to_string();
            assert!(text.contains("--features cuda") && !text.contains('\n'), "{text}");
        }
    }
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;

    #[test]
    fn a_host_without_a_driver_gets_one_line() {
        if crate::probe().cuda != crate::CudaState::NoLibrary {
            println!("SKIPPED: this host has a CUDA driver");
            return;
        }
        let error = Gpu::open(0).unwrap_err();
        assert!(matches!(error, GpuError::NoDriver), "{error}");
        assert!(!error.to_string().contains('\n'));
    }
}
