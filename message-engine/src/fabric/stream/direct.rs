//! Requests of users' threads, on a connection of their own.
//!
//! The caller's thread sends a request and waits for the answer, without the engine's thread of this side. That saves
//! two of the four wake-ups of an operation. The first request makes the connection, so peers without such requests
//! have none. One thread at a time uses it.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::carrier::Carrier;
use super::dial::Dial;
use super::wire::{HELLO_BYTES, RESPONSE_BYTES, Request, Response};
use crate::fabric::memory::Refusal;
use crate::fabric::post::op_name;
use crate::fabric::{DirectCopy, DirectError, DirectWait, MAX_DIRECT_BYTES, RemoteSegment, raw};
use p2p_core::endpoint::PostError;

/// Requests of users' threads towards one peer.
#[derive(Debug)]
pub(super) struct DirectRequests {
    dial: Dial,
    hello: [u8; HELLO_BYTES],
    state: Mutex<State>,
    /// The socket to be shut down at the end. Locked for moments only, unlike `state`.
    socket: Mutex<Option<Arc<OwnedFd>>>,
    is_closed: AtomicBool,
}

enum State {
    /// No request was made so far.
    Unused,
    Open(Carrier),
    /// The connection could not be made. The next attempt is due at this time.
    Unavailable(Instant),
    /// A request has failed on it.
    Broken,
}

impl DirectRequests {
    pub(super) fn new(dial: Dial, hello: [u8; HELLO_BYTES]) -> Self {
        let (state, socket) = (Mutex::new(State::Unused), Mutex::new(None));
        Self { dial, hello, state, socket, is_closed: AtomicBool::new(false) }
    }

    /// Ends all requests, without waiting for them.
    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        if let Some(socket) = lock(&self.socket).take() {
            // An error means that the peer has gone.
            let _ = rustix::net::shutdown(&socket, rustix::net::Shutdown::Both);
        }
    }

    /// Makes the connection and sends the hello.
    fn open(&self, deadline: Instant) -> io::Result<Carrier> {
        let until = deadline.min(Instant::now() + CONNECT_TIMEOUT);
        let mut carrier = self.dial.connect(until)?;
        *lock(&self.socket) = Some(Arc::clone(carrier.socket()));
        if self.is_closed.load(Ordering::SeqCst) {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        let parts = [raw::part(self.hello.as_ptr(), HELLO_BYTES)];
        // SAFETY: the hello is ours.
        match unsafe { carrier.send(&parts) } {
            Ok(HELLO_BYTES) => Ok(carrier),
            // A new connection has room for it.
            Ok(_) => Err(io::ErrorKind::WriteZero.into()),
            Err(error) => Err(error),
        }
    }
}

impl DirectCopy for DirectRequests {
    unsafe fn copy(
        &self,
        is_write: bool,
        remote: RemoteSegment,
        here: NonNull<u8>,
        bytes: u64,
        wait: &DirectWait<'_>,
    ) -> Option<Result<(), DirectError>> {
        let mut state = self.state.try_lock().ok()?;
        let op = op_name(is_write);
        let disconnected = || PostError::Disconnected { op };
        if self.is_closed.load(Ordering::SeqCst) {
            return Some(Err(disconnected().into()));
        }
        let offset = match remote.checked(op, bytes) {
            Ok(offset) => offset,
            Err(error) => return Some(Err(error.into())),
        };
        if Instant::now() >= wait.deadline {
            // The fabric reports it, without a request.
            return None;
        }
        let is_due = match &*state {
            State::Unused => true,
            State::Unavailable(at) => Instant::now() >= *at,
            State::Open(_) | State::Broken => false,
        };
        if is_due {
            *state = match self.open(wait.deadline) {
                Ok(carrier) => State::Open(carrier),
                Err(error) => {
                    tracing::debug!(%error, "no connection for requests of users' threads");
                    State::Unavailable(Instant::now() + OPEN_PAUSE)
                }
            };
            if Instant::now() >= wait.deadline {
                return None;
            }
        }
        let carrier = match &mut *state {
            State::Open(carrier) => carrier,
            State::Broken => return Some(Err(DirectError::Lost(disconnected()))),
            State::Unused | State::Unavailable(_) => return None,
        };
        let request = Request { is_write, key: remote.region.key, offset, bytes };
        let mut exchange = Exchange { carrier, wait, op };
        // SAFETY: the caller's promise.
        let result = unsafe { exchange.run(request, here) };
        if matches!(result, Err(DirectError::Lost(_) | DirectError::Expired)) {
            *state = State::Broken;
            // The peer stops to serve it, too.
            if let Some(socket) = lock(&self.socket).take() {
                let _ = rustix::net::shutdown(socket.as_fd(), rustix::net::Shutdown::Both);
            }
        }
        Some(result)
    }

    fn max_bytes(&self) -> u64 {
        MAX_BYTES
    }
}

/// One request and its answer.
struct Exchange<'a> {
    carrier: &'a mut Carrier,
    wait: &'a DirectWait<'a>,
    op: &'static str,
}

