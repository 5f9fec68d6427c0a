//! Memory that a NIC knows: registered for requests and peers, or for the firmware.

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::{DmaBufError, Nic, NicError};
use crate::access::NoDescriptor;
use crate::ffi::{self, Umem, UmemIn};
use crate::missing::missing_for_gpu_memory;

/// How a region became known to the NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegistrationMethod {
    /// Host memory.
    Host,
    /// GPU memory by a descriptor of its pages.
    DmaBuf,
    /// GPU memory by its address: the module `nvidia_peermem` is there.
    PeerMemory,
}

impl Nic {
    /// Registers host memory.
    ///
    /// # Safety
    /// The memory stays allocated as long as the result lives. All other users of it expect the NIC to write into
    /// it.
    ///
    /// # Errors
    /// [`NicError::Call`].
    pub unsafe fn register_host(
        self: &Arc<Self>,
        memory: NonNull<u8>,
        bytes: usize,
        rights: Rights,
    ) -> Result<Registration, NicError> {
        // SAFETY: the caller keeps the memory.
        let mr = unsafe {
            (self.libraries.verbs.ibv_reg_mr)(
                self.pd.as_ptr(),
                memory.as_ptr().cast(),
                bytes,
                rights.flags(),
            )
        };
        let mr = NonNull::new(mr).ok_or_else(|| {
            self.last_error("ibv_reg_mr", "the limit of locked memory (ulimit -l) may be too low")
        })?;
        Ok(Registration { nic: Arc::clone(self), mr, by: RegistrationMethod::Host })
    }

    /// Registers GPU memory: by dma-buf, then by its address. Never uses relaxed ordering, since flags must not
    /// overtake the data that they announce.
    ///
    /// # Safety
    /// As [`register_host`](Self::register_host); `dma_buf` describes the memory, from `offset` on.
    ///
    /// # Errors
    /// [`NicError::GpuMemory`], with the errors of both methods.
    pub unsafe fn register_gpu(
        self: &Arc<Self>,
        address: u64,
        bytes: u64,
        dma_buf: Result<(BorrowedFd<'_>, u64), NoDescriptor>,
        rights: Rights,
    ) -> Result<Registration, NicError> {
        let len = usize::try_from(bytes).unwrap_or(usize::MAX);
        let first = match dma_buf {
            Ok((descriptor, offset)) => {
                // SAFETY: the caller keeps the memory; the descriptor is open.
                let mr = unsafe {
                    (self.libraries.verbs.ibv_reg_dmabuf_mr)(
                        self.pd.as_ptr(),
                        offset,
                        len,
                        address,
                        descriptor.as_raw_fd(),
                        rights.flags(),
                    )
                };
                if let Some(mr) = NonNull::new(mr) {
                    let by = RegistrationMethod::DmaBuf;
                    return Ok(Registration { nic: Arc::clone(self), mr, by });
                }
                let source = io::Error::last_os_error();
                DmaBufError::Call { call: "ibv_reg_dmabuf_mr", source }
            }
            Err(reason) => DmaBufError::Descriptor(reason),
        };
        tracing::debug!(nic = self.name, error = %first, "no registration by dma-buf");
        let pointer = ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap_or(0));
        // SAFETY: the caller keeps the memory; the kernel asks the GPU's driver for its pages.
        let mr = unsafe {
            (self.libraries.verbs.ibv_reg_mr)(self.pd.as_ptr(), pointer, len, rights.flags())
        };
        match NonNull::new(mr) {
            Some(mr) => {
                Ok(Registration { nic: Arc::clone(self), mr, by: RegistrationMethod::PeerMemory })
            }
            None => Err(self.no_gpu_memory(bytes, first, "ibv_reg_mr")),
        }
    }

    /// Right behind the call by the address, which left its error in `errno`.
    fn no_gpu_memory(&self, bytes: u64, dma_buf: DmaBufError, call: &'static str) -> NicError {
        NicError::GpuMemory {
            by_address: io::Error::last_os_error(),
            device: self.name.clone(),
            bytes,
            dma_buf,
            call,
            missing: missing_for_gpu_memory(&self.root),
        }
    }

