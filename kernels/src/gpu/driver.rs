//! The CUDA driver, opened at run time.

use std::ffi::{CString, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{
    self, CUdevice_attribute, CUfunction_attribute, CUmemAccess_flags,
    CUmemAllocationGranularity_flags, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemAllocationType, CUmemLocation, CUmemLocationType, CUpointer_attribute, CUresult,
};
use cudarc::driver::{DriverError, result};

use super::GpuError;
use super::layer::MapShape;
use crate::abi::{DTYPE_F8_E4M3, DevicePtr, PRODUCT_SHARED_BYTES};
use crate::entries::{ENTRIES, FLAG_ADD, PRODUCTS};
use crate::plan::LaunchPlan;

mod images {
    /// Bytes where the driver may read them as words.
    #[repr(align(64))]
    struct Aligned<T>(T);

    include!(concat!(env!("OUT_DIR"), "/images.rs"));
}

#[derive(Debug, Clone)]
pub(super) struct Gpu {
    context: Arc<Context>,
}

/// The primary context of a GPU with the kernels in it.
#[derive(Debug)]
struct Context {
    ordinal: u32,
    device: sys::CUdevice,
    context: sys::CUcontext,
    modules: Vec<sys::CUmodule>,
    /// In the order of [`ENTRIES`].
    functions: Vec<sys::CUfunction>,
}

// SAFETY: driver handles have no thread affinity; every call makes the context current first.
unsafe impl Send for Context {}
// SAFETY: the driver locks; nothing here is changed after `open`.
unsafe impl Sync for Context {}

#[derive(Debug)]
pub(super) struct Memory {
    context: Arc<Context>,
    kind: MemoryKind,
    ptr: sys::CUdeviceptr,
    len: usize,
}

#[derive(Debug)]
enum MemoryKind {
    Device,
    /// `handle` of what is mapped, if it is this process's own.
    Mapped {
        handle: Option<sys::CUmemGenericAllocationHandle>,
        mapped_bytes: usize,
    },
    Host(NonNull<u8>),
    /// Somebody else's pages, made known to the GPU.
    Registered(NonNull<u8>),
}

// SAFETY: an address and handles without thread affinity, freed once.
unsafe impl Send for Memory {}
// SAFETY: no method changes anything.
unsafe impl Sync for Memory {}

#[derive(Debug)]
pub(super) struct Stream {
    context: Arc<Context>,
    stream: sys::CUstream,
    /// Whether this made the stream, and so destroys it.
    is_own: bool,
}

// SAFETY: streams have no thread affinity.
unsafe impl Send for Stream {}
// SAFETY: the driver orders calls on one stream itself.
unsafe impl Sync for Stream {}

#[derive(Debug)]
pub(super) struct Event {
    context: Arc<Context>,
    event: sys::CUevent,
}

// SAFETY: events have no thread affinity.
unsafe impl Send for Event {}
// SAFETY: the driver orders calls on one event itself.
unsafe impl Sync for Event {}

#[derive(Debug)]
pub(super) struct Graph {
    context: Arc<Context>,
    executable: sys::CUgraphExec,
}

// SAFETY: as for streams.
unsafe impl Send for Graph {}
// SAFETY: launches of one graph are ordered by the driver.
unsafe impl Sync for Graph {}

impl Gpu {
    pub(super) fn count() -> Result<u32, GpuError> {
        // Asked first, because every other call panics when the library is missing.
        // SAFETY: opens and closes the library, whose constructors have no preconditions.
        if !unsafe { sys::is_culib_present() } {
            return Err(GpuError::NoDriver);
        }
        result::init().map_err(|error| failed("cuInit", error))?;
        let count = result::device::get_count().map_err(|e| failed("cuDeviceGetCount", e))?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    pub(super) fn open(ordinal: u32) -> Result<Self, GpuError> {
        let count = Self::count()?;
        if ordinal >= count {
            return Err(GpuError::NoSuchGpu { ordinal, count });
        }
        let device = result::device::get(ordinal as i32).map_err(|e| failed("cuDeviceGet", e))?;
        let attribute = |which| {
            // SAFETY: `device` came from the driver just now; devices are never destroyed.
            unsafe { result::device::get_attribute(device, which) }
                .map(|value| u32::try_from(value).unwrap_or(0))
                .map_err(|error| failed("cuDeviceGetAttribute", error))
        };
        let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if major < 9 {
            let name = result::device::get_name(device).unwrap_or_default();
            return Err(GpuError::TooOld { ordinal, name, major, minor });
        }
        let mut context = null_mut();
        // SAFETY: writes one handle; released in `Context::drop`.
        check("cuDevicePrimaryCtxRetain", unsafe {
            sys::cuDevicePrimaryCtxRetain(&raw mut context, device)
        })?;
        let mut opened =
            Context { ordinal, device, context, modules: Vec::new(), functions: Vec::new() };
        opened.bind()?;
        opened.load()?;
        Ok(Self { context: Arc::new(opened) })
    }

    pub(super) fn ordinal(&self) -> u32 {
        self.context.ordinal
    }

    pub(super) fn event(&self) -> Result<Event, GpuError> {
        self.context.bind()?;
        let mut event = null_mut();
        let flags = sys::CUevent_flags_enum::CU_EVENT_DEFAULT as u32;
        // SAFETY: writes one handle; destroyed in `Event::drop`.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut event, flags) })?;
        Ok(Event { context: Arc::clone(&self.context), event })
    }

    pub(super) fn alloc(&self, bytes: u64) -> Result<Memory, GpuError> {
        self.context.bind()?;
        let len = (bytes as usize).max(1);
        let mut ptr = 0;
        // SAFETY: writes one address; freed in `Memory::drop`.
        check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&raw mut ptr, len) })?;
        let memory =
            Memory { context: Arc::clone(&self.context), kind: MemoryKind::Device, ptr, len };
        self.zero(&memory)?;
        Ok(memory)
    }

    pub(super) fn alloc_shared(&self, bytes: u64) -> Result<Memory, GpuError> {
        self.context.bind()?;
        // SAFETY: an all-zero property is a valid value of this plain struct.
        let mut prop: CUmemAllocationProp = unsafe { std::mem::zeroed() };
        prop.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        prop.requestedHandleTypes = POSIX_FD;
        prop.location = self.context.location();
        let mut granularity = 0;
        // SAFETY: reads `prop`, writes one number.
        check("cuMemGetAllocationGranularity", unsafe {
            sys::cuMemGetAllocationGranularity(
                &raw mut granularity,
                &raw const prop,
                CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
            )
        })?;
        let len = (bytes as usize).max(1).next_multiple_of(granularity.max(1));
        let mut handle = 0;
        // SAFETY: reads `prop`, writes one handle; released below or in `Memory::drop`.
        check("cuMemCreate", unsafe {
            sys::cuMemCreate(&raw mut handle, len, &raw const prop, 0)
        })?;
        let memory = self.map(handle, len).inspect_err(|_| release(handle))?;
        self.zero(&memory)?;
        Ok(memory)
    }

    pub(super) fn import_shared(&self, memory: OwnedFd, bytes: u64) -> Result<Memory, GpuError> {
        self.context.bind()?;
        let mut handle = 0;
        let fd = memory.as_raw_fd() as usize as *mut c_void;
        // SAFETY: writes one handle. The descriptor is only read; whatever it is, the driver says so.
        check("cuMemImportFromShareableHandle", unsafe {
            sys::cuMemImportFromShareableHandle(&raw mut handle, fd, POSIX_FD)
        })?;
        let mapped = self.reach(handle).and_then(|()| self.map(handle, bytes as usize));
        // The mapping keeps the memory alive by itself.
        release(handle);
        let mut mapped = mapped?;
        if let MemoryKind::Mapped { handle, .. } = &mut mapped.kind {
            *handle = None;
        }
        Ok(mapped)
    }

    pub(super) fn alloc_host(&self, bytes: u64) -> Result<Memory, GpuError> {
        self.context.bind()?;
        let len = (bytes as usize).max(1);
        let mut host = null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: writes one address; freed in `Memory::drop`.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&raw mut host, len, flags) })?;
        // SAFETY: `len` bytes were just allocated.
        unsafe { std::ptr::write_bytes(host.cast::<u8>(), 0, len) };
        let Some(host) = NonNull::new(host.cast::<u8>()) else {
            return Err(GpuError::Driver {
                call: "cuMemHostAlloc",
                code: 0,
                name: "null was returned".into(),
            });
        };
        let mut ptr = 0;
        // SAFETY: `host` is mapped memory; writes one address.
        let mapped = check("cuMemHostGetDevicePointer", unsafe {
            sys::cuMemHostGetDevicePointer_v2(&raw mut ptr, host.as_ptr().cast(), 0)
        });
        let context = Arc::clone(&self.context);
        let memory = Memory { context, kind: MemoryKind::Host(host), ptr, len };
        mapped.map(|()| memory)
    }

    pub(super) unsafe fn register_host(
        &self,
        pages: NonNull<u8>,
        bytes: u64,
        is_register: bool,
    ) -> Result<Memory, GpuError> {
        self.context.bind()?;
        let (len, host) = (bytes as usize, pages.as_ptr().cast::<c_void>());
        let mut flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        if is_register {
            flags |= sys::CU_MEMHOSTREGISTER_IOMEMORY;
        }
        // SAFETY: the caller keeps the pages mapped; unregistered in `Memory::drop`.
        check("cuMemHostRegister", unsafe { sys::cuMemHostRegister_v2(host, len, flags) })?;
        let mut ptr = 0;
        // SAFETY: `host` is registered memory; writes one address.
        let mapped = check("cuMemHostGetDevicePointer", unsafe {
            sys::cuMemHostGetDevicePointer_v2(&raw mut ptr, host, 0)
        });
        let context = Arc::clone(&self.context);
        let memory = Memory { context, kind: MemoryKind::Registered(pages), ptr, len };
        mapped.map(|()| memory)
    }

    pub(super) fn stream(&self) -> Result<Stream, GpuError> {
        self.context.bind()?;
        let mut stream = null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes one handle; destroyed in `Stream::drop`.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut stream, flags) })?;
        Ok(Stream { context: Arc::clone(&self.context), stream, is_own: true })
    }

    pub(super) fn wrap_stream(&self, raw: u64) -> Result<Stream, GpuError> {
        let stream = raw as usize as sys::CUstream;
        Ok(Stream { context: Arc::clone(&self.context), stream, is_own: false })
    }

    pub(super) fn free_bytes(&self) -> Result<u64, GpuError> {
        self.context.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two numbers.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) })?;
        Ok(free as u64)
    }

    /// The driver's description of a matrix, for the copy engine.
    pub(super) fn tensor_map(
        &self,
        base: DevicePtr,
        dtype: u32,
        shape: &MapShape,
    ) -> Result<[u64; 16], GpuError> {
        self.context.bind()?;
        // SAFETY: an all-zero map is a valid value of this plain struct.
        let mut map: sys::CUtensorMap = unsafe { std::mem::zeroed() };
        let values = if dtype == DTYPE_F8_E4M3 {
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8
        } else {
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
        };
        // SAFETY: writes `map`, reads as many numbers of each list as `rank` says, at most all five. The
        // address is only noted.
        check("cuTensorMapEncodeTiled", unsafe {
            sys::cuTensorMapEncodeTiled(
                &raw mut map,
                values,
                shape.rank,
                base.0 as usize as *mut c_void,
                shape.dims.as_ptr(),
                shape.strides.as_ptr(),
                shape.extent.as_ptr(),
                [1; 5].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        })?;
        Ok(map.opaque)
    }

    pub(super) fn is_registered(&self, address: DevicePtr) -> bool {
        if self.context.bind().is_err() {
            return false;
        }
        let mut kind = 0u32;
        let which = CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
        // SAFETY: writes one word; unknown addresses are answered by an error.
        let answer =
            unsafe { sys::cuPointerGetAttribute((&raw mut kind).cast(), which, address.0) };
        answer == CUresult::CUDA_SUCCESS
    }

    /// Whether this GPU reaches the memory behind `handle`.
    fn reach(&self, handle: sys::CUmemGenericAllocationHandle) -> Result<(), GpuError> {
        // SAFETY: an all-zero property is a valid value of this plain struct.
        let mut prop: CUmemAllocationProp = unsafe { std::mem::zeroed() };
        // SAFETY: writes `prop`; the handle is alive.
        check("cuMemGetAllocationPropertiesFromHandle", unsafe {
            sys::cuMemGetAllocationPropertiesFromHandle(&raw mut prop, handle)
        })?;
        let peer = u32::try_from(prop.location.id).unwrap_or(u32::MAX);
        if peer == self.context.ordinal {
            return Ok(());
        }
        let mut can_access = 0;
        let device = result::device::get(prop.location.id).map_err(|e| failed("cuDeviceGet", e))?;
        // SAFETY: writes one number; both devices came from the driver.
        check("cuDeviceCanAccessPeer", unsafe {
            sys::cuDeviceCanAccessPeer(&raw mut can_access, self.context.device, device)
        })?;
        if can_access == 0 {
            return Err(GpuError::NoPeerAccess { ordinal: self.context.ordinal, peer });
        }
        Ok(())
    }

    /// Maps `len` bytes of `handle` for this GPU. The result takes the handle over; after an error it
    /// is still the caller's.
    fn map(
        &self,
        handle: sys::CUmemGenericAllocationHandle,
        len: usize,
    ) -> Result<Memory, GpuError> {
        let mut ptr = 0;
        let mapped_bytes = len.next_multiple_of(MAP_ALIGN);
        // SAFETY: writes one address; freed below or in `Memory::drop`.
        check("cuMemAddressReserve", unsafe {
            sys::cuMemAddressReserve(&raw mut ptr, mapped_bytes, 0, 0, 0)
        })?;
        // SAFETY: the range was just reserved, the handle is alive. A length beyond the memory's is
        // refused by the driver.
        let mapped = check("cuMemMap", unsafe { sys::cuMemMap(ptr, mapped_bytes, 0, handle, 0) });
        if let Err(error) = mapped {
            // SAFETY: reserved above, nothing is mapped there.
            ignore("cuMemAddressFree", unsafe { sys::cuMemAddressFree(ptr, mapped_bytes) });
            return Err(error);
        }
        let access = sys::CUmemAccessDesc {
            location: self.context.location(),
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the range was just mapped; one descriptor is read.
        let accessible = check("cuMemSetAccess", unsafe {
            sys::cuMemSetAccess(ptr, mapped_bytes, &raw const access, 1)
        });
        if let Err(error) = accessible {
            unmap(ptr, mapped_bytes);
            return Err(error);
        }
        let kind = MemoryKind::Mapped { handle: Some(handle), mapped_bytes };
        Ok(Memory { context: Arc::clone(&self.context), kind, ptr, len })
    }

    fn zero(&self, memory: &Memory) -> Result<(), GpuError> {
        let stream = self.stream()?;
        // SAFETY: the whole of fresh memory.
        unsafe { stream.fill(memory.ptr(), 0, memory.len())? };
        stream.wait(Instant::now() + SETUP_LIMIT)
    }
}

impl Context {
    fn bind(&self) -> Result<(), GpuError> {
        // SAFETY: the context is retained as long as `self`.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    fn location(&self) -> CUmemLocation {
        CUmemLocation {
            type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: self.ordinal as i32,
        }
    }

    /// Loads every kernel now: loading one later may wait behind kernels that wait for it.
    fn load(&mut self) -> Result<(), GpuError> {
        for image in images::IMAGES {
            let mut module = null_mut();
            // SAFETY: the image is a whole, aligned fat binary; unloaded in `drop`.
            check("cuModuleLoadData", unsafe {
                sys::cuModuleLoadData(&raw mut module, image.as_ptr().cast())
            })?;
            self.modules.push(module);
        }
        for (entry, image_idx) in ENTRIES.into_iter().zip(images::IMAGE_OF) {
            let name = CString::new(entry).unwrap_or_default();
            let mut function = null_mut();
            // SAFETY: the module is loaded, the name ends with a zero; writes one handle.
            check("cuModuleGetFunction", unsafe {
                sys::cuModuleGetFunction(&raw mut function, self.modules[image_idx], name.as_ptr())
            })?;
            if PRODUCTS.contains(&entry) {
                let which = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                // SAFETY: a function of a loaded module.
                check("cuFuncSetAttribute", unsafe {
                    sys::cuFuncSetAttribute(function, which, PRODUCT_SHARED_BYTES as i32)
                })?;
            }
            // SAFETY: as above.
            check("cuFuncLoad", unsafe { sys::cuFuncLoad(function) })?;
            self.functions.push(function);
        }
        Ok(())
    }

    fn function(&self, entry: &str) -> Result<sys::CUfunction, GpuError> {
        let at = ENTRIES.iter().position(|name| *name == entry);
        at.and_then(|at| self.functions.get(at).copied()).ok_or_else(|| GpuError::Driver {
            call: "cuModuleGetFunction",
            code: CUresult::CUDA_ERROR_NOT_FOUND as u32,
            name: format!("no kernel is called {entry}"),
        })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.bind().is_ok() {
            for module in &self.modules {
                // SAFETY: loaded in `load`, unloaded once; streams and graphs hold the context.
                ignore("cuModuleUnload", unsafe { sys::cuModuleUnload(*module) });
            }
        }
        // SAFETY: retained once in `open`.
        ignore("cuDevicePrimaryCtxRelease", unsafe {
            sys::cuDevicePrimaryCtxRelease_v2(self.device)
        });
    }
}

impl Memory {
    pub(super) const fn ptr(&self) -> DevicePtr {
        DevicePtr(self.ptr)
    }

    pub(super) const fn len(&self) -> u64 {
        self.len as u64
    }

    pub(super) const fn host(&self) -> Option<NonNull<u8>> {
        match self.kind {
            MemoryKind::Host(host) => Some(host),
            _ => None,
        }
    }

    pub(super) fn export(&self) -> Result<OwnedFd, GpuError> {
        self.context.bind()?;
        let MemoryKind::Mapped { handle: Some(handle), .. } = self.kind else {
            return Err(GpuError::Driver {
                call: "cuMemExportToShareableHandle",
                code: CUresult::CUDA_ERROR_NOT_PERMITTED as u32,
                name: "the memory was not allocated to be shared".into(),
            });
        };
        let mut fd = -1i32;
        // SAFETY: writes one descriptor; the handle is alive.
        check("cuMemExportToShareableHandle", unsafe {
            sys::cuMemExportToShareableHandle((&raw mut fd).cast(), handle, POSIX_FD, 0)
        })?;
        // SAFETY: the driver made the descriptor for the caller.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    pub(super) fn dma_buf(&self) -> Result<OwnedFd, GpuError> {
        self.context.bind()?;
        let kind = sys::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
        let mut fd = -1i32;
        // SAFETY: writes one descriptor; the range is this memory's.
        check("cuMemGetHandleForAddressRange", unsafe {
            sys::cuMemGetHandleForAddressRange((&raw mut fd).cast(), self.ptr, self.len, kind, 0)
        })?;
        // SAFETY: the driver made the descriptor for the caller.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Err(error) = self.context.bind() {
            tracing::error!(%error, "GPU memory is not freed");
            return;
        }
        match self.kind {
            // SAFETY: allocated in `alloc`, freed once.
            MemoryKind::Device => ignore("cuMemFree", unsafe { sys::cuMemFree_v2(self.ptr) }),
            MemoryKind::Mapped { handle, mapped_bytes } => {
                unmap(self.ptr, mapped_bytes);
                if let Some(handle) = handle {
                    release(handle);
                }
            }
            MemoryKind::Host(host) => {
                // SAFETY: allocated in `alloc_host`, freed once.
                let freed = unsafe { sys::cuMemFreeHost(host.as_ptr().cast()) };
                ignore("cuMemFreeHost", freed);
            }
            MemoryKind::Registered(pages) => {
                // SAFETY: registered in `register_host`, given back once.
                let given = unsafe { sys::cuMemHostUnregister(pages.as_ptr().cast()) };
                ignore("cuMemHostUnregister", given);
            }
        }
    }
}

