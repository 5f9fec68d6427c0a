//! The NICs of GPUs (`softnic/gpu`), run by a processor. Addresses are those of this process.

use std::ffi::c_void;

/// Kind of memory or queue that the key stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Backend {
    /// The kernel. Its threads are fibres here.
    Kernel = 0,
    /// The thread that drives copy engines, which are queues of copies here.
    CopyEngines = 1,
}

impl Backend {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Kernel, Self::CopyEngines];
}

/// Rights to registered memory.
pub mod access {
    /// The NIC may write it on behalf of this side.
    pub const LOCAL_WRITE: u32 = 1;
    /// Requests may write it as remote memory.
    pub const REMOTE_WRITE: u32 = 2;
    /// Requests may read it as remote memory.
    pub const REMOTE_READ: u32 = 4;
    /// Requests may do atomics there.
    pub const REMOTE_ATOMIC: u32 = 8;
    /// Requests may name it as their own.
    pub const LOCAL: u32 = 16;
    /// Rights of peers.
    pub const ALL_REMOTE: u32 = 14;
}

/// Memory that requests may name.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    /// Key by which requests name it.
    pub key: u32,
    /// Address of its first byte in requests.
    pub address: u64,
    /// Bytes.
    pub num_bytes: u64,
    /// Address in this process.
    pub mapped: u64,
    /// Rights: flags of [`access`].
    pub access: u32,
}

/// Counts of the NIC's work since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Counts {
    /// Requests: executed, failed and flushed ones.
    pub num_requests: u64,
    /// Bytes moved.
    pub num_bytes: u64,
    /// Violations by drivers.
    pub num_violations: u64,
    /// Times that completions were held back.
    pub num_held: u64,
    /// Answers that landed late.
    pub num_late: u64,
    /// Writes in pieces.
    pub num_cut: u64,
    /// Doorbells dropped by a fault.
    pub num_dropped: u64,
    /// Kind of the first violation, as `Violation` of `softnic/model.hpp`.
    pub what: u32,
    /// Its queue pair.
    pub qpn: u32,
    /// Its block.
    pub position: u64,
    /// Value found.
    pub found: u64,
}

/// A NIC. Keys and queues are added before its first start.
#[derive(Debug)]
pub struct GpuNic(*mut c_void);

// SAFETY: it is a heap object with no tie to the thread that made it; its own thread is inside of it.
unsafe impl Send for GpuNic {}
// SAFETY: functions that take `&self` store to atomics only.
unsafe impl Sync for GpuNic {}

impl GpuNic {
    /// Opens a NIC. Unless `seed` is 0, it delays, splits and reorders operations as far as the rules permit.
    /// Returns `None` where there is no C++ compiler.
    #[must_use]
    pub fn open(backend: Backend, seed: u64) -> Option<Self> {
        sys::open(backend as u32, seed).map(Self)
    }

    /// Registers memory.
    ///
    /// # Safety
    /// The memory stays mapped while the NIC lives. All other accesses to it are atomics and raw copies.
    pub unsafe fn add_key(&mut self, key: &Key) {
        // SAFETY: the NIC is alive; numbers in.
        unsafe {
            sys::add_key(self.0, key.key, key.address, key.num_bytes, key.mapped, key.access);
        }
    }

    /// Adds a queue pair. Returns its number in this NIC.
    ///
    /// # Safety
    /// `handle` points to a `sy_mlx5_qp` whose memory stays mapped while the NIC lives.
    pub unsafe fn add_queue(&mut self, handle: *const c_void) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { sys::add_queue(self.0, handle) }
    }

    /// Sets the destination of a queue's immediate data: receives of `dbrec`, completions to `cq` of `peer`.
    ///
    /// # Safety
    /// As for [`add_queue`](Self::add_queue). `queue` is a number that it returned.
    pub unsafe fn set_receiver(&mut self, queue: u32, peer: *const c_void) {
        // SAFETY: the caller's promise.
        unsafe { sys::set_receiver(self.0, queue, peer) }
    }

    /// From the next start on, the request with this number fails. A syndrome of 0 cancels that.
    pub fn fail(&mut self, queue: u32, nth: u64, syndrome: u32) {
        // SAFETY: the NIC is alive.
        unsafe { sys::fail(self.0, queue, nth, syndrome) }
    }

    /// Drops the next `num` doorbells from the next start on.
    pub fn drop_doorbells(&mut self, queue: u32, num: u32) {
        // SAFETY: the NIC is alive.
        unsafe { sys::drop_doorbells(self.0, queue, num) }
    }

    /// Bit mask of stalled queues.
    pub fn stall(&self, mask: u32) {
        // SAFETY: the NIC is alive.
        unsafe { sys::stall(self.0, mask) }
    }

    /// Bit mask of queues whose peers do not answer.
    pub fn set_dead(&self, mask: u32) {
        // SAFETY: the NIC is alive.
        unsafe { sys::set_dead(self.0, mask) }
    }

    /// Starts it; with `is_fresh` all queue pairs begin as after a reset.
    pub fn start(&mut self, is_fresh: bool) {
        // SAFETY: the NIC is alive and stopped.
        unsafe { sys::start(self.0, is_fresh.into()) }
    }

    /// Waits until all announced requests are done. It does not wait for stalled queues.
    pub fn stop(&mut self) -> Counts {
        let mut counts = Counts::default();
        // SAFETY: the NIC is alive; the counts have the layout of `Counts` in `softnic/model.hpp`.
        unsafe { sys::stop(self.0, &raw mut counts) };
        counts
    }
}

