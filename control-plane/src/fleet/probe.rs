//! Attempts of the control plane to connect to members.

use std::time::Duration;

use control_api::MemberState;

use super::{Fleet, FleetEvent};
use crate::member::Member;

/// Reason why an attempt to connect has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ProbeError {
    pub(crate) reason: String,
    /// True if the host answered that nothing listens at the address.
    pub(crate) is_refused: bool,
}

impl Fleet {
    /// Members to connect to: name, incarnation and address. A serving member is due at once, and again
    /// [`PROBE_PERIOD`] after a failure.
    pub(crate) fn due_probes(&self, now: Duration) -> Vec<(String, u64, String)> {
        let is_due = |member: &&Member| match &member.probe {
            _ if member.state() != MemberState::Serving => false,
            Some(Ok(())) => false,
            Some(Err(_)) => now >= member.probed_at + PROBE_PERIOD,
            None => true,
        };
        let key = |member: &Member| {
            let record = &member.record;
            (record.name.clone(), record.incarnation, record.data_addr.clone())
        };
        self.members.values().filter(is_due).map(key).collect()
    }

    /// Records the outcome of an attempt to connect to a member.
    pub(crate) fn record_probe(
        &mut self,
        name: &str,
        incarnation: u64,
        outcome: Result<(), ProbeError>,
        now: Duration,
    ) {
        let Some(member) = self.members.get_mut(name) else { return };
        if member.record.incarnation != incarnation {
            return;
        }
        let was_error = matches!(member.probe, Some(Err(_)));
        if let (Err(err), false) = (&outcome, was_error) {
            let (name, data_addr) = (name.to_owned(), member.record.data_addr.clone());
            let reason = err.reason.clone();
            self.events.push(FleetEvent::Unreachable { name, data_addr, reason });
        }
        member.was_reached |= outcome.is_ok();
        member.probe = Some(outcome.map_err(|err| err.reason));
        member.probed_at = now;
        self.confirm_suspicion(name, now);
        self.leave_out_unreached(now);
    }

    /// Leaves out members that this process has never reached, once it has reached any. Until then its own network may
    /// be at fault, and it judges no member.
    fn leave_out_unreached(&mut self, now: Duration) {
        self.has_reached_any |= self.members.values().any(|member| member.was_reached);
        let mut changed = Vec::new();
        for member in self.members.values_mut() {
            let is_left_out = match &member.probe {
                _ if member.was_reached || !self.has_reached_any => false,
                Some(Err(_)) => true,
                // Another attempt is under way.
                _ => member.is_left_out,
            };
            if member.is_left_out != is_left_out {
                member.is_left_out = is_left_out;
                changed.push((member.record.name.clone(), is_left_out));
            }
        }
        for (name, is_left_out) in changed {
            self.events.push(FleetEvent::LeftOut { name, is_left_out });
            self.note_unplanned(now);
            self.mark_changed();
        }
        // A member that was reached may take over experts.
        self.is_table_stale = true;
    }
}

/// Time between a failed attempt and the next one.
const PROBE_PERIOD: Duration = Duration::from_secs(2);
