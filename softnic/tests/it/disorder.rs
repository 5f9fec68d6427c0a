//! Limits of the adversary's delays, and the failure of deferred effects that can no longer land.

use std::sync::atomic::Ordering;

use crate::common::fresh_seed;
use crate::common::raw::{Raw, bytes_of, word64};
use crate::common::{adversarial, fill};
use switchyard_softnic::format::{
    Atomic, CE_ALWAYS, FM_FENCE, Local, Operation, Remote, Source, Syndrome, Wqe,
};
use switchyard_softnic::{Access, Domain, HostQueue, Keys, Nic, NicConfig, QueueSizes, Segment};

const DATA_BYTES: usize = 8192;
/// In every case, some of this number of seeds hit the moment between execution and landing.
const NUM_SEEDS: u64 = 100;

/// Two NICs that make a step only when the test asks for it.
struct Pair {
    client: Nic,
    server: Nic,
    raw: Raw,
    source: Segment,
    source_keys: Keys,
    target: Segment,
    target_keys: Keys,
    remote_domain: Domain,
    _queues: [HostQueue; 2],
}

impl Pair {
    fn new(seed: u64, access: Access) -> Self {
        let mut client = Nic::new(NicConfig { keeps_trace: true, ..adversarial(seed) }).unwrap();
        let mut server = Nic::new(NicConfig::default()).unwrap();
        let (domain, remote_domain) = (client.alloc_domain(), server.alloc_domain());
        let near = HostQueue::create(&mut client, domain, QueueSizes::default()).unwrap();
        let far = HostQueue::create(&mut server, remote_domain, QueueSizes::default()).unwrap();
        near.connect(&mut client, server.address(), far.qpn()).unwrap();
        far.connect(&mut server, client.address(), near.qpn()).unwrap();
        let source = Segment::create(DATA_BYTES).unwrap();
        let target = Segment::create(DATA_BYTES).unwrap();
        let source_keys =
            client.register(domain, &source, 0, DATA_BYTES, Access::LOCAL_WRITE).unwrap();
        let target_keys = server.register(remote_domain, &target, 0, DATA_BYTES, access).unwrap();
        fill(&source, 0, DATA_BYTES, seed);
        fill(&target, 0, DATA_BYTES, !seed);
        let raw = Raw::new(*near.handle());
        let _queues = [near, far];
        Self {
            client,
            server,
            raw,
            source,
            source_keys,
            target,
            target_keys,
            remote_domain,
            _queues,
        }
    }

    fn local(&self, offset: usize, num_bytes: usize) -> Local {
        let Keys { address, lkey, .. } = self.source_keys;
        Local { address: address + offset as u64, lkey, num_bytes: num_bytes as u32 }
    }

    fn remote(&self, offset: usize) -> Remote {
        let Keys { address, rkey, .. } = self.target_keys;
        Remote { address: address + offset as u64, rkey }
    }

    fn post(&mut self, requests: impl IntoIterator<Item = (Operation, u8)>) {
        for (operation, flags) in requests {
            let (qpn, index) = (self.raw.handle.qpn, self.raw.posted() as u16);
            let wqe = Wqe { qpn, index, flags, operation };
            self.raw.write(&wqe.encode().try_into().unwrap());
        }
        self.raw.ring();
    }

    /// Words of the target that are as in the source at the same place, and others.
    fn landed(&self, offset: usize, num_bytes: usize) -> (usize, usize) {
        let here = bytes_of(&self.source, offset, num_bytes);
        let there = bytes_of(&self.target, offset, num_bytes);
        let num_new = here.chunks(8).zip(there.chunks(8)).filter(|(a, b)| a == b).count();
        (num_new, num_bytes / 8 - num_new)
    }

    /// Does everything that was posted. Index and syndrome of the completions.
    fn completions(&mut self) -> Vec<(u16, Option<Syndrome>)> {
        while self.client.progress() != 0 {}
        std::iter::from_fn(|| self.raw.take()).map(|cqe| (cqe.counter, cqe.status.err())).collect()
    }
}

/// A write to memory that keeps order lands in its turn, not immediately.
#[test]
fn a_write_may_be_seen_half_landed_until_it_is_complete() {
    let first = fresh_seed();
    let (mut num_half, mut num_none) = (0, 0);
    for seed in (0..NUM_SEEDS).map(|nth| first.wrapping_add(nth)) {
        let mut pair = Pair::new(seed, Access::ALL);
        let source = Source::Gather(vec![pair.local(0, DATA_BYTES)]);
        pair.post([(Operation::Write(pair.remote(0), source), CE_ALWAYS)]);
        loop {
            pair.client.progress();
            if pair.raw.take().is_some() {
                break;
            }
            let (new, old) = pair.landed(0, DATA_BYTES);
            num_half += usize::from(new != 0 && old != 0);
            num_none += usize::from(new == 0 && !pair.client.executed().is_empty());
        }
        assert_eq!(pair.landed(0, DATA_BYTES).1, 0, "seed {seed}: complete, and not there");
    }
    println!("{num_half} times half landed, {num_none} times not at all");
    assert!(num_half > 0);
}

