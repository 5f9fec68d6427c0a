//! Structures that a host passes to the GPU data path. `include/switchyard/device_abi.h` is the same in C; both
//! sides assert sizes, and a test compiles the header and compares every field.

use std::mem::{offset_of, size_of};

use bytemuck::{Pod, Zeroable};

/// `version` of every parameter struct.
pub const DEVICE_ABI_VERSION: u32 = 6;
/// `"SYDF"` as a little-endian word: the magic of a device frame's header.
pub const DEVICE_FRAME_MAGIC: u32 = u32::from_le_bytes(*b"SYDF");
/// Most peers of one client or server: one bit per peer in a 32-bit mask.
pub const MAX_PEERS: usize = 32;
/// Most frames of a slot.
pub const MAX_FRAMES: u32 = 8;
/// Most experts of a layer.
pub const MAX_EXPERTS: usize = 1024;
/// Most experts of a token.
pub const MAX_TOP_K: u32 = 16;
/// Most replicas of an expert.
pub const MAX_REPLICAS: usize = 7;
/// Most tokens of a frame.
pub const MAX_FRAME_TOKENS: u32 = 1 << 20;
/// Largest hidden size.
pub const MAX_HIDDEN: u32 = 1 << 20;
/// Values that share an fp8 scale; hidden sizes are multiples of it.
pub const SCALE_BLOCK: u32 = 128;
/// Expert of an unused entry.
pub const NO_EXPERT: u32 = u32::MAX;
/// Unused route.
pub const NO_ROUTE: u32 = u32::MAX;
/// Word of an answer's row that has not come, where rows are stored by the server itself.
pub const ANSWER_HOLE: u32 = u32::MAX;
/// A route is `peer << ROUTE_SHIFT | row`.
pub const ROUTE_SHIFT: u32 = 24;
/// Threads of the expert stage's first kernel.
pub const COMPUTE_THREADS: u32 = 256;
/// Threads of the other two, which multiply.
pub const PRODUCT_THREADS: u32 = 384;
/// Dynamic shared memory of those, bytes.
pub const PRODUCT_SHARED_BYTES: u32 = 231_680;
/// `SY_TILE_ARRIVALS`: words of [`ExpertComputeParams::tile_arrivals`].
pub const TILE_ARRIVALS: u32 = 256;
/// Bits of an entry's rank among those of its expert in a batch.
pub const RANK_BITS: u32 = 22;
/// Blocks of `expert_recv`: one cluster.
pub const RECV_BLOCKS: u32 = 8;
/// Threads of each of them.
pub const RECV_THREADS: u32 = 1024;

/// Element type of requests: bfloat16.
pub const DTYPE_BF16: u32 = 3;
/// Element type of requests: fp8-e4m3 with a scale per [`SCALE_BLOCK`] values.
pub const DTYPE_F8_E4M3: u32 = 4;

/// [`Link::path`]: the peer's slot is mapped here.
pub const PATH_DIRECT: u32 = 1;
/// `SY_PATH_IBGDA`: kernels post work requests; `context` is the address of a
/// [`PeerHandle`](crate::mlx5::PeerHandle).
pub const PATH_IBGDA: u32 = 2;
/// `SY_PATH_PROXY`: kernels post commands to a thread of the host; `context` is the address of a
/// `sy_proxy_peer`.
pub const PATH_PROXY: u32 = 3;

/// `flags`: the kernel may start while the one before it in the stream ends.
pub const FLAG_PDL: u32 = 1;
/// `flags`, with [`FLAG_PDL`]: dependent kernels may start immediately.
pub const FLAG_EARLY: u32 = 2;
/// [`DispatchParams::flags`]: send empty frames, too. Servers in lockstep need them.
pub const FLAG_CONTACT_ALL: u32 = 4;
/// `flags`, with [`FLAG_PDL`], of combine, echo and expert_recv: work beside the kernel before it in the
/// stream. See `SY_LAUNCH_FLAG_AHEAD` for when that is right.
pub const FLAG_AHEAD: u32 = 32;
/// `SY_LAUNCH_FLAG_ANY_PATH`: some link of the table is not direct.
pub const FLAG_ANY_PATH: u32 = 8;
/// [`ExpertRecvParams::flags`], with [`FLAG_PDL`]: the next kernel may start when a batch is chosen.
pub const FLAG_CHOSEN: u32 = 64;

