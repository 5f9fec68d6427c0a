//! A GPU as the data path needs it: memory that other processes can map, copies, flags and kernels in
//! stream order, and waits with a bound.
//!
//! Without the feature `cuda` everything compiles and [`Gpu::open`] says that this build has no GPU
//! support. With it the CUDA driver is opened at run time; a host without one gets an error.
//!
//! With the feature `emulated` there are GPUs in software besides, for tests on hosts without one. Nobody
//! gets one by accident: only [`Gpu::open_emulated`] and the name `emulated:N` open it, and
//! [`probe`](crate::probe()) does not list it.

#[cfg(feature = "cuda")]
mod driver;
#[cfg(feature = "emulated")]
mod emulated;
mod layer;
mod name;
#[cfg(not(all(feature = "cuda", feature = "emulated")))]
mod stub;
#[cfg(not(feature = "cuda"))]
use stub as driver;
#[cfg(not(feature = "emulated"))]
use stub as emulated;

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use thiserror::Error;

use crate::abi::{DevicePtr, LayerWeights};
use crate::check::CheckError;
use crate::plan::{KernelParams, LaunchPlan};

pub use self::layer::{LayerMatrices, LayerShape, MapShape};
pub use name::{DeviceName, DeviceNameError};

/// A GPU refused, or could not be used.
#[derive(Debug, Error)]
#[non_exhaustive]
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
    TooOld {
        /// Index.
        ordinal: u32,
        /// Product name.
        name: String,
        /// Compute capability.
        major: u32,
        /// Compute capability.
        minor: u32,
    },
    /// A call to the driver failed.
    #[error("{call} failed: {name} ({code})")]
    Driver {
        /// The call.
        call: &'static str,
        /// Raw code.
        code: u32,
        /// Name of the code.
        name: String,
    },
    /// Memory of another GPU cannot be mapped by this one.
    #[error(
        "GPU {ordinal} has no access to memory of GPU {peer}: they need NVLink or PCIe peer access between them"
    )]
    NoPeerAccess {
        /// This GPU.
        ordinal: u32,
        /// The one whose memory it is.
        peer: u32,
    },
    /// Parameters that cannot be used. Nothing was launched.
    #[error("{kernel}: {source}")]
    Check {
        /// Which kernel.
        kernel: &'static str,
        /// What is wrong.
        source: CheckError,
    },
    /// A pointer that the GPU does not know. Nothing was launched.
    #[error(
        "{kernel}: {pointer} is {address:#x}, which is no memory that the driver knows: expected device memory or registered host memory"
    )]
    Unregistered {
        /// Which kernel.
        kernel: &'static str,
        /// Which parameter.
        pointer: &'static str,
        /// Its value.
        address: u64,
    },
    /// A pointer to memory of another GPU. Nothing was launched.
    #[error(
        "{kernel}: {pointer} is {address:#x}, which is memory of GPU {owner}: expected memory of GPU {ordinal}, whose kernels would fault"
    )]
    OtherGpu {
        /// Which kernel.
        kernel: &'static str,
        /// Which parameter.
        pointer: &'static str,
        /// Its value.
        address: u64,
        /// Whose memory it is.
        owner: u32,
        /// Where the kernel was to run.
        ordinal: u32,
    },
    /// Memory that is shorter than what a kernel uses of it. Nothing was launched.
    #[error(
        "{kernel}: the memory of {pointer} at {address:#x} ends before the {num_bytes} bytes that are used"
    )]
    Short {
        /// Which kernel.
        kernel: &'static str,
        /// Which parameter.
        pointer: &'static str,
        /// Its value.
        address: u64,
        /// Bytes that the kernel uses.
        num_bytes: u64,
    },
    /// The GPU had not finished in time.
    #[error("{what}: the GPU had not finished at the deadline")]
    Deadline {
        /// What was waited for.
        what: &'static str,
    },
    /// A range beyond the end of a buffer. A local bug.
    #[error("{len} bytes at offset {offset} leave the buffer of {buffer_bytes} bytes")]
    Range {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Bytes of the buffer.
        buffer_bytes: u64,
    },
}

