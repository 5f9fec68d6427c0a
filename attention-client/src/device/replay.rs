//! Replaying graphs into which a caller recorded calls.
//!
//! A graph's kernels go by the client's tables, which are brought up to date before each replay and never
//! change during one. What fails during a replay leaves parts missing in whatever layer it hits; the
//! client then takes the failed servers out, and the replay is done again: experts keep no state.

use std::time::{Duration, Instant};

use kernels::abi::{
    ErrorWord, MAX_PEERS, REASON_TIMEOUT, TAG_BAD_EXPERT, TAG_COMBINE_EMPTY, TAG_COMBINE_PATH,
    TAG_COMBINE_ROW, TAG_NO_REPLICA, TAG_NONE, TAG_NUM_TOKENS, TAG_REFUSED,
};
use kernels::gpu::{GpuError, Graph, Stream};

use super::lane::Used;
use super::overdue::{LOOK, Watch};
use super::slots::Phase;
use super::{DeviceClient, DeviceError, MARGIN, elapsed_ns};
use crate::client::ClientError;
use crate::client::link::AbortBit;
use crate::metrics::FailReason;

/// What became of a replay.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReplayOutcome {
    /// Every output is complete.
    Complete,
    /// Outputs lack parts: replay again. Servers that failed are taken out already.
    Incomplete {
        /// The first thing that went wrong.
        reason: String,
    },
}

/// What [`DeviceClient::replay`] took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReplayReport {
    /// Replays, 1 without failures.
    pub attempts: u32,
    /// Time from the begin of the first replay to that of the last, 0 without failures.
    pub stall_ns: u64,
}

/// A replay that is under way.
#[derive(Debug)]
pub(super) struct Running {
    pub serial: u64,
    /// Handle of the stream.
    stream: u64,
    used: Vec<Used>,
    /// When its kernels must have ended, once they are waited for.
    until: Option<Instant>,
}

impl DeviceClient {
    /// Replays a graph until its outputs are complete: [`begin_replay`](Self::begin_replay), the replay,
    /// [`finish_replay`](Self::finish_replay), and again if parts are missing.
    ///
    /// # Errors
    /// [`DeviceError`]; the content of the outputs is then unspecified. With an expert that nobody
    /// serves, in either mode: kernels alone cannot renormalise.
    pub fn replay(&mut self, stream: &Stream, graph: &Graph) -> Result<ReplayReport, DeviceError> {
        let start = Instant::now();
        let mut report = ReplayReport::default();
        loop {
            self.begin_replay(stream)?;
            report.attempts += 1;
            report.stall_ns = if report.attempts == 1 { 0 } else { elapsed_ns(start) };
            let replayed = stream.replay(graph);
            // Finished in any case: the servers are counted in.
            let outcome = self.finish_replay(stream);
            replayed?;
            match outcome? {
                ReplayOutcome::Complete => return Ok(report),
                ReplayOutcome::Incomplete { reason } if report.attempts >= MAX_ATTEMPTS => {
                    let (attempts, waited) = (report.attempts, start.elapsed());
                    return Err(DeviceError::Replays { attempts, waited, last: reason });
                }
                ReplayOutcome::Incomplete { reason } => {
                    tracing::warn!(reason, attempts = report.attempts, "a graph is replayed again");
                }
            }
        }
    }

    /// To be called before a graph with recorded calls is launched on `stream`: takes in what has changed
    /// among the servers. While it runs, launch nothing else of this client.
    ///
    /// # Errors
    /// [`DeviceError`]; do not launch the graph then. If the stream does not come to the end of what was launched
    /// on it, nothing else is launched until [`finish_replay`](Self::finish_replay) came to its end.
    pub fn begin_replay(&mut self, stream: &Stream) -> Result<(), DeviceError> {
        self.check_device(stream)?;
        if self.replaying.is_some() {
            return Err(DeviceError::Replaying);
        }
        // Tables change in the order of this stream, and what was given up is waited for on it.
        if let Some(expected) = self.slots.other_stream(stream.raw()) {
            return Err(DeviceError::Stream { found: stream.raw(), expected });
        }
        self.settle_abandoned(stream)?;
        if self.slots.num_in(Phase::Dispatched) > 0 {
            let num_frames = self.geometry.num_frames;
            return Err(DeviceError::Outstanding { num_frames });
        }
        let serial = self.slots.next();
        let mut used = std::mem::take(&mut self.spare_used);
        loop {
            self.sync();
            if self.lane.enter(&mut used) {
                break;
            }
            std::thread::yield_now();
        }
        self.reached.expect_work();
        self.replaying = Some(Running { serial, stream: stream.raw(), used, until: None });
        let begun = self.refresh(stream).and_then(|()| {
            if self.slots.num_outstanding() > 0 {
                // What the kernels complained about in calls that are not finished is in those calls' reports.
                self.memory.clear_error(stream)?;
            }
            Ok(())
        });
        // Tables, and the first words of new slots, may be on their way. These stay until they have arrived.
        if begun.is_err() && self.wait_until(stream, Instant::now() + self.bound()).is_ok() {
            self.end_replay();
        }
        begun
    }

