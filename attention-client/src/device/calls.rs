//! Outstanding calls: as many as slots have frames, combined in the order of their dispatch.
//!
//! The order is that of the rings: a frame of a ring is filled again once its earlier content has been answered
//! and summed. Records of recorded calls come after those of other calls: graphs point to their memory for good.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use kernels::abi::DevicePtr;
use telemetry::TraceContext;

use super::peers::{LinkUse, Tables};
use super::{DeviceError, DeviceInput};
use crate::timing::LayerTiming;

/// A dispatched layer. Pass it to [`DeviceClient::combine`](super::DeviceClient::combine). Dropping it abandons the
/// call.
#[derive(Debug)]
#[must_use = "dropping a handle abandons the call"]
pub struct DeviceHandle {
    call: CallRef,
}

/// A combined layer whose output may still lack parts. Pass it to
/// [`DeviceClient::finish`](super::DeviceClient::finish).
#[derive(Debug)]
#[must_use = "the output may lack parts until the call is finished"]
pub struct DevicePending {
    call: CallRef,
    layer: u32,
}

/// A caller's reference to a call. Dropping it abandons the call while `is_armed`.
#[derive(Debug)]
struct CallRef {
    idx: usize,
    serial: u64,
    is_recorded: bool,
    /// Bits of abandoned calls, shared with [`Calls`].
    abandoned: Arc<AtomicU64>,
    is_armed: bool,
}

impl Drop for CallRef {
    fn drop(&mut self) {
        if self.is_armed {
            self.abandoned.fetch_or(1 << self.idx, Ordering::Release);
        }
    }
}

impl DeviceHandle {
    pub(super) fn into_pending(mut self, layer: u32) -> DevicePending {
        // A recorded call ends with its combine. Callers wait for replays of the graph instead.
        self.call.is_armed &= !self.call.is_recorded;
        DevicePending { call: self.call, layer }
    }
}

impl DevicePending {
    /// The call is over.
    pub(super) fn disarm(mut self) {
        self.call.is_armed = false;
    }

    /// Layer of the call.
    #[must_use]
    pub const fn layer(&self) -> u32 {
        self.layer
    }

    /// Returns true if the call was recorded into a graph. Finish replays of the graph, not the call.
    #[must_use]
    pub const fn is_recorded(&self) -> bool {
        self.call.is_recorded
    }
}

/// Progress of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
    Free,
    Dispatched,
    Combined,
}

/// Progress of an early sum: a combine into scratch memory, before the caller asks for the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EarlySum {
    /// The kernel may still run.
    Running,
    Done,
}

/// A layer of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layer {
    pub number: u32,
    /// Index among the MoE layers.
    pub idx: usize,
}

/// Record of an outstanding call.
#[derive(Debug)]
pub(super) struct Call {
    pub phase: Phase,
    pub serial: u64,
    /// The call's kernels that were launched before this number was drawn have ended. Later ones use no server that
    /// was removed before.
    pub busy_from: u64,
    pub input: DeviceInput,
    pub layer: Layer,
    pub out: DevicePtr,
    pub early_sum: Option<EarlySum>,
    /// Number of the last dispatch that the record's memory reported before this call.
    pub reported_before: u64,
    /// Handle of the stream that has the call's last kernel.
    pub stream: u64,
    /// Tables that the dispatch used.
    pub tables: Arc<Tables>,
    /// Links whose slots the kernels may use.
    pub uses: Vec<LinkUse>,
    pub started: Option<Instant>,
    /// True if an error of the call's dispatch may have been cleared with another call's error: all calls share one
    /// error word.
    pub is_suspect: bool,
    /// End of the first wait for the kernels.
    pub until: Option<Instant>,
    pub timing: LayerTiming,
    /// Links that failed before they answered: place, and number of the link there.
    pub failed: Vec<(usize, u64)>,
    /// Trace of the caller.
    pub context: Option<TraceContext>,
}

impl Call {
    fn is_unsummed(&self) -> bool {
        self.phase == Phase::Dispatched && self.early_sum.is_none()
    }
}

