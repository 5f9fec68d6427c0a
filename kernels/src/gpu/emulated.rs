//! A GPU in software, for tests on hosts without one: its memory is this host's, its streams are threads,
//! and its kernels are those of `include/switchyard/impls`, compiled for the host (`host/emulated.cpp`).
//!
//! It tests that host and kernels agree: parameters, tables, waits, and the death of a peer. Memory order and
//! speed are a GPU's own. Unlike a GPU it stops with a stopped process.

mod convert;

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{CString, c_char, c_int, c_void};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use super::checksum::{Checksum, ChecksumParams};
use super::layer::MapShape;
use super::{Conversion, GpuError, Piece, Reach};
use crate::abi::DevicePtr;
use crate::plan::LaunchPlan;

#[derive(Debug, Clone)]
pub(super) struct Gpu {
    ordinal: u32,
}

#[derive(Debug)]
pub(super) struct Memory {
    base: NonNull<u8>,
    len: u64,
    kind: MemoryKind,
}

/// A range of memory that GPUs know.
#[derive(Debug, Clone, Copy)]
struct MemoryRange {
    len: u64,
    /// The GPU that owns the memory, or for which a peer's is mapped; none for memory of the host.
    owner: Option<u32>,
}

#[derive(Debug)]
enum MemoryKind {
    Device,
    /// With its descriptor, if it is this process's own.
    Shared(Option<OwnedFd>),
    Host,
    /// Pages with another owner.
    Registered,
}

// SAFETY: an address and a descriptor without thread affinity, freed once.
unsafe impl Send for Memory {}
// SAFETY: no method changes anything.
unsafe impl Sync for Memory {}

#[derive(Debug)]
pub(super) struct Stream {
    worker: Arc<Worker>,
}

#[derive(Debug)]
pub(super) struct Graph {
    tasks: Arc<Vec<Task>>,
}

#[derive(Debug)]
pub(super) struct Event {
    marks: Arc<Marks>,
}

/// The number of recordings of an event by the host, and the number of times that a stream reached it. A waiter
/// waits for as many arrivals as there were recordings when it began. As with the driver, a recording that is a
/// step of a graph counts when the replay reaches it: until then the event shows its earlier state.
#[derive(Debug, Default)]
struct Marks {
    counts: Mutex<MarkCounts>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct MarkCounts {
    recorded: u64,
    arrived: u64,
    last: Option<Instant>,
}

/// A stream's thread; it ends with its work when this is dropped.
#[derive(Debug)]
struct Worker {
    id: u64,
    /// State of the GPU.
    ordinal: u32,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Debug)]
struct Queue {
    /// Has room for the steps of a stream that lags, so that launches do not allocate from time to time.
    tasks: VecDeque<Task>,
    /// Tasks that a capture keeps instead of running them.
    recording: Option<Vec<Task>>,
    is_busy: bool,
    is_closed: bool,
    /// First failure; nothing runs after it, as after a fault on a GPU.
    failure: Option<(&'static str, i32)>,
}

impl Default for Queue {
    fn default() -> Self {
        Self {
            tasks: VecDeque::with_capacity(QUEUE_ROOM),
            recording: None,
            is_busy: false,
            is_closed: false,
            failure: None,
        }
    }
}

enum Task {
    Copy { to: u64, from: u64, bytes: usize },
    Fill { to: u64, value: u8, bytes: usize },
    AddFlag { flag: u64, value: u64 },
    Time { to: u64 },
    Convert(Box<[Conversion]>),
    Checksum(Box<ChecksumParams>),
    Launch { kernel: &'static str, params: Box<[u64]> },
    Call(Mutex<Option<Box<dyn FnOnce() + Send>>>),
    Mark { marks: Arc<Marks>, is_recorded: bool },
    Await { marks: Arc<Marks>, arrivals: u64 },
    Replay(Arc<Vec<Task>>),
}

impl std::fmt::Debug for Task {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = match self {
            Self::Copy { .. } => "copy",
            Self::Fill { .. } => "fill",
            Self::AddFlag { .. } => "add_flag",
            Self::Time { .. } => "time",
            Self::Convert(_) => "convert",
            Self::Checksum(_) => "checksum",
            Self::Launch { kernel, .. } => kernel,
            Self::Call(_) => "call",
            Self::Mark { .. } => "mark",
            Self::Await { .. } => "await",
            Self::Replay(_) => "replay",
        };
        f.write_str(name)
    }
}

impl Gpu {
    pub(super) const fn open(ordinal: u32) -> Result<Self, GpuError> {
        if ordinal >= NUM_GPUS {
            return Err(GpuError::NoSuchGpu { ordinal, count: NUM_GPUS });
        }
        Ok(Self { ordinal })
    }

