//! Servers that show life but do not answer. Kernels wait for such a one as long as it does, so the host fails
//! it when the time for a server's work is over. Its bit then ends all waits for it, and no other's.
//!
//! A stream may have many calls, each of which has that time for itself: it begins anew with each step that the
//! kernels make, and only who owes an answer to the oldest call under way is to blame. Those behind it were
//! perhaps sent an instant ago.

use std::mem::{offset_of, size_of};
use std::time::{Duration, Instant};

use kernels::abi::{ClientState, Handle, WAY_DIRECT, WORD_STATUS_OFFSET, WORD_STRIDE};
use kernels::gpu::{GpuError, Stream};

use super::repair::bits;
use super::slots::Phase;
use super::{DeviceClient, MARGIN};
use crate::client::link::Link;
use crate::metrics::FailReason;

/// How far kernels are: as long as two looks agree, the oldest call is the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Step {
    /// Dispatches that have run.
    sequence: u64,
    /// Sum of the last dispatches that slots have reported, which only grow.
    reported: u64,
}

impl DeviceClient {
    /// Waits for the kernels of the call in `slot`, which were launched just now.
    pub(super) fn wait_for_call(&mut self, stream: &Stream, slot: usize) -> Result<(), GpuError> {
        self.slots.call_mut(slot).until = None;
        self.wait_for_call_again(stream, slot)
    }

    /// As [`wait_for_call`](Self::wait_for_call), but what was waited for in vain is not waited for as long
    /// again.
    pub(super) fn wait_for_call_again(
        &mut self,
        stream: &Stream,
        slot: usize,
    ) -> Result<(), GpuError> {
        let (now, bound) = (Instant::now(), self.bound());
        let until = *self.slots.call_mut(slot).until.get_or_insert(now + bound);
        self.wait_until(stream, until.max(now + MARGIN))
    }

    /// Waits for what `stream` has, until `until` or as long as kernels get on. Who has not answered the oldest
    /// call then has failed, and the others go on.
    pub(super) fn wait_until(
        &mut self,
        stream: &Stream,
        mut until: Instant,
    ) -> Result<(), GpuError> {
        let mut seen = None;
        loop {
            match stream.wait(until.min(Instant::now() + LOOK)) {
                Err(GpuError::Deadline { .. }) => self.look(&mut seen, &mut until)?,
                ended => return ended,
            }
        }
    }

    /// Puts `until` off when kernels got on since the last look, or when who held them up at `until` has failed.
    ///
    /// # Errors
    /// [`GpuError::Deadline`] when it is no server that they wait for.
    pub(super) fn look(
        &mut self,
        seen: &mut Option<Step>,
        until: &mut Instant,
    ) -> Result<(), GpuError> {
        let step = self.step()?;
        if seen.replace(step).is_some_and(|seen| seen != step) {
            *until = Instant::now() + self.bound();
        } else if *until <= Instant::now() {
            if !self.fail_overdue(step)? {
                return Err(GpuError::Deadline { what: "stream" });
            }
            *until = Instant::now() + self.bound();
        }
        Ok(())
    }

    fn step(&self) -> Result<Step, GpuError> {
        let mut sequence = Vec::new();
        let from = self.memory.state.at(offset_of!(ClientState, sequence) as u64, 8)?;
        // SAFETY: a word of the client's own state.
        unsafe { self.memory.fetch::<u64>(&self.side, from, &mut sequence, 1, MARGIN)? };
        let slots = 0..self.geometry.num_frames as usize;
        let reported = slots.map(|slot| self.memory.reported(slot)).fold(0, u64::wrapping_add);
        Ok(Step { sequence: sequence[0], reported })
    }

