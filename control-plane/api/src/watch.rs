//! The newest placement table, kept through outages of the control plane.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use crate::backoff::Backoff;
use crate::client::ControlClient;
use crate::error::{ConfigError, ControlError};
use crate::placement::PlacementTable;

/// Pace of a [`PlacementWatch`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct WatchOptions {
    /// First pause before reconnecting; doubles up to [`max_backoff`](Self::max_backoff).
    pub first_backoff: Duration,
    /// Longest pause before reconnecting.
    pub max_backoff: Duration,
    /// How long a complete table outlives the incomplete ones of another cluster. A control
    /// plane that has lost its state starts with an empty table; its servers are still there and
    /// register again within a lease.
    pub new_cluster_patience: Duration,
}

impl Default for WatchOptions {
    fn default() -> Self {
        Self {
            first_backoff: Duration::from_millis(50),
            max_backoff: Duration::from_secs(2),
            new_cluster_patience: Duration::from_secs(15),
        }
    }
}

/// Whether the stream of tables is alive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum WatchStatus {
    /// No table has come yet.
    #[default]
    Connecting,
    /// The stream is open: the table is the control plane's newest.
    Connected,
    /// The stream is broken: the last table stays in force while the watch reconnects.
    Disconnected,
}

/// Condition of a [`PlacementWatch`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WatchState {
    /// Whether the stream is alive.
    pub status: WatchStatus,
    /// Why the stream broke last, or could not be opened.
    pub last_error: Option<String>,
    /// Whether the control plane refuses the token.
    pub unauthorized: bool,
    /// Streams opened so far.
    pub num_connects: u64,
    /// Tables refused because their epoch was older than the one in force.
    pub num_stale_tables: u64,
}

/// Follows the placement. Dropping it ends the watch; receivers keep the last table.
///
/// Until the first table comes the value is the empty table: no cluster id, epoch 0. For one
/// cluster id the epoch never goes backwards. A control plane that has lost its state has
/// another cluster id; its tables are accepted whatever their epoch, but an incomplete one
/// replaces a complete one only after [`WatchOptions::new_cluster_patience`].
#[derive(Debug)]
pub struct PlacementWatch {
    tables: watch::Receiver<Arc<PlacementTable>>,
    state: watch::Receiver<WatchState>,
    /// Dropped with the watch, which ends the follower.
    _stop: oneshot::Sender<()>,
}

impl PlacementWatch {
    /// Starts watching on a runtime, which must have time and I/O enabled and be driven.
    pub fn spawn(
        client: &ControlClient,
        handle: &Handle,
        options: WatchOptions,
    ) -> Result<Self, ConfigError> {
        let (watch, follower, stop) = Self::prepare(client, options)?;
        handle.spawn(until(follower.run(), stop));
        Ok(watch)
    }

