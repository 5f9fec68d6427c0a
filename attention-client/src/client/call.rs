//! The state of one call: its pairs and frames, and what failed and must be resent.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use protocol::{ErrorCode, ServerTimes};
use telemetry::TraceContext;

use super::plan::{Pair, Plan, PlannedFrame};
#[cfg(feature = "failpoints")]
use super::sabotage;
use crate::error::ClientError;
use crate::fleet::link::{OpenFrame, Server};
use crate::timing::{LayerTiming, ServerTiming, elapsed_ns};

/// State of a lane's current call. Buffers are kept from call to call.
#[derive(Debug, Default)]
pub(crate) struct Call {
    pub layer: u32,
    pub layer_idx: usize,
    pub num_tokens: usize,
    /// All pairs of the call, ascending by token.
    pub pairs: Vec<Pair>,
    pub plan: Plan,
    /// In the order in which answers are summed: first dispatch by server and part, then retries.
    pub frames: Vec<Frame>,
    /// Pairs that wait for a live replica.
    pub orphans: Vec<Pair>,
    pub timing: LayerTiming,
    /// Pairs to resend.
    pub retry: Vec<Pair>,
    /// Pairs that are left out for want of a replica.
    pub missing: Vec<Pair>,
    /// By [`Server::idx`].
    pub backoff: Vec<Backoff>,
    pub batch: Vec<Pair>,
    /// Servers that frames were planned for, in that order.
    pub servers: Vec<ServerPart>,
    /// Index of the first frame that is not summed yet.
    pub next_sum: usize,
    /// Pairs that were added to the sum.
    pub pairs_answered: u64,
    /// Start of the current wait for a replica. An answer to any frame ends it.
    pub orphans_since: Option<Instant>,
    /// Time of the last assignment of pairs to servers.
    pub planned_at: Option<Instant>,
    /// Last sign of life of the first failed server whose tokens are not all resent.
    pub stall_from: Option<Instant>,
    pub rounds: u32,
    pub bad_frames: u32,
    pub fatal: Option<ClientError>,
    pub hedges: Vec<Hedge>,
    /// True if an event since the last look may have decided a hedge.
    pub has_unsettled_hedge: bool,
    /// No hedge is tried before: the last one was not possible.
    pub no_hedge_before: Option<Instant>,
    /// Frames that are late, while they are looked at.
    pub late: Vec<u32>,
    /// True if the recorder gets the times of the call.
    pub is_traced: bool,
    /// Trace of the caller.
    pub context: Option<TraceContext>,
}

/// One frame of a call.
#[derive(Debug)]
pub(crate) struct Frame {
    pub plan: PlannedFrame,
    /// Index in [`Call::servers`].
    pub server: u32,
    pub epoch: u64,
    pub sequence: u64,
    pub state: FrameState,
    pub hedge: HedgeRole,
}

/// Part of a frame in a hedge. The numbers index [`Call::hedges`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HedgeRole {
    None,
    Original(u32),
    Copy(u32),
}

impl HedgeRole {
    pub const fn is_some(self) -> bool {
        matches!(self, Self::Original(_) | Self::Copy(_))
    }

    pub const fn is_copy(self) -> bool {
        matches!(self, Self::Copy(_))
    }
}

/// A late frame and its copies.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Hedge {
    pub original: u32,
    /// The copies lie side by side in the call's frames.
    pub first_copy: u32,
    pub num_copies: u32,
    pub state: HedgeState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HedgeState {
    /// Original and copies are outstanding.
    Open,
    /// The original failed: the copies are frames like any other.
    Promoted,
    /// A copy failed: the original is a frame like any other, and the other copies are still to be cancelled.
    Void,
    /// Decided, and the losers are cancelled.
    Closed,
}

impl Hedge {
    pub fn copies(&self) -> std::ops::Range<u32> {
        self.first_copy..self.first_copy + self.num_copies
    }
}

/// The part of a server in a call.
#[derive(Debug)]
pub(crate) struct ServerPart {
    /// [`Server::uid`].
    pub uid: u64,
    pub timing: ServerTiming,
}

#[derive(Debug)]
pub(crate) enum FrameState {
    /// Waits for credit.
    Queued,
    /// Published to the server.
    Sent,
    /// Rows that wait to be summed in order.
    Answered(Vec<f32>),
    /// Summed, or replaced by a later frame.
    Done,
}

/// Failures and refusals of a server in this call, and the backoff that follows from them.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Backoff {
    pub failures: u32,
    pub refusals: u32,
    pub not_before: Option<Instant>,
}

