//! The status of a fleet, and its condition.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::models::{EditionInfo, EditionState};
use crate::types::{MemberCounts, ModelDescriptor, StoreStatus};

/// `GET /v1/status`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClusterStatus {
    /// Identity of the cluster. It survives restarts of a control plane with a durable store.
    pub cluster_id: String,
    /// Version of the control plane's software.
    pub version: String,
    /// Time since the control plane started in milliseconds.
    pub uptime_ms: u64,
    /// Epoch of the placement table.
    pub epoch: u64,
    /// The model of the fleet; `None` before the first member has registered.
    pub model: Option<ModelDescriptor>,
    /// Planned number of servers.
    pub num_servers: u32,
    /// Planned replicas per expert.
    pub replicas: u32,
    /// Time to live of a lease in milliseconds.
    pub lease_ttl_ms: u64,
    /// Members by state.
    pub members: MemberCounts,
    /// (layer, expert) pairs of the model.
    pub experts_total: u64,
    /// Pairs that no serving member holds.
    pub experts_without_replica: u64,
    /// Pairs that at least one but fewer than the planned number of serving members hold.
    pub experts_under_replicated: u64,
    /// Open placement watches.
    pub num_watchers: u64,
    /// Reason why the last plan failed or gives experts too few replicas, if the placement follows the load.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan_error: Option<String>,
    /// Reason why the control plane's TLS files on the disk cannot be used. The previous ones are in force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls_error: Option<String>,
    /// Names plain text of the control plane that other hosts can reach.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub insecure: Option<String>,
    /// The store.
    pub store: StoreStatus,
    /// Condition of the fleet. `None` until [`ClusterStatus::assess`], and in the answer of a control plane without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<Health>,
    /// Each deviation from the plan as a sentence. Without `health`: troubles of the control plane itself only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
    /// The models, if the fleet serves more than one: the current one, which the other fields describe, and the one that
    /// comes or goes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub editions: Vec<EditionInfo>,
    /// URL of the control plane that leads, if several share the store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leader: Option<String>,
    /// URLs of the control planes that would take over.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub followers: Vec<String>,
}

/// Condition of a fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Health {
    /// Everything is as planned.
    Healthy,
    /// Every expert has a replica, and something is not as planned.
    Degraded,
    /// Some expert has no live replica: calls fail.
    Down,
}

impl Health {
    /// The name used in JSON and on the terminal.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Degraded => "degraded",
            Self::Down => "down",
        }
    }
}

impl ClusterStatus {
    /// A sentence that counts the experts without a live replica, if there are any.
    pub fn lost_experts(&self) -> Option<String> {
        let (without, total) = (self.experts_without_replica, self.experts_total);
        (without > 0).then(|| format!("{without} of {total} experts have no live replica"))
    }

    /// A sentence with the reason why the plan is not as wanted, if it is not.
    pub fn plan_problem(&self) -> Option<String> {
        let reason = self.plan_error.as_ref()?;
        Some(format!("the fleet cannot be planned as wanted: {reason}"))
    }

    /// The condition of the fleet, and each deviation from the plan as a sentence: as the control plane says, or else
    /// as the other fields say.
    pub fn health(&self) -> (Health, Vec<String>) {
        match self.health {
            Some(health) => (health, self.problems.clone()),
            None => self.deviations(),
        }
    }

    /// Sets `health`, and puts each deviation that the other fields show in front of `problems`. Does nothing the
    /// second time.
    pub fn assess(&mut self) {
        let (health, problems) = self.health();
        (self.health, self.problems) = (Some(health), problems);
    }

