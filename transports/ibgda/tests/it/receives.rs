//! Queues with receives, against the stand-in of `mock/mlx5.c`: the state that a NIC finds when it begins to
//! receive, and the decoding of completions that the vendor's header encodes.

use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::mock::{CLEAN, Completion, Mock, MockState, PATHS, join, rejoin};
use kernels::mlx5::ReceiveHandle;
use switchyard_ibgda::access::{
    AccessError, HostRange, Mapping, NoDescriptor, SharedMemory, Space,
};
use switchyard_ibgda::queue::check_receives;
use switchyard_ibgda::{
    Access, HostAccess, Immediate, Nic, OpenPeer, Peer, PeerConfig, QueueConfig, QueuePath,
    ReceiveError,
};

/// Receives of each queue: not a power of two.
const NUM_RECEIVES: u32 = 5;
/// `MLX5_CQE_*`
const WRITE_IMM: u32 = 1;
const ERROR: u32 = 14;

fn config(path: QueuePath, num_receives: u32) -> PeerConfig {
    PeerConfig {
        peer: 3,
        num_queues: 2,
        queue: QueueConfig { path, depth: 128, num_receives, ..QueueConfig::default() },
        own_slot_bytes: 4096,
        peer_slot_bytes: 4096,
    }
}

fn pair(nic: &Arc<Nic>, path: QueuePath, num_receives: u32) -> [Peer; 2] {
    pair_in(&(Arc::new(HostAccess) as Arc<dyn Access>), nic, path, num_receives)
}

fn pair_in(
    access: &Arc<dyn Access>,
    nic: &Arc<Nic>,
    path: QueuePath,
    num_receives: u32,
) -> [Peer; 2] {
    let open = || OpenPeer::open(nic, access, config(path, num_receives)).unwrap();
    join(open(), open())
}

/// Memory that this process reaches by copies alone, as a GPU's.
#[derive(Debug, Default)]
struct HiddenAccess {
    num_copies: Arc<AtomicU64>,
}

#[derive(Debug)]
struct HiddenMemory {
    memory: Box<dyn SharedMemory>,
    num_copies: Arc<AtomicU64>,
}

impl Access for HiddenAccess {
    fn space(&self) -> Space {
        HostAccess.space()
    }

    fn alloc(&self, bytes: usize) -> Result<Box<dyn SharedMemory>, AccessError> {
        let num_copies = Arc::clone(&self.num_copies);
        Ok(Box::new(HiddenMemory { memory: HostAccess.alloc(bytes)?, num_copies }))
    }

    unsafe fn map(
        &self,
        pages: NonNull<u8>,
        bytes: usize,
        kind: HostRange,
    ) -> Result<Mapping, AccessError> {
        // SAFETY: the caller's promise.
        unsafe { HostAccess.map(pages, bytes, kind) }
    }
}

impl SharedMemory for HiddenMemory {
    fn address(&self) -> u64 {
        self.memory.address()
    }
    fn bytes(&self) -> usize {
        self.memory.bytes()
    }
    fn is_on_gpu(&self) -> bool {
        false
    }
    fn dma_buf(&self) -> Result<(BorrowedFd<'_>, u64), NoDescriptor> {
        Err(NoDescriptor::Host)
    }
    fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), AccessError> {
        self.num_copies.fetch_add(1, Ordering::Relaxed);
        self.memory.write(offset, bytes)
    }
    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), AccessError> {
        self.num_copies.fetch_add(1, Ordering::Relaxed);
        self.memory.read(offset, bytes)
    }
}

/// A big-endian word of a queue.
fn word(address: u64) -> u32 {
    let word = ptr::with_exposed_provenance::<u32>(usize::try_from(address).unwrap());
    // SAFETY: a record of a live queue, without a writer at this time.
    u32::from_be(unsafe { word.read_volatile() })
}

