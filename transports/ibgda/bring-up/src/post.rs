//! Posting by the device functions, compiled for the processor.

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::fmt;
use std::ptr;
use std::time::Duration;

use ibgda::{Immediate, Peer};
use kernels::mlx5::{Bound, ErrorWord, PeerHandle, QueueHandle};
use softnic_driver::Driver;
use thiserror::Error;

/// A call on a queue did not end well.
#[derive(Debug, Clone, Error)]
pub(crate) enum PostError {
    #[error("queue pair {qpn:#x}: {call}: a time-out after {seconds} s: {waited}")]
    TimedOut { qpn: u32, call: &'static str, seconds: f64, waited: String },
    #[error("queue pair {qpn:#x}: {call}: {cause}")]
    Completion { qpn: u32, call: &'static str, cause: ErrorCompletion },
    #[error(
        "queue pair {qpn:#x}: {call}: the NIC completed a request that was never posted: {waited}"
    )]
    Desync { qpn: u32, call: &'static str, waited: String },
    #[error("queue pair {qpn:#x}: {call}: status {status} of the device functions: {waited}")]
    Other { qpn: u32, call: &'static str, status: u32, waited: String },
}

/// An error completion, as it is kept in `sy_mlx5_queue_state.error`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ErrorCompletion(u64);

impl ErrorCompletion {
    pub(crate) const fn new(word: u64) -> Self {
        Self(word)
    }

    /// `SY_MLX5_ERROR_SYNDROME`
    pub(crate) const fn syndrome(self) -> u8 {
        (self.0 >> 8 & 0xff) as u8
    }

    const fn vendor(self) -> u8 {
        (self.0 >> 16 & 0xff) as u8
    }

    const fn opcode(self) -> u8 {
        (self.0 >> 24 & 0xff) as u8
    }

    const fn counter(self) -> u16 {
        (self.0 >> 32 & 0xffff) as u16
    }
}

impl fmt::Display for ErrorCompletion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (syndrome, vendor) = (self.syndrome(), self.vendor());
        let (opcode, counter) = (self.opcode(), self.counter());
        let name = syndrome_name(syndrome);
        write!(
            f,
            "error completion, syndrome {syndrome:#04x} ({name}), vendor {vendor:#04x}, opcode {opcode:#04x}, index {counter:#06x}"
        )
    }
}

/// Posts on the queues of a joined peer. Every wait has a bound.
pub(crate) struct Poster<'a> {
    driver: &'a Driver,
    peer: &'a Peer,
    handles: Vec<QueueHandle>,
    slot: Places,
    timeout: Duration,
}

/// Offsets in the peer's slot, and in its mirror here.
struct Places {
    mirror: u64,
    remote: u64,
    lkey: u32,
    rkey: u32,
}

/// Bound of a thread's call.
struct Wait {
    error: UnsafeCell<ErrorWord>,
    bound: Bound,
}

type Call<'a> = &'a dyn Fn(*const c_void, *const c_void) -> u32;

impl<'a> Poster<'a> {
    pub(crate) fn new(driver: &'a Driver, peer: &'a Peer, timeout: Duration) -> Self {
        let handles = peer.queues().iter().map(ibgda::queue::Queue::handle).collect();
        let PeerHandle { mirror, remote, lkey, rkey, .. } =
            peer.handle(ptr::null_mut(), ptr::null(), 0);
        let slot = Places { mirror, remote, lkey, rkey };
        Self { driver, peer, handles, slot, timeout }
    }

    pub(crate) fn num_queues(&self) -> usize {
        self.handles.len()
    }

    pub(crate) fn qpn(&self, queue_idx: usize) -> u32 {
        self.handles[queue_idx].qpn
    }

    pub(crate) fn depth(&self) -> u32 {
        self.handles[0].sq_depth
    }

    /// Finds an error in a queue's handle, by `sy_mlx5_check_qp`.
    pub(crate) fn check(&self, queue_idx: usize) -> Option<String> {
        // SAFETY: a handle of a queue that lives.
        unsafe { self.driver.check(ptr::from_ref(&self.handles[queue_idx]).cast()) }
    }

