//! Tickets: issue, revocation and new keys.

use std::time::{Duration, SystemTime};

use control_api::{TicketRequest, TicketResponse};
use tracing::{debug, info, warn};

use super::{Coordinator, OperationError, lock};
use crate::tickets::IssueError;

impl Coordinator {
    /// Issues a ticket to `holder`, once servers have had the time to learn the key of this term. Waits for that up to
    /// `bound`.
    pub(crate) async fn issue_ticket(
        &self,
        request: &TicketRequest,
        holder: &str,
        bound: Duration,
    ) -> Result<TicketResponse, OperationError> {
        let wait = self.tickets.wait(self.clock.now());
        tokio::time::sleep(wait.min(bound)).await;
        if let Some(rest) = wait.checked_sub(bound).filter(|rest| !rest.is_zero()) {
            return Err(IssueError::NotYet { seconds: rest.as_secs() + 1 }.into());
        }
        let epoch = lock(&self.fleet).table().epoch;
        Ok(self.tickets.issue(request, holder, epoch, SystemTime::now().into())?)
    }

    /// Revokes all tickets. This is in force and durable before it returns the least epoch of tickets. If the store cannot
    /// be written, it is in force, and the error is [`OperationError::NotDurable`].
    pub(crate) async fn revoke_tickets(&self) -> Result<u64, OperationError> {
        let (least_epoch, revision) = self.with_fleet(|fleet, _| {
            let least_epoch = self.tickets.revoke(fleet.table().epoch);
            fleet.set_tickets(self.tickets.record());
            (least_epoch, fleet.revision())
        });
        warn!(least_epoch, "all tickets are revoked");
        match self.wait_durable(revision).await {
            Err(OperationError::ReadOnly { reason }) => {
                let change = format!("tickets before epoch {least_epoch} are revoked");
                Err(OperationError::NotDurable { change, reason })
            }
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
