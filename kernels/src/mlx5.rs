//! The structures of `include/switchyard/comm/mlx5/queue.h` and `receive_queue.h`, field by field: send
//! queues and receives as kernels see them.

use std::mem::offset_of;

pub use crate::abi::ErrorWord;

/// `SY_MLX5_CQ_COLLAPSED`
pub const CQ_COLLAPSED: u32 = 1;
/// `SY_MLX5_ONE_BLOCK`: concurrent posters are of one thread block.
pub const ONE_BLOCK: u32 = 2;
/// `SY_MLX5_NO_RECORD`: the NIC goes by the doorbell register alone.
pub const NO_RECORD: u32 = 4;

/// `sy_mlx5_qp`: a send queue as its posters see it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct QueueHandle {
    /// Address of the first basic block.
    pub sq: u64,
    /// Address of the queue pair's doorbell record.
    pub dbrec: u64,
    /// Address of the doorbell register.
    pub doorbell: u64,
    /// Address of the first completion.
    pub cq: u64,
    /// Address of the completion queue's doorbell record.
    pub cq_dbrec: u64,
    /// Address of a [`QueueState`].
    pub state: u64,
    /// Address of 8 bytes where the old values of adds land unread.
    pub scratch: u64,
    /// 0, or address of a word of host memory that gets [`QueueState::error`], too.
    pub host_error: u64,
    /// Local key of `scratch`.
    pub scratch_lkey: u32,
    /// Queue pair.
    pub qpn: u32,
    /// Basic blocks.
    pub sq_depth: u32,
    /// Completions; 1 if collapsed.
    pub cq_depth: u32,
    /// [`CQ_COLLAPSED`], [`ONE_BLOCK`] and [`NO_RECORD`].
    pub flags: u32,
    /// Blocks that may wait for their doorbell.
    pub batch: u32,
    /// Most bytes of one request.
    pub max_message_bytes: u32,
    /// For error words.
    pub peer: u32,
}

/// `sy_mlx5_queue_state`: the counts that posters share.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct QueueState {
    /// Blocks given to a poster.
    pub reserved: u64,
    pad0: [u8; 120],
    /// Blocks written.
    pub published: u64,
    /// Blocks announced to the NIC.
    pub posted: u64,
    pad1: [u8; 112],
    /// Blocks known to be complete.
    pub completed: u64,
    pad2: [u8; 120],
    /// Completions consumed.
    pub cq_index: u64,
    /// Held by the one who consumes.
    pub poll_lock: u32,
    pad3: [u8; 116],
    /// The error that took the queue out of service.
    pub error: u64,
    /// Time of the last poll of completions by a thread that waits for something else.
    pub polled_at: u64,
    pad4: [u8; 112],
}

/// `sy_mlx5_rq`: the receives of a queue pair as readers of immediate data see them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ReceiveHandle {
    /// Address of the queue pair's doorbell record.
    pub dbrec: u64,
    /// Address of the first completion of receives.
    pub cq: u64,
    /// Address of that completion queue's doorbell record.
    pub cq_dbrec: u64,
    /// Address of a [`ReceiveState`].
    pub state: u64,
    /// Queue pair.
    pub qpn: u32,
    /// Completions.
    pub cq_depth: u32,
    /// Posted at any time.
    pub num_receives: u32,
    /// For error words.
    pub peer: u32,
}

/// `sy_mlx5_rq_state`: the shared state of readers.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ReceiveState {
    /// Completions consumed since the completion queue was made.
    pub cq_index: u64,
    /// Receives used and taken since the queue pair was reset.
    pub taken: u64,
    /// Held by the one who takes.
    pub lock: u32,
    reserved: u32,
    /// The error that took the receives out of service.
    pub error: u64,
    pad: [u8; 96],
}

/// `sy_mlx5_bound`
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Bound {
    /// Null, or where the first expired wait is recorded.
    pub error: *mut ErrorWord,
    /// Null, or bit `peer` ends every wait.
    pub abort_mask: *const u32,
    /// Bound of a single wait.
    pub timeout_ns: u64,
}

/// `sy_ibgda_peer`: a peer's slot and the queues to it.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct PeerHandle {
    /// Address of the queues, `num_qps` of [`QueueHandle`].
    pub qps: u64,
    /// Address of the local copy of the slot, where kernels store data before they put it.
    pub mirror: u64,
    /// Address of the slot at the peer.
    pub remote: u64,
    /// Bytes of the slot.
    pub slot_bytes: u64,
    /// Local key of the mirror.
    pub lkey: u32,
    /// Remote key of the slot.
    pub rkey: u32,
    /// Queues.
    pub num_qps: u32,
    /// 0.
    pub reserved: u32,
    /// Of every wait on the queues.
    pub bound: Bound,
}

const _: () = assert!(size_of::<PeerHandle>() == 72 && offset_of!(PeerHandle, bound) == 48);
const _: () = assert!(size_of::<QueueHandle>() == 96 && offset_of!(QueueHandle, qpn) == 68);
const _: () =
    assert!(offset_of!(QueueHandle, scratch) == 48 && offset_of!(QueueHandle, peer) == 92);
const _: () = assert!(size_of::<QueueState>() == 640 && offset_of!(QueueState, published) == 128);
const _: () =
    assert!(offset_of!(QueueState, completed) == 256 && offset_of!(QueueState, error) == 512);
const _: () = assert!(offset_of!(QueueHandle, host_error) == 56);
const _: () =
    assert!(offset_of!(QueueState, cq_index) == 384 && offset_of!(QueueState, polled_at) == 520);
const _: () = assert!(size_of::<Bound>() == 24);
const _: () = assert!(size_of::<ReceiveHandle>() == 48 && offset_of!(ReceiveHandle, qpn) == 32);
const _: () = assert!(size_of::<ReceiveState>() == 128 && offset_of!(ReceiveState, taken) == 8);
const _: () =
    assert!(offset_of!(ReceiveState, lock) == 16 && offset_of!(ReceiveState, error) == 24);
