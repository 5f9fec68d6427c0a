//! The executor: carries calls out on streams, from counting them at servers to waiting for their kernels.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kernels::abi::{DevicePtr, TAG_NONE};
use kernels::gpu::{GpuError, Stream};

use super::calls::{Calls, EarlySum, Phase, Replay};
use super::launcher::Launcher;
use super::link::AbortBit;
use super::memory::Status;
use super::peers::{LinkUse, Peers, Tables, bits};
use super::{DeviceError, DeviceInput};
use crate::fleet::shared::Shared;
use crate::metrics::FailReason;

/// Peers, calls and launcher of one client, and the operations that need all of them.
pub(super) struct Executor {
    // Dropped first: connectors see the end of their links.
    pub peers: Peers,
    pub launcher: Launcher,
    pub calls: Calls,
    /// Tables that the device has.
    pub tables: Arc<Tables>,
    /// The replay of a graph that may be running.
    pub replay: Option<Replay>,
    /// For reads while the caller's stream is busy.
    pub side: Stream,
    pub shared: Arc<Shared>,
}

impl Executor {
    /// Applies events of the control side.
    pub fn sync(&mut self) {
        let (finished, last) = (self.finished(), self.calls.last());
        self.peers.sync(finished, last);
    }

    /// As [`Calls::finished`], with graphs taken into account.
    pub fn finished(&self) -> u64 {
        let finished = self.calls.finished();
        // A running graph may use any server that was there at its start.
        self.replay.as_ref().map_or(finished, |replay| finished.min(replay.serial - 1))
    }

    /// Counts a call, or a replay, at all live servers.
    pub fn enter(&mut self, uses: &mut Vec<LinkUse>) {
        loop {
            self.sync();
            if self.peers.enter(uses) {
                return;
            }
            std::thread::yield_now();
        }
    }

    /// Counts the call at all live servers and brings the tables on the device up to date.
    pub fn begin(&mut self, stream: &Stream, call: usize) -> Result<(), DeviceError> {
        let mut uses = std::mem::take(&mut self.calls.get_mut(call).uses);
        self.enter(&mut uses);
        self.calls.get_mut(call).uses = uses;
        self.refresh_tables(stream)?;
        self.calls.get_mut(call).tables = Arc::clone(&self.tables);
        Ok(())
    }

    /// As [`begin`](Self::begin), for a retry: ends the call's uses of servers first.
    pub fn begin_again(&mut self, stream: &Stream, call: usize) -> Result<(), DeviceError> {
        self.calls.get_mut(call).uses.drain(..).for_each(LinkUse::exit);
        // The old report names places that other servers may take from now on.
        self.launcher.memory.clear_missing(call);
        self.begin(stream, call)
    }

    /// Ends a call whose kernels have ended or were never launched.
    pub fn end(&mut self, call: usize) {
        self.calls.get_mut(call).uses.drain(..).for_each(LinkUse::exit);
        self.calls.release(call);
    }

    /// Ends the current replay, if any: its kernels have ended. Returns the list of its uses, now empty.
    pub fn end_replay(&mut self) -> Option<Vec<LinkUse>> {
        let mut uses = self.replay.take()?.uses;
        uses.drain(..).for_each(LinkUse::exit);
        Some(uses)
    }

    /// Launches the dispatch of a call.
    ///
    /// # Safety
    /// As for [`DeviceClient::dispatch`](super::DeviceClient::dispatch).
    pub unsafe fn launch_dispatch(
        &mut self,
        stream: &Stream,
        call: usize,
        input: &DeviceInput,
    ) -> Result<(), DeviceError> {
        let layer = self.calls.get(call).layer;
        // SAFETY: the caller's promise.
        unsafe { self.launcher.dispatch(stream, call, layer, input) }
    }