impl Call {
    pub fn begin(&mut self, layer: u32, layer_idx: usize, num_tokens: usize, num_experts: usize) {
        self.layer = layer;
        self.layer_idx = layer_idx;
        self.num_tokens = num_tokens;
        self.pairs.clear();
        self.plan.reset(num_experts);
        self.frames.clear();
        self.orphans.clear();
        self.timing = LayerTiming::default();
        self.retry.clear();
        self.missing.clear();
        self.backoff.clear();
        self.servers.clear();
        self.next_sum = 0;
        self.pairs_answered = 0;
        self.orphans_since = None;
        self.planned_at = None;
        self.stall_from = None;
        self.rounds = 0;
        self.bad_frames = 0;
        self.fatal = None;
        self.hedges.clear();
        self.no_hedge_before = None;
        self.is_traced = false;
        self.context = None;
        self.has_unsettled_hedge = false;
    }

    /// Grows the buffers for calls of these sizes.
    pub fn reserve(&mut self, num_pairs: usize, num_frames: usize, num_servers: usize) {
        for pairs in [&mut self.pairs, &mut self.batch] {
            pairs.reserve(num_pairs.saturating_sub(pairs.len()));
        }
        self.frames.reserve(num_frames.saturating_sub(self.frames.len()));
        self.servers.reserve(num_servers.saturating_sub(self.servers.len()));
    }

    /// Index in [`servers`](Self::servers) of `server`, which is added if need be.
    pub fn part_of(&mut self, server: &Server) -> u32 {
        let found = self.servers.iter().position(|part| part.uid == server.uid);
        let index = found.unwrap_or_else(|| {
            let timing = ServerTiming::new(Arc::clone(&server.shared_name));
            self.servers.push(ServerPart { uid: server.uid, timing });
            self.timing.num_servers += 1;
            self.servers.len() - 1
        });
        index as u32
    }

    /// The timing of the server that a frame was planned for.
    pub fn server_of(&mut self, frame: u32) -> &mut ServerTiming {
        &mut self.servers[self.frames[frame as usize].server as usize].timing
    }

    /// Counts a published frame.
    pub fn frame_sent(&mut self, frame: u32) {
        self.frames[frame as usize].state = FrameState::Sent;
        self.timing.num_frames += 1;
        self.server_of(frame).num_frames += 1;
    }

    /// Counts the times of an answered frame.
    pub fn note_times(&mut self, open: &OpenFrame, times: ServerTimes) {
        let (queue_ns, compute_ns) = (u64::from(times.queue_ns), u64::from(times.compute_ns));
        self.timing.server_queue_ns = self.timing.server_queue_ns.max(queue_ns);
        self.timing.server_compute_ns = self.timing.server_compute_ns.max(compute_ns);
        let server = self.server_of(open.frame);
        server.queue_ns = server.queue_ns.max(queue_ns);
        server.compute_ns = server.compute_ns.max(compute_ns);
        server.wait_ns = server.wait_ns.max(elapsed_ns(open.published_at));
    }

    /// Resends a frame that was published to a failed server.
    pub fn frame_failed(&mut self, frame: u32, server: &Server) {
        if self.frame_to_retry(frame, server) {
            self.count_resent(frame);
        }
    }

    fn count_resent(&mut self, frame: u32) {
        let num_pairs = u64::from(self.frames[frame as usize].plan.num_entries);
        self.timing.resent_pairs += num_pairs;
        self.server_of(frame).resent_pairs += num_pairs;
    }

    /// Resends a frame that was not published, or takes back one of an abandoned call.
    pub fn frame_unsent(&mut self, frame: u32, server: &Server) {
        self.frame_to_retry(frame, server);
    }

    /// Returns false if nothing must be resent: another frame asks for the same pairs.
    fn frame_to_retry(&mut self, frame_no: u32, server: &Server) -> bool {
        let frame = &mut self.frames[frame_no as usize];
        frame.state = FrameState::Done;
        release_load(server, frame.plan.num_entries);
        if self.end_hedge_of(frame_no) {
            return false;
        }
        let mut retry = std::mem::take(&mut self.retry);
        self.pairs_of(frame_no, &mut retry);
        self.retry = retry;
        #[cfg(feature = "failpoints")]
        if sabotage::is_on(sabotage::LOSE_PAIR) && self.retry.pop().is_some() {
            self.pairs_answered += 1;
        }
        true
    }

    pub fn num_entries(&self, frame: u32) -> u32 {
        self.frames[frame as usize].plan.num_entries
    }