    /// Makes memory known to the firmware, for queues: that of a GPU by dma-buf, then by its address.
    ///
    /// # Safety
    /// The memory stays allocated as long as the result lives.
    pub(crate) unsafe fn register_umem(
        self: &Arc<Self>,
        address: u64,
        bytes: usize,
        dma_buf: Result<(BorrowedFd<'_>, u64), NoDescriptor>,
    ) -> Result<UmemOwner, NicError> {
        let access = u32::try_from(ffi::ACCESS_LOCAL_WRITE).unwrap_or(1);
        let mlx5 = &self.libraries.mlx5;
        let first = match dma_buf {
            Ok((descriptor, offset)) => {
                let mut input = UmemIn {
                    addr: ptr::with_exposed_provenance_mut(usize::try_from(offset).unwrap_or(0)),
                    size: bytes,
                    access,
                    pgsz_bitmap: !4095,
                    comp_mask: ffi::UMEM_MASK_DMABUF,
                    dmabuf_fd: descriptor.as_raw_fd(),
                };
                // SAFETY: the caller keeps the memory; with the mask, `addr` is an offset.
                let umem =
                    unsafe { (mlx5.mlx5dv_devx_umem_reg_ex)(self.context(), &raw mut input) };
                if let Some(umem) = NonNull::new(umem) {
                    return Ok(UmemOwner { nic: Arc::clone(self), umem });
                }
                let source = io::Error::last_os_error();
                DmaBufError::Call { call: "mlx5dv_devx_umem_reg_ex", source }
            }
            Err(reason) => DmaBufError::Descriptor(reason),
        };
        let call = "mlx5dv_devx_umem_reg";
        let pointer = ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap_or(0));
        // SAFETY: the caller keeps the memory.
        let umem = unsafe { (mlx5.mlx5dv_devx_umem_reg)(self.context(), pointer, bytes, access) };
        let umem = NonNull::new(umem).ok_or_else(|| match first {
            DmaBufError::Descriptor(NoDescriptor::Host) => {
                self.last_error(call, "the limit of locked memory (ulimit -l) may be too low")
            }
            first => self.no_gpu_memory(bytes as u64, first, call),
        })?;
        Ok(UmemOwner { nic: Arc::clone(self), umem })
    }
}

/// Rights to registered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rights {
    /// Requests of this side.
    Own,
    /// Requests of this side, and the peer that gets the remote key: by writes, reads and atomics.
    Peer,
}

impl Rights {
    const fn flags(self) -> c_int {
        match self {
            Self::Own => ffi::ACCESS_LOCAL_WRITE,
            Self::Peer => {
                ffi::ACCESS_LOCAL_WRITE
                    | ffi::ACCESS_REMOTE_WRITE
                    | ffi::ACCESS_REMOTE_READ
                    | ffi::ACCESS_REMOTE_ATOMIC
            }
        }
    }
}

/// Memory that a NIC knows, until dropped.
#[derive(Debug)]
pub struct Registration {
    nic: Arc<Nic>,
    mr: NonNull<ffi::Mr>,
    by: RegistrationMethod,
}

// SAFETY: the key may be used and given back by any thread.
unsafe impl Send for Registration {}
// SAFETY: the same; reading the keys changes nothing.
unsafe impl Sync for Registration {}

impl Registration {
    /// For requests of this side. Never leaves the process.
    #[must_use]
    pub fn local_key(&self) -> u32 {
        // SAFETY: registered until drop.
        unsafe { self.mr.as_ref() }.lkey
    }

    /// For the one peer that may use the memory.
    #[must_use]
    pub fn remote_key(&self) -> u32 {
        // SAFETY: registered until drop.
        unsafe { self.mr.as_ref() }.rkey
    }

    /// How it was registered.
    #[must_use]
    pub const fn by(&self) -> RegistrationMethod {
        self.by
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: registered once, given back once.
        let code = unsafe { (self.nic.libraries.verbs.ibv_dereg_mr)(self.mr.as_ptr()) };
        if code != 0 {
            let error = io::Error::from_raw_os_error(code);
            tracing::error!(nic = self.nic.name, %error, "a registration cannot be removed");
        }
    }
}

/// Memory that the firmware knows, until dropped.
#[derive(Debug)]
pub(crate) struct UmemOwner {
    nic: Arc<Nic>,
    umem: NonNull<Umem>,
}

// SAFETY: used by one owner at a time; the library has no tie to threads.
unsafe impl Send for UmemOwner {}
// SAFETY: shared references only read the number.
unsafe impl Sync for UmemOwner {}

impl UmemOwner {
    pub(crate) fn id(&self) -> u32 {
        // SAFETY: registered until drop.
        unsafe { self.umem.as_ref() }.umem_id
    }
}

impl Drop for UmemOwner {
    fn drop(&mut self) {
        // SAFETY: registered once, given back once.
        let code = unsafe { (self.nic.libraries.mlx5.mlx5dv_devx_umem_dereg)(self.umem.as_ptr()) };
        if code != 0 {
            let error = io::Error::from_raw_os_error(code);
            tracing::error!(nic = self.nic.name, %error, "queue memory cannot be freed");
        }
    }
}