/// Bytes of a slot's control tail.
pub const CONTROL_BYTES: u64 = 4096;
/// Offset of the first of a slot's words, one per frame, in its control tail. A server refuses a frame by its
/// word: `number << 16 | SY_ERROR_*`.
pub const WORD_STATUS_OFFSET: u64 = 3072;
/// Distance between words of the control tail, bytes.
pub const WORD_STRIDE: u64 = 128;
/// [`CombineParams::flags`]: a token's sum begins with the value in `out`.
pub const FLAG_ADD: u32 = 16;
/// [`ErrorWord::tag`] without an error.
pub const TAG_NONE: u32 = 0;
/// [`ErrorWord::tag`]: a server's answer to a token.
pub const TAG_COMBINE_ROW: u32 = 2;
/// [`ErrorWord::tag`]: a server's answer to a frame without tokens.
pub const TAG_COMBINE_EMPTY: u32 = 3;
/// [`ErrorWord::tag`]: an expert without a live replica.
pub const TAG_NO_REPLICA: u32 = 4;
/// [`ErrorWord::tag`]: an index that is no expert.
pub const TAG_BAD_EXPERT: u32 = 5;
/// [`ErrorWord::tag`]: more tokens than the launch has room for.
pub const TAG_NUM_TOKENS: u32 = 6;
/// [`ErrorWord::tag`]: a server refused a frame.
pub const TAG_REFUSED: u32 = 9;
/// `SY_TAG_COMBINE_PATH`
pub const TAG_COMBINE_PATH: u32 = 12;
/// [`ErrorWord::tag`]: a product's own copies and products.
pub const TAG_PRODUCT: u32 = 13;
/// [`ErrorWord::reason`]: the bound expired.
pub const REASON_TIMEOUT: u32 = 1;
/// [`ErrorWord::reason`]: the host ended the wait, or the path to the peer failed.
pub const REASON_ABORT: u32 = 2;

/// An address in memory that the GPU reaches: 0 stands for null.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Pod, Zeroable)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// Null.
    pub const NULL: Self = Self(0);

    /// Whether this is null.
    #[must_use]
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }

    /// The address `bytes` further on.
    #[must_use]
    pub const fn add(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }
}

/// First error of a peer's kernels. The host clears it by setting `tag` to [`TAG_NONE`].
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct ErrorWord {
    /// The wait, or the check, that failed: `SY_TAG_*` of the header.
    pub tag: u32,
    /// Index of the peer.
    pub peer: u32,
    /// `SY_REASON_*` of the header.
    pub reason: u32,
    /// Zero.
    pub reserved: u32,
    /// Value found.
    pub observed: u64,
    /// Value expected.
    pub expected: u64,
}

/// Layout of the sections of frames. Made by [`FrameGeometry::new`], never by hand.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct FrameGeometry {
    /// Values per row.
    pub hidden: u32,
    /// Experts per token.
    pub top_k: u32,
    /// Element type of requests, [`DTYPE_BF16`] or [`DTYPE_F8_E4M3`]; answers are bf16.
    pub dtype: u32,
    /// Frames of a slot, a power of two.
    pub num_frames: u32,
    /// Rows of a frame.
    pub max_tokens: u32,
    /// Distance between rows of a request, bytes.
    pub row_stride_bytes: u32,
    /// fp8 scales per row, 0 with bf16.
    pub scales_per_row: u32,
    /// Distance between rows of an answer, bytes.
    pub response_stride_bytes: u32,
    /// Offset in a frame of `[max_tokens]` u64 frame numbers.
    pub flags_offset: u64,
    /// Offset in a frame of `[max_tokens][top_k]` entries.
    pub entries_offset: u64,
    /// Offset in a frame of `[max_tokens][scales_per_row]` f32.
    pub scales_offset: u64,
    /// Offset in a frame of `[max_tokens]` rows.
    pub payload_offset: u64,
    /// Bytes of a frame.
    pub frame_bytes: u64,
    /// Bytes of a request slot: frames and control tail.
    pub slot_bytes: u64,
    /// Offset of the control tail.
    pub control_offset: u64,
    /// Offset in an answer of `[max_tokens]` u64 frame numbers. Direct links use the first one, for empty frames.
    pub response_flags_offset: u64,
    /// Offset in an answer of its rows, of a direct link [`ANSWER_HOLE`] between frames.
    pub response_payload_offset: u64,
    /// Bytes of an answer.
    pub response_frame_bytes: u64,
    /// Bytes of a response slot: answers and control tail.
    pub response_slot_bytes: u64,
    /// Offset of the response slot's control tail.
    pub response_control_offset: u64,
}

