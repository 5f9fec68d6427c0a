//! libibverbs, and the part of libmlx5 that finds the pieces of its queues.

use std::ffi::{c_char, c_int, c_void};
use std::ptr::{self, NonNull};

use ibgda::ffi::{
    self, AddressVector, AhAttributes, ContextAttributes, DeviceAttributes, DvAh, DvCq, DvObject,
    DvPd, DvQp, Mr, Object, PortAttributes, Qp, QpAttributes, QpInit,
};
use p2p_core::Region;
use softnic::format::{BLOCK_BYTES, CQE_BYTES, CQE_FILL, RECEIVE_BYTES};
use softnic::{CqConfig, Domain, PortAddress, QpConfig, RecvQueueConfig};

use super::{
    GID_IDX, PAGE_BYTES, PEER_RIGHTS, code_of, device, function, give, or_null, refuse, set_errno,
    take,
};

pub(super) fn find(name: &str) -> Option<NonNull<c_void>> {
    macro_rules! named {
        ($($function:ident),* $(,)?) => {
            match name {
                $(stringify!($function) => $function as *const (),)*
                _ => return None,
            }
        };
    }
    function(named!(
        ibv_get_device_list,
        ibv_free_device_list,
        ibv_get_device_name,
        ibv_open_device,
        ibv_close_device,
        ibv_query_device,
        ibv_query_port,
        ibv_query_gid,
        ibv_alloc_pd,
        ibv_dealloc_pd,
        ibv_create_cq,
        ibv_destroy_cq,
        ibv_create_qp,
        ibv_modify_qp,
        ibv_destroy_qp,
        ibv_create_ah,
        ibv_destroy_ah,
        ibv_reg_mr,
        ibv_reg_dmabuf_mr,
        ibv_dereg_mr,
        mlx5dv_is_supported,
        mlx5dv_open_device,
        mlx5dv_init_obj,
    ))
}

struct Pd {
    domain: Domain,
    number: u32,
}

#[repr(C)]
struct Registration {
    mr: Mr,
}

struct Ring {
    number: u32,
    entries: u32,
    region: Region,
}

#[repr(C)]
struct Pair {
    qp: Qp,
    depth: u32,
    recv_depth: u32,
    region: Region,
}

struct Route {
    vector: AddressVector,
}

unsafe extern "C" fn ibv_get_device_list(num: *mut c_int) -> *mut Object {
    if device().is_none() {
        return ptr::null_mut();
    }
    // SAFETY: a place for the number.
    unsafe { *num = 1 };
    give([THE_DEVICE as Object, ptr::null_mut()]).cast()
}

unsafe extern "C" fn ibv_free_device_list(list: *mut Object) {
    // SAFETY: made by `ibv_get_device_list`.
    unsafe { take::<[Object; 2]>(list.cast()) };
}

unsafe extern "C" fn ibv_get_device_name(_device: Object) -> *const c_char {
    c"softnic_0".as_ptr()
}

unsafe extern "C" fn mlx5dv_is_supported(_device: Object) -> bool {
    true
}

unsafe extern "C" fn ibv_open_device(_device: Object) -> Object {
    give(0_u8).cast()
}

unsafe extern "C" fn mlx5dv_open_device(
    device: Object,
    _attributes: *mut ContextAttributes,
) -> Object {
    // SAFETY: the same device.
    unsafe { ibv_open_device(device) }
}

unsafe extern "C" fn ibv_close_device(context: Object) -> c_int {
    // SAFETY: made by `ibv_open_device`.
    unsafe { take::<u8>(context) };
    0
}

unsafe extern "C" fn ibv_query_device(
    _context: Object,
    attributes: *mut DeviceAttributes,
) -> c_int {
    let found = DeviceAttributes {
        max_qp_rd_atom: MAX_READS,
        max_qp_init_rd_atom: MAX_READS,
        atomic_cap: ffi::ATOMIC_HCA,
        phys_port_cnt: 1,
        ..DeviceAttributes::default()
    };
    // SAFETY: a place for the attributes.
    unsafe { attributes.write(found) };
    0
}

