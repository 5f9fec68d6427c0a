//! A queue pair that posters drive by themselves: made, connected, and described for them.
//!
//! **Plain**: libibverbs makes the queue pair and keeps it in host memory; completions are an ordinary
//! ring. Works wherever verbs do. **DevX**: the queue pair is made by commands to the firmware in memory
//! of our choice, the GPU's for instance, with a collapsed completion queue, which is cheaper to poll.

use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use kernels::mlx5::{CQ_COLLAPSED, QueueHandle, QueueState};
use thiserror::Error;

use crate::access::{AccessError, HostRange, MappedPart, PageTable, SharedMemory};
use crate::ffi::{self, DvCq, DvQp, InOut, QpAttributes, QpCapacity, QpInit, qp_mask};
use crate::nic::{
    DEVX_ADVICE, HOP_LIMIT, LinkLayer, Nic, NicError, Registration, UmemOwner, no_object,
};
use crate::prm::{self, CompletionQueueSpec, LinkSpec, PathSpec, QueuePairSpec, RetrySpec};

/// Who makes the queue pair, and where it lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueuePath {
    /// libibverbs, in host memory.
    Plain,
    /// Commands to the firmware, in memory of the [`Access`](crate::access::Access).
    Devx,
}

/// Size and limits of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueConfig {
    /// How it is made.
    pub path: QueuePath,
    /// Basic blocks, a power of two from 128 to 32768.
    pub depth: u32,
    /// The NIC is told at the latest when so many blocks wait, at most a quarter of `depth`.
    pub batch: u32,
    /// Most bytes of one request, at most 1 GiB.
    pub max_message_bytes: u32,
    /// Local acknowledgement timeout, 4.096 µs × 2^n, at most 31; 14 is 67 ms.
    pub ack_timeout: u8,
    /// Retries of a packet that nobody acknowledges, at most 7.
    pub retries: u8,
}

impl Default for QueueConfig {
    fn default() -> Self {
        Self {
            path: QueuePath::Plain,
            depth: 1024,
            batch: 32,
            max_message_bytes: 1 << 30,
            // A dead peer is noticed after about half a second by the NIC alone; liveness on the
            // bootstrap connection is faster.
            ack_timeout: 14,
            retries: 7,
        }
    }
}

/// A queue could not be made or connected.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum QueueError {
    /// A value that no queue can have.
    #[error("`{field}` is {found}, expected {expected}")]
    Config {
        /// Which.
        field: &'static str,
        /// Value.
        found: u32,
        /// What is possible.
        expected: &'static str,
    },
    /// The NIC refused.
    #[error(transparent)]
    Nic(#[from] NicError),
    /// Posters cannot reach a piece of the queue.
    #[error("queue: {0}")]
    Access(#[from] AccessError),
    /// libmlx5 made a queue that our posters do not understand.
    #[error("{device}: libmlx5 made a queue with {what} {found}, expected {expected}")]
    Layout {
        /// NIC.
        device: String,
        /// Which property.
        what: &'static str,
        /// Value found.
        found: u64,
        /// Value expected.
        expected: &'static str,
    },
}

/// The other end of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteQueue {
    /// Its queue pair.
    pub qpn: u32,
    /// Its port on InfiniBand.
    pub lid: u16,
    /// Its address.
    pub gid: [u8; 16],
    /// `IBV_MTU_*` that both ports have.
    pub mtu: u8,
}

/// A queue pair with everything it lies in.
#[derive(Debug)]
pub struct Queue {
    // Fields drop in order: the queue pair before its memory.
    made: Made,
    handle: QueueHandle,
    nic: Arc<Nic>,
    config: QueueConfig,
    _scratch: Registration,
    _state: Box<dyn SharedMemory>,
}

