//! Registrations: admission of new members, returns of known ones, takeovers of names.

use std::sync::Arc;
use std::time::Duration;

use control_api::{Assignment, MemberId, RegisterRequest, RegisterResponse};

use super::{Fleet, FleetEvent, RegistrationKind};
use crate::admission::{Refusal, check_registration};
use crate::balance;
use crate::member::{Lease, Member, MemberRecord, Phase, Predecessor};
use crate::planner::Joiner;

impl Fleet {
    /// As [`register_for`](Self::register_for), without an owner.
    #[cfg(test)]
    pub(crate) fn register(
        &mut self,
        request: RegisterRequest,
        now: Duration,
    ) -> Result<RegisterResponse, Refusal> {
        self.register_for(request, None, now)
    }

    /// Registers a member. The identity of a new one ends with the tag `owner`.
    pub(crate) fn register_for(
        &mut self,
        request: RegisterRequest,
        owner: Option<&str>,
        now: Duration,
    ) -> Result<RegisterResponse, Refusal> {
        // The model belongs to its members, the expired ones included: an outage of all must not let another model in.
        // A model that never served as a whole gives way as soon as no member lives. One that has served does so if no
        // client lives either. After a restart, clients and members first have the time of a lease to return.
        let is_dead = !self.members.values().any(Member::is_leased);
        let has_returned = now >= self.plans_from;
        let is_unused = is_dead && !self.has_clients && has_returned;
        let is_free = match self.was_complete {
            true => self.members.is_empty() || is_unused,
            false => is_dead,
        };
        let is_replaced =
            is_free && self.model.as_ref().is_some_and(|model| *model != request.model);
        let model = self.model.as_ref().filter(|_| !is_replaced);
        let is_pinned = self.settings.pinned_fingerprint.is_some();
        check_registration(&request, model, self.settings.pinned_fingerprint.as_deref()).map_err(
            |refusal| match refusal {
                Refusal::ModelMismatch { .. } if is_dead && !is_pinned => {
                    let retention_s = self.settings.expired_retention.as_secs();
                    Refusal::DeadModel { refusal: refusal.to_string(), retention_s }
                }
                refusal => refusal,
            },
        )?;
        let known = self.members.get(&request.name);
        let bound_to = known.and_then(|member| member.record.member_id.tag());
        if owner.is_some() && bound_to.is_some() && owner != bound_to {
            return Err(Refusal::NameBound { name: request.name });
        }
        let was_superseded = known.is_some_and(|member| {
            member.record.superseded.iter().any(|old| old.incarnation == request.incarnation)
        });
        if was_superseded {
            self.note_contest(&request.name, now);
            return Err(Refusal::Superseded { name: request.name });
        }
        if let Some(member) = known
            && member.record.incarnation != request.incarnation
            && member.keeps_name(now)
        {
            let data_addr = member.record.data_addr.clone();
            return Err(Refusal::NameInUse { name: request.name, data_addr });
        }
        if is_replaced {
            self.forget_model(&request.model.fingerprint);
        }
        let kind = match self.members.get(&request.name) {
            None => RegistrationKind::New,
            Some(member) if member.record.incarnation == request.incarnation => {
                RegistrationKind::Returned
            }
            Some(_) => RegistrationKind::Takeover,
        };
        if kind == RegistrationKind::New {
            self.make_room(owner)?;
        }
        if kind == RegistrationKind::Returned {
            self.refresh_member(&request, now);
        } else {
            self.admit(&request, owner, now)?;
        }
        if self.model.is_none() {
            self.model = Some(request.model);
            self.is_table_stale = true;
        }
        self.first_join.get_or_insert(now);
        self.note_unplanned(now);
        self.revision += 1;
        self.events.push(FleetEvent::Registered { name: request.name.clone(), kind });
        let member = &self.members[&request.name];
        Ok(RegisterResponse {
            member_id: member.record.member_id.clone(),
            lease_ttl_ms: self.settings.lease_ttl.as_millis() as u64,
            epoch: self.table.epoch,
            assignment: Assignment::clone(&member.record.assignment),
            assignment_version: member.record.assignment_version,
            ticket_keys: None,
        })
    }

    /// Notes whether any client follows the placement. Without this call the fleet assumes so.
    pub(crate) fn note_clients(&mut self, has_clients: bool) {
        self.has_clients = has_clients;
    }

    /// Registers a known process again: same identity, same assignment, fresh lease.
    fn refresh_member(&mut self, request: &RegisterRequest, now: Duration) {
        let lease_ttl = self.settings.lease_ttl;
        let Some(member) = self.members.get_mut(&request.name) else { return };
        if !member.is_leased() {
            member.record.phase = Phase::Loading;
        }
        member.lease = Lease::Until(now + lease_ttl);
        member.renew_by = None;
        member.renewed_at = now;
        if member.record.data_addr != request.data_addr {
            (member.probe, member.was_reached) = (None, false);
            (member.num_failures, member.probed_at) = (0, now);
        }
        member.record.data_addr.clone_from(&request.data_addr);
        member.record.capacity_experts = request.capacity_experts;
        member.record.zone.clone_from(&request.zone);
        member.record.needs_tickets = request.needs_tickets;
        member.record.plain_text = request.plain_text;
        member.record.metrics_addr.clone_from(&request.metrics_addr);
        member.record.weights_addr.clone_from(&request.weights_addr);
        self.is_table_stale = true;
    }

