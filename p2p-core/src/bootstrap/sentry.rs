//! Who holds the connections that tell peers of this process's death.
//!
//! A process that is killed dies thread by thread. The last of them gives up the memory first, which takes
//! tens of milliseconds per GiB, and the descriptors that the threads share afterwards: connections among
//! them end late ([measured](../../../bench/runs/2026-11-26-death/README.md)). So one thread, the sentry, has
//! a table of descriptors of its own (`close_range(2)` with `CLOSE_RANGE_UNSHARE`), which goes with that
//! thread, and connections are in that table only. That helps unless the sentry is the last thread itself.
//! Threads are told to die in the order in which they came, so some that do nothing are created right behind
//! it. They make it likely and not certain: otherwise the connection ends late, as it would have.
//!
//! In the sentry's thread a number is another descriptor than elsewhere. **It must touch no descriptor but
//! its own**: it logs nothing, and wakes no task of a runtime, which would write to a descriptor. Whoever
//! waits does so at an event of the peer, of which the sentry has a copy.
//!
//! Where the system gives no table of its own (Linux before 5.9, or a filter of system calls), the sentry
//! does the same with the table that all share.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketFlags, SocketType, recvmsg, sendmsg, sockopt,
};

use super::liveness::{CloseReason, why_over};
use super::wire::encode_goodbye;
use crate::wait::{event_fd, signal_event};

/// A connection that the sentry holds. Dropping it closes the connection.
#[derive(Debug)]
pub(super) struct Kept {
    sentry: &'static Sentry,
    id: u64,
    peer: Arc<Peer>,
    event: OwnedFd,
}

impl Kept {
    /// Gives `socket`, which nobody else may hold, to the sentry.
    ///
    /// # Errors
    /// The system's, when threads or descriptors are exhausted.
    pub(super) fn new(socket: OwnedFd) -> io::Result<Self> {
        Self::of(Sentry::get()?, socket)
    }

    fn of(sentry: &'static Sentry, socket: OwnedFd) -> io::Result<Self> {
        let event = event_fd()?;
        let (id, peer) = sentry.adopt(socket, event.as_fd())?;
        Ok(Self { sentry, id, peer, event })
    }

    /// Why the connection is over, or `None` while it stands.
    pub(super) fn reason(&self) -> Option<CloseReason> {
        self.peer.reason()
    }

    /// Says goodbye and closes the connection, before this returns.
    pub(super) fn close(&self) {
        // A sentry that is gone has closed it.
        if self.sentry.tell(CLOSE, self.id, &[]).is_ok() {
            self.peer.wait_closed();
        }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        // As above.
        let _ = self.sentry.tell(DROP, self.id, &[]);
    }
}

impl AsRawFd for Kept {
    fn as_raw_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }
}

impl AsFd for Kept {
    /// The event: readable anew when the connection is over.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// What is known about one connection.
#[derive(Debug, Default)]
struct Peer {
    /// 0, or 1 and a place in [`REASONS`].
    reason: AtomicU8,
    is_closed: Mutex<bool>,
    closed: Condvar,
}

impl Peer {
    fn reason(&self) -> Option<CloseReason> {
        // Acquire: what the sentry did before is done.
        let code = self.reason.load(Ordering::Acquire);
        REASONS.get(usize::from(code).checked_sub(1)?).copied()
    }

    /// The first reason stays. Without an event, whoever asks finds out.
    fn end(&self, reason: CloseReason, event: Option<BorrowedFd<'_>>) {
        let place = REASONS.iter().position(|known| *known == reason).unwrap_or(0);
        let code = place as u8 + 1;
        let is_first =
            self.reason.compare_exchange(0, code, Ordering::Release, Ordering::Relaxed).is_ok();
        if is_first && let Some(event) = event {
            // Cannot fail: it is an event, and `signal_event` empties one that is full.
            let _ = signal_event(event);
        }
    }

    fn note_closed(&self) {
        *lock(&self.is_closed) = true;
        self.closed.notify_all();
    }

