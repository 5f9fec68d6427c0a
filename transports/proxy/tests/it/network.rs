//! The suite that every transport must pass, with a proxy in between. It runs over the NIC model, also over one
//! that delays and reorders, and between processes over libfabric if that is installed.

use crate::common;
use crate::parties;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::{Behaviour, Recorder, config};
use crate::parties::{TransportSetup, in_processes, in_threads, pair, var};
use bench_harness::proxy::BenchEndpoint;
use bench_harness::proxy::remote::{self, Plan, Received, RemoteFigures};
use kernels::gpu::Gpu;
use p2p_core::endpoint::{Batch, Endpoint, Progress};
use p2p_core::network::{JoinedSide, Network, NetworkError, OpenSide, Route, SideDescription};
use p2p_core::region::{LocalRange, RemoteRange, SlotKey};
use p2p_core::{AnyEndpoint, PostError, QuietError, Region, SlotConfig, SlotLayout, TransportKind};
use softnic::{Adversary, DoorbellMode, NicConfig, SoftNetwork};
use switchyard_proxy::{LaneConfig, Proxy, ProxyConfig, ProxyNetwork};

/// Small, so that posting often finds no room.
const LANES: LaneConfig = LaneConfig { num_lanes: 1, depth: 32, budget: 24 };

fn behind(inner: Arc<dyn Network>) -> ProxyNetwork {
    ProxyNetwork::new(inner, Arc::new(Proxy::start(&config(1)).unwrap()), LANES)
}

fn softnic(adversary: Option<u64>) -> Arc<SoftNetwork> {
    let config = NicConfig {
        is_strict: true,
        doorbell: DoorbellMode::Checked,
        adversary: adversary.map(|seed| Adversary { seed }),
        ..NicConfig::default()
    };
    Arc::new(SoftNetwork::open(config).unwrap())
}

#[test]
fn both_sides_behind_a_proxy() {
    let (a, b) = (behind(softnic(None)), behind(softnic(None)));
    in_threads(|config| pair(&a, &b, config));
}

#[test]
fn one_side_behind_a_proxy_over_a_nic_that_delays_and_reorders() {
    let (a, b) = (behind(softnic(Some(rand::random()))), softnic(Some(rand::random())));
    in_threads(|config| pair(&a, &*b, config));
}

/// The network that a test between processes is about.
fn libfabric() -> Option<Arc<dyn Network>> {
    use libfabric_transport::FabricNetwork;
    let provider = std::env::var("SWITCHYARD_TEST_PROVIDER");
    match FabricNetwork::open(provider.as_deref().unwrap_or("tcp;ofi_rxm")) {
        Ok(network) => Some(Arc::new(network)),
        Err(error) => {
            test_support::skip("libfabric", &error.to_string());
            None
        }
    }
}

fn verbs() -> Option<Arc<dyn Network>> {
    use p2p_core::OpenNetworks;
    use verbs_transport::VerbsConfig;
    let mut networks =
        OpenNetworks::default().with(verbs_transport::opener(VerbsConfig::default()));
    match networks.open(&"verbs".parse().unwrap()) {
        Ok(opened) => opened.networks.into_iter().next(),
        Err(error) => {
            test_support::skip("rdma", &error.to_string());
            None
        }
    }
}

fn named(name: &str) -> Option<Arc<dyn Network>> {
    match name {
        "libfabric" => libfabric(),
        "verbs" => verbs(),
        _ => Some(softnic(None)),
    }
}

#[test]
fn processes_over_the_nic_model() {
    processes("softnic");
}

#[test]
fn processes_over_libfabric() {
    processes("libfabric");
}

#[test]
fn processes_over_verbs() {
    processes("verbs");
}

/// A network of one recorder.
#[derive(Debug)]
struct Recording(Arc<Behaviour>);

impl Network for Recording {
    fn kind(&self) -> TransportKind {
        TransportKind::Staged
    }

    fn flavour(&self) -> &str {
        "recording"
    }

    fn open(&self, layout: &SlotLayout, _: Route) -> Result<Box<dyn OpenSide>, NetworkError> {
        let slot = Region::anonymous(layout.slot_bytes()).unwrap();
        Ok(Box::new(RecordingSide(Arc::clone(&self.0), slot)))
    }
}

#[derive(Debug)]
struct RecordingSide(Arc<Behaviour>, Region);

impl OpenSide for RecordingSide {
    fn description(&self) -> SideDescription {
        SideDescription::default()
    }