    /// Uploads the tables in the order of `stream`, if they have changed.
    ///
    /// There is a staging buffer for each call that may be outstanding, and one more. So only a repair waits for a
    /// buffer: one that sees change after change while its stream makes no progress.
    pub fn refresh_tables(&mut self, stream: &Stream) -> Result<(), DeviceError> {
        let num_experts = self.shared.model.shape.num_experts;
        if !self.peers.has_changed() {
            return Ok(());
        }
        let staging = match self.launcher.memory.free_staging()? {
            Some(staging) => staging,
            None => {
                self.wait_until(stream, Instant::now() + self.bound())?;
                let found = self.launcher.memory.free_staging()?;
                found.ok_or(GpuError::Deadline { what: "upload of tables" })?
            }
        };
        let Some((tables, fresh)) = self.peers.take_tables(num_experts) else { return Ok(()) };
        let (placements, servers) = (&tables.placements, &tables.servers);
        let Launcher { memory, geometry, .. } = &self.launcher;
        if let Err(error) = memory.upload(stream, staging, geometry, placements, servers, fresh) {
            self.peers.restore_tables(fresh);
            return Err(error.into());
        }
        self.tables = Arc::new(tables);
        Ok(())
    }

    /// Frees the ring frame of the next dispatch.
    ///
    /// A retry uses frames reserved for later calls, so the next frame may collide with a finished call that has
    /// not been combined. Such a call is combined early, into scratch memory.
    pub fn make_room(&mut self, stream: &Stream) -> Result<(), DeviceError> {
        while let Some(call) = self.calls.colliding() {
            self.sum_early(stream, call)?;
        }
        Ok(())
    }

    /// Frees places of the peer table that only uncombined calls still need, if a server was rejected for want of
    /// one. Returns true if so; then everything that was launched has ended.
    pub fn free_places(&mut self, stream: &Stream) -> Result<bool, DeviceError> {
        let was_rejected = self.peers.take_rejected();
        if was_rejected {
            while let Some(call) = self.calls.unsummed() {
                self.sum_early(stream, call)?;
            }
            self.wait_until(stream, Instant::now() + self.bound())?;
        }
        Ok(was_rejected)
    }

    /// Combines a call into scratch memory and waits for it: the caller's other streams are not ordered behind the
    /// sum.
    fn sum_early(&mut self, stream: &Stream, call: usize) -> Result<(), DeviceError> {
        self.combine_into_scratch(stream, call)?;
        self.calls.get_mut(call).early_sum = Some(EarlySum::Running);
        self.launcher.memory.report(stream, call)?;
        self.wait_for_call(stream, call)?;
        self.calls.get_mut(call).early_sum = Some(EarlySum::Done);
        Ok(())
    }

    fn combine_into_scratch(&mut self, stream: &Stream, call: usize) -> Result<(), DeviceError> {
        let capacity = self.calls.get(call).input.capacity;
        let rows = self.launcher.memory.rows[call].ptr();
        // SAFETY: the client's own memory, as large as any call's rows.
        unsafe { self.launcher.combine(stream, call, rows, capacity, false) }
    }

    /// Copies the rows of an early sum to the caller's output.
    pub fn copy_early_sum(
        &mut self,
        stream: &Stream,
        call: usize,
        out: DevicePtr,
    ) -> Result<(), DeviceError> {
        let capacity = self.calls.get(call).input.capacity;
        self.launcher.check_rows(out, capacity)?;
        // Later rows of the output keep their content.
        let num_tokens = self.launcher.memory.status(call).handle.num_tokens.min(capacity);
        let rows = self.launcher.memory.rows[call].ptr();
        // SAFETY: both are as large as the call's rows, and no kernel stores there any more.
        unsafe { stream.copy(out, rows, self.launcher.bytes_of_rows(num_tokens))? };
        Ok(())
    }

    /// Waits for outstanding calls on other streams: the kernels of one client run one after the other.
    pub fn wait_for_others(&mut self, stream: &Stream) -> Result<(), DeviceError> {
        self.wait_for_early_sums()?;
        for idx in 0..self.launcher.geometry.num_frames as usize {
            let call = self.calls.get(idx);
            if call.phase != Phase::Free && call.stream != stream.raw() {
                // SAFETY: the stream of a call lives until the call is finished.
                let other = unsafe { self.launcher.gpu().wrap_stream(call.stream)? };
                self.wait_until(&other, Instant::now() + self.bound())?;
            }
        }
        Ok(())
    }

    /// Finishes abandoned calls: their ring frames must be answered before they are used again.
    pub fn finish_abandoned(&mut self, stream: &Stream) -> Result<(), DeviceError> {
        self.wait_for_early_sums()?;
        while let Some((idx, phase)) = self.calls.next_abandoned() {
            if phase == Phase::Dispatched && self.calls.get(idx).early_sum.is_none() {
                self.combine_into_scratch(stream, idx)?;
                let call = self.calls.get_mut(idx);
                (call.phase, call.stream) = (Phase::Combined, stream.raw());
                self.launcher.memory.report(stream, idx)?;
            }
            self.wait_for_call_again(stream, idx)?;
            let status = self.launcher.memory.status(idx);
            self.fail_unanswered(idx, &status);
            self.clear_error(stream, &status)?;
            self.shared.metrics.abandoned.inc();
            self.end(idx);
        }
        Ok(())
    }

