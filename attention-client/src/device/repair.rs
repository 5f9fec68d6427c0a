//! Repair of calls with missing parts: which servers failed, which pairs are unanswered, and retries of those pairs.
//!
//! The kernels choose a server for each (token, expert) pair by tables that the host knows, and combine names the
//! servers whose part each token lacks. So the host knows the open pairs. It masks all others and launches the same
//! kernels again; the second combine adds to the sum of the first. So each pair counts exactly once: its server's
//! row was summed, or the pair is sent again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kernels::abi::{MAX_PEERS, TAG_NONE, WORD_STATUS_OFFSET, WORD_STRIDE};
use kernels::gpu::{GpuError, Stream};
use protocol::ErrorCode;

use super::choices::Choices;
use super::executor::Executor;
use super::memory::Status;
use super::peers::Peer;
use super::{DeviceError, DeviceInput, DeviceTensor, TensorType};
use crate::error::ClientError;
use crate::fleet::settings::OnMissingExpert;
use crate::timing::elapsed_ns;

/// Completes calls after failures. See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Repair {
    /// Number of events at the end of a futile wait for a replica. Without a new event, another wait is futile too.
    futile_wait_at: Option<u64>,
}

impl Repair {
    /// Completes the output of a call whose combine reported an error. `start` is the time at which the caller asked
    /// for the output.
    pub fn complete(
        &mut self,
        executor: &mut Executor,
        stream: &Stream,
        call_idx: usize,
        status: &Status,
        start: Instant,
    ) -> Result<(), DeviceError> {
        let call = executor.calls.get(call_idx);
        let (input, out, layer) = (call.input, call.out, call.layer);
        let stalled_from = call.started.unwrap_or(start);
        let mut placement = call.tables.placements[layer.idx];
        let mut status = *status;
        executor.wait_for_others(stream)?;
        let mut choices = executor.read_choices(stream, &input)?;
        choices.check(executor.shared.model.shape.num_experts)?;
        let num_servers = executor.launcher.options.max_servers as u32;
        let missing = executor.read_missing(stream, call_idx, choices.num_tokens)?;
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
        // True if all kernels have ended since the last number was drawn.
        let mut is_idle = true;
        let (mut adds, mut rounds) = (true, 0u32);
        executor.note_failures(call_idx, &status, &mut refusals)?;
        loop {
            executor.clear_error(stream, &status)?;
            // Once is enough, however often this loop looks for replicas.
            status.error.tag = TAG_NONE;
            if open.is_empty() && adds {
                break;
            }
            if is_idle {
                executor.draw_serial(stream)?;
                is_idle = false;
            }
            executor.begin_again(stream, call_idx)?;
            placement = executor.tables.placements[layer.idx];
            let (ready, orphans): (Vec<usize>, Vec<usize>) =
                open.iter().partition(|&&at| choices.server(&placement, at, num_servers).is_some());
            if ready.is_empty() && !orphans.is_empty() {
                let since = *orphans_since.get_or_insert_with(Instant::now);
                let waited = since.elapsed();
                let settings = &executor.shared.settings;
                let may_drop = settings.on_missing == OnMissingExpert::DropAndRenormalise;
                let limit = settings.replica_wait;
                if waited < limit && !(may_drop && self.is_futile(executor)) {
                    is_idle = executor.free_places(stream)?;
                    executor.peers.wait_for_events(limit - waited)?;
                    continue;
                }
                if !may_drop {
                    let expert = choices.idx[orphans[0]].unsigned_abs();
                    return Err(executor.peers.no_replica(layer.idx, expert, waited).into());
                }
                // Outputs are linear in the weights, but the rows are summed already: start again without the
                // missing experts.
                self.futile_wait_at = Some(executor.peers.seen_events());
                executor.count_missing(call_idx, orphans.len());
                choices.leave_out(&orphans);
                open = choices.pairs().collect();
                (orphans_since, adds) = (None, false);
                continue;
            }
            rounds += 1;
            if rounds > MAX_ROUNDS {
                let expert = open.first().map_or(0, |&at| choices.idx[at].unsigned_abs());
                let last = executor.peers.routing.describe_replicas(layer.idx, expert);
                let (layer, attempts) = (layer.number, rounds);
                return Err(ClientError::Attempts { layer, expert, attempts, last }.into());
            }
            let masked = choices.masked(&ready);
            let retry = executor.upload_choices(stream, call_idx, &input, &masked, &choices)?;
            // SAFETY: the caller's tensors are as `dispatch` promised. The masks are the client's own.
            unsafe {
                executor.launch_dispatch(stream, call_idx, &retry)?;
                executor.launcher.combine(stream, call_idx, out, input.capacity, adds)?;
            }
            executor.launcher.memory.report(stream, call_idx)?;
            let timing = &mut executor.calls.get_mut(call_idx).timing;
            if adds {
                timing.resent_pairs += ready.len() as u64;
            }
            timing.stall_ns = elapsed_ns(stalled_from);
            executor.wait_for_call(stream, call_idx)?;
            is_idle = true;
            status = executor.launcher.memory.status(call_idx);
            let num_frames = status.handle.contacted.count_ones();
            executor.calls.get_mut(call_idx).timing.num_frames += num_frames;
            let missing = executor.read_missing(stream, call_idx, choices.num_tokens)?;
            let num_sent = ready.len();
            open = ready
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
            executor.note_failures(call_idx, &status, &mut refusals)?;
        }
        Ok(())
    }