    fn wait_closed(&self) {
        let limit = SENTRY_LIMIT;
        // Past the limit the goodbye is late.
        drop(self.closed.wait_timeout_while(lock(&self.is_closed), limit, |closed| !*closed));
    }
}

const REASONS: [CloseReason; 6] = [
    CloseReason::Lost,
    CloseReason::Left,
    CloseReason::Reset,
    CloseReason::Unreachable,
    CloseReason::Local,
    CloseReason::Protocol,
];

/// The side that all threads use.
#[derive(Debug)]
struct Sentry {
    /// Messages to the sentry's thread.
    door: OwnedFd,
    next_id: AtomicU64,
    incoming: Arc<Mutex<HashMap<u64, Arc<Peer>>>>,
    /// Whether the thread has a table of its own.
    is_private: bool,
    /// The kernel's number of the thread.
    #[cfg(test)]
    tid: i32,
}

impl Sentry {
    /// The process's sentry, which the first caller starts.
    fn get() -> io::Result<&'static Self> {
        static SENTRY: Mutex<Option<&'static Sentry>> = Mutex::new(None);
        let mut sentry = lock(&SENTRY);
        if let Some(sentry) = *sentry {
            return Ok(sentry);
        }
        let started: &'static Self = Box::leak(Box::new(Self::start(leave_table)?));
        if !started.is_private {
            tracing::debug!("no table of descriptors for one thread: deaths may be known later");
        }
        *sentry = Some(started);
        Ok(started)
    }

    /// `leave` gives a thread a table of its own, with one descriptor of the old one; `false` where it cannot.
    fn start(leave: fn(RawFd) -> bool) -> io::Result<Self> {
        let (door, inner) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        sockopt::set_socket_timeout(&door, sockopt::Timeout::Send, Some(SENTRY_LIMIT))?;
        let incoming = Arc::new(Mutex::default());
        let (told, begun) = mpsc::channel();
        let raw = inner.as_raw_fd();
        let shared = Arc::clone(&incoming);
        thread::Builder::new().name("sy-liveness".to_owned()).spawn(move || {
            let is_private = leave(raw);
            // SAFETY: in a table of its own the number is this thread's copy, which nothing else owns; in
            // the shared one the starting thread gives its ownership up when it hears of that.
            let door = unsafe { OwnedFd::from_raw_fd(raw) };
            if told.send((is_private, rustix::thread::gettid())).is_ok() {
                Room { peers: BTreeMap::new(), incoming: shared, is_private }.serve(&door);
            }
        })?;
        // The thread has only to make one system call or two.
        let (is_private, _tid) = begun.recv().map_err(io::Error::other)?;
        if is_private {
            drop(inner);
        } else {
            let _ = inner.into_raw_fd();
        }
        for _ in 0..NUM_BEHIND {
            let behind = thread::Builder::new().name("sy-behind".to_owned());
            behind.stack_size(MIN_STACK).spawn(|| {
                loop {
                    thread::park();
                }
            })?;
        }
        Ok(Self {
            door,
            next_id: AtomicU64::new(0),
            incoming,
            is_private,
            #[cfg(test)]
            tid: _tid.as_raw_nonzero().get(),
        })
    }

    fn adopt(&self, socket: OwnedFd, event: BorrowedFd<'_>) -> io::Result<(u64, Arc<Peer>)> {
        // Relaxed: numbers only have to differ.
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let peer = Arc::new(Peer::default());
        lock(&self.incoming).insert(id, Arc::clone(&peer));
        // The socket is closed here once the message holds it.
        if let Err(error) = self.tell(ADOPT, id, &[event, socket.as_fd()]) {
            lock(&self.incoming).remove(&id);
            return Err(error);
        }
        Ok((id, peer))
    }