/// A good completion of the `number`th receive since the queue was connected.
fn good(handle: &ReceiveHandle, number: u64) -> Completion {
    Completion {
        qpn: handle.qpn,
        named_qpn: handle.qpn,
        opcode: WRITE_IMM,
        counter: u32::try_from(number & 0xffff).unwrap(),
        imm: u32::try_from(number).unwrap().wrapping_mul(0x9e37_79b9),
        num_bytes: u32::try_from(number % 4096).unwrap(),
        syndrome: 0,
    }
}

fn expected(cqe: &Completion) -> Immediate {
    Immediate { qpn: cqe.qpn, imm: cqe.imm, num_bytes: cqe.num_bytes }
}

#[test]
fn receives_are_posted_before_a_queue_pair_is_ready_to_receive() {
    let Some(mock) = Mock::open() else { return };
    for path in PATHS {
        for (num_receives, rq_depth, entries) in
            [(1, 4, [2, 4]), (4, 4, [8, 4]), (5, 8, [8, 8]), (128, 128, [256, 128])]
        {
            mock.change(|state| *state = CLEAN);
            let nic = mock.nic();
            let mut peers = pair(&nic, path, num_receives);
            for round in 0..2 {
                for queue in peers.iter().flat_map(Peer::queues) {
                    let (handle, made) = (queue.receives().unwrap(), mock.queue(queue.qpn()));
                    // The stand-in compared every receive with the vendor's segment.
                    assert_eq!((made.state, made.num_receives), (3, num_receives), "{round}");
                    assert_eq!(made.rq_depth, rq_depth);
                    assert_eq!(handle.dbrec, made.dbrec);
                    assert_eq!(
                        (handle.cq, handle.cq_dbrec),
                        (made.recv_cq, made.recv_cq_dbrec),
                        "{path:?}"
                    );
                    let cq_depth = entries[usize::from(path == QueuePath::Devx)];
                    assert_eq!((handle.cq_depth, made.recv_cq_depth), (cq_depth, cq_depth));
                    assert_eq!((handle.num_receives, handle.peer), (num_receives, 3));
                    assert_eq!(check_receives(&handle), None);
                    // Completions of requests are elsewhere.
                    assert_ne!(handle.cq, queue.handle().cq);
                    assert_ne!(handle.cq_dbrec, queue.handle().cq_dbrec);
                    assert_eq!(queue.handle().sq, made.sq);
                    assert_eq!(queue.receive(Duration::ZERO), Ok(None));
                }
                peers = rejoin(peers);
            }
            drop((peers, nic));
            mock.settle();
        }
        // As before, without.
        mock.change(|state| *state = CLEAN);
        let nic = mock.nic();
        let peers = pair(&nic, path, 0);
        for queue in peers.iter().flat_map(Peer::queues) {
            let qpn = queue.qpn();
            assert_eq!(queue.receives(), None);
            assert_eq!((mock.queue(qpn).rq, mock.queue(qpn).recv_cq), (0, 0));
            let refused = Err(ReceiveError::NoReceives { qpn });
            assert_eq!(queue.receive(Duration::ZERO), refused);
        }
        drop((peers, nic));
        mock.settle();
    }
}

#[test]
fn every_completion_is_taken_once_through_many_wraps() {
    let Some(mock) = Mock::open() else { return };
    mock.on_both_paths(|path, nic| {
        let [one, _other] = pair(nic, path, NUM_RECEIVES);
        let queue = &one.queues()[1];
        let handle = queue.receives().unwrap();
        // The ring has 8 or 16 entries, the record of receives 16 bits.
        let mut number = 0;
        while number < 70_000 {
            let num = number % u64::from(NUM_RECEIVES) + 1;
            let sent: Vec<Completion> =
                (number..number + num).map(|at| good(&handle, at)).collect();
            sent.iter().for_each(|cqe| mock.complete(*cqe));
            for cqe in &sent {
                assert_eq!(one.receive(Duration::ZERO), Ok(Some(expected(cqe))), "{number}");
                number += 1;
                assert_eq!(u64::from(word(handle.cq_dbrec)), number & 0xff_ffff);
                let posted = (number + u64::from(NUM_RECEIVES)) & 0xffff;
                assert_eq!(u64::from(word(handle.dbrec)), posted);
            }
            // Entries left in the ring are of the round before.
            assert_eq!(one.receive(Duration::ZERO), Ok(None), "{number}");
        }
    });
}