    /// Registers a new process, which may replace an earlier one of the same name.
    fn admit(
        &mut self,
        request: &RegisterRequest,
        owner: Option<&str>,
        now: Duration,
    ) -> Result<(), Refusal> {
        let assignment = match request.holds.is_empty() {
            true => self.first_assignment(request)?,
            false => request.holds.clone(),
        };
        let old = self.members.get(&request.name);
        let mut superseded = Vec::new();
        let is_name_durable = old.is_some_and(|member| member.is_name_durable);
        if let Some(old) = old {
            superseded.clone_from(&old.record.superseded);
            superseded.push(Predecessor {
                member_id: old.record.member_id.clone(),
                incarnation: old.record.incarnation,
            });
            let surplus = superseded.len().saturating_sub(MAX_SUPERSEDED);
            superseded.drain(..surplus);
            self.names.remove(&old.record.member_id);
        }
        let record = MemberRecord {
            member_id: owner
                .and_then(|tag| MemberId::random_with_tag(tag).ok())
                .unwrap_or_else(MemberId::random),
            name: request.name.clone(),
            incarnation: request.incarnation,
            data_addr: request.data_addr.clone(),
            metrics_addr: request.metrics_addr.clone(),
            weights_addr: request.weights_addr.clone(),
            phase: Phase::Loading,
            keeps_serving: false,
            expired: false,
            assignment: Arc::new(assignment),
            assignment_version: 1,
            holds: Arc::default(),
            superseded,
            capacity_experts: request.capacity_experts,
            zone: request.zone.clone(),
            needs_tickets: request.needs_tickets,
            plain_text: request.plain_text,
        };
        self.names.insert(record.member_id.clone(), record.name.clone());
        let lease = Lease::Until(now + self.settings.lease_ttl);
        let member =
            Member { is_name_durable, probed_at: now, ..Member::new(record, lease, false) };
        self.members.insert(request.name.clone(), member);
        self.is_table_stale = true;
        Ok(())
    }

    /// Experts of a process that has loaded none.
    fn first_assignment(&self, request: &RegisterRequest) -> Result<Assignment, Refusal> {
        let old = self.members.get(&request.name);
        let others: Vec<&Assignment> = self
            .members
            .values()
            .filter(|member| member.record.name != request.name && member.is_planned())
            .map(|member| &*member.record.assignment)
            .collect();
        let Some(settings) = self.settings.balance else {
            let joiner = Joiner {
                capacity_experts: request.capacity_experts,
                previous: old.map(|member| &*member.record.assignment),
            };
            return Ok(self.planner.assign(&request.model, &joiner, &others)?);
        };
        // Its share of the fleet. The next plan then moves what the load asks for.
        let num_servers = (others.len() + 1).max(settings.expected_servers as usize);
        let model = &request.model;
        let replicas = settings.goals.min_replicas as usize;
        let num_pairs = model.num_experts as usize * model.moe_layers.len() * replicas;
        let share = num_pairs.div_ceil(num_servers).min(u32::MAX as usize) as u32;
        let room = request.capacity_experts.map_or(share, |most| most.min(share));
        Ok(balance::fill(model, room, &others))
    }

    /// Makes room for one more member of `owner`. At the limit of the owner or of the fleet, evicts the member that
    /// expired first, among those of this owner: the names of other owners stay bound.
    fn make_room(&mut self, owner: Option<&str>) -> Result<(), Refusal> {
        let limit = self.settings.max_members;
        let is_own = |member: &&Member| member.record.member_id.tag() == owner;
        let num_own = self.members.values().filter(is_own).count();
        let share = limit.div_ceil(2);
        let is_owner_full = owner.is_some() && num_own >= share;
        if self.members.len() < limit && !is_owner_full {
            return Ok(());
        }
        let expired =
            self.members.values().filter(is_own).filter_map(|member| match member.lease {
                Lease::ExpiredAt(at) => Some((at, member.record.name.clone())),
                Lease::Until(_) => None,
            });
        let Some((_, name)) = expired.min() else {
            return Err(match is_owner_full {
                true => Refusal::TooManyOfOwner { share },
                false => Refusal::TooManyMembers { limit },
            });
        };
        self.remove(&name);
        self.events.push(FleetEvent::Removed { name });
        Ok(())
    }

    /// Removes the model and its members, which have all expired. Names that belong to an identity stay bound to it for
    /// the time for which expired members are kept.
    fn forget_model(&mut self, next_fingerprint: &str) {
        self.members.retain(|_, member| member.record.member_id.tag().is_some());
        for member in self.members.values_mut() {
            // The next model may not have these experts.
            (member.record.assignment, member.record.holds) = Default::default();
            (member.placed, member.target) = Default::default();
            (member.unreadable, member.load) = Default::default();
        }
        let members = &self.members;
        self.names.retain(|_, name| members.contains_key(name));
        self.model = None;
        self.loads.clear();
        (self.first_join, self.was_complete) = (None, false);
        self.mark_changed();
        let fingerprint = next_fingerprint.to_owned();
        self.events.push(FleetEvent::ModelReplaced { fingerprint });
    }
}

/// Predecessors kept per name, so that a replaced process cannot register again.
pub(super) const MAX_SUPERSEDED: usize = 8;
