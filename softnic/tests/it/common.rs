//! Two NICs in this process, a queue pair between them, and the device functions to post on it.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use rand::Rng;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use softnic_driver::{Driver, Immediate, Mutant, OwnMove};
use switchyard_softnic::abi::{Bound, ErrorWord, ReceiveHandle, ReceiveState};
use switchyard_softnic::format::{CQE_BYTES, Cqe};
use switchyard_softnic::{
    Access, Adversary, Domain, DoorbellMode, HostQueue, Keys, Nic, NicConfig, NicThread,
    QueueSizes, Segment, Violation,
};

pub mod raw;
/// Bytes of the source and of the target.
pub const DATA_BYTES: usize = 1 << 20;
/// Longer than any wait that ends well, even on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub struct Rig {
    pub driver: Driver,
    pub queue: HostQueue,
    pub remote_queue: HostQueue,
    pub source: Segment,
    pub source_keys: Keys,
    pub target: Segment,
    pub target_keys: Keys,
    pub domain: Domain,
    pub remote_domain: Domain,
    // Stopped before the memory goes.
    pub client: NicThread,
    pub server: NicThread,
}

#[derive(Clone, Copy)]
pub struct RigConfig {
    pub variant: &'static str,
    pub nic: NicConfig,
    pub sizes: QueueSizes,
    /// Receives that the other side has room for.
    pub recv_depth: u32,
    pub target_access: Access,
}

impl Default for RigConfig {
    fn default() -> Self {
        Self {
            variant: "product",
            nic: strict(),
            sizes: QueueSizes::default(),
            recv_depth: 64,
            target_access: Access::ALL,
        }
    }
}

/// Everything that can be checked, checked.
pub fn strict() -> NicConfig {
    NicConfig { is_strict: true, doorbell: DoorbellMode::Checked, ..NicConfig::default() }
}

pub fn adversarial(seed: u64) -> NicConfig {
    NicConfig { adversary: Some(Adversary { seed }), ..strict() }
}

impl Rig {
    /// `None` without a C++ compiler, which is noted.
    pub fn new(config: RigConfig) -> Option<Self> {
        let driver = driver(config.variant)?;
        let mut client = Nic::new(config.nic).unwrap();
        let mut server = Nic::new(strict()).unwrap();
        let domain = client.alloc_domain();
        let remote_domain = server.alloc_domain();
        let queue = HostQueue::create(&mut client, domain, config.sizes).unwrap();
        let remote_sizes = QueueSizes { recv_depth: config.recv_depth, ..QueueSizes::default() };
        let remote_queue = HostQueue::create(&mut server, remote_domain, remote_sizes).unwrap();
        let source = Segment::create(DATA_BYTES).unwrap();
        let target = Segment::create(DATA_BYTES).unwrap();
        let source_keys =
            client.register(domain, &source, 0, DATA_BYTES, Access::LOCAL_WRITE).unwrap();
        let target_keys =
            server.register(remote_domain, &target, 0, DATA_BYTES, config.target_access).unwrap();
        let rig = Self {
            driver,
            queue,
            remote_queue,
            source,
            source_keys,
            target,
            target_keys,
            domain,
            remote_domain,
            client: NicThread::spawn(client).unwrap(),
            server: NicThread::spawn(server).unwrap(),
        };
        rig.connect();
        Some(rig)
    }

    pub fn connect(&self) {
        let (mut client, mut server) = (self.client.lock(), self.server.lock());
        let (here, there) = (client.address(), server.address());
        self.queue.connect(&mut client, there, self.remote_queue.qpn()).unwrap();
        self.remote_queue.connect(&mut server, here, self.queue.qpn()).unwrap();
    }

    /// Takes both sides through reset, as after an error.
    pub fn recover(&self) {
        self.queue.reset(&mut self.client.lock()).unwrap();
        self.remote_queue.reset(&mut self.server.lock()).unwrap();
        self.connect();
    }

    pub fn handle(&self) -> *const c_void {
        std::ptr::from_ref(self.queue.handle()).cast()
    }

    pub fn put_add(&self, offset: u64, bytes: u64, counter: u64, wait: &Wait) -> u32 {
        // SAFETY: the handle and the bound are valid; addresses are checked by the NIC.
        unsafe {
            (self.driver.put_add)(
                self.handle(),
                self.source_keys.address + offset,
                self.source_keys.lkey,
                self.target_keys.address + offset,
                self.target_keys.rkey,
                bytes,
                self.target_keys.address + counter,
                1,
                wait.as_ptr(),
            )
        }
    }

