//! A timeline of layers: the begin and the end of every step on both sides.
//!
//! Kernels note times by their GPU's clock, which exchanges convert to the host's. Clients and servers are compared by
//! the host's clock.

use std::fmt;
use std::time::Instant;

use anyhow::Result;
use expert_server::device::BatchTimeline;
use kernels::abi::{BatchStamp, CALL_STAMPS, CallStamp};
use kernels::gpu::Gpu;
use serde::{Deserialize, Serialize};

use crate::clock::gpu::{Clocks, Offset};
use crate::clock::monotonic_us;
use crate::proxy::gpu::offset;
use crate::stats::median;

/// Times of a batch in microseconds of the host's clock.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct BatchTimes {
    /// By `BatchStamp`.
    stamps: Vec<f64>,
    /// Begin and end of the launch, and the sight of the batch's end.
    host: [f64; 3],
}

/// Times of a call in microseconds of the host's clock, by `CallStamp`.
pub(super) type CallTimes = Vec<f64>;

/// A step of a layer.
#[derive(Debug, Clone, Serialize)]
pub struct Step {
    /// `client`, `server 0`, …
    pub lane: String,
    /// The work.
    pub name: &'static str,
    /// Medians in microseconds since the client's dispatch began.
    pub begin_us: f64,
    /// See `begin_us`.
    pub end_us: f64,
}

/// Steps of a median layer.
#[derive(Debug, Clone, Serialize)]
pub struct Timeline {
    /// Tokens of the layer.
    pub tokens: usize,
    /// Layers in the medians.
    pub layers: usize,
    /// Median time from a dispatch's begin to the next one's.
    pub layer_us: f64,
    /// Largest error of a time of another GPU.
    pub uncertainty_us: f64,
    /// In the order of the data path, the host's last.
    pub steps: Vec<Step>,
}

/// The clocks of a GPU and of the host, since a moment before a run.
pub(super) struct ClockPair {
    gpu: Gpu,
    origin: Instant,
    origin_us: f64,
    before: Offset,
}

impl ClockPair {
    pub(super) fn begin(gpu: &Gpu) -> Result<Self> {
        let (origin, origin_us) = (Instant::now(), monotonic_us());
        Ok(Self { gpu: gpu.clone(), origin, origin_us, before: offset(gpu, origin)? })
    }

    /// Returns a conversion of the GPU's nanoseconds to the host's microseconds, and its uncertainty.
    pub(super) fn end(&self) -> Result<(impl Fn(u64) -> f64 + use<>, f64)> {
        let clocks = Clocks::new(self.before, offset(&self.gpu, self.origin)?);
        let origin_us = self.origin_us;
        let to_us =
            move |gpu| if gpu == 0 { 0.0 } else { clocks.host(gpu) as f64 * 1e-3 + origin_us };
        Ok((to_us, clocks.certainty().uncertainty_us))
    }
}

impl BatchTimes {
    pub(super) fn of(batch: &BatchTimeline, to_us: &impl Fn(u64) -> f64) -> Self {
        let host = |at: Instant| monotonic_us() - at.elapsed().as_secs_f64() * 1e6;
        Self {
            stamps: batch.stamps.iter().map(|ns| to_us(*ns)).collect(),
            host: [host(batch.launched[0]), host(batch.launched[1]), host(batch.ended)],
        }
    }

    fn at(&self, stamp: BatchStamp) -> f64 {
        self.stamps[stamp as usize]
    }
}

/// The calls of a trace in their order, without records of no call.
pub(super) fn calls_of(
    stamps: &[[u64; CALL_STAMPS]],
    to_us: &impl Fn(u64) -> f64,
) -> Vec<CallTimes> {
    let mut made: Vec<_> =
        stamps.iter().filter(|call| call[CallStamp::CombineEnd as usize] != 0).collect();
    made.sort_unstable_by_key(|call| call[CallStamp::DispatchStart as usize]);
    made.into_iter().map(|call| call.iter().map(|ns| to_us(*ns)).collect()).collect()
}

