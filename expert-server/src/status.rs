//! State that the data thread and the control tasks share, without locks.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use control_api::{Assignment, ExpertLoad, LoadReport, PhaseTimes, TransportLinks};
use httpd::trust::tls::Tls;
use p2p_core::TransportKind;
use p2p_core::bootstrap::ListenerStats;
use telemetry::{Recorder, openmetrics};

use crate::loader::LoadingProgress;
use crate::metrics::ServerMetrics;

/// Signs of life of the data thread. Relaxed order is enough: each field is a count or a time, and none of them
/// publishes other memory.
#[derive(Debug)]
pub(crate) struct DataStatus {
    started: Instant,
    beat_ms: AtomicU64,
    last_frame_ms: AtomicU64,
    num_links: AtomicUsize,
    num_unanswered: AtomicUsize,
    is_over: AtomicBool,
}

impl DataStatus {
    pub(crate) fn new() -> Self {
        Self {
            started: Instant::now(),
            beat_ms: AtomicU64::new(0),
            last_frame_ms: AtomicU64::new(0),
            num_links: AtomicUsize::new(0),
            num_unanswered: AtomicUsize::new(0),
            is_over: AtomicBool::new(false),
        }
    }

    /// Records that the data thread is alive at `now`.
    pub(crate) fn beat(&self, now: Instant) {
        self.beat_ms.store(self.ms(now), Ordering::Relaxed);
    }

    /// Records that the data thread took a frame at `now`.
    pub(crate) fn frame_taken(&self, now: Instant) {
        self.last_frame_ms.store(self.ms(now), Ordering::Relaxed);
    }

    pub(crate) fn set_links(&self, num_links: usize) {
        self.num_links.store(num_links, Ordering::Relaxed);
    }

    /// Frames taken and not answered yet, at the end of a round.
    pub(crate) fn set_unanswered(&self, num_frames: usize) {
        self.num_unanswered.store(num_frames, Ordering::Relaxed);
    }

    pub(crate) fn set_over(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }

    pub(crate) fn num_links(&self) -> usize {
        self.num_links.load(Ordering::Relaxed)
    }

    /// Time since the last sign of life.
    pub(crate) fn silence(&self) -> Duration {
        self.since(&self.beat_ms)
    }

    /// Time since the last frame, or zero while a frame is unanswered.
    pub(crate) fn idle_for(&self) -> Duration {
        match self.num_unanswered.load(Ordering::Relaxed) {
            0 => self.since(&self.last_frame_ms),
            _ => Duration::ZERO,
        }
    }

    fn since(&self, earlier_ms: &AtomicU64) -> Duration {
        let now_ms = self.ms(Instant::now());
        Duration::from_millis(now_ms.saturating_sub(earlier_ms.load(Ordering::Relaxed)))
    }

    fn ms(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.started).as_millis() as u64
    }
}

/// The state behind `/metrics`, `/healthz` and `/readyz`.
#[derive(Debug)]
pub(crate) struct Health {
    pub(crate) metrics: ServerMetrics,
    /// Has the exemplars of the metrics.
    pub(crate) recorder: Option<Recorder>,
    pub(crate) handshakes: Arc<ListenerStats>,
    /// Held while metrics are updated and rendered.
    pub(crate) rendering: Mutex<()>,
    /// The data thread's signs of life, set once the experts are loaded.
    pub(crate) data: OnceLock<Arc<DataStatus>>,
    pub(crate) is_draining: AtomicBool,
    /// True while the placement has the draining server, because others still load its experts.
    pub(crate) keeps_serving: AtomicBool,
    /// True if the server has a control plane.
    pub(crate) needs_lease: bool,
    pub(crate) has_lease: AtomicBool,
    /// True from the first lease on.
    pub(crate) had_lease: AtomicBool,
    /// True while the control plane refuses the token or certificate of this server.
    pub(crate) is_refused: AtomicBool,
    pub(crate) tls: Option<Tls>,
}

