//! The device functions on a GPU, and the copy to further ones.
#![cfg(all(feature = "cuda", not(loom)))]

use std::sync::Arc;
use std::time::{Duration, Instant};

use bench_harness::proxy::local::{Bench, PostKind, Row, Run};
use bench_harness::proxy::{BenchEndpoint, relay};
use kernels::abi::{ErrorWord, Link, PATH_PROXY};
use kernels::gpu::{Gpu, GpuBuffer};
use kernels::link_calls::LinkCallsParams;
use kernels::proxy::{PROXY_VERSION, ProduceParams};
use p2p_core::backend::mapped::MappedEndpoint;
use p2p_core::backend::staged::{Disorder, StagedEndpoint};
use p2p_core::wait::event_fd;
use p2p_core::{Region, TransportKind};
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use switchyard_proxy::gpu::{GpuPoster, lanes, mirror};
use switchyard_proxy::host::PosterConfig;
use switchyard_proxy::relay::{Copier, CopyTask, GpuCopier, GpuTarget, WordTask};
use switchyard_proxy::{BadCommand, Cause, LaneConfig, Lanes, PeerConfig, Proxy, ProxyConfig};

const LIMIT: Duration = Duration::from_secs(30);
const LANES: LaneConfig = LaneConfig { num_lanes: 4, depth: 64, budget: 64 };

fn gpu() -> Option<Gpu> {
    match Gpu::open(0) {
        Ok(gpu) => Some(gpu),
        Err(error) => {
            test_support::skip("gpu", &error.to_string());
            None
        }
    }
}

fn deadline() -> Instant {
    Instant::now() + LIMIT
}

#[test]
fn every_word_of_every_object_arrives_behind_many_warps() {
    let Some(gpu) = gpu() else { return };
    let bench = Bench::start(&ProxyConfig { num_threads: 2, ..Default::default() }).unwrap();
    for (batch, object_bytes, budget) in [(1, 16, 64), (7, 4096, 42), (16, 10_752, 64)] {
        let run = Run {
            post: PostKind::Check,
            lanes: LaneConfig { budget, ..LANES },
            batch,
            object_bytes,
            num_objects: 64_u32.next_multiple_of(batch),
            // Past the 8 bits of a lap.
            num_commands: 20_000_u64.next_multiple_of(batch.into()),
            is_round_trip: false,
            only_reads: false,
            is_one_way: false,
        };
        let figures = bench.run_gpu(&run, &gpu).unwrap();
        assert_eq!(figures.bad, 0);
        assert_eq!(figures.checked, 2 * 4 * run.num_commands);
    }
}

/// The clocks contradict each other nowhere, or it would fail: nothing is posted before it was pushed.
#[test]
fn the_way_from_a_push_to_its_post_is_measured() {
    let Some(gpu) = gpu() else { return };
    let bench = Bench::start(&ProxyConfig { num_threads: 2, ..Default::default() }).unwrap();
    let row = Row {
        num_lanes: 2,
        batch: 1,
        budget: 64,
        object_bytes: 4096,
        commands: 10_000,
        is_gpu: true,
    };
    let figures = bench.run_gpu(&row.one_way(), &gpu).unwrap();
    println!("{:?}, {:?}", figures.latency, figures.clock);
    assert!(figures.latency.is_some() && figures.clock.is_some());
    assert_eq!(figures.by_lane.len(), 4);
}

