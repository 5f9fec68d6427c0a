//! What a call does about parts that did not come: which servers failed, which pairs are unanswered, and
//! sending those, and nothing else, again.
//!
//! The kernels chose a server for each (token, expert) pair by tables that the host knows, and combine
//! names the servers whose part each token lacks. So the host knows which pairs are open, masks all
//! others, and lets the same kernels send what is left; the second combine adds to what the first one
//! summed. A pair is thus counted exactly once: its server's row was summed, or it is sent again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kernels::abi::{MAX_PEERS, Placement, TAG_NONE, WORD_STATUS_OFFSET, WORD_STRIDE};
use kernels::gpu::{GpuError, Stream};
use protocol::ErrorCode;

use super::memory::Status;
use super::slots::Phase;
use super::{DeviceClient, DeviceError, DeviceInput, DeviceTensor, TensorType, elapsed_ns, lane};
use crate::client::{ClientError, OnMissingExpert};
use crate::metrics::FailReason;

/// The experts of a call's tokens, on the host.
#[derive(Debug, Default)]
pub(super) struct Choices {
    num_tokens: usize,
    top_k: usize,
    idx: Vec<i32>,
    weights: Vec<f32>,
    /// Whether the weights are no longer the caller's.
    is_scaled: bool,
}

impl DeviceClient {
    /// Completes the output of a call whose combine reported that something is wrong.
    pub(super) fn repair(
        &mut self,
        stream: &Stream,
        slot: usize,
        status: &Status,
        start: Instant,
    ) -> Result<(), DeviceError> {
        let call = self.slots.call(slot);
        let (input, out, layer, layer_idx) = (call.input, call.out, call.layer, call.layer_idx);
        let stalled_from = call.started.unwrap_or(start);
        let mut placement = call.tables.placements[layer_idx];
        let mut status = *status;
        self.wait_for_others(stream)?;
        let mut choices = self.read_choices(stream, &input)?;
        choices.check(self.shared.model.shape.num_experts)?;
        let num_servers = self.options.max_servers as u32;
        let missing = self.read_missing(stream, slot, choices.num_tokens)?;
        let lacks = |missing: &[u32], token: usize, server: Option<u32>| {
            server.is_none_or(|server| missing[token] >> server & 1 != 0)
        };
        let mut open: Vec<usize> = choices
            .pairs()
            .filter(|&at| {
                lacks(&missing, choices.token(at), choices.server(&placement, at, num_servers))
            })
            .collect();
        let mut refusals = Refusals::default();
        let mut orphans_since = None;
        // Whether all kernels have ended since a number was drawn for the next.
        let mut is_at_rest = true;
        let (mut adds, mut rounds) = (true, 0u32);
        self.note_failures(slot, layer, &status, &mut refusals)?;
        loop {
            self.clear_error(stream, &status)?;
            // Once is enough, however often the call looks for replicas.
            status.error.tag = TAG_NONE;
            if open.is_empty() && adds {
                break;
            }
            if is_at_rest {
                self.draw_number(stream)?;
                is_at_rest = false;
            }
            self.reenter(stream, slot)?;
            placement = self.tables.placements[layer_idx];
            let (go, orphans): (Vec<usize>, Vec<usize>) =
                open.iter().partition(|&&at| choices.server(&placement, at, num_servers).is_some());
            if go.is_empty() && !orphans.is_empty() {
                let since = *orphans_since.get_or_insert_with(Instant::now);
                let waited = since.elapsed();
                let may_drop =
                    self.shared.settings.on_missing == OnMissingExpert::DropAndRenormalise;
                let is_vain = may_drop && self.vain_wait_at == Some(self.lane.seen_news());
                let limit = self.shared.settings.replica_wait;
                if waited < limit && !is_vain {
                    is_at_rest = self.make_seats(stream)?;
                    self.wait_for_news(limit - waited)?;
                    continue;
                }
                if !may_drop {
                    let expert = choices.idx[orphans[0]].unsigned_abs();
                    return Err(self.no_replica(layer_idx, expert, waited).into());
                }
                // Outputs are linear in the weights, but rows are summed: begin again without them.
                self.vain_wait_at = Some(self.lane.seen_news());
                self.count_missing(slot, orphans.len());
                choices.leave_out(&orphans);
                open = choices.pairs().collect();
                (orphans_since, adds) = (None, false);
                continue;
            }
            rounds += 1;
            if rounds > MAX_ROUNDS {
                return Err(self.exhausted(layer, layer_idx, rounds, &choices, &open).into());
            }
            let masked = choices.masked(&go);
            let again = self.upload(stream, slot, &input, &masked, &choices)?;
            // SAFETY: the caller's tensors are as `dispatch` promised; the masks are the client's own.
            unsafe {
                self.launch_dispatch(stream, slot, &again)?;
                self.launch_combine(stream, slot, out, input.capacity, adds)?;
            }
            self.memory.report(stream, slot)?;
            let timing = &mut self.slots.call_mut(slot).timing;
            if adds {
                timing.resent_pairs += go.len() as u64;
            }
            timing.stall_ns = elapsed_ns(stalled_from);
            self.wait_for_call(stream, slot)?;
            is_at_rest = true;
            status = self.memory.status(slot);
            self.slots.call_mut(slot).timing.num_frames += status.handle.contacted.count_ones();
            let missing = self.read_missing(stream, slot, choices.num_tokens)?;
            let num_sent = go.len();
            open = go
                .into_iter()
                .filter(|&at| {
                    lacks(&missing, choices.token(at), choices.server(&placement, at, num_servers))
                })
                .collect();
            if open.len() < num_sent {
                orphans_since = None;
            }
            open.extend(orphans);
            open.sort_unstable();
            adds = true;
            self.note_failures(slot, layer, &status, &mut refusals)?;
        }
        Ok(())
    }