impl Stream {
    pub(super) unsafe fn copy(
        &self,
        to: DevicePtr,
        from: DevicePtr,
        bytes: u64,
    ) -> Result<(), GpuError> {
        self.context.bind()?;
        // SAFETY: the caller's promise; with unified addresses the driver tells memories apart.
        check("cuMemcpyAsync", unsafe {
            sys::cuMemcpyAsync(to.0, from.0, bytes as usize, self.stream)
        })
    }

    pub(super) unsafe fn fill(&self, to: DevicePtr, value: u8, bytes: u64) -> Result<(), GpuError> {
        self.context.bind()?;
        // SAFETY: the caller's promise.
        check("cuMemsetD8Async", unsafe {
            sys::cuMemsetD8Async(to.0, value, bytes as usize, self.stream)
        })
    }

    pub(super) unsafe fn add_flag(&self, flag: DevicePtr, value: u64) -> Result<(), GpuError> {
        let (mut flag, mut value) = (flag.0, value);
        let mut arguments = [(&raw mut flag).cast::<c_void>(), (&raw mut value).cast()];
        // SAFETY: the caller's promise about the address; the kernel takes two 64-bit arguments.
        unsafe { self.start("sy_flag_add", &FLAG_ADD_PLAN, &mut arguments) }
    }

