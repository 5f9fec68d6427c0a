//! The data thread on CPUs. It owns every client's link, and no other thread touches the links.
//!
//! In each round the thread takes the frames that are ready and merges those of one layer into a batch. It
//! computes the batch and publishes one answer per frame, in order. The thread takes no lock, and allocates
//! nothing once its buffers have grown. Links are attached and detached through a queue. Without work the
//! thread sleeps.
//!
//! A frame is copied out of the client's slot and checked before it is used. Its credit goes back before the
//! batch is computed, so that the client can fill the next frame meanwhile.

mod answer;
mod backend;
mod batch;
mod data_thread;
mod link;

use std::sync::Arc;

use p2p_core::device::DeviceSlots;
use p2p_core::{AnyEndpoint, Channel, Kicker, SpinPolicy, Transport, WaitSet};
use protocol::DispatchExpect;
use telemetry::ServerRecorder;
use tokio::sync::oneshot;

pub(crate) use self::backend::CpuBackend;
use self::data_thread::DataThread;
use crate::compute::{ComputePool, ExpertStore, Pinning, pin_current_thread};
use crate::config::Limits;
use crate::error::DataError;
use crate::inbox::{Inbox, LinkId};
use crate::metrics::ServerMetrics;
use crate::plane::{ClosedLink, DataPlane, LinkEnd, ThreadEnd, link_end, run_to_end};
use crate::status::{DataStatus, LoadCounters};

/// Settings of a data thread on CPUs.
#[derive(Debug, Clone)]
pub struct CpuConfig {
    /// Compute threads, the data thread included; 0 takes as many as the process has CPUs.
    pub num_threads: usize,
    /// CPUs of the compute threads, the data thread's first; with an empty list the system chooses.
    pub cpus: Vec<usize>,
    /// Bounds on the resources that clients can use.
    pub limits: Limits,
    /// Time for which the thread polls before it sleeps.
    pub spin: SpinPolicy,
    /// Counts tokens by layer and expert in the metrics, instead of by expert alone.
    pub metrics_by_layer: bool,
    /// Records the times of sampled calls for traces.
    pub recorder: Option<ServerRecorder>,
}

/// The handle to a data thread on CPUs. Dropping it stops the thread.
#[derive(Debug)]
pub struct CpuPlane<E: Transport> {
    inbox: Arc<Inbox<Command<E>>>,
    kicker: Kicker,
    status: Arc<DataStatus>,
    load: Arc<LoadCounters>,
}

impl<E: Transport + 'static> CpuPlane<E>
where
    E::RemoteKey: 'static,
{
    /// Starts the thread, and blocks until it runs on its CPU. The receiver gets the thread's end: `Ok` after
    /// [`stop`](Self::stop), or an error when the thread ended on its own. Every link is closed then.
    ///
    /// # Errors
    /// [`DataError`] when a thread cannot be started or pinned.
    pub fn start(
        store: Arc<ExpertStore>,
        config: CpuConfig,
        metrics: ServerMetrics,
    ) -> Result<(Self, ThreadEnd), DataError> {
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
        let data_thread = DataThread::new(
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
            run_to_end(move || data_thread.run(), &thread_status, &thread_inbox, ended);
        };
        std::thread::Builder::new()
            .name("switchyard-data".to_owned())
            .spawn(body)
            .map_err(DataError::Start)?;
        // The thread answers once, right after it starts.
        is_pinned.recv().unwrap_or(Ok(()))?;
        Ok((Self { inbox, kicker, status, load }, end))
    }

    /// Hands a new channel to the data thread, with the properties that its frames must have. The receiver gets
    /// the channel back when the link has closed, for any reason. A closed receiver means that the thread has
    /// ended.
    pub fn attach(
        &self,
        channel: Channel<E>,
        expect: DispatchExpect,
    ) -> (LinkId, oneshot::Receiver<ClosedLink<Channel<E>>>) {
        let id = self.inbox.next_id();
        let (closed, end) = oneshot::channel();
        self.send(Command::Attach { id, channel, expect, closed });
        (id, end)
    }

    /// Closes the link of a client that is gone. Has no effect on a closed link.
    pub fn detach(&self, id: LinkId) {
        self.send(Command::Detach { id });
    }

    /// Closes every link and ends the thread.
    pub fn stop(&self) {
        self.send(Command::Stop);
    }

    fn send(&self, command: Command<E>) {
        self.inbox.push(command);
        self.kicker.kick();
    }
}

impl DataPlane for CpuPlane<AnyEndpoint> {
    fn attach(
        &self,
        channel: Channel<AnyEndpoint>,
        device: Option<DeviceSlots>,
        expect: DispatchExpect,
    ) -> Option<(LinkId, LinkEnd)> {
        if device.is_some() {
            return None;
        }
        let (id, end) = Self::attach(self, channel, expect);
        Some((id, link_end(end)))
    }

    fn detach(&self, id: LinkId) {
        Self::detach(self, id);
    }

    fn stop(&self) {
        Self::stop(self);
    }

    fn status(&self) -> &Arc<DataStatus> {
        &self.status
    }

    fn load(&self) -> &Arc<LoadCounters> {
        &self.load
    }
}

impl<E: Transport> Drop for CpuPlane<E> {
    fn drop(&mut self) {
        self.inbox.push(Command::Stop);
        self.kicker.kick();
    }
}

/// Commands to the data thread.
enum Command<E: Transport> {
    Attach {
        id: LinkId,
        channel: Channel<E>,
        expect: DispatchExpect,
        closed: oneshot::Sender<ClosedLink<Channel<E>>>,
    },
    Detach {
        id: LinkId,
    },
    Stop,
}