unsafe extern "C" fn ibv_query_port(
    _context: Object,
    port: u8,
    attributes: *mut PortAttributes,
) -> c_int {
    if port != 1 {
        return libc::EINVAL;
    }
    let found = PortAttributes {
        state: ffi::PORT_ACTIVE,
        max_mtu: MTU_4096,
        active_mtu: MTU_4096,
        gid_tbl_len: GID_IDX + 1,
        link_layer: ffi::LINK_LAYER_ETHERNET,
        ..PortAttributes::default()
    };
    // SAFETY: a place for the attributes.
    unsafe { attributes.write(found) };
    0
}

/// A port's address identifies its NIC for other processes.
unsafe extern "C" fn ibv_query_gid(
    _context: Object,
    port: u8,
    index: c_int,
    gid: *mut [u8; 16],
) -> c_int {
    let Some(device) = device().filter(|_| port == 1 && index == GID_IDX) else { return -1 };
    // SAFETY: a place for the address.
    unsafe { gid.write(device.nic.lock().address().encode()) };
    0
}

unsafe extern "C" fn ibv_alloc_pd(_context: Object) -> Object {
    let Some(device) = device() else { return ptr::null_mut() };
    let domain = device.nic.lock().alloc_domain();
    let mut made = device.made();
    made.domains.push(domain);
    let number = u32::try_from(made.domains.len()).unwrap_or(u32::MAX);
    give(Pd { domain, number }).cast()
}

unsafe extern "C" fn ibv_dealloc_pd(pd: Object) -> c_int {
    // SAFETY: made by `ibv_alloc_pd`.
    unsafe { take::<Pd>(pd) };
    0
}

unsafe extern "C" fn ibv_reg_mr(
    pd: Object,
    address: *mut c_void,
    bytes: usize,
    rights: c_int,
) -> *mut Mr {
    let registered = || -> Result<*mut Mr, c_int> {
        let device = device().ok_or(libc::ENODEV)?;
        // SAFETY: a domain of `ibv_alloc_pd`; the caller that registers memory keeps it mapped.
        let keys = unsafe {
            let domain = (*pd.cast::<Pd>()).domain;
            device.register(domain, address, bytes, rights & PEER_RIGHTS != 0)?
        };
        let (lkey, rkey) = (keys.lkey, keys.rkey);
        let mr = Mr {
            context: ptr::null_mut(),
            pd,
            addr: address,
            length: bytes,
            handle: 0,
            lkey,
            rkey,
        };
        Ok(give(Registration { mr }).cast())
    };
    or_null(registered())
}

/// There is no GPU whose memory this NIC could reach by a descriptor.
unsafe extern "C" fn ibv_reg_dmabuf_mr(
    _pd: Object,
    _offset: u64,
    _bytes: usize,
    _address: u64,
    _descriptor: c_int,
    _rights: c_int,
) -> *mut Mr {
    set_errno(libc::EOPNOTSUPP);
    ptr::null_mut()
}

unsafe extern "C" fn ibv_dereg_mr(mr: *mut Mr) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    // SAFETY: made by `ibv_reg_mr`.
    let registered = unsafe { take::<Registration>(mr.cast()) };
    code_of(device.nic.lock().deregister(registered.mr.lkey).map_err(refuse))
}

unsafe extern "C" fn ibv_create_cq(
    _context: Object,
    num: c_int,
    _user: *mut c_void,
    _channel: Object,
    _vector: c_int,
) -> Object {
    let create = || -> Result<*mut Ring, c_int> {
        let device = device().ok_or(libc::ENODEV)?;
        let entries = u32::try_from(num).map_err(|_| libc::EINVAL)?.max(1);
        let entries = (entries + 1).checked_next_power_of_two().ok_or(libc::EINVAL)?;
        let ring_bytes = entries as usize * CQE_BYTES;
        let region = Region::anonymous(ring_bytes + PAGE_BYTES).map_err(|_| libc::ENOMEM)?;
        // SAFETY: fresh memory of this length.
        unsafe { ptr::write_bytes(region.as_ptr().as_ptr(), CQE_FILL, ring_bytes) };
        let config = CqConfig {
            region: region.clone(),
            cq_offset: 0,
            depth: entries,
            dbrec_offset: ring_bytes,
            is_collapsed: false,
            ignores_overrun: false,
        };
        let number = device.nic.lock().create_cq(&config).map_err(refuse)?;
        Ok(give(Ring { number, entries, region }))
    };
    or_null(create()).cast()
}

