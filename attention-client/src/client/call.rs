//! One call: what was asked, what is where, what is answered, and what to do about failures.

use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use p2p_core::wait::wait_until;
use protocol::{CombineExpect, ErrorCode, Response, decode_response};

use super::builder::OnMissingExpert;
use super::error::ClientError;
use super::lane::{Lane, LinkFault};
use super::link::ABANDONED;
use super::plan::{Pair, Plan, PlannedFrame, Reluctance};
use super::sabotage;
use super::shared::Shared;
use super::timing::LayerTiming;
use crate::metrics::FailReason;
use crate::placement::Server;

/// State of the call that a lane works on. Buffers are kept from call to call.
#[derive(Debug, Default)]
pub(crate) struct Call {
    pub layer: u32,
    pub layer_idx: usize,
    pub num_tokens: usize,
    /// All pairs of the call, ascending by token.
    pub pairs: Vec<Pair>,
    pub plan: Plan,
    /// In the order in which answers are summed: first sending by server and part, then re-sendings.
    pub frames: Vec<Frame>,
    /// Pairs that wait for a live replica.
    pub orphans: Vec<Pair>,
    pub timing: LayerTiming,
    /// Pairs to be sent again.
    retry: Vec<Pair>,
    /// Pairs left out.
    missing: Vec<Pair>,
    /// By [`Server::idx`].
    trouble: Vec<Trouble>,
    batch: Vec<Pair>,
    contacted: Vec<u64>,
    /// The first of `frames` that is not yet summed.
    next_sum: usize,
    pairs_answered: u64,
    /// Since when there have been orphans without an answer for anybody in between.
    orphans_since: Option<Instant>,
    /// When pairs were last assigned to servers.
    planned_at: Option<Instant>,
    /// Last sign of life of the first failed server whose tokens are not all sent again.
    stall_from: Option<Instant>,
    rounds: u32,
    bad_frames: u32,
    fatal: Option<ClientError>,
    watched_at: Option<Instant>,
}

/// One frame of a call.
#[derive(Debug)]
pub(crate) struct Frame {
    pub plan: PlannedFrame,
    pub epoch: u64,
    pub sequence: u64,
    pub state: FrameState,
}

#[derive(Debug)]
pub(crate) enum FrameState {
    /// Waits for credit.
    Queued,
    /// With the server.
    Sent,
    /// Rows, waiting for their turn to be summed.
    Answered(Vec<f32>),
    /// Summed, or given up in favour of a later frame.
    Done,
}

