//! One member: its state in memory, its stored record and its form in the API.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use control_api::{
    Assignment, LayerAssignment, LinkReport, LoadReport, MemberId, MemberInfo, MemberState,
    ServerEntry,
};
use serde::{Deserialize, Serialize};
use trust::tls::is_loopback_host;

use crate::work::Work;

/// Stage of life of a leased member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// The member loads its experts.
    Loading,
    /// The member has reported ready.
    Serving,
    /// The member is about to leave.
    Draining,
}

/// An earlier process of the same name. A newer process has taken the name over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Predecessor {
    /// Identity of the earlier process.
    pub member_id: MemberId,
    /// Incarnation of the earlier process.
    pub incarnation: u64,
}

/// The durable part of a member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberRecord {
    /// Identity.
    pub member_id: MemberId,
    /// Name.
    pub name: String,
    /// Incarnation of the process.
    pub incarnation: u64,
    /// `host:port` of the bootstrap listener.
    pub data_addr: String,
    /// `host:port` of the metrics listener.
    pub metrics_addr: Option<String>,
    /// `host:port` on which other servers read its weights.
    #[serde(default)]
    pub weights_addr: Option<String>,
    /// Stage of life.
    pub phase: Phase,
    /// True if it drains, and stays in the placement until others have loaded its experts.
    #[serde(default)]
    pub keeps_serving: bool,
    /// True if the lease had expired when the snapshot was taken.
    pub expired: bool,
    /// Experts that the planner assigned.
    pub assignment: Arc<Assignment>,
    /// Version of the assignment, incremented with every change.
    pub assignment_version: u64,
    /// Experts that the member has reported as loaded.
    pub holds: Arc<Assignment>,
    /// Predecessors under the same name, oldest first.
    pub superseded: Vec<Predecessor>,
    /// Most (layer, expert) pairs that fit into its memory, as its process has said. `None` means no limit.
    #[serde(default)]
    pub capacity_experts: Option<u32>,
    /// Failure domain.
    #[serde(default)]
    pub zone: Option<String>,
    /// True if it admits clients with a ticket only.
    #[serde(default)]
    pub needs_tickets: bool,
    /// True if its listener for clients speaks plain text.
    #[serde(default)]
    pub plain_text: bool,
}

/// Danger of a listener for clients that other hosts reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Danger {
    /// Others can read the handshake, and with it the keys of the memory.
    PlainText,
    /// Holders of a token or a certificate get keys that the control plane cannot revoke.
    NoTickets,
}

impl Danger {
    /// The danger and its remedy.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::PlainText => "plain text to other hosts (--insecure): give --tls DIR",
            Self::NoTickets => {
                "admits clients without a ticket (--tickets off): start it without that option"
            }
        }
    }
}

/// State of a lease. Times are of the fleet's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lease {
    /// Valid until this time.
    Until(Duration),
    /// Expired at this time.
    ExpiredAt(Duration),
}

/// A client's report that it cannot reach a member.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    /// Identity and address of the client.
    pub(crate) observer: String,
    /// Name that the client gives itself.
    pub(crate) reporter: String,
    pub(crate) reason: String,
    pub(crate) at: Duration,
}

/// A member in memory.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    pub(crate) record: MemberRecord,
    pub(crate) lease: Lease,
    /// Time by which a suspected member must renew. Set once two observers agree.
    pub(crate) renew_by: Option<Duration>,
    /// Newest report of each client, the newest first.
    pub(crate) reports: VecDeque<Report>,
    /// Time of the last renewal or registration.
    pub(crate) renewed_at: Duration,
    pub(crate) load: Option<LoadReport>,
    /// Experts in the placement table: both held and assigned.
    pub(crate) placed: Arc<Assignment>,
    /// True if a durable snapshot contains the member.
    pub(crate) is_durable: bool,
    /// True if a durable snapshot contains a member of this name, perhaps an earlier process.
    pub(crate) is_name_durable: bool,
    /// Experts that the member shall hold in the end, if the placement follows the load. Its assignment also has
    /// the experts that other members have yet to take over.
    pub(crate) target: Option<Arc<Assignment>>,
    pub(crate) work: Work,
    /// Experts that the process has failed to read.
    pub(crate) unreadable: Assignment,
    /// While the member drains: time until which it stays in the placement for experts that others have yet to
    /// load. `None` if it is out of it.
    pub(crate) drains_by: Option<Duration>,
    /// True if a plan without the draining member was made.
    pub(crate) is_drain_planned: bool,
    /// Outcome of the last attempt to connect to the member: `None` before the first one.
    pub(crate) probe: Option<Result<(), String>>,
    /// Time of that outcome. Before the first one, time at which the process came.
    pub(crate) probed_at: Duration,
    /// Attempts in a row that have failed since this process has reached any member.
    pub(crate) num_failures: u32,
    /// True once this process has connected to the member's address.
    pub(crate) was_reached: bool,
    /// True if this process has not reached the member, and reaches others.
    pub(crate) is_doubtful: bool,
    /// True if attempts to reach a doubtful member have failed repeatedly. Plans do without such a member, its
    /// experts count as no replicas, and clients try it only for experts that no other member serves.
    pub(crate) is_left_out: bool,
    /// Until this time, a live process of the same name was heard after this one had replaced it. So two
    /// processes use the name, and no third one may take it over while this one lives.
    pub(crate) contested_until: Option<Duration>,
}