/// A path to a peer's slot.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Link {
    /// Address that kernels store to.
    pub window: DevicePtr,
    /// Address of the path's state; 0 for direct stores.
    pub context: u64,
    /// [`PATH_DIRECT`], [`PATH_IBGDA`] or [`PATH_PROXY`].
    pub path: u32,
    /// Zero.
    pub reserved: u32,
}

/// Servers that have an expert, by index.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct ReplicaSet {
    /// How many of `server` are used.
    pub num_replicas: u8,
    /// Server indices.
    pub server: [u8; MAX_REPLICAS],
}

/// Placement table in device memory; the host replaces it between launches.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Placement {
    /// Version of the placement.
    pub epoch: u64,
    /// How many of `experts` are used.
    pub num_experts: u32,
    /// Zero.
    pub reserved: u32,
    /// Replicas of each expert.
    pub experts: [ReplicaSet; MAX_EXPERTS],
}

/// A server as its client's kernels see it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct ServerPeer {
    /// Path to this client's request slot at the server.
    pub request: Link,
    /// This server's response slot in the client's memory.
    pub response: DevicePtr,
    /// Incarnation of the channel.
    pub generation: u32,
    /// Zero.
    pub reserved: u32,
}

/// A client as its server's kernels see it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct ClientPeer {
    /// This client's request slot in the server's memory.
    pub request: DevicePtr,
    /// Path to this server's response slot at the client.
    pub response: Link,
    /// Required value in the client's headers.
    pub client_id: u64,
    /// Required value in the client's headers.
    pub generation: u32,
    /// Zero.
    pub reserved: u32,
}

/// Device memory of a client, zeroed once. Only kernels write it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct ClientState {
    /// Dispatches so far.
    pub sequence: u64,
    /// Blocks that have read `sequence`.
    pub arrivals: u32,
    /// Zero.
    pub reserved: u32,
    /// Frames sent to each server, by parity of the sequence.
    pub posted: [[u64; MAX_PEERS]; 2],
    /// Warps that wait long for a row that each server stores by itself.
    pub awaited: [u32; MAX_PEERS],
    /// Not 0 for a server that was given up without a refusal: the sequence of the dispatch. Data in its slot, and
    /// data that comes late, is not taken for answers to later dispatches until the host sets another slot, and
    /// zeros here, in `posted` and in `summed`.
    pub lost: [u64; MAX_PEERS],
    /// Last frame that combine took, by server and place of the ring.
    pub summed: [[u64; MAX_FRAMES as usize]; MAX_PEERS],
    /// Cached abort mask of combines.
    pub mask_cache: MaskCache,
    /// First error.
    pub error: ErrorWord,
}

/// Shared cache of a mask in the host's memory. One of the waiting warps refreshes it from time to time.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct MaskCache {
    /// Time of the last refresh, by the GPU's clock in steps of 2048 ns.
    pub read_at: u32,
    /// Zero.
    pub reserved: u32,
    /// Sequence of the dispatch in the upper half, the mask in the lower.
    pub mask: u64,
}

/// Head of a handle: the message from a dispatch to its combine. `[max_tokens][top_k]` u32 routes follow.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Handle {
    /// Number of the dispatch, from 1.
    pub sequence: u64,
    /// Tokens of the dispatch.
    pub num_tokens: u32,
    /// Servers that got a frame, as a mask.
    pub contacted: u32,
    /// Servers that did not answer in time, as a mask; written by combine.
    pub missing: u32,
    /// Servers that refused the frame, as a mask; written by combine.
    pub refused: u32,
    /// Number of the frame to each server.
    pub frame_number: [u64; MAX_PEERS],
    /// Rows of the frame to each server.
    pub num_rows: [u32; MAX_PEERS],
}

