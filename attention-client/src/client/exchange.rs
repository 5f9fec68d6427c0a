//! How a lane carries a call out: it sends frames, reads and sums answers, and resends after failures.

use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use p2p_core::wait::wait_until;
use protocol::{CombineExpect, Response, decode_response};

use super::Cancel;
use super::call::{Call, Frame, FrameState, HedgeRole};
use super::lane::{Lane, LinkFault};
use super::plan::{Penalty, PlannedFrame};
#[cfg(feature = "failpoints")]
use super::sabotage;
use super::trace;
use crate::error::ClientError;
use crate::fail_point;
use crate::fleet::link::ABANDONED;
use crate::fleet::settings::OnMissingExpert;
use crate::fleet::shared::Shared;
use crate::metrics::FailReason;
use crate::timing::elapsed_ns;

impl Lane {
    /// Plans the call and publishes its frames, as far as there is credit.
    pub fn begin_call(&mut self, shared: &Shared, x: &[f32]) -> Result<(), ClientError> {
        self.sync(shared);
        // Answers to abandoned calls hold frames of the rings.
        self.take_answers(shared);
        self.plan_batch(shared, Batch::First)?;
        self.pump(shared, x)
    }

    /// Waits for all answers and sums them into `out`. Asks `cancelled` after each sleep.
    pub fn finish_call(
        &mut self,
        shared: &Shared,
        x: &[f32],
        out: &mut [f32],
        cancelled: Cancel<'_>,
    ) -> Result<(), ClientError> {
        let start = Instant::now();
        out.fill(0.0);
        let mut combine_ns = 0;
        loop {
            let helps = self.sync(shared);
            let answers_start = Instant::now();
            if self.take_answers(shared) {
                self.sum_answers(shared, out);
                combine_ns += elapsed_ns(answers_start);
            }
            if let Some(error) = self.call.fatal.take() {
                return Err(error);
            }
            let now = Instant::now();
            self.fail_closed(shared);
            self.check_life(shared, now);
            self.hedge_late_frames(shared, now);
            self.replan(shared, x, helps, now)?;
            self.pump(shared, x)?;
            self.sum_answers(shared, out);
            if self.call.is_complete() {
                break;
            }
            if !self.call.retry.is_empty() {
                continue;
            }
            if self.wait_for_events(shared, now)? && cancelled() {
                return Err(ClientError::Cancelled);
            }
        }
        let renormalise_start = Instant::now();
        self.call.renormalise(shared.geometry.hidden(), out);
        combine_ns += elapsed_ns(renormalise_start);
        self.call.timing.combine_ns = combine_ns;
        self.call.timing.wait_ns = elapsed_ns(start).saturating_sub(combine_ns);
        self.check_accounts(shared)
    }