    pub fn put(&self, offset: u64, bytes: u64, wait: &Wait) -> u32 {
        self.moved(self.driver.put, offset, bytes, wait)
    }

    pub fn get(&self, offset: u64, bytes: u64, wait: &Wait) -> u32 {
        self.moved(self.driver.get, offset, bytes, wait)
    }

    fn moved(
        &self,
        call: unsafe extern "C" fn(*const c_void, u64, u32, u64, u32, u64, *const c_void) -> u32,
        offset: u64,
        bytes: u64,
        wait: &Wait,
    ) -> u32 {
        // SAFETY: as for `put_add`.
        unsafe {
            call(
                self.handle(),
                self.source_keys.address + offset,
                self.source_keys.lkey,
                self.target_keys.address + offset,
                self.target_keys.rkey,
                bytes,
                wait.as_ptr(),
            )
        }
    }

    pub fn signal_words(&self, first_word: u64, value: u64, num_words: u32, wait: &Wait) -> u32 {
        self.gated(first_word, value, num_words, None, wait)
    }

    /// The same, but between reservation and publication it waits until `gate` is not 0.
    pub fn gated(
        &self,
        first_word: u64,
        value: u64,
        num_words: u32,
        gate: Option<&AtomicU32>,
        wait: &Wait,
    ) -> u32 {
        let gate = gate.map_or(std::ptr::null(), |gate| gate.as_ptr().cast_const());
        let first = self.target_keys.address + first_word * 8;
        // SAFETY: as for `put_add`.
        unsafe {
            (self.driver.signal_words)(
                self.handle(),
                first,
                self.target_keys.rkey,
                value,
                num_words,
                gate,
                wait.as_ptr(),
            )
        }
    }

    /// Groups of signals by who has the queue to itself, to a ring of words; then quiet.
    pub fn own_signals(&self, value: u64, groups: &Groups, wait: &Wait) -> u32 {
        // SAFETY: as for `put_add`; the counts are atomic on both sides.
        unsafe {
            (self.driver.own_signals)(
                self.handle(),
                self.target_keys.address,
                self.target_keys.rkey,
                value,
                groups.num,
                groups.num_lanes,
                groups.num_words,
                groups.num_allowed.as_ptr(),
                groups.num_posted.as_ptr(),
                wait.as_ptr(),
            )
        }
    }

    /// One call by who has the queue to itself, from and to the same offset; then quiet.
    pub fn own_move(&self, kind: OwnMove, offset: u64, bytes: u64, word: u64, wait: &Wait) -> u32 {
        // SAFETY: as for `put_add`.
        unsafe {
            (self.driver.own_move)(
                self.handle(),
                kind,
                self.source_keys.address + offset,
                self.source_keys.lkey,
                self.target_keys.address + offset,
                self.target_keys.rkey,
                bytes,
                self.target_keys.address + word,
                1,
                wait.as_ptr(),
            )
        }
    }

    pub fn put_signal(&self, offset: u64, bytes: u64, word: u64, value: u64, wait: &Wait) -> u32 {
        // SAFETY: as for `put_add`.
        unsafe {
            (self.driver.put_signal)(
                self.handle(),
                self.source_keys.address + offset,
                self.source_keys.lkey,
                self.target_keys.address + offset,
                self.target_keys.rkey,
                bytes,
                self.target_keys.address + word,
                value,
                wait.as_ptr(),
            )
        }
    }

    /// A word of the posters' counts.
    pub fn state_word(&self, offset: usize) -> &AtomicU64 {
        let at = self.queue.handle().state + offset as u64;
        // SAFETY: an aligned word of the queue's memory, accessed atomically.
        unsafe { AtomicU64::from_ptr(at as *mut u64) }
    }

    pub fn signal(&self, offset: u64, value: u64, wait: &Wait) -> u32 {
        let word = self.target_keys.address + offset;
        let rkey = self.target_keys.rkey;
        // SAFETY: as for `put_add`.
        unsafe { (self.driver.signal)(self.handle(), word, rkey, value, wait.as_ptr()) }
    }

    pub fn add8(&self, offset: u64, value: u64, wait: &Wait) -> u32 {
        let word = self.target_keys.address + offset;
        let rkey = self.target_keys.rkey;
        // SAFETY: as for `put_add`.
        unsafe { (self.driver.add8)(self.handle(), word, rkey, value, wait.as_ptr()) }
    }

    pub fn add_fields(&self, offset: u64, value: u64, boundary: u64, wait: &Wait) -> u32 {
        let word = self.target_keys.address + offset;
        let rkey = self.target_keys.rkey;
        let call = self.driver.add_fields;
        // SAFETY: as for `put_add`.
        unsafe { call(self.handle(), word, rkey, value, boundary, wait.as_ptr()) }
    }