/// A GPU with the kernels loaded. Clones share it.
#[derive(Debug, Clone)]
pub struct Gpu(Kind<driver::Gpu, emulated::Gpu>);

/// Memory that the GPU reaches. Freed, or unmapped when it is another process's, by drop.
#[derive(Debug)]
pub struct GpuBuffer(Kind<driver::Memory, emulated::Memory>);

/// Work in order. Two streams have no order between them.
#[derive(Debug)]
pub struct Stream(Kind<driver::Stream, emulated::Stream>);

/// A place in a stream's work, which other streams can wait for.
#[derive(Debug)]
pub struct Event(Kind<driver::Event, emulated::Event>);

/// Launches recorded from a stream, to be repeated as one.
#[derive(Debug)]
pub struct Graph(Kind<driver::Graph, emulated::Graph>);

/// How far a GPU reaches a range of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reach {
    Whole,
    /// It begins in memory that the GPU reaches, and leaves it.
    Short,
    /// It is another GPU's and not mapped for this one.
    Foreign {
        owner: u32,
    },
    Unknown,
}

/// The driver's, or software's.
#[derive(Debug, Clone)]
enum Kind<D, E> {
    Driver(D),
    Emulated(E),
}

/// The same call on whichever it is.
macro_rules! either {
    ($kind:expr, $it:ident => $call:expr) => {
        match $kind {
            Kind::Driver($it) => $call,
            Kind::Emulated($it) => $call,
        }
    };
}

/// The same call on whichever it is, its result wrapped alike.
macro_rules! wrapped {
    ($kind:expr, $it:ident => $call:expr, $wrap:path) => {
        match $kind {
            Kind::Driver($it) => $call.map(Kind::Driver).map($wrap),
            Kind::Emulated($it) => $call.map(Kind::Emulated).map($wrap),
        }
    };
}

/// A kernel with parameters that were checked.
#[derive(Debug, Clone)]
pub struct Prepared<P> {
    params: P,
    plans: Vec<LaunchPlan>,
}

impl Gpu {
    /// Opens GPU `ordinal` and loads every kernel. The context is the process's primary one, shared with
    /// whatever else uses CUDA here.
    ///
    /// # Errors
    /// [`GpuError`] when this build, host or GPU cannot do it.
    pub fn open(ordinal: u32) -> Result<Self, GpuError> {
        driver::Gpu::open(ordinal).map(Kind::Driver).map(Self)
    }

    /// Opens GPU `ordinal` of those in software, see the module. Those of one group of eight reach one
    /// another's memory, and others do not.
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
    /// [`GpuError`] when this build or host cannot tell.
    pub fn count() -> Result<u32, GpuError> {
        driver::Gpu::count()
    }

    /// Index of this GPU among those of this process.
    #[must_use]
    pub fn ordinal(&self) -> u32 {
        either!(&self.0, gpu => gpu.ordinal())
    }

    /// Address on the PCI bus, as `0000:3b:00.0`; `None` for GPUs in software, and where the driver does not
    /// say.
    #[must_use]
    pub fn pci_address(&self) -> Option<String> {
        either!(&self.0, gpu => gpu.pci_address())
    }

    /// Whether kernels of this GPU see what a NIC writes into the GPU's memory in the order in which it was
    /// written. Where they do not, a flag there may be seen before what it announces.
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

