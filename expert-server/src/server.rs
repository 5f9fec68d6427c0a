//! A whole server: checkpoint, listener, data thread, lease, metrics.

mod start;
mod supervision;
mod weights;

use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use checkpoint::Fingerprint;
use control_api::{Assignment, LeaseKeeper};
use p2p_core::bootstrap::ListenerStats;
use tokio::sync::watch;

use self::supervision::End;
use crate::compute::{LoadError, LoadProgress};
use crate::config::{Placement, ServerConfig};
use crate::error::{ServerError, StartError};
use crate::experts::Experts;
use crate::members;
use crate::metrics::ServerMetrics;
use crate::plane::DataPlane;
use crate::status::Health;

/// Starts servers.
#[derive(Debug)]
pub struct ExpertServer;

impl ExpertServer {
    /// Opens the checkpoint, listens, joins the control plane if there is one, loads the experts and serves.
    /// Returns when the server can answer clients. Calls `progress` for every loaded expert, on another thread.
    /// Needs a tokio runtime with I/O and time. Cancelling the future stops the server.
    ///
    /// # Errors
    /// [`StartError`]; all that was started has ended then.
    ///
    /// # Examples
    /// ```no_run
    /// use switchyard_expert_server::{ExpertSelection, ExpertServer, Placement, ServerConfig};
    ///
    /// # async fn start() -> Result<(), Box<dyn std::error::Error>> {
    /// let placement = Placement::Static(ExpertSelection::All);
    /// let config = ServerConfig::new("data/tiny-moe", "server-0", placement);
    /// let server = ExpertServer::start(config, |_| {}).await?;
    /// println!("clients connect to {}", server.data_addr());
    /// server.drain().await;
    /// server.wait().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn start(
        config: ServerConfig,
        progress: impl FnMut(LoadProgress) + Send + 'static,
    ) -> Result<RunningServer, StartError> {
        Self::start_with_registry(config, prometheus::Registry::new(), progress).await
    }

    /// Like [`start`](Self::start), with the metrics in the caller's registry.
    ///
    /// # Errors
    /// [`StartError`]; all that was started has ended then.
    pub async fn start_with_registry(
        config: ServerConfig,
        registry: prometheus::Registry,
        progress: impl FnMut(LoadProgress) + Send + 'static,
    ) -> Result<RunningServer, StartError> {
        start::start(config, registry, progress).await
    }
}

/// A server that is running. Dropping it stops the server without leaving the control plane.
pub struct RunningServer {
    config: ServerConfig,
    data_addr: SocketAddr,
    metrics_addr: Option<SocketAddr>,
    full_digest: Option<Fingerprint>,
    health: Arc<Health>,
    store: Arc<dyn Experts>,
    keeper: Option<Arc<LeaseKeeper>>,
    data: Arc<dyn DataPlane>,
    stop: watch::Sender<bool>,
    end: watch::Receiver<Option<End>>,
}

impl RunningServer {
    /// Address that clients connect to.
    #[must_use]
    pub const fn data_addr(&self) -> SocketAddr {
        self.data_addr
    }

    /// Address of the metrics, if the server serves any.
    #[must_use]
    pub const fn metrics_addr(&self) -> Option<SocketAddr> {
        self.metrics_addr
    }

    /// The digest of all bytes of the checkpoint's experts, if the server has read them, see [`ServerConfig::verify`].
    #[must_use]
    pub const fn full_digest(&self) -> Option<Fingerprint> {
        self.full_digest
    }

    /// Name of the server.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// The metrics. [`render_metrics`](Self::render_metrics) brings some of them up to date.
    #[must_use]
    pub fn metrics(&self) -> &ServerMetrics {
        &self.health.metrics
    }

    /// The answer to `GET /metrics`.
    ///
    /// # Errors
    /// [`prometheus::Error`] when a metric cannot be encoded.
    pub fn render_metrics(&self) -> Result<String, prometheus::Error> {
        self.health.render_metrics(false)
    }

    /// Counts of the handshakes with clients.
    #[must_use]
    pub fn handshakes(&self) -> &ListenerStats {
        &self.health.handshakes
    }

    /// The loaded experts.
    #[must_use]
    pub fn holds(&self) -> Assignment {
        members::holds(&*self.store)
    }

    /// Loads one more expert and puts it into service, as an assignment of the control plane does. Has no effect
    /// if the expert is loaded. Blocks while it reads the weights, so call it on a thread that may block.
    ///
    /// # Errors
    /// [`LoadError`]; the server then goes on with the experts it has.
    pub fn load_expert(&self, layer: u32, expert: u32) -> Result<(), LoadError> {
        members::load_one(&*self.store, &self.health.metrics, layer, expert)
    }

