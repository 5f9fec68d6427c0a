//! Shared code of the tests: recording and failing endpoints, peers whose posters are the device functions.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use p2p_core::endpoint::{Batch, Endpoint, PostError, Progress, QuietError, TransportKind};
use p2p_core::region::{LocalRange, RemoteRange, SlotKey};
use p2p_core::wait::Driver as TransportDriver;
use p2p_core::{ReadView, Region};
use proxy_driver::Driver;
use switchyard_proxy::abi::PeerHandle;
use switchyard_proxy::host::{HostPoster, PosterConfig};
use switchyard_proxy::{IdlePolicy, LaneConfig, Lanes, PeerConfig, ProxyConfig};

pub const LIMIT: Duration = Duration::from_secs(60);
pub const SLOT: usize = 64 << 10;

/// The device functions, or `None`, loudly.
pub fn driver() -> Option<Driver> {
    let driver = Driver::find();
    if driver.is_none() {
        test_support::skip("cxx", "no C++ compiler for the device functions");
    }
    driver
}

/// A GPU in software that can run the benchmarks' producers, or `None`, loudly.
#[cfg(not(loom))]
pub fn software_gpu() -> Option<kernels::gpu::Gpu> {
    let driver = driver()?;
    // SAFETY: it is the kernel.
    unsafe { bench_harness::proxy::gpu::set_software_kernel(driver.produce) };
    Some(kernels::gpu::Gpu::open_emulated(0).unwrap())
}

