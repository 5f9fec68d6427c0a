//! Common parts of the client's tests: random requests, real servers, scripted servers.
#![allow(dead_code, unused_imports, reason = "each test binary uses a part")]

pub mod fake;
mod seed;
#[path = "../../../p2p-core/tests/bootstrap/stand_in.rs"]
pub mod stand_in;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use checkpoint::Checkpoint;
use control_api::{LayerPlacement, MemberId, PlacementTable, ServerEntry};
use expert_server::{ExpertSelection, ExpertServer, Placement, RunningServer, ServerConfig};
use p2p_core::SlotConfig;
use rand::RngExt;
use rand::rngs::StdRng;
use reference_model::LocalExperts;
pub use seed::seeded;
use switchyard_attention_client::{ClientModel, ExpertBackend, MoeClient, MoeClientBuilder};

/// A random request: some entries masked, some experts twice.
#[derive(Debug, Clone)]
pub struct Request {
    pub layer: u32,
    pub num_tokens: usize,
    pub x: Vec<f32>,
    pub idx: Vec<i32>,
    pub weights: Vec<f32>,
}

impl Request {
    pub fn random(rng: &mut StdRng, model: &ClientModel, num_tokens: usize, k: usize) -> Self {
        let hidden = model.shape.hidden as usize;
        let experts = model.shape.num_experts as i32;
        let layer = model.moe_layers[rng.random_range(0..model.moe_layers.len())];
        let x = (0..num_tokens * hidden).map(|_| rng.random_range(-2.0..2.0)).collect();
        let mask = rng.random_range(0.0..0.4);
        let mut idx: Vec<i32> = (0..num_tokens * k)
            .map(|_| if rng.random_bool(mask) { -1 } else { rng.random_range(0..experts) })
            .collect();
        // Some tokens want one expert with every entry.
        for row in idx.chunks_mut(k.max(1)) {
            if rng.random_bool(0.1) {
                row.fill(rng.random_range(0..experts));
            }
        }
        let weights = (0..num_tokens * k).map(|_| rng.random_range(-0.5..1.5)).collect();
        Self { layer, num_tokens, x, idx, weights }
    }
}

/// Largest difference, relative to the largest magnitude of the reference.
pub fn difference(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let scale = expected.iter().fold(1e-3f32, |max, v| max.max(v.abs()));
    let worst = found.iter().zip(expected).map(|(f, e)| (f - e).abs());
    // A NaN, which poisoned output is, must not be lost in `max`.
    worst.fold(0.0f32, |max, d| if d.is_nan() { f32::INFINITY } else { max.max(d) }) / scale
}

pub fn poisoned(len: usize) -> Vec<f32> {
    vec![f32::NAN; len]
}

/// The trained checkpoint of the repository, or a copy where `SWITCHYARD_TEST_MODEL` says.
pub fn tiny_dir() -> PathBuf {
    let elsewhere = std::env::var_os("SWITCHYARD_TEST_MODEL").map(PathBuf::from);
    elsewhere.unwrap_or_else(|| concat!(env!("CARGO_MANIFEST_DIR"), "/../data/tiny-moe").into())
}

/// Expected output of real servers, by another program.
pub fn local_reference(request: &Request, local: &mut LocalExperts) -> Vec<f32> {
    let mut out = poisoned(request.x.len());
    local
        .forward(request.layer, &request.x, &request.idx, &request.weights, &mut out)
        .expect("reference");
    out
}

/// Real expert servers in this process, without a control plane.
pub struct Fleet {
    pub runtime: tokio::runtime::Runtime,
    pub servers: Vec<Option<RunningServer>>,
    pub checkpoint: Arc<Checkpoint>,
    pub model: ClientModel,
    pub table: PlacementTable,
    pub slot: SlotConfig,
}

impl Fleet {
    /// `num_servers` servers, each expert on `replicas` of them.
    pub fn start(num_servers: usize, replicas: usize, slot: SlotConfig) -> Self {
        Self::of(&tiny_dir(), num_servers, replicas, slot)
    }

