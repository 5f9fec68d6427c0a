//! The structures and functions of libibverbs and libmlx5 that this crate uses, from `infiniband/verbs.h` and
//! `infiniband/mlx5dv.h` (rdma-core 44). `tests/it/probe.rs` compares the layouts with the headers.

#![allow(missing_docs, reason = "fields and functions have the names and meaning of the C headers")]

use std::ffi::{c_char, c_int, c_void};

/// `struct ibv_pd`, `ibv_cq`, `ibv_ah` and other objects that are only passed on.
pub type Object = *mut c_void;

/// `struct mlx5dv_context_attr`
#[repr(C)]
pub struct ContextAttributes {
    pub flags: u32,
    pub comp_mask: u64,
}

/// `MLX5DV_CONTEXT_FLAGS_DEVX`
pub const CONTEXT_FLAGS_DEVX: u32 = 1;

/// `struct ibv_port_attr`, with room for fields that later versions add.
#[repr(C)]
#[derive(Default)]
pub struct PortAttributes {
    pub state: u32,
    pub max_mtu: u32,
    pub active_mtu: u32,
    pub gid_tbl_len: c_int,
    pub port_cap_flags: u32,
    pub max_msg_sz: u32,
    pub bad_pkey_cntr: u32,
    pub qkey_viol_cntr: u32,
    pub pkey_tbl_len: u16,
    pub lid: u16,
    pub sm_lid: u16,
    pub lmc: u8,
    pub max_vl_num: u8,
    pub sm_sl: u8,
    pub subnet_timeout: u8,
    pub init_type_reply: u8,
    pub active_width: u8,
    pub active_speed: u8,
    pub phys_state: u8,
    pub link_layer: u8,
    pub flags: u8,
    pub port_cap_flags2: u16,
    pub later: [u64; 8],
}

/// `struct ibv_device_attr`
#[repr(C)]
#[derive(Default)]
pub struct DeviceAttributes {
    /// 64 characters.
    pub fw_ver: [u64; 8],
    pub node_guid: u64,
    pub sys_image_guid: u64,
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    pub device_cap_flags: u32,
    pub max_sge: c_int,
    pub max_sge_rd: c_int,
    pub max_cq: c_int,
    pub max_cqe: c_int,
    pub max_mr: c_int,
    pub max_pd: c_int,
    pub max_qp_rd_atom: c_int,
    pub max_ee_rd_atom: c_int,
    pub max_res_rd_atom: c_int,
    pub max_qp_init_rd_atom: c_int,
    pub max_ee_init_rd_atom: c_int,
    pub atomic_cap: u32,
    pub max_ee: c_int,
    pub max_rdd: c_int,
    pub max_mw: c_int,
    pub max_raw_ipv6_qp: c_int,
    pub max_raw_ethy_qp: c_int,
    pub max_mcast_grp: c_int,
    pub max_mcast_qp_attach: c_int,
    pub max_total_mcast_qp_attach: c_int,
    pub max_ah: c_int,
    pub max_fmr: c_int,
    pub max_map_per_fmr: c_int,
    pub max_srq: c_int,
    pub max_srq_wr: c_int,
    pub max_srq_sge: c_int,
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
}

/// `IBV_ATOMIC_NONE`
pub const ATOMIC_NONE: u32 = 0;
/// `IBV_ATOMIC_HCA`
pub const ATOMIC_HCA: u32 = 1;
/// `IBV_PORT_ACTIVE`
pub const PORT_ACTIVE: u32 = 4;
/// `IBV_LINK_LAYER_ETHERNET`
pub const LINK_LAYER_ETHERNET: u8 = 2;

