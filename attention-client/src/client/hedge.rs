//! Hedges: frames sent again to other replicas because their answer is late.
//!
//! ```text
//!   original ── late ──▶ copies of its pairs, on other replicas
//!      ├─ its answer comes first ──────▶ the copies are cancelled         lost
//!      ├─ all copies are answered first ▶ the original is cancelled       won
//!      ├─ the original fails ──────────▶ the copies take its place        won
//!      └─ a copy fails ────────────────▶ all copies are cancelled         failed
//! ```
//!
//! A call adds either the answer of the original or those of all copies, never parts of both. Frames are summed in
//! order, and copies come after their original. So a sum waits for the decision. The answer of a cancelled frame is
//! dropped when it comes, like that of an abandoned call. Until an answer comes over a link with a late frame, calls
//! prefer other servers.

use std::time::{Duration, Instant};

use super::call::{Call, FrameState, Hedge, HedgeRole, HedgeState, release_load};
use super::lane::Lane;
use super::plan::{Pair, Penalty};
#[cfg(feature = "failpoints")]
use super::sabotage;
use crate::fleet::link::{ABANDONED, Link};
use crate::fleet::shared::Shared;
use crate::metrics::HedgeResult;

impl Call {
    /// Notes that a frame failed. Returns true if its pairs need no resend, because the other side of its hedge asks
    /// for them.
    pub(super) fn end_hedge_of(&mut self, frame: u32) -> bool {
        let (hedge, if_open) = match self.frames[frame as usize].hedge {
            HedgeRole::None => return false,
            HedgeRole::Original(hedge) => (hedge, HedgeState::Promoted),
            HedgeRole::Copy(hedge) => (hedge, HedgeState::Void),
        };
        self.has_unsettled_hedge = true;
        let Some(Hedge { state, .. }) = self.hedges.get_mut(hedge as usize) else { return false };
        match *state {
            HedgeState::Open => {
                *state = if_open;
                true
            }
            // The original of a void hedge stands alone; its copies do not count.
            HedgeState::Void => if_open == HedgeState::Void,
            HedgeState::Promoted | HedgeState::Closed => false,
        }
    }

    /// Returns true for a copy whose answer the call can do without.
    pub(super) fn is_spare(&self, frame: u32) -> bool {
        let HedgeRole::Copy(hedge) = self.frames[frame as usize].hedge else { return false };
        let hedge = self.hedges.get(hedge as usize);
        hedge.is_some_and(|hedge| matches!(hedge.state, HedgeState::Open | HedgeState::Void))
    }

    /// Sums the answer of a single copy in the place of its original, so that it changes no bit of the sum. The copy
    /// has the same rows in the same order.
    fn put_in_place_of_original(&mut self, hedge: &Hedge) {
        if hedge.num_copies == 1 {
            let copy = &mut self.frames[hedge.first_copy as usize].state;
            let answer = std::mem::replace(copy, FrameState::Done);
            self.frames[hedge.original as usize].state = answer;
        }
    }

    fn is_answered(&self, frame: u32) -> bool {
        matches!(self.frames[frame as usize].state, FrameState::Answered(_))
    }

    fn may_be_hedged(&self, frame: u32) -> bool {
        frame != ABANDONED && self.frames[frame as usize].hedge == HedgeRole::None
    }

    /// Appends the pairs of a frame to `pairs`.
    pub(super) fn pairs_of(&self, frame: u32, pairs: &mut Vec<Pair>) {
        let frame = &self.frames[frame as usize].plan;
        let first = frame.first_token as usize;
        for token in &self.plan.tokens[first..first + frame.num_tokens as usize] {
            let begin = token.entry_begin as usize;
            let entries = &self.plan.entries[begin..begin + token.entry_count as usize];
            pairs.extend(entries.iter().map(|entry| Pair {
                token: token.token,
                expert: entry.expert,
                weight: entry.weight,
            }));
        }
    }
}

impl Lane {
    /// Sends frames whose answer is late to other replicas too, as far as the budget goes.
    pub(super) fn hedge_late_frames(&mut self, shared: &Shared, now: Instant) {
        let is_too_soon = self.call.no_hedge_before.is_some_and(|at| now < at);
        if is_too_soon || !shared.pacing.may_hedge() {
            return;
        }
        for idx in 0..self.links.len() {
            let Some(link) = self.links[idx].as_deref() else { continue };
            let waited = now.saturating_duration_since(link.last_step);
            let mut late = std::mem::take(&mut self.call.late);
            late.extend(hedgeable(link, &self.call).filter(|&frame| {
                late_after(frame, &self.call, shared).is_some_and(|at| at <= waited)
            }));
            for &frame in &late {
                self.hedge_frame(idx, frame, shared, now);
            }
            late.clear();
            self.call.late = late;
        }
    }

    /// Time at which the next frame becomes late and may be hedged.
    pub(super) fn next_late(&self, shared: &Shared) -> Option<Instant> {
        if !shared.pacing.may_hedge() {
            return None;
        }
        let of_link = |link: &Link| {
            let after =
                hedgeable(link, &self.call).filter_map(|f| late_after(f, &self.call, shared));
            after.min().map(|after| link.last_step + after)
        };
        let next = self.links.iter().flatten().filter_map(|link| of_link(link)).min()?;
        Some(self.call.no_hedge_before.map_or(next, |at| next.max(at)))
    }