unsafe extern "C" fn ibv_destroy_cq(cq: Object) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    // SAFETY: made by `ibv_create_cq`.
    let ring = unsafe { take::<Ring>(cq) };
    code_of(device.nic.lock().destroy_cq(ring.number).map_err(refuse))
}

unsafe extern "C" fn ibv_create_qp(pd: Object, init: *mut QpInit) -> *mut Qp {
    let create = || -> Result<*mut Qp, c_int> {
        let device = device().ok_or(libc::ENODEV)?;
        // SAFETY: attributes, a domain and a completion queue that were made here.
        let (init, domain, send_cq, recv_cq) = unsafe {
            let init = &*init;
            let number = |cq: Object| (*cq.cast::<Ring>()).number;
            (init, (*pd.cast::<Pd>()).domain, number(init.send_cq), number(init.recv_cq))
        };
        // As libmlx5 does, see `queue/plain.rs` of `switchyard-ibgda`.
        let blocks = init.cap.max_send_wr.checked_mul(BLOCKS_PER_REQUEST);
        let depth = blocks.and_then(u32::checked_next_power_of_two).ok_or(libc::EINVAL)?;
        // Receives in front, a block of them at least.
        let recv_depth = init.cap.max_recv_wr.max(RECEIVES_PER_BLOCK);
        let recv_depth = recv_depth.checked_next_power_of_two().ok_or(libc::EINVAL)?;
        let places = Places::new(recv_depth, depth);
        let region = Region::anonymous(places.bytes).map_err(|_| libc::ENOMEM)?;
        // A completion queue for both directions is one without a reader of receives.
        let has_receives = recv_cq != send_cq;
        let config = QpConfig {
            domain,
            region: region.clone(),
            sq_offset: places.sq,
            sq_depth: depth,
            dbrec_offset: places.dbrec,
            has_record: true,
            doorbell_offset: places.doorbell,
            doorbell_region: None,
            send_cq,
            recv_cq: has_receives.then_some(recv_cq),
            recv_queue: has_receives.then_some(RecvQueueConfig {
                offset: 0,
                depth: recv_depth,
                stride: RECEIVE_BYTES,
            }),
        };
        let qp_num = device.nic.lock().create_qp(&config).map_err(refuse)?;
        let qp = Qp {
            context: ptr::null_mut(),
            qp_context: ptr::null_mut(),
            pd,
            send_cq: init.send_cq,
            recv_cq: init.recv_cq,
            srq: ptr::null_mut(),
            handle: 0,
            qp_num,
        };
        Ok(give(Pair { qp, depth, recv_depth, region }).cast())
    };
    or_null(create())
}

unsafe extern "C" fn ibv_modify_qp(
    qp: *mut Qp,
    attributes: *mut QpAttributes,
    _mask: c_int,
) -> c_int {
    // SAFETY: made by `ibv_create_qp`, with complete attributes.
    let (qpn, attributes) = unsafe { ((*qp).qp_num, &*attributes) };
    match attributes.qp_state {
        ffi::QPS_RESET => code_of(with_nic(|nic| nic.reset_pair(qpn))),
        ffi::QPS_RTR => code_of(connect(qpn, &attributes.ah_attr.grh.dgid, attributes.dest_qp_num)),
        // The modelled NIC is ready to send with that.
        ffi::QPS_INIT | ffi::QPS_RTS => 0,
        _ => libc::EINVAL,
    }
}

unsafe extern "C" fn ibv_destroy_qp(qp: *mut Qp) -> c_int {
    // SAFETY: made by `ibv_create_qp`.
    let pair = unsafe { take::<Pair>(qp.cast()) };
    code_of(with_nic(|nic| nic.destroy_qp(pair.qp.qp_num)))
}

unsafe extern "C" fn ibv_create_ah(_pd: Object, attributes: *mut AhAttributes) -> Object {
    // SAFETY: complete attributes.
    let rgid = unsafe { (*attributes).grh.dgid };
    // SAFETY: all-zero is a value of this structure of integers.
    let zero = unsafe { std::mem::zeroed::<AddressVector>() };
    give(Route { vector: AddressVector { rmac: [2, 0, 0, 0, 0, 1], rgid, ..zero } }).cast()
}