/// Every effect behind a write on its queue pair comes behind all of the write's bytes.
#[test]
fn whatever_follows_a_write_finds_it_whole() {
    const HALF: usize = DATA_BYTES / 2;
    let first = fresh_seed();
    type Request = fn(&Pair) -> Operation;
    let followers: [(&str, Request); 4] = [
        ("an add", |pair| {
            Operation::Atomic(pair.remote(HALF), Atomic::Add8(1), pair.local(HALF, 8))
        }),
        ("a signal", |pair| Operation::Write(pair.remote(HALF), Source::Inline(vec![0; 8]))),
        ("a write", |pair| {
            Operation::Write(pair.remote(HALF), Source::Gather(vec![pair.local(HALF, HALF)]))
        }),
        ("a read", |pair| Operation::Read(pair.remote(0), vec![pair.local(HALF, HALF)])),
    ];
    for (what, follower) in followers {
        let mut num_early = 0;
        for seed in (0..NUM_SEEDS).map(|nth| first.wrapping_add(nth)) {
            let mut pair = Pair::new(seed, Access::ALL);
            let source = Source::Gather(vec![pair.local(0, HALF)]);
            let write = Operation::Write(pair.remote(0), source);
            pair.post([(write, 0), (follower(&pair), CE_ALWAYS)]);
            let before = bytes_of(&pair.target, HALF, HALF);
            let own = bytes_of(&pair.source, HALF, HALF);
            loop {
                let work = pair.client.progress();
                let is_seen = bytes_of(&pair.target, HALF, HALF) != before
                    || bytes_of(&pair.source, HALF, HALF) != own;
                let (_, missing) = pair.landed(0, HALF);
                assert!(!is_seen || missing == 0, "{what}, seed {seed}: {missing} words later");
                num_early += usize::from(!is_seen && missing == 0);
                if work == 0 {
                    break;
                }
            }
            assert_eq!(pair.landed(0, HALF).1, 0);
            if what == "a read" {
                let brought = bytes_of(&pair.source, HALF, HALF);
                assert_eq!(brought, bytes_of(&pair.target, 0, HALF), "seed {seed}");
            }
        }
        println!("before {what}: whole {num_early} times");
    }
}

/// The later of two writes to a place wins, word by word.
#[test]
fn writes_to_one_place_land_in_their_order() {
    const HALF: usize = DATA_BYTES / 2;
    let first = fresh_seed();
    for seed in (0..NUM_SEEDS).map(|nth| first.wrapping_add(nth)) {
        let mut pair = Pair::new(seed, Access::ALL);
        let writes = [HALF, 0].map(|from| {
            let source = Source::Gather(vec![pair.local(from, HALF)]);
            (Operation::Write(pair.remote(0), source), CE_ALWAYS)
        });
        pair.post(writes);
        assert_eq!(pair.completions(), [(0, None), (1, None)]);
        assert_eq!(pair.landed(0, HALF).1, 0, "seed {seed}");
    }
}

/// An effect that is deferred until its key is gone fails its request and all later ones.
#[test]
fn what_can_no_longer_land_fails_its_request() {
    let first = fresh_seed();
    type Request = fn(&Pair) -> Operation;
    type Revoke = fn(&mut Pair);
    let read: Request = |pair| Operation::Read(pair.remote(0), vec![pair.local(0, DATA_BYTES)]);
    let write: Request = |pair| {
        let source = Source::Gather(vec![pair.local(0, DATA_BYTES)]);
        Operation::Write(pair.remote(0), source)
    };
    let add: Request = |pair| Operation::Atomic(pair.remote(0), Atomic::Add8(1), pair.local(8, 8));
    let there: Revoke = |pair| pair.server.deregister(pair.target_keys.lkey).unwrap();
    let here: Revoke = |pair| pair.client.deregister(pair.source_keys.lkey).unwrap();
    let relaxed = Access::ALL.and(Access::RELAXED_ORDERING);
    let cases = [
        ("a read of memory that is revoked", read, Access::ALL, there, Syndrome::RemoteAccess),
        ("a read into memory that is revoked", read, Access::ALL, here, Syndrome::LocalProtection),
        ("an answer to an add", add, Access::ALL, here, Syndrome::LocalProtection),
        ("a write to memory that is revoked", write, relaxed, there, Syndrome::RemoteAccess),
        ("a write from memory that is revoked", write, relaxed, here, Syndrome::LocalProtection),
    ];
    for (what, request, access, revoke, expected) in cases {
        for flags in [0, CE_ALWAYS] {
            let mut num_late = 0;
            for seed in (0..NUM_SEEDS).map(|nth| first.wrapping_add(nth)) {
                let mut pair = Pair::new(seed, access);
                // A valid request before it, and one behind it that reaches no memory.
                let all = [(Operation::Nop, CE_ALWAYS), (request(&pair), flags)];
                pair.post(all.into_iter().chain([(Operation::Nop, CE_ALWAYS)]));
                while pair.client.executed().len() < 2 {
                    pair.client.progress();
                }
                revoke(&mut pair);
                let num_good = 2 + usize::from(flags == CE_ALWAYS);
                let found = pair.completions();
                let is_good = found.iter().all(|(_, syndrome)| syndrome.is_none());
                if is_good {
                    assert_eq!(found.len(), num_good, "{what}, seed {seed}: {found:?}");
                    assert_eq!(pair.client.num_requests(), 3);
                    let is_there = match request(&pair) {
                        Operation::Atomic(..) => {
                            let answer = word64(pair.source.address(8)).load(Ordering::Relaxed);
                            let after = word64(pair.target.address(0)).load(Ordering::Relaxed);
                            answer.wrapping_add(1) == after
                        }
                        _ => {
                            bytes_of(&pair.source, 0, DATA_BYTES)
                                == bytes_of(&pair.target, 0, DATA_BYTES)
                        }
                    };
                    assert!(is_there, "{what}, seed {seed}: complete, and its bytes are not there");
                    continue;
                }
                let flushed = Some(Syndrome::Flushed);
                let all = [(0, None), (1, Some(expected)), (2, flushed)];
                assert_eq!(found, all, "{what}, seed {seed}");
                assert_eq!(pair.client.num_requests(), 1, "{what}, seed {seed}");
                num_late += 1;
            }
            println!("{what}: failed late with {num_late} of {NUM_SEEDS} seeds");
            assert!(num_late > 0, "{what}: never put off");
        }
    }
}