/// What a server did to this call.
#[derive(Debug, Clone, Copy, Default)]
struct Trouble {
    failures: u32,
    refusals: u32,
    not_before: Option<Instant>,
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
        self.trouble.clear();
        self.contacted.clear();
        self.next_sum = 0;
        self.pairs_answered = 0;
        self.orphans_since = None;
        self.planned_at = None;
        self.stall_from = None;
        self.rounds = 0;
        self.bad_frames = 0;
        self.fatal = None;
        self.watched_at = None;
    }

    /// A frame that a failed server had.
    pub fn frame_failed(&mut self, frame: u32, server: &Server) {
        self.timing.resent_pairs += u64::from(self.frames[frame as usize].plan.num_entries);
        self.frame_to_retry(frame, server);
    }

    /// A frame that its server has not got, or that nobody waits for.
    pub fn frame_unsent(&mut self, frame: u32, server: &Server) {
        self.frame_to_retry(frame, server);
    }

    fn frame_to_retry(&mut self, frame: u32, server: &Server) {
        let frame = &mut self.frames[frame as usize];
        frame.state = FrameState::Done;
        release_load(server, frame.plan.num_entries);
        let first = frame.plan.first_token as usize;
        for token in &self.plan.tokens[first..first + frame.plan.num_tokens as usize] {
            let begin = token.entry_begin as usize;
            for entry in &self.plan.entries[begin..begin + token.entry_count as usize] {
                self.retry.push(Pair {
                    token: token.token,
                    expert: entry.expert,
                    weight: entry.weight,
                });
            }
        }
        if sabotage::asked(sabotage::LOSE_PAIR) && self.retry.pop().is_some() {
            self.pairs_answered += 1;
        }
    }

    /// A link failed with frames unanswered.
    pub fn link_failed(&mut self, server_idx: usize, last_life: Instant) {
        self.timing.failovers += 1;
        let trouble = self.trouble_of(server_idx);
        trouble.failures += 1;
        if let Some(excess) = trouble.failures.checked_sub(FREE_FAILURES) {
            trouble.not_before = Some(Instant::now() + FAILURE_PAUSE * (1 << excess.min(4)));
        }
        self.stall_from = Some(self.stall_from.map_or(last_life, |from| from.min(last_life)));
    }

    fn refused(&mut self, server_idx: usize, now: Instant) {
        let trouble = self.trouble_of(server_idx);
        trouble.refusals += 1;
        trouble.not_before = Some(now + FIRST_PAUSE * (1 << trouble.refusals.min(10)));
    }

    fn trouble_of(&mut self, server_idx: usize) -> &mut Trouble {
        if self.trouble.len() <= server_idx {
            self.trouble.resize(server_idx + 1, Trouble::default());
        }
        &mut self.trouble[server_idx]
    }

    /// Whether every pair is answered or left out.
    fn is_complete(&self) -> bool {
        self.retry.is_empty() && self.orphans.is_empty() && self.next_sum == self.frames.len()
    }

    /// When a server that refused or failed may be asked again, for orphans.
    fn next_retry(&self, now: Instant) -> Option<Instant> {
        self.trouble.iter().filter_map(|t| t.not_before).filter(|at| *at > now).min()
    }

    /// Whether a pause has ended since pairs were assigned last, or there is none.
    fn may_retry(&self, now: Instant) -> bool {
        let is_news = |at: Instant| at <= now && self.planned_at.is_none_or(|last| last < at);
        self.trouble.iter().filter_map(|t| t.not_before).any(is_news)
            || self.next_retry(now).is_none()
    }
}

impl Lane {
    /// Plans and publishes what there is credit for.
    pub fn begin_call(&mut self, shared: &Shared, x: &[f32]) -> Result<(), ClientError> {
        self.sync(shared);
        // Answers to abandoned calls make room in the rings.
        self.take_answers(shared);
        self.plan_batch(shared, Batch::First)?;
        self.pump(shared, x)
    }

    /// Waits for all answers and sums them into `out`.
    pub fn finish_call(
        &mut self,
        shared: &Shared,
        x: &[f32],
        out: &mut [f32],
    ) -> Result<(), ClientError> {
        let start = Instant::now();
        out.fill(0.0);
        let mut combine_ns = 0;
        loop {
            let helps = self.sync(shared);
            let answers_start = Instant::now();
            if self.take_answers(shared) {
                self.sum_answers(shared.geometry.hidden(), out);
                combine_ns += elapsed_ns(answers_start);
            }
            if let Some(error) = self.call.fatal.take() {
                return Err(error);
            }
            let now = Instant::now();
            self.fail_closed(shared);
            self.check_life(shared, now);
            self.replan(shared, x, helps, now)?;
            self.pump(shared, x)?;
            self.sum_answers(shared.geometry.hidden(), out);
            if self.call.is_complete() {
                break;
            }
            if !self.call.retry.is_empty() {
                continue;
            }
            self.wait_for_news(shared, now)?;
        }
        let renormalise_start = Instant::now();
        self.call.renormalise(shared.geometry.hidden(), out);
        combine_ns += elapsed_ns(renormalise_start);
        self.call.timing.combine_ns = combine_ns;
        self.call.timing.wait_ns = elapsed_ns(start).saturating_sub(combine_ns);
        self.check_accounts(shared)
    }

    /// Takes all answers that have arrived. Says whether there were any for this call.
    fn take_answers(&mut self, shared: &Shared) -> bool {
        let mut any = false;
        for idx in 0..self.links.len() {
            match self.take_answers_of(idx, shared) {
                Ok(found) => any |= found,
                Err(fault) => self.fail_link(idx, fault, shared),
            }
        }
        any
    }