    /// A call without the experts that an earlier one waited for in vain, if it is to go on without.
    pub(super) fn without_orphans(
        &mut self,
        stream: &Stream,
        slot: usize,
    ) -> Result<DeviceInput, DeviceError> {
        let call = self.slots.call(slot);
        let (input, layer_idx) = (call.input, call.layer_idx);
        let may_drop = self.shared.settings.on_missing == OnMissingExpert::DropAndRenormalise;
        let is_vain = may_drop && self.vain_wait_at == Some(self.lane.seen_news());
        if !is_vain || self.tables.num_orphans[layer_idx] == 0 {
            return Ok(input);
        }
        let mut choices = self.read_choices(stream, &input)?;
        choices.check(self.shared.model.shape.num_experts)?;
        let placement = &self.tables.placements[layer_idx];
        let num_servers = self.options.max_servers as u32;
        let orphans: Vec<usize> = choices
            .pairs()
            .filter(|&at| choices.server(placement, at, num_servers).is_none())
            .collect();
        if orphans.is_empty() {
            return Ok(input);
        }
        choices.leave_out(&orphans);
        self.count_missing(slot, orphans.len());
        let masked = self.upload(stream, slot, &input, &choices.idx, &choices)?;
        self.slots.call_mut(slot).input = masked;
        Ok(masked)
    }

    /// Takes servers out whose answer did not come, unless they refused.
    pub(super) fn give_up_servers(&mut self, slot: usize, status: &Status) {
        let last = self.slots.last();
        let tables = Arc::clone(&self.slots.call(slot).tables);
        for idx in bits(status.handle.missing & !status.handle.refused) {
            let Some(link) = self.lane.link_of(idx, &tables) else { continue };
            let reason = self.lane.why_unanswered(idx, FailReason::Silent);
            // Kernels keep the first error only: it tells what they waited for and what they saw.
            let (server, error) = (link.server.name(), &status.error);
            tracing::warn!(server, reason = reason.name(), %error, "a server did not answer");
            self.lane.fail(idx, reason, last, &self.shared);
        }
        debug_assert!(self.slots.call(slot).phase != Phase::Free);
    }

    /// Forgets an error on the device, where there is one.
    pub(super) fn clear_error(
        &mut self,
        stream: &Stream,
        status: &Status,
    ) -> Result<(), DeviceError> {
        if status.error.tag != TAG_NONE {
            self.slots.suspect_unsummed();
            self.memory.clear_error(stream)?;
            // A dispatch of another stream may have something to say right after.
            self.wait_until(stream, Instant::now() + self.bound())?;
        }
        Ok(())
    }

    /// Failures and refusals of a round. Servers that refuse are asked last for a while.
    fn note_failures(
        &mut self,
        slot: usize,
        layer: u32,
        status: &Status,
        refusals: &mut Refusals,
    ) -> Result<(), DeviceError> {
        // Whoever died meanwhile is no longer in the lane, but its parts are missing all the same.
        let call = self.slots.call_mut(slot);
        for idx in bits(status.handle.missing & !status.handle.refused) {
            call.failed.push((idx, call.tables.link_numbers[idx]));
            call.timing.failovers += 1;
        }
        self.give_up_servers(slot, status);
        let tables = Arc::clone(&self.slots.call(slot).tables);
        for idx in bits(status.handle.refused) {
            let Some(link) = self.lane.link_of(idx, &tables) else { continue };
            let number = status.handle.frame_number[idx];
            let word = self.status_word(link, number)?;
            let code = ErrorCode::from_u32((word & 0xffff) as u32);
            self.shared.metrics.count_error_frame(code);
            link.server.note_error(format!("refused a frame: {}", code.name()));
            refusals.count += 1;
            refusals.bad_frames += u32::from(code == ErrorCode::BadFrame);
            // A frame may have been damaged on its way: once more cannot hurt.
            let may_retry =
                code.is_retryable() || (code == ErrorCode::BadFrame && refusals.bad_frames == 1);
            if !may_retry {
                return Err(ClientError::Refused {
                    server: link.server.name().to_owned(),
                    layer,
                    code,
                    message: format!("the status word of frame {number} is {word:#x}"),
                }
                .into());
            }
            let pause = FIRST_PAUSE * (1 << refusals.count.min(6));
            self.lane.avoid(idx, Instant::now() + pause);
        }
        if status.handle.refused != 0 {
            let pause = FIRST_PAUSE * (1 << refusals.count.min(6));
            self.wait_for_news(pause)?;
        }
        Ok(())
    }

