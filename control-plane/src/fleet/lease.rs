//! Leases: renewals, stages of life, suspicions and expiry.

use std::time::Duration;

use control_api::{
    Assignment, LeaseRequest, LeaseResponse, MemberId, MemberInfo, ReadyRequest, SuspectRequest,
    WantedDigests,
};

use super::{ExpiryCause, Fleet, FleetEvent};
use crate::admission::{Refusal, check_assignment, check_load};
use crate::member::{Lease, Member, Phase, Report};

impl Fleet {
    pub(crate) fn renew(
        &mut self,
        member: &MemberId,
        request: LeaseRequest,
        now: Duration,
    ) -> Result<LeaseResponse, Refusal> {
        let lease_ttl = self.settings.lease_ttl;
        let epoch = self.table.epoch;
        if let Some(load) = &request.load {
            check_load(load, self.model.as_ref())?;
        }
        self.calling(member, request.incarnation, now)?;
        if let (Some(model), Some(load)) = (&self.model, &request.load) {
            self.loads.add(model, load);
        }
        let mut is_replan = false;
        let member = self.calling(member, request.incarnation, now)?;
        member.lease = Lease::Until(now + lease_ttl);
        member.renew_by = None;
        member.renewed_at = now;
        if let Some(load) = request.load {
            member.work.add(&load);
            if member.unreadable != load.unreadable {
                member.unreadable = load.unreadable.clone();
                is_replan = true;
            }
            member.load = Some(load);
        }
        let version = member.record.assignment_version;
        let is_news = request.assignment_version != version;
        let response = LeaseResponse {
            lease_ttl_ms: lease_ttl.as_millis() as u64,
            epoch,
            state: member.state(),
            assignment_version: version,
            assignment: is_news.then(|| Assignment::clone(&member.record.assignment)),
            wanted_digests: WantedDigests::None,
            keeps_serving: member.keeps_serving(),
            ticket_keys: None,
        };
        if is_replan {
            self.note_unplanned(now);
        }
        Ok(response)
    }

    pub(crate) fn ready(
        &mut self,
        member: &MemberId,
        request: ReadyRequest,
        now: Duration,
    ) -> Result<MemberInfo, Refusal> {
        if let Some(model) = &self.model {
            check_assignment(&request.holds, model)?;
        }
        let member = self.calling(member, request.incarnation, now)?;
        member.set_holds(request.holds);
        let was = member.record.phase;
        // A late `ready` does not return a draining member to the placement.
        if was == Phase::Loading {
            member.record.phase = Phase::Serving;
        }
        let (info, name) = (member.info(now), member.record.name.clone());
        if was == Phase::Loading {
            self.events.push(FleetEvent::Serving { name });
        }
        self.mark_changed();
        Ok(info)
    }

    pub(crate) fn drain(
        &mut self,
        member: &MemberId,
        incarnation: Option<u64>,
        now: Duration,
    ) -> Result<MemberInfo, Refusal> {
        let drains_by = self.settings.balance.map(|balance| now + balance.drain_grace);
        let member = self.leased(member, incarnation, now)?;
        let was = member.record.phase;
        if was != Phase::Draining {
            member.start_drain(drains_by);
        }
        let (info, name) = (member.info(now), member.record.name.clone());
        if was != Phase::Draining {
            self.events.push(FleetEvent::Draining { name });
            self.note_unplanned(now);
            self.mark_changed();
        }
        Ok(info)
    }

    /// Returns a draining member to the placement, and true if it was draining. Changes nothing about any other member.
    pub(crate) fn resume(
        &mut self,
        member: &MemberId,
        now: Duration,
    ) -> Result<(MemberInfo, bool), Refusal> {
        let member = self.leased(member, None, now)?;
        let was_draining = member.record.phase == Phase::Draining;
        if was_draining {
            member.end_drain();
        }
        let (info, name) = (member.info(now), member.record.name.clone());
        if was_draining {
            self.events.push(FleetEvent::Resumed { name });
            self.note_unplanned(now);
            self.mark_changed();
        }
        Ok((info, was_draining))
    }

    pub(crate) fn leave(&mut self, member: &MemberId) -> Result<(), Refusal> {
        let name = self.name_of(member)?.to_owned();
        self.remove(&name);
        self.events.push(FleetEvent::Left { name });
        Ok(())
    }

    /// Notes that a client cannot reach a member, and returns the time that the member has left to renew. Once a
    /// second observer agrees (another client, or this process), the member must renew within a heartbeat interval.
    /// A live member does, and stays. One observer alone changes nothing: its own network may be at fault. `observer` is
    /// the proved name of the client, whatever the request calls it.
    pub(crate) fn suspect(
        &mut self,
        member: &MemberId,
        request: SuspectRequest,
        observer: &str,
        now: Duration,
    ) -> Result<Duration, Refusal> {
        let name = self.name_of(member)?.to_owned();
        let Some(member) = self.members.get_mut(&name) else { return Ok(Duration::ZERO) };
        let is_other = request.incarnation.is_some_and(|found| found != member.record.incarnation);
        if is_other || !member.is_leased() {
            return Ok(Duration::ZERO);
        }
        // Until its next renewal, the member is suspected once.
        let is_first = member.num_observers() == 0;
        // A client that never reaches a live member reports it again and again.
        let is_news = member.recent_reports(now).next().is_none();
        let (reporter, reason) = (request.reporter, request.reason);
        let (by, observer) = (reporter.clone(), observer.to_owned());
        member.note_report(Report { observer, reporter: by, reason: reason.clone(), at: now });
        if is_first {
            // This process looks for itself.
            member.probe = None;
        }
        if is_news {
            self.events.push(FleetEvent::Suspected { name: name.clone(), reporter, reason });
        }
        self.confirm_suspicion(&name, now);
        let deadline = self.members.get(&name).and_then(Member::deadline);
        Ok(deadline.unwrap_or(now).saturating_sub(now))
    }