    /// Fails the servers that have not answered the oldest call under way, if any.
    fn fail_overdue(&mut self, step: Step) -> Result<bool, GpuError> {
        let num_frames = self.geometry.num_frames as usize;
        let mut running = Vec::new();
        for slot in 0..2 * num_frames {
            let is_recorded = slot >= num_frames;
            let may_wait = match is_recorded {
                true => self.replaying.is_some(),
                false => {
                    let call = self.slots.call(slot);
                    call.phase == Phase::Combined || call.ahead.is_some()
                }
            };
            let handle = self.handle(slot)?;
            // What a slot holds may be of an earlier call: its report is there, or it is too long ago.
            let after = match is_recorded {
                true => step.sequence.saturating_sub(num_frames as u64),
                false => self.memory.reported(slot),
            };
            if may_wait && handle.sequence > after {
                running.push(handle);
            }
        }
        running.sort_unstable_by_key(|handle| handle.sequence);
        let ClientState { posted, awaited, .. } = self.state()?;
        let waits = |idx: usize| {
            (self.tables.servers[idx].request.way == WAY_DIRECT).then_some(awaited[idx] != 0)
        };
        for handle in running {
            let mut overdue = Vec::new();
            // Kernels no longer wait for whom they have given up.
            for idx in bits(handle.contacted & !handle.missing) {
                let number = handle.frame_number[idx];
                let Some(link) = self.lane.link(idx) else { continue };
                // A number that its seat has not come to was its predecessor's.
                if number <= posted[0][idx].max(posted[1][idx])
                    && self.owes(link, number, handle.num_rows[idx], waits(idx))?
                {
                    overdue.push((idx, number));
                }
            }
            for &(idx, number) in &overdue {
                let reason = self.lane.why_unanswered(idx, FailReason::Stuck);
                let server = self.lane.link(idx).map_or("", |link| link.server.name());
                tracing::warn!(server, frame = number, reason = reason.name(), "no answer in time");
                self.lane.fail(idx, reason, self.slots.last(), &self.shared);
            }
            if !overdue.is_empty() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn handle(&self, slot: usize) -> Result<Handle, GpuError> {
        let mut found = Vec::new();
        let from = self.memory.slots[slot].handle.at(0, size_of::<Handle>() as u64)?;
        // SAFETY: the client's own memory.
        unsafe { self.memory.fetch::<Handle>(&self.side, from, &mut found, 1, MARGIN)? };
        Ok(found[0])
    }

    pub(super) fn state(&self) -> Result<ClientState, GpuError> {
        let mut found = Vec::new();
        let from = self.memory.state.at(0, size_of::<ClientState>() as u64)?;
        // SAFETY: the client's own state.
        unsafe { self.memory.fetch::<ClientState>(&self.side, from, &mut found, 1, MARGIN)? };
        Ok(found[0])
    }

    /// Whether a row of frame `number` is neither answered nor refused, as combine would see it. `waits`:
    /// whether kernels wait for rows that this server stores by itself. Such rows have no flags, and those that
    /// came are gone once they are summed; but none of an earlier call is waited for any more.
    fn owes(
        &self,
        link: &Link,
        number: u64,
        num_rows: u32,
        waits: Option<bool>,
    ) -> Result<bool, GpuError> {
        let pair = link.device.as_ref().map(|cell| cell.lock());
        let Some(pair) = pair.as_ref().and_then(|pair| pair.as_ref()) else { return Ok(false) };
        let geometry = &self.geometry;
        let place = number & u64::from(geometry.num_frames - 1);
        let status = geometry.response_control_offset + WORD_STATUS_OFFSET + place * WORD_STRIDE;
        // An empty frame is answered by the flag of its first row.
        let is_empty = num_rows == 0;
        let num_rows = num_rows.clamp(1, geometry.max_tokens) as usize;
        let flags = place * geometry.response_frame_bytes + geometry.response_flags_offset;
        let (mut words, mut came) = (Vec::new(), Vec::new());
        let memory = pair.own_memory();
        let (status, flags) = (memory.at(status, 8)?, memory.at(flags, num_rows as u64 * 8)?);
        // SAFETY: both ranges were checked, and the lock keeps the slot mapped.
        unsafe {
            self.memory.fetch::<u64>(&self.side, status, &mut words, 1, MARGIN)?;
            self.memory.fetch::<u64>(&self.side, flags, &mut came, num_rows, MARGIN)?;
        }
        let is_refused = words[0] >> STATUS_SHIFT == number;
        let is_late = match waits {
            Some(waits) if !is_empty => waits,
            _ => came.iter().any(|&flag| flag < number),
        };
        Ok(!is_refused && is_late)
    }
}

/// How often a long wait looks whether kernels get on.
pub(super) const LOOK: Duration = Duration::from_millis(500);
/// Of a word by which a server refuses a frame: the frame's number is above, an error code below.
const STATUS_SHIFT: u32 = 16;
