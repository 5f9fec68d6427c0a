//! Replays of graphs into which a caller recorded calls.
//!
//! A graph's kernels read the client's tables. The client brings them up to date before each replay and never changes
//! them during one. A failure during a replay leaves parts missing in whatever layer it hits. The client then removes
//! the failed servers, and the caller replays the graph again: experts keep no state.

use std::time::{Duration, Instant};

use kernels::abi::{
    ErrorWord, MAX_PEERS, REASON_TIMEOUT, TAG_BAD_EXPERT, TAG_COMBINE_EMPTY, TAG_COMBINE_PATH,
    TAG_COMBINE_ROW, TAG_NO_REPLICA, TAG_NONE, TAG_NUM_TOKENS, TAG_REFUSED,
};
use kernels::gpu::{GpuError, Stream};

use super::DeviceError;
use super::calls::{Phase, Replay};
use super::executor::{Executor, MARGIN};
use super::link::AbortBit;
use super::memory::ERROR_OFFSET;
use super::peers::LinkUse;
use super::polling::Running;
use super::watch::{LOOK, Watch};
use crate::error::ClientError;
use crate::metrics::FailReason;

/// Result of a replay.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReplayOutcome {
    /// Every output is complete.
    Complete,
    /// Outputs lack parts: replay again. Servers that failed are removed already.
    Incomplete {
        /// The first failure, in words.
        reason: String,
    },
}

/// Cost of a [`DeviceClient::replay`](super::DeviceClient::replay).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReplayReport {
    /// Replays, 1 without failures.
    pub attempts: u32,
    /// Time from the start of the first replay to the start of the last, 0 without failures.
    pub stall_ns: u64,
}

/// Starts and finishes replays.
#[derive(Debug, Default)]
pub(super) struct Replays {
    /// An empty list for the uses of the next replay, so that replays allocate nothing.
    spare: Vec<LinkUse>,
}

impl Replays {
    /// See [`DeviceClient::begin_replay`](super::DeviceClient::begin_replay).
    pub fn begin(&mut self, executor: &mut Executor, stream: &Stream) -> Result<(), DeviceError> {
        executor.check_device(stream)?;
        if executor.replay.is_some() {
            return Err(DeviceError::Replaying);
        }
        // Tables change in the order of this stream, and abandoned calls are finished on it.
        if let Some(expected) = executor.calls.other_stream(stream.raw()) {
            return Err(DeviceError::Stream { found: stream.raw(), expected });
        }
        executor.finish_abandoned(stream)?;
        if executor.calls.num_in(Phase::Dispatched) > 0 {
            let num_frames = executor.launcher.geometry.num_frames;
            return Err(DeviceError::Outstanding { num_frames });
        }
        let serial = executor.calls.draw_serial();
        let mut uses = std::mem::take(&mut self.spare);
        executor.enter(&mut uses);
        executor.launcher.expect_work();
        executor.replay = Some(Replay {
            serial,
            stream: stream.raw(),
            uses,
            started: Instant::now(),
            until: None,
        });
        let begun = executor.refresh_tables(stream).and_then(|()| {
            if executor.calls.num_outstanding() > 0 {
                // Errors of calls that are not finished are in the reports of those calls.
                executor.launcher.memory.clear_error(stream)?;
            }
            Ok(())
        });
        // An upload of tables, and of the first words of new slots, may still run. The replay stays until it ends.
        if begun.is_err() {
            let until = Instant::now() + executor.bound();
            if executor.wait_until(stream, until).is_ok() {
                self.end(executor);
            }
        }
        begun
    }

