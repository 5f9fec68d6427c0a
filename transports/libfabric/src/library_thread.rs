//! The only thread that calls the library, for providers whose calls may never return.
//!
//! libfabric's provider `shm` keeps locks in memory that processes share. A process that is killed
//! while it holds such a lock never releases it, and a caller of the library may then block
//! forever. So for such providers one thread per device makes all calls after the device is opened.
//! Opening is done by the thread that asks for the device's first pair, before any memory is
//! shared.
//!
//! A second thread watches the first. If a call does not return in time, it fails all pairs of the
//! device. All that the blocked thread owns stays allocated and mapped, because the time at which
//! the library stops using it is unknown.
//!
//! | request | handed to the thread by | the requester waits |
//! |---|---|---|
//! | puts, gets, flags, questions | the pair's outbox | for room there, at most a second |
//! | lazy additions | the device's queue of pairs | never |
//! | a new pair, the address of its peer | a task, in memory of its own | for the answer, at most [`Timeouts::call`] |
//! | the end of a pair | a task, in memory of its own | never |
//!
//! Posting allocates nothing and takes no lock. It fills a ring that was allocated with the pair
//! and wakes the thread, which is a system call if the thread sleeps. Tasks allocate. The only
//! other lock guards the list of links to fail, and is taken when a pair begins.
//!
//! The thread closes a pair once its posts are accepted, or [`Timeouts::drain`] after the request.
//! Only the last user of the device, network or endpoint waits for that, because the process may
//! exit next. It sleeps for about the same bound at most. A process that exits waits until the
//! thread is outside of the library.

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

/// True if calls of `provider` may never return.
pub(super) fn is_needed(provider: &str) -> bool {
    // `sm2` is a later implementation of the same provider.
    matches!(core_of(provider), "shm" | "sm2")
}

/// Bounds on waiting for the library.
#[derive(Debug, Clone, Copy)]
pub(super) struct Timeouts {
    /// A library call that takes longer counts as stuck forever.
    pub(super) call: Duration,
    /// Time that posts have to be accepted after their endpoint was dropped.
    pub(super) drain: Duration,
}

impl Timeouts {
    pub(super) const DEFAULT: Self =
        Self { call: Duration::from_secs(10), drain: Duration::from_millis(100) };
}

/// State that the library thread shares with all other threads. See the [module](self).
#[derive(Debug)]
pub(super) struct LibraryThread {
    provider: String,
    timeouts: Timeouts,
    pulse: Pulse,
    /// Users that may open pairs or post. Once it is zero, it stays zero.
    num_users: AtomicUsize,
    /// Disconnects once there is no user and all posts were accepted or dropped.
    drained: OnceLock<Mutex<Receiver<()>>>,
    tasks: SegQueue<Task>,
    thread: OnceLock<Thread>,
    /// Links to fail when a library call does not return.
    links: Mutex<Vec<Weak<Link>>>,
    is_stuck: AtomicBool,
    /// The device's address, as its peers use it.
    address: Vec<u8>,
}

type Work = dyn FnOnce(&Arc<Device>) + Send;

/// Work for the thread.
struct Task(Box<Work>);

impl std::fmt::Debug for Task {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Task").finish_non_exhaustive()
    }
}

impl LibraryThread {
    /// State for a device with one user: the caller.
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

    /// True if a library call has not returned in time. It stays true.
    pub(super) fn is_stuck(&self) -> bool {
        self.is_stuck.load(Ordering::Acquire)
    }

    /// Wakes the thread.
    #[inline]
    pub(super) fn wake(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    /// Queues `task` for the thread and returns at once.
    pub(super) fn submit(&self, task: impl FnOnce(&Arc<Device>) + Send + 'static) {
        self.tasks.push(Task(Box::new(task)));
        self.wake();
    }

    /// Runs `task` on the thread and waits for its result for at most [`Timeouts::call`]. The
    /// thread drops a later result.
    ///
    /// # Errors
    /// [`NetworkError`] if the library is stuck.
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

    /// Adds a link that fails when the library is stuck.
    pub(super) fn add_link(&self, link: &Arc<Link>) {
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        links.retain(|link| link.strong_count() > 0);
        links.push(Arc::downgrade(link));
    }

    /// Removes one user. The last one waits, within a bound, until its posts are accepted: the
    /// process may exit next.
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
            tracing::debug!(provider, ?timeout, "the last user of a device stops waiting");
            names::unlink(&self.address);
        }
    }

    fn stuck_reason(&self) -> String {
        format!(
            "the library has not returned for {:?}: a process that was killed may have left one of its \
             locks held; new pairs get new locks",
            self.timeouts.call
        )
    }

    fn fail_all(&self) {
        self.is_stuck.store(true, Ordering::Release);
        let links = std::mem::take(&mut *self.links.lock().unwrap_or_else(PoisonError::into_inner));
        let links: Vec<Arc<Link>> = links.iter().filter_map(Weak::upgrade).collect();
        let (provider, num_pairs) = (&self.provider, links.len());
        tracing::error!(provider, num_pairs, "pairs end: {}", self.stuck_reason());
        // New peers must not find this memory, and the endpoint may never be closed.
        names::unlink(&self.address);
        for link in links {
            link.fail("drive", 0, self.stuck_reason());
        }
    }
}

/// Counts one user of a device until it is dropped. Dropping the last one waits, within a bound,
/// until its posts are accepted.
#[derive(Debug)]
pub(super) struct UserGuard(Option<Arc<LibraryThread>>);

impl UserGuard {
    /// The guard of the user that opened the device.
    pub(super) fn first(library_thread: Option<&Arc<LibraryThread>>) -> Self {
        Self(library_thread.cloned())
    }

    /// Counts one more user. The caller must have a guard already.
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

/// Starts the thread that calls the library for `device`, and its watchdog. The first ends with the
/// last owner of the device, the second soon after.
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
            // Closes the device, unless it has another owner.
            drop(device);
            drop(guard);
        })?
    };
    let _ = library_thread.thread.set(thread.thread().clone());
    Ok(())
}

/// The thread's loop. It drops `undrained` once there is no user and all posts were accepted or
/// dropped.
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
        // Read before the tasks: a user submits its last task before it leaves.
        let is_unused = library_thread.num_users.load(Ordering::Acquire) == 0;
        // True if no other thread can submit a task or clone the device any more.
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

/// Longest time between two rounds of the thread.
const LONGEST_NAP: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests;