/// Puts from the GPU's memory and from the mirror, with an add and a signal behind each. Gets of the
/// put bytes follow, of every alignment. The transport delays and reorders within the rules.
#[test]
fn what_a_kernel_puts_through_the_proxy_it_gets_back() {
    const SLOT: usize = 64 << 10;
    const POISON: u8 = 0xa5;
    // Two words at the end of the slot, zeros at first; before them a part to put to, one to put from, one to get to.
    const PART: usize = (SLOT - 64) / 3 / 16 * 16;
    let Some(gpu) = gpu() else { return };
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let (slot, slot_at) = mirror(&gpu, SLOT as u64).unwrap();
    let (near, near_at) = mirror(&gpu, SLOT as u64).unwrap();
    let event = Arc::new(event_fd().unwrap());
    let endpoint =
        MappedEndpoint::new(TransportKind::Local, slot.clone(), Arc::clone(&event), event);
    let disorder = Disorder { seed, max_delay: Duration::from_micros(3) };
    let endpoint = StagedEndpoint::new(endpoint, Some(disorder));
    let lanes = lanes(&gpu, LANES).unwrap();
    let proxy = Proxy::start(&ProxyConfig::default()).unwrap();
    let config = PeerConfig {
        peer: 2,
        lanes: lanes.clone(),
        window_bytes: SLOT as u64,
        sources: vec![near.clone()],
        thread: None,
    };
    let _peer = proxy.add(endpoint, config).unwrap();
    let error = gpu.alloc(size_of::<ErrorWord>() as u64).unwrap();
    let good = gpu.alloc_host(12).unwrap();
    let config = PosterConfig {
        mirror: near_at.0,
        slot_bytes: SLOT as u64,
        window: 0,
        peer: 2,
        timeout_ns: LIMIT.as_nanos() as u64,
        error: error.ptr().0,
        abort_mask: 0,
    };
    let poster = GpuPoster::new(&gpu, &lanes, config).unwrap();
    let (far_source, stream) = (gpu.alloc(PART as u64).unwrap(), gpu.stream().unwrap());
    let fill = |region: &Region, bytes: &[u8], at: usize| {
        assert!(at + bytes.len() <= region.len());
        // SAFETY: within the region, as checked, and no other code uses it between calls.
        unsafe {
            region.as_ptr().as_ptr().add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len())
        };
    };
    let read = |region: &Region| {
        let mut bytes = vec![0; SLOT];
        // SAFETY: of this size, and behind a quiet it has no writer.
        unsafe { region.as_ptr().as_ptr().copy_to_nonoverlapping(bytes.as_mut_ptr(), SLOT) };
        bytes
    };
    let (mut value, mut sum) = (0u64, 0u64);
    let mut lengths = vec![0, 1, 15, 16, 17, 496, 512, 529, PART - 16];
    lengths.extend((0..20).map(|_| rng.random_range(0..PART - 16)));
    for (len, in_mirror) in lengths.into_iter().flat_map(|len| [(len, false), (len, true)]) {
        let shift = if rng.random() { 0 } else { rng.random_range(1..16) };
        let mut bytes = vec![0; len];
        rng.fill_bytes(&mut bytes);
        fill(&near, &[POISON; SLOT - 64], 0);
        fill(&slot, &[!POISON; SLOT - 64], 0);
        let source = if in_mirror {
            fill(&near, &bytes, PART + shift);
            near_at.add((PART + shift) as u64)
        } else {
            gpu.write(&far_source, shift as u64, &bytes, deadline()).unwrap();
            far_source.ptr().add(shift as u64)
        };
        // SAFETY: page-locked memory of twelve bytes; no kernel runs.
        unsafe { good.host().unwrap().cast::<[u32; 3]>().write_volatile([u32::MAX; 3]) };
        // It rises, so a value left by the call before ends no wait of this one. Only the proxy's thread, which
        // adds differences, may set the word.
        value += rng.random_range(1..=u64::MAX >> 8);
        sum = sum.wrapping_add(value);
        let word_at = SLOT as u64 - 16;
        let params = LinkCallsParams {
            link: Link {
                window: near_at,
                context: poster.address().0,
                path: PATH_PROXY,
                reserved: 0,
            },
            source,
            back: near_at.add((2 * PART + shift) as u64),
            offset: shift as u64,
            num_bytes: len as u64,
            word_offset: word_at,
            counter_offset: word_at + 8,
            value,
            echo: slot_at.add(word_at),
            error: error.ptr(),
            timeout_ns: LIMIT.as_nanos() as u64,
            good: good.ptr(),
        };
        // SAFETY: all of it outlives the kernel, which is waited for.
        stream.launch(&unsafe { gpu.prepare(params).unwrap() }).unwrap();
        stream.wait(deadline()).unwrap();
        let name = format!("{len} bytes, shift {shift}, in the mirror: {in_mirror}");
        // SAFETY: page-locked memory of twelve bytes, which the kernel has written.
        let ended = unsafe { good.host().unwrap().cast::<[u32; 3]>().read_volatile() };
        assert_eq!(ended, [1; 3], "{name}");
        let (there, here) = (read(&slot), read(&near));
        let expect = |found: &[u8], poison: u8| {
            assert!(found[shift..shift + len] == bytes, "{name}: other bytes came");
            let rest = [&found[..shift], &found[shift + len..]];
            assert!(rest.iter().all(|part| part.iter().all(|b| *b == poison)), "{name}: more came");
        };
        expect(&there[..SLOT - 64], !POISON);
        expect(&here[2 * PART..SLOT - 64], POISON);
        let words: [u64; 2] = bytemuck::pod_read_unaligned(&there[SLOT - 16..]);
        assert_eq!(words, [value, sum], "{name}");
    }
}

