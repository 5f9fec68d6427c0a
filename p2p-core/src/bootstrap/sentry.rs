//! The thread that holds the connections by which peers learn of this process's death.
//!
//! A killed process dies thread by thread. The last thread frees the memory first, which takes tens
//! of milliseconds per GiB, and then the descriptors that the threads share. Connections among
//! these descriptors end late ([measured](../../../bench/runs/2026-11-26-death/README.md)). So one
//! thread, the sentry, has a descriptor table of its own (`close_range(2)` with
//! `CLOSE_RANGE_UNSHARE`). The table is freed with that thread, and connections are only in that
//! table.
//!
//! This helps unless the sentry is itself the last thread to die. The kernel kills threads in the
//! order of their creation, so some idle threads are created right after the sentry. They make an
//! early end likely, not certain. Without it the connection ends as late as it would have anyway.
//!
//! In the sentry's thread a descriptor number means another descriptor than elsewhere. **The thread
//! must touch no descriptor but its own.** It logs nothing. It wakes no task of a runtime, since
//! that writes to a descriptor. It takes no signal, since a handler might. Waiters wait at an event
//! of the connection, and the sentry has a copy of that event.
//!
//! Some systems give no thread its own table: Linux before 5.9, or a filter of system calls. There
//! the sentry works in the table that all threads share. A process that was forked without `exec`
//! gets a new sentry for new connections. Inherited connections stay with the parent's sentry.

use std::collections::{BTreeMap, HashMap};
use std::fs::OpenOptions;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketFlags, SocketType, recvmsg, sendmsg, sockopt,
};

use super::close::{CloseReason, Goodbyes, why_over};
use crate::wait::{event_fd, signal_event};

/// A connection that the sentry holds. Dropping it closes the connection, soon.
#[derive(Debug)]
pub(super) struct SentrySocket {
    sentry: Arc<Sentry>,
    id: u64,
    peer: Arc<ConnectionState>,
    event: OwnedFd,
}

impl SentrySocket {
    /// Hands `socket` to the sentry, and waits until the sentry has it. No other copy of the socket
    /// may live on for long.
    ///
    /// # Errors
    /// The system's error, when threads or descriptors are exhausted or no processor is free for
    /// [`ADOPT_LIMIT`]. The socket is closed then.
    pub(super) fn new(socket: OwnedFd, goodbyes: Goodbyes) -> io::Result<Self> {
        Self::of(Sentry::get()?, socket, goodbyes)
    }

    fn of(sentry: Arc<Sentry>, socket: OwnedFd, goodbyes: Goodbyes) -> io::Result<Self> {
        let event = event_fd()?;
        let (id, peer) = sentry.adopt(socket, event.as_fd(), goodbyes)?;
        Ok(Self { sentry, id, peer, event })
    }

    /// Returns why the connection ended, or `None` while it stands.
    pub(super) fn reason(&self) -> Option<CloseReason> {
        self.peer.reason()
    }

    /// Has the sentry look at the connection, and waits for that for at most `limit`. Returns why
    /// the connection ended, or `None` while it stands.
    pub(super) fn look(&self, limit: Duration) -> Option<CloseReason> {
        if self.reason().is_none() {
            let (looked, has_looked) = mpsc::channel();
            self.sentry.command(Command::Look(self.id, looked));
            // A late sentry changes nothing but the age of the reason.
            let _ = has_looked.recv_timeout(limit);
        }
        self.reason()
    }

    /// Sends a goodbye and closes the connection. Both are done before this returns if the sentry
    /// runs within [`CLOSE_LIMIT`].
    pub(super) fn close(&self) {
        self.sentry.command(Command::Close(self.id));
        if self.peer.wait_while_in(Stage::Watched, CLOSE_LIMIT) == Stage::Watched {
            tracing::warn!(limit = ?CLOSE_LIMIT, "the goodbye to a peer is late: no processor was free");
        }
        self.peer.end(CloseReason::Local, self.event.as_fd());
    }
}

impl Drop for SentrySocket {
    fn drop(&mut self) {
        self.sentry.command(Command::Drop(self.id));
    }
}

impl AsRawFd for SentrySocket {
    fn as_raw_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }
}

impl AsFd for SentrySocket {
    /// The event: becomes readable when the connection ends.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// State of one connection, shared with the sentry.
#[derive(Debug)]
struct ConnectionState {
    goodbyes: Goodbyes,
    /// 0 while it stands, then [`code_of`] the reason.
    reason: AtomicU8,
    stage: Mutex<Stage>,
    changed: Condvar,
}

/// Progress of a connection.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// On its way to the sentry.
    #[default]
    Sent,
    Watched,
    /// The goodbye is sent.
    Closed,
    /// The sentry could not take it, or has ended.
    Refused(Errno),
}

