//! Paths to a peer with pending work that never finishes.

use std::mem::{offset_of, size_of};

use kernels::abi::{
    Batch, ClientPeer, ClientState, CombineParams, DTYPE_BF16, ErrorWord, FLAG_ANY_PATH,
    FrameGeometry, Handle, Link, PATH_IBGDA, PATH_PROXY, REASON_TIMEOUT, ServerPeer, ServerState,
    TAG_COMBINE_PATH,
};
use kernels::mlx5::{Bound, CQ_COLLAPSED, PeerHandle, QueueHandle, QueueState};
use kernels::proxy::PROXY_VERSION;
use rand::rngs::StdRng;

use crate::fresh;
use crate::layer::check_sums;
use crate::runner::Runner;
use crate::world::{Input, Memory, World};

/// `SY_TAG_RECV_FRAME` and `SY_TAG_RECV_PATH` of the kernels' header.
const TAG_RECV_FRAME: u32 = 1;
const TAG_RECV_PATH: u32 = 11;
const NUM_EXPERTS: u32 = 8;
/// The client or server with such a path.
const BUSY: usize = 1;

pub fn a_path_that_is_not_quiet_is_told_from_a_frame_that_did_not_come(runner: &Runner) {
    let mut rng = fresh();
    for (frame_is_there, path) in
        [(true, PATH_IBGDA), (false, PATH_IBGDA), (true, PATH_PROXY), (false, PATH_PROXY)]
    {
        let geometry = FrameGeometry::new(128, 2, DTYPE_BF16, 5, 2).expect("in range");
        let world = World::new(runner, &mut rng, geometry, NUM_EXPERTS, 3, 1);
        let (link, _kept) = stuck_link(runner, path, geometry.response_slot_bytes);
        lead_back(&world, link);
        for client in [0, 2].into_iter().chain(frame_is_there.then_some(BUSY)) {
            send(runner, &mut rng, &world, client);
        }
        let mut params = world.recv_params(0, 3);
        params.flags |= FLAG_ANY_PATH;
        // SAFETY: the world's memory is as large as its geometry says, and queues are only read.
        assert_eq!(unsafe { runner.launch(&params) }, 0);
        let batch: Batch = world.servers[0].list_memory.one(0);
        assert_eq!(batch.clients, 0b101, "nobody else is held up");
        // All three paths are expected to be quiet; or the first frame of the client, where none came.
        let (tag, observed, expected) =
            if frame_is_there { (TAG_RECV_PATH, 0b101, 0b111) } else { (TAG_RECV_FRAME, 0, 1) };
        let state: ServerState = world.servers[0].state.one(0);
        let (peer, reason) = (BUSY as u32, REASON_TIMEOUT);
        assert_eq!(state.error, ErrorWord { tag, peer, reason, reserved: 0, observed, expected });
    }
}

