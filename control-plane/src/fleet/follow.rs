//! The placement that follows the load: goals, plans of the whole fleet, and the way from one plan to the next.

use std::sync::Arc;
use std::time::Duration;

use control_api::FleetGoals;

use super::{Fleet, FleetEvent};
use crate::admission::{Refusal, check_goals};
use crate::balance::{self, Pending, PlanJob, PlanOutcome};
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
        self.check_goals(&goals)?;
        let balance = self.settings.balance.as_mut().ok_or(Refusal::FixedPlacement)?;
        balance.goals.min_replicas = goals.replicas;
        balance.goals.spare = goals.spare;
        self.changed_goals = Some(goals);
        self.note_unplanned(now);
        self.events.push(FleetEvent::GoalsChanged { goals });
        self.mark_changed();
        Ok(goals)
    }

    /// Refuses goals that this fleet cannot have.
    pub(crate) fn check_goals(&self, goals: &FleetGoals) -> Result<(), Refusal> {
        self.goals()?;
        check_goals(goals)
    }

    /// Returns from `goals` to the goals before, which are `old`: the goals in force, and the ones that
    /// were changed while the control plane ran. Does nothing if the goals have changed again.
    pub(crate) fn take_back_goals(
        &mut self,
        goals: FleetGoals,
        old: (FleetGoals, Option<FleetGoals>),
        now: Duration,
    ) {
        if self.changed_goals == Some(goals) && self.set_goals(old.0, now).is_ok() {
            self.changed_goals = old.1;
        }
    }

    /// Reason why the last plan failed or gives experts too few replicas, if so.
    pub(crate) fn shortage(&self) -> Option<String> {
        self.shortage.clone()
    }

    /// Makes a plan due, if the placement follows the load and it is time for one. A plan that members have made
    /// worthless twice in a row is computed at once.
    pub(super) fn balance(&mut self, now: Duration) {
        let Some(settings) = self.settings.balance else { return };
        if self.model.is_some() {
            self.end_long_drains(now);
        }
        let Some(model) = &self.model else { return };
        if now < self.plans_from || self.is_planning {
            return;
        }
        let is_settled = self.unplanned_since.is_some_and(|since| now >= since + settings.settle);
        let is_due = self.unplanned_since.is_none() && now >= self.last_plan + settings.period;
        let planned = || self.members.values().filter(|member| member.is_planned());
        let num_live = planned().count();
        let is_starting = !self.was_complete
            && num_live < settings.expected_servers as usize
            && self.first_join.is_some_and(|at| now < at + settings.start_grace);
        if !(is_settled || is_due) || is_starting {
            return;
        }
        if num_live == 0 {
            // No member will take over what the draining ones serve.
            self.unplanned_since = None;
            self.set_drains_planned();
            return;
        }
        let basis = self.plan_basis;
        let job = PlanJob::new(basis, model, planned(), &self.loads, settings.goals);
        self.last_plan = now;
        self.unplanned_since = None;
        self.is_planning = true;
        if self.num_discarded < MAX_DISCARDED {
            self.due_plan = Some(job);
        } else {
            let outcome = job.run();
            self.finish_plan(Some((job, outcome)), now);
        }
    }

    /// The plan that is due, if there is one. The caller computes it without the lock and passes the outcome to
    /// [`finish_plan`](Self::finish_plan).
    pub(crate) fn take_plan(&mut self) -> Option<PlanJob> {
        self.due_plan.take()
    }

    /// Puts a computed plan in force. A plan whose members, goals or readable files have changed meanwhile is
    /// discarded, and the next one follows soon. `None` stands for a computation that has failed.
    pub(crate) fn finish_plan(&mut self, planned: Option<(PlanJob, PlanOutcome)>, now: Duration) {
        self.is_planning = false;
        let Some((job, outcome)) = planned else { return };
        if job.basis != self.plan_basis {
            self.num_discarded += 1;
            self.unplanned_since.get_or_insert(now);
            return;
        }
        self.num_discarded = 0;
        match outcome {
            Ok(plan) => self.set_targets(plan),
            Err(shortage) => self.set_shortage(Some(shortage.to_string())),
        }
    }

    /// Notes a change that the plan in force does not know.
    pub(super) fn note_unplanned(&mut self, now: Duration) {
        self.unplanned_since.get_or_insert(now);
        self.plan_basis += 1;
    }

    /// Notes that a member is lost. The next plan comes soon, because experts have lost replicas.
    pub(super) fn note_loss(&mut self, now: Duration) {
        self.note_unplanned(now);
        let settle = self.settings.balance.unwrap_or_default().settle;
        let since = now.saturating_sub(settle.saturating_sub(LOSS_SETTLE));
        self.unplanned_since = self.unplanned_since.map(|known| known.min(since));
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
        let planned = self.members.values().filter(|member| member.is_planned());
        let replicas = self.replicas();
        let shortage = plan.shortage().or_else(|| {
            self.model
                .as_ref()
                .and_then(|model| balance::replica_shortage(model, planned, replicas))
        });
        self.set_shortage(shortage);
        let FleetPlan { assignments, num_loads, imbalance, .. } = plan;
        let planned = self.members.values_mut().filter(|member| member.is_planned());
        for (member, target) in planned.zip(assignments) {
            if target == *member.record.assignment {
                // One copy in memory, and comparisons end at the pointer.
                member.target = Some(Arc::clone(&member.record.assignment));
            } else if member.target.as_deref() != Some(&target) {
                member.target = Some(Arc::new(target));
            }
        }
        self.set_drains_planned();
        if num_loads > 0 {
            let (before, after) = imbalance;
            self.events.push(FleetEvent::Planned { num_loads, before, after });
        }
        // The next refresh follows the targets.
        self.is_table_stale = true;
    }

    /// Notes that the plan in force does without the draining members.
    fn set_drains_planned(&mut self) {
        for member in self.members.values_mut().filter(|member| member.keeps_serving()) {
            member.is_drain_planned = true;
            self.is_table_stale = true;
        }
    }

    /// Brings the assignments closer to the targets, as far as the members have loaded their experts.
    pub(super) fn follow_targets(&mut self) {
        let Some(model) = &self.model else { return };
        let has_step = |member: &Member| member.target.is_some() || member.keeps_serving();
        if !self.members.values().any(has_step) {
            return;
        }
        let planned = self.members.values().filter(|member| member.is_planned());
        // Without another member, nothing will take the experts over.
        let is_alone = planned.clone().next().is_none();
        let pending = Pending::of(model, planned);
        let mut has_changed = false;
        for member in self.members.values_mut().filter(|member| member.is_planned()) {
            if let Some(next) = balance::next_assignment(member, &pending) {
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
/// Losses of members within this time are planned together.
const LOSS_SETTLE: Duration = Duration::from_millis(100);
/// After so many plans in a row that were discarded, one is computed under the lock.
const MAX_DISCARDED: u32 = 2;