impl Member {
    pub(crate) fn new(record: MemberRecord, lease: Lease, is_durable: bool) -> Self {
        let placed = Arc::new(intersect(&record.holds, &record.assignment));
        Self {
            record,
            lease,
            renew_by: None,
            reports: VecDeque::new(),
            renewed_at: Duration::ZERO,
            load: None,
            placed,
            is_durable,
            is_name_durable: is_durable,
            target: None,
            work: Work::default(),
            unreadable: Assignment::default(),
            drains_by: None,
            is_drain_planned: false,
            probe: None,
            probed_at: Duration::ZERO,
            num_failures: 0,
            was_reached: false,
            is_doubtful: false,
            is_left_out: false,
            contested_until: None,
        }
    }

    pub(crate) fn is_leased(&self) -> bool {
        matches!(self.lease, Lease::Until(_))
    }

    pub(crate) fn is_serving(&self) -> bool {
        self.is_leased() && self.record.phase == Phase::Serving
    }

    /// True if the member takes part in plans.
    pub(crate) fn is_planned(&self) -> bool {
        self.is_leased() && self.record.phase != Phase::Draining && !self.is_left_out
    }

    /// True if other members may free the experts that this one serves: this process has reached it, or reaches no
    /// member at all and can judge none.
    pub(crate) fn can_take_over(&self) -> bool {
        let is_undecided = self.probe.is_none() && !self.was_reached;
        self.is_serving() && !self.is_doubtful && !is_undecided
    }

    /// True if the placement table has the member.
    pub(crate) fn is_in_placement(&self) -> bool {
        self.is_serving() || self.keeps_serving()
    }

    /// True while the member drains and is in the placement all the same.
    pub(crate) fn keeps_serving(&self) -> bool {
        self.is_leased() && self.record.phase == Phase::Draining && self.drains_by.is_some()
    }

    /// Experts in its memory that it does not report as loaded, because it is about to free them.
    pub(crate) fn hidden_experts(&self) -> u32 {
        let in_memory = self.load.as_ref().and_then(|load| load.memory_experts).unwrap_or(0);
        in_memory.saturating_sub(self.record.holds.num_experts() as u32)
    }

    /// Starts a drain. With `drains_by`, the member stays in the placement until then at most.
    pub(crate) fn start_drain(&mut self, drains_by: Option<Duration>) {
        // A member that was not serving, or serves no expert, has nothing to hand over.
        self.drains_by = drains_by.filter(|_| self.is_serving() && !self.placed.is_empty());
        self.is_drain_planned = false;
        self.record.phase = Phase::Draining;
    }

    /// Returns a draining member to the placement, with all experts that are assigned to it.
    pub(crate) fn end_drain(&mut self) {
        // A member that was drained before it had loaded its experts reports them later.
        let is_ready = !self.record.holds.is_empty();
        self.record.phase = if is_ready { Phase::Serving } else { Phase::Loading };
        self.drains_by = None;
        self.place();
    }

    /// Removes the placed experts of a draining member, except the `needed` ones. Without any the member leaves the
    /// placement. Returns true if that changed something.
    pub(crate) fn hand_over(&mut self, needed: impl Fn(u32, u32) -> bool) -> bool {
        let mut left = Assignment::clone(&self.placed);
        for entry in &mut left.layers {
            let layer = entry.layer;
            entry.experts.retain(|&expert| needed(layer, expert));
        }
        left.layers.retain(|entry| !entry.experts.is_empty());
        if left.is_empty() {
            self.drains_by = None;
        }
        let has_changed = left != *self.placed || left.is_empty();
        self.placed = Arc::new(left);
        has_changed
    }

    /// Gives the member other experts. It learns of them with its next renewal.
    pub(crate) fn reassign(&mut self, assignment: Arc<Assignment>) {
        self.record.assignment = assignment;
        self.record.assignment_version += 1;
        self.place();
    }

    /// Places the experts that the member both holds and shall hold. A draining member gets no more than it has.
    fn place(&mut self) {
        let mut placed = intersect(&self.record.holds, &self.record.assignment);
        if self.record.phase == Phase::Draining {
            placed = intersect(&placed, &self.placed);
        }
        if placed == *self.record.assignment {
            // One copy in memory, and comparisons end at the pointer.
            self.placed = Arc::clone(&self.record.assignment);
        } else if *self.placed != placed {
            self.placed = Arc::new(placed);
        }
    }

    /// True while no other process may take over the name.
    pub(crate) fn keeps_name(&self, now: Duration) -> bool {
        self.is_leased() && self.contested_until.is_some_and(|until| now < until)
    }

    pub(crate) fn state(&self) -> MemberState {
        match (self.lease, self.record.phase) {
            (Lease::ExpiredAt(_), _) => MemberState::Expired,
            (_, Phase::Loading) => MemberState::Loading,
            (_, Phase::Serving) => MemberState::Serving,
            (_, Phase::Draining) => MemberState::Draining,
        }
    }