/// A replay that may be running.
#[derive(Debug)]
pub(super) struct Replay {
    pub serial: u64,
    pub uses: Vec<LinkUse>,
    /// Handle of the stream.
    pub stream: u64,
    pub started: Instant,
    /// End of the first wait for its kernels.
    pub until: Option<Instant>,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Calls {
    num_frames: usize,
    /// Records of recorded calls come last.
    calls: Vec<Call>,
    next_serial: u64,
    num_recorded: u64,
    /// A bit for each record whose caller dropped its reference.
    abandoned: Arc<AtomicU64>,
}

impl Calls {
    pub fn new(num_frames: usize) -> Self {
        let null = DevicePtr::NULL;
        let input = DeviceInput::new(null, null, null, null, 0);
        let call = || Call {
            phase: Phase::Free,
            serial: 0,
            busy_from: 0,
            input,
            layer: Layer { number: 0, idx: 0 },
            out: null,
            early_sum: None,
            reported_before: 0,
            stream: 0,
            tables: Arc::new(Tables::empty(0)),
            uses: Vec::new(),
            started: None,
            until: None,
            is_suspect: false,
            timing: LayerTiming::default(),
            failed: Vec::new(),
            context: None,
        };
        Self {
            num_frames,
            calls: (0..2 * num_frames).map(|_| call()).collect(),
            next_serial: 0,
            num_recorded: 0,
            abandoned: Arc::default(),
        }
    }

    pub fn get(&self, idx: usize) -> &Call {
        &self.calls[idx]
    }

    pub fn get_mut(&mut self, idx: usize) -> &mut Call {
        &mut self.calls[idx]
    }

    /// A free record for a call that runs now.
    pub fn free_idx(&self) -> Result<usize, DeviceError> {
        let free = self.calls[..self.num_frames].iter().position(|call| call.phase == Phase::Free);
        free.ok_or(DeviceError::Outstanding { num_frames: self.num_frames as u32 })
    }

    /// All kernels that were launched before `number` was drawn have ended. So only calls that are not summed yet
    /// need servers that were removed before.
    pub fn note_idle(&mut self, number: u64) {
        for call in &mut self.calls[..self.num_frames] {
            if call.phase == Phase::Combined || call.early_sum == Some(EarlySum::Done) {
                call.busy_from = number;
            }
        }
    }

    /// The oldest call that has not been summed.
    pub fn unsummed(&self) -> Option<usize> {
        let calls = self.calls[..self.num_frames].iter().enumerate();
        let unsummed = calls.filter(|(_, call)| call.is_unsummed());
        unsummed.min_by_key(|(_, call)| call.serial).map(|(idx, _)| idx)
    }

    /// A call whose early sum may still run.
    pub fn running_early_sum(&self) -> Option<usize> {
        let is_running = |call: &Call| {
            call.phase == Phase::Dispatched && call.early_sum == Some(EarlySum::Running)
        };
        self.calls[..self.num_frames].iter().position(is_running)
    }

    /// Notes that the error word was cleared. Calls that have not been summed did not report its content.
    pub fn suspect_unsummed(&mut self) {
        for call in self.calls[..self.num_frames].iter_mut().filter(|call| call.is_unsummed()) {
            call.is_suspect = true;
        }
    }

    /// The oldest call that is not summed yet and occupies a ring frame of the next dispatch.
    pub fn colliding(&self) -> Option<usize> {
        let idx = self.unsummed()?;
        let num_newer = self.next_serial + 1 - self.calls[idx].serial;
        (num_newer >= self.num_frames as u64).then_some(idx)
    }

    /// Takes a record for a call that runs now. No other call may be [colliding](Self::colliding).
    pub fn claim(&mut self, input: DeviceInput, layer: Layer) -> Result<usize, DeviceError> {
        let idx = self.free_idx()?;
        debug_assert!(self.colliding().is_none());
        self.next_serial += 1;
        self.init(idx, self.next_serial, input, layer);
        Ok(idx)
    }

    /// Takes a record for a call that is recorded into a graph.
    pub fn claim_recorded(
        &mut self,
        input: DeviceInput,
        layer: Layer,
    ) -> Result<usize, DeviceError> {
        self.release_recorded();
        let idx = self.num_frames + (self.num_recorded % self.num_frames as u64) as usize;
        if self.calls[idx].phase != Phase::Free {
            return Err(DeviceError::Outstanding { num_frames: self.num_frames as u32 });
        }
        self.num_recorded += 1;
        self.init(idx, self.num_recorded, input, layer);
        Ok(idx)
    }

    /// Releases recorded calls whose handles were dropped. No kernel of them can run.
    fn release_recorded(&mut self) {
        let abandoned = self.abandoned.load(Ordering::Acquire) >> self.num_frames;
        for idx in (0..self.num_frames).filter(|idx| abandoned >> idx & 1 != 0) {
            self.release(self.num_frames + idx);
        }
    }

    fn init(&mut self, idx: usize, serial: u64, input: DeviceInput, layer: Layer) {
        let call = &mut self.calls[idx];
        call.phase = Phase::Dispatched;
        call.early_sum = None;
        call.is_suspect = false;
        (call.serial, call.busy_from, call.input) = (serial, serial, input);
        call.layer = layer;
        (call.started, call.until) = (None, None);
        call.timing = LayerTiming::default();
        call.failed.clear();
        call.context = None;
    }

