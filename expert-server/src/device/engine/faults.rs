//! What kernels found wrong, counted by client.

use std::time::{Duration, Instant};

use protocol::ErrorCode;

use super::Engine;
use crate::data::DataError;
use crate::device::error::KernelFault;

impl Engine {
    /// Reads what kernels found wrong, counts it, and lets them report again. No batch is under way.
    pub(super) fn look_at_fault(&mut self) -> Result<(), DataError> {
        self.has_fault = false;
        let state = self.memory.take_fault(&self.control)?;
        let mut num_refused = state.num_refused.saturating_sub(self.num_refused);
        self.num_refused = state.num_refused;
        self.metrics.frames_in.inc_by(num_refused);
        let told = KernelFault::of(&state.error);
        match told {
            Some(fault @ KernelFault::Other { .. }) => {
                tracing::error!(%fault, "a kernel reported an error");
            }
            // Whoever does so again and again is named and dropped below.
            Some(fault @ KernelFault::Withheld { .. }) => self.tell_late(&fault),
            _ => {}
        }
        // Kernels keep the first error only, but each client was told of each of its own.
        let max_bad_frames = self.config.limits.max_bad_frames;
        for (idx, taken) in state.taken.into_iter().enumerate() {
            let Some(seat) = self.seats.get_mut(idx) else { continue };
            let refusals = match (seat.is_remote(), told) {
                (false, _) => {
                    self.memory.refusals(&self.control, &self.plan.geometry, seat, taken)?
                }
                // What such a client was told lies on its host. The first of its faults is known here.
                (true, Some(KernelFault::Refused { seat, frame, code }))
                    if seat as usize == idx =>
                {
                    vec![(code, frame)]
                }
                // It may be lost on the way, so only one after the other counts.
                (
                    true,
                    Some(fault @ KernelFault::Withheld { seat: found, frame, is_gone: false, .. }),
                ) if found as usize == idx => {
                    seat.count_withheld(frame, &fault);
                    vec![(ErrorCode::Internal, frame)]
                }
                (true, _) => Vec::new(),
            };
            for fault in refusals {
                num_refused = num_refused.saturating_sub(1);
                self.metrics.count_bad_frame(fault.0);
                // Within the host rows follow their header at once; over a network something may lie between.
                let is_withheld = fault.0 == ErrorCode::Internal && !seat.is_remote();
                if is_malformed(fault.0) || is_withheld {
                    let (seat_idx, frame) = (idx as u32, fault.1);
                    let fault = KernelFault::Refused { seat: seat_idx, frame, code: fault.0 };
                    seat.count_bad_frame(max_bad_frames, &fault);
                }
            }
        }
        // A client that overwrites what it was told hides its codes, not their number.
        for _ in 0..num_refused {
            self.metrics.count_bad_frame(ErrorCode::Other(0));
        }
        Ok(())
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

/// Time between two lines of the log about late frames.
const LATE_PERIOD: Duration = Duration::from_secs(1);

/// Whether only a broken or hostile client sends such a frame.
const fn is_malformed(code: ErrorCode) -> bool {
    matches!(
        code,
        ErrorCode::BadFrame
            | ErrorCode::UnknownExpert
            | ErrorCode::WrongLayer
            | ErrorCode::StaleChannel
    )
}
