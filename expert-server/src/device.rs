//! Experts on a GPU: the same service as [`cpu`](crate::cpu), with slots, weights and arithmetic in
//! GPU memory and no host in the path of a token.
//!
//! A client that connects exchanges device slots in the handshake (`p2p_core::bootstrap::DeviceSide`);
//! its kernels then store frames into the server's memory and the server's kernels store answers into
//! its own. The data thread only keeps batches under way, changes tables between them, and counts.
//!
//! A client that dies ends nothing but its own link: the task that watches its connection sets its bit
//! in a mask that running kernels poll, so none of them waits for it, and its slot is unmapped once the
//! batches under way have ended.

mod context;
mod data_thread;
mod error;
mod gather;
mod plan;
mod lru;
mod client_table;
mod store;
mod upload;

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::thread::Thread;

use kernels::gpu::Gpu;
use p2p_core::SpinPolicy;
use protocol::DispatchExpect;
use proxy::DeviceTransports;
use tokio::sync::oneshot;

pub use error::{DeviceError, KernelFault};
pub use crate::config::device::DeviceOptions;
pub(crate) use plan::DevicePlan;
pub use crate::config::observer::{BatchObserver, BatchReport};
pub(crate) use client_table::{ClientSlots, EndedSeat};
pub(crate) use store::DeviceStore;

use crate::config::Limits;
use crate::cpu::{DataError, Inbox, LinkId, run_to_end};
use crate::metrics::ServerMetrics;
use crate::status::{DataStatus, LoadCounters};
use data_thread::Engine;
use client_table::{Seat, SeatBoard};

/// Settings of the data thread of a GPU.
#[derive(Debug)]
pub(crate) struct DeviceConfig {
    /// Bounds on what clients can take.
    pub(crate) limits: Limits,
    /// How long to poll before sleeping between looks.
    pub(crate) spin: SpinPolicy,
    /// Counts tokens by layer and expert in the metrics, not by expert alone.
    pub(crate) metrics_by_layer: bool,
    /// What posts for kernels is told when there will be something to post.
    pub(crate) reached: DeviceTransports,
    /// Told of every batch.
    pub(crate) observer: Option<BatchObserver>,
}

/// A running data thread of a GPU. Dropping it stops the thread.
pub(crate) struct DevicePlane {
    shared: Arc<Shared>,
    board: Arc<SeatBoard>,
    status: Arc<DataStatus>,
    load: Arc<LoadCounters>,
}

/// The way to the thread.
struct Shared {
    inbox: Arc<Inbox<Command>>,
    thread: OnceLock<Thread>,
}

/// What the data thread can be told.
enum Command {
    Attach(Box<Seat>),
    Detach(LinkId),
    Stop,
}

/// How the thread ends: `Ok` after [`DevicePlane::stop`].
type ThreadEnd = oneshot::Receiver<Result<(), DataError>>;

impl DevicePlane {
    /// Starts the thread. With its end every link is closed.
    ///
    /// # Errors
    /// [`DataError`] when the GPU refuses memory, or a thread cannot be started.
    pub(crate) fn start(
        gpu: &Gpu,
        plan: DevicePlan,
        config: DeviceConfig,
        store: Arc<DeviceStore>,
        metrics: ServerMetrics,
    ) -> Result<(Self, ThreadEnd), DataError> {
        let load = LoadCounters::new(plan.num_layers as usize, plan.num_experts as usize);
        let load = Arc::new(load.on(plan.device.to_string()));
        let status = Arc::new(DataStatus::new());
        let inbox = Arc::new(Inbox::new());
        let board = Arc::new(SeatBoard::new(gpu)?);
        let shared = Arc::new(Shared { inbox: Arc::clone(&inbox), thread: OnceLock::new() });
        let engine = Engine::new(
            gpu,
            plan,
            config,
            Arc::clone(&store),
            Arc::clone(&board),
            Arc::clone(&inbox),
            Arc::clone(&status),
            Arc::clone(&load),
            metrics,
        )?;
        let (ended, end) = oneshot::channel();
        let thread_status = Arc::clone(&status);
        let body = move || run_to_end(move || engine.run(), &thread_status, &inbox, ended);
        let thread = std::thread::Builder::new()
            .name("switchyard-gpu".to_owned())
            .spawn(body)
            .map_err(DataError::Start)?;
        // Set once, here.
        let _ = shared.thread.set(thread.thread().clone());
        let wakes = Arc::downgrade(&shared);
        store.on_change(Box::new(move || {
            if let Some(shared) = wakes.upgrade() {
                shared.kick();
            }
        }));
        Ok((Self { shared, board, status, load }, end))
    }

    /// Hands a client's slots to the data thread, with what its frames must say. The receiver gets them
    /// back when the link has ended, for whatever reason; a closed receiver means that the thread is
    /// gone.
    pub(crate) fn attach(
        &self,
        slots: ClientSlots,
        expect: DispatchExpect,
    ) -> (LinkId, oneshot::Receiver<EndedSeat>) {
        let id = self.shared.inbox.next_id();
        let (ended, end) = oneshot::channel();
        self.shared.send(Command::Attach(Box::new(Seat::new(id, slots, expect, ended))));
        (id, end)
    }

    /// Ends a link whose client is gone: running kernels stop waiting for it at once. Without effect on
    /// one that has ended.
    pub(crate) fn detach(&self, id: LinkId) {
        self.board.give_up(id);
        self.shared.send(Command::Detach(id));
    }

    /// Ends every link and the thread.
    pub(crate) fn stop(&self) {
        self.shared.send(Command::Stop);
    }

    pub(crate) fn status(&self) -> &Arc<DataStatus> {
        &self.status
    }

    pub(crate) fn load(&self) -> &Arc<LoadCounters> {
        &self.load
    }
}

impl fmt::Debug for DevicePlane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DevicePlane").field("num_links", &self.status.num_links()).finish()
    }
}

impl Drop for DevicePlane {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn send(&self, command: Command) {
        self.inbox.push(command);
        self.kick();
    }

    fn kick(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }
}
