//! Links of fused kernels over two queues, called by whole warps; and with one thing wrong in them: the
//! model must notice, or it is said here why it cannot.

mod moves;

use crate::common;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::{Wait, named, status, strict, word};
use kernels::mlx5::{Bound, PeerHandle, QueueHandle};
use softnic_driver::{Call, Job, LinkDriver};
use switchyard_softnic::format::Syndrome;
use switchyard_softnic::{
    Access, Fault, HostQueue, Keys, Nic, NicConfig, NicThread, QueueSizes, Segment,
};

/// Mutants that no run on a processor can catch, and why.
const NOT_CATCHABLE: [(&str, &str); 3] = [
    (
        "link_narrow_scope",
        "a scope changes no instruction of a processor; the step `mlx5` of `cargo xtask test` looks at the \
         fences of all doorbells in what a GPU runs",
    ),
    (
        "copy_posted_without_barrier",
        "the exchange of the reservation, which comes before the requests, is a barrier of the warp, too",
    ),
    (
        "copy_quiet_by_stores_without_fence",
        "stores of a processor stay in order; the step `mlx5` looks for the fence in what a GPU runs",
    ),
];

const SLOT_BYTES: usize = 256 << 10;
const MAX_MESSAGE_BYTES: u32 = 1024;
/// Words behind the payload.
const WORDS_AT: u64 = 192 << 10;
/// Time limit of a mutant, which may hang.
const LIMIT: Duration = Duration::from_secs(5);
/// Time limit of the links themselves, which a busy machine may delay.
const PRODUCT_LIMIT: Duration = Duration::from_secs(60);

/// Two queues to one peer, as a fused kernel has them.
struct Rig {
    limit: Duration,
    link: LinkDriver,
    queues: Vec<HostQueue>,
    remote_queues: Vec<HostQueue>,
    handles: Box<[QueueHandle]>,
    mirror: Segment,
    mirror_keys: Keys,
    target: Segment,
    target_keys: Keys,
    // Stopped before the memory goes.
    client: NicThread,
    server: NicThread,
}

impl Rig {
    /// `None` without a C++ compiler, which is noted.
    fn new(variant: &str, limit: Duration) -> Option<Self> {
        common::driver("product")?;
        let link = LinkDriver::variant(variant)?;
        let mut client = Nic::new(NicConfig { keeps_trace: true, ..strict() }).unwrap();
        let mut server = Nic::new(NicConfig::default()).unwrap();
        let (domain, remote_domain) = (client.alloc_domain(), server.alloc_domain());
        let sizes = QueueSizes {
            sq_depth: 256,
            max_message_bytes: MAX_MESSAGE_BYTES,
            ..QueueSizes::default()
        };
        let make = |nic: &mut Nic, domain| -> Vec<HostQueue> {
            (0..2).map(|_| HostQueue::create(nic, domain, sizes).unwrap()).collect()
        };
        let queues = make(&mut client, domain);
        let remote_queues = make(&mut server, remote_domain);
        let mirror = Segment::create(SLOT_BYTES).unwrap();
        let target = Segment::create(SLOT_BYTES).unwrap();
        let mirror_keys = client.register(domain, &mirror, 0, SLOT_BYTES, Access::ALL).unwrap();
        let target_keys =
            server.register(remote_domain, &target, 0, SLOT_BYTES, Access::ALL).unwrap();
        let handles = queues.iter().map(|queue| *queue.handle()).collect();
        let rig = Self {
            limit,
            link,
            queues,
            remote_queues,
            handles,
            mirror,
            mirror_keys,
            target,
            target_keys,
            client: NicThread::spawn(client).unwrap(),
            server: NicThread::spawn(server).unwrap(),
        };
        rig.connect();
        Some(rig)
    }

    fn connect(&self) {
        let (mut client, mut server) = (self.client.lock(), self.server.lock());
        let (here, there) = (client.address(), server.address());
        for (near, far) in self.queues.iter().zip(&self.remote_queues) {
            near.connect(&mut client, there, far.qpn()).unwrap();
            far.connect(&mut server, here, near.qpn()).unwrap();
        }
    }

    /// Fresh queues, and a target full of zeros under a mirror full of numbers.
    fn renew(&self) {
        for queue in &self.queues {
            queue.reset(&mut self.client.lock()).unwrap();
        }
        for queue in &self.remote_queues {
            queue.reset(&mut self.server.lock()).unwrap();
        }
        self.connect();
        for at in (0..SLOT_BYTES).step_by(8) {
            word(&self.target, at).store(0, Ordering::Relaxed);
            word(&self.mirror, at).store(at as u64 + 1, Ordering::Relaxed);
        }
    }

