//! The commands of the DevX path, as far as they describe a queue's memory and its peer.

use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull};

use ibgda::ffi::{Object, Uar, Umem, UmemIn};
use p2p_core::Region;
use softnic::{CqConfig, QpConfig, RecvQueueConfig};

use super::verbs::{connect, with_nic};
use super::{PAGE_BYTES, borrow, code_of, device, function, give, or_null, set_errno, take};

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
        mlx5dv_devx_general_cmd,
        mlx5dv_devx_obj_create,
        mlx5dv_devx_obj_modify,
        mlx5dv_devx_obj_destroy,
        mlx5dv_devx_umem_reg,
        mlx5dv_devx_umem_reg_ex,
        mlx5dv_devx_umem_dereg,
        mlx5dv_devx_alloc_uar,
        mlx5dv_devx_free_uar,
        mlx5dv_devx_query_eqn,
    ))
}

/// Object that a command made.
#[derive(Clone, Copy)]
enum ObjectKind {
    Ring(u32),
    Pair(u32),
}

/// Capabilities, as far as the control path queries them.
unsafe extern "C" fn mlx5dv_devx_general_cmd(
    _context: Object,
    command: *const c_void,
    command_bytes: usize,
    answer: *mut c_void,
    answer_bytes: usize,
) -> c_int {
    // SAFETY: both buffers have these lengths.
    let (command, answer) = unsafe {
        (bytes(command, command_bytes), std::slice::from_raw_parts_mut(answer.cast(), answer_bytes))
    };
    answer.fill(0);
    if command_bytes < 16 || answer_bytes < 16 + 128 || get(command, 0, 16) != QUERY_CAPABILITIES {
        return refuse_command(answer);
    }
    let capabilities = &mut answer[16..];
    match get(command, 0x30, 16) >> 1 {
        0 => {
            put(capabilities, 0x20, 1, 1); // hca_cap_2
            put(capabilities, 0x1fc, 4, 1); // cqe_version
            put(capabilities, 0x88, 8, 15); // log_max_qp_sz
        }
        3 => {
            put(capabilities, 0x90, 16, 0x000f); // atomic_operations
            put(capabilities, 0xb0, 16, 0x000c); // atomic_size_qp
        }
        0x20 => put(capabilities, 0x2e1, 1, 1), // send_dbr_mode_no_dbr_ext
        _ => return refuse_command(answer),
    }
    0
}

unsafe extern "C" fn mlx5dv_devx_obj_create(
    _context: Object,
    command: *const c_void,
    command_bytes: usize,
    answer: *mut c_void,
    answer_bytes: usize,
) -> Object {
    // SAFETY: both buffers have these lengths.
    let (command, answer) = unsafe {
        (bytes(command, command_bytes), std::slice::from_raw_parts_mut(answer.cast(), answer_bytes))
    };
    answer.fill(0);
    if command_bytes < COMMAND_BYTES || answer_bytes < 16 {
        set_errno(libc::EINVAL);
        return ptr::null_mut();
    }
    let made = match get(command, 0, 16) {
        CREATE_CQ => create_ring(command),
        CREATE_QP => create_pair(command),
        _ => Err(libc::EINVAL),
    };
    match made {
        Ok(made) => {
            let (ObjectKind::Ring(number) | ObjectKind::Pair(number)) = made;
            put(answer, 0x48, 24, number);
            give(made).cast()
        }
        Err(code) => {
            refuse_command(answer);
            set_errno(code);
            ptr::null_mut()
        }
    }
}

fn create_ring(command: &[u8]) -> Result<ObjectKind, c_int> {
    const CQC: usize = 0x80;
    let is_collapsed = get(command, CQC + 0x0b, 1) == 1;
    let config = CqConfig {
        region: umem(get(command, 0x2c0, 32))?,
        cq_offset: offset(command, 0x280)?,
        depth: if is_collapsed { 1 } else { 1 << get(command, CQC + 0x63, 5) },
        dbrec_offset: offset(command, CQC + 0x1c0)?,
        is_collapsed,
        ignores_overrun: get(command, CQC + 0x0e, 1) == 1,
    };
    // Numbers from 1, since 0 means none.
    with_nic(|nic| nic.create_cq(&config)).map(|number| ObjectKind::Ring(number + 1))
}