    pub fn take_answers_of(&mut self, idx: usize, shared: &Shared) -> Result<bool, LinkFault> {
        let Some(link) = self.links[idx].as_deref_mut() else { return Ok(false) };
        let mut any = false;
        // A peer that publishes faster than this loop reads could keep it here for ever.
        for _ in 0..MAX_ANSWERS_AT_ONCE {
            let Some(rx) = link.channel.try_next()? else { break };
            let view = link.channel.view(&rx);
            let mut answered = None;
            for (position, pending) in link.pending.iter().enumerate() {
                let mut expect = CombineExpect {
                    client_id: self.client_id,
                    generation: link.generation,
                    sequence: pending.sequence,
                    layer: pending.layer,
                    frame_idx: pending.frame_idx,
                    num_tokens: pending.num_tokens as usize,
                    hidden: shared.geometry.hidden(),
                    dtype: shared.geometry.response_dtype(),
                };
                if sabotage::asked(sabotage::SKIP_STALE_CHECK)
                    && let Ok(id) = protocol::response_id(view, &mut self.scratch)
                {
                    expect.sequence = id.sequence;
                    expect.generation = id.generation;
                    expect.layer = id.layer;
                    expect.frame_idx = id.frame_idx;
                }
                match decode_response(view, &expect, &mut self.scratch) {
                    Err(error) if error.is_stale() => continue,
                    Err(error) => return Err(LinkFault::new(FailReason::Invalid, error)),
                    Ok(Response::Rows(mut rows)) => {
                        if pending.frame != ABANDONED {
                            let times = rows.server_times();
                            let timing = &mut self.call.timing;
                            timing.server_queue_ns =
                                timing.server_queue_ns.max(times.queue_ns.into());
                            timing.server_compute_ns =
                                timing.server_compute_ns.max(times.compute_ns.into());
                            let mut buffer = self.buffers.pop().unwrap_or_default();
                            buffer.resize(rows.num_rows() * rows.hidden(), 0.0);
                            if let Err(error) = rows.read_rows_f32(0..rows.num_rows(), &mut buffer)
                            {
                                self.buffers.push(buffer);
                                return Err(LinkFault::new(FailReason::Invalid, error));
                            }
                            self.call.answered(pending.frame, buffer, &link.server);
                            any = true;
                        }
                        let bytes = shared.geometry.response_bytes(pending.num_tokens as usize);
                        shared.metrics.bytes_in.inc_by(bytes as u64);
                    }
                    Ok(Response::Error(error)) => {
                        shared.metrics.count_error_frame(error.code);
                        link.server.note_error(error);
                        if pending.frame != ABANDONED {
                            let refusal = (error.code, error.message);
                            self.call.refused_by(pending.frame, &link.server, refusal);
                            any = true;
                        }
                    }
                }
                answered = Some(position);
                break;
            }
            fail::fail_point!("client::after_response_before_credit");
            shared.metrics.frames_in.inc();
            match answered {
                Some(position) => link.remove_pending(position, Instant::now()),
                None => {
                    shared.metrics.stale_responses.inc();
                    tracing::debug!(
                        server = link.server.name(),
                        generation = link.generation,
                        "dropped a response that answers nothing open"
                    );
                }
            }
            link.owe_credit()?;
        }
        Ok(any)
    }

    /// Adds answered frames to `out`, in order, as far as they are there.
    fn sum_answers(&mut self, hidden: usize, out: &mut [f32]) {
        let first_sequence = self.call.frames.first().map(|frame| frame.sequence);
        while let Some(frame) = self.call.frames.get_mut(self.call.next_sum) {
            match std::mem::replace(&mut frame.state, FrameState::Done) {
                FrameState::Done => {}
                FrameState::Answered(buffer) => {
                    let first = frame.plan.first_token as usize;
                    let tokens =
                        &self.call.plan.tokens[first..first + frame.plan.num_tokens as usize];
                    for (token, row) in tokens.iter().zip(buffer.chunks_exact(hidden)) {
                        let begin = token.token as usize * hidden;
                        let sum = &mut out[begin..begin + hidden];
                        sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
                        if first_sequence != Some(frame.sequence)
                            && sabotage::asked(sabotage::DOUBLE_COUNT)
                        {
                            sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
                        }
                    }
                    self.buffers.push(buffer);
                }
                open => {
                    frame.state = open;
                    return;
                }
            }
            self.call.next_sum += 1;
        }
    }

