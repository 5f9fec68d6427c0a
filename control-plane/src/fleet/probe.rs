//! Attempts of the control plane to connect to members.

use std::time::Duration;

use control_api::MemberState;

use super::{Fleet, FleetEvent};
use crate::member::{Lease, Member};

/// Reason why an attempt to connect has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ProbeError {
    pub(crate) reason: String,
    /// True if the host answered that nothing listens at the address.
    pub(crate) is_refused: bool,
}

impl Fleet {
    /// Members to connect to: name, incarnation and address. A serving member is due at once, again
    /// [`PROBE_PERIOD`] after a failure, and a few times per heartbeat interval while it is late to renew.
    /// The one that has waited longest comes first, so that members which answer nothing keep no other one waiting for
    /// more than one attempt each.
    pub(crate) fn due_probes(&self, now: Duration) -> Vec<(String, u64, String)> {
        let is_due = |member: &&Member| match &member.probe {
            _ if member.state() != MemberState::Serving => false,
            Some(_) if self.is_late(member, now) => {
                now >= member.probed_at + self.settings.lease_ttl / LATE_PROBES
            }
            Some(Ok(())) => false,
            Some(Err(_)) => now >= member.probed_at + PROBE_PERIOD,
            None => true,
        };
        let key = |member: &Member| {
            let record = &member.record;
            (record.name.clone(), record.incarnation, record.data_addr.clone())
        };
        let mut due: Vec<&Member> = self.members.values().filter(is_due).collect();
        due.sort_by_key(|member| member.probed_at);
        due.into_iter().map(key).collect()
    }

    /// Records the outcome of an attempt to connect to a member at `data_addr`. It says nothing about another address, which
    /// the member may have by now.
    pub(crate) fn record_attempt(
        &mut self,
        (name, incarnation): (&str, u64),
        data_addr: &str,
        outcome: Result<(), ProbeError>,
        now: Duration,
    ) {
        if self.members.get(name).is_some_and(|member| member.record.data_addr == data_addr) {
            self.record_probe(name, incarnation, outcome, now);
        }
    }

    /// Records the outcome of an attempt to connect to a member at its present address.
    pub(super) fn record_probe(
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
        let was_reached = member.was_reached;
        member.was_reached |= outcome.is_ok();
        member.num_failures = match &outcome {
            Ok(()) => 0,
            // Until this process reaches any member, its own network may be at fault.
            Err(_) => member.num_failures + u32::from(self.has_reached_any),
        };
        let is_refused = outcome.as_ref().is_err_and(|err| err.is_refused);
        member.probe = Some(outcome.map_err(|err| err.reason));
        member.probed_at = now;
        if is_refused && was_reached {
            self.expire_late(name, now);
        }
        self.confirm_suspicion(name, now);
        self.leave_out_unreached(now);
    }

    /// True if the member should have renewed by now, with a grace. The lease then has less than two heartbeat intervals
    /// left.
    fn is_late(&self, member: &Member, now: Duration) -> bool {
        let Lease::Until(until) = member.lease else { return false };
        let slack = (self.settings.lease_ttl * 2 / 3).saturating_sub(self.settings.suspect_grace);
        until <= now + slack
    }

    /// Lets a late member expire with the next tick. Its host refuses connections to an address that has accepted them,
    /// so no process of it is left. A live member that is only late still accepts, and a
    /// lost path refuses nothing.
    fn expire_late(&mut self, name: &str, now: Duration) {
        let Some(member) = self.members.get(name) else { return };
        if self.is_late(member, now)
            && let Some(member) = self.members.get_mut(name)
        {
            member.renew_by = Some(now);
        }
    }

    /// Leaves out members that this process has never reached, after [`MAX_FAILURES`] attempts in a row that failed since
    /// it has reached any. Until then its own network may be at fault, and it judges no member. One that is judged next
    /// takes over nothing yet.
    fn leave_out_unreached(&mut self, now: Duration) {
        self.has_reached_any |= self.members.values().any(|member| member.was_reached);
        let mut changed = Vec::new();
        for member in self.members.values_mut() {
            member.is_doubtful = self.has_reached_any && !member.was_reached;
            // A member stays left out until it is reached.
            let is_left_out =
                member.is_doubtful && (member.is_left_out || member.num_failures >= MAX_FAILURES);
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

/// Attempts per time to live while a member is late.
const LATE_PROBES: u32 = 20;
/// Attempts in a row that fail before a member is left out.
const MAX_FAILURES: u32 = 2;
/// Time between a failed attempt and the next one.
const PROBE_PERIOD: Duration = Duration::from_secs(2);