    /// Starts watching on a thread with a runtime of its own, for callers without a runtime.
    pub fn spawn_thread(
        client: &ControlClient,
        options: WatchOptions,
    ) -> Result<Self, ConfigError> {
        let (watch, follower, stop) = Self::prepare(client, options)?;
        let setup = |err: std::io::Error| ConfigError::Setup { reason: err.to_string() };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(setup)?;
        let body = move || {
            runtime.block_on(until(follower.run(), stop));
            // A name look-up that hangs must not keep the thread.
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name("switchyard-watch".to_owned());
        thread.spawn(body).map_err(setup)?;
        Ok(watch)
    }

    fn prepare(
        client: &ControlClient,
        options: WatchOptions,
    ) -> Result<(Self, Follower, oneshot::Receiver<()>), ConfigError> {
        let client = client.isolated()?;
        let (tables_tx, tables) = watch::channel(Arc::new(PlacementTable::default()));
        let (state_tx, state) = watch::channel(WatchState::default());
        let (stop_tx, stop) = oneshot::channel();
        let follower =
            Follower { client, options, tables: tables_tx, state: state_tx, held_back: None };
        Ok((Self { tables, state, _stop: stop_tx }, follower, stop))
    }

    /// A receiver of tables. Reading it takes no round trip.
    pub fn tables(&self) -> watch::Receiver<Arc<PlacementTable>> {
        self.tables.clone()
    }

    /// The table in force.
    pub fn current(&self) -> Arc<PlacementTable> {
        self.tables.borrow().clone()
    }

    /// A receiver of the connection's condition.
    pub fn state(&self) -> watch::Receiver<WatchState> {
        self.state.clone()
    }

    /// Waits until a table satisfies `wanted`, at most for `bound`. On expiry gives the table in
    /// force as the error.
    pub async fn wait_for(
        &self,
        bound: Duration,
        mut wanted: impl FnMut(&PlacementTable) -> bool,
    ) -> Result<Arc<PlacementTable>, Arc<PlacementTable>> {
        let mut tables = self.tables.clone();
        let found = tokio::time::timeout(bound, tables.wait_for(|table| wanted(table))).await;
        match found {
            Ok(Ok(table)) => Ok(table.clone()),
            _ => Err(self.current()),
        }
    }
}

/// Runs the follower until the watch is dropped.
async fn until(follower: impl Future<Output = ()>, stop: oneshot::Receiver<()>) {
    tokio::select! {
        () = follower => {}
        _ = stop => {}
    }
}

struct Follower {
    client: ControlClient,
    options: WatchOptions,
    tables: watch::Sender<Arc<PlacementTable>>,
    state: watch::Sender<WatchState>,
    /// The newest incomplete table of another cluster, and when its time comes.
    held_back: Option<(Instant, PlacementTable)>,
}

impl Follower {
    async fn run(mut self) {
        let mut backoff = Backoff::new(self.options.first_backoff, self.options.max_backoff);
        loop {
            let err = self.follow(&mut backoff).await;
            let was_connected = self.state.borrow().status == WatchStatus::Connected;
            self.state.send_modify(|state| {
                if was_connected {
                    state.status = WatchStatus::Disconnected;
                }
                state.unauthorized = matches!(err, ControlError::Unauthorized { .. });
                state.last_error = Some(err.to_string());
            });
            if was_connected {
                warn!(error = %err, "placement watch broken; the last table stays in force");
            } else {
                debug!(error = %err, "placement watch cannot connect");
            }
            tokio::time::sleep(backoff.next_delay()).await;
        }
    }

    /// Reads one stream to its end, which is always an error.
    async fn follow(&mut self, backoff: &mut Backoff) -> ControlError {
        let mut stream = match self.client.watch_placement().await {
            Ok(stream) => stream,
            Err(err) => return err,
        };
        loop {
            let due = self.held_back.as_ref().map(|(due, _)| *due);
            let patience = async {
                match due {
                    Some(due) => tokio::time::sleep_until(due).await,
                    None => std::future::pending().await,
                }
            };
            let table = tokio::select! {
                table = stream.next() => match table {
                    Ok(table) => table,
                    Err(err) => return err,
                },
                () = patience => {
                    self.give_in();
                    continue;
                }
            };
            backoff.reset();
            self.accept(table);
            if self.state.borrow().status != WatchStatus::Connected {
                info!(url = self.client.base_url(), "placement watch connected");
                self.state.send_modify(|state| {
                    state.status = WatchStatus::Connected;
                    state.last_error = None;
                    state.unauthorized = false;
                    state.num_connects += 1;
                });
            }
        }
    }

    fn accept(&mut self, table: PlacementTable) {
        let current = self.tables.borrow().clone();
        if current.cluster_id == table.cluster_id {
            if table.epoch < current.epoch {
                warn!(found = table.epoch, in_force = current.epoch, "older placement refused");
                self.state.send_modify(|state| state.num_stale_tables += 1);
            } else if table.epoch > current.epoch {
                self.put_in_force(table);
            }
        } else if current.is_complete() && !table.is_complete() {
            if self.held_back.is_none() {
                warn!(
                    cluster = table.cluster_id,
                    "the control plane has lost its state; the last table stays in force until \
                     the servers have registered again"
                );
            }
            let due = Instant::now() + self.options.new_cluster_patience;
            let due = self.held_back.as_ref().map_or(due, |(due, _)| *due);
            self.held_back = Some((due, table));
        } else {
            self.put_in_force(table);
        }
    }

    /// Accepts an incomplete table after all.
    fn give_in(&mut self) {
        if let Some((_, table)) = self.held_back.take() {
            self.put_in_force(table);
        }
    }

    fn put_in_force(&mut self, table: PlacementTable) {
        debug!(epoch = table.epoch, servers = table.servers.len(), "new placement");
        self.held_back = None;
        self.tables.send_replace(Arc::new(table));
    }
}
