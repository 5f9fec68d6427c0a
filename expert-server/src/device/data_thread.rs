//! The rounds of the data thread of a GPU.
//!
//! The thread keeps batches under way and is in nobody's path: each is one recorded graph that waits for
//! frames, computes them and answers. While one computes, clients store the next frames, and the batch
//! that will take them is queued behind it already, so that the GPU never waits for this thread. All are
//! on one stream: a reception that ran beside the products would take multiprocessors from them (a fifth
//! of the speed on an H200) for the few microseconds that it saves.
//!
//! What kernels read as tables changes only between batches: the thread lets those under way end, which
//! takes as long as the wait for a frame at most when nothing comes, changes the tables, and goes on.

mod bounds;
mod counting;
mod faults;
mod memory;

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kernels::abi::ErrorWord;
use kernels::gpu::{DeviceName, Gpu, GpuError, Stream};

use self::bounds::BATCH_LIMIT;
use self::memory::Memory;
use super::context::{Context, GraphKey};
use super::error::KernelFault;
use super::gather::Gathering;
use super::plan::DevicePlan;
use super::client_table::{EndedSeat, Seat, SeatBoard, Seats};
use super::store::{DeviceStore, Tables};
use super::{Command, DeviceConfig};
use crate::cpu::{DataError, ExpertTokens, Inbox};
use crate::metrics::{DropReason, ServerMetrics};
use crate::status::{DataStatus, LoadCounters};

pub(super) struct Engine {
    gpu: Gpu,
    plan: DevicePlan,
    config: DeviceConfig,
    store: Arc<DeviceStore>,
    tables: Arc<Tables>,
    contexts: Vec<Context>,
    /// Of all batches, in order.
    stream: Stream,
    last_launched: Option<usize>,
    memory: ManuallyDrop<Memory>,
    /// For everything that is not a batch.
    control: Stream,
    seats: Seats,
    board: Arc<SeatBoard>,
    joining: Vec<Seat>,
    inbox: Arc<Inbox<Command>>,
    status: Arc<DataStatus>,
    load: Arc<LoadCounters>,
    metrics: ServerMetrics,
    expert_tokens: ExpertTokens,
    expert_begin: Vec<u32>,
    recent_rows: [u32; RECENT],
    num_batches: usize,
    /// Batches that have ended, as kernels count them.
    num_ended: u64,
    /// Whether a batch was being computed when that could last be told, and whether the GPU was asked.
    is_computing: bool,
    has_asked: bool,
    gathering: Gathering,
    num_refused: u64,
    /// Whether kernels reported something that waits for a pause between batches.
    has_fault: bool,
    /// Since when kernels cannot report anything but a refused frame, which was counted.
    refusal_since: Option<Instant>,
    /// When a late frame was last told of in the log, and how many were not since.
    told_late_at: Option<Instant>,
    num_untold: u64,
    last_work: Instant,
    last_progress: Instant,
    /// When a batch ended last.
    last_ended: Instant,
    /// When it was told to stop.
    stopped_at: Option<Instant>,
}

impl Engine {
    #[allow(clippy::too_many_arguments, reason = "the parts of the one thread, put together once")]
    pub(super) fn new(
        gpu: &Gpu,
        plan: DevicePlan,
        config: DeviceConfig,
        store: Arc<DeviceStore>,
        board: Arc<SeatBoard>,
        inbox: Arc<Inbox<Command>>,
        status: Arc<DataStatus>,
        load: Arc<LoadCounters>,
        metrics: ServerMetrics,
    ) -> Result<Self, GpuError> {
        let contexts =
            (0..plan.num_contexts).map(|_| Context::new(gpu, &plan)).collect::<Result<_, _>>()?;
        let num_layers = config.metrics_by_layer.then_some(plan.num_layers);
        let now = Instant::now();
        Ok(Self {
            contexts,
            stream: gpu.stream()?,
            last_launched: None,
            memory: ManuallyDrop::new(Memory::new(gpu, &plan)?),
            control: gpu.stream()?,
            seats: Seats::new(gpu, &plan.geometry)?,
            board,
            joining: Vec::new(),
            expert_tokens: ExpertTokens::new(&metrics, num_layers, plan.num_experts),
            // Older than any, so that they are put into service first of all.
            tables: Arc::new(Tables { version: 0, layers: Vec::new() }),
            gpu: gpu.clone(),
            plan,
            config,
            store,
            inbox,
            status,
            load,
            metrics,
            expert_begin: Vec::with_capacity(plan.num_experts as usize + 1),
            recent_rows: [0; RECENT],
            num_batches: 0,
            num_ended: 0,
            is_computing: false,
            has_asked: false,
            gathering: Gathering::new(&plan.options),
            num_refused: 0,
            has_fault: false,
            refusal_since: None,
            told_late_at: None,
            num_untold: 0,
            last_work: now,
            last_progress: now,
            last_ended: now,
            stopped_at: None,
        })
    }

