//! The part that this process plays among the control planes of a fleet.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::editions::Editions;

/// See the [module](self). Changes only when another control plane is elected.
#[derive(Clone, Debug)]
pub(crate) enum Role {
    /// This process decides. With a store of its own it always does.
    Leader { editions: Arc<Editions>, term: u64 },
    /// Another process decides.
    Follower(Following),
}

/// State of a control plane that does not lead.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Following {
    /// URL of the leader; `None` while none is known.
    pub(crate) leader_url: Option<String>,
    /// Term of that leader, 0 without one.
    pub(crate) term: u64,
    /// Reason why no leader is known or can be elected.
    pub(crate) problem: Option<String>,
}

/// The URLs of the control planes on one store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Group {
    /// This process; `None` with a store of its own.
    pub(crate) own_url: Option<String>,
    /// The others, as far as they are known.
    pub(crate) others: Vec<String>,
}

/// Shared view of the role.
#[derive(Clone, Debug)]
pub(crate) struct Roles {
    role: watch::Sender<Role>,
    group: watch::Sender<Group>,
}

impl Roles {
    pub(crate) fn new(role: Role, own_url: Option<String>) -> Self {
        let group = Group { own_url, others: Vec::new() };
        Self { role: watch::Sender::new(role), group: watch::Sender::new(group) }
    }

    pub(crate) fn current(&self) -> Role {
        self.role.borrow().clone()
    }

    pub(crate) fn set(&self, role: Role) {
        self.role.send_replace(role);
    }

    /// Waits up to `bound` for a leader, this process or another.
    pub(crate) async fn await_leader(&self, bound: Duration) -> Role {
        let mut role = self.role.subscribe();
        let has_leader = |role: &Role| match role {
            Role::Leader { .. } => true,
            Role::Follower(following) => following.leader_url.is_some(),
        };
        drop(tokio::time::timeout(bound, role.wait_for(has_leader)).await);
        self.current()
    }

    pub(crate) fn group(&self) -> Group {
        self.group.borrow().clone()
    }

    pub(crate) fn set_others(&self, others: Vec<String>) {
        self.group.send_if_modified(|group| {
            let is_news = group.others != others;
            group.others = others;
            is_news
        });
    }
}
