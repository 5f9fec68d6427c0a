//! An attacker who guesses: it has a connection of its own to the server's NIC, and asks for memory of another client
//! with guessed keys and addresses. The NIC refuses each request, the memory stays as it is, and the other client goes
//! on.

use std::sync::atomic::Ordering;
use std::time::Instant;

use rand::rngs::SmallRng;
use rand::{Rng, RngExt, SeedableRng};
use switchyard_softnic::format::{Atomic, Local, Operation, Remote, Source, Syndrome};
use switchyard_softnic::{Access, HostQueue, Keys, Poster, QueueError, QueueSizes, Segment};

use crate::common::{DATA_BYTES, PATIENCE, Rig, RigConfig, Wait, fill, fresh_seed, status, word};

/// Requests with random keys and addresses, beside those with the victim's own.
const NUM_GUESSES: usize = 3000;
/// Bytes of the attacker's memory.
const OWN_BYTES: usize = 4096;

/// A queue pair to the server's NIC, in domains of its own on both sides, as each admitted client has.
struct Attacker {
    poster: Poster,
    far: HostQueue,
    memory: Segment,
    keys: Keys,
    /// Memory of the server that this client may use.
    granted: Keys,
    _granted_memory: Segment,
}

impl Attacker {
    fn connect(rig: &Rig) -> Self {
        let (mut client, mut server) = (rig.client.lock(), rig.server.lock());
        let (domain, far_domain) = (client.alloc_domain(), server.alloc_domain());
        let near = HostQueue::create(&mut client, domain, QueueSizes::default()).unwrap();
        let far = HostQueue::create(&mut server, far_domain, QueueSizes::default()).unwrap();
        let (here, there) = (client.address(), server.address());
        near.connect(&mut client, there, far.qpn()).unwrap();
        far.connect(&mut server, here, near.qpn()).unwrap();
        let (memory, granted_memory) =
            (Segment::create(OWN_BYTES).unwrap(), Segment::create(OWN_BYTES).unwrap());
        let keys = client.register(domain, &memory, 0, OWN_BYTES, Access::LOCAL_WRITE).unwrap();
        let granted =
            server.register(far_domain, &granted_memory, 0, OWN_BYTES, Access::ALL).unwrap();
        let poster = Poster::new(near).unwrap();
        Self { poster, far, memory, keys, granted, _granted_memory: granted_memory }
    }

    /// Carries out one request. A refused one takes the queue pair out of service, so this connects it again.
    fn attempt(&mut self, rig: &Rig, operation: Operation) -> Result<(), QueueError> {
        let deadline = Instant::now() + PATIENCE;
        let posted = self.poster.post(operation, 0, deadline, std::thread::yield_now);
        let outcome = posted.and_then(|_| self.poster.quiet(deadline, std::thread::yield_now));
        if outcome.is_err() {
            let (mut client, mut server) = (rig.client.lock(), rig.server.lock());
            self.poster.queue().reset(&mut client).unwrap();
            self.far.reset(&mut server).unwrap();
            self.poster.forget();
            let (here, there) = (client.address(), server.address());
            self.poster.queue().connect(&mut client, there, self.far.qpn()).unwrap();
            self.far.connect(&mut server, here, self.poster.queue().qpn()).unwrap();
        }
        outcome
    }

    /// A write, a read or an atomic on `remote`.
    fn operation(&self, kind: usize, remote: Remote) -> Operation {
        let local = Local { address: self.keys.address, lkey: self.keys.lkey, num_bytes: 8 };
        match kind % 4 {
            0 => Operation::Write(remote, Source::Gather(vec![local])),
            1 => Operation::Write(remote, Source::Inline(vec![0xee; 8])),
            2 => Operation::Read(remote, vec![local]),
            _ => Operation::Atomic(remote, Atomic::Add8(u64::MAX), local),
        }
    }
}

fn bytes_of(segment: &Segment, len: usize) -> Vec<u64> {
    (0..len).step_by(8).map(|offset| word(segment, offset).load(Ordering::Acquire)).collect()
}

#[test]
fn guessed_keys_open_nothing_and_the_victim_goes_on() {
    let seed = fresh_seed();
    let mut rng = SmallRng::seed_from_u64(seed);
    let Some(rig) = Rig::new(RigConfig::default()) else { return };
    fill(&rig.target, 0, DATA_BYTES, seed);
    let before = bytes_of(&rig.target, DATA_BYTES);
    let mut attacker = Attacker::connect(&rig);
    fill(&attacker.memory, 0, OWN_BYTES, !seed);
    let own = bytes_of(&attacker.memory, OWN_BYTES);

    let victim = rig.target_keys;
    let aligned = |rng: &mut SmallRng| rng.random_range(0..DATA_BYTES as u64 / 8) * 8;
    let mut attacks = Vec::new();
    for kind in 0..4 {
        // The best guess of all: the victim's own key, at its own address.
        attacks.push((kind, victim.rkey, victim.address));
        // Every number of the low byte, at the victim's place in the table of keys.
        for low in 0..=0xff {
            attacks.push((kind, (victim.rkey & !0xff) | low, victim.address + aligned(&mut rng)));
        }
        // Its own key, at the victim's addresses.
        attacks.push((kind, attacker.granted.rkey, victim.address + aligned(&mut rng)));
        attacks.push((kind, attacker.granted.rkey, attacker.granted.address + OWN_BYTES as u64));
    }
    for _ in 0..NUM_GUESSES {
        let low = rng.random_range(0..1 << 20);
        let key = match rng.random_range(0..3) {
            0 => rng.next_u32(),
            // Near real keys.
            1 => victim.rkey ^ (1 << rng.random_range(0..32)),
            _ => (victim.rkey & !0xf_ffff) | low,
        };
        let address = match rng.random() {
            true => victim.address + aligned(&mut rng),
            false => rng.next_u64() & !7,
        };
        // The attacker's own memory is no attack.
        let start = attacker.granted.address;
        let is_own =
            key == attacker.granted.rkey && (start..start + OWN_BYTES as u64).contains(&address);
        if !is_own {
            attacks.push((rng.random_range(0..4), key, address));
        }
    }

    let wait = Wait::patient();
    let mut num_signals = 0;
    for (num, &(kind, rkey, address)) in attacks.iter().enumerate() {
        let operation = attacker.operation(kind, Remote { address, rkey });
        let outcome = attacker.attempt(&rig, operation);
        assert!(
            matches!(outcome, Err(QueueError::Completion { syndrome: Syndrome::RemoteAccess, .. })),
            "attack {num} with key {rkey:#x} at {address:#x}: {outcome:?}"
        );
        // The victim's queue pair works all the time.
        if num % 50 == 0 {
            num_signals += 1;
            assert_eq!(rig.signal(0, num_signals, &wait), status::OK, "{:?}", wait.error());
            assert_eq!(rig.quiet(&wait), status::OK, "{:?}", wait.error());
            assert_eq!(rig.target_word(0).load(Ordering::Acquire), num_signals);
        }
    }
    println!("{} attacks, {num_signals} signals of the victim", attacks.len());
    assert!(bytes_of(&rig.target, DATA_BYTES)[1..] == before[1..], "the memory has changed");
    assert!(bytes_of(&attacker.memory, OWN_BYTES) == own, "the attacker has read something");

    // The test can fail: the same requests reach the memory that the attacker may use.
    for kind in 0..4 {
        let remote = Remote { address: attacker.granted.address, rkey: attacker.granted.rkey };
        let operation = attacker.operation(kind, remote);
        assert_eq!(attacker.attempt(&rig, operation), Ok(()));
    }
}
