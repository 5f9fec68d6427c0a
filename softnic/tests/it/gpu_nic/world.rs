//! Queue pairs and memory twice, with the same keys, addresses and numbers: once behind the model in Rust,
//! once behind a NIC of GPUs. So the same bytes can be posted to both.

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use rand::Rng;
use rand::rngs::SmallRng;
use softnic_driver::GpuNic;
use softnic_driver::gpu_nic::{Backend, Counts, Key, access};
use switchyard_softnic::abi::{CQ_COLLAPSED, QueueHandle};
use switchyard_softnic::format::{BLOCK_BYTES, CQE_BYTES, CQE_FILL, CqeKind, Syndrome};
use switchyard_softnic::{
    Access, Adversary, Domain, HostQueue, Keys, Nic, NicConfig, Poster, QueueSizes, Segment,
};

use crate::common::raw::{Raw, bytes_of, cqe_at, word32, word64};
use crate::common::strict;

/// Keys of this side's memory and of the peer's.
pub const MEMORY_BYTES: usize = 64 << 10;
pub const DEPTH: u32 = 128;
pub const NUM_RECEIVES: u32 = 64;

/// Memory that requests may name.
#[derive(Debug, Clone, Copy)]
pub struct Names {
    pub qpn: u32,
    pub local: u64,
    pub remote: u64,
    pub lkey: u32,
    /// A key of the same memory without write access.
    pub read_only_lkey: u32,
    /// All rights, then write, read and atomics alone.
    pub rkeys: [u32; 4],
}

const RIGHTS: [(Access, u32); 4] = [
    (Access::ALL, access::ALL_REMOTE),
    (Access::REMOTE_WRITE, access::REMOTE_WRITE),
    (Access::REMOTE_READ, access::REMOTE_READ),
    (Access::REMOTE_ATOMIC, access::REMOTE_ATOMIC),
];

/// The model in Rust between two NICs of this process.
#[derive(Debug)]
pub struct Model {
    pub client: Nic,
    pub server: Nic,
    pub raw: Raw,
    queue: HostQueue,
    peer: Poster,
    pub local: Segment,
    pub remote: Segment,
    pub names: Names,
}

impl Model {
    pub fn new(is_collapsed: bool, adversary: Option<Adversary>) -> Self {
        let mut client = Nic::new(NicConfig { adversary, ..strict() }).unwrap();
        let mut server = Nic::new(NicConfig::default()).unwrap();
        let (domain, remote_domain) = (client.alloc_domain(), server.alloc_domain());
        let sizes = QueueSizes { sq_depth: DEPTH, is_collapsed, ..QueueSizes::default() };
        let queue = HostQueue::create(&mut client, domain, sizes).unwrap();
        let sizes = QueueSizes { recv_depth: NUM_RECEIVES, ..QueueSizes::default() };
        let peer = HostQueue::create(&mut server, remote_domain, sizes).unwrap();
        let local = Segment::create(MEMORY_BYTES).unwrap();
        let remote = Segment::create(MEMORY_BYTES).unwrap();
        let Keys { lkey, address, .. } =
            client.register(domain, &local, 0, MEMORY_BYTES, Access::LOCAL_WRITE).unwrap();
        let read_only = client.register_local(domain, local.region(), Access::default()).unwrap();
        let rkeys =
            RIGHTS.map(|(access, _)| remote_key(&mut server, remote_domain, &remote, access));
        let names = Names {
            qpn: queue.qpn(),
            local: address,
            remote: remote.address(0),
            lkey,
            read_only_lkey: read_only.lkey,
            rkeys,
        };
        let raw = Raw::new(*queue.handle());
        let peer = Poster::new(peer).unwrap();
        Self { client, server, raw, queue, peer, local, remote, names }
    }