    /// See [`DeviceClient::finish_replay`](super::DeviceClient::finish_replay).
    pub fn finish(
        &mut self,
        executor: &mut Executor,
        stream: &Stream,
    ) -> Result<ReplayOutcome, DeviceError> {
        if let Some(replay) = &executor.replay {
            executor.check_stream(stream, replay.stream)?;
        }
        executor.check_device(stream)?;
        // Replays report into the memory of the first recorded call.
        let call = executor.launcher.geometry.num_frames as usize;
        executor.launcher.memory.report(stream, call)?;
        let seen = match executor.replay.as_ref().map(|replay| replay.started) {
            Some(started) => Some((started, executor.poll(stream, Running::Replay, started)?)),
            None => None,
        };
        // After an error the kernels may still run, so the servers stay in use.
        executor.wait_for_replay(stream)?;
        let last = executor.calls.last();
        if executor.replay.is_some() {
            // All calls are on this stream, or have ended.
            executor.calls.note_idle(last + 1);
        }
        let error = executor.launcher.memory.status(call).error;
        if error.tag == TAG_NONE {
            let noted = match seen {
                Some((started, seen)) => executor.note_latency(Running::Replay, started, seen),
                None => Ok(()),
            };
            self.end(executor);
            return noted.map(|()| ReplayOutcome::Complete);
        }
        let result = executor.fail_lost(last).and_then(|()| self.judge(executor, &error, last));
        executor.launcher.memory.clear_error(stream)?;
        // Must be done before a dispatch on another stream can report an error.
        executor.wait_until(stream, Instant::now() + executor.bound())?;
        self.end(executor);
        executor.sync();
        result.map(|reason| ReplayOutcome::Incomplete { reason })
    }

    fn end(&mut self, executor: &mut Executor) {
        if let Some(uses) = executor.end_replay() {
            self.spare = uses;
        }
    }

