//! The loop of the data thread on a GPU.
//!
//! The thread keeps batches in flight, and no frame waits for it. Each batch is one recorded graph, which
//! waits for frames, computes them and answers. While a batch computes, clients store the next frames, and
//! the batch that takes them is already queued. So the GPU never waits for this thread. All batches are on
//! one stream. A reception on a stream of its own would save a few microseconds, but take multiprocessors
//! from the products: a fifth of the speed on an H200.
//!
//! Tables that kernels read change only between batches. The thread waits until the batches in flight have ended,
//! changes the tables, and launches again. Without frames that wait is at most the wait of a batch for a frame.

mod bounds;
mod clients;
mod counting;
mod faults;
mod memory;

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kernels::abi::ErrorWord;
use kernels::gpu::{DeviceName, Gpu, GpuError, Stream};
use kernels::starts::BUCKETS;

use self::bounds::BATCH_LIMIT;
use self::memory::Memory;
use super::abort::AbortMask;
use super::chain::Chain;
use super::client::Client;
use super::client_table::ClientTable;
use super::context::{GraphKey, Scratch};
use super::fault::KernelFault;
use super::gather::GatherPolicy;
use super::plan::DevicePlan;
use super::store::{DeviceStore, ExpertTables};
use super::{Command, DeviceConfig};
use crate::error::DataError;
use crate::inbox::Inbox;
use crate::metrics::{DropReason, ExpertTokenCounters, ServerMetrics};
use crate::status::{DataStatus, LoadCounters};

pub(super) struct DataThread {
    gpu: Gpu,
    plan: DevicePlan,
    config: DeviceConfig,
    store: Arc<DeviceStore>,
    tables: Arc<ExpertTables>,
    chains: Vec<Chain>,
    /// The stream of all batches.
    stream: Stream,
    last_launched: Option<usize>,
    memory: ManuallyDrop<Memory>,
    /// The stream of everything else.
    control: Stream,
    clients: ClientTable,
    aborts: Arc<AbortMask>,
    /// Clients that enter the table before the next batch.
    new_clients: Vec<Client>,
    inbox: Arc<Inbox<Command>>,
    status: Arc<DataStatus>,
    load: Arc<LoadCounters>,
    metrics: ServerMetrics,
    expert_tokens: ExpertTokenCounters,
    expert_begin: Vec<u32>,
    recent_rows: [u32; NUM_RECENT],
    num_batches: usize,
    /// Batches that have ended, by the kernels' count.
    num_ended: u64,
    /// True if a batch computed at the time of the last answer of the GPU.
    is_computing: bool,
    /// True if a copy of the GPU's count of batches was requested.
    has_requested: bool,
    gather_policy: GatherPolicy,
    num_refused: u64,
    /// True if kernels reported an error that is read between batches.
    has_fault: bool,
    /// Begin of the time in which a refused frame, which was counted, keeps kernels from reporting other errors.
    refusal_since: Option<Instant>,
    /// Time of the last log line about a late frame.
    late_logged_at: Option<Instant>,
    /// Late frames since then that were not logged.
    num_unlogged: u64,
    last_work: Instant,
    last_progress: Instant,
    /// Time of the last end of a batch.
    last_ended: Instant,
    /// Time of the stop command.
    stopped_at: Option<Instant>,
}

impl DataThread {
    #[allow(clippy::too_many_arguments, reason = "all parts of the thread, assembled once")]
    pub(super) fn new(
        gpu: &Gpu,
        plan: DevicePlan,
        config: DeviceConfig,
        store: Arc<DeviceStore>,
        aborts: Arc<AbortMask>,
        inbox: Arc<Inbox<Command>>,
        status: Arc<DataStatus>,
        load: Arc<LoadCounters>,
        metrics: ServerMetrics,
    ) -> Result<Self, GpuError> {
        let scratch = Arc::new(Scratch::new(gpu, &plan)?);
        let chain = |_| Chain::new(gpu, &plan, &scratch);
        let chains = (0..plan.num_chains).map(chain).collect::<Result<_, _>>()?;
        let num_layers = config.metrics_by_layer.then_some(plan.num_layers);
        let now = Instant::now();
        Ok(Self {
            chains,
            stream: gpu.stream()?,
            last_launched: None,
            memory: ManuallyDrop::new(Memory::new(gpu, &plan)?),
            control: gpu.stream()?,
            clients: ClientTable::new(gpu, &plan.geometry)?,
            aborts,
            new_clients: Vec::new(),
            expert_tokens: ExpertTokenCounters::new(&metrics, num_layers, plan.num_experts),
            // Older than any other version, so that the store's tables are put into service first.
            tables: Arc::new(ExpertTables { version: 0, layers: Vec::new() }),
            gpu: gpu.clone(),
            plan,
            config,
            store,
            inbox,
            status,
            load,
            metrics,
            expert_begin: Vec::with_capacity(plan.num_experts as usize + 1),
            recent_rows: [0; NUM_RECENT],
            num_batches: 0,
            num_ended: 0,
            is_computing: false,
            has_requested: false,
            gather_policy: GatherPolicy::new(&plan.options),
            num_refused: 0,
            has_fault: false,
            refusal_since: None,
            late_logged_at: None,
            num_unlogged: 0,
            last_work: now,
            last_progress: now,
            last_ended: now,
            stopped_at: None,
        })
    }

