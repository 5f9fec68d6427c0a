//! The part of libfabric's C interface that this crate uses, field by field.
//!
//! Only six functions are symbols of the library. All others are called through tables of function
//! pointers in the library's objects. The layouts are those of API 1.17. Structures that the
//! library allocates only grow at their end. From structures that this crate allocates, the library
//! reads the fields of the requested API version. A test compares sizes and offsets with the
//! system's headers.

use std::ffi::{c_char, c_int, c_void};

/// Handle of a peer's address.
pub(super) type FiAddr = u64;

/// Requested API version: `major << 16 | minor`.
pub(super) const API_VERSION: u32 = version(1, 17);
/// Oldest library that is accepted.
pub(super) const OLDEST_VERSION: u32 = version(1, 14);

pub(super) const fn version(major: u32, minor: u32) -> u32 {
    major << 16 | minor
}

// Capabilities and operation flags.
pub(super) const FI_MSG: u64 = 1 << 1;
pub(super) const FI_RMA: u64 = 1 << 2;
pub(super) const FI_READ: u64 = 1 << 8;
pub(super) const FI_WRITE: u64 = 1 << 9;
pub(super) const FI_RECV: u64 = 1 << 10;
pub(super) const FI_TRANSMIT: u64 = 1 << 11;
pub(super) const FI_REMOTE_READ: u64 = 1 << 12;
pub(super) const FI_REMOTE_WRITE: u64 = 1 << 13;
pub(super) const FI_REMOTE_CQ_DATA: u64 = 1 << 17;
pub(super) const FI_COMPLETION: u64 = 1 << 24;
pub(super) const FI_INJECT: u64 = 1 << 25;
pub(super) const FI_DELIVERY_COMPLETE: u64 = 1 << 28;
pub(super) const FI_SOURCE: u64 = 1 << 57;
/// Flag of the binding to a queue: only operations that ask for a completion get one.
pub(super) const FI_SELECTIVE_COMPLETION: u64 = 1 << 59;

// Mode bits.
pub(super) const FI_CONTEXT: u64 = 1 << 59;
pub(super) const FI_CONTEXT2: u64 = 1 << 52;

// Message order.
pub(super) const FI_ORDER_SAS: u64 = 1 << 8;

// Memory registration modes.
pub(super) const FI_MR_LOCAL: c_int = 1 << 2;
pub(super) const FI_MR_VIRT_ADDR: c_int = 1 << 4;
pub(super) const FI_MR_ALLOCATED: c_int = 1 << 5;
pub(super) const FI_MR_PROV_KEY: c_int = 1 << 6;
pub(super) const FI_MR_ENDPOINT: c_int = 1 << 9;
pub(super) const FI_MR_HMEM: c_int = 1 << 10;

// Enumerations.
pub(super) const FI_EP_RDM: u32 = 3;
pub(super) const FI_THREAD_SAFE: u32 = 1;
pub(super) const FI_RM_ENABLED: u32 = 2;
pub(super) const FI_AV_TABLE: u32 = 2;
pub(super) const FI_SOCKADDR: u32 = 1;
pub(super) const FI_SOCKADDR_IN: u32 = 2;
pub(super) const FI_SOCKADDR_IN6: u32 = 3;
pub(super) const FI_CQ_FORMAT_DATA: u32 = 3;
pub(super) const FI_WAIT_NONE: u32 = 0;
pub(super) const FI_WAIT_FD: u32 = 3;
pub(super) const FI_HMEM_SYSTEM: u32 = 0;
pub(super) const FI_ADDR_UNSPEC: FiAddr = u64::MAX;

// Control commands.
pub(super) const FI_GETWAIT: c_int = 5;
pub(super) const FI_ENABLE: c_int = 6;

// Codes, negated when returned. Below 256 they are those of errno.
pub(super) const FI_EAGAIN: i64 = 11;
pub(super) const FI_ENOMEM: i64 = 12;
pub(super) const FI_EBUSY: i64 = 16;
pub(super) const FI_ENODATA: i64 = 61;
pub(super) const FI_EAVAIL: i64 = 259;
pub(super) const FI_ENOKEY: i64 = 266;

#[repr(C)]
pub(super) struct Iovec {
    pub(super) base: *mut c_void,
    pub(super) len: usize,
}

#[repr(C)]
pub(super) struct TxAttr {
    pub(super) caps: u64,
    pub(super) mode: u64,
    pub(super) op_flags: u64,
    pub(super) msg_order: u64,
    pub(super) comp_order: u64,
    pub(super) inject_size: usize,
    pub(super) size: usize,
    pub(super) iov_limit: usize,
    pub(super) rma_iov_limit: usize,
    pub(super) tclass: u32,
}

