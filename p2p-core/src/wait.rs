//! Spin briefly, then block.
//!
//! Many processes share few cores, so nobody spins for long: a waiter polls its flags for
//! [`SpinPolicy::spin`], then asks its peers for a wake-up and sleeps in `epoll` until one of them, a
//! [`Kicker`], or the deadline wakes it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

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

/// A new event descriptor: non-blocking, closed on exec.
///
/// # Errors
/// The system's, when descriptors are exhausted.
pub fn event_fd() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?)
}

/// Makes whoever waits on `fd` wake up.
///
/// # Errors
/// The system's.
pub fn signal_event(fd: BorrowedFd<'_>) -> io::Result<()> {
    // Nobody reads the counter, so somebody may have filled it, and a full one takes no event: empty
    // it then. Twice is enough unless the peer works against its own wake-up.
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

/// What one thread sleeps on: the wake-up descriptors of its channels, and a kick.
#[derive(Debug)]
pub struct WaitSet {
    epoll: OwnedFd,
    kick: Arc<OwnedFd>,
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
        let set = Self { epoll, kick };
        set.add(set.kick.as_fd())?;
        Ok(set)
    }

    /// A handle that wakes the owner.
    #[must_use]
    pub fn kicker(&self) -> Kicker {
        Kicker { kick: Arc::clone(&self.kick) }
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
    pub fn block(&self, timeout: Duration) -> io::Result<()> {
        let timeout = Timespec {
            tv_sec: timeout.as_secs().min(3600).cast_signed(),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 16];
        match epoll::wait(&self.epoll, &mut events[..], Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
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

    #[test]
    fn a_kick_before_the_wait_is_not_lost() {
        let set = WaitSet::new().unwrap();
        set.kicker().kick();
        let start = Instant::now();
        set.block(Duration::from_secs(30)).unwrap();
        assert!(start.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn a_full_counter_still_wakes() {
        let (set, event) = (WaitSet::new().unwrap(), event_fd().unwrap());
        set.add(event.as_fd()).unwrap();
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        set.block(Duration::from_secs(30)).unwrap();
        signal_event(event.as_fd()).unwrap();
        let start = Instant::now();
        set.block(Duration::from_secs(30)).unwrap();
        assert!(start.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn an_unread_event_does_not_wake_twice() {
        let (set, event) = (WaitSet::new().unwrap(), event_fd().unwrap());
        set.add(event.as_fd()).unwrap();
        signal_event(event.as_fd()).unwrap();
        set.block(Duration::from_secs(30)).unwrap();
        let start = Instant::now();
        set.block(Duration::from_millis(30)).unwrap();
        assert!(start.elapsed() >= Duration::from_millis(30), "the idle waiter spins");
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