    fn deviations(&self) -> (Health, Vec<String>) {
        let mut problems = Vec::new();
        let is_down = self.experts_total == 0 || self.experts_without_replica > 0;
        if self.model.is_none() {
            problems.push("no expert server has registered".to_owned());
        } else if is_down {
            problems.extend(self.lost_experts());
        }
        if self.experts_under_replicated > 0 {
            let (under, planned) = (self.experts_under_replicated, self.replicas);
            problems
                .push(format!("{under} experts have fewer replicas than the {planned} planned"));
        }
        let MemberCounts { loading, serving, draining, expired } = self.members;
        if serving < self.num_servers {
            problems.push(format!(
                "{serving} of {} planned servers are serving ({loading} loading, {draining} draining, \
                 {expired} expired)",
                self.num_servers
            ));
        } else if expired > 0 {
            problems.push(format!("{expired} expired members have not come back"));
        }
        problems.extend(self.plan_problem());
        if let Some(reason) = &self.tls_error {
            problems.push(format!("the control plane's TLS files cannot be used: {reason}"));
        }
        problems.extend(self.insecure.clone());
        for edition in &self.editions {
            let (without, total) = (edition.experts_without_replica, edition.experts_total);
            if edition.state == EditionState::Retiring && edition.num_clients > 0 && without > 0 {
                let clients = edition.num_clients;
                problems.push(format!(
                    "{without} of {total} experts of the retiring model have no live replica, and {clients} clients \
                     follow it"
                ));
            }
        }
        if !self.store.writable {
            let reason = self.store.error.as_deref().unwrap_or("no reason given");
            problems.push(format!("the store cannot be written: {reason}"));
        }
        problems.extend(self.problems.iter().cloned());
        let health = match (is_down, problems.is_empty()) {
            (true, _) => Health::Down,
            (false, false) => Health::Degraded,
            (false, true) => Health::Healthy,
        };
        (health, problems)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_deviation_from_the_plan_is_named() {
        let model = ModelDescriptor {
            fingerprint: "00ff00ff".to_owned(),
            architecture: "test".to_owned(),
            hidden: 8,
            moe_layers: vec![0],
            num_experts: 8,
            top_k: 2,
        };
        let good = ClusterStatus {
            cluster_id: "c".to_owned(),
            version: "1".to_owned(),
            uptime_ms: 1,
            epoch: 3,
            model: Some(model),
            num_servers: 3,
            replicas: 2,
            lease_ttl_ms: 3000,
            members: MemberCounts { serving: 3, ..MemberCounts::default() },
            experts_total: 8,
            experts_without_replica: 0,
            experts_under_replicated: 0,
            num_watchers: 0,
            plan_error: None,
            tls_error: None,
            insecure: None,
            store: StoreStatus { kind: "memory".to_owned(), writable: true, error: None },
            health: None,
            problems: Vec::new(),
            editions: Vec::new(),
            leader: None,
            followers: Vec::new(),
        };
        assert_eq!(good.health(), (Health::Healthy, Vec::new()));
        let check = |change: &dyn Fn(&mut ClusterStatus), health: Health, word: &str| {
            let mut status = good.clone();
            change(&mut status);
            let (found, problems) = status.health();
            assert_eq!(found, health, "{word}");
            assert!(problems.iter().any(|text| text.contains(word)), "{word}: {problems:?}");
            // The reader of the answer sees what the control plane has found, whatever the other fields say.
            for _ in 0..2 {
                status.assess();
                let json = serde_json::to_string(&status).expect("JSON");
                assert!(json.contains(&format!(r#""health":"{}""#, health.as_str())), "{json}");
                let mut read: ClusterStatus = serde_json::from_str(&json).expect("status");
                (read.members, read.experts_without_replica) = (MemberCounts::default(), 0);
                assert_eq!(read.health(), (found, problems.clone()));
            }
        };
        let degraded = Health::Degraded;
        check(&|s| s.experts_under_replicated = 8, degraded, "fewer replicas");
        check(&|s| s.members.expired = 1, degraded, "not come back");
        check(&|s| s.members.serving = 2, degraded, "2 of 3 planned");
        let retiring = |s: &mut ClusterStatus| {
            s.editions = vec![EditionInfo {
                fingerprint: Some("11ff11ff".to_owned()),
                state: EditionState::Retiring,
                model: None,
                epoch: 4,
                members: MemberCounts::default(),
                experts_total: 8,
                experts_without_replica: 2,
                experts_under_replicated: 0,
                num_clients: 1,
                plan_error: None,
                switches_when_complete: false,
                retires_within_ms: Some(1),
            }];
        };
        check(&retiring, degraded, "retiring model");
        check(&|s| s.plan_error = Some("no room".to_owned()), degraded, "no room");
        check(&|s| s.tls_error = Some("no key".to_owned()), degraded, "no key");
        check(&|s| s.insecure = Some("INSECURE: 0.0.0.0".to_owned()), degraded, "INSECURE");
        check(&|s| s.store.writable = false, degraded, "cannot be written");
        check(&|s| s.problems = vec!["the token file is wrong".to_owned()], degraded, "token file");
        check(&|s| s.experts_without_replica = 1, Health::Down, "no live replica");
        let empty = |s: &mut ClusterStatus| (s.model, s.experts_total) = (None, 0);
        check(&empty, Health::Down, "no expert server");
    }
}