    /// Removes the servers that did not answer a call. Servers that refused stay.
    pub fn fail_unanswered(&mut self, call: usize, status: &Status) {
        let last = self.calls.last();
        let tables = Arc::clone(&self.calls.get(call).tables);
        for idx in bits(status.handle.missing & !status.handle.refused) {
            let Some(peer) = self.peers.peer_of(idx, &tables) else { continue };
            let reason = self.peers.why_unanswered(idx, FailReason::Silent);
            // Kernels keep the first error only. It says what they waited for and what they saw.
            let (server, error) = (peer.link.server.name(), &status.error);
            tracing::warn!(server, reason = reason.name(), %error, "a server did not answer");
            self.peers.fail(idx, reason, last);
        }
        debug_assert!(self.calls.get(call).phase != Phase::Free);
    }

    /// Clears the error word on the device, if `status` has an error.
    pub fn clear_error(&mut self, stream: &Stream, status: &Status) -> Result<(), DeviceError> {
        if status.error.tag != TAG_NONE {
            self.calls.suspect_unsummed();
            self.launcher.memory.clear_error(stream)?;
            // Must be done before a dispatch on another stream can report an error.
            self.wait_until(stream, Instant::now() + self.bound())?;
        }
        Ok(())
    }

    /// Waits for the kernels of a call that were launched just now.
    pub fn wait_for_call(&mut self, stream: &Stream, call: usize) -> Result<(), GpuError> {
        self.calls.get_mut(call).until = None;
        self.wait_for_call_again(stream, call)
    }

    /// As [`wait_for_call`](Self::wait_for_call). A second wait for the same kernels does not start a new time
    /// limit.
    pub fn wait_for_call_again(&mut self, stream: &Stream, call: usize) -> Result<(), GpuError> {
        let (now, bound) = (Instant::now(), self.bound());
        let until = *self.calls.get_mut(call).until.get_or_insert(now + bound);
        self.wait_until(stream, until.max(now + MARGIN))
    }

    /// Longest time that kernels may take. Their waits for silent servers are bounded by the deadline, but a server
    /// that works is not silent.
    pub fn bound(&self) -> Duration {
        self.shared.settings.work_limit + self.shared.settings.deadline * 2 + MARGIN
    }

    /// Checks that `stream` belongs to the GPU that has the client's memory.
    pub fn check_device(&self, stream: &Stream) -> Result<(), DeviceError> {
        let (found, expected) = (stream.device(), self.launcher.gpu().name());
        if found == expected { Ok(()) } else { Err(DeviceError::Device { found, expected }) }
    }

    /// Checks that `stream` is the one with handle `expected`, so that waiting for it covers what was launched.
    pub fn check_stream(&self, stream: &Stream, expected: u64) -> Result<(), DeviceError> {
        self.check_device(stream)?;
        let found = stream.raw();
        if found == expected { Ok(()) } else { Err(DeviceError::Stream { found, expected }) }
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        // Kernels of unfinished calls may run at any later time, when the caller's stream reaches them. Their memory
        // is leaked, and their waits end at once.
        let is_idle = self.calls.num_outstanding() == 0 && self.replay.is_none();
        if !is_idle {
            for bit in 0..self.launcher.options.max_servers as u32 {
                AbortBit { word: Arc::clone(&self.launcher.memory.abort), bit }.set();
            }
        }
        self.peers.close();
        if is_idle {
            // SAFETY: not used after this.
            unsafe { std::mem::ManuallyDrop::drop(&mut self.launcher.memory) };
            return;
        }
        tracing::warn!("a device client is dropped with calls outstanding: their memory is leaked");
        self.calls.leak_uses();
        std::mem::forget(self.replay.take());
    }
}

/// Added to limits: time for kernels to end by themselves.
pub(super) const MARGIN: Duration = Duration::from_secs(5);
/// Longest wait without a sleep.
pub(super) const SPIN: Duration = Duration::from_millis(10);