    /// The call's input. After a futile wait for a replica, and if calls may drop experts, it lacks the experts without
    /// a live replica.
    pub fn without_orphans(
        &self,
        executor: &mut Executor,
        stream: &Stream,
        call_idx: usize,
    ) -> Result<DeviceInput, DeviceError> {
        let call = executor.calls.get(call_idx);
        let (input, layer) = (call.input, call.layer);
        let on_missing = executor.shared.settings.on_missing;
        let may_drop = on_missing == OnMissingExpert::DropAndRenormalise;
        let is_futile = may_drop && self.is_futile(executor);
        if !is_futile || executor.tables.num_orphans[layer.idx] == 0 {
            return Ok(input);
        }
        let mut choices = executor.read_choices(stream, &input)?;
        choices.check(executor.shared.model.shape.num_experts)?;
        let placement = &executor.tables.placements[layer.idx];
        let num_servers = executor.launcher.options.max_servers as u32;
        let orphans: Vec<usize> = choices
            .pairs()
            .filter(|&at| choices.server(placement, at, num_servers).is_none())
            .collect();
        if orphans.is_empty() {
            return Ok(input);
        }
        choices.leave_out(&orphans);
        executor.count_missing(call_idx, orphans.len());
        let masked = executor.upload_choices(stream, call_idx, &input, &choices.idx, &choices)?;
        executor.calls.get_mut(call_idx).input = masked;
        Ok(masked)
    }

    /// Returns true if there was no event since a futile wait.
    fn is_futile(&self, executor: &Executor) -> bool {
        self.futile_wait_at == Some(executor.peers.seen_events())
    }
}

/// Steps of a repair.
impl Executor {
    /// Handles the failures and refusals of a round. Servers that refuse get a backoff.
    fn note_failures(
        &mut self,
        call_idx: usize,
        status: &Status,
        refusals: &mut Refusals,
    ) -> Result<(), DeviceError> {
        // A server that died during the round may have left the peer table, but its parts are missing all the same.
        let call = self.calls.get_mut(call_idx);
        for idx in bits(status.handle.missing & !status.handle.refused) {
            call.failed.push((idx, call.tables.link_numbers[idx]));
            call.timing.failovers += 1;
        }
        self.fail_unanswered(call_idx, status);
        let (layer, tables) = {
            let call = self.calls.get(call_idx);
            (call.layer.number, Arc::clone(&call.tables))
        };
        for idx in bits(status.handle.refused) {
            let Some(peer) = self.peers.peer_of(idx, &tables) else { continue };
            let server = &peer.link.server;
            let number = status.handle.frame_number[idx];
            let word = self.status_word(peer, number)?;
            let code = ErrorCode::from_u32((word & 0xffff) as u32);
            self.shared.metrics.count_error_frame(code);
            server.note_error(format!("refused a frame: {}", code.name()));
            refusals.count += 1;
            refusals.bad_frames += u32::from(code == ErrorCode::BadFrame);
            // The frame may have been damaged in transit, so one retry is worth it.
            let may_retry =
                code.is_retryable() || (code == ErrorCode::BadFrame && refusals.bad_frames == 1);
            if !may_retry {
                let message = format!("the status word of frame {number} is {word:#x}");
                let server = server.name().to_owned();
                return Err(ClientError::Refused { server, layer, code, message }.into());
            }
            self.peers.avoid(idx, Instant::now() + refusals.backoff());
        }
        if status.handle.refused != 0 {
            self.peers.wait_for_events(refusals.backoff())?;
        }
        Ok(())
    }

