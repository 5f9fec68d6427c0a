//! The rounds of the data thread.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use checkpoint::ModelConfig;
use fail::fail_point;
use p2p_core::{Endpoint, WaitSet};
use prometheus::IntCounter;
use protocol::{CombineMeta, DispatchScratch, FrameId, decode_dispatch, peek_id};

use super::answer::{Answer, Fault, Spare};
use super::batch::BatchBuilder;
use super::link::{Link, Pending};
use super::{Command, DataConfig, DataError, Inbox};
use crate::compute::{ComputePool, ExpertStore, LayerExperts};
use crate::metrics::{DropReason, ServerMetrics};
use crate::status::{DataStatus, LoadCounters};

pub(super) struct Engine<E: Endpoint> {
    config: DataConfig,
    store: Arc<ExpertStore>,
    pool: ComputePool,
    wait: WaitSet,
    inbox: Arc<Inbox<Command<E>>>,
    status: Arc<DataStatus>,
    load: Arc<LoadCounters>,
    metrics: ServerMetrics,
    expert_tokens: ExpertTokens,
    links: Vec<Link<E>>,
    scratch: DispatchScratch,
    batch: BatchBuilder,
    parts: Vec<Part>,
    spare: Spare,
    last_progress: Instant,
    is_stopped: bool,
}

/// One frame of a batch, to be answered after it, in order.
#[derive(Debug)]
struct Part {
    link_idx: usize,
    body: PartBody,
}

#[derive(Debug)]
enum PartBody {
    Rows { meta: CombineMeta, first_row: usize, num_rows: usize, taken_at: Instant },
    Fault { id: FrameId, fault: Fault },
}

