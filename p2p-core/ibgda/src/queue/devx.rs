//! Queue pairs that commands to the firmware make, in memory of our choice, with one completion that is
//! overwritten.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use kernels::mlx5::{CQ_COLLAPSED, QueueHandle};

use super::{
    BLOCK_BYTES, CQE_FILL, DBREC_BYTES, LOG_MAX_READS, QueueConfig, QueueError, RNR_RETRIES,
    RemoteQueue,
};
use crate::access::{
    ALIGN_BYTES, Access, AccessError, HostRange, MappedPart, Part, Place, Plan, SharedMemory,
};
use crate::ffi;
use crate::nic::{DEVX_ADVICE, HOP_LIMIT, LinkLayer, Nic, NicError, UmemOwner};
use crate::prm::{self, CompletionQueueSpec, LinkSpec, PathSpec, QueuePairSpec, RetrySpec};

/// Made by commands to the firmware.
#[derive(Debug)]
pub(super) struct DevxQueue {
    // Dropped in this order: objects, then what they lie in.
    _mapped: MappedPart,
    qp: DevxObject,
    _cq: DevxObject,
    _uar: UarOwner,
    _umem: UmemOwner,
    memory: Part,
    depth: u32,
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

/// Blocks, completions and records of a queue of `depth`.
pub(super) fn plan_ring(plan: &mut Plan, depth: u32) -> Result<Place, AccessError> {
    plan.add(usize::try_from(Layout::new(depth).bytes).unwrap_or(usize::MAX), ALIGN_BYTES)
}

/// Makes a queue in `memory`, of [`plan_ring`].
pub(super) fn create(
    nic: &Arc<Nic>,
    access: &dyn Access,
    config: &QueueConfig,
    memory: Part,
) -> Result<(DevxQueue, QueueHandle), QueueError> {
    let caps = nic.devx()?;
    nic.capabilities().check_depth(&caps, config.depth)?;
    let log_depth = u8::try_from(config.depth.trailing_zeros()).unwrap_or(u8::MAX);
    let Layout { cq: cq_offset, dbrec: dbrec_offset, cq_dbrec: cq_dbrec_offset, .. } =
        Layout::new(config.depth);
    clear(&memory, config.depth)?;
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
    let mapped =
        unsafe { nic.pages().map(access, register, DBREC_BYTES as usize, HostRange::Register) }?;
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
    let depth = config.depth;
    let made = DevxQueue { _mapped: mapped, qp, _cq: cq, _uar: uar, _umem: umem, memory, depth };
    Ok((made, handle))
}

/// Offsets in the memory of a queue: blocks, completions, records.
struct Layout {
    cq: u64,
    dbrec: u64,
    cq_dbrec: u64,
    bytes: u64,
}

impl Layout {
    fn new(depth: u32) -> Self {
        let blocks_bytes = u64::from(depth) * u64::from(BLOCK_BYTES);
        let dbrec = 2 * blocks_bytes;
        Self { cq: blocks_bytes, dbrec, cq_dbrec: dbrec + 64, bytes: dbrec + 128 }
    }
}

/// No valid completion, and records of 0.
fn clear(memory: &dyn SharedMemory, depth: u32) -> Result<(), AccessError> {
    let Layout { cq, dbrec, bytes, .. } = Layout::new(depth);
    let at = |offset: u64| usize::try_from(offset).unwrap_or(usize::MAX);
    memory.write(at(cq), &vec![CQE_FILL; at(dbrec - cq)])?;
    memory.write(at(dbrec), &vec![0; at(bytes - dbrec)])
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
    pub(super) fn connect(
        &mut self,
        nic: &Nic,
        config: &QueueConfig,
        qpn: u32,
        remote: &RemoteQueue,
        own_psn: u32,
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
            remote_psn: remote.psn,
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
        self.modify(nic, "RTR2RTS_QP", &prm::to_ready_to_send(qpn, &retry, own_psn))
    }

    /// Takes the queue pair to reset. The one completion is overwritten by whatever comes next, so
    /// there is no count to go on with.
    pub(super) fn reset(&mut self, nic: &Nic, qpn: u32) -> Result<(), QueueError> {
        self.modify(nic, "2RST_QP", &prm::to_reset(qpn))?;
        Ok(clear(&self.memory, self.depth)?)
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
