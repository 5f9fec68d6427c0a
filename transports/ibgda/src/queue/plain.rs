//! Queue pairs that libibverbs makes, in host memory, with an ordinary ring of completions.

use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use kernels::mlx5::{QueueHandle, ReceiveHandle};

use super::receive::{OfReceives, Piece, Pieces, ReceiveQueue};
use super::{
    BLOCK_BYTES, CQE_BYTES, CQE_INVALID, DBREC_BYTES, INLINE_BYTES, LOG_MAX_READS, MAX_DEPTH,
    MAX_RECEIVES, MIN_DEPTH, MIN_RNR_NAK, QueueConfig, QueueError, RECEIVE_BYTES, RNR_RETRIES,
    RemoteQueue,
};
use crate::access::{Access, HostRange, MappingPart};
use crate::ffi::{self, DvCq, DvObject, DvQp, InOut, QpAttributes, QpCapacity, QpInit, qp_mask};
use crate::nic::{Nic, NicError, no_object};

/// Made by libibverbs.
#[derive(Debug)]
pub(super) struct PlainQueue {
    // Posters lose their view before the queue goes.
    _mapped: Vec<MappingPart>,
    words: Words,
    qp: VerbsQp,
}

/// The parts of the queue that this process writes when it is reset, at its own addresses.
#[derive(Debug)]
struct Words {
    dbrec: NonNull<u32>,
    cq_dbrec: NonNull<u32>,
    cq: NonNull<u8>,
    cq_depth: u64,
}

// SAFETY: plain addresses; the exclusive owner of the queue uses them while no thread posts.
unsafe impl Send for Words {}
// SAFETY: shared references use none of them.
unsafe impl Sync for Words {}

/// A queue pair and its completion queues.
#[derive(Debug)]
struct VerbsQp {
    // Dropped in this order.
    qp: NonNull<ffi::Qp>,
    nic: Arc<Nic>,
    cq: VerbsCq,
    recv_cq: Option<VerbsCq>,
}

#[derive(Debug)]
struct VerbsCq {
    nic: Arc<Nic>,
    cq: NonNull<c_void>,
}

// SAFETY: libibverbs allows calls from any thread; there is one owner.
unsafe impl Send for VerbsQp {}
// SAFETY: shared references call nothing.
unsafe impl Sync for VerbsQp {}
// SAFETY: as for queue pairs.
unsafe impl Send for VerbsCq {}
// SAFETY: as for queue pairs.
unsafe impl Sync for VerbsCq {}

impl Drop for VerbsQp {
    fn drop(&mut self) {
        // SAFETY: made by `create`, destroyed once, before its completion queues.
        let code = unsafe { (self.nic.libraries().verbs.ibv_destroy_qp)(self.qp.as_ptr()) };
        if code != 0 {
            tracing::error!(nic = self.nic.name(), code, "a queue pair cannot be destroyed");
        }
    }
}

impl Drop for VerbsCq {
    fn drop(&mut self) {
        // SAFETY: made by `create`, destroyed once.
        let code = unsafe { (self.nic.libraries().verbs.ibv_destroy_cq)(self.cq.as_ptr()) };
        if code != 0 {
            tracing::error!(nic = self.nic.name(), code, "a completion queue cannot be destroyed");
        }
    }
}

impl VerbsCq {
    fn create(nic: &Arc<Nic>, num: u32) -> Result<Self, NicError> {
        let entries = c_int::try_from(num).unwrap_or(c_int::MAX);
        // SAFETY: the context is open; no channel, vector 0.
        let cq = unsafe {
            (nic.libraries().verbs.ibv_create_cq)(
                nic.context(),
                entries,
                ptr::null_mut(),
                ptr::null_mut(),
                0,
            )
        };
        NonNull::new(cq)
            .map(|cq| Self { nic: Arc::clone(nic), cq })
            .ok_or_else(|| nic.last_error("ibv_create_cq", "too many queues, or too deep"))
    }

    fn as_ptr(&self) -> *mut c_void {
        self.cq.as_ptr()
    }
}