    /// Fails links that show no sign of life, or do not get done.
    fn check_life(&mut self, shared: &Shared, now: Instant) {
        let deadline = shared.settings.deadline;
        // Whoever did not look cannot tell silence from an absence of his own.
        let absent = self.call.watched_at.is_none_or(|at| now - at > deadline / 2);
        self.call.watched_at = Some(now);
        for idx in 0..self.links.len() {
            let Some(link) = self.links[idx].as_deref_mut() else { continue };
            if !link.is_active() {
                continue;
            }
            link.observe_life(now);
            if absent && let Some(grace) = now.checked_sub(deadline / 2) {
                link.last_life = link.last_life.max(grace);
            }
            let fault = if now.duration_since(link.last_life) > deadline {
                let detail =
                    format!("{} showed no sign of life for {deadline:?}", link.server.name());
                LinkFault::new(FailReason::Silent, detail)
            } else if now.duration_since(link.last_step) > shared.settings.work_limit {
                let limit = shared.settings.work_limit;
                let detail =
                    format!("{} works but gave no answer in {limit:?}", link.server.name());
                LinkFault::new(FailReason::Stuck, detail)
            } else {
                continue;
            };
            self.fail_link(idx, fault, shared);
        }
    }

    /// Sends pairs of failed frames, and orphans for which there may be a replica now, elsewhere.
    fn replan(
        &mut self,
        shared: &Shared,
        x: &[f32],
        helps: bool,
        now: Instant,
    ) -> Result<(), ClientError> {
        // Orphans also get their chance when the pause of a server in trouble is over.
        let orphans_may_go = !self.call.orphans.is_empty() && (helps || self.call.may_retry(now));
        if !self.call.retry.is_empty() || orphans_may_go {
            fail::fail_point!("client::before_resend");
            self.plan_batch(shared, Batch::Again)?;
            self.pump(shared, x)?;
        }
        if self.call.orphans.is_empty() {
            if self.call.retry.is_empty()
                && let Some(from) = self.call.stall_from.take()
            {
                self.call.timing.stall_ns += elapsed_ns(from);
            }
            return Ok(());
        }
        let since = *self.call.orphans_since.get_or_insert(now);
        let waited = now.duration_since(since);
        let may_drop = shared.settings.on_missing == OnMissingExpert::DropAndRenormalise;
        let is_vain = may_drop && self.vain_wait_at == Some(self.seen_news());
        if waited < shared.settings.replica_wait && !is_vain {
            return Ok(());
        }
        match shared.settings.on_missing {
            OnMissingExpert::Fail => Err(self.no_replica(waited)),
            OnMissingExpert::DropAndRenormalise => {
                self.vain_wait_at = Some(self.seen_news());
                let num_missing = self.call.orphans.len() as u64;
                self.call.timing.missing_pairs += num_missing;
                shared.metrics.missing_pairs.inc_by(num_missing);
                let Call { missing, orphans, .. } = &mut self.call;
                missing.append(orphans);
                self.call.orphans_since = None;
                Ok(())
            }
        }
    }

    fn no_replica(&self, waited: Duration) -> ClientError {
        let Some(pair) = self.call.orphans.first() else {
            return ClientError::Accounting { layer: self.call.layer, found: 0, expected: 0 };
        };
        ClientError::NoReplica {
            layer: self.call.layer,
            expert: pair.expert,
            waited,
            detail: self.routing.describe_replicas(self.call.layer_idx, pair.expert),
        }
    }