    /// Resets both sides, with this number of receives posted behind the reset.
    pub fn begin(&mut self, num_receives: u32) {
        self.queue.reset(&mut self.client).unwrap();
        self.peer.queue().reset(&mut self.server).unwrap();
        self.peer.forget();
        self.raw.forget();
        let (here, there) = (self.client.address(), self.server.address());
        self.queue.connect(&mut self.client, there, self.peer.queue().qpn()).unwrap();
        self.peer.queue().connect(&mut self.server, here, self.queue.qpn()).unwrap();
        self.peer.post_receives(num_receives);
        self.server.progress();
    }

    /// Executes the posted requests.
    pub fn run(&mut self) {
        while self.client.progress() + self.server.progress() != 0 {}
    }

    /// Immediate data and bytes that arrived.
    pub fn arrivals(&mut self) -> Vec<(u32, u32)> {
        std::iter::from_fn(|| self.peer.take_imm()).collect()
    }
}

fn remote_key(server: &mut Nic, domain: Domain, segment: &Segment, access: Access) -> u32 {
    server.register(domain, segment, 0, MEMORY_BYTES, access).unwrap().rkey
}

/// The same behind a NIC of GPUs.
#[derive(Debug)]
pub struct Gpu {
    pub nic: GpuNic,
    pub raw: Raw,
    pub number: u32,
    memory: Segment,
    pub local: Segment,
    pub remote: Segment,
}

// Offsets in the memory of the queue, behind basic blocks and completions.
const DBREC: u64 = 0;
const CQ_DBREC: u64 = 128;
const DOORBELL: u64 = 256;
const PEER_DBREC: u64 = 384;
const STATE: u64 = 512;
const SCRATCH: u64 = 1280;
const PEER_CQ: u64 = 4096;

impl Gpu {
    /// `None` without a C++ compiler, which is noted.
    pub fn new(backend: Backend, is_collapsed: bool, seed: u64, names: &Names) -> Option<Self> {
        let remote = Segment::create(MEMORY_BYTES).unwrap();
        let mapped = remote.address(0);
        Self::reaching(backend, is_collapsed, seed, names, remote, mapped)
    }

    /// Opens a NIC whose peer's memory is mapped at this address; `remote` is the memory that a peer reaches here.
    pub fn reaching(
        backend: Backend,
        is_collapsed: bool,
        seed: u64,
        names: &Names,
        remote: Segment,
        mapped: u64,
    ) -> Option<Self> {
        let Some(mut nic) = GpuNic::open(backend, seed) else {
            test_support::skip("cxx", "there is no C++ compiler: install g++");
            return None;
        };
        let cq_depth = if is_collapsed { 1 } else { DEPTH };
        let cq = DEPTH as usize * BLOCK_BYTES;
        let words = (cq + cq_depth as usize * CQE_BYTES).next_multiple_of(4096);
        let num_bytes = words + PEER_CQ as usize + NUM_RECEIVES as usize * CQE_BYTES;
        let memory = Segment::create(num_bytes).unwrap();
        let at = |offset: u64| memory.address(words) + offset;
        let handle = QueueHandle {
            sq: memory.address(0),
            cq: memory.address(cq),
            dbrec: at(DBREC),
            cq_dbrec: at(CQ_DBREC),
            doorbell: at(DOORBELL),
            state: at(STATE),
            scratch: at(SCRATCH),
            host_error: 0,
            scratch_lkey: 0x7f_0000,
            qpn: names.qpn,
            sq_depth: DEPTH,
            cq_depth,
            flags: if is_collapsed { CQ_COLLAPSED } else { 0 },
            batch: DEPTH / 4,
            max_message_bytes: 1 << 20,
            peer: 5,
        };
        let peer = QueueHandle {
            dbrec: at(PEER_DBREC),
            cq: at(PEER_CQ),
            cq_depth: NUM_RECEIVES,
            qpn: 0x61,
            ..handle
        };
        let local = Segment::create(MEMORY_BYTES).unwrap();
        let key = |key, address, num_bytes: usize, mapped, access| Key {
            key,
            address,
            num_bytes: num_bytes as u64,
            mapped,
            access,
        };
        let all = MEMORY_BYTES;
        let mut keys = vec![
            key(
                names.lkey,
                names.local,
                all,
                local.address(0),
                access::LOCAL | access::LOCAL_WRITE,
            ),
            key(names.read_only_lkey, names.local, all, local.address(0), access::LOCAL),
            key(
                handle.scratch_lkey,
                handle.scratch,
                8,
                handle.scratch,
                access::LOCAL | access::LOCAL_WRITE,
            ),
        ];
        for (rkey, (_, rights)) in names.rkeys.into_iter().zip(RIGHTS) {
            keys.push(key(rkey, names.remote, all, mapped, rights));
        }
        // SAFETY: segments and queue memory live as long as the NIC beside them, which is dropped first.
        let number = unsafe {
            keys.iter().for_each(|key| nic.add_key(key));
            let number = nic.add_queue(std::ptr::from_ref(&handle).cast());
            nic.set_receiver(number, std::ptr::from_ref(&peer).cast());
            number
        };
        let mut gpu = Self { nic, raw: Raw::new(handle), number, memory, local, remote };
        gpu.clear(0);
        Some(gpu)
    }