    fn join(self: Box<Self>, _: &SideDescription) -> Result<JoinedSide, NetworkError> {
        let endpoint = AnyEndpoint::Other(Box::new(Recorder::new(self.0, 0)));
        Ok(JoinedSide { endpoint, slot: self.1 })
    }
}

/// An endpoint through a proxy to a recorder.
fn recorded(behaviour: &Arc<Behaviour>, config: &ProxyConfig) -> AnyEndpoint {
    let proxy = Arc::new(Proxy::start(config).unwrap());
    let lanes = LaneConfig { num_lanes: 1, depth: 16, budget: 4 };
    let network = ProxyNetwork::new(Arc::new(Recording(Arc::clone(behaviour))), proxy, lanes);
    let layout = SlotLayout::new(SlotConfig { slot_bytes: 8 << 10, num_frames: 1 }).unwrap();
    let side = network.open(&layout, parties::ROUTE).unwrap();
    side.join(&SideDescription::default()).unwrap().endpoint
}

#[test]
fn why_a_peer_failed_is_said_as_often_as_it_is_asked() {
    let behaviour = Arc::new(Behaviour::default());
    behaviour.fail_at.store(1, Ordering::SeqCst);
    let mut end = recorded(&behaviour, &config(1));
    let dst = RemoteRange { key: SlotKey, offset: 0, len: 8 };
    end.add_flag(dst, 1).unwrap();
    common::wait_for("the failure", || end.health().is_err());
    for _ in 0..3 {
        let answers = [end.health().unwrap_err(), end.is_settled().unwrap_err()];
        for error in answers.into_iter().chain(end.add_flag(dst, 1).err()) {
            assert!(
                error.to_string().contains("add_flag: transport error -5: injected"),
                "{error}"
            );
        }
    }
}

/// `benchmark_remote`, both sides in this process.
fn benchmark(
    from: &dyn Network,
    to: &dyn Network,
) -> (anyhow::Result<RemoteFigures>, anyhow::Result<Received>) {
    benchmark_from(None, from, to)
}

fn benchmark_from(
    gpu: Option<&Gpu>,
    from: &dyn Network,
    to: &dyn Network,
) -> (anyhow::Result<RemoteFigures>, anyhow::Result<Received>) {
    let plan = if gpu.is_some() { GPU_PLAN } else { PLAN };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| remote::receive(to, &listener, common::LIMIT));
        let figures = remote::send(from, address, plan, &config(2), gpu);
        (figures, receiving.join().unwrap())
    })
}

const PLAN: Plan = Plan {
    threads: 2,
    object_bytes: 1032,
    budget: 8,
    batch: 3,
    commands: 100,
    checks: 5,
    is_gpu: false,
};
const GPU_PLAN: Plan = Plan { object_bytes: 1040, batch: 4, is_gpu: true, ..PLAN };
/// Objects of each thread in rounds, and the remainder of timed ones of all threads.
const ROUNDS: u64 = 5 * 8;
const LEFT: u64 = 2 * 8;

fn benchmark_compares_every_object(from: &dyn Network, to: &dyn Network) {
    let (figures, received) = benchmark(from, to);
    let figures = figures.unwrap();
    let received = received.unwrap();
    assert_eq!((received.plan, received.checked), (PLAN, figures.checked));
    assert_eq!(received.checked_timed, figures.checked_timed);
    // One thread's objects go one by one.
    assert_eq!((figures.plan, figures.objects), (PLAN, 200));
    assert_eq!((figures.checked, figures.checked_timed), (2 * ROUNDS, LEFT + 8));
    assert!(figures.latency.is_some() && figures.one.is_some() && figures.wall_ms > 0.0);
}

#[test]
fn the_benchmark_between_hosts_over_the_nic_model() {
    benchmark_compares_every_object(&*softnic(None), &*softnic(None));
}

#[test]
fn the_benchmark_between_hosts_over_libfabric() {
    if let (Some(from), Some(to)) = (libfabric(), libfabric()) {
        benchmark_compares_every_object(&*from, &*to);
    }
}

#[test]
fn the_benchmark_between_hosts_notices_what_does_not_arrive() {
    let recording = || Recording(Arc::new(Behaviour::default()));
    let (figures, received) = benchmark(&recording(), &recording());
    assert!(figures.is_err());
    let error = received.unwrap_err();
    assert!(error.to_string().contains("counters [0, 0], expected 1"), "{error:#}");
}