/// A request that waits for deferred effects is not executed when these cannot land.
#[test]
fn requests_that_wait_for_what_can_no_longer_land_are_not_executed() {
    let first = fresh_seed();
    for is_read in [false, true] {
        let mut num_flushed = 0;
        for seed in (0..NUM_SEEDS).map(|nth| first.wrapping_add(nth)) {
            let mut pair = Pair::new(seed, Access::ALL.and(Access::RELAXED_ORDERING));
            let counter = {
                let segment = Segment::create(4096).unwrap();
                let keys = pair.server.register(pair.remote_domain, &segment, 0, 4096, Access::ALL);
                (segment, keys.unwrap())
            };
            let (remote, local) = (pair.remote(0), pair.local(0, DATA_BYTES));
            // A write lands before any later atomic. The answer to a read lands before a fenced request only.
            let (operation, flags) = match is_read {
                true => (Operation::Read(remote, vec![local]), CE_ALWAYS | FM_FENCE),
                false => (Operation::Write(remote, Source::Gather(vec![local])), CE_ALWAYS),
            };
            pair.post([(operation, CE_ALWAYS)]);
            while pair.client.executed().is_empty() {
                pair.client.progress();
            }
            pair.server.deregister(pair.target_keys.lkey).unwrap();
            let word = Remote { address: counter.1.address, rkey: counter.1.rkey };
            let answer = pair.local(0, 8);
            pair.post([(Operation::Atomic(word, Atomic::Add8(1), answer), flags)]);
            let found = pair.completions();
            let count = word64(counter.0.address(0)).load(Ordering::Relaxed);
            if found == [(0, None), (1, None)] {
                assert_eq!(count, 1, "seed {seed}");
                continue;
            }
            let (denied, flushed) = (Some(Syndrome::RemoteAccess), Some(Syndrome::Flushed));
            assert_eq!(found, [(0, denied), (1, flushed)], "seed {seed}");
            assert_eq!(count, 0, "seed {seed}: executed behind what could not land");
            num_flushed += 1;
        }
        println!("flushed with {num_flushed} of {NUM_SEEDS} seeds");
        assert!(num_flushed > 0);
    }
}

/// However many queue pairs there are to be passed over, a NIC without anything to do says so, and one with
/// something to do does not.
#[test]
fn a_nic_of_many_queue_pairs_comes_to_rest() {
    let mut pair = Pair::new(fresh_seed(), Access::ALL);
    let domain = pair.client.alloc_domain();
    let sizes = QueueSizes { recv_depth: 16, ..QueueSizes::default() };
    let queues: Vec<HostQueue> =
        (0..100).map(|_| HostQueue::create(&mut pair.client, domain, sizes).unwrap()).collect();
    let own = pair.client.address();
    for queue in &queues {
        queue.connect(&mut pair.client, own, queue.qpn()).unwrap();
    }
    // Nothing to do, many times over, before a put and behind it.
    for round in 0..20u16 {
        assert!((0..20).all(|_| pair.client.progress() == 0), "busy with nothing");
        let put = Operation::Write(pair.remote(0), Source::Gather(vec![pair.local(0, DATA_BYTES)]));
        pair.post([(put, CE_ALWAYS)]);
        assert_eq!(pair.completions(), [(round, None)]);
    }
}
