//! A coordinator as that of one edition of the model among others.

use control_api::{EditionInfo, EditionState, FleetGoals, MemberId, ScalingAdvice};

use super::{Coordinator, OperationError, lock};
use crate::admission::Refusal;
use crate::fleet::Holder;
use crate::table::Coverage;

impl Coordinator {
    /// Fingerprint of the model, once a member has registered.
    pub(crate) fn fingerprint(&self) -> Option<String> {
        lock(&self.fleet).model().map(|model| model.fingerprint.clone())
    }

    /// Coverage of the experts. `replicas` stands for the planned number of replicas.
    pub(crate) fn coverage(&self, replicas: Option<u32>) -> Coverage {
        let fleet = lock(&self.fleet);
        match replicas {
            None => fleet.coverage(),
            Some(replicas) => fleet.coverage_of(fleet.table(), replicas),
        }
    }

    /// The edition as the API shows it, without what only the update knows.
    pub(crate) fn edition_info(&self, state: EditionState) -> EditionInfo {
        let fleet = lock(&self.fleet);
        let coverage = fleet.coverage();
        EditionInfo {
            fingerprint: fleet.model().map(|model| model.fingerprint.clone()),
            state,
            model: fleet.model().cloned(),
            epoch: fleet.table().epoch,
            members: fleet.counts(),
            experts_total: coverage.experts_total,
            experts_without_replica: coverage.without_replica,
            experts_under_replicated: coverage.under_replicated,
            num_clients: 0,
            plan_error: fleet.shortage(),
            switches_when_complete: false,
            retires_within_ms: None,
        }
    }

    /// A sentence for each trouble of its servers: see [`ClusterStatus::problems`](control_api::ClusterStatus).
    pub(crate) fn server_problems(&self) -> Vec<String> {
        super::server_problems(&lock(&self.fleet))
    }

    /// Notes whether any client follows the placement of this edition.
    pub(crate) fn note_clients(&self, has_clients: bool) {
        lock(&self.fleet).note_clients(has_clients);
    }

    pub(crate) fn has_predecessor(&self, id: &MemberId) -> bool {
        lock(&self.fleet).has_predecessor(id)
    }

    /// The member that holds a name which a process of another model asks for.
    ///
    /// # Errors
    /// [`Refusal::Superseded`] if that process has lost the name before, [`Refusal::NameInUse`] if two live processes
    /// contend for it, [`Refusal::NameBound`] if another identity owns it.
    pub(crate) fn name_holder(
        &self,
        name: &str,
        incarnation: u64,
        owner: Option<&str>,
    ) -> Result<Option<Holder>, OperationError> {
        self.with_fleet(|fleet, now| {
            if fleet.is_superseded(name, incarnation, now) {
                return Err(Refusal::Superseded { name: name.to_owned() }.into());
            }
            let holder = fleet.holder(name, now);
            let bound_to = holder.as_ref().and_then(Holder::owner);
            if owner.is_some() && bound_to.is_some() && owner != bound_to {
                return Err(Refusal::NameBound { name: name.to_owned() }.into());
            }
            match holder {
                Some(Holder { data_addr, keeps_name: true, .. }) => {
                    Err(Refusal::NameInUse { name: name.to_owned(), data_addr }.into())
                }
                // One process has one model.
                Some(holder) if holder.incarnation == incarnation => {
                    Err(Refusal::Superseded { name: name.to_owned() }.into())
                }
                holder => Ok(holder),
            }
        })
    }

    /// Returns true if the process is a member.
    pub(crate) fn has_process(&self, name: &str, incarnation: u64) -> bool {
        let holder = lock(&self.fleet).holder(name, self.clock.now());
        holder.is_some_and(|holder| holder.incarnation == incarnation)
    }

    /// Removes a member whose name now belongs to a process of another model.
    pub(crate) fn release(&self, name: &str) {
        self.with_fleet(|fleet, _| fleet.release(name));
    }

    /// Drains every member that is not draining. Returns the number of members that still have a lease.
    pub(crate) fn drain_all(&self) -> usize {
        self.with_fleet(|fleet, now| fleet.drain_all(now))
    }

    pub(crate) fn pin_model(&self, fingerprint: Option<String>) {
        lock(&self.fleet).pin_model(fingerprint);
    }

    /// Makes this edition the one that the gauges of the fleet show, or no longer.
    pub(crate) fn show_in_gauges(&self, is_shown: bool) {
        self.metrics.show_fleet(is_shown);
        let advice: ScalingAdvice = self.advice();
        let fleet = lock(&self.fleet);
        self.metrics.set_members(fleet.counts());
        self.metrics.set_coverage(fleet.coverage());
        self.metrics.set_epoch(fleet.table().epoch);
        self.metrics.set_advice(&advice);
    }

    /// Keeps the keys of tickets that another edition has kept until now.
    pub(crate) fn keep_tickets(&self) {
        self.with_fleet(|fleet, _| fleet.set_tickets(self.tickets.record()));
    }

    /// One tick of a clock that a test drives.
    #[cfg(test)]
    pub(crate) fn tick_once(&self, period: std::time::Duration) {
        self.with_fleet(|fleet, now| fleet.tick(now, period));
    }

    /// True while a change is not in the store.
    #[cfg(test)]
    pub(crate) fn needs_save(&self) -> bool {
        lock(&self.fleet).needs_save()
    }

    pub(crate) fn cluster_id(&self) -> String {
        lock(&self.fleet).cluster_id().to_owned()
    }

    /// Goals that were changed while the control plane ran.
    pub(crate) fn changed_goals(&self) -> Option<FleetGoals> {
        lock(&self.fleet).changed_goals()
    }

    /// Planned replicas per expert.
    pub(crate) fn replicas(&self) -> u32 {
        lock(&self.fleet).replicas()
    }
}