    /// `num_bytes` of the source go to the target, with immediate data.
    pub fn put_imm(&self, num_bytes: u64, imm: u32, wait: &Wait) -> u32 {
        // SAFETY: as for `put_add`.
        unsafe {
            (self.driver.put_imm)(
                self.handle(),
                self.source_keys.address,
                self.source_keys.lkey,
                self.target_keys.address,
                self.target_keys.rkey,
                num_bytes,
                imm,
                wait.as_ptr(),
            )
        }
    }

    /// The receives of the other side, all of them posted.
    pub fn receives(&self, num_receives: u32) -> Receives<'_> {
        self.remote_queue.post_receives(num_receives);
        let handle = self.remote_queue.receive_handle(num_receives).unwrap();
        // SAFETY: a handle.
        let wrong = unsafe { self.driver.check_receives(std::ptr::from_ref(&handle).cast()) };
        assert_eq!(wrong, None);
        Receives { driver: &self.driver, handle }
    }

    pub fn quiet(&self, wait: &Wait) -> u32 {
        // SAFETY: as for `put_add`.
        unsafe { (self.driver.quiet)(self.handle(), wait.as_ptr()) }
    }

    pub fn target_word(&self, offset: usize) -> &AtomicU64 {
        word(&self.target, offset)
    }

    pub fn assert_clean(&self) {
        let client = self.client.lock();
        assert!(client.violations().is_empty(), "{:?}", client.violations().first());
        assert!(self.server.lock().violations().is_empty());
    }
}

/// Result of [`Rig::own_signals`].
pub struct Groups {
    pub num: u64,
    pub num_lanes: u32,
    /// Words of the ring.
    pub num_words: u64,
    pub num_allowed: AtomicU64,
    pub num_posted: AtomicU64,
}

impl Groups {
    /// All instances at the same time.
    pub fn new(num: u64, num_lanes: u32, num_words: u64) -> Self {
        let num_allowed = AtomicU64::new(num);
        Self { num, num_lanes, num_words, num_allowed, num_posted: AtomicU64::new(0) }
    }
}

/// The reader of immediate data.
pub struct Receives<'a> {
    driver: &'a Driver,
    pub handle: ReceiveHandle,
}

impl Receives<'_> {
    pub fn try_take(&self) -> Option<Immediate> {
        let mut taken = Immediate::default();
        // SAFETY: a valid handle of a queue that lives.
        let found = unsafe {
            (self.driver.try_receive)(std::ptr::from_ref(&self.handle).cast(), &raw mut taken)
        };
        (found == 1).then_some(taken)
    }

    pub fn take(&self, wait: &Wait) -> Result<Immediate, u32> {
        let mut taken = Immediate::default();
        let handle = std::ptr::from_ref(&self.handle).cast();
        // SAFETY: as for `try_take`; the bound is valid.
        let found = unsafe { (self.driver.receive_imm)(handle, &raw mut taken, wait.as_ptr()) };
        if found == status::OK { Ok(taken) } else { Err(found) }
    }

    /// `sy_mlx5_rq_state.error`
    pub fn error(&self) -> u64 {
        let at = self.handle.state + std::mem::offset_of!(ReceiveState, error) as u64;
        // SAFETY: an aligned word of the queue's memory, accessed atomically.
        unsafe { AtomicU64::from_ptr(at as *mut u64) }.load(Ordering::Acquire)
    }

    /// Writes a completion to entry `index` of the first round.
    pub fn forge(&self, index: u64, cqe: &Cqe) {
        let bytes = cqe.encode(false);
        let to = (self.handle.cq + index * CQE_BYTES as u64) as *mut [u8; CQE_BYTES];
        // SAFETY: an entry of the ring, which the NIC leaves alone while nothing arrives.
        unsafe { to.write_volatile(bytes) };
    }
}

pub fn word(segment: &Segment, offset: usize) -> &AtomicU64 {
    assert!(offset.is_multiple_of(8) && offset + 8 <= segment.region().len());
    // SAFETY: aligned and in range; mapped while the segment lives; accessed atomically.
    unsafe { AtomicU64::from_ptr(segment.region().as_ptr().as_ptr().add(offset).cast()) }
}

/// Fills `len` bytes at `offset` with a pattern of `seed`.
pub fn fill(segment: &Segment, offset: usize, len: usize, seed: u64) {
    let mut rng = SmallRng::seed_from_u64(seed);
    for at in (offset..offset + len).step_by(8) {
        word(segment, at).store(rng.next_u64(), Ordering::Relaxed);
    }
}

