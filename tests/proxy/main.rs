//! Dispatch and combine with failover, every operation of client and servers through lanes and threads of
//! a proxy, over libfabric; with the feature `verbs` and `SWITCHYARD_TEST_TRANSPORT=verbs` over RDMA.

use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use attention_client::{ClientModel, ExpertBackend, LocalExperts, MoeClient};
use checkpoint::Checkpoint;
use control_api::{LayerPlacement, MemberId, PlacementTable, ServerEntry};
use expert_server::{ExpertSelection, ExpertServer, Placement, RunningServer, ServerConfig};
use p2p_core::backend::libfabric::FabricNetwork;
use p2p_core::endpoint::Endpoint;
use p2p_core::network::{Joined, Network, NetworkError, OpenSide, Route, SideDescription};
use p2p_core::region::{LocalRange, RemoteRange, SlotKey};
use p2p_core::wait::Driver;
use p2p_core::{
    AnyEndpoint, PostError, QuietError, Region, SlotConfig, SlotLayout, TransportKind, Transports,
};
use proxy::{LaneConfig, Proxy, ProxyConfig, ProxyNetwork, ThreadStats};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

#[path = "../src/skip.rs"]
mod skip;

/// Small enough that most requests take many frames.
const SLOT: SlotConfig = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
const NUM_SERVERS: usize = 3;

#[test]
fn layers_are_computed_through_the_proxies() {
    let Some(mut rig) = Rig::start() else { return };
    for round in 0..20 {
        rig.forward(round);
    }
    rig.finish(0);
}

#[test]
fn a_server_that_goes_is_replaced() {
    let Some(mut rig) = Rig::start() else { return };
    rig.forward(0);
    let server = rig.servers[1].take().expect("a server");
    let handle = rig.runtime.handle().clone();
    let leaving = std::thread::spawn(move || handle.block_on(server.shutdown()));
    let mut round = 1;
    while !leaving.is_finished() || round < 12 {
        rig.forward(round);
        round += 1;
    }
    leaving.join().expect("the server");
    // It may have owed an answer or not.
    rig.finish(1);
}

#[test]
fn a_request_whose_post_fails_is_sent_to_a_replica() {
    for nth in [1, 4, 9] {
        let Some(mut rig) = Rig::start() else { return };
        for round in 0..3 {
            rig.forward(round);
        }
        // Of the client's operations, behind its lanes.
        rig.fault.left.store(nth, Ordering::SeqCst);
        for round in 3..10 {
            rig.forward(round);
        }
        assert!(rig.fault.left.load(Ordering::SeqCst) <= 0, "the fault was not met");
        // Whether anything had to be sent again depends on what failed: a credit or a frame.
        rig.finish(1);
    }
}

/// Servers with two replicas of every expert, and a client that verifies every answer.
struct Rig {
    runtime: tokio::runtime::Runtime,
    servers: Vec<Option<RunningServer>>,
    proxy: Arc<Proxy>,
    fault: Arc<Fault>,
    client: MoeClient,
    model: ClientModel,
    local: LocalExperts,
    rng: StdRng,
    num_failovers: u32,
}

impl Rig {
    /// `None`, loudly, where the transport is not.
    fn start() -> Option<Self> {
        let seed = std::env::var("SWITCHYARD_SEED").ok().and_then(|seed| seed.parse().ok());
        let seed: u64 = seed.unwrap_or_else(rand::random);
        println!("SWITCHYARD_SEED={seed}");
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("runtime");
        let checkpoint = Arc::new(Checkpoint::open(tiny_moe()).expect("checkpoint"));
        let model = ClientModel::of(&checkpoint);
        let num_experts = model.shape.num_experts as usize;
        let holders = |expert: usize| [expert % NUM_SERVERS, (expert + 1) % NUM_SERVERS];
        let servers: Vec<Option<RunningServer>> = (0..NUM_SERVERS)
            .map(|server| {
                let held = (0..num_experts).filter(|&expert| holders(expert).contains(&server));
                let held = ExpertSelection::EveryLayer(held.map(|expert| expert as u32).collect());
                let name = format!("server-{server}");
                let mut config = ServerConfig::new(tiny_moe(), name, Placement::Static(held));
                let (transports, _) = behind_proxy(transport()?);
                config.transports = transports;
                config.slot = SLOT;
                config.num_threads = 1;
                let server = runtime.block_on(ExpertServer::start(config, |_| {}));
                Some(Some(server.expect("server")))
            })
            .collect::<Option<_>>()?;
        let addrs = servers.iter().flatten().map(|server| server.data_addr().to_string());
        let replicas: Vec<Vec<u32>> =
            (0..num_experts).map(|expert| holders(expert).map(|s| s as u32).to_vec()).collect();
        let table = table(&model, addrs.collect(), &replicas);
        let fault = Arc::new(Fault { left: AtomicI64::new(i64::MAX) });
        let faulty = Arc::new(FaultyNetwork { inner: transport()?, fault: Arc::clone(&fault) });
        let (transports, proxy) = behind_proxy(faulty);
        let client = MoeClient::builder(model.clone())
            .placement(table)
            .slot(SLOT)
            .transports(transports)
            .deadline(Duration::from_secs(10))
            .replica_wait(Duration::from_secs(10))
            .build()
            .expect("client");
        client.wait_ready(Duration::from_secs(30)).expect("servers");
        let local = LocalExperts::new(checkpoint);
        let rng = StdRng::seed_from_u64(seed);
        let num_failovers = 0;
        Some(Self { runtime, servers, proxy, fault, client, model, local, rng, num_failovers })
    }