    /// Zeroed memory of this GPU that other processes can map by the descriptor that
    /// [`GpuBuffer::export`] gives. Rounded up to the GPU's granularity, usually 2 MiB.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn alloc_shared(&self, bytes: u64) -> Result<GpuBuffer, GpuError> {
        wrapped!(&self.0, gpu => gpu.alloc_shared(bytes), GpuBuffer)
    }

    /// Maps what another process's [`GpuBuffer::export`] gave.
    ///
    /// # Errors
    /// [`GpuError`] when the descriptor is something else, the memory is smaller than `bytes`, or this
    /// GPU cannot reach it.
    pub fn import_shared(&self, memory: OwnedFd, bytes: u64) -> Result<GpuBuffer, GpuError> {
        wrapped!(&self.0, gpu => gpu.import_shared(memory, bytes), GpuBuffer)
    }

    /// Zeroed page-locked host memory that kernels reach, too, at the same address. What was dropped is kept
    /// for the next of about its size, until all that came from this GPU is gone: to give it back, a driver
    /// waits for all kernels.
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

    /// A stream that somebody else made and will destroy, by its handle: a `CUstream`, or what
    /// [`Stream::raw`] gave. 0 is CUDA's default stream.
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

    /// Checks that kernels of this GPU reach `num_bytes` from `address` on: parameter `pointer` of `kernel`.
    /// That they lie in one tensor is more than a driver can tell.
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

    /// Checks `params`, pointers included, so that launching cannot fail for their sake.
    ///
    /// # Safety
    /// Every pointer is to memory as large as the parameter's documentation says, which stays allocated
    /// and is used for nothing else as long as the result may be launched or such a launch may run.
    ///
    /// # Errors
    /// [`GpuError::Check`], [`GpuError::Unregistered`], [`GpuError::OtherGpu`].
    pub unsafe fn prepare<P: KernelParams>(&self, params: P) -> Result<Prepared<P>, GpuError> {
        params.check().map_err(|source| GpuError::Check { kernel: P::NAME, source })?;
        for (pointer, address) in params.pointers() {
            if !address.is_null() {
                self.check_range(P::NAME, pointer, address, 1)?;
            }
        }
        let mut plans = vec![params.plan()];
        plans.extend(params.rest());
        Ok(Prepared { params, plans })
    }

    /// Copies `bytes` to device memory and waits for it.
    ///
    /// # Errors
    /// [`GpuError::Range`], [`GpuError::Foreign`], [`GpuError::Driver`], [`GpuError::Deadline`].
    pub fn write(
        &self,
        buffer: &GpuBuffer,
        offset: u64,
        bytes: &[u8],
        deadline: Instant,
    ) -> Result<(), GpuError> {
        self.check_kind(buffer)?;
        let to = buffer.at(offset, bytes.len() as u64)?;
        let (stream, staging) = self.staging(bytes.len())?;
        if let Some(host) = staging.host() {
            // SAFETY: fresh memory of at least this length.
            unsafe { host.copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) };
        }
        // SAFETY: the range was checked; the staging memory outlives the copy, see `settle`.
        let copied = unsafe { stream.copy(to, staging.ptr(), bytes.len() as u64) };
        settle(staging, copied.and_then(|()| stream.wait(deadline))).map(drop)
    }

    /// Copies device memory to `out` and waits for it.
    ///
    /// # Errors
    /// [`GpuError::Range`], [`GpuError::Foreign`], [`GpuError::Driver`], [`GpuError::Deadline`].
    pub fn read(
        &self,
        buffer: &GpuBuffer,
        offset: u64,
        out: &mut [u8],
        deadline: Instant,
    ) -> Result<(), GpuError> {
        let len = out.len();
        self.check_kind(buffer)?;
        let from = buffer.at(offset, len as u64)?;
        let (stream, staging) = self.staging(len)?;
        // SAFETY: the range was checked; the staging memory outlives the copy, see `settle`.
        let copied = unsafe { stream.copy(staging.ptr(), from, len as u64) };
        let staging = settle(staging, copied.and_then(|()| stream.wait(deadline)))?;
        if let Some(host) = staging.host() {
            // SAFETY: at least this length, and the copy into it is complete.
            unsafe { host.copy_to_nonoverlapping(NonNull::from(out).cast(), len) };
        }
        Ok(())
    }

    /// GPUs in software reach memory by this process's addresses, others by the driver's.
    const fn check_kind(&self, buffer: &GpuBuffer) -> Result<(), GpuError> {
        match (&self.0, &buffer.0) {
            (Kind::Driver(_), Kind::Driver(_)) | (Kind::Emulated(_), Kind::Emulated(_)) => Ok(()),
            _ => Err(GpuError::Foreign),
        }
    }

    fn staging(&self, len: usize) -> Result<(Stream, GpuBuffer), GpuError> {
        Ok((self.stream()?, self.alloc_host(len as u64)?))
    }
}

