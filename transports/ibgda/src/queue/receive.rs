//! Receives of a queue pair, for writes with immediate data: posted when the queue is connected, taken and
//! posted again one by one.
//!
//! Such a write uses a receive up but brings it no bytes. So all receives are the same segment that ends a list,
//! written once. Posting one more means counting it in the doorbell record. libibverbs cannot do that here: it
//! counts the entries that its own poller returned, and that poller is not used.

use std::hint;
use std::mem::offset_of;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::thread;
use std::time::{Duration, Instant};

use kernels::mlx5::{ReceiveHandle, ReceiveState};
use thiserror::Error;

use super::{CQE_BYTES, CQE_INVALID, QueueError};
use crate::access::{AccessError, Part, SharedMemory};

/// Content of a completion that a write with immediate data caused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Immediate {
    /// Number of the queue pair that it came to.
    pub qpn: u32,
    /// The number that the peer gave.
    pub imm: u32,
    /// Bytes that the peer wrote before.
    pub num_bytes: u32,
}

/// Immediate data cannot be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names of the fields say enough")]
pub enum ReceiveError {
    /// The queue was made without.
    #[error("queue pair {qpn:#x} has no receives: `num_receives` is 0")]
    NoReceives { qpn: u32 },
    /// Only kernels reach the completions.
    #[error(
        "queue pair {qpn:#x}: completions of receives lie in a GPU's memory, where only kernels take them"
    )]
    Unreachable { qpn: u32 },
    /// A receive was completed with an error; the queue must be reset.
    #[error(
        "queue pair {qpn:#x}: receive {index:#06x} failed: syndrome {syndrome:#04x}, vendor {vendor:#04x}"
    )]
    Completion {
        qpn: u32,
        /// `MLX5_CQE_SYNDROME_*`; 05 is a receive that was not used when the queue pair failed.
        syndrome: u8,
        /// For the vendor.
        vendor: u8,
        /// Low 16 bits of the receive's number.
        index: u16,
    },
    /// The NIC completed a receive that was never posted; the queue must be reset.
    #[error(
        "queue pair {qpn:#x}: a completion of opcode {opcode:#x} and index {index:#06x} is none of the next receive"
    )]
    Desync {
        qpn: u32,
        /// Opcode of the completion.
        opcode: u8,
        /// Index in it.
        index: u16,
    },
}

/// A piece of a queue, at an address of this process or in memory that may be a GPU's.
#[derive(Debug)]
pub(super) enum Piece {
    /// Pages of libmlx5, which keeps them until the queue is destroyed.
    Process(NonNull<u8>),
    /// From this offset on.
    Shared(Part, usize),
}

/// Layout of a queue's receives.
#[derive(Debug)]
pub(super) struct Pieces {
    /// First receive.
    pub(super) rq: Piece,
    /// Receives that there is room for.
    pub(super) rq_depth: u32,
    /// Bytes from one to the next, at least those of one.
    pub(super) rq_stride: usize,
    /// Doorbell record of the queue pair.
    pub(super) dbrec: Piece,
    /// First completion.
    pub(super) cq: Piece,
    /// Doorbell record of the completion queue.
    pub(super) cq_dbrec: Piece,
}

/// The other properties of a queue with receives, without the state and the peer's number.
pub(super) type OfReceives = (ReceiveHandle, Pieces);

/// Receives of a queue, and the position of the next one to take.
#[derive(Debug)]
pub(super) struct ReceiveQueue {
    handle: ReceiveHandle,
    pieces: Pieces,
    state: Piece,
}

// SAFETY: addresses of the queue's own memory, which outlives this value; words that others use at the same
// time are accessed atomically.
unsafe impl Send for ReceiveQueue {}
// SAFETY: the same; `try_take` has a lock.
unsafe impl Sync for ReceiveQueue {}

impl Piece {
    fn host(&self) -> Option<NonNull<u8>> {
        match self {
            Self::Process(start) => Some(*start),
            // SAFETY: offsets of pieces lie within their part.
            Self::Shared(part, offset) => part.host().map(|host| unsafe { host.add(*offset) }),
        }
    }