    pub(super) const fn ordinal(&self) -> u32 {
        self.ordinal
    }

    #[allow(clippy::unused_self, reason = "the driver's GPUs each have one")]
    pub(super) const fn pci_address(&self) -> Option<String> {
        None
    }

    /// Like the processor, which owns the memory.
    #[allow(clippy::unused_self, clippy::unnecessary_wraps, reason = "as the driver's")]
    pub(super) const fn orders_writes_of_nics(&self) -> Result<bool, GpuError> {
        Ok(true)
    }

    #[allow(clippy::unused_self, reason = "the driver's GPUs each have their own")]
    pub(super) fn free_bytes(&self) -> Result<u64, GpuError> {
        Ok(GPU_BYTES.saturating_sub(lock(&RANGES).values().map(|range| range.len).sum()))
    }

    pub(super) fn alloc(&self, bytes: u64) -> Result<Memory, GpuError> {
        Memory::anonymous(bytes, MemoryKind::Device, Some(self.ordinal))
    }

    #[allow(clippy::unused_self, reason = "as above")]
    pub(super) fn alloc_host(&self, bytes: u64) -> Result<Memory, GpuError> {
        Memory::anonymous(bytes, MemoryKind::Host, None)
    }

    pub(super) unsafe fn register_host(
        &self,
        pages: NonNull<u8>,
        bytes: u64,
        is_register: bool,
    ) -> Result<Memory, GpuError> {
        if is_register {
            let call = "registration of registers with an emulated GPU";
            return Err(failed(call, rustix::io::Errno::OPNOTSUPP));
        }
        let base = pages.as_ptr() as u64;
        let mut ranges = lock(&RANGES);
        if ranges.contains_key(&base) {
            // The driver's error for memory that is registered already.
            return Err(failed("a second registration of host memory", rustix::io::Errno::EXIST));
        }
        ranges.insert(base, MemoryRange { len: bytes, owner: None });
        Ok(Memory { base: pages, len: bytes, kind: MemoryKind::Registered })
    }

    pub(super) fn alloc_shared(&self, bytes: u64) -> Result<Memory, GpuError> {
        let len = bytes.max(1).next_multiple_of(GRANULARITY);
        // The name tells an importer the owner of the memory.
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create(format!("{NAME}{}", self.ordinal), flags)
            .map_err(|error| failed("memfd_create", error))?;
        rustix::fs::ftruncate(&fd, len).map_err(|error| failed("ftruncate", error))?;
        rustix::fs::fcntl_add_seals(&fd, SEALS).map_err(|error| failed("F_ADD_SEALS", error))?;
        let base = map_shared(fd.as_fd(), len)?;
        Ok(Memory::new(base, len, MemoryKind::Shared(Some(fd)), Some(self.ordinal)))
    }

    pub(super) fn import_shared(&self, memory: OwnedFd, bytes: u64) -> Result<Memory, GpuError> {
        let refused = |call, error| failed(call, error);
        let link =
            std::fs::read_link(format!("/proc/self/fd/{}", memory.as_raw_fd())).unwrap_or_default();
        let owner = link.to_string_lossy().strip_prefix("/memfd:").and_then(|name| {
            name.strip_prefix(NAME)?.strip_suffix(" (deleted)")?.parse::<u32>().ok()
        });
        let Some(owner) = owner else {
            return Err(refused(
                "import of a descriptor of something else",
                rustix::io::Errno::INVAL,
            ));
        };
        if owner / ISLAND != self.ordinal / ISLAND {
            return Err(GpuError::NoPeerAccess { ordinal: self.ordinal, peer: owner });
        }
        // Memory that its owner could shrink would end this process by a signal.
        let seals = rustix::fs::fcntl_get_seals(&memory).map_err(|e| failed("F_GET_SEALS", e))?;
        let size = rustix::fs::fstat(&memory).map_err(|e| failed("fstat", e))?.st_size as u64;
        if !seals.contains(SEALS) || bytes == 0 || bytes > size {
            return Err(refused("import of memory of another size", rustix::io::Errno::INVAL));
        }
        let len = bytes.next_multiple_of(GRANULARITY);
        let base = map_shared(memory.as_fd(), len)?;
        // Mapped for this GPU; the addresses are its own then.
        let memory = Memory::new(base, len, MemoryKind::Shared(None), Some(self.ordinal));
        Ok(memory.shortened(bytes))
    }