    fn tell(&self, kind: u64, id: u64, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut message = [0; MESSAGE_BYTES];
        message[..8].copy_from_slice(&kind.to_ne_bytes());
        message[8..].copy_from_slice(&id.to_ne_bytes());
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        loop {
            match sendmsg(&self.door, &[IoSlice::new(&message)], &mut control, SendFlags::NOSIGNAL)
            {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

/// Gives the calling thread a table of descriptors of its own, with standard input, output and error, and
/// `kept`. Whether that worked.
fn leave_table(kept: RawFd) -> bool {
    let close_range = |first: RawFd, last: libc::c_uint, flags: libc::c_uint| {
        // SAFETY: the first call leaves the shared table before it closes anything, and without it no other
        // is made; in a table of its own this thread owns nothing but `kept`.
        unsafe { libc::syscall(libc::SYS_close_range, first as libc::c_uint, last, flags) == 0 }
    };
    if !close_range(kept + 1, libc::c_uint::MAX, CLOSE_RANGE_UNSHARE) {
        return false;
    }
    // What stays open for want of this goes with the thread.
    let _ = kept <= BEHIND_STDIO || close_range(BEHIND_STDIO, (kept - 1).cast_unsigned(), 0);
    true
}

/// What the sentry's thread has.
struct Room {
    peers: BTreeMap<u64, Held>,
    incoming: Arc<Mutex<HashMap<u64, Arc<Peer>>>>,
    is_private: bool,
}

struct Held {
    socket: OwnedFd,
    event: OwnedFd,
    peer: Arc<Peer>,
}

impl Room {
    fn serve(&mut self, door: &OwnedFd) {
        // An error ends the thread, and with it all connections, as `drop` tells.
        let Ok(epoll) = epoll::create(epoll::CreateFlags::CLOEXEC) else { return };
        let data = epoll::EventData::new_u64(DOOR);
        if epoll::add(&epoll, door, data, epoll::EventFlags::IN).is_err() {
            return;
        }
        let none = epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(DOOR),
        };
        let mut events = [none; 32];
        loop {
            // Works only when there is something to do, as long as the process lives.
            let num_events = match epoll::wait(&epoll, &mut events[..], None) {
                Ok(num_events) => num_events,
                Err(Errno::INTR) => continue,
                Err(_) => return,
            };
            for event in &events[..num_events] {
                match event.data.u64() {
                    DOOR => match self.receive(&epoll, door) {
                        Ok(()) | Err(Errno::AGAIN | Errno::INTR) => {}
                        Err(_) => return,
                    },
                    id => self.look(id),
                }
            }
        }
    }

    fn look(&self, id: u64) {
        // It may have been dropped since the event.
        if let Some(held) = self.peers.get(&id)
            && let Some(reason) = why_over(&held.socket)
        {
            held.peer.end(reason, Some(held.event.as_fd()));
        }
    }

    /// Takes one message.
    fn receive(&mut self, epoll: &OwnedFd, door: &OwnedFd) -> Result<(), Errno> {
        let mut message = [0; MESSAGE_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let got = recvmsg(door, &mut [IoSliceMut::new(&mut message)], &mut control, flags)?;
        if got.bytes != MESSAGE_BYTES {
            // The other end is as old as the process: it does not end.
            return Err(Errno::PIPE);
        }
        let mut fds = Vec::new();
        for part in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = part {
                fds.extend(rights);
            }
        }
        let word = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&message[at..at + 8]);
            u64::from_ne_bytes(bytes)
        };
        let (kind, id) = (word(0), word(8));
        match kind {
            ADOPT => self.adopt(epoll, id, fds),
            CLOSE => self.close(id),
            _ => drop(self.peers.remove(&id)),
        }
        Ok(())
    }

    fn adopt(&mut self, epoll: &OwnedFd, id: u64, fds: Vec<OwnedFd>) {
        let Some(peer) = lock(&self.incoming).remove(&id) else { return };
        let mut fds = fds.into_iter();
        let (Some(event), socket) = (fds.next(), fds.next()) else {
            // There was no room for another descriptor, and the connection is closed.
            peer.end(CloseReason::Local, None);
            return;
        };
        let Some(socket) = socket else {
            peer.end(CloseReason::Local, Some(event.as_fd()));
            return;
        };
        let socket = if self.is_private { socket } else { move_high(socket) };
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        let data = epoll::EventData::new_u64(id);
        if epoll::add(epoll, &socket, data, flags).is_err() {
            peer.end(CloseReason::Local, Some(event.as_fd()));
        }
        self.peers.insert(id, Held { socket, event, peer });
        // What came before it was watched.
        self.look(id);
    }

    fn close(&self, id: u64) {
        let Some(held) = self.peers.get(&id) else { return };
        // Best effort: a peer that is gone or does not read learns it from the shutdown.
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = rustix::net::send(&held.socket, &encode_goodbye(), flags);
        let _ = rustix::net::shutdown(&held.socket, Shutdown::Both);
        held.peer.end(CloseReason::Local, Some(held.event.as_fd()));
        held.peer.note_closed();
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        for held in self.peers.values() {
            held.peer.end(CloseReason::Local, Some(held.event.as_fd()));
            held.peer.note_closed();
        }
        for peer in lock(&self.incoming).drain().map(|(_, peer)| peer) {
            peer.end(CloseReason::Local, None);
        }
    }
}

/// Moves a descriptor of the table that all threads share to a high number: the kernel closes a dying
/// process's files last to first, and a GPU driver's take tens of milliseconds, which the peer would wait
/// for.
fn move_high(low: OwnedFd) -> OwnedFd {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let limit = limit.unwrap_or(u64::MAX).min(1 << 20) as i32;
    for start in [HIGH_FD, limit / 4 * 3, limit / 2] {
        if start < limit
            && let Ok(high) = rustix::io::fcntl_dupfd_cloexec(&low, start)
        {
            return high;
        }
    }
    low
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Threads that are to die after the sentry. Of 120 kills each on two processors, 94 were late with none, 9
/// with one, 3 with two, 2 with four and 1 with eight, in a process of few threads.
const NUM_BEHIND: usize = 4;
const HIGH_FD: i32 = 700;
/// Of `<linux/close_range.h>`: not all C libraries have a name for it.
const CLOSE_RANGE_UNSHARE: libc::c_uint = 1 << 1;
const BEHIND_STDIO: RawFd = 3;
const ADOPT: u64 = 1;
const CLOSE: u64 = 2;
const DROP: u64 = 3;
/// Kind and number.
const MESSAGE_BYTES: usize = 16;
/// In place of a peer's number.
const DOOR: u64 = u64::MAX;
/// For the sentry to take a message, or to say goodbye. It takes microseconds, where a processor is free.
const SENTRY_LIMIT: Duration = Duration::from_secs(1);
const MIN_STACK: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::time::Instant;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    /// Sentrys with tables of their own, and without.
    fn sentries() -> [&'static Sentry; 2] {
        let leaves: [fn(RawFd) -> bool; 2] = [leave_table, |_| false];
        leaves.map(|leave| &*Box::leak(Box::new(Sentry::start(leave).expect("a sentry"))))
    }

    fn pair(sentry: &'static Sentry) -> (Kept, UnixStream) {
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        ours.set_nonblocking(true).expect("a socket");
        theirs.set_read_timeout(Some(PATIENCE)).expect("a socket");
        (Kept::of(sentry, ours.into()).expect("kept"), theirs)
    }

    fn until_over(kept: &Kept) -> CloseReason {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(reason) = kept.reason() {
                return reason;
            }
            assert!(Instant::now() < deadline, "{kept:?}");
            thread::yield_now();
        }
    }