    /// The word by which a server refuses frame `number`, in the client's own memory.
    fn status_word(&self, peer: &Peer, number: u64) -> Result<u64, DeviceError> {
        let geometry = &self.launcher.geometry;
        let place = number & u64::from(geometry.num_frames - 1);
        let offset = geometry.response_control_offset + WORD_STATUS_OFFSET + place * WORD_STRIDE;
        let mut word = [0; 8];
        let read = peer.slots.with_own_memory(|memory| {
            let deadline = Instant::now() + self.bound();
            self.launcher.gpu().read(memory, offset, &mut word, deadline)
        });
        read.transpose()?;
        Ok(u64::from_le_bytes(word))
    }

    /// Draws the number of the next launch. All earlier launches have ended.
    fn draw_serial(&mut self, stream: &Stream) -> Result<(), DeviceError> {
        self.calls.note_idle(self.calls.last() + 1);
        self.make_room(stream)?;
        self.calls.draw_serial();
        Ok(())
    }

    /// Uploads other experts for a call, and other weights if these are not the caller's. Returns the new input.
    fn upload_choices(
        &self,
        stream: &Stream,
        call_idx: usize,
        input: &DeviceInput,
        idx: &[i32],
        choices: &Choices,
    ) -> Result<DeviceInput, DeviceError> {
        let (memory, bound) = (&self.launcher.memory, self.bound());
        let own = &memory.calls[call_idx];
        memory.send(stream, &own.topk_idx, idx, bound)?;
        let topk_idx = DeviceTensor::new(own.topk_idx.ptr(), TensorType::I32);
        let input = DeviceInput { topk_idx, ..*input };
        if !choices.is_scaled {
            return Ok(input);
        }
        memory.send(stream, &own.topk_weights, &choices.weights, bound)?;
        let topk_weights = DeviceTensor::new(own.topk_weights.ptr(), TensorType::F32);
        Ok(DeviceInput { topk_weights, ..input })
    }

    fn read_choices(&self, stream: &Stream, input: &DeviceInput) -> Result<Choices, DeviceError> {
        let (bound, memory) = (self.bound(), &self.launcher.memory);
        let top_k = self.launcher.geometry.top_k as usize;
        let mut count = Vec::new();
        let mut choices = Choices { top_k, ..Choices::default() };
        let Choices { idx, weights, .. } = &mut choices;
        // SAFETY: the caller's tensors are as large as `dispatch` promised, and kernels have read them before.
        unsafe {
            memory.fetch::<u32>(stream, input.num_tokens.ptr, &mut count, 1, bound)?;
            if count[0] > input.capacity {
                let (found, capacity) = (count[0].into(), input.capacity);
                return Err(DeviceError::Tokens { found, capacity });
            }
            let num_choices = count[0] as usize * top_k;
            memory.fetch(stream, input.topk_idx.ptr, idx, num_choices, bound)?;
            memory.fetch(stream, input.topk_weights.ptr, weights, num_choices, bound)?;
        }
        choices.num_tokens = count[0] as usize;
        Ok(choices)
    }

    /// A mask of places for each token: the servers whose part the token lacks.
    fn read_missing(
        &self,
        stream: &Stream,
        call_idx: usize,
        num_tokens: usize,
    ) -> Result<Vec<u32>, GpuError> {
        let mut missing = Vec::new();
        let memory = &self.launcher.memory;
        let from = memory.calls[call_idx].token_missing.ptr();
        // SAFETY: the client's own memory, a word for every token of a frame.
        unsafe { memory.fetch(stream, from, &mut missing, num_tokens, self.bound())? };
        Ok(missing)
    }

    fn count_missing(&mut self, call_idx: usize, num_pairs: usize) {
        self.calls.get_mut(call_idx).timing.missing_pairs += num_pairs as u64;
        self.shared.metrics.missing_pairs.inc_by(num_pairs as u64);
    }
}

/// Refusals of frames of one call.
#[derive(Debug, Default)]
struct Refusals {
    count: u32,
    bad_frames: u32,
}

impl Refusals {
    fn backoff(&self) -> Duration {
        FIRST_BACKOFF * (1 << self.count.min(6))
    }
}

/// Indices of the set bits of a mask of places.
pub(super) fn bits(mask: u32) -> impl Iterator<Item = usize> {
    (0..MAX_PEERS).filter(move |idx| mask >> idx & 1 != 0)
}

/// Half of the backoff after the first refusal. It doubles with every refusal.
const FIRST_BACKOFF: Duration = Duration::from_millis(5);
/// Retry budget of a call. No known fault comes near it.
const MAX_ROUNDS: u32 = 1000;