    /// To be called after the launch: waits for `stream`, that of [`begin_replay`](Self::begin_replay), and says
    /// whether every output is complete.
    ///
    /// # Errors
    /// [`DeviceError`] where replaying again would not help. After one of the GPU or of the stream the graph may
    /// still run: nothing else is launched until this was called again and came to its end.
    pub fn finish_replay(&mut self, stream: &Stream) -> Result<ReplayOutcome, DeviceError> {
        if let Some(running) = &self.replaying {
            self.check_stream(stream, running.stream)?;
        }
        self.check_device(stream)?;
        let slot = self.geometry.num_frames as usize;
        self.memory.report(stream, slot)?;
        self.poll(stream)?;
        // After an error its kernels may still run: the servers stay counted in.
        self.wait_watching(stream)?;
        let last = self.slots.last();
        if self.replaying.is_some() {
            // All calls are on this stream, or have ended.
            self.slots.rest(last + 1);
        }
        let error = self.memory.status(slot).error;
        if error.tag == TAG_NONE {
            self.end_replay();
            return Ok(ReplayOutcome::Complete);
        }
        let result = self.fail_lost(last).and_then(|()| self.judge(&error, last));
        self.memory.clear_error(stream)?;
        // A dispatch of another stream may have something to say right after.
        self.wait_until(stream, Instant::now() + self.bound())?;
        self.end_replay();
        self.sync();
        result.map(|reason| ReplayOutcome::Incomplete { reason })
    }

    /// Fails whom kernels gave up. The error word names one of them, and none would be heard again.
    fn fail_lost(&mut self, last: u64) -> Result<(), DeviceError> {
        let lost = self.state()?.lost;
        for idx in (0..lost.len()).filter(|idx| lost[*idx] != 0) {
            if self.lane.link_of(idx, &self.tables).is_none() {
                continue;
            }
            let reason = self.lane.why_unanswered(idx, FailReason::Silent);
            self.lane.fail(idx, reason, last, &self.shared);
        }
        Ok(())
    }

    /// What an error in a replay means: a reason to replay again, or an error.
    fn judge(&mut self, error: &ErrorWord, last: u64) -> Result<String, DeviceError> {
        let idx = error.peer as usize;
        let server = self.lane.server_name(idx).unwrap_or("a server that is gone").to_owned();
        match error.tag {
            TAG_COMBINE_ROW | TAG_COMBINE_EMPTY | TAG_COMBINE_PATH => {
                let reason = self.lane.why_unanswered(idx, FailReason::Silent);
                self.lane.fail(idx, reason, last, &self.shared);
                let silence = match reason {
                    FailReason::Stuck => self.bound(),
                    _ => self.shared.settings.deadline,
                };
                Ok(format!("{}: {error}", unanswered(&server, reason, silence)))
            }
            TAG_REFUSED => {
                let code = protocol::ErrorCode::from_u32((error.observed & 0xffff) as u32);
                self.shared.metrics.count_error_frame(code);
                if !code.is_retryable() {
                    let status = error.observed;
                    return Err(DeviceError::ReplayRefused { server, code, status });
                }
                self.lane.avoid(idx, Instant::now() + PAUSE);
                self.wait_for_news(PAUSE)?;
                Ok(format!("{server} refused a frame: {}", code.name()))
            }
            TAG_NO_REPLICA => {
                // Whoever comes may need the seat of one that the graph used.
                self.end_replay();
                let expert = error.observed as u32;
                let start = Instant::now();
                let limit = self.shared.settings.replica_wait;
                loop {
                    self.sync();
                    let orphan = self.lane.first_orphan(expert);
                    let Some(layer_idx) = orphan else { break };
                    let waited = start.elapsed();
                    if waited >= limit || self.lane.routing.is_hopeless(layer_idx, expert) {
                        return Err(self.no_replica(layer_idx, expert, waited).into());
                    }
                    self.wait_for_news(limit - waited)?;
                }
                Ok(format!("expert {expert} had no live replica"))
            }
            TAG_NUM_TOKENS => Err(DeviceError::Tokens {
                found: error.observed,
                capacity: u32::try_from(error.expected).unwrap_or(u32::MAX),
            }),
            TAG_BAD_EXPERT => Err(ClientError::ExpertIndex {
                token: 0,
                found: (error.observed as u32).cast_signed(),
                num_experts: u32::try_from(error.expected).unwrap_or(u32::MAX),
            }
            .into()),
            // Of the way to a server. What this build does not know is looked at again after a pause, too.
            _ => {
                let reason = self.lane.why_unanswered(idx, FailReason::Silent);
                self.lane.fail(idx, reason, last, &self.shared);
                self.wait_for_news(PAUSE)?;
                Ok(format!("{server} is out of reach: {error}"))
            }
        }
    }