fn create_pair(command: &[u8]) -> Result<ObjectKind, c_int> {
    let memory = umem(get(command, 0x840, 32))?;
    // The record lies in the queue's own memory, as `queue/devx.rs` of `switchyard-ibgda` has it.
    if get(command, QPC + 0x720, 32) != get(command, 0x840, 32) {
        return Err(libc::EINVAL);
    }
    let pdn = get(command, QPC + 0x28, 24);
    let (domain, uar) = {
        let made = device().ok_or(libc::ENODEV)?.made();
        let domain = (pdn as usize).checked_sub(1).and_then(|idx| made.domains.get(idx).copied());
        (domain, made.uars.get(&get(command, QPC + 0x68, 24)).cloned())
    };
    let begin = offset(command, 0x800)?;
    let has_record = match get(command, QPC + 0x80, 2) {
        DBR_VALID => true,
        NO_DBR_EXT => false,
        _ => return Err(libc::EINVAL),
    };
    // Receives lie in front of the send queue.
    let recv_queue = (get(command, QPC + 0x565, 3) == REGULAR_RQ).then(|| RecvQueueConfig {
        offset: begin,
        depth: 1 << get(command, QPC + 0x49, 4),
        stride: 16 << get(command, QPC + 0x4d, 3),
    });
    let recv_bytes = recv_queue.map_or(0, |queue| queue.depth as usize * queue.stride);
    let recv_cq = get(command, QPC + 0x4e8, 24).checked_sub(1).ok_or(libc::EINVAL)?;
    let config = QpConfig {
        domain: domain.ok_or(libc::EINVAL)?,
        region: memory,
        sq_offset: begin.checked_add(recv_bytes).ok_or(libc::EINVAL)?,
        sq_depth: 1 << get(command, QPC + 0x51, 4),
        dbrec_offset: offset(command, QPC + 0x500)?,
        has_record,
        doorbell_offset: if has_record { UAR_OFFSET } else { UAR_ALONE_OFFSET },
        doorbell_region: Some(uar.ok_or(libc::EINVAL)?),
        send_cq: get(command, QPC + 0x3e8, 24).checked_sub(1).ok_or(libc::EINVAL)?,
        recv_cq: recv_queue.map(|_| recv_cq),
        recv_queue,
    };
    with_nic(|nic| nic.create_qp(&config)).map(ObjectKind::Pair)
}

unsafe extern "C" fn mlx5dv_devx_obj_modify(
    object: Object,
    command: *const c_void,
    command_bytes: usize,
    answer: *mut c_void,
    answer_bytes: usize,
) -> c_int {
    // SAFETY: both buffers have these lengths; the object was made by `mlx5dv_devx_obj_create`.
    let (command, answer, made) = unsafe {
        let answer: &mut [u8] = std::slice::from_raw_parts_mut(answer.cast(), answer_bytes);
        (bytes(command, command_bytes), answer, *object.cast::<ObjectKind>())
    };
    answer.fill(0);
    let ObjectKind::Pair(qpn) = made else { return refuse_command(answer) };
    if command_bytes < 16 || get(command, 0x48, 24) != qpn {
        return refuse_command(answer);
    }
    let done = match get(command, 0, 16) {
        // Completion queues are not reset.
        TO_RESET => with_nic(|nic| nic.reset_pair(qpn)),
        TO_READY_TO_RECEIVE if command_bytes >= COMMAND_BYTES => {
            const PATH: usize = QPC + 0xc0;
            let gid = std::array::from_fn(|idx| command[(PATH + 0x80) / 8 + idx]);
            connect(qpn, &gid, get(command, QPC + 0xa8, 24))
        }
        // The modelled NIC is ready to send with that.
        TO_INIT | TO_READY_TO_SEND => Ok(()),
        _ => Err(libc::EINVAL),
    };
    match done {
        Ok(()) => 0,
        Err(_) => refuse_command(answer),
    }
}

unsafe extern "C" fn mlx5dv_devx_obj_destroy(object: Object) -> c_int {
    // SAFETY: made by `mlx5dv_devx_obj_create`.
    let done = match unsafe { take::<ObjectKind>(object) } {
        ObjectKind::Ring(number) => with_nic(|nic| nic.destroy_cq(number - 1)),
        ObjectKind::Pair(number) => with_nic(|nic| nic.destroy_qp(number)),
    };
    code_of(done)
}

unsafe extern "C" fn mlx5dv_devx_umem_reg(
    _context: Object,
    address: *mut c_void,
    num_bytes: usize,
    _access: u32,
) -> *mut Umem {
    let register = || -> Result<*mut Umem, c_int> {
        let device = device().ok_or(libc::ENODEV)?;
        // SAFETY: the caller that registers memory keeps it mapped.
        let region = unsafe { borrow(address, num_bytes) }.ok_or(libc::EINVAL)?;
        let mut made = device.made();
        let umem_id = made.fresh_id();
        made.umems.insert(umem_id, region);
        Ok(give(Umem { umem_id }))
    };
    or_null(register())
}

