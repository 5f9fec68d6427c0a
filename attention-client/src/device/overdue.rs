//! Servers that show life but do not answer. Kernels wait for such a one as long as it does, so the host fails
//! it when the time for a server's work is over. Its bit then ends all waits for it, and no other's.
//!
//! A stream may have many calls, each of which has that time for itself: it begins anew with each step that the
//! kernels make, and only who owes an answer to the oldest call under way is to blame. Those behind it were
//! perhaps sent an instant ago.
//!
//! Warps wait for one server after the other, so a second one that is late to the same call shows only when the
//! first has failed. Its time is over, too: it fails as soon as it is waited for.

use std::mem::{offset_of, size_of};
use std::time::{Duration, Instant};

use kernels::abi::{ClientState, Handle, PATH_DIRECT, WORD_STATUS_OFFSET, WORD_STRIDE};
use kernels::gpu::{GpuError, Stream};

use super::repair::bits;
use super::slots::Phase;
use super::{DeviceClient, MARGIN};
use crate::client::link::Link;
use crate::metrics::FailReason;

/// How far kernels are: as long as two looks agree, the oldest call is the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Step {
    /// Dispatches that have run.
    sequence: u64,
    /// Sum of the last dispatches that slots have reported, which only grow.
    reported: u64,
}

/// A wait for kernels that goes on as long as they get on.
#[derive(Debug)]
pub(super) struct Watch {
    seen: Option<Step>,
    /// When the time of the oldest call is over.
    until: Instant,
    /// The newest dispatch for whose call it was over in this very step, 0 for none.
    over_upto: u64,
}

/// A call whose time is over.
#[derive(Debug)]
struct Overdue {
    /// Of its dispatch.
    sequence: u64,
    /// Who has not answered it, and the number of its frame there.
    servers: Vec<(usize, u64)>,
}

impl Watch {
    pub const fn new(until: Instant) -> Self {
        Self { seen: None, until, over_upto: 0 }
    }

    /// When to look next.
    pub fn next(&self) -> Instant {
        self.until.min(Instant::now() + if self.over_upto > 0 { LOOK_AGAIN } else { LOOK })
    }

    fn begin_anew(&mut self, bound: Duration, over_upto: u64) {
        (self.until, self.over_upto) = (Instant::now() + bound, over_upto);
    }
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
    pub(super) fn wait_until(&mut self, stream: &Stream, until: Instant) -> Result<(), GpuError> {
        let mut watch = Watch::new(until);
        loop {
            match stream.wait(watch.next()) {
                Err(GpuError::Deadline { .. }) => self.look(&mut watch)?,
                ended => return ended,
            }
        }
    }

    /// Puts the end of a wait off when kernels got on since the last look, or when who held them up has failed.
    ///
    /// # Errors
    /// [`GpuError::Deadline`] when it is no server that they wait for.
    pub(super) fn look(&mut self, watch: &mut Watch) -> Result<(), GpuError> {
        let step = self.step()?;
        if watch.seen.replace(step).is_some_and(|seen| seen != step) {
            watch.begin_anew(self.bound(), 0);
            return Ok(());
        }
        let is_up = watch.until <= Instant::now();
        let upto = if is_up { u64::MAX } else { watch.over_upto };
        let overdue = if upto > 0 { self.overdue(step, upto)? } else { None };
        if self.step()? != step {
            // They got on meanwhile: what was seen may be of a call whose time begins just now.
            watch.begin_anew(self.bound(), 0);
        } else if let Some(overdue) = overdue {
            self.fail_overdue(&overdue);
            watch.begin_anew(self.bound(), overdue.sequence);
        } else if is_up {
            return Err(GpuError::Deadline { what: "stream" });
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

    /// Who has not answered the oldest call under way, of those up to dispatch `upto`.
    fn overdue(&self, step: Step, upto: u64) -> Result<Option<Overdue>, GpuError> {
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
            if may_wait && handle.sequence > after && handle.sequence <= upto {
                running.push((handle, is_recorded));
            }
        }
        running.sort_unstable_by_key(|(handle, _)| handle.sequence);
        let ClientState { posted, awaited, summed, .. } = self.state()?;
        if upto != u64::MAX {
            // Recorded calls report nothing: one that is summed may be over, and who is waited for the next's.
            let is_summed = |handle: &Handle, idx: usize| {
                let number = handle.frame_number[idx];
                summed[idx][(number % u64::from(self.geometry.num_frames)) as usize] == number
            };
            running.retain(|(handle, is_recorded)| {
                !is_recorded || !bits(handle.contacted).any(|idx| is_summed(handle, idx))
            });
        }
        let waits = |idx: usize| {
            (self.tables.servers[idx].request.path == PATH_DIRECT).then_some(awaited[idx] != 0)
        };
        for (handle, _) in running {
            let mut servers = Vec::new();
            // Kernels no longer wait for whom they have given up.
            for idx in bits(handle.contacted & !handle.missing) {
                let number = handle.frame_number[idx];
                let Some(link) = self.lane.link(idx) else { continue };
                // A number that its seat has not come to was its predecessor's.
                if number <= posted[0][idx].max(posted[1][idx])
                    && self.owes(link, number, handle.num_rows[idx], waits(idx))?
                {
                    servers.push((idx, number));
                }
            }
            if !servers.is_empty() {
                return Ok(Some(Overdue { sequence: handle.sequence, servers }));
            }
        }
        Ok(None)
    }

    fn fail_overdue(&mut self, overdue: &Overdue) {
        for &(idx, number) in &overdue.servers {
            let reason = self.lane.why_unanswered(idx, FailReason::Stuck);
            let server = self.lane.link(idx).map_or("", |link| link.server.name());
            tracing::warn!(server, frame = number, reason = reason.name(), "no answer in time");
            self.lane.fail(idx, reason, self.slots.last(), &self.shared);
        }
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
/// The same once a server has failed, and others may be late to the same call.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// Of a word by which a server refuses a frame: the frame's number is above, an error code below.
const STATUS_SHIFT: u32 = 16;
