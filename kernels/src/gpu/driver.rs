//! The CUDA driver, opened at run time.

mod memory;
mod stream;

use std::ffi::{CString, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::sys::{
    self, CUGPUDirectRDMAWritesOrdering, CUdevice_attribute, CUfunction_attribute, CUmemLocation,
    CUmemLocationType, CUpointer_attribute, CUresult,
};
use cudarc::driver::{DriverError, result};

pub(super) use self::memory::Memory;
use self::memory::PagePool;
pub(super) use self::stream::{Event, Graph, Stream};
use super::layer::MapShape;
use super::{GpuError, Reach};
use crate::abi::{DTYPE_F8_E4M3, DevicePtr, PRODUCT_SHARED_BYTES};
use crate::entries::{ENTRIES, PRODUCTS};

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
    spare: PagePool,
}

// SAFETY: driver handles have no thread affinity; every call makes the context current first.
unsafe impl Send for Context {}
// SAFETY: the driver locks; nothing here is changed after `open`.
unsafe impl Sync for Context {}

impl Gpu {
    pub(super) fn count() -> Result<u32, GpuError> {
        // Checked first, because every other call panics when the library is missing. SAFETY: opens and closes the
        // library, whose constructors have no preconditions.
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
        let mut opened = Context {
            ordinal,
            device,
            context,
            modules: Vec::new(),
            functions: Vec::new(),
            spare: PagePool::default(),
        };
        let current = opened.bind()?;
        opened.load()?;
        drop(current);
        Ok(Self { context: Arc::new(opened) })
    }

    pub(super) fn ordinal(&self) -> u32 {
        self.context.ordinal
    }

    pub(super) fn pci_address(&self) -> Option<String> {
        let mut text = [0u8; 32];
        // SAFETY: the driver writes a terminated string of at most this length.
        let result = unsafe {
            let len = text.len() as i32;
            sys::cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), len, self.context.device)
        };
        check("cuDeviceGetPCIBusId", result).ok()?;
        let text = std::ffi::CStr::from_bytes_until_nul(&text).ok()?.to_str().ok()?;
        Some(text.to_ascii_lowercase())
    }

    pub(super) fn orders_writes_of_nics(&self) -> Result<bool, GpuError> {
        let which = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING;
        // SAFETY: devices are never destroyed.
        let order = unsafe { result::device::get_attribute(self.context.device, which) }
            .map_err(|error| failed("cuDeviceGetAttribute", error))?;
        let owner = CUGPUDirectRDMAWritesOrdering::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER;
        Ok(order >= owner as i32)
    }

    pub(super) fn free_bytes(&self) -> Result<u64, GpuError> {
        let _current = self.context.bind()?;
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
        let _current = self.context.bind()?;
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

    pub(super) fn reach(&self, address: DevicePtr, num_bytes: u64) -> Reach {
        let Ok(_current) = self.context.bind() else { return Reach::Unknown };
        let first = self.context.reach(address.0);
        if first != Reach::Whole || num_bytes <= 1 {
            return first;
        }
        // Not by the size of the range: an allocator may have mapped a tensor piece by piece.
        match self.context.reach(address.0.saturating_add(num_bytes - 1)) {
            Reach::Unknown => Reach::Short,
            last => last,
        }
    }
}

impl Context {
    /// Makes this the calling thread's context as long as the result lives.
    fn bind(&self) -> Result<CurrentContext, GpuError> {
        let mut previous = null_mut();
        // SAFETY: writes one handle.
        check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&raw mut previous) })?;
        if previous == self.context {
            return Ok(CurrentContext { previous: null_mut() });
        }
        // SAFETY: the context is retained as long as `self`.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })?;
        Ok(CurrentContext { previous })
    }

    fn location(&self) -> CUmemLocation {
        CUmemLocation {
            type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: self.ordinal as i32,
        }
    }

    /// How kernels of this context, which is current, reach the byte at `address`.
    fn reach(&self, address: u64) -> Reach {
        let mut which = [
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        ];
        let mut values = [0u64; 3];
        let mut to = values.each_mut().map(|value| std::ptr::from_mut(value).cast());
        // Together, since each call has its price, and this stands before every launch.
        // SAFETY: none of the attributes is larger than its word; of unknown addresses all stay 0.
        let answer =
            unsafe { sys::cuPointerGetAttributes(3, which.as_mut_ptr(), to.as_mut_ptr(), address) };
        let [kind, is_managed, owner] = values;
        if answer != CUresult::CUDA_SUCCESS || kind == 0 {
            return Reach::Unknown;
        }
        let is_device = kind == sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as u64;
        if !is_device || is_managed & 1 != 0 {
            return Reach::Whole;
        }
        let owner = owner as u32;
        if owner == self.ordinal {
            return Reach::Whole;
        }
        // A peer's memory, which may be mapped for this GPU, or be reachable since other code enabled peer access.
        let (location, mut access) = (self.location(), 0u64);
        // SAFETY: reads the location, writes one word; addresses of other allocations are answered by an error.
        let answer = unsafe { sys::cuMemGetAccess(&raw mut access, &raw const location, address) };
        let read_write = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as u64;
        let is_mapped = answer == CUresult::CUDA_SUCCESS && access == read_write;
        let is_reached = || {
            let mut pointer = 0u64;
            let which = CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_POINTER;
            // SAFETY: writes one pointer.
            let answer =
                unsafe { sys::cuPointerGetAttribute((&raw mut pointer).cast(), which, address) };
            answer == CUresult::CUDA_SUCCESS
        };
        if is_mapped || (answer != CUresult::CUDA_SUCCESS && is_reached()) {
            return Reach::Whole;
        }
        Reach::Foreign { owner }
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
        if let Ok(_current) = self.bind() {
            for module in &self.modules {
                // SAFETY: loaded in `load`, unloaded once; streams and graphs hold the context.
                ignore("cuModuleUnload", unsafe { sys::cuModuleUnload(*module) });
            }
            self.spare.free();
        }
        // SAFETY: retained once in `open`.
        ignore("cuDevicePrimaryCtxRelease", unsafe {
            sys::cuDevicePrimaryCtxRelease_v2(self.device)
        });
    }
}

/// The calling thread's context, until it is the one from before: an engine on this thread may use another
/// GPU, which its runtime takes from here. A thread that had none keeps it.
#[derive(Debug)]
struct CurrentContext {
    /// Null when there is nothing to restore.
    previous: sys::CUcontext,
}

impl Drop for CurrentContext {
    fn drop(&mut self) {
        if !self.previous.is_null() {
            // SAFETY: was this thread's context; the code that set it keeps it alive.
            ignore("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.previous) });
        }
    }
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
