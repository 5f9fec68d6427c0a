//! Requests of members and clients, passed on to the edition that they concern.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use control_api::{
    ClusterStatus, EditionState, EventList, FleetGoals, LeaseRequest, LeaseResponse, MemberId,
    MemberInfo, ModelDigests, ReadyRequest, RegisterRequest, RegisterResponse, ScalingAdvice,
    SuspectRequest, TicketRequest, TicketResponse,
};

use super::{Edition, Editions, lock, to_end};
use crate::admission::Refusal;
use crate::coordinator::{Coordinator, OperationError};

impl Editions {
    /// Registers a member in the edition of its model. `owner` is the tag of the identity that alone may change it
    /// afterwards. A model that no edition has goes to the current one, which decides.
    /// A member of the same name in the other edition is replaced, also if the caller drops the future. Waits for the
    /// store, and for other registrations of the name.
    pub(crate) async fn register(
        self: &Arc<Self>,
        request: RegisterRequest,
        owner: Option<&str>,
    ) -> Result<RegisterResponse, OperationError> {
        // A name must not be given to two processes of different models at the same time. A write of the store that
        // takes long delays the registrations of this name only. A caller that leaves before its turn leaves no task. A
        // change of the editions meanwhile does no harm: a member of an edition that leaves is drained, and one of a
        // forgotten edition registers again.
        let one = self.names.lock_of(&request.name).lock_owned().await;
        let (editions, owner) = (Arc::clone(self), owner.map(str::to_owned));
        to_end(async move {
            let _one = one;
            editions.register_now(request, owner.as_deref()).await
        })
        .await
    }

    async fn register_now(
        &self,
        request: RegisterRequest,
        owner: Option<&str>,
    ) -> Result<RegisterResponse, OperationError> {
        let editions = self.all();
        let (name, incarnation) = (request.name.clone(), request.incarnation);
        let found = &request.model.fingerprint;
        let target = editions.iter().find(|edition| edition.fingerprint().as_ref() == Some(found));
        let target = target.unwrap_or(&editions[0]);
        let is_draining = target.entry.record.state == EditionState::Draining;
        if is_draining && !target.coordinator.has_process(&name, incarnation) {
            let fingerprint = found.clone();
            return Err(Refusal::ModelLeaves { name, fingerprint }.into());
        }
        let (mut replaced, mut holders) = (Vec::new(), Vec::new());
        for other in editions.iter().filter(|other| other.entry.id != target.entry.id) {
            if let Some(holder) = other.coordinator.name_holder(&name, incarnation, owner)? {
                replaced.extend(holder.processes);
                holders.push(other);
            }
        }
        let has_clients = editions.iter().any(|edition| self.may_have_clients(edition));
        target.coordinator.note_clients(editions.len() > 1 || has_clients);
        let response = target.coordinator.register(request, owner, replaced).await?;
        holders.iter().for_each(|holder| holder.coordinator.release(&name));
        Ok(response)
    }

    pub(crate) fn renew(
        &self,
        member: &MemberId,
        request: LeaseRequest,
    ) -> Result<LeaseResponse, OperationError> {
        self.of_member(member).renew(member, request)
    }

    pub(crate) fn ready(
        &self,
        member: &MemberId,
        request: ReadyRequest,
    ) -> Result<MemberInfo, OperationError> {
        self.of_member(member).ready(member, request)
    }

    pub(crate) async fn drain(
        &self,
        member: &MemberId,
        incarnation: Option<u64>,
    ) -> Result<MemberInfo, OperationError> {
        self.of_member(member).drain(member, incarnation).await
    }

    /// See [`Coordinator::resume`]. Goes on if the caller drops the future.
    pub(crate) async fn resume(
        self: &Arc<Self>,
        member: &MemberId,
    ) -> Result<MemberInfo, OperationError> {
        let member = member.clone();
        self.in_turn(
            move |editions| async move { editions.of_member(&member).resume(&member).await },
        )
        .await
    }

    pub(crate) fn suspect(
        &self,
        member: &MemberId,
        request: SuspectRequest,
        observer: &str,
    ) -> Result<Duration, OperationError> {
        self.of_member(member).suspect(member, request, observer)
    }

    pub(crate) fn leave(&self, member: &MemberId) -> Result<(), OperationError> {
        self.of_member(member).leave(member)
    }

    /// Returns true if a member has this identity.
    pub(crate) fn has_member(&self, id: &MemberId) -> bool {
        self.of_member(id).has_member(id)
    }

    /// The members of all editions by name.
    pub(crate) fn members(&self) -> Vec<MemberInfo> {
        if !self.is_update() {
            return self.current().members();
        }
        let mut members = Vec::new();
        for edition in self.all() {
            let fingerprint = edition.fingerprint();
            let infos = edition.coordinator.members().into_iter();
            members
                .extend(infos.map(|info| MemberInfo { fingerprint: fingerprint.clone(), ..info }));
        }
        members.sort_by(|a, b| a.name.cmp(&b.name));
        members
    }