    /// Serves until it is told to stop.
    pub(super) fn run(mut self) -> Result<(), DataError> {
        let ended = self.serve();
        ended.map_err(|error| explain(error, self.contexts.iter().find_map(Context::trapped)))
    }

    fn serve(&mut self) -> Result<(), DataError> {
        loop {
            self.status.beat(Instant::now());
            self.obey();
            if self.stopped_at.is_some() {
                break;
            }
            if self.has_changes() {
                self.settle()?;
            }
            if self.seats.num_clients() == 0 {
                self.sleep();
                continue;
            }
            self.launch()?;
            self.poll()?;
        }
        self.drain()?;
        self.seats.iter_mut().for_each(|seat| seat.end_with(DropReason::Shutdown));
        self.let_go();
        Ok(())
    }

    /// Takes in commands; what they ask for happens between two batches.
    fn obey(&mut self) {
        while let Some(command) = self.inbox.pop() {
            match command {
                Command::Attach(seat) => self.joining.push(*seat),
                Command::Detach(id) => {
                    for seat in self.joining.iter_mut().chain(self.seats.iter_mut()) {
                        if seat.id == id {
                            seat.end_with(DropReason::PeerClosed);
                        }
                    }
                }
                Command::Stop => _ = self.stopped_at.get_or_insert_with(Instant::now),
            }
        }
    }

    fn has_changes(&self) -> bool {
        !self.joining.is_empty()
            || self.has_fault
            || self.refusal_since.is_some_and(|since| since.elapsed() >= REFUSAL_PERIOD)
            || self.seats.has_doomed()
            || self.store.tables().version != self.tables.version
    }

    /// Lets the batches under way end, and changes what they must not see changing.
    fn settle(&mut self) -> Result<(), DataError> {
        // Nobody who is to go is waited for: not who broke the rules, nor who went before the board knew it.
        self.board.give_up_doomed(&self.seats);
        self.drain()?;
        if self.has_fault || self.refusal_since.is_some() {
            self.look_at_fault()?;
        }
        self.let_go();
        self.take_in()?;
        let tables = self.store.tables();
        if tables.version != self.tables.version {
            self.memory.write_tables(&self.control, &self.plan, &self.store, &tables)?;
            // Before anybody is told: whoever loaded then frees what nobody uses any more.
            self.tables = tables;
            self.store.set_in_service(&self.tables);
        }
        let clients = self.seats.table();
        self.memory.write_clients(&self.control, &clients)?;
        self.board.set(&self.seats);
        self.note_seats();
        Ok(())
    }

    /// Gives new clients their seats, with counters that begin anew.
    fn take_in(&mut self) -> Result<(), DataError> {
        for seat in std::mem::take(&mut self.joining) {
            self.metrics.links_opened.inc();
            if let Some(reason) = seat.doom() {
                self.end(seat, reason);
                continue;
            }
            match self.seats.take(seat) {
                Ok(idx) => {
                    self.gathering.forget(idx);
                    self.memory.forget_client(&self.control, idx)?;
                }
                Err(seat) => {
                    tracing::error!(link = %seat.id, "no seat is left for a client that was let in");
                    self.end(*seat, DropReason::Transport);
                }
            }
        }
        Ok(())
    }

    /// Ends the links of clients that are to go. No batch is under way.
    fn let_go(&mut self) {
        let gone: Vec<Seat> = self.seats.remove_doomed().collect();
        for seat in gone {
            let reason = seat.doom().unwrap_or(DropReason::Shutdown);
            self.end(seat, reason);
        }
        self.note_seats();
    }

    fn end(&self, seat: Seat, reason: DropReason) {
        self.metrics.count_dropped(reason);
        // Nobody may be waiting; the slots are then freed here.
        let _ = seat.ended.send(EndedSeat { reason, slots: seat.slots });
    }

