//! Servers that show life but do not answer. Kernels wait for such a one as long as it does, so the host ends
//! these waits when the time for a server's work is over.

use std::time::{Duration, Instant};

use kernels::gpu::{GpuError, Stream};

use super::slots::Phase;
use super::{DeviceClient, MARGIN};
use crate::metrics::FailReason;

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

    /// Waits for what `stream` has. Servers that have not answered it at `until` have failed.
    pub(super) fn wait_until(&mut self, stream: &Stream, until: Instant) -> Result<(), GpuError> {
        match stream.wait(until) {
            Err(GpuError::Deadline { .. }) => {}
            ended => return ended,
        }
        self.end_waits(stream)?;
        for slot in 0..self.geometry.num_frames as usize {
            if self.slots.call(slot).phase == Phase::Combined {
                let status = self.memory.status(slot);
                self.fail_unanswered(slot, &status, FailReason::Stuck);
            }
        }
        Ok(())
    }

    /// Ends kernels' waits for every server whose answer is not there, and gives the kernels a moment to end.
    pub(super) fn end_waits(&self, stream: &Stream) -> Result<(), GpuError> {
        self.lane.links().for_each(|link| link.state.end_waits());
        let ended = stream.wait(Instant::now() + END_OF_WAITS);
        // Who answered goes on. Where something else holds the stream, its kernels may wait when they run.
        self.lane.links().for_each(|link| link.state.allow_waits());
        ended
    }
}

/// For kernels whose waits were ended.
const END_OF_WAITS: Duration = MARGIN;