unsafe extern "C" fn ibv_destroy_ah(ah: Object) -> c_int {
    // SAFETY: made by `ibv_create_ah`.
    unsafe { take::<Route>(ah) };
    0
}

unsafe extern "C" fn mlx5dv_init_obj(object: *mut DvObject, kinds: u64) -> c_int {
    // SAFETY: inputs and outputs are the objects that `kinds` says.
    unsafe {
        let object = &mut *object;
        if kinds & ffi::OBJ_PD != 0 {
            let pd = &*object.pd.input.cast::<Pd>();
            (*object.pd.output.cast::<DvPd>()).pdn = pd.number;
        }
        if kinds & ffi::OBJ_AH != 0 {
            let route = object.ah.input.cast::<Route>();
            (*object.ah.output.cast::<DvAh>()).av = &raw mut (*route).vector;
        }
        if kinds & ffi::OBJ_QP != 0 {
            let pair = &*object.qp.input.cast::<Pair>();
            let out = &mut *object.qp.output.cast::<DvQp>();
            let base = pair.region.as_ptr().as_ptr();
            let places = Places::new(pair.recv_depth, pair.depth);
            out.rq_buf = base.cast();
            out.rq_wqe_cnt = pair.recv_depth;
            out.rq_stride = RECEIVE_BYTES as u32;
            out.sq_buf = base.add(places.sq).cast();
            out.sq_wqe_cnt = pair.depth;
            out.sq_stride = BLOCK_BYTES as u32;
            out.dbrec = base.add(places.dbrec).cast();
            out.bf_reg = base.add(places.doorbell).cast();
        }
        if kinds & ffi::OBJ_CQ != 0 {
            let ring = &*object.cq.input.cast::<Ring>();
            let out = &mut *object.cq.output.cast::<DvCq>();
            let base = ring.region.as_ptr().as_ptr();
            out.buf = base.cast();
            out.dbrec = base.add(ring.entries as usize * CQE_BYTES).cast();
            out.cqe_cnt = ring.entries;
            out.cqe_size = CQE_BYTES as u32;
        }
    }
    0
}

/// Layout of a queue pair's memory behind its receives.
struct Places {
    sq: usize,
    dbrec: usize,
    doorbell: usize,
    bytes: usize,
}

impl Places {
    fn new(recv_depth: u32, depth: u32) -> Self {
        let sq = recv_depth as usize * RECEIVE_BYTES;
        let dbrec = (sq + depth as usize * BLOCK_BYTES).next_multiple_of(PAGE_BYTES);
        let doorbell = dbrec + PAGE_BYTES;
        Self { sq, dbrec, doorbell, bytes: doorbell + PAGE_BYTES }
    }
}

/// Connects a queue pair to one of the NIC at `gid`.
pub(super) fn connect(qpn: u32, gid: &[u8; 16], remote_qpn: u32) -> Result<(), c_int> {
    let peer = PortAddress::decode(gid).ok_or(libc::EINVAL)?;
    with_nic(|nic| nic.connect(qpn, peer, remote_qpn))
}

pub(super) fn with_nic<T>(
    call: impl FnOnce(&mut softnic::Nic) -> Result<T, softnic::ControlError>,
) -> Result<T, c_int> {
    let device = device().ok_or(libc::ENODEV)?;
    call(&mut device.nic.lock()).map_err(refuse)
}

/// Stands for the device in libibverbs' list.
const THE_DEVICE: *mut c_void = ptr::without_provenance_mut(1);
/// Limit of a queue pair's reads and atomics under way; the modelled NIC has no limit.
const MAX_READS: c_int = 16;
/// `IBV_MTU_4096`
const MTU_4096: u32 = 5;
/// Of libmlx5, for a reliable connection with one piece and 28 inline bytes.
const BLOCKS_PER_REQUEST: u32 = 4;
/// libmlx5 makes a receive queue of a basic block at least.
const RECEIVES_PER_BLOCK: u32 = (BLOCK_BYTES / RECEIVE_BYTES) as u32;