    /// Turns pairs into frames in the queues of links.
    fn plan_batch(&mut self, shared: &Shared, batch: Batch) -> Result<(), ClientError> {
        let now = Instant::now();
        self.call.planned_at = Some(now);
        let sequence = self.next_sequence();
        let mut pairs = std::mem::take(&mut self.call.batch);
        pairs.clear();
        match batch {
            Batch::First => pairs.extend_from_slice(&self.call.pairs),
            Batch::Again => {
                self.call.rounds += u32::from(!self.call.retry.is_empty());
                pairs.append(&mut self.call.retry);
                pairs.append(&mut self.call.orphans);
                pairs.sort_unstable_by_key(|pair| (pair.token, pair.expert));
            }
        }
        if self.call.rounds > MAX_ROUNDS {
            return Err(ClientError::Attempts {
                layer: self.call.layer,
                expert: pairs.first().map_or(0, |pair| pair.expert),
                attempts: self.call.rounds,
                last: pairs.first().map_or_else(String::new, |pair| {
                    self.routing.describe_replicas(self.call.layer_idx, pair.expert)
                }),
            });
        }
        let mut plan = std::mem::take(&mut self.call.plan);
        plan.assign(
            &self.routing,
            self.call.layer_idx,
            &pairs,
            shared.geometry.max_tokens(),
            |rank| self.reluctance(rank, now),
        );
        self.call.batch = pairs;
        for planned in &plan.frames {
            let server = &self.routing.servers[planned.rank as usize];
            server.outstanding.fetch_add(planned.num_entries.into(), Ordering::Relaxed);
            if !self.call.contacted.contains(&server.uid) {
                self.call.contacted.push(server.uid);
                self.call.timing.num_servers += 1;
            }
            let frame = self.call.frames.len() as u32;
            self.call.frames.push(Frame {
                plan: *planned,
                epoch: self.routing.epoch,
                sequence,
                state: FrameState::Queued,
            });
            if let Some(link) = self.links[server.idx].as_deref_mut() {
                link.enqueue(frame, now);
            }
        }
        self.call.orphans.extend_from_slice(&plan.orphans);
        self.call.plan = plan;
        self.reserve_buffers(shared.geometry.hidden());
        Ok(())
    }

    /// Whether the call may use a server, and how gladly.
    fn reluctance(&self, rank: u32, now: Instant) -> Option<Reluctance> {
        let server = &self.routing.servers[rank as usize];
        self.live_link(server)?;
        let trouble = self.call.trouble.get(server.idx).copied().unwrap_or_default();
        if trouble.not_before.is_some_and(|at| at > now) {
            return None;
        }
        Some(Reluctance {
            failures: trouble.failures + trouble.refusals,
            silenced: server.silenced.load(Ordering::Relaxed),
        })
    }

    /// Makes row buffers for all frames of the call beforehand, unless that would be a lot: how many
    /// are needed depends on the order of the answers, and memory should not.
    fn reserve_buffers(&mut self, hidden: usize) {
        let frames = self.call.frames.iter().map(|frame| frame.plan.num_tokens as usize);
        let (num_frames, largest) = (frames.len(), frames.max().unwrap_or(0));
        if num_frames.saturating_mul(largest * hidden) > MAX_RESERVED_VALUES {
            return;
        }
        if self.buffers.len() < num_frames {
            self.buffers.resize_with(num_frames, Vec::new);
        }
        for buffer in &mut self.buffers {
            buffer.reserve((largest * hidden).saturating_sub(buffer.len()));
        }
    }

    /// Sleeps until an answer, credit, news of the control side, or the next thing to check.
    fn wait_for_news(&mut self, shared: &Shared, now: Instant) -> Result<(), ClientError> {
        let mut until = now + shared.settings.tick();
        if let Some(at) = self.call.next_retry(now) {
            until = until.min(at);
        }
        let (links, news) = (&self.links, &self.news);
        let seen = self.seen_news();
        let active = || links.iter().flatten().filter(|link| link.is_active());
        // A sleep that ends without an answer may have been ended by a connection that closed.
        let polls_asleep = Cell::new(0);
        let may_be_closed = || {
            polls_asleep.set(polls_asleep.get() + u32::from(polls_asleep.get() > 0));
            polls_asleep.get() > 2
        };
        let found = wait_until(
            &self.wait,
            shared.settings.spin,
            until,
            || {
                let is_due = news.count() != seen || active().any(|link| link.has_work());
                let is_due = is_due || (may_be_closed() && active().any(|link| link.note_closed()));
                is_due.then_some(())
            },
            |on| {
                polls_asleep.set(u32::from(on));
                active().for_each(
                    |link| {
                        if on { link.channel.arm() } else { link.channel.disarm() }
                    },
                );
            },
        );
        found.map(|_| ()).map_err(|source| ClientError::System { op: "wait for answers", source })
    }