impl Exchange<'_> {
    /// # Safety
    /// As for [`DirectCopy::copy`].
    unsafe fn run(&mut self, request: Request, here: NonNull<u8>) -> Result<(), DirectError> {
        let bytes = request.bytes as usize;
        let head = request.encode();
        let payload = if request.is_write { bytes } else { 0 };
        let out = [(head.as_ptr(), head.len()), (here.as_ptr().cast_const(), payload)];
        // SAFETY: the request is ours, and the memory is registered by the caller's promise.
        self.transfer(
            head.len() + payload,
            // SAFETY: as above.
            |carrier, done| unsafe { carrier.send(&rest_of(&out, done)) },
            true,
        )?;
        let (mut header, mut verdict) = ([0; RESPONSE_BYTES], [0; RESPONSE_BYTES]);
        let answer = if request.is_write { 0 } else { bytes };
        // The bytes of a refused read are not sent, so the second part stays as it is then.
        let into = [
            (header.as_mut_ptr().cast_const(), RESPONSE_BYTES),
            (here.as_ptr().cast_const(), answer),
            (verdict.as_mut_ptr().cast_const(), if answer > 0 { RESPONSE_BYTES } else { 0 }),
        ];
        let total: usize = into.iter().map(|(_, len)| len).sum();
        let mut done = 0;
        let first = loop {
            done += self.receive(&into, done)?;
            if done >= RESPONSE_BYTES {
                break Response::decode(&header).ok_or_else(|| self.broken())?;
            }
        };
        if first.is_data == request.is_write {
            return Err(self.broken());
        }
        if first.is_last {
            if done > RESPONSE_BYTES || answer > 0 && first.status == 0 {
                return Err(self.broken());
            }
            return self.verdict(first);
        }
        // A request is no longer than a frame.
        if first.bytes != answer as u64 {
            return Err(self.broken());
        }
        while done < total {
            done += self.receive(&into, done)?;
        }
        let last = Response::decode(&verdict).ok_or_else(|| self.broken())?;
        if !last.is_last || !last.is_data {
            return Err(self.broken());
        }
        self.verdict(last)
    }

    fn verdict(&self, response: Response) -> Result<(), DirectError> {
        match response.status {
            0 => Ok(()),
            code => {
                let refusal = Refusal::of(code).ok_or_else(|| self.broken())?;
                Err(refusal.error(self.op).into())
            }
        }
    }

    fn receive(
        &mut self,
        into: &[(*const u8, usize); 3],
        done: usize,
    ) -> Result<usize, DirectError> {
        // SAFETY: header and verdict are ours, and a read stores into registered memory by the promise of `run`. No
        // reference to them exists meanwhile.
        self.step(false, |carrier| unsafe { carrier.receive(&rest_of(into, done)) })
    }

    /// Repeats `step` until `total` bytes have moved.
    fn transfer(
        &mut self,
        total: usize,
        mut step: impl FnMut(&mut Carrier, usize) -> io::Result<usize>,
        for_room: bool,
    ) -> Result<(), DirectError> {
        let mut done = 0;
        while done < total {
            done += self.step(for_room, |carrier| step(carrier, done))?;
        }
        Ok(())
    }

    /// Makes one step that moves bytes. Blocks until the deadline.
    ///
    /// It does not poll first. Where two processes share few cores, a thread that polls takes the core from the thread
    /// that it waits for.
    fn step(
        &mut self,
        for_room: bool,
        mut step: impl FnMut(&mut Carrier) -> io::Result<usize>,
    ) -> Result<usize, DirectError> {
        loop {
            match step(self.carrier) {
                Ok(0) => return Err(self.broken()),
                Ok(moved) => return Ok(moved),
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted => continue,
                    io::ErrorKind::WouldBlock => {}
                    _ => return Err(self.broken()),
                },
            }
            let now = Instant::now();
            let is_cancelled = || self.wait.is_cancelled.is_some_and(|is_cancelled| is_cancelled());
            if now >= self.wait.deadline || is_cancelled() {
                return Err(DirectError::Expired);
            }
            let until = self.wait.deadline.min(now + SLICE);
            self.carrier.wait(for_room, until).map_err(|_| self.broken())?;
        }
    }

    fn broken(&self) -> DirectError {
        DirectError::Lost(PostError::Disconnected { op: self.op })
    }
}

/// The parts without their first `done` bytes.
fn rest_of<const N: usize>(parts: &[(*const u8, usize); N], done: usize) -> [raw::iovec; N] {
    let mut skip = done;
    parts.map(|(ptr, len)| {
        let here = skip.min(len);
        skip -= here;
        raw::part(ptr.wrapping_add(here), len - here)
    })
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unused => "Unused",
            Self::Open(_) => "Open",
            Self::Unavailable(_) => "Unavailable",
            Self::Broken => "Broken",
        })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Longest transfer of a user's thread: as many bytes as a sender may push without a grant by default.
const MAX_BYTES: u64 = MAX_DIRECT_BYTES;
/// Time limit of the connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause after a connection that could not be made.
const OPEN_PAUSE: Duration = Duration::from_secs(1);
/// Time between two looks at the caller's wish to give up.
const SLICE: Duration = Duration::from_millis(50);