    pub(super) fn stream(&self) -> Result<Stream, GpuError> {
        let shared = Arc::new(Shared::default());
        let theirs = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("emulated-gpu".into())
            .spawn(move || theirs.run())
            .map_err(|error| GpuError::Driver {
                call: "clone",
                code: error.raw_os_error().unwrap_or(0).unsigned_abs(),
                name: error.to_string(),
            })?;
        let id = NEXT_STREAM.fetch_add(1, Ordering::Relaxed);
        let worker = Arc::new(Worker { id, ordinal: self.ordinal, shared });
        lock(&STREAMS).insert(id, Arc::downgrade(&worker));
        Ok(Stream { worker })
    }

    #[allow(clippy::unused_self, clippy::unnecessary_wraps, reason = "as above")]
    pub(super) fn event(&self) -> Result<Event, GpuError> {
        Ok(Event { marks: Arc::default() })
    }

    #[allow(clippy::unused_self, reason = "as above")]
    pub(super) fn wrap_stream(&self, raw: u64) -> Result<Stream, GpuError> {
        let worker = lock(&STREAMS).get(&raw).and_then(Weak::upgrade);
        worker
            .map(|worker| Stream { worker })
            .ok_or_else(|| failed("use of a stream that is none", rustix::io::Errno::BADF))
    }

    #[allow(clippy::unused_self, reason = "as above")]
    /// Nothing reads maps here: the expert stage is plain loops.
    #[allow(clippy::unnecessary_wraps, reason = "as the driver's")]
    pub(super) const fn tensor_map(
        &self,
        _base: DevicePtr,
        _dtype: u32,
        _shape: &MapShape,
    ) -> Result<[u64; 16], GpuError> {
        Ok([0; 16])
    }

    pub(super) fn reach(&self, address: DevicePtr, num_bytes: u64) -> Reach {
        let ranges = lock(&RANGES);
        let Some((base, range)) = ranges.range(..=address.0).next_back() else {
            return Reach::Unknown;
        };
        let offset = address.0 - base;
        match range.owner {
            _ if offset >= range.len => Reach::Unknown,
            Some(owner) if owner != self.ordinal => Reach::Foreign { owner },
            _ if num_bytes > range.len - offset => Reach::Short,
            _ => Reach::Whole,
        }
    }
}

impl Memory {
    fn anonymous(bytes: u64, kind: MemoryKind, owner: Option<u32>) -> Result<Self, GpuError> {
        let len = bytes.max(1).next_multiple_of(PAGE);
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a fresh mapping at an address of the system's choice.
        let base = unsafe { rustix::mm::mmap_anonymous(null_mut(), len as usize, prot, flags) }
            .map_err(|error| failed("mmap", error))?;
        Ok(Self::new(base, len, kind, owner).shortened(bytes.max(1)))
    }

    fn new(base: *mut c_void, len: u64, kind: MemoryKind, owner: Option<u32>) -> Self {
        // mmap never gives null, which the dangling pointer stands for.
        let base = NonNull::new(base.cast::<u8>()).unwrap_or(NonNull::dangling());
        lock(&RANGES).insert(base.as_ptr() as u64, MemoryRange { len, owner });
        Self { base, len, kind }
    }

    fn shortened(mut self, bytes: u64) -> Self {
        self.len = bytes;
        self
    }

    pub(super) fn ptr(&self) -> DevicePtr {
        DevicePtr(self.base.as_ptr() as u64)
    }

    pub(super) const fn len(&self) -> u64 {
        self.len
    }

    pub(super) const fn host(&self) -> Option<NonNull<u8>> {
        match self.kind {
            MemoryKind::Host | MemoryKind::Registered => Some(self.base),
            MemoryKind::Device | MemoryKind::Shared(_) => None,
        }
    }

    pub(super) fn dma_buf(&self) -> Result<OwnedFd, GpuError> {
        Err(failed("dma-buf of an emulated GPU's memory", rustix::io::Errno::OPNOTSUPP))
    }