impl Health {
    /// Why the TLS files on the disk cannot be used. The previous ones are in force.
    pub(crate) fn tls_error(&self) -> Option<String> {
        self.tls.as_ref()?.status().problem
    }

    /// Returns an error if the data thread hangs or has ended.
    pub(crate) fn live(&self) -> Result<(), String> {
        let Some(data) = self.data.get() else { return Ok(()) };
        if data.is_over.load(Ordering::Relaxed) {
            return Err("the data thread has ended".to_owned());
        }
        let silence = data.silence();
        if silence > MAX_SILENCE {
            return Err(format!("the data thread has been silent for {} ms", silence.as_millis()));
        }
        Ok(())
    }

    /// Returns true if new clients are to go to other servers.
    pub(crate) fn refuses_clients(&self) -> bool {
        self.is_draining.load(Ordering::Relaxed) && !self.keeps_serving.load(Ordering::Relaxed)
    }

    /// Returns an error if clients should not connect to this server.
    pub(crate) fn ready(&self) -> Result<(), String> {
        self.live()?;
        if self.data.get().is_none() {
            return Err("the experts are still loading".to_owned());
        }
        if self.is_draining.load(Ordering::Relaxed) {
            return Err("draining".to_owned());
        }
        // Without a control plane the last placement stays in force, and data flows.
        if self.needs_lease && !self.had_lease.load(Ordering::Relaxed) {
            return Err(format!("the control plane has given no lease yet{}", self.refusal()));
        }
        Ok(())
    }

    /// A fault of a server that is ready all the same.
    pub(crate) fn reservation(&self) -> Option<String> {
        if let Some(reason) = self.tls_error() {
            return Some(format!("the TLS files cannot be used: {reason}"));
        }
        let is_lost = self.needs_lease && !self.has_lease.load(Ordering::Relaxed);
        is_lost.then(|| format!("the control plane's lease is not held{}", self.refusal()))
    }

    /// Reason why there is no lease, if waiting does not help.
    fn refusal(&self) -> &'static str {
        match self.is_refused.load(Ordering::Relaxed) {
            true => ": it refuses the token or certificate of this server",
            false => "",
        }
    }

    /// `is_refused` says that the last request was refused for want of an identity.
    pub(crate) fn set_lease(&self, has_lease: bool, is_refused: bool) {
        self.is_refused.store(is_refused, Ordering::Relaxed);
        self.has_lease.store(has_lease, Ordering::Relaxed);
        if has_lease {
            self.had_lease.store(true, Ordering::Relaxed);
        }
    }

    /// The metrics in the text format of Prometheus, or as OpenMetrics with exemplars.
    pub(crate) fn render_metrics(&self, is_open: bool) -> Result<String, prometheus::Error> {
        let _guard = self.rendering.lock().unwrap_or_else(PoisonError::into_inner);
        self.metrics.set_handshakes(&self.handshakes);
        self.metrics.ready.set(self.ready().is_ok().into());
        self.metrics.lease_held.set(self.has_lease.load(Ordering::Relaxed).into());
        if is_open {
            let exemplars = self.recorder.as_ref().map(Recorder::exemplars);
            return Ok(openmetrics::encode(&self.metrics.registry().gather(), exemplars));
        }
        self.metrics.render()
    }
}

/// Work since the start of the server. The data thread counts it, and the control plane receives it in reports.
#[derive(Debug)]
pub(crate) struct LoadCounters {
    num_experts: usize,
    busy_ns: AtomicU64,
    num_tokens: AtomicU64,
    num_frames: AtomicU64,
    queued_ns: AtomicU64,
    num_late: AtomicU64,
    num_batches: AtomicU64,
    combined_ns: AtomicU64,
    /// `[layer, expert]`, row-major.
    experts: Box<[AtomicU64]>,
    /// Open links, in the order of [`TransportKind::ALL`].
    links: [AtomicUsize; TransportKind::ALL.len()],
    /// Reasons why clients with open links left out a better transport: (note, transport in use, reason). The
    /// tasks that watch connections write them.
    left_out: Mutex<Vec<(u64, TransportKind, String)>>,
    next_note: AtomicU64,
    /// The load of experts under way.
    loading: OnceLock<Arc<LoadingProgress>>,
    /// Name of the GPU, on a server that has one.
    device: Option<String>,
}