    /// Sends the pairs of `frame`, which is late at the link `idx`, to other replicas too.
    fn hedge_frame(&mut self, idx: usize, frame: u32, shared: &Shared, now: Instant) {
        let mut pairs = std::mem::take(&mut self.call.batch);
        pairs.clear();
        self.call.pairs_of(frame, &mut pairs);
        let mut plan = std::mem::take(&mut self.call.plan);
        let (num_tokens, num_entries) = (plan.tokens.len(), plan.entries.len());
        plan.assign(
            &self.routing,
            self.call.layer_idx,
            &pairs,
            shared.geometry.max_tokens(),
            None,
            |rank| {
                let is_other = self.routing.servers[rank as usize].idx != idx;
                self.penalty(rank, now).filter(|p| is_other && *p == Penalty::NONE)
            },
        );
        self.call.batch = pairs;
        let num_copies = plan.frames.len();
        if !plan.orphans.is_empty() || !shared.pacing.spend(num_copies) {
            plan.tokens.truncate(num_tokens);
            plan.entries.truncate(num_entries);
            self.call.plan = plan;
            self.call.no_hedge_before = Some(now + RETRY_PAUSE);
            return;
        }
        let hedge = self.call.hedges.len() as u32;
        self.call.hedges.push(Hedge {
            original: frame,
            first_copy: self.call.frames.len() as u32,
            num_copies: num_copies as u32,
            state: HedgeState::Open,
        });
        self.call.frames[frame as usize].hedge = HedgeRole::Original(hedge);
        self.enqueue_frames(&plan.frames, HedgeRole::Copy(hedge), now);
        self.call.plan = plan;
        self.call.timing.hedges += num_copies as u32;
        self.reserve_for_call(shared);
        if let Some(link) = self.links[idx].as_deref_mut() {
            link.note_overdue();
            tracing::debug!(
                server = link.server.name(),
                lane = self.id,
                num_copies,
                "an answer is late: asking other replicas too"
            );
        }
    }

    /// Decides hedges whose outcome is known, and cancels the losers.
    pub(super) fn settle_hedges(&mut self, shared: &Shared) {
        if !std::mem::take(&mut self.call.has_unsettled_hedge) {
            return;
        }
        for number in 0..self.call.hedges.len() {
            let hedge = self.call.hedges[number];
            let result = match hedge.state {
                HedgeState::Closed => continue,
                HedgeState::Promoted => HedgeResult::Won,
                HedgeState::Void => HedgeResult::Failed,
                HedgeState::Open if self.call.is_answered(hedge.original) => HedgeResult::Lost,
                HedgeState::Open if hedge.copies().all(|copy| self.call.is_answered(copy)) => {
                    HedgeResult::Won
                }
                HedgeState::Open => continue,
            };
            self.call.hedges[number].state = HedgeState::Closed;
            shared.metrics.count_hedges(result, hedge.num_copies);
            if result == HedgeResult::Won {
                self.call.timing.hedges_won += hedge.num_copies;
            }
            #[cfg(feature = "failpoints")]
            if sabotage::is_on(sabotage::DOUBLE_HEDGE) {
                continue;
            }
            match (result, hedge.state) {
                (HedgeResult::Won, HedgeState::Open) => {
                    self.cancel(hedge.original, shared);
                    self.call.put_in_place_of_original(&hedge);
                }
                (HedgeResult::Won, _) => {}
                _ => hedge.copies().for_each(|copy| self.cancel(copy, shared)),
            }
        }
    }

    /// Counts the undecided hedges of a call that ends without them.
    pub(super) fn drop_hedges(&mut self, shared: &Shared) {
        self.settle_hedges(shared);
        let open = self.call.hedges.drain(..).filter(|hedge| hedge.state != HedgeState::Closed);
        open.for_each(|hedge| shared.metrics.count_hedges(HedgeResult::Lost, hedge.num_copies));
    }

    /// Takes a frame out of the call. Its answer, if it still comes, is dropped.
    fn cancel(&mut self, frame_no: u32, shared: &Shared) {
        let frame = &mut self.call.frames[frame_no as usize];
        let num_entries = frame.plan.num_entries;
        match std::mem::replace(&mut frame.state, FrameState::Done) {
            FrameState::Done => return,
            FrameState::Answered(buffer) => return self.buffers.push(buffer),
            FrameState::Queued | FrameState::Sent => {}
        }
        let is_copy = frame.hedge.is_copy();
        for link in self.links.iter_mut().flatten() {
            if let Some(open) = link.open.iter_mut().find(|open| open.frame == frame_no) {
                open.frame = ABANDONED;
                if !is_copy {
                    // The answer takes longer still. Left out, the estimates would not know of late frames.
                    let latency = Instant::now().saturating_duration_since(link.last_step);
                    link.server.pace.observe(shared.pacing.observe(num_entries, latency));
                }
            } else if let Some(position) = link.queue.iter().position(|&queued| queued == frame_no)
            {
                link.queue.remove(position);
            } else {
                continue;
            }
            release_load(&link.server, num_entries);
            return;
        }
    }
}

/// Frames of the current call at `link` that may be hedged.
fn hedgeable<'a>(link: &'a Link, call: &'a Call) -> impl Iterator<Item = u32> + 'a {
    let open = link.open.iter().map(|open| open.frame);
    open.chain(link.queue.iter().copied()).filter(|&frame| call.may_be_hedged(frame))
}

fn late_after(frame: u32, call: &Call, shared: &Shared) -> Option<Duration> {
    shared.pacing.late_after(call.num_entries(frame))
}

/// Pause after a hedge that no replica could take, or that the budget could not pay.
const RETRY_PAUSE: Duration = Duration::from_millis(1);