impl Drop for GpuNic {
    fn drop(&mut self) {
        // SAFETY: it was opened, and is closed once.
        unsafe { sys::close(self.0) }
    }
}

const _: () = assert!(size_of::<Counts>() == 80);

#[cfg(has_cxx)]
mod sys {
    use std::ffi::c_void;

    pub(super) fn open(backend: u32, seed: u64) -> Option<*mut c_void> {
        // SAFETY: numbers in.
        Some(unsafe { sy_gpu_nic_open(backend, seed) })
    }

    unsafe extern "C" {
        fn sy_gpu_nic_open(backend: u32, seed: u64) -> *mut c_void;
        #[link_name = "sy_gpu_nic_close"]
        pub(super) fn close(nic: *mut c_void);
        #[link_name = "sy_gpu_nic_add_key"]
        pub(super) fn add_key(
            nic: *mut c_void,
            key: u32,
            address: u64,
            num_bytes: u64,
            mapped: u64,
            access: u32,
        );
        #[link_name = "sy_gpu_nic_add_queue"]
        pub(super) fn add_queue(nic: *mut c_void, handle: *const c_void) -> u32;
        #[link_name = "sy_gpu_nic_set_receiver"]
        pub(super) fn set_receiver(nic: *mut c_void, queue: u32, peer: *const c_void);
        #[link_name = "sy_gpu_nic_fail"]
        pub(super) fn fail(nic: *mut c_void, queue: u32, nth: u64, syndrome: u32);
        #[link_name = "sy_gpu_nic_drop_doorbells"]
        pub(super) fn drop_doorbells(nic: *mut c_void, queue: u32, num: u32);
        #[link_name = "sy_gpu_nic_stall"]
        pub(super) fn stall(nic: *mut c_void, mask: u32);
        #[link_name = "sy_gpu_nic_set_dead"]
        pub(super) fn set_dead(nic: *mut c_void, mask: u32);
        #[link_name = "sy_gpu_nic_start"]
        pub(super) fn start(nic: *mut c_void, is_fresh: u32);
        #[link_name = "sy_gpu_nic_stop"]
        pub(super) fn stop(nic: *mut c_void, counts: *mut super::Counts);
    }
}

/// Without a compiler these functions are never called: no NIC exists.
#[cfg(not(has_cxx))]
mod sys {
    use std::ffi::c_void;

    pub(super) fn open(_backend: u32, _seed: u64) -> Option<*mut c_void> {
        None
    }
    pub(super) unsafe fn close(_: *mut c_void) {}
    pub(super) unsafe fn add_key(_: *mut c_void, _: u32, _: u64, _: u64, _: u64, _: u32) {}
    pub(super) unsafe fn add_queue(_: *mut c_void, _: *const c_void) -> u32 {
        0
    }
    pub(super) unsafe fn set_receiver(_: *mut c_void, _: u32, _: *const c_void) {}
    pub(super) unsafe fn fail(_: *mut c_void, _: u32, _: u64, _: u32) {}
    pub(super) unsafe fn drop_doorbells(_: *mut c_void, _: u32, _: u32) {}
    pub(super) unsafe fn stall(_: *mut c_void, _: u32) {}
    pub(super) unsafe fn set_dead(_: *mut c_void, _: u32) {}
    pub(super) unsafe fn start(_: *mut c_void, _: u32) {}
    pub(super) unsafe fn stop(_: *mut c_void, _: *mut super::Counts) {}
}