    pub(crate) fn nop(&self, queue_idx: usize) -> Result<(), PostError> {
        // SAFETY: `run` gives a valid handle and a valid bound; the NIC checks addresses.
        self.run(queue_idx, "nop", &|qp, wait| unsafe { (self.driver.nop)(qp, wait) })
    }

    /// Puts the bytes at `offset` of the mirror to the same offset of the peer's slot.
    pub(crate) fn put(&self, queue_idx: usize, offset: usize, len: usize) -> Result<(), PostError> {
        let (local, remote) = (self.local(offset), self.remote(offset));
        let (lkey, rkey, len) = (self.slot.lkey, self.slot.rkey, len as u64);
        // SAFETY: see `nop`.
        self.run(queue_idx, "put_nbi_warp", &|qp, wait| unsafe {
            (self.driver.put)(qp, local, lkey, remote, rkey, len, wait)
        })
    }

    /// The same with a key that the peer never gave.
    pub(crate) fn put_with_wrong_key(&self, queue_idx: usize) -> Result<(), PostError> {
        let (local, remote) = (self.local(0), self.remote(0));
        let (lkey, rkey) = (self.slot.lkey, self.slot.rkey ^ WRONG_KEY);
        // SAFETY: see `nop`.
        self.run(queue_idx, "put_nbi_warp", &|qp, wait| unsafe {
            (self.driver.put)(qp, local, lkey, remote, rkey, 8, wait)
        })
    }

    /// A put and an add of 1 to a word behind it.
    pub(crate) fn put_add(
        &self,
        queue_idx: usize,
        offset: usize,
        len: usize,
        word: usize,
    ) -> Result<(), PostError> {
        let (local, remote, word) = (self.local(offset), self.remote(offset), self.remote(word));
        let (lkey, rkey, len) = (self.slot.lkey, self.slot.rkey, len as u64);
        // SAFETY: see `nop`.
        self.run(queue_idx, "put_add_nbi_warp", &|qp, wait| unsafe {
            (self.driver.put_add)(qp, local, lkey, remote, rkey, len, word, 1, wait)
        })
    }

    /// Gets the bytes at `offset` of the peer's slot into the same offset of the mirror.
    pub(crate) fn get(&self, queue_idx: usize, offset: usize, len: usize) -> Result<(), PostError> {
        let (local, remote) = (self.local(offset), self.remote(offset));
        let (lkey, rkey, len) = (self.slot.lkey, self.slot.rkey, len as u64);
        // SAFETY: see `nop`.
        self.run(queue_idx, "get_nbi_warp", &|qp, wait| unsafe {
            (self.driver.get)(qp, local, lkey, remote, rkey, len, wait)
        })
    }

    pub(crate) fn add8(&self, queue_idx: usize, word: usize, value: u64) -> Result<(), PostError> {
        let (word, rkey) = (self.remote(word), self.slot.rkey);
        // SAFETY: see `nop`.
        self.run(queue_idx, "amo_nonfetch_add", &|qp, wait| unsafe {
            (self.driver.add8)(qp, word, rkey, value, wait)
        })
    }

    pub(crate) fn add4(&self, queue_idx: usize, word: usize, value: u32) -> Result<(), PostError> {
        let (word, rkey) = (self.remote(word), self.slot.rkey);
        // SAFETY: see `nop`.
        self.run(queue_idx, "amo_nonfetch_add32", &|qp, wait| unsafe {
            (self.driver.add4)(qp, word, rkey, value.into(), wait)
        })
    }

    pub(crate) fn add_fields(
        &self,
        queue_idx: usize,
        word: usize,
        value: u64,
        boundary: u64,
    ) -> Result<(), PostError> {
        let (word, rkey) = (self.remote(word), self.slot.rkey);
        // SAFETY: see `nop`.
        self.run(queue_idx, "amo_nonfetch_add_fields", &|qp, wait| unsafe {
            (self.driver.add_fields)(qp, word, rkey, value, boundary, wait)
        })
    }

    pub(crate) fn signal(
        &self,
        queue_idx: usize,
        word: usize,
        value: u64,
    ) -> Result<(), PostError> {
        let (word, rkey) = (self.remote(word), self.slot.rkey);
        // SAFETY: see `nop`.
        self.run(queue_idx, "signal", &|qp, wait| unsafe {
            (self.driver.signal)(qp, word, rkey, value, wait)
        })
    }