/// Device memory of a server, zeroed once. Only kernels write it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct ServerState {
    /// Blocks that have read the state.
    pub arrivals: u32,
    /// Clients in the last batch, as a mask; none after a wait in which no client came.
    pub last_clients: u32,
    /// Frames taken from each client.
    pub taken: [u64; MAX_PEERS],
    /// Frames refused so far.
    pub num_refused: u64,
    /// Batches made so far.
    pub num_batches: u64,
    /// Start of the search for a layer.
    pub next_client: u32,
    /// Zero.
    pub reserved2: u32,
    /// First error.
    pub error: ErrorWord,
    /// Status words of refused frames, by client and place in its ring; the host clears them with `taken`.
    pub refusals: [[u64; MAX_FRAMES as usize]; MAX_PEERS],
}

/// Head of a batch: the message from `expert_recv` to the expert stage and `expert_send`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batch {
    /// Rows of all clients.
    pub num_rows: u32,
    /// Entries of all rows.
    pub num_entries: u32,
    /// Layer of the batch.
    pub layer: u32,
    /// Clients in the batch, as a mask.
    pub clients: u32,
    /// Number of each client's frame.
    pub frame_number: [u64; MAX_PEERS],
    /// Rows of client `c` are `row_begin[c]..row_begin[c + 1]`.
    pub row_begin: [u32; MAX_PEERS + 1],
    /// Clients that were waited for, as a mask, see [`Gather`].
    pub expected: u32,
    /// From the first sight of each client's frame to the choice of the batch.
    pub waited_ns: [u32; MAX_PEERS],
    /// End of the reception, by the GPU's global timer.
    pub received_ns: u64,
}

/// [`Gather::within_ns`] of a batch that takes what is there and does not wait at all.
pub const GATHER_NONE: u32 = u32::MAX;

/// Clients that a batch waits for: those of `clients` that were in the last batch, because a client that was just
/// answered may soon return.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Gather {
    /// Clients, as a mask.
    pub clients: u32,
    /// Bound of the wait from the kernel's begin on, if any client has a frame then.
    pub within_ns: u32,
}

// SAFETY: numbers only, for which all-zero bytes are a value.
unsafe impl Zeroable for Batch {}
// SAFETY: numbers only, without padding: 16 + 32 * 8 + 33 * 4 + 4 + 32 * 4 bytes, as asserted below.
unsafe impl Pod for Batch {}

/// Words of a call's record in [`DispatchParams::trace`].
pub const CALL_STAMPS: usize = 8;

/// Times of a call's kernels. A begin is the first block's, an end the last one's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say all")]
pub enum CallStamp {
    /// Before the wait for the kernel before.
    DispatchStart = 0,
    /// Behind that wait.
    DispatchBegin = 1,
    DispatchEnd = 2,
    CombineBegin = 3,
    CombineEnd = 4,
}

/// Words of [`ExpertLists::stamps`].
pub const BATCH_STAMPS: usize = 16;

/// Room for [`ExpertLists::stamps`], in bytes from the head of the batch.
pub const STAMPS_OFFSET: u64 = 576;

/// Times of a batch's kernels. A begin is the first block's, an end the last one's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say all")]
pub enum BatchStamp {
    RecvStart = 0,
    /// The headers of the batch are there.
    RecvSeen = 1,
    RecvChosen = 2,
    /// The lists are made.
    RecvListed = 3,
    RecvEnd = 4,
    GatherStart = 5,
    GatherEnd = 6,
    UpStart = 7,
    /// Behind the wait for the kernel before.
    UpBegin = 8,
    UpEnd = 9,
    DownStart = 10,
    DownBegin = 11,
    DownEnd = 12,
    SendStart = 13,
    SendBegin = 14,
    SendEnd = 15,
}