#[test]
fn whoever_waits_finds_all_queues_and_comes_back() {
    let Some(mock) = Mock::open() else { return };
    mock.change(|state| *state = CLEAN);
    let nic = mock.nic();
    let [one, other] = pair(&nic, QueuePath::Plain, NUM_RECEIVES);
    let handles: Vec<ReceiveHandle> =
        one.queues().iter().map(|queue| queue.receives().unwrap()).collect();
    // A queue that is never empty does not keep the other one waiting.
    for number in 0..3 {
        mock.complete(good(&handles[0], number));
    }
    mock.complete(good(&handles[1], 0));
    let taken: Vec<u32> =
        (0..4).map(|_| one.receive(Duration::ZERO).unwrap().unwrap().qpn).collect();
    let [first, second] = [handles[0].qpn, handles[1].qpn];
    assert_eq!(taken, [first, second, first, first]);
    let (begin, timeout) = (Instant::now(), Duration::from_millis(30));
    assert_eq!(one.receive(timeout), Ok(None));
    assert!(begin.elapsed() >= timeout);
    let later = good(&handles[1], 1);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| one.receive(Duration::from_secs(60)));
        std::thread::sleep(Duration::from_millis(5));
        mock.complete(later);
        assert_eq!(waiting.join().unwrap(), Ok(Some(expected(&later))));
    });
    drop((one, other, nic));
    mock.settle();
}

#[test]
fn errors_have_their_syndrome_and_a_reset_mends_them() {
    let Some(mock) = Mock::open() else { return };
    type Spoil = fn(&mut Completion);
    let failed = |syndrome: u8| {
        move |qpn, index| ReceiveError::Completion { qpn, syndrome, vendor: 0x59, index }
    };
    let cases: [(&str, Spoil); 5] = [
        ("flushed", |cqe| (cqe.opcode, cqe.syndrome) = (ERROR, 5)),
        ("length", |cqe| (cqe.opcode, cqe.syndrome) = (ERROR, 1)),
        ("another queue pair", |cqe| cqe.named_qpn += 1),
        ("another receive", |cqe| cqe.counter ^= 1),
        ("a message", |cqe| cqe.opcode = 2),
    ];
    mock.on_both_paths(|path, nic| {
        let mut peers = pair(nic, path, NUM_RECEIVES);
        let handle = peers[0].queues()[0].receives().unwrap();
        // Every round ends at another place of the ring, with some completions that were not taken.
        for round in 0..40_u64 {
            for (what, spoil) in cases {
                let queue = &peers[0].queues()[0];
                let num_good = round % 4;
                for number in 0..num_good {
                    mock.complete(good(&handle, number));
                    let taken = queue.receive(Duration::ZERO);
                    assert_eq!(taken, Ok(Some(expected(&good(&handle, number)))), "{what} {round}");
                }
                let mut bad = good(&handle, num_good);
                spoil(&mut bad);
                mock.complete(bad);
                mock.complete(good(&handle, num_good + 1));
                let index = u16::try_from(bad.counter).unwrap();
                let qpn = handle.qpn;
                let expected = match what {
                    "flushed" => failed(5)(qpn, index),
                    "length" => failed(1)(qpn, index),
                    _ => ReceiveError::Desync {
                        qpn,
                        opcode: u8::try_from(bad.opcode).unwrap(),
                        index,
                    },
                };
                // Now and for ever, until the reset; nothing is given back meanwhile.
                let records = (word(handle.cq_dbrec), word(handle.dbrec));
                for _ in 0..2 {
                    assert_eq!(queue.receive(Duration::ZERO), Err(expected), "{what} {round}");
                }
                assert_eq!((word(handle.cq_dbrec), word(handle.dbrec)), records);
                let text = expected.to_string();
                assert!(text.contains(&format!("queue pair {qpn:#x}")), "{text}");

                let num_completions = mock.queue(qpn).num_completions;
                peers = rejoin(peers);
                assert_eq!(peers[0].queues()[0].receives(), Some(handle), "kernels keep theirs");
                assert_eq!(u64::from(word(handle.cq_dbrec)), num_completions, "all given back");
                assert_eq!(word(handle.dbrec), NUM_RECEIVES);
                assert_eq!(mock.queue(qpn).num_receives, NUM_RECEIVES);
                assert_eq!(peers[0].receive(Duration::ZERO), Ok(None), "{what} {round}");
            }
        }
    });
}

