//! The loop of the data thread: take frames, merge a batch, compute, answer.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use checkpoint::ModelConfig;
use p2p_core::{Transport, WaitSet};
use protocol::{CombineMeta, DispatchScratch, FrameId, decode_dispatch, peek_id};
use telemetry::{FrameKey, ServedStamp, ServerRecorder, Stamp};

use super::answer::{Answer, BufferPool, Fault};
use super::batch::BatchBuilder;
use super::link::{Link, PendingFrame};
use super::{Command, CpuConfig};
use crate::compute::{ComputePool, ExpertStore, LayerExperts};
use crate::error::DataError;
use crate::inbox::Inbox;
use crate::metrics::{DropReason, ExpertTokenCounters, ServerMetrics};
use crate::status::{DataStatus, LoadCounters};

pub(super) struct DataThread<E: Transport> {
    config: CpuConfig,
    store: Arc<ExpertStore>,
    pool: ComputePool,
    wait: WaitSet,
    inbox: Arc<Inbox<Command<E>>>,
    status: Arc<DataStatus>,
    load: Arc<LoadCounters>,
    metrics: ServerMetrics,
    expert_tokens: ExpertTokenCounters,
    links: Vec<Link<E>>,
    scratch: DispatchScratch,
    batch: BatchBuilder,
    items: Vec<BatchItem>,
    buffers: BufferPool,
    last_progress: Instant,
    is_stopped: bool,
}

/// One frame of a batch. Frames are answered in the order of the batch.
#[derive(Debug)]
struct BatchItem {
    link_idx: usize,
    body: ItemBody,
}

#[derive(Debug)]
enum ItemBody {
    Rows { meta: CombineMeta, first_row: usize, num_rows: usize, taken_at: Instant },
    Fault { id: FrameId, fault: Fault },
}

impl<E: Transport> DataThread<E> {
    #[allow(clippy::too_many_arguments, reason = "all parts of the thread, assembled once")]
    pub(super) fn new(
        store: Arc<ExpertStore>,
        config: CpuConfig,
        metrics: ServerMetrics,
        pool: ComputePool,
        wait: WaitSet,
        inbox: Arc<Inbox<Command<E>>>,
        status: Arc<DataStatus>,
        load: Arc<LoadCounters>,
    ) -> Self {
        let model = store.checkpoint().config();
        let (hidden, num_experts) = (model.hidden, model.num_experts);
        let num_layers = config.metrics_by_layer.then_some(model.num_layers);
        Self {
            expert_tokens: ExpertTokenCounters::new(&metrics, num_layers, num_experts),
            batch: BatchBuilder::new(hidden, num_experts as usize),
            config,
            store,
            pool,
            wait,
            inbox,
            status,
            load,
            metrics,
            links: Vec::new(),
            scratch: DispatchScratch::default(),
            items: Vec::new(),
            buffers: BufferPool::default(),
            last_progress: Instant::now(),
            is_stopped: false,
        }
    }

    /// Serves until a stop command.
    pub(super) fn run(mut self) -> Result<(), DataError> {
        loop {
            self.apply_commands();
            if self.is_stopped {
                break;
            }
            self.take_frames();
            if let Some(layer) = self.choose_layer() {
                self.serve_batch(layer);
                self.flush();
            } else if !self.flush() && !self.has_closing_links() {
                self.idle().map_err(DataError::Wait)?;
            }
            self.remove_closed_links();
        }
        for mut link in std::mem::take(&mut self.links) {
            link.close_with(DropReason::Shutdown);
            self.close(link);
        }
        self.publish_links();
        Ok(())
    }

    /// Applies the commands of control tasks: new links, links to close, a stop.
    fn apply_commands(&mut self) {
        while let Some(command) = self.inbox.pop() {
            match command {
                Command::Attach { id, channel, expect, closed } => {
                    let max_backlog = self.config.limits.max_backlog_frames;
                    let mut link = Link::new(id, channel, expect, max_backlog, closed);
                    if let Err(error) = self.wait.attach(link.channel.endpoint()) {
                        // A sleeping thread would never notice this client's frames.
                        tracing::error!(link = %id, %error, "cannot wait for a client");
                        link.close_with(DropReason::Transport);
                    }
                    self.metrics.links_opened.inc();
                    self.links.push(link);
                    self.publish_links();
                }
                Command::Detach { id } => {
                    if let Some(link) = self.links.iter_mut().find(|link| link.id == id) {
                        link.close_with(DropReason::PeerClosed);
                    }
                }
                Command::Stop => self.is_stopped = true,
            }
        }
        self.remove_closed_links();
    }