    pub(super) fn export(&self) -> Result<OwnedFd, GpuError> {
        let MemoryKind::Shared(Some(fd)) = &self.kind else {
            let call = "export of memory that was not allocated to be shared";
            return Err(failed(call, rustix::io::Errno::PERM));
        };
        fd.try_clone().map_err(|error| GpuError::Driver {
            call: "dup",
            code: error.raw_os_error().unwrap_or(0).unsigned_abs(),
            name: error.to_string(),
        })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let base = self.base.as_ptr();
        let Some(mapped) = lock(&RANGES).remove(&(base as u64)) else { return };
        if matches!(self.kind, MemoryKind::Registered) {
            return;
        }
        // SAFETY: mapped in `anonymous` or `map_shared` with this length, unmapped once; who uses it
        // later breaks the same rules as on a GPU.
        if let Err(error) = unsafe { rustix::mm::munmap(base.cast(), mapped.len as usize) } {
            tracing::error!(%error, "emulated GPU memory is not freed");
        }
    }
}

impl Stream {
    pub(super) fn ordinal(&self) -> u32 {
        self.worker.ordinal
    }

    pub(super) fn raw(&self) -> u64 {
        self.worker.id
    }

    pub(super) unsafe fn copy(
        &self,
        to: DevicePtr,
        from: DevicePtr,
        bytes: u64,
    ) -> Result<(), GpuError> {
        self.push(Task::Copy { to: to.0, from: from.0, bytes: bytes as usize })
    }

    pub(super) unsafe fn fill(&self, to: DevicePtr, value: u8, bytes: u64) -> Result<(), GpuError> {
        self.push(Task::Fill { to: to.0, value, bytes: bytes as usize })
    }

    pub(super) unsafe fn add_flag(&self, flag: DevicePtr, value: u64) -> Result<(), GpuError> {
        self.push(Task::AddFlag { flag: flag.0, value })
    }

    pub(super) unsafe fn tell(
        &self,
        first: &Piece,
        last: &Piece,
        began_to: DevicePtr,
    ) -> Result<(), GpuError> {
        const LAST: u64 = 8;
        let rest = Piece {
            to: last.to.add(LAST),
            from: last.from.add(LAST),
            bytes: last.bytes.saturating_sub(LAST),
        };
        for piece in [first, &rest, &Piece { bytes: last.bytes.min(LAST), ..*last }] {
            let (to, from) = (piece.to.0, piece.from.0);
            self.push(Task::Copy { to, from, bytes: piece.bytes as usize })?;
        }
        if began_to.is_null() { Ok(()) } else { self.push(Task::Time { to: began_to.0 }) }
    }

    pub(super) unsafe fn convert(&self, pieces: &[Conversion]) -> Result<(), GpuError> {
        self.push(Task::Convert(pieces.into()))
    }

    pub(super) unsafe fn checksum(&self, params: &ChecksumParams) -> Result<(), GpuError> {
        self.push(Task::Checksum(Box::new(*params)))
    }

    pub(super) fn then(&self, action: Box<dyn FnOnce() + Send>) -> Result<(), GpuError> {
        if self.is_capturing()? {
            return Err(failed("recording of a host call", rustix::io::Errno::PERM));
        }
        self.push(Task::Call(Mutex::new(Some(action))))
    }

    /// All kernels of a launch are one here; its name decides.
    pub(super) unsafe fn launch_all(
        &self,
        kernel: &'static str,
        _plans: &[LaunchPlan],
        params: &[u8],
    ) -> Result<(), GpuError> {
        // Whole words, so that they are aligned like the structures.
        let words = params.chunks(8).map(|chunk| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            u64::from_ne_bytes(word)
        });
        self.push(Task::Launch { kernel, params: words.collect() })
    }

