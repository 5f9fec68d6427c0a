//! Changes of the fleet, for the log, the metrics and the list of events.

use std::time::Duration;

use control_api::FleetGoals;

/// A change, for the log and the metrics.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum FleetEvent {
    Registered {
        name: String,
        kind: RegistrationKind,
    },
    /// Two live processes use one name.
    NameContested {
        name: String,
    },
    /// The fleet was planned, and members have to load experts.
    Planned {
        num_loads: usize,
        before: f64,
        after: f64,
    },
    GoalsChanged {
        goals: FleetGoals,
    },
    /// The stored goals stay in force, although the control plane was started with others.
    GoalsKept {
        asked: FleetGoals,
        goals: FleetGoals,
    },
    /// The members have too little memory for a plan.
    Short {
        shortage: String,
    },
    /// The first member of another model has joined after every member of the old model had gone.
    ModelReplaced {
        fingerprint: String,
    },
    /// The control plane cannot connect to a serving member.
    Unreachable {
        name: String,
        data_addr: String,
        reason: String,
    },
    /// The placement does without a member that the control plane has never reached, or includes it again.
    LeftOut {
        name: String,
        is_left_out: bool,
    },
    Serving {
        name: String,
    },
    Draining {
        name: String,
    },
    /// A drain was taken back.
    Resumed {
        name: String,
    },
    Left {
        name: String,
    },
    Suspected {
        name: String,
        reporter: String,
        reason: String,
    },
    Expired {
        name: String,
        cause: ExpiryCause,
    },
    /// An expired member was removed.
    Removed {
        name: String,
    },
    /// This process was paused. All leases were extended by the length of the pause.
    LeasesExtended {
        pause: Duration,
    },
    PlacementChanged {
        epoch: u64,
        num_servers: usize,
    },
    /// A change of the placement waits until the store has reserved more epochs.
    PlacementBlocked,
}

/// Kind of a registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RegistrationKind {
    New,
    /// A known process has registered again.
    Returned,
    /// A restarted process has taken over the name of an earlier one.
    Takeover,
}

/// Reason why a lease ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExpiryCause {
    /// The member did not renew in time.
    Lease,
    /// A suspected member did not renew by its deadline.
    Suspect,
}