impl ConnectionState {
    fn new(goodbyes: Goodbyes) -> Self {
        let (reason, stage, changed) = (AtomicU8::new(0), Mutex::default(), Condvar::new());
        Self { goodbyes, reason, stage, changed }
    }

    fn reason(&self) -> Option<CloseReason> {
        // Acquire: a reader of the reason also sees everything that was done before the end.
        let code = self.reason.load(Ordering::Acquire);
        ALL_REASONS.into_iter().find(|reason| code_of(*reason) == code)
    }

    /// Sets the reason, unless an earlier reason is set.
    fn end(&self, reason: CloseReason, event: BorrowedFd<'_>) {
        let code = code_of(reason);
        if self.reason.compare_exchange(0, code, Ordering::Release, Ordering::Relaxed).is_ok() {
            // This cannot fail: the descriptor is an event, and `signal_event` empties a full one.
            let _ = signal_event(event);
        }
    }

    fn set_stage(&self, stage: Stage) {
        *lock(&self.stage) = stage;
        self.changed.notify_all();
    }

    /// Waits until the stage is no longer `stage`, for at most `limit`. Returns the stage then.
    fn wait_while_in(&self, stage: Stage, limit: Duration) -> Stage {
        let is_in = |now: &mut Stage| *now == stage;
        let waited = self.changed.wait_timeout_while(lock(&self.stage), limit, is_in);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

const ALL_REASONS: [CloseReason; 6] = [
    CloseReason::Lost,
    CloseReason::Left,
    CloseReason::Reset,
    CloseReason::Unreachable,
    CloseReason::Local,
    CloseReason::Protocol,
];

const fn code_of(reason: CloseReason) -> u8 {
    match reason {
        CloseReason::Lost => 1,
        CloseReason::Left => 2,
        CloseReason::Reset => 3,
        CloseReason::Unreachable => 4,
        CloseReason::Local => 5,
        CloseReason::Protocol => 6,
    }
}

/// The sentry, as other threads use it.
#[derive(Debug)]
struct Sentry {
    /// Passes connections to the sentry's thread. The thread ends when this is closed.
    handoff: OwnedFd,
    /// Event that announces commands to the thread.
    wake: OwnedFd,
    shared: Arc<Shared>,
    /// Tells whether the thread has its own descriptor table.
    is_private: bool,
    /// Id of the process that started the thread.
    pid: u32,
    /// The kernel's id of the thread.
    #[cfg(test)]
    tid: u32,
}

/// State that the sentry's thread shares with other threads.
#[derive(Debug, Default)]
struct Shared {
    inbox: Mutex<Inbox>,
    /// The thread has ended, or is about to end.
    is_gone: AtomicBool,
}

#[derive(Debug, Default)]
struct Inbox {
    next_id: u64,
    /// Connections on their way to the sentry.
    incoming: HashMap<u64, Arc<ConnectionState>>,
    commands: Vec<Command>,
}

#[derive(Debug)]
enum Command {
    Close(u64),
    Drop(u64),
    /// Looks whether a connection has ended, and then tells the sender of the command.
    Look(u64, mpsc::Sender<()>),
}

impl Sentry {
    /// Returns the process's sentry. The first caller starts it.
    fn get() -> io::Result<Arc<Self>> {
        static SENTRY: Mutex<Option<Arc<Sentry>>> = Mutex::new(None);
        let mut sentry = lock(&SENTRY);
        if let Some(sentry) = &*sentry
            && !sentry.shared.is_gone.load(Ordering::Acquire)
            && sentry.pid == std::process::id()
        {
            return Ok(Arc::clone(sentry));
        }
        let started = Arc::new(Self::start(unshare_descriptors)?);
        if started.is_private {
            static IDLE_THREADS: Once = Once::new();
            IDLE_THREADS.call_once(start_idle_threads);
        } else {
            tracing::debug!(
                "this system gives no thread its own descriptors: peers may learn of a death later"
            );
        }
        *sentry = Some(Arc::clone(&started));
        Ok(started)
    }

    /// Starts the thread. `leave` gives the calling thread its own table with one descriptor of the
    /// old one, and returns `false` if it cannot.
    fn start(leave: fn(RawFd) -> bool) -> io::Result<Self> {
        let (handoff, inner) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        // Avoids the numbers of standard input, output and error, which may be closed.
        let inner = rustix::io::fcntl_dupfd_cloexec(inner, BEHIND_STDIO)?;
        for timeout in [sockopt::Timeout::Send, sockopt::Timeout::Recv] {
            sockopt::set_socket_timeout(&handoff, timeout, Some(ADOPT_LIMIT))?;
        }
        let shared = Arc::new(Shared::default());
        let (raw, for_thread) = (inner.as_raw_fd(), Arc::clone(&shared));
        thread::Builder::new().name("sy-liveness".to_owned()).spawn(move || {
            block_signals();
            let is_private = leave(raw);
            // SAFETY: in a table of its own, the number is this thread's copy, which no other value
            // owns. In the shared table, the starting thread gives up its ownership when it
            // receives the first message.
            let handoff = unsafe { OwnedFd::from_raw_fd(raw) };
            SentryThread { peers: BTreeMap::new(), shared: for_thread, is_private }.serve(handoff);
        })?;
        let begun = receive(&handoff, RecvFlags::CMSG_CLOEXEC);
        if !matches!(begun, Ok((_, word, _)) if word & PRIVATE != 0) {
            // The thread owns the number. A thread that has not answered in time may still leave
            // the table later. Then the number stays taken here, because closing it could close
            // another owner's descriptor.
            let _ = inner.into_raw_fd();
        }
        let (kind, word, mut fds) = begun.map_err(|errno| match errno {
            Errno::AGAIN => late(),
            errno => errno.into(),
        })?;
        let number = word as u32;
        if kind == FAILED {
            return Err(io::Error::from_raw_os_error(number.cast_signed()));
        }
        Ok(Self {
            handoff,
            // A missing event means that the table had no room for another descriptor.
            wake: fds.pop().ok_or(Errno::MFILE)?,
            shared,
            is_private: word & PRIVATE != 0,
            pid: std::process::id(),
            #[cfg(test)]
            tid: number,
        })
    }

    /// Hands over the socket and waits until the sentry has it.
    fn adopt(
        &self,
        socket: OwnedFd,
        event: BorrowedFd<'_>,
        goodbyes: Goodbyes,
    ) -> io::Result<(u64, Arc<ConnectionState>)> {
        let peer = Arc::new(ConnectionState::new(goodbyes));
        let id = {
            let mut inbox = lock(&self.shared.inbox);
            inbox.next_id += 1;
            let id = inbox.next_id;
            inbox.incoming.insert(id, Arc::clone(&peer));
            id
        };
        let sent = send(&self.handoff, ADOPT, id, &[socket.as_fd(), event]);
        // The message holds a copy, which must be the only one.
        drop(socket);
        let error = match sent.map(|()| peer.wait_while_in(Stage::Sent, ADOPT_LIMIT)) {
            Ok(Stage::Watched) => return Ok((id, peer)),
            Ok(Stage::Refused(errno)) => errno.into(),
            Ok(_) | Err(Errno::AGAIN) => late(),
            Err(errno) => errno.into(),
        };
        lock(&self.shared.inbox).incoming.remove(&id);
        // The connection may have arrived since.
        self.command(Command::Drop(id));
        Err(error)
    }

    fn command(&self, command: Command) {
        lock(&self.shared.inbox).commands.push(command);
        // This cannot fail, as above. A sentry that has ended has closed everything.
        let _ = signal_event(self.wake.as_fd());
    }
}

fn late() -> io::Error {
    let text = format!("no processor was free for the thread sy-liveness in {ADOPT_LIMIT:?}");
    io::Error::new(io::ErrorKind::TimedOut, text)
}

/// Sends two words and descriptors.
fn send(handoff: &OwnedFd, kind: u64, word: u64, fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut message = [0; MESSAGE_BYTES];
    message[..8].copy_from_slice(&kind.to_ne_bytes());
    message[8..].copy_from_slice(&word.to_ne_bytes());
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL);
    }
    loop {
        match sendmsg(handoff, &[IoSlice::new(&message)], &mut control, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            sent => return sent.map(|_| ()),
        }
    }
}