    fn note_seats(&self) {
        let num_links = self.seats.len();
        self.status.set_links(num_links);
        self.metrics.links.set(num_links as i64);
        self.load.set_links(self.seats.iter().map(Seat::kind));
    }

    /// Starts batches where none is under way.
    fn launch(&mut self) -> Result<(), DataError> {
        let mut key = GraphKey {
            num_clients: self.seats.num_clients(),
            num_places: self.num_places(),
            bucket_rows: self.bucket_rows(),
            times_experts: false,
        };
        let shared = self.memory.shared(&self.board, self.store.weights_dtype());
        for turn in 0..self.contexts.len() {
            // In turn, so that batches of one length take turns as well.
            let idx = self.last_launched.map_or(0, |last| last + 1 + turn) % self.contexts.len();
            if self.contexts[idx].launched_at.is_some() {
                continue;
            }
            let streams = (&self.gpu, &self.stream, &self.control);
            let gather = self.gathering.wish(self.seats.taken());
            // Batches are launched all the time; threads that carry answers rest when nobody asks for any.
            if self.last_work.elapsed() < ANSWERS_EXPECTED {
                self.config.reached.expect_work();
            }
            let every = self.plan.options.experts_timed_every;
            // Each context by its own count: of an even number one of two would never be timed.
            let context = &mut self.contexts[idx];
            key.times_experts = every > 0 && context.num_launched.is_multiple_of(every);
            let launched = context.launch(streams, &self.plan, &shared, key, gather)?;
            self.last_launched = Some(idx);
            if let Some(recorded_in) = launched {
                self.metrics.graph_seconds.observe(recorded_in.as_secs_f64());
            }
        }
        Ok(())
    }