impl GpuBuffer {
    /// Address, for kernels and copies.
    #[must_use]
    pub fn ptr(&self) -> DevicePtr {
        either!(&self.0, memory => memory.ptr())
    }

    /// Bytes that can be used.
    #[must_use]
    pub fn len(&self) -> u64 {
        either!(&self.0, memory => memory.len())
    }

    /// Never true: empty buffers cannot be made.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Address for this process, if it is host memory.
    #[must_use]
    pub fn host(&self) -> Option<NonNull<u8>> {
        either!(&self.0, memory => memory.host())
    }

    /// Address of `len` bytes from `offset` on.
    ///
    /// # Errors
    /// [`GpuError::Range`] when they leave the buffer.
    pub fn at(&self, offset: u64, len: u64) -> Result<DevicePtr, GpuError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len() => Ok(self.ptr().add(offset)),
            _ => Err(GpuError::Range { offset, len, buffer_bytes: self.len() }),
        }
    }

    /// A descriptor of this GPU memory's pages, by which a NIC registers them. From the first byte on.
    ///
    /// # Errors
    /// [`GpuError::Driver`] when the driver, the kernel or the GPU cannot give one.
    pub fn dma_buf(&self) -> Result<OwnedFd, GpuError> {
        either!(&self.0, memory => memory.dma_buf())
    }

    /// A descriptor by which another process can map this memory, if it came from
    /// [`Gpu::alloc_shared`].
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn export(&self) -> Result<OwnedFd, GpuError> {
        either!(&self.0, memory => memory.export())
    }
}