#[test]
fn receives_in_a_gpus_memory_are_posted_and_reset_by_copies() {
    let Some(mock) = Mock::open() else { return };
    mock.on_both_paths(|path, nic| {
        let access: Arc<dyn Access> = Arc::new(HiddenAccess::default());
        let mut peers = pair_in(&access, nic, path, NUM_RECEIVES);
        for round in 1..8 {
            let queue = &peers[0].queues()[0];
            let (qpn, handle) = (queue.qpn(), queue.receives().unwrap());
            assert_eq!(mock.queue(qpn).num_receives, NUM_RECEIVES, "{path:?} {round}");
            // Kernels take from it: threads cannot.
            for number in 0..3 {
                mock.complete(good(&handle, number));
            }
            let refused = queue.receive(Duration::ZERO);
            assert_eq!(refused, Err(ReceiveError::Unreachable { qpn }));
            peers = rejoin(peers);
            assert_eq!(word(handle.cq_dbrec), 3 * round, "{path:?}");
            assert_eq!(word(handle.dbrec), NUM_RECEIVES);
        }
    });
}

/// Each copy to a GPU's memory is waited for.
#[test]
fn many_receives_take_no_more_copies_than_one() {
    let Some(mock) = Mock::open() else { return };
    for path in PATHS {
        let [few, many] = [1, 32_768].map(|num_receives| {
            mock.change(|state| *state = CLEAN);
            let (nic, hidden) = (mock.nic(), HiddenAccess::default());
            let num_copies = Arc::clone(&hidden.num_copies);
            let access: Arc<dyn Access> = Arc::new(hidden);
            let peers = pair_in(&access, &nic, path, num_receives);
            let queue = &peers[0].queues()[0];
            let found = mock.queue(queue.qpn());
            assert_eq!(found.num_receives, num_receives & 0xffff, "{path:?}");
            for number in [0, num_receives - 1] {
                // An empty segment ends a list: no bytes, `MLX5_INVALID_LKEY`.
                let address = found.rq + u64::from(number * found.rq_stride);
                let segment = [0, 4, 8, 12].map(|at| word(address + at));
                assert_eq!(segment, [0, 0x100, 0, 0], "{path:?}, receive {number}");
            }
            drop((peers, access, nic));
            mock.settle();
            num_copies.load(Ordering::Relaxed)
        });
        assert_eq!(many, few, "{path:?}");
    }
}

/// As after a failure, which flushes all receives.
#[test]
fn many_completions_take_a_reset_few_copies() {
    let Some(mock) = Mock::open() else { return };
    mock.on_both_paths(|path, nic| {
        let hidden = HiddenAccess::default();
        let num_copies = Arc::clone(&hidden.num_copies);
        let access: Arc<dyn Access> = Arc::new(hidden);
        let num_receives = 8192;
        let mut peers = pair_in(&access, nic, path, num_receives);
        let handle = peers[0].queues()[0].receives().unwrap();
        let mut num_in_all = 0;
        // Each begins at another place of the ring: full, empty, up to the last of a copy.
        for num in [num_receives, 0, 1000, 2048, num_receives] {
            (0..num).for_each(|number| mock.complete(good(&handle, u64::from(number))));
            let before = num_copies.load(Ordering::Relaxed);
            peers = rejoin(peers);
            let copies = num_copies.load(Ordering::Relaxed) - before;
            assert!(copies < 200, "{path:?}: {copies} copies for {num} completions");
            num_in_all += num;
            assert_eq!(word(handle.cq_dbrec), num_in_all, "{path:?}");
        }
    });
}