/// Receives two words, and the descriptors that fit.
fn receive(handoff: &OwnedFd, flags: RecvFlags) -> Result<(u64, u64, Vec<OwnedFd>), Errno> {
    let mut message = [0; MESSAGE_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = loop {
        match recvmsg(handoff, &mut [IoSliceMut::new(&mut message)], &mut control, flags) {
            Err(Errno::INTR) => {}
            got => break got?,
        }
    };
    let mut fds = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            fds.extend(rights);
        }
    }
    if got.bytes != MESSAGE_BYTES {
        // The other end is closed.
        return Err(Errno::PIPE);
    }
    let word = |at: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&message[at..at + 8]);
        u64::from_ne_bytes(bytes)
    };
    Ok((word(0), word(8), fds))
}

/// Blocks all signals in the calling thread, so that no handler runs in it.
fn block_signals() {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the first call fills the set that the second one reads. Signals of the C library
    // itself stay unblocked.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), std::ptr::null_mut());
    }
}

/// Gives the calling thread its own descriptor table with only `own_fd` and standard error, to
/// which panics are written. Returns true if that worked.
fn unshare_descriptors(own_fd: RawFd) -> bool {
    let close_range = |first: RawFd, last: libc::c_uint, flags: libc::c_uint| {
        // SAFETY: the first call leaves the shared table before it closes anything. No other call
        // is made if it fails. In its own table this thread owns nothing but `own_fd`.
        unsafe { libc::syscall(libc::SYS_close_range, first as libc::c_uint, last, flags) == 0 }
    };
    if !close_range(own_fd + 1, libc::c_uint::MAX, CLOSE_RANGE_UNSHARE) {
        return false;
    }
    // Descriptors that stay open after a failure here are closed with the thread.
    let _ = own_fd <= BEHIND_STDIO || close_range(BEHIND_STDIO, (own_fd - 1).cast_unsigned(), 0);
    // A reader of the process's output waits for its end, which must not depend on a copy here. No
    // later descriptor may take these numbers.
    if let Ok(null) = OpenOptions::new().read(true).write(true).open("/dev/null") {
        for stdio in [libc::STDIN_FILENO, libc::STDOUT_FILENO] {
            // SAFETY: these are numbers of this thread's table, which no value owns.
            unsafe { libc::dup2(null.as_raw_fd(), stdio) };
        }
        if null.as_raw_fd() < BEHIND_STDIO {
            // The number was closed, and must stay in use.
            let _ = null.into_raw_fd();
        }
    }
    true
}

