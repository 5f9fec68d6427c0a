//! Times of traced calls, for the recorder. Only calls that are traced come here.

use std::time::{Duration, Instant};

use protocol::ServerTimes;
use telemetry::{CallStamp, FrameKey, SentStamp, Stamp};

use super::call::Call;
use crate::fleet::link::{Link, OpenFrame};
use crate::fleet::shared::Shared;

/// Records the answer to a frame.
pub(super) fn record_answer(
    shared: &Shared,
    call: &Call,
    client_id: u64,
    link: &Link,
    open: &OpenFrame,
    times: ServerTimes,
) {
    let Some(recorder) = &shared.recorder else { return };
    recorder.record(Stamp::Sent(SentStamp {
        key: FrameKey {
            server_key: link.server_key,
            client_id,
            generation: link.generation,
            sequence: open.sequence,
            frame_idx: open.frame_idx,
        },
        server: link.server.shared_name.clone(),
        num_tokens: open.num_tokens,
        published: open.published_at,
        answered: Instant::now(),
        queue_ns: Some(times.queue_ns),
        compute_ns: Some(times.compute_ns),
        served_as: None,
        context: call.context,
    }));
}

/// Records a call that has ended. `began` is the begin of its dispatch, `combining` of its combine.
pub(super) fn record_call(
    shared: &Shared,
    call: &Call,
    client_id: u64,
    began: Instant,
    combining: Instant,
    is_ok: bool,
) {
    let (Some(recorder), Some(first)) = (&shared.recorder, call.frames.first()) else { return };
    let timing = &call.timing;
    recorder.record(Stamp::Call(CallStamp {
        client_id,
        sequence: first.sequence,
        layer: call.layer,
        num_tokens: call.num_tokens as u32,
        num_frames: timing.num_frames,
        failovers: timing.failovers,
        hedges: timing.hedges,
        began,
        dispatched: began + Duration::from_nanos(timing.dispatch_ns),
        combining,
        ended: Instant::now(),
        wait_ns: timing.wait_ns,
        combine_ns: timing.combine_ns,
        is_ok,
        context: call.context,
    }));
}
