//! The part of the fleet that survives a restart, and the epochs that the store reserves.

use super::Fleet;
use crate::member::{Member, MemberRecord};
use crate::store::Snapshot;
use crate::tickets::TicketRecord;

impl Fleet {
    /// Returns true if the store should be written.
    pub(crate) fn needs_save(&self) -> bool {
        self.revision > self.saved_revision || self.epochs.needs_save()
    }

    /// The snapshot to write, and the revision to pass to [`mark_saved`](Self::mark_saved) once it is
    /// durable.
    pub(crate) fn snapshot(&self) -> (Snapshot, u64) {
        let record = |member: &Member| MemberRecord {
            expired: !member.is_leased(),
            keeps_serving: member.keeps_serving(),
            ..member.record.clone()
        };
        let snapshot = Snapshot {
            cluster_id: self.cluster_id.clone(),
            reserved_epoch: self.epochs.reservation(),
            model: self.model.clone(),
            members: self.members.values().map(record).collect(),
            goals: self.changed_goals,
            tickets: self.tickets.clone(),
            others: Vec::new(),
        };
        (snapshot, self.revision)
    }

    /// Identity of the cluster.
    pub(crate) fn cluster_id(&self) -> &str {
        &self.cluster_id
    }

    pub(crate) fn set_tickets(&mut self, tickets: TicketRecord) {
        self.tickets = tickets;
        self.revision += 1;
    }

    /// Records that a snapshot is durable.
    pub(crate) fn mark_saved(&mut self, snapshot: &Snapshot, revision: u64) {
        self.epochs.mark_saved(snapshot.reserved_epoch);
        self.saved_revision = self.saved_revision.max(revision);
        for record in &snapshot.members {
            if let Some(member) = self.members.get_mut(&record.name)
                && member.record.member_id == record.member_id
            {
                member.is_durable = true;
                member.is_name_durable = true;
            }
        }
    }

    /// The reservation to make durable if no snapshot can be written, or `None` while enough epochs are left.
    pub(crate) fn epoch_to_reserve(&self) -> Option<u64> {
        self.epochs.needs_save().then(|| self.epochs.reservation())
    }

    /// Records that a reservation of epochs is durable without a snapshot.
    pub(crate) fn mark_reserved(&mut self, reservation: u64) {
        self.epochs.mark_reserved(reservation);
    }

    /// Returns true if the store contains a member of this name. Such a name may register while the store cannot
    /// be written, with a new process, too: the fleet needs its servers back. If the registration is lost with
    /// this process, the member registers again.
    pub(crate) fn is_known(&self, name: &str) -> bool {
        self.members.get(name).is_some_and(|member| member.is_name_durable)
    }

    /// Returns true if the store contains the process.
    pub(crate) fn is_durable(&self, name: &str, incarnation: u64) -> bool {
        let member = self.members.get(name);
        member.is_some_and(|member| member.is_durable && member.record.incarnation == incarnation)
    }

    pub(crate) fn revision(&self) -> u64 {
        self.revision
    }
}