/// A kernel on lanes that a thread may or may not serve.
struct Kernel {
    stream: kernels::gpu::Stream,
    status: GpuBuffer,
    error: GpuBuffer,
    _buffers: Vec<GpuBuffer>,
    _poster: GpuPoster,
}

impl Kernel {
    fn start(gpu: &Gpu, lanes: &Lanes, mirror: u64, timeout: Duration) -> Self {
        let error = gpu.alloc(32).unwrap();
        let config = PosterConfig {
            mirror,
            slot_bytes: 1 << 20,
            window: 0,
            peer: 2,
            timeout_ns: timeout.as_nanos() as u64,
            error: error.ptr().0,
            abort_mask: 0,
        };
        let poster = GpuPoster::new(gpu, lanes, config).unwrap();
        let (elapsed, status) = (gpu.alloc(8 * 4).unwrap(), gpu.alloc(4 * 4).unwrap());
        let params = ProduceParams {
            version: PROXY_VERSION,
            num_blocks: 4,
            peers: poster.address(),
            latency_ns: kernels::abi::DevicePtr(0),
            elapsed_ns: elapsed.ptr(),
            status: status.ptr(),
            num_commands: 1_000_000_000,
            batch: 8,
            opcode: 1,
            object_bytes: 64,
            num_objects: 64,
            flags: 0,
            num_samples: 0,
            counter_offset: 0,
        };
        // SAFETY: all buffers are kept until the kernel has ended.
        let kernel = unsafe { gpu.prepare(params).unwrap() };
        let stream = gpu.stream().unwrap();
        stream.launch(&kernel).unwrap();
        Self { stream, status, error, _buffers: vec![elapsed], _poster: poster }
    }

    /// The status of every lane, and tag, peer, reason of the error word.
    fn end(&self, gpu: &Gpu) -> ([u32; 4], [u32; 3]) {
        self.stream.wait(deadline()).unwrap();
        let (mut status, mut error) = ([0; 16], [0; 12]);
        gpu.read(&self.status, 0, &mut status, deadline()).unwrap();
        gpu.read(&self.error, 0, &mut error, deadline()).unwrap();
        (bytemuck::cast(status), bytemuck::cast(error))
    }
}

fn serve(
    proxy: &Proxy<BenchEndpoint>,
    lanes: &Lanes,
    source: Region,
    bytes: u64,
) -> switchyard_proxy::ProxyPeer<BenchEndpoint> {
    let config = PeerConfig {
        peer: 2,
        lanes: lanes.clone(),
        window_bytes: bytes,
        sources: vec![source],
        thread: None,
    };
    proxy.add(BenchEndpoint::null(), config).unwrap()
}

