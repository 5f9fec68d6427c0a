//! Preparation for the first calls: connections, buffers, and memory of slots.

use std::time::{Duration, Instant};

use super::exchange::MAX_RESERVED_VALUES;
use super::lane::Lane;
use super::{Cancel, MoeClient, never};
use crate::error::ClientError;
use crate::fleet::shared::Shared;

impl MoeClient {
    /// Prepares for `num_calls` calls at a time with up to `num_tokens` tokens each. The first real calls then find
    /// their connections, and allocate nothing as long as no server fails.
    ///
    /// Waits for `timeout` at most until every expert has a live replica, as [`wait_ready`](Self::wait_ready). Then
    /// makes `num_calls` lanes, which connect with all servers, and grows their buffers. At last each lane carries
    /// calls of the first MoE layer with all its experts, as many as a slot has frames. These calls have tokens of
    /// zeros. They wait like other calls, and count in the metrics of client and servers. Buffers for answers grow to
    /// 64 MiB per lane at most.
    ///
    /// Call it on the thread that makes the calls: some buffers belong to a thread. Other calls that use lanes
    /// meanwhile may take a lane from the warm-up, which then waits for it.
    ///
    /// # Errors
    /// [`ClientError::WarmUp`] if `num_calls` is 0 or above the client's most lanes; [`ClientError::Length`] if
    /// `num_tokens` is too large; those of [`wait_ready`](Self::wait_ready) and of a call.
    pub fn warm_up(
        &self,
        num_tokens: usize,
        num_calls: usize,
        timeout: Duration,
    ) -> Result<(), ClientError> {
        self.warm_up_unless(num_tokens, num_calls, timeout, &never)
    }

    /// As [`warm_up`](Self::warm_up), until `cancelled` returns true.
    ///
    /// # Errors
    /// As [`warm_up`](Self::warm_up), or [`ClientError::Cancelled`].
    pub fn warm_up_unless(
        &self,
        num_tokens: usize,
        num_calls: usize,
        timeout: Duration,
        cancelled: Cancel<'_>,
    ) -> Result<(), ClientError> {
        let shared = &self.inner.shared;
        let max_lanes = self.inner.lanes.capacity();
        if !(1..=max_lanes).contains(&num_calls) {
            return Err(ClientError::WarmUp { num_calls, max_lanes });
        }
        let layer = shared.model.moe_layers.first().copied().unwrap_or_default();
        let sample = Sample::new(shared, num_tokens);
        self.check(&sample.x, &sample.topk_idx, &sample.topk_weights)?;
        self.wait_ready_unless(timeout, cancelled)?;
        self.reserve_lanes(num_tokens, num_calls, cancelled)?;
        let mut out = vec![0.0; sample.x.len()];
        for _ in 0..shared.settings.slot.num_frames {
            let mut handles = Vec::with_capacity(num_calls);
            for _ in 0..num_calls {
                let Sample { x, topk_idx, topk_weights } = &sample;
                handles.push(self.dispatch_unless(layer, x, topk_idx, topk_weights, cancelled)?);
            }
            for handle in handles {
                self.combine_unless(handle, &mut out, cancelled)?;
            }
        }
        Ok(())
    }

    /// Takes `num_calls` lanes at once, so that as many exist, and grows their buffers.
    fn reserve_lanes(
        &self,
        num_tokens: usize,
        num_calls: usize,
        cancelled: Cancel<'_>,
    ) -> Result<(), ClientError> {
        let mut lanes = Vec::with_capacity(num_calls);
        let mut result = Ok(());
        for _ in 0..num_calls {
            match self.take_lane(Instant::now(), cancelled) {
                Ok(lane) => lanes.push(lane),
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        for mut lane in lanes {
            lane.sync(&self.inner.shared);
            lane.reserve(&self.inner.shared, num_tokens);
            self.inner.return_lane(lane);
        }
        result
    }
}

/// The arguments of a call that uses every expert of a layer.
struct Sample {
    x: Vec<f32>,
    topk_idx: Vec<i32>,
    topk_weights: Vec<f32>,
}

impl Sample {
    /// At least `num_tokens` tokens, and enough for all experts.
    fn new(shared: &Shared, num_tokens: usize) -> Self {
        let shape = &shared.model.shape;
        let top_k = shape.top_k.max(1);
        let num_tokens = num_tokens.max(shape.num_experts.div_ceil(top_k) as usize);
        let num_pairs = num_tokens.saturating_mul(top_k as usize);
        let experts = (0..shape.num_experts.cast_signed()).cycle();
        Self {
            x: vec![0.0; num_tokens.saturating_mul(shared.geometry.hidden())],
            topk_idx: experts.take(num_pairs).collect(),
            topk_weights: vec![0.0; num_pairs],
        }
    }
}

impl Lane {
    /// Grows the buffers for a call of `num_tokens` tokens without failures, whatever servers it goes to.
    fn reserve(&mut self, shared: &Shared, num_tokens: usize) {
        let shape = &shared.model.shape;
        let num_servers = self.routing.servers.len();
        let num_pairs = num_tokens * shape.top_k as usize;
        let num_rows = num_tokens * num_servers.min(shape.top_k as usize);
        let max_tokens = shared.geometry.max_tokens();
        // Each server gets whole frames and one that is not full.
        let num_frames = num_rows / max_tokens + num_servers;
        let frames_of_server = num_tokens.div_ceil(max_tokens);
        self.call.reserve(num_pairs, num_frames, num_servers);
        self.call.plan.reserve(num_rows, num_pairs, num_frames, num_servers);
        for link in self.links.iter_mut().flatten() {
            link.queue.reserve(frames_of_server);
            link.open.reserve(frames_of_server);
        }
        let num_values = num_tokens.min(max_tokens) * shared.geometry.hidden();
        self.reserve_buffers(num_frames.min(MAX_RESERVED_VALUES / num_values.max(1)), num_values);
    }
}
