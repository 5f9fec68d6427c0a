//! A fleet beside that of another model: names that move between the two, and the end of the whole fleet.

use std::time::Duration;

use control_api::{FleetGoals, MemberId};

use super::register::MAX_SUPERSEDED;
use super::{Fleet, FleetEvent};
use crate::member::{Phase, Predecessor};

/// A member whose name a process of another model asks for.
#[derive(Clone, Debug)]
pub(crate) struct Holder {
    pub(crate) incarnation: u64,
    pub(crate) data_addr: String,
    /// True while no other process may take over the name.
    pub(crate) keeps_name: bool,
    /// The processes of this name until now, the oldest first and this one last.
    pub(crate) processes: Vec<Predecessor>,
}

impl Holder {
    /// Tag of the identity that owns the name.
    pub(crate) fn owner(&self) -> Option<&str> {
        self.processes.last()?.member_id.tag()
    }
}

impl Fleet {
    /// The member of this name.
    pub(crate) fn holder(&self, name: &str, now: Duration) -> Option<Holder> {
        let member = self.members.get(name)?;
        let record = &member.record;
        let mut processes = record.superseded.clone();
        processes.push(Predecessor {
            member_id: record.member_id.clone(),
            incarnation: record.incarnation,
        });
        Some(Holder {
            incarnation: record.incarnation,
            data_addr: record.data_addr.clone(),
            keeps_name: member.keeps_name(now),
            processes,
        })
    }

    /// Returns true if a later process has taken the name over from this one, and notes that both live.
    pub(crate) fn is_superseded(&mut self, name: &str, incarnation: u64, now: Duration) -> bool {
        let member = self.members.get(name);
        let is_superseded = member.is_some_and(|member| {
            member.record.superseded.iter().any(|old| old.incarnation == incarnation)
        });
        if is_superseded {
            self.note_contest(name, now);
        }
        is_superseded
    }

    /// Makes processes of another fleet predecessors of the member: they cannot register again.
    pub(crate) fn add_predecessors(&mut self, name: &str, older: Vec<Predecessor>) {
        if older.is_empty() {
            return;
        }
        let Some(member) = self.members.get_mut(name) else { return };
        let superseded = &mut member.record.superseded;
        superseded.splice(0..0, older);
        let surplus = superseded.len().saturating_sub(MAX_SUPERSEDED);
        superseded.drain(..surplus);
        self.mark_changed();
    }

    /// Removes a member whose name now belongs to a process of another model.
    pub(crate) fn release(&mut self, name: &str) {
        if self.members.contains_key(name) {
            self.remove(name);
            self.events.push(FleetEvent::Left { name: name.to_owned() });
        }
    }

    /// Returns true if `id` is that of a process that a later one has replaced.
    pub(crate) fn has_predecessor(&self, id: &MemberId) -> bool {
        self.name_of(id)
            .is_err_and(|refusal| matches!(refusal, crate::admission::Refusal::Superseded { .. }))
    }

    /// Drains every member that is not draining. Returns the number of members that still have a lease.
    pub(crate) fn drain_all(&mut self, now: Duration) -> usize {
        let drains_by = self.settings.balance.map(|balance| now + balance.drain_grace);
        let mut drained = Vec::new();
        let mut num_leased = 0;
        for member in self.members.values_mut().filter(|member| member.is_leased()) {
            num_leased += 1;
            if member.record.phase != Phase::Draining {
                member.start_drain(drains_by);
                drained.push(member.record.name.clone());
            }
        }
        if !drained.is_empty() {
            self.note_unplanned(now);
            self.mark_changed();
        }
        // No other member will take the experts over.
        for member in self.members.values_mut().filter(|member| member.keeps_serving()) {
            member.hand_over(|_, _| false);
        }
        let events = drained.into_iter().map(|name| FleetEvent::Draining { name });
        self.events.extend(events);
        num_leased
    }

    /// Restricts the fleet to one fingerprint, or accepts any model if no member is left.
    pub(crate) fn pin_model(&mut self, fingerprint: Option<String>) {
        self.settings.pinned_fingerprint = fingerprint;
    }

    /// Goals that were changed while the control plane ran.
    pub(crate) fn changed_goals(&self) -> Option<FleetGoals> {
        self.changed_goals
    }
}