pub(super) fn create(
    nic: &Arc<Nic>,
    access: &dyn Access,
    config: &QueueConfig,
) -> Result<(PlainQueue, QueueHandle, Option<OfReceives>), QueueError> {
    let (verbs, mlx5) = (&nic.libraries().verbs, &nic.libraries().mlx5);
    let cq = VerbsCq::create(nic, config.depth)?;
    let recv_cq = match config.num_receives {
        0 => None,
        num => Some(VerbsCq::create(nic, num)?),
    };
    let mut init = QpInit {
        qp_context: ptr::null_mut(),
        send_cq: cq.as_ptr(),
        recv_cq: recv_cq.as_ref().unwrap_or(&cq).as_ptr(),
        srq: ptr::null_mut(),
        cap: QpCapacity {
            // NOTES: libmlx5 keeps four blocks for each request, for operations that we never post (its
            // `mlx5_calc_send_wqe`). Asked for `depth` it would make a queue four times as deep, deeper than the
            // completions.
            max_send_wr: config.depth / BLOCKS_PER_REQUEST,
            max_recv_wr: config.num_receives.max(1),
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: INLINE_BYTES,
        },
        qp_type: ffi::QPT_RC,
        sq_sig_all: 0,
    };
    // SAFETY: domain and completion queue are open.
    let qp = unsafe { (verbs.ibv_create_qp)(nic.pd(), &raw mut init) };
    let qp = NonNull::new(qp)
        .ok_or_else(|| nic.last_error("ibv_create_qp", "too many queues, or too deep"))?;
    let owner = VerbsQp { qp, nic: Arc::clone(nic), cq, recv_cq };
    // SAFETY: all-zero is a value of these structures of integers and pointers.
    let (mut dv_qp, mut dv_cq, mut dv_recv_cq) = unsafe {
        (std::mem::zeroed::<DvQp>(), std::mem::zeroed::<DvCq>(), std::mem::zeroed::<DvCq>())
    };
    let find = |mut object: DvObject, kinds| {
        // SAFETY: inputs and outputs are the objects that the types say.
        match unsafe { (mlx5.mlx5dv_init_obj)(&raw mut object, kinds) } {
            0 => Ok(()),
            code => Err(nic.code_error("mlx5dv_init_obj", code, "libmlx5 is of another version")),
        }
    };
    let qp_object = InOut { input: qp.as_ptr().cast(), output: (&raw mut dv_qp).cast() };
    let cq_object = InOut { input: owner.cq.as_ptr(), output: (&raw mut dv_cq).cast() };
    let both = DvObject { qp: qp_object, cq: cq_object, ..no_object() };
    find(both, ffi::OBJ_QP | ffi::OBJ_CQ)?;
    if let Some(recv_cq) = &owner.recv_cq {
        let cq = InOut { input: recv_cq.as_ptr(), output: (&raw mut dv_recv_cq).cast() };
        find(DvObject { cq, ..no_object() }, ffi::OBJ_CQ)?;
    }
    let wrong = |what, found: u64, expected| QueueError::Layout {
        device: nic.name().to_owned(),
        what,
        found,
        expected,
    };
    if dv_qp.sq_stride != BLOCK_BYTES {
        return Err(wrong("sq.stride", u64::from(dv_qp.sq_stride), "64"));
    }
    if dv_cq.cqe_size != CQE_BYTES {
        return Err(wrong("cqe_size", u64::from(dv_cq.cqe_size), "64: unset MLX5_CQE_SIZE"));
    }
    let depth = dv_qp.sq_wqe_cnt;
    if !(MIN_DEPTH..=MAX_DEPTH).contains(&depth) || !depth.is_power_of_two() {
        return Err(wrong("sq.wqe_cnt", u64::from(depth), "a power of two from 128 to 32768"));
    }
    if dv_cq.cqe_cnt < depth || !dv_cq.cqe_cnt.is_power_of_two() {
        return Err(wrong("cqe_cnt", u64::from(dv_cq.cqe_cnt), "a power of two, at least wqe_cnt"));
    }
    let has_receives = owner.recv_cq.is_some();
    if has_receives {
        check_receives(config, &dv_qp, &dv_recv_cq)
            .map_err(|(what, found, expected)| wrong(what, u64::from(found), expected))?;
    }
    let mut mapped = Vec::with_capacity(7);
    let mut map = |start: *mut c_void, bytes: u32, kind, what| {
        let start = NonNull::new(start.cast::<u8>()).ok_or_else(|| wrong(what, 0, "an address"))?;
        // SAFETY: libmlx5 keeps these pages until the queue pair is destroyed, and the mapping is
        // dropped before it.
        let part = unsafe { nic.pages().map(access, start, bytes as usize, kind) }?;
        let address = part.address;
        mapped.push(part);
        Ok::<u64, QueueError>(address)
    };
    let handle = QueueHandle {
        sq: map(dv_qp.sq_buf, depth * BLOCK_BYTES, HostRange::Memory, "sq.buf")?,
        dbrec: map(dv_qp.dbrec.cast(), DBREC_BYTES, HostRange::Memory, "dbrec")?,
        doorbell: map(dv_qp.bf_reg, DBREC_BYTES, HostRange::Register, "bf.reg")?,
        cq: map(dv_cq.buf, dv_cq.cqe_cnt * CQE_BYTES, HostRange::Memory, "cq.buf")?,
        cq_dbrec: map(dv_cq.dbrec.cast(), DBREC_BYTES, HostRange::Memory, "cq.dbrec")?,
        // SAFETY: the queue pair is there.
        qpn: unsafe { qp.as_ref() }.qp_num,
        sq_depth: depth,
        cq_depth: dv_cq.cqe_cnt,
        ..QueueHandle::default()
    };
    let of_receives = if has_receives {
        let cq_bytes = dv_recv_cq.cqe_cnt * CQE_BYTES;
        Some(ReceiveHandle {
            dbrec: handle.dbrec,
            cq: map(dv_recv_cq.buf, cq_bytes, HostRange::Memory, "cq.buf of receives")?,
            cq_dbrec: map(
                dv_recv_cq.dbrec.cast(),
                DBREC_BYTES,
                HostRange::Memory,
                "cq.dbrec of receives",
            )?,
            qpn: handle.qpn,
            cq_depth: dv_recv_cq.cqe_cnt,
            num_receives: config.num_receives,
            ..ReceiveHandle::default()
        })
    } else {
        None
    };
    let present = |start: *mut c_void, what| {
        NonNull::new(start.cast::<u8>()).ok_or_else(|| wrong(what, 0, "an address"))
    };
    let words = Words {
        dbrec: present(dv_qp.dbrec.cast(), "dbrec")?.cast(),
        cq_dbrec: present(dv_cq.dbrec.cast(), "cq.dbrec")?.cast(),
        cq: present(dv_cq.buf, "cq.buf")?,
        cq_depth: u64::from(dv_cq.cqe_cnt),
    };
    let of_receives = match of_receives {
        None => None,
        Some(of_receives) => {
            let pieces = Pieces {
                rq: Piece::Process(present(dv_qp.rq_buf, "rq.buf")?),
                rq_depth: dv_qp.rq_wqe_cnt,
                rq_stride: dv_qp.rq_stride as usize,
                dbrec: Piece::Process(words.dbrec.cast()),
                cq: Piece::Process(present(dv_recv_cq.buf, "cq.buf of receives")?),
                cq_dbrec: Piece::Process(present(dv_recv_cq.dbrec.cast(), "cq.dbrec of receives")?),
            };
            Some((of_receives, pieces))
        }
    };
    Ok((PlainQueue { _mapped: mapped, words, qp: owner }, handle, of_receives))
}

