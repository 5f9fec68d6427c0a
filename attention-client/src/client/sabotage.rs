//! Wrong behaviours that fault tests ask for, to see that their rig notices.
//!
//! Builds without the feature `failpoints` have none of them: [`asked`] is then the constant `false`.

use std::time::{Duration, Instant};

use super::lane::Lane;
use super::link::ABANDONED;

/// A re-sent row is added twice. The accounts do not notice.
pub(crate) const DOUBLE_COUNT: &str = "client::sabotage_double_count";
/// One pair of a failed frame is not sent again. The accounts do not notice.
pub(crate) const LOSE_PAIR: &str = "client::sabotage_lose_pair";
/// Whatever answer comes is taken for the one that is due.
pub(crate) const SKIP_STALE_CHECK: &str = "client::sabotage_skip_stale_check";
/// The slot of a silent server is read on after its frames went to replicas.
pub(crate) const READ_RETIRED: &str = "client::sabotage_read_retired";

/// Whether a test asked for the wrong behaviour `name`.
#[inline]
pub(crate) fn asked(name: &str) -> bool {
    fail::fail_point!(name, |_| true);
    let _ = name;
    false
}

impl Lane {
    /// Sends what the link owes elsewhere, like a failed one's, but goes on reading its slot.
    pub(super) fn fail_but_read_on(&mut self, idx: usize) {
        let Some(link) = self.links[idx].as_deref_mut() else { return };
        for pending in link.pending.iter().filter(|pending| pending.frame != ABANDONED) {
            self.call.frame_failed(pending.frame, &link.server);
        }
        // Whatever still comes answers nothing: only the count of such answers tells that it was read.
        link.pending.clear();
        for frame in link.queue.drain(..) {
            self.call.frame_unsent(frame, &link.server);
        }
        self.call.link_failed(link.server.idx, link.last_life);
        link.server.silenced.store(true, std::sync::atomic::Ordering::Relaxed);
        // Its silence has been dealt with.
        link.last_life = Instant::now() + Duration::from_secs(3600);
    }
}