    /// Counts a link that failed with frames unanswered.
    pub fn link_failed(&mut self, server: &Server, last_life: Instant) {
        self.timing.failovers += 1;
        if let Some(part) = self.servers.iter_mut().find(|part| part.uid == server.uid) {
            part.timing.failovers += 1;
        }
        let backoff = self.backoff_of(server.idx);
        backoff.failures += 1;
        if let Some(excess) = backoff.failures.checked_sub(FREE_FAILURES) {
            backoff.not_before = Some(Instant::now() + FAILURE_PAUSE * (1 << excess.min(4)));
        }
        self.stall_from = Some(self.stall_from.map_or(last_life, |from| from.min(last_life)));
    }

    fn refused(&mut self, server_idx: usize, now: Instant) {
        let backoff = self.backoff_of(server_idx);
        backoff.refusals += 1;
        backoff.not_before = Some(now + FIRST_PAUSE * (1 << backoff.refusals.min(10)));
    }

    fn backoff_of(&mut self, server_idx: usize) -> &mut Backoff {
        if self.backoff.len() <= server_idx {
            self.backoff.resize(server_idx + 1, Backoff::default());
        }
        &mut self.backoff[server_idx]
    }

    /// Returns true once every pair is answered or left out.
    pub fn is_complete(&self) -> bool {
        self.retry.is_empty() && self.orphans.is_empty() && self.next_sum == self.frames.len()
    }

    /// Earliest end of a backoff, for orphans.
    pub fn next_retry(&self, now: Instant) -> Option<Instant> {
        self.backoff.iter().filter_map(|t| t.not_before).filter(|at| *at > now).min()
    }

    /// Returns true if a backoff has ended since the last assignment of pairs, or if none is running.
    pub fn may_retry(&self, now: Instant) -> bool {
        let has_ended_since =
            |at: Instant| at <= now && self.planned_at.is_none_or(|last| last < at);
        self.backoff.iter().filter_map(|t| t.not_before).any(has_ended_since)
            || self.next_retry(now).is_none()
    }
}

impl Call {
    pub fn answered(&mut self, frame: u32, buffer: Vec<f32>, server: &Server) {
        let num_pairs = u64::from(self.frames[frame as usize].plan.num_entries);
        self.server_of(frame).answered_pairs += num_pairs;
        let frame = &mut self.frames[frame as usize];
        self.orphans_since = None;
        self.has_unsettled_hedge |= frame.hedge.is_some();
        frame.state = FrameState::Answered(buffer);
        release_load(server, frame.plan.num_entries);
    }

    pub fn refused_by(&mut self, frame: u32, server: &Server, (code, message): (ErrorCode, &str)) {
        let bad_frame = code == ErrorCode::BadFrame;
        self.bad_frames += u32::from(bad_frame && !self.is_spare(frame));
        // The frame may have been damaged in transit, so one retry is worth it. Nothing depends on the copy of a
        // hedge.
        if code.is_retryable() || (bad_frame && self.bad_frames == 1) || self.is_spare(frame) {
            self.frame_failed(frame, server);
            self.refused(server.idx, Instant::now());
        } else {
            self.frame_to_retry(frame, server);
            self.fatal = Some(ClientError::Refused {
                server: server.name().to_owned(),
                layer: self.layer,
                code,
                message: message.to_owned(),
            });
        }
    }

    /// Scales each token that lacks experts, so that the remaining weights have the sum of all weights. Outputs are
    /// linear in the weights, so scaling the sum at the end is enough.
    pub fn renormalise(&mut self, hidden: usize, out: &mut [f32]) {
        self.missing.sort_unstable_by_key(|pair| pair.token);
        for group in self.missing.chunk_by(|a, b| a.token == b.token) {
            let token = group[0].token;
            let begin = self.pairs.partition_point(|pair| pair.token < token);
            let of_token = self.pairs[begin..].iter().take_while(|pair| pair.token == token);
            let total: f64 = of_token.map(|pair| f64::from(pair.weight)).sum();
            let left = total - group.iter().map(|pair| f64::from(pair.weight)).sum::<f64>();
            let factor = total / left;
            // The rest may be empty, or too small to scale up: then the sum stays as it is.
            if factor.is_finite() && left.abs() > 1e-6 * total.abs() {
                let begin = token as usize * hidden;
                let row = &mut out[begin..begin + hidden];
                row.iter_mut().for_each(|value| *value = (f64::from(*value) * factor) as f32);
            }
        }
    }
}

pub(super) fn release_load(server: &Server, num_entries: u32) {
    server.outstanding.fetch_sub(num_entries.into(), Ordering::Relaxed);
}

/// Backoff after the first refusal of a server. It doubles with every refusal.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
/// Failed links to one server in a call before a backoff starts.
const FREE_FAILURES: u32 = 3;
/// Backoff after that many failures. It doubles with every further failure, up to 16 times this.
const FAILURE_PAUSE: Duration = Duration::from_millis(20);