    /// Time at which the member expires unless it renews.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        match self.lease {
            Lease::Until(until) => Some(self.renew_by.map_or(until, |by| by.min(until))),
            Lease::ExpiredAt(_) => None,
        }
    }

    /// Notes a client's report. It replaces an earlier one of the same observer.
    pub(crate) fn note_report(&mut self, report: Report) {
        self.reports.retain(|known| known.observer != report.observer);
        self.reports.push_front(report);
        self.reports.truncate(MAX_REPORTS);
    }

    /// Observers that could not reach the member since its last renewal: clients, and this process if its own last
    /// attempt to connect failed.
    pub(crate) fn num_observers(&self) -> usize {
        let clients = self.reports.iter().filter(|report| report.at >= self.renewed_at).count();
        clients + usize::from(clients > 0 && matches!(self.probe, Some(Err(_))))
    }

    /// Reports of the last minute.
    pub(crate) fn recent_reports(&self, now: Duration) -> impl Iterator<Item = LinkReport> {
        let age = move |report: &Report| now.saturating_sub(report.at);
        let recent = self.reports.iter().filter(move |report| age(report) <= REPORT_RETENTION);
        recent.map(move |report| LinkReport {
            reporter: report.reporter.clone(),
            reason: report.reason.clone(),
            age_ms: age(report).as_millis() as u64,
        })
    }

    pub(crate) fn set_holds(&mut self, holds: Assignment) {
        if holds == *self.record.assignment {
            self.record.holds = Arc::clone(&self.record.assignment);
        } else if *self.record.holds != holds {
            self.record.holds = Arc::new(holds);
        }
        self.place();
    }

    /// The danger of its listener for clients, if it is on an address that other hosts reach.
    pub(crate) fn danger(&self) -> Option<Danger> {
        let MemberRecord { data_addr, plain_text, needs_tickets, .. } = &self.record;
        let host = data_addr.rsplit_once(':').map_or(&**data_addr, |(host, _)| host);
        match (*plain_text, *needs_tickets) {
            (false, true) => None,
            _ if is_loopback_host(host.trim_start_matches('[').trim_end_matches(']')) => None,
            (true, _) => Some(Danger::PlainText),
            (false, false) => Some(Danger::NoTickets),
        }
    }

    pub(crate) fn entry(&self) -> ServerEntry {
        ServerEntry {
            member_id: self.record.member_id.clone(),
            name: self.record.name.clone(),
            incarnation: self.record.incarnation,
            data_addr: self.record.data_addr.clone(),
            needs_tickets: self.record.needs_tickets,
        }
    }

    pub(crate) fn info(&self, now: Duration) -> MemberInfo {
        let remaining = self.deadline().map_or(Duration::ZERO, |at| at.saturating_sub(now));
        MemberInfo {
            member_id: self.record.member_id.clone(),
            name: self.record.name.clone(),
            incarnation: self.record.incarnation,
            data_addr: self.record.data_addr.clone(),
            metrics_addr: self.record.metrics_addr.clone(),
            weights_addr: self.record.weights_addr.clone(),
            state: self.state(),
            keeps_serving: self.keeps_serving(),
            suspected: self.is_leased() && self.num_observers() > 0,
            lease_remaining_ms: remaining.as_millis() as u64,
            experts_held: self.record.holds.num_experts() as u64,
            experts_assigned: self.record.assignment.num_experts() as u64,
            load: self.load.clone(),
            unreachable: self.probe.clone().and_then(Result::err),
            not_stored: None,
            insecure: self.danger().map(|danger| danger.text().to_owned()),
            fingerprint: None,
            reports: self.recent_reports(now).collect(),
        }
    }
}

const MAX_REPORTS: usize = 8;
/// Reports are shown for this long.
const REPORT_RETENTION: Duration = Duration::from_secs(60);

/// Experts in both assignments. Both must be sorted; every validated assignment is.
pub(crate) fn intersect(a: &Assignment, b: &Assignment) -> Assignment {
    let layers = a.layers.iter().filter_map(|entry| {
        let other = b.experts(entry.layer);
        let both = |expert: &&u32| other.binary_search(expert).is_ok();
        let experts: Vec<u32> = entry.experts.iter().filter(both).copied().collect();
        (!experts.is_empty()).then_some(LayerAssignment { layer: entry.layer, experts })
    });
    Assignment { layers: layers.collect() }
}

/// Experts in either assignment. Both must be sorted.
pub(crate) fn union(a: &Assignment, b: &Assignment) -> Assignment {
    let mut numbers: Vec<u32> = a.layers.iter().chain(&b.layers).map(|entry| entry.layer).collect();
    numbers.sort_unstable();
    numbers.dedup();
    let entry = |layer: u32| {
        let mut experts = [a.experts(layer), b.experts(layer)].concat();
        experts.sort_unstable();
        experts.dedup();
        LayerAssignment { layer, experts }
    };
    Assignment { layers: numbers.into_iter().map(entry).collect() }
}
