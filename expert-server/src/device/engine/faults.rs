//! What kernels found wrong, counted by client.

use std::time::{Duration, Instant};

use kernels::abi::ServerState;
use protocol::ErrorCode;

use super::Engine;
use crate::data::DataError;
use crate::device::error::KernelFault;

impl Engine {
    /// Reads what kernels found wrong, and lets them report again. No batch is under way.
    pub(super) fn look_at_fault(&mut self) -> Result<(), DataError> {
        (self.has_fault, self.refusal_since) = (false, None);
        let error = self.memory.take_fault(&self.control)?;
        match KernelFault::of(&error) {
            Some(fault @ KernelFault::Other { .. }) => {
                tracing::error!(%fault, "a kernel reported an error");
            }
            // Whoever does so again and again is named and dropped below.
            Some(fault @ KernelFault::Withheld { .. }) => self.tell_late(&fault),
            // Counted when its batch ended.
            Some(KernelFault::Refused { .. }) | None => {}
        }
        Ok(())
    }

    /// Counts the frames that were refused until the batch ended that left `state`.
    ///
    /// Kernels keep the first error only, but note what each client was told.
    pub(super) fn count_refusals(&mut self, state: &ServerState) {
        let mut num_refused = state.num_refused.saturating_sub(self.num_refused);
        if num_refused == 0 {
            return;
        }
        self.num_refused = state.num_refused;
        self.metrics.frames_in.inc_by(num_refused);
        let max_bad_frames = self.config.limits.max_bad_frames;
        let now = Instant::now();
        for (idx, taken) in state.taken.into_iter().enumerate() {
            let is_given_up = self.board.is_given_up(idx);
            let Some(seat) = self.seats.get_mut(idx) else { continue };
            let mut num_withheld = 0;
            for word in seat.new_told(&state.refusals[idx]) {
                let code = ErrorCode::from_u32(word as u32 & 0xffff);
                num_refused = num_refused.saturating_sub(1);
                self.metrics.count_bad_frame(code);
                let is_withheld = code == ErrorCode::Internal;
                if is_malformed(code) {
                    let (seat_idx, frame) = (idx as u32, word >> STATUS_SHIFT);
                    let fault = KernelFault::Refused { seat: seat_idx, frame, code };
                    seat.count_bad_frame(max_bad_frames, &fault);
                } else if is_withheld && !is_given_up {
                    num_withheld += 1;
                }
            }
            seat.count_withheld(taken, num_withheld, max_bad_frames, now);
        }
        // Beyond a ring's length within one look, which cannot be, codes would be lost; not their number.
        for _ in 0..num_refused {
            self.metrics.count_bad_frame(ErrorCode::Other(0));
        }
    }

    /// Says that a frame is late, not more often than somebody can read.
    fn tell_late(&mut self, fault: &KernelFault) {
        let now = Instant::now();
        if self.told_late_at.is_none_or(|at| now - at >= LATE_PERIOD) {
            tracing::warn!(%fault, untold = self.num_untold, "a frame is late");
            (self.told_late_at, self.num_untold) = (Some(now), 0);
        } else {
            self.num_untold += 1;
            tracing::debug!(%fault, "a frame is late");
        }
    }
}

/// A status word is `number << STATUS_SHIFT | code`.
const STATUS_SHIFT: u32 = 16;
/// Time between two lines of the log about late frames.
const LATE_PERIOD: Duration = Duration::from_secs(1);

/// Whether only a broken or hostile client sends such a frame. Experts that are not here, and an old epoch, are
/// nobody's fault: placements change while frames are under way.
const fn is_malformed(code: ErrorCode) -> bool {
    matches!(
        code,
        ErrorCode::BadFrame
            | ErrorCode::UnknownExpert
            | ErrorCode::WrongLayer
            | ErrorCode::StaleChannel
            | ErrorCode::Version
    )
}
