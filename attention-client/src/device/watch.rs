//! Servers that show life but do not answer.
//!
//! Kernels wait for such a server as long as it shows life. So the host fails it after the work limit. Its bit in
//! the abort word then ends all waits for it, and no others.
//!
//! A stream may have many calls, and each has the whole limit for itself: the time starts anew with each step of the
//! kernels. Only servers that owe an answer to the oldest running call fail. Later calls may have been sent an
//! instant ago.
//!
//! Warps wait for one server after the other. So a second server that is late to the same call shows only once the
//! first has failed. Its time is over too: it fails as soon as kernels wait for it.

use std::mem::{offset_of, size_of};
use std::time::{Duration, Instant};

use kernels::abi::{ClientState, Handle, MAX_PEERS, PATH_DIRECT, WORD_STATUS_OFFSET, WORD_STRIDE};
use kernels::gpu::{GpuError, Stream};

use super::calls::{EarlySum, Phase};
use super::executor::{Executor, MARGIN};
use super::peers::{Peer, bits};
use crate::metrics::FailReason;

/// Progress of kernels. While two looks agree, the oldest running call is the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Progress {
    /// Dispatches that have run.
    sequence: u64,
    /// Sum of the numbers of the last reported dispatches. The numbers only grow.
    reported: u64,
}

/// A wait for kernels that goes on as long as they make progress.
#[derive(Debug)]
pub(super) struct Watch {
    seen: Option<Progress>,
    /// End of the oldest call's time.
    until: Instant,
    /// The newest dispatch whose time was over at the current progress; 0 for none.
    overdue_upto: u64,
}

/// A call whose time is over.
#[derive(Debug)]
struct OverdueCall {
    /// Number of its dispatch.
    sequence: u64,
    /// Servers that owe an answer: their places, and the numbers of the call's frames there.
    servers: Vec<(usize, u64)>,
}

impl Watch {
    /// A wait that ends at `until` if kernels make no progress.
    pub const fn new(until: Instant) -> Self {
        Self { seen: None, until, overdue_upto: 0 }
    }

    /// Time of the next look.
    pub fn next(&self) -> Instant {
        self.until.min(Instant::now() + if self.overdue_upto > 0 { LOOK_AGAIN } else { LOOK })
    }

    fn restart(&mut self, bound: Duration, overdue_upto: u64) {
        (self.until, self.overdue_upto) = (Instant::now() + bound, overdue_upto);
    }
}

impl Watch {
    /// Extends the wait if kernels have made progress since the last look, or if a server that held them up has now
    /// failed.
    ///
    /// # Errors
    /// [`GpuError::Deadline`] when the time is over and kernels wait for no server.
    pub fn look(&mut self, executor: &mut Executor) -> Result<(), GpuError> {
        let progress = executor.progress()?;
        if self.seen.replace(progress).is_some_and(|seen| seen != progress) {
            self.restart(executor.bound(), 0);
            return Ok(());
        }
        let is_over = self.until <= Instant::now();
        let upto = if is_over { u64::MAX } else { self.overdue_upto };
        let overdue = if upto > 0 { executor.overdue(progress, upto)? } else { None };
        if executor.progress()? != progress {
            // Kernels went on during the look, so it may have seen a call whose time has just begun.
            self.restart(executor.bound(), 0);
        } else if let Some(overdue) = overdue {
            executor.fail_overdue(&overdue);
            self.restart(executor.bound(), overdue.sequence);
        } else if is_over {
            return Err(GpuError::Deadline { what: "stream" });
        }
        Ok(())
    }
}

/// Waits for kernels, and looks at their progress and their servers.
impl Executor {
    /// Waits for everything on `stream`, until `until` or as long as kernels make progress. Then a server that has
    /// not answered the oldest call has failed, and the wait goes on without it.
    pub fn wait_until(&mut self, stream: &Stream, until: Instant) -> Result<(), GpuError> {
        let mut watch = Watch::new(until);
        loop {
            match stream.wait(watch.next()) {
                Err(GpuError::Deadline { .. }) => watch.look(self)?,
                ended => return ended,
            }
        }
    }

