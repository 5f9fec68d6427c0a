//! Events of the fleet in the log, the metrics and the list of events.

use tracing::{error, info, warn};
use trust::log_limit::LogLimit;

use super::{Coordinator, lock};
use crate::fleet::{ExpiryCause, FleetEvent, RegistrationKind};

/// Budgets of the lines that one identity can cause as often as it registers members.
#[derive(Debug, Default)]
pub(super) struct MemberLogs {
    registered: LogLimit,
    left: LogLimit,
    expired: LogLimit,
    removed: LogLimit,
    unreachable: LogLimit,
    left_out: LogLimit,
    included: LogLimit,
}

impl Coordinator {
    pub(super) fn record_event(&self, event: &FleetEvent) {
        self.events.add(event);
        let metrics = &self.metrics;
        match event {
            FleetEvent::Registered { name, kind } => {
                let kind = match kind {
                    RegistrationKind::New => "new",
                    RegistrationKind::Returned => "returned",
                    RegistrationKind::Takeover => "takeover",
                };
                metrics.registrations.with_label_values(&[kind]).inc();
                if let Some(num_suppressed) = self.member_logs.registered.allow() {
                    info!(name, kind, num_suppressed, "member registered");
                }
            }
            FleetEvent::Planned { num_loads, before, after } => {
                metrics.expert_moves.inc_by(*num_loads as u64);
                info!(num_loads, before, after, "new plan: servers load experts");
            }
            FleetEvent::GoalsChanged { goals } => {
                info!(replicas = goals.replicas, spare = goals.spare, "the goals have changed");
            }
            FleetEvent::GoalsKept { asked, goals } => {
                warn!(
                    replicas = goals.replicas,
                    spare = goals.spare,
                    asked_replicas = asked.replicas,
                    asked_spare = asked.spare,
                    "the goals that were set while the fleet ran stay: `switchyard scale` changes them"
                );
            }
            FleetEvent::Short { shortage } => {
                error!(shortage, "the fleet cannot be planned as wanted");
            }
            FleetEvent::NameContested { name } => {
                metrics.name_conflicts.inc();
                error!(name, "two live processes use this name: the later one keeps it");
            }
            FleetEvent::ModelReplaced { fingerprint } => {
                *lock(&self.model_digests) = None;
                warn!(
                    fingerprint,
                    "the old model has no members left: the fleet serves another one"
                );
            }
            FleetEvent::Unreachable { name, data_addr, reason } => {
                if let Some(num_suppressed) = self.member_logs.unreachable.allow() {
                    warn!(
                        name,
                        data_addr, reason, num_suppressed, "cannot connect to a serving member"
                    );
                }
            }
            FleetEvent::LeftOut { name, is_left_out: true } => {
                if let Some(num_suppressed) = self.member_logs.left_out.allow() {
                    let text = "plans do without this member: nothing has ever connected to it";
                    warn!(name, num_suppressed, "{text}");
                }
            }
            FleetEvent::LeftOut { name, is_left_out: false } => {
                if let Some(num_suppressed) = self.member_logs.included.allow() {
                    info!(name, num_suppressed, "member reached: plans include it");
                }
            }
            FleetEvent::Serving { name } => info!(name, "member is serving"),
            FleetEvent::Draining { name } => info!(name, "member is draining"),
            FleetEvent::Resumed { name } => info!(name, "member resumed: its drain was taken back"),
            FleetEvent::Left { name } => {
                if let Some(num_suppressed) = self.member_logs.left.allow() {
                    info!(name, num_suppressed, "member left");
                }
            }
            FleetEvent::Suspected { name, reporter, reason } => {
                metrics.suspects.inc();
                warn!(name, reporter, reason, "member suspected");
            }
            FleetEvent::Expired { name, cause } => {
                let cause = match cause {
                    ExpiryCause::Lease => "lease",
                    ExpiryCause::Suspect => "suspect",
                };
                metrics.expirations.with_label_values(&[cause]).inc();
                if let Some(num_suppressed) = self.member_logs.expired.allow() {
                    warn!(name, cause, num_suppressed, "member expired");
                }
            }
            FleetEvent::Removed { name } => {
                if let Some(num_suppressed) = self.member_logs.removed.allow() {
                    info!(name, num_suppressed, "expired member removed");
                }
            }
            FleetEvent::LeasesExtended { pause } => {
                warn!(?pause, "this process was paused; all leases extended by the pause");
            }
            FleetEvent::PlacementChanged { epoch, num_servers } => {
                metrics.placement_changes.inc();
                info!(epoch, num_servers, "new placement");
            }
            FleetEvent::PlacementBlocked => {
                error!("the placement cannot change until the store can be written");
            }
        }
    }
}
