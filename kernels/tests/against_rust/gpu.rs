//! Tests that need a GPU, also one in software: graphs, real experts, and that pointers are checked before
//! anything is launched.

use std::time::{Duration, Instant};

use bytemuck::Zeroable;
use kernels::abi::{
    ClientState, CombineParams, DEVICE_ABI_VERSION, DTYPE_BF16, DTYPE_F8_E4M3, DevicePtr,
    ErrorWord, ExpertComputeParams, FrameGeometry, Handle, LayerWeights, Link, PATH_DIRECT,
    REASON_TIMEOUT, TAG_COMBINE_ROW, TILE_ARRIVALS,
};
use kernels::gpu::{
    Checksum, ChecksumRange, Gpu, GpuError, LayerMatrices, LayerShape, MAX_CHECKSUM_RANGES, Piece,
};
use kernels::p2p::{FLAG_BULK, P2pParams, StreamParams};
use rand::RngExt;
use rand::rngs::StdRng;

use crate::fresh;
use crate::runner::Runner;
use crate::world::{Input, Memory, POISON, World};

pub fn a_layer_replays_from_a_graph(runner: &Runner) {
    let Runner::Gpu(gpu) = runner else { return };
    let mut rng = fresh();
    let geometry = FrameGeometry::new(7168, 8, DTYPE_F8_E4M3, 64, 2).expect("in range");
    let world = World::new(runner, &mut rng, geometry, 64, 1, 1);
    let input = Input::random(&mut rng, &geometry, 64, 64);
    world.load(0, &input);
    let stream = gpu.stream().expect("stream");
    // SAFETY: the world's memory is as large as its geometry says and outlives the stream's work.
    let (dispatch, recv, send, combine) = unsafe {
        (
            gpu.prepare(world.dispatch_params(0, 3)).expect("dispatch"),
            gpu.prepare(world.recv_params(0, 1)).expect("recv"),
            gpu.prepare(world.send_params(0, DevicePtr::NULL)).expect("send"),
            gpu.prepare(world.combine_params(0)).expect("combine"),
        )
    };
    let graph = stream
        .capture(|stream| {
            stream.launch(&dispatch)?;
            stream.launch(&recv)?;
            stream.launch(&send)?;
            stream.launch(&combine)
        })
        .expect("capture");
    for replay in 1..=20u64 {
        stream.replay(&graph).expect("replay");
        stream.wait(Instant::now() + Duration::from_secs(20)).expect("layer");
        let handle: Handle = world.clients[0].handle.one(0);
        assert_eq!((handle.sequence, handle.missing, handle.refused), (replay, 0, 0));
        crate::layer::check_output(&world, 0, &input);
    }
}

/// A server that signals progress repeatedly, and never answers. In software it is believed fewer times.
#[cfg(feature = "emulated")]
pub fn a_server_that_only_moves_its_progress_word_is_given_up(runner: &Runner) {
    /// `SY_WORD_PROGRESS` of the kernels' header, and `kMaxMoves` of `comm/wait.cuh`.
    const WORD_PROGRESS: u64 = 256;
    const MAX_MOVES: u64 = 1 << 9;
    let Runner::Gpu(gpu) = runner else { return };
    let geometry = FrameGeometry::new(256, 4, DTYPE_BF16, 8, 2).expect("in range");
    let mut rng = fresh();
    let world = World::new(runner, &mut rng, geometry, 16, 1, 1);
    world.poison();
    world.load(0, &Input::random(&mut rng, &geometry, 16, 1));
    // Longer than any pause between two signs.
    let params = CombineParams { timeout_ns: 2_000_000_000, ..world.combine_params(0) };
    let (stream, beats) = (gpu.stream().expect("stream"), gpu.stream().expect("stream"));
    // SAFETY: the world's memory is as large as its geometry says and outlives the streams' work.
    unsafe {
        assert_eq!(runner.launch(&world.dispatch_params(0, 0)), 0);
        stream.launch(&gpu.prepare(params).expect("combine")).expect("combine");
    }
    let client = &world.clients[0];
    let word = client.responses[0].address().add(geometry.response_control_offset + WORD_PROGRESS);
    let limit = Instant::now() + Duration::from_secs(60);
    let mut num_beats = 0u64;
    while !stream.is_done().expect("combine") && Instant::now() < limit {
        num_beats += 1;
        // SAFETY: as above; a word of the slot's control tail.
        unsafe { beats.fill(word, num_beats as u8, 8).expect("a sign of work") };
        beats.wait(limit).expect("a sign of work");
    }
    let has_ended = stream.is_done().expect("combine");
    stream.wait(Instant::now() + Duration::from_secs(20)).expect("combine");
    assert!(has_ended, "waited for as long as the server said that it was at work");
    assert!(num_beats >= MAX_MOVES, "{num_beats} signs of work were not believed");
    let state: ClientState = client.state.one(0);
    assert_eq!((state.error.tag, state.error.reason), (TAG_COMBINE_ROW, REASON_TIMEOUT));
    assert_eq!(client.handle.one::<Handle>(0).missing, 1);
}