impl LoadCounters {
    pub(crate) fn new(num_layers: usize, num_experts: usize) -> Self {
        let experts = (0..num_layers * num_experts).map(|_| AtomicU64::new(0)).collect();
        Self {
            num_experts,
            busy_ns: AtomicU64::new(0),
            num_tokens: AtomicU64::new(0),
            num_frames: AtomicU64::new(0),
            queued_ns: AtomicU64::new(0),
            num_late: AtomicU64::new(0),
            num_batches: AtomicU64::new(0),
            combined_ns: AtomicU64::new(0),
            experts,
            links: Default::default(),
            left_out: Mutex::default(),
            next_note: AtomicU64::new(0),
            loading: OnceLock::new(),
            device: None,
        }
    }

    /// Adds the name of the GPU to reports.
    #[cfg(any(feature = "device", test))]
    pub(crate) fn with_device(self, device: String) -> Self {
        Self { device: Some(device), ..self }
    }

    /// Adds the progress of loads to reports.
    pub(crate) fn set_loading(&self, progress: Arc<LoadingProgress>) {
        // There is one loader only.
        let _ = self.loading.set(progress);
    }

    /// Sets the transports of all open links.
    pub(crate) fn set_links(&self, open: impl Iterator<Item = TransportKind>) {
        let mut counts = [0; TransportKind::ALL.len()];
        for kind in open {
            if let Some(idx) = TransportKind::ALL.iter().position(|known| *known == kind) {
                counts[idx] += 1;
            }
        }
        for (counter, count) in self.links.iter().zip(counts) {
            counter.store(count, Ordering::Relaxed);
        }
    }

    fn links(&self) -> Vec<TransportLinks> {
        let counts = self.links.iter().map(|counter| counter.load(Ordering::Relaxed));
        let open = TransportKind::ALL.iter().zip(counts).filter(|(_, count)| *count > 0);
        open.map(|(kind, count)| TransportLinks {
            transport: kind.name().to_owned(),
            num_links: count as u32,
            left_out: self.left_out_of(*kind),
        })
        .collect()
    }

    /// Notes why a client left out a better transport, until the note is dropped with the client's link.
    pub(crate) fn note_left_out(self: &Arc<Self>, kind: TransportKind, why: String) -> LeftOutNote {
        let id = self.next_note.fetch_add(1, Ordering::Relaxed);
        self.notes().push((id, kind, why));
        LeftOutNote { load: Arc::clone(self), id }
    }

    /// The first few distinct reasons.
    fn left_out_of(&self, kind: TransportKind) -> Vec<String> {
        let mut reasons: Vec<String> = Vec::new();
        for (_, _, why) in self.notes().iter().filter(|(_, of, _)| *of == kind) {
            if reasons.len() < MAX_REASONS && !reasons.contains(why) {
                reasons.push(why.clone());
            }
        }
        reasons
    }