    pub(super) fn then(&self, action: Box<dyn FnOnce() + Send>) -> Result<(), GpuError> {
        // A recorded call would run at every replay, but can only run once.
        if self.is_capturing()? {
            return Err(GpuError::Driver {
                call: "cuLaunchHostFunc",
                code: CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED as u32,
                name: "a host call cannot be recorded".into(),
            });
        }
        self.context.bind()?;
        let data = Box::into_raw(Box::new(action)).cast::<c_void>();
        // SAFETY: `call_once` takes back the box, once.
        let launched = check("cuLaunchHostFunc", unsafe {
            sys::cuLaunchHostFunc(self.stream, Some(call_once), data)
        });
        if launched.is_err() {
            // SAFETY: the driver refused, so the box is still ours.
            drop(unsafe { Box::from_raw(data.cast::<Box<dyn FnOnce() + Send>>()) });
        }
        launched
    }

    pub(super) unsafe fn launch(
        &self,
        name: &'static str,
        plan: &LaunchPlan,
        params: &[u8],
    ) -> Result<(), GpuError> {
        let mut arguments = [params.as_ptr().cast_mut().cast::<c_void>()];
        // SAFETY: the caller's promise that `params` is what the entry takes; the driver copies it.
        unsafe { self.start(name, plan, &mut arguments) }
    }

