//! Room in the slots' rings. A call that sends tokens again takes places that were meant for calls to come, so
//! the next frame may belong where that of a call lies whose rows nobody has asked for yet. Such a call is
//! summed before its caller says where to, into memory of its own. The same is done where its servers' seats are
//! needed for their successors.

use std::time::{Duration, Instant};

use kernels::abi::DevicePtr;
use kernels::gpu::{GpuError, Stream};

use super::overdue::Watch;
use super::slots::{Ahead, Phase};
use super::{DeviceClient, DeviceError};

impl DeviceClient {
    /// Makes the place free that the next dispatch is going to fill.
    pub(super) fn make_room(&mut self, stream: &Stream) -> Result<(), DeviceError> {
        while let Some(slot) = self.slots.in_the_way() {
            self.sum_ahead(stream, slot)?;
        }
        Ok(())
    }

    /// Makes seats free that only calls need which are still to be summed, if a server was turned away for want
    /// of one. Then everything that was launched has ended.
    pub(super) fn make_seats(&mut self, stream: &Stream) -> Result<bool, DeviceError> {
        let is_cramped = self.lane.take_cramped();
        if is_cramped {
            while let Some(slot) = self.slots.unsummed() {
                self.sum_ahead(stream, slot)?;
            }
            self.wait_until(stream, Instant::now() + self.bound())?;
        }
        Ok(is_cramped)
    }

    /// Waits for the sum, too: nothing orders the caller's other streams behind it.
    fn sum_ahead(&mut self, stream: &Stream, slot: usize) -> Result<(), DeviceError> {
        let capacity = self.slots.call(slot).input.capacity;
        let rows = self.memory.rows[slot].ptr();
        // SAFETY: the client's own memory, as large as any call's rows.
        unsafe { self.launch_combine(stream, slot, rows, capacity, false)? };
        self.slots.call_mut(slot).ahead = Some(Ahead::Begun);
        self.memory.report(stream, slot)?;
        self.wait_for_call(stream, slot)?;
        self.slots.call_mut(slot).ahead = Some(Ahead::Done);
        Ok(())
    }

    /// Gives the rows of a call that was summed ahead to its caller.
    pub(super) fn hand_out(
        &mut self,
        stream: &Stream,
        slot: usize,
        out: DevicePtr,
    ) -> Result<(), DeviceError> {
        let capacity = self.slots.call(slot).input.capacity;
        self.memory.gpu.check_range("combine", "out", out, self.bytes_of_rows(capacity))?;
        // Rows beyond keep what they hold.
        let num_tokens = self.memory.status(slot).handle.num_tokens.min(capacity);
        let rows = self.memory.rows[slot].ptr();
        // SAFETY: both are as large as the call's rows, and no kernel stores there any more.
        unsafe { stream.copy(out, rows, self.bytes_of_rows(num_tokens))? };
        Ok(())
    }

    /// Waits for sums that were not seen to end where they were begun, before anything else of the client is
    /// launched: nothing orders the caller's streams behind theirs, which may be gone. So it is reports that are
    /// looked at.
    pub(super) fn wait_for_sums(&mut self) -> Result<(), GpuError> {
        while let Some(slot) = self.slots.begun() {
            let mut watch = Watch::new(Instant::now() + self.bound());
            let mut look_at = watch.next();
            while self.memory.reported(slot) == self.slots.call(slot).reported_before {
                std::thread::sleep(Duration::from_millis(1));
                if Instant::now() >= look_at {
                    self.look(&mut watch)?;
                    look_at = watch.next();
                }
            }
            self.slots.call_mut(slot).ahead = Some(Ahead::Done);
        }
        Ok(())
    }

    /// Waits for what other streams have of outstanding calls: kernels of one client run one after the other.
    pub(super) fn wait_for_others(&mut self, stream: &Stream) -> Result<(), DeviceError> {
        self.wait_for_sums()?;
        for slot in 0..self.geometry.num_frames as usize {
            let call = self.slots.call(slot);
            if call.phase != Phase::Free && call.stream != stream.raw() {
                // SAFETY: the stream of a call lives until that is finished.
                let other = unsafe { self.memory.gpu.wrap_stream(call.stream)? };
                self.wait_until(&other, Instant::now() + self.bound())?;
            }
        }
        Ok(())
    }

    pub(super) fn bytes_of_rows(&self, num_rows: u32) -> u64 {
        u64::from(num_rows) * u64::from(self.geometry.hidden) * 2
    }
}