    fn count(event: BorrowedFd<'_>) -> u64 {
        let mut bytes = [0; 8];
        rustix::io::read(event, &mut bytes).map_or(0, |_| u64::from_ne_bytes(bytes))
    }

    #[test]
    fn a_socket_is_in_the_sentries_table_and_in_no_other() {
        let [private, shared] = sentries();
        assert!(private.is_private, "this system has close_range(2)");
        assert!(!shared.is_private);
        for sentry in [private, shared] {
            let (ours, theirs) = UnixStream::pair().expect("sockets");
            let name = std::fs::read_link(format!("/proc/self/fd/{}", ours.as_raw_fd()));
            let name = name.expect("a socket's name");
            let copies = |folder: &str| {
                let entries = std::fs::read_dir(folder).expect("descriptors").flatten();
                // What is closed meanwhile is not it.
                entries
                    .filter(|entry| std::fs::read_link(entry.path()).is_ok_and(|at| at == name))
                    .count()
            };
            let kept = Kept::of(sentry, ours.into()).expect("kept");
            let own = format!("/proc/self/task/{}/fd", sentry.tid);
            let deadline = Instant::now() + PATIENCE;
            while copies(&own) != 1 {
                assert!(Instant::now() < deadline, "{} copies", copies(&own));
                thread::yield_now();
            }
            assert_eq!(copies("/proc/self/fd"), usize::from(!sentry.is_private));
            let stdio: Vec<_> =
                (0..3).map(|fd| std::fs::read_link(format!("{own}/{fd}"))).collect();
            assert!(stdio.iter().all(Result::is_ok), "{stdio:?}");
            drop((kept, theirs));
        }
    }