#[test]
fn the_benchmark_between_hosts_from_a_gpu_compares_every_round() {
    let Some(gpu) = common::software_gpu() else { return };
    let (figures, received) = benchmark_from(Some(&gpu), &*softnic(None), &*softnic(None));
    let (figures, received) = (figures.unwrap(), received.unwrap());
    assert_eq!((received.plan, received.checked), (GPU_PLAN, figures.checked));
    assert_eq!(received.checked_timed, figures.checked_timed);
    assert_eq!((figures.plan, figures.objects), (GPU_PLAN, 200));
    assert_eq!((figures.checked, figures.checked_timed), (2 * ROUNDS, 2 * LEFT));
    assert!(figures.latency.is_some() && figures.one.is_some());
}

/// Slots of this process. From each thread's put number `from` on, `num` puts are lost.
#[derive(Debug)]
struct Losing {
    slots: Arc<Mutex<Vec<Region>>>,
    from: u64,
    num: u64,
}

#[derive(Debug)]
struct LosingSide {
    slots: Arc<Mutex<Vec<Region>>>,
    slot: Region,
    number: usize,
    lost: Range<u64>,
}

#[derive(Debug)]
struct LosingEndpoint {
    inner: BenchEndpoint,
    num_puts: u64,
    lost: Range<u64>,
}

impl Losing {
    fn pair(from: u64, num: u64) -> [Self; 2] {
        let slots = Arc::default();
        [Self { slots: Arc::clone(&slots), from, num }, Self { slots, from, num }]
    }
}

impl Network for Losing {
    fn kind(&self) -> TransportKind {
        TransportKind::Staged
    }

    fn flavour(&self) -> &str {
        "losing"
    }

    fn open(&self, layout: &SlotLayout, _: Route) -> Result<Box<dyn OpenSide>, NetworkError> {
        let slot = Region::anonymous(layout.slot_bytes()).unwrap();
        let mut slots = self.slots.lock().unwrap();
        slots.push(slot.clone());
        let (number, lost) = (slots.len() - 1, self.from..self.from + self.num);
        Ok(Box::new(LosingSide { slots: Arc::clone(&self.slots), slot, number, lost }))
    }
}

impl OpenSide for LosingSide {
    fn description(&self) -> SideDescription {
        SideDescription { address: self.number as u64, ..SideDescription::default() }
    }

    fn join(self: Box<Self>, peer: &SideDescription) -> Result<JoinedSide, NetworkError> {
        let target = self.slots.lock().unwrap()[peer.address as usize].clone();
        let event = Arc::new(p2p_core::wait::event_fd().unwrap());
        let inner = BenchEndpoint::copy(target, &event);
        let endpoint = LosingEndpoint { inner, num_puts: 0, lost: self.lost };
        Ok(JoinedSide { endpoint: AnyEndpoint::Other(Box::new(endpoint)), slot: self.slot })
    }
}

impl Endpoint for LosingEndpoint {
    type RemoteKey = SlotKey;

    p2p_core::forward_endpoint! {
        register, direct, add_flag, fence, quiet, wake, wait_fd => self.inner
    }

    fn kind(&self) -> TransportKind {
        TransportKind::Staged
    }

    unsafe fn put(&mut self, dst: RemoteRange<SlotKey>, src: LocalRange) -> Result<(), PostError> {
        self.num_puts += 1;
        if self.lost.contains(&(self.num_puts - 1)) {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.inner.put(dst, src) }
    }

    unsafe fn get(&mut self, _: LocalRange, _: RemoteRange<SlotKey>) -> Result<(), PostError> {
        unreachable!("producers only put")
    }
}

impl Batch for LosingEndpoint {
    p2p_core::forward_endpoint! { begin_batch, flush => self.inner }
}

impl Progress for LosingEndpoint {
    p2p_core::forward_endpoint! {
        driver, health, add_flag_lazily, has_room, has_room_to_spare, try_fence, is_settled, marks
        => self.inner
    }
}

/// Any round, those timed at the highest rate, and those sent one by one.
#[test]
fn the_benchmark_between_hosts_notices_what_is_lost_in_any_part() {
    let gpu = common::software_gpu();
    for gpu in [None, gpu.as_ref()] {
        let timed = ROUNDS + PLAN.commands;
        let parts = [(3, 1), (8 + 5, 1), (ROUNDS - 1, 1), (ROUNDS, 100), (timed, 100)];
        for (from, num) in parts {
            let [a, b] = Losing::pair(from, num);
            let (figures, received) = benchmark_from(gpu, &a, &b);
            let error = format!("{:#}", figures.unwrap_err());
            assert!(error.contains("objects arrived wrong"), "{from}, {num}: {error}");
            assert!(received.is_err());
        }
        let [a, b] = Losing::pair(0, 0);
        let (figures, received) = benchmark_from(gpu, &a, &b);
        assert_eq!(figures.unwrap().checked, received.unwrap().checked);
    }
}

