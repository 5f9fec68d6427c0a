//! One client's link, as the data thread sees it.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use fail::fail_point;
use p2p_core::{Channel, ChannelError, Endpoint, RxFrame};
use protocol::{DispatchExpect, FrameId};
use tokio::sync::oneshot;

use super::answer::{Answer, Spare, Waiting};
use super::{EndedLink, LinkId};
use crate::metrics::{DropReason, ServerMetrics};

/// A frame that was taken and waits for its batch. Its bytes are still in the slot, and still the
/// client's to change: `layer` is a hint until the frame is copied and checked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pending {
    pub(crate) frame: RxFrame,
    pub(crate) layer: u32,
    pub(crate) taken_at: Instant,
}

pub(crate) struct Link<E: Endpoint> {
    pub(crate) id: LinkId,
    pub(crate) channel: Channel<E>,
    /// What every frame of the client must look like.
    pub(crate) expect: DispatchExpect,
    /// Frames taken, oldest first.
    pub(crate) pending: VecDeque<Pending>,
    /// Answers that wait for credit, oldest first.
    backlog: VecDeque<Waiting>,
    max_backlog: usize,
    /// Frames copied into the batch that is being computed.
    pub(crate) num_in_batch: usize,
    /// Since when the client has given no credit for the backlog.
    stalled_since: Option<Instant>,
    num_bad_frames: u32,
    /// Set when the link is to end after this round.
    doom: Option<DropReason>,
    ended: oneshot::Sender<EndedLink<E>>,
}

impl<E: Endpoint> Link<E> {
    pub(crate) fn new(
        id: LinkId,
        channel: Channel<E>,
        expect: DispatchExpect,
        max_backlog: usize,
        ended: oneshot::Sender<EndedLink<E>>,
    ) -> Self {
        let num_frames = channel.layout().num_frames();
        // A whole ring of requests can go into one batch.
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
            doom: None,
            ended,
        }
    }

    /// Identity for the answer to a frame that has none.
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

    /// Whether a frame arrived: one load.
    #[inline]
    pub(crate) fn has_frame(&self) -> bool {
        self.channel.has_frame() && self.doom.is_none()
    }

    /// Whether answers wait for credit.
    #[inline]
    pub(crate) fn is_stalled(&self) -> bool {
        !self.backlog.is_empty()
    }

    /// The next frame, if it may go into a batch: its answer must have a place in the backlog, should
    /// the client give no credit.
    pub(crate) fn next_up(&self) -> Option<&Pending> {
        let has_room = self.backlog.len() + self.num_in_batch < self.max_backlog;
        if has_room && self.doom.is_none() { self.pending.front() } else { None }
    }

    /// Frames taken and not answered.
    pub(crate) fn num_unanswered(&self) -> usize {
        self.pending.len() + self.num_in_batch + self.backlog.len()
    }

    /// Shows a client that waits for an answer that this thread is alive.
    pub(crate) fn show_progress(&mut self) {
        if self.doom.is_none()
            && (self.num_unanswered() > 0 || self.channel.has_frame())
            && let Err(error) = self.channel.try_bump_progress()
        {
            self.fail(&error);
        }
    }

    /// Gives the credit of the oldest held frame back.
    pub(crate) fn release(&mut self) {
        if let Err(error) = self.channel.release() {
            self.fail(&error);
        }
    }

    /// Publishes `answer`, or keeps it until the client gives credit.
    pub(crate) fn answer(
        &mut self,
        answer: Answer<'_>,
        spare: &mut Spare,
        metrics: &ServerMetrics,
    ) {
        if self.doom.is_some() {
            return;
        }
        if self.backlog.is_empty() {
            match self.try_publish(answer, metrics) {
                Ok(true) => return,
                Ok(false) => {}
                Err(error) => return self.fail(&error),
            }
        }
        self.backlog.push_back(Waiting::new(answer, spare.take()));
        metrics.backlog_frames.inc();
    }

    /// Publishes what waits, as far as there is credit. True if anything went out.
    pub(crate) fn flush(&mut self, spare: &mut Spare, metrics: &ServerMetrics) -> bool {
        let mut went_out = false;
        while self.doom.is_none()
            && let Some(waiting) = self.backlog.pop_front()
        {
            match self.try_publish(waiting.as_answer(), metrics) {
                Ok(true) => {
                    spare.keep(waiting.into_buffer());
                    metrics.backlog_frames.dec();
                    went_out = true;
                }
                Ok(false) => {
                    self.backlog.push_front(waiting);
                    break;
                }
                Err(error) => {
                    self.backlog.push_front(waiting);
                    self.fail(&error);
                }
            }
        }
        if went_out {
            self.stalled_since = None;
        }
        went_out
    }

    /// When the client must have given credit, or `None` while nothing waits for it. Starts the clock.
    pub(crate) fn credit_deadline(&mut self, now: Instant, timeout: Duration) -> Option<Instant> {
        if self.backlog.is_empty() || self.doom.is_some() {
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
            self.end_with(DropReason::BadFrames);
        }
    }

    /// Ends the link after this round, because of `error`.
    pub(crate) fn fail(&mut self, error: &ChannelError) {
        if self.doom.is_none() {
            tracing::warn!(link = %self.id, client = self.expect.client_id, %error, "dropping a client");
        }
        self.end_with(match error {
            ChannelError::Desync(_) => DropReason::Desync,
            _ => DropReason::Transport,
        });
    }

    /// Ends the link after this round. The first reason counts.
    pub(crate) fn end_with(&mut self, reason: DropReason) {
        self.doom.get_or_insert(reason);
    }

    pub(crate) const fn doom(&self) -> Option<DropReason> {
        self.doom
    }

    /// Hands the channel to whoever waits for the link's end.
    pub(crate) fn end(self, reason: DropReason, spare: &mut Spare, metrics: &ServerMetrics) {
        for waiting in self.backlog {
            spare.keep(waiting.into_buffer());
            metrics.backlog_frames.dec();
        }
        // Nobody may be waiting; the channel is then dropped here.
        let _ = self.ended.send(EndedLink { reason, channel: self.channel });
    }

    /// False while there is no credit.
    fn try_publish(
        &mut self,
        answer: Answer<'_>,
        metrics: &ServerMetrics,
    ) -> Result<bool, ChannelError> {
        let Some(frame) = self.channel.try_reserve()? else {
            return Ok(false);
        };
        let used_bytes = answer.encode(&mut self.channel.write_view(&frame));
        if sabotage_asked("server::sabotage_publish_early") {
            // The last of the rows are not there yet when the flag says that they are.
            let _ = self.channel.write_view(&frame).put_bytes(used_bytes / 4 * 3, &[0x3e; 64]);
        }
        fail_point!("server::between_payload_and_publish");
        self.channel.publish(frame, used_bytes)?;
        fail_point!("server::after_publish");
        metrics.frames_out.inc();
        metrics.bytes_out.inc_by(used_bytes as u64);
        Ok(true)
    }
}

/// Whether a fault test asked for the wrong behaviour `name`, to see that its rig notices. The constant
/// `false` in builds without the feature `failpoints`.
#[inline]
fn sabotage_asked(name: &str) -> bool {
    fail_point!(name, |_| true);
    let _ = name;
    false
}