    /// The word by which a server refuses frame `number`, in the client's own memory.
    fn status_word(
        &self,
        link: &crate::client::link::Link,
        number: u64,
    ) -> Result<u64, DeviceError> {
        let place = number & u64::from(self.geometry.num_frames - 1);
        let offset =
            self.geometry.response_control_offset + WORD_STATUS_OFFSET + place * WORD_STRIDE;
        let mut word = [0; 8];
        let pair = link.device.as_ref().map(|cell| cell.lock());
        if let Some(pair) = pair.as_ref().and_then(|pair| pair.as_ref()) {
            let deadline = Instant::now() + self.bound();
            self.memory.gpu.read(pair.own_memory(), offset, &mut word, deadline)?;
        }
        Ok(u64::from_le_bytes(word))
    }

    /// Draws the number of what is launched next. What was launched before has ended.
    fn draw_number(&mut self, stream: &Stream) -> Result<(), DeviceError> {
        self.slots.rest(self.slots.last() + 1);
        self.make_room(stream)?;
        self.slots.next();
        Ok(())
    }

    /// Counts the call out at the servers that it used, and in at those that live now.
    fn reenter(&mut self, stream: &Stream, slot: usize) -> Result<(), DeviceError> {
        self.slots.call_mut(slot).used.drain(..).for_each(lane::Used::exit);
        // What was missing so far is not what those lack that sit there from now on.
        self.memory.forget_missing(slot);
        self.begin(stream, slot)
    }

    /// The call's input with other experts, and with other weights where these are not the caller's.
    fn upload(
        &self,
        stream: &Stream,
        slot: usize,
        input: &DeviceInput,
        idx: &[i32],
        choices: &Choices,
    ) -> Result<DeviceInput, DeviceError> {
        let memory = &self.memory.slots[slot];
        self.memory.send(stream, &memory.topk_idx, idx, self.bound())?;
        let topk_idx = DeviceTensor::new(memory.topk_idx.ptr(), TensorType::I32);
        let input = DeviceInput { topk_idx, ..*input };
        if !choices.is_scaled {
            return Ok(input);
        }
        self.memory.send(stream, &memory.topk_weights, &choices.weights, self.bound())?;
        let topk_weights = DeviceTensor::new(memory.topk_weights.ptr(), TensorType::F32);
        Ok(DeviceInput { topk_weights, ..input })
    }

    fn read_choices(&self, stream: &Stream, input: &DeviceInput) -> Result<Choices, DeviceError> {
        let (bound, memory) = (self.bound(), &self.memory);
        let top_k = self.geometry.top_k as usize;
        let mut count = Vec::new();
        let mut choices = Choices { top_k, ..Choices::default() };
        // SAFETY: the caller's tensors are as large as `dispatch` promised, and kernels read them before.
        unsafe {
            memory.fetch::<u32>(stream, input.num_tokens.ptr, &mut count, 1, bound)?;
            if count[0] > input.capacity {
                let (found, capacity) = (count[0].into(), input.capacity);
                return Err(DeviceError::Tokens { found, capacity });
            }
            choices.num_tokens = count[0] as usize;
            let num_choices = choices.num_tokens * top_k;
            memory.fetch(stream, input.topk_idx.ptr, &mut choices.idx, num_choices, bound)?;
            memory.fetch(
                stream,
                input.topk_weights.ptr,
                &mut choices.weights,
                num_choices,
                bound,
            )?;
        }
        Ok(choices)
    }

    fn read_missing(
        &self,
        stream: &Stream,
        slot: usize,
        num_tokens: usize,
    ) -> Result<Vec<u32>, GpuError> {
        let mut missing = Vec::new();
        let from = self.memory.slots[slot].token_missing.ptr();
        // SAFETY: the client's own memory, a word for every token of a frame.
        unsafe { self.memory.fetch(stream, from, &mut missing, num_tokens, self.bound())? };
        Ok(missing)
    }

