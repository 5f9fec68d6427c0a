//! Device slots between two processes: the conformance rules of every transport, with device
//! buffers, and the death of a peer while its memory is mapped. The GPUs are emulated in software.
//! With `SWITCHYARD_TEST_DEVICE=cuda` and the feature `cuda` they are real, one per process if
//! there are two.
#![cfg(not(loom))]

use std::io::Write as _;
use std::process::{Child, ChildStdin, Stdio};
use std::time::{Duration, Instant};

use kernels::abi::DevicePtr;
use kernels::gpu::{DeviceName, Gpu, GpuBuffer};
use p2p_core::endpoint::{Endpoint, PostError};
use p2p_core::region::SlotKey;
use p2p_core::slot::{CONSUMED, PROGRESS, PUBLISHED};
use p2p_core::wait::WaitSet;
use p2p_core::{ChannelError, Region, RemoteRange, SlotConfig, SlotLayout};
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use switchyard_cuda_ipc::{DeviceChannel, DeviceError, INVITATION_BYTES, Invitation, connect};

test_support::child_processes! { "other party" => other_party }

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Party {
    A,
    B,
}

type Script = fn(&mut Stage);

const SCRIPTS: [(&str, Script); 8] = [
    ("put, get, fence, quiet and flags", operations),
    ("accesses beyond the slot", bounds),
    ("frames of all sizes, in order, under load", frames_under_load),
    ("credits", credits),
    ("desynchronised counters", desync),
    ("wake-ups", wake_ups),
    ("large counters", large_counters),
    ("empty frames", empty_frames),
];

const POISON: u8 = 0xa5;
const LIMIT: Duration = Duration::from_secs(30);

/// One party's side of a script.
struct Stage {
    party: Party,
    gpu: Gpu,
    channel: DeviceChannel,
    rng: StdRng,
    num_barriers: u64,
}

#[test]
fn two_processes_over_device_slots() {
    let Some(gpu) = first_gpu() else { return };
    let seed = fresh_seed();
    for config in configs() {
        for (idx, (name, script)) in SCRIPTS.into_iter().enumerate() {
            println!("{name}: {config:?}");
            let (channel, mut child, _stdin) = with_child(&gpu, config, &format!("{idx} {seed}"));
            perform(Party::A, gpu.clone(), channel, seed, script);
            let status =
                test_support::bounded::status_of(&mut child, name, test_support::bounded::LIMIT);
            assert!(status.success(), "the other party failed in: {name}");
        }
    }
}

/// The rules are those of other transports, but channels in GPU memory need scripts of their own.
#[test]
fn no_rule_of_the_other_transports_is_left_out() {
    let suite = include_str!("../../../tests/conformance/suite.rs");
    let list = suite.split_once("fn scripts").unwrap().1.split_once(']').unwrap().0;
    let rules: Vec<&str> = list.split('"').skip(1).step_by(2).collect();
    assert!(!rules.is_empty());
    for rule in rules {
        assert!(SCRIPTS.iter().any(|(name, _)| *name == rule), "{rule}");
    }
}

#[test]
fn the_memory_of_a_dead_peer_is_harmless_and_comes_back() {
    let Some(gpu) = first_gpu() else { return };
    let owner = other_gpu(&gpu);
    let before = owner.free_bytes().unwrap();
    let config = SlotConfig { slot_bytes: 1 << 30, num_frames: 2 };
    let (mut channel, mut child, _stdin) = with_child(&gpu, config, "hang 0");
    let source = gpu.alloc(1 << 20).unwrap();
    let put = |channel: &mut DeviceChannel| {
        let end = channel.endpoint_mut();
        // SAFETY: `source` is not written.
        unsafe { end.put_device(0, source.ptr(), 1 << 20).unwrap() };
        end.add_flag(RemoteRange { key: SlotKey, offset: 1 << 21, len: 8 }, 1).unwrap();
        end.quiet(Instant::now() + LIMIT).unwrap();
    };
    put(&mut channel);
    child.kill().unwrap();
    child.wait().unwrap();
    // Late stores land in memory that no process reads any more.
    for _ in 0..10 {
        put(&mut channel);
    }
    let mapped = owner.free_bytes().unwrap();
    let start = Instant::now();
    drop(channel);
    println!("unmapped within {:?}", start.elapsed());
    eventually("the dead peer's memory", || {
        owner.free_bytes().unwrap() >= mapped + (1 << 30) - (64 << 20)
    });
    println!(
        "free bytes: {before} before, {mapped} while mapped, {} after",
        owner.free_bytes().unwrap()
    );
    // The survivor continues.
    gpu.write(&source, 0, &[1; 64], Instant::now() + LIMIT).unwrap();
}

