//! A queue pair that posters drive by themselves: made, connected, and described for them.
//!
//! **Plain**: libibverbs makes the queue pair and keeps it in host memory; completions are an ordinary ring. Works
//! wherever verbs do. **DevX**: commands to the firmware make the queue pair in memory of our choice, for instance
//! the GPU's. Its completion queue is collapsed, which is cheaper to poll.
//!
//! A queue with receives takes writes with immediate data; their completions are an ordinary ring of their
//! own on either path.

mod check;
mod devx;
mod names;
mod plain;
mod receive;

use std::mem::offset_of;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kernels::mlx5::{ONE_BLOCK, QueueHandle, QueueState, ReceiveHandle, ReceiveState};
use thiserror::Error;

pub use self::check::{check_peer, check_queue, check_receives};
use self::devx::DevxQueue;
pub use self::names::ParseQueueError;
use self::plain::PlainQueue;
pub(crate) use self::receive::wait_for;
pub use self::receive::{Immediate, ReceiveError};
use self::receive::{Piece, ReceiveQueue};
use crate::access::{Access, AccessError, PAGE_BYTES, Part, Pieces, Plan, PlanSpan, SharedMemory};
use crate::nic::{MAX_READS, Nic, NicError, Registration, Rights};

/// Maker of the queue pair, and place of its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueuePath {
    /// libibverbs, in host memory.
    Plain,
    /// Commands to the firmware, in memory of the [`Access`].
    Devx,
}

/// Posters that use a queue at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Posters {
    /// Threads of whichever blocks of a kernel. Fused kernels give a queue to many blocks.
    AnyBlocks,
    /// Threads of one block, which makes posting cheaper.
    OneBlock,
}

/// Method of announcing requests to the NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doorbell {
    /// By the register, and by a record in memory if it lost that. Every NIC has it.
    WithRecord,
    /// By a register that loses nothing, so that a doorbell costs one fence of the system in place of two. NICs
    /// that say `send_dbr_mode_no_dbr_ext`, on [`QueuePath::Devx`].
    RegisterAlone,
}

/// Size and limits of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueConfig {
    /// How it is made.
    pub path: QueuePath,
    /// Basic blocks, a power of two from 128 to 32768.
    pub depth: u32,
    /// The doorbell rings at the latest when this number of blocks waits; more than a quarter of `depth` counts as
    /// that.
    pub batch: u32,
    /// Posters at the same time.
    pub posters: Posters,
    /// Method of announcing requests to the NIC.
    pub doorbell: Doorbell,
    /// Most bytes of one request, at most 1 GiB.
    pub max_message_bytes: u32,
    /// Local acknowledgement timeout, 4.096 µs × 2^n, from 1 to 31; 14 is 67 ms.
    pub ack_timeout: u8,
    /// Retries of an unacknowledged packet, at most 7.
    pub retries: u8,
    /// Receives that are kept posted for the peer's writes with immediate data, at most 32768. A write that
    /// finds none is tried again 6 times, 0.64 ms apart, and then fails with syndrome 16. With 0 there is no
    /// receive queue, and none ever finds one.
    pub num_receives: u32,
}

impl Default for QueueConfig {
    fn default() -> Self {
        Self {
            path: QueuePath::Plain,
            depth: 1024,
            batch: 128,
            posters: Posters::AnyBlocks,
            doorbell: Doorbell::WithRecord,
            max_message_bytes: 1 << 30,
            // A dead peer is noticed after about half a second by the NIC alone; liveness on the
            // bootstrap connection is faster.
            ack_timeout: 14,
            retries: 7,
            num_receives: 0,
        }
    }
}

impl QueueConfig {
    /// Checks whether a NIC can make such queues, as far as possible before any is made: the values, and the
    /// device's report.
    ///
    /// # Errors
    /// [`QueueError::Config`], [`QueueError::Nic`].
    pub fn check(&self, nic: &Nic) -> Result<(), QueueError> {
        check_config(self)?;
        nic.check_requests()?;
        match self.path {
            QueuePath::Plain => Ok(()),
            QueuePath::Devx => Ok(devx::check(nic, self)?),
        }
    }
}

