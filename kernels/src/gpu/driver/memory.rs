//! Memory of a GPU, of its peers and of the host.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::result;
use cudarc::driver::sys::{
    self, CUmemAccess_flags, CUmemAllocationGranularity_flags, CUmemAllocationHandleType,
    CUmemAllocationProp, CUmemAllocationType, CUresult,
};

use super::{Context, Gpu, check, failed, ignore};
use crate::abi::DevicePtr;
use crate::gpu::GpuError;

#[derive(Debug)]
pub(in crate::gpu) struct Memory {
    context: Arc<Context>,
    kind: MemoryKind,
    ptr: sys::CUdeviceptr,
    len: usize,
}

#[derive(Debug)]
enum MemoryKind {
    Device,
    /// `handle` of the mapped memory, if it is this process's own.
    Mapped {
        handle: Option<sys::CUmemGenericAllocationHandle>,
        mapped_bytes: usize,
    },
    /// `room` bytes were allocated.
    Host {
        host: NonNull<u8>,
        room: usize,
    },
    /// Pages with another owner, registered for the GPU.
    Registered(NonNull<u8>),
}

// SAFETY: an address and handles without thread affinity, freed once.
unsafe impl Send for Memory {}
// SAFETY: no method changes anything.
unsafe impl Sync for Memory {}