    fn notes(&self) -> MutexGuard<'_, Vec<(u64, TransportKind, String)>> {
        self.left_out.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add_batch(&self, num_tokens: usize, busy: Duration) {
        self.num_tokens.fetch_add(num_tokens as u64, Ordering::Relaxed);
        self.busy_ns.fetch_add(busy.as_nanos() as u64, Ordering::Relaxed);
        self.num_batches.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts the time in which the answers of a batch were written.
    pub(crate) fn add_combine(&self, took: Duration) {
        self.combined_ns.fetch_add(took.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Counts a frame that waited for `queued` and was computed `total` after it came.
    pub(crate) fn add_frame(&self, queued: Duration, total: Duration) {
        self.num_frames.fetch_add(1, Ordering::Relaxed);
        self.queued_ns.fetch_add(queued.as_nanos() as u64, Ordering::Relaxed);
        self.num_late.fetch_add(u64::from(total > LATE_AFTER), Ordering::Relaxed);
    }

    pub(crate) fn add_expert(&self, layer: u32, expert: u32, num_tokens: u64) {
        let idx = layer as usize * self.num_experts + expert as usize;
        if let Some(counter) = self.experts.get(idx) {
            counter.fetch_add(num_tokens, Ordering::Relaxed);
        }
    }

    /// Tokens computed with an expert so far; 0 for one that the model does not have.
    pub(crate) fn num_tokens_of(&self, layer: u32, expert: u32) -> u64 {
        let idx = layer as usize * self.num_experts + expert as usize;
        self.experts.get(idx).map_or(0, |counter| counter.load(Ordering::Relaxed))
    }
}

/// The reason why one client does not use a better transport. Dropped when its link closes.
#[derive(Debug)]
pub(crate) struct LeftOutNote {
    load: Arc<LoadCounters>,
    id: u64,
}

impl Drop for LeftOutNote {
    fn drop(&mut self) {
        self.load.notes().retain(|(id, ..)| *id != self.id);
    }
}

/// Turns [`LoadCounters`] into reports over consecutive windows.
#[derive(Debug)]
pub(crate) struct LoadWindow {
    begin: Instant,
    busy_ns: u64,
    num_tokens: u64,
    num_frames: u64,
    queued_ns: u64,
    num_late: u64,
    num_batches: u64,
    /// Queue, compute and combine.
    phases_ns: [u64; 3],
    experts: Vec<u64>,
}

impl LoadWindow {
    pub(crate) fn new(counters: &LoadCounters) -> Self {
        let experts = vec![0; counters.experts.len()];
        Self {
            begin: Instant::now(),
            busy_ns: 0,
            num_tokens: 0,
            num_frames: 0,
            queued_ns: 0,
            num_late: 0,
            num_batches: 0,
            phases_ns: [0; 3],
            experts,
        }
    }

    /// The work done since the last call, over the experts of `holds`.
    pub(crate) fn next_report(
        &mut self,
        counters: &LoadCounters,
        holds: &Assignment,
    ) -> LoadReport {
        let now = Instant::now();
        let [queue_ns, compute_ns, combine_ns] = &mut self.phases_ns;
        let phases = PhaseTimes {
            num_batches: advance(&mut self.num_batches, &counters.num_batches),
            queue_us: advance_by(1_000, queue_ns, &counters.queued_ns),
            compute_us: advance_by(1_000, compute_ns, &counters.busy_ns),
            combine_us: advance_by(1_000, combine_ns, &counters.combined_ns),
        };
        let mut report = LoadReport {
            window_ms: (now - self.begin).as_millis() as u64,
            phases: Some(phases),
            busy_ms: advance_by(1_000_000, &mut self.busy_ns, &counters.busy_ns),
            num_tokens: advance(&mut self.num_tokens, &counters.num_tokens),
            num_frames: advance(&mut self.num_frames, &counters.num_frames),
            queued_ms: advance_by(1_000_000, &mut self.queued_ns, &counters.queued_ns),
            num_late: advance(&mut self.num_late, &counters.num_late),
            memory_experts: None,
            unreadable: Assignment::default(),
            experts: Vec::new(),
            links: counters.links(),
            device: counters.device.clone(),
            loading: counters.loading.get().and_then(|progress| progress.report()),
        };
        self.begin = now;
        for entry in &holds.layers {
            for &expert in &entry.experts {
                let idx = entry.layer as usize * counters.num_experts + expert as usize;
                let (Some(last), Some(counter)) =
                    (self.experts.get_mut(idx), counters.experts.get(idx))
                else {
                    continue;
                };
                let num_tokens = advance(last, counter);
                if num_tokens > 0 {
                    report.experts.push(ExpertLoad { layer: entry.layer, expert, num_tokens });
                }
            }
        }
        report
    }
}

fn advance(last: &mut u64, counter: &AtomicU64) -> u64 {
    let now = counter.load(Ordering::Relaxed);
    now - std::mem::replace(last, now)
}

/// The whole units of `unit_ns` since the last call. The rest counts in a later window, so that short windows lose
/// nothing.
fn advance_by(unit_ns: u64, last_ns: &mut u64, counter: &AtomicU64) -> u64 {
    let units = (counter.load(Ordering::Relaxed) - *last_ns) / unit_ns;
    *last_ns += units * unit_ns;
    units
}

/// Clients take a server without progress for so long for failed, by default.
const LATE_AFTER: Duration = Duration::from_millis(100);
/// A live data thread reports at least twice a second, and many times per millisecond of compute.
const MAX_SILENCE: Duration = Duration::from_secs(5);
/// Most reasons per transport in a report.
const MAX_REASONS: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;
    use control_api::LayerAssignment;

    #[test]
    fn every_token_is_reported_in_exactly_one_window() {
        let counters = LoadCounters::new(3, 4).with_device("cuda:1".to_owned());
        let holds = Assignment { layers: vec![LayerAssignment { layer: 2, experts: vec![1, 3] }] };
        let mut window = LoadWindow::new(&counters);
        counters.add_batch(5, Duration::from_micros(7_600));
        counters.add_frame(Duration::from_micros(900), Duration::from_millis(8));
        counters.add_frame(Duration::from_micros(900), Duration::from_millis(101));
        counters.add_combine(Duration::from_nanos(3_999));
        counters.add_expert(2, 3, 5);
        counters.add_expert(9, 9, 5);
        let report = window.next_report(&counters, &holds);
        assert_eq!((report.num_tokens, report.busy_ms), (5, 7));
        assert_eq!(report.device.as_deref(), Some("cuda:1"));
        assert_eq!(report.experts, [ExpertLoad { layer: 2, expert: 3, num_tokens: 5 }]);
        assert_eq!((report.num_frames, report.queued_ms, report.num_late), (2, 1, 1));
        let phases =
            PhaseTimes { num_batches: 1, queue_us: 1_800, compute_us: 7_600, combine_us: 3 };
        assert_eq!(report.phases, Some(phases));
        counters.add_batch(0, Duration::from_micros(400));
        let report = window.next_report(&counters, &holds);
        assert_eq!((report.num_tokens, report.busy_ms, report.experts.len()), (0, 1, 0));
        assert_eq!((report.num_frames, report.queued_ms, report.num_late), (0, 0, 0));
        let phases = PhaseTimes { num_batches: 1, queue_us: 0, compute_us: 400, combine_us: 0 };
        assert_eq!(report.phases, Some(phases));
    }

    #[test]
    fn reasons_against_a_transport_are_reported_while_their_links_are_open() {
        let counters = Arc::new(LoadCounters::new(1, 1));
        let why = |idx: usize| format!("verbs:roce2: no path {idx}");
        let kind = TransportKind::Libfabric;
        let notes: Vec<_> =
            (0..20).map(|idx| counters.note_left_out(kind, why(idx % 10))).collect();
        counters.set_links([TransportKind::Shm, kind, kind].into_iter());
        let links = counters.links();
        assert_eq!(links.len(), 2);
        assert_eq!((links[0].transport.as_str(), links[0].left_out.len()), ("shm", 0));
        assert_eq!(links[1].left_out, (0..MAX_REASONS).map(why).collect::<Vec<_>>());
        drop(notes);
        assert!(counters.links()[1].left_out.is_empty());
    }
}