    /// Takes every frame that is ready.
    fn take_frames(&mut self) {
        self.wait.drive();
        for link in &mut self.links {
            while link.has_frame() {
                let frame = match link.channel.try_next() {
                    Ok(Some(frame)) => frame,
                    Ok(None) => break,
                    Err(error) => {
                        link.fail(&error);
                        break;
                    }
                };
                let taken_at = Instant::now();
                let layer = peek_id(link.channel.view(&frame)).map_or(u32::MAX, |id| id.layer);
                link.pending.push_back(PendingFrame { frame, layer, taken_at });
                self.metrics.frames_in.inc();
                self.status.frame_taken(taken_at);
                failpoint!("server::after_accept");
            }
        }
    }

    /// The layer of the frame that has waited longest, among the frames that may go into a batch.
    fn choose_layer(&self) -> Option<u32> {
        let heads = self.links.iter().filter_map(Link::next_frame);
        heads.min_by_key(|pending| pending.taken_at).map(|pending| pending.layer)
    }

    /// Gathers, computes and answers one batch.
    fn serve_batch(&mut self, layer: u32) {
        let begin = Instant::now();
        self.status.beat(begin);
        // Set before the batch, so that a drain sees during the batch that frames are unanswered.
        self.status.set_unanswered(self.links.iter().map(Link::num_unanswered).sum());
        // One version of the layer for checks and arithmetic, even if an expert is loaded meanwhile.
        let experts = self.store.layer(layer);
        self.gather(layer, experts.as_deref());
        self.batch.sort();
        let gathered = Instant::now();
        failpoint!("server::before_compute");
        let outcome = match &experts {
            Some(experts) if self.batch.num_tokens() > 0 => self.compute(experts),
            _ => Ok(()),
        };
        let computed = Instant::now();
        failpoint!("server::after_compute");
        self.answer(begin, computed - gathered, outcome.err());
        self.count_batch(layer, begin, gathered, computed);
        if let Some(recorder) = &self.config.recorder {
            self.record_batch(recorder, begin, gathered, computed);
        }
    }

    /// Copies the next frames of `layer` into the batch, and gives their credit back.
    fn gather(&mut self, layer: u32, experts: Option<&LayerExperts>) {
        self.batch.clear();
        self.items.clear();
        let limits = self.config.limits;
        // The link that has waited longest comes first, so that the limits never exclude it.
        let heads = self.links.iter().enumerate();
        let heads = heads.filter_map(|(idx, link)| link.next_frame().map(|head| (idx, head)));
        let first = heads.filter(|(_, head)| head.layer == layer).min_by_key(|(_, h)| h.taken_at);
        let first = first.map_or(0, |(idx, _)| idx);
        for link_idx in (first..self.links.len()).chain(0..first) {
            while self.batch.num_tokens() < limits.max_batch_tokens
                && self.batch.num_entries() < limits.max_batch_entries
                && let link = &mut self.links[link_idx]
                && link.next_frame().is_some_and(|head| head.layer == layer)
                && let Some(pending) = link.pending.pop_front()
            {
                let body = copy_frame(
                    link,
                    &pending,
                    self.store.checkpoint().config(),
                    experts,
                    &mut self.scratch,
                    &mut self.batch,
                    &self.metrics,
                );
                failpoint!("server::after_copy_before_release");
                link.release();
                failpoint!("server::after_release");
                link.num_in_batch += 1;
                if let ItemBody::Fault { fault, .. } = &body {
                    self.metrics.count_bad_frame(fault.code);
                    if fault.is_malformed() {
                        link.count_bad_frame(limits.max_bad_frames, &fault.message);
                    }
                }
                self.items.push(BatchItem { link_idx, body });
                self.show_progress(Instant::now());
            }
        }
    }

    fn compute(&mut self, experts: &LayerExperts) -> Result<(), Fault> {
        let Self { links, pool, batch, status, last_progress, .. } = self;
        let (batch, out) = batch.layer_batch();
        let mut on_tick = || {
            let now = Instant::now();
            if now - *last_progress >= PROGRESS_PERIOD {
                failpoint!("server::in_tick");
                *last_progress = now;
                status.beat(now);
                links.iter_mut().for_each(Link::show_progress);
            }
        };
        pool.run(experts, &batch, out, &mut on_tick).map_err(|error| {
            tracing::error!(%error, "a batch failed");
            Fault::internal(format!("the server failed to compute the batch: {error}"))
        })
    }