/// A queue could not be made or connected.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names of the fields say enough")]
pub enum QueueError {
    /// A value that no queue can have.
    #[error("`{field}` is {found}, expected {expected}")]
    Config {
        /// Name of the setting.
        field: &'static str,
        found: u32,
        expected: &'static str,
    },
    /// The NIC refused.
    #[error(transparent)]
    Nic(#[from] NicError),
    /// Posters cannot reach a piece of the queue.
    #[error("queue: {0}")]
    Access(#[from] AccessError),
    /// A queue was made that posters cannot use.
    #[error("{device}: queue pair {qpn:#x} cannot be given to posters: {what}")]
    Handle {
        device: String,
        qpn: u32,
        /// Description of the error.
        what: &'static str,
    },
    /// libmlx5 made a queue that our posters do not understand.
    #[error("{device}: libmlx5 made a queue with {what} {found}, expected {expected}")]
    Layout {
        device: String,
        /// Name of the property.
        what: &'static str,
        found: u64,
        expected: &'static str,
    },
}

/// The other end of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteQueue {
    /// Its queue pair.
    pub qpn: u32,
    /// Number of the first packet that it sends, 24 bits.
    pub psn: u32,
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
    receives: Option<ReceiveQueue>,
    made: QueueKind,
    handle: QueueHandle,
    nic: Arc<Nic>,
    config: QueueConfig,
    _scratch: Registration,
    /// Scratch, the count of taken receives, and the counts of posters; if those lie elsewhere, the word that
    /// reports an error to the host.
    state: Part,
    counts: Option<Part>,
}

/// Layout of a queue in a peer's memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QueuePlace {
    state: PlanSpan,
    /// In the memory of [`Access::counts`].
    counts: Option<PlanSpan>,
    /// On [`QueuePath::Devx`].
    ring: Option<PlanSpan>,
}

impl QueuePlace {
    /// # Errors
    /// [`QueueError::Config`] and [`QueueError::Access`].
    pub(crate) fn plan(plan: &mut Plan, config: &QueueConfig) -> Result<Self, QueueError> {
        check_config(config)?;
        let ring = match config.path {
            QueuePath::Plain => None,
            QueuePath::Devx => Some(devx::plan_ring(plan, config)?),
        };
        Ok(Self { ring, state: plan.add(STATE_BYTES, PAGE_BYTES)?, counts: None })
    }

    /// The same with the counts of posters in `plan`.
    ///
    /// # Errors
    /// [`QueueError::Access`].
    pub(crate) fn with_counts(self, plan: &mut Plan) -> Result<Self, QueueError> {
        Ok(Self { counts: Some(plan.add(size_of::<QueueState>(), COUNTS_ALIGN)?), ..self })
    }
}

impl Queue {
    /// Makes a queue at `place` of the memory of queues and of that of counts, not yet connected. `peer` appears
    /// in error words.
    ///
    /// # Errors
    /// [`QueueError`].
    pub(crate) fn create(
        nic: &Arc<Nic>,
        access: &dyn Access,
        config: &QueueConfig,
        peer: u32,
        (memory, of_counts, place): (&Pieces, &Pieces, QueuePlace),
    ) -> Result<Self, QueueError> {
        nic.check_requests()?;
        let state = memory.part(place.state);
        // SAFETY: the queue owns the memory longer than the registration.
        let scratch = unsafe { register(nic, &state, Rights::Own)? };
        let (made, mut handle, pieces) = match place.ring {
            None => {
                let (made, handle, pieces) = plain::create(nic, access, config)?;
                (QueueKind::Plain(made), handle, pieces)
            }
            Some(ring) => {
                let (made, handle, pieces) = devx::create(nic, access, config, memory.part(ring))?;
                (QueueKind::Devx(made), handle, pieces)
            }
        };
        let counts = place.counts.map(|counts| of_counts.part(counts));
        handle.state = counts.as_ref().unwrap_or(&state).address();
        handle.host_error = if counts.is_some() { state.address() } else { 0 };
        handle.scratch = state.address() + SCRATCH_OFFSET;
        handle.scratch_lkey = scratch.local_key();
        handle.batch = config.batch.min(handle.sq_depth / 4);
        if config.posters == Posters::OneBlock {
            handle.flags |= ONE_BLOCK;
        }
        handle.max_message_bytes = config.max_message_bytes;
        handle.peer = peer;
        let refuse =
            |what| QueueError::Handle { device: nic.name().to_owned(), qpn: handle.qpn, what };
        if let Some(what) = check_queue(&handle) {
            return Err(refuse(what));
        }
        let receives = pieces.map(|(mut of_receives, pieces)| {
            of_receives.state = state.address() + RECEIVE_STATE_OFFSET as u64;
            of_receives.peer = peer;
            let state = Piece::Shared(state.clone(), RECEIVE_STATE_OFFSET);
            match check_receives(&of_receives) {
                Some(what) => Err(refuse(what)),
                None => Ok(ReceiveQueue::new(of_receives, pieces, state)),
            }
        });
        let (receives, nic, config) = (receives.transpose()?, Arc::clone(nic), *config);
        Ok(Self { receives, made, handle, nic, config, _scratch: scratch, state, counts })
    }