#[repr(C)]
pub(super) struct RxAttr {
    pub(super) caps: u64,
    pub(super) mode: u64,
    pub(super) op_flags: u64,
    pub(super) msg_order: u64,
    pub(super) comp_order: u64,
    pub(super) total_buffered_recv: usize,
    pub(super) size: usize,
    pub(super) iov_limit: usize,
}

#[repr(C)]
pub(super) struct EpAttr {
    pub(super) kind: u32,
    pub(super) protocol: u32,
    pub(super) protocol_version: u32,
    pub(super) max_msg_size: usize,
    pub(super) msg_prefix_size: usize,
    pub(super) max_order_raw_size: usize,
    pub(super) max_order_war_size: usize,
    pub(super) max_order_waw_size: usize,
    pub(super) mem_tag_format: u64,
    pub(super) tx_ctx_cnt: usize,
    pub(super) rx_ctx_cnt: usize,
    pub(super) auth_key_size: usize,
    pub(super) auth_key: *mut u8,
}

#[repr(C)]
pub(super) struct DomainAttr {
    pub(super) domain: *mut FidDomain,
    pub(super) name: *mut c_char,
    pub(super) threading: u32,
    pub(super) control_progress: u32,
    pub(super) data_progress: u32,
    pub(super) resource_mgmt: u32,
    pub(super) av_type: u32,
    pub(super) mr_mode: c_int,
    pub(super) mr_key_size: usize,
    pub(super) cq_data_size: usize,
    pub(super) cq_cnt: usize,
    pub(super) ep_cnt: usize,
    pub(super) tx_ctx_cnt: usize,
    pub(super) rx_ctx_cnt: usize,
    pub(super) max_ep_tx_ctx: usize,
    pub(super) max_ep_rx_ctx: usize,
    pub(super) max_ep_stx_ctx: usize,
    pub(super) max_ep_srx_ctx: usize,
    pub(super) cntr_cnt: usize,
    pub(super) mr_iov_limit: usize,
    pub(super) caps: u64,
    pub(super) mode: u64,
    pub(super) auth_key: *mut u8,
    pub(super) auth_key_size: usize,
    pub(super) max_err_data: usize,
    pub(super) mr_cnt: usize,
    pub(super) tclass: u32,
}

#[repr(C)]
pub(super) struct FabricAttr {
    pub(super) fabric: *mut FidFabric,
    pub(super) name: *mut c_char,
    pub(super) prov_name: *mut c_char,
    pub(super) prov_version: u32,
    pub(super) api_version: u32,
}

#[repr(C)]
pub(super) struct FiInfo {
    pub(super) next: *mut FiInfo,
    pub(super) caps: u64,
    pub(super) mode: u64,
    pub(super) addr_format: u32,
    pub(super) src_addrlen: usize,
    pub(super) dest_addrlen: usize,
    pub(super) src_addr: *mut c_void,
    pub(super) dest_addr: *mut c_void,
    pub(super) handle: *mut Fid,
    pub(super) tx_attr: *mut TxAttr,
    pub(super) rx_attr: *mut RxAttr,
    pub(super) ep_attr: *mut EpAttr,
    pub(super) domain_attr: *mut DomainAttr,
    pub(super) fabric_attr: *mut FabricAttr,
    pub(super) nic: *mut c_void,
}

/// Every object begins with this.
#[repr(C)]
pub(super) struct Fid {
    pub(super) fclass: usize,
    pub(super) context: *mut c_void,
    pub(super) ops: *mut Ops,
}

#[repr(C)]
pub(super) struct Ops {
    pub(super) size: usize,
    pub(super) close: unsafe extern "C" fn(*mut Fid) -> c_int,
    pub(super) bind: unsafe extern "C" fn(*mut Fid, *mut Fid, u64) -> c_int,
    pub(super) control: unsafe extern "C" fn(*mut Fid, c_int, *mut c_void) -> c_int,
    pub(super) ops_open: Unused,
    pub(super) tostr: Unused,
    pub(super) ops_set: Unused,
}

/// A function pointer that this crate never calls.
pub(super) type Unused = Option<unsafe extern "C" fn()>;

#[repr(C)]
pub(super) struct FidFabric {
    pub(super) fid: Fid,
    pub(super) ops: *mut OpsFabric,
    pub(super) api_version: u32,
}