#[test]
fn what_is_no_gpu_memory_is_refused() {
    let Some(gpu) = first_gpu() else { return };
    let null = std::os::fd::OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let [no_memory, too_small] = match gpu.name() {
        DeviceName::Cuda(_) => ["cuMemImportFromShareableHandle", "cuMemMap"],
        DeviceName::Emulated(_) => ["a descriptor of something else", "memory of another size"],
    };
    let error = gpu.import_shared(null, 1 << 21).unwrap_err().to_string();
    assert!(error.contains(no_memory) && !error.contains('\n'), "{error}");
    let small = gpu.alloc_shared(1 << 21).unwrap();
    let error = gpu.import_shared(small.export().unwrap(), 1 << 30).unwrap_err().to_string();
    assert!(error.contains(too_small), "{error}");
    let private = gpu.alloc(1 << 21).unwrap();
    assert!(private.export().is_err());
}

#[test]
fn nobody_waits_for_ever_for_a_peer() {
    let Some(gpu) = first_gpu() else { return };
    let limit = Duration::from_millis(100);
    let error = runtime().block_on(async {
        let invitation = Invitation::open().unwrap();
        invitation.accept(&gpu, layout(configs()[0]), limit).await.unwrap_err()
    });
    assert!(matches!(error, DeviceError::Timeout { .. }), "{error}");
}

#[test]
fn whoever_does_not_know_the_nonce_cannot_keep_the_peer_away() {
    use std::os::linux::net::SocketAddrExt as _;
    use std::os::unix::net::{SocketAddr, UnixStream};
    let Some(gpu) = first_gpu() else { return };
    let (layout, other) = (layout(configs()[0]), other_gpu(&gpu));
    runtime().block_on(async {
        let invitation = Invitation::open().unwrap();
        let bytes = invitation.to_bytes();
        let token: String = bytes[..16].iter().map(|byte| format!("{byte:02x}")).collect();
        let addr = SocketAddr::from_abstract_name(format!("switchyard-{token}")).unwrap();
        // They connect first. One sends garbage, one leaves at once.
        let mut garbled = UnixStream::connect_addr(&addr).unwrap();
        garbled.write_all(&[7; 64]).unwrap();
        drop(UnixStream::connect_addr(&addr).unwrap());
        let (ours, theirs) = tokio::join!(
            invitation.accept(&gpu, layout, LIMIT),
            connect(&bytes, &other, layout, LIMIT)
        );
        let (mut ours, theirs) = (ours.unwrap(), theirs.unwrap());
        ours.bump_progress().unwrap();
        eventually("a word arrives", || theirs.word(PROGRESS).unwrap() == 1);
    });
}