    /// The overview of the current edition, with a list of all of them during an update.
    pub(crate) fn status(&self) -> ClusterStatus {
        let mut status = self.current().status();
        if self.is_update() {
            status.editions = self.list().editions;
            for other in self.all().iter().skip(1) {
                status.problems.extend(other.coordinator.server_problems());
            }
        }
        status
    }

    /// The last events of all editions, after number `seq`.
    pub(crate) fn events_after(&self, seq: u64) -> EventList {
        self.events.after(seq)
    }

    pub(crate) fn advice(&self) -> ScalingAdvice {
        self.current().advice()
    }

    pub(crate) fn goals(&self) -> Result<FleetGoals, OperationError> {
        self.current().goals()
    }

    /// Changes the goals of all editions. They are durable before this returns. If those of any edition cannot be stored,
    /// all are taken back. Goes on if the caller drops the future.
    pub(crate) async fn set_goals(
        self: &Arc<Self>,
        goals: FleetGoals,
    ) -> Result<FleetGoals, OperationError> {
        self.in_turn(move |editions| async move { editions.set_goals_now(goals).await }).await
    }

    async fn set_goals_now(&self, goals: FleetGoals) -> Result<FleetGoals, OperationError> {
        let editions = self.all();
        let mut begun = Vec::new();
        let mut outcome = Ok(goals);
        for Edition { coordinator, .. } in &editions {
            match coordinator.begin_goals(goals) {
                Ok(change) => begun.push((coordinator, change)),
                Err(err) => {
                    outcome = Err(err);
                    break;
                }
            }
        }
        for (coordinator, change) in &begun {
            if outcome.is_ok() {
                outcome = coordinator.stored(change).await.map(|()| goals);
            }
        }
        if outcome.is_err() {
            for (coordinator, change) in begun {
                coordinator.take_back(change);
            }
        }
        outcome
    }

    /// Issues a ticket for the servers of all editions.
    pub(crate) async fn issue_ticket(
        &self,
        request: &TicketRequest,
        holder: &str,
        bound: Duration,
    ) -> Result<TicketResponse, OperationError> {
        self.current().issue_ticket(request, holder, bound).await
    }

    /// Revokes all tickets. Servers of each edition learn of it with their next renewal.
    pub(crate) async fn revoke_tickets(&self) -> Result<u64, OperationError> {
        self.current().revoke_tickets().await
    }

    /// The digests of the tensors of one model as JSON, if a member has sent them. `None` asks for the current model.
    pub(crate) fn model_digests(&self, fingerprint: Option<&str>) -> Option<Bytes> {
        match fingerprint {
            None => self.current().model_digests(),
            Some(wanted) => self.of_model(wanted)?.model_digests(),
        }
    }

    pub(crate) fn store_model_digests(
        &self,
        digests: ModelDigests,
        json: Bytes,
    ) -> Result<(), OperationError> {
        let edition = self.of_model(&digests.fingerprint);
        edition.unwrap_or_else(|| self.current()).store_model_digests(digests, json)
    }

    /// Error of the last write of the store; `None` while it can be written.
    pub(crate) fn write_error(&self) -> Option<String> {
        self.current().write_error()
    }

    /// See [`Coordinator::note_outage`].
    pub(crate) fn note_outage(&self, reason: Option<&str>) {
        self.all().iter().for_each(|edition| edition.coordinator.note_outage(reason));
    }

    /// Ends all waits for the store, because nothing writes it any more.
    pub(crate) fn end(&self) {
        self.all().iter().for_each(|edition| edition.coordinator.end());
    }

    /// Returns true while there is more than one edition.
    pub(super) fn is_update(&self) -> bool {
        lock(&self.editions).len() > 1
    }

    fn of_model(&self, fingerprint: &str) -> Option<Arc<Coordinator>> {
        let is_wanted = |edition: &&Edition| edition.fingerprint().as_deref() == Some(fingerprint);
        self.all().iter().find(is_wanted).map(|edition| Arc::clone(&edition.coordinator))
    }

    /// The edition that knows the member, or has replaced it. The current one answers for unknown members.
    fn of_member(&self, id: &MemberId) -> Arc<Coordinator> {
        if !self.is_update() {
            return self.current();
        }
        let editions = self.all();
        let found = editions.iter().find(|edition| edition.coordinator.has_member(id));
        let found = found
            .or_else(|| editions.iter().find(|edition| edition.coordinator.has_predecessor(id)));
        Arc::clone(&found.unwrap_or(&editions[0]).coordinator)
    }
}
