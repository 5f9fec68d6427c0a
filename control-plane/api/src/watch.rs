//! Follows the placement table. The last table stays in force during outages of the control plane.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use crate::backoff::Backoff;
use crate::client::{ControlClient, PlacementQuery};
use crate::error::{ConfigError, ControlError};
use crate::placement::PlacementTable;

/// Delays of a [`PlacementWatch`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct WatchOptions {
    /// First delay before reconnecting. It doubles up to [`max_backoff`](Self::max_backoff). Default: 50 ms.
    pub first_backoff: Duration,
    /// Longest delay before reconnecting. Default: 2 s.
    pub max_backoff: Duration,
    /// Time for which a complete table stays in force when the control plane sends incomplete tables of
    /// another cluster. A control plane that has lost its state starts with an empty table, and its servers
    /// register again within a lease. Default: 15 s.
    pub new_cluster_grace: Duration,
    /// Fingerprint of the model to follow. `None` takes the model that is current when the first table with a model
    /// arrives. The watch then asks for that model with each reconnect. Default: `None`.
    pub fingerprint: Option<String>,
    /// True for a watch that makes no calls. It does not keep an old model in service. Default: false.
    pub is_observer: bool,
}

impl Default for WatchOptions {
    fn default() -> Self {
        Self {
            first_backoff: Duration::from_millis(50),
            max_backoff: Duration::from_secs(2),
            new_cluster_grace: Duration::from_secs(15),
            fingerprint: None,
            is_observer: false,
        }
    }
}

/// State of the stream of tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum WatchStatus {
    /// The watch has not received a table yet.
    #[default]
    Connecting,
    /// The stream is open, and the table is the newest.
    Connected,
    /// The stream is broken. The last table stays in force while the watch reconnects.
    Disconnected,
}

/// State of a [`PlacementWatch`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WatchState {
    /// State of the stream.
    pub status: WatchStatus,
    /// Error that last broke the stream or kept it from opening.
    pub last_error: Option<String>,
    /// True while the control plane refuses the token.
    pub unauthorized: bool,
    /// Number of streams opened.
    pub num_connects: u64,
    /// Number of tables refused because their epoch was older than that of the table in force.
    pub num_stale_tables: u64,
    /// Number of tables refused because they are for another model than the one that the watch stays with.
    pub num_other_models: u64,
}

/// Follows the placement. Dropping it ends the watch; receivers keep the last table.
///
/// Before the first table arrives the value is the empty table: no cluster id, epoch 0. For one cluster id
/// the epoch never goes backwards. A control plane that has lost its state has another cluster id. Its
/// tables are accepted with any epoch, but an incomplete one replaces a complete one only after
/// [`WatchOptions::new_cluster_grace`].
///
/// A watch stays with one model: with [`WatchOptions::fingerprint`], or with that of its first table. It refuses tables of
/// other models, which a control plane sends once all servers of the model have gone. The last table then stays in force.
#[derive(Debug)]
pub struct PlacementWatch {
    tables: watch::Receiver<Arc<PlacementTable>>,
    state: watch::Receiver<WatchState>,
    /// Dropped with the watch, which ends the follower.
    _stop: oneshot::Sender<()>,
}

impl PlacementWatch {
    /// Starts the watch on a running tokio runtime with time and I/O enabled.
    ///
    /// # Errors
    /// [`ConfigError::Setup`] when the HTTP client cannot be set up.
    pub fn spawn(
        client: &ControlClient,
        handle: &Handle,
        options: WatchOptions,
    ) -> Result<Self, ConfigError> {
        let (watch, follower, stop) = Self::prepare(client, options)?;
        handle.spawn(until(follower.run(), stop));
        Ok(watch)
    }