/// The other party of a test, in a process of its own.
fn other_party() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [invitation, sizes, task] = &arguments[..] else { panic!("found {arguments:?}") };
    let bytes: Vec<u8> = invitation.split(',').map(|byte| byte.parse().unwrap()).collect();
    let invitation: [u8; INVITATION_BYTES] = bytes.try_into().unwrap();
    let sizes: Vec<usize> = sizes.split(' ').map(|size| size.parse().unwrap()).collect();
    let layout = layout(SlotConfig { slot_bytes: sizes[0], num_frames: sizes[1] });
    let gpu = other_gpu(&first_gpu().unwrap());
    let channel = runtime().block_on(connect(&invitation, &gpu, layout, LIMIT)).unwrap();
    let (what, seed) = task.split_once(' ').unwrap();
    if what == "hang" {
        // Ends with the parent at the latest.
        let _ = std::io::stdin().read_line(&mut String::new());
        return;
    }
    let script = SCRIPTS[what.parse::<usize>().unwrap()].1;
    perform(Party::B, gpu, channel, seed.parse().unwrap(), script);
}

fn perform(party: Party, gpu: Gpu, channel: DeviceChannel, seed: u64, script: Script) {
    let rng = StdRng::seed_from_u64(seed);
    let mut stage = Stage { party, gpu, channel, rng, num_barriers: 0 };
    script(&mut stage);
    // Neither side unmaps while the other still stores.
    stage.barrier();
}

fn operations(stage: &mut Stage) {
    let frame_bytes = stage.channel.layout().frame_bytes();
    let mut lens = vec![0, 1, 7, 8, 63, 64, 65, 4095, 4096, frame_bytes];
    lens.extend((0..20).map(|_| stage.rng.random_range(0..=frame_bytes)));
    let host = Region::anonymous(frame_bytes).unwrap();
    let device = stage.gpu.alloc(frame_bytes as u64).unwrap();
    for (round, len) in lens.into_iter().enumerate() {
        let offset = stage.rng.random_range(0..=frame_bytes - len);
        let mut expected = vec![0; len];
        stage.rng.fill_bytes(&mut expected);
        if stage.party == Party::B {
            stage.poison_local();
            stage.barrier();
            stage.barrier();
            let found = stage.local(frame_bytes);
            assert_eq!(&found[offset..offset + len], &expected, "round {round}");
            let beside = found[..offset].iter().chain(&found[offset + len..]);
            assert!(beside.clone().all(|b| *b == POISON), "round {round} wrote beside its range");
            stage.barrier();
            continue;
        }
        stage.barrier();
        // From device memory and from host memory, in two halves with a fence between them.
        let cut = if round % 2 == 0 { len } else { len / 2 };
        stage.upload(&device, &expected);
        store(&host, &expected);
        let end = stage.channel.endpoint_mut();
        for (at, part) in [(0, cut), (cut, len - cut)] {
            let to = offset + at;
            // SAFETY: neither source is written before the quiet below.
            unsafe {
                if round % 3 == 0 {
                    let dst = RemoteRange { key: SlotKey, offset: to, len: part };
                    end.put(dst, host.range(at, part).unwrap()).unwrap();
                } else {
                    end.put_device(to, device.ptr().add(at as u64), part).unwrap();
                }
            }
            end.fence().unwrap();
        }
        end.quiet(Instant::now() + LIMIT).unwrap();
        store(&host, &vec![0; len]);
        // SAFETY: `host` is read only after the quiet below.
        unsafe {
            end.get(host.range(0, len).unwrap(), RemoteRange { key: SlotKey, offset, len })
                .unwrap();
        }
        end.quiet(Instant::now() + LIMIT).unwrap();
        assert_eq!(load(&host, len), expected, "get in round {round}");
        stage.barrier();
        stage.barrier();
    }
}

