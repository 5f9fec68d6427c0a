//! Dispatch and combine with failover over software NICs: every server and the client have one of their
//! own, and nothing goes any other way.

mod fused;
#[path = "../../kernels/tests/against_rust/library.rs"]
#[allow(dead_code, reason = "the kernels' own tests use the rest")]
mod library;
mod runner;
#[path = "../../kernels/tests/against_rust/world.rs"]
#[allow(dead_code, reason = "the kernels' own tests use the rest")]
mod world;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use attention_client::{ClientModel, ExpertBackend, LocalExperts, MoeClient};
use checkpoint::Checkpoint;
use control_api::{LayerPlacement, MemberId, PlacementTable, ServerEntry};
use expert_server::{ExpertSelection, ExpertServer, Placement, RunningServer, ServerConfig};
use p2p_core::network::Network;
use p2p_core::{SlotConfig, TransportKind, Transports};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use softnic::format::Syndrome;
use softnic::{Adversary, DoorbellMode, Fault, NicConfig, SoftNetwork};

/// Small enough that most requests take many frames.
const SLOT: SlotConfig = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
const NUM_SERVERS: usize = 3;

#[test]
fn layers_are_computed_through_the_nics() {
    let mut rig = Rig::start(None);
    for round in 0..25 {
        rig.forward(round);
    }
    rig.finish(0);
}

#[test]
fn nics_that_delay_and_reorder_change_nothing() {
    let mut rig = Rig::start(Some(rand::random()));
    for round in 0..8 {
        rig.forward(round);
    }
    rig.finish(0);
}

#[test]
fn a_server_that_goes_is_replaced() {
    let mut rig = Rig::start(None);
    rig.forward(0);
    let (server, _network) = rig.servers[1].take().expect("a server");
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
fn a_request_that_its_nic_gives_up_is_sent_to_a_replica() {
    for syndrome in [Syndrome::RetryExceeded, Syndrome::RemoteAccess, Syndrome::LocalQpOp] {
        let mut rig = Rig::start(None);
        for round in 0..3 {
            rig.forward(round);
        }
        // The client's first queue pair, in the middle of its work.
        let qpn = 0x40;
        rig.network.nic().inject(Fault::Fail { qpn, nth: 5, syndrome }).expect("the queue");
        for round in 3..10 {
            rig.forward(round);
        }
        let num_failures = rig.network.nic().num_failures();
        assert!(num_failures >= 1, "the fault was not met");
        rig.finish(1);
    }
}

/// Servers with two replicas of every expert, and a client that verifies every answer.
struct Rig {
    runtime: tokio::runtime::Runtime,
    servers: Vec<Option<(RunningServer, Arc<SoftNetwork>)>>,
    network: Arc<SoftNetwork>,
    client: MoeClient,
    model: ClientModel,
    local: LocalExperts,
    rng: StdRng,
    num_failovers: u32,
}

impl Rig {
    fn start(adversary: Option<u64>) -> Self {
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
        let servers: Vec<_> = (0..NUM_SERVERS)
            .map(|server| {
                let held = (0..num_experts).filter(|&expert| holders(expert).contains(&server));
                let held = ExpertSelection::EveryLayer(held.map(|expert| expert as u32).collect());
                let name = format!("server-{server}");
                let mut config = ServerConfig::new(tiny_moe(), name, Placement::Static(held));
                let network = network(adversary.map(|seed| seed ^ server as u64));
                config.transports = transports(&network);
                config.slot = SLOT;
                config.num_threads = 1;
                let server = runtime.block_on(ExpertServer::start(config, |_| {}));
                Some((server.expect("server"), network))
            })
            .collect();
        let addrs = servers.iter().flatten().map(|(server, _)| server.data_addr().to_string());
        let replicas: Vec<Vec<u32>> =
            (0..num_experts).map(|expert| holders(expert).map(|s| s as u32).to_vec()).collect();
        let table = table(&model, addrs.collect(), &replicas);
        let network = network(adversary.map(|seed| !seed));
        let client = MoeClient::builder(model.clone())
            .placement(table)
            .slot(SLOT)
            .transports(transports(&network))
            .deadline(Duration::from_secs(10))
            .replica_wait(Duration::from_secs(10))
            .build()
            .expect("client");
        client.wait_ready(Duration::from_secs(30)).expect("servers");
        let local = LocalExperts::new(checkpoint);
        let rng = StdRng::seed_from_u64(seed);
        let num_failovers = 0;
        Self { runtime, servers, network, client, model, local, rng, num_failovers }
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
        let networks = self.servers.iter().flatten().map(|(_, network)| network);
        for network in networks.chain([&self.network]) {
            let nic = network.nic();
            assert!(nic.violations().is_empty(), "{:?}", nic.violations().first());
        }
    }
}

fn network(adversary: Option<u64>) -> Arc<SoftNetwork> {
    let config = NicConfig {
        is_strict: true,
        doorbell: DoorbellMode::Checked,
        adversary: adversary.map(|seed| Adversary { seed }),
        ..NicConfig::default()
    };
    Arc::new(SoftNetwork::open(config).expect("a NIC"))
}

fn transports(network: &Arc<SoftNetwork>) -> Transports {
    let networks = vec![Arc::clone(network) as Arc<dyn Network>];
    Transports { kinds: vec![TransportKind::SoftNic], networks, missing: Vec::new() }
}

fn tiny_moe() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../data/tiny-moe"))
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