#[repr(C)]
pub(super) struct OpsFabric {
    pub(super) size: usize,
    pub(super) domain: unsafe extern "C" fn(
        *mut FidFabric,
        *mut FiInfo,
        *mut *mut FidDomain,
        *mut c_void,
    ) -> c_int,
    pub(super) passive_ep: Unused,
    pub(super) eq_open: Unused,
    pub(super) wait_open: Unused,
    pub(super) trywait: unsafe extern "C" fn(*mut FidFabric, *mut *mut Fid, c_int) -> c_int,
    pub(super) domain2: Unused,
}

#[repr(C)]
pub(super) struct FidDomain {
    pub(super) fid: Fid,
    pub(super) ops: *mut OpsDomain,
    pub(super) mr: *mut OpsMr,
}

#[repr(C)]
pub(super) struct OpsDomain {
    pub(super) size: usize,
    pub(super) av_open:
        unsafe extern "C" fn(*mut FidDomain, *mut AvAttr, *mut *mut FidAv, *mut c_void) -> c_int,
    pub(super) cq_open:
        unsafe extern "C" fn(*mut FidDomain, *mut CqAttr, *mut *mut FidCq, *mut c_void) -> c_int,
    pub(super) endpoint:
        unsafe extern "C" fn(*mut FidDomain, *mut FiInfo, *mut *mut FidEp, *mut c_void) -> c_int,
    pub(super) scalable_ep: Unused,
    pub(super) cntr_open: Unused,
    pub(super) poll_open: Unused,
    pub(super) stx_ctx: Unused,
    pub(super) srx_ctx: Unused,
    pub(super) query_atomic: Unused,
    pub(super) query_collective: Unused,
    pub(super) endpoint2: Unused,
}

#[repr(C)]
pub(super) struct OpsMr {
    pub(super) size: usize,
    pub(super) reg: Unused,
    pub(super) regv: Unused,
    pub(super) regattr:
        unsafe extern "C" fn(*mut Fid, *const MrAttr, u64, *mut *mut FidMr) -> c_int,
}

#[repr(C)]
pub(super) struct MrAttr {
    pub(super) iov: *const Iovec,
    pub(super) iov_count: usize,
    pub(super) access: u64,
    pub(super) offset: u64,
    pub(super) requested_key: u64,
    pub(super) context: *mut c_void,
    pub(super) auth_key_size: usize,
    pub(super) auth_key: *mut u8,
    pub(super) iface: u32,
    pub(super) device: u64,
}

#[repr(C)]
pub(super) struct FidMr {
    pub(super) fid: Fid,
    pub(super) mem_desc: *mut c_void,
    pub(super) key: u64,
}

#[repr(C)]
pub(super) struct AvAttr {
    pub(super) kind: u32,
    pub(super) rx_ctx_bits: c_int,
    pub(super) count: usize,
    pub(super) ep_per_node: usize,
    pub(super) name: *const c_char,
    pub(super) map_addr: *mut c_void,
    pub(super) flags: u64,
}

#[repr(C)]
pub(super) struct FidAv {
    pub(super) fid: Fid,
    pub(super) ops: *mut OpsAv,
}

#[repr(C)]
pub(super) struct OpsAv {
    pub(super) size: usize,
    pub(super) insert: unsafe extern "C" fn(
        *mut FidAv,
        *const c_void,
        usize,
        *mut FiAddr,
        u64,
        *mut c_void,
    ) -> c_int,
    pub(super) insertsvc: Unused,
    pub(super) insertsym: Unused,
    pub(super) remove: unsafe extern "C" fn(*mut FidAv, *mut FiAddr, usize, u64) -> c_int,
    pub(super) lookup: Unused,
    pub(super) straddr: Unused,
    pub(super) av_set: Unused,
}