    /// Looks after the batches under way until one ends, or for a moment.
    fn poll(&mut self) -> Result<(), DataError> {
        for _ in 0..POLLS_PER_ROUND {
            if self.harvest_ended()? || !self.inbox.is_empty() {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let now = Instant::now();
        self.show_progress(now)?;
        self.check_bound(now)?;
        if now - self.last_work > self.config.spin.spin {
            thread::park_timeout(PAUSE);
        }
        Ok(())
    }

    /// Waits until no batch is under way.
    fn drain(&mut self) -> Result<(), DataError> {
        while self.contexts.iter().any(|context| context.launched_at.is_some()) {
            if self.harvest_ended()? {
                continue;
            }
            // Whoever goes meanwhile is not waited for any longer, nor is anybody for long when it is to stop.
            self.obey();
            let now = Instant::now();
            self.status.beat(now);
            self.show_progress(now)?;
            self.check_bound(now)?;
            thread::sleep(PAUSE);
        }
        self.control.wait(Instant::now() + BATCH_LIMIT)?;
        Ok(())
    }

    /// Counts batches that have ended. True if there was one.
    fn harvest_ended(&mut self) -> Result<bool, DataError> {
        let mut any = false;
        for idx in 0..self.contexts.len() {
            if self.contexts[idx].launched_at.is_some() && !self.contexts[idx].is_running()? {
                self.contexts[idx].launched_at = None;
                self.last_ended = Instant::now();
                self.harvest(idx)?;
                any = true;
            }
        }
        Ok(any)
    }

    fn harvest(&mut self, idx: usize) -> Result<(), DataError> {
        let context = &self.contexts[idx];
        let batch = context.batch();
        let state = context.state_hint(&self.plan);
        self.num_ended = self.num_ended.max(state.num_batches);
        match KernelFault::of(&state.error) {
            None => {}
            // Which is counted at once, and batches go on: a client can have many a second.
            Some(KernelFault::Refused { .. }) => {
                self.refusal_since.get_or_insert_with(Instant::now);
            }
            Some(_) => self.has_fault = true,
        }
        self.count_refusals(&state);
        let context = &self.contexts[idx];
        if batch.clients == 0 {
            // Nobody needs the answer at once, and a GPU in software shares this host's cores.
            if matches!(self.plan.device, DeviceName::Emulated(_)) && self.inbox.is_empty() {
                thread::park_timeout(EMULATED_PAUSE);
            }
            return Ok(());
        }
        let now = Instant::now();
        self.last_work = now;
        self.status.frame_taken(now);
        let (compute, experts_time) = (context.compute_time()?, context.experts_time()?);
        let num_places = self.num_places() as usize;
        context.expert_begin(&self.plan, num_places, &mut self.expert_begin);
        self.recent_rows[self.num_batches % RECENT] = batch.num_rows;
        self.num_batches += 1;
        self.gathering.note(batch.clients, batch.expected, compute);
        self.count(&batch, compute);
        self.report(&batch, compute, experts_time);
        Ok(())
    }

    /// Tells clients that wait while a long batch computes that the server is alive.
    fn show_progress(&mut self, now: Instant) -> Result<(), DataError> {
        if now - self.last_progress < PROGRESS_PERIOD {
            return Ok(());
        }
        self.last_progress = now;
        let is_old = |at: &Context| at.launched_at.is_some_and(|at| now - at >= PROGRESS_PERIOD);
        if !self.contexts.iter().any(is_old) {
            (self.is_computing, self.has_asked) = (false, false);
        } else if self.control.is_done()? {
            // A batch that waits for frames looks the same from here: its kernels count it when it has some.
            // The answer is as old as the last look, and what has ended since is known.
            self.is_computing = self.has_asked && self.memory.num_begun() > self.num_ended;
            if self.is_computing {
                for seat in self.seats.iter() {
                    seat.show_life(&self.control, &self.plan.geometry)?;
                }
            }
            self.memory.ask_num_begun(&self.control)?;
            self.has_asked = true;
        }
        self.status.set_unanswered(self.is_computing.into());
        self.check_ways();
        Ok(())
    }

    /// Without clients there is nothing to do until somebody says something.
    fn sleep(&mut self) {
        self.status.set_unanswered(0);
        if self.inbox.is_empty() && !self.has_changes() {
            self.metrics.sleeps.inc();
            thread::park_timeout(HOUSEKEEPING_PERIOD);
        }
    }

    /// Rows for which the next grids are made: the largest of the last batches, rounded up.
    fn bucket_rows(&self) -> u32 {
        let largest = self.recent_rows.iter().copied().max().unwrap_or(0);
        let bucket = BUCKETS.into_iter().find(|rows| *rows >= largest).unwrap_or(u32::MAX);
        bucket.min(self.plan.max_rows)
    }

    /// Places that kernels count entries for, rounded so that a further expert rarely changes it.
    fn num_places(&self) -> u32 {
        let used = self.tables.num_places().max(1) as u32;
        used.next_multiple_of(8).min(self.plan.num_experts)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Memory must not go from under a kernel. Their waits have bounds or are ended, so this one is short.
        self.seats.iter().for_each(|seat| self.board.give_up(seat.id));
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
        std::mem::forget(std::mem::take(&mut self.contexts));
        self.seats.keep_slots();
        // Weights, and the mask that kernels look at.
        std::mem::forget(Arc::clone(&self.tables));
        std::mem::forget(Arc::clone(&self.board));
    }
}

/// What is known of a GPU's failure: `word` is of a kernel that trapped.
fn explain(error: DataError, word: Option<ErrorWord>) -> DataError {
    match (error, word) {
        (DataError::Gpu(source), Some(word)) => DataError::Trapped { word, source },
        (error, _) => error,
    }
}

/// Row counts for which graphs are recorded, besides the largest.
const BUCKETS: [u32; 5] = [32, 128, 512, 2048, 8192];
/// Batches that the choice of a bucket looks back on.
const RECENT: usize = 16;
/// Looks at the batches between two looks at the clock.
const POLLS_PER_ROUND: usize = 64;
/// Sleep between two looks when nothing has come for a while.
const PAUSE: Duration = Duration::from_micros(50);
/// As long as an idle thread of a proxy looks often.
const ANSWERS_EXPECTED: Duration = Duration::from_secs(1);
const EMULATED_PAUSE: Duration = Duration::from_millis(1);
/// How often a waiting client sees life during a batch: well below any deadline it can have.
const PROGRESS_PERIOD: Duration = Duration::from_millis(1);
/// Longest sleep, so that a watcher can tell an idle thread from a dead one.
const HOUSEKEEPING_PERIOD: Duration = Duration::from_millis(500);
/// Kernels keep their first error until there is a pause between batches. If it is a refusal, which says nothing
/// new, that is not made more often.
const REFUSAL_PERIOD: Duration = Duration::from_secs(1);
const DROP_LIMIT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use kernels::abi::{REASON_TIMEOUT, TAG_PRODUCT};

    use super::*;

    #[test]
    fn what_a_kernel_said_before_it_trapped_is_told_with_the_gpus_error() {
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
