//! Counts and reports of a batch that has ended.

use std::time::{Duration, Instant};

use kernels::abi::{Batch, FrameGeometry};
use telemetry::{FrameKey, ServedStamp, ServerRecorder, Stamp};

use super::DataThread;
use crate::device::{BatchReport, BatchTimeline};

impl DataThread {
    pub(super) fn count(&self, batch: &Batch, compute: Duration) {
        let (metrics, geometry) = (&self.metrics, &self.plan.geometry);
        let num_clients = batch.clients.count_ones();
        let num_rows = u64::from(batch.num_rows);
        metrics.frames_in.inc_by(num_clients.into());
        metrics.frames_out.inc_by(num_clients.into());
        let scales = u64::from(geometry.scales_per_row) * 4;
        let entries = u64::from(geometry.top_k) * 8;
        let row_bytes = u64::from(geometry.row_stride_bytes) + scales + entries + FLAG_BYTES;
        metrics.bytes_in.inc_by(u64::from(num_clients) * HEADER_BYTES + num_rows * row_bytes);
        metrics.bytes_out.inc_by(answer_bytes(batch, geometry, self.clients.flagged()));
        if num_rows == 0 {
            return;
        }
        metrics.batches.inc();
        metrics.tokens.inc_by(num_rows);
        metrics.entries.inc_by(batch.num_entries.into());
        metrics.batch_tokens.observe(num_rows as f64);
        metrics.batch_clients.observe(num_clients.into());
        let seconds = |ns: u32| f64::from(ns) * 1e-9;
        let mut gather_ns = 0;
        for (idx, waited_ns) in batch.waited_ns.into_iter().enumerate() {
            if batch.clients >> idx & 1 != 0 {
                metrics.queue_seconds.observe(seconds(waited_ns));
                let queued = Duration::from_nanos(waited_ns.into());
                self.load.add_frame(queued, queued + compute);
                gather_ns = gather_ns.max(waited_ns);
            }
        }
        metrics.gather_seconds.observe(seconds(gather_ns));
        metrics.compute_seconds.observe(compute.as_secs_f64());
        self.load.add_batch(num_rows as usize, compute);
        let Some(table) = self.tables.layers.get(batch.layer as usize) else { return };
        for (pair, expert) in self.expert_begin.windows(2).zip(&table.places) {
            let Some(expert) = *expert else { continue };
            let num_tokens = u64::from(pair[1].saturating_sub(pair[0]));
            if num_tokens > 0 {
                self.load.add_expert(batch.layer, expert, num_tokens);
                self.expert_tokens.add(batch.layer, expert, num_tokens);
            }
        }
    }

    /// Records the times of sampled frames of a batch that was seen to have ended at `ended`. Kernels measure the
    /// lengths of waits and computes, and not their time of day.
    pub(super) fn record(
        &self,
        ServerRecorder { recorder, server_key }: &ServerRecorder,
        batch: &Batch,
        compute: Duration,
        ended: Instant,
    ) {
        for (idx, client) in self.clients.entries().iter().enumerate() {
            let Some(client) = client.as_ref().filter(|_| batch.clients >> idx & 1 != 0) else {
                continue;
            };
            let number = batch.frame_number[idx];
            let (client_id, generation) = (client.expect.client_id, client.expect.generation);
            let key = FrameKey::on_gpu(*server_key, client_id, generation, number);
            if !recorder.samples(key.client_id, key.sequence) {
                continue;
            }
            let [begin, end] = [batch.row_begin[idx], batch.row_begin[idx + 1]];
            let waited = Duration::from_nanos(batch.waited_ns[idx].into());
            // A duration of a GPU that is wrong must not end this thread.
            let began = ended.checked_sub(compute).unwrap_or(ended);
            recorder.record(Stamp::Served(ServedStamp {
                key,
                layer: batch.layer,
                num_tokens: end.saturating_sub(begin),
                batch_tokens: batch.num_rows,
                arrived: began.checked_sub(waited).unwrap_or(began),
                began,
                gathered: began,
                computed: ended,
                answered: ended,
                is_on_gpu: true,
            }));
        }
    }

    /// Reports a batch with rows to the observer.
    pub(super) fn report(
        &self,
        batch: &Batch,
        server_time: Duration,
        experts_time: Option<Duration>,
        timeline: Option<BatchTimeline>,
    ) {
        if let Some(observer) = &self.config.observer
            && batch.num_rows > 0
        {
            observer.report(&BatchReport {
                layer: batch.layer,
                num_clients: batch.clients.count_ones(),
                num_rows: batch.num_rows,
                server_time,
                experts_time,
                timeline,
            });
        }
    }
}

/// Bytes of a batch's answers. Rows for clients in `flagged` have a flag each.
fn answer_bytes(batch: &Batch, geometry: &FrameGeometry, flagged: u32) -> u64 {
    let rows_of = |client: usize| {
        let [begin, end] = [batch.row_begin[client], batch.row_begin[client + 1]];
        let is_there = batch.clients >> client & 1 != 0;
        if is_there { u64::from(end.saturating_sub(begin)) } else { 0 }
    };
    let flag_bytes = |client: usize| if flagged >> client & 1 != 0 { FLAG_BYTES } else { 0 };
    let row_bytes = u64::from(geometry.response_stride_bytes);
    (0..batch.row_begin.len() - 1)
        .map(|client| rows_of(client) * (row_bytes + flag_bytes(client)))
        .sum()
}

/// Bytes of a frame's header.
const HEADER_BYTES: u64 = 128;
/// Bytes of a row's flag.
const FLAG_BYTES: u64 = 8;

#[cfg(test)]
mod tests {
    use bytemuck::Zeroable;
    use kernels::abi::DTYPE_BF16;

    use super::*;

    #[test]
    fn only_rows_to_flagged_clients_have_a_flag() {
        let geometry = FrameGeometry::new(256, 4, DTYPE_BF16, 16, 2).unwrap();
        let mut batch = Batch::zeroed();
        // Clients 0 and 2 have rows, client 1 has none, and client 3 is not in this batch.
        batch.clients = 0b101;
        batch.num_rows = 7;
        batch.row_begin = [7; _];
        (batch.row_begin[0], batch.row_begin[1], batch.row_begin[2]) = (0, 5, 5);
        batch.row_begin[4] = 9;
        let row_bytes = u64::from(geometry.response_stride_bytes);
        assert!(row_bytes >= 512);
        assert_eq!(answer_bytes(&batch, &geometry, 0), 7 * row_bytes);
        assert_eq!(answer_bytes(&batch, &geometry, 0b100), 7 * row_bytes + 2 * 8);
        assert_eq!(answer_bytes(&batch, &geometry, 0b1011), 7 * row_bytes + 5 * 8);
        assert_eq!(answer_bytes(&batch, &geometry, u32::MAX), 7 * (row_bytes + 8));
    }
}