    /// As [`start`](Self::start) for the checkpoint in `dir`.
    pub fn of(dir: &Path, num_servers: usize, replicas: usize, slot: SlotConfig) -> Self {
        Self::with(dir, num_servers, replicas, slot, |_| {})
    }

    /// As [`of`](Self::of), with changes to the settings of each server.
    pub fn with(
        dir: &Path,
        num_servers: usize,
        replicas: usize,
        slot: SlotConfig,
        change: impl Fn(&mut ServerConfig),
    ) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("runtime");
        let checkpoint = Arc::new(Checkpoint::open(dir).expect("checkpoint"));
        let model = ClientModel::with_weights_of(&checkpoint).expect("a fingerprint");
        let holders = |expert: usize| (0..replicas).map(move |r| (expert + r) % num_servers);
        let num_experts = model.shape.num_experts as usize;
        let servers: Vec<_> = (0..num_servers)
            .map(|server| {
                let held = (0..num_experts).filter(|&e| holders(e).any(|s| s == server));
                let held = ExpertSelection::EveryLayer(held.map(|e| e as u32).collect());
                let name = format!("server-{server}");
                let mut config = ServerConfig::new(dir.to_owned(), name, Placement::Static(held));
                config.slot = slot;
                config.num_threads = 1;
                change(&mut config);
                let started = runtime.block_on(ExpertServer::start(config, |_| {}));
                Some(started.expect("server"))
            })
            .collect();
        let replicas: Vec<Vec<u32>> =
            (0..num_experts).map(|e| holders(e).map(|s| s as u32).collect()).collect();
        let addrs: Vec<String> =
            servers.iter().flatten().map(|server| server.data_addr().to_string()).collect();
        let table = table(&model, 1, &addrs, &replicas);
        Self { runtime, servers, checkpoint, model, table, slot }
    }

    pub fn builder(&self) -> MoeClientBuilder {
        // A loaded machine must not look like a dead server, except where that is the test.
        MoeClient::builder(self.model.clone())
            .placement(self.table.clone())
            .slot(self.slot)
            .deadline(Duration::from_secs(10))
            .replica_wait(Duration::from_secs(10))
    }

    pub fn local(&self) -> LocalExperts {
        LocalExperts::new(Arc::clone(&self.checkpoint))
    }

    /// Ends a server at once.
    pub fn stop(&mut self, server: usize) {
        if let Some(server) = self.servers[server].take() {
            self.runtime.block_on(server.shutdown());
        }
    }
}

/// A table with the same replicas in every layer.
pub fn table(
    model: &ClientModel,
    epoch: u64,
    addrs: &[String],
    replicas: &[Vec<u32>],
) -> PlacementTable {
    let servers = addrs.iter().enumerate().map(|(i, addr)| ServerEntry {
        member_id: MemberId::parse(&format!("m-{i}")).expect("id"),
        name: format!("server-{i}"),
        incarnation: 1,
        data_addr: addr.clone(),
        needs_tickets: false,
    });
    let layers =
        model.moe_layers.iter().map(|&layer| LayerPlacement { layer, replicas: replicas.to_vec() });
    PlacementTable {
        cluster_id: "test".to_owned(),
        epoch,
        model: Some(model.descriptor()),
        servers: servers.collect(),
        layers: layers.collect(),
    }
}

/// Waits until the client says why it is not ready, in words that have all of `words` in them.
#[track_caller]
pub fn not_ready_because(client: &MoeClient, words: &[&str]) {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let error = client.wait_ready(Duration::from_millis(300)).unwrap_err().to_string();
        if words.iter().all(|word| error.contains(word)) {
            return;
        }
        assert!(Instant::now() < until, "{error}, expected {words:?}");
    }
}

/// The value of a counter or gauge, labels summed, or of one label value.
pub fn metric(client: &MoeClient, name: &str, label: Option<&str>) -> f64 {
    let families = client.registry().gather();
    let Some(family) = families.iter().find(|family| family.name() == name) else {
        panic!("no metric {name}");
    };
    let chosen = family.get_metric().iter().filter(|metric| {
        label.is_none_or(|label| metric.get_label().iter().any(|pair| pair.value() == label))
    });
    chosen.map(|m| m.get_counter().get_value() + m.get_gauge().get_value()).sum()
}