    #[test]
    fn what_the_other_end_does_is_told_with_an_event() {
        for sentry in sentries() {
            for (bytes, expected) in [
                (&encode_goodbye()[..], CloseReason::Left),
                (&[0xa5; 16], CloseReason::Protocol),
                (&[], CloseReason::Lost),
            ] {
                let (kept, mut theirs) = pair(sentry);
                assert_eq!((kept.reason(), count(kept.as_fd())), (None, 1));
                theirs.write_all(bytes).expect("sent");
                drop(theirs);
                assert_eq!(until_over(&kept), expected);
                let deadline = Instant::now() + PATIENCE;
                while count(kept.as_fd()) == 0 {
                    assert!(Instant::now() < deadline, "no event for {expected:?}");
                    thread::yield_now();
                }
                kept.close();
                assert_eq!(kept.reason(), Some(expected), "the first reason stays");
            }
        }
    }

    #[test]
    fn a_part_of_a_goodbye_is_no_end_until_the_rest_or_the_end() {
        let [sentry, _] = sentries();
        let (kept, mut theirs) = pair(sentry);
        theirs.write_all(&encode_goodbye()[..5]).expect("sent");
        thread::sleep(Duration::from_millis(20));
        assert_eq!(kept.reason(), None);
        theirs.write_all(&encode_goodbye()[5..]).expect("sent");
        assert_eq!(until_over(&kept), CloseReason::Left);

        let (kept, mut theirs) = pair(sentry);
        theirs.write_all(&encode_goodbye()[..5]).expect("sent");
        drop(theirs);
        assert_eq!(until_over(&kept), CloseReason::Protocol);
    }

    #[test]
    fn a_goodbye_is_sent_before_close_returns() {
        for sentry in sentries() {
            let (kept, mut theirs) = pair(sentry);
            kept.close();
            assert_eq!(kept.reason(), Some(CloseReason::Local));
            theirs.set_nonblocking(true).expect("a socket");
            let mut found = [0; 16];
            theirs.read_exact(&mut found).expect("a goodbye that is there already");
            assert_eq!(found, encode_goodbye()[..]);
            assert_eq!(theirs.read(&mut found).expect("an end"), 0);
        }
    }

    #[test]
    fn what_is_dropped_ends_without_a_goodbye() {
        for sentry in sentries() {
            let (kept, mut theirs) = pair(sentry);
            drop(kept);
            assert_eq!(theirs.read(&mut [0; 16]).expect("an end"), 0);
            assert!(lock(&sentry.incoming).is_empty());
        }
    }

    #[test]
    fn without_a_sentry_nothing_is_taken_and_everybody_knows() {
        let [sentry, _] = sentries();
        let (kept, mut theirs) = pair(sentry);
        // What no sentry sends: it ends the thread.
        rustix::net::send(&sentry.door, b"short", SendFlags::NOSIGNAL).expect("sent");
        assert_eq!(until_over(&kept), CloseReason::Local);
        assert_eq!(theirs.read(&mut [0; 16]).expect("an end"), 0);
        kept.close();
        let (ours, mut theirs) = UnixStream::pair().expect("sockets");
        theirs.set_read_timeout(Some(PATIENCE)).expect("a socket");
        let deadline = Instant::now() + PATIENCE;
        // The thread closes its end of the door after the connections.
        while sentry.tell(DROP, u64::MAX, &[]).is_ok() {
            assert!(Instant::now() < deadline);
            thread::yield_now();
        }
        assert_eq!(Kept::of(sentry, ours.into()).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        assert_eq!(theirs.read(&mut [0; 16]).expect("an end"), 0);
    }
}