    /// Waits for early sums whose end was not seen, before the client launches anything else.
    ///
    /// The caller's streams are not ordered behind the streams of these sums, which may be gone. So this looks at
    /// reports instead of streams.
    pub fn wait_for_early_sums(&mut self) -> Result<(), GpuError> {
        while let Some(call) = self.calls.running_early_sum() {
            let mut watch = Watch::new(Instant::now() + self.bound());
            let mut look_at = watch.next();
            while self.launcher.memory.reported(call) == self.calls.get(call).reported_before {
                std::thread::sleep(Duration::from_millis(1));
                if Instant::now() >= look_at {
                    watch.look(self)?;
                    look_at = watch.next();
                }
            }
            self.calls.get_mut(call).early_sum = Some(EarlySum::Done);
        }
        Ok(())
    }

    fn progress(&self) -> Result<Progress, GpuError> {
        let mut sequence = Vec::new();
        let from = self.launcher.memory.state.at(offset_of!(ClientState, sequence) as u64, 8)?;
        // SAFETY: a word of the client's own state.
        unsafe { self.launcher.memory.fetch::<u64>(&self.side, from, &mut sequence, 1, MARGIN)? };
        let calls = 0..self.launcher.geometry.num_frames as usize;
        let reported =
            calls.map(|call| self.launcher.memory.reported(call)).fold(0, u64::wrapping_add);
        Ok(Progress { sequence: sequence[0], reported })
    }

    /// The oldest running call that servers owe an answer, among dispatches up to number `upto`.
    fn overdue(&self, progress: Progress, upto: u64) -> Result<Option<OverdueCall>, GpuError> {
        let num_frames = self.launcher.geometry.num_frames as usize;
        let mut running = Vec::new();
        for idx in 0..2 * num_frames {
            let is_recorded = idx >= num_frames;
            let may_wait = match is_recorded {
                true => self.replay.is_some(),
                false => {
                    let call = self.calls.get(idx);
                    call.phase == Phase::Combined || call.early_sum.is_some()
                }
            };
            let handle = self.handle(idx)?;
            // The handle may be an earlier call's: then its report is there, or its number is too low.
            let after = match is_recorded {
                true => progress.sequence.saturating_sub(num_frames as u64),
                false => self.launcher.memory.reported(idx),
            };
            if may_wait && handle.sequence > after && handle.sequence <= upto {
                running.push((handle, is_recorded));
            }
        }
        running.sort_unstable_by_key(|(handle, _)| handle.sequence);
        let ClientState { posted, awaited, summed, .. } = self.state()?;
        if upto != u64::MAX {
            // Recorded calls report nothing. One that is summed may be over, and kernels may wait for a server of
            // the next one.
            let is_summed = |handle: &Handle, idx: usize| {
                let number = handle.frame_number[idx];
                summed[idx][(number % u64::from(self.launcher.geometry.num_frames)) as usize]
                    == number
            };
            running.retain(|(handle, is_recorded)| {
                !is_recorded || !bits(handle.contacted).any(|idx| is_summed(handle, idx))
            });
        }
        for (handle, _) in running {
            let mut servers = Vec::new();
            // Kernels do not wait for servers that they have given up.
            for idx in bits(handle.contacted & !handle.missing) {
                let number = handle.frame_number[idx];
                let Some(peer) = self.peers.peer(idx) else { continue };
                // A number that its place has not reached belongs to an earlier link.
                if number <= posted[0][idx].max(posted[1][idx])
                    && self.owes(
                        peer,
                        number,
                        handle.num_rows[idx],
                        self.waits_for(idx, &awaited),
                    )?
                {
                    servers.push((idx, number));
                }
            }
            if !servers.is_empty() {
                return Ok(Some(OverdueCall { sequence: handle.sequence, servers }));
            }
        }
        Ok(None)
    }