/// Ranges of all lengths that a launch can have, empty ones included, at addresses that are aligned to words only.
pub fn checksums_are_those_that_the_host_computes(runner: &Runner) {
    let Runner::Gpu(gpu) = runner else { return };
    let mut rng = fresh();
    let limit = Instant::now() + Duration::from_secs(60);
    let stream = gpu.stream().expect("stream");
    let sum = gpu.alloc(size_of::<Checksum>() as u64).expect("memory");
    for most_words in [1usize, 40, 3000, 1 << 20] {
        let num_ranges = rng.random_range(1..=MAX_CHECKSUM_RANGES);
        let memory: Vec<Vec<u8>> = (0..num_ranges)
            .map(|_| {
                (0..(rng.random_range(0..=most_words) + 1) * 4).map(|_| rng.random()).collect()
            })
            .collect();
        let buffers: Vec<_> = memory
            .iter()
            .map(|bytes| {
                let buffer = gpu.alloc(bytes.len() as u64).expect("memory");
                gpu.write(&buffer, 0, bytes, limit).expect("written");
                buffer
            })
            .collect();
        let ranges: Vec<_> = buffers
            .iter()
            .zip(&memory)
            .map(|(buffer, bytes)| ChecksumRange::new(buffer.ptr().add(4), bytes.len() as u64 - 4))
            .collect();
        gpu.write(&sum, 0, &[POISON; size_of::<Checksum>()], limit).expect("written");
        // SAFETY: live memory of these lengths, and nothing else uses it.
        unsafe { stream.checksum(&ranges, sum.ptr()) }.expect("launched");
        stream.wait(limit).expect("done");
        let mut found = [0; size_of::<Checksum>()];
        gpu.read(&sum, 0, &mut found, limit).expect("read");
        let parts: Vec<_> = memory.iter().map(|bytes| &bytes[4..]).collect();
        assert_eq!(bytemuck::pod_read_unaligned::<Checksum>(&found), Checksum::of(&parts));
    }
}

pub fn pointers_that_the_driver_does_not_know_are_refused(runner: &Runner) {
    let Runner::Gpu(gpu) = runner else { return };
    let geometry = FrameGeometry::new(256, 4, DTYPE_F8_E4M3, 8, 2).expect("in range");
    let world = World::new(runner, &mut fresh(), geometry, 16, 1, 1);
    let unknown = vec![0u128; 64];
    let mut params = world.dispatch_params(0, 0);
    params.topk_weights = DevicePtr(unknown.as_ptr() as u64);
    // SAFETY: refused before anything is launched.
    let error = unsafe { gpu.prepare(params) }.unwrap_err();
    assert!(matches!(error, GpuError::Unregistered { pointer: "topk_weights", .. }), "{error}");
    params.topk_weights = DevicePtr::NULL;
    // SAFETY: as above.
    let error = unsafe { gpu.prepare(params) }.unwrap_err();
    assert!(error.to_string().starts_with("dispatch: a required pointer is null"), "{error}");
}