fn bounds(stage: &mut Stage) {
    let slot_bytes = stage.channel.layout().slot_bytes();
    stage.poison_local();
    stage.barrier();
    if stage.party == Party::A {
        let source = Region::anonymous(4096).unwrap();
        let end = stage.channel.endpoint_mut();
        for (offset, len) in [(slot_bytes - 1, 2), (slot_bytes, 1), (usize::MAX, 1), (1 << 40, 8)] {
            let remote = RemoteRange { key: SlotKey, offset, len };
            let local = source.range(0, len).unwrap();
            // SAFETY: `source` is not touched.
            let (put, get) = unsafe { (end.put(remote, local.clone()), end.get(local, remote)) };
            assert!(matches!(put, Err(PostError::RemoteRange { .. })), "put at {offset}: {put:?}");
            assert!(matches!(get, Err(PostError::RemoteRange { .. })), "get at {offset}: {get:?}");
        }
        for offset in [slot_bytes, slot_bytes - 4, usize::MAX - 7] {
            assert!(end.add_flag(RemoteRange { key: SlotKey, offset, len: 8 }, 1).is_err());
        }
        for offset in [1, 4, slot_bytes - 9] {
            let add = end.add_flag(RemoteRange { key: SlotKey, offset, len: 8 }, 1);
            assert!(matches!(add, Err(PostError::Misaligned { .. })), "flag at {offset}: {add:?}");
        }
        end.quiet(Instant::now() + LIMIT).unwrap();
    }
    stage.barrier();
    let found = stage.local(stage.channel.layout().control_offset(PUBLISHED));
    assert!(found.iter().all(|b| *b == POISON));
    assert_eq!(stage.channel.word(PUBLISHED).unwrap(), 0);
}

fn frames_under_load(stage: &mut Stage) {
    let frame_bytes = stage.channel.layout().frame_bytes();
    let lens: Vec<usize> = (0..200).map(|_| stage.rng.random_range(0..=frame_bytes)).collect();
    let num_buffers = stage.channel.layout().num_frames();
    // A source per frame in flight: it is written again only when the peer has consumed the frame.
    let buffers: Vec<GpuBuffer> =
        (0..num_buffers).map(|_| stage.gpu.alloc(frame_bytes as u64).unwrap()).collect();
    for (seq, len) in lens.into_iter().enumerate() {
        let mut expected = vec![0; len];
        stage.rng.fill_bytes(&mut expected);
        if stage.party == Party::A {
            let frame = stage.until(|channel| channel.try_reserve().unwrap());
            assert_eq!(frame, seq as u64);
            let buffer = &buffers[seq % num_buffers];
            stage.upload(buffer, &expected);
            // SAFETY: see `buffers`.
            unsafe { stage.channel.fill(0, buffer.ptr(), len).unwrap() };
            stage.channel.publish().unwrap();
        } else {
            let frame = stage.until(|channel| channel.try_next().unwrap());
            assert_eq!(frame, seq as u64);
            let mut found = vec![0; len];
            let at = stage.channel.layout().frame_offset(frame);
            stage.channel.read_local(at, &mut found).unwrap();
            assert_eq!(found, expected, "frame {seq}");
            stage.channel.release().unwrap();
        }
    }
    // Before the buffers are freed.
    stage.channel.endpoint_mut().quiet(Instant::now() + LIMIT).unwrap();
}

fn credits(stage: &mut Stage) {
    let num_frames = stage.channel.layout().num_frames() as u64;
    if stage.party == Party::A {
        for seq in 0..num_frames {
            assert_eq!(stage.channel.try_reserve().unwrap(), Some(seq));
            stage.channel.publish().unwrap();
        }
        assert_eq!(stage.channel.try_reserve().unwrap(), None);
        assert!(stage.channel.publish().is_err());
        stage.barrier();
        stage.barrier();
        assert_eq!(stage.channel.try_reserve().unwrap(), Some(num_frames));
        stage.channel.publish().unwrap();
        assert_eq!(stage.channel.try_reserve().unwrap(), None);
        return;
    }
    stage.barrier();
    assert_eq!(stage.channel.try_next().unwrap(), Some(0));
    stage.channel.release().unwrap();
    assert!(stage.channel.release().is_err());
    stage.barrier();
}