    /// Number of the queue pair.
    #[must_use]
    pub const fn qpn(&self) -> u32 {
        self.handle.qpn
    }

    /// Handle for posters, valid as long as the queue.
    #[must_use]
    pub const fn handle(&self) -> QueueHandle {
        self.handle
    }

    /// Handle for kernels that take immediate data, valid as long as the queue. `None` without receives.
    #[must_use]
    pub fn receives(&self) -> Option<ReceiveHandle> {
        self.receives.as_ref().map(ReceiveQueue::handle)
    }

    /// Waits for immediate data for at most `timeout`, which may be 0, and posts its receive again. Everything
    /// that the peer wrote before is then visible here. Kernels may take from the same receives at other times.
    ///
    /// # Errors
    /// [`ReceiveError`]. After an error, no more data can be taken until the queue was reset. Exception: after
    /// [`ReceiveError::Unreachable`], another user that reaches the memory may take it.
    pub fn receive(&self, timeout: Duration) -> Result<Option<Immediate>, ReceiveError> {
        let qpn = self.handle.qpn;
        self.receives.as_ref().ok_or(ReceiveError::NoReceives { qpn })?.take(timeout)
    }

    /// Connects with the other end, which may be connected later: nothing is sent yet. The first packet
    /// from here has the number `own_psn`, of 24 bits. Receives are posted before the queue pair is ready to
    /// receive.
    ///
    /// # Errors
    /// [`QueueError`].
    pub fn connect(&mut self, remote: &RemoteQueue, own_psn: u32) -> Result<(), QueueError> {
        let (nic, config, qpn) = (&self.nic, &self.config, self.handle.qpn);
        let receives = self.receives.as_ref();
        match &mut self.made {
            QueueKind::Plain(made) => made.connect(nic, config, receives, remote, own_psn),
            QueueKind::Devx(made) => made.connect(nic, config, receives, qpn, remote, own_psn),
        }
    }

    /// Resets the queue pair from any state, with everything that belongs to it: indices, doorbell records,
    /// completions, and the counts and error of posters. Discards immediate data that was not taken.
    /// [`connect`](Self::connect) puts it into service again, with all its receives.
    ///
    /// No thread or kernel may post on the queue or take from it meanwhile, and the other end must be reset, too.
    ///
    /// # Errors
    /// [`QueueError`]; the queue can then only be dropped.
    pub fn reset(&mut self) -> Result<(), QueueError> {
        let counts = self.counts.as_ref().unwrap_or(&self.state);
        let mut word = [0; 8];
        counts.read(offset_of!(QueueState, cq_index), &mut word)?;
        let cq_index = match &mut self.made {
            QueueKind::Plain(made) => made.reset(&self.nic, u64::from_le_bytes(word))?,
            QueueKind::Devx(made) => {
                made.reset(&self.nic, self.handle.qpn)?;
                0
            }
        };
        counts.write(0, &[0; size_of::<QueueState>()])?;
        counts.write(offset_of!(QueueState, cq_index), &cq_index.to_le_bytes())?;
        if self.counts.is_some() {
            self.state.write(0, &[0; size_of::<u64>()])?;
        }
        self.receives.as_ref().map_or(Ok(()), ReceiveQueue::reset)
    }

    /// The error word that posters left, 0 while the queue is in service: see `SY_MLX5_ERROR_*` of
    /// `queue.h`.
    ///
    /// # Errors
    /// [`QueueError::Access`] when the word cannot be read.
    pub fn error(&self) -> Result<u64, QueueError> {
        // Posters leave the word in `host_error`, too, where their counts lie elsewhere.
        let offset = if self.counts.is_some() { 0 } else { offset_of!(QueueState, error) };
        if let Some(host) = self.state.host() {
            // Posters are at work, so this is one load, without a copy that would wait for a GPU. SAFETY: `state`
            // maps at least a `QueueState` for as long as `self`, at a page, so that the word is aligned and
            // within. While posters are at work, every access is atomic: this one, and those of the posters. Other
            // writers have `&mut self`, and no poster runs then.
            let word = unsafe { AtomicU64::from_ptr(host.as_ptr().add(offset).cast()) };
            return Ok(word.load(Ordering::Acquire));
        }
        let mut word = [0; 8];
        self.state.read(offset, &mut word)?;
        Ok(u64::from_le_bytes(word))
    }
}