    /// Brings forward the deadline of a member that two observers cannot reach.
    pub(super) fn confirm_suspicion(&mut self, name: &str, now: Duration) {
        let wait = self.settings.lease_ttl / 3 + self.settings.suspect_grace;
        if let Some(member) = self.members.get_mut(name)
            && member.is_leased()
            && member.num_observers() >= 2
        {
            // Further reports do not move the deadline.
            member.renew_by.get_or_insert(now + wait);
        }
    }

    /// Expires members whose lease has ended, and removes members that expired long ago. The caller calls
    /// it about every `period`. A much longer gap means that this process was paused: no member could
    /// renew, so all leases are extended by the gap.
    pub(crate) fn tick(&mut self, now: Duration, period: Duration) {
        let gap = now.saturating_sub(self.last_tick);
        self.last_tick = now;
        if gap > period * 4 {
            self.extend_leases(gap - period);
        }
        let mut expired = Vec::new();
        let mut removed = Vec::new();
        for member in self.members.values_mut() {
            match (member.lease, member.deadline()) {
                (Lease::Until(until), Some(deadline)) if deadline <= now => {
                    let cause =
                        if until <= now { ExpiryCause::Lease } else { ExpiryCause::Suspect };
                    member.lease = Lease::ExpiredAt(now);
                    member.renew_by = None;
                    member.load = None;
                    expired.push((member.record.name.clone(), cause));
                }
                (Lease::ExpiredAt(at), _) if now >= at + self.settings.expired_retention => {
                    removed.push(member.record.name.clone());
                }
                _ => {}
            }
        }
        for (name, cause) in expired {
            self.events.push(FleetEvent::Expired { name, cause });
            self.note_loss(now);
            self.mark_changed();
        }
        for name in removed {
            self.remove(&name);
            self.events.push(FleetEvent::Removed { name });
        }
        self.decay(now);
        self.balance(now);
    }

    fn extend_leases(&mut self, pause: Duration) {
        for member in self.members.values_mut() {
            if let Lease::Until(until) = &mut member.lease {
                *until += pause;
            }
            if let Some(by) = &mut member.renew_by {
                *by += pause;
            }
        }
        self.events.push(FleetEvent::LeasesExtended { pause });
    }

    /// The leased member whose own process calls. A call of a replaced process shows that two live processes
    /// use the name.
    fn calling(
        &mut self,
        id: &MemberId,
        incarnation: u64,
        now: Duration,
    ) -> Result<&mut Member, Refusal> {
        if let Err(Refusal::Superseded { name }) = self.leased(id, Some(incarnation), now) {
            self.note_contest(&name, now);
        }
        self.leased(id, Some(incarnation), now)
    }

    pub(super) fn note_contest(&mut self, name: &str, now: Duration) {
        let until = now + self.settings.lease_ttl * CONTEST_LEASES;
        let Some(member) = self.members.get_mut(name) else { return };
        let is_news = !member.keeps_name(now);
        member.contested_until = Some(until);
        if is_news {
            self.events.push(FleetEvent::NameContested { name: name.to_owned() });
        }
    }

    fn leased(
        &mut self,
        id: &MemberId,
        incarnation: Option<u64>,
        now: Duration,
    ) -> Result<&mut Member, Refusal> {
        let name = self.name_of(id)?.to_owned();
        let unknown = || Refusal::UnknownMember { member: id.to_string() };
        let member = self.members.get_mut(&name).ok_or_else(unknown)?;
        if incarnation.is_some_and(|found| found != member.record.incarnation) {
            return Err(Refusal::Superseded { name });
        }
        if let Lease::ExpiredAt(at) = member.lease {
            let ago_ms = now.saturating_sub(at).as_millis() as u64;
            return Err(Refusal::LeaseExpired { name, ago_ms });
        }
        Ok(member)
    }

    pub(super) fn name_of(&self, member: &MemberId) -> Result<&str, Refusal> {
        if let Some(name) = self.names.get(member) {
            return Ok(name);
        }
        let is_old =
            |other: &&Member| other.record.superseded.iter().any(|old| old.member_id == *member);
        match self.members.values().find(is_old) {
            Some(other) => Err(Refusal::Superseded { name: other.record.name.clone() }),
            None => Err(Refusal::UnknownMember { member: member.to_string() }),
        }
    }
}

/// For so many leases after a replaced process was heard, no other process takes the name over.
const CONTEST_LEASES: u32 = 20;