#[test]
fn whatever_fails_nothing_is_left_behind() {
    let Some(mock) = Mock::open() else { return };
    let access: Arc<dyn Access> = Arc::new(HostAccess);
    for path in PATHS {
        let mut num_errors = [0; 2];
        for (num_receives, num_errors) in [0, NUM_RECEIVES].into_iter().zip(&mut num_errors) {
            for num_failures in 0.. {
                mock.change(|state| *state = CLEAN);
                let nic = mock.nic();
                let open = || OpenPeer::open(&nic, &access, config(path, num_receives));
                let other = open().unwrap();
                mock.change(|state| state.num_failures = num_failures);
                let made = open().and_then(|one| one.join(&other.description()));
                let left = mock.get().num_failures;
                mock.change(|state| state.num_failures = -1);
                let is_over = made.is_ok() && left > 0;
                *num_errors += u32::from(made.is_err());
                if let Err(error) = &made {
                    let text = error.to_string();
                    assert!(text.contains("ibv_") || text.contains("mlx5"), "{text}");
                }
                drop((made, other, nic));
                mock.settle();
                if is_over {
                    break;
                }
                assert!(num_failures < 200, "never succeeds");
            }
        }
        // For each of two queues one more completion queue, and by verbs one more query of its pieces.
        let more = if path == QueuePath::Plain { 4 } else { 2 };
        assert_eq!(num_errors[1], num_errors[0] + more, "{path:?}: {num_errors:?}");
    }
}

/// After a reset that fails, too.
#[test]
fn a_reset_that_fails_frees_everything() {
    let Some(mock) = Mock::open() else { return };
    mock.on_both_paths(|path, nic| {
        let [one, _other] = pair(nic, path, NUM_RECEIVES);
        mock.change(|state| match path {
            QueuePath::Plain => state.num_failures = 1,
            QueuePath::Devx => state.firmware_status = 9,
        });
        assert!(one.reset().is_err());
        mock.change(|state| (state.num_failures, state.firmware_status) = (-1, 0));
    });
}

#[test]
fn receives_that_no_queue_can_have_are_refused() {
    let Some(mock) = Mock::open() else { return };
    mock.change(|state| *state = CLEAN);
    let nic = mock.nic();
    let num_live = mock.get().num_live;
    let access: Arc<dyn Access> = Arc::new(HostAccess);
    let refuse = |path, num_receives| {
        let text = OpenPeer::open(&nic, &access, config(path, num_receives)).unwrap_err();
        assert_eq!(mock.get().num_live, num_live);
        text.to_string()
    };
    for path in PATHS {
        let text = refuse(path, 32_769);
        assert!(text.contains("`num_receives` is 32769, expected from 0 to 32768"), "{text}");
    }
    mock.change(|state| state.rq_stride = 24);
    let text = refuse(QueuePath::Plain, 8);
    assert!(text.contains("libmlx5 made a queue with rq.stride 24, expected a multiple"), "{text}");
    // A feature that was not requested does not matter.
    mock.change(|state| state.rq_stride = 32);
    OpenPeer::open(&nic, &access, config(QueuePath::Plain, 0)).unwrap();
    // Receives may lie further apart, as those with a signature do.
    let peers = pair(&nic, QueuePath::Plain, 8);
    assert_eq!(mock.queue(peers[0].queues()[0].qpn()).rq_stride, 32);
    drop((peers, nic));
    mock.change(|state| *state = MockState { log_max_blocks: 7, ..*state });
    let nic = mock.nic();
    let refused = OpenPeer::open(&nic, &access, config(QueuePath::Devx, 129));
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("log_max_qp_sz is 7"), "{text}");
    drop(nic);
    mock.settle();
}