/// First byte at which a pattern is not there.
pub fn mismatch(segment: &Segment, offset: usize, len: usize, seed: u64) -> Option<usize> {
    let mut rng = SmallRng::seed_from_u64(seed);
    (offset..offset + len)
        .step_by(8)
        .find(|at| word(segment, *at).load(Ordering::Relaxed) != rng.next_u64())
}

/// Bound of waits, with its error word.
pub struct Wait {
    error: Box<std::cell::UnsafeCell<ErrorWord>>,
    bound: Bound,
}

impl Wait {
    pub fn new(timeout: Duration) -> Self {
        let error = Box::new(std::cell::UnsafeCell::new(ErrorWord::default()));
        let bound = Bound {
            error: error.get(),
            abort_mask: std::ptr::null(),
            timeout_ns: timeout.as_nanos() as u64,
        };
        Self { error, bound }
    }

    pub fn patient() -> Self {
        Self::new(PATIENCE)
    }

    pub fn with_abort(mut self, mask: &AtomicU32) -> Self {
        self.bound.abort_mask = mask.as_ptr();
        self
    }

    pub fn as_ptr(&self) -> *const c_void {
        std::ptr::from_ref(&self.bound).cast()
    }

    pub fn error(&self) -> ErrorWord {
        // SAFETY: no call that may write it is under way.
        unsafe { *self.error.get() }
    }
}

pub fn fresh_seed() -> u64 {
    let seed = std::env::var("SWITCHYARD_TEST_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(|| SmallRng::from_rng(&mut rand::rng()).random());
    println!("seed {seed} (set SWITCHYARD_TEST_SEED to repeat)");
    seed
}

/// A variant of the device functions; without a compiler the test is skipped, and says so.
pub fn driver(variant: &str) -> Option<Driver> {
    let driver = Driver::variant(variant);
    if driver.is_none() {
        test_support::skip("cxx", "there is no C++ compiler: install g++");
    }
    driver
}

/// Number of tries per mutant. Some mutants show only in certain thread interleavings, which the scheduler
/// chooses. One symptom suffices.
const MOST_TRIES: u32 = 5;

/// Fails unless every mutant shows by its symptom within `limit`, or is listed with the reason why it cannot.
/// Something else that is found is none: above all an expired wait, for which a busy machine is enough, so that
/// every further try has twice the time. Without a C++ compiler nothing is checked, which was noted.
pub fn check_mutants(
    mutants: &[Mutant],
    not_catchable: &[(&str, &str)],
    limit: Duration,
    symptom: impl Fn(&'static str, Duration) -> Option<Result<(), String>>,
) {
    for Mutant { name, symptom: expected } in mutants {
        let reason = not_catchable.iter().find(|(listed, _)| listed == name);
        assert_eq!(*expected == "none", reason.is_some(), "{name}: cannot show, or has no reason");
        if let Some((_, reason)) = reason {
            println!("{name}: not catchable: {reason}");
            continue;
        }
        let mut others = Vec::new();
        loop {
            match symptom(name, limit * (1 << others.len())) {
                Some(Err(found)) if shows(expected, &found) => {
                    println!("{name}: {found} (try {})", others.len() + 1);
                    break;
                }
                Some(found) => {
                    println!("{name}: {found:?} in place of `{expected}`");
                    others.push(found);
                    let is_over = others.len() == MOST_TRIES as usize;
                    assert!(!is_over, "mutant {name} never showed by `{expected}`: {others:?}");
                }
                None => return,
            }
        }
    }
    for (name, _) in not_catchable {
        assert!(
            mutants.iter().any(|mutant| mutant.name == *name),
            "{name} is listed and not a mutant"
        );
    }
}

/// Whether the symptom is one that the mutant must show.
pub fn shows(expected: &str, found: &str) -> bool {
    let is_expired = |text: &str| text.contains("timeout");
    expected.split(" or ").any(|part| found.contains(part) && is_expired(part) == is_expired(found))
}

/// The kind of a violation before its description.
pub fn named(violation: &Violation) -> String {
    let debug = format!("{violation:?}");
    let name = debug.split([' ', '{', '(']).next().unwrap_or_default();
    format!("violation {name}: {violation}")
}

/// `SY_MLX5_*`
pub mod status {
    pub const OK: u32 = 0;
    pub const TIMEOUT: u32 = 1;
    pub const ABORTED: u32 = 2;
    pub const COMPLETION: u32 = 3;
    pub const DESYNC: u32 = 4;
    pub const ARGUMENT: u32 = 5;
}