    /// Signals to `num` consecutive words, of values from `value` on, as the lanes of a warp post them.
    pub(crate) fn signal_words(
        &self,
        queue_idx: usize,
        first: usize,
        value: u64,
        num: u32,
    ) -> Result<(), PostError> {
        let (word, rkey) = (self.remote(first), self.slot.rkey);
        // SAFETY: see `nop`; there is no gate.
        self.run(queue_idx, "signal (a group)", &|qp, wait| unsafe {
            (self.driver.signal_words)(qp, word, rkey, value, num, ptr::null(), wait)
        })
    }

    /// Puts the bytes at `offset` of the mirror to the same offset of the peer's slot, with immediate data.
    pub(crate) fn put_imm(
        &self,
        queue_idx: usize,
        offset: usize,
        len: usize,
        imm: u32,
    ) -> Result<(), PostError> {
        let (local, remote) = (self.local(offset), self.remote(offset));
        let (lkey, rkey, len) = (self.slot.lkey, self.slot.rkey, len as u64);
        // SAFETY: see `nop`.
        self.run(queue_idx, "put_imm_nbi", &|qp, wait| unsafe {
            (self.driver.put_imm)(qp, local, lkey, remote, rkey, len, imm, wait)
        })
    }

    /// Takes the immediate data of the peer's put on this queue.
    pub(crate) fn receive_imm(&self, queue_idx: usize) -> Result<Immediate, PostError> {
        let call = "receive_imm";
        let qpn = self.qpn(queue_idx);
        let Some(handle) = self.peer.queues()[queue_idx].receives() else {
            let waited = "the queue has no receives".to_owned();
            return Err(PostError::Other { qpn, call, status: ARGUMENT, waited });
        };
        let wait = Wait::new(self.timeout);
        let mut taken = softnic_driver::Immediate::default();
        // SAFETY: the handle of a queue that lives, and a valid bound.
        let status = unsafe {
            (self.driver.receive_imm)(ptr::from_ref(&handle).cast(), &raw mut taken, wait.as_ptr())
        };
        if status == OK {
            let softnic_driver::Immediate { qpn, imm, num_bytes } = taken;
            return Ok(Immediate { qpn, imm, num_bytes });
        }
        let word = wait.error();
        let waited = format!("{} receives are used, one more was waited for", word.observed);
        Err(match status {
            TIMEOUT => {
                PostError::TimedOut { qpn, call, seconds: self.timeout.as_secs_f64(), waited }
            }
            COMPLETION => {
                PostError::Completion { qpn, call, cause: ErrorCompletion(word.observed) }
            }
            DESYNC => {
                let waited = format!("error word {:#x}", word.observed);
                PostError::Desync { qpn, call, waited }
            }
            _ => PostError::Other { qpn, call, status, waited },
        })
    }

    /// Finds an error in a queue's receives, by `sy_mlx5_check_rq`.
    pub(crate) fn check_receives(&self, queue_idx: usize) -> Option<String> {
        let Some(handle) = self.peer.queues()[queue_idx].receives() else {
            return Some("there are none".to_owned());
        };
        // SAFETY: a handle of a queue that lives.
        unsafe { self.driver.check_receives(ptr::from_ref(&handle).cast()) }
    }

    pub(crate) fn quiet(&self, queue_idx: usize) -> Result<(), PostError> {
        // SAFETY: see `nop`.
        self.run(queue_idx, "quiet", &|qp, wait| unsafe { (self.driver.quiet)(qp, wait) })
    }

    /// quiet for gets that came to `offset` of the mirror.
    pub(crate) fn quiet_gets(&self, queue_idx: usize, offset: usize) -> Result<(), PostError> {
        let (local, lkey) = (self.local(offset), self.slot.lkey);
        // SAFETY: see `nop`.
        self.run(queue_idx, "quiet_gets", &|qp, wait| unsafe {
            (self.driver.quiet_gets)(qp, local, lkey, wait)
        })
    }