/// Starts threads that stay idle and die after the sentry.
fn start_idle_threads() {
    for _ in 0..NUM_IDLE_THREADS {
        let behind = thread::Builder::new().name("sy-behind".to_owned()).stack_size(MIN_STACK);
        let idle = || {
            loop {
                thread::park();
            }
        };
        if let Err(error) = behind.spawn(idle) {
            tracing::debug!(%error, "cannot start an idle thread: peers may learn of a death later");
        }
    }
}

/// State of the sentry's thread.
struct SentryThread {
    peers: BTreeMap<u64, Entry>,
    shared: Arc<Shared>,
    is_private: bool,
}

struct Entry {
    socket: OwnedFd,
    event: OwnedFd,
    peer: Arc<ConnectionState>,
}

impl SentryThread {
    /// Works until the other end of `handoff` is closed. An error ends the thread and all its
    /// connections, see `drop`. `handoff` is closed before that.
    fn serve(mut self, handoff: OwnedFd) {
        let private = if self.is_private { PRIVATE } else { 0 };
        let (epoll, wake) = match Self::prepare(&handoff) {
            Ok(prepared) => prepared,
            Err(error) => {
                let errno = error.raw_os_error().unwrap_or_default().unsigned_abs();
                // The starting thread waits within a bound.
                let _ = send(&handoff, FAILED, private | u64::from(errno), &[]);
                return;
            }
        };
        let tid = rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs();
        if send(&handoff, BEGUN, private | u64::from(tid), &[wake.as_fd()]).is_err() {
            return;
        }
        let none = epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(HANDOFF),
        };
        let mut events = [none; 32];
        loop {
            // Without an event there is nothing to do as long as the process lives.
            let num_events = match epoll::wait(&epoll, &mut events[..], None) {
                Ok(num_events) => num_events,
                Err(Errno::INTR) => continue,
                Err(_) => return,
            };
            for event in &events[..num_events] {
                match event.data.u64() {
                    HANDOFF => {
                        match receive(&handoff, RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT) {
                            Ok((_, id, fds)) => self.adopt(&epoll, id, fds),
                            Err(Errno::AGAIN) => {}
                            Err(_) => return,
                        }
                    }
                    // Commands concern connections that have already arrived: no caller gives one
                    // before its connection is here.
                    WAKE => self.apply_commands(),
                    id => self.look(id),
                }
            }
        }
    }

    fn prepare(handoff: &OwnedFd) -> io::Result<(OwnedFd, OwnedFd)> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let data = epoll::EventData::new_u64;
        epoll::add(&epoll, handoff, data(HANDOFF), epoll::EventFlags::IN)?;
        let wake = event_fd()?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, &wake, data(WAKE), flags)?;
        Ok((epoll, wake))
    }

    fn look(&self, id: u64) {
        // The connection may have been dropped since the event.
        if let Some(entry) = self.peers.get(&id)
            && let Some(reason) = why_over(&entry.socket, &entry.peer.goodbyes)
        {
            entry.peer.end(reason, entry.event.as_fd());
        }
    }

    fn adopt(&mut self, epoll: &OwnedFd, id: u64, fds: Vec<OwnedFd>) {
        // The sender may have given up.
        let Some(peer) = lock(&self.shared.inbox).incoming.remove(&id) else { return };
        let mut fds = fds.into_iter();
        let (Some(socket), Some(event)) = (fds.next(), fds.next()) else {
            return peer.set_stage(Stage::Refused(Errno::MFILE));
        };
        let socket = if self.is_private { socket } else { move_high(socket) };
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        if let Err(errno) = epoll::add(epoll, &socket, epoll::EventData::new_u64(id), flags) {
            return peer.set_stage(Stage::Refused(errno));
        }
        peer.set_stage(Stage::Watched);
        self.peers.insert(id, Entry { socket, event, peer });
        // Looks for input that came before the socket was watched.
        self.look(id);
    }

    fn apply_commands(&mut self) {
        let commands = std::mem::take(&mut lock(&self.shared.inbox).commands);
        for command in commands {
            match command {
                Command::Close(id) => self.close(id),
                Command::Drop(id) => drop(self.peers.remove(&id)),
                Command::Look(id, looked) => {
                    self.look(id);
                    // Fails when the other thread has given up.
                    let _ = looked.send(());
                }
            }
        }
    }

    fn close(&self, id: u64) {
        let Some(entry) = self.peers.get(&id) else { return };
        // Best effort: a peer that is gone or does not read learns of the end from the shutdown.
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = rustix::net::send(&entry.socket, entry.peer.goodbyes.ours(), flags);
        let _ = rustix::net::shutdown(&entry.socket, Shutdown::Both);
        entry.peer.end(CloseReason::Local, entry.event.as_fd());
        entry.peer.set_stage(Stage::Closed);
    }
}