/// Parameters of `dispatch`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct DispatchParams {
    /// [`DEVICE_ABI_VERSION`].
    pub version: u32,
    /// `FLAG_*`.
    pub flags: u32,
    /// Geometry of the servers' slots.
    pub geometry: FrameGeometry,
    /// bf16 `[capacity, hidden]`.
    pub hidden_states: DevicePtr,
    /// i32 `[capacity, top_k]`, -1 = masked.
    pub topk_idx: DevicePtr,
    /// f32 `[capacity, top_k]`.
    pub topk_weights: DevicePtr,
    /// One u32, at most `capacity`.
    pub num_tokens: DevicePtr,
    /// [`Placement`].
    pub placement: DevicePtr,
    /// [`ClientState`].
    pub state: DevicePtr,
    /// [`Handle`] with routes, [`FrameGeometry::handle_bytes`].
    pub handle: DevicePtr,
    /// Null, or u64 `[trace_len][CALL_STAMPS]`: times by sequence and [`CallStamp`], ns of the GPU's timer.
    pub trace: DevicePtr,
    /// Goes into headers.
    pub client_id: u64,
    /// Records of `trace`.
    pub trace_len: u32,
    /// Most tokens of this launch.
    pub capacity: u32,
    /// Goes into headers.
    pub layer: u32,
    /// Experts of the layer.
    pub num_experts: u32,
    /// Elements of `servers`.
    pub num_servers: u32,
    /// Thread blocks, 0 = chosen by size.
    pub num_blocks: u32,
    /// [`ServerPeer`] `[num_servers]`.
    pub servers: DevicePtr,
}

/// Parameters of `combine`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct CombineParams {
    /// [`DEVICE_ABI_VERSION`].
    pub version: u32,
    /// `FLAG_*`.
    pub flags: u32,
    /// Geometry of the servers' slots.
    pub geometry: FrameGeometry,
    /// Output of dispatch.
    pub handle: DevicePtr,
    /// [`ClientState`].
    pub state: DevicePtr,
    /// bf16 `[capacity, hidden]`.
    pub out: DevicePtr,
    /// Null, or u32 `[capacity]`: servers whose part is missing, as a mask; all servers of a token that is left as
    /// zeros.
    pub token_missing: DevicePtr,
    /// Null, or u32 in mapped host memory: bit `s` = server `s` is dead.
    pub abort_mask: DevicePtr,
    /// Bound of every wait, of silence.
    pub timeout_ns: u64,
    /// Most tokens of this launch.
    pub capacity: u32,
    /// Elements of `servers`.
    pub num_servers: u32,
    /// Thread blocks, 0 = chosen by size.
    pub num_blocks: u32,
    /// Records of `trace`.
    pub trace_len: u32,
    /// [`ServerPeer`] `[num_servers]`.
    pub servers: DevicePtr,
    /// As [`DispatchParams::trace`].
    pub trace: DevicePtr,
}

/// Output of `expert_recv` for a batch. Made by [`FrameGeometry::lists_at`].
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct ExpertLists {
    /// [`Batch`].
    pub batch: DevicePtr,
    /// u32 `[num_local_experts + 1]`: positions in the expert-major lists.
    pub expert_begin: DevicePtr,
    /// u32 `[max_rows * top_k]`: row of the batch.
    pub list_row: DevicePtr,
    /// f32 `[max_rows * top_k]`.
    pub list_weight: DevicePtr,
    /// u32 `[max_rows]`: `client << ROUTE_SHIFT | row` of its frame.
    pub row_source: DevicePtr,
    /// u32 `[max_rows][top_k]`, aligned to 16 bytes: position in the lists, [`NO_EXPERT`] where unused.
    pub row_position: DevicePtr,
    /// Rows that fit.
    pub max_rows: u32,
    /// Rows for the choice of thread blocks, 0 for `max_rows`.
    pub usual_rows: u32,
    /// Null, or u64 `[BATCH_STAMPS]`: times of the batch's kernels by [`BatchStamp`], ns of the GPU's timer.
    pub stamps: DevicePtr,
}

