//! A thread that alone calls a library which may not come back.
//!
//! libfabric's provider `shm` keeps locks in memory that processes share, and a process that is killed
//! while it holds one never releases it: whoever calls the library then may stand still inside it for
//! ever. So for such providers one thread of the device makes all calls behind its opening, which whoever asks
//! for the first pair of a device makes himself, before anything is shared. A second thread watches the first,
//! and ends all pairs of a device whose thread does not come back. What that thread holds stays as it is,
//! memory mapped, because nobody can say when the library lets go of it.
//!
//! | wanted | given to the thread by | whoever wants it waits |
//! |---|---|---|
//! | puts, gets, flags, questions | the pair's outbox | for room there, at most a second |
//! | additions that may wait | the device's queue of pairs | never |
//! | a new pair, the address of its peer | a task, in memory of its own | for the answer, at most [`Timeouts::call`] |
//! | the end of a pair | a task, in memory of its own | never |
//!
//! What is posted allocates nothing and takes no lock: it is put into a ring that was made with the pair, and the
//! thread is woken, which is a system call if it sleeps. Tasks allocate. The one lock besides is that of the
//! list of pairs to end, taken when a pair begins.
//!
//! The thread closes a pair that has ended when what was posted before is taken, or after [`Timeouts::drain`].
//! Nobody waits for that but the last user of the device, network or endpoint, since the process may end next:
//! asleep, and within about the same bound. A process that ends waits until the thread is out of the library.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::thread::Thread;
use std::time::Duration;

use crossbeam_queue::SegQueue;

use super::device::Device;
use super::link::Link;
use super::port::core_of;
use p2p_core::network::NetworkError;
use p2p_core::pulse::Pulse;

mod exit;
mod names;

/// Whether calls of `provider` may never return.
pub(super) fn is_needed(provider: &str) -> bool {
    // `sm2` is a later implementation of the same.
    matches!(core_of(provider), "shm" | "sm2")
}

/// How long is waited.
#[derive(Debug, Clone, Copy)]
pub(super) struct Timeouts {
    /// A library that does not come back for so long never will.
    pub(super) call: Duration,
    /// What was posted before the end of its endpoint has so long to be taken.
    pub(super) drain: Duration,
}

impl Timeouts {
    pub(super) const DEFAULT: Self =
        Self { call: Duration::from_secs(10), drain: Duration::from_millis(100) };
}

/// What the thread of a device and everybody else share. See the [module](self).
#[derive(Debug)]
pub(super) struct LibraryThread {
    provider: String,
    timeouts: Timeouts,
    pulse: Pulse,
    /// Those who may open pairs or post. None again once there is none.
    num_users: AtomicUsize,
    /// Ends when nobody is a user and all that they posted was taken, or given up.
    drained: OnceLock<Mutex<Receiver<()>>>,
    tasks: SegQueue<Task>,
    thread: OnceLock<Thread>,
    /// Who must be told.
    links: Mutex<Vec<Weak<Link>>>,
    is_stuck: AtomicBool,
    /// Where peers reach the device.
    address: Vec<u8>,
}

type Work = dyn FnOnce(&Arc<Device>) + Send;

/// Something to be done by the thread.
struct Task(Box<Work>);

impl std::fmt::Debug for Task {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Task").finish_non_exhaustive()
    }
}

impl LibraryThread {
    /// For a device with one user, who opens it.
    pub(super) fn new(provider: &str, address: &[u8], timeouts: Timeouts) -> Arc<Self> {
        Arc::new(Self {
            provider: provider.to_owned(),
            timeouts,
            pulse: Pulse::new(timeouts.call),
            num_users: AtomicUsize::new(1),
            drained: OnceLock::new(),
            tasks: SegQueue::new(),
            thread: OnceLock::new(),
            links: Mutex::default(),
            is_stuck: AtomicBool::new(false),
            address: address.to_vec(),
        })
    }

    /// Whether the library has not come back for too long. Stays so.
    pub(super) fn is_stuck(&self) -> bool {
        self.is_stuck.load(Ordering::Acquire)
    }

    /// Lets the thread look at once.
    #[inline]
    pub(super) fn wake(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    /// Has `task` done some time.
    pub(super) fn submit(&self, task: impl FnOnce(&Arc<Device>) + Send + 'static) {
        self.tasks.push(Task(Box::new(task)));
        self.wake();
    }

    /// Has `task` done and waits for what it gives, within a bound. What it gives later is dropped by
    /// the thread.
    ///
    /// # Errors
    /// [`NetworkError`] when the library does not come back.
    pub(super) fn call<T: Send + 'static>(
        &self,
        op: &'static str,
        task: impl FnOnce(&Arc<Device>) -> T + Send + 'static,
    ) -> Result<T, NetworkError> {
        let failed = || NetworkError {
            network: format!("libfabric {}", self.provider),
            op,
            code: None,
            detail: self.stuck_reason(),
        };
        if self.is_stuck() {
            return Err(failed());
        }
        let (sender, receiver) = sync_channel(1);
        self.submit(move |device| drop(sender.send(task(device))));
        receiver.recv_timeout(self.timeouts.call).map_err(|_| failed())
    }

    /// Remembers whom to tell when the library does not come back.
    pub(super) fn add_link(&self, link: &Arc<Link>) {
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        links.retain(|link| link.strong_count() > 0);
        links.push(Arc::downgrade(link));
    }