    /// Starts the watch on its own thread and runtime, for callers without a runtime.
    ///
    /// # Errors
    /// [`ConfigError::Setup`] when the HTTP client, the runtime or the thread cannot be set up.
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
            // Do not wait for a DNS lookup that hangs.
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
            Follower { client, options, tables: tables_tx, state: state_tx, pending: None };
        Ok((Self { tables, state, _stop: stop_tx }, follower, stop))
    }

    /// A receiver of tables. Reading it never waits for the network.
    pub fn tables(&self) -> watch::Receiver<Arc<PlacementTable>> {
        self.tables.clone()
    }

    /// The table in force.
    pub fn current(&self) -> Arc<PlacementTable> {
        self.tables.borrow().clone()
    }

    /// A receiver of the watch's state.
    pub fn state(&self) -> watch::Receiver<WatchState> {
        self.state.clone()
    }

    /// Waits up to `bound` for a table that satisfies `wanted`.
    ///
    /// # Errors
    /// The table in force, after a timeout.
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
    /// The newest incomplete table of another cluster, and the time to accept it.
    pending: Option<(Instant, PlacementTable)>,
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
                warn!(error = %err, "placement watch disconnected; the last table stays in force");
            } else {
                debug!(error = %err, "placement watch cannot connect");
            }
            tokio::time::sleep(backoff.next_delay()).await;
        }
    }

    /// Reads one stream until it breaks, and returns the error.
    async fn follow(&mut self, backoff: &mut Backoff) -> ControlError {
        let query = PlacementQuery {
            fingerprint: self.options.fingerprint.clone(),
            is_observer: self.options.is_observer,
        };
        let mut stream = match self.client.watch_placement_of(&query).await {
            Ok(stream) => stream,
            Err(err) => return err,
        };
        loop {
            let due = self.pending.as_ref().map(|(due, _)| *due);
            let grace = async {
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
                () = grace => {
                    self.accept_pending();
                    continue;
                }
            };
            backoff.reset();
            let refusal = self.accept(table);
            if self.state.borrow().status != WatchStatus::Connected {
                info!(url = %self.client.base_url(), "placement watch connected");
                self.state.send_modify(|state| {
                    state.status = WatchStatus::Connected;
                    state.last_error = None;
                    state.unauthorized = false;
                    state.num_connects += 1;
                });
            }
            // The stream goes on: the control plane may return to a table that fits.
            self.state.send_if_modified(|state| {
                let has_changed = state.last_error != refusal;
                state.last_error = refusal;
                has_changed
            });
        }
    }

    /// Takes a table, or gives the reason, for people, why it does not fit this watch.
    fn accept(&mut self, table: PlacementTable) -> Option<String> {
        if let (Some(own), Some(model)) = (&self.options.fingerprint, &table.model)
            && model.fingerprint != *own
        {
            warn!(found = model.fingerprint, expected = own, "placement of another model refused");
            self.state.send_modify(|state| state.num_other_models += 1);
            return Some(format!(
                "the placement is for the model {} from now on, and this client has {own}: it takes no newer one; \
                 start the client again with the new model",
                model.fingerprint
            ));
        }
        let current = self.tables.borrow().clone();
        if current.cluster_id == table.cluster_id {
            if table.epoch < current.epoch {
                warn!(found = table.epoch, in_force = current.epoch, "older placement refused");
                self.state.send_modify(|state| state.num_stale_tables += 1);
            } else if table.epoch > current.epoch {
                self.publish(table);
            }
        } else if current.is_complete() && !table.is_complete() {
            if self.pending.is_none() {
                warn!(
                    cluster = table.cluster_id,
                    "the control plane has lost its state; the last table stays in force until \
                     the servers have registered again"
                );
            }
            let due = Instant::now() + self.options.new_cluster_grace;
            let due = self.pending.as_ref().map_or(due, |(due, _)| *due);
            self.pending = Some((due, table));
        } else {
            self.publish(table);
        }
        None
    }

    /// Accepts the incomplete table after the grace period.
    fn accept_pending(&mut self) {
        if let Some((_, table)) = self.pending.take() {
            self.publish(table);
        }
    }

    fn publish(&mut self, table: PlacementTable) {
        debug!(epoch = table.epoch, servers = table.servers.len(), "new placement");
        if let (None, Some(model)) = (&self.options.fingerprint, &table.model) {
            // From here on the watch stays with this model, also over an update of the fleet's.
            self.options.fingerprint = Some(model.fingerprint.clone());
        }
        self.pending = None;
        self.tables.send_replace(Arc::new(table));
    }
}