/// There is no GPU whose memory this NIC could reach by a descriptor.
unsafe extern "C" fn mlx5dv_devx_umem_reg_ex(_context: Object, _input: *mut UmemIn) -> *mut Umem {
    set_errno(libc::EOPNOTSUPP);
    ptr::null_mut()
}

unsafe extern "C" fn mlx5dv_devx_umem_dereg(umem: *mut Umem) -> c_int {
    let Some(device) = device() else { return libc::ENODEV };
    // SAFETY: made by `mlx5dv_devx_umem_reg`.
    let umem = unsafe { take::<Umem>(umem.cast()) };
    device.made().umems.remove(&umem.umem_id);
    0
}

unsafe extern "C" fn mlx5dv_devx_alloc_uar(_context: Object, _kind: u32) -> *mut Uar {
    let alloc = || -> Result<*mut Uar, c_int> {
        let device = device().ok_or(libc::ENODEV)?;
        let region = Region::anonymous(PAGE_BYTES).map_err(|_| libc::ENOMEM)?;
        let base = region.as_ptr().as_ptr();
        let mut made = device.made();
        let page_id = made.fresh_id();
        made.uars.insert(page_id, region);
        Ok(give(Uar {
            // SAFETY: within the page.
            reg_addr: unsafe { base.add(UAR_OFFSET) }.cast(),
            base_addr: base.cast(),
            page_id,
            mmap_off: 0,
            comp_mask: 0,
        }))
    };
    or_null(alloc())
}

unsafe extern "C" fn mlx5dv_devx_free_uar(uar: *mut Uar) {
    // SAFETY: made by `mlx5dv_devx_alloc_uar`.
    let uar = unsafe { take::<Uar>(uar.cast()) };
    if let Some(device) = device() {
        device.made().uars.remove(&uar.page_id);
    }
}

unsafe extern "C" fn mlx5dv_devx_query_eqn(_context: Object, _vector: u32, eqn: *mut u32) -> c_int {
    // SAFETY: a place for the number.
    unsafe { *eqn = 0 };
    0
}

fn umem(id: u32) -> Result<Region, c_int> {
    let device = device().ok_or(libc::ENODEV)?;
    device.made().umems.get(&id).cloned().ok_or(libc::EINVAL)
}

/// An offset within registered memory, which the NIC checks.
fn offset(command: &[u8], bit: usize) -> Result<usize, c_int> {
    let value = u64::from(get(command, bit, 32)) << 32 | u64::from(get(command, bit + 32, 32));
    usize::try_from(value).map_err(|_| libc::EINVAL)
}

/// # Safety
/// This number of bytes stays valid for as long as the result is used.
unsafe fn bytes<'a>(start: *const c_void, len: usize) -> &'a [u8] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(start.cast(), len) }
}

/// Answers "bad parameter".
fn refuse_command(answer: &mut [u8]) -> c_int {
    if let Some(status) = answer.first_mut() {
        *status = BAD_PARAMETER;
    }
    libc::EREMOTEIO
}

/// A field of at most 32 bits; its first bit is the most significant one.
fn get(bytes: &[u8], bit: usize, width: usize) -> u32 {
    (bit..bit + width)
        .fold(0, |value, at| value << 1 | u32::from(bytes[at / 8] >> (7 - at % 8) & 1))
}

fn put(bytes: &mut [u8], bit: usize, width: usize, value: u32) {
    for idx in 0..width {
        if value >> (width - 1 - idx) & 1 == 1 {
            let at = bit + idx;
            bytes[at / 8] |= 0x80 >> (at % 8);
        }
    }
}

// Codes and places are those of `prm.rs` of `switchyard-ibgda`, which `tests/it/control.rs` there compares
// with a second transcription.
const QUERY_CAPABILITIES: u32 = 0x100;
const CREATE_CQ: u32 = 0x400;
const CREATE_QP: u32 = 0x500;
const TO_INIT: u32 = 0x502;
const TO_READY_TO_RECEIVE: u32 = 0x503;
const TO_READY_TO_SEND: u32 = 0x504;
const TO_RESET: u32 = 0x50a;
const COMMAND_BYTES: usize = 272;
const QPC: usize = 0xc0;
/// `rq_type` of a queue pair with receives of its own.
const REGULAR_RQ: u32 = 0;
const BAD_PARAMETER: u8 = 3;
/// `send_dbr_mode`
const DBR_VALID: u32 = 0;
const NO_DBR_EXT: u32 = 1;
/// Offset of the register within its page.
const UAR_OFFSET: usize = 0x800;
/// The same for queue pairs without a record for requests.
const UAR_ALONE_OFFSET: usize = 0x600;