/// Parameters of `expert_recv`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct ExpertRecvParams {
    /// [`DEVICE_ABI_VERSION`].
    pub version: u32,
    /// `FLAG_*`.
    pub flags: u32,
    /// Geometry of the clients' slots.
    pub geometry: FrameGeometry,
    /// [`ServerState`].
    pub state: DevicePtr,
    /// Output for the batch.
    pub lists: ExpertLists,
    /// i16 `[num_layers][num_experts]`: index among this server's experts of the layer, -1 = not here.
    pub local_expert: DevicePtr,
    /// Null, or u32 in mapped host memory: bit `c` = client `c` is dead.
    pub abort_mask: DevicePtr,
    /// Null, or u64: frames of older epochs are refused.
    pub min_epoch: DevicePtr,
    /// Bound of the wait.
    pub timeout_ns: u64,
    /// Ends the wait when this number of clients have a frame.
    pub min_ready: u32,
    /// Experts of the layer.
    pub num_experts: u32,
    /// Experts of this server.
    pub num_local_experts: u32,
    /// Layers of the model.
    pub num_layers: u32,
    /// Elements of `clients`.
    pub num_clients: u32,
    /// Once a client has a frame, how long to wait for `min_ready`; 0 = as for the first, and clients that
    /// do not come are errors.
    pub gather_ns: u32,
    /// Null, or [`Gather`] in memory that the host writes between two runs, aligned to 16 bytes.
    pub gather: DevicePtr,
    /// [`ClientPeer`] `[num_clients]`.
    pub clients: DevicePtr,
}

/// Matrices of a layer's experts on this server. Rows are contiguous. Made by
/// [`Gpu::layer_weights`](crate::gpu::Gpu::layer_weights), which fills the maps.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct LayerWeights {
    /// `[num_local_experts, 2, inter, hidden]`: gate, then up.
    pub gate_up: DevicePtr,
    /// `[num_local_experts, hidden, inter]`.
    pub down: DevicePtr,
    /// fp8: f32 `[num_local_experts, 2, ceil(inter / 128), hidden / 128]`.
    pub gate_up_scale: DevicePtr,
    /// fp8: f32 `[num_local_experts, hidden / 128, ceil(inter / 128)]`.
    pub down_scale: DevicePtr,
    /// [`DTYPE_BF16`] or [`DTYPE_F8_E4M3`].
    pub dtype: u32,
    /// Zero.
    pub reserved: [u32; 7],
    /// How the copy engine reads `gate_up`: the driver's format.
    pub gate_up_map: [u64; 16],
    /// How it reads `down`.
    pub down_map: [u64; 16],
}

/// Parameters of `expert_compute`: `down(silu(gate(x)) * up(x))` of every entry of a batch.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct ExpertComputeParams {
    /// [`DEVICE_ABI_VERSION`].
    pub version: u32,
    /// `FLAG_*`.
    pub flags: u32,
    /// Geometry of the clients' slots.
    pub geometry: FrameGeometry,
    /// Output of `expert_recv`.
    pub lists: ExpertLists,
    /// Scratch of [`FrameGeometry::expert_scratch_bytes`] for rows of `hidden` values.
    pub rows: DevicePtr,
    /// Scratch of [`FrameGeometry::expert_scratch_bytes`] for rows of `inter` values.
    pub activation: DevicePtr,
    /// bf16 `[lists.max_rows * top_k, hidden]`, in list order.
    pub expert_out: DevicePtr,
    /// [`LayerWeights`] `[num_layers]`, aligned to 64.
    pub layers: DevicePtr,
    /// Intermediate size, a multiple of 64.
    pub inter: u32,
    /// Experts of this server.
    pub num_local_experts: u32,
    /// Elements of `layers`.
    pub num_layers: u32,
    /// Elements of `clients`.
    pub num_clients: u32,
    /// Thread blocks of each kernel, 0 = as many as fit.
    pub num_blocks: u32,
    /// [`DTYPE_BF16`] or [`DTYPE_F8_E4M3`]: of every layer.
    pub weights_dtype: u32,
    /// Bound of a thread block's waits for its own copies and products, in nanoseconds. It expires only if the GPU
    /// or its parameters are broken: the kernel then traps, so that nothing behind it in the stream runs.
    pub timeout_ns: u64,
    /// Null, or [`ErrorWord`] in mapped host memory, which outlives a context that is lost: why a kernel trapped.
    pub trapped: DevicePtr,
    /// [`ClientPeer`] `[num_clients]`.
    pub clients: DevicePtr,
    /// Null, or [`TILE_ARRIVALS`] words, zeroed once. With weights of fp8, the first product of few tokens divides its
    /// tiles only with it.
    pub tile_arrivals: DevicePtr,
}

