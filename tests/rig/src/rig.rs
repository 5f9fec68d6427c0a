//! Real processes and real signals: runs layers during faults, and checks every output.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use attention_client::MoeClient;
use checkpoint::Checkpoint;
use control_api::{ControlClient, PlacementWatch, WatchOptions};
use switchyard_cli::cluster::{ClusterOptions, LocalCluster};
use test_support::procfs;

use crate::failpoints;
use crate::inputs::InputPool;
use crate::report::{EventRecord, LayerRecord, Report, Rule, Times, by_kind};
use crate::schedule::{Bounds, Event, Kind, Weights, schedule};
use crate::worker::{Shared, is_whole, metric, metric_by_label, work};

/// Options of a run.
#[derive(Debug, Clone)]
pub struct RigOptions {
    /// The binary of control plane and servers.
    pub binary: PathBuf,
    /// Checkpoint folder.
    pub model: PathBuf,
    /// Layers to finish at least.
    pub layers: u64,
    /// Average number of layers between events.
    pub layers_per_event: u64,
    /// Seed of inputs and schedule.
    pub seed: u64,
    /// Expert servers.
    pub servers: usize,
    /// Servers that hold each expert.
    pub replicas: usize,
    /// Client threads.
    pub threads: usize,
    /// Most tokens of a layer.
    pub max_tokens: usize,
    /// The clients' deadline.
    pub deadline: Duration,
    /// Lease of a member.
    pub lease_ttl: Duration,
    /// Longest absence of the control plane.
    pub control_hold: Duration,
    /// Weight of each kind of event.
    pub weights: Weights,
    /// Failpoints of servers, see [`failpoints`].
    pub server_failpoints: String,
    /// Ends the run at the first violation.
    pub stop_at_first: bool,
    /// Ends the run after this time, even if layers are left.
    pub max_time: Duration,
}

impl RigOptions {
    /// A schedule without outages, on the small checkpoint.
    #[must_use]
    pub fn new(binary: PathBuf, model: PathBuf, seed: u64) -> Self {
        Self {
            binary,
            model,
            layers: 1000,
            layers_per_event: 50,
            seed,
            servers: 4,
            replicas: 2,
            threads: 2,
            max_tokens: 64,
            deadline: Duration::from_millis(100),
            lease_ttl: Duration::from_millis(1500),
            control_hold: Duration::from_millis(2000),
            weights: [8, 4, 8, 1, 2, 2, 1, 0],
            server_failpoints: String::new(),
            stop_at_first: false,
            max_time: Duration::from_secs(3600),
        }
    }
}

/// Runs the schedule. Call it on a thread that lives as long as the run: the kernel ties children to it.
///
/// # Errors
/// When the cluster does not come up. A broken rule is no error but part of the report.
pub fn run(options: &RigOptions) -> Result<Report> {
    let checkpoint = Arc::new(Checkpoint::open(&options.model)?);
    let pool = InputPool::new(&checkpoint, options.seed, NUM_INPUTS, options.max_tokens)?;
    let state =
        tempfile::tempdir().context("cannot make a folder for the control plane's state")?;
    let mut cluster_options = ClusterOptions::new(&options.model)?;
    cluster_options.binary.clone_from(&options.binary);
    cluster_options.num_servers = options.servers;
    cluster_options.replicas = options.replicas;
    cluster_options.threads = Some(1);
    cluster_options.lease_ttl = options.lease_ttl;
    cluster_options.data_dir = Some(state.path().to_owned());
    if !options.server_failpoints.is_empty() {
        let list = (failpoints::ENV.to_owned(), options.server_failpoints.clone());
        cluster_options.server_env.push(list);
    }
    let cluster = LocalCluster::start(cluster_options, &mut |_| {})?;
    // While no server holds an expert there is nothing to wait for.
    let outages = options.weights[Kind::Outage as usize] > 0;
    let client = MoeClient::builder(pool.model.clone())
        .control_plane(cluster.control_url(), Some(cluster.token().to_owned()))
        .secret(Some(cluster.token().to_owned()))
        .deadline(options.deadline)
        .replica_wait(if outages { OUTAGE_WAIT } else { REPLICA_WAIT })
        .name("fault-rig")
        .build()?;
    client.wait_ready(START_PATIENCE)?;
    let epochs = Epochs::watch(&cluster)?;
    let shared = Shared::new(pool, client);
    let num_events = usize::try_from(options.layers / options.layers_per_event.max(1))?.max(1);
    let events = schedule(
        options.seed,
        num_events,
        &options.weights,
        &Bounds {
            num_servers: options.servers,
            gap_layers: options.layers_per_event,
            deadline_ms: options.deadline.as_millis() as u64,
            lease_ms: options.lease_ttl.as_millis() as u64,
            control_hold_ms: options.control_hold.as_millis() as u64,
        },
    );
    let mut driver =
        Driver { options, shared: &shared, cluster, death_ns: None, happened: Vec::new() };
    let layers = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..options.threads)
            .map(|idx| {
                let seed = options.seed.wrapping_add(1 + idx as u64);
                let shared = &shared;
                scope.spawn(move || work(shared, seed))
            })
            .collect();
        driver.drive(&events);
        shared.stop.store(true, Ordering::Relaxed);
        let mut layers = Vec::new();
        for worker in workers {
            match worker.join() {
                Ok(records) => layers.extend(records),
                Err(_) => shared.violated(Rule::NoPanic, "a worker panicked".to_owned()),
            }
        }
        layers
    });
    let happened = std::mem::take(&mut driver.happened);
    let num_epochs = epochs.judge(&shared);
    Ok(sum_up(options, &shared, events, &happened, &layers, num_epochs))
}

