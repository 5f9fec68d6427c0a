//! Spin briefly, then block.
//!
//! Many processes share few cores, so nobody spins for long: a waiter polls its flags for
//! [`SpinPolicy::spin`], then asks its peers for a wake-up and sleeps in `epoll` until one of them, a
//! [`Kicker`], or the deadline wakes it.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::endpoint::Progress;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};

/// How long a waiter polls before it blocks.
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

/// A new event descriptor: non-blocking, closed on exec. Its counter begins at one, which
/// [`signal_peer`] needs; put it into a [`WaitSet`], which sees events and not counters.
///
/// # Errors
/// The system's, when descriptors are exhausted.
pub fn event_fd() -> io::Result<OwnedFd> {
    Ok(eventfd(1, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?)
}

/// Makes whoever waits on `fd`, a descriptor of this process alone, wake up.
///
/// # Errors
/// The system's.
pub fn signal_event(fd: BorrowedFd<'_>) -> io::Result<()> {
    // Nobody reads the counter, and a full one takes no event: empty it then.
    for _ in 0..2 {
        match rustix::io::write(fd, &1u64.to_ne_bytes()) {
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::AGAIN) => {
                let _ = rustix::io::read(fd, &mut [0u8; 8]);
            }
            // A signal before anything was written.
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// Makes a peer that sleeps in a [`WaitSet`] with `fd`, its [`event_fd`], wake up. Does not block,
/// whatever the peer does to its own copy of the descriptor.
///
/// # Errors
/// The system's.
pub fn signal_peer(fd: BorrowedFd<'_>) -> io::Result<()> {
    // Adding zero is an event too, and always fits. More than zero may not: the peer can fill the
    // counter and take `O_NONBLOCK` off, which all copies share, and the write would stand still. A
    // peer that empties the counter takes away its own wake-ups only.
    for _ in 0..2 {
        match rustix::io::write(fd, &0u64.to_ne_bytes()) {
            Ok(_) => return Ok(()),
            // A signal before anything was written.
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// The part of a transport that needs a CPU: completions to take, messages to put in place.
///
/// One driver serves all endpoints of a device. Whoever polls channels drives it once per sweep,
/// through [`WaitSet::drive`]; several threads may, at the same time. A driver that nobody drives
/// drives itself, only later: correctness never hangs on the caller.
pub trait Driver: Send + Sync + std::fmt::Debug {
    /// Does what is due, without waiting. Failures reach the endpoints concerned.
    fn drive(&self);

    /// Prepares for sleep: afterwards the descriptor becomes readable as soon as there is something to
    /// drive. `false` when there already is.
    fn may_sleep(&self) -> bool;

    /// Descriptor to sleep on, in edge-triggered mode. Without one, nobody sleeps longer than
    /// [`max_sleep`](Self::max_sleep).
    fn wait_fd(&self) -> Option<BorrowedFd<'_>>;

    /// Longest time without a call of `drive`.
    fn max_sleep(&self) -> Duration {
        Duration::MAX
    }
}

/// What one thread sleeps on: the wake-up descriptors of its channels, their drivers, and a kick.
#[derive(Debug)]
pub struct WaitSet {
    epoll: OwnedFd,
    kick: Arc<OwnedFd>,
    drivers: RefCell<Vec<Driven>>,
}

/// A driver, and how many endpoints of the set it serves.
#[derive(Debug)]
struct Driven {
    driver: Arc<dyn Driver>,
    num_endpoints: usize,
}

/// Wakes the owner of a [`WaitSet`] from any thread.
#[derive(Debug, Clone)]
pub struct Kicker {
    kick: Arc<OwnedFd>,
}

impl Kicker {
    /// Wakes the owner, now or at its next wait.
    pub fn kick(&self) {
        if let Err(error) = signal_event(self.kick.as_fd()) {
            tracing::error!(%error, "cannot wake a waiting thread");
        }
    }
}

impl WaitSet {
    /// An empty set.
    ///
    /// # Errors
    /// The system's, when descriptors are exhausted.
    pub fn new() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let kick = Arc::new(event_fd()?);
        let set = Self { epoll, kick, drivers: RefCell::default() };
        set.add(set.kick.as_fd())?;
        Ok(set)
    }

    /// A handle that wakes the owner.
    #[must_use]
    pub fn kicker(&self) -> Kicker {
        Kicker { kick: Arc::clone(&self.kick) }
    }

    /// Adds what `endpoint` waits on: its wake-up descriptor and its driver.
    ///
    /// # Errors
    /// The system's.
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
        drivers.push(Driven { driver, num_endpoints: 1 });
        Ok(())
    }

    /// Takes back what [`attach`](Self::attach) added.
    ///
    /// # Errors
    /// The system's.
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
        for driven in self.drivers.borrow().iter() {
            driven.driver.drive();
        }
    }

    /// Adds a descriptor, edge-triggered: every new event wakes once, and nobody has to read it, so a
    /// peer that reads its own copy can take nothing away from others.
    ///
    /// # Errors
    /// The system's.
    pub fn add(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        Ok(epoll::add(&self.epoll, fd, epoll::EventData::new_u64(0), flags)?)
    }

    /// Removes a descriptor. Closing its last copy does the same.
    ///
    /// # Errors
    /// The system's.
    pub fn remove(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        Ok(epoll::delete(&self.epoll, fd)?)
    }

    /// Sleeps until a descriptor fires, somebody kicks, or `timeout` passes. May wake for nothing.
    ///
    /// # Errors
    /// The system's, other than interruption.
    pub fn block(&self, mut timeout: Duration) -> io::Result<()> {
        for driven in self.drivers.borrow().iter() {
            if !driven.driver.may_sleep() {
                timeout = Duration::ZERO;
            }
            timeout = timeout.min(driven.driver.max_sleep());
        }
        let timeout = Timespec {
            tv_sec: timeout.as_secs().min(3600).cast_signed(),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 16];
        let waited = epoll::wait(&self.epoll, &mut events[..], Some(&timeout));
        self.drive();
        match waited {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

fn is_same(a: &Arc<dyn Driver>, b: &Arc<dyn Driver>) -> bool {
    std::ptr::addr_eq(Arc::as_ptr(a), Arc::as_ptr(b))
}

/// Polls until `poll` gives something or `deadline` passes; then `None`.
///
/// `arm(true)` asks all peers that `poll` looks at for a wake-up, `arm(false)` takes that back. It is
/// called in pairs, and only if the spin phase found nothing.
///
/// # Errors
/// The system's, from blocking.
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

    /// Waits for an event of `set`. What was there when a descriptor was added is none.
    fn is_woken(set: &WaitSet, timeout: Duration) -> bool {
        let start = Instant::now();
        set.block(timeout).unwrap();
        start.elapsed() < timeout
    }

    /// A set that has seen what its descriptors begin with.
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
    fn every_event_wakes_once_although_nobody_reads_it() {
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
    fn a_peer_that_fills_the_counter_and_lets_writes_block_holds_nobody_up() {
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

    /// Leaves no room in the counter, as the holder of any copy can.
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