/// Parameters of `expert_send`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct ExpertSendParams {
    /// [`DEVICE_ABI_VERSION`].
    pub version: u32,
    /// `FLAG_*`.
    pub flags: u32,
    /// Geometry of the clients' slots.
    pub geometry: FrameGeometry,
    /// Output of `expert_recv`.
    pub lists: ExpertLists,
    /// bf16 `[num_entries, hidden]` in list order; null = identity experts.
    pub expert_out: DevicePtr,
    /// Most rows of this launch.
    pub max_rows: u32,
    /// Elements of `clients`.
    pub num_clients: u32,
    /// Thread blocks, 0 = chosen by size.
    pub num_blocks: u32,
    /// Zero.
    pub reserved: u32,
    /// [`ClientPeer`] `[num_clients]`.
    pub clients: DevicePtr,
}

/// Parameters of `echo`: a server of identity experts in one kernel.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct EchoParams {
    /// [`DEVICE_ABI_VERSION`].
    pub version: u32,
    /// `FLAG_*`.
    pub flags: u32,
    /// Geometry of the clients' slots.
    pub geometry: FrameGeometry,
    /// [`ServerState`].
    pub state: DevicePtr,
    /// Null, or u32 in mapped host memory: bit `c` = client `c` is dead.
    pub abort_mask: DevicePtr,
    /// Bound of the wait.
    pub timeout_ns: u64,
    /// Most tokens of a client.
    pub capacity: u32,
    /// Elements of `clients`.
    pub num_clients: u32,
    /// Thread blocks, 0 = chosen by size.
    pub num_blocks: u32,
    /// Zero.
    pub reserved: u32,
    /// [`ClientPeer`] `[num_clients]`.
    pub clients: DevicePtr,
}

const _: () = assert!(size_of::<ErrorWord>() == 32 && offset_of!(ErrorWord, observed) == 16);
const _: () = assert!(size_of::<FrameGeometry>() == 128);
const _: () = assert!(offset_of!(FrameGeometry, response_control_offset) == 120);
const _: () = assert!(size_of::<Link>() == 24 && offset_of!(Link, path) == 16);
const _: () = assert!(size_of::<ReplicaSet>() == 8);
const _: () = assert!(size_of::<Placement>() == 8208 && offset_of!(Placement, experts) == 16);
const _: () = assert!(size_of::<ServerPeer>() == 40 && offset_of!(ServerPeer, response) == 24);
const _: () = assert!(size_of::<ClientPeer>() == 48 && offset_of!(ClientPeer, client_id) == 32);
const _: () = assert!(size_of::<ClientState>() == 3008 && offset_of!(ClientState, error) == 2976);
const _: () = assert!(size_of::<Handle>() == 408 && offset_of!(Handle, frame_number) == 24);
const _: () = assert!(size_of::<ServerState>() == 2368 && offset_of!(ServerState, error) == 288);
const _: () = assert!(size_of::<Batch>() == 544 && offset_of!(Batch, row_begin) == 272);
const _: () = assert!(size_of::<Batch>() as u64 <= STAMPS_OFFSET);
const _: () = assert!(size_of::<Gather>() == 8);
const _: () = assert!(size_of::<DispatchParams>() == 240);
const _: () = assert!(offset_of!(DispatchParams, servers) == 232);
const _: () = assert!(size_of::<CombineParams>() == 216);
const _: () = assert!(offset_of!(CombineParams, servers) == 200);
const _: () = assert!(size_of::<ExpertLists>() == 64 && offset_of!(ExpertLists, max_rows) == 48);
const _: () = assert!(size_of::<ExpertRecvParams>() == 280);
const _: () = assert!(offset_of!(ExpertRecvParams, clients) == 272);
const _: () = assert!(size_of::<ExpertSendParams>() == 232);
const _: () = assert!(offset_of!(ExpertSendParams, clients) == 224);
const _: () = assert!(size_of::<EchoParams>() == 184);
const _: () = assert!(offset_of!(EchoParams, clients) == 176);
const _: () = assert!(size_of::<LayerWeights>() == 320);
const _: () = assert!(size_of::<ExpertComputeParams>() == 288);
const _: () = assert!(offset_of!(ExpertComputeParams, clients) == 272);
