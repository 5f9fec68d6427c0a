//! One client of a server on a GPU, with its link.

use std::fmt;
use std::time::Instant;

use kernels::abi::{ClientPeer, FrameGeometry, MAX_FRAMES};
use kernels::gpu::{GpuError, Stream};
use protocol::DispatchExpect;
use tokio::sync::oneshot;

use super::late_frames::{LateFrames, MAX_LATE_FRAMES};
use super::slots::ClientSlots;
use crate::inbox::LinkId;
use crate::metrics::DropReason;
use crate::plane::ClosedLink;

/// One client.
#[derive(Debug)]
pub(super) struct Client {
    pub(super) id: LinkId,
    pub(super) slots: ClientSlots,
    pub(super) expect: DispatchExpect,
    pub(super) closed: oneshot::Sender<ClosedLink<ClientSlots>>,
    /// Number of the last frame that the count of late frames includes.
    last_counted: u64,
    /// Status words that kernels wrote for the client's refused frames, as far as they were counted.
    statuses: Statuses,
    num_bad_frames: u32,
    late_frames: LateFrames,
    close_reason: Option<DropReason>,
}

/// One status word per frame of a slot.
pub(super) type Statuses = [u64; MAX_FRAMES as usize];

impl Client {
    pub(super) fn new(
        id: LinkId,
        slots: ClientSlots,
        expect: DispatchExpect,
        closed: oneshot::Sender<ClosedLink<ClientSlots>>,
    ) -> Self {
        Self {
            id,
            slots,
            expect,
            closed,
            last_counted: 0,
            statuses: [0; MAX_FRAMES as usize],
            num_bad_frames: 0,
            late_frames: LateFrames::new(Instant::now()),
            close_reason: None,
        }
    }

    /// Closes the link between two batches. The first reason counts.
    pub(super) fn close_with(&mut self, reason: DropReason) {
        self.close_reason.get_or_insert(reason);
    }

    pub(super) const fn close_reason(&self) -> Option<DropReason> {
        self.close_reason
    }

    /// Returns true if the link closes before the next batch.
    pub(super) const fn is_closing(&self) -> bool {
        self.close_reason.is_some()
    }

    /// Counts a malformed frame.
    pub(super) fn count_bad_frame(&mut self, max_bad_frames: u32, fault: &dyn fmt::Display) {
        if self.num_bad_frames == 0 {
            tracing::warn!(link = %self.id, client = self.expect.client_id, error = %fault, "a client sent a malformed frame");
        }
        self.num_bad_frames = self.num_bad_frames.saturating_add(1);
        if self.num_bad_frames > max_bad_frames {
            self.close_with(DropReason::BadFrames);
        }
    }

    /// The status words that are new since the last call. Each word names its frame, so all words differ.
    pub(super) fn new_statuses(
        &mut self,
        statuses: &Statuses,
    ) -> impl Iterator<Item = u64> + use<> {
        let former = std::mem::replace(&mut self.statuses, *statuses);
        (*statuses).into_iter().zip(former).filter(|(new, old)| new != old).map(|(new, _)| new)
    }

    /// Counts the frames since the last call. `last` is the number of the last one. Rows of `num_late` of them
    /// did not arrive in time.
    ///
    /// Rows of a client of this host follow their header at once, unless the client's GPU does something else in
    /// between. Rows over a network can be delayed. Both are forgiven by the same rule.
    pub(super) fn count_late_frames(
        &mut self,
        last: u64,
        num_late: u32,
        max_bad_frames: u32,
        now: Instant,
    ) {
        let num_frames = last.saturating_sub(self.last_counted);
        self.last_counted = last;
        let num_in_time = num_frames.saturating_sub(num_late.into());
        let frames = self.late_frames.count(num_in_time, num_late, now);
        let most = if self.slots.is_remote() { u32::MAX } else { max_bad_frames.saturating_add(1) };
        if frames >= most.min(MAX_LATE_FRAMES) {
            tracing::warn!(link = %self.id, client = self.expect.client_id, frame = last, frames, "dropping a client that announces rows and does not send them");
            self.close_with(DropReason::BadFrames);
        }
    }

    /// Shows the client that the server is alive.
    pub(super) fn show_progress(
        &self,
        control: &Stream,
        geometry: &FrameGeometry,
    ) -> Result<(), GpuError> {
        if let Err(error) = self.slots.show_progress(control, geometry)? {
            tracing::debug!(link = %self.id, %error, "cannot show progress to a client");
        }
        Ok(())
    }

    /// Closes the link if the path to the client is out of service.
    pub(super) fn check_path(&mut self) {
        if self.is_closing() {
            return;
        }
        if let Err(error) = self.slots.health() {
            tracing::warn!(link = %self.id, client = self.expect.client_id, %error, "dropping a client");
            self.close_with(DropReason::Transport);
        }
    }

    /// The client's entry in the kernels' table.
    pub(super) fn peer(&self) -> ClientPeer {
        ClientPeer {
            request: self.slots.request(),
            response: self.slots.response(),
            client_id: self.expect.client_id,
            generation: self.expect.generation,
            reserved: 0,
        }
    }
}