    /// Every pair counts exactly once. Cannot fail unless this file is wrong.
    fn check_accounts(&mut self, shared: &Shared) -> Result<(), ClientError> {
        let found = self.call.pairs_answered + self.call.missing.len() as u64;
        let expected = self.call.pairs.len() as u64;
        if found == expected {
            return Ok(());
        }
        let counter =
            if found < expected { &shared.metrics.lost } else { &shared.metrics.duplicated };
        counter.inc();
        tracing::error!(layer = self.call.layer, found, expected, "pairs do not add up");
        Err(ClientError::Accounting { layer: self.call.layer, found, expected })
    }
}

impl Call {
    fn answered(&mut self, frame: u32, buffer: Vec<f32>, server: &Server) {
        let frame = &mut self.frames[frame as usize];
        self.pairs_answered += u64::from(frame.plan.num_entries);
        self.orphans_since = None;
        frame.state = FrameState::Answered(buffer);
        release_load(server, frame.plan.num_entries);
    }

    fn refused_by(&mut self, frame: u32, server: &Server, (code, message): (ErrorCode, &str)) {
        let bad_frame = code == ErrorCode::BadFrame;
        self.bad_frames += u32::from(bad_frame);
        // A frame may have been damaged on its way: once more cannot hurt.
        if code.is_retryable() || (bad_frame && self.bad_frames == 1) {
            self.timing.resent_pairs += u64::from(self.frames[frame as usize].plan.num_entries);
            self.frame_to_retry(frame, server);
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

    /// Scales each token from which experts were left out, so that the weights that count sum up to
    /// what all weights did. Outputs are linear in the weights, so this can be done at the end.
    fn renormalise(&mut self, hidden: usize, out: &mut [f32]) {
        self.missing.sort_unstable_by_key(|pair| pair.token);
        for group in self.missing.chunk_by(|a, b| a.token == b.token) {
            let token = group[0].token;
            let begin = self.pairs.partition_point(|pair| pair.token < token);
            let of_token = self.pairs[begin..].iter().take_while(|pair| pair.token == token);
            let total: f64 = of_token.map(|pair| f64::from(pair.weight)).sum();
            let left = total - group.iter().map(|pair| f64::from(pair.weight)).sum::<f64>();
            let factor = total / left;
            // Nothing is left, or nothing that could be scaled up: the sum stays as it is.
            if factor.is_finite() && left.abs() > 1e-6 * total.abs() {
                let begin = token as usize * hidden;
                let row = &mut out[begin..begin + hidden];
                row.iter_mut().for_each(|value| *value = (f64::from(*value) * factor) as f32);
            }
        }
    }
}

enum Batch {
    First,
    Again,
}

fn release_load(server: &Server, num_entries: u32) {
    server.outstanding.fetch_sub(num_entries.into(), Ordering::Relaxed);
}

pub(crate) fn elapsed_ns(start: Instant) -> u64 {
    start.elapsed().as_nanos().try_into().unwrap_or(u64::MAX)
}

/// Pause before a server that refused is asked again, doubled with every refusal.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
/// Failed links to one server until a call pauses before it asks it again.
const FREE_FAILURES: u32 = 3;
/// The first of these pauses, doubled with every failure up to 16 times.
const FAILURE_PAUSE: Duration = Duration::from_millis(20);
/// Times that a call sends tokens again before it gives up: a bound for what no fault explains.
const MAX_ROUNDS: u32 = 1000;
const MAX_ANSWERS_AT_ONCE: usize = 64;
/// 64 MiB.
const MAX_RESERVED_VALUES: usize = 16 << 20;