struct Driver<'a> {
    options: &'a RigOptions,
    shared: &'a Shared,
    cluster: LocalCluster,
    /// The time at which the current event killed a server, and at which that was gone.
    death_ns: Option<(u64, u64)>,
    happened: Vec<EventRecord>,
}

impl Driver<'_> {
    /// Carries out the events, each on a whole cluster, then waits for the rest of the layers.
    fn drive(&mut self, events: &[Event]) {
        self.wait_whole();
        self.wait_layers(self.options.layers_per_event);
        for event in events {
            if self.is_over() {
                return;
            }
            let finished = self.shared.layers.load(Ordering::Relaxed);
            self.wait_layers(finished + event.gap_layers);
            std::thread::sleep(Duration::from_micros(event.delay_us));
            let failovers = metric_by_label(&self.shared.client, FAILOVERS);
            let at_ns = self.shared.now_ns();
            if let Err(error) = self.happen(event) {
                let detail = format!("{event:?}: {error:#}");
                self.shared.violated(Rule::Lifecycle, detail);
                return;
            }
            self.wait_whole();
            if event.kind == Kind::Drain {
                self.judge_drain(&failovers);
            }
            let whole_ns = self.shared.now_ns();
            let death_ns = self.death_ns.take();
            self.happened.push(EventRecord { event: *event, at_ns, death_ns, whole_ns });
        }
        self.wait_layers(self.options.layers);
    }

    fn happen(&mut self, event: &Event) -> Result<()> {
        let hold = Duration::from_millis(event.hold_ms);
        let server = event.server_idx;
        match event.kind {
            Kind::Kill | Kind::Restart => {
                self.kill(server)?;
                std::thread::sleep(hold);
                self.start(&[server])?;
            }
            Kind::Freeze | Kind::Expire => {
                self.cluster.freeze_server(server, true)?;
                std::thread::sleep(hold);
                self.cluster.freeze_server(server, false)?;
            }
            Kind::Drain => {
                self.cluster.drain_server(server, START_PATIENCE)?;
                self.start(&[server])?;
            }
            Kind::Control => {
                self.cluster.kill_control()?;
                std::thread::sleep(hold);
                self.cluster.restart_control()?;
            }
            Kind::ControlAndKill => {
                self.cluster.kill_control()?;
                std::thread::sleep(hold / 2);
                self.kill(server)?;
                std::thread::sleep(hold / 2);
                self.cluster.restart_control()?;
                self.start(&[server])?;
            }
            Kind::Outage => {
                let others: Vec<usize> =
                    (0..self.options.servers).filter(|&idx| idx != server).collect();
                self.shared.outage.store(true, Ordering::Release);
                for &idx in &others {
                    self.cluster.kill_server(idx)?;
                }
                // Long enough for calls to give up.
                std::thread::sleep(hold + 2 * OUTAGE_WAIT);
                self.start(&others)?;
            }
        }
        Ok(())
    }

    /// Kills a server and waits until it is gone.
    fn kill(&mut self, server_idx: usize) -> Result<()> {
        let pid = self.cluster.server_pid(server_idx).context("the server is not running")?;
        let killed_ns = self.shared.now_ns();
        self.cluster.kill_server(server_idx)?;
        let begin = Instant::now();
        while !procfs::has_ended(pid) && begin.elapsed() < START_PATIENCE {
            std::thread::sleep(Duration::from_micros(100));
        }
        self.death_ns = Some((killed_ns, self.shared.now_ns()));
        Ok(())
    }

    fn start(&mut self, servers: &[usize]) -> Result<()> {
        servers.iter().try_for_each(|&idx| self.cluster.start_server(idx))?;
        servers.iter().try_for_each(|&idx| self.cluster.wait_serving(idx))
    }

    /// Waits until the client has a live link to every server in every lane and every expert has all its
    /// replicas: only then may the next fault happen.
    fn wait_whole(&self) {
        let begin = Instant::now();
        let mut in_a_row = 0;
        while in_a_row < 3 {
            in_a_row = if self.is_whole() { in_a_row + 1 } else { 0 };
            if begin.elapsed() > WHOLE_PATIENCE {
                let links = metric_by_label(&self.shared.client, "switchyard_client_links");
                let detail = format!(
                    "the cluster is not whole again within {WHOLE_PATIENCE:?}: epoch {}, links {links:?}, {} lanes",
                    self.shared.client.epoch(),
                    metric(&self.shared.client, "switchyard_client_lanes")
                );
                self.shared.violated(Rule::Recovery, detail);
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        // A call that began before may still fail, as expected.
        if self.shared.outage.load(Ordering::Acquire) {
            std::thread::sleep(2 * OUTAGE_WAIT);
            self.shared.outage.store(false, Ordering::Release);
        }
    }

    fn is_whole(&self) -> bool {
        is_whole(&self.shared.client, self.options.servers, self.options.replicas)
    }

    /// Waits until `target` layers are finished.
    fn wait_layers(&self, target: u64) {
        let mut last = (self.shared.layers.load(Ordering::Relaxed), Instant::now());
        while last.0 < target && !self.is_over() {
            std::thread::sleep(Duration::from_micros(200));
            let finished = self.shared.layers.load(Ordering::Relaxed);
            if finished != last.0 {
                last = (finished, Instant::now());
            } else if last.1.elapsed() > PROGRESS_PATIENCE {
                let detail = format!("no layer was finished within {PROGRESS_PATIENCE:?}");
                self.shared.violated(Rule::Progress, detail);
                return;
            }
        }
    }

    /// A server that leaves in good order loses no token. Silence does not count: a busy machine can make any server
    /// look frozen.
    fn judge_drain(&self, before: &BTreeMap<String, f64>) {
        let after = metric_by_label(&self.shared.client, FAILOVERS);
        for (reason, count) in after.iter().filter(|(reason, _)| *reason != "silent") {
            let earlier = before.get(reason).copied().unwrap_or_default();
            if *count > earlier {
                let detail = format!("a drain caused {} failovers ({reason})", count - earlier);
                self.shared.violated(Rule::QuietDrain, detail);
            }
        }
    }

    fn is_over(&self) -> bool {
        let (_, num_violations) = self.shared.violations();
        (self.options.stop_at_first && num_violations > 0)
            || self.shared.started.elapsed() > self.options.max_time
    }
}

/// Every placement that was published, as far as one watcher sees it.
struct Epochs {
    watch: PlacementWatch,
    seen: std::thread::JoinHandle<Seen>,
}

#[derive(Default)]
struct Seen {
    tables: BTreeMap<(String, u64), String>,
    faults: Vec<String>,
}

impl Epochs {
    fn watch(cluster: &LocalCluster) -> Result<Self> {
        let control = ControlClient::new(&cluster.control_url(), Some(cluster.token().to_owned()))?;
        let watch = PlacementWatch::spawn_thread(&control, WatchOptions::default())?;
        let mut tables = watch.tables();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .context("cannot start a runtime")?;
        let seen = std::thread::spawn(move || {
            let mut seen = Seen::default();
            // Ends when the watch is dropped.
            while runtime.block_on(tables.changed()).is_ok() {
                let table = tables.borrow_and_update().clone();
                seen.note(&table);
            }
            seen
        });
        Ok(Self { watch, seen })
    }

    fn judge(self, shared: &Shared) -> u64 {
        drop(self.watch);
        let Ok(seen) = self.seen.join() else {
            shared.violated(Rule::Epochs, "the watcher panicked".to_owned());
            return 0;
        };
        for fault in seen.faults {
            shared.violated(Rule::Epochs, fault);
        }
        seen.tables.len() as u64
    }
}

impl Seen {
    fn note(&mut self, table: &control_api::PlacementTable) {
        let key = (table.cluster_id.clone(), table.epoch);
        let text = serde_json::to_string(table).unwrap_or_default();
        if let Some((newest, _)) = self.tables.last_key_value() {
            if newest.0 != key.0 {
                self.faults.push(format!("cluster {} became {}", newest.0, key.0));
            } else if newest.1 > key.1 {
                self.faults.push(format!("epoch {} came after {}", key.1, newest.1));
            }
        }
        match self.tables.get(&key) {
            Some(earlier) if *earlier != text => {
                self.faults.push(format!("epoch {} was issued twice", key.1));
            }
            _ => drop(self.tables.insert(key, text)),
        }
    }
}

fn sum_up(
    options: &RigOptions,
    shared: &Shared,
    schedule: Vec<Event>,
    happened: &[EventRecord],
    layers: &[LayerRecord],
    num_epochs: u64,
) -> Report {
    let accounts: BTreeMap<String, f64> =
        ACCOUNTS.into_iter().map(|name| (name.to_owned(), metric(&shared.client, name))).collect();
    for (name, value) in accounts.iter().filter(|(_, value)| **value != 0.0) {
        shared.violated(Rule::Accounts, format!("{name} is {value}, expected 0"));
    }
    let undisturbed = layers.iter().filter(|layer| {
        let disturbed = |e: &EventRecord| layer.end_ns >= e.at_ns && layer.begin_ns <= e.whole_ns;
        layer.num_tokens > 0 && !layer.overlapped && !happened.iter().any(disturbed)
    });
    let undisturbed: Vec<u64> = undisturbed.map(|layer| layer.end_ns - layer.begin_ns).collect();
    let steady = Times::of(undisturbed.clone());
    let deadline_ms = options.deadline.as_millis() as u64;
    let steady_ns = (steady.p50_ms * 1e6) as u64;
    let steady_beyond_10_ms = undisturbed.iter().filter(|&&ns| ns > steady_ns + 10_000_000).count();
    let (kinds, unexplained_failovers) = by_kind(happened, layers, steady_ns, deadline_ms);
    let (violations, num_violations) = shared.violations();
    Report {
        seed: options.seed,
        sound: num_violations == 0,
        violations,
        num_violations,
        layers: shared.layers.load(Ordering::Relaxed),
        tokens: layers.iter().map(|layer| u64::from(layer.num_tokens)).sum(),
        expected_errors: shared.expected_errors.load(Ordering::Relaxed),
        abandoned: shared.abandoned.load(Ordering::Relaxed),
        wall_s: shared.started.elapsed().as_secs_f64(),
        servers: options.servers,
        replicas: options.replicas,
        threads: options.threads,
        deadline_ms,
        steady,
        steady_beyond_10_ms,
        kinds,
        unexplained_failovers,
        accounts,
        failovers: metric_by_label(&shared.client, FAILOVERS),
        epochs: num_epochs,
        schedule,
    }
}

const FAILOVERS: &str = "switchyard_client_failovers_total";
/// Counters that no fault of a server may move: a retired slot is never read.
const ACCOUNTS: [&str; 4] = [
    "switchyard_client_lost_requests_total",
    "switchyard_client_duplicated_requests_total",
    "switchyard_client_stale_responses_total",
    "switchyard_client_invalid_responses_total",
];
const NUM_INPUTS: usize = 32;
const START_PATIENCE: Duration = Duration::from_secs(60);
const WHOLE_PATIENCE: Duration = Duration::from_secs(30);
const PROGRESS_PATIENCE: Duration = Duration::from_secs(30);
const REPLICA_WAIT: Duration = Duration::from_secs(10);
const OUTAGE_WAIT: Duration = Duration::from_millis(300);