/// However long it measures: the receiver waits two minutes for a word.
#[test]
fn the_sender_of_a_benchmark_says_that_it_is_at_work() {
    let behaviour = Arc::new(Behaviour::default());
    behaviour.is_stalled.store(true, Ordering::SeqCst);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let plan = Plan { threads: 1, checks: 0, ..PLAN };
    let patient = ProxyConfig { stall_limit: Duration::from_secs(600), ..config(1) };
    std::thread::scope(|scope| {
        let network = Recording(Arc::clone(&behaviour));
        let sending = scope.spawn(move || remote::send(&network, address, plan, &patient, None));
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(common::LIMIT)).unwrap();
        let mut said = BufReader::new(stream.try_clone().unwrap()).lines().map(Result::unwrap);
        assert!(said.next().unwrap().contains("Plan"));
        let side = said.next().unwrap();
        writeln!(stream, "{side}\n\"Joined\"").unwrap();
        assert_eq!(said.next().unwrap(), "\"Joined\"");
        // Nothing is over before this side lets it be.
        assert_eq!(said.next().unwrap(), "\"Busy\"");
        assert_eq!(said.next().unwrap(), "\"Busy\"");
        behaviour.is_stalled.store(false, Ordering::SeqCst);
        for objects in [8, 8] {
            assert!(said.find(|line| line != "\"Busy\"").unwrap().contains("Check"));
            writeln!(stream, "{{\"Checked\":{{\"objects\":{objects},\"bad\":0,\"counters\":[]}}}}")
                .unwrap();
        }
        assert_eq!(said.find(|line| line != "\"Busy\"").unwrap(), "\"Done\"");
        assert_eq!(sending.join().unwrap().unwrap().objects, 100);
    });
}

#[test]
fn the_receiver_of_a_benchmark_takes_note_that_the_sender_is_at_work() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let plan = serde_json::to_string(&Plan { threads: 1, ..PLAN }).unwrap();
    let side = r#"{"Side":{"address":0,"remote_key":0,"bytes":0,"detail":[]}}"#;
    let busy = "\"Busy\"\n".repeat(3);
    write!(stream, "{{\"Plan\":{plan}}}\n{side}\n\"Joined\"\n{busy}\"Done\"\n").unwrap();
    let network = Recording(Arc::new(Behaviour::default()));
    remote::receive(&network, &listener, common::LIMIT).unwrap();
}

#[test]
fn a_quiet_ends_at_its_deadline_and_is_asked_for_once() {
    let behaviour = Arc::new(Behaviour::default());
    behaviour.is_stalled.store(true, Ordering::SeqCst);
    let patient = ProxyConfig { stall_limit: Duration::from_secs(600), ..config(1) };
    let mut end = recorded(&behaviour, &patient);
    assert!(end.quiet(Instant::now()).is_ok(), "nothing was issued");
    let add = |end: &mut AnyEndpoint| {
        let dst = RemoteRange { key: SlotKey, offset: 0, len: 8 };
        end.add_flag(dst, 1).unwrap();
    };
    (0..2).for_each(|_| add(&mut end));
    let outstanding = |end: &mut AnyEndpoint, within| match end.quiet(Instant::now() + within) {
        Err(QuietError::Deadline { outstanding }) => outstanding,
        other => panic!("{other:?}"),
    };
    // Independent of the number of polls: two flags and one quiet, which leave room for another flag.
    for _ in 0..100 {
        assert_eq!(outstanding(&mut end, Duration::ZERO), 3);
    }
    add(&mut end);
    // The lane is full, and its posts would wait for long.
    for within in [Duration::ZERO, Duration::from_millis(20)] {
        assert_eq!(outstanding(&mut end, within), 4);
    }
    assert!(!end.is_settled().unwrap());
    behaviour.is_stalled.store(false, Ordering::SeqCst);
    end.quiet(Instant::now() + common::LIMIT).unwrap();
    assert!(end.is_settled().unwrap());
    assert_eq!(behaviour.asked.lock().unwrap().len(), 3);
}

fn processes(name: &str) {
    let Some(network) = named(name) else { return };
    let setup = TransportSetup::over(Arc::new(behind(network))).with("NETWORK", name);
    in_processes(&setup, |_| true);
}

/// The other half of the tests with two processes.
pub fn child_process() {
    let network = named(&var("NETWORK").expect("a name")).expect("found by the parent");
    parties::perform_all(&TransportSetup::over(Arc::new(behind(network))));
}
