//! What kernels found wrong, counted by client.

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
            Some(fault @ KernelFault::Withheld { .. }) => {
                tracing::debug!(%fault, "a frame is late")
            }
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
}

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
