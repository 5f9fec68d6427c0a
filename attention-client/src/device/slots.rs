//! Outstanding calls: as many as slots have frames, combined in the order of their dispatch.
//!
//! The order is that of the rings: a place of a ring is filled again when the frame before it has been
//! answered and summed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use kernels::abi::DevicePtr;

use super::lane::{Tables, Used};
use super::{DeviceError, DeviceInput};
use crate::client::LayerTiming;

/// A dispatched layer. Give it to [`DeviceClient::combine`](super::DeviceClient::combine); dropping it
/// gives the call up.
#[derive(Debug)]
#[must_use = "dropping a handle gives the call up"]
pub struct DeviceHandle {
    ticket: Ticket,
}

/// A combined layer whose output is not yet known to be complete. Give it to
/// [`DeviceClient::finish`](super::DeviceClient::finish).
#[derive(Debug)]
#[must_use = "the output may lack parts until the call is finished"]
pub struct DevicePending {
    ticket: Ticket,
    layer: u32,
}

#[derive(Debug)]
struct Ticket {
    slot: usize,
    serial: u64,
    is_recorded: bool,
    dropped: Arc<AtomicU64>,
    is_armed: bool,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.is_armed {
            self.dropped.fetch_or(1 << self.slot, Ordering::Release);
        }
    }
}

impl DeviceHandle {
    pub(super) fn into_pending(mut self, layer: u32) -> DevicePending {
        // A recorded call is over with its combine: its replays are what is waited for.
        self.ticket.is_armed &= !self.ticket.is_recorded;
        DevicePending { ticket: self.ticket, layer }
    }
}

impl DevicePending {
    /// The call is over.
    pub(super) fn disarm(mut self) {
        self.ticket.is_armed = false;
    }

    /// Layer of the call.
    #[must_use]
    pub const fn layer(&self) -> u32 {
        self.layer
    }

    /// Whether the call was recorded into a graph: such a one is not finished, its replays are.
    #[must_use]
    pub const fn is_recorded(&self) -> bool {
        self.ticket.is_recorded
    }
}

/// How far a call is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
    Free,
    Dispatched,
    Combined,
}

/// How far a sum is that nobody has asked for yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ahead {
    /// It may still run.
    Begun,
    Done,
}

/// What a client knows of an outstanding call.
#[derive(Debug)]
pub(super) struct Call {
    pub phase: Phase,
    pub serial: u64,
    /// Its kernels that were launched before this number was drawn have ended, and those to come use no
    /// server that was taken out before.
    pub busy_from: u64,
    pub input: DeviceInput,
    pub layer: u32,
    pub layer_idx: usize,
    pub out: DevicePtr,
    /// Whether it is summed before its caller asks for its rows: into memory of its slot.
    pub ahead: Option<Ahead>,
    /// Number of the last dispatch that its slot reported before this call.
    pub reported_before: u64,
    /// Handle of the stream that has its last kernel.
    pub stream: u64,
    /// By which the tokens were sent.
    pub tables: Arc<Tables>,
    /// Servers whose slots its kernels may use.
    pub used: Vec<Used>,
    pub started: Option<Instant>,
    /// Whether what its dispatch had to complain about may have been cleared with another call's error: there is
    /// one word for all of them.
    pub is_suspect: bool,
    /// When its kernels must have ended, once they are waited for.
    pub until: Option<Instant>,
    pub timing: LayerTiming,
    /// Links that failed before they answered: seat, and which link of it.
    pub failed: Vec<(usize, u64)>,
}