    /// Reads all answers that have arrived. Returns true if any was for this call.
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
        // Bounded: a peer that publishes faster than this loop reads must not hold the call here.
        for _ in 0..MAX_ANSWERS_AT_ONCE {
            let Some(rx) = link.channel.try_next()? else { break };
            let view = link.channel.view(&rx);
            let now = Instant::now();
            let mut answered = None;
            for (position, open) in link.open.iter().enumerate() {
                let expect = CombineExpect {
                    client_id: self.client_id,
                    generation: link.generation,
                    sequence: open.sequence,
                    layer: open.layer,
                    frame_idx: open.frame_idx,
                    num_tokens: open.num_tokens as usize,
                    hidden: shared.geometry.hidden(),
                    dtype: shared.geometry.response_dtype(),
                };
                #[cfg(feature = "failpoints")]
                let expect = sabotage::expect_any(view, expect, &mut self.scratch);
                match decode_response(view, &expect, &mut self.scratch) {
                    Err(error) if error.is_stale() => continue,
                    Err(error) => return Err(LinkFault::new(FailReason::Invalid, error)),
                    Ok(Response::Rows(mut rows)) => {
                        if open.frame != ABANDONED {
                            let times = rows.server_times();
                            self.call.note_times(open, times);
                            if self.call.is_traced {
                                trace::record_answer(
                                    shared,
                                    &self.call,
                                    self.client_id,
                                    link,
                                    open,
                                    times,
                                );
                            }
                            let mut buffer = self.buffers.pop().unwrap_or_default();
                            buffer.resize(rows.num_rows() * rows.hidden(), 0.0);
                            if let Err(error) = rows.read_rows_f32(0..rows.num_rows(), &mut buffer)
                            {
                                self.buffers.push(buffer);
                                return Err(LinkFault::new(FailReason::Invalid, error));
                            }
                            let num_entries = self.call.num_entries(open.frame);
                            let latency = now.duration_since(link.last_step);
                            link.server.pace.observe(shared.pacing.observe(num_entries, latency));
                            self.call.answered(open.frame, buffer, &link.server);
                            any = true;
                        }
                        let bytes = shared.geometry.response_bytes(open.num_tokens as usize);
                        shared.metrics.bytes_in.inc_by(bytes as u64);
                    }
                    Ok(Response::Error(error)) => {
                        shared.metrics.count_error_frame(error.code);
                        link.server.note_error(error);
                        if open.frame != ABANDONED {
                            let refusal = (error.code, error.message);
                            self.call.refused_by(open.frame, &link.server, refusal);
                            any = true;
                        }
                    }
                }
                answered = Some(position);
                break;
            }
            fail_point!("client::after_response_before_credit");
            shared.metrics.frames_in.inc();
            match answered {
                Some(position) => link.remove_open(position, now),
                None => {
                    shared.metrics.stale_responses.inc();
                    tracing::debug!(
                        server = link.server.name(),
                        generation = link.generation,
                        "dropped a response that matches no open frame"
                    );
                }
            }
            link.return_frame()?;
        }
        Ok(any)
    }

    /// Adds answered frames to `out` in order, up to the first that is not answered.
    fn sum_answers(&mut self, shared: &Shared, out: &mut [f32]) {
        self.settle_hedges(shared);
        let hidden = shared.geometry.hidden();
        #[cfg(feature = "failpoints")]
        let first_sequence = self.call.frames.first().map(|frame| frame.sequence);
        while let Some(frame) = self.call.frames.get_mut(self.call.next_sum) {
            match std::mem::replace(&mut frame.state, FrameState::Done) {
                FrameState::Done => {}
                FrameState::Answered(buffer) => {
                    self.call.pairs_answered += u64::from(frame.plan.num_entries);
                    let first = frame.plan.first_token as usize;
                    let tokens =
                        &self.call.plan.tokens[first..first + frame.plan.num_tokens as usize];
                    for (token, row) in tokens.iter().zip(buffer.chunks_exact(hidden)) {
                        let begin = token.token as usize * hidden;
                        let sum = &mut out[begin..begin + hidden];
                        sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
                        #[cfg(feature = "failpoints")]
                        if first_sequence != Some(frame.sequence)
                            && sabotage::is_on(sabotage::DOUBLE_COUNT)
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

    /// Retires links without a sign of life, and links that exceed the work limit.
    fn check_life(&mut self, shared: &Shared, now: Instant) {
        let deadline = shared.settings.deadline;
        // After a gap between two looks, an unchanged counter proves nothing: the caller may have been away.
        let was_away = self.watched_at.is_none_or(|at| now - at > deadline / 2);
        self.watched_at = Some(now);
        for idx in 0..self.links.len() {
            let Some(link) = self.links[idx].as_deref_mut() else { continue };
            if !link.is_active() {
                continue;
            }
            link.observe_life(now);
            if was_away && let Some(grace) = now.checked_sub(deadline / 2) {
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

    /// Resends pairs of failed frames, and orphans that may have a replica now.
    fn replan(
        &mut self,
        shared: &Shared,
        x: &[f32],
        helps: bool,
        now: Instant,
    ) -> Result<(), ClientError> {
        // The end of a backoff may give orphans a replica too.
        let orphans_may_go = !self.call.orphans.is_empty() && (helps || self.call.may_retry(now));
        if !self.call.retry.is_empty() || orphans_may_go {
            fail_point!("client::before_resend");
            self.plan_batch(shared, Batch::Retry)?;
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
        let is_futile = may_drop && self.futile_wait_at == Some(self.seen_events());
        if waited < shared.settings.replica_wait && !is_futile {
            return Ok(());
        }
        match shared.settings.on_missing {
            OnMissingExpert::Fail => Err(self.no_replica(waited)),
            OnMissingExpert::DropAndRenormalise => {
                self.futile_wait_at = Some(self.seen_events());
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

    /// Assigns pairs to servers and queues their frames at the links.
    fn plan_batch(&mut self, shared: &Shared, batch: Batch) -> Result<(), ClientError> {
        let now = Instant::now();
        self.call.planned_at = Some(now);
        let mut probe_at_ns = None;
        let mut pairs = std::mem::take(&mut self.call.batch);
        pairs.clear();
        match batch {
            Batch::First => {
                probe_at_ns = Some(shared.pacing.elapsed_ns(now));
                pairs.extend_from_slice(&self.call.pairs);
            }
            Batch::Retry => {
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
            probe_at_ns,
            |rank| self.penalty(rank, now),
        );
        self.call.batch = pairs;
        self.enqueue_frames(&plan.frames, HedgeRole::None, now);
        self.call.orphans.extend_from_slice(&plan.orphans);
        self.call.plan = plan;
        self.reserve_for_call(shared);
        Ok(())
    }

    /// Makes row buffers for all frames of the call.
    pub fn reserve_for_call(&mut self, shared: &Shared) {
        let frames = self.call.frames.iter().map(|frame| frame.plan.num_tokens as usize);
        let (num_frames, largest) = (frames.len(), frames.max().unwrap_or(0));
        self.reserve_buffers(num_frames, largest * shared.geometry.hidden());
    }

    /// Adds planned frames to the call and queues them at their links.
    pub fn enqueue_frames(&mut self, planned: &[PlannedFrame], hedge: HedgeRole, now: Instant) {
        let sequence = self.next_sequence();
        for &plan in planned {
            let server = &self.routing.servers[plan.rank as usize];
            server.outstanding.fetch_add(plan.num_entries.into(), Ordering::Relaxed);
            let part = self.call.part_of(server);
            let frame = self.call.frames.len() as u32;
            let (epoch, state) = (self.routing.epoch, FrameState::Queued);
            self.call.frames.push(Frame { plan, server: part, epoch, sequence, state, hedge });
            if let Some(link) = self.links[server.idx].as_deref_mut() {
                link.enqueue(frame, now);
            }
        }
    }

    /// Penalty of a server that the call may use; `None` if it may not.
    pub fn penalty(&self, rank: u32, now: Instant) -> Option<Penalty> {
        let server = &self.routing.servers[rank as usize];
        self.live_link(server)?;
        let backoff = self.call.backoff.get(server.idx).copied().unwrap_or_default();
        if backoff.not_before.is_some_and(|at| at > now) {
            return None;
        }
        Some(Penalty {
            failures: backoff.failures + backoff.refusals,
            is_silent: server.is_silent.load(Ordering::Relaxed),
            is_overdue: server.pace.is_overdue(),
        })
    }

    /// Makes row buffers of `num_values` for as many frames in advance, up to `MAX_RESERVED_VALUES` in all. The number
    /// of buffers in use depends on the order of the answers; allocation then does not.
    pub fn reserve_buffers(&mut self, num_frames: usize, num_values: usize) {
        if num_frames.saturating_mul(num_values) > MAX_RESERVED_VALUES {
            return;
        }
        if self.buffers.len() < num_frames {
            self.buffers.resize_with(num_frames, Vec::new);
        }
        for buffer in &mut self.buffers {
            buffer.reserve(num_values.saturating_sub(buffer.len()));
        }
    }

    /// Sleeps until an answer, credit, an event of the control side, or the next check is due. Returns false if one
    /// came before the sleep.
    fn wait_for_events(&mut self, shared: &Shared, now: Instant) -> Result<bool, ClientError> {
        let mut until = now + shared.settings.tick();
        if let Some(at) = self.call.next_retry(now) {
            until = until.min(at);
        }
        if let Some(at) = self.next_late(shared) {
            until = until.min(at);
        }
        let (links, events) = (&self.links, &self.events);
        let seen = self.seen_events();
        let active = || links.iter().flatten().filter(|link| link.is_active());
        // A closed connection ends the sleep too. So connections are checked after a sleep without an answer.
        let polls_asleep = Cell::new(0);
        let has_slept = Cell::new(false);
        let may_be_closed = || {
            polls_asleep.set(polls_asleep.get() + u32::from(polls_asleep.get() > 0));
            polls_asleep.get() > 2
        };
        let found = wait_until(
            &self.wait,
            shared.settings.spin,
            until,
            || {
                let is_due = events.count() != seen || active().any(|link| link.has_work());
                let is_due = is_due || (may_be_closed() && active().any(|link| link.note_closed()));
                is_due.then_some(())
            },
            |on| {
                polls_asleep.set(u32::from(on));
                has_slept.set(true);
                active().for_each(
                    |link| {
                        if on { link.channel.arm() } else { link.channel.disarm() }
                    },
                );
            },
        );
        found
            .map(|_| has_slept.get())
            .map_err(|source| ClientError::System { op: "wait for answers", source })
    }

    /// Checks that every pair counts exactly once. A failure is a bug of this file.
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

enum Batch {
    First,
    Retry,
}

/// Retry budget of a call. No known fault comes near it.
const MAX_ROUNDS: u32 = 1000;
const MAX_ANSWERS_AT_ONCE: usize = 64;
/// Most values of a lane's row buffers that are made in advance: 64 MiB of f32.
pub(crate) const MAX_RESERVED_VALUES: usize = 16 << 20;