    /// Answers every frame of the batch, each link's in their order.
    fn answer(&mut self, begin: Instant, compute: Duration, failure: Option<Fault>) {
        for item_idx in 0..self.items.len() {
            self.show_progress(Instant::now());
            let item = &mut self.items[item_idx];
            let link = &mut self.links[item.link_idx];
            link.num_in_batch -= 1;
            let answer = match &mut item.body {
                ItemBody::Rows { meta, first_row, num_rows, taken_at } => match &failure {
                    None => {
                        meta.times.queue_ns = saturating_ns(begin - *taken_at);
                        meta.times.compute_ns = saturating_ns(compute);
                        Answer::Rows { meta, rows: self.batch.out_rows(*first_row, *num_rows) }
                    }
                    Some(fault) => {
                        self.metrics.count_bad_frame(fault.code);
                        Answer::Fault { id: &meta.id, fault }
                    }
                },
                ItemBody::Fault { id, fault } => Answer::Fault { id, fault },
            };
            link.answer(answer, &mut self.buffers, &self.metrics);
        }
    }

    fn count_batch(&self, layer: u32, begin: Instant, gathered: Instant, computed: Instant) {
        let metrics = &self.metrics;
        let mut num_clients = 0u32;
        let mut last_link = usize::MAX;
        for item in &self.items {
            if let ItemBody::Rows { taken_at, .. } = item.body {
                metrics.queue_seconds.observe((begin - taken_at).as_secs_f64());
                self.load.add_frame(begin - taken_at, computed - taken_at);
                // Frames of one link are adjacent.
                num_clients += u32::from(item.link_idx != last_link);
                last_link = item.link_idx;
            }
        }
        let num_tokens = self.batch.num_tokens();
        if num_tokens == 0 {
            return;
        }
        metrics.batches.inc();
        metrics.tokens.inc_by(num_tokens as u64);
        metrics.entries.inc_by(self.batch.num_entries() as u64);
        metrics.batch_tokens.observe(num_tokens as f64);
        metrics.batch_clients.observe(num_clients.into());
        metrics.gather_seconds.observe((gathered - begin).as_secs_f64());
        metrics.compute_seconds.observe((computed - gathered).as_secs_f64());
        let combined = computed.elapsed();
        metrics.encode_seconds.observe(combined.as_secs_f64());
        self.load.add_combine(combined);
        self.load.add_batch(num_tokens, computed - begin);
        for group in self.batch.groups() {
            let num_tokens = u64::from(group.end - group.begin);
            self.load.add_expert(layer, group.expert, num_tokens);
            self.expert_tokens.add(layer, group.expert, num_tokens);
        }
    }

    /// Records the times of frames that belong to sampled calls.
    fn record_batch(
        &self,
        ServerRecorder { recorder, server_key }: &ServerRecorder,
        began: Instant,
        gathered: Instant,
        computed: Instant,
    ) {
        for item in &self.items {
            let ItemBody::Rows { meta, num_rows, taken_at, .. } = &item.body else { continue };
            let id = meta.id;
            if recorder.samples(id.client_id, id.sequence) {
                recorder.record(Stamp::Served(ServedStamp {
                    key: FrameKey {
                        server_key: *server_key,
                        client_id: id.client_id,
                        generation: id.generation,
                        sequence: id.sequence,
                        frame_idx: id.frame_idx,
                    },
                    layer: id.layer,
                    num_tokens: *num_rows as u32,
                    batch_tokens: self.batch.num_tokens() as u32,
                    arrived: *taken_at,
                    began,
                    gathered,
                    computed,
                    answered: Instant::now(),
                    is_on_gpu: false,
                }));
            }
        }
    }

    /// Publishes answers that wait for credit. Returns true if it published any, or if a link is to close.
    fn flush(&mut self) -> bool {
        let mut has_changed = false;
        for link in &mut self.links {
            if link.is_stalled() {
                has_changed |= link.flush(&mut self.buffers, &self.metrics);
                let now = Instant::now();
                let deadline = link.credit_deadline(now, self.config.limits.credit_timeout);
                if deadline.is_some_and(|deadline| deadline <= now) {
                    tracing::warn!(link = %link.id, client = link.expect.client_id, "dropping a client that gives no credit for answers");
                    link.close_with(DropReason::NoCredit);
                }
                has_changed |= link.is_closing();
            }
        }
        has_changed
    }

    /// Shows waiting clients that this thread is alive, at most once per period.
    fn show_progress(&mut self, now: Instant) {
        if now - self.last_progress >= PROGRESS_PERIOD {
            self.last_progress = now;
            self.status.beat(now);
            self.links.iter_mut().for_each(Link::show_progress);
        }
    }

