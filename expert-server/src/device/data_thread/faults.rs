//! Errors that kernels report, counted by client.

use std::time::{Duration, Instant};

use kernels::abi::ServerState;
use protocol::ErrorCode;

use super::DataThread;
use crate::device::fault::KernelFault;
use crate::error::DataError;

impl DataThread {
    /// Reads the kernels' error word and clears it, so that they can report again. No batch is in flight.
    pub(super) fn read_fault(&mut self) -> Result<(), DataError> {
        (self.has_fault, self.refusal_since) = (false, None);
        let error = self.memory.take_fault(&self.control)?;
        match KernelFault::of(&error) {
            Some(fault @ KernelFault::Other { .. }) => {
                tracing::error!(%fault, "a kernel reported an error");
            }
            // `count_refusals` drops a client with many late frames.
            Some(fault @ KernelFault::Late { .. }) => self.log_late_frame(&fault),
            // Counted at the end of its batch.
            Some(KernelFault::Refused { .. }) | None => {}
        }
        Ok(())
    }

    /// Counts the frames that were refused up to the batch that left `state`.
    ///
    /// Kernels keep only the first error, but also the status words of each client's frames.
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
            let is_aborted = self.aborts.is_aborted(idx);
            let Some(client) = self.clients.get_mut(idx) else { continue };
            let mut num_late = 0;
            for word in client.new_statuses(&state.refusals[idx]) {
                let code = ErrorCode::from_u32(word as u32 & 0xffff);
                num_refused = num_refused.saturating_sub(1);
                self.metrics.count_bad_frame(code);
                let is_late = code == ErrorCode::Internal;
                if is_malformed(code) {
                    let frame = word >> STATUS_SHIFT;
                    let fault = KernelFault::Refused { client: idx as u32, frame, code };
                    client.count_bad_frame(max_bad_frames, &fault);
                } else if is_late && !is_aborted {
                    num_late += 1;
                }
            }
            client.count_late_frames(taken, num_late, max_bad_frames, now);
        }
        // Codes would be lost if a client had more refusals than a slot has frames since the last call, which
        // cannot happen. Their number is counted in any case.
        for _ in 0..num_refused {
            self.metrics.count_bad_frame(ErrorCode::Other(0));
        }
    }

    /// Logs a late frame, at most one per period.
    fn log_late_frame(&mut self, fault: &KernelFault) {
        let now = Instant::now();
        if self.late_logged_at.is_none_or(|at| now - at >= LATE_LOG_PERIOD) {
            tracing::warn!(%fault, unlogged = self.num_unlogged, "a frame is late");
            (self.late_logged_at, self.num_unlogged) = (Some(now), 0);
        } else {
            self.num_unlogged += 1;
            tracing::debug!(%fault, "a frame is late");
        }
    }
}

/// A status word is `number << STATUS_SHIFT | code`.
const STATUS_SHIFT: u32 = 16;
/// Time between two log lines about late frames.
const LATE_LOG_PERIOD: Duration = Duration::from_secs(1);

/// Returns true if only a broken or hostile client sends such a frame. Missing experts and an old epoch are not a
/// client's fault, because placements change while frames are in flight.
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
