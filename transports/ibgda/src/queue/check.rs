//! Checks whether posters can use their handles, before they get them.

use kernels::mlx5::{CQ_COLLAPSED, NO_RECORD, ONE_BLOCK, PeerHandle, QueueHandle, ReceiveHandle};

use super::{BLOCK_BYTES, CQE_BYTES, MAX_DEPTH, MAX_MESSAGE_BYTES, MAX_RECEIVES, MIN_DEPTH};

/// Finds an error in a queue, in the words of `sy_mlx5_check_qp`; `tests/it/handles.rs` compares both.
#[must_use]
pub fn check_queue(queue: &QueueHandle) -> Option<&'static str> {
    let is_collapsed = queue.flags & CQ_COLLAPSED != 0;
    let is_at =
        |address: u64, multiple: u32| address != 0 && address.is_multiple_of(u64::from(multiple));
    let is_cq_depth_good = if is_collapsed {
        queue.cq_depth == 1
    } else {
        queue.cq_depth >= queue.sq_depth && queue.cq_depth.is_power_of_two()
    };
    let checks = [
        (queue.flags & !(CQ_COLLAPSED | ONE_BLOCK | NO_RECORD) == 0, "flags has unknown bits"),
        ((MIN_DEPTH..=MAX_DEPTH).contains(&queue.sq_depth), "sq_depth is not from 128 to 32768"),
        (queue.sq_depth.is_power_of_two(), "sq_depth is not a power of two"),
        (
            is_cq_depth_good,
            "cq_depth is neither 1 and collapsed nor a power of two of at least sq_depth",
        ),
        (is_at(queue.sq, BLOCK_BYTES), "sq is null or not aligned to 64 bytes"),
        (is_at(queue.cq, CQE_BYTES), "cq is null or not aligned to 64 bytes"),
        (
            is_at(queue.dbrec, 8) && is_at(queue.doorbell, 8),
            "dbrec or doorbell is null or not aligned to 8 bytes",
        ),
        (is_collapsed || is_at(queue.cq_dbrec, 8), "cq_dbrec is null or not aligned to 8 bytes"),
        (
            is_at(queue.state, 8) && queue.scratch.is_multiple_of(8),
            "state is null, or state or scratch is not aligned to 8 bytes",
        ),
        (queue.host_error.is_multiple_of(8), "host_error is not aligned to 8 bytes"),
        (
            (1..=queue.sq_depth / 4).contains(&queue.batch),
            "batch is 0 or beyond a quarter of sq_depth",
        ),
        (
            (1..=MAX_MESSAGE_BYTES).contains(&queue.max_message_bytes),
            "max_message_bytes is 0 or beyond 1 GiB",
        ),
        ((1..=0xff_ffff).contains(&queue.qpn), "qpn is 0 or has more than 24 bits"),
    ];
    first_wrong(&checks)
}

/// Finds an error in receives, in the words of `sy_mlx5_check_rq`.
#[must_use]
pub fn check_receives(receives: &ReceiveHandle) -> Option<&'static str> {
    let is_at =
        |address: u64, multiple: u32| address != 0 && address.is_multiple_of(u64::from(multiple));
    let depth = receives.cq_depth;
    let checks = [
        (
            (1..=MAX_RECEIVES).contains(&receives.num_receives),
            "num_receives is not from 1 to 32768",
        ),
        (
            (receives.num_receives..=1 << 22).contains(&depth) && depth.is_power_of_two(),
            "cq_depth is not a power of two from num_receives to 4194304",
        ),
        (is_at(receives.cq, CQE_BYTES), "cq is null or not aligned to 64 bytes"),
        (
            is_at(receives.dbrec, 8) && is_at(receives.cq_dbrec, 8),
            "dbrec or cq_dbrec is null or not aligned to 8 bytes",
        ),
        (is_at(receives.state, 8), "state is null or not aligned to 8 bytes"),
        ((1..=0xff_ffff).contains(&receives.qpn), "qpn is 0 or has more than 24 bits"),
    ];
    first_wrong(&checks)
}

/// Finds an error in a peer, in the words of `sy_ibgda_check_peer`: kernels divide by its number of queues, and
/// read its table of them.
#[must_use]
pub fn check_peer(peer: &PeerHandle) -> Option<&'static str> {
    let checks = [
        (peer.num_qps != 0, "num_qps is 0"),
        (peer.qps != 0 && peer.qps.is_multiple_of(8), "qps is null or not aligned to 8 bytes"),
        (
            peer.mirror != 0 && peer.mirror.is_multiple_of(64),
            "mirror is null or not aligned to 64 bytes",
        ),
        (
            peer.remote != 0 && peer.remote.is_multiple_of(64),
            "remote is null or not aligned to 64 bytes",
        ),
        (peer.slot_bytes != 0, "slot_bytes is 0"),
        (
            peer.remote.checked_add(peer.slot_bytes).is_some()
                && peer.mirror.checked_add(peer.slot_bytes).is_some(),
            "slot_bytes reaches beyond the last address",
        ),
    ];
    first_wrong(&checks)
}

fn first_wrong(checks: &[(bool, &'static str)]) -> Option<&'static str> {
    checks.iter().find(|(is_good, _)| !is_good).map(|(_, what)| *what)
}