    /// Writes while neither the NIC nor another thread uses the place.
    fn write(&self, at: usize, bytes: &[u8]) -> Result<(), AccessError> {
        match self {
            Self::Process(start) => {
                // SAFETY: callers stay within the piece; it has no other user at this time.
                unsafe {
                    start
                        .add(at)
                        .copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len());
                }
                Ok(())
            }
            Self::Shared(part, offset) => part.write(offset + at, bytes),
        }
    }

    fn read(&self, at: usize, bytes: &mut [u8]) -> Result<(), AccessError> {
        match self {
            Self::Process(start) => {
                // SAFETY: as for `write`.
                unsafe {
                    start
                        .add(at)
                        .copy_to_nonoverlapping(NonNull::from(&mut *bytes).cast(), bytes.len());
                }
                Ok(())
            }
            Self::Shared(part, offset) => part.read(offset + at, bytes),
        }
    }

    /// Stores a word that the NIC may read at any time.
    fn store32(&self, at: usize, value: u32) -> Result<(), AccessError> {
        match self.host() {
            Some(host) => {
                // SAFETY: an aligned word of the piece; the NIC reads it whole.
                unsafe { word32(host, at) }.store(value, Ordering::Release);
                Ok(())
            }
            None => self.write(at, &value.to_ne_bytes()),
        }
    }
}

/// # Safety
/// An aligned word of a piece that lives.
unsafe fn word32<'a>(start: NonNull<u8>, at: usize) -> &'a AtomicU32 {
    // SAFETY: the caller's promise.
    unsafe { AtomicU32::from_ptr(start.add(at).cast().as_ptr()) }
}

/// # Safety
/// An aligned word of a piece that lives.
unsafe fn word64<'a>(start: NonNull<u8>, at: usize) -> &'a AtomicU64 {
    // SAFETY: the caller's promise.
    unsafe { AtomicU64::from_ptr(start.add(at).cast().as_ptr()) }
}

impl ReceiveQueue {
    pub(super) const fn new(handle: ReceiveHandle, pieces: Pieces, state: Piece) -> Self {
        Self { handle, pieces, state }
    }

    pub(super) const fn handle(&self) -> ReceiveHandle {
        self.handle
    }

    /// Writes all receives and posts as many as are to be there at any time. The queue pair is in INIT.
    pub(super) fn post(&self) -> Result<(), QueueError> {
        let Pieces { rq, rq_depth, rq_stride, dbrec, .. } = &self.pieces;
        // One copy for all: every copy to a GPU's memory is waited for.
        let mut receives = vec![0; *rq_depth as usize * rq_stride];
        for receive in receives.chunks_exact_mut(*rq_stride) {
            if let Some(segment) = receive.first_chunk_mut() {
                *segment = EMPTY_RECEIVE;
            }
        }
        rq.write(0, &receives)?;
        // The receives come before the record that counts them.
        fence(Ordering::Release);
        // SYNC POINT `receive`
        Ok(dbrec.store32(DBREC_RECEIVE, (self.handle.num_receives & 0xffff).to_be())?)
    }

    /// Resets the receives to their state before the queue was connected. A completion queue is not reset with its
    /// queue pair: readers continue behind completions that were never taken. The queue pair is in reset.
    pub(super) fn reset(&self) -> Result<(), QueueError> {
        let mut word = [0; 8];
        self.state.read(offset_of!(ReceiveState, cq_index), &mut word)?;
        let consumed = u64::from_le_bytes(word);
        let index = consumed + self.num_written(consumed)?;
        self.pieces.dbrec.store32(DBREC_RECEIVE, 0)?;
        self.pieces.cq_dbrec.store32(0, consumer_record(index))?;
        self.state.write(0, &[0; size_of::<ReceiveState>()])?;
        Ok(self.state.write(offset_of!(ReceiveState, cq_index), &index.to_le_bytes())?)
    }