impl Queue {
    /// Makes a queue, not yet connected. `peer` comes back in error words.
    ///
    /// # Errors
    /// [`QueueError`].
    pub(crate) fn create(
        nic: &Arc<Nic>,
        pages: &PageTable,
        config: &QueueConfig,
        peer: u32,
    ) -> Result<Self, QueueError> {
        check_config(config)?;
        let state = pages.access().alloc(STATE_BYTES)?;
        // SAFETY: the queue owns the memory longer than the registration.
        let scratch = unsafe { register(nic, state.as_ref())? };
        let (made, mut handle) = match config.path {
            QueuePath::Plain => create_plain(nic, pages, config)?,
            QueuePath::Devx => create_devx(nic, pages, config)?,
        };
        handle.state = state.address();
        handle.scratch = state.address() + SCRATCH_OFFSET;
        handle.scratch_lkey = scratch.local_key();
        // Queues may be deeper than asked for, but not by so much that the bound is of use.
        handle.batch = config.batch.min(handle.sq_depth / 4);
        handle.max_message_bytes = config.max_message_bytes;
        handle.peer = peer;
        Ok(Self {
            made,
            handle,
            nic: Arc::clone(nic),
            config: *config,
            _scratch: scratch,
            _state: state,
        })
    }

    /// Number of the queue pair.
    #[must_use]
    pub const fn qpn(&self) -> u32 {
        self.handle.qpn
    }

    /// What posters need, valid as long as the queue.
    #[must_use]
    pub const fn handle(&self) -> QueueHandle {
        self.handle
    }

    /// Connects with the other end, which may be connected later: nothing is sent yet.
    ///
    /// # Errors
    /// [`QueueError`].
    pub fn connect(&mut self, remote: &RemoteQueue) -> Result<(), QueueError> {
        match &mut self.made {
            Made::Plain(made) => made.connect(&self.nic, &self.config, remote),
            Made::Devx(made) => made.connect(&self.nic, &self.config, self.handle.qpn, remote),
        }
    }
}

/// Registers shared memory by whatever way fits it.
///
/// # Safety
/// The memory outlives the result.
pub(crate) unsafe fn register(
    nic: &Arc<Nic>,
    memory: &dyn SharedMemory,
) -> Result<Registration, NicError> {
    if memory.is_on_gpu() {
        // SAFETY: the caller keeps the memory, which knows its own descriptor.
        return unsafe {
            nic.register_gpu(memory.address(), memory.bytes() as u64, memory.dma_buf())
        };
    }
    let start = usize::try_from(memory.address()).unwrap_or(0);
    let start =
        NonNull::new(ptr::with_exposed_provenance_mut::<u8>(start)).unwrap_or(NonNull::dangling());
    // SAFETY: the caller keeps the memory.
    unsafe { nic.register_host(start, memory.bytes()) }
}

#[derive(Debug)]
enum Made {
    Plain(PlainQueue),
    Devx(DevxQueue),
}

/// Made by libibverbs.
#[derive(Debug)]
struct PlainQueue {
    // Posters lose their view before the queue goes.
    _mapped: Vec<MappedPart>,
    qp: VerbsQp,
}

/// A queue pair and its completion queue.
#[derive(Debug)]
struct VerbsQp {
    nic: Arc<Nic>,
    cq: NonNull<c_void>,
    qp: Option<NonNull<ffi::Qp>>,
}

// SAFETY: libibverbs allows calls from any thread; there is one owner.
unsafe impl Send for VerbsQp {}
// SAFETY: shared references call nothing.
unsafe impl Sync for VerbsQp {}

impl Drop for VerbsQp {
    fn drop(&mut self) {
        let verbs = &self.nic.libraries().verbs;
        // SAFETY: made by `create_plain`, destroyed once, the queue pair first.
        unsafe {
            if let Some(qp) = self.qp {
                (verbs.ibv_destroy_qp)(qp.as_ptr());
            }
            (verbs.ibv_destroy_cq)(self.cq.as_ptr());
        }
    }
}

