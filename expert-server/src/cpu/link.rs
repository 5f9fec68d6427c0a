//! One client's link, as the data thread sees it.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use p2p_core::{Channel, ChannelError, RxFrame, Transport};
use protocol::{DispatchExpect, FrameId};
use tokio::sync::oneshot;

use super::answer::{Answer, BufferPool, QueuedAnswer};
use crate::inbox::LinkId;
use crate::metrics::{DropReason, ServerMetrics};
use crate::plane::ClosedLink;

/// A frame that was taken and waits for its batch. Its bytes are still in the slot, where the client can change
/// them. So `layer` is a hint until the frame is copied and checked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PendingFrame {
    pub(crate) frame: RxFrame,
    pub(crate) layer: u32,
    pub(crate) taken_at: Instant,
}

pub(crate) struct Link<E: Transport> {
    pub(crate) id: LinkId,
    pub(crate) channel: Channel<E>,
    /// Properties that every frame of the client must have.
    pub(crate) expect: DispatchExpect,
    /// Frames taken, oldest first.
    pub(crate) pending: VecDeque<PendingFrame>,
    /// Answers that wait for credit, oldest first.
    backlog: VecDeque<QueuedAnswer>,
    max_backlog: usize,
    /// Frames copied into the batch that is being computed.
    pub(crate) num_in_batch: usize,
    /// Begin of the time without credit for the backlog.
    stalled_since: Option<Instant>,
    num_bad_frames: u32,
    /// Set when the link is to close after this round.
    close_reason: Option<DropReason>,
    closed: oneshot::Sender<ClosedLink<Channel<E>>>,
}

impl<E: Transport> Link<E> {
    pub(crate) fn new(
        id: LinkId,
        channel: Channel<E>,
        expect: DispatchExpect,
        max_backlog: usize,
        closed: oneshot::Sender<ClosedLink<Channel<E>>>,
    ) -> Self {
        let num_frames = channel.layout().num_frames();
        // All frames of a slot can be in one batch.
        let max_backlog = max_backlog.max(num_frames);
        Self {
            id,
            channel,
            expect,
            pending: VecDeque::with_capacity(num_frames),
            backlog: VecDeque::with_capacity(max_backlog),
            max_backlog,
            num_in_batch: 0,
            stalled_since: None,
            num_bad_frames: 0,
            close_reason: None,
            closed,
        }
    }

    /// Identity for the answer to a frame without a readable one.
    pub(crate) const fn own_id(&self) -> FrameId {
        FrameId {
            epoch: 0,
            client_id: self.expect.client_id,
            generation: self.expect.generation,
            sequence: 0,
            layer: 0,
            frame_idx: 0,
            num_frames: 1,
        }
    }

    /// Returns true if a frame has arrived. Costs one load.
    #[inline]
    pub(crate) fn has_frame(&self) -> bool {
        self.channel.has_frame() && !self.is_closing()
    }

    /// Returns true if answers wait for credit.
    #[inline]
    pub(crate) fn is_stalled(&self) -> bool {
        !self.backlog.is_empty()
    }

    /// The next frame, if it may go into a batch. The backlog must have room for its answer, in case the client
    /// gives no credit.
    pub(crate) fn next_frame(&self) -> Option<&PendingFrame> {
        let has_room = self.backlog.len() + self.num_in_batch < self.max_backlog;
        if has_room && !self.is_closing() { self.pending.front() } else { None }
    }

    /// Frames taken and not answered.
    pub(crate) fn num_unanswered(&self) -> usize {
        self.pending.len() + self.num_in_batch + self.backlog.len()
    }

    /// Shows a client that waits for an answer that the data thread is alive.
    pub(crate) fn show_progress(&mut self) {
        if !self.is_closing()
            && (self.num_unanswered() > 0 || self.channel.has_frame())
            && let Err(error) = self.channel.try_bump_progress()
        {
            self.fail(&error);
        }
    }

    /// Gives back the credit of the oldest frame that was taken.
    pub(crate) fn release(&mut self) {
        if let Err(error) = self.channel.release() {
            self.fail(&error);
        }
    }