/// Registers shared memory by the method that suits it.
///
/// # Safety
/// The memory outlives the result.
pub(crate) unsafe fn register(
    nic: &Arc<Nic>,
    memory: &dyn SharedMemory,
    rights: Rights,
) -> Result<Registration, NicError> {
    if memory.is_on_gpu() {
        // SAFETY: the caller keeps the memory, which knows its own descriptor.
        return unsafe {
            nic.register_gpu(memory.address(), memory.bytes() as u64, memory.dma_buf(), rights)
        };
    }
    let start = usize::try_from(memory.address()).unwrap_or(0);
    let start =
        NonNull::new(ptr::with_exposed_provenance_mut::<u8>(start)).unwrap_or(NonNull::dangling());
    // SAFETY: the caller keeps the memory.
    unsafe { nic.register_host(start, memory.bytes(), rights) }
}

#[derive(Debug)]
enum QueueKind {
    Plain(PlainQueue),
    Devx(DevxQueue),
}

fn check_config(config: &QueueConfig) -> Result<(), QueueError> {
    let wrong = |field, found, expected| Err(QueueError::Config { field, found, expected });
    if !(MIN_DEPTH..=MAX_DEPTH).contains(&config.depth) || !config.depth.is_power_of_two() {
        return wrong("depth", config.depth, "a power of two from 128 to 32768");
    }
    if config.batch == 0 {
        return wrong("batch", config.batch, "at least 1");
    }
    if config.max_message_bytes == 0 || config.max_message_bytes > MAX_MESSAGE_BYTES {
        return wrong("max_message_bytes", config.max_message_bytes, "from 1 byte to 1 GiB");
    }
    // 0 would mean no limit: a dead peer would never be noticed.
    if config.ack_timeout == 0 || config.ack_timeout > 31 {
        return wrong("ack_timeout", u32::from(config.ack_timeout), "from 1 to 31");
    }
    if config.doorbell == Doorbell::RegisterAlone && config.path == QueuePath::Plain {
        return wrong(
            "send_dbr_mode",
            1,
            "0: libibverbs makes no queue pair without a doorbell record, only DevX does",
        );
    }
    if config.num_receives > MAX_RECEIVES {
        return wrong("num_receives", config.num_receives, "from 0 to 32768");
    }
    if config.retries > 7 {
        return wrong("retries", u32::from(config.retries), "from 0 to 7");
    }
    Ok(())
}

/// `SY_MLX5_MIN_DEPTH`
pub(crate) const MIN_DEPTH: u32 = 128;
/// `SY_MLX5_MAX_DEPTH`: a doorbell counts 16 bits, so a full turn must stay visible.
pub(crate) const MAX_DEPTH: u32 = 32768;
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
/// Largest payload of a request of one basic block.
const INLINE_BYTES: u32 = 28;
/// Outstanding reads and atomics, as a logarithm.
const LOG_MAX_READS: u8 = 4;
const _: () = assert!(1 << LOG_MAX_READS == MAX_READS);
/// 0.64 ms
const MIN_RNR_NAK: u8 = 12;
/// The longest time that ends: a write with immediate data that finds no receive fails with syndrome 16 after some
/// 4 ms; 7 would mean no limit.
const RNR_RETRIES: u8 = 6;
/// The words of a [`QueueState`] stand on lines of their own.
const COUNTS_ALIGN: usize = 128;
/// State and scratch of a queue.
const STATE_BYTES: usize = 4096;
/// Scratch for the old values of adds, which are never read.
const SCRATCH_OFFSET: u64 = 1024;
const _: () = assert!(size_of::<QueueState>() <= 1024);
/// Count of taken receives.
const RECEIVE_STATE_OFFSET: usize = 2048;
const _: () = assert!(RECEIVE_STATE_OFFSET + size_of::<ReceiveState>() <= STATE_BYTES);
/// `SY_MLX5_MAX_RECEIVES`
pub(crate) const MAX_RECEIVES: u32 = 32768;
/// `SY_MLX5_RECEIVE_BYTES`
const RECEIVE_BYTES: u32 = 16;
/// `SY_MLX5_CQE_INVALID`
const CQE_INVALID: u8 = 0xf;
