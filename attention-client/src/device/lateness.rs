//! Servers that answer late, as a GPU client sees them: they get less.
//!
//! Kernels wait for all servers of a call, so a call shows how long its slowest server took, and no more. When a call
//! takes much longer than is usual, the host looks twice, a pause apart, for whom the kernels wait. A server that owes
//! the same answer at both looks is late. After some late answers the client prefers other replicas for a time, which
//! doubles as long as the server is late again after it.
//!
//! A GPU client sends no late frame again to another replica, see `docs/explanation/failure.md`, *Slow servers*.

use std::time::{Duration, Instant};

use kernels::abi::Handle;
use kernels::gpu::{DeviceName, Stream};

use super::DeviceError;
use super::executor::{Executor, SPIN};
use super::peers::bits;

/// Late answers of one server.
#[derive(Debug, Default)]
pub(super) struct Lateness {
    num_late: u32,
    /// Calls in a row that the server answered in time.
    num_timely: u32,
    /// The last time for which other replicas were preferred; zero if there was none lately.
    pause: Duration,
}

impl Lateness {
    /// The server was late. Returns the time for which to prefer other replicas, if it is time to.
    pub(super) fn late(&mut self) -> Option<Duration> {
        (self.num_timely, self.num_late) = (0, self.num_late + 1);
        // A single late answer means little, unless the server was late before the last pause, too.
        if self.num_late < FEW_LATE && self.pause.is_zero() {
            return None;
        }
        self.num_late = 0;
        self.pause = (self.pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        Some(self.pause)
    }

    /// The server answered a call in time.
    pub(super) fn timely(&mut self) {
        self.num_timely += 1;
        if self.num_timely >= MANY_TIMELY {
            *self = Self::default();
        }
    }
}

/// The kernels to wait for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Running {
    /// Those of one call, by its index.
    Call(usize),
    /// Those of a replayed graph.
    Replay,
}

/// Places of servers that a call was sent to, and of those that owe an answer.
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
    ) -> Result<(), DeviceError> {
        if stream.is_done()? {
            return Ok(());
        }
        let num_pairs = self.num_pairs(running);
        let late = self.shared.pacing.late_after(num_pairs);
        let begun = Instant::now();
        let mut look_at = late.map(|late| begun.max(started + late));
        // A GPU in software needs the processor itself.
        let is_emulated = matches!(self.launcher.gpu().name(), DeviceName::Emulated(_));
        let mut was_late = false;
        loop {
            if let Some((at, late)) = look_at.zip(late)
                && Instant::now() >= at
            {
                look_at = None;
                if self.shared.pacing.spend(1) {
                    was_late = true;
                    self.look_for_late(stream, running, late)?;
                }
            }
            if stream.is_done()? {
                break;
            }
            match look_at {
                Some(at) if is_emulated => _ = stream.wait(at),
                None if is_emulated => return Ok(()),
                _ if begun.elapsed() >= SPIN => return Ok(()),
                _ => std::hint::spin_loop(),
            }
        }
        self.note_latency(running, started.elapsed(), was_late);
        Ok(())
    }

    fn note_latency(&mut self, running: Running, latency: Duration, was_late: bool) {
        let pacing = &self.shared.pacing;
        pacing.earn();
        pacing.observe(self.num_pairs(running), latency);
        if let (Running::Call(idx), false) = (running, was_late) {
            let contacted = self.launcher.memory.status(idx).handle.contacted;
            self.peers.note_timely(contacted);
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

    /// The servers of the call that runs; `None` if none of these has begun.
    fn debts(&self, running: Running) -> Result<Option<Debts>, DeviceError> {
        let num_frames = self.launcher.geometry.num_frames as usize;
        let handle = match running {
            Running::Call(idx) => {
                let handle = self.handle(idx)?;
                (handle.sequence > self.launcher.memory.reported(idx)).then_some(handle)
            }
            Running::Replay => {
                let mut newest: Option<Handle> = None;
                for idx in num_frames..2 * num_frames {
                    let handle = self.handle(idx)?;
                    if newest.is_none_or(|newest| newest.sequence < handle.sequence) {
                        newest = Some(handle);
                    }
                }
                newest
            }
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

/// Late answers after which other replicas come first.
const FEW_LATE: u32 = 3;
/// Timely answers in a row after which a server has recovered.
const MANY_TIMELY: u32 = 16;
/// Times for which other replicas come first.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// Time between two looks.
const LEAST_PAUSE: Duration = Duration::from_micros(100);
const MOST_PAUSE: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_stays_late_is_asked_less_and_less_until_it_recovers() {
        let mut lateness = Lateness::default();
        let mut pauses = Vec::new();
        for _ in 0..12 {
            pauses.extend(lateness.late());
            // Few timely answers are no recovery.
            (0..MANY_TIMELY - 1).for_each(|_| lateness.timely());
        }
        assert_eq!(pauses.len(), 12 - (FEW_LATE as usize - 1), "{pauses:?}");
        assert_eq!(pauses[0], FIRST_PAUSE);
        assert!(pauses.windows(2).all(|pair| pair[1] == (pair[0] * 2).min(LONGEST_PAUSE)));
        assert_eq!(pauses.last(), Some(&LONGEST_PAUSE));
        (0..MANY_TIMELY).for_each(|_| lateness.timely());
        let again: Vec<_> = (0..FEW_LATE).filter_map(|_| lateness.late()).collect();
        assert_eq!(again, [FIRST_PAUSE], "as at the beginning");
    }
}