    /// Completions from `first` on, up to one that the NIC has not written.
    fn num_written(&self, first: u64) -> Result<u64, AccessError> {
        let depth = u64::from(self.handle.cq_depth);
        let mut entries = Vec::new();
        let mut num = 0;
        while num < depth {
            // Read many together, up to the ring's end: every copy from a GPU's memory is waited for.
            let begin = first + num;
            let until_end = depth - (begin & (depth - 1));
            let num_read = until_end.min(depth - num).min(MOST_READ);
            entries.resize(usize::try_from(num_read).unwrap_or(0) * CQE_BYTES as usize, 0);
            self.pieces.cq.read(self.place(begin), &mut entries)?;
            let found = entries
                .chunks_exact(CQE_BYTES as usize)
                .zip(begin..)
                .take_while(|(entry, index)| {
                    entry.last().is_some_and(|op_own| self.is_owned(*op_own, *index))
                })
                .count() as u64;
            num += found;
            if found < num_read {
                break;
            }
        }
        Ok(num)
    }

    /// Whether a completion's last byte is of the round that `index` is in.
    fn is_owned(&self, op_own: u8, index: u64) -> bool {
        let owner = u8::from(index & u64::from(self.handle.cq_depth) != 0);
        op_own >> 4 != CQE_INVALID && op_own & 1 == owner
    }

    fn place(&self, index: u64) -> usize {
        let slot = index & u64::from(self.handle.cq_depth - 1);
        usize::try_from(slot).unwrap_or(0) * CQE_BYTES as usize
    }

    /// Takes the next immediate data, if there is any and no other thread is taking some, and posts its receive
    /// again. Does not block.
    pub(super) fn try_take(&self) -> Result<Option<Immediate>, ReceiveError> {
        let qpn = self.handle.qpn;
        let Pieces { dbrec, cq, cq_dbrec, .. } = &self.pieces;
        let (Some(state), Some(cq), Some(dbrec), Some(cq_dbrec)) =
            (self.state.host(), cq.host(), dbrec.host(), cq_dbrec.host())
        else {
            return Err(ReceiveError::Unreachable { qpn });
        };
        // SAFETY: the state is aligned memory that lives as long as this value, used by atomics.
        let lock = unsafe { word32(state, offset_of!(ReceiveState, lock)) };
        if lock.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return Ok(None);
        }
        // SAFETY: all of them live as long as this value, and the lock is held.
        let taken = unsafe { self.take_locked(state, cq, dbrec, cq_dbrec) };
        lock.store(0, Ordering::Release);
        taken
    }

    /// # Safety
    /// The addresses are those of the pieces; the caller holds the lock.
    unsafe fn take_locked(
        &self,
        state: NonNull<u8>,
        cq: NonNull<u8>,
        dbrec: NonNull<u8>,
        cq_dbrec: NonNull<u8>,
    ) -> Result<Option<Immediate>, ReceiveError> {
        let ReceiveHandle { qpn, num_receives, .. } = self.handle;
        // SAFETY: aligned words of the state.
        let (cq_index, taken, error) = unsafe {
            (
                word64(state, offset_of!(ReceiveState, cq_index)),
                word64(state, offset_of!(ReceiveState, taken)),
                word64(state, offset_of!(ReceiveState, error)),
            )
        };
        let former = error.load(Ordering::Relaxed);
        if former != 0 {
            return Err(error_of(qpn, former));
        }
        let index = cq_index.load(Ordering::Relaxed);
        // SAFETY: an entry of the ring, which the NIC writes word by word.
        let word = |at: usize| unsafe { word32(cq, self.place(index) + at) };
        // SYNC POINT `completion`: everything that the peer wrote, and the entry's other words, come behind.
        let tail = word(60).load(Ordering::Acquire).to_ne_bytes();
        if !self.is_owned(tail[3], index) {
            return Ok(None);
        }
        let number = taken.load(Ordering::Relaxed);
        let (opcode, counter) = (tail[3] >> 4, u16::from_be_bytes([tail[0], tail[1]]));
        let opcode_qpn = u32::from_be(word(56).load(Ordering::Relaxed));
        let found = if matches!(opcode, CQE_REQ_ERROR | CQE_RESP_ERROR) {
            let status = word(52).load(Ordering::Relaxed).to_ne_bytes();
            COMPLETION
                | u64::from(status[3]) << 8
                | u64::from(status[2]) << 16
                | u64::from(opcode_qpn >> 24) << 24
                | u64::from(counter) << 32
        } else if opcode != CQE_RESP_WRITE_IMM
            || opcode_qpn & 0xff_ffff != qpn
            || u64::from(counter) != number & 0xffff
        {
            DESYNC | u64::from(opcode) << 24 | u64::from(counter) << 32
        } else {
            0
        };
        if found != 0 {
            error.store(found, Ordering::Relaxed);
            return Err(error_of(qpn, found));
        }
        let immediate = Immediate {
            qpn,
            imm: u32::from_be(word(36).load(Ordering::Relaxed)),
            num_bytes: u32::from_be(word(44).load(Ordering::Relaxed)),
        };
        // SYNC POINT `receive`: the entry is given back when it was read, and room for a completion comes
        // before the receive that may need it.
        // SAFETY: aligned records of this queue.
        let (consumer, posted) = unsafe { (word32(cq_dbrec, 0), word32(dbrec, DBREC_RECEIVE)) };
        consumer.store(consumer_record(index + 1), Ordering::Release);
        let num_posted = number + 1 + u64::from(num_receives);
        posted.store(u32::try_from(num_posted & 0xffff).unwrap_or(0).to_be(), Ordering::Release);
        cq_index.store(index + 1, Ordering::Relaxed);
        taken.store(number + 1, Ordering::Relaxed);
        Ok(Some(immediate))
    }

    /// The same, waiting for at most `timeout`.
    pub(super) fn take(&self, timeout: Duration) -> Result<Option<Immediate>, ReceiveError> {
        wait_for(timeout, || self.try_take())
    }
}