    fn fail_overdue(&mut self, overdue: &OverdueCall) {
        for &(idx, number) in &overdue.servers {
            let reason = self.peers.why_unanswered(idx, FailReason::Stuck);
            let server = self.peers.peer(idx).map_or("", |peer| peer.link.server.name());
            tracing::warn!(server, frame = number, reason = reason.name(), "no answer in time");
            self.peers.fail(idx, reason, self.calls.last());
        }
    }

    /// Whether kernels wait for rows of a server that stores them itself, by the client's state; `None` for others.
    pub fn waits_for<W: PartialEq + Default>(
        &self,
        idx: usize,
        awaited: &[W; MAX_PEERS],
    ) -> Option<bool> {
        let is_direct = self.tables.servers[idx].request.path == PATH_DIRECT;
        is_direct.then_some(awaited[idx] != W::default())
    }

    /// The last dispatch of a call, as the GPU has it.
    pub fn handle(&self, call: usize) -> Result<Handle, GpuError> {
        let mut found = Vec::new();
        let from = self.launcher.memory.calls[call].handle.at(0, size_of::<Handle>() as u64)?;
        // SAFETY: the client's own memory.
        unsafe { self.launcher.memory.fetch::<Handle>(&self.side, from, &mut found, 1, MARGIN)? };
        Ok(found[0])
    }

    pub fn state(&self) -> Result<ClientState, GpuError> {
        let mut found = Vec::new();
        let from = self.launcher.memory.state.at(0, size_of::<ClientState>() as u64)?;
        // SAFETY: the client's own state.
        unsafe {
            self.launcher.memory.fetch::<ClientState>(&self.side, from, &mut found, 1, MARGIN)?
        };
        Ok(found[0])
    }

    /// Returns true if a row of frame `number` is neither answered nor refused, as combine would see it.
    ///
    /// `waits` is set for a server that stores rows itself: it says whether kernels wait for such rows. They have
    /// no flags, and are gone once they are summed. But kernels wait for no row of an earlier call any more.
    pub fn owes(
        &self,
        peer: &Peer,
        number: u64,
        num_rows: u32,
        waits: Option<bool>,
    ) -> Result<bool, GpuError> {
        let geometry = &self.launcher.geometry;
        let place = number & u64::from(geometry.num_frames - 1);
        let status = geometry.response_control_offset + WORD_STATUS_OFFSET + place * WORD_STRIDE;
        // The flag of the first row answers an empty frame.
        let is_empty = num_rows == 0;
        let num_rows = num_rows.clamp(1, geometry.max_tokens) as usize;
        let flags = place * geometry.response_frame_bytes + geometry.response_flags_offset;
        let (mut words, mut arrived) = (Vec::new(), Vec::new());
        let read = peer.slots.with_own_memory(|own| {
            let (status, flags) = (own.at(status, 8)?, own.at(flags, num_rows as u64 * 8)?);
            let memory = &self.launcher.memory;
            // SAFETY: both ranges were checked, and the slot stays mapped during this function.
            unsafe {
                memory.fetch::<u64>(&self.side, status, &mut words, 1, MARGIN)?;
                memory.fetch::<u64>(&self.side, flags, &mut arrived, num_rows, MARGIN)
            }
        });
        if read.transpose()?.is_none() {
            return Ok(false);
        }
        let is_refused = words[0] >> STATUS_SHIFT == number;
        let is_late = match waits {
            Some(waits) if !is_empty => waits,
            _ => arrived.iter().any(|&flag| flag < number),
        };
        Ok(!is_refused && is_late)
    }
}

/// Pause between two looks at the progress of kernels.
pub(super) const LOOK: Duration = Duration::from_millis(500);
/// The same after a server has failed: others may be late to the same call.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// A server refuses a frame by a word: the frame's number above this bit, an error code below.
const STATUS_SHIFT: u32 = 16;