    /// Serves until a stop command.
    pub(super) fn run(mut self) -> Result<(), DataError> {
        let ended = self.serve();
        ended.map_err(|error| explain(error, self.chains.iter().find_map(Chain::trapped)))
    }

    fn serve(&mut self) -> Result<(), DataError> {
        loop {
            self.status.beat(Instant::now());
            self.apply_commands();
            if self.stopped_at.is_some() {
                break;
            }
            if self.has_changes() {
                self.apply_changes()?;
            }
            if self.clients.num_entries() == 0 {
                self.sleep();
                continue;
            }
            self.launch()?;
            self.poll()?;
        }
        self.drain()?;
        self.clients.iter_mut().for_each(|client| client.close_with(DropReason::Shutdown));
        self.remove_closed_clients();
        Ok(())
    }

    /// Takes commands from the inbox. Their changes are applied between two batches.
    fn apply_commands(&mut self) {
        while let Some(command) = self.inbox.pop() {
            match command {
                Command::Attach(client) => self.new_clients.push(*client),
                Command::Detach(id) => {
                    for client in self.new_clients.iter_mut().chain(self.clients.iter_mut()) {
                        if client.id == id {
                            client.close_with(DropReason::PeerClosed);
                        }
                    }
                }
                Command::Stop => _ = self.stopped_at.get_or_insert_with(Instant::now),
            }
        }
    }

    fn has_changes(&self) -> bool {
        !self.new_clients.is_empty()
            || self.has_fault
            || self.refusal_since.is_some_and(|since| since.elapsed() >= REFUSAL_PERIOD)
            || self.clients.has_closing()
            || self.store.tables().version != self.tables.version
    }

    /// Launches batches in every chain without any.
    fn launch(&mut self) -> Result<(), DataError> {
        let mut key = GraphKey {
            num_clients: self.clients.num_entries(),
            num_local_experts: self.num_local_experts(),
            bucket_rows: self.bucket_rows(),
            times_experts: 0,
        };
        let tables = self.memory.shared_tables(&self.aborts, self.store.weights_dtype());
        for turn in 0..self.chains.len() {
            // In turn, so that they alternate also for batches of the same duration.
            let idx = self.last_launched.map_or(0, |last| last + 1 + turn) % self.chains.len();
            if self.chains[idx].launched_at.is_some() {
                continue;
            }
            let streams = (&self.gpu, &self.stream, &self.control);
            let gather = self.gather_policy.next(self.clients.occupied());
            // Batches are launched all the time. The proxy's threads may sleep unless there was work lately.
            if self.last_work.elapsed() < PROXY_AWAKE {
                self.config.transports.expect_work();
            }
            let chain = &mut self.chains[idx];
            key.times_experts = chain.times_experts(self.plan.options.experts_timed_every);
            let launched = chain.launch(streams, &self.plan, &tables, key, gather)?;
            self.last_launched = Some(idx);
            if let Some(record_time) = launched {
                self.metrics.graph_seconds.observe(record_time.as_secs_f64());
            }
        }
        Ok(())
    }

