//! The placement table in force, in its encoded forms, and the streams that follow it. A board outlives the terms of a
//! leader: a process publishes its own tables while it leads, and those of the leader while it follows.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::body::Bytes;
use control_api::PlacementTable;
use tokio::sync::broadcast::{self, error::RecvError};
use tokio::sync::watch;

/// A placement table in its encoded forms.
#[derive(Debug)]
pub(crate) struct EncodedTable {
    /// The table as JSON.
    pub(crate) json: Bytes,
    /// The table as a server-sent event.
    pub(crate) event: Bytes,
    cluster_id: String,
    pub(crate) epoch: u64,
    /// Fingerprint of the model, if there is one.
    pub(crate) fingerprint: Option<String>,
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

    /// Publishes a table, encoded once for all watchers. An older one of the same cluster changes nothing. Returns the
    /// number of bytes that are sent to all watchers together.
    pub(crate) fn publish(&self, table: &PlacementTable) -> usize {
        if is_old(self.lock().as_deref(), table) {
            return 0;
        }
        // Without the lock: readers of the last table do not wait.
        let published = Arc::new(encode(table));
        let mut latest = self.lock();
        if is_old(latest.as_deref(), table) {
            return 0;
        }
        *latest = Some(Arc::clone(&published));
        let num_bytes = published.event.len();
        // An error means that there are no watchers.
        self.changes.send(published).unwrap_or(0) * num_bytes
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<EncodedTable>>> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
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
        self.lock().clone()
    }

    /// The table in force and a receiver of every later one, without a gap in between.
    pub(crate) fn subscribe(
        &self,
    ) -> (Option<Arc<EncodedTable>>, broadcast::Receiver<Arc<EncodedTable>>) {
        let latest = self.lock();
        (latest.clone(), self.changes.subscribe())
    }

    /// The event for a watcher whose receiver `changes` has returned `change`; `None` if there is no later one. A
    /// watcher that lags far behind skips to the newest table. So does one of a large table if another one waits.
    pub(crate) fn event_after(
        &self,
        change: Result<Arc<EncodedTable>, RecvError>,
        changes: &mut broadcast::Receiver<Arc<EncodedTable>>,
    ) -> Option<Bytes> {
        match change {
            Err(RecvError::Closed) => None,
            Ok(table) if table.event.len() < LARGE_BYTES || changes.is_empty() => {
                Some(table.event.clone())
            }
            Ok(_) | Err(RecvError::Lagged(_)) => {
                let (latest, subscription) = self.subscribe();
                *changes = subscription;
                latest.map(|latest| latest.event.clone())
            }
        }
    }
}

/// True if `latest` is of the same cluster as `table`, and not older.
fn is_old(latest: Option<&EncodedTable>, table: &PlacementTable) -> bool {
    latest
        .is_some_and(|latest| latest.cluster_id == table.cluster_id && latest.epoch >= table.epoch)
}

fn encode(table: &PlacementTable) -> EncodedTable {
    // A table has strings, numbers and lists only, which always have a JSON form.
    let json = serde_json::to_string(table).unwrap_or_default();
    let (cluster_id, epoch) = (table.cluster_id.clone(), table.epoch);
    let event = format!("event: placement\nid: {epoch}\ndata: {json}\n\n");
    let fingerprint = table.model.as_ref().map(|model| model.fingerprint.clone());
    let (json, event) = (Bytes::from(json), Bytes::from(event));
    EncodedTable { json, event, cluster_id, epoch, fingerprint }
}

/// Number of tables that a slow watcher may lag behind before it skips to the newest.
const CHANGES_KEPT: usize = 64;
/// Tables of this size are skipped while newer ones wait.
const LARGE_BYTES: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use control_api::ServerEntry;

    use super::*;

    fn table(epoch: u64, num_servers: u32) -> PlacementTable {
        let server = |nth: u32| ServerEntry {
            member_id: control_api::MemberId::random(),
            name: format!("server-{nth}"),
            incarnation: nth.into(),
            data_addr: "127.0.0.1:7000".to_owned(),
            needs_tickets: true,
        };
        let servers = (0..num_servers).map(server).collect();
        PlacementTable { cluster_id: "c".to_owned(), epoch, servers, ..PlacementTable::default() }
    }

    /// Epochs that a watcher sees which reads nothing while 10 tables are published.
    fn seen(num_servers: u32) -> Vec<u64> {
        let board = Board::new();
        let (_, mut changes) = board.subscribe();
        let mut num_bytes = 0;
        for epoch in 1..=10 {
            num_bytes += board.publish(&table(epoch, num_servers));
        }
        assert_eq!(board.publish(&table(9, num_servers)), 0, "an older table changes nothing");
        let latest = board.latest().unwrap();
        assert!((9 * latest.event.len()..=10 * latest.event.len()).contains(&num_bytes));
        let mut epochs = Vec::new();
        while let Ok(change) = changes.try_recv() {
            let event = board.event_after(Ok(change), &mut changes).unwrap();
            let text = String::from_utf8(event.to_vec()).unwrap();
            let id = text.lines().find_map(|line| line.strip_prefix("id: ")).unwrap();
            epochs.push(id.parse().unwrap());
        }
        epochs
    }

    #[test]
    fn a_slow_watcher_of_large_tables_reads_only_the_newest() {
        assert_eq!(seen(3), (1..=10).collect::<Vec<u64>>());
        assert_eq!(seen(1000), [10]);
    }
}