    /// # Safety
    /// `arguments` point to what the kernel takes.
    unsafe fn start(
        &self,
        call: &'static str,
        plan: &LaunchPlan,
        arguments: &mut [*mut c_void],
    ) -> Result<(), GpuError> {
        self.context.bind()?;
        let function = self.context.function(plan.entry)?;
        // SAFETY: an all-zero attribute is a valid value of this plain struct.
        let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
        attribute.id =
            sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute.value.programmaticStreamSerializationAllowed = 1;
        let config = sys::CUlaunchConfig {
            gridDimX: plan.num_blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: plan.num_threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: plan.shared_bytes,
            hStream: self.stream,
            attrs: &raw mut attribute,
            numAttrs: u32::from(plan.overlaps),
        };
        // SAFETY: function and stream belong to the current context; the caller's promise about the
        // arguments, which the driver copies before it returns.
        check(call, unsafe {
            sys::cuLaunchKernelEx(&raw const config, function, arguments.as_mut_ptr(), null_mut())
        })
    }

    pub(super) fn raw(&self) -> u64 {
        self.stream as u64
    }

    pub(super) fn is_capturing(&self) -> Result<bool, GpuError> {
        self.context.bind()?;
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is alive; writes one word.
        check("cuStreamIsCapturing", unsafe {
            sys::cuStreamIsCapturing(self.stream, &raw mut status)
        })?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    pub(super) fn record(&self, event: &Event) -> Result<(), GpuError> {
        self.context.bind()?;
        // External: a recording made while capturing becomes a step of the graph, seen from outside.
        let flags = match self.is_capturing()? {
            true => sys::CUevent_record_flags_enum::CU_EVENT_RECORD_EXTERNAL,
            false => sys::CUevent_record_flags_enum::CU_EVENT_RECORD_DEFAULT,
        };
        // SAFETY: both are alive.
        check("cuEventRecordWithFlags", unsafe {
            sys::cuEventRecordWithFlags(event.event, self.stream, flags as u32)
        })
    }

    pub(super) fn wait_for(&self, event: &Event) -> Result<(), GpuError> {
        self.context.bind()?;
        // SAFETY: both are alive; the driver keeps what the wait needs.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.stream, event.event, 0) })
    }

    pub(super) fn is_done(&self) -> Result<bool, GpuError> {
        self.context.bind()?;
        // SAFETY: the stream is alive.
        match unsafe { sys::cuStreamQuery(self.stream) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            answer => check("cuStreamQuery", answer).map(|()| true),
        }
    }

    pub(super) fn wait(&self, deadline: Instant) -> Result<(), GpuError> {
        let start = Instant::now();
        loop {
            if self.is_done()? {
                return Ok(());
            }
            let now = Instant::now();
            if now >= deadline {
                return Err(GpuError::Deadline { what: "stream" });
            }
            // Most waits end at once; long ones leave the core to others.
            if now - start > SPIN {
                std::thread::sleep(PAUSE);
            } else {
                std::hint::spin_loop();
            }
        }
    }

    pub(super) fn begin_capture(&self) -> Result<(), GpuError> {
        self.context.bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(self.stream, mode) })
    }

    pub(super) fn end_capture(&self) -> Result<Graph, GpuError> {
        self.context.bind()?;
        let mut graph = null_mut();
        // SAFETY: the stream captures; writes one handle, destroyed below.
        check("cuStreamEndCapture", unsafe {
            sys::cuStreamEndCapture(self.stream, &raw mut graph)
        })?;
        let mut executable = null_mut();
        // SAFETY: a whole graph; writes one handle, destroyed in `Graph::drop`.
        let made = check("cuGraphInstantiate", unsafe {
            sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0)
        });
        // SAFETY: made by the capture, destroyed once; the executable graph is independent of it.
        ignore("cuGraphDestroy", unsafe { sys::cuGraphDestroy(graph) });
        made.map(|()| Graph { context: Arc::clone(&self.context), executable })
    }

    pub(super) fn replay(&self, graph: &Graph) -> Result<(), GpuError> {
        self.context.bind()?;
        // SAFETY: both are alive.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(graph.executable, self.stream) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.is_own && self.context.bind().is_ok() {
            // SAFETY: created once, destroyed once; work under way goes on to its end.
            ignore("cuStreamDestroy", unsafe { sys::cuStreamDestroy_v2(self.stream) });
        }
    }
}