/// A property of libmlx5's queue with receives that makes it unusable: its name, its value, and the expected
/// value.
fn check_receives(
    config: &QueueConfig,
    qp: &DvQp,
    cq: &DvCq,
) -> Result<(), (&'static str, u32, &'static str)> {
    if qp.rq_stride < RECEIVE_BYTES || !qp.rq_stride.is_multiple_of(RECEIVE_BYTES) {
        return Err(("rq.stride", qp.rq_stride, "a multiple of 16"));
    }
    let depth = qp.rq_wqe_cnt;
    if !(config.num_receives..=MAX_RECEIVES).contains(&depth) || !depth.is_power_of_two() {
        return Err(("rq.wqe_cnt", depth, "a power of two from num_receives to 32768"));
    }
    if cq.cqe_size != CQE_BYTES {
        return Err(("cqe_size of receives", cq.cqe_size, "64: unset MLX5_CQE_SIZE"));
    }
    Ok(())
}

impl PlainQueue {
    pub(super) fn connect(
        &mut self,
        nic: &Nic,
        config: &QueueConfig,
        receives: Option<&ReceiveQueue>,
        remote: &RemoteQueue,
        own_psn: u32,
    ) -> Result<(), QueueError> {
        let port = nic.port();
        let rights = ffi::ACCESS_REMOTE_WRITE | ffi::ACCESS_REMOTE_READ | ffi::ACCESS_REMOTE_ATOMIC;
        let mut init = QpAttributes {
            qp_state: ffi::QPS_INIT,
            qp_access_flags: u32::try_from(rights).unwrap_or(0),
            port_num: port.number,
            ..QpAttributes::default()
        };
        let mask = qp_mask::STATE | qp_mask::PKEY_INDEX | qp_mask::PORT | qp_mask::ACCESS_FLAGS;
        self.modify(nic, &mut init, mask, "is the port up?")?;
        receives.map_or(Ok(()), ReceiveQueue::post)?;
        let mut receive = QpAttributes {
            qp_state: ffi::QPS_RTR,
            path_mtu: u32::from(remote.mtu),
            dest_qp_num: remote.qpn,
            rq_psn: remote.psn,
            max_dest_rd_atomic: 1 << LOG_MAX_READS,
            min_rnr_timer: MIN_RNR_NAK,
            ah_attr: nic.path(&remote.gid, remote.lid),
            ..QpAttributes::default()
        };
        let mask = qp_mask::STATE
            | qp_mask::AV
            | qp_mask::PATH_MTU
            | qp_mask::DEST_QPN
            | qp_mask::RQ_PSN
            | qp_mask::MAX_DEST_RD_ATOMIC
            | qp_mask::MIN_RNR_TIMER;
        let advice =
            "no route to the peer's address: check routes, GID index and MTU of both sides";
        self.modify(nic, &mut receive, mask, advice)?;
        let mut send = QpAttributes {
            qp_state: ffi::QPS_RTS,
            sq_psn: own_psn,
            timeout: config.ack_timeout,
            retry_cnt: config.retries,
            rnr_retry: RNR_RETRIES,
            max_rd_atomic: 1 << LOG_MAX_READS,
            ..QpAttributes::default()
        };
        let mask = qp_mask::STATE
            | qp_mask::TIMEOUT
            | qp_mask::RETRY_CNT
            | qp_mask::RNR_RETRY
            | qp_mask::SQ_PSN
            | qp_mask::MAX_QP_RD_ATOMIC;
        self.modify(nic, &mut send, mask, "is the queue pair ready to receive?")
    }