impl<E: Endpoint> Engine<E> {
    #[allow(clippy::too_many_arguments, reason = "the parts of the one thread, put together once")]
    pub(super) fn new(
        store: Arc<ExpertStore>,
        config: DataConfig,
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
            expert_tokens: ExpertTokens::new(&metrics, num_layers, num_experts),
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
            parts: Vec::new(),
            spare: Spare::default(),
            last_progress: Instant::now(),
            is_stopped: false,
        }
    }

    /// Serves until it is told to stop.
    pub(super) fn run(mut self) -> Result<(), DataError> {
        loop {
            self.obey();
            if self.is_stopped {
                break;
            }
            self.take_frames();
            if let Some(layer) = self.choose_layer() {
                self.serve(layer);
                self.flush();
            } else if !self.flush() && !self.has_doomed() {
                self.idle().map_err(DataError::Wait)?;
            }
            self.drop_doomed();
        }
        for mut link in std::mem::take(&mut self.links) {
            link.end_with(DropReason::Shutdown);
            self.end(link);
        }
        self.note_links();
        Ok(())
    }

    /// Takes in new links and the ends of old ones.
    fn obey(&mut self) {
        while let Some(command) = self.inbox.pop() {
            match command {
                Command::Attach { id, channel, expect, ended } => {
                    let max_backlog = self.config.limits.max_backlog_frames;
                    let mut link = Link::new(id, channel, expect, max_backlog, ended);
                    if let Err(error) = self.wait.attach(link.channel.endpoint()) {
                        // Without it the client would wait for ever whenever this thread sleeps.
                        tracing::error!(link = %id, %error, "cannot wait for a client");
                        link.end_with(DropReason::Transport);
                    }
                    self.metrics.links_opened.inc();
                    self.links.push(link);
                    self.note_links();
                }
                Command::Detach { id } => {
                    if let Some(link) = self.links.iter_mut().find(|link| link.id == id) {
                        link.end_with(DropReason::PeerClosed);
                    }
                }
                Command::Stop => self.is_stopped = true,
            }
        }
        self.drop_doomed();
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
                link.pending.push_back(Pending { frame, layer, taken_at });
                self.metrics.frames_in.inc();
                self.status.frame_taken(taken_at);
                fail_point!("server::after_accept");
            }
        }
    }

    /// The layer whose oldest frame waits longest, among frames whose turn it is.
    fn choose_layer(&self) -> Option<u32> {
        let heads = self.links.iter().filter_map(Link::next_up);
        heads.min_by_key(|pending| pending.taken_at).map(|pending| pending.layer)
    }

    /// One batch, from slots to slots.
    fn serve(&mut self, layer: u32) {
        let begin = Instant::now();
        self.status.beat(begin);
        // A drain must see during the whole batch that frames wait.
        self.status.set_unanswered(self.links.iter().map(Link::num_unanswered).sum());
        // One state of the layer for checks and arithmetic, whatever is loaded meanwhile.
        let experts = self.store.layer(layer);
        self.gather(layer, experts.as_deref());
        self.batch.sort();
        let gathered = Instant::now();
        fail_point!("server::before_compute");
        let outcome = match &experts {
            Some(experts) if self.batch.num_tokens() > 0 => self.compute(experts),
            _ => Ok(()),
        };
        let computed = Instant::now();
        fail_point!("server::after_compute");
        self.answer(begin, computed - gathered, outcome.err());
        self.count_batch(layer, begin, gathered, computed);
    }

    /// Copies the frames of `layer` whose turn it is into the batch, and gives their credit back.
    fn gather(&mut self, layer: u32, experts: Option<&LayerExperts>) {
        self.batch.clear();
        self.parts.clear();
        let limits = self.config.limits;
        // The link that waits longest goes first, so that it is in whatever the limits are.
        let heads = self.links.iter().enumerate();
        let heads = heads.filter_map(|(idx, link)| link.next_up().map(|head| (idx, head)));
        let first = heads.filter(|(_, head)| head.layer == layer).min_by_key(|(_, h)| h.taken_at);
        let first = first.map_or(0, |(idx, _)| idx);
        for link_idx in (first..self.links.len()).chain(0..first) {
            while self.batch.num_tokens() < limits.max_batch_tokens
                && self.batch.num_entries() < limits.max_batch_entries
                && let link = &mut self.links[link_idx]
                && link.next_up().is_some_and(|head| head.layer == layer)
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
                fail_point!("server::after_copy_before_release");
                link.release();
                fail_point!("server::after_release");
                link.num_in_batch += 1;
                if let PartBody::Fault { fault, .. } = &body {
                    self.metrics.count_bad_frame(fault.code);
                    if fault.is_malformed() {
                        link.count_bad_frame(limits.max_bad_frames, &fault.message);
                    }
                }
                self.parts.push(Part { link_idx, body });
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
                fail_point!("server::in_tick");
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

    /// Answers every frame of the batch, per link in the order of its frames.
    fn answer(&mut self, begin: Instant, compute: Duration, failure: Option<Fault>) {
        for part_idx in 0..self.parts.len() {
            self.show_progress(Instant::now());
            let part = &mut self.parts[part_idx];
            let link = &mut self.links[part.link_idx];
            link.num_in_batch -= 1;
            let answer = match &mut part.body {
                PartBody::Rows { meta, first_row, num_rows, taken_at } => match &failure {
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
                PartBody::Fault { id, fault } => Answer::Fault { id, fault },
            };
            link.answer(answer, &mut self.spare, &self.metrics);
        }
    }

    fn count_batch(&self, layer: u32, begin: Instant, gathered: Instant, computed: Instant) {
        let metrics = &self.metrics;
        let mut num_clients = 0u32;
        let mut last_link = usize::MAX;
        for part in &self.parts {
            if let PartBody::Rows { taken_at, .. } = part.body {
                metrics.queue_seconds.observe((begin - taken_at).as_secs_f64());
                // Frames of one link stand together.
                num_clients += u32::from(part.link_idx != last_link);
                last_link = part.link_idx;
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
        metrics.encode_seconds.observe(computed.elapsed().as_secs_f64());
        self.load.add_batch(num_tokens, computed - begin);
        for group in self.batch.groups() {
            let num_tokens = u64::from(group.end - group.begin);
            self.load.add_expert(layer, group.expert, num_tokens);
            self.expert_tokens.add(layer, group.expert, num_tokens);
        }
    }

    /// Publishes answers that waited for credit. True if any went out, or a client waited too long.
    fn flush(&mut self) -> bool {
        let mut has_changed = false;
        for link in &mut self.links {
            if link.is_stalled() {
                has_changed |= link.flush(&mut self.spare, &self.metrics);
                let now = Instant::now();
                let deadline = link.credit_deadline(now, self.config.limits.credit_timeout);
                if deadline.is_some_and(|deadline| deadline <= now) {
                    tracing::warn!(link = %link.id, client = link.expect.client_id, "dropping a client that takes no answers");
                    link.end_with(DropReason::NoCredit);
                }
                has_changed |= link.doom().is_some();
            }
        }
        has_changed
    }

    /// Lets clients that wait for anything see life, now and then.
    fn show_progress(&mut self, now: Instant) {
        if now - self.last_progress >= PROGRESS_PERIOD {
            self.last_progress = now;
            self.status.beat(now);
            self.links.iter_mut().for_each(Link::show_progress);
        }
    }

    /// Polls for a while, then sleeps until a client or a command wakes this thread.
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

    /// Whether a round would do anything.
    fn has_work(&mut self) -> bool {
        if !self.inbox.is_empty() {
            return true;
        }
        let frames = self.links.iter().any(Link::has_frame);
        // A link whose answers wait has news only if credit came: its frames cannot move on before.
        frames || self.flush()
    }

    fn has_doomed(&self) -> bool {
        self.links.iter().any(|link| link.doom().is_some())
    }

    fn drop_doomed(&mut self) {
        let mut idx = 0;
        while let Some(link) = self.links.get(idx) {
            if link.doom().is_some() {
                let link = self.links.swap_remove(idx);
                self.end(link);
                self.note_links();
            } else {
                idx += 1;
            }
        }
    }

    fn end(&mut self, link: Link<E>) {
        if let Err(error) = self.wait.detach(link.channel.endpoint()) {
            tracing::debug!(link = %link.id, %error, "a link's descriptor was not in the wait set");
        }
        let reason = link.doom().unwrap_or(DropReason::Shutdown);
        self.metrics.count_dropped(reason);
        link.end(reason, &mut self.spare, &self.metrics);
    }

    fn note_links(&self) {
        self.status.set_links(self.links.len());
        self.metrics.links.set(self.links.len() as i64);
        self.load.set_links(self.links.iter().map(|link| link.channel.kind()));
    }
}

/// Copies one frame into the batch, checking every field of the copy.
fn copy_frame<E: Endpoint>(
    link: &Link<E>,
    pending: &Pending,
    model: &ModelConfig,
    experts: Option<&LayerExperts>,
    scratch: &mut DispatchScratch,
    batch: &mut BatchBuilder,
    metrics: &ServerMetrics,
) -> PartBody {
    let view = link.channel.view(&pending.frame);
    let mut dispatch = match decode_dispatch(view, &link.expect, scratch) {
        Ok(dispatch) => dispatch,
        Err(error) => {
            let id = peek_id(view).unwrap_or(link.own_id());
            return PartBody::Fault { id, fault: error.into() };
        }
    };
    let id = dispatch.id();
    if id.layer != pending.layer {
        let fault = Fault::changed_layer(pending.layer, id.layer);
        return PartBody::Fault { id, fault };
    }
    let missing = dispatch.entries().iter().map(|entry| entry.expert);
    let mut missing = missing.filter(|&e| experts.is_none_or(|experts| experts.get(e).is_none()));
    if let Some(expert) = missing.next() {
        let fault = match model.is_moe_layer(id.layer) {
            true => Fault::not_my_expert(id.layer, expert),
            false => Fault::no_moe_layer(id.layer),
        };
        return PartBody::Fault { id, fault };
    }
    let num_rows = dispatch.num_tokens();
    if let Err(error) = dispatch.read_rows_f32(0..num_rows, batch.rows_mut(num_rows)) {
        return PartBody::Fault { id, fault: error.into() };
    }
    let first_row = batch.commit(dispatch.tokens(), dispatch.entries());
    metrics.bytes_in.inc_by(dispatch.total_bytes());
    let meta = dispatch.response_meta();
    PartBody::Rows { meta, first_row, num_rows, taken_at: pending.taken_at }
}

/// Tokens per expert, resolved once.
#[derive(Debug)]
pub(crate) struct ExpertTokens {
    num_experts: usize,
    by_layer: bool,
    /// `[layer, expert]` or, without layers, `[expert]`.
    counters: Vec<IntCounter>,
}

impl ExpertTokens {
    pub(crate) fn new(metrics: &ServerMetrics, num_layers: Option<u32>, num_experts: u32) -> Self {
        let layers: Vec<Option<u32>> = match num_layers {
            Some(num_layers) => (0..num_layers).map(Some).collect(),
            None => vec![None],
        };
        let counters = layers.into_iter().flat_map(|layer| {
            (0..num_experts).map(move |expert| metrics.expert_tokens(layer, expert))
        });
        Self {
            num_experts: num_experts as usize,
            by_layer: num_layers.is_some(),
            counters: counters.collect(),
        }
    }

    pub(crate) fn add(&self, layer: u32, expert: u32, num_tokens: u64) {
        let layer_idx = if self.by_layer { layer as usize } else { 0 };
        if let Some(counter) = self.counters.get(layer_idx * self.num_experts + expert as usize) {
            counter.inc_by(num_tokens);
        }
    }
}

fn saturating_ns(duration: Duration) -> u32 {
    u32::try_from(duration.as_nanos()).unwrap_or(u32::MAX)
}

/// How often a waiting client sees life: well below any deadline it can have.
const PROGRESS_PERIOD: Duration = Duration::from_millis(1);
/// Longest sleep, so that a watcher can tell an idle thread from a dead one.
const HOUSEKEEPING_PERIOD: Duration = Duration::from_millis(500);
/// Looks at every link between two looks at the clock.
const POLLS_PER_CLOCK: usize = 32;