impl Event {
    pub(super) fn is_done(&self) -> Result<bool, GpuError> {
        self.context.bind()?;
        // SAFETY: the event is alive.
        match unsafe { sys::cuEventQuery(self.event) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            answer => check("cuEventQuery", answer).map(|()| true),
        }
    }

    pub(super) fn since(&self, earlier: &Self) -> Result<Duration, GpuError> {
        self.context.bind()?;
        let mut elapsed_ms = 0f32;
        // SAFETY: both are alive; writes one number.
        check("cuEventElapsedTime", unsafe {
            sys::cuEventElapsedTime_v2(&raw mut elapsed_ms, earlier.event, self.event)
        })?;
        Ok(Duration::from_secs_f64(f64::from(elapsed_ms.max(0.0)) * 1e-3))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: created once, destroyed once; the driver keeps what waits for it.
            ignore("cuEventDestroy", unsafe { sys::cuEventDestroy_v2(self.event) });
        }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: instantiated once, destroyed once.
            ignore("cuGraphExecDestroy", unsafe { sys::cuGraphExecDestroy(self.executable) });
        }
    }
}

/// Runs what [`Stream::then`] boxed.
///
/// # Safety
/// `data` is such a box, and this its only use.
unsafe extern "C" fn call_once(data: *mut c_void) {
    // SAFETY: the caller's promise.
    let action = unsafe { Box::from_raw(data.cast::<Box<dyn FnOnce() + Send>>()) };
    action();
}

