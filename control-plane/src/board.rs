//! The placement table in force, in its encoded forms, and the streams that follow it. A board outlives the terms of a
//! leader: a process publishes its own tables while it leads, and those of the leader while it follows.

use std::sync::{Arc, Mutex, PoisonError};

use axum::body::Bytes;
use control_api::PlacementTable;
use tokio::sync::{broadcast, watch};

/// A placement table in its encoded forms.
#[derive(Debug)]
pub(crate) struct EncodedTable {
    /// The table as JSON.
    pub(crate) json: Bytes,
    /// The table as a server-sent event.
    pub(crate) event: Bytes,
    cluster_id: String,
    epoch: u64,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Board {
    /// `None` until the first table is published.
    latest: Mutex<Option<Arc<EncodedTable>>>,
    changes: broadcast::Sender<Arc<EncodedTable>>,
    /// False while no leader confirms the table.
    is_fresh: watch::Sender<bool>,
}

impl Board {
    pub(crate) fn new() -> Self {
        let (changes, _) = broadcast::channel(CHANGES_KEPT);
        Self { latest: Mutex::new(None), changes, is_fresh: watch::Sender::new(false) }
    }

    /// Publishes a table. An older one of the same cluster changes nothing.
    pub(crate) fn publish(&self, table: &PlacementTable) {
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        let is_old = latest.as_ref().is_some_and(|latest| {
            latest.cluster_id == table.cluster_id && latest.epoch >= table.epoch
        });
        if is_old {
            return;
        }
        let published = Arc::new(encode(table));
        *latest = Some(Arc::clone(&published));
        // An error means that there are no watchers.
        let _ = self.changes.send(published);
    }

    /// Ends the streams that follow the board, and refuses new ones, until a leader confirms the table again. Their
    /// clients then try another control plane.
    pub(crate) fn set_fresh(&self, is_fresh: bool) {
        self.is_fresh.send_if_modified(|known| std::mem::replace(known, is_fresh) != is_fresh);
    }

    /// A receiver of [`set_fresh`](Self::set_fresh).
    pub(crate) fn freshness(&self) -> watch::Receiver<bool> {
        self.is_fresh.subscribe()
    }

    /// The table in force.
    pub(crate) fn latest(&self) -> Option<Arc<EncodedTable>> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The table in force and a receiver of every later one, without a gap in between.
    pub(crate) fn subscribe(
        &self,
    ) -> (Option<Arc<EncodedTable>>, broadcast::Receiver<Arc<EncodedTable>>) {
        let latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        (latest.clone(), self.changes.subscribe())
    }
}

fn encode(table: &PlacementTable) -> EncodedTable {
    // A table has strings, numbers and lists only, which always have a JSON form.
    let json = serde_json::to_string(table).unwrap_or_default();
    let (cluster_id, epoch) = (table.cluster_id.clone(), table.epoch);
    let event = format!("event: placement\nid: {epoch}\ndata: {json}\n\n");
    EncodedTable { json: Bytes::from(json), event: Bytes::from(event), cluster_id, epoch }
}

/// Number of tables that a slow watcher may lag behind before it skips to the newest.
const CHANGES_KEPT: usize = 64;
