//! Servers in this process with two replicas of every expert, and a client that verifies every answer, over a transport
//! under test.

use std::sync::Arc;
use std::time::Duration;

use attention_client::{ClientModel, ExpertBackend, MoeClient};
use checkpoint::Checkpoint;
use control_api::{LayerPlacement, MemberId, PlacementTable, ServerEntry};
use expert_server::{ExpertSelection, ExpertServer, Placement, RunningServer, ServerConfig};
use p2p_core::{SlotConfig, Transports};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use reference_model::LocalExperts;
use test_support::model::tiny_moe;
use test_support::printed_seed;
use tokio::runtime::Runtime;

use crate::inputs::difference;

/// Servers of a [`Replicas`].
pub const NUM_SERVERS: usize = 3;
/// Small enough that most requests take many frames.
const SLOT: SlotConfig = SlotConfig { slot_bytes: 64 << 10, num_frames: 2 };
/// Longest wait for servers to be ready, and for a replacement.
const PATIENCE: Duration = Duration::from_secs(30);

/// A member that gets transports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Party {
    /// The server of this index.
    Server(usize),
    /// The client.
    Client,
}

/// The servers and their client.
#[derive(Debug)]
pub struct Replicas {
    runtime: Runtime,
    servers: Vec<Option<RunningServer>>,
    client: MoeClient,
    model: ClientModel,
    local: LocalExperts,
    rng: StdRng,
    num_failovers: u32,
}

impl Replicas {
    /// Starts all of them, each with its transports from `transports`. `None` if that returns `None`.
    ///
    /// # Panics
    /// When anything else fails, as all methods do.
    pub fn start(mut transports: impl FnMut(Party) -> Option<Transports>) -> Option<Self> {
        let rng = StdRng::seed_from_u64(printed_seed());
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
                config.transports = transports(Party::Server(server))?;
                config.slot = SLOT;
                config.num_threads = 1;
                let server = runtime.block_on(ExpertServer::start(config, |_| {}));
                Some(Some(server.expect("server")))
            })
            .collect::<Option<_>>()?;
        let addrs = servers.iter().flatten().map(|server| server.data_addr().to_string());
        let replicas: Vec<Vec<u32>> =
            (0..num_experts).map(|expert| holders(expert).map(|s| s as u32).to_vec()).collect();
        let client = MoeClient::builder(model.clone())
            .placement(table(&model, addrs.collect(), &replicas))
            .slot(SLOT)
            .transports(transports(Party::Client)?)
            .deadline(Duration::from_secs(10))
            .replica_wait(Duration::from_secs(10))
            .build()
            .expect("client");
        client.wait_ready(PATIENCE).expect("servers");
        let local = LocalExperts::new(checkpoint);
        Some(Self { runtime, servers, client, model, local, rng, num_failovers: 0 })
    }

    /// Computes random layers, one a round, and compares each with the same experts computed in this process.
    pub fn forward(&mut self, rounds: std::ops::Range<usize>) {
        rounds.for_each(|round| self.layer(round));
    }

    /// Stops a server in the middle of layers: the client resends at most one request.
    pub fn lose_a_server(&mut self) {
        self.layer(0);
        let server = self.servers[1].take().expect("a server");
        let handle = self.runtime.handle().clone();
        let leaving = std::thread::spawn(move || handle.block_on(server.shutdown()));
        let mut round = 1;
        while !leaving.is_finished() || round < 12 {
            self.layer(round);
            round += 1;
        }
        leaving.join().expect("the server");
    }

    /// Checks that nothing was lost or counted twice, and that at most `most_failovers` requests were resent.
    pub fn check(&self, most_failovers: u32) {
        assert!(self.num_failovers <= most_failovers, "{} failovers", self.num_failovers);
        for name in ["lost", "duplicated"] {
            let name = format!("switchyard_client_{name}_requests_total");
            let families = self.client.registry().gather();
            let family = families.iter().find(|family| family.name() == name);
            let family = family.unwrap_or_else(|| panic!("no metric {name}"));
            assert!(family.get_metric().iter().all(|m| m.get_counter().get_value() == 0.0));
        }
    }

    /// Number of requests resent so far.
    pub const fn num_failovers(&self) -> u32 {
        self.num_failovers
    }

    fn layer(&mut self, round: usize) {
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
        let difference = difference(&found, &expected);
        assert!(difference < 1e-5, "round {round}: off by {difference}");
    }
}

/// The placement of epoch 1: servers at `addrs`, and the same replicas of the experts in every layer.
///
/// # Panics
/// Never: the names are valid.
#[must_use]
pub fn table(model: &ClientModel, addrs: Vec<String>, replicas: &[Vec<u32>]) -> PlacementTable {
    let servers = addrs.into_iter().enumerate().map(|(idx, data_addr)| ServerEntry {
        member_id: MemberId::parse(&format!("m-{idx}")).expect("id"),
        name: format!("server-{idx}"),
        incarnation: 1,
        data_addr,
        needs_tickets: false,
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