pub fn fresh_seed() -> u64 {
    let given = std::env::var("SWITCHYARD_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = given.unwrap_or_else(rand::random);
    println!("SWITCHYARD_SEED={seed}");
    seed
}

/// Waits for something that must come.
pub fn wait_for(what: &str, mut is_there: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !is_there() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Idle threads yield the processor immediately: there are few cores here.
pub fn config(num_threads: usize) -> ProxyConfig {
    let idle = IdlePolicy { spin: Duration::from_micros(20), max_sleep: Duration::from_millis(1) };
    ProxyConfig { num_threads, idle, ..ProxyConfig::default() }
}

pub fn lanes(num_lanes: u32, depth: u32, budget: u32) -> Lanes {
    Lanes::anonymous(LaneConfig { num_lanes, depth, budget }).unwrap()
}

pub fn peer_config(peer: u32, lanes: &Lanes, mirror: &Region) -> PeerConfig {
    PeerConfig {
        peer,
        lanes: lanes.clone(),
        window_bytes: SLOT as u64,
        sources: vec![mirror.clone()],
        thread: None,
    }
}

/// `sy_error_word`
#[derive(Debug, Default)]
#[repr(C)]
pub struct ErrorWord {
    pub tag: u32,
    pub peer: u32,
    pub reason: u32,
    pub reserved: u32,
    pub observed: u64,
    pub expected: u64,
}

/// Posters of one peer by the device functions, usable from any thread.
pub struct Posters {
    pub driver: Driver,
    poster: HostPoster,
    pub error: Box<ErrorWord>,
    pub abort_mask: Box<AtomicU64>,
}

// SAFETY: the handle points to memory that the device functions reach atomically.
unsafe impl Sync for Posters {}

impl Posters {
    pub fn new(driver: Driver, lanes: &Lanes, mirror: &Region, timeout: Duration) -> Self {
        Self::with_window(driver, lanes, mirror, timeout, 0, SLOT as u64)
    }

    pub fn with_window(
        driver: Driver,
        lanes: &Lanes,
        mirror: &Region,
        timeout: Duration,
        window: u32,
        slot_bytes: u64,
    ) -> Self {
        let error = Box::new(ErrorWord::default());
        let abort_mask = Box::new(AtomicU64::new(0));
        let config = PosterConfig {
            mirror: mirror.as_ptr().as_ptr() as u64,
            slot_bytes,
            window,
            peer: 3,
            timeout_ns: timeout.as_nanos() as u64,
            error: std::ptr::from_ref(&*error) as u64,
            abort_mask: std::ptr::from_ref(&*abort_mask) as u64,
        };
        let poster = HostPoster::new(lanes, config).unwrap();
        Self { driver, poster, error, abort_mask }
    }

    pub fn handle(&self) -> *const std::ffi::c_void {
        std::ptr::from_ref::<PeerHandle>(self.poster.handle()).cast()
    }

    pub fn put(&self, lane: u32, offset: u64, bytes: u64) -> u32 {
        // SAFETY: the handle and all it points to live as long as `self`. Likewise below.
        unsafe { (self.driver.put)(self.handle(), lane, offset, bytes) }
    }

    pub fn put_from(&self, lane: u32, to: u64, source: u32, from: u64, bytes: u64) -> u32 {
        // SAFETY: as above.
        unsafe { (self.driver.put_from)(self.handle(), lane, to, source, from, bytes) }
    }

    pub fn put_add(&self, lane: u32, offset: u64, bytes: u64, word: u64, value: u64) -> u32 {
        // SAFETY: as above.
        unsafe { (self.driver.put_add)(self.handle(), lane, offset, bytes, word, value) }
    }

    pub fn put_signal(&self, lane: u32, offset: u64, bytes: u64, word: u64, value: u64) -> u32 {
        // SAFETY: as above.
        unsafe { (self.driver.put_signal)(self.handle(), lane, offset, bytes, word, value) }
    }

    pub fn get(&self, lane: u32, offset: u64, bytes: u64) -> u32 {
        // SAFETY: as above.
        unsafe { (self.driver.get)(self.handle(), lane, offset, bytes) }
    }

    pub fn add(&self, lane: u32, offset: u64, value: u64) -> u32 {
        // SAFETY: as above.
        unsafe { (self.driver.add)(self.handle(), lane, offset, value) }
    }

    pub fn signal(&self, lane: u32, offset: u64, value: u64) -> u32 {
        // SAFETY: as above.
        unsafe { (self.driver.signal)(self.handle(), lane, offset, value) }
    }

    pub fn quiet(&self, lane: u32) -> u32 {
        // SAFETY: as above.
        unsafe { (self.driver.quiet)(self.handle(), lane) }
    }

    pub fn is_quiet(&self, lane: u32) -> bool {
        // SAFETY: as above.
        unsafe { (self.driver.is_quiet)(self.handle(), lane) != 0 }
    }
}

/// A recorded call of an endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asked {
    Put { offset: usize, from: usize, bytes: usize },
    Get { offset: usize, bytes: usize },
    Add { offset: usize, value: u64 },
    Fence,
    Wake { offset: usize },
}

/// How a [`Recorder`] behaves; shared with the test.
#[derive(Debug, Default)]
pub struct Behaviour {
    pub asked: Mutex<Vec<Asked>>,
    /// The operation with this number fails, from 1; 0: none.
    pub fail_at: AtomicU64,
    /// Nothing is settled while this is set.
    pub is_stalled: AtomicBool,
    /// A progress query reports that the transport failed.
    pub is_broken: AtomicBool,
    /// Operations that batches keep back, and calls that posted any.
    pub num_held: AtomicU64,
    pub num_posts: AtomicU64,
    /// Operations queued in a batch are refused.
    pub refuses_batches: AtomicBool,
    /// Drivers that threads must run.
    pub driver: Mutex<Option<Arc<dyn TransportDriver>>>,
    pub num_asked: AtomicU64,
    pub is_dropped: AtomicBool,
}

/// Records its calls. Several of one behaviour have batches of their own.
#[derive(Debug)]
pub struct Recorder {
    behaviour: Arc<Behaviour>,
    /// Address of the mirror that puts are from.
    base: usize,
    /// How many operations the open batch keeps back, if one is open.
    batch: Option<u64>,
}

impl Recorder {
    pub fn new(behaviour: Arc<Behaviour>, base: usize) -> Self {
        Self { behaviour, base, batch: None }
    }

    fn ask(&mut self, op: &'static str, asked: Asked) -> Result<(), PostError> {
        let number = self.behaviour.num_asked.fetch_add(1, Ordering::SeqCst) + 1;
        if number == self.behaviour.fail_at.load(Ordering::SeqCst) {
            return Err(PostError::Transport { op, code: -5, detail: "injected".to_owned() });
        }
        self.behaviour.asked.lock().unwrap().push(asked);
        let counted = if let Some(held) = &mut self.batch {
            *held += 1;
            &self.behaviour.num_held
        } else {
            &self.behaviour.num_posts
        };
        counted.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    /// The queue must be empty when progress is queried, and at drop.
    fn assert_posted(&self) {
        assert_eq!(self.batch, None, "a batch was left open");
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.assert_posted();
        }
        self.behaviour.is_dropped.store(true, Ordering::SeqCst);
    }
}

impl Endpoint for Recorder {
    type RemoteKey = SlotKey;

    fn kind(&self) -> TransportKind {
        TransportKind::Local
    }

    fn register(&mut self, _: &Region) -> Result<(), PostError> {
        Ok(())
    }

    fn direct(&self, _: SlotKey) -> Option<NonNull<u8>> {
        None
    }

    unsafe fn put(&mut self, dst: RemoteRange<SlotKey>, src: LocalRange) -> Result<(), PostError> {
        let from = src.as_ptr().as_ptr() as usize - self.base;
        self.ask("put", Asked::Put { offset: dst.offset, from, bytes: src.len() })
    }

    unsafe fn get(&mut self, dst: LocalRange, src: RemoteRange<SlotKey>) -> Result<(), PostError> {
        self.ask("get", Asked::Get { offset: src.offset, bytes: dst.len() })
    }

    fn add_flag(&mut self, dst: RemoteRange<SlotKey>, value: u64) -> Result<(), PostError> {
        self.ask("add_flag", Asked::Add { offset: dst.offset, value })
    }

    fn fence(&mut self) -> Result<(), PostError> {
        self.ask("fence", Asked::Fence)
    }

    fn quiet(&mut self, _: Instant) -> Result<(), QuietError> {
        self.assert_posted();
        if self.behaviour.is_broken.load(Ordering::SeqCst) {
            let detail = "injected".to_owned();
            return Err(PostError::Transport { op: "quiet", code: -7, detail }.into());
        }
        if self.behaviour.is_stalled.load(Ordering::SeqCst) {
            return Err(QuietError::Deadline { outstanding: 1 });
        }
        Ok(())
    }

    fn wake(&mut self, _: SlotKey, offset: usize) -> Result<(), PostError> {
        self.ask("wake", Asked::Wake { offset })
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

impl Batch for Recorder {
    fn begin_batch(&mut self) {
        assert_eq!(self.batch.replace(0), None, "a batch within a batch");
    }

    fn flush(&mut self) -> Result<(), PostError> {
        let held = self.batch.take().expect("the end of no batch");
        if held == 0 {
            return Ok(());
        }
        let is_refused = self.behaviour.refuses_batches.load(Ordering::SeqCst);
        // Before the batch is empty: a reader that sees that may count posts.
        self.behaviour.num_posts.fetch_add(u64::from(!is_refused), Ordering::SeqCst);
        self.behaviour.num_held.fetch_sub(held, Ordering::SeqCst);
        if is_refused {
            let detail = "injected".to_owned();
            return Err(PostError::Transport { op: "flush", code: -6, detail });
        }
        Ok(())
    }
}

impl Progress for Recorder {
    p2p_core::default_progress! {
        health, add_flag_lazily, has_room, has_room_to_spare, try_fence, is_settled, marks
    }

    fn driver(&self) -> Option<Arc<dyn TransportDriver>> {
        self.behaviour.driver.lock().unwrap().clone()
    }
}

/// Copies out of a region that others write.
pub fn bytes_of(region: &Region, offset: usize, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    // SAFETY: the region stays mapped during the call.
    unsafe { ReadView::new(region.as_ptr(), region.len()) }.copy_to(offset, &mut out).unwrap();
    out
}

pub fn write(region: &Region, offset: usize, bytes: &[u8]) {
    assert!(offset + bytes.len() <= region.len());
    // SAFETY: in range; the caller is the only one who writes there now.
    unsafe {
        let to = region.as_ptr().as_ptr().add(offset);
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
    }
}

pub fn word(region: &Region, offset: usize) -> &AtomicU64 {
    assert!(offset.is_multiple_of(8) && offset + 8 <= region.len());
    // SAFETY: in range and aligned; words are reached atomically.
    unsafe { AtomicU64::from_ptr(region.as_ptr().as_ptr().add(offset).cast()) }
}