    /// Decides what an error in a replay means: a reason to replay again, or an error.
    fn judge(
        &mut self,
        executor: &mut Executor,
        error: &ErrorWord,
        last: u64,
    ) -> Result<String, DeviceError> {
        let idx = error.peer as usize;
        let peers = &mut executor.peers;
        let server = peers.server_name(idx).unwrap_or("a server that is gone").to_owned();
        match error.tag {
            TAG_COMBINE_ROW | TAG_COMBINE_EMPTY | TAG_COMBINE_PATH => {
                let reason = peers.why_unanswered(idx, FailReason::Silent);
                peers.fail(idx, reason, last);
                let silence = match reason {
                    FailReason::Stuck => executor.bound(),
                    _ => executor.shared.settings.deadline,
                };
                Ok(format!("{}: {error}", unanswered(&server, reason, silence)))
            }
            TAG_REFUSED => {
                let code = protocol::ErrorCode::from_u32((error.observed & 0xffff) as u32);
                executor.shared.metrics.count_error_frame(code);
                if !code.is_retryable() {
                    let status = error.observed;
                    return Err(DeviceError::ReplayRefused { server, code, status });
                }
                peers.avoid(idx, Instant::now() + BACKOFF);
                peers.wait_for_events(BACKOFF)?;
                Ok(format!("{server} refused a frame: {}", code.name()))
            }
            TAG_NO_REPLICA => {
                // A new server may need a place that the graph used.
                self.end(executor);
                let expert = error.observed as u32;
                let start = Instant::now();
                let limit = executor.shared.settings.replica_wait;
                loop {
                    executor.sync();
                    let peers = &executor.peers;
                    let Some(layer_idx) = peers.first_orphan(expert) else { break };
                    let waited = start.elapsed();
                    if waited >= limit || peers.routing.is_hopeless(layer_idx, expert) {
                        return Err(peers.no_replica(layer_idx, expert, waited).into());
                    }
                    peers.wait_for_events(limit - waited)?;
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
            // An error of the path to a server, or one that this build does not know: retry after a backoff.
            _ => {
                let reason = peers.why_unanswered(idx, FailReason::Silent);
                peers.fail(idx, reason, last);
                peers.wait_for_events(BACKOFF)?;
                Ok(format!("{server} is out of reach: {error}"))
            }
        }
    }
}

/// Waits of a replay, and removal of failed servers.
impl Executor {
    /// Removes all servers that kernels gave up. The error word names only one of them.
    fn fail_lost(&mut self, last: u64) -> Result<(), DeviceError> {
        let lost = self.state()?.lost;
        for idx in (0..lost.len()).filter(|idx| lost[*idx] != 0) {
            if self.peers.peer_of(idx, &self.tables).is_none() {
                continue;
            }
            let reason = self.peers.why_unanswered(idx, FailReason::Silent);
            self.peers.fail(idx, reason, last);
        }
        Ok(())
    }

    /// Waits for the graph. A silent server costs the deadline in the first layer that waits for it. Then its bit is
    /// set, so that later layers do not wait again.
    ///
    /// A server that shows life but has not answered the oldest call within the limit has failed. The time starts
    /// anew with each call: a graph may have any number of calls.
    fn wait_for_replay(&mut self, stream: &Stream) -> Result<(), GpuError> {
        let (now, bound) = (Instant::now(), self.bound());
        let until = match &mut self.replay {
            Some(replay) => *replay.until.get_or_insert(now + bound),
            None => now + bound,
        };
        let mut watch = Watch::new(until.max(now + MARGIN));
        let deadline = self.shared.settings.deadline;
        let mut look_at = now + deadline.min(LOOK);
        let mut last = ErrorWord::default();
        loop {
            match stream.wait(look_at.min(watch.next())) {
                Err(GpuError::Deadline { .. }) => watch.look(self)?,
                ended => return ended,
            }
            look_at = Instant::now() + (deadline / 4 + Duration::from_millis(1)).min(LOOK);
            let mut error = Vec::new();
            let memory = &self.launcher.memory;
            let from = memory.state.ptr().add(ERROR_OFFSET);
            // SAFETY: the client's own state. Kernels write this part of it once.
            unsafe {
                memory.fetch::<ErrorWord>(&self.side, from, &mut error, 1, self.bound())?;
            }
            let before = std::mem::replace(&mut last, error[0]);
            if let Some(bit) = silent_peer(&before, &last)
                && let Some(peer) = self.peers.peer(bit as usize)
            {
                // Later layers still send to the server, over a path whose queue may be full.
                peer.slots.end_waits();
                AbortBit { word: memory.abort.clone(), bit }.set();
            }
        }
    }
}

/// The server that an error word names as silent. A kernel stores the parts of the word one after the other, so the
/// word counts only if two looks in a row agree.
fn silent_peer(before: &ErrorWord, now: &ErrorWord) -> Option<u32> {
    let is_silence = now.reason == REASON_TIMEOUT
        && [TAG_COMBINE_ROW, TAG_COMBINE_EMPTY, TAG_COMBINE_PATH].contains(&now.tag)
        && (now.peer as usize) < MAX_PEERS;
    (is_silence && before == now).then_some(now.peer)
}

/// Describes a server that did not answer for `silence`, and says where to look.
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

const BACKOFF: Duration = Duration::from_millis(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unanswered_replay_says_how_long_and_where_to_look() {
        let describe = |reason| unanswered("beta", reason, Duration::from_millis(2300));
        for (reason, parts) in [
            (FailReason::Silent, ["without a sign of life for 2.3 s", "`switchyard status`"]),
            (FailReason::Stuck, ["in 2.3 s in which it showed life", "check its log"]),
        ] {
            let text = describe(reason);
            assert!(text.starts_with("beta does not answer"), "{text}");
            assert!(parts.iter().all(|part| text.contains(part)), "{text}");
            assert!(!text.contains("closed"), "{text}");
        }
        assert!(describe(FailReason::Closed).contains("was closed"));
        assert_eq!(describe(FailReason::Left), "beta did not answer (left)");
    }

    #[test]
    fn only_a_complete_error_word_names_a_server() {
        // A kernel stores the tag first, then the rest in any order.
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
