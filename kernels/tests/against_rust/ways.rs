//! Servers whose way back to a client still carries answers.

use std::mem::{offset_of, size_of};

use kernels::abi::{
    Batch, ClientPeer, DTYPE_BF16, ErrorWord, FLAG_ANY_WAY, FrameGeometry, Link, REASON_TIMEOUT,
    ServerState, WAY_IBGDA, WAY_PROXY,
};
use kernels::mlx5::{Bound, CQ_COLLAPSED, PeerHandle, QueueHandle, QueueState};
use rand::rngs::StdRng;

use crate::fresh;
use crate::runner::Runner;
use crate::world::{Input, Memory, World};

/// `SY_TAG_RECV_FRAME` and `SY_TAG_RECV_WAY` of the kernels' header.
const TAG_RECV_FRAME: u32 = 1;
const TAG_RECV_WAY: u32 = 11;
const NUM_EXPERTS: u32 = 8;
/// The client with such a way.
const BUSY: usize = 1;

pub fn a_way_that_is_not_quiet_is_told_from_a_frame_that_did_not_come(runner: &Runner) {
    let mut rng = fresh();
    for (frame_is_there, way) in
        [(true, WAY_IBGDA), (false, WAY_IBGDA), (true, WAY_PROXY), (false, WAY_PROXY)]
    {
        let geometry = FrameGeometry::new(128, 2, DTYPE_BF16, 5, 2).expect("in range");
        let world = World::new(runner, &mut rng, geometry, NUM_EXPERTS, 3, 1);
        let _way = if way == WAY_IBGDA {
            leave_requests_under_way(runner, &world)
        } else {
            leave_commands_under_way(runner, &world)
        };
        for client in [0, 2].into_iter().chain(frame_is_there.then_some(BUSY)) {
            send(runner, &mut rng, &world, client);
        }
        let mut params = world.recv_params(0, 3);
        params.flags |= FLAG_ANY_WAY;
        // SAFETY: the world's memory is as large as its geometry says, and queues are only looked at.
        assert_eq!(unsafe { runner.launch(&params) }, 0);
        let batch: Batch = world.servers[0].list_memory.one(0);
        assert_eq!(batch.clients, 0b101, "nobody else is held up");
        // All three ways are expected to be quiet; or the first frame of the client, where none came.
        let (tag, observed, expected) =
            if frame_is_there { (TAG_RECV_WAY, 0b101, 0b111) } else { (TAG_RECV_FRAME, 0, 1) };
        let state: ServerState = world.servers[0].state.one(0);
        let (peer, reason) = (BUSY as u32, REASON_TIMEOUT);
        assert_eq!(state.error, ErrorWord { tag, peer, reason, reserved: 0, observed, expected });
    }
}

/// Gives the busy client a way back whose NIC completes nothing. What is returned must outlive all kernels.
fn leave_requests_under_way(runner: &Runner, world: &World) -> Vec<Memory> {
    let state = Memory::filled(runner, size_of::<QueueState>() as u64, 0);
    for count in [
        offset_of!(QueueState, reserved),
        offset_of!(QueueState, published),
        offset_of!(QueueState, posted),
    ] {
        state.write(count as u64, &[3u64]);
    }
    // No valid completion.
    let cq = Memory::filled(runner, 64, 0xff);
    let queue = QueueHandle {
        cq: cq.address().0,
        state: state.address().0,
        sq_depth: 128,
        cq_depth: 1,
        flags: CQ_COLLAPSED,
        ..QueueHandle::default()
    };
    let mirror = Memory::filled(runner, world.geometry.response_slot_bytes, 0);
    let queues = Memory::of(runner, &words_of(&queue));
    let handle = PeerHandle {
        qps: queues.address().0,
        mirror: mirror.address().0,
        remote: 0,
        slot_bytes: world.geometry.response_slot_bytes,
        lkey: 0,
        rkey: 0,
        num_qps: 1,
        reserved: 0,
        bound: Bound {
            error: std::ptr::null_mut(),
            abort_mask: std::ptr::null(),
            timeout_ns: 10_000_000,
        },
    };
    let context = Memory::of(runner, &words_of(&handle));
    lead_back(world, WAY_IBGDA, &mirror, &context);
    vec![state, cq, mirror, queues, context]
}

/// The same by two lanes of a proxy whose thread takes nothing: the first has room for a quiet, the other one has
/// none, and nobody waits for it.
fn leave_commands_under_way(runner: &Runner, world: &World) -> Vec<Memory> {
    const DEPTH_SHIFT: u64 = 4;
    const BUDGET: u64 = 4;
    let zeros = |num_words: u64| Memory::filled(runner, num_words * 8, 0);
    let (mut lanes, mut kept) = (Vec::new(), Vec::new());
    for num_posted in [BUDGET - 1, BUDGET] {
        let (commands, words, state) = (zeros(2 << DEPTH_SHIFT), zeros(16), zeros(48));
        state.write(0, &[num_posted]);
        let addresses = [&commands, &words, &state].map(|memory| memory.address().0);
        lanes.extend(addresses.into_iter().chain([BUDGET << 32 | DEPTH_SHIFT]));
        kept.extend([commands, words, state]);
    }
    let lanes = Memory::of(runner, &lanes);
    let slot_bytes = world.geometry.response_slot_bytes;
    let mirror = Memory::filled(runner, slot_bytes, 0);
    // `sy_proxy_peer`: no error word and no mask, a bound that would show, two lanes, version 2.
    let (timeout_ns, num_lanes, version) = (10_000_000_000, 2, 2 << 32);
    let (lanes_at, mirror_at) = (lanes.address().0, mirror.address().0);
    let peer = [lanes_at, mirror_at, slot_bytes, 0, 0, timeout_ns, num_lanes, version];
    let context = Memory::of(runner, &peer);
    lead_back(world, WAY_PROXY, &mirror, &context);
    kept.extend([lanes, mirror, context]);
    kept
}

/// Sets the busy client's way back.
fn lead_back(world: &World, way: u32, mirror: &Memory, context: &Memory) {
    let link = Link { window: mirror.address(), context: context.address().0, way, reserved: 0 };
    let table = &world.servers[0].table;
    let at = (BUSY * size_of::<ClientPeer>()) as u64;
    let peer: ClientPeer = table.one(at);
    table.write(at, &[ClientPeer { response: link, ..peer }]);
}

/// A structure of the header as the words that it is made of.
fn words_of<T>(value: &T) -> Vec<u64> {
    let words = std::ptr::from_ref(value).cast::<u64>();
    // SAFETY: structures of words and halves of words, without padding.
    (0..size_of::<T>() / 8).map(|at| unsafe { words.add(at).read_unaligned() }).collect()
}

/// Dispatches a row at least to the one server.
fn send(runner: &Runner, rng: &mut StdRng, world: &World, client: usize) {
    let input = Input::random(rng, &world.geometry, NUM_EXPERTS, world.capacity);
    world.load(client, &input);
    // SAFETY: as above.
    assert_eq!(unsafe { runner.launch(&world.dispatch_params(client, 1)) }, 0);
}