impl Drop for SentryThread {
    fn drop(&mut self) {
        self.shared.is_gone.store(true, Ordering::Release);
        // `handoff` is closed: messages that are not on their way by this time do not arrive.
        for peer in lock(&self.shared.inbox).incoming.drain().map(|(_, peer)| peer) {
            peer.set_stage(Stage::Refused(Errno::PIPE));
        }
        for entry in self.peers.values() {
            entry.peer.end(CloseReason::Local, entry.event.as_fd());
            entry.peer.set_stage(Stage::Refused(Errno::PIPE));
        }
    }
}

/// Moves a descriptor of the shared table to a high number. The kernel closes a dying process's
/// files from the last to the first. Files of a GPU driver take tens of milliseconds, and the peer
/// would wait for them.
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

/// Number of threads that die after the sentry. It was measured with 120 kills for each count, on
/// two processors, in a process of few threads. 94 ends were late with no such thread, 9 with one,
/// 3 with two, 2 with four and 1 with eight.
const NUM_IDLE_THREADS: usize = 4;
const HIGH_FD: i32 = 700;
/// From `<linux/close_range.h>`. Not every C library has a name for it.
const CLOSE_RANGE_UNSHARE: libc::c_uint = 1 << 1;
const BEHIND_STDIO: RawFd = 3;
/// To the sentry: a connection with this number.
const ADOPT: u64 = 1;
/// First message from the sentry: it has begun, with its thread id. `FAILED` carries an error
/// instead.
const BEGUN: u64 = 2;
const FAILED: u64 = 3;
/// Flag beside either number: the thread has its own table.
const PRIVATE: u64 = 1 << 32;
/// Bytes of a message: its kind, and a number.
const MESSAGE_BYTES: usize = 16;
/// Event data that is no connection's number.
const HANDOFF: u64 = u64::MAX;
const WAKE: u64 = u64::MAX - 1;
/// Limit for the sentry to begin, and to take a connection. Both take microseconds if a processor
/// is free.
const ADOPT_LIMIT: Duration = Duration::from_secs(10);
/// Limit for the goodbye. The caller may have other work to do.
const CLOSE_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 20 } else { 1 });
const MIN_STACK: usize = 64 << 10;

#[cfg(test)]
mod tests;
