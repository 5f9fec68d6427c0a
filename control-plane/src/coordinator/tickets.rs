//! Tickets: issue, revocation and new keys.

use std::time::{Duration, SystemTime};

use control_api::{TicketRequest, TicketResponse};
use tracing::{debug, info, warn};

use super::{Coordinator, OperationError, TermTimes, lock};
use crate::fleet::Fleet;
use crate::store::StoreError;
use crate::tickets::{TicketOffice, TicketSettings};

impl Coordinator {
    /// Issues a ticket, once servers have had the time to learn the key of this term.
    pub(crate) async fn issue_ticket(
        &self,
        request: &TicketRequest,
    ) -> Result<TicketResponse, OperationError> {
        let wait = self.tickets.wait(self.clock.now());
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
        let epoch = lock(&self.fleet).table().epoch;
        Ok(self.tickets.issue(request, epoch, SystemTime::now().into())?)
    }

    /// Revokes all tickets. This is durable before it returns, unless the store cannot be written. Returns the least
    /// epoch of tickets.
    pub(crate) async fn revoke_tickets(&self) -> Result<u64, OperationError> {
        let (least_epoch, revision) = self.with_fleet(|fleet, _| {
            let least_epoch = self.tickets.revoke(fleet.table().epoch);
            fleet.set_tickets(self.tickets.record());
            (least_epoch, fleet.revision())
        });
        warn!(least_epoch, "all tickets are revoked");
        match self.wait_durable(revision).await {
            Err(OperationError::ReadOnly { .. }) => Ok(least_epoch),
            outcome => outcome.map(|()| least_epoch),
        }
    }

    /// Makes the next key of tickets in time.
    pub(super) fn renew_ticket_key(&self) {
        match self.tickets.tick(self.clock.now(), SystemTime::now().into()) {
            Ok(false) => {}
            Ok(true) => {
                info!("a new key for tickets is published");
                self.with_fleet(|fleet, _| fleet.set_tickets(self.tickets.record()));
            }
            // The old key goes on. The next tick tries again.
            Err(err) => debug!(error = %err, "no new key for tickets"),
        }
    }
}

/// Opens the office of tickets, whose key becomes a part of the fleet's snapshot.
pub(super) fn open_tickets(
    fleet: &mut Fleet,
    times: TermTimes,
    now: Duration,
) -> Result<TicketOffice, StoreError> {
    let settings = TicketSettings {
        life: times.ticket_life,
        spread: (times.lease_ttl / 2).min(MAX_KEY_SPREAD),
    };
    let has_servers = !fleet.infos(now).is_empty();
    let (fleet_id, record) = (fleet.cluster_id().to_owned(), fleet.tickets().clone());
    let wall = SystemTime::now().into();
    let office = TicketOffice::open(&fleet_id, record, settings, has_servers, now, wall);
    let office = office.map_err(|err| StoreError::Io {
        operation: "make a key for tickets of",
        path: fleet_id.into(),
        source: std::io::Error::other(err),
    })?;
    fleet.set_tickets(office.record());
    Ok(office)
}

/// A request for a ticket waits no longer than this for the servers to learn a new key.
const MAX_KEY_SPREAD: Duration = Duration::from_secs(2);