    /// Bytes of the loaded weights.
    #[must_use]
    pub fn expert_bytes(&self) -> u64 {
        self.store.loaded_bytes()
    }

    /// Number of connected clients.
    #[must_use]
    pub fn num_links(&self) -> usize {
        self.data.status().num_links()
    }

    /// Returns true while the server is out of the placement for a drain, by this process or by an operator.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.health.is_draining.load(Ordering::Relaxed)
    }

    /// Checks whether clients should connect to this server, as `/readyz` does.
    ///
    /// # Errors
    /// The reason why not.
    pub fn ready(&self) -> Result<(), String> {
        self.health.ready()
    }

    /// Waits until the control plane's placement includes the server. Returns at once without a control plane.
    ///
    /// # Errors
    /// [`StartError::Join`] when that takes longer than `bound` or has become impossible.
    pub async fn serving(&self, bound: Duration) -> Result<(), StartError> {
        let (Some(keeper), Placement::ControlPlane { url, .. }) =
            (&self.keeper, &self.config.placement)
        else {
            return Ok(());
        };
        let failed = |source| StartError::Join { url: url.clone(), source };
        keeper.serving(bound).await.map_err(failed)
    }

    /// Leaves the placement, refuses new clients, and ends the server once its clients are gone or idle. Takes
    /// at most [`ServerConfig::drain_timeout`], then up to 12 s to shut down. Call it on SIGTERM.
    pub async fn drain(&self) {
        let deadline = Instant::now() + self.config.drain_timeout;
        self.health.is_draining.store(true, Ordering::Relaxed);
        tracing::info!(name = self.config.name, "draining");
        if let Some(keeper) = &self.keeper {
            let bound = self.config.drain_timeout.min(CONTROL_TIMEOUT);
            if let Err(error) = keeper.drain(bound).await {
                tracing::warn!(%error, "draining without the control plane's confirmation");
            }
        }
        // An idle client counts as idle only after it has had time to receive the new placement.
        let begin = Instant::now();
        loop {
            let data = self.data.status();
            let is_idle = data.idle_for().min(begin.elapsed()) >= self.config.drain_idle;
            let keeps_serving =
                self.keeper.as_ref().is_some_and(|keeper| keeper.state().borrow().keeps_serving);
            if (data.num_links() == 0 || is_idle) && !keeps_serving || self.end.borrow().is_some() {
                break;
            }
            if Instant::now() >= deadline {
                tracing::warn!(links = data.num_links(), "drain timeout: clients are still busy");
                break;
            }
            tokio::time::sleep(DRAIN_POLL_PERIOD).await;
        }
        self.shutdown().await;
    }

    /// Ends the server at once: leaves the control plane (up to 2 s) and closes all connections (up to 10 s).
    pub async fn shutdown(&self) {
        self.health.is_draining.store(true, Ordering::Relaxed);
        if let Some(keeper) = &self.keeper
            && let Err(error) = keeper.leave(CONTROL_TIMEOUT).await
        {
            tracing::warn!(%error, "left without telling the control plane; the lease will expire");
        }
        self.halt();
        let mut end = self.end.clone();
        // The data thread ends within a batch. The bound keeps a stuck one from blocking the caller for ever.
        let _ = tokio::time::timeout(STOP_TIMEOUT, end.wait_for(Option::is_some)).await;
    }

    /// Waits until the server has ended. Cancel safe.
    ///
    /// # Errors
    /// [`ServerError`] when the server ended on its own; only the first caller gets it.
    pub async fn wait(&self) -> Result<(), ServerError> {
        let mut end = self.end.clone();
        let Ok(end) = end.wait_for(Option::is_some).await.map(|end| end.clone()) else {
            return Ok(());
        };
        let Some(end) = end else { return Ok(()) };
        let taken = end.lock().unwrap_or_else(PoisonError::into_inner).take();
        taken.unwrap_or(Ok(()))
    }

    fn halt(&self) {
        // An error means that no task is left to stop.
        let _ = self.stop.send(true);
        self.data.stop();
    }
}

impl fmt::Debug for RunningServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunningServer")
            .field("name", &self.config.name)
            .field("data_addr", &self.data_addr)
            .field("metrics_addr", &self.metrics_addr)
            .finish_non_exhaustive()
    }
}

impl Drop for RunningServer {
    fn drop(&mut self) {
        self.halt();
    }
}

/// Longest wait for the control plane when leaving, so that the server ends without its answer, too.
const CONTROL_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest wait for the data thread to end.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Time between two checks of a drain.
const DRAIN_POLL_PERIOD: Duration = Duration::from_millis(20);