    /// Polls the batches in flight until one ends, but not for long.
    fn poll(&mut self) -> Result<(), DataError> {
        for _ in 0..POLLS_PER_ROUND {
            if self.collect_ended()? || !self.inbox.is_empty() {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        self.check_stream()?;
        let now = Instant::now();
        self.show_progress(now)?;
        self.check_bound(now)?;
        if now - self.last_work > self.config.spin.spin {
            thread::park_timeout(PAUSE);
        }
        Ok(())
    }

    /// Waits until no batch is in flight.
    fn drain(&mut self) -> Result<(), DataError> {
        while self.chains.iter().any(|chain| chain.launched_at.is_some()) {
            self.chains.iter().for_each(Chain::hurry);
            if self.collect_ended()? {
                continue;
            }
            // A client that disconnects meanwhile is aborted, and a stop command bounds all waits.
            self.apply_commands();
            let now = Instant::now();
            self.status.beat(now);
            self.check_stream()?;
            self.show_progress(now)?;
            self.check_bound(now)?;
            thread::sleep(PAUSE);
        }
        self.control.wait(Instant::now() + BATCH_LIMIT)?;
        Ok(())
    }

    /// Returns the error of a kernel that failed.
    fn check_stream(&self) -> Result<(), DataError> {
        self.stream.is_done()?;
        Ok(())
    }

    /// Counts the batches that have ended. Returns true if there was one.
    fn collect_ended(&mut self) -> Result<bool, DataError> {
        let mut any = false;
        for idx in 0..self.chains.len() {
            while let Some(batch) = self.chains[idx].take_ended() {
                self.last_ended = Instant::now();
                self.collect(idx, batch)?;
                any = true;
            }
        }
        Ok(any)
    }

    /// Counts batch `of_chain` of chain `idx`, which has ended.
    fn collect(&mut self, idx: usize, of_chain: usize) -> Result<(), DataError> {
        let context = self.chains[idx].batch(of_chain);
        let batch = context.batch();
        let state = context.state_hint(&self.plan);
        self.num_ended = self.num_ended.max(state.num_batches);
        match KernelFault::of(&state.error) {
            None => {}
            // Counted below. Batches go on, because a client can have many refused frames per second.
            Some(KernelFault::Refused { .. }) => {
                self.refusal_since.get_or_insert_with(Instant::now);
            }
            Some(_) => self.has_fault = true,
        }
        self.count_refusals(&state);
        let context = self.chains[idx].batch(of_chain);
        let timeline = self.chains[idx].timeline(of_chain, self.last_ended);
        if batch.clients == 0 {
            // A GPU in software shares the cores of this host, so an idle one leaves them to others.
            if matches!(self.plan.device, DeviceName::Emulated(_)) && self.inbox.is_empty() {
                thread::park_timeout(EMULATED_PAUSE);
            }
            return Ok(());
        }
        let now = Instant::now();
        self.last_work = now;
        self.status.frame_taken(now);
        let (compute, experts_time) = (context.compute_time(), context.experts_time()?);
        let num_local_experts = self.num_local_experts() as usize;
        context.expert_begin(&self.plan, num_local_experts, &mut self.expert_begin);
        self.recent_rows[self.num_batches % NUM_RECENT] = batch.num_rows;
        self.num_batches += 1;
        self.gather_policy.record(batch.clients, batch.expected, compute);
        let gather = self.gather_policy.next(self.clients.occupied());
        self.chains.iter().for_each(|chain| chain.set_gather(gather));
        self.count(&batch, compute);
        if let Some(recorder) = &self.config.recorder {
            self.record(recorder, &batch, compute, self.last_ended);
        }
        self.report(&batch, compute, experts_time, timeline);
        Ok(())
    }

    /// Shows clients that wait for a long batch that the server is alive.
    fn show_progress(&mut self, now: Instant) -> Result<(), DataError> {
        if now - self.last_progress < PROGRESS_PERIOD {
            return Ok(());
        }
        self.last_progress = now;
        let is_old = |at: &Chain| at.launched_at.is_some_and(|at| now - at >= PROGRESS_PERIOD);
        if !self.chains.iter().any(is_old) {
            (self.is_computing, self.has_requested) = (false, false);
        } else if self.control.is_done()? {
            // A batch that waits for frames looks the same to the host. Its kernels count it once it has frames.
            // The count is as old as the last copy, so it is compared with the batches that have ended since.
            self.is_computing = self.has_requested && self.memory.num_begun() > self.num_ended;
            if self.is_computing {
                for client in self.clients.iter() {
                    client.show_progress(&self.control, &self.plan.geometry)?;
                }
            }
            self.memory.request_num_begun(&self.control)?;
            self.has_requested = true;
        }
        self.status.set_unanswered(self.is_computing.into());
        self.check_paths();
        Ok(())
    }

    /// Sleeps until a command or a change of the store, when there are no clients.
    fn sleep(&mut self) {
        self.status.set_unanswered(0);
        if self.inbox.is_empty() && !self.has_changes() {
            self.metrics.sleeps.inc();
            thread::park_timeout(HOUSEKEEPING_PERIOD);
        }
    }

    /// Rows for which the next grids are sized: those of the largest recent batch, rounded up.
    fn bucket_rows(&self) -> u32 {
        let largest = self.recent_rows.iter().copied().max().unwrap_or(0);
        let bucket = BUCKETS.into_iter().find(|rows| *rows >= largest).unwrap_or(u32::MAX);
        bucket.min(self.plan.max_rows)
    }

    /// Local experts for which kernels count entries, rounded up so that one more expert rarely changes it.
    fn num_local_experts(&self) -> u32 {
        let used = self.tables.num_local_experts().max(1) as u32;
        used.next_multiple_of(8).min(self.plan.num_experts)
    }
}

impl Drop for DataThread {
    fn drop(&mut self) {
        // A running kernel may still use the memory. Its waits have bounds or are aborted, so it ends soon.
        self.clients.iter().for_each(|client| self.aborts.abort(client.id));
        let deadline = Instant::now() + DROP_LIMIT;
        let mut has_ended = true;
        for stream in [&self.stream, &self.control] {
            if let Err(error) = stream.wait(deadline) {
                tracing::error!(%error, "a batch did not end: its memory is not freed");
                has_ended = false;
            }
        }
        if has_ended {
            // SAFETY: not used after this.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
            return;
        }
        std::mem::forget(std::mem::take(&mut self.chains));
        self.clients.leak_slots();
        // The weights, and the mask that kernels poll.
        std::mem::forget(Arc::clone(&self.tables));
        std::mem::forget(Arc::clone(&self.aborts));
    }
}

/// Adds the error word of a kernel that trapped to the GPU's error.
fn explain(error: DataError, word: Option<ErrorWord>) -> DataError {
    match (error, word) {
        (DataError::Gpu(source), Some(word)) => DataError::Trapped { word, source },
        (error, _) => error,
    }
}

/// Batches that the choice of a bucket considers.
const NUM_RECENT: usize = 16;
/// Polls of the batches between two readings of the clock.
const POLLS_PER_ROUND: usize = 64;
/// Sleep between two polls after a time without frames.
const PAUSE: Duration = Duration::from_micros(50);
/// Time without work for which the proxy's threads are kept awake: as long as an idle one polls often.
const PROXY_AWAKE: Duration = Duration::from_secs(1);
/// Pause after an empty batch of a GPU in software.
const EMULATED_PAUSE: Duration = Duration::from_millis(1);
/// Period of progress marks during a batch: well below any deadline that a client can have.
const PROGRESS_PERIOD: Duration = Duration::from_millis(1);
/// Longest sleep, so that a monitor can tell an idle thread from a dead one.
const HOUSEKEEPING_PERIOD: Duration = Duration::from_millis(500);
/// Kernels keep their first error until a pause between batches. A refusal was counted before, so a pause for
/// it is made only this often.
const REFUSAL_PERIOD: Duration = Duration::from_secs(1);
/// Longest wait for the batches in flight when the thread ends.
const DROP_LIMIT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use kernels::abi::{REASON_TIMEOUT, TAG_PRODUCT};

    use super::*;

    #[test]
    fn the_error_word_of_a_trapped_kernel_is_reported_with_the_gpus_error() {
        let lost = || DataError::Gpu(GpuError::Deadline { what: "a batch" });
        let word = ErrorWord {
            tag: TAG_PRODUCT,
            peer: 17,
            reason: REASON_TIMEOUT,
            reserved: 0,
            observed: 2,
            expected: 1,
        };
        let text = explain(lost(), Some(word)).to_string();
        let said = "own copies (tag 13, peer 17) expired: observed 0x2, expected 0x1; then ";
        assert!(
            text.starts_with("the data thread lost its GPU: ") && text.contains(said),
            "{text}"
        );
        assert!(text.ends_with(&GpuError::Deadline { what: "a batch" }.to_string()), "{text}");
        assert!(matches!(explain(lost(), None), DataError::Gpu(_)));
        let panicked = DataError::Panicked { message: String::new() };
        assert!(matches!(explain(panicked, Some(word)), DataError::Panicked { .. }));
    }
}