#[repr(C)]
pub(super) struct CqAttr {
    pub(super) size: usize,
    pub(super) flags: u64,
    pub(super) format: u32,
    pub(super) wait_obj: u32,
    pub(super) signaling_vector: c_int,
    pub(super) wait_cond: u32,
    pub(super) wait_set: *mut c_void,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct CqDataEntry {
    pub(super) op_context: *mut c_void,
    pub(super) flags: u64,
    pub(super) len: usize,
    pub(super) buf: *mut c_void,
    pub(super) data: u64,
}

#[repr(C)]
pub(super) struct CqErrEntry {
    pub(super) op_context: *mut c_void,
    pub(super) flags: u64,
    pub(super) len: usize,
    pub(super) buf: *mut c_void,
    pub(super) data: u64,
    pub(super) tag: u64,
    pub(super) olen: usize,
    pub(super) err: c_int,
    pub(super) prov_errno: c_int,
    pub(super) err_data: *mut c_void,
    pub(super) err_data_size: usize,
}

#[repr(C)]
pub(super) struct FidCq {
    pub(super) fid: Fid,
    pub(super) ops: *mut OpsCq,
}

#[repr(C)]
pub(super) struct OpsCq {
    pub(super) size: usize,
    pub(super) read: unsafe extern "C" fn(*mut FidCq, *mut c_void, usize) -> isize,
    pub(super) readfrom: unsafe extern "C" fn(*mut FidCq, *mut c_void, usize, *mut FiAddr) -> isize,
    pub(super) readerr: unsafe extern "C" fn(*mut FidCq, *mut CqErrEntry, u64) -> isize,
    pub(super) sread: Unused,
    pub(super) sreadfrom: Unused,
    pub(super) signal: Unused,
    pub(super) strerror: Unused,
}

#[repr(C)]
pub(super) struct FidEp {
    pub(super) fid: Fid,
    pub(super) ops: *mut c_void,
    pub(super) cm: *mut OpsCm,
    pub(super) msg: *mut OpsMsg,
    pub(super) rma: *mut OpsRma,
    pub(super) tagged: *mut c_void,
    pub(super) atomic: *mut c_void,
    pub(super) collective: *mut c_void,
}

#[repr(C)]
pub(super) struct OpsCm {
    pub(super) size: usize,
    pub(super) setname: Unused,
    pub(super) getname: unsafe extern "C" fn(*mut Fid, *mut c_void, *mut usize) -> c_int,
    pub(super) getpeer: Unused,
    pub(super) connect: Unused,
    pub(super) listen: Unused,
    pub(super) accept: Unused,
    pub(super) reject: Unused,
    pub(super) shutdown: Unused,
    pub(super) join: Unused,
}

#[repr(C)]
pub(super) struct OpsMsg {
    pub(super) size: usize,
    pub(super) recv: unsafe extern "C" fn(
        *mut FidEp,
        *mut c_void,
        usize,
        *mut c_void,
        FiAddr,
        *mut c_void,
    ) -> isize,
    pub(super) recvv: Unused,
    pub(super) recvmsg: Unused,
    pub(super) send: Unused,
    pub(super) sendv: Unused,
    pub(super) sendmsg: Unused,
    pub(super) inject: unsafe extern "C" fn(*mut FidEp, *const c_void, usize, FiAddr) -> isize,
    pub(super) senddata: Unused,
    pub(super) injectdata: Unused,
}

#[repr(C)]
pub(super) struct OpsRma {
    pub(super) size: usize,
    pub(super) read: Unused,
    pub(super) readv: Unused,
    pub(super) readmsg: unsafe extern "C" fn(*mut FidEp, *const MsgRma, u64) -> isize,
    pub(super) write: Unused,
    pub(super) writev: Unused,
    pub(super) writemsg: unsafe extern "C" fn(*mut FidEp, *const MsgRma, u64) -> isize,
    pub(super) inject: Unused,
    pub(super) writedata: Unused,
    pub(super) injectdata: Unused,
}

#[repr(C)]
pub(super) struct RmaIov {
    pub(super) addr: u64,
    pub(super) len: usize,
    pub(super) key: u64,
}

#[repr(C)]
pub(super) struct MsgRma {
    pub(super) iov: *const Iovec,
    pub(super) desc: *mut *mut c_void,
    pub(super) iov_count: usize,
    pub(super) addr: FiAddr,
    pub(super) rma_iov: *const RmaIov,
    pub(super) rma_iov_count: usize,
    pub(super) context: *mut c_void,
    pub(super) data: u64,
}

pub(super) type GetInfo = unsafe extern "C" fn(
    u32,
    *const c_char,
    *const c_char,
    u64,
    *const FiInfo,
    *mut *mut FiInfo,
) -> c_int;
pub(super) type FreeInfo = unsafe extern "C" fn(*mut FiInfo);
pub(super) type DupInfo = unsafe extern "C" fn(*const FiInfo) -> *mut FiInfo;
pub(super) type OpenFabric =
    unsafe extern "C" fn(*mut FabricAttr, *mut *mut FidFabric, *mut c_void) -> c_int;
pub(super) type StrError = unsafe extern "C" fn(c_int) -> *const c_char;
pub(super) type Version = unsafe extern "C" fn() -> u32;

#[cfg(test)]
mod tests;