    pub const fn handle(&self) -> *const c_void {
        std::ptr::from_ref(&self.raw.handle).cast()
    }

    /// Starts anew, as after an error: all memory of the queue is fresh, and this number of receives is posted.
    pub fn clear(&mut self, num_receives: u32) {
        self.raw.forget();
        let (cq, words) = (self.raw.handle.cq, self.raw.handle.dbrec);
        let end = self.memory.address(0) + self.memory.region().len() as u64;
        let fill = u64::from_ne_bytes([CQE_FILL; 8]);
        for address in (cq..end).step_by(8) {
            let is_words = (words..words + PEER_CQ).contains(&address);
            word64(address).store(if is_words { 0 } else { fill }, Ordering::Relaxed);
        }
        word32(words + PEER_DBREC).store(num_receives.to_be(), Ordering::Release);
    }

    /// Starts polling for requests.
    pub fn start(&mut self) {
        self.nic.start(true);
    }

    /// Executes the posted requests, then stops.
    pub fn run(&mut self) -> Counts {
        self.nic.stop()
    }

    /// Returns immediate data and bytes that arrived since the start, and the number of flushed receives. Of the
    /// posted receives that are left, all or none are flushed.
    pub fn arrivals(&self, num_receives: u32) -> (Vec<(u32, u32)>, usize) {
        let first = self.raw.handle.dbrec + PEER_CQ;
        let (mut found, mut num_flushed) = (Vec::new(), 0);
        for i in 0..u64::from(NUM_RECEIVES) {
            let Some(cqe) = cqe_at(first + i * CQE_BYTES as u64, Some(false)) else { break };
            assert_eq!((cqe.qpn, u64::from(cqe.counter)), (0x61, i));
            match cqe.status {
                Ok(CqeKind::WriteImm(imm)) if num_flushed == 0 => found.push((imm, cqe.num_bytes)),
                Err(Syndrome::Flushed) => num_flushed += 1,
                _ => panic!("{cqe:?} of a receive behind {num_flushed} that were flushed"),
            }
        }
        assert!(num_flushed == 0 || found.len() + num_flushed == num_receives as usize);
        (found, num_flushed)
    }
}

/// Fills both with the same.
pub fn fill_alike(rng: &mut SmallRng, a: &Segment, b: &Segment) {
    for at in (0..MEMORY_BYTES).step_by(8) {
        let value = rng.next_u64();
        word64(a.address(at)).store(value, Ordering::Relaxed);
        word64(b.address(at)).store(value, Ordering::Relaxed);
    }
}

/// Fails at the first byte in which they differ.
pub fn expect_alike(what: &str, a: &Segment, b: &Segment) {
    let (a, b) = (bytes_of(a, 0, MEMORY_BYTES), bytes_of(b, 0, MEMORY_BYTES));
    if let Some(at) = a.iter().zip(&b).position(|(a, b)| a != b) {
        panic!("{what} differs at byte {at}: {:#x} in Rust, {:#x} in C++", a[at], b[at]);
    }
}
