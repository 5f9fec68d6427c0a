//! The placement that follows the load: goals, plans of the whole fleet, and the way from one plan to the next.

use std::sync::Arc;
use std::time::Duration;

use control_api::FleetGoals;

use super::{Fleet, FleetEvent};
use crate::admission::{Refusal, check_goals};
use crate::balance::{self, Pending};
use crate::member::Member;
use crate::planner::rebalance::FleetPlan;
use crate::work;

impl Fleet {
    pub(crate) fn goals(&self) -> Result<FleetGoals, Refusal> {
        let balance = self.settings.balance.as_ref().ok_or(Refusal::FixedPlacement)?;
        Ok(FleetGoals { replicas: balance.goals.min_replicas, spare: balance.goals.spare })
    }

    pub(crate) fn set_goals(
        &mut self,
        goals: FleetGoals,
        now: Duration,
    ) -> Result<FleetGoals, Refusal> {
        let balance = self.settings.balance.as_mut().ok_or(Refusal::FixedPlacement)?;
        check_goals(&goals)?;
        balance.goals.min_replicas = goals.replicas;
        balance.goals.spare = goals.spare;
        self.changed_goals = Some(goals);
        self.unplanned_since.get_or_insert(now);
        self.events.push(FleetEvent::GoalsChanged { goals });
        self.mark_changed();
        Ok(goals)
    }

    /// Reason why the last plan failed, if it did.
    pub(crate) fn shortage(&self) -> Option<String> {
        self.shortage.clone()
    }

    /// Plans the fleet, if the placement follows the load and a plan is due.
    pub(super) fn balance(&mut self, now: Duration) {
        let Some(settings) = self.settings.balance else { return };
        let Some(model) = self.model.clone() else { return };
        self.end_long_drains(now);
        if now < self.plans_from {
            return;
        }
        let is_settled = self.unplanned_since.is_some_and(|since| now >= since + settings.settle);
        let is_due = self.unplanned_since.is_none() && now >= self.last_plan + settings.period;
        let num_live = self.members.values().filter(|member| member.is_planned()).count();
        let is_starting = !self.was_complete
            && num_live < settings.expected_servers as usize
            && self.first_join.is_some_and(|at| now < at + settings.start_grace);
        if !(is_settled || is_due) || is_starting || num_live == 0 {
            return;
        }
        self.last_plan = now;
        self.unplanned_since = None;
        let members: Vec<&Member> =
            self.members.values().filter(|member| member.is_planned()).collect();
        match balance::plan(&model, &members, &self.loads, &settings.goals) {
            Ok(plan) => self.set_targets(plan),
            Err(shortage) => self.set_shortage(Some(shortage.to_string())),
        }
    }

    fn set_shortage(&mut self, shortage: Option<String>) {
        if let Some(shortage) = &shortage
            && self.shortage.as_ref() != Some(shortage)
        {
            self.events.push(FleetEvent::Short { shortage: shortage.clone() });
        }
        self.shortage = shortage;
    }

    /// Lets reported loads and work decay, and compares the speeds of the members.
    pub(super) fn decay(&mut self, now: Duration) {
        let since = now.saturating_sub(self.decayed_at);
        if since < DECAY_STEP {
            return;
        }
        self.decayed_at = now;
        let factor = work::decay_factor(since, self.half_life());
        self.loads.decay(factor);
        self.members.values_mut().for_each(|member| member.work.decay(factor));
        let leased = self.members.values_mut().filter(|member| member.is_leased());
        work::compare(leased.map(|member| &mut member.work));
    }

    pub(super) fn half_life(&self) -> Duration {
        self.settings.balance.unwrap_or_default().half_life
    }

    /// Takes members out of the placement whose experts no others have loaded in time.
    fn end_long_drains(&mut self, now: Duration) {
        let mut has_changed = false;
        for member in self.members.values_mut() {
            if member.drains_by.is_some_and(|by| now >= by) {
                has_changed |= member.hand_over(|_, _| false);
            }
        }
        if has_changed {
            self.mark_changed();
        }
    }

    fn set_targets(&mut self, plan: FleetPlan) {
        self.set_shortage(plan.shortage());
        let FleetPlan { assignments, num_loads, imbalance, .. } = plan;
        let planned = self.members.values_mut().filter(|member| member.is_planned());
        for (member, target) in planned.zip(assignments) {
            if member.target.as_deref() != Some(&target) {
                member.target = Some(Arc::new(target));
            }
        }
        for member in self.members.values_mut().filter(|member| member.keeps_serving()) {
            member.is_drain_planned = true;
        }
        if num_loads > 0 {
            let (before, after) = imbalance;
            self.events.push(FleetEvent::Planned { num_loads, before, after });
        }
        self.follow_targets();
    }

    /// Brings the assignments closer to the targets, as far as the members have loaded their experts.
    pub(super) fn follow_targets(&mut self) {
        let Some(model) = &self.model else { return };
        if self.members.values().all(|member| member.target.is_none()) {
            return;
        }
        let planned: Vec<&Member> =
            self.members.values().filter(|member| member.is_planned()).collect();
        let pending = Pending::of(model, &planned);
        let next = balance::next_assignments(model, &planned, &pending);
        // Without another member, nothing will take the experts over.
        let is_alone = planned.is_empty();
        let planned = self.members.values_mut().filter(|member| member.is_planned());
        let mut has_changed = false;
        for (member, next) in planned.zip(next) {
            if let Some(next) = next {
                member.reassign(next);
                has_changed = true;
            }
        }
        for member in self.members.values_mut() {
            if member.keeps_serving() && member.is_drain_planned {
                // An expert that has no place yet, for want of memory, stays as long as the drain may last.
                has_changed |= member
                    .hand_over(|layer, expert| !is_alone && !pending.is_handed_over(layer, expert));
            }
        }
        if has_changed {
            self.mark_changed();
        }
    }
}

/// Decay is computed in steps of this length.
const DECAY_STEP: Duration = Duration::from_secs(1);