    /// Publishes `answer`, or queues it until the client gives credit.
    pub(crate) fn answer(
        &mut self,
        answer: Answer<'_>,
        buffers: &mut BufferPool,
        metrics: &ServerMetrics,
    ) {
        if self.is_closing() {
            return;
        }
        if self.backlog.is_empty() {
            match self.try_publish(answer, metrics) {
                Ok(true) => return,
                Ok(false) => {}
                Err(error) => return self.fail(&error),
            }
        }
        self.backlog.push_back(QueuedAnswer::new(answer, buffers.take()));
        metrics.backlog_frames.inc();
    }

    /// Publishes queued answers while there is credit. Returns true if it published any.
    pub(crate) fn flush(&mut self, buffers: &mut BufferPool, metrics: &ServerMetrics) -> bool {
        let mut has_published = false;
        while !self.is_closing()
            && let Some(queued) = self.backlog.pop_front()
        {
            match self.try_publish(queued.as_answer(), metrics) {
                Ok(true) => {
                    buffers.put(queued.into_buffer());
                    metrics.backlog_frames.dec();
                    has_published = true;
                }
                Ok(false) => {
                    self.backlog.push_front(queued);
                    break;
                }
                Err(error) => {
                    self.backlog.push_front(queued);
                    self.fail(&error);
                }
            }
        }
        if has_published {
            self.stalled_since = None;
        }
        has_published
    }

    /// Deadline for the client's credit, or `None` without a backlog. The first call with a backlog starts the
    /// clock.
    pub(crate) fn credit_deadline(&mut self, now: Instant, timeout: Duration) -> Option<Instant> {
        if self.backlog.is_empty() || self.is_closing() {
            self.stalled_since = None;
            return None;
        }
        Some(*self.stalled_since.get_or_insert(now) + timeout)
    }

    /// Counts a malformed frame.
    pub(crate) fn count_bad_frame(&mut self, max_bad_frames: u32, message: &str) {
        if self.num_bad_frames == 0 {
            tracing::warn!(link = %self.id, client = self.expect.client_id, error = message, "a client sent a malformed frame");
        }
        self.num_bad_frames = self.num_bad_frames.saturating_add(1);
        if self.num_bad_frames > max_bad_frames {
            self.close_with(DropReason::BadFrames);
        }
    }

    /// Closes the link after this round, because of `error`.
    pub(crate) fn fail(&mut self, error: &ChannelError) {
        if !self.is_closing() {
            tracing::warn!(link = %self.id, client = self.expect.client_id, %error, "dropping a client");
        }
        self.close_with(match error {
            ChannelError::Desync(_) => DropReason::Desync,
            _ => DropReason::Transport,
        });
    }

    /// Closes the link after this round. The first reason counts.
    pub(crate) fn close_with(&mut self, reason: DropReason) {
        self.close_reason.get_or_insert(reason);
    }

    pub(crate) const fn close_reason(&self) -> Option<DropReason> {
        self.close_reason
    }

    /// Returns true if the link closes after this round.
    #[inline]
    pub(crate) const fn is_closing(&self) -> bool {
        self.close_reason.is_some()
    }

    /// Hands the channel to the task that waits for the link's end.
    pub(crate) fn close(
        self,
        reason: DropReason,
        buffers: &mut BufferPool,
        metrics: &ServerMetrics,
    ) {
        for queued in self.backlog {
            buffers.put(queued.into_buffer());
            metrics.backlog_frames.dec();
        }
        // Without such a task the channel is dropped here.
        let _ = self.closed.send(ClosedLink { reason, slots: self.channel });
    }

    /// Returns false without credit.
    fn try_publish(
        &mut self,
        answer: Answer<'_>,
        metrics: &ServerMetrics,
    ) -> Result<bool, ChannelError> {
        let Some(frame) = self.channel.try_reserve()? else {
            return Ok(false);
        };
        let used_bytes = answer.encode(&mut self.channel.write_view(&frame));
        sabotage!("server::sabotage_publish_early", {
            // Overwrites the last rows: the flag then announces rows that are not complete.
            let _ = self.channel.write_view(&frame).put_bytes(used_bytes / 4 * 3, &[0x3e; 64]);
        });
        failpoint!("server::between_payload_and_publish");
        self.channel.publish(frame, used_bytes)?;
        failpoint!("server::after_publish");
        metrics.frames_out.inc();
        metrics.bytes_out.inc_by(used_bytes as u64);
        Ok(true)
    }
}