    /// Waits for the graph. A server that is silent costs the deadline in the first layer that meets it;
    /// then its bit is set, so that the layers behind do not wait again.
    ///
    /// A server that shows life but has not answered the oldest call when its time is over has failed. That
    /// time begins anew with each call: a graph may have any number of them.
    fn wait_watching(&mut self, stream: &Stream) -> Result<(), GpuError> {
        let (now, bound) = (Instant::now(), self.bound());
        let until = match &mut self.replaying {
            Some(running) => *running.until.get_or_insert(now + bound),
            None => now + bound,
        };
        let mut watch = Watch::new(until.max(now + MARGIN));
        let deadline = self.shared.settings.deadline;
        let mut look_at = now + deadline.min(LOOK);
        let mut last = ErrorWord::default();
        loop {
            match stream.wait(look_at.min(watch.next())) {
                Err(GpuError::Deadline { .. }) => self.look(&mut watch)?,
                ended => return ended,
            }
            look_at = Instant::now() + (deadline / 4 + Duration::from_millis(1)).min(LOOK);
            let mut error = Vec::new();
            let from = self.memory.state.ptr().add(super::memory::ERROR_OFFSET);
            // SAFETY: the client's own state, of which kernels write this part once.
            unsafe {
                self.memory.fetch::<ErrorWord>(&self.side, from, &mut error, 1, self.bound())?;
            }
            let before = std::mem::replace(&mut last, error[0]);
            if let Some(bit) = silent_peer(&before, &last)
                && let Some(link) = self.lane.link(bit as usize)
            {
                // Layers behind it still send to the server, by a way that may have no more room.
                link.state.end_waits();
                AbortBit { word: self.memory.abort.clone(), bit }.set();
            }
        }
    }

    fn end_replay(&mut self) {
        if let Some(mut running) = self.replaying.take() {
            running.used.drain(..).for_each(Used::exit);
            self.spare_used = running.used;
        }
    }
}

/// The server that an error word blames for its silence. A kernel stores the word's parts one after the
/// other, so only one that two looks in a row agree on is whole.
fn silent_peer(before: &ErrorWord, now: &ErrorWord) -> Option<u32> {
    let is_silence = now.reason == REASON_TIMEOUT
        && [TAG_COMBINE_ROW, TAG_COMBINE_EMPTY, TAG_COMBINE_PATH].contains(&now.tag)
        && (now.peer as usize) < MAX_PEERS;
    (is_silence && before == now).then_some(now.peer)
}

/// What is known about a server that did not answer for `silence`, and where to look.
fn unanswered(server: &str, reason: FailReason, silence: Duration) -> String {
    let silence = silence.as_secs_f64();
    match reason {
        FailReason::Silent => format!(
            "{server} does not answer, without a sign of life for {silence:.1} s; check that its process runs \
             (`switchyard status`, its log) and the network to it"
        ),
        FailReason::Stuck => format!(
            "{server} does not answer, in {silence:.1} s in which it showed life; check its log and its GPU, and \
             whether its batches take longer than the client's limit on work"
        ),
        FailReason::Closed => {
            format!(
                "{server} did not answer: its connection was closed; check that its process runs"
            )
        }
        reason => format!("{server} did not answer ({})", reason.name()),
    }
}

const MAX_ATTEMPTS: u32 = 100;
const PAUSE: Duration = Duration::from_millis(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_does_not_answer_is_told_with_how_long_and_where_to_look() {
        let told = |reason| unanswered("beta", reason, Duration::from_millis(2300));
        for (reason, parts) in [
            (FailReason::Silent, ["without a sign of life for 2.3 s", "`switchyard status`"]),
            (FailReason::Stuck, ["in 2.3 s in which it showed life", "check its log"]),
        ] {
            let text = told(reason);
            assert!(text.starts_with("beta does not answer"), "{text}");
            assert!(parts.iter().all(|part| text.contains(part)), "{text}");
            assert!(!text.contains("closed"), "{text}");
        }
        assert!(told(FailReason::Closed).contains("was closed"));
        assert_eq!(told(FailReason::Left), "beta did not answer (left)");
    }

    #[test]
    fn a_server_is_blamed_by_a_whole_error_word_only() {
        // As a kernel fills it: first the tag, the rest in any order.
        let none = ErrorWord::default();
        let claimed = ErrorWord { tag: TAG_COMBINE_ROW, ..none };
        let torn = ErrorWord { reason: REASON_TIMEOUT, ..claimed };
        let whole = ErrorWord { peer: 5, expected: 9, ..torn };
        for (before, now) in [(none, claimed), (claimed, torn), (torn, whole), (none, whole)] {
            assert_eq!(silent_peer(&before, &now), None, "{before:?} {now:?}");
        }
        for tag in [TAG_COMBINE_ROW, TAG_COMBINE_EMPTY, TAG_COMBINE_PATH] {
            let whole = ErrorWord { tag, ..whole };
            assert_eq!(silent_peer(&whole, &whole), Some(5), "tag {tag}");
        }
        let refused = ErrorWord { tag: TAG_REFUSED, ..whole };
        assert_eq!(silent_peer(&refused, &refused), None);
        let wild = ErrorWord { peer: 32, ..whole };
        assert_eq!(silent_peer(&wild, &wild), None);
    }
}
