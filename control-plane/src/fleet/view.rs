//! State of the fleet, as status, metrics and clients see it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use control_api::{
    MemberCounts, MemberId, MemberInfo, MemberState, ModelDescriptor, PlacementTable,
    ScalingAdvice, ServerEntry,
};

use super::Fleet;
use crate::advice::{FleetWork, ServerWork, advise};
use crate::member::{Danger, Member};
use crate::metrics::LayerLoad;
use crate::planner::Planner;
use crate::table::Coverage;

impl Fleet {
    /// Returns true if a member has this identity.
    pub(crate) fn has_id(&self, member: &MemberId) -> bool {
        self.names.contains_key(member)
    }

    pub(crate) fn table(&self) -> &Arc<PlacementTable> {
        &self.table
    }

    pub(crate) fn coverage(&self) -> Coverage {
        self.coverage
    }

    /// Coverage of a table by members that are not left out. `replicas` is the planned number.
    pub(crate) fn coverage_of(&self, table: &PlacementTable, replicas: u32) -> Coverage {
        let counts = |server: &ServerEntry| {
            self.members.get(&server.name).is_none_or(|member| !member.is_left_out)
        };
        Coverage::of(table, replicas, counts)
    }

    pub(crate) fn model(&self) -> Option<&ModelDescriptor> {
        self.model.as_ref()
    }

    pub(crate) fn planner(&self) -> &dyn Planner {
        &*self.planner
    }

    /// Planned replicas per expert.
    pub(crate) fn replicas(&self) -> u32 {
        match &self.settings.balance {
            Some(balance) => balance.goals.min_replicas,
            None => self.planner.replicas(),
        }
    }

    pub(crate) fn infos(&self, now: Duration) -> Vec<MemberInfo> {
        self.members.values().map(|member| member.info(now)).collect()
    }

    /// Serving members that the last attempt to connect to has failed for.
    pub(crate) fn num_unreachable(&self) -> usize {
        let serving = self.members.values().filter(|member| member.state() == MemberState::Serving);
        serving.filter(|member| matches!(member.probe, Some(Err(_)))).count()
    }

    /// A sentence for each leased member that the last attempt to connect to has failed for.
    pub(crate) fn unreachable(&self) -> impl Iterator<Item = String> {
        self.members.values().filter(|member| member.is_leased()).filter_map(|member| {
            let Some(Err(reason)) = &member.probe else { return None };
            let (name, addr) = (&member.record.name, &member.record.data_addr);
            Some(format!("the control plane cannot connect to {name} at {addr}: {reason}"))
        })
    }

    /// Leased members that have a [`Danger`].
    pub(crate) fn num_insecure(&self) -> usize {
        let leased = self.members.values().filter(|member| member.is_leased());
        leased.filter(|member| member.danger().is_some()).count()
    }

    /// Names of the leased members of each [`Danger`].
    pub(crate) fn insecure(&self) -> BTreeMap<Danger, Vec<&str>> {
        let mut found: BTreeMap<Danger, Vec<&str>> = BTreeMap::new();
        for member in self.members.values().filter(|member| member.is_leased()) {
            if let Some(danger) = member.danger() {
                found.entry(danger).or_default().push(&member.record.name);
            }
        }
        found
    }

    /// Load of each layer that has had tokens, with its `num_top` busiest experts.
    pub(crate) fn expert_loads(&self, num_top: usize) -> Vec<LayerLoad> {
        match &self.model {
            Some(model) => self.loads.busiest(model, num_top, self.half_life()),
            None => Vec::new(),
        }
    }

    /// Scaling advice from the reports of the members.
    pub(crate) fn advice(&self) -> ScalingAdvice {
        let leased: Vec<&Member> =
            self.members.values().filter(|member| member.is_leased()).collect();
        let fleet = FleetWork {
            servers: leased.iter().map(|member| ServerWork::of(member)).collect(),
            half_life: self.half_life(),
            num_experts: self
                .model
                .as_ref()
                .map_or(0, |model| model.moe_layers.len() as u64 * u64::from(model.num_experts)),
            replicas: self.replicas(),
            is_short: self.shortage.is_some(),
        };
        advise(&fleet, self.settings.target_share)
    }

    pub(crate) fn counts(&self) -> MemberCounts {
        let mut counts = MemberCounts::default();
        for member in self.members.values() {
            match member.state() {
                MemberState::Loading => counts.loading += 1,
                MemberState::Serving => counts.serving += 1,
                MemberState::Draining => counts.draining += 1,
                MemberState::Expired => counts.expired += 1,
            }
        }
        counts
    }
}