    /// A random layer, compared with the same experts computed in this process.
    fn forward(&mut self, round: usize) {
        let (hidden, top_k) = (self.model.shape.hidden as usize, 4);
        let num_tokens = [1, 20, 150][round % 3];
        let rng = &mut self.rng;
        let layer = self.model.moe_layers[rng.random_range(0..self.model.moe_layers.len())];
        let x: Vec<f32> = (0..num_tokens * hidden).map(|_| rng.random_range(-2.0..2.0)).collect();
        let num_experts = self.model.shape.num_experts as i32;
        let experts: Vec<i32> =
            (0..num_tokens * top_k).map(|_| rng.random_range(-1..num_experts)).collect();
        let weights: Vec<f32> =
            (0..num_tokens * top_k).map(|_| rng.random_range(-0.5..1.5)).collect();
        let mut expected = vec![f32::NAN; x.len()];
        self.local.forward(layer, &x, &experts, &weights, &mut expected).expect("reference");
        let mut found = vec![f32::NAN; x.len()];
        let timing = self.client.forward(layer, &x, &experts, &weights, &mut found);
        self.num_failovers += timing.expect("an answer").failovers;
        let scale = expected.iter().fold(1e-3f32, |max, value| max.max(value.abs()));
        for (found, expected) in found.iter().zip(&expected) {
            assert!((found - expected).abs() / scale < 1e-5, "round {round}: {found}, {expected}");
        }
    }

    fn finish(self, most_failovers: u32) {
        assert!(self.num_failovers <= most_failovers, "{} failovers", self.num_failovers);
        for name in ["lost", "duplicated"] {
            let name = format!("switchyard_client_{name}_requests_total");
            let families = self.client.registry().gather();
            let family = families.iter().find(|family| family.name() == name);
            let family = family.unwrap_or_else(|| panic!("no metric {name}"));
            assert!(family.get_metric().iter().all(|m| m.get_counter().get_value() == 0.0));
        }
        let commands: u64 =
            self.proxy.stats().iter().map(|stats: &ThreadStats| stats.commands).sum();
        assert!(commands > 100, "{commands} commands: the client's operations went another way");
    }
}

/// The network under test, opened anew for every party.
fn transport() -> Option<Arc<dyn Network>> {
    let name = std::env::var("SWITCHYARD_TEST_TRANSPORT").unwrap_or_default();
    #[cfg(feature = "verbs")]
    if name == "verbs" {
        use p2p_core::backend::verbs::{VerbsConfig, VerbsNetwork};
        return match VerbsNetwork::open(VerbsConfig::default()) {
            Ok(network) => Some(Arc::new(network)),
            Err(error) => {
                skip::skip("rdma", &error.to_string());
                None
            }
        };
    }
    let provider = if name.is_empty() { "tcp;ofi_rxm" } else { name.as_str() };
    match FabricNetwork::open(provider) {
        Ok(network) => Some(Arc::new(network)),
        Err(error) => {
            skip::skip("libfabric", &error.to_string());
            None
        }
    }
}

fn behind_proxy(inner: Arc<dyn Network>) -> (Transports, Arc<Proxy>) {
    let kind = inner.kind();
    let proxy = Arc::new(Proxy::start(&ProxyConfig::default()).expect("threads"));
    // Shallow, so that lanes wrap and fill.
    let lanes = LaneConfig { num_lanes: 1, depth: 64, budget: 48 };
    let network = ProxyNetwork::new(inner, Arc::clone(&proxy), lanes);
    let networks = vec![Arc::new(network) as Arc<dyn Network>];
    (Transports { kinds: vec![kind], networks, missing: Vec::new() }, proxy)
}