fn release(handle: sys::CUmemGenericAllocationHandle) {
    // SAFETY: the caller owns the handle and does not use it again.
    ignore("cuMemRelease", unsafe { sys::cuMemRelease(handle) });
}

fn unmap(ptr: sys::CUdeviceptr, bytes: usize) {
    // SAFETY: the caller owns the mapping and does not use it again.
    ignore("cuMemUnmap", unsafe { sys::cuMemUnmap(ptr, bytes) });
    // SAFETY: as above; nothing is mapped there any more.
    ignore("cuMemAddressFree", unsafe { sys::cuMemAddressFree(ptr, bytes) });
}

fn check(call: &'static str, answer: CUresult) -> Result<(), GpuError> {
    answer.result().map_err(|error| failed(call, error))
}

fn failed(call: &'static str, error: DriverError) -> GpuError {
    GpuError::Driver { call, code: error.0 as u32, name: format!("{:?}", error.0) }
}

/// For calls that free: nothing can be done about a failure but say so.
fn ignore(call: &'static str, answer: CUresult) {
    if let Err(error) = check(call, answer) {
        tracing::error!(%error, "cannot give a GPU resource back");
    }
}

const FLAG_ADD_PLAN: LaunchPlan = LaunchPlan {
    num_blocks: 1,
    num_threads: 1,
    is_tuned: false,
    entry: FLAG_ADD,
    shared_bytes: 0,
    overlaps: false,
};
const POSIX_FD: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
/// Mappings are made of pages of this size.
const MAP_ALIGN: usize = 2 << 20;
/// For clearing fresh memory.
const SETUP_LIMIT: Duration = Duration::from_secs(20);
const SPIN: Duration = Duration::from_micros(200);
const PAUSE: Duration = Duration::from_micros(20);