/// `struct ibv_mr`
#[repr(C)]
pub struct Mr {
    pub context: Object,
    pub pd: Object,
    pub addr: *mut c_void,
    pub length: usize,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

/// `IBV_ACCESS_LOCAL_WRITE`
pub const ACCESS_LOCAL_WRITE: c_int = 1;
/// `IBV_ACCESS_REMOTE_WRITE`
pub const ACCESS_REMOTE_WRITE: c_int = 1 << 1;
/// `IBV_ACCESS_REMOTE_READ`
pub const ACCESS_REMOTE_READ: c_int = 1 << 2;
/// `IBV_ACCESS_REMOTE_ATOMIC`
pub const ACCESS_REMOTE_ATOMIC: c_int = 1 << 3;

/// `struct ibv_qp`, as far as it is read.
#[repr(C)]
pub struct Qp {
    pub context: Object,
    pub qp_context: *mut c_void,
    pub pd: Object,
    pub send_cq: Object,
    pub recv_cq: Object,
    pub srq: Object,
    pub handle: u32,
    pub qp_num: u32,
}

/// `struct ibv_qp_cap`
#[repr(C)]
#[derive(Default)]
pub struct QpCapacity {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`
#[repr(C)]
pub struct QpInit {
    pub qp_context: *mut c_void,
    pub send_cq: Object,
    pub recv_cq: Object,
    pub srq: Object,
    pub cap: QpCapacity,
    pub qp_type: u32,
    pub sq_sig_all: c_int,
}

/// `IBV_QPT_RC`
pub const QPT_RC: u32 = 2;

/// `struct ibv_global_route`
#[repr(C, align(8))]
#[derive(Default)]
pub struct GlobalRoute {
    pub dgid: [u8; 16],
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

/// `struct ibv_ah_attr`
#[repr(C)]
#[derive(Default)]
pub struct AhAttributes {
    pub grh: GlobalRoute,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

/// `struct ibv_qp_attr`
#[repr(C)]
#[derive(Default)]
pub struct QpAttributes {
    pub qp_state: u32,
    pub cur_qp_state: u32,
    pub path_mtu: u32,
    pub path_mig_state: u32,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub qp_access_flags: u32,
    pub cap: QpCapacity,
    pub ah_attr: AhAttributes,
    pub alt_ah_attr: AhAttributes,
    pub pkey_index: u16,
    pub alt_pkey_index: u16,
    pub en_sqd_async_notify: u8,
    pub sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port_num: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub alt_port_num: u8,
    pub alt_timeout: u8,
    pub rate_limit: u32,
}

/// `IBV_QPS_RESET`
pub const QPS_RESET: u32 = 0;
/// `IBV_QPS_INIT`
pub const QPS_INIT: u32 = 1;
/// `IBV_QPS_RTR`
pub const QPS_RTR: u32 = 2;
/// `IBV_QPS_RTS`
pub const QPS_RTS: u32 = 3;

/// `enum ibv_qp_attr_mask`
pub mod qp_mask {
    use std::ffi::c_int;

    pub const STATE: c_int = 1;
    pub const ACCESS_FLAGS: c_int = 1 << 3;
    pub const PKEY_INDEX: c_int = 1 << 4;
    pub const PORT: c_int = 1 << 5;
    pub const AV: c_int = 1 << 7;
    pub const PATH_MTU: c_int = 1 << 8;
    pub const TIMEOUT: c_int = 1 << 9;
    pub const RETRY_CNT: c_int = 1 << 10;
    pub const RNR_RETRY: c_int = 1 << 11;
    pub const RQ_PSN: c_int = 1 << 12;
    pub const MAX_QP_RD_ATOMIC: c_int = 1 << 13;
    pub const MIN_RNR_TIMER: c_int = 1 << 15;
    pub const SQ_PSN: c_int = 1 << 16;
    pub const MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
    pub const DEST_QPN: c_int = 1 << 20;
}

/// `struct mlx5dv_qp`
#[repr(C)]
pub struct DvQp {
    pub dbrec: *mut u32,
    pub sq_buf: *mut c_void,
    pub sq_wqe_cnt: u32,
    pub sq_stride: u32,
    pub rq_buf: *mut c_void,
    pub rq_wqe_cnt: u32,
    pub rq_stride: u32,
    pub bf_reg: *mut c_void,
    pub bf_size: u32,
    pub comp_mask: u64,
    pub uar_mmap_offset: i64,
    pub tirn: u32,
    pub tisn: u32,
    pub rqn: u32,
    pub sqn: u32,
    pub tir_icm_addr: u64,
}

/// `struct mlx5dv_cq`
#[repr(C)]
pub struct DvCq {
    pub buf: *mut c_void,
    pub dbrec: *mut u32,
    pub cqe_cnt: u32,
    pub cqe_size: u32,
    pub cq_uar: *mut c_void,
    pub cqn: u32,
    pub comp_mask: u64,
}

/// `struct mlx5dv_pd`
#[repr(C)]
pub struct DvPd {
    pub pdn: u32,
    pub comp_mask: u64,
}

/// `struct mlx5dv_ah`
#[repr(C)]
pub struct DvAh {
    pub av: *mut AddressVector,
    pub comp_mask: u64,
}

/// `struct mlx5_wqe_av`
#[repr(C)]
pub struct AddressVector {
    pub key: [u32; 2],
    pub dqp_dct: u32,
    pub stat_rate_sl: u8,
    pub fl_mlid: u8,
    pub rlid: u16,
    pub reserved0: [u8; 4],
    pub rmac: [u8; 6],
    pub tclass: u8,
    pub hop_limit: u8,
    pub grh_gid_fl: u32,
    pub rgid: [u8; 16],
}

/// One pair of `struct mlx5dv_obj`.
#[repr(C)]
pub struct InOut {
    pub input: *mut c_void,
    pub output: *mut c_void,
}

/// `struct mlx5dv_obj`
#[repr(C)]
pub struct DvObject {
    pub qp: InOut,
    pub cq: InOut,
    pub srq: InOut,
    pub rwq: InOut,
    pub dm: InOut,
    pub ah: InOut,
    pub pd: InOut,
}

/// `MLX5DV_OBJ_QP`
pub const OBJ_QP: u64 = 1;
/// `MLX5DV_OBJ_CQ`
pub const OBJ_CQ: u64 = 1 << 1;
/// `MLX5DV_OBJ_AH`
pub const OBJ_AH: u64 = 1 << 5;
/// `MLX5DV_OBJ_PD`
pub const OBJ_PD: u64 = 1 << 6;

/// `struct mlx5dv_devx_umem`
#[repr(C)]
pub struct Umem {
    pub umem_id: u32,
}

/// `struct mlx5dv_devx_umem_in`
#[repr(C)]
pub struct UmemIn {
    pub addr: *mut c_void,
    pub size: usize,
    pub access: u32,
    pub pgsz_bitmap: u64,
    pub comp_mask: u64,
    pub dmabuf_fd: c_int,
}

/// `MLX5DV_UMEM_MASK_DMABUF`
pub const UMEM_MASK_DMABUF: u64 = 1;

/// `struct mlx5dv_devx_uar`
#[repr(C)]
pub struct Uar {
    pub reg_addr: *mut c_void,
    pub base_addr: *mut c_void,
    pub page_id: u32,
    pub mmap_off: i64,
    pub comp_mask: u64,
}

/// `MLX5DV_UAR_ALLOC_TYPE_BF`
pub const UAR_BLUE_FLAME: u32 = 0;
/// `MLX5DV_UAR_ALLOC_TYPE_NC`
pub const UAR_NON_CACHED: u32 = 1;
/// `MLX5DV_UAR_ALLOC_TYPE_NC_DEDICATED`, of rdma-core 47 and later.
pub const UAR_NON_CACHED_DEDICATED: u32 = 1 << 31;

/// Defines the table of functions and the lists of their names.
macro_rules! functions {
    ($(#[$doc:meta])* $table:ident, $names:ident {
        $($name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)*
    }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub struct $table {
            $(pub $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        #[doc = "Names, in the order of the table."]
        pub const $names: &[&str] = &[$(stringify!($name)),*];

        impl $table {
            /// Looks up all functions.
            ///
            /// # Safety
            /// `find` gives the addresses of functions with these names' signatures.
            ///
            /// # Errors
            /// The first that `find` does not know.
            #[allow(clippy::missing_transmute_annotations, reason = "the field gives the type")]
            pub unsafe fn load<E>(
                mut find: impl FnMut(&'static str) -> Result<std::ptr::NonNull<c_void>, E>,
            ) -> Result<Self, E> {
                Ok(Self {
                    $(
                        // SAFETY: the caller answers for the signature; a function pointer has the
                        // size of an address and is not null.
                        $name: unsafe { std::mem::transmute(find(stringify!($name))?) },
                    )*
                })
            }
        }
    };
}

functions! {
    /// Of libibverbs.
    Verbs, VERBS_SYMBOLS {
        ibv_get_device_list: fn(*mut c_int) -> *mut Object;
        ibv_free_device_list: fn(*mut Object);
        ibv_get_device_name: fn(Object) -> *const c_char;
        ibv_open_device: fn(Object) -> Object;
        ibv_close_device: fn(Object) -> c_int;
        ibv_query_device: fn(Object, *mut DeviceAttributes) -> c_int;
        ibv_query_port: fn(Object, u8, *mut PortAttributes) -> c_int;
        ibv_query_gid: fn(Object, u8, c_int, *mut [u8; 16]) -> c_int;
        ibv_alloc_pd: fn(Object) -> Object;
        ibv_dealloc_pd: fn(Object) -> c_int;
        ibv_create_cq: fn(Object, c_int, *mut c_void, Object, c_int) -> Object;
        ibv_destroy_cq: fn(Object) -> c_int;
        ibv_create_qp: fn(Object, *mut QpInit) -> *mut Qp;
        ibv_modify_qp: fn(*mut Qp, *mut QpAttributes, c_int) -> c_int;
        ibv_destroy_qp: fn(*mut Qp) -> c_int;
        ibv_create_ah: fn(Object, *mut AhAttributes) -> Object;
        ibv_destroy_ah: fn(Object) -> c_int;
        ibv_reg_mr: fn(Object, *mut c_void, usize, c_int) -> *mut Mr;
        ibv_reg_dmabuf_mr: fn(Object, u64, usize, u64, c_int, c_int) -> *mut Mr;
        ibv_dereg_mr: fn(*mut Mr) -> c_int;
    }
}

functions! {
    /// Of libmlx5: the plain path, then DevX.
    Mlx5, MLX5_SYMBOLS {
        mlx5dv_is_supported: fn(Object) -> bool;
        mlx5dv_open_device: fn(Object, *mut ContextAttributes) -> Object;
        mlx5dv_init_obj: fn(*mut DvObject, u64) -> c_int;
        mlx5dv_devx_general_cmd: fn(Object, *const c_void, usize, *mut c_void, usize) -> c_int;
        mlx5dv_devx_obj_create: fn(Object, *const c_void, usize, *mut c_void, usize) -> Object;
        mlx5dv_devx_obj_modify: fn(Object, *const c_void, usize, *mut c_void, usize) -> c_int;
        mlx5dv_devx_obj_destroy: fn(Object) -> c_int;
        mlx5dv_devx_umem_reg: fn(Object, *mut c_void, usize, u32) -> *mut Umem;
        mlx5dv_devx_umem_reg_ex: fn(Object, *mut UmemIn) -> *mut Umem;
        mlx5dv_devx_umem_dereg: fn(*mut Umem) -> c_int;
        mlx5dv_devx_alloc_uar: fn(Object, u32) -> *mut Uar;
        mlx5dv_devx_free_uar: fn(*mut Uar);
        mlx5dv_devx_query_eqn: fn(Object, u32, *mut u32) -> c_int;
    }
}