fn desync(stage: &mut Stage) {
    let num_frames = stage.channel.layout().num_frames() as u64;
    for jump in [num_frames + 1, 1 << 40, u64::MAX / 2] {
        if stage.party == Party::A {
            let offset = stage.channel.layout().control_offset(PUBLISHED);
            let dst = RemoteRange { key: SlotKey, offset, len: 8 };
            stage.channel.endpoint_mut().add_flag(dst, jump).unwrap();
        }
        stage.barrier();
        if stage.party == Party::B {
            let error = stage.channel.try_next().unwrap_err();
            let is_desync = matches!(error, DeviceError::Channel(ChannelError::Desync(_)));
            assert!(is_desync, "{error}");
        }
        stage.barrier();
    }
}

/// Both sides sleep until woken, so a lost wake-up shows as a deadline that passes.
fn wake_ups(stage: &mut Stage) {
    let set = WaitSet::new().unwrap();
    set.add(stage.channel.wait_fd().unwrap()).unwrap();
    for _ in 0..200 {
        for sends in [stage.party == Party::A, stage.party == Party::B] {
            if sends {
                stage.sleep_until(&set, |channel| channel.try_reserve().unwrap());
                stage.channel.publish().unwrap();
            } else {
                stage.sleep_until(&set, |channel| channel.try_next().unwrap());
                stage.channel.release().unwrap();
            }
        }
    }
}

fn large_counters(stage: &mut Stage) {
    let start = (1u64 << 63) - 5;
    stage.channel.start_at(start).unwrap();
    stage.until(|channel| {
        let both = [PUBLISHED, CONSUMED].map(|word| channel.word(word).unwrap() >= start);
        (both == [true, true]).then_some(())
    });
    stage.barrier();
    for round in 0..20 {
        if stage.party == Party::A {
            let frame = stage.until(|channel| channel.try_reserve().unwrap());
            assert_eq!(frame, start + round);
            stage.channel.publish().unwrap();
        } else {
            let frame = stage.until(|channel| channel.try_next().unwrap());
            assert_eq!(frame, start + round);
            stage.channel.release().unwrap();
        }
    }
}

fn empty_frames(stage: &mut Stage) {
    let num_frames = stage.channel.layout().num_frames() as u64;
    let frame_bytes = stage.channel.layout().frame_bytes();
    stage.poison_local();
    stage.barrier();
    // Every place of the ring is used more than once.
    for seq in 0..10 + 2 * num_frames {
        if stage.party == Party::A {
            let frame = stage.until(|channel| channel.try_reserve().unwrap());
            assert_eq!(frame, seq);
            if seq % 2 == 0 {
                // SAFETY: nothing is read.
                unsafe { stage.channel.fill(0, DevicePtr::NULL, 0).unwrap() };
            }
            stage.channel.publish().unwrap();
        } else {
            let frame = stage.until(|channel| channel.try_next().unwrap());
            assert_eq!(frame, seq);
            let mut found = vec![0; frame_bytes];
            let at = stage.channel.layout().frame_offset(frame);
            stage.channel.read_local(at, &mut found).unwrap();
            assert!(found.iter().all(|b| *b == POISON), "frame {seq} brought something");
            stage.channel.release().unwrap();
        }
    }
}

impl Stage {
    /// Waits until both parties have arrived.
    fn barrier(&mut self) {
        self.channel.bump_progress().unwrap();
        self.num_barriers += 1;
        let target = self.num_barriers;
        self.until(|channel| (channel.word(PROGRESS).unwrap() >= target).then_some(()));
    }

    fn until<T>(&mut self, mut poll: impl FnMut(&mut DeviceChannel) -> Option<T>) -> T {
        let deadline = Instant::now() + LIMIT;
        loop {
            if let Some(found) = poll(&mut self.channel) {
                return found;
            }
            assert!(Instant::now() < deadline, "{:?} waited too long", self.party);
            std::thread::yield_now();
        }
    }

