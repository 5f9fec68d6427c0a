//! The begin of a wait for kernels, which looks for servers that are late.
//!
//! Kernels wait for all servers of a call, so a call shows how long its slowest server took, and no more. When a call
//! takes much longer than is usual, the host looks twice, a pause apart, for whom the kernels wait. A server that owes
//! the same answer at both looks is late.
//!
//! A GPU client sends no late frame again to another replica, see `docs/explanation/failure.md`, *Slow servers*.

use std::time::{Duration, Instant};

use kernels::abi::Handle;
use kernels::gpu::{DeviceName, Stream};

use super::DeviceError;
use super::executor::{Executor, SPIN};
use super::peers::bits;

/// The kernels to wait for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Running {
    /// Those of one call, by its index.
    Call(usize),
    /// Those of a replayed graph.
    Replay,
}

/// The latency of kernels, as far as the begin of a wait shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Seen {
    /// The kernels had ended before it.
    Nothing,
    InTime,
    Late,
}

/// Places of servers that a call was sent to, and of the late ones among them.
#[derive(Debug, Clone, Copy)]
struct Debts {
    sequence: u64,
    contacted: u32,
    owing: u32,
}

impl Executor {
    /// Waits for kernels for as long as a layer usually takes. A sleep would add its own length to it. Looks for servers
    /// that are late, once, and within the client's budget. `started` is the time of the dispatch or of the replay.
    pub fn poll(
        &mut self,
        stream: &Stream,
        running: Running,
        started: Instant,
    ) -> Result<Seen, DeviceError> {
        if stream.is_done()? {
            return Ok(Seen::Nothing);
        }
        let late = self.shared.pacing.late_after(self.num_pairs(running));
        let begun = Instant::now();
        let mut look_at = late.map(|late| begun.max(started + late));
        // A GPU in software needs the processor itself.
        let is_emulated = matches!(self.launcher.gpu().name(), DeviceName::Emulated(_));
        let mut seen = Seen::InTime;
        loop {
            if let Some((at, late)) = look_at.zip(late)
                && Instant::now() >= at
            {
                (look_at, seen) = (None, Seen::Late);
                if self.shared.pacing.spend(1) {
                    self.look_for_late(stream, running, late)?;
                }
            }
            if stream.is_done()? {
                return Ok(seen);
            }
            let may_spin = !is_emulated && begun.elapsed() < SPIN;
            match look_at {
                _ if may_spin => std::hint::spin_loop(),
                // Its end shows above.
                Some(at) => _ = stream.wait(at),
                None => return Ok(seen),
            }
        }
    }

    /// Notes the latency of kernels that have ended without an error, and whose wait began with [`poll`](Self::poll).
    pub fn note_latency(
        &mut self,
        running: Running,
        started: Instant,
        seen: Seen,
    ) -> Result<(), DeviceError> {
        let (pacing, num_pairs) = (&self.shared.pacing, self.num_pairs(running));
        let elapsed = started.elapsed();
        let is_timely = match seen {
            // They took no longer than this.
            Seen::Nothing => pacing.late_after(num_pairs).is_some_and(|late| elapsed < late),
            Seen::InTime => true,
            Seen::Late => false,
        };
        if seen != Seen::Nothing {
            pacing.earn();
            pacing.observe(num_pairs, elapsed);
        }
        if is_timely {
            let contacted = self.contacted(running)?;
            self.peers.note_timely(contacted);
        }
        Ok(())
    }

    /// Places of the servers that the kernels asked, to note that these were in time. Of a replay those of the last call.
    fn contacted(&self, running: Running) -> Result<u32, DeviceError> {
        match running {
            Running::Call(idx) => Ok(self.launcher.memory.status(idx).handle.contacted),
            // The copy from the GPU takes longer than all else here.
            Running::Replay if !self.peers.has_late() => Ok(0),
            Running::Replay => {
                let newest = self.newest_recorded()?;
                Ok(newest.map_or(0, |handle| handle.contacted & !handle.missing))
            }
        }
    }

    /// Pairs by which calls are compared: the most that the call can have.
    fn num_pairs(&self, running: Running) -> u32 {
        match running {
            Running::Call(idx) => {
                self.calls.get(idx).input.capacity.saturating_mul(self.launcher.geometry.top_k)
            }
            // Graphs have any number of calls, and a client has few graphs.
            Running::Replay => u32::MAX,
        }
    }

    /// Looks twice for the servers for which kernels wait. `late` is the time after which a call is late.
    fn look_for_late(
        &mut self,
        stream: &Stream,
        running: Running,
        late: Duration,
    ) -> Result<(), DeviceError> {
        let Some(first) = self.debts(running)? else { return Ok(()) };
        // One server may keep all others waiting, but not the other way round.
        if first.owing == 0
            || (first.owing == first.contacted && !first.contacted.is_power_of_two())
        {
            return Ok(());
        }
        if stream.wait(Instant::now() + (late / 4).clamp(LEAST_PAUSE, MOST_PAUSE)).is_ok() {
            return Ok(());
        }
        let Some(second) = self.debts(running)? else { return Ok(()) };
        let late = if second.sequence == first.sequence { first.owing & second.owing } else { 0 };
        self.peers.note_timely(second.contacted & !second.owing);
        for idx in bits(late) {
            if let Some(pause) = self.peers.note_late(idx) {
                self.shared.metrics.late_servers.inc();
                let server = self.peers.server_name(idx).unwrap_or("a server");
                tracing::debug!(server, ?pause, "a server is late: other replicas come first");
            }
        }
        Ok(())
    }

    /// The last dispatch of a recorded call, as the GPU has it.
    fn newest_recorded(&self) -> Result<Option<Handle>, DeviceError> {
        let num_frames = self.launcher.geometry.num_frames as usize;
        let mut newest: Option<Handle> = None;
        for idx in num_frames..2 * num_frames {
            let handle = self.handle(idx)?;
            if newest.is_none_or(|newest| newest.sequence < handle.sequence) {
                newest = Some(handle);
            }
        }
        Ok(newest)
    }

    /// The servers of the call that runs; `None` if none of these has begun.
    fn debts(&self, running: Running) -> Result<Option<Debts>, DeviceError> {
        let handle = match running {
            Running::Call(idx) => {
                let handle = self.handle(idx)?;
                (handle.sequence > self.launcher.memory.reported(idx)).then_some(handle)
            }
            Running::Replay => self.newest_recorded()?,
        };
        let Some(handle) = handle else { return Ok(None) };
        let awaited = self.state()?.awaited;
        let contacted = handle.contacted & !handle.missing;
        let mut owing = 0;
        for idx in bits(contacted) {
            let Some(peer) = self.peers.peer_of(idx, &self.tables) else { continue };
            let waits = self.waits_for(idx, &awaited);
            if self.owes(peer, handle.frame_number[idx], handle.num_rows[idx], waits)? {
                owing |= 1 << idx;
            }
        }
        Ok(Some(Debts { sequence: handle.sequence, contacted, owing }))
    }
}

/// Time between two looks.
const LEAST_PAUSE: Duration = Duration::from_micros(100);
const MOST_PAUSE: Duration = Duration::from_millis(20);
