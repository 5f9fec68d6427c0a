//! Changes between two batches: clients that enter and leave the table, and new tables of experts.

use super::DataThread;
use crate::device::client::Client;
use crate::error::DataError;
use crate::metrics::DropReason;
use crate::plane::ClosedLink;

impl DataThread {
    /// Waits for the batches in flight, then applies all pending changes.
    pub(super) fn apply_changes(&mut self) -> Result<(), DataError> {
        // No batch waits for a client that leaves: neither one that broke the rules, nor one that disconnected
        // before the mask knew its link.
        self.aborts.abort_closing(&self.clients);
        self.drain()?;
        if self.has_fault || self.refusal_since.is_some() {
            self.read_fault()?;
        }
        self.remove_closed_clients();
        self.admit_clients()?;
        let tables = self.store.tables();
        if tables.version != self.tables.version {
            self.memory.write_tables(&self.control, &self.plan, &self.store, &tables)?;
            // The old tables are dropped before the store hears of the new ones. The loader then frees memory
            // that no table uses any more.
            self.tables = tables;
            self.store.set_in_service(&self.tables);
        }
        let peers = self.clients.peers();
        self.memory.write_clients(&self.control, &peers)?;
        self.aborts.update(&self.clients);
        self.publish_links();
        Ok(())
    }

    /// Puts new clients into the table and resets the kernels' counters for their indices.
    fn admit_clients(&mut self) -> Result<(), DataError> {
        for client in std::mem::take(&mut self.new_clients) {
            self.metrics.links_opened.inc();
            if let Some(reason) = client.close_reason() {
                self.close(client, reason);
                continue;
            }
            match self.clients.insert(client) {
                Ok(idx) => {
                    self.gather_policy.reset(idx);
                    self.memory.reset_client(&self.control, idx)?;
                }
                Err(client) => {
                    tracing::error!(link = %client.id, "the client table has no free entry for an admitted client");
                    self.close(*client, DropReason::Transport);
                }
            }
        }
        Ok(())
    }

    /// Closes the links that are to close. No batch is in flight.
    pub(super) fn remove_closed_clients(&mut self) {
        let removed: Vec<Client> = self.clients.remove_closing().collect();
        for client in removed {
            let reason = client.close_reason().unwrap_or(DropReason::Shutdown);
            self.close(client, reason);
        }
        self.publish_links();
    }

    fn close(&self, client: Client, reason: DropReason) {
        self.metrics.count_dropped(reason);
        // Without a receiver the slots are freed here.
        let _ = client.closed.send(ClosedLink { reason, slots: client.slots });
    }

    fn publish_links(&self) {
        let num_links = self.clients.len();
        self.status.set_links(num_links);
        self.metrics.links.set(num_links as i64);
        self.load.set_links(self.clients.iter().map(|client| client.slots.kind()));
    }
}