    fn sleep_until<T>(
        &mut self,
        set: &WaitSet,
        mut poll: impl FnMut(&mut DeviceChannel) -> Option<T>,
    ) -> T {
        let deadline = Instant::now() + LIMIT;
        loop {
            if let Some(found) = poll(&mut self.channel) {
                return found;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "{:?}: a wake-up was lost", self.party);
            set.block(left).unwrap();
        }
    }

    /// Poisons the frames of this side's slot. Only flags follow them.
    fn poison_local(&self) {
        let bytes = self.channel.layout().control_offset(PUBLISHED) as u64;
        let stream = self.gpu.stream().unwrap();
        // SAFETY: within the slot; the peer does not write at this point of a script.
        unsafe { stream.fill(self.channel.local(), POISON, bytes).unwrap() };
        stream.wait(Instant::now() + LIMIT).unwrap();
    }

    fn local(&self, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.channel.read_local(0, &mut out).unwrap();
        out
    }

    fn upload(&self, buffer: &GpuBuffer, bytes: &[u8]) {
        self.gpu.write(buffer, 0, bytes, Instant::now() + LIMIT).unwrap();
    }
}

fn configs() -> [SlotConfig; 2] {
    [
        SlotConfig { slot_bytes: 8 << 10, num_frames: 1 },
        SlotConfig { slot_bytes: 3 << 20, num_frames: 4 },
    ]
}

fn layout(config: SlotConfig) -> SlotLayout {
    SlotLayout::new(config).unwrap()
}

fn with_child(gpu: &Gpu, slot: SlotConfig, task: &str) -> (DeviceChannel, Child, ChildStdin) {
    runtime().block_on(async {
        let invitation = Invitation::open().unwrap();
        let text: Vec<String> = invitation.to_bytes().iter().map(u8::to_string).collect();
        let sizes = format!("{} {}", slot.slot_bytes, slot.num_frames);
        let mut child = test_support::child::command("other party")
            .args([text.join(","), sizes, task.to_owned()])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        stdin.flush().unwrap();
        let channel = invitation.accept(gpu, layout(slot), LIMIT).await.unwrap();
        (channel, child, stdin)
    })
}

/// The first GPU. `None`, with a skip message, if the requested one is missing.
fn first_gpu() -> Option<Gpu> {
    let kind = std::env::var("SWITCHYARD_TEST_DEVICE").unwrap_or_else(|_| "emulated".to_owned());
    if kind == "emulated" {
        return Some(Gpu::open_emulated(0).expect("a GPU in software"));
    }
    match Gpu::open(0) {
        Ok(gpu) => Some(gpu),
        Err(error) => {
            test_support::skip("gpu", &error.to_string());
            None
        }
    }
}

/// GPU with the other process's memory: one of its own, if there are two.
fn other_gpu(first: &Gpu) -> Gpu {
    match first.name() {
        DeviceName::Emulated(_) => Gpu::open_emulated(1).unwrap(),
        DeviceName::Cuda(_) if Gpu::count().unwrap() > 1 => Gpu::open(1).unwrap(),
        DeviceName::Cuda(_) => first.clone(),
    }
}

fn fresh_seed() -> u64 {
    let seed = std::env::var("SWITCHYARD_TEST_SEED")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or_else(rand::random);
    println!("seed {seed} (set SWITCHYARD_TEST_SEED to repeat)");
    seed
}

fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !condition() {
        assert!(Instant::now() < deadline, "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn store(region: &Region, bytes: &[u8]) {
    assert!(bytes.len() <= region.len());
    // SAFETY: in range, and no copy of the region is under way.
    unsafe { region.as_ptr().copy_from(std::ptr::NonNull::from(bytes).cast(), bytes.len()) };
}

fn load(region: &Region, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    assert!(len <= region.len());
    // SAFETY: as above.
    unsafe { region.as_ptr().copy_to(std::ptr::NonNull::from(&mut out[..]).cast(), len) };
    out
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}