    /// Resets the queue pair. `consumed` completions were taken before. Returns the total number of completions,
    /// from which the poller continues: a completion queue is not reset.
    pub(super) fn reset(&mut self, nic: &Nic, consumed: u64) -> Result<u64, QueueError> {
        let mut reset = QpAttributes { qp_state: ffi::QPS_RESET, ..QpAttributes::default() };
        self.modify(nic, &mut reset, qp_mask::STATE, "does the queue pair still exist?")?;
        let words = &self.words;
        let is_written = |index: u64| {
            let slot = usize::try_from(index & (words.cq_depth - 1)).unwrap_or(0);
            // SAFETY: within the ring, which libmlx5 keeps until the queue is destroyed.
            let op_own = unsafe { words.cq.add(slot * CQE_BYTES as usize + 63).read_volatile() };
            let owner = u8::from(index & words.cq_depth != 0);
            op_own >> 4 != CQE_INVALID && op_own & 1 == owner
        };
        // Completions of flushed requests, which were never polled.
        let end = consumed + words.cq_depth;
        let consumed = (consumed..end).find(|index| !is_written(*index)).unwrap_or(end);
        // NOTES: libmlx5 cleans the completion queue by a count of its own, which does not include completions
        // that kernels consumed. It may have left that count in the record.
        let record = u32::try_from(consumed & 0xff_ffff).unwrap_or(0).to_be();
        // SAFETY: records of this queue, which the NIC does not read now: there is no request.
        unsafe {
            words.cq_dbrec.write_volatile(record);
            words.dbrec.write_volatile(0);
            words.dbrec.add(1).write_volatile(0);
        }
        Ok(consumed)
    }

    fn modify(
        &self,
        nic: &Nic,
        attributes: &mut QpAttributes,
        mask: c_int,
        advice: &'static str,
    ) -> Result<(), QueueError> {
        let qp = self.qp.qp.as_ptr();
        // SAFETY: the queue pair is there, the attributes of the mask are set.
        let code = unsafe { (nic.libraries().verbs.ibv_modify_qp)(qp, attributes, mask) };
        if code != 0 {
            return Err(nic.code_error("ibv_modify_qp", code, advice).into());
        }
        Ok(())
    }
}

/// Of libmlx5, for a reliable connection with one piece and 28 inline bytes.
const BLOCKS_PER_REQUEST: u32 = 4;