pub fn a_layer_with_real_experts(runner: &Runner) {
    let mut rng = fresh();
    for (dtype, weights_dtype, hidden, inter, tokens) in [
        (DTYPE_F8_E4M3, DTYPE_BF16, 256, 192, 150),
        (DTYPE_BF16, DTYPE_BF16, 512, 64, 40),
        (DTYPE_BF16, DTYPE_BF16, 128, 128, 1),
        (DTYPE_F8_E4M3, DTYPE_F8_E4M3, 384, 192, 150),
        (DTYPE_BF16, DTYPE_F8_E4M3, 256, 128, 40),
    ] {
        let geometry = FrameGeometry::new(hidden, 3, dtype, tokens, 2).expect("in range");
        let world = World::new(runner, &mut rng, geometry, 6, 1, 1);
        let mut input = Input::random(&mut rng, &geometry, 6, tokens);
        for value in &mut input.hidden_states {
            *value = half::bf16::from_f32(rng.random_range(-1.0..1.0)).to_bits();
        }
        world.load(0, &input);
        check_experts(runner, &mut rng, &world, &input, inter, weights_dtype);
    }
}

/// Matrices of `rows` by `depth` at random, as the GPU gets them and as they are.
struct Matrices {
    bytes: Vec<u8>,
    /// Of blocks of 128 by 128; empty with bf16.
    scales: Vec<f32>,
    values: Vec<f64>,
}

impl Matrices {
    fn random(rng: &mut StdRng, count: usize, rows: usize, depth: usize, dtype: u32) -> Self {
        let most = 2.0 / (depth as f32).sqrt();
        if dtype == DTYPE_BF16 {
            let bits: Vec<u16> = (0..count * rows * depth)
                .map(|_| half::bf16::from_f32(rng.random_range(-most..most)).to_bits())
                .collect();
            let values = bits.iter().map(|bits| half::bf16::from_bits(*bits).to_f64()).collect();
            return Self {
                bytes: bytemuck::cast_slice(&bits).to_vec(),
                scales: Vec::new(),
                values,
            };
        }
        let blocks = [rows.div_ceil(128), depth.div_ceil(128)];
        let scales: Vec<f32> = (0..count * blocks[0] * blocks[1])
            .map(|_| rng.random_range(most / 200.0..most / 100.0))
            .collect();
        // Every code but those of NaN.
        let bytes: Vec<u8> = (0..count * rows * depth)
            .map(|_| rng.random_range(0..0x7f) | u8::from(rng.random::<bool>()) << 7)
            .collect();
        let value = |(at, code): (usize, &u8)| {
            let (matrix, row, column) = (at / (rows * depth), at / depth % rows, at % depth);
            let scale = (matrix * blocks[0] + row / 128) * blocks[1] + column / 128;
            f64::from(f8_value(*code)) * f64::from(scales[scale])
        };
        let values = bytes.iter().enumerate().map(value).collect();
        Self { bytes, scales, values }
    }

    fn dot(&self, row_idx: usize, x: &[f64]) -> f64 {
        self.values[row_idx * x.len()..][..x.len()].iter().zip(x).map(|(w, x)| w * x).sum()
    }
}