    fn count_missing(&mut self, slot: usize, num_pairs: usize) {
        self.slots.call_mut(slot).timing.missing_pairs += num_pairs as u64;
        self.shared.metrics.missing_pairs.inc_by(num_pairs as u64);
    }

    fn exhausted(
        &self,
        layer: u32,
        layer_idx: usize,
        attempts: u32,
        choices: &Choices,
        open: &[usize],
    ) -> ClientError {
        let expert = open.first().map_or(0, |&at| choices.idx[at].unsigned_abs());
        let last = self.lane.routing.describe_replicas(layer_idx, expert);
        ClientError::Attempts { layer, expert, attempts, last }
    }
}

/// Refusals that a call met.
#[derive(Debug, Default)]
struct Refusals {
    count: u32,
    bad_frames: u32,
}

impl Choices {
    fn token(&self, at: usize) -> usize {
        at / self.top_k
    }

    /// Places with an expert.
    fn pairs(&self) -> impl Iterator<Item = usize> {
        (0..self.idx.len()).filter(|&at| self.idx[at] >= 0)
    }

    /// Server to which the kernels send this pair.
    fn server(&self, placement: &Placement, at: usize, num_servers: u32) -> Option<u32> {
        placement.pick_server(self.token(at) as u32, self.idx[at], num_servers)
    }

    fn check(&self, num_experts: u32) -> Result<(), ClientError> {
        for (at, &found) in self.idx.iter().enumerate() {
            if found != -1 && u32::try_from(found).map_or(true, |expert| expert >= num_experts) {
                return Err(ClientError::ExpertIndex { token: self.token(at), found, num_experts });
            }
        }
        Ok(())
    }

    /// These pairs only.
    fn masked(&self, pairs: &[usize]) -> Vec<i32> {
        let mut masked = vec![-1; self.idx.len()];
        pairs.iter().for_each(|&at| masked[at] = self.idx[at]);
        masked
    }

    /// Leaves pairs out, and scales the others of their tokens so that the weights keep their sum.
    fn leave_out(&mut self, pairs: &[usize]) {
        self.is_scaled = true;
        for group in pairs.chunk_by(|a, b| a / self.top_k == b / self.top_k) {
            let row = self.token(group[0]) * self.top_k;
            let row = row..row + self.top_k;
            let sum = |choices: &Self| -> f64 {
                let of = row.clone().filter(|&at| choices.idx[at] >= 0);
                of.map(|at| f64::from(choices.weights[at])).sum()
            };
            let total = sum(self);
            group.iter().for_each(|&at| self.idx[at] = -1);
            let left = sum(self);
            let factor = total / left;
            // Nothing is left, or nothing that could be scaled up: the weights stay as they are.
            if factor.is_finite() && left.abs() > 1e-6 * total.abs() {
                for weight in &mut self.weights[row.clone()] {
                    *weight = (f64::from(*weight) * factor) as f32;
                }
            }
        }
    }
}

pub(super) fn bits(mask: u32) -> impl Iterator<Item = usize> {
    (0..MAX_PEERS).filter(move |idx| mask >> idx & 1 != 0)
}

/// Pause before a server that refused is asked again, doubled with every refusal.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
/// Times that a call sends tokens again before it gives up: a bound for what no fault explains.
const MAX_ROUNDS: u32 = 1000;

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::*;

    #[test]
    fn leaving_experts_out_keeps_the_sum_of_the_weights() {
        let seed: u64 = rand::random();
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        for _ in 0..200 {
            let (num_tokens, top_k) = (rng.random_range(1..6), rng.random_range(1..6));
            let len = num_tokens * top_k;
            let mut choices = Choices {
                num_tokens,
                top_k,
                idx: (0..len).map(|_| rng.random_range(-1..9)).collect(),
                weights: (0..len).map(|_| rng.random_range(0.1..1.0)).collect(),
                is_scaled: false,
            };
            let before = (choices.idx.clone(), choices.weights.clone());
            let gone: Vec<usize> = choices.pairs().filter(|_| rng.random_bool(0.3)).collect();
            choices.leave_out(&gone);
            for token in 0..num_tokens {
                let row = token * top_k..(token + 1) * top_k;
                let sum = |idx: &[i32], weights: &[f32]| -> f32 {
                    row.clone().filter(|&at| idx[at] >= 0).map(|at| weights[at]).sum()
                };
                let (total, left) =
                    (sum(&before.0, &before.1), sum(&choices.idx, &choices.weights));
                let has_any = row.clone().any(|at| choices.idx[at] >= 0);
                assert!(!has_any || (total - left).abs() < 1e-4, "{total} became {left}");
            }
            for (at, &expert) in before.0.iter().enumerate() {
                let expected = if gone.contains(&at) { -1 } else { expert };
                assert_eq!(choices.idx[at], expected);
            }
        }
    }
}