    pub fn handle(&self, idx: usize) -> DeviceHandle {
        let call = CallRef {
            idx,
            serial: self.calls[idx].serial,
            is_recorded: idx >= self.num_frames,
            abandoned: Arc::clone(&self.abandoned),
            is_armed: true,
        };
        DeviceHandle { call }
    }

    /// Undoes the last [`claim_recorded`](Self::claim_recorded), whose call was not recorded.
    pub fn unclaim_recorded(&mut self, idx: usize) {
        self.num_recorded -= 1;
        self.release(idx);
    }

    /// The record of a handle. The call must be the oldest that is not combined, apart from abandoned ones.
    pub fn redeem(
        &mut self,
        handle: &DeviceHandle,
        is_recording: bool,
    ) -> Result<usize, DeviceError> {
        self.release_recorded();
        let call_ref = &handle.call;
        if call_ref.is_recorded != is_recording {
            let names = ["a call that runs now", "a recorded call"];
            let (found, expected) =
                (names[usize::from(call_ref.is_recorded)], names[usize::from(is_recording)]);
            return Err(DeviceError::Handle { found, expected });
        }
        self.check(call_ref, Phase::Dispatched)?;
        let own = |idx: usize| (idx >= self.num_frames) == is_recording;
        let abandoned = self.abandoned.load(Ordering::Acquire);
        let waiting = self.calls.iter().enumerate().filter(|(idx, call)| {
            own(*idx) && call.phase == Phase::Dispatched && abandoned >> idx & 1 == 0
        });
        match waiting.map(|(_, call)| call.serial).min() {
            Some(expected) if expected < call_ref.serial => {
                Err(DeviceError::Order { found: call_ref.serial, expected })
            }
            _ => Ok(call_ref.idx),
        }
    }

    /// Notes the trace of a call's caller. A handle of another client has no effect.
    pub fn set_context(&mut self, handle: &DeviceHandle, context: TraceContext) {
        if let Ok(idx) = self.check(&handle.call, Phase::Dispatched) {
            self.calls[idx].context = Some(context);
        }
    }

    pub fn redeem_pending(&self, pending: &DevicePending) -> Result<usize, DeviceError> {
        if pending.call.is_recorded {
            let (found, expected) = ("a recorded call", "a call that runs now");
            return Err(DeviceError::Handle { found, expected });
        }
        self.check(&pending.call, Phase::Combined)
    }

    fn check(&self, call_ref: &CallRef, phase: Phase) -> Result<usize, DeviceError> {
        let is_mine = Arc::ptr_eq(&call_ref.abandoned, &self.abandoned)
            && self
                .calls
                .get(call_ref.idx)
                .is_some_and(|call| call.serial == call_ref.serial && call.phase == phase);
        if is_mine {
            return Ok(call_ref.idx);
        }
        Err(DeviceError::Handle { found: "another client's", expected: "this client's" })
    }

    /// Frees a record.
    pub fn release(&mut self, idx: usize) {
        self.calls[idx].phase = Phase::Free;
        // A reference that is dropped later belongs to a call that is over.
        self.abandoned.fetch_and(!(1 << idx), Ordering::Relaxed);
    }

    /// Abandons a call whose caller has no handle.
    pub fn abandon(&self, idx: usize) {
        self.abandoned.fetch_or(1 << idx, Ordering::Release);
    }

    /// The oldest abandoned call.
    pub fn next_abandoned(&mut self) -> Option<(usize, Phase)> {
        let abandoned = self.abandoned.load(Ordering::Acquire) & ((1 << self.num_frames) - 1);
        if abandoned == 0 {
            return None;
        }
        let calls = self.calls[..self.num_frames].iter().enumerate();
        let oldest = calls
            .filter(|(idx, call)| abandoned >> idx & 1 != 0 && call.phase != Phase::Free)
            .min_by_key(|(_, call)| call.serial)
            .map(|(idx, call)| (idx, call.phase));
        if oldest.is_none() {
            self.abandoned.fetch_and(!abandoned, Ordering::Relaxed);
        }
        oldest
    }

    /// Keeps the slots that outstanding calls use mapped for good.
    pub fn leak_uses(&mut self) {
        for call in &mut self.calls {
            std::mem::forget(std::mem::take(&mut call.uses));
        }
    }

    /// Number of the newest call.
    pub const fn last(&self) -> u64 {
        self.next_serial
    }

    /// Draws a number for a replay or a retry, which use the servers' slots like a call.
    pub const fn draw_serial(&mut self) -> u64 {
        self.next_serial += 1;
        self.next_serial
    }

    /// No call uses servers any more that were removed when this number, or an earlier one, was the last.
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