    /// Polls for the spin time, then sleeps until a client or a command wakes this thread.
    fn idle(&mut self) -> io::Result<()> {
        let begin = Instant::now();
        self.status.beat(begin);
        self.status.set_unanswered(self.links.iter().map(Link::num_unanswered).sum());
        loop {
            for _ in 0..POLLS_PER_CLOCK {
                self.wait.drive();
                if self.has_work() {
                    return Ok(());
                }
                std::hint::spin_loop();
            }
            if begin.elapsed() >= self.config.spin.spin {
                break;
            }
        }
        let now = Instant::now();
        let mut timeout = HOUSEKEEPING_PERIOD;
        for link in &mut self.links {
            let deadline = link.credit_deadline(now, self.config.limits.credit_timeout);
            if let Some(deadline) = deadline {
                timeout = timeout.min(deadline.saturating_duration_since(now));
            }
        }
        for link in &self.links {
            link.channel.arm();
        }
        let result = if self.has_work() {
            Ok(())
        } else {
            self.metrics.sleeps.inc();
            self.wait.block(timeout)
        };
        for link in &self.links {
            link.channel.disarm();
        }
        result
    }

    /// Returns true if a round has something to do.
    fn has_work(&mut self) -> bool {
        if !self.inbox.is_empty() {
            return true;
        }
        let frames = self.links.iter().any(Link::has_frame);
        // A link with a full backlog has work only once credit has come, because its frames wait for that.
        frames || self.flush()
    }

    fn has_closing_links(&self) -> bool {
        self.links.iter().any(|link| link.is_closing())
    }

    fn remove_closed_links(&mut self) {
        let mut idx = 0;
        while let Some(link) = self.links.get(idx) {
            if link.is_closing() {
                let link = self.links.swap_remove(idx);
                self.close(link);
                self.publish_links();
            } else {
                idx += 1;
            }
        }
    }

    fn close(&mut self, link: Link<E>) {
        if let Err(error) = self.wait.detach(link.channel.endpoint()) {
            tracing::debug!(link = %link.id, %error, "the wait set did not have the descriptor of a link");
        }
        let reason = link.close_reason().unwrap_or(DropReason::Shutdown);
        self.metrics.count_dropped(reason);
        link.close(reason, &mut self.buffers, &self.metrics);
    }

    fn publish_links(&self) {
        self.status.set_links(self.links.len());
        self.metrics.links.set(self.links.len() as i64);
        self.load.set_links(self.links.iter().map(|link| link.channel.kind()));
    }
}

/// Copies one frame into the batch, checking every field of the copy.
fn copy_frame<E: Transport>(
    link: &Link<E>,
    pending: &PendingFrame,
    model: &ModelConfig,
    experts: Option<&LayerExperts>,
    scratch: &mut DispatchScratch,
    batch: &mut BatchBuilder,
    metrics: &ServerMetrics,
) -> ItemBody {
    let view = link.channel.view(&pending.frame);
    let mut dispatch = match decode_dispatch(view, &link.expect, scratch) {
        Ok(dispatch) => dispatch,
        Err(error) => {
            let id = peek_id(view).unwrap_or(link.own_id());
            return ItemBody::Fault { id, fault: error.into() };
        }
    };
    let id = dispatch.id();
    if id.layer != pending.layer {
        let fault = Fault::changed_layer(pending.layer, id.layer);
        return ItemBody::Fault { id, fault };
    }
    let missing = dispatch.entries().iter().map(|entry| entry.expert);
    let mut missing = missing.filter(|&e| experts.is_none_or(|experts| experts.get(e).is_none()));
    if let Some(expert) = missing.next() {
        let fault = match model.is_moe_layer(id.layer) {
            true => Fault::not_my_expert(id.layer, expert),
            false => Fault::no_moe_layer(id.layer),
        };
        return ItemBody::Fault { id, fault };
    }
    let num_rows = dispatch.num_tokens();
    if let Err(error) = dispatch.read_rows_f32(0..num_rows, batch.rows_mut(num_rows)) {
        return ItemBody::Fault { id, fault: error.into() };
    }
    let first_row = batch.commit(dispatch.tokens(), dispatch.entries());
    metrics.bytes_in.inc_by(dispatch.total_bytes());
    let meta = dispatch.response_meta();
    ItemBody::Rows { meta, first_row, num_rows, taken_at: pending.taken_at }
}

fn saturating_ns(duration: Duration) -> u32 {
    u32::try_from(duration.as_nanos()).unwrap_or(u32::MAX)
}

/// Period of progress marks for waiting clients: well below any deadline that a client can have.
const PROGRESS_PERIOD: Duration = Duration::from_millis(1);
/// Longest sleep, so that a monitor can tell an idle thread from a dead one.
const HOUSEKEEPING_PERIOD: Duration = Duration::from_millis(500);
/// Polls of all links between two readings of the clock.
const POLLS_PER_CLOCK: usize = 32;