/// Value of an e4m3 code that is not NaN's.
fn f8_value(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude =
        if exponent == 0 { mantissa / 512.0 } else { (8.0 + mantissa) * 2f32.powi(exponent - 10) };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// Runs a layer with random experts and compares with double precision.
fn check_experts(
    runner: &Runner,
    rng: &mut StdRng,
    world: &World,
    input: &Input,
    inter: u32,
    weights_dtype: u32,
) {
    let Runner::Gpu(gpu) = runner else { return };
    let (g, num_experts) = (&world.geometry, 6);
    let (hidden, top_k) = (g.hidden as usize, g.top_k as usize);
    let inter_len = inter as usize;
    let gate_up = Matrices::random(rng, num_experts * 2, inter_len, hidden, weights_dtype);
    let down = Matrices::random(rng, num_experts, hidden, inter_len, weights_dtype);
    let memory = [Memory::of(runner, &gate_up.bytes), Memory::of(runner, &down.bytes)];
    let scale_memory = [Memory::of(runner, &gate_up.scales), Memory::of(runner, &down.scales)];
    let shape = LayerShape { hidden: g.hidden, inter, num_local_experts: 6, dtype: weights_dtype };
    let at = LayerMatrices {
        gate_up: memory[0].address(),
        down: memory[1].address(),
        gate_up_scale: scale_memory[0].address(),
        down_scale: scale_memory[1].address(),
    };
    let layer = gpu.layer_weights(&shape, &at).expect("good matrices");
    let layers = Memory::of(runner, &[LayerWeights::zeroed(), layer]);
    let lists = world.servers[0].lists;
    let entries = u64::from(lists.max_rows) * u64::from(g.top_k);
    let scratch = |row_values: u32| {
        let bytes = g.expert_scratch_bytes(6, lists.max_rows, weights_dtype, row_values);
        Memory::filled(runner, bytes, POISON)
    };
    let (rows, activation) = (scratch(g.hidden), scratch(inter));
    let expert_out = Memory::filled(runner, entries * u64::from(g.hidden) * 2, POISON);
    let tile_arrivals = Memory::filled(runner, u64::from(TILE_ARRIVALS) * 4, 0);
    let recv = world.recv_params(0, 1);
    let compute = ExpertComputeParams {
        version: DEVICE_ABI_VERSION,
        flags: 0,
        geometry: *g,
        lists,
        rows: rows.address(),
        activation: activation.address(),
        expert_out: expert_out.address(),
        layers: layers.address(),
        inter,
        num_local_experts: recv.num_local_experts,
        num_layers: 2,
        num_clients: 1,
        num_blocks: 0,
        weights_dtype,
        timeout_ns: 10_000_000_000,
        trapped: DevicePtr::NULL,
        clients: recv.clients,
        tile_arrivals: tile_arrivals.address(),
    };
    // SAFETY: the world's memory and this function's are as large as documented.
    unsafe {
        runner.launch(&world.dispatch_params(0, 1));
        runner.launch(&recv);
        runner.launch(&compute);
        runner.launch(&world.send_params(0, expert_out.address()));
        runner.launch(&world.combine_params(0));
    }
    let out: Vec<u16> = world.clients[0].out.read(0, u64::from(world.capacity * g.hidden));
    let value = |bits: u16| f64::from(half::bf16::from_bits(bits).to_f32());
    let (mut off, mut norm) = (0.0, 0.0);
    for token in 0..input.num_tokens as usize {
        let row = crate::layer::on_the_wire(g, &input.hidden_states[token * hidden..][..hidden]);
        let mut expected = vec![0f64; hidden];
        for place in 0..top_k {
            let expert = input.topk_idx[token * top_k + place];
            let Ok(expert) = usize::try_from(expert) else { continue };
            // The only server numbers its experts as the model does.
            let act: Vec<f64> = (0..inter_len)
                .map(|at| {
                    let gate = gate_up.dot(expert * 2 * inter_len + at, &row);
                    let up = gate_up.dot((expert * 2 + 1) * inter_len + at, &row);
                    gate / (1.0 + (-gate).exp()) * up
                })
                .collect();
            let weight = f64::from(input.topk_weights[token * top_k + place]);
            for (at, sum) in expected.iter_mut().enumerate() {
                *sum += weight * down.dot(expert * hidden + at, &act);
            }
        }
        for (found, expected) in out[token * hidden..].iter().zip(&expected) {
            off += (value(*found) - expected).powi(2);
            norm += expected.powi(2);
        }
    }
    let error = (off / norm).sqrt();
    println!("hidden {hidden}, inter {inter}: off by {error:.1e}");
    // Rows, activations and outputs are each rounded to bf16; under fp8 weights rows and activations to
    // fp8, with errors of 2^-5 of a value at random.
    let bound = if weights_dtype == DTYPE_BF16 { 8e-3 } else { 6e-2 };
    assert!(error < bound, "off by {error}");
}

pub fn work_keeps_its_order_and_waits_have_a_bound(runner: &Runner) {
    let Runner::Gpu(gpu) = runner else { return };
    let soon = || Instant::now() + Duration::from_secs(20);
    let (device, host) = (gpu.alloc(4096).expect("memory"), gpu.alloc_host(4096).expect("memory"));
    let stream = gpu.stream().expect("stream");
    let (release, held) = std::sync::mpsc::channel::<()>();
    // A concurrent waiter gets an error at its deadline, and nothing has moved.
    let hold = move || {
        let _ = held.recv_timeout(Duration::from_secs(20));
    };
    stream.then(hold).expect("then");
    // SAFETY: both buffers have 4096 bytes and outlive the wait below.
    unsafe {
        stream.fill(device.ptr(), 7, 4096).expect("fill");
        stream.add_flag(device.ptr().add(8), 1).expect("flag");
        stream.copy(host.ptr(), device.ptr(), 4096).expect("copy");
    }
    let error = stream.wait(Instant::now() + Duration::from_millis(30)).unwrap_err();
    assert!(matches!(error, GpuError::Deadline { .. }), "{error}");
    assert!(!stream.is_done().expect("state"));
    release.send(()).expect("held");
    stream.wait(soon()).expect("work");
    let mut out = [0u64; 3];
    gpu.read(&host, 0, bytemuck::bytes_of_mut(&mut out), soon()).expect("read");
    let sevens = 0x0707_0707_0707_0707;
    assert_eq!(out, [sevens, sevens + 1, sevens]);
    // A recorded host call would run at every replay.
    let mut refused = None;
    stream
        .capture(|stream| {
            refused = stream.then(|| {}).err();
            Ok(())
        })
        .expect("capture");
    assert!(refused.is_some());
    // SAFETY: `stream` lives on.
    let same = unsafe { gpu.wrap_stream(stream.raw()) }.expect("wrapped");
    // SAFETY: as above.
    unsafe { same.fill(device.ptr(), 9, 8).expect("fill") };
    stream.wait(soon()).expect("work");
    gpu.read(&device, 0, bytemuck::bytes_of_mut(&mut out), soon()).expect("read");
    assert_eq!(out[0], 0x0909_0909_0909_0909);
}

pub fn what_the_host_is_told_is_what_lay_there_in_stream_order(runner: &Runner) {
    const BYTES: u64 = 16 << 10;
    let Runner::Gpu(gpu) = runner else { return };
    let soon = || Instant::now() + Duration::from_secs(20);
    let mut rng = fresh();
    let (device, host) =
        (gpu.alloc(BYTES).expect("memory"), gpu.alloc_host(BYTES).expect("memory"));
    let stream = gpu.stream().expect("stream");
    for (first_bytes, last_bytes) in [(0, 8), (4, 12), (32, 408), (1564, 60), (1600, 5000)] {
        let mut bytes = vec![0u8; BYTES as usize];
        rng.fill(&mut bytes[..]);
        gpu.write(&device, 0, &bytes, soon()).expect("write");
        let [first, last, to_first, to_last] = [64u64, 8 << 10, 2 << 10, 9 << 10];
        let piece = |to: u64, from: u64, bytes| Piece {
            to: host.ptr().add(to),
            from: device.ptr().add(from),
            bytes,
        };
        // SAFETY: all ranges are within the two buffers, which outlive the wait.
        unsafe {
            stream.fill(host.ptr(), POISON, BYTES).expect("poison");
            // Comes before; later steps come behind.
            stream.fill(device.ptr().add(first), 3, first_bytes).expect("fill");
            let (a, b) = (piece(to_first, first, first_bytes), piece(to_last, last, last_bytes));
            stream.tell(a, b).expect("told");
            stream.fill(device.ptr(), 5, BYTES).expect("fill");
        }
        stream.wait(soon()).expect("work");
        let mut found = vec![0u8; BYTES as usize];
        gpu.read(&host, 0, &mut found, soon()).expect("read");
        let mut expected = vec![POISON; BYTES as usize];
        expected[to_first as usize..][..first_bytes as usize].fill(3);
        let last = &bytes[last as usize..][..last_bytes as usize];
        expected[to_last as usize..][..last_bytes as usize].copy_from_slice(last);
        assert!(found == expected, "{first_bytes} and {last_bytes} bytes");
    }
}

pub fn an_event_of_a_graph_is_done_with_the_replay(runner: &Runner) {
    let Runner::Gpu(gpu) = runner else { return };
    let soon = || Instant::now() + Duration::from_secs(20);
    let word = gpu.alloc(8).expect("memory");
    let (inside, behind) = (gpu.event().expect("event"), gpu.event().expect("event"));
    let stream = gpu.stream().expect("stream");
    let graph = stream.capture(|stream| {
        // SAFETY: the buffer has these bytes and outlives the graph.
        unsafe { stream.fill(word.ptr(), 1, 8)? };
        stream.record(&inside)
    });
    let graph = graph.expect("capture");
    for round in 0..3 {
        let (release, held) = std::sync::mpsc::channel::<()>();
        stream.then(move || _ = held.recv_timeout(Duration::from_secs(20))).expect("then");
        stream.replay(&graph).expect("replay");
        stream.record(&behind).expect("record");
        // That of the graph may show the run before, or this one.
        inside.is_done().expect("state");
        assert!(!behind.is_done().expect("state"), "round {round}");
        drop(release);
        stream.wait(soon()).expect("work");
        assert!(inside.is_done().expect("state") && behind.is_done().expect("state"));
    }
}

/// Threads that move frames drop such memory, and kernels wait for these threads.
pub fn memory_of_the_host_goes_without_waiting_for_work(runner: &Runner) {
    let Runner::Gpu(gpu) = runner else { return };
    let memory = gpu.alloc_host(4096).expect("memory");
    let stream = gpu.stream().expect("stream");
    let (release, held) = std::sync::mpsc::channel::<()>();
    stream.then(move || _ = held.recv_timeout(Duration::from_secs(20))).expect("then");
    let begin = Instant::now();
    drop(memory);
    let took = begin.elapsed();
    assert!(!stream.is_done().expect("state"), "it waited for the work: {took:?}");
    release.send(()).expect("held");
    stream.wait(Instant::now() + Duration::from_secs(20)).expect("work");
}

pub fn shared_memory_is_one_memory_and_knows_its_size(runner: &Runner) {
    let Runner::Gpu(gpu) = runner else { return };
    let soon = || Instant::now() + Duration::from_secs(20);
    let mine = gpu.alloc_shared(100_000).expect("memory");
    let theirs = gpu.import_shared(mine.export().expect("export"), mine.len()).expect("import");
    assert_ne!(mine.ptr(), theirs.ptr());
    assert!(gpu.is_registered(theirs.ptr()) && mine.len() >= 100_000);
    gpu.write(&theirs, 99_999, &[5], soon()).expect("write");
    let mut byte = [0];
    // The memory lives as long as it has an owner.
    let at = theirs.ptr();
    drop(theirs);
    assert!(!gpu.is_registered(at));
    gpu.read(&mine, 99_999, &mut byte, soon()).expect("read");
    assert_eq!(byte, [5]);
    assert!(gpu.import_shared(mine.export().expect("export"), mine.len() + (64 << 20)).is_err());
    let file = tempfile::tempfile().expect("file");
    file.set_len(1 << 20).expect("length");
    assert!(gpu.import_shared(file.into(), 4096).is_err());
    assert!(gpu.alloc(4096).expect("memory").export().is_err());
}

/// Two senders, one receiver: payload, then the senders' counters; a line of the receiver's for each sender.
struct Stream {
    memory: Vec<Memory>,
    results: Vec<Memory>,
    params: Vec<StreamParams>,
}

impl Stream {
    const TURNS: u32 = 7;
    /// Two bulk copies and a short one.
    const MESSAGE_BYTES: u64 = (2 << 14) + 48;
    const COUNTERS_AT: u64 = 128 << 10;

    fn new(runner: &Runner, limit: Duration, flags: u32) -> Self {
        let slot = |_| {
            let memory = Memory::filled(runner, Self::COUNTERS_AT + 256, 0);
            memory.fill(0, Self::COUNTERS_AT, POISON);
            memory
        };
        let memory: Vec<Memory> = (0..3).map(slot).collect();
        let results: Vec<Memory> = (0..3).map(|_| Memory::filled(runner, 512, 0)).collect();
        let line =
            |owner: usize, at: u64| memory[owner].address().add(Self::COUNTERS_AT + 128 * at);
        let params = |party: usize, peers: &[usize]| {
            let mut params = P2pParams::zeroed();
            params.version = DEVICE_ABI_VERSION;
            params.flags = flags;
            params.num_peers = peers.len() as u32;
            params.blocks_per_peer = 2;
            params.num_turns = Self::TURNS;
            params.begins = u32::from(party < 2);
            params.num_bytes = Self::MESSAGE_BYTES;
            params.timeout_ns = limit.as_nanos() as u64;
            params.elapsed_ns = results[party].address();
            params.error = results[party].address().add(256);
            for (at, &peer) in peers.iter().enumerate() {
                let my_line = if party < 2 { party as u64 } else { 0 };
                params.counters[at] = line(party, at as u64);
                // Each sender has a part of the receiver's payload.
                let window = memory[peer].address().add(Self::MESSAGE_BYTES * my_line);
                params.counter_offset[at] = line(peer, my_line).0 - window.0;
                params.links[at] = Link { window, context: 0, path: PATH_DIRECT, reserved: 0 };
            }
            StreamParams(params)
        };
        let params = vec![params(0, &[2]), params(1, &[2]), params(2, &[0, 1])];
        Self { memory, results, params }
    }

    /// Launches these parties side by side and waits. Returns the errors, by party.
    fn run(&self, gpu: &Gpu, parties: &[usize]) -> Vec<ErrorWord> {
        let streams: Vec<_> = parties.iter().map(|_| gpu.stream().expect("stream")).collect();
        for (stream, &party) in streams.iter().zip(parties) {
            // SAFETY: `self` has all that the parameters point to, and the work is waited for below.
            let kernel = unsafe { gpu.prepare(self.params[party]).expect("good parameters") };
            stream.launch(&kernel).expect("launch");
        }
        for stream in &streams {
            stream.wait(Instant::now() + Duration::from_secs(20)).expect("kernel");
        }
        parties.iter().map(|&party| self.results[party].one(256)).collect()
    }

    fn payload(&self) -> Vec<u32> {
        self.memory[2].read(0, Self::MESSAGE_BYTES / 2)
    }
}

/// The bandwidth of several senders is that of all bytes only if none begins alone.
pub fn a_sender_waits_for_the_others(runner: &Runner) {
    for flags in [0, FLAG_BULK] {
        senders_begin_together(runner, flags);
    }
}

fn senders_begin_together(runner: &Runner, flags: u32) {
    let Runner::Gpu(gpu) = runner else { return };
    let alone = Stream::new(runner, Duration::from_millis(200), flags);
    let errors = alone.run(gpu, &[0, 2]);
    // The receiver misses the other sender, and the sender misses the receiver's word.
    assert_eq!(
        errors.iter().map(|e| (e.tag, e.peer)).collect::<Vec<_>>(),
        [(TAG_P2P, 0), (TAG_P2P, 1)]
    );
    assert!(alone.payload().iter().all(|word| *word == u32::MAX), "it has begun");
    let together = Stream::new(runner, Duration::from_secs(15), flags);
    let errors = together.run(gpu, &[0, 1, 2]);
    assert!(errors.iter().all(|error| error.tag == 0), "{errors:?}");
    assert!(together.payload().iter().all(|word| *word == Stream::TURNS));
    let behind: Vec<u8> = together.memory[2]
        .read(2 * Stream::MESSAGE_BYTES, Stream::COUNTERS_AT - 2 * Stream::MESSAGE_BYTES);
    assert!(behind.iter().all(|byte| *byte == u8::MAX), "it has put too much");
    for sender in &together.results[..2] {
        assert_ne!(sender.one::<u64>(0), 0, "no time was taken");
    }
}

/// An engine on the same thread may be at work on another GPU, which its runtime takes from the thread's
/// context.
#[cfg(feature = "cuda")]
pub fn calls_leave_the_context_of_the_thread_alone(runner: &Runner) {
    use cudarc::driver::result::ctx::get_current;
    let Runner::Gpu(gpu) = runner else { return };
    let other = match Gpu::open(1) {
        Ok(other) => other,
        Err(error) => return test_support::skip("gpus", &error.to_string()),
    };
    let test = || {
        let _mine = other.alloc(4096).expect("memory");
        let before = get_current().expect("context");
        assert!(before.is_some(), "a thread that had no context keeps the first");
        let stream = gpu.stream().expect("stream");
        let memory = gpu.alloc(4096).expect("memory");
        // SAFETY: the whole memory, which is waited for.
        unsafe { stream.fill(memory.ptr(), 1, 4096).expect("fill") };
        stream.wait(Instant::now() + Duration::from_secs(20)).expect("fill");
        drop((stream, memory));
        assert_eq!(get_current().expect("context"), before);
        assert!(Gpu::open(99).is_err());
        assert_eq!(get_current().expect("context"), before);
    };
    std::thread::scope(|scope| scope.spawn(test).join()).expect("a thread of its own");
}

/// Kernels reach memory that is mapped for their GPU, and not memory that merely has an address there.
#[cfg(feature = "cuda")]
pub fn memory_of_another_gpu_is_told_apart(runner: &Runner) {
    let Runner::Gpu(gpu) = runner else { return };
    let other = match Gpu::open(1) {
        Ok(other) => other,
        Err(error) => return test_support::skip("gpus", &error.to_string()),
    };
    let check = |memory: &kernels::gpu::GpuBuffer, num_bytes| {
        gpu.check_range("test", "x", memory.ptr(), num_bytes)
    };
    let (mine, theirs) = (gpu.alloc(4096).expect("memory"), other.alloc(4096).expect("memory"));
    check(&mine, 4096).expect("of this GPU");
    check(&gpu.alloc_host(4096).expect("memory"), 4096).expect("of the host");
    let error = check(&mine, 1 << 44).unwrap_err();
    assert!(matches!(error, GpuError::Short { .. }), "{error}");
    let error = check(&theirs, 4096).unwrap_err();
    assert!(matches!(error, GpuError::OtherGpu { owner: 1, .. }), "{error}");
    let shared = other.alloc_shared(4096).expect("memory");
    let mapped = gpu.import_shared(shared.export().expect("export"), shared.len());
    check(&mapped.expect("import"), 4096).expect("of another GPU, mapped for this one");
}

/// `SY_TAG_P2P`
const TAG_P2P: u32 = 8;