    const fn local(&self, offset: usize) -> u64 {
        self.slot.mirror + offset as u64
    }

    const fn remote(&self, offset: usize) -> u64 {
        self.slot.remote + offset as u64
    }

    fn run(&self, queue_idx: usize, call: &'static str, post: Call<'_>) -> Result<(), PostError> {
        let wait = Wait::new(self.timeout);
        let handle = &self.handles[queue_idx];
        match post(ptr::from_ref(handle).cast(), wait.as_ptr()) {
            OK => Ok(()),
            status => Err(self.error(queue_idx, call, status, wait.error())),
        }
    }

    fn error(
        &self,
        queue_idx: usize,
        call: &'static str,
        status: u32,
        word: ErrorWord,
    ) -> PostError {
        let qpn = self.qpn(queue_idx);
        let (observed, expected) = (word.observed, word.expected);
        let waited = match word.tag {
            TAG_SLOT => format!(
                "no room in the queue: {observed} blocks are complete, {expected} were waited for"
            ),
            TAG_TURN => format!(
                "the turn of other posters: {observed} blocks are published, {expected} were waited for"
            ),
            TAG_QUIET => format!(
                "{observed} blocks are complete of {expected}: the NIC has not answered the last doorbell"
            ),
            TAG_DESYNC => format!("{observed} blocks said to be complete, {expected} posted"),
            tag => format!("tag {tag}, observed {observed:#x}, expected {expected:#x}"),
        };
        match status {
            TIMEOUT => {
                PostError::TimedOut { qpn, call, seconds: self.timeout.as_secs_f64(), waited }
            }
            COMPLETION => {
                // The queue's own word is the first reason, in every detected case.
                let word = self.peer.queues()[queue_idx].error().unwrap_or(word.observed);
                PostError::Completion { qpn, call, cause: ErrorCompletion(word) }
            }
            DESYNC => PostError::Desync { qpn, call, waited },
            _ => PostError::Other { qpn, call, status, waited },
        }
    }
}

impl Wait {
    fn new(timeout: Duration) -> Box<Self> {
        let timeout_ns = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        let bound = Bound { error: ptr::null_mut(), abort_mask: ptr::null(), timeout_ns };
        let mut wait = Box::new(Self { error: UnsafeCell::new(ErrorWord::default()), bound });
        wait.bound.error = wait.error.get();
        wait
    }

    fn as_ptr(&self) -> *const c_void {
        ptr::from_ref(&self.bound).cast()
    }

    fn error(&self) -> ErrorWord {
        // SAFETY: the call that may write it has returned.
        unsafe { *self.error.get() }
    }
}

/// Of an error completion.
const fn syndrome_name(syndrome: u8) -> &'static str {
    match syndrome {
        0x01 => "local length",
        0x02 => "malformed request",
        0x04 => "local key or range",
        0x05 => "flushed behind a failed request",
        0x06 => "memory window",
        0x10 => "bad response",
        0x11 => "local access",
        0x12 => "remote: invalid request",
        0x13 => "remote key, range or right",
        0x14 => "remote operation",
        0x15 => "nobody answers",
        0x16 => "peer has posted no receive",
        0x22 => "remote aborted",
        _ => "unknown",
    }
}

/// Flips bits of the variant of a key, its low byte: no registration has that one.
const WRONG_KEY: u32 = 0x5a;
/// `SY_MLX5_OK` and so on.
const OK: u32 = 0;
const TIMEOUT: u32 = 1;
const COMPLETION: u32 = 3;
const DESYNC: u32 = 4;
const ARGUMENT: u32 = 5;
/// `SY_TAG_MLX5_SLOT` and so on.
const TAG_SLOT: u32 = 32;
const TAG_TURN: u32 = 33;
const TAG_QUIET: u32 = 34;
const TAG_DESYNC: u32 = 36;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_completion_names_its_fields() {
        let cause = ErrorCompletion(0x1234_0d88_1303);
        assert_eq!(cause.syndrome(), 0x13);
        let text = cause.to_string();
        assert!(text.contains("syndrome 0x13 (remote key, range or right), vendor 0x88"), "{text}");
        assert!(text.contains("opcode 0x0d, index 0x1234"), "{text}");
    }
}