/// Puts, gets and adds until one fails.
#[derive(Debug)]
struct Fault {
    left: AtomicI64,
}

#[derive(Debug)]
struct FaultyNetwork {
    inner: Arc<dyn Network>,
    fault: Arc<Fault>,
}

#[derive(Debug)]
struct FaultySide(Box<dyn OpenSide>, Arc<Fault>);

#[derive(Debug)]
struct FaultyEndpoint(AnyEndpoint, Arc<Fault>);

impl Network for FaultyNetwork {
    fn kind(&self) -> TransportKind {
        self.inner.kind()
    }

    fn flavour(&self) -> &str {
        self.inner.flavour()
    }

    fn open(&self, layout: &SlotLayout, route: Route) -> Result<Box<dyn OpenSide>, NetworkError> {
        Ok(Box::new(FaultySide(self.inner.open(layout, route)?, Arc::clone(&self.fault))))
    }
}

impl OpenSide for FaultySide {
    fn description(&self) -> SideDescription {
        self.0.description()
    }

    fn join(self: Box<Self>, peer: &SideDescription) -> Result<Joined, NetworkError> {
        let Joined { endpoint, slot } = self.0.join(peer)?;
        let endpoint = AnyEndpoint::Other(Box::new(FaultyEndpoint(endpoint, self.1)));
        Ok(Joined { endpoint, slot })
    }
}

impl FaultyEndpoint {
    fn count(&self, op: &'static str) -> Result<(), PostError> {
        if self.1.left.fetch_sub(1, Ordering::SeqCst) == 1 {
            let detail = "injected".to_owned();
            return Err(PostError::Transport { op, code: -5, detail });
        }
        Ok(())
    }
}

impl Endpoint for FaultyEndpoint {
    type RemoteKey = SlotKey;

    fn kind(&self) -> TransportKind {
        self.0.kind()
    }

    fn register(&mut self, region: &Region) -> Result<(), PostError> {
        self.0.register(region)
    }

    fn driver(&self) -> Option<Arc<dyn Driver>> {
        self.0.driver()
    }

    fn health(&self) -> Result<(), PostError> {
        self.0.health()
    }

    fn direct(&self, key: SlotKey) -> Option<NonNull<u8>> {
        self.0.direct(key)
    }

    unsafe fn put(&mut self, dst: RemoteRange<SlotKey>, src: LocalRange) -> Result<(), PostError> {
        self.count("put")?;
        // SAFETY: the caller's promise.
        unsafe { self.0.put(dst, src) }
    }

    unsafe fn get(&mut self, dst: LocalRange, src: RemoteRange<SlotKey>) -> Result<(), PostError> {
        self.count("get")?;
        // SAFETY: the caller's promise.
        unsafe { self.0.get(dst, src) }
    }

    fn add_flag(&mut self, dst: RemoteRange<SlotKey>, value: u64) -> Result<(), PostError> {
        self.count("add_flag")?;
        self.0.add_flag(dst, value)
    }

    fn fence(&mut self) -> Result<(), PostError> {
        self.0.fence()
    }

    fn quiet(&mut self, deadline: Instant) -> Result<(), QuietError> {
        self.0.quiet(deadline)
    }

    fn is_settled(&mut self) -> Result<bool, PostError> {
        self.0.is_settled()
    }

    fn wake(&mut self, key: SlotKey, waiting_offset: usize) -> Result<(), PostError> {
        self.0.wake(key, waiting_offset)
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.0.wait_fd()
    }
}

fn tiny_moe() -> PathBuf {
    // In a guest the model is somewhere else.
    let given = std::env::var_os("SWITCHYARD_TEST_MODEL").map(PathBuf::from);
    given.unwrap_or_else(|| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../data/tiny-moe")))
}

/// The same replicas in every layer.
fn table(model: &ClientModel, addrs: Vec<String>, replicas: &[Vec<u32>]) -> PlacementTable {
    let servers = addrs.into_iter().enumerate().map(|(idx, data_addr)| ServerEntry {
        member_id: MemberId::parse(&format!("m-{idx}")).expect("id"),
        name: format!("server-{idx}"),
        incarnation: 1,
        data_addr,
    });
    let layers =
        model.moe_layers.iter().map(|&layer| LayerPlacement { layer, replicas: replicas.to_vec() });
    PlacementTable {
        cluster_id: "test".to_owned(),
        epoch: 1,
        model: Some(model.descriptor()),
        servers: servers.collect(),
        layers: layers.collect(),
    }
}
