//! Two processes with a NIC of GPUs each. Requests reach memory that the other process publishes.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::atomic::Ordering;
use std::time::Instant;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rustix::mm::{MapFlags, ProtFlags};
use softnic_driver::gpu_nic::Backend;
use switchyard_softnic::Segment;
use switchyard_softnic::format::{
    Atomic, CE_ALWAYS, Local, Operation, Remote, Source, Syndrome, Wqe,
};

use super::world::{Gpu, MEMORY_BYTES, Model, Names};
use crate::common::raw::{bytes_of, word64};
use crate::common::{PATIENCE, fresh_seed};

const PUT_BYTES: usize = 3000;
const SLOT_BYTES: usize = 3072;
const NUM_SLOTS: usize = 16;
const FLAGS_AT: usize = MEMORY_BYTES - 64;

/// A side: its NIC, and memory that the peer writes.
struct Side {
    names: Names,
    gpu: Gpu,
    // Its memory gives keys and addresses.
    _model: Model,
}

impl Side {
    /// `shown` is for the peer. Its memory is that of process `pid` under descriptor `fd`.
    fn new(backend: Backend, seed: u64, shown: Segment, pid: u32, fd: u32) -> Option<Self> {
        let model = Model::new(false, None);
        let mapped = map(pid, fd);
        let gpu = Gpu::reaching(backend, false, seed, &model.names, shown, mapped)?;
        Some(Self { names: model.names, gpu, _model: model })
    }

    /// Puts a slot after the other, each with an add to the flags behind it.
    fn put(&mut self, seed: u64) {
        let names = self.names;
        let mut rng = SmallRng::seed_from_u64(seed);
        for at in (0..NUM_SLOTS * SLOT_BYTES).step_by(8) {
            word64(self.gpu.local.address(at)).store(rng.next_u64(), Ordering::Relaxed);
        }
        self.gpu.clear(0);
        self.gpu.start();
        let rkey = names.rkeys[0];
        for slot in 0..NUM_SLOTS {
            let at = (slot * SLOT_BYTES) as u64;
            let (address, lkey, num_bytes) = (names.local + at, names.lkey, PUT_BYTES as u32);
            let source = Source::Gather(vec![Local { address, lkey, num_bytes }]);
            let old = Local { address: names.local + FLAGS_AT as u64, lkey, num_bytes: 8 };
            let flag = Remote { address: names.remote + FLAGS_AT as u64, rkey };
            for operation in [
                Operation::Write(Remote { address: names.remote + at, rkey }, source.clone()),
                Operation::Atomic(flag, Atomic::Add8(1), old),
            ] {
                let index = self.gpu.raw.posted() as u16;
                let wqe = Wqe { qpn: names.qpn, index, flags: CE_ALWAYS, operation };
                self.gpu.raw.write(&wqe.encode().try_into().unwrap());
            }
            self.gpu.raw.ring();
        }
    }

    /// Waits for the peer's flags and checks the bytes before each.
    fn expect(&self, seed: u64) {
        let mut rng = SmallRng::seed_from_u64(seed);
        let flags = word64(self.gpu.remote.address(FLAGS_AT));
        let start = Instant::now();
        for slot in 0..NUM_SLOTS {
            while flags.load(Ordering::Acquire) <= slot as u64 {
                assert!(start.elapsed() < PATIENCE, "put {slot} did not arrive");
                std::thread::yield_now();
            }
            let expected: Vec<u8> =
                (0..SLOT_BYTES / 8).flat_map(|_| rng.next_u64().to_ne_bytes()).collect();
            let found = bytes_of(&self.gpu.remote, slot * SLOT_BYTES, PUT_BYTES);
            assert!(found == expected[..PUT_BYTES], "put {slot} is not behind its flag");
        }
    }

    /// How the requests ended, the first failure if there is any.
    fn result(&mut self) -> Result<(), Syndrome> {
        let counts = self.gpu.run();
        assert_eq!(counts.num_violations, 0, "{counts:?}");
        let mut num_completions = 0;
        while let Some(cqe) = self.gpu.raw.take() {
            cqe.status?;
            num_completions += 1;
        }
        assert_eq!(num_completions, 2 * NUM_SLOTS);
        Ok(())
    }
}

/// Memory that a process has under a descriptor, as long as this one lives.
fn map(pid: u32, fd: u32) -> u64 {
    let path = format!("/proc/{pid}/fd/{fd}");
    let file = std::fs::File::options().read(true).write(true).open(&path).expect(&path);
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping of sealed memory of this size; reached by atomics and raw copies alone.
    let ptr = unsafe {
        rustix::mm::mmap(std::ptr::null_mut(), MEMORY_BYTES, prot, MapFlags::SHARED, &file, 0)
    };
    ptr.expect(&path) as u64
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn nics_of_two_processes_put_into_each_others_memory() {
    let seed = fresh_seed();
    for backend in Backend::ALL {
        for disorder in [0, seed | 1] {
            let shown = Segment::create(MEMORY_BYTES).unwrap();
            let mut child = test_support::child::command("gpu-nic")
                .env("GPU_NIC_PEER", format!("{} {}", std::process::id(), shown.descriptor()))
                .env("GPU_NIC_BACKEND", (backend as u32).to_string())
                .env("GPU_NIC_SEEDS", format!("{seed} {disorder}"))
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
            let mut child = Killed(child);
            let pid = child.0.id();
            let mut told = |prefix: &str| {
                let line = lines.by_ref().map(Result::unwrap).find_map(|line| {
                    line.split_once(prefix).map(|(_, rest)| rest.trim().to_owned())
                });
                line.unwrap_or_else(|| panic!("the child ended without `{prefix}`"))
            };
            let fd = told("memory:");
            if fd == "none" {
                return; // without a C++ compiler, which is noted
            }
            let fd = fd.parse().unwrap();
            let Some(mut side) = Side::new(backend, disorder, shown, pid, fd) else { return };
            side.put(seed);
            side.expect(!seed);
            assert_eq!(side.result(), Ok(()));
            assert_eq!(told("result:"), "Ok(())");
            // The host must notice the end of the process and report it to the NIC.
            child.0.kill().unwrap();
            child.0.wait().unwrap();
            side.gpu.nic.set_dead(1 << side.gpu.number);
            side.put(seed);
            assert_eq!(side.result(), Err(Syndrome::RetryExceeded));
        }
    }
}

/// The other process.
pub fn child_process() {
    let numbers = |text: &str| -> Vec<u64> {
        text.split(' ').map(|number| number.parse().expect("a number")).collect()
    };
    let peer = numbers(&std::env::var("GPU_NIC_PEER").expect("a peer"));
    let seeds = numbers(&std::env::var("GPU_NIC_SEEDS").expect("seeds"));
    let is_kernel = std::env::var("GPU_NIC_BACKEND").expect("a backend") == "0";
    let backend = if is_kernel { Backend::Kernel } else { Backend::CopyEngines };
    let shown = Segment::create(MEMORY_BYTES).unwrap();
    let fd = shown.descriptor();
    let side = Side::new(backend, seeds[1], shown, peer[0] as u32, peer[1] as u32);
    let Some(mut side) = side else {
        println!("memory: none");
        return;
    };
    println!("memory: {fd}");
    side.put(!seeds[0]);
    side.expect(seeds[0]);
    println!("result: {:?}", side.result());
    // Until it is killed.
    std::thread::sleep(PATIENCE);
}
