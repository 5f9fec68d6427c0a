//! Changes that are taken back if they cannot be stored. The caller makes one at a time, and runs each to its end: a future
//! that is dropped takes nothing back.

use control_api::{FleetGoals, MemberId, MemberInfo};

use super::{Coordinator, OperationError};

/// A change of the goals that is in force and may not be stored yet.
#[derive(Debug)]
pub(crate) struct GoalsChange {
    goals: FleetGoals,
    /// The goals in force before, and the goals that were set while the control plane ran.
    old: (FleetGoals, Option<FleetGoals>),
    revision: u64,
}

impl Coordinator {
    pub(crate) fn goals(&self) -> Result<FleetGoals, OperationError> {
        Ok(self.with_fleet(|fleet, _| fleet.goals())?)
    }

    /// Puts the goals in force. [`stored`](Self::stored) tells whether they stay.
    pub(crate) fn begin_goals(&self, goals: FleetGoals) -> Result<GoalsChange, OperationError> {
        self.with_fleet(|fleet, now| {
            fleet.check_goals(&goals)?;
            self.check_writable()?;
            let old = (fleet.goals()?, fleet.changed_goals());
            fleet.set_goals(goals, now)?;
            Ok(GoalsChange { goals, old, revision: fleet.revision() })
        })
    }

    /// Waits until the goals are durable. After an error the caller [takes them back](Self::take_back).
    pub(crate) async fn stored(&self, change: &GoalsChange) -> Result<(), OperationError> {
        self.wait_durable(change.revision).await.map_err(not_stored)
    }

    /// Returns to the goals before the change.
    pub(crate) fn take_back(&self, change: GoalsChange) {
        let GoalsChange { goals, old, .. } = change;
        self.with_fleet(|fleet, now| fleet.take_back_goals(goals, old, now));
    }

    /// Takes a drain back. That is durable before this returns; if it cannot be stored, the drain goes on. A member that
    /// does not drain stays as it is, whatever the store does.
    pub(crate) async fn resume(&self, member: &MemberId) -> Result<MemberInfo, OperationError> {
        let (info, was_draining, revision) = self.with_fleet(|fleet, now| {
            self.check_writable()?;
            let (info, was_draining) = fleet.resume(member, now)?;
            Ok::<_, OperationError>((info, was_draining, fleet.revision()))
        })?;
        if !was_draining {
            return Ok(info);
        }
        let stored = self.wait_durable(revision).await.map_err(not_stored);
        if let Err(OperationError::NotStored { .. }) = stored {
            // A member that has left or expired meanwhile needs no drain.
            drop(self.with_fleet(|fleet, now| fleet.drain(member, Some(info.incarnation), now)));
        }
        stored.map(|()| info)
    }

    fn check_writable(&self) -> Result<(), OperationError> {
        self.write_error().map_or(Ok(()), |reason| Err(OperationError::NotStored { reason }))
    }
}

fn not_stored(err: OperationError) -> OperationError {
    match err {
        OperationError::ReadOnly { reason } => OperationError::NotStored { reason },
        err => err,
    }
}