impl Gpu {
    pub(in crate::gpu) fn alloc(&self, bytes: u64) -> Result<Memory, GpuError> {
        let _current = self.context.bind()?;
        let len = (bytes as usize).max(1);
        let mut ptr = 0;
        // SAFETY: writes one address; freed in `Memory::drop`.
        check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&raw mut ptr, len) })?;
        let memory =
            Memory { context: Arc::clone(&self.context), kind: MemoryKind::Device, ptr, len };
        self.zero(&memory)?;
        Ok(memory)
    }

    pub(in crate::gpu) fn alloc_shared(&self, bytes: u64) -> Result<Memory, GpuError> {
        let _current = self.context.bind()?;
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
        let len = whole_multiple("cuMemCreate", bytes.max(1), granularity)?;
        let mut handle = 0;
        // SAFETY: reads `prop`, writes one handle; released below or in `Memory::drop`.
        check("cuMemCreate", unsafe {
            sys::cuMemCreate(&raw mut handle, len, &raw const prop, 0)
        })?;
        let memory = self.map(handle, len).inspect_err(|_| release(handle))?;
        self.zero(&memory)?;
        Ok(memory)
    }

    pub(in crate::gpu) fn import_shared(
        &self,
        memory: OwnedFd,
        bytes: u64,
    ) -> Result<Memory, GpuError> {
        let _current = self.context.bind()?;
        let mut handle = 0;
        let fd = memory.as_raw_fd() as usize as *mut c_void;
        // SAFETY: writes one handle. The descriptor is only read; the driver reports the kind of its object.
        check("cuMemImportFromShareableHandle", unsafe {
            sys::cuMemImportFromShareableHandle(&raw mut handle, fd, POSIX_FD)
        })?;
        let mapped = self.check_reach(handle).and_then(|()| self.map(handle, bytes as usize));
        // The mapping keeps the memory alive by itself.
        release(handle);
        let mut mapped = mapped?;
        if let MemoryKind::Mapped { handle, .. } = &mut mapped.kind {
            *handle = None;
        }
        Ok(mapped)
    }

    pub(in crate::gpu) fn alloc_host(&self, bytes: u64) -> Result<Memory, GpuError> {
        let _current = self.context.bind()?;
        let len = usize::try_from(bytes.max(1)).unwrap_or(usize::MAX);
        let room = room_for(len)?;
        let context = Arc::clone(&self.context);
        if let Some(Pages { host, ptr, room }) = self.context.spare.take(room) {
            // SAFETY: `room` bytes without another user.
            unsafe { host.write_bytes(0, room) };
            return Ok(Memory { context, kind: MemoryKind::Host { host, room }, ptr, len });
        }
        let mut host = null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: writes one address; freed in `Memory::drop`.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&raw mut host, room, flags) })?;
        let Some(host) = NonNull::new(host.cast::<u8>()) else {
            return Err(GpuError::Driver {
                call: "cuMemHostAlloc",
                code: 0,
                name: "null was returned".into(),
            });
        };
        // SAFETY: `room` bytes were just allocated.
        unsafe { host.write_bytes(0, room) };
        let mut ptr = 0;
        // SAFETY: `host` is mapped memory; writes one address.
        let mapped = check("cuMemHostGetDevicePointer", unsafe {
            sys::cuMemHostGetDevicePointer_v2(&raw mut ptr, host.as_ptr().cast(), 0)
        });
        let memory = Memory { context, kind: MemoryKind::Host { host, room }, ptr, len };
        mapped.map(|()| memory)
    }

    pub(in crate::gpu) unsafe fn register_host(
        &self,
        pages: NonNull<u8>,
        bytes: u64,
        is_register: bool,
    ) -> Result<Memory, GpuError> {
        let _current = self.context.bind()?;
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

    /// Whether this GPU reaches the memory behind `handle`.
    fn check_reach(&self, handle: sys::CUmemGenericAllocationHandle) -> Result<(), GpuError> {
        let mut prop = MaybeUninit::<CUmemAllocationProp>::zeroed();
        // SAFETY: writes `prop`; the handle is alive.
        check("cuMemGetAllocationPropertiesFromHandle", unsafe {
            sys::cuMemGetAllocationPropertiesFromHandle(prop.as_mut_ptr(), handle)
        })?;
        // SAFETY: a number. The other fields are never read: memory of another owner may have a combination of
        // handle types, which is no value of their enum.
        let device_id = unsafe { (*prop.as_ptr()).location.id };
        let peer = u32::try_from(device_id).unwrap_or(u32::MAX);
        if peer == self.context.ordinal {
            return Ok(());
        }
        let mut can_access = 0;
        let device = result::device::get(device_id).map_err(|e| failed("cuDeviceGet", e))?;
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
        let mapped_bytes = whole_multiple("cuMemAddressReserve", len as u64, MAP_ALIGN)?;
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

impl Memory {
    pub(in crate::gpu) const fn ptr(&self) -> DevicePtr {
        DevicePtr(self.ptr)
    }

    pub(in crate::gpu) const fn len(&self) -> u64 {
        self.len as u64
    }

    pub(in crate::gpu) const fn host(&self) -> Option<NonNull<u8>> {
        match self.kind {
            MemoryKind::Host { host, .. } | MemoryKind::Registered(host) => Some(host),
            _ => None,
        }
    }

    pub(in crate::gpu) fn export(&self) -> Result<OwnedFd, GpuError> {
        let _current = self.context.bind()?;
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

    pub(in crate::gpu) fn dma_buf(&self) -> Result<OwnedFd, GpuError> {
        let _current = self.context.bind()?;
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
        let _current = match self.context.bind() {
            Ok(current) => current,
            Err(error) => {
                tracing::error!(%error, "GPU memory is not freed");
                return;
            }
        };
        match self.kind {
            // SAFETY: allocated in `alloc`, freed once.
            MemoryKind::Device => ignore("cuMemFree", unsafe { sys::cuMemFree_v2(self.ptr) }),
            MemoryKind::Mapped { handle, mapped_bytes } => {
                unmap(self.ptr, mapped_bytes);
                if let Some(handle) = handle {
                    release(handle);
                }
            }
            MemoryKind::Host { host, room } => {
                self.context.spare.put(Pages { host, ptr: self.ptr, room });
            }
            MemoryKind::Registered(pages) => {
                // SAFETY: registered in `register_host`, given back once.
                let given = unsafe { sys::cuMemHostUnregister(pages.as_ptr().cast()) };
                ignore("cuMemHostUnregister", given);
            }
        }
    }
}

/// Page-locked memory of the host that is not in use.
#[derive(Debug)]
pub(super) struct Pages {
    host: NonNull<u8>,
    ptr: sys::CUdeviceptr,
    room: usize,
}

// SAFETY: addresses without thread affinity, freed once.
unsafe impl Send for Pages {}

/// Page-locked memory for the next request of this size.
///
/// The driver frees such memory only when no kernel runs, and blocks all launches until then. Threads that move
/// frames drop it while kernels wait for these frames, so it is not freed before the GPU is.
#[derive(Debug, Default)]
pub(super) struct PagePool(Mutex<Vec<Pages>>);

impl PagePool {
    fn take(&self, room: usize) -> Option<Pages> {
        let mut pages = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = pages.iter().position(|pages| pages.room == room)?;
        Some(pages.swap_remove(at))
    }

    fn put(&self, pages: Pages) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(pages);
    }

    /// Frees it. The context that it was allocated in is current.
    pub(super) fn free(&mut self) {
        for Pages { host, .. } in self.0.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..)
        {
            // SAFETY: allocated in `alloc_host`, freed once.
            ignore("cuMemFreeHost", unsafe { sys::cuMemFreeHost(host.as_ptr().cast()) });
        }
    }
}

/// Bytes to allocate for `len`: one of eight sizes for each power of two, so that most memory finds a next owner.
fn room_for(len: usize) -> Result<usize, GpuError> {
    let unit = len.checked_next_power_of_two().map_or(usize::MAX, |power| (power / 16).max(4096));
    whole_multiple("cuMemHostAlloc", len as u64, unit)
}

/// Lengths come from peers too, and may be anything.
fn whole_multiple(call: &'static str, bytes: u64, unit: usize) -> Result<usize, GpuError> {
    let len = usize::try_from(bytes).ok().and_then(|len| len.checked_next_multiple_of(unit));
    len.ok_or_else(|| GpuError::Driver {
        call,
        code: CUresult::CUDA_ERROR_INVALID_VALUE as u32,
        name: format!("{bytes} bytes are too many"),
    })
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

const POSIX_FD: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
/// Mappings are made of pages of this size.
const MAP_ALIGN: usize = 2 << 20;
/// For clearing fresh memory.
const SETUP_LIMIT: Duration = Duration::from_secs(20);
