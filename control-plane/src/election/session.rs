//! The calls of the election to etcd: lease, candidacy, and the list of candidates.

use std::time::Duration;

use serde::Deserialize;
use serde_json::json;
use tokio::time::{Instant, sleep};

use super::{Election, RETRY};
use crate::store::etcd::{EtcdError, Fence, encoded, kv_bytes, kv_number};

/// The lease of this process.
#[derive(Debug, Default)]
pub(super) struct Session {
    /// Id of the lease in etcd; `None` before the first one and after a loss.
    lease: Option<i64>,
    /// The lease cannot end before, by the clock of this process.
    confirmed_until: Option<Instant>,
}

impl Session {
    pub(super) fn confirmed_until(&self) -> Instant {
        self.confirmed_until.unwrap_or_else(Instant::now)
    }
}

/// A control plane that leads or would take over.
#[derive(Debug)]
pub(super) struct Candidate {
    pub(super) url: String,
    pub(super) term: u64,
}

#[derive(Deserialize)]
struct Grant {
    #[serde(rename = "ID", deserialize_with = "kv_number")]
    id: i64,
}

#[derive(Deserialize)]
struct Renewal {
    result: RenewalResult,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RenewalResult {
    /// Absent for a lease that has ended.
    #[serde(rename = "TTL", deserialize_with = "kv_number")]
    ttl: i64,
}

#[derive(Deserialize)]
struct Campaign {
    leader: LeaderKey,
}

#[derive(Deserialize)]
struct LeaderKey {
    #[serde(deserialize_with = "kv_bytes")]
    key: Vec<u8>,
    /// Revision of the key's creation.
    #[serde(deserialize_with = "kv_number")]
    rev: i64,
}

impl Election {
    /// Stands for election once and waits up to [`CAMPAIGN_BOUND`]. `None` if that was not enough, or if the answer was
    /// lost: the next attempt with the same lease asks again.
    pub(super) async fn attempt(&self, session: &mut Session) -> Result<Option<Fence>, EtcdError> {
        let lease = match session.lease {
            Some(lease) => lease,
            None => {
                let asked = Instant::now();
                let body = json!({ "TTL": self.lease_ttl.as_secs().to_string() });
                let grant: Grant = self.client.call("lease/grant", &body, CALL_BOUND).await?;
                session.confirmed_until = Some(asked + self.lease_ttl);
                *session.lease.insert(grant.id)
            }
        };
        let body = json!({
            "name": encoded(self.name()),
            "lease": lease.to_string(),
            "value": encoded(&self.own_url),
        });
        // etcd answers once this candidate is the oldest.
        let campaign =
            self.client.call_once::<Campaign>("election/campaign", &body, CAMPAIGN_BOUND);
        let outcome = tokio::select! {
            outcome = campaign => outcome,
            err = self.renew_until_lost(session) => Err(err),
        };
        match outcome {
            Ok(won) => Ok(won.map(|Campaign { leader: LeaderKey { key, rev } }| Fence {
                key,
                create_revision: rev,
            })),
            Err(err) => {
                if matches!(err, EtcdError::LeaseNotFound) {
                    *session = Session::default();
                }
                Err(err)
            }
        }
    }

    async fn renew_until_lost(&self, session: &mut Session) -> EtcdError {
        let period = self.lease_ttl / 3;
        let mut pause = period;
        loop {
            sleep(pause).await;
            match self.renew(session, period).await {
                Ok(()) => pause = period,
                Err(err @ EtcdError::LeaseNotFound) => return err,
                Err(err) if session.confirmed_until() < Instant::now() => return err,
                Err(_) => pause = RETRY,
            }
        }
    }

    /// Renews the lease.
    pub(super) async fn renew(
        &self,
        session: &mut Session,
        bound: Duration,
    ) -> Result<(), EtcdError> {
        let lease = session.lease.ok_or(EtcdError::LeaseNotFound)?;
        let asked = Instant::now();
        let body = json!({ "ID": lease.to_string() });
        let renewal: Renewal = self.client.call("lease/keepalive", &body, bound).await?;
        if renewal.result.ttl == 0 {
            return Err(EtcdError::LeaseNotFound);
        }
        session.confirmed_until = Some(asked + self.lease_ttl);
        Ok(())
    }

    /// Ends the lease, so that another control plane takes over at once.
    pub(super) async fn give_up(&self, session: &Session) {
        let Some(lease) = session.lease else { return };
        let body = json!({ "ID": lease.to_string() });
        // After an error the lease ends by itself.
        drop(self.client.call::<serde_json::Value>("lease/revoke", &body, GIVE_UP_BOUND).await);
    }

    /// The candidates, the leader first.
    pub(super) async fn candidates(&self, bound: Duration) -> Result<Vec<Candidate>, EtcdError> {
        let range =
            self.client.list(&format!("{}/", self.name()), MAX_CANDIDATES, true, bound).await?;
        let candidate = |found: &crate::store::etcd::KeyValue| Candidate {
            url: String::from_utf8_lossy(&found.value).into_owned(),
            term: found.create_revision as u64,
        };
        Ok(range.kvs.iter().map(candidate).collect())
    }
}

const CALL_BOUND: Duration = Duration::from_secs(3);
/// A candidate asks again after this time, in case the watch inside etcd hangs.
const CAMPAIGN_BOUND: Duration = Duration::from_secs(5);
const GIVE_UP_BOUND: Duration = Duration::from_millis(1000);
const MAX_CANDIDATES: u32 = 64;
