//! Invalid bytes in requests, in queues and in the tables that peers publish. The NIC may refuse them, and must
//! continue.

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::Instant;

use crate::common::{PATIENCE, Rig, RigConfig, Wait, fresh_seed, status, strict};
use rand::rngs::SmallRng;
use rand::{Rng, RngExt, SeedableRng};
use switchyard_softnic::format::{Cqe, Wqe};
use switchyard_softnic::memory::Segment;
use switchyard_softnic::{
    Access, ControlError, DoorbellMode, HostQueue, Nic, NicConfig, Poster, QpState, QueueError,
    QueueSizes, Violation,
};

/// Limit of recorded violations.
const MAX_VIOLATIONS: usize = 1000;

/// A request that can be read equals the one that was written.
#[test]
fn random_bytes_are_read_or_refused() {
    let mut rng = SmallRng::seed_from_u64(fresh_seed());
    let (mut num_read, opcodes) = (0, [0x00, 0x08, 0x09, 0x10, 0x11, 0x12, 0x14, 0x15, 0x23]);
    for _ in 0..200_000 {
        let num_segments = rng.random_range(0..=63);
        let mut bytes = vec![0; num_segments * 16];
        rng.fill_bytes(&mut bytes);
        if num_segments > 0 && rng.random_ratio(9, 10) {
            // Mostly plausible, so that all of the decoder is reached.
            bytes[0] = [0, 0, 8, 9][rng.random_range(0..4)];
            bytes[3] = opcodes[rng.random_range(0..opcodes.len())];
            bytes[7] = num_segments as u8;
            bytes[8..11].fill(0);
            bytes[11] &= 0xee;
            if num_segments > 1 {
                bytes[28..32].fill(0);
            }
            for segment in 2..num_segments {
                bytes[segment * 16] &= 0x7f;
            }
            if num_segments > 2 && rng.random() {
                let room = (num_segments as u32 - 2) * 16 - 4;
                let len = room.saturating_sub(rng.random_range(0..16));
                bytes[32..36].copy_from_slice(&(len | 1 << 31).to_be_bytes());
            }
        }
        if let Ok(wqe) = Wqe::decode(&bytes) {
            num_read += 1;
            // Bytes that a request does not use may differ, so the test compares the meaning.
            let again = wqe.encode();
            let num_segments = (again[7] & 0x3f) as usize;
            assert_eq!(Wqe::decode(&again[..num_segments * 16]), Ok(wqe));
        }
        let mut cqe = [0; 64];
        rng.fill_bytes(&mut cqe);
        let _ = Cqe::decode(&cqe);
    }
    println!("{num_read} were read");
    assert!(num_read > 1000);
}

/// A queue full of noise, with doorbells that say anything: the queue pair fails, the NIC does not.
#[test]
fn noise_in_a_queue_takes_that_queue_out_of_service_and_no_other() {
    let mut rng = SmallRng::seed_from_u64(fresh_seed());
    for doorbell in [DoorbellMode::Register, DoorbellMode::Checked, DoorbellMode::Record] {
        let Some(rig) =
            Rig::new(RigConfig { nic: NicConfig { doorbell, ..strict() }, ..RigConfig::default() })
        else {
            return;
        };
        let (mut neighbour, far) = {
            let (mut client, mut server) = (rig.client.lock(), rig.server.lock());
            let near = HostQueue::create(&mut client, rig.domain, QueueSizes::default()).unwrap();
            let far =
                HostQueue::create(&mut server, rig.remote_domain, QueueSizes::default()).unwrap();
            let (here, there) = (client.address(), server.address());
            near.connect(&mut client, there, far.qpn()).unwrap();
            far.connect(&mut server, here, near.qpn()).unwrap();
            (Poster::new(near).unwrap(), far)
        };
        for _ in 0..200 {
            let handle = rig.queue.handle();
            for (address, len) in [
                (handle.sq, 128 * 64),
                (handle.dbrec, 8),
                (handle.cq_dbrec, 8),
                (handle.doorbell, 8),
            ] {
                for at in 0..len {
                    // SAFETY: memory of the queue, which lives; atomics, since the NIC reads it.
                    let byte = unsafe { AtomicU8::from_ptr((address as *mut u8).add(at)) };
                    byte.store(rng.random(), Ordering::Relaxed);
                }
            }
            // Sometimes with the right queue pair, so that the noise is executed.
            if rng.random() {
                let word = switchyard_softnic::format::doorbell_word(handle.qpn, rng.next_u64());
                common_word(handle.doorbell).store(word, Ordering::Release);
            }
            for _ in 0..4 {
                rig.client.lock().progress();
            }
            if rig.client.lock().qp_state(handle.qpn).unwrap() == QpState::Error && rng.random() {
                rig.recover();
            }
        }
        let deadline = Instant::now() + PATIENCE;
        let operation = switchyard_softnic::format::Operation::Nop;
        neighbour.post(operation, 0, deadline, || {}).unwrap();
        neighbour.quiet(deadline, std::thread::yield_now).unwrap();
        rig.recover();
        let wait = Wait::patient();
        assert_eq!(rig.signal(0, 42, &wait), status::OK);
        assert_eq!(rig.quiet(&wait), status::OK);
        assert_eq!(rig.target_word(0).load(Ordering::Acquire), 42);
        drop(far);
    }
}