impl Call {
    fn is_unsummed(&self) -> bool {
        self.phase == Phase::Dispatched && self.ahead.is_none()
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Slots {
    num_frames: usize,
    /// Those of recorded calls come last.
    calls: Vec<Call>,
    next_serial: u64,
    num_recorded: u64,
    dropped: Arc<AtomicU64>,
}

impl Slots {
    pub fn new(num_frames: usize) -> Self {
        let null = DevicePtr::NULL;
        let input = DeviceInput::new(null, null, null, null, 0);
        let call = || Call {
            phase: Phase::Free,
            serial: 0,
            busy_from: 0,
            input,
            layer: 0,
            layer_idx: 0,
            out: null,
            ahead: None,
            reported_before: 0,
            stream: 0,
            tables: Arc::new(Tables::empty(0)),
            used: Vec::new(),
            started: None,
            until: None,
            is_suspect: false,
            timing: LayerTiming::default(),
            failed: Vec::new(),
        };
        Self {
            num_frames,
            calls: (0..2 * num_frames).map(|_| call()).collect(),
            next_serial: 0,
            num_recorded: 0,
            dropped: Arc::default(),
        }
    }

    pub fn call(&self, slot: usize) -> &Call {
        &self.calls[slot]
    }

    pub fn call_mut(&mut self, slot: usize) -> &mut Call {
        &mut self.calls[slot]
    }

    /// A slot for a call that runs now.
    pub fn free_slot(&self) -> Result<usize, DeviceError> {
        let free = self.calls[..self.num_frames].iter().position(|call| call.phase == Phase::Free);
        free.ok_or(DeviceError::Outstanding { num_frames: self.num_frames as u32 })
    }

    /// All kernels that were launched before `number` was drawn have ended: only calls that are still to be
    /// summed need the servers of before.
    pub fn rest(&mut self, number: u64) {
        for call in &mut self.calls[..self.num_frames] {
            if call.phase == Phase::Combined || call.ahead == Some(Ahead::Done) {
                call.busy_from = number;
            }
        }
    }

    /// The oldest call that has not been summed.
    pub fn unsummed(&self) -> Option<usize> {
        let calls = self.calls[..self.num_frames].iter().enumerate();
        let unsummed = calls.filter(|(_, call)| call.is_unsummed());
        unsummed.min_by_key(|(_, call)| call.serial).map(|(slot, _)| slot)
    }

    /// A call whose sum ahead is begun and was not seen to end.
    pub fn begun(&self) -> Option<usize> {
        let is_begun =
            |call: &Call| call.phase == Phase::Dispatched && call.ahead == Some(Ahead::Begun);
        self.calls[..self.num_frames].iter().position(is_begun)
    }

    /// The error word was cleared: calls that have not been summed did not report what it said.
    pub fn suspect_unsummed(&mut self) {
        for call in self.calls[..self.num_frames].iter_mut().filter(|call| call.is_unsummed()) {
            call.is_suspect = true;
        }
    }

    /// The oldest call whose frames lie where the next dispatch's belong, and are not summed yet.
    pub fn in_the_way(&self) -> Option<usize> {
        let slot = self.unsummed()?;
        let num_newer = self.next_serial + 1 - self.calls[slot].serial;
        (num_newer >= self.num_frames as u64).then_some(slot)
    }

    /// Takes a slot for a call that runs now. Nothing is [in the way](Self::in_the_way) of it.
    pub fn claim(
        &mut self,
        input: DeviceInput,
        layer: u32,
        layer_idx: usize,
    ) -> Result<usize, DeviceError> {
        let slot = self.free_slot()?;
        debug_assert!(self.in_the_way().is_none());
        self.next_serial += 1;
        self.take(slot, self.next_serial, input, layer, layer_idx);
        Ok(slot)
    }

    /// A slot for a call that is recorded.
    pub fn claim_recorded(
        &mut self,
        input: DeviceInput,
        layer: u32,
        layer_idx: usize,
    ) -> Result<usize, DeviceError> {
        self.forget_recorded();
        let slot = self.num_frames + (self.num_recorded % self.num_frames as u64) as usize;
        if self.calls[slot].phase != Phase::Free {
            return Err(DeviceError::Outstanding { num_frames: self.num_frames as u32 });
        }
        self.num_recorded += 1;
        self.take(slot, self.num_recorded, input, layer, layer_idx);
        Ok(slot)
    }

    /// Frees the slots of recorded calls whose handles were dropped: nothing of them is under way.
    fn forget_recorded(&mut self) {
        let dropped = self.dropped.load(Ordering::Acquire) >> self.num_frames;
        for slot in (0..self.num_frames).filter(|slot| dropped >> slot & 1 != 0) {
            self.release(self.num_frames + slot);
        }
    }

    fn take(&mut self, slot: usize, serial: u64, input: DeviceInput, layer: u32, layer_idx: usize) {
        let call = &mut self.calls[slot];
        call.phase = Phase::Dispatched;
        call.ahead = None;
        call.is_suspect = false;
        (call.serial, call.busy_from, call.input) = (serial, serial, input);
        (call.layer, call.layer_idx) = (layer, layer_idx);
        (call.started, call.until) = (None, None);
        call.timing = LayerTiming::default();
        call.failed.clear();
    }

    pub fn handle(&self, slot: usize) -> DeviceHandle {
        let ticket = Ticket {
            slot,
            serial: self.calls[slot].serial,
            is_recorded: slot >= self.num_frames,
            dropped: Arc::clone(&self.dropped),
            is_armed: true,
        };
        DeviceHandle { ticket }
    }

    /// What was to be recorded last was not.
    pub fn take_back_recorded(&mut self, slot: usize) {
        self.num_recorded -= 1;
        self.release(slot);
    }

    /// The slot of a handle that is the next to be combined, but for those that were dropped.
    pub fn redeem(
        &mut self,
        handle: &DeviceHandle,
        is_recording: bool,
    ) -> Result<usize, DeviceError> {
        self.forget_recorded();
        let ticket = &handle.ticket;
        if ticket.is_recorded != is_recording {
            let names = ["a call that runs now", "a recorded call"];
            let (found, expected) =
                (names[usize::from(ticket.is_recorded)], names[usize::from(is_recording)]);
            return Err(DeviceError::Handle { found, expected });
        }
        self.check(ticket, Phase::Dispatched)?;
        let own = |slot: usize| (slot >= self.num_frames) == is_recording;
        let dropped = self.dropped.load(Ordering::Acquire);
        let waiting = self.calls.iter().enumerate().filter(|(slot, call)| {
            own(*slot) && call.phase == Phase::Dispatched && dropped >> slot & 1 == 0
        });
        match waiting.map(|(_, call)| call.serial).min() {
            Some(expected) if expected < ticket.serial => {
                Err(DeviceError::Order { found: ticket.serial, expected })
            }
            _ => Ok(ticket.slot),
        }
    }

    pub fn redeem_pending(&self, pending: &DevicePending) -> Result<usize, DeviceError> {
        if pending.ticket.is_recorded {
            let (found, expected) = ("a recorded call", "a call that runs now");
            return Err(DeviceError::Handle { found, expected });
        }
        self.check(&pending.ticket, Phase::Combined)
    }

    fn check(&self, ticket: &Ticket, phase: Phase) -> Result<usize, DeviceError> {
        let is_mine = Arc::ptr_eq(&ticket.dropped, &self.dropped)
            && self
                .calls
                .get(ticket.slot)
                .is_some_and(|call| call.serial == ticket.serial && call.phase == phase);
        if is_mine {
            return Ok(ticket.slot);
        }
        Err(DeviceError::Handle { found: "another client's", expected: "this client's" })
    }

    pub fn release(&mut self, slot: usize) {
        self.calls[slot].phase = Phase::Free;
        // A ticket that goes later means a call that is over.
        self.dropped.fetch_and(!(1 << slot), Ordering::Relaxed);
    }

    /// Nobody has a handle of the call: it is taken up like one that was dropped.
    pub fn abandon(&self, slot: usize) {
        self.dropped.fetch_or(1 << slot, Ordering::Release);
    }

    /// The oldest call that its caller dropped.
    pub fn next_abandoned(&mut self) -> Option<(usize, Phase)> {
        let dropped = self.dropped.load(Ordering::Acquire) & ((1 << self.num_frames) - 1);
        if dropped == 0 {
            return None;
        }
        let calls = self.calls[..self.num_frames].iter().enumerate();
        let oldest = calls
            .filter(|(slot, call)| dropped >> slot & 1 != 0 && call.phase != Phase::Free)
            .min_by_key(|(_, call)| call.serial)
            .map(|(slot, call)| (slot, call.phase));
        if oldest.is_none() {
            self.dropped.fetch_and(!dropped, Ordering::Relaxed);
        }
        oldest
    }

    /// Never unmaps what outstanding calls use.
    pub fn keep_used(&mut self) {
        for call in &mut self.calls {
            std::mem::forget(std::mem::take(&mut call.used));
        }
    }

    /// Number of the newest call.
    pub const fn last(&self) -> u64 {
        self.next_serial
    }

    /// A number for something that is no call of its own but uses the servers' slots like one.
    pub const fn next(&mut self) -> u64 {
        self.next_serial += 1;
        self.next_serial
    }

    /// Nothing uses servers any more that were taken out when this number, or an earlier one, was the last.
    pub fn finished(&self) -> u64 {
        let open = self.calls[..self.num_frames].iter().filter(|call| call.phase != Phase::Free);
        open.map(|call| call.busy_from - 1).min().unwrap_or(self.next_serial)
    }

    /// A stream other than `raw` that may still have kernels of a call.
    pub fn other_stream(&self, raw: u64) -> Option<u64> {
        let mut open = self.calls[..self.num_frames].iter().filter(|c| c.phase != Phase::Free);
        open.find_map(|call| (call.stream != raw).then_some(call.stream))
    }

    pub fn num_in(&self, phase: Phase) -> usize {
        self.calls[..self.num_frames].iter().filter(|call| call.phase == phase).count()
    }

    pub fn num_outstanding(&self) -> usize {
        self.calls[..self.num_frames].iter().filter(|call| call.phase != Phase::Free).count()
    }
}