fn create_plain(
    nic: &Arc<Nic>,
    pages: &PageTable,
    config: &QueueConfig,
) -> Result<(Made, QueueHandle), QueueError> {
    let (verbs, mlx5) = (&nic.libraries().verbs, &nic.libraries().mlx5);
    let entries = c_int::try_from(config.depth).unwrap_or(c_int::MAX);
    // SAFETY: the context is open; no channel, vector 0.
    let cq = unsafe {
        (verbs.ibv_create_cq)(nic.context(), entries, ptr::null_mut(), ptr::null_mut(), 0)
    };
    let cq = NonNull::new(cq)
        .ok_or_else(|| nic.last_error("ibv_create_cq", "too many queues, or too deep"))?;
    let mut owner = VerbsQp { nic: Arc::clone(nic), cq, qp: None };
    let mut init = QpInit {
        qp_context: ptr::null_mut(),
        send_cq: cq.as_ptr(),
        recv_cq: cq.as_ptr(),
        srq: ptr::null_mut(),
        cap: QpCapacity {
            max_send_wr: config.depth,
            max_recv_wr: 1,
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
    owner.qp = Some(qp);
    // SAFETY: all-zero is a value of these structures of integers and pointers.
    let (mut dv_qp, mut dv_cq) =
        unsafe { (std::mem::zeroed::<DvQp>(), std::mem::zeroed::<DvCq>()) };
    let mut object = no_object();
    object.qp = InOut { input: qp.as_ptr().cast(), output: (&raw mut dv_qp).cast() };
    object.cq = InOut { input: cq.as_ptr(), output: (&raw mut dv_cq).cast() };
    // SAFETY: inputs and outputs are the objects that the types say.
    let code = unsafe { (mlx5.mlx5dv_init_obj)(&raw mut object, ffi::OBJ_QP | ffi::OBJ_CQ) };
    if code != 0 {
        let advice = "libmlx5 is of another version";
        return Err(nic.code_error("mlx5dv_init_obj", code, advice).into());
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
    let mut mapped = Vec::with_capacity(5);
    let mut map = |start: *mut c_void, bytes: u32, kind, what| {
        let start = NonNull::new(start.cast::<u8>()).ok_or_else(|| wrong(what, 0, "an address"))?;
        // SAFETY: libmlx5 keeps these pages until the queue pair is destroyed, and the mapping is
        // dropped before it.
        let part = unsafe { pages.map(start, bytes as usize, kind) }?;
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
    Ok((Made::Plain(PlainQueue { _mapped: mapped, qp: owner }), handle))
}

impl PlainQueue {
    fn connect(
        &mut self,
        nic: &Nic,
        config: &QueueConfig,
        remote: &RemoteQueue,
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
        let mut receive = QpAttributes {
            qp_state: ffi::QPS_RTR,
            path_mtu: u32::from(remote.mtu),
            dest_qp_num: remote.qpn,
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
        let advice = "no way to the peer's address: check routes, GID index and MTU of both sides";
        self.modify(nic, &mut receive, mask, advice)?;
        let mut send = QpAttributes {
            qp_state: ffi::QPS_RTS,
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

    fn modify(
        &self,
        nic: &Nic,
        attributes: &mut QpAttributes,
        mask: c_int,
        advice: &'static str,
    ) -> Result<(), QueueError> {
        let qp = self.qp.qp.map_or(ptr::null_mut(), NonNull::as_ptr);
        // SAFETY: the queue pair is there, the attributes of the mask are set.
        let code = unsafe { (nic.libraries().verbs.ibv_modify_qp)(qp, attributes, mask) };
        if code != 0 {
            return Err(nic.code_error("ibv_modify_qp", code, advice).into());
        }
        Ok(())
    }
}

/// Made by commands to the firmware.
#[derive(Debug)]
struct DevxQueue {
    // Dropped in this order: objects, then what they lie in.
    _mapped: MappedPart,
    qp: DevxObject,
    _cq: DevxObject,
    _uar: UarOwner,
    _umem: UmemOwner,
    _memory: Box<dyn SharedMemory>,
}

#[derive(Debug)]
struct DevxObject {
    nic: Arc<Nic>,
    object: NonNull<c_void>,
}

// SAFETY: the library has no tie to threads; there is one owner.
unsafe impl Send for DevxObject {}
// SAFETY: shared references call nothing.
unsafe impl Sync for DevxObject {}

impl Drop for DevxObject {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once.
        let code =
            unsafe { (self.nic.libraries().mlx5.mlx5dv_devx_obj_destroy)(self.object.as_ptr()) };
        if code != 0 {
            tracing::error!(nic = self.nic.name(), code, "a DevX object cannot be destroyed");
        }
    }
}

#[derive(Debug)]
struct UarOwner {
    nic: Arc<Nic>,
    uar: NonNull<ffi::Uar>,
}

// SAFETY: the library has no tie to threads; there is one owner.
unsafe impl Send for UarOwner {}
// SAFETY: shared references only read what never changes.
unsafe impl Sync for UarOwner {}

impl UarOwner {
    fn new(nic: &Arc<Nic>) -> Result<Self, NicError> {
        // A register of 8 bytes of our own, else one without write combining, else a BlueFlame one,
        // of which we use the first 8 bytes.
        let kinds = [ffi::UAR_NON_CACHED_DEDICATED, ffi::UAR_NON_CACHED, ffi::UAR_BLUE_FLAME];
        let uar = kinds.into_iter().find_map(|kind| {
            // SAFETY: the context is open; unknown kinds are refused.
            NonNull::new(unsafe {
                (nic.libraries().mlx5.mlx5dv_devx_alloc_uar)(nic.context(), kind)
            })
        });
        uar.map(|uar| Self { nic: Arc::clone(nic), uar })
            .ok_or_else(|| nic.last_error("mlx5dv_devx_alloc_uar", DEVX_ADVICE))
    }

    fn register(&self) -> (Option<NonNull<u8>>, u32) {
        // SAFETY: allocated until drop.
        let uar = unsafe { self.uar.as_ref() };
        (NonNull::new(uar.reg_addr.cast()), uar.page_id)
    }
}

impl Drop for UarOwner {
    fn drop(&mut self) {
        // SAFETY: allocated once, freed once.
        unsafe { (self.nic.libraries().mlx5.mlx5dv_devx_free_uar)(self.uar.as_ptr()) };
    }
}

fn create_devx(
    nic: &Arc<Nic>,
    pages: &PageTable,
    config: &QueueConfig,
) -> Result<(Made, QueueHandle), QueueError> {
    let caps = nic.devx()?;
    let log_depth = u8::try_from(config.depth.trailing_zeros()).unwrap_or(u8::MAX);
    if log_depth > caps.general.log_max_qp_blocks {
        return Err(NicError::Capability {
            device: nic.name().to_owned(),
            what: "log_max_qp_sz",
            found: caps.general.log_max_qp_blocks.to_string(),
            expected: "at least the logarithm of the queue's depth",
        }
        .into());
    }
    // Send queue, completions, records.
    let blocks_bytes = u64::from(config.depth) * u64::from(BLOCK_BYTES);
    let (cq_offset, dbrec_offset) = (blocks_bytes, 2 * blocks_bytes);
    let cq_dbrec_offset = dbrec_offset + 64;
    let bytes = usize::try_from(cq_dbrec_offset + 64).unwrap_or(usize::MAX);
    let memory = pages.access().alloc(bytes)?;
    let fill = vec![CQE_FILL; usize::try_from(blocks_bytes).unwrap_or(0)];
    memory.write(usize::try_from(cq_offset).unwrap_or(usize::MAX), &fill)?;
    // SAFETY: the queue owns the memory longer than the registration.
    let umem = unsafe { nic.register_umem(memory.address(), memory.bytes(), memory.dma_buf()) }?;
    let uar = UarOwner::new(nic)?;
    let (register, uar_page) = uar.register();
    let register = register.ok_or_else(|| QueueError::Layout {
        device: nic.name().to_owned(),
        what: "uar.reg_addr",
        found: 0,
        expected: "an address",
    })?;
    // SAFETY: the page stays until the mapping, which is dropped first, is gone.
    let mapped = unsafe { pages.map(register, DBREC_BYTES as usize, HostRange::Register) }?;
    let mut eqn = 0;
    // SAFETY: the context is open; a place for the number.
    let code =
        unsafe { (nic.libraries().mlx5.mlx5dv_devx_query_eqn)(nic.context(), 0, &raw mut eqn) };
    if code != 0 {
        return Err(nic.code_error("mlx5dv_devx_query_eqn", code, DEVX_ADVICE).into());
    }
    let command = prm::create_completion_queue(&CompletionQueueSpec {
        log_entries: log_depth,
        is_collapsed: true,
        umem_id: umem.id(),
        offset: cq_offset,
        dbrec_umem_id: umem.id(),
        dbrec_offset: cq_dbrec_offset,
        uar_page,
        eqn,
    });
    let (cq, cqn) = create_object(nic, "CREATE_CQ", &command)?;
    let command = prm::create_queue_pair(&QueuePairSpec {
        pdn: nic.pdn(),
        log_sq_blocks: log_depth,
        cqn,
        umem_id: umem.id(),
        offset: 0,
        dbrec_umem_id: umem.id(),
        dbrec_offset,
        uar_page,
        user_index: 0,
    });
    let (qp, qpn) = create_object(nic, "CREATE_QP", &command)?;
    let base = memory.address();
    let handle = QueueHandle {
        sq: base,
        dbrec: base + dbrec_offset,
        doorbell: mapped.address,
        cq: base + cq_offset,
        cq_dbrec: base + cq_dbrec_offset,
        qpn,
        sq_depth: config.depth,
        // Posters see one entry, wherever the firmware counts to.
        cq_depth: 1,
        flags: CQ_COLLAPSED,
        ..QueueHandle::default()
    };
    let made = DevxQueue { _mapped: mapped, qp, _cq: cq, _uar: uar, _umem: umem, _memory: memory };
    Ok((Made::Devx(made), handle))
}

fn create_object(
    nic: &Arc<Nic>,
    name: &'static str,
    command: &[u8],
) -> Result<(DevxObject, u32), NicError> {
    let mut answer = [0; prm::ANSWER_BYTES];
    // SAFETY: both buffers have the lengths that are given.
    let object = unsafe {
        (nic.libraries().mlx5.mlx5dv_devx_obj_create)(
            nic.context(),
            command.as_ptr().cast(),
            command.len(),
            answer.as_mut_ptr().cast(),
            answer.len(),
        )
    };
    let Some(object) = NonNull::new(object) else {
        prm::check(name, &answer).map_err(|source| nic.refused(source))?;
        return Err(nic.last_error("mlx5dv_devx_obj_create", DEVX_ADVICE));
    };
    Ok((DevxObject { nic: Arc::clone(nic), object }, prm::created_number(&answer)))
}

impl DevxQueue {
    fn connect(
        &mut self,
        nic: &Nic,
        config: &QueueConfig,
        qpn: u32,
        remote: &RemoteQueue,
    ) -> Result<(), QueueError> {
        let port = nic.port();
        let link = match port.link {
            LinkLayer::InfiniBand => LinkSpec::InfiniBand { lid: remote.lid },
            LinkLayer::Ethernet => LinkSpec::Ethernet {
                mac: nic.next_hop(&remote.gid, remote.lid)?,
                gid: remote.gid,
                // Queue pairs spread over the paths of the fabric by their source ports.
                udp_port: 0xc000 | u16::try_from((qpn ^ remote.qpn) & 0x3fff).unwrap_or(0),
            },
        };
        let path = PathSpec {
            mtu: remote.mtu,
            remote_qpn: remote.qpn,
            port: port.number,
            gid_idx: port.gid_idx,
            link,
            hop_limit: HOP_LIMIT,
            traffic_class: port.traffic_class,
            service_level: port.service_level,
        };
        let retry = RetrySpec {
            ack_timeout: config.ack_timeout,
            retries: config.retries,
            rnr_retries: RNR_RETRIES,
            log_max_reads: LOG_MAX_READS,
        };
        self.modify(nic, "RST2INIT_QP", &prm::to_init(qpn, port.number))?;
        self.modify(nic, "INIT2RTR_QP", &prm::to_ready_to_receive(qpn, &path, &retry))?;
        self.modify(nic, "RTR2RTS_QP", &prm::to_ready_to_send(qpn, &retry))
    }

    fn modify(&self, nic: &Nic, name: &'static str, command: &[u8]) -> Result<(), QueueError> {
        let mut answer = [0; prm::ANSWER_BYTES];
        // SAFETY: both buffers have the lengths that are given; the object is there.
        let code = unsafe {
            (nic.libraries().mlx5.mlx5dv_devx_obj_modify)(
                self.qp.object.as_ptr(),
                command.as_ptr().cast(),
                command.len(),
                answer.as_mut_ptr().cast(),
                answer.len(),
            )
        };
        prm::check(name, &answer).map_err(|source| nic.refused(source))?;
        if code != 0 {
            return Err(nic.code_error("mlx5dv_devx_obj_modify", code, DEVX_ADVICE).into());
        }
        Ok(())
    }
}

fn check_config(config: &QueueConfig) -> Result<(), QueueError> {
    let wrong = |field, found, expected| Err(QueueError::Config { field, found, expected });
    if !(MIN_DEPTH..=MAX_DEPTH).contains(&config.depth) || !config.depth.is_power_of_two() {
        return wrong("depth", config.depth, "a power of two from 128 to 32768");
    }
    if config.batch == 0 || config.batch > config.depth / 4 {
        return wrong("batch", config.batch, "from 1 to a quarter of the depth");
    }
    if config.max_message_bytes == 0 || config.max_message_bytes > MAX_MESSAGE_BYTES {
        return wrong("max_message_bytes", config.max_message_bytes, "from 1 byte to 1 GiB");
    }
    if config.ack_timeout > 31 {
        return wrong("ack_timeout", u32::from(config.ack_timeout), "from 0 to 31");
    }
    if config.retries > 7 {
        return wrong("retries", u32::from(config.retries), "from 0 to 7");
    }
    Ok(())
}

/// `SY_MLX5_MIN_DEPTH`
const MIN_DEPTH: u32 = 128;
/// `SY_MLX5_MAX_DEPTH`: a doorbell counts 16 bits, so a full turn must stay visible.
const MAX_DEPTH: u32 = 32768;
/// `SY_MLX5_MAX_MESSAGE_BYTES`
const MAX_MESSAGE_BYTES: u32 = 1 << 30;
/// `SY_MLX5_BLOCK_BYTES`
const BLOCK_BYTES: u32 = 64;
/// `SY_MLX5_CQE_BYTES`
const CQE_BYTES: u32 = 64;
/// `SY_MLX5_CQE_FILL`: no valid completion, and a counter one before 0.
const CQE_FILL: u8 = 0xff;
/// Doorbell record or register.
const DBREC_BYTES: u32 = 8;
/// What a request of one basic block can carry.
const INLINE_BYTES: u32 = 28;
/// Outstanding reads and atomics, as a logarithm.
const LOG_MAX_READS: u8 = 4;
/// 0.64 ms
const MIN_RNR_NAK: u8 = 12;
/// For ever: peers post receives before they are written to.
const RNR_RETRIES: u8 = 7;
/// State and scratch of a queue.
const STATE_BYTES: usize = 4096;
/// Where the old values of adds land unread.
const SCRATCH_OFFSET: u64 = 1024;
const _: () = assert!(size_of::<QueueState>() <= 1024);
