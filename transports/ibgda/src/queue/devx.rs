//! Queue pairs that commands to the firmware make, in memory of our choice, with one completion that is
//! overwritten.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use kernels::mlx5::{CQ_COLLAPSED, NO_RECORD, QueueHandle, ReceiveHandle};

use super::receive::{OfReceives, Piece, Pieces, ReceiveQueue};
use super::{
    BLOCK_BYTES, CQE_BYTES, CQE_FILL, DBREC_BYTES, Doorbell, LOG_MAX_READS, QueueConfig,
    QueueError, RECEIVE_BYTES, RNR_RETRIES, RemoteQueue,
};
use crate::access::{
    ALIGN_BYTES, Access, AccessError, HostRange, MappingPart, PAGE_BYTES, Part, Plan, PlanSpan,
    SharedMemory,
};
use crate::ffi;
use crate::nic::{DEVX_ADVICE, HOP_LIMIT, LinkLayer, Nic, NicError, UmemOwner};
use crate::prm::{
    self, CompletionQueueSpec, LinkSpec, PathSpec, QueuePairSpec, ReceiveSpec, RetrySpec,
};

/// Made by commands to the firmware.
#[derive(Debug)]
pub(super) struct DevxQueue {
    // Dropped in this order: objects, then their memory.
    _mapped: MappingPart,
    qp: DevxObject,
    _cq: DevxObject,
    _recv_cq: Option<DevxObject>,
    _uar: UarOwner,
    _umem: UmemOwner,
    memory: Part,
    layout: Layout,
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
// SAFETY: shared references only read fields that never change.
unsafe impl Sync for UarOwner {}

impl UarOwner {
    fn new(nic: &Arc<Nic>) -> Result<Self, NicError> {
        // A register of 8 bytes of our own, else one without write combining, else a BlueFlame one, whose first 8
        // bytes we use.
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

    /// The doorbell's address and the page's number.
    fn register(&self, doorbell: Doorbell) -> Result<(NonNull<u8>, u32), QueueError> {
        // SAFETY: allocated until drop.
        let uar = unsafe { self.uar.as_ref() };
        let (what, found) = match doorbell {
            Doorbell::WithRecord => ("uar.reg_addr", NonNull::new(uar.reg_addr.cast::<u8>())),
            // SAFETY: every kind of register lies in a page, with doorbells from 0x600 on.
            Doorbell::RegisterAlone => (
                "uar.base_addr",
                NonNull::new(uar.base_addr.cast::<u8>())
                    .map(|base| unsafe { base.add(prm::REGISTER_ALONE_OFFSET) }),
            ),
        };
        let device = || self.nic.name().to_owned();
        found.map(|address| (address, uar.page_id)).ok_or_else(|| QueueError::Layout {
            device: device(),
            what,
            found: 0,
            expected: "an address",
        })
    }
}

impl Drop for UarOwner {
    fn drop(&mut self) {
        // SAFETY: allocated once, freed once.
        unsafe { (self.nic.libraries().mlx5.mlx5dv_devx_free_uar)(self.uar.as_ptr()) };
    }
}

/// Receives, blocks, completions and records of a queue.
pub(super) fn plan_ring(plan: &mut Plan, config: &QueueConfig) -> Result<PlanSpan, AccessError> {
    plan.add(usize::try_from(Layout::new(config).bytes).unwrap_or(usize::MAX), ALIGN_BYTES)
}

/// Checks whether the device's report is sufficient.
pub(super) fn check(nic: &Nic, config: &QueueConfig) -> Result<(), NicError> {
    let caps = nic.devx()?;
    let depth = config.depth.max(Layout::new(config).rq_depth);
    nic.capabilities().check_depth(&caps, depth)?;
    if config.doorbell == Doorbell::RegisterAlone {
        nic.capabilities().check_register_alone(&caps)?;
    }
    Ok(())
}

/// Makes a queue in `memory`, of [`plan_ring`].
pub(super) fn create(
    nic: &Arc<Nic>,
    access: &dyn Access,
    config: &QueueConfig,
    memory: Part,
) -> Result<(DevxQueue, QueueHandle, Option<OfReceives>), QueueError> {
    check(nic, config)?;
    let layout = Layout::new(config);
    let log = |depth: u32| u8::try_from(depth.trailing_zeros()).unwrap_or(u8::MAX);
    layout.clear(&memory)?;
    layout.clear_receives(&memory)?;
    // SAFETY: the queue owns the memory longer than the registration.
    let umem = unsafe { nic.register_umem(memory.address(), memory.bytes(), memory.dma_buf()) }?;
    let uar = UarOwner::new(nic)?;
    let (register, uar_page) = uar.register(config.doorbell)?;
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
    let completions = CompletionQueueSpec {
        log_entries: log(config.depth),
        is_collapsed: true,
        umem_id: umem.id(),
        offset: layout.cq,
        dbrec_umem_id: umem.id(),
        dbrec_offset: layout.cq_dbrec,
        uar_page,
        eqn,
    };
    let command = prm::create_completion_queue(&completions);
    let (cq, cqn) = create_object(nic, "CREATE_CQ", &command)?;
    let recv_cq = match config.num_receives {
        0 => None,
        _ => {
            let command = prm::create_completion_queue(&CompletionQueueSpec {
                log_entries: log(layout.rq_depth),
                is_collapsed: false,
                offset: layout.recv_cq,
                dbrec_offset: layout.recv_cq_dbrec,
                ..completions
            });
            Some(create_object(nic, "CREATE_CQ", &command)?)
        }
    };
    let command = prm::create_queue_pair(&QueuePairSpec {
        pdn: nic.pdn(),
        log_sq_blocks: log(config.depth),
        cqn,
        receives: recv_cq
            .as_ref()
            .map(|(_, cqn)| ReceiveSpec { log_depth: log(layout.rq_depth), cqn: *cqn }),
        umem_id: umem.id(),
        offset: 0,
        dbrec_umem_id: umem.id(),
        dbrec_offset: layout.dbrec,
        has_send_record: config.doorbell == Doorbell::WithRecord,
        uar_page,
        user_index: 0,
    });
    let (qp, qpn) = create_object(nic, "CREATE_QP", &command)?;
    let base = memory.address();
    let handle = QueueHandle {
        sq: base + layout.sq,
        dbrec: base + layout.dbrec,
        doorbell: mapped.address,
        cq: base + layout.cq,
        cq_dbrec: base + layout.cq_dbrec,
        qpn,
        sq_depth: config.depth,
        // Posters see one entry, wherever the firmware counts to.
        cq_depth: 1,
        flags: match config.doorbell {
            Doorbell::WithRecord => CQ_COLLAPSED,
            Doorbell::RegisterAlone => CQ_COLLAPSED | NO_RECORD,
        },
        ..QueueHandle::default()
    };
    let of_receives = recv_cq.as_ref().map(|_| {
        let of_receives = ReceiveHandle {
            dbrec: handle.dbrec,
            cq: base + layout.recv_cq,
            cq_dbrec: base + layout.recv_cq_dbrec,
            qpn,
            cq_depth: layout.rq_depth,
            num_receives: config.num_receives,
            ..ReceiveHandle::default()
        };
        (of_receives, layout.pieces(&memory))
    });
    let recv_cq = recv_cq.map(|(object, _)| object);
    let made = DevxQueue {
        _mapped: mapped,
        qp,
        _cq: cq,
        _recv_cq: recv_cq,
        _uar: uar,
        _umem: umem,
        memory,
        layout,
    };
    Ok((made, handle, of_receives))
}

/// Offsets in the memory of a queue. Blocks follow the receives immediately. Completions of requests and of
/// receives begin at a page each, and records on a line of their own.
#[derive(Debug, Clone, Copy)]
struct Layout {
    /// Receives that there is room for, 0 for none; as many completions.
    rq_depth: u32,
    sq: u64,
    cq: u64,
    recv_cq: u64,
    dbrec: u64,
    cq_dbrec: u64,
    recv_cq_dbrec: u64,
    bytes: u64,
}

impl Layout {
    fn new(config: &QueueConfig) -> Self {
        let rq_depth = match config.num_receives {
            0 => 0,
            // A whole block, so that the send queue begins at one.
            num => num.next_power_of_two().max(BLOCK_BYTES / RECEIVE_BYTES),
        };
        let page = |end: u64| end.next_multiple_of(PAGE_BYTES as u64);
        let sq = u64::from(rq_depth) * u64::from(RECEIVE_BYTES);
        let blocks_bytes = u64::from(config.depth) * u64::from(BLOCK_BYTES);
        let cq = page(sq + blocks_bytes);
        // The firmware counts as many completions as blocks, although it writes one alone.
        let recv_cq = page(cq + blocks_bytes);
        let dbrec = recv_cq + u64::from(rq_depth) * u64::from(CQE_BYTES);
        let (cq_dbrec, recv_cq_dbrec) = (dbrec + 64, dbrec + 128);
        Self { rq_depth, sq, cq, recv_cq, dbrec, cq_dbrec, recv_cq_dbrec, bytes: dbrec + 192 }
    }

