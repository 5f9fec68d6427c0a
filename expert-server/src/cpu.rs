//! The data thread: it owns every client's link, and is the only one that touches them.
//!
//! Each round it takes the frames that are ready, merges those of one layer into a batch, computes
//! it and publishes one answer per frame, in order. It takes no lock, and allocates nothing once its
//! buffers have grown. Links come and go through a queue; with nothing to do it sleeps.
//!
//! A frame is copied out of the client's slot, checked, and only then used; its credit goes back
//! before the batch is computed, so that the client can fill the next frame meanwhile.

mod answer;
mod batch;
mod data_thread;
mod link;

use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use kernels::abi::ErrorWord;
use kernels::gpu::GpuError;
use p2p_core::{Channel, Endpoint, Kicker, SpinPolicy, WaitSet};
use protocol::DispatchExpect;
use tokio::sync::oneshot;

use crate::compute::{ComputePool, ExpertStore, Pinning, PoolError, pin_current_thread};
use crate::config::Limits;
use crate::metrics::{DropReason, ServerMetrics};
use crate::status::{DataStatus, LoadCounters};
use data_thread::Engine;
pub(crate) use data_thread::ExpertTokens;
pub(crate) use crate::inbox::Inbox;

/// Settings of a data thread.
#[derive(Debug, Clone)]
pub struct DataConfig {
    /// Compute threads, the data thread included; 0 takes as many as the process has CPUs.
    pub num_threads: usize,
    /// CPUs of the compute threads, the data thread's first; empty leaves them to the system.
    pub cpus: Vec<usize>,
    /// Bounds on what clients can take.
    pub limits: Limits,
    /// How long to poll before sleeping.
    pub spin: SpinPolicy,
    /// Counts tokens by layer and expert in the metrics, not by expert alone.
    pub metrics_by_layer: bool,
}

/// A link that has ended. The receiver drops the channel, which unmaps its slots: the data thread
/// has better things to do.
pub struct EndedLink<E: Endpoint> {
    /// Why.
    pub reason: DropReason,
    /// The channel, which nobody uses any more.
    pub channel: Channel<E>,
}

impl<E: Endpoint> fmt::Debug for EndedLink<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EndedLink").field("reason", &self.reason).finish_non_exhaustive()
    }
}

/// Number of a link, never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LinkId(pub(crate) u64);

impl LinkId {
    pub(crate) const fn number(self) -> u64 {
        self.0
    }
}