/// All rows of a server have come, but the puts to it are not over. The call is whole, and no later one waits for
/// that server.
pub fn a_server_that_stands_still_behind_its_answer_is_given_up_at_the_deadline(runner: &Runner) {
    let mut rng = fresh();
    for path in [PATH_IBGDA, PATH_PROXY] {
        let geometry = FrameGeometry::new(128, 2, DTYPE_BF16, 5, 2).expect("in range");
        let world = World::new(runner, &mut rng, geometry, NUM_EXPERTS, 1, 2);
        world.poison();
        let input = Input::random(&mut rng, &geometry, NUM_EXPERTS, world.capacity);
        world.load(0, &input);
        let mut dispatch = world.dispatch_params(0, 1);
        dispatch.flags = kernels::abi::FLAG_CONTACT_ALL;
        // SAFETY: the world's memory is as large as its geometry says.
        assert_eq!(unsafe { runner.launch(&dispatch) }, 0);
        for server in 0..2 {
            // SAFETY: as above.
            assert_eq!(unsafe { runner.launch(&world.echo_params(server)) }, 0);
        }
        let client = &world.clients[0];
        let handle: Handle = client.handle.one(0);
        // Rows over such a path have flags.
        let number = handle.frame_number[BUSY];
        let place = number % u64::from(geometry.num_frames);
        let flags = vec![number; handle.num_rows[BUSY].max(1) as usize];
        client.responses[BUSY].write(place * geometry.response_frame_bytes, &flags);
        let (link, _kept) = stuck_link(runner, path, geometry.slot_bytes);
        let at = (BUSY * size_of::<ServerPeer>()) as u64;
        let direct: ServerPeer = client.table.one(at);
        client.table.write(at, &[ServerPeer { request: link, ..direct }]);
        let params = CombineParams { flags: FLAG_ANY_PATH, ..world.combine_params(0) };
        // SAFETY: as above, and queues and lanes are only read.
        assert_eq!(unsafe { runner.launch(&params) }, 0);

        let state: ClientState = client.state.one(0);
        let expected = ErrorWord {
            tag: TAG_COMBINE_PATH,
            peer: BUSY as u32,
            reason: REASON_TIMEOUT,
            reserved: 0,
            observed: 0,
            expected: number,
        };
        assert_eq!(state.error, expected, "path {path}");
        let lost: Vec<usize> = (0..state.lost.len()).filter(|&at| state.lost[at] != 0).collect();
        assert_eq!(lost, [BUSY], "given up for later frames");
        let handle: Handle = client.handle.one(0);
        assert_eq!((handle.missing, handle.refused), (1 << BUSY, 0));
        let lacks: Vec<u32> = client.token_missing.read(0, input.num_tokens.into());
        assert!(lacks.iter().all(|&servers| servers == 0), "no token lacks a part: {lacks:?}");
        check_sums(&world, 0, &input);
    }
}

/// A path that never finishes, over which `slot_bytes` may be put. The objects returned beside it must outlive all
/// kernels.
fn stuck_link(runner: &Runner, path: u32, slot_bytes: u64) -> (Link, Vec<Memory>) {
    let mirror = Memory::filled(runner, slot_bytes, 0);
    let (context, mut kept) = if path == PATH_IBGDA {
        requests_under_way(runner, &mirror, slot_bytes)
    } else {
        commands_under_way(runner, &mirror, slot_bytes)
    };
    let link = Link { window: mirror.address(), context: context.address().0, path, reserved: 0 };
    kept.extend([mirror, context]);
    (link, kept)
}

/// A peer behind a NIC that completes nothing.
fn requests_under_way(runner: &Runner, mirror: &Memory, slot_bytes: u64) -> (Memory, Vec<Memory>) {
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
    let queues = Memory::of(runner, &words_of(&queue));
    let handle = PeerHandle {
        qps: queues.address().0,
        mirror: mirror.address().0,
        remote: 0,
        slot_bytes,
        lkey: 0,
        rkey: 0,
        num_qps: 1,
        reserved: 0,
        bound: Bound {
            error: std::ptr::null_mut(),
            abort_mask: std::ptr::null(),
            timeout_ns: 10_000_000_000, // would show
        },
    };
    (Memory::of(runner, &words_of(&handle)), vec![state, cq, queues])
}

/// A peer behind two lanes of a proxy whose thread takes nothing: the first lane has room for a quiet. The other
/// one has none, and no caller waits for it.
fn commands_under_way(runner: &Runner, mirror: &Memory, slot_bytes: u64) -> (Memory, Vec<Memory>) {
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
    // `sy_proxy_peer`: no error word and no mask, a bound that would show, two lanes, the version.
    let (timeout_ns, num_lanes, version) = (10_000_000_000, 2, u64::from(PROXY_VERSION) << 32);
    let (lanes_at, mirror_at) = (lanes.address().0, mirror.address().0);
    let peer = [lanes_at, mirror_at, slot_bytes, 0, 0, timeout_ns, num_lanes, version];
    kept.push(lanes);
    (Memory::of(runner, &peer), kept)
}

/// Restores the busy client's path.
fn lead_back(world: &World, link: Link) {
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