/// A consumer that never returns an entry, and a doorbell that keeps ringing: each flush finds the ring of
/// completions full. The NIC records a bounded number of these violations.
#[test]
fn a_ring_of_completions_that_stays_full_is_noted_so_many_times_and_no_more() {
    let sizes = QueueSizes { is_collapsed: false, ..QueueSizes::default() };
    let Some(rig) = Rig::new(RigConfig { sizes, ..RigConfig::default() }) else { return };
    let handle = *rig.queue.handle();
    let wait = Wait::patient();
    for _ in 0..handle.sq_depth / 32 {
        assert_eq!(rig.signal_words(0, 1, 32, &wait), status::OK);
    }
    assert_eq!(rig.quiet(&wait), status::OK, "{:?}", wait.error());
    // One round of the ring before the consumed entries.
    let consumed = 0u32.wrapping_sub(handle.cq_depth) & 0xff_ffff;
    // SAFETY: the record of a queue that lives; the NIC reads it with atomics.
    let record = unsafe { AtomicU32::from_ptr(handle.cq_dbrec as *mut u32) };
    let num_completions = handle.sq_depth / 32;
    record.store((consumed + num_completions).to_be(), Ordering::Release);
    for end in 1..=3 * MAX_VIOLATIONS {
        let end = u64::from(handle.sq_depth) + end as u64;
        let word = switchyard_softnic::format::doorbell_word(handle.qpn, end);
        common_word(handle.doorbell).store(word, Ordering::Release);
        rig.client.lock().progress();
    }
    let client = rig.client.lock();
    let overruns = client
        .violations()
        .iter()
        .filter(|found| matches!(found, Violation::CompletionOverrun { .. }))
        .count();
    assert!(overruns > 0, "{:?}", client.violations().first());
    assert_eq!(client.violations().len(), MAX_VIOLATIONS);
}

