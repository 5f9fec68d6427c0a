//! Spin briefly, then block.
//!
//! Many processes share few cores, so a waiter does not spin for long. It polls its flags for
//! [`SpinPolicy::spin`], then asks its peers for a wake-up and sleeps in `epoll`. A peer, a
//! [`Kicker`] or the deadline wakes it.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::endpoint::Progress;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};

/// Time that a waiter polls before it blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpinPolicy {
    /// Time spent polling. Zero blocks at once.
    pub spin: Duration,
}

impl Default for SpinPolicy {
    /// 20 µs: several flag round trips, and less than a sleep and wake-up cost together.
    fn default() -> Self {
        Self { spin: Duration::from_micros(20) }
    }
}

/// Makes a new event descriptor: non-blocking, closed on exec.
///
/// Its counter begins at one, which [`signal_peer`] needs. Put it into a [`WaitSet`], which sees
/// events and not counters.
///
/// # Errors
/// The system's error when descriptors are exhausted.
pub fn event_fd() -> io::Result<OwnedFd> {
    Ok(eventfd(1, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?)
}

/// Wakes the threads that wait on `fd`, a descriptor that only this process holds.
///
/// # Errors
/// The system's error.
pub fn signal_event(fd: BorrowedFd<'_>) -> io::Result<()> {
    // No reader empties the counter, and a full one takes no event. So empty it then.
    for _ in 0..2 {
        match rustix::io::write(fd, &1u64.to_ne_bytes()) {
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::AGAIN) => {
                let _ = rustix::io::read(fd, &mut [0u8; 8]);
            }
            // A signal came before anything was written.
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// Wakes a peer that sleeps in a [`WaitSet`] with `fd`, its [`event_fd`].
///
/// Does not block, whatever the peer does to its own copy of the descriptor.
///
/// # Errors
/// The system's error.
pub fn signal_peer(fd: BorrowedFd<'_>) -> io::Result<()> {
    // Adding zero is an event too, and always fits. A larger number may not fit: the peer can fill
    // the counter and clear `O_NONBLOCK`, which all copies share, and the write would block. A peer
    // that empties the counter loses only its own wake-ups.
    for _ in 0..2 {
        match rustix::io::write(fd, &0u64.to_ne_bytes()) {
            Ok(_) => return Ok(()),
            // A signal came before anything was written.
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// The part of a transport that needs a CPU: it takes completions and puts messages in place.
///
/// One driver serves all endpoints of a device. A thread that polls channels drives it once per
/// sweep, through [`WaitSet::drive`]. Several threads may drive it at the same time. A driver that
/// no caller drives still makes progress by itself, only later. So correctness never depends on the
/// caller.
pub trait Driver: Send + Sync + std::fmt::Debug {
    /// Does the work that is due, without waiting. Failures reach the endpoints concerned.
    fn drive(&self);

    /// Prepares for sleep. Afterwards the descriptor becomes readable as soon as there is something
    /// to drive. Returns `false` when there already is.
    fn may_sleep(&self) -> bool;

    /// Descriptor to sleep on, in edge-triggered mode. Without one, no thread sleeps longer than
    /// [`max_sleep`](Self::max_sleep).
    fn wait_fd(&self) -> Option<BorrowedFd<'_>>;

    /// Longest time without a call of `drive`.
    fn max_sleep(&self) -> Duration {
        Duration::MAX
    }
}

/// The wake-up descriptors of one thread's channels, their drivers, and an event for kicks. The
/// thread sleeps on all of them at once.
#[derive(Debug)]
pub struct WaitSet {
    epoll: OwnedFd,
    kick: Arc<OwnedFd>,
    drivers: RefCell<Vec<DriverEntry>>,
}

/// A driver, with the number of endpoints of the set that it serves.
#[derive(Debug)]
struct DriverEntry {
    driver: Arc<dyn Driver>,
    num_endpoints: usize,
}

/// Wakes the owner of a [`WaitSet`] from any thread.
#[derive(Debug, Clone)]
pub struct Kicker {
    kick: Arc<OwnedFd>,
}

impl Kicker {
    /// Wakes the owner at once, or at its next wait.
    pub fn kick(&self) {
        if let Err(error) = signal_event(self.kick.as_fd()) {
            tracing::error!(%error, "cannot wake a waiting thread");
        }
    }
}

impl WaitSet {
    /// Makes an empty set.
    ///
    /// # Errors
    /// The system's error when descriptors are exhausted.
    pub fn new() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let kick = Arc::new(event_fd()?);
        let set = Self { epoll, kick, drivers: RefCell::default() };
        set.add(set.kick.as_fd())?;
        Ok(set)
    }

    /// Returns a handle that wakes the owner.
    #[must_use]
    pub fn kicker(&self) -> Kicker {
        Kicker { kick: Arc::clone(&self.kick) }
    }

    /// Adds the wake-up descriptor and the driver of `endpoint`.
    ///
    /// # Errors
    /// The system's error.
    pub fn attach(&self, endpoint: &impl Progress) -> io::Result<()> {
        if let Some(fd) = endpoint.wait_fd() {
            self.add(fd)?;
        }
        let Some(driver) = endpoint.driver() else { return Ok(()) };
        let mut drivers = self.drivers.borrow_mut();
        if let Some(known) = drivers.iter_mut().find(|known| is_same(&known.driver, &driver)) {
            known.num_endpoints += 1;
            return Ok(());
        }
        if let Some(fd) = driver.wait_fd() {
            self.add(fd)?;
        }
        drivers.push(DriverEntry { driver, num_endpoints: 1 });
        Ok(())
    }

    /// Removes the descriptors that [`attach`](Self::attach) added.
    ///
    /// # Errors
    /// The system's error.
    pub fn detach(&self, endpoint: &impl Progress) -> io::Result<()> {
        if let Some(driver) = endpoint.driver() {
            let mut drivers = self.drivers.borrow_mut();
            if let Some(idx) = drivers.iter().position(|known| is_same(&known.driver, &driver)) {
                drivers[idx].num_endpoints -= 1;
                if drivers[idx].num_endpoints == 0 {
                    drivers.swap_remove(idx);
                    if let Some(fd) = driver.wait_fd() {
                        self.remove(fd)?;
                    }
                }
            }
        }
        endpoint.wait_fd().map_or(Ok(()), |fd| self.remove(fd))
    }

    /// Drives every driver of the set once. Costs nothing without one.
    #[inline]
    pub fn drive(&self) {
        for entry in self.drivers.borrow().iter() {
            entry.driver.drive();
        }
    }

    /// Adds a descriptor, edge-triggered: every new event wakes once, and no thread has to read it.
    /// So a peer that reads its own copy takes no wake-up away from others.
    ///
    /// # Errors
    /// The system's error.
    pub fn add(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        Ok(epoll::add(&self.epoll, fd, epoll::EventData::new_u64(0), flags)?)
    }

    /// Removes a descriptor. Closing its last copy does the same.
    ///
    /// # Errors
    /// The system's error.
    pub fn remove(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        Ok(epoll::delete(&self.epoll, fd)?)
    }

    /// Sleeps until a descriptor fires, a [`Kicker`] kicks, or `timeout` passes. May wake for
    /// nothing.
    ///
    /// # Errors
    /// The system's error, other than interruption.
    pub fn block(&self, mut timeout: Duration) -> io::Result<()> {
        for entry in self.drivers.borrow().iter() {
            if !entry.driver.may_sleep() {
                timeout = Duration::ZERO;
            }
            timeout = timeout.min(entry.driver.max_sleep());
        }
        let timeout = Timespec {
            tv_sec: timeout.as_secs().min(3600).cast_signed(),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        let waited = wait_precisely(self.epoll.as_fd(), &timeout).unwrap_or_else(|| {
            let mut events = [epoll::Event {
                flags: epoll::EventFlags::empty(),
                data: epoll::EventData::new_u64(0),
            }; MAX_EVENTS];
            epoll::wait(&self.epoll, &mut events[..], Some(&timeout)).map(drop)
        });
        self.drive();
        match waited {
            Ok(()) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// Waits with a timeout in nanoseconds; `epoll_wait` rounds to milliseconds. Returns `None` for timeouts of many
/// milliseconds, and where the system has no such call (Linux before 5.11).
fn wait_precisely(
    epoll: BorrowedFd<'_>,
    timeout: &Timespec,
) -> Option<Result<(), rustix::io::Errno>> {
    if timeout.tv_sec > 0 || timeout.tv_nsec > MAX_PRECISE_NS || IS_IMPRECISE.load(Relaxed) {
        return None;
    }
    let timeout = libc::timespec { tv_sec: 0, tv_nsec: timeout.tv_nsec };
    let mut events = [libc::epoll_event { events: 0, u64: 0 }; MAX_EVENTS];
    // SAFETY: the kernel writes up to MAX_EVENTS entries to `events` and reads `timeout`, and both live until it
    // returns. Without a signal mask it ignores the last argument.
    let waited = unsafe {
        libc::syscall(
            libc::SYS_epoll_pwait2,
            epoll.as_raw_fd(),
            events.as_mut_ptr(),
            MAX_EVENTS as libc::c_int,
            &raw const timeout,
            std::ptr::null::<libc::sigset_t>(),
            0usize,
        )
    };
    if waited >= 0 {
        return Some(Ok(()));
    }
    let errno = io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
    // Filters of system calls refuse unknown ones with EPERM.
    if errno == libc::ENOSYS || errno == libc::EPERM {
        IS_IMPRECISE.store(true, Relaxed);
        return None;
    }
    Some(Err(rustix::io::Errno::from_raw_os_error(errno)))
}

/// Set once the system has refused `epoll_pwait2`.
static IS_IMPRECISE: AtomicBool = AtomicBool::new(false);
/// Longer timeouts need no precision.
const MAX_PRECISE_NS: i64 = 5_000_000;
const MAX_EVENTS: usize = 16;

fn is_same(a: &Arc<dyn Driver>, b: &Arc<dyn Driver>) -> bool {
    std::ptr::addr_eq(Arc::as_ptr(a), Arc::as_ptr(b))
}

/// Polls until `poll` returns a value. Returns `None` if `deadline` passes first.
///
/// `arm(true)` asks all peers that `poll` looks at for a wake-up, and `arm(false)` takes the
/// request back. They are called in pairs, and only if the spin phase found nothing.
///
/// # Errors
/// The system's error from blocking.
///
/// # Examples
/// A thread waits up to 5 s for a frame:
///
/// ```
/// use std::time::{Duration, Instant};
/// use switchyard_p2p_core::{SlotConfig, SpinPolicy, WaitSet, backend::local, wait::wait_until};
///
/// let config = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
/// let (mut sender, mut receiver) = local::pair(config).unwrap();
/// let set = WaitSet::new().unwrap();
/// set.attach(receiver.endpoint()).unwrap();
/// std::thread::spawn(move || {
///     let frame = sender.try_reserve().unwrap().expect("a free frame");
///     sender.write_view(&frame).put_bytes(0, b"hello").unwrap();
///     sender.publish(frame, 5).unwrap();
/// });
///
/// let deadline = Instant::now() + Duration::from_secs(5);
/// let has_frame = || receiver.has_frame().then_some(());
/// let arm = |on| if on { receiver.arm() } else { receiver.disarm() };
/// let found = wait_until(&set, SpinPolicy::default(), deadline, has_frame, arm).unwrap();
/// assert!(found.is_some(), "no frame within 5 s");
/// let frame = receiver.try_next().unwrap().expect("the frame");
/// let mut bytes = [0; 5];
/// receiver.view(&frame).copy_to(0, &mut bytes).unwrap();
/// receiver.release().unwrap();
/// assert_eq!(&bytes, b"hello");
/// ```
pub fn wait_until<T>(
    set: &WaitSet,
    policy: SpinPolicy,
    deadline: Instant,
    mut poll: impl FnMut() -> Option<T>,
    mut arm: impl FnMut(bool),
) -> io::Result<Option<T>> {
    let start = Instant::now();
    loop {
        for _ in 0..32 {
            set.drive();
            if let Some(found) = poll() {
                return Ok(Some(found));
            }
            std::hint::spin_loop();
        }
        let now = Instant::now();
        if now >= deadline {
            return Ok(None);
        }
        if now - start >= policy.spin {
            break;
        }
    }
    arm(true);
    let result = loop {
        if let Some(found) = poll() {
            break Ok(Some(found));
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break Ok(None);
        }
        if let Err(error) = set.block(left) {
            break Err(error);
        }
    };
    arm(false);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits for an event of `set`. The state of a descriptor when it was added is no event.
    fn is_woken(set: &WaitSet, timeout: Duration) -> bool {
        let start = Instant::now();
        set.block(timeout).unwrap();
        start.elapsed() < timeout
    }

    /// A set that has seen the first state of its descriptors.
    fn quiet_set(events: &[&OwnedFd]) -> WaitSet {
        let set = WaitSet::new().unwrap();
        events.iter().for_each(|event| set.add(event.as_fd()).unwrap());
        set.block(Duration::ZERO).unwrap();
        set
    }

    #[test]
    fn a_kick_before_the_wait_is_not_lost() {
        let set = quiet_set(&[]);
        assert!(!is_woken(&set, Duration::from_millis(5)), "woken by nothing");
        set.kicker().kick();
        assert!(is_woken(&set, Duration::from_secs(20)));
    }

    #[test]
    fn every_event_wakes_once_even_if_unread() {
        let event = event_fd().unwrap();
        let set = quiet_set(&[&event]);
        for signal in [signal_event, signal_peer, signal_peer, signal_event] {
            signal(event.as_fd()).unwrap();
            assert!(is_woken(&set, Duration::from_secs(20)));
            assert!(!is_woken(&set, Duration::from_millis(30)), "the idle waiter spins");
        }
    }

    #[test]
    fn a_full_counter_still_wakes() {
        let event = event_fd().unwrap();
        let set = quiet_set(&[&event]);
        fill(&event);
        set.block(Duration::ZERO).unwrap();
        signal_event(event.as_fd()).unwrap();
        assert!(is_woken(&set, Duration::from_secs(20)));
    }

    #[test]
    fn a_peer_that_fills_the_counter_and_lets_writes_block_delays_no_signal() {
        let event = event_fd().unwrap();
        let set = quiet_set(&[&event]);
        fill(&event);
        rustix::fs::fcntl_setfl(&event, rustix::fs::OFlags::empty()).unwrap();
        set.block(Duration::ZERO).unwrap();
        let (sender, signalled) = std::sync::mpsc::channel();
        let copy = event.try_clone().unwrap();
        std::thread::spawn(move || sender.send(signal_peer(copy.as_fd())));
        let result = signalled.recv_timeout(Duration::from_secs(20));
        result.expect("the signal does not block").unwrap();
        assert!(is_woken(&set, Duration::from_secs(20)));
    }

    /// Fills the counter, as the holder of any copy can.
    fn fill(event: &OwnedFd) {
        rustix::io::write(event, &(u64::MAX - 2).to_ne_bytes()).unwrap();
        let more = rustix::io::write(event, &1u64.to_ne_bytes());
        assert_eq!(more, Err(rustix::io::Errno::AGAIN));
    }

    #[test]
    fn a_wait_ends_at_its_deadline_and_disarms() {
        let set = WaitSet::new().unwrap();
        let armed = std::cell::Cell::new(0);
        let deadline = Instant::now() + Duration::from_millis(5);
        let found = wait_until(
            &set,
            SpinPolicy::default(),
            deadline,
            || None::<()>,
            |on| {
                armed.set(armed.get() + if on { 1 } else { -1 });
            },
        );
        assert!(found.unwrap().is_none() && Instant::now() >= deadline);
        assert_eq!(armed.get(), 0);
    }
}