    /// No valid completion of requests, and records of 0 for the queue pair and for them.
    fn clear(&self, memory: &dyn SharedMemory) -> Result<(), AccessError> {
        memory.write(at(self.cq), &vec![CQE_FILL; at(self.recv_cq - self.cq)])?;
        memory.write(at(self.dbrec), &vec![0; at(self.recv_cq_dbrec - self.dbrec)])
    }

    /// The same for receives, once: their completion queue is not reset with the queue pair.
    fn clear_receives(&self, memory: &dyn SharedMemory) -> Result<(), AccessError> {
        memory.write(at(self.recv_cq), &vec![CQE_FILL; at(self.dbrec - self.recv_cq)])?;
        memory.write(at(self.recv_cq_dbrec), &vec![0; at(self.bytes - self.recv_cq_dbrec)])
    }

    fn pieces(&self, memory: &Part) -> Pieces {
        let piece = |offset| Piece::Shared(memory.clone(), at(offset));
        Pieces {
            rq: piece(0),
            rq_depth: self.rq_depth,
            rq_stride: RECEIVE_BYTES as usize,
            dbrec: piece(self.dbrec),
            cq: piece(self.recv_cq),
            cq_dbrec: piece(self.recv_cq_dbrec),
        }
    }
}

fn at(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
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
        receives: Option<&ReceiveQueue>,
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
        receives.map_or(Ok(()), ReceiveQueue::post)?;
        self.modify(nic, "INIT2RTR_QP", &prm::to_ready_to_receive(qpn, &path, &retry))?;
        self.modify(nic, "RTR2RTS_QP", &prm::to_ready_to_send(qpn, &retry, own_psn))
    }

    /// Resets the queue pair. The next completion overwrites the only entry for requests, so no count needs to be
    /// continued.
    pub(super) fn reset(&mut self, nic: &Nic, qpn: u32) -> Result<(), QueueError> {
        self.modify(nic, "2RST_QP", &prm::to_reset(qpn))?;
        Ok(self.layout.clear(&self.memory)?)
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