    fn call(&self, job: Job, wait: &Wait) -> u32 {
        let mut answer = 0;
        // SAFETY: a bound, valid as long as `wait`.
        let bound = unsafe { wait.as_ptr().cast::<Bound>().read() };
        let peer = PeerHandle {
            qps: self.handles.as_ptr().expose_provenance() as u64,
            mirror: self.mirror_keys.address,
            remote: self.target_keys.address,
            slot_bytes: SLOT_BYTES as u64,
            lkey: self.mirror_keys.lkey,
            rkey: self.target_keys.rkey,
            num_qps: self.handles.len() as u32,
            reserved: 0,
            bound,
        };
        let peer = std::ptr::from_ref(&peer).cast::<c_void>();
        // SAFETY: handles and bound are valid; the NIC checks addresses.
        unsafe { self.link.run(&Job { peer, answer: &raw mut answer, ..job }) };
        answer
    }

    fn put(&self, job: Job) {
        self.call(job, &Wait::new(self.limit));
    }

    fn has_failed(&self, wait: &Wait) -> bool {
        self.call(job(Call::HasFailed, 0), wait) != 0
    }

    fn target_word(&self, offset: u64) -> &AtomicU64 {
        word(&self.target, offset as usize)
    }

    /// Waits for all posted requests, and returns the symptom of an error.
    fn settle(&self, what: &str) -> Result<(), String> {
        let wait = Wait::new(self.limit);
        self.call(job(Call::Quiet, 0), &wait);
        match wait.error().tag {
            0 => Ok(()),
            tag => Err(format!("{what}: {}, observed {:#x}", name_of(tag), wait.error().observed)),
        }
    }