impl Timeline {
    /// The median layer of a client's calls, with the batches of each server that took them.
    pub(super) fn of(
        tokens: usize,
        calls: &[CallTimes],
        servers: &[Vec<BatchTimes>],
        uncertainty_us: f64,
    ) -> Self {
        let mut marks: Vec<(String, &'static str, Vec<f64>, Vec<f64>)> = Vec::new();
        let mut add = |lane: String, name: &'static str, begin: f64, end: f64| {
            let found = marks.iter().position(|mark| mark.0 == lane && mark.1 == name);
            let at = found.unwrap_or_else(|| {
                marks.push((lane, name, Vec::new(), Vec::new()));
                marks.len() - 1
            });
            marks[at].2.push(begin);
            marks[at].3.push(end);
        };
        let mut layers = Vec::new();
        for pair in calls.windows(2) {
            let (call, next) = (&pair[0], &pair[1]);
            let at = |stamp: CallStamp| call[stamp as usize];
            let origin = at(CallStamp::DispatchBegin);
            let whole = next[CallStamp::DispatchBegin as usize] - origin;
            // Between two graphs the host is at work.
            if whole > LONGEST_US {
                continue;
            }
            layers.push(whole);
            let mut client = |name, begin, end| {
                add("client".to_owned(), name, at(begin) - origin, at(end) - origin);
            };
            client("dispatch starts", CallStamp::DispatchStart, CallStamp::DispatchBegin);
            client("dispatch", CallStamp::DispatchBegin, CallStamp::DispatchEnd);
            client("combine", CallStamp::CombineBegin, CallStamp::CombineEnd);
            for (idx, batches) in servers.iter().enumerate() {
                // The batch whose answers this call has summed.
                let end = at(CallStamp::CombineEnd) + 2.0 * uncertainty_us;
                let took = |batch: &&BatchTimes| {
                    let seen = batch.at(BatchStamp::RecvSeen);
                    seen > origin - uncertainty_us && seen < end
                };
                let Some(position) = batches.iter().position(|batch| took(&batch)) else {
                    continue;
                };
                let batch = &batches[position];
                let from = |stamp: BatchStamp| batch.at(stamp) - origin;
                let steps = [
                    ("waits", BatchStamp::RecvStart, BatchStamp::RecvSeen),
                    ("chooses", BatchStamp::RecvSeen, BatchStamp::RecvChosen),
                    ("lists", BatchStamp::RecvChosen, BatchStamp::RecvListed),
                    ("receives rows", BatchStamp::RecvListed, BatchStamp::RecvEnd),
                    ("converts", BatchStamp::GatherStart, BatchStamp::GatherEnd),
                    ("gate, up starts", BatchStamp::UpStart, BatchStamp::UpBegin),
                    ("gate, up", BatchStamp::UpBegin, BatchStamp::UpEnd),
                    ("down starts", BatchStamp::DownStart, BatchStamp::DownBegin),
                    ("down", BatchStamp::DownBegin, BatchStamp::DownEnd),
                    ("answer starts", BatchStamp::SendStart, BatchStamp::SendBegin),
                    ("answer", BatchStamp::SendBegin, BatchStamp::SendEnd),
                ];
                for (name, begin, end) in steps {
                    if batch.at(begin) != 0.0 {
                        add(format!("server {idx}"), name, from(begin), from(end));
                    }
                }
                let host = format!("server {idx}, host");
                let [begin, end, seen] = batch.host.map(|time| time - origin);
                add(host.clone(), "launched", begin, end);
                add(host.clone(), "sees the end", from(BatchStamp::SendEnd), seen);
                if let Some(later) =
                    batches[position + 1..].iter().find(|b| b.host[0] >= batch.host[2])
                {
                    add(host, "next launch", later.host[0] - origin, later.host[1] - origin);
                }
            }
        }
        let steps = marks
            .into_iter()
            .map(|(lane, name, mut begin, mut end)| Step {
                lane,
                name,
                begin_us: median(&mut begin),
                end_us: median(&mut end),
            })
            .collect();
        Self { tokens, layers: layers.len(), layer_us: median(&mut layers), uncertainty_us, steps }
    }
}

impl fmt::Display for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "steps with {} token(s): {:.1} µs a layer, medians of {} layers, ± {:.1} µs between GPUs",
            self.tokens, self.layer_us, self.layers, self.uncertainty_us
        )?;
        for Step { lane, name, begin_us, end_us } in &self.steps {
            writeln!(
                f,
                "{begin_us:>9.1} {end_us:>9.1} {:>8.1}  {lane}: {name}",
                end_us - begin_us
            )?;
        }
        Ok(())
    }
}

/// A longer time between two dispatches has a host's work in it.
const LONGEST_US: f64 = 5000.0;
/// Calls and batches that are kept.
pub(super) const NUM_KEPT: usize = 512;

#[cfg(test)]
mod tests {
    use super::*;

    /// A call whose dispatch begins at `origin` µs.
    fn call(origin: f64) -> CallTimes {
        let mut stamps = vec![0.0; CALL_STAMPS];
        for (stamp, at) in [
            (CallStamp::DispatchStart, -1.0),
            (CallStamp::DispatchBegin, 0.0),
            (CallStamp::DispatchEnd, 4.0),
            (CallStamp::CombineBegin, 5.0),
            (CallStamp::CombineEnd, 50.0),
        ] {
            stamps[stamp as usize] = origin + at;
        }
        stamps
    }

    /// The batch that takes it: every step of the kernels takes 2 µs, from 3 µs on.
    fn batch(origin: f64) -> BatchTimes {
        let mut stamps: Vec<f64> = (0..16).map(|idx| origin + 1.0 + f64::from(idx) * 2.0).collect();
        stamps[BatchStamp::GatherStart as usize] = 0.0;
        BatchTimes { stamps, host: [-30.0, -25.0, 40.0].map(|at| origin + at) }
    }

    #[test]
    fn each_call_is_shown_with_its_own_batch_and_a_pause_of_the_host_is_left_out() {
        let origins = [0.0, 60.0, 120.0, 60_000.0, 60_060.0];
        let calls: Vec<_> = origins.map(call).into();
        // One server has a batch of each call, the other one none.
        let batches: Vec<_> = origins.map(batch).into();
        let timeline = Timeline::of(3, &calls, &[batches, Vec::new()], 0.5);
        // Of four pairs of calls one has a pause between them.
        assert_eq!((timeline.tokens, timeline.layers, timeline.layer_us), (3, 3, 60.0));
        let found = |lane: &str, name: &str| {
            let mut steps = timeline.steps.iter().filter(|s| s.lane == lane && s.name == name);
            steps.next().map(|step| (step.begin_us, step.end_us))
        };
        assert_eq!(found("client", "dispatch"), Some((0.0, 4.0)));
        assert_eq!(found("client", "combine"), Some((5.0, 50.0)));
        assert_eq!(found("server 0", "waits"), Some((1.0, 3.0)));
        assert_eq!(found("server 0", "answer"), Some((29.0, 31.0)));
        assert_eq!(found("server 0", "converts"), None, "no batch has this step");
        assert_eq!(found("server 0, host", "launched"), Some((-30.0, -25.0)));
        assert!(timeline.steps.iter().all(|step| !step.lane.starts_with("server 1")));
    }
}
