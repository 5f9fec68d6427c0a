//! Times of sampled calls, for the recorder, as the host sees them.
//!
//! A server on a GPU knows the number of each frame on its connection, and no number of the call. So each frame is
//! sampled by itself. The first sampled frame of a call gives the call its trace, which that frame's server shares. The
//! spans of other sampled frames link to those of their servers.

use std::time::{Duration, Instant};

use kernels::abi::Handle;
use telemetry::{CallStamp, FrameKey, Recorder, SentStamp, Stamp};

use super::calls::Call;
use super::peers::{Peer, Peers, bits};
use crate::timing::LayerTiming;

/// Records a call that has succeeded. Its combine began at `combining`, as the host saw it.
pub(super) fn record_call(
    recorder: &Recorder,
    peers: &Peers,
    call: &Call,
    handle: &Handle,
    timing: &LayerTiming,
    combining: Instant,
) {
    let Some(began) = call.started else { return };
    let frame = |idx: usize| {
        let peer = peers.peer_of(idx, &call.tables)?;
        let (server_key, generation) = (peer.link.server_key, peer.link.generation);
        let number = handle.frame_number[idx];
        Some((idx, peer, FrameKey::on_gpu(server_key, peers.client_id, generation, number)))
    };
    let answered = handle.contacted & !handle.missing;
    let is_sampled =
        |(.., key): &(usize, &Peer, FrameKey)| recorder.samples(key.client_id, key.sequence);
    let sampled = bits(answered).filter_map(frame).find(is_sampled);
    let is_in_callers = call.context.is_some_and(|context| context.is_sampled);
    let first = sampled.or_else(|| bits(answered).find_map(frame).filter(|_| is_in_callers));
    let Some((first_idx, _, first)) = first else { return };
    let dispatched = began + Duration::from_nanos(timing.dispatch_ns);
    let ended = Instant::now();
    recorder.record(Stamp::Call(CallStamp {
        client_id: first.client_id,
        sequence: first.sequence,
        layer: call.layer.number,
        num_tokens: handle.num_tokens,
        num_frames: timing.num_frames,
        failovers: timing.failovers,
        hedges: timing.hedges,
        began,
        dispatched,
        combining,
        ended,
        wait_ns: timing.wait_ns,
        combine_ns: timing.combine_ns,
        is_ok: true,
        context: call.context,
    }));
    for (idx, peer, own) in bits(answered).filter_map(frame) {
        let is_first = idx == first_idx;
        let in_first = FrameKey { server_key: own.server_key, frame_idx: idx as u32, ..first };
        recorder.record(Stamp::Sent(SentStamp {
            key: if is_first { own } else { in_first },
            server: peer.link.server.shared_name.clone(),
            num_tokens: handle.num_rows[idx],
            published: dispatched,
            answered: ended,
            queue_ns: None,
            compute_ns: None,
            served_as: (!is_first).then_some(own),
            context: call.context,
        }));
    }
}