/// Polls until there is data, or for `timeout`; at least once.
pub(crate) fn wait_for(
    timeout: Duration,
    mut poll: impl FnMut() -> Result<Option<Immediate>, ReceiveError>,
) -> Result<Option<Immediate>, ReceiveError> {
    let start = Instant::now();
    let mut num_looks = 0_u32;
    loop {
        if let Some(found) = poll()? {
            return Ok(Some(found));
        }
        if start.elapsed() >= timeout {
            return Ok(None);
        }
        num_looks = num_looks.saturating_add(1);
        match num_looks {
            0..SPINS => hint::spin_loop(),
            SPINS..YIELDS => thread::yield_now(),
            _ => thread::sleep(PAUSE),
        }
    }
}

/// `sy_mlx5_rq_state.error`
fn error_of(qpn: u32, word: u64) -> ReceiveError {
    let byte = |shift: u32| u8::try_from(word >> shift & 0xff).unwrap_or(0);
    let index = u16::try_from(word >> 32 & 0xffff).unwrap_or(0);
    if word & 0xff == COMPLETION {
        ReceiveError::Completion { qpn, syndrome: byte(8), vendor: byte(16), index }
    } else {
        ReceiveError::Desync { qpn, opcode: byte(24), index }
    }
}

/// The consumer's half of a completion queue's record.
fn consumer_record(index: u64) -> u32 {
    u32::try_from(index & 0xff_ffff).unwrap_or(0).to_be()
}

/// A segment without bytes that ends a list: length 0, `SY_MLX5_INVALID_LKEY`, address 0.
const EMPTY_RECEIVE: [u8; 16] = [0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
/// `SY_MLX5_DBREC_RECEIVE`, in bytes.
const DBREC_RECEIVE: usize = 0;
/// `SY_MLX5_CQE_*`
const CQE_RESP_WRITE_IMM: u8 = 0x1;
const CQE_REQ_ERROR: u8 = 0xd;
const CQE_RESP_ERROR: u8 = 0xe;
/// `SY_MLX5_COMPLETION` and `SY_MLX5_DESYNC`
const COMPLETION: u64 = 3;
const DESYNC: u64 = 4;
/// Completions that a reset reads in one copy.
const MOST_READ: u64 = 1024;
/// Polls before the thread yields the processor, and before it sleeps.
const SPINS: u32 = 1000;
const YIELDS: u32 = 20_000;
const PAUSE: Duration = Duration::from_micros(20);