impl Stream {
    /// Copies `bytes` between device memory, peers' memory and host memory, whichever the addresses are.
    ///
    /// # Safety
    /// Both ranges are valid, and nobody writes the source or touches the destination before a
    /// [`wait`](Self::wait) that covers this call.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub unsafe fn copy(&self, to: DevicePtr, from: DevicePtr, bytes: u64) -> Result<(), GpuError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { either!(&self.0, stream => stream.copy(to, from, bytes)) }
    }

    /// Sets `bytes` bytes to `value`.
    ///
    /// # Safety
    /// The range is valid device memory.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub unsafe fn fill(&self, to: DevicePtr, value: u8, bytes: u64) -> Result<(), GpuError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { either!(&self.0, stream => stream.fill(to, value, bytes)) }
    }

    /// Adds `value` to the 64-bit word at `flag`, released to the whole system after everything that this
    /// stream did before.
    ///
    /// # Safety
    /// `flag` is a valid address, aligned to 8 bytes, in memory that the GPU reaches.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub unsafe fn add_flag(&self, flag: DevicePtr, value: u64) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        unsafe { either!(&self.0, stream => stream.add_flag(flag, value)) }
    }

    /// Calls `action` on a thread of the driver's when everything before is done. It must be short and
    /// use no CUDA.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn then(&self, action: impl FnOnce() + Send + 'static) -> Result<(), GpuError> {
        either!(&self.0, stream => stream.then(Box::new(action)))
    }

    /// Launches a kernel.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn launch<P: KernelParams>(&self, kernel: &Prepared<P>) -> Result<(), GpuError> {
        let params = bytemuck::bytes_of(&kernel.params);
        match &self.0 {
            Kind::Driver(stream) => kernel.plans.iter().try_for_each(|plan| {
                // SAFETY: `prepare` checked the parameters, and its caller answers for the memory; the
                // plan's entry takes exactly a `P`.
                unsafe { stream.launch(P::NAME, plan, params) }
            }),
            // SAFETY: as above; the kernel of this name takes exactly a `P`.
            Kind::Emulated(stream) => unsafe { stream.launch_all(P::NAME, &kernel.plans, params) },
        }
    }

    /// Marks what the stream has done so far. Recorded within [`capture`](Self::capture) it marks that
    /// place of each replay, when the replay comes to it: before, the event shows an older run.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn record(&self, event: &Event) -> Result<(), GpuError> {
        match (&self.0, &event.0) {
            (Kind::Driver(stream), Kind::Driver(event)) => stream.record(event),
            (Kind::Emulated(stream), Kind::Emulated(event)) => stream.record(event),
            _ => Err(GpuError::Foreign),
        }
    }

    /// What follows in this stream begins when `event`, as last recorded, is done. Not within
    /// [`capture`](Self::capture), and not for an event of a graph.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn wait_for(&self, event: &Event) -> Result<(), GpuError> {
        match (&self.0, &event.0) {
            (Kind::Driver(stream), Kind::Driver(event)) => stream.wait_for(event),
            (Kind::Emulated(stream), Kind::Emulated(event)) => stream.wait_for(event),
            _ => Err(GpuError::Foreign),
        }
    }

    /// Waits until everything so far is done.
    ///
    /// # Errors
    /// [`GpuError::Deadline`], [`GpuError::Driver`] when a kernel failed.
    pub fn wait(&self, deadline: Instant) -> Result<(), GpuError> {
        either!(&self.0, stream => stream.wait(deadline))
    }

    /// Whether everything so far is done.
    ///
    /// # Errors
    /// [`GpuError::Driver`] when a kernel failed.
    pub fn is_done(&self) -> Result<bool, GpuError> {
        either!(&self.0, stream => stream.is_done())
    }

    /// The GPU whose stream this is.
    #[must_use]
    pub fn device(&self) -> DeviceName {
        match &self.0 {
            Kind::Driver(stream) => DeviceName::Cuda(stream.ordinal()),
            Kind::Emulated(stream) => DeviceName::Emulated(stream.ordinal()),
        }
    }

    /// The driver's handle of this stream, a `CUstream`; of an emulated GPU's, a number of its own.
    #[must_use]
    pub fn raw(&self) -> u64 {
        either!(&self.0, stream => stream.raw())
    }

    /// Whether work given to this stream is recorded instead of run, by whomever.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn is_capturing(&self) -> Result<bool, GpuError> {
        either!(&self.0, stream => stream.is_capturing())
    }

    /// Records what `record` launches on this stream instead of running it.
    ///
    /// # Errors
    /// What `record` returns, or [`GpuError::Driver`].
    pub fn capture(
        &self,
        record: impl FnOnce(&Self) -> Result<(), GpuError>,
    ) -> Result<Graph, GpuError> {
        either!(&self.0, stream => stream.begin_capture())?;
        let recorded = record(self);
        // Ended in any case: a stream that goes on capturing is of no use.
        let graph = wrapped!(&self.0, stream => stream.end_capture(), Graph);
        recorded?;
        graph
    }

    /// Runs a recorded graph.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn replay(&self, graph: &Graph) -> Result<(), GpuError> {
        match (&self.0, &graph.0) {
            (Kind::Driver(stream), Kind::Driver(graph)) => stream.replay(graph),
            (Kind::Emulated(stream), Kind::Emulated(graph)) => stream.replay(graph),
            _ => Err(GpuError::Foreign),
        }
    }
}

impl Event {
    /// Whether the event, as last recorded, is done. One of a graph may be, too, while a replay has not come
    /// to it yet: a driver counts it as recorded by the launch or by the replay.
    ///
    /// # Errors
    /// [`GpuError::Driver`] when a kernel before it failed.
    pub fn is_done(&self) -> Result<bool, GpuError> {
        either!(&self.0, event => event.is_done())
    }

    /// Time on the GPU from `earlier` to this event. Both are done.
    ///
    /// # Errors
    /// [`GpuError::Driver`].
    pub fn since(&self, earlier: &Self) -> Result<Duration, GpuError> {
        match (&self.0, &earlier.0) {
            (Kind::Driver(event), Kind::Driver(earlier)) => event.since(earlier),
            (Kind::Emulated(event), Kind::Emulated(earlier)) => event.since(earlier),
            _ => Err(GpuError::Foreign),
        }
    }
}

/// A copy that was not seen to end may still use its staging memory, which then must stay.
fn settle(staging: GpuBuffer, copied: Result<(), GpuError>) -> Result<GpuBuffer, GpuError> {
    match copied {
        Ok(()) => Ok(staging),
        Err(error) => {
            let _kept = std::mem::ManuallyDrop::new(staging);
            Err(error)
        }
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
