//! The data thread on a GPU. It offers the service of [`cpu`](crate::cpu), with slots, weights and arithmetic in
//! GPU memory. No token passes through the host.
//!
//! Client and server exchange device slots in the handshake. The client's kernels then store frames into the
//! server's memory, and the server's kernels store answers into the client's. The data thread keeps batches in
//! flight, changes tables between batches, and counts.
//!
//! The death of a client ends only its own link. The task that watches the connection sets the client's bit in a
//! mask that running kernels poll, so no kernel waits for the client any more. Its slot is unmapped once the
//! batches in flight have ended.

mod abort;
mod backend;
mod chain;
mod client;
mod client_table;
mod context;
mod data_thread;
mod fault;
mod gather;
mod late_frames;
mod lru;
mod plan;
mod slots;
mod store;
mod upload;

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::thread::Thread;

use kernels::gpu::Gpu;
use p2p_core::device::DeviceSlots;
use p2p_core::{AnyEndpoint, Channel, SpinPolicy};
use protocol::DispatchExpect;
use proxy::DeviceTransports;
use telemetry::ServerRecorder;
use tokio::sync::oneshot;

pub(crate) use self::backend::{DeviceBackend, OpeningGpu};
pub use crate::config::device::DeviceOptions;
pub use crate::config::observer::{BatchObserver, BatchReport, BatchTimeline};
pub use crate::error::device::DeviceError;

use self::abort::AbortMask;
use self::client::Client;
use self::data_thread::DataThread;
use self::plan::DevicePlan;
use self::slots::ClientSlots;
use self::store::DeviceStore;
use crate::config::Limits;
use crate::error::DataError;
use crate::inbox::{Inbox, LinkId};
use crate::metrics::ServerMetrics;
use crate::plane::{DataPlane, LinkEnd, ThreadEnd, link_end, run_to_end};
use crate::status::{DataStatus, LoadCounters};

/// Settings of the data thread on a GPU.
#[derive(Debug)]
struct DeviceConfig {
    /// Bounds on the resources that clients can use.
    limits: Limits,
    /// Time without work after which the thread sleeps between two polls.
    spin: SpinPolicy,
    /// Counts tokens by layer and expert in the metrics, instead of by expert alone.
    metrics_by_layer: bool,
    /// The proxy's threads. The data thread announces answers to them.
    transports: DeviceTransports,
    observer: Option<BatchObserver>,
    /// Records the times of sampled frames for traces.
    recorder: Option<ServerRecorder>,
}

/// The handle to a data thread on a GPU. Dropping it stops the thread.
struct DevicePlane {
    mailbox: Arc<Mailbox>,
    aborts: Arc<AbortMask>,
    status: Arc<DataStatus>,
    load: Arc<LoadCounters>,
}

/// Delivers commands to the thread and wakes it.
struct Mailbox {
    inbox: Arc<Inbox<Command>>,
    thread: OnceLock<Thread>,
}

/// Commands to the data thread.
enum Command {
    Attach(Box<Client>),
    Detach(LinkId),
    Stop,
}

impl DevicePlane {
    /// Starts the thread. Every link closes when it ends.
    ///
    /// # Errors
    /// [`DataError`] when the GPU refuses memory, or the thread cannot be started.
    fn start(
        gpu: &Gpu,
        plan: DevicePlan,
        config: DeviceConfig,
        store: Arc<DeviceStore>,
        metrics: ServerMetrics,
    ) -> Result<(Self, ThreadEnd), DataError> {
        let load = LoadCounters::new(plan.num_layers as usize, plan.num_experts as usize);
        let load = Arc::new(load.with_device(plan.device.to_string()));
        let status = Arc::new(DataStatus::new());
        let inbox = Arc::new(Inbox::new());
        let aborts = Arc::new(AbortMask::new(gpu)?);
        let mailbox = Arc::new(Mailbox { inbox: Arc::clone(&inbox), thread: OnceLock::new() });
        let data_thread = DataThread::new(
            gpu,
            plan,
            config,
            Arc::clone(&store),
            Arc::clone(&aborts),
            Arc::clone(&inbox),
            Arc::clone(&status),
            Arc::clone(&load),
            metrics,
        )?;
        let (ended, end) = oneshot::channel();
        let thread_status = Arc::clone(&status);
        let body = move || run_to_end(move || data_thread.run(), &thread_status, &inbox, ended);
        let thread = std::thread::Builder::new()
            .name("switchyard-gpu".to_owned())
            .spawn(body)
            .map_err(DataError::Start)?;
        // Cannot be set yet: this is the only place that sets it.
        let _ = mailbox.thread.set(thread.thread().clone());
        let weak = Arc::downgrade(&mailbox);
        store.on_change(Box::new(move || {
            if let Some(mailbox) = weak.upgrade() {
                mailbox.wake();
            }
        }));
        Ok((Self { mailbox, aborts, status, load }, end))
    }
}

impl DataPlane for DevicePlane {
    fn attach(
        &self,
        channel: Channel<AnyEndpoint>,
        device: Option<DeviceSlots>,
        expect: DispatchExpect,
    ) -> Option<(LinkId, LinkEnd)> {
        let slots = ClientSlots::new(device?, channel)?;
        let id = self.mailbox.inbox.next_id();
        let (closed, end) = oneshot::channel();
        self.mailbox.send(Command::Attach(Box::new(Client::new(id, slots, expect, closed))));
        Some((id, link_end(end)))
    }

    /// Running kernels stop waiting for the client at once.
    fn detach(&self, id: LinkId) {
        self.aborts.abort(id);
        self.mailbox.send(Command::Detach(id));
    }

    fn stop(&self) {
        self.mailbox.send(Command::Stop);
    }

    fn status(&self) -> &Arc<DataStatus> {
        &self.status
    }

    fn load(&self) -> &Arc<LoadCounters> {
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

impl Mailbox {
    fn send(&self, command: Command) {
        self.inbox.push(command);
        self.wake();
    }

    fn wake(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }
}