/// A peer that writes noise over its own tables gets errors and reaches no memory of others: every range is
/// checked against its mapping.
#[test]
fn noise_in_a_peers_tables_leads_nowhere() {
    let mut rng = SmallRng::seed_from_u64(fresh_seed());
    let mut client = Nic::new(strict()).unwrap();
    let domain = client.alloc_domain();
    let source = Segment::create(4096).unwrap();
    let keys = client.register(domain, &source, 0, 4096, Access::ALL).unwrap();
    let mut num_errors = 0;
    for _ in 0..60 {
        let mut server = Nic::new(NicConfig::default()).unwrap();
        let remote_domain = server.alloc_domain();
        let target = Segment::create(4096).unwrap();
        let target_keys = server.register(remote_domain, &target, 0, 4096, Access::ALL).unwrap();
        let near = HostQueue::create(&mut client, domain, QueueSizes::default()).unwrap();
        let far = HostQueue::create(&mut server, remote_domain, QueueSizes::default()).unwrap();
        near.connect(&mut client, server.address(), far.qpn()).unwrap();
        far.connect(&mut server, client.address(), near.qpn()).unwrap();
        let tables = tables_of(&server);
        let mut poster = Poster::new(near).unwrap();
        for _ in 0..20 {
            // The part with segments and keys, where addresses and lengths stand.
            for _ in 0..rng.random_range(1..400) {
                let at = rng.random_range(24..40_000);
                tables[at].store(rng.random(), Ordering::Relaxed);
            }
            let local = switchyard_softnic::format::Local {
                address: keys.address,
                lkey: keys.lkey,
                num_bytes: rng.random_range(1..=4096),
            };
            let remote = switchyard_softnic::format::Remote {
                address: target_keys.address.wrapping_add(rng.random_range(0..5000)),
                rkey: target_keys.rkey,
            };
            let operation = if rng.random() {
                switchyard_softnic::format::Operation::Read(remote, vec![local])
            } else {
                let source = switchyard_softnic::format::Source::Gather(vec![local]);
                switchyard_softnic::format::Operation::Write(remote, source)
            };
            let deadline = Instant::now() + PATIENCE;
            let posted = poster.post(operation, 0, deadline, || {});
            client.progress();
            match posted.and_then(|()| {
                poster.quiet(deadline, || {
                    client.progress();
                })
            }) {
                Ok(()) => {}
                Err(QueueError::Completion { .. }) => {
                    num_errors += 1;
                    break;
                }
                Err(error) => panic!("{error}"),
            }
        }
        poster.into_queue().destroy(&mut client).unwrap();
    }
    println!("{num_errors} of 60 peers were refused");
    assert!(num_errors > 0);
}

/// The tables of a NIC as its owner can write them.
fn tables_of(nic: &Nic) -> &'static [AtomicU8] {
    use std::os::fd::AsRawFd as _;
    let address = nic.address();
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(format!("/proc/self/fd/{}", address.fd))
        .unwrap();
    let len = file.metadata().unwrap().len() as usize;
    assert!(file.as_raw_fd() >= 0 && len > 40_000);
    let prot = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
    let flags = rustix::mm::MapFlags::SHARED;
    // SAFETY: a fresh mapping that is never unmapped; every access to it is atomic.
    unsafe {
        let mapped = rustix::mm::mmap(std::ptr::null_mut(), len, prot, flags, &file, 0).unwrap();
        std::slice::from_raw_parts(mapped.cast::<AtomicU8>(), len)
    }
}

fn common_word(address: u64) -> &'static std::sync::atomic::AtomicU64 {
    // SAFETY: an aligned word of a queue that lives longer than the use.
    unsafe { std::sync::atomic::AtomicU64::from_ptr(address as *mut u64) }
}

/// A failed creation leaves nothing behind. A completion queue cannot be destroyed while a queue pair reports to
/// it.
#[test]
fn full_tables_are_not_used_up_by_attempts() {
    let mut nic = Nic::new(strict()).unwrap();
    let domain = nic.alloc_domain();
    let sizes = QueueSizes { recv_depth: 16, ..QueueSizes::default() };
    let mut queues = Vec::new();
    let full = loop {
        match HostQueue::create(&mut nic, domain, sizes) {
            Ok(queue) => queues.push(queue),
            Err(error) => break error,
        }
    };
    assert!(matches!(full, ControlError::Full { .. }), "{full}");
    // More than there are keys, or completion queues.
    for _ in 0..3000 {
        let error = HostQueue::create(&mut nic, domain, sizes).unwrap_err();
        assert_eq!(error.to_string(), full.to_string());
    }
    queues.pop().unwrap().destroy(&mut nic).unwrap();
    let queue = HostQueue::create(&mut nic, domain, sizes).unwrap();
    // Numbers are given lowest first, so the first completion queue is the first pair's.
    let error = nic.destroy_cq(0).unwrap_err();
    assert!(matches!(error, ControlError::CompletionsInUse { cq: 0, .. }), "{error}");
    queue.destroy(&mut nic).unwrap();
}