#[test]
fn kernels_leave_when_nobody_serves_refuses_or_goes() {
    let Some(gpu) = gpu() else { return };
    let (source, address) = mirror(&gpu, 1 << 20).unwrap();
    // No thread serves.
    let unserved = lanes(&gpu, LANES).unwrap();
    let kernel = Kernel::start(&gpu, &unserved, address.0, Duration::from_millis(50));
    let (status, error) = kernel.end(&gpu);
    assert_eq!(status, [1; 4]);
    assert_eq!(error, [48, 2, 1]);

    // A window that is smaller than the kernel believes: each lane names its first bad command.
    let proxy: Proxy<BenchEndpoint> = Proxy::start(&ProxyConfig::default()).unwrap();
    let refused = lanes(&gpu, LANES).unwrap();
    let peer = serve(&proxy, &refused, source.clone(), 1024);
    let kernel = Kernel::start(&gpu, &refused, address.0, LIMIT);
    let (status, error) = kernel.end(&gpu);
    assert_eq!(status, [3; 4]);
    assert_eq!(error, [50, 2, 3]);
    let failures = peer.take_failures();
    assert_eq!(failures.len(), 4, "{failures:?}");
    for failure in failures {
        let Cause::Command(BadCommand::RemoteRange { .. }) = failure.cause else {
            panic!("{failure}")
        };
    }

    // The peer is closed under a running kernel.
    let closed = lanes(&gpu, LANES).unwrap();
    let peer = serve(&proxy, &closed, source, 1 << 20);
    let kernel = Kernel::start(&gpu, &closed, address.0, LIMIT);
    std::thread::sleep(Duration::from_millis(20));
    drop(peer);
    let (status, error) = kernel.end(&gpu);
    assert_eq!(status, [3; 4]);
    assert_eq!(error, [50, 2, 3]);
}

#[test]
fn copies_of_any_size_and_place_are_those_of_a_model() {
    let Some(gpu) = gpu() else { return };
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    const BYTES: usize = 1 << 20;
    let (slot, target) = (gpu.alloc(BYTES as u64).unwrap(), gpu.alloc(BYTES as u64).unwrap());
    let mut source = vec![0; BYTES];
    rng.fill_bytes(&mut source);
    gpu.write(&slot, 0, &source, deadline()).unwrap();
    let targets = vec![GpuTarget { address: target.ptr(), bytes: BYTES as u64 }];
    // SAFETY: both buffers live until the end of the test.
    let mut copier = unsafe { GpuCopier::new(&gpu, slot.ptr(), targets).unwrap() };
    let mut model = vec![0; BYTES];
    for _ in 0..30 {
        let mut copies = Vec::new();
        let mut at = 0;
        for _ in 0..rng.random_range(1..=64) {
            let len = match rng.random_range(0..4) {
                0 => rng.random_range(1..64),
                1 => 16 * rng.random_range(1..256),
                _ => rng.random_range(1..8192),
            };
            let is_aligned = rng.random::<bool>();
            let place = |at: usize| if is_aligned { at.next_multiple_of(16) } else { at };
            let (from, to) = (place(rng.random_range(0..BYTES - len - 16)), place(at));
            if to + len > BYTES - 64 {
                break;
            }
            at = to + len;
            copies.push(CopyTask {
                target: 0,
                source_offset: from as u64,
                target_offset: to as u64,
                num_bytes: len as u64,
            });
            model[to..to + len].copy_from_slice(&source[from..from + len]);
        }
        let value: u64 = rng.random();
        let word = WordTask { target: 0, target_offset: BYTES as u64 - 8, value };
        copier.submit(&copies, &[word]).unwrap();
        let end = deadline();
        while !copier.is_done().unwrap() {
            assert!(Instant::now() < end);
        }
        let old = u64::from_ne_bytes(model[BYTES - 8..].try_into().unwrap());
        model[BYTES - 8..].copy_from_slice(&old.wrapping_add(value).to_ne_bytes());
        let mut found = vec![0; BYTES];
        gpu.read(&target, 0, &mut found, deadline()).unwrap();
        assert!(found == model);
    }
}

#[test]
fn objects_reach_a_further_gpu_through_proxy_and_relay() {
    let Some(near) = gpu() else { return };
    let far = if Gpu::count().unwrap() > 1 { Gpu::open(1).unwrap() } else { near.clone() };
    let (objects, _, tasks) = relay::behind_proxy(&near, &far, 2000).unwrap();
    assert_eq!(tasks, 2 * u64::from(objects));
}