    pub(super) fn wait(&self, deadline: Instant) -> Result<(), GpuError> {
        let mut queue = lock(&self.worker.shared.queue);
        loop {
            if let Some(failure) = queue.failure {
                return Err(broken(failure));
            }
            if queue.tasks.is_empty() && !queue.is_busy {
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(GpuError::Deadline { what: "stream" });
            }
            let waited = self.worker.shared.changed.wait_timeout(queue, left);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub(super) fn is_done(&self) -> Result<bool, GpuError> {
        let queue = lock(&self.worker.shared.queue);
        match queue.failure {
            Some(failure) => Err(broken(failure)),
            None => Ok(queue.tasks.is_empty() && !queue.is_busy),
        }
    }

    pub(super) fn is_capturing(&self) -> Result<bool, GpuError> {
        Ok(lock(&self.worker.shared.queue).recording.is_some())
    }

    pub(super) fn begin_capture(&self) -> Result<(), GpuError> {
        let mut queue = lock(&self.worker.shared.queue);
        if queue.recording.is_some() {
            return Err(failed("a second capture", rustix::io::Errno::BUSY));
        }
        queue.recording = Some(Vec::new());
        Ok(())
    }

    pub(super) fn end_capture(&self) -> Result<Graph, GpuError> {
        let recorded = lock(&self.worker.shared.queue).recording.take();
        recorded
            .map(|tasks| Graph { tasks: Arc::new(tasks) })
            .ok_or_else(|| failed("the end of no capture", rustix::io::Errno::INVAL))
    }

    pub(super) fn record(&self, event: &Event) -> Result<(), GpuError> {
        let is_recorded = self.is_capturing()?;
        if !is_recorded {
            lock(&event.marks.counts).recorded += 1;
        }
        self.push(Task::Mark { marks: Arc::clone(&event.marks), is_recorded })
    }

    pub(super) fn wait_for(&self, event: &Event) -> Result<(), GpuError> {
        if self.is_capturing()? {
            return Err(failed("recording of a wait", rustix::io::Errno::PERM));
        }
        let arrivals = lock(&event.marks.counts).recorded;
        self.push(Task::Await { marks: Arc::clone(&event.marks), arrivals })
    }

    pub(super) fn replay(&self, graph: &Graph) -> Result<(), GpuError> {
        self.push(Task::Replay(Arc::clone(&graph.tasks)))
    }

    fn push(&self, task: Task) -> Result<(), GpuError> {
        let mut queue = lock(&self.worker.shared.queue);
        if let Some(failure) = queue.failure {
            return Err(broken(failure));
        }
        match &mut queue.recording {
            Some(recorded) => recorded.push(task),
            None => queue.tasks.push_back(task),
        }
        self.worker.shared.changed.notify_all();
        Ok(())
    }
}

impl Event {
    pub(super) fn is_done(&self) -> Result<bool, GpuError> {
        let counts = lock(&self.marks.counts);
        Ok(counts.arrived >= counts.recorded)
    }

    pub(super) fn since(&self, earlier: &Self) -> Result<Duration, GpuError> {
        let last = |event: &Self| {
            lock(&event.marks.counts).last.ok_or_else(|| {
                failed("the time of an event that is not done", rustix::io::Errno::INVAL)
            })
        };
        Ok(last(self)?.saturating_duration_since(last(earlier)?))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        lock(&STREAMS).remove(&self.id);
        lock(&self.shared.queue).is_closed = true;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    /// The stream's thread: work in order, until the stream is gone and nothing is left.
    fn run(&self) {
        let mut queue = lock(&self.queue);
        loop {
            if let Some(task) = queue.tasks.pop_front() {
                queue.is_busy = true;
                drop(queue);
                let done = task.run();
                queue = lock(&self.queue);
                queue.is_busy = false;
                if let Err(failure) = done {
                    queue.failure.get_or_insert(failure);
                    queue.tasks.clear();
                }
                self.changed.notify_all();
                continue;
            }
            if queue.is_closed {
                return;
            }
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Task {
    fn run(&self) -> Result<(), (&'static str, i32)> {
        match self {
            // SAFETY: who issued the copy answers for both ranges. They may be the same memory.
            Self::Copy { to, from, bytes } => unsafe {
                std::ptr::copy(*from as *const u8, *to as *mut u8, *bytes);
            },
            // SAFETY: as above.
            Self::Fill { to, value, bytes } => unsafe {
                std::ptr::write_bytes(*to as *mut u8, *value, *bytes);
            },
            Self::AddFlag { flag, value } => {
                // SAFETY: an aligned word in live memory, says who issued it; atomic everywhere.
                let flag = unsafe { AtomicU64::from_ptr(*flag as *mut u64) };
                // SYNC POINT publish: after everything that the stream did before.
                flag.fetch_add(*value, Ordering::Release);
            }
            Self::Time { to } => {
                // The clock of the kernels.
                let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
                let now_ns = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
                // SAFETY: an aligned word in live memory, says who issued it; atomic everywhere.
                let word = unsafe { AtomicU64::from_ptr(*to as *mut u64) };
                // SYNC POINT `told`: after everything that the stream did before.
                word.store(now_ns, Ordering::Release);
            }
            // SAFETY: the caller of `convert` answers for the matrices.
            Self::Convert(pieces) => pieces.iter().for_each(|piece| unsafe { convert::run(piece) }),
            Self::Checksum(params) => {
                let words = params.ranges.iter().flat_map(|range| {
                    let first = range.from().0 as *const AtomicU32;
                    // SAFETY: the caller of `checksum` answers for the memory, and ranges are aligned to words.
                    // Peers may have it mapped and write it, so the words are read as atomics.
                    (0..range.words() as usize).map(move |idx| unsafe { &*first.add(idx) })
                });
                let words = words.map(|word| u32::from_le(word.load(Ordering::Relaxed)));
                let sum = Checksum::of_words(words);
                // SAFETY: 16 bytes, aligned to 8, says who issued it.
                unsafe { (params.to.0 as *mut Checksum).write(sum) };
            }
            Self::Launch { kernel, params } => {
                let name = CString::new(*kernel).unwrap_or_default();
                // SAFETY: `prepare` checked these parameters of the kernel of this name, and its caller
                // answers for the memory.
                let code =
                    unsafe { sy_emulated_launch(name.as_ptr(), params.as_ptr().cast::<c_void>()) };
                if code != 0 {
                    return Err((kernel, code));
                }
            }
            Self::Call(action) => {
                let action = lock(action).take();
                if let Some(action) = action {
                    action();
                }
            }
            Self::Mark { marks, is_recorded } => {
                let mut counts = lock(&marks.counts);
                counts.recorded += u64::from(*is_recorded);
                counts.arrived += 1;
                counts.last = Some(Instant::now());
                marks.changed.notify_all();
            }
            Self::Await { marks, arrivals } => {
                let counts = lock(&marks.counts);
                let is_early = |counts: &mut MarkCounts| counts.arrived < *arrivals;
                let waited = marks.changed.wait_timeout_while(counts, AWAIT_LIMIT, is_early);
                if waited.unwrap_or_else(PoisonError::into_inner).1.timed_out() {
                    return Err(("wait for an event", -1));
                }
            }
            Self::Replay(tasks) => return tasks.iter().try_for_each(Self::run),
        }
        Ok(())
    }
}

fn map_shared(fd: BorrowedFd<'_>, len: u64) -> Result<*mut c_void, GpuError> {
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
    // SAFETY: a fresh mapping at an address of the system's choice.
    unsafe { rustix::mm::mmap(null_mut(), len as usize, prot, flags, fd, 0) }
        .map_err(|error| failed("mmap", error))
}

fn failed(call: &'static str, error: rustix::io::Errno) -> GpuError {
    GpuError::Driver { call, code: error.raw_os_error().unsigned_abs(), name: error.to_string() }
}

fn broken((kernel, code): (&'static str, i32)) -> GpuError {
    GpuError::Driver { call: kernel, code: code.unsigned_abs(), name: "the emulated launch".into() }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

unsafe extern "C" {
    /// Runs a kernel to its end: 0, or `SY_LAUNCH_*`.
    fn sy_emulated_launch(name: *const c_char, params: *const c_void) -> c_int;
}

/// Mappings in this process, by address, with their length: the table that a driver would have.
static RANGES: Mutex<BTreeMap<u64, MemoryRange>> = Mutex::new(BTreeMap::new());
static STREAMS: Mutex<BTreeMap<u64, Weak<Worker>>> = Mutex::new(BTreeMap::new());
/// Handles differ from small integers that a caller might invent.
static NEXT_STREAM: AtomicU64 = AtomicU64::new(0x5359_0001);
const NAME: &str = "switchyard-emulated-gpu-";
const NUM_GPUS: u32 = 16;
/// GPUs reach one another within groups of this size.
const ISLAND: u32 = 8;
const GPU_BYTES: u64 = 16 << 30;
const GRANULARITY: u64 = 64 << 10;
const PAGE: u64 = 4096;
/// A stream that failed never reaches its events.
const AWAIT_LIMIT: Duration = Duration::from_secs(60);
const QUEUE_ROOM: usize = 256;
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);