impl fmt::Display for LinkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The data thread could not start, or ended on its own.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The system refused what the thread needs.
    #[error("cannot start the data thread: {0}")]
    Start(#[source] io::Error),
    /// The compute threads could not be started.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// A bug. The thread is gone, and with it every link.
    #[error("the data thread panicked: {message}")]
    Panicked {
        /// What it said.
        message: String,
    },
    /// Waiting failed.
    #[error("the data thread cannot wait for its clients: {0}")]
    Wait(#[source] io::Error),
    /// The GPU failed, or did not finish a batch. Its memory is lost with the process.
    #[error("the data thread lost its GPU: {0}")]
    Gpu(#[from] GpuError),
    /// A kernel found that the GPU, or what describes its copies, is out of order, and ended itself so that no wrong
    /// answer is sent. Its memory is lost with the process.
    #[error("the data thread lost its GPU: {word}; then {source}")]
    Trapped {
        /// What the kernel waited for.
        word: ErrorWord,
        /// What the GPU said of it.
        source: GpuError,
    },
}

/// A running data thread. Dropping it stops the thread.
#[derive(Debug)]
pub struct DataPlane<E: Endpoint> {
    inbox: Arc<Inbox<Command<E>>>,
    kicker: Kicker,
    status: Arc<DataStatus>,
    load: Arc<LoadCounters>,
}

impl<E: Endpoint + 'static> DataPlane<E>
where
    E::RemoteKey: 'static,
{
    /// Starts the thread. The receiver gets its end: `Ok` after [`stop`](Self::stop), an error when
    /// it ended on its own, and then every link is closed.
    ///
    /// # Errors
    /// [`DataError`] when a thread cannot be started or pinned.
    #[allow(clippy::type_complexity, reason = "a handle and the channel of its end")]
    pub fn start(
        store: Arc<ExpertStore>,
        config: DataConfig,
        metrics: ServerMetrics,
    ) -> Result<(Self, oneshot::Receiver<Result<(), DataError>>), DataError> {
        let model = store.checkpoint().config();
        let load =
            Arc::new(LoadCounters::new(model.num_layers as usize, model.num_experts as usize));
        let status = Arc::new(DataStatus::new());
        let inbox = Arc::new(Inbox::new());
        let wait = WaitSet::new().map_err(DataError::Start)?;
        let kicker = wait.kicker();
        let pinning = (!config.cpus.is_empty()).then(|| Pinning { cpus: config.cpus.clone() });
        let pool = ComputePool::new(config.num_threads, pinning)?;
        let own_cpu = config.cpus.first().copied();
        let engine = Engine::new(
            store,
            config,
            metrics,
            pool,
            wait,
            Arc::clone(&inbox),
            Arc::clone(&status),
            Arc::clone(&load),
        );
        let (ended, end) = oneshot::channel();
        let (pinned, is_pinned) = std::sync::mpsc::sync_channel(1);
        let thread_status = Arc::clone(&status);
        let thread_inbox = Arc::clone(&inbox);
        let body = move || {
            let pinning = own_cpu.map_or(Ok(()), pin_current_thread);
            let is_ok = pinning.is_ok();
            if pinned.send(pinning).is_err() || !is_ok {
                return;
            }
            run_to_end(move || engine.run(), &thread_status, &thread_inbox, ended);
        };
        std::thread::Builder::new()
            .name("switchyard-data".to_owned())
            .spawn(body)
            .map_err(DataError::Start)?;
        // The thread answers once, right after it starts.
        is_pinned.recv().unwrap_or(Ok(()))?;
        Ok((Self { inbox, kicker, status, load }, end))
    }

    /// Hands a fresh channel to the data thread, with what its frames must look like. The receiver gets the channel back when the link
    /// has ended, for whatever reason; a closed receiver means that the thread is gone.
    pub fn attach(
        &self,
        channel: Channel<E>,
        expect: DispatchExpect,
    ) -> (LinkId, oneshot::Receiver<EndedLink<E>>) {
        let id = self.inbox.next_id();
        let (ended, end) = oneshot::channel();
        self.send(Command::Attach { id, channel, expect, ended });
        (id, end)
    }

    /// Ends a link whose client is gone. Without effect on one that has ended.
    pub fn detach(&self, id: LinkId) {
        self.send(Command::Detach { id });
    }

    /// Ends every link and the thread.
    pub fn stop(&self) {
        self.send(Command::Stop);
    }

    pub(crate) fn status(&self) -> &Arc<DataStatus> {
        &self.status
    }

    pub(crate) fn load(&self) -> &Arc<LoadCounters> {
        &self.load
    }

    fn send(&self, command: Command<E>) {
        self.inbox.push(command);
        self.kicker.kick();
    }
}

impl<E: Endpoint> Drop for DataPlane<E> {
    fn drop(&mut self) {
        self.inbox.push(Command::Stop);
        self.kicker.kick();
    }
}

/// What the data thread can be told.
enum Command<E: Endpoint> {
    Attach {
        id: LinkId,
        channel: Channel<E>,
        expect: DispatchExpect,
        ended: oneshot::Sender<EndedLink<E>>,
    },
    Detach {
        id: LinkId,
    },
    Stop,
}

/// The body of a data thread: runs it, and tells everybody of its end.
///
/// The engine moves in and is dropped on the way out, and with it every link: whoever waits for an
/// answer then sees its connection close, not silence.
pub(crate) fn run_to_end<C>(
    run: impl FnOnce() -> Result<(), DataError>,
    status: &DataStatus,
    inbox: &Inbox<C>,
    ended: oneshot::Sender<Result<(), DataError>>,
) {
    let result = catch_unwind(AssertUnwindSafe(run));
    status.set_over();
    inbox.close();
    let result = result.unwrap_or_else(|panic| {
        let message = panic_message(panic.as_ref());
        tracing::error!(%message, "the data thread panicked");
        Err(DataError::Panicked { message })
    });
    // Nobody may be left to hear it.
    let _ = ended.send(result);
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "?".to_owned())
}