    /// Waits until `offset` has a value: everything before it on its queue is then there.
    fn await_word(&self, offset: u64, value: u64) -> Result<(), String> {
        let start = Instant::now();
        while self.target_word(offset).load(Ordering::Acquire) != value {
            if start.elapsed() > self.limit {
                return Err("timeout: a word does not arrive".to_owned());
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Whether exactly these bytes of the mirror, and no others, are in the target before its words.
    fn expect(&self, what: &str, ranges: &[(u64, u64)]) -> Result<(), String> {
        for at in (0..WORDS_AT).step_by(8) {
            let is_put = ranges.iter().any(|(begin, len)| (*begin..begin + len).contains(&at));
            let found = self.target_word(at).load(Ordering::Relaxed);
            if found != if is_put { at + 1 } else { 0 } {
                let kind = if is_put { "lacks" } else { "has too much" };
                return Err(format!("{what}: the target {kind} at byte {at}"));
            }
        }
        Ok(())
    }

    fn expect_words(&self, what: &str, expected: &[u64]) -> Result<(), String> {
        for (idx, expected) in expected.iter().enumerate() {
            let found = self.target_word(WORDS_AT + 8 * idx as u64).load(Ordering::Acquire);
            if found != *expected {
                return Err(format!("{what}: word {idx} is {found}, expected {expected}"));
            }
        }
        Ok(())
    }
}

/// Name of a tag `SY_TAG_MLX5_*`.
fn name_of(tag: u32) -> String {
    match tag {
        0 => "no error".to_owned(),
        32..=34 => format!("timeout, tag {tag}"),
        35 => "completion".to_owned(),
        36 => "desync".to_owned(),
        37 => "argument".to_owned(),
        other => format!("tag {other}"),
    }
}

fn job(call: Call, lane: u32) -> Job {
    Job {
        peer: std::ptr::null(),
        call,
        lane,
        offset: 0,
        num_bytes: 0,
        word_offset: WORDS_AT,
        value: 1,
        stride: 0,
        num_words: 0,
        rows: 0,
        answer: std::ptr::null_mut(),
        local: std::ptr::null_mut(),
        stores: std::ptr::null_mut(),
    }
}

/// Every call moves exactly the named bytes, in one request or in many.
fn content(rig: &Rig) -> Result<(), String> {
    let send = job(Call::Send, 3);
    for (offset, num_bytes, num_words) in
        [(0, 5000, 3), (4096, 64, 1), (8192, 40 << 10, 0), (64, 1024, 2), (0, 31 << 10, 1)]
    {
        rig.put(Job { offset, num_bytes, num_words, value: 7, ..send });
        rig.settle("sending")?;
        rig.expect("sending", &[(offset, num_bytes)])?;
        let words: Vec<u64> = (0..4).map(|idx| if idx < num_words { 7 } else { 0 }).collect();
        rig.expect_words("sending", &words)?;
        rig.renew();
    }
    let put = Job { offset: 16, num_bytes: 2056, value: 9, ..job(Call::PutSet, 1) };
    rig.put(put);
    rig.put(Job { word_offset: WORDS_AT + 8, value: 4, ..job(Call::Set, 0) });
    for value in [5, 6] {
        rig.put(Job { word_offset: WORDS_AT + 16, value, ..job(Call::Add, 0) });
    }
    rig.settle("single calls")?;
    rig.expect("putting", &[(16, 2056)])?;
    rig.expect_words("single calls", &[9, 4, 11, 0])?;
    rig.renew();
    // A few rows, more rows than are posted together, and rows of several requests.
    for (rows, num_bytes) in [(0b1011_0100, 512), (0xfdbf_7fde, 512), (0b1001_0001, 3000)] {
        let stride = 5120;
        rig.put(Job { rows, num_bytes, stride, value: 8, ..job(Call::PutRows, 0) });
        rig.settle("rows")?;
        let lanes = (0..32).filter(|lane| rows >> lane & 1 == 1);
        let ranges: Vec<(u64, u64)> = lanes.map(|lane| (lane * stride, num_bytes)).collect();
        rig.expect("rows", &ranges)?;
        let words: Vec<u64> =
            (0..32).map(|lane| if rows >> lane & 1 == 1 { 8 } else { 0 }).collect();
        rig.expect_words("rows", &words)?;
        rig.renew();
    }
    Ok(())
}

/// No word arrives when the puts before it did not.
fn order(rig: &Rig) -> Result<(), String> {
    let calls = [
        ("put and set", Job { num_bytes: 2000, ..job(Call::PutSet, 1) }),
        ("send", Job { num_bytes: 2000, num_words: 2, ..job(Call::Send, 1) }),
        ("rows", Job { num_bytes: 512, stride: 512, rows: 0b111, ..job(Call::PutRows, 1) }),
    ];
    for (what, job) in calls {
        let qpn = rig.queues[1].qpn();
        let begin = rig.target_keys.address;
        let (addresses, syndrome) = (begin..begin + 8, Syndrome::RemoteOp);
        rig.client.lock().inject(Fault::FailRange { qpn, addresses, syndrome }).unwrap();
        rig.put(job);
        let _ = rig.settle(what);
        rig.expect_words(what, &[0; 8])?;
        rig.renew();
    }
    Ok(())
}

/// A block's data uses that block's queue: none of it arrives while that queue is stopped.
fn lanes(rig: &Rig) -> Result<(), String> {
    let calls = [
        ("set", job(Call::Set, 1)),
        ("add", job(Call::Add, 1)),
        ("put and set", Job { num_bytes: 2000, ..job(Call::PutSet, 1) }),
        ("send", Job { num_bytes: 2000, num_words: 2, ..job(Call::Send, 1) }),
        ("rows", Job { num_bytes: 512, stride: 512, rows: 0b111, ..job(Call::PutRows, 1) }),
    ];
    let marker = WORDS_AT + 1024;
    for (what, call) in calls {
        let qpn = rig.queues[1].qpn();
        rig.client.lock().inject(Fault::Stall { qpn }).unwrap();
        rig.put(call);
        rig.put(Job { word_offset: marker, value: 3, ..job(Call::Set, 0) });
        rig.await_word(marker, 3)?;
        rig.expect_words(&format!("{what} on another lane"), &[0; 8])?;
        rig.expect(&format!("{what} on another lane"), &[])?;
        let wait = Wait::new(Duration::from_millis(20));
        rig.call(job(Call::Quiet, 0), &wait);
        // `SY_TAG_MLX5_QUIET`
        if wait.error().tag != 34 {
            return Err("a quiet did not wait for a queue that stands still".to_owned());
        }
        rig.client.lock().inject(Fault::Resume { qpn }).unwrap();
        rig.renew();
    }
    Ok(())
}

/// A call that makes no sense, and a request that fails, take the link out of service, and it says so.
fn failures(rig: &Rig) -> Result<(), String> {
    let far = SLOT_BYTES as u64;
    let senseless = [
        ("beyond the slot", Job { offset: far - 8, num_bytes: 16, ..job(Call::Send, 0) }),
        ("far beyond the slot", Job { offset: u64::MAX - 7, num_bytes: 16, ..job(Call::Send, 1) }),
        ("too many words", Job { num_words: 4, ..job(Call::Send, 0) }),
        ("misaligned words", Job { word_offset: WORDS_AT + 4, num_words: 1, ..job(Call::Send, 0) }),
        ("word beyond the slot", Job { word_offset: far, ..job(Call::Set, 1) }),
        ("counter beyond the slot", Job { word_offset: far, ..job(Call::Add, 1) }),
        (
            "row beyond the slot",
            Job { offset: far, num_bytes: 8, rows: 1, ..job(Call::PutRows, 1) },
        ),
    ];
    for (what, job) in senseless {
        let wait = Wait::new(rig.limit);
        rig.call(job, &wait);
        // `SY_TAG_MLX5_ARGUMENT`
        if wait.error().tag != 37 || !rig.has_failed(&wait) {
            return Err(format!(
                "{what}: {}, or the link is still in service",
                name_of(wait.error().tag)
            ));
        }
        rig.renew();
    }
    // A NIC that stands still costs a quiet one bound, not one for every queue.
    for (lane, queue) in rig.queues.iter().enumerate() {
        rig.client.lock().inject(Fault::Stall { qpn: queue.qpn() }).unwrap();
        rig.put(job(Call::Set, lane as u32));
    }
    rig.call(job(Call::Quiet, 0), &Wait::new(Duration::from_millis(20)));
    let errors: Vec<u64> = rig.queues.iter().map(HostQueue::error).collect();
    if errors != [u64::from(status::TIMEOUT), 0] {
        return Err(format!(
            "a quiet of a NIC that stands still leaves the queues with {errors:?}"
        ));
    }
    for queue in &rig.queues {
        rig.client.lock().inject(Fault::Resume { qpn: queue.qpn() }).unwrap();
    }
    rig.renew();
    for lane in [0, 1] {
        let qpn = rig.queues[lane].qpn();
        let fault = Fault::Fail { qpn, nth: 0, syndrome: Syndrome::RetryExceeded };
        rig.client.lock().inject(fault).unwrap();
        rig.put(job(Call::Set, lane as u32));
        let (wait, start) = (Wait::new(rig.limit), Instant::now());
        while !rig.has_failed(&wait) {
            if start.elapsed() > rig.limit {
                return Err("timeout: a failed request is not noticed".to_owned());
            }
            std::thread::yield_now();
        }
        // `SY_TAG_MLX5_COMPLETION`, with the syndrome in the second byte.
        let error = wait.error();
        if (error.tag, error.observed >> 8 & 0xff) != (35, 0x15) {
            return Err(format!("{}, observed {:#x}", name_of(error.tag), error.observed));
        }
        rig.renew();
    }
    Ok(())
}

type Stage = (&'static str, fn(&Rig) -> Result<(), String>);

const STAGES: [Stage; 7] = [
    ("content", content),
    ("order", order),
    ("lanes", lanes),
    ("failures", failures),
    ("content of copies", moves::content),
    ("lanes of copies", moves::lanes),
    ("failures of copies", moves::failures),
];

/// How a variant shows that something is wrong with it. All see the same work.
fn symptom(variant: &str, limit: Duration) -> Option<Result<(), String>> {
    let rig = Rig::new(variant, limit)?;
    rig.renew();
    for (name, stage) in STAGES {
        let result = stage(&rig);
        // Violations that the NIC saw say more than the result.
        if let Some(violation) = rig.client.lock().violations().first() {
            return Some(Err(format!("{name}: {}", named(violation))));
        }
        if let Err(found) = result {
            return Some(Err(format!("{name}: {found}")));
        }
    }
    Some(Ok(()))
}

#[test]
fn the_links_themselves_show_nothing() {
    if let Some(result) = symptom("product", PRODUCT_LIMIT) {
        assert_eq!(result, Ok(()));
    }
}

#[test]
fn every_mutant_of_links_shows_or_is_listed() {
    common::check_mutants(LinkDriver::mutants(), &NOT_CATCHABLE, LIMIT, symptom);
}
