//! Wrong behaviours that fault tests switch on, to see that they notice.
//!
//! Only builds with the feature `failpoints` contain this module.

use p2p_core::ReadView;
use protocol::{CombineExpect, ResponseScratch};

/// Adds a resent row twice. The accounts do not notice.
pub(super) const DOUBLE_COUNT: &str = "client::sabotage_double_count";
/// Does not resend one pair of a failed frame. The accounts do not notice.
pub(super) const LOSE_PAIR: &str = "client::sabotage_lose_pair";
/// Accepts any answer in place of the expected one.
pub(super) const SKIP_STALE_CHECK: &str = "client::sabotage_skip_stale_check";
/// Counts both the late answer and that of the other replica. The accounts notice.
pub(super) const DOUBLE_HEDGE: &str = "client::sabotage_double_hedge";
/// Goes on reading the slot of a silent server after its frames went to replicas.
pub(super) const READ_RETIRED: &str = "client::sabotage_read_retired";

/// Returns true if a test has switched the wrong behaviour `name` on.
pub(super) fn is_on(name: &str) -> bool {
    fail::fail_point!(name, |_| true);
    false
}

/// With [`SKIP_STALE_CHECK`], `expect` changed to match whatever answer `view` holds.
pub(super) fn expect_any(
    view: ReadView<'_>,
    mut expect: CombineExpect,
    scratch: &mut ResponseScratch,
) -> CombineExpect {
    if is_on(SKIP_STALE_CHECK)
        && let Ok(id) = protocol::response_id(view, scratch)
    {
        expect.sequence = id.sequence;
        expect.generation = id.generation;
        expect.layer = id.layer;
        expect.frame_idx = id.frame_idx;
    }
    expect
}
