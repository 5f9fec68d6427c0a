//! The lowest layer: the bindings of `rdma-sys` to libibverbs, and the functions that they lack.

use std::ffi::c_int;
use std::mem::{offset_of, size_of};

pub(super) use rdma_sys::*;

/// `ibv_reg_dmabuf_mr`, which older libraries lack.
pub(super) type RegDmabufMr = unsafe extern "C" fn(
    pd: *mut ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr;

/// The function, if this host's libibverbs has it.
pub(super) fn reg_dmabuf_mr() -> Option<RegDmabufMr> {
    // SAFETY: the name is terminated; libibverbs is linked, so the default search finds its symbols.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"ibv_reg_dmabuf_mr".as_ptr()) };
    if found.is_null() {
        return None;
    }
    // SAFETY: the symbol is a function of this type in every library that has it (verbs.h).
    Some(unsafe { std::mem::transmute::<*mut libc::c_void, RegDmabufMr>(found) })
}

/// The errno of the last failed call.
pub(super) fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// The system's text for a code.
pub(super) fn describe_errno(code: i32) -> String {
    std::io::Error::from_raw_os_error(code).to_string()
}

// `rdma-sys` defines the structures with unions by hand. These are their sizes and offsets in verbs.h on 64-bit
// systems. A wrong one must not reach a NIC.
const _: () = assert!(size_of::<ibv_wc>() == 48 && offset_of!(ibv_wc, vendor_err) == 16);
const _: () = assert!(size_of::<ibv_send_wr>() == 128 && offset_of!(ibv_send_wr, wr) == 40);
const _: () = assert!(size_of::<ibv_ah_attr>() == 32 && offset_of!(ibv_ah_attr, dlid) == 24);
const _: () = assert!(size_of::<ibv_global_route>() == 24 && size_of::<ibv_async_event>() == 16);