    /// One user less. The last one waits until what was posted is taken: the process may end next.
    fn remove_user(&self) {
        let is_last = self.num_users.fetch_sub(1, Ordering::AcqRel) == 1;
        let this = std::thread::current().id();
        if !is_last || self.is_stuck() || self.thread.get().is_none_or(|own| own.id() == this) {
            return;
        }
        let Some(drained) = self.drained.get() else { return };
        self.wake();
        let drained = drained.lock().unwrap_or_else(PoisonError::into_inner);
        let timeout = self.timeouts.drain + LONGEST_NAP;
        if drained.recv_timeout(timeout) == Err(RecvTimeoutError::Timeout) {
            let provider = &self.provider;
            tracing::debug!(provider, ?timeout, "the last user of a device does not wait longer");
            names::unlink(&self.address);
        }
    }

    fn stuck_reason(&self) -> String {
        format!(
            "the library has not come back for {:?}: a process that was killed may have left one of its \
             locks closed; new pairs get new locks",
            self.timeouts.call
        )
    }

    fn fail_all(&self) {
        self.is_stuck.store(true, Ordering::Release);
        let links = std::mem::take(&mut *self.links.lock().unwrap_or_else(PoisonError::into_inner));
        let links: Vec<Arc<Link>> = links.iter().filter_map(Weak::upgrade).collect();
        let (provider, num_pairs) = (&self.provider, links.len());
        tracing::error!(provider, num_pairs, "pairs end: {}", self.stuck_reason());
        // Nobody is to find it any more, and it may never be closed.
        names::unlink(&self.address);
        for link in links {
            link.fail("drive", 0, self.stuck_reason());
        }
    }
}

/// A user of a device, until it is dropped. The last one waits until what was posted is taken, within a bound.
#[derive(Debug)]
pub(super) struct UserGuard(Option<Arc<LibraryThread>>);

impl UserGuard {
    /// Whoever has opened the device.
    pub(super) fn first(library_thread: Option<&Arc<LibraryThread>>) -> Self {
        Self(library_thread.cloned())
    }

    /// One more, while there is another.
    pub(super) fn another(library_thread: Option<&Arc<LibraryThread>>) -> Self {
        if let Some(library_thread) = library_thread {
            library_thread.num_users.fetch_add(1, Ordering::AcqRel);
        }
        Self(library_thread.cloned())
    }
}

impl Drop for UserGuard {
    fn drop(&mut self) {
        if let Some(library_thread) = &self.0 {
            library_thread.remove_user();
        }
    }
}

/// Starts the thread that calls the library for `device`, and the one that watches it. The first ends
/// with the last owner of the device, the second soon after.
pub(super) fn start(device: &Arc<Device>, library_thread: &Arc<LibraryThread>) -> io::Result<()> {
    let watched = Arc::downgrade(library_thread);
    let watchdog = std::thread::Builder::new().name("sy-libfabric-w".to_owned());
    watchdog.spawn(move || watch(&watched))?;
    let device = Arc::clone(device);
    let thread = std::thread::Builder::new().name("sy-libfabric".to_owned());
    let (undrained, drained) = sync_channel(0);
    let _ = library_thread.drained.set(Mutex::new(drained));
    let thread = {
        let (library_thread, guard) = (Arc::clone(library_thread), exit::CallGuard::new());
        thread.spawn(move || {
            run(&device, &library_thread, undrained, &guard);
            // Closes the device, unless somebody else has it.
            drop(device);
            drop(guard);
        })?
    };
    let _ = library_thread.thread.set(thread.thread().clone());
    Ok(())
}

/// `undrained` goes when nobody is a user and all that they posted was taken, or given up.
fn run(
    device: &Arc<Device>,
    library_thread: &LibraryThread,
    undrained: SyncSender<()>,
    guard: &exit::CallGuard,
) {
    let mut undrained = Some(undrained);
    loop {
        guard.park_if_exiting();
        library_thread.pulse.beat();
        // Before the tasks: whoever leaves has handed over his last one.
        let is_unused = library_thread.num_users.load(Ordering::Acquire) == 0;
        // Nobody else can ask for anything any more, nor make another owner.
        let is_last = Arc::strong_count(device) == 1;
        fence(Ordering::Acquire);
        while let Some(Task(task)) = library_thread.tasks.pop() {
            task(device);
            library_thread.pulse.beat();
        }
        let is_drained = device.close_requested(library_thread.timeouts.drain);
        if is_unused && is_drained && undrained.is_some() {
            names::unlink(&library_thread.address);
            drop(undrained.take());
        }
        if is_last && is_drained {
            return;
        }
        device.turn();
        let nap = device.nap().min(LONGEST_NAP);
        if nap.is_zero() {
            std::thread::yield_now();
            continue;
        }
        if device.has_credits() {
            device.flush_credits();
        }
        std::thread::park_timeout(nap);
    }
}

fn watch(library_thread: &Weak<LibraryThread>) {
    let Some(mut watch) =
        library_thread.upgrade().map(|library_thread| library_thread.pulse.watch())
    else {
        return;
    };
    loop {
        let Some(interval) =
            library_thread.upgrade().map(|library_thread| library_thread.pulse.interval())
        else {
            return;
        };
        std::thread::sleep(interval);
        let Some(library_thread) = library_thread.upgrade() else { return };
        if watch.finds_stuck(&library_thread.pulse) {
            return library_thread.fail_all();
        }
    }
}

/// The thread comes round as often as this.
const LONGEST_NAP: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests;
